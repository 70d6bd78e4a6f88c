"""How a process of a job waits for others: it polls, looks at them on the board, and ends what cannot end."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spmd.errors import StallError, rebuilt_error
from spmd.settings import setting
from spmd.transport.call import Call, deadlock, raised_by
from spmd.transport.processes.hosts import Hosts
from spmd.transport.processes.shared_files import SharedFile
from spmd.transport.processes.status_board import FAILED, FOLLOWS, LEFT, WAITING, Board

if TYPE_CHECKING:
    from spmd.transport.processes.base import Connections

__all__ = ["LOOK", "Watchdog", "board_of_the_job", "failed_too", "let_others", "like", "time_limit"]

LOOK = 0.1
"""Seconds between two looks at the others."""
_AWAKE = 0.006
"""Seconds of a wait before the first nap: about what a message of 64 MB takes from process to process."""


def time_limit() -> float:
    """The seconds without progress after which a collective ends: SPMD_TIMEOUT, 0 for none."""
    return setting("SPMD_TIMEOUT")


let_others: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))  # not on every system
_board: Board | None = None


def board_of_the_job(rank: int, size: int, file: Callable[[int], SharedFile]) -> Board:
    """The board of this job on this host, made at the first call."""
    global _board
    if _board is None:
        _board = Board(rank, size, file)
        if size > 1 and not _board.whole:
            with suppress(OSError):  # a system without sockets to listen at: of other hosts only the time counts
                _board.hosts = Hosts(_board)
                atexit.register(_board.hosts.close)  # which runs after that of the board
        atexit.register(_board.close)
    return _board


def _leave_to_the_parent() -> None:
    """A child of os.fork has no place on the board: its end is not that of its parent."""
    global _board
    if _board is not None:
        atexit.unregister(_board.close)
        _board = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)

_TELLS = 2.0
"""Seconds that a process has to tell what it waits in, before others say that they wait for it in vain."""
_AWAY = 10.0
"""Seconds after which a process ends the job that should have been ended by another."""
_REASON = 3.0
"""Seconds in which it should come out why a connection was closed."""
_TOGETHER = 0.3
"""Seconds in which errors of several processes count as one end of the job."""


def failed_too(kind: type[BaseException], error: BaseException) -> list[str]:
    """Lines on what other processes of this host failed with, for the one that reports. The others do not return while
    it does: it ends them.

    error.ranks: who will fail with the same, if that is known.
    """
    board = _board
    if board is None:
        return []
    mine = f"{kind.__name__}: {error}"
    started = time.monotonic()
    origin = getattr(error, "origin", None)
    if origin not in (None, board.rank):
        board.end(FOLLOWS, mine)
        while time.monotonic() - started < _AWAY and not board.has_gone_on(origin):
            board.ask()
            time.sleep(0.01)  # whoever raised it reports, and ends the job
        time.sleep(_TOGETHER)
        if min(board.failures(FOLLOWS)) != board.rank:
            time.sleep(_AWAY)  # where that one has caught it, the first one of those that have not does so
        return []
    board.end(FAILED, mine)
    expected = set(getattr(error, "ranks", ()))
    while (waited := time.monotonic() - started) < _TOGETHER or (
        waited < 10 * _TOGETHER and not expected <= board.failures().keys()
    ):
        board.ask()
        time.sleep(0.01)
    failures = board.failures()
    if any(board.has_died(r) for r in failures):
        time.sleep(_AWAY)  # the job is about to end by one that has reported
    if min(failures) != board.rank:
        time.sleep(_AWAY)  # the first one reports, and ends the job
        return []
    alike = [r for r in failures if r != board.rank and failures[r] == failures[board.rank]]
    lines = [f"raised alike by {len(alike)} more processes: {', '.join(map(str, alike))}"] if alike else []
    return lines + [
        f"rank {r} of the world raised {text.partition(chr(10))[0]}"
        for r, text in failures.items()
        if r != board.rank and r not in alike
    ]


def like(origin: int, who: str, said: str) -> Exception:
    """An error like the one that a worker raised in another process, for those that waited for it."""
    name, _, text = said.partition(": ")
    error = rebuilt_error(name, text)
    error.origin, error.peer = origin, who  # type: ignore[attr-defined]
    raised_by(error, who)
    return error


class Watchdog:
    """One wait of a process in a call."""

    def __init__(self, transport: Connections, call: Call | None):
        assert transport.board is not None
        self.transport, self.board, self.call = transport, transport.board, call
        self.seen: object = None
        self.since = 0.0
        self.mark: tuple[float, tuple] | None = None

    def until(self, done: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Poll until it is done, doing something meanwhile. Raises DeadlockError where that will never be, StallError
        where nothing moves."""
        started = time.monotonic()
        next_look, awake = started + LOOK, started + _AWAKE
        while not done():
            meanwhile()
            now = time.monotonic()
            if now > next_look:
                self._is_seen_to_wait()
                self.look(now)
                next_look = now + LOOK
            if now < awake:
                let_others()
            else:
                # What comes moves only while one asks: for as long as it has slept a process asks without a break.
                nap = min((now - started) / 50, 0.005)
                time.sleep(nap)
                awake = now + 2 * nap

    def through(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, which waits for others without looking at them. It goes on in a thread of its own, which
        is left alone where it cannot end."""
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
        """A connection was closed. Raise why, if it comes out."""
        until = time.monotonic() + _REASON
        while (now := time.monotonic()) < until:
            self.look(now)
            time.sleep(0.02)

    def _is_seen_to_wait(self) -> None:
        """What waits for blocks is to be seen to wait, too: it polls, and would seem to work."""
        if self.board.head[1] != WAITING and self.board.coming is not None:
            self.board.wait(self.transport.number)

    def look(self, now: float) -> None:
        """Raise what `until` does, if it is so. To be asked again, because what is seen once may be past."""
        self.board.tell()
        self.board.ask()
        broken = self.board.broken(self.transport.number, self.transport.ranks)
        if broken is not None:
            raise like(*broken)
        circle = self.board.circle()
        if self.board.rank in circle:
            ranks = sorted({*circle, *(m for absent in circle.values() for m in absent)})
            if self._is_so_since(now, ranks, circle) and (self.board.have_told(circle) or now - self.since > _TELLS):
                raise deadlock(self._waits(circle))
        else:
            # Whoever waits for blocks is in no circle. But no map ends of which a process has died.
            dead = self._dead()
            if not dead:
                self.seen = None
            elif self._is_so_since(now, dead, dead) and now - self.since > _TELLS:
                raise deadlock(self._waits({self.board.rank: dead}))
        limit = self.transport.time_limit
        if not limit:
            return
        # Whoever computes, or goes from collective to collective, makes progress.
        others = self.board.missing(self.board.rank) or [r for r in self.transport.ranks if r != self.board.rank]
        known = [r for r in others if self.board.knows(r)]
        # Whoever waits may use the processor for it.
        worked = sum(self.board.worked(r) for r in known if self.board.row_of(r)["state"] != WAITING)
        state = (self.board.beats(known), worked)
        if self.mark is None:
            self.mark = now, state
            return
        since, (beats, before) = self.mark
        if state[0] != beats or worked - before > max(0.05, 0.02 * (now - since)):
            self.mark = now, state
        elif now - since > limit:
            raise self._stalled(limit, self.board.missing(self.board.rank))

    def _is_so_since(self, now: float, ranks: Sequence[int], what: object) -> bool:
        """Whether the same was seen before, of processes of which nothing has changed in between."""
        seen = what, self.board.beats(ranks)
        if seen != self.seen:
            self.seen, self.since = seen, now
            return False
        return self.board.fresh(ranks, self.since)

    def _dead(self) -> list[int]:
        """The processes of this mesh that have died, and not left the program before."""
        board = self.board
        others = [r for r in self.transport.ranks if r != board.rank and board.knows(r)]
        return [r for r in others if board.row_of(r)["state"] != LEFT and board.has_died(r)]

    def _who(self, rank: int) -> str:
        ranks = self.transport.ranks
        return self.transport.describe(ranks.index(rank)) if rank in ranks else f"rank {rank} of the world"

    def _waits(self, circle: dict[int, list[int]]) -> list[str]:
        """What each worker of a circle of waits waits for, and who has left."""
        lines = []
        for rank, absent in circle.items():
            call, source = self._last(rank)
            lines += [f"{self._who(rank)} waits in {call} for {', '.join(map(self._who, absent))}", *source]
        gone = {m for absent in circle.values() for m in absent} - circle.keys()
        for rank in sorted(gone):
            state = self.board.row_of(rank)["state"]
            if state == LEFT or self.board.has_died(rank):
                how = "has died" if state != LEFT else "has left the program"
                call, source = self._last(rank)
                said = f"; the last it called was {call}" if source else ", and called nothing"
                lines += [f"{self._who(rank)} {how}{said}", *source]
        return lines

    def _last(self, rank: int) -> tuple[str, list[str]]:
        """The last that a worker called, and a line that says where; no line where it has said nothing."""
        call, _, source = (self.board.calls(rank) or ["a collective"])[0].partition(" at ")
        return call, [f"  at {source}"] if source else []

    def _stalled(self, seconds: float, missing: Sequence[int]) -> StallError:
        """What each worker called last, and who is missing."""
        known = [r for r in self.transport.ranks if self.board.knows(r)]
        absent = {m for r in known for m in self.board.missing(r)} | set(missing)
        lines = []
        for rank in self.transport.ranks:
            who = self._who(rank)
            if not self.board.knows(rank):
                lines.append(
                    f"{who} " + ("has made no mesh" if self.board.whole else "is on another host, or has made no mesh")
                )
                continue
            does = "is missing" if rank in absent else "waits"
            if self.board.hosts is not None and self.board.hosts.silent(rank):
                does += ", by the last that its host has told"
            calls = self.board.calls(rank)
            lines.append(f"{who} {does}; its last collectives" + (":" if calls else ": none"))
            lines += [f"  {call}" for call in calls[:4]]
        return StallError.at(
            str(self.call) if self.call is not None else "a collective",
            got=f"no progress for {seconds:g} s\n" + "\n".join(f"          {line}" for line in lines),
            need="every worker of the group to come",
            mend="SPMD_TIMEOUT=600, or more seconds, where a worker may be away for that long; 0 for no limit",
        )
