"""The arithmetic of layers on one block, for each array library; what lies on other workers is no matter here.

A family is a module of this folder for arrays of NumPy and CuPy, and one of the same name and functions for each other
library, which its frontend names.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from spmd.frontends import frontend

__all__ = ["local", "namespace"]

_families: dict[str, Any] = {}


def local(x: Any, family: str) -> Any:
    """The module of a family of local functions for the library of x."""
    other = frontend(x)
    if other is not None:
        return other.local(family)
    if family not in _families:
        _families[family] = import_module(f"spmd.functions.local.{family}")
    return _families[family]


def namespace(x: Any) -> Any:
    """The functions of the Array API standard for the library of x. Those of traced arrays are differentiated."""
    other = frontend(x)
    if other is not None:
        return other.namespace
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else np
