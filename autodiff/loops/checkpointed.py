"""Loops that keep some of their carries, and run the steps between again in the backward sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.checkpoint import FirstRun, Replay, closure_nodes, recomputed, sketches, traced_by
from spmd.autodiff.loops.schedules import Drop, Keep, backward, first_kept
from spmd.autodiff.loops.taped import Arrived, StepTape, floating
from spmd.autodiff.tape import ACTIVE, Node, Place, Tape, redirected
from spmd.autodiff.transform_arguments import lower, on, stated

__all__ = ["checkpointed"]


def checkpointed(
    step: Any, carry: list[Any], slices: list[Any], order: range, states: int, stacked: Callable[[Sequence[Any]], Any]
) -> tuple[list[Any], list[Any]]:
    """The last carry and the stacked ys of a loop of which the tapes keep `states` carries at most.

    step: `step(carry, x)` gives the leaves of the next carry, and of y. order: the slices, in the order of the steps.
    """
    loop, tapes = _Loop(step, len(carry), order, states, stacked), ACTIVE.get()
    if not tapes or any(t not in tapes for t in traced_by([*carry, *slices])):
        outs, _ = loop.first_run([*carry, *slices], ())
    else:
        outs = recomputed(step, [*carry, *slices], tapes, step.where, loop)
    return outs[: len(carry)], outs[len(carry) :]


class _Loop:
    """A loop as a function of one list of leaves: its carry, then its slices.

    kept: the carries that the first run kept, by the number of the step that follows.
    """

    def __init__(self, step: Any, count: int, order: range, states: int, stacked: Callable[[Sequence[Any]], Any]):
        self.step, self.count, self.order, self.states, self.stacked = step, count, order, states, stacked
        self.kept: dict[int, list[Any]] = {}

    def slices(self, values: Sequence[Any], at: int) -> list[Any]:
        """What step number `at` takes of the slices."""
        return [x[self.order[at]] for x in values[self.count :]]

    def replay(self, *args: Any) -> Replay:
        """The pullback on one tape. Only that on the outermost one may use the carries of the first run."""
        kept, self.kept = self.kept, {}
        return _LoopReplay(self, kept, *args)

    def first_run(self, values: Sequence[Any], tapes: Sequence[Tape]) -> tuple[list[Any], list[list[Node]]]:
        """The last carry and the stacked ys, and of each tape the nodes on which they depend. Keeps some carries."""
        n = len(self.order)
        keep = {*first_kept(n, self.states)} if tapes else set()
        rows, carry = [], list(values[: self.count])
        closed: dict[Tape, dict[int, Node]] = {tape: {} for tape in tapes}
        self.kept = {}
        for at in range(n):
            if at in keep:
                self.kept[at] = carry
            carry, ys = self._below_tapes(carry, self.slices(values, at), closed)
            rows.append(ys)
        if self.order.step < 0:
            rows.reverse()
        outs = [*carry, *(self.stacked(column) for column in zip(*rows, strict=True))]
        return outs, [[*nodes.values()] for nodes in closed.values()]

    def _below_tapes(self, carry: list[Any], x: list[Any], closed: dict[Tape, dict[int, Node]]) -> tuple[list, list]:
        """A step whose results are on no tape. The nodes from outside on which they depend are added to `closed`."""
        pairs = [(tape, Tape()) for tape in closed]
        with redirected(pairs, step=True):
            carry, ys = self.step(carry, x)
        for tape, side_tape in reversed(pairs):
            closed[tape].update((id(node), node) for node in closure_nodes(tape, side_tape, [*carry, *ys]))
            carry, ys = ([lower(y, tape) for y in part] for part in (carry, ys))
        return carry, ys


class _LoopReplay(Replay):
    """The pullback of a loop, which runs its steps again, each once more before its own sweep."""

    __slots__ = ("kept", "loop", "nodes", "once", "varied")

    def __init__(
        self,
        loop: _Loop,
        kept: dict[int, list[Any]],
        call: Callable,
        differentiated: dict[int, Place | None],
        tape: Tape,
        closed: list[Node],
        inner: Sequence[Tape],
        where: str,
        first: FirstRun,
    ):
        super().__init__(call, differentiated, tape, closed, inner, where, first)
        self.loop, self.kept, self.once = loop, kept, tape.once
        ids = set(map(id, closed))
        copies = {t: t.all_varied_copies() for t in (tape, *inner)}
        self.varied = {t: {k: v for k, v in copies[t].items() if id(v.node) in ids} for t in copies}

    def redirected(self, pairs: Any) -> AbstractContextManager[None]:  # type: ignore[override]
        return redirected(pairs, step=True, varied=self.varied)

    def pull(self, values: list, gs: list, arrived: list) -> list:  # type: ignore[override]
        self.nodes = [node for node, _ in arrived]  # the same in each call, unless the loop is within another one
        return super().pull(values, [*gs, *(g for _, g in arrived)])

    def swept(self, values: list, gs: list) -> list:
        """Run the steps again and sweep back: the sums of the cotangents of the differentiated leaves and of
        closed-over nodes, with those that have arrived before, which are the last of gs."""
        loop, n, count = self.loop, len(self.loop.order), self.loop.count
        gs, arrived = gs[: -len(self.nodes)], gs[-len(self.nodes) :]
        before = Arrived([*self.differentiated], self.closed, [*zip(self.nodes, arrived, strict=True)], count)
        states = self._states(values)
        traced = floating(values[:count]) | {k for k in self.differentiated if k >= count}
        now = before.cotangents(gs[:count])
        rows: dict[int, list[Any]] = {k: [None] * n for k in self.differentiated if k >= count}
        known = FirstRun(self.first.sketches[:count], tree.structure([0] * count))
        flags: list[Any] = []
        for action in backward(n, loop.states):
            if isinstance(action, Drop):
                del states[action.at]
                continue
            carry = self._advanced(values, states[action.start], action.start, action.at)
            if type(action) is Keep:
                states[action.at] = carry
                continue
            at = action.at
            with self.recording() as (tape, side_tape):
                run = StepTape(loop.step, tape, side_tape, carry, loop.slices(values, at), traced, self.inner)
            if not set(map(id, run.closed)) <= set(map(id, self.closed)):
                raise self.different_function()
            flags += self.compare(known, run.carry, known.structure, values, side_tape)
            known = known._replace(sketches=[sketches(x) for x in carry])
            if at == n - 1:
                now.closed = closed = dict(now.closed)
                gs = self._without_outer(run, gs, closed)
            now.ys, now.earlier = self._row(gs, at), self._row(gs, at - 1)
            now = run.pull(now, at == n - 1, free=True, arrived=before, first=at == 0)
            for k, g in now.slices.items():
                rows[k + count][loop.order[at]] = g
        sums = before.sums(dict(enumerate(now.carry)), {k: _stacked(rows[k]) for k in before.slices}, now.closed)
        of_leaves = zip(self.differentiated, sums, strict=False)
        found = [None if g is None else stated(g, getattr(values[k], "state", None)) for k, g in of_leaves]
        found += sums[len(found) :]
        for different in flags:
            found = [None if g is None else np.where(different, np.nan, g) for g in found]
        return found

    def _without_outer(self, run: StepTape, gs: Sequence[Any], closed: dict[int, Any]) -> list[Any]:
        """The cotangents gs without those of ys that are values from outside of the loop. These are added to `closed`
        before those of the steps, as in a sweep over all steps, which begins with the stacked ys."""
        gs, ids = list(gs), set(map(id, run.closed))
        for k, y in reversed([*enumerate(run.ys, self.loop.count)]):
            if gs[k] is None or not on(y, run.tape) or id(y.node) not in ids:
                continue
            for g in gs[k]:
                before = closed.get(id(y.node))
                closed[id(y.node)] = g if before is None else before + g
            gs[k] = None
        return gs

    def _states(self, values: Sequence[Any]) -> dict[int, list[Any]]:
        """The carries that the first run kept; run again where it was below other tapes. A tape that serves once gives
        them away, so that they can be dropped one by one."""
        if self.kept:
            kept = dict(self.kept)
            if self.once:
                self.kept.clear()
            return kept
        kept, carry = {}, list(values[: self.loop.count])
        for at in first_kept(len(self.loop.order), self.loop.states):
            kept[at] = carry = self._advanced(values, carry, max(kept, default=0), at)
        return kept

    def _advanced(self, values: Sequence[Any], carry: list[Any], start: int, stop: int) -> list[Any]:
        """The carry before step `stop`, from that before step `start`."""
        for at in range(start, stop):
            with self.recording() as (tape, _):
                carry, _ = self.loop.step(carry, self.loop.slices(values, at))
            for t in (*reversed(self.inner), tape):
                carry = [lower(x, t) for x in carry]
        return carry

    def _row(self, gs: Sequence[Any], at: int) -> list[Any]:
        """The cotangents of what step number `at` collects."""
        if at < 0:
            return [None] * (len(gs) - self.loop.count)
        return [None if g is None else g[self.loop.order[at]] for g in gs[self.loop.count :]]


def _stacked(rows: Sequence[Any]) -> Any:
    """The cotangents of slices as those of the array; zeros where none came; None where none at all came."""
    some = next((g for g in rows if g is not None), None)
    return None if some is None else np.stack([np.zeros_like(some) if g is None else g for g in rows])
