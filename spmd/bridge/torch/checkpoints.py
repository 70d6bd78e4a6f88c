"""Tensors, modules, optimisers and random generators of PyTorch in checkpoints: what `spmd.io` needs to know of them.

Tensors are saved by value, and those in blocks by the blocks of all workers. The state of a module has the names and
shapes of its `state_dict` of whole tensors, on any mesh. That of an optimiser has the names of the parameters. Of the
stages of a pipeline each is saved by the workers that hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from spmd.bridge.torch.functorch import is_wrapped
from spmd.bridge.torch.packed_weights import is_packed, piece_box, piece_layouts
from spmd.bridge.torch.partitioned.placement import check_worker
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor, new_leaf
from spmd.bridge.torch.shard_optimizer import ShardedOptimizer
from spmd.bridge.torch.sharded import blocks_of, places_of
from spmd.bridge.torch.sharded_tensors.tensor import ShardedTensor, new_sharded_leaf, partitioned_array
from spmd.bridge.torch.tensor import Tensor, with_state
from spmd.bridge.torch.tensor_state import INVARIANT, local_data, no_overrides, plain, state_of_tensor
from spmd.errors import CheckpointError, describe
from spmd.io.boxes import slices_within, whole_box
from spmd.io.container import dtype_of, stored_as
from spmd.io.loading import MAKERS
from spmd.io.manifest import ArrayEntry
from spmd.io.members import Members
from spmd.io.sources import SOURCES, Source, boxes_of, layout_text, partitioned_source, replica
from spmd.io.states import KINDS, STATES, Held, SavedPart
from spmd.io.trees import joined, map_leaves
from spmd.layout import Box, Layout
from spmd.mesh import WORKER, Mesh

__all__: list[str] = []

# Tensors


@lru_cache(maxsize=64)
def _array_dtype(dtype: torch.dtype) -> np.dtype | None:
    """NumPy's dtype for one of torch's; None where none can be saved."""
    known = dtype_of(str(dtype).removeprefix("torch."))
    return known if known is not None and stored_as(known) is not None else None


def _is_of_ml_dtypes(dtype: np.dtype) -> bool:
    return dtype.name.startswith(("bfloat", "float8"))


def _array(x: torch.Tensor) -> np.ndarray:
    """The entries of a tensor as an array of the host, on its memory if it lies there."""
    with no_overrides():
        dtype = _array_dtype(x.dtype)
        assert dtype is not None
        x = x.detach().resolve_conj().resolve_neg().cpu()
        if _is_of_ml_dtypes(dtype):
            return x.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype)
        return x.numpy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor on the memory of an array."""
    if _is_of_ml_dtypes(array.dtype):
        bits = torch.from_numpy(array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8))
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def _tensor_like(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """The entries of an array as a tensor on the device of another one, and in its order of dimensions."""
    x = _tensor(array)
    with no_overrides():
        if like.is_contiguous() or like.shape != x.shape:
            return x.to(like.device)
        return torch.empty_like(like, dtype=x.dtype, requires_grad=False).copy_(x)


def _check_tensor(x: torch.Tensor, where: str, argument: str) -> np.dtype:
    """NumPy's dtype of a tensor. Raises CheckpointError for tensors whose entries this worker cannot read."""
    fault = _fault(x)
    dtype = None if fault is not None else _array_dtype(x.dtype)
    if dtype is None:
        got, need, mend = fault or (
            f"a tensor of {x.dtype}",
            "a dtype of NumPy, bfloat16 or float8, of which ml_dtypes has the last two",
            "x.to(torch.complex64) of complex32; pip install ml_dtypes for bfloat16",
        )
        raise CheckpointError.at(where, argument=argument, got=got, need=need, mend=mend)
    return dtype


def _fault(x: torch.Tensor) -> tuple[str, str, str] | None:
    """What came, what is needed and the mend, for tensors that are no plain memory of this worker."""
    name = type(x).__name__
    if any(kind.__module__.startswith("torch.distributed.") for kind in type(x).__mro__):
        mend = "x.full_tensor(); or spt.PartitionedTensor.from_block(x.to_local(), spec), which is saved in blocks"
        return f"a {name} of torch.distributed", "a tensor of torch, or of spt for blocks", mend
    if is_lazy(x):
        return "a parameter without a shape yet", "a module that knows its shapes", "call the module once before"
    if is_wrapped(x):
        return "a tensor inside a transformation of torch.func", "a tensor with values", "save outside of it"
    if x.is_nested or x.layout != torch.strided:
        got, mend = f"a tensor of {x.layout}", "x.to_dense(), or its indices and values"
        if x.is_nested:
            got, mend = "a nested tensor", "x.to_padded_tensor(0.0), or a list of its parts: x.unbind()"
        return got, "a dense tensor", mend
    if x.is_quantized:
        return f"a quantized tensor of {x.dtype}", "numbers", "x.dequantize(), or x.int_repr() and its scale"
    if x.device.type == "meta":
        return "a tensor on the device meta", "a tensor with memory", 'module.to_empty(device="cpu") before'
    return None


def _check_state(x: Any, where: str, argument: str) -> None:
    """Raise if a tensor differs between workers, or is a block and its other workers are not here."""
    axes = ", ".join(map(repr, sorted(state_of_tensor(x).varying | getattr(x, "state", INVARIANT).varying)))
    if WORKER.get() is not None and axes:
        raise CheckpointError.at(
            where,
            argument=argument,
            got=describe(x),
            need="one tensor for all workers, or blocks that know their layout",
            mend=f"spt.PartitionedTensor.from_block(x, spec) if each worker has a block; spt.mean(x, {axes}) for one "
            "value",
        )
    if not isinstance(x, PartitionedTensor):
        return
    layout = x.block_layout
    check_worker(x._placement, WORKER.get())
    if not piece_layouts(x):
        raise CheckpointError.at(
            where,
            argument=argument,
            got=f"a view of shape {list(x.shape)} of what lies as {layout}",
            need=f"the shape {list(layout.shape)}",
            mend=f"x.reshape({list(layout.shape)})",
        )
    if WORKER.get() is None and layout.size > 1:
        raise CheckpointError.at(
            where,
            argument=argument,
            got=f"{describe(x)}, outside of any body",
            need="all workers, which hold a block each",
            mend=f"call {where} in the body, on every worker",
        )


def _source(x: Any, where: str, name: str, members: Members) -> Source:
    argument = f"tree, the leaf {name!r}"
    dtype = _check_tensor(x, where, argument)
    _check_state(x, where, argument)
    if isinstance(x, ShardedTensor):
        return replace(partitioned_source(partitioned_array(x), where, name, members), kind="torch")
    local, worker = local_data(x), WORKER.get()
    if isinstance(x, PartitionedTensor) and worker is not None:
        layouts, layout = piece_layouts(x), x.block_layout
        own = [each.boxes[x.block_index] for each in layouts]
        holders = _holders(layout, worker.mesh, members)
        pieces = [local]
        if is_packed(x):
            pieces, rows = local, layout.shape[1]
            holders = {piece_box(box, rows, k): held for box, held in holders.items() for k in range(*box[0])}
        block = partial(_part_of_pieces, pieces, own)
        return Source(tuple(x.shape), dtype, layout_text(layout), holders, block, True, "torch")
    shape = tuple(x.shape)
    return replica(shape, dtype, partial(_part, local, whole_box(shape)), members, "torch")


def _part(local: torch.Tensor, around: Box, box: Box) -> np.ndarray:
    with no_overrides():
        return _array(local[slices_within(box, around)])


def _part_of_pieces(pieces: Any, around: list[Box], box: Box) -> np.ndarray:
    """The part of a block, of pieces whose boxes are `around`, that lies in one of them."""
    k = next(k for k, each in enumerate(around) if each[0][0] <= box[0][0] and box[0][1] <= each[0][1])
    return _part(pieces[k], around[k], box)


def _block_like(x: PartitionedTensor, read: Callable[[Layout], np.ndarray]) -> torch.Tensor:
    """A block like that of x, of what read(layout) gives of a layout for this worker."""
    blocks = [read(layout) for layout in piece_layouts(x)]
    if not is_packed(x):
        return _tensor_like(blocks[0], x._block)
    own = blocks[: x._block.shape[0]]
    return _tensor_like(np.stack(own) if own else np.zeros(tuple(x._block.shape), blocks[0].dtype), x._block)


def _holders(layout: Layout, mesh: Mesh, members: Members) -> dict[Box, tuple[int, ...]]:
    """The members that hold each box of a layout, which may be one over some axes of the mesh."""
    axes = tuple(layout.axes)
    workers: dict[int, list[int]] = {}
    for w in range(mesh.size):
        workers.setdefault(mesh.group(w, axes).index, []).append(w)
    return {box: members.holders(w for k in held for w in workers[k]) for box, held in boxes_of(layout).items()}


def _loaded_like(like: Any, name: str, read: Callable[..., np.ndarray]) -> torch.Tensor:
    """A tensor of the checkpoint: of the class, dtype, device and placement of another one."""
    argument = f"like, the leaf {name!r}"
    dtype = _check_tensor(like, "spmd.load", argument)
    _check_state(like, "spmd.load", argument)
    if isinstance(like, ShardedTensor):
        layout = like.block_layout
        blocks = like.mesh.shared(layout, lambda w: _tensor_like(read(dtype, layout, w), like.blocks[w]))
        return new_sharded_leaf(blocks, layout, like.mesh, like.requires_grad)
    if isinstance(like, PartitionedTensor):
        placement = like._placement
        block = _block_like(like, lambda layout: read(dtype, layout, placement.index))
        return new_leaf(type(like), block, placement, INVARIANT, like.requires_grad, like)
    x = _tensor_like(read(dtype, None, 0), plain(like))
    if isinstance(like, nn.Parameter):
        return nn.Parameter(x, like.requires_grad)
    if isinstance(like, Tensor):
        return with_state(x, INVARIANT).requires_grad_(like.requires_grad)
    with no_overrides():
        return x.as_subclass(type(like)).requires_grad_(like.requires_grad)


SOURCES[torch.Tensor] = _source
MAKERS[torch.Tensor] = _loaded_like
KINDS["torch"] = _tensor


# Modules


class _Module:
    """Modules, by their `state_dict`, with blocks in place of whole tensors."""

    def save(self, x: nn.Module, others: Mapping[str, Any]) -> Any:
        state = blocks_of(x)
        places = places_of(state)
        if not places:
            return state
        of_all = {key: value for key, value in state.items() if key not in places}
        return of_all | {key: Held(state.get(key), place.workers) for key, place in places.items()}

    def names(self, x: nn.Module, saved: list[str], others: Mapping[str, Any]) -> list[str]:
        state = blocks_of(x)
        names = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
        # What get_extra_state gives may have another structure; and what others hold is theirs to look for.
        rest = {*state, *places_of(state)}.difference(names)
        return names + [name for name in saved if name in rest or any(prefix in rest for prefix in _prefixes(name))]

    def load(self, x: nn.Module, part: SavedPart, others: Mapping[str, Any]) -> Callable[[], None]:
        own = blocks_of(x)
        loaded: Any = type(own)()
        if hasattr(own, "_metadata"):
            loaded._metadata = own._metadata  # type: ignore[attr-defined]
        for key, value in own.items():
            if not isinstance(value, torch.Tensor) or is_lazy(value):
                if part.has_tree(key):
                    loaded[key] = part.value(key)
            elif part.has(key):
                loaded[key] = part.read(key, value)
        return partial(_load_module, x, loaded)


def _load_module(x: nn.Module, loaded: Any) -> None:
    x.load_state_dict(loaded, strict=False)  # names and shapes were compared


STATES[nn.Module] = _Module()


# Optimisers


class _SavedArray:
    """An array of a state that is not read yet."""

    def __init__(self, entry: ArrayEntry, kind: str):
        self.entry = entry


_OWN_OPTIONS = ("foreach", "fused", "capturable", "differentiable", "param_names")
"""How steps are computed, which depends on the device: an optimiser keeps its own."""


class _Optimizer:
    """Optimisers. As their `state_dict`, but with the names of parameters in place of numbers."""

    def save(self, x: Any, others: Mapping[str, Any]) -> Any:
        (names, places), state = _parameter_names(x, others), x.state_dict()
        entries = {names[k] if isinstance(k, int) else k: value for k, value in state["state"].items()}
        numbers = {name: k for k, name in enumerate([*places, *(name for name in names if name not in places)])}
        groups = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            | {"params": _held({names[number]: numbers[names[number]] for number in group["params"]}, places)}
            for group in state["param_groups"]
        ]
        return {**state, "state": _held(entries, places), "param_groups": groups}

    def names(self, x: Any, saved: list[str], others: Mapping[str, Any]) -> list[str]:
        own, places = _parameter_names(x, others)
        wanted = [f"param_groups.{g}.params.{own[k]}" for g, numbers in enumerate(_numbers(x)) for k in numbers]
        known = {*own, *places}
        for name in saved:
            kind, _, rest = name.partition(".")
            if kind == "state":
                is_wanted = any(prefix in known for prefix in _prefixes(rest))
            elif kind == "param_groups":
                group, _, key = rest.partition(".")
                is_option = not key.startswith("params.") or key.removeprefix("params.") in places
                is_wanted = int(group) < len(x.param_groups) and is_option
            else:
                is_wanted = name != ""
            if is_wanted:
                wanted.append(name)
        return wanted

    def load(self, x: Any, part: SavedPart, others: Mapping[str, Any]) -> Callable[[], None]:
        saved, own = part.tree(_SavedArray), x.state_dict()
        parameters = [p for group in x.param_groups for p in group["params"]]
        like = x.state_like if isinstance(x, ShardedOptimizer) else lambda p: p
        whole = isinstance(x, torch.optim.LBFGS)  # its tensors are vectors of the entries of all parameters
        (names, _), state = _parameter_names(x, others), dict(own["state"])
        groups = []
        for g, group in enumerate(own["param_groups"]):
            for number in group["params"]:
                entries = saved["state"].get(names[number], {})
                if _has_some(part, f"state.{names[number]}", entries):
                    state[number] = _values(part, entries, None if whole else like(parameters[number]))
                elif part.has(f"param_groups.{g}.params.{names[number]}") and not entries:
                    state.pop(number, None)
            options = saved["param_groups"][g] if g < len(saved["param_groups"]) else {}
            options = {k: v for k, v in options.items() if k != "params" and k not in _OWN_OPTIONS}
            has = _has_some(part, f"param_groups.{g}", options)
            groups.append({**group, **(_values(part, options, None) if has else {})})
        rest = {k: _values(part, v, None) for k, v in saved.items() if k not in ("state", "param_groups")}
        return partial(_load_optimizer, x, {**own, **rest, "state": state, "param_groups": groups})


def _load_optimizer(x: Any, loaded: dict[str, Any]) -> None:
    """`load_state_dict`, which converts to the dtype of the parameter; but numbers, such as the float32 products of
    NAdam for parameters of float64, keep theirs, so that a run goes on as it would have."""
    x.load_state_dict(loaded)
    parameters = [p for group in x.param_groups for p in group["params"]]
    for number, entries in loaded["state"].items():
        state = x.state[parameters[number]] if isinstance(number, int) else {}
        for key, value in entries.items() if state else ():
            now = state.get(key)
            if isinstance(value, torch.Tensor) and not value.ndim and isinstance(now, torch.Tensor):
                state[key] = value.to(now.device, now.dtype if key == "step" else value.dtype)


def _prefixes(name: str) -> Iterator[str]:
    """The paths that lead to a name."""
    for at, letter in enumerate(name):
        if letter == ".":
            yield name[:at]


def _has_some(part: SavedPart, name: str, tree: Any) -> bool:
    """Whether some leaf of a tree is to be loaded."""
    names: list[str] = []
    map_leaves(tree, lambda below, _: names.append(f"{name}.{below}"))
    return any(map(part.has, names))


def _values(part: SavedPart, tree: Any, p: Any) -> Any:
    """A tree with tensors in place of arrays that are not read yet.

    p: the parameter that they belong to. Those of its shape lie as it does; so do those that have length 1 in some
    dimensions, as the factors of Adafactor's second moments. All others are whole.
    """

    def value(_: str, x: Any) -> Any:
        if not isinstance(x, _SavedArray):
            return x
        shape = x.entry.shape
        if isinstance(p, PartitionedTensor) and shape:
            y: Any = p.detach().new_empty(shape)
            if isinstance(y, PartitionedTensor) and piece_layouts(y):
                block = _block_like(y, lambda layout: part.block(x.entry, layout, y.block_index))
                return new_leaf(PartitionedTensor, block, y._placement, INVARIANT, False, y)
        whole = part.block(x.entry)
        return _tensor_like(whole, plain(p)) if p is not None and shape == tuple(p.shape) else _tensor(whole)

    return map_leaves(tree, value)


def _numbers(x: Any) -> list[range]:
    """The numbers of the parameters of each group, in the order of all groups."""
    ends = np.cumsum([0, *(len(group["params"]) for group in x.param_groups)]).tolist()
    return [range(a, b) for a, b in pairwise(ends)]


def _held(entries: dict[str, Any], places: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Entries by the names of parameters, as this worker has them. places: by the names of those of pipelines, the
    workers that save them."""
    of_all = {name: value for name, value in entries.items() if name not in places}
    held = lambda name, workers: Held(entries[name], workers) if workers and name in entries else Held()
    return of_all | {name: held(name, workers) for name, workers in places.items()}


def _parameter_names(x: Any, others: Mapping[str, Any]) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """The names of the parameters of an optimiser, by number; and of the pipelines that have some of them those of all
    stages, each with the workers that save it: none where others do.

    Those in the module of the same tree; if it has parameters of several modules, with the names of these in the tree
    before. Else those that the optimiser was made with (`model.named_parameters()`). If not all have one, the numbers.
    """
    parameters = [p for group in x.param_groups for p in group["params"]]
    ids = {id(p) for p in parameters}
    found: dict[int, tuple[str, str]] = {}
    places: dict[tuple[str, str], tuple[int, ...]] = {}
    for tree_name, module in others.items():
        if not isinstance(module, nn.Module):
            continue
        state = blocks_of(module, keep_vars=True)
        of_stages = places_of(state)
        ours: dict[int, Any] = {id(p): name for name, p in module.named_parameters()}
        ours |= {id(state[name]): place.parameter for name, place in of_stages.items() if name in state}
        own = {key: (tree_name, name) for key, name in ours.items() if key in ids}
        found = own | found
        if own or not ids:  # of an optimiser of no parameters, those of a stage
            kept = dict.fromkeys(place.parameter for place in of_stages.values() if place.parameter is not None)
            places |= {(tree_name, name): of_stages[name].workers for name in kept}
    is_one = len({tree_name for tree_name, _ in (*found.values(), *places)}) == 1
    called = lambda tree_name, name: name if is_one else joined(tree_name, name)
    of_modules = {k: called(*each) for k, each in found.items()}
    if len(of_modules) == len(parameters):
        return [of_modules[id(p)] for p in parameters], {called(*each): w for each, w in places.items()}
    names = [name for group in x.param_groups for name in group.get("param_names", ())]
    return names if len(set(names)) == len(parameters) else [str(k) for k in range(len(parameters))], {}


STATES[torch.optim.Optimizer] = _Optimizer()


# Random generators


class _Generator:
    """`torch.Generator`, by its state."""

    def save(self, x: torch.Generator, others: Mapping[str, Any]) -> Any:
        return {"device": x.device.type, "state": x.get_state()}

    def names(self, x: torch.Generator, saved: list[str], others: Mapping[str, Any]) -> list[str]:
        return ["device", "state"]

    def load(self, x: torch.Generator, part: SavedPart, others: Mapping[str, Any]) -> Callable[[], None]:
        state = part.tree()
        if state["device"] != x.device.type:
            raise CheckpointError.at(
                "spmd.load",
                argument=f"like, the object {part.name!r}",
                got=f"a generator on {x.device.type}, for the state of one on {state['device']}",
                need="the same kind of device: its numbers are made in another way",
                mend=f"torch.Generator({state['device']!r})",
            )

        def change() -> None:
            x.set_state(state["state"])

        return change


STATES[torch.Generator] = _Generator()
