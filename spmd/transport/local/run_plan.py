"""Collectives of virtual workers that take turns, from the second time on: a line that has called the same before.

A verb leaves in a meeting what it brings and how it goes on. But where a line calls again what it has called, with such
a block, all that is known, and the block is enough. Workers who do meet apart from the others, by the group alone. If
one of the group comes another way, or calls something else, or nobody comes any more, those that wait are turned down,
and go by the verbs as if they had just begun: that is where all is checked, and where errors say what they have to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from spmd.kernels.memory import nontemporal
from spmd.kernels.parallel import split_work
from spmd.transport.call import Call, Shape
from spmd.transport.local.rendezvous import Participant, RepeatedRendezvous
from spmd.transport.plan import Plan, RunPlan, part_of

__all__ = ["RepeatedPlan"]

_KNOWN = 64
"""Ways of making results that a member keeps: one for each combination of what its group called."""

_VAIN = 16
"""Times in a row after which what is tried in vain is only tried now and then, _REST times as seldom."""

_REST = 64

_Makers = Callable[[list[Any]], list[Any]]


class RepeatedPlan:
    """A collective of a group, as often as it is called with blocks of the same shapes.

    shape: of the own block; shapes: of what goes to each member; large: whether it pays to join nothing. known: what
    makes the results, by who meets. vain: how often in a row it was tried in vain.
    """

    __slots__ = ("call", "group", "known", "large", "plan", "shape", "shapes", "vain")

    def __init__(self, call: Call, plan: Plan, x: np.ndarray):
        self.call, self.plan, self.group, self.shape = call, plan, plan.group, x.shape
        self.shapes: list[Shape | None] = [None if p is None else part_of(x, p).shape for p in plan.parts]
        self.large = not plan.copy_free and x.nbytes * plan.group.size >= split_work.SPLIT_MIN
        self.vain = 0
        self.known: dict[tuple[Any, ...], _Makers] = {}

    @staticmethod
    def serves(plan: Plan, x: np.ndarray) -> bool:
        """Whether this is for such blocks: those of which little is written, or not so large that Python's part is
        nothing beside theirs."""
        size = plan.group.size
        if not plan.repeats:
            return False
        return plan.copy_free or not nontemporal.large(x.nbytes * size)

    def __call__(self, comm: Participant, x: np.ndarray, long: RunPlan) -> tuple[Any, Any]:
        """The new block, and the bound operator. long: how it goes by the verbs."""
        run, group = comm.execution, self.group
        repeated, key = run.repeated, group.key
        if repeated is None or comm.clock >= run.limit or (self.vain >= _VAIN and self._rests()):
            return long(comm, x)
        if self.large and type(x.base) is np.ndarray and x.base.nbytes > x.nbytes:
            return long(comm, x)  # Parts of one array may lie side by side: then the verbs give that, without a copy.
        count = comm.counts.get(key, 0)
        if run.open and (key, count) in run.open:
            self.vain += 1
            return long(comm, x)  # Others have come by the verbs.
        if self.plan.forwards_from is not None:
            x.setflags(False)  # pyright: ignore[reportCallIssue]  (as in `read_only`)
        met = repeated.get(key)
        if met is None:
            met = repeated[key] = RepeatedRendezvous(group.size, comm.number, count)
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
            try:
                run.wait(met, comm)
            except BaseException:  # who goes is no longer there to be met
                if run.repeated and run.repeated.get(key) is met:
                    run.turn_down(key)
                raise
        elif self._complete(met, run.size):
            del repeated[key]
            met.done = True
            run.wake(met)
        else:
            run.turn_down(key)
        made = met.blocks
        if made is None:
            self.vain += 1
            return long(comm, x)
        self.vain = 0
        comm.clock = met.clock + 1
        comm.number += 1
        comm.last = self.call
        mine, made[place] = made[place], None  # so that this may be the only name of what it takes
        return mine

    def _rests(self) -> bool:
        """Whether it is not to be tried this time, where it was in vain so often: others have no short way."""
        self.vain += 1
        return self.vain % _REST != 0

    def _supposes(self, members: tuple[RepeatedPlan, ...]) -> bool:
        """Whether these bring what it is supposed that they bring."""
        if self.plan.assumed_lengths is None:
            return True
        d, lengths = self.plan.assumed_lengths
        return all(m.shape[d] == n for m, n in zip(members, lengths, strict=True))

    def _complete(self, met: RepeatedRendezvous, workers: int) -> bool:
        """Make all results of all blocks. False where that is to be found out, or to fail, by the verbs."""
        members = tuple(met.members)
        try:
            make = self.known.get(members)
            if make is None:
                if not all(m.call is self.call or m.call.key == self.call.key for m in members):
                    return False
                if not all(m._supposes(members) for m in members):
                    return False
                make = _makers(members, workers)
                for m in members:  # whoever is the last the next time
                    if len(m.known) >= _KNOWN:
                        m.known.clear()
                    m.known[members] = make
            met.blocks = make(met.blocks)
        except Exception:
            return False
        return True


def _makers(members: tuple[RepeatedPlan, ...], workers: int) -> _Makers:
    """What makes the results of all members, of so many workers, of all their blocks."""
    large = any(m.large for m in members)
    make, share = _made_by(members, large), len(members) / workers
    if not large or members[0].plan.combine.parallel:
        return make
    return lambda blocks: split_work.call_for_all(partial(make, blocks), share)


def _made_by(members: tuple[RepeatedPlan, ...], large: bool) -> _Makers:
    size, plans = len(members), [m.plan for m in members]
    completions = [plan.complete_repeated([m.shapes[k] for m in members]) for k, plan in enumerate(plans)]
    if plans[0].same:
        first, _, bound = completions[0]

        def alike(blocks: list[Any]) -> list[Any]:
            return [(first(blocks[0], blocks), bound)] * size

        return alike
    comes = [[(s, m.plan.parts[k]) for s, m in enumerate(members) if m.plan.parts[k] is not None] for k in range(size)]

    # Whose block is a member's as it is, and all of it: nothing is made.
    forwarded = [
        f[0] if f and plans[f[0]].parts[k] is ... else None for k, f in enumerate(p.forwards_from for p in plans)
    ]

    def one(blocks: list[Any], k: int) -> tuple[Any, Any]:
        (make, _, bound), source = completions[k], forwarded[k]
        if source is not None:
            return blocks[source], bound
        parts: list[Any] = [None] * size
        for s, part in comes[k]:
            parts[s] = blocks[s] if part is ... else blocks[s][part]
        return make(blocks[k], parts), bound

    def each(blocks: list[Any]) -> list[Any]:
        return [one(blocks, k) for k in range(size)]

    sizes: list[int] = []  # of the results, once they are known

    def together(blocks: list[Any]) -> list[Any]:
        if sizes:
            return split_work.call_each([partial(one, blocks, k) for k in range(size)], sizes)
        made = each(blocks)
        sizes[:] = [y.nbytes for y, _ in made]  # at once: maps of other threads may learn them too
        return made

    return together if large else each
