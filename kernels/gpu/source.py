"""Kernels in CUDA: templates in the `.cu` files beside this one, compiled by NVRTC for the dtypes that they meet.

    _rows = Kernel("softmaxes", "softmax", over(FLOATING))
    _rows(x.dtype, grid=rows, block=256, args=(out, x, rows, n))

Before each source stands `common.cuh`: short floating-point types, loads and stores of 16 bytes, sums over a block.
Launches go to the current stream, and nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

__all__ = ["COMPLEX", "FLOATING", "KERNELS", "REAL", "Kernel", "blocks_for", "over", "type_name", "uploaded"]

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
"""All kernels of the families that are loaded; tests compile every one for every combination of its types."""


def type_name(dtype: Any) -> str:
    """What a dtype is called in the sources."""
    return _NAMES[np.dtype(dtype).name if not isinstance(dtype, str) else dtype]


def over(*choices: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """All combinations of dtypes, one of each of the choices."""
    found: list[tuple[str, ...]] = [()]
    for names in choices:
        found = [(*f, name) for f in found for name in names]
    return tuple(found)


@cache
def text(file: str) -> str:
    """The source `file.cu`, complete."""
    here = Path(__file__).parent
    return f'{(here / "common.cuh").read_text()}\n#line 1 "{file}.cu"\n{(here / f"{file}.cu").read_text()}'


class Kernel:
    """The template `name` of `file.cu`. types: the combinations of dtypes that it is for, by name. exact: each
    operation is rounded by itself; else products and sums may be fused."""

    OPTIONS = ("-std=c++17",)

    def __init__(self, file: str, name: str, types: tuple[tuple[str, ...], ...], *, exact: bool = False):
        self.file = file
        self.name = name
        self.types = types
        self.options = (*self.OPTIONS, "-fmad=false") if exact else self.OPTIONS
        self._found: dict[tuple[str, ...], Any] = {}
        KERNELS.append(self)

    def expression(self, types: tuple[str, ...]) -> str:
        """The instance of the template for dtypes, as C++ writes it."""
        return f"{self.name}<{', '.join(map(type_name, types))}>"

    def __call__(self, *dtypes: Any, grid: Any, block: Any, args: tuple[Any, ...], shared: int = 0) -> None:
        """Launch it. grid, block: an int, or a tuple of up to three. Integers among args are `long long` there."""
        key = tuple(np.dtype(d).name for d in dtypes)
        found = self._found.get(key)
        if found is None:
            expression = self.expression(key)
            module = cp.RawModule(code=text(self.file), options=self.options, name_expressions=[expression])
            found = self._found[key] = module.get_function(expression)
        args = tuple(np.int64(a) if type(a) is int else a for a in args)
        found(_three(grid), _three(block), args, shared_mem=shared)


def _three(n: Any) -> tuple[int, ...]:
    return (n,) if isinstance(n, int) else tuple(n)


def blocks_for(n: int, threads: int) -> int:
    """Blocks for a loop over n items that each thread goes through in strides of the whole grid."""
    return max(1, min(-(-n // threads), 8 * _multiprocessors(cp.cuda.Device().id)))


@cache
def _multiprocessors(device: int) -> int:
    return cp.cuda.Device(device).attributes["MultiProcessorCount"]


def uploaded(x: np.ndarray) -> Any:
    """A table of the host on the device, to be read on the current stream. It is sent there once for each stream: no
    event orders others after that, nor after what reads it once it is dropped here."""
    return _uploaded(x.tobytes(), x.dtype.str, x.shape, cp.cuda.Device().id, cp.cuda.get_current_stream().ptr)


@lru_cache(maxsize=1024)
def _uploaded(data: bytes, dtype: str, shape: tuple[int, ...], device: int, stream: int) -> Any:
    return cp.asarray(np.frombuffer(data, dtype).reshape(shape))
