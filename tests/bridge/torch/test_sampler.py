"""The sampler against sequential DataLoaders and torch's own sampler: which samples, on whom, in which step."""

from __future__ import annotations

import json
import math
import pickle
import types
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import run_python

torch = pytest.importorskip("torch")
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler as Torchs  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge.torch.collate import Collate  # noqa: E402
from spmd.bridge.torch.sampler import Batches, DistributedSampler  # noqa: E402
from spmd.errors import MeshError  # noqa: E402
from spmd.layout import Layout  # noqa: E402

lengths, sizes, workers = st.integers(0, 50), st.integers(1, 20), st.integers(1, 8)
seeds, epochs = st.integers(0, 2**40), st.integers(0, 9)


class Numbers(Dataset):
    """Sample k is the number k: batches are lists of indices."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> int:
        assert 0 <= k < self.n
        return k


def every(n: int, p: int, epoch: int = 0, **options) -> list[DistributedSampler]:
    """The samplers of p workers."""
    made = [DistributedSampler(Numbers(n), p, rank, **options) for rank in range(p)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


def sequential(n: int, size: int, *, shuffle=True, seed=0, epoch=0, drop_last=False) -> list[list[int]]:
    """The minibatches of a run on one worker."""
    data = Numbers(n)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(seed + epoch)) if shuffle and n else None
    loader = DataLoader(data, batch_size=size, sampler=order, drop_last=drop_last)
    return [batch.tolist() for batch in loader]


def joined(shares) -> list[list[int]]:
    """Minibatches from the lists of all workers, which must make as many steps."""
    return [[i for share in step for i in share] for step in zip(*shares, strict=True)]


def has_empty_shares(n: int, size: int, p: int, drop_last: bool) -> bool:
    return (n >= size and size < p) or (not drop_last and 0 < n % size < p)


# The minibatches of the sequential run


@given(lengths, sizes, workers, st.booleans(), st.booleans(), seeds, epochs)
def test_shares_join_to_the_minibatches_of_the_sequential_run(n, size, p, shuffle, drop_last, seed, epoch):
    expected = sequential(n, size, shuffle=shuffle, seed=seed, epoch=epoch, drop_last=drop_last)
    samplers = every(n, p, epoch, batch_size=size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    shares = [list(s.batches) for s in samplers]
    assert joined(shares) == expected
    assert [len(s.batches) for s in samplers] == [len(expected)] * p
    for rank, (sampler, mine) in enumerate(zip(samplers, shares, strict=True)):
        assert [len(share) for share in mine] == [len(b) // p + (rank < len(b) % p) for b in expected]
        assert len(sampler) == sum(map(len, mine))
        assert sampler.local_batch_size == sampler.batches.batch_size == size // p + (rank < size % p)
        assert list(sampler.batches) == mine  # until set_epoch each pass is the same


@given(lengths, sizes, workers, st.booleans(), seeds)
def test_its_indices_one_by_one_are_put_together_by_torch(n, size, p, drop_last, seed):
    samplers = every(n, p, batch_size=size, seed=seed, drop_last=drop_last)
    if has_empty_shares(n, size, p, drop_last):
        for sampler in samplers:  # all of them, or some would wait for the others
            with pytest.raises(ValueError, match="BatchSampler makes no step of an empty share"):
                iter(sampler)
        return
    for sampler in samplers:
        expected, each = list(sampler.batches), sampler.local_batch_size
        assert list(sampler) == [i for share in expected for i in share]
        if each:  # else there is no minibatch, and no batch sampler of this size
            for last in {False, drop_last}:
                batches = BatchSampler(sampler, each, last)
                assert list(batches) == expected
                assert len(batches) == len(expected)
            loader = DataLoader(sampler.dataset, batch_size=each, sampler=sampler)
            assert [b.tolist() for b in loader] == expected
            assert len(loader) == len(expected)


@given(st.integers(0, 30), sizes, workers, st.booleans(), seeds)
@settings(max_examples=50)
def test_a_loader_gives_all_workers_their_steps(n, size, p, drop_last, seed):
    expected = sequential(n, size, seed=seed, drop_last=drop_last)
    loaders = [s.loader() for s in every(n, p, batch_size=size, seed=seed, drop_last=drop_last)]
    batches = [list(loader) for loader in loaders]
    assert joined([[b.tolist() for b in mine] for mine in batches]) == expected
    assert {b.dtype for mine in batches for b in mine} <= {torch.int64}
    assert {len(loader) for loader in loaders} == {len(expected)}


def test_an_epoch_has_its_own_order_and_a_worker_its_own_samples():
    samplers = every(40, 4, batch_size=12, seed=5)
    seen = []
    for epoch in range(3):
        for s in samplers:
            s.set_epoch(epoch)
        seen.append(joined([list(s.batches) for s in samplers]))
        assert seen[-1] == sequential(40, 12, seed=5, epoch=epoch)
    assert seen[0] != seen[1] != seen[2] != seen[0]
    # As seeds of torch do, seed 5 in epoch 1 shuffles as seed 6 in epoch 0.
    assert seen[1] == sequential(40, 12, seed=6)


def test_the_default_device_does_not_matter():
    sampler = DistributedSampler(Numbers(10), 2, 1, batch_size=4, seed=3)
    padded = DistributedSampler(Numbers(10), 2, 1, padding=True, shuffle=False)
    expected = list(sampler), list(padded)
    with torch.device("meta"):
        assert (list(sampler), list(padded)) == expected


def test_a_dataset_may_grow_between_epochs():
    data = list(range(5))
    sampler = DistributedSampler(data, 2, 1, shuffle=False, batch_size=4)  # type: ignore[arg-type]
    assert [*sampler.batches] == [[2, 3], []]
    data += [5, 6, 7]
    assert [*sampler.batches] == [[2, 3], [6, 7]]
    assert (len(sampler), len(sampler.batches)) == (4, 2)


@given(lengths, sizes, workers, st.booleans(), seeds)
@settings(max_examples=40)
def test_strided_shares_are_one_sample_of_each_worker_in_turn(n, size, p, drop_last, seed):
    expected = sequential(n, size, seed=seed, drop_last=drop_last)
    samplers = every(n, p, batch_size=size, seed=seed, drop_last=drop_last, order="strided")
    for rank, sampler in enumerate(samplers):
        assert list(sampler.batches) == [b[rank::p] for b in expected]
        assert len(sampler) == sum(len(b[rank::p]) for b in expected)
    assert samplers[0].state_dict()["order"] == "strided"
    other = DistributedSampler(Numbers(n), 2, 0, batch_size=size, seed=seed, order="blocked")
    other.load_state_dict(samplers[0].state_dict())  # minibatches are the same


# Padding, as torch has it


@given(lengths, workers, st.booleans(), st.booleans(), seeds, epochs)
def test_padding_yields_what_torchs_sampler_yields(n, p, shuffle, drop_last, seed, epoch):
    for rank, sampler in enumerate(every(n, p, epoch, shuffle=shuffle, seed=seed, drop_last=drop_last, padding=True)):
        torchs = Torchs(Numbers(n), p, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        torchs.set_epoch(epoch)
        assert list(sampler) == list(torchs)
        assert len(sampler) == len(torchs)


@given(lengths, st.integers(1, 6), workers, st.booleans(), seeds)
def test_padding_in_steps_is_a_batch_sampler_over_torchs(n, each, p, drop_last, seed):
    for rank, sampler in enumerate(every(n, p, seed=seed, drop_last=drop_last, padding=True, batch_size=each * p)):
        torchs = Torchs(Numbers(n), p, rank, seed=seed, drop_last=drop_last)
        expected = BatchSampler(torchs, each, False)
        assert sampler.local_batch_size == each
        assert list(sampler.batches) == list(expected)
        assert len(sampler.batches) == len(expected)
        assert list(BatchSampler(sampler, each, False)) == list(expected)


@given(st.integers(0, 50), st.integers(1, 6), workers, seeds)
def test_where_nothing_is_padded_the_minibatches_are_the_same_sets(steps, each, p, seed):
    n, size = steps * each * p, each * p
    padded = [list(s.batches) for s in every(n, p, seed=seed, padding=True, batch_size=size)]
    split = [list(s.batches) for s in every(n, p, seed=seed, batch_size=size)]
    assert [sorted(b) for b in joined(padded)] == [sorted(b) for b in joined(split)]


# Where the workers come from


def in_bodies(make, scheduler: str, **axes: int) -> dict[int, DistributedSampler]:
    """What `make` gives in a body on each worker of a mesh."""
    result = {}

    def body():
        result[spmd.worker_index(tuple(axes))] = make()

    spmd.map(body, (), None, mesh=spmd.Mesh(transport="local", scheduler=scheduler, **axes))()
    assert len(result) == math.prod(axes.values())
    return result


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
@pytest.mark.parametrize("names", ["x", "y", ("x", "y"), ("y", "x"), ("y",), ()])
def test_shares_are_the_blocks_of_minibatches_along_the_axes(names, scheduler):
    # 9 over 2 and then 3 is 2, 2, 1, 2, 1, 1; over 6 it would be 2, 2, 2, 1, 1, 1.
    axes = {"x": 2, "y": 3}
    data = Numbers(50)
    result = in_bodies(lambda: DistributedSampler(data, batch_size=9, seed=1, axis_name=names), scheduler, **axes)
    for worker, sampler in result.items():
        expected = sequential(50, 9, seed=1)
        assert len(expected[-1]) == 5
        blocks = [np.array(b)[Layout((len(b),), P(names), axes).slices(worker)].tolist() for b in expected]
        assert list(pickle.loads(pickle.dumps(sampler)).batches) == blocks
        assert sampler.num_replicas == math.prod(axes[a] for a in names)


@given(lengths, sizes, st.integers(1, 4), st.integers(1, 4), seeds)
@settings(max_examples=40)
def test_no_sample_is_lost_over_two_axes(n, size, x, y, seed):
    data = Numbers(n)
    make = lambda: DistributedSampler(data, batch_size=size, seed=seed, axis_name=("x", "y"))
    result = in_bodies(make, "lockstep", x=x, y=y)
    assert joined([list(result[w].batches) for w in range(x * y)]) == sequential(n, size, seed=seed)
    serial = has_empty_shares(n, size, x * y, False)  # over several axes sizes differ in place only
    for sampler in result.values():
        if serial:
            with pytest.raises(ValueError, match="empty share"):
                iter(sampler)
        else:
            assert list(sampler) == [i for share in sampler.batches for i in share]


# Nothing is sent: in torch 2.4 and 2.7 the end of a gloo group that has sent tensors may hang.
# Who ends takes the file away by which the others may still be meeting, so all wait.
PROCESS = """
import json, pathlib, sys, time
import torch.distributed as dist
from spmd.bridge.torch.sampler import DistributedSampler

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
print(json.dumps(list(DistributedSampler(range(23), batch_size=10, seed=4).batches)))
pathlib.Path(f"{store}.{rank}").touch()
while not all(pathlib.Path(f"{store}.{k}").exists() for k in range(size)):
    time.sleep(0.01)
dist.destroy_process_group()
"""


def test_processes_of_torch_distributed(tmp_path):
    program, store = tmp_path / "program.py", tmp_path / "store"
    program.write_text(PROCESS)
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda rank: run_python(program, str(rank), "3", store, timeout=120), range(3)))
    assert all(e.returncode == 0 for e in ended), "\n".join(map(str, ended))
    assert joined([json.loads(e.stdout) for e in ended]) == sequential(23, 10, seed=4)


# Resuming


@given(st.integers(0, 30), st.integers(1, 12), workers, workers, st.booleans(), st.data())
def test_other_workers_go_on_after_any_step(n, size, p, q, drop_last, data):
    options = {"batch_size": size, "seed": 2, "drop_last": drop_last}
    expected = sequential(n, size, seed=2, epoch=3, drop_last=drop_last)
    stop = data.draw(st.integers(0, len(expected)))
    before = every(n, p, 3, **options)
    taken = []
    for s in before:
        steps = iter(s.batches)
        taken.append([next(steps) for _ in range(stop)])
    (state,) = {json.dumps(s.state_dict() | {"num_replicas": p}) for s in before}
    assert joined(taken) == expected[:stop]
    after = every(n, q, **options)
    for s in after:
        s.batches.load_state_dict(json.loads(state))
        assert s.state_dict() == json.loads(state) | {"num_replicas": q}
        s.set_epoch(3)  # as the loop over epochs does: the place is kept
    assert joined([list(s.batches) for s in after]) == expected[stop:]
    assert joined([list(s.batches) for s in after]) == expected  # the pass after that is whole


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 4), st.booleans(), st.data())
def test_a_worker_goes_on_within_a_share(n, size, p, padding, data):
    size = size * p
    for rank in range(p):
        make = lambda: DistributedSampler(Numbers(n), p, rank, batch_size=size, padding=padding)  # noqa: B023
        if not padding and has_empty_shares(n, size, p, False):
            continue
        sampler = make()
        whole = list(sampler)
        stop = data.draw(st.integers(0, len(whole)))
        pull = iter(sampler)
        taken = [next(pull) for _ in range(stop)]
        state = pickle.loads(pickle.dumps(sampler)).state_dict()
        one, steps = make(), make()
        one.load_state_dict(state)
        steps.load_state_dict(state)
        assert taken + list(one) == whole
        rest = list(steps.batches)
        assert taken + [i for share in rest for i in share] == whole
        assert all(rest)
        assert (len(one), len(steps.batches)) == (len(whole), -(-len(whole) // (size // p)))


def test_a_state_belongs_to_its_epoch_and_order():
    sampler = DistributedSampler(Numbers(20), 2, 0, batch_size=6)
    sampler.set_epoch(1)
    steps = iter(sampler.batches)
    next(steps), next(steps)
    state = sampler.state_dict()
    assert (state["epoch"], state["step"], state["offset"]) == (1, 2, 0)
    sampler.set_epoch(2)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["step"]) == (2, 0)
    sampler.load_state_dict(state)
    sampler.set_epoch(2)
    assert len(list(sampler.batches)) == 4  # another epoch begins at its beginning
    for wrong in ({"seed": 1}, {"batch_size": 4}, {"samples": 21}, {"shuffle": False}, {"padding": True}):
        with pytest.raises(ValueError, match=f"state_dict\\['{next(iter(wrong))}'\\]"):
            sampler.load_state_dict(state | wrong)
    sampler.load_state_dict(state | {"num_replicas": 3})
    with pytest.raises(ValueError, match=r"got:    3\n  needed: 2, as this sampler has it"):
        sampler.load_state_dict(state | {"num_replicas": 3, "offset": 1})
    with pytest.raises(TypeError, match=r"state_dict\['step'\]"):
        sampler.load_state_dict({"epoch": 1})
    padded = DistributedSampler(Numbers(20), 2, 0, padding=True)
    with pytest.raises(ValueError, match="num_replicas"):
        padded.load_state_dict(padded.state_dict() | {"num_replicas": 3})


# DataLoaders


def test_processes_of_a_loader_live_on_between_epochs():
    samplers = every(21, 3, batch_size=6, seed=7)
    loaders = [s.loader(num_workers=2, persistent_workers=True) for s in samplers]
    for epoch in range(2):
        for s in samplers:
            s.set_epoch(epoch)
        batches = [[b.tolist() for b in loader] for loader in loaders]
        assert joined(batches) == sequential(21, 6, seed=7, epoch=epoch)
    uneven = DistributedSampler(Numbers(19), 3, 2, batch_size=6)
    loader = uneven.loader(num_workers=2)
    assert [b.tolist() for b in loader] == list(uneven.batches)
    assert list(uneven.batches)[-1] == []


def loaders_of(sampler, **options):
    yield sampler.loader(**options)
    if min(len(share) for share in sampler.batches):
        yield DataLoader(sampler.dataset, batch_size=sampler.local_batch_size, sampler=sampler, **options)
        yield DataLoader(sampler.dataset, batch_size=3, sampler=sampler, **options)
        yield DataLoader(sampler.dataset, batch_size=None, sampler=sampler, **options)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_step_counts_when_the_program_has_its_batch(processes):
    """However many the processes of a loader have read ahead."""
    options = {"num_workers": processes, "prefetch_factor": 4} if processes else {}
    make = lambda: DistributedSampler(Numbers(29), 2, 1, batch_size=8, seed=3)
    whole = [i for share in make().batches for i in share]
    for k in range(4):
        sampler = make()
        loader = list(loaders_of(sampler, **options))[k]
        sampler.load_state_dict({"epoch": 0, "step": 1})
        taken = whole[: sampler.local_batch_size]
        batches = iter(loader)
        for _ in range(2):
            batch = next(batches)
            taken += [int(batch)] if k == 3 else batch.tolist()
        after = make()
        after.load_state_dict(sampler.state_dict())
        assert taken + [i for share in after.batches for i in share] == whole
        for _ in batches:
            pass
        assert (sampler.state_dict()["step"], sampler.state_dict()["offset"]) == (4, 0)
        del batches


@pytest.mark.full
def test_processes_that_are_started_afresh_get_it_pickled():
    sampler = DistributedSampler(Numbers(5), 2, 1, batch_size=4)
    loader = sampler.loader(num_workers=1, multiprocessing_context="spawn")
    assert [b.tolist() for b in loader] == list(sampler.batches) == [next(iter(sampler.batches)), []]


def test_copies_are_independent():
    sampler = DistributedSampler(Numbers(20), 2, 1, batch_size=6, seed=1)
    copy = pickle.loads(pickle.dumps(sampler))
    copy.set_epoch(4)
    assert [*sampler.batches] != [*copy.batches]
    sampler.set_epoch(4)
    assert [*sampler.batches] == [*copy.batches] == [*pickle.loads(pickle.dumps(sampler.batches))]


def test_batches_are_taken_as_a_sampler_where_the_dataset_takes_lists():
    x = torch.arange(18.0).reshape(9, 2)
    data = TensorDataset(x, -x)
    sampler = DistributedSampler(data, 4, 3, batch_size=6, seed=3)
    for (a, b), indices in zip(
        DataLoader(data, batch_size=None, sampler=sampler.batches), sampler.batches, strict=True
    ):
        assert torch.equal(a, x[indices])
        assert torch.equal(b, -x[indices])
        assert a.shape == (len(indices), 2)
    assert (sampler.batches.set_epoch(6), sampler.epoch) == (None, 6)
    assert sampler.batches.sampler is sampler
    assert not sampler.batches.drop_last


@given(st.integers(1, 30), st.integers(1, 12), workers)
@settings(max_examples=30)
def test_gradients_add_up_to_those_of_the_sequential_run(n, size, p):
    rng = np.random.default_rng(n)
    data = TensorDataset(torch.tensor(rng.normal(size=(n, 3))), torch.tensor(rng.normal(size=n)))
    w = torch.tensor(rng.normal(size=3), requires_grad=True)

    def gradients(loader):
        return [torch.autograd.grad((((x @ w) - y) ** 2).sum(), w)[0] for x, y in loader]

    order = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    expected = gradients(DataLoader(data, batch_size=size, sampler=order))
    shares = [gradients(DistributedSampler(data, p, r, seed=1, batch_size=size).loader()) for r in range(p)]
    for step, g in zip(zip(*shares, strict=True), expected, strict=True):
        torch.testing.assert_close(sum(step), g, rtol=1e-12, atol=1e-12)


# Batches of no sample

Pair = namedtuple("Pair", "left right")


class Rich(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, k):
        image = np.full((2, 5), k, np.float32)
        return {
            "image": image,
            "pair": Pair(torch.tensor(k, dtype=torch.int16), 1.5),
            "name": f"{k}",
            "place": (k, "a"),
        }


def test_a_batch_of_no_sample_has_the_structure_of_others():
    collate = Collate(Rich())
    empty, one = collate([]), collate([Rich()[1]])
    assert torch.equal(one["image"], torch.ones(1, 2, 5))
    assert empty["image"].shape == (0, 2, 5)
    assert empty["image"].dtype == torch.float32
    assert isinstance(empty["pair"], Pair)
    assert empty["pair"].left.shape == (0,)
    assert empty["pair"].left.dtype == torch.int16
    assert empty["pair"].right.shape == (0,)
    assert empty["pair"].right.dtype == torch.float64
    assert empty["name"] == []
    assert type(empty["name"]) is type(one["name"])
    assert empty["place"][0].shape == (0,)
    assert len(empty["place"][1]) == 0
    assert [*empty] == [*one]
    joined = torch.cat([empty["image"], one["image"]])
    assert torch.equal(joined, one["image"])
    assert pickle.loads(pickle.dumps(collate))([])["image"].shape == (0, 2, 5)


def ragged(samples):
    """Sequences padded to the longest, time first; laid end to end, with where they begin; and what stays as it is."""
    ends = np.cumsum([0] + [len(s) for s in samples])
    padded = torch.nn.utils.rnn.pad_sequence(samples) if samples else 1 / 0
    return types.MappingProxyType(
        {
            "padded": padded,
            "flat": torch.cat(samples).numpy(),
            "offsets": torch.tensor(ends),
            "vocabulary": torch.arange(7),
            "kind": ["text", 3],
        }
    )


def test_the_dimension_that_counts_samples_is_found():
    data = [torch.arange(4.0), torch.arange(2.0)]
    empty = Collate(data, ragged)([])
    assert empty["padded"].shape == (4, 0)
    assert isinstance(empty["flat"], np.ndarray)
    assert empty["flat"].shape == (0,)
    assert empty["offsets"].tolist() == [0]  # one more than there are samples
    assert empty["vocabulary"].tolist() == [*range(7)]
    assert empty["kind"] == ["text", 3]
    assert Collate(data, ragged)(data)["padded"].shape == (4, 2)


def test_an_empty_batch_keeps_no_sample_alive():
    empty = Collate([torch.ones(1000)])([])
    assert empty.untyped_storage().nbytes() == 0


class Whole(TensorDataset):
    """Makes a batch of a list of indices by itself."""

    def __getitems__(self, indices):
        return tuple(t[indices] for t in self.tensors)


def test_what_the_dataset_made_of_an_empty_list_is_left_alone():
    data = Whole(torch.arange(5.0))
    sampler = DistributedSampler(data, 3, 2, batch_size=4, shuffle=False)
    (first,), (last,) = sampler.loader(collate_fn=lambda batch: batch)
    assert first.tolist() == [3.0]
    assert last.shape == (0,)


@pytest.mark.parametrize(
    ("collate_fn", "path"),
    [
        (lambda samples: {"a": [torch.zeros(1), len(samples)]}, r"result\['a'\]\[1\]"),
        (lambda samples: torch.tensor(len(samples)), "result of"),
        (lambda samples: torch.zeros(9 - len(samples)), "result of"),
        (lambda samples: torch.zeros(3 ** len(samples)), "result of"),
        (lambda samples: object(), "result of"),
        (lambda samples: {len(samples): 1}, "result of"),
        (lambda samples: [0] * 3 ** len(samples), "result of"),
    ],
)
def test_what_cannot_be_cut_is_refused(collate_fn, path):
    collate = Collate([1.0], collate_fn)
    collate([1.0])
    with pytest.raises(TypeError, match=path + "(.|\n)*mend:   a collate_fn of your own that takes an empty list too"):
        collate([])


# Errors


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (ValueError, {}, r"argument batch_size\n  got:    none(.|\n)*batch_size=16 \* 4(.|\n)*padding=True"),
        (TypeError, {"dataset": Stream()}, r"argument dataset\n  got:    Stream, an IterableDataset"),
        (TypeError, {"dataset": iter([])}, "argument dataset\n  got:    list_iterator, which has no length"),
        (
            TypeError,
            {"batch_size": 8.0},
            "got:    float 8.0\n  needed: an integer of at least 1",
        ),
        (TypeError, {"batch_size": True}, "argument batch_size"),
        (ValueError, {"batch_size": 0}, "argument batch_size"),
        (ValueError, {"batch_size": 6, "padding": True}, "a multiple of the number of workers(.|\n)*batch_size=8"),
        (TypeError, {"batch_size": 8, "seed": None}, "argument seed"),
        (ValueError, {"batch_size": 8, "rank": 4}, "argument rank\n  got:    4 of 4 workers"),
        (ValueError, {"batch_size": 8, "rank": -1}, "argument rank"),
        (ValueError, {"batch_size": 8, "order": "interleaved"}, 'argument order(.|\n)*order="blocked"'),
        (ValueError, {"batch_size": 8, "num_replicas": 0}, "argument num_replicas"),
        (TypeError, {"batch_size": 8, "num_replicas": "4"}, "argument num_replicas"),
        (MeshError, {"batch_size": 8, "rank": None}, "num_replicas=4, rank=None"),
        (MeshError, {"batch_size": 8, "num_replicas": None, "rank": None}, 'in a body axis_name="data"'),
        (MeshError, {"batch_size": 8, "axis_name": "x"}, "needed: the axis, or the two numbers"),
        (MeshError, {"batch_size": 8, "axis_name": "x", "num_replicas": None, "rank": None}, "outside of any body"),
    ],
)
def test_errors_say_what_came_and_what_to_write(error, options, words):
    given = {"dataset": Numbers(20), "num_replicas": 4, "rank": 1} | options
    with pytest.raises(error, match=words) as caught:
        DistributedSampler(**given)
    assert str(caught.value).startswith("spmd.bridge.torch.DistributedSampler")


def test_errors_of_bodies_and_of_use():
    with pytest.raises(MeshError, match=r"a body on Mesh\(data=2\)(.|\n)*mend:   axis_name='data'"):
        in_bodies(lambda: DistributedSampler(Numbers(3), batch_size=2), "lockstep", data=2)
    with pytest.raises(MeshError, match="write 'data'"):
        in_bodies(lambda: DistributedSampler(Numbers(3), batch_size=2, axis_name="dat"), "lockstep", data=2)
    padded = DistributedSampler(Numbers(3), 2, 0, padding=True)
    with pytest.raises(ValueError, match=r"batches: argument batch_size(.|\n)*batch_size=16 \* 2"):
        padded.batches  # noqa: B018
    with pytest.raises(ValueError, match=r"the last minibatch of 3 samples for 4 workers(.|\n)*sampler.loader\(\)"):
        iter(DistributedSampler(Numbers(11), 4, 0, batch_size=8))
    with pytest.raises(ValueError, match="a minibatch of 3 samples for 4 workers"):
        iter(DistributedSampler(Numbers(12), 4, 0, batch_size=3))
    with pytest.raises(TypeError, match="set_epoch: argument epoch"):
        padded.set_epoch(1.5)  # type: ignore[arg-type]


def test_names_and_kinds():
    sampler = DistributedSampler(Numbers(3), 2, 0, batch_size=2)
    assert isinstance(sampler, torch.utils.data.Sampler)
    assert isinstance(sampler.batches, torch.utils.data.Sampler)
    assert isinstance(sampler.batches, Batches)
    assert list(BatchSampler(SequentialSampler(Numbers(3)), 2, False)) == [[0, 1], [2]]
