"""Objects that have a state: their state is saved as a tree, and loaded into an object of the same kind.

An object with methods `state_dict` and `load_state_dict` has one: learning-rate schedulers and samplers do. Classes
whose state needs more register a handler here, as `spmd.bridge.torch` does for modules and optimisers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from spmd.errors import CheckpointError
from spmd.random.generator import Generator

__all__ = ["STATES", "SavedPart", "StateHandler", "handler_of", "load_library_of"]


class SavedPart(Protocol):
    """What a checkpoint holds of one object."""

    name: str

    def names(self) -> list[str]:
        """The names of its leaves, below that of the object."""
        ...

    def tree(self, array: Callable[[str, Any, str], Any] | None = None) -> Any:
        """The tree that was saved. array(name, entry, kind): the array of a leaf, by default the whole of it. name: in
        the checkpoint. entry: an `ArrayEntry`. kind: of its `Source`."""
        ...

    def read(self, name: str, like: Any) -> Any:
        """The leaf of a name, as an array like `like`."""
        ...


class StateHandler(Protocol):
    """How the state of a class of objects is saved and loaded."""

    def save(self, x: Any, others: Mapping[str, Any]) -> Any:
        """The state as a tree. others: all objects with a state in the tree that is saved, by name."""
        ...

    def names(self, x: Any, saved: list[str]) -> list[str]:
        """The names of the leaves that it needs, out of those that are saved, and others that are missing there."""
        ...

    def load(self, x: Any, part: SavedPart, others: Mapping[str, Any]) -> None:
        """Give x the state that was saved."""
        ...


class _StateDict:
    """Objects with `state_dict` and `load_state_dict`."""

    def save(self, x: Any, others: Mapping[str, Any]) -> Any:
        return x.state_dict()

    def names(self, x: Any, saved: list[str]) -> list[str]:
        return saved or ["state_dict"]

    def load(self, x: Any, part: SavedPart, others: Mapping[str, Any]) -> None:
        x.load_state_dict(part.tree())


class _NumPyGenerator(_StateDict):
    """`numpy.random.Generator`, and those of `spmd.random.default_rng` that are equal on all workers."""

    def save(self, x: Any, others: Mapping[str, Any]) -> Any:
        if isinstance(x, Generator):
            if x.axes:
                raise CheckpointError.at(
                    "spmd.save",
                    got=f"a random generator {x!r}",
                    need="one that is equal on all workers",
                    mend="spmd.random.key(seed): numbers drawn by keys are the same on any mesh",
                )
            x = x.rng
        return x.bit_generator.state

    def load(self, x: Any, part: SavedPart, others: Mapping[str, Any]) -> None:
        (x.rng if isinstance(x, Generator) else x).bit_generator.state = part.tree()


STATES: dict[type, StateHandler] = {np.random.Generator: _NumPyGenerator(), Generator: _NumPyGenerator()}
_BY_METHODS = _StateDict()
_LIBRARIES: Mapping[str, str] = {"torch": "spmd.bridge.torch.checkpoints"}


def load_library_of(x: Any) -> None:
    """Import what registers the classes of x's library, if a tree has objects of it before the bridge is imported."""
    for kind in type(x).__mro__:
        module = _LIBRARIES.get(kind.__module__.partition(".")[0])
        if module is not None:
            import_module(module)
            return


def handler_of(x: Any) -> StateHandler | None:
    """The handler of an object; None for leaves without a state."""
    load_library_of(x)
    for kind in type(x).__mro__:
        if kind in STATES:
            return STATES[kind]
    has_state = callable(getattr(x, "state_dict", None)) and callable(getattr(x, "load_state_dict", None))
    return _BY_METHODS if has_state else None
