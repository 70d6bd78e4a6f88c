"""Checks of derivatives with arguments that are split: what each says, for the test to compare between transports."""

from __future__ import annotations

import json

import numpy as np

import spmd
from spmd import P

SHAPE = (5, 3)
SPECS = {"rows": P("x"), "columns": P(None, "y"), "both": P("x", "y"), "twice": P(None, ("x", "y")), "whole": P()}


def cube(factor: float):
    """x³ by a rule that is wrong by a factor."""
    f = spmd.custom_vjp(lambda x: x**3)
    f.defvjp(lambda x: (x**3, x), lambda x, g: (factor * 3 * g * x**2,))
    return f


def said(check, *args, **options) -> str:
    try:
        check(*args, **options)
    except AssertionError as error:
        return str(error)
    return "passed"


def results() -> dict[str, str]:
    """For each check its failure, or that it passed."""
    axes = {"x": 2, "y": 2}
    rng = np.random.default_rng(3)
    real = rng.normal(size=SHAPE)
    found = {}
    with spmd.Mesh(**axes):
        for name, spec in SPECS.items():
            for dtype in ("f8", "f4", "c16"):
                values = (real + 1j * rng.normal(size=SHAPE) if dtype == "c16" else real).astype(dtype)
                x, w = spmd.put(values, spec), spmd.put(real.astype(values.real.dtype), spec)
                for factor in (1.0, 1.5):
                    rule = cube(factor)
                    mapped = spmd.map(lambda x, w, rule=rule: rule(x) * w, (spec, spec), spec)
                    key = f"{name} {dtype} {factor}"
                    found[key] = said(spmd.check_vjp, mapped, (x, w))
                    found[f"{key}, of global arrays"] = said(spmd.check_vjp, lambda x, rule=rule: rule(x), (x,))
            x = spmd.put(real, spec)
            tree = {"x": x, "bare": real[0], "count": 3}
            both = lambda t: np.sum(np.sin(t["x"]) * t["bare"]) * t["count"]
            found[f"{name}, second order 1.0"] = said(spmd.check_grads, both, (tree,), modes=("fwd", "rev"))
    return found


if __name__ == "__main__":
    shown = json.dumps(results())
    if spmd.is_main():
        print(shown, flush=True)
