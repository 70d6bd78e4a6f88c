"""Pytrees: nested tuples, lists, dicts and registered classes, with arrays as leaves.

The one place that names the library behind them. A class of your own becomes a pytree by `spmd.tree.register`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from spmd.errors import message
from spmd.tracebacks import api_boundary

__all__ = [
    "flatten",
    "flatten_with_path",
    "leaves",
    "map",
    "paths",
    "prefix",
    "register",
    "shown_paths",
    "structure",
    "unflatten",
]


class _Late:
    """The library behind, imported when it is first asked for something: it is a third of what importing spmd costs."""

    def __getattr__(self, name: str) -> Any:
        global optree
        optree = importlib.import_module("optree")
        return getattr(optree, name)


optree: Any = _Late()

_OURS: Any = {"namespace": "spmd"}
"""Where classes are registered: other programs that use the library behind may see them otherwise."""

_LEAVES: list[Any] = [None, None]
"""The structures of a leaf alone, where None is none and where it is one, once one was met."""

ALONE: set[type] = {np.ndarray}
"""Classes of arrays, which are leaves by themselves."""

Class = TypeVar("Class", bound=type)


def register(cls: Class, flatten: Callable | None = None, unflatten: Callable | None = None) -> Class:
    """Make a class a pytree, whose leaves are differentiated, mapped and moved: `@spmd.tree.register` on a dataclass.

    flatten(x) -> (children, metadata), unflatten(metadata, children) -> x, as jax.tree_util.register_pytree_node has
    them; metadata can be compared and hashed. Without them cls is a dataclass: its fields are the children, those with
    `field(metadata={"static": True})` are metadata. Gives cls back. Raises TypeError for other classes, ValueError for
    a class that is registered already.
    """
    if flatten is None or unflatten is None:
        flatten, unflatten = _of_fields(cls)
    optree.register_pytree_node(cls, flatten, unflatten, **_OURS)
    return cls


def _of_fields(cls: type) -> tuple[Callable, Callable]:
    """How a dataclass is taken apart and put together."""
    import dataclasses

    if not dataclasses.is_dataclass(cls):
        raise TypeError(
            message(
                "spmd.tree.register",
                argument="cls",
                got=f"class {cls.__qualname__}",
                need="a dataclass, or flatten and unflatten",
                mend="register(cls, lambda x: ((x.a, x.b), None), lambda _, children: cls(*children))",
            )
        )
    fields = [f for f in dataclasses.fields(cls) if f.init]
    moved = tuple(f.name for f in fields if not f.metadata.get("static"))
    fixed = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(x):
        return [getattr(x, name) for name in moved], tuple(getattr(x, name) for name in fixed), moved

    def unflatten(metadata, children):
        return cls(**dict(zip(fixed, metadata, strict=True)), **dict(zip(moved, children, strict=True)))

    return flatten, unflatten


def flatten(tree: Any, *, none_is_leaf: bool = False) -> tuple[list[Any], Any]:
    """The leaves of a tree, and its structure. Dictionaries go by sorted keys."""
    if type(tree) in ALONE or (none_is_leaf and tree is None):
        return [tree], _leaf(none_is_leaf)
    found, structure = optree.tree_flatten(tree, none_is_leaf=none_is_leaf, **_OURS)
    return found, structure


def _leaf(none_is_leaf: bool) -> Any:
    found = _LEAVES[none_is_leaf]
    if found is None:
        found = _LEAVES[none_is_leaf] = optree.tree_structure(0, none_is_leaf=none_is_leaf, **_OURS)
    return found


def is_leaf(structure: Any) -> bool:
    """Whether this is known to be the structure of a leaf alone."""
    return structure is not None and (structure is _LEAVES[1] or structure is _LEAVES[0])


def unflatten(structure: Any, leaves: Iterable[Any]) -> Any:
    """The tree of this structure with these leaves."""
    if is_leaf(structure):
        (leaf,) = leaves
        return leaf
    return optree.tree_unflatten(structure, leaves)


def flatten_with_path(tree: Any, *, none_is_leaf: bool = False) -> tuple[list[str], list[Any], Any]:
    """As `flatten`, with the path of each leaf before: `['w'][0]`."""
    found, structure = flatten(tree, none_is_leaf=none_is_leaf)
    return shown_paths(structure), found, structure


def shown_paths(structure: Any) -> list[str]:
    """The path of each leaf of a structure: `['w'][0]`."""
    return ["".join(f"[{p!r}]" for p in path) for path in optree.treespec_paths(structure)]


def paths(tree: Any) -> list[tuple[Any, ...]]:
    """The path of each leaf, as its keys and indices."""
    return optree.tree_paths(tree, **_OURS)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree."""
    return optree.tree_leaves(tree, **_OURS)


def structure(tree: Any, *, none_is_leaf: bool = False) -> Any:
    """The structure of a tree."""
    if type(tree) in ALONE or (none_is_leaf and tree is None):
        return _leaf(none_is_leaf)
    return optree.tree_structure(tree, none_is_leaf=none_is_leaf, **_OURS)


@api_boundary
def map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """f of each leaf (and of its counterparts in trees of the same structure), as a tree.

    f may wait for other workers: no C++ frame lies beneath it, and those do not survive a switch of greenlets.
    """
    found, structure = flatten(tree)
    others = [structure.flatten_up_to(t) for t in rest]
    return unflatten(structure, [f(*xs) for xs in zip(found, *others, strict=True)])


def prefix(shorter: Any, tree: Any) -> list[Any]:
    """For each leaf of a tree the leaf of a shorter tree that stands for it. None is a leaf. ValueError: no prefix."""
    return optree.broadcast_prefix(shorter, tree, none_is_leaf=True, **_OURS)
