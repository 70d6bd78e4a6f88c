"""Checkpoints: save and load trees of arrays, on any mesh; and files of other tools."""

from typing import TYPE_CHECKING

from spmd.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from spmd.io.exporting import export
    from spmd.io.fields import write_hdf5, write_zarr
    from spmd.io.inspection import inspect
    from spmd.io.loading import load
    from spmd.io.manager import CheckpointManager
    from spmd.io.saving import save
    from spmd.io.structs import ShapeDtypeStruct

__all__ = [
    "CheckpointManager",
    "ShapeDtypeStruct",
    "export",
    "inspect",
    "load",
    "save",
    "write_hdf5",
    "write_zarr",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "spmd.io.exporting": ("export",),
            "spmd.io.fields": ("write_hdf5", "write_zarr"),
            "spmd.io.inspection": ("inspect",),
            "spmd.io.loading": ("load",),
            "spmd.io.manager": ("CheckpointManager",),
            "spmd.io.saving": ("save",),
            "spmd.io.structs": ("ShapeDtypeStruct",),
        },
    )
