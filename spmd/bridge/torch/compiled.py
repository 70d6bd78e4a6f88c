"""Operators in compiled functions: one custom op that torch.compile can see, for all of them.

A compiled graph holds no Python objects. It refers to an operator by name (a token). Forward binds the operator to the
shapes of all blocks; the graph refers to the bound operator and the worker's context by a ticket: a number in a tensor,
which it passes to backward. Only compiled functions use this module.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

import spmd
from spmd.bridge.torch.compiled_shapes import check_planned, differs_by_worker, ndims_seen, result_lengths, tokens
from spmd.bridge.torch.function import apply, expanded, recorded_calls, ties_of
from spmd.bridge.torch.tensor import STATE_IN_COMPILED, Tensor
from spmd.bridge.torch.worker_context import COMPILE_GUARD, WorkerContext, context_of, map_ended
from spmd.errors import MeshError, StateError
from spmd.grid import Grid
from spmd.layout import Layout, P
from spmd.mesh import WORKER, here
from spmd.operators.apply import operate
from spmd.operators.base import Operator, named
from spmd.operators.reduce import Extremum
from spmd.operators.sums import Sum
from spmd.tracebacks import api_boundary

__all__ = [
    "OperatorFunction",
    "compilable",
    "context_of_ticket",
    "frozen",
    "operator",
    "own_result",
    "refuse_states",
    "thawed",
    "ticket_of",
    "token_of",
    "total_token",
    "traced",
]

# References in a graph: tokens for functions, tickets for bound operators.

_contexts: WeakValueDictionary[int, WorkerContext] = WeakValueDictionary()
_PLACES = 1 << 24


def _token(name: str, args: tuple, kwargs: dict[str, Any], part_of: str = "", back: bool = False) -> str:
    """The name in graphs of a function of bodies with these arguments. part_of: the function that the user called,
    where it is a sum within another one (back: within its derivative): workers that run the same line without a graph
    call it by that name."""
    text = f"{name}{args!r}{kwargs!r}" + f" of {part_of}" * bool(part_of)
    function = functools.partial(_summed, part_of, back) if part_of else getattr(spmd, name)
    tokens.setdefault(text, (function, args, kwargs))
    return text


def _summed(part_of: str, back: bool, x: Any, names: tuple[str, ...]) -> Any:
    return operate(named("psum", Sum, names, forward=part_of) if back else named(part_of, Sum, names), x)


def ticket_of(context: WorkerContext, op: Operator | None = None) -> torch.Tensor:
    """A number for a worker's context, and an operator bound there; equal ones have one number."""
    if context.number not in _contexts:
        _contexts[context.number] = context
    place = 0 if op is None else context.tickets.setdefault(op, len(context.tickets))
    return torch.tensor([context.number * _PLACES + place])


def context_of_ticket(ticket: torch.Tensor) -> WorkerContext:
    """The worker's context of a ticket."""
    context = _contexts.get(int(ticket) // _PLACES)
    if context is None:
        raise map_ended("backward of a compiled function")
    return context


def _bound(ticket: torch.Tensor) -> tuple[Operator, WorkerContext]:
    """The operator of a ticket, and the worker's context."""
    context = context_of_ticket(ticket)
    return next(itertools.islice(context.tickets, int(ticket) % _PLACES, None)), context


def own_result(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A result that shares no memory with the argument, and is laid out as graphs expect."""
    y = y.contiguous()
    return y.clone() if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else y


@torch.library.custom_op("spmd::apply", mutates_args=(), schema="(Tensor x, str token) -> (Tensor, Tensor)")
def _apply(x: torch.Tensor, token: str) -> tuple[torch.Tensor, torch.Tensor]:
    function, args, kwargs = tokens[token]
    with torch.no_grad(), recorded_calls() as calls:
        y = function(x, *args, **kwargs)
    op = calls[0].op if len(calls) == 1 else None
    if not isinstance(op, Operator):
        raise MeshError.at(
            f"a compiled call of {token.split('(')[0]}",
            got=f"{len(calls)} collectives",
            need="one linear operator",
            mend="call it outside of the compiled function",
        )
    check_planned(token, tuple(x.shape), tuple(y.shape), here("torch.compile"))
    y = own_result(y, x)
    return y, ticket_of(calls[0].context, op)


@_apply.register_fake
def _(x: torch.Tensor, token: str) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = result_lengths(token, tuple(x.shape), here("torch.compile"))
    context = torch.library.get_ctx()
    shape = [context.new_dynamic_size() if n is None else n for n in lengths]
    return x.new_empty(shape), torch.empty(1, dtype=torch.int64)


@torch.library.custom_op(
    "spmd::move", mutates_args=(), schema="(Tensor g, Tensor ticket, SymInt[] shape, bool forward) -> Tensor"
)
def _move(g: torch.Tensor, ticket: torch.Tensor, shape: Sequence[int], forward: bool) -> torch.Tensor:
    op, context = _bound(ticket)
    with torch.no_grad():
        y = apply(op if forward else op.back, g, context)
    return own_result(y, g)


@_move.register_fake
def _(g: torch.Tensor, ticket: torch.Tensor, shape: Sequence[int], forward: bool) -> torch.Tensor:
    return g.new_empty(shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape = inputs[0].shape
    ctx.save_for_backward(output[1])


def _back(ctx: Any, g: torch.Tensor, _: Any) -> Any:
    (ticket,) = ctx.saved_tensors
    return torch.ops.spmd.move(g, ticket, ctx.shape, False), None


def _keep_move(ctx: Any, inputs: Any, output: Any) -> None:
    g, ticket, _, ctx.forward = inputs
    ctx.shape = g.shape
    ctx.save_for_backward(ticket)


def _back_of_move(ctx: Any, g: torch.Tensor) -> Any:
    (ticket,) = ctx.saved_tensors
    return torch.ops.spmd.move(g, ticket, ctx.shape, not ctx.forward), None, None, None


torch.library.register_autograd("spmd::apply", _back, setup_context=_keep)
torch.library.register_autograd("spmd::move", _back_of_move, setup_context=_keep_move)


# What users call


def compilable(function: Callable) -> Callable:
    """A function of bodies, so that it can be compiled too."""
    name = function.__name__
    own = _DECOMPOSED.get(name)

    @functools.wraps(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and isinstance(x, torch.Tensor):
            refuse_states(x)
            if own is not None:
                return own(x, *args, **kwargs)
            return _in_graph(x, name, args, kwargs)
        return function(x, *args, **kwargs)

    return call


def _in_graph(x: torch.Tensor, name: str, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """A function of one linear operator, traced."""
    positional, named = tuple(frozen(a) for a in args), tuple((k, frozen(a)) for k, a in kwargs.items())
    return traced(x, _constant_token(name, positional, named))


def traced(x: torch.Tensor, token: str) -> torch.Tensor:
    if _constant_differs_by_worker(token):
        assert COMPILE_GUARD.name  # read, so that it is guarded
    return torch.ops.spmd.apply(x, token)[0]


@torch.compiler.assume_constant_result
def _constant_differs_by_worker(token: str) -> bool:
    return differs_by_worker(token)


@torch.compiler.assume_constant_result
def _constant_token(name: str, args: tuple, kwargs: tuple, part_of: str = "", back: bool = False) -> str:
    return _token(name, tuple(thawed(a) for a in args), {k: thawed(a) for k, a in kwargs}, part_of, back)


def frozen(a: Any) -> Any:
    """An argument as constants that the tracer of torch.compile can hold."""
    if isinstance(a, P):
        return "P", a.dims
    if isinstance(a, Layout):
        spec = None if a.spec is None else a.spec.dims
        return "Layout", a.shape, spec, tuple(a.axes.items()), a.cuts, a.copies, a.workers
    if isinstance(a, Grid):
        return "Grid", a.dims, a.workers, a.copies, a.axes
    if isinstance(a, (tuple, list)):  # older tracers know no unions
        return "tuple", tuple([frozen(b) for b in a])
    return a


def thawed(a: Any) -> Any:
    match a:
        case ("P", dims):
            return P(*dims)
        case ("Layout", shape, None, axes, cuts, copies, workers):
            grid = [len(c) for c in cuts]
            grid.append(len(workers) // max(1, math.prod(grid)))
            return Layout.grid(shape, grid, dict(axes), workers, cuts, copies=copies)
        case ("Layout", shape, dims, axes, cuts, copies, _):
            return Layout(shape, P(*dims), dict(axes), cuts, copies=copies)
        case ("Grid", *fields):
            return Grid(*fields)
        case ("tuple", items):
            return tuple(thawed(b) for b in items)
    return a


def token_of(function: Callable, text: str, layouts: tuple[Layout, ...] | None = None) -> str:
    """The name in graphs of a function of bodies that applies one operator, and may learn from the blocks which.

    layouts: of its argument and its result, where they are known.
    """
    wrapped: Any = functools.partial(function)
    wrapped.learns, wrapped.layouts = True, layouts
    tokens[text] = (wrapped, (), {})
    return text


# Functions of more than one collective, or of one that is not linear


@torch.library.custom_op("spmd::attain", mutates_args=(), schema="(Tensor x, str how, str total, int[] dims) -> Tensor")
def _attain(x: torch.Tensor, how: str, total: str, dims: Sequence[int]) -> torch.Tensor:
    """The extremum over dimensions and workers. how: the function's name, "pmax", "pmin", "max" or "min". total: the
    name in graphs of the sum over those workers."""
    (names,) = tokens[total][1]
    with torch.no_grad():
        op = named(how, Extremum, names, how[-3:], tuple(dims))
        return own_result(apply(op, x, context_of(here("torch.compile"))), x)


@_attain.register_fake
def _(x: torch.Tensor, how: str, total: str, dims: Sequence[int]) -> torch.Tensor:
    return x.new_empty([n for d, n in enumerate(x.shape) if d not in dims])


def _keep_attain(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, ctx.total, ctx.dims = inputs
    ctx.save_for_backward(x, output)


def _back_of_attain(ctx: Any, g: torch.Tensor) -> Any:
    """The cotangent goes to the entries that attain the extremum, in equal shares."""
    x, top = ctx.saved_tensors
    g = torch.ops.spmd.apply(g, ctx.total.partition(" of ")[0].replace("psum", "pvary", 1))[0]
    ties, count = ties_of(x, top, tuple(ctx.dims))
    total = torch.ops.spmd.apply(count, ctx.total)[0]
    return (expanded(g, ctx.dims) * (ties / total)).to(g.dtype), None, None, None


torch.library.register_autograd("spmd::attain", _back_of_attain, setup_context=_keep_attain)


@torch.compiler.assume_constant_result
def _constant_axes(axis_name: Any, function: str) -> tuple[tuple[str, ...], int]:
    """The names of axes, and how many workers lie along them."""
    worker = here(f"spmd.{function}")
    names = worker.mesh.names(thawed(axis_name), f"spmd.{function}")
    return names, worker.group(names).size


def _dims(x: torch.Tensor, axis: Any) -> tuple[int, ...]:
    chosen = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    return tuple([d % x.ndim for d in chosen])


def _sum_of(part_of: str, x: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
    return traced(x, _constant_token("psum", (frozen(names),), (), part_of))


def _sum_traced(x: torch.Tensor, axis_name: Any, axis: Any = None) -> torch.Tensor:
    names, _ = _constant_axes(frozen(axis_name), "sum")
    dims = _dims(x, axis)
    if x.dtype in _SHORT:
        return _sum_of("sum", x.sum(dims, dtype=torch.float32) if dims else x.float(), names).to(x.dtype)
    return _sum_of("sum", x.sum(dims) if dims else x, names)


_SHORT = (torch.float16, torch.bfloat16)


def _widened(x: torch.Tensor) -> torch.Tensor:
    """x as it is added up for a mean: see `spmd.autodiff.dtypes.mean_dtype`."""
    if x.dtype in _SHORT:
        return x.float()
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.int64)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if dtype in _SHORT else x


def _mean_traced(x: torch.Tensor, axis_name: Any, axis: Any = None) -> torch.Tensor:
    names, _ = _constant_axes(frozen(axis_name), "mean")
    dims = _dims(x, axis)
    wide = _widened(x)
    total = _sum_of("mean", wide.sum(dims) if dims else wide, names)
    count = 1
    for d in dims:
        count = count * x.shape[d]
    entries = _sum_of("mean", torch.full((), count, dtype=torch.int64), names)
    return _rounded(total / entries, x.dtype)


def _pmean_traced(x: torch.Tensor, axis_name: Any) -> torch.Tensor:
    names, size = _constant_axes(frozen(axis_name), "pmean")
    return _rounded(_sum_of("pmean", _widened(x), names) / size, x.dtype)


def total_token(function: str, names: tuple[str, ...]) -> str:
    """The name in graphs of the sum that an extremum by a function takes backward."""
    _token("pvary", (names,), {})
    return _token("psum", (names,), {}, function, True)


@torch.compiler.assume_constant_result
def _constant_total(function: str, names: tuple[str, ...]) -> str:
    return total_token(function, names)


def _extremum_traced(how: str, over_entries: bool) -> Callable:
    def call(x: torch.Tensor, axis_name: Any, axis: Any = None) -> torch.Tensor:
        function = how if over_entries else f"p{how}"
        names, _ = _constant_axes(frozen(axis_name), function)
        dims = _dims(x, axis) if over_entries else ()
        total = _constant_total(function, names)
        return torch.ops.spmd.attain(x, function, total, list(dims))

    return call


_DECOMPOSED: dict[str, Callable] = {
    "sum": _sum_traced,
    "mean": _mean_traced,
    "pmean": _pmean_traced,
    "max": _extremum_traced("max", True),
    "min": _extremum_traced("min", True),
    "pmax": _extremum_traced("max", False),
    "pmin": _extremum_traced("min", False),
}
"""How functions are traced that are not one linear operator."""


def refuse_states(x: torch.Tensor) -> None:
    if isinstance(x, Tensor):
        raise StateError(STATE_IN_COMPILED)


class OperatorFunction:
    """An operator as a function of tensors; see `operator`."""

    def __init__(self, op: Operator):
        self.op = op
        self.token = repr(op)
        tokens.setdefault(self.token, (op, (), {}))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            refuse_states(x)
            return traced(x, self.token)
        y = self.op(x)
        worker = WORKER.get()
        if worker is not None and isinstance(y, torch.Tensor) and not worker.tracked:
            ndims_seen[self.token, tuple(x.shape), tuple(worker.mesh.axes.items()), worker.index] = y.ndim
        return y

    @property
    def H(self) -> OperatorFunction:
        """The adjoint."""
        return OperatorFunction(self.op.H)

    def __repr__(self) -> str:
        return f"spt.operator({self.op!r})"


@api_boundary
def operator(op: Operator) -> OperatorFunction:
    """An operator of `spmd.operators` as a function of this worker's tensor, in eager and in compiled bodies.

    Forward: y = A x. Gradient: A.H g, in the state-aware inner product; its own gradient is A again.

        >>> from spmd.operators.gather import AllGather
        >>> with spmd.Mesh(x=2):
        ...     spt.map(spt.operator(AllGather(("x",), 0, True)), P("x"), P("x"))(torch.arange(2.0))
        tensor([0., 1., 0., 1.])
    """
    return OperatorFunction(op)
