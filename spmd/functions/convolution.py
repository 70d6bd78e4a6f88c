"""Convolution over one to three spatial dimensions, and its transpose: arrays (N, C, *spatial)."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.primitive import primitive
from spmd.errors import SpecError, describe, message
from spmd.functions.arguments import array
from spmd.functions.window_arguments import each, paddings

__all__ = ["conv", "conv_transpose"]

# The three maps are each other's adjoints in turn. options: (stride, padding, dilation, groups).


def _to_x(g, _ans, _x, w, *, options) -> Any:
    return _conv_input_adjoint(g, w, shape=_x.shape[2:], options=options)


def _to_w(g, _ans, x, _w, *, options) -> Any:
    return _conv_weight_adjoint(g, x, kernel=_w.shape[2:], options=options)


@primitive("conv", _to_x, _to_w, early=True)
def _conv(x, w, *, options) -> Any:
    return kernels.of(x).conv(x, w, *options)


def _to_g(h, _ans, _g, w, *, shape, options) -> Any:
    return _conv(h, w, options=options)


def _to_filters(h, _ans, g, _w, *, shape, options) -> Any:
    return _conv_weight_adjoint(g, h, kernel=_w.shape[2:], options=options)


@primitive("conv_input_adjoint", _to_g, _to_filters, early=True)
def _conv_input_adjoint(g, w, *, shape, options) -> Any:
    return kernels.of(g).conv_input_adjoint(g, w, shape, *options)


@primitive(
    "conv_weight_adjoint",
    lambda h, _ans, _g, x, *, kernel, options: _conv(x, h, options=options),
    lambda h, _ans, g, _x, *, kernel, options: _conv_input_adjoint(g, h, shape=_x.shape[2:], options=options),
)
def _conv_weight_adjoint(g, x, *, kernel, options) -> Any:
    return kernels.of(g).conv_weight_adjoint(g, x, kernel, *options)


def conv(x, w, bias=None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1):
    """y[n, o, i] = bias[o] + sum over c, k of w[o, c, k] x[n, c, i * stride + k * dilation - low], zero outside of x.

    x: (N, C, *spatial), one to three spatial dimensions. w: (O, C / groups, *kernel). bias: (O,). Floating or complex.
    Gives (N, O, *m), m = (n + low + high - dilation (kernel - 1) - 1) // stride + 1. It is what networks call a
    convolution: the kernel is not flipped.
    stride, dilation: an int, or one per spatial dimension. padding: an int, an int or a pair (low, high) for each
    dimension, negative ones crop, "SAME" or "VALID". groups: C and O are cut into so many parts that do not see each
    other; groups = C is a depthwise convolution.

    Linear in x and in w. Adjoint in x: `conv_transpose` of g with w; in w: g correlated with x.
    For blocks with neighbours exchange halos before: `spmd.plan_windows` says which (docs/window.md).
    Raises SpecError where shapes or options do not fit. Arguments as in torch.nn.functional.conv2d.
    """
    where = "spmd.functions.conv"
    x, w, groups = _arrays(where, x, w, groups)
    if x.shape[1] != w.shape[1] * groups:
        raise SpecError(
            message(
                where,
                argument="w",
                got=f"{describe(w)}, of {w.shape[1]} channels for each of {groups} groups, for x of {x.shape[1]}",
                need="shape (O, C / groups, *kernel) for x of shape (N, C, *spatial)",
                mend=f"groups={x.shape[1] // max(1, w.shape[1])}"
                if w.shape[1] and x.shape[1] % w.shape[1] == 0
                else f"w of shape {[w.shape[0], x.shape[1] // groups, *w.shape[2:]]}",
            )
        )
    y = _conv(x, w, options=_options(where, x.shape[2:], w, stride, padding, dilation, groups))
    return _with_bias(where, y, bias)


def conv_transpose(
    x, w, bias=None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
):
    """The transpose of `conv`, as a layer: what maps (N, O, *m) to (N, C, *n), with the same w.

    x: (N, O, *m). w: (O, C / groups, *kernel). bias: (C,). Gives (N, C, *n), n = (m - 1) stride - low - high +
    dilation (kernel - 1) + output_padding + 1. output_padding: less is cropped at the high end, or zeros come there; it
    chooses one of the n that have the same m under `conv`, and is less than the stride or the dilation.

    Linear in x and in w. Adjoint in x: `conv`. Raises SpecError where shapes or options do not fit.
    Arguments as in torch.nn.functional.conv_transpose2d.
    """
    where = "spmd.functions.conv_transpose"
    x, w, groups = _arrays(where, x, w, groups)
    if x.shape[1] != w.shape[0]:
        raise SpecError(
            message(
                where,
                argument="w",
                got=f"{describe(w)} for x of {x.shape[1]} channels",
                need="shape (O, C / groups, *kernel) for x of shape (N, O, *spatial)",
                mend=f"w of shape {[x.shape[1], *w.shape[1:]]}",
            )
        )
    dims = x.ndim - 2
    if isinstance(padding, str):
        raise SpecError(
            message(
                where,
                argument="padding",
                got=repr(padding),
                need="numbers: the length of the result is not known beforehand",
                mend="padding=0",
            )
        )
    strides, ends, dilations, _ = _options(where, x.shape[2:], w, stride, padding, dilation, groups)
    more = each(where, "output_padding", output_padding, dims, least=0)
    if any(o and o >= max(s, d) for o, s, d in zip(more, strides, dilations, strict=True)):
        raise SpecError(
            message(
                where,
                argument="output_padding",
                got=repr(output_padding),
                need=f"less than the stride {strides} or the dilation {dilations}",
                mend="output_padding=0",
            )
        )
    ends = tuple((low, high - o) for (low, high), o in zip(ends, more, strict=True))
    sizes = zip(x.shape[2:], w.shape[2:], strides, ends, dilations, strict=True)
    shape = tuple((m - 1) * s - low - high + d * (k - 1) + 1 for m, k, s, (low, high), d in sizes)
    if min(shape) < 0 or 0 in x.shape[2:]:
        raise SpecError(
            message(
                where,
                argument="x",
                got=f"{describe(x)}, which gives the lengths {list(shape)}",
                need="at least one entry in each spatial dimension, and less padding than there is to crop",
                mend="a smaller padding",
            )
        )
    options = (strides, ends, dilations, groups)
    return _with_bias(where, _conv_input_adjoint(x, w, shape=shape, options=options), bias)


def _arrays(where: str, x: Any, w: Any, groups: Any) -> tuple[Any, Any, int]:
    """Both arrays, and the groups, checked for what needs no other argument."""
    need = "floating or complex numbers"
    x, w = (array(where, name, a, "fc", need, f"{name}.astype(float)") for name, a in (("x", x), ("w", w)))
    if not 3 <= x.ndim <= 5:
        raise SpecError(
            message(
                where,
                argument="x",
                got=describe(x),
                need="shape (N, C, *spatial), with one to three spatial dimensions",
                mend="x[np.newaxis] for a single example",
            )
        )
    if w.ndim != x.ndim or 0 in w.shape[2:]:
        raise SpecError(
            message(
                where,
                argument="w",
                got=f"{describe(w)} for {describe(x)}",
                need=f"shape (O, C / groups, *kernel), a kernel of {x.ndim - 2} dimensions with entries",
                mend="the spatial dimensions of x and w correspond, one by one",
            )
        )
    (groups,) = each(where, "groups", groups, 1)
    if w.shape[0] % groups:
        raise SpecError(
            message(
                where,
                argument="groups",
                got=f"{groups} for w of {w.shape[0]} filters",
                need="a divisor of the number of filters",
                mend="groups=1",
            )
        )
    return x, w, groups


def _options(
    where: str, shape: tuple[int, ...], w: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple:
    """(stride, padding, dilation, groups), an entry for each dimension."""
    dims, kernel = len(shape), tuple(w.shape[2:])
    strides, dilations = each(where, "stride", stride, dims), each(where, "dilation", dilation, dims)
    return strides, paddings(where, padding, shape, kernel, strides, dilations, least=None), dilations, groups


def _with_bias(where: str, y: Any, bias: Any) -> Any:
    if bias is None:
        return y
    if np.shape(bias) != y.shape[1:2]:
        raise SpecError(
            message(
                where,
                argument="bias",
                got=describe(bias),
                need=f"shape {[y.shape[1]]}, a number for each channel of the result",
                mend="leave it out, or add an array of another shape to the result",
            )
        )
    return y + bias.reshape(-1, *(1,) * (y.ndim - 2))
