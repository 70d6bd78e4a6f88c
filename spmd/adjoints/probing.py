"""Where F* is not F^H, for maps whose matrices are too large to be looked at: by bisection.

The difference D = F* - F^H is known by products only: <x, D y> takes one F x and one F* y. For random x and y it is not
zero, and so it is not for one half of x: halving finds a row of D, halving y then an entry of that row. An entry takes
about log2(n) + log2(m) applications, and further entries of a row log2(m) each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

__all__ = ["PROBES", "Lazily", "wrong_entries"]

PROBES = 192
"""How many applications of F and F* together may serve to find entries."""

T = TypeVar("T")
Vector = np.ndarray
Interval = tuple[int, int]


class Lazily(Sequence, Generic[T]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, count: int, at: Callable[[int], T]):
        self._count, self._at = count, at

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._at(index)


class _Spent(Exception):
    """No more applications are left."""


class _Counted:
    """A map of vectors that may be applied so many times, together with another one."""

    def __init__(self, f: Callable[[Vector], Vector], left: list[int]):
        self.f, self.left = f, left

    def __call__(self, x: Vector) -> Vector:
        if not self.left[0]:
            raise _Spent
        self.left[0] -= 1
        return self.f(x)


def wrong_entries(
    forward: Callable[[Vector], Vector],
    back: Callable[[Vector], Vector],
    shape: Interval,
    bound: float,
    seed: int,
    wanted: int,
) -> list[tuple[int, int, complex, complex]]:
    """(i, j, the entry of F^H, that of F*) for some of the entries in which they differ.

    forward, back: F and F* of vectors, the same on all workers. shape: their lengths, of arguments and of results.
    bound: the largest relative error that rounding explains, 0 where they are exact.
    """
    n, m = shape
    rng = np.random.default_rng([seed, 7])
    x, y = (rng.integers(1, 4, size) * rng.choice((-1, 1), size) for size in shape)
    left = [PROBES]
    forward, back = _Counted(forward, left), _Counted(back, left)
    found: list[tuple[int, int, complex, complex]] = []
    try:
        back_y = back(y)

        def of_rows(lo: int, hi: int) -> tuple[complex, float]:
            part = _only(x, lo, hi)
            image = forward(part)
            given, needed = part @ back_y, np.conj(image) @ y
            return complex(given - needed), _norm(image) * _norm(y) + _norm(part) * _norm(back_y[lo:hi])

        for i in _halved(of_rows, n, bound):
            row = np.conj(forward(_only(np.ones(n), i, i + 1)))

            def of_columns(lo: int, hi: int, i=i, row=row) -> tuple[complex, float]:
                given, needed = back(_only(y, lo, hi))[i], row[lo:hi] @ y[lo:hi]
                return given - needed, abs(given) + _norm(row[lo:hi]) * _norm(y[lo:hi])

            for j in _halved(of_columns, m, bound):
                given = back(_only(np.ones(m), j, j + 1))[i]
                found.append((i, j, complex(row[j]), complex(given)))
                if len(found) == wanted:
                    return found
    except _Spent:
        pass
    return found


def _halved(difference: Callable[[int, int], tuple[complex, float]], size: int, bound: float) -> Iterator[int]:
    """The places at which there is a difference, the largest ones first. difference: over an interval, and the size of
    what it is the difference of."""
    if not size:
        return
    left: list[tuple[float, Interval]] = [(np.inf, (0, size))]
    while left:
        _, (lo, hi) = left.pop()
        if hi - lo == 1:
            yield lo
            continue
        middle = (lo + hi) // 2
        for part in ((lo, middle), (middle, hi)):
            gap, scale = difference(*part)
            if abs(gap) > bound * scale:
                left.append((abs(gap), part))
        left.sort(key=lambda entry: (entry[1][0] - entry[1][1], entry[0]))  # the smallest interval is at the end


def _only(v: Vector, lo: int, hi: int) -> Vector:
    """v without its entries outside of an interval."""
    part = np.zeros_like(v)
    part[lo:hi] = v[lo:hi]
    return part


def _norm(v: Vector) -> float:
    return float(np.linalg.norm(v))
