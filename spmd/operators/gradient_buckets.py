"""Sums of cotangents of leaves, which a backward sweep defers and sends together in buckets."""

from __future__ import annotations

import math
import sys
from contextvars import ContextVar
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.backward import is_sole_owner
from spmd.autodiff.staging.program import COMM
from spmd.autodiff.tape import Node
from spmd.autodiff.tape import Place as PlaceOfLeaf
from spmd.device import contiguous
from spmd.errors import caller
from spmd.mesh import Worker
from spmd.operators.memo import bounded
from spmd.operators.partial_comm import whole_comm
from spmd.transport.base import Comm
from spmd.transport.call import GRADIENTS, LEDGERS, Call, Group, Origin, Place, Shape, place_of
from spmd.transport.handles import Done, Handle
from spmd.transport.observing import located

_BUCKET_NBYTES = 4 << 20
"""Bytes of a full bucket: large enough to hide a message's latency, small enough to overlap with the sweep."""


class _Bucket:
    """Deferred sums over one group and of one dtype. They are sent together, when the bucket is full or at the end."""

    def __init__(self, worker: Worker, kind: tuple[tuple[str, ...], np.dtype]):
        self.worker = worker
        self.kind = kind
        self.blocks: list[np.ndarray] = []
        self.places: list[PlaceOfLeaf | None] = []
        self.nbytes = 0
        self.handle: Handle | None = None

    def send(self) -> None:
        axes, dtype = self.kind
        group = self.worker.group(axes)
        call = _call_of_bucket(axes, dtype, tuple([b.shape for b in self.blocks]), tuple(self.places))
        blocks, self.blocks = self.blocks, []  # the collective keeps them for as long as it needs them
        program = self.worker.program
        if program is not None and call.code is None:
            call = call.recorded(self.worker.comm.called_at)  # replays may come from other lines
        if program is None:
            self.handle = _start_sums(self.worker.comm, group, call, blocks)
        else:
            args = (COMM, group, call, blocks)
            sums = program.call(_start_sums, args, effect=True, donates=True, comm=self.worker.comm)
            self.handle = Done(program.call(_wait, (sums,), effect=True))


def _start_sums(comm: Comm, group: Group, call: Call, blocks: list[Any]) -> Handle:
    spare = [type(b) is np.ndarray and is_sole_owner(sys.getrefcount(b) - 1, b) for b in blocks]
    with whole_comm(comm).uncounted():  # workers with larger blocks of parameters send more buckets
        return comm.all_reduce_many(group, call, blocks, spare)


def _wait(handle: Handle) -> Any:
    return handle.wait()


class _DeferredSum:
    """One sum in a bucket: a `Future` of the sweep."""

    __slots__ = ("bucket", "index", "sums")

    def __init__(self, sums: DeferredSums, bucket: _Bucket):
        self.sums = sums
        self.bucket = bucket
        self.index = len(bucket.blocks) - 1

    def begin(self) -> None:
        if self.bucket.nbytes >= _BUCKET_NBYTES:
            self.sums.send_one(self.bucket)

    def wait(self) -> np.ndarray:
        if self.sums.unsent:
            self.sums.send()
        assert self.bucket.handle is not None
        return self.bucket.handle.wait()[self.index]


class DeferredSums:
    """The deferred sums of a sweep. unsent: the bucket that is being filled, by axes and dtype."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.unsent: dict[tuple[tuple[str, ...], np.dtype], _Bucket] = {}

    def add(self, axes: tuple[str, ...], g, place: PlaceOfLeaf | None = None) -> _DeferredSum:
        """Add a cotangent to the bucket of its group, which `begin` sends when it is full.

        place: that of its leaf among the differentiated arguments.
        """
        g = contiguous(g)
        observers = LEDGERS.get()
        if not observers.replays:
            origin = located(self.worker.comm, Origin("Sum", axes, self._place(), "backward"))
            for observer in observers:
                observer.operator(self.worker.index, origin)
        kind = (axes, g.dtype)
        bucket = self.unsent.get(kind)
        if bucket is None:
            bucket = self.unsent[kind] = _Bucket(self.worker, kind)
        bucket.blocks.append(g)
        bucket.places.append(place)
        bucket.nbytes += g.nbytes
        return _DeferredSum(self, bucket)

    def _place(self) -> Place:
        """The line that asks for the gradients."""
        place = place_of(sys._getframe())
        return place if place[0] is not None else self.worker.comm.called_at or place

    def send_one(self, bucket: _Bucket) -> None:
        """Send an unsent bucket."""
        del self.unsent[bucket.kind]
        bucket.send()

    def send(self) -> None:
        """Send the remaining buckets, in the order of their first blocks."""
        unsent, self.unsent = self.unsent, {}
        for bucket in unsent.values():
            bucket.send()


class CollectedSums:
    """The sums that the leaves of several sweeps owe. Each worker adds its terms; they are sent once, by `totals`.

    leaves: those of the sweep that is under way, with the number that each has in all sweeps.
    """

    def __init__(self) -> None:
        self.leaves: dict[Node, int] = {}
        self.terms: dict[tuple[int, tuple[str, ...]], Any] = {}
        self.places: dict[int, PlaceOfLeaf | None] = {}

    def add(self, axes: tuple[str, ...], g: Any, leaf: Node) -> _Nothing:
        number = self.leaves[leaf]
        key = number, axes
        old = self.terms.get(key)
        self.terms[key] = g if old is None else old + g
        self.places[number] = leaf.place
        return _Nothing(leaf)

    def totals(self, worker: Worker) -> dict[int, list[Any]]:
        """By the number of a leaf, the sums of its terms over the workers of each group."""
        sums, terms = DeferredSums(worker), list(self.terms)
        futures = []
        for number, axes in terms:
            future = sums.add(axes, self.terms.pop((number, axes)), self.places[number])
            future.begin()
            futures.append(future)
        found: dict[int, list[Any]] = {}
        for (number, _), future in zip(terms, futures, strict=True):
            found.setdefault(number, []).append(future.wait())
        return found


class _Nothing:
    """A `Future` of the sweep whose cotangent arrives after the sweep."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Node):
        self.leaf = leaf

    def begin(self) -> None:
        pass

    def wait(self) -> np.ndarray:
        return np.broadcast_to(np.zeros((), self.leaf.dtype), self.leaf.shape)


COLLECTED: ContextVar[CollectedSums | None] = ContextVar("spmd_collected_sums", default=None)
"""Where the sums that leaves owe go in place of messages."""

_calls: dict[Any, Call] = {}


def _call_of_bucket(
    axes: tuple[str, ...], dtype: np.dtype, shapes: tuple[Shape, ...], places: tuple[PlaceOfLeaf | None, ...]
) -> Call:
    """The call of a bucket, at the user's line that asks for gradients. Cached by line and bucket."""
    user = caller(sys._getframe(2))
    line = (0, 0) if user is None else (id(user.f_code), user.f_lasti)
    key = (*line, axes, dtype, shapes, places)
    call = _calls.get(key)
    if call is None:
        size, listed = sum(map(math.prod, shapes)), ", ".join(str([*shape]) for shape in shapes)
        detail, leaf = f"gradients of shapes {listed}", _described_arguments(places)
        call = Call("psum", axes, dtype, (size,), detail=detail, same_shape=True, frame=user, leaf=leaf)
        call.operator, call.backward = "Sum", True
        bounded(_calls)[key] = call  # The call keeps the code object alive, so its id stays unique.
    return call


def _described_arguments(places: tuple[PlaceOfLeaf | None, ...]) -> tree.Leaf:
    """The arguments of the gradients in a bucket, in the form that workers compare."""
    paths = [
        "a value" if place is None else f"argument {place[0]}{place[1].path if place[1] is not None else ''}"
        for place in places
    ]
    trees = {
        f"{place[0]}: {place[1].tree.text}": None for place in places if place is not None and place[1] is not None
    }
    text = f"{GRADIENTS} by {', '.join(paths)}" + f" (arguments {', '.join(trees)})" * bool(trees)
    return tree.Leaf(tree.Described(text, paths), -1)
