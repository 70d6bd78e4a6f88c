"""Tensors of bodies that stand for the whole: each worker holds a block, and functions of torch act on the whole.

A `GlobalTensor` has the shape of the whole. Its block carries the history for autograd, so backward runs on plain
blocks, through the adjoints of the operators that moved them. The handlers of `registry` apply functions of torch. A
result whose layout splits nothing is a plain tensor, the same on all workers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.bridge.torch.call_arguments import tensors_in
from spmd.bridge.torch.global_tensors.registry import call
from spmd.bridge.torch.global_tensors.sharing import CopiedView, Memory, check_current, note_views, note_write, writes
from spmd.bridge.torch.layouts import LayoutLike, common_axes, resolve_layout
from spmd.bridge.torch.left_alone import left_alone
from spmd.bridge.torch.partitioned.placement import layout_of
from spmd.bridge.torch.tensor import Tensor
from spmd.bridge.torch.tensor_state import (
    GRADIENT_SYNCS,
    is_partitioned,
    no_overrides,
    plain,
    state_of_tensor,
    summed_state,
)
from spmd.errors import LayoutError, StateError, describe
from spmd.functions.movement import relaid
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.operators.reduce import psum

__all__ = ["GlobalTensor", "follow_block", "global_tensor", "lifted", "result", "whole_layout"]

_left_alone = left_alone(
    "spt.GlobalTensor: no tensor of a graph; compile functions of blocks, or without fullgraph=True"
)
_disabled = torch._C.DisableTorchFunctionSubclass


class GlobalTensor(torch.Tensor):
    """A tensor of which each worker holds a block, in a body; functions of torch act on the whole.

        x = spt.GlobalTensor.from_block(rows, P("data"))  # of shape (all rows, features)
        y = torch.nn.functional.linear(x.tanh(), weight)  # lies as x; the gradient of weight is that of all rows
        y.mean()  # of the whole: a plain number, the same on all workers

    `shape` is that of the whole; `block()` this worker's block, with its history; `block_layout` how the whole lies;
    `whole()` the whole on every worker (collective). Functions that need nothing of other workers run on the blocks.
    Layers, products and reductions run as `spt.functions` do, with layouts in place of specs. A tensor without a layout
    beside it counts as the whole, the same on all workers. All workers call the same functions in the same order.
    Raises LayoutError for functions that would need other workers' entries in a way that is not written yet; its
    message names the function and the mend.

        >>> def body(x):
        ...     whole = spt.GlobalTensor.from_block(x, P("x"))
        ...     return whole.shape, whole.sum()  # of all workers
        >>> with spmd.Mesh(x=2):
        ...     spt.map(body, P("x"), (None, P()))(torch.arange(5.0))
        (torch.Size([5]), tensor(10.))
    """

    __spmd_partitioned__ = True
    __spmd_global__ = True
    _block: torch.Tensor
    _layout: Layout
    """Of the block, over all axes of the mesh. Its dimensions, joined by `_groups`, are those of the tensor."""
    _groups: tuple[int, ...]
    """For each dimension of the tensor, how many of the layout's dimensions it joins."""
    _memory: Memory | None = None
    """That which views share."""

    @staticmethod
    def __new__(cls, block: torch.Tensor, layout: Layout, groups: Sequence[int] | None = None) -> Any:
        groups = (1,) * len(layout.shape) if groups is None else tuple(groups)
        with no_overrides():
            x: Any = torch.Tensor._make_wrapper_subclass(
                cls,
                _joined(layout.shape, groups),
                dtype=block.dtype,
                device=block.device,
                requires_grad=block.requires_grad,
            )
            if block.requires_grad:
                x.register_hook(_refuse_gradient)
        x._block, x._layout, x._groups = block, layout, groups
        return x

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    @classmethod
    @_left_alone
    def from_block(cls, block: torch.Tensor, spec: LayoutLike) -> Any:
        """The tensor of which this worker holds this block. Differentiable.

        spec: a spec or a Grid: the workers exchange their shapes, which sends no bytes, and blocks may be uneven. Or a
        Layout of the whole. Raises LayoutError where blocks and layout do not fit.
        """
        where = "spt.GlobalTensor.from_block"
        worker = here(where)
        axes = common_axes(where, worker, spec)
        layout = resolve_layout(where, block, spec, axes, worker)
        index = worker.group(tuple(layout.axes)).index
        if tuple(block.shape) != layout.block_shape(index):
            raise LayoutError.at(
                where,
                argument="block",
                got=describe(block),
                need=f"a block of shape {list(layout.block_shape(index))}, of {list(layout.shape)}",
                mend="a spec in place of the layout learns the shapes of all blocks",
            )
        return result(block, lifted(layout))

    @property
    def block_layout(self) -> Layout:
        """How the whole lies on the mesh."""
        return self._layout

    @property
    def joins(self) -> bool:
        """Whether some dimension joins several of the layout's."""
        return len(self._groups) != len(self._layout.shape)

    @property
    def is_separate(self) -> bool:
        """Whether the layout is by a spec, in which each dimension is split by itself."""
        return self._layout.spec is not None and not self.joins

    def block(self) -> torch.Tensor:
        """This worker's block, with its history. It varies along the axes of the layout."""
        _refuse_joined(self, "x.block()")
        check_current("block", self)
        return self._block

    @_left_alone
    def whole(self) -> torch.Tensor:
        """The whole, on every worker. Collective. Gradient: each worker's part of the cotangent."""
        check_current("whole", self)
        inner = relaid(self._block, self._layout, whole_layout(self._layout.shape))
        return inner.reshape(_joined(self._layout.shape, self._groups))

    def __deepcopy__(self, memo: Any) -> Any:
        return GlobalTensor(copy.deepcopy(self._block, memo), self._layout, self._groups)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        lies = f"spec={self._layout.spec}" if self._layout.spec is not None else f"layout={self._layout}"
        with no_overrides():
            shape = list(self.shape)
        return f"GlobalTensor(shape={shape}, {lies}, block={plain(self._block)!r})"

    def __spmd_describe__(self) -> str:
        with no_overrides():
            kind, shape = str(self.dtype).removeprefix("torch."), list(self.shape)
        lies = self._layout.spec if self._layout.spec is not None else "a grid"
        return f"a global tensor {kind}{shape}, laid out by {lies}"

    @classmethod
    @_left_alone
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(types) > 1:
            if CopiedView in types:
                return NotImplemented
            if Tensor in types or GRADIENT_SYNCS:
                _check_wholes(func, args, kwargs)
        name, first = func.__name__, args[0] if args else None
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        else:
            for x in tensors_in(args, kwargs):
                if type(x) is GlobalTensor:
                    _check_history(name, x)
                    check_current(name, x)
        y = call(func, args, kwargs)
        target = first if writes(name, kwargs) else kwargs.get("out")
        if type(target) is GlobalTensor:
            note_write(target)
            follow_block(target)
        return note_views(name, first, y) if type(first) is GlobalTensor else y

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LayoutError.at(
            str(func),
            got="a tensor of which each worker holds a block",
            need="a function of torch that global tensors take",
            mend="x.block() is this worker's part, and x.whole() the whole, on every worker (collective)",
        )


def _lost_history(where: str, x: Any) -> LayoutError:
    return LayoutError.at(
        where,
        got=f"{describe(x)} that a torch.autograd.Function took or made: the history of blocks does not go through it",
        need="functions of torch on global tensors, or a Function of blocks",
        mend="torch.utils.checkpoint(..., use_reentrant=False); Function.apply(x.block()), and "
        "spt.GlobalTensor.from_block of its result",
    )


def follow_block(x: GlobalTensor) -> None:
    """Let a tensor require gradients as its block does: an autograd.Function looks at the tensor only, and raises."""
    with no_overrides():
        if x.requires_grad != x._block.requires_grad:
            x.requires_grad_(x._block.requires_grad)
            if x.requires_grad:
                x.register_hook(_refuse_gradient)


def _refuse_gradient(g: Any) -> None:
    raise _lost_history("the gradient of a global tensor", g)


def _check_history(name: str, x: GlobalTensor) -> None:
    """Raise for what a torch.autograd.Function made: its block has no history."""
    with _disabled():
        foreign = x.grad_fn is not None
    if foreign:
        raise _lost_history(f"torch's {name}", x)


def _check_wholes(func: Callable, args: Any, kwargs: Any) -> None:
    """Raise where a tensor beside a global one, which counts as a whole, varies over axes that split the latter."""
    tensors = list(tensors_in(args, kwargs))
    split = frozenset().union(*(x._layout.varying for x in tensors if isinstance(x, GlobalTensor)))
    for x in tensors:
        own = state_of_tensor(x).varying
        # In a forward of `spt.data_parallel` parameters are replaced by Varying ones.
        synced = sorted((own if getattr(x, "replica", False) else summed_state(x).varying) & split)
        if synced:
            raise LayoutError.at(
                f"torch's {getattr(func, '__name__', 'a function')}",
                got=f"a parameter whose gradients spt.data_parallel sums over {synced[0]!r}, beside a global tensor "
                "that is split over it, by which they are sums already",
                need="one of the two",
                mend=f"spt.parallelize(net, plan, in_specs=P({synced[0]!r})) without spt.data_parallel",
            )
        clash = sorted(own & split)
        if clash:
            # No TypeError: operators of Python would then try the other operand.
            raise LayoutError.at(
                f"torch's {getattr(func, '__name__', 'a function')}",
                got=f"{describe(x)} beside a global tensor that is split over {clash[0]!r}",
                need="a whole, the same on all workers along that axis, or a global tensor",
                mend="spt.GlobalTensor.from_block(x, spec), if it is this worker's block",
            )


def _joined(shape: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    """The shape after neighbouring dimensions are joined."""
    sizes, start = [], 0
    for n in groups:
        sizes.append(math.prod(shape[start : start + n]))
        start += n
    return tuple(sizes)


def _refuse_joined(x: Any, what: str) -> None:
    if x.joins:
        raise LayoutError.at(
            what,
            got=f"{describe(x)}, which joins dimensions of an array of shape {list(x._layout.shape)} of which not the "
            "first is split, so that blocks are not contiguous",
            need="blocks that are parts of the joined dimension",
            mend="use it in a linear layer, split it again as it was, or x.whole() (collective)",
        )


def result(block: torch.Tensor, layout: Layout, groups: Sequence[int] | None = None) -> Any:
    """A result by its block: a plain tensor, if the layout splits nothing."""
    alone = [n for n in state_of_tensor(block).varying - layout.varying if layout.axes.get(n) == 1]
    if alone:  # over axes of one worker nothing varies
        block = psum(block, tuple(alone))
    if layout.varying:
        return GlobalTensor(block, layout, groups)
    return block if groups is None else block.reshape(_joined(layout.shape, tuple(groups)))


def lifted(layout: Layout) -> Layout:
    """A layout over all axes of the mesh."""
    axes = here("a global tensor").mesh.axes
    if layout.axes == axes:
        return layout
    if layout.spec is None:
        raise LayoutError.at(
            "a global tensor",
            got=f"{layout}, over the axes {list(layout.axes)}",
            need=f"a grid of all workers, over the axes {list(axes)}",
            mend="leave axes= out of the grid",
        )
    return Layout(layout.shape, layout.spec, axes, layout.cuts)


def whole_layout(shape: Sequence[int]) -> Layout:
    """The layout of an array that every worker has."""
    return here("a global tensor").mesh.layout(tuple(shape), P())


def global_tensor(x: torch.Tensor, spec: LayoutLike) -> Any:
    """A whole tensor, which all workers have, laid out by a spec. Forward: a part of it. Gradient: of the whole.

    A global tensor is laid out anew (`spmd.repartition`).
    """
    where = "spt.put"
    if isinstance(x, GlobalTensor):
        _refuse_joined(x, where)
        target = lifted(layout_of(where, tuple(x._layout.shape), spec, here(where)))
        return result(relaid(x._block, x._layout, target), target)
    if is_partitioned(x):
        return global_tensor(result(x.block(), lifted(x.block_layout)), spec)  # type: ignore[attr-defined]
    worker = here(where)
    target = lifted(layout_of(where, tuple(x.shape), spec, worker))
    varying = state_of_tensor(x).varying
    if varying & target.varying:
        raise StateError.at(
            where,
            argument="x",
            got=describe(x),
            need="a whole, the same on all workers along the axes of the spec",
            mend="spt.GlobalTensor.from_block(x, spec) for this worker's block",
        )
    return result(relaid(x, whole_layout(x.shape), target), target)
