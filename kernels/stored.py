"""Compiled loops on disk, for processes that come and go at once.

numba keeps an index of a function's files, and writes index and file apart. Of two processes that compile a loop for
different types at one time, one may leave its code in the file that the index names for the other's types: from then on
every process gets that, until somebody deletes it. Here the name of a file tells all that what it holds was made from.
There is no index, and a file that is there is whole.

What lies there is run as code. So nothing is read or written in a folder that others may write to: one that belongs to
another user than this one or root, or that its group or everybody may write to, itself or a folder above it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pickle
import stat
import uuid
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["intruders", "keep"]


def keep(compiled: Any, sources: str) -> None:
    """Have numba keep on disk what it compiles of a function, and find it there. sources: tells this state of the files
    whose functions it calls; what was made from others is deleted. Where nothing can be written nothing is kept."""
    import numba
    from numba.core.caching import NullCache

    try:
        compiled.enable_caching()
        cache = compiled._cache
        said = intruders(Path(cache.cache_path))
        if said:
            compiled._cache = NullCache()
            warnings.warn(_not_kept(cache.cache_path, said), RuntimeWarning, stacklevel=2)
            return
        # numba's own key has the instructions of the function, but no constants.
        made_from = repr((numba.__version__, sources, cache._impl.locator.get_source_stamp()))
        cache._cache_file = _Files(Path(cache.cache_path), cache._impl.filename_base, _digest(made_from))
        save = cache.save_overload
    except (RuntimeError, AttributeError):  # no folder, or a numba of other names, which keeps its index
        return

    def saved(*args: Any) -> None:
        with suppress(OSError):  # no room, say: the next process compiles it too
            save(*args)

    cache.save_overload = saved


def intruders(folder: Path) -> str:
    """Who else may put files into a folder, in words; "" where nobody may. As of folders above it, with the sticky bit
    (as /tmp has it) others may add files, but put nothing in place of what is there."""
    if not hasattr(os, "getuid"):  # not on this system
        return ""
    folder = folder.resolve()
    for at in (folder, *folder.parents):
        try:
            found = at.stat()
        except OSError as error:
            return f"nobody knows who may write to {at}: {error.strerror}"
        if found.st_uid not in (0, os.getuid()):
            return f"{at} belongs to user {found.st_uid}, and this is user {os.getuid()}"
        shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if shared and not (at != folder and found.st_mode & stat.S_ISVTX):
            return f"{at} has mode {stat.S_IMODE(found.st_mode):o}: others may write to it"
    return ""


def _not_kept(folder: str, said: str) -> str:
    from spmd.errors import message

    return message(
        "loops that numba compiles",
        got=f"the folder {folder!r} for them; {said}",
        need="a folder that only this user may write to: what lies there is run. They are compiled in each process now",
        mend=f"chmod go-w {said.split(' ')[0]}, or NUMBA_CACHE_DIR=... for another folder"
        if "mode" in said
        else "NUMBA_CACHE_DIR=... for another folder",
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
            return pickle.loads(self._path(key).read_bytes())
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
