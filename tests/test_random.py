"""Random arrays and streams: what they depend on, and the states of what is drawn."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import drawing

import spmd
from spmd import P
from spmd.errors import MeshError, SpecError
from spmd.functions import dropout


def drawn(axis_name, scheduler="lockstep", seed=3, **axes) -> np.ndarray:
    """What each worker draws, in order of the workers."""
    with spmd.Mesh(transport="local", scheduler=scheduler, **axes) as mesh:
        names = tuple(mesh.axes)
        body = lambda: spmd.pvary(spmd.random.default_rng(seed, axis_name).normal(size=(1, 2)), names)
        return spmd.map(body, (), P(names))().numpy()


def test_every_place_along_the_axes_has_its_own_stream():
    both = drawn(("x", "y"), x=2, y=3)
    assert len({tuple(row) for row in both}) == 6
    along = drawn("x", x=2, y=3).reshape(2, 3, 2)
    assert len({tuple(row) for row in along[:, 0]}) == 2
    assert (along == along[:, :1]).all()
    same = drawn((), x=2, y=3)
    assert (same == same[0]).all()
    np.testing.assert_array_equal(same[0], np.random.default_rng([3]).normal(size=2))


def test_numbers_depend_on_seed_and_place_only():
    np.testing.assert_array_equal(drawn("x", x=2, y=3)[::3], drawn("x", x=2))
    np.testing.assert_array_equal(drawn("x", "threads", x=4), drawn("x", "lockstep", x=4))
    assert (drawn("x", seed=(3, 1), x=2) != drawn("x", seed=(3, 2), x=2)).all()


def test_what_is_drawn_carries_its_state():
    def body(x):
        rng = spmd.random.default_rng(0, "x")
        x = x + rng.normal(size=3)
        assert x.state.varying == {"x"}
        assert spmd.random.default_rng(0).integers(5) == spmd.random.default_rng(0).integers(5)
        return spmd.psum(np.sum(x * rng.random()), "x") + spmd.random.default_rng(1).normal()

    with spmd.Mesh(x=2):
        spmd.map(body, P(), P())(np.ones(3))
        with pytest.raises(Exception, match="Invariant along 'x'"):
            spmd.map(lambda: spmd.random.default_rng(0, "x").normal(size=2), (), P())()
    assert spmd.random.default_rng(7).random() == np.random.default_rng([7]).random()


def test_generators_that_are_spawned_or_copied_carry_the_state_too():
    def body(x):
        rng = spmd.random.default_rng(0, "x")
        (child,) = rng.spawn(1)
        assert child.normal(size=2).state.varying == {"x"}
        (grandchild,) = child.spawn(1)
        assert grandchild.random().state.varying == {"x"}
        twin = copy.deepcopy(rng)
        np.testing.assert_array_equal(spmd.block(twin.normal(size=2)), spmd.block(rng.normal(size=2)))
        return x + twin.normal(size=x.shape)

    with spmd.Mesh(x=2):
        spmd.map(body, P("x"), P("x"))(np.ones(4))


def test_wrong_arguments():
    with pytest.raises(SpecError, match="argument seed"):
        spmd.random.default_rng(-1)
    with pytest.raises(SpecError, match="argument seed"):
        spmd.random.default_rng(None)
    with pytest.raises(MeshError, match="outside of"):
        spmd.random.default_rng(0, "x")
    with spmd.Mesh(x=2), pytest.raises(MeshError, match="axis_name"):
        spmd.map(lambda: spmd.random.default_rng(0, "z").normal(), (), P())()


def test_streams_along_different_axes_differ():
    assert (drawn("x", x=2, y=2)[[0, 2]] != drawn("y", x=2, y=2)[[0, 1]]).all()


# Global arrays


MESHES = [{"x": 1, "y": 1}, {"x": 2, "y": 1}, {"x": 3, "y": 1}, {"x": 2, "y": 2}, {"x": 1, "y": 5}, {"x": 2, "y": 3}]
MESHES += [{"x": 7, "y": 1}, {"x": 2, "y": 4}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_global_array_is_the_same_on_every_mesh(axes, scheduler):
    wanted = drawing.serial()
    for how, digests in drawing.results(spmd.Mesh(transport="local", scheduler=scheduler, **axes)).items():
        assert digests.items() <= wanted.items(), how


@each_mpi
def test_a_global_array_is_the_same_under_mpi(python):
    ended = launch(PROGRAMS / "drawing.py", python=python)
    assert ended.returncode == 0, str(ended)
    wanted = drawing.serial()
    found = json.loads(ended.stdout)
    assert len(found) == 3 * len(drawing.SPECS)
    for how, digests in found.items():
        assert digests.items() <= wanted.items(), how


def test_layouts_stand_for_specs():
    key, shape = spmd.random.key(1), (7, 4)
    wanted = spmd.random.normal(key, shape)
    with spmd.Mesh(x=3, transport="local") as mesh:
        uneven = spmd.Layout(shape, P("x"), mesh.axes, [(5, 0, 2), None])
        grid = spmd.Layout.grid(shape, (1, 2), mesh.axes, (2, 0))
        for layout in uneven, grid:
            made = spmd.random.normal(key, shape, spec=layout)
            assert made.layout == layout
            np.testing.assert_array_equal(made.numpy(), wanted)
            inside = spmd.map(lambda layout=layout: spmd.random.normal(key, shape, spec=layout), (), layout)()
            np.testing.assert_array_equal(inside.numpy(), wanted)
        number = spmd.random.uniform(key, (), spec=spmd.Layout.grid((), (), mesh.axes, (1,)))
        assert number.numpy() == spmd.random.uniform(key)


def test_states_of_what_is_drawn():
    def body(key, keys):
        assert spmd.random.uniform(key, 4).state.varying == set()
        assert spmd.random.uniform(key, (4, 4), spec=P(None, "y")).state.varying == {"y"}
        assert spmd.random.uniform(keys[0], 4).state.varying == {"x"}
        assert spmd.random.uniform(keys[0], 4, spec=P("y")).state.varying == {"x", "y"}
        mine = spmd.random.fold_in(key, spmd.axis_index("y"))
        assert mine.state.varying == {"y"}
        assert spmd.random.split(mine).state.varying == {"y"}
        return spmd.random.normal(mine, (1, 3))

    with spmd.Mesh(x=2, y=2):
        key = spmd.random.key(0)
        rows = spmd.map(body, (P(), P("x")), P("y"))(key, spmd.random.split(key, 2)).numpy()
    for k in range(2):
        np.testing.assert_array_equal(rows[k], spmd.random.normal(spmd.random.fold_in(key, k), 3))


def test_like_learns_the_sizes_of_blocks(scheduler):
    key, x = spmd.random.key(3), np.arange(30.0).reshape(10, 3)

    def body(x):
        layout = spmd.random.like(x, P(("y", "x")))
        assert layout.shape == (10, 3)
        return spmd.random.uniform(key, layout.shape, spec=layout)

    with spmd.Mesh(x=3, y=2, transport="local", scheduler=scheduler) as mesh:
        layout = spmd.Layout(x.shape, P(("y", "x")), mesh.axes, [(4, 0, 1, 0, 3, 2), None])
        with spmd.ledger() as log:
            made = spmd.map(body, layout, layout)(x)
        assert log.bytes == 0
        np.testing.assert_array_equal(made.numpy(), spmd.random.uniform(key, x.shape))


def test_keys_are_many_and_all_different():
    key = spmd.random.key(7)
    keys = [key, *spmd.random.split(key, 500), *(spmd.random.fold_in(key, k) for k in range(500))]
    keys += [*spmd.random.split(keys[1], (5, 20)).reshape(-1, 2), spmd.random.key(8)]
    assert len({k.tobytes() for k in keys}) == len(keys)
    assert spmd.random.split(key, (5, 20)).shape == (5, 20, 2)
    np.testing.assert_array_equal(spmd.random.split(key, 3), spmd.random.split(key, 9)[:3])
    # What is drawn from a key is not one of its keys.
    assert not np.isin(spmd.random.bits(key, 1000), np.array(keys)).any()


@pytest.mark.parametrize("span", [1, 7, 10**6, 2**33 + 5, 2**63 + 3, 2**64])
def test_randint_is_the_upper_part_of_a_product(span):
    key, low = spmd.random.key(4), 0 if span > 2**63 else -5
    words = spmd.random.bits(key, 1000, np.uint64)
    found = spmd.random.randint(key, 1000, low, low + span, np.uint64 if low == 0 else np.int64)
    assert [int(n) for n in found] == [low + (int(w) * span >> 64) for w in words]


def test_choices():
    stats = pytest.importorskip("scipy.stats")
    key, p = spmd.random.key(5), np.array([0.1, 0.4, 0.5])
    n = 30_000
    for drawn in (
        spmd.random.choice(key, 3, n, p=p),
        spmd.random.categorical(key, np.broadcast_to(np.log(p), (n, 3))),
        np.digitize(spmd.random.uniform(key, n), [0.1, 0.5]),
    ):
        assert stats.chisquare(np.bincount(drawn, minlength=3), n * p).pvalue > 1e-3
    assert abs(spmd.random.bernoulli(key, p, (n, 3)).mean(0) - p).max() < 0.01
    order = spmd.random.permutation(key, 1000)
    assert sorted(order) == list(range(1000))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
    rows = np.arange(20.0).reshape(10, 2)
    np.testing.assert_array_equal(spmd.random.permutation(key, rows), rows[spmd.random.permutation(key, 10)])
    assert len(set(spmd.random.choice(key, 100, (10, 10), replace=False).ravel().tolist())) == 100
    assert set(spmd.random.choice(key, 3, 2, replace=False, p=np.array([0.5, 0.0, 0.5])).tolist()) == {0, 2}
    assert spmd.random.choice(key, rows, 4).shape == (4, 2)
    assert (spmd.random.choice(key, 3, 9, p=[0, 1, 0]) == 1).all()
    assert abs(spmd.random.uniform(key, 9, np.float16, -6e4, 6e4)).max() < 6e4


def test_truncated_numbers_stay_between():
    for ends in (-1.0, 2.0), (4.5, np.inf), (-np.inf, 0.0), (4.9, 5.0):
        for dtype in np.float32, np.float64, np.float16:
            x = spmd.random.truncated_normal(spmd.random.key(6), *ends, 10_000, dtype)
            assert (x >= ends[0]).all()
            assert (x <= ends[1]).all()
            assert len(np.unique(x)) > (100 if dtype == np.float16 and ends[1] == 5.0 else 10) or dtype == np.float16


def test_dropout():
    key, x = spmd.random.key(9), np.linspace(1, 2, 10_000)
    y = dropout(x, 0.25, key)
    kept = y != 0
    assert abs(kept.mean() - 0.75) < 0.02
    np.testing.assert_allclose(y[kept], x[kept] / 0.75)
    assert dropout(x.astype(np.float32), np.float64(0.25), key).dtype == np.float32
    np.testing.assert_array_equal(dropout(np.full(9, np.nan), 0.0, key), np.full(9, np.nan))
    spmd.check_grads(lambda x: dropout(x, 0.25, key), (x[:20],), order=2)
    with spmd.Mesh(x=3):
        local = lambda x: spmd.psum(np.sum(dropout(x, 0.25, key, P("x")) ** 2), "x")
        total = spmd.map(local, P("x"), P())
        np.testing.assert_allclose(spmd.grad(total)(x), 2 * y / 0.75)


def test_wrong_arguments_of_global_arrays():
    key, random = spmd.random.key(0), spmd.random
    for call, words in [
        (lambda: random.key(-1), "argument seed"),
        (lambda: random.key("a"), "argument seed"),
        (lambda: random.uniform(0, 3), "argument key"),
        (lambda: random.uniform(random.split(key), 3), "of several keys one"),
        (lambda: random.uniform(key, (3, -1)), "argument shape"),
        (lambda: random.uniform(key, 3, int), "argument dtype"),
        (lambda: random.normal(key, 3, complex), "draw both parts"),
        (lambda: random.uniform(key, 3, float, 1, 0), "minval and maxval"),
        (lambda: random.uniform(key, 3, float, np.nan, 0), "minval and maxval"),
        (lambda: random.uniform(key, 3, float, -np.inf, 0), "infinitely far apart"),
        (lambda: random.uniform(key, 3, float, -1.7e308, 1.7e308), "infinitely far apart"),
        (lambda: random.uniform(key, 3, np.float16, 0, 1e6), "that float16 holds"),
        (lambda: random.bernoulli(key, np.full(3, 0.5), ()), "argument p"),
        (lambda: random.bernoulli(key, np.full(3, 0.5), (3, 1)), "argument p"),
        (lambda: random.choice(key, 3, 2, p=[0, 0, 0]), "argument p"),
        (lambda: random.choice(key, 3, 2, p=[-1, 1, 1]), "argument p"),
        (lambda: random.choice(key, 3, 2, replace=False, p=[0, 0, 1]), "argument p"),
        (lambda: random.bits(key, 3, np.int32), "uint32 or uint64"),
        (lambda: random.randint(key, 3, 5, 5), "minval below maxval"),
        (lambda: random.randint(key, 3, 0, 300, np.uint8), "minval and maxval"),
        (lambda: random.truncated_normal(key, 6.0, 9.0, 3, np.float32), "reaches within 5"),
        (lambda: random.fold_in(key, -1), "argument data"),
        (lambda: random.choice(key, 3, 4, replace=False), "without replacement"),
        (lambda: random.uniform(key, 3, spec="x"), "argument spec"),
        (lambda: dropout(np.ones(3), 1.5, key), "argument rate"),
    ]:
        with pytest.raises(SpecError, match=words):
            call()
    with pytest.raises(MeshError, match="no mesh"):
        random.uniform(key, 3, spec=P("x"))
    with spmd.Mesh(x=2, y=2):
        for body, words in [
            (lambda x: dropout(x, 0.5, key), "argument spec"),
            (lambda x: dropout(x, 0.5, key, P("y")), "varies over 'x' too"),
            (lambda x: random.categorical(key, x, spec=P("x")), "splits the classes"),
            (lambda x: random.uniform(key, 3, spec=P("z")), "argument spec"),
        ]:
            with pytest.raises((SpecError, spmd.errors.StateError, spmd.errors.LayoutError), match=words):
                spmd.map(body, P("x"), P("x"))(np.ones(4))


@pytest.mark.filterwarnings("error")
def test_numbers_without_dimensions():
    key, random = spmd.random.key(2), spmd.random
    draws = [
        lambda **where: random.uniform(key, **where),
        lambda **where: random.normal(key, dtype=np.float16, **where),
        lambda **where: random.randint(key, (), -5, 5, **where),
        lambda **where: random.bits(key, dtype=np.uint64, **where),
        lambda **where: random.bernoulli(key, **where),
    ]
    with spmd.Mesh(x=2, transport="local"):
        for draw in draws:
            assert np.shape(draw()) == ()
            assert draw(spec=P()).numpy() == draw()
            assert spmd.map(lambda draw=draw: draw(spec=P()), (), P())() == draw()


def test_bodies_without_checks():
    key = spmd.random.key(3)
    with spmd.Mesh(x=3, transport="local"):
        made = spmd.map(lambda: spmd.random.normal(key, (7, 2), spec=P("x")), (), P("x"), check=False)()
        np.testing.assert_array_equal(made.numpy(), spmd.random.normal(key, (7, 2)))
        dropped = spmd.map(lambda x: dropout(x, 0.5, key, P("x")), P("x"), P("x"), check=False)(np.ones(9))
        np.testing.assert_array_equal(dropped.numpy(), dropout(np.ones(9), 0.5, key))


K = spmd.random.key(0)
BAD = {
    "permutation: argument x": (
        lambda bad: spmd.random.permutation(K, bad),
        (-1, 2.5, np.float64(3), np.array(3), None, True, "ab"),
    ),
    "choice: argument a": (lambda bad: spmd.random.choice(K, bad), (2.5, np.array(3.0), None, -1)),
    "uniform: argument shape": (
        lambda bad: spmd.random.uniform(K, bad),
        (-1, 2.5, (2, -1), ((1, 2), (3,)), "ab", None, 1 << 62),
    ),
    "uniform: argument dtype": (lambda bad: spmd.random.uniform(K, 3, bad), ("foo", int, 3)),
    "bits: argument dtype": (lambda bad: spmd.random.bits(K, 3, bad), ("foo", np.int32)),
    "randint: argument dtype": (lambda bad: spmd.random.randint(K, 3, 0, 5, bad), ("foo",)),
    "bernoulli: argument p": (
        lambda bad: spmd.random.bernoulli(K, bad),
        (1.5, -0.1, np.nan, [0.5, 2], np.array([0.5, np.nan]), "a", None, 1j),
    ),
    "bernoulli: argument shape": (lambda bad: spmd.random.bernoulli(K, 0.5, bad), (-1, "a")),
    "categorical: argument logits": (
        lambda bad: spmd.random.categorical(K, bad),
        (np.zeros(()), 3.0, None, np.zeros((2, 0))),
    ),
    "categorical: argument logits and axis": (
        lambda bad: spmd.random.categorical(K, np.zeros((2, 3)), bad),
        (3, "a", None),
    ),
    "choice: argument p": (
        lambda bad: spmd.random.choice(K, 2, p=bad),
        (np.array([1j, 0]), "a", 0.5, [0, 0], [1, np.nan]),
    ),
    "split: argument num": (lambda bad: spmd.random.split(K, bad), (-1, 1.5, (2, -1))),
}


@pytest.mark.parametrize("head", BAD)
def test_what_cannot_be_drawn_is_an_error(head):
    draw, given = BAD[head]
    for bad in given:
        with pytest.raises(SpecError, match=rf"spmd\.random\.{head}.*\n  got: .*\n  needed: .*\n  mend: "):
            draw(bad)


def test_what_can_be_drawn():
    random = spmd.random
    assert random.permutation(K, 0).shape == (0,)
    np.testing.assert_array_equal(np.sort(random.permutation(K, [3, 1, 2])), [1, 2, 3])
    assert random.choice(K, [[1, 2], [3, 4]], 5).shape == (5, 2)
    np.testing.assert_array_equal(random.bernoulli(K, [0, 1, 1.0, False]), [False, True, True, False])
    np.testing.assert_array_equal(random.categorical(K, [-np.inf, 0.0]), 1)


@pytest.mark.parametrize("sides", [(1, 1), (3, 1), (2, 2), (3, 2)])
def test_classes_and_events_of_global_arrays_are_those_of_bare_ones(sides):
    logits = np.random.default_rng(0).normal(size=(7, 5))
    chances = np.random.default_rng(1).random((7, 5))
    with spmd.Mesh(x=sides[0], y=sides[1]) as mesh:
        grid = spmd.Layout.grid(logits.shape, (1, 1), mesh.axes, [mesh.size - 1])
        for how in (P(), P("x"), P(None, "y"), P("y", "x"), grid):
            x = spmd.put(logits, how)
            for axis in (0, 1, -1):
                wanted = spmd.random.categorical(K, logits, axis)
                for have in (
                    spmd.random.categorical(K, x, axis),
                    spmd.random.categorical(K, logits, axis, spec=how),
                    spmd.random.categorical(K, spmd.put(logits, P()), axis, spec=how),
                ):
                    assert type(have) is spmd.PartitionedArray
                    np.testing.assert_array_equal(have.numpy(), wanted, strict=True)
            events = spmd.random.bernoulli(K, spmd.put(chances, how))
            assert events.layout == x.layout
            np.testing.assert_array_equal(events.numpy(), spmd.random.bernoulli(K, chances), strict=True)


def test_classes_of_a_global_array_are_drawn_block_by_block(monkeypatch):
    drawn = []
    with spmd.Mesh(x=3, y=2):
        x = spmd.put(np.zeros((7, 5)), P("x", "y"))
        gumbel = spmd.random.sampling.gumbel
        monkeypatch.setattr(
            spmd.random.sampling, "gumbel", lambda *args, **how: drawn.append(gumbel(*args, **how)) or drawn[-1]
        )
        spmd.random.categorical(K, x)
        assert [noise.layout for noise in drawn] == [x.layout]
