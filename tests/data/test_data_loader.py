"""`spmd.data.Loader`: what it reads, ahead of the program and in order; how it fails, ends and resumes."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd import P
from spmd.data import Loader, Sampler
from spmd.errors import LayoutError, MeshError

X = np.random.default_rng(0).integers(-99, 99, (23, 3)).astype(float)
LABELS = np.arange(23)


def readers() -> list[threading.Thread]:
    gc.collect()
    return [t for t in threading.enumerate() if t.name == "spmd.data.Loader"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not readers()


def equal(one, other) -> None:
    spmd.tree.map(np.testing.assert_array_equal, one, other)


# What it reads


@given(st.integers(0, 23), st.integers(1, 9), st.integers(0, 4), st.booleans())
@settings(max_examples=30)
def test_batches_are_those_of_the_indices(n, size, prefetch, shuffle):
    data = {"x": X[:n], "more": [LABELS[:n]]}
    sampler = Sampler(data, size, shuffle=shuffle)
    expected = [{"x": X[:n][i], "more": [LABELS[:n][i]]} for i in sampler.epoch(2)]
    for source in (data, lambda i: {"x": X[i], "more": [LABELS[i]]}):
        loader = Loader(source, sampler, prefetch)
        batches = list(loader.epoch(2))
        assert len(batches) == len(loader) == len(loader.epoch(2)) == len(expected)
        spmd.tree.map(np.testing.assert_array_equal, batches, expected)
        assert all(not a.flags.writeable for a in spmd.tree.leaves(batches))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("order", ["blocked", "strided"])
@pytest.mark.parametrize("names", ["data", ("model", "data"), ()])
def test_batches_in_bodies_vary_over_the_axes_of_the_sampler(scheduler, names, order, prefetch):
    def body():
        sampler = Sampler(X, 9, names, order=order)
        loader = Loader((X, {"labels": LABELS}), sampler, prefetch)
        for epoch in range(2):
            batches = list(loader.epoch(epoch))
            for (x, rest), indices in zip(batches, sampler.epoch(epoch), strict=True):
                np.testing.assert_array_equal(spmd.block(x), X[indices])
                np.testing.assert_array_equal(spmd.block(rest["labels"]), LABELS[indices])
                if names:
                    assert (
                        x.state.varying
                        == rest["labels"].state.varying
                        == {*([names] if isinstance(names, str) else names)}
                    )

    with spmd.Mesh(data=3, model=2, scheduler=scheduler):
        spmd.map(body, (), None)()
        spmd.map(lambda: [type(b) for b in Loader(X, Sampler(X, 9, names), prefetch).epoch(0)], (), None, check=False)()


@pytest.mark.parametrize("order", ["blocked", "strided"])
@pytest.mark.parametrize("names", ["data", ("model", "data")])
def test_batches_outside_of_bodies_are_global_arrays(names, order):
    read = []

    def samples(indices):
        read.append(len(indices))
        return {"x": X[indices], "name": "digits"}

    with spmd.Mesh(data=4, model=2) as mesh:
        sampler = Sampler(X, 10, names, order=order)
        for batch, indices in zip(Loader(samples, sampler).epoch(1), sampler.epoch(1), strict=True):
            assert batch["x"].layout == mesh.layout((len(indices), 3), P(names))
            np.testing.assert_array_equal(batch["x"].numpy(), X[indices])
            assert batch["name"] == "digits"
        assert sum(read) == 23  # copies are read once
        total = spmd.map(lambda x: spmd.sum(x, names), P(names), P())
        assert sum(float(total(b["x"])) for b in Loader(samples, sampler).epoch(1)) == X.sum()


def test_files_are_read_by_slices_and_chunks(tmp_path):
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    np.save(tmp_path / "x.npy", X)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
    zarr.save(str(tmp_path / "x.zarr"), X)
    with h5py.File(tmp_path / "x.h5") as file:
        data = {
            "memmap": np.load(tmp_path / "x.npy", mmap_mode="r"),
            "h5py": file["x"],
            "zarr": zarr.open(str(tmp_path / "x.zarr"), mode="r"),
        }
        for options in ({}, {"shuffle": False}, {"padding": True}, {"order": "strided"}):
            for rank in range(2):
                sampler = Sampler(data, 8, num_replicas=2, rank=rank, **options)
                for batch, indices in zip(Loader(data, sampler).epoch(0), sampler.epoch(0), strict=True):
                    for name, x in batch.items():
                        np.testing.assert_array_equal(x, X[indices], err_msg=name)
                        assert type(x) is np.ndarray
        nobody = Sampler(23, 23, num_replicas=40, rank=39)
        (empty,) = Loader({name: data[name] for name in ("h5py", "zarr")}, nobody).epoch(0)
        assert {x.shape for x in empty.values()} == {(0, 3)}


def test_a_function_may_use_its_memory_again():
    buffer = np.zeros((4, 3))

    def read(indices):
        buffer[: len(indices)] = X[indices]
        return buffer[: len(indices)]

    sampler = Sampler(X, 4, shuffle=False)
    equal(list(Loader(read, sampler, prefetch=3).epoch(0)), [X[k : k + 4] for k in range(0, 23, 4)])


# Ahead of the program


def test_it_reads_so_many_ahead_and_no_more():
    read, going_on = [], threading.Semaphore(0)

    def samples(indices):
        read.append(len(indices))
        going_on.release()
        return X[indices]

    for prefetch in (1, 3):
        read.clear()
        batches = iter(Loader(samples, Sampler(X, 2), prefetch).epoch(0))
        for taken in range(1, 12 - prefetch + 1):
            for _ in range(prefetch if taken == 1 else 1):
                assert going_on.acquire(timeout=60)
            assert len(read) == taken - 1 + prefetch
            next(batches)
        batches.close()
        while going_on.acquire(timeout=0.01):
            pass
    read.clear()
    batches = iter(Loader(samples, Sampler(X, 2), prefetch=0).epoch(0))
    for taken in range(1, 4):
        next(batches)
        assert len(read) == taken
    assert not readers()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_position_is_that_of_the_program(prefetch):
    sampler = Sampler(X, 4, seed=1)
    expected = [X[i] for i in sampler.epoch(5)]
    for stop in range(7):
        loader = Loader(X, Sampler(X, 4, seed=1), prefetch)
        with closing(iter(loader.epoch(5))) as batches:
            taken = [next(batches) for _ in range(stop)]
            state = loader.state_dict() | {"epoch": 5}
        assert state["step"] == stop
        after = Loader(X, Sampler(X, 4, seed=1), prefetch)
        after.load_state_dict(state)
        equal(taken + [batch for epoch in after.epochs(6) for batch in epoch], expected)


def test_a_checkpoint_goes_on_on_another_mesh(tmp_path, scheduler):
    path, found = tmp_path / "run", []
    expected = [X[i].sum() for i in Sampler(X, 4).epoch(0)]
    for p in (3, 1, 8):
        with spmd.Mesh(data=p, scheduler=scheduler):
            loader = Loader(X, Sampler(X, 4, "data"))
            if path.exists():
                spmd.load(path, like={"loader": loader})
            with closing(iter(loader.epoch(0))) as batches:
                found += [float(spmd.sum(next(batches))) for _ in range(2)]
            spmd.save(path, {"loader": loader})
    assert found == expected


# Failing and ending


class Unreadable(Exception):
    pass


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("error", [Unreadable, StopIteration, SystemExit])
def test_an_error_of_reading_is_raised_at_its_step(prefetch, error):
    sampler = Sampler(X, 4, shuffle=False)

    def read(indices):
        if 8 in indices:
            raise error("no such file")
        return X[indices]

    batches, taken = iter(Loader(read, sampler, prefetch).epoch(3)), []
    with pytest.raises(RuntimeError if error is StopIteration else error, match="no such file") as caught:
        taken.extend(batches)
    assert taken == [] or len(taken) == 2
    assert caught.value.__notes__ == ["while reading step 2 of epoch 3 of spmd.data.Loader"]
    assert sampler.state_dict()["step"] == 2
    assert list(batches) == []
    del caught


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_one_worker_ends_the_threads_of_all(scheduler, prefetch):
    def body():
        worker = spmd.worker_index("data")

        def read(indices):
            if worker == 1 and 9 in indices:
                raise Unreadable("no such file")
            return X[indices]

        for batch in Loader(read, Sampler(X, 8, "data", shuffle=False, order="strided"), prefetch).epoch(0):
            spmd.sum(batch, "data")

    with spmd.Mesh(data=2, scheduler=scheduler):
        with pytest.raises(Unreadable, match="no such file") as caught:
            spmd.map(body, (), None)()
        assert "step 1 of epoch 0" in caught.value.__notes__[0]
    del caught


def test_a_thread_ends_when_a_loop_is_left():
    loader = Loader(X, Sampler(X, 2))
    for _ in loader.epoch(0):
        assert len(readers()) <= 1
        break
    assert not readers()

    def stopped(batches):
        for _ in batches:
            raise KeyboardInterrupt  # as by Ctrl-C

    with pytest.raises(KeyboardInterrupt) as caught:
        stopped(loader.epoch(0))
    del caught
    assert not readers()
    with pytest.raises(KeyboardInterrupt) as kept, closing(iter(loader.epoch(0))) as batches:
        stopped(batches)
    assert not readers()
    assert kept.value.__traceback__ is not None
    assert list(batches) == []
    batches = iter(loader.epoch(0))
    cycle = [batches]
    cycle.append(cycle)
    gone = weakref.ref(batches)
    del batches, cycle
    assert not readers()
    assert gone() is None


def test_a_thread_is_no_worker():
    def body():
        loader = Loader(lambda indices: spmd.psum(X[indices], "data"), Sampler(X, 8, "data"))
        list(loader.epoch(0))

    with (
        spmd.Mesh(data=2),
        pytest.raises(MeshError, match=r"spmd.psum\n  got:    a call outside of any body") as caught,
    ):
        spmd.map(body, (), None)()
    del caught


def test_settings_of_the_program_hold_in_the_thread():
    def read(indices):
        return X[indices] / 0.0

    with np.errstate(all="raise"), pytest.raises(FloatingPointError) as caught:
        list(Loader(read, Sampler(X, 8)).epoch(0))
    del caught


# Errors


def test_errors():
    sampler = Sampler(X, 4)
    for source, words in (
        ({"x": X, "n": 3}, r"argument arrays_or_function\['n'\]\n  got:    int 3"),
        ({}, "argument arrays_or_function"),
        (np.float64(3), "argument arrays_or_function"),
        (
            spmd.put(X, P("x"), spmd.Mesh(x=2)),
            "argument arrays_or_function\n  got:    PartitionedArray(.|\n)*index it in the program",
        ),
    ):
        with pytest.raises(LayoutError, match=f"spmd.data.Loader: {words}"):
            Loader(source, sampler)
    with pytest.raises(TypeError, match="argument sampler\n  got:    list"):
        Loader(X, [1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="argument prefetch"):
        Loader(X, sampler, -1)
    with pytest.raises(LayoutError, match="got:    23 samples, and arrays of 22"):
        iter(Loader(X[1:], sampler).epoch(0))
    with spmd.Mesh(data=2):
        split = Sampler(X, 4, "data")
    with (
        spmd.Mesh(data=3),
        pytest.raises(MeshError, match=r"'data' of a sampler for \(2,\) workers, on Mesh\(data=3\)"),
    ):
        iter(Loader(X, split).epoch(0))

    def ragged(indices):
        return X[indices] if len(indices) == 4 else np.zeros(len(indices))

    with spmd.Mesh(data=2), pytest.raises(LayoutError, match="one shape of samples") as caught:
        list(Loader(ragged, Sampler(23, 7, "data")).epoch(0))
    del caught
