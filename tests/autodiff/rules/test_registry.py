"""Every rule against finite differences, to the second order, over sampled shapes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rules import (
    Table,
    above_one,
    complex_,
    distinct,
    full,
    inner,
    of,
    one,
    pair,
    positive,
    signed,
    spread,
)

from spmd.autodiff import at, grad, value_and_grad
from spmd.autodiff.check import check_grads, check_vjp, tolerance
from spmd.autodiff.registry import primitive
from spmd.autodiff.tracer import Array
from spmd.errors import DifferentiationError

TABLE = Table()
row = TABLE.row


def unary(names, *domains):
    for name, domain in itertools.product(names.split(), domains):
        row(f"{name}-{domain.__name__}", getattr(np, name), domain, one)


def binary(names, *domains):
    for name, (x, y) in itertools.product(names.split(), domains):
        row(f"{name}-{x.__name__}-{y.__name__}", getattr(np, name), (x, y), pair)


both = (signed, complex_)
unary("negative positive square reciprocal exp exp2 expm1 sin cos sinh cosh tanh arctan arcsinh absolute", *both)
unary("fabs cbrt degrees radians deg2rad rad2deg sinc nan_to_num copy", signed)
unary("real imag conj angle sign", *both)
unary("sqrt log log2 log10 log1p", positive, complex_)
unary("arcsin arccos arctanh tan", inner, complex_)
unary("arccosh", above_one, complex_)
binary("add subtract multiply divide", (signed, signed), (complex_, complex_), (signed, complex_))
binary("power float_power", (positive, signed), (complex_, complex_), (positive, complex_))
binary("arctan2 hypot logaddexp logaddexp2 copysign", (signed, signed))
binary("maximum minimum fmax fmin", (distinct, spread))
binary("remainder fmod", (positive, above_one))
row("mod-operator", lambda x, y: x % y, (positive, above_one), pair)
row("divmod", lambda x, y: np.divmod(x, y)[1], (positive, above_one), pair)
row("modf", lambda x: np.modf(x)[0], inner, one)
row("where", lambda x, y: np.where(np.arange(3) > 1, x, y), both, of("3 23", ". 3", "21 11", "03 ."))
row("select", lambda x, y: np.select([x < 0, x > 1], [x * y, y], 2.0), (distinct, signed), of("3 3", "0 0"))
row("clip", lambda x, low: np.clip(x, low, 1.0), (distinct, inner), of("4 .", "23 3", "0 0"))
row("clip-keywords", lambda x: np.clip(x, min=-0.5, max=None).clip(max=0.5), distinct, one)
row("full_like", lambda x, v: x * np.full_like(x, v), (signed, signed), of("3 ."))

# operators, numbers and dtypes
row(
    "operators",
    lambda x, y: (2 - x * 3.0) / (y + 2.5) - -x + abs(y) ** 1.5 + 2.0**x + (x % 5.0) + +y,
    (positive, signed),
    pair,
)
row("powers", lambda x: x**2 + x**3 - x**-1 + x**0 + x**0.5 + x**1, positive, one)
row("integer-operand", lambda x: np.arange(3) * x + np.power(x, np.arange(3)), signed, of("3", ".", "23"))
row("number-and-list", lambda x: [1.0, 2.0] + x + np.float64(2) * x, signed, of("2", "."))
row("astype", lambda x: x.astype("c16") * 1j + np.astype(x, "f4").astype(float) * 0, signed, one)
row("at", lambda x, v: at(at(x)[1:].set(v))[[0, 0]].add(v), (signed, signed), of("3 .", "32 2"))

# reductions
for k, o in enumerate(
    [{}, {"axis": 0}, {"axis": -1}, {"axis": (0, -1)}, {"keepdims": True}, {"axis": (-1, 0), "keepdims": True}]
):
    for f in (np.sum, np.prod):
        row(f"{f.__name__}-{k}", lambda x, f=f, o=o: f(x, **o), signed, of("23", "232", "02", "203", "11"))
        row(f"{f.__name__}-{k}-complex", lambda x, f=f, o=o: f(x, **o), complex_, of("23", "232", "02", "11"))
    for f in (np.mean, np.var, np.std):
        row(f"{f.__name__}-{k}", lambda x, f=f, o=o: f(x, **o), signed, of("23", "232", "42"))
        row(f"{f.__name__}-{k}-complex", lambda x, f=f, o=o: f(x, **o), complex_, of("23", "232", "42"))
    for f in (np.max, np.min, np.amax, np.amin):
        row(f"{f.__name__}-{k}", lambda x, f=f, o=o: f(x, **o), distinct, of("23", "232", "11"))
row("sum-scalar", np.sum, signed, of("."))
row("prod-scalar", np.prod, signed, of("."))
row("sum-where", lambda x: np.sum(x, 0, where=np.arange(3) > 0, initial=2.0), signed, of("23", "03"))
row("sum-keyword", lambda x: np.sum(axis=0, a=x) * np.add.reduce(x), signed, full)
row(
    "prod-zeros",
    lambda x: np.prod(x * np.array([0.0, 1, 0]), 0) + np.prod(x * np.array([[0.0], [1]]), 0),
    signed,
    of("23"),
)
row("var-ddof", lambda x: np.var(x, ddof=1) + x.std(0, ddof=1), signed, of("3", "32"))
row("average", lambda x, w: np.average(x, 0, weights=w) * np.average(x), (signed, positive), of("3 3", "32 3", "32 32"))
row("cumsum", lambda x: np.cumsum(x, -1) * x.cumsum(0), signed, full)
row("cumsum-flat", lambda x: np.cumsum(x), complex_, one)
row("cumprod", lambda x: np.cumprod(x, -1) * x.cumprod(0), signed, full)
row("cumprod-flat", lambda x: np.cumprod(x), complex_, one)
row("cumprod-zeros", lambda x: np.cumprod(x * np.array([1, 0, 1, 0, 1.0])), signed, of("5"))
row("sort", lambda x: np.sort(x) * np.sort(x, 0), distinct, full)
row("sort-flat", lambda x: np.sort(x, None), distinct, one)
row("diff", lambda x: np.diff(x) * np.diff(x, 1, 0, 2.0, x[:1]).sum(), signed, of("23", "42"))
row("trapezoid", lambda x: np.trapezoid(x) * np.trapezoid(x, x**3, axis=0), signed, of("33"))
row(
    "trapezoid-1d",
    lambda x: np.trapezoid(x, np.array([0, 1, 3.0])) + np.trapezoid(x, dx=2.0, axis=-1),
    signed,
    of("23"),
)
row("ptp", lambda x: np.ptp(x) * x.max(0) - np.ptp(x, 0), distinct, of("23"))
row("cumulative", lambda x: np.cumulative_sum(x, axis=0, include_initial=True) * 2, signed, of("23", "3"))
row("cumulative_prod", lambda x: np.cumulative_prod(x, axis=-1, include_initial=True), signed, of("23", "3"))
row(
    "outer-methods", lambda x, y: np.multiply.outer(x, y) + np.subtract.outer(x, y), (signed, signed), of("23 2", ". 3")
)

# shape and order
for name, f, shapes in [
    ("reshape", lambda x: np.reshape(x, (-1,)) * x.reshape(6) + x.reshape((6,), order="F"), of("23", "312")),
    ("reshape-nothing", lambda x: np.reshape(x, (3, 0)) * 2, of("02")),
    ("ravel", lambda x: np.ravel(x) * x.ravel("F") + x.flatten(), one),
    ("expand-squeeze", lambda x: np.squeeze(np.expand_dims(x, (0, -1)), 0) * 2, one),
    ("broadcast_to", lambda x: np.broadcast_to(x, (4, 2, 3)), of("23", ".", "411", "21")),
    ("broadcast_arrays", lambda x: np.multiply(*np.broadcast_arrays(x, np.ones((2, 3)))), of("3", ".", "21")),
    ("atleast", lambda x: np.atleast_1d(x)[0] * np.atleast_2d(x) * np.atleast_3d(x), of(".", "1", "13", "112")),
    ("meshgrid", lambda x: sum(np.meshgrid(x, np.arange(2.0), 3 * x)), of("3", ".")),
    ("meshgrid-ij", lambda x: sum(np.meshgrid(x, np.arange(2.0), indexing="ij", sparse=True)), of("3")),
    ("transpose", lambda x: np.transpose(x) * x.T + x.transpose() + np.transpose(x, range(-1, -x.ndim - 1, -1)), one),
    ("transpose-axes", lambda x: np.transpose(x, (1, 2, 0)) * x.transpose(1, -1, 0), of("232", "012")),
    ("swapaxes", lambda x: np.swapaxes(x, 0, -1) * x.mT.swapaxes(0, 1), of("22")),
    (
        "matrix_transpose",
        lambda x: np.matrix_transpose(x) @ x * np.linalg.matrix_transpose(x)[..., :1],
        of("23", "223"),
    ),
    ("moveaxis", lambda x: np.moveaxis(x, 0, -1) * 2 + np.moveaxis(x, (0, 2), (2, 1)), of("322", "000")),
    ("rollaxis", lambda x: np.rollaxis(x, 2) * np.rollaxis(x, -1, 0), of("234")),
    ("flip", lambda x: np.flip(x) * np.flip(x, 0) + np.flip(x, (0, -1)), of("23", "232", "01")),
    ("fliplr-flipud", lambda x: np.fliplr(x) * np.flipud(x), of("23")),
    ("rot90", lambda x: np.rot90(x) * np.rot90(x, -1) + np.rot90(x, 2, (1, 0)), of("33", "332")),
    ("roll", lambda x: np.roll(x, 1) * np.roll(x, -2, 0) + np.roll(x, (1, 2), (0, -1)), of("23", "312", "02")),
    ("concatenate", lambda x, y: np.concatenate([x, y, np.ones((1, 2)), x]) ** 2, of("22 12", "02 32")),
    ("concatenate-axis", lambda x, y: np.concat([x, y * 2], axis=-1), of("22 23", "120 122")),
    ("concatenate-flat", lambda x, y: np.concatenate((x, y), axis=None), of("22 3", "0 .")),
    ("append", lambda x, y: np.append(x, y) * 2, of("22 3")),
    ("stack", lambda x, y: np.stack([x, y, x]) * np.stack([y, y, y]), of(". .", "23 23", "0 0")),
    ("stack-axis", lambda x, y: np.stack([x, y], -1) * np.stack([x, np.ones((2, 3))], axis=2), of("23 23")),
    (
        "vhd-stack",
        lambda x, y: np.vstack([x, y]).sum() * np.hstack([x, y]).sum() * np.dstack([x, y]),
        of("2 2", "23 23"),
    ),
    ("column_stack", lambda x, y: np.column_stack([x, y]) ** 2, of("3 32")),
    ("block", lambda x, y: np.block([[x, y], [y.T, np.eye(2)]]) ** 2, of("33 32")),
    ("split", lambda x: np.multiply(*np.split(x, 2)) + np.array_split(x, 3)[0][:1], of("4", "42")),
    ("split-at", lambda x: np.split(x, [1, 2], axis=-1)[1] * np.array_split(x, 3, -1)[2], of("5", "24")),
    ("hvd-split", lambda x: np.hsplit(x, 2)[0].sum() * np.vsplit(x, 2)[1].sum() * np.dsplit(x, [1])[1], of("223")),
    ("unstack", lambda x: np.multiply(*np.unstack(x)) + np.unstack(x, axis=-1)[0][:1], of("21", "222")),
    ("repeat", lambda x: np.repeat(x, 2) * x.repeat(2), one),
    ("repeat-axis", lambda x: np.repeat(x, [2, 0, 1], axis=0) * np.repeat(x, 1, 0), of("3", "32")),
    ("tile", lambda x: np.tile(x, 2).sum() * np.tile(x, (2, 1, 2)), of("23", "2", ".", "213")),
    ("pad", lambda x: np.pad(x, 1) * np.pad(x, ((1, 1),), constant_values=2.0), of("23", "0", "123")),
    ("pad-uneven", lambda x: np.pad(x, ((1, 0), (2, 3))) * np.pad(x, {0: (1, 0), -1: (2, 3)}), of("23", "01")),
    *[
        (f"pad-{m}", lambda x, m=m: np.pad(x, ((1, 0), (2, 3)), mode=m), of("34"))
        for m in "edge reflect symmetric wrap".split()
    ],
    ("index", lambda x: x[0] * x[-1] + x[[0, 1, 0]][..., None, 1, :].sum(0) + x[x.sum((1, 2)) > 0].sum(0), of("322")),
    ("take", lambda x: np.take(x, [0, 1, 0]) * np.take(x, 5, mode="wrap") + x.take(-1), of("3", "32")),
    ("take-axis", lambda x: np.take(x, [[0, 1], [0, 0]], -1) * np.take(x, [7, -7], 1, mode="clip"), of("22")),
    ("take_along_axis", lambda x: np.take_along_axis(x, np.argsort(-x, 0)[:2], 0), of("3", "32", "212")),
    ("take_along_axis-broadcast", lambda x: np.take_along_axis(x, np.array([[0, 1], [0, 0]]), -1), of("12", "22")),
    (
        "delete-compress-extract",
        lambda x: np.delete(x, 1, 0).sum() * np.compress([0, 1], x, 0) * np.extract(x > 0, x).sum(),
        of("32"),
    ),
    ("diagonal", lambda x: np.diagonal(x) * x.diagonal(0, 1, 0) + np.linalg.diagonal(x).sum(), of("23", "322")),
    ("diagonal-offset", lambda x: np.diagonal(x, 1, 2, 0) * np.diagonal(x, -1, -1, 0)[..., :1], of("323")),
    ("diag", lambda x: np.diag(x) * 2, of("3", "32", "0")),
    ("diag-offset", lambda x: np.diag(x, 1).sum() * np.diag(x, -1) + np.diagflat(x).sum(), of("3")),
    ("tri", lambda x: np.tril(x) @ np.triu(x, 1) + np.triu(x, -1), of("33", "222")),
    ("trace", lambda x: np.trace(x) * x.trace(1) * np.linalg.trace(x.T), of("33", "32")),
]:
    for domain in both:
        domains = (distinct if name == "take_along_axis" and domain is signed else domain,) * f.__code__.co_argcount
        if domain is complex_ and name in ("index", "delete-compress-extract"):
            continue
        if f.__defaults__:
            domains = domains[:1]
        row(f"{name}-{domain.__name__}", f, domains, shapes)

# products
MATMUL = "3 3, 3 32, 23 3, 23 32, 223 34, 23 432, 423 432, 123 432, 2123 432, 3 432, 423 3, 03 32, 20 02, 3 2432".split(
    ", "
)
for name, f, shapes in [
    ("matmul", np.matmul, MATMUL),
    ("matmul-operator", lambda x, y: x @ y, MATMUL),
    ("linalg.matmul", np.linalg.matmul, MATMUL[3:6]),
    ("dot", np.dot, [*MATMUL[:5], "23 234", ". 3", "3 234", "0 0"]),
    ("inner", np.inner, ["3 3", "23 43", "23 3", ". 2"]),
    ("vdot", np.vdot, ["3 3", "23 23", ". ."]),
    ("outer", np.outer, ["3 2", "22 3", "0 3"]),
    ("linalg.outer", np.linalg.outer, ["3 2"]),
    ("vecdot", np.vecdot, ["3 3", "23 3", "213 43"]),
    ("vecdot-axis", lambda x, y: np.vecdot(x, y, axis=0) + np.linalg.vecdot(x, y, axis=-2), ["32 32"]),
    ("matvec", lambda x, y: np.matvec(x, y), ["23 3", "423 3", "23 43"]),
    ("vecmat", lambda x, y: np.vecmat(x, y), ["3 32", "43 32", "3 432"]),
    ("kron", np.kron, ["23 21", "2 3", "2 32", "0 2"]),
    ("cross", np.cross, ["3 3", "23 3", "13 23"]),
    ("cross-axis", lambda x, y: np.cross(x, y, axis=0), ["32 32"]),
    ("tensordot", np.tensordot, ["23 23", "423 232"]),
    ("tensordot-0", lambda x, y: np.tensordot(x, y, 0), ["23 2", ". 2"]),
    ("tensordot-axes", lambda x, y: np.tensordot(x, y, ([-1, 0], [1, 0])), ["243 235", "23 23", "203 23"]),
    ("tensordot-axis", lambda x, y: np.linalg.tensordot(x, y, axes=(1, -1)), ["23 43", "232 3"]),
    ("einsum", lambda x, y: np.einsum("ij,jk->ik", x, y), ["23 32", "20 03", "21 32", "11 11"]),
    ("einsum-implicit", lambda x, y: np.einsum("ji, jk", x, y), ["32 32"]),
    ("einsum-ellipsis", lambda x, y: np.einsum("...ij,...jk", x, y), ["23 32", "423 32", "123 432", "2123 432"]),
    ("einsum-ellipsis-out", lambda x, y: np.einsum("i...,...i->...", x, y), ["23 32", "2 2", "23 2"]),
    ("einsum-middle", lambda x, y: np.einsum("a...b,b->a...", x, y), ["243 3", "23 3"]),
    ("einsum-sum", lambda x, y: np.einsum("ij,kl->jk", x, y), ["23 32", "21 12"]),
    ("einsum-three", lambda x, y: np.einsum("ij,jk,lk->il", x, y, x), ["23 33"]),
    ("einsum-optimize", lambda x, y: np.einsum("ij,jk,kl->il", x, y, x, optimize=True), ["33 33"]),
    ("einsum-diagonal", lambda x, y: np.einsum("iij,jj->i", x, y), ["223 33"]),
    ("einsum-lists", lambda x, y: np.einsum(x, [0, 1], y, [1, ...], [..., 0]), ["23 342"]),
    ("einsum-lists-implicit", lambda x, y: np.einsum(x, [0, 1], y, [1, 2]), ["23 34"]),
]:
    row(name, f, (signed, signed), of(*shapes))
    row(f"{name}-complex", f, (complex_, signed if "three" in name else complex_), of(*shapes))
row(
    "einsum-trace",
    lambda x: (
        np.einsum("ii", x) * np.einsum("ii->i", x)
        + np.einsum("ijij->j", np.multiply.outer(np.ones((3, 3)), np.ones((3, 3))) * x)
    ),
    signed,
    of("33"),
)
row(
    "einsum-transpose",
    lambda x: np.einsum("ij->ji", x) * np.einsum("ba", x) + np.einsum("ij->", x),
    complex_,
    of("23", "02"),
)

# norms
inf = np.inf
for order, axis in zip(
    [None, None, None, 2, 1, 3, -1, inf, -inf, 0, "fro", 1, -1, inf, -inf],
    [None, 0, (0, 1), 0, 1, -1, 0, 0, 0, 0, None, None, None, None, (1, 0)],
    strict=True,
):
    for domain in both if order in (None, 1, 3, "fro") else (distinct,):
        f = lambda x, o=order, a=axis: np.linalg.norm(x, o, a, keepdims=True)
        row(f"norm-{order}-{axis}-{domain.__name__}", f, domain, of("23", "32"))
row(
    "vector_norm",
    lambda x: np.linalg.vector_norm(x) * np.linalg.vector_norm(x, axis=(0, 1, 2), ord=2) * np.linalg.norm(x),
    signed,
    of("232"),
)
row(
    "matrix_norm",
    lambda x: np.linalg.matrix_norm(x) + np.linalg.matrix_norm(x, ord=1, keepdims=True),
    signed,
    of("323"),
)


TestRows = TABLE.tests()


# Conventions


def test_complex_conventions_are_those_of_jax():
    z = np.array([1 + 2j, -0.5 + 0.3j])
    np.testing.assert_allclose(grad(lambda z: np.sum(np.abs(z) ** 2))(z), 2 * np.conj(z))
    np.testing.assert_allclose(grad(lambda z: np.sum(np.real(z * np.conj(z))))(z), 2 * np.conj(z))
    np.testing.assert_allclose(grad(lambda z: np.sum(z.real))(z), [1, 1])
    np.testing.assert_allclose(grad(lambda z: np.sum(z.imag))(z), [-1j, -1j])
    np.testing.assert_allclose(grad(lambda z: np.sum(z**3), holomorphic=True)(z), 3 * z**2)
    np.testing.assert_allclose(grad(lambda x: np.sum(np.abs(x * 1j)))(z.real), np.sign(z.real))


def test_ties_share_the_derivative():
    x = np.array([1.0, 3.0, 3.0])
    assert grad(np.max)(x).tolist() == [0, 0.5, 0.5]
    assert grad(lambda x: np.sum(np.min(-x, axis=0, keepdims=True)))(x).tolist() == [0, -0.5, -0.5]
    for f in (np.maximum, np.minimum, np.fmax, np.fmin):
        assert grad(lambda x, f=f: np.sum(f(x, 3.0)))(x).tolist() == [float(f in (np.minimum, np.fmin)), 0.5, 0.5]
    assert grad(lambda x: np.sum(np.clip(x, 1.0, 2.0)))(x).tolist() == [0.5, 0, 0]
    assert grad(lambda x: np.sum(abs(x)))(np.zeros(2)).tolist() == [0, 0]


def test_fmax_ignores_nan():
    x, y = np.array([np.nan, 1.0]), np.array([2.0, np.nan])
    gx, gy = grad(lambda x, y: np.sum(np.fmax(x, y)), (0, 1))(x, y)
    assert gx.tolist() == [0, 1]
    assert gy.tolist() == [1, 0]


@pytest.mark.filterwarnings("error")
def test_powers_at_zero():
    x = np.zeros(2)
    for n, expected in [(0, 0), (1, 1), (2, 0), (3, 0), (0.0, 0), (1.0, 1), (1.5, 0), (np.array([0, 1]), [0, 1])]:
        np.testing.assert_array_equal(grad(lambda x, n=n: np.sum(x**n))(x), np.broadcast_to(expected, 2))
    second = grad(lambda x: np.sum(grad(lambda x: np.sum(x**2))(x)))
    assert second(x).tolist() == [2, 2]
    third = grad(lambda x: np.sum(grad(lambda x: np.sum(grad(lambda x: np.sum(x**3))(x)))(x)))
    assert third(x).tolist() == [6, 6]
    assert grad(lambda y: np.sum(x**y))(np.array([1.0, 2.0])).tolist() == [0, 0]
    assert grad(lambda x, y: np.sum(x**y), 1)(np.array([2.0, 0.0]), np.array([1.0, 3.0])).tolist() == [2 * np.log(2), 0]


@pytest.mark.filterwarnings("error")
def test_smooth_where_the_formula_is_not():
    zero = np.zeros(2)
    for f in (np.linalg.norm, np.std, lambda x: np.sum(np.hypot(x, x)), lambda x: np.abs(np.sum(x * 1j))):
        assert grad(f)(zero).tolist() == [0, 0]
    low = np.array([-np.inf, 0.0])
    assert grad(lambda x: np.logaddexp(x, low)[0])(low).tolist() == [0, 0]
    second = grad(lambda x: grad(np.sinc)(x))
    np.testing.assert_allclose(second(0.0), -(np.pi**2) / 3)
    np.testing.assert_allclose([grad(grad(second))(x) for x in (0.0, 1e-9)], np.pi**4 / 5)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_sums_of_nothing(shape):
    x = np.zeros(shape)
    for f in (np.sum, np.prod, lambda x: np.sum(x @ x.T), lambda x: np.sum(np.sort(x)), np.linalg.norm):
        value, g = value_and_grad(f)(x)
        assert value == f(x)
        assert g.shape == shape


# Numbers, keywords, options


def test_python_numbers_stay_weak():
    x = np.ones(2, "f4")
    value, g = value_and_grad(lambda a: np.sum((a * 2 + 1) ** 2 * x))(3.0)
    assert value.dtype == "f4"
    assert g == 56
    assert grad(lambda a: abs(1j * a))(2.0) == 1
    assert type(value_and_grad(lambda a: a * 2)(3.0)[0]) is float
    for f in (np.sum, np.max, np.prod, np.var, np.ravel, np.linalg.norm, np.square, np.cumsum):
        value, g = value_and_grad(lambda a, f=f: np.sum(f(a)))(3.0)
        assert value == np.sum(f(3.0))
        assert np.shape(g) == ()


def test_arrays_by_keyword():
    x = np.arange(3.0)
    mask = x > 0
    assert grad(lambda x: np.sum(a=x, where=mask, initial=1.0))(x).tolist() == [0, 1, 1]
    assert grad(lambda x: np.sum(np.clip(np.ones(3), a_min=x, a_max=None)))(x).tolist() == [0, 0.5, 1]
    assert grad(lambda x: np.tensordot(a=x, b=x, axes=1))(x).tolist() == [0, 2, 4]
    scaled = primitive("scaled", lambda g, _ans, _x, *, by: g * by)(lambda x, *, by: x * by)
    assert grad(lambda x: np.sum(scaled(x, by=mask)))(x).tolist() == [0, 1, 1]
    with pytest.raises(DifferentiationError, match="array passed by keyword"):
        grad(lambda x: np.sum(scaled(x, by=x)))(x)


def test_options_without_a_rule_are_refused():
    x = np.arange(3.0)
    twice = primitive("twice", lambda g, _ans, _x, axis=None: 2 * g)(lambda x, axis=None, where=True: 2 * x)
    assert grad(lambda x: np.sum(twice(x, axis=0)))(x).tolist() == [2, 2, 2]
    with pytest.raises(DifferentiationError, match=r"twice: argument where(.|\n)*no others than axis(.|\n)*np\.where"):
        grad(lambda x: np.sum(twice(x, where=x > 0)))(x)
    with pytest.raises(DifferentiationError, match="order"):
        grad(lambda x: np.sum(np.reshape(x, (1, 3), order="A")))(x)
    assert grad(lambda x: np.sum(np.add(x, x, dtype="f4", order="C")))(x).tolist() == [2, 2, 2]


def test_constants_have_no_gradient():
    x = np.array([0.5, -1.5])
    seen = {}

    def f(x):
        for g in (
            np.sign,
            np.floor,
            np.rint,
            np.isnan,
            np.argmax,
            np.argsort,
            np.zeros_like,
            np.ones_like,
            np.shape,
            np.ndim,
            np.size,
            np.count_nonzero,
            lambda x: x > 0,
            lambda x: x // 1,
            lambda x: x.astype(int),
        ):
            seen[g] = g(x), g(np.array([0.5, -1.5]))
        seen["like"] = np.ones(2, like=x), np.ones(2)
        seen["full"] = np.full_like(x, 3), np.full(2, 3.0)
        return np.sum(x * np.sign(x) * x.astype(bool))

    assert grad(f)(x).tolist() == [1, -1]
    for got, expected in seen.values():
        assert not isinstance(got, Array)
        np.testing.assert_array_equal(got, expected)


def test_nothing_is_computed_in_place():
    x = np.array([1.0, np.nan, np.inf])
    assert grad(lambda x: np.sum(np.nan_to_num(x, copy=False, posinf=1.0) ** 2))(x).tolist() == [2, 0, 0]
    assert np.isnan(x[1])


def test_full_like_keeps_the_gradient_of_its_value():
    assert grad(lambda v: np.sum(np.full_like(v * np.ones(3), v)))(2.0) == 3


# What the tape keeps


def kept(f, **args) -> str:
    """Which of its arguments and its result the last node of f keeps."""
    from spmd.autodiff.tape import recording
    from spmd.autodiff.transform_arguments import lift

    with recording() as tape:
        out = f(*(lift(tape, a, "", str) for a in args.values()))
        names = {id(out.value): "ans"} | {id(a): name for name, a in args.items()}
        return " ".join(names[id(a)] for a in out.node.args if id(a) in names)


@pytest.mark.parametrize(
    ("f", "names"),
    [
        (lambda x, y: x + y, ""),
        (lambda x, y: x - 2.0, ""),
        (lambda x, y: x * y, "x y"),
        (lambda x, y: x * np.ones(2), ""),
        (lambda x, y: x / y, "ans y"),
        (lambda x, y: x @ y, "x y"),
        (lambda x, y: np.exp(x), "ans"),
        (lambda x, y: np.tanh(x), "ans"),
        (lambda x, y: np.sqrt(x), "ans"),
        (lambda x, y: np.sin(x), "x"),
        (lambda x, y: np.maximum(x, y), "x y"),
        (lambda x, y: np.sum(x, 0), ""),
        (lambda x, y: np.mean(x, 0), ""),
        (lambda x, y: np.cumsum(x, 0), ""),
        (lambda x, y: np.concatenate([x, y]), ""),
        (lambda x, y: np.stack([x, y]), ""),
        (lambda x, y: np.reshape(x, 4), ""),
        (lambda x, y: x.T, ""),
        (lambda x, y: x[0], ""),
        (lambda x, y: np.einsum("ij,jk", x, y), "x y"),
        (lambda x, y: np.einsum("ij,jk", x, np.ones((2, 2))), ""),
        (lambda x, y: np.tensordot(x, y, 1), "x y"),
        (lambda x, y: np.where(np.eye(2) > 0, x, y), ""),
    ],
)
def test_kept_memory(f, names):
    x = np.arange(1.0, 5).reshape(2, 2)
    assert kept(f, x=x, y=x + 1) == names


# The checkers themselves


def test_a_wrong_rule_is_found():
    from spmd.autodiff.registry import primitive

    @primitive("wrong", lambda g, _ans, x, _y: g * np.cos(x) * 1.001, lambda g, _ans, _x, _y: g)
    def wrong(x, y):
        return np.sin(x) + y

    with pytest.raises(
        AssertionError, match=r"check_vjp of <lambda>: argument number 0\['w'\](.|\n)*by finite difference"
    ):
        check_vjp(lambda p, y: wrong(p["w"], y), ({"w": np.ones(3)}, np.ones(3)))


def test_a_wrong_second_derivative_is_found():
    from spmd.autodiff import stop_gradient
    from spmd.autodiff.registry import primitive

    @primitive("half", lambda g, _ans, x: g * stop_gradient(np.cos(x)))
    def half(x):
        return np.sin(x)

    check_grads(half, (np.ones(3),), 1)
    with pytest.raises(AssertionError, match="the pullback of half"):
        check_grads(half, (np.ones(3),), 2)


def test_tolerances():
    assert tolerance(np.finfo("f8").eps) < 1e-8
    assert tolerance(np.finfo("f4").eps) < 6e-3
    check_grads(lambda x: np.sum(np.tanh(x)), (np.ones(3, "f4"),))


@pytest.mark.parametrize("f", [lambda x, y: x**y, np.power, np.float_power], ids=["**", "power", "float_power"])
@pytest.mark.parametrize("y", [-1.0, 0.0, 1.0, 2.0, 2.5])
def test_second_derivatives_of_powers(f, y):
    """Those by both are symmetric, at integers too: xʸ⁻¹ (1 + y log x)."""
    x = np.array([0.5, 2.0])
    by_y = lambda x, y: np.sum(f(x, y))
    mixed = [grad(lambda y: grad(by_y)(x, y)[0])(y), grad(lambda x: grad(by_y, 1)(x, y))(x)[0]]
    np.testing.assert_allclose(mixed, x[0] ** (y - 1) * (1 + y * np.log(x[0])))
    third = grad(lambda y: grad(lambda y: grad(by_y)(x, y)[1])(y))(y)
    np.testing.assert_allclose(third, 2 ** (y - 1) * np.log(2) * (2 + y * np.log(2)))
    assert np.all(np.isfinite(grad(by_y)(np.zeros(2), max(y, 0.0)))) or 0 < y < 1
