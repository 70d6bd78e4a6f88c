"""Operators as functions of torch's autograd: one generic function, whose backward applies the operator's adjoint.

An operator gives all that torch wants to know. Its backward is `H` applied through the same function, so there is a
backward of the backward, to any order; it is linear, so its forward-mode derivative is itself, applied to the tangent.
Which worker applies it is kept with the graph (`Seat`): the backward of a graph may run in another thread, and in
another run of the workers than its forward.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from spmd import frontends
from spmd.autodiff.dtypes import mean_dtype
from spmd.bridge.torch.memory import array_dtype, block_of, borrowed, owned, tensor_of, torch_dtype
from spmd.bridge.torch.tensor import (
    SUMMED,
    Tensor,
    differentiated,
    no_overrides,
    plain,
    state_of_tensor,
    stated,
    summed,
    sums_of,
)
from spmd.errors import MeshError, ReplicaError, TransportError, caller, message
from spmd.mesh import WORKER, Mesh, Worker
from spmd.operators.apply import launch
from spmd.operators.base import Collective, Operator
from spmd.operators.memo import interned
from spmd.operators.sums import Sum, Vary
from spmd.operators.varying import admitted, verify
from spmd.state import State, state_of
from spmd.tracebacks import api_boundary

__all__ = [
    "FRONTEND",
    "PLACE",
    "SEAT",
    "Draws",
    "Function",
    "Seat",
    "Task",
    "apply",
    "captured",
    "dual",
    "no_lockstep",
    "one_level",
    "seat_of",
    "tie",
    "transformed",
    "twin",
]


class _Function(torch.autograd.Function):
    apply = torch.autograd.Function.__dict__["apply"]  # torch's own, which `autograd_functions` replaces for users


Function: Any = _Function
"""Untyped: its methods take what those of a subclass say."""


class Draws:
    """The random generators of the workers of one run: each begins in the state of torch's own where it was called.

    generators: by worker, from which `spt.drawing` and functions of torch draw. seeded: those that functions of torch
    draw from since the body has called `torch.manual_seed`.
    """

    __slots__ = ("__weakref__", "generators", "seeded", "state")

    def __init__(self) -> None:
        self.state = torch.default_generator.get_state()
        self.generators: dict[int, torch.Generator] = {}
        self.seeded: dict[int, torch.Generator] = {}

    def of(self, worker: int) -> torch.Generator:
        """The generator of a worker."""
        found = self.generators.get(worker)
        if found is None:
            found = self.generators[worker] = torch.Generator()
            found.set_state(self.state)
        return found

    def current(self, worker: int) -> torch.Generator:
        """What functions of torch draw from on a worker."""
        return self.seeded.get(worker) or self.of(worker)

    def leave(self) -> None:
        """Let torch's generator go on from where the first worker that drew has left off."""
        drew = self.generators.keys() | self.seeded.keys()
        if drew:
            torch.default_generator.set_state(self.current(min(drew)).get_state())


def map_is_over(where: str) -> MeshError:
    """The error of a graph that has outlived its workers."""
    return MeshError(
        message(
            where,
            got="a graph of a body whose map is over",
            need="backward inside the body, or from outside through a result of the map",
            mend="call loss.backward() in the body, or return the loss with an out_spec, as P()",
        )
    )


class Seat:
    """A worker's place in a map, which outlives a run of it: backward may be another run.

    worker: the one that sits there now; None between runs. twins: parameters varied in this graph, until its backward.
    tokens: tensors without history to which operators gave one, because another worker's have it; kept where the map
    is differentiated from outside (else None). draws: the random generators of the run. number, tickets: by which
    compiled graphs know it, and the operators that were bound here.
    """

    __slots__ = ("__weakref__", "draws", "index", "mesh", "number", "tickets", "tokens", "twins", "worker")

    def __init__(self, mesh: Mesh, index: int):
        self.mesh = mesh
        self.index = index
        self.worker: Worker | None = None
        self.twins: dict[Any, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.tokens: list[torch.Tensor] | None = None
        self.draws: Draws | None = None
        self.number = next(_numbers)
        self.tickets: dict[Operator, int] = {}

    def taken(self) -> Worker:
        """The worker that acts here: that of the body that runs in this thread, if it is of this place."""
        now = WORKER.get()
        if now is not None and now.index == self.index and now.mesh is self.mesh:
            return now
        if self.worker is None:
            raise map_is_over("backward of an operator")
        return self.worker

    @contextmanager
    def occupied(self, worker: Worker):
        """This place while the worker runs."""
        before, self.worker = self.worker, worker
        PLACE.name = f"worker {self.index}"
        worker.frontend = FRONTEND
        token = SEAT.set(self)
        try:
            yield
        finally:
            SEAT.reset(token)
            self.worker = before
            self.twins.clear()


PLACE = threading.local()
"""PLACE.name is another string for each worker: of all that differs between threads, torch.compile guards this."""

SEAT: ContextVar[Seat | None] = ContextVar("spmd_torch_seat", default=None)
_numbers = itertools.count()
_CAPTURED: ContextVar[list[Task] | None] = ContextVar("spmd_torch_captured", default=None)


@contextmanager
def captured() -> Iterator[list[Task]]:
    """The collectives that are applied meanwhile."""
    tasks: list[Task] = []
    token = _CAPTURED.set(tasks)
    try:
        yield tasks
    finally:
        _CAPTURED.reset(token)


def seat_of(worker: Worker) -> Seat:
    """The place of a worker: the one its map made, or, in a body of NumPy's map, one of its own."""
    seat = SEAT.get()
    if seat is None or seat.worker is not worker:
        seat = Seat(worker.mesh, worker.index)
        seat.worker = worker
    return seat


class Place:
    """Where a frame stood: what is asked of a frame for the line it is in, and none of its variables.

    What runs later, in another thread or below other lines, is called from there.
    """

    __slots__ = ("f_code", "f_globals", "f_lasti")
    f_back = None

    def __init__(self, frame: FrameType | Place):
        self.f_code, self.f_globals, self.f_lasti = frame.f_code, frame.f_globals, frame.f_lasti


class Task:
    """One application of a collective by one worker.

    place: the user's line, from which its adjoint counts as called too.
    op: what is applied, until `run` replaces it by the same operator bound to the blocks it met. asks: whether any
    worker's tensor is differentiated. key: of the parameter of which this makes the twin. joined: whether it varies a
    number that met others.
    """

    __slots__ = ("asks", "finish", "joined", "key", "op", "place", "result", "seat", "token")

    def __init__(self, op: Collective, seat: Seat, frame: Any = None):
        user = caller(frame or sys._getframe(1))
        self.place = None if user is None else Place(user)
        self.op: Any = op
        self.seat = seat
        self.asks = [False]
        self.result: torch.Tensor | None = None
        self.finish: Callable[[], Any] | None = None
        self.key: Any = None
        self.token = False
        self.joined = False

    def start(self, x: torch.Tensor) -> None:
        """Start on the data of x."""
        op, worker = self.op, self.seat.taken()
        no_lockstep(worker)
        block, lent = block_of(plain(x) if isinstance(x, Tensor) else x, worker, f"spmd.{op.function}")
        began = WORKER.get()
        if began is worker:
            self.finish = launch(op, block, worker, self.place, self.asks, lent)
        else:  # a thread of torch's own
            token = WORKER.set(worker)
            try:
                self.finish = launch(op, block, worker, self.place, self.asks, lent)
            finally:
                WORKER.reset(token)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The result for x, of which this takes data only."""
        if self.result is None:
            if type(self.op) is Vary:
                return x.view_as(x)
            if self.finish is None:
                self.start(x)
            assert self.finish is not None
            cell: list[Any] = [None]
            cell[0], self.op = self.finish()
            self.finish = None
            self.result = owned(cell)
        result, self.result = self.result, None
        return result


class Apply(Function):
    """A linear operator on this worker's block, where nothing but backward is asked for: torch calls it three times as
    fast as one that may be transformed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, task: Task) -> torch.Tensor:
        ctx.task = task
        return task.run(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        task: Task = ctx.task
        if task.key is not None:
            task.seat.twins.pop(task.key, None)
        back = apply(task.op.back, g, task.seat, task.place)
        return (None if task.token else back), None


class Transformed(Function):
    """The same for forward mode and for torch.func, whose transformations come between."""

    @staticmethod
    def forward(x: torch.Tensor, task: Task) -> torch.Tensor:
        return task.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.task = inputs[1]

    backward = Apply.backward

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> Any:
        task: Task = ctx.task
        if tangent is None:
            return None
        return apply(task.op, tangent, task.seat, task.place)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, task: Task) -> Any:
        """One collective per sample; they are started one after the other before the first is waited for."""
        parts = x.unbind(in_dims[0])
        if not parts:
            return _of_none(Transformed, x, in_dims[0], task), 0
        tasks = [Task(task.op, task.seat, task.place) for _ in parts]
        for part, t in zip(parts, tasks, strict=True):
            if type(t.op) is not Vary and not transformed(part):
                t.start(part)
        results = [Transformed.apply(part, t) for part, t in zip(parts, tasks, strict=True)]
        task.op = tasks[0].op
        return torch.stack(results), 0


def _of_none(kind: Any, x: torch.Tensor, dim: int, task: Task) -> torch.Tensor:
    """The results for no samples at all: their shape is learnt from one of zeros."""
    shape = list(x.shape)
    del shape[dim]
    one = kind.apply(x.new_zeros(shape), Task(task.op, task.seat, task.place))
    return one.new_zeros((0, *one.shape))


class Attain(Function):
    """The extremum over workers: not linear. The cotangent goes to the entries that attain it, in equal shares."""

    @staticmethod
    def forward(x: torch.Tensor, task: Task) -> torch.Tensor:
        return task.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, task = inputs
        ctx.task = task
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def _weights(ctx: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """What share of the extremum each entry has; the dimensions that it is taken over."""
        dims = ctx.task.op.dims
        x, top = ctx.saved_tensors
        ties, count = ties_of(x, top, dims)
        total = apply(
            ctx.task.op.backward(interned(Sum, ctx.task.op.axes)), count.detach(), ctx.task.seat, ctx.task.place
        )
        return ties.detach() / total, dims

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        weights, dims = Attain._weights(ctx)
        # The extremum is Invariant, and so is its cotangent: what is derived from this by g is summed over workers.
        g = apply(Vary(ctx.task.op.axes), g, ctx.task.seat, ctx.task.place)
        return (expanded(g, dims) * weights).to(g.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> Any:
        weights, dims = Attain._weights(ctx)
        share = tangent * weights
        back = ctx.task.op.backward(interned(Sum, ctx.task.op.axes))
        total = apply(back, share.sum(dims) if dims else share, ctx.task.seat, ctx.task.place)
        return total.to(tangent.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, task: Task) -> Any:
        parts = x.unbind(in_dims[0])
        if not parts:
            return _of_none(Attain, x, in_dims[0], task), 0
        return torch.stack([Attain.apply(part, Task(task.op, task.seat, task.place)) for part in parts]), 0


def expanded(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """x with dimensions of one entry where some were reduced."""
    for d in sorted(dims):
        x = x.unsqueeze(d)
    return x


def ties_of(x: torch.Tensor, top: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ones where x attains the extremum `top` over dims, and how many there are of them here."""
    top = expanded(top, dims)
    wide = mean_dtype(array_dtype(x.dtype))  # a short number does not hold a large count
    ties = ((x == top) | ((x != x) & (top != top))).to(x.dtype if wide is None else torch_dtype(wide))
    return ties, ties.sum(dims, keepdim=True) if dims else ties


def no_lockstep(worker: Worker) -> None:
    """Raise where waiting would switch greenlets beneath torch's frames."""
    run = getattr(worker.comm, "execution", None)
    if type(run).__name__ == "LockstepRun" and worker.mesh.size > 1:
        raise TransportError(
            message(
                "spmd.bridge.torch",
                got="tensors in a body that the lockstep scheduler runs",
                need="threads: torch's own frames do not survive a switch of greenlets",
                mend='spt.map(f, in_specs, out_specs), or Mesh(..., scheduler="threads")',
            )
        )


_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]


def transformed(x: torch.Tensor) -> bool:
    """Whether x is a wrapper of torch.func, whose data is at hand only when its transformations have unwrapped it."""
    return _functorch.maybe_current_level() is not None and _functorch.is_functorch_wrapped_tensor(x)


class _Level:
    """The level of dual numbers that workers in threads share.

    torch has one for the whole process: the outermost torch.func.jvp enters it, and forgets all tangents when it leaves
    it, those of other threads too. So it is held while bodies run, and each jvp in them counts as an inner one.
    """

    lock = threading.Lock()
    holders = 0
    entered = False


@contextmanager
def one_level() -> Iterator[None]:
    """Hold the level of dual numbers while several workers run in threads of this process."""
    nesting: Any = eager_transforms
    with _Level.lock:
        if not _Level.holders and forward_ad._current_level < 0:
            forward_ad.enter_dual_level()
            _Level.entered = True
        _Level.holders += 1
        nesting.JVP_NESTING += 1
    try:
        yield
    finally:
        with _Level.lock:
            nesting.JVP_NESTING -= 1
            _Level.holders -= 1
            if not _Level.holders and _Level.entered:
                _Level.entered = False
                forward_ad.exit_dual_level()


def dual(x: torch.Tensor) -> bool:
    """Whether x has a tangent of torch.autograd.forward_ad. Where the level is held only those of torch.func are."""
    return forward_ad._current_level >= 0 and not _Level.holders and forward_ad.unpack_dual(x).tangent is not None


def apply(op: Any, x: torch.Tensor, seat: Seat, frame: Any = None) -> torch.Tensor:
    """An operator on a tensor, recorded where it is differentiated; no check of states. frame: from where it counts as
    called, a frame or a Place; None: from the nearest line of the user's above."""
    finish = _started(op, plain(x) if isinstance(x, Tensor) else x, seat, frame)
    with no_overrides():
        return finish()


def _started(op: Collective, x: torch.Tensor, seat: Seat, frame: Any) -> Callable[[], torch.Tensor]:
    """Start an operator on a plain tensor; what finishes it."""
    task = Task(op, seat, frame)
    tasks = _CAPTURED.get()
    if tasks is not None:
        tasks.append(task)
    kind = Apply if isinstance(op, Operator) else Attain
    if transformed(x) or dual(x):
        kind = Transformed if kind is Apply else Attain
        return lambda: kind.apply(x, task)
    if type(op) is Vary:
        return lambda: Apply.apply(x, task)
    with no_overrides():
        countable = x.is_floating_point() or x.is_complex()
        task.asks[0] = differentiated(x) and countable
        task.start(x)
    grad = torch.is_grad_enabled()

    def finish() -> torch.Tensor:
        result = task.result = task.run(x)
        if not (task.asks[0] and grad) or not (result.is_floating_point() or result.is_complex()):
            return result
        y = x
        if not x.requires_grad:
            y = x.detach().requires_grad_()
            task.token = True
            if seat.tokens is not None:
                seat.tokens.append(y)
        return kind.apply(y, task)

    return finish


def twin(x: torch.Tensor, state: State, joined: bool = False) -> torch.Tensor:
    """An Invariant tensor varied to a state: once for all its uses, so that their cotangents meet before the sum.

    joined: because it met others in this state.
    """
    worker = WORKER.get()
    if worker is None:
        raise MeshError(
            message(
                "a function of torch",
                got="tensors of different state outside of any body",
                need="tensors without state: spt.map gives results without",
                mend="return what is needed outside with an out_spec",
            )
        )
    with no_overrides():
        return _varied_copy(x, state, joined, worker)


def _varied_copy(x: torch.Tensor, state: State, joined: bool, worker: Worker) -> torch.Tensor:
    own = _summed_elsewhere(x, state)
    if own:
        sums = sums_of(x)
        difference = None if sums is None else sums.undeclared.get(id(x))
        if difference is not None and not state.varying.isdisjoint(difference.axes):
            raise difference.error()
        mine = state_of(own | state_of_tensor(x).varying)
        return stated(x, mine) if mine is state else twin(stated(x, mine), state, joined)
    seat = seat_of(worker)
    names = tuple(n for n in worker.mesh.axes if n in state.varying - state_of_tensor(x).varying)
    key = (id(x), state)
    # A leaf is held by the graph of its twin, which must not be held by it: that would be a circle without end.
    kept: Any = seat.twins if x.is_leaf else vars(x).setdefault("_twins", {})
    found = kept.get(key)
    if found is not None and found[1] == x._version and (found[0] is None or found[0] is x):
        return found[2]
    if worker.tracked:
        verify(FRONTEND.data(x), names, "a gradient in a body", "the differentiated tensor")
    task = Task(Vary(names), seat)
    task.joined = joined and not x.ndim
    followed = transformed(x) or dual(x)
    # What no transformation wraps is varied beneath all of them, in the graph that it belongs to.
    beneath = not followed and _functorch.maybe_current_level() is not None
    with temporarily_clear_interpreter_stack() if beneath else nullcontext():
        varied = stated((Transformed if followed else Apply).apply(plain(x), task), state)
    if not transformed(x):
        kept[key] = (x if x.is_leaf else None, x._version, varied)
        task.key = key if x.is_leaf else None
    return varied


def _summed_elsewhere(x: torch.Tensor, state: State) -> frozenset[str]:
    """The axes along which `spt.data_parallel` sums the gradients of the parameters that x is, or is computed of: its
    cotangent is not to be summed along them before.

    Raises ReplicaError for what is computed of others too, whose cotangent is.
    """
    wanted = state.varying - state_of_tensor(x).varying
    if x.is_leaf or not any(sums is not None and sums.state.varying & wanted for sums in _all_sums()):
        return summed(x).varying & state.varying
    found: set[frozenset[str]] = set()
    stack, seen = [x.grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(summed(variable).varying & wanted)
        elif isinstance(
            getattr(node, "task", None), Task
        ):  # what comes of a collective: its own adjoint says what becomes of cotangents
            found.add(frozenset())
        else:
            stack += [parent for parent, _ in node.next_functions]
    if len(found) > 1:
        axes = ", ".join(map(repr, sorted(frozenset().union(*found))))
        raise ReplicaError(
            message(
                "a module of spt.data_parallel",
                got=f"a value that meets what varies over {axes}, computed of its parameters and of others, or of "
                "results of collectives",
                need="parameters of the module alone: their gradients are summed after backward, all others before",
                mend=f"spt.pvary(value, {axes}) of each part, before they are put together",
            )
        )
    return found.pop() if found else frozenset()


def _all_sums() -> set[Any]:
    return {reference() for reference in list(SUMMED.values())}


class _Torch:
    """What the functions of bodies ask about tensors; see `spmd.frontends`."""

    def begin(self, op: Collective, x: torch.Tensor, worker: Worker, frame: FrameType | None) -> Callable[[], Any]:
        seat = seat_of(worker)
        if not worker.tracked:
            return _started(op, _countable(op, plain(x)), seat, frame)
        state = state_of_tensor(x)
        wanted = admitted(op, x, state, worker)
        if wanted is not state and differentiated(x):
            x = twin(x, wanted)
        begun = _started(op, _countable(op, plain(x)), seat, frame)
        out = op.out_state(wanted)
        return lambda: stated(begun(), out)

    def state(self, x: torch.Tensor) -> State:
        return state_of_tensor(x)

    def vary(self, x: torch.Tensor, names: Sequence[str], worker: Worker) -> torch.Tensor:
        if not worker.tracked:
            names = [n for n in names if n not in summed(x).varying]
            return apply(Vary(tuple(names)), plain(x), seat_of(worker)) if names else x
        state = state_of_tensor(x) | state_of(names)
        if state is state_of_tensor(x):
            return x
        return twin(x, state) if differentiated(x) else stated(x, state)

    def declare(self, x: torch.Tensor, names: Sequence[str], worker: Worker) -> torch.Tensor:
        if not worker.tracked:
            return x
        if isinstance(x, Tensor) and not x.replica:
            return self.vary(x, names, worker)
        state = state_of_tensor(x) | summed(x) | state_of(names)
        difference = getattr(x, "difference", None)
        if difference is not None and not state.varying.issuperset(difference.axes):
            raise difference.error()
        return stated(x, state)

    def carrying(self, value: Any, state: State, tracked: bool) -> Any:
        """Invariant numbers stay numbers; arrays, and numbers that vary, become tensors."""
        if isinstance(value, int | float | complex) and not isinstance(value, np.generic):
            if not state.varying or not tracked:
                return value
        elif isinstance(value, np.generic) and not tracked:
            return value.item()
        x = value if isinstance(value, torch.Tensor) else tensor_of(np.array(value))
        return stated(x, state) if tracked else x

    def dtype(self, x: torch.Tensor) -> np.dtype:
        return array_dtype(x.dtype)

    def tied(self, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        return tie(x, *(y for y in others if y.requires_grad))

    def where(self, mask: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.as_tensor(mask, device=x.device), x, y)

    def bare(self, x: torch.Tensor) -> torch.Tensor:
        return plain(x).detach()

    def data(self, x: torch.Tensor) -> Any:
        x = plain(x)
        if torch.compiler.is_compiling():
            return None
        while transformed(x):
            if not _functorch.is_gradtrackingtensor(x):
                return None
            x = _functorch.get_unwrapped(x)
        with temporarily_clear_interpreter_stack():
            return borrowed(x)

    def cast(self, x: torch.Tensor, dtype: np.dtype) -> torch.Tensor:
        return x.to(torch_dtype(dtype))

    def total(self, x: torch.Tensor, dims: tuple[int, ...], dtype: np.dtype | None = None) -> torch.Tensor:
        if dtype is None:
            return x.sum(dims) if dims else x
        return x.sum(dims, dtype=torch_dtype(dtype)) if dims else self.cast(x, dtype)

    def extremum(self, x: torch.Tensor, dims: tuple[int, ...], how: str) -> torch.Tensor:
        if not dims:
            return x
        return x.amax(dims) if how == "max" else x.amin(dims)


def _countable(op: Collective, x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64) if op.adds and x.dtype is torch.bool else x


FRONTEND = _Torch()
frontends.register(torch.Tensor, FRONTEND)


class Tie(Function):
    """The first tensor, with the others in its graph."""

    @staticmethod
    def forward(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return first.view_as(first)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.likes = [(x.shape, x.dtype, x.device) for x in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *others: Any) -> Any:
        return tangent.view_as(tangent) if tangent is not None else None

    @staticmethod
    def vmap(info: Any, in_dims: Any, first: torch.Tensor, *others: torch.Tensor) -> Any:
        return Tie.apply(first, *others), in_dims[0]


@api_boundary
def tie(loss: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
    """The loss, whose backward runs through the outputs too, with cotangents of zero.

    Where the graphs of workers part ways, because a loss is computed on some of them only or an output of a collective
    is used by some of them only, backward would not meet: some would wait for collectives that others never reach.
    Tied to the loss on every worker, they are reached on all.

    loss: a tensor; on a worker without a loss of its own `torch.zeros(())`. outputs: tensors of its graph, or none.
    Forward: the loss. Gradient: g to the loss, zeros to each output, exact zeros though the outputs hold infinities.
    """
    tied = Tie.apply(plain(loss), *(plain(x) for x in outputs))
    worker = WORKER.get()
    return stated(tied, state_of_tensor(loss)) if worker is not None and worker.tracked else tied
