"""Streams of workers that share GPUs, and memory that is safe on them. Imported when a mesh of GPUs is used.

Every worker submits its work to its own stream. Two rules hold when one worker hands an array to another.

1. The stream of the reader waits for an event that was recorded after the array was written (`Place.after`).
2. CuPy's pool reuses freed memory at once for the stream that allocated it, and does not know other readers. So a
   reader gets a `Loan`: an array over the same memory. When its last view is gone, the stream of the memory waits for
   that of the reader before the memory is freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import cupy as cp
import numpy as np
from cupy.cuda import Device, Event, MemoryPointer, Stream, UnownedMemory, get_current_stream

from spmd.autodiff.tracer import register_device_arrays

__all__ = ["Place", "Places", "current"]

register_device_arrays(cp)


class Place:
    """A stream on a device: where the arrays of a worker, or of the caller of a map, are computed."""

    __slots__ = ("device", "stream")

    def __init__(self, device: int, stream: Any):
        self.device = device
        self.stream = stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.device, self.stream) == (other.device, other.stream)

    def __hash__(self) -> int:
        return hash((self.device, self.stream))

    def __repr__(self) -> str:
        return f"Place(device {self.device}, {self.stream})"

    def enter(self) -> None:
        """Submit the work of this thread here from now on. Device and stream are properties of the thread."""
        Device(self.device).use()
        self.stream.use()

    def mark(self) -> Any:
        """An event after all work that has been submitted here."""
        with Device(self.device):
            event = Event(disable_timing=True)
            event.record(self.stream)
        return event

    def after(self, other: Place) -> None:
        """Let later work here wait for all work submitted there so far."""
        if other != self:
            with Device(self.device):  # a default stream belongs to the current device
                self.stream.wait_event(other.mark())

    def borrow(self, x: Any, home: Place) -> Any:
        """x, or the arrays in lists, tuples and dicts, from the memory of another place, for reading here.

        Arrays of another device are copied. The caller has made this place wait for the work that wrote them.
        """
        if type(x) is cp.ndarray:
            return self._borrow(x, home)
        if isinstance(x, tuple | list):
            parts = [self.borrow(y, home) for y in x]
            return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
        if isinstance(x, dict):
            return {k: self.borrow(y, home) for k, y in x.items()}
        return x

    def _borrow(self, x: Any, home: Place) -> Any:
        memory = x.data.mem
        if isinstance(memory, Loan):
            memory, home = memory.memory, memory.home
        if x.data.device_id != self.device:
            if not x.flags.c_contiguous:  # contiguous on its own device before it is copied to another
                with Device(home.device), home.stream:
                    x = x.copy(order="C")
                self.after(home)
            with Device(self.device), self.stream:
                copy = x.copy()
            home.after(self)
            return copy
        if x.nbytes == 0:
            return x
        if home == self:
            return x if memory is x.data.mem else _over(x, memory)
        return _over(x, Loan(memory, home, self))


class Loan(UnownedMemory):
    """Memory of a place that another place reads. When it is released, its own stream waits for that of the reader."""

    def __init__(self, memory: Any, home: Place, reader: Place):
        super().__init__(memory.ptr, memory.size, memory, memory.device_id)
        self.memory = memory
        self.home = home
        self.reader = reader

    def __del__(self):
        with suppress(Exception):  # The driver may be gone at the end of the program.
            self.home.after(self.reader)


def _over(x: Any, memory: Any) -> Any:
    """The array x over the same memory, with another owner."""
    return cp.ndarray(x.shape, x.dtype, MemoryPointer(memory, x.data.ptr - memory.ptr), x.strides)


def current(device: int | None = None) -> Place:
    """The place of this thread, on its device or on another."""
    device = Device().id if device is None else device
    return Place(device, get_current_stream(device))


class Places:
    """The places of the workers of a process: worker k is on device k modulo their number, on stream k."""

    _streams: dict[tuple[int, int], Any] = {}  # noqa: RUF012 - one for all: streams and their pools are used again
    _lock = threading.Lock()

    def __init__(self, first: int = 0):
        self.count = cp.cuda.runtime.getDeviceCount()
        self.first = first

    def device(self, worker: int) -> int:
        return (self.first + worker) % self.count

    def __call__(self, worker: int) -> Place:
        device = self.device(worker)
        with self._lock:
            stream = self._streams.get((device, worker))
            if stream is None:
                with Device(device):
                    stream = self._streams[device, worker] = Stream(non_blocking=True)
        return Place(device, stream)

    @contextmanager
    def at(self, worker: int) -> Iterator[None]:
        """A context in which the device of a worker is the current one."""
        with Device(self.device(worker)):
            yield

    def own(self, a: Any, worker: int) -> Any:
        """A C-contiguous copy of a on the device of a worker."""
        device = self.device(worker)
        if type(a) is not cp.ndarray:
            with Device(device):
                return cp.asarray(np.asarray(a, order="C"))
        home = current(a.data.device_id)
        if home.device == device:
            with Device(device):
                return a.copy(order="C")
        with Device(home.device):  # contiguous on its own device before it is copied to another
            a = a if a.flags.c_contiguous else a.copy(order="C")
        here = current(device)
        here.after(home)
        with Device(device):
            copy = a.copy()
        home.after(here)  # later work may write there or reuse the memory
        return copy

    def moved(self, a: Any, worker: int) -> Any:
        """An array of the library on the device of a worker: a copy if it is on another device."""
        if type(a) is cp.ndarray and a.data.device_id == self.device(worker):
            return a
        return self.own(a, worker)

    @contextmanager
    def joined(self, workers: int) -> Iterator[Callable[[int], Place]]:
        """Let the workers' places wait for the caller, and in the end the caller's places for the workers.

        Returns the place of the caller on each device.
        """
        before = current()
        places = [self(w) for w in range(workers)]
        callers = {p.device: current(p.device) for p in places}
        for place in places:
            for caller in callers.values():  # an argument may be copied from another device
                place.after(caller)
        try:
            yield callers.__getitem__
        finally:
            for caller in callers.values():  # workers may have run in this thread
                caller.enter()
            before.enter()
            for place in places:
                callers[place.device].after(place)
