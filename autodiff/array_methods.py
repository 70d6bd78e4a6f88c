"""Python's operators on an Array, and the methods and attributes of NumPy's arrays."""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import numpy as np

from spmd.autodiff import backward, cupy_fallback, tracer
from spmd.autodiff.apply import apply_binary, apply_unary, compute, is_elsewhere, is_ours, operand, takes_over, wrap
from spmd.autodiff.backward import is_sole_owner
from spmd.autodiff.dtypes import kind_of_dtype
from spmd.autodiff.indexing import astype
from spmd.autodiff.primitive import Primitive, handlers
from spmd.autodiff.tracer import OPERANDS, SEQUENCES, Array, value_of
from spmd.errors import DtypeError, StateError, TracedConversionError, describe, message

__all__ = ["ARITHMETIC", "COMPARISONS", "INTEGER_OPERATORS", "define_operators", "flatten", "operators", "transpose"]


ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
}
INTEGER_OPERATORS = {
    "floordiv": np.floor_divide,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
"""By Python's operators, the ufuncs: with a derivative, without one, and comparisons."""


def _define(symbol: str, run: Callable, whole: Callable, reflect: bool) -> None:
    """Give Array an operator, and its reflection, for whatever NumPy takes as an operand.

    whole: the ufunc, which asks operands that have a way of their own (`__array_ufunc__`), as it does for ndarrays.
    """
    ufunc = _IN_PLACE.get(symbol)

    def forward(self, other):
        if type(other) not in OPERANDS:
            if takes_over(type(other)):
                return NotImplemented if type(other).__array_ufunc__ is None else whole(self, other)
            if _comes_first(other) or (other := _operand(other)) is NotImplemented:
                return NotImplemented
        if ufunc is not None and getattr(self.value, "nbytes", 0) > backward.INPLACE_MIN:
            # As NumPy does with its own temporaries: the result overwrites a large array without other references.
            if getrefcount(self) == _TEMPORARY and taken(self, other):
                return run(self, other, self, ufunc)
            if type(other) is Array and getrefcount(other) == _TEMPORARY and taken(other, self):
                return run(self, other, other, ufunc)
        return run(self, other)

    def reflected(self, other):
        if type(other) not in OPERANDS:
            if takes_over(type(other)):
                return NotImplemented if type(other).__array_ufunc__ is None else whole(other, self)
            if (other := _operand(other)) is NotImplemented:
                return NotImplemented
        return run(other, self)

    for name, method in {symbol: forward, **({f"r{symbol}": reflected} if reflect else {})}.items():
        method.__name__, method.__qualname__ = f"__{name}__", f"Array.__{name}__"
        setattr(Array, method.__name__, method)


_IN_PLACE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide}


class _Probe:
    def __add__(self, other):
        return getrefcount(self)


def _count_temporary() -> int:
    """The reference count of a temporary operand; 0 if it equals that of a variable, or if a debugger holds it too."""
    variable = _Probe()
    temporary = _Probe() + 0
    return temporary if temporary <= 3 and temporary < variable + 0 else 0


_TEMPORARY = _count_temporary()


def taken(x: Array, other) -> bool:
    """Whether the result with another operand may overwrite the data of a temporary Array."""
    a, b = x.value, other.value if type(other) is Array else other
    if type(a) is not np.ndarray or a.dtype.kind not in "fc" or not is_sole_owner(getrefcount(a) - 1, a):
        return False
    return type(b) in (int, float) or (type(b) is np.ndarray and b.dtype is a.dtype and b.shape == a.shape)


def _comes_first(x) -> bool:
    """Whether an operand without `__array_ufunc__` handles operators with an ndarray itself, by its priority."""
    kind = type(x)
    if kind in SEQUENCES or isinstance(x, np.generic) or is_ours(kind) or is_elsewhere(kind):
        return False
    return getattr(x, "__array_priority__", 0.0) > 0.0


def _operand(x):
    """What an operator takes of x: lists become arrays; what is no number is left to its own operators."""
    if type(x) in SEQUENCES:
        return np.asarray(x)
    x = operand(x, "an operator")
    if isinstance(x, int | float | complex) or hasattr(x, "__array_function__") or isinstance(x, np.generic):
        return x
    return np.asarray(x) if hasattr(x, "__array__") else NotImplemented


def _beside_tensors(where: str) -> Exception:
    return TracedConversionError.at(
        where,
        got="an Array beside tensors, or in place of one",
        need="one or the other: torch does not record on this tape, nor NumPy on that of torch",
        mend=_BARE,
    )


operators: dict[str, Primitive] = {}
"""The primitives of Python's operators, by their names."""


def _recorded(symbol: str, ufunc) -> Primitive:
    """An operator with the rules of its ufunc. It computes by Python's operator, so that numbers stay numbers."""
    entry = handlers[ufunc].primitive  # type: ignore[attr-defined]
    prim = Primitive(getattr(operator, symbol), entry.name, entry.rules, early=entry.early)
    if entry.same is not None:
        prim.if_same(*entry.same.rules)
    operators[symbol] = prim
    return prim


def _constant(symbol: str) -> Callable:
    """An operator without derivative."""
    fun = getattr(operator, f"__{symbol}__")

    def run(x, y):
        state = x.state if type(x) is Array else y.state
        if type(x) is type(y) is Array and x.state is not y.state:
            state = tracer.mixing.join([Array(value_of(x), x.state), Array(value_of(y), y.state)])[1]
        pair = [value_of(x), value_of(y)]
        try:
            ans = fun(*pair)
        except Exception as error:
            ans = cupy_fallback.retry(fun, pair, {}, error, f"np.{symbol.strip('_')}")
        return wrap(ans, state)

    return run


def define_operators() -> None:
    """Give Array Python's operators, once the rules of their ufuncs are there."""
    for symbol, ufunc in ARITHMETIC.items():
        _define(symbol, functools.partial(apply_binary, _recorded(symbol, ufunc)), ufunc, reflect=True)
    for symbol, ufunc in INTEGER_OPERATORS.items():
        _define(symbol, _constant(symbol), ufunc, reflect=True)
    _define("divmod", _divmod, np.divmod, reflect=True)
    for symbol, ufunc in COMPARISONS.items():
        _define(symbol, _constant(symbol), ufunc, reflect=False)
    for symbol, ufunc in {"neg": np.negative, "abs": np.absolute}.items():
        prim = _recorded(symbol, ufunc)
        setattr(Array, f"__{symbol}__", lambda self, prim=prim: apply_unary(prim, self))
    Array.__invert__ = lambda self: compute(operator.invert, (self,), {})  # type: ignore[attr-defined]


def _method(fun):
    name = fun.__name__

    def method(self, *args, **kwargs):
        return self.__array_function__(fun, (), (self, *args), kwargs)

    def reduction(self, *args, **kwargs):
        value = self.value
        if self.tape is None and type(value) is np.ndarray and _is_plain(args) and _is_plain(kwargs.values()):
            return wrap(getattr(value, name)(*args, **kwargs), self.state)
        return method(self, *args, **kwargs)

    return reduction if name in _REDUCTIONS else method


_REDUCTIONS = set("all any argmax argmin cumprod cumsum max mean min prod std sum var".split())
"""Methods whose results are arrays of their own, never views."""


def _is_plain(options) -> bool:
    """Whether options are numbers, names and the like, and neither a mask nor an array to write into."""
    return _OPTIONS.issuperset(map(type, options))


_OPTIONS = {int, bool, str, float, type(None), np.dtype, type, tuple}


def _clip(self, min=None, max=None, out=None, **kwargs):
    return np.clip(self, min, max, out=out, **kwargs)


def _reshape(self, *shape, order: Any = "C", copy=None):
    if self.tape is None and self.state is not None and copy is None and type(self.value) is np.ndarray:
        return Array(self.value.reshape(*shape, order=order), self.state)
    options = {} if copy is None else {"copy": copy}
    return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order, **options)


def flatten(self, order: Any = "C"):
    return np.ravel(self, order)


def transpose(self, *axes):
    if not axes or axes == (None,):
        return np.transpose(self)
    return np.transpose(self, axes[0] if len(axes) == 1 and np.ndim(axes[0]) else axes)


def _astype(self, dtype, order="K", casting: Any = "unsafe", subok=True, copy=True):
    dtype = np.dtype(dtype)
    if casting != "unsafe" and not np.can_cast(self.dtype, dtype, casting):
        raise TypeError(f"cannot cast from {self.dtype} to {dtype} by the rule {casting!r}")
    kind = kind_of_dtype(dtype)
    if self.tape is not None and (not kind or dtype.type is np.void):
        raise DtypeError.at(
            "x.astype",
            argument="dtype",
            got=f"{dtype} for a {describe(self)}",
            need="a dtype of numbers: others have no gradient",
            mend=f"spmd.stop_gradient(x).astype({str(dtype)!r})",
        )
    return astype(self, dtype) if kind != "i" else wrap(value_of(self).astype(dtype), self.state)


def _view(self, dtype=None, type=None):
    if type is None and (dtype is None or (not _is_type(dtype) and np.dtype(dtype) == self.dtype)):
        return self
    raise StateError.at(
        "x.view",
        got=f"{type or dtype} for a {describe(self)}",
        need="the array's own dtype: other views read its bytes, which are no part of its value",
        mend="x.astype(dtype); np.real(x) and np.imag(x) of complex entries",
    )


def _is_type(dtype) -> bool:
    return isinstance(dtype, type) and issubclass(dtype, np.ndarray)


def _device(self):
    return getattr(value_of(self), "device", "cpu")


def _to_device(self, device, /, *, stream=None):
    if device == self.device:
        return self
    raise ValueError(
        message(
            "x.to_device",
            argument="device",
            got=f"{device!r} for a {describe(self)} on {self.device!r}",
            need="the device where it is: a gradient does not travel between devices",
            mend="move the argument before it is differentiated",
        )
    )


def _contains(self, value):
    return bool((self == value).any())


def _divmod(x, y):
    return x // y, x % y


def _rounded(self, ndigits=None):
    return np.round(self, ndigits or 0)


def _whole(name: str) -> Callable:
    """math.floor and its kin: a Python number, where the array has one."""

    def whole(self) -> int:
        value = self._number(f"math.{name}")
        return getattr(math, name)(value.item() if hasattr(value, "item") else value)

    return whole


_SAME = (
    "all any argmax argmin argpartition argsort choose conj cumprod cumsum diagonal dot max mean min nonzero prod "
    "ravel repeat round searchsorted squeeze std sum swapaxes take trace var"
)
"""Methods with the arguments of the function of their name."""

_METHODS: dict[str, Callable] = {
    **{name: _method(getattr(np, name)) for name in _SAME.split()},
    "astype": _astype,
    "clip": _clip,
    "compress": lambda self, condition, axis=None, out=None: np.compress(condition, self, axis, out=out),
    "conjugate": lambda self: np.conj(self),
    "copy": lambda self, order="C": self,
    "flatten": flatten,
    "numpy": lambda self: tracer.mixing.whole(self),
    "reshape": _reshape,
    "to_device": _to_device,
    "transpose": transpose,
    "view": _view,
    "__ceil__": _whole("ceil"),
    "__contains__": _contains,
    "__copy__": lambda self: self,
    "__deepcopy__": lambda self, memo: self,
    "__floor__": _whole("floor"),
    "__pos__": lambda self: self,
    "__round__": _rounded,
    "__trunc__": _whole("trunc"),
}

_ATTRIBUTES: dict[str, Callable] = {
    "T": lambda self: np.transpose(self),
    "device": _device,
    "flat": lambda self: np.ravel(self),
    "imag": lambda self: np.imag(self),
    "mT": lambda self: np.matrix_transpose(self),
    "real": lambda self: np.real(self),
}

# What an Array refuses

_IMMUTABLE = "arrays are immutable"
_MEMORY = "a bare array: how an array lies in memory is no part of its value"
_BYTES = "a bare array: bytes have no gradient and no state"

tracer.missing.update(
    {
        "fill": (_IMMUTABLE, "x = x.at[...].set(v)"),
        "itemset": (_IMMUTABLE, "x = x.at[i].set(v)"),
        "partition": (_IMMUTABLE, "x = np.partition(x, k)"),
        "put": (_IMMUTABLE, "x = x.at[np.unravel_index(i, x.shape)].set(v)"),
        "resize": (_IMMUTABLE, "x = np.resize(x, shape)"),
        "setfield": (_IMMUTABLE, "x = x.at[i].set(v)"),
        "setflags": (_IMMUTABLE, "leave it out"),
        "sort": (f"{_IMMUTABLE}, and NumPy's method sorts in place", "x = np.sort(x)"),
        "base": (_MEMORY, "{data}.base"),
        "byteswap": (_MEMORY, "{data}.byteswap()"),
        "ctypes": (_MEMORY, "{data}.ctypes"),
        "data": (_MEMORY, "{data}.data"),
        "flags": (_MEMORY, "{data}.flags"),
        "getfield": (_MEMORY, "{data}.getfield(...); np.real(x) and np.imag(x) of complex entries"),
        "strides": (_MEMORY, "{data}.strides"),
        "dump": (_BYTES, "{data}.dump(file)"),
        "dumps": (_BYTES, "{data}.dumps()"),
        "tobytes": (_BYTES, "{data}.tobytes()"),
        "tostring": (_BYTES, "{data}.tobytes()"),
        "tofile": (_BYTES, "{data}.tofile(file)"),
    }
)


def _define_missing() -> None:
    """Tell of what NumPy's arrays have, and of its functions, which other libraries have as methods."""
    functions = (
        name for name, f in tuple(vars(np).items()) if name[0] != "_" and callable(f) and not isinstance(f, type)
    )
    for name in {*tracer.missing, *functions}:
        if not hasattr(Array, name):
            setattr(Array, name, tracer.Missing(name))


_SETTERS = {
    "dtype": "x = x.astype(dtype)",
    "flat": "x = x.at[...].set(v)",
    "imag": "x = x.real + 1j * v",
    "real": "x = v + 1j * x.imag",
    "shape": "x = x.reshape(shape)",
}


def _refuse_setting(name: str, mend: str) -> Callable:
    def refuse(self, value):
        raise StateError.at(f"x.{name} = v", got=f"an assignment to a {describe(self)}", need=_IMMUTABLE, mend=mend)

    return refuse


def _refuse(where: str, need: str, mend: str, error: type[Exception]) -> Callable:
    def refuse(self, *args, **kwargs):
        raise error(message(where, got=describe(self), need=need, mend=mend))

    return refuse


_OTHER = "a bare array: another library does not record what it does"
_BARE = "spmd.stop_gradient(x), and in a body spmd.block of it; or NumPy's functions in place of the other library's"

_DLPACK = f"spmd.numpy.from_dlpack(x) in place of NumPy's; {_BARE}"

_REFUSED = {
    "__delitem__": _refuse("del x[i]", _IMMUTABLE, "x = np.delete(x, i)", StateError),
    "__dlpack__": _refuse("from_dlpack", _OTHER, _DLPACK, TracedConversionError),
    "__dlpack_device__": _refuse("from_dlpack", _OTHER, _DLPACK, TracedConversionError),
    "__reduce_ex__": _refuse("pickle", _BYTES, "spmd.stop_gradient(x), and in a body spmd.block of it", StateError),
}


def _torch_function(cls, func, types, args=(), kwargs=None):
    raise _beside_tensors(f"torch.{getattr(func, '__name__', func)}")


def _define_methods() -> None:
    for name, method in {**_METHODS, **_REFUSED}.items():
        method.__name__ = name
        method.__qualname__ = f"Array.{name}"
        method.__doc__ = f"As numpy.ndarray.{name}." if name in _METHODS else None
        setattr(Array, name, method)
    for name, get in _ATTRIBUTES.items():
        setattr(Array, name, property(get, doc=f"As numpy.ndarray.{name}."))
    for name, mend in _SETTERS.items():
        setattr(Array, name, getattr(Array, name).setter(_refuse_setting(name, mend)))
    Array.__torch_function__ = classmethod(_torch_function)  # type: ignore[attr-defined]
    Array.__class_getitem__ = classmethod(types.GenericAlias)  # type: ignore[attr-defined]


_define_methods()
_define_missing()
