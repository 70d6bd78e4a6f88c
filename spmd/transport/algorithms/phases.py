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
    "all_gather_large",
    "all_reduce",
    "all_to_all",
    "all_to_all_large",
    "broadcast",
    "gather",
    "gather_large",
    "meet",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_large",
    "shapes",
    "spread",
]


def all_reduce(n: int, me: int, nbytes: int, per_host: int = 1, short: bool = False) -> Schedule:
    """An all-reduce. short: whether partial sums have longer entries than the blocks."""
    name = choice.all_reduce(n, nbytes, per_host, short)
    return reductions.all_reduce(name, n, me, per_host if name.startswith("two") else 1)


def reduce(n: int, me: int, root: int, nbytes: int, short: bool = False) -> Schedule:
    """A reduction to the member `root`."""
    return reductions.reduce(choice.reduce(n, nbytes, short), n, me, root)


def reduce_scatter(n: int, me: int, nbytes: int, short: bool = False) -> Schedule:
    """A reduce-scatter. nbytes: of all parts that a member brings."""
    return reductions.reduce_scatter(choice.reduce_scatter(n, nbytes, short), n, me)


def all_gather(n: int, me: int) -> Schedule:
    """The small blocks of an all-gather."""
    return routing.all_gather(choice.all_gather(n), n, me)


def all_gather_large(n: int, me: int, per_host: int = 1) -> Schedule:
    """The large blocks of an all-gather, whose shapes all know."""
    return routing.all_gather(choice.all_gather_large(n, per_host), n, me)


def shapes(n: int, me: int) -> Schedule:
    """The shapes of all members' blocks."""
    return routing.all_gather("Bruck", n, me)


def all_to_all(n: int, me: int) -> Schedule:
    """The small parts of an all-to-all."""
    return routing.all_to_all(choice.all_to_all(n), n, me)


def all_to_all_large(n: int, me: int) -> Schedule:
    """The large parts of an all-to-all, whose shapes their receivers know."""
    return routing.all_to_all("pairwise", n, me)


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


def gather_large(n: int, me: int, root: int) -> Schedule:
    """The large blocks of a gather, whose shapes the root knows."""
    return routing.gather("direct", n, me, root)


def scatter(n: int, me: int, root: int) -> Schedule:
    """The small parts of a scatter from the member `root`."""
    return routing.scatter(choice.scatter(), n, me, root)


def scatter_large(n: int, me: int, root: int) -> Schedule:
    """The large parts of a scatter, whose shapes their receivers know."""
    return routing.scatter("direct", n, me, root)


def agreement(n: int, me: int) -> Schedule:
    """A word of each member, where all have the same most often."""
    return reductions.all_reduce("recursive doubling", n, me)
