"""The names of all kernels, and how a package of kernels loads them: each family when it is first used.

No family has the name of a kernel: the package has one name for both the module and the function.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["FAMILIES", "lazy_getattr"]

FAMILIES: dict[str, tuple[str, ...]] = {
    family: tuple(names.split())
    for family, names in {
        "activation": "activate activate_vjp",
        "convolution": "col2im conv conv_input_adjoint conv_weight_adjoint im2col",
        "embeddings": "add_rows take_rows",
        "interpolation": "inject resample sample",
        "moves": "add_boxes combine unpack",
        "normalisation": "channel_affine channel_sums moments normalize normalize_vjp",
        "philox": "random_bits random_exponential random_gumbel random_normal random_truncated random_uniform",
        "pooling": "avg_pool avg_pool_vjp max_pool max_pool_gather max_pool_vjp",
        "softmaxes": "cross_entropy cross_entropy_and_gradient exp_sums log_softmax log_softmax_vjp logsumexp "
        "scaled_exp soft_cross_entropy soft_cross_entropy_and_gradient softmax softmax_vjp",
        "stencils": "stencil stencil_weights",
        "updates": "adamw sgd",
    }.items()
}

_FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names}


def lazy_getattr(package: str, namespace: dict[str, Any]) -> Callable[[str], Any]:
    """The `__getattr__` of a package of kernels: it imports the family of a kernel, and caches the kernel."""

    def __getattr__(name: str) -> Any:
        family = _FAMILY_OF.get(name)
        if family is None:
            raise AttributeError(f"module {package!r} has no kernel {name!r}")
        namespace[name] = kernel = getattr(import_module(f"{package}.{family}"), name)
        return kernel

    return __getattr__
