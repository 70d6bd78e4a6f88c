"""Checks of `spmd.debug`: arrays that change after the tape has kept them, and results that are NaN or infinite."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from spmd.errors import MutationError, NonFiniteError, caller, describe, source_line

__all__ = ["FINITE", "WATCHING", "Watched", "check_finite"]

WATCHING: ContextVar[bool] = ContextVar("spmd_watching", default=False)
"""Whether new tapes check for arrays that change."""
FINITE: ContextVar[str] = ContextVar("spmd_finite", default="")
"""Which numbers raise: "nan", "nan or inf", or none."""


class Watched(list):
    """The nodes of a tape that is watched: where each was recorded, and a checksum of what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [] if WATCHING.get() else None
        self.places: dict[int, str] = {}

    def append(self, node) -> None:
        super().append(node)
        self.places[id(node)] = place()
        if node.args and self.sums is not None:
            self.sums.append((node, _checksum(node.args)))

    def check(self) -> None:
        """Raise MutationError where a node keeps something else than it did when it was recorded."""
        for node, checksum in self.sums or ():
            if node.args is not None and _checksum(node.args) != checksum:
                where = self.places[id(node)]
                raise MutationError.at(
                    f"{node.prim.name}, recorded at {where}",
                    got="a bare array that was written into after the tape had kept it",
                    need="arrays that stay as they are until the backward sweep: it would give wrong gradients",
                    mend="write into a copy, or make a new array: a = a + 1 in place of a += 1",
                )


def place() -> str:
    """The user's line that runs."""
    frame = caller(sys._getframe(2))
    return "unknown source" if frame is None else source_line(frame.f_code, frame.f_lasti)


def check_finite(x, kinds: str, where: Callable[[], str]) -> None:
    """Raise NonFiniteError where an array holds a NaN, or an infinity if these count. where: says what made it."""
    while type(x).__name__ == "Array":  # a cotangent that is traced itself
        x = x.value
    # Of a global array every process has a part, and all of them learn what one has found.
    search = getattr(x, "__spmd_search__", None)
    found = search(lambda block: _not_finite(block, kinds)) if search is not None else _not_finite(x, kinds)
    if found is not None:
        index, entry, count = found
        raise NonFiniteError.at(
            where(),
            got=f"{entry} at {tuple(index)} of {describe(x)}, and {count} of {np.size(x)} entries in all",
            need=f"no {kinds}, within spmd.debug(nans=...)",
            mend="look at its operands there; np.where(ok, x, 1.0) before the operation keeps entries out of its "
            "derivative too" + ("; nans='nan' lets infinities pass" if "nan" not in entry else ""),
        )


def _not_finite(x, kinds: str) -> tuple[list[int], str, int] | None:
    """The index of the first entry that is not finite, the entry, and how many there are; None without any."""
    x = np.asarray(_on_host(x))
    if x.dtype.kind not in "fc":
        return None
    bad = ~np.isfinite(x) if "inf" in kinds else np.isnan(x)
    if not bad.any():
        return None
    index = np.argwhere(bad)[0].tolist()
    return index, str(x[tuple(index)]), int(bad.sum())


def _checksum(kept) -> int:
    """A number that changes with the data of any bare array in what a node keeps."""
    checksum = 0
    for array in _arrays(kept, set()):
        checksum = zlib.crc32(np.ascontiguousarray(_on_host(array)).tobytes(), checksum)
    return checksum


def _on_host(array):
    return array.get() if hasattr(array, "get") else array


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
