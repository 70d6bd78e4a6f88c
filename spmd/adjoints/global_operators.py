"""The dot test of an operator on global arrays: <A x, y> = <x, A.H y>."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from spmd.adjoints import matrices
from spmd.adjoints.bisection import LazySequence, wrong_entries
from spmd.adjoints.report import AdjointReport, Fault, Place, as_number
from spmd.adjoints.trial import PERTURBATIONS, ROUNDING_FACTOR, TrialResult, random_numbers
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
    """Test A and A.H, until a trial fails."""
    shapes = tuple(s.shape for s in tree.leaves(op.domain))
    report = AdjointReport(str(op), shapes, repr(op.mesh), "exact" if exact else "float", trials)
    report.reproduce = f"import spmd; spmd.check_adjoint(A, exact={exact}, trials={trials}, seed={seed})"
    for t in range(trials):
        _trial(op, exact, (seed, t)).enter(report)
        if report.faults:
            break
    if not report.passed:
        report.smallest = report  # an operator keeps its shapes and its mesh
    if report.kind == "value":
        _locate(op, exact, report)
    return report


def _mixed(op: LinearOperator) -> bool:
    """Whether an operator maps between real and complex arrays. The adjoint is then over the reals."""
    return len({op.dtype.kind, *(s.dtype.kind for s in tree.leaves((op.domain, op.range)))}) > 1


def _locate(op: LinearOperator, exact: bool, report: AdjointReport) -> None:
    """Enter the entries in which A.H is not the adjoint; of large operators some, by bisection."""
    split = _mixed(op)
    xs, ys = _places(op.domain, "x", split), _places(op.range, "y", split)
    n, m = len(xs), len(ys)
    forward, back = partial(_apply_to_vector, op, split), partial(_apply_to_vector, op.H, split)
    eps = max(float(np.finfo(s.dtype).eps) for s in tree.leaves((op.domain, op.range)))
    bound = 0.0 if exact else max(4 * report.bound, 64 * eps)
    if n + m > matrices.UNIT_LIMIT:
        wrong = wrong_entries(forward, back, (n, m), bound, 0, matrices.ENTRIES_SHOWN)
        report.entries, report.entries_of, report.bisected = matrices.located_entries(wrong, xs, ys), n * m, True
        return
    expected = np.array([forward(unit) for unit in np.eye(n)], complex).reshape(n, m).conj()
    actual = np.array([back(unit) for unit in np.eye(m)], complex).reshape(m, n).T
    largest = np.abs(np.concatenate([expected.reshape(-1), actual.reshape(-1)])).max(initial=0.0)
    matrices.enter(report, expected, actual, xs, ys, bound * largest)


def _places(space: Any, name: str, split: bool) -> LazySequence[Place]:
    """The places of the entries of the vectors of a space."""
    spaces = tree.leaves(space)
    units = [("re", "im") if split and s.dtype.kind == "c" else ("",) for s in spaces]
    starts = offsets([s.size * len(u) for s, u in zip(spaces, units, strict=True)])

    def place_of(i: int) -> Place:
        k = bisect_right(starts, i) - 1
        entry, unit = divmod(i - starts[k], len(units[k]))
        s = spaces[k]
        index = tuple(map(int, np.unravel_index(entry, s.shape)))
        w = next(w for w in s.layout.owners if _holds(s.layout.slices(w), index))
        local = tuple(i - cut.start for i, cut in zip(index, s.layout.slices(w), strict=True))
        return Place(name, k, s.mesh.describe(w), local, index, units[k][unit])

    return LazySequence(starts[-1], place_of)


def _holds(box: tuple[slice, ...], index: tuple[int, ...]) -> bool:
    return all(cut.start <= i < cut.stop for i, cut in zip(index, box, strict=True))


def _apply_to_vector(op: LinearOperator, split: bool, vector: np.ndarray) -> np.ndarray:
    """The image of a vector, as a vector. split: over the reals, where a complex number counts as two."""
    spaces, treedef = tree.flatten(op.domain)
    arrays, start = [], 0
    for s in spaces:
        is_split = split and s.dtype.kind == "c"
        numbers = vector[start : start + s.size * (1 + is_split)]
        start += len(numbers)
        whole = numbers[::2] + 1j * numbers[1::2] if is_split else numbers
        arrays.append(s.convert(np.array(whole, s.dtype).reshape(s.shape)))
    parts = []
    for y in tree.leaves(op(tree.unflatten(treedef, arrays))):
        a = y.numpy().reshape(-1)
        parts.append(np.stack([np.real(a), np.imag(a)], axis=-1).reshape(-1) if split and a.dtype.kind == "c" else a)
    return np.concatenate(parts).astype(complex)


def _trial(op: LinearOperator, exact: bool, key: tuple[int, ...]) -> TrialResult:
    """One draw of the test."""
    eps = max(float(np.finfo(s.dtype).eps) for s in tree.leaves((op.domain, op.range)))
    x, z, y = (_draw(s, exact, (*key, k)) for k, s in enumerate((op.domain, op.domain, op.range)))
    with ledger() as log:
        out = op(x)
    cost = sum(r.messages for r in log.workers.values()), sum(r.bytes for r in log.workers.values()), 0, 0
    back = op.H(y)

    def close(a: Any, b: Any) -> bool:
        gap = _norm(tree.map(np.subtract, a, b))
        return gap == 0 if exact else gap <= np.sqrt(eps) * (1 + _norm(b))

    if not close(op(tree.map(lambda v, u: v - 2 * u, z, x)), tree.map(lambda v, u: v - 2 * u, op(z), out)):
        return TrialResult([Fault("linear", "A is not linear: A(z - 2x) is not A(z) - 2 A(x)")], cost=cost)
    for value, space, name in ((out, op.range, "A"), (back, op.domain, "A.H")):
        for a, s in zip(tree.leaves(value), tree.leaves(space), strict=True):
            if a.shape != s.shape or a.dtype != s.dtype:
                return TrialResult([Fault("shape", f"{name} gives {a.dtype}{list(a.shape)}, needed {s}")], cost=cost)
    forward, backward = _inner(out, y), _inner(x, back)
    if _mixed(op):
        forward, backward = forward.real, backward.real
    scale = _norm(out) * _norm(y) + _norm(x) * _norm(back)
    bound = 0.0 if exact else ROUNDING_FACTOR * _perturbation_gap(op, x, y, out, back, key) / (scale or 1) + 4 * eps
    result = TrialResult([], (as_number(forward), as_number(backward)), scale, bound, cost, exact)
    if result.error <= bound and not close(conj_tree(pullback_of(op, (x,))[1](conj_tree(y))[0]), back):
        result.faults.append(Fault("twice", "the transpose of A is not A.T where A is differentiated"))
    return result


def _draw(space: Any, exact: bool, key: tuple[int, ...]) -> Any:
    """A random element of a space."""
    spaces, treedef = tree.flatten(space)

    def drawn(s: Space, k: int):
        def block(shape: tuple[int, ...], place: tuple[int, ...]) -> np.ndarray:
            limit = 1 << (np.finfo(s.dtype).nmant // 3) if exact else None
            return random_numbers(np.random.default_rng([*key, k, *place]), shape, s.dtype, limit)

        return s.from_blocks_of(block)

    return tree.unflatten(treedef, [drawn(s, k) for k, s in enumerate(spaces)])


def _perturbation_gap(op: LinearOperator, x: Any, y: Any, out: Any, back: Any, key: tuple[int, ...]) -> float:
    """How far the products move when x and y are perturbed in the last bit."""

    def perturbed(space: Any, u: Any, tag: int) -> Any:
        noise = _draw(space, False, (*key, tag))
        return tree.map(lambda a, n: a * (1 + float(np.finfo(a.dtype).eps) * np.sign(np.real(n))), u, noise)

    def largest_gap(f: Callable, space: Any, u: Any, unperturbed: Any, tag: int) -> float:
        return max(
            _norm(tree.map(np.subtract, f(perturbed(space, u, tag + r)), unperturbed)) for r in range(PERTURBATIONS)
        )

    return largest_gap(op, op.domain, x, out, 100) * _norm(y) + largest_gap(op.H, op.range, y, back, 200) * _norm(x)


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
        own = np.array([total])
        call = Call("check_adjoint", axes, own.dtype, own.shape, same_shape=True)
        return np.sum(worker.comm.all_gather(worker.group(axes), call, own).wait(), axis=0)[0]

    return next(iter(mesh.run(body).results.values()))


def _norm(a: Any) -> float:
    return float(np.sqrt(_inner(a, a).real))
