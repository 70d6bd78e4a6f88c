"""Sums and extrema over workers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.devices import beside
from spmd.autodiff.dtypes import kind_of_dtype, least, mean_dtype, most
from spmd.autodiff.signatures import Tree
from spmd.autodiff.staging.recorder import is_slot
from spmd.autodiff.tracer import Array, value_of
from spmd.device import contiguous
from spmd.errors import LayoutError, MeshError, StateError, describe
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.mesh import WORKER, here
from spmd.operators.apply import operate
from spmd.operators.base import Collective, each_leaf, move, named
from spmd.operators.blocks import owned_block
from spmd.operators.memo import interned
from spmd.operators.sums import Sum, Vary, reduce_to_all
from spmd.operators.terms import warn_of_summed_gradient
from spmd.operators.varying import vary, verify_one_value
from spmd.spellings import closest
from spmd.state import INVARIANT, state_of
from spmd.tracebacks import shorten
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group, Shape
from spmd.transport.handles import Chained, Handle, Mapped
from spmd.transport.plan import Plan

__all__ = ["Extremum", "pcast", "pmax", "pmean", "pmin", "psum", "pvary"]

AxisName = str | Sequence[str]


def psum(x: Tree, axis_name: AxisName) -> Tree:
    """The sum of x over the workers along axis_name, the same on all of them.

    x: an array that varies over every named axis, of one shape on all workers, or a pytree of them; booleans are
    counted. A Python number is summed over all workers too: `psum(len(x), "x")` is the true total.
    axis_name: an axis of the mesh, or a tuple of axes.

    Forward (V -> I): y = x_0 + x_1 + ..., added pairwise. Adjoint (I -> V): `pvary`, every worker gets the cotangent.
    Cost: one all-reduce forward, nothing backward. Raises StateError for an Invariant array, MismatchError for blocks
    of several shapes. As `jax.lax.psum`.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P())
        ...     f(np.arange(4.0))
        ...     spmd.vjp(f, np.arange(4.0))[1](np.array([1.0, 10.0]))
        PartitionedArray([2., 4.], dtype=float64, spec=P(None))
        (array([ 1., 10.,  1., 10.]),)
    """
    return operate(interned(Sum, _names(axis_name, "psum")), x, sys._getframe(1))


def pvary(x: Tree, axis_name: AxisName) -> Tree:
    """x as one value per worker along axis_name: what tells that its gradient is wanted for each worker by itself.

    Forward (I -> V): the same value on every worker; nothing moves. Adjoint (V -> I): `psum` of the cotangents.
    It is inserted wherever an Invariant array meets Varying data. Axes that x varies over already are left alone.
    As `jax.lax.pvary`; `jax.lax.pcast(x, axis_name, to="varying")`.

        >>> def body(w, x):
        ...     own = spmd.grad(lambda w: w * np.sum(x))(spmd.pvary(w, "data"))
        ...     return np.stack([own])
        >>> with spmd.Mesh(data=2):
        ...     spmd.map(body, (P(), P("data")), P("data"))(1.0, np.array([3.0, 4.0]))
        PartitionedArray([3., 4.], dtype=float64, spec=P('data'))
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


def pcast(x: Tree, axis_name: AxisName, *, to: str = "varying") -> Tree:
    """x in the state `to` along axis_name: "varying" is `pvary`; "invariant" (or "invarying") only states a fact.

    Raises StateError where a Varying array is to be Invariant: that takes a sum, a mean or a gather.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda w: spmd.psum(spmd.pcast(w, "x", to="varying"), "x"), P(), P())
        ...     f(3.0)
        PartitionedArray(6., dtype=float64, spec=P())
    """
    if to == "varying":
        return pvary(x, axis_name)
    names, worker = _names(axis_name, "pcast"), here("spmd.pcast")
    if to not in ("invariant", "invarying"):
        raise StateError.at(
            "spmd.pcast",
            argument="to",
            got=repr(to),
            need='"varying" or "invariant"',
            mend=f'spmd.pcast(x, axis_name, to="{closest(to, ("varying", "invariant"))}")',
        )
    for a in tree.leaves(x):
        if not isinstance(a, int | float | complex) and worker.tracked and varying_of(a, names):
            raise StateError.at(
                "spmd.pcast",
                argument="x",
                got=describe(a),
                need=f"an array that is Invariant along {' and '.join(map(repr, names))}",
                mend="spmd.psum, spmd.pmean or spmd.all_gather(..., to='invariant') make it so",
            )
        if worker.tracked and not isinstance(a, int | float | complex):
            reduced_axes(a, names, "spmd.pcast")
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


def reduced_axes(x, names: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The axes over which a reduction of x has to communicate: those that x varies over. Along the others it is the
    identity, if x is one value there, which is verified."""
    over = varying_of(x, names)
    rest = tuple(n for n in names if n not in over)
    if rest:
        verify_one_value(x, rest, where)
    return over


def varying_of(x, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes that x varies over: all of them for what carries no state (numbers, untracked blocks)."""
    if type(x) is Array:
        return tuple(n for n in names if n in x.state.varying)
    if here("a reduction").tracked and not isinstance(x, int | float | complex):
        other = frontend(x)
        return () if other is None else tuple(n for n in names if n in other.state(x).varying)
    return names


def pmean(x: Tree, axis_name: AxisName) -> Tree:
    """The mean of x over the workers along axis_name: psum(x) / n. An Invariant array is its own mean.

    Take it of the loss, not of its gradients: at Invariant parameters those are sums over the workers already, which
    the mean leaves as they are. A warning says so where it finds one.

    Workers count equally, however many entries their blocks have; `spmd.mean` counts entries. As by np.mean, integers
    give float64, and float16 (bfloat16, float8) numbers are added up in float32, and rounded once. Adjoint: the
    cotangent / n, on every worker. Cost: one all-reduce forward, nothing backward.

        >>> def step(w, x):
        ...     return spmd.pmean(w * np.sum(x), "data")
        >>> with spmd.Mesh(data=2):
        ...     spmd.value_and_grad(spmd.map(step, (P(), P("data")), P()))(2.0, np.array([1.0, 3.0]))
        (PartitionedArray(4., dtype=float64, spec=P()), np.float64(2.0))
    """
    names, frame = _names(axis_name, "pmean"), sys._getframe(1)

    def one(a, at):
        over = reduced_axes(a, names, "spmd.pmean")
        warn_of_summed_gradient("spmd.pmean", a, tuple(n for n in names if n not in over), here("spmd.pmean"))
        if not over:
            return a
        wide = added_up_in(a)
        op = at(named("pmean", Sum, over))
        total = operate(op, a if wide is None else in_dtype(a, wide), frame)
        return rounded(total / here("spmd.pmean").group(over).size, dtype_of(a))

    return each_leaf(one, x)


def dtype_of(x: Any) -> np.dtype | None:
    """NumPy's dtype of an array of any library; None for a number of Python's, and for what is no array."""
    other = frontend(x)
    return getattr(x, "dtype", None) if other is None else other.dtype(x)


def added_up_in(x: Any) -> np.dtype | None:
    """The dtype in which the entries of an array are added up for their mean; None: their own. Other libraries' sums
    of long integers stay integers."""
    dtype = dtype_of(x)
    if dtype is None or dtype.kind in "iu" and dtype.itemsize == 8 and frontend(x) is not None:
        return None
    return mean_dtype(dtype)


def in_dtype(x: Any, dtype: np.dtype) -> Any:
    """An array of any library in another dtype."""
    other = frontend(x)
    return x.astype(dtype) if other is None else other.cast(x, dtype)


def rounded(x: Any, dtype: np.dtype | None) -> Any:
    """A mean in the dtype of short floating-point numbers, where it is one of them; else as it is."""
    short = dtype is not None and kind_of_dtype(dtype) == "f" and mean_dtype(dtype) is not None
    return in_dtype(x, dtype) if short and dtype is not None else x


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
    def same_shape(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Blocks may be uneven along the dimensions that go away."""
        return not self.dims

    def check(self, group: Group, x: np.ndarray) -> None:
        if x.dtype.kind == "c":
            raise StateError.at(
                f"spmd.{self.function}",
                argument="x",
                got=describe(x),
                need="real numbers: complex ones have no order",
                mend="take np.abs, np.real or np.imag first",
            )

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        """That of a block, or of what is left of it without `dims`."""
        return reduce_to_all(self, group, shape, dtype, self.how)

    def repeatable_plan(self, group: Group, x: np.ndarray) -> Plan | None:
        return None if self.dims else self.plan_for(group, x.shape, x.dtype)

    def start(self, comm: Comm, group: Group, x: Any, call: Call) -> Handle:
        if not self.dims:
            return super().start(comm, group, x, call)
        if on_device(x):
            return Chained(self._on_device(comm, group, x, call))
        least = _identity(x.dtype, self.how)
        top = np.max if self.how == "max" else np.min
        y = np.asarray(top(x, axis=self.dims, initial=least))
        some = np.full((1,), _marker(x.dtype, self.how, x.size > 0 or y.size == 0), x.dtype)
        packed = np.concatenate([y.reshape(-1), some], dtype=x.dtype)

        def unpack(result: tuple[np.ndarray, Any]) -> tuple[np.ndarray, Any]:
            if result[0][-1] != _marker(x.dtype, self.how, True):
                raise self._empty()
            return result[0][:-1].reshape(y.shape), self

        plan = self.plan(group, packed.shape, packed.dtype)
        return Mapped(comm.run(plan, call.of(packed.shape, same_shape=True), packed), unpack)

    def _empty(self) -> LayoutError:
        return LayoutError.at(
            f"spmd.{self.how}",
            argument="x",
            got="blocks without entries on every worker",
            need="at least one entry",
            mend="test the size before (spmd.psum(x.size, axis_name))",
        )

    def _on_device(self, comm: Comm, group: Group, x: Any, call: Call):
        """On a device, where values are not read on the host, the shapes tell first whether there are entries."""
        shapes = yield comm.shapes(group, call)
        remaining = [n for d, n in enumerate(x.shape) if d not in self.dims]
        if not any(math.prod(s) for s in shapes) and math.prod(remaining):
            raise self._empty()
        empty = any(x.shape[d] == 0 for d in self.dims)
        y = (
            np.full_like(x, _identity(x.dtype, self.how), shape=tuple(remaining))
            if empty
            else (np.max if self.how == "max" else np.min)(x, axis=self.dims)
        )
        call = call.of(y.shape, same_shape=True)
        return (yield comm.run(self.plan(group, y.shape, y.dtype), call, contiguous(y)))

    def pull(self, g, x, ans):
        bare, top = value_of(x), value_of(ans)
        if on_device(top):  # what came from the host has been moved there
            bare = beside(np.asarray(bare), top) if not on_device(bare) else bare
            g = beside(g, top)
        elif not is_slot(bare) and not is_slot(top):
            bare, top = np.asarray(bare), np.asarray(top)
        real: Any = mean_dtype(bare.dtype) or bare.dtype  # a short number does not hold a large count
        if self.dims:
            top, g = np.expand_dims(top, self.dims), np.expand_dims(g, self.dims)
        ties = (bare == top) | ((bare != bare) & (top != top))
        count = np.sum(ties, axis=self.dims, keepdims=True) if self.dims else ties
        over_workers = self.backward(interned(Sum, self.axes))
        total = move(over_workers, count.astype(real) if hasattr(count, "astype") else np.asarray(count, real))
        return move(Vary(self.axes), g) * (ties / total)


def _identity(dtype, how: str):
    """The value that never wins the reduction."""
    if dtype.kind == "b":
        return how == "min"
    return least(dtype) if how == "max" else most(dtype)


def _marker(dtype, how: str, some: bool):
    """A number that says whether a block had entries; a block with entries wins the reduction."""
    return dtype.type(some if how == "max" else not some)


def _extremum(x, names: tuple[str, ...], how: str, frame: FrameType):
    def one(a, at):
        over = reduced_axes(a, names, f"spmd.p{how}")
        return operate(at(named(f"p{how}", Extremum, over, how)), a, frame) if over else a

    return each_leaf(one, x)


def pmax(x: Tree, axis_name: AxisName) -> Tree:
    """The largest x of the workers along axis_name, entry by entry; Invariant. An Invariant array is its own.

    Adjoint of the derivative: the cotangent, to the workers that attain it, in equal shares. Cost: one all-reduce
    forward, and one backward that counts the ties.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda x: spmd.pmax(x, "x"), P("x"), P())
        ...     f(np.array([1.0, 4.0, 3.0, 4.0]))
        ...     spmd.grad(lambda x: np.sum(f(x)))(np.array([1.0, 4.0, 3.0, 4.0]))
        PartitionedArray([3., 4.], dtype=float64, spec=P(None))
        array([0. , 0.5, 1. , 0.5])
    """
    return _extremum(x, _names(axis_name, "pmax"), "max", sys._getframe(1))


def pmin(x: Tree, axis_name: AxisName) -> Tree:
    """The smallest x of the workers along axis_name, entry by entry; see `pmax`.

    >>> with spmd.Mesh(x=2):
    ...     spmd.map(lambda x: spmd.pmin(x, "x"), P("x"), P())(np.array([1.0, 4.0, 3.0, 2.0]))
    PartitionedArray([1., 2.], dtype=float64, spec=P(None))
    """
    return _extremum(x, _names(axis_name, "pmin"), "min", sys._getframe(1))
