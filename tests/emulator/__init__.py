"""CUDA sources that run on the CPU: compiled by g++ against `cuda.h`, a block's threads as fibers of one thread.

It shows what a kernel computes, not how fast, and not what needs the device itself. Without g++ there is none of it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")


@functools.cache
def folder() -> Path:
    """Where compiled sources lie, for as long as this user's temporary files do."""
    path = Path(tempfile.gettempdir()) / f"emulated-cuda-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    known = path.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid() or known.st_mode & 0o022:
        raise PermissionError(f"{path}, where compiled sources lie, is not a folder that only this user can write to")
    return path


refused: dict[str, str] = {}
"""What the compiler said of sources that it refuses: it is not asked twice."""


def library(source: str, expressions: Sequence[str]) -> ctypes.CDLL:
    """The instances of the templates in a source; number k is launched by `launch_k`."""
    code = f'#include "{HERE / "cuda.h"}"\n{source}\n' + "\n".join(
        f'extern "C" const char* launch_{k}(const unsigned* dims, size_t shared, void** args, int reversed) '
        f"{{ return emulated::launch(&{e}, dims, shared, args, reversed); }}"
        for k, e in enumerate(expressions)
    )
    key = hashlib.sha256((code + (HERE / "cuda.h").read_text()).encode()).hexdigest()[:24]
    path = folder() / f"{key}.so"
    if key in refused:
        raise RuntimeError(refused[key])
    if not path.exists():
        assert COMPILER is not None
        with tempfile.TemporaryDirectory(dir=folder()) as work:
            made = Path(work, "made.so")
            # Contraction is off, so that the results are those of the operations as they are written.
            command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-x", "c++", "-"]
            done = subprocess.run([*command, "-o", str(made)], input=code, text=True, capture_output=True)
            if done.returncode:
                refused[key] = f"g++ refuses the source:\n{done.stderr[:4000]}"
                raise RuntimeError(refused[key])
            os.replace(made, path)
    return ctypes.CDLL(str(path))


_one_at_a_time = threading.Lock()


def writes(source: str, name: str) -> list[bool]:
    """For each parameter of a kernel up to the last pointer, whether it is a pointer to what the kernel may write."""
    found = re.search(rf"__global__ void {re.escape(name)}\(([^)]*)\)", source)
    assert found is not None
    return ["*" in p and not re.match(r"\s*const\b", p) for p in found[1].split(",")]


class Function:
    """One instance of a template, called as a `cupy.RawKernel`: `f(grid, block, args, shared_mem=0)`.

    Arrays among args are those of `pointer`: it turns one into the address of its data, and is told whether the kernel
    may write there. Between two barriers every other launch runs the threads of a block in reversed order.
    """

    launches = 0

    def __init__(self, library: ctypes.CDLL, number: int, pointer, writes: Sequence[bool]):
        self.launch = getattr(library, f"launch_{number}")
        self.launch.restype = ctypes.c_char_p
        self.pointer = pointer
        self.writes = writes

    def __call__(self, grid, block, args, *, shared_mem=0, stream=None):
        dims = (ctypes.c_uint * 6)(*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
        boxes = []
        for k, a in enumerate(args):
            if isinstance(a, np.generic | int | float | complex):
                value = np.asarray(a)
                assert value.dtype.kind in "biufc", value.dtype
                boxes.append(ctypes.create_string_buffer(value.tobytes(), 16))
            else:
                boxes.append(ctypes.c_void_p(self.pointer(a, self.writes[k])))
        pointers = (ctypes.c_void_p * max(1, len(boxes)))(*(ctypes.addressof(b) for b in boxes))
        Function.launches += 1
        with _one_at_a_time:  # the threads of a block share what is global in `cuda.h`
            failure = self.launch(dims, ctypes.c_size_t(shared_mem), pointers, Function.launches % 2)
        if failure:
            raise RuntimeError(f"the launch failed: {failure.decode()}")
