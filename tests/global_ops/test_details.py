"""Options, dtypes and refusals of functions of global arrays; and derivatives where bare and global arrays meet."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P

A = np.arange(24.0).reshape(6, 4) - 7.5
G = 2 * np.eye(4) + 0.1


def same(have, want) -> None:
    have = have.numpy() if isinstance(have, spmd.PartitionedArray) else np.asarray(have)
    want = np.asarray(want)
    assert (have.dtype, have.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(have, want, rtol=1e-6)


OPTIONS = {
    "lists in where": lambda x: np.where(x > 0, [1, 2, 3, 4], 0),
    "lists in clip": lambda x: np.clip(x, [0, 1, 2, 3], 5),
    "vector_norm 1": lambda x: np.linalg.vector_norm(x, ord=1),
    "vector_norm 3": lambda x: np.linalg.vector_norm(x, ord=3),
    "norm of both": lambda x: np.linalg.norm(x, axis=(0, 1)),
    "matmul axes": lambda x: np.matmul(x[:4], x[:4], axes=[(1, 0), (0, 1), (0, 1)]),
    "sum where": lambda x: np.sum(x, where=x > 0),
    "sum initial": lambda x: np.sum(x, initial=1.0),
    "sum axes": lambda x: np.sum(x, axis=(0, 1)),
    "sum keepdims=1": lambda x: np.sum(x, axis=0, keepdims=1),
    "max keepdims=1": lambda x: np.max(x, axis=0, keepdims=1),
    "median keepdims=1": lambda x: np.median(x, axis=0, keepdims=1),
    "sum by name": lambda x: np.sum(a=x),
    "add.reduce": lambda x: np.add.reduce(x, initial=1),
    "maximum.reduce": lambda x: np.maximum.reduce(x),
    "logical_and.reduce": lambda x: np.logical_and.reduce(x, dtype=bool),
    "var where": lambda x: np.var(x, where=x > 0),
    "std mean": lambda x: np.std(x, axis=0, mean=np.mean(x, axis=0, keepdims=True)),
    "mean int": lambda x: np.mean(x, dtype=int),
    "var int": lambda x: np.var(x, dtype=int),
    "mean where": lambda x: np.mean(x, where=x > 0, axis=0),
    "max where": lambda x: np.max(x, where=x > 0, initial=0.25),
    "max initial": lambda x: np.max(x, axis=0, initial=np.float64(0.5)),
    "prod initial": lambda x: np.prod(x, initial=2),
    "true": lambda x: x[np.True_],
    "nothing": lambda x: x[[]],
    "zeros_like": lambda x: np.zeros_like(x, int),
    "full_like": lambda x: np.full_like(x, 3, int),
    "divmod": lambda x: divmod(x, 2)[1],
    "item": lambda x: np.array(x.item(3)),
    "stack dtype": lambda x: np.stack([x, x], dtype="f4"),
    "astype": lambda x: x.astype("f4", copy=False),
    "nan_to_num": lambda x: np.nan_to_num(x, copy=False),
    "dot of a number": lambda x: np.dot(x, 2.0),
    "broadcast_to": lambda x: np.broadcast_to(x[0, 0], 3),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, dtype):
    a = A.astype(dtype)
    with spmd.Mesh(x=2, y=2):
        for spec in (P("x", "y"), P(None, ("y", "x")), P("x")):
            same(OPTIONS[name](spmd.put(a, spec)), OPTIONS[name](a))


INTEGERS = {
    "norm": lambda x: np.linalg.norm(x),
    "norm 3": lambda x: np.linalg.norm(x, 3, axis=0),
    "norm inf": lambda x: np.linalg.norm(x, np.inf, axis=0),
    "einsum": lambda x: np.einsum("ij->", x),
    "inner": lambda x: np.inner(x, x),
    "vecdot": lambda x: np.vecdot(x, x),
    "mean": lambda x: x.mean(),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_truth_values(name):
    for a in (np.full((4, 4), 100, "i1"), A > 0):
        if name.startswith("norm") and a.dtype == bool:
            continue  # NumPy has no absolute value of these
        with spmd.Mesh(x=2):
            same(INTEGERS[name](spmd.put(a, P("x"))), INTEGERS[name](a))


def test_results_do_not_depend_on_earlier_calls():
    with spmd.Mesh(x=2):
        u = spmd.put(A, P("x"))
        same(np.round(spmd.put(np.ones((6, 4, 5)), P("x"))), np.ones((6, 4, 5)))
        same(np.round(u), np.round(A))
        signs = [np.signbit(np.where(u > 100, u, zero).numpy()).all() for zero in (0.0, -0.0, 0.0)]
        assert signs == [False, True, False]
        same(np.where(u > 0, u, 1), np.where(A > 0, A, 1))
        same(np.where(u > 0, True, False), A > 0)
        same(np.where(u > 0, 1, 0), np.where(A > 0, 1, 0))


def test_masks_of_bare_arrays():
    with spmd.Mesh(x=2):
        u = spmd.put(A, P("x"))
        same(np.mean(np.ones((6, 4)), where=u > 0), 1.0)
        same(np.sum(np.ones((6, 4)), where=u > 0), np.sum(np.ones((6, 4)), where=A > 0))


WRONG = {
    "lengths": lambda u: np.dot(u[:, 0], np.ones(1)),
    "an axis twice": lambda u: np.sum(u, axis=(0, 0)),
    "an axis and its negative": lambda u: np.mean(u, axis=(0, -2)),
    "an ellipsis": lambda u: np.einsum("...i->i", u),
    "an unknown letter": lambda u: np.einsum("ij->ik", u),
    "argmax along two": lambda u: np.argmax(u, axis=(0, 1)),
    "out": lambda u: np.sum(u, 0, None, np.zeros(4)),
    "tensordot": lambda u: np.tensordot(u, u, ([0, 0], [0, 1])),
    "a mask without initial": lambda u: np.max(u, where=u > 0),
    "a mask of numbers": lambda u: np.mean(u, where=u),
    "a mask of another shape": lambda u: u[np.ones(5, bool)],
    "integers beyond": lambda u: u[np.array([0, 6])],
    "reshape": lambda u: u.reshape(5, 5),
    "norm of three": lambda u: np.linalg.norm(u[None], axis=(0, 1, 2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    with spmd.Mesh(x=2):
        u = spmd.put(A, P("x"))
        with pytest.raises((ValueError, TypeError, IndexError, spmd.errors.LayoutError)):
            WRONG[name](u)


MEETINGS = {
    "item": lambda w, u: (w[0] * u).sum(),
    "new": lambda w, u: (w[None] * u).sum(),
    "back": lambda w, u: (w[::-1] * u).sum(),
    "integers": lambda w, u: (w[np.array([0, 0, 1, 2])] * u).sum(),
    "iteration": lambda w, u: sum((v * u).sum() for v in w),
    "set": lambda w, u: (spmd.at(w)[0].set(2.0) * u).sum(),
    "concatenate": lambda w, u: (np.concatenate([w[:2], w[:2]]) * u).sum(),
    "concatenate both": lambda w, u: (np.concatenate([u, w[None]]) ** 2).sum(),
    "stack": lambda w, u: (np.stack([u[0], w]) ** 2).sum(),
    "outer": lambda w, u: (np.outer(w, u[0]) ** 2).sum(),
    "solve": lambda w, u: (np.linalg.solve(G, w) * u).sum(),
    "median": lambda w, u: (np.median(w) * u).sum(),
    "quantile": lambda w, u: (np.quantile(w, 0.4) * u).sum(),
    "take": lambda w, u: (np.take(w, [0, 1, 1, 0]) * u).sum(),
    "product": lambda w, u: (w * u).sum(),
    "matmul": lambda w, u: ((u @ w) ** 2).sum(),
    "where": lambda w, u: np.where(u > 0, w, 0).sum(),
    "a global mask": lambda w, u: w[u[0] > 0].sum(),
    "global integers": lambda w, u: (w[(u[0] > 0).astype(int)] ** 2).sum(),
    "diff": lambda w, u: (np.diff(w) * u[:, :3]).sum(),
    "sum": lambda w, u: (w.sum() * u).sum(),
    "exp": lambda w, u: np.exp(w * 0.01 * u).mean(),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_gradients_of_bare_arrays_beside_global_ones(name):
    f, w = MEETINGS[name], np.arange(4.0) + 1
    first, both = spmd.grad(f), spmd.grad(f, (0, 1))
    with spmd.Mesh(x=2, y=2):
        for spec in (P("x"), P("x", "y"), P()):
            u = spmd.put(A, spec)
            assert type(first(w, u)) is np.ndarray
            np.testing.assert_allclose(first(w, u), first(w, A))
            for have, want in zip(both(w, u), both(w, A), strict=True):
                np.testing.assert_allclose(have.numpy() if have.shape == A.shape else have, want)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x[1, 2] ** 3,
        lambda x: (x[1] ** 3).sum(),
        lambda x: (x[:, 1] ** 3).sum(),
        lambda x: sum((row**3).sum() for row in x),
        lambda x: (x.reshape(4, 6)[1] ** 3).sum(),
        lambda x: (spmd.at(x)[0].set(x[-1] ** 2) ** 2).sum(),
    ],
)
def test_second_derivatives_of_what_lies_on_one_worker(f):
    gradient = spmd.grad(f)
    second = spmd.grad(lambda x: (gradient(x) ** 2).sum())
    for sides in ({"x": 2, "y": 2}, {"x": 3, "y": 1}):
        with spmd.Mesh(**sides):
            for spec in (P("x"), P("x", "y"), P(None, "x")):
                u = spmd.put(A, spec)
                np.testing.assert_allclose(second(u).numpy(), second(A))
                tangent = spmd.jvp(gradient, (u,), (u,))[1]
                np.testing.assert_allclose(tangent.numpy(), spmd.jvp(gradient, (A,), (A,))[1])


@pytest.mark.parametrize("indices", [1, [0, 0, -1], [[1, 0], [2, 2]], [], np.array(2, "i4")], ids=str)
@pytest.mark.parametrize("axis", [0, -1, None])
def test_take(indices, axis):
    with spmd.Mesh(x=2):
        u = spmd.put(A, P("x"))
        np.testing.assert_equal(np.take(u, indices, axis).numpy(), np.take(A, indices, axis))
        with pytest.raises(spmd.errors.DtypeError, match=r"np\.take: argument indices"):
            np.take(u, [0.5], 0)
        with pytest.raises(IndexError):
            np.take(u, 100, 0)


@pytest.mark.parametrize("f", [np.sum, np.mean, np.max], ids=lambda f: f.__name__)
def test_an_axis_of_the_mesh_is_no_dimension(f):
    with spmd.Mesh(x=2):
        u = spmd.put(np.ones((4, 2)), P("x"))
        with pytest.raises(spmd.errors.LayoutError, match=r"argument axis\n  got:    'x'"):
            f(u, axis="x")
        with pytest.raises(spmd.errors.LayoutError, match="each dimension once"):
            f(u, axis=(0, -2))
