"""Rows that go to experts and come back, on one block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from spmd.bridge.torch.function import recorded_calls
from spmd.bridge.torch.interop import array_of
from spmd.device import to_host
from spmd.kernels.cpu.chunks import accurate
from spmd.mesh import Worker
from spmd.operators.partial_comm import whole_comm

__all__ = [
    "apart",
    "constants",
    "differentiated_by",
    "is_trained",
    "logsumexp",
    "nothing",
    "parts",
    "rows",
    "scores",
    "taking_part",
    "weighted_sums",
]


def scores(gate: torch.Tensor) -> np.ndarray:
    """The values of a tensor on the host, in a dtype that NumPy orders."""
    bare = np.asarray(to_host(array_of(gate)))
    return bare.astype(accurate(bare.dtype), copy=False)


def rows(x: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
    """x[indices], along the first dimension."""
    return x.index_select(0, torch.as_tensor(indices, device=x.device))


def parts(x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The rows of x in parts of these sizes."""
    return list(x.split(list(sizes))) if sizes else []


def weighted_sums(y: torch.Tensor, weights: torch.Tensor, choices: np.ndarray, tokens: int, k: int) -> torch.Tensor:
    """The sum of the rows of each token, times their weights. choices: token * k + choice, for each row."""
    y = y * weights.unsqueeze(-1)
    if y.device.type == "cpu":
        indices = torch.from_numpy(choices // k)
        return y.new_zeros((tokens, *y.shape[1:])).index_add(0, indices, y)
    # Sums by index_add are in no fixed order on a GPU.
    spread = y.new_zeros((tokens * k, *y.shape[1:])).index_copy(0, torch.as_tensor(choices, device=y.device), y)
    return spread.unflatten(0, (tokens, k)).sum(1)


def is_trained(functions: Sequence[Any]) -> bool:
    """Whether functions are known to hold parameters that are differentiated."""
    modules = [f for f in functions if isinstance(f, torch.nn.Module)]
    return torch.is_grad_enabled() and any(p.requires_grad for m in modules for p in m.parameters())


def nothing(
    shape: tuple[int, ...], like: torch.Tensor, reached: Sequence[torch.Tensor], differentiated: bool
) -> torch.Tensor:
    """A tensor without entries, of the dtype of another, whose backward pass reaches tensors without entries.

    differentiated: whether what is made of it has a backward pass in any case, as it has on the other workers.
    """
    y = sum((a.sum().to(like.dtype) for a in reached), like.new_zeros(shape))
    return y.requires_grad_() if differentiated and not y.requires_grad else y


def differentiated_by(x: torch.Tensor) -> tuple[int, ...]:
    """Nothing: the collective that takes x tells workers whether any of them differentiates it."""
    return ()


def taking_part(x: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    return x


@contextmanager
def apart(worker: Worker) -> Iterator[Callable[[], set[str]]]:
    """Inside, experts run, whose collectives workers with other experts do not make. Gives a function: the axes of
    those that are differentiated."""
    with whole_comm(worker.comm).uncounted(), recorded_calls() as calls:
        yield lambda: {name for call in calls if call.needs_grad[0] for name in call.op.axes}


def constants(numbers: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Numbers of the host, in the dtype of a tensor, beside it."""
    return torch.as_tensor(numbers, device=like.device).to(like.dtype)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(x))), by row."""
    return torch.logsumexp(x, -1)
