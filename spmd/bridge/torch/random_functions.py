"""Which functions of torch draw random numbers from torch's own generator, and which of their calls do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn import init

from spmd.bridge.torch.call_arguments import argument

__all__ = ["draws_now"]

_NAMES = """
rand rand_like randn randn_like randint randint_like randperm normal normal_ bernoulli bernoulli_ multinomial poisson
binomial cauchy_ exponential_ geometric_ log_normal_ random_ uniform_ kaiming_uniform_ kaiming_normal_
_standard_gamma _sample_dirichlet pca_lowrank svd_lowrank lobpcg gumbel_softmax fractional_max_pool2d_with_indices
fractional_max_pool3d_with_indices _fractional_max_pool2d _fractional_max_pool3d native_dropout
""".split()
_DROPOUTS = """
dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
feature_alpha_dropout feature_alpha_dropout_
""".split()


def _always(args: Any, kwargs: dict) -> bool:
    return True


def _dropout(args: Any, kwargs: dict) -> bool:
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(training) and argument(args, kwargs, 1, "p", 0.5) != 0


def _rrelu(args: Any, kwargs: dict) -> bool:
    return bool(argument(args, kwargs, 3, "training", False))


def _attention(args: Any, kwargs: dict) -> bool:
    return argument(args, kwargs, 4, "dropout_p", 0.0) != 0


def _multi_head_attention(args: Any, kwargs: dict) -> bool:
    return bool(argument(args, kwargs, 13, "training", True)) and argument(args, kwargs, 10, "dropout_p", 0.0) != 0


def _recurrent(args: Any, kwargs: dict) -> bool:
    """Floats among the arguments are probabilities of dropout."""
    return any(isinstance(a, float) and a > 0 for a in (*args, *kwargs.values()))


def _functions() -> dict[Any, Callable[[Any, dict], bool]]:
    kinds = {
        _always: _NAMES,
        _dropout: _DROPOUTS,
        _rrelu: ["rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"],
        _attention: ["scaled_dot_product_attention"],
        _multi_head_attention: ["multi_head_attention_forward"],
        _recurrent: ["lstm", "gru", "rnn_tanh", "rnn_relu"],
    }
    namespaces = (torch, torch.Tensor, F, torch._C._nn, init)  # type: ignore[attr-defined]
    return {
        getattr(namespace, name): kind
        for kind, names in kinds.items()
        for name in names
        for namespace in namespaces
        if hasattr(namespace, name)
    }


_draws: dict[Any, Callable[[Any, dict], bool] | None] = dict(_functions())


_BY_KEYS = _dropout, _attention, _multi_head_attention, _recurrent
"""Of tensors that stand for a whole these functions draw keys themselves, and they may exchange something."""


def draws_now(func: Any, types: Any, args: Any, kwargs: dict) -> bool:
    """Whether this call of a function draws, or may draw, from torch's own generator. types: those of its tensors."""
    kind = _draws.get(func)
    if kind in _BY_KEYS and any(hasattr(t, "__spmd_partitioned__") for t in types):
        return False
    if kind is None:
        if not isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket) or func in _draws:
            return False
        kind = _draws[func] = _always if _is_seeded(func) else None
        if kind is None:
            return False
    return kind(args, kwargs) and not any(
        isinstance(a, torch.Generator) and a is not torch.default_generator for a in (*args, *kwargs.values())
    )


def _is_seeded(op: Any) -> bool:
    overloads = [op] if isinstance(op, torch._ops.OpOverload) else [getattr(op, name) for name in op.overloads()]
    return any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)
