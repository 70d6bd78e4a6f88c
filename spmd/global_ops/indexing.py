"""Items and parts of global arrays. A part stays on the workers that hold it; an item comes to all of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray, check_usable
from spmd.errors import DtypeError, describe
from spmd.global_ops.along import moved_spec
from spmd.global_ops.call import as_spec, global_of, global_value, layout_by, names_of, on_blocks, spec_of
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout import Layout, P
from spmd.layout_rules import Rule
from spmd.map_arguments import copied_to_all
from spmd.mesh import WORKER
from spmd.operators.reduce import psum
from spmd.operators.splitting import normal_axis

__all__ = ["as_slices", "basic_keys", "item", "local_index"]


def _expanded(index: Any, ndim: int) -> list[Any]:
    """The index with one entry per dimension, and None for each new one."""
    entries = list(index) if isinstance(index, tuple) else [index]
    used = sum(_dims_used(e) for e in entries)
    if used > ndim:
        raise IndexError(f"too many indices: {used} for an array of {ndim} dimensions")
    at = next((k for k, e in enumerate(entries) if e is Ellipsis), len(entries))
    rest = entries[at + 1 :]
    if any(e is Ellipsis for e in rest):
        raise IndexError("an index can only have a single ellipsis ('...')")
    return [*entries[:at], *[slice(None)] * (ndim - used), *rest]


def _dims_used(entry: Any) -> int:
    if entry is None or entry is Ellipsis:
        return 0
    dtype = getattr(entry, "dtype", None)
    if isinstance(entry, bool | np.bool_):
        return 0
    return len(entry.shape) if dtype is not None and dtype.kind == "b" else 1


def _is_integer(entry: Any) -> bool:
    return isinstance(entry, int | np.integer) and not isinstance(entry, bool)


def _as_array(entry: Any) -> Any:
    """An entry of an index: lists and truth values as arrays."""
    if isinstance(entry, bool):
        return np.asarray(entry)
    return np.asarray(entry, None if entry else np.intp) if isinstance(entry, list) else entry


def _entries(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@implements(operator.getitem, rule=Rule.INDEXED)
def item(x: Any, index: Any) -> Any:
    """x[index]."""
    if global_value(x) is None:  # the index is global
        x = copied_to_all(x, next(v for v in map(global_value, _entries(index)) if v is not None).mesh)
    value = global_of(x)
    check_usable(f"x[{index!r}]", value)
    index = tuple(map(_as_array, index)) if isinstance(index, tuple) else _as_array(index)
    if any(getattr(e, "dtype", None) == np.bool_ and not np.ndim(e) for e in _entries(index)):
        return _of_whole(x, index)
    if global_value(index) is not None or getattr(index, "dtype", np.dtype(int)).kind == "b":
        return _masked(x, index)
    keys, entries = basic_keys(index, value), _expanded(index, value.ndim)
    return _advanced(x, entries) if keys is None else _basic(x, keys, entries)


@implements(np.take, rule=Rule.INDEXED)
def take(a: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise") -> Any:
    """The indices go to all workers."""
    if mode != "raise" or global_value(a) is None:
        return whole(np.take, (a, indices), {"axis": axis, "mode": mode})
    indices = indices if hasattr(indices, "dtype") else np.asarray(indices, None if np.size(indices) else np.intp)
    if indices.dtype.kind not in "iu":
        raise DtypeError.at(
            "np.take", argument="indices", got=describe(indices), need="integers", mend="x[mask], or np.nonzero(mask)"
        )
    index = indices if np.ndim(indices) else int(indices)
    a, d = (np.ravel(a), 0) if axis is None else (a, normal_axis("np.take", "axis", axis, len(a.shape)))
    return item(a, (*[slice(None)] * d, index))


def basic_keys(index: Any, value: PartitionedArray) -> list[Any] | None:
    """An index of integers, slices and new dimensions, as one of integers that are not negative, of (start, stop, step)
    and of None; None for any other."""
    if global_value(index) is not None or getattr(index, "ndim", 0) or isinstance(index, list):
        return None
    entries = _expanded(index, value.ndim)
    if not all(e is None or isinstance(e, slice) or _is_integer(e) for e in entries):
        return None
    d, keys = 0, []
    for e in entries:
        if e is None:
            keys.append(None)
            continue
        n = value.shape[d]
        if isinstance(e, slice):
            keys.append(e.indices(n))
        else:
            k = operator.index(e)
            if not -n <= k < n:
                raise IndexError(f"index {k} is out of bounds for dimension {d} of length {n}")
            keys.append(k % n)
        d += 1
    return keys


def _basic(x: Any, keys: Sequence[Any], entries: Sequence[Any]) -> Any:
    value = global_of(x)
    spec, own = as_spec(x), [k for k in keys if k is not None]
    back = [d for d, k in enumerate(own) if isinstance(k, tuple) and k[2] < 0]
    if any(names_of(spec, value.ndim)[d] for d in back):
        spec = moved_spec(spec, value.shape, back)
        if spec is None:
            return _of_whole(x, tuple(entries))
    layout, split = layout_by(spec, value), iter(names_of(spec, value.ndim))
    of_keys = [() if k is None else next(split) for k in keys]
    kept = [names for k, names in zip(keys, of_keys, strict=True) if not isinstance(k, int)]
    return on_blocks("x[i]", _items, (tuple(keys), layout), [x], [spec], spec_of(kept), value.mesh)


def _items(keys: tuple[Any, ...], layout: Layout) -> Callable[..., Any]:
    own = [k for k in keys if k is not None]
    split = layout.spec.dims
    chosen = tuple(n for d, k in enumerate(own) if not isinstance(k, tuple) for n in split[d])
    items = [d for d, k in enumerate(keys) if isinstance(k, int)]

    def body(x: Any) -> Any:
        worker = WORKER.get()
        assert worker is not None
        box = layout.boxes[worker.index]
        if not chosen:
            return x[local_index(keys, box)]
        # All workers do the same, also those that have nothing of it: its derivatives are sums over them.
        part = x[local_index(as_slices(keys), box)]
        for d in reversed(items):
            shape = (*part.shape[:d], 1, *part.shape[d + 1 :])
            after = np.full_like(part, _nothing(x.dtype), shape=shape)
            part = np.concatenate([part, after], axis=d)[(slice(None),) * d + (0,)]
        if x.dtype.kind == "b":
            return psum(part.astype(np.uint8), chosen).astype(np.bool_)
        return psum(part, chosen)

    return body


def _nothing(dtype: np.dtype) -> Any:
    """What is added to an entry without changing it: -0.0, which also leaves -0.0 as it is."""
    return -0.0 if dtype.kind == "f" else complex(-0.0, -0.0) if dtype.kind == "c" else 0


def as_slices(keys: Sequence[Any]) -> list[Any]:
    """Keys with slices of length 1 for items."""
    return [(k, k + 1, 1) if isinstance(k, int) else k for k in keys]


def local_index(keys: Sequence[Any], box: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
    """The index into a block of the entries that an index into the array names. Items are of whole dimensions."""
    local, d = [], 0
    for k in keys:
        if k is None:
            local.append(None)
            continue
        (start, stop), d = box[d], d + 1
        local.append(_local_slice(k, start, stop) if isinstance(k, tuple) else k)
    return tuple(local)


def _local_slice(k: tuple[int, int, int], start: int, stop: int) -> slice:
    first, last, step = k
    if step < 0:  # of a dimension that is whole
        return slice(first, last if last >= 0 else None, step)
    begin = first if first >= start else first + -(-(start - first) // step) * step
    end = min(last, stop)
    return slice(begin - start, max(end, begin) - start, step) if begin < stop else slice(0, 0)


def _of_whole(x: Any, index: Any) -> Any:
    return whole(_item, (x, index), {})


def _item(x: Any, index: Any) -> Any:
    return x[index]


_item.__name__, _item.__module__ = "x[i]", ""


def _advanced(x: Any, entries: Sequence[Any]) -> Any:
    """One array of integers, and slices that take all: a take along a dimension, by indices that all workers have. Else
    of the whole."""
    value = global_of(x)
    arrays = [k for k, e in enumerate(entries) if not (e is None or isinstance(e, slice) or _is_integer(e))]
    plain = all(isinstance(e, slice) and e == slice(None) for k, e in enumerate(entries) if k not in arrays)
    if len(arrays) == 1 and plain:
        (d,) = arrays
        indices = entries[d] if hasattr(entries[d], "dtype") else np.asarray(entries[d])
        spec = moved_spec(as_spec(x), value.shape, (d,))
        if spec is not None and indices.dtype.kind in "iu":
            names = names_of(spec, value.ndim)
            out = spec_of([*names[:d], *[()] * indices.ndim, *names[d + 1 :]])
            return on_blocks("x[i]", _take_along, (d,), [x, indices], [spec, P()], out, value.mesh)
    return _of_whole(x, tuple(entries))


def _take_along(d: int) -> Callable[..., Any]:
    return lambda x, indices: x[(slice(None),) * d + (indices,)]


@implements(np.take_along_axis, rule=Rule.ALONG)
def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> Any:
    """Each line by itself: what splits other dimensions of the array splits those of the indices."""
    value, shape = global_value(arr), np.shape(indices)
    if value is None or axis is None or len(shape) != value.ndim:
        return whole(np.take_along_axis, (arr, indices), {"axis": axis})
    d = normal_axis("np.take_along_axis", "axis", axis, value.ndim)
    spec = moved_spec(as_spec(arr), value.shape, (d,))
    if spec is None or shape[:d] + shape[d + 1 :] != value.shape[:d] + value.shape[d + 1 :]:
        return whole(np.take_along_axis, (arr, indices), {"axis": axis})
    if isinstance(spec, Layout):
        like: Any = Layout(shape, spec.spec, spec.axes, [None if e == d else cut for e, cut in enumerate(spec.cuts)])
    else:
        like = spec
    return on_blocks("np.take_along_axis", _taking_along, (d,), [arr, indices], [spec, like], like, value.mesh)


def _taking_along(d: int) -> Callable[..., Any]:
    return lambda x, indices: np.take_along_axis(x, indices, d)


def _masked(x: Any, mask: Any) -> Any:
    """The entries (rows) where a mask is true, in order: a result in uneven blocks."""
    value = global_of(x)
    if getattr(mask, "dtype", None) is None or mask.dtype.kind != "b":
        return _advanced(x, _expanded(mask, value.ndim))
    covered = value.shape[: mask.ndim]
    fits = len(covered) == mask.ndim and all(m in (0, n) for m, n in zip(mask.shape, covered, strict=True))
    if fits and 0 in mask.shape:
        return np.reshape(x[(slice(0),) * mask.ndim], (0, *value.shape[mask.ndim :]))  # no entry, as in NumPy
    if mask.shape != covered or not mask.ndim:
        raise IndexError(f"a mask of shape {mask.shape} for an array of shape {value.shape}")
    spec = moved_spec(as_spec(x), value.shape, range(1, mask.ndim)) if mask.ndim > 1 else as_spec(x)
    assert spec is not None
    names = names_of(spec, value.ndim)
    mask_spec: Any = spec_of(names[:1])
    if isinstance(spec, Layout):
        mask_spec = Layout(mask.shape, mask_spec, spec.axes, spec.cuts[: mask.ndim])
    out = spec_of([names[0], *names[mask.ndim :]])
    return on_blocks("x[mask]", _masking, (), [x, mask], [spec, mask_spec], out, value.mesh)


def _masking() -> Callable[..., Any]:
    return lambda x, mask: x[mask]
