"""Parameters of which workers have blocks, beside data that are no wholes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.bridge.torch.call_arguments import tensors_in
from spmd.bridge.torch.functorch import unwrapped
from spmd.bridge.torch.partitioned.registry import BESIDE_WHOLES, FUNCTIONS, LAYERS
from spmd.bridge.torch.tensor_state import is_partitioned, state_of_tensor
from spmd.errors import LayoutError, describe
from spmd.mesh import WORKER

__all__ = ["check_beside_data", "outside_of_unit"]


def check_beside_data(func: Callable, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise where a layer is given data that vary over axes that split its parameters: the data are no wholes.

    With check=False data do not say that they vary. There, raise where a parameter that a unit gathers meets data
    outside of the forward of that unit. What has the shape of the parameter may be a whole, and what is written into
    the parameter is one.
    """
    worker = WORKER.get()
    if worker is None or torch.compiler.is_compiling():
        return
    if not worker.tracked:
        _check_undeclared(func, args, kwargs)
    elif func in LAYERS:
        _check_varying(func, args, kwargs)


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


def _check_undeclared(func: Callable, args: Any, kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):  # in place
        return
    if func in FUNCTIONS and func not in LAYERS and func not in BESIDE_WHOLES:  # of properties and gradients
        return
    tensors = list(tensors_in(args, kwargs))
    shapes = [x.shape for x in tensors if getattr(unwrapped(x), "unit_gathers", False)]
    data = [x for x in tensors if not is_partitioned(x) and x.ndim] if shapes else []
    if any(func in FUNCTIONS or x.shape not in shapes for x in data):
        raise outside_of_unit(f"torch's {name.strip('_')}", f"beside {describe(data[0])}")


def outside_of_unit(where: str, how: str) -> LayoutError:
    """The error for a parameter that is used where it is not whole."""
    return LayoutError.at(
        where,
        got=f"a parameter of spt.shard_parameters outside of the forward of its unit, {how}, in a map with check=False",
        need="the whole parameter, as the forward of its unit has it, or tensors that say along which axes they vary",
        mend="call the module, model(x), and not its methods; let the unit contain all modules that use the parameter; "
        "or spt.map(..., check=True)",
    )
