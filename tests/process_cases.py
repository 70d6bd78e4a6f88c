"""What holds of workers that are processes, whoever started them: the same bits as virtual workers, errors on all, and
jobs that end. `test_mpi.py` and `test_gloo.py` of `tests/transport/processes/` run it, each with launchers of its own
as `python`.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
from launch import PROGRAMS, TORCHRUN, Ended, each_mpi, launch
from mpi_programs import admitting, again, mismatch, timing, verbs

_TORCH = pytest.param(
    TORCHRUN,
    id="torchrun",
    marks=[pytest.mark.torch, pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")],
)
each_engine = pytest.mark.parametrize("python", [*each_mpi.args[1], _TORCH])
"""Runs a test with every launcher that is installed."""


def ended_well(program: str, *args: str, python: str, **options) -> str:
    """What a program prints under its launcher."""
    ended = launch(PROGRAMS / program, *args, python=python, **options)
    assert ended.returncode == 0, str(ended)
    return ended.stdout


def timed(program: str, *args: str, python: str, **options) -> tuple[Ended, float]:
    """How a program ended, and how many seconds after its last process had imported what takes long."""
    with tempfile.TemporaryDirectory() as folder:
        up = Path(folder) / "up"
        started = time.time()
        ended = launch(PROGRAMS / program, *args, python=python, SPMD_TEST_UP=str(up), **options)
        since = max(map(float, up.read_text().split())) if up.exists() else started
        return ended, time.time() - since


@cache
def of_virtual_workers(share: bool = False) -> dict[str, dict[str, str]]:
    """The digests of `verbs.py`. share: of the cases that it draws."""
    return verbs.results(share, transport="local", scheduler="lockstep")


@pytest.mark.parametrize(
    "how",
    [
        "checked",
        pytest.param("unchecked", marks=pytest.mark.full),
        pytest.param("placed", marks=pytest.mark.full),
        pytest.param("placed share", marks=pytest.mark.both),
    ],
)
def test_verbs_operators_products_and_gradients_have_the_bits_of_virtual_workers(python, how):
    """placed: blocks go from arena to arena, if they are not of a few bytes or lie elsewhere. share: a third of all."""
    check = str(+(how != "unchecked"))
    found = json.loads(ended_well("verbs.py", *how.split(), python=python, timeout=120, SPMD_CHECK=check))
    expected = of_virtual_workers()
    if "share" in how:
        assert len(found) > len(expected) / 4
        expected = {case: digests for case, digests in expected.items() if case in found}
    assert found.keys() == expected.keys()
    differ = [
        f"{case}, {name}: {text} locally, {found[case].get(name)} in processes"
        for case, digests in expected.items()
        for name, text in digests.items()
        if found[case].get(name) != text
    ]
    assert not differ, "\n".join(differ[:20])


@pytest.mark.both
def test_programs_that_are_done_again_have_the_bits_of_virtual_workers(python):
    found = json.loads(ended_well("again.py", python=python, n=3))
    assert found == again.results(transport="local", scheduler="lockstep")


@pytest.mark.parametrize(
    "who",
    [
        "nobody",
        pytest.param("all", marks=pytest.mark.both),
        "first",
        *(pytest.param(who, marks=pytest.mark.full) for who in ("last", "blind", "unread")),
    ],
)
def test_where_no_memory_is_shared_headers_go_as_messages(python, who):
    found = json.loads(ended_well("apart.py", who, python=python))
    expected = of_virtual_workers()
    assert found
    assert found == {case: expected[case] for case in found}


@pytest.mark.both
def test_every_kind_of_array_is_what_it_is_among_virtual_workers(python):
    """Or refused with the same words: references to objects and text never travel."""
    pytest.importorskip("ml_dtypes")
    found = json.loads(ended_well("admitting.py", python=python, n=2, timeout=120))
    assert found.pop("swapped fields") == ["refused"]
    assert found == admitting.results(transport="local", scheduler="lockstep")


def test_sums_of_more_than_two_count_once_however_they_are_made(python):
    found = json.loads(ended_well("rows.py", python=python, n=6))
    assert found == ["well"] * 6


@pytest.mark.both
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


def failing(where: str, python: str) -> tuple[Ended, float]:
    return timed("failing.py", where, python=python, timeout=30)


@pytest.mark.parametrize("where", ["start", "before", pytest.param("body", marks=pytest.mark.both), "between"])
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
        assert ended.returncode == status or f"exitcode  : {status} " in ended.launcher, str(ended)
    if where == "message":
        assert "worker one has had enough" in ended.stderr


def test_an_error_that_all_raise_and_catch_ends_nothing(python):
    ended, _ = failing("caught", python)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("reached the end") == 4
    assert all(f"raised by worker {k} (x={k})" in ended.stdout for k in range(4))
    assert ended.stderr == ""


@pytest.mark.both
def test_an_error_of_one_worker_is_an_error_of_all(python, tmp_path):
    """Where they catch it they go on together."""
    program = tmp_path / "parted.py"
    program.write_text(PARTED)
    ended = launch(program, python=python, n=3, timeout=60)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("the second map gives 30.0") == 3, str(ended)
    assert ended.stdout.count("only here, raised by worker 1 (x=1)") == 3
    assert "the first map" not in ended.stdout


PARTED = """
import numpy as np, spmd
from spmd import P

class Mine(Exception):
    pass

def fails(x):
    if spmd.worker_index("x") == 1:
        raise Mine("only here")
    return spmd.psum(x.sum(), "x")

with spmd.Mesh(x=3):
    try:
        print("the first map gives", float(spmd.map(fails, P("x"), P())(np.ones(3))), flush=True)
    except Mine as error:
        print(f"{error}, {error.__notes__[0]}\\n", end="", flush=True)
    second = spmd.map(lambda x: spmd.psum(x.sum(), "x"), P("x"), P())(np.full(3, 10.0))
    print(f"the second map gives {float(second)}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("how", ["retry", "slow", "leave"])
def test_an_error_that_all_catch_leaves_the_job_as_good_as_before(python, how):
    """Where the one that failed tries again at once, another takes its time, or the one that failed is through."""
    printed = ended_well("caught.py", how, python=python)
    for attempt in range(5 if how == "retry" else 1):
        assert printed.count(f"caught attempt {attempt}, raised by worker 1 (x=1)") == 4, printed
    assert printed.count("got 4.0") == (0 if how == "leave" else 4), printed


LATE = """
import time
import numpy as np, spmd
from spmd import P
from spmd.errors import MismatchError

mesh = spmd.Mesh(x=2, y=2)

def fails(x):
    k = spmd.worker_index(("x", "y"))
    if k == 3:
        time.sleep(0.5)
    if k == 0:
        raise ValueError("only here")
    return spmd.psum(x, "y")

def catches(x):
    k = spmd.worker_index(("x", "y"))
    try:
        (spmd.psum if k == 0 else spmd.pmax)(x, "y")
    except MismatchError:
        pass
    if k == 3:
        time.sleep(0.5)
    return spmd.psum(x.sum(), ("x", "y"))

for f, spec, kind in (fails, P("x"), ValueError), (catches, P(), MismatchError):
    for _ in range(2):
        try:
            spmd.map(f, P(("x", "y")), spec, mesh=mesh, check=False)(np.ones(4))
        except kind as error:
            print(f"{kind.__name__}\\n", end="", flush=True)
"""


def test_who_comes_late_to_a_map_that_has_failed_learns_it(python, tmp_path):
    """The others of its group have left; or went on in the body, where the map has failed all the same."""
    program = tmp_path / "late.py"
    program.write_text(LATE)
    ended = launch(program, python=python, timeout=40)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("ValueError") == 8
    assert ended.stdout.count("MismatchError") == 8


def test_an_error_that_only_the_one_that_failed_catches_ends_the_job(python):
    ended, seconds = timed("caught.py", "by one", python=python, timeout=30)
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 8
    assert ended.stderr.count("Traceback") == 1, str(ended)
    assert "ValueError: attempt 0\nraised by worker 1 (x=1)" in ended.stderr


def hanging(how: str, python: str, *apart: str, **env: str) -> tuple[Ended, float]:
    return timed("hanging.py", how, *apart, python=python, timeout=40, **env)


@pytest.mark.parametrize("how", [pytest.param("circle", marks=pytest.mark.both), "leave", "return"])
def test_workers_that_wait_in_vain_are_told_so(python, how):
    ended, seconds = hanging(how, python)
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 10
    assert "got" not in ended.stdout
    assert ended.stderr.count("Traceback") == 1, str(ended)  # one report for all
    assert "worker 1 (x=0, y=1)" in ended.stderr
    assert "hanging.py:" in ended.stderr
    if how == "circle":
        assert "DeadlockError" in ended.stderr
        for k, axis in enumerate("xyyx"):
            assert f"worker {k} (x={k // 2}, y={k % 2}) waits in psum(float64[3], '{axis}') for" in ended.stderr
    if how == "leave":
        assert "worker 1 (x=0, y=1) has left the program" in ended.stderr


def test_processes_know_of_each_other_where_something_stands_between_them_and_the_launcher(python):
    ended, seconds = hanging("circle", python, "wrapped")
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 10
    assert ended.stderr.count("DeadlockError") == 1, str(ended)


@pytest.mark.parametrize("how", ["circle", "return", "sleep", "raise"])
def test_processes_that_share_no_board_ask_each_other(python, how):
    ended, seconds = hanging(how, python, "apart", SPMD_TIMEOUT="2")
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 15
    if how == "sleep":
        assert "StallError" in ended.stderr, str(ended)
        assert "worker 1 (x=0, y=1) is missing; its last collectives:\n            psum(float64" in ended.stderr
    if how == "circle":
        assert "DeadlockError" in ended.stderr, str(ended)
        for k, axis in enumerate("xyyx"):
            assert f"worker {k} (x={k // 2}, y={k % 2}) waits in psum(float64[3], '{axis}') for" in ended.stderr
    if how == "raise":
        assert "ValueError: worker one fails\nraised by worker 1 (x=0, y=1)" in ended.stderr, str(ended)


def test_a_worker_that_makes_no_mesh_is_waited_for_no_longer_than_the_time_limit(python):
    ended, seconds = hanging("early", python, SPMD_TIMEOUT="2")
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 15
    assert ended.stderr.count("Traceback") == 1, str(ended)
    assert "worker 1 (x=0, y=1) has made no mesh" in ended.stderr


def test_a_worker_that_sleeps_ends_the_job_with_a_report(python):
    ended, seconds = hanging("sleep", python, SPMD_TIMEOUT="2")
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 15
    assert ended.stderr.count("Traceback") == 1, str(ended)
    assert "StallError: psum(float64[3], ('x', 'y'))\n  got:    no progress for 2 s" in ended.stderr
    assert "worker 1 (x=0, y=1) is missing; its last collectives:\n            psum(float64[3], 'x') at" in ended.stderr
    assert (
        "worker 3 (x=1, y=1) waits; its last collectives:\n            psum(float64[3], ('x', 'y')) at" in ended.stderr
    )


@pytest.mark.parametrize("how", ["busy", "holding"])
def test_a_worker_that_computes_is_waited_for(python, how):
    ended, _ = hanging(how, python, SPMD_TIMEOUT="1")
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("got 8.0") == 4


@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.both), "raise"])
def test_a_worker_that_dies_or_fails_takes_the_job_with_it(python, how):
    ended, seconds = hanging(how, python)
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 15
    assert "got" not in ended.stdout
    if how == "raise":
        assert ended.stderr.count("Traceback") == 1, str(ended)
        assert "ValueError: worker one fails\nraised by worker 1 (x=0, y=1)" in ended.stderr


def parted(count: int, seed: int, python: str) -> dict[str, float]:
    return json.loads(ended_well("fuzz.py", str(count), str(seed), python=python, timeout=30 + count / 2))


def test_workers_that_part_ways_are_always_an_error(python):
    found = parted(50, 3, python)
    assert found["drawn"] > 30
    assert found["slowest"] < 5  # 2 on a machine of its own


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_programs_in_which_workers_part_ways(python, seed):
    assert parted(400, 100 + seed, python)["drawn"] > 240


@pytest.mark.both
def test_timing_changes_nothing(python):
    found = json.loads(ended_well("timing.py", "25", python=python))
    assert found == timing.hashes(1, transport="local")


@pytest.mark.full
def test_timing_changes_nothing_in_a_thousand_runs(python):
    found = json.loads(ended_well("timing.py", "1000", python=python, timeout=300))
    assert found == timing.hashes(1, transport="local")


def test_a_time_limit_is_a_number_of_seconds(python):
    ended, _ = hanging("busy", python, SPMD_TIMEOUT="soon")
    assert ended.returncode not in (0, None)
    assert "the environment variable SPMD_TIMEOUT\n  got:    'soon'\n  needed: seconds" in ended.stderr
