"""Which axes of the mesh split which letters of a product of global arrays. Integers only.

Each axis splits one letter, in all operands and the result that have it, or none. Of all assignments, and of the cuts
that operands bring along, the one is chosen that moves the fewest bytes: what operands need that they do not hold, and
the sums over the workers of a letter that is summed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.kernels.cpu.chunks import accurate
from spmd.layout import Layout, P, block_sizes, offsets
from spmd.transport.algorithms import cost

__all__ = ["Assignment", "Product", "assign"]


class Product(NamedTuple):
    """A product of arrays over letters, as np.einsum has it.

    words, out: the letters of each operand, and of the result. layouts: those of operands; None for bare ones, which
    all workers have. itemsizes: of their entries. dtype: that of the result. axes: of the mesh.
    """

    words: tuple[str, ...]
    out: str
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout | None, ...]
    itemsizes: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[tuple[str, int], ...]

    @property
    def lengths(self) -> dict[str, int]:
        return {
            c: n for word, shape in zip(self.words, self.shapes, strict=True) for c, n in zip(word, shape, strict=True)
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that split an operand: all of them for one on a grid."""
        split = {n for layout in self.layouts if layout is not None for n in _names(layout)}
        return tuple(name for name, _ in self.axes if name in split)


class Assignment(NamedTuple):
    """How a product is computed.

    used: by operand the layout of what its product needs on each worker. held: by operand the layout in which it is
    laid out before; where it is another one, the blocks go round in a ring. out: the layout of the workers' products.
    summed: the axes over which these are added. gathered: the operands that every worker would have to hold in parts
    larger than the limit, and no ring helps.
    """

    used: tuple[Layout, ...]
    held: tuple[Layout, ...]
    out: Layout
    summed: tuple[str, ...]
    moved: int
    gathered: tuple[int, ...] = ()


Splitting = tuple[tuple[str, ...], tuple[int, ...]]
"""The axes that split a letter, major to minor, and the sizes of the blocks."""


def _names(layout: Layout) -> tuple[str, ...]:
    return tuple(layout.axes) if layout.spec is None else layout.spec.axes


@lru_cache(maxsize=1024)
def assign(product: Product, limit: int) -> Assignment:
    """The assignment that moves the fewest bytes, of those that gather at most `limit` bytes on a worker if there are
    any. Ties: the smaller result; more axes; the first in the order of names."""
    return _Search(product, limit).best()


class _Search:
    def __init__(self, product: Product, limit: int):
        self.product, self.limit, self.sizes = product, limit, dict(product.axes)
        self.lengths = product.lengths
        self._layouts: dict[Any, Layout] = {}
        self._moved: dict[Any, int] = {}
        self._bounds = [None if layout is None or not layout.shape else _bounds(layout) for layout in product.layouts]

    def best(self) -> Assignment:
        best: tuple[Any, Assignment] | None = None
        for letters in self._letters():
            options = [self._splittings(c, names) for c, names in letters.items()]
            for chosen in itertools.product(*options):
                found = self._cost(dict(zip(letters, chosen, strict=True)), best)
                best = found if best is None or (found is not None and found[0] < best[0]) else best
        assert best is not None
        return best[1]

    def _letters(self) -> Iterator[dict[str, tuple[str, ...]]]:
        """By letter the axes that split it, in every order."""
        names = self.product.names
        repeated = {c for word in self.product.words for c in word if word.count(c) > 1}
        letters = sorted(self.lengths.keys() - repeated)
        for picks in itertools.product((None, *letters), repeat=len(names)):
            axes_of: dict[str, list[str]] = {}
            for name, c in zip(names, picks, strict=True):
                if c is not None:
                    axes_of.setdefault(c, []).append(name)
            for orders in itertools.product(*(itertools.permutations(group) for group in axes_of.values())):
                yield dict(zip(axes_of, orders, strict=True))

    def _splittings(self, c: str, names: tuple[str, ...]) -> list[Splitting]:
        """Balanced blocks of a letter, and those of operands that the same axes split, or some of them."""
        cuts = {block_sizes(self.lengths[c], [self.sizes[n] for n in names])}
        for word, layout in zip(self.product.words, self.product.layouts, strict=True):
            if layout is None or layout.spec is None or c not in word:
                continue
            d = word.index(c)
            cut = _fitted(layout.spec.dims[d], layout.cuts[d], names, self.sizes)
            if cut is not None:
                cuts.add(cut)
        return [(names, cut) for cut in sorted(cuts)]

    def _layout(self, word: str, splitting: Mapping[str, Splitting]) -> Layout:
        key = word, *(splitting.get(c) for c in word)
        layout = self._layouts.get(key)
        if layout is None:
            split = [splitting.get(c) for c in word]
            spec = P(*(names[0] if names else None for names in split))
            cuts = [each[1] if each else None for each in split]
            layout = self._layouts[key] = Layout([self.lengths[c] for c in word], spec, self.sizes, cuts)
        return layout

    def _cost(self, splitting: Mapping[str, Splitting], best: Any) -> tuple[Any, Assignment] | None:
        """What an assignment is compared by, and the assignment; None if it moves more than the best one."""
        product = self.product
        used = tuple(self._layout(word, splitting) for word in product.words)
        assigned = {n for names, _ in splitting.values() for n in names}
        held, gathered = self._held(used, assigned)
        moved = sum(map(self._operand_bytes, range(len(used)), held, used))
        if best is not None and (bool(gathered), moved) > best[0][:2]:
            return None
        out = self._layout(product.out, splitting)
        summed = tuple(n for c, (names, _) in splitting.items() if c not in product.out for n in names)
        moved += _sum_bytes(out, summed, product.dtype) if summed else 0
        key = (bool(gathered), moved, _largest(out), -len(assigned), sorted(splitting.items()))
        return key, Assignment(used, held, out, summed, moved, gathered)

    def _operand_bytes(self, k: int, held: Layout, used: Layout) -> int:
        """The bytes that workers receive when an operand is laid out anew, and then goes round."""
        have = self._bounds[k]
        if have is None:
            return 0
        if (k, held, used) not in self._moved:
            middle = have if held == self.product.layouts[k] else _bounds(held)
            entries = _entries_moved(have, middle) + _entries_moved(middle, _bounds(used))
            self._moved[k, held, used] = entries * self.product.itemsizes[k]
        return self._moved[k, held, used]

    def _held(self, used: Sequence[Layout], assigned: set[str]) -> tuple[tuple[Layout, ...], tuple[int, ...]]:
        """The layouts in which operands are laid out: those used, but for the largest that are gathered, until the rest
        is within the limit. And those for which that would need another assignment."""
        product, held = self.product, list(used)
        nbytes = {
            k: _largest(layout) * product.itemsizes[k]
            for k, layout in enumerate(used)
            if (source := product.layouts[k]) is not None and set(_names(source)) - set(layout.spec.axes)
            if _largest(layout) > _largest(source)
        }
        for k in sorted(nbytes, key=lambda k: -nbytes[k]):
            if sum(nbytes.values()) <= self.limit:
                return tuple(held), ()
            source, word = product.layouts[k], product.words[k]
            assert source is not None
            if set(_names(source)) - set(used[k].spec.axes) <= assigned and len(set(word)) == len(word):
                held[k] = _ring_layout(source, used[k])
                del nbytes[k]
        return tuple(held), tuple(nbytes) if sum(nbytes.values()) > self.limit else ()


def _fitted(
    have: tuple[str, ...], cut: tuple[int, ...], names: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[int, ...] | None:
    """The blocks that these axes make of a letter that others split into blocks `cut`, where the major ones are the
    same: blocks are joined, or each is split into balanced ones. None where they are others."""
    n = min(len(have), len(names))
    if not have or have[:n] != names[:n]:
        return None
    joined = math.prod(sizes[name] for name in have[n:])
    cut = tuple(sum(cut[k : k + joined]) for k in range(0, len(cut), joined))
    return tuple(itertools.chain.from_iterable(block_sizes(m, [sizes[name] for name in names[n:]]) for m in cut))


def _ring_layout(source: Layout, used: Layout) -> Layout:
    """What is used, split by the axes along which it would be gathered too: as they split the source, if they do."""
    free = [n for n in _names(source) if n not in used.spec.axes]
    if source.spec is None:
        longest = max(range(len(used.shape)), key=lambda d: used.shape[d])
        dims = [(*names, *free * (d == longest)) for d, names in enumerate(used.spec.dims)]
    else:
        dims = [
            (*names, *(n for n in split if n in free))
            for names, split in zip(used.spec.dims, source.spec.dims, strict=True)
        ]
        if tuple(dims) == source.spec.dims and all(
            _fitted(split, cut, names, used.axes) == own
            for names, split, cut, own in zip(used.spec.dims, dims, source.cuts, used.cuts, strict=True)
            if names
        ):
            return source
    cuts = [
        tuple(itertools.chain.from_iterable(block_sizes(m, [used.axes[n] for n in names[len(before) :]]) for m in cut))
        for names, before, cut in zip(dims, used.spec.dims, used.cuts, strict=True)
    ]
    return Layout(used.shape, P(*(names or None for names in dims)), used.axes, cuts)


def _largest(layout: Layout) -> int:
    """The entries of the largest block."""
    return math.prod(max(cut) for cut in layout.cuts)


@lru_cache(maxsize=256)
def _places(names: tuple[str, ...], axes: tuple[tuple[str, int], ...]) -> np.ndarray:
    """By worker the number of its block of a dimension that these axes split."""
    sizes = dict(axes)
    coordinates = dict(zip(sizes, np.indices(tuple(sizes.values()), np.int64).reshape(len(sizes), -1), strict=True))
    places = np.zeros(math.prod(sizes.values()), np.int64)
    for name in names:
        places = places * sizes[name] + coordinates[name]
    return places


def _bounds(layout: Layout) -> np.ndarray:
    """`Layout.boxes`, as an array [worker, dimension, start or stop]."""
    if layout.spec is None:
        return np.array(layout.boxes)
    axes, ends = tuple(layout.axes.items()), [np.array(offsets(cut)) for cut in layout.cuts]
    places = [_places(names, axes) for names in layout.spec.dims]
    return np.stack([np.stack([e[k], e[k + 1]], -1) for e, k in zip(ends, places, strict=True)], 1)


def _entries_moved(have: np.ndarray, want: np.ndarray) -> int:
    """The entries that workers need, by their bounds, and do not hold."""
    common = np.minimum(have[..., 1], want[..., 1]) - np.maximum(have[..., 0], want[..., 0])
    volume = np.prod(want[..., 1] - want[..., 0], axis=1)
    return int(np.sum(volume - np.prod(np.maximum(common, 0), axis=1)))


def _sum_bytes(out: Layout, names: tuple[str, ...], dtype: np.dtype) -> int:
    """The bytes that workers send to add their blocks along these axes."""
    n, volumes = math.prod(out.axes[name] for name in names), np.ones(1, np.int64)
    for cut in out.cuts:
        volumes = np.multiply.outer(volumes, np.array(cut)).ravel()
    groups = out.size // len(volumes) // n
    sizes, counts = np.unique(volumes, return_counts=True)
    pairs = zip(sizes.tolist(), counts.tolist(), strict=True)
    return sum(_all_reduce_bytes(n, size, dtype) * count * groups for size, count in pairs)


@lru_cache(maxsize=4096)
def _all_reduce_bytes(n: int, size: int, dtype: np.dtype) -> int:
    """The bytes that n workers send to add blocks of so many entries."""
    partial = accurate(dtype).itemsize
    return sum(cost.all_reduce(n, me, size, dtype.itemsize, partial, 1).nbytes for me in range(n))
