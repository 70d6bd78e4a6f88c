"""Which algorithm a collective uses: by what all members know alike, its kind, their number and hosts, and bytes.

The thresholds were measured by `python -m benchmarks.crossovers`, over TCP between two hosts that shared two Zen cores,
with 4, 8 and 16 processes: there the two ways take the same time within the noise at each threshold or at a factor of
two from it, except that blocks of 1 MB are still broadcast faster by a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "DOUBLING_MAX",
    "INLINE_MAX",
    "SEPARATE_MIN",
    "TREE_MAX",
    "all_gather",
    "all_gather_large",
    "all_reduce",
    "all_to_all",
    "forced",
    "gather",
    "members_per_host",
    "possible",
    "reduce",
    "reduce_scatter",
    "scatter",
]

DOUBLING_MAX = 1 << 17
"""Bytes up to which all members sum whole blocks, in about log2 n rounds."""
INLINE_MAX = 1 << 15
"""Bytes up to which a block goes with what describes it, by way of other members; larger ones then go by themselves."""
TREE_MAX = 1 << 20
"""Bytes up to which whole blocks go down a tree in a broadcast, and up in a reduction to one member."""

SEPARATE_MIN = 1 << 18
"""Of several blocks that are summed at once, those of at least this many bytes go by themselves; the rest is packed."""

_forced: dict[str, str] = {}
"""By kind of collective: the algorithm that tests prescribe."""


def forced(kind: str, algorithm: str | None) -> None:
    """Use this algorithm for a kind of collective wherever it is possible; None: the best one again. For tests."""
    _forced.pop(kind, None)
    if algorithm is not None:
        _forced[kind] = algorithm


def members_per_host(hosts: Sequence[int]) -> int:
    """The number of members on each host, if they stand host by host and the number is the same power of two on all
    hosts; else 1. hosts: those of the members."""
    first = next((k for k, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    together = all(len(set(hosts[k : k + first])) == 1 for k in range(0, len(hosts), first))
    apart = len({hosts[k] for k in range(0, len(hosts), first)}) * first == len(hosts)
    return first if together and apart and first & (first - 1) == 0 else 1


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def possible(algorithm: str, n: int, per_host: int = 1) -> bool:
    """Whether an all-reduce or reduce of n members, `per_host` of them on each host, can use an algorithm."""
    between = algorithm.removeprefix("two levels, ")
    if between != algorithm and not 1 < per_host < n:
        return False
    halves = between in ("halving and doubling", "halving and gather")
    return not halves or _power_of_two(n if between == algorithm else n // per_host)


def all_reduce(n: int, nbytes: int, per_host: int = 1, short: bool = False) -> str:
    """The algorithm of an all-reduce. short: whether partial sums have longer entries than the blocks."""
    prescribed = _forced.get("all_reduce")
    if prescribed is not None and possible(prescribed, n, per_host):
        return prescribed
    if n <= 2 or nbytes <= DOUBLING_MAX:
        return "recursive doubling"
    if short:
        return "pairwise"
    if _power_of_two(n):  # halves are exchanged on each host first, and only sums go between hosts
        return "halving and doubling"
    if 1 < per_host < n:
        return "two levels, " + ("recursive doubling" if nbytes <= DOUBLING_MAX * per_host else "pairwise")
    return "pairwise"


def reduce(n: int, nbytes: int, short: bool = False) -> str:
    """The algorithm of a reduction to one member. short: whether partial sums have longer entries than the blocks."""
    prescribed = _forced.get("reduce")
    if prescribed is not None and possible(prescribed, n):
        return prescribed
    if n <= 2 or nbytes <= TREE_MAX:
        return "binomial tree"
    return "halving and gather" if _power_of_two(n) and not short else "pairwise"


def reduce_scatter(n: int, nbytes: int, short: bool = False) -> str:
    """The algorithm of a reduce-scatter. nbytes: of all parts that a member brings. short: whether partial sums have
    longer entries than the blocks."""
    halving = nbytes <= DOUBLING_MAX or (_power_of_two(n) and not short)
    return _forced.get("reduce_scatter") or ("halving" if halving else "pairwise")


def all_to_all(n: int) -> str:
    """The algorithm by which small parts of an all-to-all go. Their sizes may differ from member to member, so it
    depends on the number of members only."""
    prescribed = _forced.get("all_to_all")
    return prescribed or ("Bruck" if n > 3 else "pairwise")


def all_gather(n: int) -> str:
    """The algorithm by which small blocks of an all-gather go."""
    return _forced.get("all_gather") or "Bruck"


def all_gather_large(n: int, per_host: int = 1) -> str:
    """The algorithm by which large blocks of an all-gather go. Around a ring a block enters each host once, straight to
    all it enters it once for each member there."""
    return _forced.get("all_gather_large") or ("ring" if 1 < per_host < n else "pairwise")


def gather() -> str:
    """The algorithm by which small blocks of a gather go."""
    return _forced.get("gather") or "binomial tree"


def scatter() -> str:
    """The algorithm by which small parts of a scatter go."""
    return _forced.get("scatter") or "binomial tree"
