"""The way of an array from one layout to another: operators one after the other, of least declared cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from spmd import kernels
from spmd.autodiff.staging.recorder import one_line
from spmd.errors import LayoutError, caller, source_line
from spmd.layout import Layout, P
from spmd.mesh import Mesh, Worker
from spmd.operators.apply import launch
from spmd.operators.base import Operator
from spmd.operators.gather import ReduceScatter
from spmd.operators.gradient_buckets import DeferredSums
from spmd.operators.memo import bounded, interned
from spmd.operators.repartition import Repartition
from spmd.operators.sums import Sum
from spmd.transport.call import Group

__all__ = ["SHOWN", "check_dtype_of_parts", "moved_blocks", "scattered", "summed_blocks"]

SHOWN: ContextVar[bool] = ContextVar("spmd_shows_reshards", default=False)
"""Whether arrays that are laid out anew are shown: see `spmd.debug`."""


class Step:
    """Part of a way. source, target: the layouts before and after it. axes: along which it moves something. text: what
    it does, in words."""

    axes: tuple[str, ...] = ()
    text: ClassVar[str]

    def __init__(self, source: Layout, target: Layout):
        self.source, self.target = source, target

    def operator(self, group: Group) -> Operator | None:
        """What a worker of this group applies; None: nothing moves."""
        return None

    def before(self, block: Any) -> Any:
        """What the operator takes of a block."""
        return block

    def after(self, worker: Worker, x: Any) -> Any:
        """A block of the target, from what the operator gives."""
        return x

    def run(self, worker: Worker, block: Any) -> Any:
        group = worker.group(self.axes)
        op, block = self.operator(group), self.before(block)
        if op is not None and group.size > 1:
            block = launch(op, block, worker, None)()[0]
        return self.after(worker, block)

    def cost(self, mesh: Mesh, dtype: np.dtype) -> tuple[int, int]:
        """The bytes that all workers send, and the messages."""
        nbytes = messages = 0
        for w in range(mesh.size):
            group = mesh.group(w, self.axes)
            op = self.operator(group)
            if op is not None and group.size > 1:
                shape = self.before(np.broadcast_to(np.zeros((), dtype), self.source.block_shape(w))).shape
                more = op.plan_for(group, shape, dtype).cost
                messages, nbytes = messages + more[0], nbytes + more[1]
        return nbytes, messages

    def __str__(self) -> str:
        return f"{self.text} over {', '.join(self.axes)}"


class Summed(Step):
    """The sums over axes, known to all along them."""

    text = "Sum"

    def __init__(self, source: Layout, axes: tuple[str, ...]):
        super().__init__(source, source.with_unreduced(source.unreduced.difference(axes)))
        self.axes = axes

    def operator(self, group: Group) -> Operator:
        return interned(Sum, self.axes)


class Scattered(Step):
    """The sums over axes, of which each worker gets the part that its block of the target is, along one dimension."""

    text = "ReduceScatter"

    def __init__(self, source: Layout, target: Layout, axes: tuple[str, ...], dim: int):
        super().__init__(source, target)
        self.axes, self.dim = axes, dim

    def operator(self, group: Group) -> Operator:
        sizes = tuple(self.target.block_shape(w)[self.dim] for w in group.members)
        return interned(ReduceScatter, self.axes, self.dim, True, sizes)


class Moved(Step):
    """Each worker gets its box of the target from a worker that holds it; of an unreduced array it gets all parts of
    the sum, which it adds: it holds them all at once. parts: the axes along which these lie, as one more dimension of
    the array: those that stay unreduced, then those over which the sum is taken."""

    text = "Repartition"

    def __init__(self, source: Layout, target: Layout, added: tuple[str, ...] = ()):
        super().__init__(source, target)
        self.axes, self.kept = tuple(source.axes), tuple(n for n in source.axes if n in target.unreduced)
        self.parts = (*self.kept, *added)

    @cached_property
    def _operator(self) -> Operator | None:
        if not self.parts:
            return None if self._is_still else interned(Repartition, self.axes, self.source, self.target)
        return interned(
            Repartition, self.axes, self._stacked(self.source, self.parts), self._stacked(self.target, self.kept)
        )

    @property
    def _is_still(self) -> bool:
        """Whether each worker holds its block of the target already. A scalar's boxes do not say where it lies."""
        source, target = self.source, self.target
        same_shapes = (source.block_shape(w) == target.block_shape(w) for w in range(source.size))
        return source.boxes == target.boxes and all(same_shapes)

    def _stacked(self, layout: Layout, names: tuple[str, ...]) -> Layout:
        """The layout of the parts as arrays with a dimension before the others, which these axes split."""
        counts = [layout.axes[n] for n in self.parts]
        n, split = int(np.prod(counts)), int(np.prod([layout.axes[n] for n in names]))
        cuts = [(n // split,) * split, *layout.cuts]
        if layout.spec is None:
            return Layout.grid(
                (n, *layout.shape), [len(c) for c in cuts], layout.axes, layout.workers, cuts, copies=layout.copies
            )
        return Layout((n, *layout.shape), P(names or None, *layout.spec.dims), layout.axes, cuts)

    def operator(self, group: Group) -> Operator | None:
        return self._operator

    def before(self, block: Any) -> Any:
        return block[None] if self.parts else block

    def after(self, worker: Worker, x: Any) -> Any:
        if not self.parts:
            return x
        if self.target.positions(worker.index) is None:
            return np.reshape(x, self.target.block_shape(worker.index))
        return one_line(_total, (x,))


def _total(parts: Any) -> Any:
    return kernels.of(parts).combine(list(parts)) if len(parts) > 1 else parts[0]


class KeptOnce(Step):
    """A value that workers have copies of, as the sum of it on the first of them and zeros on the others."""

    def after(self, worker: Worker, x: Any) -> Any:
        added = self.target.unreduced - self.source.unreduced
        group = worker.group(tuple(n for n in self.target.axes if n in added))
        return x if group.index == 0 else np.zeros_like(x)

    def __str__(self) -> str:
        return "zeros but on the first worker"


def check_dtype_of_parts(where: str, dtype: np.dtype, argument: str | None = None) -> None:
    """Raise for arrays that cannot be unreduced, because no sum of such parts has their dtype."""
    if dtype.kind == "b":
        raise LayoutError.at(
            where,
            argument=argument,
            got="an unreduced array of booleans",
            need="numbers, which are added",
            mend="x.astype(int)",
        )


_ways: dict[Any, tuple[Step, ...]] = {}


def way(mesh: Mesh, source: Layout, target: Layout, dtype: np.dtype) -> tuple[Step, ...]:
    """The steps from one layout to another. Of the ways to sum what is unreduced in the source, and not in the target,
    the one by which the workers send the fewest bytes, and then messages."""
    if target.unreduced:
        check_dtype_of_parts("an unreduced layout", dtype)
    key = source, target, dtype.itemsize
    found = _ways.get(key)
    if found is None:
        ways = [[*sums, *_rest(sums[-1].target if sums else source, target)] for sums in _sums(source, target)]
        # Costs depend on the axes of the mesh only, which the layouts have. Of equal ones the first way is taken.
        best = min(ways, key=lambda steps: _cost(mesh, steps, dtype)) if len(ways) > 1 else ways[0]
        found = bounded(_ways)[key] = tuple(best)
    return found


def _cost(mesh: Mesh, steps: Sequence[Step], dtype: np.dtype) -> tuple[int, int]:
    """The bytes that all workers send, and the messages."""
    costs = [step.cost(mesh, dtype) for step in steps]
    return sum(nbytes for nbytes, _ in costs), sum(messages for _, messages in costs)


def _sums(source: Layout, target: Layout) -> list[list[Step]]:
    """The ways to sum what is unreduced in the source only; one without steps, if there is nothing. By the number of
    workers that hold the sums: all along these axes, then those that need them."""
    names = tuple(n for n in source.axes if n in source.unreduced - target.unreduced)
    if not names:
        return [[]]
    ways: list[list[Step]] = [[Summed(source, names)]]
    middle = target.with_unreduced(source.unreduced & target.unreduced) if target.spec is not None else target
    split_alike = target.spec is not None and (source.spec.dims, source.cuts) == (target.spec.dims, target.cuts)
    if not split_alike:
        ways += [scattered(source, middle, names), [Moved(source, middle, names)]]
    return [steps for steps in ways if steps]


def scattered(source: Layout, target: Layout, names: Sequence[str]) -> list[Step]:
    """The sum that is split over axes, where these split blocks of the source further along one dimension, and then
    summed over the others. Empty if they do not."""
    if target.spec is None:
        return []
    pairs = zip(source.spec.dims, target.spec.dims, source.cuts, target.cuts, strict=True)
    differ = [d for d, (a, b, have, want) in enumerate(pairs) if (a, have) != (b, want)]
    if len(differ) != 1:
        return []
    (d,) = differ
    before, after = source.spec.dims[d], target.spec.dims[d]
    axes = after[len(before) :]
    if after[: len(before)] != before or not axes or not {*axes} <= {*names}:
        return []
    each = len(target.cuts[d]) // len(source.cuts[d])
    joined = tuple(sum(target.cuts[d][k * each : (k + 1) * each]) for k in range(len(source.cuts[d])))
    if joined != source.cuts[d]:
        return []
    rest = tuple(n for n in names if n not in axes)
    parts = target.with_unreduced(target.unreduced.union(rest))
    return [Scattered(source, parts, axes, d), *([Summed(parts, rest)] if rest else [])]


def _rest(source: Layout, target: Layout) -> list[Step]:
    """The steps that sum nothing: moves, and zeros where copies become parts of a sum."""
    if source == target:
        return []
    if not target.unreduced - source.unreduced:
        return [Moved(source, target)]
    kept = target.with_unreduced(source.unreduced)
    return [*_rest(source, kept), KeptOnce(kept, target)]


def moved_blocks(blocks: Mapping[int, Any], source: Layout, target: Layout, mesh: Mesh) -> dict[int, Any]:
    """The blocks of an array in another layout. Collective."""
    dtype = next(iter(blocks.values())).dtype
    steps = way(mesh, source, target, dtype)
    if SHOWN.get():
        _show(mesh, steps, source, target, dtype)

    def body(worker: Worker) -> Any:
        block = worker.comm.given(blocks[worker.index])
        for step in steps:
            block = step.run(worker, block)
        return block

    return mesh.run(body, tracked=False, one_line=True, name=("resharding",)).results


def summed_blocks(arrays: Sequence[tuple[Mapping[int, Any], Layout]], mesh: Mesh) -> list[dict[int, Any]]:
    """The blocks of unreduced arrays, given by blocks and layout, with all sums taken: those over the same axes in one
    collective. Collective."""
    if SHOWN.get():
        for blocks, layout in arrays:
            dtype = next(iter(blocks.values())).dtype
            _show(mesh, way(mesh, layout, layout.reduced, dtype), layout, layout.reduced, dtype)

    def body(worker: Worker) -> list[Any]:
        sums = DeferredSums(worker)
        given = [(layout, worker.comm.given(blocks[worker.index])) for blocks, layout in arrays]
        added = [sums.add(tuple(n for n in layout.axes if n in layout.unreduced), block) for layout, block in given]
        return [each.wait() for each in added]

    results = mesh.run(body, tracked=False, one_line=True, name=("resharding",)).results
    return [{w: blocks[k] for w, blocks in results.items()} for k in range(len(arrays))]


def _show(mesh: Mesh, steps: Sequence[Step], source: Layout, target: Layout, dtype: np.dtype) -> None:
    """Print what is laid out anew, by the process of worker 0."""
    if 0 not in mesh.local_workers:
        return
    nbytes, messages = _cost(mesh, steps, dtype)
    frame = caller()
    line = source_line(frame.f_code, frame.f_lasti) if frame is not None else source_line(None, 0)
    lies = [layout.spec if layout.spec is not None and layout.balanced else layout for layout in (source, target)]
    print(
        f"{line}: {dtype}{[*source.shape]} from {lies[0]} to {lies[1]} by "
        f"{', '.join(map(str, steps))}: {messages} messages, {nbytes} bytes",
        file=sys.stderr,
    )
