"""Batches cut into microbatches, and their results joined again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.errors import LayoutError, describe
from spmd.layout import block_sizes, offsets
from spmd.operators.root import Rooted

__all__ = ["check_joined", "joined", "length_of", "microbatches_of", "sizes_of"]


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


def sizes_of(length: int, microbatches: int, everywhere: bool) -> list[int]:
    """The lengths of the microbatches of a batch. everywhere: all workers have as many samples, so that microbatches
    without any are left out. One remains of an empty batch."""
    sizes = block_sizes(length, microbatches)
    return [n for k, n in enumerate(sizes) if n or not k] if everywhere else [*sizes]


def microbatches_of(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """The pieces of a batch, of these lengths."""
    ends = offsets(sizes)
    return [tree.map(lambda x, k=k: x[ends[k] : ends[k + 1]], batch) for k in range(len(sizes))]


def check_joined(structures: Sequence[Any], shapes: Sequence[Sequence[tuple[int, ...]]], where: str) -> None:
    """Raise LayoutError for results of microbatches that have no dimension 0 in which they could be joined, or differ
    in others."""
    for k, own in enumerate(shapes):
        same = structures[k] == structures[0] and [s[1:] for s in own] == [s[1:] for s in shapes[0]]
        if not same or () in own:
            raise LayoutError.at(
                where,
                argument="stages",
                got=f"results of microbatches 0 and {k} with shapes {[*map(list, shapes[0])]} and {[*map(list, own)]}"
                + ("" if structures[k] == structures[0] else ", in other places or beside other constants"),
                need="results that are joined in dimension 0, and agree in the others",
                mend="x[None] of a number for each microbatch; pad sequences to one length",
            )


def joined(pieces: Sequence[Any]) -> Any:
    """Results of microbatches as the result of the batch."""
    leaves = zip(*(tree.flatten(piece)[0] for piece in pieces), strict=True)
    whole = [np.concatenate(arrays) for arrays in leaves]
    return tree.unflatten(tree.flatten(pieces[0])[1], whole)
