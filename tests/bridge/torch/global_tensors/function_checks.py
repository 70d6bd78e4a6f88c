"""A call on global tensors against the same call on one worker: values and gradients, on random layouts."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import spmd
from spmd import P
from spmd.bridge import torch as spt
from spmd.errors import LayoutError, MismatchError, SpecError, StateError
from spmd.mesh import here

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 1, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 4}, {"a": 1}]


USUAL = ("global", "whole", "parameter")
UNUSUAL = ("grid", "unpacked", "whole")
"""Kinds of operands: on a grid of workers, and parameters of which one dimension is several in one."""


class Operand(NamedTuple):
    """A whole, how it is held, and the part of it that is used, so that cuts are uneven."""

    whole: torch.Tensor
    kind: str
    spec: P | spmd.Grid
    part: tuple[slice, ...]


class Trial(NamedTuple):
    """One call with its operands."""

    f: Any
    call: Callable[..., Any]
    operands: tuple[Operand, ...]
    name: str


def trial(
    name: str,
    f: Any,
    call: Callable[..., Any],
    letters: Sequence[str],
    axes: dict[str, int],
    seed: int,
    kinds: Sequence[str] = USUAL,
) -> Trial:
    """A call on operands of random lengths, layouts and entries."""
    key = zlib.crc32(repr((name, tuple(letters), seed)).encode())
    draw, generator = random.Random(key), torch.Generator().manual_seed(key)
    sizes: dict[str, int] = {}
    operands: list[Operand] = []
    lead = draw.randrange(len(letters))
    for k, term in enumerate(letters):
        sign = term[0] if term[0] in "+i" or _signs(term, name) else ""
        shape = [int(c) if c.isdigit() else sizes.setdefault(c, draw.randint(2, 6)) for c in term[len(sign) :]]
        kind = kinds[0] if k == lead else draw.choice(kinds)
        if kinds is UNUSUAL and k == lead and not sign and shape and shape[0] % 2 == 0 and draw.random() < 0.5:
            kind = "unpacked"
        if kind == "unpacked" and (not shape or shape[0] % 2) or kind != kinds[0] and sign in ("i", "b", "c"):
            kind = "whole"
        operands.append(_operand(sign, shape, kind, axes, draw, generator))
    return Trial(f, call, tuple(operands), f"{name} {' '.join(letters)} seed {seed}")


def _signs(term: str, name: str) -> bool:
    """Whether the first letter, b or c, is a sign: of three letters and more, where the letter comes twice or alone."""
    return term in ("bab", "bb", "ba1", "bbc", "cab") and name not in ("matmul", "expand_as")


def _operand(sign: str, shape: list[int], kind: str, axes: Any, draw: Any, generator: Any) -> Operand:
    more = [draw.choice([0, 0, 1, 4]) if kind == "global" else 0 for _ in shape]
    before = [draw.randint(0, m) for m in more]
    whole = _entries(sign, [n + m for n, m in zip(shape, more, strict=True)], generator)
    part = tuple(slice(b, b + n) for b, n in zip(before, shape, strict=True))
    names = list(axes)
    draw.shuffle(names)
    if kind == "grid":
        return Operand(whole, kind, _grid(len(shape), math.prod(axes.values()), draw), part)
    if kind == "unpacked":
        return Operand(whole, kind, P(None, tuple(names)), part)
    entries: list[Any] = [None] * len(shape)
    for axis in names:
        if shape and draw.random() < 0.8:
            d = draw.randrange(len(shape))
            entries[d] = (*(entries[d] or ()), axis)
    return Operand(whole, kind, P(*entries), part)


def _grid(ndim: int, size: int, draw: Any) -> spmd.Grid:
    """A grid of some of the workers, in any order."""
    dims: list[int] = []
    for _ in range(ndim):
        dims.append(draw.randint(1, max(1, size // math.prod(dims))))
    draw.shuffle(dims)
    return spmd.Grid(tuple(dims), workers=tuple(draw.sample(range(size), math.prod(dims))))


def _entries(sign: str, shape: list[int], generator: Any) -> torch.Tensor:
    if sign == "i":
        return torch.randint(0, 50, shape, generator=generator)
    if sign == "b":
        return torch.rand(shape, generator=generator) < 0.5
    if sign == "+":
        return 0.1 + 0.8 * torch.rand(shape, generator=generator, dtype=torch.float64)
    dtype = torch.complex128 if sign == "c" else torch.float64
    return torch.randn(shape, generator=generator, dtype=dtype)


def outcome(t: Trial, split: bool) -> Any:
    """Values and gradients, or the error."""
    try:
        return _outcome(t, split)
    except Exception as error:
        return error


def _outcome(t: Trial, split: bool) -> Any:
    leaves, given = [], []
    for o in t.operands:
        x = o.whole.clone()
        floats = x.is_floating_point() or x.is_complex()
        if split and o.kind == "parameter":
            x = spt.Parameter(x, o.spec)
        elif split and o.kind == "unpacked":
            x = spt.Parameter(x, o.spec, unpacked=(2, x.shape[0] // 2, *x.shape[1:]))
        elif floats:
            x.requires_grad_()
        leaves.append(x)
        laid = spt.put(x, o.spec) if split and o.kind in ("global", "grid") and x.ndim else x
        given.append(laid[o.part] if o.kind == "global" else laid)
    y = t.call(t.f, *given)
    wholes = [_whole(p) for p in (y if isinstance(y, tuple | list) else (y,))]
    tracked = [p for p in wholes if isinstance(p, torch.Tensor) and p.requires_grad and p.dtype != torch.bool]
    grads: list[Any] = []
    if tracked:
        loss = sum((p * _weights(p, k)).sum().real.double() for k, p in enumerate(tracked))
        wanted = [x for x in leaves if x.requires_grad]
        loss.backward()
        grads = [None if x.grad is None else _whole(x.grad) for x in wanted]
    return [p.detach() if isinstance(p, torch.Tensor) else p for p in wholes], grads


def _weights(p: torch.Tensor, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(p.numel() + k)
    return torch.randn(p.shape, generator=generator, dtype=torch.float64)


def _whole(p: Any) -> Any:
    return p.whole() if hasattr(type(p), "whole") else p


def faults(trials: Sequence[Trial], axes: dict[str, int], check: bool) -> list[str]:
    """What of the calls is neither right nor refused, on all workers."""
    found: list[str] = []
    while trials:
        seen, done = _outcomes(trials, axes, check)
        for t, s in zip(trials[:done], seen, strict=False):
            found += [f"{t.name} {axes}: {why}" for why in _wrong(t, s)]
        trials = trials[done:]
    return found


def _outcomes(trials: Sequence[Trial], axes: dict[str, int], check: bool) -> tuple[list[list[Any]], int]:
    """What each worker found of each call, and how many calls they made together."""
    size = spmd.Mesh(**axes).size
    seen: list[list[Any]] = [[None] * size for _ in trials]

    def main() -> None:
        for k, t in enumerate(trials):
            seen[k][here("trials").index] = y = outcome(t, True)
            if isinstance(y, MismatchError):  # workers that went apart do not meet again
                raise y

    try:
        spt.map(main, (), None, mesh=spmd.Mesh(**axes), check=check)()
    except MismatchError:
        apart = [len({type(s) for s in each}) > 1 for each in seen]
        met = [any(isinstance(s, MismatchError) for s in each) for each in seen]
        return seen, 1 + next(k for k in range(len(trials)) if apart[k] or met[k])
    return seen, len(trials)


def _wrong(t: Trial, seen: list[Any]) -> list[str]:
    expected = outcome(t, False)
    specs = [(o.kind, o.spec, list(o.whole.shape)) for o in t.operands]
    if isinstance(expected, Exception):  # as views that torch cannot take without a copy
        return []
    errors = [s for s in seen if isinstance(s, Exception) or s is None]
    if errors:
        if len(errors) < len(seen):
            return [f"{specs} raises on some workers only: {errors[0]!r}"]
        kinds = {f"{type(e).__name__}: {e}" for e in errors if not isinstance(e, LayoutError | SpecError | StateError)}
        return [f"{specs} raises {k[:300]}" for k in sorted(kinds)[:1]]
    for s in seen:
        for what, mine, own in (("value", s[0], expected[0]), ("gradient", s[1], expected[1])):
            mine = mine or [None] * len(own) if what == "gradient" else mine
            if len(mine) != len(own):
                return [f"{specs} {len(mine)} {what}s in place of {len(own)}"]
            for k, (a, b) in enumerate(zip(mine, own, strict=True)):
                if not alike(a, b):
                    return [f"{specs} {what} {k}: {a} in place of {b}"]
    return []


def alike(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        zero = lambda x: x is None or isinstance(x, torch.Tensor) and not bool(x.abs().sum())
        return a == b if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) else zero(a) and zero(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    tolerance = 1e-9 if a.dtype in (torch.float64, torch.complex128) else 1e-2 if a.dtype.itemsize == 2 else 1e-4
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
