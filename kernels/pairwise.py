"""The order of sums over members: pairwise summation, which every engine and transport follows.

n blocks are added along a binary tree. With 2^k the largest power of two up to n, and r = n - 2^k: the first 2r blocks
are added in adjacent pairs, (b0 + b1), (b2 + b3), ...; with the other blocks these are 2^k partial sums. Then adjacent
partial sums are added, again and again, until one is left:

    n = 3    (b0 + b1) + b2
    n = 5    ((b0 + b1) + b2) + (b3 + b4)
    n = 6    ((b0 + b1) + (b2 + b3)) + (b4 + b5)
    n = 7    ((b0 + b1) + (b2 + b3)) + ((b4 + b5) + b6)

Rounding errors grow with log n, not with n. Recursive doubling, where surplus members send their blocks first, has the
same tree. Maxima and minima follow it too: the order decides between 0 and -0, and between NaNs.

Sources: Higham, The accuracy of floating point summation, 1993; Thakur, Rabenseifner and Gropp, Optimization of
collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["first_half", "pairs"]


@lru_cache(maxsize=1024)
def first_half(n: int) -> int:
    """How many of n > 1 blocks the left half of the tree adds. It adds them, and the right half the others, in the
    order for so many blocks."""
    half = 1 << n.bit_length() - 2
    return half + min(half, n - 2 * half)


@lru_cache(maxsize=1024)
def pairs(n: int) -> tuple[tuple[int, int], ...]:
    """The additions for n blocks. (i, j), with i < j: add the sum at j to the sum at i, as sum_i + sum_j.

    At first the sum at k is block k; at last the sum at 0 is the result. A pair comes after those that it needs, and
    depth first, so that few partial sums exist at a time. Pairs of disjoint blocks are independent. To a member only
    those pairs matter that contain it: it receives in those where it is i, then sends in the one where it is j.
    """
    if n < 2:
        return ()
    left = first_half(n)
    right = tuple((left + i, left + j) for i, j in pairs(n - left))
    return (*pairs(left), *right, (0, left))
