"""The arrays of a tree that is saved: where each of their boxes lies, and how its bytes are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from spmd.array import PartitionedArray, check_usable
from spmd.autodiff.admission import admit
from spmd.autodiff.staging.together import check_values
from spmd.autodiff.tracer import Array
from spmd.device import to_host
from spmd.errors import CheckpointError, describe
from spmd.io.boxes import is_within, slices_within, whole_box
from spmd.io.container import dtype_of, stored_as
from spmd.io.members import Members
from spmd.layout import Box, Layout, offsets
from spmd.operators.root import Rooted
from spmd.state import state_of

__all__ = [
    "SOURCES",
    "Source",
    "boxes_of",
    "described",
    "layout_text",
    "partitioned_source",
    "replica",
    "source_elsewhere",
    "source_of",
]


@dataclass
class Source:
    """An array that is saved.

    layout: how it lies, in words. holders: for each box of it with entries the members that have it, in memory that is
    equal. block: the entries of a box, or of a part of one, as an array of the host; for members that have it.
    is_replica: whether the copies of a box are compared: they are supposed to be equal, and nothing has verified it.
    kind: what to make of it on loading into an object: "" an array, "scalar", "torch".
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    layout: str
    holders: Mapping[Box, tuple[int, ...]]
    block: Callable[[Box], np.ndarray]
    is_replica: bool = False
    kind: str = ""


def described(source: Source) -> list[Any]:
    """A source as JSON, for members that hold nothing of it."""
    return [
        source.shape,
        source.dtype.name,
        source.layout,
        [*source.holders.items()],
        source.is_replica,
        source.kind,
    ]


def source_elsewhere(shape: Any, dtype: str, layout: str, holders: Any, is_replica: bool, kind: str) -> Source:
    """The source of a description, on a member that writes nothing of it."""

    def block(box: Box) -> np.ndarray:
        raise AssertionError("an array that other members hold")

    known = dtype_of(dtype)
    assert known is not None
    held = {tuple(map(tuple, box)): tuple(members) for box, members in holders}
    return Source(tuple(shape), known, layout, held, block, is_replica, kind)


SOURCES: dict[type, Callable[[Any, str, str, Members], Source]] = {}
"""What other libraries register: by the class of their arrays, a function of the array, the public function, the name
of the leaf, and the members."""


@lru_cache(maxsize=4096)
def boxes_of(layout: Layout) -> dict[Box, tuple[int, ...]]:
    """The boxes of a layout that have entries, each with the workers that hold it."""
    at = [offsets(c) for c in layout.cuts]
    boxes = {
        tuple((at[d][k], at[d][k + 1]) for d, k in enumerate(place)): workers
        for place, workers in layout.holders.items()
    }
    return {box: workers for box, workers in boxes.items() if all(stop > start for start, stop in box)}


def check_dtype(dtype: np.dtype, where: str, name: str) -> None:
    if stored_as(dtype) is None:
        raise CheckpointError.at(
            where,
            argument=f"tree, the leaf {name!r}",
            got=f"dtype {dtype}",
            need="numbers of at most 64 bits, complex numbers of two of them, bfloat16, float8 or booleans",
            mend="x.astype(np.float64); of records save each field",
        )


def source_of(x: Any, where: str, name: str, members: Members) -> Source:
    """The source of an array of a tree. Raises CheckpointError for what is none."""
    of_library = next((SOURCES[kind] for kind in type(x).__mro__ if kind in SOURCES), None)
    if of_library is not None:
        source = of_library(x, where, name, members)
    elif type(x) is PartitionedArray:
        source = partitioned_source(x, where, name, members)
    elif isinstance(x, Array | Rooted):
        source = _of_body(x, where, name, members)
    else:
        source = bare_source(x, where, name, members)
    check_dtype(source.dtype, where, name)
    return source


def partitioned_source(x: PartitionedArray, where: str, name: str, members: Members) -> Source:
    """The source of a global array: each process has the boxes of its blocks."""
    argument = f"tree, the leaf {name!r}"
    check_usable(where, x)
    check_values(x, where, "the call outside of spmd.jit")
    layout = x.layout
    if layout.copies == "varying" and layout.has_copies:
        raise CheckpointError.at(
            where,
            argument=argument,
            got=f"{describe(x)}, whose copies vary",
            need="one value",
            mend="spmd.accumulate adds such copies",
        )
    text = layout_text(layout)
    if layout.unreduced:
        x, text = x.reduced, f"{text}, reduced on saving"
        layout = x.layout
    local = {layout.boxes[w]: block for w, block in x.blocks.items() if layout.positions(w) is not None}
    holders = {box: members.holders(workers) for box, workers in boxes_of(layout).items()}

    def block(box: Box) -> np.ndarray:
        around = next(own for own in local if is_within(box, own))
        return to_host(local[around][slices_within(box, around)])

    return Source(x.shape, x.dtype, text, holders, block)


def _of_body(x: Any, where: str, name: str, members: Members) -> Source:
    traced = isinstance(x, Array) and x.tape is not None
    if isinstance(x, Array) and not traced and x.state in (None, state_of(())):
        return bare_source(x.value, where, name, members)
    raise CheckpointError.at(
        where,
        argument=f"tree, the leaf {name!r}",
        got=f"{describe(x)}, which is differentiated" if traced else describe(x),
        need="values" if traced else "in a body, arrays that are equal on all workers",
        mend="spmd.stop_gradient(x)"
        if traced
        else 'return it from the map, by out_specs=P("x"): outside of bodies any global array is saved',
    )


_AS_CONSTANTS: tuple[tuple[Any, str], ...] = (
    (str, "str(x)"),
    (bytes | bytearray | memoryview, "bytes(x)"),
    (Integral, "int(x)"),
    (Real, "float(x)"),
    (Mapping, "dict(x)"),
    (Iterable, "list(x), or np.asarray(x)"),
)


def _refuse(x: Any, where: str, name: str) -> None:
    """Raise for what is no array. It would come back as something else."""
    mend = next((mend for kind, mend in _AS_CONSTANTS if isinstance(x, kind)), "str(x), or the numbers that it holds")
    raise CheckpointError.at(
        where,
        argument=f"tree, the leaf {name!r}",
        got=describe(x),
        need="arrays, numbers, strings, bytes or None, of just these classes, and objects with a state",
        mend=f"{mend}; spmd.tree.register makes nodes of a class",
    )


def bare_source(x: Any, where: str, name: str, members: Members) -> Source:
    """The source of an array of NumPy or CuPy that every member has."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype") or isinstance(x, str | bytes):
        _refuse(x, where, name)
    array = admit(x, where, f"tree, the leaf {name!r}", error=CheckpointError, need="arrays, numbers, strings or None")
    box = whole_box(array.shape)
    kind = "scalar" if isinstance(x, np.generic) else ""
    return replica(array.shape, array.dtype, lambda part: to_host(array[slices_within(part, box)]), members, kind)


def replica(
    shape: tuple[int, ...], dtype: np.dtype, block: Callable[[Box], np.ndarray], members: Members, kind: str
) -> Source:
    """The source of an array that every member has. Empty arrays have no boxes."""
    holders = {whole_box(shape): tuple(range(members.size))} if math.prod(shape) else {}
    return Source(shape, dtype, "", holders, block, members.size > 1, kind)


def layout_text(layout: Layout) -> str:
    """How an array lies, for people who read the manifest."""
    return str(layout.spec) if layout.spec is not None else repr(layout)
