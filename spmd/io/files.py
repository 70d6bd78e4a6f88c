"""Files of checkpoints: written in order and flushed, read by chunks whose checksums are compared.

Every system call that writes, flushes, renames or removes something of a checkpoint is made in this file.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import xxhash

from spmd.errors import CheckpointError, CorruptCheckpointError
from spmd.settings import setting

__all__ = [
    "CHUNK",
    "ChunkReader",
    "Lock",
    "PlacedWriter",
    "StreamWriter",
    "checksum",
    "flush_folder",
    "make_folder",
    "make_folder_for",
    "remove",
    "remove_folder",
    "rename",
    "replace_file",
    "write_file",
]

CHUNK = 1 << 20
"""The bytes that one checksum covers: a file is divided into chunks of this length from its beginning on."""
_MODE = 0o666
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def checksum(data: Any) -> str:
    """The 64-bit XXH3 checksum of bytes, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def flush(file: int) -> None:
    """Flush a file or folder to its disk. SPMD_FSYNC=0 leaves that to the system."""
    if setting("SPMD_FSYNC"):
        os.fsync(file)


def flush_folder(path: Path) -> None:
    """Flush the names in a folder: files that were made, renamed or removed."""
    if not setting("SPMD_FSYNC"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:  # some file systems cannot flush folders, and order their names by themselves
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, flushed."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with suppress(FileExistsError):  # another process made it
        os.mkdir(path)
    flush_folder(path.parent)


def make_folder_for(where: str, path: Path) -> None:
    """Make the folder that the argument `path` of a public function names."""
    if path.exists() and not path.is_dir():
        raise CheckpointError.at(
            where, argument="path", got=f"the file {path}", need="a folder, or a new name", mend="rename one"
        )
    make_folder(path)


def write_all(file: int, data: Any) -> None:
    """Write all of some bytes: a single call writes 2 GiB at most, and less if a signal interrupts it."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(file, view) :]


def write_file(path: Path, data: bytes) -> None:
    """Make a new file with these bytes, flushed. The name in its folder is not flushed."""
    file = os.open(path, _FLAGS, _MODE)
    try:
        write_all(file, data)
        flush(file)
    finally:
        os.close(file)


def replace_file(path: Path, data: bytes, temporary: str) -> None:
    """Give a file these bytes at once, flushed: at any moment it has the old bytes or the new ones."""
    new = path.with_name(temporary)
    try:
        write_file(new, data)
        rename(new, path)
    except BaseException:
        remove([new])
        raise
    flush_folder(path.parent)


def rename(old: Path, new: Path) -> None:
    """Give a file another name; a file that has it is replaced. The names in the folder are not flushed."""
    os.replace(old, new)


def remove(paths: Iterable[Path]) -> None:
    """Remove files. Those that are gone, or may not be removed, are passed over."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove a folder, if it is empty."""
    with suppress(OSError):
        os.rmdir(path)


class _OpenFile:
    """A file that is open by its number."""

    _file = -1

    def finish(self) -> None:
        """Flush the file, and close it."""
        flush(self._file)
        self.close()

    def close(self) -> None:
        file, self._file = self._file, -1  # first, since no number may be closed twice: it could be another file's
        if file >= 0:
            os.close(file)


class StreamWriter(_OpenFile):
    """A new file that is written from beginning to end, with the checksums of its chunks."""

    def __init__(self, path: Path):
        self.path = path
        self.nbytes = 0
        self.checksums: list[str] = []
        self._chunk = xxhash.xxh3_64()
        self._file = os.open(path, _FLAGS, _MODE)

    def write(self, data: Any) -> None:
        """Append bytes: any C-contiguous buffer."""
        view = memoryview(data).cast("B")
        write_all(self._file, view)
        while view:
            room = CHUNK - self.nbytes % CHUNK
            part, view = view[:room], view[room:]
            if len(part) == CHUNK:
                self.checksums.append(checksum(part))
            else:
                self._chunk.update(part)
                if len(part) == room:
                    self._end_chunk()
            self.nbytes += len(part)

    def _end_chunk(self) -> None:
        self.checksums.append(self._chunk.hexdigest())
        self._chunk.reset()

    def finish(self) -> None:
        """Flush the file, and close it."""
        if self.nbytes % CHUNK:
            self._end_chunk()
        super().finish()


class PlacedWriter(_OpenFile):
    """A file of which several processes write places of their own. size: that of a new file; None: it is there."""

    def __init__(self, path: Path, size: int | None = None):
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | (0 if size is None else os.O_CREAT), _MODE)
        if size is not None:
            try:
                os.ftruncate(self._file, size)
            except BaseException:
                self.close()
                raise

    def write(self, start: int, data: Any) -> None:
        """Write the bytes of a C-contiguous buffer at a place."""
        view = memoryview(data)
        while view:
            n = os.pwrite(self._file, view[: 1 << 30], start)
            view, start = view[n:], start + n


class ChunkReader(_OpenFile):
    """A file that is read by chunks. A chunk whose checksum is another one raises CorruptCheckpointError.

    checksums: None: the file has none. chunks: the numbers of the chunks that were read, for tests and reports.
    """

    _KEPT = 4
    """Chunks that are kept: neighbouring pieces of one file share them."""

    def __init__(self, path: Path, nbytes: int, checksums: list[str] | None):
        self.path = path
        self.nbytes = nbytes
        self.checksums = checksums
        self.chunks: set[int] = set()
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(self._file).st_size
        if size != nbytes:
            self.close()
            raise CorruptCheckpointError.at(
                f"the file {path}",
                got=f"{size} bytes",
                need=f"{nbytes} bytes",
                mend="the file was cut off or replaced: load another checkpoint",
            )

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Read the bytes from `start` on into a flat array of uint8."""
        stop, at = start + len(out), start
        while at < stop:
            k, inside = divmod(at, CHUNK)
            if inside == 0 and stop - at >= CHUNK:
                # Whole chunks go where they are wanted without a copy.
                whole = (stop - at) // CHUNK
                self._read(k, whole, out.data[at - start : at - start + whole * CHUNK])
                at += whole * CHUNK
                continue
            chunk = self._chunk(k)
            part = chunk[inside : inside + stop - at]
            out[at - start : at - start + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)

    def _chunk(self, k: int) -> memoryview:
        chunk = self._kept.get(k)
        if chunk is None:
            chunk = np.empty(min(CHUNK, self.nbytes - k * CHUNK), np.uint8).data
            self._read(k, 1, chunk)
            self._kept[k] = chunk
            if len(self._kept) > self._KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(k)
        return chunk

    def _read(self, k: int, count: int, out: memoryview) -> None:
        """Read chunks k, k + 1, ... and compare their checksums."""
        at = 0
        while at < len(out):
            n = os.preadv(self._file, [out[at : at + (1 << 30)]], k * CHUNK + at)
            if n == 0:
                raise OSError(errno.EIO, "the file ends too early", str(self.path))
            at += n
        self.chunks.update(range(k, k + count))
        if self.checksums is None:
            return
        for i in range(count):
            if checksum(out[i * CHUNK : (i + 1) * CHUNK]) != self.checksums[k + i]:
                raise corrupt_chunk(self.path, k + i)

    def verify(self) -> list[int]:
        """Read every chunk; the numbers of those whose checksum is another one."""
        damaged = []
        for k in range(len(self.checksums or ())):
            try:
                self._read(k, 1, memoryview(bytearray(min(CHUNK, self.nbytes - k * CHUNK))))
            except CorruptCheckpointError:
                damaged.append(k)
        return damaged

    def close(self) -> None:
        super().close()
        self._kept.clear()


def corrupt_chunk(path: Path, k: int) -> CorruptCheckpointError:
    return CorruptCheckpointError.at(
        f"the file {path}",
        got=f"bytes {k * CHUNK} to {(k + 1) * CHUNK} with another checksum than they were written with",
        need="the bytes that were written",
        mend="load another checkpoint; `python -m spmd checkpoint PATH --verify` lists all that is damaged",
    )


class Lock:
    """A file that one process at a time holds. The system frees it when the process ends, however it ends.

    where: the public function that saves, for messages.
    """

    def __init__(self, path: Path, where: str = "spmd.save"):
        self.path = path
        # A file object is closed, and with it the lock is freed, even if an interrupt comes before `release` is known.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        _LOCKS.add(self)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise CheckpointError.at(
                where,
                argument="path",
                got=f"{path.parent}, to which another process or thread is saving",
                need="one save at a time to one place",
                mend="wait for the other save, or save to another folder",
            ) from None

    def release(self) -> None:
        if not self._file.closed:
            # Closing alone would leave the lock to a process that is being started and has the file for a moment.
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def forget(self) -> None:
        """In a child of os.fork: close the file. The lock stays with the parent."""
        self._file.close()


_LOCKS: WeakSet[Lock] = WeakSet()


def _forget_locks() -> None:
    for lock in list(_LOCKS):
        lock.forget()


os.register_at_fork(after_in_child=_forget_locks)
