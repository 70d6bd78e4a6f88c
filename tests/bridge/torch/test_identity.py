"""Trees of tensors: workers meet where the function and the tree are the same, and only there."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from mpi_programs.identity import body_of, draw, every_pair, judged  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import MismatchError  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

X = torch.randn(4, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

# Those that take tensors whatever is differentiated.
ONLY = {
    *("psum", "pmean", "sum", "mean", "pmax", "pmin", "max", "min", "all_gather", "psum_scatter", "ppermute", "shift"),
    *("pshuffle", "sendrecv", "all_to_all", "pswapaxes", "halo_exchange", "sum_reduce", "gather", "inner", "norm"),
}


def ended(body, check: bool) -> Exception | None:
    try:
        spt.map(body, P("x"), None, mesh=spmd.Mesh(x=2), check=check)(X)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_trees_of_tensors_meet_where_they_are_the_same_and_only_there(check, gradients):
    rng = random.Random(2 * check + gradients)
    for _ in range(60):
        drawn = draw(rng, ONLY)
        assert judged(drawn, ended(body_of(drawn, lambda x: x.clone().requires_grad_(gradients)), check)) == ""


def test_every_tree_differs_from_every_other_and_every_function_too():
    for drawn in random.Random(7).sample(every_pair(), 60):
        assert judged(drawn, ended(body_of(drawn), True)) == ""


def first() -> bool:
    return spmd.worker_index("x") == 0


@pytest.mark.parametrize("check", [True, False])
def test_the_adjoint_knows_of_which_leaf_it_is(check):
    def body(x):
        x = x.clone().requires_grad_()
        whole = spt.all_gather({"a": x, "b": 2 * x}, "x")
        (whole["a"] if first() else whole["b"]).square().sum().backward()

    error = ended(body, check)
    assert isinstance(error, MismatchError)
    assert "the adjoint of all_gather), leaf ['a'] of {'a': *, 'b': *}" in str(error)
    assert "the adjoint of all_gather), leaf ['b'] of {'a': *, 'b': *}" in str(error)


def test_lines_of_one_function_may_differ():
    """Gradients are right where workers call the same from lines of their own."""

    def body(x):
        x = x.clone().requires_grad_()
        if first():
            y = spt.shift(spt.all_gather({"a": x, "b": 2 * x}, "x"), "x")
        else:
            y = spt.shift(spt.all_gather({"b": 2 * x, "a": x}, "x"), "x")
        loss = spt.sum(y["a"] * y["b"], "x") + spt.pmax(x.detach() * x, "x").sum()
        loss.backward()
        return x.grad

    result = spt.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=2))(X)
    # Each worker's blocks reach both workers, and 2 x² has the slope 4 x; of x² with one x held the slope is x.
    top = (X[:2].square() >= X[2:].square()).to(X.dtype)
    torch.testing.assert_close(result, 8 * X + torch.cat([top, 1 - top]) * X)


@pytest.mark.parametrize("name", ["sum", "mean", "pmean", "pmax", "max"])
def test_a_compiled_worker_meets_one_that_is_not(name):
    """Where one worker's function is compiled, and another's not, they call the same."""
    function = getattr(spt, name)

    def loss(x):
        return function(x * x, "x").sum()

    def body(x, compiles):
        x = x.clone().requires_grad_()
        f = torch.compile(loss, backend="aot_eager", dynamic=False) if first() and compiles else loss
        f(x).backward()
        return x.grad

    mapped = spt.map(body, (P("x"), None), P("x"), mesh=spmd.Mesh(x=2), check=False)
    torch.testing.assert_close(mapped(X, True), mapped(X, False))
