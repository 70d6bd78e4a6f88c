"""How time grows with the workers and with the work: the same on 1, 2, 4 and 8 virtual workers, over three decades.

The five-point stencil of W4 with halos, its energy summed over the workers, value and gradient; and a step of
data-parallel training, where the gradients of the weights are summed. Ratios are to one worker of ours. Beside them
NumPy on the whole, as one writes it by hand, in one thread; our workers share the cores, one worker has all of them
for its BLAS.
Every contestant tells, besides its numbers, how far what was counted is from what the operators declare: how often each
operator was applied beyond what the work calls for, the bytes sent beyond those declared, and messages above those
declared (gradients travel together, so that there may be fewer). Where it is not nothing, the numbers are not the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, repeated
from benchmarks.fields import OFFSETS, WEIGHTS, plane

STEPS, RATE, WIDTHS = 20, 0.01, (784, 512, 512, 10)

GROWTH = Section("growth", "the same work on more virtual workers, and more work", 1e-4, ours="spmd, 1 worker")


def works(stencil: Callable[[int], Case], training: Callable[[int], Case], quick: bool) -> Builders:
    sides, batches = ((64, 200), (16, 160)) if quick else ((64, 200, 640, 2000), (16, 160, 1600, 16000))
    return {f"stencil, {n}x{n}, {STEPS} steps": partial(stencil, n) for n in sides} | {
        f"training, batch {n}": partial(training, n) for n in batches
    }


def batch(n: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Weights, inputs, and what they should give."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(s, np.float32) / np.float32(s[0] ** 0.5) for s in pairwise(WIDTHS)]
    return weights, rng.standard_normal((n, WIDTHS[0]), np.float32), rng.standard_normal((n, WIDTHS[-1]), np.float32)


def astray(
    mesh: Any, run: Callable[[], Any], work: Callable[[], list[tuple[Any, Any, int]]], gradients: int = 0
) -> np.ndarray:
    """How far what is counted is from what is declared, of all workers together.

    work: in a body, the operators that the work applies, with this worker's block and how often. gradients: how many of
    them, at first, are sums of gradients, which travel together.
    """
    import spmd
    from spmd.mesh import here
    from spmd.transport.costs import cost_of_sums

    declared: dict[int, tuple[int, int]] = {}
    operators: dict[str, int] = {}

    def local():
        worker, listed = here("benchmarks.growth"), work()
        plans = [(op.plan(worker.group(op.axes), block.shape, block.dtype), times) for op, block, times in listed]
        costs = [np.array(plan.cost) * times for plan, times in plans[gradients:]]
        if gradients:
            group, blocks = plans[0][0].group, [block for _, block, _ in listed[:gradients]]
            together = cost_of_sums(group, blocks[0].dtype, [block.shape for block in blocks])
            costs.append(np.array([together.messages, together.nbytes]))
        declared[worker.index] = tuple(sum(costs))
        operators.clear()
        for op, _, times in listed:
            operators[type(op).__name__] = operators.get(type(op).__name__, 0) + times

    with spmd.ledger() as log:
        run()
    mesh.map(local, in_specs=(), out_specs=None)()
    records = log.workers.values()
    # Vary moves nothing, and is applied where an Invariant array happens to meet a Varying one.
    names = {*operators, *(o for r in records for o in r.operators)} - {"Vary"}
    beyond = sum(abs(r.operators[o] - operators.get(o, 0)) for r in records for o in names)
    messages, sent = (sum(d[k] for d in declared.values()) for k in range(2))
    return np.array([beyond, sum(r.bytes for r in records) - sent, max(0, sum(r.messages for r in records) - messages)])


def stencil_spmd(workers: int, points: int) -> Case:
    import spmd
    from spmd import P
    from spmd.operators.stencil import Stencil
    from spmd.operators.sums import Sum

    def local(u):
        for _ in range(STEPS):
            u = spmd.stencil(u, P("x"), OFFSETS, WEIGHTS)
        return spmd.psum(0.5 * np.sum(u * u), "x")

    mesh = spmd.Mesh(x=workers, transport="local")
    step = spmd.value_and_grad(mesh.map(local, in_specs=P("x"), out_specs=P()))
    u = spmd.put(plane(points), P("x"), mesh)

    def work():
        block = np.empty(mesh.layout((points, points), P("x")).block_shape(spmd.worker_index("x")))
        return [(Stencil(("x",), P("x"), OFFSETS, WEIGHTS), block, 2 * STEPS), (Sum(("x",)), np.zeros(()), 1)]

    return Case(repeated(lambda: step(u)), lambda: [*map(np.asarray, step(u)), astray(mesh, lambda: step(u), work)])


def training_spmd(workers: int, n: int) -> Case:
    import spmd
    from spmd import P
    from spmd.operators.sums import Sum

    def local(weights, x, y):
        for w in weights[:-1]:
            x = np.tanh(x @ w)
        return spmd.psum(np.sum((x @ weights[-1] - y) ** 2), "x") * (1 / (n * WIDTHS[-1]))

    mesh = spmd.Mesh(x=workers, transport="local")
    differentiated = spmd.value_and_grad(mesh.map(local, in_specs=(P(), P("x"), P("x")), out_specs=P()))
    weights, x, y = batch(n)
    with mesh:
        weights, x, y = spmd.put((weights, x, y), (P(), P("x"), P("x")))

    def step():
        value, grads = differentiated(weights, x, y)
        return [value, *(w - RATE * g for w, g in zip(weights, grads, strict=True))]

    def work():
        return [(Sum(("x",)), a, 1) for a in (*batch(0)[0], np.zeros((), np.float32))]

    gradients = len(weights)
    return Case(repeated(step), lambda: [*map(np.asarray, step()), astray(mesh, step, work, gradients)])


def on_workers(workers: int, quick: bool) -> Builders:
    return works(partial(stencil_spmd, workers), partial(training_spmd, workers), quick)


for _workers in (1, 2, 4, 8):
    GROWTH.contestant(f"spmd, {_workers} worker{'s' * (_workers > 1)}")(partial(on_workers, _workers))


def stencil_numpy(points: int) -> Case:
    """Two padded planes, filled in turn. The stencil is its own adjoint: the gradient is the same steps again."""
    u, scratch = plane(points), np.empty((points, points))
    planes = [np.zeros((points + 2, points + 2)) for _ in range(2)]

    def advance():
        for k in range(STEPS):
            a, b = planes[k % 2], planes[1 - k % 2][1:-1, 1:-1]
            np.add(a[2:, 1:-1], a[:-2, 1:-1], out=b)
            np.add(b, a[1:-1, 2:], out=b)
            np.add(b, a[1:-1, :-2], out=b)
            np.multiply(b, WEIGHTS[1], out=b)
            np.multiply(a[1:-1, 1:-1], WEIGHTS[0], out=scratch)
            np.add(b, scratch, out=b)

    def step():
        inner = planes[0][1:-1, 1:-1]
        inner[:] = u
        advance()
        np.multiply(inner, inner, out=scratch)
        value = 0.5 * scratch.sum()
        advance()
        return value, inner.copy()

    return Case(repeated(step), lambda: [*step(), np.zeros(3)])


def training_numpy(n: int) -> Case:
    weights, x, y = batch(n)

    def step():
        kept = [x]
        for w in weights[:-1]:
            h = kept[-1] @ w
            kept.append(np.tanh(h, out=h))
        r = kept[-1] @ weights[-1] - y
        value, g, grads = np.sum(r * r) / r.size, r * (2 / r.size), []
        for k in reversed(range(len(weights))):
            grads.insert(0, kept[k].T @ g)
            if k:
                h = kept[k]
                g = g @ weights[k].T
                g *= 1 - h * h
        return [value, *(w - RATE * g for w, g in zip(weights, grads, strict=True))]

    return Case(repeated(step), lambda: [*step(), np.zeros(3)])


@GROWTH.contestant("numpy, serial", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return works(stencil_numpy, training_numpy, quick)
