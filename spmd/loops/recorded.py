"""`scan` in functions that `spmd.jit` records: a step is recorded once, forward and back, and becomes one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff.loops.schedules import Policy
from spmd.autodiff.loops.taped import Arrived, Cotangents, StepTape
from spmd.autodiff.staging.recorder import slot_of
from spmd.autodiff.staging.steps import BackLoop, BackStep, Loop, Unrollable
from spmd.autodiff.tape import Node, Tape, redirected
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import lower, on, unstated
from spmd.autodiff.transforms import joint
from spmd.frontends import frontend
from spmd.loops.recording import RecordedSteps, Recording, adopted, current, serves
from spmd.loops.steps import Step
from spmd.mesh import WORKER

__all__ = ["recorded", "stacked", "unrolled"]


def recorded(
    rec: Recording, step: Step, carry: list[Any], slices: list[Any], order: range, policy: Policy | None
) -> tuple[list[Any], list[Any]] | None:
    """The last carry, and the stacked ys, by a step that is recorded once. None where that cannot be: several
    differentiations at once, or a step that writes into arrays from outside of it."""
    try:
        return _RecordedLoop(rec, step, slices, order, None if policy is None else policy(len(order))).run(carry)
    except Unrollable:
        return None
    except _Number:
        return _first_apart(rec, step, carry, slices, order, policy)


class _Number(Exception):
    """The first step takes a number of Python's that is no array of the dtype of the further ones, nor their number."""


def _first_apart(
    rec: Recording, step: Step, carry: list[Any], slices: list[Any], order: range, policy: Policy | None
) -> tuple[list[Any], list[Any]] | None:
    """`recorded`, with the first step by itself."""
    carry, first = step(carry, [x[order[0]] for x in slices])
    rows = [stacked([y]) for y in first]
    if len(order) == 1:
        return carry, rows
    onwards = order.step > 0
    rest = range(len(order) - 1) if onwards else range(len(order) - 2, -1, -1)
    found = recorded(rec, step, carry, [x[1:] if onwards else x[:-1] for x in slices], rest, policy)
    if found is None:
        return None
    pairs = [(row, ys) if onwards else (ys, row) for row, ys in zip(rows, found[1], strict=True)]
    return found[0], [np.concatenate(pair) for pair in pairs]


class _RecordedLoop(RecordedSteps):
    """A loop whose step is recorded once, on at most one tape.

    step_tape: the step on its tape. traced: the positions of the leaves of carry and slices that are on the tape.
    below: the first carry and the slices below the tape. starts: which of them the caller has on the tape.
    places: the results that are on the tape, by position. once: whether that is swept once.
    loops, forward, saved: by worker the line of the program, its arguments, and what it keeps for the way back.
    """

    def __init__(self, rec: Recording, step: Step, slices: list[Any], order: range, states: int | None):
        super().__init__(rec, step.where)
        self.step, self.slices, self.order, self.states = step, slices, order, states
        self.loops: dict[int, Loop] = {}
        self.forward: dict[int, list[Any]] = {}
        self.saved: dict[int, Any] = {}

    # Forward

    def run(self, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        """The last carry, and the stacked ys."""
        carry = self._without_numbers(carry)
        count, n = len(carry), len(self.order)
        self.below = [lower(x, self.tape) if self.tape is not None else x for x in [*carry, *self.slices]]
        new, ys = self._recorded_step(carry)
        outs = [*new, *ys]
        if self.rec.together is not None and any(_is_grid(x) for x in [*self.below[count:], *ys]):
            raise Unrollable
        results = self._called(outs, count)
        found = []
        for k, x in enumerate(outs):
            pieces = {w: results[w][k] for w in results}
            found.append(self.rec.like(self.below[k], pieces) if k < count else self._stack(x, pieces, n))
        if self.tape is None:
            return found[:count], found[count:]
        self.once = self.tape.once
        self.places = [k for k, x in enumerate(outs) if on(x, self.tape)]
        self.starts = [k for k, x in enumerate([*carry, *self.slices]) if on(x, self.tape)]
        parents = [[*carry, *self.slices][k].node for k in self.starts]
        traced = joint(
            *(self.step.where, self.tape, [*parents, *self.step_tape.closed]),
            *([found[k] for k in self.places], self.pull),
            sums=True,
        )
        for k, x in zip(self.places, traced, strict=True):
            found[k] = x
        return found[:count], found[count:]

    def _stack(self, y: Any, pieces: Mapping[int, Any], n: int) -> Any:
        """The stacked values of a leaf y."""
        worker = self.rec.worker
        stack = self.rec.like(y, pieces, n)
        if worker is not None and worker.tracked and type(stack) is not Array:
            return Array(stack, worker.state())
        return stack

    def _without_numbers(self, carry: list[Any]) -> list[Any]:
        """The first carry, whose numbers have become arrays if a step makes arrays of them. Also finds the tape."""
        new, _, tapes = self.tried(self.step, carry, self._first_slices(self.slices))
        if len(tapes) > 1:
            raise Unrollable
        self.tape = next(iter(tapes), None)
        if not all(map(serves, carry, new)):
            raise _Number
        return [*map(adopted, carry, new)]

    def _first_slices(self, slices: Sequence[Any]) -> list[Any]:
        return [x[self.order[0]] for x in slices]

    def _recorded_step(self, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        """Record the step: what it returns, on the tape if there is one."""
        count = len(carry)
        first, slices = self.below[:count], self._first_slices(self.below[count:])
        if self.tape is None:
            with self.region():
                values = [self.stand_in(x) for x in (*first, *slices)]
                new, ys = self.step(values[:count], values[count:])
            self.cut()
            return new, ys
        self.traced = {k for k, x in enumerate([*carry, *self.slices]) if on(x, self.tape)}
        while True:
            self.step_tape = self.taped(self.step, first, slices, self.traced)
            more = self.step_tape.traced_carry() - self.traced
            if not more:
                return self.step_tape.carry, self.step_tape.ys
            self.traced |= more
            self.drop()

    def _called(self, outs: list[Any], count: int) -> dict[int, Any]:
        """The loop as a line of each program: its results."""
        lines = {}
        for w, region in self.regions.items():
            pieces = self.pieces([value_of(x) for x in outs], w)
            loop = Loop(region, (count, len(self.slices)), pieces, self.order, self.states, self.name)
            self.loops[w] = loop
            self.forward[w] = [*self.pieces(self.below, w), *self.outer(w, loop.outer)]
            lines[w] = loop, self.forward[w]
        results = self.rec.call(lines, self.regions.values())
        self.saved = {w: found[-1] for w, found in results.items()}
        return results

    # Back

    def pull(self, gs: list[Any], arrived: Sequence[tuple[Node, Any]]) -> list[Any]:
        """The cotangents of the traced first carry and slices, and of what the step closes over, added to those that
        have arrived."""
        count, total = len(self.step_tape.carry), len(self.step_tape.carry) + len(self.step_tape.ys)
        by_place = dict(zip(self.places, gs, strict=True))
        gs = [by_place.get(k) for k in range(total)]
        rec = current()
        traced = any(type(g) is Array and g.tape is not None for g in [*gs, *(g for _, g in arrived)])
        if rec is None or rec.programs != self.rec.programs or traced:
            before = Arrived(self.starts, self.step_tape.closed, arrived)
            return self._unrolled_pull(before.cotangents(gs[:count]), gs[count:], before)
        self.rec = rec
        before = Arrived(self.starts, self.step_tape.closed, arrived, count)
        return self._recorded_pull(before.cotangents(gs[:count]), gs[count:], before)

    def _unrolled_pull(self, now: Cotangents, ys: list[Any], before: Arrived) -> list[Any]:
        """The same by a tape of all steps, which can be differentiated again."""
        count, side = len(now.carry), Tape()
        assert self.tape is not None
        with redirected([(self.tape, side)], step=True):
            whole = StepTape(
                lambda c, x: unrolled(self.step, c, x, self.order),
                self.tape,
                side,
                self.below[:count],
                self.below[count:],
                self.traced,
            )
        now.ys = ys
        now = whole.pull(now, True, free=True, arrived=before, first=True)
        of_leaves = {**dict(enumerate(now.carry)), **{k + count: g for k, g in now.slices.items()}}
        return before.sums(of_leaves, {}, now.closed)

    def _recorded_pull(self, now: Cotangents, g_ys: list[Any], before: Arrived) -> list[Any]:
        """Record the way back through the last step, the one before, until one serves all further steps, and that
        through the first step if it adds to what has arrived."""
        carry, n = now.carry, len(self.order)
        ys = [j for j, g in enumerate(g_ys) if g is not None]
        same = {j for j, _ in self.step_tape.same} if n > 1 else set()
        earlier = [p for p, j in enumerate(ys) if j in same]
        last = [*(g for g in carry if g is not None), *now.closed.values()]
        form, steps, of_slices, first = None, [], {}, self._first_differs(before, bool(earlier))
        at = n - 1
        while at >= 0:
            known, form = form, _form(now)
            if form == known and at < n - 2:
                if not first:
                    break
                at = 0
            now = self._recorded_back(now, g_ys, earlier, at, before)
            slices = dict(sorted(now.slices.items()))
            of_slices.update(slices)
            outputs = [*(g for g in now.carry if g is not None), *now.closed.values(), *slices.values()]
            steps.append({w: BackStep(r, self.pieces(outputs, w), [*slices]) for w, r in self.regions.items()})
            at -= 1
        arrived = [start.g for start in before.starts.values() if start.g is not None]
        results = self._called_back(
            steps, [*last, *arrived, *(g_ys[j] for j in ys)], (len(arrived), len(ys)), earlier, first
        )
        kinds = [*((k, g) for k, g in enumerate(now.carry) if g is not None), *now.closed.items()]
        values = [self.rec.like(g, {w: r[p] for w, r in results.items()}) for p, (_, g) in enumerate(kinds)]
        present = sum(g is not None for g in now.carry)
        of_carry = dict(zip((k for k, _ in kinds[:present]), values[:present], strict=True))
        closed = dict(zip(now.closed, values[present:], strict=True))
        stacks = {
            len(carry) + k: self.rec.like(g, {w: r[len(kinds) + p] for w, r in results.items()}, n)
            for p, (k, g) in enumerate(sorted(of_slices.items()))
        }
        return [*map(unstated, before.sums(of_carry, stacks, closed))]

    def _first_differs(self, before: Arrived, earlier: bool) -> bool:
        """Whether the way back through the first step is one of its own: for what has arrived, for nodes that are
        there twice, because no y comes before, or for cotangents of arguments, which may come later."""
        names = [start.name for start in before.starts.values()]
        twice = len({*names}) < len(names) or not before.closed.keys().isdisjoint(names)
        leaves = {id(self.step_tape.leaves[k]) for k in before.starts}
        deferred = any(
            n.prim and n.prim.defer and not leaves.isdisjoint(map(id, n.parents)) for n in self.step_tape.side.nodes
        )
        return earlier or twice or deferred or any(start.g is not None for start in before.starts.values())

    def _recorded_back(
        self, now: Cotangents, g_ys: list[Any], earlier: Sequence[int], at: int, arrived: Arrived
    ) -> Cotangents:
        """Record the way back through step number `at`, for cotangents of the form of `now`."""
        ys = [j for j, g in enumerate(g_ys) if g is not None]
        with self.region({w: loop.region for w, loop in self.loops.items()}):
            inputs = Cotangents([None if g is None else self.stand_in(g) for g in now.carry], {}, {})
            inputs.closed = {k: self.stand_in(g) for k, g in now.closed.items()}
            if at == 0:
                found = arrived.starts.items()
                arrived = arrived.over({k: None if s.g is None else self.stand_in(s.g) for k, s in found})
            rows = [None if g is None else g[self.order[at]] for g in g_ys]
            inputs.ys = [None if g is None else self.stand_in(g) for g in rows]
            before = {ys[p]: self.stand_in(rows[ys[p]]) for p in earlier if at}
            inputs.earlier = [before.get(j) for j in range(len(g_ys))]
            out = self.step_tape.pull(inputs, at == len(self.order) - 1, free=False, arrived=arrived, first=at == 0)
        self.cut({w: [*loop.region.inputs, *loop.region.produced] for w, loop in self.loops.items()})
        return out

    def _called_back(
        self, steps: list[Any], gs: list[Any], counts: tuple[int, int], earlier: Sequence[int], first: bool
    ) -> dict[int, Any]:
        """The way back as a line of each program: its results."""
        lines, slices = {}, self.below[len(self.step_tape.carry) :]
        for w, loop in self.loops.items():
            loop.pulls += 1
            back = BackLoop(loop, [s[w] for s in steps], first, counts, earlier, self.once, f"{self.name}_back")
            pieces = [*self.pieces([*gs, *slices], w), *self.outer(w, back.outer)]
            lines[w] = back, [self.saved[w], *pieces]
        if self.states is None or any(loop.pulls > 1 for loop in self.loops.values()):
            self.save_again(self.loops, self.forward, self.saved)
        regions = [loop.region for loop in self.loops.values()] + [b.region for s in steps for b in s.values()]
        return self.rec.call(lines, regions)


def _form(now: Cotangents) -> list[Any]:
    """What the way back through a step takes: which cotangents, of which shapes, dtypes and layouts."""
    of_carry = [None if g is None else _kind(g) for g in now.carry]
    return [of_carry, {k: _kind(g) for k, g in now.closed.items()}, [*now.slices]]


def _kind(g: Any) -> tuple[Any, ...]:
    bare = value_of(g)
    return np.shape(bare), g.dtype, bare.layout if type(bare) is PartitionedArray else None


def _is_grid(x: Any) -> bool:
    bare = value_of(x)
    return type(bare) is PartitionedArray and bare.layout.spec is None


def unrolled(step: Step, carry: list[Any], slices: list[Any], order: range) -> tuple[list[Any], list[Any]]:
    """The last carry, and the stacked ys, by a loop of Python."""
    rows: list[list[Any]] = []
    for i in order:
        carry, ys = step(carry, [x[i] for x in slices])
        rows.append(ys)
    return carry, [stacked(column) for column in zip(*(rows[::-1] if order.step < 0 else rows), strict=True)]


def stacked(values: Sequence[Any]) -> Any:
    """Values of several steps as one array, along a new first dimension."""
    known = frontend(values[0])
    if known is not None:
        return known.stack(values)
    worker = WORKER.get()
    if worker is not None and worker.tracked and worker.frontend is None:
        values = [y if type(y) is Array else worker.carrying(np.asarray(slot_of(y)), worker.state()) for y in values]
    return np.stack(values)
