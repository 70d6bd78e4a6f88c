"""Entries in which F* is not F^H, by bisection, for maps with large matrices.

<x, D y> of the difference D = F* - F^H takes one F x and one F* y. If D is not zero, it is not zero for random x and y,
nor for x restricted to one of its halves: halving x finds a row of D, and halving y an entry of that row. This takes
about log2(n) + log2(m) applications, and log2(m) for each further entry of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

__all__ = ["PROBE_LIMIT", "LazySequence", "wrong_entries"]

PROBE_LIMIT = 192
"""The most applications of F and F* together."""

T = TypeVar("T")
Vector = np.ndarray
Interval = tuple[int, int]


class LazySequence(Sequence, Generic[T]):
    """A sequence that computes its items at access."""

    def __init__(self, length: int, item: Callable[[int], T]):
        self._length, self._item = length, item

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._item(index)


class _BudgetSpent(Exception):
    """The budget of applications is used up."""


class _Budgeted:
    """A map of vectors with a budget of applications, which it shares with another one."""

    def __init__(self, f: Callable[[Vector], Vector], budget: list[int]):
        self.f, self.budget = f, budget

    def __call__(self, x: Vector) -> Vector:
        if not self.budget[0]:
            raise _BudgetSpent
        self.budget[0] -= 1
        return self.f(x)


def wrong_entries(
    forward: Callable[[Vector], Vector],
    back: Callable[[Vector], Vector],
    shape: Interval,
    bound: float,
    seed: int,
    count: int,
) -> list[tuple[int, int, complex, complex]]:
    """(i, j, the entry of F^H, that of F*) for some of the entries in which they differ.

    forward, back: F and F* of vectors, the same on all workers. shape: their lengths, of arguments and of results.
    bound: the largest relative error that rounding explains, 0 where they are exact.
    """
    n, m = shape
    rng = np.random.default_rng([seed, 7])
    x, y = (rng.integers(1, 4, size) * rng.choice((-1, 1), size) for size in shape)
    budget = [PROBE_LIMIT]
    forward, back = _Budgeted(forward, budget), _Budgeted(back, budget)
    entries: list[tuple[int, int, complex, complex]] = []
    try:
        back_y = back(y)

        def row_gap(lo: int, hi: int) -> tuple[complex, float]:
            part = _restricted(x, lo, hi)
            image = forward(part)
            actual, expected = part @ back_y, np.conj(image) @ y
            return complex(actual - expected), _norm(image) * _norm(y) + _norm(part) * _norm(back_y[lo:hi])

        for i in _bisect(row_gap, n, bound):
            row = np.conj(forward(_restricted(np.ones(n), i, i + 1)))

            def column_gap(lo: int, hi: int, i=i, row=row) -> tuple[complex, float]:
                actual, expected = back(_restricted(y, lo, hi))[i], row[lo:hi] @ y[lo:hi]
                return actual - expected, abs(actual) + _norm(row[lo:hi]) * _norm(y[lo:hi])

            for j in _bisect(column_gap, m, bound):
                actual = back(_restricted(np.ones(m), j, j + 1))[i]
                entries.append((i, j, complex(row[j]), complex(actual)))
                if len(entries) == count:
                    return entries
    except _BudgetSpent:
        pass
    return entries


def _bisect(gap_of: Callable[[int, int], tuple[complex, float]], size: int, bound: float) -> Iterator[int]:
    """The indices with a difference, the largest first. gap_of: the difference over an interval, and its scale."""
    if not size:
        return
    intervals: list[tuple[float, Interval]] = [(np.inf, (0, size))]
    while intervals:
        _, (lo, hi) = intervals.pop()
        if hi - lo == 1:
            yield lo
            continue
        middle = (lo + hi) // 2
        for part in ((lo, middle), (middle, hi)):
            gap, scale = gap_of(*part)
            if abs(gap) > bound * scale:
                intervals.append((abs(gap), part))
        intervals.sort(key=lambda entry: (entry[1][0] - entry[1][1], entry[0]))  # the smallest interval is at the end


def _restricted(v: Vector, lo: int, hi: int) -> Vector:
    """v without its entries outside of an interval."""
    part = np.zeros_like(v)
    part[lo:hi] = v[lo:hi]
    return part


def _norm(v: Vector) -> float:
    return float(np.linalg.norm(v))
