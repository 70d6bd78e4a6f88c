"""Operators within layers, where there are no data: as nodes of a graph, or as shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from spmd.bridge.torch.compiled import total_token
from spmd.bridge.torch.compiled_shapes import of_one_worker, tokens
from spmd.bridge.torch.function import Function, use_graph_calls
from spmd.bridge.torch.tensor_state import is_traced
from spmd.operators.base import Operator
from spmd.operators.sums import Vary

__all__ = ["ASSUMED_RESULT"]

ASSUMED_RESULT: ContextVar[Callable[[Any, torch.Tensor], torch.Tensor] | None] = ContextVar(
    "spmd_torch_assumed_result", default=None
)
"""What gives the result of an operator where nothing moves and only shapes matter; None elsewhere."""

_names: dict[Operator, str] = {}


def _token(op: Operator) -> str:
    """The name in graphs of an operator."""
    name = _names.get(op)
    if name is None:
        base = name = f"{op!r} of a layer"
        while name in tokens and tokens[name][0] != op:
            name = f"{base} ({len(_names)})"
        tokens[name] = op, (), {}
        of_one_worker.add(name)
        _names[op] = name
    return name


class _Varied(Function):
    """The identity, whose cotangents are summed over workers: nothing is copied, as by a node of the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, adjoint: str) -> torch.Tensor:
        ctx.adjoint = adjoint
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return torch.ops.spmd.apply(g, ctx.adjoint)[0], None


class _GraphCalls:
    def takes(self, x: torch.Tensor) -> bool:
        return is_traced(x) or ASSUMED_RESULT.get() is not None

    def apply(self, op: Any, x: torch.Tensor) -> torch.Tensor:
        assumed = ASSUMED_RESULT.get()
        if assumed is not None:
            return assumed(op, x)
        if type(op) is Vary:
            return _Varied.apply(x, _token(op.back))
        if isinstance(op, Operator):
            return torch.ops.spmd.apply(x, _token(op))[0]
        function = op.function if op.called is None else op.called.function
        return torch.ops.spmd.attain(x, function, total_token(function, op.axes), list(op.dims))

    def sized(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if ASSUMED_RESULT.get() is not None:
            return x if x.shape == shape else x.new_zeros(shape) + x.sum()
        for n, m in zip(x.shape, shape, strict=True):
            torch._check(n == m)
        return x


use_graph_calls(_GraphCalls())
