"""The extension `linalg` of the standard: functions of NumPy's module of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = (  # pyright: ignore[reportUnsupportedDunderAll]
    "cholesky cross det diagonal eigh eigvalsh inv matmul matrix_norm matrix_power matrix_rank matrix_transpose outer "
    "pinv qr slogdet solve svd svdvals tensordot trace vecdot vector_norm"
).split()

globals().update({name: getattr(np.linalg, name) for name in __all__})
