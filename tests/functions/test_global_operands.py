"""Each function of `spmd.functions` takes global arrays outside of bodies, or says in the same words everywhere that it
does not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import functions_of_global_arrays as program

import spmd
from spmd import functions


def test_the_table_has_every_function():
    assert set(program.CASES) | program.PLANS == set(functions.__all__)


@pytest.mark.parametrize("name", program.CASES)
def test_a_function_of_global_arrays_is_that_of_whole_arrays(name):
    with spmd.Mesh(**program.AXES, transport="local") as mesh:
        check(name, program.outcomes(name, mesh))


def check(name, found):
    if name in program.REFUSING:
        assert found["plain"][0] == "SpecError"
        assert found["plain"] == found["grad"] == found["jit"]
        return
    for way, arrays in program.of_whole_arrays(name).items():
        assert len(arrays) == len(found[way]), found[way]
        for ours, whole in zip(found[way], arrays, strict=True):
            np.testing.assert_allclose(ours, whole, rtol=1e-6, atol=1e-7)


@each_mpi
def test_processes_do_the_same(python):
    ended = launch(PROGRAMS / "functions_of_global_arrays.py", python=python, n=4, timeout=120)
    assert ended.returncode == 0, str(ended)
    for name, found in json.loads(ended.stdout).items():
        check(name, found)
