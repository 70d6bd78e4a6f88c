"""What bodies do with global tensors besides arithmetic: gradients, hooks, copies, and what is refused."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError  # noqa: E402

pytestmark = pytest.mark.torch
X = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)


def run(f, check=True, **axes):
    return spt.map(f, (), None, mesh=spmd.Mesh(**(axes or {"a": 3})), check=check)()


def put():
    return spt.put(X.clone().requires_grad_(), P("a"))


@pytest.mark.parametrize("check", [True, False])
def test_gradients_with_respect_to_global_tensors(check):
    cotangent = torch.randn(5, 6, dtype=torch.float64)

    def main():
        x = put()
        (whole,) = torch.autograd.grad(x.square(), x, cotangent)
        (other,) = torch.autograd.grad(x.square(), [x], spt.put(cotangent, P(None, "a")), retain_graph=True)
        (first,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        y = x * 1
        y.retain_grad()
        y.square().backward(cotangent)
        return [g.whole() for g in (whole, other, first.detach(), second, y.grad)]

    expected = (2 * X * cotangent, 2 * X * cotangent, 3 * X**2, 6 * X, 2 * X * cotangent)
    for got, own in zip(run(main, check), expected, strict=True):
        assert torch.equal(got, own)


def test_hooks_get_global_tensors():
    def main():
        leaf, shapes = X.clone().requires_grad_(), []
        y = spt.put(leaf, P("a")) * 1
        y.register_hook(lambda g: shapes.append(tuple(g.shape)))
        y.register_hook(lambda g: 2 * g)
        y.register_hook(lambda g: g + torch.ones(6, dtype=torch.float64))
        y.sum().backward()
        return shapes, leaf.grad

    shapes, grad = run(main)
    assert shapes == [(5, 6)]
    assert torch.equal(grad, torch.full((5, 6), 3.0, dtype=torch.float64))


def test_checkpoints_copies_and_lengths():
    def main():
        leaf = X.clone().requires_grad_()
        checkpoint(lambda x: x.square().sum(0), spt.put(leaf, P("a")), use_reentrant=False).sum().backward()
        copied = copy.deepcopy(spt.put(X, P("a")))
        assert len(copied) == 5
        assert copied.is_contiguous()
        assert "shape=[5, 6]" in repr(copied)
        return leaf.grad, copied.whole(), torch.stack(list(copied))

    grad, copied, rows = run(main)
    assert torch.equal(grad, 2 * X)
    assert torch.equal(copied, X)
    assert torch.equal(rows, X)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.sum(input=x, dim=0),
        lambda x: torch.permute(input=x, dims=(1, 0)),
        lambda x: torch.flatten(input=x, start_dim=0),
        lambda x: torch.var(input=x, dim=0, unbiased=False),
        lambda x: torch.var(x, 0, False),
        lambda x: torch.movedim(x, destination=0, source=1),
        lambda x: torch.unflatten(input=x, dim=1, sizes=(2, 3)),
        lambda x: x[:, -1][None],
        lambda x: x[0, 0],
        lambda x: x[3:, 1::2, None],
        lambda x: x[1:2].squeeze(0),
        lambda x: x[1:2].expand(4, 6),
        lambda x: torch.special.log_softmax(x, 0),
        lambda x: F.embedding(x.long() % 7, torch.arange(14.0, dtype=torch.float64).reshape(7, 2), padding_idx=-1),
    ],
)
def test_forms_of_calls(use):
    def main():
        y = use(spt.put(X, P("a")))
        return y.whole() if isinstance(y, spt.GlobalTensor) else y

    got = run(main)
    assert torch.allclose(got, use(X), atol=1e-12)


PACKED = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, p: x @ torch.ones(6, 2, dtype=torch.float64) + p[:1].sum(),
        lambda x, p: F.linear(x, torch.ones(6, 6, dtype=torch.float64), p.sum(1)),
        lambda x, p: F.huber_loss(torch.ones(6, 2, dtype=torch.float64), p, reduction="none"),
        lambda x, p: F.embedding(x.long() % 6, p),
        lambda x, p: torch.zeros(6, 2, dtype=torch.float64).add_(p),
        lambda x, p: torch.norm(p, 0),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_unpacked_parameters_are_right_or_refused(use, size):
    def main():
        p = spt.Parameter(PACKED, P(None, "a"), unpacked=(2, 3, 2))
        try:
            y = use(put(), p)
        except LayoutError:
            return use(X, PACKED)
        y.sum().backward()
        return y.whole() if isinstance(y, spt.GlobalTensor) else y

    assert torch.allclose(run(main, a=size), use(X, PACKED))


def test_operands_of_tensors_on_a_grid():
    """They are brought to the grid, and their gradients are those of the whole."""
    b, c = (torch.ones(n, dtype=torch.float64) for n in ((6,), ()))

    def main():
        leaves = [X.clone(), b.clone(), c.clone(), X.clone()]
        for leaf in leaves:
            leaf.requires_grad_()
        x, bias, scale, y = leaves
        grid = spt.put(x, spmd.Grid((1, 2), workers=[2, 0]))
        (grid * bias * scale + y).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    for check in (True, False):
        g, g_bias, g_scale, g_y = run(main, check)
        assert torch.equal(g, 4 * X)
        assert torch.equal(g_y, 4 * X)
        assert torch.equal(g_bias, (4 * X * X).sum(0))
        assert torch.equal(g_scale, (4 * X * X).sum())


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.detach().numpy(), "numpy"),
        (float, "__float__"),
        (bool, "__bool__"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: torch.where(x > 1), "two values"),
        (lambda x: x.backward(), "cotangent"),
        (lambda x: torch.linalg.norm(x, 1), "vector_norm"),
        (lambda x: spt.Parameter(X, P("a")).detach().clone().add_(x), "in place of a parameter"),
        (lambda x: x[torch.tensor([0])], "__getitem__"),
    ],
)
def test_what_is_refused_names_the_function(use, word):
    def main():
        with pytest.raises(LayoutError, match=word):
            use(put())

    run(main)
