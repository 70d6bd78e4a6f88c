"""Which function is run in place of one of NumPy where a global array is among its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from spmd.errors import LayoutError
from spmd.layout_rules import RULES, Rule

__all__ = ["MADE_LIKE", "MAPPED", "NATIVE", "function_of", "implements", "refuse_out"]

NATIVE: dict[Any, Callable[..., Any]] = {}
"""Functions of global arrays that are not traced; `np.ufunc` stands for all ufuncs. What traces them has the derivative
rules of NumPy's functions."""
MAPPED: dict[Any, Callable[..., Any]] = {}
"""Functions that are run as maps, of traced arrays too. `None` stands for all that are in neither table: it is given
the function first."""

MADE_LIKE: dict[Any, Callable[..., Any]] = {}
"""What NumPy's functions that make arrays do with a global array as their argument `like`, which comes first."""


def function_of(fun: Any) -> Callable[..., Any] | None:
    """The function that is run in place of one of NumPy, of traced arrays too; None: it is in the other table."""
    if fun in NATIVE or fun in MADE_LIKE or (isinstance(fun, np.ufunc) and fun.signature is None):
        return None
    return MAPPED.get(fun) or partial(MAPPED[None], fun)


def refuse_out(where: str, options: dict[str, Any]) -> None:
    out = options.pop("out", None)
    if out is not None and not (isinstance(out, tuple) and all(o is None for o in out)):
        raise LayoutError.at(
            where,
            argument="out",
            got="an array to write into",
            need="no out: arrays are immutable",
            mend=f"use the result: y = {where}(...)",
        )


def implements(
    *functions: Any, rule: Rule, table: dict[Any, Callable[..., Any]] = NATIVE
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the implementation of functions of NumPy. rule: how it lays out the result."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            table[function], RULES[function] = handler, rule
        return handler

    return register
