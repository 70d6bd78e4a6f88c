"""Primitives: NumPy functions with their derivative rules, and the registry that dispatch looks them up in.

A rule is one line of mathematics. It receives the cotangent `g`, the result `ans`, and the arguments of the call,
and returns the cotangent of one argument:

    rule(np.multiply, lambda g, _ans, _x, y: g * y, lambda g, _ans, x, _y: x * g)

Its parameter names say what the tape keeps. A name with a leading underscore is not kept: of an argument the rule
then sees the shape and dtype only, of the result nothing. Broadcasting, casts, and complex cotangents of real
arguments are undone by the sweep, so no rule mentions them. Of a function with several results (a tuple) `ans` and `g`
are tuples; g holds zeros for results that no cotangent reached.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from spmd.autodiff.tape import Like
from spmd.errors import DifferentiationError

__all__ = [
    "Like",
    "Method",
    "Plan",
    "Primitive",
    "composite",
    "composites",
    "constant",
    "constants",
    "handlers",
    "in_place",
    "lazy_rules",
    "method_rules",
    "name_of",
    "numpy_valued",
    "overrides",
    "passive",
    "passives",
    "primitives",
    "refusals",
    "refused",
]

Rule = Callable[..., Any]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

handlers: dict[Any, Callable[..., Any]] = {}
"""What runs when a NumPy function meets a traced array: function -> primitive, constant or composition."""

primitives: dict[Any, Primitive] = {}
"""The functions among the handlers that have rules of their own."""

constants: set[Any] = set()
"""Functions whose derivative is zero wherever it exists; they are not recorded."""

composites: set[Any] = set()
"""Functions that are compositions of others; without differentiation NumPy's own function runs."""

numpy_valued: set[Any] = set()
"""Compositions that compute in another way than NumPy: they give derivatives, and NumPy's own functions the values."""

refusals: dict[Any, str] = {}
"""Functions that refuse traced arrays, and what to write instead. They take undifferentiated arrays."""

in_place: set[Any] = set()
"""The refused functions that write into an argument: they refuse every Array."""

passives: set[Any] = set()
"""Functions that take no entries of arrays: they make arrays of numbers, read files, describe dtypes."""

overrides: dict[str, Any] = {}
"""Replacements of NumPy's functions and objects in `spmd.numpy`, by name."""

lazy_rules: dict[str, str | None] = {}
"""Modules of rules that are loaded when a function without a rule first gets an Array; and the library whose functions
they are for, which must be imported already."""

method_rules: list[Callable[[Any], None]] = []
"""Functions that declare the methods of a ufunc, such as `np.add.outer`, when one of them first gets an Array."""


class Method(tuple):
    """A method of a ufunc as the registry knows it: `Method((np.add, "reduce"))`, called like np.add.reduce."""

    __slots__ = ()

    def __call__(self, *args, **kwargs):
        ufunc, method = self
        return getattr(ufunc, method)(*args, **kwargs)

    @property
    def __name__(self) -> str:
        ufunc, method = self
        return f"{ufunc.__name__}.{method}"


class Primitive:
    """A function on arrays with one rule per array argument (or one rule for all, which takes the argument's index).

    rules: the rule of each leading array argument; None for an argument without derivative.
    variadic: in place of rules, `variadic(k, g, ans, *args, **kwargs)` gives the cotangent of argument k.
    linear: with variadic, the function is linear in each argument: the rule of argument k does not use its value.
    joint: in place of rules, `joint(g, *args)` gives the cotangents of all parents at once.
    sums: with joint, `joint(g, arrived, *args)` gives the sums of the cotangents that have arrived at the parents and
        of its own; arrived: of each parent the node, and the sum so far or None.
    defer: `defer(sweep_state, g, leaf, *args)` may return a Future for the cotangent of a leaf; None: use the rule.
    into: `into(total, g, *args)` adds the cotangent of the argument to an array in place, where most of it is zero.
    over: `over(g, ans, *args)` gives what the rule gives, for every argument. It may overwrite g with the result.
    early: of two arguments, only the second one's rule uses the first one's value. That rule runs first, so that the
        memory of the first argument is free before its own cotangent is computed.
    same: a primitive of one array, used where both operands are the same array and this is less work.
    """

    __slots__ = (
        *(
            "defer",
            "early",
            "fun",
            "into",
            "joint",
            "linear",
            "name",
            "over",
            "plain",
            "plans",
            "rules",
            "same",
            "sums",
            "unary",
        ),
        "variadic",
    )

    def __init__(
        self,
        fun,
        name,
        rules=(),
        *,
        variadic=None,
        linear=False,
        joint=None,
        sums=False,
        defer=None,
        into=None,
        over=None,
        early=False,
    ):
        self.fun = fun
        self.name = name
        self.rules: tuple[Rule | None, ...] = tuple(rules)
        self.variadic = variadic
        self.linear = linear
        self.joint = joint
        self.sums = sums
        self.defer = defer
        self.into = into
        self.over = over
        self.early = early
        self.plain = joint is None and defer is None and into is None and over is None and not early
        self.plans: dict[int, Plan] = {}
        self.unary: tuple[tuple[Rule, ...], bool, bool] | None = None
        self.same: Primitive | None = None

    def __repr__(self) -> str:
        return f"Primitive({self.name})"

    def if_same(self, rule: Rule) -> None:
        """Declare the rule for two operands that are one array."""
        self.same = Primitive(lambda x: self.fun(x, x), self.name, (rule,))

    def pull(self, k: int) -> Rule:
        """The rule of argument k."""
        if self.variadic is None:
            return self.rules[k]  # type: ignore[return-value]
        return functools.partial(self.variadic, k)

    def plan(self, key: int) -> Plan:
        """What to keep for the rules of the differentiated arguments.

        key: a bit per argument, the first one leading, set where it is differentiated; above them one more set bit.
        """
        count = key.bit_length() - 1
        plan = Plan(self, [i for i in range(count) if key >> (count - 1 - i) & 1], count)
        self.plans[key] = plan
        return plan

    def plan_unary(self) -> tuple[tuple[Rule, ...], bool, bool]:
        """The plan of a function of one argument: its rule, and whether result and argument are kept."""
        plan = self.plan(3)
        self.unary = plan.pulls, plan.keep_ans, plan.keeps[0] is VALUE
        return self.unary


class Plan:
    """What the rules of some arguments need, by their parameter names.

    pulls: the rules of the differentiated arguments, in order.
    keep_ans: whether the result is kept.
    keeps: for each argument whether its value is kept (VALUE), its shape and dtype (LIKE), or nothing (NOTHING).
    options: the names of the further arguments that the rules take; None for any.
    """

    __slots__ = ("keep_ans", "keeps", "options", "prim", "pulls")

    def __init__(self, prim: Primitive, active: list[int], count: int):
        by_value: set[int] = set()
        by_shape: set[int] = set()
        self.keep_ans = False
        for k in active:
            if prim.variadic is None and (k >= len(prim.rules) or prim.rules[k] is None):
                raise _not_differentiable(prim, k)
            parameters = list(inspect.signature(prim.pull(k)).parameters.values())
            if len(parameters) < 2 + len(prim.rules) and parameters[-1].kind != inspect.Parameter.VAR_POSITIONAL:
                raise _malformed(prim, k, parameters)
            _, ans, *rest = parameters
            names = [p.name for p in rest if p.kind == p.POSITIONAL_OR_KEYWORD]
            more = [p.name for p in rest if p.kind == p.VAR_POSITIONAL] * (count - len(names))
            if count > len(names + more):
                raise _not_supported(prim, f"number {len(names) + 1}", names[len(prim.rules) :])
            self.keep_ans |= ans.name[0] != "_"
            own = k if prim.linear else None
            by_value |= {i for i, name in enumerate(names + more) if name[0] != "_" and i != own}
            by_shape |= {i for i, name in enumerate(names + more) if _reads(prim.variadic or prim.pull(k), name)}
            names += [p.name for p in rest if p.kind == p.KEYWORD_ONLY]
            self.options = None if any(p.kind == p.VAR_KEYWORD for p in rest) else names[len(prim.rules) :]
        self.prim = prim
        self.pulls = tuple(prim.pull(k) for k in active)
        self.keeps = tuple(VALUE if i in by_value else LIKE if i in by_shape else NOTHING for i in range(count))

    def chosen(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments that the rules take; raises for another one that changes the derivative."""
        options = self.options
        if options is None:
            return kwargs
        for name in kwargs:
            if name not in options and name not in _IGNORED_OPTIONS:
                raise _not_supported(self.prim, name, options)
        return {name: value for name, value in kwargs.items() if name in options}


VALUE, LIKE, NOTHING = "value", "like", None


def _reads(rule: Any, parameter: str) -> bool:
    """Whether a rule reads this parameter."""
    code = getattr(rule, "__code__", None)
    if code is None or parameter in code.co_cellvars:
        return True
    return any(
        parameter == i.argval or (isinstance(i.argval, tuple) and parameter in i.argval)
        for i in dis.get_instructions(code)
    )


_IGNORED_OPTIONS = frozenset(("casting", "copy", "dtype", "kind", "optimize", "order", "stable", "subok"))
"""Options that do not change the derivative, except by a cast, which the sweep undoes."""


def _not_differentiable(prim: Primitive, i: int) -> Exception:
    return DifferentiationError.at(
        prim.name,
        argument=f"number {i + 1}",
        got="a traced array where the function has no derivative",
        need="bare data",
        mend="pass spmd.stop_gradient(x)",
    )


def _malformed(prim: Primitive, k: int, parameters: list[inspect.Parameter]) -> Exception:
    return DifferentiationError.at(
        prim.name,
        argument=f"the rule of argument {k}",
        got=f"parameters ({', '.join(p.name for p in parameters)})",
        need="g, the result, and every array argument: lambda g, ans, x: ...",
        mend="name those that the rule does not look at _ans, _x",
    )


def _not_supported(prim: Primitive, argument: str, supported: Iterable[str]) -> Exception:
    options = ", ".join(supported)
    return DifferentiationError.at(
        prim.name,
        argument=argument,
        got="an option that the derivative rule does not know",
        need=f"no others than {options}" if options else "no options",
        mend="compose the function of simpler ones (for a mask: np.where(mask, x, other) first)",
    )


def name_of(fun) -> str:
    """A function as users write it: np.svd is np.linalg.svd."""
    if type(fun) is Method:
        return f"{name_of(fun[0])}.{fun[1]}"
    name = fun.__name__
    for prefix in ("np", "np.linalg", "np.fft"):
        module = getattr(np, prefix[3:]) if prefix[3:] else np
        if getattr(module, name, None) is fun:
            return f"{prefix}.{name}"
    special = sys.modules.get("scipy.special")
    if getattr(special, name, None) is fun:
        return f"scipy.special.{name}"
    module = getattr(fun, "__module__", None)
    return f"{'np' + module[5:] if module.startswith('numpy') else module}.{name}" if module else name


def constant(*funs: Any) -> None:
    """Declare functions constant: their results have the state of their arguments, and no gradient."""
    constants.update(funs)


def refused(*funs: Any, instead: str, writes: bool = False) -> None:
    """Declare functions without derivative, and the mend that their error names; `writes` for those in place."""
    refusals.update(dict.fromkeys(funs, instead))
    if writes:
        in_place.update(funs)


def passive(*funs: Any) -> None:
    """Declare functions that take no entries of arrays, so that no derivative goes through them."""
    passives.update(funs)


def composite(*funs: Any, by_numpy: bool = False):
    """Declare a function by a composition of others, with the signature of NumPy's: `@composite(np.vstack)`.

    by_numpy: the composition computes in another way than NumPy, so NumPy's own function gives the values.
    """

    def declare(f):
        composites.update(funs)
        if by_numpy:
            numpy_valued.update(funs)
        handlers.update(dict.fromkeys(funs, f))
        return f

    return declare
