"""`nn.Linear` on features, weights and results that are split."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch import functions
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.layer import Layer, layout_of_rows
from spmd.bridge.torch.nn.lazy import LazyLayer
from spmd.functions.layouts import layout_of_operand
from spmd.layout import P
from spmd.tracebacks import api_boundary

__all__ = ["LazyLinear", "Linear"]


class Linear(Layer, nn.Linear):
    """`nn.Linear`, y = x wᵀ + b, of which anything may be split: by `spt.functions.linear`.

        up = spt.nn.Linear(16, 64, w_spec=P("model"))  # each worker makes some of the features
        down = spt.nn.Linear(64, 16, w_spec=P(None, "model"))  # and takes them; one sum completes the result

    Arguments as those of `nn.Linear`. w_spec: of the weights, (out_features, in_features), in balanced blocks; None:
    whole. bias lies as their rows. spec: of x, with any dimensions before the features. None: the features lie as the
    columns of the weights, and nothing says how the other dimensions lie. out_spec: of the result; None: as x in its
    first dimensions, and as the rows of the weights in the last. Each is a spec, a `Layout`, or a `Grid` of some of the
    workers, on which tensors of any shape lie. generator: as for `spt.drawing`.
    Construct it in a body, on every worker. Initial values are those of `nn.Linear`, on any mesh.

    With `spec=P(None, "model")` before rows that are split over "model", positions are gathered first, and with
    `out_spec=P(None, "model")` after split columns the sum is scattered over them: sequence parallelism.
    Forward, gradients and cost: as `spmd.functions.linear`. Raises LayoutError and SpecError where specs do not fit.
    """

    _spec_names = "spec", "w_spec", "out_spec"

    @api_boundary
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        super().__init__(in_features, out_features, bias, "meta", dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec, out_spec=out_spec)

    def _layouts(self) -> dict[str, LayoutLike]:
        w_spec = P() if self._specs["w_spec"] is None else self._specs["w_spec"]
        return {"weight": w_spec, "bias": layout_of_rows(w_spec, self.weight.shape)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias, w_spec = self.shard("weight"), self._block("bias"), self._of_parameter("weight")
        spec = self._spec_of_input(input.ndim, w_spec)
        return functions.linear(input, weight, bias, spec=spec, w_spec=w_spec, out_spec=self._specs["out_spec"])

    def _spec_of_input(self, ndim: int, w_spec: LayoutLike | None) -> Any:
        spec = self._specs["spec"]
        if spec is None and isinstance(w_spec, P):
            return _constant_spec(w_spec.dims[1] if len(w_spec.dims) > 1 else (), ndim)
        return spec


class LazyLinear(LazyLayer, Linear):
    """`Linear` whose in_features are those of the first input, in all its blocks. As `nn.LazyLinear`.

    Arguments, but for in_features, as those of `Linear`, which it becomes. The first call is collective if spec or
    w_spec split the features.
    """

    cls_to_become = Linear
    _learnt = "in_features"

    @api_boundary
    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        specs: Any = {"spec": spec, "w_spec": w_spec, "out_spec": out_spec}
        super().__init__(0, out_features, bias, "meta", dtype, **specs)
        self._wait(device, dtype, out_features=out_features, bias=bias, generator=generator, **specs)

    def _length_of(self, input: torch.Tensor) -> int:
        spec = self._spec_of_input(input.ndim, self._specs["w_spec"])
        return layout_of_operand("spt.nn.LazyLinear", "spec", input, spec).shape[-1]

    def _length_in(self, shapes: dict[str, torch.Size]) -> int:
        return shapes["weight"][-1] if "weight" in shapes else 0


@lru_cache(maxsize=256)
def _spec_of_features(columns: tuple[str, ...], ndim: int) -> P | None:
    """The spec of an input whose features lie as the columns of the weights."""
    return P(*[None] * (ndim - 1), columns) if columns else None


@torch.compiler.assume_constant_result
def _constant_spec(columns: tuple[str, ...], ndim: int) -> P | None:
    return _spec_of_features(columns, ndim)
