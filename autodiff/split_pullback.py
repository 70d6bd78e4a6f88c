"""Pullbacks in two parts: first the cotangents of some arguments, later those of the rest.

A pipeline sends the gradient of a stage's input as early as it can, and computes those of the parameters when it would
wait otherwise. What leads from the result to the input is swept first. Where a rule leads from there to the rest, it is
kept with its cotangent, and runs in the second sweep. So each rule runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.autodiff import tree
from spmd.autodiff.backward import sweep
from spmd.autodiff.cotangent_matching import match_cotangents
from spmd.autodiff.primitive import Primitive
from spmd.autodiff.tape import Bundle, Node, Tape, recording
from spmd.autodiff.transform_arguments import held, lift_all, lower, name_of, on
from spmd.autodiff.transforms import pulled, settled, traced_result

__all__ = ["split_pullback_of"]

_PLAIN = Primitive(None, "a part of a rule", rules=())


def split_pullback_of(fun: Callable[..., Any], first: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, Callable]:
    """fun(*first, *rest), and its pullback: of a cotangent it gives those of `first`, and a function without arguments
    that gives those of `rest`. Both serve once."""
    where = f"vjp of {name_of(fun)}"
    with recording(False) as tape:
        lifted, treedef = lift_all(tape, (*first, *rest), where, lambda: "primals")
        out, _ = traced_result(fun(*tree.unflatten(treedef, lifted)), False, tape, where)
    outs, out_tree = tree.flatten(out)
    count = len(tree.flatten(tuple(first))[0])
    early, late = lifted[:count], lifted[count:]
    trees = tree.flatten(tuple(first))[1], tree.flatten(tuple(rest))[1]

    def pullback(cotangent: Any) -> tuple[Any, Callable[[], Any]]:
        gs = match_cotangents(cotangent, outs, out_tree, where)
        seeds = [(held(o).node, g) for o, g in zip(outs, gs, strict=True) if on(held(o), tape)]
        inside = {held(x).node for x in early if on(held(x), tape)}
        rules = _postponed(tape, inside)
        nodes = [held(x).node for x in (*early, *late) if on(held(x), tape)]
        split = len([x for x in early if on(held(x), tape)])
        found = sweep(tape, [seed for seed in seeds if seed[0] in inside], nodes, free=False)
        tape.nodes[:] = [node for node in tape.nodes if node not in inside]
        pending = [seed for seed in seeds if seed[0] not in inside]
        pending += [(node, g) for node, g in zip(nodes[split:], found[split:], strict=True) if g is not None]

        def later() -> Any:
            for rule in rules:
                pending.extend(rule.run())
            rules.clear()
            return tree.unflatten(trees[1], pulled(tape, pending, late, free=True))

        return tree.unflatten(trees[0], settled(tape, early, found[:split])), later

    return tree.unflatten(out_tree, [lower(o, tape) for o in outs]), pullback


class _Postponed:
    """The rules of a node that lead to arguments which come later. g: the cotangent of the node, once it has come."""

    __slots__ = ("args", "g", "kwargs", "results", "rules")

    def __init__(self, node: Node, rules: list[tuple[Node, Callable[..., Any]]]):
        self.args, self.kwargs, self.rules = node.args, node.kwargs, rules
        self.results: Any = getattr(node, "results", None)
        self.g: Any = None

    def keeping(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """A rule of the same node that runs in the first sweep: it keeps the cotangent."""

        def kept(g: Any, *args: Any, **kwargs: Any) -> Any:
            self.g = g
            return rule(g, *args, **kwargs)

        return kept

    def run(self) -> list[tuple[Node, Any]]:
        """The cotangents that the rules give, by node."""
        if self.g is None:
            return []
        g = self.g.filled(self.results) if type(self.g) is Bundle else self.g
        return [(parent, rule(g, *self.args, **self.kwargs)) for parent, rule in self.rules]


def _postponed(tape: Tape, inside: set[Node]) -> list[_Postponed]:
    """Take the rules out of the tape that lead from what depends on `inside` to what does not. Adds to `inside` all
    that depends on it. Rules that give several cotangents at once, or communicate, stay."""
    found = []
    for node in tape.nodes:
        among = [parent in inside for parent in node.parents]
        if not any(among):
            continue
        inside.add(node)
        prim = node.prim
        if all(among) or prim.joint is not None or prim.sums or prim.defer is not None or len(node.pulls) != len(among):
            continue
        pairs = list(zip(node.parents, node.pulls, among, strict=True))
        postponed = _Postponed(node, [(parent, pull) for parent, pull, is_inside in pairs if not is_inside])
        kept = [(parent, pull) for parent, pull, is_inside in pairs if is_inside]
        node.parents = tuple(parent for parent, _ in kept)
        node.pulls = (postponed.keeping(kept[0][1]), *(pull for _, pull in kept[1:]))
        node.prim = _PLAIN
        found.append(postponed)
    return found
