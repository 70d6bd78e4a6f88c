"""Choose the transport of a mesh: virtual workers of this process, or the processes of its job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from spmd.errors import MeshError, TransportError, describe
from spmd.transport.base import Transport
from spmd.transport.launcher import expected_size, leftovers, torch_world
from spmd.transport.processes.job import in_a_child, job_world, mpi_world, no_job_of_a_child, start_mpi

if TYPE_CHECKING:
    from spmd.cuda import Places

__all__ = ["TransportRequest"]


class TransportRequest(NamedTuple):
    """The requirements of a mesh on its transport.

    mesh: the mesh as messages show it. size: its number of workers. name: "local", "mpi", "torch", "nccl" or
    "counting"; None: that of the job which this process belongs to, else "local". comm: an mpi4py communicator; implies
    "mpi". places: where the workers of this process have their arrays on GPUs; None on the host.
    """

    mesh: str
    size: int
    name: str | None
    comm: Any
    places: Places | None

    def names_job(self) -> bool:
        """Whether the processes of the job, if this process belongs to one, are the workers."""
        if self.name in ("local", "counting") or in_a_child() or self.size == 1:
            return False
        if self.comm is not None:
            return hasattr(self.comm, "Get_size") and self.comm.Get_size() == self.size
        return self.size == expected_size()

    def choose(self) -> Transport:
        if self.name != "nccl":
            return self.choose_engine()
        from spmd.transport.nccl import NcclTransport

        assert self.places is not None
        return NcclTransport(self.choose_engine(), self.places)

    def choose_engine(self) -> Transport:
        """The transport, under "nccl" the one that gives the workers: virtual workers or processes."""
        name = "mpi" if self.comm is not None else None if self.name == "nccl" else self.name
        if name is None:
            world = job_world()
            name = "local" if world is None else world.engine
        if in_a_child() and name in ("mpi", "torch"):
            raise no_job_of_a_child()
        if name == "counting":
            from spmd.transport.counting import CountingTransport

            return CountingTransport(self.size)
        if name == "local":
            from spmd.transport.local.transport import LocalTransport

            return LocalTransport(self.size, self.places)
        return self._mpi() if name == "mpi" else self._torch()

    def _mpi(self) -> Transport:
        comm = self.comm if self.comm is not None else mpi_world()
        if comm is not None and not hasattr(comm, "Get_size"):
            raise MeshError.at(
                "spmd.Mesh",
                argument="comm",
                got=describe(comm),
                need="an mpi4py communicator",
                mend="comm=MPI.COMM_WORLD, or leave it out",
            )
        if comm is None:
            try:
                comm = start_mpi().COMM_WORLD
            except ImportError as error:
                raise _unavailable("mpi", "mpi4py", "mpi4py with a working MPI library", error) from error
        self._check_size(comm.Get_size(), "an MPI world", "mpiexec -n")
        if self.places is not None:
            from spmd.transport.processes.cuda_aware_mpi import transport_of

            return transport_of(comm, self.places)
        from spmd.transport.processes.mpi import MpiTransport

        return MpiTransport.of(comm)

    def _torch(self) -> Transport:
        world = torch_world()
        kind = "a torch.distributed world"
        if world is not None and not world.launched and (variables := leftovers("torch")[0]):
            kind += f" (by {variables}, which may be left over from another job)"
        self._check_size(1 if world is None else world.size, kind, "torchrun --nproc-per-node")
        try:
            import torch.distributed as dist
        except ImportError as error:
            raise _unavailable("torch", "torch", "torch, which the processes speak through", error) from error
        if not (dist.is_available() and dist.is_gloo_available()):
            need = "a torch that is built with torch.distributed and gloo"
            raise _unavailable("torch", "torch", need, "it has no gloo")
        from spmd.transport.processes.gloo import GlooTransport

        if self.places is not None:
            from spmd.transport.processes.host_staging import on_places, staged

            return on_places(staged(GlooTransport).of(), self.places)
        return GlooTransport.of()

    def _check_size(self, size: int, world: str, launcher: str) -> None:
        if size != self.size:
            raise TransportError.at(
                "spmd.Mesh",
                got=f"{self.mesh} of {self.size} workers, and {world} of {size} process{'es' * (size != 1)}",
                need="as many processes as workers",
                mend=f'start it with "{launcher} {self.size}", or Mesh(..., transport="local") '
                "for virtual workers in each process",
            )


def _unavailable(name: str, package: str, need: str, reason: object) -> TransportError:
    """The error for a transport whose package is missing or cannot be used."""
    problem = "imported" if isinstance(reason, ImportError) else "used"
    return TransportError.at(
        "spmd.Mesh",
        argument="transport",
        got=f'"{name}", and {package} cannot be {problem} ({reason})',
        need=need,
        mend=f'pip install "spmd[{name}]", or Mesh(..., transport="local") or SPMD_TRANSPORT=local to run each '
        "process by itself",
    )
