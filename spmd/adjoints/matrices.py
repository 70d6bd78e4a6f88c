"""Where F* is not F^H: their matrices, column by column, or some entries of large ones; and what kind of fault their
difference looks like."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from spmd.adjoints.dot import DotTest
from spmd.adjoints.probing import Lazily, wrong_entries
from spmd.adjoints.report import AdjointReport, Entry, Place, number, plain
from spmd.adjoints.trial import InBody, read_only, state_in
from spmd.autodiff.tracer import Array, value_of
from spmd.device import to_host
from spmd.layout import Layout, P
from spmd.mesh import Worker

__all__ = ["SHOWN", "UNITS", "Matrices", "enter", "enter_some", "entries", "hint", "units"]

Shape = tuple[int, ...]

UNITS = 192
"""How many applications of F and F* together may serve to find their matrices."""


class Matrices(InBody):
    """The matrices of F and F*, column by column.

    reals: over the reals, in which a complex number is two: shows maps that are not linear over the complex numbers.
    """

    def __init__(self, test: DotTest, worker: Worker, reals: bool = False):
        super().__init__(test, worker, (test.seed, 0))
        self.reals = reals or test.real

    def found(self) -> tuple[np.ndarray, np.ndarray, Sequence[Place], Sequence[Place]] | None:
        """F^H and F* as matrices, and what their rows and columns stand for; None if that would take too long."""
        inputs, outputs = self._sides()
        n, m = len(inputs.places), len(outputs.places)
        if n + m > UNITS:
            return None
        columns = [outputs.read(self.forward(*inputs.made(unit))) for unit in units(n)]
        rows = [inputs.read(self.back(*outputs.made(unit))) for unit in units(m)]
        forward, backward = np.array(columns, complex).reshape(n, m), np.array(rows, complex).reshape(m, n)
        return self._all_of(forward).conj(), self._all_of(backward).T, inputs.places, outputs.places

    def some(self, bound: float, wanted: int) -> tuple[list[Entry], int]:
        """Some of the entries in which F* is not F^H, found by bisection, and how many entries there are in all."""
        inputs, outputs = self._sides()
        found = wrong_entries(
            lambda x: self._all_of(outputs.read(self.forward(*inputs.made(x)))),
            lambda y: self._all_of(inputs.read(self.back(*outputs.made(y)))),
            (len(inputs.places), len(outputs.places)),
            bound,
            self.test.seed,
            wanted,
        )
        return entries(found, inputs.places, outputs.places), len(inputs.places) * len(outputs.places)

    def _sides(self) -> tuple[_Side, _Side]:
        """The arguments and the results of F as vectors."""
        xs = [self.argument(k) for k in range(len(self.test.shapes))]
        outs = self.run(xs)
        kinds = {np.dtype(a.dtype).kind == "c" for a in (*xs, *outs)}
        self.split = (self.reals and True in kinds) or len(kinds) > 1
        starts = [self._start(self.layout(k)) for k in range(len(xs))]
        inputs = _Side(self, xs, "x", "source", starts)
        return inputs, _Side(self, outs, "y", "target", [self._start(layout) for layout in self._results(outs)])

    def _all_of(self, mine: np.ndarray) -> np.ndarray:
        """What all workers have filled in: each what it owns, and zeros elsewhere."""
        return np.sum(self.gather(mine), axis=0)

    def _results(self, outs: Sequence) -> list[Layout | None]:
        """How the results are laid out, where that is known."""
        target = getattr(self.test.f, "dst", None)
        if isinstance(target, Layout) and len(outs) == 1:
            return [target]
        texts = self.texts(json.dumps([np.shape(value_of(a)) for a in outs]))
        return [self._joined(spec, parts) for spec, *parts in zip(self.promised, *map(json.loads, texts), strict=True)]

    def _joined(self, spec: P | Layout | None, parts: Sequence[list[int]]) -> Layout | None:
        """The layout of blocks of these shapes, if they are blocks of one array."""
        if not isinstance(spec, P):
            return spec
        try:
            return self.test.mesh.joined(tuple(map(tuple, parts)), spec, "spmd.check_adjoint")
        except ValueError:
            return None

    def _start(self, layout: Layout | None) -> Shape | None:
        if layout is None:
            return None
        return tuple(start for start, _ in layout.boxes[self.worker.group(tuple(layout.axes)).index])


class _Side:
    """All arguments of F, or all its results, as one vector: each number once, however many workers hold it."""

    def __init__(self, body: Matrices, arrays: Sequence, name: str, side: str, starts: Sequence[Shape | None]):
        self.body, self.arrays, self.rooted = body, arrays, body.rooted(side)
        mesh = body.worker.mesh
        mine = [
            (np.shape(value_of(a)), start, body.owns(a, self.rooted)) for a, start in zip(arrays, starts, strict=True)
        ]
        held = [json.loads(text) for text in body.texts(json.dumps(mine))]
        self.first: dict[tuple[int, int], int] = {}  # where the numbers of a part on a worker begin
        parts: list[tuple[int, Callable[[int], Place]]] = []
        count = 0
        for k, a in enumerate(arrays):
            units = ("re", "im") if body.split and np.dtype(a.dtype).kind == "c" else ("",)
            for w in range(mesh.size):
                shape, start, owned = held[w][k]
                if owned:
                    self.first[k, w] = count
                    place = partial(_place, Place(name, k, mesh.describe(w), ()), tuple(shape), start, units)
                    parts.append((count, place))
                    count += math.prod(shape) * len(units)
        firsts = [first for first, _ in parts]

        def at(i: int) -> Place:
            first, place = parts[bisect_right(firsts, i) - 1]
            return place(i - first)

        self.places = Lazily(count, at)

    def _owner(self, a) -> int:
        """The first worker that holds what this worker holds of an array."""
        worker = self.body.worker
        varying = state_in(a, worker).varying
        alike = tuple(n for n in worker.mesh.axes if n not in varying and n not in self.rooted)
        return worker.group(alike).members[0] if alike else worker.index

    def made(self, vector: np.ndarray) -> list[Array]:
        """The blocks of which a vector holds the numbers."""
        made = []
        for k, a in enumerate(self.arrays):
            first, shape = self.first[k, self._owner(a)], np.shape(value_of(a))
            size = math.prod(shape)
            if self.body.split and np.dtype(a.dtype).kind == "c":
                mine = vector[first : first + 2 * size]
                mine = mine[::2] + 1j * mine[1::2]
            else:
                mine = vector[first : first + size]
            data = np.array(mine, a.dtype).reshape(shape)
            made.append(Array(read_only(data, self.body.worker), state_in(a, self.body.worker)))
        return made

    def read(self, arrays: Sequence) -> np.ndarray:
        """Blocks as a vector: what this worker owns of it."""
        vector = np.zeros(len(self.places), complex)
        for k, (a, like) in enumerate(zip(arrays, self.arrays, strict=True)):
            first = self.first.get((k, self.body.worker.index))
            if first is not None:
                data = np.asarray(to_host(value_of(a))).reshape(-1)
                if self.body.split and np.dtype(like.dtype).kind == "c":
                    data = np.stack([np.real(data), np.imag(data)], axis=-1).reshape(-1)
                vector[first : first + data.size] = data
        return vector


def _place(part: Place, shape: Shape, start: Sequence[int] | None, units: Sequence[str], i: int) -> Place:
    """Number i of a part: the units of an entry follow each other."""
    i, unit = divmod(i, len(units))
    local = tuple(map(int, np.unravel_index(i, shape)))
    whole = None if start is None else tuple(k + s for k, s in zip(local, start, strict=True))
    return part._replace(local=local, whole=whole, unit=units[unit])


def units(count: int) -> Iterator[np.ndarray]:
    """The unit vectors."""
    for j in range(count):
        unit = np.zeros(count)
        unit[j] = 1
        yield unit


def entries(found: Iterable[tuple], xs: Sequence[Place], ys: Sequence[Place]) -> list[Entry]:
    """Entries by what their rows and columns stand for."""
    return [Entry(xs[i], ys[j], number(np.complex128(a)), number(np.complex128(b))) for i, j, a, b in found]


def enter_some(report: AdjointReport, found: Sequence[Entry], entries_of: int) -> None:
    """Enter into a report some entries that bisection has found, or that it has found none."""
    report.entries, report.entries_of, report.bisected = list(found), entries_of, True


SHOWN = 8
"""How many entries a report lists."""


def enter(
    report: AdjointReport,
    needed: np.ndarray,
    given: np.ndarray,
    xs: Sequence[Place],
    ys: Sequence[Place],
    room: float,
) -> None:
    """Enter into a report where F*, `given`, is not F^H, and what kind of fault that looks like."""
    wrong = np.abs(needed - given) > room
    report.differing, report.entries_of = int(np.sum(wrong)), wrong.size
    first = ((int(i), int(j), needed[i, j], given[i, j]) for i, j in np.argwhere(wrong)[:SHOWN])
    report.entries = entries(first, xs, ys)
    report.hint = hint(needed, given, room, np.array([x.unit == "im" for x in xs], bool))


def hint(needed: np.ndarray, given: np.ndarray, room: float, imaginary: np.ndarray) -> str:
    """What kind of fault turns the one matrix into the other. imaginary: which rows are imaginary parts."""

    def same(a, b) -> bool:
        return a.shape == b.shape and bool(np.all(np.abs(a - b) <= room))

    wrong = np.abs(needed - given) > room
    if not wrong.any():
        return ""
    there, here = np.abs(needed) > room, np.abs(given) > room
    if same(given, needed.conj()) or same(given, np.where(imaginary[:, None], -needed, needed)):
        return "the conjugate is forgotten, or taken once too often"
    if not here.any():
        return "F* gives zeros"
    if same(given, needed.conj().T):
        return "F* does what F does: it goes the same way once more, and not back"
    ratios = np.divide(given, needed, out=np.full(given.shape, np.nan, complex), where=there)
    factors = ratios[wrong & there]
    if np.array_equal(there, here) and factors.size and np.allclose(factors, factors[0]):
        which = "every value" if wrong.sum() == there.sum() else "some values"
        factor, times = factors[0], np.round(factors[0].real)
        if times > 1 and np.isclose(factor, times, rtol=1e-9):
            return f"{which} counted {times:.0f} times: copies are added, or a sum is taken once more"
        return f"{which} multiplied by {plain(number(factor))}"
    if not (wrong & here).any():
        rows = wrong.any(axis=1)
        if (here[rows].any(axis=1)).all():
            return "values overwritten that should be added, or a sum that is missing: not all that meet arrive"
        lost = int(wrong.sum())
        return f"{lost} value{'s' * (lost > 1)} lost on the way back"
    if not (wrong & there).any():
        return "values arrive where F has taken nothing from"
    if there.sum() == here.sum() and np.allclose(np.sort_complex(needed[there]), np.sort_complex(given[here])):
        return "values arrive at the wrong place: a shift or a permutation that goes the wrong way"
    return ""
