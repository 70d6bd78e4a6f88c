"""Whether this process is one of a job, of MPI or of torch.distributed.

Variables of MPI launchers are hints; only MPI's own world counts. For torch.distributed they are all there is until it
is initialised.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from spmd.errors import TransportError

__all__ = ["TorchWorld", "expected_size", "launcher_hint", "leftovers", "raw_exit", "tell_launcher", "torch_world"]

raw_exit = os._exit

# Variables of MPI launchers with the number of processes, or the rank. Those that a scheduler sets in plain shells of
# an allocation too (SLURM_NTASKS, SLURM_PROCID) say nothing.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMIX_RANK", "PMI_RANK")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Where launchers of MPI say which of the processes of its host this one is: not always in the order of the ranks."""
LAUNCHERS = ("hydra_pmi_proxy", "mpiexec", "mpirun", "orted", "prted", "prterun", "slurmstepd")
"""How the names of launchers of MPI begin."""
_WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL")
_OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launcher_hint() -> str | None:
    """The variable that suggests that an MPI launcher started this process, if any."""
    for name in SIZES:
        if os.environ.get(name, "1") not in ("", "1"):
            return name
    return next((name for name in _RANKS if name in os.environ), None)


def expected_size() -> int | None:
    """The likely number of processes of this job, without starting anything; None where that is unknown."""
    wanted = os.environ.get("SPMD_TRANSPORT")
    torch = torch_world() if wanted != "mpi" else None
    if torch is not None and torch.size > 1 and (torch.launched or wanted == "torch"):
        return torch.size
    mpi = sys.modules.get("mpi4py.MPI") if wanted in (None, "", "mpi") else None
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return mpi.COMM_WORLD.Get_size()
    for name in _WORLD_SIZES if wanted in (None, "", "mpi") else ():
        if os.environ.get(name, "1").isdecimal() and int(os.environ.get(name, "1")) > 1:
            return int(os.environ[name])
    return None if torch is None else torch.size


class TorchWorld(NamedTuple):
    """This process's place among those of torch.distributed. launched: by torchrun."""

    rank: int
    size: int
    launched: bool


def torch_world() -> TorchWorld | None:
    """The world of torch.distributed if it is initialised, else by a launcher's variables; None where there is neither,
    and with SPMD_TRANSPORT=local. Does not import torch."""
    if os.environ.get("SPMD_TRANSPORT") == "local":
        return None
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    dist = sys.modules.get("torch.distributed")
    if getattr(dist, "is_initialized", bool)():
        return TorchWorld(dist.get_rank(), dist.get_world_size(), launched)  # type: ignore[union-attr]
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdecimal() and size.isdecimal() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()):
        return None
    return TorchWorld(int(rank), int(size), launched)


def number_in(names: Sequence[str]) -> int | None:
    """The number that the first of these environment variables holds that has one."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None)


def describe_hint(hint: str | None) -> str:
    return f"{hint}={os.environ[hint or '']}: a launcher started several processes"


def leftovers(engine: str) -> tuple[str, str]:
    """An engine's launcher variables in the environment: with their values, and as arguments of `unset`."""
    prefixes = sorted(n for n in os.environ if n.startswith(_OF_LAUNCHERS))
    names = [n for n in _OF_TORCH if n in os.environ] if engine == "torch" else prefixes
    return ", ".join(f"{n}={os.environ[n]}" for n in names), " ".join(names)


def refuse_leftovers(hint: str | None) -> None:
    """Raise where variables of an MPI launcher are set, but there is no connection to one: an MPI library would end the
    process without a helpful message."""
    if hint is None or (fault := _no_connection()) is None:
        return
    variables, names = leftovers("mpi")
    raise TransportError.at(
        "spmd.Mesh",
        got=f"{variables} in the environment, as of a launcher of MPI, and {fault}",
        need="the connection that a launcher gives to each process that it starts",
        mend=f'start it by mpiexec; or, where these are left over from another job, "unset {names}", or '
        'Mesh(..., transport="local"), or SPMD_TRANSPORT=local',
    )


def _no_connection() -> str | None:
    """Why this process cannot reach the launcher of its variables; None if it may."""
    if "PMI_FD" in os.environ and not _is_socket(os.environ["PMI_FD"]):
        return "PMI_FD is no connection"
    if (
        "PMIX_RANK" in os.environ
        and "PMIX_NAMESPACE" in os.environ
        and not any(name.startswith("PMIX_SERVER_") for name in os.environ)
    ):
        return "no PMIX_SERVER_URI says where it is"
    return None


def _is_socket(file: str) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(int(file)).st_mode)
    except (OSError, ValueError, OverflowError):
        return False


def tell_launcher(status: int) -> None:
    """Tell MPICH's launcher of a failure before the start of MPI, which it would ignore. Others see the exit status."""
    if _is_socket(os.environ.get("PMI_FD", "")):
        with suppress(OSError):
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={status}\n".encode())
