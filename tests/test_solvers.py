"""Conjugate gradients and LSQR on global arrays: SciPy's results, no gathering, the same bits everywhere."""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np
import pytest
import scipy.sparse.linalg
from launch import PROGRAMS, launch, mpiexec
from mpi_programs import solving

import spmd
from spmd import P
from spmd.errors import DifferentiationError, LayoutError, SpecError
from spmd.linear import BlockDiagonal, HStack, VStack, from_scipy, identity, linear_operator
from spmd.solvers import cg, lsqr

LOCK = spmd.Mesh(x=3, scheduler="lockstep")


def stencil(u):
    """The second difference, with zeros outside: positive definite."""
    left = spmd.shift(u[-1:], "x", 1, wrap=False)
    right = spmd.shift(u[:1], "x", -1, wrap=False)
    wide = np.concatenate([left, u, right])
    return 2 * wide[1:-1] - wide[:-2] - wide[2:]


def shifted_stencil(theta, u):
    return theta * u + stencil(u)


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def laplacian(n=20, mesh=LOCK, dtype=float):
    return linear_operator(stencil, P("x"), P("x"), shape=(n,), mesh=mesh, dtype=dtype)


# Conjugate gradients


def test_cg_is_that_of_scipy():
    a, b = laplacian(), draw(20)
    matrix, steps = a.dense(), []
    theirs, _ = scipy.sparse.linalg.cg(matrix, b, rtol=1e-10, callback=lambda x: steps.append(x.copy()))
    ours = []
    found = cg(a, b, rtol=1e-10, callback=lambda x: ours.append(x.numpy()))
    assert found.converged
    assert found.iterations == len(steps) == len(ours) == len(found.residuals) - 1
    assert np.allclose(ours[:15], steps[:15], rtol=1e-9, atol=0)
    assert np.allclose(found.x.numpy(), theirs, rtol=1e-9)
    assert found.residual <= 1e-10 * np.linalg.norm(b)
    assert found.residuals[0] == pytest.approx(np.linalg.norm(b))
    assert found.reason.startswith("the residual is below")


def test_cg_with_a_preconditioner_needs_fewer_iterations():
    n = 30
    d = np.linspace(1, 1000, n)
    with LOCK:
        a = linear_operator(shifted_stencil, P("x"), P("x"), shape=(n,), params=d, param_specs=P("x"))
        m = linear_operator(lambda d, r: r / d, P("x"), P("x"), shape=(n,), params=d, param_specs=P("x"))
    b = draw(n)
    plain, fast = cg(a, b, rtol=1e-10), cg(a, b, rtol=1e-10, M=m)
    steps = []
    scipy.sparse.linalg.cg(a.dense(), b, rtol=1e-10, M=np.diag(1 / d), callback=lambda x: steps.append(1))
    assert fast.iterations == len(steps) < plain.iterations / 2
    assert np.allclose(fast.x.numpy(), np.linalg.solve(a.dense(), b), rtol=1e-8)


def test_cg_of_complex_hermitian_systems():
    g = draw(12, 12) + 1j * draw(12, 12, seed=1)
    matrix = g @ g.conj().T + np.eye(12)
    a, b = from_scipy(matrix, P("x"), mesh=LOCK), draw(12) + 1j * draw(12, seed=2)
    found = cg(a, b, rtol=1e-12)
    assert found.converged
    assert np.allclose(found.x.numpy(), np.linalg.solve(matrix, b), rtol=1e-7)
    real = laplacian(12)
    assert np.allclose(cg(real, b, rtol=1e-12).x.numpy(), np.linalg.solve(real.dense(), b), rtol=1e-9)
    assert cg(real, b.real.astype(np.float32)).x.dtype == float


def test_cg_on_trees_and_on_functions():
    a = laplacian(9)
    both = BlockDiagonal(a, 3 * a + identity(a.domain))
    b = (draw(9), draw(9, seed=1))
    found = cg(both, b, rtol=1e-12)
    assert np.allclose(found.x[0].numpy(), np.linalg.solve(a.dense(), b[0]))
    assert np.allclose(found.x[1].numpy(), np.linalg.solve(3 * a.dense() + np.eye(9), b[1]))
    f = spmd.map(stencil, P("x"), P("x"), mesh=LOCK)
    x = cg(f, spmd.put(b[0], P("x"), LOCK), rtol=1e-12).x
    assert np.array_equal(x.numpy(), cg(a, b[0], rtol=1e-12).x.numpy())


def test_layouts_are_kept():
    a, b = laplacian(7), draw(7)
    x = np.linalg.solve(a.dense(), b)
    uneven = spmd.from_blocks([b[:4], b[4:4], b[4:]], P("x"), LOCK)
    copies = spmd.put(b, P(), LOCK)
    for given in (uneven, copies, spmd.put(b, P("x"), LOCK)):
        found = cg(a, given, rtol=1e-12).x
        assert found.layout == given.layout
        assert np.allclose(found.numpy(), x)
        assert cg(a, b, given).x.layout == given.layout
        assert lsqr(a, b, given).x.layout == given.layout
        assert lsqr(a, given).x.layout == a.domain.layout
    assert cg(a, b).x.layout == a.domain.layout


def test_where_cg_ends():
    a, b = laplacian(), draw(20)
    zero = cg(a, np.zeros(20))
    assert (zero.iterations, zero.converged, zero.residual) == (0, True, 0.0)
    assert not zero.x.numpy().any()
    exact = cg(a, b, np.linalg.solve(a.dense(), b))
    assert (exact.iterations, exact.converged) == (0, True)
    few = cg(a, b, maxiter=3)
    assert (few.iterations, few.converged, few.reason) == (3, False, "no convergence in 3 iterations")
    assert cg(a, b, maxiter=0).iterations == 0
    assert cg(a, b, rtol=0, atol=0.1).residual <= 0.1
    assert cg(a, np.ones(20), rtol=0.1, atol=0.125).reason.endswith(f"below {0.1 * 20**0.5:.3g}")
    assert cg(a, np.ones(20), rtol=0.01, atol=0.125).reason.endswith("below 0.125")
    assert cg(-1 * a, b).reason == "A is not positive definite"
    assert cg(a, b, M=-1 * identity(a.domain)).reason == "the preconditioner is not positive definite"
    assert cg(a, np.full(20, np.nan)).reason == "numbers are not finite"
    singular = from_scipy(np.diag([1.0, 2, 0, 0, 0, 0]), P("x"), mesh=LOCK)
    consistent = cg(singular, np.array([1.0, 1, 0, 0, 0, 0]))
    assert np.allclose(consistent.x.numpy(), [1, 0.5, 0, 0, 0, 0])
    assert not cg(singular, np.ones(6), maxiter=20).converged


def test_cg_sends_scalars_only():
    mesh = spmd.Mesh(x=4, scheduler="lockstep")
    n = 400
    a = laplacian(n, mesh)
    b = spmd.put(draw(n), P("x"), mesh)

    def bytes_of(k):
        with spmd.ledger() as log:
            assert cg(a, b, maxiter=k).iterations == k
        return sum(w.bytes for w in log.workers.values())

    bytes_of(1)
    with spmd.ledger() as log:
        a @ b
    moved = sum(w.bytes for w in log.workers.values())
    with spmd.ledger() as log:
        spmd.inner(b, b)
    one = sum(w.bytes for w in log.workers.values())
    assert one < 100
    assert bytes_of(7) - bytes_of(5) == 2 * (moved + 2 * one)


# Derivatives of the solution


def through(theta, b, solve):
    """A number computed from the solution of a system with the diagonal theta."""
    return np.sum(solve(theta, b) ** 3)


def distributed(theta, b):
    a = linear_operator(
        shifted_stencil, P("x"), P("x"), shape=b.shape, mesh=LOCK, params=theta, param_specs=P("x"), dtype=b.dtype
    )
    return cg(a, b, rtol=1e-13).x


def serial(theta, b):
    n = len(b)
    matrix = np.diag(theta) + 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    return np.linalg.solve(matrix, b)


@pytest.mark.parametrize("n", [0, 1])
def test_gradient_through_cg(n):
    theta, b = 1 + draw(8) ** 2, draw(8, seed=1)
    ours, exact = (spmd.grad(lambda t, b, s=s: through(t, b, s), n)(theta, b) for s in (distributed, serial))
    assert np.allclose(ours, exact, rtol=1e-9)
    for m in (0, 1):
        ours, exact = (
            spmd.grad(lambda t, b, s=s: np.sum(spmd.grad(lambda t, b: through(t, b, s), n)(t, b) ** 2), m)(theta, b)
            for s in (distributed, serial)
        )
        assert np.allclose(ours, exact, rtol=1e-8)


def test_gradient_has_the_layout_of_its_argument():
    theta = spmd.put(1 + draw(8) ** 2, P("x"), LOCK)
    b = spmd.from_blocks([np.ones(4), np.ones(0), np.ones(4)], P("x"), LOCK)
    gs = spmd.grad(lambda t, b: through(t, b, distributed), (0, 1))(theta, b)
    assert gs[0].layout == theta.layout
    assert gs[1].layout == b.layout
    assert np.allclose(gs[1].numpy(), spmd.grad(lambda b: through(theta.numpy(), b, serial))(np.ones(8)), rtol=1e-8)


def test_gradient_of_a_complex_system():
    g = draw(6, 6) + 1j * draw(6, 6, seed=1)
    matrix = g @ g.conj().T + np.eye(6)
    a, b = from_scipy(matrix, P("x"), mesh=LOCK), draw(6) + 1j * draw(6, seed=2)
    f = lambda x: np.sum(np.abs(x) ** 4 + np.real(x))
    ours = spmd.grad(lambda b: f(cg(a, b, rtol=1e-14).x))(b)
    assert np.allclose(ours, spmd.grad(lambda b: f(np.linalg.solve(matrix, b)))(b), rtol=1e-8)


def test_a_preconditioner_and_a_start_have_no_gradient():
    a, b = laplacian(8), draw(8)
    start = spmd.grad(lambda x0: np.sum(cg(a, b, x0, rtol=1e-12).x))(draw(8, seed=3))
    assert not np.any(start)

    def loss(d):
        m = linear_operator(lambda d, r: d * r, P("x"), P("x"), shape=(8,), mesh=LOCK, params=d, param_specs=P("x"))
        return np.sum(cg(a, b, M=m, rtol=1e-12).x)

    assert not np.any(spmd.grad(loss)(np.ones(8)))


def test_derivatives_that_there_are_not():
    b, f = spmd.put(draw(8), P("x"), LOCK), spmd.map(shifted_stencil, P("x"), P("x"), mesh=LOCK)
    with pytest.raises(DifferentiationError, match=r"closes over a differentiated array[\s\S]*params=theta"):
        spmd.grad(lambda t: np.sum(cg(lambda u: f(t, u), b).x))(b)
    g = spmd.grad(lambda b: np.sum(cg(lambda u: f(u * 0 + 1, u), b, rtol=1e-12).x))(b)
    assert np.allclose(g.numpy(), np.linalg.solve(laplacian(8).dense() + np.eye(8), np.ones(8)))
    with pytest.raises(DifferentiationError, match=r"mend:   spmd\.solvers\.cg\(A\.H @ A, A\.H\(b\)\)"):
        spmd.grad(lambda b: np.sum(lsqr(laplacian(8), b).x))(b)
    with pytest.warns(RuntimeWarning, match="the derivative is not exact: no convergence in 1 iterations"):
        spmd.grad(lambda b: np.sum(cg(laplacian(8), b, maxiter=1).x ** 2))(b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spmd.grad(lambda b: np.sum(cg(laplacian(8), b).x ** 2))(b)


# Least squares


@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize(("m", "n"), [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize("damp", [0.0, 0.7])
def test_lsqr_is_that_of_scipy(m, n, damp, kind):
    c, b = draw(m, n), draw(m, seed=1)
    if kind is complex:
        c, b = c + 1j * draw(m, n, seed=2), b + 1j * draw(m, seed=3)
    a = from_scipy(c, P("x"), mesh=LOCK)
    found = lsqr(a, b, damp=damp, atol=1e-12, btol=1e-12, conlim=0)
    below = np.vstack([c, damp * np.eye(n)]) if damp else c
    exact = np.linalg.pinv(below) @ np.concatenate([b, np.zeros(len(below) - m)])
    assert found.converged
    assert np.allclose(found.x.numpy(), exact, rtol=1e-8, atol=1e-10)
    residual = np.linalg.norm(b - c @ exact)
    assert found.residual == pytest.approx(residual, rel=1e-8, abs=1e-9)
    assert found.normal_residual <= 1e-9
    steps = scipy.sparse.linalg.lsqr(c, b, damp=damp, atol=1e-12, btol=1e-12, conlim=0)
    assert abs(found.iterations - steps[2]) <= 1
    if residual > 1e-6:
        assert found.reason == "the least-squares problem is solved"


def test_lsqr_from_a_start_and_step_by_step():
    c, b, x0 = draw(9, 6), draw(9, seed=1), draw(6, seed=2)
    a = from_scipy(c, P("x"), mesh=LOCK)
    seen = []
    found = lsqr(a, b, x0, damp=0.5, maxiter=3, callback=lambda x: seen.append(x.numpy()))
    theirs = scipy.sparse.linalg.lsqr(c, b, x0=x0, damp=0.5, iter_lim=3)
    assert (found.iterations, found.converged) == (3, False)
    assert np.allclose(found.x.numpy(), theirs[0], rtol=1e-12)
    assert np.array_equal(seen[-1], found.x.numpy())
    assert [found.residual, found.normal_residual] == pytest.approx([np.linalg.norm(b - c @ theirs[0]), theirs[7]])


def test_lsqr_of_stacked_operators_is_regularised():
    """Two arrays at once, and a smoothness term below: all in layouts of their own."""
    a = laplacian(8)
    wide = HStack(a, identity(a.domain))
    b = draw(8)
    x, y = lsqr(wide, b, atol=1e-13, btol=1e-13).x
    assert np.allclose(np.concatenate([x.numpy(), y.numpy()]), np.linalg.pinv(wide.dense()) @ b)
    tall = VStack(identity(a.domain), 2 * a)
    x = lsqr(tall, (b, np.zeros(8)), atol=1e-13, btol=1e-13).x
    assert np.allclose(x.numpy(), np.linalg.pinv(tall.dense()) @ np.concatenate([b, np.zeros(8)]))


def test_where_lsqr_ends():
    deficient = np.outer(draw(9), draw(5)) + np.outer(draw(9, seed=1), draw(5, seed=1))
    a, b = from_scipy(deficient, P("x"), mesh=LOCK), draw(9, seed=2)
    found = lsqr(a, b, atol=1e-12, btol=1e-12)
    assert found.reason == "the least-squares problem is solved"
    assert np.allclose(found.x.numpy(), np.linalg.pinv(deficient) @ b)
    zero = lsqr(a, np.zeros(9))
    assert (zero.iterations, zero.converged, zero.reason) == (0, True, "the system is solved")
    orthogonal = lsqr(from_scipy(np.eye(6)[:, :3], P("x"), mesh=LOCK), np.eye(6)[4])
    assert (orthogonal.iterations, orthogonal.reason) == (0, "the least-squares problem is solved")
    hilbert = from_scipy(1.0 / (np.arange(8)[:, None] + np.arange(1, 9)), P("x"), mesh=LOCK)
    assert lsqr(hilbert, np.ones(8), atol=0, btol=0, conlim=1e3).reason == "the condition is beyond 1e+03"
    assert lsqr(a, np.full(9, np.nan)).reason == "numbers are not finite"
    assert lsqr(hilbert, np.ones(8), maxiter=1).reason == "no convergence in 1 iterations"


def test_the_estimates_of_lsqr():
    c = np.diag(np.linspace(1, 5, 6))
    found = lsqr(from_scipy(c, P("x"), mesh=LOCK), np.ones(6), atol=1e-10, btol=1e-10)
    assert found.norm == pytest.approx(np.linalg.norm(c), rel=1e-6)
    assert found.condition == pytest.approx(np.linalg.norm(c) * np.linalg.norm(np.linalg.inv(c)), rel=1e-6)
    damped = lsqr(from_scipy(c, P("x"), mesh=LOCK), np.ones(6), damp=2.0, atol=1e-10, btol=1e-10)
    below = np.vstack([c, 2 * np.eye(6)])
    assert damped.norm == pytest.approx(np.linalg.norm(below), rel=1e-6)
    assert damped.condition == pytest.approx(np.linalg.norm(below) * np.linalg.norm(np.linalg.pinv(below)), rel=1e-6)


# Arguments, and the same bits everywhere


def test_errors_of_solvers():
    a, b = laplacian(8), np.ones(8)
    with LOCK:
        tall = linear_operator(lambda u: u[:1], P("x"), P("x"), shape=(8,))
        whole = linear_operator(lambda u: spmd.all_gather(u, "x", tiled=True, to="invariant"), P("x"), P(), shape=(8,))
    for f, kind, text in [
        (lambda: cg(tall, b), LayoutError, "not square"),
        (lambda: cg(whole, b), SpecError, "not square"),
        (lambda: cg(a, np.ones(3)), LayoutError, r"argument b[\s\S]*shape \[8\]"),
        (lambda: cg(a, b, np.ones(3)), LayoutError, "argument x0"),
        (lambda: cg(np.eye(8), b), LayoutError, "from_scipy"),
        (lambda: cg(lambda x: x, b), LayoutError, r"spmd\.put"),
        (lambda: cg(a, b, rtol=-1), LayoutError, "argument rtol"),
        (lambda: cg(a, b, maxiter=-1), LayoutError, "argument maxiter"),
        (lambda: cg(a, b, maxiter=3.5), LayoutError, "argument maxiter"),
        (lambda: lsqr(lambda x: x, b), LayoutError, "adjoint"),
        (lambda: lsqr(a, np.ones(3)), LayoutError, "argument b"),
        (lambda: lsqr(a, b, damp=-1), LayoutError, "argument damp"),
    ]:
        with pytest.raises(kind, match=text):
            f()


def test_the_same_bits_with_each_scheduler():
    assert solving.results(transport="local", scheduler="lockstep") == solving.results(
        transport="local", scheduler="threads"
    )


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_same_bits_under_mpi():
    ended = launch(PROGRAMS / "solving.py", python=sys.executable)
    assert ended.returncode == 0, str(ended)
    assert json.loads(ended.stdout) == solving.results(transport="local", scheduler="lockstep")


@pytest.mark.parametrize("solver", ["cg", "lsqr"])
def test_solvers_say_that_they_are_not_recorded(solver):
    solve = getattr(spmd.solvers, solver)
    with spmd.Mesh(x=2):
        A = spmd.linear_operator(lambda v: 2 * v, P("x"), P("x"), shape=5)
        b = spmd.ones(5, spec=P("x"))
        with pytest.raises(spmd.errors.JitError, match=rf"spmd\.solvers\.{solver}\n[\s\S]*spmd.jit of the body of A"):
            spmd.jit(lambda b: solve(A, b).x)(b)
