"""Loops at random: steps of random operations, in bodies and on global arrays, to compare programs with Python."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import spmd
from spmd import P

__all__ = ["Job", "bits", "job", "kinds"]

ROWS = 3
"""Columns of u, length of v: carries of a body are u, rows split over the workers, v, copies, and s, a number."""


class Job(NamedTuple):
    """A random function with a loop, and sets of arguments for it: `f(u, v, s, w, b, key)` is a number."""

    f: Any
    arguments: list[tuple[Any, ...]]
    differentiated: tuple[int, ...]
    text: str


def bits(tree: Any) -> list[tuple[Any, bytes]]:
    """Shape, dtype and bytes of each leaf."""
    whole = [np.asarray(x.numpy() if hasattr(x, "numpy") else x) for x in spmd.tree.leaves(tree)]
    return [(x.shape, x.dtype, np.ascontiguousarray(x).tobytes()) for x in whole]  # type: ignore[misc]


class _Local:
    """What steps on the blocks of a body do along the axes of a mesh."""

    def __init__(self, axes: tuple[str, ...]):
        self.all, self.first = axes, axes[0]

    def kept(self, u: Any) -> Any:
        """u in the layout that the carry keeps."""
        return u

    def total(self, x: Any) -> Any:
        return spmd.psum(x, self.all)

    def weighted(self, x: Any) -> Any:
        """The sum over all workers, of what may be a copy on each."""
        return spmd.psum(x * (1 + spmd.axis_index(self.all)).astype(x.dtype), self.all)

    def neighbours(self, u: Any) -> Any:
        return u + 0.3 * spmd.shift(u.sum(0), self.first)

    def gathered(self, u: Any) -> Any:
        return u + 0.1 * spmd.all_gather(u.sum(0), self.first).sum(0)

    def ring(self, u: Any) -> Any:
        n = spmd.axis_size(self.first)
        return u - 0.2 * spmd.ppermute(u.sum(0), self.first, [(k, (k + 1) % n) for k in range(n - 1)])

    def noise(self, key: Any, u: Any) -> Any:
        return spmd.random.normal(key, u.shape, u.dtype)


class _Whole(_Local):
    """The same, of global arrays."""

    def __init__(self, spec: P) -> None:
        self.spec = spec

    def kept(self, u: Any) -> Any:
        return spmd.reshard(u, self.spec if u.ndim == 2 else P())

    def total(self, x: Any) -> Any:
        return x

    weighted = total

    def neighbours(self, u: Any) -> Any:
        return u + 0.3 * np.roll(u, 1, 0)

    def gathered(self, u: Any) -> Any:
        return u + 0.1 * np.concatenate([u[1:], u[:1]])

    def ring(self, u: Any) -> Any:
        return u - 0.2 * u[::-1]

    def noise(self, key: Any, u: Any) -> Any:
        return spmd.random.normal(key, u.shape, u.dtype, like=u)


class _Env(NamedTuple):
    """What a step closes over."""

    at: Any
    w: Any
    b: Any


def _float(count, like):
    """A count, which may be a number of Python's, in the dtype of an array."""
    return count * np.ones((), like.dtype) if isinstance(count, int) else count.astype(like.dtype)


def _product(e, c, x):
    return {**c, "u": e.at.kept(np.tanh(c["u"] @ e.w))}


def _transposed(e, c, x):
    return {**c, "u": e.at.kept(np.sin(c["u"] @ e.w.T * 0.5)), "v": np.cos(e.w.reshape(-1)[2:5] * c["v"])}


def _totals(e, c, x):
    return {**c, "v": c["v"] * 0.5 + np.tanh(e.at.total(c["u"].sum(0)))}


def _back_from_totals(e, c, x):
    return {**c, "u": c["u"] * np.tanh(c["v"]) + x[0]}


def _scaled(e, c, x):
    return {**c, "u": c["u"] * c["s"], "s": np.tanh(c["s"] + e.at.total((c["u"] * e.b).sum()))}


def _closed(e, c, x):
    return {**c, "u": c["u"] + np.tanh(e.b) * x[0]}


def _neighbours(e, c, x):
    return {**c, "u": e.at.neighbours(c["u"])}


def _gathered(e, c, x):
    return {**c, "u": e.at.gathered(c["u"])}


def _ring(e, c, x):
    return {**c, "u": e.at.ring(c["u"])}


def _noisy(e, c, x):
    key, now = spmd.random.split(c["key"])
    return {**c, "key": key, "u": c["u"] + 0.1 * e.at.noise(now, c["u"])}


def _counted(e, c, x):
    return {**c, "t": c["t"] + 1, "u": c["u"] / (1.0 + _float(c["t"], c["u"]))}


def _replaced(e, c, x):
    return {**c, "u": e.b * 1.0, "v": c["v"] * c["s"]}


def _chosen(e, c, x):
    u = spmd.cond(c["t"] % 2 == 0, lambda u: e.at.kept(np.tanh(u @ e.w)), lambda u: u * 0.5, c["u"])
    return {**c, "u": u, "t": c["t"] + 1}


def _nested(e, c, x):
    def inner(u, z):
        return e.at.kept(np.tanh(u @ e.w) + z * e.b), u.sum(0)

    u, ys = spmd.scan(inner, e.at.kept(c["u"]), np.arange(3).astype(c["u"].dtype))
    return {**c, "u": u, "v": c["v"] + np.tanh(e.at.total(ys.sum(0)))}


def _nested_kept(e, c, x):
    inner = lambda i, u: e.at.kept(np.sin(u @ e.w) * c["s"])
    return {**c, "u": spmd.fori_loop(0, 3, inner, e.at.kept(c["u"]), checkpoint=1)}


def _again(e, c, x):
    return {**c, "u": spmd.checkpoint(lambda u: np.tanh(np.sin(u @ e.w) + c["s"]))(c["u"])}


def _descent(e, c, x):
    return {**c, "v": c["v"] - 0.1 * spmd.grad(lambda v: ((np.tanh(v) - e.w[0]) ** 2).sum())(c["v"])}


def _twice_pulled(e, c, x):
    out, pull = spmd.vjp(lambda v: np.tanh(v * v), c["v"])
    return {**c, "v": pull(out)[0] + 0.5 * pull(c["v"])[0]}


def _until(e, c, x):
    count = spmd.while_loop(lambda k: k < c["t"] + 2, lambda k: k + 1, np.asarray(0))
    return {**c, "t": c["t"] + 1, "v": c["v"] / (1.0 + _float(count, c["v"]))}


STEPS = [
    *(_product, _transposed, _totals, _back_from_totals, _scaled, _closed, _neighbours, _gathered, _ring, _noisy),
    *(_counted, _replaced, _chosen, _nested, _nested_kept, _again, _descent, _twice_pulled, _until),
]
COLLECTS = {
    "nothing": lambda c, x: None,
    "the carry": lambda c, x: (c["u"], c["s"]),
    "sums": lambda c, x: {"a": c["u"].sum(0), "b": x[1]},
    "copies": lambda c, x: c["v"] * 2,
    "constants": lambda c, x: (1.0, c["v"], c["t"]),
}
LOOPS = [{}, {"reverse": True}, {"checkpoint": 1}, {"checkpoint": 3}, {"checkpoint": "sqrt", "reverse": True}]


def kinds() -> list[str]:
    """The names of all steps."""
    return [f.__name__.strip("_") for f in STEPS]


def _function(rng: np.random.Generator, at: _Local, required: int) -> tuple[Any, str]:
    """A function of u, v, s, w, b and a key, with a loop whose step has the operation of this number among others."""
    number = len(STEPS)
    chosen = rng.permutation([required % number, *rng.integers(0, number, rng.integers(1, 4))])
    steps, collect = [STEPS[k] for k in chosen], str(rng.choice([*COLLECTS]))
    options, n = LOOPS[rng.integers(len(LOOPS))], int(rng.choice([1, 2, 3, 5, 8]))
    as_number, around = bool(rng.integers(2)), bool(rng.integers(4) == 0)

    def f(u, v, s, w, b, key):
        e = _Env(at, w, b)
        xs = np.linspace(0.5, 1.5, n).astype(v.dtype), v[:1].repeat(n) if n % 2 else np.ones((n, 2), v.dtype)

        def step(c, x):
            for one in steps:
                c = one(e, c, x)
            c = {**c, **{k: at.kept(r * c[k]) for k, r in (("u", 0.9), ("v", 0.8), ("s", 0.7))}}
            return c, COLLECTS[collect](c, x)

        def loop(u, v, s):
            init = {"u": u, "v": v, "s": s, "t": 0 if as_number else np.asarray(0), "key": key}
            return spmd.scan(step, init, xs, **options)

        c, ys = (spmd.checkpoint(loop) if around else loop)(u, v, s)
        out = at.total((c["u"] * b).sum()) + (c["v"] * w[1]).sum() * c["s"] + 0.1 * c["t"]
        for y in spmd.tree.leaves(ys):
            out = out + at.weighted(0.1 * (y * np.ones((), v.dtype)).sum())
        return out + at.total((u * b).sum())

    names = ", ".join(f.__name__.strip("_") for f in steps)
    return f, f"scan of [{names}], n={n}, collecting {collect}, {options}, {as_number=}, {around=}"


def job(seed: int, scheduler: str, *, whole: bool, axes: dict[str, int] | None = None, dtype: Any = None) -> Job:
    """A random job: in a body, or on global arrays."""
    rng = np.random.default_rng([seed, whole])
    sizes = [{"x": n} for n in (1, 2, 3, 5, 8)] + [{"x": 2, "y": 2}, {"x": 3, "y": 1}, {"x": 2, "y": 4}]
    axes = sizes[rng.integers(len(sizes))] if axes is None else axes
    dtype = rng.choice([np.float64, np.float64, np.float32]) if dtype is None else dtype
    mesh, names = spmd.Mesh(**axes, scheduler=scheduler), tuple(axes)
    rows_of = [P(names), P(names[0]), P(None, names[-1]), P()]
    u_spec = rows_of[rng.integers(4)] if whole else P(names)
    f, text = _function(rng, _Whole(u_spec) if whole else _Local(names), seed)
    rows, specs = int(rng.choice([2, 3, 7])), [u_spec, P(), P(), P(), u_spec, P()]
    if whole:
        specs = [u_spec, P(), P(), [P(), P(names[0])][rng.integers(2)], u_spec, None]
    shapes = [(rows, ROWS), (ROWS,), (), (ROWS, ROWS), (rows, ROWS)]
    arguments = []
    for k in range(3):
        drawn = [np.asarray(rng.normal(size=shape), dtype) for shape in shapes]
        arguments.append(
            tuple(
                x if s is None else spmd.put(x, s, mesh)
                for x, s in zip([*drawn, spmd.random.key(k)], specs, strict=True)
            )
        )
    if not whole:
        f = mesh.map(f, tuple(specs), P())
    return Job(f, arguments, (0, 1, 2, 3, 4), f"{axes}, {rows} rows, {np.dtype(dtype)}, {specs[0]}, {specs[3]}: {text}")
