"""A layer as a plan, made of layouts: run on blocks in a body, and on global arrays outside."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np

from spmd.array import PartitionedArray
from spmd.errors import LayoutError, describe
from spmd.functions.layouts import check_spec, layout_of_operand, spec_of_names
from spmd.global_ops.call import global_value, names_of, on_blocks
from spmd.layout import Layout, P, Spec
from spmd.mesh import Mesh, here

__all__ = [
    "LayerPlan",
    "Operand",
    "along",
    "is_local",
    "is_split",
    "layouts_are_recorded",
    "recorded_layouts",
    "run_layer",
]

_layouts: ContextVar[list[Any] | None] = ContextVar("spmd_layouts_of_results", default=None)


@contextmanager
def recorded_layouts() -> Iterator[list[Any]]:
    """The layouts of the results of layers of blocks that run inside; the last is that of the outermost layer."""
    found: list[Any] = []
    token = _layouts.set(found)
    try:
        yield found
    finally:
        _layouts.reset(token)


def layouts_are_recorded() -> bool:
    """Whether the layouts of results are wanted: of a plan by specs alone they are not known."""
    return _layouts.get() is not None


class LayerPlan(Protocol):
    """What a layer does with blocks that lie in certain layouts. Hashable; equal plans do the same."""

    @property
    def out(self) -> Any:
        """The layout of the result; of several results a tuple of layouts."""
        ...

    __call__: Callable[..., Any]
    """This worker's block of the result, from its blocks of the operands; in a body."""


class Operand(NamedTuple):
    """An array that a layer takes.

    argument: the name of the argument that gives its layout. x: a block, a global array, or None where the layer does
    without. spec: of a block. shape: of the whole, if the spec splits it evenly. derive: its layout as a block, from
    the layouts of the operands before it, in place of a spec.
    """

    argument: str
    x: Any
    spec: Spec | None = None
    shape: Any = None
    derive: Callable[[Sequence[Layout | None]], Layout] | None = None

    @property
    def value(self) -> PartitionedArray | None:
        """The global array that x is or traces."""
        return None if self.x is None else global_value(self.x)


def is_split(*operands: Operand) -> bool:
    """Whether some operand is a global array or has a spec. Otherwise the layer is local."""
    return any(o.spec is not None or o.value is not None for o in operands)


def is_local(where: str, operand: Operand, out_spec: Spec | None, dims: Container[int]) -> bool:
    """Whether a layer of one operand needs nothing of other workers, because only these dimensions are split, along
    which it mixes nothing."""
    if out_spec is not None or operand.value is not None:
        return False
    if operand.spec is None:
        return True
    if not isinstance(operand.spec, P) or operand.shape is not None:
        return False
    check_spec(where, operand.argument, operand.x, operand.spec, here(where))
    return all(not names or d in dims for d, names in enumerate(operand.spec.dims))


def along(where: str, operand: Operand, out_spec: Spec | None, dims: Container[int]) -> Operand:
    """An operand by the axes that split these dimensions, if workers along the others compute alike, each on what it
    has: so the lengths of the other dimensions are not exchanged."""
    x, spec, shape = operand.x, operand.spec, operand.shape
    if out_spec is not None or operand.value is not None or not isinstance(spec, P):
        return operand
    check_spec(where, operand.argument, x, spec, here(where))
    names = [each if d in dims else () for d, each in enumerate(names_of(spec, x.ndim))]
    if isinstance(shape, Sequence) and len(shape) == x.ndim:
        shape = tuple(m if d in dims else n for d, (m, n) in enumerate(zip(shape, x.shape, strict=True)))
    return operand._replace(spec=spec_of_names(names), shape=shape)


def run_layer(where: str, plan: Callable[..., LayerPlan], operands: Sequence[Operand]) -> Any:
    """A layer of operands, by plan(*layouts), with None for operands that are None.

    In a body the operands are blocks. Outside they are global arrays, or arrays that every worker gets whole, and the
    result is global.
    """
    mesh = _common_mesh(where, operands)
    layouts: list[Layout | None] = []
    for o in operands:
        layouts.append(None if o.x is None else _layout(where, o, layouts, mesh))
    made = plan(*layouts)
    if mesh is None:
        result = made(*(o.x for o in operands))
        if (found := _layouts.get()) is not None:
            found.append(made.out)
        return result
    given = tuple(o.x is not None for o in operands)
    specs = [layout for layout in layouts if layout is not None]
    return on_blocks(where, _body, (made, given), [o.x for o in operands if o.x is not None], specs, made.out, mesh)


def _layout(where: str, operand: Operand, before: Sequence[Layout | None], mesh: Mesh | None) -> Layout:
    if mesh is not None and operand.value is None:
        return mesh.layout(np.shape(operand.x), P())
    if mesh is None and operand.derive is not None:
        return operand.derive(before)
    return layout_of_operand(where, operand.argument, operand.x, operand.spec, operand.shape)


def _common_mesh(where: str, operands: Sequence[Operand]) -> Mesh | None:
    """The mesh of the global arrays among the operands; None without any."""
    mesh = None
    for o in operands:
        if o.value is None:
            continue
        if mesh is not None and o.value.mesh != mesh:
            need, mend = f"arrays on one mesh, {mesh}", "spmd.put(x.numpy(), spec, mesh)"
            raise LayoutError.at(where, argument=o.argument, got=describe(o.value), need=need, mend=mend)
        mesh = o.value.mesh
    return mesh


def _body(plan: LayerPlan, given: tuple[bool, ...]) -> Callable[..., Any]:
    def body(*blocks: Any) -> Any:
        remaining = iter(blocks)
        return plan(*(next(remaining) if is_given else None for is_given in given))

    return body
