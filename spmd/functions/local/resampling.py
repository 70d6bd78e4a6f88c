"""Weighted sums of entries along an axis, on one block of NumPy or CuPy."""

from __future__ import annotations

from typing import Any

from spmd import kernels
from spmd.autodiff.registry import primitive

__all__ = ["resample"]


def _resample_vjp(g, _ans, _x, *, taps, axis) -> Any:
    return _resample(g, taps=taps.T, axis=axis)


@primitive("resample", _resample_vjp)
def _resample(x, *, taps, axis) -> Any:
    return kernels.of(x).resample(x, *taps.for_input(x), axis)


def resample(x: Any, taps: Any, axis: int) -> Any:
    """Along an axis, output o is the sum of weight[o, k] * x[index[o, k]], of these taps."""
    return _resample(x, taps=taps, axis=axis)
