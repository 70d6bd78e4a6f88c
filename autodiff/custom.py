"""Functions that bring their own derivative: a pullback (custom_vjp) or a push-forward (custom_jvp)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np

from spmd.autodiff import tracer, tree
from spmd.autodiff.dtypes import float0
from spmd.autodiff.signatures import Parameters, Result
from spmd.autodiff.tape import Tape, refusing
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import (
    innermost,
    kind_of,
    lower,
    name_of,
    places,
    refuse_handles,
    stated,
    unstated,
    zeros_like,
)
from spmd.autodiff.transforms import joint, pullback_of
from spmd.errors import ClosureError, DifferentiationError, describe
from spmd.tracebacks import api_boundary

__all__ = ["custom_jvp", "custom_vjp"]

Rule = TypeVar("Rule", bound=Callable[..., Any])


class _Custom(Generic[Parameters, Result]):
    """A function and the arguments of it that are not differentiated: what custom_vjp and custom_jvp share."""

    @api_boundary
    def __init__(
        self,
        fun: Callable[Parameters, Result],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ):
        self.fun: Callable[..., Any] = fun
        self.where = f"{type(self).__name__} {name_of(fun)}"
        self.parameters = _parameters(fun)
        self.nondiff_argnums = nondiff_argnums
        self.nondiff_argnames = (nondiff_argnames,) if isinstance(nondiff_argnames, str) else tuple(nondiff_argnames)
        functools.update_wrapper(self, fun)  # type: ignore[arg-type]

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: Any = None) -> Callable[..., Result]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)  # type: ignore[arg-type]

    def _resolved(self, args: tuple, kwargs: dict) -> tuple[Any, ...]:
        """All arguments by position, defaults too, as the signature of the function says."""
        parameters = self.parameters
        if parameters is None or (not kwargs and len(args) == len(parameters)):
            if kwargs:
                raise self._unresolved(", ".join(kwargs), "the signature of the function is not known")
            return args
        try:
            bound = inspect.Signature(parameters).bind(*args, **kwargs)
        except TypeError as error:
            raise self._unresolved(f"{len(args)} positional arguments, and {list(kwargs)}", str(error)) from None
        if bound.kwargs:
            raise self._unresolved(", ".join(bound.kwargs), "arguments that the signature takes by position")
        bound.apply_defaults()
        return bound.args

    @api_boundary
    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        given = self._resolved(args, kwargs)
        fixed = self._fixed(given)
        chosen = [i for i in range(len(given)) if i not in fixed]
        leaves, treedef = tree.flatten(tuple(given[i] for i in chosen))
        run, back = self._ruled(given, chosen, [given[i] for i in sorted(fixed)], treedef)
        tape = innermost(leaves)
        return self.fun(*given) if tape is None else _with_pullback(tape, leaves, run, back, self.where)

    def _ruled(self, args: tuple, chosen: list[int], first: list, treedef) -> tuple[Callable, Callable]:
        """What runs forward on the chosen arguments' leaves, giving result and residuals, and what goes back."""
        raise NotImplementedError

    def _unresolved(self, got: str, need: str) -> Exception:
        return DifferentiationError.at(
            self.where, argument="arguments", got=got, need=need, mend="pass the arguments by position"
        )

    def _fixed(self, args: tuple) -> set[int]:
        """The positions of the arguments that are not differentiated; they must not be traced."""
        numbers = places(self.nondiff_argnums, len(args))
        names = [p.name for p in self.parameters or ()]
        numbers |= {names.index(n) for n in self.nondiff_argnames if n in names[: len(args)]}
        for n in numbers:
            if innermost(tree.leaves(args[n])) is not None:
                raise DifferentiationError.at(
                    self.where,
                    argument=f"number {n}",
                    got=f"{describe(args[n])}, in a position that nondiff_argnums names",
                    need="arguments without a gradient there",
                    mend="leave it out of nondiff_argnums and return None as its cotangent; "
                    "or pass spmd.stop_gradient(x)",
                )
        return numbers

    def _no_rule(self, need: str, mend: str) -> Exception:
        return DifferentiationError.at(self.where, got="no rule", need=need, mend=mend)

    def _no_symbols(self) -> Exception:
        return DifferentiationError.at(
            self.where,
            argument="symbolic_zeros",
            got="True",
            need="False: cotangents and tangents that are zero come as arrays of zeros",
            mend="leave it out",
        )


def _parameters(fun: Callable) -> list[inspect.Parameter] | None:
    """What the signature of a function says; None where it is not known, or that of a ufunc with all its options."""
    if isinstance(fun, np.ufunc):
        return None
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return None


class custom_vjp(_Custom[Parameters, Result]):
    """A function with its own derivative: `f.defvjp(fwd, bwd)`, as in JAX.

    fwd(*args) -> (result, residuals); bwd(*nondiff_args, residuals, cotangent) -> a tuple of cotangents, one per
    differentiable argument (None for zero). A cotangent in more state than its argument is summed over those axes.
    Arguments that nondiff_argnums or nondiff_argnames name have no gradient, and bwd is given them first.
    Keyword arguments and defaults are brought to their positions. The functions must not use arrays traced outside
    of them. Forward mode works too: it transposes bwd. Raises DifferentiationError where rules are missing or give what
    does not fit.

        >>> @spmd.custom_vjp
        ... def clipped(x):
        ...     return x
        >>> clipped.defvjp(lambda x: (x, None), lambda residuals, g: (np.clip(g, -1.0, 1.0),))
        >>> spmd.grad(lambda x: np.sum(clipped(x) ** 2))(np.array([0.25, 3.0]))
        array([0.5, 1. ])
    """

    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    @api_boundary
    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """Set the rule. `optimize_remat` is for compilers: it changes nothing here."""
        if symbolic_zeros:
            raise self._no_symbols()
        self.fwd, self.bwd = fwd, bwd

    def _ruled(self, args, chosen, first, treedef):
        if self.fwd is None or self.bwd is None:
            raise self._no_rule("fwd and bwd", "f.defvjp(fwd, bwd) before the first call")
        fwd, bwd, where = self.fwd, self.bwd, self.where

        def run(values):
            full = list(args)
            for i, a in zip(chosen, tree.unflatten(treedef, values), strict=True):
                full[i] = a
            result = fwd(*full)
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise _no_pair(where, "result of fwd", result, "(result, residuals)")
            return result

        def back(residuals, cotangent):
            return _cotangent_leaves(bwd(*first, residuals, cotangent), treedef, where)

        return run, back


class custom_jvp(_Custom[Parameters, Result]):
    """A function with its own derivative, given as its push-forward: `@f.defjvp`, as in JAX.

    rule(*nondiff_args, primals, tangents) -> (result, tangent of the result), linear in the tangents; reverse mode
    transposes it. `f.defjvps(rule_0, ...)` gives one function(tangent, result, *primals) per argument, None for an
    argument without derivative. Arguments and closures are as for custom_vjp.

        >>> absolute = spmd.custom_jvp(lambda x: np.abs(x))
        >>> absolute.defjvps(lambda tangent, result, x: np.where(x >= 0.0, tangent, -tangent))
        >>> spmd.grad(lambda x: np.sum(absolute(x)))(np.array([0.0, -2.0]))
        array([ 1., -1.])
    """

    rule: Callable[..., Any] | None = None

    @api_boundary
    def defjvp(self, jvp: Rule, symbolic_zeros: bool = False) -> Rule:
        """Set the rule, and give it back: usable as a decorator."""
        if symbolic_zeros:
            raise self._no_symbols()
        self.rule = jvp
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Set the rule as a sum over the arguments."""

        def rule(primals, tangents):
            result = self.fun(*primals)
            moved = [f(t, result, *primals) for f, t in zip(jvps, tangents, strict=True) if f is not None]
            total = tree.map(lambda *ts: sum(ts[1:], ts[0]), *moved) if moved else tree.map(zeros_like, result)
            return result, total

        self.rule = rule

    def _ruled(self, args, chosen, first, treedef):
        if self.rule is None:
            raise self._no_rule("a rule for tangents", "f.defjvp(rule) before the first call")
        rule, where = self.rule, self.where

        def run(values):
            primals = tree.unflatten(treedef, values)

            def pushed(*tangents):
                result = rule(*first, primals, tangents)
                if not isinstance(result, tuple | list) or len(result) != 2:
                    raise _no_pair(where, "result of the rule", result, "(result, tangent)")
                return result[1], result[0]

            zeros = tree.map(lambda x: stated(zeros_like(x), getattr(x, "state", None)), primals)
            moved, pull, result = pullback_of(pushed, zeros, has_aux=True)
            _check_moved(where, result, moved)
            return result, pull

        def back(pull, cotangent):
            return tree.leaves(pull(cotangent))

        return run, back


def _check_moved(where: str, result, moved) -> None:
    """Raise where the tangent of a result is not as the result is."""
    (xs, need), (ts, have) = tree.flatten(result), tree.flatten(moved)
    for x, t in zip(xs, ts, strict=False):
        floats = kind_of(x) == "i" or type(t) in (float, complex) or kind_of(t) in ("f", "c")
        if np.shape(value_of(x)) != np.shape(value_of(t)) or not floats:
            need, have = describe(x), describe(t)
    if need != have:
        raise DifferentiationError.at(
            where,
            argument="the tangent of the result",
            got=str(have),
            need=f"the structure and shapes of the result, {need}",
            mend="return (result, tangent), the tangent being linear in the tangents that came",
        )


def _with_pullback(tape: Tape, leaves: list, run: Callable, back: Callable, where: str):
    """Run below the tape, and record the results with `back(residuals, cotangent)` as their pullback."""
    refuse_handles(leaves, where, "arguments")
    with refusing(tape.level, lambda: _closure(where)):
        out, residuals = run([lower(x, tape) for x in leaves])
    outs, out_tree = tree.flatten(out)
    refuse_handles(outs, where, "result")
    # Shapes and states are all that the pullback asks of arguments and results: it keeps none of them.
    likes = [(np.shape(value_of(x)), x.state) if type(x) is Array else None for x in leaves]
    results = [(_zeros(o), getattr(o, "state", None)) for o in outs]

    kept, kept_tree = tree.flatten(residuals, none_is_leaf=True)
    del residuals

    def pull(kept, gs):
        residuals = tree.unflatten(kept_tree, kept)
        full = [zeros() if g is None else stated(g, state) for g, (zeros, state) in zip(gs, results, strict=True)]
        pulled: list[Any] = []
        for k, (g, like) in enumerate(zip(back(residuals, tree.unflatten(out_tree, full)), likes, strict=True)):
            if g is None or like is None or getattr(g, "dtype", None) == float0:
                pulled.append(None)
                continue
            shape, state = like
            if np.shape(value_of(g)) != shape:
                raise _misfit(g, f"shape {list(shape)}, that of the argument", _SUMMED, where, k)
            if hasattr(g, "dtype") and kind_of(g) not in ("f", "c"):
                raise _misfit(g, "a floating cotangent", "g.astype(float), or None for zero", where, k)
            pulled.append(unstated(tracer.mixing.bring(float(g) if type(g) is int else g, None, state)))
        return pulled

    return tree.unflatten(out_tree, joint(where, tape, leaves, outs, pull, kept=kept))


def _zeros(x) -> Callable[[], Any]:
    """What makes zeros like x later, and does not keep the data of x for it."""
    value, state = value_of(x), getattr(x, "state", None)
    if kind_of(x) != "i" and isinstance(value, np.ndarray | np.generic):
        shape, dtype = value.shape, value.dtype
        return lambda: stated(np.zeros(shape, dtype), state)
    like = zeros_like(x)
    return lambda: stated(like, state)


def _closure(where: str) -> Exception:
    return ClosureError.at(
        where,
        got="a function that uses an array traced outside of it",
        need="functions that use their arguments only",
        mend="pass the array as an argument",
    )


def _no_pair(where: str, argument: str, got, need: str) -> Exception:
    return DifferentiationError.at(
        where, argument=argument, got=describe(got), need=f"a pair {need}", mend="return both as a tuple"
    )


_SUMMED = "sum it over the dimensions that were broadcast"


def _misfit(g, need: str, mend: str, where: str, k: int) -> Exception:
    return DifferentiationError.at(where, argument=f"cotangent of leaf {k}", got=describe(g), need=need, mend=mend)


def _cotangent_leaves(gs, treedef, where: str) -> list:
    """The leaves of a backward function's result, None standing for zeros of a whole argument."""
    children = treedef.children()
    if not isinstance(gs, tuple | list) or len(gs) != len(children):
        raise _misbuilt(where, describe(gs), f"a tuple of {len(children)} cotangents")
    leaves: list[Any] = []
    for g, child in zip(gs, children, strict=True):
        try:
            leaves += [None] * child.num_leaves if g is None else child.flatten_up_to(g)
        except ValueError:
            raise _misbuilt(where, str(tree.structure(g)), f"the structure of the argument, {child}") from None
    return leaves


def _misbuilt(where: str, got: str, need: str) -> Exception:
    return DifferentiationError.at(
        where,
        argument="result of bwd",
        got=got,
        need=need,
        mend="return one per differentiable argument, None for zero",
    )
