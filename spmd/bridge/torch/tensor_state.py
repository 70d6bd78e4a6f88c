"""The state that a tensor carries; the state, the local data and the gradient mode of any tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from spmd.bridge.torch.functorch import current_level, unwrapped_once
from spmd.state import State, state_of

INVARIANT = state_of(())
_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
no_overrides = torch._C.DisableTorchFunction
"""A context in which functions of torch call neither `__torch_function__` of subclasses nor modes."""

_TRACED = frozenset((FakeTensor, FunctionalTensor))

GRADIENT_SYNCS: dict[int, Callable[[], Any]] = {}
"""By id, the parameters whose gradients `spt.data_parallel` sums, in place of the adjoint of their `Vary`."""


class TensorWithState(torch.Tensor):
    """The base class of `Tensor`: a tensor and the axes along which it varies."""

    _state: State

    @property
    def state(self) -> State:
        """The axes along which it varies."""
        return self.__dict__.get("_state", INVARIANT)


def is_traced(x: torch.Tensor) -> bool:
    """Whether a tensor has no data yet, because a graph of it is compiled."""
    return type(x) in _TRACED


def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor without its state."""
    if type(x) in _TRACED:
        return x
    with no_overrides():
        return x.as_subclass(torch.Tensor)


def without_state(x: Any) -> Any:
    """A tensor without its state; other values as they are."""
    return plain(x) if isinstance(x, TensorWithState) else x


def is_partitioned(x: Any) -> bool:
    """Whether a tensor is a `PartitionedTensor`, of which each worker holds a block."""
    return getattr(type(x), "__spmd_partitioned__", False)


def block_nbytes(x: Any) -> int:
    """The bytes of a tensor, or of the largest of its blocks: the same on workers whose own blocks differ in size."""
    count = math.prod(map(max, x.block_layout.cuts)) if is_partitioned(x) else x.numel()
    return count * x.element_size()


def local_data(x: Any) -> torch.Tensor:
    """The data of a tensor on this worker: its block, or the tensor without its state."""
    return x._block if is_partitioned(x) else plain(x)


def state_of_tensor(x: torch.Tensor) -> State:
    """The state that a tensor carries; Invariant if it carries none."""
    return x.state if isinstance(x, TensorWithState) else INVARIANT


def summed_state(x: torch.Tensor) -> State:
    """The state that a parameter has where `spt.data_parallel` sums its gradients; Invariant for other tensors."""
    sync = gradient_sync_of(x)
    return INVARIANT if sync is None else sync.state


def gradient_sync_of(x: torch.Tensor) -> Any:
    """The `GradientSync` that sums the gradients of a parameter, or None."""
    reference = GRADIENT_SYNCS.get(getattr(x, "_block_of", id(x)))
    return None if reference is None else reference()


def needs_grad(x: torch.Tensor) -> bool:
    """Whether autograd records functions of x. A tensor that torch.func wraps counts if any level does."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    with no_overrides():
        if current_level() is not None:
            while not x.requires_grad and _functorch.is_functorch_wrapped_tensor(x):
                x = unwrapped_once(x)
        return x.requires_grad
