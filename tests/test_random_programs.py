"""Random programs: right ones give what they should, and where a worker differs the program stops."""

from __future__ import annotations

import json
import sys

import pytest
from launch import PROGRAMS, TORCHRUN, launch, mpiexec
from random_programs import draw, verdict

import spmd

PROGRAM = PROGRAMS / "random_programs_of_processes.py"


def wrong(seeds, scheduler: str) -> list[str]:
    told = []
    for seed in seeds:
        p = draw(seed)
        told += [text for text in [verdict(p, spmd.Mesh(x=p.size, scheduler=scheduler, transport="local"))] if text]
    return told


def of_processes(first: int, count: int, n: int, python: str, timeout: float) -> list[str]:
    ended = launch(PROGRAM, str(first), str(count), str(n), n=n, python=python, timeout=timeout)
    assert ended.returncode == 0, str(ended)
    return json.loads(ended.stdout)


def test_programs_of_virtual_workers(scheduler):
    told = wrong(range(150), scheduler)
    assert not told, "\n\n".join(told[:3])


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.parametrize("n", [2, 4])
def test_programs_of_processes(n):
    told = of_processes(0, 80, n, sys.executable, 120)
    assert not told, "\n\n".join(told[:3])


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_many_programs_of_virtual_workers(scheduler, first):
    told = wrong(range(first, first + 500), scheduler)
    assert not told, "\n\n".join(told[:3])


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.parametrize("n", [2, 4])
def test_many_programs_of_processes(n):
    told = of_processes(1000, 1000, n, sys.executable, 900)
    assert not told, "\n\n".join(told[:3])


@pytest.mark.full
@pytest.mark.torch
def test_programs_of_torchrun():
    told = of_processes(0, 300, 2, TORCHRUN, 600)
    assert not told, "\n\n".join(told[:3])
