"""Sums and means of losses over all workers, with true counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.autodiff.registry import primitive
from spmd.autodiff.staging.recorder import one_line
from spmd.errors import SpecError, describe
from spmd.frontends import frontend
from spmd.functions.arguments import require_varying
from spmd.functions.layouts import dtype_of
from spmd.functions.local import namespace
from spmd.kernels.cpu.chunks import accurate
from spmd.operators.reduce import AxisName, in_dtype, psum
from spmd.spellings import closest

__all__ = ["check_reduction", "reduced"]


def check_reduction(where: str, reduction: Any, choices: tuple[str, ...] = ("none", "sum", "mean")) -> None:
    """Raise unless the reduction is one of these."""
    if reduction not in choices:
        names = [f'"{name}"' for name in choices]
        raise SpecError.at(
            where,
            argument="reduction",
            got=describe(reduction),
            need=f"{', '.join(names[:-1])} or {names[-1]}",
            mend=f'reduction="{closest(reduction, choices, "mean")}"',
        )


@primitive("with_count", lambda g, _ans, _total, *, count: g[0])
def _with_count(total, *, count: int):
    """The total and the count in one array, for one sum over workers."""
    return one_line(_pair, (total, count))


def _pair(total: Any, count: int) -> Any:
    if isinstance(total, np.generic | np.ndarray):  # ten times as fast
        return np.array((total, count), total.dtype)
    return np.stack([total, np.full_like(total, count)])


@primitive("over_count", lambda g, _ans, both: _with_count(g / both[1], count=0))
def _over_count(total_and_count):
    """The total divided by the count, which has no derivative."""
    return total_and_count[0] / total_and_count[1]


def reduced(
    where: str,
    loss: Any,
    weights: Any,
    reduction: str,
    axes: AxisName | None = None,
    *,
    count: int | None = None,
    argument: str = "spec",
) -> Any:
    """The losses, their sum, or their sum divided by that of weights, over the workers along axes too.

    weights: for each loss, or for some of them; None: `count`, by default the number of losses of this worker. axes:
    those that split the losses; `argument` named them. The sum and the mean are Invariant there. Of nothing the mean is
    NaN. Cost: one all-reduce of a number or two.
    """
    if reduction == "none":
        return loss
    axes = require_varying(where, loss, axes, argument) if axes else ()
    dtype = dtype_of(loss)
    wide, xp, other = accurate(dtype), namespace(loss), frontend(loss)
    size = int(np.prod(loss.shape))
    total = (np if other is None else xp).sum(in_dtype(loss, wide))
    if reduction == "sum":
        return in_dtype(psum(total, axes) if axes else total, dtype)
    if weights is not None:
        added = xp.sum(in_dtype(weights, wide))
        total, added = psum(xp.stack([total, added]), axes) if axes else (total, added)
        with np.errstate(invalid="ignore", divide="ignore"):
            return in_dtype(total / added, dtype)
    count = size if count is None else count
    if other is not None:
        both = xp.stack([total, xp.full_like(total, count)])
        both = psum(both, axes) if axes else both
        return in_dtype(both[0] / both[1], dtype)
    both = _with_count(total, count=count)
    both = psum(both, axes) if axes else both
    with np.errstate(invalid="ignore"):  # of no rows
        return in_dtype(_over_count(both), dtype)
