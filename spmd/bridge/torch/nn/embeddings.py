"""`nn.Embedding` with a table whose rows or features are split."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from spmd.bridge.torch import functions
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.layer import Layer
from spmd.errors import SpecError
from spmd.layout import P
from spmd.tracebacks import api_boundary

__all__ = ["Embedding"]


class Embedding(Layer, nn.Embedding):
    """`nn.Embedding`, of which anything may be split: by `spt.functions.embedding`.

        embed = spt.nn.Embedding(50257, 768, w_spec=P("model"))  # each worker has some of the rows
        head = spt.nn.Linear(768, 50257, bias=False, w_spec=P("model"))
        head.weight = embed.weight  # tied

    Arguments as those of `nn.Embedding`, but for max_norm, scale_grad_by_freq and sparse, which must be left as they
    are. w_spec: of the table, (num_embeddings, embedding_dim), in balanced blocks; None: whole. spec: of the ids.
    out_spec: of the result; None: as the ids, and as the table in the features. Each is a spec, a `Layout` or a `Grid`.
    generator: as for `spt.drawing`. Construct it in a body. Initial values are those of `nn.Embedding`, on any mesh.

    Forward, gradients, cost and errors: as `spmd.functions.embedding`. The row padding_idx gets no gradient.
    """

    _spec_names = "spec", "w_spec", "out_spec"

    @api_boundary
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        options: Any = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        super().__init__(num_embeddings, embedding_dim, *options, device="meta", dtype=dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec, out_spec=out_spec)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, embeddings: torch.Tensor, freeze: bool = True, padding_idx: int | None = None, **specs: Any
    ) -> Self:
        """The layer with rows that are given whole, the same on all workers. As `nn.Embedding.from_pretrained`, with
        specs; it copies the rows."""
        return cls.from_torch(nn.Embedding.from_pretrained(embeddings, freeze, padding_idx), **specs)

    def _set_specs(self, specs: dict[str, Any]) -> None:
        for name, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            value = getattr(self, name)
            if value != off:
                raise SpecError.at(
                    "spt.nn.Embedding",
                    argument=name,
                    got=repr(value),
                    need=f"{off}: what the other workers look up is not counted",
                    mend="nn.Embedding, made in spt.drawing(), where the table is whole; "
                    "spt.clip_grad_norm_, or weight decay of the optimiser",
                )
        super()._set_specs(specs)

    def _layouts(self) -> dict[str, LayoutLike]:
        return {"weight": P() if self._specs["w_spec"] is None else self._specs["w_spec"]}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functions.embedding(
            self.shard("weight"),
            input,
            padding_idx=self.padding_idx,
            spec=self._specs["spec"],
            table_spec=self._layout_of_parameter("weight"),
            out_spec=self._specs["out_spec"],
        )
