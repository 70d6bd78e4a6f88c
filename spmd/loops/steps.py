"""One step of a loop as a function of flat lists of leaves, and the checks of its carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import tree
from spmd.autodiff.staging.recorder import one_line, slot_of
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import name_of, refuse_handles
from spmd.errors import LayoutError, describe, one_or_all
from spmd.frontends import frontend
from spmd.global_ops.resharding import reshard
from spmd.mesh import WORKER
from spmd.state import State, state_of

__all__ = [
    "Step",
    "array_leaf",
    "as_number",
    "carry_leaves",
    "check_function",
    "check_leaf",
    "fixed",
    "holds",
    "is_number",
    "layout_of_leaf",
    "state_of_leaf",
    "where_of",
    "widens",
]


_KINDS = (bool, int, float, complex)
"""Python's numbers, from the narrowest kind to the widest."""


def where_of(function: str, f: Callable) -> str:
    """A call in error messages: `spmd.scan of step`."""
    return f"spmd.{function} of {name_of(f)}"


def check_function(where: str, f: Any, argument: str) -> None:
    """Raise where something else was given for a function."""
    if not callable(f):
        mend = "a function, as in lambda x: 2 * x; see the order of the arguments"
        raise LayoutError.at(where, argument=argument, got=describe(f), need="a function", mend=mend)


def is_number(x: Any) -> bool:
    """Whether x is a number of Python's, or stands for one: it takes the dtype of the arrays that it meets."""
    return _kind(x) in _KINDS


def carry_leaves(where: str, leaves: Sequence[Any], paths: Sequence[str], argument: str = "init") -> list[Any]:
    """The leaves of an initial carry as arrays of where the loop runs; Python's numbers stay what they are.

    argument: what it is called in errors."""
    refuse_handles(list(leaves), where, argument)
    for x, path in zip(leaves, paths, strict=True):
        check_leaf(where, x, f"{argument}{path}")
    return [array_leaf(x) for x in leaves]


def check_leaf(where: str, x: Any, argument: str) -> None:
    """Raise where a leaf is neither an array of numbers nor a number."""
    kind = getattr(getattr(x, "dtype", None), "kind", "")  # dtypes of other libraries have none
    if is_number(x) or hasattr(x, "dtype") and hasattr(x, "shape") and kind not in ("O", "S", "U"):
        return
    raise LayoutError.at(
        where,
        argument=argument,
        got=describe(x),
        need="an array of numbers, or a number",
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
    if type(bare) is not PartitionedArray or not bare.layout.unreduced:
        return x
    return x.reduced if type(x) is PartitionedArray else reshard(x, bare.layout.reduced)


def fixed(where: str, path: str, before: Any, after: Any) -> Any:
    """A leaf of the carry after a step, which must be what it was before: in shape, dtype, and state or layout.

    A Python number may become an array, and a Python number takes the dtype of the array whose place it takes, if that
    holds such numbers."""
    check_leaf(where, after, named := f"the carry{path}, which a step returns")
    if not is_number(after) and type(before) is Array:
        after = array_leaf(after)
    what = None
    if np.shape(slot_of(value_of(before))) == np.shape(slot_of(value_of(after))) == ():
        if is_number(before) and is_number(after):
            return as_number(after, before)
        if is_number(before) and holds(after, before):
            return after
        if is_number(before) or (is_number(after) and not holds(before, after)):
            what = "one dtype", "an initial value of the dtype that the step returns; or x.astype(dtype) in the step"
        elif is_number(after):
            after = _as_array(after, before)
    if type(value_of(before)) is PartitionedArray and not value_of(before).layout.unreduced:
        after = _reduced(after)
    if what := what or _difference(before, after):
        need, mend = what
        raise LayoutError.at(
            where,
            argument=named,
            got=_described(after),
            need=f"{_described(before)}, as the step takes it: {need} throughout the loop",
            mend=mend,
        )
    return after


def holds(x: Any, number: Any) -> bool:
    """Whether the dtype of an array holds Python numbers of this kind: floats hold integers, integers no floats."""
    known = frontend(x)
    dtype = known.dtype(x) if known is not None else x.dtype
    return {"b": 0, "i": 1, "u": 1, "c": 3}.get(dtype.kind, 2) >= _KINDS.index(_kind(number))


def _as_array(number: Any, like: Any) -> Any:
    """A number as an array of the dtype of another array."""
    known = frontend(like)
    if known is not None:
        return known.cast(known.carrying(np.asarray(number), state_of(()), False), known.dtype(like))
    if type(number) is not Array:
        return array_leaf(one_line(np.asarray, (number, like.dtype)))
    return number.astype(like.dtype)


def as_number(x: Any, like: Any) -> Any:
    """A number, as one of the kind of another number if that is the wider kind: 1 is 1.0 beside floats."""
    return x + _kind(like)() if widens(x, like) else x


def widens(x: Any, y: Any) -> bool:
    """Whether y is a number of a wider kind than the number x."""
    return _KINDS.index(_kind(x)) < _KINDS.index(_kind(y))


def _kind(number: Any) -> type:
    return type(slot_of(value_of(number)))


def _described(x: Any) -> str:
    """A leaf for errors; of a traced global array its layout."""
    return describe(x.value if type(x) is Array and type(x.value) is PartitionedArray else x)


def _difference(before: Any, after: Any) -> tuple[str, str] | None:
    """What a step changes of a leaf of the carry, and the mend; None where it changes nothing."""
    shape = tuple(np.shape(slot_of(value_of(after))))
    if shape != tuple(np.shape(slot_of(value_of(before)))):
        if is_number(before):
            return "one shape", f"an array as initial value: np.full({shape}, ...)"
        return "one shape", "an initial value of the shape that the step returns; pad what grows or shrinks"
    if after.dtype != before.dtype:
        cast = f"x.astype({str(before.dtype)!r})" if frontend(before) is None else f"x.to({before.dtype})"
        return "one dtype", f"{cast} in the step, or another dtype of the initial value"
    had, has = layout_of_leaf(before), layout_of_leaf(after)
    bare = type(after) is Array and after.tape is None and type(layout_of_leaf(before)) is type(None)
    if bare or had == has:
        return None  # also of bare data, in a body that knows no states before its first operation
    if type(value_of(before)) is PartitionedArray and type(value_of(after)) is PartitionedArray:
        if had.spec == has.spec or had.spec is None:
            return f"one layout, {had!r}, and not {has!r},", "spmd.reshard(x, layout) at the end of the step"
        return "one layout", f"spmd.reshard(x, {had.spec}) at the end of the step"
    if hasattr(had, "varying") and hasattr(has, "varying"):
        more = sorted(has.varying - had.varying)
        if more:
            return "one state", f"spmd.pvary(x, {one_or_all(more)}) of the initial value"
        return "one state", "an initial value in the state that the step returns; spmd.pvary(x, axis_name) in the step"
    return "one kind of array", "spmd.put(x, spec) of an initial value that becomes a global array"


class Step:
    """A user's step as a function of flat lists: `step(carry, x)` gives the leaves of the next carry, and of y.

    carry, x: the structures of its arguments. y: that of what it returns besides, after the first call.
    """

    def __init__(self, where: str, f: Callable, carry: Any, x: Any):
        self.where, self.f, self.carry, self.x = where, f, carry, x
        self.y: Any = None
        self.paths = tree.shown_paths(carry)
        self._ys: list[tuple[Any, Any] | None] = []  # the shapes and dtypes of the leaves of y; None for numbers

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
            raise self._another_tree("the carry that a step returns", structure, self.carry)
        refuse_handles(leaves, self.where, "carry")
        new = [fixed(self.where, *both) for both in zip(self.paths, carry, leaves, strict=True)]
        ys, structure = tree.flatten(out[1])
        refuse_handles(ys, self.where, "y")
        if self.y is None:
            self._collects(structure, ys)
        elif structure != self.y:
            raise self._another_tree("y, which a step returns", structure, self.y)
        for k, (y, known) in enumerate(zip(ys, self._ys, strict=True)):
            now = _shape_and_dtype(y)
            if now is not None and known is not None and now != known:
                raise self._another_y(tree.shown_paths(structure)[k], y, *known)
        return new, ys

    def _collects(self, structure: Any, ys: Sequence[Any]) -> None:
        """Note what the first step returns besides the carry."""
        for y, path in zip(ys, tree.shown_paths(structure), strict=True):
            check_leaf(self.where, y, f"y{path}, which a step returns")
        self.y, self._ys = structure, [_shape_and_dtype(y) for y in ys]

    def _another_tree(self, argument: str, got: Any, need: Any) -> LayoutError:
        got, need = (tree.Described.of(x).text for x in (got, need))
        return LayoutError.at(
            self.where,
            argument=argument,
            got=f"the tree {got}; each * is a leaf",
            need=f"{need}: one tree throughout the loop",
            mend="the same kinds of containers with the same keys in each step; the carry comes before y",
        )

    def _another_y(self, path: str, y: Any, shape: Any, dtype: Any) -> LayoutError:
        return LayoutError.at(
            self.where,
            argument=f"y{path}, which a step returns",
            got=describe(y),
            need=f"{dtype}{list(shape)}, as in the first step: the ys of all steps are stacked",
            mend="y of one shape and dtype; pad what grows or shrinks",
        )


def _shape_and_dtype(y: Any) -> tuple[Any, Any] | None:
    """None for Python's numbers, which take the dtype of the arrays beside them."""
    return None if is_number(y) else (tuple(y.shape), y.dtype)
