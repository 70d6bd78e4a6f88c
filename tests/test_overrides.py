"""Operators of a traced array beside classes that have a way of their own: as NumPy's arrays leave it to them."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.autodiff import grad, vjp
from spmd.autodiff.tracer import Array
from spmd.errors import TracedConversionError

X = np.array([0.5, 1.5, 2.5])
DATA = np.array([2.0, 3.0, 4.0])
ARITHMETIC = "add sub mul truediv floordiv mod pow matmul divmod".split()
COMPARISONS = "lt le gt ge eq ne".split()
BITS = "and_ or_ xor lshift rshift".split()
IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow imatmul".split()


def run(name):
    return divmod if name == "divmod" else getattr(operator, name)


class Labelled:
    """Data with a name, as xarray has: NumPy's functions act on the data, and the name stays."""

    def __init__(self, data, name="t"):
        self.data, self.name = data, name

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.data, dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if not all(isinstance(x, Labelled | np.ndarray | np.generic | float | int | Array) for x in inputs):
            return NotImplemented
        result = getattr(ufunc, method)(*[x.data if isinstance(x, Labelled) else x for x in inputs], **kwargs)
        if isinstance(result, tuple):
            return tuple(Labelled(r, self.name) for r in result)
        return Labelled(result, self.name)


class WithOperators(np.lib.mixins.NDArrayOperatorsMixin, Labelled):
    """One that has Python's operators too."""


class Unwilling:
    """One that takes no part in ufuncs, and has operators of its own."""

    __array_ufunc__ = None

    def _own(self, *_):
        return "own"

    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __rmatmul__ = _own
    __rdivmod__ = __rand__ = __ror__ = __rxor__ = __rlshift__ = __rrshift__ = _own
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _own  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class First(Unwilling):
    """One that comes before NumPy's arrays by its priority, as those of scipy.sparse do."""

    __array_priority__ = 10.0

    def __array__(self, dtype=None, copy=None):
        return np.asarray(DATA, dtype)


class Second(Unwilling):
    """One that comes after them: NumPy's arrays take it for an array."""

    __array_priority__ = -1.0

    def __array__(self, dtype=None, copy=None):
        return np.asarray(DATA, dtype)


def without_ufunc(cls):
    """The same class without `__array_ufunc__`, which it has from Unwilling."""
    names = {k: v for base in reversed(cls.__mro__[:-1]) for k, v in vars(base).items()}
    for name in ("__array_ufunc__", "__dict__", "__weakref__"):
        names.pop(name, None)
    return type(cls.__name__, (), names)


First, Second = without_ufunc(First), without_ufunc(Second)  # type: ignore[misc]


def outcome(f, *operands):
    """A result as data that compares, or the class of the error."""
    try:
        result = f(*operands)
    except TypeError:
        return TypeError
    return plain(result)


def plain(x):
    if isinstance(x, tuple):
        return tuple(map(plain, x))
    if isinstance(x, Labelled):
        return type(x).__name__, x.name, plain(x.data)
    x = spmd.stop_gradient(x) if isinstance(x, Array) else x
    return np.asarray(x).tolist()


def reflected(f):
    return lambda x, y: f(y, x)


def both_sides(names):
    for name in names:
        yield name, run(name), False
        if name not in IN_PLACE:
            yield name, reflected(run(name)), True


@pytest.mark.parametrize("kind", [Labelled, WithOperators])
@pytest.mark.parametrize(("name", "f", "swapped"), list(both_sides(ARITHMETIC + COMPARISONS + IN_PLACE)))
def test_operands_with_array_ufunc(kind, name, f, swapped):
    """The result is what it is beside an ndarray, its class and its name, and the gradient goes through."""
    other = kind(DATA)
    # An ndarray holds the result of an operator in place itself.
    expected = outcome(run(name[1:]) if name in IN_PLACE else f, X, other)
    assert expected is not TypeError
    results = []
    vjp(lambda x: (results.append(f(x, other)), x)[1], X)
    assert plain(results[0]) == expected
    parts = results[0] if isinstance(results[0], tuple) else (results[0],)
    assert all(type(p) is Labelled or type(p) is kind for p in parts)
    if name in ("add", "sub", "mul", "truediv", "pow", "matmul", "mod", "imul", "iadd"):
        g = grad(lambda x: np.sum(f(x, other).data))(X)
        np.testing.assert_allclose(g, grad(lambda x: np.sum(f(x, DATA)))(X))
    in_a_body(f, other, expected)


def in_a_body(f, other, expected):
    """Arrays that are not differentiated, but have a state, leave it to them as well."""

    def body(x):
        result = f(x, other)
        parts = result if isinstance(result, tuple) else (result,)
        assert all(isinstance(p, Labelled) for p in parts)
        return tuple(p.data for p in parts)

    with spmd.Mesh(w=2):
        n = len(expected) if isinstance(expected[0], tuple) else 1
        found = spmd.map(body, P(), (P(),) * n)(X)
    datas = [e[2] for e in expected] if isinstance(expected[0], tuple) else [expected[2]]
    assert [y.numpy().tolist() for y in found] == datas


@pytest.mark.parametrize("kind", [Labelled, WithOperators])
@pytest.mark.parametrize(("name", "f", "swapped"), list(both_sides(BITS)))
def test_bits(kind, name, f, swapped):
    n, other = np.array([5, 6, 7]), kind(np.array([1, 2, 3]))
    with spmd.Mesh(w=2):
        (found,) = spmd.map(lambda x: (f(x, other).data,), P(), (P(),))(n)
    assert found.numpy().tolist() == outcome(f, n, other)[2]


@pytest.mark.parametrize("kind", [Unwilling, First, Second])
@pytest.mark.parametrize(("name", "f", "swapped"), list(both_sides(ARITHMETIC + COMPARISONS)))
def test_operands_with_operators_of_their_own(kind, name, f, swapped):
    expected = outcome(f, X, kind())
    results = []
    vjp(lambda x: (results.append(outcome(f, x, kind())), x)[1], X)
    assert results == [expected]


def seen_by(f):
    """What f gives in a differentiated function."""
    results = []
    vjp(lambda x: (results.append(f(x)), x)[1], X)
    return results[0]


@pytest.mark.parametrize("f", [np.multiply, np.add, np.less, np.maximum, np.hypot])
def test_ufuncs(f):
    for call in (f, reflected(f)):
        result = seen_by(lambda x, call=call: call(x, Labelled(DATA)))
        assert plain(result) == plain(call(X, Labelled(DATA)))
    with pytest.raises(TypeError):
        vjp(lambda x: np.multiply(x, Unwilling()), X)


def test_functions_are_left_to_classes_that_have_them():
    class Own:
        def __array_function__(self, fun, types, args, kwargs):
            return "own"

    seen = []
    vjp(lambda x: (seen.append(np.concatenate([x, Own()])), seen.append(np.dot(x, Own())), x)[-1], X)
    assert seen == ["own", "own"]


def test_xarray():
    xr = pytest.importorskip("xarray")
    labelled = xr.DataArray(DATA, dims="t", coords={"t": [10, 20, 30]})
    seen = []
    g = grad(lambda x: np.sum((seen.append(x * labelled), seen.append(labelled / x), seen[0] + seen[1])[-1].data))(X)
    assert [type(s) for s in seen] == [xr.DataArray] * 2
    assert [s.dims for s in seen] == [("t",)] * 2
    np.testing.assert_allclose(g, DATA - DATA / X**2)


def test_a_class_that_converts_what_it_is_given_cuts_nothing_off():
    class Converts:
        def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
            return getattr(ufunc, method)(*[np.asarray(DATA if x is self else x) for x in inputs])

    with pytest.raises(TracedConversionError, match="stop_gradient"):
        grad(lambda x: np.sum(x * Converts()))(X)
