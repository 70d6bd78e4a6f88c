"""Start programs from tests: under the mpiexec that stands beside a Python, torchrun, or alone, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

__all__ = ["PROGRAMS", "ROOT", "TORCHRUN", "Ended", "each_mpi", "launch", "launch_and_kill", "mpiexec", "run_python"]

TORCHRUN = "torchrun"
"""In place of a Python: this one, and its torchrun."""

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "mpi_programs"
_MARK = "SPMD_TEST_LAUNCH"

# Open MPI refuses root and more processes than cores unless it is told so; the rest halves its time to start.
_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
}


class Ended(subprocess.CompletedProcess):
    """How a program ended. returncode: None where it had to be killed. launcher: what torchrun itself has printed."""

    returncode: int | None
    launcher: str = ""

    def __str__(self) -> str:
        ended = "ran out of time" if self.returncode is None else f"ended with {self.returncode}"
        return f"{self.args} {ended}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}{self.launcher}"


def mpiexec(python: str | os.PathLike = sys.executable) -> Path | None:
    """The mpiexec of the environment of this Python."""
    found = Path(python).parent / "mpiexec"
    return found if found.exists() else None


_NOT_STARTED = "The PMIx server's listener thread failed to start"

_TORCHS_START = 30.0
"""Seconds more: torch is imported by each process, on a machine that may be busy."""

OPENMPI = os.environ.get("SPMD_TEST_OPENMPI_PYTHON")

each_mpi = pytest.mark.parametrize(
    "python",
    [
        pytest.param(
            sys.executable,
            id="mpich",
            marks=[pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")],
        ),
        pytest.param(
            OPENMPI,
            id="openmpi",
            marks=[
                pytest.mark.openmpi,
                pytest.mark.skipif(OPENMPI is None, reason="SPMD_TEST_OPENMPI_PYTHON is unset"),
            ],
        ),
    ],
)
"""Runs a test under the mpiexec of this environment, and again under Open MPI where there is one: with -m full, or in
the ordinary run too if it is marked `both`."""


@cache
def _is_openmpi(command: Path) -> bool:
    said = subprocess.run(
        [command, "--version"], capture_output=True, text=True, check=False, env=os.environ | _OPENMPI
    )
    return "Open MPI" in said.stdout or "OpenRTE" in said.stdout


def launch(
    program: str | os.PathLike,
    *args: str,
    n: int = 4,
    python: str | os.PathLike = sys.executable,
    timeout=60.0,
    before: Sequence[str] = (),
    **env: str,
) -> Ended:
    """`mpiexec -n n python program args`, by the mpiexec beside `python`. env: more environment variables. before:
    words that start the launcher.

    python=TORCHRUN: `torchrun --nproc-per-node n program args`, and what the processes print, one after the other.
    """
    if python == TORCHRUN:
        return _torchrun([program, *args], n, timeout + _TORCHS_START, env, before)
    command, more = _by_mpiexec([program, *args], n, python)
    ended = _run([*before, *command], timeout, more | env)
    if _NOT_STARTED in ended.stderr:  # Open MPI's launcher itself, on a busy machine: it has started no process
        ended = _run([*before, *command], timeout, more | env)
    return ended


def _by_mpiexec(words: list, n: int, python: str | os.PathLike) -> tuple[list, dict[str, str]]:
    """The command, and variables that it needs."""
    command = mpiexec(python)
    assert command is not None, f"no mpiexec beside {python}"
    openmpi = _is_openmpi(command)
    options = ["--oversubscribe"] if openmpi else []
    return [command, *options, "-n", str(n), python, *words], _OPENMPI if openmpi else {}


def launch_and_kill(
    program: str | os.PathLike, *args: str, n: int, python: str | os.PathLike, when: Callable[[], object]
) -> None:
    """Start a program under its launcher, and kill the launcher and all processes as soon as `when` returns."""
    if python == TORCHRUN:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={n}",
            program,
            *args,
        ]
        more = {}
    else:
        command, more = _by_mpiexec([program, *args], n, python)
    process, mark = _start(command, more, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        when()
    finally:
        os.killpg(process.pid, signal.SIGSTOP)  # It starts no other while its processes are killed.
        _kill_marked(mark)
        process.wait()
        _sweep()


def _torchrun(words: list, n: int, timeout: float, env: dict[str, str], before: Sequence[str] = ()) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--standalone", f"--nproc-per-node={n}", f"--log-dir={folder}", "--redirects=3"]
        # torchrun forgets the groups of its processes where it is killed itself: their marks tell them.
        ended = _run([*before, sys.executable, "-m", "torch.distributed.run", *options, *words], timeout, env)
        ended.launcher = ended.stdout + ended.stderr
        ended.stdout, ended.stderr = (
            "".join(path.read_text(errors="replace") for path in sorted(Path(folder).rglob(f"{name}.log")))
            for name in ("stdout", "stderr")
        )
    return ended


def run_python(*args: str | os.PathLike, python: str | os.PathLike = sys.executable, timeout=60.0, **env: str) -> Ended:
    """`python args` in a process of its own."""
    return _run([python, *args], timeout, env)


def _run(command: list, timeout: float, env: dict[str, str]) -> Ended:
    process, mark = _start(command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        _kill(process, mark)
        stdout, stderr = process.communicate()
        status = None
    except BaseException:
        _kill(process, mark)
        raise
    if status != 0:
        _sweep()
    ended = Ended(process.args, 0, stdout, stderr)
    ended.returncode = status
    return ended


def _start(command: list, env: dict[str, str], **output: int) -> tuple[subprocess.Popen, str]:
    """A process in a group of its own, and the mark that it and all that it starts have in their environment."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    process = subprocess.Popen(
        [os.fspath(c) for c in command],
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": path, _MARK: mark} | env,
        **output,
    )
    return process, mark


def _kill(process: subprocess.Popen, mark: str) -> None:
    """End the group of processes, and those that a launcher has put into groups of their own."""
    os.killpg(process.pid, signal.SIGTERM)  # A launcher tidies up.
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _kill_marked(mark)


def _kill_marked(mark: str) -> None:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue


def _sweep() -> None:
    """Remove the shared memory that jobs of MPICH leave behind when they are aborted, 4 MB each: what nobody maps."""
    left = {str(p) for p in Path("/dev/shm").glob("mpich_shm_*") if p.stat().st_mtime < time.time() - 5}
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with suppress(OSError):
            left -= {line.rpartition(" ")[2] for line in maps.read_text().splitlines()}
    for path in left:
        with suppress(OSError):
            os.unlink(path)
