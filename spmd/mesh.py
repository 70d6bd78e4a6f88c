"""A named grid of workers, and a worker's place in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import device as devices
from spmd.autodiff.staging.recorder import Program
from spmd.autodiff.tracer import Array
from spmd.errors import LayoutError, MeshError, TransportError, describe, message, nearest
from spmd.layout import Layout, P, Spec
from spmd.replicas import Replicas
from spmd.settings import SETTINGS, check_all, setting
from spmd.spellings import closest
from spmd.state import State, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.base import Comm, Transport, checks_are_on
from spmd.transport.call import Group
from spmd.transport.handles import Outcome
from spmd.transport.launcher import expected_size, leftovers, torch_world
from spmd.transport.processes.job import in_a_child, job_world, mpi_world, no_job_of_a_child, start_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

    from spmd.cuda import Places
    from spmd.frontends import Frontend

__all__ = [
    "WORKER",
    "Mesh",
    "Worker",
    "axis_index",
    "axis_size",
    "current_mesh",
    "here",
    "is_main",
    "make_mesh",
    "worker_index",
]


class Worker:
    """One worker of a mesh while it runs a body.

    index: its number, last axis fastest. coordinates: its place along each axis. tracked: whether the arrays of its
    body carry their state. frontend: whose arrays its body is written in; None for NumPy's. prepared: what its lines
    called in earlier maps, and with which blocks. program: where what it does is written down, if it is. replicas: what
    its process supposed to be one value in this map.
    """

    __slots__ = (
        *("comm", "coordinates", "frontend", "groups", "index", "mesh", "prepared", "program", "replicas", "tracked"),
    )

    def __init__(self, mesh: Mesh, comm: Comm, tracked: bool, replicas: Replicas):
        self.mesh = mesh
        self.comm = comm
        self.index = comm.worker
        self.coordinates = mesh.coordinates(comm.worker)
        self.tracked = tracked
        self.replicas = replicas
        self.frontend: Frontend | None = None
        self.groups: dict[tuple[str, ...], Group] = {}
        self.prepared = mesh._prepared.setdefault(self.index, {})
        self.program: Program | None = None

    def write_down(self, program: Program | None = None) -> Program:
        """From now on every collective becomes a line of a program (None: of a new one), also one of constants: others
        may wait for it."""
        self.prepared = _NEVER
        self.program = program = program or Program()
        return program

    def group(self, axes: tuple[str, ...]) -> Group:
        """The workers that differ from this one along `axes` only."""
        found = self.groups.get(axes)
        if found is None:
            found = self.groups[axes] = self.mesh.group(self.index, axes)
        return found

    def state(self) -> State:
        """The state of bare data in this body."""
        return state_of(())

    def carrying(self, value: Any, state: State) -> Any:
        """A number or bare data of this body, with its state where states are tracked."""
        if self.frontend is not None:
            return self.frontend.carrying(value, state, self.tracked)
        return Array(value, state) if self.tracked else value


class _Never(dict):
    """In place of what lines have called: nothing is looked for."""

    def get(self, key: Any, default: Any = None) -> Any:
        return False


_NEVER = _Never()

WORKER: ContextVar[Worker | None] = ContextVar("spmd_worker", default=None)
_meshes: ContextVar[tuple[Mesh, ...]] = ContextVar("spmd_meshes", default=())


class Mesh:
    """A grid of workers with named axes: `Mesh(data=2, model=2)`.

    axes: the axis sizes by name, major to minor. The options are keywords of the same call, so an axis of one of
    their names needs `make_mesh`:
    transport: "local" (virtual workers of this process), "mpi" or "torch" (processes). By default "mpi" where this
    process is one of several of MPI, "torch" where it is one of several of torch.distributed, as torchrun starts them,
    else "local"; the variable SPMD_TRANSPORT overrides the default.
    "nccl": a GPU for each worker, among which NCCL moves blocks; the workers are those that the default gives.
    scheduler: of "local": "lockstep", "threads", or "auto" (by measurement); the variable SPMD_SCHEDULER overrides
    the default.
    comm: an mpi4py communicator whose processes are the workers; implies "mpi".
    device: "cpu", or "cuda": blocks are arrays of CuPy, and bodies run on them; worker k is on GPU k modulo their
    number, on a stream of its own. The variable SPMD_DEVICE overrides the default, "cpu".

    `with mesh:` makes it the mesh of the maps that are called inside. Where the processes of a job are its workers it
    starts MPI, and each process from then on sees it if another one ends; else it starts nothing before it is used.
    Raises MeshError for bad sizes or options, TransportError where the engine does not have the workers, or there is
    no GPU.
    """

    @api_boundary
    def __init__(
        self,
        *,
        transport: str | None = None,
        scheduler: str | None = None,
        comm: MPI.Comm | None = None,
        device: str | None = None,
        **axes: int,
    ):
        self._setup(axes, transport, scheduler, comm, device)

    def _setup(
        self, axes: Mapping[str, int], transport: str | None, scheduler: str | None, comm: Any, device: str | None
    ) -> None:
        where = "spmd.Mesh"
        for name, n in axes.items():
            if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
                raise MeshError(
                    message(
                        where, argument=name, got=repr(n), need="a size, an int of at least 1", mend=f"Mesh({name}=2)"
                    )
                )
        self.axes: dict[str, int] = {name: int(n) for name, n in axes.items()}
        self.sides = tuple(self.axes.items())
        self.size = math.prod(self.axes.values())
        given = {"SPMD_SCHEDULER": scheduler, "SPMD_TRANSPORT": transport, "SPMD_DEVICE": device}
        check_all(but=[name for name, value in given.items() if value is not None])
        self.scheduler = _choice(where, "scheduler", scheduler) or "auto"
        self._wanted = _choice(where, "transport", transport)
        chosen = _choice(where, "device", device)
        self.device = "cuda" if self._wanted == "nccl" and device is None else chosen or "cpu"
        if self._wanted == "nccl" and self.device != "cuda":
            raise MeshError(
                message(
                    where,
                    argument="device",
                    got=f'"{self.device}", with transport="nccl"',
                    need="blocks on GPUs: NCCL moves no others",
                    mend='device="cuda"',
                )
            )
        self.places: Places | None = devices.places(self.device)
        """Where the workers of this process have their arrays on GPUs; None on the host."""
        if comm is not None and self._wanted == "local" and transport is not None:
            raise MeshError(
                message(
                    where,
                    argument="comm",
                    got='a communicator, and transport="local"',
                    need="one of them",
                    mend="leave out the one that is not meant",
                )
            )
        self._comm = comm
        self._transport: Transport | None = None
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self._prepared: dict[int, dict[Any, Any]] = {}
        self._coordinates: dict[int, dict[str, int]] = {}
        self.checks = checks_are_on()
        self.turns: dict[Any, int] = {}
        """How often each line of a body has compared what it supposed to be one value."""
        self.chosen: dict[str, str] = {}
        """The scheduler that "auto" settled on, by the name of the map; `spmd.info()` shows it."""
        if self._is_of_the_job():
            # From here on the others see it where this process ends before it comes to a map.
            _engine(self, "mpi" if comm is not None else None if self._wanted == "nccl" else self._wanted)

    def _is_of_the_job(self) -> bool:
        """Whether the processes of the job, if there is one, are its workers."""
        if self._wanted == "local" or in_a_child() or self.size == 1:
            return False
        if self._comm is not None:
            return hasattr(self._comm, "Get_size") and self._comm.Get_size() == self.size
        return self.size == expected_size()

    map: Callable[..., Any]
    """`mesh.map(f, in_specs, out_specs)`: `spmd.map` on this mesh. Set by `spmd.mapping`."""

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{k}={n}' for k, n in self.axes.items())})"

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mesh)
            and self.sides == other.sides
            and self.device == other.device
            and (self.transport is other.transport or self.transport.name == other.transport.name == "local")
        )

    def __hash__(self) -> int:
        return hash(self.sides)

    def __copy__(self) -> Mesh:
        """A mesh names workers, and does not change: so it is its own copy."""
        return self

    def __deepcopy__(self, memo: object) -> Mesh:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without what bodies have called so far, which is known by the ids of this process."""
        self.check_pickled("a Mesh")
        return {**self.__dict__, "_prepared": {}, "turns": {}}

    def __enter__(self) -> Mesh:
        _meshes.set((*_meshes.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        _meshes.set(_meshes.get()[:-1])

    @property
    def transport(self) -> Transport:
        """The engine, chosen at first use."""
        if self._transport is None:
            self._transport = _transport(self)
        return self._transport

    @property
    def local_workers(self) -> Sequence[int]:
        """The numbers of the workers that this process holds."""
        return self.transport.local

    def check_pickled(self, what: str) -> None:
        """Raise where something of this mesh is to be pickled, and not all of it is in the memory of this process."""
        if self.transport.name == "local" and self.places is None:
            return
        raise MeshError(
            message(
                f"pickle of {what}",
                got=f"{self} with transport {self.transport.name!r} on {self.device!r}",
                need="a mesh of virtual workers on the host: other processes and GPUs cannot be written into a pickle",
                mend="whole = x.numpy() on all processes, then np.save(file, whole) on one; "
                "spmd.put(np.load(file), spec, mesh) brings it back. copy.copy and copy.deepcopy work",
            )
        )

    def sharing(self, layout: Any, worker: int) -> Any:
        """Workers for which this is equal share one array: copies of a block, on one device."""
        owner = layout.owners[worker]
        return owner if self.places is None else (owner, self.places.device(worker))

    def sharers(self, layout: Any) -> Sequence[Sequence[int]]:
        """The workers of this process, those in one sequence for which `sharing` is equal."""
        known = layout.sharers if self.places is None else {}
        found = known.get(self.local_workers)
        if found is None:
            together: dict[Any, list[int]] = {}
            for w in self.local_workers:
                together.setdefault(self.sharing(layout, w), []).append(w)
            found = known[self.local_workers] = list(together.values())
        return found

    def shared(self, layout: Any, make: Callable[[int], Any]) -> dict[int, Any]:
        """For each worker of this process what `make` gives for it, called once for those that share one array."""
        if len(self.local_workers) == 1:
            (w,) = self.local_workers
            return {w: make(w)}
        found = dict.fromkeys(self.local_workers)
        for workers in self.sharers(layout):
            one = make(workers[0])
            for w in workers:
                found[w] = one
        return found

    def coordinates(self, worker: int) -> dict[str, int]:
        """The place of a worker along each axis."""
        found = self._coordinates.get(worker)
        if found is None:
            place: dict[str, int] = {}
            rest = worker
            for name, n in reversed(self.axes.items()):
                rest, place[name] = divmod(rest, n)
            found = self._coordinates[worker] = {name: place[name] for name in self.axes}
        return dict(found)

    def describe(self, worker: int) -> str:
        """A worker as error messages name it."""
        return f"worker {worker} ({', '.join(f'{k}={v}' for k, v in self.coordinates(worker).items())})"

    def names(self, axis_name: str | Sequence[str], where: str) -> tuple[str, ...]:
        """The axis names of an argument `axis_name`, checked."""
        if type(axis_name) is str and axis_name in self.axes:
            return (axis_name,)
        names = (axis_name,) if isinstance(axis_name, str) or not isinstance(axis_name, Iterable) else tuple(axis_name)
        for n in names:
            if not isinstance(n, str) or n not in self.axes:
                close = nearest(str(n), self.axes, 1)
                raise MeshError(
                    message(
                        where,
                        argument="axis_name",
                        got=repr(axis_name),
                        need=f"an axis of {self}, or a tuple of axes",
                        mend=f"write {close[0]!r}"
                        if close
                        else f"name one of {', '.join(map(repr, self.axes)) or 'none'}",
                    )
                )
        if len(set(names)) < len(names):
            raise MeshError(
                message(
                    where,
                    argument="axis_name",
                    got=repr(axis_name),
                    need="each axis once",
                    mend="leave out the repetition",
                )
            )
        return names

    def layout(self, shape: tuple[int, ...], spec: Spec, where: str = "Mesh.layout", argument: str = "spec") -> Layout:
        """The layout of an array of this shape: by a spec the balanced one; a layout of this shape is itself."""
        if isinstance(spec, P):
            return _balanced(shape, spec, self.sides)
        if spec.shape != shape:
            raise LayoutError(
                message(
                    where,
                    argument=argument,
                    got=f"{spec} for an array of shape {list(shape)}",
                    need=f"a layout of shape {list(spec.shape)}, or an array of that",
                    mend="a spec, P(...), serves arrays of every shape",
                )
            )
        return spec

    def joined(self, shapes: tuple[tuple[int, ...], ...], spec: Spec, *where: str) -> Layout:
        """The layout of the array that blocks of these shapes, one per worker, join to. where: who joins what."""
        if isinstance(spec, P):
            try:
                return _of_blocks(shapes, spec, self.sides)
            except LayoutError:
                return Layout.of_blocks(shapes, spec, self.axes, ": ".join(where))
        for w, shape in enumerate(shapes):
            if shape != spec.block_shape(w):
                raise LayoutError(
                    message(
                        ": ".join(where),
                        got=f"a block of shape {list(shape)} on {self.describe(w)}",
                        need=f"shape {list(spec.block_shape(w))} there, as {spec} says",
                        mend="cut the block to its box, or lay it out by another spec; on workers that hold nothing "
                        "blocks have length 0 in every dimension",
                    )
                )
        return spec

    def group(self, worker: int, axes: tuple[str, ...]) -> Group:
        """The workers that differ from `worker` along `axes` only, the first axis major."""
        found = self._groups.get((worker, axes))
        if found is None:
            strides, stride = {}, 1
            for name, n in reversed(self.axes.items()):
                strides[name] = stride
                stride *= n
            place = self.coordinates(worker)
            members = [worker - sum(place[a] * strides[a] for a in axes)]
            index = 0
            for a in axes:
                members = [m + k * strides[a] for m in members for k in range(self.axes[a])]
                index = index * self.axes[a] + place[a]
            dims = tuple(self.axes[a] for a in axes)
            found = self._groups[worker, axes] = Group(axes, dims, tuple(members), index)
        return found

    def run(
        self, body: Callable[[Worker], Any], *, tracked: bool = True, scheduler: str | None = None, number: int = 0
    ) -> Outcome:
        """Run body(worker) on every worker held here; their results by worker number. number: of runs before."""

        replicas = Replicas(len(self.local_workers) < self.size, number)

        def main(comm: Comm):
            worker = Worker(self, comm, tracked, replicas)
            token = WORKER.set(worker)
            try:
                return body(worker)
            finally:
                WORKER.reset(token)

        chosen = scheduler or ("lockstep" if self.scheduler == "auto" else self.scheduler)
        outcome = self.transport.run(main, chosen, self.describe)
        outcome.replicas = replicas
        return outcome


@lru_cache(maxsize=1024)
def _balanced(shape: tuple[int, ...], spec: P, axes: tuple[tuple[str, int], ...]) -> Layout:
    return Layout(shape, spec, dict(axes))


@lru_cache(maxsize=1024)
def _of_blocks(shapes, spec: P, axes: tuple[tuple[str, int], ...]) -> Layout:
    layout = Layout.of_blocks(shapes, spec, dict(axes), "")
    balanced = _balanced(layout.shape, spec, axes)
    return balanced if layout == balanced else layout  # most often: then one object, which is compared at once


def _choice(where: str, option: str, value: str | None) -> str | None:
    """An option from its argument, checked, or its environment variable."""
    variable = f"SPMD_{option.upper()}"
    known = SETTINGS[variable].known
    if value is None:
        return setting(variable)
    if value not in known:
        raise MeshError(
            message(
                where,
                argument=option,
                got=repr(value),
                need=f"one of {', '.join(map(repr, known))}",
                mend=f'make_mesh(({value},), ("{option}",)) for an axis of this name'
                if isinstance(value, int)
                else f'{option}="{closest(value, known)}"',
            )
        )
    return value


def _transport(mesh: Mesh) -> Transport:
    """The engine of a mesh: what was asked for, else that of the job of which this process is, else virtual workers."""
    if mesh._wanted == "nccl":
        from spmd.transport.nccl import NcclTransport

        assert mesh.places is not None
        return NcclTransport(_engine(mesh, None if mesh._comm is None else "mpi"), mesh.places)
    return _engine(mesh, mesh._wanted if mesh._comm is None else "mpi")


def _engine(mesh: Mesh, wanted: str | None) -> Transport:
    """Virtual workers, or processes."""
    if wanted is None:
        world = job_world()
        wanted = "local" if world is None else world.engine
    if in_a_child() and (wanted in ("mpi", "torch") or (wanted is None and (expected_size() or 1) > 1)):
        raise no_job_of_a_child()
    if wanted == "local":
        from spmd.transport.local.transport import LocalTransport

        return LocalTransport(mesh.size, mesh.places)
    return _of_mpi(mesh) if wanted == "mpi" else _of_torch(mesh)


def _of_mpi(mesh: Mesh) -> Transport:
    comm = mesh._comm if mesh._comm is not None else mpi_world()
    if comm is not None and not hasattr(comm, "Get_size"):
        raise MeshError(
            message(
                "spmd.Mesh",
                argument="comm",
                got=describe(comm),
                need="an mpi4py communicator",
                mend="comm=MPI.COMM_WORLD, or leave it out",
            )
        )
    if comm is None:
        try:
            comm = start_mpi().COMM_WORLD
        except ImportError as error:
            raise _no_engine("mpi", "mpi4py", "mpi4py with a working MPI library", error) from error
    _check_size(mesh, comm.Get_size(), "an MPI world", "mpiexec -n")
    if mesh.places is not None:
        from spmd.transport.processes.cuda_aware_mpi import transport_of

        return transport_of(comm, mesh.places)
    from spmd.transport.processes.mpi import MpiTransport

    return MpiTransport.of(comm)


def _of_torch(mesh: Mesh) -> Transport:
    world = torch_world()
    kind = "a torch.distributed world"
    if world is not None and not world.launched and (found := leftovers("torch")[0]):
        kind += f" (by {found}, which may be left over from another job)"
    _check_size(mesh, 1 if world is None else world.size, kind, "torchrun --nproc-per-node")
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise _no_engine("torch", "torch", "torch, which the processes speak through", error) from error
    if not (dist.is_available() and dist.is_gloo_available()):
        raise _no_engine("torch", "torch", "a torch that is built with torch.distributed and gloo", "it has no gloo")
    from spmd.transport.processes.gloo import TorchTransport

    if mesh.places is not None:
        from spmd.transport.processes.host_staging import on_places, staged

        return on_places(staged(TorchTransport).of(), mesh.places)
    return TorchTransport.of()


def _no_engine(name: str, package: str, need: str, reason: object) -> TransportError:
    return TransportError(
        message(
            "spmd.Mesh",
            argument="transport",
            got=f'"{name}", and {package} cannot be imported ({reason})'
            if isinstance(reason, ImportError)
            else f'"{name}", and {package} cannot be used ({reason})',
            need=need,
            mend=f'pip install "spmd[{name}]", or Mesh(..., transport="local") or SPMD_TRANSPORT=local to run each '
            "process by itself",
        )
    )


def _check_size(mesh: Mesh, size: int, world: str, launcher: str) -> None:
    if size != mesh.size:
        raise TransportError(
            message(
                "spmd.Mesh",
                got=f"{mesh} of {mesh.size} workers, and {world} of {size} process{'es' * (size != 1)}",
                need="as many processes as workers",
                mend=f'start it with "{launcher} {mesh.size}", or Mesh(..., transport="local") '
                "for virtual workers in each process",
            )
        )


@api_boundary
def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    *,
    transport: str | None = None,
    scheduler: str | None = None,
    comm: MPI.Comm | None = None,
    device: str | None = None,
) -> Mesh:
    """A mesh of these axis sizes and names, as `jax.make_mesh`: `make_mesh((2, 2), ("data", "model"))`."""
    lists = all(isinstance(a, Sequence) and not isinstance(a, str) for a in (axis_shapes, axis_names))
    if (
        not lists
        or len(axis_shapes) != len(axis_names)
        or len({n for n in axis_names if isinstance(n, str)}) < len(axis_names)
    ):
        raise MeshError(
            message(
                "spmd.make_mesh",
                argument="axis_names",
                got=f"{axis_names!r} for sizes {axis_shapes!r}",
                need="a tuple of sizes and one of as many names, all different",
                mend='make_mesh((2, 2), ("data", "model"))',
            )
        )
    mesh = Mesh.__new__(Mesh)
    mesh._setup(dict(zip(axis_names, axis_shapes, strict=True)), transport, scheduler, comm, device)
    return mesh


def current_mesh() -> Mesh | None:
    """The mesh of the innermost `with mesh:`, if any."""
    meshes = _meshes.get()
    return meshes[-1] if meshes else None


def here(where: str) -> Worker:
    """The worker whose body this is."""
    worker = WORKER.get()
    if worker is None:
        raise MeshError(
            message(
                where,
                got="a call outside of any body",
                need="a worker to be called on",
                mend=f"call it inside a function that spmd.map runs: spmd.map(lambda x: {where}(...), "
                "in_specs=..., out_specs=...)",
            )
        )
    return worker


@api_boundary
def axis_size(axis_name: str | Sequence[str]) -> int:
    """The number of workers along an axis, or along several together. A plain int."""
    worker = here("spmd.axis_size")
    return math.prod(worker.mesh.axes[n] for n in worker.mesh.names(axis_name, "spmd.axis_size"))


@api_boundary
def worker_index(axis_name: str | Sequence[str]) -> int:
    """This worker's place along an axis as a plain int: for those who know that workers may part ways on it."""
    worker = here("spmd.worker_index")
    return worker.group(worker.mesh.names(axis_name, "spmd.worker_index")).index


@api_boundary
def axis_index(axis_name: str | Sequence[str]):
    """This worker's place along an axis (along several: major to minor), as an array that varies over it."""
    worker = here("spmd.axis_index")
    names = worker.mesh.names(axis_name, "spmd.axis_index")
    index = np.int64(worker.group(names).index)
    return worker.carrying(index, state_of(names))


def is_main() -> bool:
    """Whether this is the process (inside a body: the worker) that should print: the first one."""
    worker = WORKER.get()
    if worker is not None:
        return worker.index == 0
    mesh = current_mesh()
    if mesh is not None and mesh._comm is not None:
        return mesh._comm.Get_rank() == 0
    world = job_world()
    return world is None or world.rank == 0
