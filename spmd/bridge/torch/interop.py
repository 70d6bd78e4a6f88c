"""Tensors as arrays and arrays as tensors, without a copy if no other code can see the difference.

A collective reads the memory of a tensor. Its result is in memory of one of three kinds. New memory that only this
worker holds becomes a tensor without a copy. Memory that other workers read too is copied, because torch may write to
it. Memory of this worker's own tensor is copied too, because autograd does not know of such a view.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.bridge.torch.functorch import is_wrapped, is_wrapped_by_grad, unwrapped_once
from spmd.bridge.torch.tensor_state import is_traced, no_overrides, plain
from spmd.device import contiguous, imported
from spmd.errors import LayoutError, MeshError
from spmd.kernels import on_device
from spmd.kernels.memory import pool
from spmd.kernels.memory.pool import ExtendedBase, PooledBase
from spmd.mesh import Mesh, Worker
from spmd.transport.handles import read_only

__all__ = [
    "array_dtype",
    "array_of",
    "block_of",
    "borrowed",
    "message_buffer",
    "owned",
    "shaped_like",
    "storage_of",
    "tensor_of",
    "torch_dtype",
    "write",
]

_DTYPE_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128 bfloat16"
).split()


@lru_cache(maxsize=1)
def _bfloat16() -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise LayoutError.at(
            "spmd.bridge.torch",
            got=f"a tensor of bfloat16, and ml_dtypes cannot be imported ({error})",
            need="ml_dtypes, by which NumPy knows that dtype",
            mend='pip install "spmd[torch]", or x.float() before',
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


@lru_cache(maxsize=64)
def array_dtype(dtype: torch.dtype, where: str = "spmd.bridge.torch") -> np.dtype:
    """NumPy's dtype for one of torch's."""
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        return _bfloat16()
    if name not in _DTYPE_NAMES:
        raise LayoutError.at(
            where,
            argument="x",
            got=f"a tensor of {dtype}",
            need=f"one of {', '.join(_DTYPE_NAMES)}",
            mend="x.to(torch.float32) before",
        )
    return np.dtype(name)


@lru_cache(maxsize=64)
def torch_dtype(dtype: Any) -> torch.dtype:
    """torch's dtype for one of NumPy's; one of torch's as it is."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = np.dtype(dtype).name
    result = getattr(torch, name, None) if name in _DTYPE_NAMES else None
    if result is None:
        raise LayoutError.at(
            "spmd.bridge.torch",
            got=f"an array of {name}",
            need=f"one of {', '.join(_DTYPE_NAMES)}",
            mend='x.astype("float32") before',
        )
    return result


def borrowed(x: torch.Tensor) -> Any:
    """A tensor's data as an array on the same memory: read-only, and to be read before the tensor is written to."""
    with no_overrides():
        if x._is_zerotensor():  # autograd's zeros have no memory
            x = x.clone()
        if x.is_cuda:
            return imported("spmd.bridge.torch").from_dlpack(x.detach().resolve_conj().resolve_neg())
        dtype = array_dtype(x.dtype)
        if x.dtype is torch.bfloat16:
            return read_only(x.detach().contiguous().view(torch.int16).numpy().view(dtype))
        return read_only(x.numpy(force=True))


def _with_data(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor that holds the data; None where there are none, as in compiled functions and under vmap."""
    if torch.compiler.is_dynamo_compiling() or is_traced(x):
        return None
    x = plain(x)
    while is_wrapped(x):
        if not is_wrapped_by_grad(x):
            return None
        x = unwrapped_once(x)
    return x


def array_of(x: torch.Tensor) -> Any:
    """The data of a tensor as an array; None where it has none, as in compiled functions and under vmap."""
    inner = _with_data(x)
    if inner is None:
        return None
    with temporarily_clear_interpreter_stack():
        return borrowed(inner)


def storage_of(x: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of the data of a tensor; None where it has none. Tensors on it share one object."""
    inner = _with_data(x)
    return None if inner is None else inner.untyped_storage()


def check_device(x: torch.Tensor, mesh: Mesh, where: str, argument: str) -> None:
    """Raise if a tensor is not on the device of the mesh."""
    if x.device.type != mesh.device:
        raise MeshError.at(
            where,
            argument=argument,
            got=f"a tensor on {x.device}",
            need=f'tensors on {mesh.device}, for a mesh with device="{mesh.device}"',
            mend="x.cuda()" if mesh.device == "cuda" else 'x.cpu(), or Mesh(..., device="cuda")',
        )


def block_of(x: torch.Tensor, worker: Worker, where: str) -> tuple[Any, bool]:
    """A tensor's data for a collective, and whether it is borrowed: the memory of the tensor itself, which this worker
    may write to as soon as it continues."""
    with no_overrides():
        check_device(x, worker.mesh, where, "x")
        array = borrowed(x)
    block = contiguous(array)
    return block, block is array


def _copy(array: np.ndarray) -> np.ndarray:
    copy = pool.empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def tensor_of(array: Any) -> torch.Tensor:
    """A tensor on the memory of an array that no other code holds."""
    if on_device(array):
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    torch_dtype(array.dtype)
    return torch.from_numpy(array)


def message_buffer(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory for a message: on the CPU from the pool, so that other processes of the host read it where
    it lies."""
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    return tensor_of(pool.empty(size, array_dtype(dtype)))


def _copied(array: Any) -> torch.Tensor:
    return tensor_of(array.copy(order="C") if on_device(array) else _copy(array))


def owned(cell: list[Any]) -> torch.Tensor:
    """The array in a cell as a tensor that may be written to. The array is taken out of the cell.

    The tensor shares the memory if no other reference to it exists; otherwise it is a copy.
    """
    array = cell.pop()
    if on_device(array) or not array.flags.c_contiguous or sys.getrefcount(array) > _UNSHARED_ARRAY:
        return _copied(array)
    owner = array
    while isinstance(owner.base, np.ndarray) and type(owner.base) not in (PooledBase, ExtendedBase):
        owner = owner.base
        if sys.getrefcount(owner) > _UNSHARED_BASE:
            return _copied(array)
    if owner.base is not None and type(owner.base) is not PooledBase:  # foreign memory, as of this worker's own tensor
        return _copied(array)
    owner.flags.writeable = True
    array.flags.writeable = True
    return tensor_of(array)


def write(x: torch.Tensor, array: Any) -> None:
    """Copy an array into a tensor of its dtype and shape."""
    if on_device(array):
        x.copy_(torch.from_dlpack(array))
    elif x.dtype is torch.bfloat16:
        np.copyto(x.view(torch.int16).numpy(), array.view(np.int16))
    else:
        np.copyto(x.numpy(), array)


def _reference_counts() -> tuple[int, int]:
    """The reference counts, in `owned`, of an array that no other code holds, and of the base of such a view."""
    cell = [np.empty(4)]
    array = cell.pop()
    array_count = sys.getrefcount(array)
    cell = [np.empty(4)[1:]]
    array = cell.pop()
    owner = array
    owner = owner.base
    return array_count, sys.getrefcount(owner)


_UNSHARED_ARRAY, _UNSHARED_BASE = _reference_counts()


def shaped_like(x: Any) -> np.ndarray:
    """An array of the dtype and shape of a tensor that takes no memory, for checks."""
    return np.broadcast_to(np.zeros((), array_dtype(x.dtype)), tuple(x.shape))
