"""Products whose operands go round: each worker fetches what it needs of an operand block by block, in the order of a
ring, multiplies, and forgets it.

Such a product is linear in each operand. Its adjoint is the same product with the operand and the result exchanged:
each part of a result that goes round is sent to the worker that holds it, and added there.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.registry import primitive
from spmd.autodiff.staging.program import COMM
from spmd.device import contiguous
from spmd.layout import Box, Layout, block_sizes, offsets
from spmd.mesh import here
from spmd.operators.repartition import indexed, within
from spmd.settings import gather_limit
from spmd.transport.call import Call, Group
from spmd.transport.handles import read_only
from spmd.transport.plan import PlaceBoxes, Plan

__all__ = ["Ring", "Side", "ring_product"]

_WHERE = "np.einsum"
Pieces = dict[str, tuple[int, int]]
"""By letter an interval of its entries."""


class Side(NamedTuple):
    """An operand, or the result: its letters, the layout in which workers hold it, and that of what enters the product
    of each. The second one is the first without the axes along which blocks go round."""

    word: str
    held: Layout
    used: Layout

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which its blocks go round."""
        return tuple(n for n in self.held.spec.axes if n not in self.used.spec.axes)

    @property
    def letters(self) -> str:
        """The letters that these axes split."""
        dims = zip(self.word, self.held.spec.dims, self.used.spec.dims, strict=True)
        return "".join(c for c, have, want in dims if have != want)

    def holder(self, box: Box, group: Group) -> int | None:
        """The member of a group that holds a box; None for an empty one."""
        if 0 in _shape(box):
            return None
        bounds = zip(self.held.cuts, box, strict=True)
        place = tuple(bisect_right(offsets(cut), start) - 1 for cut, (start, _) in bounds)
        return next(group.members.index(w) for w in self.held.holders[place] if w in group.members)

    def holds(self, worker: int, box: Box) -> bool:
        """Whether a worker holds a box, or it is empty."""
        own = zip(box, self.held.boxes[worker], strict=True)
        return 0 in _shape(box) or all(a <= start and stop <= b for (start, stop), (a, b) in own)


class Ring(NamedTuple):
    """A product some of whose operands go round. sides: the operands, then the result. options: those of np.einsum."""

    sides: tuple[Side, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def subscripts(self) -> str:
        *words, out = (side.word for side in self.sides)
        return f"{','.join(words)}->{out}"

    def adjoint(self, k: int) -> Ring:
        """The product that gives the cotangent of operand k, of the other operands and the cotangent of the result."""
        *operands, out = self.sides
        return Ring((*operands[:k], *operands[k + 1 :], out, operands[k]), (("optimize", True),))


@lru_cache(maxsize=4096)
def _pieces(ring: Ring, worker: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """By letter that goes round, the intervals in which a worker takes it: each lies on one worker on every side.

    It begins with its own. Where several sides go round along a letter each turns the order further, so that in no step
    all workers ask for the same.
    """
    pieces = {}
    for c in sorted({c for side in ring.sides for c in side.letters}):
        marks, turns = set[int](), 0.0
        for side in ring.sides:
            if c not in side.word:
                continue
            d = side.word.index(c)
            (start, stop), own = side.used.boxes[worker][d], side.held.boxes[worker][d][0]
            ends = sorted({end for end in offsets(side.held.cuts[d]) if start <= end <= stop})
            marks |= {start, stop, *(ends if c in side.letters else ())}
            if c in side.letters and len(ends) > 1:
                turns += ends.index(own) / (len(ends) - 1)
        found = list(itertools.pairwise(sorted(marks)))
        first = round(turns * len(found)) % len(found) if found else 0
        pieces[c] = (*found[first:], *found[:first])
    return pieces


@lru_cache(maxsize=1024)
def _steps(ring: Ring) -> tuple[dict[str, int], ...]:
    """By letter that goes round, which of its pieces all workers take in each step. Letters of the result change last,
    so that a part of it is complete before it leaves."""
    of_workers = [_pieces(ring, w) for w in range(ring.sides[0].held.size)]
    letters = sorted(of_workers[0], key=lambda c: (c not in ring.sides[-1].letters, c))
    counts = [max(len(pieces[c]) for pieces in of_workers) for c in letters]
    return tuple(dict(zip(letters, step, strict=True)) for step in itertools.product(*map(range, counts)))


def _pieces_of_step(ring: Ring, worker: int, step: dict[str, int]) -> Pieces:
    """The intervals of a step; empty ones for a worker that has taken all of them."""
    return {c: found[step[c]] if step[c] < len(found) else (0, 0) for c, found in _pieces(ring, worker).items()}


def _taken(ring: Ring, side: Side, step: dict[str, int], worker: int) -> Box:
    """What a worker takes of a side in a step: of letters along which it goes round a piece, of others what it uses."""
    at, bounds = _pieces_of_step(ring, worker, step), side.used.boxes[worker]
    return tuple(at[c] if c in side.letters else b for c, b in zip(side.word, bounds, strict=True))


class _Route(NamedTuple):
    """Which box of a side each member of a group takes in a step, and which member holds it. stays: whether all workers
    of the mesh hold what they take: who moves something is the same for all, as is the order of collectives."""

    side: Side
    group: Group
    boxes: tuple[Box, ...]
    holders: tuple[int | None, ...]
    stays: bool

    @classmethod
    def of(cls, ring: Ring, side: Side, step: dict[str, int]) -> _Route:
        group = here(_WHERE).group(side.axes)
        boxes = tuple(_taken(ring, side, step, worker) for worker in group.members)
        stays = all(side.holds(w, _taken(ring, side, step, w)) for w in range(side.held.size))
        return cls(side, group, boxes, tuple(side.holder(box, group) for box in boxes), stays)

    @property
    def box(self) -> Box:
        """What this worker takes."""
        return self.boxes[self.group.index]

    @property
    def held(self) -> dict[int, Box]:
        """By member that takes some of it, the boxes of the block of this worker."""
        me, pairs = self.group.index, zip(self.boxes, self.holders, strict=True)
        origin = [start for start, _ in self.side.held.boxes[self.group.members[me]]]
        return {k: within(box, origin) for k, (box, holder) in enumerate(pairs) if holder == me}

    def fetched(self, block: Any) -> Any:
        """What this worker takes, of the block that it holds and those of others."""
        me, shape, held = self.group.index, _shape(self.box), self.held
        if self.stays:
            return block[indexed(held[me])] if me in held else np.zeros_like(block, shape=shape)
        holder = self.holders[me]
        came = {} if holder is None else {holder: tuple((0, n) for n in shape)}
        parts = [indexed(held[k]) if k in held else None for k in range(self.group.size)]
        return self._moved(block, parts, PlaceBoxes(shape, came))

    def add(self, total: Any, part: Any) -> None:
        """Add what each worker has made of its box to the block of the worker that holds it."""
        me, held = self.group.index, self.held
        if self.stays:
            if me in held:
                total[indexed(held[me])] += part
            return
        hull = tuple(
            (min((box[d][0] for box in held.values()), default=0), max((box[d][1] for box in held.values()), default=0))
            for d in range(total.ndim)
        )
        came = {k: within(box, [start for start, _ in hull]) for k, box in held.items()}
        parts = [... if k == self.holders[me] else None for k in range(self.group.size)]
        total[indexed(hull)] += self._moved(read_only(contiguous(part)), parts, PlaceBoxes(_shape(hull), came, True))

    def _moved(self, x: Any, parts: Sequence[Any], combine: PlaceBoxes) -> Any:
        call = Call(_WHERE, self.group.axes, x.dtype, x.shape, detail=f"blocks of {self.side.word!r}", same_shape=None)
        plan = Plan("exchange", self.group, x.shape, x.dtype, parts, combine, lambda _: None)
        return here(_WHERE).comm.run(plan, call, x).wait()[0]


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _adjoint(k: int, g: Any, _ans: Any, *blocks: Any, ring: Ring) -> Any:
    return ring_product(*blocks[:k], *blocks[k + 1 :], g, ring=ring.adjoint(k))


@primitive("np.einsum", variadic=_adjoint, linear=True)
def ring_product(*blocks: Any, ring: Ring) -> Any:
    """np.einsum of what a worker uses of each operand, in a body. blocks: what it holds of each.

    A worker holds besides the blocks and the result one piece of each operand that goes round, and no more of a product
    than may be gathered. Adjoint in an operand: `ring.adjoint`. Cost: what a worker uses and does not hold comes once,
    if operands that go round do so along one letter; else those of inner letters come once for each outer piece.
    """
    worker = here(_WHERE)
    if worker.program is None:
        return _in_steps(worker.comm, blocks, ring)
    return worker.program.call(_in_steps, (COMM, blocks, ring), effect=True, comm=worker.comm)


def _in_steps(_comm: Any, blocks: Sequence[Any], ring: Ring) -> Any:
    """The product, step by step; a line of programs."""
    *operands, out = ring.sides
    me, blocks = here(_WHERE).index, tuple(map(contiguous, blocks))
    dtype = dict(ring.options).get("dtype") or np.result_type(*(block.dtype for block in blocks))
    total = np.zeros_like(blocks[0], shape=out.held.block_shape(me), dtype=dtype)
    pieces = [(block, side.used.boxes[me]) for block, side in zip(blocks, operands, strict=True)]
    part, box, route, last = total, out.used.boxes[me], None, {}
    for step in _steps(ring):
        changed = {c for c in step if step[c] != last.get(c)}
        last = step
        for k, side in enumerate(operands):
            if changed & {*side.letters}:
                pieces[k] = None, ()  # so that its memory is free
                taken = _Route.of(ring, side, step)
                pieces[k] = taken.fetched(blocks[k]), taken.box
        if changed & {*out.letters}:
            if route is not None:
                route.add(total, part)
            route = _Route.of(ring, out, step)
            box, part = route.box, np.zeros_like(total, shape=_shape(route.box))
        at = _pieces_of_step(ring, me, step)
        cut = (x[_cut(side.word, have, at)] for side, (x, have) in zip(operands, pieces, strict=True))
        _add_product(part[_cut(out.word, box, at)], cut, ring)
    if route is not None:
        route.add(total, part)
    return total


def _cut(word: str, have: Box, at: Pieces) -> tuple[Any, ...]:
    """Where the intervals of a step lie in a box."""
    bounds = [at.get(c, box) for c, box in zip(word, have, strict=True)]
    return *(slice(start - a, stop - a) for (start, stop), (a, _) in zip(bounds, have, strict=True)), ...


def _add_product(total: Any, operands: Iterable[Any], ring: Ring) -> None:
    """Add a product, in slabs of its longest dimension that may be gathered."""
    if not total.size:
        return
    arrays = list(operands)  # which nothing else refers to: the pieces are free before others are fetched
    words, out = [side.word for side in ring.sides[:-1]], ring.sides[-1].word
    c, n = max(zip(out, total.shape, strict=True), key=lambda pair: pair[1], default=("", 1))
    ends = offsets(block_sizes(n, min(n, math.ceil(total.nbytes / max(1 << 20, gather_limit())))))
    for slab in itertools.starmap(slice, itertools.pairwise(ends)):
        cut = lambda x, word: x[(*(slab if letter == c else slice(None) for letter in word), ...)]  # noqa: B023
        parts = [cut(x, word) for x, word in zip(arrays, words, strict=True)]
        into = cut(total, out)
        into += np.einsum(ring.subscripts, *parts, **dict(ring.options))
