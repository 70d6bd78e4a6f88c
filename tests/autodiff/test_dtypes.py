"""Results have NumPy's dtypes, cotangents those of their primals; integers are constants; complex as in JAX."""

from __future__ import annotations

import itertools
import operator
import warnings

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import P
from spmd.autodiff import at, check_grads, float0, grad, hessian, jacfwd, jacrev, jvp, value_and_grad, vjp
from spmd.autodiff.dispatch import load_families
from spmd.autodiff.dtypes import kind_of_dtype
from spmd.autodiff.primitive import primitives
from spmd.errors import DifferentiationError, DtypeError

load_families()


def others(*names):
    """Dtypes of ml_dtypes; none where it is not installed."""
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        return [pytest.param(name, marks=pytest.mark.skip("ml_dtypes is not installed")) for name in names]
    return [pytest.param(np.dtype(getattr(ml_dtypes, name)), id=name) for name in names]


def bfloat16():
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


NUMPYS = [np.dtype(name) for name in ("f2", "f4", "f8", "c8", "c16")]
LONG = [np.dtype(np.longdouble), np.dtype(np.clongdouble)]


def alike(ours, numpys) -> bool:
    """Whether two results are of one type, dtype and shape, and equal but for the last digits of a long double."""
    if type(ours) is not type(numpys) or np.shape(ours) != np.shape(numpys):
        return False
    if not hasattr(numpys, "dtype"):
        return ours == numpys or (ours != ours and numpys != numpys)
    ours_wide, numpys_wide = (np.asarray(a).astype("G") for a in (ours, numpys))
    return ours.dtype == numpys.dtype and np.allclose(ours_wide, numpys_wide, rtol=1e-17, atol=0, equal_nan=True)


# Promotion: every binary function and operator, of every pair of dtypes and kinds of operands


def numbers(dtype, shape):
    kind = kind_of_dtype(dtype)
    values = {"f": [0.5, 0.75], "c": [0.5 + 0.25j, 0.75 - 0.5j]}.get(kind, [1, 2])
    return np.array(values if shape else values[0]).astype(dtype)


def operands(dtypes):
    """Pairs of an array and any operand, in both orders."""
    arrays = [numbers(dtype, shape) for dtype in dtypes for shape in ((2,), ())]
    scalars = [numbers(dtype, ())[()] for dtype in dtypes] + [2, 0.5, 0.5 + 0.5j, True]
    yield from itertools.product(arrays, arrays)
    for x, y in itertools.product(arrays, scalars):
        yield x, y
        yield y, x


BINARY = {f.__name__: f for f in primitives if isinstance(f, np.ufunc) and f.nin == 2 and f.signature is None}
BINARY = {name: f for name, f in BINARY.items() if getattr(np, name, None) is f}
BINARY |= {f"operator {s}": getattr(operator, s) for s in "add sub mul truediv mod pow floordiv".split()}
BINARY["operator divmod"] = lambda x, y: divmod(x, y)[1]


def outcome(f, *args):
    try:
        return f(*args)
    except (TypeError, ValueError, OverflowError) as error:
        return error


def meets(f, x, y, traced):
    """f of x and y, some of them traced, gives what NumPy gives, and cotangents of the dtypes of x and y."""
    given = (x, y)
    expected = outcome(f, x, y)
    what = f"{x!r}, {y!r}, traced {traced}"

    def run(*tracers):
        by_place = dict(zip(traced, tracers, strict=True))
        return f(*(by_place.get(k, given[k]) for k in range(2)))

    primals = [given[k] for k in traced]
    found = outcome(vjp, run, *primals)
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), what
        return
    value, pull = found
    assert alike(value, expected), f"{what}: {value!r} is not {expected!r}"
    cotangents = pull(np.ones_like(value) if hasattr(value, "dtype") else type(value)(1))
    for g, primal in zip(cotangents, primals, strict=True):
        assert np.shape(g) == np.shape(primal)
        if hasattr(primal, "dtype"):
            assert g.dtype == primal.dtype, what
        else:  # a Python number has no dtype, but stays real
            assert np.iscomplexobj(g) == isinstance(primal, complex), what


def promotes(f, dtypes):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for x, y in operands(dtypes):
            active = [kind_of_dtype(np.result_type(v)) in ("f", "c") for v in (x, y)]
            for traced in ((0,), (1,), (0, 1)):
                if all(active[k] for k in traced):
                    meets(f, x, y, traced)


@pytest.mark.parametrize("name", sorted(BINARY))
def test_promotion(name):
    if name == "operator pow" and not hasattr(np, "unstack"):
        pytest.skip("NumPy's operator and np.power were not of one mind before 2.1")
    promotes(BINARY[name], [*NUMPYS, np.dtype("i4"), np.dtype(bool)])


@pytest.mark.parametrize("name", ["operator add", "operator mul", "operator pow", "operator truediv", "maximum"])
def test_promotion_of_bfloat16(name):
    promotes(BINARY[name], [bfloat16(), np.dtype("f4"), np.dtype("f8"), np.dtype("i4"), np.dtype(bool)])


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(BINARY))
def test_promotion_of_all(name):
    more = [np.dtype(d) for d in ("i1", "u1", "i2", "u2", "u4", "i8", "u8")]
    promotes(BINARY[name], [*NUMPYS, *LONG, *more, np.dtype(bool)])
    promotes(BINARY[name], [bfloat16(), *NUMPYS, np.dtype("i1"), np.dtype("u8"), np.dtype(bool)])


def test_python_numbers_stay_weak():
    for dtype in NUMPYS:
        x = np.ones(3, dtype)
        for f in (
            lambda x: x * 2.0,
            lambda x: 2 * x + True,
            lambda x: np.where(x == 1, x, 0.5),
            lambda x: np.clip(x, 0, 1.5) if x.dtype.kind != "c" else x,
            lambda x: np.maximum(x, 0.1),
            lambda x: x**2 + 0.5**x,
            lambda x: x.at[0].set(2.5).at[1].add(1),
            lambda x: np.full_like(x, 0.1) * x,
            lambda x: snp.array([x[0], x[1]]),
            lambda x: np.linspace(0, 1, 3, dtype=x.dtype) * x,
        ):
            value, pull = vjp(f, x)
            assert value.dtype == dtype
            assert pull(value)[0].dtype == dtype
    # The number itself may be traced.
    for number in (2.0, 2j):
        value, pull = vjp(lambda s: s * np.ones(3, "c8"), number)
        assert value.dtype == "c8"
        assert np.iscomplexobj(pull(value)[0]) == isinstance(number, complex)
    assert vjp(lambda s: s * np.float32(3), 2.0)[0].dtype == "f4"
    assert jvp(lambda s: s * np.float32(3), (2.0,), (1.0,))[1].dtype == "f4"


# All dtypes through many functions: NumPy's values and dtypes; gradients near those of double precision

S = np.array([[2.0, 0.5], [0.5, 1.5]])
X = np.array([[0.5, 0.75, 0.25], [1.5, 2.0, 1.25]])

FUNCTIONS = """
np.sum(x); np.sum(x, 0); x.sum(1, keepdims=True); np.mean(x); np.mean(x, 0); np.var(x); np.var(x, 1)
np.std(x, 0, ddof=1); np.prod(x, 1); np.cumsum(x, 1); np.cumprod(x, 1); np.average(x, weights=x); np.nansum(x)
np.nanmean(x, 0); np.nanvar(x); np.max(x); np.max(x, 1); np.min(x, 0); np.median(x, 1); np.sort(x, 1)
np.partition(x, 1, 1); np.ptp(x); np.nanmedian(x); np.where(X.real > 1, x, 0); np.where(X.real > 1, x, x * 2)
np.select([X.real > 1], [x], x); np.abs(x); np.real(x); np.imag(x); np.concatenate([x, x * x])
np.concatenate([x, X]); np.stack([x, X]); np.vstack([x, x]); np.append(x, X); np.block([[x, x]]); x @ x.T
np.matmul(x, X.T); np.dot(x, x.T); np.inner(x, x); np.outer(x, x); np.vdot(x, x); np.tensordot(x, x, ([1], [1]))
np.einsum("ij,kj->ik", x, x); np.einsum("ij->j", x); np.einsum("ij,kj->ik", x, X, optimize=True); np.kron(x, x)
np.power(x, 2); np.power(x, -1); np.power(x, 0.5); x**3; x**-1; x**x; 2.0**x; 2**x; np.float_power(x, 2)
np.full_like(x, 2.0) * x; np.zeros_like(x) + x; np.ones_like(x) * x; np.sqrt(x); np.exp(x); np.log(x); np.tanh(x)
np.sin(x); np.reshape(x, -1); x.T; np.roll(x, 1); np.tile(x, 2); np.repeat(x, 2); np.pad(x, 1)
np.pad(x, 1, mode="reflect"); np.diff(x); np.take(x, [0, 2], 1); np.take_along_axis(x, np.argsort(X, 1), 1); x[0]
x[:, [0, 0]]; x[X.real > 1]; x[..., None]; x[::-1]; at(x)[0].set(1.0); at(x)[:, [0, 0]].add(x[:, :2])
at(x)[0].multiply(2.0); at(x)[[0, 0]].multiply(x); at(x)[1].set(x[0]); np.diagonal(x); np.trace(x); np.triu(x)
np.gradient(x, axis=1); np.trapezoid(x); np.cross(x[0], x[1]); np.convolve(x[0], x[1]); np.linalg.norm(x)
np.linalg.norm(x, axis=1); np.linalg.norm(x, 1); np.linalg.multi_dot([x, x.T, x]); np.linalg.inv(s(x))
np.linalg.det(s(x)); np.linalg.solve(s(x), x); np.linalg.cholesky(s(x)); np.linalg.eigh(s(x))[0]
np.linalg.svd(s(x))[1]; np.fft.fft(x); np.fft.ifft(x); np.fft.irfft(x); np.fft.rfft(x); np.add.reduce(x)
np.add.accumulate(x); np.multiply.outer(x[0], x[1]); x.astype("f4"); x.astype(float); x.astype(complex)
x.sum(dtype="f8"); x.mean(dtype="c16"); snp.asarray(x, "c8"); -x; +x; x.flatten(); x * np.float32(2)
x * np.float64(2); np.float32(2) * x; x * np.arange(3); np.arange(3) * x; x * True; x + 1j; x / 3; 1 - x
np.ones(3, "f4") * x; np.ones(3, "c8") * x; x @ [1.0, 2.0, 3.0]; softmax(x); np.log1p(np.exp(x)); np.sinc(x)
np.nan_to_num(x); np.maximum(x, 1.0); np.minimum(x, x[0]); np.clip(x, 0.6, 1.3); np.clip(x, None, x[0]); x % 0.4
np.hypot(x, x); np.logaddexp(x, x); np.arctan2(x, x); np.quantile(x, 0.3); np.percentile(x, 30, axis=1)
np.interp(x, [0.0, 9.0], [1.0, 2.0]); np.i0(x); np.modf(x)[0]; snp.array([x[0, 0], x[1, 1]])
snp.array([x[0, 0], 1.0]); snp.full(3, x[0, 0]); snp.r_[x[0], x[1]]; np.unwrap(x); np.cov(x)
np.broadcast_to(x, (2, 2, 3)); np.moveaxis(x, 0, 1); np.squeeze(x[:1]); np.split(x, 3, 1)[1]; np.delete(x, 0, 1)
np.copy(x); np.maximum.accumulate(x, 1); np.logaddexp.reduce(x); np.cumulative_sum(x, axis=1); np.vecdot(x, x)
np.astype(x, np.complex64)
""".replace("\n", ";")
FUNCTIONS = [text.strip() for text in FUNCTIONS.split(";") if text.strip()]
NEWER = ("np.cumulative_sum", "np.astype")


def softmax(x):
    y = np.exp(x - np.max(x, 1, keepdims=True))
    return y / np.sum(y, 1, keepdims=True)


def function(text, dtype):
    def s(x):
        """A regular matrix, symmetric where x is real, of the dtype of x."""
        return (x[:, :2] + x[:, :2].T) * 0.125 + S.astype(dtype)

    scope = {"np": np, "snp": snp, "at": at, "softmax": softmax, "s": s, "X": sample(dtype)}
    return eval(f"lambda x: {text}", scope)


def sample(dtype):
    return (X * (1 + 0.5j) if kind_of_dtype(dtype) == "c" else X).astype(dtype)


def weights(value):
    return np.reshape(1 + np.arange(np.size(value)) % 3, np.shape(value)).astype(value.dtype)


DIGITS = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-7, "complex64": 1e-7}


def near(found, expected, dtype):
    """Whether a gradient is that of double precision, but for some of the last digits of its dtype."""
    eps = DIGITS.get(dtype.name, 1e-15 if dtype.itemsize > 1 else 0.25)
    return np.abs(found.astype("c16") - expected).max(initial=0) <= 40 * eps * (np.abs(expected).max(initial=0) + eps)


@pytest.mark.parametrize("text", FUNCTIONS)
@pytest.mark.parametrize("dtype", [*NUMPYS[:2], NUMPYS[3], LONG[0], *others("bfloat16")], ids=str)
def test_dtypes(dtype, text):
    if text.startswith(NEWER) and not hasattr(np, text[3:].partition("(")[0]):
        pytest.skip("NumPy has it since 2.1")
    f, x = function(text, dtype), sample(dtype)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        expected, found = outcome(f, x), outcome(vjp, f, x)
        if isinstance(expected, Exception):
            assert isinstance(found, Exception)
            return
        value, pull = found
        assert np.asarray(value).dtype == np.asarray(expected).dtype
        np.testing.assert_allclose(np.asarray(value, "c16"), np.asarray(expected, "c16"), rtol=1e-6)
        (g,) = pull(weights(value))
        assert g.dtype == dtype
        wide = np.dtype("c16" if kind_of_dtype(dtype) == "c" else "f8")
        value, pull = vjp(function(text, wide), sample(wide))
        assert near(g, pull(weights(value))[0], dtype)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [LONG[1], *others("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float6_e3m2fn")])
def test_other_dtypes(dtype):
    for text in FUNCTIONS:
        x, f = sample(dtype), function(text, dtype)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, found = outcome(f, x), outcome(vjp, f, x)
            if isinstance(expected, Exception):
                continue
            assert found[0].dtype == np.asarray(expected).dtype, text
            assert found[1](np.ones(found[0].shape, found[0].dtype))[0].dtype == dtype, text


@pytest.mark.parametrize("dtype", [np.dtype("f2"), *LONG, *others("bfloat16", "float8_e4m3fn", "float8_e5m2")], ids=str)
def test_transformations_keep_the_dtype(dtype):
    x = sample(dtype)[0]

    def f(x):
        return np.sum(np.abs(x) ** 2)

    assert grad(f)(x).dtype == dtype
    assert grad(f)(x[0]).dtype == dtype
    assert hessian(f)(x).dtype == dtype if kind_of_dtype(dtype) == "f" else True
    for jac in (jacrev, jacfwd):
        assert jac(lambda x: x * x, holomorphic=kind_of_dtype(dtype) == "c")(x).dtype == dtype
    assert jvp(np.sin, (x,), (x,))[1].dtype == dtype
    assert [g.dtype for g in grad(lambda x, y: f(x * y), argnums=(0, 1))(x, x.astype("c16").real)] == [dtype, "f8"]
    if dtype.itemsize > 1:
        check_grads(lambda x: np.sum(np.tanh(x) * x), (x,))
        with pytest.raises(AssertionError):
            check_grads(lambda x: np.sum(spmd.stop_gradient(x) * x), (x,), order=1)


# bfloat16 and floats of 8 bits


def test_bfloat16_in_bodies():
    dtype = bfloat16()
    bodies = {
        "psum": lambda x: spmd.psum(np.sum(x * x), "d"),
        "pmean": lambda x: spmd.pmean(np.sum(np.tanh(x)), "d"),
        "pmax": lambda x: spmd.pmax(np.max(x * x), "d"),
        "all_gather": lambda x: spmd.psum(np.sum(spmd.all_gather(x, "d", tiled=True) * x[0]), "d"),
        "collect": lambda x: np.sum(spmd.all_gather(x, "d", tiled=True, to="invariant") ** 2),
        "psum_scatter": lambda x: spmd.psum(np.sum(spmd.psum_scatter(x, "d", tiled=True) ** 2), "d"),
        "shift": lambda x: spmd.psum(np.sum(spmd.shift(x, "d", 1) * x), "d"),
        "all_to_all": lambda x: spmd.psum(np.sum(spmd.all_to_all(x, "d", 0, 0, tiled=True) * x), "d"),
        "max": lambda x: spmd.max(x * x, "d", axis=0),
        "root": lambda x: np.sum(spmd.replicate(spmd.sum_reduce(x, "d"), "d") ** 2),
        "softmax": lambda x: spmd.psum(np.sum(spmd.log_softmax(x)), "d"),
        "at": lambda x: spmd.psum(np.sum(x.at[0].set(2.0) * x), "d"),
        "grad": lambda x: spmd.psum(np.sum(spmd.grad(lambda y: np.sum(y**3))(x)), "d"),
        "checkpoint": spmd.checkpoint(lambda x: spmd.psum(np.sum(np.tanh(x)), "d")),
    }
    x = np.array([0.5, 1.5, 2.5, 4.0])
    with spmd.Mesh(d=2):
        for name, body in bodies.items():
            run = value_and_grad(spmd.map(body, P("d"), P()))
            value, g = run(x.astype(dtype))
            expected, expected_g = run(x)
            assert value.dtype == g.dtype == dtype, name
            np.testing.assert_allclose(np.asarray(value.numpy(), float), expected.numpy(), rtol=0.02, err_msg=name)
            np.testing.assert_allclose(np.asarray(g, float), expected_g, rtol=0.03, atol=0.02, err_msg=name)


LONG_HERE = [pytest.param(dtype, marks=pytest.mark.host("a device has no long double")) for dtype in LONG]


@pytest.mark.parametrize("dtype", [*NUMPYS, *LONG_HERE, *others("bfloat16")])
def test_results_of_bodies_that_have_a_derivative(dtype):
    """Whatever is returned from a map keeps its gradient, where its dtype has one."""
    with spmd.Mesh(d=2):
        x = numbers(dtype, (2,))
        _, pull = vjp(spmd.map(lambda x: (x * x, np.argmax(np.abs(x)) * np.ones(1, int)), P("d"), P("d")), x)
        (g,) = pull((np.ones_like(x), np.zeros(2, float0)))
        np.testing.assert_array_equal(np.asarray(g), 2 * x)
        assert g.dtype == dtype


@pytest.mark.parametrize("dtype", others("bfloat16", "float8_e4m3fn"))
def test_extremes_of_dtypes_without_numpys_limits(dtype):
    """Blocks without entries never win, where the dtype has no infinity too."""
    with spmd.Mesh(d=3):
        x = numbers(dtype, (2,))
        for f, entry in ((spmd.max, 1), (spmd.min, 0)):
            value, g = value_and_grad(spmd.map(lambda x, f=f: f(x, "d", axis=0), P("d"), P()))(x)
            assert value.numpy() == x[entry]
            np.testing.assert_array_equal(np.asarray(g, float), np.arange(2) == entry)


def test_kinds():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float4_e2m1fn"):
        assert kind_of_dtype(np.dtype(getattr(ml_dtypes, name))) == "f"
    for name in ("int4", "uint4", "int2", "uint2"):
        assert kind_of_dtype(np.dtype(getattr(ml_dtypes, name))) == "i"
        assert (
            grad(lambda x: np.sum(x * 1.0), allow_int=True)(np.ones(2).astype(getattr(ml_dtypes, name))).dtype == float0
        )
    for other in ("V8", "O", "U1", "M8[s]", [("a", float)]):
        assert kind_of_dtype(np.dtype(other)) == ""
    if hasattr(ml_dtypes, "complex32"):
        with pytest.raises(DifferentiationError, match="mend"):
            grad(lambda x: np.sum(np.abs(x)))(np.ones(2).astype(ml_dtypes.complex32))


def test_casts_to_integers_are_constant():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([1.0, 2.0])
    for dtype in (np.int32, bool, ml_dtypes.int4, ml_dtypes.uint4):
        np.testing.assert_array_equal(
            grad(lambda x, t=dtype: np.sum(x.astype(t).astype(float) * x))(x), x.astype(dtype)
        )
        np.testing.assert_array_equal(grad(lambda x, t=dtype: np.sum(snp.asarray(x, t) * x))(x), x.astype(dtype))
    # A float is one, however few its bits: what it rounds has the derivative of what it stands for.
    for dtype in (ml_dtypes.float8_e4m3fn, bfloat16(), "f2"):
        np.testing.assert_array_equal(grad(lambda x, t=dtype: np.sum(x.astype(t).astype(float) * x))(x), 2 * x)


def test_values_that_an_array_cannot_hold():
    dtype = bfloat16()
    x = np.ones(3, dtype)
    for base, v in ((np.ones(3, int), x[0]), (x, 1j), (x, np.complex64(1)), (np.ones(3, bool), x[0])):
        with pytest.raises(DtypeError, match="can hold"):
            at(base)[0].set(v)
        with pytest.raises(DtypeError, match="can hold"):
            vjp(lambda v, base=base: at(base)[0].add(v), v)
    assert vjp(lambda v: at(x)[0].set(v), np.float32(2))[1](x)[0].dtype == "f4"
    assert vjp(lambda x: x.at[0].set(2), x)[0].dtype == dtype


# Integers and booleans


def test_integers_are_constants():
    for n in (3, True, np.int32(3), np.arange(3), np.array([True, False]), np.array(2, "u1")):
        with pytest.raises(TypeError, match=r"argument n\s+got: .*\s+needed: +an array of floating or complex dtype"):
            grad(lambda n: np.sum(n * 2.0))(n)
        g = grad(lambda n: np.sum(n * 2.0), allow_int=True)(n)
        assert g.dtype == float0
        assert g.shape == np.shape(n)
        (g,) = vjp(lambda n: n * 2.0, n)[1](np.ones(np.shape(n)))
        assert g.dtype == float0
    mixed = grad(lambda p: np.sum(p["x"] * p["n"]), allow_int=True)({"x": np.ones(2, "f4"), "n": np.array([2, 3])})
    np.testing.assert_array_equal(mixed["x"], [2, 3])
    assert mixed["x"].dtype == "f4"
    assert mixed["n"].dtype == float0


def test_results_of_integers_have_no_derivative():
    for f in (np.argmax, lambda x: np.sum(x > 0), lambda x: np.sum(x.astype(int)), lambda x: len(x), np.count_nonzero):
        with pytest.raises(TypeError, match="integers have no derivative"):
            grad(f)(np.ones(3))
    value, pull = vjp(lambda x: (np.argmax(x), x * 2), np.ones(3))
    assert value[0] == 0
    np.testing.assert_array_equal(pull((np.zeros((), float0), np.ones(3)))[0], [2, 2, 2])


def test_what_is_no_number():
    for x in ("a", np.array(["a"]), np.array([1.0], object), np.array(["2000"], "M8[Y]"), np.zeros(2, "V4"), object()):
        with pytest.raises(DifferentiationError, match="mend"):
            grad(lambda x: 1.0)(x)


def test_masks_as_operands():
    mask, x = np.array([True, False, True]), np.array([0.5, 1.5, 2.0])
    for dtype in NUMPYS:
        for f in (
            lambda x: x**mask,
            lambda x: x * mask,
            lambda x: mask + x,
            lambda x: x / (mask + 1),
            lambda x: x**True,
        ):
            check_grads(f, (x.astype(dtype),))


# Complex numbers, by JAX's conventions

Z = np.array([0.7 + 0.4j, -0.3 + 1.1j, 1.2 - 0.5j])
R = np.array([0.5, -1.2, 0.8])
M = (np.arange(9).reshape(3, 3) + 1j * np.arange(9)[::-1].reshape(3, 3)) / 9 + 2 * np.eye(3)


def test_gradients_of_complex_arguments():
    """For a real f of z = x + iy the gradient is df/dx - i df/dy."""
    np.testing.assert_allclose(grad(lambda z: np.sum(np.abs(z) ** 2))(Z), 2 * np.conj(Z))
    np.testing.assert_allclose(grad(lambda z: np.sum(np.real(z)))(Z), np.ones(3))
    np.testing.assert_allclose(grad(lambda z: np.sum(np.imag(z)))(Z), np.full(3, -1j))
    np.testing.assert_allclose(grad(lambda z: np.sum(np.real(np.exp(z))))(Z), np.exp(Z))
    np.testing.assert_allclose(grad(lambda z: np.sum(np.real(np.conj(z) ** 2)))(Z), np.conj(2 * np.conj(Z)))
    np.testing.assert_allclose(grad(np.sin, holomorphic=True)(Z[0]), np.cos(Z[0]))
    # Of a real argument the gradient is real, whatever it meets.
    g = grad(lambda x: np.sum(np.abs(x * Z + 1j)))(R)
    assert g.dtype == "f8"
    np.testing.assert_allclose(g, np.real(np.conj(R * Z + 1j) * Z) / np.abs(R * Z + 1j))
    assert grad(lambda x, z: np.sum(np.real(x * z)), argnums=(0, 1))(R.astype("f4"), Z)[0].dtype == "f4"


def test_flags_of_complex_functions():
    for f, z, words in (
        (grad(lambda z: z * z), 1j, "holomorphic=True"),
        (grad(np.sin, holomorphic=True), 1.0, "complex arguments"),
        (grad(np.abs, holomorphic=True), 1j, "complex result"),
        (jacrev(lambda z: z * z), Z, "holomorphic=True"),
    ):
        with pytest.raises(DifferentiationError, match=words):
            f(z)
    np.testing.assert_allclose(jacrev(np.exp, holomorphic=True)(Z), np.diag(np.exp(Z)))
    np.testing.assert_allclose(jacfwd(np.exp, holomorphic=True)(Z), np.diag(np.exp(Z)))


OF_COMPLEX = {
    "abs": lambda n, z: n.sum(n.abs(z) ** 3),
    "angle": lambda n, z: n.sum(n.angle(z)),
    "conj": lambda n, z: n.real(n.sum(z * n.conj(z) * z)),
    "parts": lambda n, z: n.sum(n.real(z) * n.imag(z) + n.real(z) * R),
    "vdot": lambda n, z: n.abs(n.vdot(z, z * z)),
    "norm": lambda n, z: n.linalg.norm(z),
    "fft": lambda n, z: n.sum(n.abs(n.fft.fft(z)) ** 3) + n.sum(n.fft.irfft(z) ** 2),
    "matmul": lambda n, z: n.real(M @ z @ z),
    "where": lambda n, z: n.sum(n.where(n.real(z) > 0, n.abs(z), n.imag(z))),
    "power": lambda n, z: n.real(n.sum(z**3 + z**0.5 + z ** (1 + 1j) + 2.0**z)),
    "log": lambda n, z: n.imag(n.sum(n.log(z) * n.sqrt(z) * n.tanh(z) / n.cosh(z))),
    "arcs": lambda n, z: n.real(n.sum(n.log1p(z) + n.arcsin(z) + n.arctan(z) + n.arcsinh(z) + n.arctanh(z))),
    "prod": lambda n, z: n.real(n.prod(z)) + n.imag(n.sum(n.cumprod(z))),
    "var": lambda n, z: n.var(z) + n.std(z) + n.imag(n.mean(z)),
    "einsum": lambda n, z: n.real(n.einsum("i,ij,j", z, M, n.conj(z))),
    "svd": lambda n, z: n.sum(n.linalg.svd(M * z, compute_uv=False)),
    "inv": lambda n, z: n.real(n.sum(n.linalg.inv(M * z))) + n.abs(n.linalg.det(M * z)) + n.linalg.slogdet(M * z)[1],
    "eigh": lambda n, z: n.sum(n.linalg.eigvalsh((M * z) + n.conj((M * z).T)) ** 2),
    "cholesky": lambda n, z: n.real(n.sum(n.linalg.cholesky((M * z) @ n.conj((M * z).T) + n.eye(3)))),
    "solve": lambda n, z: n.abs(n.linalg.solve(M, z)).sum(),
    "sinc": lambda n, z: n.real(n.sum(n.sinc(z) + n.expm1(z) + n.square(z) + n.reciprocal(z))),
    "index": lambda n, z: n.real(z[n.array([0, 0, 2])] @ z + n.sum(n.sort(z) * R) + n.max(z)),
}
OF_REAL = {
    "rotation": lambda n, x: n.real(n.sum(n.exp(1j * x) * Z)) + n.sum(n.abs(x * 1j + 2)),
    "fft": lambda n, x: n.sum(n.abs(n.fft.fft(x)) ** 2) + n.sum(n.abs(n.fft.rfft(x)) ** 3),
    "product": lambda n, x: n.abs(n.sum(Z * x)) + n.imag(Z @ (M @ x)),
    "power": lambda n, x: n.real(n.sum(n.abs(x) ** Z + (x + 0j) ** (1 + 2j))),
    "astype": lambda n, x: n.imag(n.sum(x.astype(complex) ** 2 * 1j)),
    "where": lambda n, x: n.abs(n.sum(n.where(x > 0, x, Z))),
    "concatenate": lambda n, x: n.abs(n.prod(n.concatenate([x, Z]))),
    "solve": lambda n, x: n.abs(n.sum(n.linalg.solve(M, x))),
    "einsum": lambda n, x: n.real(n.einsum("i,ij,j", x, M, Z)),
    "eigvals": lambda n, x: n.sum(n.abs(n.linalg.eigvals(n.real(M) * x)) ** 2),
}


@pytest.mark.parametrize("name", OF_COMPLEX)
def test_of_complex(name):
    check_grads(lambda z: OF_COMPLEX[name](snp, z), (Z,))


@pytest.mark.parametrize("name", OF_REAL)
def test_of_real(name):
    check_grads(lambda x: OF_REAL[name](snp, x), (R,))


@pytest.mark.full
def test_complex_numbers_as_in_jax():
    jax = pytest.importorskip("jax")
    jnp = pytest.importorskip("jax.numpy")
    with jax.enable_x64(True):
        for table, x in ((OF_COMPLEX, Z), (OF_REAL, R)):
            for name, f in table.items():
                theirs = np.asarray(jax.grad(lambda x, f=f: f(jnp, x))(x))
                ours = grad(lambda x, f=f: f(snp, x))(x)
                assert ours.dtype == theirs.dtype, name
                np.testing.assert_allclose(ours, theirs, atol=1e-10, err_msg=name)
        for f in (
            lambda n, z: n.exp(z) * z**3 + z**0.5,
            lambda n, z: n.sin(z) * n.log(z) * 2.0 + z / 3,
            lambda n, z: n.abs(z) + 0j * z,
            lambda n, z: n.conj(z) * z,
        ):
            theirs = jax.grad(lambda z, f=f: f(jnp, z), holomorphic=True)(Z[0])
            np.testing.assert_allclose(grad(lambda z, f=f: f(snp, z), holomorphic=True)(Z[0]), theirs)
