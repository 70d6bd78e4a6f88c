"""Workers as MPI processes: the same bits as virtual workers, errors on all, and jobs that end."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path

import pytest
from launch import PROGRAMS, Ended, each_mpi, launch
from mpi_programs import mismatch, verbs

# Everything here runs under the mpiexec of this environment, and again under Open MPI where there is one.
pytestmark = each_mpi


def ended_well(program: str, *args: str, python: str, **options) -> str:
    """What a program prints under mpiexec."""
    ended = launch(PROGRAMS / program, *args, python=python, **options)
    assert ended.returncode == 0, str(ended)
    return ended.stdout


@cache
def of_virtual_workers() -> dict[str, dict[str, str]]:
    return verbs.results(transport="local", scheduler="lockstep")


def test_verbs_operators_products_and_gradients_have_the_bits_of_virtual_workers(python):
    found = json.loads(ended_well("verbs.py", python=python, timeout=120))
    expected = of_virtual_workers()
    assert found.keys() == expected.keys()
    differ = [
        f"{case}, {name}: {text} locally, {found[case].get(name)} under MPI"
        for case, digests in expected.items()
        for name, text in digests.items()
        if found[case].get(name) != text
    ]
    assert not differ, "\n".join(differ[:20])


def test_workers_that_call_different_things_are_told_so_on_every_rank(python):
    found = json.loads(ended_well("mismatch.py", python=python))
    assert found.pop("afterwards") == ["4"]
    assert found.keys() == mismatch.CASES.keys() | {"axes"}
    for name, texts in found.items():
        assert len(texts) == 4
        for text in texts:
            assert text.startswith("MismatchError: a collective"), f"{name}: {text}"
            assert "worker 0 (x=0" in text, text
            assert "worker 2 (x=" in text, text
            assert text.count("mismatch.py:") == (1 if name == "missing" else 2), text
    assert "worker 2 (x=2): the end of the map\n            without any call before" in found["missing"][0]
    assert "psum(float64[4, 4], ('y', 'x'))" in found["axes"][1]


def test_meshes_on_communicators_of_all_kinds(python):
    printed = ended_well("groups.py", python=python)  # In any order, and lines may run into each other.
    assert all(f"rank {k} is through" in printed for k in range(4)), printed


def failing(where: str, python: str) -> tuple[Ended, float]:
    started = time.monotonic()
    ended = launch(PROGRAMS / "failing.py", where, python=python, timeout=30)
    return ended, time.monotonic() - started


@pytest.mark.parametrize("where", ["start", "before", "body", "between"])
def test_an_error_that_nobody_catches_ends_the_job_with_its_report(python, where):
    ended, seconds = failing(where, python)
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 15
    assert f"ValueError: worker one fails: {where}" in ended.stderr, str(ended)
    assert "Traceback" in ended.stderr
    assert ("raised by worker 1 (x=1)" in ended.stderr) == (where == "body")


@pytest.mark.parametrize(("where", "status"), [("exit", 3), ("message", 1), ("interrupt", None)])
def test_one_worker_that_leaves_the_program_takes_the_job_with_it(python, where, status):
    ended, _ = failing(where, python)
    assert ended.returncode not in (0, None), str(ended)
    if status is not None:
        assert ended.returncode == status
    if where == "message":
        assert "worker one has had enough" in ended.stderr


def test_a_mesh_of_another_size_than_the_world_is_an_error(python):
    ended, _ = failing("wrong size", python)
    assert ended.returncode not in (0, None), str(ended)
    assert "Mesh(x=3) of 3 workers, and an MPI world of 4 processes" in ended.stderr
    assert 'mpiexec -n 3", or Mesh(..., transport="local")' in ended.stderr


def test_an_error_that_all_raise_and_catch_ends_nothing(python):
    ended, _ = failing("caught", python)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("reached the end") == 4
    assert all(f"raised by worker {k} (x={k})" in ended.stdout for k in range(4))
    assert ended.stderr == ""


def test_calls_of_different_maps_never_meet(python, tmp_path):
    """One rank catches an error of its own and goes on to the next map; the others still wait in the first."""
    program = tmp_path / "parted.py"
    program.write_text(PARTED)
    ended = launch(program, python=python, n=3, timeout=60)
    assert ended.returncode not in (0, None), str(ended)
    assert "gives" not in ended.stdout
    assert "workers that met with different calls" in ended.stderr


PARTED = """
import numpy as np, spmd
from spmd import P

def fails(x):
    if spmd.worker_index("x") == 1:
        raise ValueError("only here")
    return spmd.psum(x.sum(), "x")

with spmd.Mesh(x=3):
    try:
        print("the first map gives", float(spmd.map(fails, P("x"), P())(np.ones(3))), flush=True)
    except ValueError:
        pass
    print("the second map gives", float(spmd.map(lambda x: spmd.psum(x.sum(), "x"), P("x"), P())(np.full(3, 10.0))))
"""


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
