"""Recurrent layers over blocks of time and of hidden features, as digests of all workers. Runs with any transport.

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
    "time": ("gru", {"t": 4}, P("t"), None, 3),
    "time and batch": ("gru", {"t": 2, "b": 2}, P("t", "b"), None, None),
    "features": ("lstm", {"m": 4}, P(), P("m"), None),
    "time and features": ("lstm", {"t": 2, "m": 2}, P("t"), P("m"), 2),
}


def parameters(rng: np.random.Generator, gates: int) -> dict[str, np.ndarray]:
    """Of two layers in both directions, of 3 inputs and 5 hidden features, with the gates apart."""
    found = {}
    for layer, inputs in ((0, 3), (1, 10)):
        for way in ("", "_reverse"):
            found[f"weight_ih_l{layer}{way}"] = rng.standard_normal((gates, 5, inputs))
            found[f"weight_hh_l{layer}{way}"] = rng.standard_normal((gates, 5, 5))
    return found


def digest(x) -> str:
    x = to_host(x)
    return f"{x.dtype}{list(x.shape)}" + hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:12]


def results(**options) -> dict[str, str]:
    """Of real numbers, so that the order of sums shows."""
    found = {}
    for name, (kind, axes, spec, w_spec, microbatches) in CASES.items():
        rng = np.random.default_rng(len(name))
        x, params = rng.standard_normal((7, 5, 3)), parameters(rng, {"gru": 3, "lstm": 4}[kind])
        lengths = rng.integers(0, 8, 5)
        mesh = spmd.Mesh(**axes, **options)
        w_specs = P() if w_spec is None else P(None, "m")
        l_spec = P("b") if "b" in axes else P()

        def energy(x, params, lengths, kind=kind, spec=spec, w_spec=w_spec, microbatches=microbatches):
            layer = getattr(functions, kind)
            how = {"spec": spec, "w_spec": w_spec, "microbatches": microbatches}
            y, _ = layer(x, None, params, lengths=lengths, **how)
            return spmd.psum(np.sum(y**2), spec.axes) if spec.axes else np.sum(y**2)

        with jit.off():
            mapped = mesh.map(energy, in_specs=(spec, w_specs, l_spec), out_specs=P())
            placed = spmd.put((x, params, lengths), (spec, w_specs, l_spec), mesh=mesh)
            value, gradients = spmd.value_and_grad(mapped, (0, 1))(*placed)
        found[name] = " ".join(digest(a.numpy()) for a in [value, *spmd.tree.leaves(gradients)])
    return found


if __name__ == "__main__":
    found = results()
    if spmd.is_main():
        print(json.dumps(found))
