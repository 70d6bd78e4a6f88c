"""Stencils of small blocks: the halo exchange and the kernel in one plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import numpy as np

from spmd.layout import offsets as starts_of
from spmd.operators.halo_combine import FillHalo
from spmd.operators.halo_geometry import along
from spmd.transport.call import Shape
from spmd.transport.handles import read_only
from spmd.transport.plan import Combine, Make, Plan

__all__ = ["SumNeighbours"]


@dataclass(frozen=True)
class SumNeighbours(Combine):
    """The stencil of a block that gets a halo along one dimension.

    halo: how the block gets it. periodic: what stands beyond the ends of the array along that dimension: itself again,
    or zeros. reach: how far the offsets reach along it. shape: of the result. sums: the stencil of an array with its
    halos.
    """

    halo: FillHalo
    periodic: bool
    reach: tuple[int, int]
    shape: Shape
    sums: Callable[[Any], Any]
    parallel: ClassVar[bool] = True

    def sources(self, plan: Plan) -> Collection[int]:
        return self.halo.sources(plan)

    def complete(self, plan: Plan, shapes: Sequence[Any]) -> tuple[Make, Shape]:
        fill, _ = self.halo.complete(plan, shapes)
        return self._summed(fill), self.shape

    def quick(self, plan: Plan, shapes: Sequence[Any]) -> Make | None:
        fill = self.halo.quick(plan, shapes)
        return None if fill is None else self._summed(fill)

    def _summed(self, fill: Make) -> Make:
        return lambda x, *more: read_only(self.sums(fill(x, *more)))

    def begin(self, plan: Plan, x: Any, borrowed: bool = False) -> Any:
        return self.halo.begin(plan, x, borrowed)

    def together(self, plans: Sequence[Plan], shapes: Sequence[Shape]) -> Callable[[list[Any]], list[Any]] | None:
        """One stencil of all blocks along the line: a call of the kernel takes longer than small sums."""
        d, (low, high) = self.halo.d, self.reach
        starts, before, after = starts_of([shape[d] for shape in shapes]), shapes[0][:d], shapes[0][d + 1 :]
        n = starts[-1]
        if n < max(low, high, 1):
            return None  # the array stands more than once beyond its ends
        whole, dtype, copies = (*before, low + n + high, *after), plans[0].dtype, prod(before) > 1
        inside, at_low, at_high = along(d, low, low + n), along(d, 0, low), along(d, low + n, low + n + high)
        last, first = along(d, n, low + n), along(d, low, low + high)
        spans = [along(d, start, stop) for start, stop in pairwise(starts)]

        def results(blocks: list[Any]) -> list[Any]:
            x = np.empty(whole, dtype)
            np.concatenate(blocks, d, x[inside])
            x[at_low] = x[last] if self.periodic else 0
            x[at_high] = x[first] if self.periodic else 0
            y = read_only(self.sums(x))
            return [read_only(y[span].copy()) for span in spans] if copies else [y[span] for span in spans]

        return results

    def __str__(self) -> str:
        return f"{self.halo}; then the stencil"
