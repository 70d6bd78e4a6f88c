"""What CuPy refuses, computed another way.

CuPy takes no arrays of NumPy as operands. A body that writes `x + np.zeros(3)` means an array on x's device, so a
function that fails for that reason runs again with the constants on the device (`again`). A function that CuPy lacks,
or lacks an option of, is replaced (`otherwise`), or composed of functions that CuPy has (`stepwise`). Only a call that
has failed comes here, so arrays of NumPy pay nothing for it.
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
from spmd.autodiff.staging.recorder import whole_line
from spmd.errors import JitError, StateError, describe

__all__ = ["ALONE", "again", "otherwise", "pulled_again", "run", "stepwise", "ways"]

_absent: Any = np._NoValue  # type: ignore[attr-defined]


def otherwise(fun: Any) -> Callable[..., Any]:
    """The other way of a function; itself where there is none."""
    if isinstance(getattr(fun, "__self__", None), np.ufunc):
        fun = Method((fun.__self__, fun.__name__))
    if type(fun) is Method and fun not in ways and fun[1] in _folds:
        return partial(_folds[fun[1]], fun[0])
    return ways.get(fun, fun)


# CuPy's sorts are stable, and know no other kind.


def _sort(a, axis=-1, kind=None, order=None, *, stable=None):
    return np.sort(a, axis)


def _argsort(a, axis=-1, kind=None, order=None, *, stable=None):
    return np.argsort(a, axis)


def _clip(a, a_min=None, a_max=None, *, min=None, max=None):
    return np.clip(a, min if a_min is None else a_min, max if a_max is None else a_max)


_NEUTRAL: dict[Any, Any] = {
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
_JOIN: dict[Any, Any] = {
    np.nanmax: np.fmax,
    np.nanmin: np.fmin,
    np.sum: np.add,
    np.prod: np.multiply,
    np.max: np.maximum,
    np.min: np.minimum,
}


_NAMED = {np.logical_and: np.all, np.logical_or: np.any, np.maximum: np.max, np.minimum: np.min}


def _reduced(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """A reduction with `where` and `initial`, which CuPy's do not have."""
    given = inspect.signature(fun).bind(*args, **kwargs).arguments
    options = {k: v for k, v in given.items() if v is not _absent}
    a, where, initial = options.pop("a"), options.pop("where", True), options.pop("initial", None)
    axis, keepdims = options.get("axis"), bool(options.get("keepdims"))
    if where is not True:
        neutral = initial if _NEUTRAL[fun] is None else _NEUTRAL[fun]
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
    if _NEUTRAL[fun] is None and any(a.shape[d] == 0 for d in axes):  # of nothing there is none
        return np.full_like(a, initial, shape=_shape(a, axis, keepdims))
    return _JOIN[fun](fun(a, **options), initial)


def _scattered(fun: Any, a, axis=None, dtype=None, out=None, ddof=0, keepdims=False, *, where=True, **more):
    """A variance or standard deviation with options that CuPy's do not have."""
    free = more.pop("correction", ddof)
    if where is True:
        return fun(a, axis, dtype, None, free, keepdims, **more)
    mask = np.broadcast_to(where, a.shape)
    count = np.sum(mask, axis, keepdims=True)
    deviation = np.where(mask, np.abs(a - np.sum(np.where(mask, a, 0), axis, dtype, keepdims=True) / count), 0)
    total = np.sum(deviation**2, axis, keepdims=True) / np.maximum(count - free, 0)
    total = np.reshape(total, _shape(mask, axis, keepdims)).astype(dtype or deviation.dtype)
    return np.sqrt(total) if fun is np.std else total


def _shape(a, axis, keepdims: bool) -> tuple[int, ...]:
    """The shape of a reduction."""
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


def _made_like(fun: Any, *args, device=None, **kwargs):
    if device is None:
        return fun(*args, **kwargs)
    if not hasattr(device, "__enter__"):
        raise TypeError(f"the device {device!r}")
    with device:
        return fun(*args, **kwargs)


def _by_host(fun: Any, *args, **kwargs):
    """A function that the host computes, which waits for the device."""
    there = next(devices.arrays(args))
    found = fun(*devices.on_host(args), **devices.on_host(kwargs))
    return devices.beside(np.asarray(found), there)


def _quantile(fun: Any, a, q, axis=None, out=None, overwrite_input=False, method="linear", keepdims=False, **more):
    if method in ("linear", "lower", "higher", "midpoint", "nearest") and more.get("weights") is None:
        return fun(a, q, axis, None, overwrite_input, method, keepdims)
    return _by_host(fun, a, q, axis, method=method, keepdims=keepdims, **more)


# Methods of ufuncs, of which CuPy has those of sums and products. One step after another: not all are associative.


def _named(fun: Any, array, axis=0, dtype=None, out=None, keepdims=False, **more) -> Any:
    """A reduction by a ufunc that has a function of its own."""
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
    return np.reshape(total, _shape(array, axis, keepdims)).astype(_comes(ufunc, array))


def _accumulated(ufunc: Any, array, axis: int = 0, dtype=None, out=None) -> Any:
    array = array if dtype is None else array.astype(dtype)
    if not array.shape[axis]:
        return array.astype(_comes(ufunc, array))
    parts = itertools.accumulate(np.moveaxis(array, axis, 0), ufunc)
    return np.stack([x.astype(_comes(ufunc, array)) for x in parts], axis)


def _reduced_at(ufunc: Any, array, indices, axis: int = 0, dtype=None, out=None) -> Any:
    first = [int(i) for i in getattr(indices, "tolist", lambda: indices)()]
    column = np.moveaxis(array, axis, 0)
    if not first:
        return np.moveaxis(column[:0], 0, axis).astype(_comes(ufunc, array) if dtype is None else dtype)
    if ufunc is np.add:
        return ufunc.reduceat(array, indices, axis, dtype)
    parts = [column[i : max(i + 1, j)] for i, j in zip(first, [*first[1:], len(column)], strict=True)]
    return np.stack([_folded(ufunc, x, 0, dtype) for x in parts], axis)


def _comes(ufunc: Any, array) -> Any:
    """The dtype of the results of a ufunc."""
    return ufunc(array[:0], array[:0]).dtype if array.ndim else ufunc(array, array).dtype


_folds = {"reduce": _folded, "accumulate": _accumulated, "reduceat": _reduced_at}

ways: dict[Any, Callable[..., Any]] = {
    **{Method((ufunc, "reduce")): partial(_named, fun) for ufunc, fun in _NAMED.items()},
    np.var: partial(_scattered, np.var),
    np.std: partial(_scattered, np.std),
    np.linalg.cholesky: _cholesky,
    np.linalg.matrix_rank: _matrix_rank,
    np.linalg.vector_norm: _vector_norm,
    np.count_nonzero: lambda a, axis=None, *, keepdims=False: np.sum(a != 0, axis, keepdims=keepdims),
    np.spacing: lambda x: np.nextafter(x, np.copysign(np.inf, x).astype(x.dtype)) - x,
    **{fun: partial(_made_like, fun) for fun in (np.empty_like, np.full_like, np.ones_like, np.zeros_like)},
    np.histogram_bin_edges: partial(_by_host, np.histogram_bin_edges),
    np.quantile: partial(_quantile, np.quantile),
    np.percentile: partial(_quantile, np.percentile),
    np.sort: _sort,
    np.partition: lambda a, kth, axis=-1, kind="introselect", order=None: np.partition(a, kth, axis),
    np.argpartition: lambda a, kth, axis=-1, kind="introselect", order=None: np.argpartition(a, kth, axis),
    np.argsort: _argsort,
    np.clip: _clip,
    **{fun: partial(_reduced, fun) for fun in _NEUTRAL},
}
"""Functions with options that CuPy's have by another name, or not at all."""


def run(fun: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function of NumPy on bare data, which may be of a device."""
    try:
        return fun(*args, **kwargs)
    except Exception as error:
        return again(fun, list(args), kwargs, error, getattr(fun, "__name__", "a function"))


_REFUSALS = (TypeError, ValueError, AttributeError, IndexError, NotImplementedError)
"""What CuPy raises where it does not take an argument; anything else has another reason."""


def again(fun: Callable, args: list[Any], kwargs: dict[str, Any], error: Exception, name: str) -> Any:
    """What has failed with an error, computed with constants of the host on the device of the arrays beside them.

    args becomes what it was computed from. Without arrays of a device the error is raised as it is.
    """
    if type(error) is JitError and error.looked:
        return whole_line(fun, args, kwargs, error)
    if not isinstance(error, _REFUSALS) or type(error).__module__.startswith("spmd"):
        raise error
    there = next(arrays([args, kwargs]), None)
    if there is None:
        raise error
    with there.device:
        args[:] = [moved_to(a, device_modules[-1]) for a in args]
        kwargs = {k: moved_to(v, device_modules[-1]) for k, v in kwargs.items()}
        second: Exception = error
        for way in _ways(fun):
            try:
                return way(*args, **kwargs)
            except (TypeError, AttributeError, NotImplementedError) as failed:
                if type(failed).__module__.startswith("spmd"):
                    raise
                second = failed
        raise StateError.at(
            name,
            got=f"{describe(there)} on a GPU, which CuPy's function does not take: {second}",
            need="a function, and options, that CuPy has too",
            mend="compose it of others; or a host function on spmd.block(x).get(), which waits for the GPU",
        ) from error


def _ways(fun: Any) -> Iterator[Callable[..., Any]]:
    """How a function may be computed on a device: as it is, and composed of others."""
    yield otherwise(fun)
    composed = handlers.get(fun) if fun in composites else fun
    if getattr(composed, "__module__", "").startswith("spmd.") and composed not in _composing.get():
        yield partial(stepwise, composed)


_composing: ContextVar[tuple[Any, ...]] = ContextVar("composing", default=())
"""The functions that are being done step by step: a composition that needs itself has an end."""


class _Alone:
    """The state of arrays outside of any body while a function is done step by step: they are tracked, that is all."""

    varying = frozenset[str]()

    def __repr__(self) -> str:
        return "device"


ALONE = _Alone()


def stepwise(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of NumPy's functions on bare data of a device, each of which is done again where CuPy refuses it.

    Arrays take part in NumPy's functions by way of the tracer; so they are traced, on no tape.
    """
    state = tracer.mixing.ambient() or ALONE

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


def pulled_again(pull: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """What a derivative rule that has failed gives when it is done step by step; the error where it fails again."""
    if type(error) is JitError and error.looked:
        return whole_line(pull, args, kwargs, error)
    if not isinstance(error, _REFUSALS) or type(error).__module__.startswith("spmd"):
        raise error
    there = next(arrays([args, kwargs]), None)
    if there is None or pull in _composing.get():
        raise error
    with there.device:
        try:
            return stepwise(pull, *args, **kwargs)
        except StateError:
            raise
        except Exception:
            raise error from None
