"""Forward mode: the transpose of the transpose. A pullback is linear in its cotangent, so its own pullback is the
push-forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.cotangent_matching import check_sequences, match_tangents
from spmd.autodiff.signatures import Aux, Result
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transform_arguments import NUMBERS, kind_of, name_of, not_floating, stated, zeros_like
from spmd.autodiff.transforms import vjp
from spmd.tracebacks import api_boundary

__all__ = ["jvp", "linear_transpose", "linearize"]


@overload
def jvp(
    fun: Callable[..., Result], primals: Sequence[Any], tangents: Sequence[Any], has_aux: Literal[False] = False
) -> tuple[Result, Result]: ...


@overload
def jvp(
    fun: Callable[..., tuple[Result, Aux]], primals: Sequence[Any], tangents: Sequence[Any], has_aux: Literal[True]
) -> tuple[Result, Result, Aux]: ...


@api_boundary
def jvp(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> tuple[Any, ...]:
    """`fun(*primals)` and its directional derivative along `tangents`, as a pair; with has_aux the aux as the third.

    primals, tangents: tuples or lists of the same structure, shapes and dtypes (Python numbers adapt); the tangent of
    an integer is zeros of dtype float0. Raises DifferentiationError for tangents that do not fit.

        >>> spmd.jvp(lambda x: x**2, (np.array([1.0, 3.0]),), (np.array([1.0, 0.5]),))
        (array([1., 9.]), array([2., 3.]))
    """
    check_sequences("jvp", fun, primals, tangents)
    out, push, *aux = linearize(fun, *primals, has_aux=has_aux)
    return out, push(*tangents), *aux


@overload
def linearize(
    fun: Callable[..., Result], *primals: Any, has_aux: Literal[False] = False
) -> tuple[Result, Callable[..., Result]]: ...


@overload
def linearize(
    fun: Callable[..., tuple[Result, Aux]], *primals: Any, has_aux: Literal[True]
) -> tuple[Result, Callable[..., Result], Aux]: ...


@api_boundary
def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """`fun(*primals)` and its push-forward, a linear function of the tangents that may be called many times.

    With has_aux, `fun` returns (result, aux) and linearize (result, push-forward, aux).

        >>> value, push = spmd.linearize(lambda x: x**2, np.array([1.0, 3.0]))
        >>> push(np.array([1.0, 0.0])), push(np.array([0.0, 1.0]))
        (array([2., 0.]), array([0., 6.]))
    """
    where = f"jvp of {name_of(fun)}"
    out, pull, *aux = vjp(fun, *primals, has_aux=has_aux)
    zeros = tree.map(lambda o: stated(zeros_like(o), getattr(o, "state", None)), out)
    cotangents, pullpull = vjp(pull, zeros)
    likes, treedef = tree.flatten(primals)  # type: ignore[arg-type]
    dtypes = [c.dtype for c in tree.leaves(cotangents)]  # of a Python number that of what it met

    @api_boundary
    def push(*tangents):
        matched = match_tangents(where, likes, treedef, tangents)
        cast = [t if t.dtype == dtype else t.astype(dtype) for t, dtype in zip(matched, dtypes, strict=True)]
        return pullpull(tree.unflatten(treedef, cast))[0]

    push.tape = pull.tape  # type: ignore[attr-defined]
    return out, push, *aux


@api_boundary
def linear_transpose(fun: Callable[..., Any], *primals: Any) -> Callable[[Any], tuple[Any, ...]]:
    """The transpose of a linear function: a function from the cotangent of its result to a tuple, one per argument.

    primals: pytrees of arrays, or of anything with a shape and a dtype; their values do not matter. Of a function
    that is not linear it is the transpose of the derivative at zero.

        >>> spmd.linear_transpose(lambda x: np.cumsum(x), np.zeros(3))(np.array([1.0, 0.0, 2.0]))
        (array([3., 2., 2.]),)
    """

    def zeros(x):
        data = value_of(x)
        if kind_of(data) not in ("f", "c"):
            where = f"linear_transpose of {name_of(fun)}"
            raise not_floating(x, where, lambda: "primals", "and its cotangents too")
        array = type(data) in NUMBERS or hasattr(data, "__array_function__")
        return stated(np.zeros_like(data) if array else np.zeros(data.shape, data.dtype), getattr(x, "state", None))

    return vjp(fun, *tree.map(zeros, primals))[1]
