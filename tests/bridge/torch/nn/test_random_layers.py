"""Norms, recurrent layers, attention and Fourier layers with any options, split in any way, against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from bridge.torch.nn.module_cases import Case, check_module
from spmd import P
from spmd.bridge.torch.nn import whole_fourier

pytestmark = [pytest.mark.torch, pytest.mark.full]

MESHES: list[dict[str, int]] = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}]


def split(rng, axes, ndim: int, dims: Any = None) -> list[tuple[str, ...]]:
    """For each dimension the axes that split it: each axis splits one of these dimensions, or none."""
    names: list[tuple[str, ...]] = [()] * ndim
    for axis in rng.permutation([*axes]):
        d = int(rng.choice([-1, *(range(ndim) if dims is None else dims)]))
        if d >= 0:
            names[d] = (*names[d], str(axis))
    return names


def spec_of(names) -> P:
    return P(*(each or None for each in names))


def lengths(rng, count: int, low: int = 1, high: int = 6) -> list[int]:
    return rng.integers(low, high, count).tolist()


def norm_of_channels(rng, axes) -> Case:
    groups, each, places = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    shape = (int(rng.integers(2, 6)), groups * each, *lengths(rng, places, 2))
    lies = spec_of(split(rng, axes, len(shape)))
    affine = {"affine": bool(rng.random() < 0.6), "eps": 0.1}
    kind = rng.choice(["BatchNorm", "InstanceNorm", "GroupNorm"])
    specs = {"spec": lies, **({"w_spec": spec_of(split(rng, axes, 1))} if rng.random() < 0.3 else {})}
    if kind == "GroupNorm":
        return Case(
            "GroupNorm", {"num_groups": groups, "num_channels": shape[1], **affine}, specs, [shape], [lies], lies, axes
        )
    tracks = {"track_running_stats": bool(rng.random() < 0.5), "momentum": None if kind != "InstanceNorm" else 0.2}
    return Case(f"{kind}{places}d", {"num_features": shape[1], **affine, **tracks}, specs, [shape], [lies], lies, axes)


def norm_of_rows(rng, axes) -> Case:
    shape = lengths(rng, int(rng.integers(1, 5)))
    rows = int(rng.integers(1, len(shape) + 1))
    lies = spec_of(split(rng, axes, len(shape)))
    specs = {"spec": lies, **({"w_spec": spec_of(split(rng, axes, rows))} if rng.random() < 0.5 else {})}
    options = {"normalized_shape": tuple(shape[-rows:]), "elementwise_affine": bool(rng.random() < 0.7), "eps": 0.1}
    return Case(str(rng.choice(["LayerNorm", "RMSNorm"])), options, specs, [shape], [lies], lies, axes)


def recurrent(rng, axes) -> Case:
    kind = str(rng.choice(["RNN", "LSTM", "GRU"]))
    time, batch, inputs, hidden = (int(n) for n in rng.integers(1, 6, 4))
    options: dict[str, Any] = {"input_size": inputs, "hidden_size": hidden, "num_layers": int(rng.integers(1, 3))}
    options |= {
        "bidirectional": bool(rng.random() < 0.4),
        "bias": bool(rng.random() < 0.7),
        "batch_first": bool(rng.random() < 0.5),
    }
    if kind == "LSTM" and hidden > 1 and rng.random() < 0.3:
        options["proj_size"] = int(rng.integers(1, hidden))
    times, batches, features = split(rng, axes, 3)
    order = (lambda t, b, *f: (b, t, *f)) if options["batch_first"] else (lambda t, b, *f: (t, b, *f))
    lies = spec_of(order(times, batches))
    specs = {"spec": lies, "w_spec": spec_of([features]), "microbatches": rng.choice([None, 1, 2])}
    of_h = () if "proj_size" in options else features
    y = spec_of(order(times, batches, () if options["bidirectional"] else of_h))
    states = [spec_of([(), batches, of_h]), spec_of([(), batches, features])][: 1 + (kind == "LSTM")]
    return Case(kind, options, specs, [order(time, batch, inputs)], [lies], (y, *states), axes)


def attention(rng, axes) -> Case:
    heads, each = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    batch, queries, keys = lengths(rng, 3)
    options: dict[str, Any] = {"embed_dim": heads * each, "num_heads": heads, "bias": bool(rng.random() < 0.7)}
    options |= {"batch_first": bool(rng.random() < 0.5)}
    order = (lambda b, s, *f: (b, s, *f)) if options["batch_first"] else (lambda b, s, *f: (s, b, *f))
    by_head, batches, positions = split(rng, axes, 3)
    needs, average, of_self = (bool(rng.random() < 0.5) for _ in range(3))
    of_keys = positions if of_self or rng.random() < 0.5 else ()
    lies, kv = spec_of(order(batches, positions)), spec_of(order(batches, of_keys))
    specs: dict[str, Any] = {
        "spec": lies,
        "kv_spec": kv,
        "heads": by_head or None,
        "method": rng.choice([None, "heads", "ring", "sequence"]),
    }
    keys = queries if of_self else keys
    hidden = torch.tensor(rng.random((batch, keys)) < 0.3)
    hidden[:, 0] = False
    mask = torch.tensor(rng.normal(size=(queries, keys)))

    def call(layer, x, y, hidden, mask):
        y = x if of_self else y
        return layer(x, y, y, hidden, needs, mask, average_attn_weights=average)

    shapes = [order(batch, n, heads * each) for n in (queries, keys)]
    weights = spec_of([batches, positions] if average else [batches, by_head, positions])
    ins = [lies, kv, spec_of([batches, of_keys]), P()]
    return Case(
        "MultiheadAttention",
        options,
        specs,
        [*shapes, hidden, mask],
        ins,
        (lies, weights) if needs else lies,
        axes,
        call,
    )


def spectral(rng, axes) -> Case:
    ndim = int(rng.integers(1, 4))
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, 4)), *lengths(rng, ndim, 2, 7))
    modes = [int(rng.integers(1, n + 1)) for n in (*shape[2:-1], shape[-1] // 2 + 1)]
    options = {"in_channels": shape[1], "out_channels": int(rng.integers(1, 4)), "modes": tuple(modes)}
    lies, out = spec_of(split(rng, axes, len(shape))), spec_of(split(rng, axes, len(shape)))
    specs = {"spec": lies, "w_spec": spec_of(split(rng, axes, len(shape))), "out_spec": out}
    return Case(f"SpectralConv{ndim}d", options, specs, [shape], [lies], out, axes, whole=whole_fourier)


FAMILIES = {f.__name__: f for f in (norm_of_channels, norm_of_rows, recurrent, attention, spectral)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(60))
def test_any_layer(family, seed):
    rng = np.random.default_rng([seed, len(family)])
    case = FAMILIES[family](rng, MESHES[int(rng.integers(len(MESHES)))])
    check_module(case, train=bool(rng.random() < 0.7))
