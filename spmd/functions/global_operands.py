"""Functions of blocks, run on global arrays as maps whose specs follow from their layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.array import PartitionedArray
from spmd.errors import SpecError, describe
from spmd.functions.norm_plans import params_of
from spmd.global_ops.call import as_spec, global_value, names_of, on_blocks
from spmd.layout import Layout, P, Spec

__all__ = [
    "broadcast_spec",
    "first_global",
    "layout_of_values",
    "reduced_layout",
    "refuse_axis_names",
    "run_by_specs",
    "run_over",
]


def first_global(*operands: Any) -> PartitionedArray | None:
    """The first global array among operands, of which some may be None."""
    return next((value for x in operands if x is not None and (value := global_value(x)) is not None), None)


def refuse_axis_names(where: str, operands: Sequence[Any], **axis_names: Any) -> None:
    """Raise where an axis of the mesh is named beside a global array: its layout says what splits it."""
    value = first_global(*operands)
    for argument, names in axis_names.items():
        if value is not None and names is not None:
            got, need = f"{names!r} for {describe(value)}", f"no {argument}: a global array has its layout"
            raise SpecError.at(where, argument=argument, got=got, need=need, mend=f"leave {argument} out")


def layout_of_values(value: PartitionedArray, shape: Sequence[int]) -> Layout:
    """The layout, by a spec, of an array of this shape: that of the global array if its shape is the same."""
    if tuple(value.shape) != tuple(shape):
        return value.mesh.layout(tuple(shape), P())
    spec = as_spec(value)
    return spec if isinstance(spec, Layout) else value.mesh.layout(tuple(shape), spec)


def broadcast_spec(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of an array that broadcasts: it is split as the array of `layout` where it has its lengths."""
    first = max(0, len(layout.shape) - len(shape))
    names, cuts = [], []
    for d, n in enumerate(shape, first):
        same = d < len(layout.shape) and n == layout.shape[d]
        names.append(tuple(layout.spec.dims[d]) or None if same else None)
        cuts.append(layout.cuts[d] if same else None)
    return Layout(tuple(shape), P(*names), layout.axes, cuts)


def reduced_layout(layout: Layout, dims: Sequence[int], keepdims: bool) -> Layout:
    """The layout of what a reduction over these dimensions leaves of an array that lies by a spec."""
    rest = [d for d in range(len(layout.shape)) if d not in dims]
    if not keepdims:
        return params_of(layout, rest)
    shape = tuple(n if d in rest else 1 for d, n in enumerate(layout.shape))
    names = [tuple(layout.spec.dims[d]) or None if d in rest else None for d in range(len(shape))]
    return Layout(shape, P(*names), layout.axes, [cut if d in rest else (1,) for d, cut in enumerate(layout.cuts)])


def run_by_specs(
    where: str,
    fun: Callable[..., Any],
    spec: Any,
    operands: Sequence[Any],
    specs: Sequence[Spec | None],
    out: Any,
    value: PartitionedArray,
) -> Any:
    """fun(spec, *blocks) of global arrays and whole ones, on the mesh of `value`. Operands may be None."""
    given = tuple(a is not None for a in operands)
    chosen = [(a, s) for a, s in zip(operands, specs, strict=True) if a is not None]
    arrays, lies = [a for a, _ in chosen], [s for _, s in chosen]
    return on_blocks(where, _body, (fun, spec, given), arrays, lies, out, value.mesh)


def run_over(
    where: str, fun: Callable[..., Any], operands: Sequence[Any], dims: Sequence[int], keepdims: bool, results: int = 1
) -> Any:
    """fun(names, *blocks), a reduction of the first operand over these dimensions, of global arrays and whole ones.

    names: the axes that split these dimensions, or None. The other operands broadcast to the first, or are None.
    results: how many there are; of more than one a tuple.
    """
    value, shape = first_global(*operands), tuple(operands[0].shape)
    assert value is not None
    own = global_value(operands[0])
    lies = layout_of_values(value if own is None else own, shape)
    each = names_of(lies, len(shape))
    names = tuple(n for d in dims for n in each[d]) or None
    specs = [None if a is None else broadcast_spec(lies, a.shape) for a in operands]
    out = reduced_layout(lies, dims, keepdims)
    return run_by_specs(where, fun, names, operands, specs, out if results == 1 else (out,) * results, value)


def _body(fun: Callable[..., Any], spec: Any, given: tuple[bool, ...]) -> Callable[..., Any]:
    def body(*blocks: Any) -> Any:
        remaining = iter(blocks)
        return fun(spec, *(next(remaining) if is_given else None for is_given in given))

    return body
