"""Whether this process is one of a job, of MPI or of torch.distributed.

Of MPI launchers' variables are hints; only MPI's own world is believed. Of torch.distributed they are all there is,
until somebody has initialised it.
"""

from __future__ import annotations

import io
import os
import stat
import sys
import time
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from spmd.errors import TransportError, message

__all__ = [
    "TorchWorld",
    "World",
    "abort",
    "end_the_job_on_error",
    "job_world",
    "launcher_hint",
    "mpi_world",
    "torch_world",
]

# What a launcher of MPI tells each process that it starts: how many there are, or which one it is. Variables that a
# scheduler sets in plain shells of an allocation too (SLURM_NTASKS, SLURM_PROCID) say nothing.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMIX_RANK", "PMI_RANK")


def launcher_hint() -> str | None:
    """The variable that suggests that an MPI launcher started this process, if any."""
    for name in _SIZES:
        if os.environ.get(name, "1") not in ("", "1"):
            return name
    return next((name for name in _RANKS if name in os.environ), None)


def mpi_world() -> Any:
    """MPI.COMM_WORLD where it may have several processes, else None. Imports mpi4py only if a launcher is likely.

    With SPMD_TRANSPORT=local every process is by itself: None.
    Raises TransportError where mpiexec started several processes and mpi4py is missing. srun may have started
    several that have nothing to do with each other: there, and where MPI sees one process only, it warns.
    """
    hint = launcher_hint()
    if os.environ.get("SPMD_TRANSPORT") == "local" or (hint is None and "mpi4py.MPI" not in sys.modules):
        return None
    several = hint in _SIZES
    try:
        from mpi4py import MPI
    except ImportError as error:
        if several and hint != "SLURM_STEP_NUM_TASKS":
            raise TransportError(
                message(
                    "spmd.Mesh",
                    got=f"{_said(hint)}, and mpi4py cannot be imported ({error})",
                    need="mpi4py with a working MPI library in this environment",
                    mend='pip install "spmd[mpi]" and use the mpiexec of that environment, or Mesh(..., '
                    'transport="local") or SPMD_TRANSPORT=local to run each process by itself',
                )
            ) from error
        if several:
            _warn_alone(hint, f"mpi4py cannot be imported ({error})")
        return None
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    if MPI.COMM_WORLD.Get_size() > 1:
        end_the_job_on_error()
    elif several:
        _warn_alone(hint, f"MPI sees one ({MPI.Get_library_version().splitlines()[0].split(',')[0]})")
    return MPI.COMM_WORLD


class TorchWorld(NamedTuple):
    """This process's place among those of torch.distributed. launched: by torchrun."""

    rank: int
    size: int
    launched: bool


def torch_world() -> TorchWorld | None:
    """The world of torch.distributed where it is initialised, else what a launcher's variables tell of it; None where
    there is neither, and with SPMD_TRANSPORT=local. Does not import torch."""
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


class World(NamedTuple):
    """The processes among which this one is: by which engine, its number, how many they are, and MPI's communicator."""

    engine: str
    rank: int
    size: int
    comm: Any = None


def job_world() -> World | None:
    """The job of several processes that this one is of, None where it is by itself.

    torchrun stands nearer to a process than a launcher of MPI: it is what srun starts on each host. Otherwise MPI goes
    before torch.distributed. SPMD_TRANSPORT names one of them.
    """
    wanted = os.environ.get("SPMD_TRANSPORT")
    torch = torch_world() if wanted != "mpi" else None
    if torch is not None and torch.size > 1 and (torch.launched or wanted == "torch"):
        return World("torch", torch.rank, torch.size)
    mpi = mpi_world() if wanted != "torch" else None
    if mpi is not None and mpi.Get_size() > 1:
        return World("mpi", mpi.Get_rank(), mpi.Get_size(), mpi)
    if torch is not None and torch.size > 1:
        return World("torch", torch.rank, torch.size)
    return None


def _said(hint: str | None) -> str:
    return f"{hint}={os.environ[hint or '']}: a launcher started several processes"


_warned = False


def _warn_alone(hint: str | None, reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{_said(hint)}, but {reason}: each one runs all workers by itself. Use the mpiexec of the environment "
            "that mpi4py is in, or set SPMD_TRANSPORT=local if this is meant",
            RuntimeWarning,
            stacklevel=3,
        )


_report: Any = None


def end_the_job_on_error() -> None:
    """From now on an error that nobody catches ends all processes of the job; the others would wait forever."""
    global _report
    if _report is None:
        _report, sys.excepthook = sys.excepthook, _end_the_job


def _end_the_job(kind, error, traceback) -> None:
    """Report an error, one of all processes for all, and end them."""
    patience = sys.modules.get("spmd.transport.patience")
    others = patience.failed_too(kind, error) if patience is not None else []
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        _report(kind, error, traceback)
    finally:
        text, sys.stderr = sys.stderr.getvalue(), stderr
    # In one piece, and with time for the launcher to pass it on: what is under way when the job ends gets lost.
    print(text + "".join(f"{line}\n" for line in others), end="", file=sys.stderr, flush=True)
    time.sleep(0.1)
    abort(1)


_READ = 0.1
"""Seconds that a launcher has to read what was written: what it has not read when the job is aborted it may drop."""


def abort(status: int) -> None:
    """End all processes of this process's job, with this status."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_READ)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        if not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
            mpi.COMM_WORLD.Abort(status)
    elif "PMI_FD" in os.environ:
        # MPICH's launcher takes no notice of a process that fails before it has started MPI, unless it says so.
        with suppress(OSError, ValueError):
            launcher = int(os.environ["PMI_FD"])
            if stat.S_ISSOCK(os.fstat(launcher).st_mode):
                os.write(launcher, f"cmd=abort exitcode={status}\n".encode())
    elif "spmd.transport.torch" in sys.modules:
        os._exit(status)  # torchrun ends the others as soon as it sees that. The usual end of torch takes its time.


if launcher_hint() in _SIZES and os.environ.get("SPMD_TRANSPORT") != "local":
    end_the_job_on_error()
