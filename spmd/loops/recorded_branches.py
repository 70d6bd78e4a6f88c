"""`cond` and `while_loop` in functions that `spmd.jit` records: their functions are recorded once each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import tree
from spmd.autodiff.loops.taped import Arrived, Cotangents, StepTape
from spmd.autodiff.staging.recorder import slot_of
from spmd.autodiff.staging.steps import BackBranches, Branches, Region, Unrollable, While
from spmd.autodiff.tape import Node
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import lower, on, unstated
from spmd.autodiff.transforms import joint
from spmd.errors import ClosureError, DifferentiationError, JitError, LayoutError, describe
from spmd.global_ops.resharding import reshard
from spmd.layout import Layout
from spmd.loops.recording import RecordedSteps, Recording, adopted, current, is_recorded, serves
from spmd.loops.steps import array_leaf, holds, is_number, layout_of_leaf, widens

__all__ = ["recorded_cond", "recorded_while"]

Function = Callable[[list[Any]], tuple[list[Any], Any]]
"""From the leaves of the operands to the leaves of the results, and their structure."""


def recorded_while(
    rec: Recording,
    where: str,
    condition: Callable[[list[Any]], Any],
    step: Callable[[list[Any]], list[Any]],
    carry: Any,
) -> list[Any]:
    """The last carry of a loop whose condition and step are recorded once."""
    steps = RecordedSteps(rec, where)
    new, _, tapes = steps.tried(lambda values, _: (step(values), []), carry, [])
    if tapes:
        raise DifferentiationError.at(
            where,
            got="functions that use a differentiated array",
            need="undifferentiated arrays: the loop has no reverse derivative",
            mend="spmd.fori_loop or spmd.scan, with a number of steps that is known; or spmd.stop_gradient(x)",
        )
    if not all(map(serves, carry, new)):
        return _first_apart(rec, where, condition, step, carry)
    carry = [*map(adopted, carry, new)]
    with steps.region():
        holds = condition([steps.stand_in(x) for x in carry])
    conditions = steps.cut()
    with steps.region():
        outs = step([steps.stand_in(x) for x in carry])
    bodies = steps.cut()
    lines = {}
    for w in rec.programs:
        (held,) = steps.pieces([holds], w)
        line = While(conditions[w], held, bodies[w], steps.pieces(outs, w), steps.name)
        lines[w] = line, [*steps.pieces(carry, w), *steps.outer(w, line.outer)]
    results = rec.call(lines, [*conditions.values(), *bodies.values()])
    return [rec.like(x, {w: r[k] for w, r in results.items()}) for k, x in enumerate(outs)]


def _first_apart(
    rec: Recording,
    where: str,
    condition: Callable[[list[Any]], Any],
    step: Callable[[list[Any]], list[Any]],
    carry: list[Any],
) -> list[Any]:
    """`recorded_while`, with the first step by itself: it takes numbers of Python's that serve no further one."""

    leaves = tree.structure(carry)

    def onwards(values: list[Any]) -> tuple[list[Any], Any]:
        return recorded_while(rec, where, condition, step, step(values)), leaves

    pred = condition(carry)
    if is_recorded(pred):
        return recorded_cond(rec, where, pred, (onwards, lambda values: (values, leaves)), carry, False)[0]
    return onwards(carry)[0] if value_of(pred) else carry


def recorded_cond(
    rec: Recording, where: str, pred: Any, both: Sequence[Function], leaves: Sequence[Any], apart: bool
) -> tuple[list[Any], Any]:
    """The results of one of two functions, both of which are recorded. apart: whether pred differs between workers."""
    try:
        return _RecordedCond(rec, where, pred, both, leaves, apart).run()
    except Unrollable:
        raise JitError.at(
            where,
            got="functions that several gradients within one jitted function differentiate, or that write into arrays "
            "from outside",
            need="one gradient at a time, and functions that write into arrays of their own only",
            mend="leave spmd.jit out; np.where(pred, x, y), where both may be computed",
        ) from None


class _RecordedCond(RecordedSteps):
    """A choice between two recorded functions, on at most one tape.

    runs: the functions on the tape. forward: their regions, by worker. lines, arguments, saved: by worker the line of
    the program, its arguments, and what it keeps for the way back.
    """

    def __init__(self, rec: Recording, where: str, pred: Any, both: Any, leaves: Sequence[Any], apart: bool):
        super().__init__(rec, where)
        self.pred, self.both, self.leaves, self.apart = pred, both, leaves, apart
        self.runs: list[StepTape] = []
        self.forward: list[dict[int, Region]] = []
        self.lines: dict[int, Branches] = {}
        self.arguments: dict[int, list[Any]] = {}
        self.saved: dict[int, Any] = {}

    def run(self) -> tuple[list[Any], Any]:
        """The leaves of the results, and their structure."""
        structure = self._matched()
        outs = [self._recorded(which) for which in (0, 1)]
        arguments = {w: [*self.pieces([self.pred, *self.below], w)] for w in self.rec.programs}
        for w in self.rec.programs:
            line = Branches([r[w] for r in self.forward], [self.pieces(o, w) for o in outs], self.apart, self.name)
            self.lines[w], self.arguments[w] = line, [*arguments[w], *self.outer(w, line.outer)]
        lines = {w: (line, self.arguments[w]) for w, line in self.lines.items()}
        results = self.rec.call(lines, [r for regions in self.forward for r in regions.values()])
        self.saved = {w: found[-1] for w, found in results.items()}
        found = [self.rec.like(x, {w: r[k] for w, r in results.items()}) for k, x in enumerate(outs[0])]
        if self.tape is None:
            return found, structure
        self.places = [k for k, pair in enumerate(zip(*outs, strict=True)) if any(on(x, self.tape) for x in pair)]
        self.closed = {id(node): node for run in self.runs for node in run.closed}
        self.starts = [k for k, x in enumerate(self.leaves) if on(x, self.tape)]
        parents = [*(self.leaves[k].node for k in self.starts), *self.closed.values()]
        traced = joint(self.where, self.tape, parents, [found[k] for k in self.places], self.pull, sums=True)
        for k, x in zip(self.places, traced, strict=True):
            found[k] = x
        return found, structure

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Within the block warnings of NumPy are off: of the functions that are recorded only one is meant."""
        before = {w: program.errors for w, program in self.rec.programs.items()}
        with np.errstate(all="ignore"):
            for program in self.rec.programs.values():
                program.errors = np.geterr()
            try:
                yield
            finally:
                for w, program in self.rec.programs.items():
                    program.errors = before[w]

    def _matched(self) -> Any:
        """The structure of the results. Finds the tape, and makes arrays of numbers that stand beside arrays."""
        tried, tapes = [], set()
        for f in self.both:
            structure: list[Any] = []

            def step(_: Any, x: list[Any], f: Function = f, structure: list[Any] = structure) -> tuple[list, list]:
                outs, found = f(x)
                structure.append(found)
                return [], [array_leaf(y) for y in outs]

            with self._quiet():
                _, outs, more = self.tried(step, [], self.leaves)
            tried.append((outs, structure[0]))
            tapes |= more
        if len(tapes) > 1:
            raise Unrollable
        self.tape = next(iter(tapes), None)
        (first, structure_of_first), (second, structure_of_second) = tried
        if structure_of_first != structure_of_second:
            got, need = (tree.Described.of(s).text for s in (structure_of_second, structure_of_first))
            raise self._unequal("", f"the tree {got}; each * is a leaf", need)
        for path, x, y in zip(tree.shown_paths(structure_of_first), first, second, strict=True):
            if not _agree(x, y):
                raise self._unequal(path, describe(y), describe(x))
        pairs = zip(first, second, strict=True)
        self.likes = [y if is_number(x) and (not is_number(y) or widens(x, y)) else x for x, y in pairs]
        return structure_of_first

    def _unequal(self, which: str, got: str, need: str) -> LayoutError:
        return LayoutError.at(
            self.where,
            argument=f"the result of false_fun{which}",
            got=got,
            need=f"{need}, as true_fun gives: both are recorded",
            mend="results of one shape, dtype, and state or layout (x.astype, spmd.pvary, spmd.reshard)",
        )

    def _recorded(self, which: int) -> list[Any]:
        """Record one of the functions: its results, on the tape if there is one."""
        f = self.both[which]

        def step(_: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = [array_leaf(y) for y in f(x)[0]]
            return [], [*map(adopted, outs, self.likes)]

        self.below = [x if self.tape is None else lower(x, self.tape) for x in self.leaves]
        with self._quiet():
            if self.tape is None:
                with self.region(whole=True):
                    _, outs = step([], [self.stand_in(x) for x in self.below])
                self.forward.append(self.cut())
                return outs
            traced = {k for k, x in enumerate(self.leaves) if on(x, self.tape)}
            run = self.taped(step, [], self.below, traced, whole=True)
        self.forward.append(self.regions)
        self.runs.append(run)
        if self.apart and run.closed:
            raise closed_over(self.where, len(run.closed))
        return run.ys

    # Back

    def pull(self, gs: list[Any], arrived: Sequence[tuple[Node, Any]]) -> list[Any]:
        """The cotangents of the operands, and of what the functions close over, added to those that have arrived."""
        rec = current()
        own = [g for _, g in arrived]
        if rec is None or rec.programs != self.rec.programs or any(type(g) is Array and g.tape for g in [*gs, *own]):
            raise Unrollable
        self.rec = rec
        by_place = dict(zip(self.places, gs, strict=True))
        all_gs = [by_place.get(k) for k in range(len(self.likes))]
        kinds, back, outputs = self._recorded_back(all_gs, arrived, {})
        if unequal := {k: g.reduced.layout for k, g in kinds.items() if any(_differ(g, o.get(k)) for o in outputs)}:
            kinds, back, outputs = self._recorded_back(all_gs, arrived, unequal)
        results = self._called_back(back, outputs, kinds, [g for g in [*all_gs, *own] if g is not None])
        values = {k: self.rec.like(g, {w: r[p] for w, r in results.items()}) for p, (k, g) in enumerate(kinds.items())}
        return [unstated(g) if g is not None else None for g in map(values.get, [*self.starts, *self.closed])]

    def _recorded_back(
        self, gs: list[Any], arrived: Sequence[tuple[Node, Any]], layouts: Mapping[Any, Layout]
    ) -> tuple[dict[Any, Any], list[Any], list[Any]]:
        """Record the way back through both functions: of each sum a value like it; the regions; the sums of each.

        layouts: those of sums that would lie differently in the two."""
        kinds: dict[Any, Any] = {}
        back, outputs = [], []
        for which, run in enumerate(self.runs):
            with self._quiet(), self.region(self.forward[which], whole=True):
                now = Cotangents([], {}, {})
                now.ys = [None if g is None else self.stand_in(g) for g in gs]
                so_far = [None if g is None else self.stand_in(g) for _, g in arrived]
                nodes = [node for node, _ in arrived]
                before = Arrived(self.starts, [*self.closed.values()], [*zip(nodes, so_far, strict=True)])
                now.closed = before.closed  # of both functions, so that both give the sum of a node in one place
                out = run.pull(now, True, free=False, arrived=before, first=True)
                sums = {**out.slices, **out.closed}
                found = {k: reshard(g.reduced, layouts[k]) if k in layouts else g for k, g in sums.items()}
            of_forward = self.forward[which]
            back.append(self.cut({w: [*r.inputs, *r.produced] for w, r in of_forward.items()}))
            outputs.append(found)
            kinds.update({k: g for k, g in found.items() if k not in kinds})
        return kinds, back, outputs

    def _called_back(self, back: list[Any], outputs: list[Any], kinds: dict[Any, Any], gs: list[Any]) -> dict[int, Any]:
        """The way back as a line of each program: its results."""
        lines = {}
        for w, branches in self.lines.items():
            of_worker = [dict(zip(found, self.pieces([*found.values()], w), strict=True)) for found in outputs]
            keys = {k: _size(self.rec.piece(g, w)) for k, g in kinds.items()}
            line = BackBranches(branches, [r[w] for r in back], of_worker, keys, f"{self.name}_back")
            lines[w] = line, [self.saved[w], *self.pieces(gs, w), *self.outer(w, line.outer)]

        with self._quiet():
            self.save_again(self.lines, self.arguments, self.saved)
        return self.rec.call(lines, [r for regions in [*self.forward, *back] for r in regions.values()])


def closed_over(where: str, count: int) -> ClosureError:
    """The error for differentiated arrays that are no operands, where pred differs between workers."""
    return ClosureError.at(
        where,
        got=f"a function that uses {count} differentiated array{'s' * (count > 1)} besides its operands, where pred "
        "differs between workers",
        need="operands: their cotangents meet on all workers, whichever function they ran",
        mend="pass them: spmd.cond(pred, f, g, x, w), with functions of x and w",
    )


def _agree(x: Any, y: Any) -> bool:
    """Whether results of the two functions have one form; a number takes that of an array that holds it."""
    if is_number(x) or is_number(y):
        if np.shape(value_of(x)) != np.shape(value_of(y)):
            return False
        return (is_number(x) or holds(x, y)) and (is_number(y) or holds(y, x))
    return _form(x) == _form(y)


def _form(x: Any) -> tuple[Any, ...]:
    return tuple(np.shape(value_of(x))), getattr(x, "dtype", None), layout_of_leaf(x)


def _size(piece: Any) -> tuple[Any, Any]:
    value = slot_of(piece)
    return np.shape(value), getattr(value, "dtype", np.dtype(float))


def _differ(g: Any, other: Any) -> bool:
    """Whether two sums are global arrays that lie differently."""
    return type(g) is PartitionedArray and type(other) is PartitionedArray and g.layout != other.layout
