"""Normalisation of rows (layer norm, RMS norm) and of channels (batch, group and instance norm), and their statistics.

Any dimension may be split over workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf, prod
from typing import Any

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.errors import SpecError, describe
from spmd.functions.arguments import as_floating, as_number, cast, layer, normalized_axes, normalized_axis
from spmd.functions.global_operands import refuse_axis_names, run_over
from spmd.functions.layouts import check_spec, floating_array, floating_operand, layout_of_operand
from spmd.functions.local import local
from spmd.functions.local.normalisation import moments as local_moments
from spmd.functions.norm_plans import Norm, NormPlan, gathered_moments, merged, params_of
from spmd.functions.planned import LayerPlan, Operand, is_split, run_layer
from spmd.global_ops.call import global_value, names_of
from spmd.layout import Layout, P, Spec
from spmd.mesh import WORKER, here
from spmd.operators.reduce import AxisName, reduced_axes
from spmd.tracebacks import api_boundary

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "merge_moments", "moments", "rms_norm"]

Pair = tuple[Any, Any]


def _check_parameter(where: str, argument: str, p: Any, need: Sequence[int]) -> None:
    """Raise unless a parameter, or the array of its layout, has this shape."""
    if p is not None and tuple(p.shape) != tuple(need):
        mend = f"reshape it, or {argument}=None" if argument != "running" else "a number for each channel"
        got = f"an array of shape {list(p.shape)}" if isinstance(p, Layout) else describe(p)
        raise SpecError.at(where, argument=argument, got=got, need=f"shape {list(need)}", mend=mend)


_ARGUMENTS = "weight", "bias", "running", "running"


def _split(norm: Norm, x: Any, parameters: Sequence[Any], spec: Spec | None, w_spec: Spec | None, shape: Any) -> Any:
    """A norm of which something is split. parameters: weight, bias, and the running mean and variance."""
    where, worker, returns_running = norm.where, WORKER.get(), parameters[2] is not None
    if worker is not None and isinstance(spec, P | Layout) and shape is None:
        by = spec.spec if isinstance(spec, Layout) else spec
        lengths_matter = by is None or (norm.groups and names_of(by, x.ndim)[1]) or not _lie_as(w_spec, by, norm, x)
        if by is not None and not lengths_matter:
            check_spec(where, "spec", x, by, worker)
            if isinstance(spec, Layout):
                layout_of_operand(where, "spec", x, spec)
            for argument, p in zip(_ARGUMENTS, parameters, strict=True):
                _check_parameter(where, argument, p, [x.shape[d] for d in norm.params])
            group = _channels_of_a_group(norm, x.shape)
            plan = NormPlan(norm, tuple(names_of(by, x.ndim)), group=group, returns_running=returns_running)
            return plan(x, *parameters)
    operands = [Operand("spec", x, spec, shape)]
    for argument, p in zip(_ARGUMENTS, parameters, strict=True):
        derive = None if w_spec is not None else partial(_derived, norm, argument, p)
        operands.append(Operand(argument, p, w_spec, derive=derive))
    return run_layer(where, lambda x, *given: _plan(norm, returns_running, x, given), operands)


def _lie_as(w_spec: Spec | None, by: P, norm: Norm, x: Any) -> bool:
    """Whether parameters lie as the dimensions of x do that they have."""
    own = w_spec.spec if isinstance(w_spec, Layout) else w_spec
    names = names_of(by, x.ndim)
    return w_spec is None or (isinstance(own, P) and names_of(own, len(norm.params)) == [names[d] for d in norm.params])


def _derived(norm: Norm, argument: str, p: Any, before: Sequence[Layout | None]) -> Layout:
    """The layout of a parameter, checked against this worker's block of it."""
    assert before[0] is not None
    layout = params_of(before[0], norm.params)
    _check_parameter(norm.where, argument, p, layout.block_shape(here(norm.where).index))
    return layout


def _channels_of_a_group(norm: Norm, shape: Sequence[int]) -> int:
    """How many channels have common statistics. Raises unless the groups divide the channels."""
    if not norm.groups:
        return 1
    if shape[1] % norm.groups:
        need, mend = f"a divisor of the {shape[1]} channels", "groups=1"
        raise SpecError.at(norm.where, argument="groups", got=describe(norm.groups), need=need, mend=mend)
    return max(1, shape[1] // norm.groups)


@lru_cache(maxsize=1024)
def _plan(norm: Norm, returns_running: bool, x: Layout, given: tuple[Layout | None, ...]) -> LayerPlan:
    need = [x.shape[d] for d in norm.params]
    for argument, layout in zip(_ARGUMENTS, given, strict=True):
        _check_parameter(norm.where, argument, layout, need)
    names = () if x.spec is None else tuple(x.spec.dims)
    return NormPlan(norm, names, x, given, _channels_of_a_group(norm, x.shape), returns_running)


# Rows


def _rows(
    where: str, x, weight, bias, eps, ndim: int, spec: Spec | None, w_spec: Spec | None, shape: Any, centred: bool
) -> Any:
    x = floating_operand(where, "x", x)
    if not isinstance(ndim, int) or not 0 < ndim <= x.ndim:
        need = f"an integer from 1 to {x.ndim}" if x.ndim else "an array with dimensions"
        raise SpecError.at(where, argument="ndim", got=f"{ndim} for {describe(x)}", need=need, mend="ndim=1")
    weight, bias = _parameters(where, weight, bias)
    eps, first = as_number(where, "eps", eps, 0, inf), x.ndim - ndim
    if not (spec is None and w_spec is None) or is_split(*(Operand("", a) for a in (x, weight, bias))):
        norm = Norm(where, (0, first), tuple(range(first, x.ndim)), eps, centred)
        return _split(norm, x, (weight, bias, None, None), spec, w_spec, shape)
    for name, p in (("weight", weight), ("bias", bias)):
        _check_parameter(where, name, p, x.shape[first:])
    return local(x, "normalisation").layer_norm(x, weight, bias, eps, ndim, centred)


def _parameters(where: str, weight: Any, bias: Any) -> Pair:
    weight = weight if weight is None else floating_operand(where, "weight", weight)
    return weight, bias if bias is None else floating_operand(where, "bias", bias)


@api_boundary
@layer
def layer_norm(
    x: Tree,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    ndim: int = 1,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Tree:
    """(x - mean) / sqrt(var + eps) * weight + bias, by the mean and variance of each row.

    A row is the last axis of x, or the last `ndim` axes; weight and bias have its shape, or are None. Arrays of NumPy,
    CuPy or PyTorch.
    spec: in a body, how the whole x is split, of which x is this worker's block; a spec, a `Layout` or a `Grid`. None:
    the whole. w_spec: how weight and bias lie. None: as the last dimensions of x; by a grid on the first worker that
    holds each block of rows' entries. Outside of bodies global arrays have their layouts. shape: of the whole x in
    balanced blocks, to have them checked.

    Cost: where rows are split, one all-gather of two numbers per row and a count forward, one sum of these backward; on
    some of the workers an exchange between those that share rows. Otherwise nothing.
    Adjoint of the derivative, for x: (u - mean(u) - z * mean(u z)) / sqrt(var + eps), where u = g * weight, z = (x -
    mean) / sqrt(...). Those of weight and bias are summed over the workers that split other dimensions.
    Raises StateError for an x that does not vary over the axes of spec that split rows, SpecError and LayoutError for
    shapes that do not fit. Source: Ba, Kiros, Hinton, "Layer normalization", 2016; Chan, Golub, LeVeque, "Updating
    formulae and a pairwise algorithm", 1979.

        >>> with spmd.Mesh(model=2), spmd.ledger() as log:
        ...     x = spmd.put(np.array([[1.0, 3.0], [0.0, 8.0]]), P(None, "model"))
        ...     y = spmd.functions.layer_norm(x)
        >>> y.numpy().round(3), log.messages
        (array([[-1.,  1.],
               [-1.,  1.]]), 1)
    """
    return _rows("spmd.functions.layer_norm", x, weight, bias, eps, ndim, spec, w_spec, shape, True)


@api_boundary
@layer
def rms_norm(
    x: Tree,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    ndim: int = 1,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Tree:
    """x / sqrt(mean(x^2) + eps) * weight, for each row: as `layer_norm`, without the mean. Source: Zhang, Sennrich,
    "Root mean square layer normalization", 2019.

        >>> with spmd.Mesh(model=2):
        ...     spmd.functions.rms_norm(spmd.put(np.array([[3.0, 4.0, 0.0, 0.0]]), P(None, "model"))).numpy().round(3)
        array([[1.2, 1.6, 0. , 0. ]])
    """
    return _rows("spmd.functions.rms_norm", x, weight, None, eps, ndim, spec, w_spec, shape, False)


# Channels


@api_boundary
def merge_moments(counts: Any, means: Any, squares: Any) -> Any:
    """The count, mean and sum of squared distances of several samples together, from those of each.

    The first axis counts the samples. Of no entries mean and squares are 0. Source: Chan, Golub, LeVeque, "Updating
    formulae and a pairwise algorithm", 1979.

        >>> spmd.functions.merge_moments(np.array([1, 3]), np.array([0.0, 4.0]), np.array([0.0, 2.0]))
        (np.int64(4), np.float64(3.0), np.float64(14.0))
    """
    where = "spmd.functions.merge_moments"
    means, squares = as_floating(where, "means", means), as_floating(where, "squares", squares)
    return merged(np.asarray(counts) if isinstance(counts, list | tuple) else counts, means, squares)


@api_boundary
def moments(
    x: Any, axis: int | Sequence[int] | None = None, *, axis_name: AxisName | None = None, keepdims: bool = False
) -> tuple[Any, Any]:
    """The mean and the variance of x over some axes (None: all), and over the workers along axis_name.

    Every entry counts once, however uneven the blocks; some may be empty. The variance is the mean squared distance
    from the mean. Along axis_name the results are Invariant; an array that is Invariant there counts once. Outside of
    bodies a global array has its layout, and no axis_name.
    Of no entries both are NaN. Adjoint of the derivative: g / n for the mean, 2 g (x - mean) / n for the variance.
    Cost: one all-gather of both and the count; backward its adjoint.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda x: spmd.functions.moments(x, axis_name="x"), P("x"), P())
        ...     [value.item() for value in f(np.array([0.0, 3.0, 6.0]))]
        [3.0, 6.0]
    """
    where = "spmd.functions.moments"
    x = floating_array(where, "x", x)
    axes = normalized_axes(where, x, axis)
    refuse_axis_names(where, (x,), axis_name=axis_name)
    if global_value(x) is not None:
        return run_over(where, _Moments(axes, bool(keepdims)), (x,), axes, bool(keepdims), results=2)
    rest = [n for n in range(x.ndim) if n not in axes]
    shape = tuple(x.shape[a] for a in rest)
    n = prod(x.shape[a] for a in axes)
    if axes == tuple(range(len(axes))):  # the leading axes: no copy
        stacked = np.reshape(x, (n, prod(shape), 1))
    else:
        stacked = np.reshape(np.transpose(x, (*rest, *axes)), (1, prod(shape), n))
    both = local_moments(stacked, (1, 2))
    mean, square = (np.reshape(a, (stacked.shape[1],)) for a in both)
    count = n
    over = () if axis_name is None else reduced_axes(x, here(where).mesh.names(axis_name, where), where)
    if over:
        count, mean, square = gathered_moments(mean, square, n, over)
    count = (count or np.nan) if isinstance(count, int) else np.where(count == 0, np.nan, count)
    mean, variance = mean + 0 * count, square / count
    result_shape = tuple(1 if a in axes else m for a, m in enumerate(x.shape)) if keepdims else shape
    return cast(np.reshape(mean, result_shape), x.dtype), cast(np.reshape(variance, result_shape), x.dtype)


@dataclass(frozen=True)
class _Moments:
    """`moments` of blocks."""

    axes: tuple[int, ...]
    keepdims: bool

    def __call__(self, names: tuple[str, ...] | None, x: Any) -> tuple[Any, Any]:
        return moments(x, self.axes, axis_name=names, keepdims=self.keepdims)


@api_boundary
def batch_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    running: tuple[Any, Any] | None = None,
    *,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    axis: int = 1,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """(x - mean) / sqrt(var + eps) * weight + bias, by the mean and variance of each channel over all else.

    axis: that of the channels; weight and bias have its length, or are None. Arrays of NumPy, CuPy or PyTorch.
    spec, shape: how the whole x is split, as for `layer_norm`. w_spec: how weight, bias and running lie; None: as the
    channels do. The statistics are those of all workers together, with the sizes of their blocks as weights.
    running: (mean, variance) of earlier batches, or None. If given, the result is (y, new running): the old one times
    1 - momentum, plus the batch's mean and unbiased variance times momentum, as in torch; it has no gradient. The old
    arrays stay as they are. With training=False they replace the batch's statistics and are returned unchanged.

    Cost: one all-gather of the statistics forward, one sum of two numbers per channel backward; where only channels
    are split, nothing. Adjoint of the derivative, and errors: as of `layer_norm`. Source: Ioffe, Szegedy, "Batch
    normalization", 2015.

        >>> with spmd.Mesh(data=2), spmd.ledger() as log:
        ...     x = spmd.put(np.array([[1.0], [1.0], [3.0], [3.0]]), P("data"))
        ...     y, (mean, var) = spmd.functions.batch_norm(x, running=(np.zeros(1), np.ones(1)))
        >>> mean, log.messages
        (PartitionedArray([0.2], dtype=float64, spec=P(None)), 1)
    """
    where = "spmd.functions.batch_norm"
    x = floating_operand(where, "x", x)
    axis = normalized_axis(where, x, axis)
    weight, bias = _parameters(where, weight, bias)
    eps, momentum = as_number(where, "eps", eps, 0, inf), as_number(where, "momentum", momentum, 0, 1)
    parameters = (weight, bias, *_running(where, running, training))
    norm = Norm(where, (axis, axis + 1), (axis,), eps, momentum=momentum, training=bool(training))
    if not (spec is None and w_spec is None) or is_split(*(Operand("", a) for a in (x, *parameters))):
        result = _split(norm, x, parameters, spec, w_spec, shape)
        return (result[0], running) if not training else result
    for argument, p in zip(_ARGUMENTS, parameters, strict=True):
        _check_parameter(where, argument, p, x.shape[axis : axis + 1])
    if not training:
        return NormPlan(norm, ((),) * x.ndim)(x, *parameters), running
    y, mean, square = local(x, "normalisation").batch_norm(x, weight, bias, eps, axis, running is not None)
    if running is None:
        return y
    count = prod(x.shape) // max(1, x.shape[axis])
    return y, NormPlan(norm, ()).updated(parameters[2:], count, mean, square)


def _running(where: str, running: Any, training: bool) -> Pair:
    """The running mean and variance, or None twice."""
    if running is not None and (not isinstance(running, tuple | list) or len(running) != 2):
        need = "a pair (mean, variance), or None"
        raise SpecError.at(where, argument="running", got=describe(running), need=need, mend="running=None")
    if not training and running is None:
        need = "running=(mean, variance)"
        raise SpecError.at(where, argument="running", got="None with training=False", need=need, mend=need)
    mean, variance = running or (None, None)
    return (None, None) if mean is None else tuple(floating_operand(where, "running", r) for r in (mean, variance))


@api_boundary
@layer
def group_norm(
    x: Tree,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Tree:
    """Layer norm over groups of channels and all places, for each item of a batch.

    x: (batch, channels, ...); groups: a divisor of the channels; weight and bias: (channels,), or None. Arrays of
    NumPy, CuPy or PyTorch. spec, w_spec: as for `layer_norm`; w_spec=None: weight and bias lie as the channels do.
    shape: of the whole x, if spec splits it evenly; without it the workers exchange the lengths of their blocks where
    the channels are split.
    Cost: as `layer_norm`. Where groups lie across workers these exchange the statistics of their channels. Raises
    SpecError for groups that do not divide the channels, and as `layer_norm`.
    Source: Wu, He, "Group normalization", 2018.

        >>> x = np.array([[[1.0, 1.0], [3.0, 3.0], [0.0, 0.0], [4.0, 4.0]]])
        >>> with spmd.Mesh(x=2):
        ...     spmd.functions.group_norm(spmd.put(x, P(None, None, "x")), groups=2).numpy().round(3)
        array([[[-1., -1.],
                [ 1.,  1.],
                [-1., -1.],
                [ 1.,  1.]]])
    """
    where = "spmd.functions.group_norm"
    x = floating_operand(where, "x", x)
    if x.ndim < 2:
        need = "(batch, channels, ...)"
        raise SpecError.at(where, argument="x", got=describe(x), need=need, mend="add the dimensions")
    if not isinstance(groups, int | np.integer) or isinstance(groups, bool) or groups < 1:
        need, mend = "a number of groups that divides the channels", "groups=1"
        raise SpecError.at(where, argument="groups", got=describe(groups), need=need, mend=mend)
    return _by_channels(where, x, int(groups), (weight, bias, None, None), eps, spec, w_spec, shape)


def _by_channels(
    where: str, x: Any, groups: int, parameters: Sequence[Any], eps, spec: Any, w_spec: Any, shape: Any, momentum=0.0
) -> Any:
    """A group norm; of each channel by itself for groups=0. parameters: weight, bias, running mean and variance."""
    parameters = (*_parameters(where, *parameters[:2]), *parameters[2:])
    momentum = as_number(where, "momentum", momentum, 0, 1)
    norm = Norm(where, (0, 2), (1,), as_number(where, "eps", eps, 0, inf), groups=groups, momentum=momentum)
    if not (spec is None and w_spec is None) or is_split(*(Operand("", a) for a in (x, *parameters))):
        return _split(norm, x, parameters, spec, w_spec, shape)
    for name, p in zip(_ARGUMENTS, parameters, strict=True):
        _check_parameter(where, name, p, x.shape[1:2])
    _channels_of_a_group(norm, x.shape)
    if parameters[2] is not None:
        return NormPlan(norm, ((),) * x.ndim, returns_running=True)(x, *parameters)
    weight, bias, *_ = parameters
    return local(x, "normalisation").group_norm(x, groups or max(1, x.shape[1]), weight, bias, norm.eps)


@api_boundary
def instance_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    running: tuple[Any, Any] | None = None,
    training: bool = True,
    momentum: float = 0.1,
    spec: Spec | None = None,
    w_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`group_norm` with as many groups as channels.

    running: (mean, variance) of earlier batches, or None. If given, the result is (y, new running), as of `batch_norm`:
    by the means over the batch of the means and of the unbiased variances, as in torch. With training=False they
    replace the statistics of x. Cost of the update: where the batch is split, one sum of two numbers per channel.

        >>> x = np.array([[[1.0, 3.0], [0.0, 4.0]]])
        >>> with spmd.Mesh(x=2):
        ...     spmd.functions.instance_norm(spmd.put(x, P(None, None, "x"))).numpy().round(3)
        array([[[-1.,  1.],
                [-1.,  1.]]])
    """
    where = "spmd.functions.instance_norm"
    x = floating_operand(where, "x", x)
    if x.ndim < 2:
        need = "(batch, channels, ...)"
        raise SpecError.at(where, argument="x", got=describe(x), need=need, mend="add the dimensions")
    old = _running(where, running, training)
    if not training:
        options = {"training": False, "eps": eps, "spec": spec, "w_spec": w_spec, "shape": shape}
        return batch_norm(x, weight, bias, running, **options)
    return _by_channels(where, x, 0, (weight, bias, *old), eps, spec, w_spec, shape, momentum)
