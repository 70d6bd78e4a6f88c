"""Fallbacks for calls that CuPy refuses.

CuPy takes no arrays of NumPy as operands. A body that writes `x + np.zeros(3)` means an array on x's device, so such a
call runs again with its constants on the device (`retry`). A function or an option that CuPy lacks is replaced
(`alternative`), or composed of functions that CuPy has (`stepwise`). Only failed calls come here, so arrays of NumPy
pay nothing.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from spmd.autodiff import devices, tracer
from spmd.autodiff.devices import arrays, device_modules, is_array, moved_to
from spmd.autodiff.primitive import Method, composites, handlers
from spmd.autodiff.staging.recorder import opaque_line
from spmd.errors import JitError, StateError, describe

__all__ = ["DEVICE_STATE", "alternative", "alternatives", "retry", "retry_rule", "run", "stepwise"]

_absent: Any = np._NoValue  # type: ignore[attr-defined]


def alternative(fun: Any) -> Callable[..., Any]:
    """The replacement of a function that CuPy lacks in part; the function itself if there is none."""
    if isinstance(getattr(fun, "__self__", None), np.ufunc):
        fun = Method((fun.__self__, fun.__name__))
    if type(fun) is Method and fun not in alternatives and fun[1] in _UFUNC_METHODS:
        return partial(_UFUNC_METHODS[fun[1]], fun[0])
    return alternatives.get(fun, fun)


# CuPy's sorts are stable and take no `kind`.


def _sort(a, axis=-1, kind=None, order=None, *, stable=None):
    return np.sort(a, axis)


def _argsort(a, axis=-1, kind=None, order=None, *, stable=None):
    return np.argsort(a, axis)


def _clip(a, a_min=None, a_max=None, *, min=None, max=None):
    return np.clip(a, min if a_min is None else a_min, max if a_max is None else a_max)


_IDENTITIES: dict[Any, Any] = {
    np.nanmax: None,
    np.nanmin: None,
    np.sum: 0,
    np.prod: 1,
    np.any: False,
    np.all: True,
    np.mean: 0,
    np.max: None,
    np.min: None,
}
_COMBINERS: dict[Any, Any] = {
    np.nanmax: np.fmax,
    np.nanmin: np.fmin,
    np.sum: np.add,
    np.prod: np.multiply,
    np.max: np.maximum,
    np.min: np.minimum,
}


_UFUNC_REDUCTIONS = {np.logical_and: np.all, np.logical_or: np.any, np.maximum: np.max, np.minimum: np.min}


def _reduced(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """A reduction with `where` and `initial`, which CuPy lacks."""
    bound = inspect.signature(fun).bind(*args, **kwargs).arguments
    options = {k: v for k, v in bound.items() if v is not _absent}
    a, where, initial = options.pop("a"), options.pop("where", True), options.pop("initial", None)
    axis, keepdims = options.get("axis"), bool(options.get("keepdims"))
    if where is not True:
        neutral = initial if _IDENTITIES[fun] is None else _IDENTITIES[fun]
        if neutral is None:
            raise TypeError(f"{fun.__name__} with where= needs initial=")
        if fun is np.mean:
            mask = np.broadcast_to(where, a.shape)
            total = np.sum(np.where(mask, a, 0), axis, keepdims=keepdims)
            return total / np.sum(mask, axis, dtype=a.dtype, keepdims=keepdims)
        a = np.where(where, a, np.asarray(neutral, a.dtype)[()])
    if initial is None:
        return fun(a, **options)
    axes = range(a.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    if _IDENTITIES[fun] is None and any(a.shape[d] == 0 for d in axes):  # an empty reduction without an identity
        return np.full_like(a, initial, shape=_shape(a, axis, keepdims))
    return _COMBINERS[fun](fun(a, **options), initial)


def _variance(fun: Any, a, axis=None, dtype=None, out=None, ddof=0, keepdims=False, *, where=True, **more):
    """A variance or standard deviation with options that CuPy lacks."""
    correction = more.pop("correction", ddof)
    if where is True:
        return fun(a, axis, dtype, None, correction, keepdims, **more)
    mask = np.broadcast_to(where, a.shape)
    count = np.sum(mask, axis, keepdims=True)
    deviation = np.where(mask, np.abs(a - np.sum(np.where(mask, a, 0), axis, dtype, keepdims=True) / count), 0)
    total = np.sum(deviation**2, axis, keepdims=True) / np.maximum(count - correction, 0)
    total = np.reshape(total, _shape(mask, axis, keepdims)).astype(dtype or deviation.dtype)
    return np.sqrt(total) if fun is np.std else total


def _shape(a, axis, keepdims: bool) -> tuple[int, ...]:
    """The shape of the result of a reduction."""
    return np.empty(a.shape, bool).any(axis=axis, keepdims=keepdims).shape


def _cholesky(a, /, *, upper=False):
    if not upper:
        return np.linalg.cholesky(a)
    return np.conj(np.swapaxes(np.linalg.cholesky(np.conj(np.swapaxes(a, -1, -2))), -1, -2))


def _vector_norm(x, /, *, axis=None, keepdims=False, ord: Any = 2):
    if ord not in (2, None):
        raise TypeError(f"ord={ord}")
    return np.sqrt(np.sum(np.abs(x) ** 2, axis, keepdims=keepdims))


def _matrix_rank(A, tol=None, hermitian=False, *, rtol=None):
    if A.ndim < 2:
        return np.any(A != 0).astype(int)
    values = np.abs(np.linalg.eigvalsh(A)) if hermitian else np.linalg.svd(A, compute_uv=False)
    if tol is None:
        rtol = max(A.shape[-2:]) * np.finfo(values.dtype).eps if rtol is None else rtol
        tol = np.max(values, -1) * rtol
    return np.sum(values > (tol[..., None] if np.ndim(tol) else tol), -1)


def _like_on_device(fun: Any, *args, device=None, **kwargs):
    if device is None:
        return fun(*args, **kwargs)
    if not hasattr(device, "__enter__"):
        raise TypeError(f"the device {device!r}")
    with device:
        return fun(*args, **kwargs)


def _on_host(fun: Any, *args, **kwargs):
    """Compute a function on the host; waits for the device."""
    device_array = next(devices.arrays(args))
    result = fun(*devices.on_host(args), **devices.on_host(kwargs))
    return devices.beside(np.asarray(result), device_array)


def _quantile(fun: Any, a, q, axis=None, out=None, overwrite_input=False, method="linear", keepdims=False, **more):
    if method in ("linear", "lower", "higher", "midpoint", "nearest") and more.get("weights") is None:
        return fun(a, q, axis, None, overwrite_input, method, keepdims)
    return _on_host(fun, a, q, axis, method=method, keepdims=keepdims, **more)


# Methods of ufuncs. CuPy has only those of sums and products. Entry by entry: not all ufuncs are associative.


def _ufunc_reduce(fun: Any, array, axis=0, dtype=None, out=None, keepdims=False, **more) -> Any:
    """The `reduce` of a ufunc that NumPy also has as a function."""
    return _reduced(fun, array if dtype is None else array.astype(dtype), axis, keepdims=keepdims, **more)


def _folded(ufunc: Any, array, axis: Any = 0, dtype=None, out=None, keepdims=False, initial=_absent, where=True) -> Any:
    axes = tuple(range(array.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    array = array if dtype is None else array.astype(dtype)
    start = ufunc.identity if initial is _absent else initial
    if where is not True:
        if start is None:
            raise TypeError(f"{ufunc.__name__}.reduce with where= needs initial=")
        array = np.where(where, array, np.asarray(start, array.dtype)[()])
    moved = np.moveaxis(array, axes, range(len(axes)))
    entries = [moved[i] for i in np.ndindex(*moved.shape[: len(axes)])]
    if not entries and start is None:
        raise ValueError(f"zero-size array to reduction operation {ufunc.__name__} which has no identity")
    if not entries or initial is not _absent:
        entries.insert(0, np.full_like(array, start, shape=moved.shape[len(axes) :]))
    total = functools.reduce(ufunc, entries)
    return np.reshape(total, _shape(array, axis, keepdims)).astype(_result_dtype(ufunc, array))


def _accumulated(ufunc: Any, array, axis: int = 0, dtype=None, out=None) -> Any:
    array = array if dtype is None else array.astype(dtype)
    if not array.shape[axis]:
        return array.astype(_result_dtype(ufunc, array))
    parts = itertools.accumulate(np.moveaxis(array, axis, 0), ufunc)
    return np.stack([x.astype(_result_dtype(ufunc, array)) for x in parts], axis)


def _reduced_at(ufunc: Any, array, indices, axis: int = 0, dtype=None, out=None) -> Any:
    first = [int(i) for i in getattr(indices, "tolist", lambda: indices)()]
    column = np.moveaxis(array, axis, 0)
    if not first:
        return np.moveaxis(column[:0], 0, axis).astype(_result_dtype(ufunc, array) if dtype is None else dtype)
    if ufunc is np.add:
        return ufunc.reduceat(array, indices, axis, dtype)
    parts = [column[i : max(i + 1, j)] for i, j in zip(first, [*first[1:], len(column)], strict=True)]
    return np.stack([_folded(ufunc, x, 0, dtype) for x in parts], axis)


def _result_dtype(ufunc: Any, array) -> Any:
    """The dtype of the results of a ufunc."""
    return ufunc(array[:0], array[:0]).dtype if array.ndim else ufunc(array, array).dtype


_UFUNC_METHODS = {"reduce": _folded, "accumulate": _accumulated, "reduceat": _reduced_at}

alternatives: dict[Any, Callable[..., Any]] = {
    **{Method((ufunc, "reduce")): partial(_ufunc_reduce, fun) for ufunc, fun in _UFUNC_REDUCTIONS.items()},
    np.var: partial(_variance, np.var),
    np.std: partial(_variance, np.std),
    np.linalg.cholesky: _cholesky,
    np.linalg.matrix_rank: _matrix_rank,
    np.linalg.vector_norm: _vector_norm,
    np.count_nonzero: lambda a, axis=None, *, keepdims=False: np.sum(a != 0, axis, keepdims=keepdims),
    np.spacing: lambda x: np.nextafter(x, np.copysign(np.inf, x).astype(x.dtype)) - x,
    **{fun: partial(_like_on_device, fun) for fun in (np.empty_like, np.full_like, np.ones_like, np.zeros_like)},
    np.histogram_bin_edges: partial(_on_host, np.histogram_bin_edges),
    np.quantile: partial(_quantile, np.quantile),
    np.percentile: partial(_quantile, np.percentile),
    np.sort: _sort,
    np.partition: lambda a, kth, axis=-1, kind="introselect", order=None: np.partition(a, kth, axis),
    np.argpartition: lambda a, kth, axis=-1, kind="introselect", order=None: np.argpartition(a, kth, axis),
    np.argsort: _argsort,
    np.clip: _clip,
    **{fun: partial(_reduced, fun) for fun in _IDENTITIES},
}
"""Replacements of functions whose options CuPy lacks, or has by another name."""


def run(fun: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function of NumPy on bare data, which may lie on a device."""
    try:
        return fun(*args, **kwargs)
    except Exception as error:
        return retry(fun, list(args), kwargs, error, getattr(fun, "__name__", "a function"))


_REFUSALS = (TypeError, ValueError, AttributeError, IndexError, NotImplementedError)
"""The errors that CuPy raises for arguments that it does not take."""


def retry(fun: Callable, args: list[Any], kwargs: dict[str, Any], error: Exception, name: str) -> Any:
    """Repeat a failed call with its constants on the device of the other arguments.

    It writes the moved arguments into args. Without arrays of a device it raises `error`.
    """
    if type(error) is JitError and error.reads_value:
        return opaque_line(fun, args, kwargs, error)
    if not isinstance(error, _REFUSALS) or type(error).__module__.startswith("spmd"):
        raise error
    device_array = next(arrays([args, kwargs]), None)
    if device_array is None:
        raise error
    with device_array.device:
        args[:] = [moved_to(a, device_modules[-1]) for a in args]
        kwargs = {k: moved_to(v, device_modules[-1]) for k, v in kwargs.items()}
        last_error: Exception = error
        for attempt in _attempts(fun):
            try:
                return attempt(*args, **kwargs)
            except (TypeError, AttributeError, NotImplementedError) as attempt_error:
                if type(attempt_error).__module__.startswith("spmd"):
                    raise
                last_error = attempt_error
        raise StateError.at(
            name,
            got=f"{describe(device_array)} on a GPU, which CuPy's function does not take: {last_error}",
            need="a function, and options, that CuPy has too",
            mend="compose it of others; or a host function on spmd.block(x).get(), which waits for the GPU",
        ) from error


def _attempts(fun: Any) -> Iterator[Callable[..., Any]]:
    """The ways to compute a function on a device: directly, and composed of others."""
    yield alternative(fun)
    composed = handlers.get(fun) if fun in composites else fun
    if getattr(composed, "__module__", "").startswith("spmd.") and composed not in _composing.get():
        yield partial(stepwise, composed)


_composing: ContextVar[tuple[Any, ...]] = ContextVar("composing", default=())
"""The functions that `stepwise` runs now, to end recursion."""


class _DeviceState:
    """The state that `stepwise` gives arrays outside of any body, so that NumPy's functions dispatch on them."""

    varying = frozenset[str]()

    def __repr__(self) -> str:
        return "device"


DEVICE_STATE = _DeviceState()


def stepwise(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a composition of NumPy's functions on bare data of a device; each that CuPy refuses is retried.

    The arguments become Arrays without a tape, because NumPy's functions dispatch on those.
    """
    state = tracer.mixing.ambient() or DEVICE_STATE

    def tracked(tree: Any) -> Any:
        if is_array(tree):
            return tracer.Array(tree, state)
        if isinstance(tree, tuple | list):
            parts = [tracked(x) for x in tree]
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        return tree

    token = _composing.set((*_composing.get(), fun))
    try:
        return tracer.bare(fun(*map(tracked, args), **{k: tracked(v) for k, v in kwargs.items()}))
    finally:
        _composing.reset(token)


def retry_rule(pull: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """Repeat a failed derivative rule by `stepwise`; raises `error` if it fails again."""
    if type(error) is JitError and error.reads_value:
        return opaque_line(pull, args, kwargs, error)
    if not isinstance(error, _REFUSALS) or type(error).__module__.startswith("spmd"):
        raise error
    device_array = next(arrays([args, kwargs]), None)
    if device_array is None or pull in _composing.get():
        raise error
    with device_array.device:
        try:
            return stepwise(pull, *args, **kwargs)
        except StateError:
            raise
        except Exception:
            raise error from None
