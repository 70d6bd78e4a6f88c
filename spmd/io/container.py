"""safetensors files: the header that names each tensor, its type, shape and place, and then the bytes of all.

https://huggingface.co/docs/safetensors gives the format. Any reader of it opens these files. They are written here as
streams and read by ranges, because each chunk has a checksum, and no process may need a second copy of what it saves.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import CheckpointError, CorruptCheckpointError

__all__ = ["Stored", "Tensor", "dtype_of", "exported_as", "header", "read_header", "stored_as"]

_HEADER_MAX = 100 << 20
"""The longest header that the format allows."""


class Stored(NamedTuple):
    """How the entries of a dtype lie in a file. code: the type that the header names. dtype: NumPy's name of it.
    parts: how many of these make an entry, along a last dimension; 1: without that dimension."""

    code: str
    dtype: np.dtype
    parts: int


_CODES = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
_DTYPES = {code: name for name, code in _CODES.items()} | {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}
"""NumPy's names of the types that a header may name."""


def dtype_of(name: str) -> np.dtype | None:
    """The dtype of a name, as dtypes print it; None where there is none. Those of ml_dtypes have names too."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError, TypeError):
        return None


@lru_cache(maxsize=256)
def stored_as(dtype: np.dtype) -> Stored | None:
    """How a dtype is stored; None if it cannot be. Complex numbers are stored as pairs, bfloat16 and float8 as the
    unsigned integers of their bits, which every reader knows."""
    name = dtype.name
    if name in _CODES:
        return Stored(_CODES[name], np.dtype(name), 1)
    if dtype.kind == "c" and dtype.itemsize in (8, 16):
        part = np.dtype(f"float{4 * dtype.itemsize}")
        return Stored(_CODES[part.name], part, 2)
    if name.startswith(("bfloat", "float8")) and dtype.itemsize in (1, 2):
        part = np.dtype(f"uint{8 * dtype.itemsize}")
        return Stored(_CODES[part.name], part, 1)
    return None


def exported_as(dtype: np.dtype) -> str | None:
    """The type by which a header names a dtype as it is; None if the format has none."""
    return next((code for code, name in _DTYPES.items() if name == dtype.name), None)


class Tensor(NamedTuple):
    """A tensor of a file. offset: of its first byte from the beginning of the file."""

    name: str
    code: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype | None:
        return dtype_of(_DTYPES[self.code]) if self.code in _DTYPES else None


def header(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """The beginning of a file of these tensors, and their offsets. A tensor: its name, type, shape and bytes."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    ends = []
    at = 0
    for name, code, shape, nbytes in tensors:
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        ends.append(at)
        at += nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [8 + len(text) + start for start in ends]


def read_header(path: Path) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata. Raises CorruptCheckpointError where it is no safetensors file."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _HEADER_MAX):
            raise _no_container(path, f"{size} bytes without the header of a safetensors file")
        text = file.read(length)
    try:
        return _tensors(json.loads(text), 8 + length, size)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _no_container(path, f"a header that cannot be read ({error!r})") from None


def _tensors(table: dict[str, Any], start: int, size: int) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of a header. start: of their bytes. size: of the file. Raises ValueError where one does not fit."""
    metadata = dict(table.pop("__metadata__", {}))
    tensors = []
    for name, entry in table.items():
        first, last = entry["data_offsets"]
        tensor = Tensor(name, entry["dtype"], tuple(entry["shape"]), start + first, last - first)
        if not all(type(n) is int and n >= 0 for n in (*tensor.shape, first, last - first)) or start + last > size:
            raise ValueError(f"a tensor {name!r} whose shape or place does not fit the file")
        if tensor.dtype is not None and math.prod(tensor.shape) * tensor.dtype.itemsize != tensor.nbytes:
            raise ValueError(f"a tensor {name!r} whose shape does not fit its bytes")
        tensors.append(tensor)
    return tensors, metadata


def _no_container(path: Path, got: str) -> CorruptCheckpointError:
    return CorruptCheckpointError.at(
        f"the file {path}",
        got=got,
        need="a safetensors file",
        mend="files of pickle, .npy or .pt are not read: save what they hold by spmd.save or as safetensors",
    )


def checked_dtype(tensor: Tensor, path: Path) -> np.dtype:
    """The dtype of a tensor of a file that others wrote."""
    dtype = tensor.dtype
    if dtype is not None:
        return dtype
    raise CheckpointError.at(
        f"the tensor {tensor.name!r} in {path}",
        got=f"the type {tensor.code}",
        need=f"one of {', '.join(_DTYPES)}",
        mend="pip install ml_dtypes for bfloat16 and float8; convert the tensor where it was written",
    )
