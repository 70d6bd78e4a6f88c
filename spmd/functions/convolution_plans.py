"""Convolutions, and their transposes, of arrays that lie anyhow: by specs, and on some of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.tracer import Array
from spmd.frontends import frontend
from spmd.functions.convolution_geometry import Geometry, with_bias
from spmd.functions.layouts import checked_target, spec_of_names
from spmd.functions.local import local, namespace
from spmd.functions.movement import fetched, gathered, relaid, summed, varied
from spmd.functions.window_parts import BlockParts, plan_parts
from spmd.functions.windows import continued, extended
from spmd.layout import Box, Layout, Spec, block_sizes
from spmd.mesh import here
from spmd.operators.halo import halo_exchange
from spmd.operators.halo_geometry import along
from spmd.operators.repartition import accumulate
from spmd.operators.varying import varying
from spmd.window import Window, plan_needs

__all__ = ["GridPlan", "SpecPlan", "bias_layout"]

Names = tuple[str, ...]
Pair = tuple[int, int]


def bias_layout(w: Layout, groups: int, transposed: bool) -> Layout:
    """The layout of a bias: as the dimension of w that belongs to the channels of the result. With groups as the first
    dimension of w, whose blocks are of groups. On a grid on the first workers of each of its blocks."""
    of_result = 1 if transposed else 0
    dim = of_result if groups == 1 else 0
    length = w.shape[1] * groups if transposed else w.shape[0]
    cut: Sequence[int] | None = w.cuts[dim]
    if dim != of_result:
        depth = max(1, w.shape[0] // groups)
        cut = (
            None
            if any(n % depth for n in w.cuts[0]) or not w.shape[0]
            else [n // depth * w.shape[1] for n in w.cuts[0]]
        )
    if w.spec is not None:
        return Layout((length,), spec_of_names([w.spec.dims[dim]]), w.axes, [cut])
    places = np.zeros((len(w.cuts[dim]), len(w.shape)), int)
    places[:, dim] = range(len(places))
    workers = [w.holders[tuple(place)][0] for place in places.tolist()]
    return Layout.grid((length,), (len(workers),), w.axes, workers, [cut])


@dataclass(frozen=True)
class _Plan:
    """Operands that lie so. boundaries: what continues the input, in each spatial dimension."""

    where: str
    x: Layout
    w: Layout
    bias: Layout | None
    out_spec: Spec | None
    geometry: Geometry
    boundaries: tuple[str, ...]
    batch_axes: Names = ()
    """Axes along which workers have batches of their own: the layouts are those of the workers that share one."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole result."""
        filters, depth, *_ = self.w.shape
        channels = depth * self.geometry.groups if self.geometry.transposed else filters
        return (self.x.shape[0], channels, *self.geometry.outputs)

    @property
    def depths(self) -> Pair:
        """The channels of a group in the input and in the result."""
        return self.x.shape[1] // self.geometry.groups, self.shape[1] // self.geometry.groups

    @cached_property
    def target(self) -> Layout | None:
        """The layout that out_spec asks for."""
        missing: Any = None
        return checked_target(self.where, "out_spec", self.out_spec, self.shape, missing, self.x.axes)

    @property
    def all_boundaries(self) -> tuple[str, ...]:
        """What continues the input, in each dimension."""
        return ("none", "none", *(("none",) * len(self.boundaries) if self.geometry.transposed else self.boundaries))


@dataclass(frozen=True)
class SpecPlan(_Plan):
    """By specs: x to P(batch, c, *space), w to P(r, c), sums over c to the layout of the result.

    With groups both r and c are the axes whose workers share the groups.
    """

    @cached_property
    def _names(self) -> tuple[list[Names], Names, Names]:
        """The axes that split batch and space; those that split the channels of the result, and of the input."""
        batch, channels, *space = self.x.spec.dims
        taken = {n for names in (batch, *space, self.batch_axes) for n in names}
        of_w = [tuple(n for n in names if n not in taken) for names in self.w.spec.dims[:2]]
        if self.geometry.groups > 1:
            rows = columns = channels or of_w[0]
        else:
            rows = of_w[self.geometry.output_dim]
            columns = (() if {*channels} & {*rows} else channels) or of_w[1 - self.geometry.output_dim]
        # What is the same on all workers along axes that split the result is split along them at once.
        free = {*self.x.axes} - taken - {*rows, *columns, *channels}
        wanted = [() if self.target is None or not {*names} <= free else names for names in self._target_names]
        if self.geometry.groups > 1:
            rows = columns = rows or wanted[1]
        return (
            [a or b for a, b in zip((batch, *space), (wanted[0], *wanted[2:]), strict=True)],
            rows or wanted[1],
            columns,
        )

    @property
    def _target_names(self) -> Sequence[Names]:
        return [()] * len(self.shape) if self.target is None else self.target.spec.dims

    def _target_cut(self, d: int, names: Names) -> tuple[int, ...] | None:
        """The lengths of the blocks of the result along a dimension that these axes split; None: balanced."""
        return self.target.cuts[d] if self.target is not None and self._target_names[d] == names else None

    @cached_property
    def _shares(self) -> tuple[int, ...]:
        """The number of groups of each block of channels."""
        rows, groups = self._names[1], self.geometry.groups
        for layout, dim in ((self.x, 1), (self.w, 0)):
            depth, cut = layout.shape[dim] // groups, layout.cuts[dim]
            if layout.spec.dims[dim] == rows and depth and not any(n % depth for n in cut):
                return tuple(n // depth for n in cut)
        return block_sizes(groups, [self.x.axes[n] for n in rows])

    @cached_property
    def inputs(self) -> Layout:
        """The layout of x that the outputs are computed from, before halos."""
        (batch, *space), _, columns = self._names
        names = [batch, columns, *space]
        cuts: list[Any] = [c if a == b else None for a, b, c in zip(names, self.x.spec.dims, self.x.cuts, strict=True)]
        if batch != self.x.spec.dims[0]:
            cuts[0] = self._target_cut(0, batch)
        dim = 1 - self.geometry.output_dim
        if self.geometry.groups > 1:
            cuts[1] = [n * self.depths[0] for n in self._shares]
        elif cuts[1] is None and columns == self.w.spec.dims[dim]:
            cuts[1] = self.w.cuts[dim]
        return Layout(self.x.shape, spec_of_names(names), self.x.axes, cuts)

    @cached_property
    def products(self) -> Layout:
        """The layout of the sums over channels of the input."""
        (batch, *space), rows, _ = self._names
        cuts: list[Any] = [self._target_cut(d, names) for d, names in enumerate((batch, rows, *space))]
        cuts[0] = self.inputs.cuts[0]
        if self.geometry.groups > 1:
            cuts[1] = [n * self.depths[1] for n in self._shares]
        elif rows == self.w.spec.dims[self.geometry.output_dim]:
            cuts[1] = self.w.cuts[self.geometry.output_dim]
        return Layout(self.shape, spec_of_names([batch, rows, *space]), self.x.axes, cuts)

    @cached_property
    def weights(self) -> Layout:
        """The layout of w for the products."""
        _, rows, columns = self._names
        names: list[Names] = [(), ()]
        cuts: list[Any] = [None, None]
        if self.geometry.groups > 1:
            names[0], cuts[0] = rows, [n * (self.w.shape[0] // self.geometry.groups) for n in self._shares]
        else:
            d = self.geometry.output_dim
            names[d], names[1 - d] = rows, columns
            cuts[d], cuts[1 - d] = self.products.cuts[1], self.inputs.cuts[1]
        rest = len(self.w.shape) - 2
        return Layout(self.w.shape, spec_of_names([*names, *[()] * rest]), self.w.axes, [*cuts, *[None] * rest])

    @cached_property
    def out(self) -> Layout:
        return self.products if self.target is None else self.target

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """What blocks of the products need, in each spatial dimension."""
        sizes = zip(self.geometry.shape, self.geometry.outputs, strict=True)
        return tuple(
            plan_needs(n, m, self.geometry.needs(d), inputs=self.inputs.cuts[2 + d], outputs=self.products.cuts[2 + d])
            for d, (n, m) in enumerate(sizes)
        )

    def __call__(self, x: Any, w: Any, bias: Any) -> Any:
        (batch, *space), rows, columns = self._names
        split = (*self.batch_axes, *(n for names in (batch, *space) for n in names))
        own_rows, added = (rows, columns) if self.geometry.groups == 1 else ((), ())
        x = gathered(x, self.x, self.inputs, own_rows)
        x = _declared(x, tuple(n for names in space for n in names))
        w = gathered(w, self.w, self.weights, split)
        y = summed(self._products(x, w), added, self.products, self.out)
        if bias is None:
            return y
        assert self.bias is not None
        names = self.out.spec.dims
        lies = Layout(self.bias.shape, spec_of_names([names[1]]), self.x.axes, [self.out.cuts[1]])
        others = [n for d, each in enumerate(names) if d != 1 for n in each]
        return with_bias(y, varied(relaid(bias, self.bias, lies), [*self.batch_axes, *others]))

    def _products(self, x: Any, w: Any) -> Any:
        me = here(self.where).index
        place = self.products.positions(me)
        assert place is not None
        groups = self._shares[place[1]] if self.geometry.groups > 1 else 1
        if not groups:  # of a block without channels
            w, groups = w[:, :0], 1
        parts = self._parts(x, place[2:])
        if parts is not None:
            return _sum_of_parts(x, w, parts, self.inputs, self.geometry, groups)
        x = extended(x, self.inputs, (None, None, *self.windows), self.all_boundaries)
        needs = [window.needs[k] for window, k in zip(self.windows, place[2:], strict=True)]
        return self.geometry.on_block(x, w, needs, self.products.boxes[me][2:], groups)

    def _parts(self, x: Any, places: tuple[int, ...]) -> BlockParts | None:
        """The parts of the outputs of a block, from the block itself and from slabs of its neighbours. Outputs in short
        dtypes are computed at once, because adding parts would round twice."""
        if (
            frontend(x) is not None
            or self.geometry.transposed
            or {*self.boundaries} != {"zero"}
            or x.dtype.itemsize < 4
        ):
            return None
        parts = plan_parts(self.windows, places)
        return None if parts.slabs is None else parts


def _declared(x: Any, names: Names) -> Any:
    """x as an array that varies along the axes that split space: faces of blocks differ even if the blocks do not."""
    other = frontend(x)
    if not names or (other is None and type(x) is not Array):
        return x
    if other is not None and other.state(x).varying.issuperset(names):
        return x
    return varying(x, names)


def _sum_of_parts(x: Any, w: Any, parts: BlockParts, lies: Layout, geometry: Geometry, groups: int) -> Any:
    """The outputs of a block as sums of what the block gives, and what slabs of its neighbours give. No block is copied
    for a halo."""
    space, no_halos = spec_of_names([(), (), *lies.spec.dims[2:]]), ((0, 0),) * 2
    slabs = []
    for s in parts.slabs or ():
        d = 2 + s.d
        faces = np.concatenate((x[along(d, 0, s.low)], x[along(d, x.shape[d] - s.high, None)]), axis=d)
        halos = halo_exchange(faces, space, (*no_halos, *s.widths), sizes=(None, None, *s.sizes))
        slabs += [halos[along(d, 0, s.halos[0])], halos[along(d, halos.shape[d] - s.halos[1], None)]]
    arithmetic = local(x, "convolution")
    y = arithmetic.conv(x, w, geometry.stride, parts.own.padding, geometry.dilation, groups)
    for slab, part in zip(slabs, (p for s in parts.slabs or () for p in s.parts), strict=True):
        outputs = (slice(None), slice(None), *part.outputs)
        y = arithmetic.add_part(
            y, slab, w, outputs=outputs, options=(geometry.stride, part.padding, geometry.dilation, groups)
        )
    return y


class _Task(NamedTuple):
    """What a worker computes, and the boxes that it needs of the operands; of x continued beyond its ends.

    outputs: in each spatial dimension. groups: of the channels. channels: those of the result, among those computed.
    """

    x: Box
    w: Box
    bias: Box
    outputs: Box
    groups: int
    channels: slice


@dataclass(frozen=True)
class GridPlan(_Plan):
    """On some of the workers: each fetches what its outputs need, and computes them. Where channels of x are split and
    those of the result are not, workers sum over the channels that they hold, and the sums are added."""

    @cached_property
    def out(self) -> Layout:
        return self._natural if self.target is None else self.target

    @cached_property
    def _natural(self) -> Layout:
        """The layout of the result without out_spec: as x; if x is whole on all workers, as w."""
        rest = [None] * len(self.geometry.outputs)
        grouped = self.geometry.groups > 1
        if self.x.spec is not None:
            batch, channels, *space = self.x.spec.dims
            if not self.x.spec.varying:
                rows = bias_layout(self.w, self.geometry.groups, self.geometry.transposed)
                grid = (1, len(rows.cuts[0]), *(1 for _ in rest))
                return Layout.grid(self.shape, grid, self.x.axes, rows.workers, [None, rows.cuts[0], *rest])
            names = [batch, channels if grouped else (), *space]
            sizes = block_sizes(self.geometry.groups, [self.x.axes[n] for n in channels])
            cut = [n * self.depths[1] for n in sizes] if grouped else None
            return Layout(self.shape, spec_of_names(names), self.x.axes, [self.x.cuts[0], cut, *rest])
        workers = np.array(self.x.workers).reshape([len(c) for c in self.x.cuts])
        workers = workers if grouped else workers[:, :1]
        cut = [n * self.depths[1] for n in block_sizes(self.geometry.groups, workers.shape[1])] if grouped else None
        cuts = [self.x.cuts[0], cut, *rest]
        return Layout.grid(self.shape, workers.shape, self.x.axes, workers.ravel().tolist(), cuts)

    @cached_property
    def _sums(self) -> tuple[Layout, tuple[int, ...]]:
        """Where what is computed lies: a copy of a block for each block of channels of x that is summed over; and the
        lengths of these."""
        counts = [len(c) for c in self.out.cuts]
        split = [len(c) for c in self.x.cuts]
        if self.geometry.groups == 1 and split[1] > 1 and counts[1] == 1:
            spatial = [
                a if len(a) == n else block_sizes(m, n)
                for a, n, m in zip(self.out.cuts[2:], split[2:], self.shape[2:], strict=True)
            ]
            workers = np.moveaxis(_first_holders(self.x).reshape(split), 1, -1)
            grid, cuts = (split[0], 1, *split[2:], split[1]), [self.x.cuts[0], None, *spatial]
            lies = Layout.grid(self.shape, grid, self.x.axes, workers.ravel().tolist(), cuts)
            return lies, self.x.cuts[1]
        lies = Layout.grid(self.shape, counts, self.x.axes, _first_holders(self.out).tolist(), self.out.cuts)
        return lies, self.x.shape[1:2]

    @cached_property
    def _tasks(self) -> tuple[_Task, ...]:
        """What each worker does."""
        lies, columns = self._sums
        ends = np.cumsum([0, *columns]).tolist()
        numbers = {worker: k % len(columns) for k, worker in enumerate(lies.workers or ())}
        return tuple(
            self._task(lies.boxes[w], (ends[numbers[w]], ends[numbers[w] + 1]), numbers[w] == 0)
            if w in numbers
            else self._task(((0, 0),) * len(self.shape), (0, 0), False)
            for w in range(lies.size)
        )

    def _task(self, box: Box, columns: Pair, first: bool) -> _Task:
        """Of the outputs in a box, from these channels of the input. first: whether it adds the bias."""
        (start, stop), (inputs, results) = box[1], self.depths
        groups, kernel = 1, tuple((0, n) for n in self.geometry.kernel)
        columns = columns if start < stop else (0, 0)
        filters = [columns, (start, stop)] if self.geometry.transposed else [(start, stop), columns]
        if self.geometry.groups > 1:
            one, end = (start // results, -(-stop // results)) if start < stop else (0, 0)
            groups, columns = end - one, (one * inputs, end * inputs)
            depth = inputs if self.geometry.transposed else results
            filters = [(one * depth, end * depth), (0, self.w.shape[1])]
            start, stop = start - one * results, stop - one * results
        x = (box[0], columns, *(self.geometry.hull(d, *outputs) for d, outputs in enumerate(box[2:])))
        channels = slice(start, stop) if self.geometry.groups > 1 else slice(None)
        bias = (box[1] if first else (0, 0),)
        return _Task(x, (*filters, *kernel), bias, box[2:], groups, channels)

    def __call__(self, x: Any, w: Any, bias: Any) -> Any:
        tasks, lies = self._tasks, self._sums[0]
        own = tasks[here(self.where).index]
        x = continued(x, self.x, [t.x for t in tasks], self.all_boundaries)
        w = fetched(w, self.w, [t.w for t in tasks])
        y = self.geometry.on_block(x, w, own.x[2:], own.outputs, own.groups)
        y = y if self.geometry.groups == 1 else y[:, own.channels]
        if bias is not None:
            assert self.bias is not None
            bias = fetched(bias, self.bias, [t.bias for t in tasks])
            # A sum of no entries: every worker's result depends on the bias, so that all take part in its adjoint.
            added = bias.shape[0] == y.shape[1] and bias.shape[0]
            y = with_bias(y, bias) if added else y + namespace(bias).sum(bias)
        return accumulate(y, lies, self.out)


def _first_holders(layout: Layout) -> np.ndarray:
    """The first worker that holds each block, in the order of the blocks."""
    places = np.ndindex(*(len(c) for c in layout.cuts))
    return np.array([layout.holders[place][0] for place in places])
