"""Compare arrays by their bits, by digests, and up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.autodiff.allocation import writable

__all__ = [
    "OTHER",
    "ROUNDING",
    "SAME",
    "compared_part",
    "digest",
    "is_skipped",
    "next_turn",
    "part_slice",
    "relation",
    "sketch",
    "sketches_agree",
]

WHOLE_COMPARISONS = 3
"""The first comparisons of a line, which cover whole arrays; later ones cover one part of a large array each."""
PART_BYTES = 1 << 20
PARTS = 64
"""An array has one part per third of PART_BYTES, at most PARTS of them: that many comparisons cover every entry."""
TABLE_MAX = 4096
"""The most entries of the tables of turns and of values that wait to be compared."""
_ROUNDING_UNITS = 1024.0
"""Differences of at most this many units in the last place of the largest entry count as rounding. In short dtypes the
limit is the square root of the unit."""
_SKETCH_CHUNKS = 1024
_GOLDEN = (3.0 - 5.0**0.5) / 2.0

SAME, ROUNDING, OTHER = "same", "rounding", "other"


def part_slice(size: int, itemsize: int, turn: int) -> slice:
    """The entries of a flat array that comparison number `turn` covers."""
    parts = min(PARTS, -(-3 * size * itemsize // PART_BYTES))
    if turn < WHOLE_COMPARISONS or parts <= 1:
        return slice(None)
    length = -(-size // parts)
    start = turn % parts * length
    return slice(start, start + length)


def next_turn(turns: dict[Any, int], key: Any) -> int:
    """Count the uses of a key, and return how many came before this one."""
    if len(turns) >= TABLE_MAX:
        turns.clear()
    turn = turns.get(key, 0)
    turns[key] = turn + 1
    return turn


def is_skipped(turn: int, nbytes: int) -> bool:
    """Whether comparison number `turn` of a small value is skipped.

    The first comparisons are made, and later at least one of any three in a row. Steps of the golden section choose
    them, so that they do not fall into step with a loop of the program.
    """
    return turn >= WHOLE_COMPARISONS and nbytes <= PART_BYTES and turn * _GOLDEN % 1.0 >= _GOLDEN


@lru_cache(maxsize=1)
def digest_weights() -> np.ndarray:
    """Odd weights: every change of one word changes the weighted sum."""
    return np.random.default_rng(0).integers(0, 1 << 63, 1 << 12, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def digest(x: np.ndarray) -> int:
    """A number that depends on the bits of an array and on their positions."""
    flat = np.ascontiguousarray(x).reshape(-1)
    if flat.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:  # padding bytes are undefined
        octets = np.ascontiguousarray(flat.view(np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)[:, :10])
    else:
        octets = flat.view(np.uint8)
    octets = octets.reshape(-1)
    words, rest = octets[: octets.size // 8 * 8].view(np.uint64), octets[octets.size // 8 * 8 :].tobytes()
    return _fold(words) ^ int.from_bytes(rest, "little") * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


def _fold(words: np.ndarray) -> int:
    """The weighted sum of words: first of each row, then of the sums of the rows."""
    weights = digest_weights()
    while words.size > weights.size:
        rows = words.size // weights.size
        head, tail = words[: rows * weights.size], words[rows * weights.size :]
        words = np.concatenate([head.reshape(rows, -1) @ weights, tail])
    return int(words @ weights[: words.size])


def compared_part(x: np.ndarray, turn: int) -> np.ndarray:
    """The entries of an array that comparison number `turn` covers; a copy where the array is writable."""
    flat = np.ascontiguousarray(x).reshape(-1)
    part = flat[part_slice(flat.size, flat.dtype.itemsize, turn)]
    return part.copy() if writable(part) else part


def relation(a: np.ndarray, b: np.ndarray) -> str:
    """Whether two arrays are the same, differ by rounding, or are other values."""
    if a is b:
        return SAME
    if a.shape != b.shape or a.dtype != b.dtype:
        return OTHER
    a, b = (np.ascontiguousarray(x).reshape(-1) for x in (a, b))
    word = f"u{min(a.dtype.itemsize, 8)}"  # bits first: one pass
    if a.dtype.itemsize in (1, 2, 4, 8, 16) and a.dtype.char not in "gG" and np.array_equal(a.view(word), b.view(word)):
        return SAME
    with np.errstate(all="ignore"):
        differ = ~((a == b) | ((a != a) & (b != b)))
        if not differ.any():
            return SAME
        tolerance = _tolerance(a.dtype)
        if tolerance is None:
            return OTHER
        a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
        finite = np.isfinite(a) & np.isfinite(b)
        if (differ & ~finite).any():
            return OTHER
        a, b = a[finite], b[finite]
        return ROUNDING if np.abs(a - b).max() <= tolerance * np.abs(a).max() else OTHER


@lru_cache(maxsize=64)
def _tolerance(dtype: np.dtype) -> float | None:
    """The largest difference that counts as rounding, relative to the largest entry; None for exact dtypes."""
    if dtype.kind in "fc":
        unit = float(np.finfo(dtype).eps)
    else:
        try:
            import ml_dtypes

            unit = float(ml_dtypes.finfo(dtype).eps)
        except (ImportError, ValueError):
            return None
    return min(_ROUNDING_UNITS * unit, unit**0.5)


def sketch(x: np.ndarray) -> list[float]:
    """A summary from which another process distinguishes rounding from other values; empty for exact dtypes.

    It holds the tolerance, a digest of where the entries are finite, and per chunk a weighted sum and the norm.
    """
    tolerance = _tolerance(x.dtype)
    if tolerance is None or not x.size:
        return []
    flat = np.ascontiguousarray(x).reshape(-1)
    flat = flat.astype(np.complex128).view(np.float64) if flat.dtype.kind == "c" else flat.astype(np.float64)
    finite = np.isfinite(flat)
    flat = np.where(finite, flat, 0.0)
    weights = 1.0 + np.resize(digest_weights() / 2.0**64, flat.size)
    starts = np.arange(0, flat.size, max(1, -(-flat.size // _SKETCH_CHUNKS)))
    sums, squares = np.add.reduceat(flat * weights, starts), np.add.reduceat(flat * flat, starts)
    return [tolerance, float(digest(finite) % (1 << 32)), *sums.tolist(), *np.sqrt(squares).tolist()]


def sketches_agree(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Whether two arrays, by their sketches, differ by rounding at most. None: there is no sketch."""
    if not one or not other or len(one) != len(other) or one[:2] != other[:2]:
        return False
    (sums, norms), (other_sums, other_norms) = (np.reshape(x[2:], (2, -1)) for x in (one, other))
    scale = max(norms.max(), other_norms.max())
    return bool(np.abs(sums - other_sums).max() <= 2 * one[0] * scale)
