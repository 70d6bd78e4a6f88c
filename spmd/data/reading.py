"""Read samples by their indices: of arrays in memory, memory maps, datasets in files, and trees of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.admission import is_sliceable
from spmd.autodiff.allocation import writable
from spmd.errors import LayoutError, describe
from spmd.frontends import frontend
from spmd.transport.handles import read_only

__all__ = ["is_array", "reader_of"]


def is_array(x: Any) -> bool:
    """Whether a leaf of a batch is an array, which is cut and has a state; other leaves are passed on as they are."""
    return isinstance(x, np.ndarray) or frontend(x) is not None


def reader_of(source: Any, where: str) -> Callable[[np.ndarray], Any]:
    """The function that gives the samples of an array of indices, as arrays that nobody writes to.

    source: a function of indices, or a tree of arrays whose first dimension counts samples.
    """
    if callable(source) and not hasattr(source, "shape"):
        return lambda indices: tree.map(_kept, source(indices))
    paths, leaves, structure = tree.flatten_with_path(source)
    if not leaves:
        raise _no_array(where, "arrays_or_function", source)
    readers = [_reader(leaf, where, f"arrays_or_function{path}") for path, leaf in zip(paths, leaves, strict=True)]
    return lambda indices: tree.unflatten(structure, [read(indices) for read in readers])


def _kept(x: Any) -> Any:
    """A leaf that a function gave: its own memory, since the function may use that again for its next batch."""
    if not isinstance(x, np.ndarray):
        return x
    return read_only(np.array(x)) if writable(x) else x


def _reader(x: Any, where: str, argument: str) -> Callable[[np.ndarray], Any]:
    if getattr(x, "shape", ()) != ():
        if isinstance(x, np.ndarray):
            array = np.asarray(x)  # of a memory map too
            return lambda indices: read_only(array[indices])
        if frontend(x) is not None:
            return lambda indices: x[indices]
        if is_sliceable(x):
            return lambda indices: read_only(_gathered(x, indices))
    raise _no_array(where, argument, x)


def _gathered(x: Any, indices: np.ndarray) -> np.ndarray:
    """Samples of a dataset: each is read once, in order, neighbours together."""
    if not len(indices):
        return np.empty((0, *x.shape[1:]), x.dtype)
    ordered, inverse = np.unique(indices, return_inverse=True)
    if hasattr(x, "oindex"):  # zarr: each chunk is read once
        samples = np.asarray(x.oindex[ordered])
    else:
        ends = np.flatnonzero(np.diff(ordered) > 1)
        starts, stops = ordered[np.append(0, ends + 1)], ordered[np.append(ends, len(ordered) - 1)] + 1
        samples = np.concatenate([np.asarray(x[int(a) : int(b)]) for a, b in zip(starts, stops, strict=True)])
    return samples if np.array_equal(indices, ordered) else samples[inverse]


def _no_array(where: str, argument: str, x: Any) -> LayoutError:
    mend = {
        "PartitionedArray": "index it in the program, x[indices], or give the array from which it was made",
        "Array": "give the bare array, before the map or the gradient",
    }.get(type(x).__name__, "np.asarray(x), or a function of indices: lambda indices: read(indices)")
    return LayoutError.at(
        where,
        argument=argument,
        got=describe(x),
        need="an array whose first dimension counts samples: of NumPy, in a file with shape, dtype and slices, or a "
        "tensor; a tree of them; or a function of an array of indices",
        mend=mend,
    )
