"""NumPy's functions that make arrays, with a global array as their argument `like`: results are laid out as it is.

`np.zeros(n, like=x)` is `spmd.zeros(n, like=x)`. What is read or converted is placed after that, as by `spmd.put`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import creation
from spmd.array import PartitionedArray
from spmd.array_functions import layout_like
from spmd.autodiff.admission import is_sliceable
from spmd.errors import LayoutError, describe
from spmd.global_functions import MADE_LIKE
from spmd.global_ops.call import global_value
from spmd.global_ops.resharding import reshard
from spmd.placement import from_callback, put


def _empty(x: PartitionedArray, shape, dtype=float, order="C", *, device=None) -> PartitionedArray:
    return creation.zeros(shape, dtype, like=x)


def _ones(x: PartitionedArray, shape, dtype=None, order="C", *, device=None) -> PartitionedArray:
    return creation.ones(shape, float if dtype is None else dtype, like=x)


def _full(x: PartitionedArray, shape, fill_value, dtype=None, order="C", *, device=None) -> PartitionedArray:
    return creation.full(shape, fill_value, dtype, like=x)


def _arange(x: PartitionedArray, start, stop=None, step=1, dtype=None, *, device=None) -> PartitionedArray:
    return creation.arange(start, stop, 1 if step is None else step, dtype, like=x)


def _eye(x: PartitionedArray, N, M=None, k=0, dtype: Any = float, order="C", *, device=None) -> PartitionedArray:
    return creation.eye(N, M, k, dtype, like=x)


def _identity(x: PartitionedArray, n, dtype=None) -> PartitionedArray:
    return creation.eye(n, dtype=float if dtype is None else dtype, like=x)


def _tri(x: PartitionedArray, N, M=None, k=0, dtype: Any = float) -> PartitionedArray:
    def block(index: tuple[slice, ...]) -> np.ndarray:
        rows, cols = index
        return np.tri(rows.stop - rows.start, cols.stop - cols.start, k + rows.start - cols.start, dtype)

    shape = N, N if M is None else M
    return from_callback(shape, layout_like(x.layout, shape), block, x.mesh)


def _from_function(x: PartitionedArray, function, shape, *, dtype: Any = float, **options) -> PartitionedArray:
    def block(index: tuple[slice, ...]) -> np.ndarray:
        lengths = tuple(s.stop - s.start for s in index)
        first = [np.asarray(s.start, dtype) for s in index]
        places = [place + start for place, start in zip(np.indices(lengths, dtype), first, strict=True)]
        return np.broadcast_to(function(*places, **options), lengths)

    return from_callback(shape, layout_like(x.layout, tuple(shape)), block, x.mesh)


def _converting(fun: Any) -> Any:
    """One of np.array, np.asarray and the like."""

    def array(x: PartitionedArray, a, dtype=None, *order, copy: Any = None, **options) -> Any:
        if copy is False:
            raise LayoutError.at(
                f"np.{fun.__name__}",
                argument="copy",
                got=f"False, with like={describe(x)}",
                need="True or None: blocks are copied to the workers",
                mend="leave copy out",
            )
        if (value := global_value(a)) is not None:
            a = a if dtype is None else a.astype(dtype)
            return put(a, like=x) if value is a else reshard(a, layout_like(x.layout, value.shape))
        if is_sliceable(a) and dtype is None:
            return put(a, like=x)
        return put(fun(a, dtype, *order, **options), like=x)

    return array


def _reading(fun: Any) -> Any:
    """A function that makes an array of what is no array: of text, of files, of bytes."""
    return lambda x, *args, **options: put(fun(*args, **options), like=x)


MADE_LIKE |= {np.empty: _empty, np.zeros: _empty, np.ones: _ones, np.full: _full, np.arange: _arange, np.eye: _eye}
MADE_LIKE |= {np.identity: _identity, np.tri: _tri, np.fromfunction: _from_function}
for _fun in (np.array, np.asarray, np.asanyarray, np.ascontiguousarray, np.asfortranarray, np.require):
    MADE_LIKE[_fun] = _converting(_fun)
for _fun in (np.frombuffer, np.fromfile, np.fromiter, np.fromstring, np.genfromtxt, np.loadtxt):
    MADE_LIKE[_fun] = _reading(_fun)
