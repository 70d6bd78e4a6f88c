"""`scan` and `fori_loop`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import tree
from spmd.autodiff.loops.checkpointed import checkpointed
from spmd.autodiff.loops.schedules import Policy, policy_of
from spmd.autodiff.signatures import Carry, Slices, Stacked
from spmd.autodiff.static_array import AnyArray
from spmd.autodiff.tracer import value_of
from spmd.errors import LayoutError, describe
from spmd.frontends import frontend
from spmd.global_ops.resharding import reshard
from spmd.layout import Layout, P
from spmd.loops.recorded import recorded, stacked, unrolled
from spmd.loops.recording import current
from spmd.loops.steps import Step, array_leaf, carry_leaves, check_function, check_leaf, where_of
from spmd.tracebacks import api_boundary

__all__ = ["fori_loop", "scan"]


@overload
def scan(
    f: Callable[[AnyArray, Slices], tuple[Any, Stacked]],
    init: complex,
    xs: Slices = ...,
    length: int | None = ...,
    reverse: bool = ...,
    *,
    checkpoint: int | str | Policy | None = ...,
) -> tuple[AnyArray, Stacked]: ...


@overload
def scan(
    f: Callable[[Carry, Slices], tuple[Carry, Stacked]],
    init: Carry,
    xs: Slices = ...,
    length: int | None = ...,
    reverse: bool = ...,
    *,
    checkpoint: int | str | Policy | None = ...,
) -> tuple[Carry, Stacked]: ...


@overload
def scan(
    f: Callable[..., tuple[Any, Any]],
    init: Any,
    xs: Any = ...,
    length: int | None = ...,
    reverse: bool = ...,
    *,
    checkpoint: int | str | Policy | None = ...,
) -> tuple[Any, Any]: ...


@api_boundary
def scan(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    *,
    checkpoint: int | str | Policy | None = None,
) -> tuple[Any, Any]:
    """Run a step again and again, with a carry: `carry, ys = spmd.scan(f, init, xs)`, as `jax.lax.scan`.

    f: `f(carry, x)` returns `(carry, y)`. init: the first carry. x goes through the slices `xs[0], xs[1], ...`; the ys
    are stacked: entry i of the result is the y of `xs[i]`. All are pytrees of arrays and numbers. xs and y may be None.

    shape: each leaf of xs has the shape (n, ...), of ys the shape (n, ...). The carry keeps the structure, and each
    leaf its shape, dtype, and state (in a body) or layout (a global array); Python numbers take the dtype of the arrays
    that they meet. length: n, where there are no xs. reverse: from the last slice to the first.

    checkpoint: which carries are kept for the backward sweep; the steps between are run again. None: every value that a
    derivative needs. An int k: at most k carries, by the binomial schedule of Griewank & Walther (2000), which runs the
    fewest steps. "sqrt": about the square root of n. A policy: `policy(n)` is an int.

    In bodies, outside on global arrays, and on bare arrays. Without spmd.jit it is a Python loop with the same
    numbers. Under spmd.jit a step is recorded once, forward and back: f must not depend on anything that changes from
    step to step besides carry and x. Second derivatives that are recorded inside one program are recorded step by step.

    Adjoint: the same loop backwards, with the adjoint of the step. Raises LayoutError where a step changes the carry,
    or where the lengths of xs differ.

        >>> import numpy as np, spmd
        >>> total, partial = spmd.scan(lambda s, x: (s + x, s + x), 0.0, np.arange(1.0, 4.0))
        >>> float(total), partial.tolist()
        (6.0, [1.0, 3.0, 6.0])
    """
    where = where_of("scan", f)
    check_function(where, f, "f")
    paths, leaves, structure = tree.flatten_with_path(init)
    x_paths, x_leaves, x_structure = tree.flatten_with_path(xs)
    slices = [_whole_first(_array(where, x, f"xs{path}")) for x, path in zip(x_leaves, x_paths, strict=True)]
    n = _length(where, slices, x_paths, length)
    policy = policy_of(where, checkpoint)
    carry = carry_leaves(where, leaves, paths, "init")
    step = Step(where, f, structure, x_structure)
    carry, ys = _run(step, carry, slices, n, bool(reverse), policy)
    return tree.unflatten(structure, carry), tree.unflatten(step.y, ys)


@overload
def fori_loop(
    lower: int,
    upper: int,
    body_fun: Callable[[Any, AnyArray], Any],
    init_val: complex,
    *,
    checkpoint: int | str | Policy | None = ...,
) -> AnyArray: ...


@overload
def fori_loop(
    lower: int,
    upper: int,
    body_fun: Callable[[Any, Carry], Carry],
    init_val: Carry,
    *,
    checkpoint: int | str | Policy | None = ...,
) -> Carry: ...


@api_boundary
def fori_loop(lower: int, upper: int, body_fun: Callable[..., Any], init_val: Any, *, checkpoint: Any = None) -> Any:
    """`for i in range(lower, upper): val = body_fun(i, val)`, as `jax.lax.fori_loop`.

    body_fun: `body_fun(i, val)` returns the next val; i is an integer array without dimensions. lower, upper: integers.
    init_val: a pytree of arrays and numbers, which keep shape, dtype, and state or layout. checkpoint: see `spmd.scan`,
    of which this is a case. Adjoint: the loop backwards. Raises LayoutError where body_fun changes the carry.

        >>> import numpy as np, spmd
        >>> float(spmd.fori_loop(0, 4, lambda i, u: u + i, 0.0))
        6.0
    """
    where = where_of("fori_loop", body_fun)
    check_function(where, body_fun, "body_fun")
    bounds = [_integer(where, name, x) for name, x in (("lower", lower), ("upper", upper))]
    paths, leaves, structure = tree.flatten_with_path(init_val)
    carry = carry_leaves(where, leaves, paths, "init_val")

    def f(val: Any, i: Any) -> tuple[Any, None]:
        return body_fun(i, val), None

    numbers = _array(where, np.arange(*bounds), "lower")
    step = Step(where, f, structure, tree.structure(0))
    carry, _ = _run(step, carry, [numbers], len(numbers), False, policy_of(where, checkpoint))
    return tree.unflatten(structure, carry)


def _integer(where: str, name: str, x: Any) -> int:
    try:
        if not isinstance(x, bool):
            return operator.index(x)
    except TypeError:
        pass
    raise LayoutError.at(
        where,
        argument=name,
        got=describe(x),
        need="an integer: the number of steps is part of the program",
        mend="int(n) of a number; spmd.while_loop where the number of steps depends on values",
    )


def _array(where: str, x: Any, argument: str) -> Any:
    """A leaf of xs as an array, with its state in a body that tracks states."""
    check_leaf(where, x, argument)
    return array_leaf(x if hasattr(x, "shape") else np.asarray(x))


def _whole_first(x: Any) -> Any:
    """A global array whose first dimension, the steps, is whole on each worker; anything else unchanged."""
    bare = value_of(x)
    if type(bare) is not PartitionedArray or not bare.ndim or len(bare.layout.cuts[0]) == 1:
        return x
    layout, spec = bare.layout, bare.layout.spec
    if spec is None:
        return reshard(x, P())
    whole = P(None, *(names or None for names in spec.dims[1:]), unreduced=spec.unreduced)
    return reshard(x, Layout(layout.shape, whole, layout.axes, (None, *layout.cuts[1:]), copies=layout.copies))


def _length(where: str, slices: Sequence[Any], paths: Sequence[str], length: int | None) -> int:
    """The number of steps."""
    n = None if length is None else _integer(where, "length", length)
    source = "length"
    for x, path in zip(slices, paths, strict=True):
        if not len(x.shape):
            raise LayoutError.at(
                where,
                argument=f"xs{path}",
                got=describe(x),
                need="an array whose first dimension counts the steps",
                mend="np.array(x) of a list of numbers, which is a tree; close over what is the same in all steps",
            )
        if n is None:
            n, source = x.shape[0], f"xs{path}"
        elif x.shape[0] != n:
            raise LayoutError.at(
                where,
                argument=f"xs{path}",
                got=f"{x.shape[0]} steps",
                need=f"{n}, as {source} says",
                mend="arrays of one length along the first dimension",
            )
    if n is None or n < 0:
        raise LayoutError.at(
            where,
            argument="length",
            got="no xs, and no length" if n is None else str(n),
            need="the number of steps, 0 or more",
            mend="length=n; or arrays xs, one slice for each step",
        )
    return n


def _run(
    step: Step, carry: list[Any], slices: list[Any], n: int, reverse: bool, policy: Policy | None
) -> tuple[list[Any], list[Any]]:
    """The last carry, and the stacked ys."""
    if n == 0:
        return carry, _empty(step, carry, slices)
    order = range(n - 1, -1, -1) if reverse else range(n)
    programs = current()
    if programs is not None:
        found = recorded(programs, step, carry, slices, order, policy)
        if found is not None:
            return found
    if policy is not None:
        return checkpointed(step, carry, slices, order, policy(n), stacked)
    return unrolled(step, carry, slices, order)


def _empty(step: Step, carry: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
    """The ys of a loop without steps: a step on zeros says what they would be."""
    zeros = [_zero_slice(x) for x in slices]
    with np.errstate(all="ignore"):
        _, ys = step(carry, zeros)
    return [stacked([y])[:0] for y in ys]


def _zero_slice(x: Any) -> Any:
    """What a slice of an array without slices would be, of zeros: its sum over no steps, in its dtype."""
    other = frontend(x)
    if other is not None:
        return other.total(x, (0,), other.dtype(x))
    return np.add.reduce(x, axis=0, dtype=x.dtype)
