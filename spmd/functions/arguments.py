"""Checks and conversions of the functions' arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from spmd.autodiff.admission import admit
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import SpecError, StateError, describe
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.mesh import here
from spmd.operators.reduce import AxisName, varying_of

__all__ = [
    "SharedResults",
    "as_array",
    "as_floating",
    "as_number",
    "cast",
    "is_traced",
    "layer",
    "normalized_axes",
    "normalized_axis",
    "require_invariant",
    "require_varying",
]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def as_array(where: str, argument: str, x: Any, kinds: str, need: str, mend: str) -> Any:
    """x as an array whose dtype is of one of these kinds ("f" includes bfloat16 and float8)."""
    value = value_of(x) if type(x) is Array else x
    is_global = type(value).__name__ == "PartitionedArray"  # its module imports more than this one may
    if not (is_global or on_device(x) or frontend(x) is not None or isinstance(x, bool)):
        x = admit(x, where, argument, error=SpecError, need=need, otherwise=mend)
    dtype = None if frontend(x) is not None else getattr(x, "dtype", None)
    if (
        dtype is None
        or is_global
        or not (dtype.kind in kinds or dtype.kind == "V" and "f" in kinds and dtype.name[0] in "bf")
    ):
        raise SpecError.at(
            where,
            argument=argument,
            got=describe(x),
            need="a block, or a bare array" if is_global else need,
            mend=f"call it in a body: spmd.map(lambda x: {where}(x, ...), in_specs=..., out_specs=...)"
            if is_global
            else mend,
        )
    return x


def as_floating(where: str, argument: str, x: Any) -> Any:
    """x as an array of real floating-point numbers."""
    return as_array(where, argument, x, "f", "real floating-point numbers", f"{argument}.astype(float)")


def cast(x: Any, dtype: Any) -> Any:
    """x in a dtype, without a copy or a node on the tape if it has that already."""
    return x if x.dtype == dtype else x.astype(dtype)


def normalized_axis(where: str, x: Any, axis: Any) -> int:
    """An axis of x, counted from the first."""
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool) or not -x.ndim <= axis < x.ndim:
        raise SpecError.at(
            where,
            argument="axis",
            got=f"{axis!r} for {describe(x)}",
            need=f"an axis of the array, {-x.ndim} to {x.ndim - 1}" if x.ndim else "an array with dimensions",
            mend="axis=-1" if x.ndim else "reshape it to (1,)",
        )
    return int(axis) % x.ndim


def normalized_axes(where: str, x: Any, axis: Any) -> tuple[int, ...]:
    """Some axes of x, counted from the first, in order; None: all."""
    if axis is None:
        return tuple(range(x.ndim))
    axes = tuple(sorted(normalized_axis(where, x, a) for a in (axis if isinstance(axis, list | tuple) else (axis,))))
    if len(set(axes)) != len(axes):
        mend = "name every axis once"
        raise SpecError.at(where, argument="axis", got=repr(axis), need="different axes", mend=mend)
    return axes


def require_invariant(where: str, argument: str, x: Any, names: tuple[str, ...], need: str) -> None:
    """Raise where x varies over one of these axes of the mesh."""
    varying = [n for n in names if type(x) is Array and x.state is not None and n in x.state.varying]
    if varying:
        raise StateError.at(
            where,
            argument=argument,
            got=f"{describe(x)}, which varies over axis {varying[0]!r}",
            need=need,
            mend=f'spmd.all_gather({argument}, {varying[0]!r}, axis=0, tiled=True, to="invariant")',
        )


def require_varying(where: str, x: Any, axis_name: AxisName, argument: str = "axis_name") -> tuple[str, ...]:
    """The axes of the mesh that split a dimension of x. Raises if x does not vary over them.

    Equal blocks are ambiguous: copies, which a sum would count several times, or equal parts of a longer array.
    """
    names = here(where).mesh.names(axis_name, where)
    varying = varying_of(x, names)
    if varying != names:
        invariant = next(n for n in names if n not in varying)
        without = argument if len(names) == 1 else repr(invariant)
        raise StateError.at(
            where,
            argument=argument,
            got=f"{describe(x)}, which is the same on all workers along {invariant!r}",
            need="an array whose blocks lie along this axis of the mesh",
            mend=f"leave {without} out, or split the array in in_specs; spmd.varying(x, {invariant!r}) of data that a "
            f"worker made, spmd.pvary(x, {invariant!r}) of equal blocks",
        )
    return names


def as_number(where: str, argument: str, x: Any, low: float, high: float) -> float:
    """x as a Python number from low to high."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating) or not low <= x <= high:
        need = f"a number from {low} to {high}" if high != np.inf else f"a number, at least {low}"
        raise SpecError.at(where, argument=argument, got=describe(x), need=need, mend=f"{argument}={low}")
    return float(x)


def layer(fun: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A layer: on arrays of other libraries it computes in the dtypes that these have for it, as under autocast."""

    @wraps(fun)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        other = frontend(args[0] if args else next(iter(kwargs.values()), None))
        return fun(*args, **kwargs) if other is None else other.run_layer(fun, args, kwargs)

    return run


def is_traced(x: Any) -> bool:
    """Whether x is on a tape."""
    while type(x) is Array:
        if x.tape is not None:
            return True
        x = x.value
    return False


class SharedResults:
    """The results of one computation for several rules: they are computed once per cotangent."""

    __slots__ = ("cotangent", "results")

    def __init__(self):
        self.cotangent: Any = None
        self.results: list[Any] = []

    def take(self, g: Any, index: int, compute: Callable[[], Any]) -> Any:
        """One result of compute(), for the cotangent g. It is released here: each rule takes its result once."""
        if self.cotangent is not g or self.results[index] is None:
            self.cotangent, self.results = g, list(compute())
        result, self.results[index] = self.results[index], None
        return result
