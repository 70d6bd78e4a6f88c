"""Blocks that move from worker to worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import ClassVar

import numpy as np

from spmd.errors import LayoutError, describe, message
from spmd.mesh import here
from spmd.operators.base import Launched, Operator, Shape, operate, sealed
from spmd.operators.reduce import AxisName, _names
from spmd.transport.base import Call, Comm, Group

__all__ = ["Permute", "ppermute", "shift"]


@dataclass(frozen=True)
class Permute(Operator):
    """V -> V: worker `source` gives its block to worker `target`, for each pair; who receives nothing has zeros.

    shapes: those of this worker's block before and after, once met. Its adjoint is `Permute` of the inverse.
    """

    perm: tuple[tuple[int, int], ...] = ()
    shapes: tuple[Shape, Shape] | None = None

    function: ClassVar[str] = "ppermute"
    private: ClassVar[tuple[str, ...]] = ("shapes",)

    def check(self, group: Group, x: np.ndarray) -> None:
        where = f"spmd.{self.function}"
        for side, name in ((0, "source"), (1, "target")):
            seen: set[int] = set()
            for pair in self.perm:
                k = pair[side]
                if not 0 <= k < group.size:
                    raise LayoutError(
                        message(
                            where,
                            argument="perm",
                            got=f"the pair {pair}, whose {name} is out of range",
                            need=f"places from 0 to {group.size - 1} along {' and '.join(map(repr, group.axes))}",
                            mend=f"count modulo the size: [(i, (i + 1) % {group.size}) for i in range({group.size})]",
                        )
                    )
                if k in seen:
                    raise LayoutError(
                        message(
                            where,
                            argument="perm",
                            got=f"{name} {k} twice in {list(self.perm)}",
                            need="every worker at most once as source and once as target",
                            mend="add up the results of several ppermutes",
                        )
                    )
                seen.add(k)

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        sends = {target: x for source, target in self.perm if source == group.index}
        fill = x.shape if self.shapes is None else self.shapes[1]

        def arrive(received: dict[int, np.ndarray]):
            block = next(iter(received.values())) if received else sealed(np.zeros(fill, x.dtype))
            return block, replace(self, shapes=(x.shape, block.shape))

        return comm.exchange(group, call, sends), arrive

    @property
    def H(self) -> Operator:
        inverse = tuple(sorted((t, s) for s, t in self.perm))
        return Permute(self.axes, inverse, None if self.shapes is None else (self.shapes[1], self.shapes[0]))

    def cost(self, group: Group, x: np.ndarray) -> tuple[int, int]:
        n = sum(s == group.index and t != group.index for s, t in self.perm)
        return n, n * x.nbytes


def ppermute(x, axis_name: AxisName, perm: Sequence[tuple[int, int]]):
    """Blocks sent from worker to worker along axis_name.

    x: the block, or a pytree of blocks; uneven ones travel as they are. perm: pairs (source, target) of places along
    the axis, each at most once as source and once as target. A worker that is no target gets zeros of its own shape.

    Forward: y_target = x_source. Adjoint: the inverse permutation. Cost: a message per pair. As `jax.lax.ppermute`.
    Raises LayoutError for a place out of range or named twice.
    """
    names = _names(axis_name, "ppermute")
    try:
        pairs = tuple(sorted((index(s), index(t)) for s, t in perm))
    except (TypeError, ValueError):
        raise LayoutError(
            message(
                "spmd.ppermute",
                argument="perm",
                got=repr(perm),
                need="pairs (source, target) of ints, places along the axis",
                mend="[(0, 1), (1, 0)] swaps the blocks of workers 0 and 1",
            )
        ) from None
    return operate(Permute(names, pairs), x, sys._getframe(1))


def shift(x, axis_name: AxisName, offset: int = 1, *, wrap: bool = True):
    """Blocks sent `offset` workers up along axis_name: y_k = x_(k - offset).

    wrap: the axis is a ring. Otherwise the blocks that pass its end are dropped, and those at its start get zeros.
    Adjoint: the shift by -offset.
    """
    names = _names(axis_name, "shift")
    n = here("spmd.shift").group(names).size
    if not isinstance(offset, int | np.integer):
        raise LayoutError(
            message(
                "spmd.shift",
                argument="offset",
                got=describe(offset),
                need="an int, the same on all workers",
                mend="spmd.shift(x, axis_name, 1); spmd.ppermute takes any pairs of workers",
            )
        )
    pairs = tuple((k, (k + offset) % n) for k in range(n) if wrap or 0 <= k + offset < n)
    return operate(Permute(names, pairs), x, sys._getframe(1))
