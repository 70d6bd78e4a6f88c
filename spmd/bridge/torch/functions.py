"""`spt.functions`: the functions of `spmd.functions` that take tensors in bodies, by the same names and arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from spmd import functions
from spmd.bridge.torch.compiled_layers import compilable_layer
from spmd.bridge.torch.function_examples import docstring_with_example
from spmd.lazy_imports import missing_name_error
from spmd.tracebacks import api_boundary

if TYPE_CHECKING:
    from spmd.functions import (
        adaptive_max_pool,
        attention,
        attention_with_weights,
        avg_pool,
        batch_norm,
        binary_cross_entropy,
        binary_cross_entropy_with_logits,
        conv,
        conv_transpose,
        cross_entropy,
        dropout,
        embedding,
        experts,
        group_norm,
        gru,
        huber_loss,
        instance_norm,
        kl_div,
        l1_loss,
        layer_norm,
        linear,
        load_balance_loss,
        log_softmax,
        lstm,
        max_pool,
        mse_loss,
        nll_loss,
        pad,
        poisson_nll_loss,
        resample,
        resize,
        rms_norm,
        rnn,
        rope,
        router_z_loss,
        smooth_l1_loss,
        softmax,
        softmax_cross_entropy,
        softmin,
        spectral_conv,
    )

__all__ = [
    "adaptive_max_pool",
    "attention",
    "attention_with_weights",
    "avg_pool",
    "batch_norm",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "conv",
    "conv_transpose",
    "cross_entropy",
    "dropout",
    "embedding",
    "experts",
    "group_norm",
    "gru",
    "huber_loss",
    "instance_norm",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "linear",
    "load_balance_loss",
    "log_softmax",
    "lstm",
    "max_pool",
    "mse_loss",
    "nll_loss",
    "pad",
    "poisson_nll_loss",
    "resample",
    "resize",
    "rms_norm",
    "rnn",
    "rope",
    "router_z_loss",
    "smooth_l1_loss",
    "softmax",
    "softmax_cross_entropy",
    "softmin",
    "spectral_conv",
]


_UNCOMPILED = {"experts": "what moves depends on values"}
"""The functions that compiled functions leave their graph for, and why."""


def _run_uncompiled(name: str) -> Any:
    return torch.compiler.disable(getattr(functions, name), reason=_UNCOMPILED[name])


@api_boundary
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise missing_name_error(__name__, name)
    value = globals()[name] = _run_uncompiled(name) if name in _UNCOMPILED else compilable_layer(name)
    value.__doc__ = docstring_with_example(name, value.__doc__)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
