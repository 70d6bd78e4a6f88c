"""NumPy's functions as one namespace for bare, stated and traced arrays: `spmd.numpy`, and `x.__array_namespace__()`.

Most functions dispatch on an Array by NumPy's protocols: those are NumPy's own here. Creation functions, and functions
that dispatch on some of their arguments only, have overrides. An override records if an Array is among its arguments;
otherwise it calls NumPy's function.
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
    asarray,
    bare_slice,
    create,
    fromiter,
    grid_entries,
    override,
    override_contiguous,
    override_converter,
    require_invariant_ends,
)
from spmd.autodiff.dispatch import creators, dispatch
from spmd.autodiff.primitive import handlers, overrides
from spmd.autodiff.staging.recorder import bared, slot_of
from spmd.autodiff.tracer import Array, bare, find, value_of
from spmd.errors import DtypeError, StateError, TracedConversionError

__all__ = ["Namespace", "namespace", "of"]
override_converter(np.asanyarray)


override_contiguous(np.ascontiguousarray)
override_contiguous(np.asfortranarray)


overrides["fromiter"] = fromiter


class _Grid:
    """np.mgrid or np.ogrid, with ends that may be traced."""

    def __init__(self, name: str):
        self.name = name
        self.__doc__ = f"As np.{name}."

    def __getitem__(self, key):
        arrays = find(key, [])
        if not arrays:
            return getattr(np, self.name)[key]
        require_invariant_ends(f"np.{self.name}", *arrays)
        slices = key if isinstance(key, tuple) else (key,)
        plain = np.ogrid[tuple(map(bare_slice, slices))]
        parts = [
            np.reshape(grid_entries(s, p.size), p.shape).astype(p.dtype) for s, p in zip(slices, plain, strict=True)
        ]
        if not isinstance(key, tuple):
            return parts[0]
        return tuple(parts) if self.name == "ogrid" else np.stack(np.broadcast_arrays(*parts))


overrides.update({name: _Grid(name) for name in ("mgrid", "ogrid")})


def _host_placeholder(x):
    """For an array of a device, zeros on the host of its shape and dtype; anything else unchanged."""
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
        # NumPy joins the positions of all entries; the result says where each entry goes.
        entries: list = []
        positions = tuple(self._positions(item, entries) for item in items)
        dtype = numpys[
            tuple(bare_slice(s) if isinstance(s, slice) else _host_placeholder(bared(bare(s))) for s in items)
        ].dtype
        return np.concatenate(entries).astype(dtype)[numpys[positions]]

    def _positions(self, item, entries: list):
        """The item with positions in place of its entries, which are appended to `entries`."""
        if isinstance(item, str):
            return item
        at = sum(e.size for e in entries)
        if isinstance(item, slice):
            require_invariant_ends(f"np.{self.name}", *find(item, []))
            n = np.r_[bare_slice(item)].size
            start = 0 if item.start is None else item.start
            linear = isinstance(item.step, complex)
            entries.append(np.linspace(start, item.stop, n) if linear else asarray(grid_entries(item, n)))
            return slice(at, at + n)
        x = asarray(item)
        entries.append(np.ravel(x))
        is_scalar = type(bare(item)) in np.ScalarType
        return at if is_scalar else np.reshape(np.arange(at, at + x.size), x.shape)


overrides.update({name: _Joiner(name) for name in ("r_", "c_")})


# Functions with arguments on which NumPy does not dispatch


def _lifted(x):
    """x as an Array, on which NumPy dispatches."""
    return x if type(x) is Array else Array(asarray(x), tracer.mixing.ambient())


def _lift_first(fun) -> None:
    """NumPy dispatches on the first argument of this function only: make it an Array if a later one is."""

    @override(fun)
    def run(first, *rest, **kwargs):
        return dispatch(fun, (_lifted(first), *rest), kwargs)


for _name in "full_like interp nanmean nanstd nanvar pad take trapezoid unwrap".split():
    _lift_first(getattr(np, _name))


def _from_initial(name: str, join: Callable, neutral: float | None = None) -> None:
    """A reduction that may start from an Array."""
    fun = getattr(np, name)

    @override(fun)
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
overrides.update(amax=overrides["max"], amin=overrides["min"])


@override(np.nan_to_num)
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


@override(np.select)
def select(condlist, choicelist, default=0):
    return dispatch(np.select, (condlist, choicelist, default), {})


@override(np.kaiser)
def kaiser(M, beta):
    n, middle = np.arange(0, M), (M - 1) / 2
    return np.ones(M) if M == 1 else np.i0(beta * np.sqrt(1 - ((n - middle) / middle) ** 2.0)) / np.i0(beta)


for _fun in (np.format_float_positional, np.format_float_scientific):
    override(_fun)(lambda x, *args, _fun=_fun, **kwargs: _fun(bare(x), *args, **kwargs))


@override(np.ndenumerate)
def ndenumerate(arr):
    return ((i, arr[i]) for i in np.ndindex(arr.shape))


# Functions that call a function, which may return Arrays even for bare arguments


def _unless_traced(numpys: Callable, composed: Callable) -> Any:
    """The result of NumPy; that of `composed` if NumPy raises because it met an Array."""
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

    overrides[fun.__name__] = call


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


overrides["vectorize"] = vectorize


# Options of the array API standard that NumPy's functions lack


def _extend(fun):
    """Declare a function with more options than NumPy's."""

    def declare(f):
        overrides[fun.__name__] = functools.wraps(fun, updated=())(f)
        return f

    return declare


@_extend(np.sort)
def sort(a, axis=-1, kind=None, order=None, *, stable=None, descending=False):
    if not descending:
        return np.sort(a, axis, kind, order, stable=stable)
    a, axis = (np.ravel(a), 0) if axis is None else (a, axis)
    return np.flip(np.sort(np.flip(a, axis), axis, kind, order, stable=stable), axis)


@_extend(np.argsort)
def argsort(a, axis=-1, kind=None, order=None, *, stable=None, descending=False):
    if not descending:
        return np.argsort(a, axis, kind, order, stable=stable)
    a, axis = (np.ravel(a), 0) if axis is None else (a, axis)
    # Flipped before and after, so that equal entries keep their order.
    return np.shape(a)[axis] - 1 - np.flip(np.argsort(np.flip(a, axis), axis, kind, order, stable=stable), axis)


@_extend(np.diff)
def diff(a, n=1, axis=-1, prepend=None, append=None):
    ends = {"prepend": prepend, "append": append}
    return np.diff(a, n, axis, **{name: end for name, end in ends.items() if end is not None})


@_extend(np.finfo)
def finfo(dtype):
    return np.finfo(_dtype_in(dtype))


@_extend(np.iinfo)
def iinfo(dtype):
    return np.iinfo(_dtype_in(dtype))


def _dtype_in(x):
    """The dtype of an array; anything else unchanged."""
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
    """The names of NumPy, for Arrays whose values are arrays of `module`: numpy or cupy.

    stated: creation functions return Arrays with the state of bare data, so that a body has arrays of one type.
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
        fun = overrides.get(name)
        if fun is None:
            fun = getattr(np, name)
        if name in _CREATORS and (self._stated or self._module is not np):
            fun = self._creator(name, fun)
        setattr(self, name, fun)
        return fun

    def __dir__(self):
        return sorted({*dir(np), *np.__all__})

    def _of_fft(self):
        """numpy.fft, with fftfreq and rfftfreq for arrays of this namespace's module."""
        part = types.ModuleType("spmd.numpy.fft", np.fft.__doc__)
        vars(part).update({name: getattr(np.fft, name) for name in np.fft.__all__})
        for fun in (fftfreq, rfftfreq):
            create_array = (
                fun if self._module is np else _frequencies(_anywhere(getattr(self._module.fft, fun.__name__)))
            )
            plain = self._module is np and not self._stated
            setattr(part, fun.__name__, fun if plain else self._creator(fun.__name__, fun, create_array))
        return part

    def _creator(self, name: str, fun: Callable, other: Callable | None = None) -> Callable:
        """A creation function, for arrays of this namespace's module unless an Array is among the arguments."""
        create_array: Callable = other or getattr(self._module, name, fun)

        @functools.wraps(fun)
        def create(*args, device=None, **kwargs):
            if find((args, kwargs), []):
                return fun(*args, **kwargs)
            if self._module is not np:
                with device or contextlib.nullcontext():
                    ans = create_array(*args, **kwargs)
            else:
                ans = create_array(*args, **kwargs) if device is None else create_array(*args, device=device, **kwargs)
            return wrap(ans, tracer.mixing.ambient()) if self._stated else ans

        return create


class _Special:
    """The namespace in which scipy.special looks for functions, with SCIPY_ARRAY_API=1: its own ufuncs."""

    def __getattr__(self, name: str):
        fun = getattr(sys.modules["scipy.special"], name)
        return getattr(fun, "__wrapped__", fun)


_SPECIAL = _Special()


def _anywhere(fun: Callable) -> Callable:
    """A function that ignores `device`."""
    return lambda *args, device: fun(*args)


namespace = Namespace()
_namespaces: dict[tuple[str, bool], Namespace] = {("numpy", False): namespace}


def of(x: Any, api_version: Any = None) -> Any:
    """The namespace for the value of an Array. Raises ValueError for a version of the standard that NumPy lacks."""
    value = slot_of(value_of(x))
    if not isinstance(value, np.ndarray | np.generic) and not devices.is_array(value):
        return value.__array_namespace__(api_version=api_version)
    if api_version is not None:
        np.empty(0).__array_namespace__(api_version=api_version)
    name = type(value).__module__.partition(".")[0]
    key = (name if name == "cupy" else "numpy", x.state is not None)
    if key not in _namespaces:
        _namespaces[key] = Namespace(sys.modules[key[0]], key[1])
    return _namespaces[key]


def _array_namespace(self, *, api_version=None):
    return of(self, api_version)


Array.__array_namespace__ = _array_namespace  # type: ignore[attr-defined]
creators.update(
    {
        getattr(np, name): create
        for name in "arange array asanyarray asarray empty eye full identity ones tri zeros".split()
    }
)
