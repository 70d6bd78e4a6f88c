"""Random combinations of techniques take the ten steps of one worker, on threads, in lockstep and on processes."""

from __future__ import annotations

import pytest
from process_cases import each_engine, ended_well

from training import combined_cases


@pytest.mark.parametrize("seed", [*range(6), *[pytest.param(k, marks=pytest.mark.full) for k in range(6, 60)]])
def test_ten_steps_are_those_of_one_worker(seed, scheduler):
    combined_cases.run(seed, scheduler=scheduler)


@each_engine
@pytest.mark.parametrize("seeds", [(0, 6), pytest.param((6, 60), marks=pytest.mark.full)], ids=str)
def test_processes_take_them_too(python, seeds):
    assert int(ended_well("combined_training.py", *map(str, seeds), n=4, python=python, timeout=300)) > 1
