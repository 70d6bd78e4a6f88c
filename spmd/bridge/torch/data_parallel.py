"""Data parallelism in torch: a module whose parameters are one value on all workers, though each has its own data.

To give each worker the same parameters is to vary them (`Vary`); the adjoint is a sum (`Sum`). `DataParallel` takes it
for all parameters together: in buckets that are sent while backward goes on, and that arrive before it ends.

How it hooks into torch: a leaf's gradient comes to rest in a node of its own, AccumulateGrad, which runs once in each
backward, whatever the number of uses. Before it runs, what `.grad` held, one value on all workers, is set aside; after
it, `.grad` holds this worker's own gradient, which is lent to a bucket. A callback at the end of backward waits for the
sums, and adds them to what was set aside.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd.bridge.torch.function import Seat, seat_of
from spmd.bridge.torch.memory import array_dtype, lent, owned, write
from spmd.bridge.torch.tensor import SUMMED, plain, stated
from spmd.device import to_host
from spmd.errors import DifferentiationError, LayoutError, MeshError, StateError, message, nearest
from spmd.mesh import WORKER, Worker, here
from spmd.state import state_of
from spmd.transport.base import LEDGERS, Call, Handle

__all__ = ["DataParallel", "data_parallel"]

_WHERE = "spt.data_parallel"
_REDUCTIONS = ("sum", "mean")
_INITS = ("broadcast", "verify")
_TOGETHER = 32 << 20
"""Bytes of parameters that one broadcast takes."""
_AT_ONCE = 2**64 - 1
"""The place in the order of backward that torch gives to the nodes that add to `.grad`."""
_engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


def data_parallel(
    module: nn.Module,
    axis_name: str | Sequence[str],
    *,
    reduction: str = "sum",
    bucket_bytes: int = 4 << 20,
    broadcast_buffers: bool = True,
    init: str = "broadcast",
    overlap: bool = True,
) -> DataParallel:
    """The module, with parameters that are one value on all workers along axis_name, each of which has data of its own.

    To be called in a body, on every worker, as `torch.nn.parallel.DistributedDataParallel` is in every process:

        model = spt.data_parallel(Net(), "data")
        loss = spt.mean(F.cross_entropy(model(x), y, reduction="none"), "data")
        loss.backward()  # .grad now holds the same gradient on all workers
        optimizer.step()

    module: this worker's own. Its parameters and buffers become those of the first worker along axis_name.
    axis_name: an axis of the mesh, or several. Along others, parameters may differ (the shards of a parallel layer).
    reduction: what `.grad` holds when `backward()` returns. "sum": the sum of what the workers' own backwards give.
    That is the adjoint of varying the parameters, and what this library takes everywhere: the gradient of a loss that
    is one value for all workers (`spt.mean`, `spt.psum`), however uneven their shares are. "mean": that sum over the
    number of workers, which is DDP's convention: right where each worker's loss is the mean over its own minibatch,
    and all minibatches are equally long.
    bucket_bytes: gradients are sent when so many bytes of them have come, in the order in which backward makes them,
    a bucket for each dtype. With the first backward, that of the first worker is taken for the order.
    broadcast_buffers: after each backward that sums, buffers (running means) become those of the first worker. (DDP
    does so before the next forward.)
    init: "broadcast", or "verify", which sends the same and raises StateError where anything differs.
    overlap: False sends all buckets when backward is through: where workers' graphs part ways and hold collectives of
    their own, and where several such modules share a backward that differs from worker to worker.

    Forward: `module(...)`. Backward: one all-reduce per bucket, waited for before `backward()` returns. It may be
    called several times, on several forwards at once, with retain_graph, through `torch.utils.checkpoint`; gradients
    add up in `.grad`. A parameter that no worker's backward reaches keeps the `.grad` it has, None for one; one that
    some reach gets the sum on all. A worker whose backward reaches none at all takes no part, and the others' is a
    mismatch: `spt.tie(loss, *model.parameters())` there.
    A term that all workers add alike, as a penalty on the parameters, is counted once for each worker: with "sum"
    divide it by `spt.axis_size(axis_name)`.

    `with model.no_sync():` backwards that send nothing: `.grad` grows by this worker's own gradient, and the first
    backward after it sends what has come together. `torch.autograd.grad` gives this worker's own gradient, with
    create_graph too, which `spt.psum` sums; `backward(create_graph=True)` raises DifferentiationError.

    `state_dict()`, `load_state_dict()`, `named_parameters()` and attributes are those of the module, which is
    `model.module`. Frozen parameters are not sent; they may be released later. Raises MeshError outside of bodies and
    on another mesh, StateError for a module that two workers share, MismatchError where modules differ.
    """
    return DataParallel(
        module,
        axis_name,
        reduction=reduction,
        bucket_bytes=bucket_bytes,
        broadcast_buffers=broadcast_buffers,
        init=init,
        overlap=overlap,
    )


class DataParallel(nn.Module):
    """A module whose gradients are summed over workers; see `data_parallel`."""

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        axis_name: str | Sequence[str],
        *,
        reduction: str = "sum",
        bucket_bytes: int = 4 << 20,
        broadcast_buffers: bool = True,
        init: str = "broadcast",
        overlap: bool = True,
    ):
        super().__init__()
        worker = here(_WHERE)
        _check(module, reduction, bucket_bytes, init)
        self.module = module
        self.training = module.training
        self.axis_name = worker.mesh.names(axis_name, _WHERE)
        self.reduction = reduction
        self.bucket_bytes = bucket_bytes
        self.broadcast_buffers = broadcast_buffers
        self.init = init
        self.overlap = overlap
        self._sums: _Sums | None = _Sums(self, worker)
        self._sums.level(worker, verify=init == "verify")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        worker = WORKER.get()
        if worker is None:
            if torch.is_grad_enabled():
                raise MeshError(
                    message(
                        f"a module of {_WHERE}",
                        got="a forward outside of any body that is to be differentiated: its gradients could not meet",
                        need="a body: spt.map(main, (), None, mesh=mesh)()",
                        mend="with torch.no_grad(): model(x), or model.module(x), the module alone",
                    )
                )
            return self.module(*args, **kwargs)
        sums = self._of(worker)
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        with sums.varied(worker):
            out = self.module(*args, **kwargs)
        sums.watch(out)
        return out

    def _of(self, worker: Worker) -> _Sums:
        """The sums of this worker, for its parameters as they are now."""
        sums = self._sums
        if sums is None:  # copied or loaded
            sums = self._sums = _Sums(self, worker)
            sums.level(worker, verify=False)
            return sums
        sums.sit(worker)
        if sums.outdated():
            sums = self._sums = _Sums(self, worker, sums)
        return sums

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that send nothing: `.grad` grows by this worker's own gradient.

        The first backward after it sums what has come together. (DDP asks for the forward to be inside too; here it
        makes no difference where that is.)
        """
        sums = self._of(here(f"no_sync of {_WHERE}"))
        before, sums.syncing = sums.syncing, False
        try:
            yield
        finally:
            sums.syncing = before

    # The names of the module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None:
                raise
        return getattr(inner, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """As a part of another module: the names there are without `module.`."""
        for key in [k for k in state_dict if k.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sums": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sums = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy with sums of its own. It sends nothing: copies of what is one value are one value."""
        import copy

        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        nn.Module.__init__(twin)
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        worker = WORKER.get()
        if worker is not None and self._sums is not None:
            twin._sums = _Sums(twin, worker, self._sums)
        return twin


def _check(module: Any, reduction: Any, bucket_bytes: Any, init: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            message(
                _WHERE,
                argument="module",
                got=f"{type(module).__name__}",
                need="an nn.Module",
                mend="spt.data_parallel(model, axis_name)",
            )
        )
    for name, value, known in (("reduction", reduction, _REDUCTIONS), ("init", init, _INITS)):
        if value not in known:
            raise ValueError(
                message(
                    _WHERE,
                    argument=name,
                    got=repr(value),
                    need=f"one of {', '.join(map(repr, known))}",
                    mend=f'{name}="{(nearest(str(value), known, 1) or known)[0]}"',
                )
            )
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise ValueError(
            message(
                _WHERE,
                argument="bucket_bytes",
                got=repr(bucket_bytes),
                need="bytes, an int of at least 1",
                mend="leave it out: 4 MiB",
            )
        )
    for name, p in module.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise StateError(
                message(
                    _WHERE,
                    argument="module",
                    got=f"a lazy module, whose {name} has no shape yet",
                    need="parameters with a shape",
                    mend="a forward with any data before: with torch.no_grad(): module(x)",
                )
            )


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
        self.like = plain(like).detach()
        self.gradients: list[_Gradient] = []
        self.handle: Handle | None = None
        self.missing = 0


class _Token:
    """Lives as long as a backward: its callback holds it, and is dropped with it where that raises."""

    __slots__ = ("__weakref__",)


class _Sums:
    """The sums of one worker's gradients.

    seat: the worker's place, by which other threads find it. entries: where the parameters are. gradients: of those
    that are summed, in the order of the module; the others are fixed. token: of the backward that goes on; begun:
    whether it has reached a parameter; sent: how many buckets it has started. order: in which gradients came.
    """

    def __init__(self, model: DataParallel, worker: Worker, before: _Sums | None = None):
        module = model.module
        self.model = weakref.ref(model)
        self.axes: tuple[str, ...] = model.axis_name
        self.state = state_of(self.axes)
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
            array_dtype(p.dtype, f"{_WHERE}, parameter {name}")
        text = repr([(name, tuple(p.shape), p.dtype) for name, p in named])
        entries = sum(p.numel() for _, p in named)
        detail = f"{len(named)} parameters of {entries} entries together, digest {zlib.crc32(text.encode()):08x}"
        return self._agree(worker, [p.requires_grad for _, p in named], detail)

    def _as(self, before: Any, module: nn.Module) -> list[bool]:
        """As those of a module that this is a copy of."""
        summed = {g.name for g in before.gradients}
        return [name in summed for name, _ in module.named_parameters()]

    def _take_over(self, before: _Sums) -> None:
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
            nbytes += g.p.numel() * g.p.element_size()
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
                    _WHERE,
                    argument="module",
                    got=f"parameters that a module of {_WHERE} has already, "
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
                    f"a module of {_WHERE}",
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
                if p.requires_grad and owner.get(name) is p:
                    twin = twins.get(id(p))
                    if twin is None:
                        twin = stated(p, self.state)
                        twins[id(p)] = twin
                        twin.replica = True
                        # Backward is to run it as soon as its gradient is there, not as the first thing in forward.
                        twin.grad_fn._set_sequence_nr(_AT_ONCE)
                    owner[name] = twin
                    swapped.append((owner, name, twin, p))
            yield
        finally:
            for owner, name, twin, p in swapped:
                if owner.get(name) is twin:
                    owner[name] = p

    def watch(self, out: Any) -> None:
        """Know of a backward when it sets out from these results, so that its end is seen: parameters may be reached
        first by a backward inside of it, as `torch.utils.checkpoint` runs them."""
        me = weakref.ref(self)

        def entered(_: Any) -> None:
            sums = me()
            if sums is not None and sums.syncing:
                sums._enter()

        for x in pytree.tree_leaves(out):
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
                    f"backward through a module of {_WHERE}",
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
                    _WHERE,
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
                        _WHERE,
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
        blocks = [self._lent(self._own(g), g.p, worker) for g in bucket.gradients]
        if self.sent == len(self.buckets):
            some = [self._own(g) is not None for g in self.gradients]
            blocks.append(self._lent(bucket.like.new_tensor(some), bucket.like, worker))
        size = (sum(b.size for b in blocks),)
        detail = f"gradients of {bucket.gradients[0].name} and {len(bucket.gradients) - 1} more"
        call = self._call(worker, blocks[0].dtype, size, f"bucket {self.sent} of {len(self.buckets)}, {detail}")
        for ledger in LEDGERS.get():
            for _ in bucket.gradients:
                ledger.operator(worker.index, "Sum", self.axes)
        bucket.handle = worker.comm.all_reduce_many(worker.group(self.axes), call, blocks)

    def _own(self, g: _Gradient) -> torch.Tensor | None:
        """This worker's own gradient."""
        return g.p.grad if g.came or g.owed else None

    def _lent(self, x: torch.Tensor | None, like: torch.Tensor, worker: Worker) -> Any:
        """A gradient as a block. It is not written to before the sum is there, so that nobody needs a copy."""
        x = torch.zeros_like(plain(like).detach()) if x is None else plain(x)
        return lent(x, worker, long=False, where=_WHERE)

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
            own = plain(own)
            write(own, total)
            found.append((g, own))
        if self.mean and self.size > 1 and found:
            torch._foreach_div_(  # type: ignore[attr-defined]
                [own for _, own in found], self.size
            )
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
        call = Call("data_parallel", self.axes, dtype, shape, detail=detail, alike=True, frame=_users())
        if worker.mesh.places is not None:
            call.host = False
        return call

    def _agree(self, worker: Worker, flags: list[bool], detail: str) -> list[bool]:
        """For each flag, whether any worker's is up."""
        mine = torch.tensor(flags, dtype=torch.uint8, device=_device(worker))
        block = lent(mine, worker, long=False, where=_WHERE)
        call = self._call(worker, block.dtype, block.shape, detail)
        cell = [worker.comm.all_reduce(worker.group(self.axes), call, block, "max").wait()]
        return [bool(f) for f in owned(cell).tolist()]

    def _broadcast(self, worker: Worker, x: torch.Tensor, detail: str) -> torch.Tensor:
        """The first worker's x."""
        group = worker.group(self.axes)
        block = lent(x, worker, long=False, where=_WHERE)  # which nobody writes to
        call = self._call(worker, block.dtype, block.shape, detail)
        cell = [worker.comm.broadcast(group, call, block if group.index == 0 else None, 0).wait()]
        return owned(cell)

    def _copy(self, worker: Worker, tensors: Sequence[torch.Tensor], what: str, verify: Sequence[str] = ()) -> None:
        """The first worker's values of these tensors, of any dtypes, in one broadcast; or a look at them alone."""
        mine = [plain(x).detach().contiguous().reshape(-1).view(torch.uint8) for x in tensors]
        whole = self._broadcast(worker, torch.cat(mine), what)
        for k, (x, piece) in enumerate(zip(tensors, whole.split([m.numel() for m in mine]), strict=True)):
            if not verify:
                plain(x).detach().copy_(piece.clone().view(x.dtype).reshape(x.shape))
            elif not torch.equal(piece, mine[k]):
                raise StateError(
                    message(
                        _WHERE,
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
                    nbytes += named[n][1].numel() * named[n][1].element_size()
                    n += 1
                some, named = named[:n], named[n:]
                self._copy(worker, [x for _, x in some], "values", [name for name, _ in some] if verify else ())


def _release(taken: list[int], handles: list[Any]) -> None:
    for k in taken:
        SUMMED.pop(k, None)
    for handle in handles:
        handle.remove()


def _device(worker: Worker) -> torch.device:
    return torch.device("cpu" if worker.mesh.places is None else "cuda")


def _users() -> FrameType | None:
    """Where the user is: backward stands between, with frames of torch's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "spmd"):
        frame = frame.f_back
    return frame
