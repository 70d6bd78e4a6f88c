"""An Array has the methods, attributes and operators of NumPy's arrays, or refuses them by name."""

from __future__ import annotations

import copy
import math
import operator
import pickle
import warnings

import numpy as np
import pytest
from rules import complex_

import spmd
from spmd import P
from spmd.autodiff import check_grads, grad, stop_gradient, vjp
from spmd.autodiff.tracer import Array, bare, find, missing
from spmd.errors import DifferentiationError, DtypeError, MissingMethodError, StateError, TracedConversionError

RNG = np.random.default_rng(3)
X = np.array([[0.71, -1.23, 0.43], [1.52, -0.54, 0.94]])
Z = complex_(RNG, (2, 3))
MASK = np.array([[True, False, True], [False, True, True]])
C = np.array([2, 0, 1])
ROW = [1.0, 2.0, 3.0]


def integers(x):
    """Whole numbers that come from x, with its state."""
    return x.argsort()


# What has a derivative: calls in all their forms. Those that change with the state are in test_states.

WORKS = {
    "T": [lambda x: x.T],
    "mT": [lambda x: x.mT],
    "real": [lambda x: x.real * 2, lambda x: (x * 1j).real],
    "imag": [lambda x: x.imag, lambda x: (x * 1j).imag],
    "flat": [lambda x: x.flat[1] * x.flat[4:], lambda x: sum(v * v for v in x.flat) + len(x.flat)],
    "astype": [
        lambda x: x.astype(float),
        lambda x: x.astype("c16", "K", "unsafe", True, False) * 1j,
        lambda x: x.astype(dtype=float, order="C", casting="safe", subok=False, copy=True),
    ],
    "choose": [lambda x: Array(C).choose([x[0], x[1], 1.0]), lambda x: Array(C).choose([x[0], x[1]], mode="clip")],
    "clip": [
        lambda x: x.clip(-0.5, 0.5),
        lambda x: x.clip(0.05),
        lambda x: x.clip(max=x[0, 0] + 0.2),
        lambda x: x.clip(min=-0.3, max=0.3),
    ],
    "compress": [lambda x: x.compress([True, False, True], 1), lambda x: x.compress([1, 0, 1, 1])],
    "conj": [lambda x: x.conj(), lambda x: (x * (1 + 1j)).conj()],
    "conjugate": [lambda x: x.conjugate(), lambda x: (x * (1 + 1j)).conjugate()],
    "copy": [lambda x: x.copy(), lambda x: x.copy("F")],
    "cumprod": [lambda x: x.cumprod(), lambda x: x.cumprod(1, "f8")],
    "cumsum": [lambda x: x.cumsum(), lambda x: x.cumsum(axis=0, dtype=float)],
    "diagonal": [lambda x: x.diagonal(), lambda x: x.diagonal(1, 0, 1)],
    "dot": [lambda x: x.dot(x.T), lambda x: x.dot(np.arange(3.0)), lambda x: x.dot(2.0)],
    "flatten": [lambda x: x.flatten(), lambda x: x.flatten("F") * np.arange(6)],
    "max": [lambda x: x.max(), lambda x: x.max(1, None, True), lambda x: x.max(0, initial=0.5, where=MASK)],
    "mean": [lambda x: x.mean(), lambda x: x.mean(1, "f8", None, True), lambda x: x.mean(where=MASK)],
    "min": [lambda x: x.min(), lambda x: x.min((0, 1), keepdims=True), lambda x: x.min(0, initial=0.5, where=MASK)],
    "prod": [lambda x: x.prod(), lambda x: x.prod(-1, float, None, True), lambda x: x.prod(initial=2.0, where=MASK)],
    "ravel": [lambda x: x.ravel(), lambda x: x.ravel("F") * np.arange(6)],
    "repeat": [lambda x: x.repeat(2), lambda x: x.repeat([1, 0, 2], axis=1)],
    "reshape": [
        lambda x: x.reshape(3, 2),
        lambda x: x.reshape((3, 2)),
        lambda x: x.reshape(-1),
        lambda x: x.reshape([2, 3, 1], order="F"),
    ],
    "squeeze": [lambda x: x[:1].squeeze(), lambda x: x[:1].squeeze(0), lambda x: x[:, None].squeeze(axis=1)],
    "std": [lambda x: x.std(), lambda x: x.std(1, None, None, 1, keepdims=True), lambda x: x.std(where=MASK)],
    "sum": [
        lambda x: x.sum(),
        lambda x: x.sum(0, "f8", None, True, 3.0, MASK),
        lambda x: x.sum(axis=(0, -1), keepdims=True),
    ],
    "swapaxes": [lambda x: x.swapaxes(0, 1)],
    "take": [lambda x: x.take([0, 5]), lambda x: x.take([1, 4], 1, mode="wrap"), lambda x: x.take(C, axis=-1)],
    "to_device": [lambda x: x.to_device(x.device)],
    "trace": [lambda x: x.trace(), lambda x: x.trace(1, 0, 1, "f8")],
    "transpose": [
        lambda x: x.transpose(),
        lambda x: x.transpose(None),
        lambda x: x.transpose(1, 0),
        lambda x: x.transpose((1, 0)),
        lambda x: x[0].transpose(0),
    ],
    "var": [lambda x: x.var(), lambda x: x.var(1, float, None, 1), lambda x: x.var(0, keepdims=True, where=MASK)],
    "view": [lambda x: x.view(), lambda x: x.view(float)],
    "__abs__": [abs],
    "__add__": [lambda x: x + 2, lambda x: x + x[0], lambda x: x + ROW],
    "__copy__": [copy.copy],
    "__deepcopy__": [copy.deepcopy, lambda x: copy.deepcopy({"x": [x]})["x"][0]],
    "__divmod__": [lambda x: divmod(x, 0.3)[1], lambda x: divmod(x, x[0, 0])[1]],
    "__getitem__": [lambda x: x[0], lambda x: x[:, [1, 1]], lambda x: x[MASK], lambda x: x[..., None]],
    "__iter__": [lambda x: [row * row for row in x][1], lambda x: sum(x), lambda x: max(x[0]), lambda x: next(iter(x))],
    "__matmul__": [lambda x: x @ x.T, lambda x: x @ ROW],
    "__mod__": [lambda x: x % 0.3],
    "__mul__": [lambda x: x * 2, lambda x: x * x],
    "__neg__": [lambda x: -x],
    "__pos__": [lambda x: +x],
    "__pow__": [lambda x: x**3, lambda x: (x * x) ** x],
    "__radd__": [lambda x: 2 + x, lambda x: ROW + x, lambda x: np.float64(2) + x],
    "__rdivmod__": [lambda x: divmod(3.0, x)[1], lambda x: divmod(np.ones(3), x)[1]],
    "__rmatmul__": [lambda x: np.arange(2.0) @ x, lambda x: [1.0, 2.0] @ x],
    "__rmod__": [lambda x: 3.0 % x],
    "__rmul__": [lambda x: 2 * x, lambda x: np.arange(3.0) * x],
    "__rpow__": [lambda x: 2.0**x, lambda x: np.full(3, 2.0) ** x],
    "__rsub__": [lambda x: 1 - x],
    "__rtruediv__": [lambda x: 1 / x],
    "__sub__": [lambda x: x - 1],
    "__truediv__": [lambda x: x / 2, lambda x: x / x[0]],
}

IN_PLACE = {
    "__iadd__": operator.iadd,
    "__isub__": operator.isub,
    "__imul__": operator.imul,
    "__itruediv__": operator.itruediv,
    "__imod__": operator.imod,
    "__ipow__": lambda x, y: operator.ipow(x, 2) * y,
    "__imatmul__": lambda x, y: operator.imatmul(x, np.ones((3, 3))) * y,
}

# What has no derivative, and is as NumPy's.

CONSTANT = {
    "all": [lambda x: x.all(), lambda x: x.all(1, keepdims=True), lambda x: x.all(axis=0, where=MASK)],
    "any": [lambda x: x.any(), lambda x: x.any(1, keepdims=True)],
    "argmax": [lambda x: x.argmax(), lambda x: x.argmax(1), lambda x: x.argmax(0, keepdims=True)],
    "argmin": [lambda x: x.argmin(), lambda x: x.argmin(axis=-1)],
    "argpartition": [lambda x: x.argpartition(1), lambda x: x.argpartition(1, 0, "introselect")],
    "argsort": [lambda x: x.argsort(), lambda x: x.argsort(0, "stable"), lambda x: x.argsort(axis=None, stable=True)],
    "device": [lambda x: x.device],
    "dtype": [lambda x: x.dtype],
    "itemsize": [lambda x: x.itemsize],
    "nbytes": [lambda x: x.nbytes],
    "ndim": [lambda x: x.ndim],
    "nonzero": [lambda x: x.nonzero()],
    "round": [lambda x: x.round(), lambda x: x.round(1), lambda x: x.round(decimals=-1)],
    "searchsorted": [lambda x: x.ravel().searchsorted(0.1, "right"), lambda x: x[0].searchsorted([0], sorter=C)],
    "shape": [lambda x: x.shape],
    "size": [lambda x: x.size],
    "__and__": [lambda x: (x > 0) & MASK, lambda x: integers(x) & 1],
    "__contains__": [lambda x: X[0, 0] in x, lambda x: 17.0 in x, lambda x: X[0] in x],
    "__eq__": [lambda x: x == X[0], lambda x: x == X],
    "__floordiv__": [lambda x: x // 0.3],
    "__ge__": [lambda x: x >= 0],
    "__gt__": [lambda x: x > 0],
    "__invert__": [lambda x: ~(x > 0), lambda x: ~integers(x)],
    "__le__": [lambda x: x <= 0],
    "__len__": [lambda x: len(x)],
    "__lshift__": [lambda x: integers(x) << 2],
    "__lt__": [lambda x: x < 0],
    "__ne__": [lambda x: x != X],
    "__or__": [lambda x: (x > 0) | MASK],
    "__rand__": [lambda x: MASK & (x > 0)],
    "__rfloordiv__": [lambda x: 1.0 // x],
    "__rlshift__": [lambda x: 2 << integers(x)],
    "__ror__": [lambda x: MASK | (x > 0)],
    "__rrshift__": [lambda x: 64 >> integers(x)],
    "__rshift__": [lambda x: integers(x) >> 1],
    "__rxor__": [lambda x: MASK ^ (x > 0)],
    "__str__": [lambda x: isinstance(str(x), str)],
    "__repr__": [lambda x: isinstance(repr(x), str)],
    "__xor__": [lambda x: (x > 0) ^ MASK],
    "__format__": [lambda x: f"{x[0, 0]:.3f} {x[0, 1]:>8.2e}"],
}

CONSTANT_IN_PLACE = "__iand__ __ifloordiv__ __ilshift__ __ior__ __irshift__ __ixor__".split()

# What is refused: how it is asked for, the error, and words of the mend.

REFUSED = {
    **{name: (lambda x, name=name: getattr(x, name), MissingMethodError, "mend: ") for name in missing},
    "item": (lambda x: x.item(0), TracedConversionError, "stop_gradient"),
    "tolist": (lambda x: x.tolist(), TracedConversionError, "stop_gradient"),
    "__array__": (np.asarray, TracedConversionError, "np.stack"),
    "__bool__": (bool, TracedConversionError, "np.where"),
    "__complex__": (lambda x: complex(x[0, 0]), TracedConversionError, "stop_gradient"),
    "__delitem__": (lambda x: operator.delitem(x, 0), StateError, "np.delete"),
    "__dlpack__": (np.from_dlpack, TracedConversionError, "stop_gradient"),
    "__dlpack_device__": (lambda x: x.__dlpack_device__(), TracedConversionError, "stop_gradient"),
    "__float__": (lambda x: float(x[0, 0]), TracedConversionError, "stop_gradient"),
    "__hash__": (hash, TypeError, "not hashable"),
    "__index__": (lambda x: range(x[0, 0]), TracedConversionError, "stop_gradient"),
    "__int__": (lambda x: int(x[0, 0]), TracedConversionError, "stop_gradient"),
    "__reduce__": (pickle.dumps, StateError, "stop_gradient"),
    "__reduce_ex__": (lambda x: x.__reduce_ex__(2), StateError, "stop_gradient"),
    "__setitem__": (lambda x: operator.setitem(x, 0, 1.0), StateError, r"x\.at"),
}

# What libraries look for: without these they turn to `__array__`, which refuses.
ABSENT = "__array_finalize__ __array_interface__ __array_struct__ __array_wrap__ __setstate__".split()
PROTOCOL = "__array_function__ __array_namespace__ __array_priority__ __array_ufunc__ __class_getitem__".split()
OWN = "__eq__ __ge__ __gt__ __le__ __lt__ __ne__ __hash__ __str__ __repr__ __format__ __reduce__ __reduce_ex__".split()
OF_OBJECT = set(dir(object)) - set(OWN)

KINDS = [WORKS, IN_PLACE, CONSTANT, CONSTANT_IN_PLACE, REFUSED, ABSENT, PROTOCOL, OF_OBJECT]


def calls(table):
    return [pytest.param(f, id=f"{name}-{k}") for name, forms in table.items() for k, f in enumerate(forms)]


def test_each_name_of_numpys_arrays_is_of_one_kind():
    names = set(dir(np.ndarray)) - {"itemset", "newbyteorder", "ptp"}  # expired; NumPy 2.0 still shows them
    counts = {name: sum(name in kind for kind in KINDS) for name in names}
    assert {name: n for name, n in counts.items() if n != 1} == {}


@pytest.mark.parametrize("f", calls(WORKS))
def test_what_has_a_derivative(f):
    value, _ = vjp(f, X)
    expected = np.asarray(f(X))
    np.testing.assert_array_equal(value, expected)
    assert np.asarray(value).dtype == expected.dtype
    check_grads(f, (X,))


@pytest.mark.parametrize("f", calls({k: v for k, v in WORKS.items() if k in ("T", "real", "imag", "conj", "dot")}))
def test_complex(f):
    check_grads(f, (Z,))


@pytest.mark.parametrize("name", IN_PLACE)
def test_operators_in_place_rebind(name):
    change = IN_PLACE[name]

    def f(x):
        before, y = x * 1.0, x * 1.0
        z = change(y, 3.0)
        assert type(x) is not Array or (z is not y and np.array_equal(bare(y), bare(x)))
        return z * before

    check_grads(f, (X,))
    np.testing.assert_array_equal(vjp(f, X)[0], change(X.copy(), 3.0) * X)


def test_in_place_on_a_bare_array():
    ones = np.ones((2, 3))
    for change in (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow):
        with pytest.raises(StateError, match=r"y = y \+ x"):
            grad(lambda x, change=change: np.sum(change(ones, x)))(X)
    assert (ones == 1).all()


@pytest.mark.parametrize("name", CONSTANT_IN_PLACE)
def test_operators_in_place_without_derivative(name):
    change = getattr(operator, name)
    seen = []

    def operands(x):
        return (2 * x, 0.5) if "div" in name else (integers(x), 1)

    def f(x):
        a = 2 * x if "div" in name else integers(x)
        seen.append(change(a, 1 if "div" not in name else 0.5))
        return np.sum(x)

    np.testing.assert_array_equal(grad(f)(X), np.ones((2, 3)))
    np.testing.assert_array_equal(
        seen[0], change(2 * X if "div" in name else integers(X), 1 if "div" not in name else 0.5)
    )


@pytest.mark.parametrize("f", calls(CONSTANT))
def test_what_is_constant(f):
    seen = []

    def run(x):
        seen.append(f(x))
        return x[0, 0]

    assert grad(run)(X).sum() == 1
    assert find(seen, []) == []
    np.testing.assert_equal(seen[0], f(X))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    ask, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        grad(lambda x: ask(x))(X)


@pytest.mark.parametrize("name", missing)
def test_mends_do_what_they_say(name):
    """A mend that is a call of NumPy's is one that there is."""
    with pytest.raises(MissingMethodError) as raised:
        getattr(Array(X), name)
    text = str(raised.value)
    assert f"x.{name}" in text
    if f"x.{name}" in text.split("mend:")[1]:
        assert hasattr(X, name)


def test_mends_of_what_is_refused():
    for mend, expected in (
        (lambda x: x.at[...].set(3.0), np.full_like(X, 3.0)),
        (lambda x: np.sort(x), np.sort(X)),
        (lambda x: np.reshape(np.ravel(x).at[[1, 4]].set(2.0), x.shape), _put(X, [1, 4], 2.0)),
        (lambda x: np.partition(x, 1), np.partition(X, 1)),
        (lambda x: np.resize(x, (4, 2)), np.resize(X, (4, 2))),
    ):
        np.testing.assert_array_equal(vjp(mend, X)[0], expected)


def _put(x, i, v):
    x = x.copy()
    x.put(i, v)
    return x


def test_absent_so_that_libraries_turn_to_what_refuses():
    x = Array(X)
    assert [name for name in ABSENT if hasattr(x, name)] == []
    for name in ("__cuda_array_interface__", "__jax_array__", "__buffer__", "shape_", "todense"):
        assert not hasattr(x, name)


def test_assignments_to_attributes():
    for name, value in {"shape": (3, 2), "dtype": int, "real": 1, "imag": 1, "flat": 0}.items():
        with pytest.raises(StateError, match=rf"x\.{name} = v"):
            grad(lambda x, name=name, value=value: setattr(x, name, value))(X)
    with pytest.raises(AttributeError):
        Array(X).T = X


def test_without_dimensions():
    def f(x):
        s = np.sum(x)
        for ask, words in ((len, "an array with dimensions"), (iter, "iteration")):
            with pytest.raises(TypeError, match=words):
                ask(s)
        with pytest.raises(TypeError):
            list(s)
        return s

    grad(f)(X)


def test_format():
    def f(x):
        assert f"{x[0, 0]:.2f}" == f"{X[0, 0]:.2f}"
        assert f"{x}" == str(x) == repr(x)
        assert "traced array float64[2, 3]" in str(x)
        with pytest.raises(TypeError, match="format string"):
            f"{x:.2f}"
        return np.sum(x)

    grad(f)(X)
    assert grad(grad(lambda s: s * s if f"{s:.1f}" == "2.0" else s))(2.0) == 2
    assert f"{Array(np.array(2.0)):g}" == "2"


def test_numbers_of_undifferentiated_arrays():
    x = Array(np.array([2.0]))
    assert bool(x) is True
    assert bool(Array(np.array([[0]]))) is False
    with pytest.raises(ValueError, match="ambiguous"):
        bool(Array(X))
    s = Array(np.array(2.5))
    assert (float(s), int(s), complex(s), s.item(), s.tolist()) == (2.5, 2, 2.5 + 0j, 2.5, 2.5)
    assert (math.floor(s), math.ceil(s), math.trunc(s)) == (2, 3, 2)
    assert operator.index(Array(np.array(3))) == 3
    assert [0, 1, 2][Array(np.array(1))] == 1
    assert Array(X).item(1, 2) == X[1, 2]
    assert Array(X).item(4) == X.item(4)
    assert Array(2.5).item() == Array(2.5).tolist() == 2.5
    with pytest.raises(TypeError):
        operator.index(s)


def test_whole_numbers_of_traced_arrays():
    for f in (math.floor, math.ceil, math.trunc):
        with pytest.raises(TracedConversionError, match=f"math.{f.__name__}"):
            grad(lambda s, f=f: s * f(s))(2.5)
    assert grad(lambda s: s * round(s))(2.6) == 3
    assert grad(lambda s: s * round(s, 1))(2.56) == 2.6


def test_out_is_refused_by_keyword_and_by_position():
    out = np.zeros(3)
    for f in (
        lambda x: x.sum(0, None, out),
        lambda x: x.sum(0, out=out),
        lambda x: x.max(0, out),
        lambda x: x.clip(0, 1, np.zeros((2, 3))),
        lambda x: x.round(1, np.zeros((2, 3))),
        lambda x: x.compress([True], 0, np.zeros((1, 3))),
        lambda x: np.sum(x, 0, None, out),
        lambda x: np.concatenate([x, x], 0, np.zeros((4, 3))),
        lambda x: np.add(x, x, np.zeros((2, 3))),
    ):
        with pytest.raises(StateError, match="argument out"):
            grad(lambda x, f=f: np.sum(f(x)))(X)
    assert (out == 0).all()
    np.testing.assert_array_equal(vjp(lambda x: np.sum(x, 0, None, None, True), X)[0], X.sum(0, keepdims=True))


def test_wrong_calls_are_refused_as_by_numpy():
    for f in (
        lambda x: x.transpose(0),
        lambda x: x.transpose(0, 0),
        lambda x: x.transpose(()),
        lambda x: x.reshape(4, 2),
        lambda x: x.squeeze(0),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - NumPy's own words
            f(X)
        with pytest.raises(ValueError):  # noqa: PT011
            vjp(f, X)
    for f in (lambda x: x.sum(axs=0), lambda x: x.astype(int, casting="safe"), lambda x: pow(x, 2, 3)):
        with pytest.raises(TypeError):
            f(X)
        with pytest.raises(TypeError):
            vjp(f, X)


def test_dtypes_that_hold_no_numbers():
    for dtype in (object, str, "V8", "M8[s]", "S3"):
        with pytest.raises(DtypeError, match="no gradient"):
            vjp(lambda x, dtype=dtype: x.astype(dtype), X)
    assert grad(lambda x: np.sum(x * x.astype(int)))(np.array([2.7])) == 2
    with pytest.warns(np.exceptions.ComplexWarning):
        np.testing.assert_array_equal(vjp(lambda z: z.astype(float), Z)[0], Z.real)


def test_views_of_bytes():
    for dtype in ("f4", int, np.matrix, complex):
        with pytest.raises(StateError, match=r"x\.astype"):
            vjp(lambda x, dtype=dtype: x.view(dtype), X)
    with pytest.raises(StateError, match=r"x\.astype"):
        vjp(lambda x: x.view(type=np.matrix), X)


def test_devices():
    assert Array(X).device == "cpu"
    with pytest.raises(ValueError, match="before it is differentiated"):
        vjp(lambda x: x.to_device("gpu"), X)


def test_copies_are_the_array_itself():
    def f(x):
        assert copy.copy(x) is x
        assert copy.deepcopy(x) is x
        assert x.copy() is x
        return np.sum(x)

    grad(f)(X)
    with pytest.raises(StateError, match="pickle"):
        pickle.dumps(Array(X))


def test_operands_with_other_operators():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = np.matrix(np.ones((2, 2)))
    for f in (
        lambda x: x * m,
        lambda x: x[:, :2] @ m,
        lambda x: x + np.ma.array(X, mask=MASK),
        lambda x: np.ma.array(X, mask=MASK)[0] - x,
    ):
        with pytest.raises((StateError, TracedConversionError), match=r"needed: +a (plain|bare) array"):
            vjp(f, X)
    for f in (lambda x: x + "a", lambda x: None * x, lambda x: x < object(), lambda x: x - {}):
        with pytest.raises(TypeError):
            vjp(f, X)
    np.testing.assert_array_equal(
        grad(lambda x: np.sum(x @ np.memmap.__mro__[1](3)) if False else np.sum(x))(X), np.ones((2, 3))
    )


def test_lists_of_traced_entries_name_what_takes_them():
    with pytest.raises(TracedConversionError, match=r"np\.stack"):
        grad(lambda x: np.sum(operator.add(x, [x[0, 0], 1.0, 2.0])))(X)


def test_methods_keep_the_state():
    """Within a body every method's result is an array of the body, with the state of what it came from."""
    with spmd.Mesh(d=2):

        def body(x):
            for table in (WORKS, CONSTANT):
                for name, forms in table.items():
                    for f in forms:
                        if name in ("__contains__", "__format__", "__iter__", "choose"):
                            continue
                        for y in find(f(x), []):
                            assert y.state is x.state, name
            return spmd.psum(np.sum(x * x), "d")

        both = np.stack([X, X])
        value = spmd.map(lambda x: body(x[0]), P("d"), P())(both)
        np.testing.assert_allclose(value.numpy(), 2 * np.sum(X * X))


def test_refusals_in_a_body():
    with spmd.Mesh(d=2):

        def body(x):
            with pytest.raises(MissingMethodError, match=r"spmd\.block\(x\)\.tobytes"):
                x.tobytes  # noqa: B018 - it raises
            with pytest.raises(StateError, match="Invariant"):
                X[0, 0] in x  # noqa: B015 - it raises
            assert len(spmd.block(x).tobytes()) == x.nbytes
            return x

        spmd.map(body, P("d"), P("d"))(X)

        def traced(x):
            with pytest.raises(MissingMethodError, match=r"spmd\.block\(spmd\.stop_gradient\(x\)\)\.tobytes"):
                x.tobytes  # noqa: B018
            return spmd.psum(np.sum(x), "d")

        spmd.grad(spmd.map(traced, P("d"), P()))(X)
    with pytest.raises(MissingMethodError, match=r"mend: +spmd\.stop_gradient\(x\)\.tobytes"):
        grad(lambda x: x.tobytes())(X)


def test_stop_gradient_gives_what_the_mends_promise():
    def f(x):
        y = stop_gradient(x)
        assert type(y) is np.ndarray
        assert pickle.loads(pickle.dumps(y)).shape == y.shape
        assert len(y.tobytes()) == y.nbytes
        return np.sum(x)

    grad(f)(X)


# Other libraries get an error that says what to do, not numbers without a gradient


def consumers():
    yield "memoryview", memoryview, TypeError
    yield "bytes", bytes, TracedConversionError
    yield "rng", lambda x: np.random.default_rng(0).normal(x), TracedConversionError
    yield "np.ma.array", np.ma.array, TracedConversionError
    yield "np.matrix", np.matrix, TracedConversionError
    yield "np.array", lambda x: np.array([x, x]), TracedConversionError
    yield "np.array-object", lambda x: np.array([x, x], object), TracedConversionError
    yield "np.float64", lambda x: np.float64(x[0, 0]), TracedConversionError
    yield "assignment", lambda x: operator.setitem(np.zeros((2, 3)), 0, x[0]), TracedConversionError
    yield "np.from_dlpack", np.from_dlpack, TracedConversionError
    yield "math.sqrt", lambda x: math.sqrt(x[0, 0]), TracedConversionError


@pytest.mark.parametrize(("use", "error"), [pytest.param(f, e, id=name) for name, f, e in consumers()])
def test_consumers(use, error):
    with pytest.raises(error):
        grad(lambda x: np.sum(x) + bool(use(x) is None))(X)


@pytest.mark.torch
@pytest.mark.full
def test_torch():
    import torch

    tensor = torch.ones(2, 3)
    for use in (torch.sin, lambda x: tensor + x, lambda x: x + tensor, lambda x: torch.stack([tensor, x])):
        with pytest.raises(TracedConversionError, match="record on this tape"):
            vjp(use, X)
    for use in (torch.tensor, torch.as_tensor, torch.asarray, lambda x: torch.tensor([x[0, 0]]), torch.from_dlpack):
        with pytest.raises(TypeError, match="stop_gradient"):
            vjp(use, X)
    with pytest.raises(TypeError):
        vjp(torch.from_numpy, X)


@pytest.mark.full
def test_jax_beside_an_array():
    jnp = pytest.importorskip("jax.numpy")
    for use in (lambda x: x * jnp.ones(3), lambda x: np.add(jnp.ones(3), x)):
        with pytest.raises(TracedConversionError, match="record on this tape"):
            vjp(use, np.ones(3))


@pytest.mark.full
def test_jax():
    pytest.importorskip("jax")
    import jax.numpy as jnp

    for use in (jnp.asarray, lambda x: jnp.array([x[0, 0], 1.0]), jnp.from_dlpack):
        with pytest.raises(TypeError, match="stop_gradient"):
            vjp(use, X)
    with pytest.raises(TypeError):
        vjp(jnp.sin, X)


@pytest.mark.full
def test_matplotlib():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    for use in (plt.plot, plt.imshow):
        with pytest.raises(TracedConversionError, match="stop_gradient"):
            vjp(use, X)


@pytest.mark.full
def test_pandas():
    pandas = pytest.importorskip("pandas")
    for use in (pandas.DataFrame, lambda x: pandas.Series(x[0]), lambda x: pandas.DataFrame({"a": x[0]})):
        with pytest.raises((TypeError, ValueError)):
            vjp(use, X)


@pytest.mark.full
def test_scipy_and_sklearn():
    scipy_linalg = pytest.importorskip("scipy.linalg")
    with pytest.raises(TracedConversionError, match="stop_gradient"):
        vjp(scipy_linalg.svdvals, X)
    linear_model = pytest.importorskip("sklearn.linear_model")
    with pytest.raises(TracedConversionError, match="stop_gradient"):
        vjp(lambda x: linear_model.LinearRegression().fit(x, [1, 2]).coef_, X)


@pytest.mark.gpu
def test_cupy():
    cupy = pytest.importorskip("cupy")
    there = cupy.asarray(X)

    def f(x):
        assert x.device == there.device
        assert "Array(" in repr(x)
        assert type(bare(x.__array_namespace__().zeros(3))) is cupy.ndarray
        xp = x.__array_namespace__()
        return np.sum(xp.array([[x[0, 0], 1.0], [2.0, x[1, 1]]]) @ xp.eye(2)) + np.sum(xp.full(3, x[0, 1]))

    expected = np.zeros((2, 3))
    expected[0, 0] = expected[1, 1] = 1
    expected[0, 1] = 3
    np.testing.assert_array_equal(cupy.asnumpy(grad(f)(there)), expected)
    with pytest.raises((TracedConversionError, TypeError, DifferentiationError)):
        vjp(cupy.asarray, X)


# x.at[i]

W = RNG.uniform(1, 2, (4, 5))
INDICES = {
    "number": 1,
    "negative": -1,
    "number of NumPy": np.int64(2),
    "slice": slice(1, 3),
    "backwards": slice(None, None, -1),
    "backwards by two": slice(3, 0, -2),
    "nothing": slice(2, 2),
    "entry": (1, 2),
    "block": (slice(1, 3), slice(None, None, 2)),
    "ellipsis": ...,
    "ellipsis and number": (..., 0),
    "new dimensions": (slice(None), None, 2),
    "all": (),
    "mask": W > 1.5,
    "mask of rows": np.array([True, False, True, True]),
    "list of booleans": [True, False, True, True],
    "mask and number": (np.array([True, False, True, True]), 1),
    "true": True,
    "integers": np.array([0, 2]),
    "repeated": np.array([1, 1, 3, 1]),
    "list": [1, 1, 0],
    "pairs": (np.array([0, 1, 1]), np.array([2, 3, 3])),
    "grid": np.ix_([0, 2], [1, 1]),
    "integers and slice": (np.array([1, 1]), slice(1, 4)),
    "slice and integers": (slice(None), [0, 0, -1]),
    "apart": (np.array([0, 1]), None, np.array([1, 1])),
    "matrix": np.array([[0, 1], [1, 3]]),
    "unsigned": np.array([1, 1], "u1"),
    "no integers": np.array([], int),
    "array without dimensions": np.array(1),
}
CHANGES = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "min": np.minimum,
    "max": np.maximum,
}


@pytest.mark.parametrize("name", INDICES)
def test_changed_copies(name):
    index, rng = INDICES[name], np.random.default_rng(0)
    shape = W[index].shape
    for v in (0.7, rng.uniform(1, 2, shape), rng.uniform(1, 2, shape[-1:]), np.float64(1.3)):
        for method in ("set", *CHANGES):
            expected = W.copy()
            if method == "set":
                expected[index] = v
            else:
                CHANGES[method].at(expected, index, v)

            def change(x, v, method=method):
                return getattr(spmd.at(x)[index], method)(v)

            def copies(change=change, v=v):
                yield change(W, v)
                yield vjp(lambda x: change(x, v), W)[0]
                yield vjp(lambda v: change(W, v), v)[0]
                yield vjp(change, W, v)[0]

            for found in copies():
                np.testing.assert_allclose(found, expected, rtol=1e-14, err_msg=method)
            check_grads(change, (W, np.asarray(v)), order=1)
        check_grads(lambda x: x.at[index].get() if type(x) is Array else x[index], (W,), order=1)
        check_grads(lambda x: spmd.at(x)[index].apply(np.sin), (W,), order=1)


def test_changed_copies_leave_the_original():
    before = W.copy()
    value, _ = vjp(lambda x: (x.at[0].set(9.0), x), W)
    np.testing.assert_array_equal(W, before)
    np.testing.assert_array_equal(value[1], before)
    assert (value[0][0] == 9).all()
    # An index may come from the array itself.
    np.testing.assert_array_equal(vjp(lambda x: x.at[np.argmax(x, 0), np.arange(5)].set(0.0), W)[0].max(0) < 2, True)
    np.testing.assert_array_equal(grad(lambda x: np.sum(x.at[x > 1.5].multiply(2.0)))(W), 1 + (W > 1.5))
    with pytest.raises(IndexError):
        vjp(lambda x: x.at[9].set(0.0), W)


# What comes first


@pytest.mark.parametrize(
    "first", [np.float64(2), np.float32(2), np.int8(2), np.True_, np.array(2.0), np.array(2), 2, 2.0, True, 2 + 1j]
)
def test_scalars_that_come_first(first):
    for symbol in "add sub mul truediv pow mod floordiv lt eq".split():
        f = getattr(operator, symbol)
        if isinstance(first, complex) and symbol in ("mod", "floordiv", "lt"):
            continue
        for x in (X, X[0, 0], X[:, :0]):
            for g in (lambda x, f=f: f(first, x), lambda x, f=f: f(x, first)):
                with np.errstate(all="ignore"):
                    value, expected = vjp(g, x)[0], g(x)
                np.testing.assert_array_equal(value, expected)
                assert np.asarray(value).dtype == np.asarray(expected).dtype
                assert np.shape(value) == np.shape(expected)


def test_products_with_what_is_no_array():
    for f in (lambda x: [1.0, 2.0] @ x, lambda x: (1.0, 2.0) @ x, lambda x: x @ ROW, lambda x: x @ np.ones(3, "f4")):
        np.testing.assert_allclose(vjp(f, X)[0], f(X))
    for f in (lambda x: x @ 2, lambda x: 2 @ x, lambda x: x @ x[0, 0]):
        with pytest.raises(ValueError, match="enough dimensions"):
            vjp(f, X)


def test_in_place_on_numbers_and_lists_rebinds():
    for y in (1.0, np.float64(1), ROW, tuple(ROW)):

        def f(x, y=y):
            y += x
            return y

        np.testing.assert_array_equal(vjp(f, X[0])[0], y + X[0])
    for y in (np.ones(()), np.ones((2, 3)), np.ones((2, 3), "f4"), np.ones((2, 3), int)):
        with pytest.raises(StateError, match=r"y = y \+ x"):
            vjp(lambda x, y=y: operator.iadd(y, x if y.ndim else x[0, 0]), X)


# Python's own functions and statements


def test_pythons_functions():
    def check(f):
        value, _ = vjp(f, X)
        np.testing.assert_allclose(value, f(X), rtol=1e-15)
        check_grads(f, (X,))

    check(lambda x: sum(x))
    check(lambda x: sum([x[0, 0], x[1, 1]]))
    check(lambda x: max(x[0]) * min(x[1]))
    check(lambda x: max(x[0, 0], 0.1))
    check(lambda x: sorted(x[0])[1] * sorted(x[0], key=abs)[0])
    check(lambda x: next(reversed(x)) * [row for _, row in enumerate(x)][1])
    check(lambda x: [a * b for a, b in zip(*x, strict=True)][2])
    check(lambda x: (lambda a, b: a * b)(*x))
    check(lambda x: math.prod(x[0]))
    check(lambda x: abs(x) + divmod(x, 0.4)[1] + pow(x, 2))
    check(lambda x: x[0, 0] if x[0, 0] > 0 and not x[0, 1] > 0 else x[1, 1])
    check(lambda x: [[v * v for v in row] for row in x][1][2])

    def unpacked(x):
        (a, _b, c), [_d, *rest] = x
        return a * c * rest[1]

    check(unpacked)


def test_comparisons_with_what_is_no_number():
    def f(x):
        assert (x is None) is False
        assert (x == None) is False  # noqa: E711
        assert (x != None) is True  # noqa: E711
        assert (x == "a") is False
        assert x[0, 0] not in [1.0, None, "a"]
        for other in (None, "a", object()):
            with pytest.raises(TypeError):
                x < other  # noqa: B015
        return np.sum(x)

    grad(f)(X)


def test_what_is_shown():
    """An Array shows its entries, dtype and shape, that it is traced, and its state."""
    seen = []
    grad(lambda x: seen.extend([repr(x[0, 0]), str(x[0]), f"{x[0, 0]}"]) or np.sum(x))(X.astype("f4"))
    number, row = "Array(0.71, traced array float32[])", "Array([ 0.71, -1.23,  0.43], traced array float32[3])"
    assert seen == [number, row, number]
    large = []
    grad(lambda x: large.append(repr(x)) or np.sum(x))(np.zeros((1000, 1000)))
    assert len(large[0]) < 200
    with spmd.Mesh(d=2):
        shown = []

        def body(x):
            shown.extend([repr(x), f"{spmd.psum(x[0], 'd'):.2f}", f"{x[0]:>6.1f}"])
            return x

        spmd.map(body, P("d"), P("d"))(np.array([1.0, 2.0]))
    assert "Array([1.], Varying(d) array float64[1])" in shown
    assert "3.00" in shown
    assert "   2.0" in shown


def test_a_third_argument_of_pow():
    with pytest.raises(TypeError, match=r"Array\.__pow__"):
        grad(lambda x: pow(x, 2, 3))(2.0)


# Operands of other classes

V = np.array([1.0, 2.0, 3.0])
MASKED = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])


@pytest.mark.parametrize(
    "use",
    [
        lambda x: np.multiply(np.eye(3).view(np.matrix), x),
        lambda x: np.eye(3).view(np.matrix) @ x,
        lambda x: np.dot(np.eye(3).view(np.matrix), x),
        lambda x: x * np.eye(3).view(np.matrix),
        lambda x: np.add(x, MASKED),
        lambda x: np.add(x, np.ma.masked),
        lambda x: np.clip(x, MASKED, 5),
        lambda x: np.average(x, weights=MASKED),
        lambda x: np.concatenate([x, MASKED]),
    ],
)
def test_other_arrays_of_numpy_are_refused(use):
    with pytest.raises(StateError, match=r"beside an Array(.|\n)*np\.asarray\(m\)"):
        grad(lambda x: np.sum(use(x)))(V)
    with spmd.Mesh(x=1), pytest.raises(StateError, match="beside an Array"):
        spmd.map(use, in_specs=P(), out_specs=P())(V)


def test_sparse_matrices_are_refused():
    sparse = pytest.importorskip("scipy.sparse")
    linalg = pytest.importorskip("scipy.sparse.linalg")
    dense = np.array([[1.0, 2, 0], [0, 3, 4], [5, 0, 6]])
    for m in (sparse.csr_matrix(dense), sparse.csr_array(dense), linalg.aslinearoperator(dense)):
        for use in (lambda x, m=m: x * m, lambda x, m=m: x @ m, lambda x, m=m: m @ x, lambda x, m=m: x[0] * m):
            with pytest.raises(TracedConversionError, match="stop_gradient"):
                vjp(use, V)
        for use in (lambda x, m=m: x + m, lambda x, m=m: m - x):
            with pytest.raises(TypeError):
                vjp(use, V)


def test_what_converts_to_an_array_is_one_as_for_numpy():
    p = np.poly1d([3.0, 4.0, 5.0])
    for f in (lambda x: x * p, lambda x: x + p, lambda x: x - p):
        np.testing.assert_array_equal(vjp(f, V)[0], f(V))
    assert vjp(lambda x: np.sum(x * p), V)[1](1.0)[0].tolist() == [3, 4, 5]


def test_hidden_arrays():
    with pytest.raises(DtypeError, match="a mask of booleans"):
        grad(lambda x: np.sum(np.ones(3), where=x))(V)
    with pytest.raises(DtypeError, match=r"np\.delete"):
        grad(lambda x: np.sum(np.delete(np.ones(3), x)))(V)
    with pytest.raises(TracedConversionError, match="like"):
        grad(lambda x: np.sum(np.require(np.ones(3), like=x)))(V)


def test_a_name_that_nobody_has_is_pythons_own_error():
    """Who is not told by us what to write is told by Python what it may have been."""
    with pytest.raises(AttributeError, match="'Array' object has no attribute 'sumup'") as raised:
        grad(lambda x: x.sumup())(X)
    assert type(raised.value) is AttributeError
    assert raised.value.name == "sumup"
    assert type(raised.value.obj) is Array


def test_only_what_an_array_has_is_shown():
    for shown in (dir(Array), dir(Array(X))):
        assert {"sum", "at", "T", "shape", "reshape"} <= set(shown)
        assert not {"exp", "fill", "tobytes", "expand_dims"} & set(shown)
    assert not hasattr(Array, "exp")
    assert not hasattr(Array(X), "exp")
    with pytest.raises(MissingMethodError, match=r"x\.exp(.|\n)*mend: +np\.exp\(x\)"):
        _ = Array(X).exp
