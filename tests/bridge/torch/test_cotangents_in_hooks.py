"""Cotangents in hooks and in backwards of users' functions: they have the state of what they belong to.

Each use changes a cotangent by a sum over all workers, so that a state that is wrong in either direction raises, and a
sum that is taken twice or never gives another gradient than one worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd.graph import register_multi_grad_hook  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import StateError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W = torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Total = Callable[[Any], Any]
"""The sum of a tensor's entries over all workers."""


def scaled(g: Any, total: Total) -> Any:
    """A cotangent by its norm over all workers."""
    return g / (1 + total((g * g).sum())).sqrt()


class Changed(torch.autograd.Function):
    """2 x, whose backward scales the cotangent."""

    @staticmethod
    def forward(ctx, x, total):
        ctx.total = total
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return scaled(2 * g, ctx.total), None


class Twice(nn.Module):
    """Two results of two arguments."""

    def forward(self, x, y):
        return x * y, x + y


def of_a_tensor(x: Any, total: Total) -> Any:
    y = x * 2
    y.register_hook(lambda g: scaled(g, total))
    y.register_hook(hook=lambda g: scaled(g, total))
    return y.square()


def of_a_view(x: Any, total: Total) -> Any:
    y = x * 2
    y.T[1:].register_hook(lambda g: scaled(g, total))
    z = y.T[:1]
    z.register_hook(lambda g: scaled(g, total))
    return z.square() * y.sum(1)


def several(x: Any, total: Total) -> Any:
    y, z = x * 2, x.sin()
    seen: list[Any] = []
    register_multi_grad_hook((y, z), lambda gs: seen.extend(total(g) for g in gs))
    x.register_hook(lambda g: scaled(g, total) * (seen[0] + seen[1]))
    return y * z


def before_a_module(x: Any, total: Total) -> Any:
    layer = nn.Tanh()
    layer.register_full_backward_pre_hook(lambda m, gs: (scaled(gs[0], total),))
    return layer(x * 2)


def after_a_module(x: Any, total: Total) -> Any:
    layer = nn.Tanh()
    layer.register_full_backward_hook(lambda m, gs, outs: (scaled(gs[0], total) + outs[0] * total(outs[0]),))
    return layer(x * 2)


def of_several_results(x: Any, total: Total) -> Any:
    layer = Twice()
    layer.register_full_backward_pre_hook(lambda m, gs: tuple(scaled(g, total) for g in gs))
    layer.register_full_backward_hook(lambda m, gs, outs: tuple(scaled(g, total) + total(outs[1]) for g in gs))
    y, z = layer(x * 2, x.sin())
    return y * z


def of_the_state_of_its_parts(x: Any, total: Total) -> Any:
    """An argument of a module that no data reach beside one that the workers' own do."""
    layer, w = Twice(), W.clone().requires_grad_()
    states: list[Any] = []
    layer.register_full_backward_hook(lambda m, gs, outs: states.extend(getattr(g, "state", None) for g in gs))
    y, z = layer(w * 2, w.exp())
    (y * z).sum().backward()
    assert states == [None, None]
    return x * w.grad


def of_a_function(x: Any, total: Total) -> Any:
    return Changed.apply(x, total).square() * Changed.apply(x * 2, total)


USES = [
    of_a_tensor,
    of_a_view,
    several,
    before_a_module,
    after_a_module,
    of_several_results,
    of_the_state_of_its_parts,
    of_a_function,
]
RECORDED = [of_a_tensor, of_a_view, before_a_module, after_a_module, of_several_results]
"""Uses whose changes of the cotangent are differentiated with it."""


def loss_and_gradient(use: Any, x: Any, total: Total, again: bool) -> Any:
    """The gradient of a loss with a hook, or of its square after it was recorded."""
    x = x.detach().requires_grad_()
    loss = total(use(x, total).sin().sum())
    (g,) = torch.autograd.grad(loss, x, create_graph=again)
    if again:
        (g,) = torch.autograd.grad(total((g * g).sum()), x)
    return g


def compare(use: Any, n: int, check: bool, again: bool) -> None:
    expected = loss_and_gradient(use, X, torch.sum, again)
    total = lambda y: spt.psum(y.sum(), "x")
    body = lambda x: loss_and_gradient(use, x, total, again)
    found = spt.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=n), check=check)(X)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("use", USES)
def test_of_tensors(use, n, check):
    compare(use, n, check, again=False)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("use", RECORDED)
def test_of_recorded_gradients(use, n):
    compare(use, n, check=True, again=True)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3, "y": 2}], ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize("use", [of_a_tensor, before_a_module, after_a_module, of_several_results])
def test_of_global_tensors(use, spec, axes, check):
    total = lambda y: y.sum()
    expected = loss_and_gradient(use, X, total, False)

    def body(x):
        return loss_and_gradient(use, spt.GlobalTensor.from_block(x, spec), total, False).block()

    found = spt.map(body, spec, spec, mesh=spmd.Mesh(**axes), check=check)(X)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_what_a_hook_collected_varies():
    def body(x):
        seen: list[Any] = []
        y = x.detach().requires_grad_() * 2
        y.register_hook(seen.append)
        spt.psum(y.square().sum(), "x").backward()
        return seen[0]

    with spmd.Mesh(x=2):
        torch.testing.assert_close(spt.map(body, P("x"), P("x"))(X), 4 * X)
        with pytest.raises(StateError, match=r"Varying\(x\) tensor .*promised by out_specs P\(\)"):
            spt.map(body, P("x"), P())(X)
