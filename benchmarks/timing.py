"""Timing by interleaved runs: what is compared runs in turn, so that a noisy machine disturbs all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

__all__ = ["interleaved"]


def interleaved(*functions: Callable[[], object], rounds: int = 25, least: float = 2e-3) -> list[float]:
    """Seconds per call of each function: the median over rounds, in each of which every function runs in turn.

    A function is called as often per round as it takes to last `least` seconds, after one round to warm up.
    """
    counts = []
    for f in functions:
        f()
        start = time.perf_counter()
        f()
        counts.append(max(1, round(least / max(time.perf_counter() - start, 1e-9))))
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for f, count, into in zip(functions, counts, seconds, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                f()
            into.append((time.perf_counter() - start) / count)
    return [statistics.median(into) for into in seconds]
