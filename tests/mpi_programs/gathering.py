"""Parameters that are gathered unit by unit, by processes: ten steps of Adam, and a trace of one gradient.

gathering.py steps AXIS=N ...           compares ten steps with those of one worker
gathering.py trace FOLDER [TRANSPORT]   writes trace.json into the folder
"""

import sys
from pathlib import Path

import numpy as np

import spmd
from spmd import P
from spmd.autodiff import tree
from spmd.training import gathered, shard_specs

LAYERS = 4


def layer(w, x, add=lambda y: y):
    return x + add(np.tanh(x @ w["up"] + w["bias"]) @ w["down"]) * w["scale"]


def serial(layers, x):
    for w in layers:
        x = layer(w, x)
    return np.mean(x**2)


def data(width=151, hidden=203):
    """Arrays that go as messages, and small ones that are packed."""
    rng = np.random.default_rng(0)
    layers = [
        {
            "up": rng.standard_normal((width, hidden)) / 9,
            "bias": rng.standard_normal(hidden),
            "down": rng.standard_normal((hidden, width)) / 9,
            "scale": rng.standard_normal(()),
        }
        for _ in range(LAYERS)
    ]
    return layers, rng.standard_normal((11, width))


def steps(*sizes):
    axes = {name: int(n) for name, n in (size.split("=") for size in sizes)}
    layers, x = data()
    whole = {"up": P(None, "model"), "bias": P("model"), "down": P("model"), "scale": P()} if "model" in axes else P()
    optimizer = spmd.optim.adam(0.01)
    with spmd.Mesh(**axes):
        specs = shard_specs(layers, "data", [whole] * LAYERS)

        def loss(layers, x):
            for w in gathered(layers, specs, "data"):
                x = layer(w, x, (lambda y: spmd.psum(y, "model")) if "model" in axes else lambda y: y)
            return spmd.mean(x**2, "data")

        step = spmd.value_and_grad(spmd.map(loss, (specs, P("data")), P()))
        params = tree.map(spmd.put, layers, specs)
        own, wanted, state = optimizer.init(params), layers, optimizer.init(layers)
        for _ in range(10):
            value, grads = step(params, x)
            params, own = optimizer.update(grads, own, params)
            expected, gradient = spmd.value_and_grad(serial)(wanted, x)
            wanted, state = optimizer.update(gradient, state, wanted)
            np.testing.assert_allclose(value.numpy(), expected, rtol=1e-10)
        for a, b in zip(tree.leaves((params, own)), tree.leaves((wanted, state)), strict=True):
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-10, atol=1e-10)
        if spmd.is_main():
            print("as one worker")


def marked(x):
    """x, by a collective with an adjoint that moves something: it is seen in a trace, forward and backward."""
    return x + 0 * spmd.all_gather(x[:1], "data", tiled=True)[:1]


def trace(folder, transport=None):
    rng = np.random.default_rng(1)
    layers = [rng.standard_normal((400, 400)) / 20 for _ in range(LAYERS)]

    def loss(layers, x):
        for w in gathered(layers, P("data"), "data"):
            x = np.tanh(marked(x) @ w)
        return spmd.mean(x, "data")

    with spmd.Mesh(data=2, transport=transport):
        gradient = spmd.grad(spmd.map(loss, ([P("data")] * LAYERS, P("data")), P()), argnums=(0, 1))
        params, x = [spmd.put(w, P("data")) for w in layers], spmd.put(rng.standard_normal((4, 400)), P("data"))
        gradient(params, x)
        with spmd.profile(Path(folder, "trace.json")):
            gradient(params, x)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
