"""Sums and extrema over workers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import numpy as np

from spmd import kernels
from spmd.autodiff import tree
from spmd.autodiff.devices import beside
from spmd.autodiff.dtypes import kind_of_dtype, most
from spmd.autodiff.program import COMM, is_slot
from spmd.autodiff.tape import alone
from spmd.autodiff.tracer import Array, value_of
from spmd.device import COPIED, contiguous, on_device
from spmd.errors import LayoutError, MeshError, StateError, caller, describe, message
from spmd.frontends import frontend
from spmd.kernels.cpu.moves import small_fold
from spmd.mesh import WORKER, Worker, here
from spmd.operators.base import (
    Collective,
    Launched,
    Operator,
    Vary,
    bounded,
    everywhere,
    interned,
    move,
    operate,
    owned_block,
    vary,
)
from spmd.spellings import closest
from spmd.state import INVARIANT, state_of
from spmd.tracebacks import shorten
from spmd.transport.base import (
    LEDGERS,
    Call,
    Comm,
    Eager,
    Group,
    Handle,
    Make,
    Ready,
    Shape,
    Steps,
    all_reduce_cost,
    sealed,
)

__all__ = ["Extremum", "Sum", "pcast", "pmax", "pmean", "pmin", "psum", "pvary"]

AxisName = str | Sequence[str]


def folded(x: np.ndarray, blocks: list[Any], how: str = "sum") -> np.ndarray:
    return sealed(kernels.of(x).combine(blocks, how))


def folding(x: np.ndarray, how: str = "sum") -> Make:
    """What folds blocks like x, two at least."""
    fold = small_fold(x, how) if x.nbytes <= COPIED else None
    return partial(folded, how=how) if fold is None else lambda _, blocks: fold(*blocks)


def folded_at_once(op: Operator | Extremum, group: Group, x: np.ndarray, how: str = "sum") -> Eager | None:
    """A sum that everyone takes of all blocks; of more than two large ones everyone takes a part instead."""
    if group.size > 2 and x.nbytes > COPIED:
        return None
    fold = folding(x, how)
    return everywhere(group, lambda _: (fold, op))  # which lives longer than x is to


class Sum(Operator):
    """V -> I: the sum over the workers, known to all. One all-reduce; its adjoint is `Vary`, which moves nothing."""

    function: ClassVar[str] = "psum"
    target: ClassVar[str] = INVARIANT
    adds: ClassVar[bool] = True
    alike: ClassVar[bool] = True

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        return comm.all_reduce(group, call, x), lambda total: (total, self)

    def eager(self, group: Group, x: np.ndarray) -> Eager | None:
        return folded_at_once(self, group, x)

    @property
    def H(self) -> Operator:
        return interned(Vary, self.axes)

    def cost(self, group: Group, x: np.ndarray) -> tuple[int, int]:
        return all_reduce_cost(group, x)


_BUCKET = 4 << 20
"""Bytes of owed sums that are sent together: enough to hide a message's latency, few enough to overlap the sweep."""


class _Bucket:
    """Sums owed to leaves, over one group and of one dtype: sent together when they are many, or at the end."""

    def __init__(self, worker: Worker, kind: tuple[tuple[str, ...], np.dtype]):
        self.worker = worker
        self.kind = kind
        self.blocks: list[np.ndarray] = []
        self.nbytes = 0
        self.handle: Handle | None = None

    def send(self) -> None:
        axes, dtype = self.kind
        group = self.worker.group(axes)
        call = _sum_of_gradients(axes, dtype, tuple([b.shape for b in self.blocks]))
        blocks, self.blocks = self.blocks, []  # whoever sums them keeps them for as long as need be
        program = self.worker.program
        if program is None:
            self.handle = _sum_many(self.worker.comm, group, call, blocks)
        else:
            sums = program.call(_sum_many, (COMM, group, call, blocks), effect=True, gives=True, comm=self.worker.comm)
            self.handle = Ready(program.call(_waited, (sums,), effect=True))


def _sum_many(comm: Comm, group: Group, call: Call, blocks: list[Any]) -> Handle:
    spare = [type(b) is np.ndarray and alone(sys.getrefcount(b) - 1, b) for b in blocks]
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
        if self.bucket.nbytes >= _BUCKET:
            self.sums.send_one(self.bucket)

    def wait(self) -> np.ndarray:
        if self.sums.open:
            self.sums.send()
        assert self.bucket.handle is not None
        return self.bucket.handle.wait()[self.index]


class OwedSums:
    """The sums that a sweep owes to leaves, in buckets: open is the one of each group and dtype that takes more."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.open: dict[tuple[tuple[str, ...], np.dtype], _Bucket] = {}

    def owe(self, axes: tuple[str, ...], g) -> _Owed:
        """Put the sum of a cotangent into the open bucket of its group, which `begin` sends when it is full."""
        g = contiguous(g)
        for ledger in LEDGERS.get():
            ledger.operator(self.worker.index, "Sum", axes)
        kind = (axes, g.dtype)
        bucket = self.open.get(kind)
        if bucket is None:
            bucket = self.open[kind] = _Bucket(self.worker, kind)
        bucket.blocks.append(g)
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


def _sum_of_gradients(axes: tuple[str, ...], dtype: np.dtype, shapes: tuple[Shape, ...]) -> Call:
    """What the workers call, from the line of the user that asks for gradients; made once for each, as by `launch`."""
    user = caller(sys._getframe(2))
    key = None if user is None else (id(user.f_code), user.f_lasti, axes, dtype, shapes)
    call = _calls.get(key)
    if call is None:
        size, listed = sum(map(math.prod, shapes)), ", ".join(str([*shape]) for shape in shapes)
        call = Call("psum", axes, dtype, (size,), detail=f"gradients of shapes {listed}", alike=True, frame=user)
        if key is not None:
            bounded(_calls)[key] = call  # It keeps the code, so that no other has its id.
    return call


def psum(x, axis_name: AxisName):
    """The sum of x over the workers along axis_name, the same on all of them.

    x: an array that varies over every named axis, of one shape on all workers, or a pytree of them; booleans are
    counted. A Python number is summed over all workers too: `psum(len(x), "x")` is the true total.
    axis_name: an axis of the mesh, or a tuple of axes.

    Forward (V -> I): y = x_0 + x_1 + ..., in this order. Adjoint (I -> V): `pvary`, every worker gets the cotangent.
    Cost: one all-reduce forward, nothing backward. As `jax.lax.psum`, but an Invariant array is refused (StateError).
    """
    return operate(interned(Sum, _names(axis_name, "psum")), x, sys._getframe(1))


def pvary(x, axis_name: AxisName):
    """x as one value per worker along axis_name: what tells that its gradient is wanted for each worker by itself.

    Forward (I -> V): the same value on every worker; nothing moves. Adjoint (V -> I): `psum` of the cotangents.
    It is inserted wherever an Invariant array meets Varying data. Axes that x varies over already are left alone.
    As `jax.lax.pvary`; `jax.lax.pcast(x, axis_name, to="varying")`.
    """
    names = _names(axis_name, "pvary")
    worker = here("spmd.pvary")
    state = state_of(names)

    def one(a):
        other = frontend(a)
        if other is not None:
            return other.vary(a, names, worker)
        if not worker.tracked:
            return a
        if type(a) is not Array:
            a = Array(a if isinstance(a, int | float | complex) else owned_block(a, Vary(names)), worker.state())
        return vary(a, a.state | state)

    return tree.map(one, x)


def pcast(x, axis_name: AxisName, *, to: str = "varying"):
    """x in the state `to` along axis_name: "varying" is `pvary`; "invariant" (or "invarying") only states a fact.

    Raises StateError where a Varying array is to be Invariant: that takes a sum, a mean or a gather.
    """
    if to == "varying":
        return pvary(x, axis_name)
    names, worker = _names(axis_name, "pcast"), here("spmd.pcast")
    if to not in ("invariant", "invarying"):
        raise StateError(
            message(
                "spmd.pcast",
                argument="to",
                got=repr(to),
                need='"varying" or "invariant"',
                mend=f'spmd.pcast(x, axis_name, to="{closest(to, ("varying", "invariant"))}")',
            )
        )
    for a in tree.leaves(x):
        if not isinstance(a, int | float | complex) and worker.tracked and varying_of(a, names):
            raise StateError(
                message(
                    "spmd.pcast",
                    argument="x",
                    got=describe(a),
                    need=f"an array that is Invariant along {' and '.join(map(repr, names))}",
                    mend="spmd.psum, spmd.pmean or spmd.all_gather(..., to='invariant') make it so",
                )
            )
    return x


def _names(axis_name: AxisName, function: str) -> tuple[str, ...]:
    worker = WORKER.get()
    if worker is not None and type(axis_name) is str and axis_name in worker.mesh.axes:
        return (axis_name,)
    where = f"spmd.{function}"
    try:
        return here(where).mesh.names(axis_name, where)
    except MeshError as error:
        shorten(error)
        raise


def varying_of(x, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes that x varies over: all of them for what carries no state (numbers, untracked blocks)."""
    if type(x) is Array:
        return tuple(n for n in names if n in x.state.varying)
    if here("a reduction").tracked and not isinstance(x, int | float | complex):
        other = frontend(x)
        return () if other is None else tuple(n for n in names if n in other.state(x).varying)
    return names


def pmean(x, axis_name: AxisName):
    """The mean of x over the workers along axis_name: psum(x) / n. An Invariant array is its own mean.

    Workers count equally, however many entries their blocks have; `spmd.mean` counts entries.
    """
    names, frame = _names(axis_name, "pmean"), sys._getframe(1)

    def one(a):
        over = varying_of(a, names)
        if not over:
            return a
        return operate(interned(Sum, over), a, frame) / here("spmd.pmean").group(over).size

    return tree.map(one, x)


@dataclass(frozen=True)
class Extremum(Collective):
    """V -> I: the largest (smallest) entry over the workers and over the dimensions `dims` of their blocks.

    Not linear. The cotangent goes to the entries and workers that attain it, shared equally among ties.
    """

    how: str = "max"
    dims: tuple[int, ...] = ()

    function: ClassVar[str] = "pmax"
    target: ClassVar[str] = INVARIANT

    @property
    def alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Blocks may be uneven along the dimensions that go away."""
        return not self.dims

    def check(self, group: Group, x: np.ndarray) -> None:
        if x.dtype.kind == "c":
            raise StateError(
                message(
                    f"spmd.{self.function}",
                    argument="x",
                    got=describe(x),
                    need="real numbers: complex ones have no order",
                    mend="take np.abs, np.real or np.imag first",
                )
            )

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        if not self.dims:
            return comm.all_reduce(group, call, x, self.how), lambda y: (y, self)
        if on_device(x):
            return Steps(self._on_device(comm, group, x, call)), lambda found: found
        least = _identity(x.dtype, self.how)
        top = np.max if self.how == "max" else np.min
        y = np.asarray(top(x, axis=self.dims, initial=least))
        some = np.full((1,), _marker(x.dtype, self.how, x.size > 0 or y.size == 0), x.dtype)
        packed = np.concatenate([y.reshape(-1), some], dtype=x.dtype)
        call = call.of(packed.shape, alike=True)

        def arrive(got: np.ndarray):
            if got[-1] != _marker(x.dtype, self.how, True):
                raise self._empty()
            return got[:-1].reshape(y.shape), self

        return comm.all_reduce(group, call, packed, self.how), arrive

    def eager(self, group: Group, x: np.ndarray) -> Eager | None:
        if self.dims:
            return None
        return folded_at_once(self, group, x, self.how)

    def _empty(self) -> LayoutError:
        return LayoutError(
            message(
                f"spmd.{self.how}",
                argument="x",
                got="blocks without entries on every worker",
                need="at least one entry",
                mend="test the size before (spmd.psum(x.size, axis_name))",
            )
        )

    def _on_device(self, comm: Comm, group: Group, x: Any, call: Call):
        """On a device nobody looks at numbers: whether there are entries is told by the shapes, before."""
        shapes = yield comm.shapes(group, call)
        kept = [n for d, n in enumerate(x.shape) if d not in self.dims]
        if not any(math.prod(s) for s in shapes) and math.prod(kept):
            raise self._empty()
        empty = any(x.shape[d] == 0 for d in self.dims)
        y = (
            np.full_like(x, _identity(x.dtype, self.how), shape=tuple(kept))
            if empty
            else (np.max if self.how == "max" else np.min)(x, axis=self.dims)
        )
        call = Call(call.op, call.axes, x.dtype, y.shape, detail=call.detail, alike=True)
        total = yield comm.all_reduce(group, call, contiguous(y), self.how)
        return total, self

    def pull(self, g, x, ans):
        bare, top = value_of(x), value_of(ans)
        if on_device(top):  # what came from the host has been moved there
            bare = beside(np.asarray(bare), top) if not on_device(bare) else bare
            g = beside(g, top)
        elif not is_slot(bare) and not is_slot(top):
            bare, top = np.asarray(bare), np.asarray(top)
        real: Any = bare.dtype
        if self.dims:
            top, g = np.expand_dims(top, self.dims), np.expand_dims(g, self.dims)
        ties = (bare == top) | ((bare != bare) & (top != top))
        count = np.sum(ties, axis=self.dims, keepdims=True) if self.dims else ties
        total = move(
            interned(Sum, self.axes), count.astype(real) if hasattr(count, "astype") else np.asarray(count, real)
        )
        return move(Vary(self.axes), g) * (ties / total)


def _identity(dtype, how: str):
    """The value that never wins."""
    if dtype.kind == "b":
        return how == "min"
    if kind_of_dtype(dtype) == "f":
        return -most(dtype) if how == "max" else most(dtype)
    return dtype.type(np.iinfo(dtype).min if how == "max" else np.iinfo(dtype).max)


def _marker(dtype, how: str, some: bool):
    """A number that says whether a block had entries, chosen so that one that had wins."""
    return dtype.type(some if how == "max" else not some)


def _extremum(x, names: tuple[str, ...], how: str, frame: FrameType):
    def one(a):
        over = varying_of(a, names)
        return operate(interned(Extremum, over, how), a, frame) if over else a

    return tree.map(one, x)


def pmax(x, axis_name: AxisName):
    """The largest x of the workers along axis_name, entry by entry; Invariant. An Invariant array is its own.

    Gradient: to the workers that attain it, in equal shares. Cost: one all-reduce forward, one backward for ties.
    """
    return _extremum(x, _names(axis_name, "pmax"), "max", sys._getframe(1))


def pmin(x, axis_name: AxisName):
    """The smallest x of the workers along axis_name, entry by entry; see `pmax`."""
    return _extremum(x, _names(axis_name, "pmin"), "min", sys._getframe(1))
