"""Cross-entropies of logits against classes or distributions, also with classes that are split over workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spmd.autodiff.admission import admit
from spmd.autodiff.signatures import Tree
from spmd.autodiff.staging.recorder import checked, slot_of
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import LayoutError, SpecError, describe, message
from spmd.frontends import frontend
from spmd.functions.arguments import as_floating, as_number, layer, require_invariant, require_varying
from spmd.functions.global_operands import (
    first_global,
    layout_of_values,
    refuse_axis_names,
    run_by_specs,
)
from spmd.functions.layouts import dtype_of, floating_operand, layout_of_operand
from spmd.functions.local import local, namespace
from spmd.functions.losses import check_block, spec_of
from spmd.functions.movement import relaid, varied
from spmd.functions.norm_plans import params_of
from spmd.functions.reductions import check_reduction, reduced
from spmd.global_ops.call import global_value, names_of
from spmd.kernels import on_device
from spmd.kernels.cpu.chunks import accurate
from spmd.layout import Layout, P, Spec
from spmd.mesh import here
from spmd.operators.reduce import AxisName, in_dtype, pmax, psum
from spmd.tracebacks import api_boundary

__all__ = ["cross_entropy", "nll_loss", "softmax_cross_entropy"]


@api_boundary
@layer
def softmax_cross_entropy(
    logits: Tree,
    labels: Any,
    axis_name: AxisName | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weight: Any = None,
    reduction: str = "none",
    batch_axis_name: AxisName | None = None,
) -> Tree:
    """The cross-entropy of each row against targets t: -sum(weight * t * log_softmax(logits)).

    logits: (..., classes), floating, of NumPy, CuPy or PyTorch. labels: integers (...) from 0 to classes - 1, for
    t = onehot(label); or distributions t in the shape of logits, floating. Gives (...), or a number if there is a
    reduction.
    label_smoothing: with integers, t = (1 - s) * onehot(label) + s / classes. ignore_index: rows with this label have
    the loss 0 and no gradient. weight: (classes,), a factor for each class.
    reduction: "none", "sum", or "mean" as in torch: with integers, the sum over the weights of the labels of all rows
    that are not ignored; with distributions, over the number of rows. The mean of no rows is NaN. batch_axis_name: the
    axes of the mesh that split the rows, in blocks of any sizes; the sum or mean is over the rows of all workers, by
    one all-reduce. Without it they are over the rows of this worker.
    axis_name: the axes of the mesh that split the classes, in blocks of any sizes. Labels are then numbers of the
    whole, equal along these axes, or blocks of the distributions; weight is a block too. The loss is Invariant there.
    Outside of bodies global arrays have their layouts, and no axis names; a sum or mean is over all rows.
    Cost: two all-reduces of a few numbers per row forward, none backward (Shoeybi et al., "Megatron-LM", 2019).
    Adjoint of the derivative: g * (softmax(logits) * sum(t) - t), with weight * t for t; the forward pass computes it
    if it will be needed.
    Raises StateError for logits that do not vary along axis_name or labels that do, SpecError for labels of another
    shape or out of range. On a GPU labels are not read, and the loss of one out of range is NaN.

        >>> def loss(logits, labels):
        ...     return spmd.softmax_cross_entropy(logits, labels, "model", reduction="sum")
        >>> with spmd.Mesh(model=2):
        ...     f = spmd.map(loss, (P(None, "model"), P()), P())
        ...     spmd.grad(f)(np.zeros((1, 4)), np.array([2]))
        array([[ 0.25,  0.25, -0.75,  0.25]])
    """
    where = "spmd.softmax_cross_entropy"
    if batch_axis_name is not None and reduction == "none":
        got, need = f"{batch_axis_name!r} without a reduction", "something to add up over the workers"
        mend = 'reduction="mean", or leave it out'
        raise SpecError.at(where, argument="batch_axis_name", got=got, need=need, mend=mend)
    check_reduction(where, reduction)
    options = _Options(where, reduction, as_number(where, "label_smoothing", label_smoothing, 0, 1))
    options = replace(options, ignore=_ignored(where, ignore_index), names=("logits", "labels", "batch_axis_name"))
    operands = logits, labels, weight
    if first_global(*operands) is None:
        return _loss(options, *operands, axis_name, batch_axis_name)
    refuse_axis_names(where, operands, axis_name=axis_name, batch_axis_name=batch_axis_name)
    return _of_global(options, *operands)


@dataclass(frozen=True)
class _Options:
    """What is computed. names: of the arguments in messages: the logits, the labels, and what splits the rows."""

    where: str
    reduction: str
    smoothing: float = 0.0
    ignore: int | None = None
    names: tuple[str, str, str] = ("x", "target", "spec")

    def message(self, argument: str, got: str, need: str, mend: str) -> str:
        return message(self.where, argument=argument, got=got, need=need, mend=mend)


def _ignored(where: str, index: Any) -> int | None:
    if index is not None and not (isinstance(index, int | np.integer) and abs(index) < 2**63):
        need, mend = "an integer, or None", "ignore_index=-100"
        raise SpecError(message(where, argument="ignore_index", got=describe(index), need=need, mend=mend))
    return None if index is None else int(index)


def _of_global(o: _Options, logits, labels, weight) -> Any:
    """The loss of global arrays, some of which may be whole on each worker, with the classes in the last dimension."""
    logits = floating_operand(o.where, o.names[0], logits)
    labels = labels if global_value(labels) is not None else _labels(o, logits, labels)
    value, own = first_global(logits, labels, weight), global_value(logits)
    if not logits.ndim or tuple(labels.shape) not in (tuple(logits.shape), tuple(logits.shape[:-1])):
        raise _wrong_labels(o, logits, labels)
    assert value is not None
    lies = layout_of_values(value if own is None else own, logits.shape)
    *rows, classes = range(logits.ndim)
    if weight is not None:
        _check_class_weights(o, weight, logits)
    specs = [lies, lies if labels.ndim == logits.ndim else params_of(lies, rows), params_of(lies, (classes,))]
    out = params_of(lies, rows) if o.reduction == "none" else P()
    return run_by_specs(o.where, _Rows(o), lies, (logits, labels, weight), specs, out, value)


@dataclass(frozen=True)
class _Rows:
    """A loss of blocks with the classes in the last dimension."""

    options: _Options

    def __call__(self, lies: Layout, logits: Any, labels: Any, weight: Any) -> Any:
        *rows, classes = names_of(lies, logits.ndim)
        batch = tuple(n for each in rows for n in each)
        return _loss(self.options, logits, labels, varied(weight, batch), classes or None, batch or None)


def _loss(o: _Options, logits, labels, weight, axis_name: AxisName | None, batch: AxisName | None) -> Any:
    """The loss of blocks whose classes, in the last dimension, are split over axis_name, and whose rows over batch."""
    logits = logits if frontend(logits) is not None else as_floating(o.where, o.names[0], logits)
    labels, weight = _labels(o, logits, labels), _class_weights(o, weight, logits)
    lib, kind = local(logits, "cross_entropies"), dtype_of(labels).kind
    if logits.ndim and kind not in "iub" and labels.shape == logits.shape:
        weights, loss = None, _against_distributions(o, logits, labels, axis_name, weight)
    elif not logits.ndim or kind not in "iu" or labels.shape != logits.shape[:-1]:
        raise _wrong_labels(o, logits, labels)
    elif axis_name is not None:
        loss, weights = _split_cross_entropy(o, logits, labels, axis_name, weight)
    else:
        _check_classes(o, labels, logits.shape[-1], _only_of_logits(logits, labels))
        loss, weights = lib.of_classes(logits, _on_device_of(logits, labels), weight, o.ignore, o.smoothing)
    return reduced(o.where, loss, weights, o.reduction, batch, argument=o.names[2])


def _labels(o: _Options, logits: Any, labels: Any) -> Any:
    """The labels, as an array of the library of the logits."""
    other = frontend(logits)
    if other is not None:
        if frontend(labels) is not other:
            need, mend = "a tensor, as the logits", f"torch.as_tensor({o.names[1]})"
            raise SpecError.at(o.where, argument=o.names[1], got=describe(labels), need=need, mend=mend)
        return labels
    if type(labels) is not Array and not on_device(labels):
        return admit(labels, o.where, o.names[1], error=SpecError)
    return labels


def _wrong_labels(o: _Options, logits, labels) -> SpecError:
    got = f"{describe(labels)} for {o.names[0]} of shape {list(logits.shape)}, with classes in its last dimension"
    if o.names[0] == "logits":
        got = f"{describe(labels)} for logits of shape {list(logits.shape)}"
    need = f"integers of shape {list(logits.shape[:-1])}"
    mend = "give one class number per row: onehot.argmax(-1) of onehot rows"
    return SpecError(o.message(o.names[1], got, need, mend))


def _against_distributions(o: _Options, logits, t, axis_name: AxisName | None, weight):
    lib, xp = local(logits, "cross_entropies"), namespace(logits)
    if o.smoothing or o.ignore is not None:
        got = "label_smoothing or ignore_index with distributions"
        raise SpecError(o.message(o.names[1], got, "integers", "mix the uniform distribution in; weight the losses"))
    t = _on_device_of(logits, t if frontend(t) is not None else as_floating(o.where, o.names[1], t))
    t = t if weight is None else t * weight
    if axis_name is None:
        return lib.of_distributions(logits, t)
    names = require_varying(o.where, logits, axis_name, _split_argument(o))
    y = logits - xp.expand_dims(varied(lib.log_total(logits, names, o.where), names), axis=-1)
    terms = xp.where(t == 0, xp.zeros_like(t), t) * xp.where(t == 0, xp.zeros_like(y), y)
    return in_dtype(-psum(xp.sum(terms, axis=-1), names), dtype_of(logits))


def _split_argument(o: _Options) -> str:
    """The argument that says what splits the classes."""
    return "spec" if o.names[2] == "spec" else "axis_name"


def _only_of_logits(logits: Any, labels: Any) -> tuple[str, ...]:
    """The axes of the mesh over which the logits vary, and the labels do not: these may split the classes."""
    states = [getattr(a, "state", None) for a in (logits, labels)]
    varying, others = (set() if state is None else set(state.varying) for state in states)
    return tuple(sorted(varying - others))


def _check_classes(o: _Options, labels, classes: int, axes: tuple[str, ...] = ()) -> None:
    """Raise for labels out of range. axes: what may split the classes, although no argument says it."""
    other = frontend(labels)
    data = value_of(labels) if other is None else other.data(labels)
    if data is not None and not on_device(data):
        (checked if other is None else _called)(_check_range, data, classes, o, axes)


def _called(fun: Any, *args: Any) -> None:
    fun(*args)


def _check_range(labels: np.ndarray, classes: int, o: _Options, axes: tuple[str, ...]) -> None:
    labels = labels if o.ignore is None else labels[labels != o.ignore]
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        got = f"{o.names[1]} from {labels.min()} to {labels.max()}"
        mend = "leave out rows without a class, or count from 0"
        need = f"classes from 0 to {classes - 1}"
        if axes:
            got += f", the same along {axes[0]!r}, where not all have the same {o.names[0]}"
            split = f"axis_name={axes[0]!r}" if o.names[2] != "spec" else f"a spec of x that names {axes[0]!r}"
            mend = f"{split}, if that axis splits the classes; else {mend}"
        raise SpecError(o.message(o.names[1], got, need, mend))


def _class_weights(o: _Options, weight, logits):
    """The weights of the classes of this worker, in the dtype of the computation."""
    if weight is None:
        return None
    weight = weight if frontend(weight) is not None else as_floating(o.where, "weight", weight)
    _check_class_weights(o, weight, logits)
    return _on_device_of(logits, in_dtype(weight, accurate(dtype_of(logits))))


def _check_class_weights(o: _Options, weight, logits) -> None:
    if np.shape(weight) != tuple(logits.shape[-1:]):
        need = f"shape {list(logits.shape[-1:])}, a number for each class"
        mend = "weight=None for equal ones; with split classes this worker's block of them"
        raise SpecError.at(o.where, argument="weight", got=describe(weight), need=need, mend=mend)


def _on_device_of(logits, x):
    """An array on the device of the logits: CuPy takes no host array as an operand."""
    if type(x) is np.ndarray and on_device(value_of(logits)):
        import cupy

        return cupy.asarray(x)
    return x


def _split_classes(o: _Options, x, labels, axis_name: AxisName) -> tuple[Any, int, int, Any]:
    """The largest logit of each row, the first class of this worker, the number of classes, and the axes that split
    them. One all-reduce carries the largest logits and the numbers of classes.
    """
    names, xp, other = require_varying(o.where, x, axis_name, _split_argument(o)), namespace(x), frontend(x)
    need = "the same labels on all workers that share the classes"
    require_invariant(o.where, o.names[1], labels, names, need)
    group, double = here(o.where).group(names), np.dtype(float)
    largest = local(x, "softmaxes").top(x)
    sizes = np.zeros(group.size)
    sizes[group.index] = x.shape[-1]
    flat = in_dtype(xp.reshape(largest, (int(np.prod(largest.shape)),)), double)
    packed = pmax(xp.concat([flat, local(x, "normalisation").constant(flat, sizes)]), names)
    tail = packed[-group.size :]
    numbers = slot_of(value_of(tail)) if other is None else other.data(tail)
    columns = [int(n) for n in numbers]  # the same in every replay
    top = in_dtype(xp.reshape(packed[: -group.size], tuple(x.shape[:-1])), dtype_of(x))
    return top, sum(columns[: group.index]), sum(columns), names


def _split_cross_entropy(o: _Options, logits, labels, axis_name: AxisName, weight):
    """The losses where the classes are split over workers, and the weight of each row in their mean."""
    lib, xp, smoothing = local(logits, "cross_entropies"), namespace(logits), o.smoothing
    x = in_dtype(logits, accurate(dtype_of(logits)))
    top, offset, classes, names = _split_classes(o, x, labels, axis_name)
    _check_classes(o, labels, classes)
    own_labels = in_dtype(labels, np.dtype(np.int64)) - offset
    sums = lib.class_sums(x, top, own_labels)
    if weight is None:
        sums = psum(sums, names)
        loss = xp.log(sums[0]) - (1 - smoothing) * (sums[1] - top)
        row_weights = lib.row_weights(labels, None, o.ignore, x)
        if smoothing:
            loss = loss - smoothing * (sums[2] / classes - top)
    else:
        parts = [sums[0], sums[1], lib.weights_at(weight, _own_or_none(own_labels, x.shape[-1]))]
        if smoothing:
            parts += [x @ weight, xp.sum(weight) + xp.zeros_like(top)]
        total, chosen, row_weights, *smoothing_sums = psum(xp.stack(parts), names)
        loss = (1 - smoothing) * row_weights * (xp.log(total) - (chosen - top))
        if smoothing:
            weighted_logits, weights = smoothing_sums
            loss = loss + smoothing / classes * (weights * xp.log(total) - (weighted_logits - weights * top))
        if o.ignore is not None:
            row_weights = xp.where(labels == o.ignore, xp.zeros_like(row_weights), row_weights)
    if on_device(value_of(labels)):  # their range was not checked
        loss = np.where((labels < 0) | (labels >= classes), np.full_like(loss, np.nan), loss)
    if o.ignore is not None:
        loss = xp.where(labels == o.ignore, xp.zeros_like(loss), loss)
    return in_dtype(loss, dtype_of(logits)), row_weights


def _own_or_none(labels: Any, classes: int) -> Any:
    """Labels of this worker's classes; -1 for those of others."""
    xp = namespace(labels)
    return xp.where((labels >= 0) & (labels < classes), labels, xp.full_like(labels, -1))


# As torch has them: classes in dimension 1


@api_boundary
@layer
def cross_entropy(
    x: Tree,
    target: Any,
    *,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    spec: Spec | None = None,
) -> Tree:
    """The cross-entropy of logits against classes: `softmax_cross_entropy` with the arguments of torch.

    x: (classes,), (batch, classes) or (batch, classes, ...), floating; arrays of NumPy, CuPy or PyTorch. target:
    integers in the shape of x without the classes, from 0 to classes - 1; or probabilities in the shape of x.
    weight: (classes,), a factor for each class, or None. ignore_index: rows with this target have the loss 0 and no
    weight. label_smoothing: the share s in (1 - s) t + s / classes for distributions t.
    reduction: "none", "sum", or "mean": the sum divided by that of the weights of all targets that are not ignored;
    with probabilities, by the number of rows. The mean of no rows is NaN.
    spec: in a body, how the whole x is split, classes too. target is split as x without the classes, and has numbers of
    the whole; probabilities are split as x, and weight as the classes. By a `Layout.grid`, weight is whole on all
    workers, and target is on the first worker of each block of rows, where the losses are computed. None: x is whole.
    Outside of bodies global arrays have their layouts. The sum and the mean are over all workers, and Invariant.

    Cost: two all-reduces of a few numbers per row if the classes are split, one of two numbers for a mean; backward
    nothing. Adjoint of the derivative: g (softmax(x) sum(t) - t).
    Raises SpecError for targets of another shape or out of range and for other arguments, StateError where spec names
    an axis along which all workers have the same.
    Source: as torch.nn.functional.cross_entropy; Shoeybi et al., "Megatron-LM", 2019.

        >>> with spmd.Mesh(data=2, model=2):
        ...     logits = spmd.put(np.zeros((2, 4)), P("data", "model"))
        ...     spmd.grad(lambda x: spmd.functions.cross_entropy(x, np.array([1, 3])))(logits)
        PartitionedArray([[ 0.125, -0.375,  0.125,  0.125],
                          [ 0.125,  0.125,  0.125, -0.375]], dtype=float64, spec=P('data', 'model'))
    """
    where = "spmd.functions.cross_entropy"
    o = _Options(where, reduction, as_number(where, "label_smoothing", label_smoothing, 0, 1))
    return _run(replace(o, ignore=_ignored(where, ignore_index)), x, target, weight, spec)


@api_boundary
@layer
def nll_loss(
    x: Tree,
    target: Any,
    *,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    spec: Spec | None = None,
) -> Tree:
    """-weight[target] x[target], for logarithms x of probabilities: `cross_entropy` of what `log_softmax` gives.

    Arguments, reductions, specs and errors as `cross_entropy`; target are integers.
    Cost: if the classes are split, the workers that share a row exchange their numbers of classes, and sum two numbers
    per row; one all-reduce of two numbers for a mean; backward nothing.
    Adjoint of the derivative: -g weight[target] at x[target]. Source: as torch.nn.functional.nll_loss.

        >>> with spmd.Mesh(model=2):
        ...     x = spmd.put(np.log([[0.5, 0.25, 0.25]]), P(None, "model"))
        ...     spmd.functions.nll_loss(x, np.array([1])) / np.log(2.0)
        PartitionedArray(2., dtype=float64, spec=P())
    """
    where = "spmd.functions.nll_loss"
    o = _Options(where, reduction, ignore=_ignored(where, ignore_index))
    return _run(o, x, target, weight, spec, nll=True)


def _run(o: _Options, x, target, weight, spec: Spec | None, nll: bool = False) -> Any:
    check_reduction(o.where, o.reduction)
    x = floating_operand(o.where, "x", x)
    if not x.ndim:
        need = "(classes,), (batch, classes) or (batch, classes, ...)"
        raise SpecError.at(o.where, argument="x", got=describe(x), need=need, mend="logits for each class")
    operands = (x, target, weight)
    value = first_global(*operands)
    fun = _Classes(o, nll)
    if spec is not None:
        spec = check_block(o.where, x, spec)
        if isinstance(spec, Layout) and spec.spec is None:
            return fun.on_some(spec, *operands)
        return fun(spec, *operands)
    if value is None:
        return fun(None, *operands)
    own, c = global_value(x), min(1, x.ndim - 1)
    lies = layout_of_values(value if own is None else own, x.shape)
    target = target if hasattr(target, "ndim") else np.asarray(target)
    rest = [d for d in range(x.ndim) if d != c or target.ndim == x.ndim]
    out = lies if o.reduction != "none" else params_of(lies, [d for d in range(x.ndim) if d != c])
    specs = [lies, params_of(lies, rest), params_of(lies, (c,))]
    out = out if o.reduction == "none" else P()
    return run_by_specs(o.where, fun, lies, (x, target, weight), specs, out, value)


@dataclass(frozen=True)
class _Classes:
    """A loss of blocks with the classes in dimension 1."""

    options: _Options
    nll: bool

    def __call__(self, spec: Spec | None, x: Any, target: Any, weight: Any) -> Any:
        """Of blocks that lie by spec; None: of whole arrays."""
        c = min(1, x.ndim - 1)
        names = [()] * x.ndim if spec is None else names_of(spec_of(spec), x.ndim)
        batch = tuple(n for d, each in enumerate(names) if d != c for n in each)
        return self._of_rows(x, target, varied(weight, batch), tuple(names[c]), batch)

    def _of_rows(self, x: Any, target: Any, weight: Any, classes: tuple[str, ...], batch: tuple[str, ...]) -> Any:
        c, xp = min(1, x.ndim - 1), namespace(x)
        soft = getattr(target, "ndim", None) == x.ndim and not self.nll and dtype_of(target).kind not in "iub"
        options = self.options
        x = xp.moveaxis(x, c, -1)
        if self.nll:
            return _nll(options, x, target, weight, classes, batch)
        if soft:
            target = xp.moveaxis(target, c, -1)
            if options.smoothing:
                n = psum(x.shape[-1], classes) if classes else x.shape[-1]
                target = (1 - options.smoothing) * target + options.smoothing / max(int(n), 1)
            options = replace(options, ignore=None, smoothing=0.0)
        return _loss(options, x, target, weight, classes or None, batch or None)

    def on_some(self, layout: Layout, x: Any, target: Any, weight: Any) -> Any:
        """Of blocks on some of the workers: all classes of a row come to the first worker of its block of rows."""
        where, c, ndim = self.options.where, 1, x.ndim
        if ndim < 2:
            got, need = f"{layout}", "(batch, classes) or (batch, classes, ...) on some of the workers"
            raise LayoutError.at(where, argument="spec", got=got, need=need, mend="x[None], with a batch of one")
        rest = [d for d in range(ndim) if d != c]
        counts = [1 if d == c else len(cut) for d, cut in enumerate(layout.cuts)]
        cuts = [(layout.shape[c],) if d == c else cut for d, cut in enumerate(layout.cuts)]
        rows = Layout.grid(layout.shape, counts, layout.axes, params_of(layout, rest).workers, cuts)
        shape = list(rows.block_shape(here(where).index))
        shape[c] = layout.shape[c]  # also where there are no rows
        xp = namespace(x)
        soft = getattr(target, "ndim", None) == ndim
        x = xp.reshape(relaid(x, layout, rows), tuple(shape))
        if soft:
            layout_of_operand(where, "target", target, layout)
            target = xp.reshape(relaid(target, layout, rows), tuple(shape))
        return self._of_rows(x, target, varied(weight, tuple(layout.axes)), (), tuple(layout.axes))


def _nll(o: _Options, x, labels, weight, classes: tuple[str, ...], batch: tuple[str, ...]) -> Any:
    """The loss of rows of logarithms."""
    lib, xp = local(x, "cross_entropies"), namespace(x)
    labels, weight = _on_device_of(x, _labels(o, x, labels)), _class_weights(o, weight, x)
    if dtype_of(labels).kind not in "iu" or labels.shape != x.shape[:-1]:
        raise _wrong_labels(o, x, labels)
    offset, n = 0, x.shape[-1]
    if classes:
        require_varying(o.where, x, classes, "spec")
        layout = layout_of_operand(o.where, "spec", x, P(*[None] * (x.ndim - 1), classes))
        offset, n = layout.boxes[here(o.where).index][-1][0], layout.shape[-1]
    _check_classes(o, labels, n)
    own = in_dtype(labels, np.dtype(np.int64)) - offset
    chosen = lib.chosen(x, own)
    weights = lib.row_weights(labels, None, o.ignore, x)
    if weight is not None:
        factors = lib.weights_at(weight, _own_or_none(own, x.shape[-1]))
        chosen = chosen * in_dtype(factors, dtype_of(chosen))
        chosen, factors = (
            psum(xp.stack([in_dtype(chosen, dtype_of(factors)), factors]), classes)
            if classes
            else (
                chosen,
                factors,
            )
        )
        weights = factors if weights is None else factors * weights
    elif classes:
        chosen = psum(chosen, classes)
    loss = in_dtype(-chosen, dtype_of(x))
    if o.ignore is not None:
        loss = xp.where(labels == o.ignore, xp.zeros_like(loss), loss)
    return reduced(o.where, loss, weights, o.reduction, batch or None)
