"""The watchdog: a process that waits polls, reads the status board, and raises if the wait cannot end."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spmd.errors import MismatchError, StallError, class_name, rebuilt_error
from spmd.settings import setting
from spmd.transport.call import Call, deadlock, raised_by
from spmd.transport.processes.hosts import Hosts
from spmd.transport.processes.shared_files import SharedFile
from spmd.transport.processes.status_board import FAILED, FOLLOWS, LEFT, WAITING, StatusBoard

if TYPE_CHECKING:
    from spmd.transport.processes.announce import ProcessGroup

__all__ = [
    "LOOK_INTERVAL",
    "Watchdog",
    "error_like",
    "failed_too",
    "let_others",
    "status_board_of_job",
    "text_of_error",
    "time_limit",
]

LOOK_INTERVAL = 0.1
"""Seconds between two looks at the others."""
_SPIN_SECONDS = 0.006
"""Seconds of a wait before the first nap: about the time of a message of 64 MB between processes."""


def time_limit() -> float:
    """The seconds without progress after which a collective ends: SPMD_TIMEOUT, 0 for none."""
    return setting("SPMD_TIMEOUT")


let_others: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))  # not on every system
_status_board: StatusBoard | None = None


def status_board_of_job(rank: int, size: int, file: Callable[[int], SharedFile]) -> StatusBoard:
    """The status board of this process, made at the first call."""
    global _status_board
    if _status_board is None:
        _status_board = StatusBoard(rank, size, file)
        if size > 1 and not _status_board.single_host:
            with suppress(OSError):  # no socket to listen at: waits for other hosts end only by the time limit
                _status_board.hosts = Hosts(_status_board)
                atexit.register(_status_board.hosts.close)  # which runs after that of the board
        atexit.register(_status_board.close)
    return _status_board


def _leave_to_the_parent() -> None:
    """A child of os.fork has no row: its end is not that of its parent."""
    global _status_board
    if _status_board is not None:
        atexit.unregister(_status_board.close)
        _status_board = None


os.register_at_fork(after_in_child=_leave_to_the_parent)

_MISMATCH_SECONDS = 0.3
"""Seconds of a wait after which the calls of the others are looked at."""
_PUBLISH_TIMEOUT = 2.0
"""Seconds that others give a process to publish its calls, before they report that they wait for it."""
_ABORT_TIMEOUT = 10.0
"""Seconds after which a process ends the job itself, if another does not."""
_REASON_TIMEOUT = 3.0
"""Seconds to wait for the reason why a connection was closed."""
_SHOWN_MAX = 64
"""Workers that a report lists, at most."""
_SAME_FAILURE_SECONDS = 0.3
"""Errors of several processes within these seconds count as one."""


def failed_too(kind: type[BaseException], error: BaseException) -> list[str]:
    """Lines on the failures of other processes, for the one process that reports. It then ends the job, before this
    call returns in the others.

    error.ranks: the ranks that will fail with the same error, if they are known.
    """
    status_board = _status_board
    if status_board is None:
        return []
    own_error = f"{kind.__name__}: {error}"
    started = time.monotonic()
    origin = getattr(error, "origin", None)
    if origin not in (None, status_board.rank):
        status_board.finish(FOLLOWS, own_error)
        while time.monotonic() - started < _ABORT_TIMEOUT and not status_board.has_recovered(origin):
            status_board.poll()
            time.sleep(0.01)  # the process that raised it reports, and ends the job
        time.sleep(_SAME_FAILURE_SECONDS)
        if min(status_board.end_errors(FOLLOWS)) != status_board.rank:
            time.sleep(_ABORT_TIMEOUT)  # the lowest rank that has not caught the error reports
        return []
    status_board.finish(FAILED, own_error)
    expected = set(getattr(error, "ranks", ()))
    while (waited := time.monotonic() - started) < _SAME_FAILURE_SECONDS or (
        waited < 10 * _SAME_FAILURE_SECONDS and not expected <= status_board.end_errors().keys()
    ):
        status_board.poll()
        time.sleep(0.01)
    failures = status_board.end_errors()
    if any(status_board.has_died(r) for r in failures):
        time.sleep(_ABORT_TIMEOUT)  # the process that reports is about to end the job
    if min(failures) != status_board.rank:
        time.sleep(_ABORT_TIMEOUT)  # the lowest rank reports, and ends the job
        return []
    same = [r for r in failures if r != status_board.rank and failures[r] == failures[status_board.rank]]
    lines = [f"raised alike by {len(same)} more processes: {', '.join(map(str, same))}"] if same else []
    return lines + [
        f"rank {r} of the world raised {text.partition(chr(10))[0]}"
        for r, text in failures.items()
        if r != status_board.rank and r not in same
    ]


_NOTE = "\x1e"
"""Before each note of an error."""


def text_of_error(error: BaseException) -> str:
    """The class, text and notes of an error, for other processes."""
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("raised by worker ")]
    return _NOTE.join([f"{class_name(error)}: {error}", *notes])


def error_like(origin: int, who: str, text: str) -> Exception:
    """A copy of the error that a worker raised in another process, of which `text_of_error` gave the text."""
    text, *notes = text.split(_NOTE)
    name, _, text = text.partition(": ")
    error = rebuilt_error(name, text)
    for note in notes:
        error.add_note(note)
    error.origin, error.peer = origin, who  # type: ignore[attr-defined]
    if not isinstance(error, MismatchError):  # which names both workers
        raised_by(error, who)
    return error


class Watchdog:
    """One wait of a process in a call."""

    def __init__(self, transport: ProcessGroup, call: Call | None):
        assert transport.status_board is not None
        self.transport, self.status_board, self.call = transport, transport.status_board, call
        self.begun = time.monotonic()
        self.suspicion: object = None
        self.unchanged_since = 0.0
        self.last_progress: tuple[float, tuple] | None = None

    def until(self, done: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Poll until done() is true, and call meanwhile() between polls.

        Raises what `look` raises: the error of another process, DeadlockError or StallError.
        """
        started = time.monotonic()
        next_look, awake = started + LOOK_INTERVAL, started + _SPIN_SECONDS
        while not done():
            meanwhile()
            now = time.monotonic()
            if now > next_look:
                self._show_waiting()
                self.look(now)
                next_look = now + LOOK_INTERVAL
            if now < awake:
                let_others()
            else:
                # Messages move only during polls: after a nap, poll for as long as it took.
                nap = min((now - started) / 50, 0.005)
                time.sleep(nap)
                awake = now + 2 * nap

    def through(self, work: Callable[[], Any]) -> Any:
        """The result of work(), which blocks. It runs in a thread, which is abandoned if this wait raises."""
        result: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                result.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="spmd-open", daemon=True)
        thread.start()
        self.until(lambda: not thread.is_alive())
        if errors:
            self.reason()
            raise errors[0]
        return result[0]

    def reason(self) -> None:
        """Raise the reason why a connection was closed, if it is published within `_REASON_TIMEOUT` seconds."""
        until = time.monotonic() + _REASON_TIMEOUT
        while (now := time.monotonic()) < until:
            self.look(now)
            time.sleep(0.02)

    def _show_waiting(self) -> None:
        """Show on the status board that this process waits for blocks: polling uses the processor, like work."""
        if self.status_board.row["state"] != WAITING and self.status_board.current is not None:
            self.status_board.start_waiting(self.transport.stage, ())

    def look(self, now: float) -> None:
        """Raise if this wait cannot end, or takes too long.

        Raises a copy of the error that another process of this mesh raised in this map; DeadlockError for a cycle of
        waits, or a process that has died; StallError after `time_limit` seconds without progress. A deadlock must be
        seen in two calls with no change in between, so callers repeat this call.
        """
        self.status_board.publish()
        self.status_board.poll()
        broken = self.status_board.failure_of(self.transport.stage, self.transport.ranks)
        if broken is not None:
            raise error_like(*broken)
        if now - self.begun > _MISMATCH_SECONDS:
            mismatch = self.transport.groups.seen_mismatch(now - self.begun)
            if mismatch is not None:
                raise mismatch
        cycle = self.status_board.wait_cycle()
        if self.status_board.rank in cycle:
            ranks = sorted({*cycle, *(m for absent in cycle.values() for m in absent)})
            if self._is_unchanged(now, ranks, cycle) and (
                self.status_board.have_published(cycle) or now - self.unchanged_since > _PUBLISH_TIMEOUT
            ):
                raise deadlock(self._waits(cycle))
        else:
            # A wait for blocks is in no cycle, but cannot end if a process of the map has died.
            dead = self._dead()
            if not dead:
                self.suspicion = None
            elif self._is_unchanged(now, dead, dead) and now - self.unchanged_since > _PUBLISH_TIMEOUT:
                raise deadlock(self._waits({self.status_board.rank: dead}))
        limit = self.transport.time_limit
        if not limit:
            return
        # A process that computes, or goes from collective to collective, makes progress.
        others = self.status_board.missing(self.status_board.rank) or [
            r for r in self.transport.ranks if r != self.status_board.rank
        ]
        known_ranks = [r for r in others if self.status_board.is_known(r)]
        # Waiting processes poll, which uses the processor.
        worked = sum(
            self.status_board.cpu_seconds(r) for r in known_ranks if self.status_board.row_of(r)["state"] != WAITING
        )
        state = (self.status_board.progress(known_ranks), worked)
        if self.last_progress is None:
            self.last_progress = now, state
            return
        since, (beats, before) = self.last_progress
        if state[0] != beats or worked - before > max(0.05, 0.02 * (now - since)):
            self.last_progress = now, state
        elif now - since > limit:
            raise self._stalled(limit, self.status_board.missing(self.status_board.rank))

    def _is_unchanged(self, now: float, ranks: Sequence[int], what: object) -> bool:
        """Whether `what` was seen before, and the rows of these processes have not changed since."""
        seen = what, self.status_board.progress(ranks)
        if seen != self.suspicion:
            self.suspicion, self.unchanged_since = seen, now
            return False
        return self.status_board.is_fresh(ranks, self.unchanged_since)

    def _dead(self) -> list[int]:
        """The processes of this mesh that died before they left the program."""
        status_board = self.status_board
        others = [r for r in self.transport.ranks if r != status_board.rank and status_board.is_known(r)]
        return [r for r in others if status_board.row_of(r)["state"] != LEFT and status_board.has_died(r)]

    def _who(self, rank: int) -> str:
        ranks = self.transport.ranks
        return self.transport.describe(ranks.index(rank)) if rank in ranks else f"rank {rank} of the world"

    def _waits(self, cycle: dict[int, list[int]]) -> list[str]:
        """What each worker of a cycle waits for, and who has left."""
        lines = []
        for rank, absent in cycle.items():
            call, source = self._last(rank)
            lines += [f"{self._who(rank)} waits in {call} for {', '.join(map(self._who, absent))}", *source]
        absent_ranks = {m for absent in cycle.values() for m in absent} - cycle.keys()
        for rank in sorted(absent_ranks):
            state = self.status_board.row_of(rank)["state"]
            if state == LEFT or self.status_board.has_died(rank):
                how = "has died" if state != LEFT else "has left the program"
                call, source = self._last(rank)
                last = f"; the last it called was {call}" if source else ", and called nothing"
                lines += [f"{self._who(rank)} {how}{last}", *source]
        return lines

    def _last(self, rank: int) -> tuple[str, list[str]]:
        """The last call of a worker, and a line with its source if it is known."""
        call, _, source = (self.status_board.calls(rank) or ["a collective"])[0].partition(" at ")
        return call, [f"  at {source}"] if source else []

    def _stalled(self, seconds: float, missing: Sequence[int]) -> StallError:
        """The error that lists the last calls of each worker, and who is missing."""
        ranks = [r for r in self.transport.ranks if self.status_board.is_known(r)]
        absent = {m for r in ranks for m in self.status_board.missing(r)} | set(missing)
        lines = []
        for rank in self.transport.ranks[:_SHOWN_MAX]:
            who = self._who(rank)
            if not self.status_board.is_known(rank):
                elsewhere = "" if self.status_board.single_host else "is on another host, or "
                lines.append(f"{who} {elsewhere}has made no mesh")
                continue
            does = "is missing" if rank in absent else "waits"
            if self.status_board.hosts is not None and self.status_board.hosts.silent(rank):
                does += ", by the last that its host has told"
            calls = self.status_board.calls(rank)
            lines.append(f"{who} {does}; its last collectives" + (":" if calls else ": none"))
            lines += [f"  {call}" for call in calls[:4]]
        if len(self.transport.ranks) > _SHOWN_MAX:
            lines.append(f"and {len(self.transport.ranks) - _SHOWN_MAX} more")
        return StallError.at(
            str(self.call) if self.call is not None else "a collective",
            got=f"no progress for {seconds:g} s\n" + "\n".join(f"          {line}" for line in lines),
            need="every worker of the group to come",
            mend="SPMD_TIMEOUT=600, or more seconds, where a worker may be away for that long; 0 for no limit",
        )
