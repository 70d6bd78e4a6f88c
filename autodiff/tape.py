"""The tape: the operations of one differentiation, in order.

A `Tape` is a list of `Node`s. Each node keeps only what its derivative rules need. The backward sweep (`backward.py`)
visits the nodes from the last to the first, calls their rules and sums the cotangents of each node.

A cotangent is a linear functional under the plain pairing sum(g * x), without a conjugate: rules are transposes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from threading import RLock
from typing import Any, Protocol

import numpy as np

from spmd.autodiff.sanitizers import FINITE, WATCHING, Watched
from spmd.autodiff.tree import Leaf
from spmd.errors import ClosureError, DifferentiationError, message

__all__ = [
    *("ACTIVE", "STEP", "Arriving", "Bundle", "Dropped", "Future", "Like", "Node", "Place", "Tape", "recording"),
    *("redirected", "suspended"),
]

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
        need="the attributes that the tape keeps of such a parameter: .shape, .dtype, .ndim and .size",
        mend="name the parameter without the underscore",
    )


Place = tuple[int, Leaf | None]
"""The index of a differentiated argument, and a leaf of its tree."""


STEP: Place = (-1, None)
"""The place of a leaf that stands for a value of a loop at the start of a step. Its cotangent is never deferred: it is
summed in the order in which the terms arrive, as that of any value within a tape."""


class Node(Like):
    """One recorded result.

    prim: the primitive that computed it; None marks a leaf, which is a differentiated argument or a part of one.
    pulls, parents: the rules and the nodes of the differentiated arguments.
    args: the result and the arguments; None for those that no rule reads.
    shape, dtype: of the result; a dtype of None marks a weakly typed Python number.
    place: of a leaf, its argument and its position in the tree, where known.
    results: the shapes and dtypes of several results; one more node per result selects it.
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

    level: higher for a later, inner differentiation.
    once: the tape is swept only once.
    open: what recording appends to: `nodes`, or an object that raises.
    varied_copies: operands converted to other states, cached so that their cotangents are summed before they are sent.
    varied_scalars: by id, the nodes of scalars that were converted because another operand had another state.
    outer: while a step is recorded apart, what `open` and `varied_copies` are outside of it, the step's nodes, and
        this of a loop around.
    dropped: what makes the arrays again that the tape does not keep, if there are any.
    """

    __slots__ = ("dropped", "level", "lock", "nodes", "once", "open", "outer", "varied_copies", "varied_scalars")

    def __init__(self, once: bool = False) -> None:
        self.level = next(_levels)
        self.once = once
        self.nodes: list[Node] = Watched() if WATCHING.get() or FINITE.get() else []
        self.open: Any = self.nodes
        self.lock = RLock()
        self.varied_copies: dict[Any, Any] = {}
        self.outer: tuple[Any, dict[Any, Any], list[Node], Any] | None = None
        self.varied_scalars: dict[int, Node] = {}
        self.dropped: Dropped | None = None

    def leaf(self, shape, dtype, place: Place | None = None) -> Node:
        node = Node(None, (), (), (), {}, shape, dtype)
        node.place = place
        self.open.append(node)
        return node

    @contextmanager
    def before_step(self, node: Node) -> Iterator[None]:
        """Within the block a node from outside of the step that is recorded now is used outside of it too."""
        outer = self.outer
        if outer is None or any(n is node for n in outer[2]):
            yield
            return
        before = self.open, self.varied_copies
        self.open, self.varied_copies, _, self.outer = outer
        try:
            with self.before_step(node):
                yield
        finally:
            (self.open, self.varied_copies), self.outer = before, outer

    @staticmethod
    @contextmanager
    def before_steps(x: Any) -> Iterator[None]:
        """The same for the nodes of a traced array on its tape, and on the tapes below."""
        with ExitStack() as stack:
            while getattr(x, "tape", None) is not None:
                stack.enter_context(x.tape.before_step(x.node))
                x = x.value
            yield

    def all_varied_copies(self) -> dict[Any, Any]:
        """The varied copies, with those that a step finds outside of it."""
        copies, outer = dict(self.varied_copies), self.outer
        while outer is not None:
            copies, outer = {**outer[1], **copies}, outer[3]
        return copies

    def refuse(self, refusal: Callable[[], Exception]) -> None:
        """Make recording raise: a traced array has outlived its transformation, or crossed into a body."""
        self.open = _Closed(refusal)


class _Closed:
    """Takes the place of the nodes of a closed tape."""

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
    """A context manager with a new innermost tape; recording on it after the block is an error."""

    __slots__ = ("tape", "token")

    def __init__(self, once: bool = False):
        self.tape = Tape(once)

    def __enter__(self) -> Tape:
        self.token = ACTIVE.set((*ACTIVE.get(), self.tape))
        return self.tape

    def __exit__(self, *_: object) -> None:
        ACTIVE.reset(self.token)
        self.tape.refuse(_leaked)
        self.tape.varied_copies = {}  # The copies refer to the tape: the cycle would wait for the garbage collector.


def suspended() -> AbstractContextManager[None]:
    """Within the block, recording on the active tapes is an error: a body may use only its arguments."""
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
    """Within the block, recording on active tapes of this level or an inner one is an error."""
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
    """A cotangent that arrives later."""

    def begin(self) -> None:
        """Start to send it, if it is due. Only this object holds its terms."""
        ...

    def wait(self) -> Any:
        """Wait for the cotangent."""
        ...


class Arriving:
    """A cotangent that the pullback of several parents gives before it has arrived. wait: waits for it."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], Any]):
        self.wait = wait


class Dropped(Protocol):
    """What makes arrays again that a tape does not keep: see `dropping`."""

    def swept(self) -> None:
        """A backward sweep has ended."""
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
        """The cotangents of all results; zeros where none arrived."""
        like = next(iter(self.parts.values()))
        return tuple(
            self.parts[k] if k in self.parts else np.zeros_like(like, shape=r.shape, dtype=r.dtype)
            for k, r in enumerate(results)
        )


@contextmanager
def redirected(
    pairs: Iterable[tuple[Tape, Tape]], *, step: bool = False, varied: Mapping[Tape, dict[Any, Any]] | None = None
) -> Iterator[None]:
    """Within the block, recording on the first tape of each pair goes to the second.

    step: the block is a step of a loop: what varies a node from outside is recorded outside, once for all steps.
    varied: by tape, the varied copies of nodes from outside, if not those of now."""
    pairs = list(pairs)
    before = [(tape.open, tape.varied_copies, tape.outer, tape.once) for tape, _ in pairs]
    for tape, side_tape in pairs:
        tape.once = side_tape.once
        copies = tape.varied_copies if varied is None else varied.get(tape, {})
        tape.outer = (tape.open, copies, side_tape.nodes, tape.outer) if step else None
        tape.open, tape.varied_copies = side_tape.nodes, {}
    try:
        yield
    finally:
        for (tape, _), (nodes, copies, outer, once) in zip(pairs, before, strict=True):
            tape.open, tape.varied_copies, tape.outer, tape.once = nodes, copies, outer, once
