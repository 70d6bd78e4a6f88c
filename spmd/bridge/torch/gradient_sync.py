"""Sum the gradients of a module over workers while backward runs, for `data_parallel`.

Each leaf has one AccumulateGrad node, which runs once in each backward. Before it runs, the earlier value of `.grad`,
which is the same on all workers, is set aside. After it, `.grad` holds this worker's own gradient, and a bucket sends
it without a copy. The sum takes its place in memory while backward goes on. A callback at the end waits for the last
sums, stores them in `.grad`, and adds the values that were set aside.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from spmd.bridge.torch.backward_end import FollowsBackward, Token
from spmd.bridge.torch.gradient_buckets import Bucket, ParameterGradient, accumulator, fill_buckets
from spmd.bridge.torch.interop import array_dtype, block_of
from spmd.bridge.torch.module_broadcast import (
    WHERE,
    any_worker,
    broadcast_first,
    copy_first,
    copy_module,
    sync_call,
)
from spmd.bridge.torch.replicas import Difference, differing, to_be_declared
from spmd.bridge.torch.split_gradients import start_reduce_scatter, store_part
from spmd.bridge.torch.tensor import with_state
from spmd.bridge.torch.tensor_state import GRADIENT_SYNCS, is_partitioned, local_data
from spmd.bridge.torch.worker_context import device_of
from spmd.device import to_host
from spmd.errors import DifferentiationError, LayoutError, StateError
from spmd.mesh import Worker
from spmd.operators.at_root import root_axes
from spmd.operators.partial_comm import whole_comm
from spmd.state import State, state_of
from spmd.transport.call import LEDGERS
from spmd.transport.handles import Handle
from spmd.transport.observing import origin_of

__all__ = ["WHERE", "GradientSync"]

_HIGHEST_PRIORITY = 2**64 - 1
"""The sequence number of AccumulateGrad nodes, which backward runs as soon as it can."""
_IN_FLIGHT = 2
"""Buckets that are on their way at once: of each this worker has its own gradients and memory for the sums."""


class Options(Protocol):
    """The options of `data_parallel`."""

    module: nn.Module
    axis_name: tuple[str, ...]
    varying: tuple[str, ...]
    reduction: str
    bucket_bytes: int
    broadcast_buffers: bool
    overlap: bool


class GradientSync(FollowsBackward):
    """Sums the gradients of one worker's module.

    entries: where each parameter is: dictionary, name, value. gradients: those that are summed, in the order of the
    module. fixed: the other parameters. begun: whether the backward that runs has reached a parameter. sent: the number
    of buckets whose sums it has started. order: the indices of gradients, as they arrived.
    """

    _bond = (
        WHERE,
        "where it was made",
        "make the module in this map: spt.data_parallel(model.module, axis_name)",
    )

    def __init__(self, model: Options, worker: Worker, former: GradientSync | None = None):
        module = model.module
        self.model = weakref.ref(model)
        self.axes: tuple[str, ...] = model.axis_name
        self.state = state_of((*self.axes, *model.varying))
        self.undeclared: dict[int, Difference] = {} if former is None else former.undeclared
        self.uneven = bool(model.varying)
        self.size = worker.group(self.axes).size
        self.mean = model.reduction == "mean"
        self.overlap = model.overlap
        self.limit = model.bucket_bytes
        self.syncing = True
        self.bind(worker, new=True)
        self.entries: list[tuple[dict[str, Any], str, nn.Parameter]] = [
            (m._parameters, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None
        ]
        # As under DDP, batch norms use the statistics of this worker; `broadcast_buffers` replaces them after backward.
        self.statistics = [
            (m._buffers, name)
            for m in module.modules()
            if isinstance(m, _NormBase)
            for name in ("running_mean", "running_var")
        ]
        named = list(module.named_parameters())
        self.buffers = list(module.buffers()) if model.broadcast_buffers else []
        if former is not None and former.model() is not model:  # this is a copy, with the same gradients
            names = {g.name for g in former.gradients}
        else:
            names = self._differentiated(worker, named)
        summed = [(name, p) for name, p in named if name in names]
        self.gradients = [ParameterGradient(index, name, p) for index, (name, p) in enumerate(summed)]
        self.fixed = [p for name, p in named if name not in names]
        self.shards: dict[int, Any] = {}
        if former is not None and former.model() is model:
            self._take_over(former)
        self._fill_buckets(range(len(self.gradients) - 1, -1, -1))
        self._reset()
        self._claim()

    # Parameters

    def _differentiated(self, worker: Worker, named: list[tuple[str, nn.Parameter]]) -> set[str]:
        """The names of the parameters that any worker differentiates. Raises MismatchError if modules differ."""
        for name, p in named:
            array_dtype(p.dtype, f"{WHERE}, parameter {name}")
        text = repr([(name, tuple(p.shape), p.dtype) for name, p in named])
        entries = sum(p.numel() for _, p in named)
        detail = f"{len(named)} parameters of {entries} entries together, digest {zlib.crc32(text.encode()):08x}"
        flags = any_worker(worker, self.axes, [p.requires_grad for _, p in named], detail)
        return {name for (name, _), flag in zip(named, flags, strict=True) if flag}

    def _take_over(self, former: GradientSync) -> None:
        """Take over gradients that are not summed yet, after parameters were unfrozen or replaced."""
        former_gradients = {id(g.p): g for g in former.gradients}
        for g in self.gradients:
            old = former_gradients.get(id(g.p))
            if old is not None:
                g.base, g.unsynced, g.version = old.base, old.unsynced, old.version
        self.shards = former.shards
        for g in self.gradients:
            g.shard = self.shards.get(id(g.p))
        self.syncing = former.syncing
        former.release()

    def unsynced(self, ids: Container[int]) -> list[str]:
        """The names of those of some parameters whose `.grad` is not summed yet."""
        return [g.name for g in self.gradients if g.unsynced and g.p.grad is not None and id(g.p) in ids]

    def split(self, shards: dict[int, Any]) -> None:
        """From now on, each worker gets only its part of the sums of some parameters: a `Shard` for the id of each."""
        self.shards |= shards
        order = [g.index for b in self.buckets for g in b.gradients]
        for g in self.gradients:
            g.shard = self.shards.get(id(g.p))
        self._fill_buckets(order)
        self._reset()

    def _fill_buckets(self, order: Sequence[int]) -> None:
        self.buckets = fill_buckets(self.gradients, order, self.limit)
        kinds = {g.kind for g in self.gradients}
        self.order_agreed = not self.overlap or self.size == 1 or len(self.buckets) <= len(kinds)

    def outdated(self) -> bool:
        """Whether a parameter was unfrozen, replaced or converted since."""
        for g in self.gradients:
            if g.node is None and g.p.requires_grad:
                self._hook(g)
        return (
            any(p.requires_grad for p in self.fixed)
            or any(g.p.dtype is not b.like.dtype for b in self.buckets for g in b.gradients)
            or any(g.p.requires_grad and accumulator(g.p) is not g.node for g in self.gradients)
            or any(owner.get(name) is not p for owner, name, p in self.entries)
        )

    def _claim(self) -> None:
        """Register hooks of the gradients. Raises StateError if another module sums them."""
        self.handles: list[Any] = []
        reference = weakref.ref(self)
        claimed: list[int] = []
        self.release = weakref.finalize(self, _release, claimed, self.handles)
        for _, _, p in self.entries:
            if GRADIENT_SYNCS.setdefault(id(p), reference) is reference:
                claimed.append(id(p))
                continue
            other = GRADIENT_SYNCS[id(p)]()
            raise StateError.at(
                WHERE,
                argument="module",
                got=f"parameters that a module of {WHERE} has already, "
                f"on {other.context.mesh.describe(other.context.index) if other is not None else 'another worker'}",
                need="a module of this worker's own, in one such module",
                mend="make it in the body, or spt.data_parallel(copy.deepcopy(module), axis_name); a former one "
                "ends with `del model`",
            )
        for g in self.gradients:
            if g.p.requires_grad:
                self._hook(g)

    def _hook(self, g: ParameterGradient) -> None:
        """Call `_before_accumulate` and `_after_accumulate` around the AccumulateGrad node of a parameter."""
        reference = weakref.ref(self)

        def before(_: Any) -> None:
            sync = reference()
            if sync is not None:
                sync._before_accumulate(g)

        def after(_: Any) -> None:
            sync = reference()
            if sync is not None:
                sync._after_accumulate(g)

        g.node = accumulator(g.p)  # keeps the node alive, so torch makes no other
        self.handles += [g.node.register_prehook(before), g.p.register_post_accumulate_grad_hook(after)]

    @contextmanager
    def acting(self) -> Iterator[Worker]:
        with super().acting() as worker, whole_comm(worker.comm).uncounted(self.uneven):
            yield worker

    # Forward

    @contextmanager
    def varied(self, worker: Worker) -> Iterator[None]:
        """Replace the module's parameters by Varying ones, so that backward computes this worker's own gradients.

        Otherwise each parameter would be varied where it meets data, and its gradient would be summed by itself.
        """
        if not worker.tracked:
            yield
            return
        varied_by_id: dict[int, Any] = {}
        state = state_of(self.state.varying.difference(root_axes(worker)))
        swapped: list[tuple[dict[str, Any], str, Any, Any]] = []
        try:
            for owner, name, p in self.entries:
                if owner.get(name) is p:
                    if id(p) not in varied_by_id:
                        varied_by_id[id(p)] = self._varied_parameter(p, state)
                    owner[name] = varied_by_id[id(p)]
                    swapped.append((owner, name, owner[name], p))
            for owner, name in self.statistics:
                b = owner.get(name)
                if b is not None:
                    owner[name] = with_state(b, state)
                    swapped.append((owner, name, owner[name], b))
            yield
        finally:
            for owner, name, varied, original in swapped:
                if owner.get(name) is varied:
                    owner[name] = original

    def _varied_parameter(self, p: Any, state: State) -> Any:
        varied: Any = p.varied(state) if is_partitioned(p) else with_state(p, state)
        varied.replica = True
        if id(p) in self.undeclared:
            to_be_declared(varied, self.undeclared[id(p)])
        if varied.grad_fn is not None:
            varied.grad_fn._set_sequence_nr(_HIGHEST_PRIORITY)  # runs as soon as its gradient is there
        return varied

    def watch_outputs(self, out: Any) -> None:
        """Register the final callback of a backward that starts at these results. A nested backward, such as that of
        `torch.utils.checkpoint`, may reach parameters first. The results keep this object alive."""

        def entered(_: Any) -> None:
            if self.syncing:
                self.follow_backward()

        for x in (out,) if isinstance(out, torch.Tensor) else pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(entered)

    # Backward

    def _before_accumulate(self, g: ParameterGradient) -> None:
        """A gradient is about to be added to `.grad`."""
        if torch.is_grad_enabled():
            raise DifferentiationError.at(
                f"backward through a module of {WHERE}",
                got="create_graph=True",
                need="a backward that is not differentiated: sums of buckets have no history",
                mend="own = torch.autograd.grad(loss, parameters, create_graph=True), which gives this worker's "
                "own gradients, and spt.psum(g, axis_name) of each",
            )
        if not g.set_aside:
            g.check_grad()
        if not self.syncing:
            if not g.unsynced:
                g.begin_unsynced()
            return
        self.follow_backward()
        if g.arrived:
            if not g.bucket.sent:
                return
            self._finish()  # a nested backward computes this gradient once more, so it is summed once more
        self.begun = True
        g.put_aside()

    def _after_accumulate(self, g: ParameterGradient) -> None:
        """`.grad` holds this worker's own gradient."""
        grad = g.p.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise LayoutError.at(
                WHERE,
                argument=g.name,
                got=f"a gradient of layout {grad.layout}",
                need="dense gradients",
                mend="nn.Embedding(..., sparse=False)",
            )
        if not self.syncing:
            g.version = grad._version
            return
        if g.arrived:
            return
        g.arrived = True
        self.order.append(g.index)
        g.bucket.missing -= 1
        if self.overlap and self._full():
            with self.acting() as worker:
                while self._full():
                    self._send(worker)

    def _full(self) -> bool:
        """Whether the next bucket is full. All workers send buckets in the same order, whichever fills first."""
        return self.sent < len(self.buckets) and self.buckets[self.sent].missing == 0

    def _abort(self) -> None:
        """Restore `.grad` after a backward that raised."""
        with torch.no_grad():
            for g in self.gradients:
                g.restore()
        self._reset()
        self.token = None

    def _reset(self) -> None:
        """Wait for the next backward."""
        self.begun = False
        self.sent = 0
        self.order: list[int] = []
        for g in self.gradients:
            g.arrived = g.set_aside = g.handed_over = False
        for bucket in self.buckets:
            bucket.reset()

    def _send(self, worker: Worker) -> None:
        """Start the sum of the next bucket. The last bucket also counts the workers that have each gradient."""
        bucket = self.buckets[self.sent]
        self.sent += 1
        mask = None
        if self.sent == len(self.buckets):
            mask = bucket.like.new_tensor([g.handed_over or g.own() is not None for g in self.gradients])
        others = len(bucket.gradients) - 1
        detail = f"bucket {self.sent} of {len(self.buckets)}, gradients of {bucket.gradients[0].name} and {others} more"
        if bucket.shard_axes is not None:
            bucket.handle = start_reduce_scatter(worker, self.axes, bucket, self._summand, mask, detail)
        else:
            bucket.handle = self._start_all_reduce(worker, bucket, mask, detail)
        for earlier in self.buckets[: max(0, self.sent - _IN_FLIGHT)]:
            earlier.complete()

    def _start_all_reduce(self, worker: Worker, bucket: Bucket, mask: torch.Tensor | None, detail: str) -> Handle:
        """Start the sum of a bucket that all workers get whole: a list of arrays, and the sum of mask."""
        blocks = [self._block(self._summand(g), g.p, worker) for g in bucket.gradients]
        blocks += [] if mask is None else [self._block(mask, bucket.like, worker)]
        call = sync_call(worker, self.axes, blocks[0].dtype, (sum(b.size for b in blocks),), detail)
        call.operator, call.backward = "Sum", True
        for observer in LEDGERS.get():
            for _ in bucket.gradients:
                observer.operator(worker.index, origin_of(worker.comm, call))
        call.borrowed = True
        return worker.comm.all_reduce_many(worker.group(self.axes), call, blocks)

    def _summand(self, g: ParameterGradient) -> torch.Tensor | None:
        """This worker's summand. For a mean, float16 is divided first, as by DDP, because the sum might overflow."""
        own = g.own()
        return own / self.size if own is not None and self.mean and own.dtype is torch.float16 else own

    def _block(self, x: torch.Tensor | None, like: torch.Tensor, worker: Worker) -> Any:
        """A gradient, or zeros, as a block that is sent without a copy: it stays as it is until the sum is there."""
        x = torch.zeros_like(local_data(like).detach()) if x is None else local_data(x)
        return block_of(x, worker, WHERE)[0]

    def _end(self, token: Token) -> None:
        """Finish the sums at the end of a backward."""
        try:
            if self.begun:
                order = self.order
                with self.acting() as worker, torch.no_grad():
                    self.sum_unsynced()
                    if not self.order_agreed:
                        self._agree_order(worker, order)
        finally:
            if self.begun:
                self._abort()
            self.token = None

    def sum_unsynced(self) -> None:
        """Finish the sums, also of what backward under `no_sync` has left in `.grad`."""
        with self.acting() as worker, torch.no_grad():
            if self.gradients:
                self._finish()
            if self.buffers:
                copy_first(worker, self.axes, self.buffers, "buffers")

    def _finish(self) -> None:
        """Send the remaining buckets, wait for all sums, and store them in `.grad`."""
        with self.acting() as worker, torch.no_grad():
            for g in self.gradients:
                if g.unsynced and not g.arrived:
                    g.check_grad()
                    if g.unsynced:
                        g.put_aside()
            while self.sent < len(self.buckets):
                self._send(worker)
            for bucket in self.buckets:
                bucket.complete()
            counts = to_host(self.buckets[-1].mask).tolist()
            for bucket in self.buckets:
                self._store(bucket, counts)
            self._reset()

    def _store(self, bucket: Bucket, counts: list[Any]) -> None:
        """Store sums in `.grad`. counts: for each gradient, how many workers have it."""
        assert bucket.sums is not None
        stored: list[tuple[ParameterGradient, Any]] = []
        for g, total in zip(bucket.gradients, bucket.sums, strict=True):
            if not counts[g.index]:
                g.restore()
            elif g.shard is not None:
                store_part(g, total, self.size if self.mean else 1)
            else:
                stored.append((g, total))
        undivided = [x for _, x in stored if x.dtype is not torch.float16] if self.mean and self.size > 1 else []
        if undivided:
            torch._foreach_div_(undivided, self.size)  # type: ignore[attr-defined]
        for g, total in stored:
            base = g.base if g.set_aside else g.p.grad
            g.p.grad = total if base is None else base.add_(total)
            g.base, g.unsynced = None, False

    def _agree_order(self, worker: Worker, order: list[int]) -> None:
        """Fill the buckets in the order in which gradients arrived on the first worker."""
        all_indices = [g.index for b in self.buckets for g in b.gradients]
        own_order = torch.tensor(list(dict.fromkeys(order + all_indices)), device=device_of(worker))
        first_order = broadcast_first(worker, self.axes, own_order, "order of gradients").tolist()
        self._fill_buckets(first_order)
        self._reset()
        self.order_agreed = True

    def equalize(self, worker: Worker, verify: bool) -> None:
        """Copy the parameters and buffers of the first worker to the others. verify: raise where they differ."""
        model = self.model()
        assert model is not None
        copy_module(worker, self.axes, model.module, verify)
        if worker.tracked:
            self.undeclared = differing(worker, model.module, (*self.axes, *model.varying))


def _release(claimed: list[int], handles: list[Any]) -> None:
    """Give up parameters, by id, and remove hooks."""
    for key in claimed:
        GRADIENT_SYNCS.pop(key, None)
    for handle in handles:
        handle.remove()
