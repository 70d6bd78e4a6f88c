"""Norms of arrays that lie anyhow: statistics of each block, merged over the workers, and applied."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from spmd.functions.arguments import require_varying
from spmd.functions.layouts import dtype_of, spec_of_names
from spmd.functions.local import local, namespace
from spmd.functions.movement import fetched, relaid, varied
from spmd.kernels.cpu.chunks import accurate
from spmd.layout import Layout, offsets
from spmd.mesh import here
from spmd.operators.gather import all_gather
from spmd.operators.reduce import in_dtype, psum
from spmd.operators.repartition import accumulate

__all__ = ["Norm", "NormPlan", "gathered_moments", "merged", "params_of"]


@dataclass(frozen=True)
class Norm:
    """What a norm does with the whole array.

    kept: the dimensions, from the first to the last, that have statistics of their own; the others are reduced.
    params: the dimensions of weight and bias. groups: of how many channels, in dimension 1, have common statistics; 0:
    each channel has its own. momentum: of running statistics. training: whether statistics are those of x, not the
    running ones.
    """

    where: str
    kept: tuple[int, int]
    params: tuple[int, ...]
    eps: float
    centred: bool = True
    groups: int = 0
    momentum: float = 0.0
    training: bool = True


def merged(counts: Any, means: Any, squares: Any) -> tuple[Any, Any, Any]:
    """The count, mean and sum of squared distances of several samples together, from those of each.

    The first dimension counts the samples. Of no entries mean and squares are 0.
    """
    xp = namespace(means)
    counts = xp.reshape(counts, (counts.shape[0], *(1,) * (means.ndim - 1)))
    count = xp.sum(counts)
    mean = xp.sum(counts * means, axis=0) / xp.where(count == 0, xp.ones_like(count), count)
    return count, mean, xp.sum(squares + counts * (means - mean) ** 2, axis=0)


def gathered_moments(mean: Any, square: Any, count: int, axes: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """The count, means and sums of squared distances of all workers along axes, by one all-gather of those of each."""
    xp, n = namespace(mean), prod(mean.shape)
    counts = local(mean, "normalisation").constant(mean, np.array([count]))
    packed = xp.concat([xp.reshape(mean, (n,)), xp.reshape(square, (n,)), counts])
    table = all_gather(packed, axes, to="invariant")
    count, mean, square = merged(table[:, 2 * n], table[:, :n], table[:, n : 2 * n])
    return count, mean, square


def params_of(layout: Layout, dims: Sequence[int], copies: bool = False) -> Layout:
    """The layout of parameters that lie as these dimensions of an array do.

    By a grid they are on the first worker of each of its blocks; copies: on all of them.
    """
    shape, cuts = [layout.shape[d] for d in dims], [layout.cuts[d] for d in dims]
    if layout.spec is not None:
        return Layout(shape, spec_of_names([layout.spec.dims[d] for d in dims]), layout.axes, cuts)
    blocks = [len(c) for c in cuts]
    holders: dict[tuple[int, ...], list[int]] = {place: [] for place in itertools.product(*map(range, blocks))}
    for place, workers in layout.holders.items():
        holders[tuple(place[d] for d in dims)].extend(workers)
    each = list(holders.values()) if copies else [workers[:1] for workers in holders.values()]
    return Layout.grid(shape, (*blocks, len(each[0])), layout.axes, [w for workers in each for w in workers], cuts)


@dataclass(frozen=True)
class NormPlan:
    """A norm of blocks.

    names: the axes that split each dimension of x; empty for a grid. x: its layout, where lengths matter: on some of
    the workers, or where groups of channels lie across workers. given: the layouts of the parameters, or None where
    they lie as x does. group: the number of channels with common statistics.
    """

    norm: Norm
    names: tuple[tuple[str, ...], ...]
    x: Layout | None = None
    given: tuple[Layout | None, ...] = (None,) * 4
    group: int = 1
    returns_running: bool = False

    @cached_property
    def out(self) -> Any:
        assert self.x is not None
        lies = tuple(self._layouts(k)[0] for k in (2, 3))
        return (self.x, lies) if self.returns_running else self.x

    def __call__(self, x: Any, weight: Any, bias: Any, *running: Any) -> Any:
        norm, lib, xp = self.norm, local(x, "normalisation"), namespace(x)
        dtype = accurate(dtype_of(x))
        weight, bias = (p if p is None else in_dtype(p, dtype) for p in (weight, bias))
        weight, bias, *old = (self._parameter(k, p) for k, p in enumerate((weight, bias, *running)))
        if self._has_whole_rows:
            return lib.layer_norm(x, weight, bias, norm.eps, x.ndim - norm.kept[1], norm.centred)
        new = running
        if norm.training:
            count, mean, square = self._statistics(x)
            variance = square / _at_least(xp, count, 1)
            if self.returns_running:
                new = self._updated(running, count, mean, square)
            axes = self._axes(x.ndim)
            if axes:  # together, so that one sum adds their cotangents
                both = varied(xp.stack([mean, variance]), axes)
                mean, variance = both[0], both[1]
        else:
            mean, variance = (in_dtype(self._spread(p, x.ndim), dtype) for p in old)
        if not norm.centred:
            variance, mean = variance + mean * mean, xp.zeros_like(mean)
        scale = 1 / xp.sqrt(variance + norm.eps)
        weight, bias = self._spread(weight, x.ndim), self._spread(bias, x.ndim)
        first, stop = norm.kept
        if all(first <= d < stop for d in norm.params):  # parameters of channels: one pass
            scale = scale if weight is None else scale * weight
            y = lib.affine(x, norm.kept, mean, scale, xp.zeros_like(scale) if bias is None else bias)
        else:
            y = lib.affine(x, norm.kept, mean, scale, xp.zeros_like(scale))
            y = y if weight is None else y * weight
            y = in_dtype(y if bias is None else y + bias, dtype_of(x))
        return (y, new) if self.returns_running else y

    @cached_property
    def _has_whole_rows(self) -> bool:
        """Whether this is a norm of rows, none of which is split: one kernel of the block computes it."""
        norm, first = self.norm, self.norm.kept[1]
        return bool(self.names) and norm.params == tuple(range(first, len(self.names))) and not any(self.names[first:])

    def _parameter(self, k: int, p: Any) -> Any:
        """A parameter where x lies, as a value for each worker along the axes that split other dimensions of x."""
        if p is None:
            return None
        dims = self.norm.params
        if self.x is not None:
            given, own = self._layouts(k)
            p = relaid(p, given, own if self.x.spec is not None else params_of(self.x, dims, copies=True))
        return varied(p, [n for d, each in enumerate(self.names) if d not in dims for n in each])

    def _spread(self, p: Any, ndim: int) -> Any:
        """A parameter with length 1 in the dimensions that it does not have."""
        if p is None:
            return None
        shape = [1] * ndim
        for d, n in zip(self.norm.params, p.shape, strict=True):
            shape[d] = n
        return namespace(p).reshape(p, tuple(shape))

    def _layouts(self, k: int) -> tuple[Layout, Layout]:
        """How a parameter lies, and how it would lie as x does."""
        assert self.x is not None
        own = params_of(self.x, self.norm.params)
        return self.given[k] or own, own

    def _updated(self, running: Sequence[Any], count: Any, mean: Any, square: Any) -> tuple[Any, ...]:
        """The running mean and variance after this batch, however they lie."""
        if self.x is None:
            return self.updated(running, count, mean, square)
        layouts = [self._layouts(k) for k in (2, 3)]
        old = [relaid(p, *each) for p, each in zip(running, layouts, strict=True)]
        new = self.updated(old, count, mean, square)
        return tuple(relaid(p, own, given) for p, (given, own) in zip(new, layouts, strict=True))

    def updated(self, running: Sequence[Any], count: Any, mean: Any, square: Any) -> tuple[Any, ...]:
        """The running mean and variance after this batch; an empty one changes nothing."""
        xp, momentum = namespace(mean), self.norm.momentum
        detached = local(mean, "normalisation").detached
        batch = mean, square / _at_least(xp, count - 1, 1)
        if self.norm.kept == (0, 2):
            batch = self._over_batch(*batch)
        if self.x is not None and self.x.spec is None:
            holder = params_of(self.x, self.norm.params).positions(here(self.norm.where).index) is not None
            if not holder:
                return tuple(running)
        updated = []
        for old, new in zip(running, batch, strict=True):
            new = in_dtype(xp.reshape(detached(new), tuple(old.shape)), dtype_of(old))
            mixed = (1 - momentum) * old + momentum * new
            some = count > 0
            updated.append((mixed if some else old) if isinstance(some, bool) else xp.where(some, mixed, old))
        return tuple(updated)

    def _over_batch(self, mean: Any, variance: Any) -> tuple[Any, Any]:
        """The means over the whole batch of statistics of each item and channel: (channels,)."""
        xp, (batch, channels) = namespace(mean), mean.shape[:2]
        table = xp.stack([xp.reshape(a, (batch, channels)) for a in (mean, variance)], axis=-1)
        own, total = xp.sum(table, axis=0), xp.sum(xp.ones_like(table), axis=0)
        if self.x is not None and self.x.spec is None:
            own, total = self._added(own), self.x.shape[0]
        elif self.names and self.names[0]:
            both = psum(xp.stack([own, total]), self.names[0])
            own, total = both[0], both[1]
        mean = own / _at_least(xp, total, 1)
        return mean[..., :1], mean[..., 1:]

    def _added(self, own: Any) -> Any:
        """Sums over the blocks of the batch of what the workers of a grid have for their channels."""
        x = self.x
        assert x is not None
        blocks = {place[:2]: workers[0] for place, workers in x.holders.items() if not any(place[2:])}
        batch, channels = len(x.cuts[0]), len(x.cuts[1])
        workers = [blocks[b, c] for c in range(channels) for b in range(batch)]
        shape, cuts = (x.shape[1], 2), [x.cuts[1], (2,)]
        source = Layout.grid(shape, (channels, 1, batch), x.axes, workers, cuts, copies="varying")
        target = Layout.grid(shape, (channels, 1), x.axes, params_of(x, self.norm.params).workers, cuts)
        if here(self.norm.where).index not in workers:
            own = own[:0, :0]
        return accumulate(own, source, target)

    def _axes(self, ndim: int) -> tuple[str, ...]:
        """The axes that split the dimensions that are reduced, along which statistics are gathered."""
        first, stop = self.norm.kept
        if not self.names or self._groups_span:
            return ()
        return tuple(n for d in range(ndim) if not first <= d < stop for n in self.names[d])

    def _statistics(self, x: Any) -> tuple[Any, Any, Any]:
        """Count, mean and sum of squared distances of the whole, with length 1 in the dimensions that are reduced."""
        norm = self.norm
        first, stop = norm.kept
        reduced = [d for d in range(x.ndim) if not first <= d < stop]
        mean, square = local(x, "normalisation").moments(x, norm.kept)
        if self._groups_span or (self.x is not None and self.x.spec is None and self._splits(reduced)):
            return self._fetched_moments(mean, square, reduced)
        count, channels = prod(x.shape[d] for d in reduced), x.shape[1] if self.group > 1 else 0
        shape = mean.shape
        if self.group > 1:
            count, mean, square = _of_groups(mean, square, count, self.group)
        axes = self._axes(x.ndim)
        if axes:
            require_varying(norm.where, x, axes, "spec")
            inner = mean.shape
            count, mean, square = gathered_moments(mean, square, count, axes)
            xp = namespace(mean)
            mean, square = xp.reshape(mean, inner), xp.reshape(square, inner)
        if self.group > 1:
            mean, square = (_of_channels(a, self.group, 0, channels, shape) for a in (mean, square))
        return count, mean, square

    # Statistics where blocks of any sizes lie on any workers: each worker fetches those of the blocks that it needs.

    @cached_property
    def _groups_span(self) -> bool:
        """Whether a group of channels lies across several blocks."""
        return self.group > 1 and self.x is not None and any(n % self.group for n in offsets(self.x.cuts[1]))

    def _splits(self, dims: Sequence[int]) -> bool:
        return self.x is not None and any(len(self.x.cuts[d]) > 1 for d in dims)

    @cached_property
    def _table(self) -> tuple[Layout, list[Any]]:
        """The layout of mean and squares of all blocks, and the box of it that each worker needs."""
        x = self.x
        assert x is not None
        first, stop = self.norm.kept
        lengths = [c if first <= d < stop else (1,) * len(c) for d, c in enumerate(x.cuts)]
        shape, cuts = [*map(sum, lengths), 2], [*lengths, (2,)]
        if x.spec is None:
            grid = [*map(len, x.cuts), 1]
            table = Layout.grid(shape, grid, x.axes, x.workers, cuts)
        else:
            axes = {n: size for n, size in x.axes.items() if n in x.spec.varying}
            table = Layout(shape, spec_of_names([*x.spec.dims, ()]), axes, cuts)
        boxes = []
        for w, box in enumerate(table.boxes):
            if table.positions(w) is None:
                boxes.append(box)
                continue
            needed = [box[d] if first <= d < stop else (0, n) for d, n in enumerate(shape)]
            if self.group > 1:
                needed[1] = _whole_groups(*needed[1], self.group)
            boxes.append(tuple(needed))
        return table, boxes

    def _fetched_moments(self, mean: Any, square: Any, reduced: Sequence[int]) -> tuple[Any, Any, Any]:
        xp, x, group = namespace(mean), self.x, self.group
        assert x is not None
        me = here(self.norm.where).index
        place, shape = x.positions(me), mean.shape
        table, boxes = self._table
        packed = xp.stack([mean, square], axis=-1)
        if place is None:
            packed = fetched(packed[(slice(0, 0),) * packed.ndim], table, boxes)
            nothing = xp.sum(packed)
            return 1, mean + nothing, square + nothing
        packed = fetched(packed, table, boxes)
        kept = [d for d in range(len(shape)) if d not in reduced]
        lengths = np.ones((), int)
        for d in reduced:
            lengths = np.multiply.outer(lengths, x.cuts[d])
        counts = np.reshape(lengths, (-1,))
        packed = xp.permute_dims(packed, (*reduced, *kept, len(shape)))
        packed = xp.reshape(packed, (len(counts), *packed.shape[len(reduced) :]))
        if group > 1:
            n, groups = packed.shape[1], packed.shape[2] // group
            packed = xp.reshape(packed, (len(counts), n, groups, group, 2))
            packed = xp.reshape(xp.permute_dims(packed, (3, 0, 1, 2, 4)), (group * len(counts), n, groups, 2))
            counts = np.tile(counts, group)
        each = local(mean, "normalisation").constant(mean, counts)
        _, mean, square = merged(each, packed[..., 0], packed[..., 1])
        if group > 1:
            (start, stop) = x.boxes[me][1]
            skipped = start - _whole_groups(start, stop, group)[0]
            mean, square = (_of_channels(a, group, skipped, stop - start, shape) for a in (mean, square))
        return int(counts.sum()), xp.reshape(mean, shape), xp.reshape(square, shape)


def _at_least(xp: Any, count: Any, least: int) -> Any:
    return max(count, least) if isinstance(count, int) else xp.where(count < least, xp.ones_like(count) * least, count)


def _whole_groups(start: int, stop: int, group: int) -> tuple[int, int]:
    """The channels of all groups that have channels from start to stop."""
    return (start // group * group, -(-stop // group) * group) if start < stop else (start, start)


def _of_groups(mean: Any, square: Any, count: int, group: int) -> tuple[int, Any, Any]:
    """The moments of groups of channels, (batch, groups), from those of channels, each of `count` entries."""
    xp, (n, channels) = namespace(mean), mean.shape[:2]
    shape, total = (n, channels // group, group), count * group
    means, squares = xp.reshape(mean, shape), xp.reshape(square, shape)
    mean = xp.sum(means, axis=2) / group
    distances = means - xp.expand_dims(mean, axis=2)
    return total, mean, xp.sum(squares + count * distances * distances, axis=2)


def _of_channels(a: Any, group: int, start: int, channels: int, shape: tuple[int, ...]) -> Any:
    """The numbers of groups, (batch, groups), for each of these channels."""
    xp, (n, groups) = namespace(a), a.shape
    a = xp.broadcast_to(xp.expand_dims(a, axis=2), (n, groups, group))
    return xp.reshape(xp.reshape(a, (n, groups * group))[:, start : start + channels], shape)
