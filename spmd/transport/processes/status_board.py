"""The status board: memory that the processes of a host share, in which each writes what it does.

Every process of a job has a row, in a file that all processes of its host map (`shared_files.py`). It writes there
what it waits for, and its count of rendezvous with each group. Other processes read the row only when a wait grows
long: to tell a deadlock, which is a cycle of waits, from a busy partner, and to report the last calls.

Each process writes only its own row, in words of eight bytes. A reader may see several rows at different moments. So a
deadlock counts only if it is seen twice, with no change in between.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from spmd.errors import caller, message
from spmd.transport.launcher import LAUNCHERS
from spmd.transport.processes.shared_files import (
    PARENT,
    STATUS,
    STIME,
    UTIME,
    SharedFile,
    elected,
    job_name,
    remove_abandoned,
    stat_of,
)

__all__ = ["FAILED", "FOLLOWS", "LEFT", "RUNNING", "WAITING", "RendezvousCount", "StatusBoard", "file_of_launcher"]

RUNNING, WAITING, FAILED, FOLLOWS, LEFT = range(5)
"""States of a process. FAILED: it ends with its own error. FOLLOWS: it ends with the error of another process."""

_GROUPS_MAX = 256
"""Groups whose rendezvous a row counts: the newest ones."""

_AWAITED_MAX = 64
"""Ranks that a row can name as those for which its process waits."""

_ROWS_MIN = 64
"""Rows of a file, if the world has as many processes: it does not matter then how many of them are on this host."""

_FAILURES_MAX = 16
"""Failed maps that a row describes: a program that catches errors may fail again before others look."""

_HISTORY_NBYTES = 1 << 14
"""Bytes for the last collectives by messages."""

_ROW = np.dtype(
    [
        ("beat", "i8"),  # changes whenever the row does, except for `counts`
        ("state", "i8"),
        ("group", "i8"),  # the rendezvous that it waits for: the number of the group,
        ("count", "i8"),  # its place among the rendezvous of the group,
        ("run", "i8"),  # and the map
        ("rank", "i8"),  # 1 + the rank in the world; 0: nobody has this row
        ("pid", "i8"),
        ("cpu", "f8"),  # seconds of processor time so far
        ("published", "i8"),  # the beat up to which `calls` is written
        ("groups", "i8", _GROUPS_MAX),  # numbers of groups,
        ("counts", "i8", _GROUPS_MAX),  # and how many of their rendezvous this process has come to
        ("awaited", "i4", _AWAITED_MAX),  # 1 + the ranks that it waits for
        ("calls", "S4096"),  # its last collectives, the latest first, a line each
        ("history", f"S{_HISTORY_NBYTES}"),  # those by messages, as `History.packed`
        ("failed_maps", "i8", _FAILURES_MAX),  # numbers of the last maps that failed here,
        ("errors", "S4096", _FAILURES_MAX),  # and their errors
        ("end", "S4096"),  # the error that it ends with
    ]
)
_NO_ROW: Any = np.zeros((), _ROW)[()]
"""The row of a process that is not known."""

_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE")
"""Variables in which launchers give the number of processes that they have started on this host."""

_SEPARATOR = "\x1f"
_BEAT, _STATE, _GROUP, _COUNT, _RUN = range(5)
_PUBLISH_INTERVAL = 0.25
"""Seconds between two `publish` calls of a process that does not wait."""


class RendezvousCount:
    """The number of rendezvous of a group that this process has come to.

    group: its number, the same in all processes. ranks: of its processes.
    """

    __slots__ = ("group", "ranks", "value")

    def __init__(self, group: int, ranks: Sequence[int]):
        self.group, self.ranks, self.value = group, ranks, 0


class StatusBoard:
    """The rows of the processes of this host, in the order in which they have come.

    rank: of this process in the world. size: of the world. single_host: whether the whole world is on this host and
    shares the file; then a process without a row has not started. file: gives the shared file of a size; where it
    fails, this process has only its own row. hosts: the processes of other hosts, if they can be asked (`hosts.Hosts`).
    history: the collectives by messages of this process. state_words: the first five fields of the row. current: the
    count of the latest rendezvous.
    """

    hosts: Any = None
    history: Any = None

    def __init__(self, rank: int, size: int, file: Callable[[int], SharedFile]):
        self.rank, self.size = rank, size
        count = max([min(size, _ROWS_MIN), *(n for n in _local_sizes() if n <= size)])
        self.file = _file_or_warning(file, count * _ROW.itemsize)
        self.rows = np.zeros(1, _ROW)
        row = self.rows[:1]
        if self.file is not None:
            rows = np.ndarray(count, _ROW, self.file.memory, self.file.offset)
            with self.file.locked():
                place = next(iter(np.flatnonzero(np.isin(rows["rank"], (0, rank + 1))).tolist()), None)
                if place is not None:
                    self.rows, row = rows, rows[place : place + 1]
                    row[:] = _NO_ROW
                    row["rank"] = rank + 1
            if place is None:  # more processes than the launcher has told of
                self.file = None
        self.single_host = self.file is not None and size in _local_sizes()
        self.file_is_linked = self.file is not None
        self._local_rows: dict[int, Any] = {}
        row["rank"] = rank + 1
        # Memoryviews take a third of the time of arrays.
        self.state_words = row.view(np.int64).reshape(-1)[:5].data
        self.row: Any = row[0]
        self.row["pid"] = os.getpid()
        self.row_counts, self.awaited = self.row["counts"].data, self.row["awaited"]
        self.latest_call: Any = None
        self.recent_calls: deque[Any] = deque(maxlen=8)
        self.counts_by_group: dict[int, RendezvousCount] = {}
        self.current: Any = None
        self.changed_counts: set[RendezvousCount] = set()
        self.shown_ranks: Any = None
        self.places: dict[int, int] = {}
        self.published_calls: list[Any] = []
        self.failure_count = 0
        self.stop = threading.Event()
        self.lock = threading.Lock()
        threading.Thread(target=self._publish_regularly, name="spmd-board", daemon=True).start()

    def rendezvous_count(self, group: int, ranks: Sequence[int]) -> RendezvousCount:
        """The rendezvous count of a group, by its number and ranks."""
        return self.counts_by_group.get(group) or self.counts_by_group.setdefault(group, RendezvousCount(group, ranks))

    def enter(self, count: RendezvousCount, call: Any) -> None:
        """This process comes to the next rendezvous of a group. Others see it after `start_waiting` or `publish`."""
        count.value += 1
        if self.current is not count:
            self.current = count
            self.changed_counts.add(count)
        if self.latest_call is not call:
            self.latest_call = call
            self.recent_calls.append(call)

    def start_waiting(self, run: int, ranks: Sequence[int] | None = None, place: tuple[int, int] | None = None) -> None:
        """Show that this process waits, in a map, for the others of its latest rendezvous, or for some processes in a
        rendezvous: the number of the group, and its count."""
        state_words, count = self.state_words, self.current
        with self.lock:
            self._count()
            self.changed_counts = {count}
        state_words[_GROUP], state_words[_COUNT] = (count.group, count.value) if place is None else place
        state_words[_RUN] = run
        awaited = count.ranks if ranks is None else ranks
        if self.shown_ranks is not awaited:
            self.shown_ranks = awaited
            named = [r + 1 for r in awaited if r != self.rank][:_AWAITED_MAX]
            self.awaited[: len(named)] = named
            self.awaited[len(named) :] = 0
        state_words[_STATE] = WAITING
        state_words[_BEAT] += 1

    def _count(self) -> None:
        """Write the rendezvous counts that have changed, that of the latest group last: it surely gets a place."""
        for count in (*self.changed_counts, self.current):
            if count is not None:
                self.row_counts[self._place(count)] = count.value

    def _place(self, count: RendezvousCount) -> int:
        """The place of a group's count in the row. If no place is free, it replaces the oldest group."""
        place = self.places.get(count.group)
        if place is None:
            place = self.places.pop(next(iter(self.places))) if len(self.places) == _GROUPS_MAX else len(self.places)
            self.places[count.group] = place
            self.row["groups"][place] = 0
            self.row_counts[place] = count.value
            self.row["groups"][place] = count.group
        return place

    def resume(self) -> None:
        """Show that this process no longer waits."""
        self.state_words[_STATE] = RUNNING
        self.state_words[_BEAT] += 1

    def withdraw(self) -> bool:
        """Take back the latest rendezvous, so that processes that come later do not rely on it.

        False if all have come: then they rely on it, and it stays. Only one process at a time may do this: meanwhile
        the others see it as absent.
        """
        with nullcontext() if self.file is None else self.file.locked():
            self._add_count(-1)
            withdrawn = bool(self.missing(self.rank))
            if not withdrawn:
                self._add_count(1)
        return withdrawn

    def _add_count(self, times: int) -> None:
        with self.lock:
            self.current.value += times
            self._count()

    def fail(self, run: int, origin: int, who: str, error: str) -> None:
        """Publish that a map has failed, by the error that worker `who` raised in process `origin`."""
        place = self.failure_count % _FAILURES_MAX
        self.failure_count += 1
        self.row["failed_maps"][place] = 0  # so that nobody reads a half-written text
        self.row["errors"][place] = f"{origin}{_SEPARATOR}{who}{_SEPARATOR}{error}".encode()[:4096]
        self.row["failed_maps"][place] = run
        self.state_words[_BEAT] += 1

    def finish(self, state: int, error: str = "") -> None:
        """Publish that this process ends with an error, or has left the program."""
        self.row["end"] = error.encode()[:4096]
        self.publish()
        self.state_words[_STATE] = state
        self.state_words[_BEAT] += 1

    def publish(self) -> None:
        """Write the last calls of this process, and its processor time."""
        with self.lock:
            self._count()
            beat, calls = int(self.state_words[_BEAT]), list(self.recent_calls)
            if calls != self.published_calls:
                self.published_calls = calls
                self.row["calls"] = "\n".join(f"{c} {c.source}" for c in reversed(calls)).encode()[:4096]
            if self.history is not None and self.history.changed:
                self.row["history"] = self.history.packed(_HISTORY_NBYTES)
            self.row["cpu"] = time.process_time()
            self.row["published"] = beat

    def close(self) -> None:
        """This process leaves the program; the last to do so removes the file."""
        self.stop.set()
        self.finish(LEFT)
        ranks = self.local_ranks()
        complete = len(ranks) == self.size or not self.single_host  # else some have not started
        if complete and all(self.local_row(r)["state"] == LEFT or self.has_died(r) for r in ranks):
            self._unlink()

    def _publish_regularly(self) -> None:
        while not self.stop.wait(_PUBLISH_INTERVAL):
            self.publish()
            if self.file_is_linked and 0 < max(_local_sizes(), default=0) <= np.count_nonzero(self.rows["pid"]):
                self._unlink()  # All have mapped it: it cannot be left behind.

    def _unlink(self) -> None:
        if self.file_is_linked and self.file is not None:
            self.file_is_linked = False
            self.file.unlink()

    def local_ranks(self) -> list[int]:
        """The processes of this host that have started."""
        return sorted((self.rows["rank"][self.rows["pid"] != 0] - 1).tolist())

    def local_row(self, rank: int) -> Any:
        """The row of a process of this host; an empty one where it has not started, or is elsewhere."""
        row = self._local_rows.get(rank)
        if row is None:
            places = np.flatnonzero((self.rows["rank"] == rank + 1) & (self.rows["pid"] != 0))
            if not len(places):
                return _NO_ROW
            row = self._local_rows[rank] = self.rows[places[0]]
        return row

    def is_local(self, rank: int) -> bool:
        """Whether a process is on this host, and has started."""
        return self.local_row(rank) is not _NO_ROW

    def known_ranks(self) -> list[int]:
        """The processes of this host, and those of hosts that have answered."""
        return sorted({*self.local_ranks(), *(() if self.hosts is None else list(self.hosts.rows))})

    def is_known(self, rank: int) -> bool:
        """Whether a process is on this host, or its host has answered."""
        return self.is_local(rank) or (self.hosts is not None and rank in self.hosts.rows)

    def row_of(self, rank: int) -> Any:
        """The row of a process, by fields; of another host, as it was a moment ago."""
        row = self.local_row(rank)
        return row if self.hosts is None or row is not _NO_ROW else self.hosts.rows.get(rank, row)

    def add_address(self, rank: int, address: bytes) -> None:
        """Add the address of another process, which matters if it is on another host."""
        if self.hosts is not None:
            self.hosts.add_address(rank, address)

    def poll(self) -> None:
        """Ask other hosts for their rows, for the next second."""
        if self.hosts is not None:
            self.hosts.poll()

    def is_fresh(self, ranks: Iterable[int], since: float) -> bool:
        """Whether the rows of these processes are newer than `since`."""
        return self.hosts is None or self.hosts.is_fresh(ranks, since)

    def cpu_seconds(self, rank: int) -> float:
        """The processor time of a process. On this host the system gives it: a process in a long call cannot write."""
        fields = stat_of(int(self.local_row(rank)["pid"])) if self.is_local(rank) else None
        if fields is None:
            return float(self.row_of(rank)["cpu"])
        return (int(fields[UTIME]) + int(fields[STIME])) / os.sysconf("SC_CLK_TCK")

    def has_died(self, rank: int) -> bool:
        if not self.is_local(rank):
            return self.hosts is not None and self.hosts.has_died(rank)
        pid = int(self.local_row(rank)["pid"])
        fields = stat_of(pid)
        if fields is not None:
            return fields[STATUS] == "Z"
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False

    def arrived(self, rank: int, group: int, count: int) -> bool:
        """Whether a process has come to this rendezvous of a group, or is past it."""
        row = self.row_of(rank)
        (places,) = np.nonzero(row["groups"] == group)
        return bool(len(places)) and int(row["counts"][places[0]]) >= count

    def missing(self, rank: int) -> list[int]:
        """The members that a process waits for, as far as is known."""
        row = self.row_of(rank)
        group, count = int(row["group"]), int(row["count"])
        if row["state"] != WAITING or group == 0:
            return []
        members = self.shown_ranks if rank == self.rank else [m - 1 for m in row["awaited"].tolist() if m]
        members_seen = [m for m in members if m != rank and (self.single_host or self.is_known(m))]
        return [m for m in members_seen if not self.arrived(m, group, count)]

    def wait_cycle(self) -> dict[int, list[int]]:
        """The processes that wait for each other, or for one that has left, each with the processes that it waits for.
        Processes in a map that has failed elsewhere are left out: they go on as soon as they see the failure."""
        ranks = self.known_ranks()
        failed = {int(run) for r in ranks for run in self.row_of(r)["failed_maps"]} - {0}
        ended = {r for r in ranks if self.row_of(r)["state"] == LEFT or self.has_died(r)}
        waits: dict[int, list[int]] = {}
        for rank in ranks:
            absent = self.missing(rank) if rank not in ended and int(self.row_of(rank)["run"]) not in failed else []
            if absent:
                waits[rank] = absent
        while True:
            closed = {r: absent for r, absent in waits.items() if any(m in waits or m in ended for m in absent)}
            if len(closed) == len(waits):
                return closed
            waits = closed

    def progress(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Numbers that change whenever the rows or the rendezvous counts of these processes do."""
        return tuple(int(self.row_of(r)["beat"]) + int(self.row_of(r)["counts"].sum()) for r in ranks)

    def have_published(self, ranks: Iterable[int]) -> bool:
        """Whether processes have published their calls since they began to wait."""
        return all(self.row_of(r)["published"] >= self.row_of(r)["beat"] for r in ranks)

    def calls(self, rank: int) -> list[str]:
        """The last collectives of a process, the latest first."""
        return self.row_of(rank)["calls"].decode(errors="replace").splitlines()

    def history_of(self, rank: int) -> bytes:
        """The last collectives by messages of a process, as it has published them."""
        return bytes(self.row_of(rank)["history"])

    def failure_of(self, run: int, ranks: Sequence[int]) -> tuple[int, str, str] | None:
        """The failure of a map, by the first of these processes that shows one: the origin, the worker, the error."""
        for r in sorted(set(ranks).intersection(self.known_ranks())):
            row = self.row_of(r)
            (places,) = np.nonzero(row["failed_maps"] == run)
            if len(places):
                origin, who, error = row["errors"][places[0]].decode(errors="replace").split(_SEPARATOR, 2)
                return int(origin), who, error
        return None

    def has_recovered(self, rank: int) -> bool:
        """Whether a process that raised an error has caught it, or has ended."""
        return int(self.row_of(rank)["state"]) in (WAITING, LEFT) or self.has_died(rank)

    def end_errors(self, state: int = FAILED) -> dict[int, str]:
        """The errors with which processes ended, by rank."""
        return {
            r: self.row_of(r)["end"].decode(errors="replace")
            for r in self.known_ranks()
            if self.row_of(r)["state"] == state
        }


def _local_sizes() -> set[int]:
    """The number of processes on this host, by each launcher's variable."""
    return {int(n) for n in map(os.environ.get, _LOCAL_SIZES) if n is not None and n.isdecimal()}


def _file_or_warning(file: Callable[[int], SharedFile], nbytes: int) -> SharedFile | None:
    try:
        return file(nbytes)
    except OSError as error:
        text = message(
            "spmd.Mesh",
            got=f"no file that the processes of this host can share ({error})",
            need=f"{nbytes >> 10} KB, by which they watch each other. Without them they ask each other over TCP, and "
            "where that is not possible, who has ended or failed shows only when a collective has made no progress for "
            "SPMD_TIMEOUT seconds; and blocks go as messages, which is slower. Results are right",
            mend="make room in /dev/shm, or TMPDIR=FOLDER, one of your own that has room",
        )
    frame = caller()
    where = ("spmd", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(text, RuntimeWarning, *where)
    return None


def file_of_launcher(nbytes: int) -> SharedFile:
    """The file of this job on this host, named after the launcher process. Raises OSError."""
    remove_abandoned()
    return elected(job_name(_launcher()), nbytes)


def _launcher() -> int:
    """The process that started those of this host. Processes in between, such as a shell or `uv run`, are skipped:
    their environment has this process's rank."""
    names = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE")
    own_variables = {f"{name}={os.environ[name]}".encode() for name in names if name in os.environ}
    parent = os.getppid()
    while own_variables:
        try:
            folder = Path(f"/proc/{parent}")
            between = own_variables <= set((folder / "environ").read_bytes().split(b"\0"))
            if not between or (folder / "comm").read_text().strip().startswith(LAUNCHERS):
                break
        except OSError:
            break
        fields = stat_of(parent)
        if fields is None:
            break
        parent = int(fields[PARENT])
    return parent
