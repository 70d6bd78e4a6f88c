"""Attention in each split and its gradients, as sums that all workers agree on. Runs with any transport."""

from __future__ import annotations

import json

import numpy as np

import spmd
from spmd import P, functions

CASES = {
    "heads": (P("x"), {}),
    "by heads": (P(None, "x"), {"method": "heads", "causal": True}),
    "sequence": (P(None, "x"), {"method": "sequence"}),
    "ring": (P(None, "x"), {"method": "ring"}),
    "causal ring": (P(None, "x"), {"method": "ring", "causal": True}),
    "some workers": (spmd.Layout.grid((6, 11, 4), (1, 3, 1), {"x": 4}, [3, 0, 2]), {"method": "ring", "causal": True}),
}


def results(**options) -> dict[str, list[float]]:
    """Of the result and of the gradients, numbers that depend on every entry and its place."""
    found = {}
    for name, (spec, how) in CASES.items():
        rng = np.random.default_rng(len(name))
        arrays = [rng.standard_normal((6, 11, 4)) for _ in range(3)]
        with spmd.Mesh(x=4, **options):
            body = lambda q, k, v, spec=spec, how=how: functions.attention(q, k, v, spec=spec, **how)
            split = spmd.map(body, (spec,) * 3, spec)
            value, pullback = spmd.vjp(split, *(spmd.put(a, spec) for a in arrays))
            blocks = [value, *pullback(value)]
            found[name] = [float((b.numpy() * rng.standard_normal((6, 11, 4))).sum()) for b in blocks]
    return found


if __name__ == "__main__":
    found = results()
    if spmd.is_main():
        print(json.dumps(found))
