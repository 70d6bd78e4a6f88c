"""What the stages of a pipeline do with arrays of a body: forward on a tape, backward by its pullback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.split_pullback import split_pullback_of
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transforms import check_scalar, pullback_of
from spmd.device import to_host
from spmd.mesh import WORKER, Worker
from spmd.operators.at_root import decoded, encoded
from spmd.operators.messages import packed, unpacked
from spmd.operators.reduce import psum
from spmd.operators.root import Rooted
from spmd.operators.varying import varying
from spmd.state import REPLICAS, State, state_of
from spmd.training.pipelines.arguments import WHERE, check_untraced
from spmd.training.sample_weights import SampleWeights
from spmd.transport.handles import read_only

__all__ = ["ArrayStages", "axes_of", "spread"]

Params = Sequence[Any]


def axes_of(batch: Any) -> tuple[str, ...]:
    """The axes along which a batch varies."""
    leaves = tree.flatten(batch)[0]
    return tuple(sorted({n for x in leaves if type(x) is Array and x.state is not None for n in x.state.varying}))


def spread(x: Any, axes: Sequence[str]) -> Any:
    """A tree of arrays and Rooted values as what each worker has of its own along some axes."""
    return tree.map(lambda leaf: varying(leaf.block if type(leaf) is Rooted else leaf, tuple(axes)), x)


class ArrayStages:
    """The actions of the stages of one worker, in one step.

    stages: the functions of all stages; loss: of the last one's output, if there is one. params: the parameters of this
    worker's stages, by stage; shared: those that all stages get. inputs, targets: the microbatches; weights: of their
    losses. worker: acts alone along axes, those of the pipeline. learns: whether
    gradients are wanted; splits: those of parameters later; differentiates_input: that of the input too.
    """

    def __init__(
        self,
        stages: Sequence[Callable[..., Any]],
        loss: Callable[..., Any] | None,
        worker: Worker,
        axes: tuple[str, ...],
    ):
        self.stages, self.loss, self.worker, self.axes = stages, loss, worker, axes
        self.params: dict[int, Any] = {}
        self.shared: tuple[Any, ...] = ()
        self.inputs: Sequence[Any] = ()
        self.targets: Sequence[Any] = ()
        self.weights: SampleWeights | None = None
        self.learns, self.splits = True, False
        self.differentiates_input = False
        self.total: Any = None
        self.outputs: dict[int, Any] = {}
        self.gradients: dict[int, Any] = {}
        self.shared_gradients: tuple[Any, ...] = ()
        self.input_gradients: dict[int, Any] = {}

    def _acted(self, microbatch: int, work: Callable[[], Any]) -> Any:
        assert self.weights is not None
        with self.weights.quiet(microbatch):
            return self.alone(work)

    def alone(self, work: Callable[[], Any]) -> Any:
        """work(), of which the other workers of the pipeline know nothing."""
        worker, replicas = WORKER.set(self.worker), REPLICAS.set(False)
        try:
            return work()
        finally:
            REPLICAS.reset(replicas)
            WORKER.reset(worker)

    def forward(self, stage: int, microbatch: int, value: Any) -> tuple[Any, Any]:
        x = self.inputs[microbatch] if stage == 0 else value
        return self._acted(microbatch, lambda: self._forward(stage, microbatch, x))

    def _forward(self, stage: int, k: int, x: Any) -> tuple[Any, Any]:
        last = stage == len(self.stages) - 1
        if not self.learns:
            y = self.stages[stage](self.params[stage], x, *self.shared)
            check_untraced(y, "stages")
            if last:
                self.outputs[k] = y
            return y, None

        def of(x: Any, params: Any, shared: tuple[Any, ...]) -> Any:
            y = self.stages[stage](params, x, *shared)
            return self._loss(y, k) if last else tree.map(self._handed_on, y)

        parameters = (self.params[stage], self.shared)
        if stage > 0 or self.differentiates_input:
            y, pull = (
                split_pullback_of(of, (x,), parameters) if self.splits else pullback_of(of, (x, *parameters), once=True)
            )
        else:
            of_parameters = partial(of, x)
            y, pull = (
                split_pullback_of(of_parameters, (), parameters)
                if self.splits
                else pullback_of(of_parameters, parameters, once=True)
            )
        check_untraced(y, "stages")
        if not last:
            return y, (pull, None)
        self.total = y if self.total is None else self.total + y
        return None, (pull, y)

    def _handed_on(self, leaf: Any) -> Any:
        """A leaf of what a stage returns, in the state in which its gradient comes back."""
        (leaf,) = encoded(leaf, self.worker, WHERE, "stages")[1]
        return varying(leaf, self.axes)

    def _loss(self, y: Any, k: int) -> Any:
        """The loss of a microbatch, as it counts."""
        assert self.loss is not None
        assert self.weights is not None
        targets = () if self.targets[k] is None else (self.targets[k],)
        value = self.loss(y, *targets)
        check_scalar(value, WHERE, False)
        return self.weights.of(value, k)

    def backward(self, stage: int, microbatch: int, kept: Any, gradient: Any) -> tuple[Any, Any]:
        return self._acted(microbatch, lambda: self._backward(stage, microbatch, kept, gradient))

    def _backward(self, stage: int, k: int, kept: Any, gradient: Any) -> tuple[Any, Any]:
        pull, y = kept
        if y is not None:
            gradient = np.ones_like(y)
        if self.splits:
            of_input, later = pull(gradient)
        else:
            (*of_input, own, shared), later = pull(gradient), None
            self._add(stage, own, shared)
        if stage == 0 and of_input:
            self.input_gradients[k] = of_input[0]
        return (of_input[0] if of_input else None), later

    def _add(self, stage: int, own: Any, shared: tuple[Any, ...]) -> None:
        before = self.gradients.get(stage)
        self.gradients[stage] = own if before is None else _sum(before, own)
        self.shared_gradients = _sum(self.shared_gradients, shared) if self.shared_gradients else shared

    def weight(self, stage: int, microbatch: int, kept: Any) -> None:
        self._acted(microbatch, lambda: self._add(stage, *kept()))

    def reduce(self, axes_by_stage: dict[int, Any]) -> None:
        """Add up the gradients of parameters over axes along which the batch varies and they do not."""

        def work() -> None:
            for stage, axes in axes_by_stage.items():
                leaves, treedef = tree.flatten(self.gradients[stage])
                summed = [psum(g, names) if names else g for g, names in zip(leaves, axes, strict=True)]
                self.gradients[stage] = tree.unflatten(treedef, summed)

        self.alone(work)

    def pack(self, value: Any) -> np.ndarray:
        structure, leaves = encoded(value, self.worker, WHERE, "stages")
        states = [sorted(x.state.varying) if type(x) is Array and x.state is not None else [] for x in leaves]
        return packed([np.asarray(to_host(value_of(x))) for x in leaves], [structure, states])

    def unpack(self, message: np.ndarray) -> Any:
        arrays, (structure, states) = unpacked(message)
        held = (self._held(x, state_of(axes)) for x, axes in zip(arrays, states, strict=True))
        return decoded(structure, held)

    def _held(self, block: np.ndarray, state: State) -> Any:
        """An array of the body with this block."""
        places = self.worker.mesh.places
        block = read_only(block) if places is None else places.own(read_only(block), self.worker.index)
        return self.worker.carrying(block, state)


def _sum(first: Any, second: Any) -> Any:
    return tree.map(lambda a, b: a + b, first, second)
