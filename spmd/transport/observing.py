"""Observed collectives: what each sends, and how long it waits and moves. Nothing here runs without an observer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from spmd.transport.algorithms.cost import Cost
from spmd.transport.call import LEDGERS, Call, Observers, Origin, Place
from spmd.transport.handles import Done, Handle

__all__ = ["Phase", "Sent", "Use", "count", "located", "observed", "origin_of", "run_body"]

Phase = tuple[float, float, float]
"""A time that a worker spends in a collective: start and end, as `time.perf_counter` counts, and the seconds of it in
which the worker waits for others."""
Costs = list[tuple[str, Cost, Cost]]
"""Of each verb that a collective uses its name, what the worker sends, and what the operator's plan says that it
sends."""


class Sent(NamedTuple):
    """What a worker calls and sends in a collective. name: the function as users write it. costs: of the verbs of the
    transport; messages, nbytes: their sum. recorded_at: that of the call."""

    name: str
    origin: Origin
    costs: Costs
    messages: int
    nbytes: int
    recorded_at: Place | None

    @property
    def verbs(self) -> list[str]:
        """The names of the verbs."""
        return [verb for verb, _, _ in self.costs]

    @classmethod
    def of(cls, call: Call, origin: Origin, costs: Costs) -> Sent:
        """The sum of some costs."""
        messages = nbytes = 0
        for _, cost, _ in costs:
            messages += cost.messages
            nbytes += cost.nbytes
        return cls(call.op, origin, costs, messages, nbytes, call.recorded_at)


class Use:
    """One collective of one worker.

    call: what it calls. costs: of the verbs so far. phases: one where the worker starts the collective; where it does
    not wait for the result at once, one more at the end.
    """

    __slots__ = ("call", "comm", "costs", "observers", "phases")

    def __init__(self, comm: Any, call: Call, observers: Observers):
        self.comm, self.call, self.observers = comm, call, observers
        self.costs: Costs = []
        self.phases: list[Phase] = []

    def timed(self, work: Callable[[], Any]) -> Any:
        """work(), as a phase of this collective."""
        comm = self.comm
        comm.use, waited, start = self, comm.waited, perf_counter()
        try:
            return work()
        finally:
            comm.use = None
            self.phases.append((start, perf_counter(), comm.waited - waited))

    def count(self, verb: str, cost: Cost, declared: Cost) -> None:
        """A verb is used."""
        self.costs.append((verb, cost, declared))
        if self.observers.replays:
            return
        for observer in self.observers:
            observer.verb(self.comm.worker, verb, cost, declared, origin_of(self.comm, self.call))

    def end(self) -> None:
        """The worker has its result."""
        call, origin = self.call, origin_of(self.comm, self.call)
        sent = call.last_sent  # one object each time, for those who keep it
        if sent is None or sent.origin != origin or sent.costs != self.costs:
            sent = call.last_sent = Sent.of(call, origin, self.costs)
        for observer in self.observers:
            observer.collective(self.comm, sent, self.phases)


class _Pending:
    """A collective under way that is observed."""

    __slots__ = ("handle", "use", "value")

    def __init__(self, use: Use, handle: Handle):
        self.use, self.handle = use, handle
        self.value: Any = None

    def wait(self) -> Any:
        handle: Any = self.handle
        if handle is not None:
            use = self.use
            # Within another collective it is a part of that one.
            self.value = handle.wait() if use.comm.use is not None else use.timed(handle.wait)
            self.handle = None  # type: ignore[assignment]
            use.end()
        return self.value


def observed(comm: Any, call: Call, observers: Observers, start: Callable[[], Handle]) -> Handle:
    """start(), observed until the worker has the result. A collective within another one is a part of that one."""
    if comm.use is not None:
        return start()
    use = Use(comm, call, observers)
    handle = use.timed(start)
    if isinstance(handle, Done):
        use.end()
        return handle
    return _Pending(use, handle)


def count(comm: Any, verb: str, cost: Cost, declared: Cost | None = None) -> None:
    """Count a verb in the collective that the worker is in."""
    use: Use | None = comm.use
    if use is not None:
        use.count(verb, cost, cost if declared is None else declared)


def origin_of(comm: Any, call: Call) -> Origin:
    """Where a collective comes from."""
    return located(comm, call.origin)


def located(comm: Any, origin: Origin) -> Origin:
    """The origin; with the line that runs the body, where the line of the call is not known."""
    if origin.place[0] is None and comm.called_at is not None:
        return origin._replace(place=comm.called_at)
    return origin


def run_body(worker: Any, name: Sequence[str], body: Callable[[Any], Any], called_at: Place | None) -> Any:
    """body(worker); for observers with the time that it waits counted. name: the body, and the kind of run. called_at:
    the line that runs it, for observers. Raises the first error of a remote call that the body has not asked for."""
    if called_at is None:
        result = body(worker)
    else:
        worker.comm.called_at = called_at
        for observer in LEDGERS.get():
            body = partial(observer.run, name=name, body=body)
        with worker.comm.timed():
            result = body(worker)
    for error in worker.unasked:
        raise error
    return result
