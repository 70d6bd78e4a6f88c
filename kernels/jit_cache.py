"""Compiled loops on disk, for processes that come and go at once.

numba keeps an index of a function's files, and writes index and file apart. Of two processes that compile a loop for
different types at one time, one may leave its code in the file that the index names for the other's types: from then on
every process gets that, until somebody deletes it. Here the name of a file tells all that what it holds was made from.
There is no index, and a file that is there is whole.

What lies there is run as code. So nothing is read or written in a folder that others may write to, and no file of
others is read.
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

__all__ = ["intruders", "keep"]


def keep(compiled: Any, sources: str) -> None:
    """Have numba keep on disk what it compiles of a function, and find it there. sources: tells this state of the files
    whose functions it calls; what was made from others is deleted. Where nothing can be written nothing is kept."""
    import numba

    try:
        from numba.core.caching import NullCache

        compiled.enable_caching()
        kept = compiled._cache
        said = intruders(Path(kept.cache_path))
        if said:
            compiled._cache = NullCache()
            warnings.warn(_not_kept(kept.cache_path, said), RuntimeWarning, stacklevel=2)
            return
        # numba's own key has the instructions of the function, but no constants.
        made_from = repr((numba.__version__, sources, kept._impl.locator.get_source_stamp()))
        kept._cache_file = _Files(Path(kept.cache_path), kept._impl.filename_base, _digest(made_from))
        save = kept.save_overload
    except (RuntimeError, AttributeError, ImportError, OSError):
        return  # There is no folder, or a numba of other names, which keeps its index.

    def saved(*args: Any) -> None:
        with suppress(OSError):  # no room, say: the next process compiles it too
            save(*args)

    kept.save_overload = saved


def intruders(folder: Path) -> str:
    """Who else may put files into a folder, in words; "" where nobody may but those who may change the library itself.
    Many systems give each user a group of its own, of the same number."""
    if not hasattr(os, "getuid"):  # not on this system
        return ""
    found = folder.stat()
    if found.st_uid not in _owners():
        return f"it belongs to user {found.st_uid}, and this is user {os.getuid()}"
    shared = stat.S_IWOTH | (0 if found.st_gid == os.getgid() == os.getuid() else stat.S_IWGRP)
    if found.st_mode & shared:
        return f"its mode {stat.S_IMODE(found.st_mode):o} lets others write to it"
    return ""


@cache
def _owners() -> set[int]:
    """The users whose files are run: this one, root, and the owner of the library."""
    return {0, os.getuid(), Path(__file__).stat().st_uid}


def _not_kept(folder: str, said: str) -> str:
    return message(
        "loops that numba compiles",
        got=f"the folder {folder!r} to keep them in; {said}",
        need="a folder that only this user may write to: what lies there is run. Each process compiles them for itself",
        mend=f"chmod go-w {shlex.quote(folder)}, or NUMBA_CACHE_DIR=... for another folder",
    )


def _digest(x: str) -> str:
    return hashlib.sha256(x.encode()).hexdigest()[:32]


class _Files:
    """The files of one function. Stands for what numba calls IndexDataCacheFile. made_from: tells what it is made from
    that the keys do not."""

    def __init__(self, folder: Path, function: str, made_from: str):
        self.folder = folder
        self.function = function
        self.made_from = made_from

    def _path(self, key: Any) -> Path:
        """key: the types, the processor, and hashes of the function and of what it encloses."""
        return self.folder / f"{self.function}.{self.made_from}.{_digest(repr(key))}.nbc"

    def load(self, key: Any) -> Any:
        try:
            with self._path(key).open("rb") as file:
                if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid not in _owners():
                    return None
                return pickle.load(file)
        except Exception:  # Whatever is wrong with it: it is compiled again, and written anew.
            return None

    def save(self, key: Any, data: Any) -> None:
        from numba.core.serialize import dumps

        path = self._path(key)
        beside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}")
        try:
            beside.write_bytes(dumps(data))
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        self._delete(but=f".{self.made_from}.")

    def flush(self) -> None:
        self._delete()

    def _delete(self, but: str | None = None) -> None:
        """Delete the function's files, but for those in whose names this is."""
        name = self.function.rpartition("-")[0]  # what follows is its line, and Python's version
        for path in self.folder.glob(f"{glob.escape(name)}-*"):
            if but is None or but not in path.name:
                with suppress(OSError):
                    path.unlink()
