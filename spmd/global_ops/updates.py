"""`x.at[i].set(v)` and its kin, of global arrays: each block is changed where the index meets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.array import check_usable
from spmd.autodiff.indexing import At, at
from spmd.errors import LayoutError, describe
from spmd.global_ops.call import as_spec, global_of, global_value, is_array, layout_by, on_blocks
from spmd.global_ops.elementwise import elementwise
from spmd.global_ops.indexing import as_slices, basic_keys, local_index
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout import Layout, P
from spmd.layout_rules import Rule
from spmd.map_arguments import move_to_layout
from spmd.mesh import WORKER
from spmd.operators.varying import varying

__all__ = ["changed"]


@implements(At, rule=Rule.KEPT)
def changed(x: Any, index: Any, how: str, v: Any) -> Any:
    """x.at[index].set(v), or another method of that name: laid out as x."""
    value = global_value(x)
    if value is None:
        raise LayoutError.at(
            f"x.at[i].{how}",
            argument="x",
            got=describe(x),
            need="a global array, if v or the index is one",
            mend="spmd.put(x, P()).at[i]",
        )
    check_usable(f"x.at[{index!r}].{how}", value)
    if isinstance(v, list | tuple):
        v = np.asarray(v)
    mask: Any = index if global_value(index) is None else global_value(index)
    is_mask = getattr(mask, "dtype", None) == np.bool_ and mask.shape == value.shape
    if is_mask and (how == "apply" or not np.ndim(v)):
        return elementwise(_masked, (x, index, how, v), {})
    keys = basic_keys(index, value)
    if keys is None or any(isinstance(k, tuple) and k[2] < 0 for k in keys):
        return _of_whole(x, index, how, v)
    spec = as_spec(x)
    operands, specs, static = [x], [spec], v
    if is_array(v):
        operands, specs, static = [x, v], [spec, P()], None
    static = (tuple(keys), layout_by(spec, value), how, static)
    return on_blocks(f"x.at[i].{how}", _changing, static, operands, specs, spec, value.mesh)


def _changing(keys: tuple[Any, ...], layout: Layout, how: str, static: Any) -> Callable[..., Any]:
    lengths = [1 if k is None else len(range(*k)) for k in keys if k is None or isinstance(k, tuple)]
    items = tuple(d for d, k in enumerate(keys) if isinstance(k, int))

    def body(x: Any, *values: Any) -> Any:
        worker = WORKER.get()
        assert worker is not None
        box = layout.boxes[worker.index]
        v = static
        if values:
            # All workers do the same to it, also those that need nothing of it: its gradient is a sum over them.
            v = varying(values[0], layout.spec.axes) if layout.spec.axes else values[0]
            v = np.expand_dims(np.broadcast_to(v, lengths), items)[_parts(keys, box)]
        return getattr(at(x)[local_index(as_slices(keys), box)], how)(v)

    return body


def _parts(keys: Sequence[Any], box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """The part of the entries of an index that lies in a box."""
    parts, d = [], 0
    for k in as_slices(keys):
        if k is None:
            parts.append(slice(None))
            continue
        (start, stop), d = box[d], d + 1
        first, last, step = k
        before = len(range(first, min(start, last), step))
        parts.append(slice(before, before + len(range(first + before * step, min(stop, last), step))))
    return tuple(parts)


_OF_ENTRIES: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda x, v: v,
    "add": lambda x, v: x + v,
    "subtract": lambda x, v: x - v,
    "multiply": lambda x, v: x * v,
    "divide": lambda x, v: x / v,
    "power": lambda x, v: x**v,
    "min": np.minimum,
    "max": np.maximum,
    "apply": lambda x, f: f(x),
}


def _masked(x: Any, mask: Any, how: str, v: Any) -> Any:
    return np.where(mask, _OF_ENTRIES[how](x, v), x).astype(x.dtype)


_masked.__name__, _masked.__module__ = "x.at[mask]", ""


def _of_whole(x: Any, index: Any, how: str, v: Any) -> Any:
    value = global_of(x)
    result = whole(_change, (x, index, how, v), {})
    return move_to_layout(result, value.mesh.layout(value.shape, P()), value.layout, value.mesh)


def _change(x: Any, index: Any, how: str, v: Any) -> Any:
    return getattr(at(x)[index], how)(v)


_change.__name__, _change.__module__ = "x.at[i]", ""
