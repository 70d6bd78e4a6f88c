"""What the functions ask of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.autodiff.admission import admit
from spmd.autodiff.tracer import Array
from spmd.errors import SpecError, StateError, describe
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.mesh import here
from spmd.operators.reduce import AxisName, varying_of

__all__ = [
    "Parts",
    "alike",
    "along",
    "array",
    "axes_of",
    "axis_of",
    "cast",
    "floating",
    "number",
    "split_over",
    "traced",
]


def array(where: str, argument: str, x: Any, kinds: str, need: str, mend: str) -> Any:
    """x as an array whose dtype is of one of these kinds ("f" stands for bfloat16 and float8 too)."""
    # Only the class is asked: global arrays are declared further down.
    whole = type(x).__name__ == "PartitionedArray"
    if not (on_device(x) or frontend(x) is not None or isinstance(x, bool)):
        x = admit(x, where, argument, error=SpecError, need=need, otherwise=mend)
    dtype = None if frontend(x) is not None else getattr(x, "dtype", None)
    if (
        dtype is None
        or whole
        or not (dtype.kind in kinds or dtype.kind == "V" and "f" in kinds and dtype.name[0] in "bf")
    ):
        raise SpecError.at(
            where,
            argument=argument,
            got=describe(x),
            need="a block, or a bare array" if whole else need,
            mend=f"call it in a body: spmd.map(lambda x: {where}(x, ...), in_specs=..., out_specs=...)"
            if whole
            else mend,
        )
    return x


def floating(where: str, argument: str, x: Any) -> Any:
    """x as an array of real floating-point numbers."""
    return array(where, argument, x, "f", "real floating-point numbers", f"{argument}.astype(float)")


def cast(x: Any, dtype: Any) -> Any:
    """x in a dtype; x itself where it has that, without a copy and without a node on the tape."""
    return x if x.dtype == dtype else x.astype(dtype)


def axis_of(where: str, x: Any, axis: Any) -> int:
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


def axes_of(where: str, x: Any, axis: Any) -> tuple[int, ...]:
    """Some axes of x, counted from the first, in order; of None all."""
    if axis is None:
        return tuple(range(x.ndim))
    axes = tuple(sorted(axis_of(where, x, a) for a in (axis if isinstance(axis, list | tuple) else (axis,))))
    if len(set(axes)) != len(axes):
        mend = "name every axis once"
        raise SpecError.at(where, argument="axis", got=repr(axis), need="different axes", mend=mend)
    return axes


def along(rows: Callable[[Any], Any], x: Any, axis: int, where: str) -> Any:
    """A function of rows, along another axis than the last."""
    axis = axis_of(where, x, axis)
    if axis == x.ndim - 1:
        return rows(x)
    return np.moveaxis(rows(np.moveaxis(x, axis, -1)), -1, axis)


def alike(where: str, argument: str, x: Any, names: tuple[str, ...], need: str) -> None:
    """Raise where x varies over one of these axes of the mesh."""
    parted = [n for n in names if type(x) is Array and x.state is not None and n in x.state.varying]
    if parted:
        raise StateError.at(
            where,
            argument=argument,
            got=f"{describe(x)}, which varies over axis {parted[0]!r}",
            need=need,
            mend=f'spmd.all_gather({argument}, {parted[0]!r}, axis=0, tiled=True, to="invariant")',
        )


def split_over(where: str, x: Any, axis_name: AxisName, argument: str = "axis_name") -> tuple[str, ...]:
    """The axes of the mesh that split a dimension of x. Raises where x does not vary over them.

    Blocks that are the same on all workers are copies, which a sum would count several times, or equal parts of a
    longer whole, and nothing tells which.
    """
    names = here(where).mesh.names(axis_name, where)
    varying = varying_of(x, names)
    if varying != names:
        same = next(n for n in names if n not in varying)
        without = argument if len(names) == 1 else repr(same)
        raise StateError.at(
            where,
            argument=argument,
            got=f"{describe(x)}, which is the same on all workers along {same!r}",
            need="an array whose blocks lie along this axis of the mesh",
            mend=f"leave {without} out, or split the array in in_specs; of equal blocks spmd.pvary(x, {same!r})",
        )
    return names


def number(where: str, argument: str, x: Any, low: float, high: float) -> float:
    """x as a Python number from low to high."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating) or not low <= x <= high:
        need = f"a number from {low} to {high}" if high != np.inf else f"a number, at least {low}"
        raise SpecError.at(where, argument=argument, got=describe(x), need=need, mend=f"{argument}={low}")
    return float(x)


def traced(x: Any) -> bool:
    """Whether a derivative with respect to x may be asked for."""
    while type(x) is Array:
        if x.tape is not None:
            return True
        x = x.value
    return False


class Parts:
    """The results of one computation that several rules ask for, one each: it is made once for a cotangent."""

    __slots__ = ("g", "parts")

    def __init__(self):
        self.g: Any = None
        self.parts: list[Any] = []

    def take(self, g: Any, k: int, make: Callable[[], Any]) -> Any:
        """Part k of make(), for the cotangent g. A part is given once, so that it is not kept."""
        if self.g is not g or self.parts[k] is None:
            self.g, self.parts = g, list(make())
        part, self.parts[k] = self.parts[k], None
        return part
