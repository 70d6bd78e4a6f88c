"""Functions of the standard whose arguments or results differ from those of NumPy's function of the name."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spmd.array_api.creation import placed
from spmd.array_api.info import mesh_of
from spmd.autodiff.namespace import argsort as ordered
from spmd.autodiff.namespace import finfo as limits
from spmd.autodiff.namespace import sort as sorted_entries
from spmd.tracebacks import api_boundary

__all__ = ["argsort", "astype", "broadcast_arrays", "clip", "finfo", "meshgrid", "sort", "take_along_axis"]


@api_boundary
def sort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """As `np.sort`, of which equal entries keep their order; also from the largest to the smallest."""
    return sorted_entries(x, axis, stable=stable, descending=descending)


@api_boundary
def argsort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """As `np.argsort`, of which equal entries keep their order; also from the largest to the smallest."""
    return ordered(x, axis, stable=stable, descending=descending)


@api_boundary
def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    """As `np.take_along_axis`."""
    return np.take_along_axis(x, indices, axis)


@api_boundary
def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """As `np.clip`."""
    return np.clip(x, min, max)


@api_boundary
def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    """As `np.astype`; device: a mesh."""
    return placed(x.astype(dtype, copy=copy), mesh_of("xp.astype", device), None)


@api_boundary
def meshgrid(*arrays: Any, indexing: Any = "xy") -> list[Any]:
    """As `np.meshgrid`, in a list."""
    return [*np.meshgrid(*arrays, indexing=indexing)]


@api_boundary
def broadcast_arrays(*arrays: Any) -> list[Any]:
    """As `np.broadcast_arrays`, in a list."""
    return [*np.broadcast_arrays(*arrays)]


class FloatInfo(NamedTuple):
    """What `finfo` says of a dtype. Numbers are Python's; those of a complex dtype are those of its parts."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: np.dtype


def finfo(type: Any, /) -> FloatInfo:
    """The limits of the floating-point dtype that is given, or that an array has. As `np.finfo`, in Python numbers."""
    info = limits(type)
    eps, most, least, normal = (float(n) for n in (info.eps, info.max, info.min, info.smallest_normal))
    return FloatInfo(info.bits, eps, most, least, normal, info.dtype)
