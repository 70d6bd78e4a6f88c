"""Convolutions over blocks and their gradients, as digests of all workers. Runs with any transport.

By NumPy alone: not every environment has numba, whose sums are rounded otherwise."""

from __future__ import annotations

import hashlib
import json

import numpy as np

import spmd
from spmd import P, functions
from spmd.device import to_host
from spmd.kernels import jit

CASES = {
    "rows": ({"x": 4}, P(None, None, "x"), (2, 3, 19, 8), (4, 3, 3, 3), {"padding": 1}),
    "grid": ({"x": 2, "y": 2}, P(None, None, "x", "y"), (2, 3, 9, 11), (4, 3, 3, 4), {"padding": 2, "stride": (2, 1)}),
    "batch": ({"b": 2, "x": 2}, P("b", None, "x"), (3, 4, 13), (4, 2, 3), {"padding": "SAME", "groups": 2}),
    "far": ({"x": 4}, P(None, None, "x"), (1, 2, 5), (2, 2, 7), {"padding": 3}),
}


def digest(x) -> str:
    x = to_host(x)
    return f"{x.dtype}{list(x.shape)}" + hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:12]


def results(**options) -> dict[str, str]:
    """Of real numbers, so that the order of sums shows."""
    found = {}
    for name, (axes, spec, shape, filters, how) in CASES.items():
        rng = np.random.default_rng(len(name))
        x, w = (rng.standard_normal(s).astype(np.float32) for s in (shape, filters))
        mesh = spmd.Mesh(**axes, **options)

        def body(x, w, spec=spec, how=how):
            return functions.conv(x, w, **how, spec=spec)

        def energy(x, w, body=body, axes=axes):
            return spmd.psum(np.sum(body(x, w) ** 2), tuple(axes))

        with jit.off():
            y = mesh.map(body, in_specs=(spec, P()), out_specs=spec)(x, w)
            gradients = spmd.grad(mesh.map(energy, in_specs=(spec, P()), out_specs=P()), (0, 1))
            arrays = y, *gradients(*spmd.put((x, w), (spec, P()), mesh=mesh))
        found[name] = " ".join(digest(a.numpy()) for a in arrays)
    return found


if __name__ == "__main__":
    found = results()
    if spmd.is_main():
        print(json.dumps(found))
