"""transport="counting": what each worker would send, by the formulas, and as the ledger and the schedules have it."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import MeshError, MismatchError
from spmd.transport.algorithms import choice, routing
from spmd.transport.algorithms.schedule import critical_path, sent_bytes

LARGE = choice.INLINE_MAX


def ran(f):
    def body(x):
        f(x)
        return x

    return body


def counted(f, n: int, x=None, hosts: int = 1):
    mesh = spmd.Mesh(x=n, transport="counting")
    mesh.transport.on_hosts(hosts)
    spmd.map(ran(f), P("x"), P("x"), mesh=mesh)(np.zeros((2 * n, 3)) if x is None else x)
    return mesh.transport.counts


def tables(counts) -> dict[str, list[list[int]]]:
    return {kind: table.tolist() for kind, table in counts.by_kind.items() if kind != "agreement"}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13, 16, 64, 100, 256])
def test_small_collectives_take_log_n_rounds(n):
    log = ceil(log2(n))
    counts = counted(lambda x: spmd.psum(x, "x"), n)
    if n == 1:
        assert counts.messages.sum() == counts.critical_path == 0
        return
    assert counts.by_kind["all_reduce"][0].max() <= log
    assert counts.by_kind["all_reduce"][2].max() <= log + 2
    assert counts.by_kind["agreement"][0].max() <= log
    assert counts.critical_path <= 2 * (log + 1)
    gathered = counted(lambda x: spmd.all_gather(x, "x"), n).by_kind["all_gather"]
    assert gathered.tolist() == [[log] * n, [(n - 1) * 48] * n, [log] * n]
    told = counted(lambda x: spmd.broadcast(spmd.keep(np.zeros(3), "x"), "x"), n)
    assert told.by_kind["broadcast"][0].sum() == n - 1
    assert told.by_kind["broadcast"][0].max() == log


@pytest.mark.parametrize("n", [2, 3, 4, 7, 64, 300])
def test_neighbours_send_to_neighbours_only(n):
    assert tables(counted(lambda x: spmd.shift(x, "x", 1), n)) == {"exchange": [[1] * n, [48] * n, [1] * n]}
    halo = counted(lambda x: spmd.halo_exchange(x, P("x"), 1), n).by_kind["exchange"]
    neighbours = [1] + [2] * (n - 2) + [1]
    assert halo.tolist() == [neighbours, [24 * k for k in neighbours], [1] * n]
    dropped = counted(lambda x: spmd.shift(x, "x", 1, wrap=False), n).by_kind["exchange"]
    assert dropped[0].tolist() == [1] * (n - 1) + [0]


def test_a_map_without_collectives_costs_an_agreement():
    for n in (2, 3, 4, 5, 31, 64, 100):
        counts = counted(lambda x: None, n)
        assert counts.times == {"agreement": 1}
        assert counts.messages.max() <= 2 * ceil(log2(n))


def test_two_levels_where_workers_share_hosts():
    n, hosts = 24, 6
    x = np.zeros((n, n << 14))
    counts = counted(lambda x: spmd.psum(x, "x"), n, x, hosts)
    size, p = 8 * x.shape[1], n // hosts
    chunk = size // n
    inside = (size - size // p) + (p - 1) * size // p
    between = 2 * (hosts - 1) * chunk
    messages = 2 * (p - 1) + 2 * (hosts - 1)
    assert tables(counts) == {"all_reduce": [[messages] * n, [inside + between] * n, [4] * n]}
    one_level = {"all_reduce": [[2 * (n - 1)] * n, [2 * (n - 1) * chunk] * n, [2] * n]}
    assert tables(counted(lambda x: spmd.psum(x, "x"), n, x)) == one_level
    assert tables(counted(lambda x: spmd.psum(x, "x"), n, x, 5)) == one_level  # uneven hosts


def test_uneven_blocks_are_counted_exactly():
    """All-to-all and gather of uneven blocks, small, empty, and large ones, against the schedules."""
    n = 5
    rows = [0, 1, 4, LARGE // 8 + 1, 2]

    def body(x):
        k = spmd.worker_index("x")
        block = spmd.varying(np.zeros((rows[k], 1)), "x")
        sizes = [(rows[k] if t == (k + 1) % n else 0) for t in range(n)]
        spmd.all_to_all(block, "x", 0, 0, tiled=True, sizes=sizes)
        spmd.gather(block, "x")

    counts = counted(body, n)
    inline = [8 * r if 8 * r <= LARGE else 0 for r in rows]
    part = lambda s, t: inline[s] if t == (s + 1) % n else 0
    large = [8 * rows[k] if k == 3 else 0 for k in range(n)]
    schedules = [routing.all_to_all("Bruck", n, k) for k in range(n)]
    sent = [sent_bytes(s, lambda items: sum(part(*item) for item in items)) for s in schedules]
    assert counts.by_kind["all_to_all"][0].tolist() == [3 + (k == 3) for k in range(n)]
    assert counts.by_kind["all_to_all"][1].tolist() == [a + b for a, b in zip(sent, large, strict=True)]
    up = [sent_bytes(routing.gather("binomial tree", n, k, 0), lambda i: sum(inline[j] for j in i)) for k in range(n)]
    assert counts.by_kind["gather"][1].tolist() == [a + b for a, b in zip(up, large, strict=True)]
    assert counts.by_kind["gather"][0].tolist() == [0, 1, 1, 2, 1]


def body_of_many(x):
    y = spmd.psum(x, "x")
    z = spmd.all_gather(x, "x", tiled=True) + y[:1]
    spmd.psum_scatter(spmd.varying(z, "x"), "x", tiled=True)
    spmd.all_to_all(spmd.varying(z, "x"), "x", 0, 0, tiled=True)
    spmd.ppermute(x, "x", [(0, 1)])
    r = spmd.sum_reduce(x, "x", 1)
    spmd.broadcast(r, "x", 1)
    spmd.scatter(spmd.keep(np.zeros((2 * spmd.axis_size("x"), 3)), "x"), "x")
    spmd.gather(x, "x")
    spmd.pmax(x, "x")
    return x


@pytest.mark.parametrize("width", [3, 3000])
@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_the_ledger_of_another_transport_counts_the_same(n, width):
    """For even blocks."""
    x = np.zeros((2 * n, width))
    mesh = spmd.Mesh(x=n, transport="counting")
    with spmd.ledger() as own:
        spmd.map(body_of_many, P("x"), P("x"), mesh=mesh)(x)
    with spmd.ledger() as log:
        spmd.map(body_of_many, P("x"), P("x"), mesh=spmd.Mesh(x=n, transport="local"))(x)
    counts, agreed = mesh.transport.counts, mesh.transport.counts.by_kind["agreement"]
    for k in range(n):
        expected = (counts.messages - agreed[0])[k], counts.nbytes[k], (counts.rounds - agreed[2])[k]
        for found in (log, own):
            record = found.workers[k]
            assert (record.messages, record.bytes, record.rounds)[:2] == expected[:2]


def test_results_have_their_shapes_and_gradients_are_counted():
    n, width = 4, 5000
    mesh = spmd.Mesh(x=n, transport="counting")

    def loss(w, x):
        return spmd.psum(np.sum(np.outer(x[:, 0], w)), "x")

    f = spmd.map(loss, (P(), P("x")), P(), mesh=mesh)
    g = spmd.grad(f)(np.ones(width), np.ones((2 * n, 1)))
    assert g.shape == (width,)
    assert mesh.transport.counts.times["all_reduce"] == 2
    gathered = spmd.map(lambda x: spmd.all_gather(x, "x", tiled=True), P("x"), P("x"), mesh=mesh)(np.ones((8, width)))
    assert gathered.shape == (n * 8, width)
    assert gathered.dtype == float


def test_numbers_on_which_a_body_depends_have_their_values():
    mesh = spmd.Mesh(x=3, transport="counting")
    x = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=mesh)(np.arange(6.0))
    np.testing.assert_array_equal(x.numpy(), [0 + 2 + 4, 1 + 3 + 5])
    ints = spmd.map(lambda x: spmd.shift(x, "x", 1), P("x"), P("x"), mesh=mesh)(np.arange(6000))
    np.testing.assert_array_equal(ints.numpy(), np.roll(np.arange(6000), 2000))


def test_groups_wait_for_their_own_members_only():
    mesh = spmd.Mesh(x=4, y=2, transport="counting")
    body = ran(lambda x: (spmd.psum(x, "x"), spmd.psum(x, "y")))
    spmd.map(body, P(("x", "y")), P(("x", "y")), mesh=mesh)(np.zeros((8, 1)))
    counts = mesh.transport.counts
    assert counts.times == {"all_reduce": 2 + 4, "agreement": 1}
    assert counts.critical_path == 2 + 1 + 3
    counts.reset()
    assert counts.critical_path == counts.messages.sum() == 0


def test_chains_of_messages():
    """A worker sends one at a time, and a message waits for what comes before it."""
    counts = counted(lambda x: [spmd.ppermute(x, "x", [(k, k + 1)]) for k in range(3)], 4)
    assert counts.critical_path == 3 + 2
    n = 9
    tree = critical_path([routing.broadcast("binomial tree", n, k, 0) for k in range(n)])
    told = counted(lambda x: spmd.broadcast(spmd.keep(np.zeros(3), "x"), "x"), n)
    assert told.critical_path == tree + 3 + 2  # and the agreement of nine: two of them act as one


def test_errors_are_those_of_virtual_workers():
    mesh = spmd.Mesh(x=2, transport="counting")
    with pytest.raises(MismatchError):
        spmd.map(ran(lambda x: spmd.psum(x[: 1 + spmd.worker_index("x")], "x")), P("x"), P("x"), mesh=mesh)(
            np.zeros((4, 1))
        )
    with pytest.raises(MeshError, match="counting"):
        spmd.Mesh(x=2, transport="counting", device="cuda")


@pytest.mark.parametrize("n", [1000, 1024])
def test_thousands_of_workers(n):
    """A few collectives of very many workers take seconds."""

    def body(x):
        y = spmd.psum(x, "x") + spmd.shift(x, "x", 1)
        spmd.halo_exchange(y, P("x"), 1)

    counts = counted(body, n, np.zeros((2 * n, 1000)))
    assert counts.by_kind["exchange"][0].max() == 1 + 2
    assert counts.by_kind["all_reduce"][0].max() <= 10
