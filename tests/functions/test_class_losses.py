"""Losses of classes, on arrays that lie anyhow, against torch's on one worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import DEVICE

import spmd
from functions.layer_cases import check_layer, random_layout, random_mesh
from spmd import Layout, P, functions
from spmd.functions.norm_plans import params_of

pytestmark = pytest.mark.torch

# The options of a loss, and whether there are weights of classes. A target of probabilities: "soft".
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": ("cross_entropy", {}, False),
    "weighted": ("cross_entropy", {}, True),
    "ignored": ("cross_entropy", {"ignore_index": 1}, False),
    "all": ("cross_entropy", {"ignore_index": 0, "label_smoothing": 0.2}, True),
    "smooth": ("cross_entropy", {"label_smoothing": 0.1}, False),
    "soft": ("cross_entropy", {}, False),
    "soft weighted": ("cross_entropy", {"label_smoothing": 0.3}, True),
    "nll": ("nll_loss", {}, False),
    "nll weighted": ("nll_loss", {"ignore_index": 0}, True),
    "nll ignored": ("nll_loss", {"ignore_index": 2}, False),
}


def close(actual: Any, wanted: Any) -> None:
    np.testing.assert_allclose(actual, wanted, rtol=1e-11, atol=1e-12)


def reference(name, options, reduction, x, target, weight, g):
    import torch

    both = [torch.tensor(x, requires_grad=True), torch.tensor(target, requires_grad=target.dtype.kind == "f")]
    weight = None if weight is None else torch.tensor(weight)
    y = getattr(torch.nn.functional, name)(*both, weight, reduction=reduction, **options)
    leaves = [t for t in both if t.requires_grad]
    grads = torch.autograd.grad(y, leaves, torch.tensor(g).reshape(y.shape))
    return y.detach().numpy(), [h.numpy() for h in grads]


def check(seed: int, kind: str, reduction: str) -> None:
    name, options, weighted = KINDS[kind]
    rng = np.random.default_rng([seed, len(kind)])
    mesh, soft = random_mesh(rng), kind.startswith("soft")
    classes = int(rng.integers(3, 8))
    ndim = int(rng.integers(1, 5))
    shape = (classes,) if ndim == 1 else tuple(np.insert(rng.integers(1, 5, ndim - 1), 1, classes).tolist())
    c = min(1, ndim - 1)
    rows = tuple(n for d, n in enumerate(shape) if d != c)
    x = rng.standard_normal(shape) * 3
    target = rng.dirichlet(np.ones(classes), rows) if soft else rng.integers(0, classes, rows)
    target = np.moveaxis(target, -1, c) if soft else target
    weight = rng.uniform(0.1, 3, classes) if weighted else None
    if reduction == "mean" and not soft and np.all(target == options.get("ignore_index")):
        target = np.full_like(target, 3 % classes)
    spec = random_layout(rng, shape, mesh, kind=None if ndim > 1 else "uneven")
    layout = spec if isinstance(spec, Layout) else mesh.layout(shape, spec)
    on_some = layout.spec is None
    of_rows = params_of(layout, [d for d in range(ndim) if d != c])
    specs = [spec, spec if soft else of_rows]
    of_weight = P() if on_some else params_of(layout, (c,))
    g = rng.standard_normal(rows if reduction == "none" else ())
    expected = reference(name, options, reduction, x, target, weight, g)
    loss = getattr(functions, name)

    def outside(x, target, *weights, **more):
        given = {"weight": weights[0]} if weights else {}
        return loss(x, target, reduction=reduction, **options, **given, **more)

    def block(*args):
        return outside(*args, spec=spec)

    out = of_rows if reduction == "none" else P()
    if soft and not weighted:
        check_layer(
            block, expected, (x, target), specs, out, mesh, g, compare=close, in_global=outside, torch=DEVICE == "cpu"
        )
        return
    fixed, lies = ([target], [specs[1]]) if weight is None else ([target, weight], [specs[1], of_weight])
    for on in (mesh, spmd.Mesh(**mesh.axes, scheduler="lockstep")):
        args = [spmd.put(a, s, on) for a, s in zip((x, *fixed), (spec, *lies), strict=True)]
        for check, fun in ((True, block), (False, block), (None, outside)):
            if check is not None:
                fun = on.map(block, in_specs=(spec, *lies), out_specs=out, check=check)
            y, pullback = spmd.vjp(lambda x, fun=fun, args=args: fun(x, *args[1:]), args[0])
            close(y.numpy(), expected[0])
            close(pullback(spmd.put(g, out if check is not None else y.layout, on))[0].numpy(), expected[1][0])
    if DEVICE == "cpu":
        check_tensors(block, expected, (x, *fixed), (spec, *lies), out, mesh, g)


def check_tensors(fun, expected, args, specs, out, mesh, g) -> None:
    import torch

    from spmd.bridge import torch as spt

    x, *fixed = map(torch.tensor, args)
    for check in (True, False):
        x = x.detach().requires_grad_()
        y = spt.map(fun, in_specs=tuple(specs), out_specs=out, mesh=mesh, check=check)(x, *fixed)
        close(y.detach().numpy(), expected[0])
        y.backward(torch.tensor(g))
        close(x.grad.numpy(), expected[1][0])


REDUCTIONS = ["none", "sum", "mean"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_any_layouts(seed, kind):
    check(seed, kind, REDUCTIONS[seed])


@pytest.mark.full
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(1000, 1025))
def test_many_layouts(seed, kind, reduction):
    check(seed, kind, reduction)
