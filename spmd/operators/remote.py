"""Remote calls: functions that one worker runs while the others go on, and futures of what they return.

The structure of a result, its shapes and dtypes are known where it is held only, until it is asked for. So a future
has on every worker one block, which takes part in differentiation: at the holder all floating-point entries of the
result in one dimension, elsewhere no entries.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.dtypes import kind_of_dtype
from spmd.autodiff.tracer import Array
from spmd.errors import LayoutError, MeshError, SpecError, StateError, describe
from spmd.frontends import frontend
from spmd.mesh import WORKER, Worker, here
from spmd.operators.apply import operate
from spmd.operators.at_root import (
    ResultSpec,
    RootCall,
    decoded,
    encoded,
    is_array,
    refuse_program,
    result_spec,
    root_axes,
    spec_from_json,
)
from spmd.operators.elsewhere import Elsewhere, Rooted, as_written, dtype_of, rooted
from spmd.operators.memo import interned
from spmd.operators.messages import dtype_from_json, packed, unpacked
from spmd.operators.move import Move
from spmd.operators.partial_comm import whole_comm
from spmd.operators.reduce import AxisName, _names
from spmd.operators.root import Keep
from spmd.operators.varying import verify_one_value
from spmd.state import State, state_of
from spmd.transport.call import Call, Group, Pair
from spmd.transport.handles import read_only
from spmd.transport.plan import Forward, Plan

__all__ = ["Future", "remote"]

_WHERE = "spmd.remote"
_ENTRIES = ResultSpec((0,), "float64", ())
"""What workers that do not hold a result know of its entries."""


class _Content(NamedTuple):
    """What the holder of a result knows of it. structure: as of `encoded`. specs: of its leaves. exact: those that are
    not differentiated; None for the others, whose entries are in the block. dtype: of these entries, as in JSON.
    varying: the axes along which any of them varies."""

    structure: Any
    specs: list[ResultSpec]
    exact: list[Any]
    dtype: Any
    varying: tuple[str, ...]


class Future(Elsewhere):
    """The result of a remote call, which one worker holds: see `spmd.remote`.

    axes, at: the axes, and the place along them of the worker that holds it. It is an argument of other remote calls.

        >>> def body(x):
        ...     first = spmd.remote(np.cumsum, at=1)(x)
        ...     return spmd.replicate(spmd.remote(np.sum, at=2)(first).result(), "x", root=2)
        >>> with spmd.Mesh(x=3):
        ...     spmd.map(body, P(), P())(np.arange(4.0)).item()
        10.0
    """

    __slots__ = ("_block", "_content", "_error", "_result", "_sides", "at", "axes")
    as_rooted: ClassVar[str] = "x.result(), its value as Rooted values"

    def __init__(self, worker: Worker, axes: tuple[str, ...], at: int, block: Any, content: _Content | None):
        self.axes, self.at, self._sides = axes, at, worker.mesh.sides
        self._block, self._content = block, content
        self._error: Exception | None = None
        self._result: tuple[Any] | None = None

    def __spmd_describe__(self) -> str:
        return f"a future at {self.at} along {', '.join(self.axes)}"

    def _mend(self) -> str:
        at = f"{as_written(self.axes)}, {self.at}"
        return (
            f"spmd.replicate(x.result(), {at}) gives the value to all; spmd.remote(f, at={self.at})(x) computes there"
        )

    def _here(self, where: str) -> Worker:
        """This worker, if it is of the mesh on which the call was made."""
        worker = WORKER.get()
        if worker is None or worker.mesh.sides != self._sides:
            raise MeshError.at(
                where,
                got=f"{describe(self)}, asked {'outside of any body' if worker is None else f'on {worker.mesh}'}",
                need="the body in which the call was made, which has not ended",
                mend=f"return spmd.replicate(future.result(), {as_written(self.axes)}, {self.at}) from that body",
            )
        return worker

    def result(self) -> Any:
        """What the function returned, its arrays and numbers as Rooted values. All workers of the axes call it, and
        wait for the worker that runs the function.

        Cost: one broadcast of the structure, shapes and dtypes, at the first call. Raises the error of the function, on
        all workers.

            >>> def body(x):
            ...     future = spmd.remote(np.sum, at=1)(x)
            ...     return spmd.replicate(future.result(), "x", root=1)
            >>> with spmd.Mesh(x=3):
            ...     spmd.map(body, P(), P())(np.arange(4.0)).item()
            6.0
        """
        if self._result is None:
            self._result = (self._asked(sys._getframe(1)),)
        return self._result[0]

    def _asked(self, frame: FrameType) -> Any:
        worker = self._here("spmd.Future.result")
        call = RootCall(worker.group(self.axes), self.axes, self.at, frame, None, "remote")
        if self._error is not None:
            call.report_error(self._error)
            raise self._taken_error(worker)
        if call.is_root:
            content = self._held()
            call.structure, call.specs = content.structure, content.specs
            call.report({"structure": content.structure, "specs": content.specs})
        else:
            call.receive_results()
        outs = call.run(lambda block: self._leaves(block, worker), [self._block], call.specs)
        outs = [_tied(call.without_axes(x), self._block) for x in outs]
        handles = (
            Rooted(
                x, spec.shape, x.dtype if frontend(x) is not None else dtype_from_json(spec.dtype), self.axes, self.at
            )
            for x, spec in zip(outs, call.specs, strict=True)
        )
        return decoded(call.structure, handles)

    def to(self, place: int) -> Future:
        """This result at another place along the axes. All workers of the axes call it: the holder sends and goes on,
        the other one waits for what comes.

        Adjoint: the cotangents go back. Cost: one message that tells what comes, and one of the entries.
        Raises LayoutError for a place out of range; at the holder, and so in all, the error of the function.

            >>> def body(x):
            ...     there = spmd.remote(np.cumsum, at=1)(x)
            ...     return spmd.replicate(there.to(0).result(), "x", root=0)
            >>> with spmd.Mesh(x=2):
            ...     spmd.map(body, P(), P())(np.arange(4.0)).numpy()
            array([0., 1., 3., 6.])
        """
        worker, frame = self._here("spmd.Future.to"), sys._getframe(1)
        group = worker.group(self.axes)
        _check_place("spmd.Future.to", "place", place, group)
        return self._at(place, worker, frame)

    def _at(self, place: int, worker: Worker, frame: FrameType) -> Future:
        if place == self.at:
            return self
        if self._error is not None:
            raise self._taken_error(worker)
        group, content, block = worker.group(self.axes), self._content, self._block
        receives = group.index == place
        message = _carried(worker, group, self, place, frame)
        if message is not None:
            content = _unpacked(message, worker)
            block = _cast(block, dtype_from_json(content.dtype))
        block = operate(interned(Move, self.axes, self.at, place), block, frame)
        if receives and content is not None:
            block = _in_state(block, state_of(content.varying), worker)
        return Future(worker, self.axes, place, block, content if receives else None)

    def _held(self) -> _Content:
        assert self._content is not None
        return self._content

    def _taken_error(self, worker: Worker) -> Exception:
        """The error of the function, which somebody asks for now."""
        error = self._error
        assert error is not None
        worker.unasked[:] = [e for e in worker.unasked if e is not error]
        return error

    def _leaves(self, block: Any, worker: Worker) -> list[Any]:
        """The leaves of the result, at its holder. block: that of the future, on any level of differentiation."""
        content, leaves, start = self._held(), [], 0
        for spec, exact in zip(content.specs, content.exact, strict=True):
            if exact is not None:
                leaves.append(exact)
                continue
            end = start + math.prod(spec.shape)
            part = block if len(block) == end - start else block[start:end]
            part = _cast(part.reshape(spec.shape), dtype_from_json(spec.dtype))
            leaves.append(_in_state(part, state_of(spec.varying), worker))
            start = end
        return leaves

    def _value(self, block: Any, worker: Worker) -> Any:
        """The result, at its holder."""
        return decoded(self._held().structure, iter(self._leaves(block, worker)))


def remote(f: Callable[..., Any], *, at: int, axis_name: AxisName | None = None) -> Callable[..., Future]:
    """f, to be run by the worker at place `at` only, while the others go on.

    f: as of `at_root`. at: its place along axis_name; None: along the only axis of the mesh.

    Returns a function of arguments, which all workers of the axes call, and which returns a `Future` at once: only the
    worker at that place runs f, before it goes on. Its arguments: futures and Rooted values from any place, which are
    taken there, Invariant arrays, and pytrees of them; f gets the arrays, of a future what f returned there. Numbers,
    strings and the like, equal on all workers, pass as they are. f may close over data that its worker alone has.
    `future.result()` gives Rooted values, `future.to(k)`
    takes a result to another place, and a future is an argument of other remote calls: no worker waits for a result
    that it neither runs, nor takes, nor asks for.

    Differentiable, as `at_root`: the gradients go the same ways back. Of torch, f may hold modules: their parameters
    get gradients at that worker, where an optimiser steps them. Of arrays, pass parameters as Rooted values.
    Cost: nothing for what is there already; as `Future.to` for other futures, as `move` for Rooted values. One
    broadcast where the result is asked for.
    An error that f raises is raised by `result()`, on all workers; where it is not asked for, when the result is taken
    to another place, or at the end of the map.
    Raises LayoutError for a place out of range, SpecError without axis_name on a mesh of several axes, StateError for
    arrays that vary along the axes, ReplicaError for bare ones that differ, ClosureError as `at_root`, JitError within
    spmd.jit.

        >>> def body(w, x):
        ...     def loss(w):
        ...         h = spmd.remote(np.tanh, at=0)(w * x)
        ...         return spmd.remote(np.sum, at=1)(h).to(0).result()
        ...     return spmd.grad(loss)(w)
        >>> x = np.arange(3.0)
        >>> with spmd.Mesh(x=2):
        ...     np.allclose(spmd.map(body, P(), P())(2.0, x), np.sum(x / np.cosh(2.0 * x) ** 2))
        True
    """
    if not callable(f):
        raise SpecError.at(
            _WHERE, argument="f", got=describe(f), need="a function", mend="spmd.remote(f, at=k)(x), not f(x)"
        )

    def call(*args: Any, **options: Any) -> Future:
        return _call(f, at, axis_name, (args, options), sys._getframe(1))

    return call


def _call(f: Callable[..., Any], at: int, axis_name: AxisName | None, xs: tuple, frame: FrameType) -> Future:
    worker = here(_WHERE)
    refuse_program(worker, _WHERE)
    names = _axes(worker, axis_name)
    alone = [n for n in names if n in root_axes(worker)]
    if alone:
        raise StateError.at(
            _WHERE,
            got=f"a call within a function that one worker along {alone[0]!r} runs alone",
            need="a call that all workers of the axes make",
            mend="make both calls outside, and pass a future: spmd.remote(f, at=j)(spmd.remote(g, at=k)(x))",
        )
    group = worker.group(names)
    _check_place(_WHERE, "at", at, group)
    leaves, treedef = tree.flatten(xs)
    arrived = [_arrived(leaf, names, at, worker, frame) for leaf in leaves]
    places = [k for k, leaf in enumerate(arrived) if type(leaf) in (Rooted, Future)]
    failed = next((leaf._error for leaf in arrived if type(leaf) is Future and leaf._error is not None), None)
    call, contents = RootCall(group, names, at, frame, None, "remote"), []

    def of_blocks(*blocks: Any) -> list:
        full = list(arrived)
        for k, block in zip(places, blocks, strict=True):
            full[k] = arrived[k]._value(block, call.worker) if type(arrived[k]) is Future else block
        args, options = tree.unflatten(treedef, full)
        structure, outs = encoded(f(*args, **options), call.worker, _WHERE)
        content, entries = _joined(structure, [call.without_axes(x) for x in outs], call.worker)
        contents.append(content)
        return [entries]

    blocks = [arrived[k]._block if type(arrived[k]) is Future else arrived[k].block for k in places]
    error = None
    try:
        if failed is not None:
            raise failed
        (block,) = call.run(of_blocks, blocks, [_ENTRIES])
    except Exception as e:
        error, block = e, call.empty_block(_ENTRIES)
        if failed is None:
            worker.unasked.append(e)
    other = worker.frontend
    if other is not None:
        block = other.differentiated(other.tied(call.without_axes(block), blocks))
    future = Future(worker, names, at, block, contents[-1] if contents else None)
    future._error = error
    return future


def _axes(worker: Worker, axis_name: AxisName | None) -> tuple[str, ...]:
    if axis_name is None and len(worker.mesh.axes) != 1:
        raise SpecError.at(
            _WHERE,
            argument="axis_name",
            got="None",
            need=f"the axis of {worker.mesh} along which `at` is a place",
            mend=f"axis_name={next(iter(worker.mesh.axes), 'x')!r}",
        )
    return (*worker.mesh.axes,) if axis_name is None else _names(axis_name, "remote")


def _check_place(where: str, argument: str, place: Any, group: Group) -> None:
    if not isinstance(place, int | np.integer) or not 0 <= place < group.size:
        raise LayoutError.at(
            where,
            argument=argument,
            got=repr(place),
            need=f"a place along {' and '.join(map(repr, group.axes))}, from 0 to {group.size - 1}",
            mend=f"{argument}=0",
        )


def _arrived(leaf: Any, names: tuple[str, ...], at: int, worker: Worker, frame: FrameType) -> Any:
    """An argument at the place where it is needed: a Rooted value, a future, or what is no array."""
    if type(leaf) in (Future, Rooted) and leaf.axes != names:
        raise StateError.at(
            _WHERE,
            argument="x",
            got=describe(leaf),
            need=f"a value at a place along {' and '.join(map(repr, names))}",
            mend=f"axis_name={as_written(leaf.axes)}",
        )
    if type(leaf) is Future:
        return leaf._at(at, worker, frame)
    if type(leaf) is Rooted:
        if leaf.root == at:
            return leaf
        block = operate(interned(Move, names, leaf.root, at), rooted(leaf, names, leaf.root, "remote").block, frame)
        shape = tuple(np.shape(block)) if worker.group(names).index == at else leaf.shape
        return Rooted(block, shape, dtype_of(block), names, at)
    if not is_array(leaf):
        return leaf
    other = frontend(leaf)
    state = other.state(leaf) if other is not None else leaf.state if type(leaf) is Array else None
    if state is not None and state.varying & {*names}:
        raise StateError.at(
            _WHERE,
            argument="x",
            got=describe(leaf),
            need=f"an array that is Invariant along {' and '.join(map(repr, names))}, a Rooted value, or a future",
            mend="spmd.gather or spmd.sum_reduce make a Rooted value of blocks that vary, spmd.keep of bare data that "
            "one worker knows",
        )
    block = operate(interned(Keep, names, at), leaf, frame)
    verify_one_value(leaf, names, _WHERE)
    return Rooted(block, tuple(np.shape(leaf)), dtype_of(block), names, at)


def _joined(structure: Any, leaves: list[Any], worker: Worker) -> tuple[_Content, Any]:
    """The content of a result, and its floating-point entries in one dimension."""
    specs = [result_spec(x) for x in leaves]
    dtypes = [dtype_from_json(spec.dtype) for spec in specs]
    floats = [k for k, dtype in enumerate(dtypes) if kind_of_dtype(dtype) in ("f", "c")]
    varying = tuple(sorted({name for k in floats for name in specs[k].varying}))
    exact = [None if k in floats else _constant(x) for k, x in enumerate(leaves)]
    if not floats:
        entries = worker.carrying(read_only(np.zeros(0)), state_of(()))
        return _Content(structure, specs, exact, "float64", ()), entries
    common = _common_dtype([dtypes[k] for k in floats])
    parts = [_cast(_in_state(leaves[k], state_of(varying), worker), common).reshape((-1,)) for k in floats]
    entries = parts[0] if len(parts) == 1 else _namespace(parts[0]).concat(parts, axis=0)
    return _Content(structure, specs, exact, result_spec(entries).dtype, varying), entries


def _common_dtype(dtypes: Sequence[np.dtype]) -> np.dtype:
    try:
        return np.result_type(*dtypes)
    except TypeError:  # float16 and bfloat16, say
        return np.dtype(np.complex128 if any(kind_of_dtype(d) == "c" for d in dtypes) else np.float64)


def _namespace(x: Any) -> Any:
    other = frontend(x)
    if other is not None:
        return other.namespace
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else np


def _constant(x: Any) -> Any:
    """A leaf that is not differentiated, on no tape."""
    while type(x) is Array and x.tape is not None:
        x = x.value if type(x.value) is Array else Array(x.value, x.state)
    return x


def _cast(x: Any, dtype: np.dtype) -> Any:
    other = frontend(x)
    have = x.dtype if other is None else other.dtype(x)
    if have == dtype:
        return x
    x = x.real if kind_of_dtype(have) == "c" != kind_of_dtype(dtype) else x
    return x.astype(dtype) if other is None else other.cast(x, dtype)


def _in_state(x: Any, state: State, worker: Worker) -> Any:
    """x in a state that it is known to be in: no cotangents are summed."""
    other = frontend(x)
    if other is not None:
        return other.carrying(x, state, worker.tracked)
    if type(x) is not Array or x.state is None or x.state is state:
        return x
    return Array(x.value, state, x.tape, x.node)


def _tied(x: Any, block: Any) -> Any:
    """x, whose backward pass reaches a block, where the library ties tensors to each other."""
    other = frontend(x)
    return x if other is None else other.tied(x, [block])


def _carried(worker: Worker, group: Group, future: Future, place: int, frame: FrameType) -> np.ndarray | None:
    """What comes of a result besides its entries, at the place that takes it. All count it, two take part."""
    comm, source = whole_comm(worker.comm), future.at
    if group.index not in (source, place):
        comm.number += 1
        return None
    pair = Pair(group, source, place, "remote")
    message = _packed(future._held()) if pair.sends else np.empty(0, np.uint8)
    combine = Forward(None, (0,)) if pair.sends else Forward(0)
    plan = Plan("exchange", pair, message.shape, message.dtype, (None, ... if pair.sends else None), combine, _nothing)
    detail = f"from {source} to {place}"
    call = Call("remote", future.axes, plan.dtype, plan.shape, detail=detail, same_shape=None, frame=frame)
    call.operator, call.host = "Move", True
    found = worker.comm.run(plan, call, message).wait()[0]
    return None if pair.sends else found


def _nothing(shapes: Any) -> None:
    return None


def _packed(content: _Content) -> np.ndarray:
    exact = [np.asarray(_host(x)) for x in content.exact if x is not None]
    known = [x is not None for x in content.exact]
    return packed(exact, [content.structure, content.specs, known, content.dtype, content.varying])


def _host(x: Any) -> Any:
    other = frontend(x)
    return other.data(x) if other is not None else x.value if type(x) is Array else x


def _unpacked(message: np.ndarray, worker: Worker) -> _Content:
    arrays, (structure, specs, known, dtype, varying) = unpacked(message)
    specs, arrived = [spec_from_json(spec) for spec in specs], iter(arrays)
    exact = [
        _exact(next(arrived), spec, worker) if is_exact else None for is_exact, spec in zip(known, specs, strict=True)
    ]
    return _Content(structure, specs, exact, dtype, tuple(varying))


def _exact(x: np.ndarray, spec: ResultSpec, worker: Worker) -> Any:
    return worker.carrying(read_only(x), state_of(spec.varying))
