"""The standard's functions that make arrays: global ones, by default with a copy on each worker of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import creation
from spmd.array import PartitionedArray
from spmd.array_api.info import mesh_of
from spmd.autodiff import creation as traced
from spmd.autodiff.namespace import namespace
from spmd.autodiff.tracer import find
from spmd.errors import LayoutError, describe
from spmd.global_ops.call import global_value
from spmd.global_ops.resharding import reshard
from spmd.layout import P, Spec
from spmd.map_arguments import copied_to_all
from spmd.placement import mesh_for, put
from spmd.tracebacks import api_boundary

__all__ = [
    "arange",
    "asarray",
    "empty",
    "empty_like",
    "eye",
    "from_dlpack",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "placed",
    "zeros",
    "zeros_like",
]

_Shape = int | Sequence[int]
_COPIES = P()


@api_boundary
def zeros(shape: _Shape, *, dtype: Any = None, device: Any = None, spec: Spec = _COPIES) -> PartitionedArray:
    """As `spmd.zeros`; device: a mesh."""
    return creation.zeros(shape, dtype, spec=spec, mesh=mesh_of("xp.zeros", device))


@api_boundary
def ones(shape: _Shape, *, dtype: Any = None, device: Any = None, spec: Spec = _COPIES) -> PartitionedArray:
    """As `spmd.ones`; device: a mesh."""
    return creation.ones(shape, dtype, spec=spec, mesh=mesh_of("xp.ones", device))


@api_boundary
def empty(shape: _Shape, *, dtype: Any = None, device: Any = None, spec: Spec = _COPIES) -> PartitionedArray:
    """As `spmd.zeros`: what an empty array holds is the same on all workers. device: a mesh."""
    return creation.zeros(shape, dtype, spec=spec, mesh=mesh_of("xp.empty", device))


@api_boundary
def full(
    shape: _Shape, fill_value: Any, *, dtype: Any = None, device: Any = None, spec: Spec = _COPIES
) -> PartitionedArray:
    """As `spmd.full`; device: a mesh."""
    return creation.full(shape, fill_value, dtype, spec=spec, mesh=mesh_of("xp.full", device))


@api_boundary
def arange(
    start: Any,
    /,
    stop: Any = None,
    step: Any = 1,
    *,
    dtype: Any = None,
    device: Any = None,
    spec: Spec = _COPIES,
) -> PartitionedArray:
    """As `spmd.arange`; device: a mesh."""
    return creation.arange(start, stop, step, dtype, spec=spec, mesh=mesh_of("xp.arange", device))


@api_boundary
def linspace(
    start: Any,
    stop: Any,
    /,
    num: int,
    *,
    dtype: Any = None,
    device: Any = None,
    endpoint: bool = True,
    spec: Spec = _COPIES,
) -> PartitionedArray:
    """As `spmd.linspace`; device: a mesh."""
    mesh = mesh_of("xp.linspace", device)
    return creation.linspace(start, stop, num, endpoint, dtype=dtype, spec=spec, mesh=mesh)


@api_boundary
def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: Any = None,
    device: Any = None,
    spec: Spec = _COPIES,
) -> PartitionedArray:
    """As `spmd.eye`; device: a mesh."""
    return creation.eye(n_rows, n_cols, k, dtype, spec=spec, mesh=mesh_of("xp.eye", device))


@api_boundary
def asarray(
    obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None, spec: Spec | None = None
) -> Any:
    """A global array of numbers, lists of them, or an array. As `np.asarray`.

    A global array, traced or not, stays where it is. Bare data, which every process has, become a copy on each worker
    of the mesh. device: a mesh. spec: another layout. copy: False raises where data are copied or converted.
    """
    where, mesh = "xp.asarray", mesh_of("xp.asarray", device)
    value = global_value(obj)
    if copy is False and (value is None or dtype not in (None, value.dtype) or mesh not in (None, value.mesh)):
        raise LayoutError.at(
            where,
            argument="copy",
            got=f"False, for {describe(obj)}",
            need="True or None: workers get blocks of their own, of one dtype",
            mend="leave copy out",
        )
    if value is None:
        return _of_bare(where, obj, dtype, mesh, spec)
    obj = obj if dtype in (None, value.dtype) else obj.astype(dtype)
    return placed(obj, mesh, spec)


def _of_bare(where: str, obj: Any, dtype: Any, mesh: Any, spec: Spec | None) -> Any:
    mesh = mesh_for(mesh, where)
    if find(obj, []):
        x = traced.asarray(obj, dtype=dtype)
        return placed(x if global_value(x) is not None else copied_to_all(x, mesh), None, spec)
    # Arrays of other libraries, which `put` takes, are converted on the mesh.
    x = obj if hasattr(obj, "__dlpack__") and not isinstance(obj, np.ndarray) else np.asarray(obj, dtype=dtype)
    x = put(x, P() if spec is None else spec, mesh)
    return x if dtype in (None, x.dtype) else x.astype(dtype)


def placed(x: Any, device: Any, spec: Spec | None) -> Any:
    """A global array on a mesh and in a layout, where these are given."""
    x = x if device is None else x.to_device(device)
    return x if spec is None else reshard(x, spec)


@api_boundary
def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None, spec: Spec | None = None) -> Any:
    """A global array of an array of another library, by the DLPack protocol: a copy on each worker. See `asarray`."""
    return asarray(x, device=device, copy=copy, spec=spec)


def _like(name: str) -> Any:
    make = getattr(namespace, name)

    @api_boundary
    def like(x: Any, /, *, dtype: Any = None, device: Any = None, spec: Spec | None = None) -> Any:
        return placed(make(x, dtype=dtype), mesh_of(f"xp.{name}", device), spec)

    like.__name__ = like.__qualname__ = name
    like.__doc__ = f"As `np.{name}`, laid out as x. device: a mesh. spec: another layout."
    return like


zeros_like, ones_like, empty_like = map(_like, ("zeros_like", "ones_like", "empty_like"))


@api_boundary
def full_like(x: Any, /, fill_value: Any, *, dtype: Any = None, device: Any = None, spec: Spec | None = None) -> Any:
    """As `np.full_like`, laid out as x. device: a mesh. spec: another layout."""
    return placed(np.full_like(x, fill_value, dtype=dtype), mesh_of("xp.full_like", device), spec)
