"""All-to-all: every worker has a piece for every other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from spmd.errors import LayoutError, message
from spmd.operators.base import Launched, Operator, agree, normal_axis, operate, pieces, sealed, split_at
from spmd.operators.reduce import AxisName, _names
from spmd.transport.base import Call, Comm, Group, scatter_cost

__all__ = ["AllToAll", "all_to_all"]


@dataclass(frozen=True)
class AllToAll(Operator):
    """V -> V: each block is split along one dimension, piece k goes to worker k, what arrives is joined along another.

    sizes: the lengths of the pieces along split_axis (None: balanced). joined: those of the pieces that arrive along
    concat_axis (None: as they come). Its adjoint is `AllToAll` with the two swapped.
    """

    split_axis: int = 0
    concat_axis: int = 0
    tiled: bool = False
    sizes: tuple[int, ...] | None = None
    joined: tuple[int, ...] | None = None

    function: ClassVar[str] = "all_to_all"
    private: ClassVar[tuple[str, ...]] = ("sizes", "joined")

    def _axes(self, ndim: int) -> tuple[int, int]:
        split = normal_axis(self.function, "split_axis", self.split_axis, ndim)
        return split, normal_axis(self.function, "concat_axis", self.concat_axis, ndim)

    def check(self, group: Group, x: np.ndarray) -> None:
        split, _ = self._axes(x.ndim)
        if not self.tiled and x.shape[split] != group.size:
            raise LayoutError(
                message(
                    f"spmd.{self.function}",
                    argument="x",
                    got=f"length {x.shape[split]} in dimension {split}",
                    need=f"length {group.size}, one entry per worker",
                    mend="tiled=True splits a dimension of any length into blocks",
                )
            )
        if self.tiled:
            split_at(self, group, x.shape, split, self.sizes)

    def parts(self, group: Group, x: np.ndarray) -> list[np.ndarray]:
        """The piece for each member."""
        split, _ = self._axes(x.ndim)
        if self.tiled:
            return pieces(x, split, split_at(self, group, x.shape, split, self.sizes))
        return [np.asarray(np.take(x, k, axis=split), order="C") for k in range(group.size)]

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        split, concat = self._axes(x.ndim)

        def arrive(blocks: list[np.ndarray]):
            agree(self.function, [b.shape for b in blocks], concat if self.tiled else None)
            if not self.tiled:
                return sealed(np.stack(blocks, axis=concat)), replace(self, split_axis=split, concat_axis=concat)
            sizes = split_at(self, group, x.shape, split, self.sizes)
            joined = tuple(b.shape[concat] for b in blocks)
            bound = replace(self, split_axis=split, concat_axis=concat, sizes=sizes, joined=joined)
            return sealed(np.concatenate(blocks, axis=concat)), bound

        return comm.all_to_all(group, call, self.parts(group, x)), arrive

    @property
    def H(self) -> Operator:
        return AllToAll(self.axes, self.concat_axis, self.split_axis, self.tiled, self.joined, self.sizes)

    def cost(self, group: Group, x: np.ndarray) -> tuple[int, int]:
        return scatter_cost(group, self.parts(group, x))


def all_to_all(
    x,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    sizes: Sequence[int] | None = None,
):
    """Each worker's block split over the workers along axis_name, and what they send here joined.

    x: the block, or a pytree of blocks. tiled=True: dimension split_axis is cut into n pieces (balanced, or of the
    given sizes), piece k goes to worker k, and what arrives is joined along concat_axis; blocks may be uneven there.
    tiled=False: dimension split_axis has one entry per worker and goes away; the entries that arrive are stacked
    along a new dimension concat_axis.

    Forward: y_k = [x_0[piece k]; x_1[piece k]; ...]. Adjoint: the same with the dimensions swapped, the pieces as
    they came. Cost: one all-to-all. As `jax.lax.all_to_all`.
    """
    names = _names(axis_name, "all_to_all")
    given = None if sizes is None else tuple(int(n) for n in sizes)
    return operate(AllToAll(names, split_axis, concat_axis, tiled, given), x, sys._getframe(1))
