"""Normalisation of rows (layer norm, RMS norm) and of channels (batch, group and instance norm), and their statistics.

Rows, channels and batches may be split over workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import stop_gradient
from spmd.errors import SpecError, describe
from spmd.functions.arguments import (
    SharedResults,
    as_floating,
    as_number,
    cast,
    normalized_axes,
    normalized_axis,
    require_varying,
)
from spmd.kernels.cpu.chunks import accurate
from spmd.mesh import here
from spmd.operators.gather import all_gather
from spmd.operators.reduce import AxisName, reduced_axes
from spmd.tracebacks import api_boundary

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "merge_moments", "moments", "rms_norm"]


# Rows


class _Norm(SharedResults):
    """The cotangents of x, weight and bias, and the mean and rstd of each row from the forward pass."""

    __slots__ = ("statistics",)


def _differentiable_parts(g, x, weight, centred: bool, eps: float):
    """rstd, z, the map u -> u - mean(u) - z mean(u z), g * weight, and the mean, in differentiable functions."""

    def mean(a):
        return np.mean(a, axis=-1, keepdims=True)

    centred_x = x - mean(x) if centred else x
    rstd = 1 / np.sqrt(mean(centred_x * centred_x) + eps)
    z = centred_x * rstd

    def project(u):
        v = u - z * mean(u * z)
        return v - mean(u) if centred else v

    return rstd, z, project, g if weight is None else g * weight, mean


def _second_g(h, _ans, g, x, weight, *, eps, centred, norm) -> Any:
    rstd, z, project, _, _ = _differentiable_parts(g, x, weight, centred, eps)
    d = rstd * project(h[0])
    return (d if weight is None else d * weight) + h[1] * z + h[2]


def _second_x(h, _ans, g, x, weight, *, eps, centred, norm) -> Any:
    rstd, z, project, u, mean = _differentiable_parts(g, x, weight, centred, eps)
    through_z = h[1] * g - rstd * (h[0] * mean(u * z) + u * mean(h[0] * z))
    return rstd * project(through_z) - rstd * rstd * z * mean(h[0] * project(u))


def _second_weight(h, _ans, g, x, weight, *, eps, centred, norm) -> Any:
    rstd, _, project, _, _ = _differentiable_parts(g, x, weight, centred, eps)
    return np.sum(g * (rstd * project(h[0])), axis=tuple(range(g.ndim - 1)))


@primitive("normalize_vjp", _second_g, _second_x, _second_weight)
def _normalize_vjp(g, x, weight, *, eps: float, centred: bool, norm: _Norm):
    mean, rstd = norm.statistics
    return kernels.of(x).normalize_vjp(g, x, weight, mean, rstd, centred)


def _vjp(index: int):
    def rule(g, _ans, x, weight, _bias, *, eps, centred, norm) -> Any:
        return norm.take(g, index, lambda: _normalize_vjp(g, x, weight, eps=eps, centred=centred, norm=norm))

    return rule


@primitive("normalize", _vjp(0), _vjp(1), _vjp(2))
def _normalize(x, weight, bias, *, eps: float, centred: bool, norm: _Norm):
    y, *norm.statistics = kernels.of(x).normalize(x, weight, bias, eps, centred)
    return y


def _rows(where: str, x, weight, bias, eps, ndim: int, axis_name: AxisName | None, centred: bool):
    x = as_floating(where, "x", x)
    if not isinstance(ndim, int) or not 0 < ndim <= x.ndim:
        need = f"an integer from 1 to {x.ndim}" if x.ndim else "an array with dimensions"
        raise SpecError.at(where, argument="ndim", got=f"{ndim} for {describe(x)}", need=need, mend="ndim=1")
    shape, n = x.shape, prod(x.shape[x.ndim - ndim :])
    weight, bias = _parameters(where, x, weight, bias, shape[x.ndim - ndim :])
    eps = as_number(where, "eps", eps, 0, inf)
    x = np.reshape(x, (*shape[: x.ndim - ndim], n))
    if axis_name is None:
        y = _normalize(x, weight, bias, eps=eps, centred=centred, norm=_Norm())
        return np.reshape(y, shape)
    require_varying(where, x, axis_name)
    rows = np.reshape(x, (1, prod(x.shape[:-1]), n))
    count, mean, square = _statistics(rows, axis_name, where)
    square = square / count if centred else square / count + mean * mean
    rstd = 1 / np.sqrt(square + eps)
    mean = mean if centred else np.zeros_like(rstd)
    y = np.reshape(_affine(rows, mean, rstd, np.zeros_like(rstd)), x.shape)
    y = y if weight is None else y * weight
    return cast(np.reshape(y if bias is None else y + bias, shape), x.dtype)


def _parameter(where: str, name: str, p, shape: tuple[int, ...], dtype=None) -> Any:
    """A weight or bias with one dimension; dtype: to convert it to."""
    if p is None:
        return None
    p = as_floating(where, name, p)
    if tuple(p.shape) != tuple(shape):
        need = f"shape {list(shape)}"
        raise SpecError.at(where, argument=name, got=describe(p), need=need, mend=f"reshape it, or {name}=None")
    p = p if p.ndim == 1 else np.reshape(p, (prod(shape),))  # no node on the tape if not needed
    return p if dtype is None else cast(p, dtype)


def _parameters(where: str, x, weight, bias, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The weight and bias with one dimension, in the dtype of the computation."""
    dtype = accurate(x.dtype)
    return _parameter(where, "weight", weight, shape, dtype), _parameter(where, "bias", bias, shape, dtype)


@api_boundary
def layer_norm(x, weight=None, bias=None, eps: float = 1e-5, *, ndim: int = 1, axis_name: AxisName | None = None):
    """(x - mean) / sqrt(var + eps) * weight + bias, by the mean and variance of each row.

    A row is the last axis of x, or the last `ndim` axes; weight and bias have its shape, or are None.
    axis_name: the axes of the mesh that split the last axis, in blocks of any sizes; weight and bias are blocks too.
    Cost then: one all-gather of two numbers per row forward, two sums backward. Raises StateError for an x that does
    not vary over axis_name.
    Cotangent of x: (u - mean(u) - z * mean(u z)) / sqrt(var + eps), where u = g * weight, z = (x - mean) / sqrt(...).
    Ba, Kiros, Hinton, "Layer normalization", 2016.
    """
    return _rows("spmd.functions.layer_norm", x, weight, bias, eps, ndim, axis_name, True)


@api_boundary
def rms_norm(x, weight=None, eps: float = 1e-6, *, ndim: int = 1, axis_name: AxisName | None = None):
    """x / sqrt(mean(x^2) + eps) * weight, for each row: as `layer_norm`, without the mean. Zhang, Sennrich, 2019."""
    return _rows("spmd.functions.rms_norm", x, weight, None, eps, ndim, axis_name, False)


# Channels: x is (outer, channels, inner), with one mean, scale and shift for each channel.


@primitive(
    "channel_sums",
    lambda h, _ans, _g, x, mean: _affine(x, mean, h[1], h[0]),
    lambda h, _ans, g, _x, mean: _scaled(g, h[1]),
    lambda h, ans, _g, _x, _mean: -h[1] * ans[0],
)
def _sums(g, x, mean):
    return kernels.of(x).channel_sums(g, x, mean)


def _pairs(g, x, mean):
    s = _sums(g, x, mean)
    return s[0], s[1], s[0]


@primitive(
    "channel_affine",
    lambda g, _ans, _x, _mean, scale, _shift, *, shared: _scaled(g, scale),
    lambda g, _ans, x, mean, scale, _shift, *, shared: -scale * shared.take(g, 0, lambda: _pairs(g, x, mean)),
    lambda g, _ans, x, mean, _scale, _shift, *, shared: shared.take(g, 1, lambda: _pairs(g, x, mean)),
    lambda g, _ans, x, mean, _scale, _shift, *, shared: shared.take(g, 2, lambda: _pairs(g, x, mean)),
)
def _channel_affine(x, mean, scale, shift, *, shared: SharedResults):
    return kernels.of(x).channel_affine(x, mean, scale, shift)


def _affine(x, mean, scale, shift) -> Any:
    """(x - mean) * scale + shift, channel by channel."""
    return _channel_affine(x, mean, scale, shift, shared=SharedResults())


def _scaled(x, scale) -> Any:
    zeros = np.zeros_like(scale)
    return _affine(x, zeros, scale, zeros)


@primitive("moments", lambda g, ans, x: _affine(x, ans[0], 2 * g[1], g[0] / max(1, x.shape[0] * x.shape[2])))
def _moments(x):
    return kernels.of(x).moments(x)


@api_boundary
def merge_moments(counts, means, squares):
    """The count, mean and sum of squared distances of several samples together, from those of each.

    The first axis counts the samples. Of no entries mean and squares are 0. Chan, Golub, LeVeque, "Updating formulae
    and a pairwise algorithm", 1979.
    """
    where = "spmd.functions.merge_moments"
    means, squares = as_floating(where, "means", means), as_floating(where, "squares", squares)
    counts = np.reshape(counts, (len(counts),) + (1,) * (means.ndim - 1))
    count = np.sum(counts)
    mean = np.sum(counts * means, axis=0) / np.where(count == 0, 1, count)
    return count, mean, np.sum(squares + counts * (means - mean) ** 2, axis=0)


def _statistics(x, axis_name: AxisName | None, where: str):
    """Count, means and sums of squared distances of the channels of x, and of all workers along axis_name."""
    own = _moments(x)
    count = x.shape[0] * x.shape[2]
    axes = () if axis_name is None else reduced_axes(x, here(where).mesh.names(axis_name, where), where)
    if not axes:
        return count, own[0], own[1]
    packed = np.concatenate([np.reshape(own, (-1,)), np.full_like(value_of(own), count, shape=(1,))])
    gathered = all_gather(packed, axes, to="invariant")
    channels = x.shape[1]
    return merge_moments(gathered[:, -1], gathered[:, :channels], gathered[:, channels:-1])


@api_boundary
def moments(
    x, axis: int | Sequence[int] | None = None, *, axis_name: AxisName | None = None, keepdims: bool = False
) -> tuple[Any, Any]:
    """The mean and the variance of x over some axes (None: all), and over the workers along axis_name.

    Every entry counts once, however uneven the blocks; some may be empty. The variance is the mean squared distance
    from the mean. Along axis_name the results are Invariant; an array that is Invariant there counts once.
    Cost: one all-gather of both and the count; backward its adjoint. Of no entries both are NaN.
    """
    where = "spmd.functions.moments"
    x = as_floating(where, "x", x)
    axes = normalized_axes(where, x, axis)
    rest = [n for n in range(x.ndim) if n not in axes]
    shape = tuple(x.shape[a] for a in rest)
    n = prod(x.shape[a] for a in axes)
    if axes == tuple(range(len(axes))):  # the leading axes: no copy
        stacked = np.reshape(x, (n, prod(shape), 1))
    else:
        stacked = np.reshape(np.transpose(x, (*rest, *axes)), (1, prod(shape), n))
    count, mean, square = _statistics(stacked, axis_name, where)
    count = (count or np.nan) if isinstance(count, int) else np.where(count == 0, np.nan, count)
    mean, variance = mean + 0 * count, square / count
    result_shape = tuple(1 if a in axes else m for a, m in enumerate(x.shape)) if keepdims else shape
    return cast(np.reshape(mean, result_shape), x.dtype), cast(np.reshape(variance, result_shape), x.dtype)


def _channels(where: str, x, axis: int):
    """x as (outer, channels, inner)."""
    axis = normalized_axis(where, x, axis)
    return np.reshape(x, (prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])))


@api_boundary
def batch_norm(
    x,
    weight=None,
    bias=None,
    running: tuple[Any, Any] | None = None,
    *,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    axis: int = 1,
    axis_name: AxisName | None = None,
):
    """(x - mean) / sqrt(var + eps) * weight + bias, by the mean and variance of each channel over all else.

    axis: that of the channels; weight and bias have its length, or are None. axis_name: axes of the mesh over which
    the batch is split; then the statistics are those of all workers together, weighted by the sizes of their blocks. A
    batch that is Invariant along one of them counts once there, as in `spmd.mean`.
    running: (mean, variance) of earlier batches, or None. If given, the result is (y, new running): the old one times
    1 - momentum, plus the batch's mean and unbiased variance times momentum, as in torch; it has no gradient.
    With training=False they replace the batch's statistics and are returned unchanged.
    Cost: one all-gather of the statistics forward, two sums of a number per channel backward.
    Ioffe, Szegedy, "Batch normalization", 2015.
    """
    where = "spmd.functions.batch_norm"
    x = as_floating(where, "x", x)
    stacked = _channels(where, x, axis)
    channels = stacked.shape[1]
    weight, bias = _parameters(where, x, weight, bias, (channels,))
    eps, momentum = as_number(where, "eps", eps, 0, inf), as_number(where, "momentum", momentum, 0, 1)
    if running is not None and (not isinstance(running, tuple | list) or len(running) != 2):
        need = "a pair (mean, variance), or None"
        raise SpecError.at(where, argument="running", got=describe(running), need=need, mend="running=None")
    old_mean, old_variance = (_parameter(where, "running", r, (channels,)) for r in running or (None, None))
    if not training and running is None:
        need = "running=(mean, variance)"
        raise SpecError.at(where, argument="running", got="None with training=False", need=need, mend=need)
    if training:
        count, mean, square = _statistics(stacked, axis_name, where)
        variance = square / np.maximum(count, 1)
        if running is not None:

            def updated(old, new):  # an empty batch changes nothing
                mixed = (1 - momentum) * old + momentum * cast(stop_gradient(new), old.dtype)
                return (mixed if count else old) if isinstance(count, int) else np.where(count > 0, mixed, old)

            running = updated(old_mean, mean), updated(old_variance, square / np.maximum(count - 1, 1))
    else:
        mean, variance = old_mean, old_variance
    mean, variance = (cast(a, accurate(x.dtype)) for a in (mean, variance))
    scale = 1 / np.sqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = np.zeros_like(scale) if bias is None else bias
    y = np.reshape(_affine(stacked, mean, scale, shift), x.shape)
    return y if running is None else (y, running)


@api_boundary
def group_norm(x, groups: int, weight=None, bias=None, eps: float = 1e-5):
    """Layer norm over groups of channels and all places, for each item of a batch.

    x: (batch, channels, ...); groups: a divisor of the channels; weight and bias: (channels,), or None.
    Wu, He, "Group normalization", 2018.
    """
    where = "spmd.functions.group_norm"
    x = as_floating(where, "x", x)
    if x.ndim < 2:
        need = "(batch, channels, ...)"
        raise SpecError.at(where, argument="x", got=describe(x), need=need, mend="add the dimensions")
    channels = x.shape[1]
    if not isinstance(groups, int | np.integer) or groups < 1 or channels % groups:
        need, mend = f"a divisor of the {channels} channels", "groups=1"
        raise SpecError.at(where, argument="groups", got=describe(groups), need=need, mend=mend)
    weight, bias = _parameters(where, x, weight, bias, (channels,))
    n = prod(x.shape[2:])
    rows = np.reshape(x, (x.shape[0] * groups, channels // groups * n))
    y = _normalize(rows, None, None, eps=as_number(where, "eps", eps, 0, inf), centred=True, norm=_Norm())
    if weight is not None or bias is not None:
        y = np.reshape(y, (x.shape[0], channels, n))
        weight = np.ones_like(value_of(y), shape=(channels,), dtype=accurate(x.dtype)) if weight is None else weight
        zeros = np.zeros_like(weight)
        y = _affine(y, zeros, weight, zeros if bias is None else bias)
    return np.reshape(y, x.shape)


@api_boundary
def instance_norm(x, weight=None, bias=None, eps: float = 1e-5):
    """`group_norm` with as many groups as channels."""
    x = as_floating("spmd.functions.instance_norm", "x", x)
    return group_norm(x, max(1, x.shape[1]) if x.ndim > 1 else 1, weight, bias, eps)
