"""Frequencies of the modes, block by block."""

from __future__ import annotations

import numpy as np

__all__ = ["frequencies"]


def frequencies(n: int, d: float, start: int, stop: int, half: bool) -> np.ndarray:
    """The entries from start to stop of `np.fft.fftfreq(n, d)`, or of `np.fft.rfftfreq(n, d)`."""
    k = np.arange(start, stop)
    return (k if half else np.where(k < (n + 1) // 2, k, k - n)) * (1.0 / (n * d))
