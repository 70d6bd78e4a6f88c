"""Interpolation at points: values of a field between its entries, and the adjoint."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.errors import SpecError, describe
from spmd.functions.arguments import as_array
from spmd.functions.resizing import check_cubic
from spmd.kernels import taps
from spmd.spellings import closest
from spmd.tracebacks import api_boundary

__all__ = ["inject", "sample"]

_NUMBERS = "floating-point or complex numbers"


def _sample_vjp_x(g, _ans, _x, points, *, options) -> Any:
    return _inject(g, points, shape=_x.shape[1:], options=options)


def _sample_vjp_points(g, _ans, x, points, *, options) -> Any:
    return _slopes(g, x, points, options)


@primitive("sample", _sample_vjp_x, _sample_vjp_points)
def _sample(x, points, *, options) -> Any:
    return kernels.of(x).sample(x, points, *options)


@primitive(
    "inject",
    lambda h, _ans, _g, points, *, shape, options: _sample(h, points, options=options),
    lambda h, _ans, g, points, *, shape, options: _slopes(g, h, points, options),
)
def _inject(g, points, *, shape, options) -> Any:
    return kernels.of(g).inject(g, points, shape, *options)


def _slopes(g, x, points, options) -> Any:
    """The sum over the channels of g times the derivative of sample(x, points), by each coordinate of the points."""
    method, boundary, orders, cubic = options
    if method == "nearest":
        return np.zeros_like(points)
    slopes = []
    for axis in range(len(orders)):
        orders_plus = tuple(order + (a == axis) for a, order in enumerate(orders))
        slopes.append(np.sum(g * _sample(x, points, options=(method, boundary, orders_plus, cubic)), axis=0))
    return np.stack(slopes, axis=1)


@api_boundary
def sample(x: Any, points: Any, method: str = "linear", boundary: str = "zero", *, cubic: float = -0.5) -> Any:
    """The values of a field between its entries. x: (..., *spatial), floating or complex.

    points: (*m, d), real, places in units of the entries of the last d = 1, 2 or 3 dimensions of x: (1.5, 0) lies
    between x[..., 1, 0] and x[..., 2, 0]. Gives (..., *m), of the dtype of x. A point that is no number has no value.
    method: "nearest", "linear", or "cubic" (R. Keys, 1981; cubic: his parameter). boundary: what stands beyond the
    ends, as in `spmd.halo_exchange`: "zero", "edge", "periodic" or "reflect".

    Linear in x. Adjoint: `inject`. By the points: the slopes of the interpolant, at kinks those on the right; those of
    "nearest" are 0. Raises SpecError where x and points do not fit.

        >>> field = np.array([[0.0, 1.0], [2.0, 3.0]])
        >>> spmd.functions.sample(field, np.array([[0.5, 0.5], [1.0, 0.25]]))
        array([1.5 , 2.25])
    """
    where = "spmd.functions.sample"
    x = as_array(where, "x", x, "fc", _NUMBERS, "x.astype(float)")
    points, d = _points(where, points, x.ndim)
    _check_method(where, method, cubic, boundary)
    lead, spatial = x.shape[: x.ndim - d], x.shape[x.ndim - d :]
    _check_field(where, "x", spatial, boundary, points)
    flat = np.reshape(x, (prod(lead), *spatial))
    options = (method, boundary, (0,) * d, float(cubic))
    values = _sample(flat, np.reshape(points, (prod(points.shape[:-1]), d)), options=options)
    return np.reshape(values, (*lead, *points.shape[:-1]))


@api_boundary
def inject(
    values: Any,
    points: Any,
    shape: Sequence[int],
    method: str = "linear",
    boundary: str = "zero",
    *,
    cubic: float = -0.5,
) -> Any:
    """A field with values at points: each is spread over the entries from which `sample` would read, with its weights.

    values: (..., *m), points: (*m, d), as for `sample`. shape: of the d spatial dimensions. Gives (..., *shape): the
    sum, in the order of the points. Sources of a wave are so put into a field.

    Linear in the values. Adjoint: `sample`. Raises SpecError where values and points do not fit.

        >>> spmd.functions.inject(np.array([4.0]), np.array([[1.25]]), (4,))
        array([0., 3., 1., 0.])
    """
    where = "spmd.functions.inject"
    values = as_array(where, "values", values, "fc", _NUMBERS, "values.astype(float)")
    points, d = _points(where, points, 3)
    _check_method(where, method, cubic, boundary)
    count = points.ndim - 1
    try:
        shape = tuple(map(operator.index, shape))
    except TypeError:
        shape = ()
    if len(shape) != d or min(shape) < 0:
        raise SpecError.at(
            where,
            argument="shape",
            got=repr(shape),
            need=f"the lengths of the {d} dimensions that the points have coordinates of",
            mend=f"shape={(64,) * d}",
        )
    _check_field(where, "shape", shape, boundary, points)
    if values.shape[values.ndim - count :] != points.shape[:-1]:
        raise SpecError.at(
            where,
            argument="values",
            got=f"{describe(values)} for points {list(points.shape)}",
            need=f"a value for every point, (..., {', '.join(map(str, points.shape[:-1]))})",
            mend="np.broadcast_to(values, points.shape[:-1])",
        )
    lead = values.shape[: values.ndim - count]
    m = prod(points.shape[:-1])
    flat = np.reshape(values, (prod(lead), m))
    options = (method, boundary, (0,) * d, float(cubic))
    field = _inject(flat, np.reshape(points, (m, d)), shape=shape, options=options)
    return np.reshape(field, (*lead, *shape))


def _points(where: str, points: Any, max_dims: int) -> tuple[Any, int]:
    points = as_array(where, "points", points, "f", "real floating-point numbers", "points.astype(float)")
    if points.dtype not in (np.float32, np.float64) or points.ndim < 1 or not 1 <= points.shape[-1] <= min(3, max_dims):
        raise SpecError.at(
            where,
            argument="points",
            got=describe(points),
            need="float32 or float64 (..., d), the coordinates of 1 to 3 spatial dimensions of the field",
            mend="np.stack([row, column], axis=-1) of arrays of coordinates",
        )
    return points, points.shape[-1]


def _check_method(where: str, method: Any, cubic: Any, boundary: str = "zero") -> None:
    for argument, value, allowed in (("method", method, taps.METHODS), ("boundary", boundary, taps.BOUNDARIES)):
        if value not in allowed:
            words = ", ".join(map(repr, allowed))
            mend = f"{argument}={closest(value, allowed, allowed[1])!r}"
            raise SpecError.at(where, argument=argument, got=repr(value), need=f"one of {words}", mend=mend)
    check_cubic(where, cubic)


def _check_field(where: str, argument: str, spatial: tuple[int, ...], boundary: str, points: Any) -> None:
    if 0 in spatial and boundary != "zero" and points.size:
        raise SpecError.at(
            where,
            argument=argument,
            got=f"spatial dimensions {list(spatial)}, boundary {boundary!r}",
            need="an entry to continue the field with",
            mend='boundary="zero"',
        )
