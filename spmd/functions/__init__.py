"""Differentiable functions over the kernels: for blocks in a body, and for whole arrays outside.

Each family is loaded when one of its functions is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.lazy_imports import late

if TYPE_CHECKING:
    from spmd.functions.activation import (
        bias_act,
        celu,
        elu,
        gelu,
        glu,
        hard_sigmoid,
        hard_swish,
        leaky_relu,
        log_sigmoid,
        mish,
        relu,
        relu6,
        selu,
        sigmoid,
        silu,
        softplus,
        swiglu,
        swish,
    )
    from spmd.functions.convolution import conv, conv_transpose
    from spmd.functions.cross_entropies import softmax_cross_entropy
    from spmd.functions.dropouts import dropout
    from spmd.functions.embeddings import add_rows, embedding, one_hot, take_rows
    from spmd.functions.interpolation import Taps, inject, plan_resize, resample, resize, sample
    from spmd.functions.normalisation import (
        batch_norm,
        group_norm,
        instance_norm,
        layer_norm,
        merge_moments,
        moments,
        rms_norm,
    )
    from spmd.functions.pooling import avg_pool, max_pool
    from spmd.functions.softmaxes import log_softmax, logsumexp, softmax
    from spmd.functions.stencils import stencil

FAMILIES: dict[str, tuple[str, ...]] = {
    "activation": (
        "bias_act",
        "celu",
        "elu",
        "gelu",
        "glu",
        "hard_sigmoid",
        "hard_swish",
        "leaky_relu",
        "log_sigmoid",
        "mish",
        "relu",
        "relu6",
        "selu",
        "sigmoid",
        "silu",
        "softplus",
        "swiglu",
        "swish",
    ),
    "convolution": ("conv", "conv_transpose"),
    "dropouts": ("dropout",),
    "cross_entropies": ("softmax_cross_entropy",),
    "embeddings": ("add_rows", "embedding", "one_hot", "take_rows"),
    "interpolation": ("Taps", "inject", "plan_resize", "resample", "resize", "sample"),
    "normalisation": (
        "batch_norm",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "merge_moments",
        "moments",
        "rms_norm",
    ),
    "pooling": ("avg_pool", "max_pool"),
    "softmaxes": ("log_softmax", "logsumexp", "softmax"),
    "stencils": ("stencil",),
}

__all__ = [
    "Taps",
    "add_rows",
    "avg_pool",
    "batch_norm",
    "bias_act",
    "celu",
    "conv",
    "conv_transpose",
    "dropout",
    "elu",
    "embedding",
    "gelu",
    "glu",
    "group_norm",
    "hard_sigmoid",
    "hard_swish",
    "inject",
    "instance_norm",
    "layer_norm",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "max_pool",
    "merge_moments",
    "mish",
    "moments",
    "one_hot",
    "plan_resize",
    "relu",
    "relu6",
    "resample",
    "resize",
    "rms_norm",
    "sample",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softmax_cross_entropy",
    "softplus",
    "stencil",
    "swiglu",
    "swish",
    "take_rows",
]

if not TYPE_CHECKING:  # Type checkers know the imports above, and so what is misspelt.
    __getattr__, __dir__ = late(__name__, {f"spmd.functions.{family}": names for family, names in FAMILIES.items()})
