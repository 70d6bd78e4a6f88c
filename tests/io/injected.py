"""What happens at the system calls of a save: a kill, an interrupt or an error at one of them, before, during or after.

`spmd.io.files` makes all of these calls; here it gets a stand-in for `os`, and for `open`.
"""

from __future__ import annotations

import builtins
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from spmd.io import files

__all__ = ["Place", "injected", "places_of"]

CALLS = ("close", "fsync", "mkdir", "open", "replace", "unlink", "write")


class Place(NamedTuple):
    """A moment in a save. number: of the places so far. moment: "before", "during" or "after" the call."""

    number: int
    call: str
    moment: str
    args: tuple[Any, ...]

    @property
    def commits(self) -> bool:
        """Whether the rename of the manifest has just been made."""
        return self.call == "replace" and self.moment == "after" and os.path.basename(self.args[1]) == "manifest.json"


class _System:
    """The module `os`, whose calls that change files say so to `act`. Nothing is flushed: only processes end."""

    def __init__(self, act: Callable[[Place], object]):
        self._act = act
        self._numbers = itertools.count()
        self._random = random.Random(0)

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            return lambda *args: self._call(name, getattr(os, name), *args)
        return getattr(os, name)

    def open_file(self, *args: Any, **options: Any) -> Any:
        return self._call("open", lambda *args: builtins.open(*args, **options), *args)

    def _tell(self, call: str, moment: str, args: tuple[Any, ...]) -> None:
        self._act(Place(next(self._numbers), call, moment, args))

    def _call(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        self._tell(name, "before", args)
        if name == "write":
            result = self._write(*args)
        else:
            result = None if name == "fsync" else call(*args)
        self._tell(name, "after", args)
        return result

    def _write(self, file: int, data: Any) -> int:
        """In two parts."""
        cut = os.write(file, data[: self._random.randrange(len(data) + 1)])
        self._tell("write", "during", (file,))
        return cut + (os.write(file, data[cut:]) if cut < len(data) else 0)


@contextmanager
def injected(act: Callable[[Place], object]) -> Iterator[None]:
    """Within, `act` is called before, during and after each system call of a save: it may raise, or kill."""
    system = _System(act)
    files.os, files.open = system, system.open_file  # type: ignore[attr-defined]
    try:
        yield
    finally:
        files.os = os
        del files.open  # type: ignore[attr-defined]


def places_of(save: Callable[[], object]) -> list[Place]:
    """The places of a save."""
    places: list[Place] = []
    with injected(places.append):
        save()
    return places
