"""Functions that work entry by entry, and are no ufuncs: on the blocks of operands that lie alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.array_functions import joint_layout, part_layout, split_names
from spmd.autodiff.primitive import name_of
from spmd.errors import LayoutError, describe
from spmd.global_ops.call import Arguments, Template, global_value, on_blocks
from spmd.global_ops.registry import implements

__all__ = ["elementwise"]


def elementwise(fun: Callable, args: tuple, kwargs: dict) -> Any:
    """fun(*args, **kwargs), whose arrays are broadcast against each other."""
    where = name_of(fun)
    args = tuple(np.asarray(a) if isinstance(a, list | tuple) else a for a in args)
    kwargs = {k: np.asarray(v) if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
    arguments = Arguments(where, args, kwargs)
    shapes = [np.shape(a) for a in arguments.arrays]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError as error:
        raise LayoutError.at(
            where,
            got=" and ".join(describe(a) for a in arguments.arrays),
            need="shapes that broadcast",
            mend="give them the same shape, or length 1 where one is to be repeated",
        ) from error
    layout = joint_layout([a for a in map(global_value, arguments.arrays) if a is not None], shape)
    if layout.spec is None:
        layout = arguments.mesh.layout(shape, split_names(shape, arguments.mesh, tuple(arguments.mesh.axes)))
    parts = [part_layout(s, layout) for s in shapes]
    specs = [part.spec if part.balanced else part for part in parts]
    out = layout.spec if layout.balanced else layout
    return on_blocks(where, _make, (fun, arguments.template), arguments.arrays, specs, out, arguments.mesh)


def _make(fun: Callable, template: Template) -> Callable:
    def body(*arrays: Any) -> Any:
        args, kwargs = template.filled(arrays)
        return fun(*args, **kwargs)

    return body


def _register(fun: Any) -> None:
    @implements(fun)
    def handler(*args: Any, **kwargs: Any) -> Any:
        return elementwise(fun, args, kwargs)


for _name in "angle around round clip fix i0 imag iscomplex isclose isneginf isposinf isreal real sinc".split():
    _register(getattr(np, _name))


@implements(np.nan_to_num)
def nan_to_num(x: Any, copy: bool = True, **options: Any) -> Any:
    return elementwise(np.nan_to_num, (x,), options)


@implements(np.where)
def where(condition: Any, /, *options: Any) -> Any:
    if not options:
        return np.nonzero(condition)
    return elementwise(np.where, (condition, *options), {})


@implements(np.allclose)
def allclose(a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    return _decided(np.all(np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)))


@implements(np.array_equal)
def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    if np.shape(a1) != np.shape(a2):
        return False
    same = np.equal(a1, a2)
    return _decided(np.all(same | (np.isnan(a1) & np.isnan(a2)) if equal_nan else same))


def _decided(x: Any) -> Any:
    return bool(x) if type(x) is PartitionedArray else x
