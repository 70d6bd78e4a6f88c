"""Layers cut into stages of even cost: `spmd.training.split_stages`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from spmd.errors import SpecError, describe

__all__ = ["costs_of", "cuts_of", "split_stages"]


def split_stages(
    layers: Sequence[Any], n: int, *, cost: Callable[[Any], float] | Sequence[float] | None = None
) -> list[list[Any]]:
    """Layers, one after the other, cut into n stages whose most expensive one is as cheap as it can be.

    layers: of any kind, such as pairs of a function and its parameters. cost: of each layer, as numbers or as a
    function of a layer; None: all cost the same. Each stage has at least one layer, and those before have as many as
    fit.
    Returns n lists of layers. Raises SpecError for fewer layers than stages, and for costs below zero.

        >>> spmd.training.split_stages(["embed", "a", "b", "c", "head"], 3, cost=[4, 1, 1, 1, 3])
        [['embed'], ['a', 'b', 'c'], ['head']]
    """
    layers = [*layers]
    ends = cuts_of(costs_of(layers, cost, "spmd.training.split_stages"), n, "spmd.training.split_stages")
    return [layers[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def costs_of(layers: Sequence[Any], cost: Any, where: str) -> list[float]:
    """The cost of each layer, as numbers."""
    if cost is None:
        return [1.0] * len(layers)
    costs: list[Any] = [cost(layer) for layer in layers] if callable(cost) else [*cost]
    if len(costs) != len(layers) or not all(isinstance(c, int | float) and 0 <= c < math.inf for c in costs):
        raise SpecError.at(
            where,
            argument="cost",
            got=f"{len(costs)} costs for {len(layers)} layers: {costs}",
            need="a number of at least 0 for each layer",
            mend="cost=[...], or a function of a layer",
        )
    return [float(c) for c in costs]


def cuts_of(costs: Sequence[float], n: int, where: str) -> list[int]:
    """Where n stages end, such that the largest sum of costs is as small as it can be.

    A dynamic programme over the number of stages and the first layers that they have.
    """
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= len(costs):
        raise SpecError.at(
            where,
            argument="n",
            got=f"{describe(n)} stages of {len(costs)} layers",
            need=f"from 1 to {len(costs)}: a layer or more in each stage",
            mend=f"n={max(1, len(costs))}, or smaller layers",
        )
    sums = [0.0, *accumulate(costs)]
    best = [*sums]
    for k in range(2, n + 1):
        best = [
            min((max(best[j], sums[i] - sums[j]) for j in range(k - 1, i)), default=math.inf)
            for i in range(len(costs) + 1)
        ]
    ends, start = [], 0
    for rest in reversed(range(n)):
        fitting = [
            i for i in range(start + 1, len(costs) + 1 - rest) if sums[i] - sums[start] <= best[-1] or i == start + 1
        ]
        start = fitting[-1] if rest else len(costs)
        ends.append(start)
    return ends
