"""Products: sums over dimensions that two tensors share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmd.bridge.torch.global_tensors.meeting import (
    WHOLE,
    Dim,
    as_global,
    block_in,
    check_whole,
    dims_of,
    layout_of_dims,
)
from spmd.bridge.torch.global_tensors.registry import handles, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, result
from spmd.bridge.torch.tensor_state import needs_grad
from spmd.functions.movement import varied
from spmd.mesh import here
from spmd.operators.reduce import psum

__all__ = ["contracted"]


def contracted(terms: Sequence[str], out: str, tensors: Sequence[Any]) -> Any:
    """`torch.einsum` of tensors, each dimension of which has a letter of its own; sums are over all workers.

    terms: the letters of each tensor's dimensions. Where a letter is split in one tensor, its part is taken of the
    others. An axis splits one letter only: that of the largest tensor.
    """
    shapes = [_inner(x) for x in tensors]
    lengths: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for c, n in zip(term, shape, strict=True):
            lengths[c] = max(n, lengths.get(c, 1)) if n else 0
    for term, x in zip(terms, tensors, strict=True):
        check_whole("a product of torch", "an operand", _bare(x), [lengths[c] for c in term], broadcasts=True)
    lies = _lies(terms, tensors, lengths)
    worker = here("a global tensor")
    axes = worker.mesh.axes
    used = {n for dim in lies.values() for n in dim.names}
    blocks = []
    for term, x, shape in zip(terms, tensors, shapes, strict=True):
        target = layout_of_dims(
            shape, [lies[c] if n == lengths[c] else WHOLE for c, n in zip(term, shape, strict=True)]
        )
        block = block_in(x, shape, target)
        missing = [n for n in axes if n in used - target.varying]
        blocks.append(varied(block, missing) if missing and not worker.tracked and needs_grad(block) else block)
    y = torch.einsum(f"{','.join(terms)}->{out}", *blocks)
    summed = tuple(n for n in axes if any(n in dim.names for c, dim in lies.items() if c not in out))
    y = psum(y, summed) if summed else y
    return result(y, layout_of_dims([lengths[c] for c in out], [lies[c] for c in out]))


def _inner(x: Any) -> tuple[int, ...]:
    return x._layout.shape if isinstance(x, GlobalTensor) else tuple(x.shape)


def _lies(terms: Sequence[str], tensors: Sequence[Any], lengths: dict[str, int]) -> dict[str, Dim]:
    """How the dimension of each letter lies."""
    lies = dict.fromkeys(lengths, WHOLE)
    taken: set[str] = set()
    split = [(term, x) for term, x in zip(terms, tensors, strict=True) if isinstance(x, GlobalTensor)]
    for term, x in sorted(split, key=lambda each: -math.prod(each[1]._layout.shape)):
        for c, n, dim in zip(term, x._layout.shape, dims_of(x), strict=True):
            if dim.names and n == lengths[c] and not lies[c].names and not taken & {*dim.names}:
                lies[c] = dim
                taken |= {*dim.names}
    return lies


@handles("matmul mm bmm mv dot __matmul__ __rmatmul__ inner")
def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    a, b = (*args, *kwargs.values())
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    a, b = _operands(func, (a, b), args, kwargs)
    if func.__name__ == "inner" and b.ndim > 1:
        b = b.transpose(-1, -2)
    last = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != last:  # `contracted` would broadcast a length of 1
        raise unhandled(func, args, kwargs, f"{a.shape[-1]} rows in the second operand, in place of {last}")
    letters = "abcdefghijklmnopqrstuvw"
    batch = letters[: max(a.ndim, b.ndim, 2) - 2]
    first = (batch[len(batch) - (a.ndim - 2) :] + "xy") if a.ndim > 1 else "y"
    second = (batch[len(batch) - (b.ndim - 2) :] + "yz") if b.ndim > 1 else "y"
    out = batch + ("x" if a.ndim > 1 else "") + ("z" if b.ndim > 1 else "")
    return contracted([first, second], out, [a, b])


@handles("baddbmm addmm addmv")
def _added(func: Any, args: Any, kwargs: Any) -> Any:
    c, a, b = map(as_global, args)
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    return beta * c + alpha * torch.matmul(a, b)


@handles("einsum")
def _einsum(func: Any, args: Any, kwargs: Any) -> Any:
    equation, *tensors = args
    tensors = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    tensors = _operands(func, tensors, args, kwargs)
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in equation:
        free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in equation]
        most = max(x.ndim - len(t) + 3 for t, x in zip(terms, tensors, strict=True) if "..." in t)
        dots = "".join(free[:most])
        terms = [t.replace("...", dots[most - (x.ndim - len(t) + 3) :]) for t, x in zip(terms, tensors, strict=True)]
        out = (
            out.replace("...", dots)
            if arrow
            else dots + "".join(sorted(c for c in set(left) - {*".,"} if left.count(c) == 1))
        )
    elif not arrow:
        out = "".join(sorted(c for c in {*left} - {","} if left.count(c) == 1))
    if any(len({*t}) < len(t) for t in terms):
        raise unhandled(func, args, kwargs, "each letter once in every term")
    return contracted(terms, out, tensors)


def _operands(func: Any, tensors: Sequence[Any], args: Any, kwargs: Any) -> list[Any]:
    made = [as_global(x) for x in tensors]
    if any(isinstance(x, GlobalTensor) and not x.is_separate for x in made):
        raise unhandled(func, args, kwargs, "layouts by specs, in which each dimension is split by itself")
    return made


@handles("outer ger")
def _outer(func: Any, args: Any, kwargs: Any) -> Any:
    a, b = _operands(func, (*args, *kwargs.values()), args, kwargs)
    return contracted(["x", "y"], "xy", [a, b])


def joined_linear(x: Any, w: Any, bias: Any) -> Any:
    """y = x wᵀ + bias, where dimensions of x or w join several of their layouts.

    Features that are joined are contracted one by one: of each worker's part. Rows that are joined stay joined.
    """
    inner = list(_inner(x))
    groups = list(x._groups) if isinstance(x, GlobalTensor) else [1] * len(inner)
    features = inner[len(inner) - groups[-1] :]
    w_inner, w_groups = list(_inner(w)), list(w._groups) if isinstance(w, GlobalTensor) else [1, 1]
    if w_groups[1] != groups[-1] or w_inner[w_groups[0] :] != features:
        if w_groups[1] != 1:
            raise unhandled(torch.nn.functional.linear, (x, w), {}, "features of x and w that are joined alike")
        w = _opened(w, w_inner[: w_groups[0]], features)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    batch = "".join(next(letters) for _ in inner[: len(inner) - groups[-1]])
    rows = "".join(next(letters) for _ in range(w_groups[0]))
    common = "".join(next(letters) for _ in features)
    y = contracted([batch + common, rows + common], batch + rows, [_bare(x), _bare(w)])
    if bias is not None:
        rows_shape = w_inner[: w_groups[0]]
        lies_so = isinstance(bias, GlobalTensor) and list(bias._layout.shape) == rows_shape
        own = _bare(bias) if lies_so else _whole(bias).reshape(rows_shape)
        y = y + own
    groups = (*groups[:-1], w_groups[0])
    if isinstance(y, GlobalTensor):
        return GlobalTensor(y._block, y._layout, groups)
    return result(y, layout_of_dims(y.shape, [WHOLE] * y.ndim), groups)


def _whole(x: Any) -> Any:
    return x.whole() if isinstance(x, GlobalTensor) else x


def _bare(x: Any) -> Any:
    """The tensor in the dimensions of its layout."""
    return GlobalTensor(x._block, x._layout) if isinstance(x, GlobalTensor) else x


def _opened(w: Any, rows: Sequence[int], features: Sequence[int]) -> Any:
    """Weights whose columns have the dimensions of features that are joined."""
    w = _bare(w)
    return w.reshape(*rows, *features)
