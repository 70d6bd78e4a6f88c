"""Layers whose parameters get their shapes from the first input."""

from __future__ import annotations

from typing import Any

import torch

from spmd.bridge.torch.nn.layer import Layer
from spmd.functions.layouts import layout_of_operand

__all__ = ["LazyLayer"]


class LazyLayer(Layer):
    """A layer of which torch's class is lazy. A subclass derives from this class, the layer's methods, torch's class.

    The first call of forward learns the shape of the whole input, and lays out and draws the parameters. So all workers
    make it at the same time. `cls_to_become` is the layer that it is from then on.
    """

    _pending: Any = None
    """The device and the generator for the parameters."""

    def _place(self, device: Any, generator: torch.Generator | int | None, **specs: Any) -> None:
        self._set_specs(specs)
        self._placed = False
        self._pending = device, generator

    def initialize_parameters(self: Any, *inputs: torch.Tensor, **_: Any) -> None:
        """Lay out and draw the parameters for inputs of the shapes of these. Collective."""
        if self._pending is None:
            return
        where = f"spt.nn.{type(self).__name__}"
        layouts = (layout_of_operand(where, "spec", x, self._specs["spec"]) for x in inputs)
        super().initialize_parameters(*(torch.empty(each.shape, device="meta") for each in layouts))  # type: ignore[misc]
        device, generator = self.__dict__.pop("_pending")
        super()._place(device, generator, **self._specs)

    def _lazy_load_hook(self: Any, *args: Any) -> None:
        super()._lazy_load_hook(*args)  # type: ignore[misc]  # makes whole parameters, of the shapes that are loaded
        if self._pending is not None and not self.has_uninitialized_params():
            device, _ = self.__dict__.pop("_pending")
            self._placed = True
            self._split_parameters()
            self.to_empty(device=torch.get_default_device() if device is None else device)
