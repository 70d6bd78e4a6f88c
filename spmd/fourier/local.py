"""Fourier transforms of one block of NumPy or CuPy: by SciPy where it is installed, on the cores of this worker.

`spmd.bridge.torch.local.fourier` has the same functions for tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from spmd.mesh import WORKER

__all__ = ["pad", "transform"]


@cache
def _scipys() -> dict[str, Callable[..., Any]]:
    """The transforms of scipy.fft by name, which take traced arrays; none without SciPy."""
    try:
        from spmd.autodiff.rules.fourier_scipy import functions
    except ImportError:
        return {}
    return functions


def _cores() -> int | None:
    """The number of cores of this worker; None outside of bodies."""
    worker = WORKER.get()
    return None if worker is None else worker.mesh.transport.threads()


def transform(x: Any, kind: str, sizes: Sequence[int], dims: Sequence[int], norm: str, overwrite: bool = False) -> Any:
    """NumPy's transform of this kind, of these lengths along these dimensions. overwrite: x may be written to."""
    name = kind if len(dims) == 1 else kind + "n"
    n, axes = (sizes[0], dims[0]) if len(dims) == 1 else (tuple(sizes), tuple(dims))
    fun = _scipys().get(name)
    if fun is None:
        return getattr(np.fft, name)(x, n, axes, norm=norm)
    return fun(x, n, axes, norm, overwrite, workers=_cores())


def pad(x: Any, dim: int, low: int, high: int) -> Any:
    """x with zeros before and after it along a dimension."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = (low, high)
    return np.pad(x, widths)
