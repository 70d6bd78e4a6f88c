"""Parameters of few bits: their float32 masters, and losses that are scaled so that gradients do not underflow."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.tape import ACTIVE
from spmd.autodiff.tracer import Array
from spmd.inner_product import inner
from spmd.layout import P
from spmd.optim.arguments import MISSING, check_update, leaves_like
from spmd.optim.numbers import cast_like, checked_option, is_recorded, widened
from spmd.optim.optimizers import Optimizer, check_optimizer, checked_array, first_number, give_up, moment_specs
from spmd.tracebacks import api_boundary

__all__ = ["MixedPrecisionState", "mixed_precision"]

_WHERE = "spmd.optim.mixed_precision"


class MixedPrecisionState(NamedTuple):
    """The state of `mixed_precision`.

    scale: the number by which the next loss is multiplied. finite_steps: the updates since the scale changed last.
    masters: the parameters in float32 (float64 ones as they are). state: that of the optimiser of the masters.

        >>> params = {"w": np.ones(2, np.float16)}
        >>> state = spmd.optim.mixed_precision(spmd.optim.sgd(0.1)).init(params)
        >>> state.masters["w"].dtype, float(state.scale)
        (dtype('float32'), 65536.0)
    """

    scale: Any
    finite_steps: Any
    masters: Any
    state: Any


MixedPrecisionState.__module__ = "spmd.optim"  # where checkpoints and pickles look it up


@api_boundary
def mixed_precision(
    optimizer: Optimizer,
    *,
    scale: float | None = 2.0**16,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
) -> Optimizer:
    """An optimiser of float16 or bfloat16 parameters by float32 masters, with dynamic scaling of the loss.

    The gradients given to `update` are those of `state.scale` times the loss. They are divided by the scale in float32,
    the optimiser steps the masters, and the new parameters are these, rounded. If any entry of a gradient, on any
    worker, is infinite or NaN, all workers skip the step: parameters, masters, and state of the optimiser stay.

        skipped:  scale <- backoff scale,  finite_steps <- 0
        else:     finite_steps <- finite_steps + 1; at `interval` of them scale <- growth scale (if that is finite),
                  finite_steps <- 0

    scale: the first one; None: 1 that never changes, for bfloat16, whose range is that of float32; steps that are not
    finite are skipped all the same. growth, backoff, interval: as above. Within `shard` masters and state lie split,
    and parameters are gathered in their few bits. `clipped` goes inside: it clips gradients that are divided already.

    Cost: one all-reduce of a number for each set of axes that split gradients. donate=True gives up parameters and
    state, except in recorded programs. Source: Micikevicius et al., "Mixed precision training", ICLR 2018; rule and
    defaults as `torch.amp.GradScaler`.

        >>> optimizer = spmd.optim.mixed_precision(spmd.optim.sgd(0.5), scale=4.0)
        >>> params = np.array([1.0, 2.0], np.float16)
        >>> state = optimizer.init(params)
        >>> params, state = optimizer.update(state.scale * np.array([1.0, 0.0], np.float16), state, params)
        >>> params, state = optimizer.update(np.array([np.inf, 0.0], np.float16), state, params)
        >>> params, float(state.scale), int(state.state.steps)
        (array([0.5, 2. ], dtype=float16), 2.0, 1)
    """
    check_optimizer(_WHERE, optimizer, "mixed_precision(spmd.optim.adam(1e-3))")
    first = 1.0 if scale is None else checked_option(_WHERE, "scale", scale, 65536.0, minimum=math.ulp(0.0))
    growth = checked_option(_WHERE, "growth", growth, 2.0, minimum=1)
    backoff = checked_option(_WHERE, "backoff", backoff, 0.5, below=1)
    interval = checked_option(_WHERE, "interval", interval, 2000, minimum=1)
    mixed = _Mixed(optimizer, first, None if scale is None else (growth, backoff, interval))
    return Optimizer(api_boundary(mixed.init), api_boundary(mixed.update), api_boundary(mixed.specs))


class _Mixed(NamedTuple):
    """The three functions of an optimiser in mixed precision. rule: growth, backoff and interval of a scale that
    changes."""

    optimizer: Optimizer
    scale: Any
    rule: tuple[Any, Any, Any] | None

    def init(self, params):
        tree.map(lambda p: checked_array("params", p), params)
        masters = tree.map(widened, params)
        numbers = first_number(params, np.float32(self.scale)), first_number(params, 0)
        return MixedPrecisionState(*numbers, masters, self.optimizer.init(masters))

    def update(self, grads, state, params=MISSING, *, donate=False):
        check_update(_WHERE, state, params, MixedPrecisionState)
        leaves, structure = tree.flatten(params)
        for p, g in zip(leaves, leaves_like(_WHERE, "grads", grads, structure), strict=True):
            checked_array("grads", g, p)
        leaves_like(_WHERE, "state.masters", state.masters, structure)
        grads = tree.map(lambda g, m: cast_like(cast_like(g, m) / cast_like(state.scale, m), m), grads, state.masters)
        skipped = _not_finite(grads)
        masters, inner_state = _step(self.optimizer, grads, state, skipped, donate)
        numbers = state.scale, state.finite_steps
        if self.rule is not None:
            numbers = _rescaled(state, skipped, *self.rule)
        if not _is_open(skipped) and skipped:
            return params, MixedPrecisionState(*numbers, masters, inner_state)
        new = tree.map(cast_like, masters, params)
        if donate and not ACTIVE.get():
            give_up(tree.leaves(params), (new, masters))
        return new, MixedPrecisionState(*numbers, masters, inner_state)

    def specs(self, param_specs, params=None):
        given = () if params is None else (params,)
        masters = moment_specs(_WHERE, param_specs)
        return MixedPrecisionState(P(), P(), masters, self.optimizer.specs(param_specs, *given))


def _not_finite(grads: Any) -> Any:
    """Whether an entry of a gradient is infinite or NaN, on any worker."""
    counts = [np.sum(~np.isfinite(g)).astype(np.float32) for g in tree.leaves(grads)]
    return inner(counts, [np.float32(1)] * len(counts)) > 0 if counts else False


def _is_open(x: Any) -> bool:
    """Whether Python cannot decide by x: a recorded program does in every run, and what is differentiated may vary."""
    return is_recorded(x) or (type(x) is Array and x.tape is not None)


def _step(optimizer: Optimizer, grads: Any, state: MixedPrecisionState, skipped: Any, donate: bool) -> tuple[Any, Any]:
    """The new masters and the state of their optimiser; the old ones where the step is skipped."""
    if not _is_open(skipped):
        if skipped:
            return state.masters, state.state
        return optimizer.update(grads, state.state, state.masters, donate=donate)
    zeroed = tree.map(lambda g: np.where(skipped, np.zeros_like(g), g), grads)
    new = optimizer.update(zeroed, state.state, state.masters)
    return tree.map(lambda a, b: np.where(skipped, a, b), (state.masters, state.state), new)


def _rescaled(
    state: MixedPrecisionState, skipped: Any, growth: float, backoff: float, interval: int
) -> tuple[Any, Any]:
    steps, scale = state.finite_steps + 1, state.scale
    grown = scale * growth
    full = steps >= interval
    grown = np.where(full & np.isfinite(grown), grown, scale)
    steps = np.where(full | skipped, np.zeros_like(steps), steps)
    return np.where(skipped, scale * backoff, grown), steps
