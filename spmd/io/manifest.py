"""The manifest of a checkpoint: what it holds, in which files, with which checksums.

A checkpoint is a folder. `manifest.json` names every other file that belongs to it. Files that it does not name are
those of a save that goes on or was broken off.
"""

from __future__ import annotations

import hashlib
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
from spmd.layout import Box

__all__ = ["MANIFEST", "ArrayEntry", "FileEntry", "Manifest", "Piece"]

MANIFEST = "manifest.json"
VERSION = 1
_FORMAT = "spmd checkpoint"
_START = b'{"sha256": "'
_DIGITS = 64
_DATA_FILE = re.compile(r"data-[0-9a-f]{16}-\d{5}-\d{3}\.safetensors")
"""Only such names may stand in a manifest: no name leads out of the folder."""


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
            "format": _FORMAT,
            "version": self.version,
            "id": self.id,
            "created": self.created,
            "chunk": CHUNK,
            "metadata": self.metadata,
            "tree": self.tree,
            "arrays": {name: _array_json(entry) for name, entry in self.arrays.items()},
            "files": [{"name": f.name, "bytes": f.nbytes, "xxh3_64": "".join(f.checksums or ())} for f in self.files],
        }
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        text = _START + b"0" * _DIGITS + b'", ' + text[1:]
        return _with_digest(text, hashlib.sha256(text).hexdigest())

    @classmethod
    def from_bytes(cls, text: bytes, path: Path) -> Manifest:
        """The manifest of a file's text. Raises CorruptCheckpointError if a byte of it has changed."""
        digest = text[len(_START) : len(_START) + _DIGITS]
        whole = len(text) > len(_START) + _DIGITS and text.startswith(_START)
        if not whole or hashlib.sha256(_with_digest(text, "0" * _DIGITS)).hexdigest().encode() != digest:
            raise _unreadable(path, "a text with another SHA-256 than the one that stands in it")
        content = json.loads(text)
        if content.get("format") != _FORMAT or content.get("version", VERSION + 1) > VERSION:
            raise CheckpointError.at(
                f"the file {path}",
                got=f"format {content.get('format')!r}, version {content.get('version')}",
                need=f"{_FORMAT!r}, version {VERSION} at most",
                mend="read it with the version of spmd that wrote it, or a later one",
            )
        return cls(
            content["id"],
            content["tree"],
            {name: _array(name, entry, path) for name, entry in content["arrays"].items()},
            [_file(entry, path) for entry in content["files"]],
            content["metadata"],
            content["created"],
            content["version"],
        )


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


def _array(name: str, entry: Mapping[str, Any], path: Path) -> ArrayEntry:
    dtype = dtype_of(entry["dtype"])
    if dtype is None:
        raise CheckpointError.at(
            f"the array {name!r} in {path}",
            got=f"the dtype {entry['dtype']}",
            need="a dtype that is known here",
            mend="pip install ml_dtypes, which has bfloat16 and float8",
        )
    pieces = tuple(
        Piece(tuple((start, stop) for start, stop in p["box"]), p["file"], p["offset"]) for p in entry["pieces"]
    )
    return ArrayEntry(name, tuple(entry["shape"]), dtype, entry["layout"], pieces)


def _file(entry: Mapping[str, Any], path: Path) -> FileEntry:
    name, digits = entry["name"], entry["xxh3_64"]
    if not _DATA_FILE.fullmatch(name):
        raise _unreadable(path, f"the file name {name!r}")
    return FileEntry(name, entry["bytes"], [digits[k : k + 16] for k in range(0, len(digits), 16)])


def _unreadable(path: Path, got: str) -> CorruptCheckpointError:
    return CorruptCheckpointError.at(
        f"the file {path}", got=got, need="a manifest as it was written", mend="load another checkpoint"
    )
