"""Functions of single entries, and what a tensor knows of itself."""

from __future__ import annotations

from typing import Any

import torch

from spmd.bridge.torch.call_arguments import map_tensors, tensors_in
from spmd.bridge.torch.global_tensors.meeting import (
    WHOLE,
    as_global,
    block_in,
    declared,
    dims_of,
    layout_of_dims,
    meeting_dims,
)
from spmd.bridge.torch.global_tensors.registry import HANDLERS, functions_named, handles, unhandled
from spmd.bridge.torch.global_tensors.sharing import writes
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, _refuse_joined, follow_block, result, whole_layout
from spmd.bridge.torch.tensor_state import is_partitioned, needs_grad, plain
from spmd.mesh import here

_disabled = torch._C.DisableTorchFunctionSubclass

POINTWISE = """
    abs absolute acos acosh add addcdiv addcmul angle arccos arcsin arctan arctan2 asin asinh atan atan2 atanh
    bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip clone complex conj
    conj_physical copysign cos cosh deg2rad detach div divide double elu eq erf erfc erfinv exp exp2 expm1
    fix float float_power floor floor_divide fmax fmin fmod frac ge gelu greater greater_equal gt half bfloat16 cfloat
    cdouble hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 imag int isclose isfinite isinf isnan isneginf
    isposinf le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit logsigmoid long lt masked_fill maximum minimum mish mul multiply nan_to_num
    ne neg negative nextafter not_equal ones_like polar positive pow rad2deg real reciprocal relu relu6 remainder
    resolve_conj round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square
    sub subtract tan tanh tanhshrink threshold to trunc true_divide type where xlogy zeros_like
    full_like empty_like bool cpu cuda requires_grad_ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__
    __rtruediv__ __div__ __rdiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__
    __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__
    abs_ add_ sub_ mul_ div_ addcmul_ addcdiv_ clamp_ clamp_min_ clamp_max_ exp_ relu_ leaky_relu_ elu_ selu_ celu_
    hardtanh_ sigmoid_ tanh_ neg_ sqrt_ pow_ masked_fill_ zero_ fill_ copy_ lerp_ threshold_ hardswish_ hardsigmoid_
    __iadd__ __isub__ __imul__ __itruediv__ __ipow__
"""


@handles(POINTWISE)
def _pointwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function of the entries of tensors that broadcast."""
    name = getattr(func, "__name__", "")
    first = args[0] if args else None
    written = first if writes(name, kwargs) else kwargs.get("out")
    if (
        type(first) is GlobalTensor
        and len(args) == 1
        and name != "where"
        and not any(True for _ in tensors_in((), kwargs))
    ):
        block = func(first._block, **kwargs)  # the usual case
        return first if written is first else _like(first, block)
    if name == "where" and len(args) + len(kwargs) == 1:
        raise unhandled(func, args, kwargs, "a condition and two values")
    operands = [as_global(x) for x in tensors_in(args, kwargs)]
    joined = [x for x in operands if isinstance(x, GlobalTensor)]
    if written is None:
        layout, groups = _meet(func, operands, joined, args, kwargs)
    else:  # what is written to stays as it lies
        _refuse_parameter(func, written, args, kwargs)
        layout, groups = _of_target(written)
    part = lambda x: _part(x, layout, groups)
    block = func(*(map_tensors(part, a) for a in args), **{k: map_tensors(part, v) for k, v in kwargs.items()})
    return written if written is not None else result(block, layout, groups)


@handles("type_as")
def _of_type(func: Any, args: Any, kwargs: Any) -> Any:
    x, other = args
    return x.to(other.dtype)


def _of_target(x: torch.Tensor) -> tuple[Any, Any]:
    if isinstance(x, GlobalTensor):
        return x._layout, x._groups
    return whole_layout(_size(x)), (1,) * len(_size(x))


def _refuse_parameter(func: Any, written: Any, args: Any, kwargs: Any) -> None:
    if is_partitioned(written) and not isinstance(written, GlobalTensor):
        raise unhandled(
            func, args, kwargs, "a global tensor or a whole to write to, in place of a parameter: y = y + x"
        )


def _like(x: GlobalTensor, block: Any) -> Any:
    if block is x._block:
        return x
    return GlobalTensor(block, x._layout, x._groups)


def _meet(func: Any, operands: list[Any], joined: list[GlobalTensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The layout of the result, and the groups of its dimensions."""
    lead = joined[0]
    shape = tuple(torch.broadcast_shapes(*(_size(x) for x in operands)))
    if all(x._layout == lead._layout and x._groups == lead._groups for x in joined) and _size(lead) == shape:
        return lead._layout, lead._groups
    if not all(x.is_separate for x in joined):
        raise unhandled(func, args, kwargs, "tensors that lie alike")
    dims = meeting_dims(shape, [(x._layout.shape, dims_of(x)) for x in joined])
    return layout_of_dims(shape, dims), (1,) * len(shape)


def _size(x: torch.Tensor) -> tuple[int, ...]:
    with _disabled():
        return tuple(x.shape)


def _part(x: torch.Tensor, layout: Any, groups: Any) -> torch.Tensor:
    """The part of an operand that meets the block of the result."""
    x = as_global(x)
    if isinstance(x, GlobalTensor):
        if x._layout == layout and x._groups == tuple(groups):
            return x._block
        if x.is_separate or not x.joins and layout.spec is None:
            return block_in(x, layout.shape, layout)
        x = x.whole()  # beside a whole that is written to
    if not x.ndim:
        return block_in(x, layout.shape, layout) if layout.spec is not None or needs_grad(x) else x
    if len(groups) != len(layout.shape) or layout.spec is None:
        outer, start = [], 0
        for n in groups:
            size = 1
            for k in layout.shape[start : start + n]:
                size *= k
            outer.append(size)
            start += n
        x = x.expand(outer).reshape(layout.shape)
    return block_in(x, layout.shape, layout)


# What a tensor knows of itself


def _of_wrapper(func: Any, args: Any, kwargs: Any) -> Any:
    with _disabled():
        return func(*args, **kwargs)


def _of_block(func: Any, args: Any, kwargs: Any) -> Any:
    x, *rest = args
    return func(x._block, *rest, **kwargs)


def _detached(func: Any, args: Any, kwargs: Any) -> Any:
    return _like(args[0], args[0]._block.detach())


HANDLERS |= {
    getattr(torch.Tensor, name).__get__: _of_wrapper
    for name in (
        "shape ndim dtype device layout is_sparse is_cpu is_cuda is_meta is_quantized is_nested is_mps is_xla "
        "is_mkldnn names itemsize nbytes"
    ).split()
    if hasattr(getattr(torch.Tensor, name, None), "__get__")
}
HANDLERS |= dict.fromkeys(
    functions_named("size dim numel nelement element_size is_floating_point is_complex ndimension is_signed __len__"),
    _of_wrapper,
)
HANDLERS |= {
    getattr(torch.Tensor, name).__get__: _of_block
    for name in "requires_grad grad_fn is_leaf _version output_nr".split()
}
HANDLERS |= dict.fromkeys(functions_named("retain_grad"), _of_block)
HANDLERS |= {torch.Tensor.data.__get__: _detached}  # type: ignore[attr-defined]


@handles("requires_grad_")
def _require_grad(func: Any, args: Any, kwargs: Any) -> Any:
    args[0]._block.requires_grad_(*args[1:], **kwargs)
    follow_block(args[0])
    return args[0]


def _gradient(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    return None if x._block.grad is None else _like(x, x._block.grad)


HANDLERS |= {torch.Tensor.grad.__get__: _gradient}  # type: ignore[attr-defined]


@handles("contiguous")
def _made_contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    return GlobalTensor(func(x._block, *args[1:], **kwargs), x._layout, x._groups)


@handles("is_contiguous")
def _contiguous(func: Any, args: Any, kwargs: Any) -> bool:
    """Views of global tensors take any shape that its blocks can, on all workers alike."""
    return True


@handles("view_as_complex")
def _as_complex(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dims = dims_of(x)
    if x.joins or dims[-1].names:
        raise unhandled(func, args, kwargs, "real and imaginary parts on one worker")
    return result(func(x._block), layout_of_dims(x._layout.shape[:-1], dims[:-1]))


@handles("view_as_real")
def _as_real(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    _refuse_joined(x, "torch.view_as_real")
    block: Any = x._block  # a view of an empty block would refuse cotangents with other strides
    parts = func(block) if block.numel() else torch.stack([block.real, block.imag], -1)
    return result(parts, layout_of_dims((*x._layout.shape, 2), [*dims_of(x), WHOLE]))


@handles("new_zeros new_ones new_empty new_full new_tensor")
def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor. Dimensions as long as those of x, from the first on, lie as they do."""
    x, *given = args
    if func.__name__ == "new_tensor":
        return func(x._block, *given, **kwargs)
    numbers = all(isinstance(n, int) for n in given) and func.__name__ != "new_full"
    size, rest = (given, []) if numbers else (given[0], given[1:])
    dims = dims_of(x) if x.is_separate else []
    taken = [d if n == m else WHOLE for d, n, m in zip(dims, x._layout.shape, size, strict=False)]
    layout = layout_of_dims(size, [*taken, *[WHOLE] * (len(size) - len(taken))])
    block: Any = func(plain(x._block), layout.block_shape(here("a global tensor").index), *rest, **kwargs)
    return result(declared(block, layout), layout)
