"""A transport that only counts: virtual workers whose collectives move no large data.

The real operators run on every worker, and make their plans. When the members of a group have met, the cost of the
collective is computed for each of them from what all of them bring, by the schedules that processes would run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.kernels.cpu.chunks import accurate
from spmd.layout import block_sizes
from spmd.transport.algorithms import choice, cost
from spmd.transport.algorithms.cost import Cost, Sizes
from spmd.transport.algorithms.neighbours import Near, NearLengths
from spmd.transport.base import Comm
from spmd.transport.blas_threads import blas_threads
from spmd.transport.call import ONE_BY_ONE, Call, Group, Shape
from spmd.transport.handles import Done, Handle, Mapped, Outcome, read_only
from spmd.transport.local.comm import LocalComm, handed
from spmd.transport.local.lockstep import LockstepRun
from spmd.transport.local.rendezvous import Rendezvous
from spmd.transport.local.transport import LocalTransport
from spmd.transport.plan import NeedsLengths, Plan, part_of

__all__ = ["CountingTransport", "Counts"]

_REAL_MAX = 1 << 12
"""Bytes up to which blocks have their values: numbers on which a body may depend. Integers always have them."""


class Counts:
    """What the workers of a mesh have sent since it was made, or since `reset()`.

    messages, nbytes, rounds: arrays with an entry per worker: the messages that it sends, the bytes of blocks in them,
    and the rounds in which it sends or receives. Headers are not counted. times, by_kind: by kind of collective, how
    often a group has run it, and these three arrays. The kind "agreement" is what a map agrees on at its end, "shapes"
    the exchange of shapes, "lengths" that of the lengths of near blocks.
    """

    def __init__(self, size: int):
        self.size = size
        self.reset()

    def reset(self) -> None:
        """Count from zero again."""
        self.times: Counter[str] = Counter()
        self.by_kind: dict[str, np.ndarray] = {}
        self._clock = np.zeros(self.size, np.int64)

    @property
    def messages(self) -> np.ndarray:
        return self._total[0]

    @property
    def nbytes(self) -> np.ndarray:
        return self._total[1]

    @property
    def rounds(self) -> np.ndarray:
        return self._total[2]

    @property
    def critical_path(self) -> int:
        """The longest chain of messages, of which each waits for the one before. A worker sends one at a time."""
        return int(self._clock.max())

    @property
    def _total(self) -> np.ndarray:
        return sum(self.by_kind.values(), np.zeros((3, self.size), np.int64))

    def _add(self, kind: str, members: Sequence[int], costs: np.ndarray, finished: np.ndarray) -> None:
        """costs: messages, bytes and rounds of each member. finished: its clock after the collective."""
        self.times[kind] += 1
        table = self.by_kind.setdefault(kind, np.zeros((3, self.size), np.int64))
        at = np.asarray(members)
        table[:, at] += costs
        self._clock[at] = finished

    def __str__(self) -> str:
        heads = ("collective", "times", "messages", "bytes", "rounds")
        lines = ["{:16}{:>8}{:>12}{:>16}{:>8}".format(*heads)]
        for kind, table in self.by_kind.items():
            lines.append("{:16}{:8}{:12}{:16}{:8}".format(kind, self.times[kind], *table.max(axis=1).tolist()))
        total = self._total.max(axis=1).tolist()
        lines.append("{:16}{:8}{:12}{:16}{:8}".format("all", sum(self.times.values()), *total))
        return "\n".join([*lines, f"at most, of a worker; critical path: {self.critical_path} messages"])


class _Note(NamedTuple):
    """What a member brings to a collective. size: the entries of its block. parts: of its parts, by member. near: which
    lengths of other blocks it needs, where its size is the length of its own."""

    kind: str
    dtype: np.dtype
    size: int = 0
    parts: Mapping[int, int] = {}
    root: int = 0
    near: Near | None = None


_AGREEMENT = _Note("agreement", np.dtype(np.uint8))


def _note_of(plan: Plan, x: Any) -> _Note:
    parts: Mapping[int, int] = {}
    if plan.kind in ("reduce_scatter", "all_to_all") and type(plan.parts) is tuple:
        parts = _sizes_of(plan.parts, x.shape)
    elif plan.kind in ("reduce_scatter", "all_to_all", "scatter", "exchange"):
        parts = {k: x.size if p is ... else part_of(x, p).size for k, p in enumerate(plan.parts) if p is not None}
    return _Note(plan.kind, plan.dtype, x.size, parts, plan.root)


_known_sizes: dict[tuple[int, Shape], tuple[Any, dict[int, int]]] = {}
"""By the parts, which members share, and the shape of a block: the parts, so that their id stays, and their sizes."""


def _sizes_of(parts: tuple[Any, ...], shape: Shape) -> dict[int, int]:
    known = _known_sizes.get((id(parts), shape))
    if known is None:
        if len(_known_sizes) >= 64:
            _known_sizes.clear()
        block = np.broadcast_to(np.zeros(()), shape)
        known = _known_sizes[id(parts), shape] = parts, {k: part_of(block, p).size for k, p in enumerate(parts)}
    return known[1]


class _Counter:
    """Counts collectives of a mesh. hosts: the host of each worker."""

    def __init__(self, size: int):
        self.counts = Counts(size)
        self.hosts: Sequence[int] = [0] * size
        self._per_host: dict[Shape, int] = {}

    def per_host(self, group: Group) -> int:
        found = self._per_host.get(group.members)
        if found is None:
            found = choice.members_per_host([self.hosts[m] for m in group.members])
            self._per_host[group.members] = found
        return found

    def count(self, group: Group, notes: Sequence[_Note]) -> None:
        """Count a collective of a group, from what its members bring."""
        first, counts = notes[0], self.counts
        if first.kind == "none":
            return
        clock = counts._clock[np.asarray(group.members)]
        if first.kind == "exchange":
            costs = [_exchange(note, k) for k, note in enumerate(notes)]
            finished = _after_exchange(clock, notes)
        elif first.near is not None:
            costs, hops = _lengths([note.size for note in notes], first.near)
            finished = np.full(group.size, clock.max() + hops)
        else:
            costs, path = self._costs(group, notes)
            finished = np.full(group.size, clock.max() + path)
        table = np.array([(c.messages, c.nbytes, c.rounds) for c in costs], np.int64).T
        counts._add(first.kind, group.members, table, finished)

    def _costs(self, group: Group, notes: Sequence[_Note]) -> tuple[Sequence[Cost], int]:
        n, (kind, dtype, size, _, root, _) = group.size, notes[0]
        itemsize, partial, per_host = dtype.itemsize, accurate(dtype).itemsize, self.per_host(group)
        if kind in ("agreement", "shapes"):
            return _fixed(kind, n)
        if kind == "all_reduce":
            return _all_reduce(n, size, itemsize, partial, per_host)
        if kind == "reduce":
            return _reduce(n, root, size, itemsize, partial)
        if kind == "reduce_scatter":
            return _reduce_scatter(n, tuple(notes[0].parts.values()), itemsize, partial)
        if kind == "broadcast":
            return _broadcast(n, root, notes[root].size * itemsize)
        if kind == "all_to_all":
            return _all_to_all(np.array([[*note.parts.values()] for note in notes]) * itemsize)
        if kind == "scatter":
            sizes = Sizes([notes[root].parts[k] * itemsize for k in range(n)])
            large = sum(s > choice.INLINE_MAX for k, s in enumerate(sizes.each) if k != root)
            return [cost.scatter(n, k, root, sizes) for k in range(n)], cost.path(kind, choice.scatter(), n) + large
        sizes = Sizes([note.size * itemsize for note in notes])
        if kind == "gather":
            path = cost.path(kind, choice.gather(), n) + any(s > choice.INLINE_MAX for s in sizes.each)
            return [cost.gather(n, k, root, sizes) for k in range(n)], path
        path = cost.path(kind, choice.all_gather(n), n) + (n - 1) * sizes.any_large
        return [cost.all_gather(n, k, sizes, per_host) for k in range(n)], path


def _lengths(own: Sequence[int], near: Near) -> tuple[list[Cost], int]:
    """What members send to learn the lengths of near blocks, and the chain of messages."""
    members = [NearLengths(len(own), me, length, near) for me, length in enumerate(own)]
    costs, path = [Cost()] * len(own), 0
    while True:
        sends, sources = [m.sends for m in members], [m.sources for m in members]
        if not any(sends):
            return costs, path
        path += max(map(len, sends))
        costs = [c + Cost(len(to), 0, bool(to or of)) for c, to, of in zip(costs, sends, sources, strict=True)]
        for me, member in enumerate(members):
            member.take({k: sends[k][me] for k in sources[me]})


def _exchange(note: _Note, me: int) -> Cost:
    return cost.exchange([size * note.dtype.itemsize for k, size in note.parts.items() if k != me])


def _after_exchange(clock: np.ndarray, notes: Sequence[_Note]) -> np.ndarray:
    """Each member sends one message after the other; what it is sent comes when it is sent."""
    finished = clock.copy()
    for me, note in enumerate(notes):
        targets = [k for k in note.parts if k != me]
        finished[me] = max(finished[me], clock[me] + len(targets))
        for place, k in enumerate(targets, 1):
            finished[k] = max(finished[k], clock[me] + place)
    return finished


@lru_cache(maxsize=64)
def _fixed(kind: str, n: int) -> tuple[Sequence[Cost], int]:
    if kind == "shapes":
        return [cost.shapes(n, 0)] * n, cost.path("all_gather", "Bruck", n)
    return [cost.agreement(n, me) for me in range(n)], cost.path("all_reduce", "recursive doubling", n)


@lru_cache(maxsize=64)
def _all_reduce(n: int, size: int, itemsize: int, partial: int, per_host: int) -> tuple[Sequence[Cost], int]:
    name = choice.all_reduce(n, size * itemsize, per_host, partial != itemsize)
    costs = [cost.all_reduce(n, me, size, itemsize, partial, per_host) for me in range(n)]
    return costs, cost.path("all_reduce", name, n, 0, per_host)


@lru_cache(maxsize=64)
def _reduce(n: int, root: int, size: int, itemsize: int, partial: int) -> tuple[Sequence[Cost], int]:
    costs = [cost.reduce(n, me, root, size, itemsize, partial) for me in range(n)]
    return costs, cost.path("reduce", choice.reduce(n, size * itemsize, partial != itemsize), n, root)


@lru_cache(maxsize=64)
def _reduce_scatter(n: int, sizes: tuple[int, ...], itemsize: int, partial: int) -> tuple[Sequence[Cost], int]:
    costs = [cost.reduce_scatter(n, me, sizes, itemsize, partial) for me in range(n)]
    name = choice.reduce_scatter(n, sum(sizes) * itemsize, partial != itemsize)
    return costs, cost.path("reduce_scatter", name, n)


@lru_cache(maxsize=64)
def _broadcast(n: int, root: int, nbytes: int) -> tuple[Sequence[Cost], int]:
    path = cost.path("broadcast", "binomial tree", n)
    if nbytes > choice.TREE_MAX:
        path += cost.path("broadcast", "scatter and all-gather" if n > 3 else "binomial tree", n)
    return [cost.broadcast(n, me, root, nbytes) for me in range(n)], path


def _all_to_all(parts: np.ndarray) -> tuple[Sequence[Cost], int]:
    """parts[k, l]: the bytes that go from member k to member l."""
    n = len(parts)
    name = choice.all_to_all(n)
    own = parts.copy()
    np.fill_diagonal(own, 0)
    large = np.where(own > choice.INLINE_MAX, own, 0)
    rounds = cost.all_to_all(n, 0, [0] * n, name).rounds
    small = _bruck_bytes(own - large) if name == "Bruck" else (own - large).sum(1)
    messages = (large > 0).sum(1)
    second = (messages > 0) | (large > 0).any(0)
    first = rounds if name == "Bruck" else n - 1
    costs = [
        Cost(int(first + m), int(s + d), int(rounds + r))
        for m, s, d, r in zip(messages, small, large.sum(1), second, strict=True)
    ]
    return costs, cost.path("all_to_all", name, n) + int(messages.max())


def _bruck_bytes(parts: np.ndarray) -> np.ndarray:
    """The bytes that each member sends: in round j those parts whose way has bit j, wherever they come from."""
    n = len(parts)
    places = np.arange(n)
    sent = np.zeros(n, np.int64)
    for d in range(1, n):
        far = parts[places, (places + d) % n]  # by source
        for j in range(d.bit_length()):
            if d >> j & 1:
                sent += np.roll(far, d & ((1 << j) - 1))  # by whom they have come to
    return sent


def _sources_of(plan: Plan) -> Collection[int]:
    """The members from which something comes."""
    at_root = plan.group.index == plan.root
    if plan.kind in ("broadcast", "scatter"):
        return (plan.root,)
    if plan.kind in ("gather", "reduce") and not at_root:
        return ()
    return plan.sources if plan.kind == "exchange" else range(plan.group.size)


@lru_cache(maxsize=64)
def _zeros(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """One array for all who get such a result: nothing is written, so it takes no memory."""
    return read_only(np.zeros(shape, dtype))


class CountingComm(LocalComm):
    """The `Comm` of a worker whose collectives are counted."""

    def __init__(self, run: LockstepRun, worker: int, counter: _Counter):
        super().__init__(run, worker)
        self.counter = counter
        self._noted: _Note | None = None

    def repeated_plan(self, call: Call, plan: Plan, x: np.ndarray) -> None:
        return None

    def members_per_host(self, group: Group) -> int:
        return self.counter.per_host(group)

    def _meet(self, group: Group, call: Call, payload: Any, take: Callable[[Rendezvous], Any], finish=None) -> Handle:
        if group.size == 1:
            return super()._meet(group, call, payload, take, finish)
        note, self._noted = self._noted or _AGREEMENT, None

        def counted(contributions: list[tuple[_Note, Any]]) -> Any:
            notes = [note for note, _ in contributions]
            contributions[:] = [own for _, own in contributions]
            self.counter.count(group, notes)
            return None if finish is None else finish(contributions)

        return super()._meet(group, call, (note, payload), take, counted)

    def _run(self, plan: Plan, call: Call, x: np.ndarray) -> Handle:
        if plan.combine.parallel:
            return Comm._run(self, plan, call, x)
        self._noted = _note_of(plan, x)
        return super()._run(plan, call, x)

    def _results(self, group: Group, contributions: list[tuple[Plan, np.ndarray, bool]]) -> list[Any]:
        plans, xs = [plan for plan, _, _ in contributions], [x for _, x, _ in contributions]
        if xs[0].dtype.kind in "iub" or max(x.nbytes for x in xs) <= _REAL_MAX:
            return super()._results(group, contributions)
        return [self._result(k, plan, plans, xs) for k, plan in enumerate(plans)]

    def _result(self, me: int, plan: Plan, plans: Sequence[Plan], xs: Sequence[np.ndarray]) -> tuple[Any, Any]:
        """A member's result without its values."""
        if plan.kind in ("all_reduce", "reduce_scatter"):
            return _zeros(part_of(xs[me], plan.parts[me]).shape, plan.dtype), plan.bind(())
        shapes: list[Any] = [None] * len(plans)
        for k in _sources_of(plan):
            part = plans[k].parts[me]
            shapes[k] = xs[k].shape if part is ... else None if part is None else part_of(xs[k], part).shape
        completion = plan.complete(shapes)
        return _zeros(completion.shape, plan.dtype), completion.bound

    def _run_with_lengths(self, needs: NeedsLengths, call: Call, x: np.ndarray) -> Handle:
        return Comm._run_with_lengths(self, needs, call, x)

    def _lengths(self, group: Group, call: Call, near: Near) -> Handle:
        self._noted = _Note("lengths", call.dtype, call.shape[near.dim], near=near)
        return self._meet(group, call, call.shape[near.dim], lambda m: tuple(m.contributions))

    def _shapes(self, group: Group, call: Call) -> Handle:
        self._noted = _Note("shapes", call.dtype)
        return super()._shapes(group, call)

    def _without_values(self, group: Group, call: Call, x: np.ndarray, kind: str, root: int = 0) -> Handle:
        """A reduction."""
        if group.size == 1:
            return Done(read_only(x))
        self._noted = _Note(kind, x.dtype, x.size, root=root)
        return self._meet(group, call, None, lambda _: _zeros(x.shape, x.dtype))

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        if x.nbytes > _REAL_MAX:
            return self._without_values(group, call, x, "all_reduce")
        self._noted = _Note("all_reduce", x.dtype, x.size)
        return super()._all_reduce(group, call, x, how)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle:
        large = [x for x in xs if x.nbytes >= choice.SEPARATE_MIN]
        packed = sum(x.size for x in xs if x.nbytes < choice.SEPARATE_MIN)
        handles = [self._without_values(group, call, x, "all_reduce") for x in large]
        if len(large) < len(xs):
            handles.append(self._without_values(group, call, np.zeros(packed, xs[0].dtype), "all_reduce"))

        def totals(_: Any) -> list[np.ndarray]:
            for handle in handles:
                handle.wait()
            return [_zeros(x.shape, x.dtype) for x in xs]

        return Mapped(Done(None), totals)

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        own, sizes = parts[group.index], {k: part.size for k, part in enumerate(parts)}
        if group.size == 1:
            return Done(read_only(own))
        self._noted = _Note("reduce_scatter", own.dtype, parts=sizes)
        return self._meet(group, call, None, lambda _: _zeros(own.shape, own.dtype))

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        self._noted = _Note("all_gather", x.dtype, x.size)
        return super()._all_gather(group, call, x)

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        self._noted = _Note("all_to_all", parts[0].dtype, parts={k: part.size for k, part in enumerate(parts)})
        return super()._all_to_all(group, call, parts)

    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        self._noted = _Note("broadcast", np.dtype(call.dtype), 0 if x is None else x.size, root=root)
        return super()._broadcast(group, call, x, root)

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        handle = self._without_values(group, call, x, "reduce", root)
        return handle if group.index == root else Mapped(handle, lambda _: None)

    def _gather(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        self._noted = _Note("gather", x.dtype, x.size, root=root)
        return self._meet(group, call, x, lambda m: list(m.contributions) if group.index == root else None)

    def _scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray] | None, root: int) -> Handle:
        sizes = {k: part.size for k, part in enumerate(parts or ())}
        self._noted = _Note("scatter", np.dtype(call.dtype), parts=sizes, root=root)
        return self._meet(group, call, parts, lambda m: m.contributions[root][group.index])

    def _exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], sources: Collection[int]) -> Handle:
        sizes = {k: part.size for k, part in sends.items()}
        self._noted = _Note("exchange", np.dtype(call.dtype), parts=sizes)
        own = {k: handed(call, x) for k, x in sends.items()}
        return self._meet(group, call, own, lambda m: {k: m.contributions[k][group.index] for k in sources})


class CountingTransport(LocalTransport):
    """n virtual workers whose collectives are counted: `spmd.Mesh(x=1024, transport="counting")`.

    counts: what the maps of the mesh have sent. Shapes and dtypes of all results are right; values of large arrays are
    not: they are zeros.
    """

    name = "counting"

    def __init__(self, size: int):
        super().__init__(size)
        self._counter = _Counter(size)
        self._everyone = Group((), (), tuple(range(size)), 0)

    @property
    def counts(self) -> Counts:
        return self._counter.counts

    def on_hosts(self, hosts: int) -> None:
        """Place the workers on so many hosts, in order, as evenly as they go. At first all are on one."""
        sizes = block_sizes(self.size, hosts)
        self._counter.hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
        self._counter._per_host.clear()

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        execution = LockstepRun(self.size, describe, scheduler == ONE_BY_ONE)
        limit = blas_threads(self.threads())
        with limit, limit:
            try:
                execution.comms = [CountingComm(execution, w, self._counter) for w in range(self.size)]
                outcome = execution.execute(body)
            finally:
                execution.close()
        if self.size > 1:
            self._counter.count(self._everyone, [_AGREEMENT])
        return outcome
