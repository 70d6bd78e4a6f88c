"""The entries in which F* is not F^H, from their matrices or by bisection, and the kind of fault that they suggest."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from spmd.adjoints.bisection import LazySequence, wrong_entries
from spmd.adjoints.dot_test import DotTest
from spmd.adjoints.report import AdjointReport, Entry, Place, as_number, number_text
from spmd.adjoints.trial import InBody, device_block, host_array, state_in
from spmd.autodiff.tracer import Array, value_of
from spmd.layout import Layout, P
from spmd.mesh import Worker

__all__ = ["ENTRIES_SHOWN", "UNIT_LIMIT", "Matrices", "enter", "hint", "located_entries"]

Shape = tuple[int, ...]

UNIT_LIMIT = 192
"""The most applications of F and F* together for computing their matrices."""


class Matrices(InBody):
    """The matrices of F and F*, column by column.

    reals: over the reals, where a complex number counts as two. This shows a wrong conjugate.
    """

    def __init__(self, test: DotTest, worker: Worker, reals: bool = False):
        super().__init__(test, worker, (test.seed, 0))
        self.reals = reals or test.real

    def compute(self) -> tuple[np.ndarray, np.ndarray, Sequence[Place], Sequence[Place]] | None:
        """F^H and F* as matrices, and the places of their rows and columns; None if that would take too long."""
        inputs, outputs = self._sides()
        n, m = len(inputs.places), len(outputs.places)
        if n + m > UNIT_LIMIT:
            return None
        columns = [outputs.read(self.forward(*inputs.blocks_of(unit))) for unit in np.eye(n)]
        rows = [inputs.read(self.back(*outputs.blocks_of(unit))) for unit in np.eye(m)]
        forward, backward = np.array(columns, complex).reshape(n, m), np.array(rows, complex).reshape(m, n)
        return self._summed(forward).conj(), self._summed(backward).T, inputs.places, outputs.places

    def some_entries(self, bound: float, count: int) -> tuple[list[Entry], int]:
        """Some of the entries in which F* is not F^H, by bisection, and the number of all entries."""
        inputs, outputs = self._sides()
        wrong = wrong_entries(
            lambda x: self._summed(outputs.read(self.forward(*inputs.blocks_of(x)))),
            lambda y: self._summed(inputs.read(self.back(*outputs.blocks_of(y)))),
            (len(inputs.places), len(outputs.places)),
            bound,
            self.test.seed,
            count,
        )
        return located_entries(wrong, inputs.places, outputs.places), len(inputs.places) * len(outputs.places)

    def _sides(self) -> tuple[_Side, _Side]:
        """The arguments and the results of F as vectors."""
        xs = [self.argument(k) for k in range(len(self.test.shapes))]
        outs = self.run(xs)
        kinds = {np.dtype(a.dtype).kind == "c" for a in (*xs, *outs)}
        self.split = (self.reals and True in kinds) or len(kinds) > 1
        starts = [self._block_start(self.layout(k)) for k in range(len(xs))]
        inputs = _Side(self, xs, "x", "source", starts)
        starts = [self._block_start(layout) for layout in self._result_layouts(outs)]
        return inputs, _Side(self, outs, "y", "target", starts)

    def _summed(self, own: np.ndarray) -> np.ndarray:
        """The sum over the workers of vectors in which each has filled in the entries that it owns."""
        return np.sum(self.all_gather(own), axis=0)

    def _result_layouts(self, outs: Sequence) -> list[Layout | None]:
        """The layouts of the results; None where they are unknown."""
        target = getattr(self.test.f, "dst", None)
        if isinstance(target, Layout) and len(outs) == 1:
            return [target]
        texts = self.texts(json.dumps([np.shape(value_of(a)) for a in outs]))
        of_results = zip(self.promised, *map(json.loads, texts), strict=True)
        return [self._joint_layout(spec, shapes) for spec, *shapes in of_results]

    def _joint_layout(self, spec: P | Layout | None, parts: Sequence[list[int]]) -> Layout | None:
        """The layout of blocks of these shapes, if they are blocks of one array."""
        if not isinstance(spec, P):
            return spec
        try:
            return self.test.mesh.joined(tuple(map(tuple, parts)), spec, "spmd.check_adjoint")
        except ValueError:
            return None

    def _block_start(self, layout: Layout | None) -> Shape | None:
        if layout is None:
            return None
        return tuple(start for start, _ in layout.boxes[self.worker.group(tuple(layout.axes)).index])


class _Side:
    """All arguments of F, or all its results, as one vector that contains copies once."""

    def __init__(self, body: Matrices, arrays: Sequence, name: str, side: str, starts: Sequence[Shape | None]):
        self.body, self.arrays, self.rooted = body, arrays, body.rooted(side)
        mesh = body.worker.mesh
        own = [
            (np.shape(value_of(a)), start, body.owns(a, self.rooted)) for a, start in zip(arrays, starts, strict=True)
        ]
        everyones = [json.loads(text) for text in body.texts(json.dumps(own))]
        self.offsets: dict[tuple[int, int], int] = {}  # of the numbers of a part on a worker
        parts: list[tuple[int, Callable[[int], Place]]] = []
        count = 0
        for k, a in enumerate(arrays):
            units = ("re", "im") if body.split and np.dtype(a.dtype).kind == "c" else ("",)
            for w in range(mesh.size):
                shape, start, owned = everyones[w][k]
                if owned:
                    self.offsets[k, w] = count
                    place = partial(_place, Place(name, k, mesh.describe(w), ()), tuple(shape), start, units)
                    parts.append((count, place))
                    count += math.prod(shape) * len(units)
        offsets = [offset for offset, _ in parts]

        def place_of(i: int) -> Place:
            offset, place = parts[bisect_right(offsets, i) - 1]
            return place(i - offset)

        self.places = LazySequence(count, place_of)

    def _owner(self, a) -> int:
        """The first worker that holds what this worker holds of an array."""
        worker = self.body.worker
        varying = state_in(a, worker).varying
        copy_axes = tuple(n for n in worker.mesh.axes if n not in varying and n not in self.rooted)
        return worker.group(copy_axes).members[0] if copy_axes else worker.index

    def blocks_of(self, vector: np.ndarray) -> list[Array]:
        """A vector as blocks of this worker."""
        blocks = []
        for part, a in enumerate(self.arrays):
            offset, shape = self.offsets[part, self._owner(a)], np.shape(value_of(a))
            size = math.prod(shape)
            if self.body.split and np.dtype(a.dtype).kind == "c":
                numbers = vector[offset : offset + 2 * size]
                numbers = numbers[::2] + 1j * numbers[1::2]
            else:
                numbers = vector[offset : offset + size]
            data = np.array(numbers, a.dtype).reshape(shape)
            blocks.append(Array(device_block(data, self.body.worker), state_in(a, self.body.worker)))
        return blocks

    def read(self, arrays: Sequence) -> np.ndarray:
        """Blocks as a vector, with zeros in the entries that this worker does not own."""
        vector = np.zeros(len(self.places), complex)
        for k, (a, like) in enumerate(zip(arrays, self.arrays, strict=True)):
            offset = self.offsets.get((k, self.body.worker.index))
            if offset is not None:
                data = host_array(a).reshape(-1)
                if self.body.split and np.dtype(like.dtype).kind == "c":
                    data = np.stack([np.real(data), np.imag(data)], axis=-1).reshape(-1)
                vector[offset : offset + data.size] = data
        return vector


def _place(part: Place, shape: Shape, start: Sequence[int] | None, units: Sequence[str], i: int) -> Place:
    """Number i of a part: the units of an entry follow each other."""
    i, unit = divmod(i, len(units))
    local = tuple(map(int, np.unravel_index(i, shape)))
    whole = None if start is None else tuple(k + s for k, s in zip(local, start, strict=True))
    return part._replace(local=local, whole=whole, unit=units[unit])


def located_entries(wrong: Iterable[tuple], xs: Sequence[Place], ys: Sequence[Place]) -> list[Entry]:
    """Entries with the places of their rows and columns."""
    return [Entry(xs[i], ys[j], as_number(np.complex128(a)), as_number(np.complex128(b))) for i, j, a, b in wrong]


ENTRIES_SHOWN = 8
"""How many entries a report lists."""


def enter(
    report: AdjointReport,
    expected: np.ndarray,
    actual: np.ndarray,
    xs: Sequence[Place],
    ys: Sequence[Place],
    tolerance: float,
) -> None:
    """Enter the entries in which F*, `actual`, is not F^H, `expected`, and the kind of fault that they suggest."""
    wrong = np.abs(expected - actual) > tolerance
    report.differing, report.entries_of = int(np.sum(wrong)), wrong.size
    wrong_indices = ((int(i), int(j), expected[i, j], actual[i, j]) for i, j in np.argwhere(wrong)[:ENTRIES_SHOWN])
    report.entries = located_entries(wrong_indices, xs, ys)
    report.hint = hint(expected, actual, tolerance, np.array([x.unit == "im" for x in xs], bool))


def hint(expected: np.ndarray, actual: np.ndarray, tolerance: float, imaginary: np.ndarray) -> str:
    """The kind of fault that turns one matrix into the other. imaginary: which rows are imaginary parts."""

    def same(a, b) -> bool:
        return a.shape == b.shape and bool(np.all(np.abs(a - b) <= tolerance))

    wrong = np.abs(expected - actual) > tolerance
    if not wrong.any():
        return ""
    expected_nonzero, actual_nonzero = np.abs(expected) > tolerance, np.abs(actual) > tolerance
    if same(actual, expected.conj()) or same(actual, np.where(imaginary[:, None], -expected, expected)):
        return "the conjugate is forgotten, or taken once too often"
    if not actual_nonzero.any():
        return "F* gives zeros"
    if same(actual, expected.conj().T):
        return "F* does what F does: it goes the same way once more, and not back"
    ratios = np.divide(actual, expected, out=np.full(actual.shape, np.nan, complex), where=expected_nonzero)
    factors = ratios[wrong & expected_nonzero]
    if np.array_equal(expected_nonzero, actual_nonzero) and factors.size and np.allclose(factors, factors[0]):
        which = "every value" if wrong.sum() == expected_nonzero.sum() else "some values"
        factor, times = factors[0], np.round(factors[0].real)
        if times > 1 and np.isclose(factor, times, rtol=1e-9):
            return f"{which} counted {times:.0f} times: copies are added, or a sum is taken once more"
        return f"{which} multiplied by {number_text(as_number(factor))}"
    if not (wrong & actual_nonzero).any():
        rows = wrong.any(axis=1)
        if (actual_nonzero[rows].any(axis=1)).all():
            return "values are overwritten that should be added, or a sum is missing"
        lost = int(wrong.sum())
        return f"{lost} value{'s' * (lost > 1)} lost on the way back"
    if not (wrong & expected_nonzero).any():
        return "values arrive where F has taken nothing from"
    before, after = np.sort_complex(expected[expected_nonzero]), np.sort_complex(actual[actual_nonzero])
    if before.size == after.size and np.allclose(before, after):
        return "values arrive at the wrong place: a shift or a permutation that goes the wrong way"
    return ""
