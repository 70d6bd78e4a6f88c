"""Meshes on a GPU: `device_cases.py` with the stand-in for CuPy, and what is said where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import emulator
import launch
import pytest

import spmd
from spmd.errors import MeshError, TransportError

HERE = Path(__file__).resolve().parent
VARIABLES = {"SPMD_TEST_DEVICE": "emulated", "SPMD_DEVICE": "cuda"}
PATH = os.pathsep.join(map(str, (HERE / "emulator" / "site", HERE.parent, HERE)))

needs_compiler = pytest.mark.skipif(emulator.COMPILER is None, reason="the stand-in needs g++")


@needs_compiler
def test_with_the_stand_in():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "device_cases.py")],
        env=os.environ | VARIABLES | {"PYTHONPATH": PATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@needs_compiler
@pytest.mark.mpi
@pytest.mark.parametrize(("direct", "name"), [("0", "StagedTransport"), ("1", "DirectTransport")])
def test_processes(direct, name):
    done = launch.launch(HERE / "mpi_programs" / "devices.py", PYTHONPATH=PATH, SPMD_MPI_CUDA=direct, **VARIABLES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["mpi", name, "cuda"]


@pytest.mark.skipif(os.environ.get("SPMD_TEST_DEVICE", "cpu") != "cpu", reason="there is a GPU, or its stand-in")
def test_without_a_gpu_it_is_said():
    if launch_has_gpu():
        pytest.skip("there is a GPU")
    with pytest.raises(TransportError, match=r"(?s)argument device.*(finds no GPU|cannot be imported).*mend"):
        spmd.Mesh(x=2, device="cuda")
    with pytest.raises(MeshError, match='device="cuda"'):
        spmd.Mesh(x=2, device="cpu", transport="nccl")
    with pytest.raises(MeshError, match="one of 'cpu', 'cuda'"):
        spmd.make_mesh((2,), ("x",), device="gpu")
    done = subprocess.run(
        [sys.executable, "-m", "spmd", "bench", "kernels", "--device", "cuda"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "argument device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "device        cpu" in info_of(spmd.Mesh(x=2))


def launch_has_gpu() -> bool:
    from conftest import _has_gpu

    return _has_gpu()


def info_of(mesh: spmd.Mesh) -> str:
    with mesh:
        return spmd.info()
