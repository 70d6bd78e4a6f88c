"""`spmd.data.Sampler` against the minibatches of a sequential run, and against torch's rule for padding."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd import P
from spmd.data import Sampler
from spmd.data.shares import Shares
from spmd.errors import LayoutError, MeshError

lengths, sizes, workers = st.integers(0, 50), st.integers(1, 20), st.integers(1, 8)
seeds, epochs = st.integers(0, 2**40), st.integers(0, 9)
orders = st.sampled_from(["blocked", "strided"])


def sequential(n, size, *, shuffle=True, seed=0, epoch=0, drop_last=False) -> list[list[int]]:
    """The minibatches of a run on one worker."""
    order = np.random.default_rng([seed, epoch]).permutation(n) if shuffle else np.arange(n)
    batches = [order[k : k + size].tolist() for k in range(0, n, size)]
    return [b for b in batches if len(b) == size or not drop_last]


def every(n, p, size, **options) -> list[Sampler]:
    return [Sampler(n, size, num_replicas=p, rank=rank, **options) for rank in range(p)]


def lists(epoch) -> list[list[int]]:
    return [indices.tolist() for indices in epoch]


def flat(batches) -> list[int]:
    return [i for batch in batches for i in batch]


def merged(shares, order) -> list[list[int]]:
    """Minibatches from the shares of all workers: one after the other, or one sample of each in turn."""
    batches = []
    for step in zip(*shares, strict=True):
        if order == "blocked":
            batches.append([i for share in step for i in share])
        else:
            longest = max(map(len, step))
            batches.append([share[k] for k in range(longest) for share in step if k < len(share)])
    return batches


@given(lengths, sizes, workers, st.booleans(), st.booleans(), orders, seeds, epochs)
def test_shares_join_to_the_minibatches_of_the_sequential_run(n, size, p, shuffle, drop_last, order, seed, epoch):
    expected = sequential(n, size, shuffle=shuffle, seed=seed, epoch=epoch, drop_last=drop_last)
    samplers = every(n, p, size, shuffle=shuffle, drop_last=drop_last, order=order, seed=seed)
    shares = [lists(s.epoch(epoch)) for s in samplers]
    assert merged(shares, order) == expected
    for rank, (s, mine) in enumerate(zip(samplers, shares, strict=True)):
        assert [len(share) for share in mine] == [len(b) // p + (rank < len(b) % p) for b in expected]
        assert len(s) == len(s.epoch(epoch)) == len(expected)
        assert len(s.shares) == sum(map(len, mine))
        assert [s.epoch(epoch)[k].tolist() for k in range(len(expected))] == mine
        assert lists(s.epoch(epoch)[1:]) == mine[1:]


def test_the_two_orders():
    shares = {
        order: every(24, 2, 8, shuffle=False, order=order)[0].epoch(0)[1].tolist() for order in ("blocked", "strided")
    }
    assert shares == {"blocked": [8, 9, 10, 11], "strided": [8, 10, 12, 14]}


@given(lengths, st.integers(1, 6), workers, st.booleans(), st.booleans(), seeds)
def test_padding_follows_torchs_rule(n, each, p, drop_last, shuffle, seed):
    order = np.random.default_rng([seed, 2]).permutation(n) if shuffle else np.arange(n)
    total = n // p * p if drop_last else -(-n // p) * p
    padded = np.resize(order, total)  # the first samples again
    for order_of_shares in (None, "strided", "blocked"):
        samplers = every(
            n, p, each * p, drop_last=drop_last, shuffle=shuffle, seed=seed, padding=True, order=order_of_shares
        )
        shares = [lists(s.epoch(2)) for s in samplers]
        assert merged(shares, order_of_shares or "strided") == [
            padded[k : k + each * p].tolist() for k in range(0, total, each * p)
        ]
        for rank, mine in enumerate(shares):
            if order_of_shares != "blocked":
                assert flat(mine) == padded[rank::p].tolist()
            assert len(flat(mine)) == total // p


@given(lengths, sizes, st.lists(st.integers(1, 4), max_size=3), orders, st.booleans())
def test_positions_of_an_epoch_are_those_of_its_steps(n, size, parts, order, drop_last):
    """Over several axes too, where each axis splits the blocks of those before."""
    p = math.prod(parts)
    taken = [[] for _ in range(-(-n // size))]
    for index in range(p):
        shares = Shares(n, size, tuple(parts), index, drop_last, False, order)
        by_step = [shares.of_step(k) for k in range(shares.steps)]
        np.testing.assert_array_equal(shares.positions(), np.concatenate([*by_step, np.zeros(0, int)]))
        for batch, share in zip(taken, by_step, strict=False):
            batch.extend(share.tolist())
        whole = [shares.minibatch_of_step(k).tolist() for k in range(shares.steps)]
    assert taken[: shares.steps] == whole
    assert flat(map(sorted, taken)) == list(range(n // size * size if drop_last else n))


# Workers of meshes


@pytest.mark.parametrize("order", ["blocked", "strided"])
@pytest.mark.parametrize("names", ["x", "y", ("x", "y"), ("y", "x"), ()])
def test_shares_in_bodies_are_the_blocks_of_minibatches(scheduler, names, order):
    axes = {"x": 2, "y": 3}
    data, shares = np.zeros((50, 2)), {}

    def body():
        sampler = Sampler(data, 9, names, order=order, seed=1)
        shares[spmd.worker_index(("x", "y"))] = lists(sampler.epoch(4))
        assert lists(pickle.loads(pickle.dumps(sampler)).epoch(4)) == lists(sampler.epoch(4))

    with spmd.Mesh(scheduler=scheduler, **axes) as mesh:
        spmd.map(body, (), None)()
        whole = lists(Sampler(data, 9, names, order=order, seed=1).epoch(4))
    expected = sequential(50, 9, seed=1, epoch=4)
    assert list(map(sorted, whole)) == list(map(sorted, expected))
    assert order == "strided" or whole == expected
    for worker, mine in shares.items():  # what P(names) makes of the whole is what the body has
        assert mine == [np.array(b)[mesh.layout((len(b),), P(names)).slices(worker)].tolist() for b in whole]


def test_without_axes_outside_of_bodies_minibatches_are_whole():
    assert lists(Sampler(10, 4, seed=3).epoch(1)) == sequential(10, 4, seed=3, epoch=1)
    assert lists(Sampler(np.zeros((3, 2)), 8, shuffle=False).epoch(0)) == [[0, 1, 2]]
    assert lists(Sampler({"x": np.zeros((5, 1)), "y": np.zeros(5)}, 3, shuffle=False).epoch(0)) == [[0, 1, 2], [3, 4]]
    assert len(Sampler(["a", "b", "c"], 2)) == 2
    assert len(Sampler([], 2)) == len(Sampler(0, 2)) == 0


def test_data_may_grow_between_epochs():
    data = list(range(5))
    sampler = Sampler(data, 4, shuffle=False)
    assert lists(sampler.epoch(0)) == [[0, 1, 2, 3], [4]]
    data += [5, 6]
    assert lists(sampler.epoch(0)) == [[0, 1, 2, 3], [4, 5, 6]]


# Resuming


@given(lengths, sizes, workers, workers, st.booleans(), orders, orders, st.data())
def test_other_workers_go_on_after_any_step(n, size, p, q, drop_last, order, other, data):
    options = {"seed": 2, "drop_last": drop_last}
    expected = sequential(n, size, seed=2, epoch=3, drop_last=drop_last)
    stop = data.draw(st.integers(0, len(expected)))
    states, taken = set(), []
    for s in every(n, p, size, order=order, **options):
        steps = iter(s.epoch(3))
        taken.append([next(steps).tolist() for _ in range(stop)])
        states.add(json.dumps(s.state_dict() if stop else s.state_dict() | {"epoch": 3}))
    (state,) = states
    assert merged(taken, order) == expected[:stop]
    after = every(n, q, size, order=other, **options)
    for s in after:
        s.load_state_dict(json.loads(state))
        assert s.next_epoch() == 3 + (0 < stop == len(expected))
    assert merged([lists(s.epoch(3)) for s in after], other) == expected[stop:]
    assert merged([lists(s.epoch(3)) for s in after], other) == expected  # a later pass is whole


def test_epochs_go_on_where_a_state_is():
    sampler = Sampler(7, 3, seed=5)
    every_epoch = [lists(sampler.epoch(k)) for k in range(4)]
    for step in range(4):
        sampler.load_state_dict({"epoch": 1, "step": step})
        rest = [(epoch.number, lists(epoch)) for epoch in sampler.epochs(4)]
        first = [(1, every_epoch[1][step:])] if step < 3 else []
        assert rest == [*first, (2, every_epoch[2]), (3, every_epoch[3])]
    assert [*sampler.epochs(4)] == []
    sampler.load_state_dict({"epoch": 1, "step": 1})
    assert lists(sampler.epoch(2)) == every_epoch[2]  # another epoch begins at its beginning
    assert lists(sampler.epoch(1)) == every_epoch[1]


def test_a_state_belongs_to_its_order():
    sampler = Sampler(20, 6, num_replicas=2, rank=1)
    state = sampler.state_dict()
    for wrong in ({"seed": 1}, {"batch_size": 4}, {"samples": 21}, {"shuffle": False}, {"padding": True}):
        with pytest.raises(
            ValueError, match=f"Sampler.load_state_dict: argument state_dict\\['{next(iter(wrong))}'\\]"
        ):
            sampler.load_state_dict(state | wrong)
    padded = Sampler(20, 6, num_replicas=2, rank=0, padding=True)
    for wrong in ({"num_replicas": 3}, {"order": "blocked"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            padded.load_state_dict(padded.state_dict() | wrong)


def test_a_checkpoint_within_an_epoch_goes_on_on_another_mesh(tmp_path, scheduler):
    x = np.random.default_rng(0).integers(0, 9, 29).astype(float)

    def sums(path, epoch, count):
        """The sums of the minibatches that are left, at most `count`; then a checkpoint."""

        def body():
            sampler = Sampler(x, 4, "data", order="strided")
            if path.exists():
                spmd.load(path, like={"sampler": sampler})
            found = []
            for indices in sampler.epoch(epoch):
                found.append(float(spmd.sum(spmd.varying(x[indices], "data"), "data")))
                if len(found) == count:
                    break
            spmd.save(path, {"sampler": sampler})
            return found

        return spmd.map(body, (), None)()

    expected = [sum(x[i] for i in batch) for batch in sequential(29, 4, epoch=2)]
    found = []
    for p in (3, 1, 8, 2):
        with spmd.Mesh(data=p, other=1 + (p < 3), scheduler=scheduler):
            found += sums(tmp_path / "run", 2, 2)
    assert found == expected


# Errors


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (
            TypeError,
            {"batch_size": 8.0},
            "argument batch_size\n  got:    float 8.0\n  needed: an integer of at least 1",
        ),
        (ValueError, {"batch_size": 0}, "argument batch_size"),
        (LayoutError, {"batch_size": 6, "padding": True}, "a multiple of the number of workers(.|\n)*batch_size=8"),
        (ValueError, {"seed": -1}, "argument seed"),
        (ValueError, {"order": "stride"}, 'argument order(.|\n)*order="strided"'),
        (ValueError, {"rank": 4}, "argument rank\n  got:    4 of 4 workers"),
        (MeshError, {"rank": None}, "num_replicas=4, rank=None"),
        (MeshError, {"axis_name": "x"}, "needed: the axis, or the two numbers"),
        (MeshError, {"axis_name": "x", "num_replicas": None, "rank": None}, "argument mesh\n  got:    no mesh"),
        (
            LayoutError,
            {"data": {"x": np.zeros(3), "y": np.zeros((4, 1))}},
            r"3 samples in data\['x'\], and 4 in data\['y'\]",
        ),
        (LayoutError, {"data": (3, 4)}, "argument data\n  got:    tuple"),
        (LayoutError, {"data": np.float64(3)}, "argument data"),
        (LayoutError, {"data": 3.5}, "argument data"),
        (ValueError, {"data": -1}, "argument data"),
    ],
)
def test_errors_say_what_came_and_what_to_write(error, options, words):
    with pytest.raises(error, match=words) as caught:
        Sampler(**({"data": 20, "batch_size": 8, "num_replicas": 4, "rank": 1} | options))
    assert str(caught.value).startswith("spmd.data.Sampler")


def test_errors_of_bodies():
    with spmd.Mesh(data=2):
        outside = Sampler(8, 4, "data")
        with pytest.raises(MeshError, match=r"a body on Mesh\(data=2\)(.|\n)*mend:   axis_name='data'"):
            spmd.map(lambda: Sampler(8, 4), (), None)()
        with pytest.raises(MeshError, match="write 'data'"):
            spmd.map(lambda: Sampler(8, 4, "dat"), (), None)()
        with pytest.raises(MeshError, match=r"made outside of the body(.|\n)*inside the function that is mapped"):
            spmd.map(lambda: list(outside.epoch(0)), (), None)()
    with pytest.raises(ValueError, match=r"Sampler.epoch: argument number"):
        outside.epoch(-1)
    assert repr(outside) == "Sampler of 8 samples, 4 at a time split over 2 workers"
    with pytest.raises(IndexError):
        outside.epoch(0)[2]


@settings(max_examples=20)
@given(st.integers(1, 40), sizes, workers)
def test_an_epoch_has_each_sample_once_and_an_order_of_its_own(n, size, p):
    shares = [np.concatenate(list(s.epoch(6))) for s in every(n, p, size)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(n))
    if n > 30:
        assert any(
            a.tolist() != np.concatenate(list(s.epoch(7))).tolist()
            for a, s in zip(shares, every(n, p, size), strict=True)
        )
