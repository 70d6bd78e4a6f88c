"""Means, norms and moments of short floating-point numbers and of narrow integers are those of wide ones: no sum is
infinite, stands still or wraps around on the way."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd import functions as F
from spmd.autodiff.dtypes import kind_of_dtype

try:
    import ml_dtypes

    FOREIGN = [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "int4", "uint4")]
except ModuleNotFoundError:
    FOREIGN = []

DTYPES = [np.dtype(c) for c in "?bBhHiIlLefdgFD"] + FOREIGN
SHORT = [d for d in DTYPES if kind_of_dtype(d) == "f" and d.itemsize < 4]
EPS = {"float16": 1e-3, "bfloat16": 8e-3, "float8_e4m3fn": 0.13}
SIZES = {"one entry": (1, 0, 0), "uneven": (7, 0, 5), "more than float16 counts": (70_000, 10, 5_000)}
"""Lengths of the blocks of three workers: some are uneven, some empty."""
MANY = 300_000


@pytest.fixture
def mesh(scheduler):
    return spmd.Mesh(x=3, transport="local", scheduler=scheduler)


def draw(dtype, sizes, seed=0):
    """Numbers near the largest of narrow integers, and up to a few hundred else."""
    rng, n = np.random.default_rng(seed), sum(sizes)
    kind = kind_of_dtype(dtype)
    if dtype.kind == "b":
        return rng.random(n) < 0.7
    if kind == "i":
        top = {"int4": 7, "uint4": 15}.get(dtype.name) or min(np.iinfo(dtype).max, 2**40)
        return rng.integers(top * 3 // 4, top + 1, n).astype(dtype)
    if kind == "c":
        return (rng.uniform(1, 3, n) + 1j * rng.uniform(1, 3, n)).astype(dtype)
    return rng.uniform(50, 200, n).astype(dtype)


def laid(x, sizes, mesh):
    return spmd.from_blocks(np.split(x, np.cumsum(sizes)[:-1]), P("x"), mesh)


def mapped(body, x, sizes, mesh, check=True):
    """A body on these very blocks; its result, or results, are Invariant."""
    given = laid(x, sizes, mesh)
    return spmd.map(body, given.layout, P(), mesh=mesh, check=check)(given)


def exact(x):
    return x.astype(np.clongdouble if x.dtype.kind == "c" else np.longdouble)


def near(got, want, dtype):
    got = np.asarray(got)
    np.testing.assert_allclose(exact(got), exact(np.asarray(want)), rtol=EPS.get(dtype.name, 1e-5))


REDUCTIONS = {
    "mean": (lambda b: spmd.mean(b, "x"), np.mean),
    "mean of columns": (lambda b: spmd.mean(np.stack([b, b], 1), "x", axis=0)[0], np.mean),
    "norm": (spmd.norm, lambda x: np.sqrt(np.sum(np.abs(x) ** 2))),
    "pmean of the largest": (lambda b: spmd.pmean(np.max(b, initial=b.dtype.type(0)), "x"), None),
}


@pytest.mark.host("a GPU has other dtypes")
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_means_and_norms_are_those_of_wide_numbers(dtype, sizes, check):
    mesh = spmd.Mesh(x=3, transport="local", scheduler="lockstep")
    x = draw(dtype, sizes)
    blocks = np.split(x, np.cumsum(sizes)[:-1])
    for name, (body, oracle) in REDUCTIONS.items():
        if oracle is None:
            if dtype.kind in "V" or dtype.kind == "c":
                continue
            want = sum(exact(b).max() if b.size else 0 for b in blocks) / 3
        else:
            want = oracle(exact(x))
        if "norm" in name and dtype == np.float16 and want > 65504:
            continue
        if dtype.name == "float8_e4m3fn" and want > 448:
            continue
        got = mapped(body, x, sizes, mesh, check).numpy()
        near(got, want, dtype)
        if name != "norm" and kind_of_dtype(dtype) == "i":
            assert got.dtype == np.float64
        elif name != "norm":
            assert got.dtype == dtype


def test_the_mean_of_many_ones(mesh):
    x = np.ones(MANY, np.float16)
    for check in (True, False):
        mean = spmd.map(lambda b: spmd.mean(b, "x"), P("x"), P(), mesh=mesh, check=check)(x)
        assert (mean.dtype, float(mean)) == (np.float16, 1.0)


@pytest.mark.host("a GPU has other dtypes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inner_products_outside_and_of_trees(dtype, mesh):
    sizes = (70, 0, 23)
    x = draw(dtype, sizes)
    want = np.sum(np.abs(exact(x)) ** 2)
    given = laid(x, sizes, mesh)
    near(spmd.norm(x), np.sqrt(want), dtype)
    near(spmd.norm(given), np.sqrt(want), dtype)
    near(spmd.norm({"a": given, "b": [given]}), np.sqrt(2 * want), dtype)
    if dtype != np.float16:  # which does not hold it
        near(spmd.inner(x, x), want, dtype)
        near(spmd.inner(given, x), want, dtype)
    one = np.ones(3, dtype)
    if dtype.char in "efdF":
        assert spmd.inner(one, one).dtype == dtype


@pytest.mark.parametrize("dtype", [d for d in SHORT if d.name != "float8_e4m3fn"], ids=str)
def test_sums_of_short_numbers_are_rounded_once(dtype, mesh):
    sizes = (5000, 0, 3000)
    x = np.random.default_rng(1).uniform(0, 4, 8000).astype(dtype)
    got = mapped(lambda b: spmd.sum(b, "x"), x, sizes, mesh).numpy()
    assert got.dtype == dtype
    assert abs(float(got) - float(exact(x).sum())) <= float(np.spacing(got.astype(np.float32)) * 2**17)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_gradients_keep_the_dtype_and_are_right(dtype, jit, mesh):
    sizes = (9, 0, 4)
    x = np.random.default_rng(2).uniform(0.5, 2, 13).astype(dtype)
    losses = {
        "mean": (lambda b: spmd.mean(b, "x"), lambda x: np.full(13, 1 / 13)),
        "norm": (spmd.norm, lambda x: x / np.linalg.norm(x)),
        "pmean": (lambda b: spmd.pmean(np.sum(b), "x"), lambda x: np.full(13, 1 / 3)),
        "sum": (lambda b: spmd.sum(b, "x"), lambda x: np.ones(13)),
    }
    for name, (loss, oracle) in losses.items():
        given = laid(x, sizes, mesh)
        f = spmd.map(loss, given.layout, P(), mesh=mesh)
        f = spmd.jit(f) if jit else f
        for _ in range(2):
            g = spmd.grad(f)(given).numpy()
        assert g.dtype == dtype
        np.testing.assert_allclose(exact(g), oracle(x.astype(float)), rtol=2 * EPS[dtype.name], err_msg=name)


@pytest.mark.parametrize("dtype", [d for d in SHORT if d.name != "float8_e4m3fn"], ids=str)
def test_the_gradient_of_an_extremum_is_shared_among_many_ties(dtype, mesh):
    x = np.ones(MANY, dtype)
    f = spmd.map(lambda b: spmd.max(b, "x"), P("x"), P(), mesh=mesh)
    g = spmd.grad(f)(x)
    assert g.dtype == dtype
    np.testing.assert_allclose(g.astype(float), 1 / MANY, rtol=0.02)
    np.testing.assert_allclose(spmd.grad(np.max)(x).astype(float), 1 / MANY, rtol=0.02)
    np.testing.assert_allclose(spmd.grad(np.mean)(x).astype(float), 1 / MANY, rtol=0.02)


@pytest.mark.parametrize("dtype", FOREIGN, ids=str)
def test_extrema_of_dtypes_of_others(dtype, mesh):
    sizes = (0, 4, 3)
    x = draw(dtype, sizes)
    for how, top in (("max", np.max), ("min", np.min)):
        got = mapped(lambda b, how=how: getattr(spmd, how)(b, "x"), x, sizes, mesh).numpy()
        assert got.dtype == dtype
        assert float(got) == float(top(x.astype(float)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_wide_numbers_keep_their_bits(dtype, mesh):
    """The mean is the sum over the count, in the dtype itself."""
    sizes = (1000, 0, 313)
    x = draw(np.dtype(dtype), sizes)
    both = lambda b: (spmd.mean(b, "x"), spmd.psum(np.sum(b), "x") / spmd.psum(b.size, "x"))
    mean, plain = mapped(both, x, sizes, mesh)
    assert mean.numpy().tobytes() == plain.numpy().tobytes()


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_functions_of_models_compute_in_wide_numbers(dtype, mesh):
    if dtype.name == "float8_e4m3fn":
        pytest.skip("the kernels know no such dtype for all of them")
    sizes = (70_000, 0, 3)
    x = np.random.default_rng(3).uniform(100, 130, sum(sizes)).astype(dtype)
    wide = x.astype(float)

    def body(b):
        mean, variance = F.moments(b, axis_name="x")
        normed = F.batch_norm(np.reshape(b, (-1, 1)), spec=P("x"))
        return (
            mean,
            variance,
            spmd.mean(normed, "x"),
            spmd.mean(normed * normed, "x"),
            spmd.mean(F.rms_norm(np.reshape(b, (1, -1)), spec=P(None, "x")) ** 2, "x"),
        )

    mean, variance, centre, spread, square = mapped(body, x, sizes, mesh)
    near(mean, wide.mean(), dtype)
    near(variance, wide.var(), dtype)
    assert abs(float(centre)) < 0.02
    assert abs(float(spread) - 1) < 0.02
    assert abs(float(square) - 1) < 0.02
    logits = np.zeros((MANY, 2), dtype)
    loss = spmd.map(
        lambda b: F.softmax_cross_entropy(b, np.zeros(len(b), int), reduction="mean", batch_axis_name="x"),
        P("x"),
        P(),
        mesh=mesh,
    )(logits)
    near(loss, np.log(2), dtype)


@pytest.mark.parametrize("dtype", [d for d in SHORT if d.name != "float8_e4m3fn"], ids=str)
def test_clipping_by_the_global_norm(dtype, mesh):
    g = np.full(MANY, 2, dtype)
    clip = spmd.map(lambda b: spmd.optim.clip_by_global_norm({"w": b}, 100.0)["w"], P("x"), P("x"), mesh=mesh)
    near(clip(g).numpy()[:3], np.full(3, 2 * 100 / (2 * np.sqrt(MANY))), dtype)


def test_numpys_own_means_are_numpys(mesh):
    x = np.random.default_rng(4).uniform(0, 3, MANY).astype(np.float16)
    run = spmd.map(lambda b: np.reshape(np.mean(b), 1), P("x"), P("x"), mesh=mesh)
    expected = [np.mean(part) for part in np.split(x, 3)]
    np.testing.assert_array_equal(run(x).numpy(), np.array(expected))
    value, _ = spmd.value_and_grad(np.mean)(x)
    assert (value, value.dtype) == (np.mean(x), np.float16)


# Tensors


def torchs():
    torch = pytest.importorskip("torch")
    from spmd.bridge import torch as spt

    return torch, spt, spmd.Mesh(x=3, transport="local")


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_means_of_short_tensors(name):
    torch, spt, mesh = torchs()
    pytest.importorskip("ml_dtypes")
    dtype = getattr(torch, name)
    x = torch.ones(MANY, dtype=dtype, requires_grad=True)
    bodies = {
        "mean": (lambda b: spt.mean(b, "x"), 1.0),
        "mean of columns": (lambda b: spt.mean(b.reshape(-1, 2), "x", axis=0)[0], 1.0),
        "pmean": (lambda b: spt.pmean(30_000 * b[0], "x"), 30_000.0),
        "max": (lambda b: spt.max(b, "x"), 1.0),
    }
    for what, (body, want) in bodies.items():
        loss = spt.map(body, P("x"), P(), mesh=mesh)(x)
        assert loss.dtype is dtype, what
        assert abs(float(loss) - want) <= want * EPS[name], what
        (g,) = torch.autograd.grad(loss, x)
        assert g.dtype is dtype, what
        total = {"mean of columns": 1.0, "pmean": 30_000.0}.get(what, 1.0)
        assert abs(float(g.double().sum()) - total) < 0.03 * total, what
    norm = spt.map(lambda b: spmd.norm(b), P("x"), P(), mesh=mesh)(x.detach())
    assert abs(float(norm) - np.sqrt(MANY)) < 0.01 * np.sqrt(MANY)


def test_means_of_narrow_integer_tensors():
    torch, spt, mesh = torchs()
    x = torch.full((9,), 100, dtype=torch.int8)
    for body in (lambda b: spt.pmean(b, "x").mean(dtype=torch.float64), lambda b: spt.mean(b, "x")):
        assert float(spt.map(body, P("x"), P(), mesh=mesh)(x)) == 100


def test_the_mean_of_gradients_of_float16_is_finite():
    """As DDP has it: each worker's part is divided before parts are added."""
    torch, spt, mesh = torchs()
    rates = torch.tensor([40_000.0, 30_000.0, 50_000.0], dtype=torch.float16)

    def body(rate):
        layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.float16)
        model = spt.data_parallel(layer, "x", reduction="mean")
        (spmd.block(rate).sum() * model(torch.ones(1, 1, dtype=torch.float16))).sum().backward()
        return layer.weight.grad.float().reshape(1)

    torch.manual_seed(0)
    found = spt.map(body, P("x"), P("x"), mesh=mesh, check=False)(rates)
    np.testing.assert_allclose(np.asarray(found), 40_000, rtol=1e-3)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("outside", [True, False])
def test_cotangents_of_many_uses_are_added_up_wide(name, outside):
    """Of a bias that is broadcast to rows, and of an entry that an index takes many times."""
    dtype = np.dtype(name) if name == "float16" else pytest.importorskip("ml_dtypes").bfloat16
    x, index = np.zeros((MANY, 2), dtype), np.zeros(4000, int)
    uses = {
        "a bias": (lambda b: np.sum((x + b).astype("f4")) / MANY, np.zeros(2, dtype), 1.0),
        "a column": (lambda b: np.sum((x + b).astype("f4")) / MANY, np.zeros((1, 2), dtype), 1.0),
        "an entry": (lambda b: np.sum(b[index].astype("f4")), np.zeros(3, dtype), 4000.0),
        "take": (lambda b: np.sum(np.take(b, index).astype("f4")), np.zeros(3, dtype), 4000.0),
    }
    for what, (f, b, want) in uses.items():
        g = spmd.grad(f)(b) if outside else spmd.map(spmd.grad(f), P(), P(), mesh=spmd.Mesh(x=1))(b).numpy()
        assert g.dtype == dtype, what
        np.testing.assert_allclose(g.astype("f8").reshape(-1)[0], want, rtol=0.01, err_msg=what)
