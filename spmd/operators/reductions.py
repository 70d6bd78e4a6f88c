"""Reductions over the dimensions of an array and over workers together, with true counts on uneven blocks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from types import FrameType
from typing import Any

import numpy as np

from spmd.autodiff.admission import admit, admit_dtype
from spmd.autodiff.dtypes import mean_dtype
from spmd.autodiff.tracer import Array
from spmd.errors import describe
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.mesh import WORKER
from spmd.operators.apply import operate
from spmd.operators.base import named
from spmd.operators.reduce import (
    AxisName,
    Extremum,
    _names,
    added_up_in,
    dtype_of,
    pmax,
    pmean,
    pmin,
    psum,
    reduced_axes,
    rounded,
    varying_of,
)
from spmd.operators.splitting import normal_axis
from spmd.operators.sums import Sum

__all__ = ["max", "mean", "min", "sum"]

Axis = int | Sequence[int] | None
_OUTSIDE: Any = None
"""In place of axis_name: of a global array, which has a layout, and no axes to be named."""


def _start(x, axis_name: AxisName, axis: Axis, function: str):
    """The array, the axes of the mesh it varies over among those named, and the dimensions as a tuple."""
    where = f"spmd.{function}"
    names = _names(axis_name, function)
    if type(x) is Array:
        admit_dtype(x.dtype, where, lambda: describe(x))
    elif not on_device(x) and frontend(x) is None:
        x = np.asarray(admit(x, where))
    chosen = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int | np.integer) else axis
    over = varying_of(x, names) if function == "sum" else reduced_axes(x, names, where)
    return x, names, over, tuple(normal_axis(function, "axis", d, x.ndim) for d in chosen)


def _total(x, dims: tuple[int, ...], dtype: np.dtype | None):
    """The sum over dimensions of this worker's block, in a dtype (None: that of its sums)."""
    other = frontend(x)
    if other is not None:
        return other.total(x, dims, dtype)
    return np.sum(x, axis=dims) if dtype is None else np.sum(x, axis=dims, dtype=dtype)


def _name(function: str, dims: tuple[int, ...], ndim: int) -> str:
    """The function as workers compare it: which dimensions have been reduced before is part of the call. Where all have
    been, or none, the shape tells it."""
    return function if len(dims) in (0, ndim) else f"{function}[axis={', '.join(map(str, sorted(dims)))}]"


def sum(x: Any, axis_name: AxisName = _OUTSIDE, axis: Axis = None) -> Any:
    """The sum of x over its dimensions `axis` (None: all) and over the workers along axis_name; Invariant there.

    x: varies over every named axis; blocks may be uneven or empty in the summed dimensions. Short floating-point
    numbers (float16, bfloat16, float8) are added up in float32, and the sum is rounded once. Adjoint: the cotangent,
    broadcast to every entry of every worker. Cost: one all-reduce of the locally summed array; backward nothing. Raises
    StateError for an Invariant array. Outside of bodies, without axis_name: as np.sum of a global array; so are the
    others.

        >>> with spmd.Mesh(x=2):
        ...     spmd.map(lambda x: spmd.sum(x, "x", axis=0), P("x"), P())(np.arange(6.0).reshape(3, 2))
        PartitionedArray([6., 9.], dtype=float64, spec=P(None))
    """
    if axis_name is _OUTSIDE and WORKER.get() is None:
        return np.sum(x, axis=axis)
    if isinstance(x, int | float | complex):
        return psum(x, axis_name)
    x, names, _, dims = _start(x, axis_name, axis, "sum")
    dtype = dtype_of(x)
    wide = None if dtype is None or dtype.kind in "biuc" else mean_dtype(dtype)
    op = named(_name("sum", dims, x.ndim), Sum, names)
    return rounded(operate(op, _total(x, dims, wide), sys._getframe(1)), dtype)


def mean(x: Any, axis_name: AxisName = _OUTSIDE, axis: Axis = None) -> Any:
    """The mean of x over its dimensions `axis` (None: all) and over the workers along axis_name.

    Every entry counts once, however uneven the blocks. Along axes where x is Invariant the copies count as one.
    As by np.mean, integers give float64, and short floating-point numbers (float16, bfloat16, float8) are added up in
    float32, and the mean is rounded once.
    Adjoint: the cotangent / count, to every entry of every worker. Cost: one all-reduce of the locally summed array and
    one of the count; backward nothing.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda x: (spmd.mean(x, "x"), spmd.pmean(np.mean(x), "x")), P("x"), P())
        ...     [value.item() for value in f(np.array([0.0, 0.0, 6.0]))]
        [2.0, 3.0]
    """
    if axis_name is _OUTSIDE and WORKER.get() is None:
        return np.mean(x, axis=axis)
    if isinstance(x, int | float | complex):
        return pmean(x, axis_name)
    x, _, over, dims = _start(x, axis_name, axis, "mean")
    dtype = dtype_of(x)
    total, count = _total(x, dims, added_up_in(x)), prod(x.shape[d] for d in dims)
    if over:
        # A number without entries behind it divides 0 by 0, as np.mean does.
        op, frame = named(_name("mean", dims, x.ndim), Sum, over), sys._getframe(1)
        total, count = operate(op, total, frame), operate(op, count, frame)
    return rounded(total / count, dtype)


def max(x: Any, axis_name: AxisName = _OUTSIDE, axis: Axis = None) -> Any:
    """The largest entry of x over its dimensions `axis` (None: all) and over the workers along axis_name.

    Blocks may be uneven or empty, not all empty (LayoutError). Adjoint of the derivative: the cotangent, to all entries
    that attain it, on whichever worker, in equal shares. Cost: one all-reduce forward, and one backward that counts the
    ties.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda x: spmd.max(x, "x"), P("x"), P())
        ...     spmd.value_and_grad(f)(np.array([1.0, 5.0, 5.0]))
        (PartitionedArray(5., dtype=float64, spec=P()), array([0. , 0.5, 0.5]))
    """
    if axis_name is _OUTSIDE and WORKER.get() is None:
        return np.max(x, axis=axis)
    return _extremum(x, axis_name, axis, "max", sys._getframe(1))


def min(x: Any, axis_name: AxisName = _OUTSIDE, axis: Axis = None) -> Any:
    """The smallest entry; see `max`.

    >>> with spmd.Mesh(x=2):
    ...     spmd.map(lambda x: spmd.min(x, "x", axis=0), P("x"), P())(np.array([[3, 1], [2, 4], [5, 0]]))
    PartitionedArray([2, 0], dtype=int64, spec=P(None))
    """
    if axis_name is _OUTSIDE and WORKER.get() is None:
        return np.min(x, axis=axis)
    return _extremum(x, axis_name, axis, "min", sys._getframe(1))


def _extremum(x, axis_name: AxisName, axis: Axis, how: str, frame: FrameType):
    if isinstance(x, int | float | complex):
        return pmax(x, axis_name) if how == "max" else pmin(x, axis_name)
    x, _, over, dims = _start(x, axis_name, axis, how)
    if not over:
        other = frontend(x)
        if other is not None:
            return other.extremum(x, dims, how)
        return np.max(x, axis=dims) if how == "max" else np.min(x, axis=dims)
    return operate(named(how, Extremum, over, how, dims), x, frame)
