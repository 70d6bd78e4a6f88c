"""The watch for arrays that change after a tape has kept them: `spmd.debug(mutation=True)`."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from spmd.errors import MutationError, caller, message, source_line

__all__ = ["WATCHING", "Watched"]

WATCHING: ContextVar[bool] = ContextVar("spmd_watching", default=False)
"""Whether tapes that open here are watched."""


class Watched(list):
    """The nodes of a tape that is watched: what each keeps is remembered by a checksum, and where it was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[tuple[Any, str, int]] = []

    def append(self, node) -> None:
        super().append(node)
        if node.args:
            frame = caller(sys._getframe(1))
            where = "unknown source" if frame is None else source_line(frame.f_code, frame.f_lasti)
            self.sums.append((node, where, _checksum(node.args)))

    def check(self) -> None:
        """Raise MutationError where a node keeps something else than it did when it was recorded."""
        for node, where, checksum in self.sums:
            if node.args is not None and _checksum(node.args) != checksum:
                raise MutationError(
                    message(
                        f"{node.prim.name}, recorded at {where}",
                        got="a bare array that was written into after the tape had kept it",
                        need="arrays that stay as they are until the backward sweep: it would give wrong gradients",
                        mend="write into a copy, or make a new array: a = a + 1 in place of a += 1",
                    )
                )


def _checksum(kept) -> int:
    """A number that changes with the data of any bare array in what a node keeps."""
    checksum = 0
    for array in _arrays(kept, set()):
        checksum = zlib.crc32(np.ascontiguousarray(_on_host(array)).tobytes(), checksum)
    return checksum


def _on_host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def _arrays(kept, seen: set[int]) -> Iterator[Any]:
    """The bare arrays in what a node keeps: in tuples, lists and dicts, and in what a pullback of ours closes over."""
    if id(kept) in seen:
        return
    if isinstance(kept, np.ndarray) or (hasattr(kept, "get") and hasattr(kept, "dtype")):
        yield kept
        return
    seen.add(id(kept))
    if isinstance(kept, tuple | list):
        inside: Any = kept
    elif isinstance(kept, dict):
        inside = kept.values()
    elif isinstance(kept, functools.partial):
        inside = (kept.args, kept.keywords)
    elif callable(kept) and getattr(kept, "__module__", "").startswith("spmd.autodiff"):
        inside = [c.cell_contents for c in getattr(kept, "__closure__", None) or ()]
    else:
        inside = [kept.value] if type(kept).__name__ == "Array" else ()  # type: ignore[attr-defined]
    for each in inside:
        yield from _arrays(each, seen)
