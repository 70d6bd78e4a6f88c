"""The layout of the global array that a block of a body belongs to."""

from __future__ import annotations

from typing import Any

from spmd.array import PartitionedArray, layout_of
from spmd.errors import SpecError, StateError, describe
from spmd.functions.layouts import learnt_layout
from spmd.layout import Layout, P
from spmd.mesh import WORKER, here
from spmd.random.arguments import varying_axes
from spmd.tracebacks import api_boundary

__all__ = ["like"]


@api_boundary
def like(x: Any, spec: P) -> Layout:
    """The layout of the global array of which x is this worker's block, split by spec: to draw numbers of its shape.

    x: a block of a body, which varies over no other axes than those of spec; blocks may be uneven or empty. All workers
    along these axes call it and exchange their shapes; no data moves. For a `PartitionedArray` it is the layout.
    Raises StateError if x varies over more axes, LayoutError if the blocks do not fit together.

        >>> def noisy(x):
        ...     layout = spmd.random.like(x, P("data"))
        ...     return spmd.random.normal(spmd.random.key(0), layout.shape, spec=layout)
        >>> with spmd.Mesh(data=2):
        ...     spmd.map(noisy, P("data"), P("data"))(np.zeros(3)).numpy().round(3)
        array([-1.178, -0.268,  1.09 ])
        >>> spmd.random.normal(spmd.random.key(0), (3,)).round(3)
        array([-1.178, -0.268,  1.09 ])
    """
    where = "spmd.random.like"
    if type(x) is PartitionedArray:
        return x.layout
    worker = here(where)
    if not isinstance(spec, P):
        raise SpecError.at(where, argument="spec", got=describe(spec), need="a spec", mend='like(x, P("x"))')
    if not hasattr(x, "shape"):
        raise SpecError.at(
            where, argument="x", got=describe(x), need="a block, which has a shape", mend="np.asarray(x)"
        )
    spec.check(worker.mesh.axes, where, "spec", len(x.shape))
    extra = sorted(varying_axes(x) - spec.varying)
    if extra:
        raise StateError.at(
            where,
            argument="spec",
            got=f"{spec} for {describe(x)}, which varies over {extra[0]!r} too",
            need="the axes that split the array, all that it varies over",
            mend=f"name {extra[0]!r} in the spec, or sum or gather x along it first",
        )
    return learnt_layout(where, x, spec, worker)


def layout_of_block(where: str, x: Any, spec: P | None) -> Layout | None:
    """The layout of the global array of which x is a block, or which it is; None if x is a bare whole array."""
    worker = WORKER.get()
    if worker is None:
        return layout_of(x)
    if spec is None and (not worker.tracked or varying_axes(x)):
        raise SpecError.at(
            where,
            argument="spec",
            got=f"none, for {describe(x)}"
            + (f", which varies over {sorted(varying_axes(x))}" if worker.tracked else ""),
            need="how the whole is split, so that each worker has its own part of the random numbers",
            mend=f'{where}(..., spec=P("x", None)); P() for an array that all workers have',
        )
    return like(x, P() if spec is None else spec)
