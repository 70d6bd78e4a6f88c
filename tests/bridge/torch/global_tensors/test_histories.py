"""Gradients go through global tensors, or what would lose them raises."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError  # noqa: E402

pytestmark = pytest.mark.torch

F64 = torch.float64
CHECK = pytest.mark.parametrize("check", [True, False])


def whole(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=F64)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Energy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


LOST = {
    "a function": lambda x: Square.apply(x).sum().backward(),
    "a function to a number": lambda x: Energy.apply(x).backward(),
    "reentrant checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=True).sum().backward(),
}


@CHECK
@pytest.mark.parametrize("name", LOST)
def test_what_would_lose_the_history_raises(name, check):
    def main():
        w = nn.Parameter(torch.ones(4, dtype=F64))
        with pytest.raises(LayoutError, match="use_reentrant=False"):
            LOST[name](spt.put(whole(6, 4), P("x")) * w)

    spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=check)()


@CHECK
@pytest.mark.parametrize("how", ["requires_grad_", "a write"])
def test_so_does_what_is_differentiated_later(how, check):
    def main():
        x = spt.put(whole(6, 4), P("x"))
        if how == "a write":
            x.mul_(nn.Parameter(torch.ones(4, dtype=F64)))
        else:
            x.requires_grad_()
        with pytest.raises(LayoutError, match="from_block of its result"):
            LOST["a function"](x)

    spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=check)()


# A differentiated tensor that all workers have, beside a parameter of which each has a block. y: (6, 5).
BESIDE = {
    "mul": lambda y, q, r: (y * q).sin().sum(),
    "addcmul": lambda y, q, r: torch.addcmul(y, y, q).sum(),
    "matmul": lambda y, q, r: (y @ r).square().sum(),
    "einsum": lambda y, q, r: torch.einsum("bi,ij->bj", y, r).tanh().sum(),
    "addmm": lambda y, q, r: torch.addmm(torch.ones(6, 3, dtype=F64), y, r).square().sum(),
    "cat": lambda y, q, r: torch.cat([y, q[None]], 0).square().sum(),
    "where": lambda y, q, r: torch.where(q > 0, y, q).square().sum(),
}


@CHECK
@pytest.mark.parametrize("name", BESIDE)
def test_a_whole_beside_a_parameter_in_blocks_gets_the_cotangent_of_the_whole(name, check):
    x, starts = whole(6, 4), (whole(5, 4), whole(5), whole(5, 3))

    def gradients(w, q, r):
        found = torch.autograd.grad(BESIDE[name](torch.tanh(x @ w.T), q, r), [w, q, r], allow_unused=True)
        return [None if g is None else g.whole() if hasattr(g, "whole") else g for g in found]

    def main():
        w, q, r = starts
        return gradients(nn.Parameter(w.clone()), spt.Parameter(q, P("x")), spt.Parameter(r, P("x")))

    expected = gradients(*(a.clone().requires_grad_() for a in starts))
    found = spt.map(main, (), None, mesh=spmd.Mesh(x=3), check=check)()
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_new_tensors_of_another_shape_are_the_same_on_all_workers():
    def main():
        x = spt.put(whole(6, 4), P("x"))
        zeros = x.new_zeros(3, 4)  # no dimension lies as those of x
        assert not isinstance(zeros, spt.GlobalTensor)
        return torch.cat([zeros, x[:2]], 0).sum()

    assert torch.allclose(spt.map(main, (), None, mesh=spmd.Mesh(x=2))(), whole(6, 4)[:2].sum())
