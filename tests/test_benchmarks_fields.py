"""What the benchmarks compute by hand, against a few lines of NumPy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from benchmarks.fields import plane, stencil_autograd, stencil_numpy
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
