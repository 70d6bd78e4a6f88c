"""Jacobians and Hessians: one sweep per entry of the result, or one push per entry of the argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Literal, TypeVar, Unpack, overload

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.cotangent_matching import check_sequences, match_tangents, varying_over
from spmd.autodiff.dtypes import float0
from spmd.autodiff.forward import linearize
from spmd.autodiff.signatures import Parameters, Primals
from spmd.autodiff.static_array import AnyArray
from spmd.autodiff.tape import Tape
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transform_arguments import is_one, kind_of, name_of, positions, zeros_like
from spmd.autodiff.transforms import check_result, grad, vjp
from spmd.errors import DifferentiationError, describe
from spmd.tracebacks import api_boundary, boundary_like

__all__ = ["hessian", "hvp", "jacfwd", "jacrev"]

Differentiated = TypeVar("Differentiated", bound=AnyArray)


@overload
def jacrev(
    fun: Callable[Concatenate[Differentiated, Parameters], AnyArray],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[Concatenate[Differentiated, Parameters], Differentiated]: ...


@overload
def jacrev(
    fun: Callable[Parameters, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = ...,
    allow_int: bool = ...,
) -> Callable[Parameters, Any]: ...


@api_boundary
def jacrev(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """The Jacobian of `fun` by reverse mode: one sweep per entry of the result.

    It has the tree of the result, at each leaf of that the tree of the argument (a tuple of them where argnums is a
    sequence), and at each leaf of those an array of shape (*result, *argument).

    holomorphic: for a holomorphic function, of complex arguments and with complex results. Without it results are
    real; the rows of a complex argument are gradients as those of `grad`.
    allow_int: integer arguments are no error; their Jacobian is zero.

        >>> spmd.jacrev(lambda x: np.stack([x[0] * x[1], x[1] ** 2]))(np.array([2.0, 3.0]))
        array([[3., 2.],
               [0., 6.]])
    """

    @boundary_like(fun)
    def wrapped(*args, **kwargs):
        where = f"jacrev of {name_of(fun)}"
        part, chosen = _chosen(fun, argnums, args, kwargs, where)
        _check_arguments(where, chosen, holomorphic, allow_int=allow_int)
        out, pull, *aux = vjp(part, *chosen, has_aux=has_aux)
        _one_by_one(where, chosen, out, pull.tape)
        outs, out_tree = tree.flatten(out)
        for o in outs:
            check_result(o, where, holomorphic)
        xs, chosen_tree = tree.flatten(tuple(chosen))
        jacobians = []
        for k, o in enumerate(outs):
            rows = _images(pull, outs, out_tree, k)
            shape = np.shape(value_of(o))
            blocks = [_stacked([row[i] for row in rows], x, shape, 0) for i, x in enumerate(xs)]
            jacobians.append(_pick(tree.unflatten(chosen_tree, blocks), argnums))
        jacobian = tree.unflatten(out_tree, jacobians)
        return (jacobian, *aux) if has_aux else jacobian

    return wrapped


@overload
def jacfwd(
    fun: Callable[Concatenate[Differentiated, Parameters], AnyArray],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = ...,
) -> Callable[Concatenate[Differentiated, Parameters], Differentiated]: ...


@overload
def jacfwd(
    fun: Callable[Parameters, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = ...,
) -> Callable[Parameters, Any]: ...


@api_boundary
def jacfwd(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[..., Any]:
    """The Jacobian of `fun` by forward mode: one push-forward per entry of the argument. Structured as by `jacrev`.

    holomorphic: for a holomorphic function, of complex arguments and with complex results. Without it arguments are
    real; results may be complex.

        >>> spmd.jacfwd(lambda t: np.stack([t, t**2, t**3]))(2.0)
        array([ 1.,  4., 12.])
    """

    @boundary_like(fun)
    def wrapped(*args, **kwargs):
        where = f"jacfwd of {name_of(fun)}"
        part, chosen = _chosen(fun, argnums, args, kwargs, where)
        _check_arguments(where, chosen, holomorphic, real=True)
        out, push, *aux = linearize(part, *chosen, has_aux=has_aux)
        _one_by_one(where, chosen, out, push.tape)  # type: ignore[attr-defined]
        outs, out_tree = tree.flatten(out)
        if holomorphic:
            for o in outs:
                check_result(o, where, holomorphic)
        xs, chosen_tree = tree.flatten(tuple(chosen))
        blocks = []  # per leaf of the argument, per leaf of the result
        for k, x in enumerate(xs):
            columns = _images(lambda tangents: push(*tangents), xs, chosen_tree, k)
            shape = np.shape(value_of(x))
            blocks.append([_stacked([c[i] for c in columns], o, shape, -1) for i, o in enumerate(outs)])
        trees = [_pick(tree.unflatten(chosen_tree, [b[i] for b in blocks]), argnums) for i in range(len(outs))]
        jacobian = tree.unflatten(out_tree, trees)
        return (jacobian, *aux) if has_aux else jacobian

    return wrapped


@overload
def hessian(
    fun: Callable[Concatenate[Differentiated, Parameters], AnyArray],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = ...,
) -> Callable[Concatenate[Differentiated, Parameters], Differentiated]: ...


@overload
def hessian(
    fun: Callable[Parameters, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = ...,
) -> Callable[Parameters, Any]: ...


@api_boundary
def hessian(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[..., Any]:
    """The second derivatives of `fun`, as the Jacobian of the Jacobian: (*result, *argument, *argument) per leaf.

    >>> spmd.hessian(lambda x: x[0] ** 2 * x[1])(np.array([1.0, 3.0]))
    array([[6., 2.],
           [2., 0.]])
    """
    return jacrev(jacrev(fun, argnums, has_aux, holomorphic), argnums, has_aux, holomorphic)


@overload
def hvp(
    fun: Callable[[Unpack[Primals]], Any], primals: tuple[*Primals], tangents: Sequence[Any]
) -> tuple[*Primals]: ...


@overload
def hvp(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...]: ...


@api_boundary
def hvp(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...]:
    """The Hessian of a real scalar function at `primals` applied to `tangents`, without forming it: a tuple.

    The Hessian is symmetric, so that this is one gradient and one pullback of it.

        >>> spmd.hvp(lambda x: np.sum(x**3), (np.array([1.0, 2.0]),), (np.array([1.0, 0.0]),))
        (array([6., 0.]),)
    """
    check_sequences("hvp", fun, primals, tangents)
    _, pull = vjp(grad(fun, range(len(primals))), *primals)
    xs, treedef = tree.flatten(tuple(primals))
    return pull(tree.unflatten(treedef, match_tangents(f"hvp of {name_of(fun)}", xs, treedef, tangents)))


def _chosen(fun: Callable, argnums, args: tuple, kwargs: dict, where: str):
    """`fun` as a function of the arguments that argnums name, and those."""
    numbers = positions(argnums, len(args), where)

    @functools.wraps(fun)
    def part(*chosen):
        full = list(args)
        for n, a in zip(numbers, chosen, strict=True):
            full[n] = a
        return fun(*full, **kwargs)

    return part, [args[n] for n in numbers]


def _pick(trees: tuple, argnums):
    """Of the trees of the chosen arguments the only one, where argnums is no sequence."""
    return trees[0] if is_one(argnums) else trees


def _check_arguments(where: str, chosen: list, holomorphic: bool, *, allow_int: bool = False, real: bool = False):
    """Raise where arguments are not of the kind that a Jacobian is taken of."""
    for x in tree.leaves(chosen):
        kind = kind_of(x)
        if holomorphic and kind != "c":
            need, mend = "complex arguments, as holomorphic=True says", "x.astype(complex), or leave holomorphic out"
        elif kind == "c" and real and not holomorphic:
            need = "real arguments"
            mend = "holomorphic=True for a holomorphic function, spmd.jvp for any other, spmd.jacrev for a real result"
        elif kind == "i" and not allow_int:
            need, mend = "floating arguments", "x.astype(float), or leave it out of argnums"
        else:
            continue
        raise DifferentiationError.at(where, argument="argnums", got=describe(x), need=need, mend=mend)


def _images(linear: Callable, leaves: list, treedef, k: int) -> list[list]:
    """The leaves of what a linear function gives for each unit array in the place of leaf k, zeros in the others."""
    found = []
    for unit in _basis(leaves[k]):
        units = [unit if j == k else zeros_like(p) for j, p in enumerate(leaves)]
        found.append(tree.leaves(linear(tree.unflatten(treedef, units))))
    return found


def _basis(x) -> Iterator[Any]:
    """The unit arrays of x's shape, first index slowest."""
    data = value_of(x)
    for index in np.ndindex(np.shape(data)):
        device = hasattr(data, "__cuda_array_interface__")
        unit = np.zeros_like(data) if device else np.zeros(np.shape(data), getattr(data, "dtype", type(data)))
        unit[index] = 1
        yield unit


def _stacked(parts: list, like, shape: tuple[int, ...], axis: int):
    """One block of a Jacobian: the cotangents or tangents of `like` for each index of `shape`, along a new axis."""
    own = np.shape(value_of(like))
    whole = shape + own if axis == 0 else own + shape
    if not parts or getattr(parts[0], "dtype", None) == float0:
        data = value_of(like)
        return np.zeros_like(data, shape=whole) if hasattr(data, "dtype") else np.zeros(whole, type(data))
    return np.reshape(np.stack(parts, axis=axis), whole)


def _one_by_one(where: str, args: Any, outs: Any, tape: Tape) -> None:
    """Raise where entries of a Jacobian would mix workers: unit vectors are seeded on all of them at once."""
    states = {varying_over(x) for x in (*tree.leaves(args), *tree.leaves(outs))}
    moves = any(node.prim is not None and node.prim.defer is not None for node in tape.nodes)
    if len(states) > 1 or (moves and states != {frozenset()}):
        raise DifferentiationError.at(
            where,
            got="a function that communicates, of arrays of which some vary over workers",
            need="Invariant arguments and results, or a function of each worker's own block",
            mend="take the Jacobian outside of the map, where arrays are global; "
            "or use spmd.vjp, whose cotangents and sums are well defined",
        )
