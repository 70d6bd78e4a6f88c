"""Creation functions that take traced values: np.array, np.full, np.arange and the like."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np

from spmd.autodiff.apply import wrap
from spmd.autodiff.primitive import overrides
from spmd.autodiff.tracer import Array, find, value_of
from spmd.errors import StateError, TracedConversionError, describe, message

__all__ = ["create"]


def override(fun: Callable) -> Callable[[Callable], Callable]:
    """Declare what a function of NumPy does if an Array is among its arguments."""

    def declare(f):
        @functools.wraps(fun)
        def call(*args, **kwargs):
            return f(*args, **kwargs) if find((args, kwargs), []) else fun(*args, **kwargs)

        overrides[fun.__name__] = call
        return call

    return declare


def _assemble(tree, like_array):
    """One array of an Array, of nested lists that hold Arrays, or of bare data as an array of `like_array`'s module."""
    if type(tree) is Array or not find(tree, []):
        x = tree if hasattr(tree, "dtype") else _create_like(like_array, np.asarray, tree)
    elif isinstance(tree, list | tuple):
        parts = [_assemble(t, like_array) for t in tree]
        shapes = {p.shape for p in parts}
        if len(shapes) > 1:
            raise ValueError(f"np.array needs entries of one shape, and has {', '.join(map(str, sorted(shapes)))}")
        x = np.stack(parts)
    else:
        x = np.asarray(tree)
    if x.dtype.kind in "OSUMmT":
        raise _not_numeric(tree, x.dtype)
    return x


def _create_like(like_array, fun, *args, **kwargs):
    """Call a creation function of NumPy for an array of `like_array`'s module, such as CuPy."""
    return fun(*args, **kwargs, like=like_array if hasattr(like_array, "__array_function__") else None)


def _not_numeric(tree, dtype) -> Exception:
    return TracedConversionError.at(
        "np.array",
        got=f"{describe(tree)}, which would become an array of {dtype}",
        need="numbers and arrays, in lists of lists",
        mend="a list, a tuple or a dict of arrays as it is: transformations take them as arguments and results",
    )


def _is_weak(x) -> bool:
    return type(value_of(x)) in (bool, int, float, complex)


def _convert(where: str, tree, dtype=None, copy: bool | None = None, device=None, ndmin: int = 0):
    """An array as np.array makes it. An Array is immutable, so it is not copied."""
    arrays = find(tree, [])
    x = _assemble(tree, value_of(next((a for a in arrays if not _is_weak(a)), 0.0)) if arrays else None)
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    unchanged = type(tree) is Array and dtype == x.dtype and not _is_weak(x)
    if copy is False and not unchanged:
        raise ValueError(
            message(
                where,
                argument="copy",
                got=f"False, for {describe(tree)} as {dtype}",
                need="True or None: a copy is needed here",
                mend="leave copy out",
            )
        )
    x = x if unchanged or (dtype == x.dtype and not _is_weak(x)) else x.astype(dtype)
    x = np.reshape(x, (1,) * (ndmin - x.ndim) + x.shape) if ndmin > x.ndim else x
    return x if device is None else x.to_device(device)


def create(fun, args, kwargs, like):
    """Call a creation function of NumPy for an array of the module and the state of `like`."""
    if fun.__name__ in overrides and find((args, kwargs), []):
        return overrides[fun.__name__](*args, **kwargs)
    return wrap(_create_like(value_of(like), fun, *args, **kwargs), like.state if type(like) is Array else None)


@override(np.array)
def array(object, dtype=None, *, copy: bool | None = True, order="K", subok=False, ndmin=0, ndmax=0, like=None):
    if not find(object, []):
        options = {"copy": copy, "order": order, "subok": subok, "ndmin": ndmin}
        return create(np.array, (object, dtype), options, like)
    x = _convert("np.array", object, dtype, copy if copy is not True else None, ndmin=ndmin)
    if 0 < ndmax < x.ndim:
        raise _not_numeric(object, np.dtype("O"))
    return x


def override_converter(fun):
    @override(fun)
    def convert(a, dtype=None, order=None, *, device=None, copy=None, like=None):
        if not find(a, []):
            return create(fun, (a, dtype, order), {"device": device, "copy": copy}, like)
        return _convert(f"np.{fun.__name__}", a, dtype, copy if copy is not True else None, device)

    return convert


asarray = override_converter(np.asarray)


def override_contiguous(fun):
    @override(fun)
    def convert(a, dtype=None, *, like=None):
        return _convert(f"np.{fun.__name__}", a, dtype, ndmin=1) if find(a, []) else create(fun, (a, dtype), {}, like)


@override(np.require)
def require(a, dtype=None, requirements=None, *, like=None):
    flags = {str(r).upper() for r in ([requirements] if isinstance(requirements, str) else requirements or ())}
    if flags & {"W", "WRITEABLE"}:
        raise StateError.at(
            "np.require",
            argument="requirements",
            got=f"writeable, for a {describe(a)}",
            need="arrays that are immutable",
            mend="x = x.at[i].set(v)",
        )
    return _convert("np.require", a, dtype)


@override(np.asarray_chkfinite)
def asarray_chkfinite(a, dtype=None, order=None):
    x = _convert("np.asarray_chkfinite", a, dtype)
    if not np.all(np.isfinite(value_of(x))):
        raise ValueError("array must not contain infs or NaNs")
    return x


@functools.wraps(np.fromiter)
def fromiter(iter, dtype, count=-1, *, like=None):
    items = list(iter if count < 0 else itertools.islice(iter, count))
    if find(items, []):
        return _convert("np.fromiter", items, dtype)
    return create(np.fromiter, (items, dtype, count), {}, like)


@override(np.from_dlpack)
def from_dlpack(x, /, *, device=None, copy=None):
    return _convert("np.from_dlpack", x, device=device)


@override(np.full)
def full(shape, fill_value, dtype=None, order="C", *, device=None, like=None):
    if not find(fill_value, []):
        return create(np.full, (shape, fill_value, dtype, order), {"device": device}, like)
    return np.broadcast_to(_convert("np.full", fill_value, dtype, device=device), shape)


# Ranges and grids


def require_invariant_ends(where: str, *numbers) -> None:
    """Raise if the end of a range varies: the length would differ from worker to worker."""
    for x in numbers:
        if type(x) is Array and x.state is not None and x.state.varying:
            raise StateError.at(
                where,
                got=describe(x),
                need="ends that are Invariant: the length would differ from worker to worker",
                mend="np.linspace(start, stop, n), or start + step * np.arange(n)",
            )


@override(np.arange)
def arange(start=0, stop=None, step=1, *, dtype=None, device=None, like=None):
    if not find((start, stop, step), []):
        ends = (start,) if stop is None else (start, stop, step)
        return create(np.arange, ends, {"dtype": dtype, "device": device}, like)
    start, stop = (0, start) if stop is None else (start, stop)
    step = 1 if step is None else step
    require_invariant_ends("np.arange", start, stop, step)
    plain = np.arange(*(_number(x) for x in (start, stop, step)), dtype=dtype, device=device)
    first = np.arange(plain.size, dtype=plain.dtype if plain.dtype.kind in "fc" else None)
    # As in NumPy, the step is the difference of the first two entries.
    return (start + first * ((start + step) - start)).astype(plain.dtype)


def _number(x):
    """The Python number in an Array of one."""
    value = value_of(x)
    return value.item() if hasattr(value, "item") else value


def bare_slice(s: slice) -> slice:
    return slice(*(_number(x) for x in (s.start, s.stop, s.step)))


def grid_entries(s: slice, n: int):
    """The n entries of a slice of np.mgrid."""
    start = 0 if s.start is None else s.start
    step = 1 if s.step is None else s.step
    if isinstance(step, complex):
        step = (s.stop - start) / (n - 1) if n > 1 else 1
    return np.arange(n) * step + start
