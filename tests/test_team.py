"""Threads that help: the same bits, every part made, every error told."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.kernels import cpu, team


def test_alone_nothing_is_split():
    assert team.parts(1 << 30) == 1
    with team.of(4):
        assert team.parts(team.LEAST - 1) == 1
        assert team.parts(team.LEAST) == 2
        assert team.parts(1 << 30) == 4
        with team.of(1):
            assert team.parts(1 << 30) == 1
        assert team.parts(1 << 30) == 4
    assert team.parts(1 << 30) == 1


def test_all_tasks_run_and_the_first_error_is_raised():
    done, ended = set(), threading.Barrier(3, timeout=20)

    def task(k):
        ended.wait()  # all at the same time
        done.add(k)
        if k == 2:
            raise ValueError(k)

    with pytest.raises(ValueError, match="2"):
        team.run([lambda k=k: task(k) for k in range(3)])
    assert done == {0, 1, 2}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize("how", ["sum", "max"])
def test_split_sums_have_the_same_bits(how, dtype):
    rng = np.random.default_rng(3)
    blocks = [(8 * rng.standard_normal((1031, 1009))).astype(dtype) for _ in range(3)]
    whole = cpu.combine(blocks, how)
    for cores in 2, 3, 7:
        with team.of(cores):
            assert team.parts(whole.nbytes) > 1 or whole.nbytes < team.LEAST
            np.testing.assert_array_equal(cpu.combine(blocks, how), whole)
            strided = [np.asfortranarray(b) for b in blocks]
            np.testing.assert_array_equal(cpu.combine(strided, how), whole)


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_workers_who_wait_lend_their_cores(axis, tiled, monkeypatch):
    """Blocks of 3 MB, uneven where they may be, are summed and joined in parts, with NumPy's result."""
    split, ran = [], team.run
    monkeypatch.setattr(team, "run", lambda tasks: (split.append(len(tasks)), ran(tasks)))
    monkeypatch.setattr("spmd.transport.local.usable_cores", lambda: 3)
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
        assert split == [3, 2]  # a block each; of the sum, which is of 2.4 MB, two
        want = np.concatenate(blocks, axis) if tiled else np.stack(blocks, axis)
        np.testing.assert_array_equal(gathered.numpy(), want)
        first, second, third = (b.reshape(-1)[:300000] + 2.0 for b in blocks)
        np.testing.assert_array_equal(total.numpy(), first + second + third)


def test_a_part_of_the_workers_keeps_to_itself(monkeypatch):
    """In threads, where the others of another group may be at work."""
    monkeypatch.setattr(team, "run", None)
    mesh = spmd.Mesh(x=2, y=2, scheduler="threads")
    x = np.arange(4 << 19, dtype=np.float64).reshape(4, -1)
    mapped = mesh.map(lambda x: spmd.psum(x, "x"), in_specs=P(("x", "y")), out_specs=P("y"))
    np.testing.assert_array_equal(mapped(x).numpy(), x[:2] + x[2:])
