"""Operators as functions of torch's autograd: one generic function, whose backward applies the operator's adjoint.

The backward of an operator is `H`, applied through the same function, so it can be differentiated to any order. The
operator is linear, so its forward-mode derivative is the operator itself, applied to the tangent.
The graph keeps the `WorkerContext` that applied the operator: backward may run in another thread than forward, and in
another run of the workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Protocol

import torch

from spmd.autodiff.dtypes import mean_dtype
from spmd.bridge.torch.functorch import has_tangent, is_wrapped
from spmd.bridge.torch.interop import array_dtype, block_of, owned, torch_dtype
from spmd.bridge.torch.tensor_state import TensorWithState, needs_grad, no_overrides, plain
from spmd.bridge.torch.worker_context import WorkerContext, assigned, refuse_lockstep
from spmd.errors import caller
from spmd.mesh import WORKER
from spmd.operators.apply import launch
from spmd.operators.base import Collective, Operator
from spmd.operators.memo import interned
from spmd.operators.partial_comm import whole_comm
from spmd.operators.sums import Sum, Vary

__all__ = ["CollectiveCall", "Function", "GraphCalls", "apply", "recorded_calls", "sized_in_graph", "use_graph_calls"]


class _Function(torch.autograd.Function):
    apply = torch.autograd.Function.__dict__["apply"]  # that of torch, which `user_functions` replaces


Function: Any = _Function
"""Typed as Any, because subclasses give its methods other signatures."""
_RECORDED: ContextVar[list[CollectiveCall] | None] = ContextVar("spmd_torch_recorded", default=None)


@contextmanager
def recorded_calls() -> Iterator[list[CollectiveCall]]:
    """Record the collectives that are applied inside."""
    calls: list[CollectiveCall] = []
    with assigned(_RECORDED, calls):
        yield calls


class GraphCalls(Protocol):
    """How operators are applied where there are no data yet."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether an operator is applied to x in this way."""
        ...

    def apply(self, op: Any, x: torch.Tensor) -> torch.Tensor:
        """The result, as a node of the graph that is compiled."""
        ...

    def sized(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """x, known to have this shape."""
        ...


_graph_calls: GraphCalls


def use_graph_calls(calls: GraphCalls) -> None:
    """Let operators be applied in this way while a graph is compiled."""
    global _graph_calls
    _graph_calls = calls


def sized_in_graph(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """x, which has this shape: a graph that is compiled may not know it."""
    return _graph_calls.sized(x, shape) if _graph_calls.takes(x) else x


class CallSite:
    """The line of a frame, without its variables. An adjoint reports the line of its forward."""

    __slots__ = ("f_code", "f_globals", "f_lasti")
    f_back = None

    def __init__(self, frame: FrameType | CallSite):
        self.f_code, self.f_globals, self.f_lasti = frame.f_code, frame.f_globals, frame.f_lasti


class CollectiveCall:
    """One application of a collective by one worker.

    call_site: the user's line. op: the operator; `run` replaces it by the one bound to the shapes of all blocks.
    needs_grad: a list of one flag: whether any worker's tensor is differentiated.
    key: in `varied_copies`, of the parameter that this call varies.
    leaf_added: whether backward ends here, because only other workers' tensors are differentiated.
    scalar_term: whether this call varies a scalar that meets Varying tensors.
    counted: whether workers of other groups make this call too, and those of its derivatives.
    """

    __slots__ = (
        *("call_site", "context", "counted", "finish", "key", "leaf_added", "needs_grad", "op", "result"),
        "scalar_term",
    )

    def __init__(self, op: Collective, context: WorkerContext, frame: Any = None):
        user = caller(frame or sys._getframe(1))
        self.call_site = None if user is None else CallSite(user)
        self.op: Any = op
        self.context = context
        self.counted = context.worker is None or whole_comm(context.worker.comm).in_order
        self.needs_grad = [False]
        self.result: torch.Tensor | None = None
        self.finish: Callable[[], Any] | None = None
        self.key: Any = None
        self.leaf_added = False
        self.scalar_term = False

    def note(self, x: torch.Tensor) -> None:
        """Let `recorded_calls` know of this call, for x."""
        calls = _RECORDED.get()
        if calls is not None:
            calls.append(self)
            self.needs_grad[0] = needs_grad(x)

    def repeated(self) -> CollectiveCall:
        """Another call of the same operator, from the same line."""
        return CollectiveCall(self.op, self.context, self.call_site)

    def apply(self, op: Any, x: torch.Tensor) -> torch.Tensor:
        """Apply another operator, from the same line."""
        comm = whole_comm(self.context.acting_worker().comm)
        with comm.uncounted(comm.in_order and not self.counted):
            return apply(op, x, self.context, self.call_site)

    def start(self, x: torch.Tensor) -> None:
        """Start the collective on the data of x."""
        op, worker = self.op, self.context.acting_worker()
        refuse_lockstep(worker)
        block, borrowed = block_of(plain(x) if isinstance(x, TensorWithState) else x, worker, f"spmd.{op.function}")
        if WORKER.get() is worker:
            self.finish = launch(op, block, worker, self.call_site, self.needs_grad, borrowed)
            return
        with assigned(WORKER, worker):  # in a thread of torch's own
            self.finish = launch(op, block, worker, self.call_site, self.needs_grad, borrowed)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The result for the data of x."""
        if self.result is None:
            if type(self.op) is Vary:
                # A view of x itself would hold x, and x holds its varied copies: no collector would see that cycle.
                alias = x.detach()
                return alias.view_as(alias)
            if self.finish is None:
                self.start(x)
            assert self.finish is not None
            cell: list[Any] = [None]
            cell[0], self.op = self.finish()
            self.finish = None
            self.result = owned(cell)
        result, self.result = self.result, None
        return result


class LinearFunction(Function):
    """A linear operator on this worker's block, for backward only. Without `setup_context`, torch calls it three times
    as fast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: CollectiveCall) -> torch.Tensor:
        ctx.call = call
        return call.run(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        call: CollectiveCall = ctx.call
        if call.key is not None:
            call.context.varied_copies.pop(call.key, None)
        cotangent = call.apply(call.op.back, g)
        return (None if call.leaf_added else cotangent), None


class TransformableFunction(Function):
    """A linear operator for forward mode and for the transformations of torch.func."""

    @staticmethod
    def forward(x: torch.Tensor, call: CollectiveCall) -> torch.Tensor:
        return call.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[1]

    backward = LinearFunction.backward

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> Any:
        return None if tangent is None else ctx.call.apply(ctx.call.op, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, call: CollectiveCall) -> Any:
        """One collective per sample. All are started before the first is waited for."""
        parts = x.unbind(in_dims[0])
        if not parts:
            return _empty_batch(TransformableFunction, x, in_dims[0], call), 0
        calls = [call.repeated() for _ in parts]
        for part, part_call in zip(parts, calls, strict=True):
            if type(part_call.op) is not Vary and not is_wrapped(part):
                part_call.start(part)
        results = list(map(TransformableFunction.apply, parts, calls))
        call.op = calls[0].op
        return torch.stack(results), 0


def _empty_batch(kind: Any, x: torch.Tensor, dim: int, call: CollectiveCall) -> torch.Tensor:
    """The result for an empty batch. Its shape is that of a sample of zeros."""
    shape = list(x.shape)
    del shape[dim]
    sample = kind.apply(x.new_zeros(shape), call.repeated())
    return sample.new_zeros((0, *sample.shape))


class ExtremumFunction(Function):
    """The extremum over workers. The entries that attain it share the cotangent equally."""

    @staticmethod
    def forward(x: torch.Tensor, call: CollectiveCall) -> torch.Tensor:
        return call.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, call = inputs
        ctx.call = call
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def _weights(ctx: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The share of each entry in the cotangent, and the dimensions that are reduced."""
        dims = ctx.call.op.dims
        x, extremum = ctx.saved_tensors
        ties, count = ties_of(x, extremum, dims)
        total = ctx.call.apply(ctx.call.op.backward(interned(Sum, ctx.call.op.axes)), count.detach())
        return ties.detach() / total, dims

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        weights, dims = ExtremumFunction._weights(ctx)
        # The extremum and its cotangent are Invariant, so a derivative with respect to g is summed over workers.
        g = ctx.call.apply(Vary(ctx.call.op.axes), g)
        return (expanded(g, dims) * weights).to(g.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> Any:
        weights, dims = ExtremumFunction._weights(ctx)
        share = tangent * weights
        sum_shares = ctx.call.op.backward(interned(Sum, ctx.call.op.axes))
        total = ctx.call.apply(sum_shares, share.sum(dims) if dims else share)
        return total.to(tangent.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, call: CollectiveCall) -> Any:
        parts = x.unbind(in_dims[0])
        if not parts:
            return _empty_batch(ExtremumFunction, x, in_dims[0], call), 0
        return torch.stack([ExtremumFunction.apply(part, call.repeated()) for part in parts]), 0


def expanded(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """x with dimensions of length 1 in place of reduced ones."""
    for d in sorted(dims):
        x = x.unsqueeze(d)
    return x


def ties_of(x: torch.Tensor, extremum: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ones where x attains the extremum over dims, and their count on this worker."""
    extremum = expanded(extremum, dims)
    wide = mean_dtype(array_dtype(x.dtype))  # a short number does not hold a large count
    ties = ((x == extremum) | (x.isnan() & extremum.isnan())).to(x.dtype if wide is None else torch_dtype(wide))
    return ties, ties.sum(dims, keepdim=True) if dims else ties


def apply(op: Any, x: torch.Tensor, context: WorkerContext, frame: Any = None) -> torch.Tensor:
    """Apply an operator to a tensor, and record it if it is differentiated. States are not checked.

    frame: the frame or `CallSite` that errors and the ledger name; None: the nearest frame of the user's code.
    """
    finish = start_call(op, plain(x) if isinstance(x, TensorWithState) else x, context, frame)
    with no_overrides():
        return finish()


def start_call(op: Collective, x: torch.Tensor, context: WorkerContext, frame: Any) -> Callable[[], torch.Tensor]:
    """Start an operator on a plain tensor. Returns a function that waits for the result."""
    if _graph_calls.takes(x):
        return lambda: _graph_calls.apply(op, x)
    call = CollectiveCall(op, context, frame)
    call.note(x)
    kind = LinearFunction if isinstance(op, Operator) else ExtremumFunction
    if is_wrapped(x) or has_tangent(x):
        kind = TransformableFunction if kind is LinearFunction else ExtremumFunction
        return lambda: kind.apply(x, call)
    if type(op) is Vary:
        return lambda: LinearFunction.apply(x, call)
    with no_overrides():
        countable = x.is_floating_point() or x.is_complex()
        call.needs_grad[0] = needs_grad(x) and countable
        call.start(x)
    grad = torch.is_grad_enabled()

    def finish() -> torch.Tensor:
        result = call.result = call.run(x)
        if not (call.needs_grad[0] and grad) or not (result.is_floating_point() or result.is_complex()):
            return result
        y = x
        if not x.requires_grad:
            y = x.detach().requires_grad_()
            call.leaf_added = True
            if context.extra_leaves is not None:
                context.extra_leaves.append(y)
        return kind.apply(y, call)

    return finish
