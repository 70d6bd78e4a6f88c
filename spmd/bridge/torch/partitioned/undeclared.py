"""Parameters of which workers have blocks, beside data that are no wholes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.bridge.torch.call_arguments import map_tensors, tensors_in
from spmd.bridge.torch.functorch import unwrapped
from spmd.bridge.torch.partitioned.registry import BESIDE_WHOLES, FUNCTIONS, LAYERS, call
from spmd.bridge.torch.partitioned.shared_cotangents import compare_cotangents
from spmd.bridge.torch.tensor_state import is_partitioned, needs_grad, state_of_tensor
from spmd.bridge.torch.worker_context import context_of
from spmd.errors import LayoutError, describe
from spmd.mesh import WORKER

__all__ = ["call_beside_data", "outside_of_unit"]

_OF_GRADIENTS: set[Any] = {torch.Tensor.grad.__get__, torch.Tensor.backward, torch.autograd.grad}  # type: ignore[attr-defined]
_OF_SHAPES = {torch.Tensor.view_as, torch.Tensor.reshape_as, torch.Tensor.type_as}
"""Of the parameter beside data they take no numbers."""


def call_beside_data(func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch. Raise where data vary over axes that split a parameter beside them: they are no wholes.

    With check=False data do not say that they vary. There, raise where a parameter that a unit gathers, or a tensor
    made of one, meets data outside of the forward of that unit. What has the shape of the parameter, and is not
    differentiated, may be a whole, and what is written into the parameter is one.
    """
    worker = WORKER.get()
    if worker is None or torch.compiler.is_compiling():
        return call(func, args, kwargs)
    if worker.tracked:
        if func in LAYERS or func in BESIDE_WHOLES:
            _check_varying(func, args, kwargs)
        return call(func, args, kwargs)
    derived = [x for x in tensors_in(args, kwargs) if getattr(unwrapped(x), "unit_gathers", False)]
    if not derived or func in _OF_GRADIENTS or (func in _OF_SHAPES and not is_partitioned(args[0])):
        return call(func, args, kwargs)
    _check_undeclared(func, args, kwargs, derived)
    axes = tuple(sorted({axis for x in derived if is_partitioned(x) for axis in unwrapped(x).block_layout.varying}))

    def note(x: torch.Tensor) -> torch.Tensor:
        own: Any = unwrapped(x)
        own.unit_gathers = True
        if axes and x.requires_grad and not is_partitioned(x):
            context = context_of(worker)
            compare_cotangents(
                x, f"torch's {getattr(func, '__name__', 'function')} of a parameter", axes, lambda: context
            )
        return x

    return map_tensors(note, call(func, args, kwargs))


def _check_varying(func: Callable, args: Any, kwargs: dict[str, Any]) -> None:
    tensors = [unwrapped(x) for x in tensors_in(args, kwargs)]
    split = frozenset().union(*(x.block_layout.varying for x in tensors if is_partitioned(x)))
    for x in tensors:
        clash = sorted(state_of_tensor(x).varying & split)
        if clash and not is_partitioned(x):
            raise LayoutError.at(
                f"torch's {func.__name__}",
                got=f"{describe(x)} beside a parameter that is split over {clash[0]!r}",
                need="a whole, the same on all workers along that axis, or a global tensor",
                mend="spt.GlobalTensor.from_block(x, spec), if it is this worker's block; of a module of "
                "spt.shard_parameters call the unit that has the parameter",
            )


def _check_undeclared(func: Callable, args: Any, kwargs: dict[str, Any], derived: list[torch.Tensor]) -> None:
    """derived: the tensors that are made of parameters."""
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and is_partitioned(next(tensors_in(args, kwargs))):  # in place
        return
    if func in FUNCTIONS and func not in LAYERS and func not in BESIDE_WHOLES:  # of properties and gradients
        return
    shapes = [x.shape for x in derived]
    for x in tensors_in(args, kwargs):
        if is_partitioned(x) or any(x is y for y in derived):
            continue
        is_data = needs_grad(x) and not x.is_leaf
        if is_data or (x.ndim and (func in FUNCTIONS or needs_grad(x) or x.shape not in shapes)):
            raise outside_of_unit(f"torch's {name.strip('_')}", f"beside {describe(x)}")


def outside_of_unit(where: str, how: str) -> LayoutError:
    """The error for a parameter that is used where it is not whole."""
    return LayoutError.at(
        where,
        got=f"a parameter of spt.shard_parameters outside of the forward of its unit, {how}, in a map with check=False",
        need="the whole parameter, as the forward of its unit has it, or tensors that say along which axes they vary",
        mend="call the module, model(x), and not its methods; let the unit contain all modules that use the parameter; "
        "or spt.map(..., check=True)",
    )
