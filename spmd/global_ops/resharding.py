"""Global arrays in other layouts."""

from __future__ import annotations

from typing import Any

from spmd.array import check_usable
from spmd.errors import LayoutError, SpecError, describe
from spmd.global_ops.call import global_value
from spmd.layout import Spec
from spmd.map_arguments import move_to_layout
from spmd.tracebacks import api_boundary

__all__ = ["reshard"]


@api_boundary
def reshard(x: Any, spec: Spec) -> Any:
    """A global array laid out by a spec, or in a layout. Collective, and differentiable.

    x: a global array, traced or not. Adjoint: the cotangent goes the other way. Cost: each worker sends the parts of
    its block that others need, once. As `jax.reshard`; `spmd.put` also takes bare arrays, and trees.
    Raises SpecError or LayoutError where spec does not fit.

        >>> with spmd.Mesh(x=2, y=2):
        ...     x = spmd.ones((4, 4), spec=P("x"))
        ...     spmd.reshard(x, P("x", "y")).layout.block_shape(0)
        ...     spmd.grad(lambda x: np.sum(spmd.reshard(x, P(None, "y"))))(x).spec
        (2, 2)
        P('x', None)
    """
    value = global_value(x)
    if value is None:
        raise LayoutError.at(
            "spmd.reshard",
            argument="x",
            got=describe(x),
            need="a global array",
            mend="spmd.put(x, spec) lays a bare array out",
        )
    check_usable("spmd.reshard", value)
    if not isinstance(spec, Spec):
        raise SpecError.at(
            "spmd.reshard",
            argument="spec",
            got=describe(spec),
            need="a P, or a Layout",
            mend='P("x"), or P() for copies',
        )
    spec.check(value.mesh.axes, "spmd.reshard", "spec", value.ndim, unreduced=True)
    target = value.mesh.layout(value.shape, spec, "spmd.reshard", "spec")
    return x if target == value.layout else move_to_layout(x, value.layout, target, value.mesh)
