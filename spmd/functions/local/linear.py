"""Products with weights, on one block of NumPy or CuPy."""

from __future__ import annotations

from typing import Any

__all__ = ["linear", "with_bias"]


def linear(x: Any, w: Any, bias: Any = None) -> Any:
    """x wᵀ + bias, for w of shape (out_features, in_features)."""
    return with_bias(x @ w.T, bias)


def with_bias(y: Any, bias: Any) -> Any:
    """y + bias; y without one."""
    return y if bias is None else y + bias
