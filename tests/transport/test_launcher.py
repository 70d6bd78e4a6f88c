"""Which transport and scheduler are chosen: launchers, variables, arguments, and a missing mpi4py."""

from __future__ import annotations

import os
import textwrap
from functools import partial

import pytest
from launch import ROOT, Ended, run_python

import spmd
from spmd.errors import MeshError
from spmd.transport.launcher import launcher_hint

LAUNCHERS = {
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"},
    "openmpi": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"},
    "srun with PMIx": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "PMIX_RANK": "0"},
    "srun with PMI 2": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "PMI_RANK": "0", "PMI_SIZE": "4"},
    "srun without PMI": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"},
}
SHELLS = {
    "a plain shell": {},
    "a shell in an allocation": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "a batch script": {"SLURM_JOB_ID": "7", "SLURM_NPROCS": "4", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"},
    "a shell with a rank": {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"},
    "torchrun of one": {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"},
}
ALONE = {
    "mpiexec -n 1": {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
    "an interactive step": {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
}

# A stand-in for mpi4py whose world has FAKE_WORLD processes; "missing" cannot be imported.
FAKE = {
    "mpi4py/__init__.py": "import os\nif os.environ['FAKE_WORLD'] == 'missing': raise ImportError('no mpi4py here')\n"
    "class rc: initialize = finalize = None\n",
    "mpi4py/MPI.py": """
        import os
        class Comm:
            def Get_size(self): return int(os.environ["FAKE_WORLD"])
            def Get_rank(self): return 0
        COMM_WORLD = Comm()
        def Is_initialized(): return True
        def Is_finalized(): return False
        def Get_library_version(): return "Stand-in MPI 1.0, and more"
    """,
}

PROGRAM = """
import sys, warnings
import spmd
from spmd.transport.processes.job import mpi_world
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    try:
        world = mpi_world()
        mpi_world()
        if world is None or world.Get_size() == 1:
            print(spmd.Mesh(x=4).transport.name, "mpi4py" in sys.modules)
        else:
            print("mpi", world.Get_size())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
for w in told:
    print(w.category.__name__, w.message)
"""


_PREFIXES = ("PMI", "OMPI_", "MPI_", "SLURM_", "SPMD_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_RANK")


def clean() -> dict[str, str]:
    """The environment without what a launcher of these tests may have set."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES)}


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """What a process sees that a launcher started with these variables, in an MPI world of this size."""
    for name, text in FAKE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for name in set(os.environ) - set(clean()):
        monkeypatch.delenv(name)

    def asked(world: int | str, **variables: str) -> str:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        ended: Ended = run_python("-c", PROGRAM, FAKE_WORLD=str(world), **variables)
        assert ended.returncode == 0, str(ended)
        assert ended.stderr == "", str(ended)
        return ended.stdout

    return asked


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_mpi_is_asked_where_a_launcher_started_this_process(ask, launcher):
    assert ask(4, **LAUNCHERS[launcher]) == "mpi 4\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_mpi_is_not_even_imported_elsewhere(ask, shell):
    assert ask(4, **SHELLS[shell]) == "local False\n"


@pytest.mark.parametrize("start", ALONE)
def test_an_mpi_world_of_one_is_local(ask, start):
    assert ask(1, **ALONE[start]) == "local True\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_that_mpi_does_not_connect_are_told_so_once(ask, launcher):
    """As with the mpiexec of another MPI library than mpi4py's."""
    answer, warning = ask(1, **LAUNCHERS[launcher]).splitlines()
    assert answer == "local True"
    variable = next(v for v in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS") if v in LAUNCHERS[launcher])
    assert warning.startswith(f"RuntimeWarning {variable}=4: a launcher started several processes, but MPI sees one")
    assert "(Stand-in MPI 1.0)" in warning
    assert "SPMD_TRANSPORT=local" in warning


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_missing_mpi4py_is_an_error_where_mpiexec_started_several_processes(ask, launcher):
    said = ask("missing", **LAUNCHERS[launcher])
    if launcher in ("mpich", "openmpi", "srun with PMI 2"):
        assert said.startswith("TransportError: spmd.Mesh\n  got:    ")
        assert "=4: a launcher started several processes, and mpi4py cannot be imported (no mpi4py here)" in said
        assert 'pip install "spmd[mpi]"' in said
        assert 'transport="local"' in said
    else:  # srun starts also what has nothing to do with MPI.
        answer, warning = said.splitlines()
        assert answer == "local False"
        assert "mpi4py cannot be imported (no mpi4py here): each one runs all workers by itself" in warning


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_spmd_transport_local_keeps_mpi_out(ask, launcher):
    assert ask("missing", SPMD_TRANSPORT="local", **LAUNCHERS[launcher]) == "local False\n"


def test_an_environment_without_launcher_has_no_hint(monkeypatch):
    for name in set(os.environ) - set(clean()):
        monkeypatch.delenv(name)
    assert launcher_hint() is None
    monkeypatch.setenv("PMI_SIZE", "1")
    assert launcher_hint() is None
    monkeypatch.setenv("PMI_RANK", "0")
    assert launcher_hint() == "PMI_RANK"
    monkeypatch.setenv("PMI_SIZE", "2")
    assert launcher_hint() == "PMI_SIZE"


TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
TORCHRUN = TORCH | {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "a"}
WORLD = """
import sys
from spmd.transport.processes.job import job_world
world = job_world()
print(world and world[:3], "mpi4py" in sys.modules, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (TORCH, "('torch', 1, 4) False False"),
        (TORCHRUN, "('torch', 1, 4) False False"),
        (TORCHRUN | LAUNCHERS["srun with PMIx"], "('torch', 1, 4) False False"),
        (TORCH | LAUNCHERS["mpich"], "('mpi', 0, 6) True False"),
        (TORCH | {"SPMD_TRANSPORT": "local"}, "None False False"),
        (TORCHRUN | LAUNCHERS["mpich"] | {"SPMD_TRANSPORT": "mpi"}, "('mpi', 0, 6) True False"),
        (TORCH | LAUNCHERS["mpich"] | {"SPMD_TRANSPORT": "torch"}, "('torch', 1, 4) False False"),
        (TORCH | {"WORLD_SIZE": "many"}, "None False False"),
    ],
)
def test_the_nearest_launcher_says_which_job_this_is(ask, tmp_path, variables, found):
    """In an environment of which `ask` has made mpi4py's stand-in."""
    ended = run_python("-c", WORLD, FAKE_WORLD="6", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]), **variables)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout == f"{found}\n"
    assert ended.stderr == ""


def test_variables_and_arguments_choose_the_scheduler(monkeypatch):
    monkeypatch.setenv("SPMD_SCHEDULER", "threads")
    assert spmd.Mesh(x=2).scheduler == "threads"
    assert spmd.Mesh(x=2, scheduler="lockstep").scheduler == "lockstep"
    monkeypatch.setenv("SPMD_SCHEDULER", "")
    assert spmd.Mesh(x=2).scheduler == "auto"
    monkeypatch.setenv("SPMD_SCHEDULER", "thread")
    with pytest.raises(MeshError, match="SPMD_SCHEDULER") as caught:
        spmd.Mesh(x=2)
    assert '"threads"' in str(caught.value)


def test_unknown_transports_are_refused(monkeypatch):
    monkeypatch.setenv("SPMD_TRANSPORT", "smoke")
    with pytest.raises(MeshError, match="SPMD_TRANSPORT"):
        spmd.Mesh(x=2)
    monkeypatch.setenv("SPMD_TRANSPORT", "local")
    assert spmd.Mesh(x=2).transport.name == "local"


def test_mpi_asked_for_in_a_world_of_one_says_what_to_do(ask):
    said = ask(1, SPMD_TRANSPORT="mpi")
    assert said.startswith("TransportError: spmd.Mesh")
    assert "Mesh(x=4) of 4 workers, and an MPI world of 1 process\n" in said
    assert "mpiexec -n 4" in said


def test_a_process_has_told_what_it_waits_in_once_it_has_written_that():
    import numpy as np

    from spmd.transport.call import Call
    from spmd.transport.processes.shared_files import elected, job_name
    from spmd.transport.processes.status_board import StatusBoard

    boards = [StatusBoard(rank, 2, partial(elected, job_name(os.getpid()))) for rank in range(2)]
    try:
        one, other = boards
        one.publish()
        assert other.have_published([0])
        one.enter(one.rendezvous_count(7, (0, 1)), Call("psum", ("x",), np.dtype(float), (3,)))
        one.start_waiting(1)
        assert not other.have_published([0, 1])
        one.publish()
        other.publish()
        assert other.have_published([0, 1])
        assert other.calls(0)[0].startswith("psum(float64[3], 'x')")
    finally:
        for board in boards:
            board.close()
