"""Convolutions over one to three spatial dimensions, and their transposes, on one block of NumPy or CuPy."""

from __future__ import annotations

from typing import Any

from spmd import kernels
from spmd.autodiff.registry import primitive

__all__ = ["add_part", "conv", "conv_transpose"]

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]

# Three maps, each the adjoint of another. options: (stride, padding, dilation, groups).


def _conv_vjp_x(g, _ans, _x, w, *, options) -> Any:
    return _conv_input_adjoint(g, w, shape=_x.shape[2:], options=options)


def _conv_vjp_w(g, _ans, x, _w, *, options) -> Any:
    return _conv_weight_adjoint(g, x, kernel=_w.shape[2:], options=options)


@primitive("conv", _conv_vjp_x, _conv_vjp_w, early=True)
def _conv(x, w, *, options) -> Any:
    return kernels.of(x).conv(x, w, *options)


def _input_adjoint_vjp_g(h, _ans, _g, w, *, shape, options) -> Any:
    return _conv(h, w, options=options)


def _input_adjoint_vjp_w(h, _ans, g, _w, *, shape, options) -> Any:
    return _conv_weight_adjoint(g, h, kernel=_w.shape[2:], options=options)


@primitive("conv_input_adjoint", _input_adjoint_vjp_g, _input_adjoint_vjp_w, early=True)
def _conv_input_adjoint(g, w, *, shape, options) -> Any:
    return kernels.of(g).conv_input_adjoint(g, w, shape, *options)


@primitive(
    "conv_weight_adjoint",
    lambda h, _ans, _g, x, *, kernel, options: _conv(x, h, options=options),
    lambda h, _ans, g, _x, *, kernel, options: _conv_input_adjoint(g, h, shape=_x.shape[2:], options=options),
)
def _conv_weight_adjoint(g, x, *, kernel, options) -> Any:
    return kernels.of(g).conv_weight_adjoint(g, x, kernel, *options)


def conv(x: Any, w: Any, stride: Ints, padding: Pairs, dilation: Ints, groups: int) -> Any:
    """The convolution of x (N, C, *n) and w (O, C / groups, *k); negative paddings crop."""
    return _conv(x, w, options=(stride, padding, dilation, groups))


def conv_transpose(x: Any, w: Any, shape: Ints, stride: Ints, padding: Pairs, dilation: Ints, groups: int) -> Any:
    """The transpose of the convolution of arrays (N, C, *shape) with these options, of x (N, O, *m)."""
    return _conv_input_adjoint(x, w, shape=shape, options=(stride, padding, dilation, groups))


# The outputs of a block are summed from the block and from slabs of its neighbours.


def _add_part_vjp_slab(g, _ans, _y, _slab, w, *, outputs, options) -> Any:
    return _conv_input_adjoint(g[outputs], w, shape=_slab.shape[2:], options=options)


def _add_part_vjp_w(g, _ans, _y, slab, _w, *, outputs, options) -> Any:
    return _conv_weight_adjoint(g[outputs], slab, kernel=_w.shape[2:], options=options)


@primitive("conv", lambda g, _ans, _y, _slab, _w, *, outputs, options: g, _add_part_vjp_slab, _add_part_vjp_w)
def add_part(y, slab, w, *, outputs, options) -> Any:
    """Add what a slab contributes to these outputs of y, in place: `conv` has just computed y."""
    if slab.size and y[outputs].size:
        y[outputs] += kernels.of(slab).conv(slab, w, *options)
    return y
