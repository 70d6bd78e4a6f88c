"""Random jobs: programs of several processes that start, make meshes, run maps, catch errors, fork, use threads and
signals, and end, in good order or by a fault of one of them at one moment.

`draw` makes a job from a seed, `run` runs it, and `verdict` says what is wrong with how it ended: too late, with a
status of 0 after a fault, with another status without one, or with a wrong number.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from host_pair import run_on_hosts
from launch import TORCHRUN, Ended, launch, run_python

from spmd.transport.processes.shared_files import _NAME, _launcher_has_ended

__all__ = ["Job", "draw", "leftovers", "run", "verdict"]

TIMEOUT = 5
"""SPMD_TIMEOUT of the jobs, in seconds."""
LIMIT = 60.0
"""Seconds after which a job is killed. It has to start and to import, on a machine that may be busy; then come TIMEOUT
or ten seconds, and what torchrun waits for a process that is stopped."""

HOSTS = {"mpi on two hosts": "mpirun", "torchrun on two hosts": "torchrun"}
"""The jobs on two hosts, and the scripts that start them."""

HEAD = """
import os, signal, sys, threading, time
RANK = int(next((os.environ[k] for k in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK") if k in os.environ), 0))
SIZE = {size}


def need(true):
    if not true:
        print("WRONG NUMBER", flush=True)
        os.write(2, b"WRONG NUMBER\\n")
        os.kill(os.getpid(), signal.SIGABRT)


def background():
    a = np.ones((64, 64))
    for _ in range(300):
        a = a @ a / 64.0
"""

STEPS = {
    "map": "need(spmd.map(lambda x: spmd.psum(x.sum(), 'x'), P('x'), P())(X).numpy() == X.sum())",
    "shift": "need((spmd.map(lambda x: spmd.shift(x, 'x', 1), P('x'), P('x'))(X).numpy() == np.roll(X, 3)).all())",
    "grad": ("need((spmd.grad(spmd.map(lambda x: spmd.psum((x * x).sum(), 'x'), P('x'), P()))(X) == 2 * X).all())"),
    "jit": (
        "J = spmd.jit(spmd.map(lambda x: spmd.psum(x.sum(), 'x'), P('x'), P()))\n"
        "for _ in range(3): need(J(spmd.put(X, P('x'))).numpy() == X.sum())"
    ),
    "matrices": "need(np.allclose(spmd.map(lambda x: spmd.psum(x.reshape(3, 1) @ x.reshape(1, 3), 'x'), P('x'), P())(X)"
    ".numpy(), X.reshape(-1, 3).T @ X.reshape(-1, 3)))",
    "caught error": """
try:
    spmd.map(lambda x: spmd.psum(x, 'x') if spmd.worker_index('x') != {odd} else {{}}['missing'], P('x'), P())(X)
except KeyError: pass
else: need(False)""",
    "caught mismatch": """
try:
    spmd.map(lambda x: spmd.psum(x, 'x') if spmd.worker_index('x') != {odd} else spmd.pmax(x, 'x'), P('x'), P())(X)
except spmd.errors.MismatchError: pass
else: need(SIZE == 1)""",
    "child": """
if RANK == {odd}:
    child = os.fork()
    if not child: os._exit(0)
    os.waitpid(child, 0)""",
    "child that exits": """
if RANK == {odd}:
    child = os.fork()
    if not child: sys.exit(0)
    os.waitpid(child, 0)""",
    "thread": "threading.Thread(target=background).start()",
    "signal": """
SEEN = []
signal.signal(signal.SIGUSR1, lambda *_: SEEN.append(1))
os.kill(os.getpid(), signal.SIGUSR1)""",
    "second mesh": "need((spmd.map(np.sin, P('y'), P('y'), mesh=spmd.Mesh(y=SIZE))(X).numpy() == np.sin(X)).all())",
}
MEETS = {"map", "shift", "grad", "jit", "matrices", "caught error", "caught mismatch", "second mesh"}
"""Steps in which all processes meet."""

FAULTS = {
    "raise": "raise ValueError('no luck')",
    "exit 3": "sys.exit(3)",
    "exit 0": "sys.exit(0)",
    "_exit 3": "os._exit(3)",
    "_exit 0": "os._exit(0)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminate": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(1000)",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(1000)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "never comes": "time.sleep(1000)",
}
INSIDE = "spmd.map(lambda x: (spmd.psum(x, 'x'), fault(), spmd.psum(x, 'x'))[0], P('x'), P())(X)"


@dataclass
class Job:
    """steps: their names; the first two are the import and the mesh. fault: what process `odd` does before step `at`,
    or, `inside`, between two collectives of a map there."""

    seed: int
    launcher: str
    size: int
    steps: list[str]
    odd: int
    fault: str | None
    at: int
    inside: bool

    @property
    def fails(self) -> bool:
        """Whether the job has to end with a status other than 0."""
        if self.fault in (None, "exit 0", "_exit 0"):
            return self.fault is not None and self.launcher != "alone" and self._awaited
        return True

    @property
    def _awaited(self) -> bool:
        return self.inside or bool((MEETS - {"caught mismatch"}).intersection(self.steps[self.at :]))

    def __str__(self) -> str:
        place = f"{self.fault} on process {self.odd} before step {self.at}{' (inside)' * self.inside}"
        return f"job {self.seed}: {self.launcher}, {self.size} processes, {self.steps}, {place}"

    def program(self) -> str:
        lines = [HEAD.format(size=self.size)]
        if self.fault is not None:
            lines.append(f"def fault():\n    if RANK == {self.odd}: {FAULTS[self.fault]}\n    return 0\n")
        for k, name in enumerate([*self.steps, ""]):
            if self.fault is not None and k == self.at:
                lines.append(INSIDE if self.inside else "fault()")
            if name == "import":
                lines.append("import numpy as np, spmd\nfrom spmd import P\nX = np.arange(3.0 * SIZE)")
            elif name == "mesh":
                lines.append("MESH = spmd.Mesh(x=SIZE); MESH.__enter__()")
            elif name:
                lines.append(STEPS[name].format(odd=self.odd))
        return "\n".join(lines) + "\n"


def draw(seed: int, launcher: str) -> Job:
    """A job; launcher: "mpi", "torchrun", these "on two hosts", or "alone" for virtual workers in one process."""
    rng = np.random.default_rng((seed, len(launcher)))
    sizes = {"mpi": (2, 5), "torchrun": (2, 3), "alone": (1, 4)}
    size = int(rng.integers(*sizes.get(launcher, (4, 5))))
    steps = ["import", "mesh", *(str(s) for s in rng.choice([*STEPS], int(rng.integers(2, 7))))]
    fault = None if rng.random() < 0.25 else str(rng.choice([*FAULTS]))
    if launcher == "alone" and fault in ("stop", "never comes"):
        fault = "kill"  # nobody waits for the only process
    at = int(rng.integers(len(steps) + 1))
    inside = at >= 2 and rng.random() < 0.4
    odd = int(rng.integers(size)) if launcher != "alone" else 0
    job = Job(seed, launcher, size, steps, odd, fault, at, inside)
    if fault in ("stop", "never comes") and not job._awaited:
        job.steps.append("map")
    if not inside and "caught mismatch" in job.steps[at:]:
        job.steps.append("map")  # an error that a process has left is caught there, too
    return job


def run(job: Job, folder: Path, hosts: str = "") -> Ended:
    """Run a job. hosts: the pair of those on two hosts."""
    path = folder / f"job_{job.launcher}_{job.seed}.py"
    path.write_text(job.program())
    env = {"SPMD_TIMEOUT": str(TIMEOUT)}
    if job.launcher == "alone":
        return run_python(path, timeout=LIMIT, **env)
    if job.launcher in HOSTS:
        done = run_on_hosts(hosts, HOSTS[job.launcher], path, limit=round(LIMIT) + 30, **env)
        ended = Ended(done.args, 0, done.stdout, done.stderr)
        ended.returncode = None if done.returncode == 124 else done.returncode
        return ended
    return launch(
        path, n=job.size, python=TORCHRUN if job.launcher == "torchrun" else sys.executable, timeout=LIMIT, **env
    )


def verdict(job: Job, ended: Ended) -> str:
    """What is wrong with how a job ended; nothing where it is as it should be."""
    if ended.returncode is None:
        wrong = "outlived its limit"
    elif "WRONG NUMBER" in ended.stdout + ended.stderr:
        wrong = "gave a wrong number"
    elif job.fails and ended.returncode == 0:
        wrong = "ended with 0 after a fault"
    elif not job.fails and ended.returncode != 0:
        wrong = "ended with another status than 0"
    else:
        return ""
    return f"{job}\n{wrong}\n{job.program()}\n{ended}"


def leftovers() -> set[str]:
    """Files of the library in /dev/shm and in the folder for temporary files, but those of jobs that other tests run
    meanwhile, whose launchers are there."""
    folders = {Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp"))}
    found = [p for folder in folders if folder.is_dir() for p in folder.glob("*spmd*") if not p.is_dir()]
    return {str(p) for p in found if _NAME.fullmatch(p.name) is None or _launcher_has_ended(p.name)}
