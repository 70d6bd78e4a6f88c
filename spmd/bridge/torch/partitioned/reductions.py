"""Reductions of partitioned tensors: the value of the whole, by collectives over the axes that split it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from spmd.bridge.torch.function import apply
from spmd.bridge.torch.partitioned.arguments import (
    arguments_by_name,
    layout_of_dims,
    operator_error,
    refuse,
    refuse_compiled,
    split_dims,
    whole_dim,
)
from spmd.bridge.torch.partitioned.placement import worker_of
from spmd.bridge.torch.partitioned.registry import OPERATORS, handles
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor, gathered, with_block
from spmd.bridge.torch.worker_context import context_of
from spmd.errors import describe
from spmd.layout import Layout
from spmd.operators.gather import AllGather
from spmd.operators.sums import Sum


class _Reduction:
    """A reduction of a tensor: the dimensions, and the axes of its collective.

    names: the axes. block, reduced: this worker's block and its reduced dimensions. result: the layout of the result;
    None if the result is whole.
    """

    def __init__(self, func: Any, x: PartitionedTensor, dim: Any, keepdim: bool):
        self.x = x
        layout = x._placement.layout
        dims = range(x.ndim) if dim is None or dim == [] or dim == () else [dim] if isinstance(dim, int) else dim
        self.dims = tuple(sorted({d % x.ndim for d in dims}))
        self.all = len(self.dims) == x.ndim
        self.keepdim = keepdim
        self.count = math.prod(x.shape[d] for d in self.dims)
        spec = split_dims(x)
        if spec is None and not self.all:
            raise operator_error(
                func, f"a dimension of {describe(x)} that lies as {layout}", "all dimensions, or a spec"
            )
        block = x._block
        if spec is None:
            self.names: tuple[str, ...] = tuple(layout.axes)
            self.block = block
            self.reduced = tuple(range(block.ndim))
            self.result = None
            if layout.owners[x._placement.index] != x._placement.index:
                self.block = block.reshape(-1)[:0].reshape([0] * block.ndim)
        else:
            split = {n for d in self.dims for n in spec[d][0]}
            self.names = tuple(n for n in layout.axes if n in split)
            self.block, self.reduced = block, self.dims
            self.result = self._result_layout(spec)

    def _result_layout(self, spec: list[tuple[tuple[str, ...], Any]]) -> Layout | None:
        """The layout of the result; None if no axis splits it."""
        x = self.x
        dims = [whole_dim(1) if d in self.dims else s for d, s in enumerate(spec) if self.keepdim or d not in self.dims]
        if not any(names for names, _ in dims):
            return None
        shape = [1 if d in self.dims else n for d, n in enumerate(x.shape) if self.keepdim or d not in self.dims]
        return layout_of_dims(x, dims, tuple(shape))

    def local(self, f: Callable[[torch.Tensor, Any], torch.Tensor], identity: Any = None) -> torch.Tensor:
        """The reduction of this worker's block, with dimensions kept; the identity for an empty one."""
        if identity is not None and 0 in [self.block.shape[d] for d in self.reduced]:
            shape = [1 if d in self.reduced else n for d, n in enumerate(self.block.shape)]
            return f(self.block.new_full([1] * self.block.ndim, 1), self.reduced).new_full(shape, identity)
        return f(self.block, self.reduced)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of parts over the workers."""
        if not self.names or part.device.type == "meta" or self._alone():
            return part
        return apply(Sum(self.names), part.contiguous(), context_of(self._worker()))

    def reduce_stack(self, part: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The parts of the workers, reduced by a function of their stack."""
        if not self.names or part.device.type == "meta" or self._alone():
            return part
        stack = apply(AllGather(self.names, 0, False), part.contiguous(), context_of(self._worker()))
        return f(stack)

    def _alone(self) -> bool:
        axes = self.x._placement.layout.axes
        return math.prod(axes[n] for n in self.names) == 1

    def _worker(self) -> Any:
        refuse_compiled(self.block)
        return worker_of(self.x._placement, "a reduction of a partitioned tensor")

    def shaped(self, value: torch.Tensor) -> Any:
        """The result in the shape that torch gives it, whole or partitioned."""
        if self.x._placement.layout.spec is None or not self.result and self.all and not self.keepdim:
            return value.reshape([1] * self.x.ndim if self.keepdim else [])
        if not self.keepdim:
            value = value.squeeze(self.dims)
        return value if self.result is None else with_block(self.x, value, self.result)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of a dtype are accumulated."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _reduction(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], _Reduction]:
    """The arguments of an operator by name, and its reduction."""
    a = arguments_by_name(func, args, kwargs)
    return a, _Reduction(func, a["self"], a.get("dim"), a.get("keepdim", False))


def _sum_dtype(x: PartitionedTensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a sum or product of x."""
    return dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)


@handles("sum sum.dim_IntList nansum mean mean.dim")
def _sum(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a, r = _reduction(func, args, kwargs)
    x = a["self"]
    name = func._schema.name
    dtype = _sum_dtype(x, a.get("dtype"))
    if (
        name == "aten::mean"
        and not (dtype.is_floating_point or dtype.is_complex)
        or (x.dtype, name) == (torch.bool, "aten::mean")
    ):
        return func(torch.empty(tuple(x.shape), dtype=x.dtype), *args[1:], **kwargs)  # raises the error of torch
    take = torch.nansum if name == "aten::nansum" else torch.sum
    part = take(r.block, r.reduced, keepdim=True, dtype=_accumulation_dtype(dtype))
    total = r.sum(part)
    if name == "aten::mean":
        total = total / r.count
    return r.shaped(total.to(dtype))


@handles("count_nonzero count_nonzero.dim_IntList")
def _count_nonzero(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    _, r = _reduction(func, args, kwargs)
    return r.shaped(r.sum((r.block != 0).sum(r.reduced, keepdim=True)))


@handles("prod prod.dim_int")
def _product(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a, r = _reduction(func, args, kwargs)
    x = a["self"]
    dtype = _sum_dtype(x, a.get("dtype"))
    part = r.block.to(_accumulation_dtype(dtype))
    for d in r.reduced:
        part = part.prod(d, keepdim=True)
    return r.shaped(r.reduce_stack(part, lambda s: s.prod(0)).to(dtype))


@handles("any any.dim any.dims all all.dim all.dims")
def _any(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    _, r = _reduction(func, args, kwargs)
    is_any = func._schema.name == "aten::any"
    count = (r.block != 0 if is_any else r.block == 0).sum(r.reduced, keepdim=True)
    total = r.sum(count)
    return r.shaped(total > 0 if is_any else total == 0)


@handles("_is_any_true _is_all_true")
def _of_own_block(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """torch asks them where it looks for anomalies in backward, which workers of one process may do at other times: of
    this worker's block."""
    return func(args[0]._block)


def _identity(dtype: torch.dtype, largest: bool) -> Any:
    """The identity of a maximum (largest) or a minimum."""
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


@handles("amax amin max min")
def _extremum(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a, r = _reduction(func, args, kwargs)
    x = a["self"]
    largest = func._schema.name in ("aten::amax", "aten::max")
    if not r.count:
        return func(torch.empty(tuple(x.shape), dtype=x.dtype), *args[1:], **kwargs)  # raises the error of torch
    take = torch.amax if largest else torch.amin
    part = r.local(lambda b, dims: take(b, dims, keepdim=True), _identity(x.dtype, largest))
    return r.shaped(r.reduce_stack(part, lambda s: take(s, 0)))


@handles("aminmax")
def _aminmax(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a = arguments_by_name(func, args, kwargs)
    options = {"dim": [] if a["dim"] is None else [a["dim"]], "keepdim": a["keepdim"]}
    return tuple(f(a["self"], **options) for f in (torch.ops.aten.amin.default, torch.ops.aten.amax.default))


@handles("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype norm")
def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a, r = _reduction(func, args, kwargs)
    order = a.get("ord", a.get("p"))
    order = 2.0 if order is None else float(order)
    adds_parts, root = _norm_rule(order)
    part = _norm_part(r, order)
    total = r.sum(part) if adds_parts else r.reduce_stack(part, _extremum_of_stack(order))
    return r.shaped(root(total).to(_norm_dtype(a["self"], a.get("dtype"))))


def _norm_dtype(x: PartitionedTensor, dtype: torch.dtype | None) -> torch.dtype:
    dtype = dtype or x.dtype
    return dtype.to_real() if dtype.is_complex else dtype


def _norm_part(r: _Reduction, order: float) -> torch.Tensor:
    """The part of this worker: a power of the norm of its block, to be added, or its extremum."""
    wide = torch.complex128 if r.block.is_complex() else torch.float64
    identity = math.inf if order == -math.inf else 0.0
    norm = r.local(lambda b, dims: torch.linalg.vector_norm(b, order, dims, keepdim=True, dtype=wide), identity)
    return norm**order if order not in (0.0, math.inf, -math.inf) else norm


def _norm_rule(order: float) -> tuple[bool, Callable[[torch.Tensor], torch.Tensor]]:
    """Whether parts are added, and the function of the sum that is the norm."""
    if order in (math.inf, -math.inf):
        return False, lambda t: t
    if order == 0:
        return True, lambda t: t
    return True, lambda t: t ** (1 / order)


def _extremum_of_stack(order: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda s: s.amax(0) if order > 0 else s.amin(0)


@handles("_foreach_norm")
def _foreach_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The norms of several tensors. Those over the same axes share a collective."""
    a = arguments_by_name(func, args, kwargs)
    order, tensors = float(a["ord"]), a["self"]
    adds_parts, root = _norm_rule(order)
    results: list[Any] = [None] * len(tensors)
    by_axes: dict[tuple[str, ...], list[tuple[int, _Reduction, torch.Tensor]]] = {}
    for index, x in enumerate(tensors):
        if not isinstance(x, PartitionedTensor):
            results[index] = torch.linalg.vector_norm(x, order, dtype=a["dtype"])
            continue
        r = _Reduction(func, x, None, False)
        by_axes.setdefault(r.names, []).append((index, r, _norm_part(r, order).reshape(())))
    for parts in by_axes.values():
        r = parts[0][1]
        stack = torch.stack([part for _, _, part in parts])
        totals = r.sum(stack) if adds_parts else r.reduce_stack(stack, _extremum_of_stack(order))
        for (index, _, _), value in zip(parts, root(totals).unbind(), strict=True):
            results[index] = value.to(_norm_dtype(tensors[index], a["dtype"]))
    return results


@handles("_foreach_max")
def _foreach_max(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return [torch.ops.aten.max.default(x) for x in args[0]]


@handles("var.correction std.correction var_mean.correction std_mean.correction")
def _variance(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a, r = _reduction(func, args, kwargs)
    x, correction = a["self"], 1 if a.get("correction") is None else a["correction"]
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    block = r.block.to(wide)
    mean = r.sum(block.sum(r.reduced, keepdim=True)) / r.count
    squares = r.sum((block - mean).abs().square().sum(r.reduced, keepdim=True))
    free = max(r.count - correction, 0)
    value = squares / free if free else squares * math.nan if r.count <= correction else squares
    name = func._schema.name
    value = (value.sqrt() if "std" in name else value).to(_norm_dtype(x, None))
    return (r.shaped(value), r.shaped(mean.to(x.dtype))) if "mean" in name else r.shaped(value)


@handles("equal")
def _equal(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    x, y = args
    if x.shape != y.shape:
        return False
    return bool(torch.ops.aten.all.default(torch.ops.aten.eq.Tensor(x, y)))


@handles("is_same_size")
def _same_size(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


@handles("allclose")
def _close(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(torch.ops.aten.all.default(torch.isclose(*args, **kwargs)))


@handles("_local_scalar_dense item")
def _item(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if args[0].numel() != 1:
        refuse(func, args, kwargs)
    return gathered(args[0]).item()


# The overloads of two tensors are elementwise; those of one dimension, which give indices, are in `views`.
OPERATORS |= {f"{name}.other": OPERATORS["*"] for name in ("max", "min")}
