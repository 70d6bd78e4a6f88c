"""split_stages: the best contiguous cuts, against all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

import spmd
from spmd.errors import SpecError


def largest(stages: list[list[float]]) -> float:
    return max(sum(stage) for stage in stages)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_cuts_are_better(seed):
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 9, rng.integers(1, 9)).tolist()
    n = int(rng.integers(1, len(costs) + 1))
    stages = spmd.training.split_stages(costs, n, cost=float)
    assert [c for stage in stages for c in stage] == costs
    assert len(stages) == n
    assert all(stages)
    every = ([0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), n - 1))
    best = min(largest([costs[a:b] for a, b in pairwise(ends)]) for ends in every)
    assert largest(stages) == best


def test_layers_without_cost_go_with_those_before():
    assert spmd.training.split_stages("aAbB", 2, cost=[1, 0, 1, 0]) == [["a", "A"], ["b", "B"]]
    assert spmd.training.split_stages("abcde", 4) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_mistakes():
    with pytest.raises(SpecError, match=r"(?s)argument n.*3 stages of 2 layers"):
        spmd.training.split_stages("ab", 3)
    with pytest.raises(SpecError, match=r"(?s)argument cost.*1 costs for 2 layers"):
        spmd.training.split_stages("ab", 2, cost=[1])
    with pytest.raises(SpecError, match=r"(?s)argument cost.*at least 0"):
        spmd.training.split_stages("ab", 2, cost=lambda layer: -1)
