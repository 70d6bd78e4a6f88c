"""`Collate`: collation that also takes an empty list of samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from spmd.errors import describe, message
from spmd.tracebacks import api_boundary

__all__ = ["Collate"]


class Collate:
    """A collate_fn that also takes an empty list, and returns a batch of length 0 for it.

    The batch has the structure, dtypes and other lengths of the batches of collate_fn. One sample is collated alone and
    twice; the difference of the two results is subtracted from the first. So the dimension that counts samples has
    length 0, lists of names are empty, and what does not depend on the number of samples stays.

    dataset: gives the sample, `dataset[0]`. collate_fn: by default torch's `default_collate`. It gets all other lists
    unchanged. Raises TypeError if its results have no length. A collate_fn that takes an empty list itself needs no
    `Collate`.

        >>> data = torch.utils.data.TensorDataset(torch.ones(5, 3), torch.arange(5))
        >>> x, labels = spt.Collate(data)([])  # a worker without samples
        >>> x.shape, labels.shape
        (torch.Size([0, 3]), torch.Size([0]))
    """

    @api_boundary
    def __init__(self, dataset: Any, collate_fn: Callable[[list], Any] | None = None):
        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate

    def __call__(self, samples: Any) -> Any:
        if not (isinstance(samples, list) and not samples):  # a dataset may have made a batch of an empty list itself
            return self.collate_fn(samples)
        sample = self.dataset[0]
        return _empty_batch(self.collate_fn([sample]), self.collate_fn([sample, sample]), "")


def _empty_batch(one: Any, two: Any, path: str) -> Any:
    """The collation of no sample, extrapolated from those of one sample and of two."""
    if isinstance(one, torch.Tensor | np.ndarray) and type(one) is type(two) and one.ndim == two.ndim:
        lengths = [2 * a - b for a, b in zip(one.shape, two.shape, strict=True)]
        fits = all(0 <= n <= a for n, a in zip(lengths, one.shape, strict=True))
        if fits and (one.shape != two.shape or bool((one == two).all())):
            cut = one[tuple(slice(n) for n in lengths)]
            return cut.clone() if isinstance(cut, torch.Tensor) else cut.copy()
    elif isinstance(one, Mapping) and isinstance(two, Mapping) and [*one] == [*two]:
        parts = {k: _empty_batch(one[k], two[k], f"{path}[{k!r}]") for k in one}
        if not isinstance(one, MutableMapping):
            return parts
        batch = copy.copy(one)
        batch.update(parts)
        return batch
    elif isinstance(one, list | tuple) and type(one) is type(two):
        if len(one) == len(two):
            parts = [_empty_batch(a, b, f"{path}[{k}]") for k, (a, b) in enumerate(zip(one, two, strict=True))]
            return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
        if 0 <= 2 * len(one) - len(two) < len(one):
            return one[: 2 * len(one) - len(two)]
    elif isinstance(one, int | float | str | bytes | None) and one == two:
        return one
    raise TypeError(
        message(
            "spmd.bridge.torch.Collate",
            argument=f"result{path} of collate_fn",
            got=f"{describe(one)} of one sample, {describe(two)} of two, and now there is none",
            need="arrays, or lists, of a length that grows with the number of samples, in tuples, lists and dicts",
            mend="a collate_fn of your own that takes an empty list too, in place of Collate",
        )
    )
