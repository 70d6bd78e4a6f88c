"""Stages of pipelines that use collectives along other axes: each in another number, and for each microbatch another
one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import PROGRAMS, each_mpi, launch
from mpi_programs.stage_collectives import check, drawn

SCHEDULERS = st.sampled_from(["lockstep", "threads"])


@given(st.integers(0, 10**6), SCHEDULERS)
@settings(max_examples=12)
def test_they_are_what_one_worker_computes(seed, scheduler):
    check(drawn(seed), scheduler=scheduler)


@pytest.mark.full
@given(st.integers(0, 10**6), SCHEDULERS)
@settings(max_examples=400)
def test_they_are_what_one_worker_computes_in_many_cases(seed, scheduler):
    check(drawn(seed), scheduler=scheduler)


@each_mpi
@pytest.mark.parametrize(
    ("n", "words"), [(8, ()), pytest.param(4, ("apart",), marks=pytest.mark.full)], ids=["shared", "apart"]
)
def test_processes(python, n, words):
    ended = launch(PROGRAMS / "stage_collectives.py", "0", "4", str(n), *words, n=n, python=python, timeout=200)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout == "as one worker\n"
