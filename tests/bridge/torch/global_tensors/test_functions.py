"""Every function of torch that global tensors take, on random layouts: right as on one worker, or a LayoutError."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from spmd.bridge import torch as spt  # noqa: E402, F401
from spmd.bridge.torch.global_tensors.registry import HANDLERS  # noqa: E402
from tests.bridge.torch.global_tensors.function_cases import CALLS, called  # noqa: E402
from tests.bridge.torch.global_tensors.function_checks import (  # noqa: E402
    MESHES,
    UNUSUAL,
    USUAL,
    Trial,
    faults,
    outcome,
    trial,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def trials(axes: dict[str, int], seed: int, share: float = 1.0, kinds: Sequence[str] = USUAL) -> list[Trial]:
    """kinds: of operands. Those on a grid are no leaves, so that what a tensor knows of itself differs."""
    draw = random.Random(seed)
    return [
        trial(called(f), f, c.call, c.operands, axes, seed, kinds)
        for f in HANDLERS
        if kinds is USUAL or not called(f).startswith(".")
        for c in CALLS[called(f)]
        if draw.random() < share
    ]


def test_every_function_has_a_case():
    assert {called(f) for f in HANDLERS} == set(CALLS)


def test_every_case_has_a_value_on_one_worker():
    valued = {t.name.split()[0] for t in trials({"a": 1}, 0) if not isinstance(outcome(t, False), Exception)}
    assert valued == set(CALLS)


@pytest.mark.parametrize("seed", range(4))
def test_functions_are_right_or_refused(seed):
    axes = MESHES[seed % len(MESHES)]
    assert faults(trials(axes, seed, 0.1), axes, check=seed % 2 == 0) == []


@pytest.mark.parametrize("seed", range(2))
def test_grids_and_unpacked_parameters_are_right_or_refused(seed):
    axes = MESHES[seed % len(MESHES)]
    assert faults(trials(axes, seed, 0.1, UNUSUAL), axes, check=seed % 2 == 0) == []


@pytest.mark.full
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("seed", range(100, 107))
def test_grids_and_unpacked_parameters(seed, check):
    axes = MESHES[seed % len(MESHES)]
    assert faults(trials(axes, seed, 0.5, UNUSUAL), axes, check) == []


@pytest.mark.full
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("seed", range(100, 114))
def test_functions_on_any_layout(seed, check):
    axes = MESHES[seed % len(MESHES)]
    assert faults(trials(axes, seed), axes, check) == []
