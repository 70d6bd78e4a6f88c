"""Collectives by messages of small blocks, from the second call of the same line on.

Who sends what to whom is known from the first call. A message is still checked, and may be of another size than before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.device import owned
from spmd.kernels.cpu.moves import small_fold
from spmd.transport.algorithms import choice, reductions
from spmd.transport.call import Call, Shape
from spmd.transport.handles import read_only
from spmd.transport.plan import Completion, Plan, RunPlan, part_of
from spmd.transport.processes.announce import HeaderComm
from spmd.transport.processes.headers import pack_header, unpack_shape
from spmd.transport.processes.links import ROOM
from spmd.transport.processes.running import Running

__all__ = ["RepeatedExchange", "RepeatedReduction", "repeated_messages"]


def repeated_messages(call: Call, plan: Plan, x: np.ndarray) -> Any:
    """A faster way to run a plan by messages for such blocks, or None."""
    if call.needs_grad is not None or not plan.repeats or plan.assumed_lengths is not None:
        return None
    if plan.kind == "all_reduce":
        flat = x.reshape(-1)
        fold = small_fold(flat, plan.how)
        name = choice.all_reduce(plan.group.size, x.nbytes)
        if fold is None or x.nbytes > ROOM or name != "recursive doubling":
            return None
        return RepeatedReduction(call, plan, fold, x)
    if plan.kind == "exchange":
        parts = [part_of(x, part) for k, part in enumerate(plan.parts) if k != plan.group.index]
        if all(part is None or part.nbytes + 8 * (1 + part.ndim) <= ROOM for part in parts):
            return RepeatedExchange(call, plan, x)
    return None


def _begin(comm: HeaderComm, call: Call, plan: Plan) -> Running | None:
    """The messages of the next collective; None if the group has not met since a map failed."""
    groups = comm.transport.groups
    calls = groups.known_calls(plan.group)
    if calls is None:
        return None
    comm.number += 1
    return groups.begin(comm, plan.group, call, calls)


class RepeatedReduction:
    """An all-reduce by recursive doubling of blocks of one shape.

    steps: the member to send to, or to receive from, or both (None: nobody), and whether what comes is put before the
    own partial sum, after it, or in its place.
    """

    __slots__ = ("bound", "call", "dtype", "fold", "plan", "shape", "steps")

    def __init__(self, call: Call, plan: Plan, fold: Callable[..., Any], x: np.ndarray):
        self.call, self.plan, self.fold = call, plan, fold
        self.shape, self.dtype, self.bound = x.shape, x.dtype, plan.bind(())
        self.steps = [
            (
                step.sends[0].peer if step.sends else None,
                step.receives[0].peer if step.receives else None,
                step.merge,
            )
            for step in reductions.all_reduce("recursive doubling", plan.group.size, plan.group.index).rounds
        ]

    def __call__(self, comm: HeaderComm, x: np.ndarray, general_run: RunPlan) -> tuple[Any, Any]:
        """The sum (max, min), and the bound operator."""
        run = _begin(comm, self.call, self.plan)
        if run is None:
            return general_run(comm, x)
        try:
            total = self._reduce(run, x.reshape(-1))
        except BaseException as error:
            run.failed(error)
            raise
        return read_only(total.reshape(self.shape)), self.bound

    def _reduce(self, run: Running, total: np.ndarray) -> np.ndarray:
        fold = self.fold
        for to, source, merge in self.steps:
            if to is not None:
                run.send(to, b"", total)
            if source is not None:
                other = run.view(source, b"", total.shape, self.dtype)
                if other is None:
                    other = run.take(source).data.view(self.dtype)
                total = owned(other) if not merge else fold(other, total) if merge == "before" else fold(total, other)
        return total


class RepeatedExchange:
    """An exchange of small parts of blocks of one shape. sends: the members that get a part, what describes it, and the
    part. sources: the members from which parts come. latest: what described these parts in the latest call, their
    shapes, and how they were combined."""

    __slots__ = ("call", "dtype", "latest", "own_part", "plan", "sends", "sources")

    def __init__(self, call: Call, plan: Plan, x: np.ndarray):
        self.call, self.plan, self.dtype = call, plan, x.dtype
        me = plan.group.index
        self.sends = [
            (k, pack_header(call.op, part_of(x, part).shape, False), part)
            for k, part in enumerate(plan.parts)
            if part is not None and k != me
        ]
        self.sources = [k for k in sorted(plan.sources) if k != me]
        self.own_part = plan.parts[me]
        self.latest: tuple[list[tuple[int, bytes, Shape]], Completion | None] = [], None

    def __call__(self, comm: HeaderComm, x: np.ndarray, general_run: RunPlan) -> tuple[Any, Any]:
        """The new block, and the bound operator."""
        run = _begin(comm, self.call, self.plan)
        if run is None:
            return general_run(comm, x)
        blocks: list[Any] = [None] * self.plan.group.size
        if self.own_part is not None:
            blocks[self.plan.group.index] = part_of(x, self.own_part)
        try:
            completion = self._exchange(run, x, blocks)
        except BaseException as error:
            run.failed(error)
            raise
        if completion is None:
            completion = self.plan.complete_repeated([None if b is None else b.shape for b in blocks])
            heads = [(k, pack_header(self.call.op, blocks[k].shape, False), blocks[k].shape) for k in self.sources]
            self.latest = heads, completion
        return completion.make(x, blocks), completion.bound

    def _exchange(self, run: Running, x: np.ndarray, blocks: list[Any]) -> Completion | None:
        """Send the parts, and put what comes into `blocks`. Returns how it is combined, if it is of the shapes of the
        latest call."""
        for k, head, part in self.sends:
            run.send(k, head, x if part is ... else x[part])
        heads, completion = self.latest
        # Others that are under way would be finished while this waits, and overwrite a packet that is looked at.
        if completion is not None and not run.groups.under_way:
            for k, head, shape in heads:
                blocks[k] = run.view(k, head, shape, self.dtype)
                if blocks[k] is None:
                    break
            else:
                return completion
        arrived = {k: run.take(k) for k in self.sources if blocks[k] is None}
        run.finish_receives()
        for k, a in arrived.items():
            blocks[k] = a.data.view(self.dtype).reshape(unpack_shape(a.head))
        return None
