"""Learning rates as functions of the number of updates."""

from __future__ import annotations

import math
from collections.abc import Callable

from spmd.optim.numbers import checked_option
from spmd.tracebacks import api_boundary

__all__ = ["constant", "cosine", "linear", "one_cycle", "step_decay"]


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
    return _schedule("cosine", rate, steps, end, warmup, _half_cosine)


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


@api_boundary
def constant(rate: float, warmup: int = 0) -> Callable[[int], float]:
    """A learning rate that grows linearly to `rate`, and stays there.

    At t = 0, 1, ..., the number of updates before, it is rate (t + 1) / (warmup + 1) where t < warmup, then rate.
    Source: Goyal et al., "Accurate, large minibatch SGD: Training ImageNet in 1 hour", 2017, section 2.2.

        >>> rate = spmd.optim.constant(1.0, warmup=3)
        >>> [rate(step) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return _schedule("constant", rate, 1, rate, warmup, lambda part: 1.0)


@api_boundary
def step_decay(rate: float, every: int, factor: float = 0.1, warmup: int = 0) -> Callable[[int], float]:
    """A learning rate that is multiplied by `factor` after every so many updates.

    At t = 0, 1, ..., the number of updates before, it is rate (t + 1) / (warmup + 1) where t < warmup, and then
    rate factor^k with k = floor((t - warmup) / every). As `torch.optim.lr_scheduler.StepLR`. Source: He, Zhang, Ren,
    Sun, "Deep residual learning for image recognition", CVPR 2016.

        >>> rate = spmd.optim.step_decay(1.0, every=2, factor=0.5)
        >>> [rate(step) for step in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    where = "spmd.optim.step_decay"
    rate, warmup = checked_option(where, "rate", rate, 1e-3), checked_option(where, "warmup", warmup, 100)
    every, factor = checked_option(where, "every", every, 30, minimum=1), checked_option(where, "factor", factor, 0.1)

    def at(done: int) -> float:
        if done < warmup:
            return rate * (done + 1) / (warmup + 1)
        return rate * factor ** ((done - warmup) // every)

    return at


@api_boundary
def one_cycle(
    rate: float, steps: int, rise: float = 0.3, start_factor: float = 25.0, end_factor: float = 1e4
) -> Callable[[int], float]:
    """A learning rate that rises to `rate` and falls to nearly nothing, each along half a cosine, in `steps` updates.

    It is a function of t = 0, 1, ..., the number of updates before the one that takes the rate:

        t <= m:  start + (rate - start) (1 - cos(pi t / m)) / 2,                start = rate / start_factor
        t > m:   end + (rate - end) (1 + cos(pi (t - m) / (n - m))) / 2,         end = start / end_factor

    with n = steps - 1 and m = rise steps - 1; after the last update it stays at its end. rise: the part of the updates
    in which the rate rises. Values, names of factors apart, as `torch.optim.lr_scheduler.OneCycleLR`. Source: Smith,
    Topin, "Super-convergence: Very fast training of neural networks using large learning rates", 2018.

        >>> rate = spmd.optim.one_cycle(1.0, steps=10)
        >>> [round(rate(step), 3) for step in range(10)]
        [0.04, 0.52, 1.0, 0.95, 0.812, 0.611, 0.389, 0.188, 0.05, 0.0]
    """
    where = "spmd.optim.one_cycle"
    rate, steps = checked_option(where, "rate", rate, 1e-2), checked_option(where, "steps", steps, 1000, minimum=2)
    rise = checked_option(where, "rise", rise, 0.3, below=1)
    start = rate / checked_option(where, "start_factor", start_factor, 25.0, minimum=1)
    end = start / checked_option(where, "end_factor", end_factor, 1e4, minimum=1)
    last, top = steps - 1, rise * steps - 1

    def at(done: int) -> float:
        if done <= top:
            return start + (rate - start) * _half_cosine(1 - done / top if top else 0.0)
        return end + (rate - end) * _half_cosine(min(1.0, (done - top) / (last - top)))

    return at


def _half_cosine(part: float) -> float:
    """From 1 at 0 to 0 at 1."""
    return (1 + math.cos(math.pi * part)) / 2


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
