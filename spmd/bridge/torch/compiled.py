"""Operators in compiled functions: one custom op that torch.compile can see, for all of them.

A compiled graph holds no Python objects, so an operator stands in it by its name (a token), and what came of it, the
operator bound to the blocks it met and the place of the worker, by a ticket: a number in a tensor, which the graph
hands on to backward. Outside of compiled functions nothing of this is used.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

import spmd
from spmd.bridge.torch.function import Seat, apply, captured
from spmd.errors import MeshError, message
from spmd.layout import Layout, P
from spmd.mesh import WORKER, Worker, here
from spmd.operators.base import Operator

__all__ = ["OperatorFunction", "compilable", "operator", "token_of"]

# What stands in a graph: tokens for what is called, tickets for what came of it.

_tokens: dict[str, tuple[Any, tuple, dict[str, Any]]] = {}
_seats: WeakValueDictionary[int, Seat] = WeakValueDictionary()
_PLACES = 1 << 24


def _token(name: str, args: tuple, kwargs: dict[str, Any]) -> str:
    """The name in graphs of a function of bodies with these arguments."""
    text = f"{name}{args!r}{kwargs!r}"
    _tokens.setdefault(text, (getattr(spmd, name), args, kwargs))
    return text


def _ticket(op: Operator, seat: Seat) -> torch.Tensor:
    """A number for an operator bound on a worker; equal ones have one number."""
    if seat.number not in _seats:
        _seats[seat.number] = seat
    place = seat.tickets.setdefault(op, len(seat.tickets))
    return torch.tensor([seat.number * _PLACES + place])


def _bound(ticket: torch.Tensor) -> tuple[Operator, Seat]:
    """The operator of a ticket, and the worker's place."""
    number, place = divmod(int(ticket), _PLACES)
    seat = _seats.get(number)
    if seat is None:
        raise MeshError(
            message(
                "backward of a compiled function",
                got="a graph of a body whose map is over",
                need="backward inside the body, or from outside through a result of the map",
                mend="call loss.backward() in the body, or return the loss with an out_spec, as P()",
            )
        )
    return next(itertools.islice(seat.tickets, place, None)), seat


@torch.library.custom_op("spmd::apply", mutates_args=(), schema="(Tensor x, str token) -> (Tensor, Tensor)")
def _apply(x: torch.Tensor, token: str) -> tuple[torch.Tensor, torch.Tensor]:
    function, args, kwargs = _tokens[token]
    with torch.no_grad(), captured() as tasks:
        y = function(x, *args, **kwargs)
    op = tasks[0].op if len(tasks) == 1 else None
    if not isinstance(op, Operator):
        raise MeshError(
            message(
                f"a compiled call of {token.split('(')[0]}",
                got=f"{len(tasks)} collectives",
                need="one linear operator",
                mend="call it outside of the compiled function",
            )
        )
    if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        y = y.clone()
    return y, _ticket(op, tasks[0].seat)


@_apply.register_fake
def _(x: torch.Tensor, token: str) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = _lengths(token, tuple(x.shape), here("torch.compile"))
    context = torch.library.get_ctx()
    shape = [context.new_dynamic_size() if n is None else n for n in lengths]
    return x.new_empty(shape), torch.empty(1, dtype=torch.int64)


@torch.library.custom_op(
    "spmd::move", mutates_args=(), schema="(Tensor g, Tensor ticket, SymInt[] shape, bool forward) -> Tensor"
)
def _move(g: torch.Tensor, ticket: torch.Tensor, shape: Sequence[int], forward: bool) -> torch.Tensor:
    op, seat = _bound(ticket)
    with torch.no_grad():
        y = apply(op if forward else op.H, g, seat)
    if y.untyped_storage().data_ptr() == g.untyped_storage().data_ptr():
        y = y.clone()
    return y


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


# Shapes, before anything has moved


def _lengths(token: str, shape: tuple[Any, ...], worker: Worker) -> tuple[Any, ...]:
    """The shape of the result on this worker; None for a length that the blocks of the others decide.

    Found by trying: the operator is run on virtual workers whose blocks have the shape of this one's, and again where
    the others' are longer. A length that is itself open, as another operator has left it, is tried with two numbers.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # slow to import

    axes = tuple(worker.mesh.axes.items())
    open_dims = [d for d, n in enumerate(shape) if free_unbacked_symbols(n)]
    if not open_dims:
        return _tried(token, tuple(int(n) for n in shape), axes, worker.index)
    tries = [tuple(first + 2 * d if d in open_dims else int(n) for d, n in enumerate(shape)) for first in (211, 307)]
    a, b = (_tried(token, t, axes, worker.index) for t in tries)

    def one(n: int | None, m: int | None) -> Any:
        same = [shape[d] for d in open_dims if (n, m) == (tries[0][d], tries[1][d])]
        return n if n == m else same[0] if same else None

    return tuple(one(n, m) for n, m in zip(a, b, strict=True))


@functools.lru_cache(maxsize=4096)
def _tried(token: str, shape: tuple[int, ...], axes: tuple[tuple[str, int], ...], index: int) -> tuple[int | None, ...]:
    function = _tokens[token][0]
    layouts = getattr(function, "layouts", None)
    if layouts is not None:
        mesh = spmd.make_mesh([n for _, n in axes], [name for name, _ in axes], transport="local", device="cpu")
        return layouts[1].block_shape(mesh.group(index, tuple(layouts[1].axes)).index)
    try:
        found = _one_try(token, shape, shape, axes, index)
    except (ValueError, TypeError, RuntimeError):
        if not getattr(function, "learns", False):
            raise
        return (None,) * len(shape)  # workers hold blocks of other shapes than this one's
    lengths: list[int | None] = list(found)
    for d in range(len(shape)):
        longer = (*shape[:d], shape[d] + 1, *shape[d + 1 :])
        with suppress(ValueError, TypeError, RuntimeError):  # such blocks do not meet
            other = _one_try(token, shape, longer, axes, index)
            lengths = [n if n == m else None for n, m in zip(lengths, other, strict=True)]
    return tuple(lengths)


def _one_try(
    token: str, mine: tuple[int, ...], others: tuple[int, ...], axes: tuple[tuple[str, int], ...], index: int
) -> tuple[int, ...]:
    function, args, kwargs = _tokens[token]
    mesh = spmd.make_mesh([n for _, n in axes], [name for name, _ in axes], transport="local", device="cpu")

    def body(worker: Worker) -> tuple[int, ...]:
        block = np.zeros(mine if worker.index == index else others, np.int8)
        return tuple(function(block, *args, **kwargs).shape)

    outer = WORKER.set(None)
    try:
        return mesh.run(body, tracked=False, scheduler="lockstep").results[index]
    finally:
        WORKER.reset(outer)


# What users call


def compilable(function: Callable) -> Callable:
    """A function of bodies, so that it can be compiled too."""
    name = function.__name__

    @functools.wraps(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and isinstance(x, torch.Tensor):
            frozen = tuple(_frozen(a) for a in args), tuple((k, _frozen(a)) for k, a in kwargs.items())
            return torch.ops.spmd.apply(x, _constant_token(name, *frozen))[0]
        return function(x, *args, **kwargs)

    return call


@torch.compiler.assume_constant_result
def _constant_token(name: str, args: tuple, kwargs: tuple) -> str:
    return _token(name, tuple(_thawed(a) for a in args), {k: _thawed(a) for k, a in kwargs})


def _frozen(a: Any) -> Any:
    """An argument as constants that the tracer of torch.compile can hold."""
    if isinstance(a, P):
        return "P", a.dims
    if isinstance(a, Layout):
        spec = None if a.spec is None else a.spec.dims
        return "Layout", a.shape, spec, tuple(a.axes.items()), a.cuts, a.copies, a.workers
    if isinstance(a, (tuple, list)):  # older tracers know no unions
        return "tuple", tuple([_frozen(b) for b in a])
    return a


def _thawed(a: Any) -> Any:
    match a:
        case ("P", dims):
            return P(*dims)
        case ("Layout", shape, None, axes, cuts, copies, workers):
            grid = [len(c) for c in cuts]
            grid.append(len(workers) // max(1, math.prod(grid)))
            return Layout.grid(shape, grid, dict(axes), workers, cuts, copies=copies)
        case ("Layout", shape, dims, axes, cuts, copies, _):
            return Layout(shape, P(*dims), dict(axes), cuts, copies=copies)
        case ("tuple", items):
            return tuple(_thawed(b) for b in items)
    return a


def token_of(function: Callable, text: str, layouts: tuple[Layout, ...] | None = None) -> str:
    """The name in graphs of a function of bodies that applies one operator, and may learn from the blocks which.

    layouts: of its argument and its result, where they are known.
    """
    found: Any = functools.partial(function)
    found.learns, found.layouts = True, layouts
    _tokens[text] = (found, (), {})
    return text


class OperatorFunction:
    """An operator as a function of tensors; see `operator`."""

    def __init__(self, op: Operator):
        self.op = op
        self.token = repr(op)
        _tokens.setdefault(self.token, (op, (), {}))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.spmd.apply(x, self.token)[0]
        return self.op(x)

    @property
    def H(self) -> OperatorFunction:
        """The adjoint."""
        return OperatorFunction(self.op.H)

    def __repr__(self) -> str:
        return f"spt.operator({self.op!r})"


def operator(op: Operator) -> OperatorFunction:
    """An operator of `spmd.operators` as a function of this worker's tensor, in eager and in compiled bodies.

    Forward: y = A x. Gradient: A.H g, in the state-aware inner product; its own gradient is A again.
    """
    return OperatorFunction(op)
