"""The cross-entropy of logits against classes or distributions, also with classes that are split over workers."""

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
from spmd.functions.arguments import as_floating, as_number, cast, is_traced, require_invariant, require_varying
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


# If the gradient will be needed, the forward kernel also computes softmax - target, and keeps it in `saved`.


class _SavedGradient:
    """The gradient that the forward kernel has computed."""

    __slots__ = ("value",)

    def __init__(self):
        self.value: Any = None


def _zero_ignored(h, labels, ignore: int | None):
    return h if ignore is None else np.where(np.expand_dims(labels != ignore, -1), h, np.zeros_like(h))


@primitive(
    "cross_entropy_gradient",
    lambda h, _ans, x, labels, *, smoothing, ignore, saved: softmax_rows_vjp(
        _zero_ignored(h, labels, ignore), softmax_rows(x)
    ),
    None,
)
def _gradient(x, labels, *, smoothing: float, ignore: int | None, saved: _SavedGradient):
    """softmax(x) - target."""
    if saved.value is None:
        return kernels.of(x).cross_entropy_and_gradient(x, labels, smoothing, ignore)[1]
    return saved.value


@primitive(
    "cross_entropy",
    lambda g, _ans, x, labels, *, smoothing, ignore, saved: (
        np.expand_dims(g, -1) * _gradient(x, labels, smoothing=smoothing, ignore=ignore, saved=saved)
    ),
    None,
)
def _cross_entropy(x, labels, *, smoothing: float, ignore: int | None, saved: _SavedGradient | None):
    if saved is None:
        return kernels.of(x).cross_entropy(x, labels, smoothing, ignore)
    loss, saved.value = kernels.of(x).cross_entropy_and_gradient(x, labels, smoothing, ignore)
    return loss


@primitive(
    "soft_cross_entropy_gradient",
    lambda h, _ans, x, t, *, saved: np.sum(t, axis=-1, keepdims=True) * softmax_rows_vjp(h, softmax_rows(x)),
    lambda h, _ans, x, _t, *, saved: np.sum(h * softmax_rows(x), axis=-1, keepdims=True) - h,
)
def _soft_gradient(x, t, *, saved: _SavedGradient):
    """sum(t) * softmax(x) - t."""
    return kernels.of(x).soft_cross_entropy_and_gradient(x, t)[1] if saved.value is None else saved.value


@primitive(
    "soft_cross_entropy",
    lambda g, _ans, x, t, *, saved: np.expand_dims(g, -1) * _soft_gradient(x, t, saved=saved),
    lambda g, _ans, x, _t, *, saved: -np.expand_dims(g, -1) * log_softmax_rows(x),
)
def _soft_cross_entropy(x, t, *, saved: _SavedGradient | None):
    if saved is None:
        return kernels.of(x).soft_cross_entropy(x, t)
    loss, saved.value = kernels.of(x).soft_cross_entropy_and_gradient(x, t)
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
    """The cross-entropy of each row against targets t: -sum(weight * t * log_softmax(logits)).

    logits: (..., classes), floating. labels: integers (...) from 0 to classes - 1, for t = onehot(label); or
    distributions t in the shape of logits, floating. Gives (...), or a number if there is a reduction.
    label_smoothing: with integers, t = (1 - s) * onehot(label) + s / classes. ignore_index: rows with this label have
    the loss 0 and no gradient. weight: (classes,), a factor for each class.
    reduction: "none", "sum", or "mean" as in torch: with integers, the sum over the weights of the labels of all rows
    that are not ignored; with distributions, over the number of rows. The mean of no rows is NaN. batch_axis_name: the
    axes of the mesh that split the rows, in blocks of any sizes; the sum or mean is over the rows of all workers, by
    one all-reduce. Without it they are over the rows of this worker.
    axis_name: the axes of the mesh that split the classes, in blocks of any sizes. Labels are then numbers of the
    whole, equal along these axes, or blocks of the distributions; weight is a block too. The loss is Invariant there.
    Cost: two all-reduces of a few numbers per row forward, none backward (Shoeybi et al., "Megatron-LM", 2019).
    Gradient: softmax(logits) * sum(t) - t, with weight * t for t; the forward pass computes it if it will be needed.
    Raises StateError for logits that do not vary along axis_name or labels that do, ValueError for labels of another
    shape or out of range. On a GPU labels are not read, and the loss of one out of range is NaN.
    """
    logits = as_floating(_WHERE, "logits", logits)
    if type(labels) is not Array and not on_device(labels):
        labels = admit(labels, _WHERE, "labels", error=SpecError)
    smoothing = as_number(_WHERE, "label_smoothing", label_smoothing, 0, 1)
    if ignore_index is not None and not (isinstance(ignore_index, int | np.integer) and abs(ignore_index) < 2**63):
        raise ValueError(_message("ignore_index", describe(ignore_index), "an integer, or None", "ignore_index=-100"))
    ignore = None if ignore_index is None else int(ignore_index)
    weight = _class_weights(weight, logits)
    _check_reduction(reduction, batch_axis_name)
    if logits.ndim and labels.dtype.kind not in "iub" and labels.shape == logits.shape:
        row_weights = None
        loss = _against_distributions(logits, labels, axis_name, bool(smoothing or ignore is not None), weight)
    elif not logits.ndim or labels.dtype.kind not in "iu" or labels.shape != logits.shape[:-1]:
        raise _wrong_labels(logits, labels)
    elif axis_name is not None:
        loss, row_weights = _split_cross_entropy(logits, labels, axis_name, smoothing, ignore, weight)
    else:
        _check_classes(labels, logits.shape[-1], ignore)
        labels = _on_device_of(logits, labels)
        if weight is None:
            saved = _SavedGradient() if is_traced(logits) else None
            loss = _cross_entropy(logits, labels, smoothing=smoothing, ignore=ignore, saved=saved)
            row_weights = _row_weights(labels, ignore, loss)
        else:
            loss, row_weights = _weighted_cross_entropy(logits, labels, smoothing, ignore, weight)
    return _reduced(loss, row_weights, reduction, batch_axis_name)


def _wrong_labels(logits, labels) -> ValueError:
    got = f"{describe(labels)} for logits of shape {list(logits.shape)}"
    need = f"integers of shape {list(logits.shape[:-1])}"
    return ValueError(_message("labels", got, need, "give one class number per row: onehot.argmax(-1) of onehot rows"))


def _against_distributions(logits, t, axis_name: AxisName | None, has_label_options: bool, weight):
    t = as_floating(_WHERE, "labels", t)
    if has_label_options:
        got = "label_smoothing or ignore_index with distributions"
        raise ValueError(_message("labels", got, "integers", "mix the uniform distribution in; weight the losses"))
    t = _on_device_of(logits, t)
    t = t if weight is None else t * weight
    if axis_name is not None:
        _, total = logsumexp_over(logits, axis_name, _WHERE)
        y = logits - np.expand_dims(total, -1)
        terms = np.where(t == 0, np.zeros_like(t), t) * np.where(t == 0, np.zeros_like(y), y)
        return cast(-psum(np.sum(terms, axis=-1), axis_name), logits.dtype)
    return _soft_cross_entropy(logits, cast(t, logits.dtype), saved=_SavedGradient() if is_traced(logits) else None)


_WHERE = "spmd.softmax_cross_entropy"


def _message(argument: str, got: str, need: str, mend: str) -> str:
    return message(_WHERE, argument=argument, got=got, need=need, mend=mend)


def _check_classes(labels, classes: int, ignore: int | None) -> None:
    labels = value_of(labels)
    if not kernels.on_device(labels):
        checked(_check_range, labels, classes, ignore)


def _check_range(labels: np.ndarray, classes: int, ignore: int | None) -> None:
    labels = labels if ignore is None else labels[labels != ignore]
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        got = f"labels from {labels.min()} to {labels.max()}"
        mend = "leave out rows without a class, or count from 0"
        raise ValueError(_message("labels", got, f"classes from 0 to {classes - 1}", mend))


# Weights of classes, and means


def _class_weights(weight, logits):
    """The weights of the classes of this worker, in the dtype of the computation."""
    if weight is None:
        return None
    weight = as_floating(_WHERE, "weight", weight)
    if tuple(weight.shape) != tuple(logits.shape[-1:]):
        need = f"shape {list(logits.shape[-1:])}, a number for each class"
        mend = "weight=None for equal ones; with axis_name this worker's block of them"
        raise SpecError(_message("weight", describe(weight), need, mend))
    return _on_device_of(logits, cast(weight, accurate(logits.dtype)))


def _on_device_of(logits, x):
    """An array on the device of the logits: CuPy takes no host array as an operand."""
    if type(x) is np.ndarray and kernels.on_device(value_of(logits)):
        import cupy

        return cupy.asarray(x)
    return x


def _weights_of(weight, labels, ignore: int | None):
    """The weight of the class of each row: 0 for ignored rows, NaN for labels out of range on a GPU."""
    ids = cast(labels, np.int64)
    if kernels.on_device(value_of(ids)):
        ids = np.where(ids < 0, -2, ids)
    return rows_at(weight, ids if ignore is None else np.where(labels == ignore, -1, ids))


def _weighted_cross_entropy(logits, labels, smoothing: float, ignore: int | None, weight):
    """The losses with class weights, and the weight of each row in their mean."""
    row_weights = _weights_of(weight, labels, ignore)
    saved = _SavedGradient() if is_traced(logits) else None
    if not smoothing:
        loss = _cross_entropy(logits, labels, smoothing=0.0, ignore=ignore, saved=saved)
        return cast(loss * row_weights, loss.dtype), row_weights
    # With different weights smoothing adds up all logits, so the targets are needed as an array.
    x = accurate_copy(logits)
    column, zero = np.expand_dims(row_weights, -1), np.zeros_like(row_weights, shape=())
    share = 0 * column + smoothing / x.shape[-1]  # NaN where the weight is
    if ignore is not None:
        share = np.where(np.expand_dims(labels == ignore, -1), zero, share)
    t = share * weight + np.where(one_hot(labels, x.shape[-1]), (1 - smoothing) * column, zero)
    return cast(_soft_cross_entropy(x, cast(t, x.dtype), saved=saved), logits.dtype), row_weights


def _row_weights(labels, ignore: int | None, loss):
    """The weight of each row in a mean without class weights; None: 1."""
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
    """The total and the count in one array, for one sum over workers."""
    return one_line(_pair, (total, count))


def _pair(total: Any, count: int) -> Any:
    if isinstance(total, np.generic | np.ndarray):  # ten times as fast
        return np.array((total, count), total.dtype)
    return np.stack([total, np.full_like(total, count)])


@primitive("over_count", lambda g, _ans, both: _with_count(g / both[1], count=0))
def _over_count(total_and_count):
    """The total divided by the count, which has no derivative."""
    return total_and_count[0] / total_and_count[1]


def _reduced(loss, row_weights, reduction: str, axis_name: AxisName | None):
    """The losses, their sum, or their sum divided by that of the row weights (None: 1 for each)."""
    if reduction == "none":
        return loss
    axes = () if axis_name is None else require_varying(_WHERE, loss, axis_name, "batch_axis_name")
    total = np.sum(cast(loss, accurate(loss.dtype)))
    if reduction == "sum":
        return cast(psum(total, axes) if axes else total, loss.dtype)
    if row_weights is None:
        total_and_count = _with_count(total, count=loss.size)
        total_and_count = psum(total_and_count, axes) if axes else total_and_count
    elif axes:
        total_and_count = psum(np.stack([total, np.sum(row_weights)]), axes)
    else:
        total_and_count = total, np.sum(row_weights)
    with np.errstate(invalid="ignore"):  # of no rows
        mean = _over_count(total_and_count) if row_weights is None else total_and_count[0] / total_and_count[1]
    return cast(mean, loss.dtype)


def _split_classes(x, labels, axis_name: AxisName, where: str) -> tuple[Any, int, int, Any]:
    """The largest logit of each row, the first class of this worker, the number of classes, and the axes that split
    them. One all-reduce carries the largest logits and the numbers of classes.
    """
    names = require_varying(where, x, axis_name)
    require_invariant(where, "labels", labels, names, "the same labels on all workers that share the classes")
    group = here(where).group(names)
    largest = row_max(stop_gradient(x))
    sizes = np.zeros_like(value_of(largest), shape=(group.size,), dtype=float)
    sizes[group.index] = x.shape[-1]
    packed = pmax(np.concatenate([np.reshape(largest, (-1,)).astype(float), sizes]), names)
    columns = [int(n) for n in slot_of(value_of(packed[-group.size :]))]  # the same in every replay
    top = cast(np.reshape(packed[: -group.size], x.shape[:-1]), x.dtype)
    offset = sum(columns[: group.index])
    return top, offset, sum(columns), names


def _split_cross_entropy(logits, labels, axis_name: AxisName, smoothing: float, ignore: int | None, weight):
    """The losses where the classes are split over workers, and the weight of each row in their mean."""
    x = accurate_copy(logits)
    top, offset, classes, names = _split_classes(x, labels, axis_name, _WHERE)
    _check_classes(labels, classes, ignore)
    own_labels = cast(labels, np.int64) - offset
    sums = exp_sums(x, top, own_labels)
    if weight is None:
        sums = psum(sums, names)
        loss, row_weights = np.log(sums[0]) - (1 - smoothing) * (sums[1] - top), _row_weights(labels, ignore, x)
        if smoothing:
            loss = loss - smoothing * (sums[2] / classes - top)
    else:
        here_or_none = np.where((own_labels >= 0) & (own_labels < x.shape[-1]), own_labels, -1)
        parts = [sums[0], sums[1], rows_at(weight, here_or_none)]
        if smoothing:
            parts += [x @ weight, np.sum(weight) + np.zeros_like(top)]
        total, chosen, row_weights, *smoothing_sums = psum(np.stack(parts), names)
        loss = (1 - smoothing) * row_weights * (np.log(total) - (chosen - top))
        if smoothing:
            weighted_logits, weights = smoothing_sums
            loss = loss + smoothing / classes * (weights * np.log(total) - (weighted_logits - weights * top))
        if ignore is not None:
            row_weights = np.where(labels == ignore, np.zeros_like(row_weights), row_weights)
    if kernels.on_device(value_of(labels)):  # their range was not checked
        loss = np.where((labels < 0) | (labels >= classes), np.full_like(loss, np.nan), loss)
    if ignore is not None:
        loss = np.where(labels == ignore, np.zeros_like(loss), loss)
    return cast(loss, logits.dtype), row_weights
