"""Operators as functions of torch's autograd: one generic function, whose backward applies the operator's adjoint.

An operator gives all that torch wants to know. Its backward is `H` applied through the same function, so there is a
backward of the backward, to any order; it is linear, so its forward-mode derivative is itself, applied to the tangent.
Which worker applies it is kept with the graph (`Seat`): the backward of a graph may run in another thread, and in
another run of the workers than its forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch

from spmd.autodiff.dtypes import mean_dtype
from spmd.bridge.torch.functorch import dual, transformed
from spmd.bridge.torch.interop import array_dtype, block_of, owned, torch_dtype
from spmd.bridge.torch.tensor_state import TensorWithState, differentiated, no_overrides, plain
from spmd.bridge.torch.worker_context import Seat, no_lockstep
from spmd.errors import caller
from spmd.mesh import WORKER
from spmd.operators.base import Collective, Operator, Vary, interned, launch
from spmd.operators.reduce import Sum

__all__ = ["Function", "Task", "apply", "captured"]


class _Function(torch.autograd.Function):
    apply = torch.autograd.Function.__dict__["apply"]  # torch's own, which `autograd_functions` replaces for users


Function: Any = _Function
"""Untyped: its methods take what those of a subclass say."""
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
        block, lent = block_of(plain(x) if isinstance(x, TensorWithState) else x, worker, f"spmd.{op.function}")
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


def apply(op: Any, x: torch.Tensor, seat: Seat, frame: Any = None) -> torch.Tensor:
    """An operator on a tensor, recorded where it is differentiated; no check of states. frame: from where it counts as
    called, a frame or a Place; None: from the nearest line of the user's above."""
    finish = started(op, plain(x) if isinstance(x, TensorWithState) else x, seat, frame)
    with no_overrides():
        return finish()


def started(op: Collective, x: torch.Tensor, seat: Seat, frame: Any) -> Callable[[], torch.Tensor]:
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
