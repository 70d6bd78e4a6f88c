"""Transports: collectives on contiguous buffers, which all workers of a group call.

A worker has a `Comm`. Each verb starts a collective and returns a `Handle`; `wait()` returns the result. All members of
a group start the same verbs in the same order. Each verb sends its `Call`, so members can check that, and the shapes,
so no member needs to know the blocks of others beforehand.

Sums over the members of a group are pairwise, in the order of `spmd.kernels.pairwise`: the same inputs always give the
same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from spmd.device import copied
from spmd.settings import setting
from spmd.transport.algorithms.cost import NOTHING, Cost
from spmd.transport.algorithms.neighbours import Near
from spmd.transport.call import LEDGERS, Call, Group, Pair, Place
from spmd.transport.costs import cost_of, cost_of_sums
from spmd.transport.handles import Chained, Done, Handle, Mapped, Outcome, SentMessage
from spmd.transport.observing import Use, count, observed
from spmd.transport.plan import NeedsLengths, Plan, RunPlan, part_of

__all__ = ["Comm", "Transport", "checks_are_on"]


def checks_are_on() -> bool:
    """Whether optional headers, the watchdog and the comparison of replicas are on: not with SPMD_CHECK=0."""
    return setting("SPMD_CHECK")


class Comm(ABC):
    """One worker's view of a transport. Whole blocks are C-contiguous; parts may have any strides. Received blocks are
    read-only. If workers share memory, they are views of the sent blocks, unless those are borrowed.

    The public verbs count their cost, in messages and bytes that this worker sends; engines implement the protected
    ones. The cost is that of the algorithm by which messages would be sent, also where workers share memory.
    """

    worker: int
    number: int = 0
    """The number of collectives so far. Members of a group compare it, which detects workers that use two groups in
    another order, although each rendezvous by itself looks right."""
    in_order: bool = True
    """Whether all workers count the collectives that this worker makes now: see `uncounted`."""
    use: Use | None = None
    """The collective that this worker is in, while it is observed."""
    called_at: Place | None = None
    """Then the line that runs the body."""
    waited: float = 0.0
    """The seconds in which it has waited for others, inside `timed`."""

    @contextmanager
    def uncounted(self, some: bool = True) -> Iterator[None]:
        """Inside, a worker makes collectives that others, of other groups, do not make. Afterwards all have counted the
        same. some: whether it is so; else nothing is changed."""
        if not some:
            yield
            return
        before = self.number, self.in_order
        self.in_order = False
        try:
            yield
        finally:
            self.number, self.in_order = before

    def from_one_line(self, frame: FrameType) -> None:  # noqa: B027 (one process has nothing to compare)
        """All members run from one line of the user's program, which stands above `frame`: processes compare it with
        each collective."""

    def run(self, plan: Plan | NeedsLengths, call: Call, x: Any) -> Handle:
        """Run a plan for a block. The result is the new block, and the operator bound to the received shapes.

        Every member of the group runs its own plan of the same kind. The cost is the plan's.
        """
        if isinstance(plan, NeedsLengths):
            observers = LEDGERS.get()
            if observers:
                start = partial(self._run_with_lengths, plan, call, x)
                return observed(self, call, observers, start)
            return self._run_with_lengths(plan, call, x)
        if plan.kind == "none":
            self.number += plan.counted
            blocks = [part_of(x, part) for part in plan.parts]
            return Done(plan.finish(x, blocks, begun=plan.combine.begin(plan, x, call.borrowed)))
        observers = LEDGERS.get()
        if observers:
            start = partial(self._counted_run, plan, call, x)
            return observed(self, call, observers, start)
        return self._run(plan, call, x)

    def timed(self) -> AbstractContextManager[None]:
        """Count the seconds in which this worker waits for others, in `waited`."""
        return nullcontext()

    def _counted_run(self, plan: Plan, call: Call, x: Any) -> Handle:
        return self._counted_plan(plan, x, self._run(plan, call, x))

    def _counted_plan(self, plan: Plan, x: Any, handle: Handle) -> Handle:
        """Count what is really sent: `plan.costs` must be the same. Where the root alone knows what goes, the others
        count it once it has come."""
        if plan.kind not in ("broadcast", "scatter") or plan.group.index == plan.root:
            self._count_plan(plan, x)
            return handle
        return self._counted_at_end(plan.kind, plan.group, plan.dtype, plan.root, handle, lambda result: result[0])

    def _count_plan(self, plan: Plan, x: Any) -> None:
        declared = plan.costs(self.members_per_host(plan.group))
        if LEDGERS.get().replays:  # nobody compares them
            count(self, plan.kind, declared)
            return
        in_parts = plan.kind in ("reduce_scatter", "all_to_all", "scatter", "exchange")
        self._count_verb(plan.kind, plan.group, x, plan.sends(x) if in_parts else None, plan.root, declared)

    def _counted_at_end(
        self, kind: str, group: Group, dtype: np.dtype, root: int, handle: Handle, block: Callable[[Any], Any]
    ) -> Handle:
        """Count what has come from the root. block: gives the block of the result."""
        per_host = self.members_per_host(group)

        def counted(result: Any) -> Any:
            count(self, kind, cost_of(kind, group, dtype, 0, (), root, per_host, block(result).nbytes))
            return result

        return Mapped(handle, counted)

    def members_per_host(self, group: Group) -> int:
        """The number of members of a group on each host, if that is one number: see `choice.members_per_host`."""
        return 1

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
        if kind == "gather":
            handle = self._gather(group, call, x, plan.root)
            return Mapped(handle, lambda blocks: plan.finish(own, blocks or [None] * group.size))
        if kind == "scatter":
            own_parts = [*plan.sends(x).values()] if group.index == plan.root else None
            nothing = [None] * group.size
            handle = self._scatter(group, call, own_parts, plan.root)
            return Mapped(handle, lambda x: plan.finish(own, [*nothing[: plan.root], x, *nothing[plan.root + 1 :]]))
        if type(group) is Pair and group.sends:
            handle = self._exchange(group, call, plan.sends(copied(x) if call.borrowed else x), ())
            return SentMessage(plan.finish(own, [None] * group.size), handle)
        handle = self._exchange(group, call, plan.sends(x), plan.sources)
        begun = plan.combine.begin(plan, x, call.borrowed)

        def finish(parts: Mapping[int, Any]) -> tuple[Any, Any]:
            blocks: list[Any] = [None] * group.size
            for k, part in parts.items():
                blocks[k] = part
            return plan.finish(own, blocks, begun=begun)

        return Mapped(handle, finish)

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

    def _count_verb(
        self,
        verb: str,
        group: Group,
        x: Any,
        parts: Mapping[int, Any] | None = None,
        root: int = 0,
        declared: Cost | None = None,
    ) -> None:
        """Count a verb, called with this block, or these parts by member."""
        like = x if parts is None else next(iter(parts.values()), x)
        if like is None:  # nothing comes from here
            like = np.empty(0, np.uint8)
        sizes = [None if parts is None or k not in parts else parts[k].size for k in range(group.size)]
        per_host, size = self.members_per_host(group), 0 if x is None else x.size
        count(self, verb, cost_of(verb, group, like.dtype, size, sizes, root, per_host), declared)

    def _observed_verb(
        self,
        verb: str,
        group: Group,
        call: Call,
        start: Callable[[], Handle],
        x: Any,
        parts: Mapping[int, Any] | None = None,
        root: int = 0,
    ) -> Handle:
        """A verb, counted with what this member brings."""

        def counted() -> Handle:
            self._count_verb(verb, group, x, parts, root)
            return start()

        return observed(self, call, LEDGERS.get(), counted)

    def all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str = "sum") -> Handle:
        """The entrywise sum (max, min) of all members' blocks of one shape, on every member.

        Cost: ceil(log2 n) messages of small blocks, and up to one more; of large ones each member sends twice the
        block at most.
        """
        if LEDGERS.get():
            return self._observed_verb("all_reduce", group, call, partial(self._all_reduce, group, call, x, how), x)
        return self._all_reduce(group, call, x, how)

    def all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool] = ()) -> Handle:
        """The sums of several blocks of one dtype in one collective; the result is a list.

        spare: for each block, whether this call has the only reference, so that its sum may overwrite it.
        """
        spare = spare or [False] * len(xs)
        observers = LEDGERS.get()
        if not observers:
            return self._all_reduce_many(group, call, xs, spare)

        def counted() -> Handle:
            dtype = np.dtype(xs[0].dtype if xs else np.uint8)
            count(self, "all_reduce", cost_of_sums(group, dtype, [x.shape for x in xs], self.members_per_host(group)))
            return self._all_reduce_many(group, call, xs, spare)

        return observed(self, call, observers, counted)

    def reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        """parts[k] goes to member k, which gets the sum of what all sent it. Cost: as many bytes as the other parts
        have."""
        if LEDGERS.get():
            start = partial(self._reduce_scatter, group, call, parts)
            return self._observed_verb("reduce_scatter", group, call, start, None, dict(enumerate(parts)))
        return self._reduce_scatter(group, call, parts)

    def all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        """All members' blocks, as a list; shapes may differ. Cost: ceil(log2 n) messages, n - 1 more of a large
        block."""
        if LEDGERS.get():
            return self._observed_verb("all_gather", group, call, partial(self._all_gather, group, call, x), x)
        return self._all_gather(group, call, x)

    def all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        """parts[k] goes to member k; the result lists what each member sent here. Cost: ceil(log2 n) messages, and one
        for each large part."""
        if LEDGERS.get():
            start = partial(self._all_to_all, group, call, parts)
            return self._observed_verb("all_to_all", group, call, start, None, dict(enumerate(parts)))
        return self._all_to_all(group, call, parts)

    def broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        """The root's block, on every member (others pass None). Cost: ceil(log2 n) messages of the root; large blocks
        go in chunks, first down a tree and then around."""
        start = partial(self._broadcast, group, call, x, root)
        return self._observed_from_root("broadcast", group, call, start, x, None, root) if LEDGERS.get() else start()

    def reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        """The sum of all blocks at the root; None elsewhere. Cost: one message from each other member; of large blocks
        each member sends one chunk to each other."""
        if LEDGERS.get():
            start = partial(self._reduce, group, call, x, root)
            return self._observed_verb("reduce", group, call, start, x, root=root)
        return self._reduce(group, call, x, root)

    def gather(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        """All members' blocks, as a list, at the root; None elsewhere. Shapes may differ. Cost: one message from each
        other member, up a tree; one more of a large block."""
        if LEDGERS.get():
            start = partial(self._gather, group, call, x, root)
            return self._observed_verb("gather", group, call, start, x, root=root)
        return self._gather(group, call, x, root)

    def scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray] | None, root: int) -> Handle:
        """parts[k] of the root's goes to member k; others pass None. Cost: ceil(log2 n) messages of the root, and one
        for each large part."""
        start = partial(self._scatter, group, call, parts, root)
        return self._observed_from_root("scatter", group, call, start, None, parts, root) if LEDGERS.get() else start()

    def _observed_from_root(
        self,
        kind: str,
        group: Group,
        call: Call,
        start: Callable[[], Handle],
        x: Any,
        parts: Sequence[Any] | None,
        root: int,
    ) -> Handle:
        """A verb, counted with what comes from the root: there at once, elsewhere when it has come."""
        if group.index == root:
            pieces = None if parts is None else dict(enumerate(parts))
            return self._observed_verb(kind, group, call, start, x, pieces, root)
        dtype = np.dtype(call.dtype)

        def counted() -> Handle:
            return self._counted_at_end(kind, group, dtype, root, start(), lambda block: block)

        return observed(self, call, LEDGERS.get(), counted)

    def exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], sources: Collection[int]) -> Handle:
        """sends[k] goes to member k; the result maps the sources, the members that send here, to what they sent.

        Cost: a message per send to another.
        """
        if LEDGERS.get():
            start = partial(self._exchange, group, call, sends, sources)
            return self._observed_verb("exchange", group, call, start, None, sends)
        return self._exchange(group, call, sends, sources)

    def shapes(self, group: Group, call: Call) -> Handle:
        """The shapes of all members' blocks, as a list. Cost: ceil(log2 n) messages, which ledgers do not count: a
        line that calls it again knows the shapes."""
        return self._observed_question(call, partial(self._shapes, group, call))

    def lengths(self, group: Group, call: Call, near: Near) -> Handle:
        """The lengths of all members' blocks in one dimension, as a tuple. Those that do not matter may be `near.far`:
        where members meet by messages, each learns the others from its neighbours."""
        return self._observed_question(call, partial(self._lengths, group, call, near))

    def _observed_question(self, call: Call, start: Callable[[], Handle]) -> Handle:
        """A verb that asks for shapes."""
        observers = LEDGERS.get()
        if not observers:
            return start()

        def counted() -> Handle:
            count(self, "shapes", NOTHING)
            return start()

        return observed(self, call, observers, counted)

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

    def _gather(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        sources = range(group.size) if group.index == root else ()
        handle = self._exchange(group, call, {root: x}, sources)
        return Mapped(handle, lambda blocks: [blocks[k] for k in sources] or None)

    def _scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray] | None, root: int) -> Handle:
        handle = self._exchange(group, call, dict(enumerate(parts or ())), (root,))
        return Mapped(handle, lambda blocks: blocks[root])

    @abstractmethod
    def _exchange(
        self, group: Group, call: Call, sends: Mapping[int, np.ndarray], sources: Collection[int]
    ) -> Handle: ...


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
