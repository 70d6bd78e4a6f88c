"""Loops in functions that `spmd.jit` records: a step is recorded once, forward and back, and becomes one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff.checkpoint import closure_nodes, traced_by
from spmd.autodiff.loops.schedules import Policy
from spmd.autodiff.loops.taped import Cotangents, StepTape
from spmd.autodiff.staging.program import COMM
from spmd.autodiff.staging.recorder import Program, is_slot, one_line, slot_of
from spmd.autodiff.staging.steps import BackLoop, BackStep, Loop, Region, Unrollable
from spmd.autodiff.staging.together import RECORDING, Together, at_worker
from spmd.autodiff.tape import ACTIVE, Tape, redirected
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import lower, on, unstated
from spmd.autodiff.transforms import joint
from spmd.frontends import frontend
from spmd.layout import Layout, P
from spmd.loops.steps import Step, is_number
from spmd.mesh import WORKER, Worker
from spmd.operators.varying import vary
from spmd.placement import put

__all__ = ["Recording", "current", "recorded", "unrolled"]


class Recording:
    """The programs that record what is done here, by worker: in a body that of its worker, outside those of all."""

    def __init__(self, programs: Mapping[int, Program], worker: Worker | None, together: Together | None):
        self.programs, self.worker, self.together = programs, worker, together

    def piece(self, x: Any, w: int) -> Any:
        """What a program has for a value: a stand-in, or bare data."""
        x = value_of(x)
        return x.blocks[w] if type(x) is PartitionedArray else at_worker(x, w)

    def like(self, x: Any, pieces: Mapping[int, Any], n: int | None = None) -> Any:
        """These pieces as a value of the kind of x. n: they are stacks of so many."""
        bare = value_of(x)
        if type(bare) is PartitionedArray:
            value: Any = PartitionedArray(pieces, bare.layout if n is None else _stacked(bare.layout, n), bare.mesh)
        else:
            value = pieces[self.worker.index] if self.worker is not None else self.together.joined(pieces)  # type: ignore[union-attr]
        state = x.state if type(x) is Array else None
        return value if state is None else Array(value, state)

    def call(self, line: Callable[[int], tuple[Any, list[Any]]], effect: bool) -> dict[int, Any]:
        """Call line(w) = (function, arguments) as a line of the program of each worker w."""
        if self.worker is not None:
            return {self.worker.index: _called(self.worker, *line(self.worker.index), effect)}
        assert self.together is not None
        return self.together.mesh.run(lambda worker: _called(worker, *line(worker.index), effect)).results


def _called(worker: Worker, fun: Any, args: list[Any], effect: bool) -> Any:
    assert worker.program is not None
    return worker.program.call(fun, (COMM, *args), effect=effect, comm=worker.comm)


def current() -> Recording | None:
    """The programs that record what is done here; None where nothing is recorded."""
    worker = WORKER.get()
    if worker is not None:
        return None if worker.program is None else Recording({worker.index: worker.program}, worker, None)
    together = RECORDING.get()
    return None if together is None else Recording(together.programs, None, together)


def _stacked(layout: Layout, n: int) -> Layout:
    """The layout of a stack of n arrays of a layout."""
    if layout.spec is None:
        grid = [1, *map(len, layout.cuts)]
        copies = len(layout.workers) // int(np.prod(grid))  # type: ignore[arg-type]
        return Layout.grid(
            (n, *layout.shape),
            grid if copies == 1 else [*grid, copies],
            layout.axes,
            layout.workers,
            [None, *layout.cuts],
            copies=layout.copies,
        )
    spec = P(None, *layout.spec.trimmed, unreduced=layout.spec.unreduced)
    return Layout((n, *layout.shape), spec, layout.axes, [None, *layout.cuts], copies=layout.copies)


def recorded(
    rec: Recording, step: Step, carry: list[Any], slices: list[Any], order: range, policy: Policy | None
) -> tuple[list[Any], list[Any]] | None:
    """The last carry, and the stacked ys, by a step that is recorded once. None where that cannot be: several
    differentiations at once, or a step that writes into arrays from outside of it."""
    try:
        return _RecordedLoop(rec, step, slices, order, None if policy is None else policy(len(order))).run(carry)
    except Unrollable:
        return None


class _RecordedLoop:
    """A loop whose step is recorded once, on at most one tape.

    token: what marks the values of its step. tape: the one that records it. run: the step on its tape; None without.
    below: the first carry and the slices below the tape.
    """

    def __init__(self, rec: Recording, step: Step, slices: list[Any], order: range, states: int | None):
        self.rec, self.step, self.slices, self.order, self.states = rec, step, slices, order, states
        self.token = object()
        self.regions: dict[int, Region] = {}
        self.loops: dict[int, Loop] = {}
        self.forward: dict[int, list[Any]] = {}
        self.saved: dict[int, Any] = {}
        self.tape: Tape | None = None
        self.traced: set[int] = set()

    # Regions: lines of all programs that become those of a step

    def _open(self) -> None:
        self.regions = {w: Region(program, self.token) for w, program in self.rec.programs.items()}
        for region in self.regions.values():
            region.__enter__()

    def _close(self) -> None:
        for region in self.regions.values():
            region.__exit__()

    def _stand_in(self, x: Any) -> Any:
        """What stands for a value that changes from step to step."""
        pieces = {w: region.stand_in(slot_of(self.rec.piece(x, w))) for w, region in self.regions.items()}
        return self.rec.like(x, pieces)

    def _cut(self, more: Mapping[int, Sequence[int]] | None = None) -> dict[int, Region]:
        for w, region in self.regions.items():
            region.cut(() if more is None else more[w])
        return self.regions

    def _outer(self, w: int, numbers: Sequence[int]) -> list[Any]:
        """The values of these numbers, from outside of the step."""
        return [self.rec.programs[w].steps.noted[i] for i in numbers]

    def _pieces(self, values: Sequence[Any], w: int) -> list[Any]:
        """What a program has for some values; they may be taken from outside of a step."""
        pieces = [self.rec.piece(x, w) for x in values]
        steps = self.rec.programs[w].steps
        if steps is not None:
            steps.noted.update((x.index, x) for x in pieces if is_slot(x))
        return pieces

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
        self.places = [k for k, x in enumerate(outs) if on(x, self.tape)]
        self.starts = [k for k, x in enumerate([*carry, *self.slices]) if on(x, self.tape)]
        parents = [[*carry, *self.slices][k].node for k in self.starts]
        traced = joint(
            self.step.where, self.tape, [*parents, *self.taped.closed], [found[k] for k in self.places], self.pull
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
        tapes = ACTIVE.get()
        traced = set(traced_by([*carry, *self.slices]))
        if not traced <= set(tapes):
            raise Unrollable
        at = self.order[0]
        values: list[Any] = [*carry, *(x[at] for x in self.slices)]
        for tape in reversed(tapes):
            values = [lower(x, tape) for x in values]
        pairs = [(tape, Tape()) for tape in tapes]
        self._open()
        try:
            values = [self._stand_in(x) for x in values]
            with redirected(pairs, step=True):
                new, ys = self.step(values[: len(carry)], values[len(carry) :])
        finally:
            self._close()
        for tape, side in pairs:
            if closure_nodes(tape, side, [*new, *ys]):
                traced.add(tape)
        self._cut()
        if len(traced) > 1:
            raise Unrollable
        self.tape = next(iter(traced), None)
        return [_adopted(x, y) if is_number(x) and not is_number(y) else x for x, y in zip(carry, new, strict=True)]

    def _recorded_step(self, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        """Record the step: what it returns, on the tape if there is one."""
        count = len(carry)
        below: list[Any] = self.below
        firsts = [*below[:count], *(x[self.order[0]] for x in below[count:])]
        if self.tape is None:
            self._open()
            try:
                values = [self._stand_in(x) for x in firsts]
                new, ys = self.step(values[:count], values[count:])
            finally:
                self._close()
            self._cut()
            return new, ys
        self.traced = {k for k, x in enumerate([*carry, *self.slices]) if on(x, self.tape)}
        while True:
            side = Tape()
            self._open()
            try:
                values = [self._stand_in(x) for x in firsts]
                with redirected([(self.tape, side)], step=True):
                    self.taped = StepTape(self.step, self.tape, side, values[:count], values[count:], self.traced)
            finally:
                self._close()
            self._cut()
            more = self.taped.traced_carry() - self.traced
            if not more:
                return self.taped.carry, self.taped.ys
            self.traced |= more

    def _called(self, outs: list[Any], count: int) -> dict[int, Any]:
        """The loop as a line of each program: its results."""
        lines = {}
        for w, region in self.regions.items():
            pieces = self._pieces([value_of(x) for x in outs], w)
            loop = Loop(region, (count, len(self.slices)), pieces, self.order, self.states, self._name)
            self.loops[w] = loop
            self.forward[w] = [*self._pieces(self.below, w), *self._outer(w, loop.outer)]
            lines[w] = loop, self.forward[w]
        results = self.rec.call(lines.__getitem__, _has_effect(self.regions.values()))
        self.saved = {w: found[-1] for w, found in results.items()}
        return results

    @property
    def _name(self) -> str:
        return self.step.where.removeprefix("spmd.").replace(" of ", "_")

    # Back

    def pull(self, gs: list[Any]) -> list[Any]:
        """The cotangents of the traced first carry and slices, and of what the step closes over."""
        count, total = len(self.taped.carry), len(self.taped.carry) + len(self.taped.ys)
        by_place = dict(zip(self.places, gs, strict=True))
        gs = [by_place.get(k) for k in range(total)]
        rec = current()
        if rec is None or rec.programs != self.rec.programs or any(type(g) is Array and g.tape is not None for g in gs):
            return self._unrolled_pull(gs[:count], gs[count:])
        self.rec = rec
        return self._recorded_pull(gs[:count], gs[count:])

    def _unrolled_pull(self, carry: list[Any], ys: list[Any]) -> list[Any]:
        """The same by a tape of all steps, which can be differentiated again."""
        count, side = len(carry), Tape()
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
        now = Cotangents(carry, {}, {})
        now.ys = ys
        now = whole.pull(now, True, free=True)
        found = [now.carry[k] if k < count else now.slices.get(k - count) for k in self.starts]
        return [*found, *(now.closed.get(id(node)) for node in self.taped.closed)]

    def _recorded_pull(self, carry: list[Any], g_ys: list[Any]) -> list[Any]:
        """Record the way back through the last step, the one before, until one serves all further steps."""
        ys = [j for j, g in enumerate(g_ys) if g is not None]
        same = {j for j, _ in self.taped.same} if len(self.order) > 1 else set()
        earlier = [p for p, j in enumerate(ys) if j in same]
        now, form, steps, of_slices = Cotangents(carry, {}, {}), None, [], {}
        for at in range(len(self.order) - 1, -1, -1):
            before, form = form, _form(now)
            if form == before and at < len(self.order) - 2:
                break
            now = self._recorded_back(now, [g if j in ys else None for j, g in enumerate(g_ys)], earlier, at)
            slices = dict(sorted(now.slices.items()))
            of_slices.update(slices)
            outputs = [*(g for g in now.carry if g is not None), *now.closed.values(), *slices.values()]
            steps.append({w: BackStep(r, self._pieces(outputs, w), [*slices]) for w, r in self.regions.items()})
        starts = [g for g in carry if g is not None] + [g_ys[j] for j in ys]
        results = self._called_back(steps, starts, len(ys), earlier)
        kinds = [*((k, g) for k, g in enumerate(now.carry) if g is not None), *now.closed.items()]
        values = [self.rec.like(g, {w: r[p] for w, r in results.items()}) for p, (_, g) in enumerate(kinds)]
        present = sum(g is not None for g in now.carry)
        of_carry = dict(zip((k for k, _ in kinds[:present]), values[:present], strict=True))
        closed = dict(zip(now.closed, values[present:], strict=True))
        stacks = {
            len(carry) + k: self.rec.like(g, {w: r[len(kinds) + p] for w, r in results.items()}, len(self.order))
            for p, (k, g) in enumerate(sorted(of_slices.items()))
        }
        found = [of_carry.get(k) if k < len(carry) else stacks.get(k) for k in self.starts]
        return [unstated(g) for g in (*found, *(closed.get(id(node)) for node in self.taped.closed))]

    def _recorded_back(self, now: Cotangents, g_ys: list[Any], earlier: Sequence[int], at: int) -> Cotangents:
        """Record the way back through step number `at`, for cotangents of the form of `now`."""
        ys = [j for j, g in enumerate(g_ys) if g is not None]
        self._open()
        try:
            inputs = Cotangents([None if g is None else self._stand_in(g) for g in now.carry], {}, {})
            inputs.closed = {k: self._stand_in(g) for k, g in now.closed.items()}
            rows = [None if g is None else g[self.order[at]] for g in g_ys]
            inputs.ys = [None if g is None else self._stand_in(g) for g in rows]
            before = {ys[p]: self._stand_in(rows[ys[p]]) for p in earlier}
            inputs.earlier = [before.get(j) for j in range(len(g_ys))]
            out = self.taped.pull(inputs, at == len(self.order) - 1, free=False)
        finally:
            self._close()
        self._cut({w: [*loop.region.inputs, *loop.region.produced] for w, loop in self.loops.items()})
        return out

    def _called_back(self, steps: list[Any], starts: list[Any], ys: int, earlier: Sequence[int]) -> dict[int, Any]:
        """The way back as a line of each program: its results."""
        assert self.tape is not None
        lines, slices = {}, self.below[len(self.taped.carry) :]
        for w, loop in self.loops.items():
            loop.pulls += 1
            back = BackLoop(loop, [s[w] for s in steps], ys, earlier, self.tape.once, f"{self._name}_back")
            pieces = [*self._pieces([*starts, *slices], w), *self._outer(w, back.outer)]
            lines[w] = back, [self.saved[w], *pieces]
        if self.states is None:
            self._save_again()
        regions = [loop.region for loop in self.loops.values()] + [b.region for s in steps for b in s.values()]
        return self.rec.call(lines.__getitem__, _has_effect(regions))

    def _save_again(self) -> None:
        """Run the recorded loop once more, for the values that the way back needs."""

        def run(worker: Worker) -> None:
            w = worker.index
            *_, self.saved[w].value = self.loops[w](worker.comm, *map(slot_of, self.forward[w]))

        if self.rec.worker is not None:
            run(self.rec.worker)
        else:
            assert self.rec.together is not None
            self.rec.together.mesh.run(run)


def _has_effect(regions: Iterable[Region]) -> bool:
    return any(line.effect for region in regions for line in region.lines)


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


def _adopted(x: Any, like: Any) -> Any:
    """A number of the first carry as an array like the one that a step makes of it."""
    bare = value_of(like)
    if type(bare) is PartitionedArray:
        return put(one_line(np.asarray, (x, like.dtype)) if is_slot(x) else np.asarray(x, like.dtype), P(), bare.mesh)
    if type(x) is not Array:
        return one_line(np.asarray, (x, like.dtype)) if is_slot(x) else np.asarray(x, like.dtype)
    if x.tape is None:
        value = one_line(np.asarray, (x.value, like.dtype)) if is_slot(x.value) else np.asarray(x.value, like.dtype)
        return Array(value, like.state)
    x = x.astype(like.dtype)
    return vary(x, like.state) if type(like) is Array and like.state is not x.state else x


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
