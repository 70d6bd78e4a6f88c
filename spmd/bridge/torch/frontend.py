"""The frontend of tensors: the operations of functions of bodies that differ from those on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from types import FrameType
from typing import Any

import numpy as np
import torch

from spmd import frontends
from spmd.bridge.torch.autocast import run_under_autocast
from spmd.bridge.torch.function import apply, sized_in_graph, start_call
from spmd.bridge.torch.interop import array_dtype, array_of, storage_of, tensor_of, torch_dtype
from spmd.bridge.torch.tensor import Tensor, varied_copy, with_state
from spmd.bridge.torch.tensor_state import needs_grad, plain, state_of_tensor, summed_state
from spmd.bridge.torch.tie import tie
from spmd.bridge.torch.worker_context import context_of
from spmd.mesh import Worker
from spmd.operators.base import Collective
from spmd.operators.sums import Vary
from spmd.operators.varying import admitted
from spmd.state import State, state_of

__all__ = ["FRONTEND"]


class TorchFrontend:
    """The operations on tensors that functions of bodies need; see `spmd.frontends`."""

    def __init__(self):
        self._families: dict[str, Any] = {}

    @cached_property
    def namespace(self) -> Any:
        return import_module("spmd.bridge.torch.namespace")

    def local(self, family: str) -> Any:
        if family not in self._families:
            self._families[family] = import_module(f"spmd.bridge.torch.local.{family}")
        return self._families[family]

    run_layer = staticmethod(run_under_autocast)

    def begin(self, op: Collective, x: torch.Tensor, worker: Worker, frame: FrameType | None) -> Callable[[], Any]:
        context = context_of(worker)
        if not worker.tracked:
            return start_call(op, _countable(op, plain(x)), context, frame)
        state = state_of_tensor(x)
        input_state = admitted(op, x, state, worker)
        if input_state is not state and needs_grad(x):
            x = varied_copy(x, input_state)
        finish = start_call(op, _countable(op, plain(x)), context, frame)
        output_state = op.out_state(input_state)
        return lambda: with_state(finish(), output_state)

    def state(self, x: torch.Tensor) -> State:
        return state_of_tensor(x)

    def vary(self, x: torch.Tensor, names: Sequence[str], worker: Worker) -> torch.Tensor:
        if not worker.tracked:
            names = [n for n in names if n not in summed_state(x).varying]
            return apply(Vary(tuple(names)), plain(x), context_of(worker)) if names else x
        state = state_of_tensor(x) | state_of(names)
        if state is state_of_tensor(x):
            return x
        return varied_copy(x, state) if needs_grad(x) else with_state(x, state)

    def declare(self, x: torch.Tensor, names: Sequence[str], worker: Worker) -> torch.Tensor:
        if not worker.tracked:
            return x
        if isinstance(x, Tensor) and not x.replica:
            return self.vary(x, names, worker)
        state = state_of_tensor(x) | summed_state(x) | state_of(names)
        difference = getattr(x, "difference", None)
        if difference is not None and not state.varying.issuperset(difference.axes):
            raise difference.error()
        return with_state(x, state)

    def carrying(self, value: Any, state: State, tracked: bool) -> Any:
        """Invariant numbers stay numbers; arrays, and numbers that vary, become tensors."""
        if isinstance(value, int | float | complex) and not isinstance(value, np.generic):
            if not state.varying or not tracked:
                return value
        elif isinstance(value, np.generic) and not tracked:
            return value.item()
        x = value if isinstance(value, torch.Tensor) else tensor_of(np.array(value))
        return with_state(x, state) if tracked else x

    def dtype(self, x: torch.Tensor) -> np.dtype:
        return array_dtype(x.dtype)

    def tied(self, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        return tie(x, *(y for y in others if y.requires_grad))

    def differentiated(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.requires_grad else tie(x, x.new_zeros(0).requires_grad_())

    def where(self, mask: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.as_tensor(mask, device=x.device), x, y)

    def bare(self, x: torch.Tensor) -> torch.Tensor:
        return plain(x).detach()

    data = staticmethod(array_of)
    owner = staticmethod(storage_of)

    def cast(self, x: torch.Tensor, dtype: np.dtype) -> torch.Tensor:
        return x.to(torch_dtype(dtype))

    def sized(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return sized_in_graph(x, shape)

    def stack(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([*xs])

    def total(self, x: torch.Tensor, dims: tuple[int, ...], dtype: np.dtype | None = None) -> torch.Tensor:
        if dtype is None:
            return x.sum(dims) if dims else x
        return x.sum(dims, dtype=torch_dtype(dtype)) if dims else self.cast(x, dtype)

    def extremum(self, x: torch.Tensor, dims: tuple[int, ...], how: str) -> torch.Tensor:
        if not dims:
            return x
        return x.amax(dims) if how == "max" else x.amin(dims)


def _countable(op: Collective, x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64) if op.adds and x.dtype is torch.bool else x


FRONTEND = TorchFrontend()
frontends.register(torch.Tensor, FRONTEND)
