"""Collectives of virtual workers that take turns, from the second call of the same line on.

A verb leaves its contribution and its continuation in a rendezvous. A line that repeats its call with a block of the
same shape needs to leave its block only. Workers that do so meet separately, by the group alone. If a member of the
group comes by a verb, calls something else, or never comes, those that wait fall back to the verbs, which check
everything and raise the errors.
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

_MAKERS_MAX = 64
"""Makers of results that a member keeps: one for each combination of its group's plans."""
_MISSES_MAX = 16
"""After this many consecutive misses, retry only every `_RETRY_INTERVAL` calls."""
_RETRY_INTERVAL = 64

_Makers = Callable[[list[Any]], list[Any]]


class RepeatedPlan:
    """A collective of a group, for blocks of one shape.

    shape: of the own block; shapes: of what goes to each member; large: whether blocks are so large that adjacent parts
    should be joined without a copy. makers: what makes the results, by the members' plans. misses: consecutive
    fallbacks.
    """

    __slots__ = ("call", "group", "large", "makers", "misses", "plan", "shape", "shapes")

    def __init__(self, call: Call, plan: Plan, x: np.ndarray):
        self.call, self.plan, self.group, self.shape = call, plan, plan.group, x.shape
        self.shapes: list[Shape | None] = [None if p is None else part_of(x, p).shape for p in plan.parts]
        self.large = not plan.copy_free and x.nbytes * plan.group.size >= split_work.SPLIT_MIN
        self.misses = 0
        self.makers: dict[tuple[Any, ...], _Makers] = {}

    @staticmethod
    def serves(plan: Plan, x: np.ndarray) -> bool:
        """Whether this pays for such blocks: little is written, or the blocks are small enough for Python's overhead to
        matter."""
        size = plan.group.size
        if not plan.repeats:
            return False
        return plan.copy_free or not nontemporal.large(x.nbytes * size)

    def __call__(self, comm: Participant, x: np.ndarray, general_run: RunPlan) -> tuple[Any, Any]:
        """The new block, and the bound operator. general_run: runs the plan by the verbs."""
        run, group = comm.execution, self.group
        repeated, key = run.repeated, group.key
        if repeated is None or comm.clock >= run.limit or (self.misses >= _MISSES_MAX and self._skips_retry()):
            return general_run(comm, x)
        if self.large and type(x.base) is np.ndarray and x.base.nbytes > x.nbytes:
            return general_run(comm, x)  # Parts of one array may be adjacent: then the verbs need no copy.
        count = comm.counts.get(key, 0)
        if run.open and (key, count) in run.open:
            self.misses += 1
            return general_run(comm, x)  # others have come by the verbs
        if self.plan.forwards_from is not None:
            x.setflags(False)  # pyright: ignore[reportCallIssue]  (as in `read_only`)
        rendezvous = repeated.get(key)
        if rendezvous is None:
            rendezvous = repeated[key] = RepeatedRendezvous(group.size, comm.number, count)
        elif rendezvous.number != comm.number:
            run.fall_back(key)
            return general_run(comm, x)
        place = group.index
        rendezvous.members[place] = self
        rendezvous.blocks[place] = x
        if rendezvous.clock < comm.clock:
            rendezvous.clock = comm.clock
        rendezvous.missing -= 1
        if rendezvous.missing:
            try:
                run.wait(rendezvous, comm)
            except BaseException:  # this worker is no longer there
                if run.repeated and run.repeated.get(key) is rendezvous:
                    run.fall_back(key)
                raise
        elif self._complete(rendezvous, run.size):
            del repeated[key]
            rendezvous.done = True
            run.wake(rendezvous)
        else:
            run.fall_back(key)
        results = rendezvous.blocks
        if results is None:
            self.misses += 1
            return general_run(comm, x)
        self.misses = 0
        comm.clock = rendezvous.clock + 1
        comm.number += 1
        comm.last = self.call
        own, results[place] = results[place], None  # so that this may be the only name of what it takes
        return own

    def _skips_retry(self) -> bool:
        """Whether to use the verbs at once, after many misses: the others have no repeated plan."""
        self.misses += 1
        return self.misses % _RETRY_INTERVAL != 0

    def _holds_for(self, members: tuple[RepeatedPlan, ...]) -> bool:
        """Whether the blocks of these members have the assumed lengths."""
        if self.plan.assumed_lengths is None:
            return True
        d, lengths = self.plan.assumed_lengths
        return all(m.shape[d] == n for m, n in zip(members, lengths, strict=True))

    def _complete(self, rendezvous: RepeatedRendezvous, workers: int) -> bool:
        """Compute the results of all members. False if the verbs must check the calls, or raise an error."""
        members = tuple(rendezvous.members)
        try:
            make = self.makers.get(members)
            if make is None:
                if not all(m.call is self.call or m.call.key == self.call.key for m in members):
                    return False
                if not all(m._holds_for(members) for m in members):
                    return False
                make = _makers(members, workers)
                for m in members:  # any of them may come last next time
                    if len(m.makers) >= _MAKERS_MAX:
                        m.makers.clear()
                    m.makers[members] = make
            rendezvous.blocks = make(rendezvous.blocks)
        except Exception:
            return False
        return True


def _makers(members: tuple[RepeatedPlan, ...], workers: int) -> _Makers:
    """A function from the blocks of all members to their results. workers: the number of all workers."""
    large = any(m.large for m in members)
    make, share = _member_makers(members, large), len(members) / workers
    if not large or members[0].plan.combine.parallel:
        return make
    return lambda blocks: split_work.call_for_all(partial(make, blocks), share)


def _member_makers(members: tuple[RepeatedPlan, ...], large: bool) -> _Makers:
    size, plans = len(members), [m.plan for m in members]
    completions = [plan.complete_repeated([m.shapes[k] for m in members]) for k, plan in enumerate(plans)]
    if plans[0].same:
        first, _, bound = completions[0]

        def one_result(blocks: list[Any]) -> list[Any]:
            return [(first(blocks[0], blocks), bound)] * size

        return one_result
    results_of = None if large else plans[0].combine.together(plans, [m.shape for m in members])
    if results_of is not None:
        bounds = [bound for _, _, bound in completions]
        return lambda blocks: [*zip(results_of(blocks), bounds, strict=True)]
    incoming = [
        [(s, m.plan.parts[k]) for s, m in enumerate(members) if m.plan.parts[k] is not None] for k in range(size)
    ]

    # Per member, the member whose whole block is its result, if there is one: nothing is copied.
    forwarded = [
        f[0] if f and plans[f[0]].parts[k] is ... else None for k, f in enumerate(p.forwards_from for p in plans)
    ]

    def result_of(blocks: list[Any], k: int) -> tuple[Any, Any]:
        (make, _, bound), source = completions[k], forwarded[k]
        if source is not None:
            return blocks[source], bound
        parts: list[Any] = [None] * size
        for s, part in incoming[k]:
            parts[s] = blocks[s] if part is ... else blocks[s][part]
        return make(blocks[k], parts), bound

    def in_order(blocks: list[Any]) -> list[Any]:
        return [result_of(blocks, k) for k in range(size)]

    sizes: list[int] = []  # of the results, once they are known

    def in_parallel(blocks: list[Any]) -> list[Any]:
        if sizes:
            return split_work.call_each([partial(result_of, blocks, k) for k in range(size)], sizes)
        results = in_order(blocks)
        sizes[:] = [y.nbytes for y, _ in results]  # in one assignment: maps of other threads may do this too
        return results

    return in_parallel if large else in_order
