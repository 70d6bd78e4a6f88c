"""Rows that go to experts and come back, on one block of NumPy or CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd.autodiff.tape import ACTIVE
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transforms import joint
from spmd.device import to_host
from spmd.functions.local.embeddings import added_rows, rows_at
from spmd.functions.local.softmaxes import logsumexp_rows
from spmd.kernels.cpu.chunks import accurate
from spmd.mesh import Worker
from spmd.operators.apply import axes_of_collectives, recorded_apart

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


def scores(gate: Any) -> np.ndarray:
    """The values of an array on the host, in a dtype that NumPy orders."""
    bare = np.asarray(to_host(value_of(gate)))
    return bare.astype(accurate(bare.dtype), copy=False)


def rows(x: Any, indices: np.ndarray) -> Any:
    """x[indices], along the first dimension."""
    return rows_at(x, np.asarray(indices, like=value_of(x)))


def parts(x: Any, sizes: Sequence[int]) -> list[Any]:
    """The rows of x in parts of these sizes."""
    return np.split(x, np.cumsum(sizes)[:-1].tolist()) if sizes else []


def weighted_sums(y: Any, weights: Any, choices: np.ndarray, tokens: int, k: int) -> Any:
    """The sum of the rows of each token, times their weights. choices: token * k + choice, for each row."""
    indices = np.asarray(choices // k, like=value_of(y))
    return added_rows(indices, y * weights[:, None], rows=tokens)


def is_trained(functions: Sequence[Any]) -> bool:
    """Whether functions are known to hold parameters that are differentiated."""
    return False


def nothing(shape: tuple[int, ...], like: Any, reached: Sequence[Any], differentiated: bool) -> Any:
    """An array without entries, of the dtype of another, whose backward pass reaches arrays without entries."""
    zeros = np.zeros_like(value_of(like), shape=shape)
    return sum((np.sum(a).astype(like.dtype) for a in reached), zeros)


def differentiated_by(x: Any) -> tuple[int, ...]:
    """For each of the differentiations that are under way, whether x takes part in it."""
    found = []
    for tape in ACTIVE.get():
        level = x
        while type(level) is Array and level.tape is not tape:
            level = level.value
        found.append(int(type(level) is Array))
    return tuple(found)


def taking_part(x: Any, wanted: Sequence[int]) -> Any:
    """x, with a backward pass that leads nowhere in each of these differentiations of which it has none."""
    for tape, is_wanted, has in zip(ACTIVE.get(), wanted, differentiated_by(x), strict=True):
        if is_wanted and not has:
            (x,) = joint("functions.experts", tape, [], [x], lambda gs: [])
    return x


@contextmanager
def apart(worker: Worker) -> Iterator[Callable[[], set[str]]]:
    """Inside, experts run, whose collectives workers with other experts do not make. Gives a function: the axes of
    those that are differentiated."""
    with recorded_apart(worker) as tapes:
        yield lambda: {name for _, side in tapes for name in axes_of_collectives(side)}


def constants(numbers: np.ndarray, like: Any) -> Any:
    """Numbers of the host, in the dtype of an array, beside it."""
    return np.asarray(numbers.astype(like.dtype), like=value_of(like))


logsumexp = logsumexp_rows
