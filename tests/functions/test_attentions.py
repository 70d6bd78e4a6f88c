"""`functions.attention` on arrays that lie anyhow, against the softmax of the whole score matrix."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, random_layout, random_mesh
from spmd import Layout, P, functions
from spmd.functions.attention_plans import Options, attention_plan

close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)


def weights(q, k, mask, bias, causal):
    """The weights of all keys; rows that see nothing are zero."""
    s = q @ np.swapaxes(np.repeat(k, q.shape[-3] // k.shape[-3], -3), -1, -2) / np.sqrt(q.shape[-1])
    seen = np.broadcast_to(mask, s.shape)
    if causal:
        seen = seen & (np.arange(s.shape[-2])[:, None] >= np.arange(s.shape[-1]))
    s = np.where(seen, s + bias, -np.inf)
    high = np.max(s, -1, keepdims=True, initial=-1e9)
    p = np.exp(s - high)
    total = p.sum(-1, keepdims=True)
    return p / np.where(total == 0, 1, total)


def reference(q, k, v, mask, bias, causal, g):
    """The result, and the cotangents of q, k, v and bias."""
    p, group = weights(q, k, mask, bias, causal), q.shape[-3] // k.shape[-3]
    wide_k, wide_v = (np.repeat(a, group, -3) for a in (k, v))
    out = p @ wide_v
    ds = p * (g @ np.swapaxes(wide_v, -1, -2) - np.sum(g * out, -1, keepdims=True))

    def shared(a):
        return a.reshape(*k.shape[:-2], group, *a.shape[-2:]).sum(-3)

    scale = 1 / np.sqrt(q.shape[-1])
    dk = shared(np.swapaxes(ds, -1, -2) @ q) * scale
    dv = shared(np.swapaxes(p, -1, -2) @ g)
    dbias = ds.sum(tuple(range(ds.ndim - bias.ndim)))
    dbias = dbias.sum(tuple(d for d, n in enumerate(bias.shape) if n == 1), keepdims=True)
    return out, (ds @ wide_k * scale, dk, dv, dbias)


def term(rng, full):
    """The shape of a bias or mask that broadcasts to a shape."""
    shape = [1 if rng.random() < 0.3 else n for n in full]
    return tuple(shape[rng.integers(0, len(full)) :])


def layout_by(mesh: spmd.Mesh, spec: P | Layout, shape: tuple[int, ...]) -> Layout:
    return spec if isinstance(spec, Layout) else mesh.layout(shape, spec)


def check(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    group, keys = (int(n) for n in rng.integers(1, 4, 2))
    batch = tuple(rng.integers(0 if rng.random() < 0.1 else 1, 4, rng.integers(0, 3)).tolist())
    n = int(rng.integers(0, 12))
    m = n if rng.random() < 0.6 else int(rng.integers(0, 12))
    d, e = (int(i) for i in rng.integers(1, 4, 2))
    shapes = (*batch, group * keys, n, d), (*batch, keys, m, d), (*batch, keys, m, e)
    full = (*batch, group * keys, n, m)
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    mask, bias = rng.random(term(rng, full)) < 0.7, rng.normal(size=term(rng, full))
    g = rng.normal(size=(*q.shape[:-1], e))
    method = rng.choice(["heads", "sequence", "ring", None])
    causal = bool(rng.random() < 0.5)
    spec = random_layout(rng, q.shape, mesh)
    kv_spec = random_layout(rng, k.shape, mesh, whole=[k.ndim - 1])
    v_spec = as_keys(kv_spec, v.shape)
    mask_spec, bias_spec = (random_layout(rng, a.shape, mesh) if rng.random() < 0.5 else None for a in (mask, bias))
    out_spec = random_layout(rng, g.shape, mesh) if rng.random() < 0.3 else None
    specs = spec, kv_spec, v_spec, mask_spec or P(), bias_spec or P()
    layouts = [layout_by(mesh, s, a.shape) for s, a in zip(specs, (q, k, v, mask, bias), strict=True)]
    out = attention_plan("attention", *layouts, Options(causal, None, method), out_spec).out

    options = {"causal": causal, "method": method, "out_spec": out_spec}

    def fun(q, k, v, mask, bias):
        split = {"spec": spec, "kv_spec": kv_spec, "v_spec": v_spec, "mask_spec": mask_spec, "bias_spec": bias_spec}
        return functions.attention(q, k, v, mask, bias, **split, **options)

    def in_global(q, k, v, mask, bias):
        return functions.attention(q, k, v, mask, bias, **options)

    value, (dq, dk, dv, db) = reference(q, k, v, mask, bias, causal, g)
    expected = value, (dq, dk, dv, None, db)
    arrays = q, k, v, mask, bias
    check_layer(fun, expected, arrays, specs, out, mesh, g, compare=close, in_global=in_global, torch=torch)


def as_keys(kv_spec, shape):
    """The layout of v, which lies as k does and has other features."""
    if isinstance(kv_spec, P):
        return kv_spec
    cuts = [*kv_spec.cuts[:-1], None]
    if kv_spec.spec is not None:
        return Layout(shape, kv_spec.spec, kv_spec.axes, cuts)
    return Layout.grid(shape, [len(c) for c in kv_spec.cuts], kv_spec.axes, kv_spec.workers, cuts)


@FRONTENDS
@pytest.mark.parametrize("seed", range(25))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, torch):
    check(seed, torch)
