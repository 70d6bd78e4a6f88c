"""Products of global arrays: the numbers of NumPy, no more moved than any layouts of operands need, and no operand
whole on a worker that is too large for it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from process_cases import each_engine, ended_well

import spmd
from spmd import Layout, P
from spmd.global_ops import contractions
from spmd.global_ops.assignments import Product, assign
from spmd.transport.plan import PlaceBoxes

LETTERS = "ijkl"
DTYPES = ["f8", "f4", "c16", "i8", "i4", "?"]
in_batches = pytest.mark.parametrize(
    "batch", [*range(20), *(pytest.param(k, marks=pytest.mark.full) for k in range(20, 300))]
)
PER_BATCH = 10


def drawn_layout(shape: tuple[int, ...], axes: dict[str, int], rng: np.random.Generator, uneven: bool) -> Layout:
    """Each axis splits some dimension or none, in any order; cuts are balanced, or drawn."""
    dims: list[list[str]] = [[] for _ in shape]
    for name in rng.permutation(sorted(axes)):
        if shape and rng.random() < 0.75:
            dims[rng.integers(len(shape))].append(str(name))
    cuts = []
    for n, names in zip(shape, dims, strict=True):
        parts = math.prod(axes[name] for name in names)
        ends = np.sort(rng.integers(0, n + 1, parts - 1))
        cuts.append(tuple(np.diff([0, *ends, n]).tolist()) if uneven and names and rng.random() < 0.7 else None)
    return Layout(shape, P(*(tuple(names) or None for names in dims)), axes, cuts)


def drawn_array(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    values = rng.integers(0, 2, shape) if dtype == "?" else rng.integers(-5, 6, shape)
    return (values + 1j * rng.integers(-5, 6, shape) if dtype == "c16" else values).astype(dtype)


class Case:
    """A product of drawn arrays in drawn layouts."""

    def __init__(self, seed: Any, counts: tuple[int, ...], once: bool, lengths: tuple[int, int]):
        self.rng = rng = np.random.default_rng(seed)
        self.axes = {"x": int(rng.integers(1, 4)), "y": int(rng.integers(1, 4))}
        self.lengths = {c: int(rng.integers(*lengths)) for c in LETTERS}
        self.words = ["".join(rng.choice([*LETTERS], rng.integers(1, 4), not once)) for _ in range(rng.choice(counts))]
        used = sorted({*"".join(self.words)})
        self.out = "".join(rng.permutation([c for c in used if rng.random() < 0.6]))
        self.text = f"{','.join(self.words)}->{self.out}"
        shapes = [tuple(self.lengths[c] for c in word) for word in self.words]
        self.arrays = [drawn_array(shape, rng.choice(DTYPES), rng) for shape in shapes]
        self.layouts = [drawn_layout(shape, self.axes, rng, rng.random() < 0.5) for shape in shapes]

    def __str__(self) -> str:
        return f"{self.text} of {self.layouts}"

    def operands(self) -> list[Any]:
        return [spmd.put(a, layout) for a, layout in zip(self.arrays, self.layouts, strict=True)]

    def assigned(self, limit: int) -> Any:
        dtypes = [a.dtype for a in self.arrays]
        dtype = contractions._summed_as(np.result_type(*dtypes))
        shapes, sizes = tuple(a.shape for a in self.arrays), tuple(d.itemsize for d in dtypes)
        words, axes = tuple(self.words), tuple(self.axes.items())
        return assign(Product(words, self.out, shapes, tuple(self.layouts), sizes, dtype, axes), limit)


@in_batches
@pytest.mark.parametrize("limit", [0, 64])
def test_products_are_those_of_numpy(batch, limit, monkeypatch):
    monkeypatch.setenv("SPMD_GATHER_LIMIT", str(limit))
    for k in range(PER_BATCH):
        case = Case((batch, k), (1, 2, 2, 3), False, (0, 8))
        with spmd.Mesh(**case.axes):
            want = np.einsum(case.text, *case.arrays)
            try:
                have = np.einsum(case.text, *case.operands())
            except spmd.errors.LayoutError:
                # What is left is a diagonal, whose dimensions no axis splits.
                assert limit == 0, str(case)
                assert any(len({*word}) < len(word) for word in case.words), str(case)
                continue
            np.testing.assert_allclose(have.numpy(), want, rtol=1e-5, err_msg=str(case))
            assert have.dtype == want.dtype, str(case)


# Bytes


@in_batches
def test_as_few_bytes_are_moved_as_by_any_layouts(batch):
    """And as many as were declared. Two operands, two axes."""
    for k in range(PER_BATCH):
        case = Case((1, batch, k), (2,), True, (1, 25))
        found = case.assigned(64 << 20)
        with spmd.Mesh(**case.axes):
            operands = case.operands()
            with spmd.ledger() as log:
                np.einsum(case.text, *operands).numpy()
        moved = sum(record.bytes for record in log.workers.values())
        assert moved == found.moved, str(case)
        assert moved <= min(alternatives(case)), str(case)


def test_a_ring_moves_what_is_declared(monkeypatch):
    monkeypatch.setenv("SPMD_GATHER_LIMIT", "0")
    rings = 0
    for k in range(150):
        case = Case((2, k), (2,), True, (1, 25))
        found = case.assigned(0)
        letters, around = "".join((*case.words, case.out)), sum(map(Layout.__ne__, found.held, found.used))
        if not around or around > 1 or any(letters.count(c) == 1 for c in letters):
            continue  # two operands may come more than once; letters that nothing else has are summed before
        rings += 1
        with spmd.Mesh(**case.axes):
            operands = case.operands()
            with spmd.ledger() as log:
                np.einsum(case.text, *operands).numpy()
        assert sum(record.bytes for record in log.workers.values()) == found.moved, str(case)
    assert rings > 10


def alternatives(case: Case):
    """The bytes that each choice of layouts of both operands and the result would move.

    Along an axis that splits an operand the work on one letter is divided, or none is. Each operand with this letter
    may be split, or whole; the result is split, or summed.
    """
    held = [held_entries(layout) for layout in case.layouts]
    names = sorted({n for layout in case.layouts for n in layout.spec.axes})
    for order in itertools.permutations(names):
        for letters in itertools.product((None, *sorted({*"".join(case.words)})), repeat=len(names)):
            letter_of = dict(zip(order, letters, strict=True))
            by_letter = {c: tuple(n for n in order if letter_of[n] == c) for c in letters if c is not None}
            for cuts in itertools.product(*(cuts_of(case, c, axes) for c, axes in by_letter.items())):
                blocks = dict(zip(by_letter, cuts, strict=True))
                for whole in itertools.product((False, True), repeat=2):
                    nbytes = sum(
                        operand_bytes(case, k, held[k], {} if whole[k] else by_letter, blocks) for k in range(2)
                    )
                    yield nbytes + result_bytes(case, by_letter, blocks)


def cuts_of(case: Case, c: str, names: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Balanced blocks of a letter, and those that operands have over the same axes."""
    length, found = case.lengths[c], set()
    blocks = [length]
    for name in names:
        n = case.axes[name]
        blocks = [b // n + (k < b % n) for b in blocks for k in range(n)]
    found.add(tuple(blocks))
    for word, layout in zip(case.words, case.layouts, strict=True):
        if c in word and layout.spec.dims[word.index(c)] == names:
            found.add(layout.cuts[word.index(c)])
    return sorted(found)


def workers(case: Case):
    for x in range(case.axes["x"]):
        for y in range(case.axes["y"]):
            yield {"x": x, "y": y}


def interval(case: Case, place: dict[str, int], names: tuple[str, ...], blocks: tuple[int, ...]) -> slice:
    k = 0
    for name in names:
        k = k * case.axes[name] + place[name]
    return slice(sum(blocks[:k]), sum(blocks[: k + 1]))


def held_entries(layout: Layout) -> list[np.ndarray]:
    """By worker which entries it has."""
    found = []
    for worker in range(layout.size):
        mask = np.zeros(layout.shape, bool)
        mask[layout.slices(worker)] = True
        found.append(mask)
    return found


def operand_bytes(case: Case, k: int, held: list[np.ndarray], by_letter: dict, blocks: dict) -> int:
    missing = 0
    for worker, place in enumerate(workers(case)):
        index = tuple(
            interval(case, place, by_letter[c], blocks[c]) if c in by_letter else slice(None) for c in case.words[k]
        )
        missing += np.count_nonzero(~held[worker][index])
    return missing * case.arrays[k].dtype.itemsize


def result_bytes(case: Case, by_letter: dict, blocks: dict) -> int:
    """Small blocks are added by recursive doubling: log2 n messages from each of a power of two of workers; the others
    send theirs before, and get the sum."""
    n = math.prod(case.axes[name] for c, names in by_letter.items() if c not in case.out for name in names)
    rounds = n.bit_length() - 1
    messages = (1 << rounds) * rounds + 2 * (n - (1 << rounds))
    entries = 0
    for place in workers(case):
        index = [interval(case, place, by_letter[c], blocks[c]) for c in case.out if c in by_letter]
        entries += math.prod(s.stop - s.start for s in index) * math.prod(
            case.lengths[c] for c in case.out if c not in by_letter
        )
    return entries // n * messages * contractions._summed_as(np.result_type(*case.arrays)).itemsize


def test_uneven_blocks_that_agree_stay():
    with spmd.Mesh(x=3):
        u = spmd.put(np.arange(20.0).reshape(10, 2), P("x"))[1:8]
        v = spmd.put(np.arange(30.0).reshape(10, 3), P("x"))[1:8]
        with spmd.ledger() as log:
            product = u @ np.ones((2, 4))
        assert (log.bytes, product.layout.cuts[0]) == (0, u.layout.cuts[0])
        with spmd.ledger() as log:
            np.testing.assert_allclose((u.T @ v).numpy(), u.numpy().T @ v.numpy())
        assert log.verbs["exchange"] == 0


# Rings

RINGS = {
    "rows and columns": ("ij,jk->ik", {"x": 2, "y": 3}, (P("x", "y"), P("x", "y"))),
    "rows": ("ij,kj->ik", {"x": 3}, (P("x"), P("x"))),
    "a letter that is summed": ("ij,jk->ik", {"x": 4}, (P("x"), P("x"))),
    "one axis of two": ("ij,kj->ik", {"x": 2, "y": 2}, (P(("x", "y")), P("x"))),
    "both axes": ("ij,kj->ik", {"x": 2, "y": 2}, (P(("x", "y")), P(("x", "y")))),
    "batches": ("bij,bjk->bik", {"x": 2, "y": 2}, (P("x", "y"), P("y", "x"))),
    "three operands": ("ij,kj,lj->ikl", {"x": 2, "y": 2}, (P("x"), P("y"), P(("x", "y")))),
    "empty blocks": ("ij,ki->jk", {"x": 9}, (P(None, "x"), P("x"))),
}
LENGTHS = {"b": 3, "i": 7, "j": 5, "k": 8, "l": 3}


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("uneven", [False, True])
def test_derivatives_of_rings(name, uneven, scheduler, monkeypatch):
    monkeypatch.setenv("SPMD_GATHER_LIMIT", "0")
    monkeypatch.setenv("SPMD_SCHEDULER", scheduler)
    text, axes, specs = RINGS[name]
    words, rng = text.partition("->")[0].split(","), np.random.default_rng(7)
    arrays = [rng.normal(size=[LENGTHS[c] for c in word]) for word in words]
    tangents = [rng.normal(size=a.shape) for a in arrays]
    which = tuple(range(len(arrays)))

    def value(*operands):
        return np.sum(np.sin(np.einsum(text, *operands)))

    def curvature(*operands):
        return sum(np.sum(g**2) for g in spmd.grad(value, which)(*operands))

    with spmd.Mesh(**axes) as mesh:
        layouts = [mesh.layout(a.shape, spec) for a, spec in zip(arrays, specs, strict=True)]
        if uneven:
            layouts = [shifted(layout) for layout in layouts]
        operands = [spmd.put(a, layout) for a, layout in zip(arrays, layouts, strict=True)]
        for f in (value, curvature):
            have, want = spmd.grad(f, which)(*operands), spmd.grad(f, which)(*arrays)
            for g, w, layout in zip(have, want, layouts, strict=True):
                np.testing.assert_allclose(g.numpy(), w, rtol=1e-8, atol=1e-10)
                assert g.layout == layout
        moved = [spmd.put(t, layout) for t, layout in zip(tangents, layouts, strict=True)]
        _, have = spmd.jvp(value, tuple(operands), tuple(moved))
        np.testing.assert_allclose(have, spmd.jvp(value, tuple(arrays), tuple(tangents))[1], rtol=1e-9)


def shifted(layout: Layout) -> Layout:
    """The same axes, in uneven blocks: the first gets one entry of the last."""
    cuts = [(cut[0] + 1, *cut[1:-1], cut[-1] - 1) if len(cut) > 1 and cut[-1] else cut for cut in layout.cuts]
    return Layout(layout.shape, layout.spec, layout.axes, cuts)


def test_blocks_that_go_round_are_never_together(monkeypatch):
    """The largest that a worker makes of what comes, in derivatives too: a block of u or of the product, which is twice
    as large. With the usual limit it is the array."""
    a = np.random.default_rng(0).normal(size=(1024, 512))
    received: list[int] = []
    complete = PlaceBoxes.complete

    def noted(self, plan, shapes):
        received.append(math.prod(self.out) * plan.dtype.itemsize)
        return complete(self, plan, shapes)

    monkeypatch.setattr(PlaceBoxes, "complete", noted)

    def value(u):
        return np.sum((u @ u.T) ** 2)

    second = spmd.grad(lambda u: np.sum(spmd.grad(value)(u) ** 2))
    with spmd.Mesh(x=8):
        u = spmd.put(a, P("x"))
        for limit, largest in (("1", a.nbytes // 4), ("64", a.nbytes)):
            monkeypatch.setenv("SPMD_GATHER_LIMIT", limit)
            received.clear()
            for f in (value, spmd.grad(value), second):
                f(u)
            assert max(received) == largest


@pytest.mark.host("its memory is counted")
@each_engine
def test_rings_between_processes(python):
    assert ended_well("rings.py", python=python, n=4, timeout=200) == "right\n"


def test_what_no_ring_helps_is_an_error(monkeypatch):
    monkeypatch.setenv("SPMD_GATHER_LIMIT", "1")
    with spmd.Mesh(x=2):
        u = spmd.put(np.zeros((600, 600)), P("x"))
        with pytest.raises(spmd.errors.LayoutError, match="at most 1 MiB, to be gathered"):
            np.einsum("ii->i", u)
        assert np.einsum("ij,kj->", u, u).shape == ()


@pytest.mark.parametrize("limit", ["0", "64"])
def test_operands_on_a_grid(limit, monkeypatch):
    monkeypatch.setenv("SPMD_GATHER_LIMIT", limit)
    a, b = np.arange(35.0).reshape(7, 5), np.arange(15.0).reshape(5, 3)
    with spmd.Mesh(x=2, y=2) as mesh:
        u = spmd.put(a, Layout.grid((7, 5), (3, 1), mesh.axes, [3, 1, 2], [(4, 0, 3), None]))
        v = spmd.put(b, P("y"))
        np.testing.assert_allclose((u @ v).numpy(), a @ b)
        gradient = spmd.grad(lambda u: np.sum(np.sin(u @ v)))(u)
        np.testing.assert_allclose(gradient.numpy(), np.cos(a @ b) @ b.T)
        assert gradient.layout == u.layout
        assert np.einsum("ij,kj->ik", u, u).shape == (7, 7)


@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("specs", [(P("x", "y"), P("x", "y")), (P("x"), P("y")), (P(), P("x", "y")), (P("x"), None)])
def test_inner_products_are_differentiated_in_either_factor(dtype, specs):
    rng = np.random.default_rng(0)
    whole = [
        rng.normal(size=(11, 9)).astype(dtype) + (1j * rng.normal(size=(11, 9)) if dtype is complex else 0)
        for _ in "ab"
    ]

    def loss(product):
        return lambda a, b: np.real(product(a, b))

    with spmd.Mesh(x=2, y=2):
        split = [x if spec is None else spmd.put(x, spec) for x, spec in zip(whole, specs, strict=True)]
        for n in range(2):
            expected = spmd.grad(loss(np.vdot), n)(*whole)
            assert np.allclose(np.asarray(spmd.grad(loss(spmd.inner), n)(*split)), expected)
            assert np.allclose(np.asarray(spmd.jit(spmd.grad(loss(spmd.inner), n))(*split)), expected)
