"""What functions and attributes of NumPy mean to a recorded program, and the error where they depend on values."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.errors import JitError, describe


def refuse(where: str, x: Any, mend: str) -> JitError:
    return JitError.at(
        where,
        got=f"{describe(x)}, within spmd.jit",
        need="a program that does not depend on the values of arrays: it is recorded once, and run again with "
        "other values",
        mend=mend,
    )


NO_NUMBER = (
    "to print or log it, return it and do so outside; np.where in place of `if`; integers among the arguments, and "
    "those of a map with the spec None, are part of the program; or leave spmd.jit out"
)
STATIC = {np.shape, np.ndim, np.size, np.result_type, np.iscomplexobj, np.isrealobj, np.can_cast, np.common_type}
"""Functions whose results are the same in every run."""
BY_VALUE = {
    *(np.nonzero, np.flatnonzero, np.argwhere, np.extract, np.compress, np.unique, np.union1d, np.intersect1d),
    *(np.setdiff1d, np.setxor1d, np.trim_zeros, np.bincount, np.unique_all, np.unique_counts, np.unique_inverse),
    *(np.unique_values, np.array_split, np.split, np.delete, np.insert, np.repeat, np.roots),
}
"""Functions whose results may have shapes that depend on values."""
IN_PLACE = {"fill", "sort", "partition", "put", "itemset", "resize"}
RAW = {"tobytes", "tofile", "dump", "dumps", "data", "ctypes", "__array_interface__"}
PLAIN = {
    *(np.concatenate, np.copy, np.full_like, np.max, np.mean, np.min),
    *(np.ones_like, np.prod, np.stack, np.sum, np.where, np.zeros_like),
}
"""Functions whose results are never views of their arguments. The same holds for ufuncs and kernels."""
METADATA = {"base", "device", "dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size", "strides"}
"""Attributes of an array that are no arrays."""
