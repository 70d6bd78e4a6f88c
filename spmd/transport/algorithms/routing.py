"""Movements without arithmetic: all-gather, all-to-all, gather, scatter, broadcast.

Items are named by the member that they come from (all-gather, gather), that they go to (scatter), both (all-to-all), or
by the chunk of the root's block (broadcast).

Sources: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, Efficient algorithms for all-to-all communications in
multiport message-passing systems, 1997; R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication
operations in MPICH, 2005.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from spmd.transport.algorithms.schedule import Round, Schedule, Transfer, others

__all__ = ["Circular", "all_gather", "all_to_all", "broadcast", "exchange", "gather", "scatter"]


class Circular:
    """Consecutive members of a ring of n: `count` of them, from `start` on."""

    __slots__ = ("count", "n", "start")

    def __init__(self, start: int, count: int, n: int):
        self.start, self.count, self.n = start % n, count, n

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return ((self.start + k) % self.n for k in range(self.count))


class _Jumping:
    """The items (source, target) that member `me` of an all-to-all by Bruck's algorithm sends in round j: those that
    have to go 2**j members on, among others."""

    __slots__ = ("j", "me", "n")

    def __init__(self, me: int, j: int, n: int):
        self.me, self.j, self.n = me, j, n

    def _distances(self) -> Iterator[int]:
        bit = 1 << self.j
        return (d for start in range(bit, self.n, 2 * bit) for d in range(start, min(start + bit, self.n)))

    def __len__(self) -> int:
        period = 2 << self.j
        whole, rest = divmod(self.n, period)
        return (whole << self.j) + max(0, rest - (1 << self.j))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        gone = (1 << self.j) - 1
        for d in self._distances():
            source = (self.me - (d & gone)) % self.n
            yield source, (source + d) % self.n


def _steps(n: int) -> int:
    """The rounds in which n members are reached when their number doubles in each."""
    return (n - 1).bit_length()


@lru_cache(maxsize=1024)
def all_gather(algorithm: str, n: int, me: int) -> Schedule:
    """The schedule of an all-gather; item k is the block of member k. algorithm: "Bruck": the blocks that a member has
    double in each round; "ring": each hands on what came last; "pairwise": each sends its block to each other."""
    if algorithm == "Bruck":
        rounds = []
        for j in range(_steps(n)):
            gap = 1 << j
            count = min(gap, n - gap)
            sends = (Transfer((me - gap) % n, Circular(me, count, n)),)
            rounds.append(Round(sends, (Transfer((me + gap) % n, Circular(me + gap, count, n)),)))
    elif algorithm == "ring":
        rounds = [
            Round(
                (Transfer((me + 1) % n, Circular(me - k, 1, n)),),
                (Transfer((me - 1) % n, Circular(me - k - 1, 1, n)),),
            )
            for k in range(n - 1)
        ]
    else:
        to = others(n, me)
        sends = tuple(Transfer(k, (me,)) for k in to)
        rounds = [Round(sends, tuple(Transfer(k, (k,)) for k in to))]
    return Schedule(algorithm, tuple(rounds))


@lru_cache(maxsize=1024)
def all_to_all(algorithm: str, n: int, me: int) -> Schedule:
    """The schedule of an all-to-all; item (k, l) goes from member k to member l. algorithm: "Bruck": in round j the
    items go 2**j members on whose way has that bit; "pairwise": each goes straight to its target."""
    if algorithm == "Bruck":
        rounds = [
            Round(
                (Transfer((me + (1 << j)) % n, _Jumping(me, j, n)),),
                (Transfer((me - (1 << j)) % n, _Jumping((me - (1 << j)) % n, j, n)),),
            )
            for j in range(_steps(n))
        ]
    else:
        to = others(n, me)
        sends = tuple(Transfer(k, ((me, k),)) for k in to)
        rounds = [Round(sends, tuple(Transfer(k, ((k, me),)) for k in to))]
    return Schedule(algorithm, tuple(rounds))


def _subtrees(n: int, me: int, root: int) -> tuple[int | None, list[tuple[int, Circular]], Circular]:
    """The binomial tree from the root: a member's parent, its children with the members of their subtrees, the largest
    first, and the members of its own subtree."""
    at = (me - root) % n
    low = at & -at if at else 1 << _steps(n)
    parent = None if at == 0 else (at - low + root) % n
    children = []
    bit = low >> 1
    while bit:
        child = at + bit
        if child < n:
            children.append(((child + root) % n, Circular(child + root, min(bit, n - child), n)))
        bit >>= 1
    return parent, children, Circular(me, min(low, n - at), n)


@lru_cache(maxsize=1024)
def gather(algorithm: str, n: int, me: int, root: int) -> Schedule:
    """The schedule of a gather to the member `root`; item k is the block of member k. algorithm: "binomial tree", or
    "direct": each sends its block to the root."""
    if algorithm == "direct":
        to = others(n, me)
        receives = tuple(Transfer(k, (k,)) for k in to)
        return Schedule(algorithm, (Round(receives=receives) if me == root else Round((Transfer(root, (me,)),)),))
    parent, children, own = _subtrees(n, me, root)
    rounds = [Round(receives=(Transfer(*child),)) for child in reversed(children)]
    if parent is not None:
        rounds.append(Round((Transfer(parent, own),)))
    return Schedule(algorithm, tuple(rounds))


def _from_parent(parent: int | None, children: list[tuple[int, Any]], own: Any) -> list[Round]:
    """Take items from the parent, and hand them on to the children."""
    rounds = [] if parent is None else [Round(receives=(Transfer(parent, own),))]
    return rounds + ([Round(sends=tuple(Transfer(*child) for child in children))] if children else [])


@lru_cache(maxsize=1024)
def scatter(algorithm: str, n: int, me: int, root: int) -> Schedule:
    """The schedule of a scatter from the member `root`; item k is the part for member k. algorithm: "binomial tree", or
    "direct": the root sends each its part."""
    if algorithm == "direct":
        sends = tuple(Transfer(k, (k,)) for k in others(n, me))
        return Schedule(algorithm, (Round(sends) if me == root else Round(receives=(Transfer(root, (me,)),)),))
    parent, children, own = _subtrees(n, me, root)
    return Schedule(algorithm, tuple(_from_parent(parent, list(children), own)))


@lru_cache(maxsize=1024)
def broadcast(algorithm: str, n: int, me: int, root: int) -> Schedule:
    """The schedule of a broadcast from the member `root`. algorithm: "binomial tree", of one item, 0; "scatter and
    all-gather": item k is the chunk of the root's block that member k is given first, and then sends to the others."""
    parent, children, own = _subtrees(n, me, root)
    if algorithm == "binomial tree":
        whole = [(child, (0,)) for child, _ in children]
        return Schedule(algorithm, tuple(_from_parent(parent, whole, (0,))))
    rounds = _from_parent(parent, list(children), own)
    return Schedule(algorithm, (*rounds, *_ring_after_scatter(n, me, root)), n)


def _ring_after_scatter(n: int, me: int, root: int) -> list[Round]:
    """Each member sends the chunks that it holds on to the next, except those that the next has already. After a
    scatter by a binomial tree a member has the chunks of its whole subtree."""
    own = {k: _subtrees(n, k, root)[2].count for k in (me, (me + 1) % n)}
    at, following = (me - root) % n, (me + 1) % n
    rounds = []
    for k in range(n - 1):
        sent, came = (at - k) % n, (at - 1 - k) % n
        has_sent = (sent - (following - root)) % n < own[following]
        has_came = (came - at) % n < own[me]
        sends = () if has_sent else (Transfer(following, ((sent + root) % n,)),)
        receives = () if has_came else (Transfer((me - 1) % n, ((came + root) % n,)),)
        if sends or receives:
            rounds.append(Round(sends, receives))
    return rounds


def exchange(n: int, me: int, targets: tuple[int, ...], sources: tuple[int, ...]) -> Schedule:
    """The schedule of an exchange: item (k, l) goes from member k straight to member l."""
    sends = tuple(Transfer(k, ((me, k),)) for k in targets if k != me)
    return Schedule("direct", (Round(sends, tuple(Transfer(k, ((k, me),)) for k in sources if k != me)),))
