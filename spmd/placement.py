"""Place arrays on a mesh: whole arrays, given blocks, and blocks that a function makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd import device as devices
from spmd.array import PartitionedArray, check_usable, owned_on, relayout, share_copies
from spmd.autodiff import tree
from spmd.autodiff.admission import admit
from spmd.autodiff.dtypes import dtype_name
from spmd.errors import (
    LayoutError,
    MeshError,
    SpecError,
    describe,
)
from spmd.kernels import on_device
from spmd.layout import Layout, Spec
from spmd.mesh import WORKER, Mesh, current_mesh
from spmd.replicas.compare import digest
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary

__all__ = ["cut", "from_blocks", "from_callback", "mesh_for", "put"]


def mesh_for(mesh: Mesh | None, where: str) -> Mesh:
    """The mesh of a call: the given one, otherwise that of the enclosing `with mesh:`."""
    if WORKER.get() is not None:
        raise MeshError.at(
            where,
            got="a call inside a body",
            need="a call from outside: a body has its own blocks only",
            mend="do it before the map, and pass the result as an argument",
        )
    found = mesh if mesh is not None else current_mesh()
    if found is not None and not isinstance(found, Mesh):
        raise MeshError.at(where, argument="mesh", got=describe(found), need="a Mesh", mend="mesh=spmd.Mesh(x=4)")
    if found is None:
        raise MeshError.at(
            where,
            argument="mesh",
            got="no mesh, and no enclosing `with mesh:`",
            need="a mesh to run on",
            mend="with spmd.Mesh(x=4): ..., or pass mesh=spmd.Mesh(x=4)",
        )
    return found


def _fits(spec: Any, mesh: Mesh, where: str, ndim: int, argument: str = "spec") -> None:
    """Raise if a spec is none, or does not fit the mesh or an array of ndim dimensions."""
    if not isinstance(spec, Spec):
        raise SpecError.at(
            where,
            argument=argument,
            got=describe(spec),
            need="a P, or a Layout",
            mend='P("x", None), or P() for copies',
        )
    spec.check(mesh.axes, where, argument, ndim)


def _numbers(x, where: str, argument: str, mesh: Mesh) -> np.ndarray:
    """x as an array. A frozen array stays frozen, and an array of a GPU stays there."""
    x = devices.home(where, argument, x, mesh.device)
    return x if on_device(x) else admit(x, where, argument, error=LayoutError)


@api_boundary
def put(x, spec: Any, mesh: Mesh | None = None) -> Any:
    """Place an array, or a pytree of arrays, on a mesh.

    x: bare arrays that every process has, of which each process keeps its blocks; or `PartitionedArray`s (collective).
    spec: a P, or a tree of them that is a prefix of the tree of x; or a `Layout`, for uneven blocks or a grid on some
    of the workers. Each block is copied once. Returns a `PartitionedArray`, or a tree of them.
    """
    leaves = spread("spmd.put", "x", "spec", spec, x)
    placed = [_put(leaf.value, leaf.spec, mesh, leaf.path) if leaf.spec is not None else leaf.value for leaf in leaves]
    alone = len(leaves) == 1 and leaves[0].value is x
    return placed[0] if alone else tree.unflatten(tree.structure(x, none_is_leaf=True), placed)


def _put(x, spec: Spec, mesh: Mesh | None, path: str) -> PartitionedArray:
    where, argument = "spmd.put", "spec" if path == "x" else f"spec, for {path}"
    if type(x) is PartitionedArray:
        check_usable(where, x)
        mesh = mesh or x.mesh
        if mesh != x.mesh:
            raise MeshError.at(
                where,
                argument="mesh",
                got=f"{mesh} for an array on {x.mesh}",
                need="the mesh that the array is on",
                mend="spmd.put(x.numpy(), spec, mesh)",
            )
        _fits(spec, mesh, where, x.ndim, argument)
        return relayout(x, mesh.layout(x.shape, spec, where, argument))
    mesh = mesh_for(mesh, where)
    data = _numbers(x, where, path, mesh)
    _fits(spec, mesh, where, data.ndim, argument)
    layout = mesh.layout(data.shape, spec, where, argument)
    placed = PartitionedArray(cut(data, layout, mesh), layout, mesh)
    placed.compared = False
    return placed


def cut(data: np.ndarray, layout: Layout, mesh: Mesh) -> dict[int, np.ndarray]:
    """The blocks of a whole array for the workers of this process. Copies of a block on one device are one array."""

    def block(w: int) -> np.ndarray:
        return owned_on(mesh, data[layout.slices(w)] if data.ndim else _number(data, layout, w), w)

    return mesh.shared(layout, block)


def _number(x: Any, layout: Layout, worker: int) -> np.ndarray:
    """A worker's block of a scalar: empty if the worker holds nothing."""
    return (
        np.reshape(x, layout.block_shape(worker))
        if layout.positions(worker) is not None
        else np.zeros(0, x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)
    )


@api_boundary
def from_callback(
    shape: Sequence[int], spec: Spec, fn: Callable[[tuple[slice, ...]], Any], mesh: Mesh | None = None
) -> PartitionedArray:
    """An array of which each process makes its own blocks: fn(index) returns the block at that index of the whole.

    As `jax.make_array_from_callback`. Raises LayoutError for a block whose shape differs from that of its index.
    """
    where = "spmd.from_callback"
    mesh = mesh_for(mesh, where)
    _fits(spec, mesh, where, len(shape))
    layout = mesh.layout(tuple(shape), spec, where)
    first: dict[int, np.ndarray] = {}
    done: dict[Any, np.ndarray] = {}
    for w in mesh.local_workers:
        owner, key = layout.owners[w], mesh.sharing(layout, w)
        if owner not in first:
            block = _numbers(fn(layout.slices(w)), where, "fn", mesh)
            block = owned_on(mesh, block if shape else _number(block, layout, w), w)
            if block.shape != layout.block_shape(w):
                raise LayoutError.at(
                    where,
                    argument="fn",
                    got=f"a block of shape {list(block.shape)} for {layout.slices(w)}",
                    need=f"shape {list(layout.block_shape(w))}",
                    mend="return whole[index]",
                )
            first[owner] = done[key] = block
        elif key not in done:  # on another device
            done[key] = owned_on(mesh, first[owner], w)
    placed = PartitionedArray({w: done[mesh.sharing(layout, w)] for w in mesh.local_workers}, layout, mesh)
    placed.compared = False
    return placed


@api_boundary
def from_blocks(blocks: Sequence[Any] | Mapping[int, Any], spec: Spec, mesh: Mesh | None = None) -> PartitionedArray:
    """The array whose blocks are these, split as the spec says; they may be uneven.

    blocks: one for each worker of this process, in order, or a mapping from worker numbers. One process gives all
    blocks; under MPI each gives its own (collective: the shapes are exchanged).
    """
    where = "spmd.from_blocks"
    mesh = mesh_for(mesh, where)
    local = list(mesh.local_workers)
    given = dict(blocks) if isinstance(blocks, Mapping) else dict(zip(local, blocks, strict=False))
    if sorted(given) != local or len(given) != len(blocks):
        raise LayoutError.at(
            where,
            argument="blocks",
            got=f"{len(blocks)} blocks",
            need=f"one for each worker held here: {local}",
            mend="give every worker its block, empty ones too",
        )
    mine = {w: owned_on(mesh, _numbers(b, where, f"blocks[{w}]", mesh), w) for w, b in given.items()}
    _fits(spec, mesh, where, next(iter(mine.values())).ndim)
    said = mesh.transport.share(
        {w: [list(b.shape), dtype_name(b.dtype), 0 if on_device(b) else digest(b)] for w, b in mine.items()}
    )
    layout = mesh.joined(tuple(tuple(said[w][0]) for w in range(mesh.size)), spec, where)
    for w, owner in enumerate(layout.owners):
        if said[w][1] != said[0][1]:
            raise LayoutError.at(
                where,
                argument="blocks",
                got=f"{said[0][1]} on {mesh.describe(0)} and {said[w][1]} on {mesh.describe(w)}",
                need="one dtype on all workers",
                mend="convert them with x.astype(...)",
            )
        if said[w][2] != said[owner][2]:
            raise LayoutError.at(
                where,
                argument="blocks",
                got=f"blocks that differ between {mesh.describe(owner)} and {mesh.describe(w)}",
                need=f"copies of one block along the axes that {spec} does not name",
                mend="name in the spec the axis along which the blocks differ",
            )
    return share_copies(mine, layout, mesh)
