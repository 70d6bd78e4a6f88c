"""Transformations of functions: grad, vjp, jvp and their kin, with the signatures of JAX.

Each opens a tape, lifts the arguments onto it, runs the function and sweeps back. They nest to any order, because a
tape records the rules that run while an outer one is open. Forward mode is the transpose of the transpose: a pullback
is linear in its cotangent, so its own pullback is the push-forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, Concatenate, Literal, Unpack, overload

import numpy as np

from spmd.autodiff import tracer, tree
from spmd.autodiff.apply import part, record, weak
from spmd.autodiff.backward import is_sole_owner, sweep
from spmd.autodiff.cotangent_matching import match_cotangents
from spmd.autodiff.dtypes import float0
from spmd.autodiff.primitive import Primitive
from spmd.autodiff.signatures import Aux, First, Options, Parameters, Primals, Result, Second, Third
from spmd.autodiff.staging.recorder import is_slot
from spmd.autodiff.tape import Bundle, Node, Tape, recording
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import (
    NUMBERS,
    ONE,
    admitted,
    held,
    is_one,
    kind_of,
    lift_all,
    lower,
    name_of,
    on,
    one_like,
    parameter,
    positions,
    stated,
    unstated,
    zeros_like,
)
from spmd.errors import DifferentiationError, describe
from spmd.tracebacks import api_boundary, boundary_like

__all__ = ["float0", "grad", "stop_gradient", "value_and_grad", "vjp"]
ONE.flags.writeable = False


def pulled(tape: Tape, seeds, leaves: list, *, free: bool) -> list[Any]:
    """The cotangents of leaves as the caller sees them: zeros where none came, each with the state of its argument,
    and bare ones as arrays of their own: writing into one changes no other, nor what was given or is kept."""
    nodes = [held(x).node for x in leaves if on(held(x), tape)]
    return settled(tape, leaves, sweep(tape, seeds, nodes, free=free))


def settled(tape: Tape, leaves: list, arrived: list[Any]) -> list[Any]:
    """`pulled`, where the sweep has given these cotangents of the leaves on the tape; None where none came."""
    blocks = [held(x) for x in leaves]
    found = tracer.mixing.summed(arrived, [x.value for x in blocks if on(x, tape)])
    found.reverse()
    pulled = []
    for given, leaf in zip(leaves, blocks, strict=True):
        g = found.pop() if on(leaf, tape) else None
        state = getattr(leaf, "state", None)
        if g is None:
            g = zeros_like(leaf)
        elif type(g) is not np.ndarray or type(leaf.value) is not np.ndarray:
            g = tracer.mixing.settle(g, leaf.value)
        if state is None and isinstance(g, np.ndarray):
            if g.ndim == 0 and g.dtype != float0 and isinstance(leaf.value, float | complex | np.generic):
                g = g[()]
            elif not is_sole_owner(getrefcount(g), g):
                g = g.copy()
        elif state is None and is_slot(g) and g.ndim == 0 and isinstance(leaf.value, float | complex | np.generic):
            g = g[()]
        g = stated(g, state)
        pulled.append(g if leaf is given else given.holding(g))
    return pulled


def traced_result(out: Any, has_aux: bool, tape: Tape, where: str) -> tuple[Any, Any]:
    """The result of a function, and what it returned beside it, lowered."""
    if not has_aux:
        return out, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise DifferentiationError.at(
            where,
            argument="result",
            got=describe(out),
            need="a pair (result, aux), as has_aux=True says",
            mend="return both, or leave has_aux out",
        )
    return out[0], tree.map(lambda x: lower(x, tape), out[1])


# Reverse mode


@overload
def value_and_grad(
    fun: Callable[Concatenate[First, Parameters], Result],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Callable[Concatenate[First, Parameters], tuple[Result, First]]: ...


@overload
def value_and_grad(
    fun: Callable[Concatenate[First, Second, Parameters], Result],
    argnums: tuple[Literal[0], Literal[1]],
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Callable[Concatenate[First, Second, Parameters], tuple[Result, tuple[First, Second]]]: ...


@overload
def value_and_grad(
    fun: Callable[Concatenate[First, Second, Third, Parameters], Result],
    argnums: tuple[Literal[0], Literal[1], Literal[2]],
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Callable[Concatenate[First, Second, Third, Parameters], tuple[Result, tuple[First, Second, Third]]]: ...


@overload
def value_and_grad(
    fun: Callable[Concatenate[First, Parameters], tuple[Result, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Callable[Concatenate[First, Parameters], tuple[tuple[Result, Aux], First]]: ...


@overload
def value_and_grad(
    fun: Callable[Parameters, tuple[Result, Aux]],
    argnums: int | Sequence[int],
    *,
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Callable[Parameters, tuple[tuple[Result, Aux], Any]]: ...


@overload
def value_and_grad(
    fun: Callable[Parameters, Result],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Unpack[Options],
) -> Callable[Parameters, tuple[Result, Any]]: ...


@api_boundary
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """A function that returns `fun`'s value and the gradient of that scalar with respect to its arguments.

    fun: returns a real scalar (with has_aux: a pair of it and anything else).
    argnums: which positional arguments to differentiate; each may be a pytree of floating or complex arrays.
    holomorphic: for a holomorphic function, of complex arguments and with a complex result.
    allow_int: integers among the arguments are no error; their gradient is zeros of dtype float0.

    The gradient has the structure, shapes, dtypes and states of the arguments. For complex arguments it is that of
    JAX: df/dRe - i df/dIm. Memory is freed as the sweep goes.
    Raises DifferentiationError where the result is no scalar or an argument is not floating.

        >>> def loss(params, x):
        ...     return spmd.pmean(np.mean((params["a"] * x - 1.0) ** 2), "data")
        >>> with spmd.Mesh(data=2):
        ...     value, grads = spmd.value_and_grad(spmd.map(loss, (P(), P("data")), P()))({"a": 2.0}, np.ones(4))
        >>> value.item(), grads
        (1.0, {'a': np.float64(2.0)})
    """
    return boundary_like(fun)(_value_and_gradient(fun, argnums, has_aux, holomorphic, allow_int))


def _value_and_gradient(
    fun: Callable, argnums: int | Sequence[int], has_aux: bool, holomorphic: bool, allow_int: bool
) -> Callable[..., Any]:
    if not callable(fun):
        raise DifferentiationError.at(
            "grad",
            argument="fun",
            got=describe(fun),
            need="a function",
            mend="spmd.grad(f)(x), not spmd.grad(f(x))",
        )
    single = is_one(argnums)
    where = f"grad of {name_of(fun)}"
    ints = "" if allow_int else "allow_int=True for a gradient of zeros, or leave it out of argnums"

    # A class of functions that go forward and back in one go brings its own way, which gives None where it is none.
    together = None if has_aux or holomorphic else getattr(type(fun), "__value_and_grad__", None)

    def check(out: Any) -> None:
        check_scalar(out, where, holomorphic)

    def both(*args, **kwargs):
        numbers = positions(argnums, len(args), where)
        if together is not None:
            found = together(fun, check, numbers, args, kwargs)
            if found is not None:
                value, grads = found
                return value, grads[0] if single else tuple(grads)
        full = list(args)
        with recording(once=True) as tape:
            lifted = []
            for k, n in enumerate(numbers):
                name = functools.partial(parameter, fun, n)
                xs, treedef = lift_all(tape, args[n], where, name, number=k, ints=ints, holomorphic=holomorphic)
                lifted.append((xs, treedef))
                full[n] = tree.unflatten(treedef, xs)
            tracer.mixing.differentiates([x for xs, _ in lifted for x in xs])
            out, aux = traced_result(fun(*full, **kwargs), has_aux, tape, where)
            check(out)
        scalar = held(out)  # of a handle what this worker holds: the scalar, or nothing
        seeds = [(scalar.node, one_like(value_of(scalar)))] if on(scalar, tape) else []
        if seeds:
            tracer.mixing.differentiated(scalar)
        gradients = pulled(tape, seeds, [x for xs, _ in lifted for x in xs], free=True)
        if seeds:
            tracer.mixing.gives(scalar, gradients)
        found = iter(gradients)
        grads = [tree.unflatten(treedef, [next(found) for _ in xs]) for xs, treedef in lifted]
        value = lower(out, tape)
        return (value, aux) if has_aux else value, grads[0] if single else tuple(grads)

    return both


def check_scalar(out: Any, where: str, holomorphic: bool) -> None:
    """Raise where a result is not what has a gradient: one real number, or a complex one of a holomorphic function."""
    if getattr(out, "shape", None) != () and type(out) not in NUMBERS:
        raise DifferentiationError.at(
            where,
            argument="result",
            got=describe(out),
            need="a scalar (shape ())",
            mend="reduce it (x.sum()), or use spmd.jacrev or spmd.vjp",
        )
    check_result(out, where, holomorphic)


def check_result(out: Any, where: str, holomorphic: bool) -> None:
    """Raise where a result is an integer; or complex, of a function that is not declared holomorphic; or reverse."""
    kind = kind_of(out)
    if kind == ("c" if holomorphic else "f"):
        return
    if holomorphic:
        need, mend = "a complex result, as holomorphic=True says", "leave holomorphic out"
    elif kind == "c":
        need, mend = "a real result", "take np.real or abs of it, or holomorphic=True for a holomorphic function"
    else:
        need, mend = "a floating result: integers have no derivative", "x.astype(float), if it is meant"
    raise DifferentiationError.at(where, argument="result", got=describe(out), need=need, mend=mend)


@overload
def grad(
    fun: Callable[Concatenate[First, Parameters], Result],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Callable[Concatenate[First, Parameters], First]: ...


@overload
def grad(
    fun: Callable[Concatenate[First, Second, Parameters], Result],
    argnums: tuple[Literal[0], Literal[1]],
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Callable[Concatenate[First, Second, Parameters], tuple[First, Second]]: ...


@overload
def grad(
    fun: Callable[Concatenate[First, Second, Third, Parameters], Result],
    argnums: tuple[Literal[0], Literal[1], Literal[2]],
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Callable[Concatenate[First, Second, Third, Parameters], tuple[First, Second, Third]]: ...


@overload
def grad(
    fun: Callable[Concatenate[First, Parameters], tuple[Result, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Callable[Concatenate[First, Parameters], tuple[First, Aux]]: ...


@overload
def grad(
    fun: Callable[Parameters, tuple[Result, Aux]],
    argnums: int | Sequence[int],
    *,
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Callable[Parameters, tuple[Any, Aux]]: ...


@overload
def grad(
    fun: Callable[Parameters, Result],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Unpack[Options],
) -> Callable[Parameters, Any]: ...


@api_boundary
def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """A function that returns the gradient of `fun`; see `value_and_grad`. With has_aux: (gradient, aux).

    >>> with spmd.Mesh(data=2):
    ...     loss = spmd.map(lambda w, x: spmd.psum(np.sum(w * x), "data"), (P(), P("data")), P())
    ...     spmd.grad(loss)(2.0, np.arange(4.0))
    ...     spmd.grad(loss, argnums=1)(2.0, np.arange(4.0))
    np.float64(6.0)
    array([2., 2., 2., 2.])
    """
    both = _value_and_gradient(fun, argnums, has_aux, holomorphic, allow_int)

    @boundary_like(fun)
    def wrapped(*args, **kwargs):
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped


@overload
def vjp(
    fun: Callable[[Unpack[Primals]], Result], *primals: *Primals, has_aux: Literal[False] = False
) -> tuple[Result, Callable[[Any], tuple[*Primals]]]: ...


@overload
def vjp(
    fun: Callable[[Unpack[Primals]], tuple[Result, Aux]], *primals: *Primals, has_aux: Literal[True]
) -> tuple[Result, Callable[[Any], tuple[*Primals]], Aux]: ...


@overload
def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]: ...


@api_boundary
def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """`fun(*primals)` and its pullback: the transpose of the derivative there.

    The pullback takes a cotangent of the result's structure, shapes and dtypes (Python numbers adapt), and returns a
    tuple of cotangents, one per primal, of the primals' shapes, dtypes and states; of integers they are zeros of dtype
    float0. It may be called many times. A cotangent of less state than the result is varied, one of more is summed. It
    raises DifferentiationError for one that does not fit. With has_aux, `fun` returns (result, aux) and vjp (result,
    pullback, aux).

    A bare array among the primals, or one that `fun` closes over, is kept as it is, not copied: who writes into it
    later changes the pullback (`spmd.debug(mutation=True)` finds that). The result is the caller's own.

        >>> with spmd.Mesh(x=2):
        ...     y, pull = spmd.vjp(spmd.map(lambda x: spmd.shift(x**2, "x"), P("x"), P("x")), np.array([1.0, 2.0]))
        ...     pull(np.array([1.0, 10.0]))
        (array([20.,  4.]),)
    """
    tracer.mixing.differentiates(tree.leaves(primals))
    value, pullback, *aux = pullback_of(fun, primals, has_aux=has_aux)
    return value, api_boundary(pullback), *aux


def pullback_of(fun: Callable, primals: Sequence[Any], *, has_aux: bool = False, once: bool = False) -> tuple[Any, ...]:
    """As `vjp`; with `once` the pullback serves one time, and memory is freed as it goes."""
    where = f"vjp of {name_of(fun)}"
    with recording(once) as tape:
        lifted, treedef = lift_all(tape, tuple(primals), where, lambda: "primals")
        out, aux = traced_result(fun(*tree.unflatten(treedef, lifted)), has_aux, tape, where)
    outs, out_tree = tree.flatten(out)

    def pullback(cotangent):
        gs = match_cotangents(cotangent, outs, out_tree, where)
        seeds = [(held(o).node, g) for o, g in zip(outs, gs, strict=True) if on(held(o), tape)]
        return tree.unflatten(treedef, pulled(tape, seeds, lifted, free=once))

    pullback.tape = tape  # type: ignore[attr-defined]
    values = [lower(o, tape) for o in outs]
    if not once:  # the caller may write into a result, and the tape may keep it
        values = [y.copy() if type(y) is np.ndarray else y for y in values]
    value = tree.unflatten(out_tree, values)
    return (value, pullback, aux) if has_aux else (value, pullback)


def stop_gradient(x: Result) -> Result:
    """x (a pytree of arrays) without its derivative: the same values and states, constant from here on.

    >>> spmd.grad(lambda x: x * spmd.stop_gradient(x))(3.0)
    np.float64(3.0)
    """

    def stop(leaf):
        return stated(value_of(leaf), leaf.state) if type(leaf) is Array else leaf

    return tree.map(stop, x)


# What brings its own pullback


def joint(
    name: str,
    tape: Tape,
    parents: Sequence[Any],
    outs: list,
    pull: Callable[..., Sequence[Any]],
    *,
    kept: Any = None,
    sums: bool = False,
) -> list:
    """Record results that one pullback serves: `pull(cotangents, None where none came)` gives those of `parents`.

    name: of what is recorded, for errors. sums: pull(cotangents, arrived) gives sums; see `Primitive`. kept: a list of
    arrays that the pullback needs, if the tape is to keep them: pull(kept, cotangents).

    Each of `parents` is a node of the tape, or an argument that may be traced by it. Each of `outs` is a value of the
    level below the tape; each comes back as an Array on the tape.
    """
    count = len(outs)

    def pull_bundle(bundle: Bundle, kept: Any, *arrived: Any):
        gs = [bundle.parts.get(k) for k in range(count)]
        return pull(gs, *arrived) if kept is None else pull(kept, gs, *arrived)

    nodes = [p if isinstance(p, Node) else p.node if on(p, tape) else None for p in parents]
    prim = Primitive(None, name, joint=_summed_together if sums else _pulled_together, sums=sums)
    node = record(tape, prim, nodes, (pull_bundle, kept), (), None)
    results = []
    for k, out in enumerate(outs):
        if kind_of(out) not in ("f", "c"):
            results.append(out)
            continue
        state = out.state if type(out) is Array else tracer.mixing.ambient()
        value = unstated(admitted(out, name, f"result number {k}"))
        traced = part(node, k, value if hasattr(value, "dtype") else np.asarray(value), state, tape)
        if traced.value is not value:  # a Python number stays one, and weak
            traced.value, traced.node.dtype = value, weak(value)  # type: ignore[arg-type]
        results.append(traced)
    return results


def _pulled_together(bundle: Bundle, pull: Callable[..., Sequence[Any]], kept: Any) -> Sequence[Any]:
    return pull(bundle, kept)


def _summed_together(bundle: Bundle, arrived: Any, pull: Callable[..., Sequence[Any]], kept: Any) -> Sequence[Any]:
    return pull(bundle, kept, arrived)
