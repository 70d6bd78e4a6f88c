"""Blocks that are put together, and boxes of blocks that are taken out and put in."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import FLOATING, NUMBERS, Family, dtype_of

from spmd.kernels import cpu, team

family = Family("moves")


def blocks(draw):
    shape = draw.shape(0, 3)
    return [draw.array(shape) for _ in range(draw.integer(1, 17))], draw.choose("sum", "max", "min")


def sums(draw):
    return (blocks(draw)[0],)


# What is added up is up to 3, and so are the errors, whatever remains.
family.case("combine", blocks, scale=9)
family.case("combine", sums, dtypes=NUMBERS[2:], label="-complex", scale=9)


def box_in(draw, shape):
    """A box of an array of this shape, that may be empty."""
    ends = [sorted((draw.integer(0, n), draw.integer(0, n))) for n in shape]
    return tuple((start, stop) for start, stop in ends)


def parts(draw):
    shape = draw.shape(0, 3)
    boxes = [box_in(draw, shape) for _ in range(draw.integer(1, 4))]
    if draw.choose(True, False):
        boxes[0] = tuple((0, n) for n in shape)
    return shape, tuple(boxes), [draw.array(tuple(stop - start for start, stop in box)) for box in boxes]


def tiles(draw):
    """Boxes that cover the array, each entry once."""
    shape = draw.shape(1, 3)
    cut = draw.integer(0, shape[0])
    boxes = [((start, stop), *((0, n) for n in shape[1:])) for start, stop in ((0, cut), (cut, shape[0]))]
    return shape, tuple(boxes), [draw.array(tuple(stop - start for start, stop in box)) for box in boxes]


family.case("unpack", parts, dtypes=(*FLOATING, "complex128"), ulps=0)
family.case("unpack", tiles, dtypes=("float32",), ulps=0, label="-tiles")
family.case("add_boxes", parts, dtypes=(*FLOATING, "complex128"))

TestKernels = family.tests()


def test_of_parts_in_one_place_the_last_one_counts_whoever_helps():
    shape, boxes = (2000, 300), (((0, 1500), (0, 300)), ((500, 2000), (0, 300)), ((900, 1100), (50, 100)))
    rng = np.random.default_rng(8)
    parts = [rng.standard_normal([stop - start for start, stop in box]) for box in boxes]
    want = cpu.unpack(shape, boxes, parts)
    for _ in range(5):
        with team.of(lambda: 4):
            np.testing.assert_array_equal(cpu.unpack(shape, boxes, parts), want)


@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64", "int8"])
def test_a_sum_may_be_written_into_what_came(dtype, how):
    """Into the first or the second of the blocks, with the same bits, whoever helps; the others stay."""
    if dtype == "complex64" and how == "max":
        return
    rng = np.random.default_rng(7)
    for shape in (), (5, 0), (1_500_000,), (1400, 1100):
        for count in 2, 4:
            blocks = [np.asarray(50 * rng.standard_normal(shape)).astype(dtype_of(dtype)) for _ in range(count)]
            want = cpu.combine(blocks, how)
            for k in 0, 1:
                given = [b.copy() for b in blocks]
                with team.of(lambda: 3):
                    found = cpu.combine(given, how, given[k])
                assert found is given[k]
                assert found.tobytes() == want.tobytes()
                assert all(
                    a.tobytes() == b.tobytes() for j, (a, b) in enumerate(zip(given, blocks, strict=True)) if j != k
                )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_numbers_are_added_up_in_float32(dtype):
    """2^k + 1 + 1 + ...: every single sum would be rounded down in the short dtype."""
    dtype = dtype_of(dtype)
    top = 2048 if dtype == np.float16 else 256
    blocks = [np.full((3, 2), n, dtype) for n in (top, 1, 1, 1, 1)]
    assert cpu.combine(blocks).dtype == dtype
    np.testing.assert_array_equal(cpu.combine(blocks).astype(float), top + 4)
    np.testing.assert_array_equal(cpu.combine([b.T[:, ::2] for b in blocks]).astype(float), top + 4)
    np.testing.assert_array_equal(cpu.combine(blocks, "max").astype(float), top)
