"""How a collective is applied: to arrays of a body, traced or not, to numbers, and to cotangents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.allocation import writable
from spmd.autodiff.apply import NO_OPTIONS, weak
from spmd.autodiff.primitive import Primitive
from spmd.autodiff.staging.recorder import slot_of
from spmd.autodiff.tape import ACTIVE, Node, Tape, redirected
from spmd.autodiff.tracer import Array, value_of
from spmd.device import contiguous, copied
from spmd.errors import caller
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.mesh import WORKER, Worker, here
from spmd.operators import algebra
from spmd.operators.base import NUMBERS, Collective, use_application
from spmd.operators.blocks import bare_block, owned_block
from spmd.operators.memo import bounded
from spmd.operators.partial_comm import whole_comm
from spmd.operators.plan_cache import call_of, prepared_for
from spmd.operators.program_lines import write_down
from spmd.operators.sums import Vary
from spmd.operators.varying import admitted, outside, vary
from spmd.state import State, state_of
from spmd.transport.call import LEDGERS, Observer, Origin, Place, place_of
from spmd.transport.handles import Done, Handle, read_only
from spmd.transport.observing import located


def operate(op: Collective, x, frame: FrameType | None = None) -> Any:
    """Apply a collective to the user's x: a traced or bare array, a number, or a pytree of them."""
    worker = WORKER.get() or here(f"spmd.{op.function}")
    frame = frame or sys._getframe(1)
    if type(x) is Array:
        value, tape, state = x.value, x.tape, x.state
        if type(value) is not np.ndarray and isinstance(value, np.generic):
            value = np.asarray(value)
        prepared = state is not None and type(value) is np.ndarray and prepared_for(op, value, state, worker, frame)
        if not prepared or (tape is not None and prepared.admitted is not state):
            return _begin(op, x, worker, frame)()
        fast_run = prepared.fast_run
        block, bound = (
            prepared(worker.comm, value) if fast_run is None else fast_run(worker.comm, value, prepared.general_run)
        )
        if tape is None:
            return Array(block, prepared.state)
        return _recorded(bound, x, block, prepared.state, prepared.place)
    if isinstance(x, np.ndarray | np.generic | int | float | complex) or on_device(x) or frontend(x) is not None:
        return _begin(op, x, worker, frame)()
    leaves, treedef = tree.flatten(x)
    begun = [_begin(op, leaf, worker, frame) for op, leaf in zip(op.over(treedef), leaves, strict=False)]
    return tree.unflatten(treedef, [finish() for finish in begun])


def _begin(op: Collective, x, worker: Worker, frame) -> Callable[[], Any]:
    """Admit one array, start the collective, and say how to finish."""
    if type(x) in NUMBERS:
        number = np.asarray(int(x) if op.adds and type(x) is bool else x)
        handle = _start(op, number, worker, frame)  # no line of a program: it is alike each time
        return lambda: _number(handle.wait()[0], op, worker)
    if type(x) is not Array:
        other = frontend(x)
        if other is not None:
            return other.begin(op, x, worker, frame)
        if not worker.tracked:
            return _begin_bare(op, x, worker, frame)
        x = Array(owned_block(x, op), worker.state())
    x = _admit(op, x, worker)
    if op.adds and x.dtype == bool:
        x = x.astype(np.int64)
    begun = _apply(op, x, worker, frame)
    return lambda: begun()[0]


def _begin_bare(op: Collective, x, worker: Worker, frame) -> Callable[[], Any]:
    """`_begin` in a body whose arrays carry no state. A block that could be written to is borrowed: it is read until
    the collective is over, and copied only by those that hand blocks over as they are."""
    block, borrowed = bare_block(x, op), False
    x = x if isinstance(x, np.ndarray | np.generic) else block  # what came otherwise may share its memory too
    if writable(x) and not on_device(block):
        borrowed = block.flags.c_contiguous
        block = read_only(block.view()) if borrowed else copied(block)
    if block.dtype == bool and op.adds:
        block = block.astype(np.int64)
    begun = launch(op, block, worker, frame, borrowed=borrowed)
    if not borrowed:
        return lambda: begun()[0]

    def finish():
        result = begun()[0]
        return read_only(copied(result)) if np.may_share_memory(result, x) else result

    return finish


def _number(ans, op: Collective, worker: Worker):
    """The result of a collective of Python numbers: a weakly typed number where it is one number."""
    value = ans.item() if ans.shape == () else ans
    return worker.carrying(value, op.out_state(state_of(op.axes)))


def _admit(op: Collective, x: Array, worker: Worker) -> Array:
    """x in the state that the operator takes, or an error that says why not."""
    if x.state is None:
        raise outside(f"spmd.{op.function}", x)
    return vary(x, admitted(op, x, x.state, worker))


def _apply(op: Collective, x, worker: Worker, frame) -> Callable[[], tuple[Any, Collective]]:
    """Start on a block or an Array of any level; recorded where it is traced. No check of states."""
    if type(x) is not Array:
        return launch(op, x, worker, frame)
    if x.tape is None:
        launched = launch(op, x.value, worker, frame)
        state = op.out_state(x.state)

        def finish():
            block, bound = launched()
            return Array(block, state), bound

        return finish
    inner = _apply(op, x.value, worker, frame)

    def finish_traced():
        ans, bound = inner()
        place = place_of(frame) if LEDGERS.get() or worker.program is not None else None
        return _recorded(bound, x, ans, op.out_state(x.state), place), bound

    return finish_traced


def launch(
    op: Collective, x, worker: Worker, frame, needs_grad: list[bool] | None = None, borrowed: bool = False
) -> Callable[[], tuple[Any, Collective]]:
    """Start on a bare block. A number that is varied stays a number, weakly typed.

    frame: from where it was called; None: from the nearest line of the user's above.
    needs_grad: whether the block is differentiated; once finished, whether that of any member is.
    borrowed: whether the block may be written to when the collective is over.
    """
    if worker.program is not None and type(op) is not Vary:
        found = write_down(op, x, worker, frame)
        return lambda: found
    return _start(op, x, worker, frame, needs_grad, borrowed).wait


def _start(
    op: Collective, x, worker: Worker, frame, needs_grad: list[bool] | None = None, borrowed: bool = False
) -> Handle:
    """`launch`: the handle, whose result is the new block and the bound operator."""
    observers = LEDGERS.get()
    if type(op) is Vary:
        if not observers.replays:
            place = worker.recorded_at or place_of(frame or sys._getframe())
            direction = "forward" if worker.recorded_at is None else "backward"
            _observe(observers, worker, Origin("Vary", op.axes, place, direction))
        return Done((x, op))
    if type(x) is not np.ndarray or not x.flags.c_contiguous:
        x = contiguous(x)
    group = worker.group(op.axes)
    op.check(group, x)
    call = call_of(op, x, worker, frame, needs_grad, borrowed)
    if observers:
        call = call.recorded(worker.recorded_at)
        if not observers.replays:
            _observe(observers, worker, call.origin)
    return op.start(worker.comm, group, x, call)


def _observe(observers: Sequence[Observer], worker: Worker, origin: Origin) -> None:
    origin = located(worker.comm, origin)
    for observer in observers:
        observer.operator(worker.index, origin)


class _Located:
    """A collective on a tape, and the user's line that called it: observers name it in the backward sweep."""

    __slots__ = ("axes", "function", "op", "place")

    def __init__(self, op: Collective, place: Place):
        self.op, self.place, self.function, self.axes = op, place, op.function, op.axes

    def pull(self, g: Any, x: Any, y: Any) -> Any:
        worker = WORKER.get() or here(f"spmd.{self.function}")
        before, worker.recorded_at = worker.recorded_at, self.place
        try:
            return self.op.pull(g, x, y)
        finally:
            worker.recorded_at = before

    def defer(self, sweep_state: dict, g: Any, leaf: Node) -> Any:
        return self.op.defer(sweep_state, g, leaf)


_all_located: dict[Any, _Located] = {}


def _located(op: Collective, place: Place) -> Any:
    """A collective that knows a line: one object for each line. It keeps both alive, so that their ids stay unique."""
    key = id(op), id(place[0]), place[1]
    located = _all_located.get(key)
    if located is None:
        located = bounded(_all_located)[key] = _Located(op, place)
    return located


def _recorded(bound: Collective, x: Array, ans: Any, state: State, place: Place | None = None) -> Array:
    """The result of a traced array, on its tape. place: the user's line, if an observer is to know it."""
    op = bound if place is None else _located(bound, place)
    args = (None, op, x.value, ans) if bound.keeps else (None, op, None, None)
    if type(ans) is np.ndarray:
        shape, dtype = ans.shape, ans.dtype
    else:
        bare = value_of(ans)
        shape, dtype = np.shape(bare), weak(bare) if type(slot_of(bare)) in NUMBERS else ans.dtype
    node = Node(_MOVE, _MOVE.rules, (x.node,), args, NO_OPTIONS, shape, dtype)
    x.tape.open.append(node)
    return Array(ans, state, x.tape, node)


def move(op: Collective, g):
    """Apply an operator to a cotangent: its state is right by construction, so nothing is checked."""
    worker = WORKER.get() or here(f"spmd.{op.function}")
    frame, observers = sys._getframe(1), LEDGERS.get()
    if type(op) is Vary and observers.replays and worker.program is None:
        if type(g) is not Array:
            return g
        place = None
        if observers and g.tape is not None and g.node.prim is not None:  # sums for leaves are deferred
            place = worker.recorded_at or place_of(frame)
        return _passed(op, g, op.out_state(g.state), place)
    if type(g) is np.ndarray:
        prepared = prepared_for(op, g, None, worker, caller(frame))
        if prepared:
            return prepared(worker.comm, g)[0]
    return _apply(op, g, worker, frame)()[0]


def _passed(op: Vary, x: Any, state: Any, place: Place | None) -> Any:
    """Varied to a state, which moves nothing: recorded where it is traced."""
    if type(x) is not Array:
        return x
    if x.tape is None:
        return Array(x.value, state)
    value = x.value
    return _recorded(op, x, _passed(op, value, state, place) if type(value) is Array else value, state, place)


_MOVE = Primitive(
    None,
    "collective",
    rules=(lambda g, ans, op, x, y: op.pull(g, x, y),),
    defer=lambda sweep_state, g, leaf, op, x, y: op.defer(sweep_state, g, leaf),
)


def _pull_apart(g: Any, _ans: Any, op: Collective, x: Any, y: Any) -> Any:
    with recorded_apart(here(f"spmd.{op.function}")):
        return op.pull(g, x, y)


_APART = Primitive(None, "collective", rules=(_pull_apart,))


@contextmanager
def recorded_apart(worker: Worker) -> Iterator[list[tuple[Tape, Tape]]]:
    """Inside, a part of a body runs that some workers do not run. Gives the tapes, and those that record it
    meanwhile."""
    pairs = [(tape, Tape(tape.once)) for tape in ACTIVE.get()]
    with whole_comm(worker.comm).uncounted(), redirected(pairs):
        yield pairs
    for tape, side in pairs:
        splice_apart(tape, side)


def axes_of_collectives(tape: Tape) -> set[str]:
    """The axes of the operators that a tape has recorded."""
    return {name for node in tape.nodes if node.prim in (_MOVE, _APART) for name in node.args[1].axes}


def splice_apart(tape: Tape, side: Tape) -> None:
    """Record what a part of a body recorded that some workers do not run: its collectives, and those of its derivatives
    of every order, are not counted."""
    for node in side.nodes:
        if node.prim is _MOVE:
            node.prim, node.pulls = _APART, _APART.rules
        tape.open.append(node)


_functions: Any = SimpleNamespace(
    operate=operate, move=move, across=algebra.across, composed=algebra.composed, meet=algebra.meet
)
use_application(_functions)
