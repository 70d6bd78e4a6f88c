"""Workers as processes of torch.distributed: what holds of all processes (`process_cases.py`), and what is its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import emulator  # noqa: E402
from launch import ROOT, TORCHRUN, launch, run_python  # noqa: E402
from process_cases import *  # noqa: E402, F403
from process_cases import ended_well, failing  # noqa: E402
from torch_programs import dtypes  # noqa: E402

PROGRAMS = ROOT / "tests" / "torch_programs"
pytestmark = pytest.mark.parametrize("python", [pytest.param(TORCHRUN, id="torchrun")])

ORDINARY = {
    "test_blocks_of_every_dtype_and_size_have_the_bits_of_virtual_workers",
    "test_workers_that_call_different_things_are_told_so_on_every_rank",
    "test_without_torch_it_is_said_how_to_get_it",
    "test_an_error_of_one_worker_is_an_error_of_all",
}
"""The tests of the ordinary run; the others are long searches."""


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


def own(program: str, *args: str, **options) -> str:
    """What one of torch's own programs prints. torch has nothing to warn of, at the end neither."""
    ended = launch(PROGRAMS / program, *args, python=TORCHRUN, **options)
    assert ended.returncode == 0, str(ended)
    assert ended.stderr == "", str(ended)
    return ended.stdout


@pytest.mark.parametrize("when", ["before", "after"])
def test_groups_of_the_users_own_stand_beside_ours(python, when):
    printed = own("beside.py", when)
    assert all(f"worker {k} is through" in printed for k in range(4)), printed


def test_blocks_of_every_dtype_and_size_have_the_bits_of_virtual_workers(python):
    pytest.importorskip("ml_dtypes")
    found = json.loads(own("dtypes.py", n=3, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")])))
    expected = dtypes.results(transport="local")
    assert found.keys() == expected.keys()
    for worker, digests in expected.items():
        assert found[worker] == digests


def test_every_operator_is_adjoint(python):
    ended = launch(
        "-m", "spmd", "adjoint", "--mesh", "x=2,y=2", "--trials", "1", "--json", python=TORCHRUN, timeout=120
    )
    assert ended.returncode == 0, str(ended)
    rows = json.loads(ended.stdout)  # of one process: the others print nothing
    assert len(rows) > 20
    assert all(row["passed"] for row in rows)


def test_an_interrupt_reaches_a_process_that_waits(python):
    ended = launch(PROGRAMS / "interrupted.py", python=TORCHRUN, n=2)
    assert ended.returncode not in (0, None), str(ended)
    (said,) = ended.stdout.splitlines()
    assert float(said.split()[2]) < 10, said
    assert "KeyboardInterrupt" in ended.stderr


def test_the_report_tells_of_torchrun(python):
    ended = launch("-m", "spmd", "info", python=TORCHRUN)
    assert ended.returncode == 0, str(ended)
    found = dict(line.split(maxsplit=1) for line in ended.stdout.replace("torch world", "torch_world").splitlines())
    assert found["torch_world"] == "4 processes"
    assert found["transport"].startswith("torch for a mesh of 4 workers")


def test_processes_that_somebody_else_started_are_a_job_too(python, tmp_path):
    """By the variables alone, with nobody to end them: a worker that fails is noticed by the others themselves."""
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, program],
            env=os.environ | job | {"RANK": str(k)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for k in range(2)
    ]
    try:
        ended = [p.communicate(timeout=90) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [out.decode() for out, _ in ended] == ["torch 3.0\n", "torch 3.0\n"], ended
    assert all(p.returncode not in (0, None) for p in processes), ended
    assert b"ValueError: only here" in ended[1][1]


ALONE = """
import numpy as np, spmd
from spmd import P
mesh = spmd.Mesh(x=2)
total = spmd.map(lambda x: spmd.psum(x[0], "x"), P("x"), P(), mesh=mesh)
print(mesh.transport.name, float(total(np.arange(2.0) + 1)), flush=True)
if mesh.local_workers[0] == 1:
    raise ValueError("only here")
total(np.ones(2))
"""


def test_without_torch_it_is_said_how_to_get_it(python, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    job = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    asked = "import spmd; print(spmd.is_main(), flush=True); spmd.Mesh(x=4).transport"
    ended = run_python("-c", asked, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]), **job)
    assert ended.returncode == 1, str(ended)
    assert ended.stdout == "True\n"
    assert "torch cannot be imported (no torch here)" in ended.stderr
    assert 'pip install "spmd[torch]"' in ended.stderr
    ended = run_python("-c", "import spmd; spmd.Mesh(x=4, transport='torch').transport")
    assert "Mesh(x=4) of 4 workers, and a torch.distributed world of 1 process" in ended.stderr


@pytest.mark.skipif(emulator.COMPILER is None, reason="the stand-in needs g++")
def test_blocks_on_a_gpu_go_through_the_host(python):
    here = ROOT / "tests"
    path = os.pathsep.join(map(str, (here / "emulator" / "site", ROOT, here)))
    variables = {"SPMD_TEST_DEVICE": "emulated", "SPMD_DEVICE": "cuda", "PYTHONPATH": path}
    ended = launch(here / "mpi_programs" / "devices.py", python=TORCHRUN, timeout=120, **variables)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.split() == ["torch", "StagedTransport", "cuda"]
