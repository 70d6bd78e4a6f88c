"""Random mixtures of experts, and the dense computation on one worker: all experts on all tokens, masked."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import spmd
from spmd import functions
from spmd.autodiff import tree

MESHES = [{"e": n} for n in range(1, 9)] + [
    {"data": 2, "e": 2},
    {"data": 2, "e": 3},
    {"e": 3, "data": 2},
    {"data": 2, "e": 2, "f": 2},
]
FEATURES, HIDDEN = 3, 2


def applied(w: Sequence[Any], h: Any) -> Any:
    """An expert: two layers, in any library."""
    return (h @ w[0]) ** 2 @ w[1]


@dataclass(frozen=True)
class Case:
    """The arguments on every worker of a mesh. Experts lie along `over`; the other axes split tokens only."""

    axes: dict[str, int]
    over: tuple[str, ...]
    token_axes: tuple[str, ...] | None
    xs: list[np.ndarray]
    gates: list[np.ndarray]
    weights: list[tuple[np.ndarray, np.ndarray]]
    held: list[int]
    gs: list[np.ndarray]
    k: int
    capacity: int | None
    renormalize: bool

    @property
    def options(self) -> dict[str, Any]:
        width = self.gs[0].shape[1]
        return {
            "k": self.k,
            "capacity": self.capacity,
            "renormalize": self.renormalize,
            "token_axes": self.token_axes,
            "out_features": None if width == FEATURES else width,
        }

    def place(self, worker: int, over: Sequence[str]) -> int:
        """The place of a worker along some axes."""
        coordinates = dict(zip(self.axes, np.unravel_index(worker, tuple(self.axes.values())), strict=True))
        place = 0
        for name in over:
            place = place * self.axes[name] + int(coordinates[name])
        return place

    def own(self, worker: int) -> range:
        """The experts of a worker."""
        place = self.place(worker, self.over)
        start = sum(self.held[:place])
        return range(start, start + self.held[place])

    def stacked(self, worker: int) -> tuple[np.ndarray, np.ndarray]:
        """The parameters of a worker's experts."""
        shapes = [w.shape for w in self.weights[0]]
        columns = [[self.weights[e][i] for e in self.own(worker)] for i in (0, 1)]
        return tuple(np.reshape(c, (len(c), *s)) for c, s in zip(columns, shapes, strict=True))  # type: ignore

    @property
    def orders(self) -> list[list[int]]:
        """The workers whose tokens are counted together, in order."""
        counted = self.over if self.token_axes is None else self.token_axes
        others = [n for n in self.axes if n not in counted]
        workers = range(math.prod(self.axes.values()))
        groups: dict[int, list[int]] = {}
        for worker in sorted(workers, key=lambda w: self.place(w, counted)):
            groups.setdefault(self.place(worker, others), []).append(worker)
        return list(groups.values())

    def masks(self) -> list[np.ndarray]:
        """Of each worker, which experts take which tokens: by loops."""
        found = [np.zeros(g.shape, bool) for g in self.gates]
        for order in self.orders:
            taken = [0] * len(self.weights)
            for worker in order:
                for t, row in enumerate(self.gates[worker]):
                    best = sorted(range(len(row)), key=lambda e: (-row[e], e))[: self.k]
                    for e in best:
                        found[worker][t, e] = self.capacity is None or taken[e] < self.capacity
                        taken[e] += 1
        return found

    def chosen(self) -> list[np.ndarray]:
        """Which experts the tokens choose."""
        return [self.dropless().masks()[w] for w in range(len(self.gates))]

    def dropless(self) -> Case:
        return Case(**{**vars(self), "capacity": None})

    def dense(self, xs, gates, weights) -> list[Any]:
        """The results, by all experts on all tokens."""
        ys = []
        for x, gate, mask, chosen in zip(xs, gates, self.masks(), self.chosen(), strict=True):
            if self.renormalize:
                gate = np.where(chosen, gate, np.zeros_like(gate) - np.inf)
            shares = np.exp(gate - np.max(gate, axis=1, keepdims=True, initial=-np.inf))
            p = shares / np.sum(shares, axis=1, keepdims=True)
            ys.append(sum((p * mask)[:, e : e + 1] * applied(w, x) for e, w in enumerate(weights)))
        return ys

    def expected(self) -> tuple[list[np.ndarray], Any]:
        """The results, and the gradients in tokens, scores and weights of Σ g y."""

        def loss(xs, gates, weights):
            return sum(np.sum(y * g) for y, g in zip(self.dense(xs, gates, weights), self.gs, strict=True))

        args = self.xs, self.gates, self.weights
        return self.dense(*args), spmd.grad(loss, (0, 1, 2))(*args)


def random_case(seed: int, meshes: Sequence[dict[str, int]] = MESHES) -> Case:
    """Uneven and empty batches, idle and overloaded experts, ties, workers without experts."""
    rng = np.random.default_rng(seed)
    axes = dict(meshes[rng.integers(len(meshes))])
    names = [n for n in axes if n != "data"]
    over = tuple(rng.permutation(names).tolist())
    workers, count = math.prod(axes.values()), int(rng.integers(1, 7))
    held = np.bincount(rng.integers(0, math.prod(axes[n] for n in over), count), minlength=1)
    held = np.pad(held, (0, math.prod(axes[n] for n in over) - len(held))).tolist()
    sizes = rng.integers(0, 6, workers) * (rng.random(workers) < 0.8)
    kind = rng.choice(["any", "ties", "overloaded", "idle", "hidden"])
    gates = [rng.normal(size=(n, count)) for n in sizes]
    if kind == "ties":
        gates = [rng.integers(0, 2, (n, count)).astype(float) for n in sizes]
    if kind == "overloaded":
        gates = [g + 9 * (np.arange(count) == count - 1) for g in gates]
    if kind == "idle":
        gates = [g - 9 * (np.arange(count) > 1) for g in gates]
    if kind == "hidden":  # some experts may not be chosen
        gates = [np.where((rng.random(g.shape) < 0.4) & (np.arange(count) > 0), -np.inf, g) for g in gates]
    width = int(rng.choice([FEATURES, 1, 4]))
    return Case(
        axes,
        over,
        tuple(rng.permutation([*axes]).tolist()) if rng.random() < 0.6 else None,
        [rng.normal(size=(n, FEATURES)) for n in sizes],
        gates,
        [(rng.normal(size=(FEATURES, HIDDEN)), rng.normal(size=(HIDDEN, width))) for _ in range(count)],
        held,
        [rng.normal(size=(n, width)) for n in sizes],
        int(rng.integers(1, min(count, 3) + 1)),
        int(rng.integers(1, 6)) if rng.random() < 0.5 else None,
        bool(rng.random() < 0.5),
    )


def check_arrays(case: Case, mesh: spmd.Mesh, stacked: bool) -> None:
    """Values and gradients of the workers here are their parts of the dense ones.

    stacked: one function, and the parameters of this worker's experts; else a list of functions.
    """
    names, found = tuple(case.axes), {}

    def body():
        w = spmd.worker_index(names)
        x, gate, g = (spmd.varying(a[w], names) for a in (case.xs, case.gates, case.gs))
        params = case.stacked(w) if stacked else [case.weights[e] for e in case.own(w)]
        params = tree.map(lambda a: spmd.varying(a, case.over), params)

        def run(x, gate, params):
            if stacked:
                return functions.experts(x, gate, applied, case.over, params=params, **case.options)
            fns = [functools.partial(applied, w) for w in params]
            return functions.experts(x, gate, fns, case.over, **case.options)

        dx, dgate, dparams = spmd.grad(lambda *args: np.sum(run(*args) * g), (0, 1, 2))(x, gate, params)
        blocks = tree.map(spmd.block, (run(x, gate, params), dx, dgate, dparams))
        found[w] = (*blocks[:3], list(zip(*blocks[3], strict=True)) if stacked else blocks[3])

    spmd.map(body, in_specs=(), out_specs=None, mesh=mesh)()
    _compare(case, found)


def check_tensors(case: Case, mesh: spmd.Mesh, stacked: bool, checked: bool) -> None:
    """The same of tensors. checked: with states."""
    import torch

    from spmd.bridge import torch as spt

    checked |= len(case.axes) > len(case.over)  # without states nothing is summed over further axes
    names, found = tuple(case.axes), {}

    def leaf(a: np.ndarray, over: Sequence[str]) -> Any:
        return spmd.varying(torch.tensor(a), over).requires_grad_()

    def body():
        w = spmd.worker_index(names)
        x, gate = leaf(case.xs[w], names), leaf(case.gates[w], names)
        if stacked:
            params = [leaf(a, case.over) for a in case.stacked(w)]
            y = spt.functions.experts(x, gate, applied, case.over, params=params, **case.options)
        else:
            params = [leaf(a, case.over) for e in case.own(w) for a in case.weights[e]]
            fns = [functools.partial(applied, p) for p in zip(params[::2], params[1::2], strict=True)]
            y = spt.functions.experts(x, gate, fns, case.over, **case.options)
        (y * spmd.varying(torch.tensor(case.gs[w]), names)).sum().backward()
        y, dx, dgate, *dparams = (spmd.block(a) for a in (y, x.grad, gate.grad, *(p.grad for p in params)))
        pairs = zip(*dparams, strict=True) if stacked else zip(dparams[::2], dparams[1::2], strict=True)
        found[w] = y, dx, dgate, list(pairs)

    spt.map(body, in_specs=(), out_specs=None, mesh=mesh, check=checked)()
    _compare(case, found)


def _compare(case: Case, found: dict[int, Any]) -> None:
    ys, (dxs, dgates, dweights) = case.expected()
    assert found
    for w, (y, dx, dgate, of_experts) in found.items():
        close(y, ys[w])
        close(dx, dxs[w])
        close(dgate, dgates[w])
        for e, pair in zip(case.own(w), of_experts, strict=True):
            for got, want in zip(pair, dweights[e], strict=True):
                close(got, want)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
