"""Parameters of several stages that are one, such as an embedding that the first and the last stage use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from spmd.autodiff.tracer import value_of
from spmd.bridge.torch.pipelines.values import WHERE, Value, message_of, value_of_message
from spmd.bridge.torch.tensor_state import local_data
from spmd.bridge.torch.worker_context import device_of
from spmd.errors import SpecError
from spmd.mesh import Worker, here
from spmd.operators.move import move
from spmd.operators.root import Rooted
from spmd.training.pipelines.schedules import Schedule

__all__ = ["Tie"]


class Tie:
    """One parameter that several stages hold.

    holders: stages and names. All workers of the pipeline call the same methods; those that hold nothing send nothing.
    """

    def __init__(
        self,
        holders: Sequence[tuple[int, str]],
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        axes: tuple[str, ...],
    ):
        self.axes = axes
        self.own: list[tuple[int, nn.Parameter | None]] = []
        for stage, name in holders:
            if not 0 <= stage < schedule.stages:
                raise self._unknown(stage, name, f"a stage from 0 to {schedule.stages - 1}")
            p = None
            if stage in modules:
                try:
                    p = modules[stage].get_parameter(name)
                except AttributeError:
                    names = ", ".join(n for n, _ in modules[stage].named_parameters())
                    raise self._unknown(stage, name, f"a parameter of the stage: {names}") from None
            self.own.append((schedule.worker_of(stage), p))
        self.before: list[torch.Tensor | None] = []

    def _unknown(self, stage: int, name: str, need: str) -> SpecError:
        return SpecError.at(
            WHERE,
            argument="tied",
            got=f"{(stage, name)}",
            need=need,
            mend='tied=[[(0, "embedding.weight"), (3, "head.weight")]]',
        )

    @property
    def copies(self) -> list[nn.Parameter]:
        """This worker's parameters beside the first of all."""
        first = self.own[0][1]
        return [p for _, p in self.own[1:] if p is not None and p is not first]

    def equalize(self, worker: Worker) -> None:
        """Give all the value of the first."""
        with torch.no_grad():
            first, p = self.own[0]
            value = None if p is None else local_data(p).detach()
            for k in _distinct(self.own)[1:]:
                target, own = self.own[k]
                arrived = self._moved(value, first, target)
                if own is None:
                    continue
                if arrived.shape != local_data(own).shape:
                    raise SpecError.at(
                        WHERE,
                        argument="tied",
                        got=f"parameters of shapes {[*arrived.shape]} and {[*local_data(own).shape]}",
                        need="parameters of one shape",
                        mend="tie weights that lie the same way: nn.Embedding(n, d) and nn.Linear(d, n)",
                    )
                local_data(own).detach().copy_(arrived)

    def set_aside(self) -> None:
        """Leave `.grad` for the gradients of one step alone."""
        self.before = []
        for _, p in self.own:
            self.before.append(None if p is None else p.grad)
            if p is not None:
                p.grad = None

    def add_up(self, worker: Worker) -> None:
        """Give all the sum of their gradients, added to what they had before; nothing where none has one."""
        with torch.no_grad():
            (first, p), places = self.own[0], _distinct(self.own)[1:]
            for k in places:
                arrived = self._moved(self._gradient(k), self.own[k][0], first)
                if p is not None and arrived is not None:
                    _gradient_of(p).add_(arrived)
            total = self._gradient(0)
            for k in places:
                target, own = self.own[k]
                arrived = self._moved(total, first, target)
                if own is None:
                    continue
                if arrived is None:
                    own.grad = None
                else:
                    _gradient_of(own).copy_(arrived)
            done: set[int] = set()
            for (_, p), before in zip(self.own, self.before, strict=True):
                if p is not None and before is not None and id(p) not in done:
                    done.add(id(p))
                    p.grad = before if p.grad is None else p.grad.add_(before)

    def _gradient(self, k: int) -> torch.Tensor | None:
        """The gradient of a holder on this worker; None where a place before has named the parameter."""
        p = self.own[k][1]
        if p is None or p.grad is None or any(p is q for _, q in self.own[:k]):
            return None
        return local_data(p.grad)

    def _moved(self, x: torch.Tensor | None, source: int, target: int) -> Any:
        """A tensor of the worker at `source`, as the one at `target` gets it."""
        if source == target:
            return x
        block = np.zeros(0, np.uint8) if x is None else message_of(Value(0, [x.detach()], [False]))
        held = Rooted(block, block.shape, block.dtype, self.axes, source)
        arrived = move(held, self.axes, source, target).block
        if not arrived.size:
            return None
        return value_of_message(np.array(value_of(arrived)), device_of(here(WHERE))).tensors[0]


def _gradient_of(p: nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter on this worker; zeros where there was none."""
    if p.grad is None:
        p.grad = torch.zeros_like(p, requires_grad=False)
    return local_data(p.grad)


def _distinct(own: Sequence[tuple[int, Any]]) -> list[int]:
    """The places of holders on other workers, or other parameters on the first one."""
    return [k for k, (worker, p) in enumerate(own) if k == 0 or worker != own[0][0] or p is not own[0][1] or p is None]
