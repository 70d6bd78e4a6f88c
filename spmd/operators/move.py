"""Values that one worker hands to another, while the others go on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from spmd.errors import LayoutError
from spmd.mesh import here
from spmd.operators.apply import operate
from spmd.operators.base import Operator, each_leaf
from spmd.operators.elsewhere import Rooted, dtype_of, rooted
from spmd.operators.memo import interned
from spmd.operators.reduce import AxisName, _names
from spmd.operators.sums import unmoved
from spmd.state import ROOTED, State, state_of
from spmd.transport.call import Group, Pair, Shape
from spmd.transport.plan import Forward, Plan

__all__ = ["Move", "move"]

_NOTHING = (0,)


@dataclass(frozen=True)
class Move(Operator):
    """Rooted(root) -> Rooted(to): the value goes from the one to the other; the root and all others go on.

    root, to: the places of the worker that has it, and of the one that gets it. Its adjoint is the `Move` back.
    """

    root: int = 0
    to: int = 0

    function: ClassVar[str] = "move"
    source: ClassVar[str] = ROOTED
    target: ClassVar[str] = ROOTED
    same_shape: ClassVar[bool | None] = None

    def out_state(self, state: State) -> State:
        return state_of(state.varying - set(self.axes))

    def check(self, group: Group, x: np.ndarray) -> None:
        for argument, place in (("source", self.root), ("target", self.to)):
            if not isinstance(place, int | np.integer) or not 0 <= place < group.size:
                raise LayoutError.at(
                    "spmd.move",
                    argument=argument,
                    got=repr(place),
                    need=f"a place along {' and '.join(map(repr, group.axes))}, from 0 to {group.size - 1}",
                    mend="spmd.move(x, axis_name, 0, 1) takes a value from the first worker to the second",
                )

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        me, root, to = group.index, self.root, self.to
        if root == to:
            return unmoved(self, group, shape, dtype)
        if me not in (root, to):
            return unmoved(self, group, shape, dtype, counted=True)
        pair = Pair(group, root, to)
        parts = (None, ... if pair.sends else None)
        combine = Forward(None, _NOTHING) if pair.sends else Forward(0)
        return Plan("exchange", pair, shape, dtype, parts, combine, lambda _: self)

    def out_shape(self, group: Group, shapes: Sequence[Shape], dtype: np.dtype) -> Shape:
        if group.index == self.to:
            return shapes[self.root]
        return _NOTHING if group.index == self.root else shapes[group.index]

    @property
    def H(self) -> Operator:
        return interned(Move, self.axes, self.to, self.root)


def move(x: Any, axis_name: AxisName, source: int, target: int) -> Any:
    """A value that the worker at place `source` along axis_name holds, taken to the one at place `target`.

    x: a Rooted value, or a pytree of them, at `source`. source, target: places along the axis, the same on all workers.
    All workers of the axis call it. Only these two exchange something: `source` sends and goes on, `target` waits for
    what comes, and the others go on at once. What is sent tells its shape.

    Forward (Rooted(source) -> Rooted(target)): y_target = x_source. Adjoint: the move back.
    Cost: one message of the block; none where source and target are the same worker.
    Raises LayoutError for a place out of range, StateError for a value that is not Rooted at `source`.

        >>> def body(x):
        ...     here = spmd.sum_reduce(x, "x", root=0)
        ...     return spmd.replicate(spmd.move(here, "x", 0, 2), "x", root=2)
        >>> with spmd.Mesh(x=3), spmd.ledger() as log:
        ...     spmd.map(body, P("x"), P())(np.arange(6.0))
        PartitionedArray([6., 9.], dtype=float64, spec=P(None))
    """
    names, frame = _names(axis_name, "move"), sys._getframe(1)
    op = interned(Move, names, source, target)
    receives = here("spmd.move").group(names).index == target

    def one(leaf: Any, at: Any) -> Rooted:
        held = rooted(leaf, names, source, "move", "source")
        block = operate(at(op), held.block, frame)
        shape = tuple(np.shape(block)) if receives else held.shape
        return Rooted(block, shape, dtype_of(block), names, target)

    return each_leaf(one, x)
