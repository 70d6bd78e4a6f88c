"""Workers as MPI processes: what holds of all processes (`process_cases.py`), and what is MPI's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import each_mpi, launch
from process_cases import *  # noqa: F403
from process_cases import ended_well, failing

# Everything here runs under the mpiexec of this environment, and again under Open MPI where there is one.
pytestmark = each_mpi


@pytest.mark.both
def test_meshes_on_communicators_of_all_kinds(python):
    printed = ended_well("groups.py", python=python)  # In any order, and lines may run into each other.
    assert all(f"rank {k} is through" in printed for k in range(4)), printed


@pytest.mark.parametrize("how", ["waits", "computes"])
def test_an_interrupt_is_told_to_the_others_and_another_map_runs(python, how, tmp_path):
    printed = ended_well("broken_off.py", how, str(tmp_path / "interrupted"), python=python, n=2, timeout=60)
    assert "worker 0: KeyboardInterrupt" in printed
    assert "worker 1: RuntimeError" in printed
    assert printed.count("got [2.]") == 2


def test_a_mesh_of_another_size_than_the_world_is_an_error(python):
    ended, _ = failing("wrong size", python)
    assert ended.returncode not in (0, None), str(ended)
    assert "Mesh(x=3) of 3 workers, and an MPI world of 4 processes" in ended.stderr
    assert 'mpiexec -n 3", or Mesh(..., transport="local")' in ended.stderr


@pytest.mark.parametrize("n", [2, 5])
def test_the_ledger_counts_what_is_sent(python, n):
    assert ended_well("counted.py", python=python, n=n, SPMD_CHECK="0") == "counted\n"


@pytest.mark.parametrize("check", ["0", "1"])
def test_gather_and_scatter(python, check):
    assert ended_well("rooted.py", python=python, n=5, SPMD_CHECK=check) == "rooted\n"


@pytest.mark.both
def test_the_transport_follows_the_launcher_and_the_variables(python):
    assert ended_well("plain.py", python=python) == "mpi 6.0 True\n"
    assert ended_well("plain.py", python=python, n=1) == "local 6.0 True\n"
    each = ended_well("plain.py", python=python, n=2, SPMD_TRANSPORT="local")
    assert each.count("local 6.0 False") == 2, each


def test_a_program_that_hangs_is_killed_with_all_its_processes(python, tmp_path):
    program = tmp_path / "sleeps.py"
    program.write_text("import time\nfrom mpi4py import MPI\nprint('up', flush=True)\ntime.sleep(300)\n")
    ended = launch(program, python=python, timeout=4)
    assert ended.returncode is None
    assert ended.stdout.count("up") == 4
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(program).encode() in _read(p)]
    assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
