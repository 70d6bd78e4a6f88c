"""From worker to worker: permutations, pairs of partners, and pieces of any length to everyone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Each, Oracle

import spmd
from operators.test_root import near, on_workers
from spmd import P
from spmd.errors import LayoutError, StateError
from spmd.kernels import on_device
from spmd.operators.all_to_all import Piece, RaggedAllToAll
from spmd.testing import check_adjoint

N = 4
MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 7}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}]
ORDERS = [("x",), ("y",), ("x", "y"), ("y", "x")]


@pytest.fixture
def mesh(scheduler) -> spmd.Mesh:
    return spmd.Mesh(x=N, transport="local", scheduler=scheduler)


@st.composite
def groups(draw) -> tuple[dict[str, int], tuple[str, ...], int]:
    """A mesh, some of its axes in any order, and how many workers lie along them."""
    axes = draw(st.sampled_from(MESHES))
    over = tuple(draw(st.permutations(list(axes))))[: draw(st.integers(1, len(axes)))]
    return axes, over, math.prod(axes[a] for a in over)


# pshuffle, sendrecv, pswapaxes


@given(groups(), st.data(), st.sampled_from(["lockstep", "threads"]), st.booleans())
@settings(max_examples=60)
def test_blocks_are_shuffled_as_the_list_of_sources_says(group, data, scheduler, check):
    axes, over, n = group
    perm = data.draw(st.permutations(range(n)))
    rng = np.random.default_rng(0)
    blocks = [rng.integers(-9, 9, (rng.integers(0, 3), 2)) for _ in range(math.prod(axes.values()))]
    world = Oracle(axes)
    want = world.meet(Each(blocks), over, lambda bs: [bs[s] for s in perm]).blocks

    def body():
        x = spmd.varying(blocks[spmd.worker_index(tuple(axes))], tuple(axes))
        y = spmd.pshuffle({"a": x, "b": (x,)}, over, perm)
        return spmd.block(y["a"]), spmd.block(y["b"][0])

    for got, expected in zip(on_workers(axes, body, scheduler, check), want, strict=True):
        for y in got:
            np.testing.assert_array_equal(y, expected)
            assert on_device(y) or not y.flags.writeable


@given(groups(), st.data(), st.sampled_from(["lockstep", "threads"]))
@settings(max_examples=60)
def test_partners_may_be_told_in_every_form(group, data, scheduler):
    """Numbers of one's own, plain or Varying; what tells those of all; and either of each."""
    axes, over, n = group
    targets = data.draw(st.permutations(range(n)))
    dests = [t if data.draw(st.booleans()) else None for t in targets]
    sources = [dests.index(k) if k in dests else None for k in range(n)]
    forms: list[Callable] = [
        lambda all_, k: all_[k],
        lambda all_, k: all_,
        lambda all_, k: all_.__getitem__,
        lambda all_, k: None if all_[k] is None else spmd.varying(np.int32(all_[k]), over),
        lambda all_, k: all_[k] if all_[k] is None else np.int64(all_[k]),
    ]
    source, dest = data.draw(st.sampled_from(forms)), data.draw(st.sampled_from(forms))
    total = math.prod(axes.values())
    blocks = [np.full((1 + w % 2, 2), float(w + 1)) for w in range(total)]
    pairs = [(s, t) for s, t in enumerate(dests) if t is not None]
    want = Oracle(axes).ppermute(Each(blocks), over, pairs).blocks

    def body():
        k = spmd.worker_index(over)
        x = spmd.varying(blocks[spmd.worker_index(tuple(axes))], tuple(axes))
        f = lambda x: spmd.sendrecv(x, over, source(sources, k), dest(dests, k))
        y, pull = spmd.vjp(f, x)
        back = spmd.sendrecv(y, over, dest(dests, k), source(sources, k))
        return spmd.block(y), spmd.block(pull(y)[0]), spmd.block(back)

    for w, (y, g, back) in enumerate(on_workers(axes, body, scheduler)):
        np.testing.assert_array_equal(y, want[w])
        assert g.shape == blocks[w].shape
        if dests[_place(axes, over, w)] is not None:
            np.testing.assert_array_equal(g, blocks[w])
            np.testing.assert_array_equal(back, blocks[w])
        else:
            assert not g.any()


def _place(axes, over, w: int) -> int:
    return spmd.Mesh(**axes, transport="local").group(w, over).index


@pytest.mark.parametrize("over", ORDERS, ids=str)
def test_the_adjoint_of_each_is_exact(over):
    mesh = spmd.Mesh(x=3, y=2, transport="local")
    n = math.prod(mesh.axes[a] for a in over)
    maps: list[Callable] = [
        lambda x: spmd.pshuffle(x, over, [(3 * k + 1) % n if n % 3 else (k + 1) % n for k in range(n)]),
        lambda x: spmd.sendrecv(x, over, lambda k: (k + 1) % n, lambda k: (k - 1) % n),
        lambda x: spmd.sendrecv(x, over, [None, *range(n - 1)], [*range(1, n), None]),
        lambda x: ragged(x, 2 * x, over),
    ]
    for move in maps:
        check_adjoint(move, (2 * n + 1, 3), mesh=mesh, in_specs=P(over), exact=True)
    check_adjoint(lambda x: spmd.pswapaxes(x, over, 1), (4, n), mesh=mesh, in_specs=P(), exact=True)


@given(groups(), st.integers(0, 2), st.sampled_from(["lockstep", "threads"]))
@settings(max_examples=30)
def test_swapped_axes_are_the_transpose_of_workers_and_entries(group, axis, scheduler):
    axes, over, n = group
    shape = [2, 3, 1]
    shape[axis] = n
    total = math.prod(axes.values())
    blocks = list(np.random.default_rng(0).integers(-99, 99, (total, *shape)).astype(float))

    def transposed(bs: list) -> list:
        whole = np.stack(bs)
        return list(np.swapaxes(whole, 0, axis + 1))

    want = Oracle(axes).meet(Each(blocks), over, transposed).blocks

    def body():
        x = spmd.varying(blocks[spmd.worker_index(tuple(axes))], tuple(axes))
        y = spmd.pswapaxes([x], over, axis - 3)[0]
        return spmd.block(y), spmd.block(spmd.pswapaxes(y, over, axis))

    for (y, x), expected, block in zip(on_workers(axes, body, scheduler), want, blocks, strict=True):
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(x, block)


def test_what_partners_cost():
    """A message per pair; and 16 bytes to every other, in log2 n rounds, where workers know their own partners only."""

    def sent(body):
        with spmd.ledger() as log:
            on_workers({"x": N}, body)
        return [(log.workers[w].messages, log.workers[w].bytes) for w in range(N)]

    x = lambda: spmd.varying(np.ones(8), "x")
    known = lambda: spmd.sendrecv(x(), "x", [3, 0, None, None], [1, None, None, 0])
    assert sent(known) == [(1, 64), (0, 0), (0, 0), (1, 64)]
    ring = lambda: spmd.sendrecv(x(), "x", (spmd.worker_index("x") - 1) % N, (spmd.worker_index("x") + 1) % N)
    assert sent(ring) == [(1 + 2, 64 + 48)] * N
    assert sent(lambda: spmd.pshuffle(x(), "x", [1, 0, 2, 3])) == [(1, 64), (1, 64), (0, 0), (0, 0)]
    assert (
        sent(lambda: spmd.pswapaxes(x()[:4], "x", 0)) == [(2, 4 * 8)] * N
    )  # of four workers, a part of three goes twice


# ragged_all_to_all


def ragged(x, y, over):
    """Members exchange 0 to 2 rows each, from where there are some, to the end of y backwards."""
    n, k = spmd.axis_size(over), spmd.worker_index(over)
    rows = spmd.all_gather(np.array([x.shape[0], y.shape[0]]) + 0 * spmd.axis_index(over), over)
    rows = np.asarray(spmd.block(rows))
    sizes = np.array([[min((s + t) % 3, rows[s, 0]) for t in range(n)] for s in range(n)])
    for t in range(n):  # what does not fit is not sent
        for s in range(n):
            sizes[s, t] = min(sizes[s, t], rows[t, 1] - sizes[:s, t].sum())
    ends = rows[:, 1] - np.cumsum(sizes, 0)
    starts = rows[:, :1] - sizes
    return spmd.ragged_all_to_all(x, y, starts[k], sizes[k], ends[k], sizes[:, k], axis_name=over)


class Plan(NamedTuple):
    """Who sends which rows to whom: arrays (sender, receiver, piece), and the lengths of all operands and outputs."""

    starts: np.ndarray
    sizes: np.ndarray
    ats: np.ndarray
    before: np.ndarray
    after: np.ndarray

    def of(self, k: int) -> dict[str, np.ndarray]:
        """What member k passes."""
        return {
            "input_offsets": self.starts[k].reshape(-1),
            "send_sizes": self.sizes[k].reshape(-1),
            "output_offsets": self.ats[k].reshape(-1),
            "recv_sizes": self.sizes[:, k].reshape(-1),
        }

    def result(self, xs: list, ys: list) -> list:
        """The serial meaning: loops over senders, receivers and pieces."""
        new = [y.copy() for y in ys]
        for s, t, i in np.ndindex(*self.sizes.shape):
            size, start, at = self.sizes[s, t, i], self.starts[s, t, i], self.ats[s, t, i]
            new[t][at : at + size] = xs[s][start : start + size]
        return new


@st.composite
def plans(draw, n: int) -> Plan:
    """Pieces from anywhere, overlapping even, to rows that nothing else is written to, in any order, with gaps."""
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    m = draw(st.integers(0, 3))
    before = rng.integers(0, 6, n)
    sizes = rng.integers(0, 4, (n, n, m)) * (rng.random((n, n, m)) < 0.7)
    sizes = np.minimum(sizes, before[:, None, None])
    starts = np.floor(rng.random(sizes.shape) * (before[:, None, None] - sizes + 1)).astype(int)
    gaps = rng.integers(0, 2, sizes.shape)
    ats, after = np.zeros_like(sizes), np.zeros(n, int)
    for t in range(n):
        order = rng.permutation(n * m)
        for j in order:
            s, i = divmod(int(j), m)
            after[t] += gaps[s, t, i]
            ats[s, t, i] = after[t]
            after[t] += sizes[s, t, i]
    return Plan(starts, sizes, ats, before, after + rng.integers(0, 3, n))


@given(groups(), st.data(), st.sampled_from(["lockstep", "threads"]), st.booleans(), st.sampled_from(["f8", "i4", "?"]))
@settings(max_examples=50)
def test_ragged_all_to_all_is_its_serial_loop(group, data, scheduler, check, dtype):
    axes, over, n = group
    plan = data.draw(plans(n))
    tail = data.draw(st.sampled_from([(), (2,), (0, 1)]))
    varying = data.draw(st.booleans())
    total = math.prod(axes.values())
    rng = np.random.default_rng(1)
    places = [_place(axes, over, w) for w in range(total)]
    xs = [rng.integers(-9, 9, (plan.before[k], *tail)).astype(dtype) for k in places]
    ys = [rng.integers(-9, 9, (plan.after[k], *tail)).astype(dtype) for k in places]
    both = Each([(x, y) for x, y in zip(xs, ys, strict=True)])
    want = Oracle(axes).meet(both, over, lambda ps: plan.result([x for x, _ in ps], [y for _, y in ps])).blocks

    def body():
        w = spmd.worker_index(tuple(axes))
        x, y = (spmd.varying(a[w], tuple(axes)) for a in (xs, ys))
        numbers = plan.of(places[w])
        if varying:
            numbers = {name: spmd.varying(a.astype(np.int32), over) for name, a in numbers.items()}
        first, (second,) = spmd.ragged_all_to_all((x, [x]), (y, [y]), **numbers, axis_name=over)
        return spmd.block(first), spmd.block(second)

    for w, got in enumerate(on_workers(axes, body, scheduler, check)):
        for y in got:
            assert (y.dtype, y.shape) == (ys[w].dtype, ys[w].shape)
            np.testing.assert_array_equal(y, want[w])
            assert on_device(y) or not y.flags.writeable
            assert on_device(y) or not np.shares_memory(y, ys[w])


@given(groups(), st.data())
@settings(max_examples=25)
def test_gradients_of_ragged_all_to_all_to_order_two(group, data):
    """Against the tape of the serial loop over all blocks, in operand and in output."""
    axes, over, n = group
    plan = data.draw(plans(n))
    total = math.prod(axes.values())
    rng = np.random.default_rng(2)
    places = [_place(axes, over, w) for w in range(total)]
    xs = [rng.normal(size=(plan.before[k], 2)) for k in places]
    ys = [rng.normal(size=(plan.after[k], 2)) for k in places]
    names = tuple(axes)

    def serial(xs, ys):
        outs = list(ys)
        for row in Oracle(axes).rows(over):
            for s, t, i in np.ndindex(*plan.sizes.shape):
                size, start, at = plan.sizes[s, t, i], plan.starts[s, t, i], plan.ats[s, t, i]
                piece = xs[row[s]][start : start + size]
                outs[row[t]] = spmd.at(outs[row[t]])[at : at + size].set(piece)
        return sum(np.sum(y**3) for y in outs)

    want = spmd.grad(serial, (0, 1))(xs, ys)
    inner = lambda gs, vs: sum(np.sum(g * v) for g, v in zip(gs, vs, strict=True))
    second = spmd.grad(
        lambda xs, ys: sum(inner(g, v) for g, v in zip(spmd.grad(serial, (0, 1))(xs, ys), (xs, ys), strict=True)),
        (0, 1),
    )
    again = second(xs, ys)

    def body():
        w = spmd.worker_index(names)
        x, y = spmd.varying(xs[w], names), spmd.varying(ys[w], names)
        move = lambda x, y: spmd.ragged_all_to_all(x, y, **plan.of(places[w]), axis_name=over)
        loss = lambda x, y: np.sum(move(x, y) ** 3)
        gs = spmd.grad(loss, (0, 1))(x, y)

        def inner(x, y):
            gx, gy = spmd.grad(loss, (0, 1))(x, y)
            return np.sum(gx * x) + np.sum(gy * y)

        return [spmd.block(g) for g in (*gs, *spmd.grad(inner, (0, 1))(x, y))]

    for w, (gx, gy, hx, hy) in enumerate(on_workers(axes, body)):
        near(gx, want[0][w])
        near(gy, want[1][w])
        near(hx, again[0][w])
        near(hy, again[1][w])


def test_the_example_of_the_documentation_of_jax():
    """Two workers; offsets and sizes as given there, and its results."""
    operand = [[1, 2, 2], [3, 4, 0]]
    numbers = [([0, 1], [1, 2], [0, 0], [1, 1]), ([0, 1], [1, 1], [1, 2], [2, 1])]

    def body():
        k = spmd.worker_index("x")
        x, y = spmd.varying(np.array(operand[k]), "x"), np.zeros(4, int)
        return spmd.block(spmd.ragged_all_to_all(x, y, *numbers[k], axis_name="x")).tolist()

    assert on_workers({"x": 2}, body) == [[1, 3, 0, 0], [2, 2, 4, 0]]


def test_an_invariant_output_is_varied_and_its_gradient_summed(mesh):
    """Every worker gets one row from its neighbour into the middle of the same output."""

    def body(x, y):
        k, one = spmd.worker_index("x"), np.ones(N, int)
        sends, comes = one * (np.arange(N) == (k + 1) % N), one * (np.arange(N) == (k - 1) % N)
        loss = lambda x, y: spmd.psum(
            np.sum(spmd.ragged_all_to_all(x, y, 0 * one, sends, one, comes, axis_name="x") * (k + 1)), "x"
        )
        return spmd.grad(loss, (0, 1))(x, y)

    gx, gy = spmd.map(body, (P("x"), P()), (P("x"), P()), mesh=mesh)(np.ones(N), np.ones(3))
    near(gx, [2, 3, 4, 1])
    near(gy, [10, 0, 10])


def test_what_is_overwritten_may_hold_nan(mesh):
    def body(x):
        y = np.full(2, np.nan)
        zero, one = np.zeros(N, int), np.ones(N, int)
        k = spmd.worker_index("x")
        mine = one * (np.arange(N) == k)
        move = lambda x, y: spmd.ragged_all_to_all(x, y, zero, 2 * mine, zero, 2 * mine, axis_name="x")
        return move(x, y), *spmd.grad(lambda x, y: np.sum(move(x, y)), (0, 1))(x, spmd.varying(y, "x"))

    new, gx, gy = spmd.map(body, P("x"), P("x"), mesh=mesh)(np.arange(2.0 * N))
    near(new, np.arange(2.0 * N))
    near(gx, np.ones(2 * N))
    near(gy, np.zeros(2 * N))


def test_what_ragged_all_to_all_costs():
    """A message to whom something is sent, whatever the number of pieces; and where they go, 16 bytes a piece."""
    plan = Plan(*(np.zeros((N, N, 2), int) for _ in range(3)), np.full(N, 5), np.full(N, 9))
    plan.sizes[0, 1] = [1, 2]
    plan.sizes[2, 2] = [3, 0]
    plan.ats[0, 1] = [0, 1]

    def body():
        k = spmd.worker_index("x")
        x, y = spmd.varying(np.ones((5, 2)), "x"), np.zeros((9, 2))
        return spmd.ragged_all_to_all(x, y, **plan.of(k), axis_name="x")

    with spmd.ledger() as log:
        on_workers({"x": N}, body)
    sent = [(log.workers[w].messages, log.workers[w].bytes) for w in range(N)]
    told = (2, 4 * 2 * 16)
    assert sent == [(told[0] + (w == 0), told[1] + (w == 0) * 3 * 16) for w in range(N)]


# Errors


class Wrong(NamedTuple):
    name: str
    body: Callable
    words: str


def exchanged(x, **changed):
    """Each sends one row to each, with one of the numbers changed on worker 1."""
    k = spmd.worker_index("x")
    numbers = {
        "input_offsets": np.arange(N),
        "send_sizes": np.ones(N, int),
        "output_offsets": np.full(N, k),
        "recv_sizes": np.ones(N, int),
    }
    if k == 1:
        numbers |= changed
    output = numbers.pop("output", np.zeros((N, 1)))
    return spmd.ragged_all_to_all(x, output, **numbers, axis_name="x")


def partners(x, source, dest):
    k = spmd.worker_index("x")
    return spmd.sendrecv(x, "x", source(k), dest(k))


up, down = (lambda k: (k + 1) % N), (lambda k: (k - 1) % N)
ERRORS = [
    Wrong(
        "shuffle twice", lambda x: spmd.pshuffle(x, "x", [0, 0, 1, 2]), "spmd.pshuffle | perm | [0, 0, 1, 2] | ppermute"
    ),
    Wrong("shuffle of pairs", lambda x: spmd.pshuffle(x, "x", [(0, 1)]), "spmd.pshuffle | argument perm | 0 to 3"),
    Wrong("shuffle too short", lambda x: spmd.pshuffle(x, "x", [1, 0]), "spmd.pshuffle | [1, 0]"),
    Wrong(
        "axis of another length", lambda x: spmd.pswapaxes(x, "x", 1), "spmd.pswapaxes | length 1 | length 4 | tiled"
    ),
    Wrong("no such dimension", lambda x: spmd.pswapaxes(x, "x", 2), "spmd.pswapaxes | argument axis | -2 to 1"),
    Wrong(
        "partners who do not agree",
        lambda x: partners(x, down, lambda k: up(k) if k != 2 else 0),
        "spmd.sendrecv | worker 3 (x=3) receives from worker 2 (x=2), which sends to worker 0 (x=0)",
    ),
    Wrong(
        "a partner who does not listen",
        lambda x: partners(x, lambda k: down(k) if k != 2 else None, up),
        "spmd.sendrecv | worker 1 (x=1) sends to worker 2 (x=2), which receives from nobody",
    ),
    Wrong(
        "both up",
        lambda x: spmd.sendrecv(x, "x", up, up),
        "spmd.sendrecv | worker 0 (x=0) receives from worker 1 (x=1)",
    ),
    Wrong(
        "no such partner",
        lambda x: spmd.sendrecv(x, "x", down, lambda k: k + 1),
        "spmd.sendrecv | argument dest | 0 to 3",
    ),
    Wrong("a negative partner", lambda x: spmd.sendrecv(x, "x", -1, 0), "spmd.sendrecv | argument source | None"),
    Wrong("no number", lambda x: spmd.sendrecv(x, "x", down, 1.5), "spmd.sendrecv | argument dest | 1.5"),
    Wrong("too few partners", lambda x: spmd.sendrecv(x, "x", [1, 0], up), "spmd.sendrecv | argument source"),
    Wrong(
        "rows that are not there",
        lambda x: exchanged(x, input_offsets=np.array([0, 1, 4, 3])),
        "spmd.ragged_all_to_all: argument input_offsets | 1 rows from row 4 on | from worker 1 (x=1) to worker 2 (x=2)",
    ),
    Wrong(
        "rows beyond the output",
        lambda x: exchanged(x, output_offsets=np.array([1, 1, 9, 1])),
        "spmd.ragged_all_to_all: argument output_offsets | from row 9 on | from worker 1 (x=1) to worker 2 (x=2)",
    ),
    Wrong(
        "sizes on which two do not agree",
        lambda x: exchanged(x, recv_sizes=np.array([1, 1, 1, 2])),
        "argument recv_sizes | worker 3 (x=3) sends 1 rows to worker 1 (x=1), which waits for 2",
    ),
    Wrong(
        "rows written twice",
        lambda x: exchanged(x, output_offsets=np.array([2, 1, 1, 1])),
        "argument output_offsets | row 2 of worker 0 (x=0) twice: from worker 1 (x=1) and from worker 2 (x=2)",
    ),
    Wrong("negative sizes", lambda x: exchanged(x, send_sizes=-np.ones(N, int)), "input_offsets | -1 rows"),
    Wrong("no integers", lambda x: exchanged(x, send_sizes=np.ones(N)), "argument send_sizes | float64[4] | integers"),
    Wrong("numbers for some", lambda x: exchanged(x, recv_sizes=np.ones(3, int)), "argument recv_sizes | int64[3]"),
    Wrong("another dtype", lambda x: exchanged(x, output=np.zeros((N, 1), "f4")), "argument output | float32[4, 1]"),
    Wrong("other dimensions", lambda x: exchanged(x, output=np.zeros((N, 2))), "argument output | float64[4, 2]"),
    Wrong("another structure", lambda x: exchanged(x, output=[np.zeros((N, 1))]), "argument output | structure"),
]


@pytest.mark.parametrize("wrong", ERRORS, ids=lambda w: w.name)
def test_errors_name_the_mend(wrong, mesh):
    with pytest.raises(LayoutError) as caught:
        spmd.map(wrong.body, P("x"), P("x"), mesh=mesh)(np.ones((N * N, 1)))
    missing = [word for word in wrong.words.split(" | ") if word not in str(caught.value)]
    assert not missing, f"{missing} not in:\n{caught.value}"
    assert float(spmd.map(lambda x: spmd.psum(np.sum(x), "x"), P("x"), P(), mesh=mesh)(np.ones(N))) == N


def test_nothing_moves_where_partners_do_not_agree():
    def body():
        with spmd.ledger() as log:
            try:
                spmd.sendrecv(spmd.varying(np.ones(100), "x"), "x", up, up)
            except LayoutError:
                return log.messages
        raise AssertionError

    assert on_workers({"x": N}, body) == [0] * N


@pytest.mark.parametrize("f", [lambda r: spmd.pshuffle(r, "x", [1, 0]), lambda r: spmd.pswapaxes(r, "x", 0)])
def test_rooted_values_are_refused(f):
    with pytest.raises(StateError, match=r"spmd\.replicate"):
        on_workers({"x": 2}, lambda: f(spmd.keep(np.ones(2), "x")))


# Faults


class _Aside(RaggedAllToAll):
    """Its adjoint sends every piece back to a row too far."""

    @property
    def H(self):
        turned = super().H
        low = lambda p: p._replace(at=min(p.at + 1, self.rows[0] - p.size))
        return RaggedAllToAll(self.axes, tuple(map(low, turned.pieces)), turned.rows)


class _Overwritten(RaggedAllToAll):
    """Its adjoint keeps one of the cotangents of a row that was sent to several workers."""

    @property
    def H(self):
        turned, seen = super().H, set()
        kept = [p for p in turned.pieces if (p.target, p.at) not in seen and not seen.add((p.target, p.at))]
        return RaggedAllToAll(self.axes, tuple(kept), turned.rows)


class _Lost(RaggedAllToAll):
    """Its adjoint loses the last row of every piece."""

    @property
    def H(self):
        turned = super().H
        return RaggedAllToAll(self.axes, tuple(p._replace(size=p.size - 1) for p in turned.pieces), turned.rows)


PIECES = tuple(Piece(s, t, 0, 2 * s, 2) for s in range(3) for t in range(3))


@pytest.mark.parametrize("kind", [_Aside, _Overwritten, _Lost], ids=lambda k: k.__name__)
def test_planted_faults_are_caught(kind):
    mesh = spmd.Mesh(x=3, transport="local")
    check = functools.partial(check_adjoint, mesh=mesh, raises=False, shrink=False)
    assert check(RaggedAllToAll(("x",), PIECES, (5, 6)), (5, 2)).passed
    assert not any(check(kind(("x",), PIECES, (5, 6)), (5, 2), trials=1, seed=seed).passed for seed in range(30))
