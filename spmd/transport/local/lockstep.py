"""Virtual workers that take turns in one thread, as greenlets."""

from __future__ import annotations

import contextvars
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

from spmd.errors import TransportError
from spmd.kernels.parallel import split_work
from spmd.kernels.parallel.thread_pool import Stopped
from spmd.transport.base import Comm
from spmd.transport.blas_threads import usable_cores
from spmd.transport.handles import Outcome
from spmd.transport.local.rendezvous import Participant, Rendezvous, RepeatedRendezvous, Run


def _no_frames_of_optree() -> None:
    """Raise where a worker is to wait inside optree's C++ code: that does not survive a switch of greenlets."""
    optree = sys.modules.get("optree.ops")
    if optree is None:
        return
    theirs = vars(optree)
    frame, body = sys._getframe(4), Run.work.__code__  # below: this, the wait, and at least two of the library's
    while frame is not None and frame.f_code is not body:
        if frame.f_globals is theirs:
            raise TransportError.at(
                "a collective",
                got=f"a call from within optree.{frame.f_code.co_name}, under the lockstep scheduler",
                need="no C++ frames between the body and the collective",
                mend="give the collective the whole tree, spmd.psum(tree, axis_name), or use spmd.tree.map",
            )
        frame = frame.f_back


@cache
def _greenlets() -> tuple[Callable[[], Any], type]:
    """greenlet.getcurrent and the class: imported late, found once."""
    from greenlet import getcurrent, greenlet

    return getcurrent, greenlet


class LockstepRun(Run):
    """Workers take turns in the calling thread; each runs until it has to wait. All but the last begin in greenlets;
    the last one is the caller itself: to begin a greenlet takes longer than a collective.

    quiet: none is expected to wait. Then the caller itself runs one after the other, and the next ones begin in
    greenlets only while one does wait.

    hub: the greenlet that goes on where nobody is ready: that of the caller. own: the worker that it runs; others: the
    greenlets of others. fresh: the workers that have not begun; context: what they begin in, each in a copy.
    """

    def __init__(self, size: int, describe: Callable[[int], str], quiet: bool = False):
        super().__init__(size, describe)
        self.quiet = quiet
        self.repeated = {}
        self.ready: deque[Any] = deque()
        self.hub: Any = None
        self.own: Participant | None = None
        self.others: list[Any] = []
        self.fresh: deque[Participant] = deque()
        self.context: contextvars.Context
        self.body: Any = None
        self.current: Callable[[], Any]
        self.greenlet: type

    def execute(self, body: Callable[[Comm], Any]) -> Outcome:
        self.current, self.greenlet = _greenlets()
        self.hub, self.context, self.body = self.current(), contextvars.copy_context(), body
        fresh, workers = self.fresh, self.others
        fresh.extend(self.comms)
        scope = split_work.SplitScope(usable_cores)  # one worker runs at a time: the other cores help it
        started = time.perf_counter()
        try:
            with scope, scope:
                while fresh and self.limit >= 0:
                    comm = fresh.popleft()
                    if fresh and not self.quiet:
                        self._begin(comm)
                    else:
                        self.own = comm
                        self.context.copy().run(self.work, comm, body)
                    if self.ready:
                        self._go_on()
            while self.repeated and self.limit >= 0:
                self._turn_down_all()
                self._go_on()
            for worker in workers:
                if not worker.dead:
                    self.stalled()
                    break
        finally:
            self.stop()
            self._end_all()
        return self.outcome(time.perf_counter() - started, scope.seconds)

    def _end_all(self) -> None:
        """End the workers that have begun and wait."""
        self.stop()
        for worker in self.others:
            if worker:
                worker.throw(Stopped)
        self.others.clear()
        self.fresh.clear()
        self.ready.clear()
        self.own = self.body = None  # They know their run.

    def close(self) -> None:
        if self.others:  # An interrupt came while they were to be ended.
            self._end_all()
        super().close()

    def _begin(self, comm: Participant) -> None:
        """Let a worker begin in a greenlet of its own, and run until it has to wait."""
        worker = self.greenlet(self.work)
        worker.gr_context = self.context.copy()
        self.others.append(worker)
        worker.switch(comm, self.body)

    def _go_on(self) -> None:
        """Let those run that need not wait any longer."""
        while self.ready and self.limit >= 0:
            self.ready.popleft().switch()

    def wake(self, meeting: Any) -> None:
        self.ready.extend(meeting.waiters)
        meeting.waiters = []

    def _turn_down_all(self) -> None:
        """Where nobody is ready: by the verbs it shows what those who have gathered wait for."""
        for key in list(self.repeated or ()):
            self.turn_down(key)

    def wait(self, meeting: Rendezvous | RepeatedRendezvous, comm: Participant) -> None:
        _no_frames_of_optree()
        self.switches += 1
        me, hub, ready = self.current(), self.hub, self.ready
        meeting.waiters.append(me)
        if comm is not self.own or me is hub:
            while not meeting.done:
                if ready and self.limit >= 0:
                    ready.popleft().switch()
                else:
                    self._idle(me)
        else:
            # A greenlet that the hub's body has made itself: the hub waits for it, and may not go on before it.
            self._make_hub(me)
            try:
                while not meeting.done:
                    self._idle(me)
            finally:
                self._make_hub(hub)
        if ready and me in ready:
            ready.remove(me)  # It was not taken from there where one that has ended went on to it.
        if self.limit < 0:
            raise Stopped  # One that ran meanwhile has ended them all.

    def _make_hub(self, hub: Any) -> None:
        self.hub = hub
        for worker in self.others:
            if worker:
                worker.parent = hub  # to whom it goes on when it ends

    def _idle(self, me: Any) -> None:
        """Let another greenlet run, where this one has to wait."""
        if self.limit < 0:
            raise Stopped
        if self.ready:
            self.ready.popleft().switch()
        elif me is not self.hub:
            self.hub.switch()
        elif self.fresh:
            self._begin(self.fresh.popleft())
        elif self.repeated:
            self._turn_down_all()
        else:
            self.stalled()  # All others wait too, or have left.
