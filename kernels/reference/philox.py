"""Counter-based random numbers: entry i of an array depends on the key and i alone, so any box can be made alone.

Philox4x32-10 turns a counter of four words of 32 bits and a key of two into four random words: J. K. Salmon,
M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Word k of the stream of a
key is word k mod 4 of the counter k div 4. Entry i takes word i; where the dtype has 8 bytes, words 2i and 2i + 1.

key: two words, uint32. shape: of the whole array. box: (start, stop) in each dimension; its entries are made.
i counts the entries of the whole array, last dimension fastest.
"""

from __future__ import annotations

from math import erf, erfc, sqrt
from statistics import NormalDist

import numpy as np


def philox4x32(counter, key):
    """Four random words for each counter, (..., 4): ten rounds of multiplications that exchange their halves."""
    x0, x1, x2, x3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    k0, k1 = (int(k) for k in key)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p, q = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = q >> half ^ x1 ^ np.uint64(k0), q & low, p >> half ^ x3 ^ np.uint64(k1), p & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([x0, x1, x2, x3], -1).astype(np.uint32)


def random_bits(key, shape, box, dtype, domain=0):
    """Random integers of all values of a dtype, uint32 or uint64. domain: which of 2^32 streams of the key."""
    index = np.zeros([stop - start for start, stop in box], np.uint64)
    for d, (start, stop) in enumerate(box):
        indices = np.arange(start, stop, dtype=np.uint64).reshape([-1] + [1] * (len(box) - d - 1))
        index = index * np.uint64(shape[d]) + indices
    words = [index] if np.dtype(dtype).itemsize < 8 else [index * np.uint64(2), index * np.uint64(2) + np.uint64(1)]
    drawn = [_word(key, k, domain) for k in words]
    return drawn[0] if len(drawn) == 1 else drawn[0] | drawn[1].astype(np.uint64) << np.uint64(32)


def _word(key, k, domain):
    block = k >> np.uint64(2)
    zero = np.zeros_like(block)
    counter = [block & np.uint64(0xFFFFFFFF), block >> np.uint64(32), zero, zero + np.uint64(domain)]
    block_words = philox4x32(np.stack(counter, -1), key)
    return np.take_along_axis(block_words, (k & np.uint64(3)).astype(np.int64)[..., None], -1)[..., 0]


def _halves(bits, count):
    """Numbers u and 1 - u between 0 and 1, both to full relative precision, of the last `count` random bits."""
    j = bits & bits.dtype.type(2**count - 1)
    k = bits.dtype.type(2**count - 1) - j
    return tuple(np.ldexp((2 * i.astype(np.uint64) + 1).astype(float), -count - 1) for i in (j, k))


def random_uniform(key, shape, box, dtype, low, high):
    """Numbers from low up to, but without, high: low + (high - low) k / 2^p, of p random bits, as many as the dtype
    holds: 24 in float32, 53 in float64, 11 in float16, 8 in bfloat16."""
    bits = random_bits(key, shape, box, dtype)
    p = {"float64": 53, "float32": 24, "float16": 11}.get(np.dtype(dtype).name, 8)
    u = np.ldexp((bits >> bits.dtype.type(8 * bits.itemsize - p)).astype(float), -p)
    return np.minimum(low + u * (high - low), float(np.nextafter(np.asarray(high, dtype), np.asarray(low, dtype))))


def random_normal(key, shape, box, dtype):
    """Numbers of the normal distribution: its quantiles at random bits, the first of which is the sign."""
    bits = random_bits(key, shape, box, dtype)
    count = 8 * bits.itemsize - 1
    _, tail = _halves(bits, count)
    return np.where(bits >> bits.dtype.type(count), -1, 1) * _quantile(tail)


def random_truncated(key, shape, box, dtype, low, high):
    """Numbers of the normal distribution, truncated to low and high."""
    wide = np.float64 if np.dtype(dtype).itemsize == 8 else np.float32
    if low >= 0 or high <= 0:  # both on one side of 0: draw the tail, which is small
        near, far = sorted((abs(low), abs(high)))
        tail = random_uniform(key, shape, box, wide, erfc(far / sqrt(2)), erfc(near / sqrt(2)))
        x = _quantile(np.maximum(tail, _least(dtype))) * (1 if low >= 0 else -1)
    else:
        x = random_uniform(key, shape, box, wide, erf(low / sqrt(2)), erf(high / sqrt(2)))
        x = np.sign(x) * _quantile(np.maximum(1 - np.abs(x), _least(dtype)))
    return np.clip(x, low, high)


def _least(dtype):
    """The smallest tail that is drawn."""
    return 2.0**-64 if np.dtype(dtype).itemsize == 8 else 2.0**-32


def _quantile(tail):
    """The x that a normal number exceeds in absolute value with this probability."""
    return -np.vectorize(NormalDist().inv_cdf, otypes=[float])(tail / 2)


def random_exponential(key, shape, box, dtype):
    """Numbers of the exponential distribution, of mean 1: -log(1 - u)."""
    bits = random_bits(key, shape, box, dtype)
    u, rest = _halves(bits, 8 * bits.itemsize - 1)
    return np.where(u < 0.5, -np.log1p(-u), -np.log(rest))


def random_gumbel(key, shape, box, dtype):
    """Numbers of the Gumbel distribution: -log of exponential ones."""
    return -np.log(random_exponential(key, shape, box, dtype))
