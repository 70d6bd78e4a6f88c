"""What an operator is: one frozen dataclass from which everything else about it is derived.

A `Collective` says which states it takes and gives, what moves, and what comes of it. An `Operator` is a linear one
together with its adjoint; its tape rule, algebra and tests follow from `H`. Along each of its axes an operator maps

    I -> V, V -> I, V -> V, or to and from a Rooted handle,

and is the identity on the states along all other axes. Its adjoint is relative to the inner product of `spmd.state`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, wraps
from itertools import pairwise
from math import prod
from operator import index
from types import FrameType
from typing import Any, ClassVar, TypeVar

import numpy as np

from spmd.autodiff import tracer, tree
from spmd.autodiff.admission import admit, admit_dtype
from spmd.autodiff.allocation import writable
from spmd.autodiff.apply import NO_OPTIONS, weak
from spmd.autodiff.primitive import Primitive
from spmd.autodiff.staging.program import COMM
from spmd.autodiff.staging.recorder import is_slot, slot_of
from spmd.autodiff.tape import Future, Node
from spmd.autodiff.tracer import Array, Mixing, value_of
from spmd.device import COPIED, contiguous, copied, home, joined, owned, stacked, zeros
from spmd.errors import (
    ClosureError,
    DifferentiationError,
    LayoutError,
    StateError,
    all_of,
    axes_of,
    caller,
    describe,
    message,
    one_or_all,
)
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.kernels.cpu.moves import joiner
from spmd.kernels.memory import pool
from spmd.kernels.parallel import split_work
from spmd.layout import block_sizes, offsets
from spmd.mesh import WORKER, Worker, here
from spmd.operators.algebra import Linear, Term, across, composed, meet
from spmd.operators.terms import is_share, repeated_terms, warn_of_term
from spmd.replicas.records import Source, source_of
from spmd.replicas.verify import verify_replicas
from spmd.state import INVARIANT, VARYING, State, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.base import Comm
from spmd.transport.call import LEDGERS, Call, Group, Shape
from spmd.transport.handles import Handle, Ready, sealed
from spmd.transport.plan import Eager, Make, Way

__all__ = [
    "Called",
    "Collective",
    "Operator",
    "Vary",
    "admitted",
    "block",
    "bounded",
    "each_leaf",
    "everywhere",
    "interned",
    "joining",
    "launch",
    "move",
    "named",
    "operate",
    "outside",
    "owned_block",
    "passing",
    "rebound",
    "vary",
    "varying",
    "verify",
]

_NUMBERS = (bool, int, float, complex)

C = TypeVar("C", bound="Collective")
F = TypeVar("F", bound=Callable[..., Any])
Launched = tuple[Handle, Callable[[Any], tuple[Any, "Collective"]]]


class Called:
    """What the user called: the name of the function, and which leaf of which tree the operator is applied to.

    forward: of an operator that a backward sweep applies, the function whose adjoint that is.
    """

    __slots__ = ("forward", "function", "leaf")

    def __init__(self, function: str, leaf: tree.Leaf | None = None, forward: str = ""):
        self.function = function
        self.leaf = leaf
        self.forward = forward

    def _key(self) -> tuple[Any, ...]:
        return self.function, self.leaf, self.forward

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Called) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True)
class Collective:
    """Something that the workers along `axes` do together.

    called: what the user called, where that is another function, or a tree. It is part of what all members agree on.
    function: the name of the function that users write. source and target: the state along the axes that it takes
    and gives. adds: it refuses an Invariant array (which would be multiplied), others insert `Vary`.
    alike: whether all members must bring blocks of one shape (None: not even of as many dimensions).
    """

    axes: tuple[str, ...]
    called: Called | None = field(default=None, kw_only=True, repr=False)

    function: ClassVar[str]
    source: ClassVar[str] = VARYING
    target: ClassVar[str] = VARYING
    adds: ClassVar[bool] = False
    alike: ClassVar[bool | None] = False

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        """Start it on this worker's block. Gives the handle, and what turns its result into this worker's new
        block and the operator bound to the shapes it met."""
        raise NotImplementedError

    def eager(self, group: Group, x: np.ndarray) -> Eager | None:
        """What there is to it for blocks like this one, if all of it moves at once. None: that is to be left to
        `launch`. Where there is a way, it gives what `launch` gives."""
        return None

    def check(self, group: Group, x: np.ndarray) -> None:
        """Raise where this worker's block cannot be right, before anyone is asked."""

    def pull(self, g, x, ans):
        """The cotangent of this worker's block, given that of the result."""
        raise NotImplementedError

    keeps: ClassVar[bool] = True
    """Whether `pull` needs the block and the result."""

    def owe(self, shared: dict, g) -> Future | None:
        """The cotangent of a leaf, if it may come later. shared: what a sweep's debts have in common, and the leaf."""
        return None

    @cached_property
    def detail(self) -> str:
        """The parameters that all members must agree on."""
        own = (f for f in fields(self) if f.name not in ("axes", "called", *self.private))
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in own)

    def backward(self, op: C) -> C:
        """An operator that the backward sweep applies on behalf of this one. It knows what was called, and so is the
        same on all workers where this one was."""
        called = self.called or Called(self.function)
        forward = f"the adjoint of {called.forward}" if called.forward else called.function
        return called_as(op, Called(op.function, called.leaf, forward))

    def over(self, structure: Any) -> tuple[Any, ...]:
        """The collective for each leaf of a tree, and for the tree as a whole at the end."""
        try:
            return _over(self, structure)
        except TypeError:  # keys or metadata that cannot be hashed
            return _of_leaves(self, structure)

    private: ClassVar[tuple[str, ...]] = ()
    """Parameters that may differ between workers."""

    def takes(self, axis: str) -> str:
        """The state along one of the axes that it takes."""
        return self.source

    @cached_property
    def admits(self) -> dict[State, State]:
        """The state in which it takes an array, by that of the array; filled as they come up."""
        return {}

    @cached_property
    def calls(self) -> dict[Any, Call]:
        """What was called so far, by the line and the block."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """What makes it, without what it has found out."""
        found = {
            n for n in self.__dict__ if n.startswith("kept ") or type(getattr(type(self), n, None)) is cached_property
        }
        return {name: value for name, value in self.__dict__.items() if name not in found}

    def out_state(self, state: State) -> State:
        """The state of the result of an array in `state`."""
        return _after(self.target, self.axes, state)


@lru_cache(maxsize=4096)
def _after(target: str, axes: tuple[str, ...], state: State) -> State:
    return state_of(state.varying - set(axes) if target == INVARIANT else state.varying | set(axes))


_BACK = "kept back"
"""Where an operator keeps its adjoint, and what the backward sweep applies in its place."""


class Operator(Collective, Linear):
    """A linear collective, declared with its adjoint.

    Operators are frozen dataclasses; those that add no field inherit what that takes, which keeps the import quick.

    `A.H` is the adjoint in the state-aware inner product, `A.T` the transpose: equal, because data movement is real.
    `A @ B`, `A + B`, `2 * A` are operators too (`spmd.operators.algebra`).
    The adjoint of a bound operator gives back exactly the blocks that came in; that of an unbound one assumes
    balanced blocks.
    """

    keeps: ClassVar[bool] = False

    @property
    def H(self) -> Operator:
        """The adjoint: another operator, with <A x, y> = <x, A.H y>."""
        raise NotImplementedError

    @property
    def T(self) -> Operator:
        """The transpose; data movement is real, so it is the adjoint."""
        return self.H

    def cost(self, group: Group, x: np.ndarray) -> tuple[int, int]:
        """The messages and bytes that this worker sends."""
        return 0, 0

    def pull(self, g, x, ans):
        return move(self.back, g)

    @property
    def back(self) -> Operator:
        """The adjoint as the backward sweep applies it."""
        adjoint = self.H
        known = self.__dict__.get(_BACK)
        if known is None or known[0] is not adjoint:
            known = self.__dict__[_BACK] = adjoint, self.backward(adjoint)
        return known[1]

    def __call__(self, x):
        """The operator applied to this worker's block, or to a pytree of blocks, in a body; outside of bodies to a
        `PartitionedArray`, block by block."""
        return across(self, x) if WORKER.get() is None else operate(self, x, sys._getframe(1))

    def _make(self, terms: Iterable[Term], ends: Any) -> Linear:
        return composed(terms)

    def _meet(self, other: Linear, sign: str) -> None:
        meet(self, other, sign)


# How a collective is applied


def interned(kind: type[C], *parameters: Any) -> C:
    """The one collective of a kind with these parameters, that keeps what has been found out about it. Parameters that
    cannot be hashed are no right ones, which the collective says itself when it is applied."""
    try:
        return _interned(kind, *parameters)
    except TypeError:
        return kind(*parameters)


@lru_cache(maxsize=4096, typed=True)
def _interned(kind: Any, *parameters: Any) -> Any:
    return kind(*parameters)


@lru_cache(maxsize=4096, typed=True)
def named(function: str, kind: Any, *parameters: Any, forward: str = "") -> Any:
    """The one collective of a kind with these parameters that is called by this function. forward: see `Called`."""
    return kind(*parameters, called=Called(function, forward=forward))


_KEPT = 512


def bounded(table: dict) -> dict:
    """A table that an operator keeps, emptied if it has grown long."""
    if len(table) >= _KEPT:
        table.clear()
    return table


def kept(method: F) -> F:
    """A method of a collective that finds something out, which is not None, of arguments that can be hashed: once for
    each of them."""
    name = f"kept {method.__qualname__}"

    @wraps(method)
    def found(self: Any, *arguments: Any) -> Any:
        table = self.__dict__.get(name)
        if table is None:
            table = self.__dict__[name] = {}
        known = table.get(arguments)
        if known is None:
            known = bounded(table)[arguments] = method(self, *arguments)
        return known

    return found  # type: ignore[return-value]


def rebound(op: C, **changes: Any) -> C:
    """A collective of the same class with other parameters, once they are known: the same object each time."""
    return _rebound(op, tuple(changes.items()))


@lru_cache(maxsize=4096)
def _replaced(op: Any, changes: tuple[tuple[str, Any], ...]) -> Any:
    return replace(op, **dict(changes))


@kept
def _rebound(op: Any, changes: tuple[tuple[str, Any], ...]) -> Any:
    return _replaced(op, changes)


def called_as(op: C, called: Called) -> C:
    """A collective with another `called`, whatever its class asks for to make one: the same object each time."""
    found = _called_as(op, called)
    return found if type(found) is type(op) else _renamed(op, called)  # a copy of another class has its tables too


def _renamed(op: C, called: Called) -> C:
    other = copy(op)
    object.__setattr__(other, "called", called)  # it is frozen
    return other


_called_as = kept(_renamed)


def _of_leaves(op: Any, structure: Any) -> tuple[Any, ...]:
    name = (op.called or Called(op.function)).function
    return tuple(op if leaf is None else called_as(op, Called(name, leaf)) for leaf in tree.leaf_positions(structure))


_over = kept(_of_leaves)


def each_leaf(f: Callable[[Any, Callable[[C], C]], Any], x: Any) -> Any:
    """f(leaf, at) of each leaf of the user's x, as a tree; `at(op)` is the collective that knows which leaf it is."""
    leaves, structure = tree.flatten(x)
    if tree.is_leaf(structure):
        return f(x, _by_itself)
    found = [f(leaf, lambda op, k=k: op.over(structure)[k]) for k, leaf in enumerate(leaves)]
    return tree.unflatten(structure, found)


def _by_itself(op: C) -> C:
    return op


def operate(op: Collective, x, frame: FrameType | None = None) -> Any:
    """Apply a collective to the user's x: a traced or bare array, a number, or a pytree of them."""
    worker = WORKER.get() or here(f"spmd.{op.function}")
    frame = frame or sys._getframe(1)
    if type(x) is Array:
        value, tape, state = x.value, x.tape, x.state
        if type(value) is not np.ndarray and isinstance(value, np.generic):
            value = np.asarray(value)
        known = state is not None and type(value) is np.ndarray and _called(op, value, state, worker, frame)
        if not known or (tape is not None and known.admitted is not state):
            return _begin(op, x, worker, frame)()
        short = known.short
        block, bound = known(worker.comm, value) if short is None else short(worker.comm, value, known.long)
        if tape is None:
            return Array(block, known.state)
        return _recorded(bound, x, block, known.state)
    if isinstance(x, np.ndarray | np.generic | int | float | complex) or on_device(x) or frontend(x) is not None:
        return _begin(op, x, worker, frame)()
    leaves, treedef = tree.flatten(x)
    begun = [_begin(op, leaf, worker, frame) for op, leaf in zip(op.over(treedef), leaves, strict=False)]
    return tree.unflatten(treedef, [finish() for finish in begun])


class _Prepared:
    """What a line of the user's calls with a block of some shape: the group, the call, and the states in which it takes
    the block and gives the result: None for cotangents, which are bare.

    short: a shorter way than by the verbs, if there is one; tried: whether that has been asked for. It keeps the
    operator and the dtype, and the call its code, so that no others have their ids.
    """

    __slots__ = ("admitted", "call", "dtype", "group", "op", "short", "state", "supposed", "tried")

    def __init__(self, op: Collective, dtype: np.dtype, group: Group, call: Call, admitted: State | None):
        self.op, self.dtype, self.group, self.call, self.admitted = op, dtype, group, call, admitted
        self.state = None if admitted is None else op.out_state(admitted)
        self.short: Callable[[Any, np.ndarray, Way], tuple[Any, Any]] | None = None
        self.supposed: Any = None
        self.tried = False

    def __call__(self, comm: Comm, x: np.ndarray) -> tuple[Any, Any]:
        """The new block, and the operator bound to the shapes it met."""
        if self.short is not None:
            return self.short(comm, x, self.long)
        found = self.long(comm, x)
        if not self.tried:
            self._shorten(comm, x)
        return found

    def long(self, comm: Comm, x: np.ndarray) -> tuple[Any, Any]:
        """By the verbs."""
        handle, arrive = self.op.launch(comm, self.group, x, self.call)
        found = arrive(handle.wait())
        if self.supposed is not None:
            self._shorten(comm, x)  # The others may have come with other blocks, and may do so from now on.
        return found

    def _shorten(self, comm: Comm, x: np.ndarray) -> None:
        """Find the shorter way, once the collective has been called: only then some know how it goes."""
        way = self.op.eager(self.group, x)
        if self.tried and way is not None and way.supposed == self.supposed:
            return
        self.tried = True
        self.short = None if way is None else comm.repeated(self.call, way, x)
        self.supposed = None if self.short is None or way is None else way.supposed


_ABOVE = object()
"""In place of what a line of the library's calls: the line of the user's above it is asked."""


def _called(op: Collective, x: np.ndarray, state: State | None, worker: Worker, frame: FrameType | None) -> Any:
    """What has been called before, by this line and with such a block: it was right, and has a short way. None where
    there is none. state: that of the block, if that is to be admitted. frame: None where no line of the user's is
    above, as in the backward run of a map that is differentiated from outside."""
    dtype = x.dtype
    key = (id(op), state, id(dtype), x.shape, frame and id(frame.f_code), frame and frame.f_lasti)
    known = worker.prepared.get(key)
    if known is None:
        known = _prepare(op, x, state, worker, frame, key)
    if known is _ABOVE:
        user = caller(frame)
        return None if user is frame else _called(op, x, state, worker, user)
    return None if not known or LEDGERS.get() or not x.flags.c_contiguous else known


def _prepare(
    op: Collective, x: np.ndarray, state: State | None, worker: Worker, frame: FrameType | None, key: Any
) -> Any:
    """What a line of the user's calls with such a block. False where that is not the same each time, or not all there
    is to do, which may come to be that of others and does no harm; None where that is not known yet."""
    if frame is not None and caller(frame) is not frame:
        bounded(worker.prepared)[key] = _ABOVE
        return _ABOVE
    admitted = None if state is None else op.admits.get(state)
    if admitted is None and state is not None:
        return None
    counts = op.adds and x.dtype.kind == "b"
    if counts or type(op) is Vary or worker.mesh.places is not None:
        bounded(worker.prepared)[key] = False
        return False
    group = worker.group(op.axes)
    op.check(group, x)
    call = _call(op, x, worker, frame, None, False)
    known = bounded(worker.prepared)[key] = _Prepared(op, x.dtype, group, call, admitted)
    return known


def _begin(op: Collective, x, worker: Worker, frame) -> Callable[[], Any]:
    """Admit one array, start the collective, and say how to finish."""
    if type(x) in _NUMBERS:
        number = np.asarray(int(x) if op.adds and type(x) is bool else x)
        handle, arrive = _start(op, number, worker, frame)  # no line of a program: it is alike each time
        return lambda: _number(arrive(handle.wait())[0], op, worker)
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
    """`_begin` in a body whose arrays carry no state. A block that could be written to is lent: it is read until the
    collective is over, and copied only by those that hand blocks over as they are."""
    block, lent = bare_block(x, op), False
    x = x if isinstance(x, np.ndarray | np.generic) else block  # what came otherwise may share its memory too
    if writable(x) and not on_device(block):
        lent = block.flags.c_contiguous
        block = sealed(block.view()) if lent else copied(block)
    if block.dtype == bool and op.adds:
        block = block.astype(np.int64)
    begun = launch(op, block, worker, frame, lent=lent)
    if not lent:
        return lambda: begun()[0]

    def finish():
        result = begun()[0]
        return sealed(copied(result)) if np.may_share_memory(result, x) else result

    return finish


def _number(ans, op: Collective, worker: Worker):
    """The result of a collective of Python numbers: a weakly typed number where it is one number."""
    value = ans.item() if ans.shape == () else ans
    return worker.carrying(value, op.out_state(state_of(op.axes)))


def owned_block(x, op: Collective) -> np.ndarray:
    """A block that nobody else writes to, on the device of the mesh."""
    block = bare_block(x, op)
    shared = x if isinstance(x, np.ndarray | np.generic) else block
    return sealed(copied(block)) if writable(shared) and not on_device(block) else block


def bare_block(x, op: Collective) -> np.ndarray:
    """A block of an array of any library, on the device of the mesh: on the same memory if it is there."""
    if is_slot(x):
        return x
    worker = WORKER.get()
    places = None if worker is None else worker.mesh.places
    where, need = f"spmd.{op.function}", "an array of numbers, a number, or a pytree of them"
    # Only the class is asked: global arrays and Rooted values are declared further up.
    mend = {
        "PartitionedArray": "pass it to the map as an argument, with a spec in in_specs",
        "Rooted": "spmd.replicate(x, axis_name) makes it Invariant, spmd.broadcast(x, axis_name) Varying",
    }.get(type(x).__name__)
    if mend is not None:
        raise StateError(message(where, argument="x", got=describe(x), need=need, mend=mend))
    if not on_device(x):
        x = np.asarray(admit(x, where, need=need))
    if worker is None or places is None:
        return home(where, "x", x, "cpu")
    return places.own(x, worker.index)


def _admit(op: Collective, x: Array, worker: Worker) -> Array:
    """x in the state that the operator takes, or an error that says why not."""
    if x.state is None:
        raise outside(f"spmd.{op.function}", x)
    return vary(x, admitted(op, x, x.state, worker))


def admitted(op: Collective, x: Any, state: State, worker: Worker) -> State:
    """The state in which an operator takes x, which is in `state`: that, or a more Varying one.

    Raises StateError where it takes neither.
    """
    known = op.admits.get(state)
    if known is None:
        known = op.admits[state] = _admitted(op, x, state, worker)
    return known


def _admitted(op: Collective, x: Any, state: State, worker: Worker) -> State:
    missing = [n for n in op.axes if op.takes(n) == VARYING and n not in state.varying]
    if missing:
        if op.adds:
            rest = [n for n in op.axes if n not in missing]
            axes = one_or_all(missing)
            factor = worker.group(tuple(missing)).size
            raise StateError(
                message(
                    f"spmd.{op.function}",
                    argument="x",
                    got=f"{describe(x)}, which does not vary over {axes_of(missing)}",
                    need=f"an array that varies over {all_of(op.axes)}",
                    mend=(f"name {all_of(rest)} only" if rest else "leave the call out")
                    + f": along {axes} the value is already the same on all {factor} workers; "
                    f"spmd.pvary(x, {axes}) first if the sum of {factor} copies is meant",
                )
            )
        state = state_of(state.varying | set(missing))
    present = [n for n in op.axes if op.takes(n) == INVARIANT and n in state.varying]
    if present:
        raise StateError(
            message(
                f"spmd.{op.function}",
                argument="x",
                got=f"{describe(x)}, which varies over {axes_of(present)}",
                need=f"an array that is Invariant along {all_of(op.axes)}",
                mend="reduce or gather it first (spmd.psum, spmd.all_gather(..., to='invariant'))",
            )
        )
    return state


def outside(where: str, x: Array, argument: str | None = None) -> Exception:
    """The error for an array that a body meets without having been given it."""
    return ClosureError(
        message(
            where,
            argument=argument,
            got=f"{describe(x)} that was traced outside of this map",
            need="arrays of this body",
            mend="pass it to the map as an argument, with a spec in in_specs (P() for a replicated one)",
        )
    )


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
        return _recorded(bound, x, ans, op.out_state(x.state)), bound

    return finish_traced


def everywhere(group: Group, maker: Callable[..., Any]) -> Eager:
    """A collective in which everyone's whole block goes to everyone, who make the same of them."""
    return Eager(group, (...,) * group.size, maker, same=True)


def passing(
    group: Group, parts: Sequence[Any], source: int | None, fill: Shape, bind: Callable[[Shape], Collective]
) -> Eager:
    """A collective that gives a worker the whole block of one member: its own as it is. source: of which one; None: of
    nobody, which are zeros of the shape `fill`. bind: of the new block's shape makes the bound operator."""

    def maker(shapes: tuple[Any, ...]) -> tuple[Make, Collective]:
        return made, bind(fill if source is None else shapes[source])

    def made(x: np.ndarray, blocks: list[Any]) -> np.ndarray:
        if source is None:
            return sealed(zeros(fill, x))
        return sealed(x if source == group.index else owned(blocks[source]))

    return Eager(group, parts, maker, taken=() if source is None else (source,))


def joining(tiled: bool, axis: int, shapes: Sequence[Shape], dtype: np.dtype) -> Make:
    """What joins blocks of these shapes, or stacks them, in memory of their own."""
    whole, n = joined if tiled else stacked, len(shapes)
    nbytes = sum(map(prod, shapes)) * dtype.itemsize
    if n > _FEW:
        return lambda _, blocks: sealed(whole(blocks, axis, True))
    ends = offsets([s[axis] for s in shapes]) if tiled else []
    shape = (*shapes[0][:axis], ends[-1] if tiled else n, *shapes[0][axis + tiled :])
    before = (slice(None),) * axis
    places = [(*before, slice(ends[k], ends[k + 1]) if tiled else k) for k in range(n)]
    at_once = joiner(shape, dtype, places) if nbytes <= COPIED else None
    if at_once is not None:
        return lambda _, blocks: at_once(blocks)
    empty = np.empty if nbytes < pool.LEAST else pool.empty

    def put_together(_: Any, blocks: list[Any]) -> np.ndarray:
        if not split_work.plain(nbytes):
            return sealed(whole(blocks, axis, True))
        out = empty(shape, dtype)
        for place, block in zip(places, blocks, strict=True):
            out[place] = block
        return sealed(out)

    return put_together


_FEW = 8
"""Blocks that are put in their places one by one: quicker, for so many, than NumPy's functions."""


def launch(
    op: Collective, x, worker: Worker, frame, asks: list[bool] | None = None, lent: bool = False
) -> Callable[[], tuple[Any, Collective]]:
    """Start on a bare block. A number that is varied stays a number, weakly typed.

    frame: from where it was called; None: from the nearest line of the user's above.
    asks: whether the block is differentiated; once finished, whether that of any member is.
    lent: whether the block may be written to when the collective is over.
    """
    if worker.program is not None and type(op) is not Vary:
        found = _written_down(op, x, worker, frame)
        return lambda: found
    handle, arrive = _start(op, x, worker, frame, asks, lent)
    return lambda: arrive(handle.wait())


class _Line:
    """A collective as a line of a program."""

    def __init__(self, prepared: _Prepared, name: str):
        self.prepared = prepared
        self.bound: Any = None
        self.__name__ = name

    def __call__(self, comm: Comm, x: Any) -> Any:
        block, self.bound = self.prepared(comm, contiguous(x))
        return block


def _written_down(op: Collective, x: Any, worker: Worker, frame: Any) -> tuple[Any, Collective]:
    """A collective that is called, and becomes a line of the worker's program: the new block and the bound operator."""
    assert worker.program is not None
    like, group = contiguous(slot_of(x)), worker.group(op.axes)
    op.check(group, like)
    line = _Line(_Prepared(op, like.dtype, group, _call(op, like, worker, frame, None, False), None), op.function)
    block = worker.program.call(line, (COMM, x), effect=True, comm=worker.comm)
    return block, line.bound


def _start(op: Collective, x, worker: Worker, frame, asks: list[bool] | None = None, lent: bool = False) -> Launched:
    """`launch`: the handle, and what makes of what it gives the new block and the bound operator."""
    for ledger in LEDGERS.get():
        ledger.operator(worker.index, type(op).__name__, op.axes)
    if type(op) is Vary:
        return Ready(x), lambda block: (block, op)
    if type(x) is not np.ndarray or not x.flags.c_contiguous:
        x = contiguous(x)
    group = worker.group(op.axes)
    op.check(group, x)
    return op.launch(worker.comm, group, x, _call(op, x, worker, frame, asks, lent))


def _call(op: Collective, x, worker: Worker, frame, asks: list[bool] | None, lent: bool) -> Call:
    """What a worker calls, and from where. The same line calls the same with every block of a shape: that is made once,
    but for what is told of one block alone."""
    user, alone = caller(frame), asks is not None or worker.mesh.places is not None
    key = None if user is None or alone else (id(user.f_code), user.f_lasti, x.dtype, x.shape, lent)
    call = op.calls.get(key)
    if call is None:
        admit_dtype(x.dtype, f"spmd.{op.function}", lambda: describe(x))
        called, detail = op.called or Called(op.function), op.detail
        if called.forward:
            detail += f"{', ' if detail else ''}the adjoint of {called.forward}"
        call = Call(
            called.function, op.axes, x.dtype, x.shape, detail=detail, alike=op.alike, frame=user, leaf=called.leaf
        )
        call.lent, call.asks, call.host = lent, asks, worker.mesh.places is not None and not on_device(x)
        if key is not None:
            bounded(op.calls)[key] = call  # It keeps the code, so that no other has its id.
    return call


def _recorded(bound: Collective, x: Array, ans: Any, state: State) -> Array:
    """The result of a traced array, on its tape."""
    args = (None, bound, x.value, ans) if bound.keeps else (None, bound, None, None)
    if type(ans) is np.ndarray:
        shape, dtype = ans.shape, ans.dtype
    else:
        bare = value_of(ans)
        shape, dtype = np.shape(bare), weak(bare) if type(slot_of(bare)) in _NUMBERS else ans.dtype
    node = Node(_MOVE, _MOVE.rules, (x.node,), args, NO_OPTIONS, shape, dtype)
    x.tape.open.append(node)
    return Array(ans, state, x.tape, node)


def move(op: Collective, g):
    """Apply an operator to a cotangent: its state is right by construction, so nothing is checked."""
    worker = WORKER.get() or here(f"spmd.{op.function}")
    if type(op) is Vary and not LEDGERS.get():
        return _passed(op, g, op.out_state(g.state) if type(g) is Array else None)
    frame = sys._getframe(1)
    if type(g) is np.ndarray:
        known = _called(op, g, None, worker, caller(frame))
        if known:
            return known(worker.comm, g)[0]
    return _apply(op, g, worker, frame)()[0]


def _passed(op: Vary, x: Any, state: Any) -> Any:
    """Varied to a state, which moves nothing: recorded where it is traced."""
    if type(x) is not Array:
        return x
    if x.tape is None:
        return Array(x.value, state)
    value = x.value
    return _recorded(op, x, _passed(op, value, state) if type(value) is Array else value, state)


_MOVE = Primitive(
    None,
    "collective",
    rules=(lambda g, ans, op, x, y: op.pull(g, x, y),),
    owe=lambda shared, g, leaf, op, x, y: _owed(shared, g, leaf, op),
)


_LEAF = object()


def _owed(shared: dict, g: Any, leaf: Node, op: Collective) -> Future | None:
    shared[_LEAF] = leaf
    return op.owe(shared, g)


# Vary, and how states meet


class Vary(Operator):
    """I -> V: one value becomes a copy per worker. Moves nothing; its adjoint is `Sum`.

    Broadcasting along the hidden dimension of an axis, from length 1 to n.
    """

    function: ClassVar[str] = "pvary"
    source: ClassVar[str] = INVARIANT

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        return Ready(x), lambda block: (block, self)

    @property
    def H(self) -> Operator:
        from spmd.operators.reduce import Sum

        return interned(Sum, self.axes)

    def owe(self, shared: dict, g) -> Future | None:
        if type(g) is Array:
            return None
        sums = shared.get(Vary)
        if sums is None:
            from spmd.operators.reduce import OwedSums

            sums = shared[Vary] = OwedSums(here("spmd.psum"))
        return sums.owe(self.axes, g, shared[_LEAF].place)


def vary(x: Array, state: State) -> Array:
    """x in a state of more axes. A traced array is varied once for each state: its cotangents meet before the sum."""
    if x.state is state:
        return x
    if x.tape is None:
        return Array(x.value, state)
    key, twins = (x.node, state), x.tape.twins
    twin = twins.get(key)
    if twin is None:
        twin = twins[key] = move(_between(here("spmd.pvary").mesh.sides, x.state, state), x)
    return twin


@lru_cache(maxsize=1024)
def _between(sides: tuple[tuple[str, int], ...], have: State, want: State) -> Vary:
    """What varies an array of one state, to be in the other."""
    return interned(Vary, tuple(n for n, _ in sides if n in want.varying - have.varying))


class Join(Mixing):
    """How arrays of different state meet in a body: Invariant ones are varied."""

    def ambient(self) -> State | None:
        worker = WORKER.get()
        if worker is None:
            return None
        if not worker.tracked:
            raise DifferentiationError(
                message(
                    "a gradient transformation in a body",
                    got="a map with check=False that is not differentiated from outside: its arrays are bare",
                    need="arrays that carry their state",
                    mend="spmd.map(..., check=True)",
                )
            )
        return worker.state()

    def join(self, arrays: list[Array]) -> tuple[list[Array], Any]:
        for a in arrays:
            if a.state is None:
                raise outside("an operation in a body", a)
        state = arrays[0].state
        for a in arrays:
            if a.state is not state:
                state = state | a.state
        varied = [vary(a, state) for a in arrays]
        for a, v in zip(arrays, varied, strict=True):
            if v is not a and v.tape is not None and v.node.shape == ():
                v.tape.joined[id(v.node)] = v.node
        return varied, state

    def differentiated(self, scalar: Array) -> None:
        tape, worker = scalar.tape, WORKER.get()
        if worker is None or tape is None or not tape.joined or not scalar.state or not scalar.state.varying:
            return
        for node in repeated_terms(scalar.node, tape.joined):
            axes, (term,) = node.args[1].axes, node.parents
            count = worker.group(axes).size
            name = "" if term.prim is None else term.prim.name.removeprefix("np.")
            if count > 1 and not is_share(name, term.args, count):
                warn_of_term("spmd.grad", axes, count, worker)
                return

    def differentiates(self, leaves: list) -> None:
        worker = WORKER.get()
        if worker is None or not worker.tracked or not worker.mesh.checks:
            return
        source = None
        for k, x in enumerate(leaves):
            value, state = (x.value, x.state) if type(x) is Array else (x, worker.state())
            if state is None or not isinstance(value, _NUMERIC) and not is_slot(value):
                continue
            axes = tuple([n for n in worker.mesh.axes if n not in state.varying])
            if axes and np.size(value):  # what is Rooted has no entries elsewhere
                source = source or source_of(sys._getframe(1))
                _verify(worker, value, axes, "a gradient in a body", f"the differentiated leaf {k}", source)

    def bring(self, g, have, state):
        if type(g) is not Array or g.state is state or state is None:
            return g
        if g.state is None:
            raise outside("a cotangent", g)
        missing = state.varying - g.state.varying
        if missing:
            g = vary(g, state_of(g.state.varying | missing))
        extra = tuple(n for n in here("a cotangent").mesh.axes if n in g.state.varying - state.varying)
        if extra:
            g = move(Vary(extra).H, g)
        return g

    def kept(self, g):
        return sealed(copied(g)) if WORKER.get() is not None and writable(g) else g


tracer.use_mixing(Join())

_NUMERIC = (np.ndarray, np.generic, float, complex)


def verify(value: Any, axes: tuple[str, ...], where: str, argument: str = "x") -> None:
    """Raise where bare data that counts as Invariant differs between the workers along these axes. None: no data."""
    worker = here(where)
    if value is not None and worker.tracked:
        _verify(worker, value, axes, where, argument, source_of(sys._getframe(1)))


def _verify(worker: Worker, value: Any, axes: tuple[str, ...], where: str, argument: str, source: Source) -> None:
    apart = getattr(worker.comm, "axes", ())  # those of spmd.at_root, along which nobody else takes part
    if apart:
        axes = tuple(n for n in axes if n not in apart)
    if worker.program is None:
        verify_replicas(worker, axes, value, where, argument, source)
    else:
        worker.program.call(_Verification(axes, where, argument, source), (value,), effect=True)


@dataclass(frozen=True)
class _Verification:
    """The comparison of a value with those of other workers, which programs repeat."""

    axes: tuple[str, ...]
    where: str
    argument: str
    source: Source

    __name__: ClassVar[str] = "verify"

    def __call__(self, value: Any) -> None:
        worker = here(self.where)
        verify_replicas(worker, self.axes, value, self.where, self.argument, self.source)


@api_boundary
def varying(a, axis_name: str | Sequence[str]):
    """Declare that bare data differs from worker to worker along an axis: made from `worker_index`, read from a file.

    a: a bare array, a number, or an array of the body (which is varied). Gives an array that varies over the axis.
    """
    worker = here("spmd.varying")
    state = state_of(worker.mesh.names(axis_name, "spmd.varying"))
    if type(a) is Array:
        if a.state is None:
            raise outside("spmd.varying", a)
        return vary(a, a.state | state)
    other = frontend(a)
    if other is not None:
        worker.replicas.declared.append(other.data(a))
        return other.declare(a, tuple(n for n in worker.mesh.axes if n in state.varying), worker)
    if isinstance(a, np.ndarray):
        worker.replicas.declared.append(a)
    bare = a if on_device(a) or is_slot(a) else np.asarray(admit(a, "spmd.varying", "a"))
    return worker.carrying(owned_block(bare, Vary(())), state)


@api_boundary
def block(x) -> np.ndarray:
    """The bare read-only data of an undifferentiated array of a body: to print it, or to use any library on it.

    On a mesh of a GPU it is an array of CuPy, which no flag protects: it is not to be written to.

    Raises StateError for a differentiated one: what is computed from bare data has no gradient.
    """
    other = frontend(x)
    if other is not None:
        return other.bare(x)
    if type(x) is not Array:
        data = x if on_device(x) else np.asarray(admit(x, "spmd.block"))
    elif x.tape is not None:
        raise StateError(
            message(
                "spmd.block",
                argument="x",
                got=describe(x),
                need="an undifferentiated array",
                mend="spmd.block(spmd.stop_gradient(x)) if the gradient may end here",
            )
        )
    else:
        data = x.value if on_device(x.value) else np.asarray(x.value)
    view = data.view()
    if on_device(view):
        return view
    view.flags.writeable = False
    return view


# What operators that split or join share


def given_sizes(function: str, sizes: Any, tiled: bool = True) -> tuple[int, ...] | None:
    """The sizes that a user gave for the pieces of a dimension, as integers."""
    if sizes is None:
        return None
    try:
        found = tuple(index(n) for n in sizes)
    except TypeError:
        found = None
    if found is None or not tiled:
        raise LayoutError(
            message(
                f"spmd.{function}",
                argument="sizes",
                got=repr(sizes) + (" with tiled=False" if found is not None else ""),
                need="a length for each worker's piece, where tiled=True cuts a dimension into pieces",
                mend="tiled=True, or leave sizes out"
                if found is not None
                else "sizes=(3, 2, 0): one integer per worker",
            )
        )
    return found


def split_at(op: Collective, group: Group, shape: Shape, axis: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of the pieces of a dimension: those that were given, checked, or the balanced ones."""
    n = shape[axis]
    if sizes is None:
        return block_sizes(n, group.dims)
    if len(sizes) != group.size or sum(sizes) != n or min(sizes) < 0:
        raise LayoutError(
            message(
                f"spmd.{op.function}",
                argument="sizes",
                got=f"{tuple(sizes)} for a dimension of length {n} over {group.size} workers",
                need=f"{group.size} sizes that add to {n}",
                mend="leave sizes out for balanced pieces",
            )
        )
    return tuple(sizes)


def check_length(op: Collective, group: Group, x: np.ndarray, axis: int, sizes: Sequence[int] | None) -> None:
    """Raise where a block that is to be joined has another length than the sizes of the blocks say."""
    if sizes is not None and x.shape[axis] != sizes[group.index]:
        raise LayoutError(
            message(
                f"spmd.{op.function}",
                argument="x",
                got=f"a block of length {x.shape[axis]} in dimension {axis}",
                need=f"length {sizes[group.index]}, as sizes={tuple(sizes)} says",
                mend="leave sizes out: they travel with the blocks",
            )
        )


def normal_axis(function: str, argument: str, axis: int, ndim: int) -> int:
    """A dimension counted from the front, checked."""
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise LayoutError(
            message(
                function if "." in function else f"spmd.{function}",
                argument=argument,
                got=f"{axis!r} for an array of {ndim} dimensions",
                need=f"a dimension from {-ndim} to {ndim - 1}" if ndim else "an array of at least one dimension",
                mend="name a dimension that the array has" if ndim else "np.reshape(x, (1,)) first",
            )
        )
    return int(axis) % ndim


def cuts(axis: int, sizes: Sequence[int]) -> list[Any]:
    """The index of each piece of what is cut along an axis."""
    before = (slice(None),) * axis
    return [(*before, slice(start, stop)) for start, stop in pairwise(offsets(sizes))]


def pieces(x: np.ndarray, axis: int, sizes: Sequence[int]) -> list[np.ndarray]:
    """x cut along an axis: views."""
    return [x[piece] for piece in cuts(axis, sizes)]


def split_ways(
    op: Collective,
    argument: str,
    axis: int,
    group: Group,
    shape: Shape,
    tiled: bool,
    sizes: Sequence[int] | None,
) -> tuple[int, list[Any], tuple[int, ...] | None]:
    """How a block of this shape is split over the workers along a dimension, which `argument` names: the dimension,
    counted from the front, the index of each member's piece, and their lengths where it is tiled."""
    axis = normal_axis(op.function, argument, axis, len(shape))
    if tiled:
        sizes = split_at(op, group, shape, axis, sizes)
        return axis, cuts(axis, sizes), sizes
    if shape[axis] != group.size:
        raise LayoutError(
            message(
                f"spmd.{op.function}",
                argument="x",
                got=f"length {shape[axis]} in dimension {axis}",
                need=f"length {group.size}, one entry per worker",
                mend="tiled=True splits a dimension of any length into blocks",
            )
        )
    return axis, [(*(slice(None),) * axis, k, ...) for k in range(group.size)], None


def agree(function: str, shapes: Sequence[Shape], axis: int | None) -> None:
    """Raise where blocks that are to be joined along an axis differ elsewhere, or (None) differ at all."""
    rest = [s if axis is None else s[:axis] + s[axis + 1 :] for s in shapes]
    for k, r in enumerate(rest):
        if r != rest[0]:
            raise LayoutError(
                message(
                    f"spmd.{function}",
                    argument="x",
                    got=f"blocks of shapes {list(shapes[0])} (member 0) and {list(shapes[k])} (member {k})",
                    need="blocks of one shape, to be stacked"
                    if axis is None
                    else f"blocks that differ in dimension {axis} only, along which they are joined",
                    mend="tiled=True joins blocks of different lengths along a dimension that is there"
                    if axis is None
                    else "join along the dimension in which they differ",
                )
            )


__all__ += [
    "Join",
    "Launched",
    "agree",
    "check_length",
    "given_sizes",
    "kept",
    "normal_axis",
    "pieces",
    "sealed",
    "split_at",
    "split_ways",
]
