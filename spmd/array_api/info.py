"""What the standard's inspection functions say, and the move between devices: the device of an array is its mesh."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.array import PartitionedArray, check_usable
from spmd.errors import MeshError, describe
from spmd.layout import P
from spmd.mesh import Mesh, current_mesh
from spmd.placement import put
from spmd.tracebacks import api_boundary

__all__ = ["VERSIONS", "ArrayNamespaceInfo", "mesh_of", "to_device"]

VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")


def mesh_of(where: str, device: Any) -> Mesh | None:
    """The mesh that an argument `device` names, if it names one."""
    if device is not None and not isinstance(device, Mesh):
        raise MeshError.at(
            where,
            argument="device",
            got=repr(device),
            need="a Mesh: the device of a global array is the mesh that it is on",
            mend="device=x.device, or leave it out for the mesh of the enclosing `with mesh:`",
        )
    return device


@api_boundary
def to_device(self: PartitionedArray, device: Mesh, /, *, stream: Any = None) -> PartitionedArray:
    """The array on another mesh, as copies on all its workers; on its own mesh the array itself. Collective."""
    check_usable("x.to_device", self)
    mesh = mesh_of("x.to_device", device)
    if stream is not None:
        raise MeshError.at(
            "x.to_device",
            argument="stream",
            got=describe(stream),
            need="None: each worker computes on a stream of its own",
            mend="x.to_device(mesh)",
        )
    return self if mesh in (None, self.mesh) else put(self.numpy(), P(), mesh)


_numpys: Any = np.__array_namespace_info__()


class ArrayNamespaceInfo:
    """The standard's inspection functions. As `np.__array_namespace_info__()`, with meshes as devices."""

    def capabilities(self) -> dict[str, Any]:
        """Masks as indices, and functions whose results have shapes that depend on values: global arrays have both."""
        return _numpys.capabilities()

    def default_device(self) -> Mesh | None:
        """The mesh of the enclosing `with mesh:`; None without one."""
        return current_mesh()

    def devices(self) -> list[Mesh]:
        """The mesh of the enclosing `with mesh:`, if there is one. Any mesh that is made is a device."""
        mesh = current_mesh()
        return [] if mesh is None else [mesh]

    def default_dtypes(self, *, device: Mesh | None = None) -> dict[str, np.dtype]:
        """The dtypes of arrays for which none is named, by kind."""
        mesh_of("default_dtypes", device)
        return _numpys.default_dtypes()

    def dtypes(self, *, device: Mesh | None = None, kind: str | tuple[str, ...] | None = None) -> dict[str, np.dtype]:
        """The dtypes of the standard by name: all, or those of a kind as `np.isdtype` takes it."""
        mesh_of("dtypes", device)
        return _numpys.dtypes(kind=kind)
