"""Random chains of functions of torch on global tensors, against the same chain on one worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import spmd
from spmd import P
from spmd.bridge import torch as spt
from spmd.errors import LayoutError, SpecError, StateError

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 4}]
REFUSED = (LayoutError, SpecError, StateError)


class Step(NamedTuple):
    """A function of some of the values before it, and where its result is laid out anew."""

    name: str
    call: Callable[..., Any]
    operands: tuple[int, ...]
    spec: P | None


class Chain(NamedTuple):
    leaves: tuple[torch.Tensor, ...]
    specs: tuple[P, ...]
    steps: tuple[Step, ...]
    weights: tuple[torch.Tensor | None, ...]
    """Of the values that no step uses."""


Draw = random.Random
Maker = Callable[[Draw, Sequence[torch.Tensor]], Callable[..., Any] | None]


def _dim(draw: Draw, x: torch.Tensor) -> int:
    return draw.randrange(-x.ndim, x.ndim)


def _slice(draw: Draw, n: int) -> slice:
    start = draw.randint(0, n)
    return draw.choice(
        [slice(None), slice(start, None), slice(None, start), slice(start, n, 2), slice(-2, None), slice(1, -1)]
    )


def _index(draw: Draw, x: torch.Tensor) -> tuple[Any, ...]:
    index: list[Any] = []
    for n in x.shape:
        kind = draw.random()
        index.append(_slice(draw, n) if kind < 0.7 or n == 0 else draw.randrange(-n, n))
    if draw.random() < 0.2:
        index.insert(draw.randint(0, len(index)), None)
    if draw.random() < 0.2:
        return (..., *index[-1:])
    return tuple(index)


def pointwise(draw: Draw, xs: Any) -> Any:
    f = draw.choice(
        [
            torch.sin,
            torch.tanh,
            torch.sigmoid,
            F.gelu,
            F.softplus,
            F.silu,
            torch.square,
            torch.neg,
            torch.abs,
            lambda x: x * 0.5,
            lambda x: 1 - x,
            lambda x: x / 3,
            lambda x: x.clamp(-0.5, 0.7),
            lambda x: x**2,
            lambda x: x.masked_fill(x > 0.3, 0.1),
            lambda x: torch.where(x > 0, x, -2 * x),
            lambda x: x.clone(),
            lambda x: (x * x + 1).sqrt(),
            lambda x: (x.abs() + 1).log(),
            lambda x: x.double(),
            lambda x: F.relu(x),
            lambda x: F.leaky_relu(x + 0, inplace=True),
            lambda x: x + torch.ones_like(x),
            lambda x: x.contiguous(),
            lambda x: x + x.detach(),
            lambda x: x * x.new_ones(x.shape),
            lambda x: torch.zeros_like(x) + x,
            lambda x: x.float().double(),
            lambda x: F.hardtanh(x),
            lambda x: x.type_as(x.new_zeros(1)),
        ]
    )
    return lambda x: f(x)


def _broadcasts(x: torch.Tensor, y: torch.Tensor) -> bool:
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        return False
    return True


def pairs(draw: Draw, xs: Any) -> Any:
    if not _broadcasts(*xs):
        return None
    return draw.choice(
        [
            torch.add,
            torch.mul,
            torch.sub,
            torch.maximum,
            torch.minimum,
            lambda x, y: torch.where(x > y, x, y),
            lambda x, y: torch.addcmul(x, x, y, value=0.5),
            lambda x, y: x / (y.abs() + 1),
            torch.atan2,
            lambda x, y: torch.lerp(x, y, 0.3),
            lambda x, y: x - 2 * y,
            lambda x, y: torch.add(x, y, alpha=2),
            lambda x, y: torch.hypot(x, y + 3),
            lambda x, y: x.copysign(y.detach()),
        ]
    )


def views(draw: Draw, xs: Any) -> Any:
    (x,) = xs
    if not x.ndim:
        return None
    d, e = _dim(draw, x), _dim(draw, x)
    order = list(range(x.ndim))
    draw.shuffle(order)
    index = _index(draw, x)
    n = x.shape[d]
    factor = next((k for k in (2, 3) if n and n % k == 0), 1)
    pieces = draw.randint(1, 3)
    return draw.choice(
        [
            lambda x: x.transpose(d, e),
            lambda x: x.permute(order),
            lambda x: x[index],
            lambda x: x.unsqueeze(d),
            lambda x: x[index],
            lambda x: x.flatten(),
            lambda x: x.reshape(-1),
            lambda x: x.unflatten(d, (factor, -1)),
            lambda x: x.unflatten(d, (-1, factor)),
            lambda x: x.movedim(d, e),
            lambda x: x.squeeze(),
            lambda x: x.select(d, n // 2),
            lambda x: x.narrow(d, n // 3, n - n // 3),
            lambda x: x.flip(d),
            lambda x: x.chunk(pieces, d)[0],
            lambda x: x.chunk(pieces, d)[-1],
            lambda x: x.split(2, d)[-1],
            lambda x: x.unbind(d)[-1],
            lambda x: x.expand(2, *x.shape),
            lambda x: x.flatten(0, min(1, x.ndim - 1)),
            lambda x: x.flatten(-2) if x.ndim > 1 else x,
            lambda x: x.mT if x.ndim > 1 else x,
            lambda x: x.roll(1, d),
            lambda x: x.diff(dim=d),
            lambda x: torch.stack(list(x)) if len(x) else x,
        ]
    )


def reductions(draw: Draw, xs: Any) -> Any:
    (x,) = xs
    if not x.ndim or not x.numel():
        return None
    d, keep = _dim(draw, x), draw.random() < 0.6
    over = tuple(draw.sample(range(x.ndim), draw.randint(1, x.ndim)))
    return draw.choice(
        [
            lambda x: x.sum(d, keep),
            lambda x: x.mean(d, keepdim=keep),
            lambda x: x.amax(over, keep),
            lambda x: x.var(over, correction=0, keepdim=keep),
            lambda x: x.norm(dim=over, keepdim=keep),
            lambda x: x.softmax(d),
            lambda x: x.log_softmax(d),
            lambda x: x.logsumexp(over, keep),
            lambda x: x.sum(over, keep),
            lambda x: x.mean(over, keep),
            lambda x: x.max(d, keepdim=keep)[0],
            lambda x: x - x.mean(d, True),
            lambda x: x.cumsum(d),
            lambda x: F.normalize(x, dim=d),
            lambda x: x.sort(d)[0],
            lambda x: x.sum(),
            lambda x: x / (1 + x.norm()),
            lambda x: x.prod(d, keepdim=keep),
            lambda x: torch.linalg.vector_norm(x, 1, over, keep),
            lambda x: x.min(),
            lambda x: x.topk(1, d)[0],
            lambda x: x.nansum(over, keep),
            lambda x: x.std(d, correction=0, keepdim=keep),
            lambda x: x.median(d)[0],
        ]
    )


def norms(draw: Draw, xs: Any) -> Any:
    (x,) = xs
    if x.ndim < 2 or not x.numel():
        return None
    c, last = x.shape[1], x.shape[-1]
    weight = torch.linspace(0.5, 1.5, last, dtype=torch.float64)
    return draw.choice(
        [
            lambda x: F.layer_norm(x, (last,), weight, weight),
            lambda x: F.layer_norm(x, x.shape[-2:]),
            lambda x: F.group_norm(x, c),
            lambda x: F.batch_norm(x, None, None, training=True),
            lambda x: F.rms_norm(x, (last,), weight),
        ]
        + ([lambda x: F.instance_norm(x)] if x.ndim > 2 else [])
    )


def products(draw: Draw, xs: Any) -> Any:
    x, y = xs
    options: list[Any] = []
    if x.ndim and y.ndim and x.shape[-1] == y.shape[-1] and x.shape[-1]:
        options += [lambda x, y: x @ y.mT if y.ndim > 1 else x @ y]
        if y.ndim == 2:
            options += [lambda x, y: F.linear(x, y), lambda x, y: torch.einsum("...i,ji->...j", x, y)]
    if x.ndim == y.ndim == 2 and x.shape[0] == y.shape[0] and x.shape[0]:
        options += [lambda x, y: x.T @ y, lambda x, y: torch.einsum("ij,ik->jk", x, y), lambda x, y: torch.mm(x.t(), y)]
    if x.ndim and y.ndim and x.ndim + y.ndim <= 3 and x.numel() * y.numel() < 200:
        options += [lambda x, y: x.unsqueeze(-1) * y if y.ndim == 1 else x.sum() * y]
    if x.ndim == y.ndim == 1:
        options += [torch.outer]
    return draw.choice(options) if options else None


def joined(draw: Draw, xs: Any) -> Any:
    x, y = xs
    options: list[Any] = []
    if x.ndim and x.ndim == y.ndim:
        fits = [
            d
            for d in range(x.ndim)
            if all(a == b for k, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if k != d)
        ]
        options += [lambda x, y, d=d: torch.cat([x, y], d) for d in fits]
        options += [lambda x, y, d=d: torch.cat([x, y[:0] if d == 0 else y, x], d) for d in fits]
        if x.shape == y.shape:
            options += [lambda x, y: torch.stack([x, y], -1), lambda x, y: torch.stack([x, y])]
            options += [lambda x, y: F.mse_loss(x, y, reduction="none"), lambda x, y: F.mse_loss(x, y)]
            options += [lambda x, y: F.smooth_l1_loss(x, y, reduction="sum")]
    return draw.choice(options) if options else None


def written(draw: Draw, xs: Any) -> Any:
    """In-place functions of a copy, or of a view of it."""
    (x,) = xs
    change = draw.choice(
        [
            lambda v: v.mul_(2),
            lambda v: v.add_(1),
            lambda v: v.tanh_(),
            lambda v: v.zero_(),
            lambda v: v.fill_(0.3),
            lambda v: v.masked_fill_(v > 0, 0.5),
            lambda v: v.copy_(v * v),
            lambda v: v.clamp_(-0.2, 0.4),
        ]
    )
    look = lambda y: y
    if x.ndim:
        d, n, index = draw.randrange(x.ndim), x.shape[0], _index(draw, x)
        looks = [lambda y: y, lambda y: y[index], lambda y: y.transpose(0, -1), lambda y: y.chunk(2, d)[0]]
        looks += [lambda y: y.unsqueeze(d), lambda y: y.narrow(d, 0, y.shape[d] // 2), lambda y: y[index].unsqueeze(0)]
        looks += [lambda y: y.view(-1), lambda y: y.flatten(), lambda y: y.detach(), lambda y: y.squeeze()]
        looks += [lambda y: y.reshape(y.shape), lambda y: y[n // 2 : n // 2 + 1], lambda y: y.view(1, *y.shape)]
        looks += [lambda y: y.expand(1, *y.shape), lambda y: y.movedim(d, 0), lambda y: y.view_as(y)]
        looks += [lambda y: y.unflatten(d, (-1, 1)), lambda y: y.contiguous(), lambda y: y.to(torch.float64)]
        look = draw.choice(looks)
    kind = draw.randrange(4)

    def call(x: Any) -> Any:
        y = (x * 1).contiguous()
        v = look(y)
        if kind == 0:
            y.mul_(3)
            return v + 0  # a use, which is refused where v is a copy
        if kind == 1:
            change(v)
            return y + 0
        if kind == 2:
            change(v)
            return v + 0
        change(v)
        return v.sum() * y

    return call


def sized(draw: Draw, xs: Any) -> Any:
    (x,) = xs
    if not x.ndim or x.numel() > 200:
        return None
    a, b = draw.randint(0, 2), draw.randint(0, 2)
    options: list[Any] = [lambda x: F.pad(x, (a, b)), lambda x: F.pad(x, (a, b), value=0.5)]
    if x.ndim > 1:
        options += [lambda x: F.pad(x, (a, b, b, a)), lambda x: F.pad(x, (0, 0, a, b))]
    if x.ndim == 3 and x.numel():
        c = x.shape[1]
        w = torch.linspace(-1, 1, 2 * c * 3, dtype=torch.float64).reshape(2, c, 3)
        options += [lambda x: F.conv1d(x, w, padding=1)]
        if x.shape[-1] > 1:
            options += [lambda x: F.max_pool1d(x, 2), lambda x: F.avg_pool1d(x, 2, 1)]
            options += [lambda x: F.interpolate(x, scale_factor=2)]
    return draw.choice(options)


FAMILIES: list[tuple[Maker, int, float]] = [
    (pointwise, 1, 2),
    (pairs, 2, 2),
    (views, 1, 4),
    (reductions, 1, 2),
    (norms, 1, 1),
    (products, 2, 2),
    (joined, 2, 1.5),
    (written, 1, 2),
    (sized, 1, 1),
]


def _spec(draw: Draw, ndim: int, axes: dict[str, int]) -> P:
    entries: list[Any] = [None] * ndim
    for name in draw.sample(list(axes), len(axes)):
        if ndim and draw.random() < 0.8:
            d = draw.randrange(ndim)
            entries[d] = (*(entries[d] or ()), name)
    return P(*entries)


def chain(seed: int, axes: dict[str, int], writes: bool = True) -> Chain:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, m, k = (draw.choice([1, 2, 3, 4, 5, 6, 7]) for _ in range(3))
    shapes = [draw.choice([(n, m), (k, m), (m,), (n, k, m), (n, 1), (n, m), (2, n, m)]) for _ in range(3)]
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    specs = [_spec(draw, len(s), axes) for s in shapes]
    values, steps = list(leaves), []
    weights = [w if writes or make is not written else 0 for make, _, w in FAMILIES]
    length = draw.randint(5, 10)
    for _ in range(200):
        if len(steps) == length:
            break
        make, count, _ = draw.choices(FAMILIES, weights)[0]
        last = len(values) - 1
        operands = tuple(last if draw.random() < 0.6 else draw.randint(0, last) for _ in range(count))
        xs = [values[i] for i in operands]
        call = make(draw, xs)
        if call is None:
            continue
        try:
            y = call(*(x.clone().requires_grad_() for x in xs))
            if y.requires_grad:
                y.sum().backward()
                y = y.detach()
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
            continue
        usable = isinstance(y, torch.Tensor) and y.dtype == torch.float64 and y.numel() < 600 and y.ndim < 6
        if not usable or not bool((y.abs() < 1e3).all()):
            continue
        values.append(y)
        spec = _spec(draw, y.ndim, axes) if y.ndim and draw.random() < 0.25 else None
        steps.append(Step(make.__name__, call, operands, spec))
    used = {i for s in steps for i in s.operands}
    ends: list[Any] = [torch.randn(v.shape, generator=generator, dtype=torch.float64) for i, v in enumerate(values)]
    ends = [e if i not in used else None for i, e in enumerate(ends)]
    return Chain(tuple(leaves), tuple(specs), tuple(steps), tuple(ends))


def _whole(y: Any) -> Any:
    return y.whole() if isinstance(y, spt.GlobalTensor) else y


def run(c: Chain, split: bool, twice: bool) -> list[Any]:
    """The values after each step, and the gradients of a sum of the last ones; twice: second ones too.

    A step that is refused runs on wholes.
    """
    leaves = [x.clone().requires_grad_() for x in c.leaves]
    values = [spt.put(x, s) if split else x for x, s in zip(leaves, c.specs, strict=True)]
    for s in c.steps:
        xs = [values[i] for i in s.operands]
        try:
            y = s.call(*xs)
        except REFUSED:
            y = s.call(*map(_whole, xs))
        if split and s.spec is not None:
            try:
                y = spt.put(y, s.spec)
            except REFUSED:
                y = spt.put(_whole(y), s.spec)
        values.append(y)
    last = [(v, w) for v, w in zip(values, c.weights, strict=True) if w is not None]
    loss = sum((((_whole(v) if k % 2 else v) * w).sum() for k, (v, w) in enumerate(last)), torch.zeros(()))
    found: list[Any] = [_whole(v).detach() for v in values]
    if not loss.requires_grad:
        return found
    grads = torch.autograd.grad(loss, leaves, create_graph=twice, allow_unused=True)
    found += [None if g is None else _whole(g).detach() for g in grads]
    if twice:
        again = sum(((g * g.detach().cos()).sum() for g in grads if g is not None), torch.zeros(()))
        seconds = [None] * len(leaves)
        if again.requires_grad:
            seconds = torch.autograd.grad(again, leaves, allow_unused=True)
        found += [None if g is None else _whole(g).detach() for g in seconds]
    return found


def faults(seed: int, check: bool, twice: bool = False) -> list[str]:
    """What of a chain differs from one worker."""
    axes = MESHES[seed % len(MESHES)]
    c = chain(seed, axes, not twice)
    expected = run(c, False, twice)
    if any(map(_has_rounding_errors_alone, expected[: 3 + len(c.steps)])):  # whose signs the next functions may read
        return []
    seen = spt.map(lambda: run(c, True, twice), (), None, mesh=spmd.Mesh(**axes), check=check)()
    names = ["leaf"] * 3 + [s.name for s in c.steps] + ["gradient"] * 3 + ["second gradient"] * 3
    for k, (a, b) in enumerate(zip(seen, expected, strict=True)):
        if not _alike(a, b):
            return [f"seed {seed} {axes} check={check}: value {k} ({names[k]}): {a} in place of {b}"]
    return []


def _has_rounding_errors_alone(x: torch.Tensor) -> bool:
    """Whether an entry is what rounding left of a difference that is zero."""
    return x.is_floating_point() and bool(((x != 0) & (x.abs() < 1e-13)).any())


def _alike(a: Any, b: Any) -> bool:
    if b is not None and not bool(b.isfinite().all()):  # second derivatives at kinks
        return True
    if a is None or b is None:
        return all(t is None or not bool(t.abs().sum()) for t in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5)
