"""The Array API standard, version 2024.12, for global arrays.

    xp = x.__array_namespace__()  # of a global array, traced or not
    y = xp.linalg.solve(a, xp.asarray(b))

Functions are NumPy's, which run on the blocks of global arrays and are differentiable. Functions that make arrays are
those of `spmd`: they take `spec`, without which each worker of the mesh has a copy. The device of a global array is its
mesh. Names of the standard that need a later NumPy than the one that is installed are missing.
Source: https://data-apis.org/array-api/2024.12/.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spmd.array import PartitionedArray
from spmd.array_api import fft as fft
from spmd.array_api import linalg as linalg
from spmd.array_api.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from spmd.array_api.functions import argsort, astype, broadcast_arrays, clip, finfo, meshgrid, sort, take_along_axis
from spmd.array_api.info import VERSIONS, ArrayNamespaceInfo, to_device
from spmd.autodiff.namespace import namespace
from spmd.errors import LayoutError
from spmd.tracebacks import api_boundary

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_CONSTANTS = "e inf nan newaxis pi"
_DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128"
_ELEMENTWISE = (
    "abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert bitwise_left_shift bitwise_or "
    "bitwise_right_shift bitwise_xor ceil conj copysign cos cosh divide equal exp expm1 floor floor_divide greater "
    "greater_equal hypot imag isfinite isinf isnan less less_equal log log10 log1p log2 logaddexp logical_and "
    "logical_not logical_or logical_xor maximum minimum multiply negative nextafter not_equal positive pow real "
    "reciprocal remainder round sign signbit sin sinh sqrt square subtract tan tanh trunc"
)
_OTHERS = (
    "all any argmax argmin broadcast_to can_cast concat count_nonzero cumulative_prod cumulative_sum diff expand_dims "
    "flip iinfo isdtype matmul matrix_transpose max mean min moveaxis nonzero permute_dims prod repeat reshape "
    "result_type roll searchsorted squeeze stack std sum take tensordot tile tril triu unique_all unique_counts "
    "unique_inverse unique_values unstack var vecdot where"
)
_NUMPYS = [
    name for group in (_CONSTANTS, _DTYPES, _ELEMENTWISE, _OTHERS) for name in group.split() if hasattr(namespace, name)
]
globals().update({name: getattr(namespace, name) for name in _NUMPYS})

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    *_NUMPYS,
    "arange",
    "argsort",
    "asarray",
    "astype",
    "broadcast_arrays",
    "clip",
    "empty",
    "empty_like",
    "eye",
    "fft",
    "finfo",
    "from_dlpack",
    "full",
    "full_like",
    "linalg",
    "linspace",
    "meshgrid",
    "ones",
    "ones_like",
    "sort",
    "take_along_axis",
    "zeros",
    "zeros_like",
]

__array_api_version__ = VERSIONS[-1]


def __array_namespace_info__() -> ArrayNamespaceInfo:
    """What this namespace can do: its devices, dtypes and capabilities."""
    return ArrayNamespaceInfo()


@api_boundary
def _array_namespace(self: PartitionedArray, /, *, api_version: str | None = None) -> Any:
    """The namespace of the Array API standard for this array: `spmd.array_api`.

    Raises LayoutError, which is a ValueError, for a version of the standard that it does not have.
    """
    if api_version not in (None, *VERSIONS):
        raise LayoutError.at(
            "x.__array_namespace__",
            argument="api_version",
            got=repr(api_version),
            need=f"one of {', '.join(VERSIONS)}",
            mend="leave api_version out",
        )
    return import_module(__name__)


PartitionedArray.__array_namespace__ = _array_namespace  # type: ignore[attr-defined]
PartitionedArray.to_device = to_device  # type: ignore[attr-defined]
PartitionedArray.device = property(lambda self: self.mesh)  # type: ignore[attr-defined]
