"""Operands of several layouts: the layout in which they meet, and their parts there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from spmd.bridge.torch.functorch import unwrapped
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, lifted, whole_layout
from spmd.bridge.torch.tensor_state import is_partitioned, needs_grad, no_overrides, state_of_tensor
from spmd.errors import LayoutError, SpecError, describe
from spmd.functions.movement import relaid, varied
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.operators.varying import varying

__all__ = [
    "Dim",
    "as_global",
    "block_in",
    "check_whole",
    "dims_of",
    "is_tensor",
    "laid",
    "layout_of_dims",
    "meeting_dims",
]


class Dim(NamedTuple):
    """How one dimension lies: the axes that split it, and the lengths of its blocks; balanced for None."""

    names: tuple[str, ...] = ()
    cut: tuple[int, ...] | None = None


WHOLE = Dim()


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def as_global(x: Any) -> Any:
    """A tensor of which workers hold blocks as a global tensor: parameters too. Other values as they are."""
    if isinstance(x, GlobalTensor) or not is_partitioned(x):
        return x
    layout = unwrapped(x).block_layout
    groups = _groups_of(layout.shape, tuple(_shape(x)))
    block = x.block() if groups is None else x.packed_block()
    return GlobalTensor(block, lifted(layout), groups)


def laid(x: Any) -> Any:
    """A tensor as a global one, also where it lies whole on all workers."""
    x = as_global(x)
    return x if isinstance(x, GlobalTensor) else GlobalTensor(x, whole_layout(_shape(x)))


def _shape(x: torch.Tensor) -> torch.Size:
    with no_overrides():
        return x.shape


def _groups_of(inner: Sequence[int], outer: Sequence[int]) -> tuple[int, ...] | None:
    """Which neighbouring dimensions were joined; None if none were."""
    if tuple(inner) == tuple(outer):
        return None
    groups, d = [], 0
    for n in outer:
        size, count = 1, 0
        while d < len(inner) and (size < n or not count):
            size, d, count = size * inner[d], d + 1, count + 1
        groups.append(count)
    return tuple(groups)


def dims_of(x: GlobalTensor) -> list[Dim]:
    """How each dimension of the layout of a global tensor lies, by its spec. Raises LayoutError for grids."""
    layout = x._layout
    if layout.spec is None:
        raise LayoutError.at(
            "a function of torch",
            got=f"{describe(x)}, {layout}",
            need="a layout by a spec, in which axes of the mesh split dimensions",
            mend="spt.put(x, P(...)) lays it out so, and x.whole() is the whole on every worker (collective)",
        )
    return [Dim(n, c if n else None) for n, c in zip(layout.spec.dims, layout.cuts, strict=True)]


def layout_of_dims(shape: Sequence[int], dims: Sequence[Dim]) -> Layout:
    return _layout_of_dims(tuple(shape), tuple(dims), tuple(here("a global tensor").mesh.axes.items()))


@lru_cache(maxsize=4096)
def _layout_of_dims(shape: tuple[int, ...], dims: tuple[Dim, ...], axes: tuple[tuple[str, int], ...]) -> Layout:
    return Layout(shape, P(*(d.names or None for d in dims)), dict(axes), [d.cut for d in dims])


def meeting_dims(shape: Sequence[int], operands: Sequence[tuple[Sequence[int], Sequence[Dim]]]) -> list[Dim]:
    """How a result of this shape lies, whose operands, aligned at the last dimension, have these shapes and lie so.

    The operand that is split most determines it; others add dimensions that it has whole, over axes that are free.
    """
    dims, taken = [WHOLE] * len(shape), set()
    for own_shape, own in sorted(operands, key=lambda o: -sum(len(d.names) for d in o[1])):
        first = len(shape) - len(own_shape)
        for d, dim in enumerate(own, first):
            fits = own_shape[d - first] == shape[d] and not dims[d].names and not taken & {*dim.names}
            if dim.names and fits:
                dims[d] = dim
                taken |= {*dim.names}
    return dims


def block_in(x: torch.Tensor, shape: Sequence[int], target: Layout) -> torch.Tensor:
    """The part of an operand that meets this worker's block of a result.

    x: a global tensor or a whole, whose dimensions, aligned at the last, are those of the result, or of length 1.
    target: the layout of the result. The cotangents of what several workers use are summed.
    """
    if isinstance(x, GlobalTensor) and x._layout == target:
        return x._block
    if target.spec is None:
        return _block_on_grid(x, target)
    own = x._layout.shape if isinstance(x, GlobalTensor) else tuple(_shape(x))
    first = len(shape) - len(own)
    if first < 0 or any(n not in (1, m) for n, m in zip(own, shape[first:], strict=True)):
        raise _of_other_shape("a function of torch", "an operand", x, shape)
    dims = [
        Dim(names, cut) if n == shape[d] and names else WHOLE
        for d, (n, names, cut) in enumerate(zip(own, target.spec.dims[first:], target.cuts[first:], strict=True), first)
    ]
    part = layout_of_dims(own, dims)
    block = relaid(x._block, x._layout, part) if isinstance(x, GlobalTensor) else _part_of_whole(x, part)
    worker = here("a global tensor")
    if worker.tracked or not needs_grad(block):  # where states are tracked, torch's functions vary operands themselves
        return block
    return varied(block, [n for n in worker.mesh.axes if n in target.varying - part.varying])


def check_whole(where: str, argument: str, x: Any, shape: Sequence[int], *, broadcasts: bool = False) -> None:
    """Raise if an operand does not have this shape, that of a whole. broadcasts: dimensions may be 1, or missing."""
    own = tuple(_shape(x))
    aligned = zip(own[::-1], tuple(shape)[::-1], strict=False)
    fits = len(own) <= len(shape) and all(n in (1, m) for n, m in aligned) if broadcasts else own == tuple(shape)
    if not fits:
        raise _of_other_shape(where, argument, x, shape)


def _of_other_shape(where: str, argument: str, x: Any, shape: Sequence[int]) -> SpecError:
    return SpecError.at(
        where,
        argument=argument,
        got=f"{describe(x)} beside a global tensor, for which the whole has shape {list(shape)}",
        need=f"shape {list(shape)}: shapes are those of wholes, not of blocks",
        mend="the whole on every worker; or spt.GlobalTensor.from_block(x, spec), if it is this worker's block",
    )


def _block_on_grid(x: torch.Tensor, target: Layout) -> Any:
    """The part of an operand that meets this worker's block of a result on a grid."""
    if isinstance(x, GlobalTensor):
        if x._layout.shape == target.shape:
            return relaid(x._block, x._layout, target)
        x = x.whole()
    return _part_of_whole(x.expand(target.shape), target)


def _part_of_whole(x: torch.Tensor, part: Layout) -> Any:
    """This worker's part of a tensor that all workers have."""
    if not part.varying:
        return x
    if needs_grad(x):
        return relaid(x, whole_layout(part.shape), part)
    worker = here("a global tensor")
    own = x[part.slices(worker.index)]
    return declared(own, part) if worker.tracked else own


def declared(block: torch.Tensor, layout: Layout) -> Any:
    """A block that is made of what all workers have, as one of a layout: it varies where the layout is split."""
    names = tuple(n for n in layout.axes if n in layout.varying and n not in state_of_tensor(block).varying)
    return varying(block, names) if names else block
