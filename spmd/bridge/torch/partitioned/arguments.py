"""Arguments of operators: the partitioned ones, their names, the axes that split their dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spmd.bridge.torch.partitioned.placement import MEND
from spmd.bridge.torch.partitioned.registry import OPERATORS
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor
from spmd.errors import LayoutError, describe
from spmd.layout import Layout, P

Shape = tuple[int, ...]


def operator_error(func: Any, got: str, need: str, mend: str = MEND) -> LayoutError:
    return LayoutError.at(f"torch's {func._schema.name.partition('::')[2]}", got=got, need=need, mend=mend)


def first_partitioned(args: Any) -> PartitionedTensor:
    """The first partitioned tensor among arguments."""
    return next(partitioned_among(args))


def partitioned_among(args: Any) -> Iterator[PartitionedTensor]:
    for a in args:
        if isinstance(a, PartitionedTensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from partitioned_among(a)


def refuse(func: Any, args: Any, kwargs: dict[str, Any]) -> NoReturn:
    raise operator_error(
        func,
        describe(first_partitioned((*args, *kwargs.values()))),
        "an elementwise function, a reduction, or a product outside of autograd",
    )


def arguments_by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by their names."""
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return given | {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs


def writes_first(func: Any) -> bool:
    """Whether an operator writes to its first argument."""
    alias = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return alias is not None and alias.is_write


def refuse_plain_target(func: Any, target: Any, source: PartitionedTensor) -> None:
    if not isinstance(target, PartitionedTensor):
        raise operator_error(
            func,
            f"{describe(source)}, to be written to a tensor of this worker's own",
            "a tensor of one kind: what is written to would not know that it holds a block",
            "x.copy_(p.whole()), which is collective; x.copy_(p.block()), where x is a block too; "
            "module.load_state_dict(spt.state_dict(split))",
        )


def refuse_compiled(block: torch.Tensor) -> None:
    """Raise in a compiled graph, which cannot hold this collective."""
    if is_traceable_wrapper_subclass(block) or type(block).__name__ in ("FakeTensor", "FunctionalTensor"):
        raise LayoutError.at(
            "torch.compile",
            got="a reduction of a partitioned tensor",
            need="functions of blocks in compiled functions",
            mend="p.block() inside, or the reduction outside of the compiled function",
        )


def split_dims(x: PartitionedTensor) -> list[tuple[tuple[str, ...], Any]] | None:
    """For each dimension the axes that split it and the sizes of its blocks; None if the layout has no spec."""
    layout = x._placement.layout
    if layout.spec is None or tuple(x.shape) != layout.shape:
        return None
    return list(zip(layout.spec.dims, layout.cuts, strict=True))


def split_dims_or_refuse(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    dims = split_dims(args[0])
    if dims is None:
        refuse(func, args, kwargs)
    return dims


def layout_of_dims(x: PartitionedTensor, dims: Sequence[tuple[tuple[str, ...], Any]], shape: Shape) -> Layout:
    """The layout of a shape whose dimensions are split as given."""
    return Layout(shape, P(*(names or None for names, _ in dims)), x._placement.layout.axes, [cut for _, cut in dims])


def whole_dim(n: int) -> tuple[tuple[str, ...], Any]:
    return (), (n,)


OPERATORS[""] = refuse
