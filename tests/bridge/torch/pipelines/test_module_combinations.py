"""Pipelines of modules with all that may be combined with them take the ten steps of one worker."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from process_cases import each_engine, ended_well  # noqa: E402
from torch_pipeline_combinations import agree, drawn  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]


@pytest.mark.parametrize("seed", [*range(8), 21, *[pytest.param(k, marks=pytest.mark.full) for k in range(22, 122)]])
def test_ten_steps_are_those_of_one_worker(seed):
    agree(drawn(seed))


@each_engine
@pytest.mark.parametrize("seeds", [(0, 4), pytest.param((4, 24), marks=pytest.mark.full)], ids=str)
def test_processes_take_them_too(python, seeds):
    found = ended_well("combined_module_pipelines.py", *map(str, seeds), n=4, python=python, timeout=300)
    assert found == f"{seeds[1] - seeds[0]}\n"
