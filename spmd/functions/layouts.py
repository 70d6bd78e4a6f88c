"""The layouts of the arrays that a layer takes: of global arrays, and of blocks that specs describe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.autodiff.dtypes import kind_of_dtype
from spmd.errors import LayoutError, SpecError, StateError, describe
from spmd.frontends import frontend
from spmd.functions.arguments import as_array
from spmd.global_ops.call import global_value, names_of
from spmd.grid import Grid, layout_of_shapes
from spmd.layout import Layout, P, Spec
from spmd.mesh import Worker, here
from spmd.operators.halo_arguments import balanced
from spmd.transport.call import Call

__all__ = [
    "array_operand",
    "as_operand",
    "check_dtypes",
    "check_spec",
    "check_split",
    "checked_target",
    "dtype_of",
    "floating_array",
    "floating_operand",
    "layout_of_operand",
    "learnt_grid",
    "learnt_layout",
    "lie_on_grid",
    "spec_of_names",
]


def dtype_of(x: Any) -> np.dtype:
    """The NumPy dtype of an array of any library."""
    other = frontend(x)
    return np.dtype(x.dtype) if other is None else other.dtype(x)


def as_operand(where: str, argument: str, x: Any, kinds: str, need: str, mend: str) -> Any:
    """x, if it is an array whose dtype is of one of these kinds: of any library, or a global one. See `as_array`."""
    value = global_value(x)
    if value is None and frontend(x) is None:
        return as_array(where, argument, x, kinds, need, mend)
    if kind_of_dtype(dtype_of(x) if value is None else value.dtype) not in kinds:
        mend = mend if value is not None else mend.replace(".astype(float)", ".double()")
        raise SpecError.at(where, argument=argument, got=describe(x), need=need, mend=mend)
    return x


def array_operand(where: str, argument: str, x: Any, kinds: str, need: str, mend: str) -> Any:
    """x, if it is an array of NumPy or CuPy, or a global one, whose dtype is of one of these kinds. See `as_array`."""
    return (as_array if global_value(x) is None else as_operand)(where, argument, x, kinds, need, mend)


def floating_array(where: str, argument: str, x: Any) -> Any:
    """x, if it is an array of real floating-point numbers: of NumPy or CuPy, or a global one."""
    return array_operand(where, argument, x, "f", "real floating-point numbers", f"{argument}.astype(float)")


def floating_operand(where: str, argument: str, x: Any) -> Any:
    """x, if it is an array of real floating-point numbers: of any library, or a global one."""
    return as_operand(where, argument, x, "f", "real floating-point numbers", f"{argument}.astype(float)")


def check_dtypes(where: str, x: Any, **others: Any) -> None:
    """Raise unless these arrays of a library other than NumPy are of the dtype of x: it does not promote operands."""
    for argument, other in others.items():
        if other is not None and frontend(other) is not None and dtype_of(other) != dtype_of(x):
            got, need = describe(other), f"the dtype of x, {dtype_of(x)}"
            raise SpecError.at(where, argument=argument, got=got, need=need, mend=f"{argument}.to(x.dtype)")


def layout_of_operand(where: str, argument: str, x: Any, spec: Spec | None, shape: Any = None) -> Layout:
    """The layout of the whole array that an operand of a layer is a block of; outside of bodies that of a global array.

    spec: of the block; None: the block is the whole, the same on all workers. shape: of the whole array, if its blocks
    are balanced; None in it: the length of the block in a dimension that is not split. Where a spec splits the array
    and there is no shape, or None for a dimension that is split, the workers along its axes exchange the lengths of
    their blocks: all of them call it.
    """
    value = global_value(x)
    if value is not None:
        if spec is not None:
            raise SpecError.at(
                where,
                argument=argument,
                got=f"{spec} for {describe(x)}",
                need="no spec: a global array has its layout",
                mend=f"leave {argument} out, or spmd.reshard(x, spec) first",
            )
        return value.layout.reduced
    worker = here(where)
    if isinstance(spec, Layout):
        return _checked(where, argument, x, spec, worker)
    if isinstance(spec, Grid):
        return learnt_grid(where, argument, x, spec, worker)
    spec = P() if spec is None else spec
    if not isinstance(spec, P):
        mend = f'{argument}=P("x"), or a Layout or a Grid on some of the workers'
        raise SpecError.at(where, argument=argument, got=describe(spec), need="a spec or a Layout", mend=mend)
    check_spec(where, argument, x, spec, worker)
    if not spec.axes:
        return worker.mesh.layout(tuple(x.shape), spec)
    shape = _lengths(x, spec, shape)
    if shape is not None:
        return _balanced(where, x, spec, shape, worker)
    return learnt_layout(where, x, spec, worker)


def _lengths(x: Any, spec: P, shape: Any) -> Any:
    """The shape of the whole, with the lengths of the block in place of None; None if they are to be learnt."""
    if not isinstance(shape, Sequence) or None not in shape or len(shape) != x.ndim:
        return shape
    names = names_of(spec, x.ndim)
    lengths = [n if m is None and not each else m for m, n, each in zip(shape, x.shape, names, strict=True)]
    return None if None in lengths else lengths


def check_spec(where: str, argument: str, x: Any, spec: P, worker: Worker) -> None:
    """Raise where the spec of a block does not fit the mesh or the array; or where it splits, over workers that have
    one value, an array that says so."""
    spec.check(worker.mesh.axes, where, argument, x.ndim)
    check_split(where, argument, x, spec, worker)


def check_split(where: str, argument: str, x: Any, spec: Spec | None, worker: Worker) -> None:
    """Raise where a spec splits an array over workers that have one value of it, as its state says."""
    state = getattr(x, "state", None)
    if not isinstance(spec, P) or state is None or spec.varying <= state.varying:  # bare data says nothing
        return
    same = next((n for n in spec.axes if n not in state.varying and worker.mesh.axes[n] > 1), None)
    if same is not None:
        raise StateError.at(
            where,
            argument=argument,
            got=f"{spec} for {describe(x)}, which is the same on all workers along {same!r}",
            need="the layout of an array of which each worker has a block",
            mend=f"leave {same!r} out of {argument}; or split the array in in_specs; of equal blocks "
            f"spmd.pvary(x, {same!r})",
        )


def _checked(where: str, argument: str, x: Any, layout: Layout, worker: Worker) -> Layout:
    """A layout that was given, checked against the mesh and this worker's block."""
    layout.check(worker.mesh.axes, where, argument, x.ndim)
    need = layout.block_shape(worker.index)
    if tuple(x.shape) != need:
        raise LayoutError.at(
            where,
            argument=argument,
            got=f"{layout} for a block of shape {list(x.shape)} on {layout.describe(worker.index)}",
            need=f"a block of shape {list(need)} there",
            mend="a layout of the whole array; workers that hold nothing pass a block of length 0 in each dimension",
        )
    return layout


def _balanced(where: str, x: Any, spec: P, shape: Any, worker: Worker) -> Layout:
    plain = isinstance(shape, Sequence) and all(type(n) is int for n in shape)
    cuts = (
        _cuts(where, spec, tuple(shape), worker.mesh.sides) if plain else balanced(where, spec, shape, worker.mesh.axes)
    )
    if len(cuts) == x.ndim:
        layout = worker.mesh.layout(tuple(map(sum, cuts)), spec)
        if tuple(x.shape) == layout.block_shape(worker.index):
            return layout
        need = f"shape {list(layout.block_shape(worker.index))}, that of this worker's block of {list(shape)}"
    else:
        need = f"{len(cuts)} dimensions, as {shape} has"
    mend = "leave shape out: the workers then exchange the lengths of their blocks"
    raise LayoutError.at(where, argument="x", got=describe(x), need=need, mend=mend)


@lru_cache(maxsize=1024)
def _cuts(where: str, spec: P, shape: tuple[int, ...], sides: tuple[tuple[str, int], ...]) -> list[tuple[int, ...]]:
    return balanced(where, spec, shape, dict(sides))


def learnt_layout(where: str, x: Any, spec: P, worker: Worker) -> Layout:
    """The layout that the shapes of all blocks give. Collective along the axes of the spec; no data moves."""
    axes, mesh = tuple(n for n in worker.mesh.axes if n in spec.varying), worker.mesh
    shapes = _shapes(where, x, axes, spec, worker)
    places = (tuple(mesh.coordinates(w)[n] for n in axes) for w in worker.group(axes).members)
    shape_at = {place: tuple(s) for place, s in zip(places, shapes, strict=True)}
    coordinates = map(mesh.coordinates, range(mesh.size))
    return mesh.joined(tuple(shape_at[tuple(at[n] for n in axes)] for at in coordinates), spec, where)


def learnt_grid(where: str, argument: str, x: Any, grid: Grid, worker: Worker) -> Layout:
    """The layout on a grid of all workers that the shapes of all blocks give. Collective; no data moves."""
    axes = tuple(worker.mesh.axes)
    if grid.axes not in (None, axes):
        need = f"a grid of all workers, over the axes {axes}"
        raise LayoutError.at(where, argument=argument, got=str(grid), need=need, mend="leave axes= out")
    shapes = _shapes(where, x, axes, grid, worker)
    return layout_of_shapes(where, shapes, grid, tuple(worker.mesh.axes.items()))


def _shapes(where: str, x: Any, axes: tuple[str, ...], spec: P | Grid, worker: Worker) -> tuple[tuple[int, ...], ...]:
    """The shapes of the blocks of all workers along some axes."""
    group = worker.group(axes)
    if group.size == 1:
        return (tuple(x.shape),)
    assumed = getattr(worker.comm, "assumed_shapes", None)  # of a worker that compiles
    if assumed is not None:
        return assumed(spec, tuple(x.shape), group)
    same_shape = None if isinstance(spec, Grid) else False
    call = Call(where.removeprefix("spmd."), axes, dtype_of(x), tuple(x.shape), detail=str(spec), same_shape=same_shape)
    return tuple(tuple(s) for s in worker.comm.shapes(group, call).wait())


def lie_on_grid(*layouts: Spec | Grid | None) -> bool:
    """Whether one of some layouts lies on a grid of workers: not by a spec."""
    return any(isinstance(each, Grid) or (isinstance(each, Layout) and each.spec is None) for each in layouts)


def spec_of_names(names: Sequence[Sequence[str]]) -> P:
    """The spec by which these axes split each dimension."""
    return P(*(tuple(each) or None for each in names))


def checked_target(
    where: str, argument: str, spec: Spec | None, shape: Sequence[int], natural: Layout, axes: dict[str, int]
) -> Layout:
    """The layout that the result is to have: the given one, or without one that which it has by itself."""
    if spec is None:
        return natural
    if isinstance(spec, P):
        spec.check(axes, where, argument, len(shape))
        return Layout(shape, spec, axes)
    if isinstance(spec, Grid):
        spec = spec.layout(shape, axes)
    if not isinstance(spec, Layout) or spec.shape != tuple(shape):
        need = f"a spec, a Grid, or a Layout of an array of shape {list(shape)}, that of the result"
        raise LayoutError.at(where, argument=argument, got=describe(spec), need=need, mend=f"leave {argument} out")
    spec.check(axes, where, argument, len(shape))
    return spec
