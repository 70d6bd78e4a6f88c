"""Strategies for hypothesis, and the plugin for pytest."""

from __future__ import annotations

import os
import textwrap

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from launch import ROOT, mpiexec, run_python

import spmd
from spmd import P
from spmd.layout import Layout
from spmd.testing import Halo, arrays, check_adjoint, halos, layouts, meshes, shapes, specs

pytest_plugins = ["pytester"]

AXES = {"x": 2, "y": 3}


# What is drawn


@given(st.data(), meshes())
def test_what_is_drawn_fits_together(data, mesh):
    assert 1 <= mesh.size <= 8
    assert 1 <= len(mesh.axes) <= 3
    assert mesh.transport.name == "local"
    shape = data.draw(shapes())
    spec = data.draw(specs(mesh, len(shape)))
    spec.check(mesh.axes, "test", "spec", len(shape))
    layout = data.draw(layouts(mesh))
    assert layout.axes == mesh.axes
    held = sum(
        np.prod([b - a for a, b in layout.boxes[w]]) for w in {*layout.owners} if layout.positions(w) is not None
    )
    copies = layout.copies == "varying" and layout.has_copies
    assert held >= np.prod(layout.shape) if copies else held == np.prod(layout.shape)
    x = data.draw(arrays(shape))
    assert x.shape == shape
    halo = data.draw(halos(2))
    assert len(halo.widths) == len(halo.boundary) == 2


def found(strategy, condition=lambda x: True):
    return find(strategy, condition, settings=settings(derandomize=True, database=None, max_examples=2000))


@pytest.mark.parametrize(
    ("strategy", "simplest"),
    [
        (meshes(), spmd.Mesh(x=1)),
        (specs(AXES, 2), P()),
        (shapes(), ()),
        (shapes(min_dims=2), (1, 1)),
        (shapes(min_dims=1, min_side=0), (1,)),
        (layouts(AXES), Layout((), P(), AXES)),
        (layouts(AXES, (4, 2)), Layout((4, 2), P(), AXES)),
        (halos(2), Halo(((0, 0), (0, 0)), ("none", "none"))),
    ],
    ids=repr,
)
def test_the_simplest_is_drawn_first(strategy, simplest):
    assert found(strategy) == simplest


@pytest.mark.parametrize(
    ("strategy", "condition", "simplest"),
    [
        (meshes(), lambda m: m.size > 2, {"x": 3}),
        (meshes(), lambda m: len(m.axes) > 1 and m.axes["y"] > 1, {"x": 1, "y": 2}),
        (meshes(), lambda m: m.scheduler == "threads", {"x": 1}),
    ],
)
def test_failures_shrink_to_small_meshes(strategy, condition, simplest):
    assert found(strategy, condition).axes == simplest


def test_failures_shrink_to_readable_layouts():
    assert found(specs(AXES, 2), lambda s: len(s.axes) > 0) == P("y")
    assert found(shapes(), lambda s: np.prod(s) > 3 and len(s) > 1) == (1, 4)
    assert found(shapes(), lambda s: 0 in s) == (0,)
    uneven = found(layouts({"x": 2}, grids=False), lambda s: not s.balanced)
    assert uneven == Layout((1,), P("x"), {"x": 2}, [(0, 1)])
    some = found(layouts({"x": 3}), lambda s: any(s.positions(w) is None for w in range(3)))
    assert some == Layout.grid((), (), {"x": 3}, [0])
    varying = found(layouts({"x": 2}), lambda s: s.copies == "varying" and s.has_copies)
    assert varying == Layout((), P(), {"x": 2}, copies="varying")
    assert found(halos(1), lambda h: sum(map(sum, h.widths)) > 0) == Halo(((0, 1),), ("none",))


def test_failures_are_told_in_readable_words():
    @settings(max_examples=200, derandomize=True, database=None, deadline=None)
    @given(meshes(), arrays(shapes(), kind="distinct"), halos(1))
    def fails(mesh, x, halo):
        assert mesh.size < 3 or x.size < 2

    with pytest.raises(AssertionError) as caught:
        fails()
    said = "".join("".join(caught.value.__notes__).split())
    assert "mesh=make_mesh((3,),('x',),transport='local',scheduler='lockstep'" in said
    assert "x=array([1.,2.])" in said
    assert "halo=Halo(((0,0),),('none',)" in said


def test_all_kinds_of_layouts_are_drawn():
    seen = set()

    @settings(max_examples=400)
    @given(layouts({"x": 2, "y": 2}))
    def look(layout):
        grid = layout.spec is None
        seen.add((grid, layout.balanced, layout.copies, layout.has_copies))
        seen.add(("empty", any(0 in layout.block_shape(w) for w in range(4))))

    look()
    named = {(False, b, c, h) for b in (True, False) for c in ("invariant", "varying") for h in (True, False)}
    assert seen >= named | {(True, b, "varying", h) for b in (True, False) for h in (True, False)}
    assert ("empty", True) in seen


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16", "i4", "u1", "b1"])
def test_arrays(dtype):
    seen = {}

    @settings(max_examples=30)
    @given(st.sampled_from(["integers", "distinct"]), st.data())
    def look(kind, data):
        x = data.draw(arrays((3, 4), dtype, kind))
        assert (x.shape, x.dtype) == ((3, 4), np.dtype(dtype))
        if dtype != "b1":
            assert np.all(x != 0)
            assert np.all(x == np.round(x))
            assert kind == "integers" or len(np.unique(x)) == 12
        seen.setdefault(kind, set()).add(x.tobytes())

    look()
    assert dtype == "b1" or all(len(s) > 3 for s in seen.values())
    assert np.array_equal(found(arrays((2, 2), kind="distinct")), [[1, 2], [3, 4]])


def test_arrays_of_drawn_shapes_and_normal_ones():
    assert found(arrays(shapes(min_dims=1), kind="normal"), lambda x: x.size > 1).shape == (2,)
    with pytest.raises(ValueError, match="needed: one of 'integers', 'normal', 'distinct'"):
        arrays((2,), kind="noise")


@settings(max_examples=30)
@given(st.data(), meshes(max_workers=4))
def test_in_use(data, mesh):
    """A map of one's own on any mesh, split in any way."""
    shape = data.draw(shapes(min_dims=1, max_dims=2))
    spec = data.draw(specs(mesh, len(shape)))
    check_adjoint(lambda x: 2.0 * x, shape, mesh=mesh, in_specs=spec, exact=True, trials=1)


def test_hypothesis_is_imported_when_a_strategy_is_used():
    program = """
        import sys
        sys.modules["hypothesis"] = None
        from spmd.testing import *
        import spmd.testing
        try:
            spmd.testing.meshes
        except ImportError as error:
            print(error)
        print(hasattr(spmd.testing, "nonsense"))
    """
    ended = run_python("-c", textwrap.dedent(program))
    assert ended.returncode == 0, str(ended)
    assert "mend:   pip install hypothesis" in ended.stdout
    assert ended.stdout.endswith("False\n")


# The plugin

TESTS = """
    import numpy as np
    import pytest
    import spmd
    from spmd import P


    def total(mesh):
        return float(spmd.map(lambda x: spmd.sum(x, tuple(mesh.axes)), P(tuple(mesh.axes)), P())(np.arange(24.0)))


    def test_default(mesh):
        assert total(mesh) == 276


    @pytest.mark.spmd(workers=[1, 3, {"x": 2, "y": 2}], schedulers=["lockstep"])
    def test_marked(mesh):
        assert total(mesh) == 276
        assert mesh.scheduler in ("lockstep", "auto")


    @pytest.mark.spmd(workers=[2])
    def test_wrong(mesh):
        @spmd.map(in_specs=P("x"), out_specs=P(), mesh=mesh)
        def body(x):
            assert spmd.worker_index("x") != 1, f"worker 1 is of {mesh.transport.name}"
            return spmd.sum(x, "x")

        body(np.ones(4))


    class TestOwn:
        @pytest.fixture
        def mesh(self):
            return "mine"

        def test_mine(self, mesh):
            assert mesh == "mine"


    def test_none():
        pass
"""


BY_POSITION = """
    import pytest

    @pytest.mark.spmd([2, 3], ["threads"])
    def test_by_position(mesh):
        assert mesh.size in (2, 3)
"""

AXES_OF_A_MARK = """
    import pytest

    @pytest.mark.spmd(workers=[{"y": 3, "z": 2}])
    def test_axes(mesh):
        assert list(mesh.axes) == ["y", "z"]
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """Starting pytest takes longer than these tests do, so one run has many of them."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    pytester.makeconftest(
        'pytest_plugins = ["spmd.pytest_plugin"]\n'
        'pytest_report_header = lambda config: [f"mark: {mark}" for mark in config.getini("markers")]'
    )
    pytester.makepyfile(test_it=TESTS)
    return pytester


def test_the_plugin_runs_tests_on_meshes(project):
    project.makepyfile(test_more=BY_POSITION)
    ended = project.runpytest_subprocess("-v", "--strict-markers", "-p", "no:cacheprovider")
    ended.assert_outcomes(passed=8 + 3 + 2 + 2, failed=2)
    said = str(ended.stdout)
    assert "mark: spmd(workers=[1, 2, 4, 8], schedulers=['lockstep', 'threads'])" in said
    assert "test_default[lockstep-x=1] PASSED" in said
    assert "test_default[threads-x=8] PASSED" in said
    assert "test_marked[lockstep-x=2,y=2] PASSED" in said
    assert "test_by_position[threads-x=2] PASSED" in said
    assert "test_by_position[threads-x=3] PASSED" in said
    assert "mpi-" not in said


WRONG_MARKS = {
    "wokers=[3]": "'wokers'",
    "workers=[{'x': 2, 'y': 0}]": "{'x': 2, 'y': 0}",
    "workers=[2], schedulers=['mpi']": "'mpi'",
    "[2], ['threads'], 3": "3",
}


def test_a_wrong_mark_is_explained(project):
    tests = {
        f"test_{k}": f"import pytest\n@pytest.mark.spmd({mark})\ndef test_it(mesh): pass\n"
        for k, mark in enumerate(WRONG_MARKS)
    }
    project.makepyfile(**tests)
    ended = project.runpytest_subprocess("-p", "no:cacheprovider")
    ended.assert_outcomes(errors=len(tests))
    assert ended.ret != 0
    said = str(ended.stdout)
    for name, got in zip(tests, WRONG_MARKS.values(), strict=True):
        at = f"{name}.py::test_it"
        assert f"@pytest.mark.spmd of {at}: got {got}, needed workers=[1, 3, {{'x': 2, 'y': 2}}]" in said
    assert "Traceback" not in said


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_plugin_runs_tests_under_mpiexec(project):
    project.makepyfile(test_more=AXES_OF_A_MARK)
    ended = project.runpytest_subprocess("-v", "-k", "mpi and not default", "--spmd-mpi=2", "-p", "no:cacheprovider")
    ended.assert_outcomes(passed=2, failed=1, deselected=18)
    said = str(ended.stdout)
    assert "test_marked[mpi-x=2] PASSED" in said
    assert "test_axes[mpi-y=2,z=1] PASSED" in said
    assert "test_wrong[mpi-x=2] FAILED" in said
    assert "worker 1 is of mpi" in said
    assert "process 1 of 2:" in said


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_a_job_that_hangs_is_ended(project):
    project.makepyfile(
        test_it="""
        import time

        def test_slow(mesh):
            time.sleep(600)
        """
    )
    limited = ("--spmd-mpi=2", "--spmd-mpi-timeout=3", "-k", "mpi", "-p", "no:cacheprovider")
    ended = project.runpytest_subprocess(*limited, timeout=60)
    ended.assert_outcomes(failed=1, deselected=8)
    ended.stdout.fnmatch_lines(["*did not end within 3 seconds (--spmd-mpi-timeout)*"])
