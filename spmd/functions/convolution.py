"""Convolution over one to three spatial dimensions, and its transpose: arrays (N, C, *spatial)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.errors import LayoutError, SpecError, describe
from spmd.functions.arguments import layer
from spmd.functions.convolution_geometry import Geometry, with_bias
from spmd.functions.convolution_plans import GridPlan, SpecPlan, bias_layout
from spmd.functions.convolution_specs import without_batch, without_channels
from spmd.functions.layouts import as_operand, check_dtypes, check_split, lie_on_grid
from spmd.functions.planned import LayerPlan, Operand, is_split, run_layer
from spmd.functions.window_arguments import check_spatial, paddings, per_dimension
from spmd.kernels.windows import output_length
from spmd.layout import Layout, P, Spec
from spmd.mesh import WORKER
from spmd.operators.halo_geometry import BOUNDARIES
from spmd.spellings import closest
from spmd.tracebacks import api_boundary

__all__ = ["conv", "conv_transpose"]

_OTHER_NAMES = {"zeros": "zero", "constant": "zero", "circular": "periodic", "wrap": "periodic", "replicate": "edge"}
"""Boundaries as torch and NumPy call them."""


@api_boundary
@layer
def conv(
    x: Tree,
    w: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int | None] | None = None,
    boundary: str | Sequence[str] = "zero",
) -> Tree:
    """y[n, o, i] = bias[o] + sum over c, k of w[o, c, k] x[n, c, i * stride + k * dilation - low], zero outside of x.

    x: (N, C, *spatial), one to three spatial dimensions. w: (O, C / groups, *kernel). bias: (O,). Floating or complex;
    arrays of NumPy, CuPy or PyTorch. Gives (N, O, *m), m = (n + low + high - dilation (kernel - 1) - 1) // stride + 1.
    As in neural networks, the kernel is not flipped. stride, dilation: an int, or one per spatial dimension. padding:
    an int, an int or a pair (low, high) for each dimension, "SAME" or "VALID"; negative numbers crop. groups: channels
    and filters are split into this many independent groups; groups = C is a depthwise convolution.

    Linear in x and in w. Adjoint in x: `conv_transpose` of g with w; in w: g correlated with x.

    spec, w_spec: in a body, how the whole x and w are split, of which x and w are this worker's blocks: specs, or a
    `Layout` on some of the workers. bias lies as the first dimension of w. None: the whole. Outside of bodies global
    arrays have their layouts. out_spec: how the result is to lie. None: as x in batch and space, in balanced blocks of
    space, and as the rows of w in its channels. boundary: the values of the padding, "zero", "periodic", "reflect" or
    "edge", for all spatial dimensions or for each (of a block or a global array; spec=P() for a whole array). shape: of
    the whole x, if spec splits it evenly, with None for lengths that it does not split; else workers exchange lengths.

    With specs: x is P(batch, c, *space), w P(r, c), the result P(batch, r, *space), summed over c. w goes to where x
    lies: it is sliced or gathered where it is split otherwise. With groups, channels of x and rows of w are both split
    into whole groups; blocks that cut through a group are laid out anew. Cost: one halo exchange in each split
    dimension of space, of as many entries of each face as the kernel reaches; one all-reduce over c, or a
    reduce-scatter where out_spec splits the result by c. Backward their adjoints, one sum of the cotangent of x over r,
    and of that of w over the other axes. Blocks are not copied for the halo, except if a kernel reaches beyond the next
    block, with boundaries other than zeros, in short floating-point dtypes, or in torch. Where a layout is on some of
    the workers: each worker of the result fetches what its outputs need, rows of w too. But where channels of x are
    split and those of the result are not, workers of x sum over their channels, and those of the result add the sums.

    Raises SpecError and LayoutError if shapes or options do not fit. Arguments as in torch.nn.functional.conv2d.
    Source: Hewett, Grady, "A linear algebraic approach to model parallelism in deep learning", 2020.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.arange(6.0).reshape(1, 1, 6), P(None, None, "x"))
        ...     spmd.functions.conv(x, np.array([[[-1.0, 0.0, 1.0]]]), padding=1)
        PartitionedArray([[[ 1.,  2.,  2.,  2.,  2., -4.]]], dtype=float64, spec=P(None, None, 'x'))
    """
    where = "spmd.functions.conv"
    x, w, groups = _arrays(where, x, w, bias, groups)
    options = _plain(where, x, w, stride, padding, dilation, groups)
    operands = _operands(x, w, bias, spec, w_spec, shape, groups, transposed=False)
    if out_spec is None and not is_split(*operands):
        if shape is not None or boundary != "zero":
            raise _missing_spec(where, shape, boundary)
        return _on_whole(where, _geometry(where, x.shape, w.shape, options), x, w, bias)
    boundaries = _boundaries(where, boundary, x.ndim - 2)
    return _run(where, operands, out_spec, groups, lambda *layouts: _conv_plan(where, *layouts, options, boundaries))


@api_boundary
@layer
def conv_transpose(
    x: Tree,
    w: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    output_size: int | Sequence[int] | None = None,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int | None] | None = None,
) -> Tree:
    """The transpose of `conv` with the same w, as a layer: from (N, O, *m) to (N, C, *n).

    x: (N, O, *m). w: (O, C / groups, *kernel). bias: (C,). Gives (N, C, *n), n = (m - 1) stride - low - high +
    dilation (kernel - 1) + output_padding + 1. output_padding: `conv` maps several n to the same m; this chooses one of
    them. It is less than the stride or the dilation, and reduces the cropping at the high end, or adds zeros there.
    output_size: the lengths n, which choose it, in place of output_padding.

    Linear in x and in w. Adjoint in x: `conv`.

    spec, w_spec, out_spec, shape: as for `conv`; by specs x is P(batch, c, *space), w P(c, r), the result
    P(batch, r, *space), and bias lies as the second dimension of w. With groups w is P(c), and bias as the first.
    Each worker computes its block of the result, from the interval of x that contributes to it: the cost is that of
    `conv`, and a halo of x is about kernel / stride entries wide.

    Raises SpecError and LayoutError where shapes or options do not fit.
    Arguments as in torch.nn.functional.conv_transpose2d.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.array([[[1.0, 2.0, 3.0]]]), P(None, None, "x"))
        ...     spmd.functions.conv_transpose(x, np.ones((1, 1, 2)), stride=2)
        PartitionedArray([[[1., 1., 2., 2., 3., 3.]]], dtype=float64, spec=P(None, None, 'x'))
    """
    where = "spmd.functions.conv_transpose"
    x, w, groups = _arrays(where, x, w, bias, groups)
    if isinstance(padding, str) and padding.upper() != "VALID":
        need = "numbers: the length of the result is not known beforehand"
        raise SpecError.at(where, argument="padding", got=repr(padding), need=need, mend="padding=0")
    options = _plain(where, x, w, stride, padding, dilation, groups)
    extra: Any = per_dimension(where, "output_padding", output_padding, x.ndim - 2, minimum=0)
    if output_size is not None:
        if any(extra):
            need, mend = "one of output_size and output_padding", "output_padding=0"
            raise SpecError.at(where, argument="output_size", got="both", need=need, mend=mend)
        extra = _OutputSize(per_dimension(where, "output_size", output_size, x.ndim - 2, minimum=0))
    operands = _operands(x, w, bias, spec, w_spec, shape, groups, transposed=True)
    if out_spec is None and not is_split(*operands):
        if shape is not None:
            raise _missing_spec(where, shape, None)
        return _on_whole(where, _transposed_geometry(where, x.shape, w.shape, options, extra), x, w, bias)
    plan = lambda *layouts: _transpose_plan(where, *layouts, options, extra)
    return _run(where, operands, out_spec, groups, plan, transposed=True)


_Options = tuple[tuple[int, ...], Any, tuple[int, ...], int]
"""stride, padding, dilation and groups; an entry for each dimension, the padding perhaps still a word."""


class _OutputSize(NamedTuple):
    """The lengths of the result of a transposed convolution, in place of the output padding."""

    lengths: tuple[int, ...]


@lru_cache(maxsize=1024)
def _conv_plan(
    where: str,
    x: Layout,
    w: Layout,
    bias: Layout | None,
    out_spec: Spec | None,
    batch_axes: tuple[str, ...],
    options: _Options,
    boundaries: tuple[str, ...],
) -> LayerPlan:
    geometry = _geometry(where, x.shape, w.shape, options)
    for n, pads, boundary in zip(geometry.shape, geometry.padding, boundaries, strict=True):
        if boundary != "zero" and not n and max(pads) > 0:
            got = f"{boundary!r} for an array of shape {list(x.shape)}"
            need = "entries that continue the array beyond its ends"
            raise LayoutError.at(where, argument="boundary", got=got, need=need, mend='boundary="zero", or padding=0')
    return _plan(where, x, w, bias, out_spec, batch_axes, geometry, boundaries)


@lru_cache(maxsize=1024)
def _transpose_plan(
    where: str,
    x: Layout,
    w: Layout,
    bias: Layout | None,
    out_spec: Spec | None,
    batch_axes: tuple[str, ...],
    options: _Options,
    extra: tuple[int, ...] | _OutputSize,
) -> LayerPlan:
    geometry = _transposed_geometry(where, x.shape, w.shape, options, extra)
    return _plan(where, x, w, bias, out_spec, batch_axes, geometry, ("zero",) * len(geometry.outputs))


def _plan(
    where: str,
    x: Layout,
    w: Layout,
    bias: Layout | None,
    out_spec: Spec | None,
    batch_axes: tuple[str, ...],
    geometry: Geometry,
    boundaries: tuple[str, ...],
) -> LayerPlan:
    plan = (GridPlan if lie_on_grid(x, w, out_spec) else SpecPlan)(
        where, x, w, bias, out_spec, geometry, boundaries, batch_axes
    )
    if bias is not None:
        _check_bias(where, bias.shape, plan.shape)
    return plan


def _run(
    where: str,
    operands: list[Operand],
    out_spec: Spec | None,
    groups: int,
    plan: Callable[..., LayerPlan],
    *,
    transposed: bool = False,
) -> Any:
    """The layer by plan(x, w, bias, out_spec, batch_axes) of layouts. In bodies batch and channels are treated by specs
    alone where that is possible, so that their lengths are not exchanged."""
    (_, x, spec, shape, _), (_, w, w_spec, _, _), (_, bias, *_) = operands
    worker, specs = WORKER.get(), {"spec": spec, "w_spec": w_spec, "out_spec": out_spec}
    readable = all(isinstance(each, P | Layout | None) for each in specs.values())
    if worker is None or operands[0].value is not None or not readable:
        return run_layer(where, lambda x, w, b: plan(x, w, b, out_spec, ()), operands)
    for argument, each in specs.items():
        if isinstance(each, P):
            each.check(worker.mesh.axes, where, argument, x.ndim)
    check_split(where, "spec", x, spec, worker)
    check_split(where, "w_spec", w, w_spec, worker)
    lengths = list(shape) if isinstance(shape, Sequence) and len(shape) == x.ndim else None
    split = w_spec
    if isinstance(spec, P) and isinstance(w_spec, Layout) and w_spec.spec is not None:
        split = w_spec.spec
    found = without_channels(spec, split, out_spec, x.ndim, groups, transposed)
    inner = without_batch(spec, w_spec, out_spec, x.ndim) if found is None else found[1]
    if inner is None:
        return run_layer(where, lambda x, w, b: plan(x, w, b, out_spec, ()), operands)
    x = x if found is None else found[0].before(x)
    if lengths is not None:
        lengths[: 1 if found is None else 2] = x.shape[: 1 if found is None else 2]
        shape = tuple(lengths)
    made = lambda x, w, b: plan(x, w, b, inner.out_spec, inner.batch)
    around = bias if found is None else None
    y = run_layer(where, made, _operands(x, w, around, inner.spec, inner.w_spec, shape, groups, transposed))
    if found is None:
        return y
    if bias is not None:
        _check_bias(where, np.shape(bias), y.shape)
    return found[0].after(y, bias)


def _operands(
    x: Any, w: Any, bias: Any, spec: Spec | None, w_spec: Spec | None, shape: Any, groups: int, transposed: bool
) -> list[Operand]:
    def like_weights(before: Sequence[Layout | None]) -> Layout:
        assert before[1] is not None
        return bias_layout(before[1], groups, transposed)

    return [Operand("spec", x, spec, shape), Operand("w_spec", w, w_spec), Operand("bias", bias, derive=like_weights)]


def _on_whole(where: str, geometry: Geometry, x: Any, w: Any, bias: Any) -> Any:
    y = geometry.on_whole(x, w)
    if bias is None:
        return y
    _check_bias(where, np.shape(bias), y.shape)
    return with_bias(y, bias)


def _geometry(where: str, x: tuple[int, ...], w: tuple[int, ...], options: _Options) -> Geometry:
    """The geometry of a convolution of whole arrays of these shapes."""
    stride, padding, dilation, groups = options
    if x[1] != w[1] * groups:
        raise _wrong_channels(where, x, w, groups)
    _check_filters(where, x, w, groups)
    lengths, kernel = x[2:], w[2:]
    padding = paddings(where, padding, lengths, kernel, stride, dilation, minimum=None)
    outputs = tuple(map(output_length, lengths, kernel, stride, padding, dilation))
    return Geometry(lengths, outputs, kernel, stride, padding, dilation, groups)


def _wrong_channels(where: str, x: tuple[int, ...], w: tuple[int, ...], groups: int) -> SpecError:
    if w[1] and x[1] % w[1] == 0:
        mend = f"groups={x[1] // w[1]}"
    else:
        mend = f"w of shape {[w[0], x[1] // groups, *w[2:]]}"
    got = f"w of shape {list(w)}, of {w[1]} channels for each of {groups} groups, for x of {x[1]}"
    need = "shape (O, C / groups, *kernel) for x of shape (N, C, *spatial)"
    return SpecError.at(where, argument="w", got=got, need=need, mend=mend)


def _missing_spec(where: str, shape: Any, boundary: Any) -> SpecError:
    argument, got = ("boundary", repr(boundary)) if shape is None else ("shape", repr(shape))
    mend = 'spec=P(None, None, "x") where axis x splits the first spatial dimension, P() where none does'
    return SpecError.at(where, argument=argument, got=got, need="a spec beside it", mend=mend)


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
            mend=f'boundary="{_OTHER_NAMES.get(str(wrong)) or closest(wrong, allowed)}"; padding=0 for none',
        )
    return boundaries


def _transposed_geometry(
    where: str, x: tuple[int, ...], w: tuple[int, ...], options: _Options, extra: tuple[int, ...] | _OutputSize
) -> Geometry:
    """The geometry of a transposed convolution of whole arrays of these shapes, with output_padding in the padding."""
    strides, padding, dilations, groups = options
    if x[1] != w[0]:
        raise SpecError.at(
            where,
            argument="w",
            got=f"w of shape {list(w)} for x of {x[1]} channels",
            need="shape (O, C / groups, *kernel) for x of shape (N, O, *spatial)",
            mend=f"w of shape {[x[1], *w[1:]]}",
        )
    _check_filters(where, x, w, groups)
    padding = paddings(where, padding, x[2:], w[2:], strides, dilations, minimum=None)
    if isinstance(extra, _OutputSize):
        extra = _output_padding(where, extra.lengths, x[2:], w[2:], (strides, padding, dilations, groups))
    elif any(o and o >= max(s, d) for o, s, d in zip(extra, strides, dilations, strict=True)):
        need = f"less than the stride {strides} or the dilation {dilations}"
        raise SpecError.at(where, argument="output_padding", got=repr(extra), need=need, mend="output_padding=0")
    padding = tuple((low, high - o) for (low, high), o in zip(padding, extra, strict=True))
    sizes = zip(x[2:], w[2:], strides, padding, dilations, strict=True)
    outputs = tuple((m - 1) * s - low - high + d * (k - 1) + 1 for m, k, s, (low, high), d in sizes)
    if min(outputs) < 0 or 0 in x[2:]:
        got = f"x of shape {list(x)}, which gives the lengths {list(outputs)}"
        need = "at least one entry in each spatial dimension, and less padding than there is to crop"
        raise SpecError.at(where, argument="x", got=got, need=need, mend="a smaller padding")
    return Geometry(x[2:], outputs, w[2:], strides, padding, dilations, groups, transposed=True)


def _output_padding(
    where: str, lengths: tuple[int, ...], x: tuple[int, ...], kernel: tuple[int, ...], options: _Options
) -> tuple[int, ...]:
    """The output padding that gives these lengths."""
    strides, padding, dilations, _ = options
    sizes = zip(x, kernel, strides, padding, dilations, strict=True)
    least = [(m - 1) * s - low - high + d * (k - 1) + 1 for m, k, s, (low, high), d in sizes]
    extra = tuple(n - m for n, m in zip(lengths, least, strict=True))
    if any(not 0 <= o < s for o, s in zip(extra, strides, strict=True)):
        most = [n + s - 1 for n, s in zip(least, strides, strict=True)]
        need = f"lengths from {least} to {most}, for an input of lengths {list(x)}"
        raise SpecError.at(where, argument="output_size", got=repr(lengths), need=need, mend=f"output_size={least}")
    return extra


def _arrays(where: str, x: Any, w: Any, bias: Any, groups: Any) -> tuple[Any, Any, int]:
    """The arrays and the number of groups, checked as far as they need no other argument."""
    x, w = (
        as_operand(where, name, a, "fc", "floating or complex numbers", f"{name}.astype(float)")
        for name, a in (("x", x), ("w", w))
    )
    check_dtypes(where, x, w=w, bias=bias)
    check_spatial(where, x)
    if w.ndim != x.ndim:
        raise _wrong_kernel(where, describe(w), describe(x), x.ndim - 2)
    (groups,) = per_dimension(where, "groups", groups, 1)
    return x, w, groups


def _wrong_kernel(where: str, w: str, x: str, dims: int) -> SpecError:
    need = f"shape (O, C / groups, *kernel), a kernel of {dims} dimensions with entries"
    mend = "the spatial dimensions of x and w correspond, one by one"
    return SpecError.at(where, argument="w", got=f"{w} for {x}", need=need, mend=mend)


def _check_filters(where: str, x: tuple[int, ...], w: tuple[int, ...], groups: int) -> None:
    if 0 in w[2:]:
        raise _wrong_kernel(where, f"w of shape {list(w)}", f"x of shape {list(x)}", len(w) - 2)
    if w[0] % groups:
        raise SpecError.at(
            where,
            argument="groups",
            got=f"{groups} for w of {w[0]} filters",
            need="a divisor of the number of filters",
            mend="groups=1",
        )


def _plain(where: str, x: Any, w: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> _Options:
    """The options with an entry for each dimension. A padding that depends on the lengths stays a word."""
    dims, kernel = x.ndim - 2, tuple(w.shape[2:])
    strides, dilations = per_dimension(where, "stride", stride, dims), per_dimension(where, "dilation", dilation, dims)
    if not isinstance(padding, str):
        padding = paddings(where, padding, (0,) * dims, kernel, strides, dilations, minimum=None)
    return strides, padding, dilations, groups


def _check_bias(where: str, bias: tuple[int, ...], result: tuple[int, ...]) -> None:
    if bias != result[1:2]:
        raise SpecError.at(
            where,
            argument="bias",
            got=f"shape {list(bias)}",
            need=f"shape {[result[1]]}, a number for each channel of the result",
            mend="leave it out, or add an array of another shape to the result",
        )
