"""Pooling over windows of one to three spatial dimensions: arrays (N, C, *spatial)."""

from __future__ import annotations

from typing import Any

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.functions.arguments import as_array, as_floating
from spmd.functions.window_arguments import check_spatial, paddings, per_dimension
from spmd.tracebacks import api_boundary

__all__ = ["avg_pool", "max_pool"]

# A window is (window, stride, padding, dilation) here, each with an entry per dimension.


def _gather_vjp(g, _ans, _x, index, *, window) -> Any:
    return _max_pool_vjp(g, index, shape=_x.shape[2:], window=window)


@primitive("max_pool_gather", _gather_vjp)
def _max_pool_gather(x, index, *, window) -> Any:
    return kernels.of(x).max_pool_gather(x, index)


@primitive("max_pool_vjp", lambda h, _ans, _g, index, *, shape, window: _max_pool_gather(h, index, window=window))
def _max_pool_vjp(g, index, *, shape, window) -> Any:
    return kernels.of(g).max_pool_vjp(g, index, shape, *window)


@primitive(
    "max_pool",
    lambda g, ans, _x, *, window, ceil_mode: _max_pool_vjp(g[0], ans[1], shape=_x.shape[2:], window=window),
)
def _max_pool(x, *, window, ceil_mode):
    return kernels.of(x).max_pool(x, *window, ceil_mode)


@api_boundary
def max_pool(
    x,
    window: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
):
    """The largest entry of every window. x: (N, C, *spatial), floating, of one to three spatial dimensions.

    window, stride, dilation: an int, or one for each spatial dimension; the default stride is the window. padding: an
    int, an int or a pair (low, high) for each dimension, "SAME" (ceil(length / stride) outputs) or "VALID" (none).
    ceil_mode: a last, incomplete window has an output too, unless it would start in the high padding. return_indices:
    also return the flat row-major index of each largest entry among the spatial entries of x.

    Of equal entries the first in row-major order is chosen, before them the first NaN, never padding. A window of
    padding alone has -inf, and the index -1. Derivative's adjoint: g is added to the chosen entry.
    Raises SpecError where an option does not fit x. Source: as torch.nn.functional.max_pool2d.
    """
    where = "spmd.functions.max_pool"
    x = as_floating(where, "x", x)
    top, index = _max_pool(x, window=_window(where, x, window, stride, padding, dilation), ceil_mode=bool(ceil_mode))
    return (top, index) if return_indices else top


def _avg_pool_transpose(h, _ans, _g, *, shape, options) -> Any:
    return _avg_pool(h, options=options)


@primitive("avg_pool_vjp", _avg_pool_transpose)
def _avg_pool_vjp(g, *, shape, options) -> Any:
    return kernels.of(g).avg_pool_vjp(g, shape, *options)


@primitive("avg_pool", lambda g, _ans, _x, *, options: _avg_pool_vjp(g, shape=_x.shape[2:], options=options))
def _avg_pool(x, *, options) -> Any:
    return kernels.of(x).avg_pool(x, *options)


@api_boundary
def avg_pool(
    x,
    window: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
):
    """The mean of every window. x: (N, C, *spatial), floating or complex, of one to three spatial dimensions.

    window, stride, padding, dilation, ceil_mode: as for `max_pool`. count_include_pad: padding counts as zeros; else it
    does not count. Entries beyond the padding, which ceil_mode may read, never count. A window in which no entry counts
    has the mean 0.

    Linear; adjoint: each entry of g is shared equally among the entries of its window that count.
    Raises SpecError where an option does not fit x. Source: as torch.nn.functional.avg_pool2d.
    """
    where = "spmd.functions.avg_pool"
    x = as_array(where, "x", x, "fc", "floating-point or complex numbers", "x.astype(float)")
    options = _window(where, x, window, stride, padding, dilation)
    return _avg_pool(x, options=(*options, bool(ceil_mode), bool(count_include_pad)))


def _window(where: str, x: Any, window: Any, stride: Any, padding: Any, dilation: Any) -> tuple:
    check_spatial(where, x)
    shape = x.shape[2:]
    window = per_dimension(where, "window", window, len(shape))
    stride = window if stride is None else per_dimension(where, "stride", stride, len(shape))
    dilation = per_dimension(where, "dilation", dilation, len(shape))
    return window, stride, paddings(where, padding, shape, window, stride, dilation), dilation
