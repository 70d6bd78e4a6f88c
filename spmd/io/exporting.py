"""Whole tensors in safetensors files, in the form of Hugging Face's models, for other tools to load.

The first member makes the files with temporary names, in their full length. Every member writes the boxes that it holds
to their places, a few MiB at a time, so no process holds a tensor that is split. Then the files get their names.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import CheckpointError, describe
from spmd.io.agreement import Contents
from spmd.io.boxes import flat_index, slices_within, volume, whole_box
from spmd.io.container import exported_as, header
from spmd.io.files import Lock, PlacedWriter, flush_folder, make_folder_for, remove, rename, replace_file
from spmd.io.manifest import MANIFEST
from spmd.io.members import Members, members_of
from spmd.io.saving import meshes_in
from spmd.io.sources import Source
from spmd.io.trees import some
from spmd.io.writing import plan_of, slab_boxes
from spmd.layout import Box
from spmd.plan import overlap
from spmd.tracebacks import api_boundary

__all__ = ["export"]

_WHERE = "spmd.io.export"
_INDEX = "model.safetensors.index.json"
_EXPORTED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_TEMPORARY = re.compile(r"export-([0-9a-f]{16})-(\d{5}|index)\.tmp")
_METADATA = {"format": "pt"}
"""Hugging Face's tools open no file without it. It names a convention for the names of tensors, and no framework that
is needed to read them."""


@api_boundary
def export(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    max_file_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the whole arrays of a tree to the folder `path`, as safetensors files that other tools load. Collective.

    tree: arrays as `spmd.save` takes them, of any shapes and layouts, and modules, which count as their `state_dict`.
    A name is the path of a leaf, joined by dots: `layers.0.weight`. A dictionary by names gives its names.
    max_file_bytes: the entries of one file, unless one array has more. If all fit, the file is `model.safetensors`;
    else there are `model-00001-of-00003.safetensors`, ... and `model.safetensors.index.json`, which names the file of
    each tensor. metadata: strings by name, for the headers.

    Every entry is written once, by a process that holds it, to its place in a file that all write; sums of unreduced
    arrays are taken first. Needs memory of a few MiB besides the tree. Cost: four small messages to all.
    The files are flushed and then renamed, the index last. An export to the same folder replaces the earlier one; if
    the program is killed while the files are renamed, neither is whole. `spmd.save` replaces a checkpoint at once.
    Raises CheckpointError on all processes: for leaves that are no arrays and dtypes that the format lacks, with their
    names, and for whatever `spmd.save` raises it.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, spmd.Mesh(model=2):
        ...     spmd.io.export(folder, {"head": {"weight": spmd.ones((4, 2), np.float32, spec=P("model"))}})
        ...     spmd.load(folder, specs={"head.weight": P(None, "model")})
        {'head.weight': PartitionedArray([[1., 1.],
                          [1., 1.],
                          [1., 1.],
                          [1., 1.]], dtype=float32, spec=P(None, 'model'))}
    """
    members = members_of(_WHERE, meshes_in(tree))
    exporting = _Export(Path(os.path.abspath(os.fspath(path))), members)
    try:
        exporting.begin(tree, max_file_bytes, metadata)
        members.together(exporting.write, exporting.abandon)
        members.together(exporting.commit, exporting.abandon)
    finally:
        exporting.release()


class _File(NamedTuple):
    """A file that is exported. start: its header. offsets: of its tensors, by name."""

    name: str
    start: bytes
    offsets: Mapping[str, int]
    nbytes: int


class _Export:
    """One call of `export`."""

    def __init__(self, folder: Path, members: Members):
        self.folder = folder
        self.members = members
        self.id = ""
        self.files: list[_File] = []
        self._lock: Lock | None = None

    def begin(self, tree: Any, max_file_bytes: int, metadata: Mapping[str, str] | None) -> None:
        """Check that all export the same, and make the files."""
        options = {"max_file_bytes": max_file_bytes, "metadata": metadata}
        agreed = self.members.together(partial(self._check, tree, options))
        self.contents.agree(agreed)
        self.id = agreed[0]["id"]
        self.files = _files_of(self.contents.sources, max_file_bytes, _METADATA | dict(metadata or {}))
        self.members.together(self._make_files, self.abandon)

    def _check(self, tree: Any, options: dict[str, Any]) -> dict[str, Any]:
        _check_options(**options)
        options["metadata"] = dict(options["metadata"] or {})
        if (self.folder / MANIFEST).exists():
            raise CheckpointError.at(
                _WHERE,
                argument="path",
                got=f"{self.folder}, a checkpoint of spmd.save",
                need="another folder, or a new name",
                mend=f"spmd.io.export({str(self.folder / 'exported')!r}, tree)",
            )
        self.contents = Contents(tree, self.members, options)
        constants = self.contents.constants()
        if constants:
            raise CheckpointError.at(
                _WHERE,
                argument="tree",
                got=f"leaves that are no arrays: {some(constants)}",
                need="arrays",
                mend="np.asarray(x) of a number; leave out what is no number, or give it as metadata",
            )
        for name, source in self.contents.sources.items():
            _check_tensor(name, source.dtype)
        return self.contents.digests() | ({"id": secrets.token_hex(8)} if self.members.is_first else {})

    def _temporary(self, k: int) -> Path:
        return self.folder / f"export-{self.id}-{k:05d}.tmp"

    def _make_files(self) -> None:
        """By the first member. It holds a lock on the first file until that gets its name, which is the last one to."""
        if not self.members.is_first:
            return
        make_folder_for(_WHERE, self.folder)
        self._lock = Lock(self._temporary(0), _WHERE)
        _remove_leftovers(self.folder, self.id)
        for k, file in enumerate(self.files):
            writer = PlacedWriter(self._temporary(k), file.nbytes)
            try:
                writer.write(0, file.start)
            finally:
                writer.close()

    def write(self) -> None:
        """Write and flush what this member has to write."""
        sources = self.contents.sources
        boxes: dict[str, list[Box]] = {}
        for _, pieces in plan_of(self.id, sources, self.members.size).of_member(self.members.own):
            for piece in pieces:
                boxes.setdefault(piece.name, []).append(piece.box)
        for k, file in enumerate(self.files):
            own = [name for name in file.offsets if name in boxes]
            if not own and not self.members.is_first:
                continue
            writer = self._opened(k)
            try:
                for name in own:
                    _write_boxes(writer, file.offsets[name], sources[name], boxes[name])
                writer.finish()
            finally:
                writer.close()

    def _opened(self, k: int) -> PlacedWriter:
        try:
            return PlacedWriter(self._temporary(k))
        except FileNotFoundError:
            raise self.members.unseen(self.folder, "export") from None

    def commit(self) -> None:
        """By the first member, when all have written: give the files their names."""
        if not self.members.is_first:
            return
        names = [file.name for file in self.files]
        remove([self.folder / _INDEX])  # it would name files of both exports
        for k in reversed(range(len(names))):
            rename(self._temporary(k), self.folder / names[k])
        flush_folder(self.folder)
        if len(names) > 1:
            text = json.dumps(self._index(), indent=2, ensure_ascii=False).encode()
            replace_file(self.folder / _INDEX, text, f"export-{self.id}-index.tmp")
        others = [name for name in os.listdir(self.folder) if _EXPORTED.fullmatch(name) and name not in names]
        remove(self.folder / name for name in others)

    def _index(self) -> dict[str, Any]:
        total = sum(math.prod(s.shape) * s.dtype.itemsize for s in self.contents.sources.values())
        files = {name: file.name for file in self.files for name in file.offsets}
        return {"metadata": {"total_size": total}, "weight_map": {name: files[name] for name in self.contents.sources}}

    def abandon(self) -> None:
        """By the first member: remove the files that have no names yet."""
        if self.members.is_first:
            remove(self._temporary(k) for k in range(len(self.files)))

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _check_options(max_file_bytes: Any, metadata: Any) -> None:
    if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise CheckpointError.at(
            _WHERE,
            argument="max_file_bytes",
            got=describe(max_file_bytes),
            need="a positive int",
            mend="max_file_bytes=5_000_000_000",
        )
    items = [*metadata.items()] if isinstance(metadata, Mapping) else [] if metadata is None else [metadata]
    wrong = [item for item in items if type(item) is not tuple or [*map(type, item)] != [str, str]]
    if wrong:
        raise CheckpointError.at(
            _WHERE,
            argument="metadata",
            got=describe(wrong[0]),
            need="strings by name: the format holds no others",
            mend='metadata={"steps": "1000"}; json.dumps(x) of what is no string',
        )


def _check_tensor(name: str, dtype: np.dtype) -> None:
    if name == "__metadata__":
        raise CheckpointError.at(
            _WHERE,
            argument="tree",
            got="a leaf with the name '__metadata__', which the format keeps for itself",
            need="another name",
            mend="rename the key; strings go into metadata=",
        )
    if exported_as(dtype) is None:
        raise CheckpointError.at(
            _WHERE,
            argument=f"tree, the leaf {name!r}",
            got=f"dtype {dtype}",
            need="a dtype that the format has a type for",
            mend="x.astype(np.complex64), or the arrays x.real and x.imag"
            if dtype.kind == "c"
            else "x.astype(np.float32)",
        )


def _files_of(sources: Mapping[str, Source], max_file_bytes: int, metadata: Mapping[str, str]) -> list[_File]:
    """The files of these arrays, filled in their order. In a file, entries of more bytes come first, so that each
    tensor begins at a multiple of the bytes of an entry."""
    groups: list[list[str]] = [[]]
    room = max_file_bytes
    for name, source in sources.items():
        nbytes = math.prod(source.shape) * source.dtype.itemsize
        if nbytes > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= nbytes
    files = []
    for k, group in enumerate(groups):
        names = sorted(group, key=lambda name: -sources[name].dtype.itemsize)
        tensors = [_tensor(name, sources[name]) for name in names]
        start, offsets = header(tensors, metadata)
        name = "model.safetensors" if len(groups) == 1 else f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors"
        nbytes = len(start) + sum(nbytes for *_, nbytes in tensors)
        files.append(_File(name, start, dict(zip(names, offsets, strict=True)), nbytes))
    return files


def _tensor(name: str, source: Source) -> tuple[str, str, tuple[int, ...], int]:
    code = exported_as(source.dtype)
    assert code is not None
    return name, code, source.shape, math.prod(source.shape) * source.dtype.itemsize


def _remove_leftovers(folder: Path, own: str) -> None:
    """Remove the temporary files of exports that were broken off. Raises CheckpointError if one goes on."""
    matches = [m for m in map(_TEMPORARY.fullmatch, os.listdir(folder)) if m and m[1] != own]
    for m in matches:
        if m[2] == "00000":
            Lock(folder / m[0], _WHERE).release()
    remove(folder / m[0] for m in matches)


def _write_boxes(file: PlacedWriter, offset: int, source: Source, boxes: list[Box]) -> None:
    """Write boxes of an array to their places in a whole one, which lies at an offset of the file."""
    dtype = source.dtype.newbyteorder("=")
    for slab in slab_boxes(whole_box(source.shape), dtype.itemsize):
        parts = [part for box in boxes if (part := overlap(box, slab)) is not None]
        if not parts:
            continue
        data = np.empty([stop - start for start, stop in slab], dtype)
        for part in parts:
            data[slices_within(part, slab)] = source.block(part)
        flat = data.reshape(-1).view(np.uint8)
        at = offset + flat_index([start for start, _ in slab], source.shape) * dtype.itemsize
        for start, stop in _runs(parts, slab):
            file.write(at + start * dtype.itemsize, flat[start * dtype.itemsize : stop * dtype.itemsize])


def _runs(parts: Iterable[Box], slab: Box) -> list[tuple[int, int]]:
    """The ranges of entries of a slab, last dimension fastest, that disjoint boxes cover; adjacent ones are joined."""
    lengths = tuple(stop - start for start, stop in slab)
    starts, stops = [], []
    for part in parts:
        split = [d for d in range(len(slab)) if part[d] != slab[d]]
        depth = split[-1] if split else 0
        at = np.zeros(1, np.int64)  # where the rows before this dimension begin
        for d in range(depth):
            inside = np.arange(part[d][0] - slab[d][0], part[d][1] - slab[d][0])
            at = (at[:, None] * lengths[d] + inside).reshape(-1)
        begin = part[depth][0] - slab[depth][0] if slab else 0
        inner = math.prod(lengths[depth + 1 :])
        at = (at * lengths[depth] + begin) * inner if slab else at
        starts.append(at)
        stops.append(at + volume(part[depth : depth + 1]) * inner)
    first = np.sort(np.concatenate(starts))
    last = np.sort(np.concatenate(stops))
    is_joined = first[1:] == last[:-1]
    return [
        *zip(
            first[np.concatenate([[True], ~is_joined])].tolist(),
            last[np.concatenate([~is_joined, [True]])].tolist(),
            strict=True,
        )
    ]
