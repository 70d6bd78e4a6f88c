"""The tape: what was computed, in order, and the sweep that goes back over it.

A `Tape` is a list of `Node`s. Each node keeps what its derivative rules ask for, and nothing else. The backward
sweep is one loop from the last node to the first; it calls the rules and adds the cotangents that meet in a node.

A cotangent is a linear functional under the plain pairing sum(g * x), without a conjugate: rules are transposes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from threading import RLock
from typing import Any, Protocol

import numpy as np

from spmd.autodiff.sanitizers import FINITE, WATCHING, Watched
from spmd.autodiff.tree import Leaf
from spmd.errors import ClosureError, DifferentiationError, message

__all__ = ["ACTIVE", "Bundle", "Future", "Like", "Node", "Place", "Tape", "recording", "suspended"]

_levels = itertools.count(1)
ACTIVE: ContextVar[tuple[Tape, ...]] = ContextVar("spmd_active_tapes", default=())


class Like:
    """The shape and dtype of an array."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape, dtype):
        self.shape = shape
        self.dtype = dtype

    __hash__ = object.__hash__

    def __array_ufunc__(self, *_, **__):
        raise DifferentiationError(underscored("the value"))

    __array__ = __add__ = __mul__ = __sub__ = __truediv__ = __neg__ = __pow__ = __getitem__ = __array_ufunc__
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __abs__ = __array_ufunc__
    __radd__ = __rmul__ = __rsub__ = __rtruediv__ = __rpow__ = __matmul__ = __rmatmul__ = __array_ufunc__

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


def underscored(what: str) -> str:
    return message(
        "a derivative rule",
        got=f"{what} of a parameter whose name begins with an underscore",
        need="what was kept: of such a parameter .shape, .dtype, .ndim and .size",
        mend="name the parameter without the underscore",
    )


Place = tuple[int, Leaf | None]
"""Which of the arguments that are differentiated, and which leaf of it."""


class Node(Like):
    """One recorded result: the primitive that made it, the rules and the nodes of its differentiated arguments, and
    what the rules ask for: `args` holds the result and the arguments, None for those that no rule looks at.

    `shape` and `dtype` are those of the result; a `dtype` of None marks a weakly typed Python number.
    A node without a primitive is a leaf: an argument that is differentiated, or a part of one. `place` says which: the
    number of the argument and the leaf of its tree, where these are known.
    A node of a function with several results has their shapes and dtypes in `results`; a node per result selects from
    it.
    """

    __slots__ = ("args", "kwargs", "parents", "place", "prim", "pulls", "results")

    def __init__(self, prim, pulls, parents, args, kwargs, shape, dtype):
        self.prim = prim
        self.pulls = pulls
        self.parents = parents
        self.args = args
        self.kwargs = kwargs
        self.shape = shape
        self.dtype = dtype


class Tape:
    """The nodes of one differentiation, in the order they were computed.

    A higher `level` means a later, inner differentiation. `twins` caches what operands were brought to other
    states, so that their cotangents meet before they are sent anywhere. `joined` has, by id, the nodes of scalars that
    were brought to another state because they met others in it. `once` tells that it will be swept one time.
    `open` is what recording appends to: the nodes, or something that refuses.
    """

    __slots__ = ("joined", "level", "lock", "nodes", "once", "open", "twins")

    def __init__(self, once: bool = False) -> None:
        self.level = next(_levels)
        self.once = once
        self.nodes: list[Node] = Watched() if WATCHING.get() or FINITE.get() else []
        self.open: Any = self.nodes
        self.lock = RLock()
        self.twins: dict[Any, Any] = {}
        self.joined: dict[int, Node] = {}

    def leaf(self, shape, dtype, place: Place | None = None) -> Node:
        node = Node(None, (), (), (), {}, shape, dtype)
        node.place = place
        self.open.append(node)
        return node

    def refuse(self, refusal: Callable[[], Exception]) -> None:
        """From now on recording raises: a traced array has outlived its transformation, or crossed into a body."""
        self.open = _Closed(refusal)


class _Closed:
    """Stands for the nodes of a tape that takes no more."""

    __slots__ = ("refusal",)

    def __init__(self, refusal: Callable[[], Exception]):
        self.refusal = refusal

    def append(self, node: Node) -> None:
        raise self.refusal()


def _leaked() -> Exception:
    return DifferentiationError.at(
        "a traced array",
        got="an operation on an array traced by a transformation that has already ended",
        need="a value that was returned by the transformed function",
        mend="return it (grad(f, has_aux=True) returns extra values); do not keep it in a variable outside",
    )


def _closed_over() -> Exception:
    return ClosureError.at(
        "spmd.map",
        got="a body that uses an array traced outside of its map",
        need="bodies that use their arguments only",
        mend="pass the array to the map as an argument, with a spec in in_specs (P() for a replicated one)",
    )


class recording:
    """A new tape, innermost until the block ends; recording on it later is an error."""

    __slots__ = ("tape", "token")

    def __init__(self, once: bool = False):
        self.tape = Tape(once)

    def __enter__(self) -> Tape:
        self.token = ACTIVE.set((*ACTIVE.get(), self.tape))
        return self.tape

    def __exit__(self, *_: object) -> None:
        ACTIVE.reset(self.token)
        self.tape.refuse(_leaked)
        self.tape.twins = {}  # They know their tape: what they hold would stay until cycles are looked for.


def suspended() -> AbstractContextManager[None]:
    """Within the block, recording on the tapes that are active here is an error: bodies take arguments."""
    return _suspended() if ACTIVE.get() else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _suspended() -> Iterator[None]:
    with refusing(0, _closed_over):
        token = ACTIVE.set(())
        try:
            yield
        finally:
            ACTIVE.reset(token)


@contextmanager
def refusing(level: int, refusal: Callable[[], Exception]) -> Iterator[None]:
    """Within the block, recording on the tapes here that are of this level or further in is an error."""
    tapes = [tape for tape in ACTIVE.get() if tape.level >= level]
    before = [tape.open for tape in tapes]
    for tape in tapes:
        tape.refuse(refusal)
    try:
        yield
    finally:
        for tape, nodes in zip(tapes, before, strict=True):
            tape.open = nodes


class Future(Protocol):
    """A cotangent that is owed."""

    def begin(self) -> None:
        """Send it, if that is to be done by now. Nobody but who owes it has the terms."""
        ...

    def wait(self) -> Any:
        """It, when it has come."""
        ...


class Bundle:
    """The cotangents of a node with several results, by the position of the result."""

    __slots__ = ("parts",)

    def __init__(self, parts: dict[int, Any]):
        self.parts = parts

    def __add__(self, other: Bundle) -> Bundle:
        parts = dict(self.parts)
        for k, g in other.parts.items():
            parts[k] = parts[k] + g if k in parts else g
        return Bundle(parts)

    def filled(self, results: tuple[Like, ...]) -> tuple[Any, ...]:
        """The cotangents of all results, zeros where none came."""
        like = next(iter(self.parts.values()))
        return tuple(
            self.parts[k] if k in self.parts else np.zeros_like(like, shape=r.shape, dtype=r.dtype)
            for k, r in enumerate(results)
        )
