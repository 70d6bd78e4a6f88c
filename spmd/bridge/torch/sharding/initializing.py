"""Modules on the device "meta", whose parameters are made as blocks and get their first values there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.rng import drawing
from spmd.bridge.torch.sharding.blocks import WHERE, ShardedParameter
from spmd.bridge.torch.sharding.unit import Unit
from spmd.bridge.torch.tensor_state import is_partitioned
from spmd.errors import StateError

__all__ = ["initialize", "on_meta"]

_RESETS = ("reset_parameters", "_reset_parameters")
"""The methods by which modules of torch draw their parameters."""


def on_meta(module: nn.Module, init: Any) -> list[nn.Module]:
    """The modules that have parameters or buffers of their own on the device "meta". Raises StateError for one that has
    no way to draw them."""
    found = []
    for name, m in module.named_modules():
        own = {**m._parameters, **m._buffers}
        names = [key for key, x in own.items() if x is not None and x.is_meta]
        if not names:
            continue
        if not callable(init) and _reset_of(m) is None:
            raise StateError.at(
                WHERE,
                argument="module",
                got=f"{f'{name}.{names[0]}'.lstrip('.')} on the device meta, of {type(m).__name__}, which has no "
                "reset_parameters",
                need="a way to draw the values of each module that has some on meta",
                mend="a method reset_parameters(self) of the class, or init=function, of a module whose own parameters "
                "it fills",
            )
        found.append(m)
    return found


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((getattr(module, name) for name in _RESETS if hasattr(module, name)), None)


def initialize(modules: Sequence[nn.Module], init: Any, units: Sequence[Unit], device: torch.device) -> None:
    """Draw the values of modules, one after the other, as they are on one worker, and keep this worker's blocks."""
    if not modules:
        return
    by_id = {id(q.p): q for unit in units for q in unit.parameters}
    with drawing(), torch.no_grad():
        for m in modules:
            with _whole(m, by_id, device):
                reset = _reset_of(m)
                if callable(init):
                    init(m)
                elif reset is not None:
                    reset()


@contextmanager
def _whole(module: nn.Module, by_id: dict[int, ShardedParameter], device: torch.device) -> Iterator[None]:
    """Inside, a module has its own parameters whole, on the host. Blocks get their values."""
    blocks: dict[str, Any] = {name: p for name, p in module._parameters.items() if p is not None}
    for name, p in blocks.items():
        module._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cpu"), p.requires_grad)
    for name, b in module._buffers.items():
        if b is not None and b.is_meta:
            module._buffers[name] = torch.empty_like(b, device=device)
    try:
        yield
        values = {name: module._parameters[name] for name in blocks}
    finally:
        module._parameters.update(blocks)
    for name, p in blocks.items():
        whole: Any = values[name]
        if is_partitioned(p):
            p.copy_(p.like_whole(whole.detach().to(device)))
        else:
            p.copy_(whole.detach())
