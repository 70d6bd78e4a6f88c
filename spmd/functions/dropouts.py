"""Dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.errors import SpecError, describe
from spmd.frontends import frontend
from spmd.functions.layouts import floating_operand, layout_of_operand
from spmd.functions.local import namespace
from spmd.global_ops.call import global_value
from spmd.layout import Layout, Spec
from spmd.random import distributions, layouts
from spmd.tracebacks import api_boundary

__all__ = ["dropout"]


@api_boundary
def dropout(x, rate: float, key: Any, spec: Spec | None = None):
    """x with each entry set to 0 with probability rate, and the others divided by 1 - rate.

    x: floating, of any shape; a block or an array of NumPy, CuPy or PyTorch, or a global array. rate: a number from 0
    to below 1. key: of `spmd.random`; another one for each use.
    spec: in a body, how the array of which x is a block is split: a spec, or a `Layout` on some of the workers. Which
    entries are dropped depends on the key and on their indices in the whole array, so it is the same on every mesh.
    Linear in x, and its own adjoint. Cost: no bytes; with a spec the workers exchange the shapes of their blocks.
    Raises SpecError in a body for an x that varies, without a spec: all workers would drop the same entries of their
    blocks. Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov, "Dropout", JMLR 15, 2014.
    """
    where = "spmd.functions.dropout"
    x = floating_operand(where, "x", x)
    check_rate(where, "rate", rate)
    return dropped(where, x, float(rate), key, spec)


def check_rate(where: str, argument: str, rate: Any) -> None:
    """Raise unless rate is a probability below 1."""
    if not isinstance(rate, int | float | np.floating) or not 0 <= rate < 1:
        need = "the probability to drop an entry, from 0 to below 1"
        raise SpecError.at(where, argument=argument, got=describe(rate), need=need, mend=f"{argument}=0.1")


def dropped(where: str, x: Any, rate: float, key: Any, spec: Spec | None) -> Any:
    """x after dropout, for a key and a rate that are right."""
    value, other = global_value(x), frontend(x)
    if value is not None or isinstance(spec, Layout):
        layout = layout_of_operand(where, "spec", x, spec)
    else:
        layout = layouts.layout_of_block(where, x, spec)
    shape, mesh = tuple(x.shape) if layout is None else layout.shape, None if value is None else value.mesh
    keep: Any = distributions.bernoulli(key, 1 - rate, shape, spec=layout, mesh=mesh)
    if other is None:
        return np.where(keep, x, x.dtype.type(0)) * (1 / (1 - rate))
    keep = keep if frontend(keep) is not None else np.array(keep)
    return other.where(keep, x, namespace(x).zeros_like(x)) * (1 / (1 - rate))
