"""Layers by `spmd.functions` with specs, beside the same written out with operators: value and gradients in a body.

Two virtual workers, float64. Perceptron: 256 rows of width 512 through two products, the first split by rows of the
weights, the second by columns. Convolution: eight images of 16 channels and 128x128 points, split along the rows, by a
kernel of 3x3; by hand a halo exchange and the convolution of the extended block. Layer norm: 4,096 rows of 1,024
features, split; by hand two sums. Cross-entropy: 4,096 rows of 1,024 classes, split; by hand a maximum and two sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, repeated

FUNCTIONS = Section("functions", "layers by functions and by hand, value and gradients, on two workers", 1e-9)


def case(body: Callable[..., Any], shapes: Sequence[tuple[int, ...]], specs: Sequence[Any], out: Any) -> Case:
    """The value of a layer and its cotangents for one."""
    import spmd

    mesh = spmd.Mesh(m=2)
    operands = [np.random.default_rng(k).standard_normal(shape) / shape[-1] ** 0.5 for k, shape in enumerate(shapes)]

    def both(*blocks: Any) -> Any:
        y, pullback = spmd.vjp(body, *blocks)
        return y, *pullback(y)

    run = mesh.map(both, in_specs=tuple(specs), out_specs=(out, *specs))
    placed = [spmd.put(x, spec, mesh) for x, spec in zip(operands, specs, strict=True)]
    return Case(repeated(lambda: run(*placed)), lambda: [a.numpy() for a in run(*placed)])


def perceptron(by_hand: bool, rows: int, width: int) -> Case:
    import spmd
    from spmd import P, functions

    def layers(x, up, down):
        h = np.maximum(functions.linear(x, up, w_spec=P("m")), 0)
        return functions.linear(h, down, spec=P(None, "m"), w_spec=P(None, "m"))

    def operators(x, up, down):
        return spmd.psum(np.maximum(x @ up.T, 0) @ down.T, "m")

    shapes, specs = ((rows, width), (4 * width, width), (width, 4 * width)), (P(), P("m"), P(None, "m"))
    return case(operators if by_hand else layers, shapes, specs, P())


def convolution(by_hand: bool, n: int) -> Case:
    import spmd
    from spmd import P, functions

    spec = P(None, None, "m")

    def layer(x, w):
        return functions.conv(x, w, padding=1, spec=spec)

    def operators(x, w):
        x = spmd.halo_exchange(x, spec, (0, 0, 1), "zero")
        return functions.conv(x, w, padding=((0, 0), (1, 1)))

    return case(operators if by_hand else layer, ((8, 16, n, n), (16, 16, 3, 3)), (spec, P()), spec)


def norm(by_hand: bool, rows: int, features: int) -> Case:
    import spmd
    from spmd import P, functions

    spec = P(None, "m")

    def layer(x, w):
        return functions.layer_norm(x, w, spec=spec)

    def operators(x, w):
        mean = spmd.psum(np.sum(x, axis=-1, keepdims=True), "m") / features
        apart = x - mean
        variance = spmd.psum(np.sum(apart**2, axis=-1, keepdims=True), "m") / features
        return apart / np.sqrt(variance + 1e-5) * w

    return case(operators if by_hand else layer, ((rows, features), (features,)), (spec, P("m")), spec)


def entropy(by_hand: bool, rows: int, classes: int) -> Case:
    import spmd
    from spmd import P, functions

    spec, labels = P(None, "m"), np.random.default_rng(1).integers(0, classes, rows)

    def layer(x):
        return functions.cross_entropy(x, labels, spec=spec)

    def operators(x):
        top = spmd.pmax(spmd.stop_gradient(np.max(x, axis=-1)), "m")
        total = np.log(spmd.psum(np.sum(np.exp(x - top[:, None]), axis=-1), "m")) + top
        own = labels - x.shape[1] * spmd.worker_index("m")
        inside = (own >= 0) & (own < x.shape[1])
        picked = np.where(spmd.varying(inside, "m"), x[np.arange(rows), np.where(inside, own, 0)], 0)
        return np.mean(total - spmd.psum(picked, "m"))

    return case(operators if by_hand else layer, ((rows, classes),), (spec,), P())


def works(by_hand: bool, quick: bool) -> Builders:
    rows, n, many = (16, 16, 64) if quick else (256, 128, 4096)
    return {
        f"perceptron, {rows} rows": partial(perceptron, by_hand, rows, 2 * rows),
        f"convolution, {n}x{n}": partial(convolution, by_hand, n),
        f"layer norm, {many} rows": partial(norm, by_hand, many, 8 * n),
        f"cross-entropy, {many} rows": partial(entropy, by_hand, many, 8 * n),
    }


@FUNCTIONS.contestant("functions", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return works(False, quick)


@FUNCTIONS.contestant("by hand", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return works(True, quick)
