"""What counts as an array in this library: one function decides for all entry points.

Arrays enter as arguments of maps and transformations, as cotangents and tangents, as operands beside other arrays, as
constants that a body closes over, as blocks, and as results. Each of these doors asks `admit`, which gives a plain
array with all that the given value was, or raises. So no door converts in silence what another one refuses.

Admitted are arrays of numbers and booleans in any byte order, those of ml_dtypes, raw bytes and records without
references (which are moved; NumPy itself refuses to add them); memory maps, record arrays and masked arrays without a
masked entry; and objects of other libraries whose class says no more than that NumPy can convert them. Refused is what
would lose something: masks, labels, units, operators that mean something else, gradients of another library, and all
that is no number (references to objects, text, times).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.errors import StateError, describe, message

__all__ = ["ADMITTED", "BARE", "admit", "admit_dtype", "is_sliceable"]

ADMITTED: set[type] = set()
"""Classes of this library's own arrays, and of what stands for arrays: they pass as they are."""

BARE: set[type] = {np.ndarray}
"""Classes of bare arrays that pass as they are, if they are of numbers."""

_VIEWS = (np.memmap, np.recarray)
"""Subclasses of NumPy's arrays that add no meaning to the entries."""

_PROTOCOLS = ("__array__", "__array_interface__", "__array_struct__", "__dlpack__")
_IN_MEMORY = ("__array_interface__", "__array_struct__", "__cuda_array_interface__", "__dlpack__")
_MEANINGFUL = ("__array_ufunc__", "__array_function__", "toarray", "columns")
"""Attributes of classes whose arrays mean more than their entries: operations of their own, zeros that are not stored,
names of columns."""


def admit(
    x: Any,
    where: str,
    argument: str | Callable[[], str] | None = "x",
    *,
    error: type[Exception] = StateError,
    need: str = "an array of numbers",
    otherwise: str = "",
    beside: str = "",
    name: str = "x",
) -> Any:
    """x as a plain array with nothing lost. What is in ADMITTED, and a bare array of numbers, is given as it is.

    where, argument, error, need: of the error that is raised otherwise. otherwise: what else the user may do at this
    door. beside: added to what came. name: how the mend calls x.
    """
    kind = type(x)
    if kind in BARE:
        fault = _fault_of(x.dtype)
        if fault is None:
            return x
    elif kind in ADMITTED:
        return x
    else:
        plain, fault = _converted(x)
        if fault is None:
            fault = _fault_of(plain.dtype)
        if fault is None:
            return plain
    what, lost, mend = fault
    raise error(
        message(
            where,
            argument=argument() if callable(argument) else argument,
            got=describe(x) + (f", {what}" if what else "") + beside,
            need=f"{need}: {lost}",
            mend=mend.replace("{x}", name) + (f"; {otherwise}" if otherwise else ""),
        )
    )


def admit_dtype(dtype: Any, where: str, got: Callable[[], str], error: type[Exception] = StateError) -> None:
    """Raise where an array of this dtype, which a body has made, is none of numbers."""
    fault = _fault_of(dtype)
    if fault is not None:
        _, lost, mend = fault
        text = message(
            where, argument="x", got=got(), need=f"an array of numbers: {lost}", mend=mend.replace("{x}", "x")
        )
        raise error(text)


def is_sliceable(x: Any) -> bool:
    """Whether x is an array whose entries are not in memory and are read by slices, such as a dataset in a file."""
    kind = type(x)
    if any(hasattr(kind, name) for name in (*_MEANINGFUL, *_IN_MEMORY)) or not hasattr(kind, "__getitem__"):
        return False
    try:
        np.dtype(x.dtype)
        return all(operator.index(n) >= 0 for n in x.shape)
    except (AttributeError, TypeError):
        return False


_PLAIN = (int, float, complex, bool, np.ndarray)

Fault = tuple[str, str, str]
"""What a value is, what would be lost, and the mend."""


@lru_cache(maxsize=256)
def _fault_of(dtype: np.dtype) -> Fault | None:
    """Why arrays of a dtype are not admitted; None for those that are."""
    if dtype.kind in "biufc":
        return None
    if dtype.names is not None and dtype.hasobject:
        plain = next((n for n in dtype.names if not dtype[n].hasobject), dtype.names[0])
        return (
            "",
            "references to objects mean nothing to another process",
            f"an array for each field of numbers: np.asarray({{x}}[{plain!r}])",
        )
    if dtype.kind == "V" and not dtype.hasobject:
        return None
    if dtype.kind == "O":
        return (
            "",
            "references to objects mean nothing to another process",
            "np.asarray({x}, dtype=float), or another dtype of numbers",
        )
    if dtype.kind in "mM":
        return (
            "",
            "times and their differences have no sums and products",
            "np.asarray({x}).astype(np.int64), and the unit kept beside it",
        )
    return (
        "",
        "text has no sums and products",
        "np.asarray({x}, dtype=float), if it is numbers as text; else np.unique({x}, return_inverse=True)[1], "
        "numbers that stand for it",
    )


def _converted(x: Any) -> tuple[Any, Fault | None]:
    """A value that is no plain array, as one; or why it is not to be converted."""
    if isinstance(x, np.ndarray):
        return _of_subclass(x)
    if isinstance(x, np.generic | int | float | complex):
        return np.asarray(x), None
    if isinstance(x, str | bytes):
        fault = _fault_of(np.asarray(x).dtype)
        assert fault is not None
        return x, (f"to NumPy {describe(np.asarray(x))}", *fault[1:])
    if isinstance(x, list | tuple):
        return _of_sequence(x)
    fault = _of_meaning(x)
    if fault is not None:
        return x, fault
    if not isinstance(x, range | memoryview) and not any(hasattr(type(x), name) for name in _PROTOCOLS):
        try:
            memoryview(x)
        except TypeError:
            return x, ("", "NumPy would make an object of it", "np.asarray({x}) of the numbers it holds")
    try:
        data = np.asanyarray(x)
    except Exception as error:
        if type(error).__module__ == "spmd.errors":
            raise
        return x, ("", f"np.asarray raises {type(error).__name__}: {error}", "an array of NumPy with its entries")
    if type(data) is np.ndarray:
        return data, None
    plain, fault = _converted(data)
    if fault is None:
        return plain, None
    return x, (f"to NumPy {describe(data)}", fault[1], fault[2].replace("{x}", "np.asanyarray({x})"))


def _of_subclass(x: np.ndarray) -> tuple[Any, Fault | None]:
    if type(x) in (np.ma.MaskedArray, np.ma.core.MaskedConstant):
        if not _is_masked(x):
            return np.asarray(x), None
        return x, (
            "a subclass of np.ndarray",
            "entries that are masked would count",
            "{x}.filled(value); or np.asarray({x}) and np.ma.getmaskarray({x}), as two arrays, with np.where",
        )
    if isinstance(x, _VIEWS):
        data = np.asarray(x)
        return (data if data.dtype.type is not np.record else data.view(np.dtype((np.void, data.dtype)))), None
    mend = "np.asarray({x}), with @ for a product of matrices" if isinstance(x, np.matrix) else "np.asarray({x})"
    lost = f"what {type(x).__name__} adds to the entries of an array, and what its operations mean, would be lost"
    return x, ("a subclass of np.ndarray", lost, mend)


def _is_masked(x: Any) -> bool:
    mask = np.ma.getmask(x)
    return mask is not np.ma.nomask and bool(np.any(mask if mask.dtype.names is None else np.ma.flatten_mask(mask)))


def _of_sequence(x: Any) -> tuple[Any, Fault | None]:
    """Lists of numbers, of lists and of arrays."""
    for part in x:
        if type(part) not in _PLAIN and type(part) not in ADMITTED:
            fault = _converted(part)[1]
            if fault is not None:
                return x, fault
    try:
        return np.asarray(x), None
    except ValueError as error:
        return x, ("", f"np.asarray raises ValueError: {error}", "arrays of one shape, or one of the longest")


def _of_meaning(x: Any) -> Fault | None:
    """Why an object of another library is more than its entries."""
    kind = type(x)
    if hasattr(kind, "__torch_function__"):
        if not getattr(x, "requires_grad", False):
            return None
        return (
            "",
            "its gradient, which torch records, would be lost",
            "{x}.detach().cpu().numpy(); or spmd.bridge.torch, whose maps take tensors",
        )
    if not any(hasattr(kind, name) for name in _MEANINGFUL):
        return None
    ways = (("toarray", "{x}.toarray()"), ("values", "{x}.values"), ("to_numpy", "{x}.to_numpy()"))
    has = [(name, way) for name, way in ways if hasattr(x, name) and (name == "values") != callable(getattr(x, name))]
    mend = has[0][1] if has else "np.asarray({x})"
    lost = f"what {kind.__name__} adds to the entries of an array (labels, units, operations) would be lost"
    return "", lost, mend
