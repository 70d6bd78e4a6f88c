"""Objects that have a state: their state is saved as a tree, and loaded into an object of the same kind.

An object with methods `state_dict` and `load_state_dict` has one: learning-rate schedulers and samplers do. Classes
whose state needs more register a handler here, as `spmd.bridge.torch` does for modules and optimisers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from spmd.errors import CheckpointError
from spmd.io.manifest import ArrayEntry
from spmd.layout import Layout
from spmd.random.generator import Generator

__all__ = ["KINDS", "STATES", "Held", "SavedPart", "StateHandler", "array_of_kind", "handler_of"]


@dataclass(frozen=True)
class Held:
    """An entry of a dictionary in a state of which only some workers of the mesh know the value, such as the parameters
    of a stage of a pipeline.

    All have an entry of this name. value: a tree, on these workers. workers: none where others hold it, or nobody.
    """

    value: Any = None
    workers: tuple[int, ...] = ()


class SavedPart(Protocol):
    """What a checkpoint holds of one object. Names are those of its leaves, below that of the object; "" if its state
    is one leaf."""

    name: str

    def names(self) -> list[str]:
        """The names that were saved."""
        ...

    def has(self, name: str) -> bool:
        """Whether a leaf is to be loaded: it was saved, and the caller wants it."""
        ...

    def has_tree(self, name: str) -> bool:
        """Whether a leaf or a tree is to be loaded."""
        ...

    def tree(self, array: Callable[[ArrayEntry, str], Any] | None = None) -> Any:
        """The tree that was saved. array(entry, kind): what to make of an array, by default the whole of it. kind: of
        its `Source`."""
        ...

    def read(self, name: str, like: Any) -> Any:
        """The leaf of a name, as an array like `like`. Raises CheckpointError where shapes or dtypes differ."""
        ...

    def value(self, name: str) -> Any:
        """The leaf or the tree of a name, with whole arrays."""
        ...

    def block(self, entry: ArrayEntry, layout: Layout | None = None, index: int = 0) -> np.ndarray:
        """The block of a worker in a layout, or the whole, of an array of `tree`."""
        ...


class StateHandler(Protocol):
    """How the state of a class of objects is saved and loaded."""

    def save(self, x: Any, others: Mapping[str, Any]) -> Any:
        """The state as a tree, with `Held` for what others lack. others: all objects with a state in the tree that is
        saved, by name."""
        ...

    def names(self, x: Any, saved: list[str], others: Mapping[str, Any]) -> list[str]:
        """The names of the leaves that it needs, out of those that are saved, and others that are missing there."""
        ...

    def load(self, x: Any, part: SavedPart, others: Mapping[str, Any]) -> Callable[[], None]:
        """Read the state, and give a function that sets it. So nothing changes where reading fails on any worker."""
        ...


class _StateDict:
    """Objects with `state_dict` and `load_state_dict`."""

    def save(self, x: Any, others: Mapping[str, Any]) -> Any:
        return x.state_dict()

    def names(self, x: Any, saved: list[str], others: Mapping[str, Any]) -> list[str]:
        return saved

    def load(self, x: Any, part: SavedPart, others: Mapping[str, Any]) -> Callable[[], None]:
        return partial(x.load_state_dict, part.tree())


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

    def load(self, x: Any, part: SavedPart, others: Mapping[str, Any]) -> Callable[[], None]:
        generator = x.rng if isinstance(x, Generator) else x
        state, own = part.tree(), generator.bit_generator.state["bit_generator"]
        saved = state.get("bit_generator") if isinstance(state, dict) else None
        if saved != own:
            raise CheckpointError.at(
                "spmd.load",
                argument=f"like, the object {part.name!r}",
                got=f"a generator by {own}, for the state of one by {saved}",
                need="the same kind of generator",
                mend=f"np.random.Generator(np.random.{saved or own}())",
            )
        return partial(setattr, generator.bit_generator, "state", state)


STATES: dict[type, StateHandler] = {np.random.Generator: _NumPyGenerator(), Generator: _NumPyGenerator()}
KINDS: dict[str, Callable[[np.ndarray], Any]] = {"": lambda array: array, "scalar": lambda array: array[()]}
"""What to make of an array in the state of an object, by the kind of its `Source`."""
_BY_METHODS = _StateDict()
_LIBRARIES: Mapping[str, str] = {"torch": "spmd.bridge.torch.checkpoints"}
"""What registers the classes of a library here, in `spmd.io.sources` and in `spmd.io.loading`; imported when a tree has
such objects."""


def array_of_kind(kind: str, array: np.ndarray) -> Any:
    """An array in the state of an object."""
    if kind not in KINDS:
        import_module(_LIBRARIES[kind])
    return KINDS[kind](array)


def handler_of(x: Any) -> StateHandler | None:
    """The handler of an object; None for leaves without a state."""
    for kind in type(x).__mro__:
        module = _LIBRARIES.get(kind.__module__.partition(".")[0])
        if module is not None:
            import_module(module)
            break
    for kind in type(x).__mro__:
        if kind in STATES:
            return STATES[kind]
    has_state = callable(getattr(x, "state_dict", None)) and callable(getattr(x, "load_state_dict", None))
    return _BY_METHODS if has_state and not isinstance(x, type) else None
