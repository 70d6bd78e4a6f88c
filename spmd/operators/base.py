"""What an operator is: one frozen dataclass from which everything else about it is derived.

A `Collective` says which states it takes and gives, what moves, and what comes of it. An `Operator` is a linear one
together with its adjoint; its tape rule, algebra and tests follow from `H`. Along each of its axes an operator maps

    I -> V, V -> I, V -> V, or to and from a Rooted handle,

and is the identity on the states along all other axes. Its adjoint is relative to the inner product of `spmd.state`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.tape import Future, Node
from spmd.errors import LayoutError
from spmd.mesh import WORKER
from spmd.operators.memo import memoised
from spmd.state import INVARIANT, VARYING, State, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group, Shape
from spmd.transport.handles import Handle
from spmd.transport.plan import Plan, Plans, part_of

__all__ = ["Called", "Collective", "Linear", "Operator", "each_leaf", "move", "named"]


NUMBERS = (bool, int, float, complex)

C = TypeVar("C", bound="Collective")


Number = int | float | complex
Term = tuple[Number, tuple["Linear", ...]]
Ends = tuple[Any, Any]


class Linear:
    """A linear map that can be composed: `A @ B`, `A + B`, `2 * A`, `A.H`, `A.T`; `A @ x` and `A(x)` apply it."""

    __slots__ = ()
    __array_ufunc__ = None  # so that NumPy's numbers and arrays leave `a * A` to us

    @property
    def H(self) -> Any:
        """The adjoint, with <A x, y> = <x, A.H y>."""
        raise NotImplementedError

    @property
    def T(self) -> Any:
        """The transpose: the conjugate of the adjoint."""
        raise NotImplementedError

    def __call__(self, x: Any) -> Any:
        raise NotImplementedError

    @property
    def terms(self) -> tuple[Term, ...]:
        """The normal form."""
        return ((1, (self,)),)

    @property
    def _ends(self) -> Ends:
        """The spaces that the map goes from and to, where known."""
        return None, None

    def _ends_with(self, other: Linear) -> Ends:
        """The spaces of the sum of two maps."""
        return self._ends

    def _make(self, terms: Iterable[Term], ends: Ends) -> Any:
        """A map of the same kind from a normal form."""
        raise NotImplementedError

    def _meet(self, other: Linear, sign: str) -> None:
        """Raise where two maps cannot be composed."""
        raise NotImplementedError

    @api_boundary
    def __matmul__(self, other: Any) -> Any:
        if not isinstance(other, Linear):
            return self(other)
        self._meet(other, "@")
        ends = other._ends[0], self._ends[1]
        for one, rest in ((self, other), (other, self)):
            if len(one.terms) == 1 and not one.terms[0][1]:
                return self._make(((one.terms[0][0] * c, fs) for c, fs in rest.terms), ends)
        if not self.terms or not other.terms:
            return self._make((), ends)
        (a, left), (b, right) = (x.terms[0] if len(x.terms) == 1 else (1, (x,)) for x in (self, other))
        return self._make(((a * b, left + right),), ends)

    @api_boundary
    def __add__(self, other: Any) -> Any:
        if not isinstance(other, Linear):
            return NotImplemented
        self._meet(other, "+")
        return self._make((*self.terms, *other.terms), self._ends_with(other))

    @api_boundary
    def __mul__(self, number: Any) -> Any:
        number = as_number(number)
        if number is None:
            return NotImplemented
        return self._make(((number * c, fs) for c, fs in self.terms), self._ends)

    __rmul__ = __mul__

    @api_boundary
    def __truediv__(self, number: Any) -> Any:
        number = as_number(number)
        return NotImplemented if number is None else self * (1 / number)

    @api_boundary
    def __neg__(self) -> Any:
        return self * -1

    @api_boundary
    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, Linear) else NotImplemented


def as_number(a: Any) -> Number | None:
    """A number as Python's own, which leaves the dtype of arrays as it is; None for anything else."""
    if isinstance(a, np.bool_ | np.number) or (isinstance(a, np.ndarray) and a.ndim == 0 and a.dtype.kind in "biufc"):
        a = a.item()
    return cast(Number, a) if isinstance(a, int | float | complex) else None


def collected(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Terms with the numbers of equal products added. Zero terms are left out, but one, which knows the shapes."""
    numbers: dict[tuple[Linear, ...], Number] = {}
    for c, factors in terms:
        numbers[factors] = numbers[factors] + c if factors in numbers else c
    nonzero = [(c, fs) for fs, c in numbers.items() if c != 0]
    return tuple(nonzero or [(c, fs) for fs, c in numbers.items()][:1])


_application: Any
"""`operate`, `move`, `across`, `composed` and `meet` of `spmd.operators.apply`, which imports this module."""


def use_application(application: Any) -> None:
    """Let collectives be applied by these functions."""
    global _application
    _application = application


def move(op: Collective, g: Any) -> Any:
    """Apply an operator to a cotangent."""
    return _application.move(op, g)


class Called:
    """What the user called: the name of the function, and which leaf of which tree the operator is applied to.

    forward: of an operator that a backward sweep applies, the function whose adjoint that is.
    """

    __slots__ = ("forward", "function", "leaf")

    def __init__(self, function: str, leaf: tree.Leaf | None = None, forward: str = ""):
        self.function = function
        self.leaf = leaf
        self.forward = forward

    def _key(self) -> tuple[Any, ...]:
        return self.function, self.leaf, self.forward

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Called) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True)
class Collective:
    """Something that the workers along `axes` do together.

    called: what the user called, where that is another function, or a tree. It is part of what all members agree on.
    function: the name of the function that users write. source and target: the state along the axes that it takes
    and gives. adds: it refuses an Invariant array (which would be multiplied), others insert `Vary`.
    same_shape: whether all members must bring blocks of one shape (None: not even of as many dimensions).
    """

    axes: tuple[str, ...]
    called: Called | None = field(default=None, kw_only=True, repr=False)

    function: ClassVar[str]
    source: ClassVar[str] = VARYING
    target: ClassVar[str] = VARYING
    adds: ClassVar[bool] = False
    same_shape: ClassVar[bool | None] = False

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Any:
        """What moves of a block of this shape and dtype, and what is made of what comes: a `Plan`, from which all else
        follows, or `Plans` where it takes several one after the other.

        `print(op.plan(...))` shows it. A member's plan may raise where its block cannot be right.
        """
        raise NotImplementedError

    @memoised
    def plan_for(self, group: Group, shape: Shape, dtype: np.dtype) -> Any:
        """`plan`, computed once."""
        return self.plan(group, shape, dtype)

    def out_shape(self, group: Group, shapes: Sequence[Shape], dtype: np.dtype) -> Shape:
        """The shape of this member's result, given the shapes of all members' blocks, as plans say it: nothing moves.
        What takes several plans overrides it.

        Raises LayoutError where such blocks do not fit each other.
        """
        seen = set(shapes) if self.same_shape else {len(shape) for shape in shapes}
        if len(seen) > 1 and self.same_shape is not None:
            raise LayoutError.at(
                f"spmd.{self.function}",
                argument="x",
                got=f"blocks of shapes {', '.join(map(str, map(list, shapes)))}",
                need="blocks of one shape" if self.same_shape else "blocks of as many dimensions",
                mend="pass blocks that fit each other",
            )
        blocks = [np.broadcast_to(np.zeros((), dtype), shape) for shape in shapes]
        plans = [self._checked_plan(group.of_member(k), block) for k, block in enumerate(blocks)]
        own = plans[group.index]
        received = [part_of(block, plan.parts[group.index]) for block, plan in zip(blocks, plans, strict=True)]
        return own.complete([None if part is None else part.shape for part in received]).shape

    def _checked_plan(self, group: Group, x: np.ndarray) -> Any:
        self.check(group, x)
        return self.plan_for(group, x.shape, x.dtype)

    def start(self, comm: Comm, group: Group, x: Any, call: Call) -> Handle:
        """Start it on this worker's block: the result is the new block and the operator bound to the shapes that came.
        What takes several plans overrides it."""
        return comm.run(self.plan_for(group, x.shape, x.dtype), call, x)

    def repeatable_plan(self, group: Group, x: np.ndarray) -> Plan | Plans | None:
        """The plan for each further time that the same line calls it with such a block, or its plans, if `go_on` can
        take over after each; None where that is not all."""
        return None if type(self).start is not Collective.start else self.plan_for(group, x.shape, x.dtype)

    def go_on(self, comm: Comm, group: Group, x: Any, call: Call, bounds: Sequence[Any]) -> Handle:
        """`start` after some of the plans. x: what they have given; bounds: the operators bound by them."""
        raise NotImplementedError

    def check(self, group: Group, x: np.ndarray) -> None:
        """Raise where this worker's block cannot be right, before anyone is asked."""

    def pull(self, g, x, ans):
        """The cotangent of this worker's block, given that of the result."""
        raise NotImplementedError

    keeps: ClassVar[bool] = True
    """Whether `pull` needs the block and the result."""

    def defer(self, sweep_state: dict, g: Any, leaf: Node) -> Future | None:
        """The cotangent of a leaf, if it may arrive later. sweep_state: what operators keep during one sweep."""
        return None

    @cached_property
    def detail(self) -> str:
        """The parameters that all members must agree on."""
        own = (f for f in fields(self) if f.name not in ("axes", "called", *self.private))
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in own)

    def backward(self, op: C) -> C:
        """An operator that the backward sweep applies for this one. It knows what was called, so it is the same on all
        workers where this one was."""
        called = self.called or Called(self.function)
        forward = f"the adjoint of {called.forward}" if called.forward else called.function
        return called_as(op, Called(op.function, called.leaf, forward))

    def over(self, structure: Any) -> tuple[Any, ...]:
        """The collective for each leaf of a tree, and for the tree as a whole at the end."""
        try:
            return _over(self, structure)
        except TypeError:  # keys or metadata that cannot be hashed
            return _of_leaves(self, structure)

    private: ClassVar[tuple[str, ...]] = ()
    """Parameters that may differ between workers."""

    def takes(self, axis: str) -> str:
        """The state along one of the axes that it takes."""
        return self.source

    @cached_property
    def admits(self) -> dict[State, State]:
        """The state in which it takes an array, by that of the array; filled as they come up."""
        return {}

    @cached_property
    def calls(self) -> dict[Any, Call]:
        """What was called so far, by the line and the block."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """The parameters, without cached results."""
        derived = {n for n in self.__dict__ if n.startswith("memoised ")}
        derived |= {n for n in self.__dict__ if type(getattr(type(self), n, None)) is cached_property}
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def out_state(self, state: State) -> State:
        """The state of the result of an array in `state`."""
        return _after(self.target, self.axes, state)


@lru_cache(maxsize=4096)
def _after(target: str, axes: tuple[str, ...], state: State) -> State:
    return state_of(state.varying - set(axes) if target == INVARIANT else state.varying | set(axes))


_BACK = "memoised back"
"""Where an operator keeps its adjoint, and what the backward sweep applies in its place."""


class Operator(Collective, Linear):
    """A linear collective, declared with its adjoint.

    Operators are frozen dataclasses; those that add no field inherit what that takes, which keeps the import quick.

    `A.H` is the adjoint in the state-aware inner product, `A.T` the transpose: equal, because data movement is real.
    `A @ B`, `A + B`, `2 * A` are operators too (`spmd.operators.algebra`).
    The adjoint of a bound operator gives back exactly the blocks that came in; that of an unbound one assumes
    balanced blocks.
    """

    keeps: ClassVar[bool] = False

    @property
    def H(self) -> Operator:
        """The adjoint: another operator, with <A x, y> = <x, A.H y>."""
        raise NotImplementedError

    @property
    def T(self) -> Operator:
        """The transpose; data movement is real, so it is the adjoint."""
        return self.H

    def pull(self, g, x, ans):
        return _application.move(self.back, g)

    @property
    def back(self) -> Operator:
        """The adjoint as the backward sweep applies it."""
        adjoint = self.H
        cached = self.__dict__.get(_BACK)
        if cached is None or cached[0] is not adjoint:
            cached = self.__dict__[_BACK] = adjoint, self.backward(adjoint)
        return cached[1]

    def __call__(self, x):
        """The operator applied to this worker's block, or to a pytree of blocks, in a body; outside of bodies to a
        `PartitionedArray`, block by block."""
        if WORKER.get() is None:
            return _application.across(self, x)
        return _application.operate(self, x, sys._getframe(1))

    def _make(self, terms: Iterable[Term], ends: Any) -> Linear:
        return _application.composed(terms)

    def _meet(self, other: Linear, sign: str) -> None:
        _application.meet(self, other, sign)


def called_as(op: C, called: Called) -> C:
    """A collective with another `called`: the same object each time."""
    renamed = _called_as(op, called)
    return renamed if type(renamed) is type(op) else _renamed(op, called)  # a copy of another class has its tables too


def _renamed(op: C, called: Called) -> C:
    other = copy(op)
    object.__setattr__(other, "called", called)  # it is frozen
    return other


_called_as = memoised(_renamed)


def _of_leaves(op: Any, structure: Any) -> tuple[Any, ...]:
    name = (op.called or Called(op.function)).function
    return tuple(op if leaf is None else called_as(op, Called(name, leaf)) for leaf in tree.leaf_positions(structure))


_over = memoised(_of_leaves)


def each_leaf(f: Callable[[Any, Callable[[C], C]], Any], x: Any) -> Any:
    """f(leaf, at) of each leaf of the user's x, as a tree; `at(op)` is the collective that knows which leaf it is."""
    leaves, structure = tree.flatten(x)
    if tree.is_leaf(structure):
        return f(x, _by_itself)
    results = [f(leaf, lambda op, k=k: op.over(structure)[k]) for k, leaf in enumerate(leaves)]
    return tree.unflatten(structure, results)


def _by_itself(op: C) -> C:
    return op


@lru_cache(maxsize=4096, typed=True)
def named(function: str, kind: Any, *parameters: Any, forward: str = "") -> Any:
    """The one collective of a kind with these parameters that is called by this function. forward: see `Called`."""
    return kind(*parameters, called=Called(function, forward=forward))
