"""A serial oracle: what the workers of a mesh compute, by plain NumPy on the list of all their blocks.

A body written as `body(ns, *blocks)` runs with `spmd` for `ns` in a map, and with an `Oracle` for it here. The list is
the hidden leading dimension of every array, n long over each axis; an Invariant value is n equal entries. Nothing is
sent and states are not known, so a gradient through an oracle is that of a serial program.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from spmd import P


class Each(NDArrayOperatorsMixin):
    """One array per worker; NumPy's functions act on each."""

    def __init__(self, blocks: Sequence):
        self.blocks = list(blocks)

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        return each(getattr(ufunc, method), args, kwargs)

    def __array_function__(self, fun, types, args, kwargs):
        return each(fun, args, kwargs)

    def __getitem__(self, index):
        return each(operator.getitem, (self, index), {})


def each(f: Callable, args, kwargs) -> Each:
    """f, worker by worker."""

    def of(k: int, tree):
        if isinstance(tree, tuple | list):
            return type(tree)(of(k, t) for t in tree)
        return tree.blocks[k] if isinstance(tree, Each) else tree

    def count(tree) -> int:
        if isinstance(tree, tuple | list):
            return max(map(count, tree), default=0)
        return len(tree.blocks) if isinstance(tree, Each) else 0

    return Each([f(*of(k, args), **kwargs) for k in range(count(args))])


class Oracle:
    """The collectives over a mesh with these axis sizes, under the names that `spmd` gives them."""

    def __init__(self, axes: Mapping[str, int]):
        self.axes = dict(axes)
        self.grid = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))

    def rows(self, axis_name) -> np.ndarray:
        """The groups of workers that differ along these axes only: a row each, the first axis major."""
        dims = [list(self.axes).index(a) for a in names(axis_name)]
        last = np.moveaxis(self.grid, dims, range(-len(dims), 0))
        return last.reshape(-1, math.prod(self.axes[a] for a in names(axis_name)))

    def meet(self, x, axis_name, f: Callable[[list], Sequence]) -> Each:
        """f turns the blocks of a group into the new blocks of its members."""
        old = x.blocks if isinstance(x, Each) else [x] * self.grid.size
        new = list(old)
        for row in self.rows(axis_name):
            for worker, block in zip(row, f([old[w] for w in row]), strict=True):
                new[worker] = block
        return Each(new)

    def one(self, x, axis_name, f: Callable[[list], object]) -> Each:
        """f turns them into one block, which all members get."""
        return self.meet(x, axis_name, lambda blocks: [f(blocks)] * len(blocks))

    def parts(self, block, axis_name, axis: int, tiled: bool, sizes=None) -> list:
        """A block cut into a part for each member of a group."""
        if not tiled:
            return [np.take(block, k, axis) for k in range(block.shape[axis])]
        if sizes is not None:
            return np.split(block, np.cumsum(sizes)[:-1], axis)
        cut = [block]
        for a in names(axis_name):
            cut = [part for whole in cut for part in np.array_split(whole, self.axes[a], axis)]
        return cut

    # As in spmd

    def axis_index(self, axis_name):
        return self.meet(0, axis_name, lambda blocks: list(np.arange(len(blocks))))

    def axis_size(self, axis_name):
        return math.prod(self.axes[a] for a in names(axis_name))

    def psum(self, x, axis_name):
        return self.one(x, axis_name, add)

    def pmean(self, x, axis_name):
        return self.one(x, axis_name, lambda blocks: add(blocks) / len(blocks))

    def pmax(self, x, axis_name):
        return self.one(x, axis_name, lambda blocks: np.max(np.stack(blocks), 0))

    def pmin(self, x, axis_name):
        return self.one(x, axis_name, lambda blocks: np.min(np.stack(blocks), 0))

    def sum(self, x, axis_name, axis=None):
        return self.one(x, axis_name, lambda blocks: np.sum(whole(blocks, axis), axis))

    def mean(self, x, axis_name, axis=None):
        return self.one(x, axis_name, lambda blocks: np.mean(whole(blocks, axis), axis))

    def max(self, x, axis_name, axis=None):
        return self.one(x, axis_name, lambda blocks: np.max(whole(blocks, axis), axis))

    def min(self, x, axis_name, axis=None):
        return self.one(x, axis_name, lambda blocks: np.min(whole(blocks, axis), axis))

    def all_gather(self, x, axis_name, *, axis=0, tiled=False, to="varying"):
        return self.one(x, axis_name, lambda blocks: join(blocks, axis, tiled))

    def pslice(self, x, axis_name, *, axis=0, tiled=False, sizes=None):
        return self.meet(
            x,
            axis_name,
            lambda blocks: [self.parts(b, axis_name, axis, tiled, sizes)[k] for k, b in enumerate(blocks)],
        )

    def psum_scatter(self, x, axis_name, *, scatter_dimension=0, tiled=False, sizes=None):
        return self.pslice(self.psum(x, axis_name), axis_name, axis=scatter_dimension, tiled=tiled, sizes=sizes)

    def all_to_all(self, x, axis_name, split_axis, concat_axis, *, tiled=False, sizes=None):
        def swap(blocks: list) -> list:
            sent = [self.parts(b, axis_name, split_axis, tiled, sizes) for b in blocks]
            return [join([parts[k] for parts in sent], concat_axis, tiled) for k in range(len(blocks))]

        return self.meet(x, axis_name, swap)

    def ppermute(self, x, axis_name, perm):
        source = {t: s for s, t in perm}
        return self.meet(
            x,
            axis_name,
            lambda blocks: [blocks[source[t]] if t in source else np.zeros_like(b) for t, b in enumerate(blocks)],
        )

    def shift(self, x, axis_name, offset=1, *, wrap=True):
        n = self.axis_size(axis_name)
        pairs = [(k, (k + offset) % n) for k in range(n) if wrap or 0 <= k + offset < n]
        return self.ppermute(x, axis_name, pairs)

    def pvary(self, x, axis_name):
        return x

    keep = varying = lambda self, x, axis_name, root=0: x

    def replicate(self, x, axis_name, root=0):
        return self.one(x, axis_name, lambda blocks: blocks[root])

    broadcast = replicate
    sum_reduce = lambda self, x, axis_name, root=0: self.psum(x, axis_name)

    def checkpoint(self, f):
        return f

    # From global arrays to blocks and back

    def cut(self, x, spec: P) -> Each:
        """A global array as the blocks of the workers."""
        blocks = Each([x] * self.grid.size)
        for d, axes in enumerate(spec):
            for a in axes:
                blocks = self.pslice(blocks, a, axis=d, tiled=True)
        return blocks

    def whole(self, x: Each, spec: P):
        """The blocks of the workers as a global array."""
        for d, axes in enumerate(spec):
            if axes:
                x = self.all_gather(x, axes, axis=d, tiled=True)
        return x.blocks[0]

    def map(self, body: Callable, in_specs: Sequence[P], out_specs: P) -> Callable:
        """The function of global arrays that spmd.map makes of this body."""
        return lambda *xs: self.whole(
            body(self, *(self.cut(x, spec) for x, spec in zip(xs, in_specs, strict=True))), out_specs
        )


def names(axis_name) -> tuple[str, ...]:
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def add(blocks: list):
    return functools.reduce(operator.add, blocks)


def whole(blocks: list, axis):
    """Blocks as one array, to be reduced along `axis` (None: in any order)."""
    return np.concatenate([np.ravel(b) for b in blocks] if axis is None else blocks, 0 if axis is None else axis)


def join(blocks: list, axis: int, tiled: bool):
    return np.concatenate(blocks, axis) if tiled else np.stack(blocks, axis)
