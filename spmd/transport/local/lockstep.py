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
    """Raise if a worker would wait inside optree's C++ code, which does not support a switch of greenlets."""
    optree = sys.modules.get("optree.ops")
    if optree is None:
        return
    optree_globals = vars(optree)
    frame, body = sys._getframe(4), Run.work.__code__  # below: this, the wait, and at least two of the library's
    while frame is not None and frame.f_code is not body:
        if frame.f_globals is optree_globals:
            raise TransportError.at(
                "a collective",
                got=f"a call from within optree.{frame.f_code.co_name}, under the lockstep scheduler",
                need="no C++ frames between the body and the collective",
                mend="give the collective the whole tree, spmd.psum(tree, axis_name), or use spmd.tree.map",
            )
        frame = frame.f_back


@cache
def _greenlets() -> tuple[Callable[[], Any], type]:
    """greenlet.getcurrent and the greenlet class, imported late."""
    from greenlet import getcurrent, greenlet

    return getcurrent, greenlet


class LockstepRun(Run):
    """Workers take turns in the calling thread. Each runs until it has to wait. All but the last start in greenlets.
    The last one runs in the caller itself, because starting a greenlet takes longer than a collective.

    quiet: no worker is expected to wait. Then the caller runs one after the other, and starts greenlets only while one
    waits.

    hub: the caller's greenlet, which continues if no worker is ready. own: the worker that it runs; others: the
    greenlets of other workers. fresh: workers that have not started. context: copied for each worker.
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
        scope = split_work.SplitScope(usable_cores)  # one worker runs at a time, on all cores
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
                self._all_fall_back()
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
        """Stop the workers that have started and wait."""
        self.stop()
        for worker in self.others:
            if worker:
                worker.throw(Stopped)
        self.others.clear()
        self.fresh.clear()
        self.ready.clear()
        self.own = self.body = None  # break reference cycles

    def close(self) -> None:
        if self.others:  # an interrupt stopped _end_all
            self._end_all()
        super().close()

    def _begin(self, comm: Participant) -> None:
        """Start a worker in a greenlet of its own, until it has to wait."""
        worker = self.greenlet(self.work)
        worker.gr_context = self.context.copy()
        self.others.append(worker)
        worker.switch(comm, self.body)

    def _go_on(self) -> None:
        """Run those that need not wait any longer."""
        while self.ready and self.limit >= 0:
            self.ready.popleft().switch()

    def wake(self, rendezvous: Any) -> None:
        self.ready.extend(rendezvous.waiters)
        rendezvous.waiters = []

    def _all_fall_back(self) -> None:
        """Nobody is ready: the verbs show what the members of repeated rendezvous wait for."""
        for key in list(self.repeated or ()):
            self.fall_back(key)

    def wait(self, rendezvous: Rendezvous | RepeatedRendezvous, comm: Participant) -> None:
        _no_frames_of_optree()
        self.switches += 1
        me, hub, ready = self.current(), self.hub, self.ready
        rendezvous.waiters.append(me)
        if comm is not self.own or me is hub:
            while not rendezvous.done:
                if ready and self.limit >= 0:
                    ready.popleft().switch()
                else:
                    self._idle(me)
        else:
            # A greenlet made by the hub's own body: the hub waits for it, so it becomes the hub meanwhile.
            self._make_hub(me)
            try:
                while not rendezvous.done:
                    self._idle(me)
            finally:
                self._make_hub(hub)
        if ready and me in ready:
            ready.remove(me)  # still queued if a greenlet that ended switched here directly
        if self.limit < 0:
            raise Stopped  # by a worker that ran meanwhile

    def _make_hub(self, hub: Any) -> None:
        self.hub = hub
        for worker in self.others:
            if worker:
                worker.parent = hub  # to whom it goes on when it ends

    def _idle(self, me: Any) -> None:
        """Switch to another greenlet, where this one has to wait."""
        if self.limit < 0:
            raise Stopped
        if self.ready:
            self.ready.popleft().switch()
        elif me is not self.hub:
            self.hub.switch()
        elif self.fresh:
            self._begin(self.fresh.popleft())
        elif self.repeated:
            self._all_fall_back()
        else:
            self.stalled()  # all others wait too, or have left
