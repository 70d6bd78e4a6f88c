"""Which function handles an operator or a function of torch that is given a partitioned tensor: two tables.

`run` serves `__torch_dispatch__`: operators of torch (ATen), by name. `call` serves `__torch_function__`: functions of
torch, by object. The modules beside this one register their handlers when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.bridge.torch.call_arguments import tensors_in
from spmd.bridge.torch.functorch import current_level
from spmd.bridge.torch.tensor_state import is_partitioned
from spmd.mesh import WORKER

Handler = Callable[[Any, Any, dict[str, Any]], Any]

OPERATORS: dict[str, Handler] = {}
"""By the name of an operator, or by name and overload; "*" and "_foreach_*" handle all other elementwise operators on
tensors and on lists, and "" refuses what has no other handler."""

FUNCTIONS: dict[Any, Handler] = {}
"""By the function; None handles all others."""

LAYERS: set[Any] = set()
"""The functions among them of data and parameters, such as `linear`."""

BESIDE_WHOLES: dict[Any, Handler] = {}
"""By the function, where a differentiated tensor that all workers have is an operand too: its cotangent has to become
that of the whole again. The functions of global tensors."""

_resolved: dict[Any, Handler] = {}
_NO_ELEMENTWISE_LISTS = {"foreach_powsum"}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a function as the handler of operators, whose names are separated by blanks."""

    def register(handler: Handler) -> Handler:
        for name in " ".join(names).split():
            OPERATORS[name] = handler
        return handler

    return register


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply an operator of torch."""
    return handler_of(func)(func, args, kwargs)


def handler_of(func: Any) -> Handler:
    """The handler of an operator."""
    handler = _resolved.get(func)
    if handler is None:
        handler = _resolved[func] = _resolve(func)
    return handler


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch."""
    if func in BESIDE_WHOLES and torch.is_grad_enabled() and _has_wholes(args, kwargs):
        return BESIDE_WHOLES[func](func, args, kwargs)
    return (FUNCTIONS.get(func) or FUNCTIONS[None])(func, args, kwargs)


def _has_wholes(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a tensor of a body that every worker has is differentiated."""
    if WORKER.get() is None or current_level() is not None or torch.compiler.is_compiling():
        return False
    return any(not is_partitioned(x) and x.requires_grad for x in tensors_in(args, kwargs))


def _resolve(func: Any) -> Handler:
    space, _, name = func._schema.name.partition("::")
    if space == "aten":
        handler = OPERATORS.get(f"{name}.{func._overloadname}") or OPERATORS.get(name)
        if handler is not None:
            return handler
        if name.startswith(("_foreach_", "_fused_")) and name.strip("_") not in _NO_ELEMENTWISE_LISTS:
            return OPERATORS["_foreach_*"]
        if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
            return OPERATORS["*"]
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return decomposed
    return OPERATORS[""]


def decomposed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the operators that a composite one consists of. Autograd does so itself where it is on."""
    return func.decompose(*args, **kwargs)
