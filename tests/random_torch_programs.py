"""Random programs of torch: what bodies on blocks of rows compute and differentiate, against one worker with all rows.

A program is a list of steps on a matrix of features, drawn from a seed, with parameters that are the same on all
workers. A fault makes worker `odd` differ where that decides a number, or takes statistics of its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from random_programs import judged
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt

__all__ = ["Program", "draw", "verdict"]

WIDTH = 3
STEPS = (
    *(
        "linear",
        "scale by a function of the user's",
        "tanh",
        "add an Invariant number",
        "centre",
        "normalise without grad",
    ),
    *("checkpoint", "in place"),
)
FAULTS = ("batch norm", "undeclared weight", "undeclared mean", "undeclared mean without grad")


class Scale(torch.autograd.Function):
    """x * w, with a backward of the user's, who knows of no workers."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@dataclass
class Program:
    """sizes: rows of each worker. fault: how worker `odd` differs, before step `at`."""

    seed: int
    sizes: list[int]
    steps: list[str]
    fault: str | None
    odd: int
    at: int

    def __str__(self) -> str:
        return f"program {self.seed} of torch: rows {self.sizes}, {self.steps}, {self.fault} on {self.odd} at {self.at}"


def draw(seed: int) -> Program:
    rng = np.random.default_rng((seed, 7))
    sizes = [int(k) for k in rng.integers(1, 5, int(rng.integers(1, 5)))]
    steps = [str(s) for s in rng.choice(STEPS, int(rng.integers(1, 6)))]
    fault = str(rng.choice(FAULTS)) if len(sizes) > 1 and rng.random() < 0.4 else None
    return Program(seed, sizes, steps, fault, int(rng.integers(len(sizes))), int(rng.integers(len(steps))))


def parameters(p: Program) -> list[torch.Tensor]:
    rng = np.random.default_rng((p.seed, 8))
    shapes = [(WIDTH, WIDTH) if s in ("linear", "checkpoint") else (WIDTH,) for s in p.steps]
    return [torch.tensor(rng.normal(size=shape), requires_grad=True) for shape in shapes]


def step(name: str, h: Any, w: Any, mean: Any) -> Any:
    """One step. mean: the mean over the rows of all workers."""
    match name:
        case "linear":
            return h @ w
        case "checkpoint":
            return torch.utils.checkpoint.checkpoint(lambda h, w: torch.tanh(h @ w), h, w, use_reentrant=False)
        case "scale by a function of the user's":
            return Scale.apply(h, w)
        case "tanh":
            return torch.tanh(h) * w
        case "add an Invariant number":
            return h + (w * w).sum()
        case "centre":
            return (h - mean(h)) * w
        case "normalise without grad":
            with torch.no_grad():
                scale = mean((h * w) ** 2)
            return h * w / (1.0 + scale)
        case "in place":
            y = torch.zeros_like(h)
            y += h * w
            return y
    raise AssertionError(name)


def faulty(p: Program, worker: int, k: int, h: Any, w: Any) -> tuple[Any, Any]:
    """What worker `worker` has in place of h and w at step k."""
    if k != p.at or p.fault is None:
        return h, w
    different = torch.full((WIDTH,), 1.0 + (worker == p.odd), dtype=torch.float64)
    if p.fault == "batch norm":
        return nn.BatchNorm1d(WIDTH, dtype=torch.float64)(h), w
    if p.fault == "undeclared weight":
        return h, (w.detach() * different).requires_grad_()
    if p.fault == "undeclared mean":
        return h * spt.mean(different, "x"), w
    with torch.no_grad():
        return h * spt.mean(different, "x"), w


def run(p: Program) -> list[torch.Tensor]:
    """The loss, and its gradients with respect to the parameters."""
    whole, blocks = rows(p)

    def main(x):
        worker = spt.worker_index("x")
        h, ws = x, [w.detach().clone().requires_grad_() for w in whole]
        for k, name in enumerate(p.steps):
            h, w = faulty(p, worker, k, h, ws[k])
            h = step(name, h, w, lambda h: spt.mean(h, "x", (0,)))
        loss = spt.mean(h**2, "x")
        loss.backward()
        return loss.detach(), [torch.zeros_like(w) if w.grad is None else w.grad for w in ws]

    mesh = spmd.Mesh(x=len(p.sizes), transport="local")
    x = spmd.from_blocks([b.numpy() for b in blocks], P("x"), mesh=mesh)
    loss, grads = spt.map(main, P("x"), P(), mesh=mesh)(x)
    return [torch.as_tensor(y) for y in (loss, *grads)]


def rows(p: Program) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rng = np.random.default_rng((p.seed, 9))
    return parameters(p), [torch.tensor(rng.normal(size=(n, WIDTH))) for n in p.sizes]


def oracle(p: Program) -> list[torch.Tensor]:
    """The same on one worker with all rows, by torch alone."""
    ws, blocks = rows(p)
    h = torch.cat(blocks)
    for name, w in zip(p.steps, ws, strict=True):
        h = step(name, h, w, lambda h: h.mean(0))
    loss = (h**2).mean()
    loss.backward()
    return [loss.detach(), *(torch.zeros_like(w) if w.grad is None else w.grad for w in ws)]


def verdict(p: Program) -> str:
    """What is wrong with how a program ends; nothing where it is right, or raises as it should."""
    return judged(p, lambda: run(p), lambda: oracle(p))
