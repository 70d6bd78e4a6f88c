"""Taps of interpolation: the inputs of each output and their weights. NumPy arrays, computed once.

An output at the coordinate p, in units of the input's entries, has taps around floor(p). Their weights are polynomials
of t = p - floor(p): one tap for "nearest", two for "linear", four for "cubic" (R. Keys, "Cubic convolution
interpolation for digital image processing", 1981; its parameter a is -1/2 there, and -3/4 in torch).
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "BOUNDARIES",
    "METHODS",
    "RESIZE_METHODS",
    "continued",
    "nearest_shift",
    "polynomials",
    "resize_taps",
    "transposed",
]

METHODS = ("nearest", "linear", "cubic")
RESIZE_METHODS = ("nearest", "nearest-exact", "linear", "cubic", "area")
BOUNDARIES = ("zero", "edge", "periodic", "reflect")


def polynomials(method: str, cubic: float = -0.5, order: int = 0) -> np.ndarray:
    """The weights of the taps, (taps, 4): coefficients of 1, t, t², t³. order: of their derivative by t."""
    a = cubic
    rows = {
        "nearest": [[1, 0, 0, 0]],
        "linear": [[1, -1, 0, 0], [0, 1, 0, 0]],
        "cubic": [[0, a, -2 * a, a], [1, 0, -a - 3, a + 2], [0, -a, 2 * a + 3, -a - 2], [0, 0, a, -a]],
    }
    coefficients = np.array(rows[method], np.float64)
    for _ in range(order):
        coefficients = np.concatenate([coefficients[:, 1:] * [1, 2, 3], np.zeros((len(coefficients), 1))], axis=1)
    return coefficients


def nearest_shift(method: str) -> float:
    """What is added to a coordinate before it is rounded down."""
    return 0.5 if method == "nearest" else 0.0


def continued(i: np.ndarray, n: int, boundary: str) -> tuple[np.ndarray, np.ndarray | bool]:
    """The indices among n > 0 entries of the entries i of an array continued beyond its ends, and whether there is
    one."""
    if boundary == "periodic":
        return i % n, True
    if boundary == "reflect":
        i = i % max(1, 2 * (n - 1))
        return np.minimum(i, 2 * (n - 1) - i), True
    inside = (i >= 0) & (i < n) if boundary == "zero" else True
    return np.clip(i, 0, n - 1), inside


def resize_taps(
    n: int,
    m: int,
    method: str,
    align_corners: bool = False,
    antialias: bool = False,
    cubic: float = -0.5,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The taps of m outputs over the span of n > 0 inputs: index and weight, (m, taps).

    Output o is at (o + 1/2) * scale - 1/2; scale is n / m, or given. With align_corners it is at o * (n - 1) / (m - 1).
    Beyond its ends the input repeats the last entry. "nearest" reads floor(o * scale), "nearest-exact" the entry that
    the output is nearest to, "area" the mean of all entries that lie at least in part within the span of the output.
    antialias: where scale > 1 the weights are stretched by it, so that every input counts; taps beyond the ends are
    left out, and the weights of each output are scaled to the sum 1.
    """
    o = np.arange(m)
    if method == "area":
        return _area(n, m)
    if method in ("nearest", "nearest-exact"):
        twice = 2 * o + (method == "nearest-exact")
        index = twice * n // max(1, 2 * m) if scale is None else _floor(twice / 2 * scale)
        return np.minimum(index, n - 1)[:, None].astype(np.int32), np.ones((m, 1))
    if scale is None or align_corners:
        numerator, denominator = (o * (n - 1), max(1, m - 1)) if align_corners else ((2 * o + 1) * n - m, 2 * m)
        first, t = numerator // denominator, numerator % denominator / denominator
    else:
        position = (o + 0.5) * scale - 0.5
        first = np.floor(position).astype(np.int64)
        t = position - first
    taps = 2 if method == "linear" else 4
    if antialias:
        stretch = max(1.0, n / m if scale is None else scale) if m else 1.0
        position = first + t
        first = np.ceil(position - stretch * taps / 2).astype(np.int64)
        index = first[:, None] + np.arange(int(np.floor(stretch * taps)) + 1)
        weight = np.where((index >= 0) & (index < n), _hat(abs(position[:, None] - index) / stretch, method, cubic), 0)
        weight /= np.sum(weight, axis=1, keepdims=True)
    else:
        index = first[:, None] + np.arange(taps) - (taps // 2 - 1)
        weight = np.stack([t**0, t, t**2, t**3], axis=1) @ polynomials(method, cubic).T
    return np.clip(index, 0, n - 1).astype(np.int32), weight


def _floor(position: np.ndarray) -> np.ndarray:
    """Positions rounded down; those that miss a whole number by rounding are that number."""
    whole = np.rint(position)
    return np.where(np.abs(position - whole) <= 1e-9 * np.abs(whole), whole, np.floor(position)).astype(np.int64)


def _area(n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """The taps of means. Outputs that read fewer entries than others repeat the last with the weight 0."""
    o = np.arange(m)
    start, stop = o * n // max(1, m), -(-(o + 1) * n // max(1, m))
    taps = np.arange(np.max(stop - start, initial=1))
    index = np.minimum(start[:, None] + taps, stop[:, None] - 1)
    count = (stop - start)[:, None]
    return index.astype(np.int32), np.where(taps < count, 1 / count, 0)


def _hat(s: np.ndarray, method: str, cubic: float) -> np.ndarray:
    """The weight of a tap at the distance s >= 0."""
    rows = polynomials(method, cubic)[: 1 if method == "linear" else 2]
    powers = lambda t: np.stack([t**0, t, t**2, t**3], axis=-1)
    if method == "linear":
        return np.where(s < 1, powers(s) @ rows[0], 0)
    return np.where(s < 1, powers(s) @ rows[1], np.where(s < 2, powers(s - 1) @ rows[0], 0))


def transposed(index: np.ndarray, weight: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The taps of the adjoint, which has n outputs: for each input, the outputs that read it, with the same weights.

    All have as many taps as the input that is read most; missing ones repeat a tap with the weight 0.
    """
    m, taps = index.shape
    is_read = weight.reshape(-1) != 0
    pairs = (index.reshape(-1).astype(np.int64) * m + np.repeat(np.arange(m), taps))[is_read]
    unique_pairs, place = np.unique(pairs, return_inverse=True)
    weights = np.bincount(place.reshape(-1), weight.reshape(-1)[is_read], len(unique_pairs))
    i, o = unique_pairs // max(1, m), unique_pairs % max(1, m)
    slot = np.arange(len(i)) - np.searchsorted(i, i)
    width = int(np.max(slot, initial=-1)) + 1
    indices, weights_of = np.zeros((n, width), np.int32), np.zeros((n, width))
    if width:
        indices[i] = o[np.searchsorted(i, i)][:, None]
    indices[i, slot], weights_of[i, slot] = o, weights
    return indices, weights_of
