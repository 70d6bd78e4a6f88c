"""NumPy's functions as one namespace for bare, stated and traced arrays: `spmd.numpy`, and `x.__array_namespace__()`.

NumPy's protocols hand most functions to an Array by themselves: those are NumPy's own here. The others, which make an
array of what they are given or ask some of their arguments only, have twins: where an Array stands in the arguments a
twin records what it does; else it is NumPy's function, with NumPy's result.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.autodiff import devices, tracer
from spmd.autodiff.apply import wrap
from spmd.autodiff.creation import (
    alike_on_workers,
    as_array,
    as_lying,
    asarray,
    create,
    fromiter,
    plain_slice,
    steps,
    twin,
)
from spmd.autodiff.dispatch import creators, dispatch
from spmd.autodiff.primitive import handlers, twins
from spmd.autodiff.staging.recorder import bared
from spmd.autodiff.tracer import Array, bare, find, value_of
from spmd.errors import DtypeError, StateError, TracedConversionError

__all__ = ["Namespace", "namespace", "of"]
as_array(np.asanyarray)


as_lying(np.ascontiguousarray)
as_lying(np.asfortranarray)


twins["fromiter"] = fromiter


class _Grid:
    """np.mgrid or np.ogrid, with ends that may be traced."""

    def __init__(self, name: str):
        self.name = name
        self.__doc__ = f"As np.{name}."

    def __getitem__(self, key):
        arrays = find(key, [])
        if not arrays:
            return getattr(np, self.name)[key]
        alike_on_workers(f"np.{self.name}", *arrays)
        slices = key if isinstance(key, tuple) else (key,)
        plain = np.ogrid[tuple(map(plain_slice, slices))]
        parts = [np.reshape(steps(s, p.size), p.shape).astype(p.dtype) for s, p in zip(slices, plain, strict=True)]
        if not isinstance(key, tuple):
            return parts[0]
        return tuple(parts) if self.name == "ogrid" else np.stack(np.broadcast_arrays(*parts))


twins.update({name: _Grid(name) for name in ("mgrid", "ogrid")})


def _dummy(x):
    """An array of the host of the shape and dtype of one of a device, which stays there; anything else as it is."""
    return np.zeros(x.shape, x.dtype) if devices.is_array(x) else x


class _Joiner:
    """np.r_ or np.c_, with arrays and ends of slices that may be traced."""

    def __init__(self, name: str):
        self.name = name
        self.__doc__ = f"As np.{name}."

    def __getitem__(self, key):
        numpys = getattr(np, self.name)
        if not find(key, []):
            return numpys[key]
        items = key if isinstance(key, tuple) else (key,)
        if items[0] in ("r", "c") if isinstance(items[0], str) else False:
            raise StateError.at(
                f"np.{self.name}",
                got=f"{items[0]!r}, which makes a matrix",
                need="arrays",
                mend=f"np.{self.name} without it, and np.atleast_2d",
            )
        # What NumPy makes of the positions of all entries tells where each of them goes.
        entries: list = []
        places = tuple(self._place(item, entries) for item in items)
        dtype = numpys[tuple(plain_slice(s) if isinstance(s, slice) else _dummy(bared(bare(s))) for s in items)].dtype
        return np.concatenate(entries).astype(dtype)[numpys[places]]

    def _place(self, item, entries: list):
        """An item in which positions stand for the entries, which are added to `entries`."""
        if isinstance(item, str):
            return item
        at = sum(e.size for e in entries)
        if isinstance(item, slice):
            alike_on_workers(f"np.{self.name}", *find(item, []))
            n = np.r_[plain_slice(item)].size
            start = 0 if item.start is None else item.start
            linear = isinstance(item.step, complex)
            entries.append(np.linspace(start, item.stop, n) if linear else asarray(steps(item, n)))
            return slice(at, at + n)
        x = asarray(item)
        entries.append(np.ravel(x))
        is_scalar = type(bare(item)) in np.ScalarType
        return at if is_scalar else np.reshape(np.arange(at, at + x.size), x.shape)


twins.update({name: _Joiner(name) for name in ("r_", "c_")})


# Functions with arguments that NumPy does not ask


def _lifted(x):
    """x as an Array, which NumPy asks."""
    return x if type(x) is Array else Array(asarray(x), tracer.mixing.ambient())


def _reached(fun) -> None:
    """NumPy asks the first argument of these only: it becomes an Array where a later one is."""

    @twin(fun)
    def run(first, *rest, **kwargs):
        return dispatch(fun, (_lifted(first), *rest), kwargs)


for _name in "full_like interp nanmean nanstd nanvar pad take trapezoid unwrap".split():
    _reached(getattr(np, _name))


def _from_initial(name: str, join: Callable, neutral: float | None = None) -> None:
    """A reduction that may start from an Array."""
    fun = getattr(np, name)

    @twin(fun)
    def run(a, *rest, initial: Any = np._NoValue, **kwargs):  # type: ignore[attr-defined]
        if not find(initial, []):
            kwargs = kwargs if initial is np._NoValue else {**kwargs, "initial": initial}  # type: ignore[attr-defined]
            return dispatch(fun, (_lifted(a), *rest), kwargs)
        kwargs = kwargs if neutral is None else {**kwargs, "initial": neutral}
        result = dispatch(fun, (_lifted(a), *rest), kwargs)
        dtype = _dtype_of(result)
        if not np.can_cast(initial.dtype, dtype, "same_kind"):
            raise DtypeError.at(
                f"np.{name}",
                argument="initial",
                got=f"{initial.dtype} for a result of {dtype}",
                need=f"a value that {dtype} can hold: another would be cut, and its gradient lost",
                mend=f"a.astype({str(initial.dtype)!r})",
            )
        return join(result, initial.astype(dtype))


for _name in ("sum", "nansum"):
    _from_initial(_name, np.add)
for _name in ("prod", "nanprod"):
    _from_initial(_name, np.multiply)
for _name in ("max", "nanmax"):
    _from_initial(_name, np.maximum, -np.inf)
for _name in ("min", "nanmin"):
    _from_initial(_name, np.minimum, np.inf)
twins.update(amax=twins["max"], amin=twins["min"])


@twin(np.nan_to_num)
def nan_to_num(x, copy=True, nan=0.0, posinf=None, neginf=None):
    x = _lifted(x)
    if not find((nan, posinf, neginf), []):
        return dispatch(np.nan_to_num, (x, copy, nan, posinf, neginf), {})
    if x.dtype.kind == "c":
        parts = (nan_to_num(part, copy, nan, posinf, neginf) for part in (np.real(x), np.imag(x)))
        return sum(part * unit for part, unit in zip(parts, (1, 1j), strict=True))
    if not issubclass(x.dtype.type, np.floating):
        return x
    most = np.finfo(x.dtype).max
    posinf, neginf = most if posinf is None else posinf, -most if neginf is None else neginf
    y = np.where(np.isnan(x), nan, np.where(np.isposinf(x), posinf, np.where(np.isneginf(x), neginf, x)))
    return y.astype(x.dtype)


@twin(np.select)
def select(condlist, choicelist, default=0):
    return dispatch(np.select, (condlist, choicelist, default), {})


@twin(np.kaiser)
def kaiser(M, beta):
    n, middle = np.arange(0, M), (M - 1) / 2
    return np.ones(M) if M == 1 else np.i0(beta * np.sqrt(1 - ((n - middle) / middle) ** 2.0)) / np.i0(beta)


for _fun in (np.format_float_positional, np.format_float_scientific):
    twin(_fun)(lambda x, *args, _fun=_fun, **kwargs: _fun(bare(x), *args, **kwargs))


@twin(np.ndenumerate)
def ndenumerate(arr):
    return ((i, arr[i]) for i in np.ndindex(arr.shape))


# Functions that call a function, which may give Arrays though it is given none


def _unless_traced(numpys: Callable, composed: Callable) -> Any:
    """What NumPy computes; what `composed` does if NumPy met an Array, which tells it so."""
    try:
        return numpys()
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, TracedConversionError):
            reason = reason.__cause__ or reason.__context__
        if reason is None:
            raise
    return composed()


def _calls(fun) -> None:
    @functools.wraps(fun)
    def call(*args, **kwargs):
        def composed():
            return handlers[fun](*args, **kwargs)

        if find((args, kwargs), []):
            return composed()
        return _unless_traced(lambda: fun(*args, **kwargs), composed)

    twins[fun.__name__] = call


for _fun in (np.apply_along_axis, np.apply_over_axes, np.piecewise):
    _calls(_fun)


class vectorize(np.vectorize):
    """As np.vectorize. Where Arrays are concerned the function runs on one entry after the other, and is recorded."""

    def __call__(self, *args, **kwargs):
        if getattr(self, "pyfunc", None) in (None, np._NoValue):  # type: ignore[attr-defined]
            return super().__call__(*args, **kwargs)
        if find((args, kwargs), []):
            return self._in_a_loop(args, kwargs)
        return _unless_traced(
            lambda: np.vectorize.__call__(self, *args, **kwargs), lambda: self._in_a_loop(args, kwargs)
        )

    def _in_a_loop(self, args, kwargs):
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        arrays = {k: asarray(v) for k, v in given.items() if k not in self.excluded}
        cores = dict.fromkeys(arrays, 0)
        if self.signature is not None:
            wanted = re.findall(r"\(([^)]*)\)", self.signature.split("->")[0])
            cores.update({k: len(dims.split(",")) if dims.strip() else 0 for k, dims in enumerate(wanted)})
        outer = np.broadcast_shapes(*(x.shape[: x.ndim - cores[k]] for k, x in arrays.items()))
        arrays = {k: np.broadcast_to(x, outer + x.shape[x.ndim - cores[k] :]) for k, x in arrays.items()}
        if 0 in outer:
            raise ValueError("np.vectorize cannot run on traced arrays without entries")
        results = []
        for i in np.ndindex(outer):
            each = {**given, **{k: x[i] for k, x in arrays.items()}}
            results.append(self.pyfunc(*(each[k] for k in range(len(args))), **{k: each[k] for k in kwargs}))
        if not isinstance(results[0], tuple):
            return self._joined(results, outer, 0)
        return tuple(self._joined(r, outer, k) for k, r in enumerate(zip(*results, strict=True)))

    def _joined(self, results, outer: tuple[int, ...], k: int):
        """The results at all entries. NumPy gives them the dtype of the first, unless otypes names one."""
        x = asarray(list(results))
        otypes = self.otypes or ""
        dtype = np.dtype(otypes[k]) if otypes else _dtype_of(results[0])
        if not otypes and self.signature is None and not np.can_cast(x.dtype, dtype, "same_kind"):
            raise DtypeError.at(
                "np.vectorize",
                argument="otypes",
                got=f"none; the first entry is {dtype}, and others are {x.dtype}",
                need="the dtype of the results: NumPy would cut them to that of the first",
                mend=f"np.vectorize(f, otypes=[{str(x.dtype)!r}])",
            )
        x = x if self.signature is not None and not otypes else x.astype(dtype)
        return np.reshape(x, outer + x.shape[1:])


def _dtype_of(x) -> np.dtype:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


twins["vectorize"] = vectorize


# What the standard of array namespaces asks for, and NumPy's functions do not take


def _more(fun):
    """Declare a function that takes what NumPy's takes, and more."""

    def declare(f):
        twins[fun.__name__] = functools.wraps(fun, updated=())(f)
        return f

    return declare


@_more(np.sort)
def sort(a, axis=-1, kind=None, order=None, *, stable=None, descending=False):
    if not descending:
        return np.sort(a, axis, kind, order, stable=stable)
    a, axis = (np.ravel(a), 0) if axis is None else (a, axis)
    return np.flip(np.sort(np.flip(a, axis), axis, kind, order, stable=stable), axis)


@_more(np.argsort)
def argsort(a, axis=-1, kind=None, order=None, *, stable=None, descending=False):
    if not descending:
        return np.argsort(a, axis, kind, order, stable=stable)
    a, axis = (np.ravel(a), 0) if axis is None else (a, axis)
    # Flipped before and after, so that of equals the first stays the first.
    return np.shape(a)[axis] - 1 - np.flip(np.argsort(np.flip(a, axis), axis, kind, order, stable=stable), axis)


@_more(np.diff)
def diff(a, n=1, axis=-1, prepend=None, append=None):
    ends = {"prepend": prepend, "append": append}
    return np.diff(a, n, axis, **{name: end for name, end in ends.items() if end is not None})


@_more(np.finfo)
def finfo(dtype):
    return np.finfo(_dtype_in(dtype))


@_more(np.iinfo)
def iinfo(dtype):
    return np.iinfo(_dtype_in(dtype))


def _dtype_in(x):
    """The dtype of an array; other things as they are."""
    return x.dtype if hasattr(x, "dtype") and not isinstance(x, type) else x


def _frequencies(fun):
    def frequencies(n, d=1.0, dtype=None, device=None):
        ans = fun(n, d, device=device)
        return ans if dtype is None else ans.astype(dtype)

    return functools.wraps(fun)(frequencies)


fftfreq, rfftfreq = _frequencies(np.fft.fftfreq), _frequencies(np.fft.rfftfreq)

# The namespace

_CREATORS = (
    "arange array asanyarray asarray ascontiguousarray asfortranarray empty eye from_dlpack full fromfunction identity "
    "indices linspace ones tri zeros"
).split()


class Namespace(types.ModuleType):
    """The names of NumPy, for Arrays whose values are of `module`: numpy, or cupy, whose arrays it then makes.

    stated: made arrays are Arrays too, with the state of bare data, so that all arrays of a body are of one kind.
    """

    def __init__(self, module=np, stated: bool = False):
        super().__init__("spmd.numpy", __doc__)
        self._module = module
        self._stated = stated

    def __getattr__(self, name: str):
        if name == "fft":
            self.fft = self._of_fft()
            return self.fft
        if name == "special" and "scipy.special" in sys.modules:
            return _SPECIAL
        if name.startswith("_") and name not in ("__array_namespace_info__", "__array_api_version__", "__version__"):
            raise AttributeError(f"spmd.numpy has no attribute {name!r}")
        found = twins.get(name)
        if found is None:
            found = getattr(np, name)
        if name in _CREATORS and (self._stated or self._module is not np):
            found = self._creator(name, found)
        setattr(self, name, found)
        return found

    def __dir__(self):
        return sorted({*dir(np), *np.__all__})

    def _of_fft(self):
        """numpy.fft, and frequencies of this namespace's kind of arrays."""
        part = types.ModuleType("spmd.numpy.fft", np.fft.__doc__)
        vars(part).update({name: getattr(np.fft, name) for name in np.fft.__all__})
        for found in (fftfreq, rfftfreq):
            made = found if self._module is np else _frequencies(_anywhere(getattr(self._module.fft, found.__name__)))
            plain = self._module is np and not self._stated
            setattr(part, found.__name__, found if plain else self._creator(found.__name__, found, made))
        return part

    def _creator(self, name: str, found: Callable, other: Callable | None = None) -> Callable:
        """A function that makes arrays, of this namespace's kind where no Array says whose it is to be."""
        made: Callable = other or getattr(self._module, name, found)

        @functools.wraps(found)
        def create(*args, device=None, **kwargs):
            if find((args, kwargs), []):
                return found(*args, **kwargs)
            if self._module is not np:
                with device or contextlib.nullcontext():
                    ans = made(*args, **kwargs)
            else:
                ans = made(*args, **kwargs) if device is None else made(*args, device=device, **kwargs)
            return wrap(ans, tracer.mixing.ambient()) if self._stated else ans

        return create


class _Special:
    """Where scipy.special looks for functions, with SCIPY_ARRAY_API=1: its ufuncs, which NumPy's protocols reach."""

    def __getattr__(self, name: str):
        fun = getattr(sys.modules["scipy.special"], name)
        return getattr(fun, "__wrapped__", fun)


_SPECIAL = _Special()


def _anywhere(fun: Callable) -> Callable:
    """A function that is told no device."""
    return lambda *args, device: fun(*args)


namespace = Namespace()
_others: dict[tuple[str, bool], Namespace] = {("numpy", False): namespace}


def of(x: Any, api_version: Any = None) -> Namespace:
    """The namespace for the value of an Array. Raises ValueError for a version of the standard that NumPy lacks."""
    if api_version is not None:
        np.empty(0).__array_namespace__(api_version=api_version)
    name = type(value_of(x)).__module__.partition(".")[0]
    key = (name if name == "cupy" else "numpy", x.state is not None)
    if key not in _others:
        _others[key] = Namespace(sys.modules[key[0]], key[1])
    return _others[key]


def _array_namespace(self, *, api_version=None):
    return of(self, api_version)


Array.__array_namespace__ = _array_namespace  # type: ignore[attr-defined]
creators.update(
    {
        getattr(np, name): create
        for name in "arange array asanyarray asarray empty eye full identity ones tri zeros".split()
    }
)
