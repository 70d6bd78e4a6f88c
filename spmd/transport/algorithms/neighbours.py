"""The lengths of near blocks: members learn them from their neighbours hop by hop, as far as they need them.

In hop 1 two neighbours tell each other the lengths of their blocks, in hop h what they have learnt in hop h - 1 from
their other sides. Member p needs the length of block q on its left if the blocks between them are together shorter than
the reach. So in hop h member i tells i + 1 the length of block i - h + 1 exactly if

    length[i - h + 2] + ... + length[i] < reach.

- Both decide alike. The lengths in the sum are those that i has told i + 1 in hops 1 ... h - 1: both know them.
- Member i knows what it is to tell. For h > 1 it has learnt that length in hop h - 1 from member i - 1, for which the
  sum does not include length[i], so it was not greater.
- Who needs a length learns it. Where p needs that of q, the sum of all between is less than the reach, so are its
  parts, and the length goes from q to p by all members between them.

The same holds in the other direction, by itself. At an end of the line there is nobody to tell or to hear; in a ring
each direction ends when a length has gone to all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Near", "NearLengths"]


class Near(NamedTuple):
    """Which lengths of other blocks along a line a member needs.

    dim: the dimension. reach: the length of a block matters if those between are together shorter. ring: whether the
    first block follows the last. far: stands for the lengths that do not matter.
    """

    dim: int
    reach: int
    ring: bool
    far: int


class _Side:
    """The members on one side of this one.

    peer: the next of them. count: how many there are. lengths: those learnt, the nearest first; total: their sum.
    """

    __slots__ = ("count", "lengths", "peer", "total")

    def __init__(self, peer: int, count: int):
        self.peer, self.count = peer, count
        self.lengths: list[int] = []
        self.total = 0


class NearLengths:
    """What one member of a line learns. Each hop: `sends`, then `take` what comes from `sources`, until both are empty.

    n: the number of members; me: this one's place; own: the length of its block.
    """

    __slots__ = ("_hop", "_me", "_n", "_near", "_own", "_sides")

    def __init__(self, n: int, me: int, own: int, near: Near):
        self._n, self._me, self._own, self._near = n, me, own, near
        self._hop = 1
        around = near.ring and n > 2  # of two members each is the other's only neighbour
        before, after = (n - 1, n - 1) if around else (me, n - 1 - me)
        self._sides = _Side((me - 1) % n, before), _Side((me + 1) % n, after)

    @property
    def sends(self) -> dict[int, int]:
        """The lengths to tell in this hop, by member."""
        told, hop = {}, self._hop
        for side, other in (self._sides, self._sides[::-1]):
            # What it tells on one side: its own length, then what it has learnt on the other side.
            most = min(other.count + 1, self._n - 1) if side.count else 0
            between = 0 if hop == 1 else self._own + sum(other.lengths[: hop - 2])
            if hop <= most and between < self._near.reach:
                told[side.peer] = self._own if hop == 1 else other.lengths[hop - 2]
        return told

    @property
    def sources(self) -> tuple[int, ...]:
        """The members that tell a length in this hop."""
        return tuple(s.peer for s in self._sides if self._hop <= s.count and s.total < self._near.reach)

    def take(self, told: Mapping[int, int]) -> None:
        """Take what the sources have told, by member."""
        for side in self._sides:
            if side.count and side.peer in told:
                side.lengths.append(told[side.peer])
                side.total += told[side.peer]
        self._hop += 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of all blocks, as far as they matter."""
        lengths = [self._near.far] * self._n
        lengths[self._me] = self._own
        for side, step in zip(self._sides, (-1, 1), strict=True):
            for k, length in enumerate(side.lengths, 1):
                lengths[(self._me + step * k) % self._n] = length
        return tuple(lengths)
