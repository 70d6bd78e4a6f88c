"""Reductions: all-reduce, reduce-scatter, and reduce to one member.

All sum in one order, the tree of `kernels.pairwise`: of n members, 2**k <= n < 2**(k + 1), the first 2 (n - 2**k) are
paired with their neighbours, and the 2**k partial sums that are then left are summed by a perfect binary tree. A leaf
of that perfect tree, one member or a pair, is called a vertex here.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, 2005;
R. Rabenseifner, Optimization of collective reduction operations, 2004.
"""

from __future__ import annotations

from functools import lru_cache

from spmd.transport.algorithms.schedule import Round, Schedule, Span, Transfer, others

__all__ = ["all_reduce", "packed_order", "reduce", "reduce_scatter"]


class _Tree:
    """The tree of n members. depth: k. folded: the number of pairs of members that are vertices."""

    def __init__(self, n: int):
        self.n = n
        self.depth = n.bit_length() - 1
        self.vertices = 1 << self.depth
        self.folded = n - self.vertices

    def vertex(self, member: int) -> int:
        return member // 2 if member < 2 * self.folded else member - self.folded

    def members(self, vertex: int) -> tuple[int, ...]:
        """The members of a vertex."""
        return (2 * vertex, 2 * vertex + 1) if vertex < self.folded else (vertex + self.folded,)

    def head(self, vertex: int) -> int:
        """The member that acts for a vertex: the second of a pair."""
        return self.members(vertex)[-1]

    def fold(self, member: int, span: Span) -> list[Round]:
        """The round in which the first of a pair gives the second its block."""
        if member >= 2 * self.folded:
            return []
        if member % 2 == 0:
            return [Round(sends=(Transfer(member + 1, span),))]
        return [Round(receives=(Transfer(member - 1, span),), merge="before")]

    def unfold(self, member: int, span: Span) -> list[Round]:
        """The round in which the second of a pair gives the first the result."""
        if member >= 2 * self.folded:
            return []
        if member % 2 == 0:
            return [Round(receives=(Transfer(member + 1, span),), carries="total")]
        return [Round(sends=(Transfer(member - 1, span),), carries="total")]

    def sits_out(self, member: int) -> bool:
        """Whether a member is the first of a pair."""
        return member < 2 * self.folded and member % 2 == 0


def _swap(peer: int, send: Span, receive: Span, before: bool) -> Round:
    merge = "before" if before else "after"
    return Round((Transfer(peer, send),), (Transfer(peer, receive),), merge, "partial")


def _recursive_doubling(n: int, me: int) -> Schedule:
    """Each vertex exchanges its partial sum with the neighbouring subtree of 1, 2, 4, ... vertices."""
    tree, whole = _Tree(n), (0, 1)
    rounds = tree.fold(me, whole)
    if not tree.sits_out(me):
        vertex = tree.vertex(me)
        for j in range(tree.depth):
            other = vertex ^ (1 << j)
            rounds.append(_swap(tree.head(other), whole, whole, other < vertex))
    return Schedule("recursive doubling", (*rounds, *tree.unfold(me, whole)))


def _halving(tree: _Tree, vertex: int, cuts: list[int]) -> tuple[list[Round], list[tuple[int, Span, Span]]]:
    """The rounds in which a vertex gives half of its chunks away, and keeps the sum of the other half. cuts: where the
    chunks of the vertices begin, in the order of `packed_order`. Also the steps: peer, span kept, span given away."""
    rounds, steps = [], []
    start, stop = 0, tree.vertices
    for j in range(tree.depth):
        other, middle = vertex ^ (1 << j), (start + stop) // 2
        low, high = (cuts[start], cuts[middle]), (cuts[middle], cuts[stop])
        first = not vertex >> j & 1
        keep, give = (low, high) if first else (high, low)
        start, stop = (start, middle) if first else (middle, stop)
        rounds.append(_swap(tree.head(other), give, keep, other < vertex))
        steps.append((tree.head(other), keep, give))
    return rounds, steps


def _halving_doubling(n: int, me: int) -> Schedule:
    """Rabenseifner's algorithm, for powers of two: a reduce-scatter by halving, an all-gather by doubling."""
    tree = _Tree(n)
    rounds, steps = _halving(tree, me, list(range(n + 1)))
    for peer, keep, give in reversed(steps):
        rounds.append(Round((Transfer(peer, keep),), (Transfer(peer, give),), carries="total"))
    return Schedule("halving and doubling", tuple(rounds), n)


def _collect(n: int, me: int) -> Round:
    """Each member gets its chunk of all blocks, and sums them."""
    to = others(n, me)
    sends = tuple(Transfer(k, (k, k + 1)) for k in to)
    return Round(sends, tuple(Transfer(k, (me, me + 1)) for k in to), "all", "block", range(n))


def _pairwise(n: int, me: int) -> Schedule:
    """Each member sums one chunk, and sends the total to all others."""
    to = others(n, me)
    sends = tuple(Transfer(k, (me, me + 1)) for k in to)
    share = Round(sends, tuple(Transfer(k, (k, k + 1)) for k in to), carries="total")
    return Schedule("pairwise", (_collect(n, me), share), n)


def two_level(n: int, me: int, per_host: int, between: str) -> Schedule:
    """Members of one host each sum a slice of their blocks, exchange it with their counterparts of other hosts by the
    algorithm `between`, and share the totals. Members stand host by host; `per_host`, a power of two, on each: then
    the members of a host are a subtree."""
    p, (host, local) = per_host, divmod(me, per_host)
    across = _ALL_REDUCE[between](n // p, host)
    c, here = across.chunks, [host * p + k for k in range(p)]
    neighbours = [here[k] for k in others(p, local)]

    def slice_of(k: int) -> Span:
        return k * c, (k + 1) * c

    own = slice_of(local)
    rounds = [
        Round(
            tuple(Transfer(k, slice_of(k % p)) for k in neighbours),
            tuple(Transfer(k, own) for k in neighbours),
            "all",
            "block",
            here,
        )
    ]
    for step in across.rounds:
        sends, receives = (
            tuple(Transfer(t.peer * p + local, (own[0] + t.items[0], own[0] + t.items[1])) for t in transfers)
            for transfers in (step.sends, step.receives)
        )
        carries = "total" if step.carries == "total" else "partial"
        rounds.append(Round(sends, receives, step.merge, carries, [k * p + local for k in step.of]))
    sends = tuple(Transfer(k, own) for k in neighbours)
    rounds.append(Round(sends, tuple(Transfer(k, slice_of(k % p)) for k in neighbours), carries="total"))
    return Schedule(f"two levels, {between} between hosts", tuple(rounds), p * c)


_ALL_REDUCE = {
    "recursive doubling": _recursive_doubling,
    "halving and doubling": _halving_doubling,
    "pairwise": _pairwise,
}


@lru_cache(maxsize=1024)
def all_reduce(algorithm: str, n: int, me: int, per_host: int = 1) -> Schedule:
    """The schedule of an all-reduce. algorithm: "recursive doubling", "pairwise", "halving and doubling" (n a power of
    two), or one of these after "two levels, " (per_host members on each host, a power of two)."""
    between = algorithm.removeprefix("two levels, ")
    return _ALL_REDUCE[algorithm](n, me) if between == algorithm else two_level(n, me, per_host, between)


@lru_cache(maxsize=1024)
def packed_order(n: int) -> tuple[int, ...]:
    """The order in which a reduce-scatter by halving packs the members' parts: by their vertices, whose numbers are
    read with the lowest bit first."""
    tree = _Tree(n)
    bits = [int(format(v, f"0{tree.depth}b")[::-1], 2) if tree.depth else 0 for v in range(tree.vertices)]
    return tuple(member for vertex in bits for member in tree.members(vertex))


@lru_cache(maxsize=1024)
def reduce_scatter(algorithm: str, n: int, me: int) -> Schedule:
    """The schedule of a reduce-scatter of n parts. algorithm: "pairwise", in which chunk k is the part of member k, or
    "halving", in which the chunks are the parts in `packed_order`."""
    if algorithm == "pairwise":
        return Schedule("pairwise", (_collect(n, me),), n)
    tree, order = _Tree(n), packed_order(n)
    place, cuts = order.index(me), [0]
    for place_of_vertex in range(tree.vertices):
        vertex = tree.vertex(order[cuts[-1]])
        cuts.append(cuts[place_of_vertex] + len(tree.members(vertex)))
    rounds = tree.fold(me, (0, n))
    if not tree.sits_out(me):
        rounds += _halving(tree, tree.vertex(me), cuts)[0]
        rounds += tree.unfold(me, (place - 1, place))
    else:
        rounds += tree.unfold(me, (place, place + 1))
    return Schedule("halving", tuple(rounds), n)


@lru_cache(maxsize=1024)
def reduce(algorithm: str, n: int, me: int, root: int) -> Schedule:
    """The schedule of a reduction to the member `root`. algorithm: "binomial tree"; "pairwise", or "halving and gather"
    (n a power of two): each member sums one chunk, and the root gathers them."""
    tree, whole = _Tree(n), (0, 1)
    if algorithm != "binomial tree":
        halving = algorithm != "pairwise"
        rounds = _halving(tree, me, list(range(n + 1)))[0] if halving else [_collect(n, me)]
        spans = {k: (place, place + 1) for place, k in enumerate(packed_order(n) if halving else range(n))}
        if me == root:
            gather = Round(receives=tuple(Transfer(k, spans[k]) for k in others(n, me)), carries="total")
        else:
            gather = Round(sends=(Transfer(root, spans[me]),), carries="total")
        return Schedule(algorithm, (*rounds, gather), n)

    def holder(vertex: int, level: int) -> int:
        """The member that has the sum of the subtree of 2**level vertices to which a vertex belongs."""
        first = vertex >> level << level
        if tree.vertex(root) >> level << level == first:
            return root
        return tree.head(first)

    rounds, vertex = [], tree.vertex(me)
    pair = tree.members(vertex)
    if len(pair) == 2:
        keeper = root if root in pair else pair[1]
        other = pair[0] if me == pair[1] else pair[1]
        rounds.append(
            Round(receives=(Transfer(other, whole),), merge="before" if other < me else "after")
            if me == keeper
            else Round(sends=(Transfer(keeper, whole),))
        )
    for level in range(tree.depth):
        if holder(vertex, level) != me:
            break
        to, sibling = holder(vertex, level + 1), (vertex >> level ^ 1) << level
        if to == me:
            merge = "before" if sibling < vertex else "after"
            rounds.append(Round(receives=(Transfer(holder(sibling, level), whole),), merge=merge, carries="partial"))
        else:
            rounds.append(Round(sends=(Transfer(to, whole),), carries="partial"))
    return Schedule("binomial tree", tuple(rounds))
