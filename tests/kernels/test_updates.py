"""Steps of optimisers: the kernels against their references, and the bits of the formulas."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from emulator import device
from kernel_cases import FLOATING, Family, dtype_of

from spmd.kernels import cpu, jit, reference
from spmd.kernels.cpu import updates
from spmd.kernels.cpu.chunks import accurate

family = Family("updates")


def arrays(draw, state, least=-3.0):
    shape, wide = draw.shape(0, 3), accurate(draw.dtype)
    return *(draw.array(shape) for _ in range(2)), *(draw.array(shape, wide, low=low) for low in (least, 0)[-state:])


# What is subtracted is up to 3, and so are its errors, whatever remains.
family.case("sgd", lambda draw: (*arrays(draw, 0)[:2], None, 0.1, 0.0, False), label=" alone", scale=3)
family.case("sgd", lambda draw: (*arrays(draw, 1), 0.1, 0.9, draw.choose(True, False)), kept=(1,), scale=3)
family.case(
    "adamw",
    lambda draw: (*arrays(draw, 2), 0.02, 0.9, 0.99, 1e-6, draw.choose(0.0, 0.1), draw.integer(1, 9)),
    kept=(1, 2),
    scale=3,
)

TestKernels = family.tests()

CALLS = [
    ("sgd", 1, (0.1, 0.9, True)),
    ("adamw", 2, (0.02, 0.9, 0.999, 1e-8, 0.01, 3)),
    ("adamw", 2, (0.1, 0.8, 0.9, 0.0, 0.0, 1)),
]


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(("name", "state", "more"), CALLS)
def test_all_engines_have_the_bits_of_the_formula(name, state, more, dtype):
    rng, n = np.random.default_rng(0), 100_003 if dtype == "float32" else 1003
    dtype = dtype_of(dtype)
    p, g = (rng.normal(size=n).astype(dtype) for _ in range(2))
    states = [np.abs(rng.normal(size=n)).astype(accurate(dtype)) for _ in range(state)]
    wide = [a.astype(accurate(dtype)) for a in (p, g)]
    exact = getattr(reference, name)(*wide, *states, *more)
    for off in (jit.off(), contextlib.nullcontext()):
        with off:
            actual = getattr(cpu, name)(p, g, *states, *more)
            overwritten = [a.copy() for a in (p, *states)]
            over = getattr(cpu, name)(overwritten[0], g, *overwritten[1:], *more, over=True)
        for f, o, a, e in zip(actual, over, overwritten, exact, strict=True):
            assert o is a
            np.testing.assert_array_equal(f, e.astype(f.dtype))
            np.testing.assert_array_equal(o, f)
    overwritten = [a.copy() for a in (wide[0], *states)]
    for o, a, e in zip(
        getattr(reference, name)(overwritten[0], wide[1], *overwritten[1:], *more, over=True),
        overwritten,
        exact,
        strict=True,
    ):
        assert o is a
        np.testing.assert_array_equal(o, e)
    if device.available() and n < 10_000:
        with device.emulated() as gpu:
            actual = device.get(getattr(gpu, name)(*map(device.put, (p, g, *states)), *more))
            overwritten = [device.put(a) for a in (p, *states)]
            getattr(gpu, name)(overwritten[0], device.put(g), *overwritten[1:], *more, over=True)
            for f, a in zip(actual, device.get(tuple(overwritten)), strict=True):
                np.testing.assert_array_equal(a, f)
        for f, e in zip(actual, exact, strict=True):
            np.testing.assert_array_equal(f, e.astype(f.dtype))


@pytest.mark.skipif(not jit.available(), reason="without numba nothing is compiled")
def test_strided_gradients_compile_nothing_more():
    p, g = np.ones(6, np.float32), np.arange(12, dtype=np.float32)
    cpu.sgd(p, g[:6].copy(), None, 0.5, 0.0, False)
    count = len(updates._descend._compiled.signatures)
    for strided in (g[::2], g[5::-1], np.broadcast_to(g[3:4], 6)):
        new, _ = cpu.sgd(p, strided, None, 0.5, 0.0, False)
        np.testing.assert_array_equal(new, 1 - 0.5 * strided)
    assert len(updates._descend._compiled.signatures) == count
