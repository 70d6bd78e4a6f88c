"""The cost of collectives: that of the schedules, message by message, and the formulas of the literature."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log2

import numpy as np
import pytest

from spmd.layout import block_sizes, offsets
from spmd.transport.algorithms import choice, cost, phases, reductions, routing
from spmd.transport.algorithms.cost import Cost, Sizes
from spmd.transport.algorithms.schedule import Schedule, critical_path, messages_of, sent_bytes

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 31, 32, 33]
MANY = [
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    100,
    127,
    128,
    129,
    512,
    1000,
    1024,
    2047,
    2048,
    4095,
    4096,
]
LARGE = choice.INLINE_MAX + 8


def of(schedule: Schedule, nbytes) -> Cost:
    return Cost(messages_of(schedule), sent_bytes(schedule, nbytes), len(schedule.rounds))


def reduced(schedule: Schedule, sizes, itemsize: int, partial: int) -> Cost:
    """A reduction, counted message by message. sizes: the entries of the chunks."""
    nbytes = 0
    for step in schedule.rounds:
        for _, (start, stop) in step.sends:
            nbytes += sum(sizes[start:stop]) * (partial if step.carries == "partial" else itemsize)
    return Cost(messages_of(schedule), nbytes, len(schedule.rounds))


def large_alone(schedule: Schedule, nbytes) -> Cost:
    """A schedule by which only large items go."""
    rounds = []
    for step in schedule.rounds:
        sends, receives = (
            [k for t in transfers for k in t.items if nbytes[k] > choice.INLINE_MAX]
            for transfers in (step.sends, step.receives)
        )
        rounds.append(Cost(len(sends), sum(nbytes[k] for k in sends), bool(sends or receives)))
    return sum(rounds, Cost())


def blocks(n: int) -> list[int]:
    """Bytes of blocks: uneven, some of none, some that go directly."""
    return [(0, 24, LARGE, 8, LARGE + 16)[(k * k + 3 * k) % 5] for k in range(n)]


def members(n: int) -> Iterable[int]:
    return range(n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("size", "itemsize", "partial"),
    [(0, 8, 8), (3, 8, 8), (1000, 8, 8), (70001, 8, 8), (700001, 8, 8), (70001, 2, 4), (700001, 2, 4)],
)
def test_reductions_cost_what_their_schedules_send(n, size, itemsize, partial):
    for me in members(n):
        for algorithm in ["recursive doubling", "halving and doubling", "pairwise"]:
            if choice.possible(algorithm, n):
                schedule = reductions.all_reduce(algorithm, n, me)
                expected = reduced(schedule, block_sizes(size, schedule.chunks), itemsize, partial) if n > 1 else Cost()
                assert cost.all_reduce(n, me, size, itemsize, partial, 1, algorithm) == expected
        chosen = phases.all_reduce(n, me, size * itemsize, 1, partial != itemsize)
        assert cost.all_reduce(n, me, size, itemsize, partial) == (
            reduced(chosen, block_sizes(size, chosen.chunks), itemsize, partial) if n > 1 else Cost()
        )
        short, parts = partial != itemsize, [(size + 7 * k) % (size + 1) for k in range(n)]
        for root in {0, n // 2, n - 1}:
            schedule = phases.reduce(n, me, root, size * itemsize, short)
            assert cost.reduce(n, me, root, size, itemsize, partial) == (
                reduced(schedule, block_sizes(size, schedule.chunks), itemsize, partial) if n > 1 else Cost()
            )
        schedule = phases.reduce_scatter(n, me, sum(parts) * itemsize, short)
        order = reductions.packed_order(n) if schedule.algorithm == "halving" else range(n)
        assert cost.reduce_scatter(n, me, parts, itemsize, partial) == (
            reduced(schedule, [parts[k] for k in order], itemsize, partial) if n > 1 else Cost()
        )


@pytest.mark.parametrize(("n", "per_host"), [(4, 2), (6, 2), (8, 2), (8, 4), (12, 4), (16, 4), (20, 4), (32, 8)])
@pytest.mark.parametrize("between", ["recursive doubling", "halving and doubling", "pairwise"])
def test_two_levels_cost_what_their_schedules_send(n, per_host, between):
    algorithm = f"two levels, {between}"
    if not choice.possible(algorithm, n, per_host):
        return
    schedules = [reductions.all_reduce(algorithm, n, me, per_host) for me in range(n)]
    for me, schedule in enumerate(schedules):
        for itemsize, partial in ((8, 8), (2, 4)):
            expected = reduced(schedule, block_sizes(10007, schedule.chunks), itemsize, partial)
            assert cost.all_reduce(n, me, 10007, itemsize, partial, per_host, algorithm) == expected
    assert cost.path("all_reduce", algorithm, n, 0, per_host) == critical_path(schedules)


@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("each", [blocks, lambda n: [0] * n, lambda n: [16] * n, lambda n: [LARGE] * n])
def test_movements_cost_what_their_schedules_send(n, each):
    every = each(n)
    sizes = Sizes(every)
    inline = [s if s <= choice.INLINE_MAX else 0 for s in every]
    large = [k for k in range(n) if every[k] > choice.INLINE_MAX]
    small = lambda items: sum(inline[k] for k in items)
    for me in members(n):
        directly = Cost(*(n - 1, (n - 1) * every[me]) if me in large else (0, 0), bool(large))
        around = large_alone(routing.all_gather("ring", n, me), every)
        for name in ["Bruck", "ring", "pairwise"]:
            first = of(routing.all_gather(name, n, me), small)
            assert cost.all_gather(n, me, sizes, 1, name) == first + directly, name
            assert cost.all_gather(n, me, sizes, 1, name, "ring") == first + around, name
            assert cost.all_gather(n, me, sizes, 2, name) == first + (around if n > 2 else directly), name
        for root in {0, n // 3, n - 1}:
            for name in ["binomial tree", "direct"]:
                first = of(routing.gather(name, n, me, root), small)
                more = Cost(1, every[me], 1) if me in large and me != root else Cost(0, 0, bool(large) and me == root)
                assert cost.gather(n, me, root, sizes, name) == first + more
                first = of(routing.scatter(name, n, me, root), small)
                rest = [k for k in large if k != me] if me == root else []
                more = Cost(len(rest), sum(every[k] for k in rest), bool(rest) or (me in large and me != root))
                assert cost.scatter(n, me, root, sizes, name) == first + more
            for nbytes in (0, 40, choice.TREE_MAX, choice.TREE_MAX + 1, 10000019):
                expected = of(phases.broadcast(n, me, root), lambda _, b=nbytes: b if b <= choice.TREE_MAX else 0)
                if nbytes > choice.TREE_MAX:
                    schedule = phases.spread(n, me, root)
                    ends = offsets(block_sizes(nbytes, schedule.chunks))
                    chunk = [ends[k + 1] - ends[k] for k in range(schedule.chunks)] * (n // schedule.chunks)
                    expected += of(schedule, lambda items, c=chunk, r=root: sum(c[(k - r) % n] for k in items))
                assert cost.broadcast(n, me, root, nbytes) == expected


@pytest.mark.parametrize("n", SIZES[1:])
def test_an_all_to_all_costs_what_its_schedule_sends(n):
    """Where parts depend on how far they go only, each member passes on parts as large as its own."""
    by_distance = blocks(n)
    inline = [s if s <= choice.INLINE_MAX else 0 for s in by_distance]
    direct = [s for s in by_distance[1:] if s > choice.INLINE_MAX]
    for me in members(n):
        parts = [by_distance[(k - me) % n] for k in range(n)]
        for name in ["Bruck", "pairwise"]:
            schedule = routing.all_to_all(name, n, me)
            first = of(schedule, lambda items: sum(inline[(target - source) % n] for source, target in items))
            expected = first + Cost(len(direct), sum(direct), bool(direct))
            assert cost.all_to_all(n, me, parts, name) == expected


def test_bytes_that_pass_through_others_are_counted_once_in_all():
    """Whatever the sizes of the parts: the sum over all members is exact."""
    rng, n = np.random.default_rng(0), 13
    parts = rng.integers(0, 100, (n, n)).tolist()
    sent = sum(
        sent_bytes(routing.all_to_all("Bruck", n, me), lambda items: sum(parts[s][t] for s, t in items))
        for me in range(n)
    )
    assert sum(cost.all_to_all(n, me, parts[me]).nbytes for me in range(n)) == sent


@pytest.mark.parametrize("n", SIZES[1:])
def test_paths_are_those_of_the_schedules(n):
    for kind, algorithm in cost._PATHS:
        module = reductions if kind in ("all_reduce", "reduce", "reduce_scatter") else routing
        if not choice.possible(algorithm, n):
            continue
        more = (n // 2,) if kind in ("broadcast", "gather", "scatter", "reduce") else ()
        schedules = [getattr(module, kind)(algorithm, n, me, *more) for me in range(n)]
        assert cost.path(kind, algorithm, n) == critical_path(schedules), (kind, algorithm)


# The acceptance: closed formulas.


@pytest.mark.parametrize("n", MANY)
def test_small_collectives_take_about_log_n_rounds(n):
    log = ceil(log2(n))
    some = {*range(min(n, 9)), n // 3, n // 2, n - 2, n - 1} & {*range(n)}
    small = Sizes.equal(n, 8)
    for me in some:
        assert cost.all_reduce(n, me, 1, 8, 8).rounds <= log + 2
        assert cost.all_reduce(n, me, 0, 8, 8).rounds <= log + 2  # a barrier
        assert cost.agreement(n, me).rounds <= log + 2
        assert 2 * cost.agreement(n, me).messages <= 2 * log  # a map without collectives
        for root in (0, n - 1):
            assert cost.broadcast(n, me, root, 8).rounds <= log + 2
            assert cost.gather(n, me, root, small).rounds <= log + 2
            assert cost.scatter(n, me, root, small).rounds <= log + 2
            assert cost.reduce(n, me, root, 1, 8, 8).rounds <= log + 2
        assert cost.all_gather(n, me, small) == Cost(log, 8 * (n - 1), log)
        assert cost.shapes(n, me) == Cost(log, 0, log)
        in_all = cost.all_to_all(n, me, [8] * n)
        assert in_all.rounds <= log
        assert in_all.messages <= max(log, n - 1 if n <= 3 else 0)
        if n & (n - 1) == 0 and n > 2:
            assert in_all.nbytes == 8 * n // 2 * log  # Bruck et al.: half of the blocks in each round
    for kind, algorithm in [("all_reduce", choice.all_reduce(n, 8)), ("broadcast", "binomial tree")]:
        assert cost.path(kind, algorithm, n) <= log + 2
    assert cost.path("gather", "binomial tree", n) <= log + 2


@pytest.mark.parametrize("n", [n for n in MANY if n > 2])
def test_large_all_reduces_send_twice_the_block_at_most(n):
    size = 1 << 20
    for me in {0, 1, n // 2, n - 1}:
        found = cost.all_reduce(n, me, size, 4, 4)
        own = block_sizes(size, n)[me]
        assert found.nbytes <= 2 * (n - 1) / n * size * 4 + 4 * n  # chunks differ by an entry
        if n & (n - 1) == 0:  # Rabenseifner: 2 log2 n messages, 2 (n - 1) / n of the block
            assert found == Cost(2 * int(log2(n)), 2 * (size - size // n) * 4, 2 * int(log2(n)))
        else:
            assert found == Cost(2 * (n - 1), (size - own + (n - 1) * own) * 4, 2)


@pytest.mark.parametrize("n", [4, 5, 8, 100, 1024, 4095])
def test_a_large_broadcast_sends_each_chunk_round(n):
    """Van de Geijn: a scatter and a ring; all members together send the block n - 1 times, and what a tree adds."""
    nbytes = 2 * choice.TREE_MAX
    sent = [cost.broadcast(n, me, 0, nbytes) for me in range(n)]
    assert sum(c.nbytes for c in sent) >= (n - 1) * nbytes
    assert max(c.nbytes for c in sent) <= 2 * nbytes
    assert cost.path("broadcast", "scatter and all-gather", n) == n - 1 + ceil(log2(n))
