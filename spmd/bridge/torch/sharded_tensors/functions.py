"""Functions of torch on sharded tensors that are no operators: gradients, `x.data`, and access to memory."""

from __future__ import annotations

import sys
from typing import Any

import torch

from spmd.bridge.torch.call_arguments import tensors_in
from spmd.bridge.torch.sharded_tensors.registry import HANDLERS
from spmd.bridge.torch.sharded_tensors.tensor import (
    MEND,
    ShardedTensor,
    check_outside,
    moved_like,
    with_gradient_layout,
    with_plain_gradient,
)
from spmd.errors import LayoutError, describe
from spmd.mesh import WORKER

_disabled = torch._C.DisableTorchFunctionSubclass


def _called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    handler = _FUNCTIONS.get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    if WORKER.get() is not None and func not in _ATTRIBUTES:
        x = next(x for x in tensors_in(args, kwargs) if isinstance(x, ShardedTensor))
        check_outside(f"torch's {getattr(func, '__name__', 'function')}", x)
    if torch.is_grad_enabled():
        args, kwargs = _with_plain_gradients(args, kwargs)
    with _disabled():
        return func(*args, **kwargs)


def _with_plain_gradients(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The operands of a function, of which plain tensors get plain gradients."""
    mesh = None
    differentiated = False
    for x in tensors_in(args, kwargs):
        if isinstance(x, ShardedTensor):
            mesh = x.mesh
        elif x.requires_grad and x.ndim:
            differentiated = True
    if mesh is None or not differentiated:
        return args, kwargs

    def operand(x: Any) -> Any:
        if type(x) in (list, tuple):
            return type(x)(map(operand, x))
        is_plain = isinstance(x, torch.Tensor) and not isinstance(x, ShardedTensor)
        return with_plain_gradient(x, mesh) if is_plain and x.requires_grad and x.ndim else x

    return tuple(map(operand, args)), {k: operand(v) for k, v in kwargs.items()}


def _gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """torch.autograd.grad: a gradient lies as its tensor."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    with _disabled():
        return tuple(
            g
            if g is None or not isinstance(x, ShardedTensor)
            else moved_like(g, x.block_layout, x.mesh, tuple(x.shape))
            for x, g in zip(inputs, func(*args, **kwargs), strict=True)
        )


def _set_requires_grad(func: Any, args: Any, kwargs: Any) -> Any:
    with _disabled():
        result = func(*args, **kwargs)
        with_gradient_layout(args[0])
    return result


def _refuse_memory(func: Any, args: Any, kwargs: Any) -> Any:
    x = next(x for x in tensors_in(args, kwargs) if isinstance(x, ShardedTensor))
    raise LayoutError.at(
        f"x.{getattr(func, '__name__', 'a function')}",
        got=describe(x),
        need="a tensor in one piece of memory",
        mend=MEND,
    )


def _refuse_data(func: Any, args: Any, kwargs: Any) -> Any:
    x = next(x for x in tensors_in(args, kwargs) if isinstance(x, ShardedTensor))
    raise LayoutError.at(
        "x.data = y",
        got=describe(x),
        need="another way to write to the blocks",
        mend="with torch.no_grad(): x.copy_(y)",
    )


_ATTRIBUTES = {
    getattr(torch.Tensor, name).__get__
    for name in "shape ndim dtype device requires_grad is_leaf grad_fn layout grad is_cpu is_cuda is_meta".split()
} | {
    getattr(torch.Tensor, name)
    for name in "size dim numel nelement element_size is_floating_point is_complex __hash__".split()
}
"""What bodies may ask of a sharded tensor, which they reach through a closure."""

_FUNCTIONS: dict[Any, Any] = {
    torch.autograd.grad: _gradients,
    torch.Tensor.requires_grad_: _set_requires_grad,
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _refuse_data,  # type: ignore[attr-defined]
}
_FUNCTIONS |= {
    getattr(torch.Tensor, name): _refuse_memory
    for name in "tolist __array__ __dlpack__ data_ptr share_memory_ as_subclass untyped_storage".split()
}

HANDLERS["call"] = _called

# Optimisers of torch take lists where they are faster.
_foreach_types = getattr(sys.modules[torch.optim.Optimizer.__module__], "_foreach_supported_types", None)
if isinstance(_foreach_types, list):
    _foreach_types.append(ShardedTensor)
