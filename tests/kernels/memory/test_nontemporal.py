"""Copies and sums that are written past the caches: the same bytes, nothing beside them, and only where it pays."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.kernels import cpu, jit
from spmd.kernels.cpu import moves
from spmd.kernels.memory import nontemporal
from spmd.kernels.pairwise import pairs
from spmd.kernels.parallel import split_work

pytestmark = pytest.mark.skipif(not jit.available(), reason="needs numba")


@pytest.fixture
def always(monkeypatch):
    """Whatever is written goes past the caches."""
    monkeypatch.setattr(nontemporal, "pays", lambda nbytes, copies=1: True)
    monkeypatch.setattr(nontemporal, "_ROW_MIN", 0)
    monkeypatch.setattr(split_work, "part_bytes", lambda: 1 << 10)
    monkeypatch.setattr(split_work, "SPLIT_MIN", 1 << 10)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_sums_have_numpys_bits_wherever_the_arrays_lie(dtype, blocks, monkeypatch):
    monkeypatch.setattr(nontemporal, "pays", lambda nbytes, copies=1: True)
    monkeypatch.setattr(moves, "_PIECE", 1 << 10)
    used = []
    add = nontemporal.add
    monkeypatch.setattr(nontemporal, "add", lambda *arrays: add(*arrays) and not used.append(len(arrays[0])))
    rng = np.random.default_rng(blocks)
    for n in (1, 5, 15, 16, 17, 1000, 70_001):
        for at in (0, 1, 3, 8):
            terms = [
                (rng.standard_normal(n + at) * 10.0 ** rng.integers(-3, 4, n + at)).astype(dtype) for _ in range(blocks)
            ]
            for term in terms:
                term[at::7] = -0.0
            around = np.full(n + at + 2, 7, dtype)
            used.clear()
            cpu.combine([t[at:] for t in terms], into=around[at : n + at])
            assert sum(used) == n
            want = list(terms)
            for i, j in pairs(blocks):
                want[i] = want[i] + want[j]
            assert around[at : n + at].tobytes() == want[0][at:].tobytes()
            assert (around[:at] == 7).all()
            assert (around[n + at :] == 7).all()


@pytest.mark.parametrize("shape", [(2,), (63,), (1000,), (20, 700), (7, 8, 600), (3, 1, 513), (2, 3, 4, 1024)])
@pytest.mark.parametrize("at", [0, 1, 5, 64])
def test_copies_write_their_bytes_and_no_others(shape, at, always):
    rng = np.random.default_rng(at)
    x = rng.integers(0, 255, shape).astype(np.uint8)
    to = np.full((*shape[:-1], shape[-1] + at + 9), 7, np.uint8)
    assert nontemporal.copy(to[..., at:-9], x)
    assert np.array_equal(to[..., at:-9], x)
    assert (to[..., :at] == 7).all()
    assert (to[..., -9:] == 7).all()
    back = np.zeros(shape, np.uint8)
    assert nontemporal.copy(back, to[..., at:-9])
    assert np.array_equal(back, x)


def test_what_is_not_for_them_is_left_alone():
    x = np.ones((4, 1024))
    to = np.full((4, 1024), 7.0)
    assert not nontemporal.copy(to, x.astype(np.float32))  # which would have to be converted
    assert not nontemporal.copy(to, np.ones((1024, 4)).T)  # whose rows are not rows
    assert not nontemporal.copy(to[:, ::2], x[:, ::2])
    assert not nontemporal.copy(to[:, :8], x[:, :8])  # short rows
    assert not nontemporal.copy(np.full((2, 3, 2, 512), 7.0)[:, ::2, :, 1:500], np.ones((2, 2, 2, 499)))
    assert not nontemporal.copy(np.zeros(1), np.ones(1))
    assert not nontemporal.copy(np.zeros((0, 1024)), np.ones((0, 1024)))
    assert not nontemporal.copy(np.array([None] * 100), np.array([None] * 100))
    assert not nontemporal.copy(to, x[:1])
    assert not nontemporal.copy(to, x[0])
    assert not nontemporal.add(to.astype(int), x.astype(int), x.astype(int))
    assert not nontemporal.add(to, x, x.T.reshape(4, 1024, order="F"))
    assert not nontemporal.add(to.astype(">f8"), x.astype(">f8"), x.astype(">f8"))
    assert not nontemporal.add(to, x, x[:2])
    crooked = np.zeros(8 * 100 + 1, np.uint8)[1:].view(float)
    assert not nontemporal.add(crooked, np.ones(100), np.ones(100))
    to.flags.writeable = False
    assert not nontemporal.copy(to, x)
    assert not nontemporal.add(to, x, x)
    assert (to == 7).all()


def test_rows_may_follow_each_other_in_any_direction_and_be_one():
    x = np.random.default_rng(0).standard_normal((8, 1024))
    for to, source in ((np.empty((8, 1024))[::-1], x[::-2].repeat(2, 0)[::-1]), (np.empty((8, 1024)), x[::-1])):
        assert nontemporal.copy(to, source)
        assert np.array_equal(to, source)
    to = np.empty((8, 1024))
    assert nontemporal.copy(to, np.broadcast_to(x[3], to.shape))
    assert (to == x[3]).all()


def test_it_pays_from_the_size_of_the_caches_on_alone_or_together(monkeypatch):
    assert 16 << 20 <= nontemporal.threshold() <= 64 << 20
    assert not nontemporal.pays(nontemporal.threshold() - 1)
    assert nontemporal.pays(nontemporal.threshold())
    with nontemporal.together(nontemporal.threshold()):
        assert nontemporal.pays(1 << 16)
        assert not nontemporal.pays(1)
    assert not nontemporal.pays(1 << 16)
    assert nontemporal.pays(1 << 30, 1 << 14)
    assert not nontemporal.pays(1 << 30, 1 << 15)  # many small copies
    with jit.off():
        assert not nontemporal.pays(1 << 30)
    monkeypatch.setattr(nontemporal, "_has_numba", lambda: False)
    assert not nontemporal.pays(1 << 30)


def test_an_array_that_is_written_over_is_summed_by_numpy(always, monkeypatch):
    monkeypatch.setattr(nontemporal, "add", None)
    a, b = np.arange(5000.0), np.ones(5000)
    assert cpu.combine([a, b], into=a) is a
    assert np.array_equal(a, np.arange(5000.0) + 1)


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
@pytest.mark.parametrize("workers", [2, 3])
def test_collectives_give_the_same_past_the_caches(scheduler, workers, monkeypatch):
    """Blocks of uneven length, in every way that they are put together."""
    mesh = spmd.Mesh(x=workers, scheduler=scheduler)
    x = np.random.default_rng(workers).standard_normal((211, 199))

    def body(u):
        rows, columns = mesh.layout(x.shape, P("x")), mesh.layout(x.shape, P(None, "x"))
        everything = spmd.all_gather(u, "x", tiled=True)
        return (
            spmd.psum(np.sum(u) + everything, "x"),
            everything,
            spmd.repartition(u, rows, columns),
            spmd.halo_exchange(u, P("x"), 2, "periodic"),
            spmd.psum_scatter(everything, "x", tiled=True),
        )

    specs = (P(), P("x"), P(None, "x"), P("x"), P("x"))
    run = mesh.map(body, in_specs=P("x"), out_specs=specs)
    want = [a.numpy() for a in run(x)]
    used = set()
    for name in ("add", "copy"):
        whole = getattr(nontemporal, name)
        monkeypatch.setattr(nontemporal, name, lambda *args, n=name, f=whole: f(*args) and not used.add(n))
    monkeypatch.setattr(nontemporal, "pays", lambda nbytes, copies=1: True)
    monkeypatch.setattr(split_work, "part_bytes", lambda: 1 << 12)
    monkeypatch.setattr(split_work, "SPLIT_MIN", 1 << 12)
    for _ in range(3):
        for a, b in zip([a.numpy() for a in run(x)], want, strict=True):
            assert np.array_equal(a, b)
    assert used == {"add", "copy"}
