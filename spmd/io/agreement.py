"""What members write together: the structure and the arrays of a tree, which must be the same on all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from spmd.errors import CheckpointError
from spmd.io.members import Members
from spmd.io.sources import Source, source_of
from spmd.io.states import handler_of
from spmd.io.trees import encoded, json_nodes, map_leaves
from spmd.io.writing import digest_of_box
from spmd.transport.base import checks_are_on

__all__ = ["Contents"]


class Contents:
    """The contents of a tree, in which the states of objects stand for the objects.

    tree: its structure as JSON. sources: its arrays, by name. options: what else must be equal on all members, JSON.
    """

    def __init__(self, tree: Any, members: Members, options: Mapping[str, Any]):
        self.members = members
        self.options = options
        self.sources: dict[str, Source] = {}
        self.tree = encoded(_with_states(tree), self._leaf, members.where)

    def _leaf(self, name: str, x: Any) -> Any:
        source = self.sources[name] = source_of(x, self.members.where, name, self.members)
        return {"array": name, **({"kind": source.kind} if source.kind else {})}

    def _shapes(self) -> list[Any]:
        return [[name, s.shape, s.dtype.name, s.layout] for name, s in self.sources.items()]

    def _replicas(self) -> dict[str, list[tuple[str, str]]]:
        """By the members that hold copies, the names of the arrays whose copies these are, with digests of them."""
        replicas: dict[str, list[tuple[str, str]]] = {}
        for name, source in self.sources.items() if checks_are_on() else ():
            for box, holders in source.holders.items() if source.is_replica else ():
                if len(holders) > 1 and self.members.own in holders:
                    replicas.setdefault(str(holders), []).append((name, digest_of_box(source, box)))
        return replicas

    def digests(self) -> dict[str, Any]:
        """What must be equal on all members, and by groups of members what must be equal on these."""
        return {
            "plan": _digest([self.tree, self.options, self._shapes()]),
            "replicas": {holders: _digest(copies) for holders, copies in self._replicas().items()},
        }

    def agree(self, agreed: list[dict[str, Any]]) -> None:
        """Raise if the digests of the members differ. All find the same difference."""
        other = next((m for m, a in enumerate(agreed) if a["plan"] != agreed[0]["plan"]), None)
        if other is not None:
            shown = self.members.share(self._shown())
            self._raise_difference(0, other, shown[0], shown[other], "{0} on {1} and {2} on {3}")
        first: dict[str, int] = {}
        for member, digests in enumerate(a["replicas"] for a in agreed):
            for holders, digest in digests.items():
                one = first.setdefault(holders, member)
                if digest != agreed[one]["replicas"][holders]:
                    shown = self.members.share(self._replicas().get(holders, []))
                    self._raise_difference(
                        one, member, shown[one], shown[member], "values that differ between {1} and {3}"
                    )

    def _shown(self) -> list[tuple[str, str]]:
        leaves = [(name, json.dumps(node)) for name, node, is_leaf in json_nodes(self.tree) if is_leaf]
        arrays = [(name, f"{dtype}{list(shape)} {layout}".strip()) for name, shape, dtype, layout in self._shapes()]
        return [*leaves, *arrays, *((name, json.dumps(value)) for name, value in self.options.items())]

    def _raise_difference(self, one: int, other: int, shown: list[Any], others: list[Any], got: str) -> None:
        """Raise for the first leaf that two members show in different words."""
        first, second = dict(map(tuple, shown)), dict(map(tuple, others))
        name = next((n for n in [*first, *second] if first.get(n) != second.get(n)), "")
        texts = [values.get(name, "no such leaf") for values in (first, second)]
        describe = self.members.describe
        raise CheckpointError.at(
            self.members.where,
            argument=name if name in self.options else f"tree, the leaf {name!r}",
            got=got.format(texts[0], describe(one), texts[1], describe(other)),
            need="the same on all: bare arrays, numbers, strings and copies of a block count as one value",
            mend="spmd.from_blocks makes a global array of blocks that differ; in bodies of PyTorch "
            "spt.PartitionedTensor.from_block(x, spec)",
        )


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
