"""Check the arguments of random functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff.admission import admit
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import SpecError, describe
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.layout import Spec


def key_words(where: str, key: Any) -> Any:
    words = np.asarray(key) if type(key) is PartitionedArray else value_of(key)
    words = words if on_device(words) else admit(words, where, "key", error=SpecError, need="one key, uint32[2]")
    if getattr(words, "dtype", None) != np.uint32 or words.shape != (2,):
        raise SpecError.at(
            where,
            argument="key",
            got=describe(key),
            need="one key, uint32[2]",
            mend="spmd.random.key(seed); of several keys one: keys[i]",
        )
    return words


def varying_axes(x: Any) -> frozenset[str]:
    other = frontend(x)
    if other is not None:
        return other.state(x).varying
    return x.state.varying if type(x) is Array and x.state is not None else frozenset()


Shape = int | Sequence[int]


class _Omitted(tuple):
    __slots__ = ()


NO_SHAPE: Shape = _Omitted()
"""The default of shapes: (), as that of one number, or the shape of `like`."""


def as_array(where: str, argument: str, x: Any) -> Any:
    """x as an array, if it can be one."""
    if isinstance(x, list | tuple) or any(hasattr(type(x), name) for name in ("__array__", "toarray")):
        if isinstance(x, np.generic):
            return x
        return x if on_device(x) else admit(x, where, argument, error=SpecError)
    return x


def checked_shape(where: str, lengths: Any, argument: str = "shape") -> tuple[int, ...]:
    try:
        shape = (operator.index(lengths),) if np.ndim(lengths) == 0 else tuple(map(operator.index, lengths))
    except (TypeError, ValueError):
        shape = (-1,)
    if min(shape, default=0) < 0 or math.prod(shape) >= 1 << 62:
        raise SpecError.at(
            where,
            argument=argument,
            got=describe(lengths),
            need="the lengths of the whole array, less than 2**62 entries",
            mend="shape=(3, 4)",
        )
    return shape


def checked_dtype(where: str, value: Any, need: str, mend: str) -> np.dtype:
    try:
        return np.dtype(value)
    except TypeError:
        mend = f"spec={value}" if isinstance(value, Spec) else f"dtype={mend}"
        raise SpecError.at(where, argument="dtype", got=describe(value), need=need, mend=mend) from None


def checked_float(where: str, dtype: Any) -> np.dtype:
    checked = checked_dtype(where, dtype, "float32, float64, float16 or bfloat16", "np.float32")
    if checked.name not in ("float16", "bfloat16", "float32", "float64"):
        raise SpecError.at(
            where,
            argument="dtype",
            got=str(checked),
            need="float32, float64, float16 or bfloat16",
            mend="dtype=np.float32; of complex numbers draw both parts",
        )
    return checked
