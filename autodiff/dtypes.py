"""What dtypes are to differentiation, those of other libraries among them (bfloat16 of ml_dtypes)."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

__all__ = [
    "dtype_name",
    "float0",
    "is_foreign",
    "kind_of_dtype",
    "least",
    "mean_dtype",
    "most",
    "product_dtype",
    "spacing",
]

float0 = np.dtype([("float0", np.void, 0)])
"""The dtype of tangents and cotangents of integers and booleans, which have no derivative: of no bytes, as in JAX.

>>> gradient = spmd.grad(lambda n: n * 2.0, allow_int=True)(3)
>>> gradient.dtype == spmd.float0
True
"""


@functools.cache
def kind_of_dtype(dtype: Any) -> str:
    """What a dtype is to differentiation: "f" real, "c" complex, "i" integer or boolean, "" anything else."""
    kind = getattr(dtype, "kind", "")
    if kind != "V":
        return kind if kind in ("f", "c") else "i" if kind in ("b", "i", "u") else ""
    if dtype == float0 or dtype.name.startswith(("int", "uint")):
        return "i"
    return "f" if dtype.name.startswith(("float", "bfloat")) else ""


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype, which NumPy puts together anew each time; with its byte order or its fields, if it has
    others than the name says."""
    return dtype.name if dtype.isnative and dtype.names is None else str(dtype)


def is_foreign(dtype: Any) -> bool:
    """Whether a dtype is of another library. NumPy promotes it by steps of its own, and its gufuncs convert it."""
    return not issubclass(dtype.type, np.number | np.bool)


def spacing(dtype: Any) -> float:
    """The spacing of floating numbers at 1."""
    return float(_of(dtype).finfo(dtype).eps)


def most(dtype: Any) -> Any:
    """The largest number of a real dtype: infinity, where it has one."""
    if kind_of_dtype(dtype) == "i":
        return dtype.type(_of(dtype).iinfo(dtype).max)
    infinity = dtype.type(np.inf)
    return infinity if infinity > 0 else _of(dtype).finfo(dtype).max


def least(dtype: Any) -> Any:
    """The smallest number of a real dtype."""
    return dtype.type(_of(dtype).iinfo(dtype).min) if kind_of_dtype(dtype) == "i" else -most(dtype)


@functools.cache
def mean_dtype(dtype: Any) -> np.dtype | None:
    """The dtype in which numbers are added up for their mean: float32 for shorter floating-point ones, whose sums would
    stand still or be infinite; for integers what holds the sum of as many as there may be. None: their own."""
    kind = kind_of_dtype(dtype)
    if kind == "i":
        return np.dtype(np.int64 if dtype.itemsize < 8 else np.float64)
    return np.dtype(np.float32) if kind == "f" and dtype.itemsize < 4 else None


@functools.cache
def cotangent_dtype(dtype: Any) -> np.dtype | None:
    """The dtype in which the cotangents of many uses of a number are added up. None: their own."""
    return mean_dtype(dtype) if kind_of_dtype(dtype) == "f" else None


@functools.cache
def product_dtype(dtype: Any) -> np.dtype | None:
    """The dtype in which products of two numbers are added up, as for an inner product. None: their own."""
    return np.dtype(np.float64) if kind_of_dtype(dtype) == "i" else mean_dtype(dtype)


def _of(dtype: Any) -> Any:
    """The module that knows the limits of a dtype: NumPy its own; where there are others, ml_dtypes is imported."""
    return sys.modules["ml_dtypes"] if is_foreign(dtype) else np
