"""Environment variables that mean nothing are one clear error, whatever the transport."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from launch import ROOT, TORCHRUN, each_mpi, launch, run_python

import spmd
from spmd.errors import MeshError
from spmd.settings import SETTINGS, setting

GOOD = {
    "SPMD_TRANSPORT": {"local": "local", "mpi": "mpi", "torch": "torch", "nccl": "nccl", "counting": "counting"},
    "SPMD_SCHEDULER": {"auto": "auto", "lockstep": "lockstep", "threads": "threads"},
    "SPMD_DEVICE": {"cpu": "cpu", "cuda": "cuda"},
    "SPMD_TIMEOUT": {"0": 0.0, "1.5": 1.5, "600": 600.0, "1e3": 1000.0},
    "SPMD_CHECK": {"0": False, "1": True},
    "SPMD_BUFFERS": {"0": 0, "64": 64},
    "SPMD_GATHER_LIMIT": {"0": 0, "64": 64},
    "SPMD_NUMBA": {"0": False, "1": True},
    "SPMD_TRACEBACK": {"full": "full"},
    "SPMD_MPI_CUDA": {"0": False, "1": True},
    "SPMD_NCCL_FIXED_ORDER": {"0": False, "1": True},
    "SPMD_FSYNC": {"0": False, "1": True},
}
BAD = [
    "abc",
    "nan",
    "-1",
    "inf",
    "maybe",
    "true",
    "Full",
    "LOCAL",
    " ",
    "1,5",
    "0x10",
    "2",
    "\u0663",
    "local mpi",
    "None",
]


def bad_values() -> list[tuple[str, str]]:
    """Every variable with everything that is not one of its values."""
    numbers = {"SPMD_TIMEOUT": {"2"}, "SPMD_BUFFERS": {"2"}, "SPMD_GATHER_LIMIT": {"2"}}
    return [(name, text) for name in SETTINGS for text in BAD if text not in numbers.get(name, ())]


def refused(text: str, name: str, value: str) -> None:
    """Whether a text has the error of this variable and this value."""
    assert f"spmd.Mesh: the environment variable {name}\n  got:    {value!r}\n  needed: {SETTINGS[name].need}\n" in text
    assert f"  mend:   {name}=" in text


def test_the_table_has_every_variable_that_the_library_reads():
    files = [p for part in ("spmd", "kernels", "autodiff") for p in (ROOT / part).rglob("*.py")]
    named = {name for file in files for name in re.findall(r"\bSPMD_[A-Z_]+\b", Path(file).read_text(encoding="utf-8"))}
    assert named - {"SPMD_PYTEST_REPORTS"} == SETTINGS.keys() == GOOD.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_values_that_mean_something(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert setting(name) == SETTINGS[name].default
    monkeypatch.setenv(name, "")
    assert setting(name) == SETTINGS[name].default
    for text, value in GOOD[name].items():
        monkeypatch.setenv(name, text)
        assert setting(name) == value
        assert type(setting(name)) is type(value)


@pytest.mark.parametrize(("name", "text"), bad_values())
def test_values_that_mean_nothing(name, text, monkeypatch):
    for other in SETTINGS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, text)
    with pytest.raises(MeshError) as caught:
        spmd.Mesh(x=2)
    refused(str(caught.value), name, text)
    assert f"the environment variable {name} got: {' '.join(repr(text).split())}" in spmd.info()


@pytest.mark.parametrize(("option", "value"), [("transport", "local"), ("scheduler", "threads"), ("device", "cpu")])
def test_an_argument_stands_in_for_its_variable_only(option, value, monkeypatch):
    monkeypatch.setenv(f"SPMD_{option.upper()}", "abc")
    mesh = spmd.Mesh(x=2, **{option: value})
    assert (mesh._request.name if option == "transport" else getattr(mesh, option)) == value
    monkeypatch.setenv("SPMD_CHECK", "maybe")
    with pytest.raises(MeshError, match="SPMD_CHECK"):
        spmd.Mesh(x=2, **{option: value})


def test_an_import_bears_any_value():
    for text in ("abc", "-1"):
        ended = run_python("-c", "import spmd", **dict.fromkeys(SETTINGS, text))
        assert (ended.returncode, ended.stderr) == (0, ""), str(ended)


PROGRAM = """
import numpy as np, spmd
from spmd.errors import MeshError
try:
    spmd.map(lambda x: spmd.psum(x, "x"), spmd.P("x"), spmd.P(), mesh=spmd.Mesh(x=3))(np.ones(3))
except MeshError as error:
    print(error)
"""


def in_a_job(python, tmp_path, draws: int) -> None:
    """Some variables, in a job of processes: all of them raise the same."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    rng = random.Random(5)
    for name, text in rng.sample([(n, t) for n, t in bad_values() if t.isascii()], draws):
        clean = {other: "" for other in SETTINGS if other in os.environ}
        ended = launch(program, n=3, python=python, **clean | {name: text})
        assert ended.returncode == 0, str(ended)
        assert ended.stdout.count(f"spmd.Mesh: the environment variable {name}\n  got:    {text!r}\n") == 3, str(ended)


@each_mpi
@pytest.mark.parametrize("draws", [3, pytest.param(40, marks=pytest.mark.full)])
def test_values_that_mean_nothing_under_mpi(python, tmp_path, draws):
    in_a_job(python, tmp_path, draws)


@pytest.mark.torch
@pytest.mark.full
def test_values_that_mean_nothing_under_torchrun(tmp_path):
    in_a_job(TORCHRUN, tmp_path, 3)
