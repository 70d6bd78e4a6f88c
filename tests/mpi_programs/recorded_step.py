"""Whole steps of training, recorded: digests of losses, parameters and states. With any transport."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

import spmd
from spmd import P, optim
from spmd.kernels import jit

SPECS = {"w": P(None, "model"), "out": P("model", None)}
OPTIMIZERS = (
    optim.sgd(optim.linear(0.05, 9), momentum=0.9),
    optim.adamw(optim.cosine(0.02, 5, warmup=2)),
)


def local_loss(params, x, y):
    return spmd.mean((spmd.psum(np.tanh(x @ params["w"]) @ params["out"], "model") - y) ** 2, "data")


def whole_loss(params, x, y):
    return ((np.tanh(x @ params["w"]) @ params["out"] - y) ** 2).mean()


def lines(data: int, model: int) -> list[str]:
    """For each optimiser, by a body and by a function of global arrays: a digest."""
    mesh = spmd.Mesh(data=data, model=model)
    rng = np.random.default_rng(0)
    drawn = {"w": rng.normal(size=(3, 5)), "out": rng.normal(size=(5, 2))}
    batches = [spmd.put((rng.normal(size=(7, 3)), rng.normal(size=(7, 2))), P("data"), mesh) for _ in range(4)]
    found = []
    for optimizer in OPTIMIZERS:
        for loss in (local_loss, whole_loss):

            def step(params, state, x, y, loss=loss, optimizer=optimizer):
                value, grads = spmd.value_and_grad(loss)(params, x, y)
                return *optimizer.update(optim.clip_by_global_norm(grads, 0.3), state, params), value

            if loss is local_loss:
                specs = SPECS, optimizer.specs(SPECS)
                step = mesh.map(step, (*specs, P("data"), P("data")), (*specs, P()))
            once = spmd.jit(step)
            params = spmd.put(drawn, SPECS, mesh)
            state, digest = optimizer.init(params), hashlib.sha256()
            for batch in batches:
                params, state, value = once(params, state, *batch)
                for x in spmd.tree.leaves((params, state, value)):
                    digest.update(np.ascontiguousarray(x.numpy()).tobytes())
            found.append(f"{digest.hexdigest()[:12]} after {int(state.steps)} steps")
    return found


if __name__ == "__main__":
    with jit.off():  # not in every environment is there numba
        said = lines(*map(int, sys.argv[1:]))
    if spmd.is_main():
        print("\n".join(said))
