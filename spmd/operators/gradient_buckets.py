"""The sums that a backward sweep owes to leaves, sent together in buckets."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.backward import is_sole_owner
from spmd.autodiff.staging.program import COMM
from spmd.autodiff.tape import Place
from spmd.device import contiguous
from spmd.errors import caller
from spmd.mesh import Worker
from spmd.operators.memo import bounded
from spmd.transport.base import Comm
from spmd.transport.call import GRADIENTS, LEDGERS, Call, Group, Shape
from spmd.transport.handles import Done, Handle

LEAF = object()
"""Under which a sweep's debts have the leaf that they are owed to."""

_BUCKET_NBYTES = 4 << 20
"""Bytes of owed sums that are sent together: enough to hide a message's latency, few enough to overlap the sweep."""


class _Bucket:
    """Sums owed to leaves, over one group and of one dtype: sent together when they are large enough, or at the end."""

    def __init__(self, worker: Worker, kind: tuple[tuple[str, ...], np.dtype]):
        self.worker = worker
        self.kind = kind
        self.blocks: list[np.ndarray] = []
        self.places: list[Place | None] = []
        self.nbytes = 0
        self.handle: Handle | None = None

    def send(self) -> None:
        axes, dtype = self.kind
        group = self.worker.group(axes)
        call = _sum_of_gradients(axes, dtype, tuple([b.shape for b in self.blocks]), tuple(self.places))
        blocks, self.blocks = self.blocks, []  # whoever sums them keeps them for as long as need be
        program = self.worker.program
        if program is None:
            self.handle = _sum_many(self.worker.comm, group, call, blocks)
        else:
            args = (COMM, group, call, blocks)
            sums = program.call(_sum_many, args, effect=True, donates=True, comm=self.worker.comm)
            self.handle = Done(program.call(_waited, (sums,), effect=True))


def _sum_many(comm: Comm, group: Group, call: Call, blocks: list[Any]) -> Handle:
    spare = [type(b) is np.ndarray and is_sole_owner(sys.getrefcount(b) - 1, b) for b in blocks]
    return comm.all_reduce_many(group, call, blocks, spare)


def _waited(handle: Handle) -> Any:
    return handle.wait()


class _Owed:
    """One sum in a bucket."""

    __slots__ = ("bucket", "index", "sums")

    def __init__(self, sums: OwedSums, bucket: _Bucket):
        self.sums = sums
        self.bucket = bucket
        self.index = len(bucket.blocks) - 1

    def begin(self) -> None:
        if self.bucket.nbytes >= _BUCKET_NBYTES:
            self.sums.send_one(self.bucket)

    def wait(self) -> np.ndarray:
        if self.sums.open:
            self.sums.send()
        assert self.bucket.handle is not None
        return self.bucket.handle.wait()[self.index]


class OwedSums:
    """The sums that a sweep owes to leaves. open: the unsent bucket of each group and dtype."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.open: dict[tuple[tuple[str, ...], np.dtype], _Bucket] = {}

    def owe(self, axes: tuple[str, ...], g, place: Place | None = None) -> _Owed:
        """Put the sum of a cotangent into the open bucket of its group, which `begin` sends when it is full.

        place: of the leaf that it is owed to, among the arguments that are differentiated.
        """
        g = contiguous(g)
        for ledger in LEDGERS.get():
            ledger.operator(self.worker.index, "Sum", axes)
        kind = (axes, g.dtype)
        bucket = self.open.get(kind)
        if bucket is None:
            bucket = self.open[kind] = _Bucket(self.worker, kind)
        bucket.blocks.append(g)
        bucket.places.append(place)
        bucket.nbytes += g.nbytes
        return _Owed(self, bucket)

    def send_one(self, bucket: _Bucket) -> None:
        """Send an open bucket."""
        del self.open[bucket.kind]
        bucket.send()

    def send(self) -> None:
        """Send what is left, in the order in which the buckets were begun."""
        left, self.open = self.open, {}
        for bucket in left.values():
            bucket.send()


_calls: dict[Any, Call] = {}


def _sum_of_gradients(
    axes: tuple[str, ...], dtype: np.dtype, shapes: tuple[Shape, ...], places: tuple[Place | None, ...]
) -> Call:
    """The call of the user's line that asks for gradients; created once for each."""
    user = caller(sys._getframe(2))
    line = (0, 0) if user is None else (id(user.f_code), user.f_lasti)
    key = (*line, axes, dtype, shapes, places)
    call = _calls.get(key)
    if call is None:
        size, listed = sum(map(math.prod, shapes)), ", ".join(str([*shape]) for shape in shapes)
        detail, leaf = f"gradients of shapes {listed}", _arguments(places)
        call = Call("psum", axes, dtype, (size,), detail=detail, same_shape=True, frame=user, leaf=leaf)
        bounded(_calls)[key] = call  # It keeps the code, so that no other has its id.
    return call


def _arguments(places: tuple[Place | None, ...]) -> tree.Leaf:
    """The arguments that gradients in a bucket belong to, as workers compare them."""
    paths = [
        "a value" if place is None else f"argument {place[0]}{place[1].path if place[1] is not None else ''}"
        for place in places
    ]
    trees = {
        f"{place[0]}: {place[1].tree.text}": None for place in places if place is not None and place[1] is not None
    }
    text = f"{GRADIENTS} by {', '.join(paths)}" + f" (arguments {', '.join(trees)})" * bool(trees)
    return tree.Leaf(tree.Described(text, paths), -1)
