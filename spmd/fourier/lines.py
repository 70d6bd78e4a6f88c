"""Transforms along single dimensions, of which those along several are made. Integers and words only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from operator import index
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import LayoutError, SpecError
from spmd.operators.splitting import normal_axis
from spmd.spellings import closest

__all__ = ["FORWARD", "FROM_REAL", "NORMS", "TO_REAL", "Line", "checked_norm", "lines_of", "lowest_modes"]
__all__ += ["result_shape"]

NORMS = ("backward", "ortho", "forward")
INVERSE = {"fft": "ifft", "ifft": "fft", "rfft": "irfft", "irfft": "rfft", "hfft": "ihfft", "ihfft": "hfft"}
FORWARD = ("fft", "rfft", "ihfft")
"""Kinds whose results are spectra."""
TO_REAL = ("irfft", "hfft")
FROM_REAL = ("rfft", "ihfft")


class Line(NamedTuple):
    """A transform along one dimension.

    kind: the name of NumPy's function. before, after: the lengths of the dimension. size: the length of the transform:
    entries at the end are cropped, or zeros added. points: of a spectrum that is cropped or padded in its middle
    instead: the number of points of the coarse grid whose modes they are. sampled: modes are scaled so that the values
    on both grids are those of one function, and the mode of highest frequency of an even number of points counts for
    both signs; otherwise they are taken as they are.
    """

    kind: str
    dim: int
    before: int
    size: int
    after: int
    points: int | None = None
    sampled: bool = True

    @property
    def inverse(self) -> Line:
        """The transform back, to the length from before."""
        return self._replace(kind=INVERSE[self.kind], before=self.after, after=self.before)

    @property
    def taken(self) -> int:
        """The number of entries that the transform takes."""
        return half(self.size) if self.kind in TO_REAL else self.size

    @property
    def plain(self) -> bool:
        """Whether nothing is cropped or padded."""
        given = half(self.size) if self.kind in FROM_REAL else self.size
        return self.points is None and (self.before, self.after) == (self.taken, given)

    def __str__(self) -> str:
        length = "" if self.plain else f" of length {self.size}"
        middle = "" if self.points is None else f" for modes of {self.points} points"
        return f"{self.kind} along {self.dim}{length}{middle}"


def half(points: int) -> int:
    """The number of modes of so many real points."""
    return points // 2 + 1


def lines_of(
    where: str,
    name: str,
    shape: Sequence[int],
    s: Any,
    axes: Any,
    padding: Any = None,
) -> tuple[Line, ...]:
    """The lines of one of NumPy's transforms over several dimensions, in the order in which NumPy applies them.

    name: `fft`, `ifft`, `rfft`, `irfft`, `hfft` or `ihfft`. s, axes: as for `np.fft.fftn`. padding: a number, or one
    for each axis: of points of the grid for each mode. Raises SpecError and LayoutError.
    """
    ndim = len(shape)
    if axes is None:
        axes = range(ndim) if s is None else range(ndim - len(s), ndim)
    dims = [normal_axis(where, "axes", index(d), ndim) for d in axes]
    lengths = [None] * len(dims) if s is None else [None if n in (None, -1) else index(n) for n in s]
    if len(lengths) != len(dims):
        _wrong(where, "s", f"{len(lengths)} lengths for {len(dims)} axes", "a length for each axis", "s=None")
    factors = _factors(where, padding, len(dims))
    if not dims:
        if name not in ("fft", "ifft"):
            _wrong(where, "axes", "no axes", "at least one axis", "axes=(-1,)")
        return ()
    final, other_kind = len(dims) - 1, "fft" if name in FORWARD else "ifft"
    current, lines = list(shape), []
    for k in range(len(dims)) if name in TO_REAL else reversed(range(len(dims))):
        kind = name if k == final else other_kind
        line = _line(where, kind, dims[k], current[dims[k]], lengths[k], factors[k])
        current[dims[k]] = line.after
        lines.append(line)
    return tuple(lines)


def _factors(where: str, padding: Any, count: int) -> list[Fraction | None]:
    if padding is None:
        return [None] * count
    given = [padding] * count if np.ndim(padding) == 0 else [*padding]
    if len(given) != count or not all(isinstance(p, int | float | np.number) and 1 <= p < math.inf for p in given):
        need = f"a number of at least 1, or one for each of {count} axes"
        _wrong(where, "padding", repr(padding), need, "padding=1.5")
    return [Fraction(float(p)).limit_denominator(1 << 16) for p in given]


def _line(where: str, kind: str, dim: int, before: int, length: int | None, factor: Fraction | None) -> Line:
    if length is not None and length < 1:
        _wrong(where, "s", f"a length of {length} along dimension {dim}", "lengths of at least 1", "s=None")
    forward, from_half = kind in FORWARD, kind in TO_REAL
    if factor is None:
        size = length or (2 * (before - 1) if from_half else before)
        points, fine = None, size
    elif forward:
        fine = before
        points = size = length or math.ceil(Fraction(before) / factor)
        if math.floor(points * factor) != before:
            raise LayoutError.at(
                where,
                argument="padding",
                got=f"{before} points along dimension {dim}, for {points} modes and {float(factor)} points a mode",
                need=f"{math.floor(points * factor)} points, as the transform back gives",
                mend="s= of the number of points without padding, along each axis",
            )
    else:
        points = size = length or (2 * (before - 1) if from_half else before)
        fine = math.floor(size * factor)
        if before != (half(points) if from_half else points):
            need = f"the {half(points) if from_half else points} modes of {points} points"
            mend = "s= of the number of points without padding, along each axis"
            raise LayoutError.at(where, argument="s", got=f"{before} modes along dimension {dim}", need=need, mend=mend)
    if before < 1 or size < 1:
        raise LayoutError.at(
            where,
            argument="x",
            got=f"{before} entries along dimension {dim}",
            need="at least one point to transform" if not from_half else "at least two modes, or s",
            mend="leave this dimension out of axes",
        )
    modes = half(size) if kind in FROM_REAL else size
    return Line(kind, dim, before, fine, modes if forward else fine, points)


def result_shape(shape: Sequence[int], lines: Sequence[Line]) -> tuple[int, ...]:
    """The shape after these lines."""
    result = list(shape)
    for line in lines:
        result[line.dim] = line.after
    return tuple(result)


def lowest_modes(shape: Sequence[int], dims: Sequence[int], modes: Sequence[int]) -> tuple[Line, ...]:
    """A real transform over these dimensions of which the lowest modes are kept, as they are: in the last dimension
    those of the first frequencies, in the others (m + 1) // 2 from zero on and m // 2 below zero."""
    *others, (last, count) = zip(dims, modes, strict=True)
    lines = [Line("rfft", last, shape[last], shape[last], count, 2 * count - 1, False)]
    lines += [Line("fft", d, shape[d], shape[d], m, m, False) for d, m in reversed(others)]
    return tuple(lines)


def checked_norm(where: str, norm: Any) -> str:
    if norm is None:
        return "backward"
    if norm not in NORMS:
        _wrong(where, "norm", repr(norm), f"one of {', '.join(NORMS)}, or None", f'norm="{closest(norm, NORMS)}"')
    return norm


def _wrong(where: str, argument: str, got: str, need: str, mend: str) -> None:
    raise SpecError.at(where, argument=argument, got=got, need=need, mend=mend)
