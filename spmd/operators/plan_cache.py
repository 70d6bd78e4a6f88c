"""The call cache: what a user's line has called before, with a block of some shape."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any

import numpy as np

from spmd.autodiff.admission import admit_dtype
from spmd.errors import caller, describe
from spmd.kernels import on_device
from spmd.mesh import WORKER, Worker
from spmd.operators.base import Called, Collective
from spmd.operators.memo import bounded
from spmd.operators.partial_comm import PartialComm, whole_comm
from spmd.operators.sums import Vary
from spmd.state import State
from spmd.transport.base import Comm
from spmd.transport.call import LEDGERS, Call, Group, Place
from spmd.transport.observing import Costs, Sent, Use, origin_of
from spmd.transport.plan import Plan, Plans, RunPlan, part_of


class Prepared:
    """What a user's line calls with a block of some shape: the group, the call, and the states in which it takes the
    block and gives the result (None for cotangents, which are bare).

    fast_run: runs the plan again, if there is something faster than the general way; tried: whether that has been
    looked for. It keeps the operator, the dtype and the code alive, so that their ids stay unique.
    """

    __slots__ = ("admitted", "assumed", "call", "dtype", "fast_run", "group", "observed", "op", "state", "tried")

    place: Place | None = None

    def __init__(self, op: Collective, dtype: np.dtype, group: Group, call: Call, admitted: State | None):
        self.op, self.dtype, self.group, self.call, self.admitted = op, dtype, group, call, admitted
        self.state = None if admitted is None else op.out_state(admitted)
        self.fast_run: Callable[[Any, np.ndarray, RunPlan], tuple[Any, Any]] | None = None
        self.assumed: Any = None
        self.tried = False
        self.observed: ObservedCall | None = None

    def __call__(self, comm: Comm, x: np.ndarray) -> tuple[Any, Any]:
        """The new block, and the bound operator."""
        if self.fast_run is not None:
            return self.fast_run(comm, x, self.general_run)
        result = self.general_run(comm, x)
        if not self.tried:
            self._shorten(comm, x)
        return result

    def general_run(self, comm: Comm, x: np.ndarray) -> tuple[Any, Any]:
        """Run the operator without the fast way."""
        result = self.op.start(comm, self.group, x, self.call).wait()
        if self.assumed is not None:
            self._shorten(comm, x)  # The others may have come with other blocks, and may do so from now on.
        return result

    def _shorten(self, comm: Comm, x: np.ndarray) -> None:
        """Look for the fast way, which may exist only after the first call."""
        plan = self.op.repeatable_plan(self.group, x)
        steps = plan.steps if isinstance(plan, Plans) else () if plan is None or plan.kind == "none" else (plan,)
        assumed = tuple(step.assumed_lengths for step in steps)
        if self.tried and steps and assumed == self.assumed:
            return
        self.tried = True
        runs = [self._run_again(comm, step, x) for step in steps]
        several = Steps(self, runs) if len(runs) > 1 and None not in runs else None
        self.fast_run = runs[0] if len(runs) == 1 else several
        self.assumed = assumed if self.fast_run is not None and any(assumed) else None

    def _run_again(self, comm: Comm, plan: Plan, x: np.ndarray) -> Any:
        """What runs one of its plans again, for such a block."""
        if plan.shape != x.shape:
            x = np.empty(plan.shape, plan.dtype)
        if plan.kind != "none":
            call = self.call if self.call.shape == x.shape else self.call.of(x.shape)
            return comm.repeated_plan(call, plan, x)
        blocks = [part_of(x, part) for part in plan.parts]
        make, _, bound = plan.complete_repeated([None if block is None else block.shape for block in blocks])
        return lambda comm, x, general_run: (make(x, [part_of(x, part) for part in plan.parts]), bound)


class Steps:
    """Plans that are run again, one after the other. runs: what runs each."""

    __slots__ = ("prepared", "runs")

    def __init__(self, prepared: Prepared, runs: list[Any]):
        self.prepared, self.runs = prepared, runs

    def __call__(self, comm: Comm, x: np.ndarray, general_run: RunPlan) -> tuple[Any, Any]:
        """The new block, and the bound operator. Where a plan cannot be run again, the operator goes on by itself."""
        prepared, bounds, result = self.prepared, [], (x, None)
        finished = False

        def go_on(comm: Comm, block: np.ndarray) -> tuple[Any, Any]:
            nonlocal finished
            finished = True
            return prepared.op.go_on(comm, prepared.group, block, prepared.call, bounds).wait()

        for run in self.runs:
            result = run(comm, result[0], go_on)
            if finished:
                prepared._shorten(comm, x)
                break
            bounds.append(result[1])
        return result


class ObservedCall:
    """A prepared call that observers see, in the form of one.

    place: the user's line. costs: those of the general way, the last time: the fast way has the same. sent: what
    observers get of it, by the line of the forward call. Observers that do not take replays see the general way each
    time.
    """

    __slots__ = ("admitted", "costs", "place", "prepared", "sent", "state")

    fast_run = None

    def __init__(self, prepared: Prepared):
        self.prepared, self.admitted, self.state = prepared, prepared.admitted, prepared.state
        self.place: Place = (prepared.call.code, prepared.call.instruction)
        self.costs: Costs | None = None
        self.sent: dict[Any, Sent] = {}

    @classmethod
    def of(cls, prepared: Prepared) -> ObservedCall:
        """The observed form of a prepared call."""
        if prepared.observed is None:
            prepared.observed = cls(prepared)
        return prepared.observed

    @property
    def general_run(self) -> RunPlan:
        """See `Prepared.general_run`."""
        return self.prepared.general_run

    def __call__(self, comm: Comm, x: np.ndarray, times: int = 1) -> tuple[Any, Any]:
        """The new block, and the bound operator. times: how many operators it stands for."""
        fast_run, observers = self.prepared.fast_run, LEDGERS.get()
        if self.costs is None or fast_run is None or not observers.replays:
            return self._general(comm, x, times)
        if type(comm) is PartialComm or comm.use is not None:
            return self._general(comm, x, times)
        waited, start = comm.waited, perf_counter()
        result = fast_run(comm, x, self._general_run)
        phases = ((start, perf_counter(), comm.waited - waited),)
        worker: Any = WORKER.get()
        place = worker.recorded_at
        sent = self.sent.get(id(place))
        if sent is None or sent.recorded_at is not place:
            sent = self._sent(comm, place)
        for observer in observers:
            observer.collective(comm, sent, phases)
        return result

    def _general_run(self, comm: Comm, x: np.ndarray) -> tuple[Any, Any]:
        """The general way in place of the fast one, which learns the costs anew."""
        use = Use(comm, observed_call(self.prepared.call), LEDGERS.get())
        result = use.timed(lambda: self.prepared.general_run(comm, x))
        self._learn(use)
        return result

    def _sent(self, comm: Comm, place: Place | None) -> Sent:
        """What observers get from now on, for the line of the forward call."""
        call = self.prepared.call.recorded(place)
        sent = bounded(self.sent)[id(place)] = Sent.of(call, origin_of(comm, call), self.costs or [])
        return sent

    def _learn(self, use: Use) -> None:
        self.costs = use.costs
        self.sent.clear()

    def _general(self, comm: Comm, x: np.ndarray, times: int) -> tuple[Any, Any]:
        """The general way, which shows the costs."""
        prepared, observers, inner = self.prepared, LEDGERS.get(), whole_comm(comm)
        use = Use(inner, observed_call(prepared.call), observers)
        for observer in observers:
            for _ in range(times):
                observer.operator(inner.worker, origin_of(inner, use.call))
        if inner.use is not None:
            return prepared.general_run(comm, x)
        result = use.timed(lambda: prepared.general_run(comm, x))
        use.end()
        if observers.replays:
            self._learn(use)
            if not prepared.tried:
                prepared._shorten(comm, x)
        return result


def observed_call(call: Call) -> Call:
    """A call of this worker as observers see it: in a backward sweep it is at the line of the forward call."""
    worker = WORKER.get()
    return call if worker is None else call.recorded(worker.recorded_at)


_ABOVE = object()
"""In place of what a line of the library's calls: the line of the user's above it is asked."""


def prepared_for(op: Collective, x: np.ndarray, state: State | None, worker: Worker, frame: FrameType | None) -> Any:
    """The prepared call of this line with such a block; None where there is none. state: that of the block, if it is to
    be admitted. frame: None where no user's line is above, as in the backward sweep of a map that is differentiated
    from outside."""
    dtype = x.dtype
    key = (id(op), state, id(dtype), x.shape, frame and id(frame.f_code), frame and frame.f_lasti)
    prepared = worker.prepared.get(key)
    if prepared is None:
        prepared = _prepare(op, x, state, worker, frame, key)
    if prepared is _ABOVE:
        user = caller(frame)
        return None if user is frame else prepared_for(op, x, state, worker, user)
    if not prepared or not x.flags.c_contiguous:
        return None
    observers = LEDGERS.get()
    if observers:
        return prepared.observed or ObservedCall.of(prepared) if observers.replays else None
    return prepared


def _prepare(
    op: Collective, x: np.ndarray, state: State | None, worker: Worker, frame: FrameType | None, key: Any
) -> Any:
    """Prepare the call of a user's line with such a block. False where calls differ from time to time, or
    need more than their plan; None where that is not known yet."""
    if frame is not None and caller(frame) is not frame:
        bounded(worker.prepared)[key] = _ABOVE
        return _ABOVE
    admitted = None if state is None else op.admits.get(state)
    if admitted is None and state is not None:
        return None
    counts = op.adds and x.dtype.kind == "b"
    if counts or type(op) is Vary or worker.mesh.places is not None:
        bounded(worker.prepared)[key] = False
        return False
    group = worker.group(op.axes)
    op.check(group, x)
    call = call_of(op, x, worker, frame, None, False)
    prepared = bounded(worker.prepared)[key] = Prepared(op, x.dtype, group, call, admitted)
    return prepared


def call_of(op: Collective, x, worker: Worker, frame, needs_grad: list[bool] | None, borrowed: bool) -> Call:
    """What a worker calls, and from where. Calls of one line with blocks of one shape share one object, if nothing in
    it is about one block only."""
    user, uncached = caller(frame), needs_grad is not None or worker.mesh.places is not None
    key = None if user is None or uncached else (id(user.f_code), user.f_lasti, x.dtype, x.shape, borrowed)
    call = op.calls.get(key)
    if call is None:
        admit_dtype(x.dtype, f"spmd.{op.function}", lambda: describe(x))
        called, detail = op.called or Called(op.function), op.detail
        if called.forward:
            detail += f"{', ' if detail else ''}the adjoint of {called.forward}"
        call = Call(
            called.function,
            op.axes,
            x.dtype,
            x.shape,
            detail=detail,
            same_shape=op.same_shape,
            frame=user,
            leaf=called.leaf,
        )
        call.operator, call.backward = type(op).__name__, bool(called.forward)
        call.borrowed, call.needs_grad, call.host = (
            borrowed,
            needs_grad,
            worker.mesh.places is not None and not on_device(x),
        )
        if key is not None:
            bounded(op.calls)[key] = call  # It keeps the code, so that no other has its id.
    return call
