"""Checks and geometry of operators that split or join a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np

from spmd.errors import LayoutError
from spmd.layout import block_sizes, offsets
from spmd.operators.base import Collective
from spmd.transport.call import Group, Shape

__all__ = ["agree", "check_length", "given_sizes", "normal_axis", "split_at", "split_ways"]


def given_sizes(function: str, sizes: Any, tiled: bool = True) -> tuple[int, ...] | None:
    """The sizes that a user gave for the pieces of a dimension, as integers."""
    if sizes is None:
        return None
    try:
        lengths = tuple(index(n) for n in sizes)
    except TypeError:
        lengths = None
    if lengths is None or not tiled:
        raise LayoutError.at(
            f"spmd.{function}",
            argument="sizes",
            got=repr(sizes) + (" with tiled=False" if lengths is not None else ""),
            need="a length for each worker's piece, where tiled=True cuts a dimension into pieces",
            mend="tiled=True, or leave sizes out" if lengths is not None else "sizes=(3, 2, 0): one integer per worker",
        )
    return lengths


def split_at(op: Collective, group: Group, shape: Shape, axis: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of the pieces of a dimension: those that were given, checked, or the balanced ones."""
    n = shape[axis]
    if sizes is None:
        return block_sizes(n, group.dims)
    if len(sizes) != group.size or sum(sizes) != n or min(sizes) < 0:
        raise LayoutError.at(
            f"spmd.{op.function}",
            argument="sizes",
            got=f"{tuple(sizes)} for a dimension of length {n} over {group.size} workers",
            need=f"{group.size} sizes that add to {n}",
            mend="leave sizes out for balanced pieces",
        )
    return tuple(sizes)


def check_length(op: Collective, group: Group, x: np.ndarray, axis: int, sizes: Sequence[int] | None) -> None:
    """Raise where a block that is to be joined has another length than the sizes of the blocks say."""
    if sizes is not None and x.shape[axis] != sizes[group.index]:
        raise LayoutError.at(
            f"spmd.{op.function}",
            argument="x",
            got=f"a block of length {x.shape[axis]} in dimension {axis}",
            need=f"length {sizes[group.index]}, as sizes={tuple(sizes)} says",
            mend="leave sizes out: they travel with the blocks",
        )


def normal_axis(function: str, argument: str, axis: int, ndim: int) -> int:
    """A dimension counted from the front, checked."""
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise LayoutError.at(
            function if "." in function else f"spmd.{function}",
            argument=argument,
            got=f"{axis!r} for an array of {ndim} dimensions",
            need=f"a dimension from {-ndim} to {ndim - 1}" if ndim else "an array of at least one dimension",
            mend="name a dimension that the array has" if ndim else "np.reshape(x, (1,)) first",
        )
    return int(axis) % ndim


@lru_cache(maxsize=1024)
def cuts(axis: int, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """The index of each piece of what is cut along an axis."""
    before = (slice(None),) * axis
    return tuple((*before, slice(start, stop)) for start, stop in pairwise(offsets(sizes)))


@lru_cache(maxsize=1024)
def _entries(axis: int, n: int) -> tuple[Any, ...]:
    """The index of each entry along an axis."""
    return tuple((*(slice(None),) * axis, k, ...) for k in range(n))


def split_ways(
    op: Collective,
    argument: str,
    axis: int,
    group: Group,
    shape: Shape,
    tiled: bool,
    sizes: Sequence[int] | None,
) -> tuple[int, Sequence[Any], tuple[int, ...] | None]:
    """How a block of this shape is split over the workers along a dimension, which `argument` names: the dimension,
    counted from the front, the index of each member's piece, and their lengths where it is tiled."""
    axis = normal_axis(op.function, argument, axis, len(shape))
    if tiled:
        sizes = split_at(op, group, shape, axis, sizes)
        return axis, cuts(axis, sizes), sizes
    if shape[axis] != group.size:
        raise LayoutError.at(
            f"spmd.{op.function}",
            argument="x",
            got=f"length {shape[axis]} in dimension {axis}",
            need=f"length {group.size}, one entry per worker",
            mend="tiled=True splits a dimension of any length into blocks",
        )
    return axis, _entries(axis, group.size), None


def agree(function: str, shapes: Sequence[Shape], axis: int | None) -> None:
    """Raise where blocks that are to be joined along an axis differ elsewhere, or (None) differ at all."""
    rest = [s if axis is None else s[:axis] + s[axis + 1 :] for s in shapes]
    for k, r in enumerate(rest):
        if r != rest[0]:
            raise LayoutError.at(
                f"spmd.{function}",
                argument="x",
                got=f"blocks of shapes {list(shapes[0])} (member 0) and {list(shapes[k])} (member {k})",
                need="blocks of one shape, to be stacked"
                if axis is None
                else f"blocks that differ in dimension {axis} only, along which they are joined",
                mend="tiled=True joins blocks of different lengths along a dimension that is there"
                if axis is None
                else "join along the dimension in which they differ",
            )
