"""The minibatches of a sequential run, split over workers.

In a body that tracks states, the tensors of a batch vary along the axes of the sampler: see `loader_states`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from spmd.bridge.torch.collate import Collate
from spmd.data.shares import (
    Position,
    Shares,
    axis_error,
    checked_integer,
    checked_order,
    numbered_worker,
    worker_along,
)
from spmd.errors import message
from spmd.layout import block_sizes
from spmd.mesh import WORKER
from spmd.tracebacks import api_boundary

__all__ = ["Batches", "DistributedSampler"]

_WHERE = "spmd.bridge.torch.DistributedSampler"


class DistributedSampler(Sampler[int]):
    """This worker's share of each minibatch of a sequential run.

    The sequential run takes the samples in the order of `torch.randperm(n, generator=torch.Generator().manual_seed(
    seed + epoch))`, or in index order without shuffle, `batch_size` at a time. Each of its minibatches is split over
    the workers: the shares, in the order of the workers, are the blocks of the minibatch under `P(axis_name)`. No
    sample is lost or repeated, and all workers make the same number of steps. In the last minibatch, shares may be
    smaller; with fewer samples than workers some are empty.

        sampler = DistributedSampler(data, batch_size=64, axis_name="data")  # in a body; 64 over all workers together
        loader = sampler.loader(num_workers=2)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in loader: ...

    Other ways to use it:

    - `DataLoader(data, batch_sampler=sampler.batches, collate_fn=Collate(data))` is that loader. `sampler.batches`
      yields a list of indices for each step. torch's own collation fails on an empty list, `Collate` does not.
    - `DataLoader(data, batch_size=sampler.local_batch_size, sampler=sampler)`: the sampler yields single indices, which
      BatchSampler groups into batches. It makes no step of an empty share, so iterating raises an error on all workers
      if any share is empty. Give drop_last to the sampler: BatchSampler's own would drop the last share of some workers
      and keep that of others.
    - `padding=True` yields what `torch.utils.data.distributed.DistributedSampler` yields: every num_replicas-th
      sample. The first samples are repeated at the end, or with drop_last the last ones are left out, so that all
      workers have equally many.

    The sequential run with the same minibatches: `DataLoader(data, batch_size=64, sampler=RandomSampler(data,
    generator=torch.Generator().manual_seed(seed + epoch)))`. (`DataLoader(data, shuffle=True, generator=...)` draws
    another number from its generator first.) Or this sampler with `num_replicas=1, rank=0`.

    dataset: with a length and indices from 0. Each epoch reads its length.
    num_replicas, rank: the number of workers that split a minibatch, and the number of this one.
    axis_name: in a body, in place of these two numbers, the axis or axes of the mesh that split a minibatch: the first
    axis splits it, and each further axis splits those blocks. Workers that differ along other axes get the same
    indices. Outside of bodies, without any of the three, the workers are the processes of torch.distributed.
    order: "blocked", the blocks of a minibatch, or "strided": the first worker of two takes every other sample of it,
    from its first on. With padding the default is "strided", as torch has it.
    shuffle, seed: the order of the epoch. seed must be the same on all workers. `set_epoch` gives each epoch another
    order.
    drop_last: leave out the last minibatch if it is short; for padding see above.
    batch_size: the samples of a step, over all workers together. With padding only `batches` needs it, and it is a
    multiple of the number of workers.
    len(sampler) is the number of this worker's indices, len(sampler.batches) the number of steps.

    In a body, each tensor of a batch that a DataLoader makes with a sampler with axis_name is Varying over these axes,
    also inside tuples, lists, dicts and dataclasses. The indices are plain ints: declare what a program reads by them
    without a DataLoader with `spt.varying`. A sampler can be pickled, and does not keep its mesh.

    Raises TypeError for a dataset without indices or length and for arguments that are not integers, ValueError for
    numbers out of range, MeshError if the workers are not specified.

        >>> [list(spt.DistributedSampler(range(7), 2, rank, shuffle=False, batch_size=4)) for rank in range(2)]
        [[0, 1, 4, 5], [2, 3, 6]]
    """

    @api_boundary
    def __init__(
        self,
        dataset: Dataset | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        batch_size: int | None = None,
        axis_name: str | Sequence[str] | None = None,
        padding: bool = False,
        order: str | None = None,
    ):
        _check_dataset(dataset)
        self.dataset: Any = dataset
        self._parts, self.rank, self.axis_names = _workers_of(num_replicas, rank, axis_name)
        self.num_replicas = math.prod(self._parts)
        self.shuffle, self.drop_last, self.padding = bool(shuffle), bool(drop_last), bool(padding)
        self.order = checked_order(_WHERE, order, self.padding)
        self.seed = checked_integer(_WHERE, "seed", seed, None, "seed=0")
        if batch_size is not None:
            batch_size = checked_integer(_WHERE, "batch_size", batch_size, 1, "batch_size=64")
        self.batch_size = batch_size
        if self.batch_size is None and not self.padding:
            raise _batch_size_error(
                "none",
                "the number of samples in a minibatch of the sequential run: it says which samples are split together",
                f"batch_size=16 * {self.num_replicas} for 16 on each worker; padding=True for what torch's "
                "DistributedSampler yields",
            )
        if self.batch_size is not None and self.padding and self.batch_size % self.num_replicas:
            raise _batch_size_error(
                f"{self.batch_size}, with padding=True, for {self.num_replicas} workers",
                "a multiple of the number of workers: padding gives all of them equally many samples",
                f"batch_size={-(-self.batch_size // self.num_replicas) * self.num_replicas}, or padding=False",
            )
        self._position = Position()

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return self._position.epoch

    @property
    def _shares(self) -> Shares:
        """The minibatches of an epoch of the dataset as long as it is now."""
        n = len(self.dataset)
        return Shares(n, self.batch_size, self._parts, self.rank, self.drop_last, self.padding, self.order)

    def __iter__(self) -> Iterator[int]:
        self._refuse_empty_shares()
        self._position.reset()
        return self._pass()

    def _pass(self) -> Iterator[int]:
        (step, offset), indices, shares = self._position.begin(), self._indices(), self._shares
        size, end = self.local_batch_size, (shares.steps, 0)
        for count, index in enumerate(indices[step * size + offset :], step * size + offset + 1):
            self._position.at = divmod(count, size) if count < len(indices) else end
            yield index

    def note_batches(self, count: int, batch_size: int | None) -> None:
        """Set the position to that of a program that has `count` batches of this pass from a DataLoader, whose
        processes may be ahead of it.

        batch_size: the indices of a batch, if the loader groups single ones; None: a batch is a step of `batches`.
        """
        step, offset = self._position.first
        if batch_size is None:
            self._position.at = (step + count, 0) if count else (step, offset)
            return
        shares, size = self._shares, self.local_batch_size
        at = step * size + offset + count * batch_size
        self._position.at = divmod(at, size) if at < len(shares) else (shares.steps, 0)

    def __len__(self) -> int:
        return len(self._shares)

    @property
    def local_batch_size(self) -> int:
        """This worker's share of a whole minibatch; with padding and without batch_size, 1."""
        return self._shares.share(self._shares.minibatch)

    @property
    def batches(self) -> Batches:
        """The same indices as one list for each step: a batch sampler for DataLoader. A list may be empty."""
        if self.batch_size is None:
            raise _batch_size_error(
                "none",
                "the number of samples of a step, over all workers together",
                f"DistributedSampler(..., padding=True, batch_size=16 * {self.num_replicas}) for 16 on each",
                f"{_WHERE}.batches",
            )
        return Batches(self)

    def loader(self, *, collate_fn: Callable[[list], Any] | None = None, **options: Any) -> DataLoader:
        """A DataLoader of this worker's shares, whose tensors vary over axis_name. `Collate` makes a batch of length 0
        of an empty share.

        collate_fn: as DataLoader takes it. options: other arguments of DataLoader, except those of sampling.
        """
        collate = Collate(self.dataset, collate_fn)
        return DataLoader(self.dataset, batch_sampler=self.batches, collate_fn=collate, **options)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by seed + epoch from now on. Call it on all workers before each epoch."""
        where = f"{_WHERE}.set_epoch"
        self._position.set_epoch(checked_integer(where, "epoch", epoch, None, "sampler.set_epoch(0)"))

    def state_dict(self) -> dict[str, Any]:
        """The position of the last pass, as plain numbers: epoch, yielded steps, and what the order depends on.

        Steps of a DataLoader count when the program has their batch, however many its processes have read ahead. So
        `spmd.save(path, {"model": model, "sampler": sampler})` within an epoch, and `spmd.load` with such a sampler
        as `like`, go on with the next minibatch. Any number of workers may resume from it, unless it was taken within
        a share, or with padding.
        """
        return self._position.state(self._depends_on)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state: the next pass starts at its position, unless `set_epoch` sets another epoch first.

        The state needs "epoch" and "step". Its other values must agree with this sampler (ValueError).
        """
        self._position.load(f"{_WHERE}.load_state_dict", state_dict, self._depends_on)

    @property
    def _depends_on(self) -> dict[str, Any]:
        """The values that determine the order of the samples, besides the epoch."""
        return {
            "samples": len(self.dataset),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "padding": self.padding,
            "num_replicas": self.num_replicas,
            "order": self.order,
        }

    def _indices(self) -> list[int]:
        """This worker's indices of an epoch, step by step."""
        shares = self._shares
        order = torch.arange(shares.samples, device="cpu")
        if self.shuffle:  # on the host, whatever the default device is
            generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
            order = torch.randperm(shares.samples, generator=generator, device="cpu")
        return order[torch.from_numpy(shares.positions())].tolist()

    def _refuse_empty_shares(self) -> None:
        if self.padding:
            return
        whole, rest = self._shares.counts
        for count, what in ((self._shares.minibatch * (whole > 0), "a minibatch"), (rest, "the last minibatch")):
            if count and not min(block_sizes(count, self._parts)):
                raise ValueError(
                    message(
                        f"iterating over {_WHERE}",
                        got=f"{what} of {count} samples for {self.num_replicas} workers, so that some have none there",
                        need="a sample for each worker in each step: BatchSampler makes no step of an empty share, and "
                        "workers would make different numbers of steps",
                        mend="DataLoader(data, batch_sampler=sampler.batches, collate_fn=Collate(data)), which is "
                        "sampler.loader(); drop_last=True, or padding=True",
                    )
                )


class Batches(Sampler[list[int]]):
    """The indices of a `DistributedSampler` as one list for each step. All workers make the same number of steps.

    `DataLoader(data, batch_sampler=sampler.batches, collate_fn=Collate(data))`. If a minibatch has fewer samples than
    there are workers, some lists are empty. Arrays take empty lists (`x[indices]`), and so does `DataLoader(data,
    sampler=sampler.batches, batch_size=None)` if the dataset takes lists. Collation needs `Collate`.

        >>> batches = spt.Batches(spt.DistributedSampler(range(7), 2, 1, shuffle=False, batch_size=4))
        >>> list(batches)
        [[2, 3], [6]]
    """

    @api_boundary
    def __init__(self, sampler: DistributedSampler):
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        self.sampler._position.reset()
        return self._pass()

    def _pass(self) -> Iterator[list[int]]:
        position, size = self.sampler._position, self.sampler.local_batch_size
        (step, offset), indices = position.begin(), self.sampler._indices()
        for number in range(step, len(self)):
            position.at = (number + 1, 0)
            yield indices[number * size + offset : (number + 1) * size]
            offset = 0

    def __len__(self) -> int:
        return self.sampler._shares.steps

    @property
    def batch_size(self) -> int:
        """The length of each list but the last one."""
        return self.sampler.local_batch_size

    @property
    def drop_last(self) -> bool:
        return self.sampler.drop_last

    def set_epoch(self, epoch: int) -> None:
        """As for the sampler."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As for the sampler."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As for the sampler."""
        self.sampler.load_state_dict(state_dict)


def _batch_size_error(got: str, need: str, mend: str, where: str = _WHERE) -> ValueError:
    return ValueError(message(where, argument="batch_size", got=got, need=need, mend=mend))


def _check_dataset(dataset: Any) -> None:
    """Raise TypeError for a dataset without indices or length."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        got, need = f"{name}, an IterableDataset", "a dataset that gives samples by index"
        mend = (
            "let its __iter__ take this worker's samples, by spmd.worker_index(axis_name) as it is when the "
            "dataset is made, or give it __len__ and __getitem__"
        )
    elif not hasattr(dataset, "__len__"):
        got, need = f"{name}, which has no length", "a dataset with __len__ and __getitem__"
        mend = "give it __len__"
    else:
        return
    raise TypeError(message(_WHERE, argument="dataset", got=got, need=need, mend=mend))


def _workers_of(
    num_replicas: Any, rank: Any, axis_name: str | Sequence[str] | None
) -> tuple[tuple[int, ...], int, tuple[str, ...]]:
    """The numbers of parts into which a minibatch is split, major to minor; the index of this worker; the axes."""
    if axis_name is not None:
        return worker_along(_WHERE, axis_name, num_replicas, rank)
    if num_replicas is None and rank is None:
        worker = WORKER.get()
        if worker is not None:
            raise axis_error(
                _WHERE,
                f"none, in a body on {worker.mesh}",
                "the axes along which minibatches are split",
                f"axis_name={next(iter(worker.mesh.axes), ())!r}",
            )
        if dist.is_available() and dist.is_initialized():
            return (dist.get_world_size(),), dist.get_rank(), ()
    return numbered_worker(_WHERE, num_replicas, rank)
