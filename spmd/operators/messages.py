"""Arrays of any shapes and dtypes in one message."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.device import put
from spmd.kernels.memory import pool

__all__ = ["dtype_from_json", "dtype_to_json", "packed", "unpacked"]

_ALIGNED = 64
"""Where arrays begin in a message: at multiples of so many bytes."""


def packed(arrays: Sequence[np.ndarray], note: Any) -> np.ndarray:
    """Arrays of any shapes and dtypes, and a note that JSON can hold, as one message of bytes."""
    shapes = [[dtype_to_json(x.dtype), *x.shape] for x in arrays]
    head = json.dumps([note, shapes]).encode()
    places, end = [], _ceil(8 + len(head))
    for x in arrays:
        places.append(end)
        end = _ceil(end + x.nbytes)
    message = pool.empty((end,), np.uint8)
    message[:8] = np.frombuffer(len(head).to_bytes(8, "little"), np.uint8)
    message[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    for x, place in zip(arrays, places, strict=True):
        if x.nbytes:
            put(message[place : place + x.nbytes].view(x.dtype).reshape(x.shape), x)
    return message


def unpacked(message: np.ndarray) -> tuple[list[np.ndarray], Any]:
    """The arrays of a message, views of it, and the note."""
    length = int.from_bytes(message[:8].tobytes(), "little")
    note, shapes = json.loads(message[8 : 8 + length].tobytes())
    arrays, place = [], _ceil(8 + length)
    for descr, *shape in shapes:
        dtype = dtype_from_json(descr)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        block = message[place : place + nbytes]
        arrays.append(block.view(dtype).reshape(shape) if dtype.itemsize else np.empty(shape, dtype))
        place = _ceil(place + nbytes)
    return arrays, note


@functools.cache
def dtype_to_json(dtype: np.dtype) -> Any:
    """A dtype as JSON: its name, also for ml_dtypes; for others NumPy's description."""
    if dtype.isnative and dtype.names is None and dtype.type is not np.void:
        return dtype.name
    return np.lib.format.dtype_to_descr(dtype)


def dtype_from_json(descr: Any) -> np.dtype:
    """The dtype that `dtype_to_json` wrote; JSON has turned tuples into lists."""
    return np.dtype(descr) if isinstance(descr, str) else np.lib.format.descr_to_dtype([(*field,) for field in descr])


def _ceil(n: int) -> int:
    return -(-n // _ALIGNED) * _ALIGNED
