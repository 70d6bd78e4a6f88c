"""Random combinations of techniques take the ten steps of one worker, on threads, in lockstep and on processes."""

from __future__ import annotations

import warnings

import pytest
from process_cases import each_engine, ended_well

from training import combined_cases


@pytest.mark.parametrize("seed", [*range(8), *[pytest.param(k, marks=pytest.mark.full) for k in range(8, 200)]])
def test_ten_steps_are_those_of_one_worker(seed, scheduler, tmp_path):
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # means of microbatches without samples
        combined_cases.run(seed, tmp_path, scheduler=scheduler)


@each_engine
@pytest.mark.parametrize("seeds", [(0, 3), pytest.param((3, 60), marks=pytest.mark.full)], ids=str)
def test_processes_take_them_too(python, seeds, tmp_path):
    ended_well("combined_training.py", str(tmp_path), *map(str, seeds), n=4, python=python, timeout=300)
