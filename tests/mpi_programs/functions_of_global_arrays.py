"""What each function of `spmd.functions` does with global arrays outside of bodies: plainly, in a gradient, and in a
recorded gradient. Runs with any transport.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
from spmd import P
from spmd import functions as F

AXES = {"a": 2, "b": 2}
SHAPE, SPEC = (5, 4, 6), P("a", None, "b")
X = np.random.default_rng(0).standard_normal(SHAPE)
IDS = np.random.default_rng(1).integers(0, 4, (5, 4))
KEY = spmd.random.key(3)
TAPS = F.plan_resize(6, 9, "linear")
PLANS = {"Taps", "plan_resize"}
"""Names that take no arrays."""

Lay = Callable[[Any, P], Any]
"""An array by a spec; or the array itself."""


def _plain(name: str, *args: Any, **options: Any) -> Callable[[Any, Lay], Any]:
    return lambda x, lay: getattr(F, name)(x, *args, **options)


def _loss(name: str) -> Callable[[Any, Lay], Any]:
    return lambda x, lay: getattr(F, name)(F.sigmoid(x), lay(1 / (1 + X * X), P(None, None, "b")))


def _recurrent(name: str, gates: int) -> Callable[[Any, Lay], Any]:
    rng = np.random.default_rng(4)
    w = {"weight_ih_l0": rng.standard_normal((gates, 4, 6)), "weight_hh_l0": rng.standard_normal((gates, 4, 4))}

    def call(x: Any, lay: Lay) -> Any:
        return getattr(F, name)(x, None, {k: lay(a, P(None, "a")) for k, a in w.items()})[0]

    return call


_ACTIVATIONS = "celu elu gelu hard_sigmoid hard_swish leaky_relu log_sigmoid mish relu relu6 selu sigmoid silu softplus"
_LOSSES = "binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss poisson_nll_loss"
KERNEL = np.random.default_rng(2).standard_normal((4, 4, 3))
POINTS = np.linspace(0.1, 3.7, 9).reshape(3, 3)

CASES: dict[str, Callable[[Any, Lay], Any]] = {
    **{name: _plain(name) for name in f"{_ACTIVATIONS} swish glu softmax log_softmax softmin rms_norm rope".split()},
    **{name: _loss(name) for name in f"{_LOSSES} smooth_l1_loss".split()},
    "swiglu": _plain("swiglu", 1),
    "bias_act": lambda x, lay: F.bias_act(x, lay(X[0, 0], P("a")), "gelu"),
    "adaptive_max_pool": _plain("adaptive_max_pool", 3),
    "attention": lambda x, lay: F.attention(x, lay(X * X, P()), x),
    "attention_with_weights": lambda x, lay: F.attention_with_weights(x, lay(X * X, P()), x),
    "conv": lambda x, lay: F.conv(x, lay(KERNEL, P())),
    "conv_transpose": lambda x, lay: F.conv_transpose(x, lay(KERNEL, P())),
    "alpha_dropout": _plain("alpha_dropout", 0.5, KEY),
    "dropout": _plain("dropout", 0.5, KEY),
    "cross_entropy": lambda x, lay: F.cross_entropy(x, lay(IDS[:, :1].repeat(6, 1), P("a"))),
    "nll_loss": lambda x, lay: F.nll_loss(x, lay(IDS[:, :1].repeat(6, 1), P("a"))),
    "softmax_cross_entropy": lambda x, lay: F.softmax_cross_entropy(x, lay(IDS, P("a"))),
    "add_rows": lambda x, lay: F.add_rows(lay(IDS, P("a")), x, 4),
    "embedding": lambda x, lay: F.embedding(x[0], lay(IDS, P("a"))),
    "take_rows": lambda x, lay: F.take_rows(x[0], lay(IDS, P("a"))),
    "one_hot": lambda x, lay: F.one_hot(lay(IDS, P("a")), 6) * x,
    "experts": lambda x, lay: F.experts(x[0], x[1, :, :3], [np.tanh, np.sin, np.cos]),
    "load_balance_loss": lambda x, lay: F.load_balance_loss(x[0], 2),
    "router_z_loss": lambda x, lay: F.router_z_loss(x[0]),
    "inject": lambda x, lay: F.inject(x[:3, 0, 0], POINTS, (4, 4, 6)),
    "sample": lambda x, lay: F.sample(x, POINTS),
    "batch_norm": _plain("batch_norm"),
    "group_norm": _plain("group_norm", 2),
    "instance_norm": _plain("instance_norm"),
    "layer_norm": lambda x, lay: F.layer_norm(x, lay(X[0, 0], P("b"))),
    "merge_moments": lambda x, lay: F.merge_moments(np.arange(1, 6), x[:, 0, 0], x[:, 0, 1] ** 2),
    "moments": _plain("moments", (0, 2), keepdims=True),
    "pad": _plain("pad", ((0, 0), (0, 0), (1, 2)), "reflect"),
    "avg_pool": _plain("avg_pool", 2),
    "max_pool": _plain("max_pool", 2),
    "linear": lambda x, lay: F.linear(x, lay(X[0], P("a"))),
    "resize": _plain("resize", size=(9,)),
    "resample": _plain("resample", TAPS),
    "rnn": _recurrent("rnn", 1),
    "gru": _recurrent("gru", 3),
    "lstm": _recurrent("lstm", 4),
    "logsumexp": lambda x, lay: F.logsumexp(x, (0, 2), lay(X * X, P(None, None, "a"))),
    "spectral_conv": lambda x, lay: F.spectral_conv(x, lay(KERNEL + 0j, P())),
    "stencil": _plain("stencil", [(0, 0, -1), (0, 0, 0), (0, 0, 1)], [1.0, -2.0, 1.0]),
}

_OF_TOKENS = {"experts", "load_balance_loss", "router_z_loss"}
REFUSING = {"add_rows", "inject", "merge_moments", "resample", "sample", "stencil"} | _OF_TOKENS
"""Those that take blocks alone."""


def total(call: Callable[[Any, Lay], Any], lay: Lay) -> Callable[[Any], Any]:
    """The sum of squares of the results as a function of x."""
    return lambda x: sum(np.sum(y * y) for y in spmd.tree.leaves(call(x, lay)))


def arrays_of(result: Any) -> list[Any]:
    return [(x.numpy() if hasattr(x, "numpy") else np.asarray(x)).round(8).tolist() for x in spmd.tree.leaves(result)]


def outcome(fun: Callable[[Any], Any], x: Any) -> list[Any]:
    """The arrays that a function gives; or the kind of error, and its argument, need and mend."""
    try:
        return arrays_of(fun(x))
    except spmd.errors.SpecError as error:
        return ["SpecError", *(line for line in str(error).splitlines() if "got:" not in line)]
    except Exception as error:
        return [type(error).__name__, str(error)]


def of_whole_arrays(name: str) -> dict[str, list[Any]]:
    """What a function of arrays of NumPy gives, in each of the ways."""
    call = CASES[name]
    y, g = (arrays_of(fun(X)) for fun in (lambda x: call(x, _same), spmd.grad(total(call, _same))))
    return {"plain": y, "grad": g, "jit": g}


def _same(array: Any, spec: P) -> Any:
    return array


def outcomes(name: str, mesh: Any) -> dict[str, list[Any]]:
    """What a function of global arrays does in each of the ways."""
    call = CASES[name]

    def lay(array: Any, spec: P) -> Any:
        return spmd.put(array, spec, mesh)

    loss = total(call, lay)
    ways = {"plain": lambda x: call(x, lay), "grad": spmd.grad(loss), "jit": spmd.jit(spmd.grad(loss))}
    return {way: outcome(fun, lay(X, SPEC)) for way, fun in ways.items()}


def results(**options: Any) -> dict[str, dict[str, list[Any]]]:
    mesh = spmd.Mesh(**AXES, **options)
    with mesh:
        return {name: outcomes(name, mesh) for name in CASES}


if __name__ == "__main__":
    found = results()
    if spmd.is_main():
        print(json.dumps(found))
