"""What must hold of meshes on a GPU. `test_device.py` runs it with the stand-in for CuPy; SPMD_TEST_DEVICE=cuda pytest
tests/device_cases.py on a real one."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import cupy as cp
import numpy as np
import pytest
from kernel_cases import dtype_of
from loaded import load

import spmd
from spmd import P, cuda
from spmd.errors import LayoutError, MeshError, MismatchError, StateError, TransportError
from spmd.kernels import cpu, gpu

EMULATED = os.environ.get("SPMD_TEST_DEVICE") == "emulated"
emulated = pytest.mark.skipif(not EMULATED, reason="only the stand-in tells what waits, and finds races")
if EMULATED:
    from emulator import fake_cuda, fake_cupy

BOTH = ("x", "y")


@pytest.fixture
def devices():
    """Sets how many GPUs there are."""

    def many(n: int) -> None:
        fake_cuda.DEVICES = n

    yield many
    fake_cuda.DEVICES = 1


def everything(w, x):
    """Every kind of collective, and a scalar of them all."""
    halo = spmd.halo_exchange(x, P(*BOTH), 1, "periodic")
    moved = spmd.ppermute(np.sum(halo), BOTH, [(0, 1), (1, 3)])
    all_of_it = spmd.replicate(spmd.gather(x, "x"), "x")
    doubled = spmd.at_root(lambda b: b * 2, spmd.gather(x, "x"), axis_name="x")
    top = spmd.max(x, BOTH) + spmd.mean(x, BOTH) + spmd.pmin(spmd.sum(x, "x"), "y")
    scattered = spmd.psum_scatter(spmd.all_gather(x, "x", tiled=True), "x", tiled=True)
    total = spmd.psum(np.sum(np.tanh(halo) * w) + moved * moved + np.sum(scattered**2), BOTH)
    rest = spmd.all_to_all(halo, "x", 0, 1, tiled=True), spmd.broadcast(doubled, "x")
    return total + top + spmd.pmean(np.sum(all_of_it), BOTH), *rest


def results(f=everything, **options) -> list[np.ndarray]:
    x = np.random.default_rng(0).normal(size=(8, 6))
    specs = P(), P(*BOTH)
    with spmd.Mesh(x=2, y=2, **options):
        mapped = spmd.map(f, in_specs=specs, out_specs=(P(), P(*BOTH), P(*BOTH)))
        parts = spmd.put(x, P(*BOTH))
        found = [y.numpy() for y in mapped(2.0 * np.ones(()), x)]
        found.append(spmd.grad(lambda x: mapped(np.float64(2), x)[0])(parts).numpy())
        found.append(np.asarray(spmd.grad(lambda w: mapped(w, parts)[0])(np.float64(2))))
        again = spmd.put(spmd.put(x, P("x")), P("y"))
        return [*found, again.numpy(), np.asarray(spmd.inner(again, again)), (parts * 2 - 1).numpy()]


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        (np.testing.assert_array_equal if EMULATED else np.testing.assert_allclose)(a, b)


def test_results_are_those_of_the_host(scheduler):
    same(results(device="cuda", scheduler=scheduler), results(device="cpu"))


@emulated
@pytest.mark.parametrize("count", [1, 3])
def test_the_caller_is_after_the_workers_on_every_device(scheduler, devices, count):
    devices(count)
    with spmd.Mesh(x=4, device="cuda", scheduler=scheduler):
        f = spmd.map(lambda x: x * 2, in_specs=P("x"), out_specs=P("x"))
        x, total = spmd.put(np.ones(4096), P("x")), 0
        for _ in range(4):
            x = f(x)
            total = total + x
        np.testing.assert_array_equal(total.numpy(), np.full(4096, 30.0))


@emulated
def test_several_devices_share_the_workers(scheduler, devices):
    want = results(device="cpu")
    devices(3)
    same(results(device="cuda", scheduler=scheduler), want)


def test_blocks_are_of_the_device():
    with spmd.Mesh(x=2, device="cuda"):
        seen = []
        f = spmd.map(lambda x: seen.append(spmd.block(x)) or x * 2, in_specs=P("x"), out_specs=P("x"))
        y = f(np.arange(4.0))
        assert {type(b) for b in (*seen, *y.blocks.values())} == {cp.ndarray}
        assert str(y) == str(np.arange(4.0) * 2)
        made = spmd.from_callback((4,), P("x"), lambda i: np.arange(4.0)[i])
        joined = spmd.from_blocks([np.ones(2), cp.ones(2)], P("x"))
        assert {type(b) for a in (made, joined) for b in a.blocks.values()} == {cp.ndarray}
        np.testing.assert_array_equal((made + joined).numpy(), np.arange(4.0) + 1)


def test_gradients_come_as_their_arguments():
    with spmd.Mesh(x=2, device="cuda"):
        f = spmd.map(lambda w, x: spmd.psum(np.sum(w * x), "x"), in_specs=(P(), P("x")), out_specs=P())
        for w in (np.ones(2), cp.ones(2)):
            g = spmd.grad(f)(w, np.arange(8.0).reshape(4, 2))
            assert type(g) is type(w)
            np.testing.assert_array_equal(cp.asnumpy(g), [12, 16])


@pytest.mark.parametrize("check", [True, False])
def test_bodies_without_state_see_arrays_of_the_device(check):
    def body(x):
        assert check or type(x) is cp.ndarray
        return spmd.psum(np.sum(x**2), "x")

    with spmd.Mesh(x=3, device="cuda"):
        assert float(spmd.map(body, in_specs=P("x"), out_specs=P(), check=check)(np.arange(5.0))) == 30


def test_constants_of_the_host_meet_arrays_of_the_device():
    table = np.arange(3.0)

    def body(x):
        y = x @ np.eye(3) + np.ones(3) * table
        y = np.concatenate([y, np.zeros((1, 3))]) - np.where(table > 0, table, 1.0)
        y = np.stack([y, np.broadcast_to(table, y.shape)])[:, np.array([0, 1])]
        return spmd.psum(np.sum(np.sort(y, stable=True) * np.max(y, axis=0, initial=-5.0)), "x")

    x = np.random.default_rng(1).normal(size=(6, 3))
    found = []
    for device in ("cpu", "cuda"):
        with spmd.Mesh(x=2, device=device):
            f = spmd.map(body, in_specs=P("x"), out_specs=P())
            found.append([np.asarray(v) for v in spmd.value_and_grad(f)(x)])
    same(*found) if EMULATED else None


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_constants_are_moved_beside_arrays_where_no_state_is_carried(check, device):
    def body(x):
        return x * np.asarray([1.0, 2.0], like=x) + np.zeros_like(x, shape=2)

    x = np.arange(6.0).reshape(3, 2)
    with spmd.Mesh(x=2, device=device):
        found = spmd.map(body, in_specs=P("x"), out_specs=P("x"), check=check)(x).numpy()
    np.testing.assert_array_equal(found, x * [1, 2])


TABLE, PLACES = np.arange(1.0, 4.0), np.array([[2, 0], [2, 1]])

LACKED = {
    "options of reductions": lambda x: (
        np.max(x, 0, initial=0.3) + np.sum(x, 0, where=TABLE > 1) + np.nanmin(x, initial=2)
    ),
    "variances": lambda x: np.var(x, 0, correction=0.5) * np.std(x, 0, where=np.ones((len(x), 1), bool)),
    "functions of vectors": lambda x: np.vecdot(x, TABLE) * np.linalg.vector_norm(x, axis=-1, ord=3),
    "a norm over three": lambda x: np.linalg.vector_norm(x[:, :, None] * TABLE, axis=(0, 1, 2)),
    "a rank": lambda x: np.linalg.matrix_rank(x, rtol=1e-9) * x,
    "the upper factor": lambda x: np.linalg.cholesky(np.eye(3) + x.T @ x, upper=True),
    "methods of ufuncs": lambda x: np.maximum.accumulate(x) + np.fmax.reduce(x) + np.logical_xor.reduce(x),
    "one after the other": lambda x: x * np.hypot.reduce(x) + np.floor_divide.accumulate(x),
    "parts": lambda x: np.maximum.reduceat(x, [0, 2, 1], 1),
    "entries by lists": lambda x: x[[0, 0, -1]] * x[:, PLACES][0, 0, 1],
    "changed copies": lambda x: spmd.at(x)[:, [0, 0, 2]].set(2 * TABLE) * spmd.at(x)[[0, 0]].max(TABLE),
    "one change after another": lambda x: spmd.at(x)[:, [0, 2, 0]].multiply(TABLE),
    "entries of a table": lambda x: spmd.numpy.take(TABLE * x[0], np.argsort(x, 0) % 3) * x,
    "quantiles": lambda x: np.quantile(x, 0.3, 0, method="hazen") + np.median(x, 0),
    "spacings": lambda x: np.spacing(x) + np.count_nonzero(x, axis=0, keepdims=True) * x,
    "numbers between": lambda x: np.linspace(x[0], 2.0, 4) + np.interp(x[0], TABLE, TABLE**2),
    "joined": lambda x: spmd.numpy.r_[x[0], 1.0, TABLE] * np.unstack(x, axis=1)[0][0],
}


@pytest.mark.parametrize("name", LACKED)
@pytest.mark.parametrize("mapped", [True, False])
def test_what_cupy_lacks_is_done_otherwise(name, mapped):
    """Values and gradients are those of the host, in a body, and of bare arrays of CuPy."""

    def loss(x):
        return np.sum(np.sin(LACKED[name](x)))

    x = np.random.default_rng(2).uniform(0.4, 1.9, (8, 3))
    if mapped:
        with spmd.Mesh(x=2, device="cuda"):
            there = spmd.map(lambda x: spmd.psum(loss(x), "x"), in_specs=P("x"), out_specs=P())
            got = [np.asarray(v) for v in spmd.value_and_grad(there)(x)]
        values, gradients = zip(*(spmd.value_and_grad(loss)(block) for block in np.split(x, 2)), strict=True)
        want = [np.sum(values), np.concatenate(gradients)]
    else:
        got, want = spmd.value_and_grad(loss)(cp.asarray(x)), spmd.value_and_grad(loss)(x)
        assert type(got[1]) is cp.ndarray
        got = [cp.asnumpy(v) for v in got]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_hessians_with_constants_of_the_host():
    f = lambda x: np.sum(np.tanh(x * TABLE) ** 3 * TABLE)
    x = np.array([0.3, -0.7, 1.1])
    got = spmd.hessian(f)(cp.asarray(x))
    np.testing.assert_allclose(cp.asnumpy(got), spmd.hessian(f)(x), rtol=1e-12)


@emulated
def test_what_cupy_lacks_is_an_error_that_says_so():
    if not fake_cupy.real()[0]:
        pytest.skip("CuPy is not installed, from which the stand-in learns what it lacks")
    from spmd.scipy import special

    with spmd.Mesh(x=2, device="cuda"), pytest.raises(StateError, match=r"CuPy's function does not take.*(?s:.*)mend"):
        spmd.map(special.dawsn, in_specs=P("x"), out_specs=P("x"))(np.ones(4))


def digits():
    return load(Path(__file__).resolve().parent.parent / "examples" / "digits.py")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_waits_for_nothing(scheduler, optimizer):
    d, rng = digits(), np.random.default_rng(0)
    drawn, specs = d.draw_params([64, 32, 16, 32, 10], rng, "float32"), [d.COLUMN, d.ROW] * 2
    x, labels = rng.normal(size=(21, 64)).astype("f4"), rng.integers(0, 10, 21)
    losses = []
    for device in ("cpu", "cuda"):
        with spmd.Mesh(data=2, model=2, device=device, scheduler=scheduler):
            loss = spmd.map(d.local_loss, in_specs=(specs, P("data"), P("data")), out_specs=P())
            step, update = spmd.value_and_grad(loss), getattr(spmd.optim, optimizer)(0.1)
            params, total = spmd.put(drawn, specs), 0.0
            state = update.init(params)
            for _ in range(3):
                with fake_cupy.nothing_waits() if EMULATED else nullcontext():
                    value, grads = step(params, x, labels)
                    params, state = update.update(grads, state, params)
                    total = total + value.astype(float) * len(x)
            losses.append(float(total))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@emulated
def test_an_event_that_is_left_out_is_found(monkeypatch, scheduler):
    want = results(device="cpu")
    monkeypatch.setattr(fake_cuda.Stream, "wait_event", lambda self, event: None)
    with pytest.raises(fake_cuda.Race):
        same(results(device="cuda", scheduler=scheduler), want)


def _reuse(x):
    for _ in range(4):
        got = spmd.ppermute(x * 2, "x", [(0, 1), (1, 0)])
        parts = [got + k for k in range(4)]
        x = parts[0] * parts[1]
    return x


@emulated
@pytest.mark.parametrize("kept", [True, False])
def test_memory_is_not_used_again_before_its_reader_is_done(monkeypatch, kept):
    if not kept:
        monkeypatch.setattr(cuda.Loan, "__del__", lambda self: None)
    with spmd.Mesh(x=2, device="cuda", scheduler="lockstep"):
        f = spmd.map(_reuse, in_specs=P("x"), out_specs=P("x"))
        with nullcontext() if kept else pytest.raises(fake_cuda.Race, match="freed"):
            f(np.ones(4096))


def test_the_callers_stream_is_its_own_again(scheduler):
    stream = cp.cuda.Stream(non_blocking=True)
    with stream, spmd.Mesh(x=2, device="cuda", scheduler=scheduler):
        y = spmd.map(lambda x: spmd.psum(x, "x"), in_specs=P("x"), out_specs=P())(np.ones(4))
        assert cp.cuda.get_current_stream() == stream
        assert float(np.sum(y)) == 4
    assert cp.cuda.get_current_stream() == cp.cuda.Stream.null


@emulated
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_made_outside_of_bodies_lies_where_the_blocks_lie(devices, count):
    devices(count)
    found = []
    for device in ("cpu", "cuda"):
        with spmd.Mesh(x=4, device=device) as mesh:
            drawn = [spmd.random.normal(spmd.random.key(1), (9, 3), spec=spec) for spec in (P("x"), P())]
            update = spmd.optim.adam(0.1)
            stepped, _ = update.update(drawn[1], update.init(drawn[1]), drawn[1])
            zeros = spmd.linear_operator(lambda x: 2 * x, P("x"), P("x"), shape=(9, 3)).domain.zeros()
            asked, room = [], np.zeros(27)

            def block(index, asked=asked, room=room):  # which gives one and the same memory at every call
                asked.append(index)
                part = np.arange(27.0).reshape(9, 3)[index]
                room[: part.size] = part.reshape(-1)
                return room[: part.size].reshape(part.shape)

            called = [spmd.from_callback((9, 3), spec, block) for spec in (P("x"), P(), P(None, "x"))]
            assert len(asked) == 9  # once for each block, wherever its copies lie
            x = np.arange(54.0).reshape(3, 18).T if mesh.places is None else cp.arange(54.0).reshape(3, 18).T
            laid = [spmd.put(x, spec) for spec in (P("x"), P())]  # from one device to all
            x += 1
            made = [*drawn, stepped, zeros, drawn[1] * 2, *called, *laid]
            if mesh.places is not None:
                where = {(w, b.device.id) for a in made for w, b in a.blocks.items()}
                assert where == {(w, w % count) for w in range(4)}
            found.append([a.numpy() for a in made])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14)


@emulated
def test_a_table_is_there_for_every_stream_that_reads_it(scheduler):
    x = np.arange(24.0).reshape(12, 2)
    with spmd.Mesh(x=4, device="cuda", scheduler=scheduler):
        f = spmd.map(
            lambda x: spmd.stencil(x, P("x"), [(1, 0), (0, 0)], (1.5, 0.25)), in_specs=P("x"), out_specs=P("x")
        )
        np.testing.assert_array_equal(f(x).numpy(), 1.5 * np.pad(x, ((0, 1), (0, 0)))[1:] + 0.25 * x)


def test_copies_on_a_device_are_compared_where_that_is_asked_for():
    with spmd.Mesh(x=2, device="cuda"), spmd.debug(replicas=True):
        f = spmd.map(lambda x: np.sum(spmd.psum(x, "x") * 2), in_specs=P("x"), out_specs=P())
        assert float(f(np.ones(4))) == 8


def test_errors():
    with spmd.Mesh(x=2, device="cpu"), pytest.raises(MeshError, match=r"x.get\(\)"):
        spmd.put(cp.ones(4), P("x"))
    with spmd.Mesh(x=2, device="cpu"), pytest.raises(MeshError, match="argument x"):
        spmd.map(lambda x: x, in_specs=P("x"), out_specs=P("x"))(cp.ones(4))
    with pytest.raises(LayoutError, match="freeze"):
        spmd.freeze(cp.ones(4))
    with spmd.Mesh(x=2, device="cuda") as mesh:
        x = spmd.put(np.ones(4), P("x"))
    with spmd.Mesh(x=2, device="cpu") as other:
        assert mesh != other
        with pytest.raises(MeshError, match="local, cuda"):
            spmd.map(lambda x: x, in_specs=P("x"), out_specs=P("x"))(x)
    with pytest.raises(MismatchError, match="pmax"), spmd.Mesh(x=2, device="cuda"):
        spmd.map(
            lambda x: spmd.psum(x, "x") if spmd.worker_index("x") else spmd.pmax(x, "x"),
            in_specs=P("x"),
            out_specs=P(),
        )(np.ones(4))
    with spmd.Mesh(x=3, device="cuda"), pytest.raises(LayoutError, match="without entries"):
        spmd.map(lambda x: spmd.max(x, "x"), in_specs=P("x"), out_specs=P())(np.ones(0))


BAD = np.array([2, -1, 7, 0, -3])  # of 7 rows or classes
SHOWS = np.array([0, 1, 1, 0, 1], bool)
LOSSES = {
    "alone": {},
    "smoothed": {"label_smoothing": 0.25},
    "ignoring": {"ignore_index": -3},
    "weighted": {"weight": True},
    "weighted and smoothed": {"weight": True, "label_smoothing": 0.25, "ignore_index": -3},
}


@pytest.mark.parametrize("axis", [None, "y"])
@pytest.mark.parametrize("name", LOSSES)
def test_labels_that_nobody_looks_at_show_as_nan(name, axis):
    x, options = np.random.default_rng(0).normal(size=(5, 7)), dict(LOSSES[name])
    weighted = options.pop("weight", False)

    def losses(x, labels, w):
        return spmd.softmax_cross_entropy(x, labels, axis, weight=w if weighted else None, **options)

    with spmd.Mesh(x=2, y=2, device="cuda"):
        found = spmd.map(losses, (P("x", axis), P("x"), P(axis)), P("x"))(x, BAD, np.arange(1.0, 8.0)).numpy()
    shows = SHOWS & (options.get("ignore_index") != BAD)
    np.testing.assert_array_equal(np.isnan(found), shows)
    good = spmd.softmax_cross_entropy(
        x[~SHOWS], BAD[~SHOWS], weight=np.arange(1.0, 8.0) if weighted else None, **options
    )
    np.testing.assert_allclose(found[~SHOWS], good, rtol=1e-12)


@pytest.mark.parametrize("axis", [None, "y"])
def test_ids_that_nobody_looks_at_show(axis):
    table = np.random.default_rng(0).normal(size=(7, 3))
    rows = np.where(SHOWS[:, None], np.nan, table[np.where(SHOWS, 0, BAD)])
    F = spmd.functions
    with spmd.Mesh(x=2, y=2, device="cuda"):
        look = spmd.map(lambda t, ids: F.embedding(t, ids, axis), (P(axis), P("x")), P("x"))
        np.testing.assert_array_equal(look(table, BAD).numpy(), rows)
        skip = spmd.map(lambda t, ids: F.embedding(t, ids, axis, padding_idx=0), (P(axis), P("x")), P("x"))
        np.testing.assert_array_equal(skip(table, BAD).numpy()[3], table[0])
        hot = spmd.map(lambda ids: F.one_hot(ids, 7), P("x"), P("x"))(BAD).numpy()
        np.testing.assert_array_equal(hot, np.eye(7)[np.where(SHOWS, 0, BAD)] * ~SHOWS[:, None])
        take = spmd.map(F.take_rows, (P(), P("x")), P("x"))
        np.testing.assert_array_equal(take(table, BAD).numpy(), rows)
        add = spmd.map(lambda ids, g: spmd.psum(F.add_rows(ids, g, 7), "x"), (P("x"), P("x")), P())
        wanted = np.zeros((7, 3))
        wanted[BAD[~SHOWS]] = 1
        np.testing.assert_array_equal(add(BAD, np.ones((5, 3))).numpy(), wanted)
        # What they name gets no gradient.
        total = spmd.map(lambda t, ids: spmd.psum(np.sum(F.take_rows(t, ids)), "x"), (P(), P("x")), P())
        np.testing.assert_array_equal(np.asarray(spmd.grad(total)(table, BAD)), wanted)


def test_dlpack():
    with spmd.Mesh(x=2, device="cuda"):
        x = spmd.put(cp.arange(4.0), P())
        back = cp.from_dlpack(x)
        np.testing.assert_array_equal(back.get(), np.arange(4.0))
        with pytest.raises(LayoutError, match="gathered"):
            spmd.put(x, P("x")).__dlpack__()
        assert type(spmd.put(x, P("x")).gathered()) is cp.ndarray

        class Tensor:
            def __dlpack__(self, **options):
                return back.__dlpack__(**options)

            def __dlpack_device__(self):
                return back.__dlpack_device__()

        np.testing.assert_array_equal(spmd.put(Tensor(), P("x")).numpy(), np.arange(4.0))


# NCCL


def of_dtypes(**options) -> list[np.ndarray]:
    found = []
    for dtype in ("f4", "c8", "c16", "i2", "u1", "i8", "f2", "?"):
        x = (np.arange(28).reshape(7, 4) % 5).astype(dtype)
        is_real = x.dtype.kind != "c"

        def body(x, is_real=is_real):
            row = np.sum(x, 0)
            moved = spmd.all_gather(x, "x", tiled=True), spmd.psum_scatter(np.stack([row] * 4), "x")
            back = spmd.broadcast(spmd.sum_reduce(row, "x", root=2), "x", root=2)
            first = np.where(x[0] == 1, np.nan, x[0]) if x.dtype.kind == "f" else x[0]
            top = [spmd.pmax(first.astype(x.dtype), "x")] if is_real else []
            return spmd.psum(row, "x"), *moved, back, *top

        specs = P(), P("x"), P("x"), P("x"), *([P()] * is_real)
        made = spmd.map(body, in_specs=P("x"), out_specs=specs, mesh=spmd.Mesh(x=4, **options))(x)
        found += [y.numpy() for y in made]
    return found


@emulated
@pytest.mark.parametrize("fixed", ["0", "1"])
def test_nccl(monkeypatch, devices, fixed):
    devices(4)
    monkeypatch.setenv("SPMD_NCCL_FIXED_ORDER", fixed)
    same(results(transport="nccl"), results(device="cpu"))
    same(of_dtypes(transport="nccl"), of_dtypes(device="cpu"))


@emulated
def test_nccl_refuses_two_workers_on_one_gpu(devices):
    devices(2)
    mesh = spmd.Mesh(x=3, transport="nccl")
    with pytest.raises(TransportError, match="workers 0 and 2 on one GPU"):
        spmd.map(lambda x: x, in_specs=P("x"), out_specs=P("x"), mesh=mesh)(np.ones(3))
    devices(4)
    with pytest.raises(MismatchError, match="pmax"), spmd.Mesh(x=2, transport="nccl"):
        spmd.map(
            lambda x: spmd.psum(x, "x") if spmd.worker_index("x") else spmd.pmax(x, "x"),
            in_specs=P("x"),
            out_specs=P(),
        )(np.ones(4))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "int32"])
def test_sums_of_blocks_have_the_bits_of_the_host(dtype):
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 5, 8, 9, 20):
        blocks = [(9 * rng.normal(size=(5, 13))).astype(dtype_of(dtype)) for _ in range(count)]
        theirs = [cp.asarray(b) for b in blocks]
        found = gpu.combine(theirs)
        assert cp.asnumpy(found).tobytes() == cpu.combine(blocks).tobytes()
        if count > 1:
            found = gpu.combine(theirs, "sum", theirs[-1])
            assert cp.asnumpy(found).tobytes() == cpu.combine(blocks).tobytes()


def test_checkpoints_compare_and_wait_for_nothing(scheduler):
    """What is computed again otherwise gives NaN, never a wrong gradient; what is the same, the gradient."""

    def chain(x, late):
        for i in range(3):
            f = lambda x: np.tanh(x * (i + 1.0))  # noqa: B023
            x = spmd.checkpoint(f if late else lambda x, i=i: np.tanh(x * (i + 1.0)))(x)
        return np.sum(x)

    x = np.random.default_rng(0).normal(size=(7, 100))
    right = spmd.grad(lambda x: chain(x, False))(x)
    with spmd.Mesh(x=2, device="cuda", scheduler=scheduler):
        for late, expected in ((False, right), (True, np.full_like(x, np.nan))):
            gradient = spmd.map(spmd.grad(lambda x, late=late: chain(x, late)), P("x"), P("x"))
            blocks = spmd.put(x, P("x"))
            gradient(blocks)
            with fake_cupy.nothing_waits() if EMULATED else nullcontext():
                found = gradient(blocks)
            np.testing.assert_allclose(cp.asnumpy(found.numpy()), expected, rtol=1e-12)


@pytest.mark.parametrize("checkpoint", [None, 2])
def test_loops(scheduler, checkpoint):
    def step(u, f):
        wide = spmd.halo_exchange(u, P("x"), 1, "zero")
        u = np.tanh(u + 0.2 * (wide[2:] - 2 * u + wide[:-2]) + f)
        return u, spmd.psum(np.sum(u * u), "x")

    def loss(u, f):
        u, energies = spmd.scan(step, u, f, checkpoint=checkpoint)
        return spmd.sum(u**2, "x") + np.sum(energies)

    def found(**options):
        u, f = np.linspace(-1, 1, 5), np.cos(np.arange(20.0)).reshape(4, 5)
        with spmd.Mesh(x=3, **options):
            mapped = spmd.map(loss, in_specs=(P("x"), P(None, "x")), out_specs=P())
            arrays = spmd.put(u, P("x")), spmd.put(f, P("x"))  # split along the steps
            value, gradients = spmd.value_and_grad(mapped, (0, 1))(*arrays)
            return [y.numpy() for y in (value, *gradients)]

    same(found(device="cuda", scheduler=scheduler), found(device="cpu"))
