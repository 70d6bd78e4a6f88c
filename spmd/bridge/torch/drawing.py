"""Random numbers of bodies: each worker draws from a generator of its own, which begins as torch's was outside.

Virtual workers are threads, and torch's generator of the host is one for all threads: who draws from it in bodies
draws what the others leave. Here every worker of a map begins with the state that this generator had where the map was
called, so that all draw the same numbers, in the order in which each draws them, whatever the timing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import torch

from spmd.bridge.torch.function import SEAT, Draws
from spmd.errors import StallError, StateError, describe, message
from spmd.mesh import WORKER, Worker
from spmd.transport.patience import time_limit

__all__ = ["drawing", "is_drawing"]

Generator = torch.Generator

_lock = threading.RLock()
_drawing: ContextVar[bool] = ContextVar("spmd_torch_drawing", default=False)
_used: WeakKeyDictionary[Generator, tuple[Draws, int]] = WeakKeyDictionary()


def is_drawing() -> bool:
    """Whether this worker is inside of `drawing`."""
    return _drawing.get()


@contextmanager
def drawing(generator: torch.Generator | int | None = None) -> Iterator[None]:
    """Inside, torch's generator of the host is this worker's own: modules are initialised alike on all workers.

        with spt.drawing():
            net = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32))

    generator: None: the worker's generator. It begins, at each call of a map, in the state that torch's generator has
    there, and goes on from one use to the next; torch's goes on from there when the map is over. So after
    `torch.manual_seed(0)` before the map, modules made in a body have the parameters that they have in a serial program
    which makes them in the same order. Processes seed alike. A number: a new generator with this seed. A
    `torch.Generator` of this worker, on the host: that one.

    Workers take turns, so collectives have no place inside (StallError). `torch.manual_seed` inside seeds the worker's
    generator; elsewhere in a body it seeds that of all threads, from which nothing here is drawn, unless another worker
    is drawing at that moment. Outside of bodies None is torch's own generator.
    Raises StateError for a generator that another worker draws from too: what each got would be a matter of timing.
    """
    worker = WORKER.get()
    if generator is None and (worker is None or _drawing.get()):
        yield
        return
    limit = time_limit()
    if not _lock.acquire(timeout=limit or -1):
        raise StallError(
            message(
                "spt.drawing",
                got=f"another worker that has been drawing for {limit:g} seconds",
                need="no collective inside of spt.drawing(): workers take turns there, and cannot meet",
                mend="make modules inside, and move data before or after",
            )
        )
    try:
        own, default = _generator(generator, worker), torch.default_generator
        outer, token = default.get_state(), _drawing.set(True)
        try:
            default.set_state(own.get_state())
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(outer)
            _drawing.reset(token)
    finally:
        _lock.release()


def _generator(given: Generator | int | None, worker: Worker | None) -> Generator:
    seat = SEAT.get()
    draws = seat.draws if seat is not None and seat.worker is worker else None
    if given is None:
        if draws is None or worker is None:
            raise StateError(
                message(
                    "spt.drawing",
                    argument="generator",
                    got="None, in a body that spmd.map runs",
                    need="a map that knows in which state torch's generator was",
                    mend="spt.map(...), or generator=0",
                )
            )
        return draws.of(worker.index)
    if isinstance(given, int) and not isinstance(given, bool):
        return Generator().manual_seed(given)
    if not isinstance(given, Generator) or given.device.type != "cpu":
        raise StateError(
            message(
                "spt.drawing",
                argument="generator",
                got=f"a generator on {given.device}" if isinstance(given, Generator) else describe(given),
                need="a torch.Generator of the host, a seed, or None: the same numbers on any device",
                mend="torch.Generator().manual_seed(0), or generator=0",
            )
        )
    if draws is not None and worker is not None:
        by, index = _used.setdefault(given, (draws, worker.index))
        if by is not draws:
            _used[given] = draws, worker.index
        if by is draws and index != worker.index:
            raise StateError(
                message(
                    "spt.drawing",
                    argument="generator",
                    got=f"a generator that {worker.mesh.describe(index)} draws from too",
                    need="one for each worker: what they get of one would be a matter of timing",
                    mend="make it in the body: torch.Generator().manual_seed(0); or generator=0",
                )
            )
    return given
