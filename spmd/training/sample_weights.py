"""How losses of microbatches count in that of the whole minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.staging.recorder import slot_of
from spmd.autodiff.tracer import value_of
from spmd.errors import StateError
from spmd.mesh import WORKER, Worker
from spmd.operators.reduce import psum
from spmd.operators.varying import varying
from spmd.optim.numbers import varying_axes

__all__ = ["SampleWeights"]


class SampleWeights:
    """The share of each microbatch in all samples. They are counted once the axes of the loss are known.

    where, option: the function and its option for these axes, in errors. sizes: the samples of this worker in each
    microbatch. axes: those along which samples differ. axis_name: the axes over which the loss is taken, () for the
    worker's own samples; None: those of `axes` along which the loss is one value. params: of the loss. reduction:
    "mean", or "sum", where each microbatch counts once, and a worker's own sum of no samples is nothing.
    """

    def __init__(
        self,
        where: str,
        option: str,
        sizes: Sequence[int],
        axes: frozenset[str],
        axis_name: Any,
        params: Any,
        reduction: str = "mean",
    ):
        self.where, self.option, self.reduction = where, option, reduction
        self.sizes, self.axes, self.axis_name, self.params = sizes, axes, axis_name, params
        worker = WORKER.get()
        self.sample_axes = () if worker is None else tuple([n for n in worker.mesh.axes if n in axes])
        self.counts: Any = None
        self.shares: Any = None

    def parts_with_samples(self) -> int:
        """How many microbatches have samples on any worker; at least one. Shapes decide it, also in a recorded program.

        Cost: an all-reduce of the counts, if several workers have samples."""
        self.counts = self._summed(self.sample_axes)
        return max(1, int(np.count_nonzero(slot_of(value_of(self.counts)))))

    def _summed(self, over: tuple[str, ...]) -> Any:
        """The lengths of the microbatches, summed over these axes."""
        counts = self._array(self.sizes)
        counts = varying(counts, self.sample_axes) if self.sample_axes else counts
        return psum(counts, over) if over else counts

    def of(self, value: Any, k: int) -> Any:
        """The share of microbatch k of a loss; nothing of a microbatch without samples."""
        if self.shares is None:
            self.shares = self._counted(value)
        return self._weighted(value, self.shares[k], self.sizes[k] > 0)

    def quiet(self, k: int) -> AbstractContextManager[Any]:
        """Without warnings of divisions where this worker has no samples, whose mean is 0/0 and counts for nothing."""
        return nullcontext() if self.sizes[k] else np.errstate(divide="ignore", invalid="ignore")

    def _counted(self, value: Any) -> Any:
        worker = WORKER.get()
        over = self._axes_of_loss(worker, value) if worker is not None and self.axes else ()
        if self.reduction == "sum":
            return self._array([1.0 if over else min(size, 1) for size in self.sizes])
        counts = self.counts if self.counts is not None and over == self.sample_axes else self._summed(over)
        return counts / counts.sum()

    def _axes_of_loss(self, worker: Worker, value: Any) -> tuple[str, ...]:
        if self.axis_name is not None:
            names = worker.mesh.names(self.axis_name, self.where)
            return tuple([n for n in names if n in self.axes])
        unclear = [n for n in worker.mesh.axes if n in self.axes & self._axes_of(value)]
        for p in tree.leaves(self.params) if unclear and self.reduction == "mean" else ():
            if not self._axes_of(p).isdisjoint(unclear):
                raise StateError.at(
                    self.where,
                    argument=self.option,
                    got=f"None, for a loss that varies over {unclear[0]!r}, as its parameters do",
                    need="the axes over which it takes the mean: its state does not say",
                    mend=f"{self.option}={unclear[0]!r}, or () for a mean of each worker's own samples",
                )
        return tuple([n for n in worker.mesh.axes if n in self.axes - self._axes_of(value)])

    # What depends on the library of the arrays

    def _axes_of(self, x: Any) -> Any:
        """The axes along which an array varies."""
        return varying_axes(x)

    def _array(self, numbers: Sequence[float]) -> Any:
        return np.asarray(numbers, np.float64)

    def _weighted(self, value: Any, share: Any, counts: bool) -> Any:
        """The share of a loss. counts: whether it has samples; else it may be the mean of none, and is then nothing."""
        share = share.astype(value.dtype) if hasattr(value, "dtype") else share
        return value * share if counts else np.where(share == 0, np.zeros_like(value), value * share)
