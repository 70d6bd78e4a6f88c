"""Minibatches that are read ahead, while the program computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.data.prefetching import Prefetched
from spmd.data.reading import is_array, reader_of
from spmd.data.sampler import Epoch, Sampler, length_of
from spmd.data.shares import axis_error, checked_integer
from spmd.errors import LayoutError, describe, message, one_or_all
from spmd.layout import P
from spmd.mesh import WORKER, Mesh
from spmd.operators.varying import varying
from spmd.ownership import freeze
from spmd.placement import made, mesh_for
from spmd.tracebacks import api_boundary

__all__ = ["Batches", "Loader"]

_WHERE = "spmd.data.Loader"


class Loader:
    """The minibatches of a sampler, read by a background thread while the program computes.

        sampler = spmd.data.Sampler(x, 64, axis_name="data")  # in a body: this worker's shares
        loader = spmd.data.Loader({"x": x, "labels": labels}, sampler, prefetch=2)
        for epoch in loader.epochs(10):
            for batch in epoch:
                loss, grads = value_and_grad(params, batch["x"], batch["labels"])

    In a body the arrays of a batch are this worker's samples, Varying over the axes of the sampler. Outside of bodies,
    with a sampler with axis_name, they are global arrays laid out by `P(axis_name)`, and each process reads its own
    samples only; with one without axis_name they are whole arrays of NumPy.

    arrays_or_function: a tree of arrays whose first dimension counts samples: of NumPy, memory maps, datasets of h5py
    or zarr, or tensors; or a function that takes an array of indices, empty ones too, and gives a tree of arrays. The
    thread runs it, so it must not call collectives.
    sampler: a `Sampler`. prefetch: how many minibatches are read ahead at most; with 0 the program reads them itself.

    An error of reading is raised where the program asks for the minibatch, with a note that says which step it is. The
    thread ends when the loop ends or is left. `with contextlib.closing(iter(loader.epoch(3))) as batches:` ends it at
    once where an error that leaves the loop is kept.

    `state_dict` and `load_state_dict` are those of the sampler: a step counts when the program has its batch, however
    many have been read ahead. Raises LayoutError for what is no array, MeshError for another mesh than that of the
    sampler. Cost: nothing is sent.

        >>> x = np.arange(10.0)
        >>> def body():
        ...     loader = spmd.data.Loader(x, spmd.data.Sampler(x, 4, "data", shuffle=False))
        ...     return np.stack([spmd.sum(batch, "data") for batch in loader.epoch(0)])
        >>> with spmd.Mesh(data=3):
        ...     spmd.map(body, (), P())()
        PartitionedArray([ 6., 22., 17.], dtype=float64, spec=P(None))
    """

    @api_boundary
    def __init__(self, arrays_or_function: Any, sampler: Sampler, prefetch: int = 2):
        if not isinstance(sampler, Sampler):
            raise TypeError(
                message(
                    _WHERE,
                    argument="sampler",
                    got=describe(sampler),
                    need="a Sampler, which says the indices of each step",
                    mend="spmd.data.Sampler(len(x), batch_size=64)",
                )
            )
        self.sampler = sampler
        self.prefetch = checked_integer(_WHERE, "prefetch", prefetch, 0, "prefetch=2")
        self._read = reader_of(arrays_or_function, _WHERE)
        self._arrays = None if callable(arrays_or_function) else arrays_or_function

    def __len__(self) -> int:
        return len(self.sampler)

    @api_boundary
    def epoch(self, number: int) -> Batches:
        """The minibatches of an epoch: iterate over them. A pass over it begins as one of the sampler does.

        >>> loader = spmd.data.Loader(np.arange(5) ** 2, spmd.data.Sampler(5, 2, shuffle=False))
        >>> list(loader.epoch(0))
        [array([0, 1]), array([4, 9]), array([16])]
        """
        return Batches(self, self.sampler.epoch(number))

    def epochs(self, stop: int) -> Iterator[Batches]:
        """The epochs before `stop`, from that of the position on, as those of the sampler."""
        return (Batches(self, epoch) for epoch in self.sampler.epochs(stop))

    def state_dict(self) -> dict[str, Any]:
        """The position of the program: see `Sampler`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state: see `Sampler`."""
        self.sampler.load_state_dict(state_dict)

    def _check_length(self, samples: int) -> None:
        n = samples if self._arrays is None else length_of(self._arrays, _WHERE)
        if n != samples:
            raise LayoutError.at(
                _WHERE,
                argument="sampler",
                got=f"{samples} samples, and arrays of {n}",
                need="as many samples as the arrays have",
                mend="spmd.data.Sampler(arrays, batch_size=64)",
            )


class Batches:
    """The minibatches of an epoch of a `Loader`: `loader.epoch(3)`. len(batches) is the number of its steps."""

    def __init__(self, loader: Loader, epoch: Epoch):
        self.loader, self.number, self._epoch = loader, epoch.number, epoch

    def __len__(self) -> int:
        return len(self._epoch)

    @api_boundary
    def __iter__(self) -> Iterator[Any]:
        loader, epoch = self.loader, self._epoch
        loader._check_length(epoch.shares.samples)
        sampler, number = loader.sampler, self.number
        read, deliver = _whole(loader, epoch) if sampler.is_whole and sampler.axis_names else _own(loader, epoch)
        start, prefetch = sampler.begin(number), loader.prefetch
        note = lambda step: f"while reading step {step} of epoch {number} of {_WHERE}"
        return _Pass(sampler, number, start, Prefetched(read, range(start, len(epoch)), prefetch, note), deliver)


class _Pass(Iterator[Any]):
    """One pass over an epoch. A step counts when the program has its batch."""

    def __init__(self, sampler: Sampler, number: int, start: int, batches: Prefetched, deliver: Callable[[Any], Any]):
        self._sampler, self._number, self._steps = sampler, number, start
        self._batches, self._deliver = batches, deliver

    @api_boundary
    def __next__(self) -> Any:
        batch = self._deliver(next(self._batches))
        self._steps += 1
        self._sampler.note(self._number, self._steps)
        return batch

    def close(self) -> None:
        """End the thread that reads ahead. The pass has no further batches."""
        self._batches.close()


def _own(loader: Loader, epoch: Epoch) -> tuple[Callable[[int], Any], Callable[[Any], Any]]:
    """How to read the samples of a step that this program has, and what to make of them."""
    read, names, worker = loader._read, loader.sampler.axis_names, WORKER.get()

    def deliver(batch: Any) -> Any:
        if worker is None or not names:
            return batch
        return tree.map(lambda x: varying(x, names) if is_array(x) else x, batch)

    return lambda step: read(epoch[step]), deliver


Block = tuple[int, int]
"""The start and the stop of a worker's share in a minibatch."""


def _whole(loader: Loader, epoch: Epoch) -> tuple[Callable[[int], Any], Callable[[Any], Any]]:
    """How to read the samples of a step of the workers of this process, and the global arrays to make of them."""
    mesh, names, read = mesh_for(None, _WHERE), loader.sampler.axis_names, loader._read
    _check_mesh(loader.sampler, mesh)

    def read_blocks(step: int) -> tuple[int, dict[Block, Any]]:
        indices = epoch[step]
        layout = mesh.layout((len(indices),), P(names))
        parts = {(s.start, s.stop) for (s,) in map(layout.slices, mesh.local_workers)}
        return len(indices), {(start, stop): read(indices[start:stop]) for start, stop in sorted(parts)}

    def deliver(blocks_of_step: tuple[int, dict[Block, Any]]) -> Any:
        count, blocks = blocks_of_step
        leaves = {part: tree.leaves(batch) for part, batch in blocks.items()}
        first = next(iter(blocks.values()))
        joined = [_joined(k, x, count, leaves, mesh, names) for k, x in enumerate(tree.leaves(first))]
        return tree.unflatten(tree.structure(first), joined)

    return read_blocks, deliver


def _joined(k: int, x: Any, count: int, leaves: dict[Block, list[Any]], mesh: Mesh, names: tuple[str, ...]) -> Any:
    """Leaf k of the blocks as one global array; x: that of one block."""
    if not is_array(x):
        return x
    layout = mesh.layout((count, *x.shape[1:]), P(names))

    def block(index: tuple[slice, ...]) -> np.ndarray:
        return freeze(np.ascontiguousarray(leaves[index[0].start, index[0].stop][k]))

    return made(_WHERE, "arrays_or_function", layout, mesh, block, "one shape of samples, for empty indices too")


def _check_mesh(sampler: Sampler, mesh: Mesh) -> None:
    """Raise where minibatches were to be split otherwise than this mesh splits them."""
    sizes = tuple(mesh.axes.get(name, 0) for name in sampler.axis_names)
    if sizes != sampler.parts:
        over = one_or_all(sampler.axis_names)
        raise axis_error(
            _WHERE,
            f"{over} of a sampler for {sampler.parts} workers, on {mesh}",
            "the mesh on which the sampler was made, or one with these axes",
            "make the sampler within this `with mesh:`; a state that was saved loads on any mesh",
        )
