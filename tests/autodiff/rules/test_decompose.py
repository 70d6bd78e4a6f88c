"""Rules of decompositions, inverses, determinants and linear systems."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from rules import Table, complex_, of, signed

import spmd
from spmd import P
from spmd.autodiff import grad, hessian, jvp, value_and_grad, vjp
from spmd.autodiff.check import check_grads
from spmd.errors import DifferentiationError

TABLE = Table()
row = TABLE.row

# Domains: matrices whose singular values or eigenvalues lie well apart.


def _unitary(rng, shape, n, complex):
    x = rng.normal(size=(*shape, n, n))
    return np.linalg.qr(x + 1j * rng.normal(size=x.shape) if complex else x)[0]


def _values(rng, shape, n):
    return 0.8 + 0.7 * np.arange(n) + rng.uniform(0, 0.2, (*shape, n))


def _h(x):
    return np.conj(np.swapaxes(x, -1, -2))


def matrix(rng, shape, complex=False):
    """Singular values about 0.7 apart."""
    *batch, m, n = shape
    u, v = (_unitary(rng, batch, k, complex) for k in (m, n))
    k = min(m, n)
    return (u[..., :k] * _values(rng, batch, k)[..., None, :]) @ _h(v[..., :k])


def complex_matrix(rng, shape):
    return matrix(rng, shape, True)


def definite(rng, shape, complex=False):
    """Hermitian, with positive eigenvalues about 0.7 apart."""
    u = _unitary(rng, shape[:-2], shape[-1], complex)
    return (u * _values(rng, shape[:-2], shape[-1])[..., None, :]) @ _h(u)


def complex_definite(rng, shape):
    return definite(rng, shape, True)


def indefinite(rng, shape):
    """Hermitian, with eigenvalues of both signs whose absolute values lie apart."""
    u = _unitary(rng, shape[:-2], shape[-1], False)
    w = _values(rng, shape[:-2], shape[-1]) * (-1.0) ** np.arange(shape[-1])
    return (u * w[..., None, :]) @ _h(u)


def slanted(rng, shape):
    """Not normal, with real eigenvalues about 0.7 apart."""
    v = np.eye(shape[-1]) + rng.uniform(-0.3, 0.3, shape)
    return (v * _values(rng, shape[:-2], shape[-1])[..., None, :]) @ np.linalg.inv(v)


def turning(rng, shape):
    """Real, with complex eigenvalues, no two entries of an eigenvector equally large."""
    v = np.eye(shape[-1]) + np.triu(rng.uniform(0.2, 0.4, shape), 1)
    n = np.arange(shape[-1] - 1)
    turn = np.zeros(shape)
    turn[..., n, n + 1], turn[..., n + 1, n] = 1.5 + n, -0.5 - n
    return v @ (turn + np.diag(0.3 * np.arange(shape[-1]))) @ np.linalg.inv(v)


def complex_slanted(rng, shape):
    return slanted(rng, shape) * (1 + 0.5j) + 0.1j * rng.uniform(-1, 1, shape)


both = (matrix, complex_matrix)
SQUARE = of("33", "22", "233", "11", "00", "033")
ANY = of("33", "42", "24", "232", "223", "03", "30")


def each(name, f, domains, shapes, rest=()):
    """A row for real and one for complex arguments."""
    for domain in domains:
        others = tuple(complex_ if "complex" in domain.__name__ else signed for _ in rest)
        row(f"{name}-{domain.__name__}", f, (domain, *others), shapes)


def steady(v, axis=-2):
    """Vectors with a sign that does not jump."""
    weights = np.linspace(1, 2, v.shape[axis]) ** 2
    return v * np.sign(np.sum(np.real(v) * (weights[:, None] if axis == -2 else weights), axis, keepdims=True))


def projectors(v, weights=(1.0, -0.3, 0.6, 0.2)):
    """Σ c_k v_k v_k^H, which no phase changes."""
    return (v * np.asarray(weights[: v.shape[-1]], np.real(v).dtype)) @ np.conj(np.swapaxes(v, -1, -2))


# linear systems
each("inv", np.linalg.inv, both, SQUARE)
SOLVE = of("33 3", "33 32", "233 3", "233 32", "33 432", "2133 431", "00 02", "00 0", "33 30", "033 32")
each("solve", np.linalg.solve, both, SOLVE, "b")
row("solve-mixed", np.linalg.solve, (matrix, complex_), of("33 3", "233 32"))
row("solve-mixed-left", np.linalg.solve, (complex_matrix, signed), of("33 3", "233 32"))
each("tensorinv", lambda a: np.linalg.tensorinv(np.reshape(a, (3, 2, 2, 3)), 2), both, of("66"))
each("tensorinv-1", lambda a: np.linalg.tensorinv(np.reshape(a, (6, 2, 3)), ind=1), both, of("66"))
each("tensorsolve", lambda a, b: np.linalg.tensorsolve(np.reshape(a, (2, 3, 6)), b), both, of("66 23"), "b")
each(
    "tensorsolve-axes",
    lambda a, b: np.linalg.tensorsolve(np.reshape(a, (6, 2, 3)), b, axes=(0,)),
    both,
    of("66 23"),
    "b",
)
for n in (-3, -1, 0, 1, 2, 3, 6):
    each(f"matrix_power{n}", lambda a, n=n: np.linalg.matrix_power(a, n) + 0 * a, both, SQUARE)
for f, name, shapes in (
    (lambda a, b, c: np.linalg.multi_dot([a, b, c, b]), "multi_dot", of("32 24 42", "2 24 42")),
    (lambda a, b, c: np.linalg.multi_dot([c, a, b]), "multi_dot-vector", of("32 2 3", "32 24 43")),
):
    row(name, f, (signed,) * 3, shapes)
    row(f"{name}-complex", f, (complex_, signed, complex_), shapes)
each("pinv", np.linalg.pinv, both, of("33", "42", "24", "232", "03", "30", "00"))
each("pinv-truncated", lambda a: np.linalg.pinv(a, [0.5, 0.8]), both, of("233", "243"))
each("pinv-truncated-rtol", lambda a: np.linalg.pinv(a, rtol=0.5), both, of("33"))
each("pinv-hermitian", lambda a: np.linalg.pinv(a, hermitian=True), (definite, complex_definite), of("33", "222"))
LSTSQ = of("33 3", "42 4", "42 43", "24 2", "24 21", "30 32", "03 02", "32 30")
each("lstsq", lambda a, b: np.linalg.lstsq(a, b)[0], both, LSTSQ, "b")
each("lstsq-residuals", lambda a, b: np.linalg.lstsq(a, b, rcond=-1)[1::2], both, LSTSQ, "b")
each("lstsq-truncated", lambda a, b: np.linalg.lstsq(a, b, 0.5)[0], both, of("33 32", "43 4", "34 3"), "b")
row("lstsq-mixed", lambda a, b: np.linalg.lstsq(a, b)[:2], (matrix, complex_), of("42 4", "24 21"))

# determinants
each("det", np.linalg.det, both, SQUARE)
each("slogdet", np.linalg.slogdet, both, SQUARE)

# triangular factors
each("cholesky", np.linalg.cholesky, (definite, complex_definite), SQUARE)
each("cholesky-upper", lambda a: np.linalg.cholesky(a, upper=True), (definite, complex_definite), SQUARE)
each("qr", np.linalg.qr, both, ANY)
each("qr-complete", lambda a: np.linalg.qr(a, "complete"), both[:1], of("33", "43", "24", "223", "00"))
each("qr-complete-space", lambda a: projectors(np.linalg.qr(a, "complete")[0], [0, 0, 1, 1]), both, of("42"))
each("qr-r", lambda a: np.linalg.qr(a, mode="r"), both, ANY)


# eigenvalues
def eigh(a, *options):
    w, v = np.linalg.eigh(a, *options)
    return w, steady(v)


row("eigh", eigh, definite, of("33", "233", "11", "00"))
row("eigh-upper", lambda a: eigh(a, "U"), definite, of("33"))
for domain, uplo in itertools.product((definite, complex_definite, indefinite), "lU"):
    f = lambda a, uplo=uplo: np.linalg.eigvalsh(a, UPLO=uplo)
    row(f"eigvalsh-{uplo}-{domain.__name__}", f, domain, of("33", "222", "00"))
    f = lambda a, uplo=uplo: projectors(np.linalg.eigh(a, UPLO=uplo).eigenvectors)
    row(f"eigh-space-{uplo}-{domain.__name__}", f, domain, of("33", "222"))
eig = lambda a: (np.linalg.eig(a)[0], steady(np.linalg.eig(a)[1]))
row("eig", eig, slanted, of("33", "222", "11"))
row("eig-complex", eig, complex_slanted, of("33", "222", "00"))
row("eig-turning", eig, turning, of("33", "22", "244"))
for domain in (slanted, complex_slanted, turning):
    row(f"eigvals-{domain.__name__}", np.linalg.eigvals, domain, of("33", "222"))


# singular values
def svd(a, *options):
    u, s, vh = np.linalg.svd(a, *options)
    return steady(u), s, steady(vh, -1)


row("svd", lambda a: svd(a, False), matrix, ANY)
row("svd-full", svd, matrix, of("33", "43", "23", "223", "00"))
row(
    "svd-hermitian",
    lambda a: [f(x) for f, x in zip((steady, abs, abs), np.linalg.svd(a, hermitian=True), strict=True)],
    indefinite,
    of("33"),
)
each("svdvals", np.linalg.svdvals, both, ANY)
each("svd-values", lambda a: np.linalg.svd(a, compute_uv=False), both, of("32"))
each("svd-values-used", lambda a: np.linalg.svd(a)[1], both, of("32", "24"))
row("svd-values-hermitian", lambda a: np.linalg.svd(a, True, False, True), indefinite, of("33", "222"))


def _spaces(a, full):
    u, s, vh = np.linalg.svd(a, full)
    k = s.shape[-1]
    return (
        projectors(u),
        projectors(np.swapaxes(vh, -1, -2)),
        (u[..., :k] * s**2) @ vh[:k],
        projectors(u[..., k:], [1] * 3),
        projectors(np.swapaxes(vh[k:], -1, -2), [1] * 3),
    )


each("svd-spaces", lambda a: _spaces(a, False), both, of("33", "32", "24"))
each("svd-full-spaces", lambda a: _spaces(a, True)[2:], both, of("33", "32", "41", "24"))

# norms
for order in (2, -2, "nuc", "f"):
    each(f"norm{order}", lambda a, o=order: np.linalg.norm(a, o), both, of("33", "42", "24"))
    each(
        f"norm{order}-axes",
        lambda a, o=order: np.linalg.norm(np.moveaxis(a, -1, 0), o, (0, -1), True),
        both,
        of("232"),
    )
each("matrix_norm", lambda a: np.linalg.matrix_norm(a, ord="nuc", keepdims=True), both, of("223"))
for order in (None, 2, -2, "fro", "nuc"):
    shapes = of("33", "233") if order in ("fro", "nuc") else of("33", "42", "224")
    each(f"cond{order}", lambda a, p=order: np.linalg.cond(a, p), both, shapes)

TestRows = TABLE.tests()


# Values: what is traced is what NumPy gives.


def traced(f, *args):
    return vjp(f, *args)[0]


@pytest.mark.parametrize("domain", both)
def test_compositions_give_what_numpy_gives(domain):
    rng = np.random.default_rng(0)
    a, tall, wide, batch = (domain(rng, s) for s in ((4, 4), (5, 3), (3, 5), (2, 3, 3)))
    h = definite(rng, (4, 4), domain is complex_matrix) - 2 * np.eye(4)
    cases = [
        (lambda x, n=n: np.linalg.matrix_power(x, n), x)
        for n in (-2, -1, 0, 1, 2, 3, 7, np.int64(2))
        for x in (a, batch)
    ]
    cases += [
        (lambda x, mode=mode: np.linalg.qr(x, mode), x)
        for mode in ("reduced", "complete", "r")
        for x in (a, tall, wide)
    ]
    cases += [
        (lambda x, full=full: np.linalg.svd(x, full), x) for full in (True, False) for x in (a, tall, wide, batch)
    ]
    cases += [(lambda x, uv=uv: np.linalg.svd(x, True, uv, True), h) for uv in (True, False)]
    cases += [
        (lambda x, p=p: np.linalg.cond(x, p), x)
        for p in (None, 2, -2, 1, -1, np.inf, -np.inf, "fro", "nuc")
        for x in (a, batch)
    ]
    cases += [(lambda x, p=p: np.linalg.cond(x, p), x) for p in (None, 2, -2) for x in (tall, wide, 0 * a)]
    cases += [
        (lambda x, o=o, axis=axis, k=k: np.linalg.norm(x, o, axis, k), batch)
        for o in (2, -2, "nuc", "fro", "f", 1, -1, np.inf, -np.inf, None)
        for axis in ((0, 1), (2, 0), (-1, -2))
        for k in (True, False)
    ]
    cases += [
        (lambda x, o=o: np.linalg.norm(x, o), np.zeros(s)) for o in (2, 1, np.inf, "nuc") for s in ((0, 3), (3, 0))
    ]
    cases += [(lambda x, o=o: np.linalg.norm(x, o, 0), np.zeros((0, 3))) for o in (2, 1, np.inf, 3)]
    cases += [
        (lambda x, k=k: np.linalg.pinv(x, **k), x) for k in ({}, {"rcond": 0.5}, {"rtol": None}) for x in (a, tall)
    ]
    cases += [(lambda x: np.linalg.pinv(x, [0.2, 0.7]), batch), (lambda x: np.linalg.pinv(x, 0.4, True), h)]
    cases += [
        (lambda x, b, r=r: np.linalg.lstsq(x, b, r), x, b[: len(x)])
        for r in (None, -1, 0.4, 0.9)
        for x in (a, tall, wide, 0 * tall)
        for b in (np.arange(5.0), np.arange(10.0).reshape(5, 2))
    ]
    cases += [
        (lambda x, b: np.linalg.tensorsolve(np.reshape(x, (2, 2, 4)), b), a, np.eye(2)),
        (lambda x, b: np.linalg.tensorsolve(np.reshape(x, (4, 2, 2)), b, (0,)), a, np.eye(2)),
        (lambda x, b: np.linalg.tensorsolve(np.reshape(x, (2, 4, 2)), b, (1,)), a, np.eye(2)),
        (lambda x: np.linalg.tensorinv(np.reshape(x, (4, 2, 2)), 1), a),
        (lambda x, y: np.linalg.multi_dot([x, y]), tall, wide),
        (lambda x, y: np.linalg.multi_dot([x, y, x]), tall, wide),
        (lambda x, y: np.linalg.multi_dot([y[0], x, y, x, y[:, 1][:3]]), tall, wide),
        (lambda x, y: np.linalg.multi_dot([y, x, y[:, 1]]), tall, wide),
        (lambda x: np.linalg.eigvals(x), a),
        (lambda x: np.linalg.solve(x, [1, 2, 3]), batch),
        (lambda x: np.linalg.solve([[1, 2], [0, 3]], x[0, :2]), a),
        (lambda x: np.linalg.matrix_rank(x) * x, tall),
    ]
    for f, *args in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            got, expected = traced(f, *args), f(*args)
        assert type(got) is type(expected) or not isinstance(expected, tuple)
        for x, y in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, expected)), strict=True):
            assert np.shape(x) == np.shape(y)
            assert np.asarray(x).dtype == np.asarray(y).dtype
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def test_in_a_map():
    def alone(a):
        rank = np.linalg.lstsq(a, a[0])[2]
        w, v = np.linalg.eigh(a)
        return np.linalg.det(a) + np.linalg.svd(a)[1][0] + w[0] * v[0, 0] ** 2 + rank

    def body(a):
        assert spmd.stop_gradient(alone(a)).state == alone(a).state
        assert type(np.linalg.svd(spmd.stop_gradient(a))).__name__ == "SVDResult"
        return spmd.psum(alone(a), "x")

    rng = np.random.default_rng(0)
    blocks = [definite(rng, (3, 3)) for _ in range(2)]
    with spmd.Mesh(x=2):
        loss = spmd.map(body, in_specs=P("x"), out_specs=P())
        value, g = spmd.value_and_grad(loss)(np.concatenate(blocks))
    parts = [value_and_grad(alone)(block) for block in blocks]
    np.testing.assert_allclose(float(value), sum(v for v, _ in parts))
    np.testing.assert_allclose(np.asarray(g), np.concatenate([g for _, g in parts]))


# One triangle


@pytest.mark.parametrize("domain", [definite, complex_definite])
def test_the_cotangent_lies_in_the_triangle_that_is_read(domain):
    a = domain(np.random.default_rng(0), (3, 3))
    noise = np.triu(np.random.default_rng(1).normal(size=(3, 3)), 1)
    for f in (
        lambda a: np.sum(np.linalg.cholesky(a).real),
        lambda a: np.linalg.eigvalsh(a)[0],
        lambda a: np.sum(np.linalg.pinv(a, hermitian=True).real),
        lambda a: np.linalg.svd(a, True, False, True)[0],
    ):
        g = grad(f)(a)
        np.testing.assert_array_equal(np.triu(g, 1), 0)
        np.testing.assert_allclose(grad(f)(a + noise), g, atol=1e-12)
    for f in (lambda a: np.sum(np.linalg.cholesky(a, upper=True).real), lambda a: np.linalg.eigvalsh(a, "U")[0]):
        g = grad(f)(a)
        np.testing.assert_array_equal(np.tril(g, -1), 0)
        np.testing.assert_allclose(grad(f)(a + noise.T), g, atol=1e-12)


def test_the_hermitian_part_is_the_derivative_along_hermitian_changes():
    a = complex_definite(np.random.default_rng(0), (3, 3))
    v = np.linalg.eigh(a)[1]
    g = grad(lambda a: np.linalg.eigvalsh(a)[1])(a)
    np.testing.assert_allclose((g + _h(g)) / 2, np.outer(v[:, 1].conj(), v[:, 1]))
    g = grad(lambda a: 2 * np.sum(np.log(np.diagonal(np.linalg.cholesky(a)).real)))(a)
    np.testing.assert_allclose((g + _h(g)) / 2, np.linalg.inv(a).T)


# Singular matrices and equal values


def leibniz(a):
    """The determinant as a sum over permutations."""
    n = a.shape[-1]
    total = 0
    for p in itertools.permutations(range(n)):
        sign = round(np.linalg.det(np.eye(n)[list(p)]))
        total = total + sign * math.prod(a[..., i, j] for i, j in enumerate(p))
    return total


def _of_rank(rank, n=4, complex=False):
    rng = np.random.default_rng(rank)
    s = np.where(np.arange(n) < rank, 1 + np.arange(n), 0)
    return (_unitary(rng, (), n, complex) * s) @ _unitary(rng, (), n, complex)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("complex", [False, True])
@pytest.mark.parametrize("scale", [1, 1e-5, 1e6])
@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_det_of_singular_matrices_to_the_third_order(rank, scale, complex):
    """Against the sum over permutations; also where a matrix is only nearly singular."""
    directions = np.random.default_rng(9).normal(size=(3, 4, 4))
    for near in (0, 1e-12, 1e-9):
        a = scale * (_of_rank(rank, complex=complex) + near * directions[0])
        f, oracle = np.linalg.det, leibniz
        for order, d in enumerate(directions, 1):
            got, expected = grad(f, holomorphic=complex)(a), grad(oracle, holomorphic=complex)(a)
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * (4 * scale) ** (4 - order))
            f, oracle = (lambda a, f=f, d=d: np.sum(grad(f, holomorphic=complex)(a) * d) for f in (f, oracle))


@pytest.mark.filterwarnings("error")
def test_det_of_a_batch_of_mixed_ranks():
    a = np.stack([_of_rank(r) for r in (4, 2, 3, 0, 3, 4)]).reshape(2, 3, 4, 4)
    a[0, 0, :, 0] *= 1e-30  # regular, though badly scaled
    for dtype, tolerance in (("f8", 1e-9), ("f4", 1e-3)):
        b = a.astype(dtype)
        got = grad(lambda a: np.sum(np.linalg.det(a)))(b)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, grad(lambda a: np.sum(leibniz(a)))(b), rtol=tolerance, atol=50 * tolerance)
    second = grad(lambda a: np.sum(grad(lambda a: np.sum(np.linalg.det(a)))(a) ** 2))(a)
    expected = grad(lambda a: np.sum(grad(lambda a: np.sum(leibniz(a)))(a) ** 2))(a)
    np.testing.assert_allclose(second, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("error")
def test_det_where_the_cofactors_are_plain():
    assert grad(np.linalg.det)(np.zeros((1, 1))).tolist() == [[1]]
    assert grad(np.linalg.det)(np.zeros((0, 0))).shape == (0, 0)
    np.testing.assert_allclose(grad(np.linalg.det)(np.diag([2.0, 3.0, 0.0])), np.diag([0, 0, 6]), atol=1e-14)
    with np.errstate(invalid="ignore"):
        assert np.isnan(grad(np.linalg.det)(np.array([[1.0, np.nan], [2.0, 3.0]]))).any()
    assert hessian(np.linalg.det)(np.zeros((2, 2)))[0, 0].tolist() == [[0, 0], [0, 1]]
    np.testing.assert_allclose(hessian(np.linalg.det)(np.ones((2, 2)))[0, 1], [[0, 0], [-1, 0]], atol=1e-12)
    np.testing.assert_allclose(
        jvp(np.linalg.det, (np.ones((2, 2)),), (np.array([[1.0, 2.0], [3.0, 5.0]]),))[1], 1 - 2 - 3 + 5, atol=1e-12
    )
    low = np.outer(np.arange(1.0, 41), np.arange(1.0, 41))
    assert np.linalg.norm(grad(np.linalg.det)(low)) < 1e-300
    low = np.diag([1e20] * 8 + [0] + [1e-20] * 8)
    np.testing.assert_allclose(grad(np.linalg.det)(low), np.diag([0] * 8 + [1] + [0] * 8), atol=1e-12)


EQUAL = {
    "identity": np.eye(3),
    "repeated": np.diag([2.0, 1.0, 2.0]),
    "turned": (lambda q: (q * [1.0, 2.0, 2.0]) @ q.T)(_unitary(np.random.default_rng(0), (), 3, False)),
    "zero": np.zeros((3, 3)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("a", EQUAL.values(), ids=EQUAL)
def test_functions_of_equal_values_have_their_derivative(a):
    one = np.eye(3)
    lower = lambda g: np.tril(g + g.T) - np.diag(np.diag(g))
    for f, expected in (
        (lambda a: np.sum(np.linalg.eigvalsh(a)), one),
        (lambda a: np.sum(np.linalg.eigh(a)[0]), one),
        (lambda a: np.sum(np.linalg.eigh(a)[0] ** 2), lower(2 * a)),
        (lambda a: np.sum(np.linalg.eigvals(a).real ** 2), 2 * a.T),
        (lambda a: np.sum(np.linalg.svd(a)[1] ** 2), 2 * a),
        (lambda a: np.sum(np.linalg.svdvals(a) ** 4), 4 * a @ a.T @ a),
        (lambda a: np.linalg.norm(a, "nuc"), np.sign(np.trace(a)) * one),
    ):
        np.testing.assert_allclose(grad(f)(a), expected, atol=1e-9)


@pytest.mark.filterwarnings("error")
def test_spaces_of_equal_values_have_their_derivative():
    a = EQUAL["turned"]
    d = np.random.default_rng(1).normal(size=(3, 3))
    for f in (
        lambda a: np.sum(d * np.linalg.pinv(a)),
        lambda a: np.linalg.norm(a, "nuc"),
        lambda a: np.linalg.cond(a, "nuc"),
        lambda a: np.sum(d[:, :2] * np.linalg.lstsq(a[:, 1:], a[:, :2])[0][:1]),
    ):
        check_grads(f, (a,))
    truncated = lambda a: np.sum(d * np.linalg.pinv(a, rcond=0.6))
    check_grads(truncated, (a,), 1)
    with pytest.warns(RuntimeWarning, match="where values are equal"):
        hessian(truncated)(a)
    # The nuclear norm and the pseudo-inverse of the identity, to the second order.
    for f in (lambda a: np.linalg.norm(a, "nuc"), np.linalg.pinv):
        check_grads(f, (np.eye(3),))
        check_grads(f, (np.eye(3)[:, :2],))


def test_a_turn_within_equal_values_is_warned_of():
    c = np.array([[1.0, 2.0], [3.0, 4.0]])
    two = np.eye(2)
    for f in (
        lambda a: np.sum(c * ((lambda w, v: (v * np.exp(w)) @ v.T)(*np.linalg.eigh(a)))),
        lambda a: np.sum(c * ((lambda w, v: (v * np.exp(w)) @ np.linalg.inv(v))(*np.linalg.eig(a)))),
        lambda a: np.sum(c * ((lambda u, s, vh: (u * s**2) @ vh)(*np.linalg.svd(a)))),
        lambda a: np.linalg.eigh(a)[0][0],
    ):
        with pytest.warns(RuntimeWarning, match="where values are equal"):
            assert np.isfinite(grad(f)(two)).all()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert np.isfinite(hessian(f)(two)).all()
    project = lambda a: np.sum(c * ((lambda v: v @ v.T)(np.linalg.eigh(a)[1][:, 1:])))
    a = np.diag([1.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_grads(project, (a,))


def test_the_space_of_values_that_are_equal_but_for_rounding():
    a, d = EQUAL["turned"], np.random.default_rng(1).normal(size=(3, 3))
    d = d + d.T
    for f in (
        lambda a: (lambda v: v @ v.T)(np.linalg.eigh(a)[1][:, 1:]),
        lambda a: (lambda u: u @ u.T)(np.linalg.svd(a)[0][:, :2]),
    ):
        with pytest.warns(RuntimeWarning, match="where values are equal"):
            g = grad(lambda a, f=f: np.sum(d * f(a)))(a)
        tangent, h = jvp(lambda a, f=f: np.sum(d * f(a)), (a,), (d,))[1], 1e-6
        np.testing.assert_allclose(tangent, np.sum(d * (f(a + h * d) - f(a - h * d))) / (2 * h), rtol=1e-6)
        np.testing.assert_allclose(np.sum(g * d), tangent)


@pytest.mark.filterwarnings("error")
def test_the_nuclear_norm_of_a_singular_matrix():
    assert grad(lambda a: np.linalg.norm(a, "nuc"))(np.diag([2.0, 0.0])).tolist() == [[1, 0], [0, 0]]
    a = _of_rank(2)
    u, _, vh = np.linalg.svd(a)
    np.testing.assert_allclose(grad(lambda a: np.linalg.norm(a, "nuc"))(a), u[:, :2] @ vh[:2], atol=1e-12)


# Phases


def test_phases_are_kept_as_in_jax():
    rng = np.random.default_rng(0)
    a, da = complex_matrix(rng, (4, 3)), complex_(rng, (4, 3))
    (u, s, vh), (du, ds, dvh) = jvp(lambda a: tuple(np.linalg.svd(a, False)), (a,), (da,))
    np.testing.assert_allclose(du * s @ vh + u * ds @ vh + u * s @ dvh, da)
    np.testing.assert_allclose(np.diagonal(vh @ _h(dvh)), 0, atol=1e-12)
    a, da = complex_definite(rng, (3, 3)), complex_(rng, (3, 3))
    (_, v), (_, dv) = jvp(lambda a: tuple(np.linalg.eigh(a)), (a,), (da,))
    np.testing.assert_allclose(np.diagonal(_h(v) @ dv), 0, atol=1e-12)


def test_the_entry_of_an_eigenvector_that_is_real_stays_so():
    """All entries are equally large here, and LAPACK has made one of them real."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 4))
    a, da = np.stack([np.roll(rows, k, 1) for k in range(4)], 1), rng.normal(size=(50, 4, 4))
    w, v = np.linalg.eig(a)
    dw, dv = jvp(lambda a: tuple(np.linalg.eig(a)), (a,), (da,))[1]
    one = np.sum(v.imag == 0, 1, keepdims=True) == 1
    assert np.count_nonzero(one) > 50
    assert (np.abs(dv.imag[(v.imag == 0) & one]) < 1e-12).all()
    np.testing.assert_allclose(np.sum((np.conj(v) * dv).real, 1), 0, atol=1e-12)
    np.testing.assert_allclose(a @ dv + da @ v, dv * w[:, None, :] + v * dw[:, None, :], atol=1e-12)


# Bases that no derivative has, and other refusals


def test_a_basis_of_the_complement_has_no_derivative():
    a = matrix(np.random.default_rng(0), (4, 2))
    c = np.arange(8.0).reshape(4, 2)
    for f in (lambda a: np.linalg.svd(a)[0][:, 2:], lambda a: np.linalg.qr(a, "complete")[0][:, 2:]):
        with pytest.raises(DifferentiationError, match=r"orthogonal complement(.|\n)*full_matrices=False"):
            grad(lambda a, f=f: np.sum(c * f(a)))(a)
        check_grads(lambda a, f=f: (lambda q: q @ q.T)(f(a)), (a,))
    with pytest.raises(DifferentiationError, match="complement"):
        grad(lambda a: np.sum(c.T * np.linalg.svd(a)[2][2:]))(a.T)


def test_what_is_refused():
    a = np.eye(2)
    for mode in ("raw", "economic", "full", "what"):
        with pytest.raises(
            DifferentiationError, match=rf"qr: argument mode(.|\n)*{mode}(.|\n)*'reduced', 'complete' or 'r'"
        ):
            grad(lambda a, mode=mode: np.sum(np.linalg.qr(a, mode)[0]))(a)
    for f, error in (
        (lambda a: np.linalg.norm(a, 3), ValueError),
        (lambda a: np.linalg.norm(a[0], "nuc"), ValueError),
        (lambda a: np.linalg.norm(a[None], 2), ValueError),
        (lambda a: np.linalg.norm(a[None], None, (0, 1, 2)), ValueError),
        (lambda a: np.linalg.matrix_power(a[:1], 2), np.linalg.LinAlgError),
        (lambda a: np.linalg.matrix_power(a, 0.5), TypeError),
        (lambda a: np.linalg.multi_dot([a]), ValueError),
        (lambda a: np.linalg.multi_dot([a, a[None], a]), np.linalg.LinAlgError),
        (lambda a: np.linalg.tensorinv(a, 0), ValueError),
        (lambda a: np.linalg.tensorsolve(a, a[0, 0]), np.linalg.LinAlgError),
        (lambda a: np.linalg.pinv(a, 0.1, rtol=0.1), ValueError),
        (lambda a: np.linalg.pinv(a[:1], hermitian=True), np.linalg.LinAlgError),
        (lambda a: np.linalg.lstsq(a, a[:1]), np.linalg.LinAlgError),
        (lambda a: np.linalg.cond(a[:0]), np.linalg.LinAlgError),
        (lambda a: np.linalg.cond(0 * a, 1), np.linalg.LinAlgError),
        (lambda a: np.linalg.eigh(a, "X"), ValueError),
        (lambda a: np.linalg.inv(a[:1]), np.linalg.LinAlgError),
        (lambda a: np.linalg.cholesky(-a), np.linalg.LinAlgError),
    ):
        with pytest.raises(error):
            vjp(f, a)


# What the tape keeps, and numbers of operations


def test_multi_dot_takes_the_cheapest_order():
    from spmd.autodiff.tape import recording
    from spmd.autodiff.transform_arguments import lift

    with recording() as tape:
        arrays = [lift(tape, np.ones(s), "", str) for s in ((2, 50), (50, 3), (3, 40), (40, 1))]
        np.linalg.multi_dot(arrays)
        assert [n.shape for n in tape.nodes[4:]] == [(3, 1), (50, 1), (2, 1)]
