"""The start and the end of MPI in a process. Neither may wait for ever.

MPI_Init and MPI_Finalize return when all processes of the job have called them. If a process has ended or is stopped,
the others wait there, in C, where no exception and no Python signal handler ends the wait. So both are called without
the interpreter's lock, while a thread checks the other processes. It can only report, and end the job.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from spmd.errors import DeadlockError, StallError, caller, message
from spmd.transport.launcher import LAUNCHERS, LOCAL_RANKS, number_in, raw_exit, tell_launcher
from spmd.transport.processes.shared_files import STATUS, stat_of
from spmd.transport.processes.status_board import LEFT, StatusBoard

__all__ = ["await_others", "finalize", "initialize"]

_CHECK_INTERVAL = 0.1
"""Seconds between two checks of the other processes."""
_CONFIRM_SECONDS = 2.0
"""Seconds for which a process must be absent before others report it: launchers start one after another."""
_REPORT_GRACE = 2.0
"""Seconds that the first waiting process gets to report and end the job, before others do."""
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables in which launchers give the number of processes that they start on this host."""
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
"""Variables in which launchers give the size of the world, and the rank of this process."""


class Peer(NamedTuple):
    """A process of this job on this host. loaded: whether it has an MPI library in its memory."""

    pid: int
    stopped: bool
    loaded: bool

    def does(self) -> str:
        if self.stopped:
            return f"(process {self.pid}) is stopped"
        return f"(process {self.pid}) " + ("waits as well" if self.loaded else "has not started MPI")


def initialize(mpi: Any, rc: Any, limit: float) -> None:
    """Start MPI, with the options of mpi4py's `rc`. Reports and ends the job if a process of this host has ended
    without starting MPI, or not all have started it within `limit` seconds (0: no limit)."""
    library, provided = ctypes.CDLL(mpi.__file__), ctypes.c_int()
    if not hasattr(library, "MPI_Init_thread"):
        mpi.Init_thread()
        return
    level = getattr(mpi, f"THREAD_{rc.thread_level.upper()}" if rc.threads else "THREAD_SINGLE")
    with _calling_meanwhile(_Start(limit)):
        failed = library.MPI_Init_thread(None, None, ctypes.c_int(level), ctypes.byref(provided))
    if failed:
        raise RuntimeError(f"MPI_Init_thread failed: {mpi.Get_error_string(failed)}")
    if rc.errors == "exception":  # as mpi4py does where it starts MPI
        for comm in mpi.COMM_SELF, mpi.COMM_WORLD:
            comm.Set_errhandler(mpi.ERRORS_RETURN)


@contextmanager
def _calling_meanwhile(check: Callable[[float], None]) -> Iterator[None]:
    """Call `check` repeatedly with the elapsed seconds while the block runs."""
    done, started = threading.Event(), time.monotonic()

    def run() -> None:
        while not done.wait(_CHECK_INTERVAL):
            check(time.monotonic() - started)

    threading.Thread(target=run, name="spmd-lifetime", daemon=True).start()
    try:
        yield
    finally:
        done.set()


class _Start:
    """The check while MPI starts. A process that is absent may still be started: it must stay absent for a while."""

    def __init__(self, limit: float):
        self.limit = limit
        self.where = _source_line()
        self.count = number_in(_LOCAL_SIZES) or 0
        self.single_host = self.count == number_in(_SIZES)
        self.variables = _RANKS if self.single_host else LOCAL_RANKS[::-1]  # MPICH's first, as its count
        self.me = number_in(self.variables)
        self.next = _CHECK_INTERVAL
        self.absent: set[int] = set()
        self.since = 0.0

    def __call__(self, waited: float) -> None:
        if self.me is None or waited < self.next:
            if self.me is None and 0 < self.limit < waited:
                _end(StallError, self._text(f"no start of all processes within {self.limit:g} s", []))
            return
        self.next = waited + min(1.0, waited / 4)  # reading /proc is slow if there are many processes
        peers = _peers(next(name for name in self.variables if name in os.environ))
        absent = set(range(self.count)) - peers.keys() if self.me in peers else set()
        if absent != self.absent:
            self.absent, self.since = absent, waited
        ended = bool(absent) and waited - self.since > _CONFIRM_SECONDS
        late = 0 < self.limit < waited
        first = min((k for k, p in peers.items() if p.loaded and not p.stopped), default=self.me)
        grace = 0 if self.me == first else _REPORT_GRACE
        if ended and waited - self.since > _CONFIRM_SECONDS + grace:
            who = ", ".join(map(self._name, sorted(absent)))
            _end(DeadlockError, self._text(f"{who} ended without starting MPI", []))
        if late and waited > self.limit + grace:
            lines = [f"{self._name(k)} {p.does()}" for k, p in sorted(peers.items()) if p.stopped or not p.loaded]
            lines += [f"{self._name(k)} has ended" for k in sorted(absent)]
            _end(StallError, self._text(f"no start of all processes within {self.limit:g} s", lines))

    def _name(self, number: int) -> str:
        return f"rank {number} of the world" if self.single_host else f"process {number} of this host"

    def _text(self, got: str, lines: list[str]) -> str:
        own_name = "this process" if self.me is None else self._name(self.me)
        return message(
            "the start of MPI",
            got="\n          ".join([got, *lines, f"{own_name} waits {self.where}"]),
            need="every process of the job",
            mend="let all processes make the mesh, and look for what the one that is missing has printed; "
            "SPMD_TIMEOUT=600, or more seconds, where one may come that late",
        )


def _source_line() -> str:
    frame = caller()
    return "" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"


def _end(kind: type[Exception], text: str) -> None:
    """Report like an uncaught error, and end the job. Does not call MPI: the main thread is in it, and may hold its
    locks."""
    print(f"{kind.__module__}.{kind.__qualname__}: {text}", file=sys.stderr, flush=True)
    time.sleep(_CHECK_INTERVAL)
    tell_launcher(1)
    time.sleep(_CHECK_INTERVAL)
    raw_exit(1)


def _peers(name: str) -> dict[int, Peer]:
    """The processes that this launcher has started on this host, by their numbers in the variable `name`."""
    processes = _processes(f"{name}=".encode())
    launcher = _launcher(os.getpid(), processes)
    peers: dict[int, Peer] = {}
    if launcher not in processes:  # as in a container: others may be in other containers
        return peers
    for pid, (_, stopped, number, _) in processes.items():
        if number is None or _launcher(pid, processes) != launcher:
            continue
        # A shell between launcher and program has the same number: combine what is true of either.
        before = peers.get(number, Peer(pid, False, False))
        peers[number] = Peer(max(pid, before.pid), stopped or before.stopped, before.loaded or _has_mpi(pid))
    return peers


_Row = tuple[int, bool, "int | None", bool]


def _processes(mark: bytes) -> dict[int, _Row]:
    """Per running process of this host: its parent, whether it is stopped, its number in the variable `mark`, and
    whether it is a launcher."""
    processes: dict[int, _Row] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            name, _, rest = (folder / "stat").read_bytes().rpartition(b")")
            state, parent = rest.split()[:2]
            if state in b"ZX":
                continue
            number = None
            with suppress(OSError):  # other users' processes cannot be read
                variables = (folder / "environ").read_bytes().split(b"\0")
                number = next((int(v[len(mark) :]) for v in variables if v.startswith(mark)), None)
            is_launcher = name.partition(b"(")[2].decode(errors="replace").startswith(LAUNCHERS)
            processes[int(folder.name)] = int(parent), state in b"Tt", number, is_launcher
    return processes


def _launcher(pid: int, processes: dict[int, _Row]) -> int:
    """The nearest ancestor that is a launcher, or has another number than this process."""
    number = processes[pid][2] if pid in processes else None
    while pid in processes:
        pid = processes[pid][0]
        if pid not in processes or processes[pid][3] or processes[pid][2] != number:
            break
    return pid


def _has_mpi(pid: int) -> bool:
    with suppress(OSError):
        return b"libmpi" in Path(f"/proc/{pid}/maps").read_bytes()
    return False


def await_others(status_board: StatusBoard | None, limit: float) -> None:
    """Wait until all processes of this host have left the program. Reports and ends the job if the remaining ones are
    stopped for `limit` seconds. Running ones may take any time."""
    if status_board is None or not limit:
        return
    stopped_since, started = None, time.monotonic()
    while left := [r for r in status_board.local_ranks() if status_board.local_row(r)["state"] != LEFT]:
        now = time.monotonic()
        if not all(_is_stopped(int(status_board.local_row(r)["pid"])) for r in left):
            stopped_since = None
        elif stopped_since is None:
            stopped_since = now
        elif now - stopped_since > limit + (0 if status_board.rank == _first_here(status_board) else _REPORT_GRACE):
            _end(
                StallError,
                _end_message(f"{_names(status_board, left)} stopped for {limit:g} s, before leaving the program"),
            )
        time.sleep(min(0.001 + (now - started) / 20, _CHECK_INTERVAL))


def _first_here(status_board: StatusBoard) -> int:
    """The lowest rank of this host that has left and is not stopped: it reports for all."""
    left = [r for r in status_board.local_ranks() if status_board.local_row(r)["state"] == LEFT]
    return min((r for r in left if not _is_stopped(int(status_board.local_row(r)["pid"]))), default=status_board.rank)


def _names(status_board: StatusBoard, ranks: list[int]) -> str:
    return ", ".join(f"rank {r} of the world (process {status_board.rows[r]['pid']})" for r in ranks)


def finalize(mpi: Any, status_board: StatusBoard | None, limit: float) -> None:
    """End MPI, which waits for all processes. If all are on this host and have left, but MPI takes more than `limit`
    seconds (0: no limit), report and end the job."""
    library = ctypes.CDLL(mpi.__file__)

    def check(waited: float) -> None:
        if status_board is None or not status_board.single_host or not 0 < limit < waited:
            return
        if waited > limit + (0 if status_board.rank == _first_here(status_board) else _REPORT_GRACE):
            stopped = [r for r in status_board.local_ranks() if _is_stopped(int(status_board.local_row(r)["pid"]))]
            who = f": {_names(status_board, stopped)} has died or is stopped" if stopped else ""
            _end(StallError, _end_message(f"no end of MPI within {limit:g} s{who}"))

    with _calling_meanwhile(check):
        library.MPI_Finalize()


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, or has ended."""
    fields = stat_of(pid)
    return fields is None or fields[STATUS] in "TtZX"


def _end_message(got: str) -> str:
    return message(
        "the end of the program",
        got=got,
        need="every process of the job to end",
        mend="let that process go on, or look for what it has printed",
    )
