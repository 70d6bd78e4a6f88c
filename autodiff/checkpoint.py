"""`checkpoint`: functions whose intermediate values are computed again in the backward sweep."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd.autodiff import devices, tree
from spmd.autodiff.apply import weak
from spmd.autodiff.backward import sweep
from spmd.autodiff.sketch import Sketch, differ, rounding, sketch, slack
from spmd.autodiff.staging.recorder import slot_of
from spmd.autodiff.tape import ACTIVE, Node, Place, Tape, recording
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import innermost, lower, name_of, on, places, refuse_handles, stated, unstated
from spmd.autodiff.transforms import joint
from spmd.errors import DifferentiationError, describe
from spmd.tracebacks import api_boundary, boundary_like

__all__ = ["checkpoint"]


@api_boundary
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
    `fun` must give the same when it is called again: the results of the two runs are compared, rounding apart, by a
    sketch of each, which costs one pass over it. A lambda that is made in a loop sees the last value of the loop's
    variable when it is called again: `lambda y, i=i: ...` keeps the value. On a GPU nothing is waited for: the gradient
    is NaN in place of an error.

    Raises DifferentiationError where the function gives something else when it is called again.

    prevent_cse: for compilers; it changes nothing here.
    policy: None. Which intermediates are kept is said by which functions are checkpointed.
    static_argnums, static_argnames: arguments that are passed as they are, and are never traced.
    """
    if policy is not None:
        raise DifferentiationError.at(
            f"checkpoint of {name_of(fun)}",
            argument="policy",
            got=describe(policy),
            need="None: all intermediate values are computed again",
            mend="checkpoint smaller functions, and leave out what is to be kept",
        )
    names = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)

    @boundary_like(fun)
    def wrapped(*args, **kwargs):
        tapes = ACTIVE.get()
        if not tapes or any(t not in tapes for t in _tapes(tree.leaves((args, kwargs)))):
            return fun(*args, **kwargs)  # nothing is differentiated, or elsewhere: by a tape of another thread
        static = places(static_argnums, len(args))
        fixed = {k: v for k, v in kwargs.items() if k in names}
        _refuse_traced(fun, ([args[n] for n in static], fixed))
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

        return _computed_again(call, leaves, tapes, _where(fun))

    return wrapped


def _refuse_traced(fun: Callable, static: Any) -> None:
    """Raise where a static argument is traced."""
    if innermost(tree.leaves(static)) is not None:
        raise DifferentiationError.at(
            f"checkpoint of {name_of(fun)}",
            argument="static_argnums",
            got="a traced array in a static argument",
            need="static arguments without a gradient",
            mend="leave it out of static_argnums and static_argnames",
        )


def _where(fun: Callable) -> str:
    """A checkpointed function for errors: its name, and the line that defines it."""
    inner = inspect.unwrap(fun)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    run = inner if hasattr(inner, "__code__") else type(inner).__call__  # of an object that is called
    code = getattr(run, "__code__", None)
    return f"checkpoint of {name_of(fun)}" + (f", {code.co_filename}:{code.co_firstlineno}" if code is not None else "")


def _computed_again(call: Callable, leaves: list, tapes: Sequence[Tape], where: str):
    """`call(leaves)`, on each of the tapes (outermost first) as one node, whose pullback runs `call` again.

    It runs with its leaves below all tapes, so that they record only what it closes over. That goes aside, to tell on
    which nodes the results depend, and is dropped.
    """
    if not tapes:
        return call(leaves)
    refuse_handles(leaves, where, "arguments")
    levels = [leaves]  # from the innermost: the leaves as each tape sees them
    for tape in reversed(tapes):
        levels.append([lower(x, tape) for x in levels[-1]])
    *levels, values = levels
    asides = [Tape() for _ in tapes]
    with _redirected(zip(tapes, asides, strict=True)):
        out = call(values)
    outs, out_tree = tree.flatten(out)
    refuse_handles(outs, where, "result")
    for o in outs:
        foreign = [t not in tapes for t in _tapes([o])]
        if sorted(foreign) != foreign:  # what went aside is hidden below a tape that is not known here
            raise _traced_elsewhere(where)
    closed = [_closed(tape, aside, outs) for tape, aside in zip(tapes, asides, strict=True)]
    for tape in reversed(tapes):
        outs = [lower(o, tape) for o in outs]
    first = None
    for i, (tape, seen) in enumerate(zip(tapes, reversed(levels), strict=True)):
        moved = {k: x for k, x in enumerate(seen) if on(x, tape)}
        if moved or closed[i]:
            inner = [t for t, nodes in zip(tapes[i + 1 :], closed[i + 1 :], strict=True) if nodes]
            places = {k: _place(x.node) for k, x in moved.items()}
            first = first or _FirstRun(outs, out_tree)
            again = _Again(call, places, tape, closed[i], inner, where, first)
            pull = functools.partial(again.pull, [lower(x, tape) for x in seen])
            outs = joint(where, tape, [*(x.node for x in moved.values()), *closed[i]], outs, pull)
    return tree.unflatten(out_tree, outs)


def _place(node: Node) -> Place | None:
    return node.place if node.prim is None else None


class _FirstRun:
    """What is kept of the results of a checkpointed function, to tell whether it gives the same when called again."""

    __slots__ = ("sketches", "structure")

    def __init__(self, outs: list, structure: Any):
        self.structure = structure
        self.sketches = [_sketches(o) for o in outs]


def _sketches(x: Any) -> list[Sketch | None]:
    """The sketches of the bare data of a result: one, or those of the blocks of a global array that lie here."""
    data = slot_of(value_of(x))
    parts = getattr(data, "__spmd_parts__", None)
    return [sketch(slot_of(part)) for part in (parts() if parts is not None else [data])]


class _Again:
    """The pullback of a call that is run again. The leaves of the call below the tape, `values`, are not kept here:
    they may be on an outer tape, which then would hold itself.

    moved: the positions of the leaves that are differentiated, and their places where they are leaves of the tape.
    closed: nodes of the tape that the call depends on beside them. Only then is the tape itself kept, and used again:
    arrays that are closed over know no other.
    inner: tapes further in, on which the call records what it closes over, to no use.
    first: the sketches of what the first call gave.
    """

    __slots__ = ("call", "closed", "first", "inner", "moved", "tape", "where")

    def __init__(
        self,
        call,
        moved: dict[int, Place | None],
        tape: Tape,
        closed: list[Node],
        inner,
        where: str,
        first: _FirstRun,
    ):
        self.call = call
        self.moved = moved
        self.tape = tape if closed else None
        self.closed = closed
        self.inner = inner
        self.where = where
        self.first = first

    def pull(self, values: list, gs: list) -> list:
        if self.closed:
            return [unstated(g) for g in self.swept(values, gs)]
        # For tapes further out this is a computation that holds as little as the call itself.
        n = len(values)
        found = _computed_again(lambda xs: self.swept(xs[:n], xs[n:]), [*values, *gs], ACTIVE.get(), self.where)
        return [unstated(g) for g in found]

    def swept(self, values: list, gs: list) -> list:
        """Call again, and sweep back: the cotangents of what moved, and of what is closed over."""
        with self.recording() as (tape, aside):
            full, starts, states = list(values), [], []
            for k, place in self.moved.items():
                x = values[k]
                starts.append(aside.leaf(np.shape(value_of(x)), getattr(x, "dtype", None) or weak(x), place))
                states.append(getattr(x, "state", None))
                full[k] = Array(unstated(x), states[-1], tape, starts[-1])
            outs, structure = tree.flatten(self.call(full))
        for t in reversed(self.inner):
            outs = [lower(o, t) for o in outs]
        proxies = {id(node): aside.leaf(node.shape, node.dtype, _place(node)) for node in self.closed}
        here = set(map(id, aside.nodes))
        there = self.compare(outs, structure, values, aside)

        def own(node: Any) -> Any:
            """The node that stands for one on the sweep's own tape."""
            if node is None or id(node) in here:
                return node
            if id(node) not in proxies:
                raise self.another()
            return proxies[id(node)]

        for node in aside.nodes:
            node.parents = [own(p) for p in node.parents]
        seeds = [(own(o.node), unstated(g)) for o, g in zip(outs, gs, strict=True) if g is not None and on(o, tape)]
        leaves = [*starts, *proxies.values()]
        found = sweep(aside, seeds, leaves, free=True)
        for different in there:
            found = [None if g is None else np.where(different, np.nan, g) for g in found]
        states += [None] * len(proxies)
        return [None if g is None else stated(g, state) for g, state in zip(found, states, strict=True)]

    def compare(self, outs: list, structure: Any, values: list, aside: Tape) -> list[Any]:
        """Raise where the call has given something else than at first, by more than the rounding of what it did.

        Of results on a device it gives booleans that lie there, true where they differ: nothing is waited for.
        """
        if structure != self.first.structure:
            raise self.another()
        tolerance, least, there = None, None, []
        for k, out in enumerate(outs):
            first, second = self.first.sketches[k], _sketches(out)
            if len(first) != len(second):
                raise self.other_value(k, out)
            for before, now in zip(first, second, strict=True):
                if before is None or now is None:
                    if before is not now:
                        raise self.other_value(k, out)
                    continue
                if tolerance is None:
                    tolerance = rounding(getattr(x, "dtype", None) for x in [*aside.nodes, *outs])
                different = differ(before, now, tolerance)
                if devices.is_array(different):
                    there.append(different)
                elif different:
                    least = slack(_kept(values, aside)) if least is None else least
                    if differ(before, now, tolerance, least):
                        raise self.other_value(k, out)
                    maybe = self.other_value(k, out, "by no more than the rounding of the largest numbers there")
                    warnings.warn(str(maybe), RuntimeWarning, stacklevel=2)
        return there

    @contextmanager
    def recording(self) -> Iterator[tuple[Tape, Tape]]:
        """The tape that the call records on, and the one that its nodes go to."""
        junk = [(t, Tape()) for t in self.inner]
        if self.tape is None:
            with recording(once=True) as tape, _redirected(junk):
                yield tape, tape
            return
        aside = Tape(once=True)
        token = ACTIVE.set((*ACTIVE.get(), self.tape))
        try:
            # A pullback may be called by several threads; the tape goes aside for one at a time.
            with self.tape.lock, _redirected([(self.tape, aside), *junk]):
                yield self.tape, aside
        finally:
            ACTIVE.reset(token)

    def other_value(self, k: int, out: Any, how_much: str = "") -> Exception:
        """The error; with how_much, what is told where the difference may be rounding."""
        path = tree.shown_paths(self.first.structure)[k] if len(self.first.sketches) > 1 else ""
        return DifferentiationError.at(
            self.where,
            argument=f"result{path}",
            got=f"other values ({describe(out)}) when it is called again for the backward sweep"
            + (f", {how_much}" if how_much else ""),
            need="the values of its first call, up to rounding: the gradient is that of what is computed again",
            mend="pass in what changes between the calls as an argument: a loop's variable in a lambda "
            "(lambda y, i=i: ..., or an argument of the function), random numbers, counters, arrays that are "
            "written into",
        )

    def another(self) -> Exception:
        return DifferentiationError.at(
            self.where,
            got="a function that uses other arrays, or returns others, when it is called again",
            need="a function of its arguments, and of arrays that stay what they are",
            mend="keep random draws, counters and the like outside, and pass them in",
        )


def _kept(values: list, aside: Tape) -> Iterator[Any]:
    """The arrays that a call was given, and those that its tape has kept."""
    for x in itertools.chain(values, *(node.args for node in aside.nodes)):
        x = slot_of(value_of(x))
        if isinstance(x, np.ndarray | np.generic):
            yield x


def _traced_elsewhere(where: str) -> Exception:
    return DifferentiationError.at(
        where,
        got="a function that closes over an array traced in another thread or greenlet",
        need="arrays traced where the function is called, or arguments",
        mend="pass the array as an argument",
    )


def _tapes(leaves: list) -> Iterator[Tape]:
    """The tapes of some leaves, of all levels."""
    for x in leaves:
        while type(x) is Array:
            if x.tape is not None:
                yield x.tape
            x = x.value


def _closed(tape: Tape, aside: Tape, outs: list) -> list[Node]:
    """The nodes of a tape that what went aside depends on, and results that are such nodes themselves."""
    nodes = [p for node in aside.nodes for p in node.parents if p is not None]
    for o in outs:
        while type(o) is Array:
            if o.tape is tape:
                nodes.append(o.node)
            o = o.value
    here = set(map(id, aside.nodes))
    return list({id(n): n for n in nodes if id(n) not in here}.values())


@contextmanager
def _redirected(pairs: Iterable[tuple[Tape, Tape]]) -> Iterator[None]:
    """Within the block, what is recorded on the first of each pair goes to the other."""
    pairs = list(pairs)
    before = [(tape.open, tape.varied_copies) for tape, _ in pairs]
    for tape, aside in pairs:
        tape.open, tape.varied_copies = aside.nodes, {}
    try:
        yield
    finally:
        for (tape, _), (nodes, varied_copies) in zip(pairs, before, strict=True):
            tape.open, tape.varied_copies = nodes, varied_copies
