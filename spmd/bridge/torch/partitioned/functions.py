"""Functions of torch that are called with partitioned tensors: states of operands, gradients, `p.data`.

The operators that a function calls handle the blocks; see `registry`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms

from spmd.bridge.torch.call_arguments import tensors_in
from spmd.bridge.torch.functorch import current_level, unwrapped
from spmd.bridge.torch.partitioned.parameter import Parameter
from spmd.bridge.torch.partitioned.placement import MEND
from spmd.bridge.torch.partitioned.registry import FUNCTIONS
from spmd.bridge.torch.partitioned.tensor import (
    PartitionedTensor,
    _WrappedTensor,
    mark_wrapped,
    split_like,
    with_gradient_layout,
)
from spmd.bridge.torch.tensor import Tensor, backward_scope, with_state
from spmd.bridge.torch.tensor_state import INVARIANT, no_overrides, state_of_tensor, summed_state
from spmd.errors import LayoutError, describe
from spmd.frontends import register
from spmd.mesh import WORKER
from spmd.state import State

_disabled = torch._C.DisableTorchFunctionSubclass


_IN_PLACE = {
    getattr(torch.Tensor, name)
    for name in "add_ sub_ mul_ div_ addcmul_ addcdiv_ lerp_ copy_ zero_ sqrt_ neg_ clamp_".split()
}


def _write_blocks(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Apply an in-place elementwise function to the blocks of tensors of one layout, if that is possible.

    The fast path of optimisers. Not under autograd, torch.func or torch.compile.
    """
    target, *others = args
    if torch.is_grad_enabled() or current_level() is not None or torch.compiler.is_compiling():
        return False
    if not isinstance(target, PartitionedTensor) or target._state is not INVARIANT:
        return False
    placement, shape = target._placement, target.shape
    blocks: list[Any] = [target._block]
    for a in others:
        if type(a) in _NUMBERS:
            blocks.append(a)
        elif isinstance(a, PartitionedTensor) and a._state is INVARIANT and a.shape == shape:
            if a._placement is not placement and a._placement != placement:
                return False
            blocks.append(a._block)
        else:
            return False
    if any(type(v) not in _NUMBERS for v in kwargs.values()):
        return False
    func(*blocks, **kwargs)
    torch.autograd.graph.increment_version(target)
    return True


_NUMBERS = (int, float, complex, bool, type(None))


def _call_function(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func in _IN_PLACE:
        with no_overrides():
            if _write_blocks(func, args, kwargs):
                return args[0]
    state = _common_state(func, args, kwargs)
    with _disabled():
        result = func(*args, **kwargs)
    return result if state is INVARIANT else _results_with_state(result, state)


def _common_state(func: Any, args: Any, kwargs: dict[str, Any]) -> State:
    """The union of the states of the operands, besides their layouts."""
    state: State | None = None
    mixed = False
    layouts: set[str] = set()
    for x in tensors_in(args, kwargs):
        inner = unwrapped(x) if type(x) is _WrappedTensor else x
        if isinstance(inner, PartitionedTensor):
            own = inner._state
            if own is not INVARIANT or state is not None:
                layouts |= inner._placement.layout.varying
        elif isinstance(x, Tensor):
            own = x.state
        else:
            own = INVARIANT
        if state is None:
            state = own
        elif own is not state:
            state, mixed = state | own, True
    if state is None or state is INVARIANT:
        return INVARIANT
    layouts |= {
        n
        for x in tensors_in(args, kwargs)
        if isinstance(unwrapped(x), PartitionedTensor)
        for n in unwrapped(x)._placement.layout.varying
    }
    clash = sorted(layouts & state.varying)
    if clash or (mixed and torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(args, kwargs))):
        # No TypeError: operators of Python would then try the other operand.
        raise LayoutError.at(
            f"torch.{getattr(func, '__name__', 'a function')}",
            got="a tensor of which each worker has a block, and one that varies over "
            + ", ".join(map(repr, clash or sorted(state.varying))),
            need="tensors of one state, which are whole or have one layout",
            mend=MEND,
        )
    return state


def _results_with_state(result: Any, state: State) -> Any:
    if isinstance(result, PartitionedTensor):
        result._state = state
        return result
    if type(result) in (torch.Tensor, Tensor):
        return with_state(result, state)
    if type(result) in (tuple, list) or hasattr(result, "n_fields"):
        return type(result)([_results_with_state(r, state) for r in result])
    return result


def _call_directly(func: Any, args: Any, kwargs: Any) -> Any:
    with _disabled():
        return func(*args, **kwargs)


def _set_requires_grad(func: Any, args: Any, kwargs: Any) -> Any:
    result = _call_directly(func, args, kwargs)
    if isinstance(args[0], PartitionedTensor):
        with_gradient_layout(args[0])
    return result


def _detached(func: Any, args: Any, kwargs: Any) -> Any:
    return _results_with_state(_call_directly(func, args, kwargs), unwrapped(args[0])._state)


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    x, value = args
    if not isinstance(x, PartitionedTensor):
        raise LayoutError.at(
            "x.data = p",
            argument="p",
            got=describe(value),
            need="a tensor that this worker has as a whole",
            mend=MEND,
        )
    if tuple(value.shape) != x._placement.layout.shape:
        raise LayoutError.at(
            "p.data = x",
            argument="x",
            got=describe(value),
            need=f"a whole of shape {list(x._placement.layout.shape)}, or a tensor that lies as p",
            mend="p.block().data.copy_(block) for a block",
        )
    with _disabled():
        if state_of_tensor(value).varying:
            _common_state(func, args, kwargs)
        target_block = split_like(value.detach(), x._placement)
        x._block = target_block._block if isinstance(value, PartitionedTensor) else target_block._block.clone()
        if x.dtype != target_block.dtype or x.device != target_block.device:
            raise LayoutError.at(
                "p.data = x",
                argument="x",
                got=describe(value),
                need=f"{x.dtype} on {x.device}",
                mend="module.to(dtype, device) converts parameters",
            )
        torch.autograd.graph.increment_version(x)


def _refuse_data(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", "a function")
    x = next(x for x in tensors_in(args, {}) if isinstance(unwrapped(x), PartitionedTensor))
    raise LayoutError.at(
        f"p.{name}",
        got=describe(unwrapped(x)),
        need="a tensor that this worker has as a whole: a block is not the whole",
        mend=MEND,
    )


def _backward(func: Any, args: Any, kwargs: Any) -> Any:
    with backward_scope():
        return func(*args, **kwargs)


def _gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """torch.autograd.grad: the gradient of a partitioned tensor has its layout."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    with backward_scope():
        grads = func(*args, **kwargs)
    return tuple(_gradient(x, g, state_of_tensor(x) | summed_state(x)) for x, g in zip(inputs, grads, strict=True))


def _gradient(x: Any, g: Any, state: State) -> Any:
    if g is None:
        return None
    if isinstance(x, PartitionedTensor):
        with _disabled():
            shape = tuple(x.shape)
        g = split_like(g, x._placement, shape)
        g._state = x._state | state
        return g
    worker = WORKER.get()
    return with_state(g, state) if worker is not None and worker.tracked and type(g) in (torch.Tensor, Tensor) else g


def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    """A matrix product over one entry is an elementwise product, which keeps the layout."""
    a, b = args
    if a.ndim > 1 and b.ndim > 1 and a.shape[-1] == b.shape[-2] == 1:
        return a * b
    return _call_function(func, args, kwargs)


class _PartitionedFrontend:
    """The frontend of partitioned tensors: all functions of bodies raise, because they need a block or a whole."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            x = next(x for x in args if isinstance(x, PartitionedTensor))
            raise LayoutError.at(
                "a function of bodies",
                got=describe(x),
                need="what this worker has: a tensor of its own, or a whole",
                mend=MEND,
            )

        return refuse


FUNCTIONS |= {
    getattr(torch.Tensor, name).__get__: _call_directly
    for name in (
        "shape ndim dtype device requires_grad is_leaf grad_fn layout is_sparse is_cpu is_cuda is_meta is_quantized "
        "_version grad output_nr is_nested is_mps is_xla is_mkldnn _backward_hooks names"
    ).split()
    if hasattr(getattr(torch.Tensor, name, None), "__get__")
}
FUNCTIONS |= {
    getattr(torch.Tensor, name): _call_directly
    for name in "size stride dim numel nelement element_size is_floating_point is_complex register_hook "
    "retain_grad has_names ndimension storage_offset register_post_accumulate_grad_hook".split()
    if hasattr(torch.Tensor, name)
}
FUNCTIONS |= {torch.is_complex: _call_directly, torch.is_floating_point: _call_directly, torch.numel: _call_directly}
FUNCTIONS |= {torch.Tensor.requires_grad_: _set_requires_grad, torch.Tensor.requires_grad.__set__: _set_requires_grad}  # type: ignore[attr-defined]
FUNCTIONS |= {torch.Tensor.data.__get__: _detached, torch.Tensor.detach: _detached}  # type: ignore[attr-defined]
FUNCTIONS |= {torch.Tensor.data.__set__: _set_data}  # type: ignore[attr-defined]
FUNCTIONS |= dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _matmul)
FUNCTIONS |= {torch.Tensor.backward: _backward, torch.autograd.grad: _gradients}
FUNCTIONS |= {
    getattr(torch.Tensor, name): _refuse_data
    for name in "numpy tolist __array__ __dlpack__ data_ptr share_memory_ as_subclass".split()
    if hasattr(torch.Tensor, name)
}
FUNCTIONS[None] = _call_function


register(PartitionedTensor, _PartitionedFrontend())  # type: ignore[arg-type]


def _keeping_class(function: Callable) -> Callable:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return mark_wrapped(function(x, *args, **kwargs))

    return call


for _name in ("_wrap_for_grad", "_unwrap_for_grad"):
    setattr(eager_transforms, _name, _keeping_class(getattr(eager_transforms, _name)))


# Optimisers of torch take lists where they are faster.
_foreach_types = getattr(sys.modules[torch.optim.Optimizer.__module__], "_foreach_supported_types", None)
if isinstance(_foreach_types, list):
    _foreach_types += [PartitionedTensor, Parameter]
