"""Padding and cropping of arrays that lie anyhow."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.errors import LayoutError, SpecError, describe
from spmd.functions.layouts import as_operand, checked_target
from spmd.functions.local import local, namespace
from spmd.functions.movement import relaid
from spmd.functions.planned import LayerPlan, Operand, along, is_local, run_layer
from spmd.functions.windows import extended, mapped
from spmd.layout import Layout, Spec
from spmd.mesh import here
from spmd.spellings import closest
from spmd.tracebacks import api_boundary
from spmd.window import Taps, Window, plan_blocks
from spmd.window_nd import same_grid

__all__ = ["pad"]

_WHERE = "spmd.functions.pad"

Pair = tuple[int, int]

_MODES = {
    "constant": "constant",
    "reflect": "reflect",
    "symmetric": "symmetric",
    "edge": "edge",
    "wrap": "periodic",
    # as torch.nn.functional.pad and spmd.halo_exchange spell them
    "replicate": "edge",
    "circular": "periodic",
    "periodic": "periodic",
}


@api_boundary
def pad(
    x: Tree,
    widths: Any,
    mode: str = "constant",
    value: complex = 0,
    *,
    spec: Spec | None = None,
    shape: Sequence[int | None] | None = None,
    out_spec: Spec | None = None,
) -> Tree:
    """x with entries put around it, or cut off. x: an array of NumPy, CuPy or PyTorch, of any dimensions.

    widths: (low, high) for each dimension, the first dimension first, as np.pad has them; ((low, high),) or an int for
    all; {axis: (low, high)} for some. A negative width cuts entries off, before others are put around the rest.
    mode: what is put there. "constant": the value. "reflect": the mirror image, without the last entry again;
    "symmetric": with it. "edge" (in torch "replicate"): the last entry. "wrap" (in torch "circular"): what stands at
    the other end. The images go on as far as is needed.
    spec: in a body, how the whole x is split, of which x is this worker's block: a spec, or a `Layout` on some of the
    workers. None: x is the whole. Outside of bodies global arrays have their layouts. shape: of the whole x, if spec
    splits it evenly; without it the workers exchange the lengths of their blocks.
    out_spec: how the result is to lie. None: on the grid of x, in balanced blocks of the dimensions with widths.

    Forward: each worker gets the entries that its block of the result needs, by one halo exchange; on some of the
    workers by an exchange between those who need something of one another. Linear in x for a value of 0. Adjoint: g is
    added to the entries that were put there, by a halo accumulation; what was cut off gets 0.
    Raises SpecError and LayoutError where widths, modes, specs and layouts do not fit x. Source: as np.pad.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.arange(1.0, 5.0), P("x"))
        ...     spmd.functions.pad(x, (1, 2), "wrap")
        PartitionedArray([4., 1., 2., 3., 4., 1., 2.], dtype=float64, spec=P('x'))
    """
    x = as_operand(_WHERE, "x", x, "biufc", "numbers", "np.asarray(x) of numbers")
    pairs = _pairs(widths, x.ndim)
    mode = _mode(mode)
    if isinstance(value, bool) or not isinstance(value, int | float | complex | np.number):
        raise SpecError.at(_WHERE, argument="value", got=describe(value), need="a number", mend="value=0")
    operand, widened = Operand("spec", x, spec, shape), [d for d, pair in enumerate(pairs) if pair != (0, 0)]
    if is_local(_WHERE, operand, out_spec, [d for d in range(x.ndim) if d not in widened]):
        return _padded(x, pairs, mode, value)
    operand = along(_WHERE, operand, out_spec, widened)
    return run_layer(_WHERE, lambda layout: _planned(layout, pairs, mode, value, repr(value), out_spec), [operand])


def _mode(mode: Any) -> str:
    if mode not in _MODES:
        near = f'mode="{closest(mode, _MODES)}"' if isinstance(mode, str) else 'mode="constant"'
        raise SpecError.at(
            _WHERE,
            argument="mode",
            got=repr(mode),
            need=f"one of {', '.join(map(repr, _MODES))}",
            mend=f"{near}; np.pad(x, widths, mode) has others, for whole arrays",
        )
    return _MODES[mode]


def _pairs(widths: Any, ndim: int) -> tuple[Pair, ...]:
    """(low, high) of each dimension."""
    found = _read(widths, ndim)
    if found is not None:
        return found
    flat = _ints(widths)
    example, why = ((1, 1),) * ndim, "the same around each dimension"
    if flat is not None and len(flat) % 2 == 0 and 0 < len(flat) <= 2 * ndim:
        last_first = list(zip(flat[::2], flat[1::2], strict=True))
        example = ((0, 0),) * (ndim - len(last_first)) + tuple(reversed(last_first))
        why = "what torch.nn.functional.pad means, which has the last dimension first"
    raise LayoutError.at(
        _WHERE,
        argument="widths",
        got=f"{widths!r} for {ndim} dimension{'s' * (ndim != 1)}",
        need="as np.pad has them, in pairs: (low, high) for each dimension, the first one first; an int for all",
        mend=f"widths={example}: {why}",
    )


def _read(widths: Any, ndim: int) -> tuple[Pair, ...] | None:
    """(low, high) of each dimension; None if that is not what widths say."""
    if isinstance(widths, Mapping):
        each = {axis: _pair(pair) for axis, pair in widths.items()}
        axes = _ints(tuple(each))
        if axes is None or None in each.values() or not all(-ndim <= a < ndim for a in axes):
            return None
        by_axis = {a % ndim: pair for a, pair in each.items()}
        return tuple(by_axis.get(d) or (0, 0) for d in range(ndim)) if len(by_axis) == len(each) else None
    widths = widths.tolist() if isinstance(widths, np.ndarray) else widths
    if not isinstance(widths, Sequence):
        pair = _pair(widths)
        return None if pair is None else (pair,) * ndim
    if _ints(widths) is not None and widths:
        pair = _pair(widths)
        return (pair,) if pair is not None and ndim == 1 else None
    pairs = [_pair(pair) for pair in widths]
    pairs = pairs * ndim if len(pairs) == 1 else pairs
    return None if None in pairs or len(pairs) != ndim else tuple(p for p in pairs if p is not None)


def _pair(given: Any) -> Pair | None:
    ints = _ints(given if isinstance(given, Sequence) else (given, given))
    return (ints[0], ints[1]) if ints is not None and len(ints) == 2 else None


def _ints(values: Any) -> tuple[int, ...] | None:
    try:
        return None if any(isinstance(v, bool) for v in values) else tuple(map(operator.index, values))
    except TypeError:
        return None


def _kept(n: int, pair: Pair, d: int) -> Pair:
    """The entries of n that are not cut off."""
    start, stop = max(0, -pair[0]), n - max(0, -pair[1])
    if start > stop:
        raise LayoutError.at(
            _WHERE,
            argument="widths",
            got=f"{pair} for dimension {d}, of length {n}",
            need=f"to cut off {n} entries at most",
            mend="widths that are negative cut off entries; 0 keeps them",
        )
    return start, stop


def _check_images(n: int, pair: Pair, mode: str, d: int) -> None:
    if n == 0 and mode != "constant" and max(pair) > 0:
        raise LayoutError.at(
            _WHERE,
            argument="widths",
            got=f"{pair} for dimension {d}, which has no entry, mode {mode!r}",
            need="an entry to continue the array with",
            mend='mode="constant"',
        )


class _Line(NamedTuple):
    """The entries that an interval of a continued dimension shows: below the array, inside, and above."""

    below: np.ndarray
    inside: Pair
    above: np.ndarray

    @classmethod
    def of(cls, interval: Pair, n: int, mode: str) -> _Line:
        start, stop = interval
        below = mapped(np.arange(start, min(stop, 0)), n, mode)
        above = mapped(np.arange(max(start, n), stop), n, mode)
        inside = min(max(start, 0), n), min(max(stop, 0), n)
        return cls(below, inside, above)

    def hull(self, empty: int) -> Pair:
        """The interval of the array that has them all; at `empty` if there are none."""
        shown = [*self.below.tolist(), *self.above.tolist()]
        shown += [self.inside[0], self.inside[1] - 1] if self.inside[0] < self.inside[1] else []
        return (min(shown), max(shown) + 1) if shown else (empty, empty)

    def taken(self, x: Any, d: int, start: int) -> Any:
        """These entries of an array that begins at `start` in dimension d."""
        library, (first, end) = local(x, "pads"), self.inside
        parts = [library.take(x, index - start, d) if len(index) else None for index in (self.below, self.above)]
        inside = x[(*[slice(None)] * d, slice(first - start, end - start))]
        present = [part for part in (parts[0], inside, parts[1]) if part is not None]
        return inside if len(present) == 1 else namespace(x).concat(present, axis=d)


def _padded(x: Any, pairs: Sequence[Pair], mode: str, value: complex) -> Any:
    """A whole array, padded."""
    kept = [_kept(n, pair, d) for d, (n, pair) in enumerate(zip(x.shape, pairs, strict=True))]
    if any(pair != (0, n) for n, pair in zip(x.shape, kept, strict=True)):
        x = x[tuple(slice(*pair) for pair in kept)]
    around = [(max(low, 0), max(high, 0)) for low, high in pairs]
    if mode == "constant":
        return local(x, "pads").pad(x, around, value)
    for d, (low, high) in enumerate(around):
        if low or high:
            n = x.shape[d]
            _check_images(n, (low, high), mode, d)
            x = _Line.of((-low, n + high), n, mode).taken(x, d, 0)
    return x


@lru_cache(maxsize=256)
def _planned(
    x: Layout, pairs: tuple[Pair, ...], mode: str, value: complex, written: str, out: Spec | None
) -> LayerPlan:
    return _Plan(x, pairs, mode, value, written, out)


@dataclass(frozen=True)
class _Plan:
    """Entries are cut off where they lie; each worker then gets what its block of the result shows.

    written: the value in writing, which tells apart what is equal: 0.0 and -0.0.
    """

    x: Layout
    pairs: tuple[Pair, ...]
    mode: str
    value: complex
    written: str
    out_spec: Spec | None

    @cached_property
    def kept(self) -> list[Pair]:
        return [_kept(n, pair, d) for d, (n, pair) in enumerate(zip(self.x.shape, self.pairs, strict=True))]

    @cached_property
    def cropped(self) -> Layout:
        """The layout of what is not cut off."""
        cuts = []
        for d, (start, stop) in enumerate(self.kept):
            ends = np.clip(np.cumsum([0, *self.x.cuts[d]]), start, stop)
            cuts.append(tuple(np.diff(ends).tolist()))
        return same_grid(self.x, [stop - start for start, stop in self.kept], cuts)

    @cached_property
    def padded(self) -> Layout:
        """The layout of the result on the grid of x."""
        shape = [n + max(low, 0) + max(high, 0) for n, (low, high) in zip(self.cropped.shape, self.pairs, strict=True)]
        cuts = [cut if pair == (0, 0) else None for cut, pair in zip(self.x.cuts, self.pairs, strict=True)]
        return same_grid(self.x, shape, cuts)

    @cached_property
    def out(self) -> Layout:
        return checked_target(_WHERE, "out_spec", self.out_spec, self.padded.shape, self.padded, self.x.axes)

    @cached_property
    def lines(self) -> list[list[_Line] | None]:
        """For each dimension with images what each block of the result shows."""
        lines: list[list[_Line] | None] = []
        for d, (low, high) in enumerate(self.pairs):
            n = self.cropped.shape[d]
            _check_images(n, (low, high), self.mode, d)
            if self.mode in ("constant", "periodic") or (low, high) == (0, 0):
                lines.append(None)
                continue
            ends = [end - max(low, 0) for end in np.cumsum([0, *self.padded.cuts[d]]).tolist()]
            lines.append([_Line.of(interval, n, self.mode) for interval in itertools.pairwise(ends)])
        return lines

    @cached_property
    def windows(self) -> list[Window | None]:
        """What the blocks of the result need in each dimension."""
        windows: list[Window | None] = []
        for d, (pair, line) in enumerate(zip(self.pairs, self.lines, strict=True)):
            inputs, outputs = self.cropped.cuts[d], self.padded.cuts[d]
            starts = np.cumsum([0, *inputs]).tolist()
            if line is not None:
                hulls = tuple(each.hull(start) for each, start in zip(line, starts, strict=False))
                windows.append(Window(inputs, outputs, hulls))
                continue
            low, high = (max(0, n) for n in pair)
            whole = pair == (0, 0)
            windows.append(None if whole else plan_blocks(_WHERE, inputs, outputs, Taps(1, low=low, high=high)))
        return windows

    def __call__(self, x: Any) -> Any:
        me = here(_WHERE).index
        place = self.x.positions(me)
        if place is not None and self.cropped is not self.x:
            boxes = zip(self.x.boxes[me], self.kept, strict=True)
            inside = [(max(a, start) - a, min(b, stop) - a) for (a, b), (start, stop) in boxes]
            if any(pair != (0, n) for pair, n in zip(inside, x.shape, strict=True)):
                x = x[tuple(slice(start, max(start, stop)) for start, stop in inside)]
        boundary = "periodic" if self.mode == "periodic" else "none"
        y = extended(x, self.cropped, self.windows, [boundary] * len(self.pairs))
        if place is not None:
            y = self._continued(y, place)
        return relaid(y, self.padded, self.out)

    def _continued(self, y: Any, place: Sequence[int]) -> Any:
        """What a block of the result needs, with what stands beyond the ends."""
        if self.mode == "constant":
            windows = zip(self.windows, place, strict=True)
            return local(y, "pads").pad(y, [(0, 0) if w is None else w.pads[k] for w, k in windows], self.value)
        for d, (line, window) in enumerate(zip(self.lines, self.windows, strict=True)):
            if line is not None and window is not None:
                y = line[place[d]].taken(y, d, window.needs[place[d]][0])
        return y
