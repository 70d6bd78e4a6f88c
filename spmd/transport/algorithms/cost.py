"""The cost of a collective to one member: messages, bytes of blocks, and rounds, by the algorithm that is chosen.

Bytes of headers, which describe blocks and calls, are not counted. The costs are those of the schedules in `phases.py`,
computed without listing every message: tests compare both. Formulas: R. Thakur, R. Rabenseifner, W. Gropp, Optimization
of collective communication operations in MPICH, 2005; J. Bruck et al., Efficient algorithms for all-to-all
communications in multiport message-passing systems, 1997.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from spmd.layout import block_sizes, offsets
from spmd.transport.algorithms import choice, phases, reductions, routing
from spmd.transport.algorithms.schedule import Schedule, critical_path, messages_of

__all__ = [
    "NOTHING",
    "Cost",
    "Sizes",
    "agreement",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "exchange",
    "gather",
    "path",
    "reduce",
    "reduce_scatter",
    "scatter",
    "shapes",
]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a member sends. messages, nbytes: their number, and the bytes of blocks in them. rounds: how often it sends
    or receives, one after the other."""

    messages: int = 0
    nbytes: int = 0
    rounds: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.messages + other.messages, self.nbytes + other.nbytes, self.rounds + other.rounds)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.messages * times, self.nbytes * times, self.rounds * times)


NOTHING = Cost()


class Sizes:
    """The bytes of the members' blocks, or of the parts for them."""

    __slots__ = ("_around", "_ends", "_small", "each", "n")

    def __init__(self, each: Sequence[int]):
        self.each, self.n = each, len(each)
        self._ends: list[int] | None = None
        self._small: Sizes | None = None
        self._around: tuple[list[bool], int, int] | None = None

    @classmethod
    def equal(cls, n: int, nbytes: int) -> Sizes:
        return cls(_Equal(n, nbytes))

    @property
    def total(self) -> int:
        return self.between(0, self.n)

    @property
    def small(self) -> Sizes:
        """Without those that go directly."""
        if self._small is None:
            few = all(nbytes <= choice.INLINE_MAX for nbytes in self.distinct)
            self._small = self if few else Sizes([0 if s > choice.INLINE_MAX else s for s in self.each])
        return self._small

    @property
    def distinct(self) -> Sequence[int]:
        return (self.each[0],) if isinstance(self.each, _Equal) else self.each

    @property
    def any_large(self) -> bool:
        return self.small is not self

    @property
    def around(self) -> tuple[list[bool], int, int]:
        """Of the ring of members: which have large blocks, how many these are, and between how many neighbours such
        blocks go from one or the other."""
        if self._around is None:
            large = [nbytes > choice.INLINE_MAX for nbytes in self.each]
            self._around = large, sum(large), sum(large[k] or large[k - 1] for k in range(self.n))
        return self._around

    def between(self, start: int, count: int) -> int:
        """The bytes of `count` consecutive members of the ring, from `start` on."""
        if isinstance(self.each, _Equal):
            return count * self.each.nbytes
        if self._ends is None:
            self._ends = [0, *accumulate((*self.each, *self.each))]
        start %= self.n
        return self._ends[start + count] - self._ends[start]


class _Equal(Sequence[int]):
    """The same number n times."""

    def __init__(self, n: int, nbytes: int):
        self.n, self.nbytes = n, nbytes

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k):  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= k < self.n:
            raise IndexError(k)
        return self.nbytes


def _steps(n: int) -> int:
    return (n - 1).bit_length()


def _summed(schedule: Schedule, ends: Sequence[int], itemsize: int, partial: int) -> Cost:
    """A schedule of reductions. ends: the entries before each chunk, and in all. partial: bytes of an entry of a
    partial sum."""
    nbytes = 0
    for step in schedule.rounds:
        entries = sum(ends[items[1]] - ends[items[0]] for _, items in step.sends)
        nbytes += entries * (partial if step.carries == "partial" else itemsize)
    return Cost(messages_of(schedule), nbytes, len(schedule.rounds))


# Reductions.


def all_reduce(
    n: int, me: int, size: int, itemsize: int, partial: int, per_host: int = 1, algorithm: str | None = None
) -> Cost:
    """An all-reduce of blocks of `size` entries. partial: bytes of an entry of a partial sum."""
    if n == 1:
        return NOTHING
    name = algorithm or choice.all_reduce(n, size * itemsize, per_host, partial != itemsize)
    if name == "pairwise":
        own = block_sizes(size, n)[me]
        return Cost(2 * (n - 1), (size - own + own * (n - 1)) * itemsize, 2)
    between = name.removeprefix("two levels, ")
    if between == name:
        schedule = reductions.all_reduce(name, n, me)
        return _summed(schedule, offsets(block_sizes(size, schedule.chunks)), itemsize, partial)
    return _two_levels(n, me, size, itemsize, partial, per_host, between)


def _two_levels(n: int, me: int, size: int, itemsize: int, partial: int, per_host: int, between: str) -> Cost:
    """Of the slice of its block that a member sums on its host, the sum goes between hosts by another algorithm."""
    (host, local), hosts = divmod(me, per_host), n // per_host
    chunks = 1 if between == "recursive doubling" else hosts
    ends = offsets(block_sizes(size, per_host * chunks))[local * chunks : (local + 1) * chunks + 1]
    own = ends[-1] - ends[0]
    inside = Cost(2 * (per_host - 1), (size - own + own * (per_host - 1)) * itemsize, 2)
    if between == "pairwise":
        chunk = ends[host + 1] - ends[host]
        return inside + Cost(2 * (hosts - 1), (own - chunk) * partial + chunk * (hosts - 1) * itemsize, 2)
    return inside + _summed(_as_partial(reductions.all_reduce(between, hosts, host)), ends, itemsize, partial)


@lru_cache(maxsize=1024)
def _as_partial(schedule: Schedule) -> Schedule:
    """The schedule where what goes is a partial sum already."""
    rounds = (s if s.carries == "total" else s._replace(carries="partial") for s in schedule.rounds)
    return schedule._replace(rounds=tuple(rounds))


def reduce(n: int, me: int, root: int, size: int, itemsize: int, partial: int, algorithm: str | None = None) -> Cost:
    """A reduction of blocks of `size` entries to the member `root`."""
    if n == 1:
        return NOTHING
    name = algorithm or choice.reduce(n, size * itemsize, partial != itemsize)
    if name != "pairwise":
        schedule = reductions.reduce(name, n, me, root)
        return _summed(schedule, offsets(block_sizes(size, schedule.chunks)), itemsize, partial)
    own = block_sizes(size, n)[me]
    return Cost(n - 1, (size - own) * itemsize, 2) + (NOTHING if me == root else Cost(1, own * itemsize))


def reduce_scatter(
    n: int, me: int, sizes: Sequence[int], itemsize: int, partial: int, algorithm: str | None = None
) -> Cost:
    """A reduce-scatter. sizes: the entries of the part for each member."""
    if n == 1:
        return NOTHING
    size = sum(sizes)
    name = algorithm or choice.reduce_scatter(n, size * itemsize, partial != itemsize)
    if name == "pairwise":
        return Cost(n - 1, (size - sizes[me]) * itemsize, 1)
    ends = offsets([sizes[k] for k in reductions.packed_order(n)])
    return _summed(reductions.reduce_scatter(name, n, me), ends, itemsize, partial)


# Movements. Small blocks go as the algorithm says, large ones directly to whom they are for.


def _direct(large: bool, messages: int, nbytes: int, sends: bool) -> Cost:
    """The phase of large blocks. large: whether this member takes part in it; sends: whether it sends."""
    return Cost(messages, nbytes, 1) if sends else Cost(rounds=int(large))


def all_gather(
    n: int, me: int, sizes: Sizes, per_host: int = 1, algorithm: str | None = None, large: str | None = None
) -> Cost:
    """An all-gather of the members' blocks. algorithm: for small blocks; large: for the others."""
    if n == 1:
        return NOTHING
    name, small = algorithm or choice.all_gather(n), sizes.small
    if name == "Bruck":
        counts = [min(1 << j, n - (1 << j)) for j in range(_steps(n))]
        first = Cost(len(counts), sum(small.between(me, count) for count in counts), len(counts))
    elif name == "ring":
        first = Cost(n - 1, small.between(me + 2, n - 1), n - 1)
    else:
        first = Cost(n - 1, (n - 1) * small.each[me], 1)
    if not sizes.any_large:
        return first
    return first + _all_gather_large(n, me, sizes, large or choice.all_gather_large(n, per_host))


def _all_gather_large(n: int, me: int, sizes: Sizes, name: str) -> Cost:
    own, following = sizes.each[me], (me + 1) % n
    if name != "ring":
        return _direct(True, n - 1, (n - 1) * own, own > choice.INLINE_MAX)
    large, count, pairs = sizes.around
    nbytes = sizes.between(me + 2, n - 1) - sizes.small.between(me + 2, n - 1)
    return Cost(count - large[following], nbytes, pairs - (large[me] or large[following]))


def shapes(n: int, me: int) -> Cost:
    """An exchange of the shapes of all blocks: no bytes of blocks."""
    return all_gather(n, me, Sizes.equal(n, 0), algorithm="Bruck")


def all_to_all(n: int, me: int, parts: Sequence[int], algorithm: str | None = None, comes_large: bool = False) -> Cost:
    """An all-to-all. parts: the bytes of this member's parts. The parts of others that it passes on are counted as
    large as its own that go as far. comes_large: whether a large part comes."""
    if n == 1:
        return NOTHING
    others = [parts[(me + d) % n] for d in range(1, n)]
    large = [nbytes for nbytes in others if nbytes > choice.INLINE_MAX]
    if (algorithm or choice.all_to_all(n)) == "Bruck":
        passed = sum(s * d.bit_count() for d, s in enumerate(others, 1) if s <= choice.INLINE_MAX)
        first = Cost(_steps(n), passed, _steps(n))
    else:
        first = Cost(n - 1, sum(others) - sum(large), 1)
    return first + _direct(comes_large, len(large), sum(large), bool(large))


def _below(n: int, me: int, root: int) -> tuple[int, int, int]:
    """Of the binomial tree from the root: how far a member is from the root, the members of its own subtree, and the
    number of its children."""
    at = (me - root) % n
    low = at & -at if at else 1 << _steps(n)
    own = min(low, n - at)
    return at, own, _steps(own)


def broadcast(n: int, me: int, root: int, nbytes: int, whole: bool | None = None) -> Cost:
    """A broadcast of the root's block: down a tree; a large one as chunks, that then go around. whole: whether it goes
    whole, if that is prescribed."""
    if n == 1:
        return NOTHING
    at, own, children = _below(n, me, root)
    rounds = (at > 0) + (children > 0)
    if nbytes <= choice.TREE_MAX if whole is None else whole:
        return Cost(children, children * nbytes, rounds)
    if n <= 3:
        return Cost(2 * children, children * nbytes, 2 * rounds)
    chunks = Sizes(block_sizes(nbytes, n))
    following = (at + 1) % n
    held = _below(n, following, 0)[1]  # the chunks that the next member has already, after the scatter
    scattered = Cost(children, chunks.between(at + 1, own - 1), rounds)
    around = Cost(n - held, nbytes - chunks.between(following, held), n - min(own, held))
    return Cost(children, 0, rounds) + scattered + around


def gather(n: int, me: int, root: int, sizes: Sizes, algorithm: str | None = None) -> Cost:
    """A gather of the members' blocks at the root."""
    if n == 1:
        return NOTHING
    _, own, children = _below(n, me, root)
    small, nbytes, at_root = sizes.small, sizes.each[me], me == root
    if (algorithm or choice.gather()) == "direct":
        first = Cost(rounds=1) if at_root else Cost(1, small.each[me], 1)
    else:
        first = Cost(rounds=children) + (NOTHING if at_root else Cost(1, small.between(me, own), 1))
    return first + _direct(at_root and sizes.any_large, 1, nbytes, not at_root and nbytes > choice.INLINE_MAX)


def scatter(n: int, me: int, root: int, sizes: Sizes, algorithm: str | None = None) -> Cost:
    """A scatter of the root's parts."""
    if n == 1:
        return NOTHING
    _, own, children = _below(n, me, root)
    small, at_root = sizes.small, me == root
    if (algorithm or choice.scatter()) == "direct":
        first = Cost(n - 1, small.between(me + 1, n - 1), 1) if at_root else Cost(rounds=1)
    else:
        first = Cost(children, small.between(me + 1, own - 1), (not at_root) + (children > 0))
    large = [s for k, s in enumerate(sizes.each) if k != me and s > choice.INLINE_MAX] if at_root else []
    return first + _direct(sizes.each[me] > choice.INLINE_MAX and not at_root, len(large), sum(large), bool(large))


def exchange(sends: Sequence[int], receives: bool = True) -> Cost:
    """An exchange. sends: the bytes of what goes to each other member that gets something."""
    return Cost(len(sends), sum(sends), int(bool(sends) or receives))


def agreement(n: int, me: int) -> Cost:
    """Agreement on a word: a reduction without blocks."""
    schedule = phases.agreement(n, me)
    return Cost(messages_of(schedule), 0, len(schedule.rounds))


# The critical path.


def _pairing(n: int) -> int:
    """Rounds of recursive doubling: log2 n; where n is no power of two, two more, in which pairs act as one."""
    return n.bit_length() - 1 + 2 * (n & (n - 1) > 0)


_PATHS: dict[tuple[str, str], Callable[[int], int]] = {
    ("all_reduce", "recursive doubling"): _pairing,
    ("all_reduce", "halving and doubling"): lambda n: 2 * _steps(n),
    ("all_reduce", "pairwise"): lambda n: 2 * (n - 1),
    ("reduce_scatter", "halving"): _pairing,
    ("all_gather", "Bruck"): _steps,
    ("all_to_all", "Bruck"): _steps,
    ("reduce", "pairwise"): lambda n: n,
    ("reduce", "halving and gather"): lambda n: _steps(n) + 1,
    ("reduce_scatter", "pairwise"): lambda n: n - 1,
    ("all_gather", "ring"): lambda n: n - 1,
    ("all_gather", "pairwise"): lambda n: n - 1,
    ("all_to_all", "pairwise"): lambda n: n - 1,
    ("broadcast", "scatter and all-gather"): lambda n: n - 1 + _steps(n),
    ("gather", "direct"): lambda n: 1,
    ("scatter", "direct"): lambda n: n - 1,
}
"""Formulas, in the number of members. Trees are measured: each member sends one message at a time."""


@lru_cache(maxsize=1024)
def path(kind: str, algorithm: str, n: int, root: int = 0, per_host: int = 1) -> int:
    """The longest chain of messages of an algorithm, of which each waits for the one before: see `critical_path`."""
    if n == 1:
        return 0
    if algorithm.startswith("two levels, "):
        between = algorithm.removeprefix("two levels, ")
        return 2 * (per_host - 1) + path(kind, between, n // per_host)
    if (kind, algorithm) in _PATHS:
        return _PATHS[kind, algorithm](n)
    tree = reductions.reduce if kind == "reduce" else getattr(routing, kind)
    return critical_path([tree(algorithm, n, me, root) for me in range(n)])
