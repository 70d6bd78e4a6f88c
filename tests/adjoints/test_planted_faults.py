"""Every operator on sampled layouts, and with faults planted in its adjoint: each is caught, and nothing else."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from launch import PROGRAMS, launch, mpiexec
from sampled import sample

import spmd
from spmd import P
from spmd.adjoints import bisection, matrices
from spmd.operators.base import Operator
from spmd.operators.halo import HaloAccumulate, HaloExchange
from spmd.state import VARYING
from spmd.testing import AdjointReport, check_adjoint, operator_classes
from spmd.transport.handles import Mapped, read_only

OURS = [kind for kind in operator_classes() if kind.__module__.startswith("spmd.")]


@functools.cache
def mesh_of(axes: tuple[tuple[str, int], ...], scheduler: str = "lockstep") -> spmd.Mesh:
    return spmd.make_mesh([n for _, n in axes], [name for name, _ in axes], transport="local", scheduler=scheduler)


def check(drawn, operator: Operator | None = None, scheduler: str = "lockstep", **options) -> AdjointReport:
    mesh = mesh_of(tuple(drawn.axes.items()), scheduler)
    given = {"trials": 1, "in_specs": drawn.spec, **options}
    return check_adjoint(operator or drawn.operator, drawn.shape, mesh=mesh, **given)


# What is right


def run_samples(kind, seeds, scheduler: str) -> None:
    for seed in seeds:
        report = check(sample(kind, seed), scheduler=scheduler, seed=seed, dtype=("f8", "f4", "c16")[seed % 3])
        assert report.passed
        assert report.error == 0
        assert (report.messages, report.bytes) == report.declared, str(report)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_sampled_layouts(kind):
    """Exact equality, F** = F, and the declared cost, on 1 to 12 workers."""
    run_samples(kind, range(15), "lockstep")
    run_samples(kind, range(15, 18), "threads")


@pytest.mark.full
@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_thousands_of_sampled_layouts(kind, scheduler):
    run_samples(kind, range(18, 1000), scheduler)


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.parametrize("seeds", [1, pytest.param(6, marks=pytest.mark.full)])
def test_sampled_layouts_under_mpiexec(seeds):
    ended = launch(PROGRAMS / "adjoints.py", str(seeds), n=4, timeout=240)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.splitlines() == [f"{kind.__name__} {3 * seeds} exact" for kind in OURS]


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_an_adjoint_that_raises_on_some_processes_has_a_report():
    ended = launch(PROGRAMS / "raising_adjoint.py", n=4)
    assert (ended.returncode, ended.stdout) == (0, "one verdict\n"), str(ended)


# Faults


class Spoil:
    """A fault in what a map gives, or in what it takes. `hit`: whether it made a difference on any worker."""

    def __init__(self, name: str):
        self.name = name
        self.hit: list[bool] = []
        self.worker = 0

    def __repr__(self) -> str:
        return self.name

    def before(self, op, group, x):
        if self.name == "overwritten" and op.takes(op.axes[0]) == VARYING and group.index:
            return read_only(np.zeros_like(x))
        return x

    def after(self, op, comm, group, call, y):
        here = comm.worker == self.worker
        z = y.copy()
        flat = z.reshape(-1)
        match self.name:
            case "an entry lost" if here and y.size:
                flat[-1] = 0
            case "a corner lost" if y.size:
                flat[0] = 0
            case "copies counted twice":
                z = 2 * z
            case "the conjugate forgotten":
                z = np.conj(z)
            case "moved within the block":
                z = np.roll(flat, 1).reshape(z.shape)
            case "three times on one worker" if here:
                z = 3 * z
            case "shifted the wrong way" if op.target == VARYING:
                sends, sources = {(group.index + 1) % group.size: y}, [(group.index - 1) % group.size]
                turned = comm.exchange(group, call, sends, sources).wait()
                z = next(iter(turned.values())).copy()
        return read_only(z)


SPOILS = (
    *("an entry lost", "a corner lost", "copies counted twice", "the conjugate forgotten", "moved within the block"),
    *("three times on one worker", "shifted the wrong way", "overwritten"),
)


def spoilt(op: Operator, spoil: Spoil) -> Operator:
    """The operator, with a fault in what it does."""

    class _Spoilt(type(op)):
        def start(self, comm, group, x, call):
            right = super().start(comm, group, x, call)
            handle = super().start(comm, group, spoil.before(self, group, x), call)

            def both(made):
                needed, _ = right.wait()
                block, bound = made
                block = spoil.after(self, comm, group, call, block)
                spoil.hit.append(not np.array_equal(block, needed))
                return block, bound

            return Mapped(handle, both)

    return _made(_Spoilt, op)


def planted(op: Operator, spoil: Spoil) -> Operator:
    """The operator, with a fault in its adjoint."""

    class _Planted(type(op)):
        @property
        def H(self):
            return spoilt(super().H, spoil)

        def defer(self, sweep_state, g, leaf):
            return None  # else the sums for leaves are deferred, and do not use the adjoint

    return _made(_Planted, op)


def _made(kind, op):
    new = object.__new__(kind)
    new.__dict__.update(op.__dict__)
    return new


def run_planted(kind, name: str, seeds, most: int) -> int:
    """The verdict is wrong exactly where the fault made a difference. Gives how often."""
    caught = 0
    for seed in seeds:
        drawn, spoil = sample(kind, seed, most=most), Spoil(name)
        spoil.worker = seed % mesh_of(tuple(drawn.axes.items())).size
        dtype = "c16" if name == "the conjugate forgotten" else "f8"
        given = {"seed": seed, "dtype": dtype, "raises": False, "shrink": seed == 0}
        with pytest.MonkeyPatch.context() as patch:
            if seed % 5:  # Matrices take most of the time.
                patch.setattr(matrices, "UNIT_LIMIT", 0)
                patch.setattr(bisection, "PROBE_LIMIT", 0)
            report = check(drawn, planted(drawn.operator, spoil), **given)
        hit = any(spoil.hit)
        assert report.passed != hit, str(report)
        caught += hit
        if report.kind == "value" and seed % 5 == 0 and report.entries_of and not report.bisected:
            assert report.differing >= 1
            assert len(report.entries) == min(8, report.differing)
            adjoint = drawn.operator.H
            if name in ("an entry lost", "three times on one worker") and adjoint.target == VARYING:
                assert {e.x.worker.split()[1] for e in report.entries} == {str(spoil.worker)}, str(report)
    return caught


NEVER = {
    "shifted the wrong way": "Vary Sum Broadcast Replicate SumReduce Keep Scatter ReduceScatter Slice Unroot Move",
    "overwritten": "Sum Replicate SumReduce Keep Gather Collect Enroot Move",
}
"""What cannot go wrong: where an adjoint gives every worker the same, or takes one value."""


@pytest.mark.parametrize("name", SPOILS)
@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_planted_faults_are_caught_and_located(kind, name):
    """At 5 seeds, on meshes of up to 4 workers."""
    caught = run_planted(kind, name, range(5), 4)
    assert (caught == 0) == (kind.__name__ in NEVER.get(name, "").split())


@pytest.mark.full
@pytest.mark.parametrize("name", SPOILS)
@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_planted_faults_are_caught_on_larger_meshes(kind, name):
    run_planted(kind, name, range(100, 200), 12)


# What shrinking comes to


class _WithoutCorner(HaloExchange):
    """Its adjoint loses the first corner of the halo, where there is one."""

    @property
    def H(self):
        whole = super().H
        return _made(_LosesCorner, whole)


class _LosesCorner(HaloAccumulate):
    def start(self, comm, group, x, call):
        y = x.copy()
        if len(self.widths) == 2 and all(low > 0 for ((low, _),) in self.widths):
            y[(0,) * y.ndim] = 0
        return super().start(comm, group, read_only(y), call)


@pytest.mark.parametrize("axes", [{"x": 2, "y": 2}, {"x": 3, "y": 4}, {"z": 2, "y": 2, "x": 2}], ids=str)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 5), marks=pytest.mark.full)], ids=str)
def test_a_lost_corner_shrinks_to_the_smallest_mesh_shape_and_halo(axes, seeds):
    op = _WithoutCorner(("x", "y"), P("x", "y"), (((2, 1),), ((1, 3),)), "none")
    mesh = mesh_of(tuple(axes.items()))
    for seed in seeds:
        report = check_adjoint(op, (9, 14), mesh=mesh, in_specs=P("x", "y"), seed=seed, raises=False)
        small = report.smallest
        assert report.kind == small.kind == "value"
        assert "widths=(((1, 0),), ((1, 0),))" in small.name
        assert small.shapes == ((1, 1),)
        assert small.mesh in ("Mesh(x=1)", "Mesh(y=1)")
        (entry,) = small.entries
        assert (entry.given, entry.needed, entry.x.local, entry.y.local) == (0, 1, (0, 0), (0, 0))
        with pytest.raises(AssertionError, match="NOT adjoint"):
            exec(small.reproduce, {})
