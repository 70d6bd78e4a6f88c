"""Minibatches of a sequential run, split over workers: which positions of an epoch each worker gets in which step, and
the position of a program, as states that are saved.

No array library decides anything here: `spmd.data.Sampler` and `spmd.bridge.torch.DistributedSampler` say which sample
has which position.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.errors import MeshError, describe, message
from spmd.layout import block_sizes, offsets
from spmd.mesh import WORKER
from spmd.spellings import closest

__all__ = [
    "ORDERS",
    "Position",
    "Shares",
    "axis_error",
    "checked_integer",
    "checked_order",
    "numbered_worker",
    "worker_along",
]

ORDERS = ("blocked", "strided")


@lru_cache(maxsize=256)
def _share(n: int, parts: tuple[int, ...], index: int, order: str) -> np.ndarray:
    """The positions, out of n, that worker `index` gets. Either order gives a worker equally many: the length of its
    block."""
    sizes = block_sizes(n, parts)
    if order == "blocked":
        start = offsets(sizes)[index]
        positions = np.arange(start, start + sizes[index])
    else:  # one position to each worker in turn; the last turn is of those whose blocks are longer
        turns = min(sizes)
        positions = index + len(sizes) * np.arange(turns)
        if sizes[index] > turns:
            last = turns * len(sizes) + sum(size > turns for size in sizes[:index])
            positions = np.append(positions, last)
    positions.flags.writeable = False
    return positions


@dataclass(frozen=True)
class Shares:
    """How an epoch of so many samples is taken in steps, and the share of one worker.

    batch_size: the samples of a step, over all workers together. None: one for each worker. parts: the numbers of
    workers that split a minibatch, major to minor; index: which worker this is. order: "blocked" or "strided".
    drop_last: leave out the last minibatch if it is short. padding: repeat the first samples at the end, or with
    drop_last leave out the last ones, so that all workers have equally many.
    """

    samples: int
    batch_size: int | None
    parts: tuple[int, ...] = ()
    index: int = 0
    drop_last: bool = False
    padding: bool = False
    order: str = "blocked"

    @property
    def workers(self) -> int:
        """The number of workers that split a minibatch."""
        return math.prod(self.parts)

    @property
    def minibatch(self) -> int:
        """The samples of a whole minibatch, over all workers together."""
        return self.workers if self.batch_size is None else self.batch_size

    @property
    def total(self) -> int:
        """The samples of an epoch, over all workers together, repetitions counted."""
        unit = self.workers if self.padding else self.minibatch
        if self.drop_last:
            return self.samples // unit * unit
        return -(-self.samples // unit) * unit if self.padding else self.samples

    @property
    def steps(self) -> int:
        """The number of steps of an epoch, the same on all workers."""
        return -(-self.total // self.minibatch)

    @property
    def counts(self) -> tuple[int, int]:
        """The number of whole minibatches, and the samples of a short last one, or 0."""
        return divmod(self.total, self.minibatch)

    def share(self, n: int) -> int:
        """This worker's number of samples, of n."""
        return block_sizes(n, self.parts)[self.index]

    def __len__(self) -> int:
        """The number of this worker's samples in an epoch."""
        whole, rest = self.counts
        return whole * self.share(self.minibatch) + self.share(rest)

    def of_step(self, step: int) -> np.ndarray:
        """The positions of this worker's share of a step. 0 is the first sample of the epoch."""
        return self._of_step(step, self.index)

    def minibatch_of_step(self, step: int) -> np.ndarray:
        """The positions of the minibatch of a step: the shares of all workers, one after the other."""
        if self.order == "blocked":
            return self._positions(step, np.arange(self._size(step)))
        return np.concatenate([self._of_step(step, index) for index in range(self.workers)])

    def positions(self) -> np.ndarray:
        """The positions of this worker's samples, step by step."""
        whole, rest = self.counts
        starts = self.minibatch * np.arange(whole)[:, None]
        first = starts + _share(self.minibatch, self.parts, self.index, self.order)
        last = whole * self.minibatch + _share(rest, self.parts, self.index, self.order)
        return np.concatenate([first.ravel(), last]) % max(self.samples, 1)

    def _size(self, step: int) -> int:
        return min(self.minibatch, self.total - step * self.minibatch)

    def _of_step(self, step: int, index: int) -> np.ndarray:
        return self._positions(step, _share(self._size(step), self.parts, index, self.order))

    def _positions(self, step: int, within: np.ndarray) -> np.ndarray:
        return (step * self.minibatch + within) % max(self.samples, 1)


class Position:
    """What a program has of its samples: the epoch, the steps, and the indices of the next step; where a pass begins.

    A state is a dict of plain numbers: these, and values of the sampler on which the order depends.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.at = (0, 0)  # the steps that the program has, and the indices of the next one
        self.first = (0, 0)  # where the last pass began
        self.resumes = False  # whether the next pass begins at `at`

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: to its beginning, unless it is that of the position."""
        if epoch != self.epoch:
            self.at, self.resumes = (0, 0), False
        self.epoch = epoch

    def reset(self) -> None:
        """Go to where the next pass begins."""
        if not self.resumes:
            self.at = (0, 0)

    def begin(self) -> tuple[int, int]:
        """Begin a pass: its first step, and its first index in it."""
        self.reset()
        self.resumes = False
        self.first = self.at
        return self.at

    def state(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The position and the values on which the order depends."""
        step, offset = self.at
        return {"epoch": self.epoch, "step": step, "offset": offset, **order}

    def load(self, where: str, state: Mapping[str, Any], order: Mapping[str, Any]) -> None:
        """Go to a position. The next pass begins there, unless another epoch is set first.

        Raises ValueError where the order was another one. Between two steps of minibatches that are split, any number
        of workers may go on, in either order.
        """
        mend = 'sampler.load_state_dict({"epoch": 2, "step": 10})'
        epoch = checked_integer(where, "state_dict['epoch']", state.get("epoch"), None, mend)
        step = checked_integer(where, "state_dict['step']", state.get("step"), 0, mend)
        offset = checked_integer(where, "state_dict['offset']", state.get("offset", 0), 0, mend)
        for name, value in order.items():
            loaded = state.get(name, value)
            of_workers = name in ("num_replicas", "order")
            if loaded != value and (not of_workers or order["padding"] or offset):
                raise ValueError(
                    message(
                        where,
                        argument=f"state_dict[{name!r}]",
                        got=repr(loaded),
                        need=f"{value!r}, as this sampler has it: otherwise samples would come twice, or never",
                        mend=f"make the sampler as it was, or start at the next epoch: sampler.set_epoch({epoch + 1})",
                    )
                )
        self.epoch, self.at, self.resumes = epoch, (step, offset), True


def checked_integer(where: str, argument: str, value: Any, minimum: int | None, mend: str) -> int:
    """A number as a plain integer. Raises TypeError for other values, ValueError below the minimum."""
    need = "an integer" if minimum is None else f"an integer of at least {minimum}"
    text = message(where, argument=argument, got=describe(value), need=need, mend=mend)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(text) from None
    if isinstance(value, bool):
        raise TypeError(text)
    if minimum is not None and number < minimum:
        raise ValueError(text)
    return int(number)


def checked_order(where: str, order: str | None, padding: bool) -> str:
    """The order in which workers split a minibatch; by default that of torch's sampler where that pads."""
    if order is None:
        return "strided" if padding else "blocked"
    if order not in ORDERS:
        raise ValueError(
            message(
                where,
                argument="order",
                got=repr(order),
                need='"blocked": a worker gets neighbours, or "strided": every num_replicas-th sample',
                mend=f'order="{closest(order, ORDERS)}"',
            )
        )
    return order


def axis_error(where: str, got: str, need: str, mend: str) -> MeshError:
    """The error for axes that do not say which worker this is."""
    return MeshError.at(where, argument="axis_name", got=got, need=need, mend=mend)


def worker_along(
    where: str, axis_name: str | Sequence[str], num_replicas: Any, rank: Any
) -> tuple[tuple[int, ...], int, tuple[str, ...]]:
    """In a body: the numbers of workers along the axes, the index of this one among them, and the axes."""
    worker = WORKER.get()
    if num_replicas is not None or rank is not None:
        raise axis_error(
            where,
            f"{axis_name!r}, with num_replicas={num_replicas}, rank={rank}",
            "the axis, or the two numbers",
            "leave out one of them",
        )
    if worker is None:
        raise axis_error(
            where,
            f"{axis_name!r}, outside of any body",
            "a worker, which has an index along the axis",
            "make it inside the function that is mapped, or give num_replicas= and rank=",
        )
    names = worker.mesh.names(axis_name, where)
    group = worker.group(names)
    return group.dims, group.index, names


def numbered_worker(where: str, num_replicas: Any, rank: Any) -> tuple[tuple[int, ...], int, tuple[str, ...]]:
    """The number of workers, and the index of one, as they are given, checked; and no axes."""
    if num_replicas is None or rank is None:
        raise MeshError.at(
            where,
            got=f"num_replicas={num_replicas}, rank={rank}, axis_name=None",
            need="the number of workers, and which of them this is",
            mend='num_replicas=4, rank=k, or in a body axis_name="data"; the size of a minibatch is batch_size=',
        )
    size = checked_integer(where, "num_replicas", num_replicas, 1, "num_replicas=4")
    index = checked_integer(where, "rank", rank, 0, "rank=0")
    if index >= size:
        raise ValueError(
            message(
                where,
                argument="rank",
                got=f"{index} of {size} workers",
                need=f"an integer from 0 to {size - 1}",
                mend="rank=0 is the first worker",
            )
        )
    return (size,), index, ()
