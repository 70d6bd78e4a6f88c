"""Dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.errors import SpecError, describe
from spmd.functions.arguments import as_floating
from spmd.layout import P
from spmd.random import distributions, layouts
from spmd.tracebacks import api_boundary

__all__ = ["dropout"]


@api_boundary
def dropout(x, rate: float, key: Any, spec: P | None = None):
    """x with each entry set to 0 with probability rate, and the others divided by 1 - rate.

    x: floating, of any shape. rate: a number from 0 to below 1. key: of `spmd.random`; another one for each use.
    spec: in a body, how the array of which x is a block is split. Which entries are dropped depends on the key and on
    their indices in the whole array, so it is the same on every mesh. Linear in x, and its own adjoint. Raises
    SpecError in a body for an x that varies, without a spec: all workers would drop the same entries of their blocks.
    Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov, "Dropout", JMLR 15, 2014.
    """
    where = "spmd.functions.dropout"
    x = as_floating(where, "x", x)
    if not isinstance(rate, int | float | np.floating) or not 0 <= rate < 1:
        raise SpecError.at(
            where,
            argument="rate",
            got=describe(rate),
            need="the probability to drop an entry, from 0 to below 1",
            mend="rate=0.1",
        )
    rate = float(rate)
    layout = layouts.layout_of_block(where, x, spec)
    keep = distributions.bernoulli(key, 1 - rate, x.shape if layout is None else layout.shape, spec=layout)
    return np.where(keep, x, x.dtype.type(0)) * (1 / (1 - rate))
