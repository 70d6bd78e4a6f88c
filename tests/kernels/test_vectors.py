"""Vector instructions: what loops make by them is what their plain forms make, for rows of every length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spmd.kernels import jit
from spmd.kernels.cpu import vectors

pytestmark = pytest.mark.skipif(not jit.available(), reason="needs numba")


@jit.loops("out")
def combined(out: Any, to: int, n: int, x: Any, at: int, offsets: Any, begin: int, w: Any, first: int, count: int):
    vectors.combine(out, to, n, x, at, offsets, begin, w, first, count)


@jit.loops("out")
def with_taps(out: Any, to: int, apart: int, x: Any, at: int, offsets: Any, w: Any, row: int):
    vectors.add_taps(out, to, apart, x, at, offsets, w, row)


@jit.loops("sums")
def dotted(sums: Any, g: Any, count: int, x: Any, offsets: Any, shape: Any, steps: Any):
    vectors.dot_taps(sums, 1, 2, g, 5, 300, count, x, 9, offsets, shape, steps)


@jit.loops("out")
def fetched(out: Any, x: Any, upto: int):
    out[0] = vectors.fetch(x, 0, upto, x.itemsize)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_rows_of_every_length_are_combined(dtype, count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=2000).astype(dtype)
    w = rng.normal(size=(2, 12)).astype(dtype)
    offsets = rng.integers(-40, 900, 14)
    whole = np.full(700, np.nan, dtype)
    combined(whole, 3, 650, x, 50, offsets, 2, w, 12, count)
    for n in (*range(70), 127, 128, 129, 255, 300, 513):
        out = np.full(700, np.nan, dtype)
        combined(out, 3, n, x, 50, offsets, 2, w, 12, count)
        plain = np.full(700, np.nan, dtype)
        vectors.combine(plain, 3, n, x, 50, offsets, 2, w, 12, count)
        np.testing.assert_allclose(out, plain, rtol=1e-5 if dtype == "float32" else 1e-13, atol=1e-5)
        np.testing.assert_array_equal(out[3 : 3 + n], whole[3 : 3 + n], "bits depend on the length of the row")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_filters_at_once(dtype):
    rng = np.random.default_rng(0)
    wide, rows = vectors.places(np.dtype(dtype)), vectors.filters()
    x, w = rng.normal(size=900).astype(dtype), rng.normal(size=(2 * rows, 7)).astype(dtype)
    offsets = rng.integers(0, 400, 7)
    apart = wide + 5
    out, plain = (np.full(rows * apart + 3, np.nan, dtype) for _ in range(2))
    for target, form in ((out, with_taps), (plain, vectors.add_taps)):
        form(target, 3, apart, x, 9, offsets, w, rows)
    np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-5)
    assert np.count_nonzero(~np.isnan(out)) == rows * wide


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_products_of_rows_of_every_length(dtype, count):
    """Entries that are none of theirs are no numbers, and do not matter."""
    rng = np.random.default_rng(count)
    lanes, taps = vectors.lanes(np.dtype(dtype)), vectors.taps()
    offsets = rng.integers(0, 400, 2 + taps)
    for columns in (*range(lanes, 3 * lanes + 1), 100):
        shape, steps = (3, columns), (columns + 1, columns + 2)
        g, x = np.full(1600, np.nan, dtype), np.full(1600, np.nan, dtype)
        for y in range(3):
            for a in range(count):
                g[5 + a * 300 + y * steps[0] :][:columns] = rng.normal(size=columns)
            for offset in offsets[2:]:
                x[9 + offset + y * steps[1] :][:columns] = rng.normal(size=columns)
        sums, plain = np.ones((7, 3 + taps)), np.ones((7, 3 + taps))
        for target, form in (
            (sums, dotted),
            (plain, lambda s, *a: vectors.dot_taps(s, 1, 2, a[0], 5, 300, a[1], a[2], 9, *a[3:])),
        ):
            form(target, g, count, x, offsets, shape, steps)
        assert np.isfinite(sums[: 1 + count]).all()
        np.testing.assert_allclose(
            sums[: 1 + count], plain[: 1 + count], rtol=1e-5 if dtype == "float32" else 1e-13, atol=1e-4
        )
        assert np.all(sums[0] == 1)
        assert np.all(sums[1:, [0, 1, 2 + taps]] == 1)
        assert np.all(sums[1 + vectors.ROWS :] == 1)


def test_what_is_fetched_ends_with_the_array():
    x, end = np.zeros(100, "float32"), np.zeros(1, np.int64)
    fetched(end, x, 10**9)
    assert 100 <= end[0] < 100 + 64
    fetched(end, x[:0], 5)
    assert end[0] == 0
