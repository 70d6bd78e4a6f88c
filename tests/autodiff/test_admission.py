"""Every door admits the same arrays, with nothing lost, and refuses the same ones, with one error."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from doors import ADMITTED, COUNTS, DOORS, MOVES, NUMERIC, REFUSED, N, Quantity, here, mapped
from noted import noted

import spmd
from spmd import P
from spmd.autodiff.admission import admit
from spmd.errors import DifferentiationError, DtypeError, LayoutError, SpecError, StateError

ERRORS = (SpecError, LayoutError, StateError, DifferentiationError, DtypeError, ValueError)
X = np.array([1.0, 2, 3, 6, 4, 1, 5, 2])
MASKED = np.ma.array(X, mask=[0, 0, 0, 1, 0, 0, 1, 0])


@pytest.fixture
def mesh(scheduler):
    return spmd.Mesh(x=2, transport="local", scheduler=scheduler)


def whole(x):
    x = x.numpy() if hasattr(x, "numpy") else x
    return np.asarray(x[0] if isinstance(x, tuple) else x)


def test_a_mask_is_not_lost(mesh):
    mean = spmd.map(lambda b: spmd.mean(b, "x"), P("x"), P(), mesh=mesh)
    with pytest.raises(SpecError, match=r"argument b(.|\n)*MaskedArray float64\[8\](.|\n)*masked(.|\n)*x\.filled"):
        mean(MASKED)
    weights = ~np.ma.getmaskarray(MASKED)
    both = spmd.map(lambda b, w: spmd.sum(b * w, "x") / spmd.sum(w, "x"), (P("x"), P("x")), P(), mesh=mesh)
    assert float(both(np.asarray(MASKED), weights)) == np.mean(MASKED)  # as the mend says


def test_records_with_references_are_not_moved(mesh):
    records = np.zeros(N, [("a", "O"), ("b", "f8")])
    records["b"] = X
    move = spmd.map(lambda b: spmd.shift(b, "x", 1, wrap=True), P("x"), P("x"), mesh=mesh)
    with pytest.raises(SpecError, match=r"references to objects(.|\n)*np\.asarray\(x\['b'\]\)"):
        move(records)
    np.testing.assert_array_equal(whole(move(np.asarray(records["b"]))), np.roll(X, N // 2))


def test_strings_of_any_length_are_not_moved(mesh):
    move = spmd.map(lambda b: spmd.shift(b, "x", 1, wrap=True), P("x"), P("x"), mesh=mesh)
    text = X.astype(np.dtypes.StringDType())
    with pytest.raises(SpecError, match=r"text(.|\n)*np\.unique"):
        move(text)
    names, codes = np.unique(text, return_inverse=True)
    assert (names[whole(move(codes))] == np.roll(text, N // 2)).all()


@pytest.mark.host("arrays of the host")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_lose_something_is_refused_at_every_door(kind):
    make, mend = REFUSED[kind]
    mesh = spmd.Mesh(x=2, transport="local", scheduler="lockstep")
    for door, enter in DOORS.items():
        with noted(door):
            with pytest.raises(ERRORS) as raised:
                enter(make(), mesh)
            text = str(raised.value)
            assert "got:" in text, text
            assert "needed:" in text, text
            assert "mend:" in text, text
            if door in MOVES or door in COUNTS:
                assert mend in text, text


@pytest.mark.host("arrays of the host")
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", REFUSED)
def test_both_schedulers_refuse_in_bodies(kind, check, mesh):
    with pytest.raises(ERRORS, match="mend:"):
        here(lambda x: spmd.all_gather(x, "x"), REFUSED[kind][0](), mesh, check)
    assert float(mapped(lambda b: spmd.sum(b, "x"), X, mesh, check, P())) == X.sum()


def entries(x):
    """All that an array holds, for a comparison."""
    data = np.asarray(x)
    return data.tolist() if data.dtype.names or data.dtype.kind == "V" else np.asarray(data)


@pytest.mark.host("a GPU has other dtypes")
@pytest.mark.parametrize("kind", ADMITTED)
def test_what_is_admitted_loses_nothing(kind):
    if kind in ("bfloat16", "float8_e4m3fn", "int4"):
        pytest.importorskip("ml_dtypes")
    for door in MOVES:
        if kind != "a mask without a masked entry" or door != "block":  # of which it is the bare array
            with noted(door):
                check_that_nothing_is_lost(ADMITTED[kind](), door)


def check_that_nothing_is_lost(x, door):
    mesh = spmd.Mesh(x=2, transport="local", scheduler="lockstep")
    plain = np.asarray(x)
    got, expected = whole(MOVES[door](x, mesh)), whole(MOVES[door](np.array(np.asarray(x).copy()), mesh))
    assert type(got) is np.ndarray or door == "freeze"
    assert got.dtype == expected.dtype
    assert got.dtype.itemsize == plain.dtype.itemsize
    assert entries(got) == entries(expected) if plain.dtype.kind == "V" else (got == expected).all()
    assert sorted(map(str, set(got.reshape(-1).tolist()))) == sorted(map(str, set(plain.tolist())))  # no entry is lost


@pytest.mark.host("a GPU has other dtypes")
@pytest.mark.parametrize("kind", NUMERIC)
def test_what_is_admitted_counts_the_same_at_every_door(kind, mesh):
    if kind in ("bfloat16", "float8_e4m3fn", "int4"):
        pytest.importorskip("ml_dtypes")
    x = ADMITTED[kind]()
    plain = np.asarray(x).astype(complex)
    for name, door in COUNTS.items():
        got = whole(door(x, mesh)).astype(complex)
        if name.startswith("mean"):
            assert np.allclose(got, np.mean(plain), rtol=0.1), name
        elif "norm" in name:
            workers = 2 if "False" in name else 1  # without states every worker's counts
            assert np.allclose(got, np.sqrt(workers) * np.linalg.norm(plain), rtol=0.1), name
        elif name == "an operator outside":
            assert np.allclose(got, plain), name


def test_records_of_other_fields_are_another_dtype(mesh):
    """Between workers as well: the bytes are as many."""
    swapped = np.dtype([("b", "f4"), ("a", "i4")])

    def body(b):
        mine = spmd.block(b)
        return spmd.shift(mine if spmd.worker_index("x") else mine.view(swapped), "x", 1, wrap=True)

    with pytest.raises((spmd.errors.MismatchError, LayoutError)):
        mapped(body, np.zeros(N, [("a", "i4"), ("b", "f4")]), mesh)
    with pytest.raises(LayoutError, match="one dtype on all workers"):
        spmd.from_blocks([np.zeros(2, swapped), np.zeros(2, [("a", "i4"), ("b", "f4")])], P("x"), mesh)


@pytest.mark.parametrize("check", [True, False])
def test_arrays_that_a_body_makes_are_no_other(check, mesh):
    """Objects that come up in a body, from an array of numbers."""
    for make in (lambda b: b.astype(object), lambda b: b.astype("M8[s]"), lambda b: b.astype(str)):
        for use in (
            lambda x: spmd.shift(x, "x", 1),
            lambda x: spmd.all_gather(x, "x"),
            lambda x: spmd.sum(x, "x"),
            lambda x: np.reshape(x, -1),
        ):
            with pytest.raises(StateError, match="mend:"):
                mapped(lambda b, make=make, use=use: use(make(b)), X, mesh, check)


def test_a_memory_map_is_admitted(mesh, tmp_path):
    x = np.memmap(tmp_path / "x", float, "w+", shape=N)
    x[:] = X
    for name, door in itertools.chain(MOVES.items(), COUNTS.items()):
        np.testing.assert_array_equal(whole(door(x, mesh)), whole(door(X, mesh)), name)
    assert spmd.grad(lambda z: np.sum(z * z))(x).tolist() == (2 * X).tolist()


def test_lists_are_admitted_where_they_are_no_trees(mesh):
    assert whole(spmd.from_blocks([[1.0, 2], [3.0]], P("x"), mesh)).tolist() == [1, 2, 3]
    with pytest.raises(LayoutError, match=r"filled\(value\)"):
        spmd.from_blocks([[MASKED, MASKED], [X, X]], P("x"), mesh)
    with pytest.raises(LayoutError, match=r"np\.asarray raises ValueError"):
        spmd.from_blocks([[[1.0], [1.0, 2.0]], [[1.0]]], P("x"), mesh)
    assert (spmd.put(X, P("x"), mesh) * list(X)).numpy().tolist() == (X * X).tolist()


def test_programs_admit_each_time(mesh):
    f = spmd.jit(spmd.map(lambda b: spmd.mean(b, "x"), P("x"), P(), mesh=mesh))
    for _ in range(3):
        assert float(f(np.ma.array(X))) == X.mean()
    with pytest.raises(SpecError, match="masked"):
        f(MASKED)
    assert float(f(X)) == X.mean()


@pytest.mark.host("tensors of the host")
def test_tensors_are_admitted_without_a_gradient(mesh):
    torch = pytest.importorskip("torch")
    for door in ("map", "map, check=False", "put", "from_blocks"):
        got = whole(MOVES[door](torch.tensor(X), mesh))
        np.testing.assert_array_equal(got, whole(MOVES[door](X, mesh)), door)
        with pytest.raises(ERRORS, match=r"gradient(.|\n)*x\.detach\(\)"):
            MOVES[door](torch.tensor(X, requires_grad=True), mesh)


def test_the_torch_bridge_admits_the_same_arrays():
    torch = pytest.importorskip("torch")
    from spmd.bridge import torch as spt

    mesh = spmd.Mesh(x=2, transport="local")
    f = spt.map(lambda b: spt.mean(b, "x"), P("x"), P(), mesh=mesh)
    assert float(f(torch.tensor(X))) == float(f(X)) == float(f(np.ma.array(X))) == X.mean()
    for kind, (make, mend) in REFUSED.items():
        with pytest.raises(ERRORS) as raised:
            f(make())
        assert mend in str(raised.value), kind


def test_sparse_matrices_are_refused(mesh):
    sparse = pytest.importorskip("scipy.sparse")
    for x in (sparse.eye_array(N).tocsr(), sparse.csr_matrix(np.eye(N))):
        for door in (*MOVES, *COUNTS):
            with pytest.raises(ERRORS, match=r"x\.toarray\(\)"):
                DOORS[door](x, mesh)


def test_operands_with_operators_of_their_own_are_asked(mesh):
    """As np.ndarray defers to who says that it takes no part in ufuncs."""

    class Scaled:
        __array_ufunc__ = None

        def __rmul__(self, other):
            return "asked"

    assert spmd.put(X, P("x"), mesh) * Scaled() == "asked"


def test_what_is_compared_with_none_is_not_none(mesh):
    assert not np.any((spmd.put(X, P("x"), mesh) == None).numpy())  # noqa: E711


def test_the_error_says_what_came():
    with pytest.raises(StateError) as raised:
        admit(X.view(Quantity), "spmd.put", "x")
    assert str(raised.value).splitlines() == [
        "spmd.put: argument x",
        "  got:    Quantity float64[8], a subclass of np.ndarray",
        "  needed: an array of numbers: what Quantity adds to the entries of an array, and what its operations mean, "
        "would be lost",
        "  mend:   np.asarray(x)",
    ]
