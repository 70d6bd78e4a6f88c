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


def key_words(where: str, given: Any) -> Any:
    """The two words of a key."""
    found = np.asarray(given) if type(given) is PartitionedArray else value_of(given)
    found = found if on_device(found) else admit(found, where, "key", error=SpecError, need="one key, uint32[2]")
    if getattr(found, "dtype", None) != np.uint32 or found.shape != (2,):
        raise SpecError.at(
            where,
            argument="key",
            got=describe(given),
            need="one key, uint32[2]",
            mend="spmd.random.key(seed); of several keys one: keys[i]",
        )
    return found


def varying_axes(x: Any) -> frozenset[str]:
    other = frontend(x)
    if other is not None:
        return other.state(x).varying
    return x.state.varying if type(x) is Array and x.state is not None else frozenset()


Shape = int | Sequence[int]


def array(where: str, argument: str, x: Any) -> Any:
    """x as an array, if it can be one."""
    if isinstance(x, list | tuple) or any(hasattr(type(x), name) for name in ("__array__", "toarray")):
        if isinstance(x, np.generic):
            return x
        return x if on_device(x) else admit(x, where, argument, error=SpecError)
    return x


def checked_shape(where: str, given: Any, argument: str = "shape") -> tuple[int, ...]:
    try:
        shape = (operator.index(given),) if np.ndim(given) == 0 else tuple(map(operator.index, given))
    except (TypeError, ValueError):
        shape = (-1,)
    if min(shape, default=0) < 0 or math.prod(shape) >= 1 << 62:
        raise SpecError.at(
            where,
            argument=argument,
            got=describe(given),
            need="the lengths of the whole array, less than 2**62 entries",
            mend="shape=(3, 4)",
        )
    return shape


def checked_dtype(where: str, given: Any, need: str, mend: str) -> np.dtype:
    try:
        return np.dtype(given)
    except TypeError:
        raise SpecError.at(where, argument="dtype", got=describe(given), need=need, mend=f"dtype={mend}") from None


def checked_float(where: str, dtype: Any) -> np.dtype:
    found = checked_dtype(where, dtype, "float32, float64, float16 or bfloat16", "np.float32")
    if found.name not in ("float16", "bfloat16", "float32", "float64"):
        raise SpecError.at(
            where,
            argument="dtype",
            got=str(found),
            need="float32, float64, float16 or bfloat16",
            mend="dtype=np.float32; of complex numbers draw both parts",
        )
    return found
