"""The structure of a tree as JSON, and the names of its leaves.

A name is the path of a leaf, joined by dots: `params.0.weight`. A leaf is an array, which the manifest lists by its
name, or a constant, which stands in the structure: a number, a string, bytes or None.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from spmd import optim
from spmd.autodiff import tree
from spmd.errors import CheckpointError, describe

__all__ = [
    "ROOT",
    "constant",
    "decoded",
    "encoded",
    "filled",
    "is_constant",
    "joined",
    "json_nodes",
    "map_leaves",
    "shown_node",
    "some",
]

ROOT = "value"
"""The name of a tree that is one leaf."""
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def is_constant(x: Any) -> bool:
    return type(x) in _CONSTANTS


def joined(name: str, key: Any) -> str:
    """The name of a child."""
    return f"{name}.{key}" if name else str(key)


def encoded(node: Any, leaf: Callable[[str, Any], Any], where: str, name: str = "") -> Any:
    """A tree as JSON. leaf(name, x): the JSON of a leaf that is no constant. name: of the root."""
    names: set[str] = set()

    def note(name: str) -> None:
        if name in names:
            raise CheckpointError.at(
                where,
                argument="tree",
                got=f"two nodes with the name {name!r}: dots in keys count as steps of the path",
                need="a name of its own for each leaf and each node above",
                mend="rename one of the keys",
            )
        names.add(name)

    def encode(name: str, x: Any) -> Any:
        level = _level(x)
        note(name or (ROOT if level is None else ""))
        if level is not None:
            keys, values, _ = level
            if isinstance(x, dict):
                _check_keys(keys, where, name)
            return _node(x, [[key, encode(joined(name, key), child)] for key, child in zip(keys, values, strict=True)])
        name = name or ROOT
        return _constant_json(x, where, name) if is_constant(x) else leaf(name, x)

    return encode(name, node)


def _level(x: Any) -> Any:
    """The keys and children of a node, and the function that makes such a node of others; None for a leaf."""
    if is_constant(x):
        return None
    if type(x) is Counter:
        return [*x], [*x.values()], lambda children: Counter(dict(zip(x, children, strict=True)))
    return tree.one_level(x)


def _check_keys(keys: Any, where: str, name: str) -> None:
    for key in keys:
        if type(key) not in (str, int):
            raise CheckpointError.at(
                where,
                argument=f"tree, at {name or 'the root'}",
                got=f"the key {describe(key)}",
                need="strings and integers as keys of dictionaries",
                mend="str(key)",
            )
        if type(key) is str and any("\ud800" <= c <= "\udfff" for c in key):
            raise CheckpointError.at(
                where,
                argument=f"tree, at {name or 'the root'}",
                got=f"the key {key!r}, which is no text of Unicode",
                need="keys that other tools can read, as UTF-8",
                mend="key.encode(errors='surrogateescape').decode(errors='replace')",
            )


def _node(x: Any, items: list[list[Any]]) -> Any:
    """The JSON of a node: an object of one entry, which names the kind. Keys stand beside the children, in order."""
    if isinstance(x, dict):
        return {"counter" if type(x) is Counter else "dict": items}
    if hasattr(x, "_fields"):
        return {"namedtuple": {"name": type(x).__name__, "module": type(x).__module__, "items": items}}
    if isinstance(x, tuple | list):
        return {"tuple" if isinstance(x, tuple) else "list": [child for _, child in items]}
    return {
        "object": {"name": f"{type(x).__module__}.{type(x).__qualname__}", "items": [[str(k), c] for k, c in items]}
    }


def _digits(x: int, where: str, name: str) -> str:
    try:
        return str(x)
    except ValueError as error:
        raise CheckpointError.at(
            where,
            argument=f"tree, the leaf {name!r}",
            got=f"an integer of {x.bit_length()} bits: {error}",
            need="an integer of at most 4300 digits",
            mend="x.to_bytes(-(-x.bit_length() // 8))",
        ) from None


def _constant_json(x: Any, where: str, name: str) -> Any:
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": repr(x)}
    if type(x) is int and abs(x) >= 1 << 53:  # readers of JSON may take numbers for float64
        return {"int": _digits(x, where, name)}
    if isinstance(x, complex):
        return {"complex": [repr(x.real), repr(x.imag)]}
    if isinstance(x, bytes):
        return {"bytes": base64.b64encode(x).decode()}
    return x


def filled(node: Any, parts: Mapping[str, Any]) -> Any:
    """The JSON of a tree in which parts stand for nodes that name them. Entries of dictionaries that have no part, as
    no member holds them, are left out."""
    items = _items(node)
    if items is None:
        return node
    ((kind, value),) = node.items()
    found = []
    for key, child in items:
        part = child.get("held") if isinstance(child, dict) else None
        if part is None or part in parts:
            found.append([key, filled(child if part is None else parts[part], parts)])
    if kind in ("tuple", "list"):
        return {kind: [child for _, child in found]}
    return {kind: found if isinstance(value, list) else {**value, "items": found}}


def constant(node: Any) -> Any:
    """A constant of its JSON."""
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "complex":
        return complex(*map(float, value))
    if kind not in ("int", "float"):
        raise ValueError(f"a node of the unknown kind {kind!r}")
    return int(value) if kind == "int" else float(value)


def _items(node: Any) -> list[list[Any]] | None:
    """The keys of a JSON node and its children; None for a leaf."""
    if not isinstance(node, dict):
        return None
    ((kind, value), *_) = node.items()
    if kind in ("tuple", "list"):
        return [[k, child] for k, child in enumerate(value)]
    return value["items"] if kind in ("namedtuple", "object") else value if kind in ("dict", "counter") else None


def json_nodes(node: Any, name: str = "") -> Iterator[tuple[str, Any, bool]]:
    """The names of all nodes of a tree as JSON, their JSON, and whether they are leaves."""
    items = _items(node)
    yield name or (ROOT if items is None else ""), node, items is None
    for key, child in items or ():
        yield from json_nodes(child, joined(name, key))


def shown_node(node: Any) -> str:
    """A node that is no leaf in messages: its kind and its keys, in order."""
    ((kind, value),) = node.items()
    of_class = f" {value['name']}" if kind in ("namedtuple", "object") else ""
    keys = ", ".join(repr(key) for key, _ in _items(node) or ())
    return f"a {kind}{of_class} of {keys or 'nothing'}"


def decoded(node: Any, array: Callable[[Any], Any]) -> Any:
    """The tree of its JSON. array(node): the array of a leaf.

    Named tuples of spmd.optim are of their class, others of a new class with their fields; other classes become
    dictionaries: to import a class that a file names would be to run what the file says.
    """
    items = _items(node)
    if items is None:
        return array(node) if isinstance(node, dict) and "array" in node else constant(node)
    ((kind, value),) = node.items()
    children = {key: decoded(child, array) for key, child in items}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(children.values())
    if kind == "namedtuple":
        return _named_tuple(value["module"], value["name"], tuple(children))(*children.values())
    return Counter(children) if kind == "counter" else children


@lru_cache(maxsize=256)
def _named_tuple(module: str, name: str, fields: tuple[str, ...]) -> Any:
    known = getattr(optim, name) if module == optim.__name__ and name in optim.__all__ else None
    return known if getattr(known, "_fields", None) == fields else namedtuple(name, fields, rename=True)


def map_leaves(node: Any, f: Callable[[str, Any], Any], name: str = "") -> Any:
    """The tree of f(name, leaf) for each leaf, constants among them."""
    level = _level(node)
    if level is None:
        return f(name or ROOT, node)
    keys, values, rebuild = level
    return rebuild([map_leaves(child, f, joined(name, key)) for key, child in zip(keys, values, strict=True)])


def some(names: Iterable[str]) -> str:
    """Names in messages: the first eight, and how many more there are."""
    names = list(names)
    shown = ", ".join(map(repr, names[:8]))
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
