"""Collectives of virtual workers that take turns, from the second time on: a line that has called the same before.

A verb leaves in a meeting what it brings and how it goes on. But where a line calls again what it has called, with such
a block, all that is known, and the block is enough. Workers who do meet apart from the others, by the group alone. If
one of the group comes another way, or calls something else, or nobody comes any more, those that wait are turned down,
and go by the verbs as if they had just begun: that is where all is checked, and where errors say what they have to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.kernels import team
from spmd.transport.base import Call, Eager, Shape, Way, sealed

if TYPE_CHECKING:
    from spmd.transport.local import LocalComm

__all__ = ["Gathering", "Recurring"]

_KNOWN = 64
"""Ways of making results that a member keeps: one for each combination of what its group called."""

_Makers = Callable[[list[Any]], list[Any]]


class Gathering:
    """Those of a group who call again what they have called: who has come, with what, and what came of it.

    number, clock: the collectives behind them, as in a meeting. done: there is nothing to wait for. blocks: those that
    they bring, then their results; None if they are turned down.
    """

    __slots__ = ("blocks", "clock", "done", "members", "missing", "number", "waiters")

    def __init__(self, size: int, number: int):
        self.members: list[Any] = [None] * size
        self.blocks: Any = [None] * size
        self.missing = size
        self.number = number
        self.clock = 0
        self.done = False
        self.waiters: list[Any] = []


class Recurring:
    """A collective of a group, as often as it is called with blocks of the same shapes.

    meetings: as many as it counts for, which are those that it takes by the verbs.
    """

    __slots__ = ("call", "group", "known", "meetings", "shape", "shapes", "way")

    def __init__(self, call: Call, way: Eager, x: np.ndarray):
        self.call, self.way, self.group, self.shape = call, way, way.group, x.shape
        self.shapes: list[Shape | None] = [None if piece is None else x[piece].shape for piece in way.parts]
        self.meetings = 1 if way.supposed is None else 2
        self.known: dict[tuple[Any, ...], _Makers] = {}

    @staticmethod
    def serves(way: Eager, x: np.ndarray) -> bool:
        """Whether this is for such blocks: those that are only handed over, or so small that one core makes all."""
        return way.group.size > 1 and (way.taken is not None or x.nbytes * way.group.size < team.LEAST)

    def __call__(self, comm: LocalComm, x: np.ndarray, long: Way) -> tuple[Any, Any]:
        """The new block, and the bound operator. long: how it goes by the verbs."""
        run, group = comm.run, self.group
        gatherings, key = run.gatherings, group.key
        if gatherings is None or comm.clock >= run.limit:
            return long(comm, x)
        if run.open and (key, comm.counts.get(key, 0)) in run.open:
            return long(comm, x)  # Others have come by the verbs.
        sealed(x)
        met = gatherings.get(key)
        if met is None:
            met = gatherings[key] = Gathering(group.size, comm.number)
        elif met.number != comm.number:
            run.turn_down(key)
            return long(comm, x)
        place = group.index
        met.members[place] = self
        met.blocks[place] = x
        if met.clock < comm.clock:
            met.clock = comm.clock
        met.missing -= 1
        if met.missing:
            run.wait(met, comm)
        elif self._complete(met):
            del gatherings[key]
            met.done = True
            run.wake(met)
        else:
            run.turn_down(key)
        made = met.blocks
        if made is None:
            return long(comm, x)
        comm.clock = met.clock + self.meetings
        comm.number += self.meetings
        comm.last = self.call
        mine, made[place] = made[place], None  # so that this may be the only name of what it takes
        return mine

    def _supposes(self, members: tuple[Recurring, ...]) -> bool:
        """Whether these bring what it is supposed that they bring."""
        if self.way.supposed is None:
            return True
        d, lengths = self.way.supposed
        return all(m.shape[d] == n for m, n in zip(members, lengths, strict=True))

    def _complete(self, met: Gathering) -> bool:
        """Make all results of all blocks. False where that is to be found out, or to fail, by the verbs."""
        members = tuple(met.members)
        try:
            make = self.known.get(members)
            if make is None:
                if not all(m.call is self.call or m.call.key == self.call.key for m in members):
                    return False
                if not all(m._supposes(members) for m in members):
                    return False
                if len(self.known) >= _KNOWN:
                    self.known.clear()
                make = self.known[members] = _makers(members)
            met.blocks = make(met.blocks)
        except Exception:
            return False
        return True


def _makers(members: tuple[Recurring, ...]) -> _Makers:
    """What makes the results of all members of all their blocks."""
    size = len(members)
    ways = [m.way for m in members]
    makers = [way.maker(tuple(m.shapes[k] for m in members)) for k, way in enumerate(ways)]
    if ways[0].same:
        (first, bound), *_ = makers

        def alike(blocks: list[Any]) -> list[Any]:
            return [(first(blocks[0], blocks), bound)] * size

        return alike
    comes = [[(s, m.way.parts[k]) for s, m in enumerate(members)] for k in range(size)]

    def each(blocks: list[Any]) -> list[Any]:
        made = []
        for k, way in enumerate(ways):
            make, bound = makers[k]
            if way.taken:
                made.append((blocks[way.taken[0]], bound))
            else:
                parts = [None if p is None else blocks[s] if p is ... else blocks[s][p] for s, p in comes[k]]
                made.append((make(blocks[k], parts), bound))
        return made

    return each
