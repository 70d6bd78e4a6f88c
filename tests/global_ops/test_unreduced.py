"""Global arrays that are the sum of what lies along some axes: layouts, functions, maps, gradients."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spmd
from spmd import Layout, P
from spmd.device import to_host
from spmd.errors import LayoutError, SpecError, StateError

rng = np.random.default_rng(11)


@pytest.fixture
def mesh():
    with spmd.Mesh(a=2, b=3) as mesh:
        yield mesh


def summed(parts: dict[int, np.ndarray], layout: Layout) -> np.ndarray:
    """The whole array of parts, by its definition: each block counts once along axes of copies, and is added along
    unreduced ones."""
    whole = np.zeros(layout.shape)
    for w, part in parts.items():
        if layout.owners[w] == w:
            whole[layout.slices(w)] += to_host(part)
    return whole


def drawn_layout(draw, shape: tuple[int, ...], axes: dict[str, int]) -> Layout:
    """Any layout of this shape: axes split dimensions, in any order, or are unreduced, or hold copies; any cuts."""
    where = {n: draw(st.sampled_from([*range(len(shape)), "unreduced", None])) for n in axes}
    order = draw(st.permutations(list(axes)))
    dims = [tuple(n for n in order if where[n] == d) for d in range(len(shape))]
    cuts = []
    for d, names in enumerate(dims):
        count = math.prod(axes[n] for n in names)
        marks = sorted(draw(st.lists(st.integers(0, shape[d]), min_size=count - 1, max_size=count - 1)))
        ends = [0, *marks, shape[d]]
        uneven = names and draw(st.booleans())
        cuts.append([b - a for a, b in itertools.pairwise(ends)] if uneven else None)
    spec = P(*(names or None for names in dims), unreduced={n for n in axes if where[n] == "unreduced"})
    return Layout(shape, spec, axes, cuts)


def with_parts(layout: Layout, mesh: spmd.Mesh, seed: int) -> tuple[spmd.PartitionedArray, np.ndarray]:
    """An array of random integers in a layout, each part of a sum with its own, and the whole array."""
    numbers = np.random.default_rng(seed)
    blocks: dict[int, np.ndarray] = {}
    for w in range(mesh.size):
        own = layout.owners[w]
        blocks[w] = blocks[own] if own < w else numbers.integers(-9, 9, layout.block_shape(w)).astype(float)
    x = spmd.from_blocks(blocks, layout, mesh) if layout.size > 1 else spmd.from_blocks([blocks[0]], layout, mesh)
    return x, summed(blocks, layout)


MESHES = [spmd.Mesh(a=1), spmd.Mesh(a=3), spmd.Mesh(a=2, b=2), spmd.Mesh(a=2, b=3), spmd.Mesh(a=2, b=1, c=2)]


def _any_layout_becomes_any_other(data):
    mesh = data.draw(st.sampled_from(MESHES))
    axes = dict(mesh.axes)
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    source, target = (drawn_layout(data.draw, shape, axes) for _ in range(2))
    x, whole = with_parts(source, mesh, data.draw(st.integers(0, 99)))
    np.testing.assert_array_equal(x.numpy(), whole)
    with spmd.ledger() as log:
        y = spmd.reshard(x, target)
    assert y.layout == target
    np.testing.assert_array_equal(summed(y.blocks, target), whole)
    np.testing.assert_array_equal(y.numpy(), whole)
    # Where sums have to be taken, there is always this way: all of them on all workers, then what moves from there.
    names = [n for n in axes if n in source.unreduced - target.unreduced]
    if not names:
        return
    middle = source.with_unreduced(source.unreduced.difference(names))
    with spmd.ledger() as other:
        spmd.reshard(spmd.reshard(x, middle), target)
    assert sum(r.bytes for r in log.workers.values()) <= sum(r.bytes for r in other.workers.values())


SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(st.data())
@settings(max_examples=150, **SETTINGS)
def test_any_layout_becomes_any_other(data):
    _any_layout_becomes_any_other(data)


@pytest.mark.full
@given(st.data())
@settings(max_examples=5000, **SETTINGS)
def test_many_layouts_become_others(data):
    _any_layout_becomes_any_other(data)


def sent(log: spmd.Ledger) -> tuple[int, dict[str, int]]:
    """The bytes that all workers sent, and the operators of worker 0."""
    return sum(r.bytes for r in log.workers.values()), dict(log.first.operators)


def test_a_sum_is_scattered_where_its_axes_split_the_result(mesh):
    x = spmd.put(rng.normal(size=(12, 12)), P("a"))
    total = x.sum(0)
    assert total.spec == P(unreduced={"a"})
    with spmd.ledger() as log:
        part = spmd.reshard(total, P("a"))
    assert sent(log) == (6 * 6 * 8, {"ReduceScatter": 1})
    np.testing.assert_allclose(part.numpy(), x.numpy().sum(0))
    with spmd.ledger() as log:
        copies = spmd.reshard(total, P())
    assert sent(log) == (2 * 6 * 6 * 8, {"Sum": 1})
    np.testing.assert_allclose(copies.numpy(), x.numpy().sum(0))


def test_a_sum_is_taken_once_however_often_it_is_used(mesh):
    x = spmd.put(rng.normal(size=(6, 4)), P("a"))
    total = x.sum(0)
    with spmd.ledger() as log:
        np.exp(total)
        np.sort(total)
        total.max()
        np.testing.assert_allclose(total.numpy(), x.numpy().sum(0))
        assert float(total[2]) == pytest.approx(x.numpy().sum(0)[2])
    assert log.workers[0].operators["Sum"] == 1


A, B, C = rng.integers(-5, 5, (6, 4)).astype(float), rng.integers(1, 5, (6, 4)).astype(float), rng.normal(size=(4,))

KEEPS = {
    "s + t": lambda s, t, c: s + t,
    "s - t": lambda s, t, c: s - t,
    "-s": lambda s, t, c: -s,
    "2 * s": lambda s, t, c: 2 * s,
    "s / 4": lambda s, t, c: s / 4,
    "np.float64(2) * s": lambda s, t, c: np.float64(2) * s,
    "expand_dims": lambda s, t, c: np.expand_dims(s, 0),
    "s[None]": lambda s, t, c: np.expand_dims(s, 1),
    "reshape": lambda s, t, c: s.reshape(4, 1),
    "broadcast_to": lambda s, t, c: np.broadcast_to(s, (3, 4)),
    "T": lambda s, t, c: np.broadcast_to(s, (3, 4)).T,
    "stack": lambda s, t, c: np.stack([s, t]),
    "real": lambda s, t, c: np.real(s),
    "sum of rows": lambda s, t, c: np.broadcast_to(s, (3, 4)).sum(0),
    "np.int64(2) * s": lambda s, t, c: np.int64(2) * s,
    "astype same": lambda s, t, c: s.astype(float),
    "copy": lambda s, t, c: s.copy(),
}

REDUCES = {
    "sum": lambda s, t, c: s.sum(),
    "s * sum": lambda s, t, c: s * s.sum(),
    "s / c": lambda s, t, c: s / c,
    "s * c": lambda s, t, c: s * c,
    "s + 1": lambda s, t, c: s + 1,
    "s + c": lambda s, t, c: s + c,
    "s * t": lambda s, t, c: s * t,
    "s / t": lambda s, t, c: s / t,
    "2 / s": lambda s, t, c: 2 / (s + 100),
    "s ** 2": lambda s, t, c: s**2,
    "abs": lambda s, t, c: abs(s),
    "exp": lambda s, t, c: np.exp(s),
    "max": lambda s, t, c: s.max(),
    "maximum": lambda s, t, c: np.maximum(s, t),
    "s > 0": lambda s, t, c: s > 0,
    "astype": lambda s, t, c: s.astype(int),
    "complex": lambda s, t, c: s * 1j,
    "s / 0": lambda s, t, c: s / 0,
    "s * inf": lambda s, t, c: s * np.inf,
    "dtype": lambda s, t, c: np.negative(s, dtype=int, casting="unsafe"),
    "zeros_like": lambda s, t, c: np.zeros_like(s),
    "ones_like": lambda s, t, c: np.ones_like(s),
    "full_like": lambda s, t, c: np.full_like(s, 3),
    "where": lambda s, t, c: np.where(s > 0, s, t),
    "stack with c": lambda s, t, c: np.stack([s, c]),
    "s[1]": lambda s, t, c: s[1],
    "s[::2]": lambda s, t, c: s[::2],
    "sort": lambda s, t, c: np.sort(s),
    "mean": lambda s, t, c: s.mean(),
    "s @ t": lambda s, t, c: s @ t,
    "concatenate": lambda s, t, c: np.concatenate([s, t]),
    "at": lambda s, t, c: s.at[1].set(7.0),
    "cumsum": lambda s, t, c: np.cumsum(s),
    "sum of integers": lambda s, t, c: s.sum(dtype=np.int64),
    "norm": lambda s, t, c: np.linalg.norm(s),
    "isnan": lambda s, t, c: np.isnan(s).any(),
    "prod": lambda s, t, c: np.prod(s),
}


def _twin(f):
    """The same function of NumPy's arrays."""

    def of_numpy(s, t, c):
        if f is REDUCES["at"]:
            return np.where(np.arange(len(s)) == 1, 7.0, s)
        return f(s, t, c)

    return of_numpy


@pytest.mark.parametrize("name", [*KEEPS, *REDUCES])
@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(("b", "a"))], ids=str)
def test_functions_of_sums(name, spec, mesh):
    s, t = spmd.put(A, spec).sum(0), spmd.put(B, spec).sum(0)
    f = KEEPS.get(name) or REDUCES[name]
    with np.errstate(all="ignore"):
        found, expected = f(s, t, C), _twin(f)(A.sum(0), B.sum(0), C)
    np.testing.assert_allclose(np.asarray(found.numpy()), expected, rtol=1e-14)
    assert found.dtype == np.asarray(expected).dtype
    summed_over = set(spec.dims[0])
    if name in KEEPS:
        assert summed_over <= found.layout.unreduced
    elif name not in ("s @ t", "mean"):
        assert summed_over.isdisjoint(found.layout.unreduced)


def test_what_keeps_a_sum_sends_nothing(mesh):
    s, t = spmd.put(A, P("a", "b")).sum(0), spmd.put(B, P("a", "b")).sum(0)
    for name, f in KEEPS.items():
        with spmd.ledger() as log:
            f(s, t, C)
        assert sent(log)[0] == 0, name


def test_narrow_dtypes_are_added_as_numpy_adds_them(mesh):
    for dtype in (np.int8, np.int32, np.uint16, np.float16, np.float32, np.complex64):
        a = (np.arange(24) % 7).astype(dtype).reshape(6, 4)
        x = spmd.put(a, P("a", "b"))
        for total, expected in ((x.sum(0), a.sum(0)), (x.sum(), a.sum()), (x.sum(0).sum(), a.sum(0).sum())):
            assert total.dtype == expected.dtype
            np.testing.assert_array_equal(total.numpy(), expected)
        np.testing.assert_array_equal((x.T @ x).numpy(), a.T @ a)
    total = spmd.put(A.astype(np.float32), P("a")).sum(0)
    assert (total * np.float32(2)).layout.unreduced
    assert not (total * np.float64(2)).layout.unreduced  # wider, by NumPy's rules
    b = np.arange(24).reshape(6, 4) % 3 == 0
    x = spmd.put(b, P("a", "b"))
    assert (x.T @ x).dtype == np.bool_
    np.testing.assert_array_equal((x.T @ x).numpy(), b.T @ b)


def test_sums_of_short_numbers_are_rounded_once(mesh):
    a = np.array([60000, 60000, -60000, -60000, 1, 1], np.float16)
    assert float(spmd.put(a, P("b")).sum()) == 2
    assert np.array_equal(spmd.put(a[:, None], P("b")).sum(0).numpy(), [2])
    x = spmd.put(a[:, None], P("b"))
    assert np.array_equal((np.ones((1, 6), np.float16) @ x).numpy(), [[2]])
    assert (x.T @ np.ones((6, 1), np.float16)).dtype == np.float16


def test_a_split_dimension_of_length_1(mesh):
    total = spmd.put(np.array([[1.0], [2.0]]), P("a", "b")).sum(axis=0)
    assert total.spec == P("b", unreduced={"a"})
    np.testing.assert_array_equal(np.broadcast_to(total, (3,)).numpy(), [3, 3, 3])
    x = spmd.put(np.ones((2, 1)), P("a", "b"))
    gradient = spmd.grad(lambda x: (np.broadcast_to(x.sum(axis=0), (3,)) ** 2).sum())(x)
    np.testing.assert_array_equal(gradient.numpy(), [[12], [12]])
    ones = spmd.put(np.ones((2, 1)), P(None, "b"))
    np.testing.assert_array_equal(np.stack([ones, np.ones((2, 1))]).numpy(), np.ones((2, 2, 1)))


def test_a_number_is_added_at_once(mesh):
    x = spmd.put(A, P("a"))
    assert x.sum().spec == np.vdot(x, x).spec == x.sum(0).sum().spec == P()


def test_a_sum_that_is_known_may_be_given_away(mesh):
    total = spmd.put(A, P("a")).sum(0)
    optimizer = spmd.optim.sgd(0.5)
    state = optimizer.init(total.reduced)
    optimizer.update(spmd.put(np.ones(4), P()), state, total.reduced, donate=True)
    np.testing.assert_array_equal(total.numpy(), A.sum(0))
    np.testing.assert_array_equal((total + 1).numpy(), A.sum(0) + 1)


def test_hybrid_layouts_are_scattered_before_they_are_added():
    with spmd.Mesh(a=4, b=4):
        x = spmd.put(rng.normal(size=(16, 16, 16)), P(("a", "b")))
        total = x.sum(0)
        with spmd.ledger() as log:
            part = spmd.reshard(total, P("a"))
        assert sent(log)[1] == {"ReduceScatter": 1, "Sum": 1}
        np.testing.assert_allclose(part.numpy(), x.numpy().sum(0))


def test_parts_that_stay_are_not_sent(mesh):
    layout = Layout((6,), P(unreduced={"a", "b"}), mesh.axes)
    x, whole = with_parts(layout, mesh, 5)
    with spmd.ledger() as log:
        y = spmd.reshard(x, P("a", unreduced={"b"}))
    assert sent(log)[0] == 6 * 3 * 8  # half of each part goes to the other worker along a
    np.testing.assert_array_equal(y.numpy(), whole)


# Maps


def test_a_map_gives_and_takes_parts(mesh):
    x = spmd.put(A, P("a", "b"))
    sums = spmd.map(lambda x: x.sum(0), P("a", "b"), P("b", unreduced={"a"}))
    square = spmd.map(lambda s: spmd.psum(s, "a") ** 2, P("b", unreduced={"a"}), P("b"))
    y = sums(x)
    assert y.spec == P("b", unreduced={"a"})
    np.testing.assert_array_equal(y.numpy(), A.sum(0))
    np.testing.assert_array_equal(square(y).numpy(), A.sum(0) ** 2)
    np.testing.assert_array_equal(square(A.sum(0)).numpy(), A.sum(0) ** 2)  # the value once, zeros elsewhere
    assert float(spmd.map(lambda s: spmd.psum(s, "a"), P(unreduced={"a"}), P())(3.0)) == 3.0
    with spmd.ledger() as log:
        square(y)
    assert log.workers[0].operators == {"Sum": 1}


def test_gradients_through_parts(mesh):
    x = spmd.put(A, P("a", "b"))
    sums = spmd.map(lambda x: x.sum(0), P("a", "b"), P("b", unreduced={"a"}))
    square = spmd.map(lambda s: spmd.psum(s, "a") ** 2, P("b", unreduced={"a"}), P("b"))
    y, total = sums(x), A.sum(0)

    def check(found, expected, spec):
        assert found.spec == spec
        np.testing.assert_allclose(found.numpy(), np.broadcast_to(expected, found.shape))

    check(spmd.grad(lambda x: (sums(x) ** 2).sum())(x), 2 * total, P("a", "b"))
    check(spmd.grad(lambda y: square(y).sum())(y), 2 * total, P("b"))
    check(spmd.grad(lambda x: square(sums(x)).sum())(x), 2 * total, P("a", "b"))
    check(spmd.grad(lambda y: (spmd.grad(lambda y: square(y).sum())(y) ** 2).sum())(y), 8 * total, P("b"))
    twice = spmd.grad(lambda x: (spmd.grad(lambda x: square(sums(x)).sum())(x) ** 2).sum())
    check(twice(x), 8 * 6 * total, P("a", "b"))
    of_bare = spmd.grad(lambda s: square(s).sum())(total)
    assert type(of_bare) is np.ndarray
    np.testing.assert_allclose(of_bare, 2 * total)
    value, pulled = spmd.vjp(spmd.map(lambda x: 2 * x.sum(0), P("a", "b"), P("b", unreduced={"a"})), x)
    assert value.layout.unreduced == {"a"}
    check(pulled(np.arange(4.0))[0], 2 * np.arange(4.0), P("a", "b"))
    jitted = spmd.jit(sums)
    np.testing.assert_array_equal(jitted(x).numpy(), total)
    np.testing.assert_array_equal(jitted(x).numpy(), total)
    check(spmd.grad(lambda x: (jitted(x) ** 2).sum())(x), 2 * total, P("a", "b"))


def test_gradients_of_arguments_in_uneven_parts(mesh):
    layout = Layout((4,), P("b", unreduced={"a"}), mesh.axes, [[2, 2, 0]])
    y, whole = with_parts(layout, mesh, 7)
    square = spmd.map(lambda s: spmd.psum(s, "a") ** 2, layout, layout.reduced)
    first = spmd.grad(lambda y: square(y).sum())
    np.testing.assert_allclose(first(y).numpy(), 2 * whole)
    second = spmd.grad(lambda y: (first(y) ** 2).sum())(y)
    assert second.layout == layout.reduced
    np.testing.assert_allclose(second.numpy(), 8 * whole)


def test_what_cannot_be_unreduced_is_refused(mesh):
    for body in (lambda x: x.sum() * 1.0, lambda x: np.float64(3.0)):
        with pytest.raises(StateError, match=r"would count it once for each"):
            spmd.map(body, P(), P(unreduced={"a"}))(A)
    with pytest.raises(LayoutError, match="booleans"):
        spmd.map(lambda x: x > 0, P("a"), P(unreduced={"a"}))(A)
    with pytest.raises(LayoutError, match="booleans"):
        spmd.put(A > 0, P(unreduced={"a"}))
    with pytest.raises(SpecError, match=r"argument unreduced"):
        P("a", unreduced={"a"})
    with pytest.raises(SpecError, match=r"argument unreduced"):
        P(unreduced=3)
    with pytest.raises(SpecError, match=r"'c'"):
        spmd.put(A, P(unreduced={"c"}))
    whole = spmd.put(A, P("a")).layout
    parts = Layout(A.shape, P(unreduced={"a"}), mesh.axes)
    with pytest.raises(SpecError, match="without unreduced axes"):
        spmd.map(lambda x: spmd.repartition(x, whole, parts), P("a"), P("a"))(A)
    with pytest.raises(SpecError, match="without unreduced axes"):
        spmd.map(lambda x: spmd.halo_exchange(x, P("a", unreduced={"b"}), 1), P("a"), P("a"))(A)
    draws = spmd.map(lambda key: spmd.random.normal(key, (4,), spec=P(unreduced={"b"})), P(), P())
    with pytest.raises(SpecError, match="without unreduced axes"):
        draws(spmd.random.key(0))


# Making, showing


def test_arrays_are_made_as_parts(mesh):
    spec = P("b", unreduced={"a"})
    for x, expected in (
        (spmd.ones(5, spec=spec), np.ones(5)),
        (spmd.arange(5.0, spec=spec), np.arange(5.0)),
        (spmd.put(np.arange(5.0), spec), np.arange(5.0)),
        (spmd.random.normal(spmd.random.key(3), (5,), spec=spec), spmd.random.normal(spmd.random.key(3), (5,))),
    ):
        assert x.spec == spec
        np.testing.assert_array_equal(x.numpy(), expected)
    parts = spmd.from_blocks([np.full(2, w) for w in range(6)], P(unreduced={"a", "b"}))
    np.testing.assert_array_equal(parts.numpy(), [15, 15])


def test_what_is_laid_out_anew_is_shown(mesh, capsys):
    x = spmd.put(rng.normal(size=(12, 12)), P("a"))
    with spmd.debug(reshards=True):
        total = x.sum(0)
        assert capsys.readouterr().err == ""
        spmd.reshard(total, P("a"))
        np.exp(total)
        x + spmd.put(np.ones((12, 12)), P("b"))
    spmd.reshard(x, P())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert f"{__file__}:" in lines[0]
    assert lines[0].endswith(
        "float64[12] from P(None, unreduced={'a'}) to P('a') by ReduceScatter over a: 6 messages, 288 bytes"
    )
    assert "by Sum over a: 6 messages, 576 bytes" in lines[1]
    assert "from P('b', None) to P('a', None) by Repartition over a, b" in lines[2]


def test_text_of_parts(mesh):
    total = spmd.put(A, P("a")).sum(0)
    assert str(total) == str(A.sum(0))
    assert "unreduced={'a'}" in repr(total)
    assert f"{total.sum():.1f}" == f"{A.sum():.1f}"
    assert "unreduced={'a'}" in total.layout.picture()


def test_parameters_that_several_operations_share_cost_one_sum(mesh):
    x, y = spmd.put(rng.normal(size=(13, 4)), P("a")), spmd.put(rng.normal(size=(13,)), P("a"))

    def loss(p):
        w, b = p
        return (((x + b) @ w - y) ** 2).mean() + ((x @ w) ** 3).mean() + (x * w).sum()

    p = np.ones(4), np.arange(4.0)
    with spmd.ledger() as log:
        gradients = spmd.grad(loss)(p)
    losses, parameters = 3, 2
    assert log.first.operators["Sum"] == losses + parameters
    with spmd.ledger() as log:
        spmd.grad(loss)(tuple(spmd.put(each, P()) for each in p))
    assert log.first.operators["Sum"] == losses + parameters
    assert log.first.messages == losses + 1  # those of the parameters go together
    X, Y = x.numpy(), y.numpy()
    r, z = (X + p[1]) @ p[0] - Y, X @ p[0]
    np.testing.assert_allclose(gradients[0], 2 / 13 * (X + p[1]).T @ r + 3 / 13 * X.T @ z**2 + X.sum(0))
    np.testing.assert_allclose(gradients[1], 2 * r.mean() * p[0])
