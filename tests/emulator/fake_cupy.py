"""A module that stands in for `cupy`: its arrays lie in NumPy's memory, and its kernels are emulated.

It keeps CuPy's rules that programs stumble over: no mixing with NumPy's arrays, no silent conversion to them, arrays
without dimensions in place of scalars, no flag `writeable`, ufuncs and functions of NumPy dispatched to CuPy's own.
Where the real one is installed its names and their parameters are asked of it: what it lacks is missing here too.
`fake_cuda` has devices, streams and memory, and finds uses of memory that no event orders.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

import emulator
from emulator import fake_cuda
from emulator.fake_cuda import count, synchronised

__all__ = ["make", "ndarray", "nothing_waits", "synchronised", "wrap"]


class Flags:
    def __init__(self, flags: Any, owndata: bool):
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.owndata, self.forc, self.fnc = owndata, flags.forc, flags.fnc

    def __getitem__(self, name: str) -> bool:
        return {"C_CONTIGUOUS": self.c_contiguous, "F_CONTIGUOUS": self.f_contiguous, "OWNDATA": self.owndata}[name]


class ndarray:
    """An array "on the device"."""

    __slots__ = ("__weakref__", "_a", "_held")
    __array_priority__ = 100

    def __init__(self, shape=(), dtype=float, memptr=None, strides=None, order="C"):
        if memptr is None:
            self._a = np.empty(shape, dtype, order)
            self._held = fake_cuda.held_by(self._a)
        else:
            self._a, self._held = fake_cuda.lent(memptr, shape, dtype, strides)

    shape = property(lambda self: self._a.shape, lambda self, shape: setattr(self._a, "shape", shape))
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    strides = property(lambda self: self._a.strides)
    flags = property(lambda self: Flags(self._a.flags, self._is_whole()))
    base = property(lambda self: None if self._is_whole() else wrap(self._held.root))
    device = property(lambda self: fake_cuda.Device(self._held.memory.device_id))
    data = property(lambda self: fake_cuda.MemoryPointer(self._held.mem, self._a.ctypes.data - self._held.mem.ptr))
    T = property(lambda self: wrap(self._a.T))
    mT = property(lambda self: wrap(self._a.mT))
    real = property(lambda self: wrap(self._a.real))
    imag = property(lambda self: wrap(self._a.imag))
    flat = property(lambda self: wrap(self._a.reshape(-1)))

    def _is_whole(self) -> bool:
        return self._a is self._held.root or not isinstance(self._a.base, np.ndarray)

    @property
    def __cuda_array_interface__(self) -> dict:
        found = dict(self._a.__array_interface__)
        found.pop("offset", None)
        return {**found, "version": 3, "stream": 1, "data": (self._a.ctypes.data, False)}

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct it.")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        out = kwargs.get("out")
        if out is not None:
            if len(out) != 1:
                raise ValueError("The 'out' parameter must have exactly one array value")
            kwargs["out"] = out[0]
        for x in inputs:
            if type(x) is not ndarray and not np.isscalar(x) and not isinstance(x, np.ndarray):
                return NotImplemented
        places = sys.modules["cupy"], sys.modules["cupyx.scipy.special"]
        theirs = next((f for place in places if (f := getattr(place, ufunc.__name__, None)) is not None), None)
        if theirs is None:
            return NotImplemented
        return (theirs if method == "__call__" else getattr(theirs, method))(*inputs, **kwargs)

    def __array_function__(self, func, types, args, kwargs):
        try:
            module = functools.reduce(getattr, func.__module__.split(".")[1:], sys.modules["cupy"])
            theirs = getattr(module, func.__name__)
        except AttributeError:
            return NotImplemented
        if theirs is func or any(t not in (ndarray, np.ndarray) for t in types):
            return NotImplemented
        return theirs(*args, **kwargs)

    def get(self, stream=None, order="C", out=None, blocking=True):
        with self.device:
            if blocking:
                count("get")
            self._held.memory.read(self._a)
        if out is not None:
            out[...] = self._a
            return out
        return self._a.copy(order=order)

    def set(self, arr, stream=None):
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        self._held.memory.write(self._a)
        self._a[...] = arr

    def item(self, *args):
        count("item")
        return self._a.item(*args)

    def tolist(self):
        count("tolist")
        return self._a.tolist()

    def tobytes(self, order="C"):
        count("tobytes")
        return self._a.tobytes(order)

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        with self.device:
            return self.copy()

    def copy(self, order="C"):
        memory = self._held.memory
        if memory.device_id == fake_cuda.Device().id:
            return call(self._a.copy, (), {"order": order}, [self])
        made = ndarray(self.shape, self.dtype)
        memory.read(self._a, anywhere=True)
        made._a[...] = self._a
        return made

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        dtype = np.dtype(dtype)
        if not copy and dtype == self.dtype and order == "K":
            return self
        return call(self._a.astype, (dtype,), {"order": order, "copy": copy}, [self])

    def __getitem__(self, index):
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, ndarray | np.ndarray) and part.dtype.kind == "b" and part.ndim:
                count("x[mask]")  # how many entries there are has to be known
        return call(self._a.__getitem__, (index,), {}, [self])

    def __setitem__(self, index, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        use([index, value])
        basic = all(isinstance(i, int | slice | None | type(...)) for i in index) if isinstance(index, tuple) else False
        part = self._a[bare(index)] if basic or isinstance(index, slice | int) else self._a
        self._held.memory.write(part if isinstance(part, np.ndarray) else self._a)
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

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if stream not in (None, -1):
            event = fake_cuda.get_current_stream().record()
            for other in streams_of(stream):
                other.wait_event(event)
        versioned = max_version is not None and max_version >= (1, 0)
        a = self._a
        if not a.flags.writeable:  # a flag that arrays of a device have not
            _kept.append(self)
            a = np.ndarray(a.shape, a.dtype, (ctypes.c_char * a.nbytes).from_address(a.ctypes.data), 0, a.strides)
        capsule = a.__dlpack__(max_version=max_version) if versioned else a.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        tensor = get(capsule, b"dltensor_versioned" if versioned else b"dltensor")
        ctypes.c_int32.from_address(tensor + (40 if versioned else 8)).value = 2  # the type of the device: CUDA
        return capsule

    def __dlpack_device__(self):
        return 2, self._held.memory.device_id


ndarray.__module__ = "cupy"


_kept: list[ndarray] = []


def streams_of(ptr: int) -> list[Any]:
    """The stream of an address, as DLPack tells it: 1 is the legacy default stream."""
    current = fake_cuda.get_current_stream()
    return [current if current.ptr == ptr else fake_cuda.Stream.null]


def refuse(x: Any) -> None:
    raise TypeError(f"Unsupported type {type(x)}")


def arrays_in(tree: Any) -> Iterator[ndarray]:
    """The arrays of the device in arguments."""
    if type(tree) is ndarray:
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from arrays_in(x)
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from arrays_in(x)


def use(read: Any, written: Any = ()) -> None:
    """An operation is submitted that reads some arrays, and writes others."""
    for x in arrays_in(read):
        x._held.memory.read(x._a)
    for x in arrays_in(written):
        x._held.memory.write(x._a)


def wrap(x: Any) -> Any:
    """What NumPy made, as CuPy gives it: arrays without dimensions stand for scalars."""
    if isinstance(x, np.ndarray | np.generic):
        made = ndarray.__new__(ndarray)
        made._a = np.asarray(x)
        made._held = fake_cuda.held_by(made._a)
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


def call(function: Any, args: Any, kwargs: Any, also: Any = ()) -> Any:
    """An operation of NumPy on the data of arrays; `also` are arrays that it uses without being given them."""
    out = kwargs.get("out")
    use([args, {k: v for k, v in kwargs.items() if k != "out"}, also], [out])
    ans = function(*bare(args), **bare(kwargs))
    if out is None or (isinstance(out, tuple) and all(o is None for o in out)):
        return wrap(ans)
    return out[0] if isinstance(out, tuple) and len(out) == 1 else out


def method(name: str):
    def run(self, *args, **kwargs):
        if name == "ptp":  # of NumPy's arrays it is no method any more
            return call(np.ptp, (self, *args), kwargs)
        if name in ("sort", "partition", "fill", "put"):  # in place
            use(args, [self])
            return getattr(self._a, name)(*bare(args), **bare(kwargs))
        return call(getattr(self._a, name), args, kwargs, [self])

    run.__name__ = name
    return run


for name in (
    "all any argmax argmin argpartition argsort choose clip compress conj conjugate cumprod cumsum diagonal dot max "
    "mean min nonzero partition prod ptp put ravel repeat reshape round searchsorted sort squeeze std sum "
    "swapaxes take trace transpose var view fill flatten"
).split():
    setattr(ndarray, name, method(name))


def operation(name: str, ufunc: np.ufunc, reflected: bool):
    def run(self, other):
        if isinstance(other, np.ndarray):
            refuse(other)
        if hasattr(type(other), "__array_ufunc__") and not isinstance(other, np.generic | ndarray):
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
    if name in ("matmul", "divmod"):
        continue

    def in_place(self, other, ufunc=ufunc):
        if isinstance(other, np.ndarray):
            refuse(other)
        use([other], [self])
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
    setattr(ndarray, f"__{name}__", lambda self, ufunc=ufunc: call(ufunc, (self,), {}))
for name, kind in {"bool": bool, "int": int, "float": float, "complex": complex}.items():

    def convert(self, kind=kind, name=name):
        count(f"__{name}__")
        return kind(self._a)

    setattr(ndarray, f"__{name}__", convert)


class RawModule:
    """A source and the instances of its templates, compiled by g++: all that are declared over the source at once."""

    def __init__(self, *, code, options=(), name_expressions=(), **more):
        from spmd.kernels.gpu.source import KERNELS, text

        declared = [k.expression(types) for k in KERNELS if text(k.file) == code for types in k.types]
        self.names = tuple(dict.fromkeys([*declared, *name_expressions]))
        self.library = emulator.library(code, self.names)
        self.code = code

    def get_function(self, name: str):
        writes = emulator.writes(self.code, name.partition("<")[0])
        return emulator.Function(self.library, self.names.index(name), pointer, writes)


def pointer(a: ndarray, written: bool) -> int:
    """The address of an argument of a kernel, which may read there, and write if it says so."""
    use([a])
    if written:
        a._held.memory.write(a._a)
    return a._a.ctypes.data


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    if type(a) is ndarray:
        if a._held.memory.device_id != fake_cuda.Device().id:
            return a.copy().astype(dtype or a.dtype, copy=False)
        return a if (dtype is None or a.dtype == dtype) and not copy else a.astype(dtype or a.dtype)
    if isinstance(a, list | tuple):
        a = np.asarray([bare(x) for x in a])
    if hasattr(type(a), "__array_ufunc__") and not isinstance(a, np.ndarray | np.generic):
        a = np.asarray(a)
    made = np.array(a, dtype=dtype, order="C" if order in (None, "K", "A") else order)
    if made.dtype.kind in "OSUMmgG" or made.dtype.char in "gG":
        raise ValueError(f"Unsupported dtype {made.dtype}")
    return wrap(made)


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    made = asarray(obj, dtype, order, copy=copy or None)
    return made if made.ndim >= ndmin else made.reshape((1,) * (ndmin - made.ndim) + made.shape)


def ascontiguousarray(a, dtype=None):
    a = asarray(a, dtype)
    if a.flags.c_contiguous:
        return a if a.ndim else a.reshape(1)
    return a.copy()


def from_dlpack(array, *, device=None, copy=None):
    if type(array) is ndarray:
        stream = fake_cuda.get_current_stream()
        array.__dlpack__(stream=stream.ptr or 1)
        return wrap(array._a)
    kind, number = array.__dlpack_device__()
    if int(kind) != 2:
        return wrap(np.from_dlpack(array))
    with fake_cuda.Device(number):
        capsule = array.__dlpack__(stream=fake_cuda.get_current_stream().ptr or 1)
        return wrap(np.from_dlpack(_Host(capsule)))


class _Host:
    """What NumPy takes for an array of the host, for that is where it lies."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **options):
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(get(self.capsule, b"dltensor") + 8).value = 1
        return self.capsule

    def __dlpack_device__(self):
        return 1, 0


_TAKE_HOST = {"take", "transpose", "split", "array_split", "vsplit", "hsplit", "dsplit", "asnumpy"}
"""Functions that take arrays of the host: where to take and to split."""

_WAITS = {
    *"allclose array_equal nonzero flatnonzero argwhere unique unique_values unique_counts extract compress".split(),
    *"intersect1d union1d setdiff1d setxor1d trim_zeros".split(),
}
"""Functions whose results tell the host something, the lengths of arrays say."""

_ABOUT = set("shape ndim size result_type can_cast iscomplexobj isrealobj may_share_memory shares_memory".split())
"""Functions that look at no entries."""

_QUANTILES = {"linear", "lower", "higher", "midpoint", "nearest"}
"""Methods of quantiles that there are."""

_WRAPPED = {"allclose", "array_equal", "array_equiv"}
"""Functions that give an array without dimensions where NumPy's give True or False."""


@functools.cache
def real() -> tuple[dict[str, list[str] | None], dict[str, list[str]]]:
    """What the real modules have: the names, and the parameters of functions; for ufuncs the dtypes that they take.

    Nothing where they are not installed.
    """
    code = """
import importlib.metadata as m, inspect, json, sys, warnings
warnings.filterwarnings("ignore")
import importlib
from cupy import ufunc
names, loops = {}, {}
for part in ("cupy", "cupy.linalg", "cupy.fft", "cupy.random", "cupyx.scipy.fft", "cupyx.scipy.special"):
    module = importlib.import_module(part)
    for name in dir(module):
        f = getattr(module, name)
        try:
            ps = inspect.signature(f).parameters.values() if callable(f) and not isinstance(f, type) else None
            variadic = ps is None or any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in ps)
            names[part + "." + name] = None if variadic else [p.name for p in ps]
        except (TypeError, ValueError):
            names[part + "." + name] = None
        if isinstance(f, ufunc):
            loops[part + "." + name] = ["".join(t.char for t in op.in_types) for op in f._ops.ops]
print(json.dumps([names, loops]))
"""
    try:
        from importlib import metadata

        version = next(d.version for d in metadata.distributions() if (d.name or "").startswith("cupy-cuda"))
    except StopIteration:
        return {}, {}
    path = emulator.folder() / f"cupy-{version}-has.json"
    if not path.exists():
        env = {k: v for k, v in os.environ.items() if k != "SPMD_TEST_DEVICE"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        path.write_text(done.stdout if done.returncode == 0 else "[{}, {}]")
    names, loops = json.loads(path.read_text())
    return names, loops


def lifted(function: Any, name: str = ""):
    parameters = real()[0].get(name)
    own = name.rpartition(".")[2]

    def run(*args, **kwargs):
        if parameters is not None:
            unknown = next((k for k in kwargs if k not in parameters), None)
            if unknown is not None:
                raise TypeError(f"{own}() got an unexpected keyword argument {unknown!r}")
            if len(args) > len(parameters):
                raise TypeError(f"{own}() takes {len(parameters)} positional arguments but {len(args)} were given")
        if own not in _TAKE_HOST:
            for x in hosts_in((*args, *kwargs.values())):
                refuse(x)
        if own in ("quantile", "percentile") and kwargs.get("method", "linear") not in _QUANTILES:
            raise ValueError(f"'{kwargs['method']}' method is not yet supported. Please use any other method.")
        if own in _WAITS:
            count(own)
        if own in _ABOUT:
            return function(*bare(args), **bare(kwargs))
        ans = call(function, args, kwargs)
        return wrap(np.asarray(ans)) if own in _WRAPPED else ans

    run.__name__ = own or getattr(function, "__name__", "function")
    return run


def hosts_in(tree: Any) -> Iterator[np.ndarray]:
    """The arrays of the host in arguments."""
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from hosts_in(x)


_REDUCES = {"reduce": ("add", "multiply"), "accumulate": ("add", "multiply"), "reduceat": ("add",)}
_SCATTERS = ("add", "subtract", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor")
"""Methods of ufuncs that CuPy has, and of which."""


def fits(dtype: np.dtype, char: str) -> bool:
    """Whether a loop of a ufunc takes arrays of a dtype; CuPy's letter for bfloat16 is E."""
    return dtype.name == "bfloat16" if char == "E" else np.can_cast(dtype, char)


class Ufunc:
    """A ufunc of CuPy."""

    def __init__(self, ufunc: Any, name: str):
        self.ufunc = ufunc
        self.__name__ = name.rpartition(".")[2]
        self.loops = real()[1].get(name)

    def __call__(self, *args, **kwargs):
        wrong = {k: v for k, v in kwargs.items() if k not in ("out", "dtype", "casting", "axes", "axis", "keepdims")}
        if wrong:
            raise TypeError(f"Wrong arguments {wrong}")
        given = [a for a in args if a is not None]
        if self.loops and not any(
            all(fits(a.dtype, t) for a, t in zip(given, loop, strict=False) if hasattr(a, "dtype"))
            for loop in self.loops
        ):
            kinds = tuple(getattr(a, "dtype", type(a)) for a in given)
            raise TypeError(f"Wrong type ({kinds}) of arguments for cupy_{self.__name__}")
        return lifted(self.ufunc)(*args, **kwargs)

    def _has(self, method: str, of: tuple[str, ...]) -> None:
        if self.__name__ not in of:
            raise NotImplementedError(f"`cupy_{self.__name__}.{method}` is not supported yet")

    def at(self, a, indices, b):
        self._has("at", _SCATTERS)
        if isinstance(b, np.ndarray):
            refuse(b)
        use([indices, b], [a])
        self.ufunc.at(a._a, bare(indices), bare(b))

    def reduce(self, array, axis=0, dtype=None, out=None, keepdims=False):
        self._has("reduce", _REDUCES["reduce"])
        return lifted(self.ufunc.reduce)(array, axis, dtype, out, keepdims)

    def accumulate(self, array, axis=0, dtype=None, out=None):
        self._has("accumulate", _REDUCES["accumulate"])
        return lifted(self.ufunc.accumulate)(array, axis, dtype, out)

    def reduceat(self, array, indices, axis=0, dtype=None, out=None):
        self._has("reduceat", _REDUCES["reduceat"])
        return lifted(self.ufunc.reduceat)(array, indices, axis, dtype, out)

    def outer(self, A, B, **kwargs):
        return lifted(self.ufunc.outer)(A, B, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__") or name in ("nin", "nout", "signature"):
            return getattr(self.ufunc, name)
        raise AttributeError(f"'cupy._core._kernel.ufunc' object has no attribute {name!r}")


class Module(ModuleType):
    """Names of NumPy, or of a part of SciPy, for arrays of the device."""

    source: Any = np

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        place = f"{self.__name__}.{name}"
        names, loops = real()
        if names and place not in names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = getattr(self.source, name)
        if place in loops or isinstance(found, np.ufunc):
            made: Any = Ufunc(found, place)
        elif isinstance(found, type) or not callable(found):
            made = found
        else:
            made = lifted(found, place)
        setattr(self, name, made)
        return made


class OfSciPy(Module):
    """A part of SciPy, which is imported when it is used."""

    @property
    def source(self) -> ModuleType:  # type: ignore[override]
        return importlib.import_module(self.__name__.replace("cupyx", "", 1).lstrip("."))


def make() -> dict[str, ModuleType]:
    """The modules, by the names under which they are imported."""
    cupy = Module("cupy")
    cupy.__path__ = []  # type: ignore[attr-defined]
    cupy.ndarray, cupy.RawModule, cupy.asarray, cupy.array = ndarray, RawModule, asarray, array
    cupy.asnumpy = lambda a, **kwargs: a.get() if type(a) is ndarray else np.asarray(a)
    cupy.get_array_module = lambda *args: cupy if any(type(a) is ndarray for a in args) else np
    cupy.ascontiguousarray, cupy.from_dlpack = ascontiguousarray, from_dlpack
    cupy.ndarray.__qualname__ = "ndarray"
    cupy.__spec__, cupy.__version__ = ModuleSpec("cupy", None), "14.2.0"
    cuda = fake_cuda.modules()
    cupy.cuda = cuda["cupy.cuda"]
    parts = {f"cupy.{name}": Module(f"cupy.{name}") for name in ("linalg", "fft", "random")}
    for name, part in parts.items():
        part.source = getattr(np, name[5:])
        setattr(cupy, name[5:], part)
    cupyx, scipy = ModuleType("cupyx"), ModuleType("cupyx.scipy")
    cupyx.scipy, cupyx.__path__, scipy.__path__ = scipy, [], []  # type: ignore[attr-defined]
    parts |= {"cupyx": cupyx, "cupyx.scipy": scipy}
    for name in ("fft", "special"):
        part = parts[f"cupyx.scipy.{name}"] = OfSciPy(f"cupyx.scipy.{name}")
        setattr(scipy, name, part)
    return {"cupy": cupy, **cuda, **parts}


@contextmanager
def nothing_waits():
    """Fails where the host waits for the device inside."""
    before = len(synchronised)
    yield
    assert synchronised[before:] == [], f"the host waited for the device: {synchronised[before:]}"
