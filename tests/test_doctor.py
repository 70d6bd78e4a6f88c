"""`python -m spmd doctor`: what it finds on this machine, and its mends for what does not work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import launch, mpiexec

from spmd import doctor
from spmd.__main__ import main
from spmd.doctor import FAULT, NOTE, OK


def of(findings, thing):
    return [f for f in findings if f.thing == thing]


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Make mpiexec a shell script; of its arguments the program and what starts it are "${@:3}"."""

    def plant(script: str) -> str:
        path = tmp_path / "mpiexec"
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(doctor, "_launcher", lambda: str(path))
        return str(path)

    return plant


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_what_works_is_said(capsys):
    pytest.importorskip("mpi4py")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok    MPI ") and "two processes of MPI summed" in line for line in lines)
    assert lines[-1] == "All that is installed works."


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_a_process_of_a_job_starts_no_other(tmp_path):
    program = tmp_path / "doctor_in_a_job.py"
    program.write_text("import sys\nfrom spmd.__main__ import main\nsys.exit(main(['doctor', '--json']))\n")
    ended = launch(program, n=2)
    assert ended.returncode == 0, ended
    (finding,) = of([doctor.Finding(**f) for f in json.loads(ended.stdout)], "launcher")
    assert finding.verdict == NOTE
    assert "process of a job" in finding.found


def test_a_launcher_of_another_library_is_a_fault(launcher):
    pytest.importorskip("mpi4py")
    path = launcher('"${@:3}" & "${@:3}" & wait')
    (finding,) = doctor._mpi()
    assert finding.verdict == FAULT
    assert "of two kinds" in finding.mend
    assert path in finding.mend


def test_open_mpi_that_refuses_root_is_a_fault(launcher):
    pytest.importorskip("mpi4py")
    launcher("echo 'mpiexec has detected an attempt to run as root.' >&2; exit 1")
    (finding,) = doctor._mpi()
    assert (finding.verdict, finding.mend[:29]) == (FAULT, "export OMPI_ALLOW_RUN_AS_ROOT")


def test_a_launcher_that_hangs_is_ended(launcher, monkeypatch, tmp_path):
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(doctor, "_LIMIT", 2.0)
    monkeypatch.setattr(doctor, "_mpi_library", lambda: None)
    mark = tmp_path / "alive"
    launcher(f"echo started; (sleep 8; touch {mark}) & sleep 100")
    (finding,) = doctor._mpi()
    assert finding.verdict == FAULT
    assert "did not end within 2 s; the last line was: started" in finding.found
    assert not mark.exists()


def test_no_launcher_and_no_mpi(monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(doctor, "_launcher", lambda: None)
    (finding,) = doctor._mpi()
    assert (finding.verdict, finding.mend[:17]) == (FAULT, "pip install mpich")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    (finding,) = doctor._mpi()
    assert (finding.verdict, finding.mend) == (NOTE, 'pip install "spmd[mpi]"')
    (finding,) = doctor._torch()
    assert (finding.verdict, finding.mend) == (NOTE, 'pip install "spmd[torch]"')


def test_a_wrong_setting_is_a_fault(monkeypatch):
    monkeypatch.setenv("SPMD_TIMEOUT", "soon")
    (finding,) = doctor._settings()
    assert finding.verdict == FAULT
    assert "SPMD_TIMEOUT=600" in finding.mend


def test_packages_are_those_that_the_library_requires(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["numpy>=2", "not-there>=1", 'x; extra == "y"'])
    (finding,) = doctor._python()
    assert (finding.verdict, "not-there is not installed" in finding.found) == (FAULT, True)

    def missing(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", missing)
    (finding,) = doctor._python()
    assert finding.verdict == OK


def test_little_shared_memory_is_noted(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1 << 20}))
    (finding,) = doctor._shared_memory()
    if Path("/dev/shm").is_dir():
        assert finding.verdict == NOTE
        assert "--shm-size" in finding.mend


def test_the_status_says_whether_there_is_a_fault(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("x", OK, "y"), doctor.Finding("a", FAULT, "b", "c")])
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [f"{'':21}mend: c", "1 fault"]


@pytest.mark.torch
def test_torchrun_works():
    pytest.importorskip("torch")
    (finding,) = doctor._torch()
    assert finding.verdict == OK, finding
