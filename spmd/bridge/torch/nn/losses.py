"""Losses on results that are split: the sum or the mean over all workers, the same on each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spmd.bridge.torch import functions
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.layer import Layer
from spmd.bridge.torch.partitioned.parameter import Parameter
from spmd.global_ops.call import names_of
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.tracebacks import api_boundary

__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "SmoothL1Loss",
]


class _Loss(Layer):
    """A loss of torch with a spec of the input."""

    reduction: str

    @api_boundary
    def __init__(self, *args: Any, spec: LayoutLike | None = None, **options: Any):
        super().__init__(*args, **options)
        self._set_specs({"spec": spec})

    @property
    def _spec(self) -> Any:
        return self._specs["spec"]

    def _aligned(self, name: str, input: torch.Tensor, dims: range) -> torch.Tensor | None:
        """This worker's part of weights that lie as these dimensions of the input, which has balanced blocks there.

        By a layout of some of the workers they stay whole.
        """
        whole = self._buffers[name]
        spec = self._spec.spec if isinstance(self._spec, Layout) else self._spec
        if whole is None or not isinstance(spec, P):
            return whole
        split = names_of(spec, input.ndim)
        names = [split[d] if n != 1 else () for d, n in zip(dims, whole.shape, strict=True)]
        if not any(names):
            return whole
        layout = Layout(whole.shape, P(*(each or None for each in names)), here("spt.nn").mesh.axes)
        return Parameter(whole, layout, requires_grad=False).block()

    def _of_entries(self, name: str, input: torch.Tensor) -> torch.Tensor | None:
        """This worker's part of weights that broadcast to the input."""
        weight = self._buffers[name]
        return None if weight is None else self._aligned(name, input, range(input.ndim)[input.ndim - weight.ndim :])

    def _of_classes(self, input: torch.Tensor) -> torch.Tensor | None:
        """This worker's part of the weights of the classes."""
        c = min(1, input.ndim - 1)
        return self._aligned("weight", input, range(c, c + 1))


class L1Loss(_Loss, nn.L1Loss):
    """`nn.L1Loss`. Arguments as torch's. spec: how the input and the target lie. See `spmd.functions.l1_loss`."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functions.l1_loss(input, target, reduction=self.reduction, spec=self._spec)


class MSELoss(_Loss, nn.MSELoss):
    """`nn.MSELoss`. Arguments as torch's. spec: how the input and the target lie. See `spmd.functions.mse_loss`."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functions.mse_loss(input, target, reduction=self.reduction, spec=self._spec)


class SmoothL1Loss(_Loss, nn.SmoothL1Loss):
    """`nn.SmoothL1Loss`. Arguments as torch's. spec: how the input and the target lie.

    See `spmd.functions.smooth_l1_loss`.
    """

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functions.smooth_l1_loss(input, target, reduction=self.reduction, beta=self.beta, spec=self._spec)


class HuberLoss(_Loss, nn.HuberLoss):
    """`nn.HuberLoss`. Arguments as torch's. spec: how the input and the target lie. See `spmd.functions.huber_loss`."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functions.huber_loss(input, target, reduction=self.reduction, delta=self.delta, spec=self._spec)


class BCELoss(_Loss, nn.BCELoss):
    """`nn.BCELoss`. Arguments as torch's; weight is whole. spec: how the input and the target lie, in balanced blocks
    where there is a weight. See `spmd.functions.binary_cross_entropy`."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = self._of_entries("weight", input)
        return functions.binary_cross_entropy(input, target, weight=weight, reduction=self.reduction, spec=self._spec)


class BCEWithLogitsLoss(_Loss, nn.BCEWithLogitsLoss):
    """`nn.BCEWithLogitsLoss`. Arguments as torch's; weight and pos_weight are whole. spec: how the input and the target
    lie, in balanced blocks where there are weights. See `spmd.functions.binary_cross_entropy_with_logits`."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight, pos_weight = self._of_entries("weight", input), self._of_entries("pos_weight", input)
        return functions.binary_cross_entropy_with_logits(
            input, target, weight=weight, reduction=self.reduction, pos_weight=pos_weight, spec=self._spec
        )


class KLDivLoss(_Loss, nn.KLDivLoss):
    """`nn.KLDivLoss`. Arguments as torch's. spec: how the input and the target lie. See `spmd.functions.kl_div`."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functions.kl_div(input, target, reduction=self.reduction, log_target=self.log_target, spec=self._spec)


class PoissonNLLLoss(_Loss, nn.PoissonNLLLoss):
    """`nn.PoissonNLLLoss`. Arguments as torch's. spec: how the input and the target lie.

    See `spmd.functions.poisson_nll_loss`.
    """

    def forward(self, log_input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functions.poisson_nll_loss(
            log_input,
            target,
            log_input=self.log_input,
            full=self.full,
            eps=self.eps,
            reduction=self.reduction,
            spec=self._spec,
        )


class CrossEntropyLoss(_Loss, nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss`. Arguments as torch's; weight is whole. spec: how the input lies, classes too; in balanced
    blocks of classes where there is a weight. Targets lie as the input without the classes, and have numbers of the
    whole; probabilities lie as the input. See `spmd.functions.cross_entropy`."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functions.cross_entropy(
            input,
            target,
            weight=self._of_classes(input),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            spec=self._spec,
        )


class NLLLoss(_Loss, nn.NLLLoss):
    """`nn.NLLLoss`. Arguments as torch's; weight is whole. spec: as for `CrossEntropyLoss`. See
    `spmd.functions.nll_loss`."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functions.nll_loss(
            input,
            target,
            weight=self._of_classes(input),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            spec=self._spec,
        )
