"""Random loops, drawn from a seed: steps on trees of leaves of several kinds, and the plain Python loop they equal.

A value is a field (split along the axis x of a mesh), rows of two fields, a vector of three or a scalar (the same on
all workers). Without a mesh, fields are arrays like others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import spmd
from spmd import P
from spmd.autodiff.tracer import value_of

SPLIT = ("field", "rows")
SHAPES = (*SPLIT, "vector", "scalar")
DTYPES = (np.float32, np.float64, np.complex128, np.int64)
OPERATIONS = ("add", "multiply", "bounded", "total", "shift", "twice", "where", "loop", "checkpoint", "closed")
TREES: dict[str, Callable[[list], Any]] = {
    "tuple": tuple,
    "dict": lambda leaves: {f"k{i}": x for i, x in enumerate(leaves)},
    "with None": lambda leaves: (None, *leaves),
    "nested": lambda leaves: [{"all": tuple(leaves)}, ()],
}
CHECKPOINTS = (1, 2, 3, "sqrt", 100, lambda n: (n + 1) // 2)


def plain_scan(f, init, xs=None, length=None, reverse=False, *, checkpoint=None):
    """What `spmd.scan` gives, by a loop of Python."""
    slices, structure = spmd.tree.flatten(xs)
    n = slices[0].shape[0] if slices else length
    carry, rows = init, []
    for i in reversed(range(n)) if reverse else range(n):
        carry, y = f(carry, spmd.tree.unflatten(structure, [x[i] for x in slices]))
        rows.append(y)
    return carry, spmd.tree.map(lambda *ys: np.stack(ys), *(rows[::-1] if reverse else rows))


class Kind(NamedTuple):
    """What a leaf is: its shape by name, and its dtype."""

    shape: str
    dtype: type

    def spec(self, leading: int = 0) -> P:
        """How it lies on a mesh, with dimensions before its own."""
        return P(*[None] * (leading + (self.shape == "rows")), "x") if self.shape in SPLIT else P()


class Place(NamedTuple):
    """Where a loop runs. total: the sum over workers. shift: by one along the last dimension. settle: a value in the
    state or layout of a kind."""

    total: Callable[[Any], Any]
    shift: Callable[[Any], Any]
    settle: Callable[[Any, Kind], Any]


def _shifted(v: Any) -> Any:
    return np.concatenate([v[..., -1:], v[..., :-1]], -1)


def _shifted_in_body(v: Any) -> Any:
    before = len(v.shape) - 1
    wide = spmd.halo_exchange(v, P(*[None] * before, "x"), widths=(*[(0, 0)] * before, (1, 0)), boundary="zero")
    return wide[..., : v.shape[-1]]


HOST = Place(lambda v: v, _shifted, lambda v, kind: v)
BODY = Place(
    lambda v: spmd.psum(spmd.pvary(v, "x"), "x"),
    _shifted_in_body,
    lambda v, kind: spmd.pvary(v, "x") if kind.shape in SPLIT else v,
)
GLOBAL = Place(
    lambda v: v,
    _shifted,
    lambda v, kind: spmd.reshard(v, kind.spec()) if type(value_of(v)) is spmd.PartitionedArray else v,
)


class Loop:
    """A random loop; init, xs, closed are lists of its leaves.

    workers: of the mesh for which it is made. numbers: which leaves of init are Python numbers.
    """

    def __init__(self, seed: int):
        self.seed, self.rng = seed, np.random.default_rng(seed)
        r = self.rng
        self.workers, self.width = int(r.integers(1, 9)), int(r.integers(0, 11))
        self.n, self.reverse = int(r.integers(1, 7)), bool(r.random() < 0.3)
        self.kinds = [self._kind(4) for _ in range(r.integers(1, 4))]
        self.x_kinds = [self._kind(4) for _ in range(r.integers(0, 3))]
        self.closed_kinds = [Kind("scalar", np.float64), *(self._kind(3) for _ in range(r.integers(0, 3)))]
        self.trees = [str(r.choice([*TREES])) for _ in range(3)]
        self.steps = [(str(r.choice(OPERATIONS)), *map(int, r.integers(100, size=2))) for _ in range(r.integers(2, 6))]
        self.collected = [int(r.integers(100)) for _ in range(r.integers(0, 3))]
        self.inner = (None, *CHECKPOINTS)[r.integers(7)]
        self.checkpoint = CHECKPOINTS[r.integers(6)]
        self.init = [self._draw(k) for k in self.kinds]
        self.numbers = [k.shape == "scalar" and r.random() < 0.4 for k in self.kinds]
        self.init = [x.item() if number else x for x, number in zip(self.init, self.numbers, strict=True)]
        self.xs = [self._draw(k, (self.n,)) for k in self.x_kinds]
        self.closed = [self._draw(k) for k in self.closed_kinds]

    def __repr__(self) -> str:
        return "\n".join(f"{k}: {v}" for k, v in vars(self).items() if k not in ("rng", "init", "xs", "closed"))

    def _kind(self, dtypes: int) -> Kind:
        return Kind(SHAPES[self.rng.integers(4)], DTYPES[self.rng.integers(dtypes)])

    def _draw(self, kind: Kind, before: tuple = ()) -> np.ndarray:
        shape = {"field": (self.width,), "rows": (2, self.width), "vector": (3,), "scalar": ()}[kind.shape]
        if kind.dtype is np.int64:
            return np.asarray(self.rng.integers(-2, 3, size=before + shape))
        x = self.rng.normal(size=before + shape)
        x = x + 1j * self.rng.normal(size=x.shape) if kind.dtype is np.complex128 else x
        return np.asarray(x, kind.dtype)

    @property
    def exact(self) -> bool:
        """Whether gradients have the bits of the plain loop. What a checkpointed loop inside of a step adds to an array
        that is used elsewhere too is summed before; sums of three and more terms then round otherwise."""
        return self.inner is None or "loop" not in [operation for operation, *_ in self.steps]

    def specs(self) -> tuple[list[P], list[P], list[P]]:
        """How init, xs and closed lie on a mesh."""
        init, closed = ([k.spec() for k in kinds] for kinds in (self.kinds, self.closed_kinds))
        return init, [k.spec(1) for k in self.x_kinds], closed

    def run(self, scan: Callable, place: Place, given: Sequence[list], checkpoint: Any = None) -> tuple[list, list]:
        """The leaves of the last carry and of the ys. given: init, xs, closed."""
        init, xs, closed = given
        make_carry, make_x, make_y = (TREES[name] for name in self.trees)

        def f(carry, x):
            new, ys = self.step(scan, place, spmd.tree.leaves(carry), spmd.tree.leaves(x), closed)
            return make_carry(new), make_y(ys)

        found = scan(f, make_carry(init), make_x(xs), self.n, self.reverse, checkpoint=checkpoint)
        return tuple(spmd.tree.leaves(part) for part in found)

    def step(self, scan: Callable, place: Place, carry: list, x: list, closed: list) -> tuple[list, list]:
        kinds = (*self.kinds, *self.x_kinds, *self.closed_kinds)
        pool = [(v, k.shape) for v, k in zip([*carry, *x, *closed], kinds, strict=True)]
        for operation, i, j in self.steps:
            one, other = pool[i % len(pool)], pool[j % len(pool)]
            pool.append((self.operation(operation, scan, place, one, other, closed[0]), one[1]))
        new = []
        for k, kind in enumerate(self.kinds):
            if kind.dtype is np.int64:
                new.append((carry[k] * 3 + 1) % 5)
                continue
            v = mixed(place, pool[k], pool[-1 - k % len(self.steps)])
            v = np.real(v) if kind.dtype is not np.complex128 else v + 0j
            new.append(place.settle(v.astype(kind.dtype), kind))
        given = len(carry) + len(x) + len(closed)
        if any(self.numbers):  # what is computed of a number has another dtype in the first step
            pool[given:] = [(v + np.zeros((), np.complex128), shape) for v, shape in pool[given:]]
        offered = new + [v for k, (v, _) in enumerate(pool) if k >= len(carry) or not self.numbers[k]]
        return new, [offered[k % len(offered)] for k in self.collected]

    def operation(self, operation: str, scan: Callable, place: Place, one: tuple, other: tuple, w: Any) -> Any:
        """A value of the shape of the first of two. w: a scalar that the step closes over."""
        a, shape = one
        match operation:
            case "add" | "multiply":
                return mixed(place, one, other)
            case "bounded":
                return bounded(a)
            case "total":
                total = np.sum(a * a)
                return a + 0.1 * (place.total(total) if shape in SPLIT else total)
            case "shift":
                return place.shift(a) if shape in SPLIT else 2 * a
            case "twice":
                return a * bounded(a) - a
            case "where":
                return np.where(np.real(a) > 0, a, 0.5 * a)
            case "loop":
                f = lambda c, _: (bounded(c * w + a), c)
                last, ys = scan(f, bounded(a) * w, None, 2, self.reverse, checkpoint=self.inner)
                return last + ys[1]
            case "checkpoint":
                return spmd.checkpoint(lambda c: bounded(c) * w)(a * 0.5)
            case "closed":
                return a * w
        raise AssertionError(operation)


def bounded(v: Any) -> Any:
    """A function without poles, of complex numbers too."""
    return np.divide(v, 1.0 + np.abs(v))


def mixed(place: Place, one: tuple, other: tuple) -> Any:
    """Of two values one of the shape of the first."""
    (a, shape), (b, of) = one, other
    if of == "rows" and shape != "rows":
        b, of = b[0], "field"
    if of == "field" and shape not in SPLIT:
        b = 0.1 * place.total(np.sum(b))
    elif of == "vector" and shape != "vector":
        b = b[1]
    return bounded(a) * 0.5 + bounded(b) * a * 0.25


def value(loop: Loop, scan: Callable, place: Place, given: Sequence[list], checkpoint: Any = None) -> Any:
    """A real number of everything that the loop gives."""
    total = 0.0
    for k, part in enumerate(loop.run(scan, place, given, checkpoint)):
        for i, v in enumerate(part):
            weights = np.cos(1.0 + i + k) * np.real(v) ** 2 + (np.imag(v) if np.iscomplexobj(v) else 0.0)
            total = total + place.total(np.sum(weights))
    return total
