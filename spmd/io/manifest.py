"""The manifest of a checkpoint: what it holds, in which files, with which checksums.

A checkpoint is a folder. `manifest.json` names every other file that belongs to it. Files that it does not name are
those of a save that goes on or was broken off.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import CheckpointError, CorruptCheckpointError
from spmd.io.container import Stored, dtype_of, stored_as
from spmd.io.files import CHUNK
from spmd.io.trees import decoded
from spmd.layout import Box

__all__ = ["FORMAT", "MANIFEST", "ArrayEntry", "FileEntry", "Manifest", "Piece", "step_folders"]

MANIFEST = "manifest.json"
VERSION = 1
FORMAT = "spmd checkpoint"
_START = b'{"sha256": "'
_DIGITS = 64
_DATA_FILE = re.compile(r"data-[0-9a-f]{16}-[0-9]{5,}-[0-9]{3,}\.safetensors")
"""The names of files with data."""


class Piece(NamedTuple):
    """A box of an array. file: its number in the manifest. offset: of its first byte in the file.

    The entries of the box lie there one after the other, last dimension fastest.
    """

    box: Box
    file: int
    offset: int


class ArrayEntry(NamedTuple):
    """An array of a checkpoint. layout: how it lay when it was saved, for people. pieces: disjoint boxes, which cover
    the array."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    layout: str
    pieces: tuple[Piece, ...]

    @property
    def stored(self) -> Stored:
        stored = stored_as(self.dtype)
        assert stored is not None
        return stored

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FileEntry(NamedTuple):
    """A file of a checkpoint. checksums: of its chunks; None: unknown, for files that others wrote."""

    name: str
    nbytes: int
    checksums: list[str] | None


@dataclass
class Manifest:
    """What a checkpoint holds. tree: the structure, as `spmd.io.trees` writes it. id: of the save that wrote it."""

    id: str
    tree: Any
    arrays: dict[str, ArrayEntry]
    files: list[FileEntry]
    metadata: Any = None
    created: str = ""
    version: int = field(default=VERSION)

    def to_bytes(self) -> bytes:
        """The text of the file. It begins with its SHA-256, which is that of the text with zeros in that place."""
        content = {
            "format": FORMAT,
            "version": self.version,
            "id": self.id,
            "created": self.created,
            "chunk": CHUNK,
            "metadata": self.metadata,
            "tree": self.tree,
            "arrays": {name: _array_json(entry) for name, entry in self.arrays.items()},
            "files": [{"name": f.name, "bytes": f.nbytes, "xxh3_64": "".join(f.checksums or ())} for f in self.files],
        }
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        text = _START + b"0" * _DIGITS + b'", ' + text[1:]
        return _with_digest(text, hashlib.sha256(text).hexdigest())

    @classmethod
    def from_bytes(cls, text: bytes, path: Path) -> Manifest:
        """The manifest of a file's text. Raises CorruptCheckpointError if a byte of it has changed."""
        digest = text[len(_START) : len(_START) + _DIGITS]
        whole = len(text) > len(_START) + _DIGITS and text.startswith(_START)
        if not whole or hashlib.sha256(_with_digest(text, "0" * _DIGITS)).hexdigest().encode() != digest:
            raise _unreadable(path, "a text with another SHA-256 than the one that stands in it")
        try:
            return _of_content(json.loads(text), path)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(path, f"a text with the right SHA-256 that is no manifest ({error!r})") from None


def _of_content(content: Any, path: Path) -> Manifest:
    _check(type(content) is dict, path, "a text that is no object of JSON")
    version = content.get("version")
    if content.get("format") != FORMAT or type(version) is not int or version > VERSION:
        raise CheckpointError.at(
            f"the file {path}",
            got=f"format {content.get('format')!r}, version {version!r}",
            need=f"{FORMAT!r}, version {VERSION} at most",
            mend="read it with the version of spmd that wrote it, or a later one",
        )
    _check(content["chunk"] == CHUNK, path, f"chunks of {content['chunk']} bytes")
    files = [_file(entry, path) for entry in content["files"]]
    arrays = {name: _array(name, entry, files, path) for name, entry in content["arrays"].items()}
    decoded(content["tree"], lambda leaf: arrays[leaf["array"]])
    return Manifest(content["id"], content["tree"], arrays, files, content["metadata"], content["created"], version)


def _with_digest(text: bytes, digits: str) -> bytes:
    return text[: len(_START)] + digits.encode() + text[len(_START) + _DIGITS :]


def _array_json(entry: ArrayEntry) -> dict[str, Any]:
    return {
        "shape": list(entry.shape),
        "dtype": entry.dtype.name,
        "stored": entry.stored.code,
        "layout": entry.layout,
        "pieces": [{"box": [list(side) for side in p.box], "file": p.file, "offset": p.offset} for p in entry.pieces],
    }


def _array(name: str, entry: Mapping[str, Any], files: list[FileEntry], path: Path) -> ArrayEntry:
    dtype = dtype_of(entry["dtype"])
    if dtype is None or stored_as(dtype) is None:
        raise CheckpointError.at(
            f"the array {name!r} in {path}",
            got=f"the dtype {entry['dtype']}",
            need="a dtype that is known here",
            mend="pip install ml_dtypes, which has bfloat16 and float8",
        )
    shape = tuple(entry["shape"])
    _check(all(type(n) is int and n >= 0 for n in shape), path, f"the array {name!r} of shape {shape}")
    pieces = tuple(
        Piece(tuple((start, stop) for start, stop in p["box"]), p["file"], p["offset"]) for p in entry["pieces"]
    )
    for piece in pieces:
        _check(_fits(piece, shape, dtype, files), path, f"the array {name!r} with a piece that does not fit: {piece}")
    return ArrayEntry(name, shape, dtype, entry["layout"], pieces)


def _fits(piece: Piece, shape: tuple[int, ...], dtype: np.dtype, files: list[FileEntry]) -> bool:
    """Whether a piece is a box of the array, and lies in a file."""
    nbytes = math.prod(stop - start for start, stop in piece.box) * dtype.itemsize
    return (
        len(piece.box) == len(shape)
        and all(type(k) is int for k in (*itertools.chain(*piece.box), piece.file, piece.offset))
        and all(0 <= start < stop <= n for (start, stop), n in zip(piece.box, shape, strict=True))
        and 0 <= piece.file < len(files)
        and 0 <= piece.offset <= files[piece.file].nbytes - nbytes
    )


def _file(entry: Mapping[str, Any], path: Path) -> FileEntry:
    name, nbytes, digits = entry["name"], entry["bytes"], entry["xxh3_64"]
    # No name leads out of the folder.
    _check(_DATA_FILE.fullmatch(name) is not None, path, f"the file name {name!r}")
    chunks = -(-nbytes // CHUNK)
    _check(nbytes >= 0 and len(digits) == 16 * chunks, path, f"the file {name} without a checksum for each chunk")
    return FileEntry(name, nbytes, [digits[k : k + 16] for k in range(0, len(digits), 16)])


def _check(fits: bool, path: Path, got: str) -> None:
    if not fits:
        raise _unreadable(path, got)


def _unreadable(path: Path, got: str) -> CorruptCheckpointError:
    return CorruptCheckpointError.at(
        f"the file {path}", got=got, need="a manifest as it was written", mend="load another checkpoint"
    )


_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def step_folders(directory: Path, *, committed: bool = True) -> dict[int, Path]:
    """The folders `step-<number>` of a directory, in ascending order, as `CheckpointManager` makes them.

    committed: those with a manifest. False: the others, of saves that go on or were broken off.
    """
    found = {path: _STEP.fullmatch(path.name) for path in (directory.iterdir() if directory.is_dir() else ())}
    steps = {int(m[1]): path for path, m in found.items() if m and (path / MANIFEST).exists() is committed}
    return dict(sorted(steps.items()))
