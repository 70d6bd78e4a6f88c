"""The minibatches of a sequential run, as arrays of indices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np

from spmd.autodiff import tree
from spmd.data.shares import Position, Shares, axis_error, checked_integer, checked_order, numbered_worker, worker_along
from spmd.errors import LayoutError, describe, one_or_all
from spmd.mesh import WORKER
from spmd.placement import mesh_for
from spmd.tracebacks import api_boundary

__all__ = ["Epoch", "Sampler", "length_of"]

_WHERE = "spmd.data.Sampler"


class Sampler:
    """The indices of each minibatch of a sequential run: all of them, or this worker's share.

        sampler = spmd.data.Sampler(len(x), batch_size=64)          # outside of bodies: whole minibatches
        for indices in sampler.epoch(3):
            loss, grads = loss_and_grads(params, x[indices], labels[indices])

    In epoch e the samples come in the order `np.random.default_rng([seed, e]).permutation(n)`, or in index order
    without shuffle, `batch_size` at a time. Each minibatch is split over the workers along axis_name: no sample is lost
    or repeated, and all workers make the same number of steps. In the last minibatch shares may be smaller; with fewer
    samples than workers some are empty. The index arrays are bare: in a body, declare what they select by
    `spmd.varying(x[indices], axis_name)`, or let `spmd.data.Loader` do both.

    data: the number of samples, or what has them: an array, a tree of arrays of equal first dimensions, or any object
    with a length. Each epoch reads it.
    batch_size: the samples of a step, over all workers together.
    axis_name: the axis or axes of the mesh that split a minibatch: the first splits it, and each further axis splits
    those blocks. In a body, indices are this worker's share, and workers that differ along other axes get the same.
    Outside of bodies, on the enclosing mesh, they are the whole minibatch, the shares one after the other: so
    `P(axis_name)` gives each worker its share. Without axis_name: whole minibatches, in the order of the epoch.
    order: "blocked", the first of two workers takes the first half of a minibatch; or "strided", it takes every other
    sample from the first on.
    shuffle, seed: the order of the epoch. seed must be the same on all workers.
    drop_last: leave out the last minibatch if it is short.
    padding: give all workers equally many samples, as torch's DistributedSampler does. The first samples are repeated
    at the end, or with drop_last the last ones are left out. batch_size is a multiple of the number of workers, and the
    order "strided" by default.
    num_replicas, rank: in place of axis_name, the number of workers, and which one this is.

    len(sampler) is the number of steps of an epoch. `state_dict` and `load_state_dict` keep the position, so that
    `spmd.save(path, {"params": params, "sampler": sampler})` and `spmd.load` go on within an epoch, on any mesh.

    Raises MeshError if the workers are not specified, LayoutError for data without a number of samples, TypeError and
    ValueError for other arguments. Cost: nothing is sent.

        >>> sampler = spmd.data.Sampler(24, 8, num_replicas=2, rank=0, order="strided", shuffle=False)
        >>> [indices.tolist() for indices in sampler.epoch(0)]
        [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
        >>> spmd.data.Sampler(24, 8, num_replicas=2, rank=0, shuffle=False).epoch(0)[1]
        array([ 8,  9, 10, 11])
    """

    @api_boundary
    def __init__(
        self,
        data: Any,
        batch_size: int,
        axis_name: str | Sequence[str] | None = None,
        *,
        order: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        padding: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ):
        self.data = data
        self.shuffle, self.drop_last, self.padding = bool(shuffle), bool(drop_last), bool(padding)
        self.order = checked_order(_WHERE, order, self.padding)
        self.seed = checked_integer(_WHERE, "seed", seed, 0, "seed=0")
        self.batch_size = checked_integer(_WHERE, "batch_size", batch_size, 1, "batch_size=64")
        self.parts, self.rank, self.axis_names = _split(axis_name, num_replicas, rank)
        self.num_replicas = math.prod(self.parts)
        self.is_whole = self.rank is None
        self._check_padding()
        self._position = Position()
        length_of(data, _WHERE)

    def _check_padding(self) -> None:
        if self.padding and self.batch_size % self.num_replicas:
            raise LayoutError.at(
                _WHERE,
                argument="batch_size",
                got=f"{self.batch_size}, with padding=True, for {self.num_replicas} workers",
                need="a multiple of the number of workers: padding gives all of them equally many samples",
                mend=f"batch_size={-(-self.batch_size // self.num_replicas) * self.num_replicas}, or padding=False",
            )

    @property
    def shares(self) -> Shares:
        """The minibatches of an epoch of the data as long as they are now."""
        n = length_of(self.data, _WHERE)
        return Shares(n, self.batch_size, self.parts, self.rank or 0, self.drop_last, self.padding, self.order)

    def __len__(self) -> int:
        return self.shares.steps

    @api_boundary
    def epoch(self, number: int) -> Epoch:
        """The minibatches of an epoch, as a sequence: iterate over it, or take `sampler.epoch(3)[k]`.

        A pass over the epoch of a state that was loaded begins at the position of the state, any other one at the first
        minibatch. Steps count for the position as soon as the program has their indices; `[k]` counts for nothing.

            >>> epoch = spmd.data.Sampler(5, 2, seed=7).epoch(3)
            >>> np.concatenate(list(epoch)), len(epoch)
            (array([3, 0, 4, 1, 2]), 3)
            >>> np.random.default_rng([7, 3]).permutation(5)
            array([3, 0, 4, 1, 2])
        """
        return Epoch(self, checked_integer(f"{_WHERE}.epoch", "number", number, 0, "sampler.epoch(0)"))

    def epochs(self, stop: int) -> Iterator[Epoch]:
        """The epochs before `stop`, from that of the position on. One that a loaded state has finished is not repeated.

        >>> sampler = spmd.data.Sampler(6, 2, shuffle=False)
        >>> sampler.load_state_dict({"epoch": 1, "step": 2})
        >>> [(epoch.number, [*map(list, epoch)]) for epoch in sampler.epochs(3)]
        [(1, [[4, 5]]), (2, [[0, 1], [2, 3], [4, 5]])]
        """
        return map(self.epoch, range(self.next_epoch(), stop))

    def next_epoch(self) -> int:
        """The first epoch that is not finished at the position."""
        position = self._position
        return position.epoch + (position.at[0] >= len(self) and position.at[0] > 0)

    def state_dict(self) -> dict[str, Any]:
        """The position of the last pass, as plain numbers: epoch, steps, and what the order depends on."""
        return self._position.state(self._depends_on)

    @api_boundary
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state: a pass over its epoch begins at its step.

        The state needs "epoch" and "step". Its other values must agree with this sampler (ValueError); the workers, and
        the order in which they split a minibatch, may be others unless there is padding.
        """
        self._position.load(f"{_WHERE}.load_state_dict", state_dict, self._depends_on)

    @property
    def _depends_on(self) -> dict[str, Any]:
        """The values that determine the order of the samples, besides the epoch."""
        return {
            "samples": length_of(self.data, _WHERE),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "padding": self.padding,
            "num_replicas": self.num_replicas,
            "order": self.order,
        }

    def order_of(self, epoch: int, samples: int) -> np.ndarray | None:
        """The samples in the order of an epoch; None for index order."""
        return np.random.default_rng([self.seed, epoch]).permutation(samples) if self.shuffle else None

    def begin(self, epoch: int) -> int:
        """Begin a pass over an epoch: its first step."""
        if self.is_whole and self.axis_names and WORKER.get() is not None:
            raise axis_error(
                _WHERE,
                f"{one_or_all(self.axis_names)} of a sampler that was made outside of the body, for whole minibatches",
                "a sampler of this worker's shares",
                "make it inside the function that is mapped",
            )
        self._position.set_epoch(epoch)
        return self._position.begin()[0]

    def note(self, epoch: int, steps: int) -> None:
        """The program has so many steps of an epoch."""
        self._position.epoch, self._position.at = epoch, (steps, 0)

    def __repr__(self) -> str:
        over = f" split over {self.num_replicas} workers" if self.num_replicas > 1 else ""
        return f"Sampler of {length_of(self.data, _WHERE)} samples, {self.batch_size} at a time{over}"


class Epoch(Sequence[np.ndarray]):
    """The minibatches of an epoch of a `Sampler`: `sampler.epoch(3)`. Item k has the indices of step k.

    >>> epoch = spmd.data.Sampler(6, 4, shuffle=False).epoch(2)
    >>> epoch.number, len(epoch), [*epoch]
    (2, 2, [array([0, 1, 2, 3]), array([4, 5])])
    """

    def __init__(self, sampler: Sampler, number: int):
        self.sampler, self.number = sampler, number
        self.shares = sampler.shares
        self._order = sampler.order_of(number, self.shares.samples)

    def __len__(self) -> int:
        return self.shares.steps

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return [self[k] for k in range(*step.indices(len(self)))]
        k = range(len(self))[step]
        positions = self.shares.minibatch_of_step(k) if self.sampler.is_whole else self.shares.of_step(k)
        return positions if self._order is None else self._order[positions]

    def __iter__(self) -> Iterator[np.ndarray]:
        for step in range(self.sampler.begin(self.number), len(self)):
            indices = self[step]
            self.sampler.note(self.number, step + 1)
            yield indices


def _split(
    axis_name: str | Sequence[str] | None, num_replicas: Any, rank: Any
) -> tuple[tuple[int, ...], int | None, tuple[str, ...]]:
    """The numbers of workers that split a minibatch, the index of this one or None for all, and the axes."""
    worker, has_numbers = WORKER.get(), num_replicas is not None or rank is not None
    if axis_name is None and has_numbers:
        return numbered_worker(_WHERE, num_replicas, rank)
    if axis_name is not None and (worker is not None or has_numbers):
        return worker_along(_WHERE, axis_name, num_replicas, rank)
    if worker is not None:
        raise axis_error(
            _WHERE,
            f"none, in a body on {worker.mesh}",
            "the axes along which minibatches are split; () for whole ones",
            f"axis_name={next(iter(worker.mesh.axes), ())!r}, or axis_name=() for whole minibatches on all workers",
        )
    if axis_name is None:
        return (), None, ()
    mesh = mesh_for(None, _WHERE)
    names = mesh.names(axis_name, _WHERE)
    return tuple(mesh.axes[a] for a in names), None, names


def length_of(data: Any, where: str) -> int:
    """The number of samples of data: an integer, arrays with one first dimension, or an object with a length."""
    if isinstance(data, int | np.integer) and not isinstance(data, bool):
        return checked_integer(where, "data", data, 0, f"{where}(1000, batch_size=64)")
    paths, leaves, _ = tree.flatten_with_path(data)
    shapes: list[Any] = [getattr(leaf, "shape", None) for leaf in leaves]
    if not shapes or not all(isinstance(shape, tuple) and shape for shape in shapes):
        if () in shapes or isinstance(data, dict | tuple) or not hasattr(data, "__len__"):
            raise _samples_error(where, describe(data))
        return len(cast(Sized, data))
    lengths = [shape[0] for shape in shapes]
    other = next((k for k, n in enumerate(lengths) if n != lengths[0]), None)
    if other is not None:
        raise _samples_error(
            where, f"{lengths[0]} samples in data{paths[0]}, and {lengths[other]} in data{paths[other]}"
        )
    return lengths[0]


def _samples_error(where: str, got: str) -> LayoutError:
    return LayoutError.at(
        where,
        argument="data",
        got=got,
        need="a number of samples: an integer, or arrays of one first dimension, or an object with a length",
        mend=f"{where}(len(x), batch_size=64)",
    )
