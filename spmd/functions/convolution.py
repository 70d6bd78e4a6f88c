"""Convolution over one to three spatial dimensions, and its transpose: arrays (N, C, *spatial)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.autodiff.tracer import Array
from spmd.errors import LayoutError, SpecError, describe
from spmd.functions.arguments import as_array
from spmd.functions.window_arguments import check_spatial, paddings, per_dimension
from spmd.functions.window_parts import plan_parts
from spmd.layout import P
from spmd.mesh import Worker, here
from spmd.operators.halo import halo_exchange
from spmd.operators.halo_arguments import balanced, checked_spec, lengths_met
from spmd.operators.halo_geometry import BOUNDARIES, along
from spmd.operators.varying import varying
from spmd.spellings import closest
from spmd.tracebacks import api_boundary

__all__ = ["conv", "conv_transpose"]

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


# The outputs of a block are summed from the block and from slabs of its neighbours.


def _add_part_vjp_slab(g, _ans, _y, _slab, w, *, outputs, options) -> Any:
    return _conv_input_adjoint(g[outputs], w, shape=_slab.shape[2:], options=options)


def _add_part_vjp_w(g, _ans, _y, slab, _w, *, outputs, options) -> Any:
    return _conv_weight_adjoint(g[outputs], slab, kernel=_w.shape[2:], options=options)


@primitive("conv", lambda g, _ans, _y, _slab, _w, *, outputs, options: g, _add_part_vjp_slab, _add_part_vjp_w)
def _add_part(y, slab, w, *, outputs, options) -> Any:
    """Add the part of the outputs `of` that a slab contributes to y, in place: `_conv` has just computed y."""
    if slab.size and y[outputs].size:
        y[outputs] += kernels.of(slab).conv(slab, w, *options)
    return y


def _over_blocks(where: str, image: Any, w, spec: P, shape: Any, boundary: Any, options: tuple) -> Any:
    worker, dims = here(where), image.ndim - 2
    names = _spatial_axes(where, image, spec, worker)
    boundaries = _boundaries(where, boundary, dims)
    along_space = tuple(n for axes in names for n in axes)
    # The faces of a block differ between workers even if the block does not.
    x: Any = varying(image, along_space) if type(image) is Array and along_space else image
    lengths = _lengths(where, worker, x, spec, names, shape)
    stride, padding, dilation, groups = _options(where, tuple(map(sum, lengths)), w, *options)
    places = tuple(worker.group(n).index for n in names)
    plan = plan_parts(lengths, names, worker.mesh.sides, places, tuple(w.shape[2:]), stride, padding, dilation)
    space, no_halos = P(None, None, *(n or None for n in names)), ((0, 0),) * 2
    # Outputs in short dtypes are computed at once, because adding the parts of slabs would round twice.
    if plan.slabs is None or set(boundaries) != {"zero"} or x.dtype.itemsize < 4:
        widths = [v.widths for v in plan.windows]
        sizes = (None, None, *lengths)
        with_halos = halo_exchange(x, space, (*no_halos, *widths), ("none", "none", *boundaries), sizes=sizes)
        return _conv(with_halos, w, options=(stride, ((0, 0),) * dims, dilation, groups))
    slabs = []
    for s in plan.slabs:
        d = 2 + s.d
        faces = np.concatenate((x[along(d, 0, s.low)], x[along(d, x.shape[d] - s.high, None)]), axis=d)
        halos = halo_exchange(faces, space, (*no_halos, *s.widths), sizes=(None, None, *s.sizes))
        slabs += [halos[along(d, 0, s.halos[0])], halos[along(d, halos.shape[d] - s.halos[1], None)]]
    y = _conv(x, w, options=(stride, plan.own.padding, dilation, groups))
    for slab, part in zip(slabs, (p for s in plan.slabs for p in s.parts), strict=True):
        outputs = (slice(None), slice(None), *part.outputs)
        y = _add_part(y, slab, w, outputs=outputs, options=(stride, part.padding, dilation, groups))
    return y


def _spatial_axes(where: str, x: Any, spec: Any, worker: Worker) -> tuple[tuple[str, ...], ...]:
    """The axes that split each spatial dimension."""
    checked_spec(where, spec, worker.mesh.axes, x.ndim, space=2)
    _, channels, *space = (*spec.dims, *[()] * (x.ndim - len(spec)))
    if worker.group(channels).size > 1:
        raise SpecError.at(
            where,
            argument="spec",
            got=f"{spec}, whose channels are split over {' and '.join(map(repr, channels))}",
            need="whole channels on each worker",
            mend="leave the channels out of spec, convolve this worker's channels with their part of w, and psum",
        )
    return tuple(space)


def _boundaries(where: str, boundary: Any, dims: int) -> tuple[str, ...]:
    """One boundary for each spatial dimension."""
    shared = isinstance(boundary, str) or not isinstance(boundary, Sequence)
    boundaries: tuple[Any, ...] = (boundary,) * dims if shared else tuple(boundary)
    allowed = [b for b in BOUNDARIES if b != "none"]
    wrong = next((b for b in boundaries if b not in allowed), None)
    if len(boundaries) != dims or wrong is not None:
        raise SpecError.at(
            where,
            argument="boundary",
            got=repr(boundary),
            need=f"one of {', '.join(allowed)}, or one for each of the {dims} spatial dimensions",
            mend=f'boundary="{closest(wrong, allowed)}"; padding=0 for none',
        )
    return boundaries


def _lengths(where: str, worker: Worker, x: Any, spec: P, names: Any, shape: Any) -> tuple[tuple[int, ...], ...]:
    """The lengths of all blocks in each spatial dimension."""
    if shape is None:
        return lengths_met("functions.conv", worker, ((), (), *names), tuple(x.shape), x.dtype)[2:]
    lengths = balanced(where, spec, shape, worker.mesh.axes)
    own = [n[worker.group(a).index] for n, a in zip(lengths[2:], names, strict=False)]
    if len(lengths) != x.ndim or own != [*x.shape[2:]]:
        raise LayoutError.at(
            where,
            argument="x",
            got=describe(x),
            need=f"the spatial lengths {own} of this worker's block of an array of shape {list(shape)}",
            mend="leave shape out: the workers then exchange the lengths of their blocks",
        )
    return tuple(lengths[2:])


@api_boundary
def conv(
    x,
    w,
    bias=None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    spec: P | None = None,
    shape: Sequence[int] | None = None,
    boundary: str | Sequence[str] = "zero",
):
    """y[n, o, i] = bias[o] + sum over c, k of w[o, c, k] x[n, c, i * stride + k * dilation - low], zero outside of x.

    x: (N, C, *spatial), one to three spatial dimensions. w: (O, C / groups, *kernel). bias: (O,). Floating or complex.
    Gives (N, O, *m), m = (n + low + high - dilation (kernel - 1) - 1) // stride + 1. As in neural networks, the kernel
    is not flipped.
    stride, dilation: an int, or one per spatial dimension. padding: an int, an int or a pair (low, high) for each
    dimension, "SAME" or "VALID"; negative numbers crop. groups: channels and filters are split into this many
    independent groups; groups = C is a depthwise convolution.

    Linear in x and in w. Adjoint in x: `conv_transpose` of g with w; in w: g correlated with x.

    spec: in a body, the axes that split the batch and the spatial dimensions of an array of which x is this worker's
    block. y is then its block of the convolution of the whole array, balanced along the spatial dimensions. boundary:
    the values of the padding, "zero", "periodic", "reflect" or "edge", for all spatial dimensions or for each (needs a
    spec; P() for a whole array). shape: of the whole array, if its blocks are balanced. Without it the workers exchange
    the lengths of their blocks first.
    Cost: one halo exchange in each split dimension, of as many entries of each face as the kernel reaches; backward its
    adjoint. Blocks are not copied for the halo, except if a kernel reaches beyond the next block, with boundaries other
    than zeros, and in short floating-point dtypes.

    Raises SpecError and LayoutError if shapes or options do not fit. Arguments as in torch.nn.functional.conv2d.
    """
    where = "spmd.functions.conv"
    x, w, groups = _arrays(where, x, w, groups)
    if x.shape[1] != w.shape[1] * groups:
        raise _wrong_channels(where, x, w, groups)
    if spec is None:
        if shape is not None or boundary != "zero":
            raise _missing_spec(where, shape, boundary)
        y = _conv(x, w, options=_options(where, x.shape[2:], w, stride, padding, dilation, groups))
    else:
        y = _over_blocks(where, x, w, spec, shape, boundary, (stride, padding, dilation, groups))
    return _with_bias(where, y, bias)


def _wrong_channels(where: str, x: Any, w: Any, groups: int) -> SpecError:
    if w.shape[1] and x.shape[1] % w.shape[1] == 0:
        mend = f"groups={x.shape[1] // w.shape[1]}"
    else:
        mend = f"w of shape {[w.shape[0], x.shape[1] // groups, *w.shape[2:]]}"
    got = f"{describe(w)}, of {w.shape[1]} channels for each of {groups} groups, for x of {x.shape[1]}"
    need = "shape (O, C / groups, *kernel) for x of shape (N, C, *spatial)"
    return SpecError.at(where, argument="w", got=got, need=need, mend=mend)


def _missing_spec(where: str, shape: Any, boundary: Any) -> SpecError:
    argument, got = ("boundary", repr(boundary)) if shape is None else ("shape", repr(shape))
    mend = 'spec=P(None, None, "x") where axis x splits the first spatial dimension, P() where none does'
    return SpecError.at(where, argument=argument, got=got, need="a spec beside it", mend=mend)


@api_boundary
def conv_transpose(
    x, w, bias=None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
):
    """The transpose of `conv` with the same w, as a layer: from (N, O, *m) to (N, C, *n).

    x: (N, O, *m). w: (O, C / groups, *kernel). bias: (C,). Gives (N, C, *n), n = (m - 1) stride - low - high +
    dilation (kernel - 1) + output_padding + 1. output_padding: `conv` maps several n to the same m; this chooses one of
    them. It is less than the stride or the dilation, and reduces the cropping at the high end, or adds zeros there.

    Linear in x and in w. Adjoint in x: `conv`. Raises SpecError where shapes or options do not fit.
    Arguments as in torch.nn.functional.conv_transpose2d.
    """
    where = "spmd.functions.conv_transpose"
    x, w, groups = _arrays(where, x, w, groups)
    if x.shape[1] != w.shape[0]:
        raise SpecError.at(
            where,
            argument="w",
            got=f"{describe(w)} for x of {x.shape[1]} channels",
            need="shape (O, C / groups, *kernel) for x of shape (N, O, *spatial)",
            mend=f"w of shape {[x.shape[1], *w.shape[1:]]}",
        )
    if isinstance(padding, str):
        need = "numbers: the length of the result is not known beforehand"
        raise SpecError.at(where, argument="padding", got=repr(padding), need=need, mend="padding=0")
    options = _options(where, x.shape[2:], w, stride, padding, dilation, groups)
    shape, options = _transposed_shape(where, x, w, output_padding, options)
    return _with_bias(where, _conv_input_adjoint(x, w, shape=shape, options=options), bias)


def _transposed_shape(where: str, x: Any, w: Any, output_padding: Any, options: tuple) -> tuple[tuple[int, ...], tuple]:
    """The spatial shape of a transposed convolution, and the options with output_padding in the padding."""
    strides, paddings_, dilations, groups = options
    extra = per_dimension(where, "output_padding", output_padding, x.ndim - 2, minimum=0)
    if any(o and o >= max(s, d) for o, s, d in zip(extra, strides, dilations, strict=True)):
        need = f"less than the stride {strides} or the dilation {dilations}"
        raise SpecError.at(
            where, argument="output_padding", got=repr(output_padding), need=need, mend="output_padding=0"
        )
    paddings_ = tuple((low, high - o) for (low, high), o in zip(paddings_, extra, strict=True))
    sizes = zip(x.shape[2:], w.shape[2:], strides, paddings_, dilations, strict=True)
    shape = tuple((m - 1) * s - low - high + d * (k - 1) + 1 for m, k, s, (low, high), d in sizes)
    if min(shape) < 0 or 0 in x.shape[2:]:
        got = f"{describe(x)}, which gives the lengths {list(shape)}"
        need = "at least one entry in each spatial dimension, and less padding than there is to crop"
        raise SpecError.at(where, argument="x", got=got, need=need, mend="a smaller padding")
    return shape, (strides, paddings_, dilations, groups)


def _arrays(where: str, x: Any, w: Any, groups: Any) -> tuple[Any, Any, int]:
    """The arrays and the number of groups, checked as far as they need no other argument."""
    need = "floating or complex numbers"
    x, w = (as_array(where, name, a, "fc", need, f"{name}.astype(float)") for name, a in (("x", x), ("w", w)))
    check_spatial(where, x)
    if w.ndim != x.ndim or 0 in w.shape[2:]:
        raise SpecError.at(
            where,
            argument="w",
            got=f"{describe(w)} for {describe(x)}",
            need=f"shape (O, C / groups, *kernel), a kernel of {x.ndim - 2} dimensions with entries",
            mend="the spatial dimensions of x and w correspond, one by one",
        )
    (groups,) = per_dimension(where, "groups", groups, 1)
    if w.shape[0] % groups:
        raise SpecError.at(
            where,
            argument="groups",
            got=f"{groups} for w of {w.shape[0]} filters",
            need="a divisor of the number of filters",
            mend="groups=1",
        )
    return x, w, groups


def _options(
    where: str, shape: tuple[int, ...], w: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple:
    """(stride, padding, dilation, groups), an entry for each dimension."""
    dims, kernel = len(shape), tuple(w.shape[2:])
    strides, dilations = per_dimension(where, "stride", stride, dims), per_dimension(where, "dilation", dilation, dims)
    return strides, paddings(where, padding, shape, kernel, strides, dilations, minimum=None), dilations, groups


def _with_bias(where: str, y: Any, bias: Any) -> Any:
    if bias is None:
        return y
    if np.shape(bias) != y.shape[1:2]:
        raise SpecError.at(
            where,
            argument="bias",
            got=describe(bias),
            need=f"shape {[y.shape[1]]}, a number for each channel of the result",
            mend="leave it out, or add an array of another shape to the result",
        )
    return y + bias.reshape(-1, *(1,) * (y.ndim - 2))
