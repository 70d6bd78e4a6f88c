"""Convolutions of arrays in blocks, `functions.conv(spec=)`, against the convolution of the whole."""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import convolving

import spmd
from spmd import P, functions
from spmd.errors import LayoutError, SpecError
from spmd.functions.window_parts import plan_parts
from spmd.layout import Layout
from spmd.window import plan_window

MODES = {"zero": "constant", "periodic": "wrap", "reflect": "reflect", "edge": "edge"}


class Problem(NamedTuple):
    """A convolution, and the blocks that its input lies in: cuts of each dimension, or None where they are balanced."""

    axes: dict[str, int]
    spec: P
    shape: tuple[int, ...]
    filters: tuple[int, ...]
    options: dict[str, Any]
    cuts: tuple[Any, ...]
    boundary: Any
    dtype: str
    seed: int


@st.composite
def problems(draw) -> Problem:
    dims = draw(st.integers(1, 3))
    axes = {name: draw(st.integers(1, 3)) for name in "xyz"[: draw(st.integers(1, 2 if dims < 3 else 3))]}
    # Each axis splits the batch or a spatial dimension.
    where = {name: draw(st.sampled_from([0, *range(2, 2 + dims)])) for name in axes}
    names = [tuple(n for n in axes if where[n] == d) or None for d in range(2 + dims)]
    groups = draw(st.sampled_from([1, 1, 2]))
    channels, count = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel = [draw(st.integers(1, 4)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    boundary = draw(st.sampled_from(["zero", "zero", "zero", *MODES]))
    lengths = [draw(st.integers(3 if boundary != "zero" else 1, 13 if dims < 3 else 6)) for _ in range(dims)]
    padding = [(draw(st.integers(-1, 2)), draw(st.integers(-1, 2))) for _ in range(dims)]
    shape = (draw(st.integers(1, 3)), channels, *lengths)
    options = {
        "stride": [draw(st.integers(1, 3)) for _ in range(dims)],
        "padding": draw(st.sampled_from(["SAME", "VALID", padding, padding])),
        "dilation": dilation,
        "groups": groups,
    }
    cuts = []
    for d, n in enumerate(shape):
        parts = int(np.prod([axes[a] for a in names[d] or ()]))
        ends = sorted(draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1)))
        uneven = tuple(b - a for a, b in itertools.pairwise([0, *ends, n]))
        cuts.append(draw(st.sampled_from([None, uneven])) if d != 1 and parts > 1 else None)
    dtype = draw(st.sampled_from(["f4", "f8", "c16", "f2"]))
    seed = draw(st.integers(0, 99))
    return Problem(
        axes, P(*names), shape, (count, channels // groups, *kernel), options, tuple(cuts), boundary, dtype, seed
    )


def integers(rng, shape, dtype) -> np.ndarray:
    x = rng.integers(-3, 4, shape)
    return (x + 1j * rng.integers(-3, 4, shape) if dtype == "c16" else x).astype(dtype)


def whole(x, w, options, boundary):
    """The convolution in one piece; what is beyond the ends is put there by hand."""
    if boundary == "zero":
        return functions.conv(x, w, **options)
    like = {**options, "padding": "VALID"}
    if options["padding"] == "VALID":
        return functions.conv(x, w, **like)
    pads = options["padding"]
    if pads == "SAME":
        pads = []
        for n, k, s, r in zip(x.shape[2:], w.shape[2:], options["stride"], options["dilation"], strict=True):
            more = max(0, (-(-n // s) - 1) * s + (k - 1) * r + 1 - n)
            pads.append((more // 2, more - more // 2))
    ends = [(0, 0), (0, 0), *((max(low, 0), max(high, 0)) for low, high in pads)]
    x = np.pad(x, ends, MODES[boundary])
    inside = [slice(max(-low, 0), n - max(-high, 0)) for (low, high), n in zip(pads, x.shape[2:], strict=True)]
    return functions.conv(x[:, :, *inside], w, **like)


def check(problem: Problem, scheduler: str, given_shape: bool = False) -> None:
    """Integers: no room for roundings."""
    axes, spec, shape, filters, options, cuts, boundary, dtype, seed = problem
    rng = np.random.default_rng(seed)
    mesh = spmd.Mesh(**axes, scheduler=scheduler)
    source = Layout(shape, spec, mesh.axes, cuts)
    x, w = integers(rng, shape, dtype), integers(rng, filters, dtype)
    expected = whole(x, w, options, boundary)
    g = integers(rng, expected.shape, dtype)
    extra = {"shape": shape} if given_shape and not any(cuts) else {}

    def body(x, w):
        return functions.conv(x, w, **options, spec=spec, boundary=boundary, **extra)

    placed = spmd.put(x, source, mesh=mesh)
    found = mesh.map(body, in_specs=(source, P()), out_specs=spec)(placed, w)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.numpy(), expected)
    bare = mesh.map(body, in_specs=(source, P()), out_specs=spec, check=False)(placed, w)
    np.testing.assert_array_equal(bare.numpy(), expected)

    def local(x, w, g):
        return spmd.psum(np.real(np.sum(body(x, w) * g)), tuple(axes))

    like = Layout(expected.shape, spec, mesh.axes, (cuts[0], *[None] * (len(shape) - 1)))  # the batch stays as it is
    products = mesh.map(local, in_specs=(source, P(), like), out_specs=P())
    gradients = spmd.grad(products, (0, 1))(placed, w, spmd.put(g, like, mesh=mesh))
    serial = spmd.grad(lambda x, w: np.real(np.sum(whole(x, w, options, boundary) * g)), (0, 1))(x, w)
    for ours, theirs in zip(gradients, serial, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), theirs)


def reaches(problem: Problem) -> bool:
    """Whether no array of length 0 is continued, nor reflected further than it goes, which is an error of its own."""
    return problem.boundary == "zero" or all(n > 2 for n in problem.shape[2:])


@settings(max_examples=30)
@given(problem=problems())
def test_blocks_of_any_convolution_and_its_gradients(problem, scheduler):
    if reaches(problem):
        check(problem, scheduler)


@pytest.mark.full
@settings(max_examples=3000)
@given(problem=problems(), given_shape=st.booleans())
def test_many_convolutions(problem, given_shape, scheduler):
    if reaches(problem):
        check(problem, scheduler, given_shape)


SPEC = P(None, None, "x")


def test_second_derivatives_and_tangents(scheduler):
    rng = np.random.default_rng(0)
    x, w, u, v = (rng.standard_normal(s) for s in ((1, 2, 7), (2, 2, 3), (1, 2, 7), (2, 2, 3)))
    mesh = spmd.Mesh(x=3, scheduler=scheduler)

    def local(x, w):
        return spmd.psum(np.sum(np.sin(functions.conv(x, w, padding=1, spec=SPEC))), "x")

    def serial(x, w):
        return np.sum(np.sin(functions.conv(x, w, padding=1)))

    loss = mesh.map(local, in_specs=(SPEC, P()), out_specs=P())
    spmd.check_grads(loss, (x, w), order=2)
    np.testing.assert_allclose(spmd.jvp(loss, (x, w), (u, v))[1], spmd.jvp(serial, (x, w), (u, v))[1])
    for f in (lambda x, w: spmd.checkpoint(local)(x, w), local):
        along = spmd.hvp(mesh.map(f, in_specs=(SPEC, P()), out_specs=P()), (x, w), (u, v))
        for ours, theirs in zip(along, spmd.hvp(serial, (x, w), (u, v)), strict=True):
            np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-12)


def test_it_is_linear_in_the_image_and_its_adjoint_is_that(scheduler):
    w = np.random.default_rng(0).integers(-3, 4, (2, 3, 3, 2)).astype(float)
    spec = P(None, None, "x", "y")
    mesh = spmd.Mesh(x=2, y=3, scheduler=scheduler)

    def body(x):
        return functions.conv(x, w, padding=1, stride=(1, 2), spec=spec)

    spmd.check_adjoint(body, (2, 3, 9, 13), mesh=mesh, in_specs=spec, out_specs=spec)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("check", [True, False])
def test_copies_of_an_image_are_blocks_as_any_others(check, workers, scheduler):
    """Each worker has the same block; its faces differ from those of the others, and so do their cotangents."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(-3, 4, (1, 2, 5)).astype(float), rng.integers(-3, 4, (2, 2, 3)).astype(float)
    g = rng.integers(-3, 4, (1, 2, 5 * workers)).astype(float)
    mesh = spmd.Mesh(x=workers, scheduler=scheduler)

    def local(x, w, g):
        x = spmd.pvary(x, "x")  # without it the spec contradicts that all workers have one value
        return spmd.psum(np.sum(functions.conv(x, w, padding=1, spec=SPEC) * g), "x")

    def serial(x, w):
        return np.sum(functions.conv(np.concatenate([x] * workers, 2), w, padding=1) * g)

    loss = mesh.map(local, in_specs=(P(), P(), SPEC), out_specs=P(), check=check)
    found = spmd.grad(loss, (0, 1))(x, w, g)
    for ours, theirs in zip(found, spmd.grad(serial, (0, 1))(x, w), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)


@pytest.mark.parametrize("mode", ["mutation", "nans", "replicas"])
def test_what_debugging_looks_at(mode):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 3, 3))
    local = lambda x, w: spmd.psum(np.sum(functions.conv(x, w, padding=1, spec=SPEC) ** 2), "x")
    loss = spmd.Mesh(x=2).map(local, in_specs=(SPEC, P()), out_specs=P())
    with spmd.debug(**{mode: True}):
        found = spmd.grad(loss, (0, 1))(x, w)
    expected = spmd.grad(lambda x, w: np.sum(functions.conv(x, w, padding=1) ** 2), (0, 1))(x, w)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs)


@pytest.mark.parametrize("known", [False, True])
def test_only_edges_are_sent(known):
    """To each neighbour one message of the rows that it needs, and back; nothing else but the sum."""
    shape, w = (2, 3, 64, 16), np.ones((5, 3, 3, 3), np.float32)
    x = np.ones(shape, np.float32)
    mesh = spmd.Mesh(x=4)
    body = lambda x, w: functions.conv(x, w, padding=1, spec=SPEC, **({"shape": shape} if known else {}))
    forward = mesh.map(body, in_specs=(SPEC, P()), out_specs=SPEC)
    loss = mesh.map(lambda x, w: spmd.psum(np.sum(body(x, w)), "x"), in_specs=(SPEC, P()), out_specs=P())
    forward(x, w)
    with spmd.ledger() as log:
        forward(x, w)
    rows = [1, 2, 2, 1]  # a worker at an end has one neighbour
    row = 2 * 3 * 16 * 4
    assert [log.workers[k].messages for k in range(4)] == rows
    assert [log.workers[k].bytes for k in range(4)] == [n * row for n in rows]
    assert ("shapes" in log.verbs) is not known
    with spmd.ledger() as log:
        spmd.grad(loss, (0, 1))(x, w)
    once = {"HaloExchange": 1, "HaloAccumulate": 1, "Sum": 2}  # of the loss, and of the filters' gradient
    assert {name: n for name, n in log.operators.items() if n and name != "Vary"} == once


def test_no_block_is_copied_to_have_a_halo(monkeypatch):
    """What gets a halo are both faces of a block."""
    from spmd.operators import halo, halo_combine

    made, make, place = [], halo.empty, halo_combine.ResultBuffer.place
    for module in halo, halo_combine:
        monkeypatch.setattr(module, "empty", lambda shape, like: made.append(shape) or make(shape, like))
    monkeypatch.setattr(
        halo_combine.ResultBuffer, "place", lambda self, *arguments: made.append(self.shape) or place(self, *arguments)
    )
    mesh, spec = spmd.Mesh(x=3, y=2, scheduler="lockstep"), P(None, None, "x", "y")
    x, w = np.ones((1, 1, 90, 200)), np.ones((1, 1, 3, 5))
    body = lambda x, w: functions.conv(x, w, padding=(1, 2), spec=spec)
    mesh.map(body, in_specs=(spec, P()), out_specs=spec)(x, w)
    assert {shape[2:] for shape in made} == {(2, 102), (4, 102), (30, 4)}


@pytest.mark.parametrize(
    ("lengths", "kernel", "stride", "apart"),
    [
        ((5, 5), 3, 1, True),
        ((5, 0, 5), 3, 1, True),
        ((5, 0, 5), 7, 1, False),  # beyond the empty block
        ((2, 2, 2), 7, 1, False),
        ((1, 9, 2), 3, 3, True),
        ((9, 1, 1), 3, 3, False),  # the last outputs are made of what the first block has
    ],
)
def test_when_slabs_are_enough(lengths, kernel, stride, apart):
    """Where each block needs those next to it alone, and sees or borders its own."""
    window = plan_window(sum(lengths), kernel, stride=stride, padding=1, inputs=lengths)
    plan = plan_parts((window,), (0,))
    assert (plan.slabs is not None) is apart


# Errors


def refused(error, match, shape_of=None, **options):
    x, w = np.ones((2, 4, 8)), np.ones((2, 4, 3))
    options |= {} if shape_of is None else {"shape": shape_of}
    body = lambda x: functions.conv(x, w, **options)
    with pytest.raises(error, match=match):
        spmd.Mesh(x=2).map(body, in_specs=SPEC, out_specs=SPEC)(x)


def test_errors_say_what_to_write():
    refused(SpecError, r"argument spec(.|\n)*a spec or a Layout", spec="x")
    refused(
        SpecError, r"argument boundary(.|\n)*'none'(.|\n)*zero, periodic, reflect, edge", spec=SPEC, boundary="none"
    )
    refused(SpecError, r"argument boundary(.|\n)*each of the 1 spatial", spec=SPEC, boundary=("zero", "zero"))
    refused(SpecError, r"argument boundary(.|\n)*a spec beside it", boundary="periodic")
    refused(SpecError, r"argument shape(.|\n)*a spec beside it", shape_of=(2, 4, 8))
    refused(LayoutError, r"argument x(.|\n)*shape \[2, 4, 5\](.|\n)*leave shape out", spec=SPEC, shape_of=(2, 4, 10))
    refused(SpecError, "'z'", spec=P(None, None, "z"))


def test_outside_of_a_body_it_says_so():
    with pytest.raises(Exception, match=r"spmd\.functions\.conv"):
        functions.conv(np.ones((1, 1, 4)), np.ones((1, 1, 3)), spec=SPEC)


# Under mpiexec


@each_mpi
def test_processes_give_the_bits_of_virtual_workers(python):
    ended = launch(PROGRAMS / "convolving.py", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert json.loads(ended.stdout) == convolving.results(transport="local", scheduler="threads")
