"""Transformations of functions: grad, vjp, jvp and their kin, with the signatures of JAX.

Each opens a tape, lifts the arguments onto it, runs the function and sweeps back. They nest to any order, because a
tape records the rules that run while an outer one is open. Forward mode is the transpose of the transpose: a pullback
is linear in its cotangent, so its own pullback is the push-forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from spmd.autodiff import tracer, tree
from spmd.autodiff.primitive import Primitive
from spmd.autodiff.tape import Bundle, Node, Tape, recording, refusing, sweep
from spmd.autodiff.tracer import Array, find, part, record, value_of
from spmd.errors import ClosureError, DifferentiationError, describe, message

__all__ = [
    "checkpoint",
    "custom_vjp",
    "grad",
    "hessian",
    "hvp",
    "jacfwd",
    "jacrev",
    "jvp",
    "linear_transpose",
    "linearize",
    "stop_gradient",
    "value_and_grad",
    "vjp",
]

_NUMBERS = (int, float, complex)


def lift(tape: Tape, x: Any, where: str, path: Callable[[], str]) -> Array:
    """An argument as a leaf of the tape; `path` says how it is written."""
    if type(x) in _NUMBERS and type(x) is not int:
        return Array(x, tracer.mixing.ambient(), tape, tape.leaf((), tracer.weak(x)))
    dtype = getattr(x, "dtype", None)
    if dtype is None or dtype.kind not in "fc" and dtype.name != "bfloat16":
        raise DifferentiationError(
            message(
                where,
                argument=path(),
                got=describe(x),
                need="an array of floating or complex dtype",
                mend="convert it, x.astype(float) or float(x), or leave it out of argnums",
            )
        )
    leaf = tape.leaf(np.shape(value_of(x)), dtype)
    if type(x) is Array:
        return Array(x if x.tape is not None else x.value, x.state, tape, leaf)
    state = tracer.mixing.ambient()
    if state is not None and isinstance(x, np.ndarray) and x.flags.writeable:
        x = x.copy()  # blocks of a body are shared as they are, so no one may write into one
    return Array(x, state, tape, leaf)


def lower(x, tape: Tape):
    """What lies under the tape: the value, with its state."""
    if type(x) is Array and x.tape is tape:
        return x.value if type(x.value) is Array else _stated(x.value, x.state)
    return x


def _stated(value, state):
    return value if state is None or type(value) is Array else Array(value, state)


def _unstated(g):
    """A cotangent as rules see it: bare, or an array of an outer tape."""
    return g.value if type(g) is Array and g.tape is None else g


def _zeros_like(x):
    return np.zeros_like(value_of(x))


def _lift_all(tape: Tape, argument, where: str, name: Callable[[], str]):
    """The leaves of an argument as leaves of the tape, and its structure."""

    def path(k: int) -> str:
        return name() + "".join(f"[{p!r}]" for p in tree.paths(argument)[k])

    leaves, treedef = tree.flatten(argument)
    return [lift(tape, x, where, functools.partial(path, k)) for k, x in enumerate(leaves)], treedef


def _finish(cotangents: Iterable[Any], leaves: Iterable[Array], given: Iterable[Any] = ()) -> Iterator[Any]:
    """The cotangents of leaves as the caller sees them: zeros where none came, each with the state of its argument,
    and bare ones as arrays of their own, so that writing into one changes no other, nor what was given."""
    seen = {id(g) for g in given}
    for g, leaf in zip(cotangents, leaves, strict=True):
        g = _zeros_like(leaf) if g is None else tracer.mixing.settle(g, leaf.value)
        if leaf.state is None and isinstance(g, np.ndarray):
            if id(g) in seen or not (g.flags.owndata and g.flags.writeable):
                g = g.copy()
            seen.add(id(g))
        yield _stated(g, leaf.state)


def _parameter(fun, n: int) -> str:
    """An argument by its name in the signature, or by its position where it has none."""
    try:
        names = [p.name for p in inspect.signature(fun).parameters.values() if p.kind in (0, 1)]
    except (TypeError, ValueError):
        names = []
    return names[n] if n < len(names) else f"number {n}"


def _names(fun) -> str:
    return getattr(fun, "__name__", None) or type(fun).__name__


def value_and_grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False):
    """A function that returns `fun`'s value and the gradient of that scalar with respect to its arguments.

    fun: returns a real scalar (with has_aux: a pair of it and anything else).
    argnums: which positional arguments to differentiate; each may be a pytree of floating or complex arrays.
    holomorphic: allow a complex result of a holomorphic function.

    The gradient has the structure, shapes, dtypes and states of the arguments. For complex arguments it is that of
    JAX: df/dRe - i df/dIm. Memory is freed as the sweep goes.
    Raises DifferentiationError where the result is no scalar or an argument is not floating.
    """

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        where = f"grad of {_names(fun)}"
        numbers = [argnums] if isinstance(argnums, int) else list(argnums)
        for n in numbers:
            if not -len(args) <= n < len(args):
                raise DifferentiationError(
                    message(
                        where,
                        argument="argnums",
                        got=f"{argnums} with {len(args)} positional arguments",
                        need=f"positions below {len(args)}",
                        mend="pass the arguments to differentiate by position",
                    )
                )
        names = [functools.partial(_parameter, fun, n % len(args)) for n in numbers]
        with recording(once=True) as tape:
            lifted = [_lift_all(tape, args[n], where, name) for n, name in zip(numbers, names, strict=True)]
            full = list(args)
            for n, (xs, treedef) in zip(numbers, lifted, strict=True):
                full[n] = tree.unflatten(treedef, xs)
            out = fun(*full, **kwargs)
            aux = None
            if has_aux:
                out, aux = out
                aux = tree.map(lambda x: lower(x, tape), aux)
            out = _scalar(out, where, holomorphic)
        held = getattr(out, "block", out)  # of a Rooted handle: the scalar at the root, nothing elsewhere
        traced = type(held) is Array and held.tape is tape
        seeds = [(held.node, np.ones_like(value_of(held)))] if traced else []
        leaves = [x for xs, _ in lifted for x in xs]
        found = _finish(sweep(tape, seeds, [x.node for x in leaves], free=True), leaves)
        grads = [tree.unflatten(treedef, [next(found) for _ in xs]) for xs, treedef in lifted]
        value = lower(out, tape) if held is out else out.holding(lower(held, tape))
        return (value, aux) if has_aux else value, grads[0] if isinstance(argnums, int) else tuple(grads)

    return wrapped


def _scalar(out: Any, where: str, holomorphic: bool) -> Any:
    """The result of a function to take the gradient of: one real number."""
    if isinstance(out, _NUMBERS):
        return out
    if getattr(out, "shape", None) != ():
        raise DifferentiationError(
            message(
                where,
                argument="result",
                got=describe(out),
                need="a scalar (shape ())",
                mend="reduce it (x.sum()), or use spmd.jacrev or spmd.vjp",
            )
        )
    if out.dtype.kind == "c" and not holomorphic:
        raise DifferentiationError(
            message(
                where,
                argument="result",
                got=describe(out),
                need="a real scalar",
                mend="take np.real or abs of it, or holomorphic=True for a holomorphic function",
            )
        )
    return out


def grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False):
    """A function that returns the gradient of `fun`; see `value_and_grad`. With has_aux: (gradient, aux)."""
    both = value_and_grad(fun, argnums, has_aux, holomorphic)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        value: Any
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped


def vjp(fun: Callable, *primals, has_aux: bool = False) -> tuple[Any, ...]:
    """`fun(*primals)` and its pullback: the transpose of the derivative there.

    The pullback takes a cotangent of the result's structure and returns a tuple of cotangents, one per primal, of
    the primals' shapes, dtypes and states. It may be called many times. A cotangent of less state than the result is
    varied, one of more is summed. With has_aux, `fun` returns (result, aux) and vjp (result, pullback, aux).
    """
    return pullback_of(fun, primals, has_aux=has_aux)


def pullback_of(fun: Callable, primals: Sequence[Any], *, has_aux: bool = False, once: bool = False) -> tuple[Any, ...]:
    """As `vjp`; with `once` the pullback serves one time, and memory is freed as it goes."""
    where = f"vjp of {_names(fun)}"
    with recording(once) as tape:
        lifted, treedef = _lift_all(tape, tuple(primals), where, lambda: "primals")
        out = fun(*tree.unflatten(treedef, lifted))
        aux = None
        if has_aux:
            out, aux = out
            aux = tree.map(lambda x: lower(x, tape), aux)
    outs, out_tree = tree.flatten(out)

    def pullback(cotangent):
        gs = _match(cotangent, outs, out_tree, where)
        seeds = [(o.node, g) for o, g in zip(outs, gs, strict=True) if type(o) is Array and o.tape is tape]
        found = sweep(tape, seeds, [x.node for x in lifted], free=once)
        return tree.unflatten(treedef, _finish(found, lifted, gs))

    pullback.tape = tape  # type: ignore[attr-defined]
    value = tree.unflatten(out_tree, [lower(o, tape) for o in outs])
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
        shape = np.shape(value_of(o))
        if np.shape(value_of(g)) != shape:
            raise DifferentiationError(
                message(
                    f"pullback, {where}",
                    argument="cotangent",
                    got=describe(g),
                    need=f"shape {list(shape)}, that of the result",
                    mend="pass np.broadcast_to(g, shape) if one number is meant for all",
                )
            )
        if not hasattr(g, "dtype"):
            g = np.asarray(g, dtype=getattr(o, "dtype", None))
        matched.append(_unstated(tracer.mixing.bring(g, None, o.state) if type(o) is Array else g))
    return matched


def jvp(fun: Callable, primals: Sequence[Any], tangents: Sequence[Any]):
    """`fun(*primals)` and its directional derivative along `tangents` (same structure), as a pair."""
    out, push = linearize(fun, *primals)
    return out, push(*tangents)


def linearize(fun: Callable, *primals) -> tuple[Any, Any]:
    """`fun(*primals)` and its push-forward, a linear function of the tangents that may be called many times."""
    where = f"jvp of {_names(fun)}"
    out, pull = vjp(fun, *primals)
    zeros = tree.map(lambda o: _stated(_zeros_like(o), getattr(o, "state", None)), out)
    _, pullpull = vjp(pull, zeros)

    def push(*tangents):
        _check_tangents(where, primals, tangents)
        return pullpull(tangents)[0]

    push.tape = pull.tape  # type: ignore[attr-defined]
    return out, push


def _varying(x) -> frozenset[str]:
    """The axes that an array varies over."""
    state = getattr(x, "state", None)
    return frozenset() if state is None else state.varying


def _check_tangents(where: str, primals: Sequence[Any], tangents: Sequence[Any]) -> None:
    """Raise where tangents do not fit their primals. A cotangent that varies more is summed; a tangent has no sum."""
    (xs, wanted), (ts, given) = tree.flatten(tuple(primals)), tree.flatten(tuple(tangents))
    if given != wanted:
        raise DifferentiationError(
            message(
                where,
                argument="tangents",
                got=f"structure {given}",
                need=f"that of the primals, {wanted}",
                mend="pass one tangent per primal, each of the same structure",
            )
        )
    for x, t in zip(xs, ts, strict=True):
        if np.shape(value_of(t)) != np.shape(value_of(x)) or _varying(t) - _varying(x):
            raise DifferentiationError(
                message(
                    where,
                    argument="tangents",
                    got=f"{describe(t)} for a primal that is {describe(x)}",
                    need="a tangent of the primal's shape, which varies over no other axes",
                    mend="spmd.pvary(primal, axis_name) makes the primal one value per worker",
                )
            )


def _one_by_one(where: str, args: Any, outs: Any, tape: Tape) -> None:
    """Raise where entries of a Jacobian would mix workers: unit vectors are seeded on all of them at once."""
    states = {_varying(x) for x in (*tree.leaves(args), *tree.leaves(outs))}
    moves = any(node.prim is not None and node.prim.owe is not None for node in tape.nodes)
    if len(states) > 1 or (moves and states != {frozenset()}):
        raise DifferentiationError(
            message(
                where,
                got="a function that communicates, of arrays of which some vary over workers",
                need="Invariant arguments and results, or a function of each worker's own block",
                mend="take the Jacobian outside of the map, where arrays are global; "
                "or use spmd.vjp, whose cotangents and sums are well defined",
            )
        )


def linear_transpose(fun: Callable, *primals):
    """The transpose of a linear function, given arrays of its arguments' shapes: cotangent -> tuple of cotangents."""
    return vjp(fun, *tree.map(lambda x: _stated(_zeros_like(x), getattr(x, "state", None)), primals))[1]


def _basis(x):
    """The unit arrays of x's shape, first index slowest."""
    data = value_of(x)
    for i in range(np.size(data)):
        unit = np.zeros(np.shape(data), getattr(data, "dtype", float))
        unit.reshape(-1)[i] = 1
        yield unit


def jacrev(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False):
    """The Jacobian by reverse mode, a row per entry of the result: (*result, *argument) for each pair of leaves."""

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

        def part(*chosen):
            full = list(args)
            for n, a in zip(numbers, chosen, strict=True):
                full[n] = a
            return fun(*full, **kwargs)

        chosen = [args[n] for n in numbers]
        out, pull, *aux = vjp(part, *chosen, has_aux=has_aux)
        _one_by_one(f"jacrev of {_names(fun)}", chosen, out, pull.tape)
        outs, out_tree = tree.flatten(out)
        for o in outs:
            if np.iscomplexobj(value_of(o)) and not holomorphic:
                raise DifferentiationError(
                    message(
                        f"jacrev of {_names(fun)}",
                        got=describe(o),
                        need="real results",
                        mend="holomorphic=True for a holomorphic function",
                    )
                )
        rows = []
        for k, o in enumerate(outs):
            units = []
            for unit in _basis(o):
                cotangent = [unit if j == k else _zeros_like(p) for j, p in enumerate(outs)]
                units.append(pull(tree.unflatten(out_tree, cotangent)))
            shape = np.shape(value_of(o))
            rows.append(_stack_rows(units, shape, args, numbers))
        jacobian = tree.unflatten(out_tree, [r[0] if isinstance(argnums, int) else r for r in rows])
        return (jacobian, aux[0]) if has_aux else jacobian

    return wrapped


def _stack_rows(units: list, shape: tuple[int, ...], args, numbers):
    """Cotangents of unit results, stacked along the result's dimensions."""
    if not units:
        return tree.map(
            lambda x: np.zeros(shape + np.shape(value_of(x)), value_of(x).dtype), tuple(args[n] for n in numbers)
        )
    return tree.map(lambda *gs: np.reshape(np.stack(gs), shape + gs[0].shape), *units)


def jacfwd(fun: Callable, argnums: int = 0):
    """The Jacobian by forward mode, a column per entry of the argument: shape (*result, *argument) per result leaf."""

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        x = args[argnums]

        def part(a):
            return fun(*args[:argnums], a, *args[argnums % len(args) + 1 :], **kwargs)

        out, push = linearize(part, x)
        _one_by_one(f"jacfwd of {_names(fun)}", x, out, push.tape)
        columns = [push(unit) for unit in _basis(x)]
        shape = np.shape(value_of(x))
        if not columns:
            return tree.map(lambda o: np.zeros(np.shape(value_of(o)) + shape, value_of(o).dtype), out)
        return tree.map(lambda *cs: np.reshape(np.stack(cs, axis=-1), cs[0].shape + shape), *columns)

    return wrapped


def hessian(fun: Callable, argnums: int | Sequence[int] = 0):
    """The matrix of second derivatives of a function: the Jacobian of the Jacobian."""
    return jacrev(jacrev(fun, argnums), argnums)


def hvp(fun: Callable, primals: Sequence[Any], tangents: Sequence[Any]):
    """The Hessian of a real scalar function at `primals` applied to `tangents`, without forming it: a tuple.

    The Hessian is symmetric, so that this is one gradient and one pullback of it.
    """
    argnums = tuple(range(len(primals)))
    _, pull = vjp(grad(fun, argnums), *primals)
    return pull(tuple(tangents))


def stop_gradient(x):
    """x (a pytree of arrays) without its derivative: the same values and states, constant from here on."""

    def stop(leaf):
        return _stated(value_of(leaf), leaf.state) if type(leaf) is Array else leaf

    return tree.map(stop, x)


# Functions that bring their own pullback

_JOINT = Primitive(None, "joint", joint=lambda bundle, pull: pull(bundle))


def joint(tape: Tape, parents: list[Array], outs: list, pull: Callable[[list], Sequence[Any]]) -> list:
    """Record results that one pullback serves: `pull(cotangents, None where none came)` gives those of `parents`.

    Each of `outs` is a value of the level below the tape; each comes back as an Array on the tape.
    """

    def pull_bundle(bundle: Bundle):
        return pull([bundle.parts.get(k) for k in range(len(outs))])

    node = record(tape, _JOINT, [p.node if p.tape is tape else None for p in parents], (pull_bundle,), (), None)
    results = []
    for k, out in enumerate(outs):
        if getattr(out, "dtype", None) is None or out.dtype.kind not in "fcV":
            results.append(out)
            continue
        state = out.state if type(out) is Array else tracer.mixing.ambient()
        results.append(part(node, k, _unstated(out), state, tape))
    return results


class custom_vjp:
    """A function with its own derivative: `f.defvjp(fwd, bwd)`, as in JAX.

    fwd(*args) -> (result, residuals); bwd(*nondiff_args, residuals, cotangent) -> a tuple of cotangents, one per
    differentiable argument (None for zero). A cotangent in more state than its argument is summed over those axes.
    Arguments are positional; the functions must not use arrays traced outside of them.
    """

    def __init__(self, fun: Callable, nondiff_argnums: Sequence[int] = ()):
        self.fun = fun
        self.nondiff = tuple(nondiff_argnums)
        self.fwd: Callable | None = None
        self.bwd: Callable | None = None
        functools.update_wrapper(self, fun)

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args):
        where = f"custom_vjp {_names(self.fun)}"
        if self.fwd is None or self.bwd is None:
            raise DifferentiationError(
                message(where, got="no rule", need="fwd and bwd", mend="f.defvjp(fwd, bwd) before the first call")
            )
        chosen = [i for i in range(len(args)) if i not in self.nondiff]
        leaves, treedef = tree.flatten(tuple(args[i] for i in chosen))
        tape = _top(leaves)
        if tape is None:
            return self.fun(*args)
        fwd, bwd, fixed = self.fwd, self.bwd, [args[i] for i in self.nondiff]

        def run(values):
            full = list(args)
            for i, a in zip(chosen, tree.unflatten(treedef, values), strict=True):
                full[i] = a
            return fwd(*full)

        def back(residuals, cotangent):
            gs = bwd(*fixed, residuals, cotangent)
            return _cotangent_leaves(gs, treedef, where)

        return _with_pullback(tape, leaves, run, back, where)


def checkpoint(fun: Callable) -> Callable:
    """`fun`, whose intermediate values are not kept but computed again in the backward sweep."""

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        leaves, treedef = tree.flatten((args, kwargs))
        tape = _top(leaves)
        if tape is None:
            return fun(*args, **kwargs)
        moved = [i for i, x in enumerate(leaves) if type(x) is Array and x.tape is not None]

        def rebuild(values, chosen):
            full = list(values)

            def call(*xs):
                for i, x in zip(moved, xs, strict=True):
                    full[i] = x
                a, k = tree.unflatten(treedef, full)
                return fun(*a, **k)

            return call(*chosen) if chosen is not None else call

        def run(values):
            return fun(*(t := tree.unflatten(treedef, values))[0], **t[1]), values

        def back(values, cotangent):
            _, pull = vjp(rebuild(values, None), *(values[i] for i in moved))
            gs: list[Any] = [None] * len(values)
            for i, g in zip(moved, pull(cotangent), strict=True):
                gs[i] = g
            return gs

        return _with_pullback(tape, leaves, run, back, f"checkpoint of {_names(fun)}")

    return wrapped


def _top(leaves) -> Tape | None:
    tapes = [x.tape for x in find(leaves, []) if x.tape is not None]
    return max(tapes, key=lambda t: t.level) if tapes else None


def _with_pullback(tape: Tape, leaves: list, run: Callable, back: Callable, where: str):
    """Run below the tape, and record the results with `back(residuals, cotangent)` as their pullback."""
    with refusing(tape.level, lambda: _closure(where)):
        out, residuals = run([lower(x, tape) for x in leaves])
    outs, out_tree = tree.flatten(out)

    def pull(gs):
        full = [
            _stated(_zeros_like(o) if g is None else g, getattr(o, "state", None))
            for g, o in zip(gs, outs, strict=True)
        ]
        found = back(residuals, tree.unflatten(out_tree, full))
        for k, (g, x) in enumerate(zip(found, leaves, strict=True)):
            if g is not None and np.shape(value_of(g)) != np.shape(value_of(x)):
                raise _misshapen(g, x, where, k)
        return [
            None if g is None or type(x) is not Array else _unstated(tracer.mixing.bring(g, None, x.state))
            for g, x in zip(found, leaves, strict=True)
        ]

    parents = [x if type(x) is Array else Array(x) for x in leaves]
    return tree.unflatten(out_tree, joint(tape, parents, outs, pull))


def _closure(where: str) -> Exception:
    return ClosureError(
        message(
            where,
            got="a function that uses an array traced outside of it",
            need="functions that use their arguments only",
            mend="pass the array as an argument",
        )
    )


def _misshapen(g, x, where: str, k: int) -> Exception:
    return DifferentiationError(
        message(
            where,
            argument=f"cotangent of leaf {k}",
            got=describe(g),
            need=f"shape {list(np.shape(value_of(x)))}, that of the argument",
            mend="sum it over the dimensions that were broadcast",
        )
    )


def _cotangent_leaves(gs, treedef, where: str) -> list:
    """The leaves of a backward function's result, None standing for zeros of a whole argument."""
    children = treedef.children()
    if not isinstance(gs, tuple | list) or len(gs) != len(children):
        raise DifferentiationError(
            message(
                where,
                argument="result of bwd",
                got=describe(gs),
                need=f"a tuple of {len(children)} cotangents",
                mend="return one per differentiable argument, None for zero",
            )
        )
    leaves: list[Any] = []
    for g, child in zip(gs, children, strict=True):
        leaves += [None] * child.num_leaves if g is None else child.flatten_up_to(g)
    return leaves


__all__ += ["Node", "joint", "lift", "lower"]
