"""Gradients of minibatches that are too large for memory, microbatch by microbatch, with one sum over workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import tracer, tree
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transforms import check_scalar, pullback_of
from spmd.errors import LayoutError, MeshError, SpecError, describe
from spmd.layout import block_sizes, offsets
from spmd.mesh import WORKER
from spmd.operators.gradient_buckets import COLLECTED, CollectedSums
from spmd.optim.numbers import varying_axes
from spmd.tracebacks import api_boundary
from spmd.training.sample_weights import SampleWeights

__all__ = ["accumulate"]

_WHERE = "spmd.training.accumulate"


@api_boundary
def accumulate(
    loss: Callable[..., Any],
    microbatches: int,
    *,
    reduction: str = "mean",
    axis_name: str | Sequence[str] | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `value_and_grad(loss)`, of a minibatch in so many parts, one after the other: memory for one part is enough.

    loss: a function (params, *batch) of arrays whose first dimensions are the samples; numbers, None and arrays without
    dimensions are passed as they are. reduction: "mean" or "sum" of the samples, as loss takes it: the value and the
    gradient are those of the whole minibatch, also if the parts differ in length. axis_name: for "mean" the axes over
    which loss takes it, () for the worker's own samples. None: a result that is one value along the axes that split the
    samples is a mean over all of them, as `spmd.mean(errors, "data")` is; one that varies, over the worker's own; it
    must be said where parameters vary over these axes too. has_aux: loss gives (value, aux); the result is
    ((value, list of aux), gradient). Of a mean, parts without samples on any worker are left out.

    In a body the samples of each worker are divided, and the gradients have the states that `value_and_grad` gives: at
    Invariant parameters they are sums, at `spmd.pvary(params, axis_name)` contributions, as `spmd.optim.shard` takes
    them. Cost: for all parts together one sum of the gradients, as `value_and_grad` has it; for "mean" one all-reduce
    of the counts, two if loss takes it over only some of the axes that split the samples; and the collectives in loss,
    once for each part: so are the sums owed by what loss makes of Invariant parameters alone. Differentiated again,
    each part sends its sums. Raises LayoutError for samples of different numbers, SpecError for other options,
    StateError if axis_name must be said, MeshError for global arrays outside of bodies. Source: Huang et al., "GPipe:
    Efficient training of giant neural networks", NeurIPS 2019.

        >>> def step(w, x):
        ...     return spmd.training.accumulate(lambda w, x: spmd.mean((w * x) ** 2, "data"), 2)(w, x)
        >>> with spmd.Mesh(data=2), spmd.ledger() as log:
        ...     spmd.map(step, in_specs=(P(), P("data")), out_specs=P())(np.ones(()), np.arange(5.0))
        (PartitionedArray(6., dtype=float64, spec=P()), PartitionedArray(12., dtype=float64, spec=P()))
    """
    if not isinstance(microbatches, int | np.integer) or isinstance(microbatches, bool) or microbatches < 1:
        raise SpecError.at(
            _WHERE,
            argument="microbatches",
            got=describe(microbatches),
            need="the number of parts, an integer of at least 1",
            mend="accumulate(loss, 4)",
        )
    if reduction not in ("mean", "sum"):
        raise SpecError.at(
            _WHERE,
            argument="reduction",
            got=repr(reduction),
            need='"mean" or "sum", whichever loss takes over the samples',
            mend='reduction="mean"',
        )

    def value_and_gradient(params: Any, *batch: Any) -> tuple[Any, Any]:
        parts, sizes, axes = _divided(batch, int(microbatches), params)
        weights = SampleWeights(_WHERE, "axis_name", sizes, axes, axis_name, params) if reduction == "mean" else None
        run = _Accumulation(loss, has_aux, params)
        for k, part in enumerate(parts if weights is None else parts[: weights.parts_with_samples()]):
            with nullcontext() if weights is None else weights.quiet(k):
                run.add(part, weights, k)
        return (run.value, run.auxes) if has_aux else run.value, run.gradient()

    return api_boundary(value_and_gradient)


class _Accumulation:
    """The value and the gradient of the parts so far."""

    def __init__(self, loss: Callable[..., Any], has_aux: bool, params: Any):
        self.loss, self.has_aux, self.params = loss, has_aux, params
        self.value: Any = None
        self.auxes: list[Any] = []
        self.leaves: list[Any] | None = None
        self.collected = CollectedSums()
        tracer.mixing.differentiates(tree.leaves(params))

    def add(self, part: tuple[Any, ...], weights: SampleWeights | None, k: int) -> None:
        def weighted(params: Any) -> tuple[Any, Any]:
            out = self.loss(params, *part)
            value, aux = out if self.has_aux else (out, None)
            check_scalar(value, _WHERE, False)
            if type(value) is Array:
                tracer.mixing.differentiated(value)
            return value if weights is None else weights.of(value, k), aux

        value, pull, aux = pullback_of(weighted, (self.params,), has_aux=True, once=True)
        leaves = [node for node in pull.tape.nodes if node.prim is None]
        self.collected.leaves = {node: j for j, node in enumerate(leaves)}
        token = COLLECTED.set(self.collected)
        try:
            (gradient,) = pull(np.ones_like(value))
        finally:
            COLLECTED.reset(token)
        self.value = value if self.value is None else self.value + value
        self.auxes.append(aux)
        terms = tree.leaves(gradient)
        self.leaves = terms if self.leaves is None else list(map(_added, self.leaves, terms))

    def gradient(self) -> Any:
        found, structure = tree.flatten(self.params)
        gradients = self.leaves or found
        worker = WORKER.get()
        if self.collected.terms and worker is not None:
            for number, sums in self.collected.totals(worker).items():
                for total in sums:
                    gradients[number] = _added(gradients[number], Array(total, gradients[number].state))
        return tree.unflatten(structure, gradients)


def _added(old: Any, new: Any) -> Any:
    """old + new, where one of them may be the zero that stands for a sum to come."""
    if _is_nothing(new):
        return old
    return new if _is_nothing(old) else old + new


def _is_nothing(x: Any) -> bool:
    value = x.value if type(x) is Array else x
    return type(value) is np.ndarray and value.size > 1 and not any(value.strides)


def _divided(batch: Any, count: int, params: Any) -> tuple[list[Any], tuple[int, ...], frozenset[str]]:
    """The parts of the samples, their lengths, and the axes along which samples differ."""
    paths, leaves, structure = tree.flatten_with_path(batch, none_is_leaf=True)
    for x in (*leaves, *tree.leaves(params)):
        if type(value_of(x)) is PartitionedArray:
            raise MeshError.at(
                _WHERE,
                got=f"{describe(x)}, outside of bodies",
                need="a call in a body, which divides the samples of each worker",
                mend='spmd.map(spmd.training.accumulate(loss, 4), in_specs=(P(), P("data")), out_specs=P())',
            )
    lengths = {path: x.shape[0] for path, x in zip(paths, leaves, strict=True) if getattr(x, "shape", ())}
    if len(set(lengths.values())) != 1:
        raise LayoutError.at(
            _WHERE,
            argument="batch",
            got=", ".join(f"{n} in batch{path}" for path, n in lengths.items()) or "no array of samples",
            need="arrays of equally many samples in the first dimension",
            mend="accumulate(loss, 4)(params, x, y), of inputs and targets of the same samples",
        )
    (n,) = set(lengths.values())
    sizes = block_sizes(n, count if WORKER.get() is not None else max(1, min(count, n)))
    parts = [
        tree.unflatten(structure, [x[a:b] if getattr(x, "shape", ()) else x for x in leaves])
        for a, b in pairwise(offsets(sizes))
    ]
    axes = frozenset().union(*[varying_axes(x) for x in leaves])
    return parts, sizes, axes
