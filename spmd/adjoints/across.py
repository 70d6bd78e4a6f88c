"""The dot test of an operator on global arrays: <A x, y> = <x, A.H y>."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from spmd.adjoints import matrices
from spmd.adjoints.probing import Lazily, wrong_entries
from spmd.adjoints.report import AdjointReport, Fault, Place, number, plain
from spmd.adjoints.trial import _SAFETY, _SHAKES
from spmd.autodiff import tree
from spmd.autodiff.transforms import pullback_of
from spmd.device import to_host
from spmd.layout import offsets
from spmd.ledger import ledger
from spmd.linear.operator import LinearOperator
from spmd.linear.space import Space, conj_tree
from spmd.mesh import Worker
from spmd.transport.call import Call

__all__ = ["check_across"]


def check_across(op: LinearOperator, exact: bool, trials: int, seed: int) -> AdjointReport:
    """Test A and A.H in as many trials; where one fails no other follows."""
    shapes = tuple(s.shape for s in tree.leaves(op.domain))
    report = AdjointReport(str(op), shapes, repr(op.mesh), "exact" if exact else "float", trials)
    report.reproduce = f"import spmd; spmd.check_adjoint(A, exact={exact}, trials={trials}, seed={seed})"
    for t in range(trials):
        _trial(op, exact, (seed, t), report)
        if report.faults:
            break
    if not report.passed:
        report.smallest = report  # an operator keeps its shapes and its mesh
    if report.kind == "value":
        _locate(op, exact, report)
    return report


def _mixed(op: LinearOperator) -> bool:
    """Whether it maps between real and complex arrays: then the adjoint is that over the reals."""
    return len({op.dtype.kind, *(s.dtype.kind for s in tree.leaves((op.domain, op.range)))}) > 1


def _locate(op: LinearOperator, exact: bool, report: AdjointReport) -> None:
    """Enter into the report where A.H is not the adjoint: of large operators some entries, found by bisection."""
    split = _mixed(op)
    xs, ys = _places(op.domain, "x", split), _places(op.range, "y", split)
    n, m = len(xs), len(ys)
    forward, back = partial(_applied, op, split), partial(_applied, op.H, split)
    eps = max(float(np.finfo(s.dtype).eps) for s in tree.leaves((op.domain, op.range)))
    bound = 0.0 if exact else max(4 * report.bound, 64 * eps)
    if n + m > matrices.UNITS:
        found = wrong_entries(forward, back, (n, m), bound, 0, matrices.SHOWN)
        matrices.enter_some(report, matrices.entries(found, xs, ys), n * m)
        return
    needed = np.array([forward(unit) for unit in matrices.units(n)], complex).reshape(n, m).conj()
    given = np.array([back(unit) for unit in matrices.units(m)], complex).reshape(m, n).T
    most = np.abs(np.concatenate([needed.reshape(-1), given.reshape(-1)])).max(initial=0.0)
    matrices.enter(report, needed, given, xs, ys, bound * most)


def _places(space: Any, name: str, split: bool) -> Lazily[Place]:
    """What the entries of vectors of a space stand for."""
    spaces = tree.leaves(space)
    units = [("re", "im") if split and s.dtype.kind == "c" else ("",) for s in spaces]
    firsts = offsets([s.size * len(u) for s, u in zip(spaces, units, strict=True)])

    def at(i: int) -> Place:
        k = bisect_right(firsts, i) - 1
        entry, unit = divmod(i - firsts[k], len(units[k]))
        s = spaces[k]
        index = tuple(map(int, np.unravel_index(entry, s.shape)))
        w = next(w for w in s.layout.owners if _holds(s.layout.slices(w), index))
        local = tuple(i - cut.start for i, cut in zip(index, s.layout.slices(w), strict=True))
        return Place(name, k, s.mesh.describe(w), local, index, units[k][unit])

    return Lazily(firsts[-1], at)


def _holds(box: tuple[slice, ...], index: tuple[int, ...]) -> bool:
    return all(cut.start <= i < cut.stop for i, cut in zip(index, box, strict=True))


def _applied(op: LinearOperator, split: bool, vector: np.ndarray) -> np.ndarray:
    """What comes of a vector. split: over the reals, in which a complex number is two."""
    spaces, treedef = tree.flatten(op.domain)
    laid, first = [], 0
    for s in spaces:
        two = split and s.dtype.kind == "c"
        mine = vector[first : first + s.size * (1 + two)]
        first += len(mine)
        whole = mine[::2] + 1j * mine[1::2] if two else mine
        laid.append(s.convert(np.array(whole, s.dtype).reshape(s.shape)))
    parts = []
    for y in tree.leaves(op(tree.unflatten(treedef, laid))):
        a = y.numpy().reshape(-1)
        parts.append(np.stack([np.real(a), np.imag(a)], axis=-1).reshape(-1) if split and a.dtype.kind == "c" else a)
    return np.concatenate(parts).astype(complex)


def _trial(op: LinearOperator, exact: bool, key: tuple[int, ...], report: AdjointReport) -> None:
    """One trial, entered into the report."""
    mixed = _mixed(op)
    eps = max(float(np.finfo(s.dtype).eps) for s in tree.leaves((op.domain, op.range)))
    x, z, y = (_drawn(s, exact, (*key, k)) for k, s in enumerate((op.domain, op.domain, op.range)))
    with ledger() as log:
        out = op(x)
    report.messages = sum(r.messages for r in log.workers.values())
    report.bytes = sum(r.bytes for r in log.workers.values())
    back = op.H(y)

    def close(a: Any, b: Any) -> bool:
        gap = _norm(tree.map(np.subtract, a, b))
        return gap == 0 if exact else gap <= np.sqrt(eps) * (1 + _norm(b))

    if not close(op(tree.map(lambda v, u: v - 2 * u, z, x)), tree.map(lambda v, u: v - 2 * u, op(z), out)):
        report.faults.append(Fault("linear", "A is not linear: A(z - 2x) is not A(z) - 2 A(x)"))
        return
    for found, space, name in ((out, op.range, "A"), (back, op.domain, "A.H")):
        for a, s in zip(tree.leaves(found), tree.leaves(space), strict=True):
            if a.shape != s.shape or a.dtype != s.dtype:
                report.faults.append(Fault("shape", f"{name} gives {a.dtype}{list(a.shape)}, needed {s}"))
                return
    forward, backward = _inner(out, y), _inner(x, back)
    if mixed:  # the adjoint is over the reals
        forward, backward = forward.real, backward.real
    norms = _norm(out) * _norm(y), _norm(x) * _norm(back)
    scale = sum(norms)
    error = abs(forward - backward) / scale if scale else abs(forward - backward)
    bound = 0.0 if exact else _SAFETY * _moved(op, x, y, out, back, key) / (scale or 1) + 4 * eps
    if not error < report.error:
        report.forward, report.backward = number(forward), number(backward)
        report.error, report.bound = float(error), bound
    if not error <= bound:
        text = "<F x, y> and <x, F* y> differ by " + plain(number(forward - backward))
        report.faults.append(Fault("value", text + ("; integers must agree" if exact else ", more than rounding does")))
    elif not close(conj_tree(pullback_of(op, (x,))[1](conj_tree(y))[0]), back):
        report.faults.append(Fault("twice", "where A is differentiated its transpose is another one than A.T"))


def _drawn(space: Any, exact: bool, key: tuple[int, ...]) -> Any:
    """A random element of a space: no zeros behind which an error would hide."""
    spaces, treedef = tree.flatten(space)

    def one(s: Space, k: int):
        def block(shape: tuple[int, ...], place: tuple[int, ...]) -> np.ndarray:
            rng = np.random.default_rng([*key, k, *place])
            most = 1 << (np.finfo(s.dtype).nmant // 3)

            def real():
                whole = rng.integers(1, most + 1, shape) * rng.choice((-1, 1), shape)
                return whole if exact else rng.standard_normal(shape)

            return real() + 1j * real() if s.dtype.kind == "c" else real()

        return s.from_blocks_of(block)

    return tree.unflatten(treedef, [one(s, k) for k, s in enumerate(spaces)])


def _moved(op: LinearOperator, x: Any, y: Any, out: Any, back: Any, key: tuple[int, ...]) -> float:
    """How far the products move when x and y are perturbed in the last bit."""

    def shaken(space: Any, u: Any, tag: int) -> Any:
        noise = _drawn(space, False, (*key, tag))
        return tree.map(lambda a, n: a * (1 + float(np.finfo(a.dtype).eps) * np.sign(np.real(n))), u, noise)

    def most(f: Callable, space: Any, u: Any, was: Any, tag: int) -> float:
        return max(_norm(tree.map(np.subtract, f(shaken(space, u, tag + r)), was)) for r in range(_SHAKES))

    return most(op, op.domain, x, out, 100) * _norm(y) + most(op.H, op.range, y, back, 200) * _norm(x)


def _inner(a: Any, b: Any) -> Any:
    """<a, b> in extended precision, copies counted once."""
    pairs = list(zip(tree.leaves(a), tree.leaves(b), strict=True))
    mesh = pairs[0][0].mesh
    axes = tuple(mesh.axes)

    def body(worker: Worker):
        w, total = worker.index, np.clongdouble(0)
        for u, v in pairs:
            if u.layout.owners[w] == w:
                bare = [to_host(worker.comm.given(x.blocks[w])).astype(np.clongdouble) for x in (u, v)]
                total += np.sum(np.conj(bare[0]) * bare[1])
        mine = np.array([total])
        call = Call("check_adjoint", axes, mine.dtype, mine.shape, same_shape=True)
        return np.sum(worker.comm.all_gather(worker.group(axes), call, mine).wait(), axis=0)[0]

    return next(iter(mesh.run(body).results.values()))


def _norm(a: Any) -> float:
    return float(np.sqrt(_inner(a, a).real))
