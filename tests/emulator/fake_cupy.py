"""A module that stands in for `cupy`: its arrays lie in NumPy's memory, and its kernels are emulated.

It keeps CuPy's rules that programs stumble over: no mixing with NumPy's arrays, no silent conversion to them, arrays
without dimensions in place of scalars, no flag `writeable`, ufuncs and functions of NumPy dispatched to CuPy's own.
"""

from __future__ import annotations

import operator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import emulator

__all__ = ["make"]


class Flags:
    def __init__(self, flags: Any):
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.owndata, self.forc = flags.owndata, flags.forc

    def __getitem__(self, name: str) -> bool:
        return {"C_CONTIGUOUS": self.c_contiguous, "F_CONTIGUOUS": self.f_contiguous, "OWNDATA": self.owndata}[name]


class ndarray:
    """An array "on the device"."""

    __slots__ = ("__weakref__", "_a")
    __array_priority__ = 100

    def __init__(self, shape=(), dtype=float, memptr=None, strides=None, order="C"):
        self._a = np.empty(shape, dtype, order)

    shape = property(lambda self: self._a.shape, lambda self, shape: setattr(self._a, "shape", shape))
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    strides = property(lambda self: self._a.strides)
    flags = property(lambda self: Flags(self._a.flags))
    base = property(lambda self: None if self._a.base is None else wrap(self._a.base))
    device = property(lambda self: Device(0))
    data = property(lambda self: SimpleNamespace(ptr=self._a.ctypes.data, mem=None, device_id=0))
    T = property(lambda self: wrap(self._a.T))
    mT = property(lambda self: wrap(self._a.mT))
    real = property(lambda self: wrap(self._a.real))
    imag = property(lambda self: wrap(self._a.imag))
    flat = property(lambda self: wrap(self._a.reshape(-1)))

    @property
    def __cuda_array_interface__(self) -> dict:
        found = dict(self._a.__array_interface__)
        found.pop("offset", None)
        return {**found, "version": 3, "stream": 1, "data": (self._a.ctypes.data, False)}

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct it.")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if any(type(x) is not ndarray and not np.isscalar(x) for x in inputs):
            if any(hasattr(type(x), "__array_ufunc__") and not isinstance(x, np.ndarray | ndarray) for x in inputs):
                return NotImplemented
            refuse(next(x for x in inputs if type(x) is not ndarray and not np.isscalar(x)))
        return call(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, func, types, args, kwargs):
        if any(t not in (ndarray, np.ndarray) for t in types):
            return NotImplemented
        return call(func, args, kwargs)

    def get(self, stream=None, order="C", out=None, blocking=True):
        count("get")
        if out is not None:
            out[...] = self._a
            return out
        return self._a.copy()

    def set(self, arr, stream=None):
        self._a[...] = arr

    def item(self, *args):
        count("item")
        return self._a.item(*args)

    def tolist(self):
        count("tolist")
        return self._a.tolist()

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        return wrap(self._a.astype(dtype, order=order, copy=copy))

    def __getitem__(self, index):
        return wrap(self._a[bare(index)])

    def __setitem__(self, index, value):
        if isinstance(value, np.ndarray) and value.ndim:
            refuse(value)
        self._a[bare(index)] = bare(value)

    def __len__(self):
        return len(self._a)

    def __iter__(self):
        return (wrap(x) for x in self._a)

    def __repr__(self):
        return repr(self._a)

    def __format__(self, spec):
        return format(self._a.item(), spec) if spec else str(self._a)

    def __hash__(self):
        raise TypeError("unhashable type: 'cupy.ndarray'")

    def __reduce__(self):
        return wrap, (self._a,)

    def __dlpack__(self, **kwargs):
        return self._a.__dlpack__()

    def __dlpack_device__(self):
        return self._a.__dlpack_device__()


ndarray.__module__ = "cupy"


def refuse(x: Any) -> None:
    raise TypeError(f"Unsupported type {type(x)}")


synchronised: list[str] = []
"""What has made the host wait for the device, in order."""


def count(what: str) -> None:
    synchronised.append(what)


def wrap(x: Any) -> Any:
    """What NumPy made, as CuPy gives it: arrays without dimensions stand for scalars."""
    if isinstance(x, np.ndarray | np.generic):
        made = ndarray.__new__(ndarray)
        made._a = np.asarray(x)
        return made
    if isinstance(x, tuple | list):
        parts = [wrap(y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def bare(x: Any) -> Any:
    if type(x) is ndarray:
        return x._a
    if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
        return type(x)(bare(y) for y in x)
    if isinstance(x, dict):
        return {k: bare(v) for k, v in x.items()}
    return x


def call(function: Any, args: Any, kwargs: Any) -> Any:
    out = kwargs.get("out")
    ans = function(*bare(args), **bare(kwargs))
    if out is None or (isinstance(out, tuple) and all(o is None for o in out)):
        return wrap(ans)
    return out[0] if isinstance(out, tuple) and len(out) == 1 else out


def method(name: str):
    def run(self, *args, **kwargs):
        return call(getattr(self._a, name), args, kwargs)

    run.__name__ = name
    return run


for name in (
    "all any argmax argmin argsort choose clip compress conj conjugate copy cumprod cumsum diagonal dot max mean min "
    "nonzero partition prod put ravel repeat reshape round searchsorted sort squeeze std sum swapaxes take trace "
    "transpose var view fill flatten"
).split():
    setattr(ndarray, name, method(name))


def operation(name: str, ufunc: np.ufunc, reflected: bool):
    def run(self, other):
        if isinstance(other, np.ndarray) and type(other) is np.ndarray and other.ndim:
            refuse(other)
        if hasattr(type(other), "__array_ufunc__") and not isinstance(other, np.ndarray | np.generic | ndarray):
            return NotImplemented
        return call(ufunc, (other, self) if reflected else (self, other), {})

    run.__name__ = name
    return run


_BINARY = {
    **{n: getattr(np, u) for n, u in {"add": "add", "sub": "subtract", "mul": "multiply", "mod": "remainder"}.items()},
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "pow": np.power,
    "matmul": np.matmul,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
    "divmod": np.divmod,
}
for name, ufunc in _BINARY.items():
    setattr(ndarray, f"__{name}__", operation(f"__{name}__", ufunc, False))
    setattr(ndarray, f"__r{name}__", operation(f"__r{name}__", ufunc, True))

    def in_place(self, other, ufunc=ufunc):
        ufunc(self._a, bare(other), out=self._a)
        return self

    setattr(ndarray, f"__i{name}__", in_place)
for name, ufunc in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    setattr(ndarray, f"__{name}__", operation(f"__{name}__", ufunc, False))
for name, ufunc in {"neg": np.negative, "pos": np.positive, "abs": np.absolute, "invert": np.invert}.items():
    setattr(ndarray, f"__{name}__", lambda self, ufunc=ufunc: wrap(ufunc(self._a)))
for name, kind in {"bool": bool, "int": int, "float": float, "complex": complex, "index": operator.index}.items():

    def convert(self, kind=kind, name=name):
        count(f"__{name}__")
        return kind(self._a)

    setattr(ndarray, f"__{name}__", convert)


class Device:
    """The only device."""

    def __init__(self, device: int | None = 0):
        self.id = 0
        self.attributes = {"MultiProcessorCount": 4}
        self.compute_capability = "90"

    def __eq__(self, other):
        return isinstance(other, Device)

    def __hash__(self):
        return 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def use(self):
        pass

    def synchronize(self):
        count("Device.synchronize")


class RawModule:
    """A source and the instances of its templates, compiled by g++: all that are declared over the source at once."""

    def __init__(self, *, code, options=(), name_expressions=(), **more):
        from spmd.kernels.gpu.source import KERNELS, text

        declared = [k.expression(types) for k in KERNELS if text(k.file) == code for types in k.types]
        self.names = tuple(dict.fromkeys([*declared, *name_expressions]))
        self.library = emulator.library(code, self.names)

    def get_function(self, name: str):
        return emulator.Function(self.library, self.names.index(name), lambda a: a._a.ctypes.data)


def asarray(a, dtype=None, order=None, *, blocking=False):
    if type(a) is ndarray:
        return a if dtype is None or a.dtype == dtype else a.astype(dtype)
    if isinstance(a, list | tuple):
        a = np.asarray([bare(x) for x in a])
    return wrap(np.array(a, dtype=dtype, order="C" if order is None else order))


def lifted(function: Any):
    def run(*args, **kwargs):
        for x in (*args, *kwargs.values()):
            if type(x) is np.ndarray and x.ndim:
                refuse(x)
        return call(function, args, kwargs)

    run.__name__ = getattr(function, "__name__", "function")
    return run


class Ufunc:
    """A ufunc of CuPy."""

    def __init__(self, ufunc: np.ufunc):
        self.ufunc = ufunc
        self.__name__ = ufunc.__name__

    def __call__(self, *args, **kwargs):
        return lifted(self.ufunc)(*args, **kwargs)

    def __getattr__(self, name: str):
        return lifted(getattr(self.ufunc, name))


class Module(ModuleType):
    """Names of NumPy, for arrays of the device."""

    source: Any = np

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.source, name)
        if isinstance(found, np.ufunc):
            made: Any = Ufunc(found)
        elif isinstance(found, type) or not callable(found):
            made = found
        else:
            made = lifted(found)
        setattr(self, name, made)
        return made


def make() -> dict[str, ModuleType]:
    """The modules, by the names under which they are imported."""
    cupy, cuda, runtime = Module("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.runtime")
    cupy.__path__ = []  # type: ignore[attr-defined]
    cupy.ndarray, cupy.RawModule, cupy.asarray, cupy.array = ndarray, RawModule, asarray, asarray
    cupy.asnumpy = lambda a, **kwargs: a.get() if type(a) is ndarray else np.asarray(a)
    cupy.get_array_module = lambda *args: cupy if any(type(a) is ndarray for a in args) else np
    cupy.ascontiguousarray = lambda a, dtype=None: wrap(np.ascontiguousarray(bare(asarray(a)), dtype))
    cupy.ndarray.__qualname__ = "ndarray"
    cupy.cuda, cuda.Device, cuda.runtime = cuda, Device, runtime
    runtime.getDeviceCount = lambda: 1
    cuda.get_current_stream = lambda: SimpleNamespace(synchronize=lambda: count("Stream.synchronize"))
    for name in ("linalg", "fft", "random"):
        part = Module(f"cupy.{name}")
        part.source = getattr(np, name)
        setattr(cupy, name, part)
    return {
        "cupy": cupy,
        "cupy.cuda": cuda,
        "cupy.cuda.runtime": runtime,
        "cupy.linalg": cupy.linalg,
        "cupy.fft": cupy.fft,
    }


@contextmanager
def nothing_waits():
    """Fails where the host waits for the device inside."""
    before = len(synchronised)
    yield
    assert synchronised[before:] == [], f"the host waited for the device: {synchronised[before:]}"
