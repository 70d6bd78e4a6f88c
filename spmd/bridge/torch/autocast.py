"""Layers under torch's autocast: the operands are cast once, as torch casts those of its own layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["run_under_autocast"]

_NARROW = {"attention", "attention_with_weights", "conv", "conv_transpose", "gru", "linear", "lstm", "rnn"}
"""Layers that torch computes in the dtype of autocast."""
_WIDE = {
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss", "kl_div", "l1_loss"),
    *("mse_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss", "softmax_cross_entropy", "spectral_conv"),
}
"""Layers that torch computes in float32."""
_WIDE_ON_DEVICES = {"group_norm", "layer_norm", "log_softmax", "rms_norm", "softmax", "softmin"}
_KINDS = "cpu", "cuda"


def run_under_autocast(layer: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """layer(*args, **kwargs), in the dtypes of torch's layer of this name.

    All of the layer is then computed without autocast: the workers meet with blocks of one dtype, whatever part of the
    computation each of them has.
    """
    if not any(map(torch.is_autocast_enabled, _KINDS)):
        return layer(*args, **kwargs)
    first = args[0] if args else next(iter(kwargs.values()))
    kind, name = first.device.type, layer.__name__
    narrow, wide = name in _NARROW, name in _WIDE or (kind != "cpu" and name in _WIDE_ON_DEVICES)
    if not (narrow or wide) or not torch.is_autocast_enabled(kind):
        return layer(*args, **kwargs)
    dtype = torch.get_autocast_dtype(kind) if narrow else torch.float32
    with torch.autocast(kind, enabled=False):
        result = layer(*_cast(args, dtype), **_cast(kwargs, dtype))
    return _cast(result, first.dtype) if name == "gru" and kind == "cpu" else result  # there its state is not narrowed


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Tensors, in dictionaries, lists and tuples too, in a dtype; those in double precision stay, as in torch."""
    if isinstance(x, torch.Tensor):
        return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x
    if isinstance(x, Mapping):
        return {k: _cast(v, dtype) for k, v in x.items()}
    return type(x)(_cast(v, dtype) for v in x) if type(x) in (list, tuple) else x
