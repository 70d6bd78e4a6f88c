"""Declare primitives and their derivative rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.autodiff.apply import apply, apply_unary
from spmd.autodiff.primitive import Decorator, Primitive, Rule, handlers, name_of, primitives
from spmd.autodiff.tracer import Array
from spmd.errors import describe, message

__all__ = ["primitive", "rule"]


def rule(fun: Any, *rules: Rule | None, early: bool = False) -> Primitive:
    """Declare the derivative of a NumPy function: one rule per array argument, in order."""
    prim = primitives[fun] = Primitive(fun, name_of(fun), rules, early=early)
    handlers[fun] = _entry(prim)
    return prim


def primitive(
    name: str,
    *rules: Rule | None,
    variadic: Rule | None = None,
    linear: bool = False,
    into: Callable[..., None] | None = None,
    over: Rule | None = None,
    early: bool = False,
) -> Decorator:
    """Make a primitive of an own function: `@primitive("name", rule, ...)`; the result is called like the function."""
    if not isinstance(name, str):
        mend = '@primitive("f", rule)'
        raise TypeError(message("primitive", argument="name", got=describe(name), need="a name", mend=mend))

    def declare(fun):
        prim = Primitive(fun, name, rules, variadic=variadic, linear=linear, into=into, over=over, early=early)
        return _entry(prim)

    return declare


def _entry(prim: Any) -> Callable[..., Any]:
    def call(*args, **kwargs):
        if not kwargs:
            if Array not in map(type, args):
                return prim.fun(*args)
            if len(args) == 1:
                return apply_unary(prim, *args)
        return apply(prim, args, kwargs)

    call.__name__ = call.__qualname__ = prim.name
    call.__doc__ = prim.fun.__doc__
    call.primitive = prim  # type: ignore[attr-defined]
    return call
