"""The inner product that respects states, and its norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.array import PartitionedArray, joined_copies, owned_on, relayout
from spmd.autodiff import tree
from spmd.autodiff.admission import admit
from spmd.autodiff.dtypes import kind_of_dtype, mean_dtype, product_dtype
from spmd.autodiff.tracer import Array
from spmd.device import seen, to_host
from spmd.errors import StateError
from spmd.frontends import Frontend, frontend
from spmd.kernels import on_device
from spmd.mesh import WORKER, Worker
from spmd.operators.apply import operate
from spmd.operators.base import named
from spmd.operators.reduce import dtype_of, in_dtype
from spmd.operators.root import Rooted
from spmd.operators.sums import Sum
from spmd.ownership import Frozen
from spmd.placement import put
from spmd.state import REPLICAS, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.call import Call

__all__ = ["inner", "norm"]


@api_boundary
def inner(x: Any, y: Any) -> Any:
    """<x, y> = sum(conj(x) * y) over the entries of global arrays. x, y: arrays, or pytrees of one structure.

    Invariant values count once, Varying ones are summed over the workers, Rooted ones count at the root.
    In a body the result is Invariant and differentiable; outside it is a number. Products of integers are computed and
    added in float64, those of short floating-point dtypes (float16, bfloat16, float8) in float32. Cost: one all-reduce
    of a number for each set of axes. Raises StateError where x and y do not fit each other.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda w, x: (spmd.inner(w, w), spmd.inner(x, x)), (P(), P("x")), P())
        ...     [value.item() for value in f(np.ones(3), np.ones(4))]
        [3.0, 4.0]
    """
    total, dtype = _wide_inner("inner", x, y)
    return total if dtype is None else in_dtype(total, dtype)


def _wide_inner(function: str, x, y) -> tuple[Any, np.dtype | None]:
    """The inner product in the dtype of the sum, and the shorter dtype to round it to, if any. function: the caller."""
    (xs, structure), ys = tree.flatten(x), tree.leaves(y)
    if len(xs) != len(ys):
        raise StateError.at(
            "spmd.inner",
            argument="y",
            got=f"{len(ys)} arrays for {len(xs)}",
            need="pytrees of one structure",
            mend="pair every array with its counterpart",
        )
    total = 0.0
    by_state: dict[Any, Any] = {}
    for a, b in zip(map(_operand, xs), map(_operand, ys), strict=True):
        if WORKER.get() is None:
            total = total + _inner_outside(a, b)
            continue
        key, value = _inner_here(a, b)
        by_state[key] = by_state[key] + value if key in by_state else value
    for axes, value in by_state.items():
        total = total + (operate(named(function, Sum, axes).over(structure)[-1], value) if axes else value)
    return total, _short_dtype(xs, ys)


def _short_dtype(xs: list[Any], ys: list[Any]) -> np.dtype | None:
    """The short dtype that all operands have; None if there is none. NumPy's and torch's numbers adapt to it."""
    dtypes = {dtype_of(a.block if type(a) is Rooted else a) for a in (*xs, *ys)}
    (dtype, *more) = dtypes or (None,)
    others = xs and frontend(xs[0].block if type(xs[0]) is Rooted else xs[0]) is not None
    return dtype if not more and dtype is not None and (others and _is_short(dtype) or dtype == np.float16) else None


def _is_short(dtype: np.dtype) -> bool:
    return kind_of_dtype(dtype) == "f" and mean_dtype(dtype) is not None


def _wide(x: Any) -> Any:
    """A factor in the dtype in which products are computed and added."""
    dtype = dtype_of(x)
    wide = None if dtype is None else product_dtype(dtype)
    return x if wide is None else in_dtype(x, wide)


def _operand(x: Any) -> Any:
    is_operand = type(x) is Rooted or isinstance(x, int | float | complex) or on_device(x) or frontend(x) is not None
    return x if is_operand else np.asarray(x) if type(x) is Frozen else admit(x, "spmd.inner")


def _inner_here(a, b) -> tuple[tuple[str, ...], Any]:
    """This worker's part of an inner product, and the axes to sum it over."""
    worker = WORKER.get()
    assert worker is not None
    axes = tuple(worker.mesh.axes)
    other = frontend(a.block if type(a) is Rooted else a)
    if other is not None:
        return _inner_of_others(a, b, axes, other, worker)
    if type(a) is Rooted and type(b) is Rooted and (a.axes, a.root) == (b.axes, b.root):
        token = REPLICAS.set(False)  # one worker of a group adds the value, the others zero
        try:
            value_at_root = np.sum(np.conj(_wide(a.block)) * _wide(b.block))
        finally:
            REPLICAS.reset(token)
        if type(value_at_root) is not Array or value_at_root.state is None:
            return axes, value_at_root
        state = value_at_root.state | state_of(a.axes)
        share = Array(value_at_root.value, state, value_at_root.tape, value_at_root.node)
        return tuple(n for n in axes if n in state.varying), share
    value = np.sum(np.conj(_wide(a)) * _wide(b))
    if type(value) is Array:
        return tuple(n for n in axes if n in value.state.varying), value
    return (() if worker.tracked else axes), value


def _inner_of_others(a, b, axes: tuple[str, ...], other: Frontend, worker: Worker) -> tuple[tuple[str, ...], Any]:
    """The same for arrays of another library."""
    if type(a) is Rooted and a.is_held_as(b):
        x, y, rooted = a.block, b.block, state_of(a.axes)
    else:
        x, y, rooted = a, b, state_of(())
    products = _wide(x).conj() * _wide(y)
    total = other.total(products, tuple(range(products.ndim)))
    if not worker.tracked:
        return axes, total
    state = other.state(total) | rooted
    return tuple(n for n in axes if n in state.varying), other.carrying(total, state, True)


def _inner_outside(a, b):
    if isinstance(a, Array) or isinstance(b, Array):  # traced: the product of global arrays is recorded
        return to_host(np.vdot(_wide(a), _wide(b)))[()]
    if type(a) is not PartitionedArray:
        a, b = (a, b) if type(b) is not PartitionedArray else (put(a, b.spec, b.mesh), b)
    if type(a) is not PartitionedArray:
        return to_host(np.vdot(_wide(a), _wide(b)))[()]
    if type(b) is not PartitionedArray:
        b = put(b, a.spec, a.mesh)
    a = _wide(a.reduced)
    b = _wide(relayout(b, a.layout))
    axes, dtype = tuple(a.mesh.axes), np.result_type(a.dtype, b.dtype)

    def body(worker: Worker):
        w, block_of = worker.index, worker.comm.given
        product: Any = np.vdot(block_of(a.blocks[w]), block_of(b.blocks[w])) if a.layout.owners[w] == w else 0
        # On a mesh of GPUs the zeros of other owners must be on the device too.
        part = owned_on(worker.mesh, np.asarray(product, dtype), w) if seen(product) else product.astype(dtype)
        if worker.program is not None:  # which records operators
            return operate(named("inner", Sum, axes), Array(part, state_of(axes))).value
        call = Call("inner", axes, part.dtype, part.shape, same_shape=True)
        return worker.comm.all_reduce(worker.group(axes), call, part).wait()

    return to_host(joined_copies(a.mesh.run(body, one_line=True).results))[()]


@api_boundary
def norm(x: Any) -> Any:
    """The 2-norm of `inner`: sqrt(<x, x>), real.

    >>> with spmd.Mesh(x=2):
    ...     spmd.map(lambda x: spmd.norm({"a": x, "b": 2 * x}), P("x"), P())(np.array([1.0, 2.0]))
    PartitionedArray(5., dtype=float64, spec=P())
    """
    square, dtype = _wide_inner("norm", x, x)
    root: Any = np.sqrt(np.real(square)) if frontend(square) is None else square.real.sqrt()
    return root if dtype is None else in_dtype(root, dtype)
