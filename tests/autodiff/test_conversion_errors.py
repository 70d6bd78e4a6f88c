"""What asks a traced array for its bare data: each error names a mend, and the mend gives the gradient."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.errors import TracedConversionError

A = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 4.0]])
B = np.random.default_rng(0).standard_normal(3)


def put(x):
    b = np.zeros(3)
    b[:] = x
    return b


# What asks: what the mend says, and what is then written.
ASKS = {
    "np.int64": (lambda x: np.int64(x), "x.astype(np.int64)", lambda x: x.astype(np.int64) * 1.0),
    "np.float32": (lambda x: np.float32(x[0]), "x.astype(np.float32)", lambda x: x[0].astype(np.float32)),
    "np.complex128": (lambda x: np.complex128(x[0]), "x.astype(np.complex128)", lambda x: x[0].astype(np.complex128)),
    "x.dtype.type": (lambda x: x.dtype.type(x[0]), "x.astype(dtype)", lambda x: x[0].astype(x.dtype)),
    "np.dtype().type": (lambda x: np.dtype(float).type(x[0]), "x.astype(dtype)", lambda x: x[0].astype(float)),
    "np.r_": (lambda x: np.r_[x, 1.0], "spmd.numpy.r_[...]", lambda x: snp.r_[x, 1.0]),
    "np.c_": (lambda x: np.c_[x, x], "spmd.numpy.c_[...]", lambda x: snp.c_[x, x]),
    "np.array": (lambda x: np.array([x[0], x[1]]), "spmd.numpy.array(...)", lambda x: snp.array([x[0], x[1]])),
    "np.asarray": (lambda x: np.asarray(x), "spmd.numpy.asarray(...)", lambda x: snp.asarray(x)),
    "np.full": (lambda x: np.full(3, x[0]), "spmd.numpy.full(...)", lambda x: snp.full(3, x[0])),
    "b.dot": (lambda x: B.dot(x), "np.dot(...)", lambda x: np.dot(B, x)),
    "np.ones().dot": (lambda x: np.ones(3).dot(x), "np.dot(...)", lambda x: np.dot(np.ones(3), x)),
    "b[:] =": (put, "spmd.at(b)[i].set(x)", lambda x: spmd.at(np.zeros(3))[:].set(x)),
    "np.ma": (lambda x: np.ma.array(x), "np.where(mask, other, x)", lambda x: np.where(B > 0, 0, x)),
    "np.ma.masked_where": (lambda x: np.ma.masked_where(B > 0, x), "np.where(", lambda x: np.where(B > 0, 0, x)),
    "Polynomial": (lambda x: np.polynomial.Polynomial(x)(2.0), "np.polyval(", lambda x: np.polyval(x[::-1], 2.0)),
    "np.vectorize": (
        lambda x: np.vectorize(lambda a: a * 2)(x),
        "spmd.numpy.vectorize(...)",
        lambda x: snp.vectorize(lambda a: a * 2)(x),
    ),
    "math.sin": (lambda x: math.sin(x[0]), "np.sin(x)", lambda x: np.sin(x[0])),
    "math.fabs": (lambda x: math.fabs(x[0]), "np.abs(x)", lambda x: np.abs(x[0])),
    "math.pow": (lambda x: math.pow(x[0], 2), "np.power(x)", lambda x: np.power(x[0], 2)),
    "math.fsum": (lambda x: math.fsum(x), "np.sum(x)", lambda x: np.sum(x)),
    "math.floor": (lambda x: math.floor(x[0]), "np.floor(x)", lambda x: np.floor(x[0])),
    "cmath.exp": (lambda x: cmath.exp(x[0]), "np.exp(x)", lambda x: np.exp(x[0])),
}


@pytest.mark.parametrize("case", ASKS)
def test_what_asks_names_a_mend_that_works(case):
    asks, says, mended = ASKS[case]
    with pytest.raises(TracedConversionError) as caught:
        spmd.grad(lambda x: np.real(np.sum(asks(x))))(np.array([0.5, 1.5, 2.5]))
    mend = str(caught.value).splitlines()[-1]
    assert says in mend
    assert says == "spmd.numpy.array(...)" or "np.stack" not in mend.replace(", or np.stack([a, b])", "")
    g = spmd.grad(lambda x: np.real(np.sum(mended(x))))(np.array([0.5, 1.5, 2.5]))
    assert g.shape == (3,)


@pytest.mark.parametrize("kind", ["csr_array", "csc_array", "coo_array", "dia_array", "bsr_array", "csr_matrix"])
@pytest.mark.parametrize(
    "way", [lambda s, x: s @ x, lambda s, x: x @ s, lambda s, x: s.dot(x)], ids=["s@x", "x@s", "dot"]
)
def test_sparse_matrices_name_a_mend_that_works(kind, way):
    sparse = pytest.importorskip("scipy.sparse")
    s, x = getattr(sparse, kind)(A), np.array([0.5, 1.5, 2.5])
    with pytest.raises(TracedConversionError, match=r"around lambda x: A @ x, with A\.T @ g") as caught:
        spmd.grad(lambda x: np.sum(way(s, x) ** 2))(x)
    assert "np.stack" not in str(caught.value)
    product = spmd.custom_vjp(lambda x: s @ x)
    product.defvjp(lambda x: (s @ x, None), lambda _, g: (s.T @ g,))
    dense = spmd.grad(lambda x: np.sum((s.toarray() @ x) ** 2))(x)
    np.testing.assert_allclose(spmd.grad(lambda x: np.sum(product(x) ** 2))(x), dense)
    np.testing.assert_allclose(dense, 2 * A.T @ (A @ x))
