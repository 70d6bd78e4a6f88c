"""Blocks that are put together, and boxes of blocks that are taken out and put in."""

from __future__ import annotations

from kernel_cases import FLOATING, NUMBERS, Family

family = Family("moves")


def blocks(draw):
    shape = draw.shape(0, 3)
    return [draw.array(shape) for _ in range(draw.integer(1, 5))], draw.choose("sum", "max", "min")


def sums(draw):
    return (blocks(draw)[0],)


family.case("combine", blocks)
family.case("combine", sums, dtypes=NUMBERS[2:], label="-complex")


def box_in(draw, shape):
    """A box of an array of this shape, that may be empty."""
    ends = [sorted((draw.integer(0, n), draw.integer(0, n))) for n in shape]
    return tuple((start, stop) for start, stop in ends)


def pack(draw):
    shape = draw.shape(0, 3)
    return draw.array(shape), box_in(draw, shape)


def parts(draw):
    shape = draw.shape(0, 3)
    boxes = [box_in(draw, shape) for _ in range(draw.integer(1, 4))]
    if draw.choose(True, False):
        boxes[0] = tuple((0, n) for n in shape)
    return shape, boxes, [draw.array(tuple(stop - start for start, stop in box)) for box in boxes]


def tiles(draw):
    """Boxes that cover the array, each entry once."""
    shape = draw.shape(1, 3)
    cut = draw.integer(0, shape[0])
    boxes = [((start, stop), *((0, n) for n in shape[1:])) for start, stop in ((0, cut), (cut, shape[0]))]
    return shape, boxes, [draw.array(tuple(stop - start for start, stop in box)) for box in boxes]


family.case("pack", pack, dtypes=(*FLOATING, "complex128"), ulps=0)
family.case("unpack", parts, dtypes=(*FLOATING, "complex128"), ulps=0)
family.case("unpack", tiles, dtypes=("float32",), ulps=0, label="-tiles")
family.case("add_boxes", parts, dtypes=(*FLOATING, "complex128"))

TestKernels = family.tests()
