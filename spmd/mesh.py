"""A named grid of workers, and the worker that runs a body."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd import device as devices
from spmd.autodiff.staging.recorder import Program
from spmd.autodiff.staging.together import RECORDING
from spmd.autodiff.tracer import Array
from spmd.errors import LayoutError, MeshError, nearest
from spmd.layout import Layout, P, Spec
from spmd.replicas.records import Replicas
from spmd.representations.layouts import mesh_report
from spmd.representations.tables import Report, Summarised
from spmd.settings import check_all, chosen_setting
from spmd.spec_trees import REQUIRED
from spmd.state import State, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.base import Comm, Transport, checks_are_on
from spmd.transport.call import LEDGERS, Group, Place, place_of
from spmd.transport.handles import Outcome
from spmd.transport.observing import run_body
from spmd.transport_choice import TransportRequest

if TYPE_CHECKING:
    from mpi4py import MPI

    from spmd.cuda import Places
    from spmd.frontends import Frontend

__all__ = ["WORKER", "Mesh", "Worker", "current_mesh", "here", "make_mesh", "use_map"]


class Worker:
    """One worker of a mesh while it runs a body.

    index: its number, last axis fastest. coordinates: its index along each axis. tracked: whether the arrays of the
    body carry their state. frontend: the array library of the body; None for NumPy. prepared: the collectives that
    lines of the body called in earlier runs, by line. program: the program that records this run; None if none does.
    replicas: the values of this run that must be equal on several workers. recorded_at: in a backward sweep that is
    observed, the line of the forward call whose adjoint runs. unasked: errors of remote calls not asked for yet.
    """

    __slots__ = (
        *("comm", "coordinates", "frontend", "groups", "index", "mesh", "prepared", "program"),
        *("recorded_at", "replicas", "tracked", "unasked"),
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
        self.recorded_at: Place | None = None
        self.unasked: list[Exception] = []

    def record(self, program: Program | None = None) -> Program:
        """Record every collective from now on in a program, a new one by default.

        Collectives of constants are recorded too, because other workers may wait for them.
        """
        self.prepared = _ALWAYS_MISSING
        self.program = program = program or Program()
        return program

    def group(self, axes: tuple[str, ...]) -> Group:
        """The workers that differ from this one along `axes` only."""
        group = self.groups.get(axes)
        if group is None:
            group = self.groups[axes] = self.mesh.group(self.index, axes)
        return group

    def state(self) -> State:
        """The state of bare data in this body."""
        return state_of(())

    def carrying(self, value: Any, state: State) -> Any:
        """A number or bare data as an array of this body: with its state where states are tracked."""
        if self.frontend is not None:
            return self.frontend.carrying(value, state, self.tracked)
        return Array(value, state) if self.tracked else value


class _AlwaysMissing(dict):
    """In place of `Worker.prepared` while a program is recorded: no collective is prepared, and none is to be."""

    def get(self, key: Any, default: Any = None) -> Any:
        return False


_ALWAYS_MISSING = _AlwaysMissing()

WORKER: ContextVar[Worker | None] = ContextVar("spmd_worker", default=None)
"""The worker whose body runs; None outside of bodies."""
_meshes: ContextVar[tuple[Mesh, ...]] = ContextVar("spmd_meshes", default=())


def _map_function(*args: Any, **options: Any) -> Any:
    raise AssertionError("spmd.mapping is not imported")


def use_map(function: Callable[..., Any]) -> None:
    """Set the function behind `Mesh.map`: `spmd.map`, which a module above this one defines."""
    global _map_function
    _map_function = function


class Mesh(Summarised):
    """A grid of workers with named axes: `Mesh(data=2, model=2)`.

    axes: the axis sizes by name, major to minor. An axis that has the name of an option needs `make_mesh`.
    transport: "local" (virtual workers of this process), "mpi" or "torch" (processes). The default is that of the
    launcher if it started several processes, else "local"; SPMD_TRANSPORT overrides it. "nccl": NCCL moves blocks
    between GPUs, one per worker. "counting": virtual workers; `mesh.transport.counts` says what they would send.
    scheduler: for "local": "lockstep", "threads", or "auto" (by measurement), the default without SPMD_SCHEDULER.
    comm: an mpi4py communicator whose processes are the workers; implies "mpi".
    device: "cpu", or "cuda": blocks are CuPy arrays, those of worker k on GPU k modulo their number. SPMD_DEVICE too.

    Inside `with mesh:` maps run on this mesh. If the processes of a job are the workers, the constructor starts MPI,
    and from then on every process notices when another one ends. Otherwise nothing starts before the first use.
    Raises MeshError for bad sizes or options, TransportError for another number of workers, or without a GPU.

        >>> spmd.Mesh(data=2, model=3).layout((4, 6), P("data", "model")).block_shape(0)
        (2, 2)
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
                raise MeshError.at(
                    where, argument=name, got=repr(n), need="a size, an int of at least 1", mend=f"Mesh({name}=2)"
                )
        self.axes: dict[str, int] = {name: int(n) for name, n in axes.items()}
        self.sides = tuple(self.axes.items())
        self.size = math.prod(self.axes.values())
        arguments = {"SPMD_SCHEDULER": scheduler, "SPMD_TRANSPORT": transport, "SPMD_DEVICE": device}
        check_all(overridden=[name for name, value in arguments.items() if value is not None])
        self.scheduler = chosen_setting(where, "scheduler", scheduler) or "auto"
        name = chosen_setting(where, "transport", transport)
        chosen = chosen_setting(where, "device", device)
        self.device = "cuda" if name == "nccl" and device is None else chosen or "cpu"
        if name == "nccl" and self.device != "cuda":
            raise MeshError.at(
                where,
                argument="device",
                got=f'"{self.device}", with transport="nccl"',
                need="blocks on GPUs: NCCL moves no others",
                mend='device="cuda"',
            )
        if name == "counting" and self.device != "cpu":
            raise MeshError.at(
                where,
                argument="device",
                got=f'"{self.device}", with transport="counting"',
                need="blocks on the host: they are only counted",
                mend='device="cpu"',
            )
        self.places: Places | None = devices.places(self.device)
        """Where the workers of this process keep their arrays on GPUs; None on the host."""
        if comm is not None and name in ("local", "counting") and transport is not None:
            raise MeshError.at(
                where,
                argument="comm",
                got=f'a communicator, and transport="{name}"',
                need="one of them",
                mend="leave out the one that is not meant",
            )
        self.comm = comm
        self._request = TransportRequest(repr(self), self.size, name, comm, self.places)
        self._transport: Transport | None = None
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self._prepared: dict[int, dict[Any, Any]] = {}
        self._coordinates: dict[int, dict[str, int]] = {}
        self.checks = checks_are_on()
        self.turns: dict[Any, int] = {}
        """How many comparisons of replicated values each line of a body has made."""
        self.chosen: dict[str, str] = {}
        """The scheduler that "auto" has chosen, by the name of the map; `spmd.info()` shows it."""
        if self._request.names_job():
            # From now on the other processes notice if this one ends, even before its first map.
            self._request.choose_engine()

    @api_boundary
    def map(
        self,
        f: Callable[..., Any] | None = None,
        in_specs: Any = REQUIRED,
        out_specs: Any = REQUIRED,
        *,
        check: bool = True,
    ) -> Any:
        """`spmd.map` on this mesh."""
        return _map_function(f, in_specs, out_specs, mesh=self, check=check)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{k}={n}' for k, n in self.axes.items())})"

    def _report(self) -> Report:
        return mesh_report(repr(self), self.axes, getattr(self._transport, "name", None), self.device)

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
        """A mesh is immutable, so it is its own copy."""
        return self

    def __deepcopy__(self, memo: object) -> Mesh:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without the collectives of earlier runs and their turns: their keys are ids of this process."""
        self.check_pickled("a Mesh")
        return {**self.__dict__, "_prepared": {}, "turns": {}}

    def __enter__(self) -> Mesh:
        _meshes.set((*_meshes.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        _meshes.set(_meshes.get()[:-1])

    @property
    def transport(self) -> Transport:
        """The transport, chosen at first use."""
        if self._transport is None:
            self._transport = self._request.choose()
        return self._transport

    @property
    def local_workers(self) -> Sequence[int]:
        """The numbers of the workers that this process holds."""
        return self.transport.local

    def check_pickled(self, what: str) -> None:
        """Raise if something of this mesh is to be pickled and other processes or GPUs hold parts of it."""
        if self.transport.name == "local" and self.places is None:
            return
        raise MeshError.at(
            f"pickle of {what}",
            got=f"{self} with transport {self.transport.name!r} on {self.device!r}",
            need="a mesh of virtual workers on the host: other processes and GPUs cannot be written into a pickle",
            mend="whole = x.numpy() on all processes, then np.save(file, whole) on one; "
            "spmd.put(np.load(file), spec, mesh) brings it back. copy.copy and copy.deepcopy work",
        )

    def sharing(self, layout: Any, worker: int) -> Any:
        """A key that is equal for workers which share one array: copies of a block on one device."""
        owner = layout.owners[worker]
        return owner if self.places is None else (owner, self.places.device(worker))

    def sharers(self, layout: Any) -> Sequence[Sequence[int]]:
        """The workers of this process, grouped by `sharing`. Workers whose programs are recorded share nothing."""
        if RECORDING.get() is not None:
            return [(w,) for w in self.local_workers]
        cache = layout.sharers if self.places is None else {}
        groups = cache.get(self.local_workers)
        if groups is None:
            by_key: dict[Any, list[int]] = {}
            for w in self.local_workers:
                by_key.setdefault(self.sharing(layout, w), []).append(w)
            groups = cache[self.local_workers] = list(by_key.values())
        return groups

    def shared(self, layout: Any, make: Callable[[int], Any]) -> dict[int, Any]:
        """make(worker) for each worker of this process, called once for workers that share one array."""
        if len(self.local_workers) == 1:
            (w,) = self.local_workers
            return {w: make(w)}
        blocks = dict.fromkeys(self.local_workers)
        for workers in self.sharers(layout):
            block = make(workers[0])
            for w in workers:
                blocks[w] = block
        return blocks

    def coordinates(self, worker: int) -> dict[str, int]:
        """The index of a worker along each axis."""
        place = self._coordinates.get(worker)
        if place is None:
            reverse: dict[str, int] = {}
            rest = worker
            for name, n in reversed(self.axes.items()):
                rest, reverse[name] = divmod(rest, n)
            place = self._coordinates[worker] = {name: reverse[name] for name in self.axes}
        return dict(place)

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
                raise MeshError.at(
                    where,
                    argument="axis_name",
                    got=repr(axis_name),
                    need=f"an axis of {self}, or a tuple of axes",
                    mend=f"write {close[0]!r}" if close else f"name one of {', '.join(map(repr, self.axes)) or 'none'}",
                )
        if len(set(names)) < len(names):
            raise MeshError.at(
                where, argument="axis_name", got=repr(axis_name), need="each axis once", mend="leave out the repetition"
            )
        return names

    def layout(self, shape: tuple[int, ...], spec: Spec, where: str = "Mesh.layout", argument: str = "spec") -> Layout:
        """The layout of an array of this shape: for a spec the balanced one; a layout must be of this shape."""
        if isinstance(spec, P):
            return _balanced(shape, spec, self.sides)
        if spec.shape != shape:
            raise LayoutError.at(
                where,
                argument=argument,
                got=f"{spec} for an array of shape {list(shape)}",
                need=f"a layout of shape {list(spec.shape)}, or an array of that",
                mend="a spec, P(...), serves arrays of every shape",
            )
        return spec

    def joined(self, shapes: tuple[tuple[int, ...], ...], spec: Spec, *where: str) -> Layout:
        """The layout of the array whose blocks, one per worker, have these shapes. where: for messages."""
        if isinstance(spec, P):
            try:
                return _of_blocks(shapes, spec, self.sides)
            except LayoutError:
                return Layout.of_blocks(shapes, spec, self.axes, ": ".join(where))
        for w, shape in enumerate(shapes):
            if shape != spec.block_shape(w):
                raise LayoutError.at(
                    ": ".join(where),
                    got=f"a block of shape {list(shape)} on {self.describe(w)}",
                    need=f"shape {list(spec.block_shape(w))} there, as {spec} says",
                    mend="cut the block to its box, or lay it out by another spec; on workers that hold nothing "
                    "blocks have length 0 in every dimension",
                )
        return spec

    def group(self, worker: int, axes: tuple[str, ...]) -> Group:
        """The workers that differ from `worker` along `axes` only, the first axis major."""
        group = self._groups.get((worker, axes))
        if group is None:
            strides, stride = {}, 1
            for name, n in reversed(self.axes.items()):
                strides[name] = stride
                stride *= n
            place = self.coordinates(worker)
            first, index = worker - sum(place[a] * strides[a] for a in axes), 0
            for a in axes:
                index = index * self.axes[a] + place[a]
            if index:
                group = self.group(first, axes).of_member(index)
            else:
                members, dims = [first], tuple(self.axes[a] for a in axes)
                for a in axes:
                    members = [m + k * strides[a] for m in members for k in range(self.axes[a])]
                group = Group(axes, dims, tuple(members), 0)
            self._groups[worker, axes] = group
        return group

    def run(
        self,
        body: Callable[[Worker], Any],
        *,
        tracked: bool = True,
        scheduler: str | None = None,
        number: int = 0,
        one_line: bool = False,
        name: Sequence[str] = (),
    ) -> Outcome:
        """Run body(worker) on every worker of this process. number: how many runs of this body came before. one_line:
        all processes run it from one line of the user's program. name: the body, and the kind of run."""
        replicas, programs = Replicas(len(self.local_workers) < self.size, number), RECORDING.get()
        called_at = place_of(sys._getframe()) if LEDGERS.get() or programs is not None else None

        def main(comm: Comm):
            if one_line:
                comm.from_one_line(sys._getframe())
            worker = Worker(self, comm, tracked, replicas)
            if programs is not None:
                worker.record(programs.of_worker(self, worker.index))
            token = WORKER.set(worker)
            try:
                return run_body(worker, name, body, called_at)
            finally:
                WORKER.reset(token)

        # Workers that record take turns: a line for bare data goes into the programs of all.
        chosen = scheduler or ("lockstep" if self.scheduler == "auto" or programs is not None else self.scheduler)
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
    return balanced if layout == balanced else layout  # the usual case: one object, which is equal at once


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
    """A mesh of these axis sizes and names, as `jax.make_mesh`. Options and errors as of `Mesh`.

    >>> spmd.make_mesh((2, 3), ("data", "model"))
    Mesh(data=2, model=3)
    """
    lists = all(isinstance(a, Sequence) and not isinstance(a, str) for a in (axis_shapes, axis_names))
    if (
        not lists
        or len(axis_shapes) != len(axis_names)
        or len({n for n in axis_names if isinstance(n, str)}) < len(axis_names)
    ):
        raise MeshError.at(
            "spmd.make_mesh",
            argument="axis_names",
            got=f"{axis_names!r} for sizes {axis_shapes!r}",
            need="a tuple of sizes and one of as many names, all different",
            mend='make_mesh((2, 2), ("data", "model"))',
        )
    mesh = Mesh.__new__(Mesh)
    mesh._setup(dict(zip(axis_names, axis_shapes, strict=True)), transport, scheduler, comm, device)
    return mesh


def current_mesh() -> Mesh | None:
    """The mesh of the innermost `with mesh:`, if any."""
    meshes = _meshes.get()
    return meshes[-1] if meshes else None


def here(where: str) -> Worker:
    """The worker that runs the calling body. where: the caller, for the error outside of bodies."""
    worker = WORKER.get()
    if worker is None:
        raise MeshError.at(
            where,
            got="a call outside of any body",
            need="a worker to be called on",
            mend=f"call it inside a function that spmd.map runs: spmd.map(lambda x: {where}(...), "
            "in_specs=..., out_specs=...)",
        )
    return worker
