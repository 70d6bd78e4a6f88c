"""Global arrays that are made block by block: no worker makes, or holds, more than its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.layout import P, Spec
from spmd.mesh import Mesh
from spmd.placement import from_callback
from spmd.tracebacks import api_boundary

__all__ = ["arange", "eye", "full", "linspace", "ones", "zeros"]

_Shape = int | Sequence[int]
_COPIES = P()


def _shape(shape: _Shape) -> tuple[int, ...]:
    return (int(shape),) if np.ndim(shape) == 0 else tuple(map(int, shape))  # type: ignore[arg-type]


def _lengths(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in index)


@api_boundary
def zeros(shape: _Shape, dtype: Any = float, *, spec: Spec = _COPIES, mesh: Mesh | None = None) -> PartitionedArray:
    """A global array of zeros, laid out by a spec; by default each worker has a copy. As `np.zeros`."""
    return from_callback(_shape(shape), spec, lambda index: np.zeros(_lengths(index), dtype), mesh)


@api_boundary
def ones(shape: _Shape, dtype: Any = float, *, spec: Spec = _COPIES, mesh: Mesh | None = None) -> PartitionedArray:
    """A global array of ones; see `zeros`."""
    return from_callback(_shape(shape), spec, lambda index: np.ones(_lengths(index), dtype), mesh)


@api_boundary
def full(
    shape: _Shape, fill_value: Any, dtype: Any = None, *, spec: Spec = _COPIES, mesh: Mesh | None = None
) -> PartitionedArray:
    """A global array of one number; see `zeros`."""
    return from_callback(_shape(shape), spec, lambda index: np.full(_lengths(index), fill_value, dtype), mesh)


@api_boundary
def arange(
    start: Any, stop: Any = None, step: Any = 1, dtype: Any = None, *, spec: Spec = _COPIES, mesh: Mesh | None = None
) -> PartitionedArray:
    """start, start + step, ... before stop, as a global array; see `zeros`. As `np.arange`, with the same bits."""
    start, stop = (0, start) if stop is None else (start, stop)
    n = max(0, math.ceil((stop - start) / step))
    dtype = np.arange(start, start + 0 * stop, step, dtype=dtype).dtype
    first = np.asarray(start).astype(dtype)
    apart = np.asarray(start + step).astype(dtype) - first

    def block(index: tuple[slice, ...]) -> np.ndarray:
        (s,) = index
        return (first + np.arange(s.start, s.stop).astype(dtype) * apart).astype(dtype)

    return from_callback((n,), spec, block, mesh)


@api_boundary
def linspace(
    start: Any,
    stop: Any,
    num: int = 50,
    endpoint: bool = True,
    *,
    dtype: Any = None,
    spec: Spec = _COPIES,
    mesh: Mesh | None = None,
) -> PartitionedArray:
    """`num` numbers from start to stop, evenly apart, as a global array; see `zeros`. As `np.linspace`."""
    intervals = max(1, num - 1 if endpoint else num)
    apart = (stop - start) / intervals
    kind = np.linspace(start, stop, 0, dtype=dtype).dtype

    def block(index: tuple[slice, ...]) -> np.ndarray:
        (s,) = index
        values = np.arange(s.start, s.stop) * apart + start
        if endpoint and num > 1 and s.start < s.stop == num:
            values[-1] = stop
        return (np.floor(values) if kind.kind in "iu" else values).astype(kind)

    return from_callback((num,), spec, block, mesh)


@api_boundary
def eye(
    n_rows: int,
    n_cols: int | None = None,
    k: int = 0,
    dtype: Any = float,
    *,
    spec: Spec = _COPIES,
    mesh: Mesh | None = None,
) -> PartitionedArray:
    """Ones on the k-th diagonal, as a global array; see `zeros`. As `np.eye`."""

    def block(index: tuple[slice, ...]) -> np.ndarray:
        rows, cols = index
        return np.eye(rows.stop - rows.start, cols.stop - cols.start, k + rows.start - cols.start, dtype)

    return from_callback((n_rows, n_rows if n_cols is None else n_cols), spec, block, mesh)
