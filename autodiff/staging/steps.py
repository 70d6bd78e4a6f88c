"""Steps of loops: lines cut out of a program, which then runs them many times in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.autodiff.loops.schedules import Drop, Keep, backward, first_kept
from spmd.autodiff.staging.joining import joined
from spmd.autodiff.staging.program import COMM, Built, Line, Ref, refs
from spmd.autodiff.staging.recorder import Program, is_slot
from spmd.errors import JitError

__all__ = ["BackLoop", "Loop", "Region", "Steps", "Unrollable"]


class Unrollable(Exception):
    """A step that cannot be recorded once: it writes into arrays from outside of it."""


class Steps:
    """What a program knows of its loops.

    inside: by number the region in which a value was computed. open: the regions that are recorded now. usable: those
    whose values may be used.
    """

    def __init__(self) -> None:
        self.inside: dict[int, Region] = {}
        self.open: list[Region] = []
        self.usable: list[Region] = []

    def is_over(self, x: Any) -> bool:
        """Whether a stand-in is for a value of a step, of which there is no more outside of the loop."""
        region = self.inside.get(x.index)
        return region is not None and region not in self.usable

    def note(self, x: Any) -> None:
        """A line takes a stand-in. Raises if it is a value of a step, used outside of the loop."""
        if self.is_over(x):
            raise JitError.at(
                "a loop, within spmd.jit",
                got=f"{x!r}, which a step computed, used outside of the loop",
                need="steps that hand on what they compute: by the carry, or as y",
                mend="return it, (carry, y), and take it from the results of the loop",
            )
        for region in self.open:
            region.noted[x.index] = x


class Region:
    """Lines that are cut out of a program: those recorded between `open` and `close`, by `cut`.

    inputs: the numbers of the stand-ins for what changes from step to step. lines: those that depend on them, or have
    an effect, or touch what lines write to; the others stay in the program, before the loop, unless it is `whole`.
    produced: the numbers of the values of `lines`. noted: the stand-ins that lines took, by number.
    after: a region whose values this one uses, if any.
    """

    def __init__(self, program: Program, after: Region | None = None, whole: bool = False):
        self.program, self.whole = program, whole
        self.usable = [self] if after is None else [self, after]
        self.inputs: list[int] = []
        self.lines: list[Line] = []
        self.produced: set[int] = set()
        self.noted: dict[int, Any] = {}
        if program.steps is None:
            program.steps = Steps()

    def open(self) -> None:
        """The next line is the first one."""
        self.start = len(self.program.lines)
        self.program.steps.open.append(self)
        self.program.steps.usable += self.usable

    def close(self) -> None:
        """The last line was recorded."""
        self.program.steps.open.remove(self)
        for region in self.usable:
            self.program.steps.usable.remove(region)

    def stand_in(self, value: Any) -> Any:
        """The stand-in for a value that changes from step to step."""
        x = self.program.stand_in(value)
        self.inputs.append(x.index)
        return x

    def cut(self, more: Iterable[int] = ()) -> None:
        """Take the lines out of the program. more: numbers of further values that change from step to step."""
        program, varying = self.program, {*self.inputs, *more}
        lines = program.lines[self.start :]
        del program.lines[self.start :]
        varying |= _changed(lines)
        for line in lines:
            of_worker = line.effect or any(a is COMM for a in line.args)
            results = (i for _, i in line.parts)
            if self.whole or of_worker or not varying.isdisjoint((*line.used, *results)):
                self.lines.append(line)
                self.produced.update(i for _, i in line.parts)
                varying |= self.produced
            else:
                program.lines.append(line)
        own = _own(self.lines)
        if not own.issuperset(i for line in self.lines if line.writes for i in _targets(line)):
            raise Unrollable
        program.steps.inside.update(dict.fromkeys((*self.inputs, *self.produced), self))

    def outer(self, outputs: Iterable[Any]) -> list[int]:
        """The numbers of the values from outside that the lines and these outputs use."""
        inside = {*self.inputs, *self.produced}
        used = [*(i for line in self.lines for i in line.used), *refs([*outputs])]
        return [*dict.fromkeys(i for i in used if i not in inside)]

    def built(self, before: Sequence[Line], inputs: Sequence[int], outputs: Sequence[Any], name: str) -> Built:
        """The lines as a function of these values. before: lines that run first."""
        program = self.program
        return Built(joined([*before, *self.lines]), program.likes, program.small, inputs, outputs, name)


def _refs(outputs: Iterable[Any]) -> list[Any]:
    """Results without their values, which a program outlives: stand-ins by number."""
    return [Ref(x.index) if is_slot(x) else x for x in outputs]


def _targets(line: Line) -> list[int]:
    """The numbers of the values that a line writes into."""
    return refs(line.kwargs["out"]) if "out" in line.kwargs else refs(line.args[:1])


def _own(lines: Sequence[Line]) -> set[int]:
    """The numbers of the new arrays that lines make, and of their entries x[index], which may be views of them."""
    own: set[int] = set()
    for line in lines:
        if line.fresh or (line.form == "item" and own.issuperset(line.used)):
            own.update(i for _, i in line.parts)
    return own


def _changed(lines: Sequence[Line]) -> set[int]:
    """The numbers of the values that lines write into, and of those that may share memory with them."""
    found = {i for line in lines if line.writes for i in _targets(line)}
    count = -1
    while count < len(found):
        count = len(found)
        for line in lines:
            shared = {*line.used, *(i for _, i in line.parts)}
            if not line.fresh and not found.isdisjoint(shared):
                found |= shared
    return found


class Saved:
    """What a loop keeps for its way back.

    rows: by step the values that the derivatives need. states: by step the carry before it, where steps run again.
    """

    __slots__ = ("rows", "states")

    def __init__(self, n: int):
        self.rows: list[Any] = [None] * n
        self.states: dict[int, Sequence[Any]] = {}


class Loop:
    """A line that runs a step again and again: `loop(comm, *carry, *slices, *outer)` is (carry..., ys..., saved).

    region: the recorded step. counts: the numbers of leaves of the carry, and of the slices. outputs: what the step
    returns: the carry, then y. order: the slices in the order of the steps.
    states: how many carries are kept, where steps run again on the way back; None: the values that these need are kept.
    kept: the numbers of those values. pulls: how many ways back there are.
    """

    def __init__(
        self,
        region: Region,
        counts: tuple[int, int],
        outputs: Sequence[Any],
        order: range,
        states: int | None,
        name: str,
    ):
        self.region, self.counts, self.outputs, self.order, self.states = region, counts, _refs(outputs), order, states
        self.__name__ = name
        self.kept: list[int] = []
        self.pulls = 0
        self.outer = region.outer(self.outputs)
        self._built: Built | None = None

    def keep(self, numbers: Iterable[int]) -> None:
        """Keep these values of each step, too."""
        more = [i for i in numbers if i not in self.kept]
        if more:
            self.kept += more
            self._built = None

    def __spmd_programs__(self) -> list[Built]:
        """The step."""
        return [self._program()]

    def _program(self) -> Built:
        if self._built is None:
            outputs = [*self.outputs, *map(Ref, self.kept)]
            self._built = self.region.built((), [*self.region.inputs, *self.outer], outputs, self.__name__)
        return self._built

    def step(self, comm: Any, carry: Sequence[Any], slices: Sequence[Any], outer: Sequence[Any], at: int) -> list[Any]:
        """What step number `at` returns."""
        i = self.order[at]
        return self._program().run(comm, [*carry, *[x[i] for x in slices], *outer])

    def __call__(self, comm: Any, *values: Any) -> tuple[Any, ...]:
        count, width = self.counts
        n, total = len(self.order), len(self.outputs)
        carry: Sequence[Any] = values[:count]
        slices, outer = values[count : count + width], values[count + width :]
        saved = Saved(n)
        keep = set() if self.states is None else {*first_kept(n, self.states)}
        run, order, buffers = self._program().run, self.order, None
        for at in range(n):
            i = order[at]
            if at in keep:
                saved.states[at] = carry
            found = run(comm, [*carry, *[x[i] for x in slices], *outer])
            carry = found[:count]
            if total > count:
                ys = found[count:total]
                if buffers is None:
                    buffers = [_buffer(n, y) for y in ys]
                for buffer, y in zip(buffers, ys, strict=True):
                    buffer[i] = y
            if len(found) > total:
                saved.rows[at] = found[total:]
        return (*carry, *(buffers or ()), saved)


def _buffer(n: int, like: Any) -> Any:
    """Room for a value of each of n steps."""
    if not hasattr(like, "dtype"):
        like = np.asarray(like)
    return np.empty_like(like, shape=(n, *like.shape), order="C")


class BackStep:
    """The way back through one step, for cotangents of one form.

    region: the recorded sweep. outputs: the cotangents that the step before takes, then those of the slices `of`.
    """

    def __init__(self, region: Region, outputs: Sequence[Any], of: Sequence[int]):
        self.region, self.outputs, self.of = region, _refs(outputs), of
        self.built: Any = None


class BackLoop:
    """A line that goes back through a loop: `back(comm, saved, *cotangents, *arrived, *ys, *slices, *outer)`.

    It gives the cotangents of the first carry and of closed-over values, and those of the slices, stacked.

    steps: the ways back through the last step, the one before, and so on; the last of them serves all further steps.
    first: whether the last of `steps` is that through the first step only, which adds to the cotangents of the first
    carry that have arrived. counts: how many of these there are, and of cotangents of stacked ys; earlier: those of
    which the step before is needed too.
    once: whether there is only one way back, so that what is kept of a step is released after its use.
    outer: the numbers of the values from outside that the steps use. kept: how many values of each step they use.
    """

    def __init__(
        self,
        loop: Loop,
        steps: Sequence[BackStep],
        first: bool,
        counts: tuple[int, int],
        earlier: Sequence[int],
        once: bool,
        name: str,
    ):
        self.loop, self.steps, self.counts, self.earlier, self.once = loop, steps, counts, earlier, once
        self.first, self.further = (steps[-1], steps[:-1]) if first else (None, steps)
        self.__name__ = name
        forward, again = loop.region, loop.states is not None
        used = dict.fromkeys(i for s in steps for i in s.region.outer(s.outputs))
        slices = forward.inputs[loop.counts[0] :]
        own = {*forward.inputs, *forward.produced}
        if not again:
            loop.keep(i for i in used if i in own and i not in slices)
        self.kept = len(loop.kept)
        self.outer = [*dict.fromkeys((*(loop.outer if again else ()), *(i for i in used if i not in own)))]
        values = forward.inputs if again else [*loop.kept, *slices]
        for k, s in enumerate(steps):
            inputs = [*s.region.inputs, *values, *self.outer]
            s.built = s.region.built(forward.lines if again else (), inputs, s.outputs, f"{name}, {k}")

    def __spmd_programs__(self) -> list[Built]:
        """The ways back through a step."""
        return [s.built for s in self.steps]

    def __call__(self, comm: Any, saved: Saved, *values: Any) -> tuple[Any, ...]:
        loop = self.loop
        outer = len(values) - len(self.outer)
        slices = outer - loop.counts[1]
        ys = slices - self.counts[1]
        arrived = ys - self.counts[0]
        run = _Back(self, comm, [*values[:arrived]], values[arrived:ys], values[ys:slices], values[slices:])
        if loop.states is None:
            for at in range(len(loop.order) - 1, -1, -1):
                row = saved.rows[at]
                if self.once and loop.pulls == 1:
                    saved.rows[at] = None
                run.step(at, () if row is None else row[: self.kept])
            return run.results()
        states = dict(saved.states)
        if self.once and loop.pulls == 1:
            saved.states.clear()
        by_number = dict(zip(self.outer, run.outer, strict=True))
        forward_outer = [by_number[i] for i in loop.outer]
        for action in backward(len(loop.order), loop.states):
            if isinstance(action, Drop):
                del states[action.at]
                continue
            carry = states[action.start]
            for at in range(action.start, action.at):
                carry = loop.step(comm, carry, run.slices, forward_outer, at)[: loop.counts[0]]
            if type(action) is Keep:
                states[action.at] = carry
            else:
                run.step(action.at, carry)
        return run.results()


class _Back:
    """One run of a `BackLoop`: gs are the cotangents that the next step back takes."""

    def __init__(self, back: BackLoop, comm: Any, gs: list[Any], arrived: Any, ys: Any, more: Any):
        width = back.loop.counts[1]
        self.back, self.comm, self.gs, self.arrived, self.ys = back, comm, gs, arrived, ys
        self.slices, self.outer = more[:width], more[width:]
        self.buffers: dict[int, Any] = {}

    def step(self, at: int, values: Sequence[Any]) -> None:
        """The way back through step number `at`. values: what is kept of it, or the carry before it."""
        back, order = self.back, self.back.loop.order
        n, i = len(order), order[at]
        rows = [g[i] for g in self.ys]
        if at == 0 and back.first is not None:
            s, rows = back.first, [*self.arrived, *rows]
        else:
            s = back.further[min(n - 1 - at, len(back.further) - 1)]
            rows += [self.ys[j][order[at - 1]] for j in back.earlier]
        found = s.built.run(self.comm, [*self.gs, *rows, *values, *[x[i] for x in self.slices], *self.outer])
        count = len(found) - len(s.of)
        self.gs = found[:count]
        for k, g in zip(s.of, found[count:], strict=True):
            if k not in self.buffers:
                self.buffers[k] = np.zeros_like(g, shape=(n, *np.shape(g)), order="C")
            self.buffers[k][i] = g

    def results(self) -> tuple[Any, ...]:
        return (*self.gs, *(self.buffers[k] for k in sorted(self.buffers)))


class While:
    """A line that repeats a step as long as a condition holds: `(comm, *carry, *outer)` gives the last carry.

    condition, step: the recorded regions, of one carry each. holds: what the condition returns.
    outputs: the next carry.
    """

    def __init__(self, condition: Region, holds: Any, step: Region, outputs: Sequence[Any], name: str):
        self.__name__ = name
        (holds, *outputs) = _refs([holds, *outputs])
        self.count = len(outputs)
        outer = dict.fromkeys((*condition.outer([holds]), *step.outer(outputs)))
        self.outer = [*outer]
        self.condition = condition.built((), [*condition.inputs, *self.outer], [holds], f"{name}, condition")
        self.step = step.built((), [*step.inputs, *self.outer], outputs, name)

    def __spmd_programs__(self) -> list[Built]:
        return [self.condition, self.step]

    def __call__(self, comm: Any, *values: Any) -> tuple[Any, ...]:
        carry, outer = [*values[: self.count]], values[self.count :]
        while self.condition.run(comm, [*carry, *outer])[0]:
            carry = self.step.run(comm, [*carry, *outer])
        return tuple(carry)


class Branches:
    """A line that runs one of two recorded functions: `(comm, pred, *operands, *outer)` is (results..., saved).

    regions, outputs: of the function where pred is true, and where it is false. kept: of each the numbers of the values
    that its way back needs. outer: the numbers of the values from outside that they use. apart: whether pred may differ
    between workers, whose collectives then are not counted.
    """

    def __init__(self, regions: Sequence[Region], outputs: Sequence[Sequence[Any]], apart: bool, name: str):
        self.regions, self.outputs, self.apart, self.__name__ = regions, [*map(_refs, outputs)], apart, name
        self.kept: list[list[int]] = [[], []]
        pairs = zip(regions, self.outputs, strict=True)
        self.outer = [*dict.fromkeys(i for region, outs in pairs for i in region.outer(outs))]
        self._built: list[Built] | None = None

    def keep(self, of_branch: int, numbers: Iterable[int]) -> None:
        """Keep these values of one of the functions, too."""
        kept = self.kept[of_branch]
        kept += [i for i in numbers if i not in kept]
        self._built = None

    def __spmd_programs__(self) -> list[Built]:
        """The two functions."""
        if self._built is None:
            self._built = [
                region.built((), [*region.inputs, *self.outer], [*outs, *map(Ref, kept)], f"{self.__name__}, {which}")
                for region, outs, kept, which in zip(self.regions, self.outputs, self.kept, (True, False), strict=True)
            ]
        return self._built

    def __call__(self, comm: Any, pred: Any, *values: Any) -> tuple[Any, ...]:
        which, number = 0 if pred else 1, getattr(comm, "number", 0)
        found, count = self.__spmd_programs__()[which].run(comm, [*values]), len(self.outputs[which])
        if self.apart:
            comm.number = number
        saved = Saved(1)
        saved.rows[0] = which, found[count:]
        return (*found[:count], saved)


class BackBranches:
    """The way back through `Branches`: `(comm, saved, *cotangents, *outer)` is (cotangents...).

    regions, outputs: for each function the recorded sweep, and the cotangents of what it depends on, by key.
    keys: those of the results, in order, with shape and dtype: a function that does not depend on one gives zeros.
    """

    def __init__(
        self, branches: Branches, regions: Sequence[Region], outputs: Sequence[Mapping[Any, Any]], keys: Any, name: str
    ):
        self.branches, self.keys, self.__name__ = branches, keys, name
        self.outputs = [dict(zip(outs, _refs(outs.values()), strict=True)) for outs in outputs]
        used = []
        for which, (region, outs) in enumerate(zip(regions, self.outputs, strict=True)):
            forward = branches.regions[which]
            own = {*forward.inputs, *forward.produced}
            numbers = region.outer(outs.values())
            branches.keep(which, (i for i in numbers if i in own))
            used += [i for i in numbers if i not in own]
        self.outer = [*dict.fromkeys(used)]
        self.kept = [len(kept) for kept in branches.kept]
        self.built = [
            region.built((), [*region.inputs, *kept, *self.outer], [*outs.values()], f"{name}, {which}")
            for region, kept, outs, which in zip(regions, branches.kept, self.outputs, (True, False), strict=True)
        ]

    def __spmd_programs__(self) -> list[Built]:
        """The two ways back."""
        return self.built

    def __call__(self, comm: Any, saved: Saved, *values: Any) -> tuple[Any, ...]:
        (which, kept), number = saved.rows[0], getattr(comm, "number", 0)
        count = len(values) - len(self.outer)
        found = self.built[which].run(comm, [*values[:count], *kept[: self.kept[which]], *values[count:]])
        if self.branches.apart:
            comm.number = number
        by_key = dict(zip(self.outputs[which], found, strict=True))
        return tuple(by_key[k] if k in by_key else np.zeros(*like) for k, like in self.keys.items())
