"""Arrays that are made of traced values: np.array, np.full, np.arange and their kin."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np

from spmd.autodiff.apply import wrap
from spmd.autodiff.primitive import twins
from spmd.autodiff.tracer import Array, find, value_of
from spmd.errors import StateError, TracedConversionError, describe, message

__all__ = ["create"]


def twin(fun: Callable) -> Callable[[Callable], Callable]:
    """Declare what a function of NumPy does where an Array stands among its arguments."""

    def declare(f):
        @functools.wraps(fun)
        def call(*args, **kwargs):
            return f(*args, **kwargs) if find((args, kwargs), []) else fun(*args, **kwargs)

        twins[fun.__name__] = call
        return call

    return declare


# Arrays of what is given


def _built(tree, sample):
    """One array of an Array, of nested lists that hold some, or of bare data; `sample` tells whose arrays are made."""
    if type(tree) is Array or not find(tree, []):
        x = tree if hasattr(tree, "dtype") else _of_kind(sample, np.asarray, tree)
    elif isinstance(tree, list | tuple):
        parts = [_built(t, sample) for t in tree]
        shapes = {p.shape for p in parts}
        if len(shapes) > 1:
            raise ValueError(f"np.array needs entries of one shape, and has {', '.join(map(str, sorted(shapes)))}")
        x = np.stack(parts)
    else:
        x = np.asarray(tree)
    if x.dtype.kind in "OSUMmT":
        raise _no_numbers(tree, x.dtype)
    return x


def _of_kind(sample, fun, *args, **kwargs):
    """What a creating function of NumPy makes, as an array of the kind of `sample`: CuPy's, say."""
    return fun(*args, **kwargs, like=sample if hasattr(sample, "__array_function__") else None)


def _no_numbers(tree, dtype) -> Exception:
    return TracedConversionError.at(
        "np.array",
        got=f"{describe(tree)}, which would become an array of {dtype}",
        need="numbers and arrays, in lists of lists",
        mend="a list, a tuple or a dict of arrays as it is: transformations take them as arguments and results",
    )


def _is_weak(x) -> bool:
    return type(value_of(x)) in (bool, int, float, complex)


def _made(where: str, tree, dtype=None, copy: bool | None = None, device=None, ndmin: int = 0):
    """An array as np.array makes it. An Array among the arguments stays what it is: it is immutable."""
    arrays = find(tree, [])
    x = _built(tree, value_of(next((a for a in arrays if not _is_weak(a)), 0.0)) if arrays else None)
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    as_it_is = type(tree) is Array and dtype == x.dtype and not _is_weak(x)
    if copy is False and not as_it_is:
        raise ValueError(
            message(
                where,
                argument="copy",
                got=f"False, for {describe(tree)} as {dtype}",
                need="True or None: it is put together, or converted",
                mend="leave copy out",
            )
        )
    x = x if as_it_is or (dtype == x.dtype and not _is_weak(x)) else x.astype(dtype)
    x = np.reshape(x, (1,) * (ndmin - x.ndim) + x.shape) if ndmin > x.ndim else x
    return x if device is None else x.to_device(device)


def create(fun, args, kwargs, like):
    """What a creating function of NumPy makes, as an array of the kind and the state of `like`."""
    if fun.__name__ in twins and find((args, kwargs), []):
        return twins[fun.__name__](*args, **kwargs)
    return wrap(_of_kind(value_of(like), fun, *args, **kwargs), like.state if type(like) is Array else None)


@twin(np.array)
def array(object, dtype=None, *, copy: bool | None = True, order="K", subok=False, ndmin=0, ndmax=0, like=None):
    if not find(object, []):
        options = {"copy": copy, "order": order, "subok": subok, "ndmin": ndmin}
        return create(np.array, (object, dtype), options, like)
    x = _made("np.array", object, dtype, copy if copy is not True else None, ndmin=ndmin)
    if 0 < ndmax < x.ndim:
        raise _no_numbers(object, np.dtype("O"))
    return x


def as_array(fun):
    @twin(fun)
    def convert(a, dtype=None, order=None, *, device=None, copy=None, like=None):
        if not find(a, []):
            return create(fun, (a, dtype, order), {"device": device, "copy": copy}, like)
        return _made(f"np.{fun.__name__}", a, dtype, copy if copy is not True else None, device)

    return convert


asarray = as_array(np.asarray)


def as_lying(fun):
    @twin(fun)
    def convert(a, dtype=None, *, like=None):
        return _made(f"np.{fun.__name__}", a, dtype, ndmin=1) if find(a, []) else create(fun, (a, dtype), {}, like)


@twin(np.require)
def require(a, dtype=None, requirements=None, *, like=None):
    wanted = {str(r).upper() for r in ([requirements] if isinstance(requirements, str) else requirements or ())}
    if wanted & {"W", "WRITEABLE"}:
        raise StateError.at(
            "np.require",
            argument="requirements",
            got=f"writeable, for a {describe(a)}",
            need="arrays that are immutable",
            mend="x = x.at[i].set(v)",
        )
    return _made("np.require", a, dtype)


@twin(np.asarray_chkfinite)
def asarray_chkfinite(a, dtype=None, order=None):
    x = _made("np.asarray_chkfinite", a, dtype)
    if not np.all(np.isfinite(value_of(x))):
        raise ValueError("array must not contain infs or NaNs")
    return x


@functools.wraps(np.fromiter)
def fromiter(iter, dtype, count=-1, *, like=None):
    items = list(iter if count < 0 else itertools.islice(iter, count))
    if find(items, []):
        return _made("np.fromiter", items, dtype)
    return create(np.fromiter, (items, dtype, count), {}, like)


@twin(np.from_dlpack)
def from_dlpack(x, /, *, device=None, copy=None):
    return _made("np.from_dlpack", x, device=device)


@twin(np.full)
def full(shape, fill_value, dtype=None, order="C", *, device=None, like=None):
    if not find(fill_value, []):
        return create(np.full, (shape, fill_value, dtype, order), {"device": device}, like)
    return np.broadcast_to(_made("np.full", fill_value, dtype, device=device), shape)


# Ranges and grids


def alike_on_workers(where: str, *numbers) -> None:
    """Ends of ranges are refused where they vary: their lengths would differ from worker to worker."""
    for x in numbers:
        if type(x) is Array and x.state is not None and x.state.varying:
            raise StateError.at(
                where,
                got=describe(x),
                need="ends that are Invariant: the length would differ from worker to worker",
                mend="np.linspace(start, stop, n), or start + step * np.arange(n)",
            )


@twin(np.arange)
def arange(start=0, stop=None, step=1, *, dtype=None, device=None, like=None):
    if not find((start, stop, step), []):
        ends = (start,) if stop is None else (start, stop, step)
        return create(np.arange, ends, {"dtype": dtype, "device": device}, like)
    start, stop = (0, start) if stop is None else (start, stop)
    step = 1 if step is None else step
    alike_on_workers("np.arange", start, stop, step)
    plain = np.arange(*(_number(x) for x in (start, stop, step)), dtype=dtype, device=device)
    first = np.arange(plain.size, dtype=plain.dtype if plain.dtype.kind in "fc" else None)
    # NumPy takes the difference of the first two entries for the step.
    return (start + first * ((start + step) - start)).astype(plain.dtype)


def _number(x):
    """The Python number in an Array of one."""
    value = value_of(x)
    return value.item() if hasattr(value, "item") else value


def plain_slice(s: slice) -> slice:
    return slice(*(_number(x) for x in (s.start, s.stop, s.step)))


def steps(s: slice, n: int):
    """The n entries of a slice of np.mgrid."""
    start = 0 if s.start is None else s.start
    step = 1 if s.step is None else s.step
    if isinstance(step, complex):
        step = (s.stop - start) / (n - 1) if n > 1 else 1
    return np.arange(n) * step + start
