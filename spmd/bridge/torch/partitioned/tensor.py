"""Tensors of which each worker holds a block.

For torch such a tensor has the shape of the whole and no memory, so no kernel can mistake the block for the whole. The
handlers of `registry` apply torch's operators to it: the result has its layout, or is the value of the whole, or the
handler raises. `__torch_function__` handles states, as that of `Tensor` does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from spmd.bridge.torch.function import Function, apply
from spmd.bridge.torch.functorch import current_level, has_tangent, unwrapped
from spmd.bridge.torch.layouts import LayoutLike, common_axes, resolve_layout
from spmd.bridge.torch.partitioned.placement import (
    Placement,
    check_worker,
    layout_of,
    own_placement,
    worker_of,
)
from spmd.bridge.torch.partitioned.registry import call, run
from spmd.bridge.torch.partitioned.undeclared import call_beside_data, outside_of_unit
from spmd.bridge.torch.tensor import Tensor, with_state
from spmd.bridge.torch.tensor_state import GRADIENT_SYNCS, INVARIANT, no_overrides, plain, state_of_tensor
from spmd.bridge.torch.worker_context import context_of
from spmd.errors import LayoutError, describe
from spmd.layout import Layout, P
from spmd.mesh import WORKER, here
from spmd.operators.repartition import Repartition
from spmd.state import State, state_of

__all__ = [
    "PartitionedTensor",
    "gathered",
    "joined_blocks",
    "leaf_of_block",
    "mark_wrapped",
    "new_leaf",
    "split_like",
    "with_block",
    "with_gradient_layout",
]

_disabled = torch._C.DisableTorchFunctionSubclass


class PartitionedTensor(torch.Tensor):
    """A tensor of which each worker holds a block: parameters, their gradients, and elementwise functions of them.

    `shape` is that of the whole. `block()`: this worker's block. `whole()`: the whole, on every worker. `block_layout`:
    the layout of the whole. `state`: the axes besides those of the layout along which it varies.
    Elementwise functions keep the layout. Reductions and products over a split dimension give the value of the whole,
    and are collective. Other functions raise LayoutError.

        >>> def body():
        ...     w = spt.Parameter(torch.arange(3.0), P("x"))
        ...     return isinstance(w.detach(), spt.PartitionedTensor), (2 * w.detach()).whole()
        >>> with spmd.Mesh(x=2):
        ...     spt.map(body, (), (None, P()))()
        (True, tensor([0., 2., 4.]))
    """

    __spmd_partitioned__ = True
    _block: torch.Tensor
    _placement: Placement
    _state: State
    unit_gathers = False
    """Whether it is a parameter that `spt.shard_parameters` gathers where its unit is called, or, in a map with
    check=False, made of one."""

    @staticmethod
    def __new__(cls, block: torch.Tensor, placement: Placement, shape: Any = None, strides: Any = None) -> Any:
        shape = placement.layout.shape if shape is None else shape
        with no_overrides():
            x: Any = torch.Tensor._make_wrapper_subclass(cls, shape, strides, dtype=block.dtype, device=block.device)
        x._block = block.resolve_conj().resolve_neg() if block.is_conj() or block.is_neg() else block
        x._placement = placement
        x._state = INVARIANT
        return x

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    @classmethod
    def from_block(cls, block: torch.Tensor, spec: LayoutLike) -> PartitionedTensor:
        """The tensor of which this worker holds this block. As `Parameter.from_block`, without being a parameter."""
        return leaf_of_block(PartitionedTensor, f"spt.{cls.__name__}.from_block", block, spec)

    @property
    def block_layout(self) -> Layout:
        """The layout of the whole."""
        return self._placement.layout

    @property
    def block_index(self) -> int:
        """The number of this worker in the layout."""
        return self._placement.index

    @property
    def state(self) -> State:
        """The axes, besides those of the layout, along which it varies."""
        return self._state

    def block(self) -> torch.Tensor:
        """This worker's block, for the forward of a module. In bodies it varies along the axes of the layout.

        Forward: the block, on the same memory. Gradient: a tensor of the layout of this one.
        """
        return _block(self)

    def packed_block(self) -> torch.Tensor:
        """This worker's block, in the shape in which the layout splits it: see `unpacked` of `Parameter`."""
        return _block(self, packed=True)

    def whole(self) -> torch.Tensor:
        """The whole, on every worker, in memory of its own. Collective along the axes of the layout.

        Gradient: each worker's part of the cotangent. Cost: each block sent to every worker that has another.
        """
        return _whole(self)

    def varied(self, state: State) -> PartitionedTensor:
        """The same tensor in another state. Its cotangents are not summed."""
        with _disabled():
            copied: Any = self.view_as(self)
        copied._state = self._state | state
        return copied

    def like_whole(self, whole: torch.Tensor) -> PartitionedTensor:
        """The tensor with the values of `whole` and the layout of this one. Without gradient."""
        with _disabled():
            return split_like(whole.detach(), self._placement, self.shape).clone()

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        with _disabled():
            lies = "" if self.block_layout.spec is None else f", spec={self.block_layout.spec}"
            grad = ", requires_grad=True" if self.requires_grad else ""
            return f"{type(self).__name__}(shape={list(self.shape)}{lies}, block={plain(self._block)!r}{grad})"

    def __spmd_describe__(self) -> str:
        with _disabled():
            return (
                f"a tensor {str(self.dtype).removeprefix('torch.')}{list(self.shape)} of which each worker has a block"
            )

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with _disabled():
            if not self.is_leaf:
                return torch.Tensor.__deepcopy__(self, memo)  # raises torch's error
            copied = new_leaf(type(self), self._block.clone(), self._placement, self._state, self.requires_grad, self)
            copied.unit_gathers = self.unit_gathers
            memo[id(self)] = copied
            if self.grad is not None:
                copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _disabled():
            if not self.is_leaf:
                raise RuntimeError("Only leaf tensors can be pickled: x.detach() before")
            return _unpickled, (type(self), self._block, self._placement, self.requires_grad, tuple(self.shape))

    def __tensor_flatten__(self) -> Any:
        return ["_block"], (self._placement, tuple(self.shape), tuple(self.stride()), self._state.varying)

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        placement, shape, strides, state = meta
        x = PartitionedTensor(inner["_block"], placement, shape, strides)
        x._state = state_of(state)
        return x

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and any(getattr(t, "__spmd_global__", False) for t in types):
            return NotImplemented  # `GlobalTensor` handles both
        return call_beside_data(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_overrides():  # modes for random numbers apply to functions, not to operators
            return run(func, args, kwargs or {})


class _WrappedTensor(torch.Tensor):
    """A tensor by which a transformation of torch.func wraps a partitioned tensor."""

    __spmd_partitioned__ = True

    def block(self) -> torch.Tensor:
        """As `PartitionedTensor.block`."""
        return _block(self)

    def packed_block(self) -> torch.Tensor:
        """As `PartitionedTensor.packed_block`."""
        return _block(self, packed=True)

    def whole(self) -> torch.Tensor:
        """As `PartitionedTensor.whole`."""
        return _whole(self)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return mark_wrapped(call(func, args, kwargs or {}))


def mark_wrapped(x: Any) -> Any:
    """Set the class of a result of torch.func that wraps a partitioned tensor."""
    if isinstance(x, tuple | list):
        return type(x)(map(mark_wrapped, x)) if type(x) in (tuple, list) else x
    if type(x) is torch.Tensor and isinstance(unwrapped(x), PartitionedTensor):
        x.__class__ = _WrappedTensor
    return x


def new_leaf(
    cls: Any, block: torch.Tensor, placement: Placement, state: State, requires_grad: bool, like: Any = None
) -> Any:
    """A leaf of this class on the memory of a block. like: a tensor of its shape and strides."""
    shape = () if like is None else (tuple(like.shape), like.stride())
    with _disabled():
        x = PartitionedTensor.__new__(cls, block, placement, *shape)
        x._state = state
        if getattr(like, "_is_param", False):
            x._is_param = True
        x.requires_grad_(requires_grad)
    return with_gradient_layout(x)


def leaf_of_block(cls: Any, where: str, block: torch.Tensor, spec: LayoutLike) -> Any:
    worker = here(where)
    axes = common_axes(where, worker, spec)
    own = plain(block).detach()
    layout = layout_of(where, resolve_layout(where, own, spec, axes, worker).shape, spec, worker)
    if not isinstance(spec, Layout):
        layout = resolve_layout(where, own, spec, axes, worker)
    placement = own_placement(layout, worker)
    extra = state_of_tensor(block).varying - layout.varying
    if tuple(own.shape) != layout.block_shape(placement.index) or extra:
        raise LayoutError.at(
            where,
            argument="block",
            got=describe(block),
            need=f"a block of shape {list(layout.block_shape(placement.index))}, of {list(layout.shape)}, "
            f"on {layout.describe(placement.index)}, one value along the other axes",
            mend="a spec in place of the layout learns the shapes of all blocks",
        )
    return new_leaf(cls, own, placement, INVARIANT, False)


def with_block(
    x: PartitionedTensor, block: torch.Tensor, layout: Layout | None = None, shape: Any = None, strides: Any = None
):
    """A partitioned tensor with another block of the same worker.

    strides: of the whole, as torch would have them. None: those of a contiguous tensor; the block is made contiguous
    too, so that all workers agree on what may be a view.
    """
    placement = x._placement if layout is None else x._placement.derived(layout)
    if strides is None and not block.is_contiguous():
        block = block.contiguous()
    return PartitionedTensor(block, placement, shape, strides)


def _unpickled(cls: type, block: torch.Tensor, placement: Placement, requires_grad: bool, shape: Any = None) -> Any:
    """Unpickle. Raises LayoutError on another worker than the one that saved it."""
    worker = WORKER.get()
    if worker is not None:
        placement = Placement(placement.layout, placement.index, context_of(worker))
    like = None if shape in (None, placement.layout.shape) else block.new_empty(shape, device="meta")
    x = new_leaf(cls, block, placement, INVARIANT, requires_grad, like)
    check_worker(x._placement, worker)
    return x


# Blocks of the whole and back, with gradients


class _BlockFunction(Function):
    """The block of a partitioned tensor. The adjoint makes a partitioned tensor from a block."""

    @staticmethod
    def forward(ctx: Any, x: PartitionedTensor) -> torch.Tensor:
        ctx.placement, ctx.state = x._placement, x._state
        with _disabled():
            ctx.shape = tuple(x.shape)
        with no_overrides():
            return x._block.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        g = plain(g) if isinstance(g, Tensor) else g
        if not torch.is_grad_enabled() and current_level() is None:
            return _from_block(g, ctx.placement, ctx.state, ctx.shape)
        return _FromBlockFunction.apply(g, ctx.placement, ctx.state, ctx.shape)


class _TransformableBlockFunction(Function):
    """The same for forward mode and for torch.func."""

    @staticmethod
    def forward(x: PartitionedTensor) -> torch.Tensor:
        return x._block.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x = unwrapped(inputs[0])
        ctx.placement, ctx.state = x._placement, x._state
        with _disabled():
            ctx.shape = tuple(x.shape)

    backward = _BlockFunction.backward

    @staticmethod
    def jvp(ctx: Any, tangent: Any) -> Any:
        return _TransformableBlockFunction.apply(tangent)


def _from_block(block: torch.Tensor, placement: Placement, state: State, shape: Any = None) -> PartitionedTensor:
    with no_overrides():
        x = PartitionedTensor(block.detach(), placement, shape)
    x._state = state
    return x


class _FromBlockFunction(Function):
    """A partitioned tensor from a block: the adjoint of taking the block."""

    @staticmethod
    def forward(block: torch.Tensor, placement: Placement, state: State, shape: Any) -> Any:
        return _from_block(block, placement, state, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.placement, ctx.shape = inputs[1], inputs[3]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _block(split_like(g, ctx.placement, ctx.shape), packed=True), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> Any:
        return _FromBlockFunction.apply(tangent, ctx.placement, INVARIANT, ctx.shape)


def joined_blocks(block: torch.Tensor, placement: Placement, state: State, shape: Any = None) -> Any:
    """The tensor of which workers hold these blocks, with their history. shape: of the whole, if it is another one than
    that of the layout."""
    return _FromBlockFunction.apply(block, placement, state, shape)


@torch._dynamo.allow_in_graph  # type: ignore[attr-defined]
def _block_in_graph(x: Any) -> torch.Tensor:
    return _BlockFunction.apply(x)


def _block(x: Any, packed: bool = False) -> torch.Tensor:
    if torch.compiler.is_dynamo_compiling():  # there tensors carry no state
        return _block_in_graph(x)
    inner = unwrapped(x)
    layout = inner._placement.layout
    if tuple(inner.shape) != layout.shape and not packed:
        raise LayoutError.at(
            "p.block()",
            got=f"a view of shape {list(inner.shape)} of what lies as {layout}",
            need=f"the shape {list(layout.shape)}",
            mend="p.block() first, and the view of that",
        )
    worker = WORKER.get()
    check_worker(inner._placement, worker)
    block = (_TransformableBlockFunction if inner is not x or has_tangent(x) else _BlockFunction).apply(x)
    if worker is None or not worker.tracked:
        if id(x) in GRADIENT_SYNCS:
            block._block_of = id(x)  # `spt.data_parallel` sums its gradients
        return block
    state = inner._state | state_of(layout.varying)
    return with_state(block, state) if state.varying else block


def _whole(x: Any) -> torch.Tensor:
    inner = unwrapped(x)
    layout = inner._placement.layout
    if inner.device.type == "meta":
        return inner._block.new_empty(inner.shape)
    if tuple(inner.shape) != layout.shape:
        return _whole(x.reshape(layout.shape)).reshape(inner.shape)
    differentiated = torch.is_grad_enabled() and x.requires_grad
    worker = WORKER.get()
    if differentiated and inner.unit_gathers and worker is not None and not worker.tracked:
        raise outside_of_unit("p.whole()", "differentiated")
    block = plain(_block(x)) if differentiated else inner._block.detach()
    if layout.size == 1:
        whole = block.clone()
    else:
        worker = worker_of(inner._placement, "p.whole()")
        whole = apply(_gather_operator(layout), block, context_of(worker))
    return with_state(whole, inner._state) if inner._state.varying and WORKER.get() is not None else whole


def gathered(x: PartitionedTensor) -> torch.Tensor:
    """The data of the whole, on every worker; no history, no state."""
    layout = x._placement.layout
    if x._block.device.type == "meta":
        return x._block.new_empty(x.shape)
    if layout.size == 1:
        return x._block.reshape(x.shape).clone()
    worker = worker_of(x._placement, "the whole of a partitioned tensor")
    return apply(_gather_operator(layout), x._block, context_of(worker)).reshape(x.shape)


def _gather_operator(layout: Layout) -> Repartition:
    return Repartition(tuple(layout.axes), layout, Layout(layout.shape, P(), layout.axes))


def split_like(g: Any, placement: Placement, shape: Any = None) -> Any:
    """A cotangent in the layout of a placement. The cotangent of a sum is a whole.

    shape: of the whole, if the layout splits it in another shape.
    """
    inner = unwrapped(g)
    layout = placement.layout
    if isinstance(inner, PartitionedTensor):
        if inner._placement.layout == layout:
            return g
        # It is whole in some dimensions, as the cotangent of a sum over them.
        zeros = inner._block.new_zeros(layout.block_shape(placement.index))
        with _disabled():
            return g + PartitionedTensor(zeros, placement, shape)
    if tuple(g.shape) != layout.shape:
        g = g.reshape(layout.shape)
    if g.requires_grad and torch.is_grad_enabled():
        src = Layout(layout.shape, P(), layout.axes)
        context = placement.context
        worker = WORKER.get()
        if worker is not None:
            context = context_of(worker)
        assert context is not None
        return _FromBlockFunction.apply(
            apply(Repartition(tuple(layout.axes), src, layout), plain(g), context), placement, INVARIANT, shape
        )
    return PartitionedTensor(plain(g).detach()[placement.slices].contiguous(), placement, shape)


def with_gradient_layout(x: Any) -> Any:
    """Register a hook by which the gradient of a leaf gets the layout of the leaf."""
    with _disabled():
        if x.requires_grad and x.is_leaf and not x.__dict__.get("_follows"):
            placement, shape = x._placement, tuple(x.shape)
            x._follows = True
            x.register_hook(lambda g: None if g is None else split_like(g, placement, shape))
    return x
