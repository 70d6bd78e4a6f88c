"""Attention with its weights, of which each worker holds the rows of its queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from spmd.functions.arguments import layer
from spmd.functions.attention_plans import AttentionPlan, attention_plan, with_dimensions
from spmd.functions.attention_tiles import Part, runs_of_heads
from spmd.functions.attentions import check_lengths, checked_operands
from spmd.functions.dropouts import check_rate, dropped
from spmd.functions.layouts import dtype_of, spec_of_names
from spmd.functions.local import local, namespace
from spmd.functions.movement import relaid
from spmd.functions.planned import Operand, is_split, run_layer
from spmd.kernels.cpu.chunks import accurate
from spmd.layout import Layout, Spec
from spmd.mesh import here
from spmd.operators.reduce import in_dtype
from spmd.tracebacks import api_boundary

__all__ = ["attention_with_weights"]

_WHERE = "spmd.functions.attention_with_weights"


@api_boundary
@layer
def attention_with_weights(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    bias: Any = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    key: Any = None,
    spec: Spec | None = None,
    kv_spec: Spec | None = None,
    v_spec: Spec | None = None,
    mask_spec: Spec | None = None,
    bias_spec: Spec | None = None,
    out_spec: Spec | None = None,
) -> Any:
    """(w v, w), where w = softmax(scale q kᵀ + bias) where the mask is true: `attention`, and its weights.

    Arguments as those of `attention`, whose method is "heads". dropout: the probability to drop an entry of w, before
    the product with v; key: of `spmd.random`, for dropout above 0. Which entries are dropped depends on their indices
    in the whole w, so it is the same on every mesh.
    Gives the result, as `attention`, and w, (..., heads, n, m), which lies as q does, with whole rows. out_spec: of the
    result. A query that sees no key has weights of zero.
    Each worker holds the rows of w of its queries, and fetches the keys and values of their heads, of all positions.
    Adjoint in q, k, v and bias: of softmax and the two products; cotangents return to where the operands lie.
    Raises SpecError and LayoutError for arguments that do not fit. Source: Vaswani et al., "Attention is all you need",
    2017.

        >>> with spmd.Mesh(x=2):
        ...     q = k = v = spmd.zeros((1, 2, 4), spec=P(None, "x"))
        ...     y, w = spmd.functions.attention_with_weights(q, k, v, causal=True)
        >>> w
        PartitionedArray([[[1. , 0. ],
                           [0.5, 0.5]]], dtype=float64, spec=P(None, 'x', None))
    """
    check_rate(_WHERE, "dropout", dropout)
    operands, options = checked_operands(
        (q, k, v, mask, bias), causal, scale, "heads", None, (spec, kv_spec, v_spec, mask_spec, bias_spec)
    )
    if out_spec is None and not is_split(*operands):
        q, k, v, mask, bias = (o.x for o in operands)
        check_lengths([None if o.x is None else tuple(o.x.shape) for o in operands])
        heads, rows, columns = (*q.shape[-3:-1], k.shape[-2])
        runs = runs_of_heads((0, heads), heads // k.shape[-3] if heads else 1)
        part = Part(((0, rows),), ((0, columns),), runs, options.causal, options.scale_for(q.shape[-1]))
        w = _weights(q, k, mask, bias, part)
        w = dropped(_WHERE, w, float(dropout), key, None) if dropout else w
        return _product(w, v, part, q), in_dtype(w, dtype_of(q))

    def plan(*layouts: Any) -> Any:
        check_lengths([None if layout is None else layout.shape for layout in layouts[:5]])
        return _plan(attention_plan(_WHERE, *layouts[:5], options, out_spec), float(dropout))

    return run_layer(_WHERE, plan, [*operands, Operand("key", key)])


@lru_cache(maxsize=1024)
def _plan(plan: AttentionPlan, rate: float) -> _WeightsPlan:
    return _WeightsPlan(plan, rate)


@dataclass(frozen=True)
class _WeightsPlan:
    """An attention by weights. rate: of dropout."""

    plan: AttentionPlan
    rate: float

    @cached_property
    def weights(self) -> Layout:
        """How the weights lie: as the queries, with whole rows."""
        queries, keys = self.plan.queries, self.plan.k.shape[-2]
        shape, cuts = (*queries.shape[:-1], keys), [*queries.cuts[:-1], None]
        if queries.spec is None:
            return Layout.grid(shape, list(map(len, queries.cuts)), queries.axes, queries.workers, cuts)
        return Layout(shape, spec_of_names([*queries.spec.dims[:-1], ()]), queries.axes, cuts)

    @property
    def out(self) -> tuple[Layout, Layout]:
        return self.plan.out, self.weights

    def __call__(self, q: Any, k: Any, v: Any, mask: Any, bias: Any, key: Any) -> Any:
        plan, dtype = self.plan, dtype_of(q)
        q, k, v, mask, bias = plan.brought(q, k, v, mask, bias)
        (part,) = plan.parts(here(_WHERE).group(plan.axes).index if plan.axes else 0, 0)
        w = _weights(q, k, mask, bias, part, plan.k.shape[-2])
        w = dropped(_WHERE, w, self.rate, key, self.weights) if self.rate else w
        y = _product(w[..., : k.shape[-2]], v, part, q)
        return relaid(y, plan.lies, plan.out), in_dtype(w, dtype)


def _weights(q: Any, k: Any, mask: Any, bias: Any, part: Part, keys: int | None = None) -> Any:
    """The weights of the rows of a block, for all its columns, or for so many keys, of which those that follow have
    none. In the dtype to compute in."""
    xp, wide = namespace(q), accurate(dtype_of(q))
    q, k = in_dtype(q, wide), in_dtype(k, wide)
    s = xp.matmul(q, xp.matrix_transpose(_of_heads(k, part, q))) * part.scale
    columns, last = s.shape[-1], part.columns[-1][1] if part.columns else 0
    mask, bias = (None if a is None else with_dimensions(a, q.ndim)[..., :last] for a in (mask, bias))
    s = s if bias is None else s + in_dtype(bias, wide)
    low = xp.zeros_like(s) - np.inf
    s = s if mask is None else xp.where(mask, s, low)
    if part.causal:
        seen = local(q, "recurrent").integers(q, part.allowed())
        s = xp.where(xp.broadcast_to(seen, s.shape), s, low)
    if columns:
        top = local(q, "normalisation").detached(xp.max(s, axis=-1, keepdims=True))
        e = xp.exp(s - xp.where(top == -np.inf, xp.zeros_like(top), top))
        total = xp.sum(e, axis=-1, keepdims=True)
        s = e / xp.where(total == 0, xp.ones_like(total), total)
    if keys is not None and keys > columns and s.shape[-2]:
        rest = (*s.shape[:-1], keys - columns)
        s = xp.concat([s, local(q, "recurrent").zeros(s, rest)], axis=-1)
    return s


def _product(w: Any, v: Any, part: Part, q: Any) -> Any:
    xp = namespace(w)
    return in_dtype(xp.matmul(w, in_dtype(_of_heads(v, part, q), dtype_of(w))), dtype_of(q))


def _of_heads(a: Any, part: Part, q: Any) -> Any:
    """Keys or values for each head of the queries."""
    if a.shape[-3] == q.shape[-3]:
        return a
    index = [0] * q.shape[-3]
    for (start, stop), (first, last) in part.runs:
        each = (stop - start) // (last - first)
        index[start:stop] = [first + n // each for n in range(stop - start)]
    return namespace(a).take(a, local(a, "recurrent").integers(a, np.array(index, int)), axis=a.ndim - 3)
