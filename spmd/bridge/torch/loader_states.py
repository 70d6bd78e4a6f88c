"""Batches of a DataLoader whose sampler is a `DistributedSampler`: they count as steps of the sampler when the program
has them, and in a body their tensors vary along its axes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, dataloader

from spmd.bridge.torch.frontend import FRONTEND
from spmd.bridge.torch.sampler import Batches, DistributedSampler
from spmd.mesh import WORKER

__all__: list[str] = []


def _sampler_of(sampler: Any) -> DistributedSampler | None:
    """The sampler that splits minibatches, through torch's own samplers around it."""
    while sampler is not None and not isinstance(sampler, DistributedSampler):
        sampler = getattr(sampler, "sampler", None)
    return sampler


def _note_batches(iterator: Any, sampler: DistributedSampler) -> None:
    """Tell a sampler how many batches of this pass the program has. Samplers of other kinds between the two may leave
    out indices; then the position stays that of the indices that were read."""
    direct, count = iterator._index_sampler, iterator._num_yielded
    if direct is sampler:
        sampler.note_batches(count, 1)
    elif isinstance(direct, Batches):
        sampler.note_batches(count, None)
    elif type(direct) is BatchSampler and direct.sampler is sampler:
        sampler.note_batches(count, direct.batch_size)


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


def _next_batch(step: Callable) -> Callable:
    """The next batch of a DataLoader's iterator, counted and declared. This covers loaders that users construct with a
    sampler, and runs in the worker only: processes that read data have no mesh."""

    @functools.wraps(step)
    def call(self: Any) -> Any:
        batch, worker, sampler = step(self), WORKER.get(), _sampler_of(self._index_sampler)
        if sampler is None:
            return batch
        _note_batches(self, sampler)
        if worker is None or not worker.tracked:
            return batch
        names = tuple(n for n in sampler.axis_names if n in worker.mesh.axes)
        return _declared(batch, lambda x: FRONTEND.declare(x, names, worker)) if names else batch

    return call


dataloader._BaseDataLoaderIter.__next__ = _next_batch(dataloader._BaseDataLoaderIter.__next__)
