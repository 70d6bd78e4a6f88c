"""Transports: collectives on contiguous buffers, which all workers of a group call.

A worker has a `Comm`. Each verb starts a collective and returns a `Handle`; `wait()` returns the result. All members of
a group start the same verbs in the same order. Each verb sends its `Call`, so members can check that, and the shapes,
so no member needs to know the blocks of others beforehand.

Sums over the members of a group are pairwise, in the order of `spmd.kernels.pairwise`: the same inputs always give the
same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.settings import setting
from spmd.transport.algorithms.neighbours import Near
from spmd.transport.call import LEDGERS, Call, Group
from spmd.transport.handles import Chained, Done, Handle, Mapped, Outcome
from spmd.transport.plan import NeedsLengths, Plan, RunPlan, all_reduce_cost, part_of

__all__ = ["Comm", "Transport", "checks_are_on"]


def checks_are_on() -> bool:
    """Whether optional headers, the watchdog and the comparison of replicas are on: not with SPMD_CHECK=0."""
    return setting("SPMD_CHECK")


class Comm(ABC):
    """One worker's view of a transport. Whole blocks are C-contiguous; parts may have any strides. Received blocks are
    read-only. If workers share memory, they are views of the sent blocks, unless those are borrowed.

    The public verbs count their cost, in messages and bytes that this worker sends; engines implement the protected
    ones. The cost is that of the usual algorithm, the same in every transport.
    """

    worker: int
    number: int = 0
    """The number of collectives so far. Members of a group compare it, which detects workers that use two groups in
    another order, although each rendezvous by itself looks right."""

    def run(self, plan: Plan | NeedsLengths, call: Call, x: Any) -> Handle:
        """Run a plan for a block. The result is the new block, and the operator bound to the received shapes.

        Every member of the group runs its own plan of the same kind. The cost is the plan's.
        """
        if isinstance(plan, NeedsLengths):
            return self._run_with_lengths(plan, call, x)
        if plan.kind == "none":
            blocks = [part_of(x, part) for part in plan.parts]
            return Done(plan.finish(x, blocks, begun=plan.combine.begin(plan, x, call.borrowed)))
        self._count_plan(plan, x)
        return self._run(plan, call, x)

    def _count_plan(self, plan: Plan, x: Any) -> None:
        """Count the bytes that are really sent: `plan.cost` must be the same."""
        if LEDGERS.get():
            reduces = plan.kind == "all_reduce"
            cost = _all_reduce_cost(plan.group, x) if reduces else _parts_cost(plan.group, plan.sends(x))
            self._count(plan.kind, *cost)

    def _run(self, plan: Plan, call: Call, x: Any) -> Handle:
        """Run a plan by the verb for its movement. Engines that can combine while receiving override it."""
        group, kind = plan.group, plan.kind
        if kind == "all_reduce":
            return Mapped(self._all_reduce(group, call, x, plan.how), plan.with_bound)
        if kind == "reduce_scatter":
            return Mapped(self._reduce_scatter(group, call, [*plan.sends(x).values()]), plan.with_bound)
        if kind == "broadcast":
            own_block = x if group.index == plan.root else None
            return Mapped(self._broadcast(group, call, own_block, plan.root), plan.with_bound)
        own = x if plan.combine.uses_block else None  # a receiver may then hold the only reference to a block
        if kind == "reduce":
            handle = self._reduce(group, call, x, plan.root)
            if group.index == plan.root:
                return Mapped(handle, plan.with_bound)
            return Mapped(handle, lambda _: plan.finish(own, [None] * group.size))
        if kind == "all_gather":
            return Mapped(self._all_gather(group, call, x), lambda blocks: plan.finish(own, blocks))
        if kind == "all_to_all":
            handle = self._all_to_all(group, call, [*plan.sends(x).values()])
            return Mapped(handle, lambda blocks: plan.finish(own, blocks))
        handle = self._exchange(group, call, plan.sends(x), plan.sources)
        begun = plan.combine.begin(plan, x, call.borrowed)
        return Mapped(handle, lambda parts: plan.finish(own, [parts.get(k) for k in range(group.size)], begun=begun))

    def _run_with_lengths(self, needs: NeedsLengths, call: Call, x: Any) -> Handle:
        """Run a plan after the members have learnt the lengths of near blocks."""

        def steps() -> Generator[Handle, Any, Any]:
            lengths = yield self.lengths(needs.group, call, needs.near)
            return (yield self.run(needs.plan(lengths), call, x))

        return Chained(steps())

    def repeated_plan(self, call: Call, plan: Plan, x: np.ndarray) -> Callable[[Any, np.ndarray, RunPlan], Any] | None:
        """A faster way to run a plan in later calls of the same line with such blocks, or None. It gets the general way
        as an argument, in case the blocks of others have changed."""
        return None

    def given(self, x: Any) -> Any:
        """An array of the caller of the map, for this worker to read."""
        return x

    def _count(self, verb: str, messages: int, nbytes: int) -> None:
        for ledger in LEDGERS.get():
            ledger.verb(self.worker, verb, messages, nbytes)

    def all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str = "sum") -> Handle:
        """The entrywise sum (max, min) of all members' blocks of one shape, on every member.

        Cost: 2 (n - 1) messages; each member sends every chunk but its own, then its reduced chunk to all others.
        """
        if LEDGERS.get():
            self._count("all_reduce", *_all_reduce_cost(group, x))
        return self._all_reduce(group, call, x, how)

    def all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool] = ()) -> Handle:
        """The sums of several blocks of one dtype in one collective; the result is a list.

        spare: for each block, whether this call has the only reference, so that its sum may overwrite it.
        """
        if LEDGERS.get():
            self._count("all_reduce", *_all_reduce_cost(group, *xs))
        return self._all_reduce_many(group, call, xs, spare or [False] * len(xs))

    def reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        """parts[k] goes to member k, which gets the sum of what all sent it. Cost: n - 1 messages."""
        if LEDGERS.get():
            self._count("reduce_scatter", *_parts_cost(group, dict(enumerate(parts))))
        return self._reduce_scatter(group, call, parts)

    def all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        """All members' blocks, as a list; shapes may differ. Cost: n - 1 messages of the own block."""
        if LEDGERS.get():
            self._count("all_gather", *_parts_cost(group, dict.fromkeys(range(group.size), x)))
        return self._all_gather(group, call, x)

    def all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        """parts[k] goes to member k; the result lists what each member sent here. Cost: n - 1 messages."""
        if LEDGERS.get():
            self._count("all_to_all", *_parts_cost(group, dict(enumerate(parts))))
        return self._all_to_all(group, call, parts)

    def broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        """The root's block, on every member (others pass None). Cost: n - 1 messages, sent by the root."""
        if LEDGERS.get():
            self._count("broadcast", *_parts_cost(group, {} if x is None else dict.fromkeys(range(group.size), x)))
        return self._broadcast(group, call, x, root)

    def reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        """The sum of all blocks at the root; None elsewhere. Cost: one message from each other member."""
        if LEDGERS.get():
            self._count("reduce", *_parts_cost(group, {root: x}))
        return self._reduce(group, call, x, root)

    def exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], sources: Collection[int]) -> Handle:
        """sends[k] goes to member k; the result maps the sources, the members that send here, to what they sent.

        Cost: a message per send to another.
        """
        if LEDGERS.get():
            self._count("exchange", *_parts_cost(group, sends))
        return self._exchange(group, call, sends, sources)

    def shapes(self, group: Group, call: Call) -> Handle:
        """The shapes of all members' blocks, as a list. They travel with the calls: no message, no bytes."""
        self._count("shapes", 0, 0)
        return self._shapes(group, call)

    def lengths(self, group: Group, call: Call, near: Near) -> Handle:
        """The lengths of all members' blocks in one dimension, as a tuple. Those that do not matter may be `near.far`:
        where members meet by messages, each learns the others from its neighbours."""
        self._count("shapes", 0, 0)
        return self._lengths(group, call, near)

    def _lengths(self, group: Group, call: Call, near: Near) -> Handle:
        return Mapped(self._shapes(group, call), lambda shapes: tuple(shape[near.dim] for shape in shapes))

    @abstractmethod
    def _shapes(self, group: Group, call: Call) -> Handle: ...

    @abstractmethod
    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle: ...

    @abstractmethod
    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle: ...

    @abstractmethod
    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle: ...

    @abstractmethod
    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle: ...

    @abstractmethod
    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle: ...

    @abstractmethod
    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle: ...

    @abstractmethod
    def _exchange(
        self, group: Group, call: Call, sends: Mapping[int, np.ndarray], sources: Collection[int]
    ) -> Handle: ...


def _all_reduce_cost(group: Group, *xs: np.ndarray) -> tuple[int, int]:
    return all_reduce_cost(group, sum(x.size for x in xs), xs[0].itemsize if xs else 0)


def _parts_cost(group: Group, parts: Mapping[int, np.ndarray]) -> tuple[int, int]:
    """Messages and bytes that this member sends to the others."""
    others = [x.nbytes for k, x in parts.items() if k != group.index]
    return len(others), sum(others)


class Transport(ABC):
    """The workers of one mesh."""

    name: str
    size: int
    local: Sequence[int]
    """The numbers of the workers that this process holds."""

    @abstractmethod
    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        """Run body on every worker held here, with its Comm; their results by worker.

        scheduler: of virtual workers, "lockstep", "threads" or ONE_BY_ONE. describe: names a worker in error messages.
        Raises the first error of any worker.
        """

    @abstractmethod
    def threads(self) -> int:
        """The threads that libraries use in each worker: the same number for all, so that all get the same bits. The
        first call is collective; a run makes it."""

    @abstractmethod
    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        """Send small JSON values, one per worker held here, to all processes."""
