"""Random programs of collectives, and how one worker may part ways from the others in them."""

from __future__ import annotations

import random

import numpy as np

import spmd


def draw_call(rng: random.Random, axes: list[str]) -> tuple:
    """A collective: its function, axis, shape, dtype and parameter."""
    function = rng.choice(["psum", "pmax", "all_gather", "psum_scatter", "ppermute", "all_to_all", "sum_reduce"])
    return function, rng.choice(axes), rng.choice([(4,), (4, 2), (4, 4, 1)]), rng.choice("fdi"), rng.randrange(2)


def execute(call: tuple) -> None:
    function, axis, shape, dtype, parameter = call
    x = spmd.varying(np.ones(shape, dtype), axis)
    n = spmd.axis_size(axis)
    match function:
        case "psum" | "pmax":
            getattr(spmd, function)(x, axis)
        case "all_gather":
            spmd.all_gather(x, axis, axis=parameter % len(shape), tiled=True)
        case "psum_scatter":
            spmd.psum_scatter(x, axis, tiled=True, sizes=[4 - parameter, parameter, *[0] * (n - 2)])
        case "ppermute":
            spmd.ppermute(x, axis, [(k, (k + 1 - 2 * parameter) % n) for k in range(n)][: n - (n == 2) * parameter])
        case "all_to_all":
            spmd.all_to_all(x, axis, 0, parameter % len(shape), tiled=True)
        case "sum_reduce":
            spmd.sum_reduce(x, axis, parameter)


def spoil(rng: random.Random, calls: list[tuple], axes: list[str]) -> list[tuple]:
    """The calls of the worker that parts ways: one is another, or missing, or two have changed places."""
    calls, k = list(calls), rng.randrange(len(calls))
    usual = calls[k]
    function, _, shape, *_ = usual
    kind = rng.choice(["function", "axis", "shape", "dtype", "parameter", "missing", "order", "extra", "return"])
    if kind == "missing":
        del calls[k]
    elif kind == "return":
        del calls[k:]
    elif kind == "extra":
        calls.insert(k, draw_call(rng, axes))
    elif kind == "order":
        later = [j for j in range(k + 1, len(calls)) if calls[j] != usual]
        if later:
            calls[k], calls[later[0]] = calls[later[0]], usual
    else:
        place = ["function", "axis", "shape", "dtype", "parameter"].index(kind)
        other = draw_call(rng, axes)
        if kind == "parameter" and function in ("psum", "pmax"):
            return calls  # They have none.
        if function in ("all_gather", "all_to_all") and kind == "parameter" and len(shape) == 1:
            return calls  # Dimension 0 either way.
        calls[k] = (*usual[:place], other[place], *usual[place + 1 :])
    return calls
