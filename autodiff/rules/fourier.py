"""Rules of the discrete Fourier transforms of numpy.fft."""

from __future__ import annotations
