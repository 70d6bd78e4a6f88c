"""What dtypes are to differentiation, those of other libraries among them (bfloat16 of ml_dtypes)."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

__all__ = ["dtype_name", "float0", "is_foreign", "kind_of_dtype", "most", "spacing"]

float0 = np.dtype([("float0", np.void, 0)])
"""The dtype of tangents and cotangents of integers and booleans, which have no derivative: of no bytes, as in JAX."""


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
    return float(_finfo(dtype).eps)


def most(dtype: Any) -> Any:
    """The largest number of a real dtype: infinity, where it has one."""
    infinity = dtype.type(np.inf)
    return infinity if infinity > 0 else _finfo(dtype).max


def _finfo(dtype: Any) -> Any:
    # NumPy knows its own only; where there are others, ml_dtypes is imported.
    return (np if issubclass(dtype.type, np.inexact) else sys.modules["ml_dtypes"]).finfo(dtype)
