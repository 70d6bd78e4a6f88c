"""Norms of arrays that lie anyhow, against torch's on one worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

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
    check_layer(one, expected, args, specs, spec, mesh, g, compare=close, in_global=outside, torch=True)


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
