"""Global arrays of MPI processes and of those of torchrun."""

from __future__ import annotations

import sys

import pytest
from launch import launch
from process_cases import each_engine, ended_well


@each_engine
@pytest.mark.parametrize("how", ["half", pytest.param("all", marks=pytest.mark.full)])
def test_functions_of_global_arrays_between_processes(python, how):
    assert ended_well("global_arrays.py", how, python=python, n=4, timeout=200) == "right\n"


@each_engine
def test_one_process_does_not_meet_the_others_at_another_line(python):
    assert ended_well("one_line.py", python=python, n=4, timeout=120) == "right\n"


@each_engine
def test_nor_where_they_share_no_memory(python):
    words = ("by_messages.py", "0", "one_line.py", "sum", "item", "float", "mean", "numpy")
    assert ended_well(*words, python=python, n=4, timeout=120) == "right\n"


ALONE = """
import numpy as np, spmd
from spmd import P

with spmd.Mesh(x=2):
    u = spmd.put(np.ones(4), P("x"))
    if spmd.is_main():
        print(u.sum())
"""


def test_a_collective_function_on_one_process_only_is_an_error(tmp_path):
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    ended = launch(program, n=2, python=sys.executable, timeout=60)
    assert ended.returncode not in (0, None), str(ended)
    assert "DeadlockError" in ended.stderr
