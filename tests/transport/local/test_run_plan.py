"""Collectives of virtual workers that a line calls again: by the short way they give what the verbs give, and whoever
comes another way meets the others all the same."""

from __future__ import annotations

import contextvars
import gc
import random
import sys
import weakref
from itertools import chain

import greenlet
import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import DeadlockError, MismatchError
from spmd.kernels.parallel import split_work
from spmd.mesh import here
from spmd.transport.local import run_plan
from spmd.transport.local.lockstep import LockstepRun

N = 1 << 18
RING = {n: [(k, (k + 1) % n) for k in range(n)] for n in range(1, 9)}


@pytest.fixture
def short(monkeypatch) -> list[str]:
    """What was completed by the short way."""
    done: list[str] = []
    complete = run_plan.RepeatedPlan._complete

    def counted(self, met, workers):
        well = complete(self, met, workers)
        if well:
            done.append(self.call.op)
        return well

    monkeypatch.setattr(run_plan.RepeatedPlan, "_complete", counted)
    return done


@pytest.fixture
def turned_down(monkeypatch) -> list[str]:
    """The groups that were turned down."""
    keys: list[str] = []
    fall_back = LockstepRun.fall_back

    def counted(self, key):
        keys.append(key)
        fall_back(self, key)

    monkeypatch.setattr(LockstepRun, "fall_back", counted)
    return keys


def lockstep(**axes: int) -> spmd.Mesh:
    return spmd.Mesh(transport="local", scheduler="lockstep", **axes)


def whole(x, axis: str) -> tuple[int, ...]:
    """The shape of the array of which x is a block, where all have its length."""
    return x.shape[0] * spmd.axis_size(axis), *x.shape[1:]


OPERATIONS = {
    "psum": lambda x, axis: spmd.psum(x, axis),
    "pmax": lambda x, axis: spmd.pmax(x, axis),
    "pmean": lambda x, axis: spmd.pmean(x, axis),
    "ppermute": lambda x, axis: spmd.ppermute(x, axis, RING[spmd.axis_size(axis)]),
    "shift": lambda x, axis: spmd.shift(x, axis, 1),
    "all_gather": lambda x, axis: spmd.all_gather(x, axis, tiled=True),
    "stacked": lambda x, axis: spmd.all_gather(x, axis, axis=1),
    "invariant": lambda x, axis: spmd.all_gather(x, axis, tiled=True, to="invariant"),
    "psum_scatter": lambda x, axis: spmd.psum_scatter(x, axis, tiled=True),
    "all_to_all": lambda x, axis: spmd.all_to_all(x, axis, 0, 1, tiled=True),
    "halo in lists": lambda x, axis: spmd.halo_exchange(
        x, P(axis, None), [[1, 1], 0], "zero", shape=list(whole(x, axis))
    ),
    "halo of any lengths": lambda x, axis: spmd.halo_exchange(x, P(axis), 1),
    "halo of a ring": lambda x, axis: spmd.halo_exchange(
        x, P(axis, None), [(1, 2), (0, 0)], "periodic", shape=whole(x, axis)
    ),
    "to the root": lambda x, axis: spmd.replicate(spmd.sum_reduce(x, axis, 0), axis),
    "from the root": lambda x, axis: spmd.broadcast(spmd.sum_reduce(x, axis, 1), axis, 1),
}
UNEVEN = ["ppermute", "shift", "all_gather", "invariant", "halo of any lengths"]
"""Those that take blocks of different lengths."""


def rounds(mesh: spmd.Mesh, name: str, axis: str, lengths, count: int) -> tuple[list, list]:
    """Values and gradients on every worker: `count` times the same line, on blocks of the lengths that
    lengths(round, worker) says."""
    everything = tuple(mesh.axes)

    def body(worker):
        found = []
        for k in range(count):
            data = np.random.default_rng([k, worker.index]).standard_normal((lengths(k, worker.index), 3))
            x = spmd.varying(data, everything)
            y = OPERATIONS[name](x, axis)
            value, pull = spmd.vjp(lambda a: OPERATIONS[name](a, axis), x)
            (g,) = pull(value)
            found.append([np.array(spmd.block(a)) for a in (y, value, g)])
        return found

    return list(mesh.run(body).results.values())


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"x": 8}, {"x": 2, "y": 3}], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_short_way_gives_the_bits_of_the_verbs(name, axes, short):
    rng = random.Random(f"{name}{axes}")
    mesh = lockstep(**axes)
    axis = rng.choice(list(axes))
    uneven = name in UNEVEN

    def lengths(k: int, worker: int) -> int:
        """The same for three rounds; where blocks may be uneven, another one of a single worker's in some rounds."""
        n = 4 + 2 * (k // 3)
        return n + (worker + k // 2) % 3 if uneven else n

    found = rounds(mesh, name, axis, lengths, 9)
    assert len(short) >= 3
    before = len(short)
    with spmd.ledger():  # by the verbs alone
        expected = rounds(lockstep(**axes), name, axis, lengths, 9)
    assert len(short) == before
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(chain(*mine), chain(*theirs), strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()


def test_a_worker_with_a_new_block_takes_the_others_along(short, turned_down):
    mesh = lockstep(x=4)

    def body(worker):
        sums = []
        for k in range(8):
            n = 5 if k == 5 and worker.index == 2 else 3
            x = spmd.varying(np.full((n,), 10.0 * worker.index + k), "x")
            sums.append(float(np.sum(spmd.block(spmd.all_gather(x, "x", tiled=True)))))
        return sums

    found = mesh.run(body).results
    expected = [sum((5 if k == 5 and w == 2 else 3) * (10.0 * w + k) for w in range(4)) for k in range(8)]
    assert all(sums == expected for sums in found.values())
    assert turned_down
    assert len(short) >= 4  # all but the first rounds and that with the new block


def test_blocks_are_handed_over_and_made_once(short):
    """Large ones too: nothing is copied that is only handed over, and all share what is one value."""
    mesh, held = lockstep(x=3), {}

    def body(worker):
        x = spmd.varying(np.full(1 << 20, 1.0 + worker.index), "x")
        small = spmd.varying(np.full(8, 1.0 + worker.index), "x")
        for _ in range(5):
            moved = spmd.block(spmd.ppermute(x, "x", RING[3]))
            total = spmd.block(spmd.psum(small, "x"))
        held[worker.index] = spmd.block(x), moved, total
        assert not any(a.flags.writeable for a in (moved, total, x.value))

    mesh.run(body)
    assert min(short.count("ppermute"), short.count("psum")) >= 2
    for w in range(3):
        assert np.shares_memory(held[w][0], held[(w + 1) % 3][1])
        assert np.shares_memory(held[0][2], held[w][2])


def test_who_gets_a_block_may_be_the_only_one_who_has_it():
    mesh, counts = lockstep(x=2), []

    def body(worker):
        for k in range(4):
            x = spmd.ppermute(spmd.varying(np.full(4, float(k)), "x") + 1, "x", RING[2])
            spmd.psum(spmd.varying(0.0, "x"), "x")  # until then the sender is still in its call
            value = x.value
            del x
            counts.append(sys.getrefcount(value))

    mesh.run(body)
    assert set(counts) == {2}  # by the verbs and by the short way alike


@pytest.mark.parametrize("rounds", range(4))
def test_a_worker_that_calls_something_else_is_named(rounds):
    def body(worker):
        x = spmd.varying(np.ones(3), "x")
        for _ in range(rounds):
            spmd.psum(x, "x")
            spmd.pmax(x, "x")
        spmd.pmax(x, "x") if worker.index == 1 else spmd.psum(x, "x")

    with pytest.raises(MismatchError, match=r"psum.*\n.*\n.*pmax"):
        lockstep(x=2).run(body)


@pytest.mark.parametrize("leaves", range(3))
def test_a_worker_that_leaves_early_is_named(leaves):
    def body(worker):
        x = spmd.varying(np.ones(3), "x")
        for k in range(5):
            if k == 3 and worker.index == leaves:
                return
            spmd.psum(x, "x")

    with pytest.raises(DeadlockError) as caught:
        lockstep(x=3).run(body)
    said = str(caught.value)
    for w in range(3):
        assert (f"worker {w} (x={w}) has left the map" if w == leaves else f"worker {w} (x={w}) waits in psum") in said


@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("step", range(6))
def test_the_error_of_a_worker_reaches_the_caller(failing, step):
    mesh = lockstep(x=3)

    def body(worker):
        x = spmd.varying(np.ones(3), "x")
        for k in range(6):
            if k == step and worker.index == failing:
                raise ValueError(f"at {k}")
            x = spmd.varying(spmd.psum(x, "x"), "x")

    with pytest.raises(ValueError, match=f"at {step}") as caught:
        mesh.run(body)
    assert f"worker {failing} " in caught.value.__notes__[0]
    assert set(mesh.run(lambda w: float(spmd.psum(spmd.varying(1.0, "x"), "x"))).results.values()) == {3.0}


def test_an_error_in_what_makes_the_results_is_everyones(monkeypatch):
    from spmd.kernels.cpu import moves

    combine, calls = moves.combine, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > 3:
            raise FloatingPointError("no sum")
        return combine(*args, **kwargs)

    monkeypatch.setattr("spmd.kernels.cpu.combine", failing, raising=False)  # first: its old value is looked up there
    monkeypatch.setattr(moves, "combine", failing)
    seen = []

    def body(worker):
        x = spmd.varying(np.ones(3, "float16"), "x")
        for _ in range(6):
            try:
                spmd.psum(x, "x")
            except FloatingPointError as error:
                seen.append((worker.index, error))
                raise

    with pytest.raises(FloatingPointError, match="no sum"):
        lockstep(x=3).run(body)
    assert sorted(w for w, _ in seen) == [0, 1, 2]
    assert len({id(error) for _, error in seen}) == 3


def test_two_groups_in_another_order_are_a_mismatch():
    def body(worker):
        x = spmd.varying(np.ones(2), ("x", "y"))
        for k in range(5):
            for axis in "yx" if k == 3 and worker.index == 0 else "xy":
                spmd.psum(x, axis)

    with pytest.raises(MismatchError):
        lockstep(x=2, y=2).run(body)


def test_a_mesh_may_change_its_scheduler(short):
    """What lines have called is known to the mesh; threads go by the verbs."""
    mesh = spmd.Mesh(x=3, transport="local")

    def body(worker):
        x = spmd.varying(np.arange(3.0) + worker.index, "x")
        for _ in range(4):
            x = spmd.ppermute(x, "x", RING[3])
        return np.array(spmd.block(x))

    found = []
    for scheduler in ("lockstep", "threads", "lockstep"):
        before = len(short)
        found.append(mesh.run(body, scheduler=scheduler).results)
        assert (len(short) > before) == (scheduler == "lockstep")
    for other in found[1:]:
        for w in range(3):
            np.testing.assert_array_equal(found[0][w], other[w])


def test_greenlets_of_a_body_may_wait_too(short):
    """One that the body makes itself, on the last worker and on others."""

    def inside(f):
        let = greenlet.greenlet(f)
        let.gr_context = contextvars.copy_context()
        return let.switch()

    def body(worker):
        x = spmd.varying(np.full(3, float(worker.index)), "x")
        return [float(np.sum(inside(lambda: spmd.block(spmd.psum(x, "x"))))) for _ in range(5)]

    assert set(map(tuple, lockstep(x=3).run(body).results.values())) == {(9.0,) * 5}
    assert len(short) >= 2


def test_derivatives_of_the_second_order_go_the_same_ways(short):
    mesh = lockstep(x=3)

    def body(x):
        y = x
        for _ in range(3):
            y = spmd.ppermute(y * y, "x", RING[3])
        return spmd.psum(np.sum(y), "x")

    f = mesh.map(body, P("x"), P())
    x = np.linspace(0.5, 1.5, 7)
    np.testing.assert_allclose(spmd.grad(f)(x), 8 * x**7)
    second = spmd.grad(lambda v: np.sum(spmd.grad(f)(v)))(x)
    np.testing.assert_allclose(second, 56 * x**6)
    assert short


def test_cotangents_that_users_give_stay_theirs_to_write(short):
    """What was handed on keeps the values that it had."""
    mesh = lockstep(x=2)

    def body(worker):
        x = spmd.varying(np.arange(4.0), "x")
        found = []
        for name in ("all_gather", "psum_scatter", "all_to_all", "ppermute", "halo"):
            take = {
                "all_gather": lambda a: spmd.all_gather(a, "x", tiled=True),
                "psum_scatter": lambda a: spmd.psum_scatter(a, "x", tiled=True),
                "all_to_all": lambda a: spmd.all_to_all(a, "x", 0, 0, tiled=True),
                "ppermute": lambda a: spmd.ppermute(a, "x", RING[2]),
                "halo": lambda a: spmd.halo_exchange(a, P("x"), 1, shape=(8,)),
            }[name]
            y, pull = spmd.vjp(take, x)
            seed = np.full(y.shape, 1.0 + worker.index)
            kept = []
            for _ in range(4):
                (g,) = pull(seed)
                kept.append((spmd.block(g), np.array(spmd.block(g))))
                seed += 1
            for block, copy in kept:
                np.testing.assert_array_equal(block, copy)
            found.append(kept)
        return found

    found = mesh.run(body).results
    with spmd.ledger():
        theirs = mesh.run(body).results
    for w in range(2):
        for a, b in zip(chain(*found[w]), chain(*theirs[w]), strict=True):
            np.testing.assert_array_equal(a[1], b[1])


def test_at_root_goes_by_the_verbs():
    """Some groups of the root's would go a short way, others cannot: all count alike, and meet by the verbs again."""
    mesh = lockstep(x=2, y=2, z=2)

    def body(worker):
        found = []
        for k in range(5):
            n = 3 + (k if worker.coordinates["z"] else 0)  # where z is 1, of a new length each time

            def of(a, k=k):
                gathered = np.sum(spmd.all_gather(a, "y", tiled=True))
                return spmd.psum(np.ones(1 + k) * gathered, "z")[0]

            v = spmd.keep(spmd.varying(np.ones(n), ("y", "z")), "x", 0)
            found.append(float(spmd.block(spmd.replicate(spmd.at_root(of, v, axis_name="x"), "x"))))
        return found

    assert set(map(tuple, mesh.run(body).results.values())) == {tuple(2.0 * (6 + k) for k in range(5))}


def test_the_backward_run_of_a_map_that_is_differentiated_from_outside(short):
    mesh = lockstep(x=4)

    def body(x):
        y = x
        for _ in range(4):
            y = spmd.ppermute(y, "x", RING[4])
        return spmd.psum(np.sum(y * y), "x")

    f = mesh.map(body, P("x"), P())
    x = np.linspace(0.5, 1.5, 8)
    value, pull = spmd.vjp(f, x)
    forward = short.count("ppermute")
    for _ in range(3):
        np.testing.assert_allclose(pull(np.ones(()))[0], 2 * x)
    assert short.count("ppermute") >= forward + 3 * 4 - 4
    assert value == np.sum(x * x)


def test_a_halo_whose_lengths_change_for_good_goes_the_short_way_again(short):
    mesh = lockstep(x=3)

    def body(worker):
        for k in range(12):
            x = spmd.varying(np.full(6 if k >= 5 and worker.index == 0 else 4, 1.0 + worker.index), "x")
            y = spmd.block(spmd.halo_exchange(x, P("x"), 1))
            assert y.tolist() == [
                1.0 + w for w in (worker.index - 1, *[worker.index] * x.size, worker.index + 1) if 0 <= w < 3
            ]

    mesh.run(body)
    assert len(short) >= 3 + 3


@pytest.mark.parametrize(("spec", "learnt", "known"), [(P("x"), 1, 1), (P("x", "y"), 4, 2)])
def test_the_lengths_of_one_dimension_are_learnt_in_the_meeting_that_moves(scheduler, spec, learnt, known):
    """And a ledger counts the same."""
    mesh, shape = spmd.Mesh(x=2, y=2, scheduler=scheduler), (5, 7)
    x, numbers, results, costs = np.arange(35.0).reshape(shape), [], [], []
    for given in None, shape:

        def local(x, given=given):
            comm = here("a test").comm
            before = comm.number
            y = spmd.halo_exchange(x, spec, 1, "periodic", shape=given)
            numbers.append(comm.number - before)
            return y

        run = mesh.map(local, in_specs=spec, out_specs=spec)
        results.append(run(x).numpy())
        with spmd.ledger() as log:
            run(x)
        assert ("shapes" in log.verbs) is (given is None)
        costs.append([(log.workers[k].messages, log.workers[k].bytes) for k in range(4)])
    assert numbers == [learnt] * 8 + [known] * 8
    assert np.array_equal(*results)
    assert costs[0] == costs[1]
    assert all(messages and nbytes for messages, nbytes in costs[0])


def test_what_is_tried_in_vain_is_given_up_but_for_now_and_then(turned_down):
    """One worker has a new block each time: the others never meet it by the short way."""
    mesh = lockstep(x=3)

    def body(worker):
        for k in range(200):
            n = 1 + k if worker.index == 2 else 3
            spmd.all_gather(spmd.varying(np.ones(n), "x"), "x", tiled=True)

    mesh.run(body)
    assert len(turned_down) < 40


def test_gradients_of_maxima_keep_the_table_small():
    mesh = lockstep(x=2)

    def body(worker):
        x = spmd.varying(np.arange(3.0) + worker.index, "x")
        sizes = []
        for _ in range(20):
            spmd.grad(lambda a: np.sum(spmd.pmax(a, "x")))(x)
            sizes.append(len(worker.prepared))
        return sizes

    for sizes in mesh.run(body).results.values():
        assert len(set(sizes[5:])) == 1


def test_buckets_of_gradients_and_short_ways_of_one_group(short, turned_down):
    """A full bucket is on its way while the sweep goes on: who is ahead is not turned down."""
    mesh = lockstep(data=2)

    def body(worker):
        w = [spmd.pcast(np.full(1 << 18, 1.0 + k), "data", to="invariant") for k in range(6)]
        x = spmd.varying(np.full(1 << 18, 2.0 + worker.index), "data")

        def loss(w):
            y = x
            for a in w:
                y = spmd.ppermute(y * a, "data", RING[2])
            return spmd.psum(np.sum(y) / y.size, "data")

        return [[float(spmd.block(g)[0]) for g in spmd.grad(loss)(w)] for _ in range(3)]

    first, second = mesh.run(body).results.values()
    assert first == second
    np.testing.assert_allclose(first[0], [5.0 * 720 / (1 + k) / (1 << 18) for k in range(6)])
    assert short.count("ppermute") > 12


def test_one_workers_ledger_takes_all_by_the_verbs(short):
    mesh = lockstep(x=3)

    def body(worker):
        x = spmd.varying(np.full(4, float(worker.index)), "x")
        sums = []
        for k in range(8):
            if k == 4 and worker.index == 1:
                with spmd.ledger() as log:
                    sums.append(float(spmd.block(spmd.psum(x, "x"))[0]))
                assert log.operators
            else:
                sums.append(float(spmd.block(spmd.psum(x, "x"))[0]))
        return sums

    assert set(map(tuple, mesh.run(body).results.values())) == {(3.0,) * 8}


def test_an_interrupt_finds_those_who_have_gathered(short):
    mesh = lockstep(x=3)

    def body(worker):
        x = spmd.varying(np.ones(3), "x")
        for k in range(6):
            if k == 4 and worker.index == 2:
                raise KeyboardInterrupt
            spmd.psum(x, "x")

    with pytest.raises(KeyboardInterrupt):
        mesh.run(body)
    assert set(mesh.run(lambda w: float(spmd.psum(spmd.varying(1.0, "x"), "x"))).results.values()) == {3.0}
    assert short


@pytest.mark.parametrize("dtype", ["float16", "int8", "bool", "complex64", ">f8", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (1, 5)], ids=str)
def test_every_dtype_and_shape(dtype, shape, short):
    """The bits of the verbs, for blocks of any kind."""
    mesh = lockstep(x=3)

    def body(worker):
        rng = np.random.default_rng(worker.index)
        x = spmd.varying((rng.standard_normal(shape) * 3).astype(dtype), "x")
        found = []
        for _ in range(3):
            found += [spmd.psum(x, "x"), spmd.ppermute(x, "x", RING[3]), spmd.all_gather(x, "x")]
            if dtype != "complex64":
                found.append(spmd.pmax(x, "x"))
        return [np.array(spmd.block(a)) for a in found]

    mine = mesh.run(body).results
    assert short
    with spmd.ledger():
        theirs = lockstep(x=3).run(body).results
    for w in range(3):
        for a, b in zip(mine[w], theirs[w], strict=True):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize("pays", [1, 8])
@pytest.mark.parametrize(("nbytes", "is_short"), [(3 << 19, True), (1 << 23, False)])
def test_blocks_that_the_caches_hold_go_the_short_way(nbytes, is_short, pays, short, monkeypatch):
    """Of larger ones Python's part is nothing. What comes of them does not depend on who makes it."""
    monkeypatch.setattr(split_work, "part_bytes", lambda: pays << 20)
    n = nbytes // 4
    found = []

    def body(x):
        for _ in range(3):
            y = spmd.all_gather(x, "x", tiled=True, to="invariant")
            total = spmd.psum(x, "x")
            found.append((np.array(spmd.block(y)), np.array(spmd.block(total))))
        return total

    x = np.random.default_rng(1).standard_normal(2 * n).astype(np.float32)
    # In the first one the operators may have admitted nothing before: who calls them first is a turn behind.
    for _ in range(2):
        short.clear()
        mesh = lockstep(x=2)
        mesh.map(body, in_specs=P("x"), out_specs=P())(spmd.put(x, P("x"), mesh))
    assert len(short) == 2 * 2 * is_short
    for gathered, total in found:
        np.testing.assert_array_equal(gathered, x)
        np.testing.assert_array_equal(total, x[:n] + x[n:])


def test_parts_of_one_array_are_joined_by_nobody(monkeypatch):
    """Which only the verbs see: large blocks that may be such go by them, however often a line is called."""
    monkeypatch.setattr(split_work, "part_bytes", lambda: 8 << 20)
    mesh = lockstep(x=2)
    array = mesh.map(lambda x: 2 * x, in_specs=P(), out_specs=P())(np.ones(1 << 19))
    shared = []

    def body(x):
        for _ in range(3):
            y = spmd.all_gather(x, "x", tiled=True, to="invariant")
            shared.append(np.shares_memory(spmd.block(x), spmd.block(y)))
        return y

    mesh.map(body, in_specs=P("x"), out_specs=P())(array)
    assert shared == [True] * 6


@pytest.mark.parametrize(
    "act",
    [
        lambda x: spmd.psum(x, "x"),
        lambda x: spmd.pmax(x, "x"),
        lambda x: spmd.psum_scatter(x, "x", tiled=True),
        lambda x: spmd.all_gather(x, "x", tiled=True),
        lambda x: spmd.all_to_all(x, "x", 0, 0, tiled=True),
        lambda x: spmd.halo_exchange(x, P("x"), 1, shape=(2 * N,)),
        lambda x: spmd.ppermute(x, "x", [(0, 1), (1, 0)]),
    ],
    ids=["psum", "pmax", "psum_scatter", "all_gather", "all_to_all", "halo_exchange", "ppermute"],
)
def test_what_is_known_of_lines_holds_no_block(act, monkeypatch):
    """It lives as long as the mesh does."""
    mesh, blocks, init = lockstep(x=2), [], run_plan.RepeatedPlan.__init__

    def noted(self, call, way, x):
        blocks.append(weakref.ref(x))
        init(self, call, way, x)

    def body(x):
        for _ in range(4):
            act(2 * x)
        return spmd.psum(x[0], "x")

    monkeypatch.setattr(run_plan.RepeatedPlan, "__init__", noted)
    mesh.map(body, in_specs=P("x"), out_specs=P())(np.ones(2 * N))
    gc.collect()
    assert len(blocks) >= 2
    assert [ref() for ref in blocks] == [None] * len(blocks)
