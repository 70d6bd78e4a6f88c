"""Workers that are MPI processes, over mpi4py's buffer calls.

Every collective begins with a header: a small message in which each member says what it calls and the shape it
brings. Workers that disagree learn it there, before any data moves; and receivers learn the sizes of what comes.
Sums are taken here, in the order of the members, because MPI only advises an order.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from spmd import kernels
from spmd.errors import MismatchError, TransportError, message
from spmd.layout import block_sizes, offsets
from spmd.transport.base import Call, Comm, Group, Handle, Outcome, Ready, Transport, mismatch
from spmd.transport.blas import blas_threads, share_of_cores

__all__ = ["MpiTransport"]

_MAX_NDIM = 32
_HEADER = np.dtype(
    [("key", "u8"), ("ndim", "i8"), ("shape", "i8", (_MAX_NDIM,)), ("dtype", "S16"), ("call", "S160"), ("line", "S240")]
)
_SMALL = 1 << 15
"""Bytes up to which an all-reduce sends whole blocks to everyone: one message time in place of two."""


def _header(call: Call, shape: tuple[int, ...], present: bool = True) -> np.ndarray:
    """One call as a record of fixed size."""
    if len(shape) > _MAX_NDIM:
        raise TransportError(
            message(
                call.op,
                got=f"an array of {len(shape)} dimensions",
                need=f"at most {_MAX_NDIM} over MPI",
                mend="reshape it for the collective",
            )
        )
    head = np.zeros((), _HEADER)
    key = hashlib.blake2b(repr(call.key).encode(), digest_size=8).digest()
    head["key"] = int.from_bytes(key, "little")
    head["ndim"] = len(shape) if present else -1
    head["shape"][: len(shape)] = shape
    head["dtype"] = np.dtype(call.dtype).name.encode()
    head["call"] = str(call).encode()[:160]
    head["line"] = call.source.encode()[-240:]
    return head


def _shape(head: np.ndarray) -> tuple[int, ...]:
    return tuple(int(n) for n in head["shape"][: int(head["ndim"])])


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _joined(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Several blocks as one buffer of bytes, and the bytes of each."""
    flat = [_bytes(p) for p in parts]
    return (flat[0] if len(flat) == 1 else np.concatenate(flat)), [f.size for f in flat]


def _split(buffer: np.ndarray, shapes: Sequence[tuple[int, ...]], dtype) -> list[np.ndarray]:
    """The blocks of these shapes that lie one after the other in a buffer of bytes."""
    sizes = [int(np.prod(s)) * dtype.itemsize for s in shapes]
    at = offsets(sizes)
    buffer.flags.writeable = False
    return [buffer[at[k] : at[k + 1]].view(dtype).reshape(s) for k, s in enumerate(shapes)]


class Pending:
    """Requests under way, and what is to be done when they have arrived."""

    __slots__ = ("finish", "keep", "requests", "value")

    def __init__(self, requests: list[MPI.Request], keep: Any, finish: Callable[[], Any]):
        self.requests: list[MPI.Request] | None = requests
        self.keep = keep
        self.finish = finish
        self.value: Any = None

    def wait(self) -> Any:
        if self.requests is not None:
            MPI.Request.Waitall(self.requests)
            self.requests = self.keep = None
            self.value = self.finish()
        return self.value


class MpiComm(Comm):
    """This process's view."""

    def __init__(self, transport: MpiTransport):
        self.transport = transport
        self.worker = transport.comm.Get_rank()

    def _meet(self, group: Group, call: Call) -> list[tuple[int, ...]]:
        """Exchange headers with the group; the shapes that its members bring."""
        comm = self.transport.subcomm(group)
        heads = np.empty(group.size, _HEADER)
        comm.Allgather([_header(call, call.shape), MPI.BYTE], [heads, MPI.BYTE])
        self._verify(group, heads)
        return [_shape(h) for h in heads]

    def _meet_each(self, group: Group, call: Call, parts: Mapping[int, np.ndarray]) -> dict[int, tuple[int, ...]]:
        """Exchange headers that say to each member what comes for it; the shapes of what comes here, by sender."""
        comm = self.transport.subcomm(group)
        mine = np.array([_header(call, parts[k].shape if k in parts else (), k in parts) for k in range(group.size)])
        heads = np.empty(group.size, _HEADER)
        comm.Alltoall([mine, MPI.BYTE], [heads, MPI.BYTE])
        self._verify(group, heads)
        return {k: _shape(h) for k, h in enumerate(heads) if h["ndim"] >= 0}

    def _verify(self, group: Group, heads: np.ndarray) -> None:
        keys = heads["key"]
        if (keys == keys[0]).all():
            return
        other = int(np.argmax(keys != keys[0]))
        if group.index != 0 and keys[group.index] != keys[0]:
            other = group.index
        sides = [
            (self.transport.describe(group.members[k]), heads[k]["call"].decode(), heads[k]["line"].decode())
            for k in (0, other)
        ]
        raise MismatchError(mismatch(sides[0], sides[1]))

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        if group.size == 1:
            return Ready(x)
        self._meet(group, call)
        return self._reduce_blocks(group, x, how)

    def _reduce_blocks(self, group: Group, x: np.ndarray, how: str) -> Handle:
        comm, n = self.transport.subcomm(group), group.size
        if x.nbytes <= _SMALL:
            blocks = np.empty((n, x.nbytes), np.uint8)

            def small() -> np.ndarray:
                return _sealed(kernels.of(x).combine([b.view(x.dtype).reshape(x.shape) for b in blocks], how))

            return Pending([comm.Iallgather(_bytes(x), blocks)], x, small)
        sizes = [k * x.itemsize for k in block_sizes(x.size, n)]
        own = sizes[group.index]
        chunks = np.empty((n, own), np.uint8)

        def large() -> np.ndarray:
            mine = kernels.of(x).combine([c.view(x.dtype) for c in chunks], how)
            out = np.empty(x.shape, x.dtype)
            comm.Allgatherv(_bytes(mine), [_bytes(out), sizes, offsets(sizes)[:-1], MPI.BYTE])
            return _sealed(out)

        request = comm.Ialltoallv(
            [_bytes(x), sizes, offsets(sizes)[:-1], MPI.BYTE],
            [chunks, [own] * n, [own * k for k in range(n)], MPI.BYTE],
        )
        return Pending([request], x, large)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray]) -> Handle:
        if group.size == 1 or not xs:
            return Ready(list(xs))
        self._meet(group, call)
        packed = np.concatenate([x.reshape(-1) for x in xs])
        whole = self._reduce_blocks(group, packed, "sum")
        at = offsets([x.size for x in xs])

        def unpack() -> list[np.ndarray]:
            total = whole.wait()
            return [total[at[k] : at[k + 1]].reshape(x.shape) for k, x in enumerate(xs)]

        return Pending([], packed, unpack)

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Ready(parts[0])
        self._meet(group, call)
        mine = parts[group.index]
        return self._all_to_all_blocks(
            group, parts, [mine.shape] * group.size, lambda xs: _sealed(kernels.of(mine).combine(xs))
        )

    def _all_to_all_blocks(self, group: Group, parts, shapes, finish: Callable[[list[np.ndarray]], Any]) -> Handle:
        dtype = parts[0].dtype
        send, counts = _joined(parts)
        incoming = [int(np.prod(s)) * dtype.itemsize for s in shapes]
        receive = np.empty(sum(incoming), np.uint8)
        request = self.transport.subcomm(group).Ialltoallv(
            [send, counts, offsets(counts)[:-1], MPI.BYTE], [receive, incoming, offsets(incoming)[:-1], MPI.BYTE]
        )
        return Pending([request], send, lambda: finish(_split(receive, shapes, dtype)))

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        if group.size == 1:
            return Ready([x])
        shapes = self._meet(group, call)
        counts = [int(np.prod(s)) * x.itemsize for s in shapes]
        receive = np.empty(sum(counts), np.uint8)
        send = _bytes(x)
        request = self.transport.subcomm(group).Iallgatherv(send, [receive, counts, offsets(counts)[:-1], MPI.BYTE])
        return Pending([request], send, lambda: _split(receive, shapes, x.dtype))

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Ready(list(parts))
        shapes = self._meet_each(group, call, dict(enumerate(parts)))
        return self._all_to_all_blocks(group, parts, [shapes[k] for k in range(group.size)], lambda xs: xs)

    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        if group.size == 1:
            return Ready(x)
        shapes = self._meet(group, call)
        block = x if x is not None else np.empty(shapes[root], call.dtype)
        request = self.transport.subcomm(group).Ibcast([_bytes(block), MPI.BYTE], root)
        return Pending([request], block, lambda: _sealed(block) if x is None else block)

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        if group.size == 1:
            return Ready(x)
        self._meet(group, call)
        at_root = group.index == root
        blocks = np.empty((group.size, x.nbytes), np.uint8) if at_root else None
        request = self.transport.subcomm(group).Igather(_bytes(x), blocks, root)

        def finish():
            if blocks is None:
                return None
            return _sealed(kernels.of(x).combine([b.view(x.dtype).reshape(x.shape) for b in blocks]))

        return Pending([request], x, finish)

    def _exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> Handle:
        if group.size == 1:
            return Ready(dict(sends))
        shapes = self._meet_each(group, call, sends)
        comm = self.transport.subcomm(group)
        dtype = np.dtype(call.dtype)
        received = {k: np.empty(int(np.prod(s)) * dtype.itemsize, np.uint8) for k, s in shapes.items()}
        flat = {k: _bytes(x) for k, x in sends.items()}
        requests = [comm.Irecv([b, MPI.BYTE], k) for k, b in received.items() if k != group.index]
        requests += [comm.Isend([b, MPI.BYTE], k) for k, b in flat.items() if k != group.index]

        def finish() -> dict[int, np.ndarray]:
            found = {k: _split(b, [shapes[k]], dtype)[0] for k, b in received.items() if k != group.index}
            if group.index in sends:
                found[group.index] = sends[group.index]
            return dict(sorted(found.items()))

        return Pending(requests, flat, finish)


def _sealed(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


class MpiTransport(Transport):
    """The processes of an MPI communicator, one worker each."""

    name = "mpi"

    def __init__(self, comm: MPI.Comm):
        self.comm = comm.Dup()
        self.size = self.comm.Get_size()
        self.local = (self.comm.Get_rank(),)
        self._subcomms: dict[tuple[int, ...], MPI.Comm] = {}
        self.describe: Callable[[int], str] = lambda worker: f"worker {worker}"
        host = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        share = np.array(share_of_cores(host.Get_size()))
        host.Free()
        self.comm.Allreduce(MPI.IN_PLACE, share, MPI.MIN)
        self.threads = int(share)
        _end_the_job_on_error(self.comm)

    def subcomm(self, group: Group) -> MPI.Comm:
        """The communicator of a group, made when its members first meet."""
        found = self._subcomms.get(group.members)
        if found is None:
            members = self.comm.Get_group().Incl(group.members)
            found = self._subcomms[group.members] = self.comm.Create_group(members)
        return found

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        self.describe = describe
        worker = self.local[0]
        started = time.perf_counter()
        with blas_threads(self.threads):
            try:
                result = contextvars.copy_context().run(body, MpiComm(self))
            except Exception as error:
                if not isinstance(error, MismatchError):
                    error.add_note(f"raised by {describe(worker)}")
                raise
        return Outcome({worker: result}, time.perf_counter() - started, 0)

    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        (value,) = local.values()
        send = np.frombuffer(json.dumps(value).encode(), np.uint8)
        counts = np.empty(self.size, np.int64)
        self.comm.Allgather(np.array([send.size], np.int64), counts)
        receive = np.empty(int(counts.sum()), np.uint8)
        at = offsets(counts.tolist())
        self.comm.Allgatherv(send, [receive, counts, np.array(at[:-1]), MPI.BYTE])
        return {k: json.loads(receive[at[k] : at[k + 1]].tobytes()) for k in range(self.size)}


_hooked = False


def _end_the_job_on_error(comm: MPI.Comm) -> None:
    """An error that nobody catches ends all processes, with a status that says so; the others would wait forever."""
    global _hooked
    if _hooked or comm.Get_size() == 1:
        return
    _hooked = True
    report = sys.excepthook

    def hook(kind, error, traceback):
        report(kind, error, traceback)
        sys.stderr.flush()
        sys.stdout.flush()
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = hook
