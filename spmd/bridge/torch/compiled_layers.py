"""Layers in compiled functions: those that specs alone describe are traced, with their collectives in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import spmd
from spmd import functions
from spmd.bridge.torch.compiled import compilable
from spmd.bridge.torch.local.linear import linear as local_linear
from spmd.bridge.torch.local.linear import with_bias
from spmd.functions.products import Moves, SpecPlan, plan_by_specs, run_by_specs
from spmd.layout import P
from spmd.mesh import here

__all__ = ["LAYERS", "uncompiled"]

uncompiled: Any = torch.compiler.disable
"""Compiled functions call other layers uncompiled, because the workers may have to exchange shapes."""

_MOVES = Moves(
    compilable(spmd.pvary),
    compilable(spmd.psum),
    compilable(spmd.all_gather),
    compilable(spmd.psum_scatter),
    local_linear,
    with_bias,
)

_linear = uncompiled(functions.linear)


def linear(x, w, bias=None, *, spec=None, w_spec=None, out_spec=None, shape=None):
    if not torch.compiler.is_dynamo_compiling():
        return functions.linear(x, w, bias, spec=spec, w_spec=w_spec, out_spec=out_spec, shape=shape)
    specs = _names_of(spec), _names_of(w_spec), _names_of(out_spec)
    if shape is None and all(each is not False for each in specs):
        plan = _constant_plan(specs, x.ndim)
        if plan is not None:
            return run_by_specs(_MOVES, SpecPlan(*plan), x, w, bias)
    return _linear(x, w, bias, spec=spec, w_spec=w_spec, out_spec=out_spec, shape=shape)


def _names_of(spec: Any) -> Any:
    """The names of a spec, None for none, False for a layout or a grid."""
    return None if spec is None else spec.dims if isinstance(spec, P) else False


@torch.compiler.assume_constant_result
def _constant_plan(specs: tuple[Any, ...], ndim: int) -> tuple[Any, ...] | None:
    spec, w_spec, out_spec = (None if names is None else P(*names) for names in specs)
    plan = plan_by_specs(spec, w_spec, out_spec, ndim, here("spmd.functions.linear").mesh.sides)
    return None if plan is None else tuple(plan)


LAYERS: dict[str, Callable] = {"linear": linear}
"""The functions that are traced."""
