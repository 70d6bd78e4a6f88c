"""Two processes write Zarr and HDF5 to a folder that is named on the command line, and read their blocks of both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import h5py
import numpy as np
import zarr

import spmd
from spmd import P
from spmd.errors import CheckpointError

folder = Path(sys.argv[1])
mesh = spmd.Mesh(x=2)
(own,) = mesh.local_workers
w = np.arange(37 * 10, dtype=np.float64).reshape(37, 10)
uneven = spmd.Layout(w.shape, P("x"), mesh.axes, [(30, 7), None])
some = spmd.Layout.grid(w.shape, (1, 1), mesh.axes, [1])
tree = {
    "w": spmd.put(w, uneven, mesh),
    "group": {"columns": spmd.put(w, P(None, "x"), mesh), "one": spmd.put(w, some, mesh)},
    "sum": spmd.put(w, P(unreduced={"x"}), mesh),
    "b": np.arange(5),
}
chunks = {"w": (4, 10), "sum": (10, 4)}

noted = []


def note(kind, method):
    """Note the slices by which arrays of this kind are read or written."""
    known = getattr(kind, method)

    def noting(self, index, *value):
        noted.append((self.name.strip("/"), *((s.start, s.stop) for s in index)))
        return known(self, index, *value)

    setattr(kind, method, noting)


for kind in (zarr.Array, h5py.Dataset):
    note(kind, "__getitem__")
    note(kind, "__setitem__")

spmd.io.write_zarr(folder / "fields.zarr", tree, chunks=chunks, attributes={"time": 0.5})
written = mesh.transport.share({own: noted})
for name, lengths in (("w", (4, 10)), ("sum", (10, 4)), ("group/columns", (37, 5)), ("b", (5,))):
    starts = [[tuple(start for start, _ in box) for n, *box in written[m] if n == name] for m in range(2)]
    shape = (5,) if name == "b" else w.shape
    grid = np.ndindex(*(-(-n // k) for n, k in zip(shape, lengths, strict=True)))
    chunk_starts = [tuple(n * k for n, k in zip(at, lengths, strict=True)) for at in grid]
    assert sorted(starts[0] + starts[1]) == sorted(chunk_starts), (name, starts)  # each once
    if name == "w":  # the block of 30 rows ends within a chunk
        assert [len(s) for s in starts] == [8, 2], starts
    if name in ("sum", "group/columns"):  # what both hold they share out
        assert len(starts[0]) - len(starts[1]) in (0, 1), starts

noted.clear()
spmd.io.write_hdf5(folder / "fields.h5", tree, attributes={"time": 0.5})
assert [(n, box[0]) for n, *box in noted if n == "w"] == [("w", ((0, 30), (30, 37))[own])], noted

for file in (zarr.open_group(folder / "fields.zarr", mode="r"), h5py.File(folder / "fields.h5", "r")):
    noted.clear()
    back = spmd.put(file["w"], uneven, mesh)
    assert noted == [("w", ((0, 30), (30, 37))[own], (0, 10))], noted
    (block,) = back.blocks.values()
    np.testing.assert_array_equal(block, w[:30] if own == 0 else w[30:])
file.close()


def error_of(write, place: Path, tree: dict, **options) -> Exception:
    try:
        write(place, tree, **options)
    except (CheckpointError, OSError) as error:
        return error
    raise AssertionError(place)


before = sorted(os.listdir(folder))
for write, name in ((spmd.io.write_zarr, "fields.zarr"), (spmd.io.write_hdf5, "fields.h5")):
    for place, wrong, words in (
        ("wrong", tree | {"n": 3}, "int 3"),
        ("wrong", tree | {"b": np.arange(5) + own}, "values that differ"),
        ("wrong", tree | {"b": np.arange(5 + own)}, "int64[5]"),
        (name, tree, "which exists"),
    ):
        error = error_of(write, folder / place, wrong)
        assert isinstance(error, CheckpointError)
        assert words in str(error), error
for kind, write, name in (
    (zarr.Array, spmd.io.write_zarr, "fields.zarr"),
    (h5py.Dataset, spmd.io.write_hdf5, "fields.h5"),
):

    def full(self, index, value):
        if own == 1:
            raise OSError(28, "No space left on device")

    kind.__setitem__ = full
    error = error_of(write, folder / name, tree, overwrite=True)
    assert isinstance(error, CheckpointError)
    assert "No space left on device" in str(error), error
mesh.transport.share({own: 0})  # the first has removed what was begun
assert sorted(os.listdir(folder)) == before, os.listdir(folder)
