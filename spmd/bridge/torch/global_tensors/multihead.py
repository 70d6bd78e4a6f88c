"""`torch.nn.functional.multi_head_attention_forward`, which `nn.MultiheadAttention` calls, of global tensors."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.nn import functional as F

from spmd.bridge.torch.global_tensors.meeting import as_global
from spmd.bridge.torch.global_tensors.registry import handles
from spmd.bridge.torch.multihead_keys import (
    additive,
    by_heads,
    mask_of_heads,
    padding_of_heads,
    showing_added,
    with_added_keys,
)

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@handles("multi_head_attention_forward")
def multi_head_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Attention of several heads: projections, scores by heads, and the projection of the results."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    batched = a["query"].ndim == 3
    size = a["query"].shape[-1] // a["num_heads"]
    q, k, v = (by_heads(x.transpose(0, 1), size) for x in _projected(a, *_inputs(a, batched)))
    bias_k, bias_v = (None if a[n] is None else by_heads(as_global(a[n]), size) for n in ("bias_k", "bias_v"))
    k, v, added = with_added_keys(k, v, bias_k, bias_v, a["add_zero_attn"])
    mask = showing_added(_mask(a, q.dtype), added)
    rate = a["dropout_p"] if a["training"] else 0.0
    causal = a["is_causal"] and a["key_padding_mask"] is None and not a["need_weights"]
    weights = None
    if a["need_weights"]:
        scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(-1, -2)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, rate) if rate else weights
        y = weights @ v
        weights = weights.mean(1) if a["average_attn_weights"] else weights
        weights = weights if batched else weights.squeeze(0)
    else:
        y = F.scaled_dot_product_attention(q, k, v, None if causal else mask, rate, causal)
    n, heads, length, size = y.shape
    y = F.linear(y.permute(2, 0, 1, 3).reshape(length, n, heads * size), a["out_proj_weight"], a["out_proj_bias"])
    return (y if batched else y.squeeze(1)), weights


def _inputs(a: dict[str, Any], batched: bool) -> tuple[Any, Any, Any]:
    """Queries, keys and values as (position, sample, feature). Equal ones stay the same object."""
    made: dict[int, Any] = {}
    for name in ("query", "key", "value"):
        x = a[name]
        made.setdefault(id(x), as_global(x if batched else x.unsqueeze(1)))
    return made[id(a["query"])], made[id(a["key"])], made[id(a["value"])]


def _projected(a: dict[str, Any], query: Any, key: Any, value: Any) -> Any:
    w, b = a["in_proj_weight"], a["in_proj_bias"]
    if not a["use_separate_proj_weight"] and query is key and key is value:
        return F.linear(query, w, b).chunk(3, -1)
    biases = (None,) * 3 if b is None else as_global(b).chunk(3, 0)
    if a["use_separate_proj_weight"]:
        weights = a["q_proj_weight"], a["k_proj_weight"], a["v_proj_weight"]
    else:
        weights = as_global(w).chunk(3, 0)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    k = k if a["static_k"] is None else _flat(a["static_k"], a["num_heads"])
    return q, k, v if a["static_v"] is None else _flat(a["static_v"], a["num_heads"])


def _flat(x: Any, heads: int) -> Any:
    """(sample × head, position, feature) as (position, sample, features of all heads)."""
    total, length, size = x.shape
    return x.reshape(total // heads, heads, length, size).permute(2, 0, 1, 3).reshape(length, total // heads, -1)


def _mask(a: dict[str, Any], dtype: torch.dtype) -> Any:
    """What is added to the scores, (sample, head, query, key), or fewer dimensions; None for nothing."""
    mask = mask_of_heads(additive(as_global(a["attn_mask"]), dtype), a["num_heads"])
    padding = padding_of_heads(additive(as_global(a["key_padding_mask"]), dtype))
    return mask if padding is None else padding if mask is None else mask + padding
