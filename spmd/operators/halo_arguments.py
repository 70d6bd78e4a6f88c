"""The arguments of halos: widths, boundaries and sizes, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from spmd.errors import LayoutError, SpecError, describe
from spmd.layout import P, block_sizes
from spmd.mesh import Worker
from spmd.operators.halo_geometry import BOUNDARIES, Pair
from spmd.spellings import closest
from spmd.transport.call import Call, Shape

__all__ = ["balanced", "checked_spec", "lengths_met"]


def _int(n: Any) -> int | None:
    try:
        return index(n)
    except TypeError:
        return None


def widths_of(where: str, spec: P, widths: Any) -> tuple[tuple[Pair, ...], ...]:
    """For each dimension one pair (low, high), or one per block."""
    one = _int(widths)
    if one is not None:
        return tuple(((one, one),) if names else ((0, 0),) for names in spec.trimmed)

    def pair(given: Any) -> Pair:
        low, high = given
        return index(low), index(high)

    def entry(given: Any) -> tuple[Pair, ...]:
        one = _int(given)
        if one is not None:
            return ((one, one),)
        return (pair(given),) if len(given) == 2 and _int(given[0]) is not None else tuple(map(pair, given))

    try:
        entries = tuple(entry(given) for given in widths)
        if all(entries) and len(entries) >= len(spec.trimmed):
            return entries
        got = f"{widths!r}, of {len(entries)} entries, for {spec}"
    except (TypeError, ValueError):
        got = repr(widths)
    raise LayoutError.at(
        where,
        argument="widths",
        got=got,
        need="an int, or one entry per dimension: an int, (low, high), or a list of one (low, high) per block",
        mend="widths=(1, (2, 0)): one entry on both sides of dimension 0, two below dimension 1",
    ) from None


def sizes_of(where: str, sizes: Any) -> tuple[tuple[int, ...] | None, ...]:
    """For each dimension the lengths of its blocks, or None."""
    try:
        lengths = tuple(None if s is None else tuple(map(index, s)) for s in sizes)
        if all(n >= 0 for s in lengths for n in s or ()):
            return lengths
    except TypeError:
        pass
    raise LayoutError.at(
        where,
        argument="sizes",
        got=repr(sizes),
        need="for each dimension the lengths of its blocks, or None",
        mend="sizes=[(3, 2, 0), None]: dimension 0 lies in blocks of 3, 2 and 0",
    )


_SYMMETRIC = ', which is the same for widths of 1; "reflect" mirrors too, and does not repeat the last entry'


def boundaries_of(where: str, boundary: Any, count: int) -> str | tuple[str, ...]:
    """One boundary, or one for each dimension that has widths."""
    each = tuple(boundary) if isinstance(boundary, Sequence) and not isinstance(boundary, str) else (boundary,)
    for b in each:
        if b not in BOUNDARIES:
            raise LayoutError.at(
                where,
                argument="boundary",
                got=repr(b),
                need=f"one of {', '.join(BOUNDARIES)}, or one for each dimension",
                mend=f'write "{closest(b, BOUNDARIES)}"' + _SYMMETRIC * (b == "symmetric"),
            )
    if isinstance(boundary, str):
        return boundary
    if len(each) < count:
        raise LayoutError.at(
            where,
            argument="boundary",
            got=f"{each}, of {len(each)} entries, for {count} dimension{'s' * (count != 1)} with widths",
            need="one for all, or one for each",
            mend='"none" for dimensions that end where the array ends',
        )
    return each


def as_tuples(given: Any) -> Any:
    """Lists as tuples, at every depth: both say the same."""
    return tuple(map(as_tuples, given)) if isinstance(given, list | tuple) else given


def checked_spec(where: str, spec: Any, axes: Mapping[str, int], ndim: int | None = None, space: int = 0) -> None:
    """Raise where that is no spec on these axes of a mesh, for an array of ndim dimensions. space: the dimension that
    is split first, most often."""
    if not isinstance(spec, P):
        example = ", ".join(["None"] * space + ['"x"'])
        raise SpecError.at(
            where,
            argument="spec",
            got=describe(spec),
            need="a spec, which says what axes split what dimensions",
            mend=f"P({example}) where axis x splits dimension {space}",
        )
    spec.check(axes, where, "spec", ndim)


def balanced(where: str, spec: P, shape: Any, axes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """For each dimension the lengths of the balanced blocks of an array of this shape. axes: those of the mesh."""
    whole = [-1 if n is None else n for n in map(_int, shape)] if isinstance(shape, Iterable) else [-1]
    if len(whole) < len(spec.trimmed) or min(whole, default=0) < 0:
        raise LayoutError.at(
            where,
            argument="shape",
            got=f"{shape!r} for {spec}",
            need="the shape of the whole array, whose blocks are balanced",
            mend="leave it out: the lengths of the blocks are learnt",
        )
    parts = [[axes[n] for n in (spec.dims[d] if d < len(spec) else ())] for d in range(len(whole))]
    return [block_sizes(n, p) for n, p in zip(whole, parts, strict=True)]


def lengths_met(
    op: str, worker: Worker, names: Sequence[tuple[str, ...]], shape: Shape, dtype: np.dtype
) -> tuple[tuple[int, ...], ...]:
    """The lengths of all workers' blocks in each dimension of one of this shape. names: the axes that split each. A
    meeting for each dimension that several workers share; no bytes."""
    lengths = []
    for d, axes in enumerate(names):
        group = worker.group(axes)
        call = Call(op, axes, np.dtype(dtype), tuple(shape))
        shapes = [shape] if group.size == 1 else worker.comm.shapes(group, call).wait()
        lengths.append(tuple(s[d] for s in shapes))
    return tuple(lengths)
