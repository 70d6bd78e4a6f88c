"""The registry knows each public function of NumPy, and says one thing of it, which is true."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rules import Table

from spmd.autodiff import grad, vjp
from spmd.autodiff.primitive import constants, handlers, in_place, passives, refusals
from spmd.autodiff.tracer import Array, find, load_families
from spmd.errors import DifferentiationError, TracedConversionError

TESTS = Path(__file__).resolve().parent


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = load(TESTS.parent / "docs" / "make_functions.py")
load_families()

ALL = {
    f"{prefix}.{name}": f for prefix, module in page.NAMESPACES.items() for name, f in page.functions(module).items()
}


def of_kind(*kinds) -> dict:
    """The functions of these kinds by name, each once."""
    return dict({f: (name, f) for name, f in reversed(ALL.items()) if set(page.kinds(f)) & set(kinds)}.values())


def dispatches(f) -> bool:
    """Whether NumPy asks its arguments by a protocol."""
    return isinstance(f, np.ufunc) or type(f).__name__ == "_ArrayFunctionDispatcher"


def test_each_function_is_of_one_kind():
    assert {name: page.kinds(f) for name, f in ALL.items() if len(page.kinds(f)) != 1} == {}


def test_enough_functions_have_a_derivative():
    assert len(of_kind(page.RULE, page.COMPOSITION)) >= 200


def test_the_walk_finds_what_there_is():
    assert {"np.add", "np.abs", "np.einsum", "np.linalg.svd", "np.fft.rfft", "np.array", "np.load"} <= set(ALL)
    assert not {"np.ndarray", "np.linalg", "np.float64", "np.vectorize"} & set(ALL)


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
    **dict.fromkeys((np.intersect1d, np.setdiff1d, np.setxor1d, np.union1d), lambda f, x: f(x, x)),
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


def test_mends_name_functions_that_there_are():
    """A mend names nothing that is itself refused, and no function that NumPy does not have."""
    import re

    for f, mend in refusals.items():
        if f not in ALL.values():
            continue
        for name in re.findall(r"np(?:\.linalg|\.fft)?\.\w+", mend):
            if "of spmd.stop_gradient" not in mend:
                assert name in ALL, mend
                assert page.kinds(ALL[name])[0] != page.REFUSED or name == "np.arange", mend


def test_what_is_refused_takes_undifferentiated_arrays():
    assert np.unique(Array(np.array([2.0, 1, 2]))).tolist() == [1, 2]
    assert np.union1d(Array(X), [9.0]).tolist() == [-1.5, 0.5, 2, 9]
    for write in (
        lambda x: np.copyto(np.ones(3), x),
        lambda x: np.put(np.ones(3), 0, x),
        lambda x: np.place(np.ones(3), [1, 0, 1], x),
        lambda x: np.putmask(np.ones(3), [1, 0, 1], x),
        lambda x: np.put_along_axis(np.ones(3), np.array([0]), x, 0),
    ):
        with pytest.raises(DifferentiationError, match=r"mend: +y = "):
            grad(write)(X)


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
    have = page.PAGE.read_text()
    if f"NumPy {'.'.join(np.__version__.split('.')[:2])}:" not in have:
        pytest.skip("the page is of another version of NumPy")
    assert have == page.text(), f"docs/functions.md is not what the registry says; run `{page.COMMAND}`"
