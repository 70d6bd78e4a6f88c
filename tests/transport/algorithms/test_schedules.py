"""Every schedule is run on symbols: what comes out is what the collective promises, in the one order of sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from spmd.transport.algorithms import phases, reductions, routing
from spmd.transport.algorithms.schedule import Round, Schedule, critical_path, messages_of, sent_bytes

SIZES = [*range(1, 18), 24, 31, 32, 33, 48, 64]


def tree(leaves: Sequence[Any]) -> Any:
    """The sum of leaves as nested pairs, written down on its own: fold the surplus, then halve again and again."""
    n = len(leaves)
    surplus = n - (1 << (n.bit_length() - 1))
    sums = [(leaves[2 * k], leaves[2 * k + 1]) for k in range(surplus)] + list(leaves[2 * surplus :])

    def total(part: Sequence[Any]) -> Any:
        middle = len(part) // 2
        return (total(part[:middle]), total(part[middle:])) if middle else part[0]

    return total(sums)


class Member:
    """What one member knows. chunks: the value of each chunk that it has; items: the blocks that it has."""

    def __init__(self, me: int, chunks: int, items: dict[Any, Any]):
        self.me = me
        self.block = {c: f"{me}:{c}" for c in range(chunks)}
        self.partial = dict(self.block)
        self.total: dict[int, Any] = {}
        self.items = items

    def outgoing(self, step: Round, items: Any, reduces: bool) -> dict[Any, Any]:
        if not reduces:
            return {key: self.items[key] for key in items}
        have = {"block": self.block, "partial": self.partial, "total": self.total}[step.carries]
        return {c: have[c] for c in range(*items)}

    def take(self, step: Round, come: dict[int, dict[Any, Any]], reduces: bool) -> None:
        if not reduces:
            for values in come.values():
                self.items.update(values)
            return
        if step.merge == "all":
            mine = self.partial
            chunks = next(iter(come.values()), mine).keys()
            for c in chunks:
                mine[c] = tree([mine[c] if k == self.me else come[k][c] for k in step.of])
            return
        for values in come.values():
            for c, value in values.items():
                if step.carries == "total":
                    self.total[c] = value
                else:
                    self.partial[c] = (value, self.partial[c]) if step.merge == "before" else (self.partial[c], value)


def run(schedules: Sequence[Schedule], items: Callable[[int], dict[Any, Any]] | None = None) -> list[Member]:
    """Run the schedules of all members. Raises where one waits for what nobody sends, or a message is left."""
    reduces = items is None
    members = [Member(k, s.chunks, {} if items is None else items(k)) for k, s in enumerate(schedules)]
    queues: dict[tuple[int, int], deque[Any]] = {}
    at, sent = [0] * len(members), [False] * len(members)
    moved = True
    while moved:
        moved = False
        for me, schedule in enumerate(schedules):
            while at[me] < len(schedule.rounds):
                step = schedule.rounds[at[me]]
                if step.carries == "total" and reduces:
                    for c, value in members[me].partial.items():
                        members[me].total.setdefault(c, value)
                if not sent[me]:
                    for transfer in step.sends:
                        message = members[me].outgoing(step, transfer.items, reduces)
                        queues.setdefault((me, transfer.peer), deque()).append(message)
                    sent[me] = moved = True
                if not all(queues.get((t.peer, me)) for t in step.receives):
                    break
                come = {t.peer: queues[t.peer, me].popleft() for t in step.receives}
                for t in step.receives:
                    expected = range(*t.items) if reduces else t.items
                    assert list(come[t.peer]) == list(expected), (
                        "sender and receiver agree on the items and their order"
                    )
                members[me].take(step, come, reduces)
                at[me], sent[me], moved = at[me] + 1, False, True
    assert at == [len(s.rounds) for s in schedules], "everyone has received what it waits for"
    assert not any(queues.values()), "no message is left"
    return members


def log2(n: int) -> int:
    return (n - 1).bit_length()


def all_reduce_algorithms(n: int) -> list[tuple[str, int]]:
    names = ["recursive doubling", "pairwise", *["halving and doubling"] * (n & (n - 1) == 0)]
    found = [(name, 1) for name in names]
    for per_host in (2, 4, 8):
        hosts = n // per_host
        if n % per_host == 0 and hosts > 1:
            between = ["recursive doubling", "pairwise", *["halving and doubling"] * (hosts & (hosts - 1) == 0)]
            found += [(f"two levels, {name}", per_host) for name in between]
    return found


@pytest.mark.parametrize("n", SIZES)
def test_all_reduce_sums_by_the_tree_at_every_member(n):
    for algorithm, per_host in all_reduce_algorithms(n):
        schedules = [reductions.all_reduce(algorithm, n, k, per_host) for k in range(n)]
        for member in run(schedules):
            totals = {**member.partial, **member.total}
            for c in range(schedules[0].chunks):
                assert totals[c] == tree([f"{k}:{c}" for k in range(n)]), (algorithm, member.me, c)


@pytest.mark.parametrize("n", SIZES)
def test_reduce_scatter_gives_each_member_its_part(n):
    for algorithm in "pairwise", "halving":
        order = list(range(n)) if algorithm == "pairwise" else list(reductions.packed_order(n))
        assert sorted(order) == list(range(n))
        members = run([reductions.reduce_scatter(algorithm, n, k) for k in range(n)])
        for member in members:
            c = order.index(member.me)
            assert {**member.partial, **member.total}[c] == tree([f"{k}:{c}" for k in range(n)]), (algorithm, member.me)


@pytest.mark.parametrize("n", SIZES)
def test_reduce_gives_the_root_the_sum(n):
    for root in sorted({0, 1 % n, n // 2, n - 1}):
        for algorithm in ["binomial tree", "pairwise", *["halving and gather"] * (n & (n - 1) == 0)]:
            schedules = [reductions.reduce(algorithm, n, k, root) for k in range(n)]
            member = run(schedules)[root]
            for c in range(schedules[0].chunks):
                assert {**member.partial, **member.total}[c] == tree([f"{k}:{c}" for k in range(n)]), (algorithm, root)


@pytest.mark.parametrize("n", SIZES)
def test_all_gather_and_all_to_all_deliver_every_item(n):
    for algorithm in "Bruck", "ring", "pairwise":
        for member in run([routing.all_gather(algorithm, n, k) for k in range(n)], lambda k: {k: f"from {k}"}):
            assert {k: member.items[k] for k in range(n)} == {k: f"from {k}" for k in range(n)}, algorithm
    for algorithm in "Bruck", "pairwise":
        members = run(
            [routing.all_to_all(algorithm, n, k) for k in range(n)],
            lambda k: {(k, to): f"from {k} to {to}" for to in range(n)},
        )
        for member in members:
            for k in range(n):
                assert member.items[k, member.me] == f"from {k} to {member.me}", algorithm


@pytest.mark.parametrize("n", SIZES)
def test_gather_scatter_and_broadcast_deliver_every_item(n):
    for root in sorted({0, 1 % n, n // 2, n - 1}):
        for algorithm in "binomial tree", "direct":
            members = run([routing.gather(algorithm, n, k, root) for k in range(n)], lambda k: {k: f"from {k}"})
            assert {k: members[root].items[k] for k in range(n)} == {k: f"from {k}" for k in range(n)}
            members = run(
                [routing.scatter(algorithm, n, k, root) for k in range(n)],
                lambda k, root=root: {to: f"to {to}" for to in range(n)} if k == root else {},
            )
            assert [member.items[k] for k, member in enumerate(members)] == [f"to {k}" for k in range(n)]
        for algorithm in "binomial tree", "scatter and all-gather":
            schedules = [routing.broadcast(algorithm, n, k, root) for k in range(n)]
            chunks = {c: f"chunk {c}" for c in range(schedules[0].chunks)}
            members = run(schedules, lambda k, root=root, chunks=chunks: dict(chunks) if k == root else {})
            assert all(member.items == chunks for member in members), algorithm


LARGE = [2, 3, 5, 8, 13, 64, 100, 1000, 1024, *(pytest.param(n, marks=pytest.mark.full) for n in (4095, 4096))]


@pytest.mark.parametrize("n", LARGE)
def test_small_blocks_take_about_log2_n_rounds(n):
    """The bounds of Thakur, Rabenseifner and Gropp (2005) and of Bruck et al. (1997)."""
    limit = log2(n) + 2
    for k in range(n):
        assert messages_of(reductions.all_reduce("recursive doubling", n, k)) <= log2(n)
    assert critical_path([reductions.all_reduce("recursive doubling", n, k) for k in range(n)]) <= limit
    assert critical_path([routing.all_gather("Bruck", n, k) for k in range(n)]) <= log2(n)
    assert critical_path([routing.all_to_all("Bruck", n, k) for k in range(n)]) <= log2(n)
    assert critical_path([reductions.reduce_scatter("halving", n, k) for k in range(n)]) <= limit
    for root in {0, n // 3, n - 1}:
        assert critical_path([routing.gather("binomial tree", n, k, root) for k in range(n)]) <= log2(n)
        assert critical_path([routing.scatter("binomial tree", n, k, root) for k in range(n)]) <= log2(n)
        assert critical_path([routing.broadcast("binomial tree", n, k, root) for k in range(n)]) <= log2(n)
        assert critical_path([reductions.reduce("binomial tree", n, k, root) for k in range(n)]) <= limit


@pytest.mark.parametrize("n", [2, 3, 6, 8, 13, 64, 96, 1024])
def test_large_all_reduces_send_at_most_two_blocks(n):
    size = 5 * n  # chunks of 5 entries
    for algorithm, per_host in all_reduce_algorithms(n):
        if "doubling" in algorithm and "halving" not in algorithm:
            continue
        for k in (0, 1, n // 2, n - 1):
            schedule = reductions.all_reduce(algorithm, n, k, per_host)
            chunk = size // schedule.chunks
            sent = sent_bytes(schedule, lambda span, chunk=chunk: (span[1] - span[0]) * chunk)
            assert sent <= 2 * size * (n - 1) / n, algorithm


@pytest.mark.parametrize(("n", "per_host"), [(4, 2), (8, 2), (8, 4), (16, 8), (64, 4), (256, 16)])
def test_large_blocks_go_between_hosts_once(n, per_host):
    """What comes to a host: each block of the others in an all-gather; in reductions the sum of each host that halves,
    not the blocks of its members."""
    hosts = n // per_host

    def enters(schedules: Sequence[Schedule], items: Callable[[Any], int]) -> list[int]:
        came = [0] * hosts
        for me, schedule in enumerate(schedules):
            for step in schedule.rounds:
                for transfer in step.sends:
                    host = transfer.peer // per_host
                    came[host] += items(transfer.items) * (host != me // per_host)
        return came

    chunks = lambda span: span[1] - span[0]
    gathers = [phases.all_gather_large(n, k, per_host) for k in range(n)]
    assert enters(gathers, len) == [n - 1] * hosts
    scatters = [phases.reduce_scatter(n, k, 1 << 30) for k in range(n)]
    assert enters(scatters, chunks) == [n - per_host] * hosts
    at_root = enters([phases.reduce(n, k, 0, 1 << 30) for k in range(n)], chunks)
    assert at_root == [2 * (n - per_host)] + [n - per_host] * (hosts - 1)
    sums = [phases.all_reduce(n, k, 1 << 30, per_host) for k in range(n)]
    assert enters(sums, chunks) == [2 * (n - per_host)] * hosts


def test_a_wait_for_nobody_is_found():
    lonely = Schedule("lonely", (Round(receives=(routing.Transfer(1, (0, 1)),)),))
    with pytest.raises(ValueError, match="nobody sends"):
        critical_path([lonely, Schedule("silent", ())])
