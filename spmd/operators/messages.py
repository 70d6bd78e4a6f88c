"""Arrays of any shapes and dtypes in one message."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from spmd.device import put
from spmd.kernels.memory import pool

__all__ = ["dtype_from_json", "dtype_to_json", "packed", "unpacked"]

_ALIGNED = 64
"""Where arrays begin in a message: at multiples of so many bytes."""


class _Layout(NamedTuple):
    """What the head of a message says. note: of its sender, which nobody may change. places: the dtype and shape of
    each array, and where its bytes begin and end. nbytes: of the message."""

    note: Any
    places: list[tuple[np.dtype, tuple[int, ...], int, int]]
    nbytes: int


@functools.lru_cache(maxsize=256)
def _layout(head: bytes) -> _Layout:
    """Heads repeat from message to message."""
    note, arrays = json.loads(head)
    places, end = [], _ceil(8 + len(head))
    for descr, *shape in arrays:
        dtype, start = dtype_from_json(descr), end
        end = start + dtype.itemsize * prod(shape)
        places.append((dtype, tuple(shape), start, end))
        end = _ceil(end)
    return _Layout(note, places, end)


def packed(arrays: Sequence[np.ndarray], note: Any) -> np.ndarray:
    """Arrays of any shapes and dtypes, and a note that JSON can hold, as one message of bytes."""
    head = json.dumps([note, [[dtype_to_json(x.dtype), *x.shape] for x in arrays]]).encode()
    layout = _layout(head)
    message = pool.empty((layout.nbytes,), np.uint8)
    message[: 8 + len(head)] = np.frombuffer(len(head).to_bytes(8, "little") + head, np.uint8)
    for x, (_, shape, start, end) in zip(arrays, layout.places, strict=True):
        if end > start:
            put(message[start:end].view(x.dtype).reshape(shape), x)
    return message


def unpacked(message: np.ndarray) -> tuple[list[np.ndarray], Any]:
    """The arrays of a message, views of it, and the note, which may be that of other messages too."""
    length = int.from_bytes(message[:8].tobytes(), "little")
    layout = _layout(message[8 : 8 + length].tobytes())
    arrays = [
        message[start:end].view(dtype).reshape(shape) if dtype.itemsize else np.empty(shape, dtype)
        for dtype, shape, start, end in layout.places
    ]
    return arrays, layout.note


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
