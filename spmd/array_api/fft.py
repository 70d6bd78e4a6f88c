"""The extension `fft` of the standard: functions of NumPy's module of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.array_api.info import mesh_of
from spmd.fourier.frequencies import frequencies
from spmd.layout import P, Spec
from spmd.placement import from_callback
from spmd.tracebacks import api_boundary

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_NUMPYS = "fft ifft fftn ifftn rfft irfft rfftn irfftn hfft ihfft fftshift ifftshift".split()
globals().update({name: getattr(np.fft, name) for name in _NUMPYS})

__all__ = [*_NUMPYS, "fftfreq", "rfftfreq"]  # pyright: ignore[reportUnsupportedDunderAll]
_COPIES = P()


@api_boundary
def fftfreq(
    n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None, spec: Spec = _COPIES
) -> PartitionedArray:
    """As `np.fft.fftfreq`, as a global array that is made block by block. device: a mesh."""
    return _frequencies(n, d, False, dtype, spec, mesh_of("xp.fft.fftfreq", device))


@api_boundary
def rfftfreq(
    n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None, spec: Spec = _COPIES
) -> PartitionedArray:
    """As `np.fft.rfftfreq`, as a global array that is made block by block. device: a mesh."""
    return _frequencies(n, d, True, dtype, spec, mesh_of("xp.fft.rfftfreq", device))


def _frequencies(n: int, d: float, half: bool, dtype: Any, spec: Spec, mesh: Any) -> PartitionedArray:
    def block(index: tuple[slice, ...]) -> np.ndarray:
        (s,) = index
        return frequencies(n, d, s.start, s.stop, half).astype(np.float64 if dtype is None else dtype)

    return from_callback((n // 2 + 1 if half else n,), spec, block, mesh)
