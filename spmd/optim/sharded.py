"""Optimisers whose states lie split over an axis along which parameters are copies: ZeRO stages 1 and 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import tree
from spmd.autodiff.tape import ACTIVE
from spmd.autodiff.tracer import value_of
from spmd.errors import LayoutError, SpecError, StateError, describe
from spmd.global_ops.resharding import reshard
from spmd.layout import P, Spec, block_sizes
from spmd.mapping import map as spmd_map
from spmd.mesh import WORKER, Mesh, Worker
from spmd.operators.gather import all_gather, pslice, psum_scatter
from spmd.operators.reduce import psum
from spmd.optim.arguments import MISSING, check_update, leaves_like
from spmd.optim.numbers import varying_axes
from spmd.optim.optimizers import Optimizer, check_optimizer, checked_array, give_up
from spmd.optim.packing import Packing, batches, packing_of
from spmd.optim.sharding import mesh_of, own_spec, shard_specs, sharded_spec
from spmd.placement import put
from spmd.spec_trees import spec_leaves, spread
from spmd.state import INVARIANT
from spmd.tracebacks import api_boundary
from spmd.transport.call import Group

__all__ = ["shard"]

_WHERE = "spmd.optim.shard"
_MARK = "parameter "
"""How the names begin that stand for parameters in specs."""


@api_boundary
def shard(optimizer: Optimizer, axis_name: str | Sequence[str]) -> Optimizer:
    """An optimiser whose state lies split over an axis along which the parameters are copies: ZeRO stages 1 and 2.

    optimizer: any optimiser of this module, wrapped ones too. axis_name: the axis of data parallelism, or several.

    In a body `update(grads, state, params)` takes whole parameters, Invariant along the axis, and gives such ones. A
    gradient that varies over the axis, each worker's own contribution, is reduce-scattered; one that is a sum already
    is cut without a message. Each worker steps its part with its part of the state, and the parts of the parameters are
    gathered. Axes along which a gradient varies and its parameter does not are summed over too: parameters split over
    one axis and replicated over another. Differentiated at `spmd.pvary(params, axis_name)` gradients are contributions;
    those at Invariant parameters are sums already, which takes twice the bytes.

    Outside of bodies it takes global arrays: `init(params)` makes the state in its parts, of bare arrays by the mesh of
    the enclosing `with mesh:`, and `update` works as in a body; donate=True gives up state and parameters.

    specs: (param_specs, params) -> specs of the state, by `spmd.training.shard_specs`; params: arrays or structs of
    the whole shapes, needed unless param_specs are global arrays. States are global arrays like any: saved with
    `spmd.save`, they load on a mesh of any size, and into the state of `optimizer` itself.

    Cost: one reduce-scatter and one all-gather for each dtype, and each set of axes that splits parameters, where these
    are small; one of each for every large parameter, and for those of several dimensions that other axes split, whose
    blocks may differ in size; one all-reduce for all parameters without dimensions that are
    contributions. Memory: a worker of N holds the 1/N of the state. Raises StateError for parameters that vary over
    the axis and in bodies of maps with check=False, LayoutError for a state in other parts, SpecError for what specs
    lack. Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory optimizations toward training trillion parameter
    models", SC 2020.

        >>> optimizer, params = spmd.optim.shard(spmd.optim.adam(0.5), "data"), {"w": np.ones(3)}
        >>> def step(params, state, x):
        ...     grads = spmd.grad(lambda p: np.sum(p["w"] * x))(spmd.pvary(params, "data"))
        ...     return optimizer.update(grads, state, params)
        >>> with spmd.Mesh(data=2), spmd.ledger() as log:
        ...     state, specs = optimizer.init(params), optimizer.specs(P(), params)
        ...     step = spmd.map(step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
        ...     params, state = step(params, state, np.ones((2, 3)))
        >>> params["w"], state.mean["w"].spec
        (PartitionedArray([0.5, 0.5, 0.5], dtype=float64, spec=P(None)), P('data'))
    """
    check_optimizer(_WHERE, optimizer, 'shard(spmd.optim.adam(1e-3), "data")')
    sharded = _Sharded(optimizer, axis_name)
    return Optimizer(api_boundary(sharded.init), api_boundary(sharded.update), api_boundary(sharded.specs))


class _Sharded:
    """The three functions of a sharded optimiser."""

    def __init__(self, optimizer: Optimizer, axis_name: str | Sequence[str]):
        self.optimizer, self.axis_name = optimizer, axis_name
        self.owners = _StateOwners(optimizer)

    def init(self, params):
        if WORKER.get() is None:
            return self.optimizer.init(_placed(params, self.axis_name))
        worker, names = _worker(self.axis_name)
        leaves, structure = tree.flatten(params)
        for path, p in zip(tree.shown_paths(structure), leaves, strict=True):
            checked_array("params", p)
            _check_whole_shape(f"params{path}", p)
        dims = [_dimension_by_shape(worker, names, p.shape) for p in leaves]
        return self.optimizer.init(tree.unflatten(structure, _sliced(leaves, dims, names)))

    def update(self, grads, state, params=MISSING, *, donate=False):
        check_update(_WHERE, state, params)
        leaves, structure = tree.flatten(params)
        given = leaves_like(_WHERE, "grads", grads, structure)
        for p, g in zip(leaves, given, strict=True):
            checked_array("params", p)
            checked_array("grads", g, p)
        if WORKER.get() is None:
            return _update_global(self.optimizer, self.axis_name, given, state, params, donate)
        worker, names = _worker(self.axis_name)
        _check_invariant(names, structure, leaves)
        dims = _dimensions(worker, names, structure, leaves, self.owners.parts(structure, state))
        parts = _summed(worker, names, leaves, given, dims)
        own = _sliced(leaves, dims, names)
        new, state = self.optimizer.update(tree.unflatten(structure, parts), state, tree.unflatten(structure, own))
        gathered = _gathered(worker, names, structure.flatten_up_to(new), [p.shape for p in leaves], dims)
        return tree.unflatten(structure, gathered), state

    def specs(self, param_specs, params=None):
        return self.optimizer.specs(_part_specs(param_specs, params, self.axis_name))


# Arguments


def _worker(axis_name: str | Sequence[str]) -> tuple[Worker, tuple[str, ...]]:
    worker = WORKER.get()
    assert worker is not None
    if not worker.tracked:
        raise StateError.at(
            _WHERE,
            got="a map with check=False that is not differentiated from outside: its arrays carry no state",
            need="arrays that say whether a gradient is one worker's contribution or the sum",
            mend="spmd.map(..., check=True)",
        )
    return worker, worker.mesh.names(axis_name, _WHERE)


def _check_invariant(names: tuple[str, ...], structure: Any, params: Sequence[Any]) -> None:
    for path, p in zip(tree.shown_paths(structure), params, strict=True):
        if not varying_axes(p).isdisjoint(names):
            raise StateError.at(
                _WHERE,
                argument=f"params{path}",
                got=describe(p),
                need=f"a parameter that is {INVARIANT} along {', '.join(map(repr, names))}",
                mend="the optimiser itself steps what lies in blocks: optimizer.update without shard",
            )


def _check_whole_shape(path: str, p: Any) -> None:
    """Raise if the parts of a state cannot be told in a body, because the parameter is a block of a larger one."""
    if varying_axes(p):
        raise StateError.at(
            f"init of {_WHERE}",
            argument=path,
            got=describe(p),
            need="a whole parameter: which dimension is split depends on the lengths of the whole",
            mend="state = optimizer.init(params) before the map, and optimizer.specs(param_specs, params) as its specs",
        )


def _dimension_by_shape(worker: Worker, names: tuple[str, ...], shape: tuple[int, ...]) -> int | None:
    """The dimension that is split where no state says it; None for an array without dimensions."""
    spec = sharded_spec(shape, P(), names, worker.mesh.axes)
    return next((d for d, axes in enumerate(spec.dims) if axes), None)


class _StateOwners:
    """Which parameter each array of a state belongs to. `Optimizer.specs` says it: such an array lies as that lies."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self.specs: dict[Any, tuple[Any, dict[Any, int]]] = {}

    def parts(self, structure: Any, state: Any) -> dict[int, Any]:
        """By parameter, an array of the state that belongs to it."""
        found = self.specs.get(structure)
        if found is None:
            marks = [P(f"{_MARK}{k}") for k in range(structure.num_leaves)]
            specs = self.optimizer.specs(tree.unflatten(structure, marks))
            found = self.specs[structure] = specs, {mark: k for k, mark in enumerate(marks)}
        specs, number = found
        leaves = spread(_WHERE, "state", "state", specs, state)
        return {number[leaf.spec]: leaf.value for leaf in reversed(leaves) if leaf.spec in number}


def _dimensions(
    worker: Worker, names: tuple[str, ...], structure: Any, params: Sequence[Any], parts: dict[int, Any]
) -> list[int | None]:
    """For each parameter the dimension that the axes split; None for those without dimensions."""
    group = worker.group(names)
    paths = tree.shown_paths(structure)
    return [
        _dimension_by_shape(worker, names, p.shape)
        if k not in parts or not p.shape
        else _dimension_by_part(group, names, f"state, of params{paths[k]}", p, parts[k])
        for k, p in enumerate(params)
    ]


def _dimension_by_part(group: Group, names: tuple[str, ...], path: str, p: Any, part: Any) -> int:
    """The dimension in which this worker's part of a state is shorter than the parameter.

    A first worker may hold all of a dimension of length 1. Then any such dimension will do: others hold no entries."""
    if varying_axes(part).issuperset(names) and len(part.shape) == len(p.shape):
        for d, n in enumerate(p.shape):
            expected = (*p.shape[:d], block_sizes(n, group.dims)[group.index], *p.shape[d + 1 :])
            if part.shape == expected:
                return d
    raise LayoutError.at(
        _WHERE,
        argument=path,
        got=describe(part),
        need=f"the part of {describe(p)} that axis {', '.join(map(repr, names))} gives this worker in one dimension",
        mend="state = optimizer.init(params) before the map, and optimizer.specs(param_specs, params) as its specs",
    )


# In a body


def _sliced(arrays: Sequence[Any], dims: Sequence[int | None], names: tuple[str, ...]) -> list[Any]:
    """This worker's parts of Invariant arrays."""
    return [x if d is None else pslice(x, names, axis=d, tiled=True) for x, d in zip(arrays, dims, strict=True)]


def _summed(
    worker: Worker, names: tuple[str, ...], params: Sequence[Any], grads: Sequence[Any], dims: Sequence[int | None]
) -> list[Any]:
    """This worker's parts of the gradients, summed over all axes along which their parameters do not vary."""
    parts = list(grads)
    extra = [
        tuple([n for n in worker.mesh.axes if n in varying_axes(g) - varying_axes(p)])
        for p, g in zip(params, grads, strict=True)
    ]
    kinds = [(g.dtype, varying_axes(g), axes) for g, axes in zip(grads, extra, strict=True)]
    uneven = [bool(varying_axes(p)) for p in params]
    scattered = [k for k, d in enumerate(dims) if d is not None and {*names} <= {*extra[k]}]
    for chosen in _batches(scattered, grads, kinds, uneven):
        rest = tuple([n for n in extra[chosen[0]] if n not in names])
        arrays = [grads[k] for k in chosen]
        packing = _packing(worker.group(names), [g.shape for g in arrays], [dims[k] for k in chosen])
        own = psum_scatter(packing.pack(arrays), names, tiled=True, sizes=packing.sizes)
        own = psum(own, rest) if rest else own
        _put_at(parts, chosen, packing.unpack_parts(own, worker.group(names).index))
    others = [k for k in range(len(grads)) if k not in {*scattered}]
    for chosen in _batches([k for k in others if extra[k]], grads, kinds, uneven):
        arrays = [grads[k] for k in chosen]
        packing = packing_of(tuple([g.shape or (1,) for g in arrays]), (0,) * len(arrays), (1,))
        totals = packing.unpack(psum(packing.pack(arrays), extra[chosen[0]]))
        _put_at(parts, chosen, [np.reshape(x, g.shape) for x, g in zip(totals, arrays, strict=True)])
    _put_at(parts, others, _sliced([parts[k] for k in others], [dims[k] for k in others], names))
    return parts


def _gathered(
    worker: Worker,
    names: tuple[str, ...],
    parts: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int | None],
) -> list[Any]:
    """Whole arrays of these shapes, Invariant along the axes, of each worker's parts."""
    wholes, group = list(parts), worker.group(names)
    split = [k for k, d in enumerate(dims) if d is not None]
    kinds = [(x.dtype, varying_axes(x)) for x in parts]
    uneven = [not varying_axes(x) <= {*names} for x in parts]
    for chosen in _batches(split, [_Whole(s, x.dtype) for s, x in zip(shapes, parts, strict=True)], kinds, uneven):
        packing = _packing(group, [shapes[k] for k in chosen], [dims[k] for k in chosen])
        packed = all_gather(packing.pack_parts([parts[k] for k in chosen]), names, tiled=True, to="invariant")
        _put_at(wholes, chosen, packing.unpack(packed))
    return wholes


class _Whole(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype


def _batches(
    indices: Sequence[int], arrays: Sequence[Any], kinds: Sequence[Any], uneven: Sequence[bool]
) -> list[list[int]]:
    found = batches([arrays[k] for k in indices], [kinds[k] for k in indices], [uneven[k] for k in indices])
    return [[indices[j] for j in batch] for batch in found]


def _packing(group: Group, shapes: Sequence[tuple[int, ...]], dims: Sequence[int | None]) -> Packing:
    return packing_of(tuple(shapes), tuple([d for d in dims if d is not None]), tuple(group.dims))


def _put_at(items: list[Any], indices: Sequence[int], values: Sequence[Any]) -> None:
    for k, x in zip(indices, values, strict=True):
        items[k] = x


# Global arrays


def _placed(params: Any, axis_name: str | Sequence[str]) -> Any:
    """Parameters in their parts."""
    leaves, structure = tree.flatten(params)
    specs = structure.flatten_up_to(shard_specs(params, axis_name))
    mesh = mesh_of(params, _WHERE)
    return tree.unflatten(structure, [_at(p, spec, mesh) for p, spec in zip(leaves, specs, strict=True)])


def _at(x: Any, spec: Spec, mesh: Mesh) -> Any:
    return reshard(x, spec) if type(value_of(x)) is PartitionedArray else put(x, spec, mesh)


def _part_specs(param_specs: Any, params: Any, axis_name: str | Sequence[str]) -> Any:
    if params is not None:
        return shard_specs(params, axis_name, param_specs)
    for path, spec in spec_leaves(param_specs):
        if isinstance(spec, P) and not any(name.startswith(_MARK) for name in spec.axes):
            raise SpecError.at(
                f"specs of {_WHERE}",
                argument="params",
                got=f"nothing, for param_specs{path} = {spec}",
                need="the parameters, or structs of their shapes: the lengths say which dimension is split",
                mend="optimizer.specs(param_specs, params)",
            )
    return shard_specs(param_specs, axis_name)


def _update_global(
    optimizer: Optimizer, axis_name: str | Sequence[str], grads: Sequence[Any], state: Any, params: Any, donate: bool
) -> tuple[Any, Any]:
    mesh = mesh_of(params, _WHERE)
    names = mesh.names(axis_name, _WHERE)
    leaves, structure = tree.flatten(params)
    specs = structure.flatten_up_to(shard_specs(params, axis_name))
    own, parts = (
        tree.unflatten(structure, [_at(x, spec, mesh) for x, spec in zip(xs, specs, strict=True)])
        for xs in (leaves, grads)
    )
    new, state = optimizer.update(parts, state, own, donate=donate)
    wholes = [own_spec(value_of(p)) for p in leaves]
    gathered = _gathered_global(mesh, names, structure.flatten_up_to(new), wholes)
    if donate and not ACTIVE.get():
        give_up(leaves, (gathered, state))
    return tree.unflatten(structure, gathered), state


def _gathered_global(mesh: Mesh, names: tuple[str, ...], parts: Sequence[Any], specs: Sequence[Spec]) -> list[Any]:
    """Global arrays by specs that do not name the axes, of arrays that these axes split."""
    layouts = [mesh.layout(x.shape, spec) for x, spec in zip(parts, specs, strict=True)]
    split = [value_of(x).layout.spec for x in parts]
    dims = [
        next((d for d, n in enumerate(spec.dims) if not {*names}.isdisjoint(n)), None) if layout.spec != spec else None
        for spec, layout in zip(split, layouts, strict=True)
    ]

    def gather(*blocks: Any) -> tuple[Any, ...]:
        worker = WORKER.get()
        assert worker is not None
        shapes = [layout.block_shape(worker.index) for layout in layouts]
        return tuple(_gathered(worker, names, blocks, shapes, dims))

    in_specs = tuple([own_spec(value_of(x)) for x in parts])
    return list(spmd_map(gather, in_specs=in_specs, out_specs=tuple(specs), mesh=mesh)(*parts))
