"""Random numbers by counting: published vectors, references, the same bits on all engines, and distributions."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from emulator import device
from kernel_cases import FLOATING, Family, dtype_of

from spmd.kernels import cpu, jit
from spmd.kernels.cpu import philox
from spmd.kernels.reference.philox import philox4x32

family = Family("philox")


def where(draw):
    """A key, a shape, and a box of it."""
    key = draw.rng.integers(0, 2**32, 2, dtype=np.uint64).astype(np.uint32)
    shape = draw.shape(0, 3)
    ends = [sorted((draw.integer(0, n), draw.integer(0, n))) if draw.integer(0, 1) else (0, n) for n in shape]
    return key, shape, tuple(map(tuple, ends))


family.case("random_bits", lambda draw: (*where(draw), draw.dtype), dtypes=("uint32", "uint64"))
family.case("random_bits", lambda draw: (*where(draw), draw.dtype, 7), dtypes=("uint32",), label=" of a domain")
for low, high in ((0.0, 1.0), (-1.5, 2.0)):
    family.case(
        "random_uniform", lambda draw, e=(low, high): (*where(draw), draw.dtype, *e), scale=2, label=f" {low} to {high}"
    )
for name in ("random_normal", "random_exponential", "random_gumbel"):
    family.case(name, lambda draw: (*where(draw), draw.dtype), scale=1)
for low, high in ((-1.0, 2.0), (3.0, math.inf), (-2.5, 0.0)):
    family.case(
        "random_truncated",
        lambda draw, e=(low, high): (*where(draw), draw.dtype, *e),
        scale=1,
        dtypes=("float32", "float64"),
        label=f" {low} to {high}",
    )

TestKernels = family.tests()


# D. E. Shaw Research, Random123, kat_vectors: counter, key, words.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_words_are_those_that_were_published(counter, key, words):
    assert philox4x32(counter, key).tolist() == words


ENGINES = ["numpy", pytest.param("numba", marks=pytest.mark.skipif(not jit.available(), reason="needs numba"))]


@pytest.mark.parametrize("engine", ENGINES)
def test_entries_beyond_32_bits_of_counters(engine):
    # Entry 2^34 + 1 is word 1 of counter 2^32.
    key, at = np.array([3, 4], np.uint32), 2**34 + 1
    with jit.off() if engine == "numpy" else contextlib.nullcontext():
        actual = cpu.random_bits(key, (2**40,), ((at, at + 2),), "uint32", 9)
    assert actual.tolist() == philox4x32([0, 1, 0, 9], key)[1:3].tolist()


CALLS = [
    *(("random_bits", d, ()) for d in ("uint32", "uint64")),
    *((f"random_{name}", d, ()) for name in ("normal", "exponential", "gumbel") for d in FLOATING),
    *(("random_uniform", d, (-0.3, 0.9)) for d in FLOATING),
    *(("random_truncated", d, ends) for d in FLOATING for ends in ((-1.0, 2.0), (1.5, math.inf), (-3.0, -2.0))),
]


@pytest.mark.parametrize(("name", "dtype", "more"), CALLS, ids=lambda x: str(x))
def test_all_engines_give_the_same_bits(name, dtype, more):
    args = (np.array([2026, 7], np.uint32), (3, 5, 1031), ((1, 3), (0, 4), (2, 1030)), dtype_of(dtype), *more)
    with jit.off():
        actual = [getattr(cpu, name)(*args)]
    if jit.available():
        actual.append(getattr(cpu, name)(*args))
    if device.available():
        with device.emulated() as gpu:
            actual.append(device.get(getattr(gpu, name)(*map(device.put, args))))
    for other in actual[1:]:
        np.testing.assert_array_equal(other.view(f"u{other.itemsize}"), actual[0].view(f"u{other.itemsize}"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("box", [((0, 9), (0, 100_000)), ((2, 8), (1, 99_990)), ((3, 9), (5, 8))])
def test_a_box_is_a_part_of_the_whole(engine, box):
    # Rows longer than a piece of work, and shorter ones.
    key, shape = np.array([1, 2], np.uint32), (9, 100_000)
    with jit.off() if engine == "numpy" else contextlib.nullcontext():
        for dtype in "float32", "float64":
            whole = cpu.random_uniform(key, shape, ((0, 9), (0, 100_000)), dtype, 0, 1)
            part = cpu.random_uniform(key, shape, box, dtype, 0, 1)
            np.testing.assert_array_equal(part, whole[tuple(slice(*b) for b in box)])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("more", [1, 3, 50, 127])
def test_the_last_piece_of_a_long_row_may_be_short(engine, more):
    # Loops take short rows in another way, with room that was once made for long ones only.
    key, n = np.array([1, 2], np.uint32), philox._PIECE + more
    with jit.off() if engine == "numpy" else contextlib.nullcontext():
        for start in range(4):
            actual = cpu.random_bits(key, (n + 4,), ((start, start + n),), "uint32")
            last = cpu.random_bits(key, (n + 4,), ((start + n - 200, start + n),), "uint32")
            np.testing.assert_array_equal(actual[-200:], last)


# Distributions: what is drawn is fixed, so these tests cannot fail by chance.

N = 1 << 18


def drawn(name, *more, dtype="float64", key=(11, 13), n=N):
    return getattr(cpu, name)(np.array(key, np.uint32), (n,), ((0, n),), dtype, *more).astype(float)


def distributions():
    stats = pytest.importorskip("scipy.stats")
    return {
        "random_uniform": ((0, 1), stats.uniform()),
        "random_normal": ((), stats.norm()),
        "random_exponential": ((), stats.expon()),
        "random_gumbel": ((), stats.gumbel_r()),
        "random_truncated": ((-0.5, 2.0), stats.truncnorm(-0.5, 2.0)),
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "name", ["random_uniform", "random_normal", "random_exponential", "random_gumbel", "random_truncated"]
)
def test_numbers_follow_their_distribution(name, dtype):
    stats = pytest.importorskip("scipy.stats")
    more, law = distributions()[name]
    x = drawn(name, *more, dtype=dtype)
    assert stats.kstest(x, law.cdf).pvalue > 1e-3
    assert abs(x.mean() - law.mean()) < 4 * law.std() / math.sqrt(N)
    counts, _ = np.histogram(x, law.ppf(np.linspace(0, 1, 257)))  # also where few of them are
    assert stats.chisquare(counts).pvalue > 1e-3


def test_every_bit_is_set_half_the_time_and_on_its_own():
    words = cpu.random_bits(np.array([5, 6], np.uint32), (N,), ((0, N),), "uint32")
    bits = (words[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(float) - 0.5
    assert np.abs(bits.mean(0)).max() < 5 * 0.5 / math.sqrt(N)
    together = 4 * (bits.T @ bits / N - 0.25 * np.eye(32))
    assert np.abs(together).max() < 5 / math.sqrt(N)


def test_neighbours_do_not_depend_on_each_other():
    def correlation(x, y):
        return abs(np.corrcoef(x, y)[0, 1]) * math.sqrt(len(x))

    x = drawn("random_normal")
    assert max(correlation(x[:-k], x[k:]) for k in (1, 2, 3, 4, 8, 64)) < 4
    others = [(12, 13), (11, 12), (10, 13), (11, 13 ^ 1 << 31), (13, 11)]
    assert max(correlation(x, drawn("random_normal", key=k)) for k in others) < 4


def test_tails_are_drawn_to_the_end():
    # 2^32 words are too many to draw: the words at both ends, and at the cut between polynomials, are converted.
    ndtri = pytest.importorskip("scipy.special").ndtri
    from spmd.kernels.cpu import philox

    words = np.array([0, 1, 2, 1000, 2**20, 2**30, 2**31 - 2**27, 2**31 - 2**20, 2**31 - 2, 2**31 - 1], np.uint32)
    exact = -ndtri((2 * (2.0**31 - 1 - words) + 1) * 2.0**-33)
    for off in (jit.off(), contextlib.nullcontext()):
        with off:
            out = np.empty(len(words), np.float32)
            philox._normal(out, words)
            np.testing.assert_allclose(out, exact, rtol=5e-7)
            philox._normal(out, words | np.uint32(1 << 31))
            np.testing.assert_allclose(out, -exact, rtol=5e-7)
