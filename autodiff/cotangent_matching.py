"""Whether cotangents and tangents have the trees, shapes and dtypes of what they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.autodiff import tracer, tree
from spmd.autodiff.dtypes import float0, kind_of_dtype
from spmd.autodiff.tracer import Array, value_of
from spmd.autodiff.transform_arguments import NUMBERS, admitted, held, is_handle, kind_of, name_of, unstated
from spmd.errors import DifferentiationError, describe


def match_cotangents(cotangent, outs, out_tree, where: str) -> list:
    """The leaves of a cotangent, checked against the results and brought to their states."""
    gs, given = tree.flatten(cotangent)
    if given != out_tree:
        raise DifferentiationError.at(
            f"pullback, {where}",
            argument="cotangent",
            got=f"structure {given}",
            need=f"the structure of the result, {out_tree}",
            mend="pass one cotangent per result",
        )
    matched = []
    for g, o in zip(gs, outs, strict=True):
        if _fits(g, o):
            matched.append(g.value)
            continue
        g = admitted(g, f"pullback, {where}", "cotangent")
        shape = _shape(o)
        if _shape(g) != shape:
            raise DifferentiationError.at(
                f"pullback, {where}",
                argument="cotangent",
                got=describe(g),
                need=f"shape {list(shape)}, that of the result",
                mend="pass np.broadcast_to(g, shape) if one number is meant for all",
            )
        g, o = _handed(g, o, f"pullback, {where}", "cotangent", "result")
        if kind_of(o) != "i":
            g = _fitting(g, o, f"pullback, {where}", "cotangent", "result")
        g = unstated(tracer.mixing.bring(g, None, o.state) if type(o) is Array else g)
        matched.append(tracer.mixing.kept(g) if type(g) is np.ndarray else g)
    return matched


def _fits(g, x) -> bool:
    """Whether a cotangent of x is an array of its shape, dtype and state, which nobody differentiates."""
    return (
        type(g) is type(x) is Array
        and g.tape is None
        and g.state is x.state
        and g.shape == x.shape
        and g.dtype == x.dtype
    )


def _handed(g, x, where: str, argument: str, of: str) -> tuple[Any, Any]:
    """A cotangent or tangent g of x, and x: where x is a handle, the blocks of both."""
    if is_handle(x) and type(g) in NUMBERS:
        return np.full_like(value_of(x.block), g), x.block
    if is_handle(x) != is_handle(g) or (is_handle(x) and not x.is_held_as(g)):
        raise DifferentiationError.at(
            where, argument=argument, got=describe(g), need=f"{describe(x)}, as the {of}", mend=_ONE_KIND
        )
    return held(g), held(x)


_ONE_KIND = "spmd.keep(g, axis_name, root) makes a Rooted value of an array, spmd.replicate the other way round"


def _shape(x) -> tuple[int, ...]:
    return x.shape if is_handle(x) else np.shape(value_of(x))


def _byte_order_alone(dtype: Any, own: Any) -> bool:
    """Whether two dtypes of numbers differ in their byte order only."""
    if dtype is None or own is None or dtype == own or not kind_of_dtype(dtype):
        return False
    return dtype.newbyteorder("=") == own.newbyteorder("=")


def _fitting(g: Any, x, where: str, argument: str, of: str):
    """A cotangent or tangent g of x, checked for its dtype; a Python number takes that of x."""
    own = getattr(x, "dtype", None)
    if type(g) in NUMBERS and not (type(g) is complex and kind_of(x) == "f"):
        return np.full_like(value_of(x), g) if own is not None else np.asarray(g, type(x))
    dtype = getattr(g, "dtype", None)
    if _byte_order_alone(dtype, own):
        array: Any = g
        return array.astype(own)
    if dtype != own and not (own is None and kind_of(g) in ("f", kind_of(x))):
        raise DifferentiationError.at(
            where,
            argument=argument,
            got=describe(g),
            need=f"dtype {own or type(x).__name__}, that of the {of}",
            mend="np.real(g)" if kind_of(g) == "c" else f"g.astype({str(own or type(x).__name__)!r}), a cast",
        )
    return g


def check_sequences(transform: str, fun: Callable, primals, tangents) -> None:
    """Raise where primals or tangents are no sequence of arguments."""
    for argument, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, tuple | list):
            raise DifferentiationError.at(
                f"{transform} of {name_of(fun)}",
                argument=argument,
                got=describe(given),
                need="a tuple or list of arguments, and one of their tangents",
                mend=f"spmd.{transform}(f, (x,), (v,))",
            )


def varying_over(x) -> frozenset[str]:
    """The axes that an array varies over."""
    state = getattr(x, "state", None)
    return frozenset() if state is None else state.varying


def match_tangents(where: str, xs: list, treedef: Any, tangents: Sequence[Any]) -> list:
    """The leaves of tangents, checked against those of the primals.

    A cotangent that varies over more axes than its primal is summed; for a tangent there is no such meaning.
    """
    ts, given = tree.flatten(tuple(tangents))  # type: ignore[arg-type]
    if given != treedef:
        raise DifferentiationError.at(
            where,
            argument="tangents",
            got=f"structure {given}",
            need=f"that of the primals, {treedef}",
            mend="pass one tangent per primal, each of the same structure",
        )
    matched = []
    for x, t in zip(xs, ts, strict=True):
        t = admitted(t, where, "tangents")
        if _shape(t) != _shape(x) or varying_over(t) - varying_over(x):
            raise DifferentiationError.at(
                where,
                argument="tangents",
                got=f"{describe(t)} for a primal that is {describe(x)}",
                need="a tangent of the primal's shape, which varies over no other axes",
                mend="spmd.pvary(primal, axis_name) makes the primal one value per worker",
            )
        given = x
        t, x = _handed(t, x, where, "tangents", "primal")
        if kind_of(x) == "i":
            if getattr(t, "dtype", None) != float0:
                raise DifferentiationError.at(
                    where,
                    argument="tangents",
                    got=f"{describe(t)} for a primal that is {describe(x)}",
                    need="dtype float0: an integer has no derivative",
                    mend="np.zeros(x.shape, spmd.float0), or close over x in place of passing it",
                )
        else:
            t = _fitting(t, x, where, "tangents", "primal")
        matched.append(t if x is given else given.holding(t))
    return matched
