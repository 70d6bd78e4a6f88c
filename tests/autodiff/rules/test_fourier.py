"""Fourier, cosine, sine and Hankel transforms of numpy.fft and spmd.scipy.fft: rules, transposes, scipy_fft."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
import scipy.fft
from rules import Table, complex_, of, signed

import spmd
import spmd.scipy.fft as scipy_fft
from spmd import P
from spmd.autodiff import grad, vjp
from spmd.autodiff.check import check_grads
from spmd.autodiff.primitive import passives
from spmd.autodiff.rules.fourier_scipy import functions
from spmd.autodiff.tape import recording
from spmd.autodiff.tracer import Array
from spmd.autodiff.transform_arguments import lift
from spmd.errors import DifferentiationError, TracedConversionError

TABLE = Table()
row = TABLE.row

REAL = {"rfft", "ihfft"}
"""Transforms that take real arrays only."""

ONE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
SEVERAL = [name + kind for name, kind in itertools.product(ONE, "2n")]
TRIGONOMETRIC = ["dct", "idct", "dst", "idst"]


def domains(name):
    return (signed,) if name.rstrip("2n") in REAL else (signed, complex_)


def modules(name):
    return [m for m in (np.fft, scipy_fft) if hasattr(m, name)]


for name in ONE:
    for m, d in itertools.product(modules(name), domains(name)):
        here = f"{m.__name__.split('.')[0]}.{name}-{d.__name__}"
        f = getattr(m, name)
        row(here, f, d, of("3", "24", "15"))
        row(f"{here}-options", lambda x, f=f: f(f(np.real(x), 5, 0, "ortho").real, n=2, axis=-1), d, of("42", "63"))
for name in SEVERAL:
    for m, d in itertools.product(modules(name), domains(name)):
        here = f"{m.__name__.split('.')[0]}.{name}-{d.__name__}"
        f = getattr(m, name)
        row(here, lambda x, f=f: f(x, (3, 4), (0, -1), "forward"), d, of("42", "233"))
for f in (np.fft.fftshift, np.fft.ifftshift, scipy_fft.fftshift):
    row(f"{f.__module__}.{f.__name__}", lambda x, f=f: f(x) * f(x, 0) * f(x, axes=(0, -1)), complex_, of("3", "45"))
row("fftfreq", lambda d: np.fft.fftfreq(5, d) + np.fft.rfftfreq(8, d), signed, of("."))
row("spectral-derivative", lambda x: np.fft.irfft(1j * np.fft.rfftfreq(7) * np.fft.rfft(x), 7) * x, signed, of("27"))
row("power", lambda x: np.abs(np.fft.fft2(x)) ** 2, signed, of("34"))
TestRows = TABLE.tests()

# Those that CuPy does not have in all types.
HERE = Table()
for name in TRIGONOMETRIC:
    f, many = getattr(scipy_fft, name), getattr(scipy_fft, name + "n")
    HERE.row(name, lambda x, f=f: f(x, 1) * f(x, 2) * f(x, 3) * f(x, type=4), signed, of("3", "25"))
    HERE.row(f"{name}n", lambda x, m=many: m(x, 2, (3, 3)) * m(x, 3, (3, 3), (0, -1), "forward"), complex_, of("24"))
HERE.row("fht", lambda a: scipy_fft.fht(a, 0.1, 1.0) * scipy_fft.ifht(a, 0.1, 1.0, 0.2, 0.3), signed, of("4", "25"))
TestRowsHere = HERE.tests()
del TestRowsHere.test_on_a_gpu


# Exact transposition


def numbers(rng, shape, dtype):
    return rng.normal(size=shape) + (1j * rng.normal(size=shape) if np.dtype(dtype).kind == "c" else 0)


def check_transpose(f, x, rng):
    """Re Σ f(x) g = Re Σ x pull(g), to rounding; and f gives what it gives bare."""
    y, pull = vjp(f, x)
    bare = f(x)
    assert y.dtype == bare.dtype
    np.testing.assert_array_equal(y, bare)
    g = numbers(rng, y.shape, y.dtype)
    (back,) = pull(g)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    scale = np.sum(np.abs(y)) + np.sum(np.abs(back)) + np.sum(np.abs(g))
    assert abs(np.sum(y * g).real - np.sum(x * back).real) <= 1e-13 * max(scale, 1) * max(scale, 1)


def draw(rng, name):
    """A transform with options, and an array for it."""
    kind = name.rstrip("n2") if name != "fht" else name
    shape = tuple(rng.choice([1, 2, 3, 4, 5, 8], size=rng.integers(1, 4)).tolist())
    if rng.random() < 0.15 and len(shape) > 1:
        shape = (0, *shape[1:])
    options = {"norm": [None, "backward", "ortho", "forward"][rng.integers(4)]}
    free = [i for i, n in enumerate(shape) if n]
    sizes = [2, 3, 5, 6]
    if name != kind:
        axes = rng.permutation(free)[: rng.integers(1, len(free) + 1)].tolist()
        axes = axes[:2] if name[-1] == "2" else axes
        s = [int(rng.choice([n for n in sizes if n != shape[a]])) for a in axes]
        if kind not in ("irfft", "hfft") and "ct" not in kind and rng.random() < 0.4:
            s[int(rng.integers(len(s)))] = -1
        options["axes"] = tuple(a - len(shape) if rng.random() < 0.5 else a for a in axes)
        options["s"] = s if rng.random() < 0.7 or min(shape[a] for a in axes) < 2 else None
    else:
        axis = int(rng.choice(free))
        options["axis"] = axis - len(shape) if rng.random() < 0.5 else axis
        options["n"] = int(rng.choice(sizes)) if rng.random() < 0.6 or shape[axis] < 2 else None
    if kind.lstrip("i") in ("dct", "dst"):
        options["type"] = int(rng.integers(1, 5))
        options["orthogonalize"] = [None, True, False][rng.integers(3)]
    plain = kind in REAL or options.get("orthogonalize") is not None or rng.random() < 0.5
    return options, numbers(rng, shape, float if plain else complex)


TRANSFORMS = [(m, name) for name in ONE + SEVERAL for m in modules(name)]
TRANSFORMS += [(scipy_fft, name + n) for name, n in itertools.product(TRIGONOMETRIC, ["", "n"])]


def transpose_test(m, name, count):
    rng = np.random.default_rng(len(name))
    f = getattr(m, name)
    for _ in range(count):
        options, x = draw(rng, name)
        check_transpose(lambda x, o=options: f(x, **o), x, rng)


@pytest.mark.parametrize(("m", "name"), TRANSFORMS)
def test_transposes(m, name):
    transpose_test(m, name, 40)


@pytest.mark.full
@pytest.mark.parametrize(("m", "name"), TRANSFORMS)
def test_transposes_long(m, name):
    transpose_test(m, name, 2000)


@pytest.mark.parametrize(("name", "n", "bias"), [*itertools.product(["fht", "ifht"], [1, 4, 7], [0.0, 0.3])])
def test_transposes_of_hankel(name, n, bias):
    rng = np.random.default_rng(n)
    f = getattr(scipy_fft, name)
    check_transpose(lambda a: f(a, 0.1, 1.5, offset=0.2, bias=bias), rng.normal(size=(2, n)), rng)


def dense(name, size, n):
    """The matrix of a transform with n points of an array of some size, by definition.

    A complex array with a real transform gives the real part of its product with the matrix.
    """
    forward = name in ("fft", "rfft", "hfft")
    w = np.exp((-2j if forward else 2j) * np.pi * np.outer(np.arange(n), np.arange(n)) / n)
    if name in REAL:
        w = w[: n // 2 + 1]
    elif name in ("irfft", "hfft"):
        w = w[:, : n // 2 + 1].copy()
        w[:, 1 : (n + 1) // 2] *= 2
    w = w if forward else w / n
    return np.pad(w, ((0, 0), (0, max(size - w.shape[1], 0))))[:, :size]


@pytest.mark.parametrize(("name", "size", "n"), [*itertools.product(ONE, [1, 2, 5, 6], [None, 1, 4, 7])])
def test_against_a_dense_matrix(name, size, n):
    real = name in ("irfft", "hfft")
    rng = np.random.default_rng(size)
    n = n or (2 * (size - 1) or 1 if real else size)
    a = dense(name, size, n)
    x = numbers(rng, (3, size), float if name in REAL else complex)
    for m in modules(name):
        y, pull = vjp(lambda x, m=m: getattr(m, name)(x, n), x)
        expected = x @ a.T
        np.testing.assert_allclose(y, expected.real if real else expected, rtol=1e-12, atol=1e-12)
        g = numbers(rng, y.shape, y.dtype)
        back = g @ a
        np.testing.assert_allclose(pull(g)[0], back.real if name in REAL else back, rtol=1e-12, atol=1e-12)


# What it costs


def names_of(tape):
    return [node.prim.name for node in tape.nodes if node.prim is not None]


@pytest.mark.parametrize(
    ("f", "x"),
    [(getattr(m, name), np.ones((4, 6))) for m, name in TRANSFORMS] + [(lambda x: scipy_fft.fht(x, 1, 1), np.ones(4))],
)
def test_a_pullback_is_one_transform_and_keeps_nothing(f, x):
    with recording() as tape:
        y = f(lift(tape, x, "", str))
        assert not any(isinstance(a, np.ndarray) for a in y.node.args)
    y, pull = vjp(f, x)
    with recording() as tape:
        (back,) = pull(lift(tape, np.ones_like(y), "", str))
    assert type(back) is Array
    assert len([name for name in names_of(tape) if ".fft." in name]) == 1


def test_single_precision():
    for f, x in [
        (np.fft.fft, np.ones(4, "f4")),
        (np.fft.rfftn, np.ones((4, 3), "f4")),
        (scipy_fft.irfft, np.ones(4, "c8")),
        (scipy_fft.dct, np.ones(4, "f4")),
        (scipy_fft.fht, np.ones(4, "f4")),
    ]:
        options = (0.1, 1.0) if f is scipy_fft.fht else ()
        y, pull = vjp(lambda x, f=f, o=options: f(x, *o), x)
        assert y.dtype in ("f4", "c8")
        assert pull(np.ones_like(y))[0].dtype == x.dtype


# Options


def test_gradient_of_a_power_spectrum():
    """Σ |fft(x)|² is n Σ x²."""
    x = np.random.default_rng(0).normal(size=6)
    np.testing.assert_allclose(grad(lambda x: np.sum(np.abs(np.fft.fft(x)) ** 2))(x), 12 * x, rtol=1e-12)
    np.testing.assert_allclose(grad(lambda x: np.sum(scipy_fft.dct(x, norm="ortho") ** 2))(x), 2 * x, rtol=1e-12)


def test_sizes_of_minus_one_and_axes_left_out():
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    check_grads(lambda x: np.fft.rfftn(x, (-1, 5), (0, 2)), (x,), 1)
    check_grads(lambda x: np.fft.rfftn(x, (5, -1), (0, 2)), (x,), 1)
    check_grads(lambda x: scipy_fft.rfftn(x, (5, 3)), (x,), 1)
    check_grads(lambda x: scipy_fft.dctn(x, 2, 3, -1), (x,), 1)
    with pytest.warns(DeprecationWarning, match="axes"):
        check_grads(lambda x: np.fft.rfftn(x, (5, 3)), (x,), 1)
    check_grads(lambda x: np.fft.fftn(x, axes=()) * scipy_fft.dctn(x, axes=()), (x,), 1)


def test_repeated_axes_are_refused():
    x = np.ones((2, 3))
    y, pull = vjp(lambda x: np.fft.fftn(x, axes=(0, -2)), x)
    np.testing.assert_array_equal(y, np.fft.fftn(x, axes=(0, -2)))
    with pytest.raises(DifferentiationError, match=r"axes(.|\n)*\[0, 0\](.|\n)*np.fft.fft\(x, n, axis\)"):
        pull(y)
    with pytest.raises(ValueError, match="unique"):
        grad(lambda x: scipy_fft.fftn(x, axes=(0, 0)).real.sum())(x)


def test_errors_are_those_of_the_engine():
    x = np.ones(4)
    for m in (np.fft, scipy_fft):
        with pytest.raises(ValueError, match="norm"):
            grad(lambda x, m=m: m.fft(x, norm="other").real.sum())(x)
        with pytest.raises(ValueError, match="data points"):
            grad(lambda x, m=m: m.fft(x, 0).real.sum())(x)
        with pytest.raises(TypeError):
            grad(lambda x, m=m: np.sum(m.ihfft(1j * x).real))(x)
    with pytest.raises(NotImplementedError):
        grad(lambda x: scipy_fft.fft(x, plan=1).real.sum())(x)
    with pytest.raises(DifferentiationError, match="number 3"):
        grad(lambda mu: scipy_fft.fht(x, 0.1, mu).sum())(1.0)


def test_orthogonalize_with_complex_arrays():
    """scipy does not look at it there; if it does one day, the refusal can go."""
    z = np.arange(4) * (1 + 2j)
    np.testing.assert_array_equal(scipy.fft.dct(z, orthogonalize=True), scipy.fft.dct(z))
    with pytest.raises(DifferentiationError, match=r"dct, in a backward sweep(.|\n)*x.real"):
        grad(lambda z: np.sum(np.abs(scipy_fft.dct(z, orthogonalize=True))))(z)
    check_grads(lambda z: scipy_fft.dct(z, norm="ortho", orthogonalize=True), (z,), 1)


def test_overwrite_and_workers():
    x = np.random.default_rng(0).normal(size=(4, 3))
    for name in ("dct", "dstn", "fft", "fftn"):
        f = getattr(scipy_fft, name)
        for z in (x, x + 1j):
            before = z.copy()
            g, h = (
                grad(lambda z, f=f, o=o: np.sum(np.abs(f(z, workers=2, overwrite_x=o)) ** 2 + np.abs(z)))(z)
                for o in (False, True)
            )
            np.testing.assert_array_equal(g, h)
            np.testing.assert_array_equal(z, before)


def test_frequencies_take_no_arrays():
    assert {np.fft.fftfreq, np.fft.rfftfreq} <= passives


# The overrides of scipy.fft


def test_every_public_name_has_an_override():
    missing = set(scipy.fft.__all__) - set(scipy_fft.__all__)
    assert not missing
    assert all(hasattr(scipy_fft, name) for name in scipy_fft.__all__)
    others = "freq shift len backend workers offset".split()
    assert set(functions) == {name for name in scipy.fft.__all__ if not name.endswith(tuple(others))}
    for name, fun in functions.items():
        assert getattr(scipy_fft, name) is fun
        have, need = (
            {p.name: p.default for p in inspect.signature(f).parameters.values()}
            for f in (fun, getattr(scipy.fft, name))
        )
        assert have == need
        assert list(have) == list(need)


def arguments(name):
    return (0.1, 1.0) if name in ("fht", "ifht") else ()


@pytest.mark.parametrize("name", sorted(functions))
def test_bare_arrays_give_what_scipy_gives(name):
    rng = np.random.default_rng(0)
    f, g = getattr(scipy_fft, name), getattr(scipy.fft, name)
    x = rng.normal(size=(4, 6))
    inputs = [x, x.astype("f4"), x.astype("f2"), x.tolist(), (10 * x).astype(int)]
    if name.rstrip("2n") not in REAL and "fht" not in name:
        inputs += [x + 1j, (x + 1j).astype("c8")]
    for a in inputs:
        a = np.asarray(a) if "fht" in name else a
        got, expected = f(a, *arguments(name)), g(a, *arguments(name))
        assert type(got) is np.ndarray
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", sorted(functions))
def test_scipy_itself_refuses_traced_arrays(name):
    with pytest.raises(TracedConversionError, match=rf"from its gradient\n +mend: +spmd\.scipy\.fft\.{name}\(\.\.\.\)"):
        grad(lambda x: np.sum(np.real(getattr(scipy.fft, name)(x, *arguments(name)))))(np.ones((4, 4)))


def test_a_backend_of_scipy():
    x = np.random.default_rng(0).normal(size=6)

    def power(x):
        return np.sum(np.abs(scipy.fft.fft(x)) ** 2) + np.sum(scipy.fft.dct(x, 2) * x)

    with scipy.fft.set_backend(scipy_fft):
        check_grads(power, (x,))
        np.testing.assert_array_equal(scipy.fft.fft(x), scipy_fft.fft(x))
        assert scipy.fft.next_fast_len(7) == 7
    with pytest.raises(TracedConversionError):
        grad(power)(x)


def test_in_bodies():
    x = np.random.default_rng(0).normal(size=(4, 6))

    def body(x):
        y = np.fft.irfft(np.fft.rfft(x) * 2, 6) + scipy_fft.dct(x, overwrite_x=True) + np.fft.fftfreq(6)
        assert type(y) is Array
        return scipy_fft.idct(y)

    def alone(x):
        return scipy_fft.idct(np.fft.irfft(np.fft.rfft(x) * 2, 6) + scipy_fft.dct(x) + np.fft.fftfreq(6))

    with spmd.Mesh(x=2):
        mapped = spmd.map(body, in_specs=P("x"), out_specs=P("x"))
        np.testing.assert_allclose(mapped(x).numpy(), alone(x), rtol=1e-12, atol=1e-12)
        g = grad(lambda x: spmd.map(lambda x: spmd.psum(np.sum(body(x) ** 2), "x"), P("x"), P())(x))(x)
        np.testing.assert_allclose(np.asarray(g), grad(lambda x: np.sum(alone(x) ** 2))(x), rtol=1e-10, atol=1e-10)


def test_the_package_imports_nothing_heavy():
    import subprocess
    import sys

    code = (
        "import sys; old = set(sys.modules); import spmd.scipy; assert 'scipy' not in set(sys.modules) - old;"
        "assert 'fft' in dir(spmd.scipy); spmd.scipy.fft.dct; import spmd.scipy as s\n"
        "try: s.nothing\nexcept AttributeError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "module 'spmd.scipy' has no attribute 'nothing'\n"
