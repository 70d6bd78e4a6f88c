"""Gather and release the parameters of units in order, for `shard_parameters`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from spmd.bridge.torch.backward_end import FollowsBackward, Token
from spmd.bridge.torch.module_broadcast import copy_first
from spmd.bridge.torch.partitioned.shared_cotangents import compare_cotangents
from spmd.bridge.torch.partitioned.tensor import joined_blocks
from spmd.bridge.torch.replicas import to_be_declared
from spmd.bridge.torch.sharding.blocks import (
    WHERE,
    ShardedParameter,
    block_gradient,
    copy_unsummed,
    leave_unsummed,
)
from spmd.bridge.torch.sharding.functions import connect
from spmd.bridge.torch.sharding.recomputing import RUNNING
from spmd.bridge.torch.sharding.saved_tensors import without_wholes
from spmd.bridge.torch.sharding.traffic import GradientSums, Wholes
from spmd.bridge.torch.sharding.unit import Unit
from spmd.bridge.torch.tensor import with_state
from spmd.bridge.torch.tensor_state import GRADIENT_SYNCS, INVARIANT
from spmd.bridge.torch.unsummed import take_down
from spmd.bridge.torch.worker_context import WorkerContext, assigned
from spmd.errors import DifferentiationError
from spmd.mesh import Worker
from spmd.state import state_of

__all__ = ["Options", "Sharding"]

_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]


class Options(NamedTuple):
    """The options of `shard_parameters`."""

    prefetch: int
    reshard_after_forward: bool
    reduction: str
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


class Order:
    """The order in which units were needed last time, by which the next one is found.

    last: that order. current: what was needed since `begin`.
    """

    def __init__(self) -> None:
        self.last: list[Unit] = []
        self.current: list[Unit] = []
        self.place = -1

    def begin(self) -> None:
        self.current, self.place = [], -1

    def end(self) -> None:
        if self.current:
            self.last = self.current
        self.begin()

    def note(self, unit: Unit) -> bool:
        """Note that a unit is needed. Returns whether another one was needed before."""
        if self.current and self.current[-1] is unit:
            return False
        self.current.append(unit)
        for step in range(1, len(self.last) + 1):
            place = (self.place + step) % len(self.last)
            if self.last[place] is unit:
                self.place = place
                break
        return True

    def following(self, count: int) -> list[Unit]:
        """The next units."""
        return self.last[self.place + 1 : self.place + 1 + count] if self.place >= 0 else []


class Sharding(FollowsBackward):
    """The units of one worker's module.

    state: of the wholes. undeclared: by name, parameters that differ along other axes. wholes: by unit, those that are
    there or under way, the one used last at the end. storages: by number, the unit and the parameter whose whole lies
    there. pending: the call whose gradients are being summed.
    """

    _bond = (
        WHERE,
        "which has its blocks",
        "make the module and shard it in this map; spt.state_dict carries its values over",
    )

    def __init__(self, worker: Worker, axes: tuple[str, ...], options: Options):
        self.axes = axes
        self.state = state_of(axes)
        self.bind(worker, new=True)
        self.mean: bool = options.reduction == "mean"
        self.prefetch: int = options.prefetch
        self.reshard: bool = options.reshard_after_forward
        self.param_dtype: torch.dtype | None = options.param_dtype
        self.reduce_dtype: torch.dtype | None = options.reduce_dtype
        self.undeclared: dict[Any, Any] = {}
        self.units: list[Unit] = []
        self.buffers: list[torch.Tensor] = []
        self.syncing = True
        self.summed = False
        self.running = False
        self._reset()
        self._register()

    def _register(self) -> None:
        """Let tensors say, by this object's number, that their gradients are summed here."""
        GRADIENT_SYNCS[id(self)] = weakref.ref(self)
        weakref.finalize(self, GRADIENT_SYNCS.pop, id(self), None)

    def _reset(self) -> None:
        self.forward_order, self.backward_order = Order(), Order()
        self.wholes: dict[Unit, Wholes] = {}
        self.storages: dict[int, tuple[Unit, int]] = {}
        self.pending: Call | None = None
        self.token = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """That of a copy of the module, whose parameters are copies of these."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._reset()
        copied.units, copied.buffers = copy.deepcopy((self.units, self.buffers), memo)
        for unit, own in zip(copied.units, self.units, strict=True):
            if own.unsummed:
                copy_unsummed(own.parameters, unit.parameters)
        copied._register()
        return copied

    # Dtypes

    def gathered_dtype(self, q: ShardedParameter) -> torch.dtype:
        own = q.block.dtype
        return self.param_dtype if self.param_dtype is not None and own.is_floating_point else own

    def reduced_dtype(self, q: ShardedParameter) -> torch.dtype:
        own = q.block.dtype
        return self.reduce_dtype if self.reduce_dtype is not None and own.is_floating_point else own

    # Wholes

    def find(self, storage: int, dtype: torch.dtype) -> tuple[Unit, int] | None:
        found = self.storages.get(storage)
        return found if found is not None and dtype is self.gathered_dtype(found[0].parameters[found[1]]) else None

    def version(self, unit: Unit, number: int) -> int:
        return unit.parameters[number].version

    def fetch(self, unit: Unit, number: int) -> torch.Tensor:
        """The whole of a parameter, for backward."""
        with self.acting() as worker, torch.no_grad():
            if _graph_task() < 0:  # somebody looks at what was saved
                return self._started(worker, unit, True).wait()[number]
            self.begin_backward()
            return self._gathered(worker, unit, self.backward_order, True)[number]

    def _started(self, worker: Worker, unit: Unit, backward: bool) -> Wholes:
        return Wholes(worker, self.axes, unit.name, unit.parameters, self.gathered_dtype, backward)

    def _gathered(self, worker: Worker, unit: Unit, order: Order, backward: bool) -> list[torch.Tensor]:
        """The wholes of a unit. Starts to gather those of the next units."""
        changed = order.note(unit)
        wholes = self.wholes.pop(unit, None)
        if wholes is None:
            self._make_room(self.prefetch, unit)
            wholes = self._started(worker, unit, backward)
        self.wholes[unit] = wholes
        if wholes.tensors is None:
            for number, whole in enumerate(wholes.wait()):
                self.storages[whole.untyped_storage()._cdata] = unit, number
        assert wholes.tensors is not None
        if changed and (backward or self.running):  # a unit that is called alone says nothing about the next one
            for following in order.following(self.prefetch):
                if following not in self.wholes and following.parameters:
                    self._make_room(self.prefetch - 1, unit)
                    self.wholes[following] = self._started(worker, following, backward)
        return wholes.tensors

    def _make_room(self, most: int, keep: Unit) -> None:
        """In backward, release the wholes that were used first, until at most this many besides those of a unit and of
        the calls that run are left."""
        if _graph_task() < 0:
            return
        idle = [u for u in self.wholes if u.depth == 0 and u is not keep]
        for unit in idle[: max(0, len(idle) - most)]:
            self.release(unit)

    def release(self, unit: Unit) -> None:
        """Forget the wholes of a unit. Their memory is free unless others hold them."""
        wholes = self.wholes.pop(unit, None)
        if wholes is None:
            return
        for whole in wholes.wait():
            self.storages.pop(whole.untyped_storage()._cdata, None)

    def _drop(self) -> None:
        """Forget all wholes, after an error. Nobody waits for those under way."""
        self.wholes.clear()
        self.storages.clear()

    # Forward

    @contextmanager
    def called(self, worker: Worker, unit: Unit, again: bool = False) -> Iterator[None]:
        """Inside, the module of a unit has whole parameters. again: for a part of its forward, in backward."""
        self.bind(worker)
        call = Call(self, unit, self.summed)
        recomputed = _graph_task() >= 0
        unit.depth += 1
        try:
            with torch.no_grad():
                order = self.backward_order if recomputed else self.forward_order
                data = self._gathered(worker, unit, order, recomputed) if unit.parameters else []
            wholes = call.wholes(worker, data)
            del data
            hooks = without_wholes(self) if self.reshard and torch.is_grad_enabled() and not again else nullcontext()
            with hooks, unit.replaced(wholes, worker.tracked), assigned(RUNNING, (*RUNNING.get(), call)):
                yield
        finally:
            unit.depth -= 1
            if unit.depth == 0 and not recomputed:
                self.release(unit)

    @contextmanager
    def outermost(self) -> Iterator[None]:
        """The call of the whole module: the order of its units is that of the next one."""
        if self.running or _graph_task() >= 0:
            yield
            return
        self.running = True
        self.forward_order.begin()
        try:
            yield
        except BaseException:
            self._drop()
            raise
        finally:
            self.running = False
        self.forward_order.end()
        for unit in list(self.wholes):
            self.release(unit)

    # Backward

    def watch_outputs(self, out: Any) -> None:
        """Register the final callback of a backward that starts at these results. A nested backward, such as that of
        `torch.utils.checkpoint`, may reach units first."""

        def entered(_: Any) -> None:
            self.begin_backward()

        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(entered)

    def watch_numbers(self, parameters: Sequence[ShardedParameter]) -> None:
        """Compare the gradients of numbers, which workers have whole and so may use outside of units too."""
        reference = weakref.ref(self)

        def context() -> WorkerContext | None:
            sharding = reference()
            return None if sharding is None else sharding.context

        for q in parameters:
            if not q.outer_shape and q.p.requires_grad and not vars(q.p).get("_compared"):
                q.p._compared = True
                compare_cotangents(q.p, q.name, self.axes, context)

    def begin_backward(self) -> None:
        """Register a callback at the end of the backward that runs."""
        if not self.follow_backward():
            return
        if not self.backward_order.last:
            self.backward_order.last = self.forward_order.last[::-1]
        self.backward_order.begin()

    def _abort(self) -> None:
        """Forget a backward that raised."""
        self.pending = None
        self.token = None
        self.backward_order.begin()
        self._drop()

    def _end(self, token: Token) -> None:
        """The end of a backward."""
        try:
            with self.acting() as worker, torch.no_grad():
                if self.syncing:
                    for unit in self.units:
                        if unit.unsummed:
                            self._send_accumulated(worker, unit)
                    if self.buffers:
                        copy_first(worker, self.axes, self.buffers, "buffers", where=WHERE)
                for unit in list(self.wholes):
                    self.release(unit)
            self.backward_order.end()
        finally:
            self._abort()

    def sum_gradients(self, call: Call, cotangents: list[torch.Tensor | None]) -> None:
        """Start to sum the cotangents of a unit's wholes, and release the wholes."""
        unit = call.unit
        with self.acting() as worker:
            self.begin_backward()
            if torch.is_grad_enabled():
                raise DifferentiationError.at(
                    f"backward through a module of {WHERE}",
                    got="create_graph=True",
                    need="a backward that is not differentiated: sums of gradients have no history",
                    mend="spt.data_parallel, and torch.autograd.grad(loss, parameters, create_graph=True)",
                )
            if self.pending is not None:
                self.pending.complete()
                self.pending = None
            if unit.depth == 0:
                self.release(unit)
            with torch.no_grad():
                self._sum(worker, call, cotangents)

    def _sum(self, worker: Worker, call: Call, cotangents: list[torch.Tensor | None]) -> None:
        unit = call.unit
        if call.summed:
            call.results = [
                None if g is None else q.part(g, q.index).to(q.block.dtype, copy=True).contiguous()
                for q, g in zip(unit.parameters, cotangents, strict=True)
            ]
            return
        if not self.syncing:
            unit.unsummed = True
            for q, g in zip(unit.parameters, cotangents, strict=True):
                if g is not None:
                    own = take_down(q.p)
                    own = g.to(self.reduced_dtype(q), copy=True) if own is None else own.add_(g)
                    leave_unsummed(q, own)
            call.results = [None] * len(cotangents)
            return
        for number, own in enumerate(self._taken(unit)):
            if own is not None:
                g = cotangents[number]
                cotangents[number] = own if g is None else own.add_(g)
        call.sums = self._sums(worker, unit, cotangents)
        self.pending = call

    def _sums(self, worker: Worker, unit: Unit, gradients: list[torch.Tensor | None]) -> GradientSums:
        trained = [q if q.p.requires_grad else None for q in unit.parameters]
        return GradientSums(worker, self.axes, unit.name, trained, gradients, self.reduced_dtype, self.mean)

    def _taken(self, unit: Unit) -> list[torch.Tensor | None]:
        """What backwards under `no_sync` left of a unit, which is to be summed now."""
        unsummed, unit.unsummed = unit.unsummed, False
        return [take_down(q.p) if unsummed else None for q in unit.parameters]

    def _send_accumulated(self, worker: Worker, unit: Unit) -> None:
        """Sum what backwards under `no_sync` left of a unit that this backward did not reach."""
        for q, g in zip(unit.parameters, self._sums(worker, unit, self._taken(unit)).wait(), strict=True):
            if g is not None:
                own: Any = block_gradient(q, g)
                q.p.grad = own if q.p.grad is None else q.p.grad.add_(own)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds this worker's own gradients of whole parameters, and sends nothing."""
        outer, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = outer


class Call:
    """One call of a unit, from its forward to its backward.

    summed: whether the cotangents are sums over the workers already. sums: of the backward that runs.
    """

    def __init__(self, sharding: Sharding, unit: Unit, summed: bool):
        self.sharding = sharding
        self.unit = unit
        self.summed = summed
        self.sums: GradientSums | None = None
        self.results: list[Any] = []

    def wholes(self, worker: Worker, data: list[torch.Tensor]) -> list[Any]:
        """The wholes, of these data, as the module gets them: with history, and with their state."""
        parameters, sharding = self.unit.parameters, self.sharding
        if torch.is_grad_enabled() and any(q.p.requires_grad for q in parameters):
            made = list(connect(self, [q.p for q in parameters], data))
            if not worker.tracked:
                sharding.watch_numbers(parameters)
        else:
            made = [w.detach() for w in data]
        state = INVARIANT if self.summed else sharding.state
        wholes: list[Any] = []
        for q, w in zip(parameters, made, strict=True):
            whole: Any = w
            if q.base is not None and q.base.layout.varying:
                whole = joined_blocks(w, q.base, state if worker.tracked else INVARIANT, q.outer_shape)
            elif worker.tracked:
                whole = with_state(w.view(q.outer_shape), state)
            if not self.summed:
                self._mark(q, whole, worker)
            wholes.append(whole)
        return wholes

    def _mark(self, q: ShardedParameter, whole: Any, worker: Worker) -> None:
        """Note that the gradients of a whole are summed after backward, not by the adjoint of varying it."""
        if not worker.tracked:
            whole._block_of = id(self.sharding)
            return
        whole.replica = True
        if q.name in self.sharding.undeclared:
            to_be_declared(whole, self.sharding.undeclared[q.name])

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the unit has whole parameters: `torch.utils.checkpoint` computes a part of its forward again."""
        if self.unit.depth:
            yield
            return
        with self.sharding.acting() as worker:
            self.sharding.begin_backward()
            with self.sharding.called(worker, self.unit, again=True):
                yield

    # Backward

    def sum_gradients(self, cotangents: list[torch.Tensor | None]) -> None:
        """Start to sum the cotangents of the wholes, and release the wholes."""
        self.sharding.sum_gradients(self, cotangents)

    def gradients(self) -> list[Any]:
        """The gradients of the blocks, once they are there."""
        self.complete()
        results, self.results = self.results, []
        return [None if g is None else block_gradient(q, g) for q, g in zip(self.unit.parameters, results, strict=True)]

    def complete(self) -> None:
        """Wait for the sums."""
        if self.sums is not None:
            self.results, self.sums = self.sums.wait(), None
