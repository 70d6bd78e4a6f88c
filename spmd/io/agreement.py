"""What members write together: the structure and the arrays of a tree, which must be the same on all of them, or on
those that hold a part of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from spmd.errors import CheckpointError
from spmd.io.members import Members
from spmd.io.sources import Source, described, source_elsewhere, source_of
from spmd.io.states import Held, handler_of
from spmd.io.trees import encoded, filled, json_nodes, map_leaves, shown_node
from spmd.io.writing import digest_of_box
from spmd.transport.base import checks_are_on

__all__ = ["Contents"]


class _Part(NamedTuple):
    """What only some members hold: its tree as JSON, and its arrays."""

    members: tuple[int, ...]
    tree: Any
    arrays: dict[str, Any]


class Contents:
    """The contents of a tree, in which the states of objects stand for the objects.

    tree: its structure as JSON. sources: its arrays, by name. Until `agree` has ended these are without what other
    members hold. parts: what this member and some others hold. options: what else must be equal on all, JSON.
    """

    def __init__(self, tree: Any, members: Members, options: Mapping[str, Any]):
        self.members = members
        self.options = options
        self.sources: dict[str, Source] = {}
        self.parts: dict[str, _Part] = {}
        self.tree = encoded(_with_states(tree), self._leaf, members.where)

    def _leaf(self, name: str, x: Any) -> Any:
        if isinstance(x, Held):
            if x.workers:
                self._note_part(name, x)
            return {"held": name}
        source = self.sources[name] = source_of(x, self.members.where, name, self.members)
        return {"array": name, **({"kind": source.kind} if source.kind else {})}

    def _note_part(self, name: str, x: Held) -> None:
        outer, self.sources = self.sources, {}
        tree = encoded(x.value, self._leaf, self.members.where, name)
        members = self.members.holders(x.workers)
        for source in self.sources.values():
            source.holders = {box: tuple(m for m in held if m in members) for box, held in source.holders.items()}
        self.parts[name] = _Part(members, tree, {n: described(source) for n, source in self.sources.items()})
        outer.update(self.sources)
        self.sources = outer

    def _shapes(self) -> list[Any]:
        in_parts = {name for part in self.parts.values() for name in part.arrays}
        return [[name, s.shape, s.dtype.name, s.layout] for name, s in self.sources.items() if name not in in_parts]

    def constants(self) -> list[str]:
        """The names of the leaves that are no arrays."""
        trees = {"": self.tree, **{name: part.tree for name, part in self.parts.items()}}
        nodes = [each for name, tree in trees.items() for each in json_nodes(tree, name)]
        is_array = lambda node: isinstance(node, dict) and ("array" in node or "held" in node)
        return [name for name, node, is_leaf in nodes if is_leaf and not is_array(node)]

    def _copies(self) -> dict[str, list[tuple[str, str]]]:
        """By the members that hold the same, what must be equal on them, by the argument in a message: the structure of
        their parts, and digests of copies."""
        copies: dict[str, list[tuple[str, str]]] = {}
        for name, part in self.parts.items():
            text = json.dumps([part.tree, part.arrays])
            copies.setdefault(str(part.members), []).append((f"tree, at {name}", text))
        for name, source in self.sources.items() if checks_are_on() else ():
            for box, holders in source.holders.items() if source.is_replica else ():
                if len(holders) > 1 and self.members.own in holders:
                    digest = digest_of_box(source, box)
                    copies.setdefault(str(holders), []).append((_leaf_argument(name), digest))
        return copies

    def digests(self) -> dict[str, Any]:
        """What must be equal on all members, and by groups of members what must be equal on these; and the parts of
        which this member is the first."""
        own = self.members.own
        return {
            "plan": _digest([self.tree, self.options, self._shapes()]),
            "copies": {holders: _digest(copies) for holders, copies in self._copies().items()},
            "parts": {name: [part.tree, part.arrays] for name, part in self.parts.items() if part.members[0] == own},
        }

    def agree(self, agreed: list[dict[str, Any]]) -> None:
        """Raise if the digests of the members differ. All find the same difference. Then add what others hold."""
        other = next((m for m, a in enumerate(agreed) if a["plan"] != agreed[0]["plan"]), None)
        if other is not None:
            shown = self.members.share(self._shown())
            self._raise_difference(0, other, shown[0], shown[other], "{0} on {1} and {2} on {3}")
        first: dict[str, int] = {}
        for member, digests in enumerate(a["copies"] for a in agreed):
            for holders, digest in digests.items():
                one = first.setdefault(holders, member)
                if digest != agreed[one]["copies"][holders]:
                    shown = self.members.share(self._copies().get(holders, []))
                    self._raise_difference(
                        one, member, shown[one], shown[member], "values that differ between {1} and {3}"
                    )
        self._add_parts({name: part for a in agreed for name, part in a["parts"].items()})

    def _add_parts(self, parts: Mapping[str, Any]) -> None:
        self.tree = filled(self.tree, {name: tree for name, (tree, _) in parts.items()})
        own, arrays = self.sources, {name: text for _, each in parts.values() for name, text in each.items()}
        nodes = [node for _, node, is_leaf in json_nodes(self.tree) if is_leaf and isinstance(node, dict)]
        names = [node["array"] for node in nodes if "array" in node]
        self.sources = {name: own[name] if name in own else source_elsewhere(*arrays[name]) for name in names}

    def _shown(self) -> list[tuple[str, str]]:
        """In words, what must be equal on all members: by the argument in a message."""
        nodes = [*json_nodes(self.tree)]
        leaves = [(_leaf_argument(name), json.dumps(node)) for name, node, is_leaf in nodes if is_leaf]
        arrays = [
            (_leaf_argument(name), f"{dtype}{list(shape)} {layout}".strip())
            for name, shape, dtype, layout in self._shapes()
        ]
        options = [(name, json.dumps(value)) for name, value in self.options.items()]
        inner = [(f"tree, at {name or 'the root'}", shown_node(node)) for name, node, is_leaf in nodes if not is_leaf]
        return [*leaves, *arrays, *options, *inner]

    def _raise_difference(self, one: int, other: int, shown: list[Any], others: list[Any], got: str) -> None:
        """Raise for the first argument that two members show in different words."""
        first, second = dict(map(tuple, shown)), dict(map(tuple, others))
        argument = next((a for a in [*first, *second] if first.get(a) != second.get(a)), "tree")
        texts = [values.get(argument, "no such leaf") for values in (first, second)]
        describe = self.members.describe
        if argument.startswith("tree, at "):
            raise CheckpointError.at(
                self.members.where,
                argument=argument,
                got=got.format(texts[0], describe(one), texts[1], describe(other)),
                need="the same nodes on all, with keys in the same order",
                mend="dict(sorted(tree.items()))",
            )
        raise CheckpointError.at(
            self.members.where,
            argument=argument,
            got=got.format(texts[0], describe(one), texts[1], describe(other)),
            need="the same on all: bare arrays, numbers, strings and copies of a block count as one value",
            mend="spmd.from_blocks makes a global array of blocks that differ; in bodies of PyTorch "
            "spt.PartitionedTensor.from_block(x, spec)",
        )


def _leaf_argument(name: str) -> str:
    return f"tree, the leaf {name!r}"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _with_states(tree: Any) -> Any:
    """A tree with the states of objects in place of the objects."""
    objects: dict[str, Any] = {}

    def note(name: str, x: Any) -> None:
        if handler_of(x) is not None:
            objects[name] = x

    map_leaves(tree, note)
    if not objects:
        return tree

    def state(name: str, x: Any) -> Any:
        handler = handler_of(x) if name in objects else None
        return x if handler is None else handler.save(x, objects)

    return map_leaves(tree, state)
