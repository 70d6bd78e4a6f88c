"""Activations: the kernels against their references, the functions over them, and elementary functions in loops."""

from __future__ import annotations

import contextlib
import weakref

import numpy as np
import pytest
from kernel_cases import REAL, Family

import spmd
from spmd import P
from spmd import functions as F
from spmd.errors import SpecError
from spmd.kernels import cpu, jit
from spmd.kernels.cpu import elementary
from spmd.kernels.reference.activation import KINDS

family = Family("activation")


def values(*kinds):
    def make(draw):
        x = draw.array((*draw.shape(0, 3), draw.choose(1, 4, 33)), low=-9, high=9)
        bias = draw.array(x.shape[-1:]) if draw.choose(True, False) else None
        return x, bias, draw.choose(*kinds), draw.choose(0.5, 1.5)

    return make


def cotangents(*kinds):
    def make(draw):
        x, *rest = values(*kinds)(draw)
        return draw.array(x.shape), x, *rest

    return make


SMOOTH = tuple(kind for kind, (form, _) in KINDS.items() if form not in ("ramp", "decay"))
# Where the slope jumps, or the numbers do, a rounding error of x + bias shows: those kinds are tried on what is exact.
KINKED = tuple(kind for kind in KINDS if kind not in SMOOTH)


def on_grid(make):
    """Quarters: sums with them are exact, and the kinks are met."""

    def gridded(draw):
        args = make(draw)
        return tuple(
            np.round(a * 4).astype(a.dtype) / a.dtype.type(4) if isinstance(a, np.ndarray) else a for a in args
        )

    return gridded


family.case("activate", values(*SMOOTH), scale=12, label=" smooth")
family.case("activate_vjp", cotangents(*SMOOTH), scale=20, label=" smooth")
family.case("activate", on_grid(values(*KINKED)), scale=12, label=" kinked")
family.case("activate_vjp", on_grid(cotangents(*KINKED)), scale=20, label=" kinked", dtypes=(*REAL, "bfloat16"))

TestKernels = family.tests()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_large_numbers_and_nan(kind, compiled):
    if compiled and not jit.available():
        pytest.skip("needs numba")
    x = np.array([np.nan, 1e4, -1e4, 80.0, -80, 0, 1e-30, -1e-30], np.float32)
    with np.errstate(all="ignore") if compiled else jit.off():
        y, d = cpu.activate(x, None, kind), cpu.activate_vjp(np.ones_like(x), x, None, kind)
    exact = [
        getattr(spmd.kernels.reference, n)(*a)
        for n, a in (("activate", (x.astype(float), None, kind)), ("activate_vjp", (1.0, x.astype(float), None, kind)))
    ]
    for actual, wanted in zip((y, d), exact, strict=True):
        np.testing.assert_allclose(actual[1:], wanted[1:], rtol=1e-5, atol=1e-30)
    assert np.isnan(y[0])


# Elementary functions in loops


@jit.loops("out")
def _apply(out, x, which):
    for i in range(len(x)):
        if which == 0:
            out[i] = elementary.exp_below(x[i])
        elif which == 1:
            out[i] = elementary.expm1_below(x[i])
        elif which == 2:
            out[i] = elementary.log1p_unit(x[i])
        else:
            out[i] = elementary.mills(x[i])


def exact(which, x):
    scipy = pytest.importorskip("scipy.special")
    wide = x.astype(np.longdouble)
    if which == 3:
        return np.sqrt(np.pi / 2) * scipy.erfcx(x.astype(float) / np.sqrt(2))
    return (np.exp, np.expm1, np.log1p)[which](wide)


@pytest.mark.skipif(not jit.available(), reason="needs numba")
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize(
    ("which", "low", "high"),
    [(0, -87, 0), (1, -20, 0), (1, -1e-3, 0), (2, 0, 1), (2, 0, 1e-3), (3, 0, 14)],
)
def test_elementary_functions(which, low, high, dtype):
    x = np.random.default_rng(which).uniform(low, high, 20000).astype(dtype)
    out = np.empty_like(x)
    _apply(out, x, which)
    wanted = exact(which, x)
    assert np.max(np.abs(out - wanted) / np.spacing(np.abs(wanted).astype(dtype))) < (4 if which < 3 else 16)
    if which == 3:
        plain = elementary.mills(x)
        assert plain.dtype == dtype
        np.testing.assert_allclose(plain, out, rtol=16 * np.finfo(dtype).eps)


@pytest.mark.skipif(not jit.available(), reason="needs numba")
@pytest.mark.parametrize("dtype", REAL)
def test_elementary_functions_of_what_is_not_finite(dtype):
    x, out = np.array([np.nan, -np.inf, 0, -1e30], dtype), np.empty(4, dtype)
    for which, wanted in ((0, [np.nan, 0, 1, 0]), (1, [np.nan, -1, 0, -1])):
        _apply(out, x, which)
        np.testing.assert_array_equal(out, wanted)


# The functions


NAMED = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hard_sigmoid": F.hard_sigmoid,
    "hard_swish": F.hard_swish,
    "sigmoid": F.sigmoid,
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate=False),
    "gelu_tanh": F.gelu,
    "elu": lambda x: F.elu(x, 0.7),
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "softplus": F.softplus,
    "log_sigmoid": F.log_sigmoid,
    "mish": F.mish,
    "glu": lambda x: F.glu(x, 0),
    "swiglu": F.swiglu,
    "tanh": lambda x: F.bias_act(x, None, "tanh"),
}

X = np.random.default_rng(0).uniform(-4, 4, (6, 8))


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMED)
def test_functions_are_those_of_torch(name):
    import torch

    nn = torch.nn.functional
    theirs = {
        "hard_sigmoid": nn.hardsigmoid,
        "hard_swish": nn.hardswish,
        "gelu_tanh": lambda x: nn.gelu(x, approximate="tanh"),
        "elu": lambda x: nn.elu(x, 0.7),
        "celu": lambda x: nn.celu(x, 0.7),
        "log_sigmoid": nn.logsigmoid,
        "glu": lambda x: nn.glu(x, 0),
        "swiglu": lambda x: nn.silu(x[..., :4]) * x[..., 4:],
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
    }.get(name) or getattr(nn, name)
    there = torch.tensor(X, requires_grad=True)
    y = theirs(there)
    y.sum().backward()
    np.testing.assert_allclose(NAMED[name](X), y.detach().numpy(), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(spmd.grad(lambda x: np.sum(NAMED[name](x)))(X), there.grad.numpy(), atol=1e-13)
    spmd.check_grads(NAMED[name], (X,), order=3 if name in ("gelu", "mish") else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_bias(kind):
    x, bias = X[:, :3], np.array([0.1, -0.2, 0.3])
    np.testing.assert_allclose(F.bias_act(x, bias, kind), F.bias_act(x + bias, None, kind), rtol=1e-14)
    spmd.check_grads(lambda x, b: F.bias_act(x, b, kind), (x, bias), order=2)


def test_the_cotangent_is_made_once_for_both(monkeypatch):
    calls = []
    kernel = cpu.activate_vjp
    monkeypatch.setattr(cpu, "activate_vjp", lambda *a: calls.append(1) or kernel(*a))
    _, pull = spmd.vjp(lambda x, b: F.bias_act(x, b, "gelu"), X, X[0])
    for scale in (1, 2):
        dx, db = pull(np.full_like(X, scale))
        np.testing.assert_allclose(db, dx.sum(0))
    assert len(calls) == 2


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cotangent_may_be_written_over_the_one_that_came(kind, dtype, compiled):
    rng = np.random.default_rng(3)
    x, g = (rng.normal(size=(37, 211)).astype(dtype) for _ in range(2))
    bias = rng.normal(size=211).astype(dtype)
    with contextlib.nullcontext() if compiled else jit.off():
        for b in (None, bias):
            expected, h = cpu.activate_vjp(g, x, b, kind), g.copy()
            assert cpu.activate_vjp(h, x, b, kind, into=h) is h
            np.testing.assert_array_equal(h, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_cotangent_that_nobody_else_has_is_written_over(kind):
    x, bias = X[:, :3], np.array([0.1, -0.2, 0.3])
    received = []

    def watched(y):
        """Keeps the cotangent that comes, and hands it on as it is."""
        f = spmd.custom_vjp(lambda y: y)
        f.defvjp(lambda y: (y, None), lambda _, g: (received.append(g) or g,))
        return f(y)

    def loss(x, b):
        y = F.bias_act(x, b, kind)
        return np.sum(watched(y) * x)

    for f in (loss, lambda x, b: np.sum(F.bias_act(x, b, kind) * x)):
        dx, db = spmd.grad(f, argnums=(0, 1))(x, bias)
        slope = cpu.activate_vjp(np.ones_like(x), x, bias, kind, 0.01 if kind == "leaky_relu" else 1.0)
        np.testing.assert_allclose(dx, F.bias_act(x, bias, kind) + x * slope, rtol=1e-12)
        np.testing.assert_allclose(db, (x * slope).sum(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(received[0], x)
    _, pull = spmd.vjp(lambda x, b: F.bias_act(x, b, kind), x, bias)
    g = np.full_like(x, 2.0)
    first = pull(g)
    np.testing.assert_array_equal(g, 2.0)
    for a, b in zip(first, pull(g), strict=True):
        np.testing.assert_array_equal(a, b)


def test_of_a_rectifier_the_result_alone_is_kept():
    for f, dropped in ((F.relu, True), (F.relu6, True), (F.leaky_relu, True), (F.gelu, False)):
        z = []

        def traced(x, f=f, z=z):
            y = x * 2
            z.append(weakref.ref(y.value))
            return f(y)

        _, pull = spmd.vjp(traced, np.linspace(-3, 9, 50))
        assert (z[0]() is None) == dropped, f.__name__
        pull(np.ones(50))


def test_a_cotangent_that_was_changed_is_another_one():
    bias = np.array([0.1, -0.2, 0.3])
    for f in (lambda x: F.bias_act(x, bias, "gelu"), lambda x: F.bias_act(x, bias), F.gelu):
        _, pull = spmd.vjp(f, X[:, :3])
        g = np.ones((len(X), 3))
        (first,) = pull(g)
        g *= 5
        np.testing.assert_allclose(pull(g)[0], 5 * first)


def test_short_numbers_that_are_rounded_to_a_kink_are_not_at_it():
    x, bias = np.full((1, 1), 4, np.float16), np.full(1, 1.999, np.float16)
    assert spmd.grad(lambda x: np.sum(F.bias_act(x, bias, "relu6")))(x) == 1


def test_at_kinks_and_of_nan():
    assert spmd.grad(F.relu)(0.0) == 0
    assert spmd.grad(F.relu6)(6.0) == 0
    assert spmd.grad(F.leaky_relu)(0.0) == 0.01
    assert np.isnan(F.relu(np.nan))
    assert F.relu(np.float32([1, -1])).dtype == np.float32


def test_in_a_body(scheduler):
    bias = np.linspace(-1, 1, 8)
    mesh = spmd.Mesh(data=4, transport="local", scheduler=scheduler)
    total = spmd.map(lambda x, b: spmd.sum(F.bias_act(x, b, "silu") ** 2, "data"), (P("data"), P()), P(), mesh=mesh)

    def serial(x, b):
        return np.sum(F.bias_act(x, b, "silu") ** 2)

    for n in (6, 3):
        for actual, wanted in zip(
            spmd.grad(total, (0, 1))(X[:n], bias), spmd.grad(serial, (0, 1))(X[:n], bias), strict=True
        ):
            np.testing.assert_allclose(actual, wanted, atol=1e-13)
    spmd.check_grads(total, (X, bias), order=2)


def test_errors():
    with pytest.raises(SpecError, match="relu, relu6"):
        F.bias_act(X, None, "relux")
    with pytest.raises(SpecError, match=r"shape \[8\]"):
        F.bias_act(X, X, "relu")
    with pytest.raises(SpecError, match="only leaky_relu"):
        F.bias_act(X, None, "relu", alpha=2.0)
    with pytest.raises(SpecError, match="floating-point"):
        F.gelu(np.arange(3))
    with pytest.raises(SpecError, match='"tanh"'):
        F.gelu(X, approximate="erf")
    with pytest.raises(SpecError, match="positive"):
        F.celu(X, -1.0)
    with pytest.raises(SpecError, match=r"alpha=1\.0"):
        F.elu(X, np.inf)
    with pytest.raises(SpecError, match="even length"):
        F.glu(X[:, :3])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compiled", [True, False])
def test_numbers_far_from_zero(compiled, dtype):
    """The limits of functions and derivatives; 0 times infinity is nowhere on the way."""
    if compiled and not jit.available():
        pytest.skip("needs numba")
    far = np.sqrt(np.finfo(dtype).max) * 100
    x = np.array([np.inf, far, -far, -np.inf], dtype)
    flat, line = [1, 1, 0, 0], [np.inf, far, 0, 0]
    cases = (
        (F.relu, line, flat),
        (F.relu6, [6, 6, 0, 0], [0, 0, 0, 0]),
        (lambda x: F.leaky_relu(x, 0.5), [np.inf, far, -far / 2, -np.inf], [1, 1, 0.5, 0.5]),
        (F.hard_sigmoid, flat, [0, 0, 0, 0]),
        (F.hard_swish, [np.inf, far, 0, np.nan], flat),
        (F.sigmoid, flat, [0, 0, 0, 0]),
        (F.silu, [np.inf, far, 0, np.nan], flat),
        (F.gelu, [np.inf, far, 0, np.nan], flat),
    )
    with contextlib.nullcontext() if compiled else jit.off(), np.errstate(invalid="ignore"):
        for f, value, slope in cases:
            y, pull = spmd.vjp(f, x)
            np.testing.assert_allclose(y, value, rtol=1e-6)
            np.testing.assert_array_equal(pull(np.ones_like(x))[0], slope)
            if f in (F.sigmoid, F.silu, F.gelu):
                bend = spmd.grad(lambda x, f=f: np.sum(spmd.grad(lambda x: np.sum(f(x)))(x)))(x)
                np.testing.assert_array_equal(bend, 0)


def test_the_slope_of_a_sigmoid_near_one_is_not_lost():
    x = np.linspace(10, 80, 50, dtype=np.float32)
    with jit.off():
        actual = spmd.grad(lambda x: np.sum(F.sigmoid(x)))(x)
    np.testing.assert_allclose(actual, np.exp(-x.astype(float)), rtol=1e-4)


def test_relu_of_integers():
    for dtype in ("int8", "int64", "uint16"):
        actual = F.relu(np.array([0, 5, 3], dtype) - np.array(3, "int8").astype(dtype) * (dtype != "uint16"))
        assert actual.dtype == dtype
        assert actual.tolist() == ([0, 5, 3] if dtype == "uint16" else [0, 2, 0])
    assert F.relu(-3) == 0
    with pytest.raises(SpecError, match=r"real numbers.*\n.*astype"):
        F.relu(np.array([1j]))


def test_errors_name_what_the_caller_wrote():
    with pytest.raises(SpecError, match=r"spmd.functions.gelu: argument x"):
        F.gelu(np.arange(3))
    with pytest.raises(SpecError, match="argument kind"):
        F.bias_act(X, None, ["relu"])
    with pytest.raises(SpecError, match="argument approximate"):
        F.gelu(X, np.ones(2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 33), (0, 4), (4, 0), (300, 257)])
@pytest.mark.parametrize("bias", [True, False])
def test_relu_whose_loops_are_its_own(shape, bias, dtype):
    """Numbers that are none, infinite ones, views, and a cotangent that is written over."""
    rng = np.random.default_rng(len(shape) + bias)
    x = rng.standard_normal((*shape, 2)).astype(dtype)[..., 0]  # which no loop takes as it is
    g = rng.standard_normal(shape).astype(dtype)
    if x.size > 4:
        x.flat[0], x.flat[1], x.flat[2], g.flat[3] = np.nan, np.inf, -np.inf, np.inf
    b = rng.standard_normal(shape[-1]).astype(dtype) if bias and shape else None
    with np.errstate(invalid="ignore"):
        z = x if b is None else x + b
        y, h = np.maximum(z, 0), g * (z > 0).astype(dtype)
        actual = cpu.activate(x, b, "relu"), cpu.activate_vjp(g, x, b, "relu")
        into = g.copy()
        assert cpu.activate_vjp(into, x, b, "relu", 1.0, into) is into
        other = np.empty_like(g)
        assert cpu.activate_vjp(g, x, b, "relu", 1.0, other) is other
    np.testing.assert_array_equal(actual[0], y)
    for a in (actual[1], into, other):
        np.testing.assert_array_equal(a, h)
        assert a.dtype == np.dtype(dtype)
