"""Lines of transforms on one block, in which their dimensions are whole. For arrays of any library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from spmd.fourier import local as numpys
from spmd.fourier.lines import FORWARD, FROM_REAL, TO_REAL, Line
from spmd.frontends import frontend

__all__ = ["transformed"]


def transformed(x: Any, lines: Sequence[Line], norm: str, shape: Sequence[int], overwrite: bool = False) -> Any:
    """The transforms of a block along these lines, one after the other. shape: of the result. overwrite: x may be
    written to."""
    other = frontend(x)
    xp = other.namespace if other is not None else _namespace(x)
    if 0 in x.shape:
        return _of_nothing(x, lines, shape, xp)
    local = numpys if other is None else other.local("fourier")
    for plain, group in groupby(lines, lambda line: line.plain):
        each = list(group)
        for part in _together(each) if plain else [[line] for line in each]:
            x = _several(x, part, norm, local, overwrite) if plain else _one(x, part[0], norm, local, xp)
            overwrite = overwrite and plain
    return x


def _namespace(x: Any) -> Any:
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else np


def _of_nothing(x: Any, lines: Sequence[Line], shape: Sequence[int], xp: Any) -> Any:
    for line in lines:
        x = xp.real(x) * 1.0 if line.kind in TO_REAL else x * 1j
    return xp.reshape(x, tuple(shape))


_BEFORE = {"fft": {"fft", "rfft"}, "ifft": {"ifft"}, "irfft": {"ifft"}}


def _together(lines: list[Line]) -> list[list[Line]]:
    """Lines that one call does: a real one with complex ones after it, or before it, of different dimensions."""
    parts: list[list[Line]] = []
    for line in lines:
        part = parts[-1] if parts else []
        kinds = {each.kind for each in part}
        fits = kinds <= _BEFORE.get(line.kind, set()) and line.dim not in {each.dim for each in part}
        if part and fits:
            part.append(line)
        else:
            parts.append([line])
    return parts


def _several(x: Any, lines: list[Line], norm: str, local: Any, overwrite: bool) -> Any:
    kinds = {line.kind for line in lines}
    kind = next((k for k in ("rfft", "irfft") if k in kinds), lines[0].kind)
    ordered = lines if kind == "irfft" else lines[::-1]  # the real dimension is the last one
    sizes, dims = [line.size for line in ordered], [line.dim for line in ordered]
    return local.transform(x, kind, sizes, dims, norm, overwrite)


def _one(x: Any, line: Line, norm: str, local: Any, xp: Any) -> Any:
    """A line of which entries are cropped or zeros added, before the transform or after it."""
    forward = line.kind in FORWARD
    if line.points is None:
        x = _ended(x, line.dim, line.taken, local)
        x = local.transform(x, line.kind, [line.size], [line.dim], norm)
        return _ended(x, line.dim, line.after, local)
    if forward:
        x = local.transform(x, line.kind, [line.size], [line.dim], norm)
        x = _cropped(x, line, xp)
    else:
        x = _padded(x, line, local, xp)
        x = local.transform(x, line.kind, [line.size], [line.dim], norm)
    scale = _scale(line, norm)
    return x if scale == 1 else x * scale


def _scale(line: Line, norm: str) -> float:
    """By which spectra of the fine grid become those of the coarse one, or values of it back."""
    assert line.points is not None
    if norm == "forward" or not line.sampled:
        return 1
    ratio = line.points / line.size if line.kind in FORWARD else line.size / line.points
    return ratio if norm == "backward" else math.sqrt(ratio)


def _at(dim: int, start: int | None, stop: int | None) -> tuple[Any, ...]:
    return (*(slice(None),) * dim, slice(start, stop))


def _ended(x: Any, dim: int, length: int, local: Any) -> Any:
    """x cropped at its end, or with zeros there."""
    n = x.shape[dim]
    return x[_at(dim, None, length)] if length <= n else local.pad(x, dim, 0, length - n)


def _cropped(x: Any, line: Line, xp: Any) -> Any:
    """The modes of a coarse grid among those of a fine one."""
    dim, points, n = line.dim, line.points, line.size
    assert points is not None
    if points >= n and line.sampled:
        return x
    meets = line.sampled and points % 2 == 0  # the highest frequency is that of either sign
    middle = points // 2
    if line.kind in FROM_REAL:
        x = x[_at(dim, None, line.after)]
        if not meets:
            return x
        last = x[_at(dim, middle, middle + 1)]
        return xp.concat([x[_at(dim, None, middle)], last + xp.conj(last)], axis=dim)
    if not meets:
        return xp.concat([x[_at(dim, None, points - middle)], x[_at(dim, n - middle, None)]], axis=dim)
    both = x[_at(dim, middle, middle + 1)] + x[_at(dim, n - middle, n - middle + 1)]
    return xp.concat([x[_at(dim, None, middle)], both, x[_at(dim, n - middle + 1, None)]], axis=dim)


def _padded(x: Any, line: Line, local: Any, xp: Any) -> Any:
    """The modes of a fine grid that has those of a coarse one."""
    dim, points, n = line.dim, line.points, line.size
    assert points is not None
    if points >= n and line.sampled:
        return x
    meets = line.sampled and points % 2 == 0
    middle = points // 2
    if line.kind in TO_REAL:
        if meets:
            x = xp.concat([x[_at(dim, None, middle)], x[_at(dim, middle, None)] * 0.5], axis=dim)
        return _ended(x, dim, n // 2 + 1, local)
    if not meets:
        low, high = x[_at(dim, None, points - middle)], x[_at(dim, points - middle, None)]
        return xp.concat([low, local.pad(high, dim, n - points, 0)], axis=dim)
    halved = x[_at(dim, middle, middle + 1)] * 0.5
    high = xp.concat([local.pad(halved, dim, n - points - 1, 0), x[_at(dim, middle + 1, None)]], axis=dim)
    return xp.concat([x[_at(dim, None, middle)], halved, high], axis=dim)
