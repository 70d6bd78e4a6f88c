"""torch's random numbers in bodies: they depend on the worker's coordinates and on the program, never on timing.

Virtual workers are threads, and all threads share torch's generator of the host. So every worker of a map has its own
generator, which starts in the state of torch's generator when the map is called. In a body that tracks states, torch's
random functions (`random_functions`) use it. For Invariant tensors all workers draw the same numbers. For Varying
tensors, a number of the worker's generator and the coordinates along the axes over which the tensors vary seed a new
generator. So numbers differ along these axes, and agree along the others.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from spmd.bridge.torch.random_functions import draws_now
from spmd.bridge.torch.tensor import Tensor, check_losses, common_state, in_backward
from spmd.bridge.torch.worker_context import CONTEXT, WorkerGenerators
from spmd.errors import StallError, StateError, describe
from spmd.mesh import WORKER, Worker
from spmd.state import State
from spmd.transport.processes.watchdog import time_limit

__all__ = ["BodyMode", "drawing", "has_body_mode", "in_body", "is_drawing", "random_word", "worker_generator"]

Generator = torch.Generator

_lock = threading.RLock()
_drawing: ContextVar[bool] = ContextVar("spmd_torch_drawing", default=False)
_users: WeakKeyDictionary[Generator, tuple[WorkerGenerators, int]] = WeakKeyDictionary()
"""For each generator that a user gave to `drawing`, the run and the index of the worker that uses it."""


def is_drawing() -> bool:
    """Whether this worker is inside `drawing`."""
    return _drawing.get()


@contextmanager
def drawing(generator: torch.Generator | int | None = None) -> Iterator[None]:
    """Inside, torch's generator of the host is this worker's generator, so all workers initialise modules alike.

        with spt.drawing():
            net = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32))

    generator: None: the worker's generator. At each call of a map it starts in the state of torch's generator; when the
    map ends, torch's generator continues from its last state. So after `torch.manual_seed(0)` before the map, modules
    made in a body have the parameters of a serial program that makes them in the same order. All processes must use the
    same seed. A number: a new generator with this seed. A `torch.Generator` of this worker, on the host: that one.

    Workers take turns, so a collective inside raises StallError at once. `torch.manual_seed` inside seeds the worker's
    generator. Elsewhere in a body it seeds another generator of this worker, which torch's functions use and `drawing`
    does not. Outside of bodies, None is torch's own generator.
    Raises StateError for a generator that another worker uses too: its numbers would depend on timing.

        >>> def body():
        ...     with spt.drawing(0):
        ...         return torch.nn.Linear(2, 2).weight.detach()
        >>> _ = torch.manual_seed(0)
        >>> whole = torch.nn.Linear(2, 2)
        >>> with spmd.Mesh(x=3):
        ...     torch.equal(spt.map(body, (), P())(), whole.weight)
        True
    """
    worker = WORKER.get()
    if generator is None and (worker is None or _drawing.get()):
        yield
        return
    limit = time_limit()
    if not _lock.acquire(timeout=limit or -1):
        raise StallError.at(
            "spt.drawing",
            got=f"another worker that has been drawing for {limit:g} seconds",
            need="short times inside, because workers take turns",
            mend="make modules inside, and compute before or after",
        )
    try:
        source, default = _source(generator, worker), torch.default_generator
        outer, token = default.get_state(), _drawing.set(True)
        try:
            default.set_state(source.get_state())
            with _without_collectives(worker) if worker is not None and worker.mesh.size > 1 else nullcontext():
                yield
        finally:
            source.set_state(default.get_state())
            default.set_state(outer)
            _drawing.reset(token)
    finally:
        _lock.release()


class _NoComm:
    """Replaces a worker's transport inside `drawing`: every attribute raises."""

    def __getattr__(self, name: str) -> Any:
        raise StallError.at(
            "spt.drawing",
            got="a collective inside",
            need="no collectives: workers take turns here, so the others cannot join",
            mend="make modules inside spt.drawing(), and move data before or after",
        )


@contextmanager
def _without_collectives(worker: Worker) -> Iterator[None]:
    outer = worker.comm, worker.prepared
    no_comm: Any = _NoComm()
    worker.comm, worker.prepared = no_comm, {}  # prepared calls hold the transport too
    try:
        yield
    finally:
        worker.comm, worker.prepared = outer


def _source(generator: Generator | int | None, worker: Worker | None) -> Generator:
    """The generator that `drawing` uses for its argument."""
    context = CONTEXT.get()
    generators = context.generators if context is not None and context.worker is worker else None
    if generator is None:
        if generators is None or worker is None:
            raise StateError.at(
                "spt.drawing",
                argument="generator",
                got="None, in a body that spmd.map runs",
                need="a map that gives each worker a generator of torch",
                mend="spt.map(...), or generator=0",
            )
        return generators.of(worker.index)
    if isinstance(generator, int) and not isinstance(generator, bool):
        return Generator().manual_seed(generator)
    if not isinstance(generator, Generator) or generator.device.type != "cpu":
        raise StateError.at(
            "spt.drawing",
            argument="generator",
            got=f"a generator on {generator.device}" if isinstance(generator, Generator) else describe(generator),
            need="a torch.Generator of the host, a seed, or None: the same numbers on any device",
            mend="torch.Generator().manual_seed(0), or generator=0",
        )
    if generators is not None and worker is not None:
        user, index = _users.setdefault(generator, (generators, worker.index))
        if user is not generators:  # an earlier run
            _users[generator] = generators, worker.index
        elif index != worker.index:
            raise StateError.at(
                "spt.drawing",
                argument="generator",
                got=f"a generator that {worker.mesh.describe(index)} draws from too",
                need="one for each worker: the numbers of a shared one would depend on timing",
                mend="make it in the body: torch.Generator().manual_seed(0); or generator=0",
            )
    return generator


# torch's random functions in bodies


_without_subclasses = torch._C.DisableTorchFunctionSubclass
_ATTRIBUTES = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "is_sparse", "layout", "ndim", "requires_grad", "shape")
)
"""Attributes of tensors that depend on no state."""


class BodyMode(TorchFunctionMode):
    """In a body that tracks states, torch's random functions draw from the worker's generator."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ATTRIBUTES and len(types) == 1 and Tensor in types:  # much the most calls, and the shortest
            with _without_subclasses():
                return func(*args)
        kwargs = kwargs or {}
        if draws_now(func, types, args, kwargs):
            return _draw(lambda: _call_function(func, types, args, kwargs), common_state(args, kwargs))
        return _call_function(func, types, args, kwargs)


def in_body() -> bool:
    """Whether this thread runs a body of `spt.map` that tracks states."""
    worker, context = WORKER.get(), CONTEXT.get()
    return worker is not None and worker.tracked and context is not None


def has_body_mode() -> bool:
    """Whether a `BodyMode` is active. Functions that it calls, such as those of backward, run without it."""
    return any(type(m) is BodyMode for m in _get_current_function_mode_stack())


def _call_function(func: Callable, types: Any, args: Any, kwargs: dict) -> Any:
    """Call a function as torch does without a mode. `Tensor` is called directly, which is faster."""
    if len(types) == 1 and Tensor in types:
        return Tensor.__torch_function__(func, types, args, kwargs)
    if func is torch.Tensor.backward or func is torch.autograd.grad:  # of tensors without a state
        if not in_backward():
            check_losses(args[0] if args else kwargs["outputs"])
    elif not types:  # torch.full(shape, x) ignores subclasses
        state = common_state(args, kwargs)
        if state.varying:
            return Tensor.__torch_function__(func, types, args, kwargs)
    return func(*args, **kwargs)


def worker_generator() -> Generator | None:
    """The generator that functions of torch draw from in this body; None for torch's own."""
    worker, context = WORKER.get(), CONTEXT.get()
    if worker is None or not worker.tracked or context is None or context.generators is None or _drawing.get():
        return None
    return context.generators.current(_generator_index(worker, context.worker))


def _generator_index(worker: Worker, context_worker: Worker | None) -> int:
    """The index of a worker's generator. Functions that `at_root` runs on some workers only have generators of their
    own, so the generators of the bodies stay alike."""
    return worker.index if worker is context_worker else worker.index + worker.mesh.size


def _draw(run: Callable[[], Any], state: State) -> Any:
    """Run a function that draws, for tensors of a state."""
    worker, default = WORKER.get(), torch.default_generator
    generator = worker_generator()
    if worker is None or (generator is None and not _drawing.get()):
        return run()
    coordinates = [(n, worker.coordinates[n]) for n in worker.mesh.axes if n in state.varying]
    if generator is None and not coordinates:
        return run()  # inside `drawing`, torch's own generator is the worker's
    generator = generator or default
    with _lock:
        outer, before = default.get_state(), generator.get_state()
        start = _state_at(coordinates, generator) if coordinates else before
        after = generator.get_state()
        default.set_state(start)
        try:
            return run()
        finally:
            end = default.get_state()
            if not coordinates:
                after = end
            elif torch.equal(end, start):
                after = before  # nothing was drawn
            default.set_state(outer)
            generator.set_state(after)


def random_word(generator: Generator, bits: int = 31) -> int:
    """A number from a generator, also inside transformations of torch.func."""
    with torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():
        return int(torch.randint(1 << bits, (), generator=generator))


def _state_at(coordinates: list[tuple[str, int]], generator: Generator) -> torch.Tensor:
    """The state of a new generator for coordinates along some axes. Draws one number from the worker's generator."""
    seed = zlib.crc32(repr((random_word(generator), coordinates)).encode())
    return Generator().manual_seed(seed).get_state()


# Functions of torch's generator in bodies: `torch.utils.checkpoint` saves its state, to draw the same numbers twice


def _in_bodies(function: Callable, of_worker: Callable[..., Any]) -> None:
    """Replace a function of torch's generator, in bodies, by `of_worker(generator, ...)` for the worker's generator."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        generator = worker_generator()
        return function(*args, **kwargs) if generator is None else of_worker(generator, *args, **kwargs)

    for module in (torch, torch.random):
        setattr(module, function.__name__, call)


def _seed_worker(_: Generator, seed: Any) -> Generator:
    worker, context = WORKER.get(), CONTEXT.get()
    assert worker is not None
    assert context is not None
    assert context.generators is not None
    generator = Generator().manual_seed(int(seed))
    context.generators.seeded[_generator_index(worker, context.worker)] = generator
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(int(seed))
    return generator


_in_bodies(torch.get_rng_state, Generator.get_state)
_in_bodies(torch.set_rng_state, lambda generator, new_state: generator.set_state(new_state))
_in_bodies(torch.manual_seed, _seed_worker)
