"""Stencils against sums of slices of the whole array, padded by np.pad: of small blocks and of slabs, in every mixture
of the two, with lengths that change from call to call, and by the short way of virtual workers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.kernels import cpu, of
from spmd.kernels.windows import reach
from spmd.operators import stencil as module
from spmd.operators.halo_geometry import along
from spmd.transport.local import run_plan

MODES = {"zero": "constant", "periodic": "wrap"}
FIVE = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
FAR = ((-3, 1), (0, 0), (5, -2), (1, 1))  # beyond the next block, and round corners
WEIGHTS = {FIVE: (0.6, 0.1, 0.1, 0.125, 0.125), FAR: (-1.0, 0.5, 0.25, 2.0)}
MESHES = [
    ({"x": 1}, P("x")),
    ({"x": 3}, P("x")),
    ({"x": 3}, P(None, "x")),
    ({"x": 2, "y": 3}, P("x", "y")),
    ({"x": 2, "y": 2}, P(("y", "x"))),
    ({"x": 2, "y": 2}, P("y")),
]


def by_slices(x: np.ndarray, offsets, boundary) -> np.ndarray:
    ends = boundary if isinstance(boundary, tuple) else (boundary,) * x.ndim
    wide, widths = x, reach(offsets)
    for d, (pair, end) in enumerate(zip(widths, ends, strict=True)):
        wide = np.pad(wide, [pair if e == d else (0, 0) for e in range(x.ndim)], MODES[end])
    boxes = (
        tuple(slice(low + i, low + i + n) for (low, _), i, n in zip(widths, offset, x.shape, strict=True))
        for offset in offsets
    )
    return sum(w * wide[box] for w, box in zip(WEIGHTS[offsets], boxes, strict=True))


def five_times(offsets, spec: P, boundary):
    def body(x):
        for _ in range(5):
            x = spmd.stencil(x, spec, offsets, WEIGHTS[offsets], boundary)
        return x

    return body


# 14 * 11 entries on six workers are blocks of 28 and 21, on three of 55 and 44: some are small, and some are not.
@pytest.mark.parametrize("small", [0, 24, 50, 1 << 15])
@pytest.mark.parametrize(("scheduler", "jitted"), [("lockstep", False), ("lockstep", True), ("threads", False)])
def test_values_and_gradients_whatever_is_small(small, scheduler, jitted, monkeypatch):
    monkeypatch.setattr(module, "_SMALL_BLOCK", small)
    rng = np.random.default_rng(0)
    boundaries = ["zero", "periodic", ("periodic", "zero")]
    for (axes, spec), offsets, boundary in itertools.product(MESHES, (FIVE, FAR), boundaries):
        mesh = spmd.Mesh(transport="local", scheduler=scheduler, **axes)
        whole, c = rng.standard_normal((2, 14, 11))
        body = five_times(offsets, spec, boundary)
        f = mesh.map(body, in_specs=spec, out_specs=spec)
        f = spmd.jit(f) if jitted else f
        expected = whole
        for _ in range(5):
            expected = by_slices(expected, offsets, boundary)
        _, pull = spmd.vjp(f, whole)
        adjoint = None
        for _ in range(3):  # the first call of a line takes another way than later ones
            assert np.allclose(f(whole).numpy(), expected, rtol=1e-12, atol=1e-9), (axes, spec, offsets, boundary)
            again = np.asarray(pull(spmd.put(c, spec, mesh))[0])
            assert adjoint is None or np.array_equal(adjoint, again)
            adjoint = again
        assert np.isclose(np.vdot(c, expected), np.vdot(adjoint, whole), rtol=1e-10)


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_the_same_bits_from_blocks_and_from_slabs(scheduler, monkeypatch):
    whole = np.random.default_rng(1).standard_normal((14, 11))
    whole[::3] = -0.0
    for (axes, spec), offsets, boundary in itertools.product(MESHES, (FIVE, FAR), ("zero", "periodic")):
        results = []
        for small in (0, 24, 50, 1 << 15):
            monkeypatch.setattr(module, "_SMALL_BLOCK", small)
            mesh = spmd.Mesh(transport="local", scheduler=scheduler, **axes)
            f = mesh.map(five_times(offsets, spec, boundary), in_specs=spec, out_specs=spec)
            results += [f(whole).numpy().tobytes() for _ in range(2)]
        assert len({*results}) == 1, (axes, spec, offsets, boundary)


@pytest.mark.parametrize(
    ("axes", "spec"), [({"x": 3}, P("x")), ({"x": 3}, P(None, "x")), ({"x": 3, "y": 2}, P("x", "y"))]
)
def test_lengths_of_other_blocks_may_change_from_call_to_call(axes, spec):
    """A worker whose own block stays as it is must not use what it has learnt of others before."""
    mesh = spmd.Mesh(transport="local", scheduler="lockstep", **axes)
    rng, d = np.random.default_rng(2), spec.dims.index(("x",))

    def body(whole, sizes):
        start, n = sum(sizes[: spmd.worker_index("x")]), sizes[spmd.worker_index("x")]
        x = spmd.pvary(whole, tuple(axes))[along(d, start, start + n)]
        if "y" in axes:
            x = x[:, 3 * spmd.worker_index("y") :][:, :3]
        return five_times(FAR, spec, "periodic")(x)

    f = mesh.map(body, in_specs=(P(), None), out_specs=spec)
    for sizes in [(4, 4, 4), (4, 4, 4), (4, 4, 1), (4, 4, 1), (4, 2, 6), (4, 4, 4), (4, 4, 4), (4, 8, 0)] * 3:
        shape = [6, 6]
        shape[d] = sum(sizes)
        whole = expected = rng.standard_normal(shape)
        for _ in range(5):
            expected = by_slices(expected, FAR, "periodic")
        assert np.allclose(f(whole, sizes).numpy(), expected, rtol=1e-12, atol=1e-9), sizes


@pytest.mark.parametrize(
    ("axes", "spec", "boundary", "meetings", "lines"),
    [
        ({"x": 4}, P("x"), "zero", 1, 1),
        ({"x": 4}, P(None, "x"), "periodic", 1, 1),
        ({"x": 2, "y": 2}, P("x", "y"), "zero", 4, 2),
        ({"x": 2, "y": 2}, P("y"), "periodic", 2, 2),
    ],
)
def test_later_calls_of_a_line_take_the_short_way(axes, spec, boundary, meetings, lines, monkeypatch):
    """All small blocks along a line are one call of the kernel, and neighbours meet once for each dimension."""
    mesh = spmd.Mesh(transport="local", scheduler="lockstep", **axes)
    f = spmd.jit(mesh.map(five_times(FIVE, spec, boundary), in_specs=spec, out_specs=spec))
    x = spmd.put(np.random.default_rng(3).standard_normal((8, 8)), spec, mesh)
    first = [f(x).numpy() for _ in range(3)]
    completed, kernels = [], []
    complete, kernel = run_plan.RepeatedPlan._complete, of(x.blocks[0]).stencil

    def counted(self, met, workers):
        completed.append(complete(self, met, workers))
        return completed[-1]

    monkeypatch.setattr(run_plan.RepeatedPlan, "_complete", counted)
    monkeypatch.setattr(cpu, "stencil", lambda *args: kernels.append(args) or kernel(*args))
    assert np.array_equal(f(x).numpy(), first[0])
    assert completed == [True] * (5 * meetings)
    assert len(kernels) == 5 * lines
