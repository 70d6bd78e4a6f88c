"""Softmax and kin: the kernels against their references, and the functions over them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from conftest import placed
from kernel_cases import REAL, Family

import spmd
from spmd import P
from spmd import functions as F
from spmd.errors import SpecError, StateError
from spmd.kernels import cpu, jit, reference

family = Family("softmaxes")


def rows(draw):
    """At least one entry per row: of nothing there is no largest."""
    return (*draw.shape(0, 3), draw.choose(1, 2, 5, 10, 33, 257))


family.case("softmax", lambda draw: (draw.array(rows(draw), low=-30, high=30),))
family.case("log_softmax", lambda draw: (draw.array(rows(draw), low=-30, high=30),))
family.case("logsumexp", lambda draw: (draw.array(rows(draw), low=-30, high=30),), scale=30)


def with_result(f):
    def make(draw):
        x = draw.array(rows(draw))
        return draw.array(x.shape), f(x.astype(np.float64)).astype(x.dtype)

    return make


family.case("softmax_vjp", with_result(reference.softmax), scale=9)
family.case("log_softmax_vjp", with_result(reference.log_softmax), scale=99)


def by_row(draw):
    x = draw.array(rows(draw))
    return draw.array(x.shape[:-1]), x, draw.array(x.shape[:-1], low=3, high=9)


def some_classes(draw):
    x = draw.array(rows(draw))
    return x, draw.array(x.shape[:-1], low=3, high=9), draw.integers(x.shape[:-1], -2, x.shape[-1] + 2)


def against_classes(draw):
    x = draw.array(rows(draw), low=-9, high=9)
    kind = draw.choose(np.int64, np.int32, np.uint8)
    labels = draw.integers(x.shape[:-1], 0, min(x.shape[-1], 200), kind)
    return x, labels, draw.choose(0.0, 0.125), draw.choose(None, 1)


def against_distributions(draw):
    x = draw.array(rows(draw), low=-9, high=9)
    return x, np.maximum(draw.array(x.shape, low=-1, high=1), 0)


family.case("scaled_exp", by_row, scale=9, dtypes=(*REAL, "bfloat16"))
family.case("exp_sums", some_classes, scale=257 * 3, dtypes=REAL)
family.case("cross_entropy", against_classes, scale=18, dtypes=REAL)
family.case("cross_entropy_and_gradient", against_classes, scale=18)
family.case("soft_cross_entropy", against_distributions, ulps=16, scale=257, dtypes=("float64", "float16"))
family.case("soft_cross_entropy_and_gradient", against_distributions, ulps=16, scale=257, dtypes=("float64", "float16"))

TestKernels = family.tests()

INF, NAN = np.inf, np.nan
EXTREME = [
    [1, 2, INF],
    [-INF, -INF, 0],
    [-INF, -INF, -INF],
    [1, NAN, 2],
    [INF, NAN, 0],
    [3e4, 3e4, -3e4],
    [-INF, NAN, 0],
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite(dtype, compiled):
    if compiled and not jit.available():
        pytest.skip("needs numba")
    x = np.array(EXTREME, dtype)
    zeros = np.zeros(len(x), np.int64)
    with np.errstate(all="ignore") if compiled else jit.off():
        for name in ("softmax", "log_softmax", "logsumexp"):
            np.testing.assert_allclose(getattr(cpu, name)(x), getattr(reference, name)(x), rtol=2e-3)
        np.testing.assert_allclose(cpu.cross_entropy(x, zeros), reference.cross_entropy(x, zeros), rtol=2e-3)
        negative = np.array([[-np.nan, 1.0], [np.copysign(np.nan, -1), -INF]], dtype)
        assert np.isnan(cpu.softmax(negative)).all()
        assert np.isnan(cpu.logsumexp(negative)).all()
        np.testing.assert_array_equal(
            cpu.scaled_exp(x[:1, 0], np.full((1, 3), -INF, dtype), np.full(1, -INF, dtype)), 0
        )


# The functions


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape)


LABELS = np.array([[1, 0, 4], [2, 3, 1]])


def target(x):
    t = np.abs(normal(*x.shape))
    return t / t.sum(-1, keepdims=True)


FUNCTIONS = {
    "softmax": lambda x: F.softmax(x, 1),
    "log_softmax": lambda x: F.log_softmax(x, axis=0),
    "logsumexp": F.logsumexp,
    "logsumexp of axes": lambda x: F.logsumexp(x, (0, -1), keepdims=True),
    "weighted": lambda x: F.logsumexp(x, 1, b=np.array([0.0, 1.0, 2.0])[:, None]),
    "classes": lambda x: spmd.softmax_cross_entropy(x, LABELS),
    "smoothed": lambda x: spmd.softmax_cross_entropy(x, LABELS, label_smoothing=0.2, ignore_index=1),
    "distributions": lambda x: spmd.softmax_cross_entropy(x, target(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_to_second_order(name):
    spmd.check_grads(FUNCTIONS[name], (normal(2, 3, 5),), order=2)


def test_derivatives_of_targets_and_weights():
    x = normal(3, 4)
    spmd.check_grads(spmd.softmax_cross_entropy, (x, target(x)), order=2)
    spmd.check_grads(lambda x, b: F.logsumexp(x, 1, b), (x, target(x) + 1), order=2)


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"ignore_index": 2}, {"ignore_index": -100}])
def test_cross_entropy_is_that_of_torch(options):
    import torch

    x, labels = normal(30, 7).astype("float32") * 9, np.arange(30) % 7
    if options.get("ignore_index") == -100:
        labels[::3] = -100
    there = torch.tensor(x, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(there, torch.tensor(labels), reduction="none", **options)
    loss.sum().backward()
    value, grad = spmd.value_and_grad(lambda x: np.sum(spmd.softmax_cross_entropy(x, labels, **options)))(x)
    np.testing.assert_allclose(value, loss.sum().item(), rtol=1e-5)
    np.testing.assert_allclose(grad, there.grad.numpy(), atol=1e-6)
    actual = spmd.softmax_cross_entropy(x, labels, **options)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, loss.detach().numpy(), rtol=1e-5, atol=1e-6)


WEIGHTED = [
    {},
    {"label_smoothing": 0.3},
    {"ignore_index": 2},
    {"ignore_index": -100, "label_smoothing": 0.1},
    {"distributions": True},
]


def classes_of_rows(n, classes, options):
    """Labels, or distributions; some of what ignore_index says."""
    if options.get("distributions"):
        return target(normal(n, classes))
    labels = np.arange(n) * 5 % classes
    if options.get("ignore_index") == -100:
        labels[1::3] = -100
    return labels


def of_torch(x, labels, weight, reduction, options):
    """The loss, and the gradient of its sum."""
    import torch

    there = torch.tensor(x, requires_grad=True)
    weight = None if weight is None else torch.tensor(weight)
    loss = torch.nn.functional.cross_entropy(there, torch.tensor(labels), weight, reduction=reduction, **options)
    loss.sum().backward()
    return loss.detach().numpy(), there.grad.numpy()


@pytest.mark.torch
@pytest.mark.parametrize("options", WEIGHTED, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_of_classes_and_means_are_those_of_torch(options, reduction, weighted, dtype):
    x, labels = normal(30, 7).astype(dtype) * 9, classes_of_rows(30, 7, options)
    weight = np.array([0.5, 2, 0, 1, 3, 0.25, 1], dtype) if weighted else None
    options = {k: v for k, v in options.items() if k != "distributions"}
    loss, grad = of_torch(x, labels.astype(dtype) if labels.ndim > 1 else labels, weight, reduction, options)

    def f(x):
        return spmd.softmax_cross_entropy(x, labels, weight=weight, reduction=reduction, **options)

    actual = f(placed(x))
    assert actual.dtype == dtype
    assert np.shape(actual) == np.shape(loss)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(spmd.put(actual, P(), spmd.Mesh()).numpy(), loss, **close)
    np.testing.assert_allclose(np.asarray(spmd.grad(lambda x: np.sum(f(x)))(x)), grad, **close)


@pytest.mark.parametrize("options", WEIGHTED, ids=str)
def test_derivatives_of_weighted_losses_to_second_order(options):
    x, labels, weight = normal(4, 5), classes_of_rows(4, 5, options), np.array([0.5, 2, 1, 3, 0.25])
    options = {k: v for k, v in options.items() if k != "distributions"}
    f = lambda x, w: spmd.softmax_cross_entropy(x, labels, weight=w, reduction="mean", **options)
    spmd.check_grads(f, (x, weight), order=2)


@pytest.mark.parametrize("options", WEIGHTED, ids=str)
@pytest.mark.parametrize(("n", "classes"), [(5, 7), (3, 3), (1, 2)])  # uneven blocks, and empty ones
@pytest.mark.parametrize("weighted", [True, False])
def test_spread_rows_and_classes_are_weighted_as_one(options, n, classes, weighted, scheduler):
    x, labels = normal(n, classes) * 9, classes_of_rows(n, classes, options)
    weight = np.array([0.5, 2, 1, 1, 3, 0.25, 1])[:classes] if weighted else None
    options = {k: v for k, v in options.items() if k != "distributions"}
    mesh = spmd.Mesh(data=2, model=3, transport="local", scheduler=scheduler)
    for reduction in ("none", "sum", "mean"):
        rows = {} if reduction == "none" else {"batch_axis_name": "data"}

        def local(x, labels, w, reduction=reduction, rows=rows, axis="model"):
            return F.softmax_cross_entropy(x, labels, axis, weight=w, reduction=reduction, **rows, **options)

        def whole(x, w, reduction=reduction):
            return F.softmax_cross_entropy(x, labels, weight=w, reduction=reduction, **options)

        by_rows = P("data") if reduction == "none" else P()
        for axis in ("model", None):
            ins = (P("data", axis), P("data", axis) if labels.ndim > 1 else P("data"), P(axis) if weighted else None)
            f = spmd.map(lambda *a, axis=axis, local=local: local(*a, axis=axis), ins, by_rows, mesh=mesh)
            np.testing.assert_allclose(f(x, labels, weight).numpy(), whole(x, weight), rtol=1e-11)
            if reduction == "none":
                continue
            both = (0, 2) if weighted else (0,)
            wanted = spmd.grad(whole, (0, 1) if weighted else (0,))(x, weight)
            for g, h in zip(spmd.grad(f, both)(x, labels, weight), wanted, strict=True):
                np.testing.assert_allclose(np.asarray(g), h, atol=1e-11)
            if n == 5 and reduction == "mean" and weighted:
                spmd.check_grads(lambda x, w, f=f: f(x, labels, w), (x / 9, weight), order=2)


def test_a_weighted_mean_of_spread_rows_costs_one_sum_more():
    x, labels, weight = normal(5, 7), np.arange(5), np.arange(7.0)
    f = lambda x, y, w: F.softmax_cross_entropy(x, y, "model", weight=w, reduction="mean", batch_axis_name="data")
    with spmd.Mesh(data=2, model=3, transport="local"):
        loss = spmd.map(f, (P("data", "model"), P("data"), P("model")), P())
        with spmd.ledger() as both:
            spmd.value_and_grad(loss)(x, labels, weight)
    assert both.verbs == {"all_reduce": 3}


def test_a_weighted_loss_goes_through_the_logits_once(monkeypatch):
    calls = []
    for name in ("cross_entropy", "cross_entropy_and_gradient", "soft_cross_entropy_and_gradient", "softmax"):
        kernel = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *a, k=kernel, name=name: calls.append(name) or k(*a))
    x, weight = normal(2, 3, 5), np.ones(5)
    for smoothing, kernel in ((0.0, "cross_entropy_and_gradient"), (0.1, "soft_cross_entropy_and_gradient")):
        f = lambda x, s=smoothing: F.softmax_cross_entropy(
            x, LABELS, weight=weight, label_smoothing=s, reduction="mean"
        )
        spmd.value_and_grad(f)(x)
        assert calls == [kernel]
        calls.clear()


def test_means_of_short_numbers_and_of_no_rows():
    x, labels = normal(70000, 2).astype(np.float16) * 2, np.zeros(70000, int)
    exact = F.softmax_cross_entropy(x.astype(float), labels, reduction="mean")
    for weight in (None, np.full(2, 1e-3)):  # their sum is none of float16
        actual = F.softmax_cross_entropy(x, labels, weight=weight, reduction="mean")
        assert actual.dtype == np.float16
        np.testing.assert_allclose(float(actual), exact, rtol=2e-3)
    smooth = F.softmax_cross_entropy(x[:9], labels[:9], weight=np.full(2, 1e-6), label_smoothing=0.1, reduction="mean")
    want = F.softmax_cross_entropy(x[:9].astype(float), labels[:9], label_smoothing=0.1, reduction="mean")
    np.testing.assert_allclose(float(smooth), float(want), rtol=0.1)
    for n, ignore in ((0, None), (3, 0)):
        assert np.isnan(F.softmax_cross_entropy(x[:n], labels[:n], ignore_index=ignore, reduction="mean"))
        assert F.softmax_cross_entropy(x[:n], labels[:n], ignore_index=ignore, reduction="sum") == 0


def test_errors_of_weights_and_reductions():
    x, labels = normal(3, 4), np.arange(3)
    for options, words in (
        ({"weight": np.ones(3)}, r"argument weight\n[\s\S]*shape \[4\]"),
        ({"weight": np.arange(4)}, r"argument weight\n[\s\S]*astype\(float\)"),
        ({"reduction": "avg"}, r"argument reduction\n.*'avg'"),
        ({"batch_axis_name": "data"}, r"argument batch_axis_name\n.*without a reduction"),
    ):
        with pytest.raises(SpecError, match=words):
            F.softmax_cross_entropy(x, labels, **options)
    f = lambda x, y: F.softmax_cross_entropy(x, y, reduction="mean", batch_axis_name="data")
    with pytest.raises(StateError, match=r"batch_axis_name\n.*same on all workers along 'data'[\s\S]*leave batch_axis"):
        spmd.Mesh(data=2, transport="local").map(f, (P(), P()), P())(x, labels)


def test_the_gradient_is_made_with_the_value(monkeypatch):
    calls = []
    for name in ("cross_entropy", "cross_entropy_and_gradient", "softmax"):
        kernel = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *a, k=kernel, name=name: calls.append(name) or k(*a))
    x = normal(2, 3, 5)
    spmd.softmax_cross_entropy(x, LABELS)
    assert calls == ["cross_entropy"]
    _, pull = spmd.vjp(lambda x: spmd.softmax_cross_entropy(x, LABELS), x)
    first, second = pull(np.ones((2, 3)))[0], pull(2 * np.ones((2, 3)))[0]
    assert calls == ["cross_entropy", "cross_entropy_and_gradient"]
    np.testing.assert_array_equal(2 * first, second)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_without_mass():
    x = np.array([[-INF, -INF], [0.0, -INF]])
    np.testing.assert_array_equal(F.logsumexp(x, 1), [-INF, 0])
    np.testing.assert_array_equal(spmd.grad(lambda x: np.sum(F.logsumexp(x, 1)))(x), [[0, 0], [1, 0]])
    assert spmd.softmax_cross_entropy(x[1:], np.array([[1.0, 0.0]])) == 0


# Classes that are spread over workers


def spread(f, scheduler, add=False):
    """f's losses, or their sum, on a mesh whose axis `model` splits the classes."""
    mesh = spmd.Mesh(data=2, model=3, transport="local", scheduler=scheduler)

    def loss(x, labels):
        return spmd.sum(f(x, labels), "data") if add else f(x, labels)

    return spmd.map(loss, (P("data", "model"), P("data")), P() if add else P("data"), mesh=mesh)


SPREAD = {
    "classes": lambda x, labels: spmd.softmax_cross_entropy(x, labels, axis_name="model"),
    "smoothed": lambda x, labels: spmd.softmax_cross_entropy(x, labels, "model", label_smoothing=0.25, ignore_index=2),
    "logsumexp": lambda x, labels: F.logsumexp(x, -1, axis_name="model") * (labels + 1),
}
WHOLE = {
    "classes": spmd.softmax_cross_entropy,
    "smoothed": lambda x, labels: spmd.softmax_cross_entropy(x, labels, label_smoothing=0.25, ignore_index=2),
    "logsumexp": lambda x, labels: F.logsumexp(x, -1) * (labels + 1),
}


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("classes", [7, 3, 2])  # uneven, one each, and an empty block
def test_spread_classes(name, classes, scheduler):
    x, labels = normal(5, classes) * 20, np.arange(5) % classes
    whole = WHOLE[name](x, labels)
    actual = spread(SPREAD[name], scheduler)(x, labels)
    np.testing.assert_allclose(actual.numpy(), whole, rtol=1e-12)
    total = spread(SPREAD[name], scheduler, add=True)
    np.testing.assert_allclose(
        spmd.grad(total)(x, labels), spmd.grad(lambda x: np.sum(WHOLE[name](x, labels)))(x), atol=1e-12
    )
    if classes == 7:
        spmd.check_grads(lambda x: total(x, labels), (x / 20,), order=2)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_spread_softmax(name, scheduler):
    x, weights, f = normal(4, 8), normal(4, 9)[:, :8], getattr(F, name)
    mesh = spmd.Mesh(data=2, model=3, transport="local", scheduler=scheduler)

    def total(x, w):
        return spmd.sum(f(x, spec=P("data", "model")) * w, ("data", "model"))

    mapped = spmd.map(total, (P("data", "model"), P("data", "model")), P(), mesh=mesh)
    np.testing.assert_allclose(float(mapped(x, weights)), np.sum(f(x) * weights), rtol=1e-12)
    spmd.check_grads(lambda x: mapped(x, weights), (x,), order=2)


def test_spread_distributions(scheduler):
    x = normal(4, 7)
    mesh = spmd.Mesh(model=3, transport="local", scheduler=scheduler)
    total = spmd.map(
        lambda x, t: np.sum(spmd.softmax_cross_entropy(x, t, "model")),
        (P(None, "model"), P(None, "model")),
        P(),
        mesh=mesh,
    )
    np.testing.assert_allclose(float(total(x, target(x))), np.sum(spmd.softmax_cross_entropy(x, target(x))), rtol=1e-12)
    spmd.check_grads(lambda x: total(x, target(x)), (x,), order=2)


def test_spread_classes_cost_two_sums():
    x, labels = normal(5, 7), np.arange(5)
    with spmd.Mesh(model=3, transport="local"):
        loss = spmd.map(lambda x, y: np.sum(SPREAD["classes"](x, y)), (P(None, "model"), P()), P())
        with spmd.ledger() as forward:
            loss(x, labels)
        with spmd.ledger() as both:
            spmd.value_and_grad(loss)(x, labels)
    assert forward.verbs == both.verbs == {"all_reduce": 2}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_spread_classes_of_short_numbers(dtype):
    x, labels = normal(5, 7).astype(dtype), np.arange(5)
    with spmd.Mesh(model=3, transport="local"):
        actual = spmd.map(SPREAD["classes"], (P(None, "model"), P()), P())(x, labels)
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual.numpy(), spmd.softmax_cross_entropy(x, labels), rtol=2e-3)


def test_in_a_body(scheduler):
    x, labels = normal(7, 5), np.arange(7) % 5
    mesh = spmd.Mesh(data=4, transport="local", scheduler=scheduler)
    losses = spmd.map(spmd.softmax_cross_entropy, P("data"), P("data"), mesh=mesh)
    whole = spmd.softmax_cross_entropy(placed(x), placed(labels))
    np.testing.assert_array_equal(losses(x, labels).numpy(), whole)
    few = spmd.map(
        lambda x, y: spmd.sum(spmd.softmax_cross_entropy(x, y), "data"), (P("data"), P("data")), P(), mesh=mesh
    )
    grad = spmd.grad(lambda x, y: np.sum(spmd.softmax_cross_entropy(x, y)))
    for n in (7, 2):  # uneven, and with empty blocks
        np.testing.assert_allclose(spmd.grad(few)(x[:n], labels[:n]), grad(x[:n], labels[:n]), atol=1e-14)


def test_errors():
    x, labels = normal(3, 4), np.arange(3)
    with pytest.raises(ValueError, match="from 0 to 3"):
        spmd.softmax_cross_entropy(x, labels + 2)
    with pytest.raises(ValueError, match="one class number per row"):
        spmd.softmax_cross_entropy(x, labels[:2])
    with pytest.raises(ValueError, match="label_smoothing"):
        spmd.softmax_cross_entropy(x, labels, label_smoothing=1.5)
    with pytest.raises(ValueError, match="distributions"):
        spmd.softmax_cross_entropy(x, x, label_smoothing=0.5)
    with pytest.raises(ValueError, match="ignore_index"):
        spmd.softmax_cross_entropy(x, labels, ignore_index=0.5)
    with pytest.raises(SpecError, match="floating-point"):
        F.softmax(labels)
    with pytest.raises(SpecError, match="axis of the array"):
        F.logsumexp(x, 2)
    with pytest.raises(ValueError, match="different axes"):
        F.logsumexp(x, (0, 0))
    # Labels on a device are not looked at: that would wait for it.
    with spmd.Mesh(model=2, transport="local", device="cpu"):
        with pytest.raises(ValueError, match="from 0 to 3"):
            spmd.map(SPREAD["classes"], (P(None, "model"), P()), P())(x, labels + 2)
        with pytest.raises(SpecError, match="call it in a body"):
            F.stencil(spmd.put(x, P("model")), [(0, 1)], [1.0])


def test_labels_that_vary_where_the_classes_are_split_are_an_error():
    """Each worker would look up classes for rows of its own, and the sums would mix them."""
    mesh = spmd.Mesh(m=2, transport="local")
    f = mesh.map(lambda x, t: F.softmax_cross_entropy(x, t, "m"), in_specs=(P(None, "m"), P("m")), out_specs=P())
    with pytest.raises(StateError, match=r"argument labels\n.*varies over axis 'm'[\s\S]*all_gather\(labels"):
        f(np.zeros((2, 6)), np.array([0, 1, 2, 3]))


def test_weights_of_a_shape_that_does_not_fit_are_an_error():
    with pytest.raises(SpecError, match=r"argument b\n[\s\S]*broadcasts to \[2, 3\]"):
        F.logsumexp(np.zeros((2, 3)), b=np.ones(4))
    with pytest.raises(ValueError, match="argument ignore_index"):
        F.softmax_cross_entropy(np.zeros((2, 3)), [0, 1], ignore_index=2**63)


@pytest.mark.parametrize("compiled", [True, False])
def test_millions_of_classes_are_added_up_in_stretches(compiled):
    """One sum in float32 would lose digits: these hold to a few units in the last place."""
    if compiled and not jit.available():
        pytest.skip("needs numba")
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(1, (1 << 21) + 77)).astype("float32") for _ in range(2))
    wide, labels = x.astype(float), np.array([12345])
    with contextlib.nullcontext() if compiled else jit.off():
        for name, args in (
            ("softmax", (x,)),
            ("log_softmax", (x,)),
            ("logsumexp", (x,)),
            ("exp_sums", (x, np.zeros(1, "float32"), labels)),
            ("cross_entropy", (x, labels, 0.1)),
        ):
            exact = (wide, *(a.astype(float) if a.dtype.kind == "f" else a for a in map(np.asarray, args[1:])))
            actual, wanted = getattr(cpu, name)(*args), getattr(reference, name)(*exact)
            actual, wanted = (v if isinstance(v, tuple) else (v,) for v in (actual, wanted))
            for a, b in zip(actual[:1], wanted[:1], strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-6)
        y = cpu.softmax(x)
        back = reference.softmax_vjp(g.astype(float), y.astype(float))
        np.testing.assert_allclose(cpu.softmax_vjp(g, y), back, atol=4e-7 * float(y.max()))


@pytest.mark.skipif(not jit.available(), reason="needs numba")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [8, 10, 33, 257])
@pytest.mark.parametrize("gap", [0, 16, 96, 176, 4096])
def test_sums_do_not_depend_on_where_the_result_lies(monkeypatch, gap, width, dtype):
    memory = np.empty(2 * width + gap, dtype)
    x, out = memory[:width].reshape(1, width), memory[width + gap :].reshape(1, width)
    for seed in range(20):
        x[...] = np.random.default_rng(seed).normal(0, 2, width)
        expected = cpu.softmax(x.copy()), cpu.cross_entropy_and_gradient(x.copy(), np.array([3]))[1]
        with monkeypatch.context() as patch:
            patch.setattr("spmd.kernels.memory.pool.empty_like", lambda like: out)
            actual = cpu.softmax(x).copy(), cpu.cross_entropy_and_gradient(x, np.array([3]))[1].copy()
        np.testing.assert_array_equal(actual, expected)
