"""Optimisers whose states lie split over workers that have the same parameters: ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import optim
from torch.optim import Optimizer

from spmd.bridge.torch.module_broadcast import any_worker, broadcast_first
from spmd.bridge.torch.shards import Shard, gather_parts
from spmd.bridge.torch.tensor_state import gradient_sync_of, is_partitioned, local_data, state_of_tensor
from spmd.bridge.torch.unsummed import check_summed
from spmd.bridge.torch.worker_context import device_of
from spmd.errors import StateError, describe, message
from spmd.mesh import Worker, here
from spmd.operators.partial_comm import whole_comm
from spmd.tracebacks import api_boundary

__all__ = ["ShardedOptimizer", "shard_optimizer"]

_WHERE = "spt.shard_optimizer"
_ELEMENTWISE = tuple(
    getattr(optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""The optimisers whose step of an entry depends on that entry of the gradient and of the states alone."""
_MASTER = "master"
"""The name among the states of a parameter of its copy in higher precision."""

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


@api_boundary
def shard_optimizer(
    optimizer: AnyOptimizer,
    axis_name: str | Sequence[str],
    *,
    split_gradients: bool = True,
    master_dtype: torch.dtype | None = None,
    elementwise: bool | None = None,
) -> AnyOptimizer:
    """The optimiser, whose states lie split over axis_name, where all workers have the same parameters.

    Each worker steps its part of each parameter, and the parts are gathered into the parameters:

        model = spt.data_parallel(Net(), "data")
        optimizer = spt.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), "data")
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    optimizer: of `torch.optim`, made as always, in the body; changed in place. Parameters of plans and of sharded
    layers are split further than they are, as `spmd.training.shard_specs` says. axis_name: an axis, or several.
    split_gradients: `spt.data_parallel` reduce-scatters gradients (ZeRO-2). After backward `.grad` is a
    `PartitionedTensor` of the shape of the whole, of which each worker has its part; torch's clipping and
    `spt.GradScaler` take it. False: `.grad` is whole, the sum of an all-reduce (ZeRO-1).
    master_dtype: for parameters of lower precision: each worker keeps its part of a copy of this dtype, of which
    the states are, and the parameter is that copy, rounded.
    elementwise: True for an optimiser that is none of torch's, if its step of an entry needs that entry alone.

    Everything else is as without: parameter groups, `add_param_group`, closures, hooks, schedulers, `zero_grad`. All
    workers along axis_name call `step`, with gradients of the same parameters. `state_dict()` holds this worker's
    parts, as `PartitionedTensor`s; `load_state_dict` takes them and whole tensors. `spmd.save` writes whole arrays:
    a run goes on with another number of workers, and with an optimiser that is not sharded.

    Cost: a step gathers the parameters, in one all-gather for each 4 MiB of one dtype; gradients cost a reduce-scatter
    in place of an all-reduce. Memory of states: the share of one worker. Raises StateError for optimisers that see
    more than an entry (LBFGS, Adafactor, Muon) and for one that a scheduler has already. Source: Rajbhandari, Rasley,
    Ruwase, He, "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020.

        >>> def body(x):
        ...     model = spt.data_parallel(torch.nn.Linear(4, 6), "data")
        ...     optimizer = spt.shard_optimizer(torch.optim.Adam(model.parameters()), "data")
        ...     spt.mean(model(x) ** 2, "data").backward()
        ...     optimizer.step()
        ...     return optimizer.state[model.weight]["exp_avg"].block().shape
        >>> with spmd.Mesh(data=2):
        ...     spt.map(body, P("data"), None)(torch.ones(8, 4))
        torch.Size([3, 4])
    """
    worker = here(_WHERE)
    axes = worker.mesh.names(axis_name, _WHERE)
    _check_optimizer(optimizer, elementwise)
    sharded: Any = optimizer
    sharded.__class__ = _sharded_class(type(optimizer))
    sharded._shard(worker, axes, split_gradients, master_dtype)
    return optimizer


class ShardedOptimizer(Optimizer):
    """The methods that `shard_optimizer` replaces; the class of its results is a subclass of this and of theirs."""

    _shard_axes: tuple[str, ...]
    _shards: dict[int, Shard]
    _split_gradients: bool
    _master_dtype: torch.dtype | None
    _compared: bool

    def _shard(
        self, worker: Worker, axes: tuple[str, ...], split_gradients: bool, master_dtype: torch.dtype | None
    ) -> None:
        self._shard_axes, self._shards, self._compared = axes, {}, worker.tracked
        self._split_gradients, self._master_dtype = split_gradients, master_dtype
        for group in self.param_groups:
            self._add_shards(worker, group["params"])
        self._place_states({p: self.state[p] for p in chain(*self._parameters()) if p in self.state})

    def _parameters(self) -> list[list[torch.Tensor]]:
        """The parameters of each group."""
        return [group["params"] for group in self.param_groups]

    def _add_shards(self, worker: Worker, parameters: Sequence[torch.Tensor]) -> None:
        split: dict[Any, dict[int, Shard]] = defaultdict(dict)
        for p in parameters:
            shard = self._shards[id(p)] = Shard(p, self._shard_axes, worker)
            sync = gradient_sync_of(p)
            if sync is not None and self._split_gradients and shard.is_split and {*self._shard_axes} <= {*sync.axes}:
                split[sync][id(p)] = shard
        for sync, shards in split.items():
            sync.split(shards)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As that of torch; parameters are split as the others."""
        super().add_param_group(param_group)
        self._add_shards(here("optimizer.add_param_group"), self.param_groups[-1]["params"])

    # A step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, of which each worker does a part. closure: evaluated once, before the step."""
        worker = here("optimizer.step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_summed(chain(*self._parameters()), "optimizer.step")
        self._check_same(worker)
        with torch.no_grad():
            with self._on_parts() as parts:
                _unhooked_step(super().step)(self)
            stepped = [(self._shards[id(p)], part) for p, part in parts if part.grad is not None]
            for shard, part in stepped:
                if not shard.is_split and part.dtype is not shard.p.dtype:
                    local_data(shard.p).copy_(part)
            with whole_comm(worker.comm).uncounted(worker.group(self._shard_axes).size < worker.mesh.size):
                gather_parts(worker, self._shard_axes, [each for each in stepped if each[0].is_split])
        return loss

    def _check_same(self, worker: Worker) -> None:
        """In the first step of a body without states, compare gradients that nothing sums with those of the first
        worker. Raises StateError where they differ."""
        alone = [p for p in chain(*self._parameters()) if self._shards[id(p)].is_split and gradient_sync_of(p) is None]
        alone = [p for p in alone if not is_partitioned(p)]
        if self._compared or not alone:
            return
        self._compared = True
        sums = [0 if p.grad is None else _checksum(p.grad) for p in alone]
        own = torch.tensor(sums, device=device_of(worker))
        first = broadcast_first(worker, self._shard_axes, own, "checksums of gradients")
        differs = any_worker(worker, self._shard_axes, (own != first).tolist(), "whether gradients differ")
        if any(differs):
            grad = alone[differs.index(True)].grad
            raise _differing(f"{describe(grad)}, which differs between workers", self._shard_axes)

    @contextmanager
    def _on_parts(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Replace the parameters, and states, by this worker's parts of them. Gives parameters and parts."""
        groups, state = self._parameters(), self.state
        parts_of = {p: self._part(p, state.get(p, {})) for p in chain(*groups)}
        try:
            self.state = defaultdict(dict)
            for p, part in parts_of.items():
                if p in state:
                    own = {k: local_data(v) if isinstance(v, torch.Tensor) else v for k, v in state[p].items()}
                    own.pop(_MASTER, None)
                    if own:
                        self.state[part] = own
            for group, params in zip(self.param_groups, groups, strict=True):
                group["params"] = [parts_of[p] for p in params]
            yield list(parts_of.items())
        finally:
            stepped, self.state = self.state, state
            for group, params in zip(self.param_groups, groups, strict=True):
                group["params"] = params
            for p, part in parts_of.items():
                if part in stepped or (self._has_master(p) and part.grad is not None):
                    self._keep(p, part, stepped[part])

    def _part(self, p: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """This worker's part of a parameter, with its part of the gradient: on the memory of the parameter if it lies
        there without gaps."""
        shard = self._shards[id(p)]
        part = shard.part(p)
        if self._has_master(p):
            master = state.get(_MASTER)
            own = None if master is None else local_data(master)
            # The user may have given the parameter other values.
            part = own if own is not None and torch.equal(own.to(p.dtype), part) else part.to(self._master_dtype)
        part = part.contiguous()
        if p.grad is not None:
            _check_gradient(p.grad, shard)
            grad = shard.taken(p.grad)
            part.requires_grad_()
            part.grad = grad.to(part.dtype).contiguous()
        return part

    def _has_master(self, p: torch.Tensor) -> bool:
        return self._master_dtype is not None and p.is_floating_point() and p.dtype is not self._master_dtype

    def _keep(self, p: torch.Tensor, part: torch.Tensor, own: dict[str, Any]) -> None:
        """Store the states of a part as those of its parameter."""
        shard, kept = self._shards[id(p)], self.state[p]
        if self._has_master(p):
            own[_MASTER] = part.detach()
        for name, value in own.items():
            is_part = shard.is_split and isinstance(value, torch.Tensor) and value.ndim and value.shape == part.shape
            if not is_part:
                kept[name] = value
            elif getattr(kept.get(name), "_block", None) is not value:
                kept[name] = shard.like_part(value)

    # States

    def state_like(self, p: torch.Tensor) -> Any:
        """A tensor that lies as the states of a parameter that have its shape."""
        shard = self._shards[id(p)]
        return shard.like_part(shard.part(p).contiguous()) if shard.is_split else p

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As that of torch. Of whole tensors this worker's parts are taken; of those that lie otherwise, too."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers = chain(*(group["params"] for group in state_dict["param_groups"]))
        parameters = dict(zip(numbers, chain(*self._parameters()), strict=True))
        states = state_dict["state"]
        self.state = defaultdict(dict, {k: copy.deepcopy(v) for k, v in states.items() if k not in parameters})
        self._place_states({p: states[number] for number, p in parameters.items() if number in states})

    def _place_states(self, states: dict[torch.Tensor, dict[str, Any]]) -> None:
        for p, entries in states.items():
            self.state[p] = {name: self._placed(p, name, value) for name, value in entries.items()}

    def _placed(self, p: torch.Tensor, name: str, value: Any) -> Any:
        """A state of a parameter, as it lies here, in memory of its own."""
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape != p.shape:
            return copy.deepcopy(value)
        shard = self._shards[id(p)]
        part = shard.taken(value).detach().to(local_data(p).device, copy=True).contiguous()
        if part.is_floating_point() and not part.is_complex() and name != _MASTER:
            part = part.to(self._master_dtype if self._has_master(p) else p.dtype)
        if shard.is_split:
            return shard.like_part(part)
        return p.like_whole(part) if is_partitioned(p) else part  # type: ignore[attr-defined]


ShardedOptimizer.step = Optimizer.profile_hook_step(ShardedOptimizer.step)  # type: ignore[method-assign, arg-type]
ShardedOptimizer.step.hooked = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _sharded_class(cls: type[Optimizer]) -> type[Optimizer]:
    return type(f"Sharded{cls.__name__}", (ShardedOptimizer, cls), {})


def _unhooked_step(step: Any) -> Callable[..., Any]:
    """The step of torch's optimiser without the hooks of the user, which are called around the whole step."""
    function = step.__func__
    return function.__wrapped__ if getattr(function, "hooked", False) else function


def _check_gradient(grad: torch.Tensor, shard: Shard) -> None:
    varying = state_of_tensor(grad).varying & {*shard.axes}
    if varying:
        raise _differing(describe(grad), sorted(varying))


def _differing(got: str, axes: Sequence[str]) -> StateError:
    return StateError.at(
        f"optimizer.step of {_WHERE}",
        argument=".grad",
        got=got,
        need=f"the same gradient on all workers along {', '.join(map(repr, axes))}",
        mend="spt.data_parallel(module, axis_name), or p.grad = spt.psum(p.grad, axis_name)",
    )


def _checksum(grad: torch.Tensor) -> int:
    if is_partitioned(grad):  # set by the program: each worker has its part
        return 0
    own = local_data(grad).detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(own.view(torch.uint8).numpy().data)


def _check_optimizer(optimizer: Any, elementwise: bool | None) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            message(
                _WHERE,
                argument="optimizer",
                got=describe(optimizer),
                need="an optimiser of torch",
                mend="spt.shard_optimizer(torch.optim.AdamW(model.parameters()), axis_name)",
            )
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, ShardedOptimizer):
        raise StateError.at(
            _WHERE,
            argument="optimizer",
            got=f"a {kind}, which is sharded already",
            need="an optimiser whose states are whole",
            mend='one call, with all axes: spt.shard_optimizer(optimizer, ("pod", "data"))',
        )
    knows_entries = isinstance(optimizer, _ELEMENTWISE) if elementwise is None else elementwise
    if not knows_entries:
        raise StateError.at(
            _WHERE,
            argument="optimizer",
            got=kind,
            need="an optimiser whose step of an entry depends on that entry alone: "
            + ", ".join(each.__name__ for each in _ELEMENTWISE),
            mend=f"{kind} without shards; of your own optimiser elementwise=True, if it is one",
        )
    if "step" in vars(optimizer):
        raise StateError.at(
            _WHERE,
            argument="optimizer",
            got=f"{kind}, whose step a scheduler has wrapped",
            need="the optimiser as it was made",
            mend="make the scheduler of what spt.shard_optimizer returns",
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise StateError.at(
            _WHERE,
            argument="optimizer",
            got=f"{kind} with differentiable=True",
            need="steps without history: parts are gathered in place",
            mend="differentiable=False; or spt.shard_parameters, whose gathers have an adjoint",
        )
