"""Global arrays of MPI processes and of those of torchrun."""

from __future__ import annotations

import sys

from launch import launch
from process_cases import each_engine, ended_well


@each_engine
def test_functions_of_global_arrays_between_processes(python):
    assert ended_well("global_arrays.py", python=python, n=4, timeout=200) == "right\n"


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
