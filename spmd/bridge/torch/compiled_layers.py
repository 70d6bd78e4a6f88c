"""Layers in compiled functions: torch's own operators where only specs matter, else one custom op.

A call of a function of `spt.functions` becomes `torch.ops.spmd.layer`, of its tensors and a token for all else. While a
graph is compiled, that op runs the function: its arithmetic becomes nodes of the graph, and its collectives become
`torch.ops.spmd.apply`. Where the function needs lengths of other workers' blocks, or values, `torch.ops.spmd.opaque`
takes its place, which runs the function whenever the graph runs. Its backward runs it once more: it keeps nothing that
another graph could write to, or that would stay if backward never came.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, NoReturn

import numpy as np
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import spmd.bridge.torch.compiled_calls  # noqa: F401 (how operators are applied within layers)
from spmd import functions
from spmd.bridge.torch.compiled import context_of_ticket, frozen, own_result, refuse_states, thawed, ticket_of
from spmd.bridge.torch.compiled_layer_shapes import Result, assumed_results
from spmd.bridge.torch.tensor import STATE_IN_COMPILED
from spmd.bridge.torch.tensor_state import is_traced, no_overrides
from spmd.bridge.torch.worker_context import COMPILE_GUARD, assigned, context_of
from spmd.errors import MeshError, StateError
from spmd.functions.resizing import Taps
from spmd.mesh import WORKER, Worker
from spmd.tracebacks import boundary_like

__all__ = ["compilable_layer"]

_PROCESS = uuid.uuid4().hex[:8]
"""It ends the tokens of this process: graphs that torch keeps on disk are of no use to another, which knows none."""

_functions: dict[str, Callable] = {}
"""By name: the functions that are compiled."""
_layers: dict[str, tuple[str, Any]] = {}
"""By token: the name of a function, and its arguments with the numbers of tensors in place of tensors."""
_structures: dict[str, Any] = {}
"""By token: the results, with the numbers of tensors in place of tensors."""
_results: dict[str, tuple[Result, ...]] = {}
_opaque_calls: dict[tuple, tuple[Result, ...] | None] = {}
"""The calls that cannot be traced, by token and by what is known of the tensors, and what is known of their results."""


def compilable_layer(name: str, module: Any = functions) -> Callable:
    """A function of `spmd.functions`, or of another module, so that it can be compiled too."""
    function = _functions[name] = getattr(module, name)

    @boundary_like(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    @functools.wraps(function)
    def compiled_or_not(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _in_graph(name, args, kwargs)
        return _uncompiled(call)(*args, **kwargs)

    return compiled_or_not


def _uncompiled(function: Callable) -> Callable:
    """A function whose frames the compiler leaves alone, also where a compiled caller has come back to Python."""
    return function if get_eval_frame_callback() is None else torch.compiler.disable(function)


# What torch.compile traces


def _in_graph(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensors: list[torch.Tensor] = []
    template = _template(args, tensors), _template(kwargs, tensors)
    token = _constant_token(name, COMPILE_GUARD.name, template)
    results = torch.ops.spmd.layer(tensors, token)
    return _rebuilt(_constant_structure(token), results)


def _template(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value with the numbers of tensors in their place, of constants that the tracer can hold."""
    if isinstance(value, torch.Tensor):
        refuse_states(value)
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, np.ndarray):
        tensors.append(torch.as_tensor(value))
        return "array", len(tensors) - 1
    if isinstance(value, Taps):
        return "taps", value.name
    if isinstance(value, dict):
        return "dict", tuple([(k, _template(v, tensors)) for k, v in value.items()])
    if isinstance(value, (tuple, list)):  # older tracers know no unions
        return "tuple", tuple([_template(v, tensors) for v in value])
    return "value", frozen(value)


def _rebuilt(template: Any, tensors: Sequence[Any]) -> Any:
    """The value of a template."""
    kind, content = template
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "taps":
        return Taps.named[content]
    if kind == "dict":
        return {k: _rebuilt(v, tensors) for k, v in content}
    if kind == "tuple":
        return tuple([_rebuilt(v, tensors) for v in content])
    return thawed(content)


@torch.compiler.assume_constant_result
def _constant_token(name: str, worker: str, template: Any) -> str:
    arguments = ", ".join(_texts(template))
    token = f"{name}({arguments}) on {worker} in {_PROCESS}"
    _layers[token] = name, template
    return token


def _texts(template: Any) -> Iterator[str]:
    """The arguments as text."""
    (_, args), (_, kwargs) = template
    yield from map(_text, args)
    yield from (f"{name}={_text(value)}" for name, value in kwargs)


def _text(template: Any) -> str:
    kind, content = template
    if kind == "dict":
        return f"{{{', '.join(f'{k!r}: {_text(v)}' for k, v in content)}}}"
    if kind == "tuple":
        return f"({', '.join(map(_text, content))})"
    return repr(thawed(content)) if kind == "value" else f"{kind} {content}"


@torch.compiler.assume_constant_result
def _constant_structure(token: str) -> Any:
    return _structures[token]


def _called(token: str, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors among the results of a layer."""
    name, (args, kwargs) = _layers[token]
    leaves: list[torch.Tensor] = []
    results = _functions[name](*_rebuilt(args, xs), **_rebuilt(kwargs, xs))
    _structures[token] = _template(results, leaves)
    return leaves


# The layer in a graph

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("layer(Tensor[] xs, str token) -> Tensor[]")


def _layer(xs: Sequence[torch.Tensor], token: str) -> list[torch.Tensor]:
    worker = WORKER.get()
    if worker is not None and worker.tracked:
        raise StateError(STATE_IN_COMPILED)
    if not any(map(is_traced, xs)):
        return _uncompiled(_called)(token, xs)
    recorded = torch.is_grad_enabled()
    call = (token, recorded, *_autocast(), *((x.dtype, x.requires_grad, tuple(map(str, x.shape))) for x in xs))
    if call not in _opaque_calls:
        ys = _traced_layer(xs, token, worker)
        if ys is not None:
            return ys
        _opaque_calls[call] = None
    return _opaque_layer(xs, token, worker, call)


def _traced_layer(xs: Sequence[torch.Tensor], token: str, worker: Worker | None) -> list[torch.Tensor] | None:
    """The results as nodes of a graph; None for a layer that needs lengths of other workers, or values."""
    try:
        with _without_comm(worker):
            ys = _called(token, xs)
        _forget_inner_lengths(xs, ys)
        return ys
    except _OtherWorkersError:
        return None
    except Exception:  # of torch or of ours: it cannot do with any length, or with no values, or arguments are wrong
        if all(isinstance(n, int) for x in xs for n in x.shape):
            return None
    # Whether it can be traced must not depend on which lengths a worker's graph leaves open: all decide alike.
    try:
        with _without_comm(worker):
            return _called(token, [x.expand([int(n) for n in x.shape]) for x in xs])
    except Exception:
        return None


def _forget_inner_lengths(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> None:
    """Let the caller's graph ignore lengths that are open within a layer, and that no result of it has."""
    mode = detect_fake_mode([*xs])
    env: Any = None if mode is None else mode.shape_env
    if env is not None and env.pending_fresh_unbacked_symbols:
        lengths = set().union(*(free_unbacked_symbols(y) for y in ys))
        env.pending_fresh_unbacked_symbols = [u for u in env.pending_fresh_unbacked_symbols if u in lengths]


_library.impl("layer", _layer, "CompositeImplicitAutograd")


class _OtherWorkersError(Exception):
    """A layer needs something of other workers."""


class _NoComm:
    """The comm of a worker that compiles: it has none to meet."""

    def __init__(self, worker: int):
        self.worker = worker

    def __getattr__(self, name: str) -> NoReturn:
        raise _OtherWorkersError(name)


@contextmanager
def _without_comm(worker: Worker | None) -> Iterator[None]:
    """Let a worker raise where it would exchange something."""
    if worker is None:
        yield
        return
    alone = copy(worker)
    alone.comm = _NoComm(worker.index)  # type: ignore[assignment]
    alone.prepared = {}
    with assigned(WORKER, alone):
        yield


def _autocast() -> list[tuple[str, torch.dtype]]:
    """The kinds of devices on which torch chooses dtypes now, and which it chooses."""
    return [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def _opaque_layer(xs: Sequence[torch.Tensor], token: str, worker: Worker | None, call: tuple) -> list[torch.Tensor]:
    """A layer that runs when the graph does."""
    recorded = torch.is_grad_enabled()
    wanted = [recorded and x.requires_grad for x in xs]
    results = _opaque_calls[call]
    if results is None:
        results = assumed_results(lambda tensors: _called(token, tensors), xs, wanted, worker)
        _opaque_calls[call] = results
    autocast = _autocast()
    text = f"{results} {autocast}"
    _results[text] = results
    _autocasts[text] = autocast
    *ys, _ = torch.ops.spmd.opaque(xs, token, text, wanted)
    return [y if r.differentiable else y.detach() for y, r in zip(ys, results, strict=True)]


_autocasts: dict[str, list[tuple[str, torch.dtype]]] = {}


@torch.library.custom_op(
    "spmd::opaque", mutates_args=(), schema="(Tensor[] xs, str token, str results, bool[] wanted) -> Tensor[]"
)
def _opaque(xs: Sequence[torch.Tensor], token: str, results: str, wanted: Sequence[bool]) -> list[torch.Tensor]:
    worker = WORKER.get()
    with _running(worker, results), torch.no_grad():
        ys = _called(token, xs)
        _check(token, xs, ys, _results[results])
        ticket = torch.tensor([-1]) if worker is None else ticket_of(context_of(worker))
        return [*_apart(ys, xs), ticket]


@_opaque.register_fake
def _(xs: Sequence[torch.Tensor], token: str, results: str, wanted: Sequence[bool]) -> list[torch.Tensor]:
    context = torch.library.get_ctx()

    def length(n: Any) -> Any:
        return context.new_dynamic_size() if n is None else n

    ys = [xs[0].new_empty([length(n) for n in r.lengths_of(xs)], dtype=r.dtype) for r in _results[results]]
    return [*ys, torch.empty(1, dtype=torch.int64)]


@torch.library.custom_op(
    "spmd::opaque_back",
    mutates_args=(),
    schema="(Tensor[] xs, Tensor?[] gs, Tensor ticket, str token, str results, bool[] wanted) -> Tensor[]",
)
def _opaque_back(
    xs: Sequence[torch.Tensor],
    gs: Sequence[torch.Tensor | None],
    ticket: torch.Tensor,
    token: str,
    results: str,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """The cotangents of the tensors that are differentiated."""
    worker = None if int(ticket) < 0 else context_of_ticket(ticket).acting_worker()
    with _running(worker, results), torch.enable_grad():
        inputs = [x.detach().requires_grad_(w) for x, w in zip(xs, wanted, strict=True)]
        ys = _called(token, inputs)
        pairs = [(y, g) for y, g in zip(ys, gs, strict=True) if y.requires_grad and g is not None]
        leaves = [x for x in inputs if x.requires_grad]
        found = torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]
    return _apart(grads, [*xs, *(g for g in gs if g is not None)])


@_opaque_back.register_fake
def _(
    xs: Sequence[torch.Tensor],
    gs: Sequence[torch.Tensor | None],
    ticket: torch.Tensor,
    token: str,
    results: str,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x, w in zip(xs, wanted, strict=True) if w]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    xs, ctx.token, ctx.results, ctx.wanted = inputs
    ctx.count = len(xs)
    ctx.save_for_backward(*xs, output[-1])


def _back(ctx: Any, gs: Sequence[torch.Tensor | None]) -> Any:
    *xs, ticket = ctx.saved_tensors
    kept = [g if r.differentiable else None for g, r in zip(gs, _results[ctx.results], strict=False)]
    found = iter(torch.ops.spmd.opaque_back(xs, kept, ticket, ctx.token, ctx.results, ctx.wanted))
    return [next(found) if w else None for w in ctx.wanted], None, None, None


torch.library.register_autograd("spmd::opaque", _back, setup_context=_keep)


# How a layer runs within an op

_keys: Any = torch._C.DispatchKey
_AUTOGRAD = functools.reduce(
    lambda keys, key: keys | torch._C.DispatchKeySet(key),
    (_keys.AutogradCUDA, _keys.AutogradOther, _keys.ADInplaceOrView),
    torch._C.DispatchKeySet(_keys.AutogradCPU),
)


@contextmanager
def _running(worker: Worker | None, results: str) -> Iterator[None]:
    """A body of eager mode within an op: autograd records, and no states are tracked."""
    excluded = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
    with ExitStack() as stack:
        stack.enter_context(torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded))
        stack.enter_context(no_overrides())
        for device, dtype in _autocasts[results]:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        if worker is not None:
            stack.enter_context(assigned(WORKER, worker))
        yield


def _apart(ys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results that share no memory with the arguments or with one another."""
    taken, result = list(xs), []
    for y in ys:
        y = y.detach()
        for x in taken:
            y = own_result(y, x)
        taken.append(y)
        result.append(y.contiguous())
    return result


def _check(token: str, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor], results: Sequence[Result]) -> None:
    """Raise where results have other lengths or dtypes than a graph takes for granted."""
    for y, r in zip(ys, results, strict=True):
        lengths = r.lengths_of(xs)
        fits = y.dtype == r.dtype and y.ndim == len(lengths)
        if fits and all(n in (None, m) for n, m in zip(lengths, y.shape, strict=True)):
            continue
        raise MeshError.at(
            f"a compiled call of {token.split('(')[0]}",
            got=f"a result of shape {list(y.shape)}, {y.dtype}, of blocks of shapes {[list(x.shape) for x in xs]}",
            need=f"shape {['?' if n is None else n for n in lengths]}, {r.dtype}, for which the graph was made",
            mend="give layouts, or shape=, which say how long all blocks are; or torch.compiler.disable the call",
        )
