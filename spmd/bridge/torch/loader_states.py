"""Batches of a DataLoader in a body: tensors that a `DistributedSampler` selects vary along its axes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.data import dataloader

from spmd.bridge.torch.frontend import FRONTEND
from spmd.bridge.torch.sampler import DistributedSampler
from spmd.mesh import WORKER

__all__: list[str] = []


def _axes_of(sampler: Any) -> tuple[str, ...]:
    """The axes over which a sampler splits minibatches, through torch's own samplers around it."""
    while sampler is not None and not isinstance(sampler, DistributedSampler):
        sampler = getattr(sampler, "sampler", None)
    return () if sampler is None else sampler.axis_names


def _declared(x: Any, declare: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with all its tensors declared, in the containers that DataLoader pins and in dataclasses."""
    each = functools.partial(_declared, declare=declare)
    if isinstance(x, torch.Tensor):
        return declare(x)
    if isinstance(x, MutableMapping):
        batch = copy.copy(x)
        batch.update({k: each(v) for k, v in x.items()})
        return batch
    if isinstance(x, Mapping):
        return {k: each(v) for k, v in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(each, x))
    if type(x) in (list, tuple):
        return type(x)(map(each, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        batch = copy.copy(x)
        for field in dataclasses.fields(x):
            object.__setattr__(batch, field.name, each(getattr(x, field.name)))  # also where it is frozen
        return batch
    return x


def _declaring(step: Callable) -> Callable:
    """The next batch of a DataLoader's iterator, declared. This covers loaders that users construct with a sampler, and
    runs in the worker only: processes that read data have no mesh."""

    @functools.wraps(step)
    def call(self: Any) -> Any:
        batch, worker = step(self), WORKER.get()
        if worker is None or not worker.tracked:
            return batch
        names = tuple(n for n in _axes_of(self._index_sampler) if n in worker.mesh.axes)
        return _declared(batch, lambda x: FRONTEND.declare(x, names, worker)) if names else batch

    return call


dataloader._BaseDataLoaderIter.__next__ = _declaring(dataloader._BaseDataLoaderIter.__next__)
