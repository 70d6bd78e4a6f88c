"""What a checkpoint holds, and which of its bytes are not those that were written, without loading it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.dtypes import dtype_name
from spmd.errors import CheckpointError, CorruptCheckpointError
from spmd.io.files import CHUNK, ChunkReader
from spmd.io.manifest import MANIFEST, FileEntry, Manifest, step_folders
from spmd.io.reading import open_checkpoint, read_manifest
from spmd.io.trees import constant, json_nodes
from spmd.representations.numbers import count_text, size_text
from spmd.representations.tables import Printed, Report, Table
from spmd.tracebacks import api_boundary

__all__ = ["ArrayInfo", "CheckpointInfo", "Damage", "inspect"]

_VALUE_WIDTH = 48


class ArrayInfo(NamedTuple):
    """An array of a checkpoint. layout: how it lay when it was saved; "" for bare arrays. pieces: how many boxes it is
    stored in. files: the names of the files that hold them."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    layout: str
    nbytes: int
    pieces: int
    files: tuple[str, ...]


class Damage(NamedTuple):
    """A part of a file that is not as it was written. what: which part, and what is wrong. leaves: the names of the
    arrays that have entries there. in_header: whether it holds bytes of the header of the file."""

    file: str
    what: str
    leaves: tuple[str, ...]
    in_header: bool

    def __str__(self) -> str:
        concerned = [*(["the header of the file"] if self.in_header else []), *map(repr, self.leaves)]
        return f"{self.file}: {self.what}: {', '.join(concerned) or 'no leaf'}"


class CheckpointInfo(Printed):
    """What a checkpoint holds.

    path: of the folder or file. arrays: an `ArrayInfo` for each, by name, in the order of the tree. constants: numbers,
    strings, bytes and None, by name. metadata: as it was saved. id, created: of the save; "" for files of other tools.
    files: how many. nbytes: of all arrays. has_checksums: whether `verify` can compare the entries.
    `print` shows a table.
    """

    def __init__(self, path: Path, folder: Path, manifest: Manifest):
        self.path = path
        self.metadata = manifest.metadata
        self.id = manifest.id
        self.created = manifest.created
        self.files = len(manifest.files)
        self.has_checksums = all(f.checksums is not None for f in manifest.files)
        self.arrays: dict[str, ArrayInfo] = {}
        self.constants: dict[str, Any] = {}
        self._folder = folder
        self._manifest = manifest
        for name, node, is_leaf in json_nodes(manifest.tree):
            if is_leaf and isinstance(node, dict) and "array" in node:
                self.arrays[name] = _info(name, node["array"], manifest)
            elif is_leaf:
                self.constants[name] = constant(node)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())

    def verify(self) -> list[Damage]:
        """Read all files and compare their checksums: what is damaged, with the names of the leaves concerned.

        An empty list: every byte is as it was written. Files of other tools have no checksums: of them only the header
        and the length are compared. Raises CheckpointError if another save replaces the checkpoint meanwhile.
        """
        damages = [d for k, file in enumerate(self._manifest.files) for d in self._verify_file(k, file)]
        if damages and self.id and read_manifest(self._folder).id != self.id:
            raise CheckpointError.at(
                f"the checkpoint {self.path}",
                got="another save that replaced it while it was read",
                need="one checkpoint",
                mend="spmd.io.inspect(path).verify() once more",
            )
        return damages

    def _verify_file(self, k: int, file: FileEntry) -> Iterator[Damage]:
        path = self._folder / file.name
        try:
            reader = ChunkReader(path, file.nbytes, file.checksums)
        except FileNotFoundError:
            yield self._damage(k, "no such file", 0, file.nbytes)
            return
        except CorruptCheckpointError:
            yield self._damage(k, f"{path.stat().st_size} bytes in place of {file.nbytes}", 0, file.nbytes)
            return
        try:
            for chunk in reader.verify():
                start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, file.nbytes)
                yield self._damage(k, f"bytes {start} to {stop} have another checksum", start, stop)
        except OSError as error:
            yield self._damage(k, f"cannot be read ({error.strerror})", 0, file.nbytes)
        finally:
            reader.close()

    def _damage(self, k: int, what: str, start: int, stop: int) -> Damage:
        """The damage of some bytes of file k."""
        leaves, first = [], stop
        for entry in self._manifest.arrays.values():
            for box, file, offset in entry.pieces:
                if file == k:
                    first = min(first, offset)
                    nbytes = math.prod(hi - lo for lo, hi in box) * entry.dtype.itemsize
                    if offset < stop and start < offset + nbytes:
                        leaves.append(entry.name)
        return Damage(self._manifest.files[k].name, what, tuple(dict.fromkeys(leaves)), start < first)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold of it. Constants that JSON has no type for are given by their `repr`."""
        arrays = [a._asdict() | {"shape": list(a.shape), "dtype": dtype_name(a.dtype)} for a in self.arrays.values()]
        return {
            "path": str(self.path),
            "id": self.id,
            "created": self.created,
            "metadata": self.metadata,
            "files": self.files,
            "nbytes": self.nbytes,
            "arrays": arrays,
            "constants": {name: _plain(x) for name, x in self.constants.items()},
        }

    def table(self, damages: list[Damage] | None = None) -> str:
        """The table that `print` shows. damages: of `verify`; adds a verdict for each array."""
        return self._report(damages).text()

    def _report(self, damages: list[Damage] | None = None) -> Report:
        total = f"{count_text(len(self.arrays), 'array')}, {size_text(self.nbytes)} in {count_text(self.files, 'file')}"
        heading = f"{self.path}: {total}{f', saved {self.created}' if self.created else ''}"
        if self.metadata is not None:
            heading += f"\nmetadata: {json.dumps(self.metadata, ensure_ascii=False)}"
        rows: list[list[str]] = []
        header = [
            "name",
            "shape",
            "dtype",
            "layout",
            "bytes",
            "pieces",
            *(["checksums"] if damages is not None else []),
        ]
        wrong = None if damages is None else {name for d in damages for name in d.leaves}
        for name in self._names():
            a = self.arrays.get(name)
            if a is None:
                rows.append([name, _shortened(repr(self.constants[name]))])
                continue
            row = [name, str(a.shape), dtype_name(a.dtype), a.layout, size_text(a.nbytes), str(a.pieces)]
            rows.append([*row, self._verdict(name, wrong)] if wrong is not None else row)
        return Report(heading, [Table(rows, header, right=(4, 5))])

    def _names(self) -> Iterator[str]:
        return (name for name, _, is_leaf in json_nodes(self._manifest.tree) if is_leaf)

    def _verdict(self, name: str, wrong: set[str]) -> str:
        return "DAMAGED" if name in wrong else "as written" if self.has_checksums else "none"

    def __repr__(self) -> str:
        return f"<checkpoint {self.path}: {count_text(len(self.arrays), 'array')}, {size_text(self.nbytes)}>"


@api_boundary
def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """What a checkpoint holds: a `CheckpointInfo`. Reads the manifest, or the headers of files, and no entries.

    path: a folder that `spmd.save` wrote, or what else `spmd.load` takes: a safetensors file, an index of several, or a
    folder of either. Not collective.

    `python -m spmd checkpoint PATH` prints the table, with `--verify` also what is damaged.
    Raises CheckpointError if there is no checkpoint, CorruptCheckpointError if its manifest is damaged.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, spmd.Mesh(x=2):
        ...     spmd.save(folder, {"w": spmd.ones((4, 2), spec=P("x")), "epoch": 7}, metadata={"code": "a1b2"})
        ...     info = spmd.io.inspect(folder)
        ...     info.arrays["w"].shape, info.metadata, info.verify()
        ((4, 2), {'code': 'a1b2'}, [])
    """
    where = Path(os.fspath(path))
    steps = _steps_in(where)
    if steps:
        raise CheckpointError.at(
            "spmd.io.inspect",
            argument="path",
            got=f"the directory {where} of {count_text(len(steps), 'checkpoint')}, one for each step",
            need="one of them",
            mend=f"spmd.io.inspect({str(steps[max(steps)])!r}); `python -m spmd checkpoint {where}` lists all",
        )
    reader = open_checkpoint(where)
    return CheckpointInfo(where, reader.folder, reader.manifest)


def _steps_in(directory: Path) -> dict[int, Path]:
    """The checkpoints of steps in a directory that is no checkpoint itself."""
    return {} if (directory / MANIFEST).exists() else step_folders(directory)


def _info(name: str, key: str, manifest: Manifest) -> ArrayInfo:
    entry = manifest.arrays[key]
    files = tuple(dict.fromkeys(manifest.files[piece.file].name for piece in entry.pieces))
    return ArrayInfo(name, entry.shape, entry.dtype, entry.layout, entry.nbytes, len(entry.pieces), files)


def _plain(x: Any) -> Any:
    is_plain = isinstance(x, int | str | None) or (isinstance(x, float) and math.isfinite(x))
    return x if is_plain else repr(x)


def _shortened(text: str) -> str:
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 3]}..."


def report(path: Path, verify: bool) -> tuple[Mapping[str, Any], str, bool]:
    """A checkpoint, or the directory of several, as JSON and as text, and whether all is as it was written."""
    steps = _steps_in(path)
    if steps:
        return _report_of_steps(path, steps, verify)
    info = inspect(path)
    damages = info.verify() if verify else None
    text = info.table(damages)
    if damages is not None:
        verdict = "every byte is as it was written" if info.has_checksums else "the files have no checksums"
        text += "\n\n" + ("\n".join(["damaged:", *(f"  {d}" for d in damages)]) if damages else verdict)
    content = info.to_dict() | ({} if damages is None else {"damages": [d._asdict() for d in damages]})
    return content, text, not damages


def _report_of_steps(path: Path, steps: Mapping[int, Path], verify: bool) -> tuple[Mapping[str, Any], str, bool]:
    header = ["step", "saved", "arrays", "bytes", *(["checksums"] if verify else [])]
    rows, contents, wrong = [], [], []
    for step, folder in steps.items():
        try:
            info = inspect(folder)
            damages = [str(d) for d in info.verify()] if verify else []
            row = [str(step), info.created, str(len(info.arrays)), size_text(info.nbytes)]
            content = info.to_dict() | ({"damages": damages} if verify else {})
        except CorruptCheckpointError as error:
            damages = [str(error)]
            row, content = [str(step), "", "", ""], {"path": str(folder), "damages": damages}
        wrong += [f"  step {step}: {d}" for d in damages]
        rows.append([*row, *(["DAMAGED" if damages else "as written"] if verify else [])])
        contents.append({"step": step} | content)
    lines = [f"{path}: {count_text(len(steps), 'checkpoint')}", "", Table(rows, header, right=(0, 2, 3)).text()]
    lines += ["", "damaged:", *wrong] if wrong else ["", "every byte is as it was written"] if verify else []
    return {"path": str(path), "steps": contents}, "\n".join(lines), not wrong
