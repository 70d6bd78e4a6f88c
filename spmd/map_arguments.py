"""What goes into a map: arguments laid out as in_specs say, and cotangents as out_specs do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray, relayout
from spmd.autodiff.dtypes import dtype_name, kind_of_dtype
from spmd.autodiff.registry import primitive
from spmd.autodiff.tracer import Array, value_of
from spmd.kernels import on_device
from spmd.layout import Layout, P, Spec
from spmd.mesh import Mesh, Worker
from spmd.operators.base import Join
from spmd.placement import cut, put
from spmd.replicas.compare import compared_part, digest, is_skipped, next_turn
from spmd.replicas.records import Record, Replicas
from spmd.state import state_of


def positional_leaves(leaves: Sequence) -> tuple[tuple, dict]:
    """Arguments that are leaves themselves, by their places."""
    return tuple(leaves), {}


def is_on_tape(x, tape) -> bool:
    return type(x) is Array and x.tape is tape


def differentiable(x) -> bool:
    return type(x) is Array and kind_of_dtype(x.dtype) in ("f", "c")


def layout_of(x) -> Layout | None:
    x = value_of(x)
    return x.layout if isinstance(x, PartitionedArray) else None


def parameter_names(f: Callable) -> tuple[str, ...]:
    """The names of the positional parameters of a function, as far as they are known."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


class MapArgument:
    """One argument, ready to give every worker its block.

    value: what is passed as it is; blocks: those to pass instead, by worker, in the state of the spec.
    kind: what of the argument the choice of a scheduler may depend on.
    """

    __slots__ = ("blocks", "kind", "number", "spec", "state", "value")

    def __init__(
        self,
        value: Any,
        blocks: dict[int, np.ndarray] | None = None,
        spec: Spec | None = None,
        *,
        number: bool = False,
    ):
        self.value = value
        self.number = number
        self.blocks = blocks
        self.spec = spec
        self.state = state_of(spec.varying) if spec is not None else None
        self.kind = None if blocks is None else getattr(value, "shape", ())

    def block(self, worker: Worker):
        """The worker's block, with its state where states are tracked."""
        if self.blocks is None:
            return self.value
        block = worker.comm.given(self.blocks[worker.index])
        return Array(block, self.state) if worker.tracked else block

    def note(self, mesh: Mesh, replicas: Replicas, where: str, path: str, turns: dict[Any, int]) -> None:
        """Note what was not compared before. What has the spec None may be anything."""
        x = self.value
        if self.number:
            replicas.add(tuple(mesh.axes), Record(where, path, "", repr(x), 0, 0, None), "number")
        elif self.blocks is not None and not (isinstance(x, PartitionedArray) and x.compared):
            (block,) = self.blocks.values()
            if isinstance(x, PartitionedArray):
                if x.compared is None and not on_device(block):
                    turn = next_turn(turns, ("rests", path, block.shape))
                    if is_skipped(turn, block.nbytes):
                        return
                replicas.arrays.append(x)
            shape = f"{dtype_name(block.dtype)}{[*np.shape(x)]}, {self.spec}"
            note_argument(mesh, replicas, Record(where, path, "", shape, 0, 0, None), self.spec, block, turns)


def note_argument(
    mesh: Mesh, replicas: Replicas, record: Record, spec: Spec | None, block: Any, turns: dict[Any, int]
) -> None:
    """Note an argument of one of several processes: its shape and spec, for the comparison with all others, and its
    block, with those that hold copies of it."""
    replicas.add(tuple(mesh.axes), record, "shape")
    copies = tuple(n for n in mesh.axes if isinstance(spec, P) and n not in spec.varying)
    if copies and not on_device(block):
        turn = next_turn(turns, (record.argument, block.shape))
        part = compared_part(block, turn)
        replicas.add(copies, record._replace(turn=turn, number=digest(part), value=part), "argument")


def cotangent_input(mesh: Mesh, out: PartitionedArray, g) -> MapArgument | None:
    """A cotangent laid out as the result it belongs to, uneven blocks included."""
    if g is None:
        return None
    given = g
    if not isinstance(g, PartitionedArray):
        g = put(np.broadcast_to(g if on_device(g) else np.asarray(g), out.shape), out.spec, mesh)
    return MapArgument(given, relayout(g, out.layout).blocks, out.spec)


def settled_cotangent(g, value):
    """A gradient as its argument came: laid out like a PartitionedArray, bare for bare data."""
    bare, value = value_of(g), value_of(value)
    if type(bare) is type(value) is PartitionedArray and bare.layout is value.layout:
        return g
    have, want = (x.layout if isinstance(x, PartitionedArray) else None for x in (bare, value))
    if have == want:
        return g
    return brought(g, have, want, (value if have is None else bare).mesh, on_device(value))


def _way_back(g, _ans, _x, have: Layout | None, want: Layout | None, mesh: Mesh, there: bool = False) -> Any:
    return brought(g, want, have, mesh, there)


@primitive("relayout", _way_back)
def brought(x, have: Layout | None, want: Layout | None, mesh: Mesh, there: bool = False) -> Any:
    """An array in another layout; None for bare data, which is left there, on the device, or comes to the host. Its
    transpose is the way back."""
    if want is None:
        return (x.gathered() if there else x.numpy()) if isinstance(x, PartitionedArray) else x
    return relayout(x, want) if isinstance(x, PartitionedArray) else PartitionedArray(cut(x, want, mesh), want, mesh)


class Settling(Join):
    """States as in bodies; outside of them, gradients get the layout of their arguments."""

    def settle(self, g, value):
        return settled_cotangent(g, value)

    def whole(self, x):
        value = value_of(x)
        return brought(x, value.layout, None, value.mesh) if isinstance(value, PartitionedArray) else x
