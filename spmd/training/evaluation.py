"""Means of metrics over all samples of all workers, with true counts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from spmd import device
from spmd.array import PartitionedArray
from spmd.autodiff import stop_gradient, tree
from spmd.autodiff.tracer import Array
from spmd.errors import DifferentiationError, LayoutError, MeshError, StateError, all_of, axes_of, describe
from spmd.frontends import frontend
from spmd.mesh import WORKER, Worker
from spmd.operators.apply import operate
from spmd.operators.base import named
from spmd.operators.sums import Sum
from spmd.operators.varying import block, varying
from spmd.state import State, state_of
from spmd.tracebacks import api_boundary

__all__ = ["evaluate"]

_WHERE = "spmd.training.evaluate"
_SINGLE = ""
"""The name of a metric of a function that returns no dict."""


class _Sums(NamedTuple):
    """Of one metric: the sum of its weighted values, and the sum of its weights."""

    values: Any
    weights: Any


@api_boundary
def evaluate(
    f: Callable[[Any], Any], batches: Iterable[Any], axis_name: str | Sequence[str] | None = None
) -> dict[str, Any] | Any:
    """The mean of each metric over all samples of all batches of all workers.

    f: takes a batch and gives a dict of metrics, or a single one. A metric is an array with one value per sample (its
    first dimension is as long as that of the batch, or a multiple of it), or a pair (values, weights), with weights per
    sample or per entry; never a mean over the batch, which is an error. Other dimensions stay.
    batches: such as `loader.epoch(0)`; in a body those of this worker. They may be uneven and empty, but each worker
    has at least one, because the metrics are known from it.
    axis_name: in a body, the axis or axes over which the samples are split. Outside of bodies it is left out: f takes
    and gives global arrays, or arrays of NumPy.

    Returns the dict of means, float64, or the single mean; Invariant over axis_name. Values are added up in float64, as
    a serial loop over all samples adds them. They are not differentiated: a metric of traced arrays is an error, and
    with torch, call it under `torch.no_grad()`, with losses of `reduction="none"`. Cost: in a body one all-reduce at
    the end, of two numbers per metric; of global arrays one for each sum.

    Raises LayoutError for metrics that have no value per sample, StateError for one that does not vary over axis_name,
    DifferentiationError under differentiation, MeshError without axis_name in a body.

        >>> x = np.arange(7.0)
        >>> def body():
        ...     batches = spmd.data.Loader(x, spmd.data.Sampler(x, 4, "data")).epoch(0)  # 2 + 1 + 1, and 1 + 1 + 1
        ...     return spmd.training.evaluate(lambda x: {"mean": x, "weighted": (x, x > 4)}, batches, "data")
        >>> with spmd.Mesh(data=3):
        ...     {name: float(value) for name, value in spmd.map(body, (), P())().items()}
        {'mean': 3.0, 'weighted': 5.5}
    """
    frame, worker = sys._getframe(1), WORKER.get()
    names = _axes(axis_name, worker)
    where = f"{_WHERE} of {getattr(f, '__name__', type(f).__name__)}"
    totals: dict[str, _Sums] | None = None
    for batch in batches:
        sums = _sums_of_batch(f(batch), batch, where, names, worker)
        totals = sums if totals is None else _added(totals, sums, where)
    if totals is None:
        raise LayoutError.at(
            where,
            argument="batches",
            got="no batch" + ("" if worker is None else f" on {worker.mesh.describe(worker.index)}"),
            need="a batch, which may be of no samples: the metrics are known from it",
            mend="spmd.data.Loader gives all workers equally many batches, empty ones too",
        )
    means = _means(totals, names, worker, frame)
    return means.get(_SINGLE, means)


def _axes(axis_name: str | Sequence[str] | None, worker: Worker | None) -> tuple[str, ...]:
    if worker is not None and axis_name is not None:
        return worker.mesh.names(axis_name, _WHERE)
    if worker is None and axis_name is None:
        return ()
    raise MeshError.at(
        _WHERE,
        argument="axis_name",
        got=f"none, in a body on {worker.mesh}" if worker else f"{axis_name!r}, outside of any body",
        need="the axes over which samples are split, in bodies; none elsewhere, where arrays are whole",
        mend=f"axis_name={next(iter(worker.mesh.axes), ())!r}" if worker else "leave it out",
    )


def _sums_of_batch(
    result: Any, batch: Any, where: str, names: tuple[str, ...], worker: Worker | None
) -> dict[str, _Sums]:
    """The sums over the samples of one batch, by the names of the metrics in one order."""
    metrics = dict(result) if isinstance(result, Mapping) else {_SINGLE: result}
    samples = _samples(batch)
    sums = {}
    for name in sorted(metrics, key=str):
        argument = f"result{f'[{name!r}]' if isinstance(result, Mapping) else ''} of f"
        metric = metrics[name]
        values, weights = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric, None)
        _check_not_traced((values, weights), where, argument)
        _check_values(values, samples, where, argument)
        if worker is not None and worker.tracked:
            _check_state([x for x in (values, weights) if x is not None], names, where, argument)
        sums[name] = _sums(_data(values), None if weights is None else _data(weights), where, argument)
    return sums


def _samples(batch: Any) -> int | None:
    """The number of samples of a batch, by its first array; None if it has none."""
    shapes = (getattr(leaf, "shape", None) for leaf in tree.leaves(batch))
    return next((shape[0] for shape in shapes if shape), None)


def _check_not_traced(arrays: Iterable[Any], where: str, argument: str) -> None:
    for x in arrays:
        if type(x) is Array and x.tape is not None:
            raise DifferentiationError.at(
                where,
                argument=argument,
                got=describe(x),
                need="an array that is not differentiated: means of metrics have no gradient",
                mend='spmd.mean(errors, "data") as a loss, spmd.training.accumulate for one of many batches; '
                "spmd.stop_gradient(params) where metrics are watched inside of a loss",
            )


def _check_values(values: Any, samples: int | None, where: str, argument: str) -> None:
    """Raise unless there is a value for each sample."""
    shape = getattr(values, "shape", ())
    if shape and (samples is None or shape[0] == samples or (samples and shape[0] and shape[0] % samples == 0)):
        return
    raise LayoutError.at(
        where,
        argument=argument,
        got=describe(values) + ("" if samples is None else f", for a batch of {samples} samples"),
        need="a value per sample: means of batches count small batches and empty shares as much as large ones",
        mend="leave out the mean (reduction='none' of torch's losses): evaluate takes it over all samples of all "
        "workers. Weights of 0 leave out samples: (values, weights)",
    )


def _state(x: Any) -> State:
    """The state of a metric in a body; bare data counts as Invariant."""
    other = frontend(x)
    if other is not None:
        return other.state(x)
    return x.state if type(x) is Array and x.state is not None else state_of(())


def _check_state(arrays: Sequence[Any], names: tuple[str, ...], where: str, argument: str) -> None:
    """Raise unless a metric varies over these axes and no others."""
    over = set().union(*(_state(x).varying for x in arrays))
    if over == set(names):
        return
    missing, more = [n for n in names if n not in over], sorted(over - set(names))
    raise StateError.at(
        where,
        argument=argument,
        got=f"{describe(arrays[0])}, which "
        + (f"varies over {axes_of(more)} too" if more else "every worker has alike"),
        need=f"an array that varies over {all_of(names) or 'no axis'}, over which samples are split",
        mend=f"batches that vary, as those of spmd.data.Loader, or spmd.varying(x, {missing[0]!r}) of bare data"
        if missing
        else f"spmd.psum or spmd.all_gather(..., to='invariant') over {all_of(more)} in f, or name these axes too",
    )


def _data(x: Any) -> Any:
    """An array without state or history: a global array, or one of NumPy or CuPy."""
    other = frontend(x)
    if other is not None:
        return other.data(other.bare(x))
    x = stop_gradient(x)
    if type(x) is PartitionedArray or device.on_device(x):
        return x
    return np.asarray(x) if WORKER.get() is None else block(x)


def _sums(values: Any, weights: Any, where: str, argument: str) -> _Sums:
    """The sum of the values and of the weights over the first dimension, which stays: so sums of global arrays are left
    unreduced until the end."""
    wide = np.complex128 if values.dtype.kind == "c" else np.float64
    if weights is None:
        return _Sums(np.sum(values, axis=0, dtype=wide, keepdims=True), np.full(1, float(values.shape[0])))
    if weights.shape not in (values.shape, values.shape[:1]):
        raise LayoutError.at(
            where,
            argument=argument,
            got=f"weights of shape {list(weights.shape)} for values of shape {list(values.shape)}",
            need=f"a weight per sample, of shape {list(values.shape[:1])}, or per entry",
            mend="weights.reshape(values.shape)",
        )
    spread = np.reshape(weights, weights.shape + (1,) * (values.ndim - weights.ndim))
    total = np.sum(values.astype(wide) * spread, axis=0, dtype=wide, keepdims=True)
    return _Sums(total, np.sum(weights, axis=0, dtype=np.float64, keepdims=True))


def _added(totals: dict[str, _Sums], sums: dict[str, _Sums], where: str) -> dict[str, _Sums]:
    """The sums so far and those of one more batch."""
    before, now = [{k: x.values.shape[1:] for k, x in each.items()} for each in (totals, sums)]
    if before != now:
        raise LayoutError.at(
            where,
            argument="result of f",
            got=f"metrics of shapes {now}",
            need=f"{before}, as of the first batch, without the dimension of samples",
            mend="the same metrics of each batch, empty ones too",
        )
    return {k: _Sums(x.values + sums[k].values, x.weights + sums[k].weights) for k, x in totals.items()}


def _means(totals: dict[str, _Sums], names: tuple[str, ...], worker: Worker | None, frame: FrameType) -> dict[str, Any]:
    """The means, of the sums of all workers: all of them as one array, so that one message has them."""
    sums = [x for pair in totals.values() for x in pair]
    joined = np.concatenate([np.ravel(device.to_host(x)) for x in sums])
    if type(joined) is PartitionedArray:
        joined = joined.numpy()
    if worker is not None and names:
        # Metrics are part of the call: workers that have other ones are an error.
        name = f"evaluate[{', '.join(totals)}]" if [*totals] != [_SINGLE] else "evaluate"
        joined = operate(named(name, Sum, names), varying(joined, names), frame)
    parts, start = [], 0
    for x in sums:
        shape = x.shape[1:]
        parts.append(joined[start : start + math.prod(shape)].reshape(shape))
        start += math.prod(shape)
    real = [x.values.dtype.kind != "c" for x in totals.values()]
    means = [a / b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return {k: x.real if is_real else x for k, x, is_real in zip(totals, means, real, strict=True)}
