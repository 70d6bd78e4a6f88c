"""A block that could be written to is lent to a collective: when that is over it is its owner's again."""

from __future__ import annotations

import gc
import sys
import time
import weakref

import numpy as np
import pytest
from case_blocks import MESHES, block_shapes

import spmd
from spmd import P, ownership
from spmd.errors import LayoutError
from spmd.kernels.parallel import split_work
from spmd.mesh import Mesh, here
from spmd.testing import operator_cases, operator_classes

pytestmark = pytest.mark.host("only of arrays of the host it is known whether they can be written to")

KINDS = [kind for kind in operator_classes() if kind.__module__.startswith("spmd.")]


def some_cases(kind, mesh, seed):
    """About a dozen cases of an operator, with a block of random numbers for each worker."""
    rng = np.random.default_rng(seed)
    row = operator_cases(kind, mesh)
    for case in row[:: 1 + len(row) // 12]:
        yield case, [rng.standard_normal(shape) for shape in block_shapes(case, mesh)]


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(map(str, axes.values())))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_its_owner_writes_afterwards_is_nowhere_to_be_seen(kind, axes, scheduler):
    """Of every operator: neither in others' results nor in one's own, whoever goes on first."""
    mesh = Mesh(**axes, scheduler=scheduler)
    for case, blocks in some_cases(kind, mesh, seed=3):
        results: dict = {}

        def body(lent, op=case.operator, blocks=blocks, results=results):
            k = spmd.worker_index(tuple(axes))
            block = blocks[k].copy()
            y = op(block if lent else spmd.freeze(block.copy()))
            if lent:
                assert block.flags.writeable
                assert not np.shares_memory(y, block)
                block.fill(np.nan)
            spmd.psum(0, tuple(axes))
            assert not y.flags.writeable
            results[lent, k] = y.copy()

        run = mesh.map(body, in_specs=None, out_specs=None, check=False)
        run(True)
        run(False)
        for k in range(mesh.size):
            np.testing.assert_array_equal(results[True, k], results[False, k], err_msg=str(case))


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(map(str, axes.values())))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_written_to_a_thawed_result_is_nowhere_to_be_seen(kind, axes, scheduler):
    """Of every operator, at once and where its line is called again: neither in others' results nor in any block."""
    mesh = Mesh(**axes, scheduler=scheduler)
    for case, drawn in some_cases(kind, mesh, seed=4):
        blocks, kept = [spmd.freeze(block) for block in drawn], [block.copy() for block in drawn]
        results: dict = {}

        def body(op=case.operator, blocks=blocks, results=results):
            k = spmd.worker_index(tuple(axes))
            want = op(blocks[k]).copy()
            for turn in range(3):
                y = spmd.thaw(op(blocks[k]))
                results[k, turn] = want, y.copy()
                y.fill(np.nan)

        mesh.map(body, in_specs=(), out_specs=None, check=False)()
        for want, found in results.values():
            np.testing.assert_array_equal(found, want, err_msg=str(case))
        for block, same in zip(blocks, kept, strict=True):
            np.testing.assert_array_equal(block, same, err_msg=str(case))


NOBODY_ELSES = {
    "repartition": lambda x: spmd.repartition(x, layout_of(x, P("x")), layout_of(x, P(None, "x"))),
    "all_to_all": lambda x: spmd.all_to_all(x, "x", 1, 0, tiled=True),
    "psum_scatter": lambda x: spmd.psum_scatter(x, "x", tiled=True),
    "halo_exchange": lambda x: spmd.halo_exchange(x, P("x"), 1),
}


def layout_of(x, spec: P) -> spmd.Layout:
    """That of the array of which x is the block of one of two workers, by rows."""
    return here("a test").mesh.layout((2 * len(x), x.shape[1]), spec)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python does not tell whether the caller has a name for it")
@pytest.mark.parametrize("n", [8, 256, 1024])
@pytest.mark.parametrize("name", NOBODY_ELSES)
def test_what_nobody_else_has_is_thawed_as_it_is(name, n, scheduler, monkeypatch):
    """Small and large, the first time and later; but not what has a name, what a view is of, or what is a view."""
    copies = []
    monkeypatch.setattr(ownership, "copied", lambda x: copies.append(x.nbytes) or x.copy())
    verb = NOBODY_ELSES[name]
    mesh = Mesh(x=2, scheduler=scheduler)

    def body():
        x = spmd.freeze(np.random.default_rng(spmd.worker_index("x")).standard_normal((n, n)))
        for _ in range(3):
            y = spmd.thaw(verb(x))
            y.fill(np.nan)
        assert not copies
        y = verb(x)
        kept = y.copy()
        spmd.psum(0, "x")
        spmd.thaw(y).fill(np.nan)
        spmd.thaw(y[1:]).fill(np.nan)
        view = verb(x)[1:]
        spmd.thaw(view.base).fill(np.nan)
        np.testing.assert_array_equal(y, kept)
        np.testing.assert_array_equal(view, kept[1:])

    mesh.map(body, in_specs=(), out_specs=None, check=False)()
    assert len(copies) == 6


@pytest.mark.parametrize("tracked", [True, False])
def test_what_all_have_is_thawed_for_each(tracked, scheduler):
    """One sum, which the last to look at it may have for himself; by the verbs, and by the short way."""
    mesh = Mesh(x=4, scheduler=scheduler)
    for n in 3, 1 << 18:

        def body(n=n):
            k = spmd.worker_index("x")
            x = spmd.varying(np.full(n, k + 1.0), "x") if tracked else np.full(n, k + 1.0)
            for _ in range(4):
                y = spmd.thaw(spmd.block(spmd.psum(x, "x")))
                assert (y == 10).all()
                y.fill(k)
                spmd.psum(0, "x")
                assert (y == k).all()

        mesh.map(body, in_specs=(), out_specs=None, check=tracked)()


@pytest.mark.parametrize("name", NOBODY_ELSES)
def test_what_a_line_gives_again_may_be_written_to(name, scheduler):
    """By the short way, from the second time on."""
    mesh = Mesh(x=2, scheduler=scheduler)
    for n in 8, 256, 1024:

        def body(n=n):
            x = spmd.varying(np.random.default_rng(spmd.worker_index("x")).standard_normal((n, n)), "x")
            kept, want = spmd.block(x).copy(), spmd.block(NOBODY_ELSES[name](x)).copy()
            for _ in range(4):
                y = spmd.thaw(spmd.block(NOBODY_ELSES[name](x)))
                np.testing.assert_array_equal(y, want)
                y.fill(np.nan)
            np.testing.assert_array_equal(spmd.block(x), kept)

        mesh.map(body, in_specs=(), out_specs=None)()


N = 3
VERBS = {
    "all_gather": lambda x: spmd.all_gather(x, "x", tiled=True),
    "all_gather, one value": lambda x: spmd.all_gather(x, "x", to="invariant"),
    "all_to_all": lambda x: spmd.all_to_all(x, "x", 0, 0, tiled=True),
    "psum_scatter": lambda x: spmd.psum_scatter(x, "x", tiled=True),
    "psum": lambda x: spmd.psum(x, "x"),
    "pmax": lambda x: spmd.pmax(x, "x"),
    "shift": lambda x: spmd.shift(x, "x", 1),
    "to one": lambda x: spmd.repartition(x, mesh_of("x"), alone(1)),
    "a tree": lambda x: spmd.psum({"a": x, "b": [x[:5], 2.0]}, "x")["b"][0],
}


def mesh_of(axis: str) -> spmd.Layout:
    return here("a test").mesh.layout((3 * 5001,), P(axis))


def alone(owner: int) -> spmd.Layout:
    return spmd.Layout.grid((3 * 5001,), (1,), here("a test").mesh.axes, [owner])


@pytest.mark.parametrize("name", VERBS)
def test_parts_of_one_array_of_the_user_are_not_taken_for_the_result(name, scheduler):
    """They lie side by side, so that joined they would be the array itself."""
    whole = np.arange(3.0 * 5001)
    kept = whole.copy()
    mesh = Mesh(x=N, scheduler=scheduler)

    found, want = {}, {}

    def body():
        k = spmd.worker_index("x")
        mine = np.split(whole, N)[k]
        y = VERBS[name](mine)
        assert not np.shares_memory(y, whole)
        mine.fill(-1)
        spmd.psum(0, "x")
        found[k] = y.copy()
        want[k] = VERBS[name](spmd.freeze(np.split(kept, N)[k].copy()))

    mesh.map(body, in_specs=(), out_specs=None, check=False)()
    assert (whole == -1).all()
    for k in range(N):
        np.testing.assert_array_equal(found[k], want[k])


def test_a_block_is_copied_only_where_it_is_handed_over_as_it_is(monkeypatch):
    """What is made of several blocks is made of the lent ones themselves."""
    copies = []
    real = spmd.device.copied

    def counted(x):
        copies.append(x.nbytes)
        return real(x)

    for module in ("operators.apply", "operators.blocks", "transport.local.comm", "transport.plan", "device"):
        monkeypatch.setattr(f"spmd.{module}.copied", counted)
    mesh = Mesh(x=2)
    rows, columns = mesh.layout((64, 64), P("x")), mesh.layout((64, 64), P(None, "x"))

    def body(verb):
        x = np.ones((32, 64))
        verb(x)
        return None

    made = [
        lambda x: spmd.psum(x, "x"),
        lambda x: spmd.repartition(x, rows, columns),
        lambda x: spmd.all_to_all(x, "x", 1, 0, tiled=True),
        lambda x: spmd.all_gather(x, "x"),
        lambda x: spmd.psum_scatter(x, "x", tiled=True),
        lambda x: spmd.sum_reduce(x, "x"),
    ]
    for verb in made:
        mesh.map(body, in_specs=None, out_specs=None, check=False)(verb)
        assert copies == []
    # Of a halo the edges alone.
    mesh.map(body, in_specs=None, out_specs=None, check=False)(lambda x: spmd.halo_exchange(x, P("x"), 1))
    assert copies == [64 * 8] * 2
    copies.clear()
    mesh.map(body, in_specs=None, out_specs=None, check=False)(lambda x: spmd.shift(x, "x", 1, wrap=True))
    assert copies == [32 * 64 * 8] * 2


def test_large_blocks_are_read_before_their_owners_go_on():
    """In threads, where a worker that came first goes on as soon as it may, while others are at work."""
    n = 1024
    mesh = Mesh(x=2, scheduler="threads")
    rows, columns = mesh.layout((n, n), P("x")), mesh.layout((n, n), P(None, "x"))
    x = np.random.default_rng(0).standard_normal((n, n))

    def body(turn):
        k = spmd.worker_index("x")
        if k == turn % 2:
            time.sleep(0.002)
        mine = x[rows.slices(k)].copy()
        there = spmd.repartition(mine, rows, columns)
        mine.fill(np.nan)
        mine = there.copy()
        back = spmd.repartition(mine, columns, rows)
        mine.fill(np.nan)
        mine = back.copy()
        total = spmd.psum_scatter(mine, "x", tiled=True)
        mine.fill(np.nan)
        return there, back, total

    run = mesh.map(body, in_specs=None, out_specs=(P(None, "x"), P("x"), P("x")), check=False)
    for turn in range(20):
        there, back, total = run(turn)
        np.testing.assert_array_equal(there.numpy(), x)
        np.testing.assert_array_equal(back.numpy(), x)
        np.testing.assert_array_equal(total.numpy(), x[: n // 2] + x[n // 2 :])


def test_what_is_wrong_with_one_result_is_said_of_its_worker(scheduler):
    """The last to come makes all results; the errors are of those that they are for."""
    sizes = [(2, 1, 1), (2, 1, 1), (2, 0, 2)]
    mesh = Mesh(x=3, scheduler=scheduler)

    def body():
        x = np.ones((4, 4))
        return spmd.all_to_all(x, "x", 0, 1, tiled=True, sizes=sizes[spmd.worker_index("x")])

    with pytest.raises(LayoutError) as caught:
        mesh.map(body, in_specs=(), out_specs=None, check=False)()
    (note,) = caught.value.__notes__
    assert note.startswith("raised by worker 1 (x=1)\nworker 2 (x=2) raised ")
    assert "[1, 4]" in str(caught.value)
    assert "[2, 4]" in note


def test_an_error_of_one_result_keeps_no_block_alive(scheduler):
    kept = []

    def body():
        k = spmd.worker_index("x")
        mine = np.ones((4, 4))
        kept.append(weakref.ref(mine))
        return spmd.all_to_all(mine, "x", 0, 1, tiled=True, sizes=[(3, 1), (2, 2)][k])

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(LayoutError):
            Mesh(x=2, scheduler=scheduler).map(body, in_specs=(), out_specs=None, check=False)()
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("tracked", [True, False])
def test_a_large_result_of_one_worker_has_all_cores(scheduler, tracked, monkeypatch):
    split, ran = [], split_work.run
    monkeypatch.setattr(split_work, "run", lambda tasks: (split.append(len(tasks)), ran(tasks)))
    monkeypatch.setattr("spmd.transport.local.lockstep.usable_cores", lambda: 2)
    monkeypatch.setattr(split_work, "part_bytes", lambda: 1 << 20)
    mesh = Mesh(x=2, scheduler=scheduler)
    x = np.random.default_rng(0).standard_normal((1024, 1024))
    rows = mesh.layout(x.shape, P("x"))
    one = spmd.Layout.grid(x.shape, (1, 1), mesh.axes, [1])
    frozen = spmd.put(x, P("x"), mesh)
    split.clear()
    run = mesh.map(lambda x: spmd.repartition(x, rows, one), in_specs=P("x"), out_specs=one, check=tracked)
    np.testing.assert_array_equal(run(frozen).numpy(), x)
    assert split == [2]
