"""Sharded tensors against whole ones: checks on the mesh around them, for virtual workers and for processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd import P
from spmd.bridge import torch as spt
from spmd.bridge.torch.sharded_tensors import tensor as sharded

ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda x, y: 2 * x - y / 4 + x * y,
    "powers": lambda x, y: x**2 + (y * y + 1).sqrt(),
    "functions": lambda x, y: x.sin() * y.exp() + torch.tanh(x),
    "where": lambda x, y: torch.where(x > y, x, 3 * y),
    "extrema": lambda x, y: torch.maximum(x, y) + x.clamp(-1, 2),
    "with a row that all have": lambda x, y: x * torch.arange(1.0, 1 + x.shape[-1], dtype=x.dtype) + y,
    "interpolation": lambda x, y: torch.lerp(x, y, 0.25).addcmul(x, y, value=0.5),
    "turned": lambda x, y: x.T * 2 + y.T,
}

REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum over 0": lambda x: x.sum(0),
    "sum over 1, kept": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(),
    "mean over -1": lambda x: x.mean(-1),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "largest": lambda x: x.amax(),
    "smallest over 0": lambda x: x.amin(0),
    "variance": lambda x: x.var(),
    "squares": lambda x: (x * x).sum(),
    "count": lambda x: (x > 0).sum(),
    "all": lambda x: (x > -100).all(),
    "any": lambda x: (x > 2).any(),
}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Integers, in float64."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(torch.float64)


def whole(x: Any) -> Any:
    return x.whole() if isinstance(x, spt.ShardedTensor) else x


def alike(x: Any, expected: torch.Tensor, exact: bool = False) -> None:
    """That a tensor is what one worker finds."""
    torch.testing.assert_close(whole(x), expected, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)


def lies_as(x: Any, y: Any) -> None:
    """That x has blocks where y has, of these shapes."""
    assert type(x) is spt.ShardedTensor, type(x)
    assert x.block_layout == y.block_layout, (x.block_layout, y.block_layout)
    for w, block in x.blocks.items():
        assert tuple(block.shape) == x.block_layout.block_shape(w)


def check_elementwise(name: str, shape: tuple[int, int], spec: Any) -> None:
    f = ELEMENTWISE[name]
    wholes = [numbers(*shape, seed=k).requires_grad_() for k in (1, 2)]
    x, y = (spt.put(a.detach(), spec).requires_grad_() for a in wholes)
    expected = f(*wholes)
    value = f(x, y)
    assert type(value) is spt.ShardedTensor
    alike(value, expected)
    weights = numbers(*expected.shape, seed=3)
    grads = torch.autograd.grad((value * weights).sum(), (x, y))
    for g, e in zip(grads, torch.autograd.grad((expected * weights).sum(), wholes), strict=True):
        lies_as(g, x)
        alike(g, e)


def check_reduction(name: str, shape: tuple[int, int], spec: Any) -> None:
    f = REDUCTIONS[name]
    a = numbers(*shape, seed=1).requires_grad_()
    x = spt.put(a.detach(), spec).requires_grad_()
    value, expected = f(x), f(a)
    assert value.shape == expected.shape
    assert expected.ndim or type(value) is torch.Tensor
    alike(value, expected)
    if expected.requires_grad:
        value, expected = f(x), f(a)
        (g,) = torch.autograd.grad((value * value).sum(), [x])
        lies_as(g, x)
        alike(g, torch.autograd.grad((expected * expected).sum(), [a])[0])


def check_in_place(shape: tuple[int, int], spec: Any) -> None:
    a, b = numbers(*shape, seed=1), numbers(*shape, seed=2)
    x, y = spt.put(a, spec), spt.put(b, spec)
    before = dict(x.blocks)
    for p, q in ((a, b), (x, y)):
        p.add_(q, alpha=2).mul_(q).sub_(1)
        p[:] = p + q
        p.copy_(p * 2)
        p.masked_fill_(p > 30, 7.0).addcmul_(q, q, value=-1)
        torch._foreach_mul_([p], [q])
        torch._foreach_add_([p, q], 1)
        p += q
    alike(x, a, exact=True)
    alike(y, b, exact=True)
    assert all(x.blocks[w] is before[w] for w in before)
    x.zero_()
    alike(x, torch.zeros(shape, dtype=a.dtype), exact=True)
    x.copy_(b)
    alike(x, b, exact=True)
    alike(torch.zeros_like(x) + torch.ones_like(y), torch.ones(shape, dtype=a.dtype), exact=True)


def check_lists(shapes: list[tuple[int, ...]], specs: list[Any]) -> None:
    wholes = [numbers(*s, seed=k) for k, s in enumerate(shapes)]
    some = [spt.put(a, spec) for a, spec in zip(wholes, specs, strict=True)]
    results = []
    for xs in (wholes, some):
        ys = torch._foreach_mul(xs, 2.0)
        torch._foreach_add_(ys, xs, alpha=3)
        torch._foreach_addcdiv_(
            ys, xs, torch._foreach_add(torch._foreach_abs(xs), 1), [0.5 * k for k in range(len(xs))]
        )
        results.append((ys, torch._foreach_norm(xs)))
    for expected, found in zip(*results, strict=True):
        for e, x in zip(expected, found, strict=True):
            alike(x, e)


# Maps


def check_map(n: int, m: int, spec: Any, in_spec: Any) -> None:
    """A map takes sharded tensors as they lie, or laid out anew, and keeps what its specs split."""
    a, b = numbers(n, m, seed=1).requires_grad_(), numbers(m, seed=2).requires_grad_()
    x, y = spt.put(a.detach(), spec).requires_grad_(), b.detach().clone().requires_grad_()
    names, y_spec = tuple(sorted(in_spec.varying)), P(*in_spec.dims[1:])

    def body(x: Any, y: Any) -> Any:
        z = x * x * y
        return z, spt.psum((x.sin() * y).sum(), names)

    mapped = spt.map(body, (in_spec, y_spec), (in_spec, P()))
    z, total = mapped(x, y)
    expected_total = (a.sin() * b).sum()
    lies_as(z, spt.put(a.detach(), in_spec))
    assert type(total) is torch.Tensor
    alike(z, a * a * b)
    alike(total, expected_total)
    weights = numbers(n, m, seed=3)
    grads = torch.autograd.grad((z * weights).sum() + total, (x, y))
    lies_as(grads[0], x)
    assert type(grads[1]) is torch.Tensor
    expected = torch.autograd.grad((a * a * b * weights).sum() + expected_total, (a, b), create_graph=True)
    for g, e in zip(grads, expected, strict=True):
        alike(g, e.detach())
    grads = torch.autograd.grad((mapped(x, y)[0] * weights).sum(), (x, y), create_graph=True)
    expected = torch.autograd.grad((a * a * b * weights).sum(), (a, b), create_graph=True)
    second = torch.autograd.grad((grads[0] ** 2).sum() + (grads[1] ** 2).sum(), (x, y))
    lies_as(second[0], x)
    for g, e in zip(second, torch.autograd.grad(sum((e**2).sum() for e in expected), (a, b)), strict=True):
        alike(g, e)


# Training

Params = dict[str, Any]


def initial(seed: int = 0) -> Params:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64) / 3
    return {"up": draw(7, 3), "bias": draw(7), "down": draw(2, 7), "out": draw(2)}


SPECS = {"up": P("x"), "bias": P("x"), "down": P(None, "x"), "out": P()}
X, Y = numbers(6, 3, seed=8), numbers(6, 2, seed=9)


def loss_of_block(p: Params, x: torch.Tensor, y: torch.Tensor, added: Callable[[Any], Any]) -> torch.Tensor:
    hidden = torch.tanh(x @ p["up"].T + p["bias"])
    return ((added(hidden @ p["down"].T) + p["out"] - y) ** 2).mean()


def adam(params: Params, grads: Params, state: list[Params], t: int) -> tuple[Params, list[Params]]:
    """One step of Adam with weight decay and clipping by the global norm, as a function."""
    norm = sum((g * g).sum() for g in grads.values()).sqrt()
    scale = torch.clamp(1.0 / norm, max=1.0)
    first = {k: 0.9 * state[0][k] + 0.1 * scale * g for k, g in grads.items()}
    second = {k: 0.99 * state[1][k] + 0.01 * (scale * g) ** 2 for k, g in grads.items()}
    new = {
        k: p - 0.05 * (first[k] / (1 - 0.9**t)) / ((second[k] / (1 - 0.99**t)).sqrt() + 1e-8) - 0.001 * p
        for k, p in params.items()
    }
    return new, [first, second]


def train(
    params: Params, loss: Callable[..., torch.Tensor], steps: int = 6
) -> tuple[Params, list[float], list[Params]]:
    """Steps of Adam, written functionally."""
    state = [{k: torch.zeros_like(p) for k, p in params.items()} for _ in range(2)]
    losses = []
    for t in range(1, steps + 1):
        params = {k: p.detach().requires_grad_() for k, p in params.items()}
        value = loss(params, X, Y)
        grads = dict(zip(params, torch.autograd.grad(value, list(params.values())), strict=True))
        with torch.no_grad():
            params, state = adam(params, grads, state, t)
        losses.append(value.item())
    return params, losses, state


def check_training(monkeypatch: Any = None) -> None:
    """Training on shards is that of one worker, and no shard becomes whole."""
    expected, expected_losses, _ = train(initial(), lambda p, x, y: loss_of_block(p, x, y, lambda v: v))
    params = spt.put(initial(), SPECS)
    lying = dict(params)
    body = lambda p, x, y: loss_of_block(p, x, y, lambda v: spt.psum(v, "x"))
    loss = spt.map(body, (SPECS, P(), P()), P())
    if monkeypatch is not None:
        monkeypatch.setattr(sharded._Moved, "apply", _never)
        monkeypatch.setattr(sharded, "moved_blocks", _never)
    params, losses, state = train(params, loss)
    if monkeypatch is not None:
        monkeypatch.undo()
    assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) < 1e-12
    assert losses[-1] < losses[0]
    for k, p in params.items():
        alike(p, expected[k])
        for x in (p, state[0][k], state[1][k]):
            assert type(x) is type(lying[k])
            if k != "out":
                lies_as(x, lying[k])


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a sharded tensor was laid out anew")


def check_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """An optimiser of torch on sharded leaves does what it does on one worker."""
    plain = {k: p.requires_grad_() for k, p in initial().items()}
    params = {k: p.detach().requires_grad_() for k, p in spt.put(initial(), SPECS).items()}
    body = lambda p, x, y: loss_of_block(p, x, y, lambda v: spt.psum(v, "x"))
    loss = spt.map(body, (SPECS, P(), P()), P())
    for leaves, f in (
        (plain, lambda p, x, y: loss_of_block(p, x, y, lambda v: v)),
        (params, loss),
    ):
        optimizer = make(list(leaves.values()))
        for _ in range(4):
            optimizer.zero_grad()
            f(leaves, X, Y).backward()
            torch.nn.utils.clip_grad_norm_(list(leaves.values()), 0.5)
            optimizer.step()
    for k, p in params.items():
        if k != "out":
            lies_as(p.grad, p)
        alike(p, plain[k])
