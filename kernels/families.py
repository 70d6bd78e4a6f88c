"""The names of all kernels, and how a package of kernels finds them: each family is loaded when it is first used.

No family has the name of a kernel: the package has one name for both the module and the function.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["FAMILIES", "finder"]

FAMILIES: dict[str, tuple[str, ...]] = {
    "interpolation": ("resample", "sample", "inject"),
    "embeddings": ("add_rows", "take_rows"),
    "moves": ("combine",),
    "convolution": ("conv", "conv_input_adjoint", "conv_weight_adjoint", "im2col", "col2im"),
    "stencils": ("stencil", "stencil_weights"),
    "pooling": ("max_pool", "max_pool_gather", "max_pool_vjp", "avg_pool", "avg_pool_vjp"),
    "philox": (
        "random_bits",
        "random_exponential",
        "random_gumbel",
        "random_normal",
        "random_truncated",
        "random_uniform",
    ),
    "softmaxes": ("softmax", "softmax_vjp", "log_softmax", "log_softmax_vjp"),
    "updates": ("adamw", "sgd"),
}

_FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names}


def finder(package: str, into: dict[str, Any]) -> Callable[[str], Any]:
    """The `__getattr__` of a package of kernels: it loads the module that has the name, and keeps what it found."""

    def find(name: str) -> Any:
        family = _FAMILY_OF.get(name)
        if family is None:
            raise AttributeError(f"module {package!r} has no kernel {name!r}")
        into[name] = found = getattr(import_module(f"{package}.{family}"), name)
        return found

    return find
