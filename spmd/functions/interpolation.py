"""Interpolation: resizing arrays, values of a field between its entries, and the adjoints."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.errors import SpecError, describe
from spmd.functions.arguments import as_array
from spmd.kernels import taps
from spmd.kernels.cpu.chunks import accurate
from spmd.spellings import closest
from spmd.tracebacks import api_boundary

__all__ = ["Taps", "inject", "plan_resize", "resample", "resize", "sample"]

_NUMBERS = "floating-point or complex numbers"


class Taps:
    """A linear map along an axis: output o is the sum over k of weight[o, k] * x[index[o, k]].

    n: the length of the input. index, weight: (outputs, taps). `len` gives the outputs.
    """

    def __init__(self, n: int, index: np.ndarray, weight: np.ndarray):
        self.n, self.index, self.weight = n, index, weight
        self._by_dtype: dict[Any, tuple] = {}

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"Taps({self.n} -> {len(self)}, {self.index.shape[1]} each)"

    def needs(self, o: int) -> tuple[int, int]:
        """The interval of the input that output o reads, for `spmd.plan_needs`."""
        return int(self.index[o].min()), int(self.index[o].max()) + 1

    def part(self, outputs: tuple[int, int], inputs: tuple[int, int]) -> Taps:
        """The taps of outputs (first, end) alone, with indices into inputs (start, stop)."""
        (first, end), (start, stop) = outputs, inputs
        index = self.index[first:end] - np.int32(start)
        if index.size and not (index.min() >= 0 and index.max() < stop - start):
            raise SpecError.at(
                "Taps.part",
                argument="inputs",
                got=f"{start}:{stop}",
                need=f"what the outputs {first}:{end} read, {index.min() + start}:{index.max() + start + 1}",
                mend="ask for it: spmd.plan_needs(n, m, taps.needs, inputs=...)",
            )
        return Taps(stop - start, index, self.weight[first:end])

    @cached_property
    def T(self) -> Taps:
        return Taps(len(self), *taps.transposed(self.index, self.weight, self.n))

    def for_input(self, x: Any) -> tuple[Any, Any]:
        """index and weight on the device of x, weight in the dtype of the computation."""
        wide = accurate(np.dtype(x.dtype))
        dtype = np.dtype({"F": np.float32, "D": np.float64}.get(wide.char, wide))
        key = (x.device.id if kernels.on_device(x) else None, dtype)
        pair = self._by_dtype.get(key)
        if pair is None:
            pair = (self.index, self.weight.astype(dtype))
            if key[0] is not None:
                from spmd.kernels.gpu.source import uploaded

                pair = tuple(map(uploaded, pair))
            self._by_dtype[key] = pair
        return pair


def _resample_vjp(g, _ans, _x, *, taps, axis) -> Any:
    return _resample(g, taps=taps.T, axis=axis)


@primitive("resample", _resample_vjp)
def _resample(x, *, taps, axis) -> Any:
    return kernels.of(x).resample(x, *taps.for_input(x), axis)


@api_boundary
def resample(x, taps: Taps, axis: int = -1):
    """Along an axis, output o is the sum of weight[o, k] * x[index[o, k]], of the taps that `plan_resize` gives.

    Linear; adjoint: the same with the transposed taps, `taps.T`. Raises SpecError where x has another length.
    """
    where = "spmd.functions.resample"
    x = as_array(where, "x", x, "fc", _NUMBERS, "x.astype(float)")
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != taps.n:
        raise SpecError.at(
            where,
            argument="x",
            got=f"{describe(x)}, axis {axis}",
            need=f"the length {taps.n} along the axis",
            mend="plan for this length; for a part of the outputs, taps.part(outputs, inputs)",
        )
    return _resample(x, taps=taps, axis=axis % x.ndim)


# Cached, because a body calls it at every step.
@lru_cache(maxsize=64)
def _plan(n: int, m: int, method: str, align_corners: bool, antialias: bool, cubic: float) -> Taps:
    return Taps(n, *taps.resize_taps(n, m, method, align_corners, antialias, cubic))


@api_boundary
def plan_resize(
    n: int,
    m: int,
    method: str = "linear",
    *,
    align_corners: bool = False,
    antialias: bool = False,
    cubic: float = -0.5,
) -> Taps:
    """The taps from n entries to m. On blocks: `spmd.plan_needs(n, m, taps.needs, inputs=...)` says what each
    worker needs, and `taps.part(outputs, inputs)` are the taps of its outputs. The options are those of `resize`."""
    where = "spmd.functions.plan_resize"
    for name, value in (("n", n), ("m", m)):
        try:
            valid = not isinstance(value, bool) and operator.index(value) >= (name == "n" and m != 0)
        except TypeError:
            valid = False
        if not valid:
            need = "a length: an int, at least 1" if name == "n" and m != 0 else "a length: an int, at least 0"
            raise SpecError.at(where, argument=name, got=describe(value), need=need, mend=f"{name}=1")
    _check_method(where, method, cubic)
    if align_corners and antialias:
        raise SpecError.at(
            where,
            argument="antialias",
            got="True, with align_corners=True",
            need="one of them",
            mend="align_corners=False",
        )
    return _plan(int(n), int(m), method, bool(align_corners), bool(antialias), float(cubic))


@api_boundary
def resize(
    x,
    shape: Sequence[int],
    method: str = "linear",
    *,
    align_corners: bool = False,
    antialias: bool = False,
    cubic: float = -0.5,
):
    """x with another shape of as many dimensions, interpolated along each axis that changes. x: floating or complex.

    method: "nearest", "linear", or "cubic" (R. Keys, 1981; cubic: his parameter, -1/2 as in JAX, -3/4 in torch).
    Entries are the middles of cells, so output o lies at (o + 1/2) * n / m - 1/2. Beyond its ends x is constant.
    align_corners: the first and last entries of both coincide; output o lies at o * (n - 1) / (m - 1).
    antialias: where an axis shrinks, "linear" and "cubic" average over all entries, and weights that reach beyond the
    ends are left out, as in jax.image.resize, where this is the default.

    Linear; adjoint: the same with transposed taps, axis by axis.
    Raises SpecError for an unknown method, and for a shape that x cannot have.
    """
    where = "spmd.functions.resize"
    x = as_array(where, "x", x, "fc", _NUMBERS, "x.astype(float)")
    try:
        target = tuple(map(operator.index, shape))
    except TypeError:
        target = None
    if (
        target is None
        or len(target) != x.ndim
        or any(m < 0 or (m and not n) for m, n in zip(target, x.shape, strict=True))
    ):
        raise SpecError.at(
            where,
            argument="shape",
            got=repr(shape),
            need=f"{x.ndim} lengths for {describe(x)}; an empty axis can only stay empty",
            mend=f"shape={tuple(2 * n for n in x.shape)}",
        )
    _check_method(where, method, cubic)
    # Shrink first. Of both groups the last axis, which is slowest, comes when the array is smallest.
    order = lambda a: (target[a] > x.shape[a], a if target[a] <= x.shape[a] else -a)
    for axis in sorted((a for a in range(x.ndim) if target[a] != x.shape[a]), key=order):
        options: Any = {"align_corners": align_corners, "antialias": antialias, "cubic": cubic}
        x = _resample(x, taps=plan_resize(x.shape[axis], target[axis], method, **options), axis=axis)
    return x


# At points


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
def sample(x, points, method: str = "linear", boundary: str = "zero", *, cubic: float = -0.5):
    """The values of a field between its entries. x: (..., *spatial), floating or complex.

    points: (*m, d), real, places in units of the entries of the last d = 1, 2 or 3 dimensions of x: (1.5, 0) lies
    between x[..., 1, 0] and x[..., 2, 0]. Gives (..., *m), of the dtype of x. A point that is no number has no value.
    method: "nearest", "linear", or "cubic" (R. Keys, 1981; cubic: his parameter). boundary: what stands beyond the
    ends, as in `spmd.halo_exchange`: "zero", "edge", "periodic" or "reflect".

    Linear in x; adjoint: `inject`. By the points: the slopes of the interpolant, at kinks those on the right; those of
    "nearest" are 0. Raises SpecError where x and points do not fit.
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
    values, points, shape: Sequence[int], method: str = "linear", boundary: str = "zero", *, cubic: float = -0.5
):
    """A field with values at points: each is spread over the entries from which `sample` would read, with its weights.

    values: (..., *m), points: (*m, d), as for `sample`. shape: of the d spatial dimensions. Gives (..., *shape): the
    sum, in the order of the points. Sources of a wave are so put into a field.

    Linear in the values; adjoint: `sample`. Raises SpecError where values and points do not fit.
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
    if isinstance(cubic, bool) or not isinstance(cubic, int | float | np.floating):
        raise SpecError.at(where, argument="cubic", got=describe(cubic), need="a Python number", mend="cubic=-0.5")


def _check_field(where: str, argument: str, spatial: tuple[int, ...], boundary: str, points: Any) -> None:
    if 0 in spatial and boundary != "zero" and points.size:
        raise SpecError.at(
            where,
            argument=argument,
            got=f"spatial dimensions {list(spatial)}, boundary {boundary!r}",
            need="an entry to continue the field with",
            mend='boundary="zero"',
        )
