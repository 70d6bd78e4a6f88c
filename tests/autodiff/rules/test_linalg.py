"""Products and norms with all their options: what is traced is what NumPy gives, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from spmd.autodiff import allocation, grad, vjp
from spmd.autodiff.check import check_grads
from spmd.errors import DifferentiationError

PRODUCTS = [
    getattr(np, name) for name in "dot inner outer kron vdot matmul vecdot matvec vecmat".split() if hasattr(np, name)
]
SHAPES = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 2)),
    ((2, 3), (3, 4)),
    ((2, 3, 4), (4,)),
    ((2, 3, 4), (5, 4, 2)),
    ((), (3,)),
    ((2, 2), ()),
    ((2, 0), (0, 3)),
    ((2, 3), (2, 3)),
    ((3,), (1,)),
]
a, b, c = np.random.default_rng(0).normal(size=(3, 3, 3))
v = a[0]
z = a + 1j * b
cube = np.stack([a, b, c])
single = a.astype("f4")


def agree(f, *args):
    """Traced as bare: the same result, or an error of the same kind."""
    try:
        expected = f(*args)
    except (ValueError, TypeError) as e:
        kind = ValueError if isinstance(e, ValueError) else TypeError
        with pytest.raises(kind):
            vjp(f, *args)
        return
    got = vjp(f, *args)[0]
    assert np.shape(got) == np.shape(expected)
    assert got.dtype == np.asarray(expected).dtype
    np.testing.assert_allclose(got, expected, rtol=1e-5 if got.dtype in ("f4", "c8") else 1e-10)


@pytest.mark.parametrize("f", PRODUCTS, ids=lambda f: f.__name__)
def test_products_are_those_of_numpy(f):
    rng = np.random.default_rng(0)
    for s, t in SHAPES:
        x, y = rng.normal(size=s), rng.normal(size=t)
        for left, right in ((x, y), (x.astype("f4"), y), (x * (1 + 2j), y), (x.astype("c8"), y.astype("f4"))):
            agree(f, np.asarray(left), np.asarray(right))
    for other in ([1, 2, 3], [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 2, 2.0):
        agree(lambda x, o=other: f(x, o), single[0])
        agree(lambda x, o=other: f(o, x), single[0])


def vectors_of_two(f):
    return pytest.mark.filterwarnings("ignore:Arrays of 2-dimensional vectors:DeprecationWarning")(f)


@vectors_of_two
def test_options_of_products():
    for f in (
        lambda x, y: np.cross(x, y, axis=0),
        lambda x, y: np.cross(x, y, axisa=0, axisb=1),
        lambda x, y: np.cross(x, y, axisa=0, axisb=0, axisc=0),
        lambda x, y: np.cross(x[:, :2], y[:, :2]),
        lambda x, y: np.cross(x[:, :2], y),
        lambda x, y: np.cross(x, y[0, :2]),
        lambda x, y: np.cross(x[:, :1], y),
        lambda x, y: np.cross(x, [1, 2, 3]),
        lambda x, y: np.linalg.cross(x, y, axis=0),
        lambda x, y: np.linalg.cross(x[:, :2], y[:, :2]),
        lambda x, y: np.linalg.outer(x[0], y[0]),
        lambda x, y: np.linalg.outer(x, y[0]),
        lambda x, y: np.linalg.vecdot(x, y, axis=0),
        lambda x, y: np.vecdot(x, y, axis=0, keepdims=True),
        lambda x, y: np.vecdot(x, y, dtype="f4"),
        lambda x, y: np.vecdot(x[:, :1], y),
        lambda x, y: np.tensordot(x, y, ([-1], [0])),
        lambda x, y: np.tensordot(x, y, [1, 0]),
        lambda x, y: np.tensordot(x, y[:1], 1),
        lambda x, y: np.tensordot(x, y, np.array([[0, 1], [1, 0]])),
        lambda x, y: np.linalg.tensordot(x, y, axes=0),
    ):
        agree(f, a, b)
        agree(f, z, b)
    check_grads(lambda x, y: np.cross(x[:, :2], y[:, :2]) * np.cross(x, y[:, :2])[:, 2], (a, b))
    for f in (
        lambda x: np.vecdot(x, x, axes=[0, 0, ()]),
        lambda x: np.matvec(x, x, axes=[(0, 1), 0, 0]) if hasattr(np, "matvec") else np.vecdot(x, x, axes=[0, 0, ()]),
        lambda x: np.matmul(x, x, axes=[(0, 1), (0, 1), (0, 1)]),
    ):
        with pytest.raises(DifferentiationError, match="argument axes"):
            vjp(f, a)


def test_options_of_einsum():
    for f in (
        lambda x, y: np.einsum("ij,jk", x, y, dtype="f4", casting="same_kind"),
        lambda x, y: np.einsum("ij,jk", x, y, dtype="f4"),
        lambda x, y: np.einsum("ij,jk", x, y, dtype="c16", order="F"),
        lambda x, y: np.einsum("Ab,ba", x, y),
        lambda x, y: np.einsum(" b a , c b ", x, y),
        lambda x, y: np.einsum(x, [30, 1], y, [1, 2]),
        lambda x, y: np.einsum(x, [30, 1], y, [1, 2], [30, 2]),
        lambda x, y: np.einsum("i...,i->...", x, y[0]),
        lambda x, y: np.einsum("...i->i", x * y),
        lambda x, y: np.einsum("...i->i", (x * y)[0]),
        lambda x, y: np.einsum(",ij->ji", 2, x + y),
        lambda x, y: np.einsum("ij,j", x + y, [1, 2, 3]),
        lambda x, y: np.einsum("i", x, y),
        lambda x, y: np.einsum("ij,jk", x, y[:2]),
        lambda x, y: np.einsum("ij->k", x),
    ):
        agree(f, a, b)
        agree(f, z, b)
        agree(f, single, b)
    agree(lambda x: np.einsum("ij->j", x, dtype="f8"), single)
    agree(lambda x: np.einsum("iii->i", x) + np.einsum("i...i->...", x), cube)
    for optimize in (False, True, "optimal", ["einsum_path", (0, 1), (0, 1)]):
        f = lambda x, y, optimize=optimize: np.einsum("ii,ij,jk->j", x, y, y, optimize=optimize)
        agree(f, a, b)
        check_grads(f, (a, b))


def test_norms_are_those_of_numpy():
    zero = [np.zeros(s) for s in ((0, 3), (3, 0), (2, 0, 3), (0,))]
    orders = (None, 2, -2, 1, 3, 2.5, -1, -3, 0.5, 0, np.inf, -np.inf, "fro", "f", "nuc", "x")
    with np.errstate(divide="ignore"):
        for order in orders:
            for x in (v, a, z, cube, single, *zero):
                for axis in (None, 0, -1, (1,), (0, 1), (-1, 0), (0, 0), (0, 1, 2), ()):
                    if isinstance(axis, int | None) or all(i < x.ndim for i in axis):
                        agree(lambda x, o=order, axis=axis: np.linalg.norm(x, o, axis, axis == 0), x)
                        agree(lambda x, o=order, axis=axis: np.linalg.vector_norm(x, axis=axis, ord=o), x)
                        agree(
                            lambda x, o=order, axis=axis: np.linalg.vector_norm(x, axis=axis, ord=o, keepdims=True), x
                        )
                if x.ndim > 1:
                    agree(lambda x, o=order: np.linalg.matrix_norm(x, ord=o, keepdims=True), x)
    agree(lambda x: np.linalg.norm(x, None, [0]), a)


@pytest.mark.filterwarnings("error")
def test_the_derivative_of_a_norm_at_zero_is_zero():
    for order in (None, 1, 2, 3, 1.5, np.inf):
        assert grad(lambda x, o=order: np.linalg.norm(x, o))(np.zeros(2)).tolist() == [0, 0]
        assert grad(lambda x, o=order: np.linalg.norm(x, o))(np.zeros(0)).shape == (0,)
    for order in (None, "fro", "nuc", 1):
        assert grad(lambda x, o=order: np.linalg.norm(x, o))(np.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("f", [np.vdot, np.dot, np.matmul], ids=lambda f: f.__name__)
def test_gradients_of_inner_products_are_what_is_their_own(f):
    """That of sum(x * y) in x is y: y itself only where its owner cannot write to it."""
    x, y = np.random.default_rng(0).normal(size=(2, 1000))
    for scale in (1, 3):
        for loss, k in ((lambda x, y, s=scale: s * f(x, y), 0), (lambda y, x, s=scale: s * f(x, y), 1)):
            args = (x, y) if k == 0 else (x.copy(), y)
            g = grad(loss)(*args)
            np.testing.assert_array_equal(g, scale * args[1])
            before = args[1].copy()
            g += 1
            np.testing.assert_array_equal(args[1], before)
    constant = y.copy()
    view = constant[:]
    view.flags.writeable = False
    assert allocation.scaled(np.float64(1), view) is not view  # constant can be written to
    constant.flags.writeable = False
    assert allocation.scaled(np.float64(1), view) is view
    np.testing.assert_array_equal(allocation.scaled(np.float64(2), view), 2 * view)
    assert allocation.scaled(np.float32(1), view.astype("f4")[:0]).dtype == "f4"
    assert allocation.scaled(np.float64(1), view.astype("f4")).dtype == "f8"


@pytest.mark.parametrize("f", [np.vdot, np.dot], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
def test_a_vector_with_itself(f, dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=9).astype(dtype)
    x = x + 1j * rng.normal(size=9) if dtype == "c16" else x
    one = lambda x: np.real(f(x, x)) * 1.5
    two = lambda x: np.real(f(x, 1 * x)) * 1.5  # which is another array
    assert one(x) == two(x)
    g = grad(one)(x)
    assert g.dtype == x.dtype
    np.testing.assert_allclose(g, grad(two)(x), rtol=1e-6)
    if dtype == "f8":
        check_grads(one, (x,), order=2)
        matrix = x.reshape(3, 3)
        np.testing.assert_allclose(grad(lambda a: np.vdot(a, a))(matrix), 2 * matrix)
        np.testing.assert_allclose(grad(lambda a: np.sum(np.dot(a, a)))(matrix), grad(lambda a: np.sum(a @ a))(matrix))
