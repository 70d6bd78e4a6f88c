"""How the blocks of a layer move: to the layout that it computes in, with halos, and as sums. For arrays of any
library, in bodies."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from spmd.box_layout import BoxLayout
from spmd.frontends import frontend
from spmd.layout import Box, Layout
from spmd.mesh import here
from spmd.operators.apply import operate
from spmd.operators.gather import all_gather
from spmd.operators.memo import interned
from spmd.operators.reduce import psum, pvary
from spmd.operators.repartition import Repartition, repartition
from spmd.resharding import scattered

__all__ = ["fetched", "gathered", "relaid", "summed", "varied"]


def relaid(x: Any, source: Layout, target: Layout) -> Any:
    """A block in another layout of the same array. Nothing moves where they are equal.

    Adjoint: `spmd.accumulate`. Of two specs only workers along the axes that they name take part.
    """
    if source == target:
        return x
    source, target = _restricted(source, target)
    return repartition(x, source, target)


@lru_cache(maxsize=1024)
def _restricted(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """The two layouts over those axes only that one of them names."""
    if source.spec is None or target.spec is None:
        return source, target
    axes = {n: size for n, size in source.axes.items() if n in source.spec.varying | target.spec.varying}
    return Layout(source.shape, source.spec, axes, source.cuts), Layout(target.shape, target.spec, axes, target.cuts)


def gathered(x: Any, source: Layout, target: Layout, varying: Iterable[str]) -> Any:
    """x in the target layout, as one value per worker along these axes, over which other operands vary: `varied`.

    If they alone split a dimension of the source, blocks are joined by an all-gather, whose adjoint is a
    reduce-scatter.
    """
    varying = tuple(varying)
    joined = _joined(source, target, frozenset(varying))
    if joined is None:
        return varied(relaid(x, source, target), varying)
    x = all_gather(x, joined[0], axis=joined[1], tiled=True)
    other = frontend(x)
    if other is not None:
        x = other.sized(x, target.block_shape(here("spmd.functions").index))
    # The adjoint of the all-gather sums over its axes already.
    return varied(x, [n for n in varying if n not in joined[0]])


@lru_cache(maxsize=1024)
def _joined(source: Layout, target: Layout, varying: frozenset[str]) -> tuple[tuple[str, ...], int] | None:
    """The axes, and the dimension that they alone split in the source and nothing splits in the target; None if the
    layouts differ in more, or the array does not vary over all of these axes."""
    if source.spec is None or target.spec is None:
        return None
    differ = [d for d, (a, b) in enumerate(zip(source.spec.dims, target.spec.dims, strict=True)) if a != b]
    if len(differ) != 1 or target.spec.dims[differ[0]] or not varying.issuperset(source.spec.dims[differ[0]]):
        return None
    same = all(a == b for d, (a, b) in enumerate(zip(source.cuts, target.cuts, strict=True)) if d not in differ)
    return (tuple(source.spec.dims[differ[0]]), differ[0]) if same else None


def varied(x: Any, axes: Sequence[str]) -> Any:
    """x as one value per worker along axes over which other operands vary: its cotangents are summed over them."""
    return pvary(x, tuple(axes)) if axes and x is not None else x


def summed(y: Any, axes: Sequence[str], source: Layout, target: Layout) -> Any:
    """The sum of y over axes, in a layout of the result.

    y: a block of `source`, of which each worker along the axes has a summand. One all-reduce; a reduce-scatter where
    the target is the source split further by some of the axes. Without axes `relaid`.
    """
    if not axes:
        return relaid(y, source, target)
    steps = scattered(source, target, axes)
    if not steps:
        return relaid(psum(y, tuple(axes)), source, target)
    worker, frame = here("spmd.functions"), sys._getframe(1)
    for step in steps:
        op = step.operator(worker.group(step.axes))
        y = y if op is None else operate(op, y, frame)
    return y


def fetched(x: Any, source: Layout, needs: Sequence[Box]) -> Any:
    """The box of the whole array that this worker needs; boxes of workers may overlap.

    needs: for each worker (start, stop) in every dimension, within the array. One exchange between those who need
    something of one another. Adjoint: the cotangents of an entry are added at the worker that holds it.
    """
    axes, target = tuple(source.axes), BoxLayout(source.shape, needs, source.axes)
    return operate(interned(Repartition, axes, source, target), x, sys._getframe(1))
