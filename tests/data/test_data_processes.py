"""Minibatches on processes."""

from __future__ import annotations

import pytest
from launch import PROGRAMS, each_mpi, launch


@each_mpi
@pytest.mark.parametrize(("axes", "processes"), [(("4",), 4), (("2", "model"), 4)])
def test_processes_have_the_minibatches_of_one(python, axes, processes):
    ended = launch(PROGRAMS / "minibatches.py", *axes, n=processes, python=python, timeout=120)
    assert ended.returncode == 0, ended
    assert ended.stdout.split() == ["alike"], ended
