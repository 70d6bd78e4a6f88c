"""Halos of blocks whose lengths are learnt: values, cotangents, and both again, against a padded array. Runs with any
transport; as a program, which `by_messages.py` starts, it counts messages."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import spmd
from spmd import P
from spmd.device import to_host
from spmd.layout import Layout, offsets
from spmd.mesh import here
from spmd.operators.halo import HaloExchange

MODES = {"periodic": "wrap", "reflect": "reflect", "edge": "edge"}


def indices(sizes, widths, boundary: str) -> list[np.ndarray]:
    """For each block the entries of the array that stand in its result; -1 for a zero."""
    at, n, far = offsets(sizes), sum(sizes), 8
    if boundary in MODES and n:
        line = np.pad(np.arange(n), far, MODES[boundary])
    else:
        line = np.pad(np.arange(n), far, constant_values=-2 if boundary == "none" else -1)
    boxes = [
        line[a - low + far : b + high + far] for (a, b), (low, high) in zip(itertools.pairwise(at), widths, strict=True)
    ]
    return [box[box != -2] for box in boxes]


class Problem(NamedTuple):
    """An array in blocks, and halos. given: whether the lengths of the blocks are given in each dimension."""

    layout: Layout
    widths: tuple
    boundary: tuple[str, ...]
    given: tuple[bool, ...]
    seed: int

    @property
    def operator(self) -> HaloExchange:
        spec = P(*self.layout.spec.trimmed)
        sizes = [cut if given else None for cut, given in zip(self.layout.cuts, self.given, strict=True)]
        return HaloExchange(spec.axes, spec, self.widths, self.boundary, sizes if any(self.given) else None)

    def selection(self, worker: int) -> list[np.ndarray]:
        """In each dimension the entries that stand in the result."""
        lines = zip(self.layout.cuts, self.widths, self.boundary, strict=True)
        return [indices(*line)[k] for line, k in zip(lines, self.layout.positions(worker), strict=True)]

    def __str__(self) -> str:
        return f"{self.operator} of blocks {self.layout.cuts}"


def sampled(axes: dict[str, int], seed: int) -> Problem:
    """Blocks of up to 5 entries, some empty, and halos of up to 7; each dimension is split by one axis or by two."""
    rng = np.random.default_rng([seed, *axes.values()])
    names = [*axes]
    split = [names[:1], names[1:]] if rng.random() < 0.7 else [[], names]
    spec = P(*(tuple(n) or None for n in split))
    cuts, widths, boundary = [], [], []
    for along in split:
        count, top = math.prod(axes[n] for n in along), rng.integers(1, 6)
        cut = tuple(rng.integers(0, top + 1, count).tolist())
        most = rng.choice([1, 3, 7])
        wide = rng.integers(-1 if rng.random() < 0.3 else 0, most + 1, (count if rng.random() < 0.5 else 1, 2)).tolist()
        wide = (wide * count)[:count]
        widths.append(
            tuple((low, high) if low + high + n >= 0 else (0, 0) for n, (low, high) in zip(cut, wide, strict=True))
        )
        boundary.append(str(rng.choice(["none", "zero", *MODES] if sum(cut) else ["none", "zero"])))
        cuts.append(cut)
    layout = Layout([sum(cut) for cut in cuts], spec, axes, cuts)
    return Problem(layout, tuple(widths), tuple(boundary), tuple((rng.random(2) < 0.2).tolist()), seed)


def chosen(x: np.ndarray, picks: list[np.ndarray]) -> np.ndarray:
    for d, pick in enumerate(picks):
        x = np.take(np.concatenate([x, np.zeros_like(x, shape=(*x.shape[:d], 1, *x.shape[d + 1 :]))], d), pick, d)
    return x


def added(problem: Problem, ys: list[np.ndarray]) -> np.ndarray:
    """The adjoint of `chosen`, for all workers."""
    out = np.zeros(problem.layout.shape)
    for worker, y in enumerate(ys):
        picks = problem.selection(worker)
        for d, pick in enumerate(picks):
            y = np.take(y, np.flatnonzero(pick >= 0), d)
        np.add.at(out, np.ix_(*(pick[pick >= 0] for pick in picks)), y)
    return out


def check(problem: Problem, mesh: spmd.Mesh) -> None:
    """Compare on each worker."""
    layout, op = problem.layout, problem.operator
    rng = np.random.default_rng(problem.seed)
    wholes = [rng.integers(-9, 10, layout.shape).astype(float) for _ in range(2)]
    cs = [rng.integers(-9, 10, list(map(len, problem.selection(w)))).astype(float) for w in range(layout.size)]
    back = added(problem, cs)

    def same(said: str, y: Any, want: np.ndarray) -> None:
        y = to_host(spmd.block(y))
        assert y.shape == want.shape, f"{said} of {problem}: {y.shape}, not {want.shape}"
        assert np.array_equal(y, want), f"{said} of {problem}: {y}, not {want}"

    def body() -> None:
        worker = here("test").index
        own = layout.slices(worker)
        c = spmd.varying(cs[worker], op.axes)
        for whole in wholes:
            x = spmd.varying(np.ascontiguousarray(whole[own]), op.axes)
            want = chosen(whole, problem.selection(worker))
            y, pull = spmd.vjp(op, x)
            same("the value", y, want)
            (g,), again = spmd.vjp(pull, c)
            same("the cotangent", g, back[own])
            same("the value of the bound operator", again((x,))[0], want)
            same("the value without gradients", op(x), want)

    spmd.map(body, in_specs=(), out_specs=None, mesh=mesh)()


def meshes(n: int) -> list[dict[str, int]]:
    return [{"x": k, "y": n // k} for k in range(1, n + 1) if n % k == 0]


def check_samples(n: int, count: int, first: int = 0, **options: Any) -> None:
    """Problems on all meshes of n workers."""
    for axes in meshes(n):
        mesh = spmd.make_mesh(tuple(axes.values()), tuple(axes), **options)
        for seed in range(first, first + count):
            check(sampled(axes, seed), mesh)


def messages(n: int) -> dict[str, int]:
    """The most messages that a worker sends another in a call, by what it knows and does: only neighbours get any."""
    from spmd.transport.processes.links import Link

    sent: Counter[int] = Counter()
    send = Link.send

    def counted(link: Link, *args: Any) -> Any:
        sent[link.peer] += 1
        return send(link, *args)

    Link.send = counted  # type: ignore[method-assign]
    found: dict[str, int] = {}
    try:
        for boundary, known, axes in itertools.product(("none", "periodic", "reflect"), (False, True), meshes(n)):
            shape = [6 * k for k in axes.values()] if known else None

            def body(worker, boundary=boundary, axes=axes, shape=shape) -> dict[str, int]:
                most: dict[str, int] = {}

                def called(what: str, f: Callable[[], Any]) -> Any:
                    sent.clear()
                    result = f()
                    assert sent.keys() <= neighbours(worker.index, *axes.values()), f"{what}, {axes}: {sent}"
                    most[what] = max([most.get(what, 0), *sent.values()])
                    return result

                x = spmd.varying(np.ones((6, 6)), ("x", "y"))
                halo = partial(spmd.halo_exchange, spec=P("x", "y"), widths=(2, (3, 1)), boundary=boundary, shape=shape)
                for _ in range(3):
                    y, pull = called("there", lambda: spmd.vjp(halo, x))
                    called("back", lambda pull=pull, y=y: pull(y))
                return most

            mesh = spmd.make_mesh(tuple(axes.values()), tuple(axes))
            for most in mesh.transport.share(mesh.run(body).results).values():
                for name, count in most.items():
                    full = f"{name}, {'known' if known else 'learnt'}"
                    found[full] = max(found.get(full, 0), count)
    finally:
        Link.send = send  # type: ignore[method-assign]
    return found


def neighbours(worker: int, rows: int, columns: int) -> set[int]:
    """The workers beside one, on a mesh that closes on itself."""
    i, j = divmod(worker, columns)
    beside = [((i - 1) % rows, j), ((i + 1) % rows, j), (i, (j - 1) % columns), (i, (j + 1) % columns)]
    return {a * columns + b for a, b in beside}


def part_shares_memory() -> None:
    """Let workers of even numbers share memory, as if they were on one host, and others meet by messages."""
    from spmd.transport.processes.message_groups import MessageGroups

    on_this_host = MessageGroups.on_this_host
    MessageGroups.on_this_host = lambda groups, ranks: on_this_host(groups, ranks) and not any(r % 2 for r in ranks)


if __name__ == "__main__":
    n, count = map(int, sys.argv[1:3])
    if sys.argv[3:] == ["part"]:
        part_shares_memory()
    check_samples(n, count)
    counts = messages(n)
    if spmd.is_main():
        print(json.dumps(counts))
