"""Steps and branches in functions that `spmd.jit` records, by the programs of one worker or of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff.checkpoint import closure_nodes, traced_by
from spmd.autodiff.loops.taped import StepTape
from spmd.autodiff.staging.program import COMM
from spmd.autodiff.staging.recorder import Program, is_slot, one_line, slot_of
from spmd.autodiff.staging.steps import Region, Unrollable
from spmd.autodiff.staging.together import RECORDING, Together, at_worker
from spmd.autodiff.tape import ACTIVE, Tape, redirected
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import lower
from spmd.layout import Layout, P
from spmd.loops.steps import as_number, is_number, widens
from spmd.mesh import WORKER, Worker
from spmd.operators.varying import vary
from spmd.placement import put

__all__ = ["RecordedSteps", "Recording", "adopted", "current", "is_recorded", "serves"]

Flat = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]
"""A function of two lists of leaves, the carry and the rest, which gives two such lists."""


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

    def run(self, f: Callable[[Worker], Any]) -> dict[int, Any]:
        """f(worker) on every worker whose program is recorded here."""
        if self.worker is not None:
            return {self.worker.index: f(self.worker)}
        assert self.together is not None
        return self.together.mesh.run(f).results

    def call(self, lines: Mapping[int, tuple[Any, list[Any]]], regions: Iterable[Region]) -> dict[int, Any]:
        """Call function(comm, *arguments) as a line of each program. lines: (function, arguments) by worker.

        regions: what the function runs; the line has an effect if one of these has."""
        effect = any(line.effect for region in regions for line in region.lines)

        def called(worker: Worker) -> Any:
            assert worker.program is not None
            fun, args = lines[worker.index]
            return worker.program.call(fun, (COMM, *args), effect=effect, comm=worker.comm)

        return self.run(called)


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


class RecordedSteps:
    """Functions whose lines are cut out of the programs, to be run by one line.

    live: the regions that lines are made of. noted: by worker, the stand-ins that the lines take, by number.
    tape: the one that records the call; None if nothing is differentiated.
    """

    def __init__(self, rec: Recording, where: str):
        self.rec, self.where = rec, where
        self.regions: dict[int, Region] = {}
        self.live: list[Region] = []
        self.noted: dict[int, dict[int, Any]] = {w: {} for w in rec.programs}
        self.tape: Tape | None = None

    @property
    def name(self) -> str:
        return self.where.removeprefix("spmd.").replace(" of ", "_")

    @contextmanager
    def region(self, after: Mapping[int, Region] | None = None, whole: bool = False) -> Iterator[None]:
        """What is done within the block becomes lines of regions of their own, which `cut` takes out.

        after: by worker a region whose values these may use. whole: no line stays outside."""
        programs = self.rec.programs.items()
        self.regions = {w: Region(program, None if after is None else after[w], whole) for w, program in programs}
        for region in self.regions.values():
            region.open()
        try:
            yield
        finally:
            for region in self.regions.values():
                region.close()

    def cut(self, more: Mapping[int, Sequence[int]] | None = None) -> dict[int, Region]:
        """The regions of the last block. more: by worker, numbers of values from outside that change, too."""
        for w, region in self.regions.items():
            region.cut(() if more is None else more[w])
            self.noted[w].update(region.noted)
            region.noted = {}
        self.live += self.regions.values()
        return self.regions

    def drop(self) -> None:
        """The regions of the last block are not used."""
        dropped = [*self.regions.values()]
        self.live = [region for region in self.live if region not in dropped]

    def stand_in(self, x: Any) -> Any:
        """What stands for a value that changes from call to call."""
        pieces = {w: region.stand_in(slot_of(self.rec.piece(x, w))) for w, region in self.regions.items()}
        return self.rec.like(x, pieces)

    def outer(self, w: int, numbers: Sequence[int]) -> list[Any]:
        """The values of these numbers, from outside of the regions."""
        return [self.noted[w][i] for i in numbers]

    def pieces(self, values: Sequence[Any], w: int) -> list[Any]:
        """What a program has for some values; they may come from outside of the regions."""
        pieces = [self.rec.piece(x, w) for x in values]
        steps = self.rec.programs[w].steps
        for x in filter(is_slot, pieces):
            if steps is not None and steps.inside.get(x.index) not in self.live:
                steps.note(x)
            self.noted[w][x.index] = x
        return pieces

    def save_again(
        self, lines: Mapping[int, Any], arguments: Mapping[int, list[Any]], saved: Mapping[int, Any]
    ) -> None:
        """Run lines once more, for what they now keep for the way back. All by worker; saved: what stands for it."""

        def save(worker: Worker) -> None:
            w = worker.index
            *_, saved[w].value = lines[w](worker.comm, *map(slot_of, arguments[w]))

        self.rec.run(save)

    def tried(self, step: Flat, carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any], set[Tape]]:
        """What a step returns for stand-ins of these leaves, below all tapes, and the tapes that it closes over.

        No lines are left. Raises Unrollable where a leaf is traced elsewhere, by another thread."""
        tapes, count = ACTIVE.get(), len(carry)
        values = [*carry, *x]
        traced = set(traced_by(values))
        if not traced <= set(tapes):
            raise Unrollable
        for tape in reversed(tapes):
            values = [lower(v, tape) for v in values]
        pairs = [(tape, Tape()) for tape in tapes]
        with self.region(), redirected(pairs, step=True):
            stand_ins = [self.stand_in(v) for v in values]
            new, ys = step(stand_ins[:count], stand_ins[count:])
        traced |= {tape for tape, side in pairs if closure_nodes(tape, side, [*new, *ys])}
        self.cut()
        self.drop()
        return new, ys, traced

    def taped(
        self, step: Flat, carry: Sequence[Any], x: Sequence[Any], traced: set[int], whole: bool = False
    ) -> StepTape:
        """A step on stand-ins for these leaves, with those at the positions `traced` on the tape."""
        assert self.tape is not None
        side = Tape()
        with self.region(whole=whole):
            values = [self.stand_in(v) for v in (*carry, *x)]
            with redirected([(self.tape, side)], step=True):
                run = StepTape(step, self.tape, side, values[: len(carry)], values[len(carry) :], traced)
        self.cut()
        return run


def is_recorded(x: Any) -> bool:
    """Whether a value is computed by the programs that are recorded, and may change from call to call."""
    bare = value_of(x)
    return is_slot(bare) or (type(bare) is PartitionedArray and any(map(is_slot, bare.__spmd_parts__())))


def serves(x: Any, after: Any) -> bool:
    """Whether a leaf of a first carry, `adopted`, serves all steps of a loop. after: what a step makes of it.

    A number does not if an array like `after` rounds it, or is not known to hold it, or if `after` is a number of a
    wider kind."""
    if not is_number(x):
        return True
    if is_number(after):
        return not widens(x, after)
    number = value_of(x)
    known = not is_slot(number) and (type(x) is not Array or x.tape is None)
    return known and np.asarray(number, after.dtype).item() == number


def adopted(x: Any, like: Any) -> Any:
    """A number as an array like the one that a step makes of it, or as a number of its kind; arrays unchanged."""
    if not is_number(x):
        return x
    if is_number(like):
        return as_number(x, like)
    bare = value_of(like)
    if type(bare) is PartitionedArray:
        return put(np.zeros((), like.dtype), P(), bare.mesh) + x
    if type(x) is Array and x.tape is not None:
        x = x.astype(like.dtype)
        return vary(x, like.state) if type(like) is Array and like.state is not x.state else x
    number = x.value if type(x) is Array else x
    value = one_line(np.asarray, (number, like.dtype)) if is_slot(number) else np.asarray(number, like.dtype)
    return Array(value, like.state) if type(like) is Array else value
