"""Arrays of a GPU: which arrays are on one, and how data moves to it and to the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["arrays", "at", "beside", "is_array", "on_host", "register", "to_host"]

device_modules: list[Any] = []
"""CuPy, once its arrays may be used."""


def register(module: Any) -> None:
    """Accept arrays of this module from now on."""
    if module not in device_modules:
        device_modules.append(module)


def is_array(x: object) -> bool:
    """Whether x is an array of a device."""
    if type(x).__module__.partition(".")[0] != "cupy":
        return False
    if not device_modules:  # no mesh of a device has been made: the user has
        register(sys.modules["cupy"])
    return isinstance(x, device_modules[-1].ndarray)


def to_host(x: Any) -> Any:
    """Bare data on the host; waits for what computes it."""
    return x.get() if is_array(x) else x


def beside(a: Any, x: Any) -> Any:
    """An array of the host where x lies, if that is on a device."""
    if type(a) is not np.ndarray or not is_array(x):
        return a
    with x.device:
        return device_modules[-1].asarray(a)


def at(ufunc: Any, out: Any, index: Any, v: Any) -> None:
    """ufunc.at(out, index, v), also on a device, where NumPy's does not find CuPy's if the index is a list or tuple."""
    if is_array(out):
        getattr(device_modules[-1], ufunc.__name__).at(out, index, v)
    else:
        ufunc.at(out, index, v)


def arrays(tree: Any) -> Iterator[Any]:
    """The arrays of a device in tuples, lists and dicts."""
    if is_array(tree):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from arrays(x)
    elif isinstance(tree, dict):
        yield from arrays(list(tree.values()))


def on_host(tree: Any) -> Any:
    """Bare data, and what lies in tuples, lists and dicts, on the host; waits for what computes it."""
    if isinstance(tree, tuple | list):
        return type(tree)(on_host(x) for x in tree)
    if isinstance(tree, dict):
        return {k: on_host(v) for k, v in tree.items()}
    return to_host(tree)


def moved_to(tree: Any, module: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return module.asarray(tree)
    if isinstance(tree, tuple | list):
        parts = [moved_to(x, module) for x in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree
