"""Global arrays that are made block by block: no worker makes, or holds, more than its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.errors import SpecError
from spmd.layout import P, Spec
from spmd.mesh import Mesh
from spmd.placement import checked_layout, made, mesh_for, placed
from spmd.tracebacks import api_boundary

__all__ = ["arange", "eye", "full", "linspace", "ones", "zeros"]

_Shape = int | Sequence[int]
_Index = tuple[slice, ...]


def _shape(shape: _Shape) -> tuple[int, ...]:
    return (int(shape),) if np.ndim(shape) == 0 else tuple(map(int, shape))  # type: ignore[arg-type]


def _made(
    where: str,
    shape: tuple[int, ...],
    block: Callable[[_Index], np.ndarray],
    spec: Spec | None,
    mesh: Mesh | None,
    like: Any,
) -> PartitionedArray:
    """The array of which block(index) is the block at an index."""
    spec, mesh = placed(where, shape, spec, mesh, like)
    mesh = mesh_for(mesh, where)
    layout = checked_layout(where, shape, P() if spec is None else spec, mesh)
    return made(where, "shape", layout, mesh, block, "lengths that are integers")


def _by_name(where: str, **arguments: Any) -> None:
    """Raise for a spec among arguments that are given by position."""
    for name, value in arguments.items():
        if isinstance(value, Spec):
            raise SpecError.at(
                where,
                argument=name,
                got=str(value),
                need="the spec by its name: arguments by position are those of NumPy",
                mend=f"spec={value}",
            )


def _lengths(index: _Index) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in index)


@api_boundary
def zeros(
    shape: _Shape, dtype: Any = float, *, spec: Spec | None = None, mesh: Mesh | None = None, like: Any = None
) -> PartitionedArray:
    """A global array of zeros, made block by block. As `np.zeros`.

    spec: how to split it; by default each worker has a copy. mesh: by default that of the enclosing `with mesh:`.
    like: in place of spec and mesh, a global array on whose mesh, and split as which, the result lies; as that of
    `np.zeros` it says nothing of shape and dtype (`np.zeros_like` takes them too). An array of the same shape lies in
    the same blocks. In another, each dimension is split by the axes that split it in `like`, counted from the first.

    Raises SpecError for a spec that does not fit, or beside like; LayoutError if like is no global array.

        >>> with spmd.Mesh(x=4):
        ...     u = spmd.zeros((10, 3), spec=P("x"))
        ...     v = spmd.zeros(10, like=u)
        >>> v.spec, [block.shape for block in u.blocks.values()]
        (P('x'), [(3, 3), (3, 3), (2, 3), (2, 3)])
    """
    _by_name("spmd.zeros", dtype=dtype)
    return _made("spmd.zeros", _shape(shape), lambda index: np.zeros(_lengths(index), dtype), spec, mesh, like)


@api_boundary
def ones(
    shape: _Shape, dtype: Any = float, *, spec: Spec | None = None, mesh: Mesh | None = None, like: Any = None
) -> PartitionedArray:
    """A global array of ones; see `zeros`.

    >>> with spmd.Mesh(x=2):
    ...     x = spmd.ones((3, 2), spec=P("x"))
    >>> x
    PartitionedArray([[1., 1.],
                      [1., 1.],
                      [1., 1.]], dtype=float64, spec=P('x', None))
    """
    _by_name("spmd.ones", dtype=dtype)
    return _made("spmd.ones", _shape(shape), lambda index: np.ones(_lengths(index), dtype), spec, mesh, like)


@api_boundary
def full(
    shape: _Shape,
    fill_value: Any,
    dtype: Any = None,
    *,
    spec: Spec | None = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> PartitionedArray:
    """A global array of one number, or of values that broadcast; see `zeros`.

    >>> with spmd.Mesh(x=2):
    ...     x = spmd.full((2, 3), [1, 2, 3], spec=P("x"))
    >>> x
    PartitionedArray([[1, 2, 3],
                      [1, 2, 3]], dtype=int64, spec=P('x', None))
    """
    _by_name("spmd.full", fill_value=fill_value, dtype=dtype)
    lengths = _shape(shape)
    values = np.broadcast_to(fill_value, lengths)
    return _made("spmd.full", lengths, lambda index: np.full(_lengths(index), values[index], dtype), spec, mesh, like)


@api_boundary
def arange(
    start: Any,
    stop: Any = None,
    step: Any = 1,
    dtype: Any = None,
    *,
    spec: Spec | None = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> PartitionedArray:
    """start, start + step, ... before stop, as a global array; see `zeros`. As `np.arange`, with the same bits.

    >>> with spmd.Mesh(x=2):
    ...     x = spmd.arange(0, 10, 2, spec=P("x"))
    >>> x
    PartitionedArray([0, 2, 4, 6, 8], dtype=int64, spec=P('x'))
    """
    _by_name("spmd.arange", stop=stop, step=step, dtype=dtype)
    start, stop = (0, start) if stop is None else (start, stop)
    n = max(0, math.ceil((stop - start) / step))
    dtype = np.arange(start, start + 0 * stop, step, dtype=dtype).dtype
    first = np.asarray(start).astype(dtype)
    apart = np.asarray(start + step).astype(dtype) - first

    def block(index: _Index) -> np.ndarray:
        (s,) = index
        return (first + np.arange(s.start, s.stop).astype(dtype) * apart).astype(dtype)

    return _made("spmd.arange", (n,), block, spec, mesh, like)


@api_boundary
def linspace(
    start: Any,
    stop: Any,
    num: int = 50,
    endpoint: bool = True,
    *,
    dtype: Any = None,
    spec: Spec | None = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> PartitionedArray:
    """`num` numbers from start to stop, evenly apart, as a global array; see `zeros`. As `np.linspace`.

    >>> with spmd.Mesh(x=2):
    ...     x = spmd.linspace(0.0, 1.0, 5, spec=P("x"))
    >>> x
    PartitionedArray([0.  , 0.25, 0.5 , 0.75, 1.  ], dtype=float64, spec=P('x'))
    """
    _by_name("spmd.linspace", num=num, endpoint=endpoint)
    intervals = max(1, num - 1 if endpoint else num)
    apart = (stop - start) / intervals
    kind = np.linspace(start, stop, 0, dtype=dtype).dtype

    def block(index: _Index) -> np.ndarray:
        (s,) = index
        values = np.arange(s.start, s.stop) * apart + start
        if endpoint and num > 1 and s.start < s.stop == num:
            values[-1] = stop
        return (np.floor(values) if kind.kind in "iu" else values).astype(kind)

    return _made("spmd.linspace", (num,), block, spec, mesh, like)


@api_boundary
def eye(
    n_rows: int,
    n_cols: int | None = None,
    k: int = 0,
    dtype: Any = float,
    *,
    spec: Spec | None = None,
    mesh: Mesh | None = None,
    like: Any = None,
) -> PartitionedArray:
    """Ones on the k-th diagonal, as a global array; see `zeros`. As `np.eye`.

    >>> with spmd.Mesh(x=2):
    ...     a = spmd.eye(3, spec=P("x"))
    >>> a
    PartitionedArray([[1., 0., 0.],
                      [0., 1., 0.],
                      [0., 0., 1.]], dtype=float64, spec=P('x', None))
    """
    _by_name("spmd.eye", n_cols=n_cols, k=k, dtype=dtype)

    def block(index: _Index) -> np.ndarray:
        rows, cols = index
        return np.eye(rows.stop - rows.start, cols.stop - cols.start, k + rows.start - cols.start, dtype)

    return _made("spmd.eye", (n_rows, n_rows if n_cols is None else n_cols), block, spec, mesh, like)
