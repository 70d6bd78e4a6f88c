"""Fourier transforms of NumPy's names, of arrays that lie anyhow on the workers.

    spec = P("x")                              # slabs
    f = spmd.fft.rfftn(u, spec=spec)           # in a body: this worker's blocks
    print(spmd.fft.plan((256, 256, 256), spec, real=True, mesh=mesh))

Without specs, and outside of bodies, they are NumPy's, of arrays of NumPy, CuPy and PyTorch; of global arrays they are
as they lie. The transforms on a worker are SciPy's where it is installed, on the cores of the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.fft.frequencies import fftfreq, fftshift, ifftshift, rfftfreq
from spmd.fft.planning import plan
from spmd.fft.transforms import (
    fft,
    fft2,
    fftn,
    hfft,
    ifft,
    ifft2,
    ifftn,
    ihfft,
    irfft,
    irfft2,
    irfftn,
    rfft,
    rfft2,
    rfftn,
)
from spmd.fourier.plan import FourierPlan
from spmd.lazy_imports import lazy_attributes

__all__ = [
    "FourierPlan",
    "fft",
    "fft2",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfft2",
    "irfftn",
    "plan",
    "rfft",
    "rfft2",
    "rfftfreq",
    "rfftn",
]

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(__name__, {})
