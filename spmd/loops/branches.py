"""`cond` and `while_loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack, overload

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.checkpoint import closure_nodes, traced_by
from spmd.autodiff.signatures import Carry, Primals, Result
from spmd.autodiff.staging.recorder import slot_of
from spmd.autodiff.static_array import AnyArray
from spmd.autodiff.tape import ACTIVE, Tape, redirected
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import kind_of
from spmd.errors import DifferentiationError, LayoutError, StateError, describe, one_or_all
from spmd.frontends import frontend
from spmd.loops.recorded_branches import closed_over, recorded_cond, recorded_while
from spmd.loops.recording import current, is_recorded
from spmd.loops.steps import Step, array_leaf, carry_leaves, check_function, state_of_leaf, where_of
from spmd.mesh import WORKER, Worker
from spmd.operators.apply import splice_apart
from spmd.operators.partial_comm import refusing_along
from spmd.operators.varying import vary
from spmd.state import State, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.call import Call

__all__ = ["cond", "while_loop"]


@api_boundary
def cond(
    pred: Any,
    true_fun: Callable[[Unpack[Primals]], Result],
    false_fun: Callable[[Unpack[Primals]], Result],
    *operands: *Primals,
) -> Result:
    """`true_fun(*operands)` where pred is true, else `false_fun(*operands)`, as `jax.lax.cond`.

    pred: a boolean without dimensions: a number, an array of a body, or a global array. operands: pytrees of arrays.
    Both functions return trees of one structure, of arrays that agree in shape and dtype. One of them runs.

    In a body pred may be Varying: workers then go different ways. The operands are varied along its axes first, so that
    their cotangents meet on all workers; what a function that was not run would have given counts as zero. The results
    vary along the axes of pred and of all operands. Within the functions there are no collectives along the axes of
    pred, because not all workers would take part, and no differentiated arrays that are not among the operands.

    Under spmd.jit both functions are recorded, and each call runs one. Adjoint: that of the function that ran.
    Raises LayoutError where pred is no boolean, or where the results of the two differ in form (under spmd.jit),
    StateError for a collective that not all workers reach, ClosureError for arrays that must be operands.

        >>> import numpy as np, spmd
        >>> spmd.cond(np.True_, lambda x: 2 * x, lambda x: x, np.arange(3.0)).tolist()
        [0.0, 2.0, 4.0]
    """
    where = where_of("cond", true_fun)
    check_function(where, true_fun, "true_fun")
    check_function(where, false_fun, "false_fun")
    state = _checked_pred(where, "pred", pred) or state_of(())
    leaves, structure = tree.flatten(operands)
    worker = WORKER.get()
    varying = bool(state.varying)
    if varying:
        leaves = [array_leaf(x) for x in leaves]
        for x in leaves:
            state = state | (state_of_leaf(x) or state_of(()))
        leaves = [_varied(x, state, worker) for x in leaves]

    def branch(f: Callable) -> Callable[[list[Any]], tuple[list[Any], Any]]:
        def flat(values: list[Any]) -> tuple[list[Any], Any]:
            with _apart(worker, pred) if varying else nullcontext():
                outs, out_structure = tree.flatten(f(*tree.unflatten(structure, values)))
            return [_varied(array_leaf(x), state, worker) for x in outs] if varying else outs, out_structure

        return flat

    both = branch(true_fun), branch(false_fun)
    recording = current()
    if recording is not None and (varying or is_recorded(pred)):
        outs, out_structure = recorded_cond(recording, where, pred, both, leaves, varying)
        return tree.unflatten(out_structure, outs)
    taken = both[0] if _truth(pred) else both[1]
    if not varying:
        outs, out_structure = taken(leaves)
        return tree.unflatten(out_structure, outs)
    outs, out_structure = _run_apart(where, taken, leaves)
    return tree.unflatten(out_structure, [_tied(x, leaves) for x in outs])


@overload
def while_loop(
    cond_fun: Callable[[AnyArray], Any], body_fun: Callable[[AnyArray], Any], init_val: complex
) -> AnyArray: ...


@overload
def while_loop(cond_fun: Callable[[Carry], Any], body_fun: Callable[[Carry], Carry], init_val: Carry) -> Carry: ...


@api_boundary
def while_loop(cond_fun: Callable[..., Any], body_fun: Callable[..., Any], init_val: Any) -> Any:
    """`while cond_fun(val): val = body_fun(val)`, as `jax.lax.while_loop`.

    init_val: a pytree of arrays and numbers, which keep structure, shape, dtype, and state or layout.
    cond_fun: `cond_fun(val)` is a boolean without dimensions; in a body an Invariant one, so that all workers stop at
    once: reduce what decides (`spmd.pmax`). Under spmd.jit both functions are recorded once.

    It has no reverse derivative, because the number of steps is not known before: use `spmd.fori_loop`, or
    `spmd.stop_gradient` of what goes in. Raises DifferentiationError for differentiated arrays, LayoutError where
    body_fun changes the form of val, StateError where cond_fun varies.

        >>> import spmd
        >>> float(spmd.while_loop(lambda x: x < 100.0, lambda x: 2 * x, 1.0))
        128.0
    """
    where = where_of("while_loop", body_fun)
    check_function(where, cond_fun, "cond_fun")
    check_function(where, body_fun, "body_fun")
    paths, leaves, structure = tree.flatten_with_path(init_val)
    carry = carry_leaves(where, leaves, paths, "init_val")
    for x, path in zip(carry, paths, strict=True):
        _refuse_traced(where, x, f"init_val{path}")

    def condition(values: list[Any]) -> Any:
        pred = cond_fun(tree.unflatten(structure, values))
        state = _checked_pred(where, "the result of cond_fun", pred)
        if state is not None and state.varying:
            raise StateError.at(
                where,
                argument="the result of cond_fun",
                got=describe(pred),
                need="an Invariant boolean: all workers run the same steps",
                mend=f"spmd.pmax(x, {one_or_all(sorted(state.varying))}) of what decides",
            )
        return pred

    once = Step(where, lambda val, _: (body_fun(val), None), structure, tree.structure(None))

    def step(values: list[Any]) -> list[Any]:
        found, _ = once(values, [])
        for x, path in zip(found, paths, strict=True):
            _refuse_traced(where, x, f"the result of body_fun{path}")
        return found

    recording = current()
    if recording is not None:
        return tree.unflatten(structure, recorded_while(recording, where, condition, step, carry))
    while _truth(condition(carry)):
        carry = step(carry)
    return tree.unflatten(structure, carry)


def _refuse_traced(where: str, x: Any, argument: str) -> None:
    known = frontend(x)
    if next(traced_by([x]), None) is not None or (known is not None and getattr(x, "requires_grad", False)):
        raise DifferentiationError.at(
            where,
            argument=argument,
            got=describe(x),
            need="an undifferentiated array: the loop has no reverse derivative",
            mend="spmd.fori_loop or spmd.scan, with a number of steps that is known; or spmd.stop_gradient(x)",
        )


def _checked_pred(where: str, argument: str, pred: Any) -> State | None:
    """The state of a condition in a body; None outside, and for bare data. Raises unless it is one boolean."""
    bare = slot_of(value_of(pred))
    if not isinstance(bare, bool) and not (hasattr(bare, "dtype") and np.shape(bare) == () and _is_bool(bare)):
        raise LayoutError.at(
            where,
            argument=argument,
            got=describe(pred),
            need="one boolean: True, or an array of booleans without dimensions",
            mend="compare, x > 0; of an array np.any(x) or np.all(x)",
        )
    return state_of_leaf(pred)


def _is_bool(x: Any) -> bool:
    known = frontend(x)
    return (known.dtype(x) if known is not None else x.dtype) == np.dtype(bool)


def _truth(pred: Any) -> bool:
    """The value of a condition on this worker."""
    bare = value_of(pred)
    known = frontend(bare)
    return bool(known.bare(bare) if known is not None else bare)


def _varied(x: Any, state: State, worker: Worker | None) -> Any:
    """An array of a body in a state."""
    known = frontend(x)
    if known is not None:
        names = sorted(state.varying - known.state(x).varying)
        return known.vary(x, names, worker) if names else x
    return vary(x, state | x.state) if type(x) is Array else x


def _apart(worker: Worker | None, pred: Any) -> AbstractContextManager[None]:
    """Within the block collectives along the axes of pred raise: not all workers are here."""
    assert worker is not None
    names = sorted((state_of_leaf(pred) or state_of(())).varying)

    def refused(axis: str, call: Call) -> StateError:
        return StateError.at(
            "spmd.cond",
            got=f"{call} {call.source}, within a function that some workers along {axis!r} do not run: pred differs",
            need="no collective along the axes of pred",
            mend=f"call it before spmd.cond; or make pred Invariant, spmd.pmax(pred, {one_or_all(names)})",
        )

    return refusing_along(worker, tuple(names), refused)


def _run_apart(where: str, taken: Callable, leaves: list[Any]) -> tuple[list[Any], Any]:
    """Run a function that some workers do not run, and check that it differentiates its operands only."""
    tapes = ACTIVE.get()
    pairs = [(tape, Tape(tape.once)) for tape in tapes]
    with redirected(pairs):
        outs, structure = taken(leaves)
    given = {id(x.node) for leaf in leaves for x in _levels(leaf)}
    for tape, side in pairs:
        others = [node for node in closure_nodes(tape, side, outs) if id(node) not in given]
        if others:
            raise closed_over(where, len(others))
        splice_apart(tape, side)
    return outs, structure


def _levels(x: Any) -> Iterator[Array]:
    while type(x) is Array:
        if x.tape is not None:
            yield x
        x = x.value


def _tied(x: Any, leaves: Sequence[Any]) -> Any:
    """A result whose cotangent reaches all operands, on workers that ran the other function too."""
    known = frontend(x)
    if known is not None:
        return known.tied(x, [y for y in leaves if frontend(y) is known])
    if kind_of(x) not in ("f", "c"):
        return x
    for y in leaves:
        if type(y) is Array and y.tape is not None:
            x = x + np.zeros((), x.dtype) * np.real(y.reshape(-1)[:0].sum()).astype(x.dtype)
    return x
