"""Maps that are done again by their programs (`spmd.jit`): digests of what they give. With any transport."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator

import numpy as np

import spmd
from spmd import P
from spmd.autodiff import tree
from spmd.functions import bias_act, softmax_cross_entropy
from spmd.kernels import jit


def draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).normal(size=shape).astype(np.float32)


def loss(params, x, labels):
    *hidden, (w, b) = params
    for v, a in hidden:
        x = bias_act(x @ v, a, "gelu")
    return softmax_cross_entropy(x @ w + b, labels, reduction="mean", batch_axis_name="x")


def collectives(a, rate):
    """Most of what there is, beside each other."""
    total = spmd.psum(a * rate, "x")
    there = spmd.ppermute(a, "x", [(0, 1), (1, 2)])
    whole = spmd.all_gather(there, "x", axis=0, tiled=True)
    parts = spmd.psum_scatter(whole, "x", tiled=True)
    top = spmd.pmax(a, "x")
    near = spmd.halo_exchange(np.tanh(parts), P("x"), 1)
    rooted = spmd.replicate(spmd.sum_reduce(a * a, "x", 1), "x", 1)
    return np.sum(total * top) + spmd.sum(near**2, "x") + np.sum(rooted) + spmd.psum(np.sum(there), "x")


def found(mesh: spmd.Mesh) -> Iterator[tuple[str, object]]:
    with mesh:
        train = spmd.value_and_grad(spmd.jit(spmd.map(loss, in_specs=(P(), P("x"), P("x")), out_specs=P())))
        step = spmd.optim.sgd(0.1, momentum=0.9)
        widths = (5, 300, 260, 4)
        params = [(draw((n, m), 0), draw((m,), 1)) for n, m in itertools.pairwise(widths)]
        params = spmd.put(params, P())
        state = step.init(params)
        for k in range(4):
            rows = 11 if k == 2 else 31  # fewer rows on some workers, once of another number
            labels = np.arange(rows) % 4
            value, grads = train(params, *spmd.put((draw((rows, 5), k), labels), P("x")))
            params, state = step.update(grads, state, params, donate=True)
            yield f"loss {k}", value
        yield "params", params

        once = spmd.jit(spmd.map(collectives, in_specs=(P("x"), P()), out_specs=P()))
        for k in range(3):
            a = spmd.put(draw((12, 3), k), P("x"))
            yield f"collectives {k}", once(a, 0.5 + k)
            yield f"their gradient {k}", spmd.value_and_grad(once)(a, 0.5 + k)
            yield f"from outside {k}", spmd.grad(lambda a, k=k: once(2 * a, 1.0 + k) * k)(a)


def results(**options) -> dict[str, str]:
    said = {}
    with jit.off():  # not in every environment is there numba
        for name, value in found(spmd.Mesh(x=3, **options)):
            bits = b"".join(x.numpy().tobytes() for x in tree.leaves(value))
            said[name] = hashlib.sha256(bits).hexdigest()[:12]
    return said


if __name__ == "__main__":
    said = results()
    if spmd.is_main():
        sys.stdout.write(json.dumps(said))
