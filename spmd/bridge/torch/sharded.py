"""Modules of whose parameters each worker holds a block: what they save, load, and count as one.

A module says which layout each such parameter has (`ShardedModule.register_shard`). Its `state_dict` then holds whole
tensors, as that of the module which is not sharded, and `load_state_dict` takes them and keeps the block. So
checkpoints fit any mesh. Replicated parameters are ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

import spmd
from spmd.bridge.torch.drawing import drawing, is_drawing
from spmd.bridge.torch.function import apply, seat_of
from spmd.bridge.torch.modules import Lies, common_axes, of_shape
from spmd.bridge.torch.tensor import plain
from spmd.errors import LayoutError, MeshError, StateError, describe, message
from spmd.layout import Layout, P
from spmd.mesh import WORKER, here
from spmd.operators.base import named
from spmd.operators.reduce import Sum
from spmd.operators.repartition import Repartition
from spmd.tracebacks import api_boundary

__all__ = ["ShardedModule", "clip_grad_norm_", "grad_norm"]


class ShardedModule(nn.Module):
    """A module of whose parameters, or some of them, each worker holds a block.

        class Scale(spt.ShardedModule):
            def __init__(self, features):
                super().__init__()
                self.register_shard("scale", torch.ones(features), P("model"))

            def forward(self, x):
                return x * self.shard("scale")

    `state_dict()` of it, or of any module around it, is collective: all workers call it, and each gets every parameter
    whole, as a plain tensor that shares no memory with the module. `load_state_dict` is not: it takes whole tensors,
    and copies this worker's block of each. Both have the keys of the same module without shards. To be made in a body.
    """

    _shards: dict[str, tuple[Layout, int]]

    def __init__(self) -> None:
        super().__init__()
        self._shards = {}

    def register_shard(
        self,
        name: str,
        value: torch.Tensor | Callable[[torch.Tensor], Any],
        lies: Lies,
        shape: Iterable[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        generator: torch.Generator | int | None = None,
        requires_grad: bool = True,
    ) -> None:
        """Add a parameter of which this worker holds a block.

        value: the whole tensor, the same on all workers; or what fills one of this shape and dtype in place, such as
        `nn.init.xavier_uniform_`. It draws as `spt.drawing(generator)` says: the same whole on any mesh. One worker of
        a process at a time holds the whole, on the host, until its block is cut. Nothing is communicated.
        lies: a Layout of the whole; or a spec or a `Grid`, for balanced blocks. Who holds nothing has a block of shape
        (0, 0, ...). device, dtype: of the block, by default torch's. On the device "meta" nothing is filled.
        Raises LayoutError where layout and shape do not fit.
        """
        if isinstance(value, torch.Tensor):
            shape = value.shape
            dtype = dtype or value.dtype
            device = value.device if device is None else device
        where = f"spt.ShardedModule.register_shard({name!r})"
        if shape is None:
            raise LayoutError(
                message(
                    where,
                    argument="shape",
                    got="none, for a parameter that is filled",
                    need="the shape of the whole",
                    mend="shape=(out_features, in_features)",
                )
            )
        worker = here(where)
        layout = of_shape(tuple(shape), lies, common_axes(where, worker, lies))
        if layout.shape != tuple(shape) or not layout.shape:
            raise LayoutError(
                message(
                    where,
                    argument="lies",
                    got=f"{layout} for a parameter of shape {list(shape)}",
                    need=f"a layout of shape {list(shape)}" if layout.shape else "a parameter of one dimension or more",
                    mend="a spec or a Grid serves any shape"
                    if layout.shape
                    else "nn.Parameter: numbers are replicated",
                )
            )
        self.declare_shard(name, layout)
        dtype = dtype or torch.get_default_dtype()
        device = torch.device(device) if device is not None else torch.get_default_device()
        if device.type == "meta":
            block = torch.empty(self._block_shape(name), dtype=dtype, device=device)
        elif isinstance(value, torch.Tensor):
            block = self._cut(name, value.detach()).to(device, dtype, copy=True)
        else:
            with drawing(generator), torch.no_grad():
                whole = torch.empty(layout.shape, dtype=dtype, device="cpu")
                value(whole)
                block = self._cut(name, whole).to(device, copy=True)
                del whole
        self.register_parameter(name, nn.Parameter(block.contiguous(), requires_grad))

    def declare_shard(self, name: str, layout: Layout) -> None:
        """Say that the parameter or buffer of this name, which is or will be there, is this worker's block of a whole
        that lies as `layout`, over axes of the mesh."""
        worker = here(f"spt.ShardedModule.declare_shard({name!r})")
        self._shards[name] = layout, worker.group(tuple(layout.axes)).index

    def shard_layout(self, name: str) -> Layout:
        """How the whole of a parameter lies on the mesh."""
        return self._shards[name][0]

    def shard(self, name: str) -> torch.Tensor:
        """The block of a parameter as it is to be used in forward: declared to vary over the axes of its layout."""
        value = getattr(self, name)
        if torch.compiler.is_dynamo_compiling():  # where tensors carry no state
            return value
        names = tuple(self._shards[name][0].varying)
        declared: Any = spmd.varying(value, names) if names else value
        return declared

    def gathered(self, name: str, *, history: bool = False) -> torch.Tensor:
        """The whole of a parameter or buffer, on every worker. Collective along the axes of its layout.

        history: whether its gradient reaches the block. Cost: each block sent to every worker that has another.
        """
        layout, _ = self._shards[name]
        x = plain(getattr(self, name))
        x = x if history else x.detach()
        where = f"the state_dict of a {type(self).__name__}"
        if x.device.type == "meta":
            return x.new_empty(layout.shape)
        if layout.size == 1:
            return x if history else x.clone()
        if WORKER.get() is None:
            raise MeshError(
                message(
                    where,
                    argument=f"the parameter {name}",
                    got="a call outside of any body",
                    need=f"all workers, which hold a block each of {list(layout.shape)}",
                    mend="call state_dict() in the body, on every worker; it gives each the whole",
                )
            )
        if is_drawing():
            raise StateError(
                message(
                    where,
                    got="a call inside of spt.drawing(), where workers take turns",
                    need="all workers at once",
                    mend="call it before or after",
                )
            )
        op = Repartition(tuple(layout.axes), layout, Layout(layout.shape, P(), layout.axes))
        return apply(op, x, seat_of(here(where)))

    def _block_shape(self, name: str) -> tuple[int, ...]:
        layout, index = self._shards[name]
        return layout.block_shape(index)

    def _cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        layout, index = self._shards[name]
        return whole[layout.slices(index)]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._shards:
            if prefix + name in destination:
                destination[prefix + name] = self.gathered(name, history=keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        blocks = dict(state_dict)
        for name, (layout, index) in self._shards.items():
            key, own = prefix + name, getattr(self, name)
            given = state_dict.get(key)
            if own is None or not isinstance(given, torch.Tensor):
                continue
            if tuple(given.shape) == layout.shape:
                block = self._cut(name, given)
                blocks[key] = block.clone() if local_metadata.get("assign_to_params_buffers") else block
                continue
            blocks[key] = own
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, the shape in "
                f"current model is {torch.Size(layout.shape)}, of which {layout.describe(index)} holds "
                f"{torch.Size(own.shape)}: a checkpoint has whole tensors."
            )
        super()._load_from_state_dict(blocks, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


# The norm of all gradients


def _gradients(modules: nn.Module | Iterable[nn.Module]) -> Iterator[tuple[torch.Tensor | None, Layout | None, int]]:
    """Each gradient of modules, once, with its layout if it is a block of one; None where there is none."""
    seen: set[int] = set()
    every = [modules] if isinstance(modules, nn.Module) else list(modules)
    for m in every:
        if not isinstance(m, nn.Module):
            raise StateError(
                message(
                    "spt.grad_norm",
                    argument="modules",
                    got=describe(m),
                    need="modules: they know which of their parameters are blocks",
                    mend="spt.clip_grad_norm_(net, 1.0)",
                )
            )
    for module in every:
        for m in module.modules():
            shards = m._shards if isinstance(m, ShardedModule) else {}
            for name, parameter in m.named_parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                layout, index = shards.get(name, (None, 0))
                g = parameter.grad
                yield None if g is None else plain(g).detach(), layout, index


@api_boundary
def grad_norm(modules: nn.Module | Iterable[nn.Module], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients of modules taken together as one vector, of whole parameters: each block counts once,
    and so does a replicated parameter. The same on all workers, and that of the same module without shards.

    modules: a module, or several. norm_type: of the p-norm, above 0; infinity for the largest. In at least float32.
    Cost: one all-reduce of a number for each set of axes over which parameters lie. Collective; no gradient.
    """
    p = float(norm_type)
    if not p > 0:
        raise StateError(
            message("spt.grad_norm", argument="norm_type", got=repr(norm_type), need="a number above 0", mend="2.0")
        )
    largest = p == float("inf")
    worker = WORKER.get()
    on = torch.device("cpu" if worker is None or worker.mesh.places is None else "cuda")
    parts: dict[tuple[str, ...], list[torch.Tensor]] = {}
    with torch.no_grad():
        for g, layout, index in _gradients(modules):
            part = parts.setdefault(() if layout is None else tuple(layout.axes), [])
            if g is None or not g.numel() or (layout is not None and layout.owners[index] != index):
                continue
            if g.dtype not in (torch.float64, torch.complex128):
                g = g.to(torch.complex64 if g.is_complex() else torch.float32)
            norm = torch.linalg.vector_norm(g, p).to(on, torch.float64)
            part.append(norm if largest else norm**p)
        zero = torch.zeros((), dtype=torch.float64, device=on)
        sums = [_over(axes, _joined([zero, *part], largest), largest) for axes, part in parts.items()]
        total = _joined([zero, *sums], largest)
        return total if largest else total ** (1 / p)


def _joined(parts: list[torch.Tensor], largest: bool) -> torch.Tensor:
    stacked = torch.stack(parts)
    return stacked.amax() if largest else stacked.sum()


def _over(axes: tuple[str, ...], part: torch.Tensor, largest: bool) -> torch.Tensor:
    """A number of each worker, summed over them, or the largest."""
    if not axes:
        return part
    worker = here("spt.grad_norm")
    if largest:
        return spmd.block(spmd.pmax(spmd.varying(part, axes), axes))  # type: ignore[return-value]
    return apply(named("grad_norm", Sum, axes), part, seat_of(worker))


@api_boundary
def clip_grad_norm_(
    modules: nn.Module | Iterable[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of modules, in place, so that their norm all together is at most max_norm.

    As `torch.nn.utils.clip_grad_norm_`, for modules of which some parameters are blocks; see `grad_norm`. Gives the
    norm before. Collective. Raises RuntimeError for a norm that is no number, where error_if_nonfinite says so.
    """
    modules = modules if isinstance(modules, nn.Module) else list(modules)
    total = grad_norm(modules, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. "
            "error_if_nonfinite=False scales by it all the same."
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for g, _, _ in _gradients(modules):
            if g is not None:
                g.mul_(scale.to(g.device))
    return total
