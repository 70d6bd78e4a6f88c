"""Arrays in files of other tools for fields: Zarr and HDF5. `spmd.put` reads both block by block.

The first member makes the arrays, under a temporary name beside the target. Then the members write: to Zarr at the same
time, each its own chunks; to HDF5 in turn. When all have written, the target gets its name.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmd.array import PartitionedArray, relayout
from spmd.errors import CheckpointError, describe, message
from spmd.io.agreement import Contents
from spmd.io.chunks import aligned_layout, chunk_boxes, common_chunks, default_chunks, is_of_chunks
from spmd.io.files import PlacedWriter, flush_folder, make_folder_for, remove
from spmd.io.members import Members, members_of
from spmd.io.saving import meshes_in
from spmd.io.sources import Source, source_of
from spmd.io.trees import ROOT, map_leaves
from spmd.io.writing import slab_boxes
from spmd.layout import Box
from spmd.mesh import WORKER
from spmd.tracebacks import api_boundary

__all__ = ["write_hdf5", "write_zarr"]


@api_boundary
def write_zarr(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    chunks: Any = None,
    attributes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write an array to the folder `path` in Zarr's format 3, each worker its chunks. Collective.

    tree: a global or bare array of any shape and layout, or a dictionary of them by name; those in it are groups.
    chunks: the shape of the chunks, or for a dictionary a dictionary by the same names. By default, each block consists
    of whole chunks of at most 16 MiB if the cuts allow that, as those of blocks of equal lengths do.
    attributes: what JSON can hold, by name, for the array or the outermost group. overwrite: replace what Zarr wrote.

    No chunk is written by two processes: where a block ends within a chunk, its entries are sent to the one that writes
    it. Sums of unreduced arrays are taken first. Needs memory of a chunk, and where entries are sent a copy of one
    array at a time. Cost: four small messages to all, one more for each array, and what is sent.
    Others see the target when all is written; if overwrite replaces one, for a moment there is none.
    Raises CheckpointError on all processes: for what exists, for leaves that are no arrays, for dtypes that the format
    lacks, and for whatever `spmd.save` raises it; ImportError without the package zarr, `pip install "spmd[fields]"`.

        >>> import tempfile, zarr
        >>> with tempfile.TemporaryDirectory() as folder, spmd.Mesh(rows=2):
        ...     spmd.io.write_zarr(f"{folder}/u.zarr", spmd.ones((4, 2), spec=P("rows")), attributes={"time": 0.5})
        ...     u = zarr.open_array(f"{folder}/u.zarr", mode="r")
        ...     spmd.put(u, P(None, "rows")).spec, u.chunks, u.attrs["time"]
        (P(None, 'rows'), (2, 2), 0.5)
    """
    _write(_Zarr, path, tree, chunks, attributes, overwrite)


@api_boundary
def write_hdf5(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    chunks: Any = None,
    attributes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write an array to the HDF5 file `path`; the processes write their blocks in turn. Collective.

    tree: a dictionary of global or bare arrays by name, of any shapes and layouts; those in it are groups. Or one
    array, whose dataset has the name "value". chunks: the shape of the chunks, or for a dictionary a dictionary by the
    same names; by default datasets are contiguous.
    attributes: numbers, strings, and lists of one of them, by name, for the dataset or the outermost group.
    overwrite: replace an HDF5 file.

    Sums of unreduced arrays are taken first. Needs memory of a few MiB besides the arrays. Cost: four small messages to
    all, and one for each process that writes, while the others wait.
    The target is flushed, and then gets its name; if overwrite replaces one, at every moment it is one or the other.
    Raises CheckpointError on all processes: for what exists, for leaves that are no arrays, for dtypes that the format
    lacks, and for whatever `spmd.save` raises it; ImportError without the package h5py, `pip install "spmd[fields]"`.

        >>> import h5py, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, spmd.Mesh(rows=2):
        ...     u = spmd.ones((4, 2), spec=P("rows"))
        ...     spmd.io.write_hdf5(f"{folder}/fields.h5", {"u": u}, attributes={"time": 0.5})
        ...     with h5py.File(f"{folder}/fields.h5") as file:
        ...         spmd.put(file["u"], P(None, "rows")).spec, file.attrs["time"].item()
        (P(None, 'rows'), 0.5)
    """
    _write(_Hdf5, path, tree, chunks, attributes, overwrite)


def _write(
    kind: type[_Fields],
    path: str | os.PathLike[str],
    tree: Any,
    chunks: Any,
    attributes: Any,
    overwrite: bool,
) -> None:
    members = members_of(kind.where, meshes_in(tree))
    fields = kind(Path(os.path.realpath(os.fspath(path))), members)
    agreed = members.together(partial(fields.check, tree, chunks, attributes, overwrite))
    fields.contents.agree(agreed)
    fields.id = agreed[0]["id"]
    try:
        members.together(fields.make)
        members.together(fields.see)
        fields.write()
        members.together(fields.commit)
    except BaseException:
        fields.abandon()
        raise


class _Node(NamedTuple):
    """A group or an array of a file. path: the names that lead to it. name: of the array in the tree; None: a group."""

    path: tuple[str, ...]
    name: str | None


class _Fields:
    """One call: what the formats have in common."""

    where: str
    package: str
    format: str

    def __init__(self, target: Path, members: Members):
        self.target = target
        self.members = members
        self.id = ""
        self.chunks: dict[str, tuple[int, ...]] = {}

    @property
    def temporary(self) -> Path:
        return self.target.with_name(f"{self.target.name}.{self.id}.tmp")

    def check(self, tree: Any, chunks: Any, attributes: Any, overwrite: Any) -> dict[str, Any]:
        """What must be equal on all members, and the id of the call from the first one. Nothing is written."""
        self.library = self._library()
        self.attributes = self._checked_attributes({} if attributes is None else attributes)
        self._check_target(overwrite)
        self.arrays: dict[str, PartitionedArray] = {}
        map_leaves(tree, self._note)
        chunks = _plain(chunks)
        self.contents = Contents(tree, self.members, {"chunks": chunks, "attributes": self.attributes})
        self.nodes = [*self._nodes(self.contents.tree, ())]
        for name, source in self.contents.sources.items():
            self._check_dtype(name, source.dtype)
        self.chunks = self._checked_chunks(chunks)
        return self.contents.digests() | ({"id": secrets.token_hex(8)} if self.members.is_first else {})

    def _note(self, name: str, x: Any) -> None:
        if type(x) is PartitionedArray:
            self.arrays[name] = x

    def _library(self) -> Any:
        try:
            return importlib.import_module(self.package)
        except ImportError as error:
            raise ImportError(
                message(
                    self.where,
                    got=f"no package {self.package}",
                    need=f"the package {self.package}, which writes {self.format}",
                    mend='pip install "spmd[fields]"',
                )
            ) from error

    def _check_target(self, overwrite: Any) -> None:
        """By the first member: raise if the target exists, and may not be replaced."""
        if not isinstance(overwrite, bool):
            self._refuse("overwrite", describe(overwrite), "True or False", "overwrite=True")
        if not self.members.is_first or not os.path.lexists(self.target):
            return
        if not overwrite:
            self._refuse("path", f"{self.target}, which exists", "a new name", "another name, or overwrite=True")
        if not self._is_ours():
            got = f"{self.target}, which is no {self.format}, with overwrite=True"
            self._refuse("path", got, f"a new name, or that of {self.format} to replace", "another name, or remove it")

    def _is_ours(self) -> bool:
        """Whether the target is of this format."""
        raise NotImplementedError

    def _refuse(self, argument: str, got: str, need: str, mend: str) -> None:
        raise CheckpointError.at(self.where, argument=argument, got=got, need=need, mend=mend)

    def _checked_attributes(self, attributes: Any) -> dict[str, Any]:
        try:
            if not isinstance(attributes, Mapping) or any(type(key) is not str for key in attributes):
                raise TypeError(describe(attributes))
            return json.loads(json.dumps(dict(attributes), allow_nan=False))
        except (TypeError, ValueError) as error:
            self._refuse("attributes", str(error), "what JSON can hold, by name", "x.item() or x.tolist() of arrays")
            raise

    def _nodes(self, node: Any, path: tuple[str, ...]) -> Iterator[_Node]:
        """The groups and arrays of a tree as JSON, each group before what it holds."""
        name = ".".join(path) or ROOT
        if isinstance(node, dict) and "array" in node:
            yield _Node(path, node["array"])
        elif isinstance(node, dict) and node.keys() == {"dict"}:
            yield _Node(path, None)
            for key, child in node["dict"]:
                if not self._may_name(key):
                    got = f"the key {key!r} at {name}"
                    self._refuse("tree", got, f"names that {self.format} can hold", "rename the key; dictionaries nest")
                yield from self._nodes(child, (*path, key))
        else:
            got = ", ".join(node) if isinstance(node, dict) else describe(node)
            self._refuse(
                f"tree, at {name}",
                "what only some workers hold" if got == "held" else got,
                "arrays, in dictionaries by name",
                "np.asarray(x) of a number, attributes= of what describes the arrays, a dictionary for a list",
            )

    def _may_name(self, key: Any) -> bool:
        return type(key) is str and key not in ("", ".", "..") and not re.search("[/\0]", key)

    def _check_dtype(self, name: str, dtype: np.dtype) -> None:
        if np.dtype(dtype.type).isbuiltin != 1:
            self._refuse(
                f"tree, the leaf {name!r}",
                f"dtype {dtype}",
                f"a dtype that {self.format} has a type for",
                "x.astype(np.float32)",
            )

    def _checked_chunks(self, chunks: Any) -> dict[str, tuple[int, ...]]:
        """The chunks that are given, by the names of the arrays."""
        checked = {}
        of_path = {node.path: node.name for node in self.nodes}
        for path, lengths in _items(chunks, ()):
            name = of_path.get(path)
            shown = "chunks" + "".join(f"[{key!r}]" for key in path)
            if name is None:
                got = f"chunks for {'.'.join(map(str, path)) or 'a dictionary'}"
                self._refuse(
                    "chunks", got, "names of arrays of the tree", "a tuple for an array, a dictionary for a dictionary"
                )
            shape = self.contents.sources[str(name)].shape
            if (
                not isinstance(lengths, list)
                or len(lengths) != len(shape)
                or any(type(n) is not int or n < 1 for n in lengths)
            ):
                need = f"a length for each of the {len(shape)} dimensions, 1 or more"
                got = str(tuple(lengths)) if isinstance(lengths, list) else describe(lengths)
                self._refuse(shown, f"{got} for shape {list(shape)}", need, "chunks=None chooses them")
            checked[name] = tuple(min(length, max(1, n)) for length, n in zip(lengths, shape, strict=True))
        return checked

    def make(self) -> None:
        """By the first member: make the groups and arrays, without entries."""
        if self.members.is_first:
            make_folder_for(self.where, self.target.parent)
            self._make()

    def _make(self) -> None:
        raise NotImplementedError

    def see(self) -> None:
        """Raise unless this member sees what the first one has made."""
        if not self.temporary.exists():
            raise self.members.unseen(self.target.parent, "write")

    def write(self) -> None:
        """Write the entries. Collective."""
        raise NotImplementedError

    def commit(self) -> None:
        """By the first member, when all have written: give the target its name."""
        raise NotImplementedError

    def abandon(self) -> None:
        """By the first member: remove what has no name yet. All members have ended their writing."""
        if self.members.is_first and self.id:
            with suppress(OSError):
                shutil.rmtree(self.temporary) if self.temporary.is_dir() else remove([self.temporary])


class _Zarr(_Fields):
    where, package, format = "spmd.io.write_zarr", "zarr", "Zarr"

    def _library(self) -> Any:
        zarr = super()._library()
        if not hasattr(zarr, "create_array"):
            got = f"zarr {zarr.__version__}"
            raise ImportError(message(self.where, got=got, need="zarr 3", mend='pip install "spmd[fields]"'))
        return zarr

    def _is_ours(self) -> bool:
        marks = ("zarr.json", ".zgroup", ".zarray")
        return self.target.is_dir() and any((self.target / mark).is_file() for mark in marks)

    def _may_name(self, key: Any) -> bool:
        return super()._may_name(key) and not key.startswith("__") and key != "zarr.json"

    def _make(self) -> None:
        for path, name in self.nodes:
            store = {"store": str(self.temporary), "attributes": {} if path else self.attributes, "zarr_format": 3}
            place = "/".join(path)
            if name is None:
                self.library.create_group(**store, path=place)
                continue
            source = self.contents.sources[name]
            dtype = source.dtype.newbyteorder("=")
            self.library.create_array(
                **store, name=place or None, shape=source.shape, chunks=self._chunks_of(name), dtype=dtype
            )

    def _chunks_of(self, name: str) -> tuple[int, ...]:
        source = self.contents.sources[name]
        return self.chunks.get(name) or default_chunks(source.shape, source.dtype.itemsize, source.holders)

    def write(self) -> None:
        for path, name in self.nodes:
            if name is not None:
                source = self._aligned(name)
                self.members.together(partial(self._write_chunks, path, name, source))

    def _aligned(self, name: str) -> Source:
        """The array in blocks of whole chunks. Collective."""
        x = self.arrays.get(name)
        if x is None or WORKER.get() is not None:
            return self.contents.sources[name]
        layout = aligned_layout(x.layout.reduced, self._chunks_of(name))
        if layout == x.layout:
            return self.contents.sources[name]
        return source_of(relayout(x.reduced, layout), self.where, name, self.members)

    def _write_chunks(self, path: tuple[str, ...], name: str, source: Source) -> None:
        chunks = self._chunks_of(name)
        array = None
        for box, holders in source.holders.items():
            if not is_of_chunks(box, source.shape, chunks):
                self._refuse(
                    "chunks",
                    f"chunks of shape {list(chunks)} for {name!r}, of which a block ends within one",
                    "blocks of whole chunks, in bodies and of arrays of other libraries",
                    f"chunks={common_chunks(source.shape, source.holders)}, or return it from the map: outside of "
                    "bodies global arrays may have any chunks",
                )
            for k, chunk in enumerate(chunk_boxes(box, chunks)):
                if holders[k % len(holders)] == self.members.own:
                    if array is None:
                        array = self.library.open_array(store=str(self.temporary), path="/".join(path), mode="r+")
                    array[_slices(chunk)] = _native(source.block(chunk))

    def commit(self) -> None:
        if not self.members.is_first:
            return
        old = self.target.with_name(f"{self.target.name}.{self.id}.old")
        is_replaced = self.target.exists()
        if is_replaced:
            os.rename(self.target, old)
        try:
            os.rename(self.temporary, self.target)
        except BaseException:
            if is_replaced:
                os.rename(old, self.target)
            raise
        if is_replaced:
            shutil.rmtree(old, ignore_errors=True)


class _Hdf5(_Fields):
    where, package, format = "spmd.io.write_hdf5", "h5py", "HDF5"

    def _is_ours(self) -> bool:
        return self.target.is_file() and bool(self.library.is_hdf5(self.target))

    def _checked_attributes(self, attributes: Any) -> dict[str, Any]:
        checked = super()._checked_attributes(attributes)
        for key, value in checked.items():
            kinds = {type(item) for item in (value if isinstance(value, list) else [value])}
            fits = len(kinds) < 2 and kinds <= {bool, int, float, str} and "\0" not in f"{key}{value}"
            if not fits or not key or (kinds == {int} and np.asarray(value).dtype == object):
                got = f"{describe(value)} by the name {key!r}"
                need = "numbers, strings, and lists of one of them, by names"
                self._refuse("attributes", got, need, "json.dumps(x) of others")
        return checked

    def _make(self) -> None:
        with self.library.File(self.temporary, "w") as file:
            for path, name in self.nodes:
                place = "/".join(path)
                if name is None:
                    made = file.require_group(place or "/")
                else:
                    source = self.contents.sources[name]
                    dtype = source.dtype.newbyteorder("=")
                    chunks = self.chunks.get(name) if math.prod(source.shape) else None
                    made = file.create_dataset(place or ROOT, source.shape, dtype, chunks=chunks or None)
                if not path:
                    made.attrs.update(self.attributes)

    def write(self) -> None:
        boxes: dict[int, list[tuple[str, str, Box]]] = {}
        for path, name in self.nodes:
            for box, holders in self.contents.sources[name].holders.items() if name is not None else ():
                boxes.setdefault(holders[0], []).append(("/".join(path) or ROOT, str(name), box))
        for member in sorted(boxes):
            own = boxes[member] if member == self.members.own else []
            self.members.together(partial(self._write_boxes, own))

    def _write_boxes(self, boxes: list[tuple[str, str, Box]]) -> None:
        if not boxes:
            return
        with self.library.File(self.temporary, "r+") as file:
            for place, name, box in boxes:
                source = self.contents.sources[name]
                for part in slab_boxes(box, source.dtype.itemsize):
                    file[place][_slices(part)] = _native(source.block(part))

    def commit(self) -> None:
        if self.members.is_first:
            PlacedWriter(self.temporary).finish()
            os.replace(self.temporary, self.target)
            flush_folder(self.target.parent)


def _plain(chunks: Any) -> Any:
    """Chunks as JSON; what is none of integers, tuples and dictionaries as its description."""
    if isinstance(chunks, Mapping):
        return {str(key): _plain(value) for key, value in chunks.items()}
    if isinstance(chunks, tuple | list):
        return [int(n) if isinstance(n, np.integer) else n if type(n) is int else describe(n) for n in chunks]
    return chunks if chunks is None else describe(chunks)


def _items(chunks: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(chunks, dict):
        for key, value in chunks.items():
            yield from _items(value, (*path, key))
    elif chunks is not None:
        yield path, chunks


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(itertools.starmap(slice, box))


def _native(block: np.ndarray) -> np.ndarray:
    return block.astype(block.dtype.newbyteorder("="), copy=False)
