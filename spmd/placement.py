"""Place arrays on a mesh: whole arrays, given blocks, and blocks that a function makes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from spmd import device as devices
from spmd.array import PartitionedArray, check_usable, owned_on, relayout, share_copies
from spmd.array_functions import layout_like
from spmd.autodiff import tree
from spmd.autodiff.admission import admit, admit_dtype, is_sliceable
from spmd.autodiff.dtypes import dtype_name
from spmd.autodiff.signatures import Container
from spmd.autodiff.staging.together import at_worker
from spmd.autodiff.static_array import AnyArray
from spmd.autodiff.tracer import value_of
from spmd.errors import LayoutError, MeshError, SpecError, describe
from spmd.kernels import on_device
from spmd.layout import Layout, Spec
from spmd.mesh import WORKER, Mesh, current_mesh
from spmd.replicas.compare import digest
from spmd.resharding import check_dtype_of_parts
from spmd.spec_trees import REQUIRED, Leaf, shown, spread
from spmd.tracebacks import api_boundary

__all__ = ["checked_layout", "cut", "from_blocks", "from_callback", "made", "mesh_for", "placed", "put"]


def mesh_for(mesh: Mesh | None, where: str) -> Mesh:
    """The mesh of a call: the given one, otherwise that of the enclosing `with mesh:`."""
    if WORKER.get() is not None:
        raise MeshError.at(
            where,
            got="a call inside a body",
            need="a call from outside: a body has its own blocks only",
            mend="do it before the map, and pass the result as an argument",
        )
    mesh = mesh if mesh is not None else current_mesh()
    if mesh is not None and not isinstance(mesh, Mesh):
        raise MeshError.at(where, argument="mesh", got=describe(mesh), need="a Mesh", mend="mesh=spmd.Mesh(x=4)")
    if mesh is None:
        raise MeshError.at(
            where,
            argument="mesh",
            got="no mesh, and no enclosing `with mesh:`",
            need="a mesh to run on",
            mend="with spmd.Mesh(x=4): ..., or pass mesh=spmd.Mesh(x=4)",
        )
    return mesh


def _check_spec(spec: Any, mesh: Mesh, where: str, ndim: int, argument: str = "spec") -> None:
    """Raise unless a spec fits the mesh and an array of ndim dimensions."""
    if not isinstance(spec, Spec):
        raise SpecError.at(
            where,
            argument=argument,
            got=describe(spec),
            need="a P, or a Layout",
            mend='P("x", None), or P() for copies',
        )
    spec.check(mesh.axes, where, argument, ndim, unreduced=True)


_NUMBERS = "an array of numbers"
_ARRAYS = "an array of numbers, or an object with shape, dtype and slices x[0:2, 1:3], of which blocks are read"


def checked_layout(where: str, shape: tuple[int, ...], spec: Any, mesh: Mesh, argument: str = "spec") -> Layout:
    """The layout of an array of this shape by a spec, checked."""
    _check_spec(spec, mesh, where, len(shape), argument)
    return mesh.layout(shape, spec, where, argument)


def _admitted(x, where: str, argument: str, mesh: Mesh, need: str = _NUMBERS) -> np.ndarray:
    """x as an array of numbers. A frozen array stays frozen, and an array on a GPU stays there."""
    x = devices.home(where, argument, x, mesh.device)
    return x if on_device(x) else admit(x, where, argument, error=LayoutError, need=need)


def _read(x: Any, index: tuple[slice, ...]) -> Any:
    """The block of a sliceable object at an index. An empty one is not read."""
    lengths = tuple(s.stop - s.start for s in index)
    return np.empty(lengths, x.dtype) if 0 in lengths else x[index]


def placed(
    where: str, shape: tuple[int, ...], spec: Spec | None, mesh: Mesh | None, like: Any
) -> tuple[Spec | None, Mesh | None]:
    """The spec and the mesh of an array that is made: as they are given, or those that an array `like` gives."""
    if like is None:
        return spec, mesh
    if spec is not None:
        raise SpecError.at(
            where,
            argument="spec and like",
            got=f"spec={spec} and like={describe(like)}",
            need="one of them: both say how the array is laid out",
            mend="leave out the one that is not meant",
        )
    x = _reference(where, like)
    if mesh is not None and mesh != x.mesh:
        raise MeshError.at(
            where,
            argument="mesh",
            got=f"{mesh}, and like={describe(like)} on {x.mesh}",
            need="the mesh of that array",
            mend="leave out mesh, or give spec in place of like",
        )
    return layout_like(x.layout, shape), x.mesh


def _reference(where: str, like: Any) -> PartitionedArray:
    """The global array that an argument `like` is, or that it traces."""
    x = value_of(like)
    if type(x) is not PartitionedArray:
        raise LayoutError.at(
            where,
            argument="like",
            got=describe(like),
            need="a global array, on whose mesh and split as which the result lies",
            mend='spec=P("x")',
        )
    check_usable(where, x)
    return x


@overload
def put(x: AnyArray | complex, spec: Any = ..., mesh: Mesh | None = ..., *, like: Any = ...) -> PartitionedArray: ...


@overload
def put(x: Container, spec: Any = ..., mesh: Mesh | None = ..., *, like: Any = ...) -> Container: ...


@overload
def put(x: object, spec: Any = ..., mesh: Mesh | None = ..., *, like: Any = ...) -> Any: ...


@api_boundary
def put(x: Any, spec: Any = REQUIRED, mesh: Mesh | None = None, *, like: Any = None) -> Any:
    """Place an array, or a pytree of arrays, on a mesh.

    x: bare arrays that every process has, of which each process keeps its blocks; or objects with shape, dtype and
    slices, such as datasets of h5py or zarr, of which each process reads its blocks only, as it does of `np.memmap`; or
    `PartitionedArray`s (collective).
    spec: a P, or a tree of them that is a prefix of the tree of x; or a `Layout`, for uneven blocks or a grid on some
    of the workers. Each block is copied once. Returns a `PartitionedArray`, or a tree of them.
    like: in place of spec, a global array as which to lay x out, as `spmd.zeros` says; or a tree of them, a prefix.

    Raises LayoutError for what is no array of numbers, SpecError for a spec that does not fit.

        >>> with spmd.Mesh(data=2):
        ...     batch = spmd.put({"x": np.ones((4, 3)), "n": np.arange(4)}, {"x": P("data"), "n": P("data")})
        >>> batch["n"]
        PartitionedArray([0, 1, 2, 3], dtype=int64, spec=P('data'))
    """
    where = "spmd.put"
    if like is None and spec is REQUIRED:
        raise SpecError.at(
            where, argument="spec", got="none, and no like", need="how to lay x out", mend='spmd.put(x, P("x"))'
        )
    if like is None:
        leaves = spread(where, "x", "spec", spec, x)
    else:
        leaves, mesh = _spread_like(where, spec, mesh, like, x)
    arrays = [_put(leaf.value, leaf.spec, mesh, leaf.path) if leaf.spec is not None else leaf.value for leaf in leaves]
    is_single = len(leaves) == 1 and leaves[0].value is x
    return arrays[0] if is_single else tree.unflatten(tree.structure(x, none_is_leaf=True), arrays)


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
        return relayout(x, checked_layout(where, x.shape, spec, mesh, argument))
    mesh = mesh_for(mesh, where)
    if is_sliceable(x):
        admit_dtype(np.dtype(x.dtype), where, lambda: describe(x), LayoutError)
        shape = tuple(map(operator.index, x.shape))
        layout = checked_layout(where, shape, spec, mesh, argument)
        return made(where, path, layout, mesh, lambda index: _read(x, index), "np.asarray(x), if it fits in memory")
    data = _admitted(x, where, path, mesh, _ARRAYS)
    layout = checked_layout(where, data.shape, spec, mesh, argument)
    array = PartitionedArray(cut(data, layout, mesh), layout, mesh)
    array.compared = False
    return array


def _spread_like(where: str, spec: Any, mesh: Mesh | None, like: Any, x: Any) -> tuple[list[Leaf], Mesh | None]:
    """The leaves of x, each with the layout that an array of `like` gives it; and the mesh of these arrays."""
    try:
        likes = tree.prefix(like, x)
    except ValueError:
        raise LayoutError.at(
            where,
            argument="like",
            got=f"{shown(tree.structure(like, none_is_leaf=True))}, "
            f"for x: {shown(tree.structure(x, none_is_leaf=True))}",
            need="a global array, or a tree of them that is a prefix of the tree of x",
            mend="like=y for one array y, which serves all of x",
        ) from None
    paths, leaves, _ = tree.flatten_with_path(x, none_is_leaf=True)
    spec = None if spec is REQUIRED else spec
    references = [y for y in likes if y is not None]
    if references and mesh is None:
        mesh = _reference(where, references[0]).mesh

    def layout(value: Any, reference: Any) -> Spec | None:
        if value is None or reference is None:
            return None
        shape = tuple(value.shape) if hasattr(value, "shape") else np.shape(value)
        return placed(where, shape, spec, mesh, reference)[0]

    return [Leaf(f"x{p}", layout(v, y), v) for p, v, y in zip(paths, leaves, likes, strict=True)], mesh


def cut(data: np.ndarray, layout: Layout, mesh: Mesh) -> dict[int, np.ndarray]:
    """The blocks of a whole array for the workers of this process. Copies of a block on one device are one array.

    Along unreduced axes the first worker has the block, and the others zeros.
    """
    parts = tuple(n for n in layout.axes if n in layout.unreduced)
    if parts:
        check_dtype_of_parts("an unreduced layout", data.dtype)

    def block(w: int) -> np.ndarray:
        own = at_worker(data, w)
        if parts and mesh.group(w, parts).index:
            return owned_on(mesh, np.zeros_like(own, shape=layout.block_shape(w)), w)
        return owned_on(mesh, own[layout.slices(w)] if own.ndim else _scalar_block(own, layout, w), w)

    return mesh.shared(layout, block)


def _scalar_block(x: Any, layout: Layout, worker: int) -> np.ndarray:
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
    """An array from a function that each process calls for its own blocks: fn(index) returns the block at an index.

    As `jax.make_array_from_callback`. Raises LayoutError for a block whose shape differs from that of its index.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.from_callback((5,), P("x"), lambda index: np.arange(index[0].start, index[0].stop) ** 2)
        >>> x
        PartitionedArray([ 0,  1,  4,  9, 16], dtype=int64, spec=P('x'))
    """
    where, lengths = "spmd.from_callback", tuple(shape)
    mesh = mesh_for(mesh, where)
    return made(where, "fn", checked_layout(where, lengths, spec, mesh), mesh, fn, "return whole[index]")


def made(
    where: str, argument: str, layout: Layout, mesh: Mesh, fn: Callable[[tuple[slice, ...]], Any], mend: str
) -> PartitionedArray:
    """The array of which fn(index) gives the block at an index. It is called once for copies in this process."""
    if layout.unreduced:
        return relayout(made(where, argument, layout.reduced, mesh, fn, mend), layout)
    block_of_owner: dict[int, np.ndarray] = {}
    block_of_sharers: dict[Any, np.ndarray] = {}
    for w in mesh.local_workers:
        owner, key = layout.owners[w], mesh.sharing(layout, w)
        if owner not in block_of_owner:
            block = _admitted(fn(layout.slices(w)), where, argument, mesh)
            block = owned_on(mesh, block if layout.shape else _scalar_block(block, layout, w), w)
            if block.shape != layout.block_shape(w):
                raise LayoutError.at(
                    where,
                    argument=argument,
                    got=f"a block of shape {list(block.shape)} for {layout.slices(w)}",
                    need=f"shape {list(layout.block_shape(w))}",
                    mend=mend,
                )
            block_of_owner[owner] = block_of_sharers[key] = block
        elif key not in block_of_sharers:  # on another device
            block_of_sharers[key] = owned_on(mesh, block_of_owner[owner], w)
    array = PartitionedArray({w: block_of_sharers[mesh.sharing(layout, w)] for w in mesh.local_workers}, layout, mesh)
    array.compared = False
    return array


@api_boundary
def from_blocks(blocks: Sequence[Any] | Mapping[int, Any], spec: Spec, mesh: Mesh | None = None) -> PartitionedArray:
    """The array that a spec splits into these blocks, which may be uneven.

    blocks: one for each worker of this process, in order, or a mapping from worker numbers. One process gives all
    blocks; under MPI each gives its own (collective: the shapes are exchanged). Raises LayoutError for blocks that do
    not join.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.from_blocks([np.zeros(1), np.ones(3)], P("x"))
        >>> x
        PartitionedArray([0., 1., 1., 1.], dtype=float64, spec=P('x'), blocks of ((1, 3),))
        >>> x.layout.cuts
        ((1, 3),)
    """
    where = "spmd.from_blocks"
    mesh = mesh_for(mesh, where)
    local = list(mesh.local_workers)
    blocks_by_worker = dict(blocks) if isinstance(blocks, Mapping) else dict(zip(local, blocks, strict=False))
    if sorted(blocks_by_worker) != local or len(blocks_by_worker) != len(blocks):
        raise LayoutError.at(
            where,
            argument="blocks",
            got=f"{len(blocks)} blocks",
            need=f"one for each worker held here: {local}",
            mend="give every worker its block, empty ones too",
        )
    own_blocks = {w: owned_on(mesh, _admitted(b, where, f"blocks[{w}]", mesh), w) for w, b in blocks_by_worker.items()}
    _check_spec(spec, mesh, where, next(iter(own_blocks.values())).ndim)
    summaries = mesh.transport.share(
        {w: [list(b.shape), dtype_name(b.dtype), 0 if on_device(b) else digest(b)] for w, b in own_blocks.items()}
    )
    layout = mesh.joined(tuple(tuple(summaries[w][0]) for w in range(mesh.size)), spec, where)
    for w, owner in enumerate(layout.owners):
        if summaries[w][1] != summaries[0][1]:
            raise LayoutError.at(
                where,
                argument="blocks",
                got=f"{summaries[0][1]} on {mesh.describe(0)} and {summaries[w][1]} on {mesh.describe(w)}",
                need="one dtype on all workers",
                mend="convert them with x.astype(...)",
            )
        if summaries[w][2] != summaries[owner][2]:
            raise LayoutError.at(
                where,
                argument="blocks",
                got=f"blocks that differ between {mesh.describe(owner)} and {mesh.describe(w)}",
                need=f"copies of one block along the axes that {spec} does not name",
                mend="name in the spec the axis along which the blocks differ",
            )
    return share_copies(own_blocks, layout, mesh)
