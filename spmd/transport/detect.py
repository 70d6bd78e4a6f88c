"""Whether this process is one of an MPI job. Launchers' variables are hints; only MPI's own world is believed."""

from __future__ import annotations

import os
import sys
from typing import Any

from spmd.errors import TransportError, message

__all__ = ["launcher_hint", "mpi_world"]

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

    Raises TransportError where a launcher started several processes and mpi4py is missing.
    """
    hint = launcher_hint()
    if hint is None and "mpi4py.MPI" not in sys.modules:
        return None
    try:
        from mpi4py import MPI
    except ImportError as error:
        if hint is None or os.environ.get(hint, "1") == "1" or hint.startswith("SLURM") or hint in _RANKS:
            return None
        raise TransportError(
            message(
                "spmd.Mesh",
                got=f"{hint}={os.environ[hint]}: a launcher started several processes, and mpi4py cannot be imported "
                f"({error})",
                need="mpi4py with a working MPI library in this environment",
                mend='pip install "spmd[mpi]" and use the mpiexec of that environment, or Mesh(..., transport="local") '
                "to run each process by itself",
            )
        ) from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    return MPI.COMM_WORLD
