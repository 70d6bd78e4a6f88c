"""Attention on one block of NumPy or CuPy, and the rule of attention whose keys go round."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.autodiff.custom import custom_vjp
from spmd.autodiff.registry import primitive
from spmd.autodiff.staging.recorder import one_line
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import grad
from spmd.functions import attention_tiles as tiles
from spmd.functions.arguments import cast, is_traced
from spmd.functions.local import namespace
from spmd.kernels.cpu.chunks import accurate
from spmd.operators.apply import operate
from spmd.operators.permute import Permute

__all__ = ["attend", "attend_adjoint", "library", "ruled", "sender"]


def library(x: Any) -> tiles.Library:
    """The arithmetic for arrays as x is, bare or traced."""
    return tiles.Library(
        namespace(x),
        lambda shape, like: np.zeros(shape, like.dtype, like=value_of(like)),
        lambda a: cast(a, accurate(np.dtype(a.dtype))),
        cast,
        _where,
    )


def _where(mask: Any, x: Any, y: Any) -> Any:
    """np.where, for masks of NumPy with arrays of CuPy too."""
    return np.where(np.asarray(mask, like=value_of(x)) if type(mask) is np.ndarray else mask, x, y)


@primitive("attention", None, None, None, None, None)
def attend(q, k, v, bias, mask, *, part):
    """See `attention_tiles.attend`."""
    return one_line(_attend, (q, k, v, bias, mask, part), fresh=True)


def _attend(q, k, v, bias, mask, part):
    return tiles.attend(library(q), q, k, v, bias, mask, part)


@primitive("attention_adjoint", *[None] * 8)
def _attend_adjoint(q, k, v, bias, mask, lse, delta, g, *, part):
    return one_line(_cotangents, (q, k, v, bias, mask, lse, delta, g, part), fresh=True)


def _cotangents(q, k, v, bias, mask, lse, delta, g, part):
    cotangents = tiles.attend_adjoint(library(q), q, k, v, bias, mask, lse, delta, g, part)
    return cotangents if bias is not None else cotangents[:3]


def attend_adjoint(q, k, v, bias, mask, lse, delta, g, *, part) -> Sequence[Any]:
    """See `attention_tiles.attend_adjoint`. Of traced arrays by `attention_tiles.potential`."""
    if not any(is_traced(a) for a in (q, k, v, bias, lse, delta, g)):
        return _attend_adjoint(q, k, v, bias, mask, lse, delta, g, part=part)

    def potential(q, k, v, *bias):
        return tiles.potential(library(q), q, k, v, bias[0] if bias else None, mask, lse, delta, g, part)

    arrays = (q, k, v) if bias is None else (q, k, v, bias)
    return grad(potential, argnums=tuple(range(len(arrays))))(*arrays)


def sender() -> Callable[[Permute, Any], Any]:
    """What sends arrays by an operator."""
    return lambda op, x: operate(op, x, sys._getframe(1))


@custom_vjp
def _ruled(layer, q, k, v, bias, mask):
    return layer.forward(sender(), q, k, v, bias, mask)


def _forward(layer, *operands):
    out, lse = _ruled(layer, *operands)
    return (out, lse), (*operands, out, lse)


def _backward(layer, residuals, cotangents):
    cotangents = layer.backward(sender(), *residuals, *cotangents)
    return (*cotangents, *[None] * (5 - len(cotangents)))


_ruled.nondiff_argnums = (0,)
_ruled.defvjp(_forward, _backward)


def ruled(layer: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """The first result of layer.forward, whose cotangents are by layer.backward."""
    return _ruled(layer, q, k, v, bias, mask)[0]
