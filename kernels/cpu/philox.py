"""Counter-based random numbers, in pieces whose words stay in the cache until they are converted.

Each operation is rounded by itself, in one order, so that NumPy, compiled loops and the GPU give the same bits: no
mathematical library is called, and products and sums are not fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.cpu.quantiles import minus_log, quantile
from spmd.kernels.memory import pool

Box = Any

_PIECE = 1 << 16
"""Words in a piece."""


def random_bits(key: np.ndarray, shape: tuple[int, ...], box: Box, dtype: Any, domain: int = 0) -> np.ndarray:
    """Random integers of all values of a dtype, uint32 or uint64."""
    dtype = np.dtype(dtype)
    out = pool.empty(extent(box), dtype)
    for into, words in _pieces(key, shape, box, out, domain):
        into[...] = words.view(dtype)
    return out


def random_uniform(key: np.ndarray, shape: tuple[int, ...], box: Box, dtype: Any, low: float, high: float):
    """Numbers from low up to, but without, high."""
    return _drawn(key, shape, box, dtype, _Uniform(dtype, low, high))


def random_normal(key: np.ndarray, shape: tuple[int, ...], box: Box, dtype: Any) -> np.ndarray:
    """Numbers of the normal distribution."""
    return _drawn(key, shape, box, dtype, _normal)


def random_truncated(key: np.ndarray, shape: tuple[int, ...], box: Box, dtype: Any, low: float, high: float):
    """Numbers of the normal distribution, truncated to low and high."""
    return _drawn(key, shape, box, dtype, _Truncated(dtype, low, high))


def random_exponential(key: np.ndarray, shape: tuple[int, ...], box: Box, dtype: Any) -> np.ndarray:
    """Numbers of the exponential distribution, of mean 1."""
    return _drawn(key, shape, box, dtype, _exponential)


def random_gumbel(key: np.ndarray, shape: tuple[int, ...], box: Box, dtype: Any) -> np.ndarray:
    """Numbers of the Gumbel distribution."""
    return _drawn(key, shape, box, dtype, _gumbel)


# Boxes


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def runs(shape: tuple[int, ...], box: Box, xp: Any = np) -> tuple[Any, int]:
    """The flat indices, uint64, at which the rows of a box begin, and their length. Rows that follow each other are
    one."""
    d, length, start_index, stride, is_whole = len(shape), 1, 0, 1, True
    while d and is_whole:
        d -= 1
        start, stop = box[d]
        length, start_index, is_whole = length * (stop - start), start_index + start * stride, stop - start == shape[d]
        stride *= shape[d]
    starts = xp.full(1, start_index, xp.uint64)
    while d:
        d -= 1
        offsets = xp.arange(*box[d], dtype=xp.uint64) * xp.uint64(stride)
        starts = (offsets[:, None] + starts[None, :]).reshape(-1)
        stride *= shape[d]
    return starts, length


def _pieces(
    key: np.ndarray, shape: tuple[int, ...], box: Box, out: np.ndarray, domain: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pieces of `out`, flat, and the words of each."""
    if not out.size:
        return
    k0, k1 = (np.uint64(int(k)) for k in key)
    words_per_entry = 2 if out.itemsize == 8 else 1
    starts, length = runs(shape, box)
    starts, length, flat = starts * np.uint64(words_per_entry), length * words_per_entry, out.reshape(-1)
    compiled = jit.available()
    piece_words = _PIECE if compiled else _PIECE // 2
    rows = max(1, piece_words // length)
    words = np.empty(min(piece_words, length * len(starts)) if length < piece_words else piece_words, np.uint32)
    # The last piece of a long row may be short.
    scratch_blocks = (min(length, _SHORT_ROW) + 6) // 4 * (rows if length < _SHORT_ROW else 1)
    scratch, counters = np.empty(4 * scratch_blocks, np.uint32), np.empty(scratch_blocks, np.uint64)
    position = 0
    for r in range(0, len(starts), rows):
        row_starts = starts[r : r + rows]
        for c in range(0, length, piece_words if rows == 1 else length):
            length_here = min(length - c, piece_words) if rows == 1 else length
            piece = words[: length_here * len(row_starts)].reshape(len(row_starts), length_here)
            if compiled:
                _fill(piece, scratch, counters, row_starts + np.uint64(c), np.uint64(domain), k0, k1)
            else:
                _fill_numpy(piece, row_starts + np.uint64(c), np.uint64(domain), k0, k1)
            n = piece.size // words_per_entry
            yield flat[position : position + n], piece.reshape(-1)
            position += n


def _drawn(key: np.ndarray, shape: tuple[int, ...], box: Box, dtype: Any, convert: Callable[..., None]) -> np.ndarray:
    dtype = np.dtype(dtype)
    wide = accurate(dtype)
    out = pool.empty(extent(box), dtype)
    scratch = np.empty(_PIECE if wide != dtype else 0, wide)
    for into, words in _pieces(key, shape, box, out, 0):
        numbers = into if wide == dtype else scratch[: into.size]
        convert(numbers, words.view(f"u{wide.itemsize}"))
        if numbers is not into:
            into[...] = numbers
    return out


# Words

_u = np.uint64
_LOW, _HALF, _ODD, _TWO, _THREE = _u(0xFFFFFFFF), _u(32), _u(1), _u(2), _u(3)
_M0, _M1, _W0, _W1 = _u(0xD2511F53), _u(0xCD9E8D57), _u(0x9E3779B9), _u(0xBB67AE85)


@jit.exact
def _words(out, counters, use_list, first, domain, k0, k1):
    """The words of the listed counters, or of those from `first` on."""
    for b in range(out.shape[0] // 4):
        counter = counters[b] if use_list else first + _u(b)
        x0, x1, x2, x3 = counter & _LOW, counter >> _HALF, _u(0), domain
        a0, a1 = k0, k1
        for _ in range(10):
            p, q = _M0 * x0, _M1 * x2
            x0, x1, x2, x3 = (q >> _HALF) ^ x1 ^ a0, q & _LOW, (p >> _HALF) ^ x3 ^ a1, p & _LOW
            a0, a1 = (a0 + _W0) & _LOW, (a1 + _W1) & _LOW
        out[4 * b] = x0
        out[4 * b + 1] = x1
        out[4 * b + 2] = x2
        out[4 * b + 3] = x3


_SHORT_ROW = 128


@jit.loops("out", "scratch", "counters", fastmath=())
def _fill(out: Any, scratch: Any, counters: Any, starts: Any, domain: Any, k0: Any, k1: Any) -> None:
    n = out.shape[1]
    if n >= _SHORT_ROW:
        for r in range(out.shape[0]):
            row = out[r]
            block, skip = starts[r] >> _TWO, int(starts[r] & _THREE)
            head = (4 - skip) % 4
            if head:
                _words(scratch[:4], counters, False, block, domain, k0, k1)
                for i in range(head):
                    row[i] = scratch[skip + i]
                block += _ODD
            full_blocks = (n - head) // 4
            end = head + 4 * full_blocks
            _words(row[head:end], counters, False, block, domain, k0, k1)
            if end < n:
                _words(scratch[:4], counters, False, block + _u(full_blocks), domain, k0, k1)
                for i in range(end, n):
                    row[i] = scratch[i - end]
        return
    count = 0
    for r in range(out.shape[0]):
        for block in range(starts[r] >> _TWO, ((starts[r] + _u(n - 1)) >> _TWO) + _ODD):
            counters[count] = block
            count += 1
    _words(scratch[: 4 * count], counters, True, _u(0), domain, k0, k1)
    position = 0
    for r in range(out.shape[0]):
        skip = int(starts[r] & _THREE)
        for i in range(n):
            out[r, i] = scratch[position + skip + i]
        position += (skip + n + 3) // 4 * 4


def _fill_numpy(out: np.ndarray, starts: np.ndarray, domain: np.uint64, k0: np.uint64, k1: np.uint64) -> None:
    """`_fill` without numba."""
    skip = starts & _THREE
    count = (out.shape[1] + 6) // 4
    x0 = (starts >> _TWO)[:, None] + np.arange(count, dtype=np.uint64)
    x1 = x0 >> _HALF
    x0 &= _LOW
    x2, x3 = np.zeros_like(x0), np.full_like(x0, domain)
    p, q = np.empty_like(x0), np.empty_like(x0)
    key0, key1 = int(k0), int(k1)
    for _ in range(10):
        np.multiply(x0, _M0, out=p)
        np.multiply(x2, _M1, out=q)
        for x, product, other, k in ((x0, q, x1, key0), (x2, p, x3, key1)):
            np.right_shift(product, _HALF, out=x)
            x ^= other
            x ^= _u(k)
            np.bitwise_and(product, _LOW, out=other)
        key0, key1 = (key0 + int(_W0)) & 0xFFFFFFFF, (key1 + int(_W1)) & 0xFFFFFFFF
    words = np.empty((*x0.shape, 4), np.uint32)
    for k, x in enumerate((x0, x1, x2, x3)):
        words[..., k] = x
    words = words.reshape(len(starts), -1)
    for s in range(4):
        rows = np.flatnonzero(skip == s) if len(starts) > 1 else slice(None) if skip[0] == s else None
        if rows is not None:
            out[rows] = words[rows, s : s + out.shape[1]]


# Uniform numbers


class _Uniform:
    """Words to uniform numbers of the dtype's precision: scale, shift, and keep below the upper end."""

    def __init__(self, dtype: Any, low: float, high: float):
        dtype = np.dtype(dtype)
        wide = accurate(dtype).type
        digits = {"float64": 53, "float32": 24, "float16": 11}.get(dtype.name, 8)
        self.shift = np.dtype(f"u{wide().itemsize}").type(8 * wide().itemsize - digits)
        self.parameters = wide(2.0**-digits), wide(low), wide(wide(high) - wide(low)), top(dtype, low, high)
        self.is_unit = low == 0 and high == 1

    def __call__(self, out: np.ndarray, bits: np.ndarray) -> None:
        unit, low, span, last = self.parameters
        if jit.available():
            _uniform(out, bits, self.shift, unit, low, span, last)
            return
        np.copyto(out, bits >> self.shift, casting="unsafe")
        out *= unit
        if not self.is_unit:
            out *= span
            out += low
            np.minimum(out, last, out=out)


def top(dtype: Any, low: float, high: float) -> Any:
    """The last number of a dtype before high, seen from low; in the dtype to compute in."""
    dtype = np.dtype(dtype)
    return accurate(dtype).type(np.nextafter(np.asarray(high, dtype), np.asarray(low, dtype)))


@jit.loops("out", fastmath=())
def _uniform(out: Any, bits: Any, shift: Any, unit: Any, low: Any, span: Any, last: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = bits[i] >> shift
        x = low + (unit * out[i]) * span
        out[i] = x if x < last else last


# Words to numbers. x and tail = 1 - x come from all bits but the first, both to full precision.

_f, _d = np.float32, np.float64
_MASK, _UNIT = np.uint32(0x7FFFFFFF), _f(2.0**-32)
_MASK_D, _UNIT_D = _u(0x7FFFFFFFFFFFFFFF), 2.0**-64


def _halves(bits):
    single = bits.dtype == np.uint32
    mask, unit, number = (_MASK, _UNIT, _f) if single else (_MASK_D, _UNIT_D, _d)
    one = bits.dtype.type(1)
    j = bits & mask
    return number((j << one) + one) * unit, number(((mask - j) << one) + one) * unit


def _halves_single(bits):
    j = bits & _MASK
    return _f((j << _ODD) + _ODD) * _UNIT, _f(((_MASK - j) << _ODD) + _ODD) * _UNIT


def _halves_double(bits):
    j = bits & _MASK_D
    return _d((j << _ODD) + _ODD) * _UNIT_D, _d(((_MASK_D - j) << _ODD) + _ODD) * _UNIT_D


jit.by_width(_halves, single=_halves_single, double=_halves_double, fastmath=())


def _is_negative(bits):
    """The first bit."""
    return bits > (_MASK if bits.dtype == np.uint32 else _MASK_D)


jit.by_width(_is_negative, single=lambda bits: bits > _MASK, double=lambda bits: bits > _MASK_D)


def _normal(out: np.ndarray, bits: np.ndarray) -> None:
    if jit.available():
        _normal_loop(out, bits)
        return
    out[...] = quantile(*_halves(bits))
    np.negative(out, out=out, where=_is_negative(bits))


@jit.loops("out", fastmath=())
def _normal_loop(out: Any, bits: Any) -> None:
    for i in range(out.shape[0]):
        x, tail = _halves(bits[i])
        z = quantile(x, tail)
        out[i] = -z if _is_negative(bits[i]) else z


def _exponential(out: np.ndarray, bits: np.ndarray) -> None:
    if jit.available():
        _exponential_loop(out, bits)
        return
    x, rest = _halves(bits)
    out[...] = minus_log(rest, x)


@jit.loops("out", fastmath=())
def _exponential_loop(out: Any, bits: Any) -> None:
    for i in range(out.shape[0]):
        x, rest = _halves(bits[i])
        out[i] = minus_log(rest, x)


def _gumbel(out: np.ndarray, bits: np.ndarray) -> None:
    _exponential(out, bits)
    if jit.available():
        _minus_log_loop(out)
        return
    out[...] = minus_log(out, out.dtype.type(1) - out)


@jit.loops("out", fastmath=())
def _minus_log_loop(out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = minus_log(out[i], out.dtype.type(1) - out[i])


class _Truncated:
    """Words to truncated normal numbers. Where both ends are on one side of 0, the tail is drawn, which is small."""

    def __init__(self, dtype: Any, low: float, high: float):
        wide = accurate(np.dtype(dtype)).type
        self.side, ends = truncated_ends(low, high)
        self.draw = _Uniform(wide, *ends)
        self.least, self.one = wide(2.0**-64 if wide is np.float64 else 2.0**-32), wide(1)
        self.low, self.high = wide(low), wide(high)

    def __call__(self, out: np.ndarray, bits: np.ndarray) -> None:
        self.draw(out, bits)
        if jit.available():
            _truncated_loop(out, out.dtype.type(self.side), self.least, self.low, self.high)
            return
        if self.side:
            tail = np.maximum(out, self.least)
            out[...] = quantile(self.one - tail, tail)
            out *= self.side
        else:
            x = np.abs(out)
            z = quantile(x, np.maximum(self.one - x, self.least))
            np.copysign(z, out, out=out)
        np.clip(out, self.low, self.high, out=out)


@jit.loops("out", fastmath=())
def _truncated_loop(out: Any, side: Any, least: Any, low: Any, high: Any) -> None:
    one = out.dtype.type(1)
    for i in range(out.shape[0]):
        v = out[i]
        size = -v if v < 0 else v
        tail = one - size if side == 0 else v
        tail = tail if tail > least else least
        z = quantile(size if side == 0 else one - tail, tail)
        z = (-z if v < 0 else z) if side == 0 else z * side
        z = z if z > low else low
        out[i] = z if z < high else high


def truncated_ends(low: float, high: float) -> tuple[int, tuple[float, float]]:
    """The side of 0 of both ends, and the range to draw from: of the tail there, else of erf(x / sqrt(2))."""
    a, b = low / math.sqrt(2), high / math.sqrt(2)
    if low >= 0:
        return 1, (math.erfc(b), math.erfc(a))
    if high <= 0:
        return -1, (math.erfc(-a), math.erfc(-b))
    return 0, (math.erf(a), math.erf(b))
