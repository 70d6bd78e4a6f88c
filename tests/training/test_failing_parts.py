"""A worker that raises, dies or stays inside a stage of a pipeline, an expert or a remote call, or before a move: jobs
end as docs/explanation/failures.md says, and after an error that is caught all is well."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from launch import TORCHRUN
from mpi_programs.failing_parts import PARTS, check, run
from process_cases import each_engine, ended_well, timed


def ordinary(*some: str) -> list[Any]:
    """These parts, and all others in the long run."""
    return [*some, *(pytest.param(part, marks=pytest.mark.full) for part in PARTS if part not in some)]


WAITS = {"expert": "functions.experts(", "call": "remote(", "move": "move("}


@pytest.mark.parametrize("part", PARTS)
def test_the_error_of_the_worker_is_raised_and_nothing_stays(part, scheduler, monkeypatch):
    monkeypatch.setenv("SPMD_TEST_WORKERS", "3")
    run(part, "raise", scheduler=scheduler, transport="local")
    threads = threading.active_count()
    check(part, run(part, "raise", scheduler=scheduler, transport="local"), 3)
    assert threading.active_count() == threads


@each_engine
def test_all_processes_raise_it_and_go_on(python):
    said = ended_well("failing_parts.py", "raise", n=3, python=python, timeout=120, SPMD_TEST_WORKERS="3")
    assert said == f"{len(PARTS)} parts fail as they should\n"


@each_engine
@pytest.mark.parametrize("part", ordinary("expert forward", "call taken"))
def test_a_process_that_dies_ends_the_job(python, part):
    ended, seconds = timed("failing_parts.py", "kill", part, n=2, python=python)
    assert ended.returncode not in (0, None), str(ended)
    assert "has gone on" not in ended.stderr
    assert seconds < 40


@each_engine
@pytest.mark.parametrize("how", ["sleep", pytest.param("stop", marks=pytest.mark.full)])
@pytest.mark.parametrize("part", ordinary("1f1b backward"))
def test_a_process_that_stays_is_a_stall(python, how, part):
    """The error says in which call the other one waits."""
    ended, seconds = timed("failing_parts.py", how, part, n=2, python=python, SPMD_TIMEOUT="3")
    assert ended.returncode not in (0, None), str(ended)
    assert "StallError" in ended.stderr, str(ended)
    assert "worker 1 (x=1)" in ended.stderr, str(ended)
    # torchrun gives a process that is stopped 30 s to end, before it kills it.
    assert seconds < (70 if how == "stop" and python == TORCHRUN else 40)
    kind = part.split()[0]
    assert WAITS.get(kind, "pipeline(") in ended.stderr or part == "call unasked", str(ended)
