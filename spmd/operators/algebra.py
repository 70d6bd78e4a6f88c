"""The algebra of linear maps: sums, products and multiples of operators are operators, with their adjoints.

Whatever is composed is kept in one normal form: a sum of terms, each a number times a product of factors, applied from
right to left. A product without factors is the identity. Equality is that of normal forms, so

    (A @ B).H == B.H @ A.H,    A.H.H == A,    2 * (3 * A) == 6 * A,    A @ identity == A,    A + A == 2 * A.

`Linear` is what operators of bodies (`spmd.operators.base.Operator`) and operators on global arrays (`spmd.linear`)
share. `Composed` is a composition of operators of bodies: it knows the states, and inserts `Vary` where a body would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.tracer import value_of
from spmd.errors import LayoutError, SpecError, StateError, describe
from spmd.layout import Layout, P, Spec
from spmd.mesh import WORKER, here
from spmd.operators.base import Ends, Linear, Operator, Term, collected
from spmd.operators.sums import Vary
from spmd.state import INVARIANT, ROOTED, VARYING, state_of
from spmd.tracebacks import api_boundary

__all__ = ["Composed", "Terms", "across", "added", "identity", "signature"]


class Terms(Linear):
    """A map given by its normal form: what compositions of both kinds share."""

    __slots__ = ("_terms",)
    _terms: tuple[Term, ...]

    @property
    def terms(self) -> tuple[Term, ...]:
        return self._terms

    @property
    def H(self) -> Any:
        adjoints = ((c.conjugate(), tuple(f.H for f in reversed(factors))) for c, factors in self._terms)
        return self._make(adjoints, self._ends[::-1])

    @property
    def T(self) -> Any:
        transposes = ((c, tuple(f.T for f in reversed(factors))) for c, factors in self._terms)
        return self._make(transposes, self._ends[::-1])

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return {fs: c for c, fs in self._terms} == {fs: c for c, fs in other.terms} and self._ends == other._ends

    def __hash__(self) -> int:
        return hash(frozenset(self._terms))

    def __repr__(self) -> str:
        return formula(self._terms)

    def _applied(self, x: Any) -> Any:
        """The sum of the terms, each applied to x."""
        total: Any = None
        for c, factors in self._terms:
            y = x
            for factor in reversed(factors):
                y = factor(y)
            if c != 1:
                y = tree.map(lambda a, c=c: c * a, y)
            total = y if total is None else tree.map(added, total, y)
        return total


def added(a: Any, b: Any) -> Any:
    """a + b of one shape: broadcasting would be another linear map."""
    if np.shape(value_of(a)) != np.shape(value_of(b)):
        raise LayoutError.at(
            "A + B",
            got=f"{describe(a)} from one operator and {describe(b)} from the other",
            need="results of one shape",
            mend="add operators that map to arrays of one shape",
        )
    return a + b


def _op_repr(op: Linear) -> str:
    """The repr of an operator without default fields."""
    if not is_dataclass(op):
        return str(op)
    given = [f.name for f in fields(op) if getattr(op, f.name) != f.default]
    texts = [("" if n == "axes" else f"{n}=") + repr(getattr(op, n)) for n in given]
    return f"{type(op).__name__}({', '.join(texts)})"


def formula(terms: tuple[Term, ...], name=_op_repr) -> str:
    """A normal form as text."""

    def product(factors: tuple[Linear, ...]) -> str:
        texts = (name(f) for f in factors)
        summed = (isinstance(f, Terms) and len(f.terms) > 1 for f in factors)
        return " @ ".join(f"({t})" if s else t for t, s in zip(texts, summed, strict=True)) or "identity"

    text = ""
    for c, factors in terms:
        minus = not isinstance(c, complex) and c < 0
        size = -c if minus else c
        one = product(factors) if size == 1 else f"{size!r} * {product(factors)}"
        text += (" - " if minus else " + ") + one if text else ("-" if minus else "") + one
    return text or "zero"


class Along(NamedTuple):
    """What a map does along one axis: the states it takes and gives, and whether it refuses an Invariant array."""

    source: str
    target: str
    adds: bool


def signature(op: Linear) -> Mapping[str, Along]:
    """What an operator does along each of its axes; along others it keeps the state."""
    if isinstance(op, Composed):
        return op.signature
    collective: Any = op
    rooted = f"{ROOTED}({getattr(collective, 'root', 0)})"
    sources = {n: rooted if collective.source == ROOTED else collective.takes(n) for n in collective.axes}
    varying = collective.out_state(state_of(n for n, s in sources.items() if s == VARYING)).varying
    targets = {n: VARYING if n in varying else INVARIANT for n in collective.axes}
    if collective.target == ROOTED:
        targets = dict.fromkeys(collective.axes, rooted)
    return {n: Along(sources[n], targets[n], collective.adds) for n in collective.axes}


class Composed(Terms):
    """Sums, products and multiples of operators of bodies. `A(x)` applies it to this worker's block.

    The states have to fit, as in a body: where an Invariant result meets an operator on Varying arrays `Vary` is
    inserted, and it is part of the adjoint. The adjoint of unbound operators assumes balanced blocks.
    """

    __slots__ = ("signature",)
    signature: Mapping[str, Along]

    def __init__(self, terms: Iterable[Term]):
        self._terms, self.signature = _with_states(collected(terms))

    def _make(self, terms: Iterable[Term], ends: Ends) -> Linear:
        return composed(terms)

    def _meet(self, other: Linear, sign: str) -> None:
        meet(self, other, sign)

    def __call__(self, x: Any) -> Any:
        return across(self, x) if WORKER.get() is None else self._applied(x)


def composed(terms: Iterable[Term]) -> Linear:
    """The operator of a body with this normal form."""
    composition = Composed(terms)
    match composition.terms:
        case ((1, (operator,)),):
            return operator
    return composition


def identity() -> Linear:
    """The operator that leaves every block as it is. 0 * identity() gives zeros of the shape that came."""
    return Composed(((1, ()),))


def meet(one: Linear, other: Linear, sign: str) -> None:
    """Raise where an operator of bodies meets one on global arrays."""
    if not isinstance(other, Operator | Composed):
        raise LayoutError.at(
            f"A {sign} B",
            argument="B",
            got=f"{other!r}, which maps global arrays",
            need=f"an operator of bodies, as {one!r} is",
            mend="spmd.linear_operator(A, in_specs, out_specs, shape=...) makes A one on global arrays",
        )


def _with_states(terms: tuple[Term, ...]) -> tuple[tuple[Term, ...], dict[str, Along]]:
    """Terms whose states fit, and what their sum does along each axis."""
    typed = [(c, *_chained(factors)) for c, factors in terms]
    axes = dict.fromkeys(n for _, _, sig in typed for n in sig)
    sources = {n: _common_state({sig[n].source for _, _, sig in typed if n in sig}, n, "take") for n in axes}
    if len(typed) > 1:
        typed = [(c, *_varied_first(factors, sig, sources)) for c, factors, sig in typed]
    term_targets = [{n: sig[n].target if n in sig else sources[n] for n in axes} for _, _, sig in typed]
    targets = {n: _common_state({target[n] for target in term_targets}, n, "give") for n in axes}
    final: list[Term] = []
    for (c, factors, _), target in zip(typed, term_targets, strict=True):
        final.append((c, _vary([n for n in axes if (target[n], targets[n]) == (INVARIANT, VARYING)]) + factors))
    adds = {n: any(sig[n].adds for _, _, sig in typed if n in sig) for n in axes}
    return collected(final), {n: Along(sources[n], targets[n], adds[n]) for n in axes}


def _common_state(states: set[str], axis: str, verb: str) -> str:
    """The common state of the terms of a sum: they take Invariant arrays if one of them does, and give Varying ones if
    one of them does."""
    if len(states) > 1 and not states <= {INVARIANT, VARYING}:
        raise StateError.at(
            "A + B",
            got=f"operators that {verb} {' and '.join(sorted(states))} arrays along axis {axis!r}",
            need="operators on arrays of one state",
            mend="compose with Replicate or Broadcast, Keep or SumReduce first",
        )
    if len(states) == 1:
        return next(iter(states))
    return INVARIANT if verb == "take" else VARYING


def _vary(axes: Iterable[str]) -> tuple[Linear, ...]:
    names = tuple(sorted(axes))
    return (Vary(names),) if names else ()


def _varied_first(factors, signature: dict[str, Along], sources: Mapping[str, str]):
    """A term changed to take what all terms of the sum take."""
    varied = [n for n in signature if (sources[n], signature[n].source) == (INVARIANT, VARYING)]
    _refuse_invariant(varied, signature, factors, "+")
    return _chained(factors + _vary(varied))


def _chained(factors: tuple[Linear, ...]) -> tuple[tuple[Linear, ...], dict[str, Along]]:
    """A product in which each factor takes what the one to its right gives, and what it does along each axis."""
    chain: tuple[Linear, ...] = ()
    total: dict[str, Along] = {}
    for factor in reversed(factors):
        _check_layouts(factor, chain)
        own = signature(factor)
        varied = [n for n in own if n in total and (total[n].target, own[n].source) == (INVARIANT, VARYING)]
        _refuse_invariant(varied, own, (factor, *chain), "@")
        for n, along in own.items():
            if n in total and n not in varied and total[n].target != along.source:
                raise StateError.at(
                    "A @ B",
                    got=f"{formula(((1, chain),))}, which gives {total[n].target} arrays along axis {n!r}, before "
                    f"{formula(((1, (factor,)),))}",
                    need=f"{along.source} arrays along {n!r}",
                    mend=f"Sum(({n!r},)) or Collect(({n!r},)) in between make a Varying array Invariant, Replicate "
                    "a Rooted one",
                )
        chain = (factor, *_vary(varied), *chain)
        for n, along in own.items():
            total[n] = along._replace(source=total[n].source, adds=total[n].adds) if n in total else along
    return chain, total


def _check_layouts(factor: Linear, chain: tuple[Linear, ...]) -> None:
    """Raise where an operator between layouts takes another layout than the one before it gives."""
    taken, given = (getattr(f, "layouts", None) for f in (factor, chain[0] if chain else None))
    if taken is not None and given is not None and taken[0] != given[1]:
        raise LayoutError.at(
            "A @ B",
            argument="B",
            got=f"an operator that gives {given[1]}, before one that takes {taken[0]}",
            need="the layout that A takes",
            mend="Repartition from the one to the other in between",
        )


def _refuse_invariant(axes: list[str], own: Mapping[str, Along], factors, sign: str) -> None:
    """Raise where an operator that adds would be given Invariant arrays."""
    added = [n for n in axes if own[n].adds]
    if added:
        raise StateError.at(
            f"A {sign} B",
            got=f"an array that is Invariant along axis {added[0]!r} for {formula(((1, tuple(factors[:1])),))}",
            need=f"an array that varies over {added[0]!r}: copies would be counted",
            mend=f"leave the sum over {added[0]!r} out; or compose with Vary(({added[0]!r},)) first, if the sum of "
            "copies is meant",
        )


@api_boundary
def across(op: Linear, x: Any) -> Any:
    """An operator of bodies applied to a global array: to every block, as x lies.

    The result lies by the same spec, less the axes along which the operator gives an Invariant array. An operator from
    one layout to another takes x in the first, wherever it lay, and gives it in the second.
    """
    value = value_of(x)
    mesh, spec = getattr(value, "mesh", None), getattr(value, "spec", None)
    if mesh is None or not isinstance(spec, Spec):
        function = getattr(op, "function", None)
        here(f"spmd.{function}" if function else "an operator")  # which says that this is no body
    source, target = _source(op, cast(Spec, spec)), _target(op, cast(Spec, spec), describe(x))

    def body(block):
        return op(block)

    body.__name__ = getattr(op, "function", "operator")
    return cast(Any, mesh).map(body, source, target)(x)


def _changes_layout(op: Linear) -> bool:
    """Whether an operator, or a factor of it, goes from one layout to another."""
    return getattr(op, "layouts", None) is not None or (
        isinstance(op, Terms) and any(_changes_layout(f) for _, factors in op.terms for f in factors)
    )


def _source(op: Linear, spec: Spec) -> Spec:
    """The layout in which an operator takes an array with this spec."""
    layouts = getattr(op, "layouts", None)
    if layouts is not None:
        return layouts[0]
    if not _changes_layout(op):
        return spec
    return _agreed([_source(factors[-1], spec) if factors else spec for _, factors in op.terms], op, "take")


def _target(op: Linear, spec: Spec, what: str) -> Spec:
    """The layout of the result of an operator, for an array with this spec."""
    layouts = getattr(op, "layouts", None)
    if layouts is not None:
        return layouts[1]
    if not _changes_layout(op):
        return _target_by_axes(op, spec, what)
    targets = []
    for _, factors in op.terms:
        layout, pending = spec, ()
        for k, factor in enumerate(reversed(factors)):
            if _changes_layout(factor):
                layout = _target_by_axes(composed([(1, pending)]), layout, what) if pending else layout
                if k:
                    _agreed([layout, _source(factor, layout)], op, "give and take")
                layout, pending = _target(factor, layout, what), ()
            else:
                pending = (factor, *pending)
        targets.append(_target_by_axes(composed([(1, pending)]), layout, what) if pending else layout)
    return _agreed(targets, op, "give")


def _agreed(specs: list[Spec], op: Linear, verb: str) -> Spec:
    """The spec in which all terms of a sum agree."""
    comparable = [
        P(*s.spec.trimmed)
        if isinstance(s, Layout) and s.spec is not None and s.balanced and s.copies == "invariant"
        else s
        for s in specs
    ]
    if any(s != comparable[0] for s in comparable):
        raise SpecError.at(
            f"{op!r} of a global array",
            got=f"terms that {verb} arrays laid out by {' and by '.join(map(str, dict.fromkeys(comparable)))}",
            need="terms that agree",
            mend="Repartition the terms that lie otherwise",
        )
    return specs[0]


def _target_by_axes(op: Linear, spec: Spec, what: str) -> Spec:
    """The layout of the result of an operator that goes by axes, not by layouts."""
    by_axis = signature(op)
    by_axes = spec if isinstance(spec, P) else spec.spec
    rooted = [n for n, along in by_axis.items() if ROOTED in along.source + along.target]
    lost = [n for n, along in by_axis.items() if along.target == VARYING and n not in (by_axes or P()).axes]
    if rooted or lost:
        axis = (rooted or lost)[0]
        raise SpecError.at(
            f"{op!r} of a global array",
            argument="x",
            got=what,
            need=f"an operator whose result is known to be laid out as x is, along axis {axis!r} too",
            mend="spmd.linear_operator(A, in_specs, out_specs, shape=x.shape) says how the result is laid out"
            if lost
            else "spmd.map(f, in_specs, out_specs), with the operator in f",
        )
    invariant = {n for n, along in by_axis.items() if along.target == INVARIANT}
    return (
        P(*(tuple(n for n in names if n not in invariant) for names in by_axes.dims)) if by_axes is not None else spec
    )
