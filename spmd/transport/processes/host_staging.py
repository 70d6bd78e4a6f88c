"""Processes whose blocks lie on GPUs, and go through the host.

What is sent goes into pinned memory from CuPy's pool, and from there like any other block; sums are taken on the host.
MPI and gloo know nothing of streams, so the stream is synchronized before each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import cupy as cp
import numpy as np

from spmd.cuda import current
from spmd.device import contiguous
from spmd.kernels import on_device
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group
from spmd.transport.handles import Handle, Outcome
from spmd.transport.launcher import LOCAL_RANKS, number_in
from spmd.transport.processes.comm import ProcessComm
from spmd.transport.processes.transport import ProcessTransport

__all__ = ["Staged", "StagedComm", "of_device", "on_places", "staged"]


_LOCAL_RANKS = ("PMI_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK")
"""Further variables with the number of a process among those of its host."""


def to_pinned(x: Any) -> Any:
    """Copy the device arrays in lists, tuples and dicts to pinned memory, asynchronously."""
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
    """Keep arrays until the device has them: CuPy copies from pinned memory asynchronously, and does not keep it."""
    event = cp.cuda.Event(disable_timing=True)
    event.record()
    _kept.append((event, host))
    while _kept and _kept[0][0].done:
        _kept.popleft()


def of_device(call: Call, x: Any) -> bool:
    """Whether a collective is one of device blocks; where this worker brings nothing, the call says so."""
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
    *("_broadcast", "_reduce", "_gather", "_scatter", "_exchange"),
)


class StagedComm(ProcessComm):
    """This process's view, where blocks go through the host."""


for _name in VERBS:
    setattr(StagedComm, _name, _through_the_host(_name))


class Staged(ProcessTransport):
    """Processes with a GPU each, or some on one. A base class that stands before an engine's transport."""

    comm_type = StagedComm

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        places = self.places
        assert places is not None
        with places.at(self.local[0]):
            return super().run(body, scheduler, describe)


@cache
def staged(engine: type[ProcessTransport]) -> Any:
    """An engine's transport, with blocks on GPUs."""
    return type("StagedTransport", (Staged, engine), {})


def on_places(transport: Any, places: Any) -> Any:
    """A transport of processes whose devices follow from their local ranks."""
    worker, local = transport.local[0], number_in((*LOCAL_RANKS, *_LOCAL_RANKS))
    if local is not None:
        places.first = local - worker
    transport.places = places
    return transport
