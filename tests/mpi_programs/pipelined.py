"""Ten steps of a model in stages: an embedding that the first and the last stage share, layers of uneven widths.

`trained` runs them in a pipeline, along with data parallelism and a split layer where the mesh has such axes, and
`by_one_worker` without either.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np

import spmd
from spmd import P

VOCABULARY, STEPS = 7, 10


def embed(params, tokens, shared):
    return np.tanh(shared["embedding"][tokens] @ params["w"] + params["b"])


def layer(params, x, shared):
    return {"h": np.tanh(x @ params["w"] + params["b"]) if not isinstance(x, dict) else np.tanh(x["h"] @ params["w"])}


def head(params, x, shared):
    h = x["h"] if isinstance(x, dict) else x
    return (h @ params["w"]) @ shared["embedding"].T


def split_layer(params, x, shared):
    """A layer whose inner width lies split over `model`: two products, and one sum."""
    h = x["h"] if isinstance(x, dict) else x
    return {"h": h + spmd.psum(np.tanh(h @ params["up"]) @ params["down"], "model")}


def whole_layer(params, x, shared):
    h = x["h"] if isinstance(x, dict) else x
    return {"h": h + np.tanh(h @ params["up"]) @ params["down"]}


def loss(logits, targets):
    shifted = logits - np.max(logits, axis=1, keepdims=True)
    logs = shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
    return -np.mean(np.take_along_axis(logs, targets[:, None], 1))


def model(stages: int, inner: bool, seed: int = 0) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """The functions of the stages, their parameters, and what they share. inner: whether the second one is split."""
    rng = np.random.default_rng(seed)
    widths = [5, *rng.integers(2, 7, stages - 1).tolist(), 5]
    functions: list[Any] = [embed, *[layer] * (stages - 2), head] if stages > 1 else [whole]
    params: list[Any] = [
        {"w": rng.normal(size=(a, b)), "b": rng.normal(size=b)} if k < stages - 1 else {"w": rng.normal(size=(a, b))}
        for k, (a, b) in enumerate(pairwise(widths))
    ]
    if stages == 1:
        params = [
            {"first": {"w": rng.normal(size=(5, 4)), "b": rng.normal(size=4)}, "last": {"w": rng.normal(size=(4, 5))}}
        ]
    if inner:
        functions[1], n = whole_layer, widths[1]
        params[1] = {"up": rng.normal(size=(n, 6)), "down": rng.normal(size=(6, n))}
        params[2]["w"] = rng.normal(size=(n, widths[3]))
    return functions, params, {"embedding": rng.normal(size=(VOCABULARY, 5))}


def whole(params, tokens, shared):
    return head(params["last"], embed(params["first"], tokens, shared), shared)


def batch(step: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([1, step])
    return rng.integers(0, VOCABULARY, n), rng.integers(0, VOCABULARY, n)


def by_one_worker(stages: int, n: int, inner: bool = False) -> tuple[list[float], Any]:
    """The losses of the steps, and the parameters in the end."""
    functions, params, shared = model(stages, inner)

    def total(params, shared, tokens, targets):
        x = tokens
        for f, own in zip(functions, params, strict=True):
            x = f(own, x, shared)
        return loss(x, targets)

    losses = []
    for k in range(STEPS):
        value, grads = spmd.value_and_grad(total, (0, 1))(params, shared, *batch(k, n))
        losses.append(float(value))
        params, shared = spmd.tree.map(lambda w, g: w - 0.1 * g, (params, shared), grads)
    return losses, (params, shared)


def trained(
    stages: int, n: int, schedule: str, microbatches: int, options: dict[str, Any] | None = None, **axes: int
) -> tuple[list[float], Any, dict[int, int]]:
    """As `by_one_worker`, in a pipeline; and how many microbatches each worker kept. axes: those of the mesh."""
    mesh = spmd.Mesh(**axes, **(options or {}))
    inner, data = "model" in axes, ("data",) if "data" in axes else ()
    functions, params, shared = model(stages, inner)
    functions = [split_layer if f is whole_layer else f for f in functions]

    split = {"up": P(None, "model"), "down": P("model")} if inner else {}
    if stages > 1:
        with mesh:
            specs = spmd.training.stage_specs(
                params, "stage", [{name: split.get(name, P()) for name in own} for own in params]
            )
    else:
        specs = [P()]

    def body(params, shared, tokens, targets):
        """The loss is a sum over the workers along `data`, each of which has a part of the mean."""
        count = spmd.psum(len(tokens), "data") if data else len(tokens)
        step = spmd.training.pipeline(
            functions,
            "stage",
            microbatches=microbatches,
            schedule=schedule,
            loss=lambda y, targets: loss(y, targets) * (len(targets) / count),
            reduction="sum",
        )
        value, grads = step.value_and_grad(params, tokens, targets, shared=shared)
        kept.update(step.most)
        return spmd.psum(value, "data") if data else value, grads.params, grads.shared

    kept: dict[int, int] = {}
    f = spmd.map(body, (specs, P(), P(*data), P(*data)), (P(), specs, P()), mesh=mesh)
    losses = []
    for k in range(STEPS):
        value, *grads = f(params, shared, *batch(k, n))
        losses.append(float(value))
        params, shared = spmd.tree.map(lambda w, g: w - 0.1 * g, (params, shared), tuple(grads))
    return losses, (params, shared), kept


def agree(stages: int, n: int, schedule: str, microbatches: int, options: Any = None, **axes: int) -> dict[int, int]:
    """Raise unless the pipeline does what one worker does; how many microbatches each worker kept."""
    losses, (params, shared) = by_one_worker(stages, n, "model" in axes)
    found, (found_params, found_shared), kept = trained(stages, n, schedule, microbatches, options, **axes)
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-10)
    for a, b in zip(spmd.tree.leaves((params, shared)), spmd.tree.leaves((found_params, found_shared)), strict=True):
        np.testing.assert_allclose(b.numpy() if hasattr(b, "numpy") else b, a, rtol=0, atol=1e-10)
    return kept


def main() -> None:
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        agree(4, 11, schedule, 5, stage=4)
    agree(8, 9, "interleaved", 6, stage=4)
    agree(2, 13, "1f1b", 4, data=2, stage=2)
    agree(4, 7, "interleaved", 3, data=2, stage=2)
    if spmd.is_main():
        print("trained")


if __name__ == "__main__":
    sys.exit(main())
