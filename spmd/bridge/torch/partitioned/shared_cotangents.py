"""Cotangents of values that all workers have, in maps with check=False.

There no tensor says that it varies, so nobody varies such a value where it meets data, or sums its cotangents. If it is
made of parameters that lie split, the workers compare its cotangents at the end of backward, and raise where they
differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from spmd.bridge.torch.function import apply
from spmd.bridge.torch.tensor_state import local_data, no_overrides
from spmd.bridge.torch.worker_context import WorkerContext, device_of
from spmd.errors import DifferentiationError
from spmd.operators.gather import AllGather
from spmd.operators.memo import interned

__all__ = ["compare_cotangents"]

_engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
_WHERE = "spt.shard_parameters"
_TOLERANCE = 1e-4
"""Of an entry of a cotangent, relative to all. Reductions of the same numbers may round differently."""


class _Cotangents:
    """What one backward of a worker gave to some values. names: of the values. numbers: a few of each cotangent."""

    __slots__ = ("__weakref__", "names", "numbers")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: list[tuple[float, float]] = []


_given: WeakValueDictionary[Any, _Cotangents] = WeakValueDictionary()
"""By backward, worker and axes. The final callback of the backward holds it."""


def compare_cotangents(x: torch.Tensor, name: str, axes: tuple[str, ...], context: Callable[[], Any]) -> None:
    """Compare the cotangents that backwards give to x between the workers along some axes, in maps with check=False.

    context: gives the `WorkerContext` of the worker, or None, if there is none any more.
    """

    def note(g: torch.Tensor | None) -> None:
        own = context()
        if g is not None and own is not None and not own.acting_worker().tracked:
            _note(g, name, axes, own)

    with no_overrides():
        x.register_hook(note)


def _note(g: torch.Tensor, name: str, axes: tuple[str, ...], context: WorkerContext) -> None:
    key = torch._C._current_graph_task_id(), context.number, axes
    given = _given.get(key)
    if given is None:
        given = _given[key] = _Cotangents()
        _engine.queue_callback(partial(_compare, given, axes, context))
    with no_overrides(), torch.no_grad():
        numbers = torch.view_as_real(g) if g.is_complex() else g
        numbers = local_data(numbers).reshape(-1).double()
        weights = torch.arange(1.0, 1.0 + len(numbers), dtype=numbers.dtype, device=numbers.device).cos()
        given.numbers.append((float(weights @ numbers), float(numbers.abs().sum())))
    given.names.append(name)


def _compare(given: _Cotangents, axes: tuple[str, ...], context: WorkerContext) -> None:
    with torch.no_grad():
        own = torch.tensor(given.numbers, dtype=torch.float64, device=device_of(context.acting_worker()))
        sums, sizes = apply(interned(AllGather, axes, 0, False), own, context).cpu().unbind(2)
    for name, values, size in zip(given.names, sums.T, sizes.T, strict=True):
        if values.max() - values.min() > _TOLERANCE * size.max():
            raise _differs(name, axes)


def _differs(name: str, axes: tuple[str, ...]) -> DifferentiationError:
    axis = axes[0] if len(axes) == 1 else axes
    return DifferentiationError.at(
        f"backward through {_WHERE}",
        argument=name,
        got=f"a gradient that differs between the workers along {axis!r}: in a map with check=False, a value that all "
        "workers have was used beside this worker's own data, outside of the forward of the unit",
        need="the sum over the workers",
        mend=f"spt.pvary(value, {axis!r}) before it meets data; let the unit contain all modules that use the "
        "parameter; or spt.map(..., check=True)",
    )
