"""The gradients of a module, summed over workers while backward goes on; what `data_parallel` is made of.

A leaf's gradient comes to rest in a node of its own, AccumulateGrad, which runs once in each backward, whatever the
number of uses. Before it runs, what `.grad` held, one value on all workers, is set aside; after it, `.grad` holds this
worker's own gradient, which is lent to a bucket. A callback at the end of backward waits for the sums, and adds them to
what was set aside.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from spmd.bridge.torch.interop import array_dtype, block_of, owned, write
from spmd.bridge.torch.replicas import Difference, differing, to_be_declared
from spmd.bridge.torch.tensor import stated
from spmd.bridge.torch.tensor_state import SUMMED, in_blocks, local, plain
from spmd.bridge.torch.worker_context import Seat, seat_of
from spmd.device import to_host
from spmd.errors import DifferentiationError, LayoutError, MeshError, StateError, message
from spmd.mesh import WORKER, Worker
from spmd.state import state_of
from spmd.transport.call import LEDGERS, Call
from spmd.transport.handles import Handle

__all__ = ["WHERE", "Sums"]

WHERE = "spt.data_parallel"
_TOGETHER = 32 << 20
"""Bytes of parameters that one broadcast takes."""
_AT_ONCE = 2**64 - 1
"""The place in the order of backward that torch gives to the nodes that add to `.grad`."""
_engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


class Options(Protocol):
    """What is asked of the sums: see `data_parallel`."""

    module: nn.Module
    axis_name: tuple[str, ...]
    varying: tuple[str, ...]
    reduction: str
    bucket_bytes: int
    broadcast_buffers: bool
    overlap: bool


class _Gradient:
    """A parameter and its gradient.

    index: its place among those that are summed. bucket: the one that it goes with. node: where torch adds to `.grad`.
    base: what `.grad` held that is one value on all workers, while `.grad` does not hold it, or not it alone.
    owed: whether `.grad` holds this worker's own part, from a backward without sums. version: of `.grad` then, where
    base is in it. came: in this backward. aside: whether base was set aside in this backward.
    """

    __slots__ = ("aside", "base", "bucket", "came", "index", "name", "node", "owed", "p", "version")

    def __init__(self, index: int, name: str, p: nn.Parameter):
        self.index = index
        self.name = name
        self.p = p
        self.bucket: _Bucket
        self.node: Any = None
        self.base: torch.Tensor | None = None
        self.owed = False
        self.version = 0
        self.came = False
        self.aside = False


class _Bucket:
    """Gradients of one dtype that are sent together. missing: how many have not come in this backward."""

    __slots__ = ("gradients", "handle", "like", "missing")

    def __init__(self, like: torch.Tensor):
        self.like = local(like).detach()
        self.gradients: list[_Gradient] = []
        self.handle: Handle | None = None
        self.missing = 0


class _Token:
    """Lives as long as a backward: its callback holds it, and is dropped with it where that raises."""

    __slots__ = ("__weakref__",)


class Sums:
    """The sums of one worker's gradients.

    seat: the worker's place, by which other threads find it. entries: where the parameters are. gradients: of those
    that are summed, in the order of the module; the others are fixed. token: of the backward that goes on; begun:
    whether it has reached a parameter; sent: how many buckets it has started. order: in which gradients came.
    """

    def __init__(self, model: Options, worker: Worker, before: Sums | None = None):
        module = model.module
        self.model = weakref.ref(model)
        self.axes: tuple[str, ...] = model.axis_name
        self.state = state_of((*self.axes, *model.varying))
        self.undeclared: dict[int, Difference] = {} if before is None else before.undeclared
        self.size = worker.group(self.axes).size
        self.mean = model.reduction == "mean"
        self.overlap = model.overlap
        self.limit = model.bucket_bytes
        self.syncing = True
        self.seat: Seat
        self.sit(worker, new=True)
        self.entries: list[tuple[dict[str, Any], str, nn.Parameter]] = [
            (m._parameters, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None
        ]
        # Batch norms take the statistics of this worker, as under DDP; `broadcast_buffers` says what becomes of them.
        self.statistics = [
            (m._buffers, name)
            for m in module.modules()
            if isinstance(m, _NormBase)
            for name in ("running_mean", "running_var")
        ]
        named = list(module.named_parameters())
        self.buffers = list(module.buffers()) if model.broadcast_buffers else []
        copied = before is not None and before.model() is not model
        wanted = self._agreed(worker, named) if not copied else self._as(before, module)
        summed = [np for np, w in zip(named, wanted, strict=True) if w]
        self.gradients = [_Gradient(k, name, p) for k, (name, p) in enumerate(summed)]
        self.fixed = [p for (_, p), w in zip(named, wanted, strict=True) if not w]
        if before is not None and not copied:
            self._take_over(before)
        self.buckets: list[_Bucket] = []
        self._fill(range(len(self.gradients) - 1, -1, -1))
        kinds = {(g.p.dtype, g.p.device) for g in self.gradients}
        self.settled = not self.overlap or self.size == 1 or len(self.buckets) <= len(kinds)
        self.token: weakref.ref[_Token] | None = None
        self._clear()
        self._claim()

    # Parameters

    def _agreed(self, worker: Worker, named: list[tuple[str, nn.Parameter]]) -> list[bool]:
        """Which parameters any worker differentiates. Raises MismatchError where names, shapes or dtypes differ."""
        for name, p in named:
            array_dtype(p.dtype, f"{WHERE}, parameter {name}")
        text = repr([(name, tuple(p.shape), p.dtype) for name, p in named])
        entries = sum(p.numel() for _, p in named)
        detail = f"{len(named)} parameters of {entries} entries together, digest {zlib.crc32(text.encode()):08x}"
        return self._agree(worker, [p.requires_grad for _, p in named], detail)

    def _as(self, before: Any, module: nn.Module) -> list[bool]:
        """As those of a module that this is a copy of."""
        summed = {g.name for g in before.gradients}
        return [name in summed for name, _ in module.named_parameters()]

    def _take_over(self, before: Sums) -> None:
        """What was not summed yet, when parameters have been released or replaced since."""
        found = {id(g.p): g for g in before.gradients}
        for g in self.gradients:
            old = found.get(id(g.p))
            if old is not None:
                g.base, g.owed, g.version = old.base, old.owed, old.version
        self.syncing = before.syncing
        before.release()

    def outdated(self) -> bool:
        """Whether there are other parameters to sum now: one was released, replaced, or is of another dtype."""
        for g in self.gradients:
            if g.node is None and g.p.requires_grad:
                self._hook(g)
        return (
            any(p.requires_grad for p in self.fixed)
            or any(g.p.dtype is not b.like.dtype for b in self.buckets for g in b.gradients)
            or any(owner.get(name) is not p for owner, name, p in self.entries)
        )

    def _fill(self, order: Sequence[int]) -> None:
        """Buckets for gradients that come in this order; they are sent in the order in which they fill."""
        self.buckets = []
        filling: dict[Any, tuple[_Bucket, int]] = {}
        for k in order:
            g = self.gradients[k]
            kind = (g.p.dtype, g.p.device)
            bucket, nbytes = filling.pop(kind, None) or (_Bucket(g.p), 0)
            bucket.gradients.append(g)
            g.bucket = bucket
            nbytes += local(g.p).numel() * g.p.element_size()
            if nbytes >= self.limit:
                self.buckets.append(bucket)
            else:
                filling[kind] = bucket, nbytes
        self.buckets += [bucket for bucket, _ in filling.values()]

    def _claim(self) -> None:
        """Hook into the gradients; no other worker's sums may have them."""
        self.handles: list[Any] = []
        me = weakref.ref(self)
        taken: list[int] = []
        self.release = weakref.finalize(self, _release, taken, self.handles)
        for _, _, p in self.entries:
            if SUMMED.setdefault(id(p), me) is me:
                taken.append(id(p))
                continue
            other = SUMMED[id(p)]()
            raise StateError(
                message(
                    WHERE,
                    argument="module",
                    got=f"parameters that a module of {WHERE} has already, "
                    f"on {other.seat.mesh.describe(other.seat.index) if other is not None else 'another worker'}",
                    need="a module of this worker's own, in one such module",
                    mend="make it in the body, or spt.data_parallel(copy.deepcopy(module), axis_name); a former one "
                    "ends with `del model`",
                )
            )
        for g in self.gradients:
            if g.p.requires_grad:
                self._hook(g)

    def _hook(self, g: _Gradient) -> None:
        me = weakref.ref(self)

        def before(_: Any) -> None:
            sums = me()
            if sums is not None:
                sums._before(g)

        def after(_: Any) -> None:
            sums = me()
            if sums is not None:
                sums._after(g)

        with torch.enable_grad():
            view: Any = g.p.view_as(g.p)
        g.node = view.grad_fn.next_functions[0][0]  # held, so that it stays the one
        self.handles += [g.node.register_prehook(before), g.p.register_post_accumulate_grad_hook(after)]

    # Places

    def sit(self, worker: Worker, new: bool = False) -> None:
        """Act for this worker from now on. Raises MeshError if it is another than the module was made on."""
        if not new and (worker.index != self.seat.index or worker.mesh != self.seat.mesh):
            raise MeshError(
                message(
                    f"a module of {WHERE}",
                    got=f"{worker.mesh.describe(worker.index)} of {worker.mesh}",
                    need=f"{self.seat.mesh.describe(self.seat.index)} of {self.seat.mesh}, where it was made",
                    mend="make the module in this map: spt.data_parallel(model.module, axis_name)",
                )
            )
        if new or self.seat.worker is not worker:
            self.seat = seat_of(worker)

    @contextmanager
    def _acting(self) -> Iterator[Worker]:
        """The worker, also in a thread of torch's own."""
        worker = self.seat.taken()
        if WORKER.get() is worker:
            yield worker
            return
        token = WORKER.set(worker)
        try:
            yield worker
        finally:
            WORKER.reset(token)

    # Forward

    @contextmanager
    def varied(self, worker: Worker) -> Iterator[None]:
        """The module with parameters that vary, whose own gradients reach its leaves: where states are tracked, they
        would be varied otherwise where they meet data, and summed one by one."""
        if not worker.tracked:
            yield
            return
        twin: Any
        twins: dict[int, Any] = {}
        swapped: list[tuple[dict[str, Any], str, Any, Any]] = []
        try:
            for owner, name, p in self.entries:
                if owner.get(name) is p:
                    twin = twins.get(id(p))
                    if twin is None:
                        leaf: Any = p
                        twin = leaf.varied(self.state) if in_blocks(p) else stated(p, self.state)
                        twins[id(p)] = twin
                        twin.replica = True
                        if id(p) in self.undeclared:
                            to_be_declared(twin, self.undeclared[id(p)])
                        if twin.grad_fn is not None:
                            # Backward is to run it as soon as its gradient is there, not as the first thing in forward.
                            twin.grad_fn._set_sequence_nr(_AT_ONCE)
                    owner[name] = twin
                    swapped.append((owner, name, twin, p))
            for owner, name in self.statistics:
                b = owner.get(name)
                if b is not None:
                    owner[name] = twin = stated(b, self.state)
                    swapped.append((owner, name, twin, b))
            yield
        finally:
            for owner, name, twin, p in swapped:
                if owner.get(name) is twin:
                    owner[name] = p

    def watch(self, out: Any) -> None:
        """Know of a backward when it sets out from these results, so that its end is seen: parameters may be reached
        first by a backward inside of it, as `torch.utils.checkpoint` runs them. Results keep the sums alive, where
        nothing else does any more."""

        def entered(_: Any) -> None:
            if self.syncing:
                self._enter()

        for x in (out,) if isinstance(out, torch.Tensor) else pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(entered)

    # Backward

    def _enter(self) -> None:
        """Be called at the end of the backward that goes on."""
        if self.token is not None and self.token() is not None:
            return
        token, me = _Token(), weakref.ref(self)

        def raised(_: Any) -> None:
            sums = me()
            if sums is not None:
                sums._give_up()

        self.token = weakref.ref(token, raised)
        _engine.queue_callback(partial(self._leave, token))

    def _before(self, g: _Gradient) -> None:
        """A gradient is about to be added to `.grad`."""
        if torch.is_grad_enabled():
            raise DifferentiationError(
                message(
                    f"backward through a module of {WHERE}",
                    got="create_graph=True",
                    need="a backward that is not differentiated: sums of buckets have no history",
                    mend="own = torch.autograd.grad(loss, parameters, create_graph=True), which gives this worker's "
                    "own gradients, and spt.psum(g, axis_name) of each",
                )
            )
        p = g.p
        if not g.aside:
            self._look(g)
        if not self.syncing:
            if not g.owed:
                g.owed, g.base = True, None if p.grad is None else p.grad.detach().clone()
            return
        self._enter()
        if g.came:
            if g.bucket.handle is None:
                return
            self._finish()  # Reached again, by a backward inside of this one: that is another round of sums.
        self.begun = True
        self._set_aside(g)

    def _after(self, g: _Gradient) -> None:
        """`.grad` holds this worker's own gradient."""
        grad = g.p.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise LayoutError(
                message(
                    WHERE,
                    argument=g.name,
                    got=f"a gradient of layout {grad.layout}",
                    need="dense gradients",
                    mend="nn.Embedding(..., sparse=False)",
                )
            )
        if not self.syncing:
            g.version = grad._version
            return
        if g.came:
            return
        g.came = True
        self.order.append(g.index)
        g.bucket.missing -= 1
        if self.overlap and self._full():
            with self._acting() as worker:
                while self._full():
                    self._send(worker)

    def _full(self) -> bool:
        """Whether all gradients of the next bucket are there. Buckets are sent in one order, whichever fills first."""
        return self.sent < len(self.buckets) and self.buckets[self.sent].missing == 0

    def _set_aside(self, g: _Gradient) -> None:
        """Leave in `.grad` this worker's own part alone."""
        if g.aside:
            return
        g.aside = True
        if not g.owed:
            g.base, g.p.grad = g.p.grad, None
        elif g.base is not None and g.p.grad is not None:
            g.p.grad -= g.base

    def _look(self, g: _Gradient) -> None:
        """See what the user has done to `.grad` since backwards that did not sum."""
        grad = g.p.grad
        if grad is None:
            g.owed, g.base = False, None
        elif g.base is not None and grad._version != g.version:
            if bool(grad.any()):
                raise StateError(
                    message(
                        WHERE,
                        argument=g.name,
                        got="a .grad that was changed after a backward under no_sync, which added this worker's own "
                        "part to a sum of earlier ones",
                        need="the one or the other alone, or a .grad that is left as it is",
                        mend="optimizer.zero_grad() before no_sync; or change .grad after the sum",
                    )
                )
            g.base = None  # cleared

    def _restore(self, g: _Gradient) -> None:
        """`.grad` as it was before what was in it was set aside."""
        if not g.aside:
            return
        g.aside = False
        if not g.owed:
            g.p.grad, g.base = g.base, None
        elif g.base is not None and g.p.grad is not None:
            g.p.grad += g.base
            g.version = g.p.grad._version

    def _give_up(self) -> None:
        """After a backward that raised."""
        with torch.no_grad():
            for g in self.gradients:
                self._restore(g)
        self._clear()
        self.token = None

    def _clear(self) -> None:
        """Nothing has come yet."""
        self.begun = False
        self.sent = 0
        self.order: list[int] = []
        for g in self.gradients:
            g.came = g.aside = False
        for bucket in self.buckets:
            bucket.handle = None
            bucket.missing = len(bucket.gradients)

    def _send(self, worker: Worker) -> None:
        """Start the sum of the next bucket. With the last goes who has which gradient."""
        bucket = self.buckets[self.sent]
        self.sent += 1
        blocks = [self._lent(self._part(g), g.p, worker) for g in bucket.gradients]
        if self.sent == len(self.buckets):
            some = [self._own(g) is not None for g in self.gradients]
            blocks.append(self._lent(bucket.like.new_tensor(some), bucket.like, worker))
        size = (sum(b.size for b in blocks),)
        detail = f"gradients of {bucket.gradients[0].name} and {len(bucket.gradients) - 1} more"
        call = self._call(worker, blocks[0].dtype, size, f"bucket {self.sent} of {len(self.buckets)}, {detail}")
        for ledger in LEDGERS.get():
            for _ in bucket.gradients:
                ledger.operator(worker.index, "Sum", self.axes)
        call.lent = True
        bucket.handle = worker.comm.all_reduce_many(worker.group(self.axes), call, blocks)

    def _part(self, g: _Gradient) -> torch.Tensor | None:
        """What this worker gives to the sum. Numbers of float16 are divided first for a mean, as DDP does: their sum
        may be infinite where their mean is not."""
        own = self._own(g)
        return own / self.size if own is not None and self.mean and own.dtype is torch.float16 else own

    def _own(self, g: _Gradient) -> torch.Tensor | None:
        """This worker's own gradient."""
        return g.p.grad if g.came or g.owed else None

    def _lent(self, x: torch.Tensor | None, like: torch.Tensor, worker: Worker) -> Any:
        """A gradient as a block, which is written to when the sum is there."""
        x = torch.zeros_like(local(like).detach()) if x is None else local(x)
        return block_of(x, worker, WHERE)[0]

    def _leave(self, token: _Token) -> None:
        """At the end of a backward."""
        try:
            if self.begun:
                order = self.order
                self._finish()
                with self._acting() as worker, torch.no_grad():
                    if self.buffers:
                        self._copy(worker, self.buffers, "buffers")
                    if not self.settled:
                        self._settle(worker, order)
        finally:
            if self.begun:
                self._give_up()
            self.token = None

    def _finish(self) -> None:
        """Send what is left, wait for all sums, and put them into `.grad`."""
        with self._acting() as worker, torch.no_grad():
            for g in self.gradients:
                if g.owed and not g.came:
                    self._look(g)
                    if g.owed:
                        self._set_aside(g)
            while self.sent < len(self.buckets):
                self._send(worker)
            totals: list[Any] = [b.handle.wait() for b in self.buckets]  # type: ignore[union-attr]
            *totals[-1], mask = totals[-1]
            some = to_host(mask).tolist()
            for bucket, total in zip(self.buckets, totals, strict=True):
                self._arrived(bucket, total, some)
            self._clear()

    def _arrived(self, bucket: _Bucket, totals: list[Any], some: list[Any]) -> None:
        found: list[tuple[_Gradient, torch.Tensor]] = []
        for g, total in zip(bucket.gradients, totals, strict=True):
            if not some[g.index]:
                self._restore(g)
                continue
            own = self._own(g)
            if own is None or own.is_conj() or own.is_neg():
                own = torch.empty_like(g.p, requires_grad=False)
            own = own if in_blocks(own) else plain(own)
            write(local(own), total)
            found.append((g, own))
        whole = [own for _, own in found if own.dtype is not torch.float16] if self.mean and self.size > 1 else []
        if whole:
            torch._foreach_div_(whole, self.size)  # type: ignore[attr-defined]
        for g, own in found:
            base = g.base if g.aside else g.p.grad
            g.p.grad = own if base is None else base.add_(own)
            g.base, g.owed = None, False

    def _settle(self, worker: Worker, order: list[int]) -> None:
        """Buckets in the order in which gradients came on the first worker."""
        others = [g.index for b in self.buckets for g in b.gradients]
        mine = torch.tensor(list(dict.fromkeys(order + others)), device=_device(worker))
        self._fill(self._broadcast(worker, mine, "order of gradients").tolist())
        self._clear()
        self.settled = True

    # What is sent but sums

    def _call(self, worker: Worker, dtype: Any, shape: tuple[int, ...], detail: str) -> Call:
        call = Call("data_parallel", self.axes, dtype, shape, detail=detail, alike=True, frame=sys._getframe(1))
        if worker.mesh.places is not None:
            call.host = False
        return call

    def _agree(self, worker: Worker, flags: list[bool], detail: str) -> list[bool]:
        """For each flag, whether any worker's is up."""
        mine = torch.tensor(flags, dtype=torch.uint8, device=_device(worker))
        block, _ = block_of(mine, worker, WHERE)
        call = self._call(worker, block.dtype, block.shape, detail)
        cell = [worker.comm.all_reduce(worker.group(self.axes), call, block, "max").wait()]
        return [bool(f) for f in owned(cell).tolist()]

    def _broadcast(self, worker: Worker, x: torch.Tensor, detail: str) -> torch.Tensor:
        """The first worker's x."""
        group = worker.group(self.axes)
        block, _ = block_of(x, worker, WHERE)  # which nobody writes to
        call = self._call(worker, block.dtype, block.shape, detail)
        cell = [worker.comm.broadcast(group, call, block if group.index == 0 else None, 0).wait()]
        return owned(cell)

    def _copy(self, worker: Worker, tensors: Sequence[torch.Tensor], what: str, verify: Sequence[str] = ()) -> None:
        """The first worker's values of these tensors, of any dtypes, in one broadcast; or a look at them alone."""
        mine = [local(x).detach().contiguous().reshape(-1).view(torch.uint8) for x in tensors]
        whole = self._broadcast(worker, torch.cat(mine), what)
        for k, (x, piece) in enumerate(zip(tensors, whole.split([m.numel() for m in mine]), strict=True)):
            if not verify:
                own = local(x).detach()
                own.copy_(piece.clone().view(x.dtype).reshape(own.shape))
            elif not torch.equal(piece, mine[k]):
                raise StateError(
                    message(
                        WHERE,
                        argument="module",
                        got=f"{verify[k]} that differs from that of the first worker",
                        need='one value on all workers, with init="verify"',
                        mend='init="broadcast", which takes those of the first worker',
                    )
                )

    def level(self, worker: Worker, verify: bool) -> None:
        """Make parameters and buffers those of the first worker, or see that they are."""
        model = self.model()
        assert model is not None
        named = [*model.module.named_parameters(), *model.module.named_buffers()]
        with torch.no_grad():
            while named:
                n = nbytes = 0
                while n < len(named) and (n == 0 or nbytes < _TOGETHER):
                    nbytes += local(named[n][1]).numel() * named[n][1].element_size()
                    n += 1
                some, named = named[:n], named[n:]
                self._copy(worker, [x for _, x in some], "values", [name for name, _ in some] if verify else ())
            if worker.tracked:
                self.undeclared = differing(worker, model.module, (*self.axes, *model.varying))


def _release(taken: list[int], handles: list[Any]) -> None:
    for k in taken:
        SUMMED.pop(k, None)
    for handle in handles:
        handle.remove()


def _device(worker: Worker) -> torch.device:
    return torch.device("cpu" if worker.mesh.places is None else "cuda")
