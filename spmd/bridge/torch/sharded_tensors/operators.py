"""Operators of torch on sharded tensors, by the rules of partitioned tensors: for every worker of this process, the
operator of the partitioned tensors that hold its blocks.

Operators that need no other worker run in turn, once for workers that share their blocks. Reductions run on all
workers at once. What would gather the whole raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from spmd.bridge.torch.partitioned import reductions, registry, wholes
from spmd.bridge.torch.partitioned.arguments import writes_first
from spmd.bridge.torch.partitioned.placement import Placement
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor
from spmd.bridge.torch.sharded_tensors.registry import HANDLERS
from spmd.bridge.torch.sharded_tensors.tensor import MEND, ShardedTensor, check_outside, relaid_blocks
from spmd.bridge.torch.tensor_state import is_partitioned, no_overrides
from spmd.bridge.torch.thread_settings import torch_threads
from spmd.errors import LayoutError, MeshError, describe
from spmd.mesh import Mesh, Worker

_COLLECTIVE = {h for h in registry.OPERATORS.values() if h.__module__ == reductions.__name__}
_COLLECTIVE -= {registry.OPERATORS["is_same_size"]}
_GATHERING = {h for h in registry.OPERATORS.values() if h.__module__ == wholes.__name__} | {registry.OPERATORS[""]}


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = list(_sharded_among((*args, *kwargs.values())))
    mesh = _one_mesh(func, tensors)
    handler = registry.handler_of(func)
    if torch.Tag.nondeterministic_seeded in func.tags:
        _refuse_random(func, tensors)
    _check_device(func, kwargs.get("device"), tensors, mesh)
    if handler in _GATHERING or _is_mixed((*args, *kwargs.values())):
        _refuse(func, tensors)
    if handler is registry.decomposed:
        return func.decompose(*args, **kwargs)
    if handler is registry.OPERATORS["copy_"]:
        args = (args[0], _laid_out_as(args[0], args[1]), *args[2:])
        tensors = list(_sharded_among(args))
    try:
        if handler is registry.OPERATORS["_foreach_*"]:
            return _listwise(func, args, kwargs, mesh)
        by_worker = _at_once if handler in _COLLECTIVE else _in_turn
        results = by_worker(mesh, tensors, lambda w: _apply(func, *_of_worker(w, args, kwargs)))
    except LayoutError as error:
        _refuse(func, tensors, error)
    if writes_first(func):
        return args[0]
    return kwargs["out"] if kwargs.get("out") is not None else _joined(results, mesh)


def _apply(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return registry.run(func, args, kwargs)


def _listwise(func: Any, args: Any, kwargs: dict[str, Any], mesh: Mesh) -> Any:
    """Elementwise functions of lists of tensors: together those entries that lie alike."""
    n = len(args[0])
    lists = [v for v in (*args, *kwargs.values()) if isinstance(v, list | tuple) and len(v) == n]
    alike: dict[Any, list[int]] = {}
    for k in range(n):
        layouts = tuple(x.block_layout if isinstance(x, ShardedTensor) else None for x in (v[k] for v in lists))
        alike.setdefault(layouts, []).append(k)
    results: list[Any] = [None] * n
    for layouts, entries in alike.items():
        chosen = lambda v, entries=entries: (
            [v[k] for k in entries] if isinstance(v, list | tuple) and len(v) == n else v
        )
        some, options = tuple(map(chosen, args)), {k: chosen(v) for k, v in kwargs.items()}
        if any(layouts):
            tensors = list(_sharded_among((*some, *options.values())))
            by_worker = _in_turn(mesh, tensors, lambda w, a=some, o=options: _apply(func, *_of_worker(w, a, o)))
            outs = _joined(by_worker, mesh)
        else:
            outs = func(*some, **options)
        for k, out in zip(entries, outs or (), strict=not writes_first(func) and outs is not None):
            results[k] = out
    return None if writes_first(func) else results


def _sharded_among(values: Any) -> Iterator[ShardedTensor]:
    for x in values:
        if isinstance(x, ShardedTensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _sharded_among(x)


def _is_mixed(values: Any) -> bool:
    """Whether a tensor of a body is among arguments."""
    return any(is_partitioned(x) or isinstance(x, list | tuple) and _is_mixed(x) for x in values)


def _name(func: Any) -> str:
    return f"torch's {func._schema.name.partition('::')[2]}"


def _one_mesh(func: Any, tensors: Sequence[ShardedTensor]) -> Mesh:
    first = tensors[0]
    check_outside(_name(func), first)
    for x in tensors:
        if x.mesh is not first.mesh and x.mesh != first.mesh:
            raise MeshError.at(
                _name(func),
                got=f"{describe(first)} on {first.mesh}, and {describe(x)} on {x.mesh}",
                need="tensors on one mesh",
                mend="spt.put(x.whole(), spec, mesh)",
            )
    return first.mesh


def _refuse(func: Any, tensors: Sequence[ShardedTensor], cause: LayoutError | None = None) -> NoReturn:
    raise LayoutError.at(
        _name(func),
        got=" and ".join(dict.fromkeys(map(describe, tensors[:2]))),
        need="tensors that lie alike, in an elementwise function, or a reduction",
        mend=MEND,
    ) from cause


def _check_device(func: Any, device: Any, tensors: Sequence[ShardedTensor], mesh: Mesh) -> None:
    if device is not None and torch.device(device).type != mesh.device:
        raise LayoutError.at(
            _name(func),
            argument="device",
            got=f"{str(device)!r} for {describe(tensors[0])} on {mesh}",
            need=f"tensors on the mesh, whose device is {mesh.device!r}",
            mend="x.whole().to(device), and spt.put(..., mesh) on a mesh with that device",
        )


def _refuse_random(func: Any, tensors: Sequence[ShardedTensor]) -> NoReturn:
    raise LayoutError.at(
        _name(func),
        got=describe(tensors[0]),
        need="random numbers that do not depend on the mesh",
        mend="spt.put(torch.randn(shape), spec), and x.copy_(y) in place; or draw in a body",
    )


def _laid_out_as(target: Any, source: Any) -> Any:
    """What is copied, in the layout of the target."""
    if not isinstance(source, ShardedTensor) or not isinstance(target, ShardedTensor):
        return source
    if source.block_layout == target.block_layout or source.shape != target.shape:
        return source
    layout = target.block_layout
    return ShardedTensor(relaid_blocks(source, layout), layout, target.mesh)


# Of each worker


def _of_worker(worker: int, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an operator with partitioned tensors of a worker in place of sharded tensors."""
    return tuple(_part(x, worker) for x in args), {k: _part(v, worker) for k, v in kwargs.items()}


def _part(x: Any, worker: int) -> Any:
    if isinstance(x, ShardedTensor):
        with no_overrides():
            shape, strides = tuple(x.shape), x.stride()
        return PartitionedTensor(x.blocks[worker], Placement(x.block_layout, worker, None), shape, strides)
    return type(x)(_part(y, worker) for y in x) if type(x) in (list, tuple) else x


def _in_turn(mesh: Mesh, tensors: Sequence[ShardedTensor], f: Callable[[int], Any]) -> dict[int, Any]:
    """f(worker) for each worker of this process, once for those that share the blocks of all tensors."""
    results: dict[int, Any] = {}
    known: dict[Any, Any] = {}
    for w in mesh.local_workers:
        key = tuple(id(x.blocks[w]) for x in tensors)
        if key not in known:
            known[key] = f(w)
        results[w] = known[key]
    return results


def _at_once(mesh: Mesh, tensors: Sequence[ShardedTensor], f: Callable[[int], Any]) -> dict[int, Any]:
    """f(worker) on all workers, which take part in its collectives."""

    def body(worker: Worker) -> Any:
        with torch_threads(mesh.transport.threads()):
            return f(worker.index)

    return mesh.run(body, tracked=False, scheduler="threads").results


def _joined(results: dict[int, Any], mesh: Mesh) -> Any:
    """The results of the workers as one: sharded tensors of partitioned ones; of others, which are equal, the first."""
    first = next(iter(results.values()))
    if isinstance(first, PartitionedTensor):
        layout = first._placement.layout
        return ShardedTensor(
            mesh.shared(layout, lambda w: results[w]._block), layout, mesh, tuple(first.shape), first.stride()
        )
    if isinstance(first, list | tuple):
        return type(first)(_joined({w: r[k] for w, r in results.items()}, mesh) for k in range(len(first)))
    return first


HANDLERS["run"] = _run
