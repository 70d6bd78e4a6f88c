"""Saves that are killed at any of their system calls: the last checkpoint that was committed loads, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from killed_saves import check_files, loaded, save_soon
from launch import each_mpi, launch, run_python

HERE = Path(__file__).parent
KINDS = ("outside", "lockstep", "first")


@pytest.mark.parametrize("kind", KINDS)
def test_virtual_workers_killed(kind, tmp_path):
    _kill(tmp_path, kind, 30)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_virtual_workers_killed_at_every_place(kind, tmp_path):
    _kill(tmp_path, kind, 0)


def _kill(folder: Path, kind: str, kills: int) -> None:
    ended = run_python(HERE / "killed_saves.py", folder, kind, str(kills), timeout=400.0)
    assert ended.returncode == 0, ended
    found = re.match(r"(\d+) places, (\d+) kills", ended.stdout)
    assert found, ended
    places, killed = map(int, found.groups())
    assert places >= 100, ended
    assert killed == (kills or places), ended


# A kill of rank 0, of rank 1 and of both, at a place that is so far along in the save.
KILLS = [(victims, share) for victims in ("0", "1", "01") for share in (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)]
SHORT = [("0", 0.9), ("1", 0.5), ("01", 0.65)]


def _cases(each):
    marks = {case: () if case in SHORT else pytest.mark.full for case in KILLS}
    return each("victims, share", [pytest.param(*case, marks=marks[case]) for case in KILLS])


@each_mpi
@_cases(pytest.mark.parametrize)
def test_processes_killed(python, victims, share, tmp_path):
    """The job dies in its second save. Another job, here of virtual workers, finds a checkpoint and saves the next."""
    folder = tmp_path / "checkpoint"
    ended = launch(HERE / "killed_processes.py", tmp_path, victims, str(share), n=2, python=python)
    assert ended.returncode != 0, ended
    assert "not killed" not in ended.stdout, ended
    committed = (tmp_path / "committed").exists()
    assert loaded(folder) == (2 if committed else 1), ended
    save_soon(folder, 3)
    assert loaded(folder) == 3
    check_files(folder)
