"""Pipelines with all that may be combined with them take the ten steps of one worker."""

from __future__ import annotations

import pytest
from process_cases import each_engine, ended_well

from training import pipelined_combinations as cases


@pytest.mark.parametrize("seed", [*range(4), *[pytest.param(k, marks=pytest.mark.full) for k in range(4, 30)]])
def test_ten_steps_are_those_of_one_worker(seed, scheduler, tmp_path):
    cases.run(seed, tmp_path, scheduler=scheduler)


@each_engine
@pytest.mark.parametrize("seeds", [(0, 2), pytest.param((2, 20), marks=pytest.mark.full)], ids=str)
def test_processes_take_them_too(python, seeds, tmp_path):
    words = (str(tmp_path), *map(str, seeds))
    assert ended_well("combined_pipelines.py", *words, n=4, python=python, timeout=300) == f"{seeds[1] - seeds[0]}\n"
