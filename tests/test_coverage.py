"""The registry knows each public function of NumPy, scipy.special and scipy.fft, each method of ufuncs and arrays.

It says one thing of each, which is true.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import operator
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loaded import load
from rules import Table

import spmd
import spmd.numpy as snp
from spmd import P
from spmd.autodiff import check_grads, grad, vjp
from spmd.autodiff.dispatch import load_families
from spmd.autodiff.primitive import Method, constants, handlers, in_place, overrides, passives, refusals
from spmd.autodiff.rules.shape import metadata_functions
from spmd.autodiff.tracer import Array, find
from spmd.errors import DifferentiationError, StateError, TracedConversionError

TESTS = Path(__file__).resolve().parent


page = load(TESTS.parent / "docs" / "tools" / "make_functions.py")
load_families()

ALL = {
    f"{prefix}.{name}": f for prefix, module in page.NAMESPACES.items() for name, f in page.functions(module).items()
}
SPECIAL = page.special() if page.has_scipy() else {}
TRANSFORMS = page.transforms() if page.has_scipy() else {}
UFUNCS = {names[0]: f for f, names in page.ufuncs().items()}
METHODS = [(name, method) for name in UFUNCS for method in page.METHODS]


def of_kind(*kinds) -> dict:
    """The functions of these kinds by name, each once."""
    return dict({f: (name, f) for name, f in reversed(ALL.items()) if set(page.kinds(f)) & set(kinds)}.values())


def dispatches(f) -> bool:
    """Whether NumPy asks its arguments by a protocol."""
    return isinstance(f, np.ufunc) or type(f).__name__ == "_ArrayFunctionDispatcher"


def test_each_function_is_of_one_kind():
    assert {name: page.kinds(f) for name, f in ALL.items() if len(page.kinds(f)) != 1} == {}


def test_each_function_of_scipy_is_of_one_kind():
    said = {f"scipy.special.{name}": page.kinds(f) for name, f in SPECIAL.items()}
    said |= {f"scipy.fft.{name}": page.kinds_of_transform(name, f) for name, f in TRANSFORMS.items()}
    assert {name: kinds for name, kinds in said.items() if len(kinds) != 1} == {}


def test_enough_functions_have_a_derivative():
    assert len(of_kind(page.RULE, page.COMPOSITION)) >= 200


def test_the_walk_finds_what_there_is():
    assert {"np.add", "np.abs", "np.einsum", "np.linalg.svd", "np.fft.rfft", "np.array", "np.load"} <= set(ALL)
    assert not {"np.ndarray", "np.linalg", "np.float64", "np.vectorize"} & set(ALL)
    assert {("hypot", "reduce"), ("add", "at"), ("exp", "outer")} <= set(METHODS)
    if page.has_scipy():
        assert {"erf", "logsumexp", "roots_jacobi"} <= set(SPECIAL)
        assert {"dct", "fftshift", "set_workers"} <= set(TRANSFORMS)


CALLS_ANOTHER = {
    f: g for f, g in ((getattr(np, "row_stack", None), np.vstack), (getattr(np, "trapz", None), np.sum)) if f
}
"""Names of older releases that call what NumPy hands to us."""


def test_what_does_not_dispatch_has_no_rule():
    found = {f for f in of_kind(page.RULE, page.COMPOSITION).values() if not dispatches(f)}
    assert found <= set(CALLS_ANOTHER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for f in found:
            assert np.any(grad(lambda x, f=f: np.sum(f(x)))(np.ones((2, 2))))


# Each rule stands in a row of some table


@functools.cache
def dispatched() -> set:
    """The functions that NumPy hands to traced arrays when each row of each table runs once."""
    seen = set()
    ufunc, function = Array.__array_ufunc__, Array.__array_function__

    def by_ufunc(self, f, method, *inputs, **kwargs):
        seen.add(f)
        return ufunc(self, f, method, *inputs, **kwargs)

    def by_function(self, f, types, args, kwargs):
        seen.add(f)
        return function(self, f, types, args, kwargs)

    for path in sorted(TESTS.glob("test_rules*.py")):
        importlib.import_module(path.stem)
    Array.__array_ufunc__, Array.__array_function__ = by_ufunc, by_function
    try:
        rows = [row for table in Table.all for row in table.rows.values()]
        for k in range(0, len(rows), 50):
            run_once(rows[k : k + 50])
    finally:
        Array.__array_ufunc__, Array.__array_function__ = ufunc, function
    return seen


def run_once(rows) -> None:
    @settings(max_examples=1, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def run(data):
        for row in rows:
            # A row that raises is told by its own tests.
            args = row.draw(data)
            with np.errstate(all="ignore"), contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                vjp(row.f, *args)

    run()


def test_each_rule_has_a_row():
    """A function with a rule that no row calls is one that nothing verifies."""
    ruled = of_kind(page.RULE, page.COMPOSITION)
    assert [name for name, f in ruled.items() if f not in dispatched() and f not in CALLS_ANOTHER] == []


# Constants

X = np.array([0.5, -1.5, 2.0])
N = np.array([5, 2, 7])
GIVEN = {
    np.isin: (X, [2.0]),
    getattr(np, "in1d", None): (X, [2.0]),
    np.digitize: (X, [0.0, 1.0]),
    np.searchsorted: ([0.0, 1.0], X),
    np.lexsort: ((X, X),),
    np.argpartition: (X, 1),
    np.unravel_index: (N, (3, 4)),
    np.ravel_multi_index: ((N, N), (8, 8)),
    np.packbits: (N.astype("u1"),),
    np.unpackbits: (N.astype("u1"),),
    np.linalg.matrix_rank: (np.outer(X, X),),
    np.array_equal: (X, X),
    np.array_equiv: (X, X),
    np.allclose: (X, X),
    np.isclose: (X, X),
    np.can_cast: (X, "f4"),
    np.common_type: (X, X),
    np.shares_memory: (X, N),
    np.may_share_memory: (X, N),
    np.einsum_path: ("i,i", X, X),
    np.tril_indices_from: (np.outer(X, X),),
    np.triu_indices_from: (np.outer(X, X),),
    np.diag_indices_from: (np.outer(X, X),),
}
WHOLE = {f for f in constants if isinstance(f, np.ufunc) and "d" not in "".join(f.types)}


def samples(f):
    if f in GIVEN:
        return GIVEN[f]
    return (N if f in WHOLE else X,) * (f.nin if isinstance(f, np.ufunc) else 1)


@pytest.mark.parametrize("name", of_kind(page.CONSTANT))
def test_constants(name):
    f = ALL[name]
    args, seen = samples(f), []
    whole = not any(isinstance(a, np.ndarray) and a.dtype.kind == "f" for a in _flat(args))

    def run(x):
        # Whole numbers are not differentiated: they come as arrays without a tape.
        given = _map(lambda a: Array(a) if whole else x[: len(a)] * 0 + a if a.ndim == 1 else a + 0 * x[0], args)
        seen.append(f(*given))
        return x[0]

    np.testing.assert_array_equal(grad(run)(X), [1, 0, 0])
    assert find(seen, []) == []
    if f not in (np.empty_like,):
        expected = f(*args)
        assert type(seen[0]) is type(expected) or np.isscalar(expected)
        np.testing.assert_equal(seen[0], expected)


# The same within a body: what comes of a Varying array is Varying, what comes of Invariant ones Invariant.


@pytest.mark.parametrize("name", of_kind(page.CONSTANT))
def test_constants_keep_the_state(name):
    f = ALL[name]
    args = samples(f)
    bare = f(*args)

    def body(x, y):
        for likes in ((x, x), (y, y), (x, y), (y, x)):
            given = _in_body(args, *likes)
            states = {a.state for a in find(given, [])}
            state = x.state if x.state in states else y.state
            result = f(*given)
            parts = find(result, [])
            if f in metadata_functions:
                assert parts == []
                np.testing.assert_equal(result, bare)
            else:
                assert len(parts) == (len(bare) if isinstance(bare, tuple | list) else 1)
                assert {a.state for a in parts} == {state}
                if f is not np.empty_like:
                    np.testing.assert_equal([spmd.block(a) for a in parts], bare if isinstance(bare, tuple) else [bare])
        return spmd.psum(np.sum(x), "d") + np.sum(y)

    with spmd.Mesh(d=2):
        mapped = spmd.map(body, (P("d"), P()), P())
        mapped(np.ones(2), np.ones(1))
        spmd.grad(mapped, (0, 1))(np.ones(2), np.ones(1))


def _in_body(args, first, other):
    """Arrays with the state of `first`, those after the first one with that of `other`, and their tape."""
    likes = itertools.chain([first], itertools.repeat(other))

    def lift(a):
        like = next(likes)
        return Array(a, like.state) + 0 * like[0] if a.dtype.kind == "f" else Array(a, like.state)

    return _map(lift, args)


def _map(f, args):
    if isinstance(args, np.ndarray):
        return f(args)
    return type(args)(_map(f, a) for a in args) if isinstance(args, tuple) else args


def _flat(args):
    return [b for a in args for b in _flat(a)] if isinstance(args, tuple) else [args]


# Refusals

CALLED = {
    np.copyto: lambda f, x: f(x, 1.0),
    np.place: lambda f, x: f(x, x > 0, 1.0),
    np.put: lambda f, x: f(x, 0, 1.0),
    np.put_along_axis: lambda f, x: f(x, np.array([0]), 1.0, 0),
    np.putmask: lambda f, x: f(x, x > 0, 1.0),
    np.fill_diagonal: lambda f, x: f(x, 1.0),
    np.save: lambda f, x: f(io.BytesIO(), x),
    np.savez: lambda f, x: f(io.BytesIO(), x),
    np.savez_compressed: lambda f, x: f(io.BytesIO(), x),
    np.savetxt: lambda f, x: f(io.BytesIO(), x),
    np.full: lambda f, x: f(3, x[0]),
    np.arange: lambda f, x: f(x[0]),
    np.kaiser: lambda f, x: f(3, x[0]),
    np.fromiter: lambda f, x: f(x, float),
    np.nested_iters: lambda f, x: f(np.outer(x, x), [[0], [1]]),
    np.bmat: lambda f, x: f([[x]]),
    np.frompyfunc: lambda f, x: f(lambda t: t, 1, 1)(x),
    np.format_float_positional: lambda f, x: f(x[0]),
    np.format_float_scientific: lambda f, x: f(x[0]),
    np.intersect1d: lambda f, x: f(x, x),
}
LOUD = {
    np.isfortran: AttributeError,
    np.nested_iters: TypeError,
    np.frompyfunc: DifferentiationError,
}
"""Those that raise another error than that of a conversion."""


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", of_kind(page.REFUSED))
def test_refusals(name):
    f = ALL[name]
    call = CALLED.get(f, lambda f, x: f(x))
    with pytest.raises(Exception) as raised:  # noqa: PT011 - NumPy gives some of them a class of its own
        grad(lambda x: call(f, x))(X)
    if dispatches(f):
        assert type(raised.value) is DifferentiationError
        assert refusals[f] in str(raised.value)
    else:
        assert any(isinstance(e, LOUD.get(f, TracedConversionError)) for e in chain(raised.value))
    if f in in_place:
        with pytest.raises(DifferentiationError, match="immutable"):
            call(f, Array(X))


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


WRITES = {
    np.copyto: lambda x, v: np.copyto(x, v, where=MASK),
    np.fill_diagonal: lambda x, v: np.fill_diagonal(x, v),
    np.place: lambda x, v: np.place(x, MASK, v),
    np.put: lambda x, v: np.put(x, [1, 5, 4], v),
    np.put_along_axis: lambda x, v: np.put_along_axis(x, np.array([[1], [0], [1]]), v, 1),
    np.putmask: lambda x, v: np.putmask(x, MASK, v),
}
"""How those that write are called on the arrays of the next test."""

MASK = np.array([[True, False], [True, True], [False, False]])
MATRIX = np.arange(6.0).reshape(3, 2) + 0.5


@pytest.mark.parametrize("name", [name for name, f in of_kind(page.REFUSED).items() if f in in_place])
def test_mends_of_writes_give_what_was_to_be_written(name):
    write = WRITES[ALL[name]]
    place = {np.put: [1, 5, 4], np.put_along_axis: np.array([[1], [0], [1]])}.get(ALL[name])
    given = {"mask": MASK, "i": place, "np": np, "spmd": spmd}
    many = [7.0, 8.0] if ALL[name] in (np.place, np.putmask) else [7.0, 8.0, 9.0] if ALL[name] is np.put else 7.0
    for v in (7.0, many):
        expected = MATRIX.copy()
        write(expected, v)
        for mend in refusals[ALL[name]].split(", along")[0].split(", or "):
            if mend.startswith("spmd.at(x)[...]"):
                expected[...] = v
                mend = f"y = {mend}"

            def run(x, v, mend=mend):
                here = {**given, "x": x, "v": v}
                exec(mend, here)
                return here["y"]

            np.testing.assert_array_equal(vjp(run, MATRIX, np.asarray(v))[0], expected)
            check_grads(run, (MATRIX, np.asarray(v)), 1)
            check_grads(lambda v, run=run: run(MATRIX, v), (np.asarray(v),), 1)


EXPRESSIONS = {
    np.asmatrix: lambda x: np.asarray(np.asmatrix(x)),
    np.bmat: lambda x: np.asarray(np.bmat([[x, x]])),
    np.nested_iters: lambda x: np.stack([np.sum(row) for row in x]),
    np.frompyfunc: lambda x: np.asarray(np.frompyfunc(lambda t: t * t, 1, 1)(x), float),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("f", EXPRESSIONS)
def test_mends_of_others(f):
    expected = EXPRESSIONS[f](MATRIX)
    for mend in refusals[f].split(", or "):
        call = mend.replace("vectorize(f)", "vectorize(f)(x)").partition(" where ")[0]
        here = {"np": np, "spmd": spmd, "f": (lambda t: t * t) if f is np.frompyfunc else np.sum}
        run = eval(f"lambda x: {call}", {**here, "y": MATRIX})
        np.testing.assert_array_equal(vjp(run, MATRIX)[0], expected)


def test_mends_name_what_there_is():
    """A mend names no function that is itself refused, but for what it writes to a file, and none that is missing."""
    for f, mend in refusals.items():
        for name in re.findall(r"\b(?:np|spmd)(?:\.\w+)+", mend):
            if name.startswith("spmd"):
                assert operator.attrgetter(name[5:])(spmd), mend
            elif f in ALL.values() and "stop_gradient" not in mend:
                assert page.kinds(ALL[name])[0] not in (page.REFUSED, page.OVERRIDE) or name == "np.arange", mend


def test_what_is_refused_takes_undifferentiated_arrays():
    assert np.intersect1d(Array(X), [9.0, 0.5]).tolist() == [0.5]
    for write in (
        lambda x: np.copyto(np.ones(3), x),
        lambda x: np.put(np.ones(3), 0, x),
        lambda x: np.place(np.ones(3), [1, 0, 1], x),
        lambda x: np.putmask(np.ones(3), [1, 0, 1], x),
        lambda x: np.put_along_axis(np.ones(3), np.array([0]), x, 0),
    ):
        with pytest.raises(DifferentiationError, match=r"mend: +y = "):
            grad(write)(X)


# Functions that NumPy does not hand to us, and their overrides

BARE = np.array([0.5, 1.5, 4.0])
PLAIN = {
    "array": lambda xp, x: xp.array(x),
    "asanyarray": lambda xp, x: xp.asanyarray(x),
    "asarray": lambda xp, x: xp.asarray(x),
    "asarray_chkfinite": lambda xp, x: xp.asarray_chkfinite(x),
    "ascontiguousarray": lambda xp, x: xp.ascontiguousarray(x),
    "asfortranarray": lambda xp, x: xp.asfortranarray(x),
    "require": lambda xp, x: xp.require(x),
    "arange": lambda xp, x: xp.arange(x[0], 4),
    "from_dlpack": lambda xp, x: xp.from_dlpack(x),
    "fromiter": lambda xp, x: xp.fromiter(x, float),
    "full": lambda xp, x: xp.full(3, x[0]),
    "kaiser": lambda xp, x: xp.kaiser(3, x[0]),
    "format_float_positional": lambda xp, x: xp.format_float_positional(x[0]),
    "format_float_scientific": lambda xp, x: xp.format_float_scientific(x[0]),
}
LATER = {
    "full_like": lambda xp, x: xp.full_like(BARE, x[0]),
    "interp": lambda xp, x: xp.interp([1.0, 9.0], BARE, BARE, right=x[0]),
    "pad": lambda xp, x: xp.pad(BARE, 1, constant_values=x[0]),
    "trapezoid": lambda xp, x: xp.trapezoid(BARE, None, x[0]),
    "unwrap": lambda xp, x: xp.unwrap(BARE * 5, period=x[0] + 3),
    "nan_to_num": lambda xp, x: xp.nan_to_num(np.array([np.nan, 1]), nan=x[0]),
    "select": lambda xp, x: xp.select([BARE > 1], [BARE], x[0]),
    "piecewise": lambda xp, x: xp.piecewise(BARE, [BARE > 1], [lambda t: t * x[0], 2.0]),
    "apply_along_axis": lambda xp, x: xp.apply_along_axis(lambda t: t * x, 0, BARE),
    "apply_over_axes": lambda xp, x: xp.apply_over_axes(lambda t, k: xp.sum(t, k) * x[0], BARE, [0]),
    **{
        name: lambda xp, x, name=name: getattr(xp, name)(BARE, initial=3 * x[2] if "max" in name else x[0])
        for name in "sum prod max min amax amin nansum nanprod nanmax nanmin".split()
    },
    **{
        name: lambda xp, x, name=name: getattr(xp, name)(BARE, mean=x[:1]) if name != "nanmean" else xp.nanmean(x)
        for name in ("nanvar", "nanstd", "nanmean")
    },
}
"""Calls in which NumPy does not ask the argument that is traced."""

REFUSALS = TracedConversionError, DifferentiationError, StateError


@pytest.mark.parametrize("name", of_kind(page.OVERRIDE))
def test_overrides(name):
    short = name.removeprefix("np.")
    call = PLAIN[short]
    with pytest.raises(Exception) as raised:  # noqa: PT011 - NumPy raises a ValueError of its own for some
        grad(lambda x: call(np, x))(BARE)
    (error,) = [e for e in chain(raised.value) if isinstance(e, TracedConversionError)]
    assert f"spmd.numpy.{short}" in str(error)
    assert name in str(error) or name == "np.from_dlpack"
    value, pull = vjp(lambda x: call(snp, x), BARE)
    if isinstance(value, str):
        assert value == call(np, BARE)
    else:
        np.testing.assert_array_equal(value, call(np, BARE))
        assert np.any(pull(np.ones_like(value))[0])


@pytest.mark.parametrize("name", LATER)
def test_arguments_that_numpy_does_not_ask(name):
    """NumPy's own raises, or gives what is traced."""
    value, pull = vjp(lambda x: LATER[name](snp, x), BARE)
    np.testing.assert_allclose(value, LATER[name](np, BARE))
    (g,) = pull(np.ones_like(value))
    assert np.any(g)
    error = failure(lambda: np.testing.assert_allclose(grad(lambda x: np.sum(LATER[name](np, x)))(BARE), g))
    if error is not None:
        assert any(isinstance(e, REFUSALS) for e in chain(error))
        if isinstance(error, DifferentiationError) and "np.copyto" in str(error):
            assert f"spmd.numpy.{name}(...)" in str(error)


def failure(run):
    try:
        run()
    except (TypeError, ValueError) as error:
        return error
    return None


def test_errors_name_each_override():
    """The others are of functions that NumPy hands to us; they take more."""
    functions = {name for name in overrides if inspect.isroutine(f := getattr(np, name)) or dispatches(f)}
    called = {*PLAIN, *LATER}
    assert called <= functions
    assert [name for name in functions - called if page.kinds(getattr(np, name)) == [page.OVERRIDE]] == []


def test_classes_of_numpy_cut_nothing_off():
    """They raise, or what they hold is traced."""
    tells = {np.dtype, np.finfo, np.str_}
    for f in vars(np).values():
        if inspect.isclass(f) and f not in tells:
            for make in (lambda x: x, lambda x: x[0], lambda x: [x[0]]):

                def run(x, f=f, make=make):
                    with contextlib.suppress(TypeError, ValueError, AttributeError, RuntimeError):
                        made = f(make(x))
                        assert f is np.poly1d
                        assert find(made.c, [])
                    return x[0]

                grad(run)(BARE)


# Who asked for bare data is told by name


def asks():
    yield "np.asarray", lambda x: np.asarray(x), "np.stack"
    yield "np.array", lambda x: np.array([x, x]), "spmd.numpy.array"
    yield "np.full", lambda x: np.full((2, 3), x), r"spmd.numpy.full(...); spmd.stop_gradient"
    yield "np.interp", lambda x: np.interp([9.0], BARE, BARE, right=x[0]), "spmd.numpy.interp(...)"
    yield "np.asmatrix", lambda x: np.asmatrix(x), "np.atleast_2d(x)"
    yield "np.polynomial.polynomial.polyval", lambda x: np.polynomial.polynomial.polyval(2.0, x), "stop_gradient"
    yield "np.asarray, or a function that calls it", lambda x: operator.setitem(np.zeros(3), slice(3), x), "spmd.numpy"


def asks_of_scipy():
    yield "scipy.fft.dct", lambda s, x: s.fft.dct(x), "spmd.scipy.fft.dct(...); spmd.stop_gradient"
    yield "scipy.fft.rfftn", lambda s, x: s.fft.rfftn(x), "spmd.scipy.fft.rfftn(...)"
    yield "scipy.special.softmax", lambda s, x: s.special.softmax(x), "spmd.scipy.special.softmax(...)"
    yield "scipy.special.roots_jacobi", lambda s, x: s.special.roots_jacobi(2, x[0], 1.0), "eval_jacobi"
    yield "scipy.linalg.expm", lambda s, x: s.linalg.expm(np.outer(x, x)), "spmd.custom_vjp around scipy.linalg.expm"
    yield "scipy.stats.rv_continuous.pdf", lambda s, x: s.stats.norm.pdf(x), "spmd.custom_vjp"
    yield "scipy.interpolate.CubicSpline", lambda s, x: s.interpolate.CubicSpline(BARE, x), "spmd.custom_vjp"
    yield "np.asarray", lambda s, x: s.optimize.minimize(lambda _: np.asarray(x), 0.0), "spmd.numpy.asarray"


@pytest.mark.parametrize(("name", "ask", "mend"), [pytest.param(*c, id=c[0]) for c in asks()])
def test_who_asked(name, ask, mend):
    explained(name, ask, mend)


@pytest.mark.parametrize(("name", "ask", "mend"), [pytest.param(*c, id=c[0]) for c in asks_of_scipy()])
def test_who_asked_of_scipy(name, ask, mend):
    scipy = pytest.importorskip("scipy")
    explained(name, lambda x: ask(scipy, x), mend)


def explained(name, ask, mend):
    with pytest.raises(TracedConversionError) as raised:
        grad(lambda x: ask(x))(BARE)
    head, *_, last = str(raised.value).splitlines()
    assert head.split(", which")[0] == name
    assert mend in last


def test_who_asked_in_a_body():
    """An array with a state names the override too, and of its block."""
    with spmd.Mesh(d=2), pytest.raises(TracedConversionError, match=r"np\.full\n(.|\n)*spmd\.numpy\.full(.|\n)*block"):
        spmd.map(lambda x: np.full((2, 4), x), P("d"), P("d"))(np.ones(4))


def test_looking_for_who_asked_runs_no_code_of_the_user():
    class Lazy:
        read = 0

        @property
        def asarray(self):
            self.read += 1
            return np.asarray

    lazy = Lazy()
    with pytest.raises(TracedConversionError, match=r"np\.asarray, or a function"):
        grad(lambda x: lazy.asarray(x))(BARE)
    assert lazy.read == 1


# scipy.special and scipy.fft


def arity(f) -> int:
    if isinstance(f, np.ufunc):
        return f.nin
    with contextlib.suppress(ValueError):
        needed = [p for p in inspect.signature(f).parameters.values() if p.default is p.empty]
        return max(1, len([p for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]))
    return 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SPECIAL)
def test_scipy_cuts_nothing_off(name):
    """SciPy's own functions, however they are called, raise or give what is traced; constants give what is bare."""
    f = getattr(importlib.import_module("scipy.special"), name)
    n, (kind,) = arity(f), page.kinds(SPECIAL[name])
    errors = []

    def run(x):
        for k, other in [(None, None), *((k, v) for k in range(n) for v in (2, 0.5))]:
            for entry in (x, x[0]):
                args = [entry] * n if k is None else [other] * k + [entry] + [other] * (n - 1 - k)
                try:
                    result = f(*args)
                except Exception as error:
                    errors.append(error)
                else:
                    assert kind not in (page.REFUSED, page.PASSIVE)
                    assert bool(find(result, [])) == (kind != page.CONSTANT)
        return x[0]

    grad(run)(np.array([0.3, 0.5]))
    if isinstance(f, np.ufunc) and kind == page.REFUSED:
        assert {type(e) for e in errors} == {DifferentiationError}
        assert all(refusals[SPECIAL[name]] in str(e) for e in errors)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_cut_nothing_off(name):
    f, twin = TRANSFORMS[name], getattr(importlib.import_module("spmd.scipy.fft"), name)
    (kind,) = page.kinds_of_transform(name, f)
    options = (0.1, 1.0) if name in ("fht", "ifht") else ()
    if kind == page.RULE:
        with pytest.raises(
            TracedConversionError, match=rf"scipy\.fft\.{name}\n(.|\n)*mend: +spmd\.scipy\.fft\.{name}\("
        ):
            grad(lambda x: np.sum(np.real(f(x, *options))))(MATRIX)
    if kind in (page.RULE, page.COMPOSITION):
        assert np.any(grad(lambda x: np.sum(np.real(twin(x, *options)) * MATRIX[0, 0]))(MATRIX))
    else:
        assert twin is f


LAST = {
    "lmbda": lambda f, x: f(2, x)[0][-1],
    "riccati_jn": lambda f, x: f(2, x)[0][-1],
    "riccati_yn": lambda f, x: f(2, x)[0][-1],
}


@pytest.mark.parametrize("name", [name for name in LAST if name in SPECIAL])
def test_mends_of_special_functions(name):
    """They have the values of what is refused, and a derivative."""
    special = importlib.import_module("spmd.scipy.special")
    here = {"spmd": spmd, "jv": special.jv, "gamma": special.gamma, "v": 2, "n": 2}
    expected = LAST[name](getattr(special, name), 1.3)
    run = eval(f"lambda x: {refusals[SPECIAL[name]]}", here)
    np.testing.assert_allclose(run(1.3), expected)
    check_grads(run, (1.3,), 1)


# Methods of ufuncs


def applied(f, method: str, x):
    """A call of a method; of x, or of entries of x."""
    if method == "outer":
        return f.outer(x, x if x.dtype.kind == "i" else 0.7 * x)
    if method == "reduceat":
        return f.reduceat(x, [0, 2])
    if method == "at":
        return f.at(x, [0], *[x[1:2]] * (f.nin - 1))
    return getattr(f, method)(x)


def takes(f, method: str):
    """Arrays that NumPy takes there, of floating numbers if it can be; None if there are none."""
    for x in (np.array([0.5, 1.5, 0.8]), np.array([5, 2, 3])):
        with contextlib.suppress(TypeError, ValueError, RuntimeError), np.errstate(all="ignore"):
            applied(f, method, x.copy())
            return x
    return None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "method"), METHODS)
def test_methods_of_ufuncs(name, method):
    f = UFUNCS[name]
    known, x = Method((f, method)), takes(f, method)
    kinds = page.kinds(known)
    if x is None:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            vjp(lambda x: applied(f, method, x), np.array([0.5, 1.5, 0.8]))
        return
    assert len(kinds) == 1
    if method == "at":
        assert kinds == [page.REFUSED]
        for given in (lambda x: Array(x), lambda x: x):
            with pytest.raises(DifferentiationError, match="immutable") as raised:
                grad(lambda x, given=given: applied(f, method, given(x)))(x.astype(float))
            assert refusals[known] in str(raised.value)
        check_mend_of_at(f, known)
    elif page.CONSTANT in kinds:
        np.testing.assert_array_equal(stated(lambda x: applied(f, method, x), x), applied(f, method, x))
        if x.dtype.kind == "f":
            assert not find(seen_in_grad(lambda x: applied(f, method, x), x), [])
    else:
        assert kinds == [page.COMPOSITION]
        if f is np.ldexp:
            return
        # NumPy itself is wrong in the reduce of some, where its loops are of AVX512.
        expected = functools.reduce(f, x) if method == "reduce" else applied(f, method, x)
        np.testing.assert_allclose(vjp(lambda x: applied(f, method, x), x)[0], expected, rtol=1e-14)
        if np.allclose(expected, applied(f, method, x)):
            check_grads(lambda x: applied(f, method, x), (x,), 1)


def seen_in_grad(f, x):
    seen = []
    grad(lambda x: [seen.append(f(x)), x[0]][1])(x)
    return seen


def stated(f, x):
    """The bare result of f in a body; its state is that of its argument."""
    seen = []

    def body(x):
        y = f(x)
        assert y.state is x.state
        seen.append(spmd.block(y))
        return x

    with spmd.Mesh(d=2):
        spmd.map(body, P("d"), P("d"))(np.concatenate([x, x]))
    return seen[0]


def check_mend_of_at(f, known):
    """The mend does what NumPy does."""
    x, i = (
        (np.array([0.5, 1.5, 0.8]), np.array([2, 0]))
        if f is np.ldexp or takes(f, "at").dtype.kind == "f"
        else (np.arange(3), [2, 0])
    )
    v = np.array([0.7, 1.2]).astype(x.dtype) if f is not np.ldexp else np.array([1, 2])
    expected = x.copy()
    try:
        f.at(expected, i, *[v] * (f.nin - 1))
    except TypeError:  # bitwise
        expected = expected.astype(int)
        f.at(expected, i, *[v.astype(int)] * (f.nin - 1))
    here = {"np": np, "spmd": spmd, "x": x.copy(), "i": i, "v": v}
    exec(refusals[known], here)
    np.testing.assert_array_equal(here["x"], expected)


# Methods and attributes of arrays: that they are what the page says is tested in test_syntax


def test_attributes_of_arrays():
    tables = importlib.import_module("autodiff.test_array_methods")
    found = page.attributes()
    assert {"T", "sum", "item", "strides", "shape"} < set(found) <= set(dir(np.ndarray))
    for name, (kind, instead) in found.items():
        table = {page.CONSTANT: tables.CONSTANT, page.REFUSED: tables.REFUSED}.get(kind, tables.WORKS)
        assert name in table or name == "to_device", name
        assert bool(instead) == (kind == page.REFUSED)


# What takes no entries


def test_passive_functions_cut_nothing_off():
    """Those that NumPy would hand to us raise; those that it does not ask give what has no gradient, or raise."""
    tells = {np.isscalar, np.iterable, np.typename, np.info, np.isdtype}
    for f in of_kind(page.PASSIVE).values():
        if f in tells or not dispatches(f):
            continue
        with pytest.raises((DifferentiationError, TypeError)):
            grad(lambda x, f=f: f(x))(X)
    assert not set(handlers) & passives
    assert grad(lambda x: np.sum(np.fromfunction(lambda i: i * x, (3,))))(X).tolist() == [0, 1, 2]


# The page


def test_the_page_is_that_of_the_registry():
    """As far as the installed versions are those that the page tells."""
    have = page.PAGE.read_text()
    parts = []
    if f"NumPy {'.'.join(np.__version__.split('.')[:2])}:" in have:
        parts += page.parts_of_numpy()
    if page.has_scipy() and f"SciPy {'.'.join(importlib.import_module('scipy').__version__.split('.')[:2])}:" in have:
        parts += page.parts_of_scipy()
    if not parts:
        pytest.skip("the page is of other versions")
    for part in parts:
        assert part in have, f"docs/reference/functions.md is not what the registry says; run `{page.COMMAND}`"
    if len(parts) == len(page.parts_of_numpy()) + 2:
        assert have == page.text()
