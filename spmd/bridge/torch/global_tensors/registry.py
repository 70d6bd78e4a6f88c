"""Which function handles a function of torch that is given a global tensor. The modules beside this one register."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from spmd.bridge.torch.call_arguments import tensors_in
from spmd.bridge.torch.functorch import current_level, unwrapped_once
from spmd.errors import LayoutError, describe

__all__ = ["HANDLERS", "call", "functions_named", "handles", "outside_vmap", "unhandled"]

Handler = Callable[[Any, Any, dict[str, Any]], Any]

HANDLERS: dict[Any, Handler] = {}
"""By the function of torch. A handler gets the function, its positional and its keyword arguments."""

_PLACES = (torch, torch.Tensor, functional, torch.special, torch.linalg, torch.fft, torch._C._nn)  # type: ignore[attr-defined]


def functions_named(names: str) -> Iterator[Any]:
    """The functions and methods of torch by these names, separated by blanks, wherever torch has them."""
    for name in names.split():
        found = {id(f): f for place in _PLACES if callable(f := getattr(place, name, None))}
        assert found or name.startswith("_") or name in _NEW, name
        yield from found.values()


_NEW = {"rms_norm"}
"""Functions that older versions of torch lack."""


def handles(names: str) -> Callable[[Handler], Handler]:
    """Register a function as the handler of the functions by these names."""

    def register(handler: Handler) -> Handler:
        for function in functions_named(names):
            HANDLERS[function] = handler
        return handler

    return register


def outside_vmap(handler: Handler) -> Handler:
    """The handler, which raises for tensors of `torch.func.vmap`."""

    def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if current_level() is not None:
            _refuse_vmap(func, args, kwargs)
        return handler(func, args, kwargs)

    return run


def _refuse_vmap(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    for x in tensors_in(args, kwargs):
        while torch._C._functorch.is_functorch_wrapped_tensor(x):  # type: ignore[attr-defined]
            if torch._C._functorch.is_batchedtensor(x):  # type: ignore[attr-defined]
                raise unhandled(func, args, kwargs, "tensors that no torch.func.vmap maps over: net(batch)")
            x = unwrapped_once(x)


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch, some of whose arguments are global tensors."""
    if current_level() is not None:
        _refuse_vmap(func, args, kwargs)
    handler = HANDLERS.get(func)
    if handler is None:
        raise unhandled(func, args, kwargs)
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    return handler(func, args, kwargs)


def unhandled(func: Any, args: Any, kwargs: dict[str, Any], need: str = "") -> LayoutError:
    """The error for a function that cannot be applied to these layouts."""
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", "a function")
    if name == "__get__":
        name = f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', 'an attribute')}"
    given = [a for a in (*args, *kwargs.values()) if hasattr(type(a), "__spmd_partitioned__")]
    given += [b for a in args if isinstance(a, list | tuple) for b in a if hasattr(type(b), "__spmd_partitioned__")]
    return LayoutError.at(
        f"torch's {name.rsplit('.', 1)[-1]}",
        got=" and ".join(map(describe, given)) or "a global tensor",
        need=need or "a function that works on the blocks, or that spt.functions has",
        mend="x.block() is this worker's part, x.whole() the whole on every worker, spt.put(x, spec) another layout",
    )
