"""Read boxes of the arrays of a checkpoint: the chunks of files that hold them, each compared with its checksum."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from spmd.errors import CheckpointError, CorruptCheckpointError
from spmd.io.boxes import flat_index, slices_within, whole_box
from spmd.io.container import checked_dtype, read_header
from spmd.io.files import CHUNK, ChunkReader
from spmd.io.manifest import MANIFEST, ArrayEntry, FileEntry, Manifest, Piece
from spmd.io.trees import some
from spmd.layout import Box
from spmd.plan import overlap

__all__ = ["Reader", "open_checkpoint", "read_manifest"]

SLAB_BYTES = 4 << 20
"""What is not wanted as it lies is read in parts of this size."""
_OPEN_FILES = 32


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError if there is none."""
    path = folder / MANIFEST
    try:
        return Manifest.from_bytes(path.read_bytes(), path)
    except FileNotFoundError:
        raise CheckpointError.at(
            f"the checkpoint {folder}",
            got="a folder without manifest.json" if folder.is_dir() else "no such folder",
            need="a folder that spmd.save wrote, a safetensors file, or a folder of such files",
            mend="a save that was broken off before its end leaves no manifest: load an earlier one"
            if folder.is_dir()
            else "see the spelling, and whether all hosts see the file system",
        ) from None


def open_checkpoint(path: Path) -> Reader:
    """A reader of a checkpoint; or of a safetensors file of another tool, an index of several, a folder of either."""
    if path.is_dir() and not (path / MANIFEST).exists():
        path = _model_in(path)
    if not path.is_file():
        return Reader(path, read_manifest(path))
    files = _indexed_files(path) if path.name.endswith(".json") else {path.name: None}
    return Reader(path.parent, _manifest_of_files(path.parent, files))


_INDEX = ".index.json"


def _model_in(folder: Path) -> Path:
    """The only safetensors file of a folder, or the only index of several; the folder itself if there is none."""
    indices = sorted(folder.glob(f"*.safetensors{_INDEX}"))
    files = [f for f in sorted(folder.glob("*.safetensors")) if not f.name.startswith("data-")]
    alone = [f for f in files if not indices or (folder / f"{f.name}{_INDEX}") in indices]
    candidates = [*indices, *alone]
    if len(candidates) <= 1:
        return candidates[0] if candidates else folder
    raise CheckpointError.at(
        f"the checkpoint {folder}",
        got=f"several models: {some(f.name for f in candidates)}",
        need="one safetensors file, or one index of several",
        mend=f"give the path of one: {str(candidates[0])!r}",
    )


def _indexed_files(path: Path) -> dict[str, set[str] | None]:
    """The files that an index names, each with the tensors that it is to have."""
    try:
        table = json.loads(path.read_bytes())["weight_map"]
        files: dict[str, set[str] | None] = {name: set() for name in sorted(table.values())}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError.at(
            f"the file {path}",
            got="no index of safetensors files",
            need='"weight_map": the file of each tensor, beside the index',
            mend="pass the folder of the checkpoint, or one *.safetensors file",
        ) from None
    for tensor, name in table.items():
        if Path(str(name)).name != name or name in ("", ".."):
            raise CheckpointError.at(
                f"the file {path}",
                got=f"the file {name!r} for the tensor {tensor!r}",
                need="files of the folder that the index lies in",
                mend="move the files beside their index, and write their names into it without folders",
            )
        tensors = files[name]
        assert tensors is not None
        tensors.add(tensor)
    missing = [name for name in files if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError.at(
            f"the checkpoint {path}",
            got=f"{len(missing)} of {len(files)} files missing: {some(missing)}",
            need="all files that the index names",
            mend="download or copy the missing ones beside the index",
        )
    return files


def _manifest_of_files(folder: Path, wanted: Mapping[str, set[str] | None]) -> Manifest:
    """A manifest, without checksums, of safetensors files: a tree of one dictionary. wanted: by file the tensors of
    it, None for all."""
    arrays: dict[str, ArrayEntry] = {}
    files = []
    metadata: dict[str, str] = {}
    for k, (name, names) in enumerate(wanted.items()):
        tensors, more = read_header(folder / name)
        metadata |= more
        files.append(FileEntry(name, (folder / name).stat().st_size, None))
        missing = sorted((names or set()) - {t.name for t in tensors})
        if missing:
            raise CheckpointError.at(
                f"the file {folder / name}",
                got=f"no tensor {some(missing)}",
                need="the tensors that the index says are in it",
                mend="the file or the index is of another version of the model: fetch both again",
            )
        for t in tensors:
            if names is None or t.name in names:
                dtype, box = checked_dtype(t, folder / name), whole_box(t.shape)
                pieces = (Piece(box, k, t.offset),) if math.prod(t.shape) else ()
                arrays[t.name] = ArrayEntry(t.name, t.shape, dtype, "", pieces)
    tree = {"dict": [[name, {"array": name}] for name in arrays]}
    return Manifest("", tree, arrays, files, metadata or None)


class Reader:
    """A checkpoint that is open for reading."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self._files: OrderedDict[int, ChunkReader] = OrderedDict()
        self.chunks: dict[str, set[int]] = {}
        """The chunks that were read, by file."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        while self._files:
            self._close(next(iter(self._files)))

    def _close(self, k: int) -> None:
        file = self._files.pop(k)
        self.chunks.setdefault(file.path.name, set()).update(file.chunks)
        file.close()

    def file(self, k: int) -> ChunkReader:
        """A file of the manifest, opened."""
        file = self._files.get(k)
        if file is None:
            if len(self._files) >= _OPEN_FILES:
                self._close(next(iter(self._files)))
            entry = self.manifest.files[k]
            file = self._files[k] = ChunkReader(self.folder / entry.name, entry.nbytes, entry.checksums)
        self._files.move_to_end(k)
        return file

    def is_replaced(self) -> bool:
        """Whether another save has replaced the checkpoint since it was opened, and removed its files."""
        if not self.manifest.id:
            return False
        try:
            return read_manifest(self.folder).id != self.manifest.id
        except (CheckpointError, OSError):
            return False

    def read(self, entry: ArrayEntry, box: Box | None = None, dtype: np.dtype | None = None) -> np.ndarray:
        """The entries of a box, or of all, as a new array. dtype: to convert them to."""
        box = whole_box(entry.shape) if box is None else box
        out = np.empty([stop - start for start, stop in box], entry.dtype)
        common = {k: c for k, piece in enumerate(entry.pieces) if (c := overlap(piece.box, box)) is not None}
        if not _covers(list(common.values()), out.size):
            raise CorruptCheckpointError.at(
                f"the leaf {entry.name!r}",
                got=f"pieces that overlap or lack entries in {slices_within(box, whole_box(entry.shape))[:-1]}",
                need="pieces that cover the array, each entry once",
                mend="load another checkpoint",
            )
        try:
            for k, inside in common.items():
                self._copy(entry.pieces[k], inside, out[slices_within(inside, box)])
        except CorruptCheckpointError as error:
            raise type(error)(f"the leaf {entry.name!r}, {error}") from None
        except OSError as error:
            kind = CorruptCheckpointError if isinstance(error, FileNotFoundError) else CheckpointError
            raise kind.at(
                f"the leaf {entry.name!r}",
                got=str(error),
                need="all files that the manifest names",
                mend="load another checkpoint",
            ) from error
        return out if dtype is None or dtype == out.dtype else out.astype(dtype)

    def _copy(self, piece: Piece, box: Box, out: np.ndarray) -> None:
        lengths = tuple(stop - start for start, stop in piece.box)
        inside = tuple((a - lo, b - lo) for (a, b), (lo, _) in zip(box, piece.box, strict=True))
        copy_box(self.file(piece.file), piece.offset, lengths, inside, out)


def _covers(boxes: list[Box], size: int) -> bool:
    """Whether boxes have so many entries in all, and none in common."""
    if sum(math.prod(stop - start for start, stop in box) for box in boxes) != size:
        return False
    active: list[Box] = []
    for box in sorted(boxes):
        active = [other for other in active if other[0][1] > box[0][0]]
        if any(overlap(box, other) is not None for other in active):
            return False
        active.append(box)
    return True


def copy_box(file: ChunkReader, offset: int, lengths: tuple[int, ...], box: Box, out: np.ndarray) -> None:
    """Read a box of an array that lies in a file, last dimension fastest, into `out`.

    offset, lengths: of the array. Reads the chunks that hold entries of the box, and no others: if a row of the first
    dimension is no longer than a chunk, every chunk between the first and the last entry holds some; longer rows are
    read one by one.
    """
    itemsize = out.dtype.itemsize
    row = math.prod(lengths[1:]) * itemsize
    if all(side == (0, n) for side, n in zip(box[1:], lengths[1:], strict=True)):
        start = offset + (box[0][0] * row if box else 0)
        _read_run(file, start, out)
    elif row <= CHUNK:
        _read_rows(file, offset, lengths, box, out)
    else:
        for k in range(*box[0]):
            copy_box(file, offset + k * row, lengths[1:], box[1:], out[k - box[0][0]])


def _read_run(file: ChunkReader, start: int, out: np.ndarray) -> None:
    """Read entries that follow each other in the file."""
    if out.flags.c_contiguous:
        file.read_into(start, out.reshape(-1).view(np.uint8))
        return
    for rows in _groups(len(out), out.nbytes // len(out)):
        part = np.empty_like(out[rows], order="C")
        _read_run(file, start + rows.start * (out.nbytes // len(out)), part)
        out[rows] = part


def _read_rows(file: ChunkReader, offset: int, lengths: tuple[int, ...], box: Box, out: np.ndarray) -> None:
    """Read parts of short rows: the bytes from the first entry to the last, some rows at a time."""
    itemsize = out.dtype.itemsize
    row = math.prod(lengths[1:]) * itemsize
    first = flat_index([a for a, _ in box[1:]], lengths[1:]) * itemsize
    last = (flat_index([b - 1 for _, b in box[1:]], lengths[1:]) + 1) * itemsize
    inside = tuple(slice(a, b) for a, b in box[1:])
    for rows in _groups(len(out), row):
        n = rows.stop - rows.start
        buffer = np.empty(n * row, np.uint8)
        file.read_into(offset + (box[0][0] + rows.start) * row + first, buffer[first : (n - 1) * row + last])
        out[rows] = buffer.view(out.dtype).reshape(n, *lengths[1:])[(slice(None), *inside)]


def _groups(rows: int, nbytes: int) -> Iterator[slice]:
    """Rows of so many bytes each, in groups of at most SLAB_BYTES."""
    step = max(1, SLAB_BYTES // max(1, nbytes))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
