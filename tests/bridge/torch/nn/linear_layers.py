"""Linear layers as pairs of Megatron's and as DistDL's, by `spt.nn.Linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spmd import Grid, Layout, P
from spmd.bridge import torch as spt

F64 = torch.float64
MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}]


def column(names: Any, *args: Any, sequence: int | None = None, gather: bool = False, **kwargs: Any) -> nn.Module:
    """Each worker along axes has some of the output features."""
    return spt.nn.Linear(
        *args, spec=_positions(names, sequence), w_spec=P(names), out_spec=P() if gather else None, **kwargs
    )


def row(names: Any, *args: Any, sequence: int | None = None, **kwargs: Any) -> nn.Module:
    """Each worker along axes has some of the input features; the result is a sum."""
    return spt.nn.Linear(*args, w_spec=P(None, names), out_spec=_positions(names, sequence), **kwargs)


def general(x: Any, y: Any, w: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Between partitions."""
    return spt.nn.Linear(*args, spec=x, w_spec=w, out_spec=y, **kwargs)


def _positions(names: Any, dimension: int | None) -> P | None:
    return None if dimension is None else P(*[None] * dimension, names)


def lies(spec: Any, shape: tuple[int, ...], axes: dict[str, int]) -> Layout:
    return spec.layout(shape, axes) if isinstance(spec, Grid) else Layout(shape, spec, axes)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
