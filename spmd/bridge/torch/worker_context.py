"""Which worker a thread or a graph acts for: `WorkerContext`, and the random generators of the workers."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from spmd.errors import MeshError, TransportError
from spmd.mesh import WORKER, Mesh, Worker
from spmd.operators.base import Operator

__all__ = [
    "COMPILE_GUARD",
    "CONTEXT",
    "WorkerContext",
    "WorkerGenerators",
    "assigned",
    "context_of",
    "device_of",
    "for_this_worker",
    "refuse_lockstep",
    "resumed",
]


@contextmanager
def assigned(variable: ContextVar, value: Any) -> Iterator[None]:
    """Set a context variable inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class WorkerGenerators:
    """The random generators of the workers of one run. Each starts in the state of torch's generator at the call.

    generators: by worker, those of `spt.drawing` and of torch's random functions. seeded: by worker, those that replace
    them in torch's random functions after `torch.manual_seed` in the body.
    """

    __slots__ = ("__weakref__", "generators", "seeded", "state")

    def __init__(self) -> None:
        self.state = torch.default_generator.get_state()
        self.generators: dict[int, torch.Generator] = {}
        self.seeded: dict[int, torch.Generator] = {}

    def of(self, worker: int) -> torch.Generator:
        """The generator of a worker."""
        generator = self.generators.get(worker)
        if generator is None:
            generator = self.generators[worker] = torch.Generator()
            generator.set_state(self.state)
        return generator

    def current(self, worker: int) -> torch.Generator:
        """The generator of torch's random functions on a worker."""
        return self.seeded.get(worker) or self.of(worker)

    def leave(self) -> None:
        """Set torch's generator to the final state of the first worker that drew."""
        drew = self.generators.keys() | self.seeded.keys()
        if drew:
            torch.default_generator.set_state(self.current(min(drew)).get_state())


def map_ended(where: str) -> MeshError:
    """The error of a graph that is used after its map has ended."""
    return MeshError.at(
        where,
        got="a graph of a body whose map is over",
        need="backward inside the body, or from outside through a result of the map",
        mend="call loss.backward() in the body, or return the loss with an out_spec, as P()",
    )


class WorkerContext:
    """The worker that a graph belongs to. It outlives a run of the map, because backward may be another run.

    worker: the worker that runs now; None between runs. varied_copies: of parameters, by id and state, until backward.
    extra_leaves: tensors that require a gradient only because another worker's tensor does; None if the map is not
    differentiated from outside. generators: the random generators of the run.
    number, tickets: in compiled graphs, the number refers to this context, and a ticket to an operator bound here.
    """

    __slots__ = (
        "__weakref__",
        "extra_leaves",
        "generators",
        "index",
        "mesh",
        "number",
        "tickets",
        "varied_copies",
        "worker",
    )

    def __init__(self, mesh: Mesh, index: int):
        self.mesh = mesh
        self.index = index
        self.worker: Worker | None = None
        self.varied_copies: dict[Any, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.extra_leaves: list[torch.Tensor] | None = None
        self.generators: WorkerGenerators | None = None
        self.number = next(_numbers)
        self.tickets: dict[Operator, int] = {}

    def acting_worker(self) -> Worker:
        """The worker of this context: the one whose body runs in this thread, or else the one that is set."""
        current = WORKER.get()
        if current is not None and current.index == self.index and current.mesh is self.mesh:
            return current
        if self.worker is None:
            raise map_ended("backward of an operator")
        return self.worker

    @contextmanager
    def active(self, worker: Worker):
        """Make this the context of a worker while it runs."""
        outer, self.worker = self.worker, worker
        name, COMPILE_GUARD.name = COMPILE_GUARD.name, f"worker {self.index} of {dict(self.mesh.axes)}"
        try:
            with assigned(CONTEXT, self):
                yield
        finally:
            self.worker = outer
            COMPILE_GUARD.name = name
            self.varied_copies.clear()


class _Guard(threading.local):
    name = "no worker"


COMPILE_GUARD = _Guard()
"""`COMPILE_GUARD.name` differs between workers. torch.compile guards it, so each worker has graphs of its own."""


CONTEXT: ContextVar[WorkerContext | None] = ContextVar("spmd_torch_context", default=None)


_numbers = itertools.count()


def context_of(worker: Worker) -> WorkerContext:
    """The context of a worker: that of its map, or a new one in a body that `spmd.map` runs."""
    context = CONTEXT.get()
    if context is None or context.worker is not worker:
        context = WorkerContext(worker.mesh, worker.index)
        context.worker = worker
    return context


def resumed(context: WorkerContext) -> AbstractContextManager[None]:
    """Its worker as the current one, in a thread that has none: torch runs backward on GPUs in threads of its own."""
    worker = context.worker if WORKER.get() is None else None
    return nullcontext() if worker is None else assigned(WORKER, worker)


def for_this_worker(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs for the worker that is the current one now, also in threads of torch."""
    worker = WORKER.get()
    if worker is None:
        return f
    context = context_of(worker)

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        with resumed(context):
            return f(*args)

    return run


def device_of(worker: Worker | None) -> torch.device:
    """The device on which the mesh of a worker computes; the host outside of bodies."""
    return torch.device("cpu" if worker is None or worker.mesh.places is None else "cuda")


def refuse_lockstep(worker: Worker) -> None:
    """Raise where waiting would switch greenlets beneath torch's frames."""
    run = getattr(worker.comm, "execution", None)
    if type(run).__name__ == "LockstepRun" and worker.mesh.size > 1:
        raise TransportError.at(
            "spmd.bridge.torch",
            got="tensors in a body that the lockstep scheduler runs",
            need="threads: torch's own frames do not survive a switch of greenlets",
            mend='spt.map(f, in_specs, out_specs), or Mesh(..., scheduler="threads")',
        )
