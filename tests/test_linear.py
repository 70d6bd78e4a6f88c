"""The algebra of operators, in bodies and on global arrays, against dense matrices and the dot test."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd import P
from spmd.errors import LayoutError, MeshError, SpecError, StateError
from spmd.linear import BlockDiagonal, HStack, VStack, from_scipy, identity, linear_operator, zero
from spmd.operators import algebra
from spmd.operators.gather import AllGather, Collect, ReduceScatter
from spmd.operators.permute import Permute
from spmd.operators.root import Broadcast, SumReduce
from spmd.operators.sums import Sum, Vary
from spmd.testing import check_adjoint

X = ("x",)
THREE = spmd.Mesh(x=3, scheduler="lockstep")
ONE = algebra.identity()
RING = Permute(X, ((0, 1), (1, 2), (2, 0)))
SWAP = Permute(X, ((0, 1), (1, 0)))
SUM = Sum(X)
TOTAL = Vary(X) @ SUM
"""Square operators on Varying arrays along an axis of three workers: RING, SWAP, TOTAL, ONE."""


# Operators of bodies


def expressions(depth: int = 3):
    """Compositions of square operators on Varying arrays, with integers as numbers."""
    atoms = st.sampled_from([RING, SWAP, TOTAL, ONE, SUM])

    def composed(inner):
        return st.one_of(
            st.tuples(inner, inner).map(lambda ab: _varied(ab[0]) @ _varied(ab[1])),
            st.tuples(inner, inner).map(lambda ab: ab[0] + ab[1]),
            st.tuples(st.integers(-3, 3), inner).map(lambda ca: ca[0] * ca[1]),
            inner.map(_varied).map(lambda a: a.H),
        )

    return st.recursive(atoms, composed, max_leaves=2**depth).map(_varied)


def _varied(op):
    """An operator that gives Varying arrays."""
    along = algebra.signature(op).get("x")
    return op if along is None or along.target == "Varying" else Vary(X) @ op


def matrix_of(op) -> np.ndarray:
    """The matrix of an operator on one number for each of three workers, column by column of the blocks."""
    return spmd.map(op, P("x"), P("x"), mesh=THREE)(np.eye(3)).numpy()


SERIAL = {RING: np.eye(3)[[2, 0, 1]], SWAP: np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]]), TOTAL: np.ones((3, 3))}


def test_the_matrices_of_what_is_composed():
    for op, matrix in SERIAL.items():
        assert np.array_equal(matrix_of(op), matrix)
        assert np.array_equal(matrix_of(op.H), matrix.T)


@settings(max_examples=30)
@given(expressions(2), expressions(2), st.integers(-3, 3))
def test_laws_in_bodies(a, b, c):
    x, y = matrix_of(a), matrix_of(b)
    assert np.array_equal(matrix_of(a @ b), x @ y)
    assert np.array_equal(matrix_of(a + b), x + y)
    assert np.array_equal(matrix_of(a - c * b), x - c * y)
    assert np.array_equal(matrix_of((a @ b).H), (x @ y).T)
    assert (a @ b).H == b.H @ a.H
    assert (a + b).H == a.H + b.H
    assert a + b == b + a
    assert hash(a + b) == hash(b + a)
    assert a == a.H.H
    assert a == a.T.T
    if "0 * " not in f"{a @ b} {b @ a}":  # of zeros it is not said which are equal
        assert (a @ b) @ a == a @ (b @ a)
    assert (a + b) + a == a + (b + a)
    assert a @ ONE == a == ONE @ a
    assert 2 * (3 * a) == 6 * a == a * 6


@settings(max_examples=15)
@given(expressions(2))
def test_compositions_are_adjoint_to_their_adjoints(op):
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    check_adjoint(lambda x: op(x), (6, 2), mesh=mesh, in_specs=P("x"), adjoint=lambda y: op.H(y), exact=True, trials=1)
    check_adjoint(lambda x: op(x), (6, 2), mesh=mesh, in_specs=P("x"), exact=True, trials=1)


def test_a_wrong_adjoint_of_a_composition_is_seen():
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    op, wrong = 2 * RING @ SWAP + ONE, 2 * RING.H @ SWAP.H + ONE
    report = check_adjoint(
        lambda x: op(x),
        (6,),
        mesh=mesh,
        in_specs=P("x"),
        adjoint=lambda y: wrong(y),
        exact=True,
        raises=False,
    )
    assert not report.passed


def test_numbers():
    assert np.float64(2) * RING == 2 * RING == RING * np.array(2)
    assert RING / 2 == 0.5 * RING
    assert -RING == -1 * RING
    assert RING + RING == 2 * RING
    assert RING - RING == 0 * RING != 0 * SWAP
    assert ((2 + 1j) * RING).H == (2 - 1j) * RING.H
    assert ((2 + 1j) * RING).T == (2 + 1j) * RING.H
    assert RING != SWAP
    assert 2 * RING != 3 * RING
    for bad in (lambda: "2" * RING, lambda: RING * np.ones(3), lambda: RING + 1, lambda: 1 - RING):
        with pytest.raises(TypeError):
            bad()


def test_float32_stays_float32_and_nothing_broadcasts():
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    op = np.float64(0.5) * RING + ONE
    assert spmd.map(op, P("x"), P("x"), mesh=mesh)(np.ones(3, np.float32)).dtype == np.float32
    with pytest.raises(LayoutError, match="needed: results of one shape"):
        spmd.map(ONE + AllGather(X, 0, True), P("x"), P("x"), mesh=mesh)(np.ones(3))


def test_vary_is_inserted_where_states_differ_and_is_part_of_the_adjoint():
    assert SUM + ONE == TOTAL + ONE == (SUM + ONE).H
    assert RING @ Vary(X) @ SUM == RING @ SUM
    assert (RING @ SUM).H == TOTAL.H @ RING.H
    gathered = Vary(X) + AllGather(X, 0, True)  # takes an Invariant array: the second term varies it
    assert gathered == Vary(X) + AllGather(X, 0, True) @ Vary(X)
    assert SUM + SUM @ ReduceScatter(X, 0, True) == gathered.H


def test_states_that_do_not_fit():
    with pytest.raises(StateError, match=r"which gives Varying arrays along axis 'x', before Vary\(\('x',\)\)") as e:
        _ = Vary(X) @ RING
    assert "Sum(('x',))" in str(e.value)
    with pytest.raises(StateError, match="Invariant along axis 'x' for Sum"):
        _ = SUM @ SUM
    with pytest.raises(StateError, match="copies would be counted"):
        _ = Vary(X) + SUM
    with pytest.raises(StateError, match=r"which gives Rooted\(1\) arrays"):
        _ = Broadcast(X, 0) @ SumReduce(X, 1)
    with pytest.raises(StateError, match=r"operators that give Rooted\(0\) and Varying"):
        _ = SumReduce(X, 0) + RING
    assert Broadcast(X, 1) @ SumReduce(X, 1) == (Broadcast(X, 1) @ SumReduce(X, 1)).H
    assert isinstance(Sum(("y",)) @ RING, algebra.Composed)  # along other axes nothing is asked


def test_how_compositions_are_written():
    assert repr(2 * RING.H @ SUM - (ONE + RING) @ SWAP) == (
        "2 * Permute(('x',), perm=((0, 2), (1, 0), (2, 1))) @ Vary(('x',)) @ Sum(('x',)) - (identity + "
        "Permute(('x',), perm=((0, 1), (1, 2), (2, 0)))) @ Permute(('x',), perm=((0, 1), (1, 0)))"
    )
    assert repr(-RING @ RING).startswith("-Permute")
    assert repr(1j * ONE) == "1j * identity"


def test_operators_apply_to_global_arrays(scheduler):
    mesh = spmd.Mesh(x=3, y=2, scheduler=scheduler)
    a = np.arange(24.0).reshape(6, 4)
    x = spmd.put(a, P("x", "y"), mesh)
    assert np.array_equal((RING @ x).numpy(), np.roll(a, 2, 0))
    total = SUM(x)
    assert total.spec == P(None, "y")
    assert np.array_equal(total.numpy(), a.reshape(3, 2, 4).sum(0))
    assert np.array_equal(((2 * RING - ONE) @ x).numpy(), 2 * np.roll(a, 2, 0) - a)
    assert np.array_equal(Collect(X, 0, True)(x).numpy(), a)
    g = spmd.grad(lambda x: np.sum((RING @ x) * a))(x)
    assert np.array_equal(g.numpy(), np.roll(a, -2, 0))
    with pytest.raises(SpecError, match="along axis 'x' too"):
        Vary(X)(spmd.put(a, P(), mesh))
    with pytest.raises(SpecError, match="laid out as x is"):
        SumReduce(X, 0)(x)
    for op in (SUM, RING + ONE):
        with pytest.raises(MeshError, match="outside of any body"):
            op(np.ones(3))
    with pytest.raises(LayoutError, match="which maps global arrays"):
        _ = SUM @ operators(mesh)[0]


# Operators on global arrays


def shifted(u):
    """Twice each entry and its left neighbour, on a ring."""
    return 2 * u + np.concatenate([spmd.shift(u[-1:], "x", 1), u[:-1]])


def cumulated(u):
    before = spmd.all_gather(np.sum(u), "x")[: spmd.worker_index("x")]
    return np.cumsum(u) + np.sum(before)


def cut(u):
    """Fewer entries, unevenly."""
    return u[: (spmd.worker_index("x") + 1) % 3]


N = 5


def operators(mesh, dtype=float):
    """Two square operators, and one that gives uneven blocks. In integers: a worker more has a block more."""
    factor = 1 if np.dtype(dtype).kind != "c" else 1 + 2j
    with mesh:
        return [
            linear_operator(lambda u: factor * cumulated(u), P("x"), P("x"), shape=N, dtype=dtype),
            linear_operator(lambda u: factor * u + spmd.psum(np.sum(u), "x"), P("x"), P("x"), shape=N, dtype=dtype),
            linear_operator(cut, P("x"), P("x"), shape=(N,), dtype=dtype),
        ]


@pytest.mark.parametrize("dtype", [float, complex])
def test_laws_on_global_arrays(dtype):
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    ops = operators(mesh, dtype)
    a, b, cut = ops
    da, db, dcut = dense = [op.dense() for op in ops]
    assert dcut.shape == (cut.shape[0], N)
    for op, matrix in zip(ops, dense, strict=True):
        assert np.array_equal(op.H.dense(), matrix.conj().T)
        assert np.array_equal(op.T.dense(), matrix.T)
        assert np.array_equal(op.H.T.dense(), matrix.conj())
        assert op.H.H == op == op.T.T
        assert op.H.T == op.T.H
        assert (op.H == op.T) == (dtype is float)
        assert op.H.shape == op.shape[::-1] == matrix.T.shape
    one = identity(a.domain)
    for op, matrix in [
        (a @ b, da @ db),
        (cut @ a, dcut @ da),
        (2 * a - b @ a, 2 * da - db @ da),
        ((2 - 1j) * a + one, (2 - 1j) * da + np.eye(N)),
        (a.H @ a + 0.5 * one, da.conj().T @ da + 0.5 * np.eye(N)),
        ((a + b) @ (a - one), (da + db) @ (da - np.eye(N))),
        (zero(a.domain, cut.range), np.zeros_like(dcut)),
        (cut.H @ cut, dcut.T @ dcut),
        (VStack(a, cut), np.vstack([da, dcut])),
        (HStack(a, cut.H), np.hstack([da, dcut.T])),
        (BlockDiagonal(a, cut), scipy.linalg.block_diag(da, dcut)),
        (HStack(a, cut.H) @ VStack(b, cut), da @ db + dcut.T @ dcut),
        (VStack(HStack(a, b), HStack(cut, 2 * cut)), np.block([[da, db], [dcut, 2 * dcut]])),
    ]:
        assert np.array_equal(op.dense(), matrix), op
        assert np.array_equal(op.H.dense(), matrix.conj().T), op
        assert np.array_equal(op.T.dense(), matrix.T), op
        assert op == op.H.H, op
        assert hash(op.H.H) == hash(op)
        assert np.array_equal((3j * op).H.dense(), (3j * matrix).conj().T), op
        assert op @ identity(op.domain) == op == identity(op.range) @ op
        assert zero(op.domain, op.range) + op == op
        assert op - op == zero(op.domain, op.range)
    assert (a @ b).H == b.H @ a.H
    assert 2 * (3 * a) == 6 * a
    assert HStack(a.H, b.H) == VStack(a, b).H
    assert a != b
    assert VStack(a, b) != VStack(b, a) != HStack(b, a)


def test_real_and_complex_operators_are_composed():
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    (a, *_), (b, *_) = operators(mesh), operators(mesh, complex)
    for op, matrix in [(1j * a, 1j * a.dense()), (a @ b, a.dense() @ b.dense()), (b + a, b.dense() + a.dense())]:
        assert op.dtype == complex
        assert np.array_equal(op.dense(), matrix)
        assert np.array_equal(op.H.dense(), matrix.conj().T)
        assert op == op.H.H
    z = np.arange(N) * (1 - 2j)
    assert np.array_equal((a @ z).numpy(), a.dense() @ z)
    assert (a @ np.arange(N)).dtype == float
    assert a + operators(mesh, np.float32)[0] != a


def test_what_an_operator_says_of_itself(scheduler):
    mesh = spmd.Mesh(x=3, scheduler=scheduler)
    with mesh:
        a = linear_operator(shifted, P("x"), P("x"), shape=(6,))
        s = linear_operator(SUM, P("x"), P(), shape=(6,))
        c = linear_operator(cut, P("x"), P("x"), shape=(6,))
    assert repr(a) == "<LinearOperator shifted: float64[6] P('x') -> float64[6] P('x')>"
    assert str(2 * a.H @ a - identity(a.domain)) == "2 * shifted.H @ shifted - identity"
    assert str(VStack(a, s)) == "VStack(shifted, Sum(('x',)))"
    assert str(zero(a.domain, s.range)) == "zero"
    assert repr(c).endswith("float64[3] P('x') in blocks of ((1, 2, 0),)>")
    assert s == linear_operator(Sum(X), P("x"), P(), shape=(6,), mesh=mesh)
    assert np.array_equal(s.dense(), np.hstack([np.eye(2)] * 3))
    assert np.array_equal((s.H @ np.array([1.0, 2.0])).numpy(), [1.0, 2.0] * 3)
    assert a != linear_operator(shifted, P("x"), P("x"), shape=(9,), mesh=mesh)
    assert a.mesh == mesh
    assert a.dtype == float


def test_trees_of_arrays_and_several_arguments():
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    with mesh:
        both = linear_operator(
            lambda u, v: {"sum": spmd.psum(np.sum(u), "x") + v, "twice": 2 * u},
            (P("x"), P()),
            {"sum": P(), "twice": P("x")},
            shape=((5,), (2,)),
        )
        tree = linear_operator(
            lambda t: t["a"] + t["b"][: t["a"].shape[0]],
            P("x"),
            P("x"),
            like={"a": np.zeros(4), "b": np.zeros((4,), np.float32)},
        )
    matrix = np.zeros((7, 7))
    matrix[:2, :5], matrix[:2, 5:], matrix[2:, :5] = 1, np.eye(2), 2 * np.eye(5)
    assert np.array_equal(both.dense(), matrix)
    assert np.array_equal(both.H.dense(), matrix.T)
    assert np.array_equal((both.H @ both).dense(), matrix.T @ matrix)
    assert np.array_equal(tree.dense(), np.hstack([np.eye(4)] * 2))
    assert tree.H(np.arange(4.0))["b"].dtype == np.float32


def test_an_adjoint_that_is_given():
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    calls = []

    def adjoint(v):
        calls.append(1)
        return 2 * v + np.concatenate([v[1:], spmd.shift(v[:1], "x", -1)])

    x = np.arange(8.0)
    a = linear_operator(shifted, P("x"), P("x"), shape=(8,), mesh=mesh, adjoint=adjoint)
    b = linear_operator(shifted, P("x"), P("x"), shape=(8,), mesh=mesh)
    assert np.array_equal(a.H.dense(), b.H.dense())
    assert calls
    assert a != b
    calls.clear()
    f = lambda op: lambda x: np.sum((op @ x) ** 3)
    assert np.array_equal(spmd.grad(f(a))(x), spmd.grad(f(b))(x))
    assert calls
    second = lambda op: spmd.grad(lambda x: np.sum(spmd.grad(f(op))(x) ** 2))(x)
    assert np.array_equal(second(a), second(b))
    uneven = linear_operator(
        cut, P("x"), P("x"), shape=(6,), mesh=mesh, adjoint=lambda v: np.concatenate([v, np.zeros(2)])[:2]
    )
    assert np.array_equal(uneven.H.dense(), uneven.dense().T)
    z = (1j - 2) * np.arange(9.0)
    c = linear_operator(
        lambda u: 1j * spmd.shift(u, "x"),
        P("x"),
        P("x"),
        shape=(9,),
        dtype=complex,
        mesh=mesh,
        adjoint=lambda v: -1j * spmd.shift(v, "x", -1),
    )
    assert np.array_equal((c.H @ z).numpy(), c.dense().conj().T @ z)
    assert np.array_equal((c.T @ z).numpy(), c.dense().T @ z)


@pytest.mark.parametrize("given", [False, True], ids=["tape", "given"])
def test_derivatives_to_order_two_in_argument_and_parameters(given):
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    rng = np.random.default_rng(0)
    theta, x = rng.normal(size=7), rng.normal(size=7)

    def body(theta, u):
        return theta * spmd.psum(np.sum(u), "x") + u

    def back(theta, v):
        return spmd.psum(np.sum(theta * v), "x") + v

    def loss(theta, x):
        a = linear_operator(
            body,
            P("x"),
            P("x"),
            shape=(7,),
            mesh=mesh,
            params=theta,
            param_specs=P("x"),
            adjoint=back if given else None,
        )
        return np.sum((a.H @ (a @ x)) ** 2)

    def serial(theta, x):
        y = theta * np.sum(x) + x
        return np.sum((np.sum(theta * y) + y) ** 2)

    for n in (0, 1):
        assert np.allclose(spmd.grad(loss, n)(theta, x), spmd.grad(serial, n)(theta, x), rtol=1e-12)
        for m in (0, 1):
            twice = [
                spmd.grad(lambda t, x, f=f, n=n: np.sum(spmd.grad(f, n)(t, x) ** 2), m)(theta, x)
                for f in (loss, serial)
            ]
            assert np.allclose(*twice, rtol=1e-12)


def test_scipy_and_back(scheduler):
    mesh = spmd.Mesh(x=3, scheduler=scheduler)
    rng = np.random.default_rng(1)
    c = rng.normal(size=(5, 9)) + 1j * rng.normal(size=(5, 9))
    wide = from_scipy(c, P("x"), P(), mesh=mesh)
    assert (wide.domain.spec, wide.range.spec) == (P("x"), P())
    a = linear_operator(shifted, P("x"), P("x"), shape=(9,), mesh=mesh)
    op = wide @ a
    matrix = c @ a.dense()
    assert np.allclose(op.dense(), matrix, rtol=1e-13)
    assert np.allclose(op.H.dense(), matrix.conj().T, rtol=1e-13)
    flat = op.scipy()
    assert isinstance(flat, scipy.sparse.linalg.LinearOperator)
    y = rng.normal(size=5)
    ours = scipy.sparse.linalg.lsqr(flat, y, atol=1e-13, btol=1e-13)[0]
    assert np.allclose(ours, np.linalg.pinv(matrix) @ y, rtol=1e-9)
    again = from_scipy(flat, P("x"), P(), mesh=mesh)
    assert np.allclose((again @ np.arange(9.0)).numpy(), matrix @ np.arange(9.0), rtol=1e-13)
    square = from_scipy(scipy.sparse.csr_array(np.diag([1.0, 2, 3, 4])), P("x"), shape=(2, 2), mesh=mesh)
    assert np.array_equal((square @ np.ones((2, 2))).numpy(), [[1, 2], [3, 4]])
    x = np.arange(9.0)
    real = from_scipy(c.real, P("x"), P(), mesh=mesh)
    f = lambda x: np.sum((real @ x) ** 3)
    g = lambda x: np.sum((c.real @ x) ** 3)
    assert np.allclose(spmd.grad(f)(x), spmd.grad(g)(x))
    assert np.allclose(*(spmd.grad(lambda x, h=h: np.sum(spmd.grad(h)(x) ** 2))(x) for h in (f, g)))


def test_scipy_applies_a_real_operator_to_complex_vectors():
    """By their real and imaginary parts, as the operator does."""
    with spmd.Mesh(x=3, scheduler="lockstep"):
        A = linear_operator(shifted, P("x"), P("x"), shape=np.int64(9))
    matrix, rng = A.dense(), np.random.default_rng(0)
    v = rng.normal(size=9) + 1j * rng.normal(size=9)
    theirs = A.scipy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.allclose(theirs @ v, matrix @ v)
        assert np.allclose(theirs.H @ v, matrix.T @ v)
        assert np.allclose(theirs @ np.stack([v, 2 * v], 1), matrix @ np.stack([v, 2 * v], 1))
        assert theirs.matvec(v.real).dtype == float


def test_layouts_of_arguments_and_of_gradients():
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    a = linear_operator(shifted, P("x"), P("x"), shape=(7,), mesh=mesh)
    uneven = spmd.from_blocks([np.arange(5.0), np.zeros(0), np.ones(2)], P("x"), mesh)
    copies = spmd.put(uneven.numpy(), P(), mesh)
    for x in (uneven, copies, uneven.numpy()):
        assert np.array_equal((a @ x).numpy(), a.dense() @ np.asarray(uneven))
        if not isinstance(x, np.ndarray):
            assert spmd.grad(lambda x: np.sum((a @ x) ** 2))(x).layout == x.layout
    total = (a + identity(a.domain)) @ uneven
    assert total.layout == a.range.layout
    assert np.array_equal(total.numpy(), a.dense() @ uneven.numpy() + uneven.numpy())


def test_nothing_is_gathered():
    mesh = spmd.Mesh(x=4, scheduler="lockstep")
    a = linear_operator(shifted, P("x"), P("x"), shape=(1000,), mesh=mesh)
    op, x = 2 * a.H @ a + identity(a.domain), spmd.put(np.ones(1000), P("x"), mesh)
    op @ x
    with spmd.ledger() as log:
        op @ x
    assert sum(w.bytes for w in log.workers.values()) == 2 * 4 * 8  # of an edge from each worker, there and back


def test_errors():
    mesh, other = spmd.Mesh(x=3, scheduler="lockstep"), spmd.Mesh(x=2, scheduler="lockstep")
    a, _, c = operators(mesh)
    b = operators(other)[0]
    with mesh:
        whole = linear_operator(lambda u: u, P(), P(), shape=(N,))
    cases = [
        (lambda: a @ c, LayoutError, r"needed: float64\[5\]"),
        (lambda: a + c, LayoutError, "B that gives"),
        (lambda: a @ whole, SpecError, "one spec and one mesh"),
        (lambda: a @ b, SpecError, r"on Mesh\(x=2\)"),
        (lambda: a @ RING, LayoutError, "linear_operator"),
        (lambda: a @ np.ones(3), LayoutError, r"needed: shape \[5\]"),
        (lambda: a @ (np.ones(N), np.ones(N)), LayoutError, "PyTree"),
        (lambda: a @ spmd.put(np.ones(N), P("x"), other), MeshError, "an array on"),
        (lambda: a @ np.array(["a"] * N), LayoutError, "numbers"),
        (lambda: VStack(a, b), SpecError, "below"),
        (lambda: HStack(a, c), LayoutError, "beside"),
        (lambda: BlockDiagonal(), LayoutError, "at least one"),
        (lambda: VStack(a, RING), LayoutError, "on global arrays"),
        (lambda: linear_operator(shifted, P("x"), P("x"), shape=(5000,), mesh=mesh).dense(), LayoutError, "4096"),
        (lambda: linear_operator(shifted, P("x"), P("x"), mesh=mesh), LayoutError, "argument shape"),
        (lambda: linear_operator(shifted, (P(), P()), P(), shape=((3,),), mesh=mesh), LayoutError, "one for each"),
        (lambda: linear_operator(shifted, P("x"), P("x"), shape=(3,), dtype=int, mesh=mesh), SpecError, "floating"),
        (lambda: linear_operator(shifted, P("y"), P("x"), shape=(3,), mesh=mesh), SpecError, "'y'"),
        (lambda: linear_operator(shifted, P("x"), P("x"), shape=(3,)), MeshError, "no mesh"),
        (lambda: from_scipy(np.eye(4), P("x"), shape=(3,), mesh=mesh), LayoutError, "4 entries"),
    ]
    for f, kind, text in cases:
        with pytest.raises(kind, match=text):
            f()


# The dot test


@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.float32, np.complex64])
def test_the_dot_test_of_global_operators(dtype):
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    a, b, cut = operators(mesh, dtype)
    for op in (a, a.H, cut, 2 * a.H @ b - identity(a.domain), VStack(a, cut), HStack(a, b).H, BlockDiagonal(cut, a)):
        report = check_adjoint(op, exact=True, trials=1)
        assert (report.passed, report.error, report.mode) == (True, 0.0, "exact"), op
        report = check_adjoint(op, trials=1)
        assert report.passed, op
        assert 0 < report.bound < 1e5 * np.finfo(dtype).eps, op
    assert "cut of (5,) on Mesh(x=3): adjoint (exact, 3 trials)" in str(check_adjoint(cut, exact=True))


def test_the_dot_test_of_maps_between_real_and_complex_arrays():
    mesh = spmd.Mesh(x=2, scheduler="lockstep")
    with mesh:
        rfft = linear_operator(lambda u: np.fft.rfft(u, axis=1), P("x"), P("x"), shape=(4, 9))
    assert rfft.range.shape == (4, 5)
    half = linear_operator(lambda u: 1j * u, P("x"), P("x"), shape=(4, 5), dtype=complex, mesh=mesh)
    one = identity(rfft.domain)
    for op in (
        rfft,
        rfft.H,
        rfft.H @ rfft,
        half @ rfft,
        2 * rfft.H @ half @ rfft - one,
    ):
        check_adjoint(op)
    for bad in (lambda: 1j * rfft, lambda: rfft.H @ rfft + 1j * one):
        with pytest.raises(LayoutError, match="linear over the real numbers only"):
            bad()
    copies = linear_operator(lambda u: spmd.psum(u, "x"), P("x"), P(), shape=(6,), mesh=mesh)
    check_adjoint(copies, exact=True)  # of which the result is Invariant: it counts once


def test_the_dot_test_sees_what_is_wrong():
    mesh = spmd.Mesh(x=3, scheduler="lockstep")

    def made(f, adjoint=None, dtype=float):
        return linear_operator(f, P("x"), P("x"), shape=(9,), mesh=mesh, adjoint=adjoint, dtype=dtype)

    def fault(op, **options):
        with pytest.raises(AssertionError, match="NOT adjoint"):
            check_adjoint(op, **options)
        return check_adjoint(op, raises=False, **options).kind

    almost = lambda v: v * (1 + 1e-9)
    for exact in (False, True):
        assert fault(made(lambda u: u * u), exact=exact) == "linear"
        assert fault(made(lambda u: u + 1), exact=exact) == "linear"
        assert fault(made(shifted, shifted), exact=exact) == "value"
        assert fault(made(lambda u: u, almost), exact=exact) == "value"
        assert fault(made(lambda u: 1j * u, lambda v: 1j * v, complex), exact=exact) == "value"
        assert fault(made(lambda u: u + spmd.stop_gradient(u)), exact=exact) == "value"
    check_adjoint(made(lambda u: 1j * u, lambda v: -1j * v, complex), exact=True)


@pytest.mark.parametrize("exact", [True, False])
def test_the_dot_test_locates_what_is_wrong(exact):
    mesh = spmd.Mesh(x=3, scheduler="lockstep")

    def lost(v):
        return np.where(spmd.axis_index("x") == 1, 0, 1) * v

    def report(f, adjoint, shape=(7,), dtype: type = float):
        made = linear_operator(f, P("x"), P("x"), shape=shape, dtype=dtype, mesh=mesh, adjoint=adjoint)
        return made, check_adjoint(made, exact=exact, raises=False)

    A, found = report(lambda u: 2 * u, lambda v: 2 * lost(v))
    assert (found.smallest, found.differing, found.entries_of) == (found, 2, 49)
    assert [str(e) for e in found.entries] == [
        f"from y[{k}] (worker 1 (x=1), [{k - 3}] of its block) to x[{k}] (worker 1 (x=1), [{k - 3}] of its block): "
        "0, needed 2"
        for k in (3, 4)
    ]
    assert found.hint == "2 values lost on the way back"
    assert "F* is not F^H in 2 of 49 entries" in str(found)
    with pytest.raises(AssertionError, match="NOT adjoint"):
        exec(found.reproduce, {"A": A})

    _, found = report(lambda u: (1 + 2j) * u, lambda v: (1 + 2j) * v, dtype=complex)
    assert "conjugate" in found.hint
    assert (found.entries[0].needed, found.entries[0].given) == (1 - 2j, 1 + 2j)
    _, found = report(lambda u: 1j * u, lambda v: np.real(1j * v))
    assert found.differing == 7
    assert str(found.entries[6]).startswith("from im y[6] (worker 2 (x=2), [1] of its block) to x[6]")
    A, _ = report(lambda u: u, lambda v: v, (2, 0))
    good, bad = A, report(lambda u: u, lost, (2, 2))[0]
    found = check_adjoint(BlockDiagonal(good, bad), exact=exact, raises=False)
    assert {(e.x.part, e.y.part, e.x.whole) for e in found.entries} == {(1, 1, (1, 0)), (1, 1, (1, 1))}
    large = linear_operator(lambda u: u, P("x"), P("x"), shape=(5000,), mesh=mesh, adjoint=lost)
    found = check_adjoint(large, exact=exact, raises=False)
    assert (found.bisected, found.entries_of) == (True, 5000**2)
    assert found.entries
    assert {e.x.whole for e in found.entries} == {e.y.whole for e in found.entries}


def test_the_dot_test_of_global_operators_refuses_what_they_bring():
    A = linear_operator(lambda u: 2 * u, P("x"), P("x"), shape=(4,), mesh=spmd.Mesh(x=2))
    check_adjoint(A, mesh=spmd.Mesh(x=2))
    options = {"adjoint": lambda v: v, "real": True, "dtype": "f4", "mesh": spmd.Mesh(x=4), "in_specs": P("x")}
    for name, value in {**options, "out_specs": P()}.items():
        with pytest.raises(SpecError, match=f"spmd.check_adjoint: argument {name}(.|\n)*brings its shapes"):
            check_adjoint(A, **{name: value})
    with pytest.raises(SpecError, match="argument shapes"):
        check_adjoint(A, (4,))
