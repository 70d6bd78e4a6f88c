"""Tensors that carry their state, so that `Vary` is inserted as in bodies of NumPy.

A `Tensor` is a `torch.Tensor` that knows the axes along which it varies. torch calls `__torch_function__` for every
function that has one as an argument. It varies Invariant operands that are differentiated before they meet Varying
ones, and gives results their state. Tensors without a state, such as parameters of modules, count as Invariant.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.bridge.torch.call_arguments import argument, tensors_in
from spmd.bridge.torch.function import CollectiveCall, LinearFunction, TransformableFunction
from spmd.bridge.torch.functorch import current_level, has_tangent, is_wrapped
from spmd.bridge.torch.interop import array_of
from spmd.bridge.torch.loss_checks import verify_loss, warn_of_invariant_terms
from spmd.bridge.torch.tensor_state import (
    GRADIENT_SYNCS,
    INVARIANT,
    TensorWithState,
    gradient_sync_of,
    is_partitioned,
    needs_grad,
    no_overrides,
    plain,
    state_of_tensor,
    summed_state,
    without_state,
)
from spmd.bridge.torch.worker_context import context_of, for_this_worker
from spmd.errors import MeshError, MutationError, ReplicaError, StateError, describe, message
from spmd.mesh import WORKER, Worker
from spmd.operators.sums import Vary
from spmd.operators.varying import verify
from spmd.state import State, state_of

__all__ = [
    "CALL_CHECKS",
    "STATE_IN_COMPILED",
    "Tensor",
    "backward_scope",
    "check_losses",
    "check_write",
    "common_state",
    "cotangent_with_state",
    "in_backward",
    "set_state",
    "varied_arguments",
    "varied_copy",
    "with_state",
]

_disabled = torch._C.DisableTorchFunctionSubclass


STATE_IN_COMPILED = message(
    "torch.compile",
    got="a tensor that carries its state",
    need="plain tensors in compiled functions",
    mend="spt.map(..., check=False), with spt.pvary where Invariant tensors meet Varying ones",
)


class Tensor(TensorWithState):
    """A tensor of a body, with its state along the axes of the mesh. `spt.map` and operators make it.

    replica: whether it is a parameter that `spt.data_parallel` varies during the forward of its module.

        >>> def body(x):
        ...     return type(x) is spt.Tensor, type(spt.psum(x, "x") + 1) is spt.Tensor
        >>> with spmd.Mesh(x=2):
        ...     spt.map(body, P("x"), None)(torch.ones(4))
        (True, True)
    """

    replica: bool = False

    def __spmd_describe__(self) -> str:
        with _disabled():
            return f"{self.state} tensor {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        with _disabled():
            text = torch.Tensor.__repr__(plain(self))
        return f"{text[:-1]}, state={self.state})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return with_state(self.view_as(self), self.state)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.ndim else super().__format__(spec)

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            return torch.Tensor.__deepcopy__(plain(self), memo)  # raises torch's error
        copied: Any
        with _disabled():
            copied = copy.deepcopy(self.detach().as_subclass(torch.Tensor), {})
        set_state(copied, self.state)  # in place: a view would not be a leaf
        copied.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            raise StateError(STATE_IN_COMPILED)
        if len(types) > 1 and any(getattr(t, "__spmd_partitioned__", False) for t in types):
            return NotImplemented  # `PartitionedTensor` handles the states of both
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            check_losses(args[0])
            with backward_scope():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return _gradients(func, args, kwargs)
        if func is torch.Tensor.register_hook:
            x, hook = (argument(args, kwargs, k, name) for k, name in enumerate(("self", "hook")))
            with _disabled():
                return func(x, _on_cotangents(hook, x.state))
        state, mixed = _common_state(args, kwargs)
        if state.varying and func in CALL_CHECKS:
            CALL_CHECKS[func](func, args, kwargs)
        targets: list[torch.Tensor] = []
        if mixed:
            if _is_foreach(func):
                return _call_foreach(func, args, kwargs)
            args, kwargs, targets = _vary_arguments(func, args, kwargs, state)
        with _disabled():
            result = func(*args, **kwargs)
        for x in targets:
            if isinstance(x, Tensor):
                x._state = state
        if type(result) is torch.Tensor and any(result is a for a in (*args, *kwargs.values())):
            return result  # a tensor without a state, written in place
        return _results_with_state(result, state)


_backward_flag = threading.local()


@contextmanager
def backward_scope() -> Iterator[None]:
    """Mark this thread as in backward. Functions that start it do not call `__torch_function__` a second time."""
    outer, _backward_flag.active = in_backward(), True
    try:
        with _disabled():
            yield
    finally:
        _backward_flag.active = outer


def in_backward() -> bool:
    """Whether this thread is in a backward that started at a `Tensor`."""
    return getattr(_backward_flag, "active", False)


def with_state(x: torch.Tensor, state: State) -> torch.Tensor:
    """A tensor on the same data in this state. To autograd it is a view."""
    with no_overrides():
        result = x.as_subclass(Tensor)
    result._state = state
    return result


def set_state(x: Any, state: State) -> None:
    """Give a state to a plain tensor in place. A leaf stays a leaf. No other code may hold the tensor."""
    x.__class__ = Tensor
    x._state = state


def cotangent_with_state(g: Any, state: State) -> Any:
    """A cotangent, which torch gives as a plain tensor, in the state of what it belongs to."""
    if g is None or not state.varying or g.layout is not torch.strided:  # other layouts have no views
        return g
    return with_state(g, state)


def _on_cotangents(hook: Callable[[Any], Any], state: State) -> Callable[[torch.Tensor], Any]:
    """The hook of a tensor in this state: its cotangents have the state too."""
    own = for_this_worker(hook)

    @functools.wraps(hook)
    def run(g: torch.Tensor) -> Any:
        return without_state(own(cotangent_with_state(g, state)))

    return run


def _common_state(args: Any, kwargs: dict) -> tuple[State, bool]:
    """The union of the states of the tensors, and whether one of them differs from it."""
    state: State | None = None
    mixed = False
    for x in tensors_in(args, kwargs):
        own = state_of_tensor(x)
        if state is None:
            state = own
        elif own is not state:
            state, mixed = state | own, True
    return state or INVARIANT, mixed


def common_state(args: Any, kwargs: dict) -> State:
    """The union of the states of the tensors among some arguments."""
    return _common_state(args, kwargs)[0]


def _vary_arguments(func: Callable, args: Any, kwargs: dict, state: State) -> tuple[Any, dict, list[torch.Tensor]]:
    """The arguments, varied to a state where they are differentiated, and the tensors that are written to."""
    targets = _written_tensors(func, args, kwargs)
    for x in targets:
        if state_of_tensor(x) is not state:
            check_write(func, x, state)
    return *varied_arguments(args, kwargs, state, targets), targets


def varied_arguments(args: Any, kwargs: dict, state: State, targets: Any = ()) -> tuple[Any, dict]:
    """The arguments of a function, varied to a state where they are differentiated."""

    def vary(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            if state_of_tensor(a) is state or not needs_grad(a):
                return a
            return a if any(a is x for x in targets) else varied_copy(a, state, True)
        if type(a) in (tuple, list):
            return type(a)(vary(b) for b in a)
        return a

    return tuple(vary(a) for a in args), {name: vary(a) for name, a in kwargs.items()}


def _is_foreach(func: Callable) -> bool:
    return getattr(func, "__name__", "").startswith(("_foreach_", "_fused_"))


def _call_foreach(func: Callable, args: Any, kwargs: dict) -> Any:
    """A function of lists of tensors. Each entry of the result has the union of the states of its operands."""
    values = (*args, *kwargs.values())
    lists = [a for a in values if type(a) in (list, tuple) and a and isinstance(a[0], torch.Tensor)]
    shared_state = _common_state([a for a in values if isinstance(a, torch.Tensor)], {})[0]
    states = [_common_state(entries, {})[0] | shared_state for entries in zip(*lists, strict=True)]
    writes = func.__name__.endswith("_")
    if writes:
        for x, state in zip(args[0], states, strict=True):
            if state_of_tensor(x) is not state:
                check_write(func, x, state)
    else:

        def vary(a: Any) -> Any:
            if not any(a is b for b in lists):
                return a
            return [varied_arguments((x,), {}, s)[0][0] for x, s in zip(a, states, strict=True)]

        args, kwargs = tuple(map(vary, args)), {name: vary(a) for name, a in kwargs.items()}
    with _disabled():
        result = func(*args, **kwargs)
    if writes:
        for x, state in zip(args[0], states, strict=True):
            if isinstance(x, Tensor):
                x._state = state
        return result
    return [_results_with_state(r, s) for r, s in zip(result, states, strict=True)]


def _written_tensors(func: Callable, args: Any, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that a function writes to."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _written_by_schema(func, args, kwargs)
    out = kwargs.get("out")
    if out is not None:
        return list(tensors_in((out,), {}))
    name = getattr(func, "__name__", "")
    dunder = name.startswith("__")
    inplace = (dunder and name.startswith("__i") and name not in ("__index__", "__invert__", "__int__")) or (
        name == "__setitem__" or (not dunder and name.endswith("_") and bool(args))
    )
    return [args[0]] if inplace and args and isinstance(args[0], torch.Tensor) else []


def _written_by_schema(op: Any, args: Any, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that the schema of an operator marks as written."""
    overload = op if isinstance(op, torch._ops.OpOverload) else getattr(op, op.overloads()[0])
    written = [
        argument(args, kwargs, position, a.name)
        for position, a in enumerate(overload._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return list(tensors_in(written, {}))


def check_write(func: Callable, target: torch.Tensor, state: State) -> None:
    """Raise if a tensor that is written to cannot take the state of the values."""
    if isinstance(target, Tensor) and not target.requires_grad:
        return
    axes = ", ".join(map(repr, sorted(state.varying - state_of_tensor(target).varying)))
    if not axes:
        return
    # For a TypeError, torch would compute y = y + x in place of y += x.
    raise MutationError.at(
        f"torch.{getattr(func, '__name__', 'a function')} in place",
        argument="self",
        got=f"{describe(target)}, which is {state_of_tensor(target)}, and is given what varies over {axes}",
        need="a tensor that varies over the same axes",
        mend=f"write a new tensor, y = x + g; or declare it first: x = spt.varying(x, {axes})",
    )


def _results_with_state(result: Any, state: State) -> Any:
    if isinstance(result, torch.Tensor):
        if type(result) is Tensor:
            result._state = state
            return result
        if type(result) is not torch.Tensor:
            return result
        return with_state(result, state)
    if isinstance(result, tuple | list):
        if not any(isinstance(r, torch.Tensor) for r in result):
            return result
        parts = [_results_with_state(r, state) for r in result]
        return type(result)(parts) if type(result) in (tuple, list) or hasattr(result, "n_fields") else result
    return result


def check_losses(outputs: Any) -> None:
    """Warn of Invariant terms of Varying losses. Raise if an Invariant loss differs between workers."""
    for x in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
        if isinstance(x, torch.Tensor) and not x.ndim and not is_partitioned(x):
            (warn_of_invariant_terms if state_of_tensor(x).varying else verify_loss)(x)


def _gradients(func: Callable, args: Any, kwargs: dict) -> Any:
    """torch.autograd.grad: a gradient has the state of its input."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    states = [
        state_of_tensor(x) | summed_state(x) if isinstance(x, torch.Tensor) else None
        for x in ([inputs] if isinstance(inputs, torch.Tensor) else inputs)
    ]
    check_losses(args[0] if args else kwargs["outputs"])
    with backward_scope():
        grads = func(*args, **kwargs)
    return tuple(
        g if g is None or s is None else with_state(g, s) if WORKER.get() is not None else g
        for g, s in zip(grads, states, strict=True)
    )


def _refuse_value(func: Callable, args: Any, kwargs: dict) -> None:
    x = args[0]
    name = getattr(func, "__name__", "")
    call = f"{name.strip('_')}(x)" if name.startswith("__") else f"x.{name}()"
    axis = sorted(x.state.varying)[0]
    raise StateError.at(
        call,
        argument="x",
        got=x.__spmd_describe__(),
        need="an Invariant tensor: workers would take different branches on values of their own",
        mend=f"spt.psum(x, {axis!r}), spt.mean(x, {axis!r}) or spt.pmax(x, {axis!r}) make it so; "
        "spt.block(x) gives the data alone, to print it",
    )


CALL_CHECKS: dict[Any, Callable[[Callable, Any, dict], None]] = {
    getattr(torch.Tensor, name): _refuse_value
    for name in "item __bool__ __int__ __float__ __complex__ __index__ tolist numpy __array__".split()
}
"""Checks of calls with Varying tensors, by function: they raise where the result would be silently wrong."""


def varied_copy(x: torch.Tensor, state: State, joined: bool = False) -> torch.Tensor:
    """An Invariant tensor varied to a state. All uses share one copy, so their cotangents are added before the sum.

    joined: whether it is varied because it meets other tensors in this state.
    """
    worker = WORKER.get()
    if worker is None:
        raise MeshError.at(
            "a function of torch",
            got="tensors of different state outside of any body",
            need="tensors without state, as spt.map returns them",
            mend="return what is needed outside with an out_spec",
        )
    with no_overrides():
        return _new_varied_copy(x, state, joined, worker)


def _new_varied_copy(x: torch.Tensor, state: State, joined: bool, worker: Worker) -> torch.Tensor:
    synced_axes = _synced_axes(x, state)
    if synced_axes:
        sync = gradient_sync_of(x)
        difference = None if sync is None else sync.undeclared.get(id(x))
        if difference is not None and not state.varying.isdisjoint(difference.axes):
            raise difference.error()
        synced_state = state_of(synced_axes | state_of_tensor(x).varying)
        x = with_state(x, synced_state)
        return x if synced_state is state else varied_copy(x, state, joined)
    context = context_of(worker)
    names = tuple(n for n in worker.mesh.axes if n in state.varying - state_of_tensor(x).varying)
    key = (id(x), state)
    # The graph of the copy holds the leaf. If the leaf held the copy, no collector would see that cycle.
    cache: Any = context.varied_copies if x.is_leaf else vars(x).setdefault("_varied_copies", {})
    cached = cache.get(key)
    if cached is not None and cached[1] == x._version and (cached[0] is None or cached[0] is x):
        return cached[2]
    if worker.tracked:
        verify(array_of(x), names, "a gradient in a body", "the differentiated tensor")
    call = CollectiveCall(Vary(names), context)
    call.note(x)
    call.scalar_term = joined and not x.ndim
    transformed = is_wrapped(x) or has_tangent(x)
    # A tensor that no transformation wraps is varied outside all of them, in its own graph.
    outside = not transformed and current_level() is not None
    with temporarily_clear_interpreter_stack() if outside else nullcontext():
        varied = with_state((TransformableFunction if transformed else LinearFunction).apply(plain(x), call), state)
    if not is_wrapped(x):
        cache[key] = (x if x.is_leaf else None, x._version, varied)
        call.key = key if x.is_leaf else None
    return varied


def _synced_axes(x: torch.Tensor, state: State) -> frozenset[str]:
    """The axes along which `spt.data_parallel` sums the gradients of x, or of the parameters from which x is computed.
    The cotangent of x must not be summed along them before.

    Raises ReplicaError if x is also computed from other tensors, whose cotangents must be summed before.
    """
    added_axes = state.varying - state_of_tensor(x).varying
    if x.is_leaf or not any(sync is not None and sync.state.varying & added_axes for sync in _all_syncs()):
        return summed_state(x).varying & state.varying
    axes_of_leaves: set[frozenset[str]] = set()
    stack, seen = [x.grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            axes_of_leaves.add(summed_state(variable).varying & added_axes)
        elif isinstance(getattr(node, "call", None), CollectiveCall):  # its adjoint handles the cotangent
            axes_of_leaves.add(frozenset())
        else:
            stack += [parent for parent, _ in node.next_functions]
    if len(axes_of_leaves) > 1:
        axes = ", ".join(map(repr, sorted(frozenset().union(*axes_of_leaves))))
        raise ReplicaError.at(
            "a module of spt.data_parallel",
            got=f"a value that meets what varies over {axes}, computed of its parameters and of others, or of "
            "results of collectives",
            need="only parameters of the module: their gradients are summed after backward, all others before",
            mend=f"spt.pvary(value, {axes}) of each operand, before they are combined",
        )
    return axes_of_leaves.pop() if axes_of_leaves else frozenset()


def _all_syncs() -> set[Any]:
    return {reference() for reference in list(GRADIENT_SYNCS.values())}
