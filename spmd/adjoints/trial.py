"""One draw of a dot test, in the bodies of the workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd.adjoints.dot_test import DotTest
from spmd.adjoints.report import AdjointReport, Fault, as_number, number_text
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

__all__ = [
    "PERTURBATIONS",
    "ROUNDING_FACTOR",
    "InBody",
    "Trial",
    "TrialResult",
    "device_block",
    "host_array",
    "raise_fault",
    "random_numbers",
    "state_in",
]

Shape = tuple[int, ...]


class TrialResult(NamedTuple):
    """The result of one trial; the same on all workers."""

    faults: list[Fault]
    products: tuple[complex, complex] | None = None
    scale: float = 0.0
    bound: float = 0.0
    cost: tuple[int, int, int, int] | None = None
    exact: bool = True
    declares: bool = False

    @property
    def error(self) -> float:
        """The difference of the products, relative to their scale."""
        forward, backward = self.products or (0.0, 0.0)
        return abs(forward - backward) / self.scale if self.scale else abs(forward - backward)

    def enter(self, report: AdjointReport) -> None:
        """Add it to the report."""
        report.faults += self.faults
        if self.cost is not None:
            report.messages, report.bytes = self.cost[:2]
            report.declared = self.cost[2:] if self.declares else None
        if self.products is None:
            return
        (forward, backward), error = self.products, self.error
        if not error < report.error:
            report.forward, report.backward, report.error, report.bound = forward, backward, error, self.bound
        if not error <= self.bound:
            text = f"error {error:.2e} above the bound {self.bound:.2e} that rounding explains"
            if self.exact:
                text = f"<F x, y> and <x, F* y> differ by {number_text(forward - backward)}; integers must agree"
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
        """F x; keeps the pullback for `back`."""
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
        self.promised = self._promised_specs(out)
        return self.outs

    def _promised_specs(self, out) -> list:
        """The spec or layout that out_specs promise for each result, or None."""
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
                cotangents = self.test.adjoint(*ys)
                return tuple(cotangents) if isinstance(cotangents, tuple | list) else (cotangents,)
            return self._tape_adjoint(ys)
        except Exception as error:
            error.spmd_in_adjoint = True  # type: ignore[attr-defined]
            raise

    def _tape_adjoint(self, ys) -> tuple:
        """F* y by the pullback of the tape, which is the transpose."""
        conjugate = [np.conj(y) for y in ys]
        return tuple(np.conj(g) for g in self.pull(tree.unflatten(self.out_tree, conjugate)))

    def owns(self, x, rooted: tuple[str, ...]) -> bool:
        """Whether this worker is the first of those that hold the same value."""
        varying = state_in(x, self.worker).varying
        return all(v == 0 or n in varying or n in rooted for n, v in self.worker.coordinates.items())

    def local(self, a: Sequence, b: Sequence, side: str):
        """This worker's share of <a, b>. Copies count on the first worker that has them."""
        total = np.clongdouble(0)
        for x, y in zip(a, b, strict=True):
            if self.owns(x, self.rooted(side)):
                u, v = host_array(x), host_array(y)
                total += np.sum(np.conj(u).astype(np.clongdouble) * v.astype(np.clongdouble))
        return total

    def all_gather(self, own: np.ndarray) -> list[np.ndarray]:
        """This array of every worker."""
        axes = tuple(self.worker.mesh.axes)
        call = Call("check_adjoint", axes, own.dtype, own.shape)
        return self.worker.comm.all_gather(self.worker.group(axes), call, own).wait()

    def texts(self, text: str) -> list[str]:
        return [bytes(b).decode() for b in self.all_gather(np.frombuffer(text.encode(), np.uint8))]

    def merged(self, faults: list[Fault]) -> list[Fault]:
        """The faults of all workers, the same list on all."""
        texts = self.texts(json.dumps(faults) if faults else "")
        workers_of: dict[Fault, list[int]] = {}
        for w, text in enumerate(texts):
            for fault in json.loads(text) if text else ():
                workers_of.setdefault(Fault(*fault), []).append(w)
        merged = [Fault(f.kind, f"{f.text} (on {self._among(workers)})") for f, workers in workers_of.items()]
        return merged[:_FAULTS_SHOWN]

    def _among(self, workers: list[int]) -> str:
        if len(workers) == self.worker.mesh.size > 1:
            return "all workers"
        return " and ".join(self.worker.mesh.describe(w) for w in workers)


_FAULTS_SHOWN = 6
"""The most faults of one trial in a report."""


class Trial(InBody):
    """One draw of a dot test."""

    def __init__(self, test: DotTest, worker: Worker, t: int):
        super().__init__(test, worker, (test.seed, t))

    def result(self) -> TrialResult:
        xs = [self.argument(k) for k in range(len(self.test.shapes))]
        before = [np.array(to_host(value_of(x))) for x in xs]
        with ledger() as log:
            outs = self.run(xs)
        sent = log.workers.get(self.worker.index)
        others = [self.draw.like(x, -100 - k) for k, x in enumerate(xs)]
        faults = self.merged(self._modified_faults("F", xs, before) or self._linearity_faults(xs, outs, others))
        if faults:
            return TrialResult(faults)
        ys = [self.draw.like(o, 1 + k) for k, o in enumerate(outs)]
        y_before = [np.array(to_host(value_of(y))) for y in ys]

        # All workers agree on the faults before they continue.
        try:
            cotangents = self.back(*ys)
        except Exception as error:
            # Virtual workers all end with this error. Other processes learn of it from `merged`, unless they wait for
            # this worker in another collective: a mismatch.
            if len(self.worker.mesh.local_workers) == self.worker.mesh.size or isinstance(error, MismatchError):
                raise
            return TrialResult(self.merged([raise_fault(error)]))
        faults = self._modified_faults("F", xs, before) + self._modified_faults("F*", ys, y_before)
        faults = self.merged(self._promise_faults(outs) + _signature_faults(cotangents, xs) + faults)
        if any(fault.kind.split()[0] in ("raises", "count", "shape", "dtype", "state") for fault in faults):
            return TrialResult(faults)
        if not faults and self.test.adjoint is None:
            faults = self.merged(self._involution_faults(xs, ys, outs, cotangents))
        return self._products(xs, ys, outs, cotangents, faults, sent)

    def _modified_faults(self, name: str, arrays, before) -> list[Fault]:
        return [
            Fault("modified", f"argument {k} of {name} was modified")
            for k, (a, b) in enumerate(zip(arrays, before, strict=True))
            if not np.array_equal(to_host(value_of(a)), b, equal_nan=True)
        ]

    def _linearity_faults(self, xs, outs, others) -> list[Fault]:
        """Whether F is linear, to the precision of the mode."""
        f_z = self.forward(*others)

        def nonlinear(factor) -> list[int]:
            """The results in which F(z + factor x) is not F(z) + factor F(x)."""

            def combined(z, x):
                return host_array(z) + factor * host_array(x)

            blocks = [(z, np.asarray(combined(z, x), z.dtype)) for x, z in zip(xs, others, strict=True)]
            f_combined = self.forward(*[Array(device_block(data, self.worker), z.state) for z, data in blocks])
            agree = (self._is_close(b, combined(a, o)) for b, o, a in zip(f_combined, outs, f_z, strict=True))
            return [k for k, ok in enumerate(agree) if not ok]

        real = self.test.real or self._mixed(xs, outs)
        failed = nonlinear(-2 if real or self.test.dtype.kind != "c" else -2 + 1j)
        text = "result {} is not linear in the arguments: F(z - 2x) is not F(z) - 2 F(x)"
        if failed and self.test.dtype.kind == "c" and not real and not nonlinear(-2):
            text = "result {} is not linear over the complex numbers, but over the reals: real=True tests it so"
        return [Fault("linear", text.format(k)) for k in failed]

    def _mixed(self, xs, outs) -> bool:
        return len({np.dtype(a.dtype).kind == "c" for a in (*xs, *outs)}) > 1

    def _promise_faults(self, outs: list) -> list[Fault]:
        """What is wrong with the states of the results."""
        return [
            Fault("promise", f"result {k} is {o.state}, and out_specs promise {spec}")
            for k, (o, spec) in enumerate(zip(outs, self.promised, strict=True))
            if spec is not None and type(o) is Array and o.state.varying - spec.varying
        ]

    def _involution_faults(self, xs, ys, outs, cotangents) -> list[Fault]:
        """Whether F* is the same when it is differentiated, and F** = F, to the precision of the mode."""
        recomputed, pull_back, *_ = pullback_of(self.back, ys)
        faults = [
            Fault("twice", f"where it is differentiated F* has another value for argument {k}")
            for k, (s, g) in enumerate(zip(recomputed, cotangents, strict=True))
            if not self._is_close(s, g)
        ]
        twice = [np.conj(g) for g in pull_back(tuple(np.conj(x) for x in xs))]
        return faults + [
            Fault("twice", f"result {k}: the adjoint of the adjoint is another map than F")
            for k, (t, o) in enumerate(zip(twice, outs, strict=True))
            if not self._is_close(t, o)
        ]

    def _is_close(self, a, b) -> bool:
        a, b = host_array(a), host_array(b)
        if self.test.exact or a.shape != b.shape:
            return np.array_equal(a, b)
        rough = np.sqrt(np.finfo(self.test.dtype).eps)
        return bool(np.linalg.norm((a - b).reshape(-1)) <= rough * (1 + np.linalg.norm(b.reshape(-1))))

    def _products(self, xs, ys, outs, cotangents, faults: list[Fault], sent) -> TrialResult:
        """Both inner products, the bound of their difference, whether copies agree, and what F sent."""
        test, worker, op = self.test, self.worker, self.test.operator
        products = [self.local(outs, ys, "target"), self.local(xs, cotangents, "source")]
        sides = ((outs, "target"), (ys, "target"), (xs, "source"), (cotangents, "source"))
        squares = [self.local(a, a, side).real for a, side in sides]
        moved = [0.0, 0.0] if test.exact or faults else self._perturbation_gaps(xs, ys, outs, cotangents)
        cost = [0, 0] if sent is None else [sent.messages, sent.bytes]
        if op is None:
            cost += (0, 0)
        else:
            x, group = np.asarray(to_host(xs[0].value)), worker.group(op.axes)
            per_host, came = worker.comm.members_per_host(group), host_array(outs[0]).nbytes
            costs = self._bound(op).plan(group, x.shape, x.dtype).costs(per_host, came)
            cost += costs.messages, costs.nbytes
        numbers = [*products, *squares, *moved, *cost]
        copies = [("result", k, o, "target") for k, o in enumerate(outs)]
        copies += [("cotangent of argument", k, g, "source") for k, g in enumerate(cotangents)]
        digests = [digest(host_array(a)) for _, _, a, _ in copies]
        rows = np.stack(self.all_gather(np.array([*numbers, *digests], np.clongdouble)))
        sums, digests = np.sum(rows[:, : len(numbers)], axis=0), np.real(rows[:, len(numbers) :])
        for column, (name, k, a, side) in enumerate(copies):
            if other := self._copies_differ(digests[:, column], state_in(a, worker).varying, self.rooted(side)):
                text = f"{name} {k} is Invariant along {other[0]}, and {other[1]} and {other[2]} hold different values"
                faults = [*faults, Fault("copies", text)]
        norms = [float(np.sqrt(s.real)) for s in sums[2:6]]
        scale = norms[0] * norms[1] + norms[2] * norms[3]
        perturbation = float(np.sqrt(sums[6].real)) * norms[1] + float(np.sqrt(sums[7].real)) * norms[2]
        eps = max(float(np.finfo(a.dtype).eps) for a in (*xs, *outs, *cotangents))
        bound = 0.0 if test.exact else ROUNDING_FACTOR * (perturbation / scale if scale else 0.0) + 4 * eps
        real = test.real or self._mixed(xs, outs)
        pair = tuple(as_number(s.real if real else s) for s in sums[:2])
        counted = tuple(int(s.real) for s in sums[8:12])
        return TrialResult(faults, pair, scale, bound, counted, test.exact, op is not None)  # type: ignore[arg-type]

    def _bound(self, op: Operator) -> Operator:
        """The operator as the tape has it, bound to the lengths of the blocks."""
        kept = (getattr(a, "op", a) for node in self.pull.tape.nodes for a in node.args or ())  # at a line, or bare
        return next((bound for bound in kept if type(bound) is type(op)), op)

    def _copies_differ(self, marks: np.ndarray, varying: frozenset[str], rooted: tuple[str, ...]):
        """Axes and two workers that should hold one value along them, and do not; otherwise None."""
        mesh = self.worker.mesh
        copy_axes = tuple(n for n in mesh.axes if n not in varying and n not in rooted)
        for w in range(mesh.size) if copy_axes else ():
            first = mesh.group(w, copy_axes).members[0]
            if marks[w] != marks[first]:
                return " and ".join(copy_axes), mesh.describe(first), mesh.describe(w)
        return None

    def _perturbation_gaps(self, xs, ys, outs, cotangents) -> list[float]:
        """The changes of F x and F* y (squared norms, this worker's share) by perturbations in the last bit.

        Perturbed are x, y, and the values on the tape of F, which shows the conditioning of its parts.
        """
        largest = [0.0, 0.0]
        pulled = cotangents if self.test.adjoint is None else self._tape_adjoint(ys)
        for r in range(PERTURBATIONS):
            perturbed_x = [self.draw.perturbed(x, -200 - r) for x in xs]
            perturbed_y = [self.draw.perturbed(y, 200 + r) for y in ys]
            moves = (
                (0, self.forward(*perturbed_x), outs, "target"),
                (1, self.back(*perturbed_y), cotangents, "source"),
                (1, self._perturbed_tape_adjoint(ys, 300 + r), pulled, "source"),
            )
            for side, new, old, side_name in moves:
                delta = [n - o for n, o in zip(new, old, strict=True)]
                largest[side] = max(largest[side], float(self.local(delta, delta, side_name).real))
        return largest

    def _perturbed_tape_adjoint(self, ys, tag: int) -> tuple:
        """The tape's F* y, with the values on the tape perturbed in the last bit."""
        nodes = self.pull.tape.nodes
        saved_args = [node.args for node in nodes]
        rngs: dict = {}

        def perturbed(a):
            data = to_host(a.value if type(a) is Array else a)
            if type(data) is not np.ndarray or data.dtype.kind not in "fc":
                return a
            state = state_in(a, self.worker)
            if state not in rngs:  # Workers that hold copies draw the same for them.
                rngs[state] = self.draw.rng(state, tag)
            signs = rngs[state].choice([-1.0, 1.0], data.shape)
            new = device_block((data * (1 + np.finfo(data.dtype).eps * signs)).astype(data.dtype), self.worker)
            return Array(new, a.state) if type(a) is Array else new

        try:
            for node, args in zip(nodes, saved_args, strict=True):
                if args is not None:
                    node.args = tuple(perturbed(a) for a in args)
            return self._tape_adjoint(ys)
        finally:
            for node, args in zip(nodes, saved_args, strict=True):
                node.args = args


PERTURBATIONS = 3
ROUNDING_FACTOR = 16.0
"""How many times the effect of such a perturbation the rounding inside F may have."""


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
        limit = 1 << (min(np.finfo(d).nmant for d in (self.dtype, dtype)) // 3) if self.exact else None
        data = random_numbers(self.rng(state, tag), shape, dtype, limit)
        return Array(device_block(np.asarray(data, dtype), self.worker), state)

    def like(self, x, tag: int) -> Array:
        """A block of the shape, the dtype and the state of x."""
        dtype = np.dtype(getattr(x, "dtype", self.dtype))
        return self(np.shape(value_of(x)), state_in(x, self.worker), dtype if dtype.kind in "fc" else self.dtype, tag)

    def perturbed(self, x: Array, tag: int) -> Array:
        signs = self.rng(x.state, tag).choice([-1.0, 1.0], np.shape(x.value))
        data = np.asarray(to_host(x.value)) * (1 + np.finfo(x.dtype).eps * signs)
        return Array(device_block(data.astype(x.dtype), self.worker), x.state)


def random_numbers(rng: np.random.Generator, shape: Shape, dtype: np.dtype, limit: int | None) -> np.ndarray:
    """Integers from -limit to limit, or normal numbers for None; complex for complex dtypes.

    The integers are not 0, which would hide a missed entry, and have few bits, so that sums and multiples are exact.
    """

    def real():
        if limit is None:
            return rng.standard_normal(shape)
        integers = rng.integers(1, 2 * limit + 1, shape)
        return np.where(integers > limit, limit - integers, integers)

    return real() + 1j * real() if dtype.kind == "c" else real()


def device_block(data: np.ndarray, worker: Worker) -> np.ndarray:
    """A read-only block on the device of its worker."""
    data = np.asarray(data)
    data.flags.writeable = False
    if worker.mesh.places is not None:
        return worker.mesh.places.own(data, worker.index)
    return data


def host_array(x) -> np.ndarray:
    return np.asarray(to_host(value_of(x)))


def state_in(x, worker: Worker):
    return getattr(x, "state", None) or worker.state()


def raise_fault(error: Exception) -> Fault:
    name = type(error).__name__
    return Fault(f"raises {name}", f"F* raises {name}: {error}".replace("\n", "\n    "))


def _signature_faults(cotangents: Sequence, xs: Sequence[Array]) -> list[Fault]:
    """Cotangents that do not have the shape, dtype or state of their arguments."""
    if len(cotangents) != len(xs):
        return [Fault("count", f"F* gives {len(cotangents)} cotangents for {len(xs)} arguments")]
    if any(g is None for g in cotangents):
        return [Fault("count", f"F* gives None for argument {[g is None for g in cotangents].index(True)}")]
    return [
        Fault(what, f"F* gives {what} {actual} for argument {k}, which has {expected}")
        for k, (g, x) in enumerate(zip(cotangents, xs, strict=True))
        for what, actual, expected in (
            ("shape", np.shape(value_of(g)), x.shape),
            ("dtype", getattr(g, "dtype", None), x.dtype),
            ("state", str(getattr(g, "state", None)), str(x.state)),
        )
        if actual != expected
    ]
