"""Sampled programs on sampled meshes, against a serial oracle: values, gradients, second derivatives.

A program is a chain of steps drawn from all that fit the array at hand. Each step has two forms that must mean the
same: what a worker does with its block, and what becomes of the global array. The first form runs under `spmd.map`
and, by the oracle, serially; the second is plain NumPy. Derivatives are those of the oracle by serial autodiff, whose
rules have tests of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
from hypothesis import currently_in_test_context, given, note, settings
from hypothesis import strategies as st
from oracle import Each, Oracle, each

import spmd
from spmd import P, autodiff

AXES = ("x", "y", "z")
# At most one axis of one worker, and most have none.
MESHES = [
    dims
    for k in (1, 2, 3)
    for dims in itertools.product(range(1, 9), repeat=k)
    for _ in range(1 if 1 in dims else 4)
    if math.prod(dims) <= 8 and dims.count(1) < 2
]


# What is known of an array in a body


class Known(NamedTuple):
    """How the global array lies on the workers.

    names: the axes that split each dimension. sizes: the lengths of its blocks. copies: the axes along which the
    workers hold equal values that are Varying all the same. kind: of the dtype.
    """

    names: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    copies: frozenset[str]
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sum, self.sizes))

    @property
    def split(self) -> tuple[str, ...]:
        return tuple(a for axes in self.names for a in axes)

    @property
    def varying(self) -> tuple[str, ...]:
        return (*self.split, *sorted(self.copies))

    def free(self, axes) -> list[str]:
        """The axes along which it is Invariant."""
        return [a for a in axes if a not in self.varying]

    def spec(self) -> P:
        return P(*self.names)

    def with_dim(self, d: int, axes: tuple[str, ...], sizes, copies=None) -> Known:
        """Dimension d split anew."""
        names = (*self.names[:d], axes, *self.names[d + 1 :])
        lengths = (*self.sizes[:d], tuple(sizes), *self.sizes[d + 1 :])
        return self._replace(names=names, sizes=lengths, copies=self.copies if copies is None else frozenset(copies))

    def without_dim(self, d: int) -> Known:
        return self._replace(names=_without(self.names, d), sizes=_without(self.sizes, d))

    def balanced(self, axes: Mapping[str, int]) -> bool:
        return all(
            s == blocks(n, [axes[a] for a in ns]) for s, n, ns in zip(self.sizes, self.shape, self.names, strict=True)
        )


def _without(items: tuple, d: int) -> tuple:
    return items[:d] + items[d + 1 :]


def blocks(n: int, parts) -> tuple[int, ...]:
    """The lengths of balanced blocks, found by splitting."""
    cut = [np.arange(n)]
    for p in parts:
        cut = [q for whole in cut for q in np.array_split(whole, p)]
    return tuple(map(len, cut))


def merged(sizes: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The lengths where every n neighbours are joined."""
    return tuple(sum(sizes[k : k + n]) for k in range(0, len(sizes), n))


# Steps


class Step(NamedTuple):
    """One step of a program. body: (ns, block, *weights) -> block. meaning: the same for global arrays.

    needs: the weights, each (shape, spec); of shape None a Python number.
    """

    text: str
    body: Callable
    meaning: Callable
    after: Known
    needs: tuple = ()


Steps = Iterator[Step]


def local(f):
    """A function of one block that looks at its shape."""
    return lambda h, *args: each(f, (h, *args), {}) if isinstance(h, Each) else f(h, *args)


@local
def merge(h, d):
    """Dimensions d and d + 1 as one."""
    return h.reshape(*h.shape[:d], h.shape[d] * h.shape[d + 1], *h.shape[d + 2 :])


def plain(text: str, f: Callable, after: Known, needs=()) -> Step:
    """A step that does to a block what it does to the whole."""
    return Step(text, lambda ns, h, *ws: f(h, *ws), f, after, needs)


def same(text: str, body: Callable, after: Known) -> Step:
    """A step that leaves the global array as it is."""
    return Step(text, body, lambda g: g, after)


REAL = {
    "tanh": np.tanh,
    "sin": np.sin,
    "arctan": np.arctan,
    "gauss": lambda h: np.exp(-h * h),
    "rational": lambda h: h / (1 + h * h),
    "softplus": lambda h: np.logaddexp(h, 0.5),
    "root": lambda h: np.sqrt(1 + h**2),
    "leaky": lambda h: np.where(h > 0.1, h, 0.2 * h),
    "masked": lambda h: h * (h < 0.3),
    "maximum": lambda h: np.maximum(h, -0.3 * h),
    "clip": lambda h: np.clip(h, -0.7, 0.9),
    "square": lambda h: 0.5 * h * h,
    "reuse": lambda h: h * np.sin(h) + 2 - h,
}
COMPLEX = {
    "square": lambda h: 0.5 * h * h,
    "modulus": lambda h: 0.5 * h * np.conj(h),
    "real": lambda h: h + np.real(h) * 0.5,
    "imag": lambda h: np.imag(h) - 1j * np.sin(np.real(h)),
    "rational": lambda h: h / (1 + h * np.conj(h)),
    "turn": lambda h: (0.6 - 0.8j) * h,
}


def elementwise(k: Known, axes) -> Steps:
    for name, f in (REAL if k.kind == "f" else COMPLEX).items():
        yield plain(name, f, k)
        yield Step(f"checkpoint {name}", lambda ns, h, f=f: ns.checkpoint(f)(h), f, k)


def weights(k: Known, axes) -> Steps:
    yield plain("times a number", lambda h, c: h * c + c, k, [(None, P())])
    if k.shape and not k.names[-1]:
        yield plain("times a row", lambda h, w: h * w + w, k, [(k.shape[-1:], P())])
    if k.balanced(axes):
        yield plain("times an array", lambda h, w: h * w, k, [(k.shape, k.spec())])
        for d in range(len(k.shape)):
            one = k.with_dim(d, (), (1,))
            yield plain(f"plus an array of length 1 in {d}", lambda h, w: h + w, k, [(one.shape, one.spec())])


def matrices(k: Known, axes) -> Steps:
    if not k.shape:
        return
    d, last = len(k.shape) - 1, k.names[-1]
    for m in (1, 3, 5):
        if not last:
            yield plain(f"@ w[{m}]", lambda h, w: h @ w, k.with_dim(d, (), (m,)), [((k.shape[d], m), P())])
            for a in (a for a in axes if a not in k.split):
                after = k.with_dim(d, (a,), blocks(m, [axes[a]]), k.copies - {a})
                yield plain(f"@ w[{m} over {a}]", lambda h, w: h @ w, after, [((k.shape[d], m), P(None, a))])
        elif k.balanced(axes):
            rows = [((k.shape[d], m), P(last))]
            yield Step(
                f"psum(@ w[rows over {last}])",
                lambda ns, h, w: ns.psum(h @ w, last),
                lambda h, w: h @ w,
                k.with_dim(d, (), (m,)),
                rows,
            )
            yield Step(
                f"psum_scatter(@ w[rows over {last}])",
                lambda ns, h, w: ns.psum_scatter(h @ w, last, scatter_dimension=-1, tiled=True),
                lambda h, w: h @ w,
                k.with_dim(d, last, blocks(m, [axes[a] for a in last])),
                rows,
            )


def reductions(k: Known, axes) -> Steps:
    for d, names in enumerate(k.names):
        after = k.without_dim(d)
        some = k.shape[d] > 0
        ordered = some and k.kind == "f"
        if not names:
            yield plain(f"sum {d}", lambda h, d=d: np.sum(h, d), after)
            yield from [plain(f"mean {d}", lambda h, d=d: np.mean(h, d), after)] * some
            yield from [plain(f"max {d}", lambda h, d=d: np.max(h, d), after)] * ordered
            continue
        n = math.prod(axes[a] for a in names)
        yield Step(
            f"psum(sum {d}, {names})",
            lambda ns, h, d=d, names=names: ns.psum(np.sum(h, d), names),
            lambda h, d=d: np.sum(h, d),
            after,
        )
        yield Step(
            f"pmean(sum {d}, {names})",
            lambda ns, h, d=d, names=names: ns.pmean(np.sum(h, d), names),
            lambda h, d=d, n=n: np.sum(h, d) / n,
            after,
        )
        for how in ["sum", *["mean"] * some, *["max", "min"] * ordered]:
            yield Step(
                f"spmd.{how}({d}, {names})",
                lambda ns, h, d=d, names=names, how=how: getattr(ns, how)(h, names, d),
                lambda h, d=d, how=how: getattr(np, how)(h, d),
                after,
            )
        if ordered and min(k.sizes[d]) > 0:
            for how in ("max", "min"):
                yield Step(
                    f"p{how}({how} {d}, {names})",
                    lambda ns, h, d=d, names=names, how=how: getattr(ns, "p" + how)(getattr(np, how)(h, d), names),
                    lambda h, d=d, how=how: getattr(np, how)(h, d),
                    after,
                )
        if some and set(k.split) == set(names):
            yield Step(
                f"spmd.mean({d}, all axes)",
                lambda ns, h, d=d: ns.mean(h, tuple(axes), d),
                lambda h, d=d: np.mean(h, d),
                after._replace(copies=frozenset()),
            )
    if k.split:
        scalar = Known((), (), k.copies, k.kind)
        for how in ["sum", *["mean"] * (0 not in k.shape)]:
            yield Step(
                f"spmd.{how}(all)",
                lambda ns, h, how=how: getattr(ns, how)(h, k.split),
                lambda h, how=how: getattr(np, how)(h),
                scalar,
            )


def normalisations(k: Known, axes) -> Steps:
    for d, names in enumerate(k.names):
        if not names or k.shape[d] == 0:
            continue

        def centre(ns, h, d=d, names=names):
            return h - np.expand_dims(ns.mean(h, names, d), d)

        yield Step(f"centre {d}", centre, lambda h, d=d: h - np.mean(h, d, keepdims=True), k)
        if k.kind == "f":

            def softmax(ns, h, d=d, names=names):
                e = np.exp(h - np.expand_dims(ns.max(h, names, d), d))
                return e / np.expand_dims(ns.psum(np.sum(e, d), names), d)

            def meaning(h, d=d):
                e = np.exp(h - np.max(h, d, keepdims=True))
                return e / np.sum(e, d, keepdims=True)

            yield Step(f"softmax {d}", softmax, meaning, k)
    if k.split:
        yield Step(
            "over its norm",
            lambda ns, h: (
                h / np.sqrt(1 + ns.checkpoint(lambda h: ns.psum(np.sum(np.real(h * np.conj(h))), k.split))(h))
            ),
            lambda h: h / np.sqrt(1 + np.sum(np.real(h * np.conj(h)))),
            k,
        )


def gathers(k: Known, axes) -> Steps:
    for d, names in enumerate(k.names):
        for start in range(len(names)):
            over = names[start:]
            n = math.prod(axes[a] for a in over)
            whole = k.with_dim(d, names[:start], merged(k.sizes[d], n))
            for to, copies in (("varying", k.copies | set(over)), ("invariant", k.copies)):
                after = whole._replace(copies=copies)
                yield same(
                    f"all_gather({over}, {d}, {to})",
                    lambda ns, h, d=d, over=over, to=to: ns.all_gather(h, over, axis=d, tiled=True, to=to),
                    after,
                )
                if len(set(k.sizes[d])) == 1:
                    yield same(
                        f"all_gather({over}, {d}, {to}, stacked)",
                        lambda ns, h, d=d, over=over, to=to: merge(ns.all_gather(h, over, axis=d, to=to), d),
                        after,
                    )
    for d, a in itertools.product(range(len(k.shape)), axes):
        if a not in k.split and not k.names[d] and axes[a] * k.shape[d] < 12:
            yield Step(
                f"all_gather of copies ({a}, {d})",
                lambda ns, h, d=d, a=a: ns.all_gather(h, a, axis=d, tiled=True, to="invariant"),
                lambda h, d=d, a=a: np.concatenate([h] * axes[a], d),
                k.with_dim(d, (), [k.shape[d] * axes[a]], k.copies - {a}),
            )


def subsets(items) -> list[tuple]:
    """One or two of them, in every order."""
    return [s for r in (1, 2) for s in itertools.permutations(items, r)]


def split_again(k: Known, d: int, over, axes) -> tuple[int, ...]:
    """The lengths of the blocks of dimension d, each split over more axes."""
    return tuple(m for n in k.sizes[d] for m in blocks(n, [axes[a] for a in over]))


def splits(k: Known, axes) -> Steps:
    for d, names in enumerate(k.names):
        for over in subsets(k.free(axes)):
            after = k.with_dim(d, names + over, split_again(k, d, over, axes))
            yield same(
                f"pslice({over}, {d})",
                lambda ns, h, d=d, over=over: ns.pslice(h, over, axis=d, tiled=True),
                after,
            )
            n = math.prod(axes[a] for a in over)
            if not names:
                sizes = tuple(reversed(blocks(k.shape[d], [n])))
                yield same(
                    f"pslice({over}, {d}, sizes={sizes})",
                    lambda ns, h, d=d, over=over, sizes=sizes: ns.pslice(h, over, axis=d, tiled=True, sizes=sizes),
                    k.with_dim(d, over, sizes),
                )
                if k.shape[d] == n:
                    yield same(
                        f"pslice({over}, {d}, untiled)",
                        lambda ns, h, d=d, over=over: np.expand_dims(ns.pslice(h, over, axis=d), d),
                        after,
                    )
        for over in subsets(k.copies):
            n = math.prod(axes[a] for a in over)
            after = k.with_dim(d, names + over, split_again(k, d, over, axes), k.copies - set(over))
            yield same(
                f"psum_scatter({over}, {d})",
                lambda ns, h, d=d, over=over, n=n: ns.psum_scatter(h, over, scatter_dimension=d, tiled=True) / n,
                after,
            )
            if not names and k.shape[d] == n:
                yield same(
                    f"psum_scatter({over}, {d}, untiled)",
                    lambda ns, h, d=d, over=over, n=n: np.expand_dims(
                        ns.psum_scatter(h, over, scatter_dimension=d) / n, d
                    ),
                    after,
                )


def copies(k: Known, axes) -> Steps:
    for a in k.free(axes):
        yield same(f"pvary {a}", lambda ns, h, a=a: ns.pvary(h, a), k._replace(copies=k.copies | {a}))
        yield same(f"shift of copies {a}", lambda ns, h, a=a: ns.shift(h, a, 1), k._replace(copies=k.copies | {a}))
        for root in {0, axes[a] - 1}:
            yield same(
                f"replicate(keep({a}, {root}))",
                lambda ns, h, a=a, root=root: ns.replicate(ns.keep(h, a, root), a, root),
                k,
            )
            yield same(
                f"broadcast(keep({a}, {root}))",
                lambda ns, h, a=a, root=root: ns.broadcast(ns.keep(h, a, root), a, root),
                k._replace(copies=k.copies | {a}),
            )
    for over in subsets(k.copies):
        n = math.prod(axes[a] for a in over)
        after = k._replace(copies=k.copies - set(over))
        yield same(f"pmean {over}", lambda ns, h, over=over: ns.pmean(h, over), after)
        yield same(f"psum {over} / n", lambda ns, h, over=over, n=n: ns.psum(h, over) / n, after)
        yield same(
            f"replicate(sum_reduce({over})) / n",
            lambda ns, h, over=over, n=n: ns.replicate(ns.sum_reduce(h, over, n - 1), over, n - 1) / n,
            after,
        )
        if k.kind == "f":
            yield same(f"pmax {over}", lambda ns, h, over=over: ns.pmax(h, over), after)
            yield same(f"pmin {over}", lambda ns, h, over=over: ns.pmin(h, over), after)


def places(k: Known, axes) -> Steps:
    for d, names in enumerate(k.names):
        if len(names) == 1:

            def meaning(h, d=d):
                factor = 1 + 0.1 * np.repeat(np.arange(len(k.sizes[d])), k.sizes[d])
                return h * np.expand_dims(factor, tuple(range(1, h.ndim - d)))

            yield Step(
                f"times axis_index({names})", lambda ns, h, a=names[0]: h * (1 + 0.1 * ns.axis_index(a)), meaning, k
            )
    for a in (a for a in axes if a not in k.split):
        yield Step(
            f"psum(times axis_index({a}))",
            lambda ns, h, a=a: ns.psum(h * (1 + 0.1 * ns.axis_index(a)), a),
            lambda h, n=axes[a]: h * np.float64(n + 0.1 * n * (n - 1) / 2),
            k._replace(copies=k.copies - {a}),
        )


def moves(k: Known, axes) -> Steps:
    for d, names in enumerate(k.names):
        for j, there in enumerate(k.names):
            for start in range(len(names) if not there else 0):
                over = names[start:]
                n = math.prod(axes[a] for a in over)
                away = k.with_dim(d, names[:start], merged(k.sizes[d], n))
                after = away.with_dim(j, over, split_again(k, j, over, axes))
                yield same(
                    f"all_to_all({over}, {j}, {d})",
                    lambda ns, h, d=d, j=j, over=over: ns.all_to_all(h, over, j, d, tiled=True),
                    after,
                )
                if len(over) == 1:
                    sizes = tuple(reversed(blocks(k.shape[j], [n])))
                    yield same(
                        f"all_to_all({over}, {j}, {d}, sizes={sizes})",
                        lambda ns, h, d=d, j=j, over=over, sizes=sizes: ns.all_to_all(
                            h, over, j, d, tiled=True, sizes=sizes
                        ),
                        away.with_dim(j, over, sizes),
                    )
        n = len(k.sizes[d])
        rings = {
            "ring": [(i, (i + 1) % n) for i in range(n)],
            "reverse": [(i, n - 1 - i) for i in range(n)],
            "line": [(i, i + 1) for i in range(n - 1)],
            "one": [(0, n - 1)],
            "none": [],
        }
        for name, perm in rings.items() if names else ():
            source = {t: s for s, t in perm}

            def meaning(h, d=d, n=n, source=source):
                parts = np.split(h, np.cumsum(k.sizes[d])[:-1], d)
                return np.concatenate([parts[source[t]] if t in source else 0 * parts[t] for t in range(n)], d)

            yield Step(
                f"ppermute({names}, {name})",
                lambda ns, h, names=names, perm=perm: ns.ppermute(h, names, perm),
                meaning,
                k.with_dim(d, names, [k.sizes[d][source.get(t, t)] for t in range(n)]),
            )
        if names:
            yield Step(
                f"shift({names}, -1)",
                lambda ns, h, names=names: ns.shift(h, names, -1),
                lambda h, d=d: np.concatenate(
                    [h[at(d, slice(k.sizes[d][0], None))], h[at(d, slice(k.sizes[d][0]))]], d
                ),
                k.with_dim(d, names, [*k.sizes[d][1:], k.sizes[d][0]]),
            )


def at(d: int, index) -> tuple:
    return (slice(None),) * d + (index,)


def shapes(k: Known, axes) -> Steps:
    if len(k.shape) > 1:
        order = (*range(1, len(k.shape)), 0)
        turned = k._replace(names=tuple(k.names[d] for d in order), sizes=tuple(k.sizes[d] for d in order))
        yield plain("transpose", lambda h: np.transpose(h, order), turned)
    for d, names in enumerate(k.names):
        n = k.shape[d]
        if names:
            continue
        yield plain(f"flip {d}", lambda h, d=d: np.flip(h, d), k)
        yield plain(f"roll {d}", lambda h, d=d: np.roll(h, 1, d), k)
        yield plain(f"cumsum {d}", lambda h, d=d: np.cumsum(h, d), k)
        yield plain(
            f"every second of {d}", lambda h, d=d: h[at(d, slice(None, None, 2))], k.with_dim(d, (), [-(-n // 2)])
        )
        yield plain(
            f"concatenate {d}",
            lambda h, d=d: np.concatenate([h, 0.5 * h[at(d, slice(1))]], d),
            k.with_dim(d, (), [n + min(n, 1)]),
        )
        yield plain(
            f"differences {d}",
            lambda h, d=d: h[at(d, slice(1, None))] - h[at(d, slice(-1))],
            k.with_dim(d, (), [max(n - 1, 0)]),
        )
        if k.kind == "f":
            yield plain(f"sort {d}", lambda h, d=d: np.sort(h, d), k)
        if n:
            yield plain(f"take {d}", lambda h, d=d, n=n: h[at(d, [0, n - 1, 0])], k.with_dim(d, (), [3]))
    if len(k.shape) < 3:
        yield plain(
            "stack", lambda h: np.stack([h, 0.5 * h * h]), k._replace(names=((), *k.names), sizes=((2,), *k.sizes))
        )


# Hypothesis prefers what comes first.
STEPS = [elementwise, moves, splits, gathers, copies, reductions, matrices, normalisations, places, weights, shapes]


# Programs


class Program(NamedTuple):
    """A chain of steps with its arguments: the array x and a list of weights, each with its spec."""

    axes: dict[str, int]
    scheduler: str
    steps: list[Step]
    spec: P
    specs: list[P]
    out: P
    varying: tuple[str, ...]
    x: Any
    ws: list

    def body(self, ns, x, ws):
        return self.run(x, ws, lambda s: lambda h, *w: s.body(ns, h, *w))

    def meaning(self, x, ws):
        return self.run(x, ws, lambda s: s.meaning)

    def run(self, h, ws, form):
        rest = iter(ws)
        for s in self.steps:
            h = form(s)(h, *itertools.islice(rest, len(s.needs)))
        return h

    def scalar(self, ns, x, ws):
        """The body of a real scalar that is Invariant."""
        h = np.sum(loss(self.body(ns, x, ws)))
        return ns.psum(h, self.varying) if self.varying else h

    def mapped(self, f, out_specs, **options):
        """spmd.map of a function of (x, ws) in this program's layout."""
        return spmd.map(f, in_specs=(self.spec, {"ws": self.specs}), out_specs=out_specs, **options)

    def oracle(self, form, out: P):
        """The serial function of (x, ws) that a body means."""
        world = Oracle(self.axes)
        f = world.map(lambda ns, x, *ws: form(ns, x, ws), [self.spec, *self.specs], out)
        return lambda x, tree: f(x, *tree["ws"])

    def __repr__(self) -> str:
        text = " -> ".join(s.text for s in self.steps)
        return f"{self.axes} {self.scheduler}: {np.shape(self.x)} {self.x.dtype} {self.spec} -> {text} -> {self.out}"


def loss(h):
    """A real function of what a program gives, entry by entry; not linear."""
    return np.real(h * np.conj(h)) + np.real(h)


def laid_out(axes: Mapping[str, int], shape, names, dtype) -> Known:
    """What is known of an argument."""
    sizes = tuple(blocks(n, [axes[a] for a in split]) for n, split in zip(shape, names, strict=True))
    return Known(tuple(names), sizes, frozenset(), dtype.kind)


def assemble(
    axes, scheduler: str, start: Known, dtype, steps: list[Step], average: bool, also: Sequence[str], seed: int
):
    """The program of these steps.

    What is done about axes that split nothing: copies are averaged away or stacked, and so are the Invariant axes
    `also`, which varies them.
    """
    k = steps[-1].after
    if k.copies and average:
        over = tuple(sorted(k.copies))
        k = k._replace(copies=frozenset())
        steps = [*steps, same(f"pmean {over}", lambda ns, h: ns.pmean(h, over), k)]
    varying = k.varying
    stacked = (*sorted(k.copies), *(a for a in also if a in k.free(axes)))
    if stacked:
        n = math.prod(axes[a] for a in stacked)
        k = k._replace(names=(stacked, *k.names), sizes=((1,) * n, *k.sizes), copies=frozenset())
        steps = [*steps, Step(f"stacked over {stacked}", lambda ns, h: h[None], lambda h: np.stack([h] * n), k)]
    rng = np.random.default_rng(seed)
    needs = [need for s in steps for need in s.needs]
    ws = [data(rng, s, dtype) for s, _ in needs]
    x = data(rng, start.shape, dtype)
    return Program(axes, scheduler, steps, start.spec(), [p for _, p in needs], k.spec(), varying, x, ws)


@st.composite
def programs(draw, longest=6) -> Program:
    axes = dict(zip(AXES, draw(st.sampled_from(MESHES)), strict=False))
    shape = draw(st.lists(st.sampled_from([2, 3, 4, 5, 1, 6, 7, 0]), min_size=1, max_size=3))
    dtype = np.dtype(draw(st.sampled_from(["f8", "f8", "f8", "f4", "c16"])))
    names: list[tuple[str, ...]] = [()] * len(shape)
    for a in draw(st.permutations(list(axes))):
        d = draw(st.integers(-1, len(shape) - 1))
        if d >= 0:
            names[d] += (a,)
    start = known = laid_out(axes, shape, names, dtype)
    steps: list[Step] = []
    for _ in range(draw(st.sampled_from(range(2, longest + 1)))):
        options = [list(f(known, axes)) for f in STEPS]
        chosen = draw(st.sampled_from([o for o in options if o]))
        steps.append(chosen[draw(st.integers(0, len(chosen) - 1))])
        known = steps[-1].after
    scheduler = draw(st.sampled_from(["lockstep", "threads"]))
    also = [a for a in axes if draw(st.booleans())]
    return assemble(axes, scheduler, start, dtype, steps, draw(st.booleans()), also, draw(st.integers(0, 2**16)))


def data(rng, shape, dtype):
    """Random data of this shape, small enough for products; of shape None a Python number."""
    if shape is None:
        return float(rng.uniform(0.5, 1.5))
    a = rng.standard_normal(shape)
    if dtype.kind == "c":
        a = a + 1j * rng.standard_normal(shape)
    return (a / math.sqrt(max([1, *shape[:-1]][-1], 1))).astype(dtype)


# Comparison


def agree(got, serial: Callable, p: Program, what: str) -> None:
    """A result equals that of a serial function of the arguments, up to rounding; dtypes and shapes are alike.

    Rounding is measured by the largest entry, and where that does not explain a difference (sums that cancel) by how
    far the serial result moves when the arguments do in their last bits.
    """
    of = lambda *args: [np.asarray(leaf) for leaf in optree.tree_leaves(serial(*args))]
    got, want = [np.asarray(leaf) for leaf in optree.tree_leaves(got)], of(p.x, {"ws": p.ws})
    assert len(got) == len(want)
    tolerance = 1e-4 if p.x.dtype == np.float32 else 1e-11
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, f"{what}, leaf {k}: shape {a.shape}, serially {b.shape}"
        # The gradient of a Python number has no dtype of its own.
        assert a.dtype == b.dtype or b.ndim == 0, f"{what}, leaf {k}: {a.dtype}, serially {b.dtype}"
        off = distance(a, b)
        if off > tolerance * max(1.0, distance(b, 0)):
            moved = max(distance(of(*nearby(p, seed))[k], b) for seed in range(4))
            assert off <= 30 * moved, f"{what}, leaf {k}: off by {off}\n{a}\n{b}"


def distance(a, b) -> float:
    return float(np.max(np.abs(a - b), initial=0.0))


def nearby(p: Program, seed: int):
    """The arguments, moved in their last bits."""
    rng = np.random.default_rng(seed)
    eps = np.finfo(p.x.dtype).eps

    def move(a):
        by = rng.integers(-2, 3, np.shape(a)) * eps
        return a * (1 + float(by)) if isinstance(a, float) else (a * (1 + by)).astype(a.dtype)

    return move(p.x), {"ws": [move(w) for w in p.ws]}


def say(p: Program) -> None:
    """Show the program where a test of it fails."""
    (note if currently_in_test_context() else print)(repr(p))


def mesh_of(p: Program) -> spmd.Mesh:
    return spmd.Mesh(**p.axes, transport="local", scheduler=p.scheduler)


def as_given(p: Program, on_mesh: bool):
    """The arguments, as NumPy arrays or already on the mesh (numbers stay numbers)."""
    put = lambda a, spec: spmd.put(a, spec) if on_mesh and not isinstance(a, float) else a
    return put(p.x, p.spec), {"ws": [put(w, s) for w, s in zip(p.ws, p.specs, strict=True)]}


def check_values(p: Program, on_mesh: bool):
    """The value with check on and off, in a pytree and under vjp; the oracle's; and that of the global form."""
    say(p)
    body = lambda x, tree: p.body(spmd, x, tree["ws"])
    serial = p.oracle(p.body, p.out)
    agree(p.meaning(p.x, p.ws), serial, p, "the global form")
    with mesh_of(p):
        args = as_given(p, on_mesh)
        got = p.mapped(body, p.out)(*args)
        assert got.spec == p.out
        assert got.dtype == np.asarray(serial(p.x, {"ws": p.ws})).dtype
        agree(got.numpy(), serial, p, "value")
        bare = p.mapped(body, p.out, check=False)(*args)
        agree(bare.numpy(), serial, p, "check=False")
        tree = p.mapped(
            lambda x, tree: {"y": body(x, tree), "rest": (2.0, [x, None])}, {"y": p.out, "rest": (P(), p.spec)}
        )(*args)
        np.testing.assert_array_equal(tree["y"].numpy(), got.numpy(), err_msg="in a pytree")
        np.testing.assert_array_equal(tree["rest"][1][0].numpy(), p.x, err_msg="in a pytree")
        traced, _ = spmd.vjp(p.mapped(body, p.out), *args)
        agree(traced.numpy(), serial, p, "under vjp")


def outside(p: Program):
    """A loss taken outside of the map, of two results."""

    def body(x, t):
        return {"y": p.body(spmd, x, t["ws"]), "scalar": p.scalar(spmd, x, t["ws"])}

    mapped = p.mapped(body, {"y": p.out, "scalar": P()})
    return lambda x, t: np.sum(loss((both := mapped(x, t))["y"])) - 2 * both["scalar"] * both["scalar"]


def serial_loss(p: Program, mode: str):
    """What is differentiated, serially."""
    y, scalar = p.oracle(p.body, p.out), p.oracle(p.scalar, P())
    if mode.startswith("outside"):
        return lambda x, t: np.sum(loss(y(x, t))) - 2 * scalar(x, t) * scalar(x, t)
    return scalar


FIRST = {
    "outside": lambda p, args: spmd.grad(outside(p), (0, 1))(*args),
    "scalar": lambda p, args: spmd.value_and_grad(
        p.mapped(lambda x, t: p.scalar(spmd, x, t["ws"]), P(), check=False), (0, 1)
    )(*args)[1],
    # In the body, of an Invariant scalar and of a Varying one: the gradient of its sum.
    "inside": lambda p, args: p.mapped(
        lambda x, t: spmd.grad(lambda x, t: p.scalar(spmd, x, t["ws"]), (0, 1))(x, t), (p.spec, {"ws": p.specs})
    )(*args),
    "varying": lambda p, args: p.mapped(
        lambda x, t: spmd.grad(lambda x, t: np.sum(loss(p.body(spmd, x, t["ws"]))), (0, 1))(x, t),
        (p.spec, {"ws": p.specs}),
    )(*args),
    "vjp": lambda p, args: twice(*spmd.vjp(p.mapped(lambda x, t: p.scalar(spmd, x, t["ws"]), P()), *args)),
}


def twice(value, pull):
    """A pullback serves more than once."""
    first, again = pull(np.ones((), value.dtype)), pull(np.ones((), value.dtype))
    np.testing.assert_array_equal(np.asarray(first[0]), np.asarray(again[0]))
    return again


def check_first(p: Program, mode: str, on_mesh: bool):
    say(p)
    with mesh_of(p):
        args = as_given(p, on_mesh)
        got = FIRST[mode](p, args)
        if on_mesh and mode in ("outside", "scalar"):
            assert got[0].layout == args[0].layout
        agree(got, autodiff.grad(serial_loss(p, mode), (0, 1)), p, mode)


def dot(a, b):
    """The sum of all products, outside."""
    return np.sum(np.real(a[0] * b[0])) + sum(
        np.sum(np.real(g * v)) for g, v in zip(a[1]["ws"], b[1]["ws"], strict=True)
    )


def inside_dot(a, b):
    return spmd.inner([np.real(a[0]), *map(np.real, a[1]["ws"])], [b[0], *b[1]["ws"]])


def like(args, v):
    """The directions in the dtypes of the arguments, as tangents must be."""
    cast = lambda d, a: d if isinstance(a, float) else d.astype(a.dtype)
    return cast(v[0], args[0]), {"ws": [cast(d, w) for d, w in zip(v[1]["ws"], args[1]["ws"], strict=True)]}


def gradient(p: Program):
    """In the body."""
    return spmd.grad(lambda x, t: p.scalar(spmd, x, t["ws"]), (0, 1))


def both(p: Program, f, out):
    """spmd.map of a function of the arguments and their directions."""
    specs = (p.spec, {"ws": p.specs})
    return spmd.map(f, in_specs=(*specs, *specs), out_specs=out)


SECOND = {
    "outside": lambda p, args, v: spmd.grad(lambda x, t: dot(spmd.grad(outside(p), (0, 1))(x, t), v), (0, 1))(*args),
    "hvp": lambda p, args, v: spmd.hvp(p.mapped(lambda x, t: p.scalar(spmd, x, t["ws"]), P()), args, like(args, v)),
    "grad of grad": lambda p, args, v: spmd.grad(
        lambda x, t: dot(spmd.grad(p.mapped(lambda x, t: p.scalar(spmd, x, t["ws"]), P()), (0, 1))(x, t), v), (0, 1)
    )(*args),
    "grad of a gradient inside": lambda p, args, v: spmd.grad(
        lambda x, t: both(p, lambda x, t, vx, vt: inside_dot(gradient(p)(x, t), (vx, vt)), P())(x, t, *v), (0, 1)
    )(*args),
    "inside": lambda p, args, v: both(
        p,
        lambda x, t, vx, vt: spmd.grad(lambda x, t: inside_dot(gradient(p)(x, t), (vx, vt)), (0, 1))(x, t),
        (p.spec, {"ws": p.specs}),
    )(*args, *v),
    "hvp inside": lambda p, args, v: both(
        p,
        lambda x, t, vx, vt: spmd.hvp(lambda x, t: p.scalar(spmd, x, t["ws"]), (x, t), (vx, vt)),
        (p.spec, {"ws": p.specs}),
    )(*args, *like(args, v)),
}


def check_second(p: Program, mode: str, seed: int):
    say(p)
    rng = np.random.default_rng(seed)
    real = np.dtype(p.x.real.dtype)
    direction = lambda a: float(rng.uniform(-1, 1)) if isinstance(a, float) else data(rng, a.shape, real)
    v = (direction(p.x), {"ws": [direction(w) for w in p.ws]})
    f = autodiff.grad(serial_loss(p, mode), (0, 1))
    serial = autodiff.grad(lambda x, t: dot(f(x, t), v), (0, 1))
    with mesh_of(p):
        agree(SECOND[mode](p, (p.x, {"ws": p.ws}), v), serial, p, mode)


# The tests


STARTS = [
    ({"x": 3}, (4, 2), [("x",), ()], "f8"),
    ({"x": 2, "y": 3}, (5, 4), [("x", "y"), ()], "f8"),
    ({"y": 3, "x": 2}, (3, 2), [(), ("x",)], "f4"),
    ({"x": 2, "y": 2, "z": 2}, (3, 5), [("z",), ("x",)], "c16"),
]


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)], ids=["", "others"])
@pytest.mark.parametrize("copied", [False, True], ids=["", "of copies"])
@pytest.mark.parametrize("f", STEPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("start", range(len(STARTS)))
def test_every_step(start, f, copied, part):
    """Each step by itself, on what is Invariant along some axes and on what is a copy along them.

    part: every second option of the step, the even ones on every second start and mesh of copies, else the odd ones.
    """
    axes, shape, names, dtype = STARTS[start]
    dtype = np.dtype(dtype)
    begin = k = laid_out(axes, shape, names, dtype)
    first = plain("square", COMPLEX["square"], k)
    if copied:
        free = k.free(axes)
        if not free:
            return
        k = k._replace(copies=frozenset(free))
        first = Step(f"square, pvary {free}", lambda ns, h: ns.pvary(0.5 * h * h, free), COMPLEX["square"], k)
    for n, option in enumerate(f(k, axes)):
        if (n + start + copied) % 2 != part:
            continue
        scheduler = ["lockstep", "threads"][n % 2]
        p = assemble(axes, scheduler, begin, dtype, [first, option], n % 2 == 0, list(axes)[n % 3 :], n)
        check_values(p, on_mesh=n % 2 == 0)
        check_first(p, list(FIRST)[n % len(FIRST)], on_mesh=n % 3 == 0)
        check_second(p, list(SECOND)[n % len(SECOND)], n)


@given(programs(), st.booleans())
@settings(max_examples=60)
def test_values(p, on_mesh):
    check_values(p, on_mesh)


@pytest.mark.parametrize("mode", FIRST)
@given(programs(), st.booleans())
@settings(max_examples=20)
def test_gradients(mode, p, on_mesh):
    check_first(p, mode, on_mesh)


@pytest.mark.parametrize("mode", SECOND)
@given(programs(longest=4), st.integers(0, 99))
@settings(max_examples=12)
def test_second_derivatives(mode, p, seed):
    check_second(p, mode, seed)


@pytest.mark.full
@given(
    programs(longest=8), st.booleans(), st.sampled_from(list(FIRST)), st.sampled_from(list(SECOND)), st.integers(0, 99)
)
@settings(max_examples=4000)
def test_long_programs(p, on_mesh, first, second, seed):
    check_values(p, on_mesh)
    check_first(p, first, on_mesh)
    check_second(p, second, seed)
