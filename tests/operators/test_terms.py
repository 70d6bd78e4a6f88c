"""A term that is one value on all workers, in a loss that varies, counts once per worker: that is warned of."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import spmd
from spmd import P

X = np.random.default_rng(0).standard_normal((6, 3))
W = np.random.default_rng(1).standard_normal(3)

TERMS = {
    "sum": lambda l, w, t: l + t,
    "reversed": lambda l, w, t: t + l,
    "difference": lambda l, w, t: l - t,
    "scaled": lambda l, w, t: l + 0.1 * t,
    "of several": lambda l, w, t: -(l + 2.0) + (t - l),
}
RIGHT = {
    "summed first": lambda s, l, w, t: s.psum(l, "x") + t,
    "mean first": lambda s, l, w, t: s.mean(l, "x") + t,
    "shared": lambda s, l, w, t: l + t / s.axis_size("x"),
    "shared by a product": lambda s, l, w, t: l + t * (1 / s.axis_size("x")),
    "for each": lambda s, l, w, t: l + s.pvary(t, "x"),
    "mean of all": lambda s, l, w, t: s.mean(l + t, "x"),
    "a factor": lambda s, l, w, t: l * t,
    "no term": lambda s, l, w, t: l,
}


def by_arrays(combine, scheduler, n, inside=spmd.grad):
    def body(w, x):
        def loss(w):
            return combine(np.sum(np.sin(x @ w)), w, np.sum(w * w))

        return inside(loss)(w)

    mesh = spmd.Mesh(x=n, scheduler=scheduler)
    return spmd.map(body, (P(), P("x")), P(), mesh=mesh)(W, X)


def by_tensors(combine, n, how):
    torch = pytest.importorskip("torch")
    from spmd.bridge import torch as spt

    def body(x):
        w = torch.nn.Parameter(torch.from_numpy(W.copy()))
        loss = combine((x @ w).sin().sum(), w, (w * w).sum())
        if how == "grad":
            return torch.autograd.grad(loss, w)[0]
        loss.backward()
        return w.grad

    return spt.map(body, P("x"), P(), mesh=spmd.Mesh(x=n))(torch.from_numpy(X))


def warned(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [w for w in found if "counts" in str(w.message)]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", TERMS)
def test_an_invariant_term_is_warned_of(name, n, scheduler):
    """Once, at the line that differentiates, with the number of times and the mend."""
    (found,) = warned(lambda: by_arrays(TERMS[name], scheduler, n))
    assert issubclass(found.category, UserWarning)
    assert f"counts {n} times" in str(found.message)
    assert "psum(loss, 'x') + term" in str(found.message)
    assert found.filename == __file__


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_meant_is_not_warned_of(name, scheduler):
    assert not warned(lambda: by_arrays(lambda *given: RIGHT[name](spmd, *given), scheduler, 2))


def test_one_worker_is_not_warned_of(scheduler):
    assert not warned(lambda: by_arrays(TERMS["sum"], scheduler, 1))


def test_python_shows_it_once():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            by_arrays(TERMS["sum"], "lockstep", 2)
    assert len([w for w in found if "counts" in str(w.message)]) == 1


GRADIENTS = {
    "of own means": (lambda w, x: spmd.pmean(spmd.grad(squares)(w, x), "x"), True),
    "beside the value": (lambda w, x: spmd.pmean(spmd.value_and_grad(squares)(w, x), "x")[1], True),
    "of contributions": (lambda w, x: spmd.pmean(spmd.grad(squares)(spmd.pvary(w, "x"), x), "x"), False),
    "of a mean": (lambda w, x: spmd.pmean(spmd.grad(lambda w: spmd.pmean(squares(w, x), "x"))(w), "x"), False),
    "of a mean, after another": (
        lambda w, x: spmd.grad(squares)(w, x) * 0 + spmd.pmean(spmd.grad(lambda w: spmd.mean(x @ w, "x"))(w), "x"),
        False,
    ),
    "changed since": (lambda w, x: spmd.pmean(spmd.grad(squares)(w, x) / 2, "x"), False),
    "without pmean": (lambda w, x: spmd.grad(squares)(w, x), False),
}


def squares(w, x):
    return np.mean((x @ w) ** 2)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_mean_of_a_gradient_that_is_a_sum(name, n, jit, scheduler):
    """A warning at the user's line, once a call; the gradient stays the sum, or is the mean that was asked for."""
    body, is_sum = GRADIENTS[name]
    step = spmd.map(body, (P(), P("x")), P(), mesh=spmd.Mesh(x=n, scheduler=scheduler))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        (spmd.jit(step) if jit else step)(W, X)
    found = [w for w in found if "spmd.pmean" in str(w.message)]
    assert len(found) == (is_sum and n > 1)
    for w in found:
        assert f"the sum over the {n} workers" in str(w.message)
        assert "pmean(loss, 'x')" in str(w.message)
        assert "pvary(params, 'x')" in str(w.message)
        assert w.filename == __file__


@pytest.mark.host("a body makes its tensors on the host")
@pytest.mark.parametrize("how", ["backward", "grad"])
@pytest.mark.parametrize("name", TERMS)
def test_of_tensors_too(name, how):
    (found,) = warned(lambda: by_tensors(TERMS[name], 2, how))
    assert "counts 2 times" in str(found.message)
    assert "mean(loss, 'x') + term" in str(found.message)
    assert found.filename == __file__


@pytest.mark.torch
@pytest.mark.host("a body makes its tensors on the host")
@pytest.mark.parametrize("name", RIGHT)
def test_of_tensors_what_is_meant(name):
    torch_bridge = pytest.importorskip("spmd.bridge.torch")
    assert not warned(lambda: by_tensors(lambda *given: RIGHT[name](torch_bridge, *given), 2, "backward"))
