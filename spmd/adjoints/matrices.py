"""Where F* is not F^H: their matrices, column by column, and what kind of fault their difference looks like."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from spmd.adjoints.dot import DotTest
from spmd.adjoints.report import AdjointReport, Entry, Place, number, plain
from spmd.adjoints.trial import InBody, sealed, state_in
from spmd.autodiff.tracer import Array, value_of
from spmd.device import to_host
from spmd.layout import Layout, P
from spmd.mesh import Worker

__all__ = ["UNITS", "Matrices", "enter", "hint"]

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

    def found(self) -> tuple[np.ndarray, np.ndarray, list[Place], list[Place]] | None:
        """F^H and F* as matrices, and what their rows and columns stand for; None if that would take too long."""
        xs = [self.argument(k) for k in range(len(self.test.shapes))]
        outs = self.run(xs)
        kinds = {np.dtype(a.dtype).kind == "c" for a in (*xs, *outs)}
        self.split = (self.reals and True in kinds) or len(kinds) > 1
        starts = [self._start(self.layout(k)) for k in range(len(xs))]
        inputs = _Side(self, xs, "x", "source", starts)
        outputs = _Side(self, outs, "y", "target", [self._start(layout) for layout in self._results(outs)])
        if len(inputs.places) + len(outputs.places) > UNITS:
            return None
        columns = [outputs.read(self.forward(*unit)) for unit in inputs.units()]
        rows = [inputs.read(self.back(*unit)) for unit in outputs.units()]
        forward = np.array(columns, complex).reshape(len(inputs.places), len(outputs.places))
        backward = np.array(rows, complex).reshape(len(outputs.places), len(inputs.places))
        # Each worker has filled in what it owns, and zeros elsewhere.
        forward = np.sum(self.gather(forward), axis=0)
        backward = np.sum(self.gather(backward), axis=0)
        return forward.conj(), backward.T, inputs.places, outputs.places

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
        self.places: list[Place] = []
        self.first: dict[tuple[int, int], int] = {}  # where the numbers of a part on a worker begin
        for k, a in enumerate(arrays):
            units = ("re", "im") if body.split and np.dtype(a.dtype).kind == "c" else ("",)
            for w in range(mesh.size):
                shape, start, owned = held[w][k]
                if owned:
                    self.first[k, w] = len(self.places)
                    for index in np.ndindex(*shape):
                        whole = None if start is None else tuple(i + s for i, s in zip(index, start, strict=True))
                        self.places += [Place(name, k, mesh.describe(w), index, whole, unit) for unit in units]

    def _owner(self, a) -> int:
        """The first worker that holds what this worker holds of an array."""
        worker = self.body.worker
        varying = state_in(a, worker).varying
        alike = tuple(n for n in worker.mesh.axes if n not in varying and n not in self.rooted)
        return worker.group(alike).members[0] if alike else worker.index

    def units(self) -> Iterator[list[Array]]:
        """The unit vectors."""
        at = [self.first[k, self._owner(a)] for k, a in enumerate(self.arrays)]
        for j in range(len(self.places)):
            unit = []
            for a, first in zip(self.arrays, at, strict=True):
                split = self.body.split and np.dtype(a.dtype).kind == "c"
                data = np.zeros(np.shape(value_of(a)), a.dtype)
                k, imaginary = divmod(j - first, 2) if split else (j - first, 0)
                if 0 <= k < data.size:
                    data.reshape(-1)[k] = 1j if imaginary else 1
                unit.append(Array(sealed(data, self.body.worker), state_in(a, self.body.worker)))
            yield unit

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


_SHOWN = 8
"""How many entries a report lists."""


def enter(report: AdjointReport, needed: np.ndarray, given: np.ndarray, xs: list, ys: list, room: float) -> None:
    """Enter into a report where F*, `given`, is not F^H, and what kind of fault that looks like."""
    wrong = np.abs(needed - given) > room
    report.differing, report.entries_of = int(np.sum(wrong)), wrong.size
    report.entries = [
        Entry(xs[i], ys[j], number(needed[i, j]), number(given[i, j])) for i, j in np.argwhere(wrong)[:_SHOWN]
    ]
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
