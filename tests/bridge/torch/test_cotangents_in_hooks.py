"""Cotangents in hooks and in backwards of users' functions: they have the state of what they belong to.

Each use changes a cotangent by a sum over all workers, so that a state that is wrong in either direction raises, and a
sum that is taken twice or never gives another gradient than one worker.
"""

from __future__ import annotations

import gc
import threading
import weakref
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


class Saving(torch.autograd.Function):
    """w exp(x) for a w that backward closes over too; it saves its result, and its backward uses a sum over workers."""

    @staticmethod
    def forward(ctx, x, w, total):
        y = x.exp()
        ctx.w, ctx.total = w, total
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return scaled(g * y * ctx.w, ctx.total), None, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class InPlace(torch.autograd.Function):
    """Doubles what it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return 2 * g


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


def of_a_function_that_saves(x: Any, total: Total) -> Any:
    w = nn.Parameter(W.clone())
    y = Saving.apply(x, w, total)
    return y * y


def of_functions_in_place(x: Any, total: Total) -> Any:
    y, z = x * 1, x * 3
    InPlace.apply(z[:, :1])
    return InPlace.apply(y) * z


def in_a_transformation(x: Any, total: Total) -> Any:
    inner = lambda z: WithSetup.apply(z).square().sum()
    return torch.func.grad(inner)(x.detach()) * x


def in_another_thread(x: Any, total: Total) -> Any:
    """As torch runs backward on GPUs."""
    z = x.detach().requires_grad_()
    y = Changed.apply(nn.Tanh()(z), total)
    y.register_hook(lambda g: scaled(g, total))
    loss = total(y.square())
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return x * z.grad


USES = [
    of_a_tensor,
    of_a_view,
    several,
    before_a_module,
    after_a_module,
    of_several_results,
    of_the_state_of_its_parts,
    of_a_function,
    of_a_function_that_saves,
    of_functions_in_place,
    in_a_transformation,
    in_another_thread,
]
RECORDED = [of_a_tensor, of_a_view, before_a_module, after_a_module, of_several_results, of_a_function]
RECORDED += [of_a_function_that_saves, of_functions_in_place]
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
    if use is in_another_thread and not check:
        pytest.skip("torch itself calls the hooks of plain tensors")
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


def test_sparse_cotangents_stay_as_they_are():
    table, index = torch.ones(4, 1, dtype=torch.float64), torch.tensor([1, 3])
    seen: list[Any] = []

    def body(x):
        w = x.detach()[:, :1].clone().requires_grad_()
        w.register_hook(lambda g: seen.append(g.layout))
        spt.psum(nn.functional.embedding(index, w, sparse=True).sum(), "x").backward()

    spt.map(body, P("x"), None, mesh=spmd.Mesh(x=2))(table.repeat(2, 1))
    assert seen == [torch.sparse_coo] * 2


@pytest.mark.parametrize("use", [of_a_tensor, before_a_module, after_a_module, of_a_function], ids=lambda f: f.__name__)
@pytest.mark.parametrize("runs_backward", [True, False])
@pytest.mark.parametrize("is_global", [True, False], ids=["global", "plain"])
def test_hooks_keep_no_tensor(use, runs_backward, is_global):
    def body(x):
        refs = []
        for _ in range(3):
            leaf = x.detach().requires_grad_()
            total = (lambda y: y.sum()) if is_global else lambda y: spt.psum(y.sum(), "x")
            made = use(spt.GlobalTensor.from_block(leaf, P("x")) if is_global else leaf, total)
            if runs_backward:
                total(made).backward()
            refs.append(weakref.ref(made._block if is_global else made))
            del made, leaf
        gc.collect()
        return sum(ref() is not None for ref in refs)

    if use is of_a_function and is_global:
        pytest.skip("functions of torch.autograd take blocks")
    assert spt.map(body, P("x"), None, mesh=spmd.Mesh(x=2), check=True)(X) == 0
