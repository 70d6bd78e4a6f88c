"""`spt.put`: place tensors on a mesh, in bodies and outside of them."""

from __future__ import annotations

from typing import Any

import torch

from spmd.array import PartitionedArray
from spmd.autodiff import tree
from spmd.bridge.torch.global_tensors.tensor import global_tensor
from spmd.bridge.torch.interop import check_device, tensor_of
from spmd.bridge.torch.left_alone import left_alone
from spmd.bridge.torch.sharded_tensors.tensor import ShardedTensor, moved, of_array
from spmd.errors import LayoutError, MeshError, describe
from spmd.grid import Grid
from spmd.layout import Layout, P
from spmd.mesh import WORKER, Mesh
from spmd.placement import checked_layout, mesh_for
from spmd.placement import put as put_array
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary

__all__ = ["put"]

_WHERE = "spt.put"


@left_alone("spt.put: its result is no tensor of a graph; call it outside, or compile without fullgraph=True")
@api_boundary
def put(x: Any, spec: Any, mesh: Mesh | None = None) -> Any:
    """Lay a tensor, or a pytree of tensors, out by a spec.

    x: outside of bodies tensors or arrays that every process has, of which each worker keeps its block;
    `PartitionedArray`s and sharded tensors too. In a body a tensor that all workers have, or a global tensor.
    spec: a P, a Layout or a Grid, or a tree of specs and layouts that is a prefix of the tree of x. mesh: outside of
    bodies, by default that of the enclosing `with mesh:`, or of x.
    Returns a `ShardedTensor` outside of bodies, a `GlobalTensor` in them; where the spec splits nothing a plain tensor.

    Forward: a part of x, on each worker. Gradient: that of the whole, laid out as x was. Cost: nothing; of tensors that
    lie in another layout, the parts that are missing.
    Raises SpecError and LayoutError for a spec that does not fit, MeshError without a mesh.

        >>> with spmd.Mesh(x=2):
        ...     x = spt.put(torch.arange(5.0), P("x"))
        >>> x.shape, (x + 1).whole()
        (torch.Size([5]), tensor([1., 2., 3., 4., 5.]))
    """
    if isinstance(spec, Grid):
        leaves: list[Any] = [leaf._replace(spec=spec) for leaf in spread(_WHERE, "x", "spec", P(), x)]
    else:
        leaves = spread(_WHERE, "x", "spec", spec, x)
    placed = [leaf.value if leaf.spec is None or leaf.value is None else _put(leaf, mesh) for leaf in leaves]
    is_single = len(leaves) == 1 and leaves[0].value is x
    return placed[0] if is_single else tree.unflatten(tree.structure(x, none_is_leaf=True), placed)


def _put(leaf: Any, mesh: Mesh | None) -> Any:
    """A leaf, whose spec may be a grid, laid out."""
    x, spec = leaf.value, leaf.spec
    if WORKER.get() is not None:
        if mesh is not None:
            raise MeshError.at(
                _WHERE,
                argument="mesh",
                got="a mesh, in a body",
                need="none: it is that of the body",
                mend="leave it out",
            )
        return global_tensor(x, spec)
    if isinstance(x, ShardedTensor | PartitionedArray):
        mesh = mesh or x.mesh
        if mesh != x.mesh:
            raise MeshError.at(
                _WHERE,
                argument="mesh",
                got=f"{mesh} for {describe(x)} on {x.mesh}",
                need="the mesh that it is on",
                mend="spt.put(x.whole(), spec, mesh)" if isinstance(x, ShardedTensor) else "x.numpy()",
            )
    mesh = mesh_for(mesh, _WHERE)
    if not isinstance(x, torch.Tensor | PartitionedArray):
        x = torch.as_tensor(x)
    if isinstance(spec, Grid):
        spec = spec.layout(tuple(x.shape), mesh.axes)
    if isinstance(x, PartitionedArray):
        laid_out = put_array(x, spec, mesh)
        _check_layout(laid_out.layout)
        return of_array(laid_out) if laid_out.layout.varying else tensor_of(laid_out.numpy().copy())
    if not isinstance(x, ShardedTensor):
        check_device(x, mesh, _WHERE, leaf.path)
    layout = checked_layout(_WHERE, tuple(x.shape), spec, mesh)
    _check_layout(layout)
    return moved(x, layout, mesh)


def _check_layout(layout: Layout) -> None:
    if layout.unreduced or layout.has_copies and layout.copies == "varying":
        raise LayoutError.at(
            _WHERE,
            argument="spec",
            got=str(layout),
            need="one value of each entry: tensors have no unreduced axes, and their copies are equal",
            mend='P("data") for copies along the other axes; spmd.put of an array for sums',
        )
