"""What the benchmarks compute by hand, against a few lines of NumPy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from benchmarks.fields import plane, stencil_autograd, stencil_numpy
from benchmarks.loops import Ditch, block_spmd, lake, stencil_spmd, water_spmd
from benchmarks.transposes import FUTURE, cube, cube_alone, matrix, trip_copies


def stepped(u: np.ndarray) -> np.ndarray:
    p = np.pad(u, 1)
    return 0.6 * u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2])


@pytest.mark.parametrize("case", [partial(stencil_numpy, 3), stencil_autograd])
def test_steps_of_the_stencil_and_their_gradient(case):
    if case is stencil_autograd:
        pytest.importorskip("autograd")
    u = plane(16)
    for _ in range(4):
        u = stepped(u)
    energy = 0.5 * np.sum(u * u)
    for _ in range(4):
        u = stepped(u)
    made = case(16, 4)
    made.run(2)
    value, grad = made.tell()
    assert np.isclose(value, energy, rtol=1e-12)
    assert np.allclose(grad, u, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("read", [False, True])
def test_copies_are_there_and_back(read):
    made = trip_copies(512, read)
    made.run(1)
    there, back, sums = made.tell()
    assert np.array_equal(there, matrix(512))
    assert np.array_equal(back, matrix(512))
    assert np.allclose(sums, [half.sum() for half in np.split(matrix(512), 2)], rtol=1e-4)


def test_transforms_alone_are_those_of_the_work():
    pytest.importorskip("scipy")
    made = cube_alone(8)
    made.run(1)
    axes = np.meshgrid(*[np.fft.fftfreq(8, 1 / 8) ** 2] * 3)
    assert np.allclose(*made.tell(), np.fft.ifftn(np.fft.fftn(cube(8)) * np.exp(-FUTURE * sum(axes))).real)


def flowed(q: np.ndarray) -> np.ndarray:
    """A step of shallow water by rolls."""
    h, m, n = q
    u, v, pressure = m / h, n / h, h * h / 2
    fluxes = [(m, n), (m * u + pressure, m * v), (n * u, n * v + pressure)]
    near = sum(np.roll(q, s, d) for d in (1, 2) for s in (1, -1)) / 4
    lost = [np.roll(f, -1, 0) - np.roll(f, 1, 0) + np.roll(g, -1, 1) - np.roll(g, 1, 1) for f, g in fluxes]
    return near - 0.2 * np.stack(lost)


@pytest.mark.parametrize("rows", [2, 3, 7])
def test_water_by_hand_is_the_scheme_and_its_derivative(rows):
    q, steps, rng = lake(7), 5, np.random.default_rng(1)

    def energy(q):
        for _ in range(steps):
            q = flowed(q)
        return 0.5 * np.sum(q * q)

    value, grad = Ditch(rows, 7, steps).run(q)
    assert np.isclose(value, energy(q), rtol=1e-13)
    for _ in range(3):
        d = rng.standard_normal(q.shape)
        slope = (energy(q + 1e-5 * d) - energy(q - 1e-5 * d)) / 2e-5
        assert np.isclose(np.vdot(grad, d), slope, rtol=1e-7)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("points", [8, 9])
def test_water_of_ours_is_that_by_hand(points, jit):
    ours, by_hand = water_spmd(points, 6, jit=jit), Ditch(4, points, 6)
    for got, expected in zip(ours.tell(), by_hand.run(lake(points)), strict=True):
        assert np.abs(got - expected).max() <= 1e-12 * np.abs(expected).max()


def test_ways_of_a_stencil_and_of_a_step_of_training_agree():
    first = stencil_spmd(1, loop=False).tell()
    for workers, loop in (1, True), (2, True), (3, False):
        for got, expected in zip(stencil_spmd(workers, loop).tell(), first, strict=True):
            assert np.allclose(got, expected, rtol=1e-12)
    for got, expected in zip(block_spmd(True).tell(), block_spmd(False).tell(), strict=True):
        assert np.allclose(got, expected, rtol=1e-12)
