"""Functions that bring their own derivative, or compute themselves again to find it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd.autodiff import tracer, tree
from spmd.autodiff.tape import Node, Tape, _active, recording, refusing, sweep
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transforms import (
    _top,
    joint,
    kind_of,
    lower,
    name_of,
    on,
    pullback_of,
    stated,
    unstated,
    zeros_like,
)
from spmd.errors import ClosureError, DifferentiationError, describe, message

__all__ = ["checkpoint", "custom_jvp", "custom_vjp"]


class _Custom:
    """A function and the arguments of it that are not differentiated: what custom_vjp and custom_jvp share."""

    def __init__(self, fun: Callable, nondiff_argnums: int | Sequence[int] = (), nondiff_argnames=()):
        self.fun = fun
        self.where = f"{type(self).__name__} {name_of(fun)}"
        self.parameters = _parameters(fun)
        self.nondiff_argnums = nondiff_argnums
        self.nondiff_argnames = (nondiff_argnames,) if isinstance(nondiff_argnames, str) else tuple(nondiff_argnames)
        functools.update_wrapper(self, fun)

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)

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

    def _unresolved(self, got: str, need: str) -> Exception:
        return DifferentiationError(
            message(self.where, argument="arguments", got=got, need=need, mend="pass the arguments by position")
        )

    def _fixed(self, args: tuple) -> set[int]:
        """The positions of the arguments that are not differentiated; they must not be traced."""
        numbers = self.nondiff_argnums
        numbers = {n % len(args) for n in ([numbers] if hasattr(numbers, "__index__") else numbers)} if args else set()  # type: ignore[union-attr]
        names = [p.name for p in self.parameters or ()]
        numbers |= {names.index(n) for n in self.nondiff_argnames if n in names[: len(args)]}
        for n in numbers:
            if _top(tree.leaves(args[n])) is not None:
                raise DifferentiationError(
                    message(
                        self.where,
                        argument=f"number {n}",
                        got=f"{describe(args[n])}, in a position that nondiff_argnums names",
                        need="arguments without a gradient there",
                        mend="leave it out of nondiff_argnums and return None as its cotangent; "
                        "or pass spmd.stop_gradient(x)",
                    )
                )
        return numbers

    def _no_rule(self, need: str, mend: str) -> Exception:
        return DifferentiationError(message(self.where, got="no rule", need=need, mend=mend))

    def _no_symbols(self) -> Exception:
        return DifferentiationError(
            message(
                self.where,
                argument="symbolic_zeros",
                got="True",
                need="False: cotangents and tangents that are zero come as arrays of zeros",
                mend="leave it out",
            )
        )


def _parameters(fun: Callable) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return None


class custom_vjp(_Custom):
    """A function with its own derivative: `f.defvjp(fwd, bwd)`, as in JAX.

    fwd(*args) -> (result, residuals); bwd(*nondiff_args, residuals, cotangent) -> a tuple of cotangents, one per
    differentiable argument (None for zero). A cotangent in more state than its argument is summed over those axes.
    Arguments that nondiff_argnums or nondiff_argnames name have no gradient, and bwd is given them first.
    Keyword arguments and defaults are brought to their positions. The functions must not use arrays traced outside
    of them. Forward mode works too: it transposes bwd.
    """

    fwd: Callable | None = None
    bwd: Callable | None = None

    def defvjp(self, fwd: Callable, bwd: Callable, symbolic_zeros: bool = False, optimize_remat: bool = False) -> None:
        """Set the rule. `optimize_remat` is for compilers: it changes nothing here."""
        if symbolic_zeros:
            raise self._no_symbols()
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args, **kwargs):
        if self.fwd is None or self.bwd is None:
            raise self._no_rule("fwd and bwd", "f.defvjp(fwd, bwd) before the first call")
        args = self._resolved(args, kwargs)
        fixed = self._fixed(args)
        chosen = [i for i in range(len(args)) if i not in fixed]
        leaves, treedef = tree.flatten(tuple(args[i] for i in chosen))
        tape = _top(leaves)
        if tape is None:
            return self.fun(*args)
        fwd, bwd, where = self.fwd, self.bwd, self.where
        first = [args[i] for i in sorted(fixed)]

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

        return _with_pullback(tape, leaves, run, back, where)


class custom_jvp(_Custom):
    """A function with its own derivative, given as its push-forward: `@f.defjvp`, as in JAX.

    rule(*nondiff_args, primals, tangents) -> (result, tangent of the result), linear in the tangents; reverse mode
    transposes it. `f.defjvps(rule_0, ...)` gives one function(tangent, result, *primals) per argument, None for an
    argument without derivative. Arguments and closures are as for custom_vjp.
    """

    rule: Callable | None = None

    def defjvp(self, jvp: Callable, symbolic_zeros: bool = False) -> Callable:
        """Set the rule, and give it back: usable as a decorator."""
        if symbolic_zeros:
            raise self._no_symbols()
        self.rule = jvp
        return jvp

    def defjvps(self, *jvps: Callable | None) -> None:
        """Set the rule as a sum over the arguments."""

        def rule(primals, tangents):
            result = self.fun(*primals)
            moved = [f(t, result, *primals) for f, t in zip(jvps, tangents, strict=True) if f is not None]
            total = tree.map(lambda *ts: sum(ts[1:], ts[0]), *moved) if moved else tree.map(zeros_like, result)
            return result, total

        self.rule = rule

    def __call__(self, *args, **kwargs):
        if self.rule is None:
            raise self._no_rule("a rule for tangents", "f.defjvp(rule) before the first call")
        args = self._resolved(args, kwargs)
        fixed = self._fixed(args)
        chosen = [i for i in range(len(args)) if i not in fixed]
        leaves, treedef = tree.flatten(tuple(args[i] for i in chosen))
        tape = _top(leaves)
        if tape is None:
            return self.fun(*args)
        rule, where = self.rule, self.where
        first = [args[i] for i in sorted(fixed)]

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

        return _with_pullback(tape, leaves, run, back, where)


def _check_moved(where: str, result, moved) -> None:
    """Raise where the tangent of a result is not as the result is."""
    (xs, need), (ts, have) = tree.flatten(result), tree.flatten(moved)
    for x, t in zip(xs, ts, strict=False):
        if np.shape(value_of(x)) != np.shape(value_of(t)):
            need, have = describe(x), describe(t)
    if need != have:
        raise DifferentiationError(
            message(
                where,
                argument="the tangent of the result",
                got=str(have),
                need=f"the structure and shapes of the result, {need}",
                mend="return (result, tangent), the tangent being linear in the tangents that came",
            )
        )


def _with_pullback(tape: Tape, leaves: list, run: Callable, back: Callable, where: str):
    """Run below the tape, and record the results with `back(residuals, cotangent)` as their pullback."""
    with refusing(tape.level, lambda: _closure(where)):
        out, residuals = run([lower(x, tape) for x in leaves])
    outs, out_tree = tree.flatten(out)
    # Shapes and states are all that the pullback asks of arguments and results: it keeps none of them.
    likes = [(np.shape(value_of(x)), x.state) if type(x) is Array else None for x in leaves]
    results = [(_zeros(o), getattr(o, "state", None)) for o in outs]

    def pull(gs):
        full = [zeros() if g is None else stated(g, state) for g, (zeros, state) in zip(gs, results, strict=True)]
        pulled: list[Any] = []
        for k, (g, like) in enumerate(zip(back(residuals, tree.unflatten(out_tree, full)), likes, strict=True)):
            if g is None or like is None or kind_of(g) == "i":
                pulled.append(None)
                continue
            shape, state = like
            if np.shape(value_of(g)) != shape:
                raise _misshapen(g, shape, where, k)
            pulled.append(unstated(tracer.mixing.bring(g, None, state)))
        return pulled

    return tree.unflatten(out_tree, joint(tape, leaves, outs, pull))


def _zeros(x) -> Callable[[], Any]:
    """What makes zeros like x later, and does not keep the data of x for it."""
    value, state = value_of(x), getattr(x, "state", None)
    if kind_of(x) != "i" and isinstance(value, np.ndarray | np.generic):
        shape, dtype = value.shape, value.dtype
        return lambda: stated(np.zeros(shape, dtype), state)
    like = zeros_like(x)
    return lambda: stated(like, state)


def _closure(where: str) -> Exception:
    return ClosureError(
        message(
            where,
            got="a function that uses an array traced outside of it",
            need="functions that use their arguments only",
            mend="pass the array as an argument",
        )
    )


def _no_pair(where: str, argument: str, got, need: str) -> Exception:
    return DifferentiationError(
        message(where, argument=argument, got=describe(got), need=f"a pair {need}", mend="return both as a tuple")
    )


def _misshapen(g, shape: tuple[int, ...], where: str, k: int) -> Exception:
    return DifferentiationError(
        message(
            where,
            argument=f"cotangent of leaf {k}",
            got=describe(g),
            need=f"shape {list(shape)}, that of the argument",
            mend="sum it over the dimensions that were broadcast",
        )
    )


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
    return DifferentiationError(
        message(
            where,
            argument="result of bwd",
            got=got,
            need=need,
            mend="return one per differentiable argument, None for zero",
        )
    )


# Computing again


def checkpoint(
    fun: Callable,
    *,
    prevent_cse: bool = True,
    policy: None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable:
    """`fun`, whose intermediate values are not kept but computed again in the backward sweep, as jax.checkpoint.

    What enters is kept: arguments, and traced arrays that `fun` closes over. A chain of n steps in √n checkpointed
    blocks of √n steps so holds O(√n) arrays. The sweep of the block is checkpointed too, for outer differentiations.
    `fun` must give the same when it is called again.

    prevent_cse: for compilers; it changes nothing here.
    policy: None. Which intermediates are kept is said by which functions are checkpointed.
    static_argnums, static_argnames: arguments that are passed as they are, and are never traced.
    """
    if policy is not None:
        raise DifferentiationError(
            message(
                f"checkpoint of {name_of(fun)}",
                argument="policy",
                got=describe(policy),
                need="None: all intermediate values are computed again",
                mend="checkpoint smaller functions, and leave out what is to be kept",
            )
        )
    numbers = [static_argnums] if hasattr(static_argnums, "__index__") else list(static_argnums)  # type: ignore[arg-type]
    names = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        tapes = _active.get()
        if not tapes:
            return fun(*args, **kwargs)
        static = {n % len(args) for n in numbers} if args else set()
        fixed = {k: v for k, v in kwargs.items() if k in names}
        if _top(tree.leaves(([args[n] for n in static], fixed))) is not None:
            raise DifferentiationError(
                message(
                    f"checkpoint of {name_of(fun)}",
                    argument="static_argnums",
                    got="a traced array in a static argument",
                    need="static arguments without a gradient",
                    mend="leave it out of static_argnums and static_argnames",
                )
            )
        moving = [i for i in range(len(args)) if i not in static]
        named = {k: v for k, v in kwargs.items() if k not in names}
        leaves, treedef = tree.flatten(([args[i] for i in moving], named))
        template = [a if i in static else None for i, a in enumerate(args)]

        def call(values):
            given, more = tree.unflatten(treedef, values)
            full = list(template)
            for i, a in zip(moving, given, strict=True):
                full[i] = a
            return fun(*full, **more, **fixed)

        return _computed_again(call, leaves, tapes, f"checkpoint of {name_of(fun)}")

    return wrapped


def _computed_again(call: Callable, leaves: list, tapes: Sequence[Tape], where: str):
    """`call(leaves)`, on each of the tapes (outermost first) as one node, whose pullback runs `call` again.

    It runs with its leaves below all tapes, so that they record only what it closes over. That goes aside, to tell on
    which nodes the results depend, and is dropped.
    """
    if not tapes:
        return call(leaves)
    levels = [leaves]  # from the innermost: the leaves as each tape sees them
    for tape in reversed(tapes):
        levels.append([lower(x, tape) for x in levels[-1]])
    *levels, values = levels
    asides = [Tape() for _ in tapes]
    with _redirected(zip(tapes, asides, strict=True)):
        out = call(values)
    outs, out_tree = tree.flatten(out)
    closed = [_closed(tape, aside, outs) for tape, aside in zip(tapes, asides, strict=True)]
    for tape in reversed(tapes):
        outs = [lower(o, tape) for o in outs]
    for i, (tape, seen) in enumerate(zip(tapes, reversed(levels), strict=True)):
        moved = {k: x for k, x in enumerate(seen) if on(x, tape)}
        if moved or closed[i]:
            inner = [t for t, nodes in zip(tapes[i + 1 :], closed[i + 1 :], strict=True) if nodes]
            again = _Again(call, [lower(x, tape) for x in seen], list(moved), tape, closed[i], inner, where)
            outs = joint(tape, [*(x.node for x in moved.values()), *closed[i]], outs, again.pull)
    return tree.unflatten(out_tree, outs)


class _Again:
    """The pullback of a call that is run again.

    values: its leaves below the tape; moved: the positions of those that are differentiated.
    closed: nodes of the tape that the call depends on beside them. Only then is the tape itself kept, and used again:
    arrays that are closed over know no other.
    inner: tapes further in, on which the call records what it closes over, to no use.
    """

    __slots__ = ("call", "closed", "inner", "moved", "tape", "values", "where")

    def __init__(self, call, values: list, moved: list[int], tape: Tape, closed: list[Node], inner, where: str):
        self.call = call
        self.values = values
        self.moved = moved
        self.tape = tape if closed else None
        self.closed = closed
        self.inner = inner
        self.where = where

    def pull(self, gs: list) -> list:
        if self.closed:
            return self.swept(self.values, gs)
        # For tapes further out this is a computation that holds as little as the call itself.
        n = len(self.values)
        leaves = [*self.values, *gs]
        found = _computed_again(lambda xs: self.swept(xs[:n], xs[n:]), leaves, _active.get(), self.where)
        return [unstated(g) for g in found]

    def swept(self, values: list, gs: list) -> list:
        """Call again, and sweep back: the cotangents of what moved, and of what is closed over."""
        with self.recording() as (tape, aside):
            full, starts, states = list(values), [], []
            for k in self.moved:
                x = values[k]
                starts.append(aside.leaf(np.shape(value_of(x)), getattr(x, "dtype", None) or tracer.weak(x)))
                states.append(getattr(x, "state", None))
                full[k] = Array(
                    x if type(x) is not Array or x.tape is not None else x.value, states[-1], tape, starts[-1]
                )
            outs = tree.leaves(self.call(full))
        for t in reversed(self.inner):
            outs = [lower(o, t) for o in outs]
        proxies = {id(node): aside.leaf(node.shape, node.dtype) for node in self.closed}

        def own(node):
            """The node that stands for one on the sweep's own tape."""
            if node is None or _stands_on(aside, node):
                return node
            if id(node) not in proxies:
                raise self.another()
            return proxies[id(node)]

        for node in aside.nodes:
            node.parents = [own(p) for p in node.parents]
        if len(outs) != len(gs):
            raise self.another()
        seeds = [(own(o.node), unstated(g)) for o, g in zip(outs, gs, strict=True) if g is not None and on(o, tape)]
        leaves = [*starts, *proxies.values()]
        found = sweep(aside, seeds, leaves, free=True)
        states += [None] * len(proxies)
        return [None if g is None else stated(g, state) for g, state in zip(found, states, strict=True)]

    @contextmanager
    def recording(self) -> Iterator[tuple[Tape, Tape]]:
        """The tape that the call records on, and the one that its nodes go to."""
        junk = [(t, Tape()) for t in self.inner]
        if self.tape is None:
            with recording(once=True) as tape, _redirected(junk):
                yield tape, tape
            return
        aside = Tape(once=True)
        token = _active.set((*_active.get(), self.tape))
        try:
            with _redirected([(self.tape, aside), *junk]):
                yield self.tape, aside
        finally:
            _active.reset(token)

    def another(self) -> Exception:
        return DifferentiationError(
            message(
                self.where,
                got="a function that uses other arrays, or returns others, when it is called again",
                need="a function of its arguments, and of arrays that stay what they are",
                mend="keep random draws, counters and the like outside, and pass them in",
            )
        )


def _stands_on(tape: Tape, node: Node) -> bool:
    return node.index < len(tape.nodes) and tape.nodes[node.index] is node


def _closed(tape: Tape, aside: Tape, outs: list) -> list[Node]:
    """The nodes of a tape that what went aside depends on, and results that are such nodes themselves."""
    nodes = [p for node in aside.nodes for p in node.parents if p is not None]
    for o in outs:
        while type(o) is Array:
            if o.tape is tape:
                nodes.append(o.node)
            o = o.value
    return list({id(n): n for n in nodes if not _stands_on(aside, n)}.values())


@contextmanager
def _redirected(pairs: Iterable[tuple[Tape, Tape]]) -> Iterator[None]:
    """Within the block, what is recorded on the first of each pair goes to the other."""
    pairs = list(pairs)
    before = [(tape.open, tape.twins) for tape, _ in pairs]
    for tape, aside in pairs:
        tape.open, tape.twins = aside.nodes, {}
    try:
        yield
    finally:
        for (tape, _), (nodes, twins) in zip(pairs, before, strict=True):
            tape.open, tape.twins = nodes, twins
