"""Compiled loops on disk, safe for many processes at once.

numba keeps an index of a function's files, and writes index and files apart. When two processes compile a loop for
different types at once, the index may name the file of one for the types of the other, and every later process loads
the wrong code. Here the name of a file contains hashes of all inputs. There is no index, and a file that exists is
complete.

Cached code is executed. So folders that others may write to are not used, and no file of others is read.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pickle
import shlex
import stat
import uuid
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from spmd.errors import message

__all__ = ["enable", "unsafe"]


def enable(compiled: Any, sources: str) -> None:
    """Let numba cache a compiled function on disk. Where nothing can be written there is no cache.

    sources: a hash of the files whose functions it calls; files made from others are deleted.
    """
    import numba

    try:
        from numba.core.caching import NullCache

        compiled.enable_caching()
        cache = compiled._cache
        reason = unsafe(Path(cache.cache_path))
        if reason:
            compiled._cache = NullCache()
            warnings.warn(_not_cached(cache.cache_path, reason), RuntimeWarning, stacklevel=2)
            return
        # numba's own key has the instructions of the function, but no constants.
        inputs = repr((numba.__version__, sources, cache._impl.locator.get_source_stamp()))
        cache._cache_file = _Files(Path(cache.cache_path), cache._impl.filename_base, _digest(inputs))
        save = cache.save_overload
    except (RuntimeError, AttributeError, ImportError, OSError):
        return  # there is no folder, or a numba with other names, which keeps its index

    def save_overload(*args: Any) -> None:
        with suppress(OSError):  # such as a full disk: the next process compiles the function too
            save(*args)

    cache.save_overload = save_overload


def unsafe(folder: Path) -> str:
    """Why others may write to a folder, in words; "" if only users may who may change the library itself. A group with
    the number of the user is the user's own on many systems."""
    if not hasattr(os, "getuid"):  # not on this system
        return ""
    status = folder.stat()
    if status.st_uid not in _owners():
        return f"it belongs to user {status.st_uid}, and this is user {os.getuid()}"
    shared = stat.S_IWOTH | (0 if status.st_gid == os.getgid() == os.getuid() else stat.S_IWGRP)
    if status.st_mode & shared:
        return f"its mode {stat.S_IMODE(status.st_mode):o} lets others write to it"
    return ""


@cache
def _owners() -> set[int]:
    """The users whose files are executed: this one, root, and the owner of the library."""
    return {0, os.getuid(), Path(__file__).stat().st_uid}


def _not_cached(folder: str, reason: str) -> str:
    return message(
        "loops that numba compiles",
        got=f"the folder {folder!r} to cache them in; {reason}",
        need="a folder that only this user may write to, for its files are run. Each process now compiles them anew",
        mend=f"chmod go-w {shlex.quote(folder)}, or NUMBA_CACHE_DIR=... for another folder",
    )


def _digest(x: str) -> str:
    return hashlib.sha256(x.encode()).hexdigest()[:32]


class _Files:
    """The files of one function, in place of numba's IndexDataCacheFile. inputs: a hash of what numba's keys lack."""

    def __init__(self, folder: Path, function: str, inputs: str):
        self.folder = folder
        self.function = function
        self.inputs = inputs

    def _path(self, key: Any) -> Path:
        """key: numba's, with the types, the processor, and hashes of the function and of what it encloses."""
        return self.folder / f"{self.function}.{self.inputs}.{_digest(repr(key))}.nbc"

    def load(self, key: Any) -> Any:
        try:
            with self._path(key).open("rb") as file:
                if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid not in _owners():
                    return None
                return pickle.load(file)
        except Exception:  # whatever is wrong: it is compiled and written again
            return None

    def save(self, key: Any, data: Any) -> None:
        from numba.core.serialize import dumps

        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}")
        try:
            temporary.write_bytes(dumps(data))
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._delete(keep=f".{self.inputs}.")

    def flush(self) -> None:
        self._delete()

    def _delete(self, keep: str | None = None) -> None:
        """Delete the function's files, except those whose name contains `keep`."""
        name = self.function.rpartition("-")[0]  # without its line and Python's version
        for path in self.folder.glob(f"{glob.escape(name)}-*"):
            if keep is None or keep not in path.name:
                with suppress(OSError):
                    path.unlink()
