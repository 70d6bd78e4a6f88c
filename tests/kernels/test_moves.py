"""Blocks that are put together, and boxes of blocks that are taken out and put in."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FLOATING, NUMBERS, Family, dtype_of

from spmd.kernels import cpu
from spmd.kernels.cpu.moves import joiner
from spmd.kernels.parallel import split_work

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
        with split_work.SplitScope(lambda: 4):
            np.testing.assert_array_equal(cpu.unpack(shape, boxes, parts), want)


@given(
    cuts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=0, max_size=3),
    dtype=st.sampled_from(["float32", ">f8", "bool", "complex128", "bfloat16", "S3"]),
    data=st.data(),
)
def test_small_blocks_are_joined_at_once_where_they_lie_one_after_the_other(cuts, dtype, data):
    """cuts: the lengths of the blocks of a grid, in each dimension."""
    ends = [np.cumsum([0, *lengths]) for lengths in cuts]
    whole = np.arange(prod(sum(lengths) for lengths in cuts)).reshape([sum(lengths) for lengths in cuts])
    x = whole.astype(dtype_of(dtype) if dtype == "bfloat16" else dtype)
    grid = itertools.product(*([slice(*pair) for pair in itertools.pairwise(end)] for end in ends))
    places = data.draw(st.permutations([(*place, ...) for place in grid]))
    join = joiner(x.shape, x.dtype, places)
    entries = sorted(whole[place].ravel().tolist() for place in places)
    assert (join is not None) == ([*itertools.chain(*entries)] == list(range(whole.size)))
    if join is not None:
        actual = join([x[place] for place in places])
        assert actual.dtype == x.dtype
        assert actual.shape == x.shape
        assert actual.tobytes() == x.tobytes()
        assert actual.flags.aligned
        assert not actual.flags.writeable
    if places:
        assert joiner(x.shape, x.dtype, places[1:]) is None or not whole[places[0]].size


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
                with split_work.SplitScope(lambda: 3):
                    actual = cpu.combine(given, how, given[k])
                assert actual is given[k]
                assert actual.tobytes() == want.tobytes()
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
