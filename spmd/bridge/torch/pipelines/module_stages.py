"""What the stages of a pipeline do with modules: forward, and backward by autograd."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from spmd.bridge.torch.pipelines.later_weights import LaterWeights
from spmd.bridge.torch.pipelines.values import (
    WHERE,
    Entry,
    Value,
    entered,
    message_of,
    structured,
    value_of_message,
    value_of_output,
)
from spmd.bridge.torch.tensor import backward_scope, with_state
from spmd.bridge.torch.tensor_state import plain
from spmd.bridge.torch.worker_context import device_of
from spmd.errors import StateError, describe
from spmd.mesh import WORKER
from spmd.operators.at_root import LoneWorker
from spmd.operators.reduce import pmax
from spmd.state import REPLICAS, state_of
from spmd.training.sample_weights import SampleWeights

__all__ = ["ModuleStages", "is_real"]


class _Kept(NamedTuple):
    """What the backward of a stage needs: where its inputs entered, and where its graph ends."""

    entry: Entry | None
    edges: list[GradientEdge]


class ModuleStages:
    """The actions of the stages of one worker, in one step.

    modules: of this worker, by stage; last: the number of the last stage of all. worker: acts alone along the axes of
    the pipeline. learns: whether gradients are computed, of the input too with differentiates_input.
    splits_backward: whether those of parameters come later. inputs, targets, weights: of microbatches, with the weights
    of their losses. seed: of the random numbers of this step.
    """

    def __init__(self, modules: Mapping[int, nn.Module], last: int, worker: LoneWorker):
        self.modules, self.last, self.worker = modules, last, worker
        self.loss: Callable[..., Any] | None = None
        self.scale: Callable[[Any], Any] | None = None
        self.inputs: Sequence[Any] = ()
        self.targets: Sequence[Any] = ()
        self.weights: SampleWeights
        self.learns = self.splits_backward = self.differentiates_input = False
        self.seed: int | None = None
        self.total: torch.Tensor | None = None
        self.outputs: dict[int, Value] = {}
        self.input_gradients: dict[int, Any] = {}

    def alone(self, work: Callable[[], Any]) -> Any:
        """work(), of which the other workers of the pipeline know nothing."""
        worker, replicas = WORKER.set(self.worker), REPLICAS.set(False)
        try:
            return work()
        finally:
            REPLICAS.reset(replicas)
            WORKER.reset(worker)

    def forward(self, stage: int, microbatch: int, value: Value | None) -> tuple[Value | None, Any]:
        return self.alone(lambda: self._forward(stage, microbatch, value))

    def _forward(self, stage: int, k: int, value: Value | None) -> tuple[Value | None, Any]:
        if value is None:
            value, _ = value_of_output(self.inputs[k])
            value = value._replace(needs=[self.differentiates_input and is_real(x) for x in value.tensors])
        if self.seed is not None:
            start = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, stage, k)).encode()))
            torch.set_rng_state(start.get_state())
        with torch.set_grad_enabled(self.learns):
            x, entry = entered(value, self.learns)
            y = self.modules[stage](x)
            if stage < self.last:
                result, ends = value_of_output(y)
            elif self.learns:
                result, ends = None, self._ends_of_loss(y, k)
            else:
                self.outputs[k], _ = value_of_output(y)
                return None, None
        return result, _Kept(entry, [get_gradient_edge(x) for x in ends]) if self.learns else None

    def _ends_of_loss(self, y: Any, k: int) -> list[torch.Tensor]:
        """Add the loss of a microbatch, as it counts, to the total."""
        assert self.loss is not None
        targets = () if self.targets[k] is None else (self.targets[k],)
        value = self.loss(y, *targets)
        if not isinstance(value, torch.Tensor) or value.ndim:
            raise StateError.at(
                WHERE,
                argument="loss",
                got=f"a function that returns {describe(value)}",
                need="the loss of a microbatch, a tensor without dimensions",
                mend='torch.nn.functional.mse_loss; reduction="sum" if it is a sum over entries',
            )
        value = self.weights.of(value, k)
        self.total = value.detach() if self.total is None else self.total + value.detach()
        if self.scale is not None:
            value = self.scale(value)
        return [value] if value.requires_grad else []

    def backward(
        self, stage: int, microbatch: int, kept: _Kept, gradient: Value | None
    ) -> tuple[Value | None, LaterWeights | None]:
        return self.alone(lambda: self._backward(stage, microbatch, kept, gradient))

    def _backward(
        self, stage: int, k: int, kept: _Kept, gradient: Value | None
    ) -> tuple[Value | None, LaterWeights | None]:
        entry, edges = kept
        if gradient is None:
            gradients: list[Any] = [None] * len(edges)
        else:
            given = _given_gradients(gradient)
            edges = [edge for edge, g in zip(edges, given, strict=True) if g is not None]
            gradients = [g for g in given if g is not None]
        later = None
        if self.splits_backward:
            node, anchor = (None, None) if entry is None else (entry.node, entry.anchor)
            later = LaterWeights(edges, gradients, node, anchor)
            later.agree(self._highest)
            later.input()
        elif edges:
            with backward_scope():
                torch.autograd.backward(edges, gradients)  # type: ignore[arg-type]
        result = _value_of_gradients([] if entry is None else entry.take())
        if stage == 0 and self.differentiates_input:
            self.input_gradients[k] = self._gradients_of_input(k, result)
        return result, later

    def _highest(self, number: int) -> int:
        """The highest number of the workers of a stage."""
        axes = tuple(n for n, size in self.worker.mesh.axes.items() if n not in self.worker.axes and size > 1)
        if not axes:
            return number
        own = torch.tensor(number, device=device_of(self.worker))
        return int(plain(pmax(with_state(own, state_of(axes)) if self.worker.tracked else own, axes)))

    def _gradients_of_input(self, k: int, gradients: Value) -> Any:
        """The gradients of a microbatch, in its structure: zeros of what is not used, and integers as they are."""
        value, _ = value_of_output(self.inputs[k])
        given = iter(_given_gradients(gradients))
        found = [next(given, None) if is_real(x) else x for x in value.tensors]
        pairs = zip(found, value.tensors, strict=True)
        return structured(value.structure, [torch.zeros_like(x) if g is None else g for g, x in pairs])

    def weight(self, stage: int, microbatch: int, kept: LaterWeights) -> None:
        self.alone(kept.weights)

    def pack(self, value: Value) -> np.ndarray:
        return message_of(value)

    def unpack(self, message: np.ndarray) -> Value:
        return value_of_message(message, device_of(self.worker))


def is_real(x: torch.Tensor) -> bool:
    """Whether a tensor may be differentiated."""
    return x.is_floating_point() or x.is_complex()


def _value_of_gradients(gradients: Sequence[torch.Tensor | None]) -> Value:
    """Gradients, of which some are missing."""
    given = [g for g in gradients if g is not None]
    return Value([g is not None for g in gradients], given, [False] * len(given))


def _given_gradients(value: Value) -> list[torch.Tensor | None]:
    """The gradients that `_value_of_gradients` put together."""
    tensors = iter(value.tensors)
    return [next(tensors) if given else None for given in value.structure]
