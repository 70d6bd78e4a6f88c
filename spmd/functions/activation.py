"""Activations, entry by entry; with a bias in the same pass.

All take real floating-point arrays and keep their dtype; relu takes integers too. The result of a global array lies
as it does, and nothing is sent. At a kink the derivative is that of the flat side, as in torch. NaN stays NaN.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from spmd import kernels
from spmd.array import check_usable
from spmd.autodiff.registry import primitive
from spmd.autodiff.signatures import Tree
from spmd.autodiff.tracer import Array
from spmd.errors import SpecError, describe
from spmd.functions.arguments import as_number, cast, normalized_axis
from spmd.functions.layouts import array_operand, floating_array
from spmd.global_ops.call import global_value
from spmd.global_ops.elementwise import elementwise
from spmd.kernels.reference.activation import FAR, FORMS, KINDS, form
from spmd.spellings import closest
from spmd.tracebacks import api_boundary

__all__ = [
    "bias_act",
    "celu",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_swish",
    "leaky_relu",
    "log_sigmoid",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "swiglu",
    "swish",
]


class _SharedCotangent:
    """The cotangent of x + bias, computed once: it is that of x and, summed over rows, that of bias.

    both: whether both are differentiated.
    """

    __slots__ = ("both", "last")

    def __init__(self, both: bool):
        self.both = both
        self.last: tuple[Any, Any] | None = None

    def __call__(self, g, x, bias, kind: str, alpha: float, over: bool = False):
        """over: whether the result may overwrite g."""
        last, self.last = self.last, None
        if last is not None and last[0] is g:
            return last[1]
        in_place = over and type(x) is np.ndarray and g.shape == x.shape and g.dtype == x.dtype and g.flags.c_contiguous
        if in_place and (bias is None or type(bias) is np.ndarray):
            x_cotangent = kernels.of(x).activate_vjp(g, x, bias, kind, alpha, g)
        else:
            x_cotangent = _activate_vjp(g, x, bias, kind=kind, alpha=alpha)
        if self.both:
            self.last = g, x_cotangent
        return x_cotangent


def _second_vjp(h, _ans, g, x, bias, *, kind, alpha) -> Any:
    z = x if bias is None else x + bias
    return h * g * _second_derivative(z, kind, alpha)


def _self_adjoint(h, _ans, _g, x, bias, *, kind, alpha) -> Any:
    """The rule in g: the map is linear and its own adjoint."""
    return _activate_vjp(h, x, bias, kind=kind, alpha=alpha)


@primitive("activate_vjp", _self_adjoint, _second_vjp, _second_vjp)
def _activate_vjp(g, x, bias, *, kind: str, alpha: float):
    g, x = (np.asarray(a) if isinstance(a, float) else a for a in (g, x))  # from a Python number
    return kernels.of(x).activate_vjp(g, x, bias, kind, alpha)


def _vjp(g, _ans, x, bias, *, kind, alpha, shared, over=False) -> Any:
    return shared(g, x, bias, kind, alpha, over)


def _forward(x, bias, *, kind: str, alpha: float, shared: _SharedCotangent):
    x = np.asarray(x) if isinstance(x, float) else x
    return kernels.of(x).activate(x, bias, kind, alpha)


_activate = primitive("activate", _vjp, _vjp, over=partial(_vjp, over=True))(_forward)


def _vjp_from_result(g, ans, _x, _bias, *, kind, alpha, shared, over=False) -> Any:
    return shared(g, ans, None, kind, alpha, over)


_activate_from_result = primitive(
    "activate", _vjp_from_result, _vjp_from_result, over=partial(_vjp_from_result, over=True)
)(_forward)
"""For activations with f'(f(z)) = f'(z): the tape keeps the result in place of x and bias."""


def _activated(x, bias, kind: str, alpha: float = 1.0):
    values = [value for a in (x, bias) if a is not None and (value := global_value(a)) is not None]
    for value in values:
        check_usable(f"spmd.functions.{kind}", value)
    if values:
        return elementwise(_activated, (x, bias, kind, alpha), {})
    from_result = kind in ("relu", "relu6") or (kind == "leaky_relu" and alpha >= 0)
    # In short dtypes f(z) is rounded after the sum with the bias, and may then lie at a kink.
    from_result = from_result and (bias is None or np.result_type(x).itemsize >= 4)
    both = type(x) is Array and type(bias) is Array and x.tape is not None and x.tape is bias.tape
    activate = _activate_from_result if from_result else _activate
    return activate(x, bias, kind=kind, alpha=alpha, shared=_SharedCotangent(both))


def _second_derivative(z, kind: str, alpha: float):
    """f''(z), in differentiable functions."""
    index, p = form(kind, alpha)
    match FORMS[index]:
        case "ramp":
            inside = (p[0] * z + p[1] > 0) & (p[0] * z + p[1] < p[2])
            return np.where(inside, np.full_like(z, 2 * p[0] * p[4]), np.zeros_like(z))
        case "gate":
            z = np.clip(z, -FAR, FAR)
            s = sigmoid(z * (p[0] + p[1] * z * z))
            ds, d2s = s * (1 - s), s * (1 - s) * (1 - 2 * s)
            d = p[0] + 3 * p[1] * z * z
            second = d2s * d * d + 6 * p[1] * ds * z
            return 2 * ds * d + z * second if p[4] else second
        case "decay":
            below = np.where(z > 0, np.zeros_like(z), z)
            return np.where(z > 0, np.zeros_like(z), p[0] * p[1] * p[2] ** 2 * np.exp(p[2] * below))
        case "softplus":
            s = sigmoid(z)
            return p[0] * s * (1 - s)
        case "tanh":
            t = np.tanh(z)
            return -2 * t * (1 - t * t)
        case "mish":
            t, s = np.tanh(softplus(z)), sigmoid(z)
            ds = (1 - t * t) * s
            return 2 * ds + z * ds * (1 - s - 2 * t * s)
        case _:
            return np.exp(-0.5 * z * z) * (2 - z * z) * (1 / math.sqrt(2 * math.pi))


def _apply(x, kind: str, alpha: float = 1.0):
    where = f"spmd.functions.{kind.removesuffix('_tanh')}"
    return _activated(floating_array(where, "x", x), None, kind, alpha)


@api_boundary
def bias_act(x: Tree, bias: Any, kind: str = "relu", *, alpha: float | None = None) -> Tree:
    """f(x + bias), in one pass over memory.

    x: (..., n). bias: (n,), or None. kind: one of relu, relu6, leaky_relu, hard_sigmoid, hard_swish, sigmoid, silu,
    gelu (exact), gelu_tanh, elu, celu, selu, softplus, log_sigmoid, tanh, mish. alpha: the number of leaky_relu (0.01),
    elu and celu (1). Adjoint of the derivative: g * f'(x + bias), and its sum over rows for bias, in one computation.

        >>> def total(x, bias):
        ...     return np.sum(spmd.functions.bias_act(x, bias, "relu"))
        >>> spmd.grad(total, argnums=(0, 1))(np.array([[-1.0, 1.0], [2.0, 2.0]]), np.array([0.5, 0.0]))
        (array([[0., 1.],
               [1., 1.]]), array([1., 2.]))
    """
    where = "spmd.functions.bias_act"
    x = floating_array(where, "x", x)
    if not isinstance(kind, str) or kind not in KINDS:
        raise SpecError.at(
            where, argument="kind", got=repr(kind), need=", ".join(KINDS), mend=f'kind="{closest(kind, KINDS, "relu")}"'
        )
    if alpha is not None and kind not in ("leaky_relu", "elu", "celu"):
        need = "no alpha: only leaky_relu, elu and celu have one"
        raise SpecError.at(where, argument="alpha", got=f"{alpha} for {kind}", need=need, mend="leave it out")
    if alpha is None:
        alpha = 0.01 if kind == "leaky_relu" else 1.0
    alpha = _finite_number(where, "alpha", alpha, kind == "celu")
    if bias is not None:
        bias = floating_array(where, "bias", bias)
        if not x.ndim or bias.shape != x.shape[-1:]:
            need = f"{describe(x)} with a last axis of its length" if not x.ndim else f"shape {list(x.shape[-1:])}"
            mend = "reshape it; add a bias of another shape before: bias_act(x + bias, None, kind)"
            raise SpecError.at(where, argument="bias", got=describe(bias), need=need, mend=mend)
        dtype = np.result_type(x.dtype, bias.dtype)
        x, bias = cast(x, dtype), cast(bias, dtype)
    return _activated(x, bias, kind, alpha)


def _finite_number(where: str, argument: str, alpha: Any, nonzero: bool = False) -> float:
    alpha = as_number(where, argument, alpha, -math.inf, math.inf)
    if not math.isfinite(alpha) or (nonzero and not alpha):
        need = "a finite number" + (" other than 0" if nonzero else "")
        raise SpecError.at(where, argument=argument, got=str(alpha), need=need, mend=f"{argument}=1.0")
    return alpha


@api_boundary
def relu(x: Tree) -> Tree:
    """max(x, 0), entry by entry. x: real; integers stay integers. Adjoint of the derivative: g where x > 0, else 0.

    >>> spmd.value_and_grad(lambda x: np.sum(spmd.relu(x)))(np.array([-1.0, 0.0, 2.0]))
    (np.float64(2.0), array([0., 0., 1.]))
    """
    x = array_operand("spmd.functions.relu", "x", x, "fiu", "real numbers", "x.astype(float)")
    return np.maximum(x, 0) if x.dtype.kind in "iu" else _apply(x, "relu")


@api_boundary
def relu6(x: Tree) -> Tree:
    """min(max(x, 0), 6).

    x: floating, of any shape. Adjoint of the derivative: g where 0 < x < 6, else 0. Raises SpecError for another dtype.

        >>> spmd.value_and_grad(lambda x: np.sum(spmd.functions.relu6(x)))(np.array([-1.0, 3.0, 9.0]))
        (np.float64(9.0), array([0., 1., 0.]))
    """
    return _apply(x, "relu6")


@api_boundary
def leaky_relu(x: Tree, negative_slope: float = 0.01) -> Tree:
    """x where x > 0, else negative_slope * x.

    x: floating, of any shape. Adjoint of the derivative: g where x > 0, else negative_slope * g. Raises SpecError for
    another dtype.

        >>> spmd.functions.leaky_relu(np.array([-2.0, 0.0, 3.0]), 0.5)
        array([-1.,  0.,  3.])
    """
    return _apply(x, "leaky_relu", _finite_number("spmd.functions.leaky_relu", "negative_slope", negative_slope))


@api_boundary
def hard_sigmoid(x: Tree) -> Tree:
    """min(max(x / 6 + 1/2, 0), 1).

    x: floating, of any shape. Adjoint of the derivative: g / 6 where -3 < x < 3, else 0. Raises SpecError for another
    dtype.

        >>> spmd.functions.hard_sigmoid(np.array([-4.0, 0.0, 1.5, 4.0]))
        array([0.  , 0.5 , 0.75, 1.  ])
    """
    return _apply(x, "hard_sigmoid")


@api_boundary
def hard_swish(x: Tree) -> Tree:
    """x * hard_sigmoid(x).

    x: floating, of any shape. Adjoint of the derivative: g * (x / 3 + 1/2) where -3 < x < 3, else 0 below and g above.
    Raises SpecError for another dtype. Source: Howard et al., "Searching for MobileNetV3", 2019.

        >>> spmd.functions.hard_swish(np.array([-4.0, 0.0, 1.5, 4.0]))
        array([0.   , 0.   , 1.125, 4.   ])
    """
    return _apply(x, "hard_swish")


@api_boundary
def sigmoid(x: Tree) -> Tree:
    """1 / (1 + exp(-x)), without overflow.

    x: floating, of any shape. Adjoint of the derivative: g * y * (1 - y). Raises SpecError for another dtype.

        >>> spmd.functions.sigmoid(np.array([-1000.0, 0.0, 1000.0]))
        array([0. , 0.5, 1. ])
    """
    return _apply(x, "sigmoid")


@api_boundary
def silu(x: Tree) -> Tree:
    """x * sigmoid(x), also called swish.

    x: floating, of any shape. Adjoint of the derivative: g * s * (1 + x * (1 - s)), where s = sigmoid(x). Raises
    SpecError for another dtype. Source: Elfwing, Uchibe, Doya, 2017.

        >>> spmd.grad(lambda x: np.sum(spmd.functions.silu(x)))(np.array([0.0, 100.0]))
        array([0.5, 1. ])
    """
    return _apply(x, "silu")


swish = silu


@api_boundary
def gelu(x: Tree, approximate: bool | str = True) -> Tree:
    """x * Phi(x), Phi being the distribution function of the normal distribution.

    x: floating, of any shape. Adjoint of the derivative: g * (Phi(x) + x * Phi'(x)), or that of the approximation.
    approximate: True, the default as in `jax.nn.gelu`, or "tanh": x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))).
    False or "none", torch's default: exact. Raises SpecError for another dtype. Source: Hendrycks, Gimpel, "Gaussian
    error linear units", 2016.

        >>> spmd.functions.gelu(np.array([-1.0, 0.0, 1.0]), approximate=False).round(4)
        array([-0.1587,  0.    ,  0.8413])
    """
    if not isinstance(approximate, bool | str) or isinstance(approximate, str) and approximate not in ("tanh", "none"):
        where, need = "spmd.functions.gelu", 'True or "tanh", False or "none"'
        mend = f'approximate="{closest(approximate, ("tanh", "none"))}"'
        raise SpecError.at(where, argument="approximate", got=describe(approximate), need=need, mend=mend)
    return _apply(x, "gelu_tanh" if approximate in (True, "tanh") else "gelu")


@api_boundary
def elu(x: Tree, alpha: float = 1.0) -> Tree:
    """x where x > 0, else alpha * (exp(x) - 1).

    x: floating, of any shape. Adjoint of the derivative: g where x > 0, else alpha * exp(x) * g. Raises SpecError for
    another dtype.

        >>> spmd.functions.elu(np.array([-np.inf, 0.0, 2.0]), alpha=0.5)
        array([-0.5,  0. ,  2. ])
    """
    return _apply(x, "elu", _finite_number("spmd.functions.elu", "alpha", alpha))


@api_boundary
def celu(x: Tree, alpha: float = 1.0) -> Tree:
    """x where x > 0, else alpha * (exp(x / alpha) - 1); alpha is positive.

    x: floating, of any shape. Adjoint of the derivative: g where x > 0, else exp(x / alpha) * g. Raises SpecError for
    another dtype.

        >>> spmd.functions.celu(np.array([-np.inf, 0.0, 2.0]), alpha=0.5)
        array([-0.5,  0. ,  2. ])
    """
    where = "spmd.functions.celu"
    alpha = _finite_number(where, "alpha", alpha, nonzero=True)
    if alpha < 0:
        raise SpecError.at(where, argument="alpha", got=str(alpha), need="a positive number", mend="alpha=1.0")
    return _apply(x, "celu", alpha)


@api_boundary
def selu(x: Tree) -> Tree:
    """1.0507 * elu(x, 1.6733).

    x: floating, of any shape. Adjoint of the derivative: 1.0507 times that of elu. Raises SpecError for another dtype.
    Source: Klambauer et al., "Self-normalizing neural networks", 2017.

        >>> spmd.functions.selu(np.array([-np.inf, 0.0, 1.0])).round(4)
        array([-1.7581,  0.    ,  1.0507])
    """
    return _apply(x, "selu")


@api_boundary
def softplus(x: Tree) -> Tree:
    """log(1 + exp(x)), without overflow.

    x: floating, of any shape. Adjoint of the derivative: g * sigmoid(x). Raises SpecError for another dtype.

        >>> spmd.functions.softplus(np.array([-100.0, 0.0, 100.0])).round(4)
        array([  0.    ,   0.6931, 100.    ])
    """
    return _apply(x, "softplus")


@api_boundary
def log_sigmoid(x: Tree) -> Tree:
    """log(sigmoid(x)) = -softplus(-x).

    x: floating, of any shape. Adjoint of the derivative: g * sigmoid(-x). Raises SpecError for another dtype.

        >>> spmd.functions.log_sigmoid(np.array([-100.0, 0.0, 1.0])).round(4)
        array([-100.    ,   -0.6931,   -0.3133])
    """
    return _apply(x, "log_sigmoid")


@api_boundary
def mish(x: Tree) -> Tree:
    """x * tanh(softplus(x)).

    x: floating, of any shape. Adjoint of the derivative: g * (t + x * (1 - t^2) * sigmoid(x)), where t =
    tanh(softplus(x)). Raises SpecError for another dtype. Source: Misra, 2019.

        >>> spmd.functions.mish(np.array([-1.0, 0.0, 1.0])).round(4)
        array([-0.3034,  0.    ,  0.8651])
    """
    return _apply(x, "mish")


def _halves(where: str, x, axis: int):
    x = floating_array(where, "x", x)
    axis = normalized_axis(where, x, axis)
    if x.shape[axis] % 2:
        raise SpecError.at(
            where,
            argument="axis",
            got=f"{axis} for {describe(x)}",
            need="an axis of even length",
            mend="axis=-1 of an array (..., 2 n)",
        )
    n, before = x.shape[axis] // 2, (slice(None),) * axis
    return x[(*before, slice(None, n))], x[(*before, slice(n, None))]


@api_boundary
def glu(x: Tree, axis: int = -1) -> Tree:
    """a * sigmoid(b), where a and b are the halves of x along an axis. As `jax.nn.glu`.

    x: floating, of even length along the axis. Adjoint of the derivative: g * s for a, g * a * s * (1 - s) for b, where
    s = sigmoid(b). Raises SpecError for an odd length. Source: Dauphin et al., 2016.

        >>> spmd.functions.glu(np.array([1.0, 2.0, 0.0, 0.0]))
        array([0.5, 1. ])
    """
    a, b = _halves("spmd.functions.glu", x, axis)
    return a * sigmoid(b)


@api_boundary
def swiglu(x: Tree, axis: int = -1) -> Tree:
    """silu(a) * b, where a and b are the halves of x along an axis.

    x: floating, of even length along the axis. Adjoint of the derivative: as of `silu` times b for a, g * silu(a) for
    b. Raises SpecError for an odd length. Source: Shazeer, "GLU variants improve transformer", 2020.

        >>> spmd.functions.swiglu(np.array([0.0, 100.0, 3.0, 2.0]))
        array([  0., 200.])
    """
    a, b = _halves("spmd.functions.swiglu", x, axis)
    return silu(a) * b
