"""The arguments of transformations: lifted to a tape, and brought down again."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.autodiff import devices, tracer, tree
from spmd.autodiff.admission import ADMITTED, admit
from spmd.autodiff.apply import FLOAT, weak
from spmd.autodiff.dtypes import float0, kind_of_dtype
from spmd.autodiff.staging.recorder import Number, slot_of
from spmd.autodiff.tape import Tape
from spmd.autodiff.tracer import Array, find, value_of
from spmd.errors import DifferentiationError, describe

NUMBERS = {float: "f", complex: "c", int: "i", bool: "i"}
"""What Python's numbers are to differentiation, as `kind_of` says it."""
_REAL = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
"""What most often is differentiated."""


# Leaves: arguments on a tape, and back


def kind_of(x: Any) -> str:
    """What a leaf is to differentiation: "f" real, "c" complex, "i" integer or boolean, "" anything else."""
    if type(x) is Number:
        x = x.value
    if type(x) in NUMBERS:
        return NUMBERS[type(x)]
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
            raise DifferentiationError.at(
                where,
                argument=argument,
                got=describe(x),
                need="arrays: a function with a pullback of its own knows no values that one worker holds",
                mend="spmd.replicate(x, axis_name, root) before, and spmd.keep inside",
            )


def lift(tape: Tape, x: Any, where: str, path: Callable[[], str]) -> Any:
    """An argument as a leaf of the tape; `path` says how it is written."""
    if type(slot_of(x)) in (float, complex):
        return Array(x, tracer.mixing.ambient(), tape, tape.leaf((), weak(x)))
    if is_handle(x):
        return x.holding(lift(tape, x.block, where, path))
    x = admitted(x, where, path)
    if kind_of(x) not in ("f", "c"):
        raise not_floating(x, where, path, "or leave it out of argnums")
    leaf = tape.leaf(getattr(value_of(x), "shape", ()), x.dtype)
    if type(x) is Array:
        return Array(x if x.tape is not None else x.value, x.state, tape, leaf)
    state = tracer.mixing.ambient()
    if state is not None and isinstance(x, np.ndarray) and x.flags.writeable:
        x = x.copy()  # blocks of a body are shared as they are, so no one may write into one
    return Array(x, state, tape, leaf)


def admitted(x: Any, where: str, path: Callable[[], str] | str) -> Any:
    """An argument, cotangent or tangent as a plain array. What is no array has errors of its own elsewhere."""
    kind = type(x)
    if kind is np.ndarray or kind in ADMITTED or not hasattr(kind, "__array__") and not hasattr(kind, "toarray"):
        return x
    if isinstance(x, np.number | np.bool) or devices.is_array(x) or is_handle(x):
        return x
    return np.asarray(admit(x, where, path, error=DifferentiationError))


def not_floating(x, where: str, path: Callable[[], str], otherwise: str) -> Exception:
    if kind_of(x) == "i":
        mend = "convert it, x.astype(float) or float(x)"
    elif hasattr(x, "dtype") or isinstance(x, str | bytes):
        mend = "pass numbers"
    else:
        mend = "make its class a pytree, spmd.tree.register(cls)"
    need = "an array of floating or complex dtype"
    return DifferentiationError.at(where, argument=path(), got=describe(x), need=need, mend=f"{mend}, {otherwise}")


def lift_all(
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
            raise not_floating(x, where, at, ints)
        if holomorphic and kind == "f":
            raise DifferentiationError.at(
                where,
                argument=at(),
                got=describe(x),
                need="complex arguments, as holomorphic=True says",
                mend="x.astype(complex), or leave holomorphic out",
            )
        lifted.append(admitted(x, where, at) if kind == "i" else lift(tape, x, where, at))
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
    return ONE if type(x) is np.float64 else np.ones_like(x)


ONE = np.ones(())


def on(x, tape: Tape) -> bool:
    """Whether x is traced by this tape itself."""
    return type(x) is Array and x.tape is tape


def innermost(leaves) -> Tape | None:
    """The innermost tape of the arrays among some leaves."""
    tapes = [x.tape for x in find(leaves, []) if x.tape is not None]
    return max(tapes, key=lambda t: t.level) if tapes else None


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
        raise DifferentiationError.at(
            where,
            argument="argnums",
            got=f"{argnums!r} with {count} positional arguments",
            need=f"an integer, or several different ones, from {-count} to {count - 1}"
            if count
            else "arguments that are passed by position",
            mend="pass the arguments to differentiate by position, and name each once",
        )
    return tuple(n % count for n in numbers)


def parameter(fun, n: int) -> str:
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
