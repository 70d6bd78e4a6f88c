"""`nn.MultiheadAttention` with heads, batch and sequences split over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import linear

from spmd.bridge.torch import functions
from spmd.bridge.torch.compiled import compilable
from spmd.bridge.torch.dropout import drawn_key
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.multihead_keys import (
    additive,
    by_heads,
    mask_of_heads,
    padding_of_heads,
    showing_added,
    with_added_keys,
)
from spmd.bridge.torch.nn.layer import Layer
from spmd.bridge.torch.nn.linear import Linear
from spmd.errors import SpecError, describe
from spmd.global_ops.call import names_of
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.operators.reduce import AxisName, psum
from spmd.tracebacks import api_boundary

__all__ = ["MultiheadAttention"]

Names = tuple[str, ...]

_SEQUENCES = ("in_proj_weight", "in_proj_bias")
"""The parameters that have the rows of queries, keys and values one after another."""


_psum = compilable(psum)

_EACH, _TOGETHER = "in_proj_weight: one of three", "in_proj_weight: three side by side"
"""How the rows of in_proj_weight lie, as one matrix of queries, keys or values, and as one of all."""


class NonDynamicallyQuantizableLinear(Linear, linear.NonDynamicallyQuantizableLinear):
    """The last projection of an attention, by the name that torch prints."""


class MultiheadAttention(Layer, nn.MultiheadAttention):
    """`nn.MultiheadAttention`, of which heads, the batch and sequences may be split.

        spt.nn.MultiheadAttention(512, 8, heads="model")  # some of the heads on each worker; one sum completes y
        spt.nn.MultiheadAttention(512, 8, spec=P("positions", "data"), method="ring")

    Arguments as those of `nn.MultiheadAttention`. heads: the axes that split the heads, which need not divide evenly:
    each worker holds the rows of its heads of all projections. State dicts are those of torch. spec: of the query as
    given, (L, N, E), or (N, L, E) with batch_first; of one without a batch too, as if it had one. kv_spec: of key and
    value; None: as spec. out_spec: of the result; None: as spec. With heads="model" and a spec that has "model",
    positions are gathered first, and the sum scattered: sequence parallelism. All three are specs of axes. method: of
    `spmd.functions.attention`, where sequences are split. generator: as for `spt.drawing`.

    forward takes what torch's takes. key_padding_mask lies as batch and positions of the key, attn_mask is whole.
    The weights lie as batch and positions of the query, of which each worker has whole rows: with need_weights, the
    default as in torch, and with dropout in training, keys and values of all positions are fetched, whatever the
    method. With average_attn_weights=False each worker has those of its heads. A query that sees no key gives the bias
    of the last projection; torch gives NaN. Entries are dropped by their indices in the whole: the same on any mesh.
    bias_k, bias_v and add_zero_attn need keys of whole sequences.
    Cost: as `spmd.functions.linear` and `attention`. Raises SpecError for what does not fit.
    """

    _spec_names = "spec", "kv_spec", "out_spec", "heads", "method"

    @api_boundary
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        kv_spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        heads: AxisName | None = None,
        method: str | None = None,
        generator: torch.Generator | int | None = None,
    ):
        options: Any = (dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, "meta", dtype)
        nn.MultiheadAttention.__init__(self, embed_dim, num_heads, *options)
        specs = {"spec": spec, "kv_spec": kv_spec, "out_spec": out_spec, "heads": heads, "method": method}
        self._place(device, generator, **specs)

    # How it lies

    def _checked_spec(self, where: str, name: str, spec: Any) -> Any:
        if name == "heads":
            return here(where).mesh.names(spec, where)
        if name != "method" and not isinstance(spec, P):
            need, mend = "a spec of axes", f'{name}=P(None, "data")'
            raise SpecError.at(where, argument=name, got=describe(spec), need=need, mend=mend)
        return spec

    @property
    def _heads(self) -> Names:
        """The axes that split the heads."""
        return self._specs["heads"] or ()

    def _split_rows(self, before: Sequence[int], after: Sequence[int] = (), pieces: int = 1) -> Layout:
        """How an array lies whose dimension after `before` has the features of all heads, `pieces` times."""
        axes = here("spt.nn.MultiheadAttention").mesh.axes
        by_head = Layout((self.num_heads,), P(self._heads or None), axes).cuts[0]
        cuts: Any = [None] * len(before) + [tuple(pieces * n * self.head_dim for n in by_head)] + [None] * len(after)
        shape = (*before, pieces * self.embed_dim, *after)
        return Layout(shape, P(*[None] * len(before), self._heads or None), axes, cuts)

    def _unpacked(self, name: str) -> Sequence[int] | None:
        whole = getattr(self, name)
        return (3, self.embed_dim, *whole.shape[1:]) if name in _SEQUENCES and self._heads else None

    def _layouts(self) -> dict[str, LayoutLike]:
        if not self._heads:
            return dict.fromkeys(_SEQUENCES, P())
        rows: dict[str, LayoutLike] = {}
        rows |= {name: self._split_rows((), p.shape[1:]) for name, p in self._parameters.items() if p is not None}
        rows |= {"in_proj_weight": self._split_rows((3,), (self.embed_dim,)), "in_proj_bias": self._split_rows((3,))}
        return rows | dict.fromkeys(("bias_k", "bias_v"), self._split_rows((1, 1)))

    def _layers(self) -> dict[str, tuple[type[Layer], dict[str, Any]]]:
        specs: dict[str, Any] = {}
        if self._is_split:
            batch, positions = self._names("spec")
            lies = P(batch or None, positions or None, self._heads or None)
            specs = {"spec": lies, "out_spec": self._ordered(self._given("out_spec"))}
        if self._heads:
            specs["w_spec"] = self._split_rows((self.embed_dim,))
        return {"out_proj": (NonDynamicallyQuantizableLinear, specs)}

    def _split_parameters(self) -> None:
        super()._split_parameters()
        if not self._is_split:
            return
        for name, pieces in ((_EACH, 1), (_TOGETHER, 3)):
            lies = self._split_rows((), (self.embed_dim,), pieces)
            self._lies[name] = lies, lies
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = self._parameters[name]
            if weight is not None:
                lies = self._split_rows((), weight.shape[1:])
                self._lies[name] = lies, lies

    @property
    def _is_split(self) -> bool:
        return bool(self._heads) or any(self._specs[n] is not None for n in ("spec", "kv_spec", "out_spec"))

    def _order(self, spec: P | None) -> tuple[Names, Names, Names]:
        """The axes of batch, positions and features in a spec of an input."""
        first, second, features = names_of(P() if spec is None else spec, 3)
        return (first, second, features) if self.batch_first else (second, first, features)

    def _ordered(self, spec: P | None) -> P:
        """The same spec, of (batch, positions, features)."""
        return P(*(names or None for names in self._order(spec)))

    def _given(self, name: str) -> P | None:
        """One of the specs; in its place that of the query."""
        return self._specs["spec"] if self._specs[name] is None else self._specs[name]

    def _names(self, name: str) -> tuple[Names, Names]:
        """The axes that split the batch, and the positions, while the heads are split."""
        batch, positions, _ = self._order(self._given(name))
        return tuple(tuple(n for n in names if n not in self._heads) for names in (batch, positions))  # type: ignore[return-value]

    def _of_heads(self, name: str) -> P:
        """The spec of heads, (batch, heads, positions, features)."""
        batch, positions = self._names(name)
        return P(batch or None, self._heads or None, positions or None)

    def _draw(self, whole: Any) -> None:
        whole.out_proj.reset_parameters()
        whole._reset_parameters()

    # forward

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._check(query, key, value, key_padding_mask, attn_mask, is_causal)
        causal = is_causal and key_padding_mask is None and not need_weights
        attn_mask = None if causal else attn_mask
        batched = query.ndim == 3
        inputs = [self._batch_first(x) for x in (query, key, value)]
        if key is query:
            inputs[1] = inputs[0]
        if value is key:
            inputs[2] = inputs[1]
        q, k, v = (by_heads(x, self.head_dim) for x in self._projected(*inputs))
        k, v, added = self._extended(k, v)
        terms = self._terms(showing_added(key_padding_mask, added), showing_added(attn_mask, added))
        y, weights = self._attended(q, k, v, terms, causal, need_weights)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.sum(1) / self.num_heads
            weights = _psum(weights, self._heads) if self._heads else weights
        if not batched:
            return y[0], None if weights is None else weights[0]
        return (y if self.batch_first else y.transpose(0, 1)), weights

    def _check(self, query: Any, key: Any, value: Any, padding: Any, mask: Any, is_causal: bool) -> None:
        where, ndim = "spt.nn.MultiheadAttention", query.ndim
        shapes = f"query of {list(query.shape)}, key of {list(key.shape)}, value of {list(value.shape)}"
        if ndim not in (2, 3) or key.ndim != ndim or value.ndim != ndim:
            need, mend = "three dimensions of each, or two without a batch", "query[:, None] has a batch"
            raise SpecError.at(where, argument="query", got=shapes, need=need, mend=mend)
        if padding is not None and padding.ndim != ndim - 1:
            need, mend = "shape (N, S), or (S,) without a batch", "key_padding_mask[None]"
            raise SpecError.at(where, argument="key_padding_mask", got=describe(padding), need=need, mend=mend)
        if mask is not None and mask.ndim not in (2, 3):
            need, mend = "shape (L, S), or (N * heads, L, S)", "attn_mask.flatten(0, -3)"
            raise SpecError.at(where, argument="attn_mask", got=describe(mask), need=need, mend=mend)
        if is_causal and mask is None:
            need, mend = (
                "an attn_mask, of which is_causal says what it is",
                "nn.Transformer.generate_square_subsequent_mask(L)",
            )
            raise SpecError.at(where, argument="attn_mask", got="None, with is_causal", need=need, mend=mend)

    def _batch_first(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _projected(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values: (batch, positions, features of this worker's heads)."""
        bias = self._block("in_proj_bias")
        biases = [None] * 3 if bias is None else bias.reshape(3, -1)
        if not self._qkv_same_embed_dim:
            names = [f"{name}_proj_weight" for name in "qkv"]
            each = enumerate(zip(inputs, names, biases, strict=True))
            return [self._linear(k, x, self.shard(name), b, name) for k, (x, name, b) in each]
        weight = self.shard("in_proj_weight").reshape(3, -1, self.embed_dim)
        if inputs[0] is inputs[1] is inputs[2] and self._specs["kv_spec"] is None:
            bias = None if bias is None else bias.flatten()
            return list(self._linear(0, inputs[0], weight.flatten(0, 1), bias, _TOGETHER).chunk(3, -1))
        each = enumerate(zip(inputs, weight, biases, strict=True))
        return [self._linear(k, x, w, b, _EACH) for k, (x, w, b) in each]

    def _linear(self, k: int, x: torch.Tensor, weight: torch.Tensor, bias: Any, lies: str) -> torch.Tensor:
        """x by a weight that lies as this name says."""
        if not self._is_split:
            return functions.linear(x, weight, bias)
        spec = self._ordered(self._given("kv_spec" if k else "spec"))
        return functions.linear(x, weight, bias, spec=spec, w_spec=self._layout_of_parameter(lies))

    def _extended(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keys and values with the positions that bias_k, bias_v and add_zero_attn add, and their number."""
        added = (self.bias_k is not None) + self.add_zero_attn
        if added and self._names("kv_spec")[1]:
            got = f"keys whose positions are split over {self._names('kv_spec')[1]}"
            need, mend = "whole sequences for add_bias_kv and add_zero_attn", "kv_spec= that splits the batch alone"
            raise SpecError.at("spt.nn.MultiheadAttention", argument="kv_spec", got=got, need=need, mend=mend)
        bias_k, bias_v = (
            None if self.bias_k is None else by_heads(self.shard(n), self.head_dim) for n in ("bias_k", "bias_v")
        )
        return with_added_keys(k, v, bias_k, bias_v, self.add_zero_attn)

    def _terms(self, padding: Any, attn_mask: Any) -> dict[str, Any]:
        """The masks of torch as those of `attention`: where queries see keys, and numbers that are added."""
        terms: dict[str, Any] = {}
        attn_mask, padding = mask_of_heads(attn_mask, self.num_heads), padding_of_heads(padding)
        if padding is not None:
            batch, positions = self._names("kv_spec")
            lies = P(batch or None, None, None, positions or None) if self._is_split else None
            boolean = padding.dtype == torch.bool
            terms |= {"mask": ~padding, "mask_spec": lies} if boolean else {"bias": padding, "bias_spec": lies}
        if attn_mask is None:
            return terms
        if attn_mask.dtype == torch.bool and "mask" not in terms:
            return terms | {"mask": ~attn_mask}
        if attn_mask.dtype == torch.bool:
            attn_mask = additive(attn_mask, self.out_proj.weight.dtype)
        if "bias" in terms and self._is_split:
            raise SpecError.at(
                "spt.nn.MultiheadAttention",
                argument="attn_mask",
                got="numbers to be added, and a key_padding_mask of numbers too",
                need="one of the two of booleans, where something is split",
                mend="key_padding_mask == -torch.inf",
            )
        return terms | {"bias": attn_mask + terms["bias"] if "bias" in terms else attn_mask}

    def _attended(self, q: Any, k: Any, v: Any, terms: Any, causal: bool, need_weights: bool) -> tuple[Any, Any]:
        rate = self.dropout if self.training else 0.0
        specs: dict[str, Any] = {}
        if self._is_split:
            specs = {"spec": self._of_heads("spec"), "kv_spec": self._of_heads("kv_spec")}
            specs["out_spec"] = specs["spec"]
        if need_weights or rate:
            key = drawn_key() if rate else None
            y, w = functions.attention_with_weights(q, k, v, **terms, causal=causal, dropout=rate, key=key, **specs)
            return y, w if need_weights else None
        return functions.attention(q, k, v, **terms, causal=causal, method=self._specs["method"], **specs), None
