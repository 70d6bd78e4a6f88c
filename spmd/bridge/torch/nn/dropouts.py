"""Dropout of the same entries on any mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.dropout import alpha_dropout, dropout
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.layer import Layer
from spmd.tracebacks import api_boundary

__all__ = ["AlphaDropout", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "FeatureAlphaDropout"]


class _Dropout(Layer):
    """Dropout with a spec of the input. Which entries are dropped depends on the generator of the workers, and on their
    indices in the whole, so it is the same on any mesh; torch would drop others. inplace: the input stays as it is."""

    p: float

    @api_boundary
    def __init__(self, p: float = 0.5, inplace: bool = False, *, spec: LayoutLike | None = None):
        super().__init__(p, inplace)  # type: ignore[call-arg]
        self._set_specs({"spec": spec})

    def _together(self, ndim: int) -> range:
        """The dimensions along which entries are dropped together."""
        return range(0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        spec: Any = self._specs["spec"]
        together = self._together(input.ndim)
        return dropout(input, self.p, spec=spec, training=self.training, broadcast_dims=together)


class Dropout(_Dropout, nn.Dropout):
    """`nn.Dropout` of the same entries on any mesh. spec: how the input lies. See `spt.dropout`."""


class Dropout1d(_Dropout, nn.Dropout1d):
    """`nn.Dropout1d`: of channels of (N, C, L) or (C, L), the same on any mesh. spec: how the input lies."""

    def _together(self, ndim: int) -> range:
        return range(1 if ndim == 2 else 2, ndim)


class Dropout2d(_Dropout, nn.Dropout2d):
    """`nn.Dropout2d`: of channels of (N, C, H, W) or (N, C, L), the same on any mesh. spec: how the input lies."""

    def _together(self, ndim: int) -> range:
        return range(2, ndim)


class Dropout3d(_Dropout, nn.Dropout3d):
    """`nn.Dropout3d`: of channels of (N, C, D, H, W) or (C, D, H, W). spec: how the input lies."""

    def _together(self, ndim: int) -> range:
        return range(1 if ndim == 4 else 2, ndim)


class AlphaDropout(_Dropout, nn.AlphaDropout):
    """`nn.AlphaDropout` of the same entries on any mesh. spec: how the input lies."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        spec: Any = self._specs["spec"]
        together = self._together(input.ndim)
        return alpha_dropout(input, self.p, spec=spec, training=self.training, broadcast_dims=together)


class FeatureAlphaDropout(AlphaDropout, nn.FeatureAlphaDropout):
    """`nn.FeatureAlphaDropout`: of channels of (N, C, ...), the same on any mesh. spec: how the input lies."""

    def _together(self, ndim: int) -> range:
        return range(2, ndim)

    @classmethod
    def torch_class(cls) -> type[nn.Module]:
        return nn.FeatureAlphaDropout
