"""The methods and attributes of NumPy's arrays on global arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff.array_methods import ARITHMETIC, COMPARISONS, INTEGER_OPERATORS, flatten, transpose
from spmd.autodiff.indexing import at
from spmd.autodiff.tracer import Array
from spmd.global_ops.indexing import item
from spmd.tracebacks import api_boundary

__all__: list[str] = []

_SAME = (
    "all any argmax argmin argpartition argsort choose conj cumprod cumsum diagonal dot max mean min nonzero prod "
    "ravel repeat round searchsorted squeeze std sum swapaxes take trace var"
)


def _method(name: str) -> Any:
    function = getattr(np, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__, method.__qualname__ = name, f"PartitionedArray.{name}"
    method.__doc__ = f"As `np.{name}`."
    return method


for _name in _SAME.split():
    setattr(PartitionedArray, _name, _method(_name))


def _reshape(self: Any, *shape: Any, order: Any = "C") -> Any:
    return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)


def _iterate(self: Any) -> Any:
    if not self.shape:
        raise TypeError("iteration over an array without dimensions")
    return (self[k] for k in range(self.shape[0]))


_MORE: dict[str, Any] = {
    "reshape": _reshape,
    "transpose": transpose,
    "flatten": flatten,
    "clip": lambda self, min=None, max=None, **options: np.clip(self, min, max, **options),
    "conjugate": lambda self: np.conj(self),
    "compress": lambda self, condition, axis=None, out=None: np.compress(condition, self, axis, out=out),
    "copy": lambda self, order="C": self,
    "tolist": lambda self: self.numpy().tolist(),
    "__getitem__": api_boundary(item),
    "__iter__": _iterate,
    "__contains__": lambda self, x: bool((self == x).any()),
    "__round__": lambda self, ndigits=None: np.round(self, ndigits or 0),
}
for _name, _function in _MORE.items():
    if hasattr(_function, "__name__"):
        _function.__name__ = _name
    setattr(PartitionedArray, _name, _function)

_ATTRIBUTES: dict[str, Any] = {
    "at": at,
    "T": lambda self: np.transpose(self),
    "mT": lambda self: np.matrix_transpose(self),
    "real": lambda self: np.real(self),
    "imag": lambda self: np.imag(self),
    "itemsize": lambda self: self.dtype.itemsize,
}
for _name, _function in _ATTRIBUTES.items():
    setattr(PartitionedArray, _name, property(_function))


def _operator(ufunc, swap: bool):
    @api_boundary
    def method(self, other):
        if type(other) is Array or getattr(type(other), "__array_ufunc__", True) is None:
            return NotImplemented
        return ufunc(other, self) if swap else ufunc(self, other)

    return method


for _name, _ufunc in {**ARITHMETIC, **INTEGER_OPERATORS, "divmod": np.divmod}.items():
    setattr(PartitionedArray, f"__{_name}__", _operator(_ufunc, swap=False))
    setattr(PartitionedArray, f"__r{_name}__", _operator(_ufunc, swap=True))
for _name, _ufunc in COMPARISONS.items():
    setattr(PartitionedArray, f"__{_name}__", _operator(_ufunc, swap=False))
for _name, _ufunc in {"neg": np.negative, "abs": np.absolute, "invert": np.invert, "pos": np.positive}.items():
    setattr(PartitionedArray, f"__{_name}__", lambda self, _ufunc=_ufunc: _ufunc(self))
