"""Softmax along a dimension that may be split."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from spmd.bridge.torch import functions
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.layer import Layer
from spmd.errors import LayoutError, describe
from spmd.tracebacks import api_boundary

__all__ = ["LogSoftmax", "Softmax", "Softmax2d", "Softmin"]


class _Softmax(Layer):
    """A layer of `spt.functions` along a dimension, with a spec of the input."""

    dim: int | None

    @api_boundary
    def __init__(self, dim: int | None = None, *, spec: LayoutLike | None = None):
        super().__init__(dim)  # type: ignore[call-arg]
        self._set_specs({"spec": spec})

    def _along(self, ndim: int) -> int:
        """The dimension; without one that which torch chooses, with its warning."""
        if self.dim is not None:
            return self.dim
        warnings.warn(f"spt.nn.{self._class_name}: dim=None is deprecated: name the dimension", stacklevel=5)
        return 0 if ndim in (0, 1, 3) else 1


class Softmax(_Softmax, nn.Softmax):
    """`nn.Softmax` along a dimension that may be split. spec: how the input lies. See `spt.functions.softmax`.

    >>> layer = spt.nn.Softmax(1, spec=P(None, "x"))  # the classes are split
    >>> x = torch.tensor([[1.0, 2.0, 5.0]]).log()
    >>> spt.map(layer, P(None, "x"), P(None, "x"), mesh=spmd.Mesh(x=2))(x)
    tensor([[0.1250, 0.2500, 0.6250]])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functions.softmax(input, self._along(input.ndim), spec=self._specs["spec"])


class LogSoftmax(_Softmax, nn.LogSoftmax):
    """`nn.LogSoftmax` along a dimension that may be split. spec: how the input lies. See `spt.functions.log_softmax`.

    >>> layer = spt.nn.LogSoftmax(1, spec=P(None, "x"))
    >>> x = torch.tensor([[1.0, 2.0, 5.0]]).log()
    >>> spt.map(layer, P(None, "x"), P(None, "x"), mesh=spmd.Mesh(x=2))(x).exp()
    tensor([[0.1250, 0.2500, 0.6250]])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functions.log_softmax(input, self._along(input.ndim), spec=self._specs["spec"])


class Softmin(_Softmax, nn.Softmin):
    """`nn.Softmin` along a dimension that may be split. spec: how the input lies. See `spt.functions.softmin`.

    >>> layer = spt.nn.Softmin(1, spec=P(None, "x"))
    >>> x = -torch.tensor([[1.0, 2.0, 5.0]]).log()
    >>> spt.map(layer, P(None, "x"), P(None, "x"), mesh=spmd.Mesh(x=2))(x)
    tensor([[0.1250, 0.2500, 0.6250]])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functions.softmin(input, self._along(input.ndim), spec=self._specs["spec"])


class Softmax2d(Layer, nn.Softmax2d):
    """`nn.Softmax2d`: over the channels of (N, C, H, W) or (C, H, W), any of which may be split. spec: how they lie.

    >>> layer = spt.nn.Softmax2d(spec=P(None, "x"))  # the channels are split
    >>> x = torch.tensor([1.0, 2.0, 5.0]).log().reshape(1, 3, 1, 1)
    >>> spt.map(layer, P(None, "x"), P(None, "x"), mesh=spmd.Mesh(x=2))(x).flatten()
    tensor([0.1250, 0.2500, 0.6250])
    """

    @api_boundary
    def __init__(self, *, spec: LayoutLike | None = None):
        super().__init__()
        self._set_specs({"spec": spec})

    @api_boundary
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.ndim not in (3, 4):
            raise LayoutError.at(
                "spt.nn.Softmax2d",
                argument="input",
                got=describe(input),
                need="(N, C, H, W) or (C, H, W)",
                mend="spt.nn.Softmax(dim) along another dimension",
            )
        return functions.softmax(input, -3, spec=self._specs["spec"])
