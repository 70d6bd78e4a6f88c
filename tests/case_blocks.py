"""The blocks that the cases of operators are of."""

from __future__ import annotations

from spmd.mesh import Mesh
from spmd.state import ROOTED
from spmd.testing import Case

__all__ = ["MESHES", "block_shapes"]

MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}]


def block_shapes(case: Case, mesh: Mesh) -> list[tuple[int, ...]]:
    """The shape of each worker's block of a case."""
    if case.spec is None:
        shapes = [case.shape] * mesh.size
    else:
        layout = mesh.layout(case.shape, case.spec)
        axes = tuple(layout.axes)  # of one between layouts those of its own group
        shapes = [layout.block_shape(mesh.group(w, axes).index) for w in range(mesh.size)]
    if case.operator.source == ROOTED:
        return [
            s if mesh.group(w, case.operator.axes).index == case.operator.root else (0,) for w, s in enumerate(shapes)
        ]
    return shapes
