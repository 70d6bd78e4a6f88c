"""Compare parameters that must be one value along the axes that `data_parallel` does not name.

If an Invariant parameter meets data that vary along an axis, its gradients are summed along that axis. The sum is wrong
if the parameter differs there. So parameters are compared when a module is wrapped. Those of torch's own layers may
differ only along axes in `varying=`. Those of a user's module may differ if forward declares them by `spt.varying`;
until it does, they cannot be used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd.bridge.torch.interop import owned
from spmd.bridge.torch.module_broadcast import WHERE, sync_call
from spmd.bridge.torch.tensor import Tensor
from spmd.bridge.torch.tensor_state import is_partitioned, local_data
from spmd.errors import ReplicaError, StateError, message
from spmd.mesh import Worker
from spmd.operators.at_root import root_axes

__all__ = ["Difference", "ToBeDeclared", "differing", "to_be_declared"]


@dataclass(frozen=True)
class Difference:
    """The name of a parameter, and the axes along which it differs. where: the function that compared them."""

    name: str
    axes: tuple[str, ...]
    where: str = WHERE

    def error(self, kind: type[Exception] = ReplicaError) -> Exception:
        """The error for this difference. It is no TypeError, which torch's operators take for an unknown operand."""
        axis = self.axes[0] if len(self.axes) == 1 else self.axes
        attribute = self.name.rpartition(".")[2]
        stages = f"varying={axis!r}, if all parameters differ there, as those of the stages of a pipeline; "
        return kind(
            message(
                self.where,
                argument="module",
                got=f"{self.name}, which differs between workers along {', '.join(map(repr, self.axes))}",
                need="parameters that are the same along all axes of the mesh, or are declared to differ: their "
                "gradients are summed along every axis over which the data vary",
                mend=f"{stages if self.where == WHERE else ''}spt.varying(self.{attribute}, {axis!r}) in forward, if "
                "only this one does; or make them equal: in a body all workers draw the same numbers",
            )
        )


def differing(worker: Worker, module: nn.Module, excused: Sequence[str], where: str = WHERE) -> dict[int, Difference]:
    """By id, the parameters that differ along other axes than the excused ones. Forward must declare them.

    Raises StateError for a parameter that forward cannot declare: one of torch's own layers, or one that other workers
    lack. Cost: along each axis one or two all-reduces of digests.
    """
    skipped = {*excused, *root_axes(worker)}
    axes = [n for n, size in worker.mesh.axes.items() if size > 1 and n not in skipped]
    if not axes:
        return {}
    split_axes = _split_axes(module)
    named = [(name, p) for name, p in module.named_parameters() if not p.is_meta]
    names = _digest(repr([name for name, _ in named]).encode())
    digests = [_digest(repr(tuple(p.shape)).encode() + _bytes(p)) for _, p in named]
    differences: dict[int, Difference] = {}
    for axis in axes:
        if _differ(worker, axis, [names], where):
            raise Difference("the list of parameters", (axis,), where).error(StateError)
        own_digests = [0 if axis in split_axes.get(id(p), ()) else d for d, (_, p) in zip(digests, named, strict=True)]
        for position in _differ(worker, axis, own_digests, where):
            name, p = named[position]
            earlier = differences[id(p)].axes if id(p) in differences else ()
            differences[id(p)] = Difference(name, (*earlier, axis), where)
    for name, p in named:
        owner = module.get_submodule(name.rpartition(".")[0])
        if id(p) in differences and type(owner).__module__.startswith("torch."):
            raise differences[id(p)].error(StateError)
    return differences


def _split_axes(module: nn.Module) -> dict[int, frozenset[str]]:
    """By id, the axes that split partitioned parameters."""
    parameters: Any = [p for p in module.parameters() if is_partitioned(p)]
    return {id(p): p.block_layout.varying for p in parameters}


def _bytes(p: torch.Tensor) -> bytes:
    return local_data(p).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _differ(worker: Worker, axis: str, digests: list[int], where: str) -> list[int]:
    """The positions at which the digests of the workers along an axis differ."""
    extremes = np.array([digests, [-d for d in digests]], np.int64)  # of which the maximum gives maximum and minimum
    block: Any = extremes if worker.mesh.places is None else worker.mesh.places.own(extremes, worker.index)
    detail = f"parameters compared along {axis!r}; varying={axis!r} says that they differ"
    call = sync_call(worker, (axis,), extremes.dtype, extremes.shape, detail, where)
    cell = [worker.comm.all_reduce(worker.group((axis,)), call, block, "max").wait()]
    largest, negated_smallest = owned(cell).tolist()
    return [index for index, (a, b) in enumerate(zip(largest, negated_smallest, strict=True)) if a != -b]


_ATTRIBUTES = ("__get__", "size", "dim", "numel", "stride", "element_size", "is_contiguous", "__len__")


class ToBeDeclared(Tensor):
    """A parameter, in forward, that differs along an axis and is not yet declared."""

    difference: Difference

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        undeclared = next(x for x in pytree.tree_leaves((args, kwargs)) if type(x) is ToBeDeclared)
        if getattr(func, "__name__", "") not in _ATTRIBUTES:
            raise undeclared.difference.error()
        with torch._C.DisableTorchFunctionSubclass():
            value = func(*args, **(kwargs or {}))
        if isinstance(value, torch.Tensor):  # x.T
            raise undeclared.difference.error()
        return value


def to_be_declared(x: Tensor, difference: Difference) -> None:
    """Let any use of x raise until it is declared."""
    x.__class__ = ToBeDeclared
    x.difference = difference  # type: ignore[attr-defined]
