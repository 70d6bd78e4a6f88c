"""Learning rates as functions of the number of updates."""

from __future__ import annotations

import math
from collections.abc import Callable

from spmd.optim.numbers import checked_option
from spmd.tracebacks import api_boundary

__all__ = ["cosine", "linear"]


@api_boundary
def cosine(rate: float, steps: int, end: float = 0.0, warmup: int = 0) -> Callable[[int], float]:
    """A learning rate that falls from `rate` to `end` along half a cosine in `steps` updates, and stays there.

    It is a function of t = 0, 1, ..., the number of updates before the one that takes the rate:

        t < warmup:   rate (t + 1) / (warmup + 1)
        t >= warmup:  end + (rate - end) (1 + cos(pi s)) / 2,    s = min(1, (t - warmup) / steps)

    warmup: a number of updates in which the rate grows linearly; update t = warmup is the first with `rate` itself.
    steps: the updates of the fall alone: `end` is reached at t = warmup + steps. Source: Loshchilov, Hutter, "SGDR:
    Stochastic gradient descent with warm restarts", ICLR 2017.

        >>> rate = spmd.optim.cosine(1.0, steps=4, warmup=2)
        >>> [round(rate(step), 3) for step in range(8)]
        [0.333, 0.667, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return _schedule("cosine", rate, steps, end, warmup, lambda part: (1 + math.cos(math.pi * part)) / 2)


@api_boundary
def linear(rate: float, steps: int, end: float = 0.0, warmup: int = 0) -> Callable[[int], float]:
    """A learning rate that falls linearly from `rate` to `end` in `steps` updates; otherwise as `cosine`.

    At t = 0, 1, ..., the number of updates before, it is rate (t + 1) / (warmup + 1) where t < warmup, and then end +
    (rate - end) (1 - s) with s = min(1, (t - warmup) / steps).

    >>> rate = spmd.optim.linear(1.0, steps=4, end=0.5)
    >>> [rate(step) for step in range(6)]
    [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    """
    return _schedule("linear", rate, steps, end, warmup, lambda part: 1 - part)


def _schedule(
    name: str, rate: float, steps: int, end: float, warmup: int, shape: Callable[[float], float]
) -> Callable[[int], float]:
    where = f"spmd.optim.{name}"
    rate, end = checked_option(where, "rate", rate, 1e-3), checked_option(where, "end", end, 0.0)
    steps = checked_option(where, "steps", steps, 1000, minimum=1)
    warmup = checked_option(where, "warmup", warmup, 100)

    def at(done: int) -> float:
        if done < warmup:
            return rate * (done + 1) / (warmup + 1)
        return end + (rate - end) * shape(min(1.0, (done - warmup) / steps))

    return at
