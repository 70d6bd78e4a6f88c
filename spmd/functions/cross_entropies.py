"""The cross-entropy of classes, also where the classes are split over workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.admission import admit
from spmd.autodiff.registry import primitive
from spmd.autodiff.staging.recorder import checked, one_line, slot_of
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transforms import stop_gradient
from spmd.errors import SpecError, describe, message
from spmd.functions.arguments import alike, cast, floating, number, split_over, traced
from spmd.functions.embeddings import rows_at
from spmd.functions.softmaxes import (
    accurate_copy,
    exp_sums,
    log_softmax_rows,
    logsumexp_over,
    one_hot,
    row_max,
    softmax_rows,
    softmax_rows_vjp,
)
from spmd.kernels import on_device
from spmd.kernels.cpu.chunks import accurate
from spmd.mesh import here
from spmd.operators.reduce import AxisName, pmax, psum
from spmd.spellings import closest
from spmd.tracebacks import api_boundary

__all__ = ["softmax_cross_entropy"]


# The cross-entropy. Where its gradient will be asked for, the forward kernel makes softmax - target as well, and the
# backward sweep finds it in `kept`.


class _Kept:
    """What the forward kernel has found beside its result."""

    __slots__ = ("d",)
    d: Any

    def __init__(self):
        self.d = None


def _unless(h, labels, ignore: int | None):
    return h if ignore is None else np.where(np.expand_dims(labels != ignore, -1), h, np.zeros_like(h))


@primitive(
    "cross_entropy_gradient",
    lambda h, _ans, x, labels, *, smoothing, ignore, kept: softmax_rows_vjp(
        _unless(h, labels, ignore), softmax_rows(x)
    ),
    None,
)
def _gradient(x, labels, *, smoothing: float, ignore: int | None, kept: _Kept):
    """softmax(x) - target."""
    if kept.d is None:
        return kernels.of(x).cross_entropy_and_gradient(x, labels, smoothing, ignore)[1]
    return kept.d


@primitive(
    "cross_entropy",
    lambda g, _ans, x, labels, *, smoothing, ignore, kept: (
        np.expand_dims(g, -1) * _gradient(x, labels, smoothing=smoothing, ignore=ignore, kept=kept)
    ),
    None,
)
def _cross_entropy(x, labels, *, smoothing: float, ignore: int | None, kept: _Kept | None):
    if kept is None:
        return kernels.of(x).cross_entropy(x, labels, smoothing, ignore)
    loss, kept.d = kernels.of(x).cross_entropy_and_gradient(x, labels, smoothing, ignore)
    return loss


@primitive(
    "soft_cross_entropy_gradient",
    lambda h, _ans, x, t, *, kept: np.sum(t, axis=-1, keepdims=True) * softmax_rows_vjp(h, softmax_rows(x)),
    lambda h, _ans, x, _t, *, kept: np.sum(h * softmax_rows(x), axis=-1, keepdims=True) - h,
)
def _soft_gradient(x, t, *, kept: _Kept):
    """sum(t) * softmax(x) - t."""
    return kernels.of(x).soft_cross_entropy_and_gradient(x, t)[1] if kept.d is None else kept.d


@primitive(
    "soft_cross_entropy",
    lambda g, _ans, x, t, *, kept: np.expand_dims(g, -1) * _soft_gradient(x, t, kept=kept),
    lambda g, _ans, x, _t, *, kept: -np.expand_dims(g, -1) * log_softmax_rows(x),
)
def _soft_cross_entropy(x, t, *, kept: _Kept | None):
    if kept is None:
        return kernels.of(x).soft_cross_entropy(x, t)
    loss, kept.d = kernels.of(x).soft_cross_entropy_and_gradient(x, t)
    return loss


@api_boundary
def softmax_cross_entropy(
    logits,
    labels,
    axis_name: AxisName | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weight=None,
    reduction: str = "none",
    batch_axis_name: AxisName | None = None,
):
    """-sum(weight * t * log_softmax(logits)), for each row: the cross-entropy against targets t.

    logits: (..., classes), floating. labels: either (...), integers from 0 to classes - 1, for t = onehot(label); or
    distributions t in the shape of logits, floating (optax.softmax_cross_entropy). Gives (...), or by the reduction a
    number.
    label_smoothing: with integers, t = (1 - s) * onehot(label) + s / classes. ignore_index: rows with this label have
    the loss 0, and no gradient. weight: (classes,), a factor of each class; by default 1.
    reduction: "none"; "sum"; or "mean", as torch has it: with class numbers the sum over that of the weights of the
    rows' labels, without the rows that are ignored; with distributions over the number of rows. batch_axis_name: the
    axes of the mesh that split the rows, in blocks of any sizes, for a sum or mean of all workers' rows, by one
    all-reduce; without it they are of the rows that are here. The mean of no rows is NaN.
    axis_name: the axes of the mesh that split the classes, in blocks of any sizes; labels then are class numbers of the
    whole, the same along these axes, or blocks of the distributions, and weight is a block too. The loss is Invariant
    there. Cost: two all-reduces of a few numbers per row forward, none backward (Shoeybi et al., "Megatron-LM", 2019).
    Gradient: softmax(logits) * sum(t) - t, with weight * t for t; the forward pass makes it where it will be asked for.
    Raises StateError for logits that do not vary along axis_name, or class numbers that do, ValueError for labels of
    another shape or out of range; on a GPU, where looking at them would wait for it, the loss of the latter is NaN.
    """
    logits = floating(_WHERE, "logits", logits)
    if type(labels) is not Array and not on_device(labels):
        labels = admit(labels, _WHERE, "labels", error=SpecError)
    smoothing = number(_WHERE, "label_smoothing", label_smoothing, 0, 1)
    if ignore_index is not None and not (isinstance(ignore_index, int | np.integer) and abs(ignore_index) < 2**63):
        mend = "ignore_index=-100"
        raise ValueError(_message("ignore_index", describe(ignore_index), "an integer, or None", mend))
    ignore = None if ignore_index is None else int(ignore_index)
    weight = _class_weights(weight, logits)
    _check_reduction(reduction, batch_axis_name)
    if logits.ndim and labels.dtype.kind not in "iub" and labels.shape == logits.shape:
        labels = floating(_WHERE, "labels", labels)
        if smoothing or ignore is not None:
            got = "label_smoothing or ignore_index with distributions"
            raise ValueError(_message("labels", got, "integers", "mix the uniform distribution in; weight the losses"))
        labels = _beside(logits, labels)
        loss = _against_distributions(logits, labels if weight is None else labels * weight, axis_name)
        return _reduced(loss, None, reduction, batch_axis_name)
    if not logits.ndim or labels.dtype.kind not in "iu" or labels.shape != logits.shape[:-1]:
        raise ValueError(
            _message(
                "labels",
                f"{describe(labels)} for logits of shape {list(logits.shape)}",
                f"integers of shape {list(logits.shape[:-1])}",
                "give one class number per row: onehot.argmax(-1) of onehot rows",
            )
        )
    if axis_name is not None:
        loss, masses = _spread_cross_entropy(logits, labels, axis_name, smoothing, ignore, weight)
        return _reduced(loss, masses, reduction, batch_axis_name)
    _check_classes(labels, logits.shape[-1], ignore)
    labels = _beside(logits, labels)
    kept = _Kept() if traced(logits) else None
    if weight is None:
        loss = _cross_entropy(logits, labels, smoothing=smoothing, ignore=ignore, kept=kept)
        return _reduced(loss, _counted(labels, ignore, loss), reduction, batch_axis_name)
    masses = _weights_of(weight, labels, ignore)
    if smoothing:
        loss = _weighted_and_smoothed(logits, labels, smoothing, ignore, weight, masses)
    else:
        loss = _cross_entropy(logits, labels, smoothing=0.0, ignore=ignore, kept=kept)
        loss = cast(loss * masses, loss.dtype)
    return _reduced(loss, masses, reduction, batch_axis_name)


def _against_distributions(logits, t, axis_name: AxisName | None):
    if axis_name is not None:
        _, total = logsumexp_over(logits, axis_name, _WHERE)
        y = logits - np.expand_dims(total, -1)
        terms = np.where(t == 0, np.zeros_like(t), t) * np.where(t == 0, np.zeros_like(y), y)
        return cast(-psum(np.sum(terms, axis=-1), axis_name), logits.dtype)
    return _soft_cross_entropy(logits, cast(t, logits.dtype), kept=_Kept() if traced(logits) else None)


_WHERE = "spmd.softmax_cross_entropy"


def _message(argument: str, got: str, need: str, mend: str) -> str:
    return message(_WHERE, argument=argument, got=got, need=need, mend=mend)


def _check_classes(labels, classes: int, ignore: int | None) -> None:
    found = value_of(labels)
    if not kernels.on_device(found):
        checked(_in_range, found, classes, ignore)


def _in_range(found: np.ndarray, classes: int, ignore: int | None) -> None:
    found = found if ignore is None else found[found != ignore]
    if found.size and (found.min() < 0 or found.max() >= classes):
        got = f"labels from {found.min()} to {found.max()}"
        mend = "leave out rows without a class, or count from 0"
        raise ValueError(_message("labels", got, f"classes from 0 to {classes - 1}", mend))


# Weights of classes, and means


def _class_weights(weight, logits):
    """A weight for each class that is here, in the dtype that is computed in."""
    if weight is None:
        return None
    weight = floating(_WHERE, "weight", weight)
    if tuple(weight.shape) != tuple(logits.shape[-1:]):
        need = f"shape {list(logits.shape[-1:])}, a number for each class"
        mend = "weight=None for equal ones; with axis_name this worker's block of them"
        raise SpecError(_message("weight", describe(weight), need, mend))
    return _beside(logits, cast(weight, accurate(logits.dtype)))


def _beside(logits, x):
    """An array of the host where the logits are: CuPy takes none as an operand."""
    if type(x) is np.ndarray and kernels.on_device(value_of(logits)):
        import cupy

        return cupy.asarray(x)
    return x


def _weights_of(weight, labels, ignore: int | None):
    """The weight of each row's class: 0 of rows that are ignored, NaN of labels that nobody has looked at."""
    ids = cast(labels, np.int64)
    if kernels.on_device(value_of(ids)):
        ids = np.where(ids < 0, -2, ids)
    return rows_at(weight, ids if ignore is None else np.where(labels == ignore, -1, ids))


def _weighted_and_smoothed(logits, labels, smoothing: float, ignore: int | None, weight, masses):
    """The targets as an array: where weights differ, smoothing adds all logits up with them."""
    x = accurate_copy(logits)
    masses, zero = np.expand_dims(masses, -1), np.zeros_like(masses, shape=())
    share = 0 * masses + smoothing / x.shape[-1]  # NaN where the weight is
    if ignore is not None:
        share = np.where(np.expand_dims(labels == ignore, -1), zero, share)
    t = share * weight + np.where(one_hot(labels, x.shape[-1]), (1 - smoothing) * masses, zero)
    loss = _soft_cross_entropy(x, cast(t, x.dtype), kept=_Kept() if traced(logits) else None)
    return cast(loss, logits.dtype)


def _counted(labels, ignore: int | None, loss):
    """What each row counts in a mean without weights."""
    return None if ignore is None else (labels != ignore).astype(accurate(loss.dtype))


def _check_reduction(reduction: str, axis_name: AxisName | None) -> None:
    if reduction not in ("none", "sum", "mean"):
        mend = f'reduction="{closest(reduction, ("none", "sum", "mean"), "mean")}"'
        raise SpecError(_message("reduction", describe(reduction), '"none", "sum" or "mean"', mend))
    if axis_name is not None and reduction == "none":
        got, need = f"{axis_name!r} without a reduction", "something to add up over the workers"
        raise SpecError(_message("batch_axis_name", got, need, 'reduction="mean", or leave it out'))


@primitive("with_count", lambda g, _ans, _total, *, count: g[0])
def _with_count(total, *, count: int):
    """The total and the count, to be added up together."""
    return one_line(_pair, (total, count))


def _pair(total: Any, count: int) -> Any:
    if isinstance(total, np.generic | np.ndarray):  # a tenth of the time
        return np.array((total, count), total.dtype)
    return np.stack([total, np.full_like(total, count)])


@primitive("over_count", lambda g, _ans, both: _with_count(g / both[1], count=0))
def _over_count(both):
    """The total over the count, which is no function of anything."""
    return both[0] / both[1]


def _reduced(loss, masses, reduction: str, axis_name: AxisName | None):
    """The losses, their sum, or their sum over that of the masses (None: 1 for each)."""
    if reduction == "none":
        return loss
    over = () if axis_name is None else split_over(_WHERE, loss, axis_name, "batch_axis_name")
    total = np.sum(cast(loss, accurate(loss.dtype)))
    if reduction == "sum":
        return cast(psum(total, over) if over else total, loss.dtype)
    if masses is None:
        both = _with_count(total, count=loss.size)
        both = psum(both, over) if over else both
    elif over:
        both = psum(np.stack([total, np.sum(masses)]), over)
    else:
        both = total, np.sum(masses)
    with np.errstate(invalid="ignore"):  # of no rows
        return cast(_over_count(both) if masses is None else both[0] / both[1], loss.dtype)


def _sums_over(x, labels, axis_name: AxisName, where: str):
    """The sums of `exp_sums` over all workers, the largest entries, and how many columns the workers have before us
    and together. The sizes travel with the largest entries."""
    names = split_over(where, x, axis_name)
    alike(where, "labels", labels, names, "the same labels on all workers that share the classes")
    group = here(where).group(names)
    largest = row_max(stop_gradient(x))
    sizes = np.zeros_like(value_of(largest), shape=(group.size,), dtype=float)
    sizes[group.index] = x.shape[-1]
    packed = pmax(np.concatenate([np.reshape(largest, (-1,)).astype(float), sizes]), names)
    columns = [int(n) for n in slot_of(value_of(packed[-group.size :]))]  # alike each time
    top = cast(np.reshape(packed[: -group.size], x.shape[:-1]), x.dtype)
    before = sum(columns[: group.index])
    return top, before, sum(columns), names


def _spread_cross_entropy(logits, labels, axis_name: AxisName, smoothing: float, ignore: int | None, weight):
    """The losses, and what each row counts in their mean."""
    x = accurate_copy(logits)
    top, before, classes, names = _sums_over(x, labels, axis_name, _WHERE)
    _check_classes(labels, classes, ignore)
    mine = cast(labels, np.int64) - before
    sums = exp_sums(x, top, mine)
    if weight is None:
        sums = psum(sums, names)
        loss, masses = np.log(sums[0]) - (1 - smoothing) * (sums[1] - top), _counted(labels, ignore, x)
        if smoothing:
            loss = loss - smoothing * (sums[2] / classes - top)
    else:
        parts = [sums[0], sums[1], rows_at(weight, np.where((mine >= 0) & (mine < x.shape[-1]), mine, -1))]
        if smoothing:
            parts += [x @ weight, np.sum(weight) + np.zeros_like(top)]
        total, chosen, masses, *more = psum(np.stack(parts), names)
        loss = (1 - smoothing) * masses * (np.log(total) - (chosen - top))
        if smoothing:
            loss = loss + smoothing / classes * (more[1] * np.log(total) - (more[0] - more[1] * top))
        if ignore is not None:
            masses = np.where(labels == ignore, np.zeros_like(masses), masses)
    if kernels.on_device(value_of(labels)):  # nobody has looked at them
        loss = np.where((labels < 0) | (labels >= classes), np.full_like(loss, np.nan), loss)
    if ignore is not None:
        loss = np.where(labels == ignore, np.zeros_like(loss), loss)
    return cast(loss, logits.dtype), masses
