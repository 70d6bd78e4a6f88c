"""Rows of a table by number: the kernels against their references, and the functions over them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from emulator import device
from kernel_cases import FLOATING, Family

import spmd
from spmd import P
from spmd.errors import LayoutError, SpecError, StateError
from spmd.functions import add_rows, embedding, one_hot, take_rows
from spmd.kernels import cpu, jit, reference

family = Family("embeddings")
DTYPES = (*FLOATING, "complex64", "complex128")


def rest(draw):
    return draw.choose((), (1,), (3,), (4,), (2, 5), (32,), (0,), (150,))


def numbers(draw, rows):
    shape = draw.choose((), (0,), (7,), (2, 3), (40,))
    return draw.integers(shape, -1, rows, draw.choose(np.int64, np.int32, np.int8))


def take(draw):
    rows = draw.integer(0, 5)
    return draw.array((rows, *rest(draw))), numbers(draw, rows)


def add(draw):
    rows = draw.integer(0, 5)
    ids = numbers(draw, rows)
    return ids, draw.array((*ids.shape, *rest(draw))), rows


family.case("take_rows", take, dtypes=DTYPES, ulps=0)
family.case("add_rows", add, dtypes=DTYPES, scale=20)

TestKernels = family.tests()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex64, np.int64])
def test_many_entries_of_few_rows(dtype):
    rng = np.random.default_rng(0)
    ids, g = rng.integers(-1, 9, 20_000), (10 * rng.normal(size=(20_000, 6))).astype(dtype)
    exact = np.stack([g[ids == k].astype(complex if dtype == np.complex64 else float).sum(0) for k in range(9)])
    for off in (jit.off(), contextlib.nullcontext()):
        with off:
            actual = cpu.add_rows(ids, g, 9)
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, exact, rtol=1e-3 if dtype == np.float16 else 1e-4)


def test_on_the_device_an_id_out_of_range_shows():
    if not device.available():
        pytest.skip("needs g++ and no GPU")
    with device.emulated() as gpu:
        put = device.put
        actual = device.get(gpu.take_rows(put(np.ones((2, 3), np.float32)), put(np.array([0, -1, 2, -2]))))
    np.testing.assert_array_equal(actual[:2], [[1] * 3, [0] * 3])
    assert np.isnan(actual[2:]).all()


# Functions


def test_gradients():
    rng = np.random.default_rng(1)
    table, ids = rng.normal(size=(4, 3)), np.array([[1, 1], [3, 0]])
    spmd.check_grads(lambda t: take_rows(t, ids) ** 2, (table,), order=2)
    spmd.check_grads(lambda g: add_rows(ids, g, 5) ** 2, (rng.normal(size=(2, 2, 3)),), order=2)
    spmd.check_grads(lambda t: embedding(t, ids) ** 2, (table,), order=2)
    h = rng.normal(size=(4, 3)) + 1j * rng.normal(size=(4, 3))
    spmd.check_grads(lambda t: take_rows(t, ids), (h,))


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_the_pair_is_adjoint(shape):
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 6, shape)
    x, y = rng.integers(-9, 9, (6, 4)), rng.integers(-9, 9, (*shape, 4))
    assert np.vdot(take_rows(x, ids), y) == np.vdot(x, add_rows(ids, y, 6))


@pytest.mark.torch
def test_as_in_torch():
    import torch

    rng = np.random.default_rng(3)
    table, ids, h = rng.normal(size=(9, 5)), rng.integers(0, 9, (4, 6)), rng.normal(size=(4, 6, 5))
    theirs = torch.tensor(table, requires_grad=True)
    rows_of_torch = torch.nn.functional.embedding(torch.tensor(ids), theirs, padding_idx=2)
    rows_of_torch.backward(torch.tensor(h))
    ours, back = spmd.vjp(lambda t: embedding(t, ids, padding_idx=2), table)
    np.testing.assert_array_equal(ours, rows_of_torch.detach().numpy())
    np.testing.assert_allclose(back(h)[0], theirs.grad.numpy(), rtol=1e-12)
    np.testing.assert_array_equal(one_hot(ids, 9, np.int64), torch.nn.functional.one_hot(torch.tensor(ids), 9).numpy())


MESHES = [{"x": 1}, {"x": 3}, {"x": 2, "y": 2}, {"x": 5}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("padding", [None, 4])
def test_a_table_in_parts(axes, padding, scheduler):
    rng = np.random.default_rng(4)
    names = tuple(axes)
    with spmd.Mesh(transport="local", scheduler=scheduler, **axes) as mesh:
        for rows in (7, 2):
            table, ids = rng.normal(size=(rows, 3)), rng.integers(0, rows, (2, 5))
            h = rng.normal(size=(2, 5, 3))
            cuts = [0] * mesh.size
            cuts[-1], cuts[0] = 1, rows - 1
            if mesh.size == 1:
                cuts = [rows]
            for spec in (P(names), spmd.Layout((rows, 3), P(names), mesh.axes, [cuts, None])):
                body = lambda t, ids: embedding(t, ids, names, padding)
                split = spmd.map(body, (spec, P()), P())
                laid = spmd.put(table, spec)
                wanted, back = spmd.vjp(lambda t, ids=ids: embedding(t, ids, padding_idx=padding), table)
                np.testing.assert_array_equal(split(laid, ids).numpy(), wanted)
                with spmd.ledger() as log:
                    value, pull = spmd.vjp(lambda t, split=split, ids=ids: split(t, ids), laid)
                    (grad,) = pull(h)
                assert log.operators["Sum"] == 1  # forward; nothing moves backward
                assert not set(log.operators) & {"AllGather", "Permute"}
                np.testing.assert_array_equal(value.numpy(), wanted)
                np.testing.assert_allclose(grad.numpy(), back(h)[0], rtol=1e-14)
                assert grad.layout == laid.layout


def test_second_order_of_a_table_in_parts():
    rng = np.random.default_rng(5)
    table, ids = rng.normal(size=(5, 2)), np.array([0, 4, 4, 2])
    with spmd.Mesh(x=3, transport="local"):
        total = spmd.map(lambda t, ids: np.sum(embedding(t, ids, "x") ** 3), (P("x"), P()), P())
        spmd.check_grads(lambda t: total(t, ids), (table,), order=2)


def test_blocks_of_ids_and_of_vocabulary():
    # Data along one axis, rows of the table along another.
    rng = np.random.default_rng(6)
    table, ids = rng.normal(size=(6, 3)), rng.integers(0, 6, (5, 2))
    with spmd.Mesh(data=2, model=3, transport="local"):
        look = spmd.map(lambda t, ids: embedding(t, ids, "model"), (P("model"), P("data")), P("data"))
        np.testing.assert_array_equal(look(table, ids).numpy(), table[ids])
        grad = spmd.grad(lambda t: np.sum(look(t, ids) ** 2))(table)
        np.testing.assert_allclose(grad, add_rows(ids, 2 * table[ids], 6))
        hot = spmd.map(lambda ids: one_hot(ids, 6), P("data"), P("data"))(ids)
        np.testing.assert_array_equal(hot.numpy(), np.eye(6)[ids])


def test_wrong_arguments():
    table = np.ones((3, 2))
    for call, error, words in [
        (lambda: take_rows(table, [3]), SpecError, "from 0 to 2"),
        (lambda: take_rows(table, np.array([-1])), SpecError, "argument ids"),
        (lambda: take_rows(table, np.array([0.5])), SpecError, "argument ids"),
        (lambda: take_rows(np.ones((0, 2)), np.array([0])), SpecError, "no rows"),
        (lambda: take_rows(np.float64(2), np.array([0])), LayoutError, "argument table"),
        (lambda: add_rows(np.array([0, 1]), np.ones((3, 2)), 2), LayoutError, "argument g"),
        (lambda: add_rows(np.array([0, 1]), np.ones((2, 2)), -1), SpecError, "argument rows"),
        (lambda: embedding(table, np.array([3])), SpecError, "embedding: argument ids"),
        (lambda: embedding(table, np.array([0]), padding_idx=0.5), SpecError, "argument padding_idx"),
        (lambda: one_hot(np.array([3]), 3), SpecError, "argument ids"),
    ]:
        with pytest.raises(error, match=words):
            call()
    # The numbers of rows on a device are not looked at: that would wait for it.
    with spmd.Mesh(x=2, transport="local", device="cpu"):
        for specs, words in (((P(), P()), "argument table"), ((P("x"), P("x")), "argument ids")):
            with pytest.raises(StateError, match=words):
                spmd.map(lambda t, ids: embedding(t, ids, "x"), specs, P())(np.ones((4, 2)), np.array([0, 1]))
        with pytest.raises(SpecError, match="from 0 to 3"):
            spmd.map(lambda t, ids: embedding(t, ids, "x"), (P("x"), P()), P())(np.ones((4, 2)), np.array([0, 4]))


def test_rows_of_booleans_and_of_short_integers():
    ids, g = np.array([0, 2, 0]), np.array([[True, False], [False, True], [True, False]])
    for dtype in (bool, np.int8, np.uint16):
        for off in (False, True):
            with jit.off() if off else contextlib.nullcontext():
                actual = add_rows(ids, g.astype(dtype), 3)
            assert actual.dtype == dtype
            np.testing.assert_array_equal(actual, reference.add_rows(ids, g.astype(dtype), 3))


def test_what_is_no_dtype_is_an_error():
    with pytest.raises(SpecError, match="argument dtype"):
        one_hot([0], 2, "no dtype")
