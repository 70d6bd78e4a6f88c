"""A contest: jobs of their own that do the same work in turn, round after round.

A contestant is a process, or as many as its engine needs, started by `python`, mpiexec or torchrun. It builds a case,
runs it when told to, waits without using a processor while others run, and says at the end what it has computed. So
a noisy machine disturbs all alike, no contestant's threads or memory burden another's, and a contestant that computes
something else is no contestant.

    section = Section("w5", "4096x4096 float32, rows to columns and back")

    @section.contestant("spmd")
    def ours(quick):
        return {"round trip": lambda: Case(step, tell)}
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import importlib.util
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

__all__ = [
    "KEEPING",
    "LARGE_PAGES",
    "ONE_THREAD",
    "TOLD",
    "TWO_DEVICES",
    "Builders",
    "Case",
    "Measured",
    "Section",
    "Table",
    "by_steps",
    "by_the_faster",
    "compete",
    "contend",
    "faster",
    "in_turns",
    "in_two_threads",
    "jitted",
    "main",
    "own_folder",
    "repeated",
    "room",
]

ROUNDS = 11
QUICK_ROUNDS = 3
LEAST = 0.03
"""Seconds that a contestant is to work in a round; half of that is enough."""
LONG, SELDOM = 2.0, 4
"""Who takes so many seconds for a repetition takes part in every fourth round."""

HINDERING = {"PYTHONDONTWRITEBYTECODE", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}
"""Variables that no contestant is given: they would have every import compile anew, and OpenBLAS take other kernels
than those that it chooses for the processor."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
"""Environments: of a process that is to use one core, and of JAX on two devices of the CPU."""

LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_ARENA_MAX": "1"}
"""Environments of who leaves it to the C library where large arrays lie. It asks the system for new pages of 4 KB for
each, unless it is told to ask for large ones, as NumPy does by itself; or to keep what it has, as ours does. It keeps
64 MB in its first arena only: whose threads have arenas of their own takes 24 ms for what takes 16 in that one."""
TOLD = ", large pages"
"""How the name of a contestant ends that is another one, but that its C library is told so."""


def repeated(step: Callable[[], Any]) -> Callable[[int], float]:
    """Seconds per step, of so many in a row."""

    def run(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begun) / count

    return run


def room(shape: int | tuple[int, ...]) -> np.ndarray:
    """Float32 zeros where torch and JAX would have put them: at a multiple of 64 bytes. NumPy puts what is large 16
    bytes behind one, and to write there takes up to twice as long. The pages are in use, large ones where there are."""
    nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * 4
    memory = np.empty(nbytes + 64, np.uint8)
    memory.fill(0)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(np.float32).reshape(shape)


def torch_with(threads: int, group: bool = False) -> Any:
    """torch, on so many threads; with a group, one of the processes that gloo connects."""
    import torch

    torch.set_num_threads(threads)
    if group and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return torch


def in_two_threads(*works: Callable[[int], Any]) -> Callable[[], None]:
    """A step in which, for one work after the other, one thread does work(0) and another work(1), at once."""
    other = ThreadPoolExecutor(1)

    def step() -> None:
        for work in works:
            second = other.submit(work, 1)
            work(0)
            second.result()

    return step


def by_steps(start: Callable[[], Any], step: Callable[[Any], tuple[Any, Any]]) -> tuple[Callable[[], None], Any]:
    """What takes a step of training on from the one before, and what gives the loss and the parameters of the third
    step from the start. start: the parameters at first. step: these to the loss and the next."""
    params = start()

    def once() -> None:
        nonlocal params
        _, params = step(params)

    def third() -> tuple[Any, Any]:
        value, mine = None, start()
        for _ in range(3):
            value, mine = step(mine)
        return value, mine

    return once, third


@dataclass
class Case:
    """Work that is ready to be done.

    run: the seconds of one of so many repetitions. tell: what has been computed, as arrays that all contestants must
    agree on; called in all processes of a job, and listened to in the first. drop: let go of what a repetition has left
    behind, gradients say, so that the peak of the next one has them in it. kept: the bytes of what cannot be let go of,
    and would be made in each repetition if it were.
    """

    run: Callable[[int], float]
    tell: Callable[[], Sequence[Any]]
    drop: Callable[[], Any] = lambda: None
    kept: int = 0


def in_turns(*runs: Callable[[int], float]) -> list[float]:
    """Seconds of a repetition of each, warmed up: the median of rounds that they take in turns, as in the contest."""
    for run in runs:
        run(2)
    rounds = [[run(2) for run in runs] for _ in range(_TRIALS)]
    return [median(seconds) for seconds in zip(*rounds, strict=True)]


_TRIALS = 9


def faster(*cases: Case) -> Case:
    """The one that takes less time."""
    took = in_turns(*(case.run for case in cases))
    return cases[took.index(min(took))]


def by_the_faster(made: Callable[[Any, Any], Case]) -> Case:
    """The faster of two cases, made of copy(to, x) and add(out, x, y): NumPy's own, and, where numba is, those that
    write past the caches. For limits, which are not to be slower than any library."""
    from spmd.kernels import jit
    from spmd.kernels.memory import nontemporal

    def done(way: Callable[..., bool], *arrays: Any) -> None:
        if not way(*arrays):
            raise ValueError("these arrays are not for what writes past the caches")

    ways: list[Any] = [(np.copyto, lambda out, x, y: np.add(x, y, out=out))]
    if jit.available():
        ways.append((partial(done, nontemporal.copy), partial(done, nontemporal.add)))
    return faster(*(made(*way) for way in ways))


def jitted(step: Callable[..., Any], *args: Any) -> Case:
    """A jitted step of JAX's, that gives a tree of arrays."""
    import jax

    step = jax.jit(step)
    return Case(
        repeated(lambda: jax.block_until_ready(step(*args))),
        lambda: [np.asarray(a) for a in jax.tree_util.tree_leaves(step(*args))],
    )


Builders = dict[str, Callable[[], Case]]


@dataclass(frozen=True)
class Contestant:
    """launcher: "python", "mpiexec", "mpiexec-openmpi" or "torchrun". needs: what must be installed for it."""

    name: str
    build: Callable[[bool], Builders]
    launcher: str
    processes: int
    env: dict[str, str]
    needs: tuple[str, ...]


@dataclass
class Section:
    """One table. rtol: how far apart what contestants tell may be, relative to its largest entry."""

    name: str
    title: str
    rtol: float = 1e-5
    memory: bool = False
    ours: str = "spmd"
    contestants: dict[str, Contestant] = field(default_factory=dict)

    def contestant(
        self,
        name: str,
        *,
        launcher: str = "python",
        processes: int = 1,
        env: dict[str, str] | None = None,
        needs: tuple[str, ...] = (),
    ) -> Callable[[Callable[[bool], Builders]], Callable[[bool], Builders]]:
        """Declare what gives the cases of a contestant, by their names; called with whether the run is a quick one."""

        def declare(build: Callable[[bool], Builders]) -> Callable[[bool], Builders]:
            self.contestants[name] = Contestant(name, build, launcher, processes, env or {}, needs)
            return build

        return declare


@dataclass
class Measured:
    """What one contestant showed in one case. seconds: of a repetition, one entry a round. peak: bytes above the start,
    of the process that takes the most, times its processes."""

    seconds: list[float]
    peak: int | None = None

    @property
    def median(self) -> float:
        return median(self.seconds)


# In a job


def contend(module: str, section: str, name: str, quick: bool) -> None:
    """A contestant's process: does what it is told over a socket, on which it waits without using a processor. The
    first process of a contestant answers; all say how much memory they take."""
    first = int(os.environ.get("RANK", os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))) == 0
    line = socket.socket(socket.AF_UNIX)
    line.connect(os.environ[_ORDERS])
    talk = line.makefile("rw")
    sys.stdout = sys.stderr

    def answer(what: Any, by_all: bool = False) -> None:
        if first or by_all:
            print(json.dumps(what), file=talk, flush=True)

    print(json.dumps(first), file=talk, flush=True)
    found: Section = getattr(importlib.import_module(module), section)
    builders = found.contestants[name].build(quick)
    answer(list(builders))
    case: Case | None = None
    for order, *args in map(json.loads, talk):
        if order == "build":
            case = None
            gc.collect()
            case = builders[args[0]]()
            case.run(1)
            answer(case.run(1))
        elif order in ("run", "run at once"):
            assert case is not None
            count = int(args[0])
            # Others have had the caches, and threads sleep that are about to be needed. A long repetition is warm soon.
            if order == "run":
                case.run(1 + count // 4)
            answer(case.run(count))
        elif order == "tell":
            assert case is not None
            answer([_fingerprint(np.asarray(x)) for x in case.tell()])
        elif order == "peak":
            case = None
            gc.collect()
            _small_pages()
            case = builders[args[0]]()
            # What is compiled or tried out first, and what is freed but kept, is no part of a repetition.
            case.run(3)
            case.drop()
            gc.collect()
            _release()
            answer(case.kept + _peak(case), by_all=True)


_ORDERS = "BENCHMARK_ORDERS"
"""The variable that names the socket on which a job is told what to do."""


def own_folder() -> Path:
    """Where the processes of this job may make a folder. It goes when the contest ends."""
    return Path(os.environ[_ORDERS]).with_suffix(".files")


def _fingerprint(x: np.ndarray) -> Fingerprint:
    """The sum of an array's entries, that of their sizes, and one that moved entries change; and some entries, those
    at the edges and others."""
    x = np.abs(x) if x.dtype.kind == "c" else x
    edges = x[[0, -1]].reshape(-1) if x.ndim and x.size else x.reshape(-1)
    x = x.astype(np.float64).reshape(-1)
    sums = [float(x.sum()), float(np.abs(x).sum()), float(np.cos(np.arange(len(x)) % 1000) @ x)]
    places = np.random.default_rng(len(x)).integers(0, max(1, len(x)), min(64, len(x)))
    return sums, [*x[places].tolist(), *edges[:: 1 + len(edges) // 16].astype(np.float64).tolist()]


_PR_SET_THP_DISABLE = 41


def _small_pages() -> None:
    """Memory comes in pages of 4 KB from now on: of one of 2 MB all counts, though an array ends at its beginning."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL("libc.so.6").prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def _release() -> None:
    """Give back to the system what is held in reserve."""
    buffers = sys.modules.get("spmd.kernels.memory.pool")
    if buffers is not None:
        buffers.release()
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _peak(case: Case) -> int:
    """The most memory that a repetition takes, above what is taken before it, in bytes; by the system's account. What
    several processes look at counts once: a part for each. A job's processes wait for each other here: one that has not
    let go of its memory yet would be looked at still."""
    time.sleep(_SOON)
    before, common = _status("VmRSS"), _of_others()
    Path("/proc/self/clear_refs").write_text("5")
    case.run(1)
    most = _status("VmHWM")
    time.sleep(_SOON)
    return most - before - (_of_others() - common)


_SOON = 0.3
"""Seconds after which all processes of a job have come to the same place."""


def _of_others() -> int:
    """Of the shared memory that this process has looked at, the parts of the others that look at it too."""
    return _status("RssShmem") - _status("Pss_Shmem", "smaps_rollup")


def _status(name: str, table: str = "status") -> int:
    for line in Path("/proc/self", table).read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/{table}")


# The contest


class Ended(RuntimeError):
    """A contestant has ended before its time."""

    def __str__(self) -> str:
        return super().__str__().strip()

    @property
    def reason(self) -> str:
        """The line that names the error. Launchers write more below it."""
        lines = str(self).splitlines()
        return next((line.strip() for line in reversed(lines) if _ERROR.search(line)), lines[-1])


_ERROR = re.compile(r"^(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")
"""How the last line of a traceback begins."""


class Job:
    """A contestant at work."""

    def __init__(self, module: str, section: str, who: Contestant, quick: bool, folder: Path):
        place = folder / f"{len(list(folder.iterdir()))}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(place))
        listener.listen(who.processes)
        mine = [sys.executable, "-m", "benchmarks", "--contend", module, section, who.name, str(int(quick))]
        n = str(who.processes)
        command = {
            "python": lambda: mine,
            "mpiexec": lambda: [str(_mpiexec(sys.executable)), "-n", n, *mine],
            "mpiexec-openmpi": lambda: _by_openmpi(os.environ[_OPENMPI], n, mine),
            "torchrun": lambda: [*_TORCHRUN, n, *mine[1:]],
        }[who.launcher]()
        env = {
            **{name: value for name, value in os.environ.items() if name not in HINDERING},
            _ORDERS: str(place),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **who.env,
        }
        self.errors = place.with_suffix(".err").open("w+")
        self.process = subprocess.Popen(command, stdout=self.errors, stderr=self.errors, text=True, env=env)
        self.lines: list[Any] = []
        listener.settimeout(0.2)
        while len(self.lines) < who.processes:
            try:
                talk = listener.accept()[0].makefile("rw")
            except TimeoutError:
                if self.process.poll() is not None:
                    raise self._ended() from None
                continue
            first = json.loads(talk.readline())
            self.lines.insert(0 if first else len(self.lines), talk)
        listener.close()
        self.cases: list[str] = self.answer()

    def ask(self, *order: Any) -> Any:
        """The answer of the first process."""
        self._tell(order)
        return self.answer()

    def ask_all(self, *order: Any) -> list[Any]:
        """The answers of all processes."""
        self._tell(order)
        return [self.answer(k) for k in range(len(self.lines))]

    def _tell(self, order: Sequence[Any]) -> None:
        try:
            for talk in self.lines:
                print(json.dumps([str(x) for x in order]), file=talk, flush=True)
        except OSError:
            raise self._ended() from None

    def answer(self, process: int = 0) -> Any:
        line = self.lines[process].readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> Ended:
        self.process.wait()
        self.errors.seek(0)
        return Ended(f"a contestant ended: {self.process.args}\n{self.errors.read()[-2000:]}")

    def end(self) -> None:
        """Hang up: that ends it."""
        for talk in self.lines:
            with contextlib.suppress(OSError):
                talk.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.errors.close()


_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


_OPENMPI = "BENCHMARK_OPENMPI_PYTHON"


def _mpiexec(python: str) -> Path:
    """The launcher of the environment of this Python."""
    return Path(python).with_name("mpiexec")


def _by_openmpi(python: str, n: str, mine: list[str]) -> list[str]:
    return [str(_mpiexec(python)), "--oversubscribe", "-n", n, python, *mine[1:]]


def missing(who: Contestant) -> str:
    """What is not installed of what a contestant needs."""
    lacks = [name for name in who.needs if importlib.util.find_spec(name) is None]
    if who.launcher == "mpiexec-openmpi":
        python = os.environ.get(_OPENMPI, "")
        if not python:
            return _OPENMPI
        lacks = [f"{_OPENMPI}: no {path}" for path in (Path(python), _mpiexec(python)) if not path.exists()]
    elif who.launcher == "mpiexec":
        lacks += [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
        lacks += [] if _mpiexec(sys.executable).exists() else [str(_mpiexec(sys.executable))]
    elif who.launcher == "torchrun" and importlib.util.find_spec("torch") is None:
        lacks.append("torch")
    return ", ".join(lacks)


@dataclass
class Table:
    """cases → contestants → what they showed. stolen: for each case the share of two cores that other work took, one
    entry a round. absent: contestants that did not take part, and why. parted: those that computed something else.
    offered: all cases that there are. paces: as stolen, the seconds that a fixed piece of Python took on the cores."""

    section: Section
    rows: dict[str, dict[str, Measured]] = field(default_factory=dict)
    stolen: dict[str, list[float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    parted: list[str] = field(default_factory=list)
    offered: list[str] = field(default_factory=list)
    paces: dict[str, list[float]] = field(default_factory=dict)

    def leave(self, name: str, when: str, error: Ended) -> None:
        """A contestant has ended; without ours there is no contest."""
        if name == self.section.ours:
            raise error
        self.absent[name] = f"it ended in {when}: {error.reason}"


def compete(module: str, attribute: str, quick: bool, only: str = "", say: Callable[[str], None] = print) -> Table:
    """All contestants of a section against each other. only: cases whose names hold this."""
    section: Section = getattr(importlib.import_module(module), attribute)
    table = Table(section)
    with tempfile.TemporaryDirectory(dir=_near()) as name, contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for who in section.contestants.values():
            lacks = missing(who)
            if lacks:
                table.absent[who.name] = f"needs {lacks}"
                continue
            try:
                jobs[who.name] = Job(module, attribute, who, quick, Path(name))
            except Ended as error:
                table.leave(who.name, "the start", error)
                continue
            stack.callback(jobs[who.name].end)
        table.offered = [*dict.fromkeys(c for job in jobs.values() for c in job.cases)]
        for case in (c for c in table.offered if only in c):
            say(f"  {case}")
            able = {n: j for n, j in jobs.items() if case in j.cases and n not in table.absent}
            table.rows[case] = _contest(case, able, table, quick)
        stack.close()
        if section.memory:
            _weigh(module, attribute, table, quick, Path(name))
    return table


def _near() -> str | None:
    """Where to make a folder for sockets, whose paths have room for a hundred bytes; None for the usual place."""
    return None if len(os.fsencode(tempfile.gettempdir())) < 80 else "/tmp"


def _contest(case: str, jobs: dict[str, Job], table: Table, quick: bool) -> dict[str, Measured]:
    live = dict(jobs)

    def ask(name: str, *order: Any) -> Any:
        try:
            return live[name].ask(*order)
        except Ended as error:
            del live[name]
            table.leave(name, case, error)

    counts, long = {}, set()
    for name in jobs:
        took, counts[name] = ask(name, "build", case), 0
        # The first repetitions may take a hundred times as long as what follows: until so many are long enough.
        while took is not None and took * counts[name] < LEAST / 2:
            counts[name] = max(1, 2 * counts[name], round(LEAST / max(took, 1e-7)))
            took = ask(name, "run", counts[name])
        if took is not None and took > LONG:
            long.add(name)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    stolen, paces = table.stolen[case], table.paces[case] = [], []
    for k in range(QUICK_ROUNDS if quick else ROUNDS):
        stolen.append(share_of_others())
        paces.append(pace())
        for name in list(live):
            if name not in long:
                seconds[name].append(ask(name, "run", counts[name]))
            elif k % SELDOM == 0:
                seconds[name].append(ask(name, "run at once", 1))
    told = {name: ask(name, "tell") for name in list(live)}
    told = {name: told[name] for name in live}
    found = {name: Measured(seconds[name]) for name in live}
    ours = told.get(table.section.ours) or next(iter(told.values()), [])
    for name, numbers in told.items():
        if not _agree(numbers, ours, table.section.rtol):
            table.parted.append(f"{name}, {case}")
    return found


def _weigh(module: str, attribute: str, table: Table, quick: bool, folder: Path) -> None:
    """Peak memory, in jobs whose allocator gives every large array pages of its own and hands them back at once: what
    it kept would count as taken before."""
    for who in table.section.contestants.values():
        rows = {case: row[who.name] for case, row in table.rows.items() if who.name in row}
        if not rows or who.name.endswith(TOLD):
            continue
        env = {name: value for name, value in who.env.items() if name not in KEEPING.keys() | LARGE_PAGES}
        try:
            job = Job(module, attribute, replace(who, env={**env, "MALLOC_MMAP_THRESHOLD_": "65536"}), quick, folder)
        except Ended as error:
            table.leave(who.name, "the weighing", error)
            continue
        try:
            for case, shown in rows.items():
                shown.peak = max(job.ask_all("peak", case)) * who.processes
        except Ended as error:
            table.leave(who.name, "the weighing", error)
        finally:
            job.end()


Fingerprint = tuple[list[float], list[float]]
"""See `_fingerprint`."""


def _agree(a: Sequence[Fingerprint], b: Sequence[Fingerprint], rtol: float) -> bool:
    """Whether what two contestants tell is the same, all of it finite; one that tells nothing computes nothing, as a
    limit does. In sums roundings cancel out, in single entries they do not."""
    if not a or not b:
        return True
    if not all(math.isfinite(number) for told in (*a, *b) for some in told for number in some):
        return False
    rtols = rtol, _ROUNDED * rtol
    return len(a) == len(b) and all(
        len(x) == len(y) and np.allclose(x, y, rtol=0, atol=some * max(map(abs, (*x, *y)), default=0.0))
        for one, other in zip(a, b, strict=True)
        for x, y, some in zip(one, other, rtols, strict=True)
    )


_ROUNDED = 30
"""How many times further apart single entries may be than sums are, each relative to the largest."""


def share_of_others() -> float:
    """The share of two cores that is not ours to have: of two threads that compute, what they did not get."""
    time.sleep(_SETTLING)
    shares = []

    def work() -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(4):
            hashlib.sha256(_SOMETHING)
        shares.append((time.thread_time() - cpu) / (time.perf_counter() - wall))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return max(0.0, 1 - sum(shares) / 2)


def pace() -> float:
    """The seconds of the processor that a fixed piece of Python takes, in the mean of the cores. Where a core is one of
    two threads of a real one, and somebody else has the other, it takes nearly twice as long, and no time is lost that
    a system could count."""
    cores, took = os.sched_getaffinity(0), []
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            took.append(min(_count_down(1 << 14) for _ in range(3)))  # a core that was idle is slow at first
    finally:
        os.sched_setaffinity(0, cores)
    return sum(took) / len(took)


def _count_down(n: int) -> float:
    began = time.thread_time()
    while n:
        n -= 1
    return time.thread_time() - began


_SOMETHING = bytes(1 << 20)
_SETTLING = 0.01
"""Seconds until threads that look for work in vain have gone to sleep."""


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("section")
    parser.add_argument("name")
    parser.add_argument("quick", type=int)
    given = parser.parse_args(args)
    contend(given.module, given.section, given.name, bool(given.quick))
