"""Batches cut into microbatches, and their results joined again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.errors import LayoutError, describe
from spmd.layout import offsets
from spmd.operators.root import Rooted

__all__ = ["joined", "length_of", "microbatches_of"]


def length_of(batch: Any, argument: str, where: str = "spmd.training.pipeline") -> int:
    """The length of the first dimension of all arrays of a batch."""
    leaves = tree.flatten(batch)[0]
    shapes = [leaf.shape if type(leaf) is Rooted else np.shape(leaf) for leaf in leaves]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        raise LayoutError.at(
            where,
            argument=argument,
            got=", ".join(map(describe, leaves)) or repr(batch),
            need="arrays of one length in dimension 0, along which they are cut into microbatches",
            mend="give what all microbatches share in another way: in `shared`, or closed over by the stages",
        )
    return lengths.pop()


def microbatches_of(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """The pieces of a batch, of these lengths."""
    ends = offsets(sizes)
    return [tree.map(lambda x, k=k: x[ends[k] : ends[k + 1]], batch) for k in range(len(sizes))]


def joined(pieces: Sequence[Any]) -> Any:
    """Results of microbatches as the result of the batch."""
    leaves = zip(*(tree.flatten(piece)[0] for piece in pieces), strict=True)
    whole = [np.concatenate(arrays) for arrays in leaves]
    return tree.unflatten(tree.flatten(pieces[0])[1], whole)
