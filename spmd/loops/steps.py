"""One step of a loop as a function of flat lists of leaves, and the checks of its carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import tree
from spmd.autodiff.staging.recorder import slot_of
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import name_of, refuse_handles
from spmd.errors import LayoutError, describe
from spmd.frontends import frontend
from spmd.mesh import WORKER
from spmd.state import State

__all__ = [
    "Step",
    "array_leaf",
    "carry_leaves",
    "fixed",
    "is_number",
    "layout_of_leaf",
    "state_of_leaf",
    "where_of",
]


def where_of(function: str, f: Callable) -> str:
    """A call in error messages: `spmd.scan of step`."""
    return f"spmd.{function} of {name_of(f)}"


def is_number(x: Any) -> bool:
    """Whether x is a number of Python's, or stands for one: it takes the dtype of the arrays that it meets."""
    return type(slot_of(value_of(x))) in (bool, int, float, complex)


def carry_leaves(where: str, leaves: Sequence[Any], paths: Sequence[str]) -> list[Any]:
    """The leaves of an initial carry as arrays of where the loop runs; Python's numbers stay what they are."""
    refuse_handles(list(leaves), where, "init")
    return [array_leaf(_checked(where, x, f"init{path}")) for x, path in zip(leaves, paths, strict=True)]


def _checked(where: str, x: Any, argument: str) -> Any:
    """A leaf of a carry, which must be an array or a number."""
    if type(x) in (Array, PartitionedArray) or frontend(x) is not None or is_number(x) or hasattr(x, "dtype"):
        return x
    raise LayoutError.at(
        where,
        argument=argument,
        got=describe(x),
        need="an array or a number: what a step takes and returns",
        mend="close over what does not change; spmd.tree.register(cls) for a class that holds arrays",
    )


def array_leaf(x: Any) -> Any:
    """An array or a number with its state, in a body that tracks states; anything else unchanged."""
    worker = WORKER.get()
    if worker is None or worker.frontend is not None or type(x) in (Array, PartitionedArray) or frontend(x) is not None:
        return x
    return worker.carrying(x, worker.state())


def layout_of_leaf(x: Any) -> Any:
    """How a value lies: its state in a body, its layout outside; None for bare data."""
    if type(x) is Array:
        bare = value_of(x)
        return bare.layout if type(bare) is PartitionedArray else x.state
    if type(x) is PartitionedArray:
        return x.layout
    known = frontend(x)
    worker = WORKER.get()
    return known.state(x) if known is not None and worker is not None and worker.tracked else None


def state_of_leaf(x: Any) -> State | None:
    """The state of a value in a body; None outside, and for bare data."""
    found = layout_of_leaf(x)
    return found if isinstance(found, State) else None


def _reduced(x: Any) -> Any:
    """A global array without unreduced axes; anything else unchanged."""
    bare = value_of(x)
    return x.reduced if type(bare) is PartitionedArray and bare.layout.unreduced else x


def fixed(where: str, path: str, before: Any, after: Any) -> Any:
    """A leaf of the carry after a step, which must be what it was before: in shape, dtype, and state or layout.

    A Python number may become an array, and a Python number takes the dtype of the array whose place it takes."""
    if is_number(before):
        if np.shape(slot_of(value_of(after))) == ():
            return after
    elif is_number(after) and before.shape == ():
        after = array_leaf(np.asarray(after, before.dtype) if type(after) is not Array else after)
        if type(after) is Array and is_number(after):
            after = after.astype(before.dtype)
    if type(value_of(before)) is PartitionedArray and not value_of(before).layout.unreduced:
        after = _reduced(after)
    if not hasattr(after, "dtype"):
        raise _changed(where, path, before, after, "an array")
    if type(before) is not Array and type(after) is Array and after.tape is None and layout_of_leaf(before) is None:
        return after  # bare data, in a body that knows no states before its first operation
    if tuple(after.shape) != tuple(np.shape(before)):
        raise _changed(where, path, before, after, "one shape", "pad the array to one shape")
    if after.dtype != before.dtype:
        raise _changed(
            where, path, before, after, "one dtype", f"x.astype({str(before.dtype)!r}), in the step or before"
        )
    if (had := layout_of_leaf(before)) != (has := layout_of_leaf(after)):
        raise _changed_layout(where, path, before, after, had, has)
    return after


def _changed(where: str, path: str, before: Any, after: Any, what: str, mend: str = "") -> LayoutError:
    return LayoutError.at(
        where,
        argument=f"the carry{path}, which a step returns",
        got=describe(after),
        need=f"{describe(before)}, as the step takes it: {what} throughout the loop",
        mend=mend or "return the carry first, and what is to be collected second: (carry, y)",
    )


def _changed_layout(where: str, path: str, before: Any, after: Any, had: Any, has: Any) -> LayoutError:
    if hasattr(has, "varying") and hasattr(had, "varying") and type(value_of(after)) is not PartitionedArray:
        more = sorted(has.varying - had.varying)
        names = more[0] if len(more) == 1 else tuple(more)
        mend = f"spmd.pvary(init, {names!r}) before the loop" if more else "a step that varies it as the initial value"
        return _changed(where, path, before, after, "one state", mend)
    if type(value_of(before)) is PartitionedArray and type(value_of(after)) is PartitionedArray:
        mend = f"spmd.reshard(x, {had if had.spec is None else had.spec}) at the end of the step"
        return _changed(where, path, before, after, "one layout", mend)
    mend = "spmd.put(x, spec) of an initial value that becomes a global array"
    return _changed(where, path, before, after, "one kind of array", mend)


class Step:
    """A user's step as a function of flat lists: `step(carry, x)` gives the leaves of the next carry, and of y.

    carry, x: the structures of its arguments. y: that of what it returns besides, after the first call.
    """

    def __init__(self, where: str, f: Callable, carry: Any, x: Any):
        self.where, self.f, self.carry, self.x = where, f, carry, x
        self.y: Any = None
        self.paths = tree.shown_paths(carry)

    def __call__(self, carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        out = self.f(tree.unflatten(self.carry, carry), tree.unflatten(self.x, x))
        if not isinstance(out, tuple) or len(out) != 2:
            raise LayoutError.at(
                self.where,
                argument="the result of a step",
                got=describe(out),
                need="a tuple (carry, y) of two",
                mend="return carry, None where nothing is collected",
            )
        leaves, structure = tree.flatten(out[0])
        if structure != self.carry:
            raise LayoutError.at(
                self.where,
                argument="the carry that a step returns",
                got=f"a tree with the leaves {', '.join(tree.shown_paths(structure)) or 'none'}",
                need=f"the tree that it takes, with the leaves {', '.join(self.paths) or 'none'}",
                mend="return (carry, y): the carry with all its parts first",
            )
        refuse_handles(leaves, self.where, "carry")
        new = [fixed(self.where, *both) for both in zip(self.paths, carry, leaves, strict=True)]
        ys, structure = tree.flatten(out[1])
        refuse_handles(ys, self.where, "y")
        if self.y is None:
            self.y = structure
        elif structure != self.y:
            raise LayoutError.at(
                self.where,
                argument="y, which a step returns",
                got=f"a tree with the leaves {', '.join(tree.shown_paths(structure)) or 'none'}",
                need=f"one tree in all steps, with the leaves {', '.join(tree.shown_paths(self.y)) or 'none'}",
                mend="return the same names and numbers of values in each step",
            )
        return new, ys
