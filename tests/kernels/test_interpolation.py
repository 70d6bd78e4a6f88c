"""Interpolation: the kernels against their references, and the functions over them."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import FLOATING, NUMBERS, Family

import spmd
from spmd import P
from spmd.errors import SpecError
from spmd.functions import inject, plan_resize, resample, resize, sample
from spmd.kernels.taps import BOUNDARIES, METHODS, RESIZE_METHODS, resize_taps, transposed

family = Family("interpolation")


def along(draw):
    shape = (*draw.shape(0, 2), draw.integer(1, 7), *draw.shape(0, 2, 5))
    axis = next(a for a in range(len(shape)) if shape[a] > 0)
    n, m = shape[axis], draw.integer(0, 20)
    index, weight = resize_taps(
        n, m, draw.choose(*RESIZE_METHODS), draw.choose(False, True), draw.choose(False, True), draw.choose(-0.5, -0.75)
    )
    if draw.choose(False, True):
        shape = (*shape[:axis], m, *shape[axis + 1 :])
        index, weight = transposed(index, weight, n)
    return draw.array(shape), index, weight, axis


def at_points(draw):
    d = draw.integer(1, 3)
    shape = tuple(draw.integer(0, 6) for _ in range(d))
    points = draw.array((draw.integer(0, 9), d), draw.choose(np.float64, np.float32), low=-9, high=14)
    kind = draw.choose("plain", "grid", "odd")
    if kind == "grid":
        points = np.round(2 * points) / 2
    elif kind == "odd" and points.size:
        points = points.copy()
        points[0] = draw.rng.choice([np.nan, np.inf, -np.inf, 1e38, -1e17, 3.0], d).astype(points.dtype)
    orders = tuple(draw.integer(0, 2) for _ in range(d)) if draw.choose(True, False) else (0,) * d
    return shape, points, (draw.choose(*METHODS), draw.choose(*BOUNDARIES), orders, draw.choose(-0.5, -0.75))


def sampled(draw):
    shape, points, options = at_points(draw)
    return draw.array((draw.integer(0, 2), *shape)), points, *options


def injected(draw):
    shape, points, options = at_points(draw)
    return draw.array((draw.integer(0, 2), len(points))), points, shape, *options


EVERY = (*FLOATING, *NUMBERS[2:])
family.case("resample", along, dtypes=EVERY, scale=20)
family.case("sample", sampled, dtypes=EVERY, scale=300)
family.case("inject", injected, dtypes=EVERY, scale=600)

TestKernels = family.tests()


# Functions

SHAPES = [(9, 13), (3, 4), (7, 12), (14, 2), (1, 1)]


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES)
def test_resize_is_torchs(shape):
    import torch

    x = np.random.default_rng(0).normal(size=(2, 3, 7, 6))
    theirs = torch.tensor(x, requires_grad=True)
    for mode, method, corners in (
        ("nearest", "nearest", False),
        ("nearest-exact", "nearest-exact", False),
        ("area", "area", False),
        ("bilinear", "linear", False),
        ("bilinear", "linear", True),
        ("bicubic", "cubic", False),
        ("bicubic", "cubic", True),
    ):
        options = {"align_corners": corners} if method in ("linear", "cubic") else {}
        y = torch.nn.functional.interpolate(theirs, shape, mode=mode, **options)
        (gradient,) = torch.autograd.grad(y.square().sum(), theirs)

        def ours(x, method=method, corners=corners):
            return resize(x, (2, 3, *shape), method, align_corners=corners, cubic=-0.75)

        np.testing.assert_allclose(ours(x), y.detach(), atol=1e-14)
        np.testing.assert_allclose(spmd.grad(lambda x, f=ours: np.sum(f(x) ** 2))(x), gradient, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_resize_with_antialias_is_jaxs(shape):
    jax = pytest.importorskip("jax")
    x = np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)
    for method, ours in (("nearest", "nearest-exact"), ("linear", "linear"), ("cubic", "cubic")):
        theirs = jax.image.resize(x, (2, *shape), method)
        np.testing.assert_allclose(resize(x, (2, *shape), ours, antialias=True), theirs, atol=1e-5)


def test_derivatives_of_resize():
    x = np.random.default_rng(0).normal(size=(3, 5, 2))
    for method in RESIZE_METHODS:
        spmd.check_grads(lambda x, m=method: resize(x, (4, 3, 2), m) ** 2, (x,), modes=("fwd", "rev"))
        spmd.check_grads(lambda x, m=method: resize(x, (3, 9, 7), m, antialias=True), (x + 1j * x,))
    assert resize(x.astype("f4"), (6, 5, 2)).dtype == np.float32


@pytest.mark.parametrize("method", RESIZE_METHODS)
@pytest.mark.parametrize(("n", "m"), [(11, 25), (11, 6), (3, 8), (9, 2)])
def test_blocks_with_the_needed_halo_resize_as_the_whole(method, n, m, scheduler):
    mesh = spmd.Mesh(rows=4, scheduler=scheduler)
    spec = P("rows")
    x = np.random.default_rng(n).normal(size=(n, 3))
    taps = plan_resize(n, m, method)
    lies = mesh.layout(x.shape, spec)
    plan = spmd.plan_needs(n, m, taps.needs, inputs=lies.cuts[0])

    def local(x):
        x = spmd.halo_exchange(x, spec, (plan.halos,), "none", sizes=lies.cuts)
        k = spmd.worker_index("rows")
        return resample(x, taps.part(plan.output_bounds[k], plan.needs[k]), axis=0)

    actual = mesh.map(local, in_specs=spec, out_specs=spec)(x)
    np.testing.assert_allclose(actual.numpy(), resize(x, (m, 3), method), atol=1e-14)
    energy = mesh.map(lambda x: spmd.sum(np.sin(local(x)), "rows"), in_specs=spec, out_specs=P())
    serial = spmd.grad(lambda x: np.sum(np.sin(resize(x, (m, 3), method))))(x)
    np.testing.assert_allclose(np.asarray(spmd.grad(energy)(x)), serial, atol=1e-13)


SCIPY = {"zero": "grid-constant", "edge": "nearest", "periodic": "grid-wrap", "reflect": "mirror"}


@pytest.mark.parametrize("boundary", SCIPY)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_sample_is_scipys(boundary, d):
    scipy = pytest.importorskip("scipy.ndimage")
    rng = np.random.default_rng(d)
    x, points = rng.normal(size=(2, *(5, 6, 4)[:d])), rng.uniform(-9, 14, size=(7, 5, d))
    theirs = [scipy.map_coordinates(c, np.moveaxis(points, -1, 0), order=1, mode=SCIPY[boundary]) for c in x]
    np.testing.assert_allclose(sample(x, points, "linear", boundary), theirs, atol=1e-13)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_cubic_samples_at_halves_are_those_of_resize(boundary):
    """Between entries far from the ends, and any polynomial of degree 2 everywhere inside."""
    x = np.random.default_rng(0).normal(size=(1, 12))
    places = (np.arange(24) + 0.5) / 2 - 0.5
    inner = slice(4, -4)
    actual = sample(x, places[:, None], "cubic", boundary, cubic=-0.75)[:, inner]
    np.testing.assert_allclose(actual, resize(x, (1, 24), "cubic", cubic=-0.75)[:, inner], atol=1e-14)
    i = np.arange(12.0)
    square = sample(i**2 - 3 * i, places[inner, None], "cubic", boundary)
    np.testing.assert_allclose(square, places[inner] ** 2 - 3 * places[inner], atol=1e-12)


@pytest.mark.parametrize("method", ["linear", "cubic"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_derivatives_by_field_values_and_points(method, boundary):
    rng = np.random.default_rng(0)
    for d in (1, 2):
        shape = (5, 4)[:d]
        x, points = (
            rng.normal(size=(2, *shape)),
            np.array([0.3, 4.6, -0.7, 2.2, 1.45, 3.8])[:, None] + rng.random(d) / 9,
        )
        values = rng.normal(size=(2, 6))
        f = lambda x, p: np.sin(sample(x, p, method, boundary))
        h = lambda v, p, shape=shape: np.sin(inject(v, p, shape, method, boundary))
        for g, args in ((f, (x, points)), (h, (values, points))):
            spmd.check_grads(g, args, modes=("fwd", "rev"))
    spmd.check_grads(lambda x, p: sample(x, p, method, boundary), (x + 1j * x[::-1], points))


def test_nearest_has_no_slope_and_the_adjoint_adds_in_order():
    x, points = np.arange(5.0), np.array([[0.4], [3.6], [0.5], [-0.6]])
    assert sample(x, points, "nearest", "edge").tolist() == [0, 4, 1, 0]
    assert spmd.grad(lambda p: np.sum(sample(x, p, "nearest")))(points).ravel().tolist() == [0, 0, 0, 0]
    assert inject(np.arange(1.0, 5), points, (5,), "nearest", "edge").tolist() == [5, 3, 0, 0, 2]


def test_a_point_that_is_no_number_has_no_value():
    points = np.array([[np.nan], [np.inf], [-np.inf], [1e300]])
    for method in ("nearest", "linear", "cubic"):
        for boundary in BOUNDARIES:
            actual = sample(np.ones(5), points, method, boundary)
            assert np.isnan(actual[:3]).all()
            assert np.isfinite(actual[3])
    assert sample(np.ones((2, 0)), np.ones((3, 1))).tolist() == [[0] * 3] * 2


def receivers(x, points):
    return np.sum(np.sin(sample(x, points, "cubic", "reflect")))


def test_points_in_a_body_on_uneven_and_empty_blocks(scheduler):
    """Each worker has some of the receivers of a field that all have; the gradient is their sum."""
    rng = np.random.default_rng(0)
    mesh = spmd.Mesh(data=4, scheduler=scheduler)
    for m in (7, 3):
        x, points = rng.normal(size=(2, 5, 6)), rng.uniform(0, 5, size=(m, 2))
        total = mesh.map(lambda x, p: spmd.psum(receivers(x, p), "data"), in_specs=(P(), P("data")), out_specs=P())
        actual = spmd.grad(total, argnums=(0, 1))(x, points)
        for ours, serial in zip(actual, spmd.grad(receivers, argnums=(0, 1))(x, points), strict=True):
            np.testing.assert_allclose(np.asarray(ours), serial, atol=1e-13)
        slopes = lambda p, x=x: spmd.grad(receivers, argnums=1)(x, p)
        second = lambda p, slopes=slopes: spmd.grad(lambda p: np.sum(slopes(p) ** 2))(p)
        in_body = mesh.map(second, in_specs=P("data"), out_specs=P("data"))(points)
        np.testing.assert_allclose(in_body.numpy(), second(points), atol=1e-12)


def test_what_does_not_fit_is_told():
    x, points = np.zeros((4, 5)), np.zeros((3, 2))
    for call, words in (
        (lambda: resize(x, (4,)), "argument shape.*2 lengths"),
        (lambda: resize(x[:0], (4, 5)), "argument shape.*empty axis"),
        (lambda: resize(x, (8, 5), "bilinear"), "argument method.*'linear', 'cubic', 'area'.*method='linear'"),
        (lambda: resize(x, (8, 5), align_corners=True, antialias=True), "argument antialias"),
        (lambda: resize(x.astype(int), (8, 5)), "argument x.*floating"),
        (lambda: resize(x, (8, 5), "cubic", cubic="keys"), "argument cubic"),
        (lambda: plan_resize(0, 5), "argument n.*at least 1"),
        (lambda: resample(x, plan_resize(4, 5)), "argument x.*the length 4"),
        (lambda: plan_resize(8, 16).part((0, 8), (2, 6)), "argument inputs.*0:5.*plan_needs"),
        (lambda: sample(x, np.zeros((3, 4))), "argument points.*1 to 3 spatial"),
        (lambda: sample(x, points.astype("f2")), "argument points.*float32 or float64"),
        (lambda: sample(x, points, boundary="wrap"), "argument boundary.*'periodic'"),
        (lambda: sample(x[:0], points, boundary="edge"), "argument x.*boundary 'edge'.*\"zero\""),
        (lambda: inject(np.zeros(2), points, (4, 5)), "argument values.*a value for every point"),
        (lambda: inject(np.zeros(3), points, (4,)), "argument shape.*2 dimensions"),
    ):
        with pytest.raises(SpecError, match=f"(?s){words}"):
            call()
