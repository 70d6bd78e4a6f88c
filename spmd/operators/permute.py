"""Blocks that move from worker to worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import index
from typing import Any, ClassVar

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.autodiff.tracer import value_of
from spmd.device import to_host
from spmd.errors import LayoutError, describe
from spmd.mesh import Worker, here
from spmd.operators.apply import operate
from spmd.operators.base import Operator, named
from spmd.operators.memo import interned, memoised, rebound
from spmd.operators.reduce import AxisName, _names
from spmd.transport.call import Call, Group, Shape
from spmd.transport.plan import Forward, Plan

__all__ = ["Permute", "ppermute", "pshuffle", "sendrecv", "shift"]


@dataclass(frozen=True)
class Permute(Operator):
    """V -> V: worker `source` gives its block to worker `target`, for each pair; who receives nothing has zeros.

    shapes: those of this worker's block before and after, once met. Its adjoint is `Permute` of the inverse.
    """

    perm: tuple[tuple[int, int], ...] = ()
    shapes: tuple[Shape, Shape] | None = None

    function: ClassVar[str] = "ppermute"
    private: ClassVar[tuple[str, ...]] = ("shapes",)

    def check(self, group: Group, x: np.ndarray) -> None:
        self._fits(group.size, group.axes)

    @memoised
    def _fits(self, size: int, axes: tuple[str, ...]) -> bool:
        """True where the pairs are right among so many workers. Raises where they are not."""
        where = f"spmd.{self.function}"
        for side, name in ((0, "source"), (1, "target")):
            seen: set[int] = set()
            for pair in self.perm:
                k = pair[side]
                if not 0 <= k < size:
                    raise LayoutError.at(
                        where,
                        argument="perm",
                        got=f"the pair {pair}, whose {name} is out of range",
                        need=f"places from 0 to {size - 1} along {' and '.join(map(repr, axes))}",
                        mend=f"count modulo the size: [(i, (i + 1) % {size}) for i in range({size})]",
                    )
                if k in seen:
                    raise LayoutError.at(
                        where,
                        argument="perm",
                        got=f"{name} {k} twice in {list(self.perm)}",
                        need="every worker at most once as source and once as target",
                        mend="add up the results of several ppermutes",
                    )
                seen.add(k)
        return True

    @cached_property
    def _partners(self) -> tuple[dict[int, list[int]], dict[int, int]]:
        """The targets of each source, and the source of each target."""
        targets: dict[int, list[int]] = {}
        for source, target in self.perm:
            targets.setdefault(source, []).append(target)
        return targets, {target: source for source, target in reversed(self.perm)}

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        targets, sources = self._partners
        source = sources.get(group.index)
        parts: list[Any] = [None] * group.size
        for target in targets.get(group.index, ()):
            parts[target] = ...
        fill = shape if self.shapes is None else self.shapes[1]

        def bind(shapes: Sequence[Any]) -> Permute:
            return rebound(self, shapes=(shape, fill if source is None else shapes[source]))

        return Plan("exchange", group, shape, dtype, parts, Forward(source, fill), bind)

    @property
    def H(self) -> Operator:
        inverse = tuple(sorted((t, s) for s, t in self.perm))
        return interned(Permute, self.axes, inverse, None if self.shapes is None else (self.shapes[1], self.shapes[0]))


@lru_cache(maxsize=1024, typed=True)
def _sorted(perm: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((index(s), index(t)) for s, t in perm))


def ppermute(x: Tree, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Tree:
    """Blocks sent from worker to worker along axis_name.

    x: the block, or a pytree of blocks; uneven ones travel as they are. perm: pairs (source, target) of places along
    the axis, each at most once as source and once as target. A worker that is no target gets zeros of its own shape.

    Forward: y_target = x_source. Adjoint: the inverse permutation. Cost: a message per pair. As `jax.lax.ppermute`.
    Raises LayoutError for a place out of range or named twice.

        >>> with spmd.Mesh(x=3):
        ...     f = spmd.map(lambda x: spmd.ppermute(x, "x", [(0, 1), (1, 2)]), P("x"), P("x"))
        ...     f(np.array([1.0, 2.0, 3.0]))
        ...     spmd.vjp(f, np.ones(3))[1](np.array([4.0, 5.0, 6.0]))
        PartitionedArray([0., 1., 2.], dtype=float64, spec=P('x'))
        (array([5., 6., 0.]),)
    """
    names = _names(axis_name, "ppermute")
    try:
        pairs = _sorted(tuple(map(tuple, perm)))
    except (TypeError, ValueError):
        raise LayoutError.at(
            "spmd.ppermute",
            argument="perm",
            got=repr(perm),
            need="pairs (source, target) of ints, places along the axis",
            mend="[(0, 1), (1, 0)] swaps the blocks of workers 0 and 1",
        ) from None
    return operate(interned(Permute, names, pairs), x, sys._getframe(1))


def shift(x: Tree, axis_name: AxisName, offset: int = 1, *, wrap: bool = True) -> Tree:
    """Blocks sent `offset` workers up along axis_name.

    wrap: the axis is a ring. Otherwise the blocks that pass its end are dropped, and those at its start get zeros.
    Forward: y_k = x_(k - offset). Adjoint: the shift by -offset. Cost: a message from each worker whose block goes to
    another.

        >>> with spmd.Mesh(x=3):
        ...     spmd.map(lambda x: spmd.shift(x, "x", wrap=False), P("x"), P("x"))(np.array([1.0, 2.0, 3.0]))
        PartitionedArray([0., 1., 2.], dtype=float64, spec=P('x'))
    """
    names = _names(axis_name, "shift")
    n = here("spmd.shift").group(names).size
    if not isinstance(offset, int | np.integer):
        raise LayoutError.at(
            "spmd.shift",
            argument="offset",
            got=describe(offset),
            need="an int, the same on all workers",
            mend="spmd.shift(x, axis_name, 1); spmd.ppermute takes any pairs of workers",
        )
    offset = int(offset)
    return operate(_shifting(names, n, offset, wrap), x, sys._getframe(1))


@lru_cache(maxsize=1024)
def _shifting(names: tuple[str, ...], n: int, offset: int, wrap: bool) -> Permute:
    pairs = tuple((k, (k + offset) % n) for k in range(n) if wrap or 0 <= k + offset < n)
    return named("shift", Permute, names, pairs)


def pshuffle(x: Tree, axis_name: AxisName, perm: Sequence[int]) -> Tree:
    """Blocks permuted along axis_name: worker k gets the block of worker perm[k].

    x: the block, or a pytree of blocks; uneven ones travel as they are. perm: every place along the axis once.

    Forward: y_k = x_perm[k]. Adjoint: the inverse permutation. Cost: a message from each worker that does not keep its
    block. Raises LayoutError for what is no permutation. As `jax.lax.pshuffle`.

        >>> with spmd.Mesh(x=3):
        ...     spmd.map(lambda x: spmd.pshuffle(x, "x", [2, 0, 1]), P("x"), P("x"))(np.array([1.0, 2.0, 3.0]))
        PartitionedArray([3., 1., 2.], dtype=float64, spec=P('x'))
    """
    names = _names(axis_name, "pshuffle")
    n = here("spmd.pshuffle").group(names).size
    try:
        sources = [index(s) for s in perm]
    except TypeError:
        sources = None
    if sources is None or sorted(sources) != list(range(n)):
        raise LayoutError.at(
            "spmd.pshuffle",
            argument="perm",
            got=repr(perm),
            need=f"a permutation of the places from 0 to {n - 1}: whose block each worker gets",
            mend="spmd.ppermute takes any pairs (source, target), and gives zeros to who is no target",
        )
    pairs = tuple(sorted((s, t) for t, s in enumerate(sources)))
    return operate(named("pshuffle", Permute, names, pairs), x, sys._getframe(1))


Partner = int | None | Sequence[int | None] | np.ndarray | Callable[[int], int | None]


def sendrecv(x: Tree, axis_name: AxisName, source: Partner, dest: Partner) -> Tree:
    """Each worker sends its block to worker `dest` along axis_name, and gets that of worker `source`.

    x: the block, or a pytree of blocks; uneven ones travel as they are.
    source, dest: this worker's partners, as places along the axis; None for no partner. Or what tells the partners of
    all workers: a function of the place, or a sequence with an entry for each place. A worker without source gets
    zeros of its own shape.

    Forward: y_k = x_source(k). Adjoint: `sendrecv` with source and dest exchanged. Cost: a message per pair; where a
    partner is given as a number, one more all-gather of 16 bytes, by which all learn the pairs.
    Raises LayoutError, before anything moves, where one worker receives from another that sends elsewhere.

        >>> def body(x):
        ...     place = spmd.worker_index("x")
        ...     return spmd.sendrecv(x, "x", source=(place + 1) % 3, dest=(place - 1) % 3)
        >>> with spmd.Mesh(x=3):
        ...     spmd.map(body, P("x"), P("x"))(np.array([1.0, 2.0, 3.0]))
        PartitionedArray([2., 3., 1.], dtype=float64, spec=P('x'))
    """
    where = "spmd.sendrecv"
    names = _names(axis_name, "sendrecv")
    worker, frame = here(where), sys._getframe(1)
    group = worker.group(names)
    given = {"source": source, "dest": dest}
    partners = {argument: _partners(argument, partner, group) for argument, partner in given.items()}
    if any(type(p) is int for p in partners.values()):
        own = np.array([p if type(p) is int else p[group.index] for p in partners.values()], np.int64)
        call = Call("sendrecv", names, own.dtype, own.shape, detail="the partners", same_shape=True, frame=frame)
        gathered = np.stack(worker.comm.all_gather(group, call, own).wait())
        partners = {argument: gathered[:, i].tolist() for i, argument in enumerate(partners)}
    sources, dests = partners["source"], partners["dest"]
    _check_partners(worker, group, sources, dests)
    pairs = tuple((k, t) for k, t in enumerate(dests) if t != _NOBODY)
    return operate(named("sendrecv", Permute, names, pairs), x, frame)


_NOBODY = -1


def _partners(argument: str, partner: Any, group: Group) -> Any:
    """A partner as an int, or those of all workers as a list of ints, checked; _NOBODY for none."""
    n = group.size

    def one(p) -> int:
        if p is None:
            return _NOBODY
        k = index(p)
        if not 0 <= k < n:
            raise IndexError
        return k

    try:
        if callable(partner):
            return [one(partner(k)) for k in range(n)]
        bare = to_host(value_of(partner))
        if bare is None or np.ndim(bare) == 0:
            return one(bare)
        places = [one(p) for p in bare]
        if len(places) == n:
            return places
    except (TypeError, IndexError):
        pass
    raise LayoutError.at(
        "spmd.sendrecv",
        argument=argument,
        got=describe(partner),
        need=f"a place from 0 to {n - 1} along {' and '.join(map(repr, group.axes))}, None, {n} of them, "
        "or a function from this worker's place to one",
        mend=f"lambda k: (k {'-' if argument == 'source' else '+'} 1) % {n}",
    )


def _check_partners(worker: Worker, group: Group, sources: list[int], dests: list[int]) -> None:
    """Raise where what one worker does is not what its partner expects."""

    def named(k: int) -> str:
        return "nobody" if k == _NOBODY else worker.mesh.describe(group.members[k])

    directions = (
        (sources, dests, "receives from", "sends to", "dest", "source"),
        (dests, sources, "sends to", "receives from", "source", "dest"),
    )
    for partners, back, does, partner_does, missing, given in directions:
        for k, other in enumerate(partners):
            if other != _NOBODY and back[other] != k:
                raise LayoutError.at(
                    "spmd.sendrecv",
                    argument="source",
                    got=f"{named(k)} {does} {named(other)}, which {partner_does} {named(back[other])}",
                    need=f"{named(k)} and {named(other)} to agree",
                    mend=f"{missing}={k} on place {other}, or another {given} on place {k}",
                )
