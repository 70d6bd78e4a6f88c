"""Kernels in CUDA: templates in the `.cu` files here, compiled by NVRTC for the dtypes that they are called with.

    _rows = Kernel("softmaxes", "softmax", over(FLOATING))
    _rows(x.dtype, grid=rows, block=256, args=(out, x, rows, n))

`common.cuh` precedes each source: short floating-point types, loads and stores of 16 bytes, sums over a block. Launches
go to the current stream, and nothing waits for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

__all__ = ["COMPLEX", "FLOATING", "KERNELS", "REAL", "Kernel"]
__all__ += ["blocks_for", "device_and_stream", "over", "row_grid", "row_threads", "type_name", "uploaded"]

REAL = ("float32", "float64")
FLOATING = (*REAL, "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")

_NAMES = {
    "float16": "half_t",
    "bfloat16": "bfloat_t",
    "float32": "float",
    "float64": "double",
    "complex64": "complex_t<float>",
    "complex128": "complex_t<double>",
    "int32": "int",
    "int64": "long long",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "bool": "bool",
}

KERNELS: list[Kernel] = []
"""All kernels of the loaded families; tests compile each for every combination of its types."""


def type_name(dtype: Any) -> str:
    """The name of a dtype in the sources."""
    return _NAMES[np.dtype(dtype).name if not isinstance(dtype, str) else dtype]


def over(*choices: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """All combinations of dtypes, one of each of the choices."""
    return tuple(itertools.product(*choices))


@cache
def text(file: str) -> str:
    """The source `file.cu`, with `common.cuh`."""
    here = Path(__file__).parent
    return f'{(here / "common.cuh").read_text()}\n#line 1 "{file}.cu"\n{(here / f"{file}.cu").read_text()}'


class Kernel:
    """The template `name` of `file.cu`. types: the combinations of dtypes that it supports, by name. exact: each
    operation is rounded by itself; else products and sums may be fused."""

    OPTIONS = ("-std=c++17",)

    def __init__(self, file: str, name: str, types: tuple[tuple[str, ...], ...], *, exact: bool = False):
        self.file = file
        self.name = name
        self.types = types
        self.options = (*self.OPTIONS, "-fmad=false") if exact else self.OPTIONS
        self._functions: dict[tuple[str, ...], Any] = {}
        KERNELS.append(self)

    def expression(self, types: tuple[str, ...]) -> str:
        """The C++ expression of the instance for these dtypes."""
        return f"{self.name}<{', '.join(map(type_name, types))}>"

    def __call__(self, *dtypes: Any, grid: Any, block: Any, args: tuple[Any, ...], shared: int = 0) -> None:
        """Launch it. grid, block: an int, or a tuple of up to three. Integers among args become `long long`."""
        key = tuple(np.dtype(d).name for d in dtypes)
        function = self._functions.get(key)
        if function is None:
            expression = self.expression(key)
            module = cp.RawModule(code=text(self.file), options=self.options, name_expressions=[expression])
            function = self._functions[key] = module.get_function(expression)
        args = tuple(np.int64(a) if type(a) is int else a for a in args)
        function(_tuple(grid), _tuple(block), args, shared_mem=shared)


def _tuple(n: Any) -> tuple[int, ...]:
    return (n,) if isinstance(n, int) else tuple(n)


def blocks_for(n: int, threads: int) -> int:
    """Blocks for a grid-stride loop over n items."""
    return max(1, min(-(-n // threads), 8 * _multiprocessors(cp.cuda.Device().id)))


def row_threads(n: int) -> int:
    """Threads of a block for a row of n entries."""
    return min(1024, max(32, -(-n // 128) * 32))


def row_grid(rows: int, n: int, limit: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid, of at most `limit` blocks along a row, and blocks of 256 threads that share as many rows as fit."""
    along = 32
    while along < min(n, 256):
        along *= 2
    beside = 256 // along
    return (min(-(-rows // beside), 1 << 20), min(-(-n // along), limit)), (along, beside)


@cache
def _multiprocessors(device: int) -> int:
    return cp.cuda.Device(device).attributes["MultiProcessorCount"]


def uploaded(x: np.ndarray) -> Any:
    """A table of the host on the device, for reads on the current stream. It is copied once for each stream, for no
    event orders other streams after the copy, or the reuse of its memory after their reads."""
    return _uploaded(x.tobytes(), x.dtype.str, x.shape, *device_and_stream())


def device_and_stream() -> tuple[int, int]:
    """What tells apart tables on devices."""
    return cp.cuda.Device().id, cp.cuda.get_current_stream().ptr


@lru_cache(maxsize=1024)
def _uploaded(data: bytes, dtype: str, shape: tuple[int, ...], device: int, stream: int) -> Any:
    return cp.asarray(np.frombuffer(data, dtype).reshape(shape))
