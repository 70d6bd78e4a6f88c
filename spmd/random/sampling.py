"""Random choices: categories, permutations, samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np

from spmd import kernels
from spmd.array import PartitionedArray
from spmd.autodiff.static_array import AnyArray
from spmd.errors import LayoutError, SpecError, describe
from spmd.global_ops.call import global_value
from spmd.global_ops.resharding import reshard
from spmd.layout import P
from spmd.mesh import WORKER
from spmd.placement import put
from spmd.random.arguments import Shape, as_array, checked_float, checked_shape
from spmd.random.distributions import gumbel, randint, uniform
from spmd.random.drawing import Place, draw
from spmd.random.layouts import layout_of_block
from spmd.tracebacks import api_boundary

__all__ = ["categorical", "choice", "permutation"]

Rows = TypeVar("Rows", bound=AnyArray)


@overload
def categorical(key: Any, logits: PartitionedArray, axis: int = ..., *, spec: P | None = ...) -> PartitionedArray: ...


@overload
def categorical(key: Any, logits: Any, axis: int = ..., *, spec: P) -> PartitionedArray: ...


@overload
def categorical(key: Any, logits: Any, axis: int = ..., *, spec: None = ...) -> AnyArray: ...


@api_boundary
def categorical(key: Any, logits: Any, axis: int = -1, *, spec: P | None = None) -> Any:
    """A class for each row, with probabilities softmax(logits) along an axis, by the Gumbel-max method.

    spec: in a body, the split of the whole logits; the axis must be whole. Outside of bodies, how to lay logits out;
    those that are global are used as they lie, and each worker draws for its own block.

        >>> logits = np.array([[-1e9, 0.0, -1e9], [0.0, -1e9, 0.0]])
        >>> with spmd.Mesh(x=2):
        ...     spmd.random.categorical(spmd.random.key(0), spmd.put(logits, P("x")))
        PartitionedArray([1, 0], dtype=int64, spec=P('x'))
    """
    where = "spmd.random.categorical"
    logits = as_array(where, "logits", logits)
    ndim = len(getattr(logits, "shape", ()))
    if not ndim or not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim or not logits.shape[axis]:
        raise SpecError.at(
            where,
            argument="logits and axis" if ndim else "logits",
            got=f"{describe(logits)}, axis={axis!r}",
            need="an array, and that of its axes which counts the classes, of which there is one at least",
            mend="axis=-1",
        )
    if spec is not None and WORKER.get() is None:
        logits = put(logits, spec) if global_value(logits) is None else reshard(logits, spec)
    layout = layout_of_block(where, logits, spec)
    dims = layout.spec.dims if layout is not None and WORKER.get() is not None else ()
    if dims and dims[axis]:
        raise LayoutError.at(
            where,
            argument="spec",
            got=f"{spec}, which splits the classes",
            need="whole rows of classes",
            mend="spmd.all_gather(logits, axis_name, axis=..., tiled=True) first",
        )
    shape = logits.shape if layout is None else layout.shape
    noise = gumbel(key, shape, checked_float(where, logits.dtype), spec=layout)
    return np.argmax(logits + noise, axis=axis)


@overload
def permutation(key: Any, x: Rows) -> Rows: ...


@overload
def permutation(key: Any, x: int | Sequence[Any]) -> AnyArray: ...


@api_boundary
def permutation(key: Any, x: Any) -> Any:
    """The integers 0 to x - 1, or the rows of an array, in random order. Whole on every worker.

    >>> spmd.random.permutation(spmd.random.key(0), 5)
    array([3, 4, 2, 1, 0])
    """
    n, x = _count_and_rows("spmd.random.permutation", "x", x)
    indices = _random_order(key, n)
    return indices if x is None else x[indices]


def _count_and_rows(where: str, argument: str, x: Any) -> tuple[int, Any]:
    """The number of items to choose from, given as a number or as the rows of an array; and the array."""
    x = as_array(where, argument, x)
    if isinstance(x, int | np.integer) and not isinstance(x, bool) and 0 <= x < 1 << 62:
        return int(x), None
    rows: Any = x
    if getattr(rows, "shape", ()):
        return rows.shape[0], rows
    raise SpecError.at(
        where,
        argument=argument,
        got=describe(x),
        need="how many numbers, an integer from 0, or an array with rows",
        mend=f"{where.rpartition('.')[2]}(key, len(x)) for places in x",
    )


def _random_order(key, n: int):
    """A random order of n items: that of sorted random words."""
    where = "spmd.random.permutation"
    sort = lambda words: words.argsort(kind="stable") if not kernels.on_device(words) else words.argsort()
    return draw(where, key, "random_bits", np.dtype(np.uint64), Place((n,)), transform=sort)


@overload
def choice(key: Any, a: Rows, shape: Shape = ..., replace: bool = ..., p: Any = ...) -> Rows: ...


@overload
def choice(key: Any, a: int | Sequence[Any], shape: Shape = ..., replace: bool = ..., p: Any = ...) -> AnyArray: ...


@api_boundary
def choice(key: Any, a: Any, shape: Shape = (), replace: bool = True, p: Any = None) -> Any:
    """Random rows of an array, or integers below an int. p: probabilities, equal by default. Whole on every worker.
    Raises SpecError for fewer items than are drawn without replacement.

        >>> spmd.random.choice(spmd.random.key(0), 5, (3,), replace=False)
        array([3, 4, 2])
    """
    where, shape = "spmd.random.choice", checked_shape("spmd.random.choice", shape)
    (n, rows), count = _count_and_rows(where, "a", a), math.prod(shape)
    p = as_array(where, "p", p)
    if n < 1 or not replace and count > n or p is not None and np.shape(p) != (n,):
        raise SpecError.at(
            where,
            argument="a" if p is None or np.shape(p) == (n,) else "p",
            got=f"{count} of {n} items, replace={replace}" + ("" if p is None else f", p: {describe(p)}"),
            need="items to choose from, as many without replacement, and a probability for each",
            mend="replace=True, or a smaller shape",
        )
    if type(p) is np.ndarray and not (
        p.dtype.kind in "biuf"
        and np.all(p >= 0)
        and np.isfinite(p).all()
        and (p > 0).sum() >= (count if not replace else 1)
    ):
        raise SpecError.at(
            where,
            argument="p",
            got=f"{p}",
            need="a probability for each item, and enough items that have one above 0",
            mend="p=None for equal ones; replace=True",
        )
    if p is not None and replace:
        cumulative = np.cumsum(p)
        indices = np.searchsorted(cumulative, uniform(key, shape) * cumulative[-1], side="right")
    elif p is not None:
        logs = np.where(p > 0, np.log(np.where(p > 0, p, 1)), -np.inf)
        indices = np.argsort(-(logs + gumbel(key, (n,))))[:count].reshape(shape)
    elif replace:
        indices = randint(key, shape, 0, n)
    else:
        indices = _random_order(key, n)[:count].reshape(shape)
    return indices if rows is None else rows[indices]
