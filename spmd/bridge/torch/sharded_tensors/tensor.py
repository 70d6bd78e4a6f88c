"""Tensors outside of bodies whose blocks lie on the workers of a mesh: `ShardedTensor`.

For torch such a tensor has the shape of the whole and no memory, as a `PartitionedTensor` of a body. Autograd records
functions of it as of any tensor; `operators` applies torch's operators to the blocks, `functions` handles the functions
of torch that are no operators. From one layout to another is the identity on wholes, and so is its adjoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from spmd.array import PartitionedArray
from spmd.bridge.torch.function import Function
from spmd.bridge.torch.functorch import unwrapped
from spmd.bridge.torch.interop import borrowed, tensor_of
from spmd.bridge.torch.sharded_tensors.registry import call, run
from spmd.bridge.torch.tensor_state import no_overrides
from spmd.device import contiguous
from spmd.errors import LayoutError, describe
from spmd.layout import Layout, P
from spmd.mesh import WORKER, Mesh
from spmd.resharding import moved_blocks
from spmd.transport.handles import read_only

__all__ = [
    "MEND",
    "ShardedTensor",
    "check_outside",
    "moved",
    "moved_like",
    "new_sharded_leaf",
    "of_array",
    "partitioned_array",
    "relaid_blocks",
    "sharded_layout",
    "with_gradient_layout",
    "with_plain_gradient",
]

MEND = "spt.map for a function of blocks, spt.put(x, spec) for another layout, x.whole() for the whole (collective)"
_disabled = torch._C.DisableTorchFunctionSubclass


class ShardedTensor(torch.Tensor):
    """A tensor whose blocks lie on the workers of a mesh, outside of bodies. `spt.put` and `spt.map` make it.

        w = spt.put(torch.randn(512, 512), P("model")).requires_grad_()
        loss = mapped(w, x)  # a plain number
        (g,) = torch.autograd.grad(loss, [w])  # lies as w
        w = (w - 0.1 * g).detach().requires_grad_()  # on the blocks

    `shape` is that of the whole. `blocks`: the blocks of the workers of this process, by worker; copies of a block are
    one tensor. `block_layout` and `spec`: how the whole lies. `mesh`: whose workers. `whole()`, `numpy()`: the whole,
    on every process (collective).
    Elementwise functions work on the blocks of tensors that lie alike, also in lists (`torch._foreach_*`) and in place.
    Reductions give the value of the whole: a plain tensor, or one that lies as the dimensions that are left. Under
    several processes they are collective: all call them in the same order. Gradients lie as their tensors. Functions
    that would gather raise LayoutError.

        >>> with spmd.Mesh(x=2):
        ...     x = spt.put(torch.arange(5.0), P("x"))
        ...     isinstance(x, spt.ShardedTensor), x.shape, float((x * x).sum())
        (True, torch.Size([5]), 30.0)
    """

    blocks: dict[int, torch.Tensor]
    block_layout: Layout
    mesh: Mesh

    @staticmethod
    def __new__(
        cls, blocks: Mapping[int, torch.Tensor], layout: Layout, mesh: Mesh, shape: Any = None, strides: Any = None
    ) -> Any:
        first = next(iter(blocks.values()))
        shape = layout.shape if shape is None else shape
        with no_overrides():
            x: Any = torch.Tensor._make_wrapper_subclass(cls, shape, strides, dtype=first.dtype, device=first.device)
        x.blocks, x.block_layout, x.mesh = dict(blocks), layout, mesh
        return x

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    @property
    def spec(self) -> Any:
        """The mesh axes that split each dimension; for a tensor on a grid its layout."""
        return self.block_layout if self.block_layout.spec is None else self.block_layout.spec

    def whole(self) -> torch.Tensor:
        """The whole, on every process, in memory of its own. Collective. Gradient: lies as this tensor."""
        return moved(self, None, self.mesh)

    def numpy(self, *, force: bool = False) -> Any:
        """The whole as an array, on every process. Collective."""
        return self.whole().numpy(force=force)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        with _disabled():
            dtype, grad = str(self.dtype).removeprefix("torch."), ", requires_grad=True" * self.requires_grad
            blocks = ", ".join(f"{w}: {list(b.shape)}" for w, b in sorted(self.blocks.items()))
            lies = f"shape={list(self.shape)}, dtype={dtype}, spec={self.spec}"
            return f"ShardedTensor({lies}, blocks={{{blocks}}}{grad})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __spmd_describe__(self) -> str:
        with _disabled():
            dtype = str(self.dtype).removeprefix("torch.")
            return f"a sharded tensor {dtype}{list(self.shape)}, laid out by {self.spec}"

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with _disabled():
            if not self.is_leaf:
                return torch.Tensor.__deepcopy__(self, memo)  # raises torch's error
            x = new_sharded_leaf(_each(self, torch.Tensor.clone), self.block_layout, self.mesh, self.requires_grad)
            memo[id(self)] = x
            if self.grad is not None:
                x.grad = self.grad.__deepcopy__(memo)
        return x

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the blocks if this process holds all. Raises MeshError if other processes or GPUs hold some."""
        self.mesh.check_pickled("a ShardedTensor")
        _require_own_shape(self, "pickle")
        with _disabled():
            return new_sharded_leaf, (self.blocks, self.block_layout, self.mesh, self.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_overrides():
            return run(func, args, kwargs or {})


def new_sharded_leaf(blocks: Mapping[int, torch.Tensor], layout: Layout, mesh: Mesh, requires_grad: bool) -> Any:
    """A leaf on the memory of blocks."""
    with _disabled():
        return with_gradient_layout(ShardedTensor(blocks, layout, mesh).requires_grad_(requires_grad))


def _each(x: ShardedTensor, f: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, torch.Tensor]:
    """f of every distinct block."""
    return x.mesh.shared(x.block_layout, lambda w: f(x.blocks[w]))


def with_gradient_layout(x: Any) -> Any:
    """Register a hook by which the gradient of a leaf gets the layout of the leaf."""
    with _disabled():
        if x.requires_grad and x.is_leaf and not x.__dict__.get("_follows"):
            layout, mesh, shape = x.block_layout, x.mesh, tuple(x.shape)
            x._follows = True
            x.register_hook(lambda g: moved_like(g, layout, mesh, shape))
    return x


def check_outside(where: str, x: ShardedTensor) -> None:
    """Raise in a body, which uses its arguments only. No TypeError: operators of Python would try the other operand."""
    if WORKER.get() is not None:
        raise LayoutError.at(
            where,
            got=f"{describe(x)} in a body",
            need="bodies that use their arguments only",
            mend=f"pass it to the map as an argument, with {x.spec} in in_specs",
        )


def _require_own_shape(x: ShardedTensor, where: str) -> None:
    """Raise for a view of another shape than that in which the layout splits it."""
    if tuple(x.shape) != x.block_layout.shape:
        raise LayoutError.at(
            where,
            got=f"a view of shape {list(x.shape)} of what lies as {x.block_layout}",
            need=f"the shape {list(x.block_layout.shape)}",
            mend="x.reshape(...) back to it before",
        )


# From layout to layout


def moved(x: torch.Tensor, layout: Layout | None, mesh: Mesh) -> Any:
    """The same whole in another layout; None: as a plain tensor on every process. Collective, and differentiable."""
    if isinstance(x, ShardedTensor):
        check_outside("spt.put", x)
        if layout is None:
            return moved_like(x, None, mesh)
        _require_own_shape(x, "spt.put")
    if layout is not None and not layout.varying:
        layout = None
    return _Moved.apply(x, layout, mesh)


def sharded_layout(x: Any) -> Layout | None:
    """The layout of a sharded tensor, also of one that torch.func wraps; None for others."""
    x = unwrapped(x)
    return x.block_layout if isinstance(x, ShardedTensor) else None


def moved_like(x: Any, layout: Layout | None, mesh: Mesh, shape: Any = None) -> Any:
    """A cotangent in the layout of its primal, which has this shape; None: plain."""
    source = sharded_layout(x)
    if source == layout:
        return x
    if layout is not None and shape is not None and shape != layout.shape:
        return moved_like(x.reshape(layout.shape), layout, mesh).reshape(shape)
    if source is not None and layout is None and tuple(x.shape) != source.shape:
        return _Moved.apply(x.reshape(source.shape), None, mesh).reshape(x.shape)
    return _Moved.apply(x, layout, mesh)


class _Moved(Function):
    """The identity on wholes, from one layout to another. The adjoint is the way back."""

    @staticmethod
    def forward(x: Any, layout: Layout | None, mesh: Mesh) -> Any:
        if not isinstance(x, ShardedTensor):
            return x.detach().clone() if layout is None else _cut(x.detach(), layout, mesh)
        if layout is None:
            blocks = relaid_blocks(x, mesh.layout(x.block_layout.shape, P()))
            return next(iter(blocks.values())).clone()
        if layout == x.block_layout:
            return ShardedTensor(_each(x, torch.Tensor.detach), layout, mesh)
        return ShardedTensor(relaid_blocks(x, layout), layout, mesh)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, ctx.mesh = inputs
        ctx.source = sharded_layout(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return moved_like(g, ctx.source, ctx.mesh), None, None


def _cut(whole: torch.Tensor, layout: Layout, mesh: Mesh) -> ShardedTensor:
    make = lambda w: whole[layout.slices(w)].clone(memory_format=torch.contiguous_format)
    return ShardedTensor(mesh.shared(layout, make), layout, mesh)


class _PlainGradient(Function):
    """The identity on a plain tensor, whose cotangent becomes plain."""

    @staticmethod
    def forward(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.mesh = inputs

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return moved_like(g, None, ctx.mesh), None


def with_plain_gradient(x: torch.Tensor, mesh: Mesh) -> Any:
    """A plain tensor as an operand beside sharded ones on this mesh: its gradient is plain."""
    return _PlainGradient.apply(x, mesh)


def relaid_blocks(x: ShardedTensor, layout: Layout) -> dict[int, torch.Tensor]:
    """The blocks of this process in another layout; in the same one those of x. Collective. No history."""
    if layout == x.block_layout:
        return x.blocks
    arrays = partitioned_array(x)
    blocks = moved_blocks(arrays.blocks, x.block_layout, layout, x.mesh)
    return x.mesh.shared(layout, lambda w: tensor_of(contiguous(blocks[w]).copy()))


def partitioned_array(x: ShardedTensor) -> PartitionedArray:
    """The same blocks as a `PartitionedArray`, to be read before the tensor is written to."""
    _require_own_shape(x, "a sharded tensor")
    with no_overrides():
        blocks = x.mesh.shared(x.block_layout, lambda w: read_only(contiguous(borrowed(x.blocks[w]))))
    return PartitionedArray(blocks, x.block_layout, x.mesh)


def of_array(x: PartitionedArray) -> ShardedTensor:
    """The sharded tensor of a `PartitionedArray`, in memory of its own."""
    return ShardedTensor(x.mesh.shared(x.layout, lambda w: tensor_of(x.blocks[w].copy())), x.layout, x.mesh)
