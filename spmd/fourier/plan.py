"""Plans of Fourier transforms: data that can be printed, and run on the blocks of an array in a body."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from spmd.autodiff.tracer import Array
from spmd.fourier.blocks import transformed
from spmd.fourier.lines import FROM_REAL, TO_REAL, Line
from spmd.fourier.search import stages
from spmd.layout import Layout
from spmd.mesh import here
from spmd.operators.repartition import repartition
from spmd.ownership import reclaimed
from spmd.plan import plan as moves_between
from spmd.representations.tables import Printed, Report, Table

__all__ = ["FourierPlan", "Move", "Transform", "fourier_plan"]


@dataclass(frozen=True)
class Transform:
    """Transforms along dimensions that are whole, on each worker by itself. before, after: the layouts."""

    before: Layout
    lines: tuple[Line, ...]
    after: Layout

    @property
    def inverse(self) -> Transform:
        return Transform(self.after, tuple(line.inverse for line in reversed(self.lines)), self.before)

    def __str__(self) -> str:
        return ", ".join(map(str, self.lines))


@dataclass(frozen=True)
class Move:
    """A repartition from one layout to another."""

    before: Layout
    after: Layout

    @property
    def inverse(self) -> Move:
        return Move(self.after, self.before)

    @cached_property
    def cost(self) -> tuple[int, int]:
        """The messages that all workers send, and their entries."""
        source, target, copies = self.restricted
        sent = [move.box for move in moves_between(source, target) if move.source != move.target]
        entries = sum(math.prod(stop - start for start, stop in box) for box in sent)
        return len(sent) * copies, entries * copies

    @cached_property
    def restricted(self) -> tuple[Layout, Layout, int]:
        """The layouts over those axes only that one of them names, and how often these workers are there."""
        source, target = self.before, self.after
        if source.spec is None or target.spec is None:
            return source, target, 1
        axes = {n: size for n, size in source.axes.items() if n in source.spec.varying | target.spec.varying}
        source, target = (Layout(x.shape, x.spec, axes, x.cuts) for x in (source, target))
        return source, target, self.before.size // source.size

    def __str__(self) -> str:
        return f"repartition to {_lies(self.after)}"


def _lies(layout: Layout) -> str:
    """How an array lies, in short."""
    if layout.spec is not None:
        return str(layout.spec)
    return f"grid {tuple(len(c) for c in layout.cuts)} on workers {list(layout.workers or ())}"


@dataclass(frozen=True)
class FourierPlan(Printed):
    """Local transforms and repartitions that together are a Fourier transform. Hashable; equal plans do the same.

    `plan(x)`, in a body: this worker's block of the transform, from its block of the array. `print(plan)` shows the
    steps. steps: `Transform`s, and `Move`s from one layout to another. dtype: of the array.

        >>> with spmd.Mesh(x=2):
        ...     print(spmd.fft.plan((8, 8), P("x")))
        Fourier transform of complex128[8, 8] by P('x', None)
        step  what                         array             layout        messages  bytes
           1  fft along 1                  complex128[8, 8]  P('x', None)
           2  repartition to P(None, 'x')  complex128[8, 8]  P('x', None)         2    512
           3  fft along 0                  complex128[8, 8]  P(None, 'x')
        gives complex128[8, 8] by P(None, 'x'): 1 repartition, 2 messages, 512 bytes
    """

    source: Layout
    steps: tuple[Transform | Move, ...]
    norm: str
    dtype: np.dtype

    @property
    def out(self) -> Layout:
        """The layout of the transform."""
        return self.steps[-1].after if self.steps else self.source

    @property
    def inverse(self) -> FourierPlan:
        """The plan of the way back: the inverse transforms and repartitions in reverse order."""
        steps = tuple(step.inverse for step in reversed(self.steps))
        return FourierPlan(self.out, steps, self.norm, self._dtypes[-1])

    @property
    def gathers(self) -> bool:
        """Whether the array goes to fewer workers, because nothing else can be split."""
        moves = (step for step in self.steps if isinstance(step, Move))
        return any(len(move.after.holders) < len(move.before.holders) for move in moves)

    @property
    def repartitions(self) -> int:
        """The number of repartitions."""
        return sum(isinstance(step, Move) for step in self.steps)

    @property
    def messages(self) -> int:
        """The messages that all workers send."""
        return sum(step.cost[0] for step in self.steps if isinstance(step, Move))

    @property
    def nbytes(self) -> int:
        """The bytes that all workers send."""
        pairs = zip(self.steps, self._dtypes, strict=False)
        return sum(step.cost[1] * dtype.itemsize for step, dtype in pairs if isinstance(step, Move))

    @cached_property
    def _dtypes(self) -> list[np.dtype]:
        """The dtypes of the array before each step, and at the end."""
        dtypes = [self.dtype]
        for step in self.steps:
            dtype = dtypes[-1]
            for line in step.lines if isinstance(step, Transform) else ():
                dtype = np.result_type(dtype, np.complex64)
                if line.kind in TO_REAL:
                    dtype = np.finfo(dtype).dtype
            dtypes.append(dtype)
        return dtypes

    def __call__(self, x: Any) -> Any:
        # A holder, and no name: what nothing else refers to may be written to.
        holder, me = [x], here("spmd.fft").index
        del x
        for step in self.steps:
            if isinstance(step, Move):
                source, target, _ = step.restricted
                holder.append(repartition(holder.pop(), source, target))
                continue
            state = _bared(holder)
            writable = type(holder[0]) is np.ndarray and reclaimed(holder, 0)
            shape = step.after.block_shape(me)
            holder.append(transformed(holder.pop(), step.lines, self.norm, shape, writable))
            if state is not None:
                holder.append(Array(holder.pop(), state))
        return holder[0]

    def _report(self) -> Report:
        rows = []
        for number, (step, dtype) in enumerate(zip(self.steps, self._dtypes, strict=False), 1):
            messages = nbytes = ""
            if isinstance(step, Move):
                messages, nbytes = str(step.cost[0]), str(step.cost[1] * dtype.itemsize)
            array = f"{dtype}{[*step.before.shape]}"
            rows.append((str(number), str(step), array, _lies(step.before), messages, nbytes))
        head = f"Fourier transform of {self.dtype}{[*self.source.shape]} by {_lies(self.source)}"
        end = f"gives {self._dtypes[-1]}{[*self.out.shape]} by {_lies(self.out)}: {self.repartitions} repartition"
        end += f"{'s' * (self.repartitions != 1)}, {self.messages} messages, {self.nbytes} bytes"
        table = Table(rows, ("step", "what", "array", "layout", "messages", "bytes"), (0, 4, 5))
        return Report(head, [table, end], gap="\n")


def _bared(holder: list[Any]) -> Any:
    """Replace an array that has a state and no derivative by its data. Returns the state; None: nothing is replaced."""
    x = holder[0]
    if type(x) is not Array or x.tape is not None or x.state is None or type(x.value) is not np.ndarray:
        return None
    holder[0] = x.value
    return x.state


@lru_cache(maxsize=1024)
def fourier_plan(
    source: Layout,
    lines: tuple[Line, ...],
    norm: str = "backward",
    target: Layout | None = None,
    dtype: np.dtype | None = None,
    fixed: frozenset[int] = frozenset(),
) -> FourierPlan:
    """The plan of these lines for an array that lies so. target: how the result is to lie; None: as it comes. fixed:
    dimensions that are not split by what splits others."""
    if dtype is None:
        dtype = np.dtype(float if any(line.kind in FROM_REAL for line in lines) else complex)
    found: list[Transform | Move] = []
    layout = source
    for stage in stages(source, lines, target, fixed):
        if stage.before != layout:
            found.append(Move(layout, stage.before))
        if stage.lines:
            found.append(Transform(*stage))
        layout = stage.after
    return FourierPlan(source, tuple(found), norm, dtype)
