"""The geometry of windows, as kernels have it: from its meaning, and the same as the planner's over blocks."""

from __future__ import annotations

import itertools

import pytest

import spmd
from spmd.kernels.windows import Window, output_length, same_padding

CASES = list(
    itertools.product(range(9), (1, 2, 3, 5), (1, 2, 3), ((0, 0), (1, 1), (2, 0), (0, 3), (-1, -2)), (1, 2), (0, 1))
)


@pytest.mark.parametrize("n", range(9))
def test_lengths_and_parts_are_those_of_the_planner(n):
    for _, kernel, stride, padding, dilation, ceil in (case for case in CASES if case[0] == n):
        case = (kernel, stride, padding, dilation, bool(ceil))
        m = output_length(n, *case)
        plan = spmd.plan_window(n, kernel, stride=stride, padding=padding, dilation=dilation, ceil=bool(ceil), inputs=3)
        assert m == plan.output_length, (n, case)
        w = Window.of(n, *case)
        for (first, end), needs, pads in zip(plan.output_bounds, plan.needs, plan.pads, strict=True):
            if first < end and needs[0] < n and needs[1] > 0:
                (start, stop), around = w.part(first, end)
                assert (start - around[0], stop + around[1]) == needs, (n, case)
                assert around == pads, (n, case)


def test_taps_inside_are_those_that_read_inputs():
    for n, kernel, stride, padding, dilation, ceil in CASES:
        w = Window.of(n, kernel, stride, padding, dilation, bool(ceil))
        for j in range(kernel):
            reads = {o: o * stride - padding[0] + j * dilation for o in range(w.m)}
            for start, stop in ((0, n), (-padding[0], w.padded)):
                assert list(range(*w.inside(j, stop, start))) == [o for o, i in reads.items() if start <= i < stop]


@pytest.mark.parametrize("word", ["same", "same_lower"])
def test_same_padding_is_the_planners(word):
    for n, kernel, stride, dilation in itertools.product(range(9), (1, 2, 3, 5), (1, 2, 3), (1, 2)):
        taps = spmd.plan_window(n, kernel, stride=stride, padding=word, dilation=dilation).taps
        assert taps is not None
        padding = same_padding(n, kernel, stride, dilation, lower=word == "same_lower")
        assert padding == (taps.low, taps.high)
        assert output_length(n, kernel, stride, padding, dilation) == -(-n // stride)
