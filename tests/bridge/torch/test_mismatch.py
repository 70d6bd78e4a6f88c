"""Backward where workers differ: it meets, or says which workers parted. It never waits for ever."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from launch import PROGRAMS, launch, mpiexec, run_python  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

PROGRAM = PROGRAMS / "torch_parting.py"

# Gradients of the sum of all workers' losses by the blocks [1, 2, 3] and [4, 5, 6], worked out by hand.
MET = {
    "met_requires_grad_differs": [4, 8, 12, 0, 0, 0],
    "met_requires_grad_differs_midway": [0, 0, 0, 24, 30, 36],
    "met_requires_grad_of_one_chain": [0, 0, 0, 16, 10, 24],
    "met_tied_loss_on_one": [2, 4, 6, 8, 10, 12],
    "met_tied_output_unused": [4, 8, 12, 17, 21, 25],
    "met_tied_grad_of_unused": [0, 0, 0, 1, 1, 1],
    "met_tied_infinities": [1, 1, 1, 1, 1, 1],
    "met_sums_in_another_order": [7, 11, 15, 19, 23, 27],
    "met_grad_with_allow_unused": [2, 4, 6, 8, 10, 12],
}
PARTED = [
    "parted_loss_on_one",
    "parted_output_unused",
    "parted_output_unused_before_a_sum",
    "parted_grad_of_unused",
    "parted_no_grad_on_one",
    "parted_backward_twice",
    "parted_order",
]


def said(ended) -> dict[str, str]:
    """What the program printed, by case."""
    assert ended.returncode == 0, ended
    return dict(line.split(": ", 1) for line in ended.stdout.splitlines())


def judge(lines: dict[str, str], names) -> None:
    for name in names:
        if name in MET:
            assert lines[name] == str([float(v) for v in MET[name]]), (name, lines[name])
        else:
            kind, _, workers = lines[name].partition(" of ")
            assert kind in ("MismatchError", "DeadlockError"), (name, lines[name])
            assert workers == "worker 0 and worker 1", (name, lines[name])


@pytest.mark.parametrize("check", [[], ["check"]], ids=["unchecked", "checked"])
def test_virtual_workers_meet_or_say_who_parted(check):
    lines = said(run_python(PROGRAM, *check, timeout=90, SPMD_TIMEOUT="20"))
    assert set(lines) == {*MET, *PARTED}
    judge(lines, lines)


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.parametrize(
    "what", [*(pytest.param(w, marks=pytest.mark.full) for w in ("requires_grad", "tied")), "parted"]
)
def test_processes_meet_or_say_who_parted(what):
    agreed = [name for name in MET if "requires_grad" in name]
    names = {"requires_grad": agreed, "tied": [name for name in MET if name not in agreed], "parted": PARTED}[what]
    lines = said(launch(PROGRAM, *names, "check", n=2, timeout=90, SPMD_TIMEOUT="20"))
    assert set(lines) == set(names)
    judge(lines, names)
