"""Averages of parameters over the steps of training."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff import tree
from spmd.optim.arguments import MISSING, check_update, leaves_like
from spmd.optim.numbers import cast_like, checked_option, is_short, widened
from spmd.optim.optimizers import Optimizer, check_optimizer, checked_array, moment_specs
from spmd.tracebacks import api_boundary

__all__ = ["EMAState", "ema"]

_WHERE = "spmd.optim.ema"


class EMAState(NamedTuple):
    """The state of `ema`. average: like the parameters (float32 for float16 and bfloat16). state: of the optimiser.

    >>> optimizer = spmd.optim.ema(spmd.optim.sgd(0.1), 0.9)
    >>> optimizer.init({"w": np.ones(2)}).average
    {'w': array([1., 1.])}
    """

    average: Any
    state: Any


EMAState.__module__ = "spmd.optim"  # where checkpoints and pickles look it up


@api_boundary
def ema(optimizer: Optimizer, decay: float) -> Optimizer:
    """An optimiser that keeps an exponential moving average of the parameters, for validation.

        average <- decay average + (1 - decay) p   after each step, beginning with the first parameters

    Within `shard` the average lies split as the state does. Cost: none. Source: Polyak, Juditsky, "Acceleration of
    stochastic approximation by averaging", SIAM J. Control Optim. 1992; the formula as `torch.optim.swa_utils`.

        >>> optimizer, params = spmd.optim.ema(spmd.optim.sgd(1.0), 0.75), np.array([1.0])
        >>> params, state = optimizer.update(np.array([2.0]), optimizer.init(params), params)
        >>> params, state.average
        (array([-1.]), array([0.5]))
    """
    check_optimizer(_WHERE, optimizer, "ema(spmd.optim.adam(1e-3), 0.999)")
    decay = checked_option(_WHERE, "decay", decay, 0.999, below=1)

    def init(params):
        tree.map(lambda p: checked_array("params", p), params)
        # Arrays of their own: parameters may be given away.
        return EMAState(
            tree.map(lambda p: widened(p) if is_short(p) else np.positive(p), params), optimizer.init(params)
        )

    def update(grads, state, params=MISSING, *, donate=False):
        check_update(_WHERE, state, params, EMAState)
        params, inner_state = optimizer.update(grads, state.state, params, donate=donate)
        leaves, structure = tree.flatten(params)
        averages = leaves_like(_WHERE, "state.average", state.average, structure)
        averages = [cast_like(decay * a + (1 - decay) * widened(p), a) for a, p in zip(averages, leaves, strict=True)]
        return params, EMAState(tree.unflatten(structure, averages), inner_state)

    def specs(param_specs, params=None):
        of_optimizer = optimizer.specs(param_specs) if params is None else optimizer.specs(param_specs, params)
        return EMAState(moment_specs(_WHERE, param_specs), of_optimizer)

    return Optimizer(api_boundary(init), api_boundary(update), api_boundary(specs))
