"""Sketches: a few numbers per array that show whether two arrays are equal up to rounding.

A block of entries x has the sketch <w, x> and |x|, for weights w of random signs, which are the same for every block.
Rounding errors, which know nothing of the signs, move <w, x> by about eps |x|; an entry that has another value, or
stands at another place, moves it by about as much as it differs.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff import devices

__all__ = ["Sketch", "differ", "rounding", "sketch", "slack"]

BLOCK = 512
"""Entries with weights of their own: an entry of a larger array is compared with those of its block only."""


class Sketch(NamedTuple):
    """shape, dtype: those of the array; only an array of these can be equal to it.

    exact: a checksum, of entries that have no rounding; else None.
    sums, squares: <w, x> and |x|² of each block, of the entries divided by `scale`.
    scale: None where the entries are sketched as they are; else the largest finite magnitude.
    codes: with a scale, the weighted sums of the codes of NaN and of infinities.
    """

    shape: tuple[int, ...]
    dtype: Any
    exact: Any = None
    sums: Any = None
    squares: Any = None
    scale: Any = None
    codes: Any = None


def sketch(x: Any) -> Sketch | None:
    """The sketch of an array or a number, in one pass over its entries; None of anything else.

    On a device nothing is waited for: the numbers of the sketch lie there too.
    """
    if isinstance(x, bool | int | float | complex):
        x = np.asarray(x)
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "reshape") or dtype.hasobject:
        return None
    if dtype.names:
        return Sketch(x.shape, dtype, exact=tuple(sketch(x[name]) for name in dtype.names))
    if dtype.kind not in "fc" and not _is_foreign_float(dtype):
        if devices.is_array(x):
            return Sketch(x.shape, dtype, **_scaled(x.reshape(-1).astype(np.float64)))
        return Sketch(x.shape, dtype, exact=zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data))
    with np.errstate(all="ignore"):
        flat = _reals(x)
        if not devices.is_array(x):
            sums, squares = _blocks(flat)
            plain = np.isfinite(sums) & np.isfinite(squares)
            plain &= (squares > _least(flat.dtype)) | ((squares == 0) & (sums == 0))
            if plain.all():
                return Sketch(x.shape, dtype, sums=sums, squares=squares)
        return Sketch(x.shape, dtype, **_scaled(flat))


def _is_foreign_float(dtype: np.dtype) -> bool:
    """Whether this is a floating dtype of another library, as bfloat16 is."""
    return dtype.kind == "V" and dtype.type is not np.void


def _reals(x: Any) -> Any:
    """The entries of x, real and imaginary parts apart, as one row of float32 or float64."""
    flat = x.reshape(-1)
    if flat.dtype.kind == "c":
        if flat.dtype.itemsize > 16:
            flat = flat.astype(np.complex128)
        return flat.view(np.float32 if flat.dtype.itemsize == 8 else np.float64)
    if flat.dtype.char in "fd":
        return flat
    return flat.astype(np.float32 if flat.dtype.itemsize < 4 else np.float64)


@functools.cache
def _signs() -> np.ndarray:
    """Weights of random signs, from 0.5 to 1.5."""
    bits = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    size = 0.5 + (bits >> np.uint64(40)) / 2.0**24
    return np.where(bits >> np.uint64(39) & np.uint64(1), size, -size)


@functools.cache
def _host_weights(dtype: Any) -> np.ndarray:
    return _signs().astype(dtype)


def _weights(like: Any) -> Any:
    return devices.beside(_host_weights(like.dtype), like)


def _weighted(flat: Any) -> Any:
    """<w, x> of each block of a row."""
    w, n = _weights(flat), flat.size // BLOCK * BLOCK
    rows = flat[:n].reshape(-1, BLOCK) @ w
    return rows if n == flat.size else np.concatenate([rows, (flat[n:] @ w[: flat.size - n]).reshape(1)])


def _blocks(flat: Any) -> tuple[Any, Any]:
    """<w, x> and |x|² of each block of a row."""
    n = flat.size // BLOCK * BLOCK
    rows, rest = flat[:n].reshape(-1, BLOCK), flat[n:]
    squares = np.einsum("ij,ij->i", rows, rows)
    if rest.size:
        squares = np.concatenate([squares, (rest @ rest).reshape(1)])
    return _weighted(flat), squares


def _scaled(flat: Any) -> dict[str, Any]:
    """The sketch of entries that may be infinite, or whose squares are no numbers of their dtype."""
    finite = np.isfinite(flat)
    kept = np.where(finite, flat, 0)
    scale = np.max(np.abs(kept)) if flat.size else np.sum(np.abs(kept))
    sums, squares = _blocks(kept / np.where(scale > 0, scale, 1))
    codes = np.isnan(flat) + 2.0 * (flat == np.inf) + 3.0 * (flat == -np.inf)
    return {"sums": sums, "squares": squares, "scale": scale, "codes": _weighted(codes)}


def _least(dtype: np.dtype) -> float:
    """A sum of squares from which on they have all their digits."""
    return 1e-30 if dtype.itemsize == 4 else 1e-290


def differ(first: Sketch, second: Sketch, tolerance: float, slack: float = 0.0) -> Any:
    """Whether two sketches are of arrays that differ by more than rounding; on a device a boolean that lies there.

    tolerance: the difference that is rounding, by the size of the entries. slack: the difference of an entry that is
    rounding whatever its own size is, because it comes of larger numbers.
    """
    if first.shape != second.shape or first.dtype != second.dtype or first.exact != second.exact:
        return True
    if first.exact is not None:
        return False
    if (first.scale is None) != (second.scale is None):
        return True
    with np.errstate(all="ignore"):
        bound = tolerance * np.sqrt(np.maximum(first.squares, second.squares))
        if first.scale is None:
            return np.any(np.abs(first.sums - second.sums) > bound + slack * _SPREAD)
        larger = np.maximum(first.scale, second.scale)
        bound = bound + slack * _SPREAD / np.where(larger > 0, larger, 1)
        apart = np.abs(first.scale - second.scale) > tolerance * larger + slack
        apart |= np.any(np.abs(first.sums - second.sums) > bound + 4 * tolerance**2)
        return apart | np.any(first.codes != second.codes)


_SPREAD = BLOCK**0.5


def rounding(dtypes: Iterable[Any]) -> float:
    """The difference, by the size of the entries, that is rounding of computations in these dtypes."""
    return max((_rounding(d) for d in set(dtypes) if d is not None), default=0) or _rounding(np.dtype(float))


@functools.cache
def _rounding(dtype: np.dtype) -> float:
    """The square root of the distance between numbers of a dtype: half of their digits may be lost."""
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps) ** 0.5
    return 0.1 if _is_foreign_float(dtype) else 0.0


def slack(arrays: Iterable[Any]) -> float:
    """What rounding may do to an entry that is computed from these arrays: by their largest number, and by how many
    are added up."""
    largest = 0.0
    for x in arrays:
        if getattr(x, "dtype", None) is not None and x.dtype.kind in "fc" and x.size and not devices.is_array(x):
            with np.errstate(all="ignore"):
                size = np.abs(x)
                most = float(np.max(np.where(np.isfinite(size), size, 0)))
            largest = max(largest, (64 + 8 * x.size**0.5) * float(np.finfo(x.dtype).eps) * most)
    return largest
