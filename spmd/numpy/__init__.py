"""NumPy's names for bare, stated and traced arrays: `import spmd.numpy as snp`.

    snp.array([[x[0], 1.0], [y, 2.0]])     # keeps the gradients of x and y

Plain NumPy functions record themselves wherever NumPy's protocols apply. This module has all names of numpy; functions
that the protocols do not cover (`array`, `full`, `arange`, `r_`, `vectorize`, ...) take traced arrays too. With bare
arguments each function is NumPy's, with NumPy's result.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from spmd.autodiff.namespace import namespace
from spmd.lazy_imports import missing_name_error
from spmd.tracebacks import api_boundary

if TYPE_CHECKING:
    from numpy import *  # noqa: F403

_PARTS = ("fft", "linalg")

__all__ = [name for name in dir(namespace) if name[0] != "_"]  # pyright: ignore[reportUnsupportedDunderAll]


@api_boundary
def __getattr__(name: str):
    try:
        value = importlib.import_module(f"{__name__}.{name}") if name in _PARTS else getattr(namespace, name)
    except AttributeError:
        raise missing_name_error(__name__, name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS})
