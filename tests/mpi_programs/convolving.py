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

GRID = spmd.Layout.grid((1, 4, 9), (1, 2, 2), {"x": 4}, [3, 0, 2, 1])
CASES = {
    "rows": ({"x": 4}, P(None, None, "x"), (2, 3, 19, 8), (4, 3, 3, 3), {"padding": 1}),
    "grid": ({"x": 2, "y": 2}, P(None, None, "x", "y"), (2, 3, 9, 11), (4, 3, 3, 4), {"padding": 2, "stride": (2, 1)}),
    "batch": ({"b": 2, "x": 2}, P("b", None, "x"), (3, 4, 13), (4, 2, 3), {"padding": "SAME", "groups": 2}),
    "channels": ({"b": 2, "x": 2}, P("b", "x"), (3, 4, 13), (4, 4, 3), {"out_spec": P("b")}),
    "some workers": ({"x": 4}, GRID, (1, 4, 9), (6, 4, 3), {"padding": 1, "out_spec": P(None, None, "x")}),
    "groups": ({"x": 4}, GRID, (1, 4, 9), (6, 2, 3), {"groups": 2, "out_spec": P(None, None, "x")}),
    "transposed": ({"b": 2, "x": 2}, P("b", None, "x"), (3, 4, 7), (4, 3, 4), {"stride": 2, "padding": 1}),
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

        layer = functions.conv_transpose if name == "transposed" else functions.conv
        out = how.get("out_spec", spec)

        def body(x, w, spec=spec, how=how, layer=layer):
            return layer(x, w, **how, spec=spec)

        def energy(x, w, body=body, axes=axes, out=out):
            return spmd.psum(np.sum(body(x, w) ** 2), tuple(n for n in axes if n in out.varying))

        with jit.off():
            y = mesh.map(body, in_specs=(spec, P()), out_specs=out)(x, w)
            gradients = spmd.grad(mesh.map(energy, in_specs=(spec, P()), out_specs=P()), (0, 1))
            arrays = y, *gradients(*spmd.put((x, w), (spec, P()), mesh=mesh))
        found[name] = " ".join(digest(a.numpy()) for a in arrays)
    return found


if __name__ == "__main__":
    found = results()
    if spmd.is_main():
        print(json.dumps(found))
