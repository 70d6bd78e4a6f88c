"""The `Comm` of a virtual worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from spmd import kernels
from spmd.device import copied
from spmd.kernels.parallel import split_work
from spmd.transport.algorithms.cost import NOTHING
from spmd.transport.call import LEDGERS, Call, Group, Pair
from spmd.transport.handles import Done, Handle, Mapped, SentMessage, read_only
from spmd.transport.local.rendezvous import Participant, Rendezvous, Waiting, own_error
from spmd.transport.local.run_plan import RepeatedPlan
from spmd.transport.observing import count
from spmd.transport.plan import Completion, NeedsLengths, Plan, part_of


class LocalComm(Participant):
    """A virtual worker's `Comm`: every verb is a rendezvous."""

    def repeated_plan(self, call: Call, plan: Plan, x: np.ndarray) -> RepeatedPlan | None:
        serves = type(plan.group) is not Pair and RepeatedPlan.serves(plan, x)
        return RepeatedPlan(call, plan, x) if serves else None

    def _meet(self, group: Group, call: Call, payload: Any, take: Callable[[Rendezvous], Any], finish=None) -> Handle:
        if group.size == 1:
            rendezvous = Rendezvous(group)
            rendezvous.contributions = [payload]
            rendezvous.result = finish(rendezvous.contributions) if finish is not None else None
            return Done(take(rendezvous))
        return Waiting(self, self.execution.post(self, group, call, payload, finish), take)

    def meet(self, group: Group, call: Call, shapes: Iterable[Any]) -> list[Any]:
        """Send each member the shape of the block that it will receive, or None; returns the shapes for this worker."""
        return self._meet(group, call, list(shapes), lambda m: [p[group.index] for p in m.contributions]).wait()

    def _shapes(self, group: Group, call: Call) -> Handle:
        return self._meet(group, call, call.shape, lambda m: list(m.contributions))

    def _run(self, plan: Plan, call: Call, x: np.ndarray) -> Handle:
        """The last worker to come computes all results, so blocks are not needed afterwards."""
        group, borrowed = plan.group, call.borrowed
        if type(group) is Pair:
            return self._hand_over(plan, group, call, x)
        if plan.combine.parallel:
            return super()._run(plan, call, x)
        if borrowed and plan.hands_over:
            x, borrowed = copied(x), False  # others keep the block

        def take(m: Rendezvous) -> Any:
            result = m.result[group.index]
            if type(result) is Failed:
                raise own_error(result.error)
            m.result[group.index] = None  # the worker may then hold the only reference
            return result

        return self._meet(group, call, (plan, read_only(x), borrowed), take, partial(self._results, group))

    def _hand_over(self, plan: Plan, pair: Pair, call: Call, x: np.ndarray) -> Handle:
        """Run a plan of a pair: who sends leaves its block and goes on."""
        if not pair.sends:
            return self._meet(pair, call, None, lambda m: plan.finish(x, (m.contributions[0], None)))
        handle = self._meet(pair, call, handed(call, x), _result)
        if type(handle) is Waiting and handle.rendezvous is not None and handle.rendezvous.error is not None:
            handle.wait()  # the receiver was there, and called something else: both raise
        return SentMessage(plan.finish(x, (None, None)))

    def _results(self, group: Group, contributions: list[tuple[Plan, np.ndarray, bool]]) -> list[Any]:
        """The results of all members, from their plans and blocks."""
        plans, xs, borrowed = (list(column) for column in zip(*contributions, strict=True))
        fresh = any(borrowed)
        contributions.clear()
        if plans[0].same:
            completions = [plan.complete([x.shape for x in xs]) for plan in plans]
            make = completions[0].make
            nbytes = prod(completions[0].shape) * xs[0].itemsize
            block = self.execution.make(group, nbytes, lambda: make(xs[0], xs, fresh))
            return [(block, c.bound) for c in completions]
        tasks, sizes = [], []
        for k, plan in enumerate(plans):
            blocks = [part_of(x, p.parts[k]) for p, x in zip(plans, xs, strict=True)]
            try:
                completion = plan.complete([None if b is None else b.shape for b in blocks])
                sizes.append(prod(completion.shape) * plan.dtype.itemsize)
                tasks.append(partial(_result_or_error, completion, xs[k], blocks, fresh))
            except Exception as error:
                sizes.append(0)
                tasks.append(partial(Failed, error.with_traceback(None)))
        xs.clear()
        nbytes = sum(sizes)
        if nbytes < split_work.SPLIT_MIN:
            return [task() for task in tasks]
        return self.execution.make(group, nbytes, lambda: split_work.call_each(tasks, sizes))

    def _run_with_lengths(self, needs: NeedsLengths, call: Call, x: np.ndarray) -> Handle:
        """In one rendezvous: the last worker to come determines the parts that each sends."""
        group = needs.group

        def parts_for(lengths: tuple[int, ...]) -> tuple[Plan, dict[int, np.ndarray]]:
            plan = needs.plan(lengths)
            return plan, _parts(group, call, plan.sends(x)) if plan.kind != "none" else {}

        def finish(contributions: list[tuple[int, Callable[[tuple[int, ...]], Any]]]) -> list[Any]:
            lengths, makers = zip(*contributions, strict=True)
            contributions.clear()  # they keep the blocks alive
            return [parts_of(lengths) for parts_of in makers]

        def take(m: Rendezvous) -> Any:
            plan, _ = m.result[group.index]
            if LEDGERS.get():
                count(self, "shapes", NOTHING)
                if plan.kind != "none":
                    self._count_plan(plan, x)
            if plan.kind == "none":
                blocks: list[Any] = [part_of(x, part) for part in plan.parts]
            else:
                received = _take_parts(group, [parts for _, parts in m.result])
                blocks = [received.get(k) for k in range(group.size)]
            return plan.finish(x, blocks, begun=plan.combine.begin(plan, x, call.borrowed) if call.borrowed else None)

        return self._meet(group, call, (x.shape[needs.near.dim], parts_for), take, finish)

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        def finish(xs: list[np.ndarray]):
            combine = kernels.of(x).combine
            if x.nbytes < split_work.SPLIT_MIN:
                return read_only(combine(xs, how))
            return self.execution.make(group, x.nbytes, lambda: read_only(combine(xs, how)))

        return self._meet(group, call, read_only(x), _result, finish)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle:
        """A sum overwrites a spare block, if there is one."""

        def finish(contributions: list[tuple[Sequence[np.ndarray], Sequence[bool]]]):
            def total(k: int) -> np.ndarray:
                blocks = [xs[k] for xs, _ in contributions]
                into = next((x for x, (_, spare) in zip(blocks, contributions, strict=True) if spare[k]), None)
                return read_only(kernels.of(blocks[0]).combine(blocks, into=into))

            totals = self.execution.make(group, nbytes, lambda: [total(k) for k in range(count)])
            contributions.clear()  # free the blocks: the handle may live long
            return totals

        count, nbytes = len(xs), sum(x.nbytes for x in xs)
        for x, own in zip(xs, spare, strict=True):
            if not own:
                read_only(x)
        return self._meet(group, call, (xs, spare), _result, finish)

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        return Mapped(self._all_to_all(group, call, parts), lambda xs: read_only(kernels.of(xs[0]).combine(xs)))

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        return self._meet(group, call, handed(call, x), lambda m: list(m.contributions))

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        handed_out = [read_only(p) if k == group.index else handed(call, p) for k, p in enumerate(parts)]
        return self._meet(group, call, handed_out, lambda m: [p[group.index] for p in m.contributions])

    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        own_block = None if x is None else handed(call, x)
        return self._meet(group, call, own_block, lambda m: m.contributions[root])

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        def finish(xs: list[np.ndarray]) -> np.ndarray:
            return self.execution.make(group, x.nbytes, lambda: read_only(kernels.of(x).combine(xs)))

        def take(m: Rendezvous) -> Any:
            if group.index != root:
                return None
            total, m.result = m.result, None
            return total

        return self._meet(group, call, read_only(x), take, finish)

    def _exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], sources: Collection[int]) -> Handle:
        return self._meet(group, call, _parts(group, call, sends), lambda m: _take_parts(group, m.contributions))


class Failed(NamedTuple):
    """A member's error, in place of its result."""

    error: Exception


def _result_or_error(completion: Completion, x: np.ndarray, blocks: list[Any], fresh: bool) -> Any:
    """A member's result: the new block and the bound operator, or its error."""
    try:
        return completion.make(x, blocks, fresh), completion.bound
    except Exception as error:
        return Failed(error.with_traceback(None))


def _parts(group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The parts that a member sends, copied if the block is borrowed: receivers may keep them."""
    return {k: read_only(x) if k == group.index else handed(call, x) for k, x in sends.items()}


def _take_parts(group: Group, parts: Sequence[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """The parts for this member, removed from the contributions, so that it holds the only references."""
    return {k: p.pop(group.index) for k, p in enumerate(parts) if group.index in p}


def handed(call: Call, x: np.ndarray) -> np.ndarray:
    """A block for others to keep: a copy if it is borrowed."""
    return read_only(copied(x) if call.borrowed else x)


def _result(m: Rendezvous):
    return m.result
