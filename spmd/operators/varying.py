"""How arrays of different state meet, and what counts as one value."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from spmd.autodiff import tracer, tree
from spmd.autodiff.admission import admit
from spmd.autodiff.allocation import writable
from spmd.autodiff.staging.recorder import is_slot
from spmd.autodiff.tracer import Array, Mixing, value_of
from spmd.device import copied
from spmd.errors import ClosureError, DifferentiationError, StateError, all_of, axes_of, describe, one_or_all
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.mesh import WORKER, Worker, here
from spmd.operators.base import Collective, move
from spmd.operators.blocks import owned_block
from spmd.operators.memo import interned
from spmd.operators.sums import Vary
from spmd.operators.terms import is_share, remember_sums, repeated_terms, warn_of_term
from spmd.replicas.records import Source, source_of
from spmd.replicas.verify import verify_replicas
from spmd.state import INVARIANT, VARYING, State, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.handles import read_only

__all__ = ["Join"]


def admitted(op: Collective, x: Any, state: State, worker: Worker) -> State:
    """The state in which an operator takes x, which is in `state`: that, or one that varies over more axes.

    Raises StateError where it takes neither.
    """
    taken = op.admits.get(state)
    if taken is None:
        taken = op.admits[state] = _admitted(op, x, state, worker)
    return taken


def _admitted(op: Collective, x: Any, state: State, worker: Worker) -> State:
    missing = [n for n in op.axes if op.takes(n) == VARYING and n not in state.varying]
    if missing:
        if op.adds:
            rest = [n for n in op.axes if n not in missing]
            axes = one_or_all(missing)
            factor = worker.group(tuple(missing)).size
            raise StateError.at(
                f"spmd.{op.function}",
                argument="x",
                got=f"{describe(x)}, which does not vary over {axes_of(missing)}",
                need=f"an array that varies over {all_of(op.axes)}",
                mend=(f"name {all_of(rest)} only" if rest else "leave the call out")
                + f": along {axes} the value is already the same on all {factor} workers; "
                f"spmd.pvary(x, {axes}) first if the sum of {factor} copies is meant",
            )
        state = state_of(state.varying | set(missing))
    present = [n for n in op.axes if op.takes(n) == INVARIANT and n in state.varying]
    if present:
        raise StateError.at(
            f"spmd.{op.function}",
            argument="x",
            got=f"{describe(x)}, which varies over {axes_of(present)}",
            need=f"an array that is Invariant along {all_of(op.axes)}",
            mend="reduce or gather it first (spmd.psum, spmd.all_gather(..., to='invariant'))",
        )
    return state


def outside(where: str, x: Array, argument: str | None = None) -> Exception:
    """The error for an array of a body that was not passed to it."""
    return ClosureError.at(
        where,
        argument=argument,
        got=f"{describe(x)} that was traced outside of this map",
        need="arrays of this body",
        mend="pass it to the map as an argument, with a spec in in_specs (P() for a replicated one)",
    )


def vary(x: Array, state: State) -> Array:
    """x in a state of more axes. A traced array is varied once for each state: its cotangents meet before the sum."""
    if x.state is state:
        return x
    if x.tape is None:
        return Array(x.value, state)
    if x.tape.outer is not None:
        with x.tape.before_steps(x):
            return _varied_once(x, state)
    return _varied_once(x, state)


def _varied_once(x: Array, state: State) -> Array:
    key, varied_copies = (x.node, state), x.tape.varied_copies
    varied = varied_copies.get(key)
    if varied is None:
        varied = varied_copies[key] = move(_between(here("spmd.pvary").mesh.sides, x.state, state), x)
    return varied


@lru_cache(maxsize=1024)
def _between(sides: tuple[tuple[str, int], ...], have: State, want: State) -> Vary:
    """What varies an array of one state, to be in the other."""
    return interned(Vary, tuple(n for n, _ in sides if n in want.varying - have.varying))


class Join(Mixing):
    """How arrays of different state meet in a body: Invariant ones are varied."""

    def ambient(self) -> State | None:
        worker = WORKER.get()
        if worker is None:
            return None
        if not worker.tracked:
            raise DifferentiationError.at(
                "a gradient transformation in a body",
                got="a map with check=False that is not differentiated from outside: its arrays are bare",
                need="arrays that carry their state",
                mend="spmd.map(..., check=True)",
            )
        return worker.state()

    def join(self, arrays: list[Array]) -> tuple[list[Array], Any]:
        for a in arrays:
            if a.state is None:
                raise outside("an operation in a body", a)
        state = arrays[0].state
        for a in arrays:
            if a.state is not state:
                state = state | a.state
        varied = [vary(a, state) for a in arrays]
        for a, v in zip(arrays, varied, strict=True):
            if v is not a and v.tape is not None and v.node.shape == ():
                v.tape.varied_scalars[id(v.node)] = v.node
        return varied, state

    def differentiated(self, scalar: Array) -> None:
        tape, worker = scalar.tape, WORKER.get()
        if worker is None or tape is None or not tape.varied_scalars or not scalar.state or not scalar.state.varying:
            return
        for node in repeated_terms(scalar.node, tape.varied_scalars):
            axes, (term,) = node.args[1].axes, node.parents
            count = worker.group(axes).size
            name = "" if term.prim is None else term.prim.name.removeprefix("np.")
            if count > 1 and not is_share(name, term.args, count):
                warn_of_term("spmd.grad", axes, count, worker)
                return

    def gives(self, scalar: Array, gradients: list) -> None:
        if WORKER.get() is not None and scalar.state and scalar.state.varying:
            remember_sums(gradients, scalar.state.varying)

    def differentiates(self, leaves: list) -> None:
        worker = WORKER.get()
        if worker is None or not worker.tracked or not worker.mesh.checks:
            return
        source = None
        for k, x in enumerate(leaves):
            value, state = (x.value, x.state) if type(x) is Array else (x, worker.state())
            if state is None or not isinstance(value, _NUMERIC) and not is_slot(value):
                continue
            axes = tuple([n for n in worker.mesh.axes if n not in state.varying])
            if axes and np.size(value):  # what is Rooted has no entries elsewhere
                source = source or source_of(sys._getframe(1))
                _verify(worker, value, axes, "a gradient in a body", f"the differentiated leaf {k}", source)

    def bring(self, g, have, state):
        if type(g) is not Array or g.state is state or state is None:
            return g
        if g.state is None:
            raise outside("a cotangent", g)
        missing = state.varying - g.state.varying
        if missing:
            g = vary(g, state_of(g.state.varying | missing))
        extra = tuple(n for n in here("a cotangent").mesh.axes if n in g.state.varying - state.varying)
        if extra:
            g = move(Vary(extra).H, g)
        return g

    def kept(self, g):
        return read_only(copied(g)) if WORKER.get() is not None and writable(g) else g


_NUMERIC = (np.ndarray, np.generic, float, complex)


def verify(value: Any, axes: tuple[str, ...], where: str, argument: str = "x") -> None:
    """Raise where bare data that counts as Invariant differs between the workers along these axes. None: no data."""
    worker = here(where)
    if value is not None and worker.tracked:
        _verify(worker, value, axes, where, argument, source_of(sys._getframe(1)))


def verify_one_value(x: Any, axes: tuple[str, ...], where: str, argument: str = "x") -> None:
    """The same of an array of a body of any library, or a number, which is Invariant along these axes."""
    other = frontend(x)
    value = value_of(x) if other is None else other.data(x)
    if isinstance(value, _NUMERIC) or is_slot(value):
        verify(value, axes, where, argument)


def _verify(worker: Worker, value: Any, axes: tuple[str, ...], where: str, argument: str, source: Source) -> None:
    excluded = getattr(worker.comm, "axes", ())  # those of spmd.at_root, along which nobody else takes part
    if excluded:
        axes = tuple(n for n in axes if n not in excluded)
    if worker.program is None:
        verify_replicas(worker, axes, value, where, argument, source)
    else:
        worker.program.call(_Verification(axes, where, argument, source), (value,), effect=True)


@dataclass(frozen=True)
class _Verification:
    """The comparison of a value with those of other workers, as a step of recorded programs."""

    axes: tuple[str, ...]
    where: str
    argument: str
    source: Source

    __name__: ClassVar[str] = "verify"

    def __call__(self, value: Any) -> None:
        worker = here(self.where)
        verify_replicas(worker, self.axes, value, self.where, self.argument, self.source)


@api_boundary
def varying(a: Any, axis_name: str | Sequence[str]) -> Any:
    """Declare that bare data differs from worker to worker along an axis: made from `worker_index`, read from a file.

    a: a bare array, a number, or an array of the body (which is varied). Gives an array that varies over the axis.
    Raises StateError for a tree of arrays.

        >>> def body():
        ...     return spmd.varying(np.arange(2) + 10 * spmd.worker_index("x"), "x")
        >>> with spmd.Mesh(x=2):
        ...     spmd.map(body, (), P("x"))()
        PartitionedArray([ 0,  1, 10, 11], dtype=int64, spec=P('x'))
    """
    worker = here("spmd.varying")
    state = state_of(worker.mesh.names(axis_name, "spmd.varying"))
    if _is_tree(a):
        raise StateError.at(
            "spmd.varying",
            argument="a",
            got=f"{describe(a)}, a tree",
            need="one array, or bare data of this worker",
            mend=f"spmd.pvary(tree, {axis_name!r}) for what all workers have; spmd.tree.map(f, tree) for each leaf",
        )
    if type(a) is Array:
        if a.state is None:
            raise outside("spmd.varying", a)
        return vary(a, a.state | state)
    other = frontend(a)
    if worker.replicas.distributed:  # only processes compare what their bodies close over
        worker.replicas.declare(*((a, None) if other is None else (other.data(a), other.owner(a))))
    if other is not None:
        return other.declare(a, tuple(n for n in worker.mesh.axes if n in state.varying), worker)
    bare = a if on_device(a) or is_slot(a) else np.asarray(admit(a, "spmd.varying", "a"))
    return worker.carrying(owned_block(bare, Vary(())), state)


def _is_tree(a: Any) -> bool:
    """Whether it is a tree of arrays; a list of numbers is data."""
    if isinstance(a, list | tuple):
        return any(isinstance(x, dict) for x in a) or any(type(x) is Array for x in tree.leaves(a))
    return isinstance(a, dict)


@api_boundary
def block(x: Any) -> np.ndarray:
    """The bare read-only data of an undifferentiated array of a body: to print it, or to use any library on it.

    On a mesh of a GPU it is an array of CuPy, which no flag protects: it is not to be written to.

    Raises StateError for a differentiated one: what is computed from bare data has no gradient.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda x: len(np.unique(spmd.block(spmd.psum(x, "x")))), P("x"), None)
        ...     f(np.array([1.0, 2.0, 1.0, 0.0]))
        1
    """
    other = frontend(x)
    if other is not None:
        return other.bare(x)
    if type(x) is not Array:
        data = x if on_device(x) else np.asarray(admit(x, "spmd.block"))
    elif x.tape is not None:
        raise StateError.at(
            "spmd.block",
            argument="x",
            got=describe(x),
            need="an undifferentiated array",
            mend="spmd.block(spmd.stop_gradient(x)) if the gradient may end here",
        )
    else:
        data = x.value if on_device(x.value) else np.asarray(x.value)
    view = data.view()
    if on_device(view):
        return view
    view.flags.writeable = False
    return view


tracer.use_mixing(Join())
