"""Normalisation: the kernels against their references, and the functions over them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from kernel_cases import Family, dtype_of, epsilon

import spmd
from spmd import P
from spmd import functions as F
from spmd.errors import SpecError, StateError
from spmd.kernels import cpu, jit, reference
from spmd.kernels.cpu.chunks import accurate

family = Family("normalisation")


def stacked(draw):
    inner = draw.choose(1, 5, 33) if draw.small else draw.choose(1, 1, 5, 70)
    return draw.integer(0, 4), draw.integer(0, 5), inner


def channels(draw, count):
    return tuple(draw.array((draw.last[1],)) for _ in range(count))


def affine(draw):
    draw.last = stacked(draw)
    return draw.array(draw.last), *channels(draw, 3)


def sums(draw):
    draw.last = stacked(draw)
    return draw.array(draw.last), draw.array(draw.last), *channels(draw, 1)


def rows(draw):
    x = draw.array((*draw.shape(0, 2), draw.choose(1, 4, 33, 130)), low=-3, high=5)
    weights = (draw.array(x.shape[-1:]) if draw.choose(True, False) else None for _ in range(2))
    return x, *weights, draw.choose(0.5, 0.125), draw.choose(True, False)


def cotangents(draw):
    x, weight, _, eps, centred = rows(draw)
    _, mean, rstd = reference.normalize(x.astype(float), None, None, eps, centred)
    return draw.array(x.shape), x, weight, mean.astype(accurate(x.dtype)), rstd.astype(accurate(x.dtype)), centred


family.case("moments", lambda draw: (draw.array(stacked(draw), low=-3, high=5),), scale=99, kept=(0,))
family.case("channel_affine", affine, scale=30)
family.case("channel_sums", sums, scale=999, kept=(0,))
family.case("normalize", rows, scale=20, kept=(1, 2))
family.case("normalize_vjp", cotangents, scale=900, kept=(1, 2))

TestKernels = family.tests()


@pytest.mark.parametrize("shape", [(3000, 7, 1), (3, 7, 10000), (1, 9, 20000)])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_large_mean_does_no_harm(shape, compiled):
    if compiled and not jit.available():
        pytest.skip("needs numba")
    x = (1e4 + np.random.default_rng(0).normal(size=shape)).astype("float32")
    with contextlib.nullcontext() if compiled else jit.off():
        mean, square = cpu.moments(x)
    exact = reference.moments(x.astype(float))
    np.testing.assert_allclose(mean, exact[0], rtol=1.2e-7)
    np.testing.assert_allclose(square, exact[1], rtol=1e-5)


# The functions


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_short_numbers_stay_in_range(dtype):
    """A sum of squares of 100000 numbers is beyond float16, and their distances from a mean near 100 are its last bits.
    All but the results is computed in float32."""
    dtype = dtype_of(dtype)
    rng = np.random.default_rng(0)
    x, g = (100 + 4 * rng.normal(size=(4, 2, 160, 160))).astype(dtype), rng.normal(size=(4, 2, 160, 160)).astype(dtype)
    w, b, wide = np.float32([1.001, 2]), np.float32([0, 1]), x.astype(float)
    mesh = spmd.Mesh(m=2, transport="local")

    def split(f):
        return mesh.map(f, in_specs=(P("m"), P(), P()), out_specs=P("m"))

    rows = mesh.map(
        lambda x: F.layer_norm(np.reshape(x, (1, -1)), spec=P(None, "m")), in_specs=P("m"), out_specs=P(None, "m")
    )
    near(F.moments(x, (0, 2, 3)), F.moments(wide, (0, 2, 3)), dtype)
    near(rows(x), F.layer_norm(wide.reshape(1, -1)), dtype)
    for f in (
        F.batch_norm,
        split(lambda x, w, b: F.batch_norm(x, w, b, spec=P("m"))),
        lambda x, w, b: F.group_norm(x, 1, w, b),
    ):
        wanted = spmd.vjp(f, wide, w.astype(float), b.astype(float))
        actual = spmd.vjp(f, x, w, b)
        near(actual[0], wanted[0], dtype)
        for a, c in zip(actual[1](g), wanted[1](g.astype(float)), strict=True):
            near(a, c, dtype)
        assert [a.dtype for a in actual[1](g)] == [dtype, w.dtype, b.dtype]


def near(actual, wanted, dtype):
    actual, wanted = np.asarray(actual).astype(float), np.asarray(wanted)
    assert np.max(np.abs(actual - wanted)) <= 2 * epsilon(dtype) * np.max(np.abs(wanted))


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape) * 2 + 1


X, W, B = normal(3, 6, 5), normal(6), normal(6) - 2

FUNCTIONS = {
    "layer_norm": lambda x, w, b: F.layer_norm(np.swapaxes(x, 1, 2), w, b),
    "layer_norm of two axes": lambda x, w, b: F.layer_norm(x, w[:, None] * b[:5], ndim=2),
    "rms_norm": lambda x, w, b: F.rms_norm(np.swapaxes(x, 1, 2), w) + b,
    "batch_norm": lambda x, w, b: F.batch_norm(x, w, b),
    "batch_norm of vectors": lambda x, w, b: F.batch_norm(np.swapaxes(x, 1, 2), w, b, axis=-1),
    "group_norm": lambda x, w, b: F.group_norm(x, 3, w, b),
    "instance_norm": lambda x, w, b: F.instance_norm(x, w, b),
    "moments": lambda x, w, b: np.stack(F.moments(x, (0, 2))) * w + b,
    "moments of leading axes": lambda x, w, b: np.stack(F.moments(x, (0, 1))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_to_second_order(name):
    spmd.check_grads(FUNCTIONS[name], (X, W, B), order=2)


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm"])
def test_derivatives_to_third_order(name):
    spmd.check_grads(lambda x: FUNCTIONS[name](x, W, B), (X[:2, :, :3],), order=3, modes=("rev",))


@pytest.mark.torch
def test_functions_are_those_of_torch():
    import torch

    nn = torch.nn.functional
    x, w, b = (torch.tensor(a, requires_grad=True) for a in (X, W, B))
    theirs = {
        "layer_norm": lambda: nn.layer_norm(x.swapaxes(1, 2), (6,), w, b),
        "rms_norm": lambda: nn.rms_norm(x.swapaxes(1, 2), (6,), w, 1e-6) + b,
        "batch_norm": lambda: nn.batch_norm(x, None, None, w, b, training=True),
        "group_norm": lambda: nn.group_norm(x, 3, w, b),
        "instance_norm": lambda: nn.instance_norm(x, weight=w, bias=b),
    }
    for name, f in theirs.items():
        y = f()
        wanted = torch.autograd.grad((y**3).sum(), (x, w, b))
        np.testing.assert_allclose(FUNCTIONS[name](X, W, B), y.detach().numpy(), rtol=1e-10, atol=1e-12)
        actual = spmd.grad(lambda *a, name=name: np.sum(FUNCTIONS[name](*a) ** 3), (0, 1, 2))(X, W, B)
        for g, h in zip(actual, wanted, strict=True):
            np.testing.assert_allclose(g, h.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.torch
def test_running_averages_are_those_of_torch():
    import torch

    mean, variance = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    running = (np.zeros(6), np.ones(6))
    for k in range(3):
        torch.nn.functional.batch_norm(torch.tensor(X * k), mean, variance, training=True, momentum=0.2)
        _, running = F.batch_norm(X * k, running=running, momentum=0.2)
    np.testing.assert_allclose(running, [mean, variance])
    wanted = torch.nn.functional.batch_norm(torch.tensor(X), mean, variance, training=False)
    y, after = F.batch_norm(X, running=running, training=False)
    np.testing.assert_allclose(y, wanted)
    assert after is running


def test_cotangents_are_made_once(monkeypatch):
    calls = []
    kernel = cpu.normalize_vjp
    monkeypatch.setattr(cpu, "normalize_vjp", lambda *a: calls.append(1) or kernel(*a))
    spmd.grad(lambda x, w, b: np.sum(F.layer_norm(x, w, b) ** 2), (0, 1, 2))(X, W[:5], B[:5])
    assert len(calls) == 1


def test_merged_moments_are_those_of_all():
    parts = [normal(n, 4) for n in (3, 1, 6)]
    actual = [reference.moments(p[:, :, None]) for p in parts]
    count, mean, square = F.merge_moments([3, 1, 6], np.stack([f[0] for f in actual]), np.stack([f[1] for f in actual]))
    whole = np.concatenate(parts)
    assert count == 10
    np.testing.assert_allclose(mean, whole.mean(0))
    np.testing.assert_allclose(square / count, whole.var(0))


@pytest.mark.parametrize("items", [7, 2])  # uneven, and with empty blocks
def test_statistics_of_all_workers(items, scheduler):
    x = normal(items, 6, 5)
    mesh = spmd.Mesh(data=3, transport="local", scheduler=scheduler)
    both = spmd.map(lambda x: F.moments(x, (0, 2), axis_name="data"), P("data"), P(), mesh=mesh)(x)
    np.testing.assert_allclose(both[0].numpy(), x.mean((0, 2)))
    np.testing.assert_allclose(both[1].numpy(), x.var((0, 2)))
    y = spmd.map(lambda x, w, b: F.batch_norm(x, w, b, spec=P("data")), (P("data"), P(), P()), P("data"), mesh=mesh)
    np.testing.assert_allclose(y(x, W, B).numpy(), F.batch_norm(x, W, B), atol=1e-12)
    weights = normal(items, 6, 6)[:, :, :5]

    def total(x, w, b, v):
        return spmd.sum(F.batch_norm(x, w, b, spec=P("data")) * v, "data")

    mapped = spmd.map(total, (P("data"), P(), P(), P("data")), P(), mesh=mesh)
    serial = spmd.grad(lambda x, w, b: np.sum(F.batch_norm(x, w, b) * weights), (0, 1, 2))(x, W, B)
    for actual, wanted in zip(spmd.grad(mapped, (0, 1, 2))(x, W, B, weights), serial, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-11)
    spmd.check_grads(lambda x, w: mapped(x, w, B, weights), (x, W), order=2)


def test_batch_norm_costs_one_gather_and_two_sums():
    with spmd.Mesh(data=3, transport="local"):
        loss = spmd.map(lambda x: spmd.psum(np.sum(F.batch_norm(x, spec=P("data")) ** 3), "data"), P("data"), P())
        with spmd.ledger() as forward:
            loss(X)
        with spmd.ledger() as both:
            spmd.value_and_grad(loss)(X)
    assert forward.verbs == {"all_gather": 1, "all_reduce": 1}
    assert sum(both.verbs.values()) <= 4


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("n", [7, 2])
def test_rows_that_are_spread(name, n, scheduler):
    x, w, v = normal(4, n), normal(n), normal(4, n + 1)[:, :n]
    mesh = spmd.Mesh(data=2, model=3, transport="local", scheduler=scheduler)
    f = getattr(F, name)

    def total(x, w, v):
        return spmd.sum(f(x, w, spec=P("data", "model")) * v, ("data", "model"))

    spread = P("data", "model")
    mapped = spmd.map(total, (spread, P("model"), spread), P(), mesh=mesh)
    np.testing.assert_allclose(float(mapped(x, w, v)), np.sum(f(x, w) * v), rtol=1e-10)
    wanted = spmd.grad(lambda x, w: np.sum(f(x, w) * v), (0, 1))(x, w)
    for g, h in zip(spmd.grad(mapped, (0, 1))(x, w, v), wanted, strict=True):
        np.testing.assert_allclose(g, h, atol=1e-11)
    if n == 7:
        spmd.check_grads(lambda x, w: mapped(x, w, v), (x, w), order=2)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax", "log_softmax", "logsumexp"])
def test_rows_that_are_the_same_everywhere_are_not_split(name):
    """Copies of whole rows or equal parts of longer ones: one of them the function would get wrong."""
    mesh, f = spmd.Mesh(a=2, m=3, transport="local"), getattr(F, name)
    by_spec = name != "logsumexp"
    for spec, axes, same in ((P(), "m", "m"), (P(None, "m"), ("a", "m"), "a"), (P(), ("a", "m"), "a")):
        options = {"spec": P(None, axes)} if by_spec else {"axis_name": axes}
        split = mesh.map(lambda x, options=options: f(x, **options), in_specs=spec, out_specs=spec)
        argument = "spec" if by_spec else "axis_name"
        words = rf"{name}: argument {argument}\n.*the same on all workers along '{same}'[\s\S]*pvary\(x, '{same}'\)"
        with pytest.raises(StateError, match=words):
            split(normal(2, 6))


def test_equal_parts_of_a_row_are_declared():
    mesh, x = spmd.Mesh(m=3, transport="local"), normal(2, 6)
    for f, options in ((F.layer_norm, {"spec": P(None, "m")}), (F.softmax, {"spec": P(None, "m")})):
        equal = mesh.map(
            lambda x, f=f, options=options: f(spmd.pvary(x, "m"), **options), in_specs=P(), out_specs=P(None, "m")
        )
        np.testing.assert_allclose(equal(x).numpy(), f(np.tile(x, (1, 3))), rtol=1e-12)


def test_entries_that_are_the_same_everywhere_count_once():
    mesh, x = spmd.Mesh(m=3, transport="local"), normal(5, 2)
    f = mesh.map(lambda x: F.moments(x, 0, axis_name="m"), in_specs=P(), out_specs=P())
    for actual, wanted in zip(f(x), F.moments(x, 0), strict=True):
        np.testing.assert_allclose(np.asarray(actual), wanted, rtol=1e-12)


def test_in_a_body(scheduler):
    mesh = spmd.Mesh(data=4, transport="local", scheduler=scheduler)
    total = spmd.map(
        lambda x, w, b: spmd.sum(F.layer_norm(x, w, b) ** 3, "data"), (P("data"), P(), P()), P(), mesh=mesh
    )

    def serial(x, w, b):
        return np.sum(F.layer_norm(x, w, b) ** 3)

    x = normal(6, 6)
    for k in (6, 3):
        for g, h in zip(
            spmd.grad(total, (0, 1, 2))(x[:k], W, B), spmd.grad(serial, (0, 1, 2))(x[:k], W, B), strict=True
        ):
            np.testing.assert_allclose(g, h, atol=1e-11)
    spmd.check_grads(total, (x, W, B), order=2)


def test_of_nothing():
    mean, variance = F.moments(np.zeros((0, 3)), 0)
    assert np.isnan(mean).all()
    assert np.isnan(variance).all()
    assert F.batch_norm(np.zeros((0, 3))).shape == (0, 3)


def test_errors():
    with pytest.raises(SpecError, match=r"shape \[5\]"):
        F.layer_norm(X, W)
    with pytest.raises(SpecError, match="ndim"):
        F.layer_norm(X, ndim=4)
    with pytest.raises(SpecError, match="eps"):
        F.rms_norm(X, eps=-1.0)
    with pytest.raises(SpecError, match="divisor of the 6"):
        F.group_norm(X, 4)
    with pytest.raises(SpecError, match="training=False"):
        F.batch_norm(X, training=False)
    with pytest.raises(SpecError, match="pair"):
        F.batch_norm(X, running=np.zeros(6))
    with pytest.raises(SpecError, match="axis of the array"):
        F.moments(X, 3)
    with pytest.raises(SpecError, match="floating-point"):
        F.layer_norm(np.arange(3))
    with pytest.raises(SpecError, match="batch, channels"):
        F.group_norm(W, 2)


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_of_another_shape_are_an_error(training):
    """The kernels read a number for each channel."""
    for running in ((np.zeros(3), np.ones(3)), (0.0, 1.0), (np.zeros(6, int), np.ones(6))):
        with pytest.raises(SpecError, match=r"batch_norm: argument running"):
            F.batch_norm(X, running=running, training=training)
    y = F.batch_norm(X, running=([0.0] * 6, [1.0] * 6), training=training)[0]
    assert y.shape == X.shape


def test_a_batch_of_nothing_leaves_the_running_statistics():
    before = (np.float32([1, 2]), np.float32([3, 4]))
    _, after = F.batch_norm(np.zeros((0, 2)), running=before)
    mesh = spmd.Mesh(m=2, transport="local")
    f = mesh.map(lambda x, r: F.batch_norm(x, running=r, spec=P("m")), in_specs=(P("m"), P()), out_specs=(P("m"), P()))
    for actual in (after, f(np.zeros((0, 2)), before)[1]):
        for a, b in zip(actual, before, strict=True):
            assert np.asarray(a).dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), b)
    count, mean, square = F.merge_moments([0, 0], [[1.0], [2.0]], [[0.0], [0.0]])
    assert (count, mean, square) == (0, 0, 0)


@pytest.mark.parametrize("f", [F.layer_norm, F.rms_norm, F.instance_norm, F.softmax, F.log_softmax])
def test_rows_of_nothing(f):
    with jit.off(), np.errstate(all="raise"):
        y, pull = spmd.vjp(f, np.zeros((3, 0)))
        assert y.shape == pull(y)[0].shape == (3, 0)


@pytest.mark.parametrize("axis", ["a", 1.5, 7, None, (0, 1), True])
def test_what_is_no_axis_is_an_error(axis):
    one = (F.softmax, F.log_softmax, F.glu, lambda x, axis: F.batch_norm(x, axis=axis))
    many = () if axis is None or type(axis) is tuple else (F.logsumexp, F.moments)
    for f in (*one, *many):
        with pytest.raises(SpecError, match=r"argument axis\n.*\n.*an axis of the array, -3 to 2"):
            f(X, axis=axis)
    for f in (F.logsumexp, F.moments):
        with pytest.raises(SpecError, match="different axes"):
            f(X, (0, -3))


@pytest.mark.parametrize("compiled", [True, False])
def test_long_rows_are_added_up_in_stretches(compiled):
    """An image of 2048 x 2048 is a row of group norm; one sum in float32 would lose half of its digits."""
    if compiled and not jit.available():
        pytest.skip("needs numba")
    with contextlib.nullcontext() if compiled else jit.off():
        added_up_in_stretches()


def added_up_in_stretches():
    rng = np.random.default_rng(0)
    x, g = ((rng.normal(size=(1, 1 << 22)) * 2 + k).astype("float32") for k in (5, 1))
    wide, h = x.astype(float), g.astype(float)
    _, mean, rstd = cpu.normalize(x, None, None, 1e-5, True)
    exact = reference.normalize(wide, None, None, 1e-5, True)
    np.testing.assert_allclose(mean, exact[1], rtol=2e-7)
    np.testing.assert_allclose(rstd, exact[2], rtol=5e-7)
    actual = cpu.normalize_vjp(g, x, None, mean, rstd, True)[0]
    wanted = reference.normalize_vjp(h, wide, None, *exact[1:], True)[0]
    np.testing.assert_allclose(actual, wanted, atol=2e-6)
    rows = np.ascontiguousarray(x[:, : 3 * 5000].reshape(3, 5000))  # some rows of a stretch and a rest
    for actual, wanted in zip(
        cpu.normalize(rows, None, None, 1e-5, True),
        reference.normalize(rows.astype(float), None, None, 1e-5, True),
        strict=True,
    ):
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-6)
