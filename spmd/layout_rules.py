"""The rules by which functions of global arrays lay out their results, and which function has which.

A function is registered with its rule. `python docs/tools/make_layouts.py` writes the table of
docs/explanation/global.md from both.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

__all__ = ["RULES", "Rule"]


class Rule(Enum):
    """The layout of a result, in words."""

    BLOCKWISE = (
        "what splits a dimension of an operand splits that of the result. Operands that are split differently: the "
        "layout of the largest; the others are laid out anew"
    )
    KEPT = "as the argument. `roll`: each block gets the rows that come from its neighbours"
    REDUCED = "without the dimensions that were reduced; the same value on all workers along the axes that split them"
    SUMMED = (
        "without the dimensions that were summed; unreduced along the axes that split them, and where the argument was"
    )
    PERMUTED = "what splits a dimension goes with it; new dimensions are whole"
    RESHAPED = (
        "where a split dimension stays as long as it was, it stays split. Else all axes split the first dimension"
    )
    INDEXED = (
        "a part stays on the workers that hold it, in uneven blocks; so does what a mask picks of the first dimension. "
        "`diff`: each block gets the rows that follow it. An item of a split dimension comes to all workers. Arrays of "
        "integers, steps back, and masks of several dimensions: as `sort`"
    )
    ALONG = (
        "the dimension is made whole. What split it splits the longest other one. `repeat`, `delete` and `insert` with "
        "arrays as further arguments: the same array on all workers"
    )
    PRODUCT = (
        "each mesh axis that splits an operand splits one letter, or none: of all assignments the one that moves the "
        "fewest bytes. Uneven blocks stay where that is one of these. Unreduced along axes that split what is summed"
    )
    MATRICES = "matrices are made whole; what split them splits a dimension before"
    KNOWN = "no array: a number, a dtype or a text"
    WHOLE = "the same array on all workers"


RULES: dict[Any, Rule] = {}
"""By function its rule. `np.ufunc` stands for all ufuncs, None for all functions that are not here."""
