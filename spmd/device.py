"""Operations on arrays that differ between the host and a device.

Blocks of a mesh with device="cuda" are CuPy arrays. CuPy, and `spmd.cuda` with its streams, are imported when such a
mesh is made or such an array appears, not before. Device arrays cannot be marked read-only. Nothing converts one to
NumPy unless asked to, because that would wait for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import kernels
from spmd.autodiff import allocation
from spmd.autodiff.staging.recorder import Slot, is_slot, one_line, slots
from spmd.errors import MeshError, TransportError, describe
from spmd.kernels import on_device
from spmd.kernels.memory import nontemporal, pool
from spmd.kernels.parallel import split_work

if TYPE_CHECKING:
    from spmd.cuda import Places

__all__ = [
    "COPIED",
    "DEVICES",
    "Adjoining",
    "contiguous",
    "copied",
    "empty",
    "home",
    "imported",
    "joined",
    "on_device",
    "owned",
    "places",
    "put",
    "seen",
    "stacked",
    "to_host",
    "zeros",
]

allocation.set_allocator(pool.empty, pool.out_min)


class _Recorded(ModuleType):
    """Kernels for arrays of a program that is recorded: each call becomes a line of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            first = next(s for s in slots((args, kwargs)) if type(s) is Slot)
            return first.program.call(getattr(kernels.of(first.value), name), args, kwargs, fresh=True)

        self.__dict__[name] = kernel
        return kernel


kernels.register(Slot, _Recorded("spmd.device.recorded"))

DEVICES = ("cpu", "cuda")

COPIED = 1 << 14
"""Up to this many bytes a copy costs less than the test whether it can be avoided."""


def seen(x: Any) -> bool:
    """Whether the values of bare data may be read.

    Reading would wait for a device, and in a recorded program the values differ from call to call.
    """
    return not is_slot(x) and not on_device(x)


def contiguous(x: Any) -> Any:
    """x as a C-contiguous array, on its device."""
    if type(x) is np.ndarray or on_device(x):
        return x if x.flags.c_contiguous else copied(x)
    if is_slot(x):
        return x if type(x.value) is np.ndarray and x.flags.c_contiguous else one_line(contiguous, (x,))
    return np.asarray(x, order="C")


def copied(x: Any) -> Any:
    """A C-contiguous copy of an array, on its device."""
    if is_slot(x):
        return one_line(copied, (x,))
    out = empty(x.shape, x)
    put(out, x)
    return out


def owned(x: np.ndarray) -> np.ndarray:
    """A C-contiguous copy of a host array."""
    return x.copy() if x.nbytes <= COPIED else copied(x)


def put(out: Any, x: Any) -> None:
    """Copy an array into another one of the same shape on the same device."""
    if type(x) is not np.ndarray or split_work.is_plain_copy(x.nbytes):
        out[...] = x
    else:
        split_work.copy([(out, x)])


class Adjoining(list):
    """Blocks that lie one after the other and fill a flat array."""

    __slots__ = ("whole",)

    def __init__(self, blocks: Iterable[np.ndarray], whole: np.ndarray):
        super().__init__(blocks)
        self.whole = whole


def adjoining(blocks: Sequence[Any]) -> np.ndarray | None:
    """Several blocks as one flat array without a copy, if they lie one after the other in a host array."""
    if type(blocks) is Adjoining:
        return blocks.whole
    first = blocks[0]
    if type(first) is not np.ndarray:
        return None
    owner = first if first.base is None else first.base
    if type(owner) is not np.ndarray or not owner.flags.c_contiguous:
        return None
    at = begin = first.ctypes.data
    for block in blocks:
        if (
            type(block) is not np.ndarray
            or (block.base is not owner and block is not owner)
            or block.dtype != first.dtype
            or not block.flags.c_contiguous
            or (block.size and block.ctypes.data != at)
        ):
            return None
        at += block.nbytes
    start = begin - owner.ctypes.data
    return owner.reshape(-1).view(np.uint8)[start : start + at - begin].view(first.dtype)


def joined(blocks: Sequence[Any], axis: int, fresh: bool = False) -> Any:
    """Blocks of one dtype joined along a dimension, as a C-contiguous array. fresh: always copy."""
    first = blocks[0]
    if len(blocks) == 1:
        return copied(first) if fresh else contiguous(first)
    if type(first) is np.ndarray and sum([b.nbytes for b in blocks]) <= COPIED:
        return contiguous(np.concatenate(blocks, axis, dtype=first.dtype))
    shape = (*first.shape[:axis], sum(b.shape[axis] for b in blocks), *first.shape[axis + 1 :])
    return _put_together(np.concatenate, blocks, axis, shape, fresh)


def stacked(blocks: Sequence[Any], axis: int, fresh: bool = False) -> Any:
    """Blocks of one shape and dtype stacked along a new dimension, as a C-contiguous array. fresh: always copy."""
    shape = blocks[0].shape
    return _put_together(np.stack, blocks, axis, (*shape[:axis], len(blocks), *shape[axis:]), fresh)


def _put_together(
    how: Callable[..., Any], blocks: Sequence[Any], axis: int, shape: tuple[int, ...], fresh: bool
) -> Any:
    first = blocks[0]
    if type(first) is not np.ndarray:
        return how(blocks, axis=axis)
    nbytes = math.prod(shape) * first.itemsize
    if not fresh and nbytes > COPIED and math.prod(shape[:axis]) == 1:
        lies = adjoining(blocks)
        if lies is not None:
            return lies.reshape(shape)
    out = pool.empty(shape, first.dtype)
    if split_work.part_count(nbytes) == 1 and not nontemporal.pays(nbytes, len(blocks)):
        how(blocks, axis=axis, out=out)
        return out
    before = (slice(None),) * axis
    if how is np.stack:
        places: list[Any] = [(*before, k) for k in range(len(blocks))]
    else:
        ends = itertools.accumulate((b.shape[axis] for b in blocks), initial=0)
        places = [(*before, slice(start, stop)) for start, stop in itertools.pairwise(ends)]
    split_work.copy([(out[place], block) for place, block in zip(places, blocks, strict=True)])
    return out


def zeros(shape: tuple[int, ...], like: Any) -> Any:
    """Zeros in the dtype and on the device of an array."""
    if type(like) is np.ndarray:
        return pool.zeros(shape, like.dtype)
    return np.zeros_like(like, shape=shape, order="C")


def empty(shape: tuple[int, ...], like: Any) -> Any:
    """An uninitialised array in the dtype and on the device of another."""
    if type(like) is np.ndarray:
        return pool.empty(shape, like.dtype)
    return np.empty_like(like, shape=shape, order="C")


def to_host(x: Any) -> Any:
    """An array on the host; waits for its computation."""
    return x.get() if on_device(x) else x


def home(where: str, argument: str, x: Any, device: str) -> Any:
    """An array of any library as a NumPy or CuPy array; arrays on a GPU stay there.

    Raises MeshError for an array on a GPU if the mesh has none.
    """
    if type(x) is np.ndarray:
        return x
    # By class name, because global arrays are defined in a module above this one.
    others = not isinstance(x, np.ndarray | np.generic) and type(x).__name__ != "PartitionedArray"
    if others and not on_device(x) and hasattr(type(x), "__dlpack_device__"):
        kind, _ = x.__dlpack_device__()  # pyright: ignore[reportAttributeAccessIssue]
        if int(kind) not in (1, 3):  # host memory, or memory that a device can read too
            x = imported().from_dlpack(x)
    if on_device(x) and device == "cpu":
        raise MeshError.at(
            where,
            argument=argument,
            got=f"{describe(x)}, which lies on a GPU",
            need="arrays of the host, for a mesh whose blocks lie there",
            mend='Mesh(..., device="cuda"); or x.get(), which copies it to the host',
        )
    return x


def imported(where: str = "spmd.Mesh") -> Any:
    """The module CuPy. Raises TransportError if it is not installed or finds no GPU."""
    need = 'CuPy and a GPU, for device="cuda"'
    try:
        import cupy  # type: ignore[import-not-found]
    except ImportError as error:
        raise TransportError.at(
            where,
            argument="device",
            got=f'"cuda", and CuPy cannot be imported ({error})',
            need=need,
            mend='pip install "spmd[cuda]"; without a GPU, device="cpu"',
        ) from error
    try:
        if cupy.cuda.runtime.getDeviceCount() > 0:
            return cupy
        problem = "no device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        problem = str(error)
    raise TransportError.at(
        where,
        argument="device",
        got=f'"cuda", and CuPy {cupy.__version__} finds no GPU ({problem})',
        need=need,
        mend='look at what nvidia-smi and CUDA_VISIBLE_DEVICES say; without a GPU, device="cpu"',
    )


def places(device: str, where: str = "spmd.Mesh") -> Places | None:
    """Where workers have their arrays on a device; None on the host."""
    if device == "cpu":
        return None
    imported(where)
    from spmd.cuda import Places

    return Places()
