"""Compiled loops on disk, for processes that come and go at once.

numba keeps an index of a function's files, and writes index and file apart. Of two processes that compile a loop for
different types at one time, one may leave its code in the file that the index names for the other's types: from then on
every process gets that, until somebody deletes it. Here the name of a file tells all that what it holds was made from.
There is no index, and a file that is there is whole.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pickle
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["keep"]


def keep(compiled: Any, sources: str) -> None:
    """Have numba keep on disk what it compiles of a function, and find it there. sources: tells this state of the files
    that it was made from; what was made from others is deleted. Where no folder can be written to nothing is kept."""
    try:
        compiled.enable_caching()
        cache = compiled._cache
        cache._cache_file = _Files(Path(cache.cache_path), cache._impl.filename_base, sources[:16])
    except (RuntimeError, AttributeError):  # no folder, or a numba of other names, which keeps its index
        pass


class _Files:
    """The files of one function. Stands for what numba calls IndexDataCacheFile."""

    def __init__(self, folder: Path, function: str, sources: str):
        self.folder = folder
        self.name = function.rpartition("-")[0]  # what follows is its line, and Python's version
        self.begin = f"{function}.{sources}."
        self.sources = f".{sources}."

    def _path(self, key: Any) -> Path:
        """key: the types, the processor, and hashes of the function and of what it encloses."""
        import numba

        made_from = hashlib.sha256(repr((numba.__version__, key)).encode()).hexdigest()
        return self.folder / f"{self.begin}{made_from[:32]}.nbc"

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
        except OSError:  # no room: the next process compiles it too
            with suppress(OSError):
                beside.unlink()
        self._delete(but=self.sources)

    def flush(self) -> None:
        self._delete()

    def _delete(self, but: str | None = None) -> None:
        """Delete the function's files, but for those in whose names this is."""
        for path in self.folder.glob(f"{glob.escape(self.name)}-*"):
            if but is None or but not in path.name:
                with suppress(OSError):
                    path.unlink()
