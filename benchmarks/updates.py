"""A step of AdamW on many parameters of float32, in one thread. PyTorch writes into its parameters and state; ours are
new arrays each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, repeated, torch_with

RATE, DECAY = 1e-3, 1e-2

UPDATES = Section("updates", "a step of AdamW on many parameters", 1e-5)


def works(case: Callable[[int, int], Case], quick: bool) -> Builders:
    """Some of each size: so many parameters of so many numbers."""
    sizes = {"64 of 16 KB": (64, 1 << 12), "8 of 4 MB": (8, 1 << 20), "2 of 64 MB": (2, 1 << 24)}
    return {name: partial(case, *size) for name, size in list(sizes.items())[: 1 if quick else None]}


def arrays(count: int, n: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Parameters, and their gradients."""
    rng = np.random.default_rng(0)
    params, grads = ([rng.standard_normal(n, np.float32) for _ in range(count)] for _ in range(2))
    return params, grads


def moved(step: Callable[[], Any], params: Callable[[], list[np.ndarray]], start: list[np.ndarray]) -> Case:
    """How far the first and the last parameter have gone after three steps, which the case takes before it is timed."""
    for _ in range(3):
        step()
    told = [np.array(a) - b for a, b in zip(params()[:: len(start) - 1], start[:: len(start) - 1], strict=True)]
    return Case(repeated(step), lambda: told)


def ours(count: int, n: int) -> Case:
    from spmd import optim

    params, grads = start, _ = arrays(count, n)
    optimizer = optim.adamw(RATE, weight_decay=DECAY)
    state = optimizer.init(params)

    def step():
        nonlocal params, state
        params, state = optimizer.update(grads, state, params)

    return moved(step, lambda: params, start)


@UPDATES.contestant("spmd, NumPy alone", env={**ONE_THREAD, "SPMD_NUMBA": "0"})
@UPDATES.contestant("spmd", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return works(ours, quick)


def theirs(count: int, n: int, **how: bool) -> Case:
    torch = torch_with(1)
    start, grads = arrays(count, n)
    params = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in start]
    for p, g in zip(params, grads, strict=True):
        p.grad = torch.from_numpy(g)
    step = torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY, **how).step
    return moved(step, lambda: [p.detach().numpy() for p in params], start)


@UPDATES.contestant("torch, fused", needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return works(partial(theirs, fused=True), quick)


@UPDATES.contestant("torch, foreach", needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return works(partial(theirs, foreach=True), quick)
