"""Training with parameters that are given away and without, of copies and of blocks that bodies gather: the same bits.

Arrays are large enough to lie where other processes read them, and are read by these in every step."""

from __future__ import annotations

import sys

import numpy as np

import spmd
from spmd import P

mesh = spmd.Mesh(data=int(sys.argv[1]))
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((37, 160)).astype(np.float32), rng.standard_normal((37, 130)).astype(np.float32)
W = [rng.standard_normal(s).astype(np.float32) / 10 for s in ((160, 250), (250, 130))]


def loss(copies, blocks, x, y):
    """Of weights that every worker has, plus some of which it has rows."""
    for k, (w, part) in enumerate(zip(copies, blocks, strict=True)):
        x = x @ (w + spmd.all_gather(part, "data", tiled=True))
        x = np.tanh(x) if k == 0 else x
    return spmd.psum(np.sum((x - y) ** 2), "data")


step = spmd.value_and_grad(mesh.map(loss, in_specs=(P(), P("data"), P("data"), P("data")), out_specs=P()), (0, 1))


def trained(optimizer, donate):
    data = spmd.put((X, Y), P("data"), mesh)
    params = spmd.put(W, P(), mesh), spmd.put(W, P("data"), mesh)
    state, told = optimizer.init(params), []
    for _ in range(6):
        value, grads = step(*params, *data)
        params, state = optimizer.update(grads, state, params, donate=donate)
        told += [value.numpy(), *(w.numpy() for part in params for w in part)]
    return told


for optimizer in spmd.optim.sgd(1e-3), spmd.optim.sgd(1e-3, 0.9), spmd.optim.adam(1e-3):
    for kept, given in zip(trained(optimizer, False), trained(optimizer, True), strict=True):
        assert np.array_equal(kept, given)
if spmd.is_main():
    print("alike")
