"""One step of a loop on a tape of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.apply import weak
from spmd.autodiff.backward import sweep
from spmd.autodiff.checkpoint import closure_nodes, place_of
from spmd.autodiff.tape import STEP, Node, Place, Tape
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import kind_of, lower, on, unstated

__all__ = ["Arrived", "Cotangents", "Start", "StepTape", "floating"]


class Cotangents:
    """Cotangents between two steps of a backward sweep; None where there is none.

    carry: of the carry between them. slices: of the slices of the later step, by position. closed: of the closed-over
    nodes so far, by id. ys, earlier: of what the step that comes next in the sweep collects, and the one after it.
    """

    __slots__ = ("carry", "closed", "earlier", "slices", "ys")

    def __init__(self, carry: Sequence[Any], slices: Mapping[int, Any], closed: Mapping[int, Any]):
        self.carry, self.slices, self.closed = carry, slices, closed
        self.ys: Sequence[Any] = ()
        self.earlier: Sequence[Any] = ()


class Start(NamedTuple):
    """The node outside that a leaf of the first step is: its name, the cotangent that has arrived, or None, and its
    place if it is a leaf, whose cotangent may be deferred."""

    name: int
    g: Any
    place: Place | None


class Arrived:
    """The cotangents that have arrived at the nodes outside, before a sweep over a loop.

    pairs: of each traced leaf of the first step, then of each closed-over node, what `Primitive.sums` says.
    names: by id of a closed-over node, that of the first one which is the same node now. closed: by name, their
    cotangents. starts: by the position of a leaf. slices: those of leaves from position `count` on, of which each step
    takes a part.
    """

    __slots__ = ("closed", "names", "slices", "starts")

    def __init__(
        self,
        leaves: Sequence[int],
        closed: Sequence[Node],
        pairs: Sequence[tuple[Node, Any]],
        count: int | None = None,
    ):
        of_closed = [*zip(closed, pairs[len(leaves) :], strict=True)]
        first: dict[int, int] = {}
        self.names = {id(node): first.setdefault(id(now), id(node)) for node, (now, _) in of_closed}
        self.closed = {self.names[id(node)]: g for node, (_, g) in of_closed}
        of_leaves = zip(leaves, pairs, strict=False)
        starts = {k: Start(first.get(id(now), id(now)), g, place_of(now)) for k, (now, g) in of_leaves}
        self.starts = {k: start for k, start in starts.items() if count is None or k < count}
        self.slices = {k: start for k, start in starts.items() if k not in self.starts}

    def over(self, gs: Mapping[int, Any]) -> Arrived:
        """The same with other cotangents of the leaves."""
        other = Arrived((), (), ())
        other.closed, other.names, other.slices = self.closed, self.names, self.slices
        other.starts = {k: self.starts[k]._replace(g=g) for k, g in gs.items()}
        return other

    def cotangents(self, carry: Sequence[Any]) -> Cotangents:
        """Those before the sweep. carry: of the last carry."""
        return Cotangents(carry, {}, {name: g for name, g in self.closed.items() if g is not None})

    def sums(self, carry: Mapping[int, Any], slices: Mapping[int, Any], closed: Mapping[int, Any]) -> list[Any]:
        """What `Primitive.sums` wants: the sums after a sweep, for each of the pairs.

        carry, closed: sums, by position and by name. slices: what is to be added to what has arrived, by position."""
        sums = dict(closed)
        sums.update((start.name, carry[k]) for k, start in self.starts.items() if carry.get(k) is not None)
        for k, start in self.slices.items():
            g, before = slices.get(k), sums.get(start.name, start.g)
            if g is not None:
                sums[start.name] = g if before is None else before + unstated(g)
        starts = sorted({**self.starts, **self.slices}.items())
        return [*(sums.get(start.name) for _, start in starts), *map(sums.get, self.names.values())]


def floating(leaves: Sequence[Any]) -> set[int]:
    """The positions of the leaves that have derivatives."""
    return {k for k, x in enumerate(leaves) if kind_of(x) in ("f", "c")}


class StepTape:
    """A step that ran with its leaves on a tape, whose nodes went to a side tape; and its pullback.

    tape: the one that records the loop. side: where the nodes of this step went.
    leaves: by position, the nodes of the differentiated leaves: first those of the carry, then the slices.
    inner: inner tapes, on which the step records what it closes over; the results are brought below them.
    carry, ys: what the step returned. closed: the nodes from outside on which it depends, in order of their use.
    same: (j, k) where ys[j] is the carry's leaf k (the first of several), which so has cotangents from two sides.
    """

    def __init__(
        self,
        step: Any,
        tape: Tape,
        side: Tape,
        carry: Sequence[Any],
        x: Sequence[Any],
        traced: Collection[int],
        inner: Sequence[Tape] = (),
    ):
        self.tape, self.side = tape, side
        self.leaves: dict[int, Node] = {}
        values = [*carry, *x]
        for k in sorted(traced):
            value = values[k]
            shape, dtype = np.shape(value_of(value)), getattr(value, "dtype", None)
            dtype = weak(value_of(value)) if dtype is None else dtype
            self.leaves[k] = side.leaf(shape, dtype, STEP)
            values[k] = Array(unstated(value), getattr(value, "state", None), tape, self.leaves[k])
        self.carry, self.ys = step(values[: len(carry)], values[len(carry) :])
        for t in reversed(inner):
            self.carry, self.ys = ([lower(y, t) for y in part] for part in (self.carry, self.ys))
        self.closed = closure_nodes(tape, side, [*self.carry, *self.ys])
        of_carry = {id(c.node): k for k, c in reversed([*enumerate(self.carry)]) if on(c, tape)}
        self.same = [(j, of_carry[id(y.node)]) for j, y in enumerate(self.ys) if on(y, tape) and id(y.node) in of_carry]
        self._proxies: dict[int, Node] = {}

    def traced_carry(self) -> set[int]:
        """The positions of the carry that the step returns traced."""
        return {k for k, x in enumerate(self.carry) if on(x, self.tape)}

    def pull(
        self,
        cotangents: Cotangents,
        at_end: bool,
        *,
        free: bool,
        arrived: Arrived | None = None,
        first: bool = False,
    ) -> Cotangents:
        """The cotangents of what the step before this one returns, of the slices, and of the closed-over nodes.

        cotangents: of what this step returns, and of closed-over nodes from later steps, to which those of this step
        are added term by term, as in a sweep over all steps. at_end: whether no step follows.
        arrived: what has arrived at nodes outside before the sweep. first: whether no step comes before."""
        side, one = self.side, {}
        if not self._proxies:
            self._proxies = {id(node): side.leaf(node.shape, node.dtype, STEP) for node in self.closed}
            for node in side.nodes:
                node.parents = [self._proxies.get(id(p), p) for p in node.parents]
        # What a step returns both as carry and as y has the cotangent of y first, before those of the next step; of
        # several ys that of the last one, as in a sweep over all steps.
        twice = dict(self.same)
        seeds: list[tuple[Any, Any]]
        seeds = [(self.leaves[k], cotangents.earlier[j]) for j, k in reversed(self.same) if k in self.leaves]
        if arrived is not None:
            one = self._ones(cotangents, arrived, first)
            seeds += [
                (self.leaves[k], s.g) for k, s in arrived.starts.items() if first and id(self.leaves[k]) not in one
            ]
        seeds += [(self._proxies[k], g) for k, g in cotangents.closed.items() if k in self._proxies]
        own = [None if j in twice and not at_end else g for j, g in enumerate(cotangents.ys)]
        for out, g in zip([*self.carry, *self.ys[::-1]], [*cotangents.carry, *own[::-1]], strict=True):
            if on(out, self.tape):
                seeds.append((self._proxies.get(id(out.node), out.node), g))
        seeds = [(one.get(id(node), node), unstated(g)) for node, g in seeds if g is not None]
        parents = [node.parents for node in side.nodes] if one and not free else []
        for node in side.nodes if one else ():
            node.parents = [one.get(id(p), p) for p in node.parents]
        starts = arrived.starts if first and arrived is not None else {}
        for k, start in starts.items():
            self.leaves[k].place = start.place or STEP
        found = sweep(side, seeds, [*self.leaves.values(), *self._proxies.values()], free=free)
        for k in starts:
            self.leaves[k].place = STEP
        for node, before in zip(side.nodes, parents, strict=False):
            node.parents = before
        of_leaves = dict(zip(self.leaves, found, strict=False))
        count = len(self.carry)
        closed = dict(zip(self._proxies, found[len(self.leaves) :], strict=True))
        return Cotangents(
            [of_leaves.get(k) for k in range(count)],
            {k - count: g for k, g in of_leaves.items() if k >= count and g is not None},
            {k: g for k, g in {**cotangents.closed, **closed}.items() if g is not None},
        )

    def _ones(self, cotangents: Cotangents, arrived: Arrived, first: bool) -> dict[int, Node]:
        """By id, the leaves of this tape that stand for a node for which another one stands, and that other one: the
        terms of a node are summed in one place, in the order of a sweep over all steps."""
        proxies, one, known = self._proxies, {}, {}
        for key, name in arrived.names.items():
            if key != name and key in proxies:
                if name not in proxies:
                    proxies[name] = self.side.leaf(proxies[key].shape, proxies[key].dtype, STEP)
                one[id(proxies[key])] = proxies[name]
        for k, start in arrived.starts.items() if first else ():
            leaf = self.leaves[k]
            if start.name in cotangents.closed and start.name not in proxies:
                proxies[start.name] = self.side.leaf(leaf.shape, leaf.dtype, STEP)
            other = proxies.get(start.name) or known.setdefault(start.name, leaf)
            if other is not leaf:
                one[id(leaf)] = other
        return one
