"""Pytrees: nested tuples, lists, dicts and registered classes, with arrays as leaves.

The one place that names the library behind them; a class of your own becomes a pytree by
`optree.register_pytree_node(cls, flatten, unflatten, namespace="")`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import optree

__all__ = ["flatten", "flatten_with_path", "leaves", "map", "paths", "prefix", "structure", "unflatten"]


LEAF: Any = optree.tree_structure(0)  # type: ignore[arg-type]
"""The structure of a leaf alone."""


def flatten(tree: Any, *, none_is_leaf: bool = False) -> tuple[list[Any], Any]:
    """The leaves of a tree, and its structure. Dictionaries go by sorted keys."""
    if type(tree) is np.ndarray and not none_is_leaf:
        return [tree], LEAF
    found, structure = optree.tree_flatten(tree, none_is_leaf=none_is_leaf)  # type: ignore[arg-type]
    return found, structure


def unflatten(structure: Any, leaves: Iterable[Any]) -> Any:
    """The tree of this structure with these leaves."""
    if structure is LEAF:
        (leaf,) = leaves
        return leaf
    return optree.tree_unflatten(structure, leaves)


def flatten_with_path(tree: Any, *, none_is_leaf: bool = False) -> tuple[list[str], list[Any], Any]:
    """As `flatten`, with the path of each leaf before: `['w'][0]`."""
    paths, found, structure = optree.tree_flatten_with_path(tree, none_is_leaf=none_is_leaf)
    return ["".join(f"[{p!r}]" for p in path) for path in paths], found, structure


def paths(tree: Any) -> list[tuple[Any, ...]]:
    """The path of each leaf, as its keys and indices."""
    return optree.tree_paths(tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree."""
    return optree.tree_leaves(tree)


def structure(tree: Any, *, none_is_leaf: bool = False) -> Any:
    """The structure of a tree."""
    return optree.tree_structure(tree, none_is_leaf=none_is_leaf)


def map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """f of each leaf (and of its counterparts in trees of the same structure), as a tree.

    f may wait for other workers: no C++ frame lies beneath it, and those do not survive a switch of greenlets.
    """
    found, structure = flatten(tree)
    others = [structure.flatten_up_to(t) for t in rest]
    return unflatten(structure, [f(*xs) for xs in zip(found, *others, strict=True)])


def prefix(shorter: Any, tree: Any) -> list[Any]:
    """For each leaf of a tree the leaf of a shorter tree that stands for it. None is a leaf. ValueError: no prefix."""
    return optree.broadcast_prefix(shorter, tree, none_is_leaf=True)
