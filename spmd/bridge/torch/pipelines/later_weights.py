"""The backward of a stage in two parts: first the gradient of its input, later those of its parameters.

The nodes of a graph that lead to the input form the path that the first part takes. A node on it that leads to
parameters beside it, such as a product of the input and a weight, is a fork: what arrives there is kept, and the second
part starts from the forks. So nothing on the path is computed twice. Where a parameter is reached from several forks,
the second part goes through the whole graph again. What runs backward only as a whole, as a compiled function does, has
no second part.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from spmd.bridge.torch.tensor import backward_scope

__all__ = ["LaterWeights"]

Gradients = Sequence[torch.Tensor | None]

_WHOLE = {"CompiledFunctionBackward", "CheckpointFunctionBackward"}
"""Nodes of torch that run once, for all their inputs."""


class LaterWeights:
    """The backward of one graph.

    edges, gradients: where it starts, and with what. node, anchor: of the input, as `Entry` has them; None where no
    gradient of it is wanted.
    """

    def __init__(self, edges: Sequence[GradientEdge], gradients: Gradients, node: Any, anchor: torch.Tensor | None):
        self.edges, self.gradients = edges, gradients
        roots = [edge.node for edge in edges]
        path, leaves, self.all = _explored(roots, node)
        self.anchor = anchor if any(root in path for root in roots) else None
        beside = [k for k, root in enumerate(roots) if root not in path]
        self.starts = [([edges[k] for k in beside], [gradients[k] for k in beside], _union(leaves, beside, roots))]
        self.forks = {
            fork: own
            for fork in path
            if fork is not node
            and (own := [*dict.fromkeys(p for child in _next(fork) if child not in path for p in leaves[child])])
        }
        self.is_whole = any(type(n).__name__ in _WHOLE for n in leaves)
        counted = [p for own in (*self.forks.values(), self.starts[0][2]) for p in own]
        self.is_tree = len(counted) == len(set(counted))

    def agree(self, highest: Callable[[int], int]) -> None:
        """Take the way of those workers of the stage that can split the least: collectives in backward are the same on
        all. Graphs differ where each worker has experts of its own. highest: of a number, over these workers."""
        number = highest(2 if self.is_whole else 0 if self.is_tree else 1)
        self.is_whole, self.is_tree = number == 2, number == 0

    def input(self) -> None:
        """The first part: compute the gradient of the input."""
        if self.is_whole:
            _run(self.edges, self.gradients, None)
        if self.anchor is None or self.is_whole:
            return
        arrived: dict[Any, Gradients] = {}
        handles = []
        if self.is_tree:
            handles = [fork.register_prehook(lambda gs, fork=fork: arrived.update({fork: gs})) for fork in self.forks]
        try:
            _run(self.edges, self.gradients, [self.anchor], retain_graph=bool(self.all))
        finally:
            for handle in handles:
                handle.remove()
        if self.is_tree:
            for fork, gs in arrived.items():
                given = [k for k, g in enumerate(gs) if g is not None]
                self.starts.append(([GradientEdge(fork, k) for k in given], [gs[k] for k in given], self.forks[fork]))

    def weights(self) -> None:
        """The second part: add the gradients of parameters to their `.grad`."""
        if self.is_whole:
            return
        if self.anchor is None or not self.is_tree:
            _run(self.edges, self.gradients, self.all)
            return
        while self.starts:
            _run(*self.starts.pop())


def _run(
    edges: Sequence[GradientEdge], gradients: Gradients, inputs: list[Any] | None, retain_graph: bool = False
) -> None:
    """inputs: None: all leaves."""
    if edges and inputs != []:
        with backward_scope():
            torch.autograd.backward(edges, gradients, retain_graph=retain_graph, inputs=inputs)  # type: ignore[arg-type]


def _next(node: Any) -> Iterator[Any]:
    return (child for child, _ in node.next_functions if child is not None)


def _union(leaves: dict[Any, list[Any]], places: list[int], roots: list[Any]) -> list[Any]:
    return [*dict.fromkeys(p for k in places for p in leaves[roots[k]])]


def _explored(roots: list[Any], node: Any) -> tuple[dict[Any, None], dict[Any, list[Any]], list[Any]]:
    """The nodes that lead to `node`; for every other node the leaves that it leads to; and all leaves."""
    path: dict[Any, None] = {} if node is None else {node: None}
    leaves: dict[Any, list[Any]] = {} if node is None else {node: []}
    everything: list[Any] = []
    stack = [(root, False) for root in roots]
    while stack:
        current, complete = stack.pop()
        if current in leaves:
            continue
        if not complete:
            stack.append((current, True))
            stack += [(child, False) for child in _next(current)]
            continue
        variable = getattr(current, "variable", None)
        if variable is not None:
            everything.append(variable)
        children = [*_next(current)]
        if any(child in path for child in children):
            path[current] = None
            leaves[current] = []
        else:
            own = [] if variable is None else [variable]
            leaves[current] = [*dict.fromkeys([*own, *(p for child in children for p in leaves[child])])]
    return path, leaves, everything
