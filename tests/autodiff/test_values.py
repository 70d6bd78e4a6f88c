"""Traced values are NumPy's own, bit for bit: of every row of every table, on numbers that are not finite, huge, tiny
and zeros of both signs, and on arrays without dimensions, NumPy's scalars and Python's numbers."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import ROOT
from noted import noted
from rules import Table

import spmd
from spmd.autodiff import grad, hessian, tree, vjp

for path in sorted((ROOT / "tests" / "autodiff" / "rules").glob("test_*.py")):
    importlib.import_module(f"autodiff.rules.{path.stem}")
ROWS = [row for table in Table.all for row in table.rows.values()]
each = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])

MODES = {
    "nonfinite": lambda info: [np.nan, np.inf, -np.inf],
    "huge": lambda info: [info.max, -info.max, info.max / 3],
    "tiny": lambda info: [info.smallest_subnormal, info.tiny / 3, -info.tiny / 3],
    "zero": lambda info: [0.0, -0.0],
}
MIXED = lambda info: list(itertools.chain(*(m(info) for m in MODES.values()), [1.0, -1.0]))

LOOPS = re.compile("hyp|pinv|svd|eig|lstsq|norm|cond|polyfit|roots|qr|solve|inv|det|chol|poly-matrix")
"""Functions of LAPACK and of series, which need not come to an end where numbers are not finite."""
FOLDS = re.compile(r"(power|arctan2)\.(reduce|accumulate)")
"""NumPy's own are wrong where its loops are of AVX512."""


@functools.cache
def draw(row):
    """The arguments of a row, the last of a few that hypothesis draws: not the simplest."""
    drawn = []

    @settings(max_examples=4, derandomize=True, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(data=st.data())
    def run(data):
        drawn.append(row.draw(data))

    run()
    return drawn[-1]


def corrupted(rng, a: Any, mode):
    if a.dtype.kind not in "fc" or not a.size:
        return a
    if a.dtype.kind == "c":
        return np.stack([corrupted(rng, part, mode) for part in (a.real, a.imag)], -1).view(a.dtype)[..., 0]
    special = np.array((MODES.get(mode) or MIXED)(np.finfo(a.dtype)), a.dtype)
    return np.where(rng.random(a.shape) < rng.choice([0.3, 1.0]), rng.choice(special, a.shape), a).astype(a.dtype)


def single(a):
    return a.astype({"f": "f4", "c": "c8"}.get(a.dtype.kind, a.dtype))


def same(x, y) -> bool:
    """Equal to the last bit; any NaN is one."""
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.dtype.kind == "c":
        return same(x.real, y.real) and same(x.imag, y.imag)
    if x.dtype.kind != "f":
        return np.array_equal(x, y)
    x, y = np.where(np.isnan(x), np.nan, x), np.where(np.isnan(y), np.nan, y)
    return np.array_equal(x, y, equal_nan=True) and np.array_equal(np.copysign(1, x[x == 0]), np.copysign(1, y[y == 0]))


def outcome(run):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:
            return type(error)


@each
def test_values_are_numpys_own(row):
    """Of numbers that are not ordinary, some rows in double precision and the others in single."""
    number = ROWS.index(row)
    modes = [] if LOOPS.search(row.name) else [*MODES, "mixed"]
    check_values(row, [(None, False), (None, True), *((mode, (number + k) % 2 == 0) for k, mode in enumerate(modes))])


@pytest.mark.full
@each
def test_values_are_numpys_own_in_both_precisions(row):
    modes = [] if LOOPS.search(row.name) else [*MODES, "mixed"]
    check_values(row, itertools.product(modes, (False, True)))


def check_values(row, cases):
    """cases: the kind of numbers, and whether in single precision."""
    drawn, rng = draw(row), np.random.default_rng(zlib.crc32(row.name.encode()))
    if FOLDS.match(row.name):
        pytest.skip("NumPy's own is wrong on some machines")
    for mode, narrow in cases:
        args = tuple(single(a) if narrow else a for a in drawn)
        args = tuple(corrupted(rng, a, mode) if mode else a for a in args)
        expected = outcome(lambda args=args: row.f(*args))
        value = outcome(lambda args=args: vjp(row.f, *args)[0])
        if isinstance(expected, type) or isinstance(value, type):
            assert value is expected, (mode, args)
            continue
        pairs = list(zip(tree.leaves(value), tree.leaves(expected), strict=True))
        assert all(same(x, y) for x, y in pairs), (mode, args, value, expected)


SCALARS = {
    "array": lambda a: a,
    "numpy": lambda a: a[()],
    "python": lambda a: a.item(),
    "single": lambda a: single(a)[()],
}


@each
def test_arrays_without_dimensions_and_numbers(row):
    """Where NumPy takes them the function does, and its pullback, of all arguments and of one beside arrays."""
    drawn, checked = draw(row), 0
    for kind, scalar in SCALARS.items():
        rng = np.random.default_rng(3)
        try:
            numbers = [scalar(np.asarray(d(rng, ()))) for d in row.domains]
        except (ValueError, TypeError, IndexError):
            continue
        checked += 1
        with noted(kind):
            check_numbers(row, drawn, numbers)
    if not checked:
        pytest.skip("the row's arguments are no numbers")


def check_numbers(row, drawn, numbers):
    combinations = [tuple(numbers)]
    if len(numbers) > 1:
        combinations += [(*drawn[:k], numbers[k], *drawn[k + 1 :]) for k in range(len(numbers))]
    for args in combinations:
        expected = outcome(lambda args=args: row.f(*args))
        if isinstance(expected, type):
            continue
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            value, pull = vjp(row.f, *args)
            pulled = pull(tree.map(np.ones_like, value))
        if not FOLDS.match(row.name):
            pairs = list(zip(tree.leaves(value), tree.leaves(expected), strict=True))
            assert all(same(x, y) for x, y in pairs), (args, value, expected)
        assert [np.shape(g) for g in pulled] == [np.shape(a) for a in args]


# What was seen


@pytest.mark.parametrize("x", [1.5, np.float64(1.5), np.array(1.5)])
def test_tensordot_and_piecewise_of_numbers(x):
    assert grad(lambda x: np.tensordot(x, x, axes=0))(x) == 3
    assert hessian(lambda x: np.tensordot(x, x, axes=0))(x) == 2
    for condition in (lambda x: [x < 0, x >= 0], lambda x: x < 0):
        f = lambda x, c=condition: np.piecewise(x, c(x), [lambda t: t, lambda t: 3 * t * t])
        assert grad(f)(x) == 9
        assert hessian(f)(x) == 6


HUGE = np.float32(3e38)
SEEN = {
    "median": lambda: (np.median, np.full(5, HUGE)),
    "median of two": lambda: (np.median, np.full(4, HUGE)),
    "nanmedian": lambda: (np.nanmedian, np.array([HUGE, np.nan, HUGE])),
    "percentile": lambda: (lambda x: np.percentile(x, 50), np.array([-HUGE, HUGE])),
    "quantile": lambda: (lambda x: np.quantile(x, [0.5, 1]), np.array([HUGE, HUGE, -HUGE, HUGE])),
    "sign": lambda: (np.sign, np.array([complex(np.inf, 1), complex(0, -np.inf), complex(1.7e308, 1.7e308)])),
    "poly": lambda: (np.poly, np.array([np.inf, 1.0, -2.0])),
    "unwrap": lambda: (np.unwrap, np.array([0.0, np.inf, 7.0, np.nan, 1.0])),
    "clip": lambda: (lambda x: np.clip(x, -0.0, 0.0), np.array([0.0, -0.0, np.nan])),
    "dot": lambda: (lambda x: np.dot(x, np.arange(24.0).reshape(2, 3, 4)), np.full(3, 1.7e308)),
}


@pytest.mark.parametrize("name", SEEN)
def test_values_that_differed(name):
    f, x = SEEN[name]()
    with np.errstate(all="ignore"):
        expected = f(x)
        for value in (vjp(f, x)[0], vjp(lambda x: vjp(f, x)[0], x)[0]):
            assert same(value, expected), (value, expected)
        with spmd.Mesh(x=2):
            run = lambda x: spmd.stop_gradient(vjp(f, x)[0])
            for mapped in (spmd.map(run, spmd.P(), spmd.P()), spmd.jit(spmd.map(run, spmd.P(), spmd.P()))):
                for _ in range(3):
                    assert same(mapped(x).numpy(), expected)


def test_warnings_are_numpys_own():
    """A composition warns of nothing that NumPy does not warn of, and of what NumPy does."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vjp(np.median, np.full(5, HUGE))[0] == HUGE
        vjp(np.sign, np.array([complex(np.inf, 1)]))
    with pytest.warns(RuntimeWarning, match="Mean of empty slice"):
        vjp(np.nanmean, np.array([np.nan]))
    with pytest.warns(RuntimeWarning, match="Degrees of freedom") as found:
        vjp(lambda x: np.cov(x, ddof=2), np.array([1.0, 2.0]))
    assert sum("Degrees of freedom" in str(w.message) for w in found) == 1
