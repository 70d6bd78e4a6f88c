"""Norms of arrays that lie anyhow, against torch's on one worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import DEVICE
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import norms_and_losses

import spmd
from functions.layer_cases import check_layer, random_layout, random_mesh
from spmd import Layout, P, functions
from spmd.functions.norm_plans import params_of

pytestmark = pytest.mark.torch


class Case(NamedTuple):
    """A norm: ours, torch's, and the dimensions that weight and bias have."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    params: tuple[int, ...]


def cases(rng: np.random.Generator, channels: int, ndim: int, groups: int) -> dict[str, Case]:
    import torch
    from torch.nn import functional as T

    rows = int(rng.integers(1, ndim + 1))
    last = tuple(range(ndim - rows, ndim))
    axis = int(rng.integers(0, ndim))

    def of_batch(x, w, b):  # not F.batch_norm, which refuses one value per channel
        stacked = x.movedim(axis, 0).reshape(1, x.shape[axis], -1)
        y = torch.batch_norm(stacked, w, b, None, None, True, 0.0, 1e-5, False)
        return y.reshape(x.movedim(axis, 0).shape).movedim(0, axis)

    return {
        "layer": Case(
            lambda x, w, b, **o: functions.layer_norm(x, w, b, ndim=rows, **o),
            lambda x, w, b: T.layer_norm(x, x.shape[ndim - rows :], w, b),
            last,
        ),
        "rms": Case(
            lambda x, w, b, **o: functions.rms_norm(x, w, 1e-3, ndim=rows, **o),
            lambda x, w, b: T.rms_norm(x, x.shape[ndim - rows :], w, 1e-3),
            last,
        ),
        "batch": Case(lambda x, w, b, **o: functions.batch_norm(x, w, b, axis=axis, **o), of_batch, (axis,)),
        "group": Case(
            lambda x, w, b, **o: functions.group_norm(x, groups, w, b, **o),
            lambda x, w, b: torch.group_norm(x, groups, w, b),
            (1,),
        ),
        "instance": Case(
            lambda x, w, b, **o: functions.instance_norm(x, w, b, **o),
            lambda x, w, b: torch.group_norm(x, channels, w, b),
            (1,),
        ),
    }


def close(actual: Any, wanted: Any) -> None:
    """Of one entry, or of equal ones, the variance is 0, and gradients are as large as 1 / eps."""
    np.testing.assert_allclose(actual, wanted, rtol=1e-10, atol=1e-10 * max(1, np.abs(wanted).max(initial=0)))


def reference(case: Case, args: list[np.ndarray], g: np.ndarray) -> tuple:
    import torch

    tensors = [torch.tensor(a, requires_grad=True) for a in args]
    y = case.theirs(*tensors)
    grads = torch.autograd.grad(y, tensors, torch.tensor(g), allow_unused=True)
    return y.detach().numpy(), [np.zeros_like(a) if h is None else h.numpy() for a, h in zip(args, grads, strict=True)]


def drawn(seed: int, name: str):
    rng = np.random.default_rng([seed, len(name)])
    mesh = random_mesh(rng)
    groups, each = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    ndim = int(rng.integers(2, 5))
    batch = int(rng.integers(1, 5))
    shape = (batch, groups * each, *rng.integers(1, 5, ndim - 2).tolist())
    case = cases(rng, groups * each, ndim, groups)[name]
    x, g = rng.standard_normal((2, *shape))
    w, b = rng.standard_normal((2, *(shape[d] for d in case.params)))
    spec = random_layout(rng, shape, mesh)
    return rng, mesh, case, x, w, b, g, spec


def check(seed: int, name: str) -> None:
    rng, mesh, case, x, w, b, g, spec = drawn(seed, name)
    layout = spec if isinstance(spec, Layout) else mesh.layout(x.shape, spec)
    lies = params_of(layout, case.params)
    options = {"shape": x.shape} if isinstance(spec, P) and rng.random() < 0.3 else {}

    def fun(x, w, b):
        return case.ours(x, w, b, spec=spec, **options)

    if name == "rms":
        expected = reference(case, [x, w, b], g)
        one = lambda x, w: fun(x, w, None)
        args, specs, expected = (x, w), (spec, lies), (expected[0], expected[1][:2])
        outside = lambda x, w: case.ours(x, w, None)
    else:
        one, args, specs, expected, outside = (
            fun,
            (x, w, b),
            (spec, lies, lies),
            reference(case, [x, w, b], g),
            case.ours,
        )
    check_layer(one, expected, args, specs, spec, mesh, g, compare=close, in_global=outside, torch=DEVICE == "cpu")


NAMES = ["layer", "rms", "batch", "group", "instance"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_any_layouts(seed, name):
    check(seed, name)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_layouts(seed, name):
    check(seed, name)


def on_more(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[spmd.Mesh, Layout]:
    """An array on a grid of workers, from worker 1 on; worker 0 holds nothing."""
    size = int(np.prod(grid))
    mesh = spmd.Mesh(w=size + 1)
    return mesh, Layout.grid(shape, grid, mesh.axes, range(1, size + 1))


# Grids and shapes of DistDL's tests of batch norms and layer norms.
BATCHES = [
    ((2, 1, 2), (4, 3, 10)),
    ((1, 4, 1), (4, 4, 10)),
    ((1, 2, 2), (7, 13, 11)),
    ((2, 2), (7, 13)),
    ((1, 2, 2, 2), (7, 13, 11, 3)),
    ((1, 3, 2, 2), (7, 13, 11, 3)),
]
ROWS = [
    ((2, 1, 2), (4, 3, 10), 2),
    ((2, 1, 2), (4, 3, 10), 1),
    ((1, 2, 2), (3, 4, 10), 2),
    ((2, 1, 1), (3, 3, 7), 2),
    ((2, 2), (4, 8), 2),
    ((1, 4), (4, 8), 2),
    ((4, 1), (4, 8), 2),
    ((2, 2), (4, 8), 1),
    ((1, 4), (4, 8), 1),
    ((4, 1), (4, 8), 1),
]


@pytest.mark.host("tensors of the host")
@pytest.mark.parametrize(("grid", "shape"), BATCHES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norms_train_and_evaluate_as_on_one_worker(grid, shape, affine):
    import torch

    from spmd.bridge import torch as spt

    rng, channels = np.random.default_rng(len(shape)), shape[1]
    x, later, g = rng.standard_normal((3, *shape))
    parameters = list(rng.standard_normal((2, channels))) if affine else []
    module = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)]
    module = module(channels, momentum=0.3, affine=affine, dtype=torch.float64)
    for p, value in zip(module.parameters(), parameters, strict=True):
        p.data = torch.tensor(value)
    there = torch.tensor(x, requires_grad=True)
    y = module(there)
    y.backward(torch.tensor(g))
    wanted = [y.detach(), there.grad, *(p.grad for p in module.parameters()), module.running_mean, module.running_var]
    wanted = [a.detach().numpy() for a in wanted]
    evaluated = module.eval()(torch.tensor(later)).detach().numpy()

    mesh, layout = on_more(shape, grid)
    lies = params_of(layout, (1,))
    old = np.zeros(channels), np.ones(channels)

    def train(x, mean, variance, *parameters):
        return functions.batch_norm(x, *parameters, running=(mean, variance), momentum=0.3, spec=layout)

    def evaluate(x, mean, variance, *parameters):
        options = {"running": (mean, variance), "training": False, "spec": layout}
        return functions.batch_norm(x, *parameters, **options)[0]

    ins = (layout, lies, lies, *[lies] * len(parameters))
    mapped = mesh.map(train, in_specs=ins, out_specs=(layout, (lies, lies)))
    placed = [spmd.put(a, s, mesh) for a, s in zip((x, *old, *parameters), ins, strict=True)]
    argnums = (0, *range(3, 3 + len(parameters)))

    def only(*args):
        full = list(placed)
        for k, a in zip(argnums, args, strict=True):
            full[k] = a
        return mapped(*full)[0]

    y, running = mapped(*placed)
    _, pullback = spmd.vjp(only, *(placed[k] for k in argnums))
    found = [y, *pullback(spmd.put(g, layout, mesh)), *running]
    for a, b in zip(found, wanted, strict=True):
        close(a.numpy(), b)
    again = mesh.map(evaluate, in_specs=ins, out_specs=layout)
    close(again(spmd.put(later, layout, mesh), *running, *placed[3:]).numpy(), evaluated)
    outside = functions.batch_norm(placed[0], *placed[3:], running=tuple(placed[1:3]), momentum=0.3)
    for a, b in zip((outside[0], *outside[1]), (wanted[0], *wanted[-2:]), strict=True):
        close(a.numpy(), b)
    tensors = [torch.tensor(a) for a in (x, *old, *parameters)]

    y, running = spt.map(train, in_specs=ins, out_specs=(layout, (lies, lies)), mesh=mesh)(*tensors)
    for a, b in zip((y, *running), (wanted[0], *wanted[-2:]), strict=True):
        close(a.numpy(), b)


@pytest.mark.parametrize(("grid", "shape", "rows"), ROWS, ids=str)
def test_layer_norms_on_some_of_the_workers(grid, shape, rows):
    from torch.nn import functional as T

    rng = np.random.default_rng(rows)
    mesh, layout = on_more(shape, grid)
    first = len(shape) - rows
    lies = params_of(layout, range(first, len(shape)))
    x, g = rng.standard_normal((2, *shape))
    w, b = rng.standard_normal((2, *shape[first:]))
    case = Case(functions.layer_norm, lambda x, w, b: T.layer_norm(x, x.shape[first:], w, b), ())

    def fun(x, w, b, **more):
        return functions.layer_norm(x, w, b, ndim=rows, **more)

    expected = reference(case, [x, w, b], g)
    check_layer(
        lambda x, w, b: fun(x, w, b, spec=layout),
        expected,
        (x, w, b),
        (layout, lies, lies),
        layout,
        mesh,
        g,
        compare=close,
        in_global=fun,
        torch=DEVICE == "cpu",
    )


@pytest.mark.parametrize("name", NAMES)
def test_running_statistics_of_tensors_that_are_whole(name):
    """Without specs the functions are those of torch, with float32 too."""
    import torch

    rng, _, case, x, w, b, *_ = drawn(3, name)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        both = [torch.tensor(a, dtype=dtype) for a in (x, w, b)]
        ours = case.ours(*both) if name != "rms" else case.ours(*both[:2], None)
        torch.testing.assert_close(ours, case.theirs(*both), rtol=tolerance, atol=tolerance)
    x = torch.tensor(rng.standard_normal((5, 3, 4)))
    mean, variance = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    _, running = functions.batch_norm(x, running=(mean, variance))
    assert not mean.any()
    torch.nn.functional.batch_norm(x, mean, variance, training=True)
    torch.testing.assert_close(running, (mean, variance))
    y, _ = functions.batch_norm(x, running=running, training=False)
    torch.testing.assert_close(y, torch.nn.functional.batch_norm(x, mean, variance))


SPLIT = P("a", "b", "c")


@pytest.mark.parametrize("name", NAMES)
def test_float32_on_blocks(name):
    import torch

    rng = np.random.default_rng(0)
    mesh, shape = spmd.Mesh(a=2, b=2, c=2), (3, 6, 5)
    case = cases(np.random.default_rng(5), 6, 3, 2)[name]
    x = (rng.standard_normal(shape) * 3 + 5).astype(np.float32)
    w, b = rng.standard_normal((2, *(shape[d] for d in case.params))).astype(np.float32)
    lies = params_of(mesh.layout(shape, SPLIT), case.params)
    args = (x, w) if name == "rms" else (x, w, b)
    one = lambda x, w, b=None: case.ours(x, w, b, spec=SPLIT)
    y = mesh.map(one, in_specs=(SPLIT, *[lies] * (len(args) - 1)), out_specs=SPLIT)(*args).numpy()
    wanted = case.theirs(*(torch.tensor(a) for a in (x, w, b))).numpy()
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_second_order_on_blocks(name):
    rng = np.random.default_rng(1)
    mesh, shape, spec = spmd.Mesh(b=2, c=2, scheduler="lockstep"), (2, 4, 3), P(None, "b", "c")
    case = cases(np.random.default_rng(5), 4, 3, 1)[name]
    x = rng.standard_normal(shape)
    w, b = rng.standard_normal((2, *(shape[d] for d in case.params)))
    lies = params_of(mesh.layout(shape, spec), case.params)
    args = (x, w) if name == "rms" else (x, w, b)
    one = lambda x, w, b=None: case.ours(x, w, b, spec=spec)
    mapped = mesh.map(one, in_specs=(spec, *[lies] * (len(args) - 1)), out_specs=spec)
    spmd.check_grads(mapped, args, order=2, modes=("rev",))


@pytest.mark.host("tensors of the host")
@pytest.mark.parametrize("name", ["batch", "group", "layer"])
def test_second_order_of_tensors(name):
    import torch

    from spmd.bridge import torch as spt

    mesh, shape, spec = spmd.Mesh(b=2, c=2), (2, 4, 3), P(None, "b", "c")
    case = cases(np.random.default_rng(5), 4, 3, 1)[name]
    rng = np.random.default_rng(2)
    x = torch.tensor(rng.standard_normal(shape), requires_grad=True)
    w, b = (torch.tensor(a) for a in rng.standard_normal((2, *(shape[d] for d in case.params))))
    lies = params_of(mesh.layout(shape, spec), case.params)
    mapped = spt.map(
        lambda x, w, b: case.ours(x, w, b, spec=spec), in_specs=(spec, lies, lies), out_specs=spec, mesh=mesh
    )
    grads = []
    for f in (mapped, case.theirs):
        (first,) = torch.autograd.grad((f(x, w, b) ** 3).sum(), x, create_graph=True)
        grads.append(torch.autograd.grad((first**2).sum(), x)[0].numpy())
    close(*grads)


def test_what_is_not_split_is_not_sent():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 6, 5)), rng.standard_normal(6)
    mesh = spmd.Mesh(m=2, scheduler="lockstep")
    for fun, spec, w_spec in (
        (lambda x, w: functions.batch_norm(x, w, spec=P(None, "m")), P(None, "m"), P("m")),
        (lambda x, w: functions.instance_norm(x, w, spec=P("m")), P("m"), P()),
        (lambda x, w: functions.group_norm(x, 2, w, spec=P(None, "m"), shape=(4, 6, 5)), P(None, "m"), P("m")),
        (lambda x, w: functions.rms_norm(x, w[:5], spec=P("m")), P("m"), P()),
    ):
        with spmd.ledger() as log:
            mesh.map(fun, in_specs=(spec, w_spec), out_specs=spec)(x, w)
        assert not log.verbs, spec


@each_mpi
def test_processes_give_the_bits_of_virtual_workers(python):
    """Of losses and dropout too."""
    ended = launch(PROGRAMS / "norms_and_losses.py", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert json.loads(ended.stdout) == norms_and_losses.results(transport="local", scheduler="threads")
