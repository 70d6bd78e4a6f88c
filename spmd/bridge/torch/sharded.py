"""Modules with parameters in blocks: saving, loading, and norms of gradients.

Such a parameter is a `spt.Parameter`, which has a layout. The `state_dict` of a `ShardedModule` holds whole tensors, as
that of the same module without shards, and `load_state_dict` copies this worker's block of them. So checkpoints fit any
mesh. Replicated parameters are `nn.Parameter`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

import spmd
from spmd.bridge.torch.function import apply
from spmd.bridge.torch.functorch import unwrapped
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.partitioned.parameter import Parameter
from spmd.bridge.torch.partitioned.placement import layout_of
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor, split_like
from spmd.bridge.torch.rng import drawing
from spmd.bridge.torch.tensor_state import is_partitioned, plain
from spmd.bridge.torch.unsummed import check_summed
from spmd.bridge.torch.worker_context import assigned, context_of, device_of
from spmd.errors import LayoutError, StateError, describe
from spmd.layout import Layout, P
from spmd.mesh import WORKER, Worker, here
from spmd.operators.at_root import root_axes
from spmd.operators.base import named
from spmd.operators.partial_comm import whole_comm
from spmd.operators.sums import Sum
from spmd.tracebacks import api_boundary

__all__ = [
    "Place",
    "ShardedModule",
    "blocks_of",
    "clip_grad_norm_",
    "grad_norm",
    "norm_of_gradients",
    "norm_over",
    "over_workers",
    "places_of",
    "saves_whole",
    "state_dict",
]

_saves_whole: ContextVar[bool] = ContextVar("spmd_torch_whole", default=True)
"""Whether `state_dict` holds whole tensors in place of blocks."""


class ShardedModule(nn.Module):
    """A module in which each worker holds blocks of some parameters.

        class Scale(spt.ShardedModule):
            def __init__(self, features):
                super().__init__()
                self.register_shard("scale", torch.ones(features), P("model"))

            def forward(self, x):
                return x * self.shard("scale")

    `state_dict()` of it, or of any module around it, is collective: all workers call it, and each gets every parameter
    whole, as a plain tensor that shares no memory with the module. `spt.state_dict(module, whole=False)` gives blocks.
    `load_state_dict` takes either. It copies this worker's block of whole tensors, and sends nothing. All have the keys
    of the same module without shards. Construct it in a body.

        >>> issubclass(spt.nn.Linear, spt.ShardedModule)
        True
    """

    _split: frozenset[str] = frozenset()
    """The names of the parameters that are split into blocks."""
    _packed_names: frozenset[str] = frozenset()
    """Of these, those whose layout splits another shape than theirs."""

    def register_shard(
        self,
        name: str,
        value: torch.Tensor | Callable[[torch.Tensor], Any],
        spec: LayoutLike,
        shape: Iterable[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        generator: torch.Generator | int | None = None,
        requires_grad: bool = True,
        unpacked: Sequence[int] | None = None,
    ) -> None:
        """Add a `spt.Parameter`, of which this worker holds a block; an `nn.Parameter` if no axis splits it.

        value: the whole tensor, the same on all workers; or a function that fills a tensor of this shape and dtype in
        place, such as `nn.init.xavier_uniform_`. It draws inside `spt.drawing(generator)`: the same whole on any mesh.
        One worker of a process at a time holds the whole, on the host. Nothing is communicated.
        spec: a Layout of the whole; or a spec or a `Grid`, for balanced blocks. Who holds nothing has a block of shape
        (0, 0, ...). device, dtype: of the block, by default torch's. On the device "meta" nothing is filled.
        unpacked: the shape in which spec splits the whole, as for `spt.Parameter`.
        Raises LayoutError where layout and shape do not fit.
        """
        if isinstance(value, torch.Tensor):
            shape = value.shape
            dtype = dtype or value.dtype
            device = value.device if device is None else device
        where = f"spt.ShardedModule.register_shard({name!r})"
        if shape is None:
            raise LayoutError.at(
                where,
                argument="shape",
                got="none, for a parameter that a function fills",
                need="the shape of the whole",
                mend="shape=(out_features, in_features)",
            )
        shape = tuple(shape)
        layout = layout_of(where, shape if unpacked is None else tuple(unpacked), spec, here(where))
        dtype = dtype or torch.get_default_dtype()
        device = torch.device(device) if device is not None else torch.get_default_device()
        if device.type == "meta":
            whole = torch.empty(shape, dtype=dtype, device=device)
        elif isinstance(value, torch.Tensor):
            whole = value.detach()
        else:
            with drawing(generator), torch.no_grad():
                whole = torch.empty(shape, dtype=dtype, device="cpu")
                value(whole)
        block = Parameter(whole, layout, unpacked=unpacked).detach()
        if layout.varying:
            self._split, data = self._split | {name}, block.to(device, dtype)
            self._packed_names = self._packed_names | {name} if layout.shape != shape else self._packed_names - {name}
        else:
            self._split, data = self._split - {name}, plain(block.packed_block().to(device, dtype)).view(shape)
        self.register_parameter(name, nn.Parameter(data, requires_grad))

    def shard_layout(self, name: str) -> Layout:
        """How the whole of a parameter lies on the mesh."""
        value = getattr(self, name)
        return value.block_layout if is_partitioned(value) else _whole(tuple(value.shape))

    def shard(self, name: str) -> torch.Tensor:
        """The block of a parameter for forward: its `block()`, or `packed_block()`."""
        value = getattr(self, name)
        if torch.compiler.is_dynamo_compiling():
            if name not in self._split:
                return value
            return value.packed_block() if name in self._packed_names else value.block()
        if is_partitioned(value):
            is_packed = tuple(value.shape) != unwrapped(value).block_layout.shape
            return value.packed_block() if is_packed else value.block()
        if name not in self._split:
            return value
        raise LayoutError.at(
            f"{type(self).__name__}.shard({name!r})",
            got=f"{describe(value)} in its place",
            need="a tensor of which each worker has a block",
            mend="load_state_dict for whole tensors; spt.Parameter(whole, spec); or what "
            "spt.state_dict(module, whole=False) gives, whose tensors have block()",
        )

    def gathered(self, name: str, *, history: bool = False) -> torch.Tensor:
        """The whole of a parameter or buffer, on every worker: `whole()` of it. Collective.

        history: whether its gradient reaches the block.
        """
        value = getattr(self, name)
        value = value if history else value.detach()
        return value.whole() if is_partitioned(value) else value if history else plain(value).clone()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if _saves_whole.get():
            for name in (*self._parameters, *self._buffers):
                value = destination.get(prefix + name)
                if isinstance(value, PartitionedTensor):
                    destination[prefix + name] = plain(value.whole())

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
        tensors = dict(state_dict)
        if local_metadata.get("assign_to_params_buffers"):
            for name, own in (*self._parameters.items(), *self._buffers.items()):
                value = tensors.get(prefix + name)
                if isinstance(own, PartitionedTensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                    tensors[prefix + name] = own.like_whole(value)
        start = len(error_msgs)
        super()._load_from_state_dict(
            tensors, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for index, text in enumerate(error_msgs[start:], start):
            if text.startswith("size mismatch"):
                error_msgs[index] = f"{text} A checkpoint has whole tensors."


@lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Layout:
    return Layout(shape, P(), {})


class Place(NamedTuple):
    """Where an entry of the state of a pipeline lies. workers: of the mesh, that hold it; none where others do.
    parameter: its name in the state of an optimiser, None for what is no parameter."""

    workers: tuple[int, ...]
    parameter: str | None


def saves_whole() -> bool:
    """Whether `state_dict` holds whole tensors, of all stages."""
    return _saves_whole.get()


def blocks_of(module: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
    """The state of a module as this worker holds it. keep_vars: of its parameters themselves."""
    with assigned(_saves_whole, False):
        return module.state_dict(keep_vars=keep_vars)


def places_of(state: Any) -> dict[str, Place]:
    """Where the entries of pipelines lie, those of other workers among them, by their names in the state of a module
    that holds these."""
    return getattr(state, "_places", {})


def state_dict(module: nn.Module, *, whole: bool = True) -> dict[str, Any]:
    """The state of any module, with `spt.Parameter`s of its own or of modules in it.

    whole: True: every parameter whole, a plain tensor on every worker, which fits any mesh. Collective. False: blocks,
    as `PartitionedTensor`s, which `load_state_dict` takes on the same mesh; nothing is sent. Of a `spt.Pipeline` wholes
    are those of all stages, by one broadcast for each, and blocks those of this worker's.

        >>> def body():
        ...     layer = spt.nn.Linear(2, 5, w_spec=P("x"))
        ...     return {name: tuple(x.shape) for name, x in spt.state_dict(layer).items()}
        >>> with spmd.Mesh(x=2):
        ...     spt.map(body, (), None)()
        {'weight': (5, 2), 'bias': (5,)}
    """
    if not whole:
        return blocks_of(module)
    with assigned(_saves_whole, True):
        state = module.state_dict()
    for name, value in state.items():
        if isinstance(value, PartitionedTensor):
            state[name] = plain(value.whole())
    return state


# The norm of all gradients


def _parameters(modules: nn.Module | Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Each parameter of modules, once."""
    seen: set[int] = set()
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    for m in roots:
        if not isinstance(m, nn.Module):
            raise StateError.at(
                "spt.grad_norm",
                argument="modules",
                got=describe(m),
                need="modules: they know which of their parameters are blocks",
                mend="spt.clip_grad_norm_(net, 1.0)",
            )
    for module in roots:
        for m in module.modules():
            for parameter in m.parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


@api_boundary
def grad_norm(
    modules: nn.Module | Iterable[nn.Module], norm_type: float = 2.0, *, varying: str | Sequence[str] = ()
) -> torch.Tensor:
    """The norm of all gradients of modules as one vector. Each block and each replicated parameter counts once. It is
    the same on all workers, and equal to that of the same module without shards.

    modules: a module, or several. norm_type: of the p-norm, above 0; infinity for the largest. In at least float32.
    varying: axes along which workers have parameters of their own, as modules of `spt.remote`, and stages by hand.
    Cost: one all-reduce of a number for each set of axes over which parameters lie, and one to compare the norms of all
    workers. Collective; no gradient. Raises StateError where the norms differ.

        >>> def body():
        ...     layer = spt.nn.Linear(2, 8, bias=False, w_spec=P("x"))
        ...     layer.weight.grad = torch.ones_like(layer.weight)
        ...     return spt.grad_norm(layer)  # of 16 entries, eight on each worker
        >>> with spmd.Mesh(x=2):
        ...     spt.map(body, (), P())()
        tensor(4.0000, dtype=torch.float64)
    """
    p = float(norm_type)
    if not p > 0:
        raise StateError.at(
            "spt.grad_norm", argument="norm_type", got=repr(norm_type), need="a number above 0", mend="2.0"
        )
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    with torch.no_grad():
        pipelines: list[Any] = [m for m in roots if hasattr(m, "norm_of_stages")]
        parts = [m.norm_of_stages(p) for m in pipelines]
        others = [m for m in roots if m not in pipelines]
        if others or not parts:
            parts.append(_norm_along(varying, _parameters(others), p))
        total = parts[0] if len(parts) == 1 else _combined_norm(parts, p)
        worker = WORKER.get()
        if worker is not None and worker.tracked:
            _check_equal(worker, total)
        return total


def _norm_along(varying: str | Sequence[str], parameters: Iterable[nn.Parameter], p: float) -> torch.Tensor:
    """The p-norm of the gradients of parameters that differ along some axes."""
    if not varying:
        return norm_of_gradients(parameters, p)
    worker = here("spt.grad_norm")
    axes = worker.mesh.names(varying, "spt.grad_norm")
    with whole_comm(worker.comm).uncounted():  # others may have parameters in other layouts
        norm = norm_of_gradients(parameters, p)
    return norm_over(axes, norm, p)


def _combined_norm(parts: list[torch.Tensor], p: float) -> torch.Tensor:
    if p == float("inf"):
        return _combined(parts, True)
    return _combined([part**p for part in parts], False) ** (1 / p)


def norm_over(axes: tuple[str, ...], norm: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norm of the vectors of all workers along some axes together, of whose parts these are the norms."""
    if p == float("inf"):
        return over_workers(axes, norm, True)
    return over_workers(axes, norm**p, False) ** (1 / p)


def _check_equal(worker: Worker, norm: torch.Tensor) -> None:
    """Raise StateError on all workers if they have different norms."""
    for axis in [n for n, size in worker.mesh.axes.items() if size > 1 and n not in root_axes(worker)]:
        largest, smallest = over_workers((axis,), torch.stack([norm, -norm]), True).tolist()
        if largest + smallest > 1e-6 * abs(largest):
            raise StateError.at(
                "spt.grad_norm",
                argument="modules",
                got=f"gradients whose norm is {-smallest:.6g} on one worker along {axis!r}, {largest:.6g} on another",
                need="parameters with the same gradients on all workers, but for blocks",
                mend=f"varying={axis!r} where workers have their own parameters, as stages or modules of spt.remote; "
                "spt.data_parallel, which sums the gradients of copies",
            )


def norm_of_gradients(parameters: Iterable[nn.Parameter], p: float) -> torch.Tensor:
    """The p-norm of the gradients of parameters."""
    parameters = list(parameters)
    check_summed(parameters, "spt.grad_norm")
    largest = p == float("inf")
    device = device_of(WORKER.get())
    parts: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        placement = parameter._placement if isinstance(parameter, PartitionedTensor) else None
        g = parameter.grad
        if placement is None and isinstance(g, PartitionedTensor):  # split by `spt.shard_optimizer`
            placement = g._placement
        part = parts.setdefault(() if placement is None else tuple(placement.layout.axes), [])
        if g is None:
            continue
        g = plain(g).detach() if placement is None else split_like(g, placement)._block
        if not g.numel() or (placement is not None and placement.layout.owners[placement.index] != placement.index):
            continue
        if g.dtype not in (torch.float64, torch.complex128):
            g = g.to(torch.complex64 if g.is_complex() else torch.float32)
        norm = torch.linalg.vector_norm(g, p).to(device, torch.float64)
        part.append(norm if largest else norm**p)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    totals = [over_workers(axes, _combined([zero, *part], largest), largest) for axes, part in parts.items()]
    total = _combined([zero, *totals], largest)
    return total if largest else total ** (1 / p)


def _combined(parts: list[torch.Tensor], largest: bool) -> torch.Tensor:
    stacked = torch.stack(parts)
    return stacked.amax() if largest else stacked.sum()


def over_workers(axes: tuple[str, ...], part: torch.Tensor, largest: bool) -> torch.Tensor:
    """The sum, or the largest, of the numbers of all workers along some axes."""
    if not axes:
        return part
    worker = here("spt.grad_norm")
    if largest:
        return spmd.block(spmd.pmax(spmd.varying(part, axes), axes))  # type: ignore[return-value]
    return apply(named("grad_norm", Sum, axes), part, context_of(worker))


@api_boundary
def clip_grad_norm_(
    modules: nn.Module | Iterable[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    varying: str | Sequence[str] = (),
) -> torch.Tensor:
    """Scale the gradients of modules, in place, so that the norm of all together is at most max_norm.

    As `torch.nn.utils.clip_grad_norm_`, for modules with parameters in blocks; see `grad_norm`. Returns the norm before
    scaling. Collective. With error_if_nonfinite, raises RuntimeError for a norm that is not finite.

        >>> def body():
        ...     layer = spt.nn.Linear(2, 4, bias=False, w_spec=P("x"))
        ...     layer.weight.grad = torch.full_like(layer.weight, 3.0)
        ...     before = spt.clip_grad_norm_(layer, 1.0)
        ...     return before, spt.grad_norm(layer)
        >>> with spmd.Mesh(x=2):
        ...     spt.map(body, (), P())()
        (tensor(8.4853, dtype=torch.float64), tensor(1.0000, dtype=torch.float64))
    """
    modules = modules if isinstance(modules, nn.Module) else list(modules)
    total = grad_norm(modules, norm_type, varying=varying)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. "
            "error_if_nonfinite=False scales by it all the same."
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for parameter in _parameters(modules):
            if parameter.grad is not None:
                g: Any = parameter.grad
                g = g if isinstance(g, PartitionedTensor) else plain(g)
                g.mul_(scale.to(g.device))
    return total
