"""One draw of a dot test, in the bodies of the workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd.adjoints.dot import DotTest
from spmd.adjoints.report import AdjointReport, Fault, number, plain
from spmd.autodiff import tree
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transforms import pullback_of
from spmd.device import to_host
from spmd.errors import LayoutError, MismatchError
from spmd.layout import Layout, P
from spmd.ledger import ledger
from spmd.mesh import Worker
from spmd.operators.base import Operator
from spmd.replicas.compare import digest
from spmd.spec_trees import spread
from spmd.state import ROOTED, VARYING, state_of
from spmd.transport.call import Call

__all__ = ["Found", "InBody", "Trial", "raised", "read_only", "state_in"]

Shape = tuple[int, ...]


class Found(NamedTuple):
    """What one trial found; the same on all workers."""

    faults: list[Fault]
    products: tuple[complex, complex] | None = None
    scale: float = 0.0
    bound: float = 0.0
    cost: tuple[int, int, int, int] | None = None
    exact: bool = True
    declares: bool = False

    def enter(self, report: AdjointReport) -> None:
        """Add it to the report."""
        report.faults += self.faults
        if self.cost is not None:
            report.messages, report.bytes = self.cost[:2]
            report.declared = self.cost[2:] if self.declares else None
        if self.products is None:
            return
        forward, backward = self.products
        error = abs(forward - backward) / self.scale if self.scale else abs(forward - backward)
        if not error < report.error:
            report.forward, report.backward, report.error, report.bound = forward, backward, error, self.bound
        if self.exact and forward != backward:
            text = f"<F x, y> and <x, F* y> differ by {plain(forward - backward)}; integers must agree"
            report.faults.append(Fault("value", text))
        if not self.exact and not error <= self.bound:
            text = f"error {error:.2e} above the bound {self.bound:.2e} that rounding explains"
            report.faults.append(Fault("value", text))


class InBody:
    """A dot test in the body of a worker."""

    def __init__(self, test: DotTest, worker: Worker, key: tuple[int, ...]):
        self.test = test
        self.worker = worker
        self.draw = _Draw(worker, test.exact, test.dtype, key)

    def rooted(self, side: str) -> tuple[str, ...]:
        """The axes along which the argument (the result) of the operator is Rooted."""
        op = self.test.operator
        return op.axes if op is not None and getattr(op, side) == ROOTED else ()

    def layout(self, k: int) -> Layout | None:
        """How argument k is laid out, if it is a global array."""
        spec = self.test.specs[k]
        return self.test.mesh.layout(self.test.shapes[k], spec) if isinstance(spec, P) else spec

    def argument(self, k: int) -> Array:
        """A random block for argument k, in its state."""
        shape, layout, op = self.test.shapes[k], self.layout(k), self.test.operator
        state = state_of(())
        if layout is not None:
            state, shape = state_of(layout.varying), layout.block_shape(self.worker.group(tuple(layout.axes)).index)
        if op is not None:
            state = state_of(state.varying | {n for n in op.axes if op.takes(n) == VARYING})
        rooted = self.rooted("source")
        if rooted and self.worker.group(rooted).index != getattr(op, "root", 0):
            shape = (0,)
        return self.draw(shape, state, self.test.dtype, -1 - k)

    def run(self, xs: Sequence[Array]) -> list:
        """F x, and from now on what `back` needs."""
        out, self.pull, *_ = pullback_of(self.test.f, xs)
        self.outs, self.out_tree = tree.flatten(out)
        if not self.outs:
            raise LayoutError.at(
                "spmd.check_adjoint",
                argument="f",
                got=f"a function that gives {out!r}",
                need="one that gives an array, or a tree of arrays",
                mend="return the result",
            )
        self.promised = self._promised(out)
        return self.outs

    def _promised(self, out) -> list:
        """The spec or the layout that is promised of each result; None of those of which nothing is."""
        where, specs = "spmd.check_adjoint", self.test.out_specs
        if specs is None:
            return [None] * len(self.outs)
        leaves = spread(where, "result", "out_specs", specs, out)
        return [leaf.spec for leaf in leaves if leaf.value is not None]

    def forward(self, *xs) -> list:
        return tree.leaves(self.test.f(*xs))

    def back(self, *ys) -> tuple:
        """F* y."""
        try:
            if self.test.adjoint is not None:
                found = self.test.adjoint(*ys)
                return tuple(found) if isinstance(found, tuple | list) else (found,)
            return self._pulled(ys)
        except Exception as error:
            error.spmd_in_adjoint = True  # type: ignore[attr-defined]
            raise

    def _pulled(self, ys) -> tuple:
        """F* y by the tape."""
        conjugate = [np.conj(y) for y in ys]
        return tuple(np.conj(g) for g in self.pull(tree.unflatten(self.out_tree, conjugate)))

    def owns(self, x, rooted: tuple[str, ...]) -> bool:
        """Whether this worker is the first of those that hold the same value."""
        varying = state_in(x, self.worker).varying
        return all(v == 0 or n in varying or n in rooted for n, v in self.worker.coordinates.items())

    def local(self, a: Sequence, b: Sequence, side: str):
        """This worker's share of <a, b>: copies are counted on the first worker that has them."""
        total = np.clongdouble(0)
        for x, y in zip(a, b, strict=True):
            if self.owns(x, self.rooted(side)):
                u, v = np.asarray(to_host(value_of(x))), np.asarray(to_host(value_of(y)))
                total += np.sum(np.conj(u).astype(np.clongdouble) * v.astype(np.clongdouble))
        return total

    def gather(self, mine: np.ndarray) -> list[np.ndarray]:
        """This array of every worker, on all."""
        axes = tuple(self.worker.mesh.axes)
        call = Call("check_adjoint", axes, mine.dtype, mine.shape)
        return self.worker.comm.all_gather(self.worker.group(axes), call, mine).wait()

    def texts(self, text: str) -> list[str]:
        """This text of every worker, on all."""
        return [bytes(b).decode() for b in self.gather(np.frombuffer(text.encode(), np.uint8))]

    def everyones(self, faults: list[Fault]) -> list[Fault]:
        """The faults that any worker found, the same list on all."""
        texts = self.texts(json.dumps(faults) if faults else "")
        found: dict[Fault, list[int]] = {}
        for w, text in enumerate(texts):
            for fault in json.loads(text) if text else ():
                found.setdefault(Fault(*fault), []).append(w)
        return [Fault(f.kind, f"{f.text} (on {self._among(workers)})") for f, workers in found.items()][:_FAULTS]

    def _among(self, workers: list[int]) -> str:
        if len(workers) == self.worker.mesh.size > 1:
            return "all workers"
        return " and ".join(self.worker.mesh.describe(w) for w in workers)


_FAULTS = 6
"""How many faults of one trial are kept."""


class Trial(InBody):
    """One draw of a dot test."""

    def __init__(self, test: DotTest, worker: Worker, t: int):
        super().__init__(test, worker, (test.seed, t))

    def found(self) -> Found:
        xs = [self.argument(k) for k in range(len(self.test.shapes))]
        before = [np.array(to_host(value_of(x))) for x in xs]
        with ledger() as log:
            outs = self.run(xs)
        sent = log.workers.get(self.worker.index)
        others = [self.draw.like(x, -100 - k) for k, x in enumerate(xs)]
        faults = self.everyones(self._modified("F", xs, before) or self._linear(xs, outs, others))
        if faults:
            return Found(faults)
        ys = [self.draw.like(o, 1 + k) for k, o in enumerate(outs)]
        y_before = [np.array(to_host(value_of(y))) for y in ys]

        # Workers go on together: what one of them finds amiss, all know.
        try:
            found = self.back(*ys)
        except Exception as error:
            # Where all workers are here, the others end with this one. Processes are told; if they wait for this worker
            # elsewhere, that is a mismatch.
            if len(self.worker.mesh.local_workers) == self.worker.mesh.size or isinstance(error, MismatchError):
                raise
            return Found(self.everyones([raised(error)]))
        faults = self._modified("F", xs, before) + self._modified("F*", ys, y_before)
        faults = self.everyones(self._promises(outs) + _unlike(found, xs) + faults)
        if any(fault.kind.split()[0] in ("raises", "count", "shape", "dtype", "state") for fault in faults):
            return Found(faults)
        if not faults and self.test.adjoint is None:
            faults = self.everyones(self._twice(xs, ys, outs, found))
        return self._products(xs, ys, outs, found, faults, sent)

    def _modified(self, name: str, arrays, before) -> list[Fault]:
        return [
            Fault("modified", f"argument {k} of {name} was modified")
            for k, (a, b) in enumerate(zip(arrays, before, strict=True))
            if not np.array_equal(to_host(value_of(a)), b, equal_nan=True)
        ]

    def _linear(self, xs, outs, others) -> list[Fault]:
        """Whether F is linear, to the precision of the mode."""
        apart = self.forward(*others)

        def unlike(factor) -> list[int]:
            """The results in which F(z + factor x) is not F(z) + factor F(x)."""

            def combined(z, x):
                return np.asarray(to_host(value_of(z))) + factor * np.asarray(to_host(value_of(x)))

            blocks = [(z, np.asarray(combined(z, x), z.dtype)) for x, z in zip(xs, others, strict=True)]
            both = self.forward(*[Array(read_only(data, self.worker), z.state) for z, data in blocks])
            right = (self._close(b, combined(a, o)) for b, o, a in zip(both, outs, apart, strict=True))
            return [k for k, fine in enumerate(right) if not fine]

        real = self.test.real or self._mixed(xs, outs)
        wrong = unlike(-2 if real or self.test.dtype.kind != "c" else -2 + 1j)
        text = "result {} is not linear in the arguments: F(z - 2x) is not F(z) - 2 F(x)"
        if wrong and self.test.dtype.kind == "c" and not real and not unlike(-2):
            text = "result {} is not linear over the complex numbers, but over the reals: real=True tests it so"
        return [Fault("linear", text.format(k)) for k in wrong]

    def _mixed(self, xs, outs) -> bool:
        return len({np.dtype(a.dtype).kind == "c" for a in (*xs, *outs)}) > 1

    def _promises(self, outs: list) -> list[Fault]:
        """What is wrong with the states of the results."""
        return [
            Fault("promise", f"result {k} is {o.state}, and out_specs promise {spec}")
            for k, (o, spec) in enumerate(zip(outs, self.promised, strict=True))
            if spec is not None and type(o) is Array and o.state.varying - spec.varying
        ]

    def _twice(self, xs, ys, outs, found) -> list[Fault]:
        """Whether F* is the same when it is differentiated, and F** = F, to the precision of the mode."""
        same, again, *_ = pullback_of(self.back, ys)
        faults = [
            Fault("twice", f"where it is differentiated F* has another value for argument {k}")
            for k, (s, g) in enumerate(zip(same, found, strict=True))
            if not self._close(s, g)
        ]
        twice = [np.conj(g) for g in again(tuple(np.conj(x) for x in xs))]
        return faults + [
            Fault("twice", f"result {k}: the adjoint of the adjoint is another map than F")
            for k, (t, o) in enumerate(zip(twice, outs, strict=True))
            if not self._close(t, o)
        ]

    def _close(self, a, b) -> bool:
        a, b = np.asarray(to_host(value_of(a))), np.asarray(to_host(value_of(b)))
        if self.test.exact or a.shape != b.shape:
            return np.array_equal(a, b)
        rough = np.sqrt(np.finfo(self.test.dtype).eps)
        return bool(np.linalg.norm((a - b).reshape(-1)) <= rough * (1 + np.linalg.norm(b.reshape(-1))))

    def _planned_cost(self, op: Operator, x: np.ndarray) -> tuple[int, int]:
        return self._bound(op).plan(self.worker.group(op.axes), x.shape, x.dtype).cost

    def _products(self, xs, ys, outs, found, faults: list[Fault], sent) -> Found:
        """Both inner products, what error is to be expected, whether copies agree, and what F sent."""
        test, worker, op = self.test, self.worker, self.test.operator
        products = [self.local(outs, ys, "target"), self.local(xs, found, "source")]
        sides = ((outs, "target"), (ys, "target"), (xs, "source"), (found, "source"))
        squares = [self.local(a, a, side).real for a, side in sides]
        moved = [0.0, 0.0] if test.exact or faults else self._moved(xs, ys, outs, found)
        cost = [0, 0] if sent is None else [sent.messages, sent.bytes]
        cost += (0, 0) if op is None else self._planned_cost(op, np.asarray(to_host(xs[0].value)))
        numbers = [*products, *squares, *moved, *cost]
        held = [("result", k, o, "target") for k, o in enumerate(outs)]
        held += [("cotangent of argument", k, g, "source") for k, g in enumerate(found)]
        marks = [digest(np.asarray(to_host(value_of(a)))) for _, _, a, _ in held]
        each = np.stack(self.gather(np.array([*numbers, *marks], np.clongdouble)))
        sums, marks = np.sum(each[:, : len(numbers)], axis=0), np.real(each[:, len(numbers) :])
        for column, (name, k, a, side) in enumerate(held):
            if other := self._copies_differ(marks[:, column], state_in(a, worker).varying, self.rooted(side)):
                text = f"{name} {k} is Invariant along {other[0]}, and {other[1]} and {other[2]} hold different values"
                faults = [*faults, Fault("copies", text)]
        norms = [float(np.sqrt(s.real)) for s in sums[2:6]]
        scale = norms[0] * norms[1] + norms[2] * norms[3]
        shaken = float(np.sqrt(sums[6].real)) * norms[1] + float(np.sqrt(sums[7].real)) * norms[2]
        eps = max(float(np.finfo(a.dtype).eps) for a in (*xs, *outs, *found))
        bound = 0.0 if test.exact else _SAFETY * (shaken / scale if scale else 0.0) + 4 * eps
        real = test.real or self._mixed(xs, outs)
        pair = tuple(number(s.real if real else s) for s in sums[:2])
        counted = tuple(int(s.real) for s in sums[8:12])
        return Found(faults, pair, scale, bound, counted, test.exact, op is not None)  # type: ignore[arg-type]

    def _bound(self, op: Operator) -> Operator:
        """The operator as the tape has it, which knows the lengths of blocks that it had to learn."""
        held = (a for node in self.pull.tape.nodes for a in node.args or () if isinstance(a, Operator))
        return next((bound for bound in held if type(bound) is type(op)), op)

    def _copies_differ(self, marks: np.ndarray, varying: frozenset[str], rooted: tuple[str, ...]):
        """An axis and two workers that should hold the same along it, and do not."""
        mesh = self.worker.mesh
        alike = tuple(n for n in mesh.axes if n not in varying and n not in rooted)
        for w in range(mesh.size) if alike else ():
            first = mesh.group(w, alike).members[0]
            if marks[w] != marks[first]:
                return " and ".join(alike), mesh.describe(first), mesh.describe(w)
        return None

    def _moved(self, xs, ys, outs, found) -> list[float]:
        """How far F x and F* y move (squared, this worker's share) when values are perturbed in the last bit: x, y, and
        what the tape of F has kept, where the conditioning of its parts shows, as of a linear system."""
        most = [0.0, 0.0]
        pulled = found if self.test.adjoint is None else self._pulled(ys)
        for r in range(_SHAKES):
            shaken_x = [self.draw.shaken(x, -200 - r) for x in xs]
            shaken_y = [self.draw.shaken(y, 200 + r) for y in ys]
            moves = (
                (0, self.forward(*shaken_x), outs, "target"),
                (1, self.back(*shaken_y), found, "source"),
                (1, self._pulled_through_shaken(ys, 300 + r), pulled, "source"),
            )
            for side, new, old, which in moves:
                delta = [n - o for n, o in zip(new, old, strict=True)]
                most[side] = max(most[side], float(self.local(delta, delta, which).real))
        return most

    def _pulled_through_shaken(self, ys, tag: int) -> tuple:
        """The tape's F* y, with what the tape has kept perturbed in the last bit."""
        nodes = self.pull.tape.nodes
        kept = [node.args for node in nodes]
        rngs: dict = {}

        def shaken(a):
            data = to_host(a.value if type(a) is Array else a)
            if type(data) is not np.ndarray or data.dtype.kind not in "fc":
                return a
            state = state_in(a, self.worker)
            if state not in rngs:  # Workers that hold copies draw the same for them.
                rngs[state] = self.draw.rng(state, tag)
            signs = rngs[state].choice([-1.0, 1.0], data.shape)
            new = read_only((data * (1 + np.finfo(data.dtype).eps * signs)).astype(data.dtype), self.worker)
            return Array(new, a.state) if type(a) is Array else new

        try:
            for node, args in zip(nodes, kept, strict=True):
                if args is not None:
                    node.args = tuple(shaken(a) for a in args)
            return self._pulled(ys)
        finally:
            for node, args in zip(nodes, kept, strict=True):
                node.args = args


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

    def rng(self, state, tag: int) -> np.random.Generator:
        place = [v if n in state.varying else 0 for n, v in self.worker.coordinates.items()]
        return np.random.default_rng([*self.key, tag % (1 << 31), *place])

    def __call__(self, shape: Shape, state, dtype: np.dtype, tag: int) -> Array:
        rng = self.rng(state, tag)

        def real():
            if not self.exact:
                return rng.standard_normal(shape)
            # No zeros, behind which a missed cell would hide; few bits, so that sums and multiples stay exact.
            most = 1 << (min(np.finfo(d).nmant for d in (self.dtype, dtype)) // 3)
            drawn = rng.integers(1, 2 * most + 1, shape)
            return np.where(drawn > most, most - drawn, drawn)

        data = real() + 1j * real() if dtype.kind == "c" else real()
        return Array(read_only(np.asarray(data, dtype), self.worker), state)

    def like(self, x, tag: int) -> Array:
        """A block of the shape, the dtype and the state of x."""
        dtype = np.dtype(getattr(x, "dtype", self.dtype))
        return self(np.shape(value_of(x)), state_in(x, self.worker), dtype if dtype.kind in "fc" else self.dtype, tag)

    def shaken(self, x: Array, tag: int) -> Array:
        signs = self.rng(x.state, tag).choice([-1.0, 1.0], np.shape(x.value))
        data = np.asarray(to_host(x.value)) * (1 + np.finfo(x.dtype).eps * signs)
        return Array(read_only(data.astype(x.dtype), self.worker), x.state)


def read_only(data: np.ndarray, worker: Worker) -> np.ndarray:
    """A block that nobody writes to, on the device of its worker."""
    data = np.asarray(data)
    data.flags.writeable = False
    if worker.mesh.places is not None:
        return worker.mesh.places.own(data, worker.index)
    return data


def state_in(x, worker: Worker):
    return getattr(x, "state", None) or worker.state()


def raised(error: Exception) -> Fault:
    """What is wrong where F* raises."""
    name = type(error).__name__
    return Fault(f"raises {name}", f"F* raises {name}: {error}".replace("\n", "\n    "))


def _unlike(found: Sequence, xs: Sequence[Array]) -> list[Fault]:
    """What of shape, dtype and state the adjoint does not give back."""
    if len(found) != len(xs):
        return [Fault("count", f"F* gives {len(found)} cotangents for {len(xs)} arguments")]
    if any(g is None for g in found):
        return [Fault("count", f"F* gives None for argument {[g is None for g in found].index(True)}")]
    return [
        Fault(what, f"F* gives {what} {came} for argument {k}, which has {need}")
        for k, (g, x) in enumerate(zip(found, xs, strict=True))
        for what, came, need in (
            ("shape", np.shape(value_of(g)), x.shape),
            ("dtype", getattr(g, "dtype", None), x.dtype),
            ("state", str(getattr(g, "state", None)), str(x.state)),
        )
        if came != need
    ]
