"""`checkpoint`: functions whose intermediate values are computed again in the backward sweep."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff import devices, tree
from spmd.autodiff.apply import weak
from spmd.autodiff.backward import sweep
from spmd.autodiff.dropping import recorded_args
from spmd.autodiff.signatures import Parameters, Result
from spmd.autodiff.sketch import Sketch, differ, rounding, sketch, slack
from spmd.autodiff.staging.recorder import slot_of
from spmd.autodiff.tape import ACTIVE, Node, Place, Tape, recording, redirected
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import innermost, lower, name_of, on, places, refuse_handles, stated, unstated
from spmd.autodiff.transforms import joint
from spmd.errors import DifferentiationError, describe
from spmd.tracebacks import api_boundary, boundary_like

__all__ = ["FirstRun", "Replay", "checkpoint", "closure_nodes", "place_of", "recomputed", "sketches", "traced_by"]


@api_boundary
def checkpoint(
    fun: Callable[Parameters, Result],
    *,
    prevent_cse: bool = True,
    policy: None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[Parameters, Result]:
    """`fun`, whose intermediate values are not kept but computed again in the backward sweep, as jax.checkpoint.

    The tape keeps the inputs: the arguments, and traced arrays that `fun` closes over. A chain of n steps in √n
    checkpointed blocks holds O(√n) arrays. Outer differentiations checkpoint the sweep of the block too.
    `fun` must return the same values in both runs, up to rounding. Sketches of the results are compared, at the cost of
    one pass over them. A lambda in a loop sees the last value of the loop variable in the second run:
    `lambda y, i=i: ...` binds it. On a GPU there is no wait: the gradient becomes NaN in place of an error.

    Raises DifferentiationError where the second run returns different values.

    prevent_cse: for compilers; it changes nothing here.
    policy: None. To keep some intermediate values, checkpoint smaller functions.
    static_argnums, static_argnames: arguments that are passed unchanged, and are never traced.

        >>> runs = []
        >>> root = spmd.checkpoint(lambda x: (runs.append("run"), np.sqrt(x))[1])
        >>> spmd.grad(root)(4.0), len(runs)
        (np.float64(0.25), 2)
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
        if not tapes or any(t not in tapes for t in traced_by(tree.leaves((args, kwargs)))):
            return fun(*args, **kwargs)  # nothing is differentiated, or elsewhere: by a tape of another thread
        static = places(static_argnums, len(args))
        static_kwargs = {k: v for k, v in kwargs.items() if k in names}
        _refuse_traced(fun, ([args[n] for n in static], static_kwargs))
        traced_positions = [i for i in range(len(args)) if i not in static]
        traced_kwargs = {k: v for k, v in kwargs.items() if k not in names}
        leaves, treedef = tree.flatten(([args[i] for i in traced_positions], traced_kwargs))
        template = [a if i in static else None for i, a in enumerate(args)]

        def call(values):
            traced_args, more = tree.unflatten(treedef, values)
            arguments = list(template)
            for i, a in zip(traced_positions, traced_args, strict=True):
                arguments[i] = a
            return fun(*arguments, **more, **static_kwargs)  # type: ignore[call-arg]

        return recomputed(call, leaves, tapes, _where(fun))

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


def recomputed(call: Callable, leaves: list, tapes: Sequence[Tape], where: str, loop: Any = None):
    """`call(leaves)`, on each of the tapes (outermost first) as one node, whose pullback runs `call` again.

    loop: what runs the call first, and makes its pullback, if that is a loop whose steps are recorded one by one.

    It runs with its leaves below all tapes, so that these record only what it closes over. That goes to side tapes,
    which show on which nodes the results depend, and are dropped.
    """
    if not tapes:
        return call(leaves)
    refuse_handles(leaves, where, "arguments")
    levels = [leaves]  # from the innermost: the leaves as each tape sees them
    for tape in reversed(tapes):
        levels.append([lower(x, tape) for x in levels[-1]])
    *levels, values = levels
    out, closed = _first_run(call, values, tapes) if loop is None else loop.first_run(values, tapes)
    outs, out_tree = tree.flatten(out)
    refuse_handles(outs, where, "result")
    for o in outs:
        foreign = [t not in tapes for t in traced_by([o])]
        if sorted(foreign) != foreign:  # a recorded result is hidden below a tape of another thread
            raise _traced_elsewhere(where)
    for tape in reversed(tapes):
        outs = [lower(o, tape) for o in outs]
    first = None
    for i, (tape, level_leaves) in enumerate(zip(tapes, reversed(levels), strict=True)):
        differentiated = {k: x for k, x in enumerate(level_leaves) if on(x, tape)}
        if differentiated or closed[i]:
            inner = [t for t, nodes in zip(tapes[i + 1 :], closed[i + 1 :], strict=True) if nodes]
            places = {k: place_of(x.node) for k, x in differentiated.items()}
            first = first or FirstRun([sketches(o) for o in outs], out_tree)
            again = (Replay if loop is None else loop.replay)(call, places, tape, closed[i], inner, where, first)
            nodes = [*(x.node for x in differentiated.values()), *closed[i]]
            kept = [lower(x, tape) for x in level_leaves]
            outs = joint(where, tape, nodes, outs, again.pull, kept=kept, sums=loop is not None)
    return tree.unflatten(out_tree, outs)


def _first_run(call: Callable, values: list, tapes: Sequence[Tape]) -> tuple[Any, list[list[Node]]]:
    """The results, and of each tape the nodes on which they depend."""
    side_tapes = [Tape() for _ in tapes]
    with redirected(zip(tapes, side_tapes, strict=True)):
        out = call(values)
    outs = tree.leaves(out)
    return out, [closure_nodes(tape, side, outs) for tape, side in zip(tapes, side_tapes, strict=True)]


def place_of(node: Node) -> Place | None:
    return node.place if node.prim is None else None


class FirstRun(NamedTuple):
    """Sketches of the results of the first run, to compare with the second, and their structure."""

    sketches: list[list[Sketch | None]]
    structure: Any


def sketches(x: Any) -> list[Sketch | None]:
    """The sketches of a result: one, or one for each local block of a global array."""
    data = slot_of(value_of(x))
    parts = getattr(data, "__spmd_parts__", None)
    return [sketch(slot_of(part)) for part in (parts() if parts is not None else [data])]


class Replay:
    """The pullback of a checkpointed call, which runs the call again.

    It does not keep the leaves below the tape: they may be on an outer tape, which would then refer to itself.

    differentiated: by position, the differentiated leaves, and their places if they are leaves of the tape.
    closed: other nodes of the tape on which the call depends.
    inner: inner tapes, on which the call records what it closes over; that is discarded. Only if there are any of both
    is the tape itself kept: arrays that the call closes over refer to it, or must be of an inner one.
    first: the sketches of the first run's results.
    """

    __slots__ = ("call", "closed", "differentiated", "first", "inner", "tape", "where")

    def __init__(
        self,
        call,
        differentiated: dict[int, Place | None],
        tape: Tape,
        closed: list[Node],
        inner,
        where: str,
        first: FirstRun,
    ):
        self.call = call
        self.differentiated = differentiated
        self.tape = tape if closed or inner else None
        self.closed = closed
        self.inner = inner
        self.where = where
        self.first = first

    def pull(self, values: list, gs: list) -> list:
        if self.closed:
            return [unstated(g) for g in self.swept(values, gs)]
        # For tapes further out this is a computation that holds as little as the call itself.
        n = len(values)
        leaf_cotangents = recomputed(lambda xs: self.swept(xs[:n], xs[n:]), [*values, *gs], ACTIVE.get(), self.where)
        return [unstated(g) for g in leaf_cotangents]

    def swept(self, values: list, gs: list) -> list:
        """Call again and sweep back: the cotangents of the differentiated leaves and of the closed-over nodes."""
        with self.recording() as (tape, side_tape):
            arguments, leaf_nodes, states = list(values), [], []
            for k, place in self.differentiated.items():
                x = values[k]
                leaf_nodes.append(side_tape.leaf(np.shape(value_of(x)), getattr(x, "dtype", None) or weak(x), place))
                states.append(getattr(x, "state", None))
                arguments[k] = Array(unstated(x), states[-1], tape, leaf_nodes[-1])
            outs, structure = tree.flatten(self.call(arguments))
        for t in reversed(self.inner):
            outs = [lower(o, t) for o in outs]
        proxies = {id(node): side_tape.leaf(node.shape, node.dtype, place_of(node)) for node in self.closed}
        side_ids = set(map(id, side_tape.nodes))
        device_flags = self.compare(self.first, outs, structure, values, side_tape)

        def local_node(node: Any) -> Any:
            """The node on the side tape that stands for a given node."""
            if node is None or id(node) in side_ids:
                return node
            if id(node) not in proxies:
                raise self.different_function()
            return proxies[id(node)]

        for node in side_tape.nodes:
            node.parents = [local_node(p) for p in node.parents]
        pairs = [(o, g) for o, g in zip(outs, gs, strict=True) if g is not None and on(o, tape)]
        seeds = [(local_node(o.node), unstated(g)) for o, g in pairs]
        leaves = [*leaf_nodes, *proxies.values()]
        leaf_cotangents = sweep(side_tape, seeds, leaves, free=True)
        for different in device_flags:
            leaf_cotangents = [None if g is None else np.where(different, np.nan, g) for g in leaf_cotangents]
        states += [None] * len(proxies)
        return [None if g is None else stated(g, state) for g, state in zip(leaf_cotangents, states, strict=True)]

    def compare(self, first: FirstRun, outs: list, structure: Any, values: list, side_tape: Tape) -> list[Any]:
        """Raise if the second run's results differ from the first's by more than rounding.

        For results on a device it returns booleans on the device, true where they differ, without a wait.
        """
        if structure != first.structure:
            raise self.different_function()
        tolerance, rounding_slack, device_flags = None, None, []
        for k, out in enumerate(outs):
            known, second = first.sketches[k], sketches(out)
            if len(known) != len(second):
                raise self.different_value(k, out)
            for before, now in zip(known, second, strict=True):
                if before is None or now is None:
                    if before is not now:
                        raise self.different_value(k, out)
                    continue
                if tolerance is None:
                    tolerance = rounding(getattr(x, "dtype", None) for x in [*side_tape.nodes, *outs])
                different = differ(before, now, tolerance)
                if devices.is_array(different):
                    device_flags.append(different)
                elif different:
                    if rounding_slack is None:
                        rounding_slack = slack(_kept_arrays(values, side_tape))
                    if differ(before, now, tolerance, rounding_slack):
                        raise self.different_value(k, out)
                    maybe = self.different_value(k, out, "by no more than the rounding of the largest numbers there")
                    warnings.warn(str(maybe), RuntimeWarning, stacklevel=2)
        return device_flags

    redirected = staticmethod(redirected)

    @contextmanager
    def recording(self) -> Iterator[tuple[Tape, Tape]]:
        """The tape on which the call records, and the one that gets its nodes."""
        if self.tape is None:
            with recording(once=True) as tape:
                yield tape, tape
            return
        side_tape, discarded = Tape(once=True), [(t, Tape()) for t in self.inner]
        token = ACTIVE.set((*ACTIVE.get(), self.tape, *self.inner))
        try:
            # Several threads may call a pullback; one at a time redirects the tape.
            with self.tape.lock, self.redirected([(self.tape, side_tape), *discarded]):
                yield self.tape, side_tape
        finally:
            ACTIVE.reset(token)

    def different_value(self, k: int, out: Any, how_much: str = "") -> Exception:
        """The error; how_much: the text of a warning, if the difference may be rounding."""
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

    def different_function(self) -> Exception:
        return DifferentiationError.at(
            self.where,
            got="a function that uses other arrays, or returns others, when it is called again",
            need="a function of its arguments, and of arrays that stay what they are",
            mend="keep random draws, counters and the like outside, and pass them in",
        )


def _kept_arrays(values: list, side_tape: Tape) -> Iterator[Any]:
    """The arguments of a call that are arrays, and the arrays that its tape keeps."""
    for x in itertools.chain(values, *(recorded_args(node) for node in side_tape.nodes)):
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


def traced_by(leaves: list) -> Iterator[Tape]:
    """The tapes of some leaves, of all levels."""
    for x in leaves:
        while type(x) is Array:
            if x.tape is not None:
                yield x.tape
            x = x.value


def closure_nodes(tape: Tape, side_tape: Tape, outs: list) -> list[Node]:
    """The nodes of a tape on which the side tape or the results depend."""
    nodes = [p for node in side_tape.nodes for p in node.parents if p is not None]
    for o in outs:
        while type(o) is Array:
            if o.tape is tape:
                nodes.append(o.node)
            o = o.value
    side_ids = set(map(id, side_tape.nodes))
    return list({id(n): n for n in nodes if id(n) not in side_ids}.values())
