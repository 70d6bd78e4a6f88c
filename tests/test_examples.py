"""The examples run, and what they print is right."""

from __future__ import annotations

import re
import subprocess

import pytest
from launch import ROOT, launch, mpiexec, run_python

AFFINE = ROOT / "examples" / "affine.py"


def figures(text: str) -> dict[str, float]:
    """What affine.py reports."""
    found = re.search(r"loss ([\d.]+) at first, ([\d.e+-]+) after 300 steps", text)
    return {
        "first": float(found[1]),
        "last": float(found[2]),
        "error": float(re.search(r"largest error of the fit ([\d.e+-]+)", text)[1]),
        "apart": float(re.search(r"one worker: ([\d.e+-]+) apart", text)[1]),
    }


def right(ended: subprocess.CompletedProcess) -> dict[str, float]:
    assert ended.returncode == 0, str(ended)
    found = figures(ended.stdout)
    assert found["last"] < 1e-8 < 1 < found["first"]
    assert found["error"] < 1e-3
    assert found["apart"] < 1e-12
    return found


def test_an_affine_layer_on_unequal_partitions():
    ended = run_python(AFFINE)
    right(ended)
    assert ended.stdout.count("nothing") == 2


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_same_under_mpiexec():
    assert right(launch(AFFINE, n=12, timeout=120)) == right(run_python(AFFINE))
