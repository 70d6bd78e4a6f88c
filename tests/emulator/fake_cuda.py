"""What `cupy.cuda` is to the stand-in: devices, streams, events, memory, and NCCL, all of it on the CPU.

Everything is computed at once, in the order in which it is submitted. What a real device may do in another order is
found by clocks: every stream counts its operations, and knows how far it has waited for the others. An operation that
touches memory which another stream has written, or read before it is overwritten, without an event in between, raises
`Race`. So does one that gets memory from the pool which another stream may still be reading.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

__all__ = ["Device", "Event", "Held", "Race", "Stream", "UnownedMemory", "count", "held_by", "modules", "synchronised"]

DEVICES = 1
"""How many devices there are; tests may say otherwise."""

LOCK = threading.RLock()
synchronised: list[str] = []
"""What has made the host wait for the device, in order."""


class Race(AssertionError):
    """Two streams use the same memory, and no event orders them."""


class CUDARuntimeError(RuntimeError):
    """What the CUDA runtime raises."""


class _Thread(threading.local):
    """What CUDA and CuPy keep for each thread: the device, the stream of each device, and what was waited for."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.clock: dict[Lane, int] = {}


_here = _Thread()


class Lane:
    """Operations of one stream on one device. clock: the last operation of each lane that comes before the next."""

    numbers = itertools.count()

    def __init__(self, device: int):
        self.device = device
        self.number = next(Lane.numbers)
        self.clock: dict[Lane, int] = {}

    def __repr__(self) -> str:
        return f"stream {self.number} of device {self.device}"

    def tick(self) -> tuple[Lane, int]:
        """One more operation, after all that this thread has waited for."""
        _merge(self.clock, _here.clock)
        self.clock[self] = self.clock.get(self, 0) + 1
        return self, self.clock[self]

    def has_seen(self, access: tuple[Lane, int]) -> bool:
        return max(self.clock.get(access[0], 0), _here.clock.get(access[0], 0)) >= access[1]


def _merge(clock: dict[Lane, int], other: dict[Lane, int]) -> None:
    for lane, n in other.items():
        if clock.get(lane, 0) < n:
            clock[lane] = n


def count(what: str) -> None:
    """The host waits for the current stream."""
    with LOCK:
        synchronised.append(what)
        _merge(_here.clock, lane().clock)


class Event:
    """A point in a stream."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.clock: dict[Lane, int] = {}
        self.timed = not disable_timing
        self.device = _here.device
        self.seconds = 0.0

    def record(self, stream=None):
        import time

        with LOCK:
            at = lane(stream)
            if at.device != self.device:
                raise CUDARuntimeError("cudaErrorInvalidResourceHandle: an event of another device")
            _merge(at.clock, _here.clock)
            self.clock = dict(at.clock)
            self.seconds = time.perf_counter()

    @property
    def done(self) -> bool:
        return True

    def synchronize(self):
        with LOCK:
            synchronised.append("Event.synchronize")
            _merge(_here.clock, self.clock)


def get_elapsed_time(start_event, end_event) -> float:
    assert start_event.timed
    assert end_event.timed
    return (end_event.seconds - start_event.seconds) * 1e3


class Stream:
    """A stream; `Stream.null` is that of every device by default."""

    null: ClassVar[Stream]
    numbers = itertools.count(2)

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.device_id = -1 if null else _here.device
        self.ptr = 0 if null else next(Stream.numbers)
        self.lanes: dict[int, Lane] = {}

    def lane(self, device: int) -> Lane:
        with LOCK:
            if device not in self.lanes:
                self.lanes[device] = Lane(device)
            return self.lanes[device]

    def _match(self) -> int:
        if self.device_id not in (-1, _here.device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device "
                f"({_here.device})"
            )
        return _here.device

    def use(self):
        _here.streams[self._match()] = self
        return self

    def __enter__(self):
        device = self._match()
        self.__dict__.setdefault("before", []).append((device, _here.streams.get(device, Stream.null)))
        return self.use()

    def __exit__(self, *error):
        device, before = self.__dict__["before"].pop()
        _here.streams[device] = before

    def __eq__(self, other):
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self):
        return self.ptr

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        with LOCK:
            _merge(lane(self).clock, event.clock)

    def synchronize(self):
        with LOCK:
            synchronised.append("Stream.synchronize")
            _merge(_here.clock, lane(self).clock)

    @property
    def done(self):
        return True

    def __cuda_stream__(self):
        return 0, self.ptr


Stream.null = Stream(null=True)


def ExternalStream(ptr: int, device_id: int = -1) -> Stream:
    assert ptr == 0
    return Stream.null


def get_current_stream(device_id: int = -1) -> Stream:
    return _here.streams.get(_here.device if device_id == -1 else device_id, Stream.null)


def lane(stream: Stream | None = None, device: int | None = None) -> Lane:
    """The operations of a stream, by default those of the current one."""
    if stream is None:
        device = _here.device if device is None else device
        stream = get_current_stream(device)
    if stream.device_id != -1:
        device = stream.device_id
    return stream.lane(_here.device if device is None else device)


class Device:
    """A device by its number; by default the current one."""

    def __init__(self, device: Any = None):
        self.id = _here.device if device is None else int(getattr(device, "id", device))
        self.attributes = {"MultiProcessorCount": 4}
        self.compute_capability = "90"

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return self.id

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.id:02X}:00.0"

    def use(self):
        if not 0 <= self.id < DEVICES:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        _here.device = self.id

    def __enter__(self):
        self.__dict__.setdefault("before", []).append(_here.device)
        self.use()
        return self

    def __exit__(self, *error):
        _here.device = self.__dict__["before"].pop()

    def synchronize(self):
        with LOCK:
            synchronised.append("Device.synchronize")
            for stream in (Stream.null, *_here.streams.values()):
                _merge(_here.clock, lane(stream).clock)


# Memory


_arenas: dict[tuple[Lane, int], list[Life]] = defaultdict(list)
"""What was freed, by the stream on which it was allocated and its size: the pool gives it out there again."""


class Life:
    """Who wrote where in a piece of memory, and who has read there: views, and the operations that used them."""

    __slots__ = ("reads", "writes")

    def __init__(self, written: tuple[Lane, int]):
        self.writes: list[tuple[Any, tuple[Lane, int]]] = [(None, written)]
        self.reads: list[tuple[Any, tuple[Lane, int]]] = []


def _overlap(a: Any, b: Any) -> bool:
    return a is None or b is None or np.shares_memory(a, b)


class Memory:
    """A piece of memory from the pool."""

    __slots__ = ("__weakref__", "device_id", "lane", "life", "ptr", "root", "size")

    def __init__(self, root: np.ndarray):
        with LOCK:
            self.root = root
            self.lane = lane()
            self.device_id = self.lane.device
            self.ptr, self.size = root.ctypes.data, root.nbytes
            arena = _arenas[self.lane, self._rounded()]
            if self.size and arena:
                life = arena.pop()
                self._check("a new array in memory that was freed", None, [*life.writes, *life.reads])
            self.life = Life(self.lane.tick())

    def _rounded(self) -> int:
        return -(-self.size // 512)

    def _check(self, what: str, view: Any, earlier: list[tuple[Any, tuple[Lane, int]]], current: Any = None) -> None:
        current = current or lane(device=self.device_id)
        for other, access in earlier:
            if access[0] is not current and not current.has_seen(access) and _overlap(view, other):
                raise Race(f"{what} on {current}, and {access[0]} may still use it: no event is between them")

    def read(self, view: Any = None, *, anywhere: bool = False) -> None:
        if view is not None and not view.size:
            return
        with LOCK:
            if not anywhere:
                self._on_device()
            self._check("a read", view, self.life.writes, lane())
            self.life.reads.append((view, lane().tick()))
            del self.life.reads[:-64]

    def write(self, view: Any = None) -> None:
        if view is not None and not view.size:
            return
        with LOCK:
            self._on_device()
            self._check("a write", view, [*self.life.writes, *self.life.reads])
            if view is None or view.size == self.root.size:
                self.life = Life(lane().tick())
            else:
                self.life.writes.append((view, lane().tick()))
                del self.life.writes[1:-64]

    def _on_device(self) -> None:
        if self.device_id != _here.device:
            raise Race(f"memory of device {self.device_id}, while device {_here.device} is the current one")

    def __del__(self):
        try:
            if self.size:
                with LOCK:
                    arena = _arenas[self.lane, self._rounded()]
                    arena.append(self.life)
                    del arena[:-8]
        except (AttributeError, TypeError):
            pass


class UnownedMemory:
    """Memory that somebody else owns."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1):
        self.ptr, self.size, self.device_id = ptr, size, device_id
        self._owner = owner


class MemoryPointer:
    """A place in a piece of memory."""

    def __init__(self, mem: Any, offset: int):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Stream | None = None) -> None:
        with LOCK:
            _memory_of(src.mem).read(anywhere=True)
            _memory_of(self.mem).write()
        ctypes.memmove(self.ptr, src.ptr, size)


def _memory_of(mem: Any) -> Memory:
    while isinstance(mem, UnownedMemory):
        mem = mem._owner
    return mem if isinstance(mem, Memory) else _found_at(mem)


def _found_at(owner: Any) -> Memory:
    raise AssertionError(f"memory of an owner that the stand-in does not know: {owner!r}")


class Held:
    """What keeps the memory of an array and of its views. mem: what `x.data.mem` gives."""

    __slots__ = ("__weakref__", "mem", "memory", "root")

    def __init__(self, root: np.ndarray, mem: Any = None):
        self.root = root
        self.mem = Memory(root) if mem is None else mem
        self.memory: Memory = self.mem if mem is None else _memory_of(mem)


_held: WeakValueDictionary[int, Held] = WeakValueDictionary()


def held_by(a: np.ndarray) -> Held:
    """Who keeps the memory in which an array of NumPy lies; newly allocated if nobody does."""
    root = a
    while root.base is not None:
        base = root.base.obj if isinstance(root.base, memoryview) else root.base
        base = base if isinstance(base, np.ndarray) else getattr(base, "base", None)
        if not isinstance(base, np.ndarray):
            break
        root = base
    with LOCK:
        found = _held.get(id(root))
        if found is None or found.root is not root:
            found = _held[id(root)] = Held(root)
        return found


def lent(pointer: MemoryPointer, shape, dtype, strides) -> tuple[np.ndarray, Held]:
    """An array of NumPy over memory that somebody else owns."""
    dtype = np.dtype(dtype)
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if strides is not None else 0
    size = (extent if strides is not None else (int(np.prod(shape)) - 1) * dtype.itemsize) + dtype.itemsize
    root = np.frombuffer((ctypes.c_char * max(size, 1)).from_address(pointer.ptr), np.uint8)
    held = Held(root, pointer.mem)
    with LOCK:
        _held[id(root)] = held
    return np.ndarray(shape, dtype, root.data, 0, strides), held


class PinnedMemory(np.ndarray):
    """Memory of the host that a device copies from and to by itself."""


def alloc_pinned_memory(size: int) -> np.ndarray:
    return np.empty(size, np.uint8).view(PinnedMemory)


# NCCL: communicators of one process, whose threads meet


class NcclError(RuntimeError):
    """What NCCL raises."""


def _nccl() -> ModuleType:
    nccl = ModuleType("cupy.cuda.nccl")
    nccl.available = True  # type: ignore[attr-defined]
    nccl.NcclError = NcclError  # type: ignore[attr-defined]
    for k, name in enumerate("INT8 UINT8 INT32 UINT32 INT64 UINT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16".split()):
        setattr(nccl, f"NCCL_{name}", k)
    for k, name in enumerate("SUM PROD MAX MIN".split()):
        setattr(nccl, f"NCCL_{name}", k)
    nccl.get_unique_id = _unique_id  # type: ignore[attr-defined]
    nccl.NcclCommunicator = NcclCommunicator  # type: ignore[attr-defined]
    nccl.groupStart, nccl.groupEnd = _group_start, _group_end  # type: ignore[attr-defined]
    return nccl


_DTYPES = [np.dtype(n) for n in "i1 u1 i4 u4 i8 u8 f2 f4 f8".split()]
_FOLDS = [np.add, np.multiply, np.fmax, np.fmin]  # as NCCL, which passes a NaN over
_ids = itertools.count(1)
_rooms: dict[int, Any] = {}


def _unique_id() -> tuple[int, ...]:
    """128 numbers from -128 to 127, as CuPy gives them; here the first ones say which."""
    n = next(_ids)
    return (n % 100, n // 100, *(0,) * 126)


class _Queue(threading.local):
    depth = 0
    calls: Any = None


_queue = _Queue()


def _group_start() -> None:
    if _queue.depth == 0:
        _queue.calls = []
    _queue.depth += 1


def _group_end() -> None:
    _queue.depth -= 1
    if _queue.depth == 0:
        calls, _queue.calls = _queue.calls, None
        for send in (True, False):  # what is sent is buffered, so all sends may go first
            for is_send, run in calls:
                if is_send is send:
                    run()


class NcclCommunicator:
    """One rank of a communicator whose ranks are threads of this process."""

    TIMEOUT = 20.0

    def __init__(self, ndev: int, commId: tuple, rank: int):
        assert len(commId) == 128
        assert type(commId) is tuple
        with LOCK:
            room = _rooms.setdefault(
                commId[0] + 100 * commId[1],
                SimpleNamespace(
                    size=ndev, barrier=threading.Barrier(ndev), devices={}, slots={}, mail=defaultdict(list)
                ),
            )
            room.devices[rank] = _here.device
        self.room, self.rank, self.ndev, self.device = room, rank, ndev, _here.device
        self.arrived = threading.Condition(LOCK)
        room.barrier.wait(self.TIMEOUT)
        if len(set(room.devices.values())) < ndev:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage (duplicate GPU detected)")

    def size(self) -> int:
        return self.ndev

    def rank_id(self) -> int:
        return self.rank

    def device_id(self) -> int:
        return self.device

    def destroy(self) -> None:
        self.room = None

    abort = destroy

    def check_async_error(self) -> None:
        pass

    def _view(self, ptr: int, count: int, datatype: int) -> np.ndarray:
        dtype = _DTYPES[datatype]
        size = count * dtype.itemsize
        return np.frombuffer((ctypes.c_char * max(size, 1)).from_address(ptr), np.uint8)[:size].view(dtype)

    def _meet(self, key: Any, mine: Any, stream: int) -> list[Any]:
        """What every rank brings to one collective call: a device computes it when all have come."""
        room = self.room
        room.slots[self.rank] = (key, mine)
        room.barrier.wait(self.TIMEOUT)
        found = [room.slots[r] for r in range(self.ndev)]
        room.barrier.wait(self.TIMEOUT)
        if any(k != key for k, _ in found):
            raise NcclError(f"ranks that call different things would hang: {[k for k, _ in found]}")
        with LOCK:
            clock = lane().clock
            for other in found:
                _merge(clock, other[1][-1])
        return [m for _, m in found]

    def _bring(self, ptr: int, count: int, datatype: int, stream: int):
        assert _queue.depth == 0 or self.ndev == 1
        with LOCK:
            lane().tick()
            return self._view(ptr, count, datatype).copy(), dict(lane().clock)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        found = self._meet(("allReduce", count, datatype, op), self._bring(sendbuf, count, datatype, stream), stream)
        total = found[0][0]
        for x, _ in found[1:]:
            total = _FOLDS[op](total, x)
        self._view(recvbuf, count, datatype)[...] = total

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        found = self._meet(("reduce", count, datatype, op, root), self._bring(sendbuf, count, datatype, stream), stream)
        if self.rank == root:
            total = found[0][0]
            for x, _ in found[1:]:
                total = _FOLDS[op](total, x)
            self._view(recvbuf, count, datatype)[...] = total

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        mine = self._bring(sendbuff if self.rank == root else recvbuff, count, datatype, stream)
        found = self._meet(("broadcast", count, datatype, root), mine, stream)
        self._view(recvbuff, count, datatype)[...] = found[root][0]

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        found = self._meet(("allGather", count, datatype), self._bring(sendbuf, count, datatype, stream), stream)
        self._view(recvbuf, count * self.ndev, datatype)[...] = np.concatenate([x for x, _ in found])

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        mine = self._bring(sendbuf, recvcount * self.ndev, datatype, stream)
        found = self._meet(("reduceScatter", recvcount, datatype, op), mine, stream)
        parts = [x[self.rank * recvcount : (self.rank + 1) * recvcount] for x, _ in found]
        total = parts[0]
        for x in parts[1:]:
            total = _FOLDS[op](total, x)
        self._view(recvbuf, recvcount, datatype)[...] = total

    def send(self, sendbuf, count, datatype, peer, stream):
        self._queued(True, lambda: self._send(sendbuf, count, datatype, peer, stream))

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._queued(False, lambda: self._recv(recvbuf, count, datatype, peer, stream))

    def _queued(self, is_send: bool, run) -> None:
        if _queue.depth == 0:
            run()
        else:
            _queue.calls.append((is_send, run))

    def _send(self, sendbuf, count, datatype, peer, stream):
        with self.room.barrier._cond:
            mine = (self._view(sendbuf, count, datatype).copy(), dict(lane().clock))
            self.room.mail[self.rank, peer].append((count, datatype, mine))
            self.room.barrier._cond.notify_all()

    def _recv(self, recvbuf, count, datatype, peer, stream):
        mail = self.room.mail[peer, self.rank]
        with self.room.barrier._cond:
            if not self.room.barrier._cond.wait_for(lambda: mail, self.TIMEOUT):
                raise NcclError(f"rank {self.rank} waits in vain for rank {peer}")
            sent, kind, (data, clock) = mail.pop(0)
        assert (sent, kind) == (count, datatype), "a receive of another size than was sent"
        with LOCK:
            _merge(lane().clock, clock)
        self._view(recvbuf, count, datatype)[...] = data


def modules() -> dict[str, ModuleType]:
    """`cupy.cuda` and its parts, by the names under which they are imported."""
    cuda, runtime, stream, memory = (ModuleType(f"cupy.cuda{part}") for part in ("", ".runtime", ".stream", ".memory"))
    nccl = _nccl()

    def device_count() -> int:
        if DEVICES == 0:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return DEVICES

    def copy(dst: int, src: int, size: int, kind: int, stream: int) -> None:
        ctypes.memmove(dst, src, size)

    vars(runtime).update(
        getDeviceCount=device_count,
        getDevice=lambda: _here.device,
        CUDARuntimeError=CUDARuntimeError,
        memcpyAsync=copy,
        memcpyDeviceToDevice=3,
        deviceCanAccessPeer=lambda a, b: 1,
    )
    found = {"Stream": Stream, "ExternalStream": ExternalStream, "Event": Event}
    found |= {"get_current_stream": get_current_stream, "get_elapsed_time": get_elapsed_time}
    kinds = {"UnownedMemory": UnownedMemory, "MemoryPointer": MemoryPointer}
    vars(stream).update(found)
    vars(memory).update(kinds)
    vars(cuda).update(
        found | kinds,
        Device=Device,
        runtime=runtime,
        stream=stream,
        memory=memory,
        nccl=nccl,
        alloc_pinned_memory=alloc_pinned_memory,
        is_available=lambda: DEVICES > 0,
    )
    cuda.__path__ = []  # type: ignore[attr-defined]
    return {m.__name__: m for m in (cuda, runtime, stream, memory, nccl)}
