"""Normalisation of rows and of channels, on one block of NumPy or CuPy, and their statistics."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.devices import beside
from spmd.autodiff.registry import primitive
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import stop_gradient
from spmd.functions.arguments import SharedResults, cast
from spmd.kernels.cpu.chunks import accurate

__all__ = ["affine", "batch_norm", "constant", "detached", "group_norm", "layer_norm", "moments"]

detached = stop_gradient


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


# The functions


def _accurate(x: Any, *parameters: Any) -> list[Any]:
    """Parameters with one dimension, in the dtype of the computation."""
    flat = [p if p is None or p.ndim == 1 else np.reshape(p, (prod(p.shape),)) for p in parameters]
    return [p if p is None else cast(p, accurate(x.dtype)) for p in flat]


def constant(x: Any, data: np.ndarray) -> Any:
    """Numbers in the dtype of x, where x is."""
    return beside(np.asarray(data, x.dtype), value_of(x))


def layer_norm(x: Any, weight: Any, bias: Any, eps: float, ndim: int, centred: bool) -> Any:
    """The layer norm of rows, the last ndim dimensions; the RMS norm unless they are centred."""
    weight, bias = _accurate(x, weight, bias)
    shape = x.shape
    x = np.reshape(x, (*shape[: x.ndim - ndim], prod(shape[x.ndim - ndim :])))
    return np.reshape(_normalize(x, weight, bias, eps=eps, centred=centred, norm=_Norm()), shape)


def group_norm(x: Any, groups: int, weight: Any, bias: Any, eps: float) -> Any:
    """The group norm of (batch, channels, ...)."""
    weight, bias = _accurate(x, weight, bias)
    channels, n = x.shape[1], prod(x.shape[2:])
    rows = np.reshape(x, (x.shape[0] * groups, channels // groups * n))
    y = _normalize(rows, None, None, eps=eps, centred=True, norm=_Norm())
    if weight is not None or bias is not None:
        y = np.reshape(y, (x.shape[0], channels, n))
        weight = np.ones_like(value_of(y), shape=(channels,), dtype=accurate(x.dtype)) if weight is None else weight
        zeros = np.zeros_like(weight)
        y = _affine(y, zeros, weight, zeros if bias is None else bias)
    return np.reshape(y, x.shape)


def _stacked(x: Any, kept: tuple[int, int]) -> tuple[Any, tuple[int, ...]]:
    """x as (outer, channels, inner) of the dimensions before, within and after `kept`, and its shape where all but
    these have length 1."""
    first, stop = kept
    shape = tuple(n if first <= d < stop else 1 for d, n in enumerate(x.shape))
    return np.reshape(x, (prod(x.shape[:first]), prod(shape), prod(x.shape[stop:]))), shape


def moments(x: Any, kept: tuple[int, int]) -> tuple[Any, Any]:
    """The mean and the sum of squared distances from it, over all dimensions but those from kept[0] to kept[1]."""
    x, shape = _stacked(x, kept)
    both = _moments(x)
    return np.reshape(both[0], shape), np.reshape(both[1], shape)


def affine(x: Any, kept: tuple[int, int], mean: Any, scale: Any, shift: Any) -> Any:
    """(x - mean) * scale + shift, for parameters that have the kept dimensions of x, or broadcast to them."""
    stacked, shape = _stacked(x, kept)
    flat = [
        np.reshape(p if p.shape == shape else np.broadcast_to(p, shape), (stacked.shape[1],))
        for p in (mean, scale, shift)
    ]
    return np.reshape(_affine(stacked, *flat), x.shape)


def batch_norm(x: Any, weight: Any, bias: Any, eps: float, axis: int, _statistics: bool) -> tuple[Any, Any, Any]:
    """The batch norm, and the mean and the sum of squared distances of each channel."""
    weight, bias = _accurate(x, weight, bias)
    stacked, _ = _stacked(x, (axis, axis + 1))
    both = _moments(stacked)
    scale = 1 / np.sqrt(both[1] / max(1, stacked.shape[0] * stacked.shape[2]) + eps)
    scale = scale if weight is None else scale * weight
    y = _affine(stacked, both[0], scale, np.zeros_like(scale) if bias is None else bias)
    return np.reshape(y, x.shape), both[0], both[1]
