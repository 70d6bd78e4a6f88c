"""Packed sequences: the rows of all sequences at one step after those at another, longest sequence first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from spmd.functions.local import local, namespace
from spmd.layout import offsets

__all__ = ["PackedRows"]


@dataclass(frozen=True)
class PackedRows:
    """Where the rows of packed data lie. batch_sizes: how many sequences have each step."""

    batch_sizes: tuple[int, ...]

    @cached_property
    def _present(self) -> np.ndarray:
        """Whether a sequence has a step: (time, batch)."""
        batch = self.batch_sizes[0] if self.batch_sizes else 0
        return np.arange(batch) < np.array(self.batch_sizes, dtype=int).reshape(-1, 1)

    def lengths(self, x: Any) -> Any:
        """The steps of each sequence, as an array of the library of x."""
        return local(x, "recurrent").integers(x, self._present.sum(0))

    def padded(self, x: Any) -> Any:
        """(time, batch, features): what is after the end of a sequence is any row."""
        starts = np.array(offsets(self.batch_sizes)[:-1], dtype=int).reshape(-1, 1)
        rows = np.where(self._present, starts + np.arange(self._present.shape[1]), 0)
        flat = x[local(x, "recurrent").integers(x, rows.ravel())]
        return namespace(x).reshape(flat, (*rows.shape, x.shape[1]))

    def packed(self, y: Any) -> Any:
        """The rows of padded outputs that belong to sequences."""
        flat = namespace(y).reshape(y, (y.shape[0] * y.shape[1], y.shape[2]))
        return flat[local(y, "recurrent").integers(y, np.flatnonzero(self._present))]
