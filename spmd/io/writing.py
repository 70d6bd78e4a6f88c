"""Which member writes which boxes into which files, and the writing.

All members make the same plan from what all know of the arrays. Each writes its own files; nothing else is exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spmd.io.boxes import volume
from spmd.io.container import Stored, header, stored_as
from spmd.io.files import CHUNK, StreamWriter, checksum, remove
from spmd.io.manifest import ArrayEntry, FileEntry, Piece
from spmd.io.sources import Source
from spmd.layout import Box, block_bounds

__all__ = ["WritePlan", "digest_of_box", "plan_of", "slab_boxes", "slabs", "write_files"]

FILE_BYTES = 2 << 30
"""No file is longer than this and a header."""
SHARED_MIN = CHUNK
"""Boxes that several members hold are divided among them into parts of at least so many bytes."""
SLAB_BYTES = 4 << 20
"""Blocks that cannot be written as they lie are copied in parts of this size."""


class PlannedPiece(NamedTuple):
    """A piece that a member writes. name: of the array. tensor: its name in the file."""

    name: str
    tensor: str
    box: Box
    nbytes: int


class WritePlan(NamedTuple):
    """files: for each member the files that it writes, each a name and its pieces."""

    id: str
    files: list[list[tuple[str, list[PlannedPiece]]]]

    def of_member(self, member: int) -> list[tuple[str, list[PlannedPiece]]]:
        return self.files[member]


def plan_of(id: str, sources: Mapping[str, Source], members: int) -> WritePlan:
    """Every box once. What several members hold goes to those that have least to write."""
    loads = [0] * members
    pieces: list[list[PlannedPiece]] = [[] for _ in range(members)]
    taken = {"__metadata__", *sources}
    for name, source in sources.items():
        itemsize = source.dtype.itemsize
        for box, holders in source.holders.items():
            shares = max(1, min(len(holders), volume(box) * itemsize // SHARED_MIN))
            for part in (small for share in _divided(box, shares) for small in _limited(share, itemsize)):
                member = min(holders, key=lambda m: (loads[m], m))
                nbytes = volume(part) * itemsize
                pieces[member].append(PlannedPiece(name, _tensor_name(name, part, source.shape, taken), part, nbytes))
                loads[member] += nbytes
    return WritePlan(id, [_in_files(id, member, mine) for member, mine in enumerate(pieces)])


def _tensor_name(name: str, box: Box, shape: tuple[int, ...], taken: set[str]) -> str:
    """The name of a piece in its file: that of the array if it is all of it. taken: other names, which it joins."""
    is_whole = box == tuple((0, n) for n in shape)
    if is_whole and name != "__metadata__":  # which has a meaning in such files
        return name
    tensor = f"{name}{_shown(box)}"
    while tensor in taken:
        tensor += "'"
    taken.add(tensor)
    return tensor


def _divided(box: Box, parts: int) -> Iterator[Box]:
    """A box in about so many parts: along its first dimension that is long enough, else along its longest."""
    lengths = [stop - start for start, stop in box]
    if parts == 1 or not lengths:
        yield box
        return
    dim = next((d for d, n in enumerate(lengths) if n >= parts), int(np.argmax(lengths)))
    parts_here = min(parts, lengths[dim])
    start = box[dim][0]
    for k in range(parts_here):
        lo, hi = block_bounds(lengths[dim], parts_here, k)
        yield from _divided((*box[:dim], (start + lo, start + hi), *box[dim + 1 :]), -(-parts // parts_here))


def _limited(box: Box, itemsize: int) -> Iterator[Box]:
    """A box in parts of at most FILE_BYTES."""
    parts = -(-volume(box) * itemsize // FILE_BYTES)
    if parts <= 1 or volume(box) == 1:
        yield box
        return
    for part in _divided(box, parts):
        yield from _limited(part, itemsize)


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _in_files(id: str, member: int, pieces: list[PlannedPiece]) -> list[tuple[str, list[PlannedPiece]]]:
    files: list[tuple[str, list[PlannedPiece]]] = []
    room = 0
    for piece in pieces:
        if piece.nbytes > room or not files:
            files.append((f"data-{id}-{member:05d}-{len(files):03d}.safetensors", []))
            room = FILE_BYTES
        files[-1][1].append(piece)
        room -= piece.nbytes
    return files


def _header(pieces: list[PlannedPiece], sources: Mapping[str, Source]) -> tuple[bytes, list[int]]:
    tensors = []
    for piece in pieces:
        stored = _stored(sources[piece.name])
        shape = tuple(stop - start for start, stop in piece.box) + ((stored.parts,) if stored.parts > 1 else ())
        tensors.append((piece.tensor, stored.code, shape, piece.nbytes))
    return header(tensors, {"written_by": "spmd.save"})


def _stored(source: Source) -> Stored:
    stored = stored_as(source.dtype)
    assert stored is not None
    return stored


def array_entries(plan: WritePlan, sources: Mapping[str, Source]) -> dict[str, ArrayEntry]:
    """What the manifest says of the arrays."""
    pieces: dict[str, list[Piece]] = {name: [] for name in sources}
    number = 0
    for files in plan.files:
        for _, planned in files:
            _, offsets = _header(planned, sources)
            for piece, offset in zip(planned, offsets, strict=True):
                pieces[piece.name].append(Piece(piece.box, number, offset))
            number += 1
    return {
        name: ArrayEntry(name, source.shape, source.dtype.newbyteorder("="), source.layout, tuple(pieces[name]))
        for name, source in sources.items()
    }


def write_files(folder: Path, plan: WritePlan, member: int, sources: Mapping[str, Source]) -> list[FileEntry]:
    """Write and flush the files of a member. If that fails none is left."""
    written: list[Path] = []
    entries = []
    try:
        for name, pieces in plan.files[member]:
            written.append(folder / name)
            file = StreamWriter(folder / name)
            try:
                file.write(_header(pieces, sources)[0])
                for piece in pieces:
                    for data in slabs(sources[piece.name], piece.box):
                        file.write(data)
                file.finish()
            finally:
                file.close()
            entries.append(FileEntry(name, file.nbytes, file.checksums))
    except BaseException:
        remove(written)
        raise
    return entries


def slabs(source: Source, box: Box) -> Iterator[np.ndarray]:
    """The bytes of a box in order, as contiguous arrays of uint8: as they lie, or copied a few MiB at a time."""
    stored = _stored(source)
    for part in slab_boxes(box, source.dtype.itemsize):
        block = source.block(part)
        if not block.dtype.isnative:
            block = block.astype(block.dtype.newbyteorder("="))
        yield np.ascontiguousarray(block).reshape(-1).view(stored.dtype).view(np.uint8)


def slab_boxes(box: Box, itemsize: int) -> Iterator[Box]:
    """A box as boxes of at most SLAB_BYTES, which follow each other in its order."""
    nbytes = volume(box) * itemsize
    if nbytes <= SLAB_BYTES:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(1, SLAB_BYTES * (stop - start) // nbytes)
    for lo in range(start, stop, rows):
        yield from slab_boxes((*box[:dim], (lo, min(lo + rows, stop)), *box[dim + 1 :]), itemsize)


def digest_of_box(source: Source, box: Box) -> str:
    """A digest of the bytes of a box, of which several members have copies."""
    return hashlib.sha256("".join(map(checksum, slabs(source, box))).encode()).hexdigest()[:16]
