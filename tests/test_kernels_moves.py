"""Blocks that are put together."""

from __future__ import annotations

from kernel_cases import NUMBERS, Family

family = Family("moves")


def blocks(draw):
    shape = draw.shape(0, 3)
    return [draw.array(shape) for _ in range(draw.integer(1, 5))], draw.choose("sum", "max", "min")


def sums(draw):
    return (blocks(draw)[0],)


family.case("combine", blocks)
family.case("combine", sums, dtypes=NUMBERS[2:], label="-complex")

TestKernels = family.tests()
