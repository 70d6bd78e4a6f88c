"""Workers as processes of torch.distributed: what holds of all processes (`process_cases.py`), and what is its own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from launch import TORCHRUN  # noqa: E402
from process_cases import *  # noqa: E402, F403
from process_cases import ended_well, failing  # noqa: E402

pytestmark = pytest.mark.parametrize("python", [pytest.param(TORCHRUN, id="torchrun")])


def test_a_mesh_of_another_size_than_the_world_is_an_error(python):
    ended, _ = failing("wrong size", python)
    assert ended.returncode not in (0, None), str(ended)
    assert "Mesh(x=3) of 3 workers, and a torch.distributed world of 4 processes" in ended.stderr
    assert 'torchrun --nproc-per-node 3", or Mesh(..., transport="local")' in ended.stderr


def test_the_transport_follows_the_launcher_and_the_variables(python):
    assert ended_well("plain.py", python=python) == "torch 6.0 False\n"
    assert ended_well("plain.py", python=python, n=1) == "local 6.0 False\n"
    each = ended_well("plain.py", python=python, n=2, SPMD_TRANSPORT="local")
    assert each.count("local 6.0 False") == 2, each
