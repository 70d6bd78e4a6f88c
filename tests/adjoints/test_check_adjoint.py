"""The dot test itself: it passes what is right, catches what is wrong, on all workers alike, and says how to see it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from launch import run_python

import spmd
from spmd import P
from spmd.autodiff.tracer import value_of
from spmd.device import to_host
from spmd.errors import LayoutError, MeshError, SpecError
from spmd.layout import Layout
from spmd.operators.all_to_all import AllToAll
from spmd.operators.base import Operator
from spmd.operators.gather import AllGather, ReduceScatter, Slice
from spmd.operators.permute import Permute
from spmd.operators.root import Keep
from spmd.operators.sums import Sum, Vary, unmoved
from spmd.testing import AdjointError, check_adjoint, operator_cases, operator_classes, states, table
from spmd.transport.handles import Done, Mapped, read_only
from spmd.transport.plan import Forward, Plan

X = ("x",)
MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 5}, {"x": 3, "y": 2}]
LARGER = [{"x": 8}, {"x": 2, "y": 2, "z": 2}, {"x": 7}, {"x": 4, "y": 2}, {"y": 2, "x": 4}]
OURS = [kind for kind in operator_classes() if kind.__module__.startswith("spmd.")]


# What is right passes


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_operator_and_its_adjoint(kind, axes):
    """Of two axes: along the second, and along both in their order."""
    mesh = spmd.make_mesh(tuple(axes.values()), tuple(axes), scheduler="lockstep")
    cases = operator_cases(kind, mesh)
    assert len(cases) >= 3 * len(axes)
    for k, case in enumerate(cases):
        if len(axes) > 1 and case.operator.axes not in [("y",), ("x", "y")]:
            continue
        report = check_adjoint(case.operator, case.shape, mesh=mesh, in_specs=case.spec, trials=1, seed=k)
        assert report.passed
        assert report.error == 0
        assert report.mode == "exact"


LONG = [pytest.param(t, marks=pytest.mark.host("a GPU has no long doubles")) for t in (np.longdouble, np.clongdouble)]
OTHER_DTYPES = [np.float32, np.complex64, np.complex128, np.float16, *LONG]


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_every_operator_in_every_dtype(dtype):
    """Every second case: of two dtypes that are real, or complex, one has those that the other leaves out.

    On lockstep; the bits that threads give are those of lockstep, which `tests/transport/local/` shows."""
    run_in_dtype(dtype, "lockstep", first=dtype in (np.float32, np.complex128, np.longdouble), every=2)


@pytest.mark.full
@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_every_case_of_operators_in_every_dtype(dtype, scheduler):
    run_in_dtype(dtype, scheduler)


def run_in_dtype(dtype, scheduler, first=0, every=1):
    mesh = spmd.Mesh(x=3, scheduler=scheduler)
    for kind in OURS:
        for case in operator_cases(kind, mesh)[first::every]:
            check_adjoint(case.operator, case.shape, mesh=mesh, in_specs=case.spec, trials=1, dtype=dtype)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="long doubles of another kind")
@pytest.mark.parametrize("dtype", LONG, ids=str)
def test_copies_of_long_doubles_are_compared_by_their_numbers(dtype):
    """Not by the bytes beside them, which may have any value."""

    def copy(x, filled: int):
        data = np.array(spmd.block(x))
        data.view(np.uint8).reshape(-1, 16)[:, 10:] = filled
        data.flags.writeable = False
        return data

    mesh, x = spmd.Mesh(x=2), np.array([1.0, 0.1], dtype)
    apart = spmd.map(lambda x: copy(x, 10 + spmd.worker_index("x")), P(), P(), mesh=mesh)
    assert np.array_equal(apart(x).numpy(), x)
    assert check_adjoint(Sum(X), (3,), mesh=mesh, dtype=dtype, adjoint=lambda y: spmd.pvary(copy(y, 7), "x")).passed


@pytest.mark.full
@pytest.mark.parametrize("axes", [*MESHES, *LARGER], ids=str)
def test_every_operator_with_many_seeds(axes, scheduler):
    mesh = spmd.make_mesh(tuple(axes.values()), tuple(axes), scheduler=scheduler)
    for kind in OURS:
        for case in operator_cases(kind, mesh):
            for dtype in (np.float64, np.complex128):
                check_adjoint(case.operator, case.shape, mesh=mesh, in_specs=case.spec, trials=4, dtype=dtype)


def test_every_operator_has_a_row_of_cases():
    """Classes whose names begin with an underscore share code, or are planted here."""
    assert {kind.__name__ for kind in OURS} >= {
        *("Vary", "Sum", "AllGather", "ReduceScatter", "Collect", "Slice", "Permute", "AllToAll"),
        *("Broadcast", "SumReduce", "Replicate", "Keep"),
    }
    for kind in OURS:
        cases = operator_cases(kind, spmd.Mesh(x=3))
        assert all(type(case.operator) is kind for case in cases)
        assert any(0 in shape for case in cases for shape in _blocks(case)), f"no empty blocks for {kind}"
        assert re.fullmatch(r"(I|V|Rooted) → (I|V|Rooted)", states(kind))


def _blocks(case) -> list[tuple[int, ...]]:
    """The shapes of the workers' blocks."""
    layout = case.spec if isinstance(case.spec, Layout) else case.spec and Layout(case.shape, case.spec, {"x": 3})
    return [layout.block_shape(w) for w in range(3)] if layout else [case.shape]


def test_an_operator_in_a_new_file_is_found(tmp_path):
    """Also where nothing imports it yet."""
    (tmp_path / "mirror.py").write_text(
        "from spmd.operators.reduce import Sum\nclass Mirrored(Sum):\n    function = 'mirrored'\n"
    )
    program = f"""
import spmd.operators
spmd.operators.__path__.append({str(tmp_path)!r})
import spmd.testing
print([kind.__name__ for kind in spmd.testing.operator_classes()])
"""
    ended = run_python("-c", program)
    assert ended.returncode == 0, str(ended)
    assert "'Mirrored'" in ended.stdout


def test_an_operator_without_a_row_is_missed():
    class Forgotten(Sum):
        pass

    try:
        assert Forgotten in operator_classes()
        with pytest.raises(LayoutError, match=r"add a row to spmd/testing\.py: Forgotten"):
            operator_cases(Forgotten, spmd.Mesh(x=2))
    finally:  # so that no other test finds it
        Forgotten.__name__ = "_Forgotten"


# Right maps in float mode


def matrix(n: int, seed: int = 0, dtype=np.float64):
    """A well-conditioned matrix, another on every worker."""
    rng = np.random.default_rng([seed, spmd.worker_index("x")])
    a = rng.normal(size=(n, n)) + (1j * rng.normal(size=(n, n)) if np.dtype(dtype).kind == "c" else 0)
    return spmd.varying((a / n + 2 * np.eye(n)).astype(dtype), "x")


def cumulated(x):
    """np.cumsum over all workers."""
    mine = np.cumsum(x, axis=0)
    totals = spmd.all_gather(np.sum(x, axis=0), "x")
    return mine + np.sum(totals[: spmd.worker_index("x")], axis=0)


def solved(x):
    """The solution of a triangular system on every worker, row by row."""
    a, rows = matrix(x.shape[0], dtype=x.dtype), []
    for k in range(x.shape[0]):
        known = sum((a[k, j] * rows[j] for j in range(k)), np.zeros(x.shape[1:], x.dtype))
        rows.append((x[k] - known) / a[k, k])
    return np.stack(rows)


def multiplied(x):
    """A product whose inner dimension is split."""
    return spmd.psum(matrix(28, dtype=x.dtype)[:8, : x.shape[0]] @ x, "x")


def wave(u):
    """Twenty steps of the wave equation on a line that is split."""
    before, now = u, u
    for _ in range(20):
        left = spmd.shift(now[-1:], "x", 1, wrap=False)
        right = spmd.shift(now[:1], "x", -1, wrap=False)
        wide = np.concatenate([left, now, right])
        before, now = now, 2 * now - before + 0.3 * (wide[2:] - 2 * now + wide[:-2])
    return now


def two_arguments(a, b):
    return spmd.sum(3 * a, "x", axis=0) + b, spmd.all_gather(a, "x", tiled=True)


class Right(NamedTuple):
    f: object
    shapes: tuple
    in_specs: object = P("x")


RIGHT = [
    Right(cumulated, ((9, 2),)),
    Right(solved, ((9, 2),)),
    Right(multiplied, ((7, 2),)),
    Right(wave, ((10,),)),
    Right(two_arguments, ((7, 2), (2,)), (P("x"), P())),
    Right(lambda w: w * matrix(3)[0], ((3,),), P()),
    Right(lambda x: x[::-1] * 0.1, ((7,),)),
]


@pytest.mark.parametrize("right", RIGHT, ids=lambda r: r.f.__name__)
def test_no_false_alarm(right):
    meshes = [spmd.Mesh(x=n, scheduler="lockstep") for n in (1, 2, 3)]
    worst = 0.0
    for seed in range(18):
        report = check_adjoint(
            right.f, *right.shapes, mesh=meshes[seed % 3], in_specs=right.in_specs, trials=1, seed=seed
        )
        assert report.mode == "float"
        assert report.error <= report.bound < 1e-10
        worst = max(worst, report.error)
    assert worst < 1e-13


@pytest.mark.parametrize("right", RIGHT[:4], ids=lambda r: r.f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.complex128, np.complex64], ids=str)
def test_no_false_alarm_in_other_dtypes(right, dtype):
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    for seed in range(6):
        report = check_adjoint(
            right.f, *right.shapes, mesh=mesh, in_specs=right.in_specs, trials=1, seed=seed, dtype=dtype
        )
        assert report.error <= report.bound < 1e4 * np.finfo(dtype).eps


def ill(condition: float):
    """The solution of a linear system of this condition, another on every worker."""

    def ill_conditioned(x):
        n = x.shape[0]
        rng = np.random.default_rng([n, spmd.worker_index("x")])
        q, p = (np.linalg.qr(rng.normal(size=(n, n)))[0] for _ in range(2))
        a = q * np.geomspace(1, 1 / condition, n) @ p if condition else rng.normal(size=(n, n))
        return np.linalg.solve(spmd.varying(a.astype(x.dtype), "x"), x)

    return ill_conditioned


@pytest.mark.parametrize("condition", [0, 1e2, 1e6, 1e12])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128], ids=str)
def test_no_false_alarm_on_systems_of_any_condition(condition, dtype):
    """The bound grows with the condition, which no perturbation of the arguments shows."""
    meshes = [spmd.Mesh(x=n, scheduler="lockstep") for n in (1, 2, 4)]
    for seed in range(30):
        given = {"mesh": meshes[seed % 3], "in_specs": P("x"), "seed": seed, "trials": 1, "dtype": dtype}
        report = check_adjoint(ill(condition), (40, 2), **given)
        assert report.error <= report.bound / 4
        assert report.bound < 1e-12 * max(condition, 1e4)


def long_cumsum(x):
    return np.cumsum(x, axis=0)


def long_wave(u):
    """Four hundred steps of the wave equation."""
    before, now = u, u
    for _ in range(400):
        left = spmd.shift(now[-1:], "x", 1, wrap=False)
        right = spmd.shift(now[:1], "x", -1, wrap=False)
        wide = np.concatenate([left, now, right])
        before, now = now, 2 * now - before + 0.3 * (wide[2:] - 2 * now + wide[:-2])
    return now


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=str)
@pytest.mark.parametrize(("f", "n", "seeds"), [(long_cumsum, 4000, 18), (long_wave, 12, 1)])
def test_no_false_alarm_where_errors_pile_up(f, n, seeds, dtype):
    for seed in range(seeds):
        mesh = spmd.Mesh(x=seed % 3 + 1, scheduler="lockstep")
        report = check_adjoint(f, (n,), mesh=mesh, in_specs=P("x"), seed=seed, trials=1, dtype=dtype)
        assert report.error <= report.bound < 2e4 * np.finfo(dtype).eps


@pytest.mark.full
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128], ids=str)
@pytest.mark.parametrize(("f", "n", "seeds"), [(long_cumsum, 4000, 600), (long_wave, 16, 20), (ill(0), 40, 300)])
def test_no_false_alarm_where_errors_pile_up_in_hundreds_of_draws(f, n, seeds, dtype):
    for seed in range(seeds):
        mesh = spmd.Mesh(x=seed % 3 + 1, scheduler="lockstep")
        check_adjoint(f, (n,), mesh=mesh, in_specs=P("x"), seed=1000 + seed, trials=1, dtype=dtype)


# Maps that are linear over the reals


REAL = [
    (np.conj, np.complex128, {"real": True}),
    (lambda z: np.conj(z) * (1 + 2j) + 3 * z, np.complex64, {"real": True}),
    (lambda z: spmd.psum(np.conj(z), "x"), np.complex128, {"real": True}),
    (np.real, np.complex128, {}),
    (lambda z: np.imag(z) * 2.0, np.complex128, {}),
    (lambda x: x * (1 + 2j), np.float64, {}),
    (lambda x: spmd.psum(x * 1j, "x"), np.float32, {}),
    (np.conj, np.complex128, {"real": True, "adjoint": np.conj}),
    (np.real, np.complex128, {"adjoint": lambda y: y + 0j}),
]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("f", "dtype", "options"), REAL)
def test_maps_that_are_linear_over_the_reals(f, dtype, options, exact):
    for seed in range(5):
        given = {"mesh": spmd.Mesh(x=3), "in_specs": P("x"), "dtype": dtype, "seed": seed, "exact": exact}
        assert check_adjoint(f, (6,), **given, **options)


@pytest.mark.parametrize(
    ("f", "adjoint", "options", "needed"),
    [
        (np.conj, lambda y: y, {"real": True}, {-1.0}),
        (np.real, lambda y: y * 1j, {}, {0.0, 1.0}),
        (lambda z: 1j * np.conj(z), lambda y: -1j * np.conj(y), {"real": True}, {1.0}),
    ],
)
def test_wrong_adjoints_over_the_reals_are_located(f, adjoint, options, needed):
    given = {"mesh": spmd.Mesh(x=3), "in_specs": P("x"), "dtype": complex, "exact": True, "raises": False}
    for seed in range(20):
        report = check_adjoint(f, (3,), adjoint=adjoint, seed=seed, **given, **options)
        assert report.kind == "value"
        assert {e.needed for e in report.entries} == needed
        assert {e.x.unit for e in report.entries} <= {"re", "im"}
    assert "from im y" in str(report) or "to im x" in str(report)


def test_what_is_linear_over_the_reals_only_says_so():
    report = check_adjoint(np.conj, (3,), mesh=spmd.Mesh(x=2), in_specs=P("x"), dtype=complex, raises=False)
    assert report.kind == "linear"
    assert "real=True tests it so (on all workers)" in str(report)
    assert (
        "real=True"
        in check_adjoint(
            np.conj,
            (3,),
            mesh=spmd.Mesh(x=2),
            in_specs=P("x"),
            dtype=complex,
            real=True,
            adjoint=np.negative,
            raises=False,
        ).reproduce
    )


@pytest.mark.full
@pytest.mark.parametrize("right", RIGHT, ids=lambda r: r.f.__name__)
def test_no_false_alarm_in_hundreds_of_draws(right):
    for n in (1, 3, 4):
        mesh = spmd.Mesh(x=n, scheduler="lockstep")
        shapes = [tuple(4 * m if m > 6 else m for m in shape) for shape in right.shapes]
        check_adjoint(right.f, *shapes, mesh=mesh, in_specs=right.in_specs, trials=150)


def test_right_maps_may_be_tested_exactly():
    """Maps that only copy and add are exact on integers, whoever writes them."""
    mesh = spmd.Mesh(x=3)

    def difference(x):
        return x - spmd.shift(x, "x", 1)

    def adjoint(g):
        return g - spmd.shift(g, "x", -1)

    for dtype in (np.float64, np.complex64):
        check_adjoint(difference, (6, 2), mesh=mesh, in_specs=P("x"), exact=True, dtype=dtype)
        check_adjoint(difference, (6, 2), mesh=mesh, in_specs=P("x"), exact=True, dtype=dtype, adjoint=adjoint)
        check_adjoint(cumulated, (6, 2), mesh=mesh, in_specs=P("x"), exact=True, dtype=dtype)


def test_layouts_give_uneven_blocks():
    mesh = spmd.Mesh(x=3)
    layout = Layout((7, 2), P("x"), mesh.axes, [(0, 6, 1), None])
    check_adjoint(AllGather(X, 0, True), (7, 2), mesh=mesh, in_specs=layout)
    check_adjoint(AllGather(X, 0, True), (7, 2), mesh=mesh, in_specs=[layout])
    check_adjoint(lambda x: spmd.all_gather(x, "x", tiled=True) * 0.5, (7, 2), mesh=mesh, in_specs=layout)


def test_the_mesh_of_a_with_block_and_out_specs():
    with spmd.Mesh(x=3):
        assert check_adjoint(multiplied, (6, 2), in_specs=P("x"), out_specs=P()).mesh == "Mesh(x=3)"
        assert spmd.check_adjoint(Sum(X), (2,)).passed
        report = check_adjoint(lambda x: 2.0 * x, (6,), in_specs=P("x"), out_specs=P(), raises=False)
    assert "result 0 is Varying(x), and out_specs promise P()" in str(report)


# What is wrong is caught


class _Backwards(Permute):
    """Its adjoint shifts the same way."""

    @property
    def H(self) -> Operator:
        return Permute(self.axes, self.perm, None if self.shapes is None else self.shapes[::-1])


class _Double(Vary):
    def start(self, comm, group, x, call):
        return Done((read_only(2 * x), self))


class _Twice(Sum):
    """Its adjoint counts twice."""

    @property
    def H(self) -> Operator:
        return _Double(self.axes)


class _First(Sum):
    def plan(self, group, shape, dtype):
        parts = [... if group.index == 0 else None] * group.size
        return Plan("broadcast", group, shape, dtype, parts, Forward(0), lambda _: self)


class _Overwritten(Vary):
    """Its adjoint takes one cotangent in place of their sum, but where the sum for a leaf is deferred."""

    @property
    def H(self) -> Operator:
        return _First(self.axes)


class _AlwaysOverwritten(_Overwritten):
    def defer(self, sweep_state, g, leaf):
        return None


class _Unsummed(Keep):
    """Its adjoint sums over the workers what the root alone has: right, but for dropping the others' copies."""

    @property
    def H(self) -> Operator:
        return _Doubled(self.axes, self.root)


class _Doubled(type(Keep(X).H)):
    def start(self, comm, group, x, call):
        return Mapped(super().start(comm, group, x, call), lambda made: (read_only(2 * made[0]), made[1]))


class _WrongSizes(AllGather):
    """Its adjoint gives the blocks back with their sizes in the opposite order."""

    @property
    def H(self) -> Operator:
        return ReduceScatter(self.axes, self.axis, self.tiled, self.sizes and self.sizes[::-1])


class _AssumesBalanced(AllGather):
    """Its adjoint forgets the sizes."""

    @property
    def H(self) -> Operator:
        return ReduceScatter(self.axes, self.axis, self.tiled)


class _Unswapped(AllToAll):
    """Its adjoint splits as it split before."""

    @property
    def H(self) -> Operator:
        return AllToAll(self.axes, self.concat_axis, self.split_axis, self.tiled, self.sizes, self.joined)


class _NotItsOwnAdjoint(Slice):
    """Its adjoint is that of the slice by the next worker."""

    @property
    def H(self) -> Operator:
        return _Rolled(self.axes, self.axis, self.tiled, self.sizes)


class _Rolled(type(Slice(X).H)):
    def start(self, comm, group, x, call):
        return Mapped(
            super().start(comm, group, x, call), lambda made: (np.roll(made[0], -x.shape[0], axis=0), made[1])
        )


@dataclass(frozen=True)
class _OneCell(Operator):
    """The identity, whose adjoint misses one cell on one worker."""

    misses: bool = False
    function = "one_cell"

    def plan(self, group, shape, dtype):
        return unmoved(self, group, shape, dtype)

    def start(self, comm, group, x, call):
        y = x.copy()
        if self.misses and group.index == group.size - 1 and x.size:
            y.reshape(-1)[-1] = 0
        return Done((read_only(y), self))

    @property
    def H(self) -> Operator:
        return _OneCell(self.axes, not self.misses)


LOPSIDED = Layout((7, 2), P("x"), {"x": 3}, [(4, 1, 2), None])


class Wrong(NamedTuple):
    """A pair that is not adjoint, and a part of the fault that it must be accused of."""

    name: str
    f: object
    shapes: tuple
    fault: str
    in_specs: object = None
    options: dict = {}  # noqa: RUF012


DIFFER = "integers must agree"
RING = tuple((k, (k + 1) % 3) for k in range(3))


def difference(x):
    return x - spmd.shift(x, "x", 1)


def rotated(x):
    return (1 + 2j) * x


def tampering(x):
    """The identity, which writes into what it is given."""
    y = x * 1.0
    data = value_of(x)
    data.flags.writeable = True
    data += 1
    return y


def on_worker_1(f):
    """f on worker 1 only; the others do what is right."""
    return lambda g: f(g) if spmd.worker_index("x") == 1 else 2.0 * g


def twice(x):
    return 2.0 * x


WAITING = "an adjoint that leaves the others waiting"


def waits(g):
    g = spmd.pvary(g, "x")
    return g if spmd.worker_index("x") == 1 else g + 0 * spmd.psum(g, "x")


def by_hand(name: str, f, adjoint, fault: str, shape=(6,), spec: P = P("x"), **options) -> Wrong:  # noqa: B008
    """A map, with an adjoint written beside it, or (None) that of the tape."""
    given = options if adjoint is None else {"adjoint": adjoint, **options}
    return Wrong(name, f, (shape,), fault, spec, given)


WRONG = [
    Wrong("shifted the same way", _Backwards(X, RING), ((6, 2),), DIFFER, P("x")),
    Wrong("shifted the same way, without a ring", _Backwards(X, ((0, 1), (1, 2))), ((3,),), DIFFER),
    Wrong("counted twice", _Twice(X), ((2, 2),), DIFFER),
    Wrong("overwritten, not added", _AlwaysOverwritten(X), ((2, 2),), DIFFER),
    Wrong(
        "overwritten when differentiated",
        _Overwritten(X),
        ((2, 2),),
        "where it is differentiated F* has another value for argument 0",
    ),
    Wrong("doubled at the root", _Unsummed(X, 1), ((3,),), DIFFER),
    Wrong("wrong sizes", _WrongSizes(X, 0, True), ((7, 2),), "F* raises DifferentiationError", LOPSIDED),
    Wrong("sizes forgotten", _AssumesBalanced(X, 0, True), ((7, 2),), "F* raises DifferentiationError", LOPSIDED),
    Wrong("sizes not swapped", _Unswapped(X, 1, 0, True), ((7, 4),), "F* raises LayoutError", P("x")),
    Wrong("joined in another order", _NotItsOwnAdjoint(X, 0, True), ((6, 2),), DIFFER),
    Wrong("one cell missed", _OneCell(X), ((9, 4),), DIFFER, P("x")),
    Wrong("one cell dropped on the way", _OneCell(X, True), ((9, 4),), DIFFER, P("x")),
    by_hand("a difference to the wrong side", difference, difference, "above the bound"),
    by_hand("the same, exactly", difference, difference, DIFFER, exact=True),
    by_hand("no conjugate", rotated, rotated, "above the bound", dtype=np.complex128),
    by_hand("no conjugate, exactly", rotated, rotated, DIFFER, dtype=np.complex64, exact=True),
    by_hand(
        "a psum back through a psum",
        lambda x: spmd.psum(x, "x"),
        lambda g: spmd.pvary(spmd.psum(spmd.pvary(g, "x"), "x"), "x"),
        DIFFER,
        exact=True,
    ),
    by_hand("off by a millionth", twice, lambda g: 2.000002 * g, "above the bound"),
    by_hand("off in the twelfth digit", twice, lambda g: (2 + 2e-12) * g, "above the bound", trials=3),
    by_hand("off on one worker", twice, on_worker_1(lambda g: 3.0 * g), DIFFER, exact=True),
    by_hand("another shape", twice, lambda g: g[:1], "F* gives shape (1,) for argument 0, which has (2,)"),
    by_hand("another shape on one worker", twice, on_worker_1(lambda g: g[:1]), "(on worker 1 (x=1))"),
    by_hand(
        "another dtype",
        twice,
        lambda g: (2 * g).astype(np.float32),
        "F* gives dtype float32 for argument 0, which has float64",
    ),
    by_hand(
        "another state",
        twice,
        lambda g: spmd.pvary(2 * g, "x"),
        "F* gives state Varying(x) for argument 0, which has Invariant",
        spec=P(),
    ),
    by_hand("too many cotangents", twice, lambda g: (g, g), "F* gives 2 cotangents for 1 arguments"),
    by_hand("no cotangent", twice, lambda g: None, "F* gives None for argument 0 (on all workers)"),
    by_hand("an adjoint that assigns", twice, lambda g: g.__setitem__(0, 0.0), "F* raises StateError"),
    by_hand("an adjoint that fails on one worker", twice, on_worker_1(lambda g: 1 / 0), "F* raises ZeroDivisionError"),
    by_hand(WAITING, lambda x: spmd.psum(x, "x"), waits, "F* raises MismatchError"),
    by_hand("writes into x", tampering, None, "argument 0 of F was modified"),
    by_hand("writes into y", lambda x: x * 1.0, tampering, "argument 0 of F* was modified"),
    by_hand("a square", lambda x: x**2, None, "not linear"),
    by_hand("an absolute value", np.abs, None, "not linear", exact=True),
    by_hand("a shift of the origin", lambda x: x + 1.0, None, "not linear"),
    by_hand("nonlinear on one worker", on_worker_1(lambda x: np.maximum(x, 0.0)), None, "not linear", trials=3),
    by_hand("conjugation", np.conj, None, "not linear over the complex numbers", dtype=np.complex128),
    Wrong("a product of both arguments", lambda a, b: a * b, ((6,), (6,)), "not linear", P("x")),
]


def checked(wrong: Wrong, mesh, seed: int, **options):
    given = {"trials": 1, "raises": False, **wrong.options, **options}
    return check_adjoint(wrong.f, *wrong.shapes, mesh=mesh, in_specs=wrong.in_specs, seed=seed, **given)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_wrong_pairs_are_caught_at_every_seed(wrong):
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    for seed in range(20):
        report = checked(wrong, mesh, seed, shrink=seed == 0)
        assert not report, f"seed {seed}"
        assert wrong.fault in str(report), str(report)
        assert report.kind == report.smallest.kind


@pytest.mark.full
@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_wrong_pairs_are_caught_at_hundreds_of_seeds(wrong):
    mesh = spmd.Mesh(x=3, scheduler="lockstep")
    assert not any(checked(wrong, mesh, seed, shrink=False).passed for seed in range(300))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_one_verdict_under_both_schedulers(wrong):
    reports = [checked(wrong, spmd.Mesh(x=3, scheduler=s), 5) for s in ("lockstep", "threads", "threads")]
    texts = [str(r) for r in reports]
    if wrong.name != WAITING:  # who met whom depends on who came first
        assert texts[0] == texts[1] == texts[2]
    assert [r.passed for r in reports] == [False] * 3


# What a report says


def test_a_report_of_success():
    report = check_adjoint(AllGather(X, 0, True), (7, 2), mesh=spmd.Mesh(x=3), in_specs=P("x"), trials=2)
    assert report
    assert bool(report) is report.passed is True
    assert report.forward == report.backward
    lines = str(report).splitlines()
    operator = "AllGather(axes=('x',), axis=0, tiled=True, sizes=None)"
    assert lines[0] == f"{operator} of (7, 2) on Mesh(x=3): adjoint (exact, 2 trials)"
    assert lines[1] == f"  <F x, y>  = {report.forward:.0f}"
    assert lines[2] == f"  <x, F* y> = {report.backward:.0f}"
    assert len(lines) == 3
    assert (report.messages, report.bytes) == report.declared == (6, 2 * 7 * 2 * 8)  # each block to two others


def test_a_report_of_success_in_float_mode():
    text = str(check_adjoint(wave, (10,), mesh=spmd.Mesh(x=3), in_specs=P("x")))
    assert text.startswith("wave of (10,) on Mesh(x=3): adjoint (float, 3 trials)\n")
    assert re.search(r"\n  error \d\.\d\de-1\d, bound \d\.\d\de-1\d$", text)
    assert re.search(r"<F x, y>  = -?\d+\.\d{10}", text)


def test_a_report_of_failure():
    mesh = spmd.Mesh(x=3)
    with pytest.raises(AdjointError) as caught:
        check_adjoint(_Backwards(X, RING), (6, 2), mesh=mesh, in_specs=P("x"), seed=7)
    assert isinstance(caught.value, AssertionError)
    report = caught.value.report
    assert not report
    assert str(caught.value) == str(report)
    lines = str(report).splitlines()
    operator = "_Backwards(axes=('x',), perm={}, shapes=None)"
    assert lines[0] == f"{operator.format(RING)} of (6, 2) on Mesh(x=3): NOT adjoint (exact, 3 trials)"
    difference = report.forward - report.backward
    assert lines[3:] == [
        "  result 0: the adjoint of the adjoint is another map than F (on all workers)",
        f"  <F x, y> and <x, F* y> differ by {difference:.0f}; integers must agree",
        f"  smallest case that fails: {operator.format('((0, 1),)')} of (1,) on Mesh(x=2)",
        "  F* is not F^H in 2 of 4 entries:",
        "    from y[0] (worker 1 (x=1)) to x[0] (worker 0 (x=0)): 0, needed 1",
        "    from y[0] (worker 0 (x=0)) to x[0] (worker 1 (x=1)): 1, needed 0",
        "  looks like: F* does what F does: it goes the same way once more, and not back",
        "  reproduce: import spmd; from adjoints.test_check_adjoint import _Backwards; spmd.check_adjoint("
        f"{operator.format('((0, 1),)')}, (1,), mesh=spmd.Mesh(x=2), seed=7)",
    ]


def _named(f) -> bool:
    """Whether f can be imported."""
    return not callable(f) or isinstance(f, Operator | np.ufunc) or globals().get(f.__name__) is f


@pytest.mark.parametrize(
    "wrong", [w for w in WRONG if _named(w.f) and all(map(_named, w.options.values()))], ids=lambda w: w.name
)
def test_the_line_that_reproduces_a_failure(wrong):
    """It runs by itself, fails as the report says, and cannot be made smaller."""
    report = checked(wrong, spmd.Mesh(x=3), 11, trials=2)
    small = report.smallest
    assert str(report).endswith(f"\n  reproduce: {small.reproduce}")
    for one in (report, small):
        assert "\n" not in one.reproduce
        with pytest.raises(AdjointError) as caught:
            exec(one.reproduce, {})
        again = caught.value.report
        assert (again.of, again.kind, again.forward) == (one.of, one.kind, one.forward) or np.isnan(one.forward)
        assert str(again).splitlines()[-1] == str(report).splitlines()[-1]


def test_a_failure_in_a_late_trial_is_reproduced():
    """The line names the trials, where they are not the usual three."""
    report = check_adjoint(_Twice(X), (2,), mesh=spmd.Mesh(x=2), trials=9, raises=False)
    assert report.reproduce.endswith("mesh=spmd.Mesh(x=2), trials=9)")


def test_draws_differ_on_every_worker_and_hide_nothing():
    seen = {0: [], 1: [], 2: []}

    def look(x):
        seen[spmd.worker_index("x")].append(np.array(to_host(value_of(x))))
        return 1.0 * x

    check_adjoint(look, (12,), mesh=spmd.Mesh(x=3, scheduler="lockstep"), in_specs=P("x"), exact=True, trials=2)
    first = [blocks[0] for blocks in seen.values()]
    assert all(np.all(a == np.round(a)) for blocks in seen.values() for a in blocks)
    assert all(np.all(a != 0) and np.abs(a).max() <= 2**17 for a in first)
    assert any(np.any(a < 0) for a in first)
    assert any(np.any(a > 0) for a in first)
    assert len({a.tobytes() for a in first}) == 3
    kept = {0: [], 1: [], 2: []}

    def keep(w):
        kept[spmd.worker_index("x")].append(value_of(w).tobytes())
        return 1.0 * w

    check_adjoint(keep, (5,), mesh=spmd.Mesh(x=3), in_specs=P(), trials=1)
    assert kept[0] == kept[1] == kept[2]  # an Invariant argument is one value


def test_a_report_as_a_dictionary_and_a_table():
    mesh = spmd.Mesh(x=3)
    right = check_adjoint(Sum(X), (2,), mesh=mesh)
    wrong = check_adjoint(_Twice(X), (2,), mesh=mesh, raises=False)
    figures = json.loads(json.dumps(wrong.to_dict()))
    assert figures["passed"] is False
    assert figures["kind"] == "value"
    assert figures["forward"] == wrong.forward
    assert figures["differing"] == 6
    assert figures["entries_of"] == 12
    assert figures["smallest"]["entries"][0]["given"] == 2.0
    assert figures["smallest"]["smallest"] is None
    assert right.smallest is None
    assert figures["declared"] == [wrong.messages, wrong.bytes]
    head, *rows = table([right, wrong]).splitlines()
    assert head.split() == ["map", "mesh", "trials", "error", "bound", "messages", "bytes", "verdict"]
    assert [row.split()[-1] for row in rows] == ["adjoint", "value"]
    assert rows[0].startswith("Sum(axes=('x',)) (2,)")


def test_workers_with_copies_must_agree():
    """An Invariant cotangent that is another on one worker: its first copy alone would pass."""
    mesh = spmd.Mesh(x=3, scheduler="lockstep")

    def unlike(g):
        return 2.0 * g if spmd.worker_index("x") == 2 else 1.0 * g

    report = check_adjoint(lambda w: 1.0 * w, (2,), mesh=mesh, in_specs=P(), adjoint=unlike, raises=False)
    assert report.kind == "copies"
    text = "cotangent of argument 0 is Invariant along x, and worker 0 (x=0) and worker 2 (x=2) hold different values"
    assert text in str(report)


def test_a_map_that_gives_nothing_is_no_right_one():
    for nothing in (lambda x: None, lambda x: ()):
        with pytest.raises(LayoutError, match=r"argument f(.|\n)*return the result"):
            check_adjoint(nothing, (3,), mesh=spmd.Mesh(x=2), in_specs=P("x"))


def test_entries_of_results_are_those_of_the_whole_where_out_specs_say_how_it_is_cut():
    mesh = spmd.Mesh(x=2, y=2)
    specs = {"a": P("x", "y"), "b": P("x", "y")}

    def parts(u):
        return {"a": 2 * u, "b": [u[:1, :1], None]}

    def back(a, b):
        lost = np.where(spmd.axis_index("x") == 1, 0, 1) * 2 * a
        return (lost.at[:1, :1].add(b),)

    given = {"mesh": mesh, "in_specs": P("x", "y"), "adjoint": back, "raises": False, "shrink": False}
    found = check_adjoint(parts, (5, 6), out_specs=specs, **given)
    assert (found.differing, found.kind) == (12, "value")
    place = "[3, 4] (worker 3 (x=1, y=1), [0, 1] of its block)"
    assert str(found.entries[7]) == f"from y{place} to x{place}: 0, needed 2"
    uneven = check_adjoint(lambda u: 2 * u, (5, 6), out_specs=P("y", "x"), **given | {"adjoint": lambda v: v})
    assert uneven.entries[0].y.whole is None  # blocks of these shapes are none of one array
    small = check_adjoint(parts, (5, 6), out_specs=specs, **given | {"shrink": True}).smallest
    assert (small.mesh, small.shapes) == ("Mesh(x=2)", ((2, 1),))
    assert "out_specs={'a': P('x', None), 'b': P('x', None)}" in small.reproduce
    with pytest.raises(AssertionError, match="NOT adjoint"):
        exec(small.reproduce, {"parts": parts, "back": back})


# Misuse


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: check_adjoint(Sum(X), mesh=m), "argument shapes(.|\n)*one per argument"),
        (lambda m: check_adjoint(twice, (3,), mesh=m), "argument in_specs(.|\n)*none, for a function"),
        (lambda m: check_adjoint(twice, (3,), mesh=m, in_specs=[P(), P()]), "2 specs for 1 shapes"),
        (lambda m: check_adjoint(twice, (3,), mesh=m, in_specs=P("q")), r"in_specs\[0\](.|\n)*axis 'q'"),
        (lambda m: check_adjoint(twice, (3,), mesh=m, in_specs=P(None, "x")), "at most 1 entry"),
        (lambda m: check_adjoint(twice, (3,), mesh=m, in_specs=P("x"), out_specs=P("q")), "out_specs(.|\n)*axis 'q'"),
        (lambda m: check_adjoint(twice, (3,), mesh=m, in_specs=P("x"), out_specs=(P(),) * 2), "out_specs(.|\n)*prefix"),
        (lambda m: check_adjoint(Sum(X), (3,), mesh=m, dtype=int), "argument dtype(.|\n)*'int64'"),
        (lambda m: check_adjoint(Sum(X), (3,), mesh=m, trials=0), "argument trials(.|\n)*at least 1"),
        (lambda m: check_adjoint(Sum(X), (3,), mesh=m, trials=-2), "argument trials(.|\n)*got: +-2"),
        (lambda m: check_adjoint(Sum(X), (3,), mesh=m, seed=-1), "argument seed(.|\n)*at least 0"),
        (lambda m: check_adjoint(Sum(X), 3, mesh=m), r"argument shapes\[0\](.|\n)*a tuple of lengths"),
        (lambda m: check_adjoint(Sum(X), (3,), (-1,), mesh=m), r"argument shapes\[1\](.|\n)*\(-1,\)"),
        (lambda m: check_adjoint(Sum(X), (6, 2), mesh=m, in_specs=LOPSIDED), r"a layout of shape \(6, 2\)"),
    ],
)
def test_misuse_is_explained(call, words):
    with pytest.raises(SpecError, match=words):
        call(spmd.Mesh(x=3))


def test_an_error_of_the_map_itself_is_no_verdict():
    mesh = spmd.Mesh(x=3)
    with pytest.raises(MeshError, match=r"spmd\.check_adjoint(.|\n)*'xx'(.|\n)*write 'x'"):
        check_adjoint(Sum(("xx",)), (3,), mesh=mesh, raises=False)
    with pytest.raises(MeshError, match="write 'x'"):
        check_adjoint(lambda a: spmd.psum(a, "xx"), (3,), mesh=mesh, in_specs=P("x"), raises=False)
    with pytest.raises(ZeroDivisionError):
        check_adjoint(lambda a: 1 / 0, (3,), mesh=mesh, in_specs=P("x"), raises=False)


def test_a_check_is_called_from_outside():
    mesh = spmd.Mesh(x=2)
    with pytest.raises(MeshError, match="a call inside a body"):
        spmd.map(lambda x: check_adjoint(Sum(X), (2,)) and x, P("x"), P("x"), mesh=mesh)(np.ones(2))


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("shape", [(11, 10), (40, 30), (500, 100)])
def test_wrong_entries_of_large_maps_are_found_by_bisection(shape, exact, scheduler):
    i, j = 3, 7
    mesh = spmd.Mesh(x=2, scheduler=scheduler)

    def wrong(y):  # on each worker the entry [i, j] of its block takes its neighbour's value too
        return (2 * y).at[i, j].add(3 * y[i, j + 1])

    given = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x"), "adjoint": wrong, "exact": exact}
    found = spmd.check_adjoint(lambda x: 2 * x, shape, raises=False, shrink=False, **given)
    assert not found
    assert found.bisected
    assert found.entries_of == (shape[0] * shape[1]) ** 2
    starts = (0, -(-shape[0] // 2))
    expected = {((s + i, j), (s + i, j + 1), 0.0, 3.0) for s in starts}
    assert {(e.x.whole, e.y.whole, e.needed, e.given) for e in found.entries} == expected
    assert "found by bisection; there may be more" in str(found)


def test_a_report_says_where_bisection_has_found_nothing(monkeypatch):
    monkeypatch.setattr("spmd.adjoints.bisection.PROBE_LIMIT", 3)
    given = {"mesh": spmd.Mesh(x=2), "in_specs": P("x"), "out_specs": P("x"), "adjoint": lambda y: 3 * y}
    found = spmd.check_adjoint(lambda x: 2 * x, (40, 30), raises=False, shrink=False, **given)
    assert not found.entries
    assert "was not found: bisection" in str(found)
