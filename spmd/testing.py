"""Tools that test what we claim, for our own operators and for anyone's: the dot test above all.

The adjoint F* of a linear map F is the one with <F x, y> = <x, F* y> for all x and y, in the inner product that counts
an Invariant value once, sums a Varying one over the workers, and counts a Rooted one at its root.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from spmd.array import mesh_for
from spmd.autodiff import tree
from spmd.autodiff.tape import suspended
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transforms import vjp
from spmd.errors import LayoutError, SpecError, message
from spmd.layout import Layout, P
from spmd.ledger import ledger
from spmd.mesh import Mesh, Worker
from spmd.operators.base import Operator, Vary, operate
from spmd.operators.exchange import AllToAll, Piece, RaggedAllToAll
from spmd.operators.gather import AllGather, Collect, ReduceScatter, Slice
from spmd.operators.permute import Permute
from spmd.operators.reduce import Sum
from spmd.operators.repartition import Accumulate, Repartition
from spmd.operators.root import Broadcast, Gather, Keep, Replicate, Scatter, SumReduce
from spmd.state import INVARIANT, ROOTED, VARYING, state_of
from spmd.transport.base import Call

__all__ = ["AdjointError", "AdjointReport", "Case", "check_adjoint", "operator_cases", "operator_classes"]

Shape = tuple[int, ...]


class AdjointError(AssertionError):
    """A pair of maps that are not adjoint to each other. `report` holds the figures."""

    def __init__(self, report: AdjointReport):
        super().__init__(str(report))
        self.report = report


@dataclass
class AdjointReport:
    """What a dot test found.

    passed: the verdict, the same on all workers. mode: "exact" (integers, equality) or "float". forward: <F x, y>,
    backward: <x, F* y>, of the trial with the largest error. error: |forward - backward| relative to
    |F x| |y| + |x| |F* y|; bound: the largest error that rounding explains. faults: what else is wrong.
    """

    name: str
    mesh: str
    mode: str
    trials: int
    forward: complex = np.nan
    backward: complex = np.nan
    error: float = 0.0
    bound: float = 0.0
    faults: list[str] = field(default_factory=list)
    reproduce: str = ""
    messages: int = 0
    bytes: int = 0

    @property
    def passed(self) -> bool:
        return not self.faults

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        verdict = "adjoint" if self.passed else "NOT adjoint"
        lines = [f"{self.name} on {self.mesh}: {verdict} ({self.mode}, {self.trials} trials)"]
        if not np.isnan(self.backward):
            lines += [f"  <F x, y>  = {_plain(self.forward)}", f"  <x, F* y> = {_plain(self.backward)}"]
            lines += [f"  error {self.error:.2e}, bound {self.bound:.2e}"] * (self.mode == "float")
        lines += [f"  {fault}" for fault in self.faults]
        if not self.passed:
            lines.append(f"  reproduce: {self.reproduce}")
        return "\n".join(lines)


def _plain(z: complex) -> str:
    return f"{z.real:.17g}" if not np.iscomplexobj(z) or z.imag == 0 else f"{z:.17g}"


def check_adjoint(
    f: Operator | Callable,
    *shapes: Shape,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    adjoint: Callable | None = None,
    exact: bool | None = None,
    dtype: Any = np.float64,
    trials: int = 3,
    seed: int = 0,
    raises: bool = True,
) -> AdjointReport:
    """Test that F and F* are adjoint: <F x, y> = <x, F* y>. One line: `check_adjoint(AllGather(("x",)), (3,), mesh=m)`.

    f: an operator, or the body of a linear map: a function of blocks. shapes: one per argument. in_specs: a spec for
    each argument, which splits its shape over the mesh, or a Layout, for uneven blocks of given sizes; without it every
    worker has a block of the shape itself, all different for an operator on Varying arrays, one value for an Invariant
    one. out_specs: what the states of the results must be. adjoint: a body for F* (cotangents -> tuple of cotangents of
    the arguments); by default that of the operator, or of the tape.
    exact: draw small integers and demand equality: right for what copies and adds, and the default for operators.
    Otherwise draw normal numbers and demand an error below what perturbing the inputs in the last bit explains.
    dtype: of the blocks, floating or complex. trials, seed: how many draws, and from which.

    It also checks linearity, that F* gives back shape, dtype and state of the arguments, that F** = F, and that
    nothing writes into its input. Collective under MPI; all workers reach one verdict.
    Returns a report; raises AdjointError, which holds one, unless raises=False. An error in f is raised as it is.
    """
    where = "spmd.check_adjoint"
    mesh = mesh_for(mesh, where)
    if not shapes:
        raise SpecError(
            message(where, argument="shapes", got="none", need="one per argument", mend="check_adjoint(f, (8, 3), ...)")
        )
    operator = f if isinstance(f, Operator) else None
    exact = operator is not None if exact is None else exact
    specs = _specs(where, operator, len(shapes), in_specs)
    for k, (shape, spec) in enumerate(zip(shapes, specs, strict=True)):
        if spec is not None:
            _check_spec(where, mesh, k, tuple(shape), spec)
    if np.dtype(dtype).kind not in "fc":
        raise SpecError(
            message(
                where,
                argument="dtype",
                got=repr(np.dtype(dtype).name),
                need="a floating or complex dtype: only those have adjoints",
                mend="leave it out; integers are drawn in any dtype where the test is exact",
            )
        )
    trial = _Trial(mesh, f, operator, shapes, specs, out_specs, adjoint, exact, np.dtype(dtype), seed)
    name = _name(f)
    reproduce = trial.reproduction(name, trials)
    report = AdjointReport(name, repr(mesh), "exact" if exact else "float", trials, reproduce=reproduce)
    for t in range(trials):
        try:
            with suspended(), ledger() as log:
                found = next(iter(mesh.run(lambda worker, t=t: trial(worker, t)).results.values()))
        except Exception as error:
            # Of an adjoint that fails on some workers all must learn, which they do where all are in this process.
            if not getattr(error, "spmd_in_adjoint", False) or len(mesh.local_workers) < mesh.size:
                raise
            report.faults.append(f"F* raises {type(error).__name__}: {error}".replace("\n", "\n    "))
            break
        report.messages += sum(r.messages for r in log.workers.values())
        report.bytes += sum(r.bytes for r in log.workers.values())
        _note(report, found, exact)
        if report.faults:
            break
    if raises and not report.passed:
        raise AdjointError(report)
    return report


def _name(f) -> str:
    return repr(f) if isinstance(f, Operator) else getattr(f, "__name__", repr(f))


def _check_spec(where: str, mesh: Mesh, k: int, shape: Shape, spec: P | Layout) -> None:
    """Raise where a spec or a layout does not fit the mesh or the shape of argument k."""
    if isinstance(spec, P):
        spec.check(mesh.axes, where, f"in_specs[{k}]", len(shape))
    elif spec.shape != shape or any(mesh.axes.get(n) != size for n, size in spec.axes.items()):
        raise SpecError(
            message(
                where,
                argument=f"in_specs[{k}]",
                got=repr(spec),
                need=f"a layout of shape {shape} on {mesh}",
                mend=f"Layout({shape}, spec, mesh.axes, cuts)",
            )
        )


def _specs(where: str, operator: Operator | None, count: int, in_specs: Any) -> tuple[P | Layout | None, ...]:
    """One spec per argument; None where every worker has a block of the whole shape."""
    if in_specs is None:
        if operator is None:
            raise SpecError(
                message(
                    where,
                    argument="in_specs",
                    got="none, for a function",
                    need="a spec for each argument",
                    mend='in_specs=P("x") splits the argument over axis x; P() replicates it',
                )
            )
        return (None,) * count
    specs = (in_specs,) * count if isinstance(in_specs, P | Layout) else tuple(in_specs)
    if len(specs) != count:
        raise SpecError(
            message(
                where,
                argument="in_specs",
                got=f"{len(specs)} specs for {count} shapes",
                need="one per argument",
                mend="give as many specs as shapes",
            )
        )
    return specs


def _note(report: AdjointReport, found: dict[str, Any], exact: bool) -> None:
    """Enter one trial into the report."""
    forward, backward = found["forward"], found["backward"]
    scale = found["scale"]
    error = abs(forward - backward) / scale if scale else abs(forward - backward)
    if not error < report.error:
        report.forward, report.backward, report.error, report.bound = forward, backward, error, found["bound"]
    report.faults += found["faults"]
    if not found["fits"]:
        return
    if exact and forward != backward:
        report.faults.append(f"<F x, y> and <x, F* y> differ by {_plain(forward - backward)}; integers must agree")
    if not exact and not error <= found["bound"]:
        report.faults.append(f"error {error:.2e} above the bound {found['bound']:.2e} that rounding explains")


class _Trial(NamedTuple):
    """One dot test, as a body."""

    mesh: Mesh
    f: Callable
    operator: Operator | None
    shapes: Sequence[Shape]
    specs: Sequence[P | Layout | None]
    out_specs: Any
    adjoint: Callable | None
    exact: bool
    dtype: np.dtype
    seed: int

    def reproduction(self, name: str, trials: int) -> str:
        """The call as one line, options left out that are as by default."""
        options = {
            "in_specs": None if all(s is None for s in self.specs) else repr(self.specs),
            "out_specs": None if self.out_specs is None else repr(self.out_specs),
            "adjoint": None if self.adjoint is None else _name(self.adjoint),
            "exact": None if self.exact == (self.operator is not None) else repr(self.exact),
            "dtype": repr(self.dtype.name),
            "trials": None if trials == 3 else repr(trials),
            "seed": repr(self.seed),
        }
        given = [*map(repr, self.shapes), f"mesh=spmd.{self.mesh!r}"]
        given += [f"{option}={text}" for option, text in options.items() if text is not None]
        return f"spmd.check_adjoint({name}, {', '.join(given)})"

    def __call__(self, worker: Worker, t: int) -> dict[str, Any]:
        draw = _Draw(worker, self.exact, self.dtype, (self.seed, t))
        xs = [self._argument(worker, draw, k) for k in range(len(self.shapes))]
        before = [np.array(value_of(x)) for x in xs]
        op = self.operator
        forward = self.f if op is None else lambda x: operate(op, x)
        out, pull, *_ = vjp(forward, *xs)
        outs, out_tree = tree.flatten(out)
        faults = self._states(outs)
        ys = [draw.like(o, 1 + k, self._rooted("target")) for k, o in enumerate(outs)]
        before += [np.array(value_of(y)) for y in ys]

        def back(*cotangents):
            try:
                if self.adjoint is not None:
                    found = self.adjoint(*cotangents)
                    return found if isinstance(found, tuple | list) else (found,)
                conjugate = [np.conj(y) for y in cotangents]
                return tuple(np.conj(g) for g in pull(tree.unflatten(out_tree, conjugate)))
            except Exception as error:
                error.spmd_in_adjoint = True  # type: ignore[attr-defined]
                raise

        # Workers go on together: what one of them finds amiss, all know.
        found = back(*ys)
        names = [f"argument {k} of F" for k in range(len(xs))] + [f"argument {k} of F*" for k in range(len(ys))]
        faults += [
            f"{name} was modified"
            for name, a, b in zip(names, (*xs, *ys), before, strict=True)
            if not np.array_equal(value_of(a), b, equal_nan=True)
        ]
        faults = _everyones(worker, _same_kind(found, xs) + faults)
        fits = not any(fault.startswith(_UNLIKE) for fault in faults)
        if not faults:
            faults = self._laws(worker, draw, forward, back, xs, ys, outs, found)
        source, target = self._rooted("source"), self._rooted("target")
        pulled = found if fits else []
        products = [_local(worker, outs, ys, target), _local(worker, xs, pulled, source) if fits else np.nan]
        squares = [
            _local(worker, a, a, rooted).real
            for a, rooted in ((outs, target), (ys, target), (xs, source), (pulled, source))
        ]
        moved = (
            self._moved(worker, draw, forward, back, xs, ys, outs, found) if not self.exact and not faults else [0, 0]
        )
        sums = _total(worker, [*products, *squares, *moved])
        norms = [float(np.sqrt(s.real)) for s in sums[2:6]]
        scale = norms[0] * norms[1] + norms[2] * norms[3]
        shaken = float(np.sqrt(sums[6].real)) * norms[1] + float(np.sqrt(sums[7].real)) * norms[2]
        eps = float(np.finfo(self.dtype).eps)
        return {
            "forward": _number(sums[0]),
            "backward": _number(sums[1]),
            "scale": scale,
            "bound": 0.0 if self.exact else _SAFETY * (shaken / scale if scale else 0.0) + 4 * eps,
            "faults": faults,
            "fits": fits,
        }

    def _rooted(self, side: str) -> tuple[str, ...]:
        """The axes along which the argument (the result) of the operator is Rooted."""
        return self.operator.axes if self.operator is not None and getattr(self.operator, side) == ROOTED else ()

    def _argument(self, worker: Worker, draw: _Draw, k: int) -> Array:
        """A random block for argument k, in its state."""
        shape, spec = self.shapes[k], self.specs[k]
        if spec is not None:
            layout = spec if isinstance(spec, Layout) else self.mesh.layout(tuple(shape), spec)
            state, shape = state_of(layout.varying), layout.block_shape(worker.group(tuple(layout.axes)).index)
            if self.operator is not None:
                state = state_of(state.varying | {n for n in self.operator.axes if self.operator.takes(n) == VARYING})
        else:
            assert self.operator is not None
            state = state_of(self.operator.axes if self.operator.source == VARYING else ())
        rooted = self._rooted("source")
        if rooted and worker.group(rooted).index != getattr(self.operator, "root", 0):
            shape = (0,)
        return draw(shape, state, -1 - k)

    def _states(self, outs: list) -> list[str]:
        """What is wrong with the states of the results."""
        if self.out_specs is None:
            return []
        specs = [self.out_specs] * len(outs) if isinstance(self.out_specs, P) else list(self.out_specs)
        return [
            f"result {k} is {o.state}, and out_specs promise {spec}"
            for k, (o, spec) in enumerate(zip(outs, specs, strict=True))
            if type(o) is Array and o.state.varying - set(spec.axes)
        ]

    def _laws(self, worker: Worker, draw: _Draw, forward, back, xs, ys, outs, found) -> list[str]:
        """Linearity of F and of F*, and F** = F, each to the precision of the mode; what any worker finds amiss."""
        faults = []
        others = [draw.like(x, -100 - k, self._rooted("source")) for k, x in enumerate(xs)]
        both = tree.leaves(forward(*[o - 2 * x for x, o in zip(xs, others, strict=True)]))
        apart = tree.leaves(forward(*others))
        for k, (b, o, a) in enumerate(zip(both, outs, apart, strict=True)):
            if not self._close(b, a - 2 * o):
                faults.append(f"result {k} is not linear in the arguments: F(z - 2x) is not F(z) - 2 F(x)")
        if self.adjoint is None:
            same, again, *_ = vjp(lambda *cs: back(*cs), *ys)
            faults += [
                f"where it is differentiated F* has another value for argument {k}"
                for k, (s, g) in enumerate(zip(same, found, strict=True))
                if not self._close(s, g)
            ]
            twice = [np.conj(g) for g in again(tuple(np.conj(x) for x in xs))]
            for k, (t, o) in enumerate(zip(twice, outs, strict=True)):
                if not self._close(t, o):
                    faults.append(f"result {k}: the adjoint of the adjoint is another map than F")
        return _everyones(worker, faults)

    def _close(self, a, b) -> bool:
        a, b = np.asarray(value_of(a)), np.asarray(value_of(b))
        if self.exact or a.shape != b.shape:
            return np.array_equal(a, b)
        rough = np.sqrt(np.finfo(self.dtype).eps)
        return bool(np.linalg.norm((a - b).reshape(-1)) <= rough * (1 + np.linalg.norm(b.reshape(-1))))

    def _moved(self, worker, draw: _Draw, forward, back, xs, ys, outs, found) -> list:
        """How far F x and F* y move (squared, this worker's share) when x and y are perturbed in the last bit."""
        most = [0.0, 0.0]
        for r in range(_SHAKES):
            shaken_x = [draw.shaken(x, -200 - r) for x in xs]
            shaken_y = [draw.shaken(y, 200 + r) for y in ys]
            pairs = (
                (tree.leaves(forward(*shaken_x)), outs, "target"),
                (list(back(*shaken_y)), list(found), "source"),
            )
            for side, (new, old, which) in enumerate(pairs):
                delta = [n - o for n, o in zip(new, old, strict=True)]
                most[side] = max(most[side], float(_local(worker, delta, delta, self._rooted(which)).real))
        return most


_SHAKES = 3
_SAFETY = 16.0
"""How much larger than a perturbation of the last bit the rounding inside of F may be."""


class _Draw:
    """Random blocks: different on workers that hold different values, the same on those that hold copies."""

    def __init__(self, worker: Worker, exact: bool, dtype: np.dtype, key: tuple[int, ...]):
        self.worker = worker
        self.exact = exact
        self.dtype = dtype
        self.key = key

    def _rng(self, state, tag: int) -> np.random.Generator:
        place = [v if n in state.varying else 0 for n, v in self.worker.coordinates.items()]
        return np.random.default_rng([*self.key, tag % (1 << 31), *place])

    def __call__(self, shape: Shape, state, tag: int) -> Array:
        rng = self._rng(state, tag)

        def real():
            # No zeros, behind which a missed cell would hide; few bits, so that sums and multiples stay exact.
            most = 1 << (np.finfo(self.dtype).nmant // 3)
            signs = rng.choice((-1, 1), shape)
            return rng.integers(1, most + 1, shape) * signs if self.exact else rng.standard_normal(shape)

        data = real() + 1j * real() if self.dtype.kind == "c" else real()
        data = np.asarray(data).astype(self.dtype)
        data.flags.writeable = False
        return Array(data, state)

    def like(self, x, tag: int, rooted: tuple[str, ...]) -> Array:
        return self(np.shape(value_of(x)), getattr(x, "state", None) or self.worker.state(), tag)

    def shaken(self, x: Array, tag: int) -> Array:
        signs = self._rng(x.state, tag).choice([-1.0, 1.0], np.shape(x.value))
        eps = np.finfo(self.dtype).eps
        return Array((np.asarray(x.value) * (1 + eps * signs)).astype(self.dtype), x.state)


_UNLIKE = "F* gives"
"""How the faults begin with which cotangents cannot be compared with the arguments."""


def _same_kind(found: Sequence, xs: Sequence[Array]) -> list[str]:
    """What of shape, dtype and state the adjoint does not give back."""
    faults = []
    if len(found) != len(xs):
        return [f"{_UNLIKE} {len(found)} cotangents for {len(xs)} arguments"]
    for k, (g, x) in enumerate(zip(found, xs, strict=True)):
        for what, came, need in (
            ("shape", np.shape(value_of(g)), x.shape),
            ("dtype", getattr(g, "dtype", None), x.dtype),
            ("state", str(getattr(g, "state", None)), str(x.state)),
        ):
            if came != need:
                faults.append(f"{_UNLIKE} {what} {came} for argument {k}, which has {need}")
    return faults


def _local(worker: Worker, a: Sequence, b: Sequence, rooted: tuple[str, ...]):
    """This worker's share of <a, b>: copies are counted on the first worker that has them."""
    total = np.clongdouble(0)
    for x, y in zip(a, b, strict=True):
        varying = getattr(x, "state", worker.state()).varying
        if all(v == 0 or n in varying or n in rooted for n, v in worker.coordinates.items()):
            u, v = np.asarray(value_of(x)), np.asarray(value_of(y))
            total += np.sum(np.conj(u).astype(np.clongdouble) * v.astype(np.clongdouble))
    return total


def _total(worker: Worker, shares: list) -> list:
    """The sums of the workers' shares, the same on all."""
    axes = tuple(worker.mesh.axes)
    mine = np.array(shares, np.clongdouble)
    call = Call("check_adjoint", axes, mine.dtype, mine.shape, alike=True)
    return list(np.sum(worker.comm.all_gather(worker.group(axes), call, mine).wait(), axis=0))


def _everyones(worker: Worker, faults: list[str]) -> list[str]:
    """The faults that any worker found, the same list on all."""
    axes = tuple(worker.mesh.axes)
    text = "\n".join(f"{f} (on {worker.mesh.describe(worker.index)})" for f in faults)
    mine = np.frombuffer(text.encode(), np.uint8)
    call = Call("check_adjoint", axes, mine.dtype, mine.shape)
    texts = [bytes(b).decode() for b in worker.comm.all_gather(worker.group(axes), call, mine).wait()]
    return [line for t in texts for line in t.split("\n") if line][:4]


def _number(z) -> complex:
    return complex(z) if z.imag else float(z.real)


# All operators, with cases


class Case(NamedTuple):
    """An operator and a shape to test it on; with a spec the shape is cut, else every worker has a block of it.

    cuts: for each dimension the sizes of its blocks, or None where they are balanced.
    """

    operator: Operator
    shape: Shape
    spec: P | Layout | None = None
    cuts: tuple[Shape | None, ...] | None = None


def _lopsided(n: int) -> Shape:
    """Sizes of n blocks that are not balanced, 2 n + 1 in all: the last is the largest, and with three one is empty."""
    return (*(0 if k == 1 else 1 for k in range(n - 1)), n + 2 + (n > 2)) if n > 1 else (3,)


def _ragged(n: int, most: int) -> tuple[Piece, ...]:
    """Pieces of 0, 1 or 2 rows from every worker to every other, among 2 n rows, that end at row `most` there."""
    return tuple(Piece(s, t, 2 * t, most - 2 * s - 2, (s + 2 * t) % 3) for s in range(n) for t in range(n))


_ROWS: dict[type[Operator], Callable[[tuple[str, ...], int], list[Case]]] = {
    Vary: lambda a, n: [Case(Vary(a), s) for s in ((3, 2), (0, 2), ())],
    Sum: lambda a, n: [Case(Sum(a), s) for s in ((3, 2), (0, 2), ())],
    AllGather: lambda a, n: [
        *(Case(AllGather(a, axis), (2, 3)) for axis in (0, 1, 2)),
        *(Case(AllGather(a, 0, True), (m, 2), P(a)) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(AllGather(a, 1, True), (2, n + 1), P(None, a)),
        Case(AllGather(a, 0, True), (2 * n + 1, 2), P(a), (_lopsided(n), None)),
    ],
    ReduceScatter: lambda a, n: [
        *(Case(ReduceScatter(a, axis), (n,) * 2) for axis in (0, 1)),
        *(Case(ReduceScatter(a, 0, True), (m, 2)) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(ReduceScatter(a, 1, True, _lopsided(n)), (2, 2 * n + 1)),
    ],
    Collect: lambda a, n: [
        *(Case(Collect(a, axis), (2, 3)) for axis in (0, 1, 2)),
        *(Case(Collect(a, 0, True), (m, 2), P(a)) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(Collect(a, 0, True), (2 * n + 1, 2), P(a), (_lopsided(n), None)),
    ],
    Slice: lambda a, n: [
        *(Case(Slice(a, axis), (n,) * 2) for axis in (0, 1)),
        *(Case(Slice(a, 0, True), (m, 2)) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(Slice(a, 1, True, _lopsided(n)), (2, 2 * n + 1)),
    ],
    Permute: lambda a, n: [
        Case(Permute(a, tuple((k, (k + 1) % n) for k in range(n))), (2 * n + 1, 2), P(a)),
        Case(Permute(a, tuple((k, k + 1) for k in range(n - 1))), (2 * n + 1, 2), P(a)),
        Case(Permute(a, ((n - 1, 0),)), (1, 3), P(a)),
        Case(Permute(a, tuple((k, (k + 1) % n) for k in range(n))), (2, 2 * n + 1), P(None, a), (None, _lopsided(n))),
        Case(Permute(a, ()), (3,)),
    ],
    AllToAll: lambda a, n: [
        *(Case(AllToAll(a, i, j), (n, n)) for i, j in itertools.product((0, 1), repeat=2)),
        *(Case(AllToAll(a, i, j, True), (n + 1, 2 * n)) for i, j in itertools.product((0, 1), repeat=2)),
        Case(AllToAll(a, 1, 0, True), (2 * n + 1, n + 2), P(a)),
        Case(AllToAll(a, 1, 0, True), (1, n + 2), P(a)),
        Case(AllToAll(a, 1, 0, True, _lopsided(n)), (2 * n + 1, 2 * n + 1), P(a), (_lopsided(n), None)),
    ],
    Broadcast: lambda a, n: [Case(Broadcast(a, r), s) for r in (0, n - 1) for s in ((3, 2), (0, 2), ())],
    SumReduce: lambda a, n: [Case(SumReduce(a, r), s) for r in (0, n - 1) for s in ((3, 2), (0, 2), ())],
    Replicate: lambda a, n: [Case(Replicate(a, r), s) for r in (0, n - 1) for s in ((3, 2), (0, 2), ())],
    Keep: lambda a, n: [Case(Keep(a, r), s) for r in (0, n - 1) for s in ((3, 2), (0, 2), ())],
    Scatter: lambda a, n: [
        *(Case(Scatter(a, r), (m, 2)) for r in (0, n - 1) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(Scatter(a, n - 1, 1, _lopsided(n)), (2, 2 * n + 1)),
    ],
    Gather: lambda a, n: [
        *(Case(Gather(a, r), (m, 2), P(a)) for r in (0, n - 1) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(Gather(a, n - 1, 1), (2, 2 * n + 1), P(None, a), (None, _lopsided(n))),
    ],
    RaggedAllToAll: lambda a, n: [
        *(Case(RaggedAllToAll(a, _ragged(n, most), (2 * n, most)), (2 * n, 2)) for most in (2 * n, 2 * n + 3)),
        Case(RaggedAllToAll(a, _ragged(n, 2 * n)[:1], (2 * n, 2 * n)), (2 * n,)),
        Case(RaggedAllToAll(a, (), (0, 3)), (0, 2)),
    ],
}


def _pairs(axes: dict[str, int]) -> list[tuple[Layout, Layout]]:
    """Pairs of layouts over axes, the first without varying copies: disjoint, overlapping, equal, with copies."""
    a, n = tuple(axes), math.prod(axes.values())
    half = max(1, n // 2)
    whole = Layout((5, 3), P(), axes)
    rows, columns = Layout((5, 3), P(a), axes), Layout((5, 3), P(None, a), axes)
    last = Layout.grid((5, 3), (1, 1), axes, [n - 1])
    lopsided = Layout((2 * n + 1, 3), P(a), axes, [_lopsided(n), None])
    backwards = Layout.grid((2 * n + 1, 3), (n, 1), axes, range(n)[::-1])
    some = Layout.grid((5, 3), (half, 1), axes, range(half))
    others = Layout.grid((5, 3), (1, n - half), axes, range(half, n)) if n > half else last
    each = Layout.grid((5, 3), (half, 1, n // half), axes, range(half * (n // half)))
    pairs = [(rows, columns), (rows, rows), (whole, rows), (rows, whole), (rows, last), (last, columns)]
    pairs += [(lopsided, backwards), (backwards, lopsided), (some, others), (some, each), (rows, each)]
    pairs += [(rows, Layout((5, 3), P(), axes, copies="varying"))]
    pairs += [(Layout((0, 3), P(a), axes), Layout((0, 3), P(), axes))]
    return [*pairs, (Layout.grid((), (), axes, [0]), Layout.grid((), (n,), axes))]


_BETWEEN: dict[type[Operator], Callable[[tuple[str, ...], Layout, Layout], Case]] = {
    Repartition: lambda a, src, dst: Case(Repartition(a, src, dst), src.shape, src),
    Accumulate: lambda a, src, dst: Case(Accumulate(a, dst, src), dst.shape, dst),
}
"""For each operator between layouts its case on a pair of them."""


"""For each operator its cases on the axes `a`, which n workers lie along: even, uneven, short, empty."""


def operator_classes() -> list[type[Operator]]:
    """Every operator of the library, in the order of their declaration."""

    def below(kind: type[Operator]) -> Iterator[type[Operator]]:
        for sub in kind.__subclasses__():
            yield sub
            yield from below(sub)

    return [kind for kind in below(Operator) if not kind.__name__.startswith("_")]


def operator_cases(kind: type[Operator], mesh: Mesh) -> list[Case]:
    """The cases of an operator on a mesh: along every axis, and along all of them together in both orders."""
    names = tuple(mesh.axes)
    groups = [(n,) for n in names] + ([names, names[::-1]] if len(names) > 1 else [])
    if kind in _BETWEEN:
        pairs = [(axes, pair) for axes in groups for pair in _pairs({n: mesh.axes[n] for n in axes})]
        return [_BETWEEN[kind](axes, *pair) for axes, pair in pairs]
    if kind not in _ROWS:
        raise LayoutError(
            message(
                "spmd.testing.operator_cases",
                argument="kind",
                got=kind.__name__,
                need="an operator with a row of cases",
                mend=f"add a row to spmd/testing.py: {kind.__name__}: lambda a, n: [Case({kind.__name__}(a), (3, 2))],",
            )
        )
    cases = [case for axes in groups for case in _ROWS[kind](axes, int(np.prod([mesh.axes[n] for n in axes])))]
    return [_laid_out(case, mesh) for case in cases]


def _laid_out(case: Case, mesh: Mesh) -> Case:
    if case.cuts is None:
        return case
    assert isinstance(case.spec, P)
    return case._replace(spec=Layout(case.shape, case.spec, mesh.axes, case.cuts))


def states(kind: type[Operator]) -> str:
    """The states an operator maps, as the tables write them."""
    letter = {INVARIANT: "I", VARYING: "V", ROOTED: "Rooted"}
    return f"{letter[kind.source]} → {letter[kind.target]}"


__all__ += ["states"]
