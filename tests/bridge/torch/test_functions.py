"""The functions of bodies on tensors: the same values and gradients as on NumPy's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import P

torch = pytest.importorskip("torch")

from spmd.bridge import torch as spt  # noqa: E402

X = P("x")


def ragged(s, x, zeros):
    """Every worker sends its first row to every worker, which puts them one after the other."""
    n, me = s.axis_size("x"), s.worker_index("x")
    ones = np.ones(n, np.int64)
    return s.ragged_all_to_all(x, zeros, 0 * ones, ones, me * ones, ones, axis_name="x")


def doubled(s, x):
    """The root alone doubles the sum."""
    rooted = s.at_root(lambda a: {"twice": a * 2, "none": None}, s.sum_reduce(x, "x"), axis_name="x")
    return s.replicate(rooted["twice"], "x")


Body = Callable[[Any, Any], Any]
BODIES: dict[str, tuple[Body, P]] = {
    "psum": (lambda s, x: s.psum(x, "x"), P()),
    "psum of a tree": (lambda s, x: s.psum({"a": x, "b": [2 * x, 3]}, "x")["b"][0], P()),
    "psum of a number": (lambda s, x: x * s.psum(x.shape[0], "x"), X),
    "pmean": (lambda s, x: s.pmean(x, "x"), P()),
    "pmax": (lambda s, x: s.pmax(x, "x"), P()),
    "pmin": (lambda s, x: s.pmin(x, "x"), P()),
    "sum": (lambda s, x: s.sum(x, "x"), P()),
    "sum of rows": (lambda s, x: s.sum(x, "x", 0), P()),
    "mean": (lambda s, x: s.mean(x, "x", axis=(0, 1)), P()),
    "max": (lambda s, x: s.max(x, "x"), P()),
    "min of rows": (lambda s, x: s.min(x, "x", 0), P()),
    "pvary": (lambda s, x: x * s.pvary(s.psum(x, "x"), "x"), X),
    "Invariant against Varying": (lambda s, x: x * s.psum(x, "x"), X),
    "axis_index": (lambda s, x: x * s.axis_index("x"), X),
    "varying": (lambda s, x: x * s.varying(s.worker_index("x") + 1.5, "x"), X),
    "all_gather": (lambda s, x: s.all_gather(x, "x"), P("x")),
    "all_gather tiled": (lambda s, x: s.all_gather(x, "x", axis=1, tiled=True), X),
    "all_gather invariant": (lambda s, x: s.all_gather(x, "x", to="invariant"), P()),
    "pslice": (lambda s, x: s.pslice(s.psum(x, "x"), "x", tiled=True), X),
    "psum_scatter": (lambda s, x: s.psum_scatter(x, "x", scatter_dimension=1, tiled=True), X),
    "all_to_all": (lambda s, x: s.all_to_all(x, "x", 1, 0, tiled=True), X),
    "pswapaxes": (lambda s, x: s.pswapaxes(x[: s.axis_size("x")], "x", 0), X),
    "ppermute": (lambda s, x: s.ppermute(x, "x", [(s.axis_size("x") - 1, 0)]), X),
    "shift": (lambda s, x: s.shift(x, "x", 1), X),
    "pshuffle": (lambda s, x: s.pshuffle(x, "x", range(s.axis_size("x"))[::-1]), X),
    "sendrecv": (lambda s, x: s.sendrecv(x, "x", s.worker_index("x"), s.worker_index("x")), X),
    "halo_exchange": (lambda s, x: s.halo_exchange(x, X, (1, 2), "periodic"), X),
    "halo_accumulate": (lambda s, x: s.halo_accumulate(x, X, 1, "zero"), X),
    "stencil": (lambda s, x: s.stencil(x, X, ((0, 0), (1, 0), (0, -1)), (-2, 1, 3)), X),
    "broadcast of a sum": (lambda s, x: s.broadcast(s.sum_reduce(x, "x"), "x"), X),
    "replicate of a sum": (lambda s, x: s.replicate(s.sum_reduce(x, "x"), "x"), P()),
    "keep": (lambda s, x: s.replicate(s.keep(s.psum(x, "x"), "x"), "x"), P()),
    "scatter of a gather": (lambda s, x: s.scatter(s.gather(x, "x"), "x", axis=1), X),
    "inner": (lambda s, x: s.inner(x, 3 * x), P()),
    "inner of Rooted": (lambda s, x: s.inner(s.sum_reduce(x, "x"), s.sum_reduce(x, "x")), P()),
    "norm": (lambda s, x: s.norm(x), P()),
    "at_root": (doubled, P()),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_values_and_gradients_are_those_on_arrays(name, n):
    body, out = BODIES[name]
    mesh = spmd.Mesh(x=n)
    rng = np.random.default_rng(n)
    x = rng.normal(size=(4 * n, 2 * n))
    ours = mesh.map(lambda x: body(spmd, x), in_specs=X, out_specs=out)
    value, pull = spmd.vjp(ours, x)
    g = rng.normal(size=value.shape)
    (grad,) = pull(g)

    t = torch.from_numpy(x).requires_grad_()
    result = spt.map(lambda x: body(spt, x), X, out, mesh=mesh)(t)
    assert np.allclose(result.detach().numpy(), np.asarray(value), rtol=1e-14, atol=0)  # torch adds in another order
    result.backward(torch.from_numpy(g))
    assert np.allclose(t.grad.numpy(), np.asarray(grad), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ragged_all_to_all(n):
    mesh = spmd.Mesh(x=n)
    x = np.random.default_rng(n).normal(size=(2 * n, 3))
    ours = mesh.map(lambda x: ragged(spmd, x, np.zeros((n, 3))), in_specs=X, out_specs=X)
    t = torch.from_numpy(x).requires_grad_()
    zeros = torch.zeros(n, 3, dtype=torch.float64)
    result = spt.map(lambda x: ragged(spt, x, zeros), X, X, mesh=mesh)(t)
    assert np.array_equal(result.detach().numpy(), np.asarray(ours(x)))
    result.sum().backward()
    assert np.array_equal(t.grad.numpy(), np.asarray(spmd.grad(lambda x: ours(x).sum())(x)))


def test_repartition_and_accumulate():
    mesh = spmd.Mesh(x=3)
    rows, columns = mesh.layout((5, 4), P("x")), mesh.layout((5, 4), P(None, "x"))
    t = torch.arange(20.0).reshape(5, 4).requires_grad_()
    there = spt.map(lambda x: spt.repartition(x, rows, columns), P("x"), P(None, "x"), mesh=mesh)(t)
    back = spt.map(lambda x: spt.accumulate(x, columns, rows), P(None, "x"), P("x"), mesh=mesh)(there)
    assert torch.equal(back, t)
    (back * t.detach()).sum().backward()
    assert torch.equal(t.grad, t.detach())


def test_the_names_are_those_of_spmd():
    with pytest.raises(AttributeError, match=r"torch\.func\.grad"):
        _ = spt.grad
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = spt.nothing_like_it
    assert {"psum", "halo_exchange", "map", "Mesh", "P", "tie"} <= set(dir(spt))
    assert spt.psum.__doc__ == spmd.psum.__doc__


def test_numbers_of_bodies():
    """Invariant numbers are Python's, places that vary are tensors, as is what is declared."""

    def body(x):
        total = spt.psum(len(x), "x")
        assert type(total) is int
        assert isinstance(spt.axis_index("x"), spt.Tensor)
        assert isinstance(spt.varying(np.ones(2), "x"), spt.Tensor)
        return total

    assert spt.map(body, X, None, mesh=spmd.Mesh(x=3))(torch.zeros(7)) == 7


def test_an_error_at_the_root_is_raised_on_all():
    def body(x):
        return spt.replicate(spt.at_root(lambda a: 1 / 0, spt.sum_reduce(x, "x"), axis_name="x"), "x")

    with pytest.raises(ZeroDivisionError):
        spt.map(body, X, P(), mesh=spmd.Mesh(x=2))(torch.zeros(4))


def test_a_function_at_the_root_that_ignores_its_argument_still_meets_in_backward():
    def body(x):
        rooted = spt.at_root(lambda a: torch.ones(2) * 3, spt.sum_reduce(x, "x"), axis_name="x")
        return spt.replicate(rooted, "x").sum() + spt.psum(x.sum(), "x")

    t = torch.ones(4, requires_grad=True)
    spt.map(body, X, P(), mesh=spmd.Mesh(x=2))(t).backward()
    assert torch.equal(t.grad, torch.ones(4))
