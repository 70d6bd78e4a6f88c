"""The recorded programs of a map for arguments of one kind, and their inputs and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff.dtypes import kind_of_dtype
from spmd.autodiff.staging.program import Built
from spmd.autodiff.staging.recorder import Program, slot_of
from spmd.autodiff.tracer import Array
from spmd.map_arguments import MapArgument, cotangent_input, cotangent_layout
from spmd.map_results import BodyResults
from spmd.mesh import Mesh
from spmd.spec_trees import Leaf
from spmd.transport.handles import read_only

__all__ = ["JitEntry"]


class JitEntry:
    """The programs that replay a map for arguments of one kind.

    variable: the arguments that may change from call to call, as leaves; None for those that are part of the programs.
    static: which arguments are part of the programs because their spec is None. paths: of all arguments.
    programs: by worker. treedef: the structure of the results. layouts: of the results; None for an object.
    shapes: of the blocks of the results, by worker.
    of: the differentiated leaves. structures: the differentiated arguments, with their numbers of leaves.
    back: the programs that go back, and the layouts of the gradients. The forward programs then return the values that
    those need after the results. places: the results, by position, whose cotangents they take.
    verifies, verifies_back: whether processes compare values at the end of such a call. closed: the arrays that the
    body closes over, with their names; None: not known yet.
    """

    __slots__ = (
        *("back", "closed", "layouts", "number", "of", "paths", "places", "programs", "shapes", "static"),
        *("structures", "treedef", "variable", "verifies", "verifies_back"),
    )

    def __init__(self, number: int, of: Sequence[int] = ()):
        self.number = number
        self.of = of
        self.variable: list[Leaf | None] = []
        self.static: list[bool] = []
        self.paths: list[str] = []
        self.programs: dict[int, Built] = {}
        self.treedef: Any = None
        self.layouts: list[Any] = []
        self.shapes: dict[int, list[Any]] = {}
        self.structures: list[tuple[Any, int]] = []
        self.places: Sequence[int] = ()
        self.back: tuple[dict[int, Built], list[Any]] | None = None
        self.verifies = self.verifies_back = False
        self.closed: list[tuple[str, Any]] | None = None


def array_positions(outs: list) -> list[int]:
    """The results that are arrays with cotangents."""
    return [k for k, x in enumerate(outs) if type(x) is PartitionedArray and kind_of_dtype(x.dtype) in ("f", "c")]


def cotangents_of(mesh: Mesh, outs: list, gs: list) -> list[MapArgument]:
    """The cotangents of the results that are arrays, laid out as the results are; zeros for missing ones."""
    cotangents = []
    for k in array_positions(outs):
        g = gs[k]
        if g is None:
            blocks = {w: np.zeros_like(b) for w, b in outs[k].blocks.items()}
            g = PartitionedArray(blocks, cotangent_layout(outs[k].layout), mesh)
        cotangent = cotangent_input(mesh, outs[k], g)
        assert cotangent is not None
        assert cotangent.blocks is not None
        cotangents.append(cotangent)
    return cotangents


def program_inputs(program: Program, blocks: list, variable: list[Leaf | None]) -> list:
    """The blocks of a worker, as inputs of a program where they are variable."""
    return [
        b if leaf is None else Array(program.input(b.value), b.state) if type(b) is Array else program.input(b)
        for b, leaf in zip(blocks, variable, strict=True)
    ]


def result_values(results: BodyResults) -> list:
    pairs = zip(results.blocks, results.specs, strict=True)
    return [slot_of(b) if spec is None else read_only(slot_of(b)) for b, spec in pairs]


def shapes_of(values: list) -> list[Any]:
    """The shapes of results; None for objects."""
    return [getattr(x, "shape", None) for x in values]


def layouts_of(joined: list) -> list[Any]:
    """The layouts of results; None for objects."""
    return [x.layout if type(x) is PartitionedArray else None for x in joined]


def join_results(mesh: Mesh, results: dict[int, list], layouts: list[Any]) -> list:
    """The results of programs as arrays of these layouts, and objects."""
    joined, first = [], next(iter(results.values()))
    for k, layout in enumerate(layouts):
        if layout is None:
            joined.append(first[k])
        else:
            blocks = mesh.shared(layout, lambda w, k=k: read_only(results[w][k]))
            joined.append(PartitionedArray(blocks, layout, mesh))
    return joined


def is_immutable(x: Any) -> bool:
    """Whether an object cannot change: a number, a string, a dtype, a class, or a tuple of such."""
    if isinstance(x, tuple):
        return all(map(is_immutable, x))
    return x is None or isinstance(x, bool | int | float | complex | str | bytes | np.generic | np.dtype | type)


def is_variable(x: Any) -> bool:
    """Whether an argument with a spec may change from call to call: an array, or a number that is no integer."""
    return isinstance(x, float | complex) or (hasattr(x, "dtype") and not isinstance(x, type))


def key_part(x: Any, is_static: bool) -> tuple[Any, ...]:
    """What an argument adds to the key of the programs that a call replays. is_static: its spec is None."""
    if type(x) is PartitionedArray:
        return x.layout, x.dtype
    if is_static or not is_variable(x):
        by_value = is_static or x is None or isinstance(x, int)
        return type(x), repr(x) if isinstance(x, float | complex) else x if by_value else array_key(x)
    return type(x), getattr(x, "shape", None), getattr(x, "dtype", None)


def array_key(x: Any) -> Any:
    """The shape and dtype of an object that becomes an array and has no dtype itself; the id of one that cannot."""
    try:
        array = np.asarray(x)
    except Exception:
        return id(x)
    return array.shape, array.dtype
