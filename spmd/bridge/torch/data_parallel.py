"""Data parallelism in torch: workers have the same parameters and different data.

Giving each worker the same parameters is `Vary`, whose adjoint is `Sum`. `DataParallel` sums gradients in buckets. They
are sent while backward runs, and arrive before it ends.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd.bridge.torch.frontend import FRONTEND
from spmd.bridge.torch.gradient_sync import GradientSync
from spmd.bridge.torch.module_broadcast import WHERE, check_initialized, varying_axes
from spmd.bridge.torch.stale_optimizers import watch_steps
from spmd.errors import MeshError, message
from spmd.mesh import WORKER, Worker, here
from spmd.operators.partial_comm import whole_comm
from spmd.spellings import closest
from spmd.tracebacks import api_boundary

__all__ = ["DataParallel", "data_parallel"]

_REDUCTIONS = ("sum", "mean")
_INITS = ("broadcast", "verify")


@api_boundary
def data_parallel(
    module: nn.Module,
    axis_name: str | Sequence[str],
    *,
    reduction: str = "sum",
    bucket_bytes: int = 4 << 20,
    broadcast_buffers: bool = True,
    init: str = "broadcast",
    overlap: bool = True,
    varying: str | Sequence[str] = (),
) -> DataParallel:
    """The module, with parameters that are the same on all workers along axis_name, and data that differ.

    Call it in a body, on every worker, as `torch.nn.parallel.DistributedDataParallel` is called in every process:

        model = spt.data_parallel(Net(), "data")
        loss = spt.mean(F.cross_entropy(model(x), y, reduction="none"), "data")
        loss.backward()  # .grad now holds the same gradient on all workers
        optimizer.step()

    module: this worker's own. Its parameters and buffers become those of the first worker along axis_name.
    axis_name: an axis of the mesh, or several. Along other axes parameters must be the same too, which is verified
    here, except those of `ShardedModule`s and those that forward declares, by `spt.varying(self.weight, "model")`.
    reduction: what `.grad` holds after `backward()`. "sum": the sum of the workers' own gradients, which is the adjoint
    of varying the parameters: the gradient of a loss that is one value for all workers (`spt.mean`, `spt.psum`),
    however uneven their shares are. "mean": that sum over the number of workers, as DDP: right if each worker's loss is
    the mean over its own minibatch, and all minibatches have one length.
    bucket_bytes: a bucket is sent when its gradients, of one dtype, have this many bytes. Buckets follow the order in
    which the first worker's first backward computes gradients.
    broadcast_buffers: after each backward that sums, copy the buffers (running means) of the first worker. (DDP does so
    before the next forward.)
    init: "broadcast", or "verify", which sends the same and raises StateError where anything differs.
    overlap: False sends all buckets at the end of backward. Needed where the graphs of workers differ and hold
    collectives, and where several such modules share a backward that differs between workers.
    varying: other axes along which parameters may differ, as those of the stages of a pipeline.

    Forward: `module(...)`, whose tensors vary over axis_name in every gradient mode. `model.module(x)` is the module
    alone, for an x that is the same on all workers. See `DataParallel` for backward.
    Raises MeshError outside of bodies and on another mesh, StateError for a module that two workers share,
    MismatchError where modules differ, LayoutError for parameters that axis_name splits.

        >>> def body(x):
        ...     model = spt.data_parallel(torch.nn.Linear(3, 1), "data", reduction="mean")
        ...     model(x).mean().backward()
        ...     return model.module.weight.grad
        >>> with spmd.Mesh(data=2):
        ...     spt.map(body, P("data"), P())(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
        tensor([[2., 2., 2.]])
    """
    return DataParallel(
        module,
        axis_name,
        reduction=reduction,
        bucket_bytes=bucket_bytes,
        broadcast_buffers=broadcast_buffers,
        init=init,
        overlap=overlap,
        varying=varying,
    )


class DataParallel(nn.Module):
    """A module whose gradients are summed over workers; `data_parallel` makes it.

    Backward: one all-reduce per bucket, waited for before `backward()` returns. It may be called several times, for
    several forwards, with retain_graph, and through `torch.utils.checkpoint`; gradients are added in `.grad`. If no
    worker's backward reaches a parameter, its `.grad` stays as it is. If some reach it, all get the sum. A worker whose
    backward reaches no parameter sends nothing, which raises MismatchError on the others: call
    `spt.tie(loss, *model.parameters())` there. A term that all workers add, such as a penalty on the parameters, counts
    once for each worker: with "sum" divide it by `spt.axis_size(axis_name)`.

    In `with model.no_sync():`, backward sends nothing and adds this worker's own gradient to `.grad`. The next backward
    outside sums everything. `torch.autograd.grad` gives this worker's own gradient, also with create_graph; `spt.psum`
    sums it. `backward(create_graph=True)` raises DifferentiationError.

    Of the parameters of an optimiser of `spt.shard_optimizer` each worker gets its part of the sum: buckets are
    reduce-scattered, and `.grad` is a `spt.PartitionedTensor`. Between `no_sync` and the sum, `.grad` holds this
    worker's own gradient alone, without what was summed before.

    `state_dict()`, `load_state_dict()`, `named_parameters()` and attributes are those of the module, which is
    `model.module`. Frozen parameters are not sent. They may be unfrozen later.

        >>> def body(x):
        ...     model = spt.data_parallel(torch.nn.Linear(3, 1), "data", reduction="mean")
        ...     return isinstance(model, spt.DataParallel), model(x).shape
        >>> with spmd.Mesh(data=2):
        ...     spt.map(body, P("data"), None)(torch.ones(4, 3))
        (True, torch.Size([2, 1]))
    """

    module: nn.Module

    @api_boundary
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
        varying: str | Sequence[str] = (),
    ):
        super().__init__()
        worker = here(WHERE)
        _check_arguments(module, reduction, bucket_bytes, init)
        self.module = module
        self.training = module.training
        self.axis_name = worker.mesh.names(axis_name, WHERE)
        self.varying = varying_axes(worker, varying, self.axis_name, WHERE)
        self.reduction = reduction
        self.bucket_bytes = bucket_bytes
        self.broadcast_buffers = broadcast_buffers
        self.init = init
        self.overlap = overlap
        with whole_comm(worker.comm).uncounted(bool(self.varying)):
            self._sync: GradientSync | None = GradientSync(self, worker)
            self._sync.equalize(worker, verify=init == "verify")
        watch_steps()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        worker = WORKER.get()
        if worker is None:
            if torch.is_grad_enabled():
                raise MeshError.at(
                    f"a module of {WHERE}",
                    got="a forward outside of any body, with gradients, which could not be summed",
                    need="a body: spt.map(main, (), None, mesh=mesh)()",
                    mend="with torch.no_grad(): model(x), or model.module(x), the module alone",
                )
            return self.module(*args, **kwargs)
        sync = self._sync_of(worker)
        with sync.varied(worker):
            out = self.module(*args, **kwargs)
        if worker.tracked:
            out = pytree.tree_map(partial(self._varying, worker=worker), out)
        if torch.is_grad_enabled():
            sync.watch_outputs(out)
        return out

    def _varying(self, x: Any, worker: Worker) -> Any:
        """A result, varied along the axes even if it does not depend on a parameter or is not differentiated."""
        return FRONTEND.vary(x, self.axis_name, worker) if isinstance(x, torch.Tensor) else x

    def _sync_of(self, worker: Worker) -> GradientSync:
        """The `GradientSync` of this worker, for the parameters that the module has now."""
        sync = self._sync
        if sync is None:  # copied or loaded
            sync = self._sync = GradientSync(self, worker)
            sync.equalize(worker, verify=False)
            return sync
        sync.bind(worker)
        if sync.outdated():
            sync = self._sync = GradientSync(self, worker, sync)
        return sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward sends nothing and adds this worker's own gradient to `.grad`.

        The next backward outside sums everything. (DDP needs forward inside too; here that makes no difference.)
        """
        sync = self._sync_of(here(f"no_sync of {WHERE}"))
        outer, sync.syncing = sync.syncing, False
        try:
            yield
        finally:
            sync.syncing = outer

    def sums_now(self) -> bool:
        """Whether backward sums gradients: False under `no_sync`."""
        return self._sync_of(here(f"a pipeline of {WHERE}")).syncing

    def sum_gradients(self) -> None:
        """Sum what backward under `no_sync` has left in `.grad`."""
        self._sync_of(here(f"a pipeline of {WHERE}")).sum_unsynced()

    # The names of the module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
        return getattr(module, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load as a part of another module, in whose state the names lack `module.`."""
        for key in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sync": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sync = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy that sums its own gradients. It sends nothing, because copies of equal parameters are equal."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        nn.Module.__init__(copied)
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        worker = WORKER.get()
        if worker is not None and self._sync is not None:
            copied._sync = GradientSync(copied, worker, self._sync)
        return copied


def _check_arguments(module: Any, reduction: Any, bucket_bytes: Any, init: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            message(
                WHERE,
                argument="module",
                got=f"{type(module).__name__}",
                need="an nn.Module",
                mend="spt.data_parallel(model, axis_name)",
            )
        )
    for name, value, choices in (("reduction", reduction, _REDUCTIONS), ("init", init, _INITS)):
        if value not in choices:
            raise ValueError(
                message(
                    WHERE,
                    argument=name,
                    got=repr(value),
                    need=f"one of {', '.join(map(repr, choices))}",
                    mend=f'{name}="{closest(value, choices)}"',
                )
            )
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise ValueError(
            message(
                WHERE,
                argument="bucket_bytes",
                got=repr(bucket_bytes),
                need="bytes, an int of at least 1",
                mend="leave it out: 4 MiB",
            )
        )
    check_initialized(module, WHERE)
