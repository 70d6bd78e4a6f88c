"""Differentiable functions over the kernels: for blocks in a body, and for whole arrays outside.

Each family is loaded when one of its functions is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from spmd.functions.activation import *  # noqa: F403
    from spmd.functions.adaptive_pooling import *  # noqa: F403
    from spmd.functions.attention_weights import *  # noqa: F403
    from spmd.functions.attentions import *  # noqa: F403
    from spmd.functions.convolution import *  # noqa: F403
    from spmd.functions.cross_entropies import *  # noqa: F403
    from spmd.functions.dropouts import *  # noqa: F403
    from spmd.functions.embeddings import *  # noqa: F403
    from spmd.functions.interpolation import *  # noqa: F403
    from spmd.functions.losses import *  # noqa: F403
    from spmd.functions.mixtures import *  # noqa: F403
    from spmd.functions.normalisation import *  # noqa: F403
    from spmd.functions.padding import *  # noqa: F403
    from spmd.functions.pooling import *  # noqa: F403
    from spmd.functions.products import *  # noqa: F403
    from spmd.functions.recurrent import *  # noqa: F403
    from spmd.functions.resizing import *  # noqa: F403
    from spmd.functions.rotary import *  # noqa: F403
    from spmd.functions.softmaxes import *  # noqa: F403
    from spmd.functions.spectral import *  # noqa: F403
    from spmd.functions.stencils import *  # noqa: F403

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
    "adaptive_pooling": ("adaptive_max_pool",),
    "attentions": ("attention",),
    "attention_weights": ("attention_with_weights",),
    "convolution": ("conv", "conv_transpose"),
    "dropouts": ("alpha_dropout", "dropout"),
    "cross_entropies": ("cross_entropy", "nll_loss", "softmax_cross_entropy"),
    "embeddings": ("add_rows", "embedding", "one_hot", "take_rows"),
    "interpolation": ("inject", "sample"),
    "losses": (
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
    ),
    "mixtures": ("experts", "load_balance_loss", "router_z_loss"),
    "normalisation": (
        "batch_norm",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "merge_moments",
        "moments",
        "rms_norm",
    ),
    "padding": ("pad",),
    "pooling": ("avg_pool", "max_pool"),
    "products": ("linear",),
    "resizing": ("Taps", "plan_resize", "resample", "resize"),
    "recurrent": ("gru", "lstm", "rnn"),
    "rotary": ("rope",),
    "softmaxes": ("log_softmax", "logsumexp", "softmax", "softmin"),
    "spectral": ("spectral_conv",),
    "stencils": ("stencil",),
}

if not TYPE_CHECKING:  # Type checkers use the imports above, and report misspelt names.
    __all__ = sorted(name for names in FAMILIES.values() for name in names)
    __getattr__, __dir__ = lazy_attributes(
        __name__, {f"spmd.functions.{family}": names for family, names in FAMILIES.items()}
    )
