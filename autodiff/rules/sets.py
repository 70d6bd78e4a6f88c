"""Rules of functions that take arrays as sets: sort, then take. Of entries that are equal the first one stands for all.

Their derivative exists where no two entries are equal; where some are, they jump, and what is said here is the
derivative of the entries that are taken. The entries of an intersection are equal by their nature: it has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.autodiff.primitive import composite
from spmd.autodiff.rules.reduce import array
from spmd.autodiff.rules.statistics import without_derivative


def _unique(x, fun, axis=None, **options) -> tuple[Any, Any, Any, Any]:
    """What np.unique finds: values in the order of `fun`, and first places, numbers and counts."""
    values, (_, first, numbers, counts) = without_derivative(
        lambda x: (fun(x), np.unique(x, True, True, True, axis=axis, **options)), x
    )
    if axis is None:
        # NumPy may leave the values unsorted where it is asked for no more.
        rank = np.argsort(np.argsort(values, kind="stable"), kind="stable")
        return np.ravel(x)[first[rank]], first, numbers, counts
    return np.take(x, first, axis), first, numbers, counts


@composite(np.unique, by_numpy=True)
def unique(ar, return_index=False, return_inverse=False, return_counts=False, axis=None, *, equal_nan=True, **options):
    def fun(x):
        return np.unique(x, axis=axis, equal_nan=equal_nan, **(options if not any(requested) else {}))

    requested = return_index, return_inverse, return_counts
    values, *others = _unique(array(ar), fun, axis, equal_nan=equal_nan)
    results = (values, *(other for other, is_requested in zip(others, requested, strict=True) if is_requested))
    return results if any(requested) else values


def _declare(name: str, *parts: int) -> None:
    """One of the functions of the Array API standard, which tell NaN from NaN; its results by their numbers."""
    fun = getattr(np, name)

    @composite(fun, by_numpy=True)
    def run(x):
        results = _unique(array(x), lambda x: fun(x)[0] if parts else fun(x), equal_nan=False)
        return type(fun(np.zeros(0)))(*(results[k] for k in (0, *parts))) if parts else results[0]


_declare("unique_all", 1, 2, 3)
_declare("unique_counts", 3)
_declare("unique_inverse", 2)
_declare("unique_values")


@composite(np.union1d)
def union1d(ar1, ar2):
    return np.unique(np.concatenate([np.ravel(ar1), np.ravel(ar2)]))


@composite(np.setdiff1d)
def setdiff1d(ar1, ar2, assume_unique=False):
    x = np.ravel(ar1) if assume_unique else np.unique(ar1)
    return x[np.isin(x, ar2, invert=True)]


@composite(np.setxor1d)
def setxor1d(ar1, ar2, assume_unique=False):
    x, y = (ar1, ar2) if assume_unique else (np.unique(ar1), np.unique(ar2))
    both = np.sort(np.concatenate([np.ravel(x), np.ravel(y)]))
    change = np.concatenate([np.ones_like(both[:1], dtype=bool), both[1:] != both[:-1], np.ones_like(both[:1], bool)])
    return both[change[1:] & change[:-1]]
