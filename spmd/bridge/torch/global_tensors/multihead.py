"""`torch.nn.functional.multi_head_attention_forward`, which `nn.MultiheadAttention` calls, of global tensors."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.nn import functional as F

from spmd.bridge.torch.global_tensors.meeting import as_global
from spmd.bridge.torch.global_tensors.registry import handles

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@handles("multi_head_attention_forward")
def multi_head_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Attention of several heads: projections, scores by heads, and the projection of the results."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    batched = a["query"].ndim == 3
    query, key, value = _inputs(a, batched)
    q, k, v = _projected(a, query, key, value)
    mask = _mask(a, q, batched)
    k, v, mask = _extended(a, k, v, mask)
    q, k, v = (_heads(x, a["num_heads"]) for x in (q, k, v))
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


def _mask(a: dict[str, Any], q: Any, batched: bool) -> Any:
    """What is added to the scores, (sample or 1, head or 1, query, key); None for nothing."""
    mask, padding = _additive(a["attn_mask"], q.dtype), _additive(a["key_padding_mask"], q.dtype)
    if mask is not None:
        if mask.ndim == 3:
            heads = a["num_heads"]
            mask = mask.reshape(mask.shape[0] // heads, heads, *mask.shape[1:])
        else:
            mask = mask.reshape(1, 1, *mask.shape)
    if padding is not None:
        padding = padding if batched else padding.unsqueeze(0)
        padding = padding.reshape(padding.shape[0], 1, 1, padding.shape[1])
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Any, dtype: torch.dtype) -> Any:
    if mask is None:
        return None
    mask = as_global(mask)
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    return mask.to(dtype)


def _extended(a: dict[str, Any], k: Any, v: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Keys and values with those that the module adds behind."""
    n, more = k.shape[1], 0
    if a["bias_k"] is not None:
        k, v = (
            torch.cat([x, as_global(b).expand(1, n, b.shape[-1])], 0) for x, b in ((k, a["bias_k"]), (v, a["bias_v"]))
        )
        more += 1
    if a["add_zero_attn"]:
        k, v = (torch.cat([x, torch.zeros_like(x[:1])], 0) for x in (k, v))
        more += 1
    return k, v, mask if mask is None or not more else F.pad(mask, (0, more))


def _heads(x: Any, heads: int) -> Any:
    """(position, sample, features) as (sample, head, position, feature)."""
    length, n, features = x.shape
    return x.reshape(length, n, heads, features // heads).permute(1, 2, 0, 3)
