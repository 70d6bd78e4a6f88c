"""Maxima of as many windows as are asked for, of arrays (N, C, *spatial) that lie anyhow."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import SpecError
from spmd.functions.layouts import as_operand, checked_target
from spmd.functions.local import local, namespace
from spmd.functions.movement import relaid
from spmd.functions.planned import LayerPlan, Operand, along, is_local, run_layer
from spmd.functions.window_arguments import check_spatial
from spmd.functions.windows import extended
from spmd.layout import Layout, Spec
from spmd.mesh import here
from spmd.tracebacks import api_boundary
from spmd.window import Window, plan_blocks
from spmd.window_nd import same_grid

__all__ = ["adaptive_max_pool"]

_WHERE = "spmd.functions.adaptive_max_pool"

Ints = tuple[int, ...]


@api_boundary
def adaptive_max_pool(
    x: Any,
    output_size: int | Sequence[int | None] | None,
    return_indices: bool = False,
    *,
    spec: Spec | None = None,
    shape: Sequence[int | None] | None = None,
    out_spec: Spec | None = None,
) -> Any:
    """The largest entry of each of m windows along every spatial dimension. x: (N, C, *spatial), floating, of one to
    three spatial dimensions; an array of NumPy, CuPy or PyTorch.

    output_size: m, an int, or one for each spatial dimension; None: as many as entries. Window o of m covers the
    entries floor(o n / m) to ceil((o + 1) n / m), the last excluded, of n. return_indices, spec, shape, out_spec: as
    for `max_pool`. The means of the same windows: `resize(x, size=output_size, method="area")`.

    Forward, and the adjoint of the derivative: as for `max_pool`. Of equal entries the first is chosen.
    Raises SpecError and LayoutError where the lengths, specs and layouts do not fit x.
    Source: as torch.nn.functional.adaptive_max_pool2d.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.arange(7.0).reshape(1, 1, 7), P(None, None, "x"))
        ...     spmd.functions.adaptive_max_pool(x, 3)
        PartitionedArray([[[2., 4., 6.]]], dtype=float64, spec=P(None, None, 'x'))
    """
    x = as_operand(_WHERE, "x", x, "f", "real floating-point numbers", "x.astype(float)")
    check_spatial(_WHERE, x)
    sizes, indices = _sizes(output_size, x.ndim - 2), bool(return_indices)
    operand = Operand("spec", x, spec, shape)
    if is_local(_WHERE, operand, out_spec, range(2)):
        space = tuple(x.shape[2:])
        top, index = _pooled(
            x, [_Part(n, m, 0, m, 0) for n, m in zip(space, _results(sizes, space), strict=True)], indices
        )
        return (top, index) if indices else top
    operand = along(_WHERE, operand, out_spec, range(2, x.ndim))
    return run_layer(_WHERE, lambda layout: _planned(layout, sizes, out_spec, indices), [operand])


def _sizes(given: Any, dims: int) -> tuple[int | None, ...]:
    """The number of windows along each dimension; None: as many as entries."""
    each: tuple[Any, ...] = (
        tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,) * dims
    )
    try:
        sizes = tuple(m if m is None else operator.index(m) for m in each)
        fits = len(sizes) == dims and all(m is None or m >= 0 for m in sizes)
    except TypeError:
        sizes, fits = (), False
    if not fits:
        need = f"a number of windows, or one for each of the {dims} spatial dimensions, None for as many as entries"
        mend = f"output_size={(1,) * dims}"
        raise SpecError.at(_WHERE, argument="output_size", got=repr(given), need=need, mend=mend)
    return sizes


def _results(sizes: Sequence[int | None], space: Ints) -> Ints:
    """The lengths of the result, of an array of these lengths."""
    results = tuple(n if m is None else m for m, n in zip(sizes, space, strict=True))
    if any(m and not n for m, n in zip(results, space, strict=True)):
        got, need = f"{results} for an array of lengths {list(space)}", "an entry for each window"
        raise SpecError.at(_WHERE, argument="output_size", got=got, need=need, mend="None keeps a length")
    return results


class _Needs(NamedTuple):
    """The entries that a window covers, of n, where there are m windows."""

    n: int
    m: int

    def __call__(self, o: int) -> tuple[int, int]:
        return o * self.n // self.m, -(-(o + 1) * self.n // self.m)


class _Part(NamedTuple):
    """The windows first to end of m over n entries, as a block has them that begins at entry start."""

    n: int
    m: int
    first: int
    end: int
    start: int

    @property
    def lines(self) -> np.ndarray:
        """(windows, k): the entries of each window in the block; the last one again where a window is shorter."""
        o = np.arange(self.first, self.end)
        low, high = o * self.n // max(1, self.m), -(-(o + 1) * self.n // max(1, self.m))
        k = max((high - low).tolist(), default=1)
        return np.minimum(low[:, None] + np.arange(k), high[:, None] - 1) - self.start

    def entry(self, place: Any, k: int, xp: Any) -> Any:
        """The entry of the whole at a place in the lines, row after row."""
        o = place // k + self.first
        last = ((o + 1) * self.n + self.m - 1) // self.m - 1
        return xp.minimum(o * self.n // self.m + place % k, last)


def _pooled(x: Any, parts: Sequence[_Part], indices: bool) -> tuple[Any, Any]:
    """The maxima of the windows of a block, and their flat indices among the spatial entries of the whole.

    Windows become equally long, side by side, by taking entries again.
    """
    window = []
    for d, part in enumerate(parts, 2):
        lines = part.lines
        window.append(lines.shape[1])
        if not np.array_equal(lines.ravel(), np.arange(x.shape[d])):
            x = local(x, "pads").take(x, lines.ravel(), d)
    ones, none = (1,) * len(window), ((0, 0),) * len(window)
    top, index = local(x, "pooling").max_pool(x, (tuple(window), tuple(window), none, ones), False, indices)
    if not indices:
        return top, None
    xp = namespace(index)
    dtype, rest, whole, step = index.dtype, xp.astype(index, xp.int64), 0, 1
    for part, k, n in reversed(list(zip(parts, window, x.shape[2:], strict=True))):
        whole = whole + part.entry(rest % max(1, n), k, xp) * step
        rest, step = rest // max(1, n), step * part.n
    return top, whole if step >= 1 << 31 else xp.astype(whole, dtype)


@lru_cache(maxsize=256)
def _planned(x: Layout, sizes: tuple[int | None, ...], out_spec: Spec | None, indices: bool) -> LayerPlan:
    return _Plan(x, sizes, out_spec, indices)


@dataclass(frozen=True)
class _Plan:
    """Each worker computes the maxima of its block of the result from the entries that its windows cover."""

    x: Layout
    sizes: tuple[int | None, ...]
    out_spec: Spec | None
    indices: bool

    @cached_property
    def pooled(self) -> Layout:
        """The layout of the result on the grid of x."""
        space = _results(self.sizes, self.x.shape[2:])
        return same_grid(self.x, (*self.x.shape[:2], *space), [*self.x.cuts[:2], *[None] * len(space)])

    @cached_property
    def windows(self) -> list[Window | None]:
        each = list(zip(self.x.cuts, self.pooled.cuts, self.x.shape, self.pooled.shape, strict=True))[2:]
        return [None, None, *(plan_blocks(_WHERE, a, b, _Needs(n, m)) for a, b, n, m in each)]

    @cached_property
    def target(self) -> Layout:
        return checked_target(_WHERE, "out_spec", self.out_spec, self.pooled.shape, self.pooled, self.x.axes)

    @cached_property
    def out(self) -> Any:
        return (self.target, self.target) if self.indices else self.target

    def __call__(self, x: Any) -> Any:
        place = self.x.positions(here(_WHERE).index)
        x = extended(x, self.x, self.windows, ["none"] * x.ndim)
        parts = []
        for d, (n, m) in enumerate(zip(self.x.shape[2:], self.pooled.shape[2:], strict=True), 2):
            window = self.windows[d]
            if place is None or window is None:
                parts.append(_Part(n, m, 0, 0, 0))
            else:
                parts.append(_Part(n, m, *window.output_bounds[place[d]], max(0, window.needs[place[d]][0])))
        top, index = _pooled(x, parts, self.indices)
        laid = relaid(top, self.pooled, self.target)
        return (laid, relaid(index, self.pooled, self.target)) if self.indices else laid
