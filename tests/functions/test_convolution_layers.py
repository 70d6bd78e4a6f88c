"""`functions.conv` and `conv_transpose` on arrays that lie anyhow, against those of the whole on one worker."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, integers, random_layout, random_mesh
from functions.test_convolution import MODES, whole
from spmd import P, functions
from spmd.functions.convolution import _conv_plan, _transpose_plan
from spmd.functions.convolution_plans import bias_layout
from spmd.layout import Layout


class Case(NamedTuple):
    """A convolution of random arrays of these shapes. options: of both functions; boundary: of `conv` alone."""

    shape: tuple[int, ...]
    filters: tuple[int, ...]
    options: dict[str, Any]
    boundary: Any = "zero"
    transposed: bool = False


def random_case(rng: np.random.Generator, transposed: bool) -> Case:
    dims = int(rng.integers(1, 4))
    each = lambda low, high: tuple(rng.integers(low, high, dims).tolist())
    groups = int(rng.choice([1, 1, 2, 3, 4]))
    inputs, results = rng.integers(0 if rng.random() < 0.1 else 1, 4, 2).tolist()
    kernel, stride, dilation = each(1, 4), each(1, 4), each(1, 3)
    lengths = each(1, 12 if dims == 1 else 7 if dims == 2 else 5)
    n = int(rng.integers(0 if rng.random() < 0.1 else 1, 4))
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups}
    if transposed:
        extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        most = [(m - 1) * s + e for m, s, e in zip(lengths, stride, extents, strict=True)]
        pads = [(int(rng.integers(-1, 3)), int(rng.integers(-1, 3))) for _ in most]
        options["padding"] = tuple(p if m - sum(p) >= 0 else (0, 0) for p, m in zip(pads, most, strict=True))
        extra = zip(stride, dilation, strict=True)
        options["output_padding"] = tuple(int(rng.integers(0, max(s, d))) for s, d in extra)
        shape = (n, groups * inputs, *lengths), (groups * inputs, results, *kernel)
        return Case(*shape, options, transposed=True)
    boundary = rng.choice([*MODES, "zero", "zero"]) if min(lengths) > 2 else "zero"
    pads = [(int(rng.integers(-1, 3)), int(rng.integers(-1, 3))) for _ in lengths]
    options["padding"] = "SAME" if rng.random() < 0.2 and boundary == "zero" else tuple(pads)
    return Case((n, groups * inputs, *lengths), (groups * results, inputs, *kernel), options, str(boundary))


def serial(case: Case, x, w, bias):
    if case.transposed:
        return functions.conv_transpose(x, w, bias, **case.options)
    y = whole(x, w, case.options, case.boundary)
    return y if bias is None else y + bias.reshape(-1, *(1,) * (y.ndim - 2))


def layout_by(mesh: spmd.Mesh, spec: P | Layout, shape: tuple[int, ...]) -> Layout:
    return spec if isinstance(spec, Layout) else mesh.layout(shape, spec)


def plan_of(case: Case, mesh: spmd.Mesh, spec, w_spec, out_spec) -> Any:
    """The plan of a case, and the layout of its bias."""
    x, w = layout_by(mesh, spec, case.shape), layout_by(mesh, w_spec, case.filters)
    bias = bias_layout(w, case.options["groups"], case.transposed)
    dims = len(case.shape) - 2
    options = dict(case.options)
    extra = options.pop("output_padding", None)
    plain = options["stride"], options["padding"], options["dilation"], options["groups"]
    if case.transposed:
        return _transpose_plan("test", x, w, bias, out_spec, (), plain, extra)
    return _conv_plan("test", x, w, bias, out_spec, (), plain, (case.boundary,) * dims)


def check(case: Case, mesh: spmd.Mesh, spec, w_spec, out_spec, rng, torch: bool, biased: bool = True) -> None:
    plan = plan_of(case, mesh, spec, w_spec, out_spec)
    x, w, bias = integers(rng, case.shape), integers(rng, case.filters), integers(rng, plan.shape[1:2])
    g = integers(rng, plan.shape)
    args, specs = [x, w], [spec, w_spec]
    if biased:
        args, specs = [*args, bias], [*specs, plan.bias]
    name = "conv_transpose" if case.transposed else "conv"
    more = {} if case.transposed else {"boundary": case.boundary}

    def fun(x, w, b=None):
        layer = getattr(functions, name)
        return layer(x, w, b, **case.options, **more, spec=spec, w_spec=w_spec, out_spec=out_spec)

    def in_global(x, w, b=None):
        return getattr(functions, name)(x, w, b, **case.options, **more, out_spec=out_spec)

    value, pullback = spmd.vjp(lambda x, w, b=None: serial(case, x, w, b), *args)
    check_layer(fun, (value, pullback(g)), args, specs, plan.out, mesh, g, in_global=in_global, torch=torch)


def check_seed(seed: int, transposed: bool, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh, case = random_mesh(rng), random_case(rng, transposed)
    spec, w_spec = random_layout(rng, case.shape, mesh), P()
    if rng.random() < 0.7:
        w_spec = random_layout(rng, case.filters, mesh, whole=range(2, len(case.filters)) if rng.random() < 0.8 else ())
    whole_plan = plan_of(case, mesh, P(), P(), None)
    out_spec = random_layout(rng, whole_plan.shape, mesh) if rng.random() < 0.6 else None
    check(case, mesh, spec, w_spec, out_spec, rng, torch, biased=rng.random() < 0.8)


LAYERS = pytest.mark.parametrize("transposed", [False, True], ids=["conv", "conv_transpose"])


@FRONTENDS
@LAYERS
@pytest.mark.parametrize("seed", range(25))
def test_any_layouts(seed, transposed, torch):
    check_seed(seed, transposed, torch)


@pytest.mark.full
@FRONTENDS
@LAYERS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, transposed, torch):
    check_seed(seed, transposed, torch)
