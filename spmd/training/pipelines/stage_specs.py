"""How the parameters of the stages of a pipeline lie: each on the worker of its stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from spmd.autodiff import tree
from spmd.autodiff.tracer import value_of
from spmd.errors import LayoutError, SpecError, describe
from spmd.layout import Layout, P, block_sizes
from spmd.mesh import Mesh
from spmd.optim.sharding import mesh_of
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary

__all__ = ["stage_specs"]

_WHERE = "spmd.training.stage_specs"


@api_boundary
def stage_specs(params: Sequence[Any], axis_name: str | Sequence[str] = "stage", param_specs: Any = None) -> list[Any]:
    """The layouts of the parameters of stages, each of which lies on the worker of its stage alone.

    params: for each stage a tree of its parameters: arrays or objects with a shape, such as `ShapeDtypeStruct`, of any
    shapes. Stage s lies on the worker at place s modulo the workers along axis_name, as `spmd.training.pipeline` takes
    it; the others have empty blocks of it. param_specs: how the parameters lie along other axes: a spec for all or a
    tree of P; None: P(), copies.

    The result is a list of trees of `Layout` for in_specs, out_specs and `spmd.put`. A parameter is split in its first
    dimension that no other axis splits, or else within those blocks. `spmd.save` stores the parameters as they are, so
    that they load on any number of workers.
    Cost: none. Raises LayoutError for numbers, which no layout keeps from the other workers; SpecError for what is no
    array or no spec; MeshError for another axis.

        >>> params = [{"w": np.ones((3, 2))}, {"w": np.ones((2, 1)), "b": np.ones(1)}]
        >>> with spmd.Mesh(stage=2):
        ...     specs = spmd.training.stage_specs(params)
        >>> [[layout.block_shape(worker) for worker in range(2)] for layout in spmd.tree.leaves(specs)]
        [[(3, 2), (0, 2)], [(0,), (1,)], [(0, 1), (2, 1)]]
    """
    mesh = mesh_of(params, _WHERE)
    names = mesh.names(axis_name, _WHERE)
    if not isinstance(params, list | tuple) or hasattr(params, "_fields"):
        raise SpecError.at(
            _WHERE,
            argument="params",
            got=describe(params),
            need="a list of trees of parameters, one tree for each stage",
            mend="[params] of one stage",
        )
    placed = iter(spread(_WHERE, "params", "param_specs", P() if param_specs is None else param_specs, [*params]))
    found = []
    for stage, own in enumerate(params):
        leaves, structure = tree.flatten(own, none_is_leaf=True)
        layouts = [_of_leaf(mesh, names, stage, *leaf) for leaf in islice(placed, len(leaves))]
        found.append(tree.unflatten(structure, layouts))
    return found


def _of_leaf(mesh: Mesh, names: tuple[str, ...], stage: int, path: str, spec: Any, x: Any) -> Layout | None:
    if x is None or spec is None:
        return None
    shape = () if isinstance(x, int | float) else getattr(value_of(x), "shape", None)
    if shape is None or not isinstance(spec, P) or not set(names).isdisjoint(spec.axes):
        raise SpecError.at(
            _WHERE,
            argument=path,
            got=f"{describe(x)}, with the spec {spec!r}",
            need=f"an array or an object with a shape, and a spec without {' or '.join(map(repr, names))}",
            mend='P() for copies, P(None, "model") for blocks along another axis',
        )
    if not shape:
        raise LayoutError.at(
            _WHERE,
            argument=path,
            got="a number, which has no dimension that could be empty on the workers of other stages",
            need="arrays of one dimension or more",
            mend="np.reshape(x, 1), and x[0] in the stage",
        )
    spec.check(mesh.axes, _WHERE, path, len(shape))
    dims = [*spec.dims, *[()] * (len(shape) - len(spec.dims))]
    d = next((d for d, split in enumerate(dims) if not split), 0)
    sizes = block_sizes(shape[d], tuple(mesh.axes[n] for n in dims[d]))
    workers = math.prod(mesh.axes[n] for n in names)
    cuts: list[Sequence[int] | None] = [None] * len(shape)
    cuts[d] = [size if k == stage % workers else 0 for k in range(workers) for size in sizes]
    dims[d] = (*names, *dims[d])
    return Layout(tuple(shape), P(*dims), mesh.axes, cuts)
