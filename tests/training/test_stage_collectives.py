"""Stages of pipelines that use collectives along other axes: each in another number, and for each microbatch another
one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import PROGRAMS, each_mpi, launch
from mpi_programs.stage_collectives import check, drawn

import spmd
from spmd import P
from spmd.errors import DifferentiationError

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


def test_a_pipeline_within_a_stage(scheduler):
    """It gives results; a gradient through it is refused, with the mend."""
    w, x = np.random.default_rng(0).normal(size=(2, 3)), np.linspace(-1, 1, 7)
    inner = spmd.training.pipeline([lambda w, h: np.tanh(h * w)] * 3, "inner", microbatches=2)
    outer = spmd.training.pipeline([lambda w, h: inner([*w], h)] * 2, microbatches=3, schedule="1f1b", loss=np.mean)
    wanted = x
    for scale in w.reshape(-1):
        wanted = np.tanh(wanted * scale)
    with spmd.Mesh(stage=2, inner=3, scheduler=scheduler):
        found = spmd.map(lambda w, x: outer([*w], x), P(), P())(w, x)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        with pytest.raises(DifferentiationError, match="differentiated around the pipeline"):
            spmd.map(lambda w, x: outer.value_and_grad([*w], x)[0], P(), P())(w, x)


@each_mpi
@pytest.mark.parametrize(
    ("n", "words"), [(8, ()), pytest.param(4, ("apart",), marks=pytest.mark.full)], ids=["shared", "apart"]
)
def test_processes(python, n, words):
    ended = launch(PROGRAMS / "stage_collectives.py", "0", "2", str(n), *words, n=n, python=python, timeout=200)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout == "as one worker\n"
