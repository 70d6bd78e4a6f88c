"""What a collective moves, as data: an operator gives its plan for a block, transports run it.

A plan says which part of a member's block goes to which member of its group, and how the new block is combined from
what comes. `kind` names the movement in the terms of MPI; the transport chooses the algorithm. Nothing else describes
the movement of an operator: its cost, the shape of its result and what `spmd.jit` repeats follow from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from spmd import kernels
from spmd.device import COPIED, contiguous, copied, joined, owned, stacked, zeros
from spmd.kernels.cpu.moves import joiner, places, small_fold
from spmd.kernels.memory import pool
from spmd.kernels.parallel import split_work
from spmd.layout import Box, offsets
from spmd.transport.algorithms.cost import NOTHING, Cost
from spmd.transport.algorithms.neighbours import Near
from spmd.transport.call import Group, Shape
from spmd.transport.costs import cost_of
from spmd.transport.handles import read_only

__all__ = [
    "Combine",
    "Completion",
    "Concatenate",
    "Forward",
    "Make",
    "NeedsLengths",
    "Part",
    "PlaceBoxes",
    "Plan",
    "Plans",
    "Reduce",
    "RunPlan",
    "part_of",
    "to_all",
]

Part = Any
"""Part of a block: `...` for all of it, None for nothing, an index, or a function of the block."""

Shapes = Sequence[Any]
"""The shapes of what comes from each member; None where nothing comes."""

Make = Callable[..., Any]
"""make(x, blocks, fresh=True, begun=None) gives the new block of the own block x and of what came from each member.
fresh: never in the memory of what came. begun: what `Combine.begin` has given."""

Kind = Literal[
    "none",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "exchange",
]


def part_of(x: Any, part: Part) -> Any:
    """A part of a block: a view where it can be."""
    if part is ... or part is None:
        return x if part is ... else None
    return part(x) if callable(part) else x[part]


class Combine:
    """How a new block is combined from what comes.

    in_place: the result may extend the own block in its own buffer, so that little is written. parallel: each member
    makes its own result, in parallel if there are cores; else one of a process makes all results. uses_block: the
    result depends on the own block, or its place, not only on what comes.
    """

    in_place: bool = False
    parallel: ClassVar[bool] = False
    uses_block: bool = True

    def sources(self, plan: Plan) -> Collection[int]:
        """The members from which something comes."""
        return range(plan.group.size)

    def complete(self, plan: Plan, shapes: Shapes) -> tuple[Make, Shape]:
        """The function that makes the new block from blocks of these shapes, and its shape. Raises LayoutError where
        they do not fit each other."""
        raise NotImplementedError

    def quick(self, plan: Plan, shapes: Shapes) -> Make | None:
        """A faster function for small blocks of repeated calls, whose results nobody can ever write to; None if there
        is none."""
        return None

    def together(self, plans: Sequence[Plan], shapes: Sequence[Shape]) -> Callable[[list[Any]], list[Any]] | None:
        """A function of the small blocks of all members, of these shapes, that makes their results faster than one by
        one; None if there is none."""
        return None

    def begin(self, plan: Plan, x: Any, borrowed: bool = False) -> Any:
        """What can be made of the own block while messages are under way, for `make`. borrowed: whether the block may
        change when the collective is over."""
        return None

    def __str__(self) -> str:
        raise NotImplementedError


class Completion(NamedTuple):
    """A plan for known shapes: the function that makes the new block, its shape, and the bound operator."""

    make: Make
    shape: Shape
    bound: Any


@dataclass(frozen=True, eq=False)
class Plan:
    """What one member of a group does in a collective.

    kind: the movement; "exchange" is any set of messages, "none" moves nothing. group: who takes part, and which member
    this is. shape, dtype: those of its block. parts: for each member the part of the block that it gets. combine: how
    the new block is made. bind: gives, of the shapes that come, the operator bound to them. root: the member from which
    a broadcast or a scatter comes, and to which a reduction or a gather goes. assumed_lengths: (d, lengths) where the
    plan holds only if the members' blocks have these lengths in dimension d. counted: whether it counts as a collective
    although nothing moves here, because others of the group exchange something.
    """

    kind: Kind
    group: Group
    shape: Shape
    dtype: np.dtype
    parts: Sequence[Part]
    combine: Combine
    bind: Callable[[Any], Any] = field(repr=False)
    root: int = 0
    assumed_lengths: tuple[int, tuple[int, ...]] | None = None
    counted: bool = False

    @property
    def same(self) -> bool:
        """Whether all members make the same of the same blocks."""
        return self.kind in ("all_reduce", "all_gather")

    @property
    def how(self) -> str:
        """How a reduction reduces: "sum", "max" or "min"."""
        return self.combine.how if type(self.combine) is Reduce else "sum"

    @property
    def sources(self) -> Collection[int]:
        """The members from which something comes in an exchange."""
        return self.combine.sources(self)

    @cached_property
    def forwards_from(self) -> tuple[int, ...] | None:
        """Where the result is one member's block as it is: that member; nobody for zeros. Else None."""
        if type(self.combine) is not Forward:
            return None
        return () if self.combine.source is None else (self.combine.source,)

    @property
    def hands_over(self) -> bool:
        """Whether others may take parts of the block as they are."""
        moves = any(part is not None for k, part in enumerate(self.parts) if k != self.group.index)
        return moves and self.kind in ("broadcast", "gather", "scatter", "exchange") and type(self.combine) is Forward

    @property
    def copy_free(self) -> bool:
        """Whether little is written, however large the blocks are."""
        return self.combine.in_place or self.forwards_from is not None

    @property
    def repeats(self) -> bool:
        """Whether calls with blocks of this shape can be repeated unchecked: something is exchanged, and parts are
        indices. Not where more than two members reduce large blocks, of which each reduces a part for all."""
        large = prod(self.shape) * self.dtype.itemsize > COPIED
        if self.group.size == 1 or (self.kind == "all_reduce" and self.group.size > 2 and large):
            return False
        return not any(map(callable, self.parts))

    @cached_property
    def _completions(self) -> dict[Any, Completion]:
        return {}

    def complete(self, shapes: Shapes) -> Completion:
        """The completion where an array of shapes[k] comes from member k, or nothing (None)."""
        shapes = tuple(shapes)
        completion = self._completions.get(shapes)
        if completion is None:
            if len(self._completions) >= _COMPLETIONS_MAX:
                self._completions.clear()
            bound = self.bind(shapes)  # which raises where the shapes do not fit each other
            completion = self._completions[shapes] = Completion(*self.combine.complete(self, shapes), bound)
        return completion

    def complete_repeated(self, shapes: Shapes) -> Completion:
        """`complete`, for a line that calls it again and again."""
        completion = self.complete(shapes)
        quick = self.combine.quick(self, shapes)
        return completion if quick is None else completion._replace(make=quick)

    def finish(self, x: Any, blocks: Sequence[Any], fresh: bool = False, begun: Any = None) -> tuple[Any, Any]:
        """The new block from the own block x and what came from each member, and the bound operator."""
        completion = self.complete([None if b is None else b.shape for b in blocks])
        return completion.make(x, blocks, fresh, begun), completion.bound

    def with_bound(self, block: Any) -> tuple[Any, Any]:
        """A block that has been combined already, and the bound operator."""
        return block, self.bind(())

    def sends(self, x: Any) -> dict[int, Any]:
        """The parts of a block that members get, by member."""
        return {k: part_of(x, part) for k, part in enumerate(self.parts) if part is not None}

    @cached_property
    def cost(self) -> tuple[int, int]:
        """The messages and bytes that this member sends, on one host, if all members' blocks are as large as this one.

        Where only the root knows what goes: if that is nothing.
        """
        costs = self.costs()
        return costs.messages, costs.nbytes

    def costs(self, per_host: int = 1, came: int = 0) -> Cost:
        """What this member sends. per_host: the members on each host, by `choice.members_per_host`. came: the bytes of
        the result, where only the root knew what goes."""
        known = self._costs.get((per_host, came))
        if known is None:
            known = self._costs[per_host, came] = self._computed_costs(per_host, came)
        return known

    @cached_property
    def _costs(self) -> dict[tuple[int, int], Cost]:
        return {}

    def _computed_costs(self, per_host: int, came: int) -> Cost:
        block = np.broadcast_to(np.zeros((), self.dtype), self.shape)
        needs_parts = self.kind in ("reduce_scatter", "all_to_all", "scatter", "exchange")
        size, parts = block.size, self.parts if needs_parts else ()
        entries = [None if p is None else size if p is ... else part_of(block, p).size for p in parts]
        return cost_of(self.kind, self.group, self.dtype, size, entries, self.root, per_host, came)

    def __str__(self) -> str:
        axes = ", ".join(self.group.axes) or "no axis"
        lines = [f"{self.kind} along {axes}: member {self.group.index} of {self.group.size}"]
        lines.append(f"  block  {self.dtype}{list(self.shape)}")
        lines += [f"  sends  {_described(part)} to {_members(to)}" for part, to in self._by_part()]
        lines.append(f"  makes  {self.combine}")
        messages, nbytes = self.cost
        lines.append(f"  costs  {messages} message{'s' * (messages != 1)}, {nbytes} bytes")
        return "\n".join(lines)

    def _by_part(self) -> list[tuple[Part, list[int]]]:
        """The parts that other members get, each with those that get it."""
        members_by_part: list[tuple[Part, list[int]]] = []
        for k, part in enumerate(self.parts):
            if part is None or k == self.group.index or self.kind == "none":
                continue
            if members_by_part and part is ... and members_by_part[-1][0] is ...:
                members_by_part[-1][1].append(k)
            else:
                members_by_part.append((part, [k]))
        return members_by_part


_COMPLETIONS_MAX = 64
"""Completions that a plan keeps, at most: one for each combination of shapes."""


@dataclass(frozen=True, eq=False)
class Plans:
    """Plans that run one after the other, each on the result of the one before. bound: the bound operator. shape: that
    of the result."""

    steps: tuple[Plan, ...]
    bound: Any = field(repr=False)
    shape: Shape

    @property
    def cost(self) -> tuple[int, int]:
        """The messages and bytes that this member sends."""
        costs = self.costs()
        return costs.messages, costs.nbytes

    def costs(self, per_host: int = 1, came: int = 0) -> Cost:
        """What this member sends: see `Plan.costs`."""
        return sum((plan.costs(per_host, came) for plan in self.steps), NOTHING)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or "nothing moves"


RunPlan = Callable[[Any, np.ndarray], tuple[Any, Any]]
"""Runs a plan: of a Comm and a block it gives the new block and the bound operator."""


class NeedsLengths(NamedTuple):
    """A plan that depends on the lengths of near blocks. plan: gives it for the lengths of all: see `Comm.lengths`."""

    group: Group
    near: Near
    plan: Callable[[tuple[int, ...]], Plan]


def _members(members: Sequence[int]) -> str:
    return ("member " if len(members) == 1 else "members ") + ", ".join(map(str, members))


def _described(part: Part) -> str:
    if part is ...:
        return "the block"
    if callable(part):
        return "entries that are added up before"
    index = part if isinstance(part, tuple) else (part,)
    return f"x[{', '.join(map(_described_index, index))}]"


def _described_index(index: Any) -> str:
    if isinstance(index, slice):
        return ":".join("" if n is None else str(n) for n in (index.start, index.stop))
    return "..." if index is ... else str(index.tolist()) if isinstance(index, np.ndarray) else str(index)


def to_all(group: Group) -> tuple[Part, ...]:
    """The parts where the whole block goes to every member."""
    return _times(group.size)


@lru_cache(maxsize=64)
def _times(n: int) -> tuple[Part, ...]:
    return (...,) * n


@dataclass(frozen=True)
class Reduce(Combine):
    """The entrywise sum (max, min) of what comes, in the order of `spmd.kernels.pairwise`."""

    how: str = "sum"

    def complete(self, plan: Plan, shapes: Shapes) -> tuple[Make, Shape]:
        shape = shapes[plan.group.index]
        like = np.empty(shape, plan.dtype) if prod(shape) * plan.dtype.itemsize <= COPIED and len(shapes) > 1 else None
        fold = None if like is None else small_fold(like, self.how)
        if fold is None:
            return partial(_combined, self.how), shape
        return lambda _, blocks, *more: fold(*blocks), shape

    def __str__(self) -> str:
        return f"the {self.how} of what comes"


def _combined(how: str, x: Any, blocks: Sequence[Any], *more: Any) -> Any:
    return read_only(kernels.of(x).combine(blocks, how))


@dataclass(frozen=True)
class Forward(Combine):
    """What comes from one member, as it is. source: which one; None for nobody: then zeros of the shape `fill`."""

    source: int | None
    fill: Shape = ()

    @property
    def uses_block(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.source is None

    def sources(self, plan: Plan) -> Collection[int]:
        return () if self.source is None else (self.source,)

    def complete(self, plan: Plan, shapes: Shapes) -> tuple[Make, Shape]:
        source, me, fill = self.source, plan.group.index, self.fill
        if source is None:
            return lambda x, *more: read_only(zeros(fill, x)), fill
        if source == me:
            return lambda x, blocks, *more: read_only(contiguous(blocks[me])), shapes[me]

        def make(x: Any, blocks: Sequence[Any], fresh: bool = True, begun: Any = None) -> Any:
            block = blocks[source]
            return read_only(owned(block) if fresh else contiguous(block))

        return make, shapes[source]

    def __str__(self) -> str:
        return f"zeros {list(self.fill)}" if self.source is None else f"what comes from member {self.source}"


@dataclass(frozen=True)
class Concatenate(Combine):
    """What comes, joined along a dimension that is there (tiled), or stacked along a new one."""

    axis: int
    tiled: bool
    uses_block: bool = field(default=False, init=False)

    def complete(self, plan: Plan, shapes: Shapes) -> tuple[Make, Shape]:
        axis, whole = self.axis, joined if self.tiled else stacked
        nbytes = sum(map(prod, shapes)) * plan.dtype.itemsize
        length = sum(s[axis] for s in shapes) if self.tiled else len(shapes)
        shape = (*shapes[0][:axis], length, *shapes[0][axis + self.tiled :])
        places = self._places(shapes)
        empty = np.empty if nbytes < pool.POOL_MIN else pool.empty

        def make(x: Any, blocks: Sequence[Any], fresh: bool = True, begun: Any = None) -> Any:
            if not (fresh and places and type(blocks[0]) is np.ndarray and split_work.is_plain_copy(nbytes)):
                return read_only(whole(blocks, axis, fresh))
            out = empty(shape, plan.dtype)
            for place, block in zip(places, blocks, strict=True):
                out[place] = block
            return read_only(out)

        return make, shape

    def _places(self, shapes: Shapes) -> list[Any]:
        """Where the blocks stand in the result; none for many blocks, which NumPy joins faster."""
        if len(shapes) > _PLACES_MAX:
            return []
        ends = offsets([s[self.axis] for s in shapes]) if self.tiled else []
        before = (slice(None),) * self.axis
        return [(*before, slice(*ends[k : k + 2]) if self.tiled else k) for k in range(len(shapes))]

    def quick(self, plan: Plan, shapes: Shapes) -> Make | None:
        shape, places = self.complete(plan, shapes)[1], self._places(shapes)
        if not places or prod(shape) * plan.dtype.itemsize > COPIED:
            return None
        join = joiner(shape, plan.dtype, places)
        return None if join is None else lambda _, blocks: join(blocks)

    def __str__(self) -> str:
        return f"what comes, {'joined along' if self.tiled else 'stacked along a new'} dimension {self.axis}"


_PLACES_MAX = 8
"""Blocks up to which copying them one by one is faster than NumPy's functions."""


@dataclass(frozen=True)
class PlaceBoxes(Combine):
    """An array of zeros of this shape, in which what comes from member k stands in boxes[k]. adds: where boxes overlap,
    whether they are added; else the last one counts."""

    out: Shape
    boxes: Mapping[int, Box]
    adds: bool = False

    def sources(self, plan: Plan) -> Collection[int]:
        return tuple(self.boxes)

    def complete(self, plan: Plan, shapes: Shapes) -> tuple[Make, Shape]:
        shape, boxes, adds = self.out, tuple(self.boxes.values()), self.adds
        sources = tuple(self.boxes)
        only = len(sources) == 1 and shapes[sources[0]] == shape

        def make(x: Any, blocks: Sequence[Any], fresh: bool = True, begun: Any = None) -> Any:
            parts = [blocks[k] for k in sources]
            if not parts:
                return read_only(zeros(shape, x))
            if only:
                return read_only(copied(parts[0]) if fresh else contiguous(parts[0]))
            engine = kernels.of(x)
            return read_only((engine.add_boxes if adds else engine.unpack)(shape, boxes, parts))

        return make, shape

    def quick(self, plan: Plan, shapes: Shapes) -> Make | None:
        if self.adds or not self.boxes or prod(self.out) * plan.dtype.itemsize > COPIED:
            return None
        sources = tuple(self.boxes)
        join = joiner(self.out, plan.dtype, places(self.out, tuple(self.boxes.values()))[0])
        return None if join is None else lambda _, blocks: join([blocks[k] for k in sources])

    def __str__(self) -> str:
        boxes = ", ".join(f"{k}: {list(map(list, box))}" for k, box in self.boxes.items())
        return f"an array of shape {list(self.out)}, {'added' if self.adds else 'put'} together of boxes {{{boxes}}}"
