"""The numbers of optimisers: their options, learning rates, counts of updates, and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.array import PartitionedArray, joined_copies
from spmd.autodiff.staging.recorder import checked, is_slot, one_line, slot_of
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import JitError, describe, message
from spmd.kernels import on_device

__all__ = [
    "Rate",
    "as_python_number",
    "cast_like",
    "checked_option",
    "checked_rate",
    "count_of",
    "is_recorded",
    "is_short",
    "name_of_dtype",
    "next_count",
    "rate_at",
    "varying_axes",
    "widened",
]

Rate = float | Callable[[int], float]


def checked_option(
    where: str, argument: str, x: Any, example: float, below: float = math.inf, minimum: float = 0
) -> Any:
    """An option of an optimiser as a number that does not widen arrays. Arrays stay: they may be differentiated.

    An option that is an input of a recorded program is checked in every run."""

    def check(x: Any) -> None:
        if isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool):
            fits = minimum <= x < below
        elif type(x) is np.ndarray:
            fits = x.dtype.kind in "fiu" and bool(np.all((x >= minimum) & (x < below)))
        else:
            fits = not isinstance(x, np.generic) and getattr(x, "dtype", None) is not None
        if not fits:
            name = argument.split(",")[0]
            need = f"a number, at least {minimum}" + (f" and below {below}" if below < math.inf else ", finite")
            raise ValueError(message(where, argument=argument, got=describe(x), need=need, mend=f"{name}={example}"))

    checked(check, x)
    return as_python_number(x)


def as_python_number(number: Any) -> Any:
    """A NumPy number as a Python number, which takes the dtype of the arrays it meets."""
    return one_line(float, (number,)) if isinstance(slot_of(number), np.floating) else number


def checked_rate(where: str, learning_rate: Any) -> Any:
    return learning_rate if callable(learning_rate) else checked_option(where, "learning_rate", learning_rate, 1e-3)


def rate_at(learning_rate: Rate, steps: Any) -> Any:
    """The learning rate after a number of updates. A recorded program asks a function of this number in every run."""
    if not callable(learning_rate):
        return learning_rate

    def learning_rate_at(steps: Any) -> Any:
        rate, argument = learning_rate(steps), f"learning_rate, of {steps} updates done,"
        if _is_recorded(rate) and not uses_inputs:
            raise JitError.at(
                "spmd.optim, within spmd.jit",
                argument=argument,
                got="a rate that depends on arguments of the jitted function",
                need="one that does so for every number of updates, or for none",
                mend="np.where(steps < 10, rate, other) in place of `if`",
            )
        return checked_option("spmd.optim", argument, rate, 1e-3)

    uses_inputs = not is_slot(steps) or _is_recorded(learning_rate(steps.value))
    return learning_rate_at(steps) if uses_inputs else one_line(learning_rate_at, (steps,))


def _is_recorded(x: Any) -> bool:
    """Whether a number is an array that a tape or a program may record."""
    return type(x) in (Array, PartitionedArray) or is_slot(x)


def is_recorded(x: Any) -> bool:
    """Whether the value of an array is known to the runs of a recorded program only."""
    value = value_of(x)
    return any(map(is_slot, value.__spmd_parts__() if type(value) is PartitionedArray else (value,)))


def varying_axes(x: Any) -> frozenset[str]:
    """The axes along which an array of a body varies."""
    return x.state.varying if type(x) is Array and x.state is not None else frozenset()


# Counts of updates


def count_of(steps: Any) -> Any:
    """The count of updates in a state as a Python number, as which formulas and kernels have the same bits.

    A count that varies over the workers stays an array. One on a GPU is waited for."""
    x = steps
    if type(x) is PartitionedArray and x.layout.spec is not None:
        x = joined_copies(x.reduced.blocks)
    if type(x) is Array:
        if x.tape is not None or (x.state is not None and x.state.varying):
            return steps
        x = value_of(x)
    value = slot_of(x)
    if isinstance(value, bool) or _kind(value) not in ("i", "u") or getattr(value, "shape", ()) != ():
        raise ValueError(
            message(
                "spmd.optim",
                argument="state, its steps",
                got=describe(steps),
                need="the number of updates, an array of one integer",
                mend="optimizer.init(params), or state._replace(steps=np.asarray(0))",
            )
        )
    return one_line(int, (x,))


def next_count(steps: Any) -> Any:
    """The count after one more update: an array, of the dtype and layout of the last."""
    if type(steps) is PartitionedArray:
        blocks = steps.mesh.shared(steps.layout, lambda w: one_line(_incremented, (steps.blocks[w],)))
        return PartitionedArray(blocks, steps.layout, steps.mesh)
    return np.add(steps, 1) if type(steps) is Array else one_line(_incremented, (steps,))


def _incremented(x: Any) -> Any:
    return x + 1 if on_device(x) else np.asarray(x + 1)


def _kind(x: Any) -> str:
    dtype = getattr(x, "dtype", None)
    return "i" if dtype is None and isinstance(x, int) else getattr(dtype, "kind", "")


# Dtypes


def cast_like(new, old):
    """new in the dtype of old, so that gradients of higher precision do not widen it."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)


@lru_cache(maxsize=64)
def name_of_dtype(dtype: np.dtype) -> str:
    """The name of a dtype, cached, because NumPy builds it at every access."""
    return dtype.name


def is_short(x) -> bool:
    return name_of_dtype(x.dtype) in ("float16", "bfloat16")


def widened(x):
    """An array for the computation: the square of a short number may underflow or overflow in its own dtype."""
    return x.astype(np.float32) if is_short(x) else x
