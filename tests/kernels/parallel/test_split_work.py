"""Helper threads: the same bits, every part computed, every error raised."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from functools import partial

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.kernels import cpu
from spmd.kernels.parallel import split_work, thread_pool

MB = 1 << 20


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """A machine on which everything is split that may be."""
    monkeypatch.setattr(split_work, "part_bytes", lambda: split_work.SPLIT_MIN // 2)


def test_where_copies_are_quick_less_is_split(monkeypatch):
    monkeypatch.setattr(split_work, "part_bytes", lambda: 3 * MB)
    with split_work.SplitScope(lambda: 4):
        assert [split_work.part_count(n * MB) for n in (3, 5.9, 6, 8.9, 9, 100)] == [1, 1, 2, 2, 3, 4]


def test_what_pays_is_measured_once(monkeypatch):
    """It is what this machine copies in two and a half times as long as a helper's call takes, but 1 MB at least; an
    odd measurement among several does nothing, and calls count as 36 us at least, 160 at most."""
    monkeypatch.undo()
    split_work.part_bytes.cache_clear()
    measured = split_work.part_bytes()
    assert type(measured) is int
    assert measured >= split_work.SPLIT_MIN // 2
    with split_work.SplitScope(lambda: 2):
        assert [split_work.part_count(2 * measured - 1), split_work.part_count(2 * measured)] == [1, 2]
    for copy_seconds, call_seconds, pays in (
        (1e-3, 36e-6, MB),
        (90e-6, 36e-6, MB),
        (30e-6, 36e-6, 3 * MB),
        (30e-6, 1e-6, 3 * MB),
        (100e-6, 80e-6, 2 * MB),
        (100e-6, 160e-6, 4 * MB),
        (100e-6, 1.0, 4 * MB),
    ):
        assert split_work.part_bytes() == measured
        split_work.part_bytes.cache_clear()
        copies = [(0.5, s) for s in (9 * copy_seconds, copy_seconds, 2 * copy_seconds, copy_seconds, copy_seconds)]
        calls = [(0.5, 0.0, s) for s in (1.0, 9 * call_seconds, call_seconds, call_seconds, 0.0, call_seconds)]
        clock = itertools.accumulate(itertools.chain(*copies, *calls))
        monkeypatch.setattr(split_work.time, "perf_counter", clock.__next__)
        measured = split_work.part_bytes()
        assert measured == pytest.approx(pays, rel=1e-6)
    monkeypatch.undo()
    split_work.part_bytes.cache_clear()


def test_alone_nothing_is_split():
    assert split_work.part_count(1 << 30) == 1
    with split_work.SplitScope(lambda: 4):
        assert split_work.part_count(split_work.SPLIT_MIN - 1) == 1
        assert split_work.part_count(split_work.SPLIT_MIN) == 2
        assert split_work.part_count(1 << 30) == 4
        with split_work.SplitScope(lambda: 1):
            assert split_work.part_count(1 << 30) == 1
        assert split_work.part_count(1 << 30) == 4
    assert split_work.part_count(1 << 30) == 1


@pytest.mark.parametrize("shape", [(), (1, 1), (1, 5), (3, 1, 700001), (2100001,), (1, 1031, 1009), (0, 7)])
def test_spans_cover_everything_once(shape):
    for n in 1, 2, 5:
        count = np.zeros(shape, int)
        spans = split_work.spans(shape, n)
        assert len(spans) <= n
        for span in spans:
            part = count[span]
            assert part.flags.c_contiguous
            part += 1
        assert (count == 1).all()


def test_copies_are_split_evenly(monkeypatch):
    """Every helper has a part of every array, so uneven ones end at the same time."""
    shares, ran = [], split_work.run
    monkeypatch.setattr(split_work, "run", lambda tasks: (shares.extend(tasks), ran(tasks)))
    rng = np.random.default_rng(6)
    arrays = [np.asarray(rng.standard_normal(shape)) for shape in [(3, 200000), (1, 100000), (1,), (), (0, 4)]]
    into = [np.zeros_like(a) for a in arrays]
    with split_work.SplitScope(lambda: 3):
        split_work.copy(list(zip(into, arrays, strict=True)))
    actual = [sum(to.nbytes for to, _ in share.args[0]) for share in shares]
    assert actual == pytest.approx([1.6e6 + 8e5 / 3] * 3, abs=16)
    for to, a in zip(into, arrays, strict=True):
        np.testing.assert_array_equal(to, a)


def test_all_tasks_run_and_the_first_error_is_raised():
    done, ended = set(), threading.Barrier(3, timeout=20)

    def task(k):
        ended.wait()  # all at the same time
        done.add(k)
        if k == 2:
            raise ValueError(k)

    with pytest.raises(ValueError, match="2"):
        split_work.run([lambda k=k: task(k) for k in range(3)])
    assert done == {0, 1, 2}


def test_errors_keep_nothing_alive():
    class Thing:
        pass

    def fails(thing):
        raise ValueError("broken")

    thing = Thing()
    alive = weakref.ref(thing)
    gc.disable()
    try:
        try:
            split_work.run([partial(fails, thing), lambda: None])
        except ValueError:
            del thing
        assert alive() is None
    finally:
        gc.enable()


def test_where_no_thread_can_be_had_the_work_is_done_here(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(thread_pool.Thread, "start", start)
    monkeypatch.setattr(split_work, "pool", thread_pool.Pool())
    who = []
    split_work.run([lambda: who.append(threading.current_thread())] * 4)
    assert who == [threading.current_thread()] * 4


def test_there_are_no_more_helpers_than_cores(monkeypatch):
    monkeypatch.setattr(split_work, "pool", thread_pool.Pool())
    monkeypatch.setattr(thread_pool, "_cores", lambda: 3)
    for _ in range(3):
        done = []
        split_work.run([partial(done.append, k) for k in range(9)])
        assert sorted(done) == list(range(9))
    assert len(split_work.pool.idle) <= 3
    assert split_work.pool.helping == 0


def test_workers_who_wait_leave_room_for_helpers(monkeypatch):
    """A thread that waits for others takes no core away."""
    pool = thread_pool.Pool()
    monkeypatch.setattr(split_work, "pool", pool)
    monkeypatch.setattr(thread_pool, "_cores", lambda: 2)
    waiting, over = threading.Barrier(4, timeout=20), threading.Event()
    for thread in pool.take(3):
        thread.begin(lambda: (waiting.wait(), over.wait(20)), lambda: None)
    waiting.wait()
    together, who = threading.Barrier(2, timeout=20), []
    split_work.run([lambda: (together.wait(), who.append(threading.get_ident()))] * 2)
    over.set()
    assert len(set(who)) == 2
    assert pool.helping == 0


@pytest.mark.parametrize(
    ("cores", "sizes", "split"),
    [
        (2, [8, 8], [2]),  # one each
        (2, [1.5, 1.5, 1.5], [2]),  # too small to be split
        (2, [8, 8, 8], []),  # two rounds would take as long as 16, all with each 12 and the ways
        (2, [8, 0.1], []),
        (2, [8, 4, 4], [2]),  # the large one against the two small ones
        (8, [1.5, 1.5], [2]),
        (8, [32, 32], []),
        (2, [6, 0, 0, 0, 0, 0, 0, 0], []),  # none of the empty ones takes a helper
        (8, [24] + [0] * 63, []),
        (2, [0.5, 0.4], []),
        (2, [8], []),
        (3, [], []),
    ],
)
def test_each_gives_all_results_in_order_and_splits_what_takes_long(cores, sizes, split, monkeypatch):
    """Everybody calls some, and nobody helps there; or all may help with every one."""
    ran, run = [], split_work.run
    monkeypatch.setattr(split_work, "run", lambda tasks: (ran.append(len(tasks)), run(tasks)))
    calls = []

    def make(k):
        calls.append((k, split_work.part_count(1 << 30)))
        return k

    makes, nbytes = [partial(make, k) for k in range(len(sizes))], [int(size * MB) for size in sizes]
    with split_work.SplitScope(lambda: cores):
        assert split_work.call_each(makes, nbytes) == list(range(len(sizes)))
    assert ran == split
    # What is called one after the other finds the scope as it is.
    assert sorted(calls) == [(k, 1 if split else cores) for k in range(len(sizes))]
    calls.clear()
    assert split_work.call_each(makes, nbytes) == list(range(len(sizes)))
    assert calls == [(k, 1) for k in range(len(sizes))]


def test_an_error_of_one_of_each_is_raised():
    def fail():
        raise ValueError("of the second")

    with split_work.SplitScope(lambda: 2), pytest.raises(ValueError, match="of the second"):
        split_work.call_each([lambda: 1, fail], [1 << 24] * 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, thread_pool.Stopped])
def test_an_interrupt_while_helpers_start_loses_none(error, monkeypatch):
    pool, real = thread_pool.Pool(), thread_pool.Thread.start
    pool.give(pool.take(1))

    def start(thread):
        raise error

    monkeypatch.setattr(thread_pool, "_cores", lambda: 4)
    monkeypatch.setattr(thread_pool.Thread, "start", start)
    with pytest.raises(error):
        pool.spare(3)
    assert (pool.helping, len(pool.idle)) == (0, 1)
    monkeypatch.setattr(thread_pool.Thread, "start", real)
    helpers = pool.spare(9)
    assert len(helpers) == pool.helping == 4
    pool.give(helpers)
    assert pool.helping == 0


def test_helpers_that_are_there_help_where_no_more_can_start(monkeypatch):
    pool = thread_pool.Pool()
    pool.give(pool.take(2))

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(thread_pool, "_cores", lambda: 8)
    monkeypatch.setattr(thread_pool.Thread, "start", start)
    helpers = pool.spare(4)
    assert len(helpers) == pool.helping == 2
    pool.give(helpers)
    assert pool.helping == 0


@pytest.mark.parametrize("spread", [True, False])
def test_additions_of_boxes_are_split(spread, monkeypatch):
    split, ran = [], split_work.run
    monkeypatch.setattr(split_work, "run", lambda tasks: (split.append(len(tasks)), ran(tasks)))
    rng = np.random.default_rng(2)
    shape = (601, 1001)
    boxes = (((0, 601), (0, 1001)), ((1, 600), (2, 1001)), ((3, 4), (5, 6)))
    parts = [rng.standard_normal([b - a for a, b in box]) for box in boxes]
    with split_work.SplitScope(lambda: 2 if spread else 1):
        actual = cpu.add_boxes(shape, boxes, parts)
    want = parts[0].copy()
    for box, part in zip(boxes[1:], parts[1:], strict=True):
        want[tuple(slice(*b) for b in box)] += part
    np.testing.assert_array_equal(actual, want)
    assert split == [2, 2] * spread


def test_an_interrupt_waits_for_those_who_help(monkeypatch):
    """And gives back those who have not begun."""
    pool = thread_pool.Pool()
    monkeypatch.setattr(split_work, "pool", pool)
    monkeypatch.setattr(thread_pool, "_cores", lambda: 4)
    go, ended, begin = threading.Event(), [], thread_pool.Thread.begin

    def waits():
        go.wait(20)
        ended.append(True)

    def second(thread, task, after, begun):
        if len(pool.idle) == 0 and go.is_set():
            raise KeyboardInterrupt
        go.set()
        begin(thread, task, after, begun)

    monkeypatch.setattr(thread_pool.Thread, "begin", second)
    with pytest.raises(KeyboardInterrupt):
        split_work.run([lambda: None, waits, waits, waits])
    assert ended == [True]
    assert len(pool.idle) == 3


def test_helpers_work_in_the_callers_context():
    x = np.full(1 << 19, 1e308)
    x[: 1 << 18] = 0
    with split_work.SplitScope(lambda: 2), np.errstate(over="raise"), pytest.raises(FloatingPointError):
        cpu.combine([x, x])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize("how", ["sum", "max"])
def test_split_sums_have_the_same_bits(how, dtype):
    rng = np.random.default_rng(3)
    blocks = [(8 * rng.standard_normal((1031, 1009))).astype(dtype) for _ in range(3)]
    whole = cpu.combine(blocks, how)
    for cores in 2, 3, 7:
        with split_work.SplitScope(lambda n=cores: n):
            assert split_work.part_count(whole.nbytes) > 1 or whole.nbytes < split_work.SPLIT_MIN
            np.testing.assert_array_equal(cpu.combine(blocks, how), whole)
            strided = [np.asfortranarray(b) for b in blocks]
            np.testing.assert_array_equal(cpu.combine(strided, how), whole)


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_workers_who_wait_lend_their_cores(axis, tiled, monkeypatch):
    """Blocks of 3 MB, uneven where they may be, are summed and joined in parts, with NumPy's result."""
    split, ran = [], split_work.run
    monkeypatch.setattr(split_work, "run", lambda tasks: (split.append(len(tasks)), ran(tasks)))
    for scheduler in "lockstep", "threads":
        monkeypatch.setattr(f"spmd.transport.local.{scheduler}.usable_cores", lambda: 3)
    rng = np.random.default_rng(4)
    lengths = (900, 700, 800) if tiled else (800, 800, 800)
    blocks = [rng.standard_normal((n, 500) if axis == 0 else (500, n)) for n in lengths]

    def body(k):
        x = spmd.varying(blocks[spmd.worker_index("x")], "x")
        return spmd.all_gather(x, "x", axis=axis, tiled=tiled, to="invariant"), spmd.psum(
            np.reshape(x, -1)[:300000] + k, "x"
        )

    for scheduler in "lockstep", "threads":
        split.clear()
        mapped = spmd.map(body, in_specs=None, out_specs=P(), mesh=spmd.Mesh(x=3, scheduler=scheduler))
        gathered, total = mapped(2.0)
        # In lockstep the blocks are also copied by all, when they are declared: 3.6, 2.8 and 3.2 MB, or 3.2 each.
        declared = [] if scheduler == "threads" else [3, 2, 3] if tiled else [3, 3, 3]
        assert split == [*declared, 3, 3]  # the join, and the sum: 2.4 MB, and it reads three times as much
        want = np.concatenate(blocks, axis) if tiled else np.stack(blocks, axis)
        np.testing.assert_array_equal(gathered.numpy(), want)
        first, second, third = (b.reshape(-1)[:300000] + 2.0 for b in blocks)
        np.testing.assert_array_equal(total.numpy(), first + second + third)


LARGE = np.random.default_rng(5).standard_normal((2047, 1, 1001))
ROWS, COLUMNS = P("x"), P(None, None, "x")


@pytest.mark.parametrize(
    ("act", "spec", "by_the_last"),
    [
        (lambda x, rows, columns: spmd.repartition(x, rows, columns), COLUMNS, True),
        (lambda x, *_: spmd.all_to_all(x, "x", 2, 0, tiled=True), COLUMNS, True),
        # There is no room for so much around a block: it is copied.
        (lambda x, rows, _: spmd.halo_exchange(x, ROWS, 100, shape=rows.shape), ROWS, False),
        (lambda x, *_: spmd.halo_accumulate(x, ROWS, 1), ROWS, False),
        (
            lambda x, rows, columns: spmd.psum_scatter(x[:1000, 0, :600], "x", scatter_dimension=1, tiled=True),
            P(None, "x"),
            True,
        ),
    ],
    ids=["repartition", "all_to_all", "halo_exchange", "halo_accumulate", "psum_scatter"],
)
def test_one_worker_at_a_time_has_all_cores(act, spec, by_the_last, monkeypatch):
    """In lockstep what each makes for itself is split too, along whatever dimension there is; what the last to come
    makes for all is split in threads as well, once for all results."""
    split, ran = [], split_work.run
    monkeypatch.setattr(
        split_work, "run", lambda tasks: (split.append((spmd.worker_index("x"), len(tasks))), ran(tasks))
    )
    monkeypatch.setattr("spmd.transport.local.threads.usable_cores", lambda: 2)

    def run(scheduler):
        split.clear()
        mesh = spmd.Mesh(x=2, scheduler=scheduler)
        layouts = [mesh.layout(LARGE.shape, p) for p in (ROWS, COLUMNS)]
        result = mesh.map(act, in_specs=(ROWS, None, None), out_specs=spec)
        return result(spmd.put(LARGE, ROWS, mesh), *layouts).numpy()

    helped = run("lockstep")
    assert set(split) == {(0, 2), (1, 2)} if not by_the_last else split[-1] == (1, 2)
    splits = split.count((1, 2))
    np.testing.assert_array_equal(run("threads"), helped)
    assert [n for _, n in split] == [2] * by_the_last
    assert splits >= 1


@pytest.mark.parametrize(
    ("act", "spec", "runs"),
    [
        (lambda x, rows, columns: spmd.repartition(x, rows, columns), COLUMNS, 1),
        (lambda x, *_: spmd.all_to_all(x, "x", 2, 0, tiled=True), COLUMNS, 1),
        (lambda x, rows, _: spmd.halo_exchange(x, ROWS, (1, 0, 0), shape=rows.shape), P("x"), 1),
        (lambda x, *_: spmd.halo_accumulate(x, ROWS, 1, sizes=[(1023, 1022), None, None]), ROWS, 1),
        (lambda x, *_: spmd.psum_scatter(x[:1000], "x", tiled=True), ROWS, 1),
        (lambda x, *_: spmd.psum(x[:1000], "x"), P(), 1),
        (lambda x, *_: spmd.all_gather(x[:300], "x", tiled=True, to="invariant"), P(), 1),
        (lambda x, *_: spmd.ppermute(x[:1000], "x", [(0, 1)]), P("x"), 0),
    ],
    ids=["repartition", "all_to_all", "halo", "halo_accumulate", "psum_scatter", "psum", "all_gather", "ppermute"],
)
def test_a_line_that_calls_again_makes_the_same_at_once_for_all(act, spec, runs, monkeypatch):
    """From the second time on the last to come makes all results, in threads: split once, and not by each worker."""
    ran, run = [], split_work.run
    monkeypatch.setattr(split_work, "run", lambda tasks: (ran.append(len(tasks)), run(tasks)))
    monkeypatch.setattr("spmd.transport.local.lockstep.usable_cores", lambda: 2)
    monkeypatch.setattr(split_work, "part_bytes", lambda: 1 << 20)

    def body(x, rows, columns):
        results_of_calls = []
        for k in range(4):
            results_of_calls.append(act(x * (1.0 + k), rows, columns))
            done.append(len(ran))
        return results_of_calls

    results_of = {}
    for scheduler in ("lockstep", "threads"):
        mesh = spmd.Mesh(x=2, scheduler=scheduler)
        layouts = [mesh.layout(LARGE.shape, p) for p in (ROWS, COLUMNS)]
        ran.clear()
        done: list[int] = []
        results = mesh.map(body, in_specs=(ROWS, None, None), out_specs=spec)(spmd.put(LARGE, ROWS, mesh), *layouts)
        results_of[scheduler] = [y.numpy() for y in results]
        if scheduler == "lockstep":
            assert done[-1] - done[-3] == runs
    for repeated, direct in zip(results_of["lockstep"], results_of["threads"], strict=True):
        np.testing.assert_array_equal(repeated, direct)


@pytest.mark.parametrize(("cores", "share"), [(2, 1), (3, 1), (4, 2), (8, 4)])
def test_a_part_of_the_workers_has_its_share_of_the_cores(cores, share, monkeypatch):
    """In threads, where the others of another group may be at work."""
    split, ran = [], split_work.run
    monkeypatch.setattr(split_work, "run", lambda tasks: (split.append(len(tasks)), ran(tasks)))
    monkeypatch.setattr("spmd.transport.local.threads.usable_cores", lambda: cores)
    mesh = spmd.Mesh(x=2, y=2, scheduler="threads")
    x = np.arange(4 << 19, dtype=np.float64).reshape(4, -1)
    mapped = mesh.map(lambda x: spmd.psum(x, "x"), in_specs=P(("x", "y")), out_specs=P("y"))
    np.testing.assert_array_equal(mapped(x).numpy(), x[:2] + x[2:])
    assert split == [share, share] * (share > 1)
