"""Large arrays that a tape does not keep: whoever made them makes them again in the backward sweep.

`drop_arrays` replaces the arrays, and all views of them, in what nodes keep. A node that has lost some is a
`DroppedNode`: when the sweep asks for its arguments, they are there again. Other nodes are as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from spmd.autodiff.tape import Node, Tape
from spmd.autodiff.tracer import Array

__all__ = ["DroppedNode", "Source", "drop_arrays", "drops", "recorded_args"]

recorded_args = Node.args.__get__  # type: ignore[attr-defined]
"""What a node keeps, as it is: arrays that were dropped are not made again."""
_keep = Node.args.__set__  # type: ignore[attr-defined]


class Source(Protocol):
    """Makes arrays again."""

    def arrays(self) -> Sequence[np.ndarray]:
        """The arrays, C-contiguous, in the order in which they were dropped."""
        ...


class DroppedNode(Node):
    """A node that keeps, in place of some arrays, where they come from."""

    __slots__ = ()

    @property
    def args(self) -> Any:
        """The result and the arguments, with the dropped arrays made again."""
        return _restored(recorded_args(self))

    @args.setter
    def args(self, args: Any) -> None:
        _keep(self, args)


class _View(NamedTuple):
    """In place of an array: the source, the number of the whole there, and where in the whole the array lies."""

    source: Source
    number: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    def restored(self) -> np.ndarray:
        """The array again."""
        whole = self.source.arrays()[self.number]
        return np.ndarray(self.shape, self.dtype, whole, self.offset, self.strides)


class _StatedView(NamedTuple):
    """In place of an undifferentiated array of a body."""

    view: _View
    state: Any

    def restored(self) -> Array:
        """The array again."""
        return Array(self.view.restored(), self.state)


def _restored(kept: Any) -> Any:
    """Nested tuples and lists with the dropped arrays made again."""
    if isinstance(kept, _View | _StatedView):
        return kept.restored()
    if type(kept) is tuple or type(kept) is list:
        return type(kept)([_restored(x) for x in kept])
    return kept


class _Wholes:
    """Arrays that are to be dropped, and their views."""

    def __init__(self, wholes: Sequence[np.ndarray], source: Source):
        self.source = source
        self.spans = [(start := _address(x), start + x.nbytes) for x in wholes]

    def view(self, x: Any) -> _View | None:
        """What stands for an array in the memory of a whole; None for others."""
        if type(x) is not np.ndarray or not x.nbytes:
            return None
        at = _address(x)
        for number, (start, end) in enumerate(self.spans):
            if start <= at < end:
                return _View(self.source, number, at - start, x.shape, x.strides, x.dtype)
        return None

    def dropped(self, kept: Any) -> Any:
        """Nested tuples and lists with views in place of arrays; the same object where there are none."""
        if type(kept) is np.ndarray:
            return self.view(kept) or kept
        if type(kept) is Array:
            view = self.view(kept.value) if kept.tape is None else None
            return kept if view is None else _StatedView(view, kept.state)
        if type(kept) is tuple or type(kept) is list:
            parts = [self.dropped(x) for x in kept]
            return kept if all(a is b for a, b in zip(parts, kept, strict=True)) else type(kept)(parts)
        return kept


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def drops(tape: Tape) -> bool:
    """Whether arrays can be dropped from what this tape records now: not while a step is recorded apart, or a debugger
    looks at what nodes keep."""
    return tape.open is tape.nodes and type(tape.nodes) is list


def drop_arrays(tape: Tape, nodes: Iterable[Node], wholes: Sequence[np.ndarray], source: Source) -> bool:
    """Drop arrays from what these nodes of a tape keep. Whether there were any."""
    arrays, found = _Wholes(wholes, source), False
    for node in nodes:
        if not node.prim:
            continue
        kept = recorded_args(node)
        left = arrays.dropped(kept)
        if left is not kept:
            _keep(node, left)
            node.__class__ = DroppedNode
            found = True
    for key, copy in [*tape.varied_copies.items()]:
        if type(copy) is Array and arrays.view(copy.value) is not None:
            del tape.varied_copies[key]  # It keeps the array alive. If it is needed again, there will be another one.
    return found
