"""Pytrees: nested tuples, lists, dicts and registered classes, with arrays as leaves.

The one place that names the library behind them. A class of your own becomes a pytree by `spmd.tree.register`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from spmd.errors import message
from spmd.tracebacks import api_boundary

__all__ = [
    "Described",
    "Leaf",
    "dotted_paths",
    "flatten",
    "flatten_with_path",
    "leaf_positions",
    "leaves",
    "map",
    "one_level",
    "paths",
    "prefix",
    "register",
    "shown_paths",
    "structure",
    "unflatten",
]


class _LazyOptree:
    """optree, imported at its first use: its import takes a third of the time of `import spmd`."""

    def __getattr__(self, name: str) -> Any:
        global optree
        optree = importlib.import_module("optree")
        return getattr(optree, name)


optree: Any = _LazyOptree()

_NAMESPACE: Any = {"namespace": "spmd"}
"""The namespace of our registrations in optree, apart from those of other programs."""

_LEAF_STRUCTURES: list[Any] = [None, None]
"""The structures of a single leaf, by none_is_leaf, once they are known."""

LEAF_TYPES: set[type] = {np.ndarray}
"""Classes of arrays, which are leaves."""

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
    optree.register_pytree_node(cls, flatten, unflatten, **_NAMESPACE)
    return cls


def _of_fields(cls: type) -> tuple[Callable, Callable]:
    """flatten and unflatten of a dataclass."""
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
    if type(tree) in LEAF_TYPES or (none_is_leaf and tree is None):
        return [tree], _leaf(none_is_leaf)
    return optree.tree_flatten(tree, none_is_leaf=none_is_leaf, **_NAMESPACE)


def _leaf(none_is_leaf: bool) -> Any:
    leaf = _LEAF_STRUCTURES[none_is_leaf]
    if leaf is None:
        leaf = _LEAF_STRUCTURES[none_is_leaf] = optree.tree_structure(0, none_is_leaf=none_is_leaf, **_NAMESPACE)
    return leaf


def one_level(node: Any) -> tuple[Sequence[Any], list[Any], Callable[[list[Any]], Any]] | None:
    """The keys of a node's children, the children, and the function that makes such a node of others; None for a leaf.

    Dictionaries keep their order. The keys of a named tuple are its fields.
    """
    if type(node) is dict:
        return [*node], [*node.values()], lambda children: dict(zip(node, children, strict=True))
    if type(node) in LEAF_TYPES or optree.tree_is_leaf(node, **_NAMESPACE):
        return None
    children, metadata, keys, unflatten = optree.tree_flatten_one_level(node, **_NAMESPACE)
    return getattr(node, "_fields", keys), children, lambda children: unflatten(metadata, children)


def is_leaf(structure: Any) -> bool:
    """Whether this is known to be the structure of a leaf alone."""
    return structure is not None and (structure is _LEAF_STRUCTURES[1] or structure is _LEAF_STRUCTURES[0])


def unflatten(structure: Any, leaves: Iterable[Any]) -> Any:
    """The tree of this structure with these leaves."""
    if is_leaf(structure):
        (leaf,) = leaves
        return leaf
    return optree.tree_unflatten(structure, leaves)


def flatten_with_path(tree: Any, *, none_is_leaf: bool = False) -> tuple[Sequence[str], list[Any], Any]:
    """As `flatten`, with the path of each leaf before: `['w'][0]`."""
    leaves, structure = flatten(tree, none_is_leaf=none_is_leaf)
    return shown_paths(structure), leaves, structure


def shown_paths(structure: Any) -> Sequence[str]:
    """The path of each leaf of a structure: `['w'][0].mean`."""
    try:
        return _shown_paths(structure)
    except (TypeError, ValueError):  # keys or metadata that cannot be hashed, or compared
        return _shown_paths.__wrapped__(structure)


@lru_cache(maxsize=1024)
def _shown_paths(structure: Any) -> Sequence[str]:
    return tuple(["".join([_step(entry) for entry in path]) for path in optree.treespec_accessors(structure)])


def _step(entry: Any) -> str:
    return f".{entry.field}" if isinstance(entry, optree.NamedTupleEntry) else f"[{entry.entry!r}]"


def dotted_paths(structure: Any) -> list[str]:
    """The path of each leaf of a structure, its keys, fields and indices joined by dots: `layers.0.bias`."""
    return [".".join([_key(entry) for entry in path]) for path in optree.treespec_accessors(structure)]


def _key(entry: Any) -> str:
    return str(entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry)


def paths(tree: Any) -> list[tuple[Any, ...]]:
    """The path of each leaf, as its keys and indices."""
    return optree.tree_paths(tree, **_NAMESPACE)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree."""
    return optree.tree_leaves(tree, **_NAMESPACE)


def structure(tree: Any, *, none_is_leaf: bool = False) -> Any:
    """The structure of a tree."""
    if type(tree) in LEAF_TYPES or (none_is_leaf and tree is None):
        return _leaf(none_is_leaf)
    return optree.tree_structure(tree, none_is_leaf=none_is_leaf, **_NAMESPACE)


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
    return optree.broadcast_prefix(shorter, tree, none_is_leaf=True, **_NAMESPACE)


# Which leaf of which tree


class Described:
    """A structure as all processes see it alike: its containers and keys in order, and the path of each leaf.

    text: `{'w': *, 'b': (*, None)}`, with an asterisk for each leaf. paths: `['w']`, `['b'][0]`. digest: of the text, a
    number that is the same in every process. Classes are named, and keys are shown, without the addresses of objects.
    What a registered class calls metadata is left out: it may differ between workers.
    """

    __slots__ = ("digest", "paths", "text")

    def __init__(self, text: str, paths: Iterable[str]):
        self.text = text
        self.paths = tuple(paths)
        self.digest = _digest(text)

    @classmethod
    def of(cls, structure: Any) -> Described:
        """The description of a structure of optree."""
        return cls(
            _text(structure), ("".join(f"[{_shown(k)}]" for k in path) for path in optree.treespec_paths(structure))
        )


class Leaf:
    """A leaf by its place in its tree. index: -1 stands for the tree as a whole. Leaves of equal digest are equal."""

    __slots__ = ("digest", "index", "tree")

    def __init__(self, tree: Described, index: int):
        self.tree = tree
        self.index = index
        self.digest = _digest(f"{tree.digest} {index}")

    @property
    def path(self) -> str:
        """How the leaf is reached; empty for the tree as a whole."""
        return self.tree.paths[self.index] if self.index >= 0 else ""

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Leaf) and self.digest == other.digest)

    def __hash__(self) -> int:
        return self.digest


def leaf_positions(structure: Any) -> tuple[Leaf | None, ...]:
    """The leaves of a structure, and the tree as a whole at the end; None for each where it is a leaf alone."""
    try:
        return _positions(structure)
    except TypeError:  # keys or metadata that cannot be hashed
        return _positions.__wrapped__(structure)


@lru_cache(maxsize=1024)
def _positions(structure: Any) -> tuple[Leaf | None, ...]:
    if structure.is_leaf():
        return None, None
    described = Described.of(structure)
    return *(Leaf(described, k) for k in range(structure.num_leaves)), Leaf(described, -1)


def _digest(text: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _text(structure: Any) -> str:
    parts: list[str] = []
    stack: list[Any] = [structure]
    while stack:  # trees may be deeper than Python's recursion
        top = stack.pop()
        if isinstance(top, str):
            parts.append(top)
        elif top.is_leaf():
            parts.append("*")
        elif top.type is type(None):
            parts.append("None")
        else:
            stack += reversed(_pieces(top))
    return "".join(parts)


def _pieces(node: Any) -> list[Any]:
    """The text pieces and children of a container, in order."""
    kind, children, keys = node.type, node.children(), [_shown(key) for key in node.entries()]
    if kind is tuple or kind is list:
        opening, closing = "()" if kind is tuple else "[]"
        names = [""] * len(children)
        closing = "," * (kind is tuple and len(children) == 1) + closing
    elif kind is dict:
        opening, closing, names = "{", "}", [f"{key}: " for key in keys]
    else:
        opening, closing = f"{kind.__qualname__}(", ")"
        fields = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
        names = [f"{key}=" for key in (fields or keys)]
    pieces: list[Any] = [opening]
    for k, (name, child) in enumerate(zip(names, children, strict=True)):
        pieces += [", " * (k > 0) + name, child]
    return [*pieces, closing]


def _shown(key: Any) -> str:
    """A key as text: equal keys of dictionaries have one text, in every process."""
    if isinstance(key, str):
        return str.__repr__(key)  # of an enumeration its value
    if isinstance(key, np.generic):
        key = key.item()
    if isinstance(key, bool | float) and key == key and abs(key) < float("inf") and key == int(key):
        key = int(key)
    if type(key) is tuple:
        return f"({', '.join(map(_shown, key))})"
    if isinstance(key, frozenset):
        return f"frozenset({sorted(map(_shown, key))})"  # whose order differs between processes
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(key))
