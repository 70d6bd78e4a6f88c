"""`functions.attention` on arrays that lie anyhow, against the softmax of the whole score matrix."""

from __future__ import annotations

import functools
import json
import tracemalloc

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import attending

import spmd
from functions.layer_cases import FRONTENDS, check_layer, random_layout, random_mesh
from spmd import Layout, P, functions
from spmd.errors import LayoutError, SpecError
from spmd.functions.attention_plans import Options, attention_plan
from spmd.functions.attention_tiles import runs_of_heads

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


def operands(rng, n, heads=4, keys=2, d=3, dtype=float):
    return tuple(rng.normal(size=(h, n, d)).astype(dtype) for h in (heads, keys, keys))


@pytest.mark.parametrize("method", ["heads", "sequence", "ring"])
def test_second_order(method):
    """Of global arrays whose sequences are split; for tensors by torch's own check."""
    rng = np.random.default_rng(1)
    q, k, v = operands(rng, 5, 2, 1, 2)
    bias, spec = rng.normal(size=(2, 5, 5)), P(None, "x")
    with spmd.Mesh(x=2):
        body = lambda q, k, v, b: functions.attention(q, k, v, None, b, causal=True, method=method, spec=spec)
        mapped = spmd.map(body, (spec, spec, spec, P()), spec)
        spmd.check_grads(mapped, (q, k, v, bias), order=2)


@pytest.mark.torch
@pytest.mark.parametrize("method", ["heads", "ring"])
def test_second_order_of_tensors(method):
    import torch

    from spmd.bridge import torch as spt

    rng = np.random.default_rng(2)
    arrays = [torch.tensor(a, requires_grad=True) for a in operands(rng, 4, 2, 1, 2)]
    spec, mesh = P(None, "x"), spmd.Mesh(x=2)
    body = lambda q, k, v: functions.attention(q, k, v, causal=True, method=method, spec=spec)
    split = spt.map(body, (spec,) * 3, spec, mesh=mesh)
    weights = torch.tensor(rng.normal(size=arrays[0].shape))
    found = []
    for fun in (split, lambda *qkv: functions.attention(*qkv, causal=True)):
        grads = torch.autograd.grad((fun(*arrays) * weights).sum(), arrays, create_graph=True)
        found.append(torch.autograd.grad(sum((g**3).sum() for g in grads), arrays))
    for a, b in zip(*found, strict=True):
        close(a, b)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_as_in_torch(dtype, causal):
    import torch

    rng = np.random.default_rng(3)
    q, k, v = (torch.tensor(a, dtype=getattr(torch, dtype)) for a in operands(rng, 700, 2, 1, 8))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    ours = functions.attention(q, k, v, causal=causal)
    assert ours.dtype == q.dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    if dtype != "bfloat16":
        y = functions.attention(*(a.numpy() for a in (q, k, v)), causal=causal)
        assert y.dtype == dtype
        np.testing.assert_allclose(y, theirs.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [128, 1000])
@pytest.mark.parametrize("workers", range(2, 9))
@pytest.mark.parametrize("uneven", [False, True])
def test_a_causal_ring_is_balanced(n, workers, uneven):
    """Entries of the score matrix that are not masked, counted per worker and per shift."""
    cuts = [None, (n - workers + 2, 0, *[1] * (workers - 2)), None] if uneven else None
    whole = Layout((1, n, 4), P(None, "x"), {"x": workers}, cuts)
    plan = attention_plan("attention", whole, whole, whole, None, None, Options(True, None, "ring"), None)
    counts = np.array(
        [[sum(p.allowed().sum() for p in plan.parts(w, s)) for s in range(workers)] for w in range(workers)]
    )
    assert counts.sum() == n * (n + 1) // 2
    totals, steps = counts.sum(1), counts[:, 1:]
    assert totals.max() <= 1.1 * totals.mean()
    if n >= 1000:
        assert steps.max() <= 1.1 * steps.mean()


def test_empty_tiles_are_skipped():
    n = 4096
    layout = Layout((1, n, 4), P(), {"x": 1})
    for causal, most in ((False, 1.0), (True, 0.6)):
        plan = attention_plan("attention", layout, layout, layout, None, None, Options(causal, None, "heads"), None)
        assert plan.parts(0, 0)[0].work() <= most * n * n


@pytest.mark.parametrize("causal", [False, True])
def test_memory_of_a_ring(causal):
    """On 4 workers each holds at most a quarter of what one worker does alone, and two blocks: of keys and values."""
    n, d = 8192, 16
    rng = np.random.default_rng(4)
    q, k, v = operands(rng, n, 1, 1, d)
    peaks = []
    for workers in (1, 4):
        mesh = spmd.Mesh(x=workers, scheduler="lockstep")
        spec = P(None, "x")
        body = lambda q, k, v, spec=spec: functions.attention(q, k, v, causal=causal, method="ring", spec=spec)
        placed = [spmd.put(a, spec, mesh) for a in (q, k, v)]
        mapped = mesh.map(body, (spec,) * 3, spec)
        tracemalloc.start()
        result, pullback = spmd.vjp(mapped, *placed)
        pullback(result)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    block = n * d * 8 // 4
    assert peaks[1] / 4 <= peaks[0] / 4 + 2 * block


@pytest.mark.parametrize("workers", [2, 4])
def test_messages_of_a_ring(workers):
    rng = np.random.default_rng(5)
    mesh, spec = spmd.Mesh(x=workers), P(None, "x")
    arrays = operands(rng, 12)
    body = lambda q, k, v: functions.attention(q, k, v, method="ring", spec=spec)
    with spmd.ledger() as log:
        result, pullback = spmd.vjp(mesh.map(body, (spec,) * 3, spec), *(spmd.put(a, spec, mesh) for a in arrays))
    assert dict(log.operators) == {"Permute": 2 * (workers - 1)}
    with spmd.ledger() as log:
        pullback(result)
    assert dict(log.operators) == {"Permute": 2 * (workers - 1) + 2 * workers}


def test_heads_that_lie_together_move_nothing():
    rng = np.random.default_rng(6)
    q, k, v = operands(rng, 5, 8, 4)
    with spmd.Mesh(x=4), spmd.ledger() as log:
        y = spmd.map(lambda q, k, v: functions.attention(q, k, v, axis_name="x"), P("x"), P("x"))(q, k, v)
    assert not log.operators
    close(y.numpy(), functions.attention(q, k, v))


def test_heads_of_a_run():
    """Every head meets its own head of keys."""
    for group in (1, 2, 3, 5):
        for start in range(12):
            for stop in range(start, 13):
                pairs = []
                for (a, b), (c, d) in runs_of_heads((start, stop), group):
                    each, rest = divmod(b - a, d - c)
                    assert rest == 0
                    pairs += [(start + i, start // group + c + (i - a) // each) for i in range(a, b)]
                assert pairs == [(i, i // group) for i in range(start, stop)]


def test_errors():
    q, k = np.ones((4, 3, 2)), np.ones((2, 5, 2))
    for args, error, argument in [
        ((q, k[:, :, :1], k), LayoutError, "k"),
        ((q, np.ones((3, 5, 2)), np.ones((3, 5, 2))), LayoutError, "k"),
        ((q, k, k[:, :4]), LayoutError, "v"),
        ((q[0], k, k), SpecError, "q"),
        ((q, k[None], k), SpecError, "k"),
        ((q, k, k, np.ones((3, 5))), SpecError, "mask"),
        ((q, k, k, np.ones((5, 3), bool)), LayoutError, "mask"),
        ((q, k, k, None, np.ones((2, 3, 5))), LayoutError, "bias"),
        ((q.astype(int), k, k), SpecError, "q"),
    ]:
        with pytest.raises(error, match=rf"spmd\.functions\.attention: argument {argument}"):
            functions.attention(*args)
    with pytest.raises(SpecError, match=r'method="ring"'):
        functions.attention(q, k, k, method="rings")
    with pytest.raises(SpecError, match="argument scale"):
        functions.attention(q, k, k, scale=-1)
    with pytest.raises(SpecError, match="argument axis_name"):
        spmd.Mesh(x=1).map(lambda q, k: functions.attention(q, k, k, axis_name="x", spec=P("x")), P(), P())(q, k)


def test_rows_that_see_nothing():
    rng = np.random.default_rng(7)
    q, k, v = operands(rng, 4)
    mask = np.array([[True], [False], [True], [False]])
    y, pullback = spmd.vjp(lambda *qkv: functions.attention(*qkv, mask), q, k, v)
    assert not y[:, 1::2].any()
    assert all(np.isfinite(g).all() for g in pullback(np.ones_like(y)))


@each_mpi
def test_processes_give_the_numbers_of_virtual_workers(python):
    ended = launch(PROGRAMS / "attending.py", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    expected = attending.results(transport="local", scheduler="threads")
    found = json.loads(ended.stdout)
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        close(found[name], numbers)
