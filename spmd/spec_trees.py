"""Trees of specs: the spec that applies to each array in a tree of arguments or results."""

from __future__ import annotations

from typing import Any, NamedTuple

from spmd.autodiff import tree
from spmd.errors import SpecError
from spmd.layout import Spec

__all__ = ["REQUIRED", "Leaf", "shown", "spec_leaves", "spread"]

REQUIRED: Any = object()
"""The default of a spec that must be given."""


class Leaf(NamedTuple):
    """One array of a tree: its path from the argument's name, the spec that applies to it, and its value."""

    path: str
    spec: Spec | None
    value: Any


def spec_leaves(specs) -> list[tuple[str, Any]]:
    """The specs of a tree of specs, each with its path."""
    paths, leaves, _ = tree.flatten_with_path(specs, none_is_leaf=True)
    return list(zip(paths, leaves, strict=True))


def spread(where: str, name: str, argument: str, specs, value) -> list[Leaf]:
    """The leaves of a value, each with the spec that applies to it; specs are a prefix of its tree."""
    if specs is None or isinstance(specs, Spec):  # one spec: the tree need not be compared
        if value is None:
            return [Leaf(name, None, None)]
        if hasattr(value, "shape") or isinstance(value, int | float | complex):
            return [Leaf(name, specs, value)]
        leaves, structure = tree.flatten(value, none_is_leaf=True)
        paths = tree.shown_paths(structure)
        return [Leaf(name + p, None if x is None else specs, x) for p, x in zip(paths, leaves, strict=True)]
    try:
        each = tree.prefix(specs, value)
    except ValueError:
        raise SpecError.at(
            where,
            argument=f"{argument}, for {name!r}",
            got=f"{_structure(specs)}: {_misfit(specs, value, name)}",
            need=f"one spec, or a tree of specs that is a prefix of {_structure(value)}",
            mend="write a spec for the whole, or one for each part of it",
        ) from None
    paths, leaves, _ = tree.flatten_with_path(value, none_is_leaf=True)
    return [
        Leaf(name + path, None if leaf is None else spec, leaf)
        for path, spec, leaf in zip(paths, each, leaves, strict=True)
    ]


def _structure(value) -> str:
    """The structure of a pytree as messages show it, * for a leaf."""
    return shown(tree.structure(value, none_is_leaf=True))


def shown(treedef) -> str:
    """The structure of a pytree as messages show it."""
    if tree.is_leaf(treedef):
        return "*"
    text = str(treedef)
    text = text.removeprefix("PyTreeSpec(").removesuffix(")").removesuffix(", NoneIsLeaf")
    return text if len(text) <= 200 else text[:197] + "..."


def _misfit(specs, value, path: str) -> str:
    """The first place where a tree of specs is no prefix of the tree of a value, and why."""
    if isinstance(specs, dict) and isinstance(value, dict):
        for names, text in ((specs, "{} has no {!r}"), (value, "{}[{!r}] has no spec")):
            missing = [k for k in names if k not in specs or k not in value]
            if missing:
                return text.format(path, missing[0])
        inside = [(f"[{k!r}]", specs[k], value[k]) for k in specs]
    elif isinstance(specs, tuple | list) and type(specs) is type(value):
        if len(specs) != len(value):
            return f"{path} has {len(value)} entries for {len(specs)} specs"
        names = getattr(value, "_fields", None)
        steps = [f"[{k}]" for k in range(len(value))] if names is None else [f".{name}" for name in names]
        inside = list(zip(steps, specs, value, strict=True))
    else:
        return f"{path} is {_a(type(value).__name__)}, its specs {_a(type(specs).__name__)}"
    misfits = (_misfit(s, v, path + step) for step, s, v in inside if s is not None and not isinstance(s, Spec))
    return next((text for text in misfits if text), "")


def _a(noun: str) -> str:
    return f"a{'n' * (noun[0] in 'aeiouAEIOU' or noun.startswith('nd'))} {noun}"
