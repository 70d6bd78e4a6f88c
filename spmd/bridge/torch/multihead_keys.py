"""What attention of several heads does with keys and masks, of blocks and of global tensors alike."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

__all__ = ["additive", "by_heads", "mask_of_heads", "padding_of_heads", "showing_added", "with_added_keys"]


def by_heads(x: Any, size: int) -> Any:
    """(sample, position, features) as (sample, head, position, feature), of heads of some size."""
    n, length, features = x.shape
    return x.reshape(n, length, features // size, size).transpose(1, 2)


def with_added_keys(k: Any, v: Any, bias_k: Any, bias_v: Any, zero: bool) -> tuple[Any, Any, int]:
    """Keys and values, (sample, head, position, feature), with those that the module adds behind, and their number.

    bias_k, bias_v: one for all samples, (1, head, 1, feature), or None. zero: whether one of zeros is added.
    """
    if bias_k is not None:
        k, v = (torch.cat([x, b.expand(len(x), *b.shape[1:])], 2) for x, b in ((k, bias_k), (v, bias_v)))
    if zero:
        k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (k, v))
    return k, v, (bias_k is not None) + zero


def mask_of_heads(mask: Any, heads: int) -> Any:
    """A mask of queries and keys, (query, key) or (sample * head, query, key), by sample and head; None for none."""
    if mask is None or mask.ndim == 2:
        return mask
    return mask.reshape(mask.shape[0] // heads, heads, *mask.shape[1:])


def padding_of_heads(padding: Any) -> Any:
    """A mask of keys, (sample, key) or (key), by sample, head and query; None for none."""
    if padding is None:
        return None
    padding = padding if padding.ndim == 2 else padding.unsqueeze(0)
    return padding.unsqueeze(1).unsqueeze(1)


def showing_added(mask: Any, added: int) -> Any:
    """A mask that hides nothing of so many further keys."""
    return mask if mask is None or not added else F.pad(mask, (0, added))


def additive(mask: Any, dtype: torch.dtype) -> Any:
    """What a mask adds to the scores: of booleans, -inf where it hides."""
    if mask is None or mask.dtype is not torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
