"""What layers over space have in common: inputs with a batch and without, and lengths that are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.layer import Layer
from spmd.errors import SpecError, describe
from spmd.functions.window_arguments import per_dimension
from spmd.grid import Grid
from spmd.layout import Layout, P
from spmd.mesh import here

__all__ = ["SpatialLayer"]


class SpatialLayer(Layer):
    """A layer of torch on (N, C, *space), or on (C, *space) without a batch, with specs of as many dimensions."""

    _spec_names = "spec", "out_spec", "in_size"
    _space: ClassVar[int | None] = None
    """The number of dimensions of space; None: as the input has them."""

    def _set_specs(self, specs: dict[str, Any]) -> None:
        specs = dict(specs)
        size = specs.pop("in_size", None)
        super()._set_specs(specs)
        if size is not None:
            dims = self._space or (len(size) if isinstance(size, Sequence) else 1)
            lengths = per_dimension(f"spt.nn.{self._class_name}", "in_size", size, dims, minimum=0)
            size = lengths if self._space or isinstance(size, Sequence) else lengths[0]
        self._specs["in_size"] = size

    def _on_batch(self, function: Callable[..., Any], input: torch.Tensor, *args: Any, **options: Any) -> Any:
        """function(x, ...) of a batch, with its specs; of an input without a batch that of a batch of one."""
        spec, out_spec, space = self._specs["spec"], self._specs["out_spec"], self._space
        options["shape"] = self._shape(2 + (space or input.ndim - 2), self._whole_channels)
        if space is None or input.ndim == space + 2:
            return function(input, *args, spec=spec, out_spec=out_spec, **options)
        if input.ndim != space + 1:
            raise self._wrong_input(input, space)
        batch = input.reshape(int(_holds(spec)), *input.shape)
        y = function(batch, *args, spec=_with_batch(spec), out_spec=_with_batch(out_spec), **options)
        return tuple(map(_without_batch, y)) if isinstance(y, tuple) else _without_batch(y)

    def _shape(self, ndim: int, channels: int | None = None) -> tuple[int | None, ...] | None:
        """The shape of the whole input of so many dimensions, as far as it is known; None if it is to be learnt."""
        size = self._specs["in_size"]
        if size is None or self._specs["spec"] is None:
            return None
        size = (size,) * (ndim - 2) if isinstance(size, int) else size
        before = [None] * (ndim - len(size))
        return (*before[:1], channels, *before[2:], *size) if len(before) > 1 else (*before, *size)

    @property
    def _whole_channels(self) -> int | None:
        """The number of channels of the whole input, where the layer knows it."""
        return None

    def _wrong_input(self, input: torch.Tensor, dims: int) -> SpecError:
        space = ", ".join("DHW"[3 - dims :])
        return SpecError.at(
            f"spt.nn.{self._class_name}",
            argument="input",
            got=describe(input),
            need=f"shape (N, C, {space}), or (C, {space}) without a batch",
            mend="input[None] adds a dimension",
        )


def _with_batch(spec: LayoutLike | None) -> LayoutLike | None:
    """How a batch of one lies, of an array that lies so."""
    if isinstance(spec, P):
        return P(None, *(names or None for names in spec.dims))
    if isinstance(spec, Layout):
        shape, cuts = (1, *spec.shape), [(1,), *spec.cuts]
        if spec.spec is not None:
            return Layout(shape, P(None, *(names or None for names in spec.spec.dims)), spec.axes, cuts)
        assert spec.workers is not None
        blocks = [len(c) for c in cuts]
        copies = len(spec.workers) // max(1, len(spec.holders))
        return Layout.grid(shape, (*blocks, copies), spec.axes, spec.workers, cuts, copies=spec.copies)
    return spec  # a grid counts dimensions from the last


def _holds(spec: LayoutLike | None) -> bool:
    """Whether this worker holds a block, maybe an empty one."""
    if spec is None or isinstance(spec, P):
        return True
    worker = here("spt.nn")
    layout = spec.layout((0,) * len(spec.dims), worker.mesh.axes) if isinstance(spec, Grid) else spec
    return layout.positions(worker.index) is not None


def _without_batch(y: torch.Tensor) -> torch.Tensor:
    return y.reshape(y.shape[1:])
