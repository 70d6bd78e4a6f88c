"""Optimisers as pure functions on pytrees: `params, state = optimizer.update(grads, state, params)`.

Every formula is entrywise, so it works on blocks as it does on whole arrays: with gradients laid out like their
parameters an update moves nothing, in a body, on `PartitionedArray`s, and on bare arrays alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff import tree

__all__ = ["AdamState", "Optimizer", "SGDState", "adam", "adamw", "sgd"]

Rate = float | Callable[[int], float]


class Optimizer(NamedTuple):
    """A pair of pure functions, with params any pytree of real floating arrays.

    init: params -> state. update: (grads, state, params) -> (new params, new state); the arguments stand in the order
    of optax, whose `update` returns differences instead. New parameters keep the dtype and the layout of the old.
    Updates are differentiable, so one can differentiate through training (through Adam: where no gradient entry has
    been zero throughout). Raises ValueError where the trees differ.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


class SGDState(NamedTuple):
    """steps: updates done. velocity: the running sum of gradients, like the parameters; None without momentum."""

    steps: int
    velocity: Any


class AdamState(NamedTuple):
    """steps: updates done. mean, square: running averages of the gradient and of its square, like the parameters."""

    steps: int
    mean: Any
    square: Any


def sgd(learning_rate: Rate, momentum: float = 0.0, *, nesterov: bool = False) -> Optimizer:
    """Gradient descent with momentum:  v <- momentum v + g,  p <- p - learning_rate v.

    learning_rate: a number, or a function of the number of updates done. nesterov: step along momentum v + g instead
    of v. Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep learning",
    ICML 2013, with the rate taken out of v, as in PyTorch and optax.
    """

    def init(params):
        return SGDState(0, tree.map(np.zeros_like, params) if momentum else None)

    def update(grads, state, params):
        rate, velocity, along = _rate(learning_rate, state.steps), state.velocity, grads
        if momentum:
            velocity = tree.map(lambda v, g: _like(momentum * v + g, v), velocity, grads)
            along = tree.map(lambda v, g: momentum * v + g, velocity, grads) if nesterov else velocity
        params = tree.map(lambda p, v: _like(p - rate * v, p), params, along)
        return params, SGDState(state.steps + 1, velocity)

    return Optimizer(init, update)


def adam(learning_rate: Rate = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam: steps of the mean gradient over the root of its mean square, both without the bias of their zero start.

        m <- b1 m + (1 - b1) g,    s <- b2 s + (1 - b2) g²,
        p <- p - learning_rate (m / (1 - b1^t)) / (sqrt(s / (1 - b2^t)) + eps),    t = 1, 2, ...

    learning_rate: a number, or a function of the number of updates done. Kingma, Ba, "Adam: A method for stochastic
    optimization", ICLR 2015, algorithm 1.
    """
    return adamw(learning_rate, b1, b2, eps, weight_decay=0.0)


def adamw(
    learning_rate: Rate = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 1e-2
) -> Optimizer:
    """Adam with weight decay apart from the gradient: it also takes learning_rate weight_decay p from p.

    Loshchilov, Hutter, "Decoupled weight decay regularization", ICLR 2019, with the decay times the rate, as in
    PyTorch and optax.
    """

    def init(params):
        return AdamState(0, tree.map(np.zeros_like, params), tree.map(np.zeros_like, params))

    def update(grads, state, params):
        t = state.steps + 1
        rate, unbias1, unbias2 = _rate(learning_rate, state.steps), 1 - b1**t, 1 - b2**t

        def step(p, m, s):
            along = (m / unbias1) / (np.sqrt(s / unbias2) + eps)
            return _like(p - rate * (along + weight_decay * p if weight_decay else along), p)

        mean = tree.map(lambda m, g: _like(b1 * m + (1 - b1) * g, m), state.mean, grads)
        square = tree.map(lambda s, g: _like(b2 * s + (1 - b2) * (g * g), s), state.square, grads)
        return tree.map(step, params, mean, square), AdamState(t, mean, square)

    return Optimizer(init, update)


def _rate(learning_rate: Rate, steps: int):
    return learning_rate(steps) if callable(learning_rate) else learning_rate


def _like(new, old):
    """new in the dtype of old: NumPy scalars among the options, or gradients of more precision, do not widen it."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)
