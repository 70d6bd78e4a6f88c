"""The schedules of a collective, as the choice of algorithms has them: what is run is what is counted.

A reduction has one phase. Where blocks may differ in size, small ones (up to INLINE_MAX bytes) go with what describes
them by the first phase; then all know which are large, and these go directly in a second one.
"""

from __future__ import annotations

from spmd.transport.algorithms import choice, reductions, routing
from spmd.transport.algorithms.schedule import Schedule

__all__ = [
    "agreement",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "meet",
    "reduce",
    "reduce_scatter",
    "scatter",
    "shapes",
    "spread",
]


def all_reduce(n: int, me: int, nbytes: int, per_host: int = 1, short: bool = False) -> Schedule:
    """An all-reduce. short: whether partial sums have longer entries than the blocks."""
    name = choice.all_reduce(n, nbytes, per_host, short)
    return reductions.all_reduce(name, n, me, per_host if name.startswith("two") else 1)


def reduce(n: int, me: int, root: int, nbytes: int) -> Schedule:
    """A reduction to the member `root`."""
    return reductions.reduce(choice.reduce(n, nbytes), n, me, root)


def reduce_scatter(n: int, me: int, nbytes: int) -> Schedule:
    """A reduce-scatter. nbytes: of all parts that a member brings."""
    return reductions.reduce_scatter(choice.reduce_scatter(n, nbytes), n, me)


def all_gather(n: int, me: int) -> Schedule:
    """The small blocks of an all-gather."""
    return routing.all_gather(choice.all_gather(n), n, me)


def shapes(n: int, me: int) -> Schedule:
    """The shapes of all members' blocks."""
    return routing.all_gather("Bruck", n, me)


def all_to_all(n: int, me: int) -> Schedule:
    """The small parts of an all-to-all."""
    return routing.all_to_all(choice.all_to_all(n), n, me)


meet = all_to_all
"""The shapes of what goes to each member."""


def broadcast(n: int, me: int, root: int) -> Schedule:
    """A small block of the root's, or the shape of a large one."""
    return routing.broadcast("binomial tree", n, me, root)


def spread(n: int, me: int, root: int) -> Schedule:
    """A large block of the root's, whose shape all know."""
    return routing.broadcast("scatter and all-gather" if n > 3 else "binomial tree", n, me, root)


def gather(n: int, me: int, root: int) -> Schedule:
    """The small blocks of a gather to the member `root`."""
    return routing.gather(choice.gather(), n, me, root)


def scatter(n: int, me: int, root: int) -> Schedule:
    """The small parts of a scatter from the member `root`."""
    return routing.scatter(choice.scatter(), n, me, root)


def agreement(n: int, me: int) -> Schedule:
    """A word of each member, where all have the same most often."""
    return reductions.all_reduce("recursive doubling", n, me)
