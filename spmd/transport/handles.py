"""Collectives that are under way."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np

__all__ = ["Chained", "Done", "Handle", "Outcome", "SentMessage", "read_only", "sealed"]


class Handle(Protocol):
    """A collective that is under way."""

    def wait(self) -> Any:
        """Its result, as soon as there is one."""
        ...


def read_only(x: Any) -> Any:
    """Make an array read-only, in place."""
    if type(x) is np.ndarray:
        x.setflags(False)  # pyright: ignore[reportCallIssue]  (by its name it takes twice as long)
    return x


def sealed(x: Any) -> Any:
    """Make an array read-only, in place, and those of which it is a view."""
    base = x
    while type(base) is np.ndarray:
        read_only(base)
        base = base.base
    return x


class Done:
    """A collective that is complete."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def wait(self) -> Any:
        return self.value


class SentMessage(Done):
    """A message to another worker. `wait` returns at once; `wait_until_taken` when the memory of the message is free.

    handle: what that waits for; None: it is free already.
    """

    __slots__ = ("handle",)

    def __init__(self, value: Any, handle: Handle | None = None):
        super().__init__(value)
        self.handle = handle

    def wait_until_taken(self) -> None:
        if self.handle is not None:
            self.handle.wait()
            self.handle = None


class Mapped:
    """A collective, and a function of its result, applied once."""

    __slots__ = ("handle", "make", "value")

    def __init__(self, handle: Handle, make: Callable[[Any], Any]):
        self.handle: Handle | None = handle
        self.make = make
        self.value: Any = None

    def wait(self) -> Any:
        if self.handle is not None:
            self.value, self.handle = self.make(self.handle.wait()), None
        return self.value


class Chained:
    """A collective of several steps: a generator that starts each, and receives its result."""

    __slots__ = ("handle", "steps", "value")

    def __init__(self, steps: Generator[Handle, Any, Any]):
        self.steps = steps
        self.handle: Handle | None = None
        self.value: Any = None
        self._go_on(None)

    def _go_on(self, arrived: Any) -> None:
        try:
            self.handle = self.steps.send(arrived)
        except StopIteration as end:
            self.handle, self.value = None, end.value

    def wait(self) -> Any:
        while self.handle is not None:
            self._go_on(self.handle.wait())
        return self.value


class Outcome:
    """The results of a run of all workers, its duration, and its number of waits.

    shared: the seconds in which several cores worked for one worker, or one worker for all. replicas: what the workers
    assumed to be one value.
    """

    __slots__ = ("replicas", "results", "seconds", "shared", "switches")

    def __init__(self, results: dict[int, Any], seconds: float, switches: int, shared: float = 0.0):
        self.results = results
        self.seconds = seconds
        self.switches = switches
        self.shared = shared
        self.replicas: Any = None
