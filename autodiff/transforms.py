"""Transformations of functions: grad, vjp, jvp and their kin, with the signatures of JAX.

Each opens a tape, lifts the arguments onto it, runs the function and sweeps back. They nest to any order, because a
tape records the rules that run while an outer one is open. Forward mode is the transpose of the transpose: a pullback
is linear in its cotangent, so its own pullback is the push-forward.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from spmd.autodiff import devices, tracer, tree
from spmd.autodiff.admission import ADMITTED, admit
from spmd.autodiff.apply import FLOAT, part, record, weak
from spmd.autodiff.backward import alone, sweep
from spmd.autodiff.dtypes import float0, kind_of_dtype
from spmd.autodiff.primitive import Primitive
from spmd.autodiff.staging.recorder import Number, slot_of
from spmd.autodiff.tape import Bundle, Node, Tape, recording
from spmd.autodiff.tracer import Array, find, value_of
from spmd.errors import DifferentiationError, describe, message
from spmd.tracebacks import api_boundary, boundary_like

__all__ = [
    "float0",
    "grad",
    "jvp",
    "linear_transpose",
    "linearize",
    "stop_gradient",
    "value_and_grad",
    "vjp",
]

_NUMBERS = {float: "f", complex: "c", int: "i", bool: "i"}
"""What Python's numbers are to differentiation, as `kind_of` says it."""
_REAL = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
"""What most often is differentiated."""


# Leaves: arguments on a tape, and back


def kind_of(x: Any) -> str:
    """What a leaf is to differentiation: "f" real, "c" complex, "i" integer or boolean, "" anything else."""
    if type(x) is Number:
        x = x.value
    if type(x) in _NUMBERS:
        return _NUMBERS[type(x)]
    dtype = getattr(x, "dtype", None)
    return "f" if dtype is FLOAT else kind_of_dtype(dtype)


def is_handle(x) -> bool:
    """Whether x stands for a block that may be traced, and is no array itself: a value that one worker holds."""
    return type(x) is not Array and type(x) is not np.ndarray and hasattr(type(x), "holding")


def held(x):
    """What may be on a tape: x, or the block that a handle stands for."""
    return x.block if is_handle(x) else x


def refuse_handles(leaves: list, where: str, argument: str) -> None:
    """Raise where a value that one worker holds would be cut off from its gradient."""
    for x in leaves:
        if is_handle(x):
            raise DifferentiationError(
                message(
                    where,
                    argument=argument,
                    got=describe(x),
                    need="arrays: a function with a pullback of its own knows no values that one worker holds",
                    mend="spmd.replicate(x, axis_name, root) before, and spmd.keep inside",
                )
            )


def lift(tape: Tape, x: Any, where: str, path: Callable[[], str]) -> Any:
    """An argument as a leaf of the tape; `path` says how it is written."""
    if type(slot_of(x)) in (float, complex):
        return Array(x, tracer.mixing.ambient(), tape, tape.leaf((), weak(x)))
    if is_handle(x):
        return x.holding(lift(tape, x.block, where, path))
    x = _admitted(x, where, path)
    if kind_of(x) not in ("f", "c"):
        raise _not_floating(x, where, path, "or leave it out of argnums")
    leaf = tape.leaf(getattr(value_of(x), "shape", ()), x.dtype)
    if type(x) is Array:
        return Array(x if x.tape is not None else x.value, x.state, tape, leaf)
    state = tracer.mixing.ambient()
    if state is not None and isinstance(x, np.ndarray) and x.flags.writeable:
        x = x.copy()  # blocks of a body are shared as they are, so no one may write into one
    return Array(x, state, tape, leaf)


def _admitted(x: Any, where: str, path: Callable[[], str] | str) -> Any:
    """An argument, cotangent or tangent as a plain array. What is no array has errors of its own elsewhere."""
    kind = type(x)
    if kind is np.ndarray or kind in ADMITTED or not hasattr(kind, "__array__") and not hasattr(kind, "toarray"):
        return x
    if isinstance(x, np.number | np.bool) or devices.is_array(x) or is_handle(x):
        return x
    return np.asarray(admit(x, where, path, error=DifferentiationError))


def _not_floating(x, where: str, path: Callable[[], str], otherwise: str) -> Exception:
    if kind_of(x) == "i":
        mend = "convert it, x.astype(float) or float(x)"
    elif hasattr(x, "dtype") or isinstance(x, str | bytes):
        mend = "pass numbers"
    else:
        mend = "make its class a pytree, spmd.tree.register(cls)"
    need = "an array of floating or complex dtype"
    return DifferentiationError(
        message(where, argument=path(), got=describe(x), need=need, mend=f"{mend}, {otherwise}")
    )


def _lift_all(
    tape: Tape,
    argument,
    where: str,
    name: Callable[[], str],
    *,
    number: int = 0,
    ints: str = "",
    holomorphic: bool = False,
):
    """The leaves of an argument as leaves of the tape, and its structure.

    number: of the argument, among those that are differentiated.
    ints: where it is not empty, integers raise, and it says what else there is to do; else they are constants.
    """

    def path(k: int) -> str:
        return name() + "".join(f"[{p!r}]" for p in tree.paths(argument)[k])

    leaves, treedef = tree.flatten(argument)
    lifted: list[Any] = []
    for k, x in enumerate(leaves):
        if type(x) is Array and x.tape is None and not holomorphic:  # as `lift`, of what most often comes
            value = x.value
            if type(value) is np.ndarray and value.dtype in _REAL:
                lifted.append(Array(value, x.state, tape, tape.leaf(value.shape, value.dtype)))
                continue
        at, kind = functools.partial(path, k), kind_of(x)
        if kind == "i" and ints:
            raise _not_floating(x, where, at, ints)
        if holomorphic and kind == "f":
            raise DifferentiationError(
                message(
                    where,
                    argument=at(),
                    got=describe(x),
                    need="complex arguments, as holomorphic=True says",
                    mend="x.astype(complex), or leave holomorphic out",
                )
            )
        lifted.append(_admitted(x, where, at) if kind == "i" else lift(tape, x, where, at))
    for x, leaf in zip(map(held, lifted), tree.leaf_positions(treedef), strict=False):
        if on(x, tape):
            x.node.place = number, leaf
    return lifted, treedef


def lower(x, tape: Tape):
    """What lies under the tape: the value, with its state."""
    if type(x) is Array and x.tape is tape:
        return x.value if type(x.value) is Array else stated(x.value, x.state)
    return x.holding(lower(x.block, tape)) if is_handle(x) else x


def stated(value, state):
    """A value with its state, as a caller sees it."""
    return value if state is None or type(value) is Array else Array(value, state)


def unstated(g):
    """A cotangent as rules see it: bare, or an array of an outer tape."""
    return g.value if type(g) is Array and g.tape is None else g


def zeros_like(x):
    """Bare zeros for the tangents or cotangents of a leaf: of dtype float0 where it is an integer."""
    if is_handle(x):
        return x.holding(stated(zeros_like(x.block), getattr(x.block, "state", None)))
    return np.zeros_like(value_of(x)) if kind_of(x) != "i" else np.zeros(np.shape(value_of(x)), float0)


def one_like(x):
    """The cotangent of a scalar that is differentiated."""
    return _ONE if type(x) is np.float64 else np.ones_like(x)


_ONE = np.ones(())
_ONE.flags.writeable = False


def on(x, tape: Tape) -> bool:
    """Whether x is traced by this tape itself."""
    return type(x) is Array and x.tape is tape


def innermost(leaves) -> Tape | None:
    """The innermost tape of the arrays among some leaves."""
    tapes = [x.tape for x in find(leaves, []) if x.tape is not None]
    return max(tapes, key=lambda t: t.level) if tapes else None


def _pulled(tape: Tape, seeds, leaves: list, *, free: bool) -> list[Any]:
    """The cotangents of leaves as the caller sees them: zeros where none came, each with the state of its argument,
    and bare ones as arrays of their own: writing into one changes no other, nor what was given or is kept."""
    blocks = [held(x) for x in leaves]
    found = sweep(tape, seeds, [x.node for x in blocks if on(x, tape)], free=free)
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
            elif not alone(getrefcount(g), g):
                g = g.copy()
        g = stated(g, state)
        pulled.append(g if leaf is given else given.holding(g))
    return pulled


def is_one(argnums: int | Sequence[int]) -> bool:
    """Whether argnums is one integer, and no sequence."""
    return np.ndim(argnums) == 0 and hasattr(argnums, "__index__")  # type: ignore[arg-type]


def indices(argnums: Any) -> list[int]:
    """The integers that argnums hold."""
    return [operator.index(n) for n in ([argnums] if is_one(argnums) else argnums)]


def places(argnums: Any, count: int) -> set[int]:
    """The positions that argnums name among so many arguments, those that are there."""
    return {n % count for n in indices(argnums) if -count <= n < count}


def positions(argnums: int | Sequence[int], count: int, where: str) -> tuple[int, ...]:
    """The positions that argnums name among so many arguments, counted from 0."""
    if type(argnums) is int and 0 <= argnums < count:
        return (argnums,)
    try:
        numbers = indices(argnums)
    except TypeError:
        numbers = None
    if numbers is None or len(places(numbers, count)) < len(numbers):
        raise DifferentiationError(
            message(
                where,
                argument="argnums",
                got=f"{argnums!r} with {count} positional arguments",
                need=f"an integer, or several different ones, from {-count} to {count - 1}"
                if count
                else "arguments that are passed by position",
                mend="pass the arguments to differentiate by position, and name each once",
            )
        )
    return tuple(n % count for n in numbers)


def _parameter(fun, n: int) -> str:
    """An argument by its name in the signature, or by its position where it has none."""
    try:
        names = [p.name for p in inspect.signature(fun).parameters.values() if p.kind in (0, 1)]
    except (TypeError, ValueError):
        names = []
    return names[n] if n < len(names) else f"number {n}"


def name_of(fun) -> str:
    """A function's name for errors."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", None) or type(fun).__name__


def _result(out: Any, has_aux: bool, tape: Tape, where: str) -> tuple[Any, Any]:
    """The result of a function, and what it returned beside it, lowered."""
    if not has_aux:
        return out, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise DifferentiationError(
            message(
                where,
                argument="result",
                got=describe(out),
                need="a pair (result, aux), as has_aux=True says",
                mend="return both, or leave has_aux out",
            )
        )
    return out[0], tree.map(lambda x: lower(x, tape), out[1])


# Reverse mode


@api_boundary
def value_and_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns `fun`'s value and the gradient of that scalar with respect to its arguments.

    fun: returns a real scalar (with has_aux: a pair of it and anything else).
    argnums: which positional arguments to differentiate; each may be a pytree of floating or complex arrays.
    holomorphic: for a holomorphic function, of complex arguments and with a complex result.
    allow_int: integers among the arguments are no error; their gradient is zeros of dtype float0.

    The gradient has the structure, shapes, dtypes and states of the arguments. For complex arguments it is that of
    JAX: df/dRe - i df/dIm. Memory is freed as the sweep goes.
    Raises DifferentiationError where the result is no scalar or an argument is not floating.
    """
    return boundary_like(fun)(_value_and_gradient(fun, argnums, has_aux, holomorphic, allow_int))


def _value_and_gradient(
    fun: Callable, argnums: int | Sequence[int], has_aux: bool, holomorphic: bool, allow_int: bool
) -> Callable[..., tuple[Any, Any]]:
    if not callable(fun):
        raise DifferentiationError(
            message(
                "grad",
                argument="fun",
                got=describe(fun),
                need="a function",
                mend="spmd.grad(f)(x), not spmd.grad(f(x))",
            )
        )
    single = is_one(argnums)
    where = f"grad of {name_of(fun)}"
    ints = "" if allow_int else "allow_int=True for a gradient of zeros, or leave it out of argnums"

    # A class of functions that go forward and back in one go brings its own way, which gives None where it is none.
    together = None if has_aux or holomorphic else getattr(type(fun), "__value_and_grad__", None)

    def check(out: Any) -> None:
        _check_scalar(out, where, holomorphic)

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
                name = functools.partial(_parameter, fun, n)
                xs, treedef = _lift_all(tape, args[n], where, name, number=k, ints=ints, holomorphic=holomorphic)
                lifted.append((xs, treedef))
                full[n] = tree.unflatten(treedef, xs)
            tracer.mixing.differentiates([x for xs, _ in lifted for x in xs])
            out, aux = _result(fun(*full, **kwargs), has_aux, tape, where)
            check(out)
        scalar = held(out)  # of a handle what this worker holds: the scalar, or nothing
        seeds = [(scalar.node, one_like(value_of(scalar)))] if on(scalar, tape) else []
        if seeds:
            tracer.mixing.differentiated(scalar)
        found = iter(_pulled(tape, seeds, [x for xs, _ in lifted for x in xs], free=True))
        grads = [tree.unflatten(treedef, [next(found) for _ in xs]) for xs, treedef in lifted]
        value = lower(out, tape)
        return (value, aux) if has_aux else value, grads[0] if single else tuple(grads)

    return both


def _check_scalar(out: Any, where: str, holomorphic: bool) -> None:
    """Raise where a result is not what has a gradient: one real number, or a complex one of a holomorphic function."""
    if getattr(out, "shape", None) != () and type(out) not in _NUMBERS:
        raise DifferentiationError(
            message(
                where,
                argument="result",
                got=describe(out),
                need="a scalar (shape ())",
                mend="reduce it (x.sum()), or use spmd.jacrev or spmd.vjp",
            )
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
    raise DifferentiationError(message(where, argument="result", got=describe(out), need=need, mend=mend))


@api_boundary
def grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable:
    """A function that returns the gradient of `fun`; see `value_and_grad`. With has_aux: (gradient, aux)."""
    both = _value_and_gradient(fun, argnums, has_aux, holomorphic, allow_int)

    @boundary_like(fun)
    def wrapped(*args, **kwargs):
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped


@api_boundary
def vjp(fun: Callable, *primals, has_aux: bool = False) -> tuple[Any, ...]:
    """`fun(*primals)` and its pullback: the transpose of the derivative there.

    The pullback takes a cotangent of the result's structure, shapes and dtypes (Python numbers adapt), and returns a
    tuple of cotangents, one per primal, of the primals' shapes, dtypes and states; of integers they are zeros of dtype
    float0. It may be called many times. A cotangent of less state than the result is varied, one of more is summed.
    With has_aux, `fun` returns (result, aux) and vjp (result, pullback, aux).

    A bare array among the primals, or one that `fun` closes over, is kept as it is, not copied: who writes into it
    later changes the pullback (`spmd.debug(mutation=True)` finds that). The result is the caller's own.
    """
    tracer.mixing.differentiates(tree.leaves(primals))
    value, pullback, *aux = pullback_of(fun, primals, has_aux=has_aux)
    return value, api_boundary(pullback), *aux


def pullback_of(fun: Callable, primals: Sequence[Any], *, has_aux: bool = False, once: bool = False) -> tuple[Any, ...]:
    """As `vjp`; with `once` the pullback serves one time, and memory is freed as it goes."""
    where = f"vjp of {name_of(fun)}"
    with recording(once) as tape:
        lifted, treedef = _lift_all(tape, tuple(primals), where, lambda: "primals")
        out, aux = _result(fun(*tree.unflatten(treedef, lifted)), has_aux, tape, where)
    outs, out_tree = tree.flatten(out)

    def pullback(cotangent):
        gs = _match(cotangent, outs, out_tree, where)
        seeds = [(held(o).node, g) for o, g in zip(outs, gs, strict=True) if on(held(o), tape)]
        return tree.unflatten(treedef, _pulled(tape, seeds, lifted, free=once))

    pullback.tape = tape  # type: ignore[attr-defined]
    values = [lower(o, tape) for o in outs]
    if not once:  # the caller may write into a result, and the tape may keep it
        values = [y.copy() if type(y) is np.ndarray else y for y in values]
    value = tree.unflatten(out_tree, values)
    return (value, pullback, aux) if has_aux else (value, pullback)


def _match(cotangent, outs, out_tree, where: str) -> list:
    """The leaves of a cotangent, checked against the results and brought to their states."""
    gs, given = tree.flatten(cotangent)
    if given != out_tree:
        raise DifferentiationError(
            message(
                f"pullback, {where}",
                argument="cotangent",
                got=f"structure {given}",
                need=f"the structure of the result, {out_tree}",
                mend="pass one cotangent per result",
            )
        )
    matched = []
    for g, o in zip(gs, outs, strict=True):
        if _fits(g, o):
            matched.append(g.value)
            continue
        g = _admitted(g, f"pullback, {where}", "cotangent")
        shape = _shape(o)
        if _shape(g) != shape:
            raise DifferentiationError(
                message(
                    f"pullback, {where}",
                    argument="cotangent",
                    got=describe(g),
                    need=f"shape {list(shape)}, that of the result",
                    mend="pass np.broadcast_to(g, shape) if one number is meant for all",
                )
            )
        g, o = _handed(g, o, f"pullback, {where}", "cotangent", "result")
        if kind_of(o) != "i":
            g = _fitting(g, o, f"pullback, {where}", "cotangent", "result")
        g = unstated(tracer.mixing.bring(g, None, o.state) if type(o) is Array else g)
        matched.append(tracer.mixing.kept(g) if type(g) is np.ndarray else g)
    return matched


def _fits(g, x) -> bool:
    """Whether a cotangent of x is an array of its shape, dtype and state, which nobody differentiates."""
    return (
        type(g) is type(x) is Array
        and g.tape is None
        and g.state is x.state
        and g.shape == x.shape
        and g.dtype == x.dtype
    )


def _handed(g, x, where: str, argument: str, of: str) -> tuple[Any, Any]:
    """A cotangent or tangent g of x, and x: where x is a handle, the blocks of both."""
    if is_handle(x) and type(g) in _NUMBERS:
        return np.full_like(value_of(x.block), g), x.block
    if is_handle(x) != is_handle(g) or (is_handle(x) and not x.is_held_as(g)):
        raise DifferentiationError(
            message(where, argument=argument, got=describe(g), need=f"{describe(x)}, as the {of}", mend=_ONE_KIND)
        )
    return held(g), held(x)


_ONE_KIND = "spmd.keep(g, axis_name, root) makes a Rooted value of an array, spmd.replicate the other way round"


def _shape(x) -> tuple[int, ...]:
    return x.shape if is_handle(x) else np.shape(value_of(x))


def _byte_order_alone(dtype: Any, own: Any) -> bool:
    """Whether two dtypes of numbers differ in their byte order only."""
    if dtype is None or own is None or dtype == own or not kind_of_dtype(dtype):
        return False
    return dtype.newbyteorder("=") == own.newbyteorder("=")


def _fitting(g: Any, x, where: str, argument: str, of: str):
    """A cotangent or tangent g of x, checked for its dtype; a Python number takes that of x."""
    own = getattr(x, "dtype", None)
    if type(g) in _NUMBERS and not (type(g) is complex and kind_of(x) == "f"):
        return np.full_like(value_of(x), g) if own is not None else np.asarray(g, type(x))
    dtype = getattr(g, "dtype", None)
    if _byte_order_alone(dtype, own):
        array: Any = g
        return array.astype(own)
    if dtype != own and not (own is None and kind_of(g) in ("f", kind_of(x))):
        raise DifferentiationError(
            message(
                where,
                argument=argument,
                got=describe(g),
                need=f"dtype {own or type(x).__name__}, that of the {of}",
                mend="np.real(g)" if kind_of(g) == "c" else f"g.astype({str(own or type(x).__name__)!r}), a cast",
            )
        )
    return g


# Forward mode


@api_boundary
def jvp(fun: Callable, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> tuple[Any, ...]:
    """`fun(*primals)` and its directional derivative along `tangents`, as a pair; with has_aux the aux as the third.

    primals, tangents: tuples or lists of the same structure, shapes and dtypes (Python numbers adapt); the tangent of
    an integer is zeros of dtype float0.
    """
    check_sequences("jvp", fun, primals, tangents)
    out, push, *aux = linearize(fun, *primals, has_aux=has_aux)
    return out, push(*tangents), *aux


def check_sequences(transform: str, fun: Callable, primals, tangents) -> None:
    """Raise where primals or tangents are no sequence of arguments."""
    for argument, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, tuple | list):
            raise DifferentiationError(
                message(
                    f"{transform} of {name_of(fun)}",
                    argument=argument,
                    got=describe(given),
                    need="a tuple or list of arguments, and one of their tangents",
                    mend=f"spmd.{transform}(f, (x,), (v,))",
                )
            )


@api_boundary
def linearize(fun: Callable, *primals, has_aux: bool = False) -> tuple[Any, ...]:
    """`fun(*primals)` and its push-forward, a linear function of the tangents that may be called many times.

    With has_aux, `fun` returns (result, aux) and linearize (result, push-forward, aux).
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


def varying_over(x) -> frozenset[str]:
    """The axes that an array varies over."""
    state = getattr(x, "state", None)
    return frozenset() if state is None else state.varying


def match_tangents(where: str, xs: list, treedef: Any, tangents: Sequence[Any]) -> list:
    """The leaves of tangents, checked against those of the primals.

    A cotangent that varies over more axes than its primal is summed; for a tangent there is no such meaning.
    """
    ts, given = tree.flatten(tuple(tangents))  # type: ignore[arg-type]
    if given != treedef:
        raise DifferentiationError(
            message(
                where,
                argument="tangents",
                got=f"structure {given}",
                need=f"that of the primals, {treedef}",
                mend="pass one tangent per primal, each of the same structure",
            )
        )
    matched = []
    for x, t in zip(xs, ts, strict=True):
        t = _admitted(t, where, "tangents")
        if _shape(t) != _shape(x) or varying_over(t) - varying_over(x):
            raise DifferentiationError(
                message(
                    where,
                    argument="tangents",
                    got=f"{describe(t)} for a primal that is {describe(x)}",
                    need="a tangent of the primal's shape, which varies over no other axes",
                    mend="spmd.pvary(primal, axis_name) makes the primal one value per worker",
                )
            )
        given = x
        t, x = _handed(t, x, where, "tangents", "primal")
        if kind_of(x) == "i":
            if getattr(t, "dtype", None) != float0:
                raise DifferentiationError(
                    message(
                        where,
                        argument="tangents",
                        got=f"{describe(t)} for a primal that is {describe(x)}",
                        need="dtype float0: an integer has no derivative",
                        mend="np.zeros(x.shape, spmd.float0), or close over x in place of passing it",
                    )
                )
        else:
            t = _fitting(t, x, where, "tangents", "primal")
        matched.append(t if x is given else given.holding(t))
    return matched


@api_boundary
def linear_transpose(fun: Callable, *primals) -> Callable:
    """The transpose of a linear function: a function from the cotangent of its result to a tuple, one per argument.

    primals: pytrees of arrays, or of anything with a shape and a dtype; their values do not matter. Of a function
    that is not linear it is the transpose of the derivative at zero.
    """

    def zeros(x):
        data = value_of(x)
        if kind_of(data) not in ("f", "c"):
            where = f"linear_transpose of {name_of(fun)}"
            raise _not_floating(x, where, lambda: "primals", "and its cotangents too")
        array = type(data) in _NUMBERS or hasattr(data, "__array_function__")
        return stated(np.zeros_like(data) if array else np.zeros(data.shape, data.dtype), getattr(x, "state", None))

    return vjp(fun, *tree.map(zeros, primals))[1]


def stop_gradient(x):
    """x (a pytree of arrays) without its derivative: the same values and states, constant from here on."""

    def stop(leaf):
        return stated(value_of(leaf), leaf.state) if type(leaf) is Array else leaf

    return tree.map(stop, x)


# What brings its own pullback


def joint(name: str, tape: Tape, parents: Sequence[Any], outs: list, pull: Callable[[list], Sequence[Any]]) -> list:
    """Record results that one pullback serves: `pull(cotangents, None where none came)` gives those of `parents`.

    name: of what is recorded, for errors.

    Each of `parents` is a node of the tape, or an argument that may be traced by it. Each of `outs` is a value of the
    level below the tape; each comes back as an Array on the tape.
    """
    count = len(outs)

    def pull_bundle(bundle: Bundle):
        return pull([bundle.parts.get(k) for k in range(count)])

    nodes = [p if type(p) is Node else p.node if on(p, tape) else None for p in parents]
    node = record(tape, Primitive(None, name, joint=_pulled_together), nodes, (pull_bundle,), (), None)
    results = []
    for k, out in enumerate(outs):
        if kind_of(out) not in ("f", "c"):
            results.append(out)
            continue
        state = out.state if type(out) is Array else tracer.mixing.ambient()
        value = unstated(_admitted(out, name, f"result number {k}"))
        traced = part(node, k, value if hasattr(value, "dtype") else np.asarray(value), state, tape)
        if traced.value is not value:  # a Python number stays one, and weak
            traced.value, traced.node.dtype = value, weak(value)  # type: ignore[arg-type]
        results.append(traced)
    return results


def _pulled_together(bundle: Bundle, pull: Callable[[Bundle], Sequence[Any]]) -> Sequence[Any]:
    return pull(bundle)
