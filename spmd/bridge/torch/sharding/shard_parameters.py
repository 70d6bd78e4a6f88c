"""Shard the parameters of a module over an axis of the mesh, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils import _pytree as pytree

from spmd.bridge.torch.data_parallel import DataParallel
from spmd.bridge.torch.frontend import FRONTEND
from spmd.bridge.torch.functorch import current_level
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor
from spmd.bridge.torch.left_alone import left_alone
from spmd.bridge.torch.module_broadcast import check_initialized, copy_module, varying_axes
from spmd.bridge.torch.plans.parallelize import matches
from spmd.bridge.torch.replicas import differing
from spmd.bridge.torch.sharding.blocks import WHERE, ShardedParameter
from spmd.bridge.torch.sharding.initializing import initialize, on_meta
from spmd.bridge.torch.sharding.sharding import Options, Sharding
from spmd.bridge.torch.sharding.unit import Unit
from spmd.bridge.torch.stale_optimizers import note_replaced
from spmd.bridge.torch.tensor import with_state
from spmd.bridge.torch.worker_context import device_of
from spmd.errors import DifferentiationError, MeshError, StateError, describe, message
from spmd.mesh import WORKER, Worker, here
from spmd.operators.partial_comm import whole_comm
from spmd.spellings import closest
from spmd.tracebacks import api_boundary

__all__ = ["shard_parameters"]

Units = type | tuple[type, ...] | str | Sequence[str] | Callable[[str, nn.Module], bool] | None


@api_boundary
def shard_parameters(
    module: nn.Module,
    axis_name: str | Sequence[str],
    *,
    unit: Units = None,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    reduction: str = "sum",
    init: str | Callable[[nn.Module], Any] = "broadcast",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    broadcast_buffers: bool = True,
    varying: str | Sequence[str] = (),
) -> Any:
    """Split the parameters of a module over the workers along axis_name, in place; data differ there (ZeRO-3, FSDP).

        model = spt.shard_parameters(GPT(), "data", unit=Block)
        optimizer = torch.optim.AdamW(model.parameters())  # after it: of this worker's blocks
        loss = spt.mean(F.cross_entropy(model(x), y, reduction="none"), "data")
        loss.backward()  # .grad holds this worker's block of the sum
        optimizer.step()

    module: this worker's own, or that of `spt.parallelize`. Parameters become `spt.Parameter`s, split over axis_name
    too, as by `spmd.training.shard_specs`; numbers stay whole. Optimisers, `spt.state_dict`, `spmd.save` take them.
    unit: the submodules whose parameters are gathered together before forward and released after it: classes, patterns
    of names, as of a plan, or a function of a name and a module. Of a pattern the outermost modules that match are
    units: by `"layers.*"` each layer, and no part of one; what nobody calls, such as lists, is none. The module itself
    is a unit too, of all other parameters. One that several modules share belongs to the innermost unit around.
    prefetch: how many units are gathered ahead, while one computes, in the order of the last step; in backward too.
    reshard_after_forward: False keeps whole parameters from forward until backward has used them.
    reduction, varying: as for `spt.data_parallel`. init: "broadcast" takes the parameters and buffers of the first
    worker; "verify" raises where others differ. Parameters and buffers on the device "meta" are never whole all
    together: blocks are made, and each module that has some draws its own by its `reset_parameters`, or by init, a
    function of a module, within `spt.drawing()`. So they have the same numbers on any mesh.
    param_dtype: of the wholes, and to which floating arguments of units are cast; blocks keep theirs, as float32
    masters. reduce_dtype: in which gradients are summed; by default that of the parameter.
    broadcast_buffers: after each backward that sums, copy the buffers (running means) of the first worker.

    Forward: that of the module on this worker's data. Results vary over axis_name. Backward: the wholes are gathered
    again, and each unit's gradients are summed in one message per dtype while backward goes on. All workers make
    equally many backwards; a part of a minibatch may be empty. With prefetch=1 two units are whole at a time, and those
    around them. Of arguments that are global tensors split over axis_name, results are those of one worker.
    no_sync: in `with model.no_sync():` backward sends no gradients and adds this worker's own gradients of the wholes,
    in reduce_dtype: as much memory as whole gradients. The next backward outside sums everything; until then, steps and
    norms raise StateError, and `optimizer.zero_grad()` drops what is not summed.
    Cost: for each unit and dtype one all-gather in forward, one in backward, and one reduce-scatter.
    Raises StateError for modules sharded already, lazy parameters and units that match nothing, DifferentiationError
    for backward with create_graph=True, MeshError outside of bodies.
    Source: Rajbhandari et al., "ZeRO", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023.

        >>> def body(x):
        ...     net = spt.shard_parameters(torch.nn.Linear(3, 4), "data", reduction="mean")
        ...     net(x).mean().backward()
        ...     return net.weight.shape, tuple(net.weight.block().shape), tuple(net.weight.grad.block().shape)
        >>> with spmd.Mesh(data=2):
        ...     spt.map(body, P("data"), None)(torch.ones(4, 3))
        (torch.Size([4, 3]), (2, 3), (2, 3))
    """
    options = Options(prefetch, reshard_after_forward, reduction, param_dtype, reduce_dtype)
    return _sharded(module, axis_name, varying, unit, init, broadcast_buffers, options)


def _sharded(
    module: nn.Module,
    axis_name: Any,
    varying: Any,
    unit: Units,
    init: Any,
    broadcast_buffers: bool,
    options: Options,
) -> nn.Module:
    """The module, whose parameters are replaced by blocks; calls of its units gather them."""
    worker = here(WHERE)
    _check_arguments(module, init, options)
    axes = worker.mesh.names(axis_name, WHERE)
    others = varying_axes(worker, varying, axes, WHERE)
    names = _unit_names(module, unit)
    sharding = Sharding(worker, axes, options)
    if vars(module).setdefault("_spmd_sharding", sharding) is not sharding:
        raise _sharded_already(type(module).__name__)
    without_values = on_meta(module, init)
    with whole_comm(worker.comm).uncounted(bool(others)):
        copy_module(worker, axes, module, init == "verify", WHERE)
        if worker.tracked:
            by_id = {id(p): name for name, p in module.named_parameters()}
            differences = differing(worker, module, (*axes, *others), WHERE)
            sharding.undeclared = {by_id[key]: difference for key, difference in differences.items()}
        for name, parameters in _shared_out(module, names, axes, worker).items():
            sharding.units.append(Unit(name, module.get_submodule(name), parameters))
        initialize(without_values, init, sharding.units, device_of(worker))
    if broadcast_buffers:
        sharding.buffers = list(module.buffers())
    for each in sharding.units:
        _attach(each.module, sharding, each)
    return module


# Units

_NEVER_CALLED = (
    *(nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    NonDynamicallyQuantizableLinear,  # by which `nn.MultiheadAttention` keeps the weights of its output
)


def _unit_names(module: nn.Module, unit: Any) -> list[str]:
    """The names of the units, that of the module itself first."""
    modules = {name: m for name, m in module.named_modules() if not isinstance(m, _NEVER_CALLED)}
    if unit is None:
        return [""]
    if isinstance(unit, type) or (isinstance(unit, tuple) and unit and all(isinstance(u, type) for u in unit)):
        found = [name for name, m in modules.items() if isinstance(m, unit)]
    elif isinstance(unit, str) or (isinstance(unit, list | tuple) and all(isinstance(u, str) for u in unit)):
        patterns = [unit] if isinstance(unit, str) else list(unit)
        taken: set[str] = set()
        for pattern in patterns:
            outermost = _outermost(pattern, modules)
            if not outermost:
                raise _no_unit(module, repr(pattern))
            taken |= outermost
        found = [name for name in modules if name in taken]
    elif callable(unit):
        found = [name for name, m in modules.items() if unit(name, m)]
    else:
        raise TypeError(
            message(
                WHERE,
                argument="unit",
                got=describe(unit),
                need="classes, patterns of names, a function of a name and a module, or None",
                mend='unit=nn.TransformerEncoderLayer, or unit="layers.*"',
            )
        )
    if not found:
        raise _no_unit(module, describe(unit))
    return ["", *(name for name in found if name)]


def _outermost(pattern: str, names: Iterable[str]) -> set[str]:
    """The names of submodules that a pattern is for, without those of parts of others."""
    matching = {name for name in names if name and matches(pattern, name)}
    return {name for name in matching if not any(name.startswith(f"{other}.") for other in matching)}


def _no_unit(module: nn.Module, given: str) -> StateError:
    some = [name for name, _ in module.named_children()][:4]
    return StateError.at(
        WHERE,
        argument="unit",
        got=f"{given}, which no part of {type(module).__name__} is",
        need=f"submodules, such as {', '.join(map(repr, some))}" if some else "unit=None, for a module without parts",
        mend="print(module) shows names and classes; unit=None takes the module as one unit",
    )


def _shared_out(
    module: nn.Module, names: list[str], axes: tuple[str, ...], worker: Worker
) -> dict[str, list[ShardedParameter]]:
    """The parameters of each unit, which are replaced by blocks."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, m in module.named_modules():
        for name, p in m._parameters.items():
            if p is not None:
                owners.setdefault(id(p), []).append((path, m, name))
    units: dict[str, list[ShardedParameter]] = {name: [] for name in names}
    for places in owners.values():
        path, first, name = places[0]
        around = [u for u in names if all(not u or p == u or p.startswith(f"{u}.") for p, _, _ in places)]
        own: Any = first._parameters[name]
        q = ShardedParameter(f"{path}.{name}".lstrip("."), own, axes, worker)
        if q.p is not own:
            note_replaced(own, WHERE)
        q.slots = [(m, n) for _, m, n in places]
        for m, n in q.slots:
            m._parameters[n] = q.p
        units[max(around, key=len)].append(q)
    for m in module.modules():
        if isinstance(m, nn.RNNBase):
            m._flat_weights = [getattr(m, n, None) for n in m._flat_weights_names]
    return units


# Calls


class _ShardedUnit:
    """The class of a unit, before its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _outside_of_graphs(self._call_unit, args, kwargs)

    def _call_unit(self, *args: Any, **kwargs: Any) -> Any:
        sharding, unit = vars(self)["_spmd_unit"]
        worker = WORKER.get()
        if worker is None:
            raise MeshError.at(
                f"a module of {WHERE}",
                got="a forward outside of any body: its parameters lie on all workers",
                need="a body: spt.map(main, (), None, mesh=mesh)()",
                mend="load spt.state_dict(model) into a module that is not sharded",
            )
        if unit.depth:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if current_level() is not None:
            raise _within_transformation()
        if sharding.param_dtype is not None:
            args, kwargs = pytree.tree_map(partial(_cast, sharding.param_dtype), (args, kwargs))
        with sharding.called(worker, unit):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _ShardedModule(_ShardedUnit):
    """The class of a sharded module, before its own."""

    def _call_unit(self, *args: Any, **kwargs: Any) -> Any:
        sharding: Sharding = vars(self)["_spmd_sharding"]
        if sharding.running:
            return super()._call_unit(*args, **kwargs)
        worker = WORKER.get()
        summed = _is_global((args, kwargs), sharding.axes) or _lays_out(self, sharding.axes)
        sharding.summed = summed
        varied = worker is not None and worker.tracked and not summed
        with sharding.outermost(), _varied_statistics(self, sharding) if varied else nullcontext():
            out = super()._call_unit(*args, **kwargs)
        if varied and worker is not None:
            out = pytree.tree_map(lambda x: _vary(x, sharding.axes, worker), out)
        if torch.is_grad_enabled():
            sharding.watch_outputs(out)
        return out

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward keeps this worker's own gradients of the wholes and sends nothing.

        The next backward outside sums everything.
        """
        with vars(self)["_spmd_sharding"].no_sync():
            yield


@left_alone("spt.shard_parameters: a sharded module runs outside of graphs; compile it without fullgraph=True")
def _outside_of_graphs(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs), which the compiler leaves alone: it gathers and releases parameters."""
    return function(*args, **kwargs)


def _attach(module: nn.Module, sharding: Sharding, unit: Unit) -> None:
    """Let calls of a module gather and release its parameters."""
    vars(module)["_spmd_unit"] = sharding, unit
    kind, base = type(module), _ShardedModule if "_spmd_sharding" in vars(module) else _ShardedUnit
    module.__class__ = type(kind.__name__, (base, kind), {"__module__": kind.__module__})


def _cast(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _vary(x: Any, axes: tuple[str, ...], worker: Worker) -> Any:
    return FRONTEND.vary(x, axes, worker) if isinstance(x, torch.Tensor) else x


def _is_global(arguments: Any, axes: tuple[str, ...]) -> bool:
    """Whether an argument is a global tensor that these axes split."""
    return any(
        isinstance(x, GlobalTensor) and not x.block_layout.varying.isdisjoint(axes)
        for x in pytree.tree_leaves(arguments)
    )


def _lays_out(module: Any, axes: tuple[str, ...]) -> bool:
    """Whether a module with a plan takes its arguments as blocks that these axes split."""
    specs = getattr(vars(module).get("_spmd_call"), "in_specs", None)
    each = specs if isinstance(specs, list | tuple) else [specs]
    return any(not frozenset(getattr(s, "varying", ())).isdisjoint(axes) for s in each)


@contextmanager
def _varied_statistics(module: Any, sharding: Sharding) -> Iterator[None]:
    """Let the running statistics of batch norms vary: they are those of this worker's data."""
    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
    try:
        for m in module.modules():
            for name in ("running_mean", "running_var") if isinstance(m, _NormBase) else ():
                own = m._buffers.get(name)
                if own is not None:
                    m._buffers[name] = with_state(own, sharding.state)
                    replaced.append((m._buffers, name, m._buffers[name], own))
        yield
    finally:
        for buffers, name, varied, own in replaced:
            if buffers.get(name) is varied:
                buffers[name] = own


# Checks


def _within_transformation() -> DifferentiationError:
    return DifferentiationError.at(
        f"a module of {WHERE}",
        got="a call within a transformation of torch.func, such as grad or vmap",
        need="autograd's own graph, whose backward gathers parameters again and sums gradients",
        mend="loss.backward(), or torch.autograd.grad(loss, inputs); spt.data_parallel keeps parameters whole",
    )


def _sharded_already(name: str) -> StateError:
    return StateError.at(
        WHERE,
        argument="module",
        got=f"{name}, which is sharded already, here or on another worker of this process",
        need="a module of this worker's own, sharded once",
        mend="make it in the body, or copy.deepcopy(module) of a whole one; unit= names its parts in one call",
    )


def _check_arguments(module: Any, init: Any, options: Options) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            message(
                WHERE,
                argument="module",
                got=describe(module),
                need="an nn.Module",
                mend="spt.shard_parameters(model, axis_name)",
            )
        )
    for name, value, choices in (
        ("reduction", options.reduction, ("sum", "mean")),
        ("init", init, ("broadcast", "verify")),
    ):
        if value not in choices and not (name == "init" and callable(value)):
            raise ValueError(
                message(
                    WHERE,
                    argument=name,
                    got=repr(value),
                    need=f"one of {', '.join(map(repr, choices))}{', or a function of a module' * (name == 'init')}",
                    mend=f'{name}="{closest(value, choices)}"',
                )
            )
    prefetch: Any = options.prefetch
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ValueError(
            message(
                WHERE,
                argument="prefetch",
                got=repr(prefetch),
                need="a number of units, an int of at least 0",
                mend="leave it out: 1",
            )
        )
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(options, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                message(
                    WHERE,
                    argument=name,
                    got=repr(dtype),
                    need="a floating dtype of torch, or None",
                    mend=f"{name}=torch.bfloat16",
                )
            )
    _check_module(module)


def _check_module(module: nn.Module) -> None:
    for name, m in module.named_modules():
        if "_spmd_unit" in vars(m) or "_spmd_sharding" in vars(m):
            raise _sharded_already(name or type(m).__name__)
        if isinstance(m, DataParallel):
            raise StateError.at(
                WHERE,
                argument="module",
                got="a module of spt.data_parallel, which sums the gradients itself",
                need="the module alone",
                mend="spt.shard_parameters(model.module, axis_name)",
            )
    check_initialized(module, WHERE)
