"""Which dimension of each parameter a mesh axis splits: the layout of sharded parameters and optimiser states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.array import PartitionedArray
from spmd.autodiff import tree
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import SpecError, describe
from spmd.layout import Layout, P, Spec, block_sizes
from spmd.mesh import Mesh
from spmd.placement import mesh_for
from spmd.spec import unreduced_error
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary

__all__ = ["mesh_of", "own_spec", "shard_specs", "sharded_layout", "sharded_spec"]

_WHERE = "spmd.training.shard_specs"


@api_boundary
def shard_specs(params: Any, axis_name: str | Sequence[str], param_specs: Any = None) -> Any:
    """The specs of parameters that lie split over one more mesh axis, as ZeRO-3 and FSDP split them.

    params: a tree of arrays, global arrays, or objects with a shape, such as `ShapeDtypeStruct`. axis_name: an axis or
    a tuple of axes of the mesh, which is that of the enclosing `with mesh:` or of the global arrays. param_specs: how
    the parameters lie without it: a spec for all or a tree of P, `Layout` and None; None: P(), and global arrays by
    their own layout.

    The result is a tree like params. The axis is added to the dimension whose blocks it shortens most, so that the
    largest block is smallest; of several the first one that is whole counts, then the first one that is split already:
    P(None, "model") of shape (512, 384) becomes P("data", "model"). Uneven and empty blocks may occur. Numbers and
    arrays without dimensions keep their spec, and so does an array that the axis splits already.

    States of optimisers under `spmd.optim.shard` lie by the same specs. Cost: none. Raises SpecError for what is no
    array or no spec, with its path, and for grids of workers; MeshError for another axis, or within a body. Source:
    Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020.

        >>> params = {"w": np.zeros((512, 384)), "b": np.zeros(384), "scale": np.zeros(())}
        >>> with spmd.Mesh(data=4, model=2):
        ...     spmd.training.shard_specs(params, "data", {"w": P(None, "model"), "b": P("model"), "scale": P()})
        {'w': P('data', 'model'), 'b': P(('model', 'data')), 'scale': P()}
    """
    mesh = mesh_of(params, _WHERE)
    names = mesh.names(axis_name, _WHERE)
    structure = tree.structure(params, none_is_leaf=True)
    leaves = spread(_WHERE, "params", "param_specs", P() if param_specs is None else param_specs, params)
    own_layout = param_specs is None
    return tree.unflatten(
        structure, [_of_leaf(mesh, names, leaf.path, leaf.value, leaf.spec, own_layout) for leaf in leaves]
    )


def mesh_of(params: Any, where: str) -> Mesh:
    """The mesh of the global arrays in a tree, or of the enclosing `with mesh:`."""
    meshes = (x.mesh for x in map(value_of, tree.leaves(params)) if type(x) is PartitionedArray)
    return mesh_for(next(meshes, None), where)


def _of_leaf(mesh: Mesh, names: tuple[str, ...], path: str, x: Any, spec: Spec | None, own_layout: bool) -> Spec | None:
    if x is None or spec is None:
        return None
    value = value_of(x)
    shape = () if isinstance(value, int | float) else getattr(value, "shape", None)
    if shape is None or (type(x) is Array and x.state is not None):
        raise SpecError.at(
            _WHERE,
            argument=path,
            got=describe(x),
            need="an array, a global array, or an object with a shape",
            mend="params with None, or no entry, in place of what is no array",
        )
    if own_layout:
        spec = own_spec(value)
    if not isinstance(spec, Spec):
        raise SpecError.at(
            _WHERE,
            argument=f"param_specs, for {path}",
            got=describe(spec),
            need="a spec, a Layout, or None",
            mend='P() for copies on all workers, P(None, "model") for blocks',
        )
    spec.check(mesh.axes, _WHERE, f"param_specs, for {path}", len(shape))
    if isinstance(spec, P):
        return sharded_spec(shape, spec, names, mesh.axes)
    return sharded_layout(mesh.layout(tuple(shape), spec, _WHERE, f"param_specs, for {path}"), names, path)


def own_spec(value: Any) -> Spec:
    """The spec that an array has: that of a global array, of a `Layout`, or of a `ShapeDtypeStruct`."""
    layout = value.layout if type(value) is PartitionedArray else getattr(value, "spec", None)
    layout = value if isinstance(value, Layout) else layout
    if not isinstance(layout, Layout):
        return P() if layout is None else layout
    if layout.spec is None or not layout.balanced or layout.copies != "invariant":
        return layout
    return P(*layout.spec.trimmed, unreduced=layout.unreduced)


def sharded_spec(shape: Sequence[int], spec: P, names: Sequence[str], axes: Mapping[str, int]) -> P:
    """A spec with more axes in the one dimension whose largest block they make shortest in proportion.

    shape: of the whole array. names: the axes to add. axes: the sizes of all axes of the mesh. Ties go to the first
    dimension that is whole, then to the first. An array without dimensions keeps its spec, and so does one that the
    axes split already. It is the one rule for the layout of sharded parameters and states.

    >>> sharded_spec((3, 8), P(), ["data"], {"data": 4})
    P(None, 'data')
    """
    if spec.unreduced:
        raise unreduced_error(_WHERE, "param_specs", spec)
    names = tuple(n for n in names if n not in spec.axes)
    if not shape or not names:
        return spec
    dims = [*spec.dims, *[()] * (len(shape) - len(spec.dims))]
    chosen = _best_dimension([block_sizes(n, _parts(d, axes)) for n, d in zip(shape, dims, strict=True)], names, axes)
    dims[chosen] = (*dims[chosen], *names)
    return P(*P(*dims).trimmed)


def _parts(names: Sequence[str], axes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axes[n] for n in names)


def _best_dimension(sizes: Sequence[Sequence[int]], names: Sequence[str], axes: Mapping[str, int]) -> int:
    """The dimension to split further, of an array whose dimensions lie in blocks of these sizes."""
    count = math.prod(_parts(names, axes))

    def rank(d: int) -> tuple[float, bool, int]:
        longest = max(sizes[d])
        return -(-longest // count) / max(longest, 1) if longest else 1.0, len(sizes[d]) > 1, d

    return min(range(len(sizes)), key=rank)


def sharded_layout(layout: Layout, names: Sequence[str], path: str) -> Layout:
    """A layout with given cuts, each of whose blocks is cut further in one dimension."""
    if layout.spec is None or layout.copies != "invariant":
        raise SpecError.at(
            _WHERE,
            argument=f"param_specs, for {path}",
            got=str(layout),
            need="a layout by a spec, whose copies are of one value",
            mend='P() or P(None, "model"); spmd.reshard(x, spec) brings an array there',
        )
    names = [n for n in names if n not in layout.spec.axes]
    if not layout.shape or not names:
        return layout
    d = _best_dimension(layout.cuts, names, layout.axes)
    dims = list(layout.spec.dims)
    dims[d] = (*dims[d], *names)
    cuts: list[Sequence[int]] = list(layout.cuts)
    cuts[d] = [n for size in cuts[d] for n in block_sizes(size, _parts(names, layout.axes))]
    return Layout(layout.shape, P(*dims), layout.axes, cuts)
