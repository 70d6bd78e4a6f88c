"""What each algorithm of a collective costs, as a table: `python -m spmd cost`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from spmd.layout import block_sizes
from spmd.transport.algorithms import choice, cost
from spmd.transport.algorithms.cost import Cost, Sizes

__all__ = ["FUNCTIONS", "Row", "rows"]

FUNCTIONS = {
    **dict.fromkeys(("psum", "pmean", "pmax", "pmin", "sum", "mean", "max", "min"), "all_reduce"),
    "all_gather": "all_gather",
    "psum_scatter": "reduce_scatter",
    **dict.fromkeys(("all_to_all", "pswapaxes"), "all_to_all"),
    **dict.fromkeys(("broadcast", "replicate"), "broadcast"),
    "sum_reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    **dict.fromkeys(("ppermute", "shift", "pshuffle", "sendrecv", "move", "ragged_all_to_all"), "exchange"),
    **dict.fromkeys(("halo_exchange", "halo_accumulate", "stencil", "repartition", "accumulate"), "exchange"),
    **dict.fromkeys(("pvary", "pslice", "keep"), "none"),
}
"""By function: the kind of its collective."""
_TWO_NEIGHBOURS = ("halo_exchange", "halo_accumulate", "stencil")


class Row(NamedTuple):
    """An algorithm. messages, nbytes, rounds: of the member that has most of each. path: the longest chain of messages,
    of which each waits for the one before. chosen: whether transports use it."""

    algorithm: str
    messages: int
    nbytes: int
    rounds: int
    path: int
    chosen: bool


def rows(function: str, n: int, nbytes: int, hosts: int = 1) -> list[Row]:
    """The algorithms of a function's collective among n members, for blocks of so many bytes."""
    kind = FUNCTIONS[function]
    if n == 1 or kind == "none":
        return [Row("nothing moves", 0, 0, 0, 0, True)]
    if kind == "exchange":
        messages = min(n - 1, 2) if function in _TWO_NEIGHBOURS else 1
        return [Row("directly, to each partner", messages, messages * nbytes, 1, messages, True)]
    per_host = choice.members_per_host([k for k, m in enumerate(block_sizes(n, hosts)) for _ in range(m)])
    return [
        Row(name, *_most(member_cost, n), path, chosen)
        for name, member_cost, path, chosen in _algorithms(kind, n, nbytes, per_host)
    ]


def _most(member_cost: Callable[[int], Cost], n: int) -> tuple[int, int, int]:
    costs = [member_cost(k) for k in range(n)]
    return max(c.messages for c in costs), max(c.nbytes for c in costs), max(c.rounds for c in costs)


_Algorithm = tuple[str, Callable[[int], Cost], int, bool]


def _algorithms(kind: str, n: int, nbytes: int, per_host: int) -> Iterator[_Algorithm]:
    if kind == "all_reduce":
        names = ("recursive doubling", "halving and doubling", "pairwise")
        chosen = choice.all_reduce(n, nbytes, per_host)
        for name in (*names, *(f"two levels, {name}" for name in names)):
            if choice.possible(name, n, per_host):
                path = cost.path(kind, name, n, 0, per_host)
                yield name, lambda k, a=name: cost.all_reduce(n, k, nbytes, 1, 1, per_host, a), path, name == chosen
    elif kind == "reduce":
        chosen = choice.reduce(n, nbytes)
        for name in ("binomial tree", "halving and gather", "pairwise"):
            if choice.possible(name, n):
                path = cost.path(kind, name, n)
                yield name, lambda k, a=name: cost.reduce(n, k, 0, nbytes, 1, 1, a), path, name == chosen
    elif kind == "reduce_scatter":
        sizes = block_sizes(nbytes, n)
        for name in ("halving", "pairwise"):
            path, chosen = cost.path(kind, name, n), choice.reduce_scatter(n, nbytes)
            yield name, lambda k, a=name: cost.reduce_scatter(n, k, sizes, 1, 1, a), path, name == chosen
    elif kind == "broadcast":
        tree, small = cost.path(kind, "binomial tree", n), nbytes <= choice.TREE_MAX
        yield "binomial tree", lambda k: cost.broadcast(n, k, 0, nbytes, True), tree, small
        path = tree + (cost.path(kind, "scatter and all-gather", n) if n > 3 else tree)
        name = "scatter and all-gather" if n > 3 else "binomial tree twice"
        yield f"{name}, after the shape", lambda k: cost.broadcast(n, k, 0, nbytes, False), path, not small
    else:
        yield from _movements(kind, n, nbytes, per_host)


def _movements(kind: str, n: int, nbytes: int, per_host: int) -> Iterator[_Algorithm]:
    """Movements of which large blocks go by themselves, after the algorithm has told their shapes."""
    parts = block_sizes(nbytes, n) if kind in ("scatter", "all_to_all") else []
    sizes = Sizes(parts) if parts else Sizes.equal(n, nbytes)
    large = {"all_gather": n - 1, "all_to_all": n - 1, "scatter": n - 1, "gather": 1}[kind] * sizes.any_large
    if kind == "all_gather":
        yield from _all_gathers(n, sizes, per_host)
        return
    member_cost: Callable[[int, str], Cost]
    if kind == "all_to_all":
        names, chosen = ("Bruck", "pairwise"), choice.all_to_all(n)
        member_cost = lambda k, name: cost.all_to_all(n, k, parts, name)
    else:
        names, chosen = ("binomial tree", "direct"), choice.gather() if kind == "gather" else choice.scatter()
        rooted = cost.gather if kind == "gather" else cost.scatter
        member_cost = lambda k, name: rooted(n, k, 0, sizes, name)
    for name in names:
        label = f"{name}, then directly" if large else name
        yield label, lambda k, a=name: member_cost(k, a), cost.path(kind, name, n) + large, name == chosen


def _all_gathers(n: int, sizes: Sizes, per_host: int) -> Iterator[_Algorithm]:
    first, second = choice.all_gather(n), choice.all_gather_large(n, per_host)
    for name in ("Bruck", "ring", "pairwise"):
        path = cost.path("all_gather", name, n)
        if not sizes.any_large:
            yield name, lambda k, a=name: cost.all_gather(n, k, sizes, algorithm=a), path, name == first
            continue
        for large, label in (("ring", "around a ring"), ("pairwise", "directly")):
            both = (name, large)
            member_cost = lambda k, a=both: cost.all_gather(n, k, sizes, per_host, *a)
            yield f"{name}, then {label}", member_cost, path + n - 1, both == (first, second)
