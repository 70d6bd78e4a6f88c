"""Workers with a GPU each that move blocks by NCCL: processes of an MPI world, or threads of this process.

Headers and numbers of the host go over the transport beneath: NCCL itself waits for ever where calls do not match.
Blocks go from GPU to GPU, on the stream of each worker. What only moves goes as bytes; sums of complex numbers are sums
of twice as many real ones.

NCCL adds in an order of its own, the same on every run on the same machines. With SPMD_NCCL_FIXED_ORDER=1 blocks are
gathered and added pairwise, as in all other transports.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import cupy as cp
import numpy as np
from cupy.cuda import nccl as _nccl

from spmd import kernels
from spmd.cuda import Places, current
from spmd.errors import TransportError
from spmd.kernels import on_device
from spmd.layout import offsets
from spmd.settings import setting
from spmd.transport.algorithms.neighbours import Near
from spmd.transport.base import Comm, Transport, checks_are_on
from spmd.transport.call import Call, Group, Pair, Shape
from spmd.transport.handles import Done, Handle, Outcome

__all__ = ["NcclTransport"]

nccl: Any = _nccl

_NAMES = {
    **{n: f"NCCL_{n.upper()}" for n in "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16".split()},
    "bool": "NCCL_UINT8",
}
_REALS = {"complex64": "float32", "complex128": "float64"}


def _kind(dtype: Any, how: str) -> tuple[int, int] | None:
    """NCCL's type for a reduction, and how many of them an entry is; None where it has none, or drops NaNs."""
    name = np.dtype(dtype).name
    if how != "sum" and np.dtype(dtype).kind not in "biu":
        return None
    if name in _REALS:
        return getattr(nccl, _NAMES[_REALS[name]]), 2
    nccl_type = getattr(nccl, _NAMES.get(name, "none"), None)
    return None if nccl_type is None else (nccl_type, 1)


def _flat(x: Any) -> Any:
    return (x if x.flags.c_contiguous else x.copy()).reshape(-1).view(np.uint8)


@contextmanager
def _grouped():
    """Group calls of NCCL into one step."""
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


class NcclComm(Comm):
    """One worker's `Comm`, over that of the transport beneath."""

    def __init__(self, transport: NcclTransport, host: Any):
        self.transport = transport
        self.host = host
        self.worker = host.worker

    @property
    def number(self) -> int:
        return self.host.number

    @number.setter
    def number(self, n: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.host.number = n

    @property
    def waited(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.host.waited

    def timed(self) -> Any:
        return self.host.timed()

    def given(self, x: Any) -> Any:
        return self.host.given(x)

    def _shapes(self, group: Group, call: Call) -> Handle:
        return self.host._shapes(group, call)

    def _lengths(self, group: Group, call: Call, near: Near) -> Handle:
        return self.host._lengths(group, call, near)

    def _agree(self, group: Group, call: Call) -> None:
        """Check that all call the same."""
        if self.transport.checks:
            self.host._shapes(group, call).wait()

    def _ring(self, group: Group, call: Call) -> Any:
        """NCCL's communicator of a group, created when its members first meet."""
        key = (group.members, self.worker)
        ring = self.transport.rings.get(key)
        if ring is None:
            # Creating it blocks the device, where pending work could wait for later work.
            current().stream.synchronize()
            own = np.array(nccl.get_unique_id() if group.index == 0 else (), np.int64)
            id_call = Call(call.op, call.axes, own.dtype, own.shape, detail="where NCCL meets", same_shape=None)
            id_call.host = True
            unique_id = self.host._broadcast(group, id_call, own if group.index == 0 else None, 0).wait()
            ring = nccl.NcclCommunicator(group.size, tuple(unique_id.tolist()), group.index)
            self.transport.rings[key] = ring
        return ring

    def _moves(self, group: Group, call: Call, sends: Mapping[int, Any], comes: Mapping[int, Shape]) -> dict[int, Any]:
        """Exchange blocks: what each member sends here, of the shapes that come."""
        ring, stream, dtype = self._ring(group, call), current().stream.ptr, np.dtype(call.dtype)
        received = {k: cp.empty(s, dtype) for k, s in comes.items() if k != group.index}
        sent = {k: _flat(x) for k, x in sends.items() if k != group.index and x.size}
        with _grouped():
            for k, x in sorted(sent.items()):
                ring.send(x.data.ptr, x.size, nccl.NCCL_UINT8, k, stream)
            for k, y in sorted(received.items()):
                if y.size:
                    ring.recv(y.data.ptr, y.nbytes, nccl.NCCL_UINT8, k, stream)
        if group.index in comes:
            received[group.index] = sends[group.index]
        return dict(sorted(received.items()))

    def _all_reduce(self, group: Group, call: Call, x: Any, how: str) -> Handle:
        if group.size == 1 or not on_device(x):
            return self.host._all_reduce(group, call, x, how)
        self._agree(group, call)
        return Done(self._reduced(group, call, x, how))

    def _reduced(self, group: Group, call: Call, x: Any, how: str) -> Any:
        kind = None if self.transport.fixed_order else _kind(x.dtype, how)
        if not x.size:
            return x
        if kind is None:
            return kernels.of(x).combine(self._gathered(group, call, x), how)
        out = cp.empty(x.shape, x.dtype)
        op = getattr(nccl, f"NCCL_{how.upper()}")
        ring = self._ring(group, call)
        ring.allReduce(x.data.ptr, out.data.ptr, x.size * kind[1], kind[0], op, current().stream.ptr)
        return out

    def _gathered(self, group: Group, call: Call, x: Any) -> list[Any]:
        """All members' blocks, of one shape."""
        out = cp.empty((group.size, *x.shape), x.dtype)
        if x.size:
            ring = self._ring(group, call)
            ring.allGather(_flat(x).data.ptr, out.data.ptr, x.nbytes, nccl.NCCL_UINT8, current().stream.ptr)
        return list(out)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[Any], spare: Sequence[bool]) -> Handle:
        if group.size == 1 or not xs or not on_device(xs[0]):
            return self.host._all_reduce_many(group, call, xs, spare)
        packed = cp.concatenate([x.reshape(-1) for x in xs])
        self._agree(group, call)
        total = self._reduced(group, call, packed, "sum")
        at = offsets([x.size for x in xs])
        return Done([total[at[k] : at[k + 1]].reshape(x.shape) for k, x in enumerate(xs)])

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[Any]) -> Handle:
        if group.size == 1 or not on_device(parts[0]):
            return self.host._reduce_scatter(group, call, parts)
        own_part = parts[group.index]
        if self.transport.checks:
            self.host.meet(group, call, [p.shape for p in parts])
        kind = None if self.transport.fixed_order else _kind(own_part.dtype, "sum")
        if kind is None or len({p.size for p in parts}) > 1 or not own_part.size:
            shape: Shape = own_part.shape
            blocks = self._moves(group, call, dict(enumerate(parts)), dict.fromkeys(range(group.size), shape))
            return Done(kernels.of(own_part).combine(list(blocks.values())))
        packed, out = cp.concatenate([p.reshape(-1) for p in parts]), cp.empty(own_part.shape, own_part.dtype)
        ring, stream = self._ring(group, call), current().stream.ptr
        ring.reduceScatter(packed.data.ptr, out.data.ptr, own_part.size * kind[1], kind[0], nccl.NCCL_SUM, stream)
        return Done(out)

    def _all_gather(self, group: Group, call: Call, x: Any) -> Handle:
        if group.size == 1 or not on_device(x):
            return self.host._all_gather(group, call, x)
        shapes = [tuple(s) for s in self.host._shapes(group, call).wait()]
        if len(set(shapes)) == 1:
            return Done(self._gathered(group, call, x))
        blocks = self._moves(group, call, dict.fromkeys(range(group.size), x), dict(enumerate(shapes)))
        return Done(list(blocks.values()))

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[Any]) -> Handle:
        if group.size == 1 or not on_device(parts[0]):
            return self.host._all_to_all(group, call, parts)
        shapes = self.host.meet(group, call, [p.shape for p in parts])
        comes = {k: s or () for k, s in enumerate(shapes)}
        return Done(list(self._moves(group, call, dict(enumerate(parts)), comes).values()))

    def _broadcast(self, group: Group, call: Call, x: Any, root: int) -> Handle:
        if group.size == 1 or call.host or not (x is None or on_device(x)):
            return self.host._broadcast(group, call, x, root)
        shape = self.host.meet(group, call, [None if x is None else x.shape] * group.size)[root]
        block = x if x is not None else cp.empty(shape, call.dtype)
        if prod(shape):
            flat = _flat(block)
            ring, stream = self._ring(group, call), current().stream.ptr
            ring.broadcast(flat.data.ptr, flat.data.ptr, flat.size, nccl.NCCL_UINT8, root, stream)
        return Done(block)

    def _reduce(self, group: Group, call: Call, x: Any, root: int) -> Handle:
        if group.size == 1 or not on_device(x):
            return self.host._reduce(group, call, x, root)
        self._agree(group, call)
        kind = None if self.transport.fixed_order else _kind(x.dtype, "sum")
        at_root = group.index == root
        if kind is None or not x.size:
            shape: Shape = x.shape
            comes = dict.fromkeys(range(group.size), shape) if at_root else {}
            blocks = self._moves(group, call, {root: x}, comes)
            return Done(kernels.of(x).combine(list(blocks.values())) if at_root else None)
        out = cp.empty(x.shape, x.dtype)
        ring, stream = self._ring(group, call), current().stream.ptr
        ring.reduce(x.data.ptr, out.data.ptr, x.size * kind[1], kind[0], nccl.NCCL_SUM, root, stream)
        return Done(out if at_root else None)

    def _exchange(self, group: Group, call: Call, sends: Mapping[int, Any], sources: Collection[int]) -> Handle:
        if group.size == 1 or call.host or any(not on_device(x) for x in sends.values()):
            return self.host._exchange(group, call, sends, sources)
        number = self.host.number
        shapes = self.host.meet(group, call, [sends[k].shape if k in sends else None for k in range(group.size)])
        comes = {k: s for k, s in enumerate(shapes) if s is not None}
        received = self._moves(group, call, sends, comes)
        if type(group) is Pair:  # the others count one collective
            self.host.number = number + 1
        return Done(received)


class NcclTransport(Transport):
    """One GPU for each worker, over the workers of another transport."""

    name = "nccl"

    def __init__(self, host: Transport, places: Places):
        if not nccl.available:
            raise TransportError.at(
                "spmd.Mesh",
                argument="transport",
                got='"nccl", and CuPy cannot load NCCL',
                need="NCCL: it is not in CuPy's wheels",
                mend='pip install nvidia-nccl-cu13; or transport="mpi", or "local"',
            )
        self.host = host
        self.places = places
        self.size, self.local = host.size, host.local
        self.rings: dict[Any, Any] = {}
        self.checks = checks_are_on()
        self.fixed_order = setting("SPMD_NCCL_FIXED_ORDER")
        self.tried = False

    def _one_each(self) -> None:
        """Raise where two workers have one GPU, which NCCL refuses."""
        own = {w: [platform.node(), cp.cuda.Device(self.places.device(w)).pci_bus_id] for w in self.local}
        taken: dict[Any, int] = {}
        for w, gpu in sorted(self.host.share(own).items()):
            first = taken.setdefault(tuple(gpu), w)
            if first != w:
                raise TransportError.at(
                    "spmd.Mesh",
                    argument="transport",
                    got=f'"nccl", with workers {first} and {w} on one GPU, {gpu[1]} of {gpu[0]}',
                    need="a GPU for each worker",
                    mend='fewer workers; or transport="local" in one process, "mpi" in several: they share GPUs',
                )
        self.tried = True

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        if not self.tried:
            self._one_each()
        # NCCL blocks its thread, so each worker needs one.
        return self.host.run(lambda comm: body(NcclComm(self, comm)), "threads", describe)

    def threads(self) -> int:
        return self.host.threads()

    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        return self.host.share(local)
