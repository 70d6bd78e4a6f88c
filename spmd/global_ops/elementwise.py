"""Functions that work entry by entry, and are no ufuncs: on the blocks of operands that lie alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.array_functions import broadcast_shape, common_mesh, joint_layout, of_parts, part_layout, split_names
from spmd.autodiff.primitive import name_of
from spmd.autodiff.tracer import Array
from spmd.global_ops.call import Arguments
from spmd.global_ops.registry import implements
from spmd.layout_rules import Rule

__all__ = ["elementwise"]


def elementwise(fun: Callable, args: tuple, kwargs: dict) -> Any:
    """fun(*args, **kwargs), whose arrays are broadcast against each other."""
    args = tuple(np.asarray(a) if isinstance(a, list | tuple) else a for a in args)
    kwargs = {k: np.asarray(v) if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
    arguments = Arguments(args, kwargs)
    shape, mesh = broadcast_shape(name_of(fun), arguments.arrays), arguments.mesh
    layout = joint_layout(arguments.globals, shape)
    if layout.spec is None:
        layout = mesh.layout(shape, split_names(shape, mesh, tuple(mesh.axes)))
    *parts, out = (part_layout(s, layout) for s in (*map(np.shape, arguments.arrays), shape))
    if not any(type(x) is Array for x in arguments.arrays):
        common_mesh(name_of(fun), arguments.globals)
        return of_parts(arguments.function(fun), arguments.arrays, parts, out, mesh)
    *specs, out = (part.spec if part.balanced else part for part in (*parts, out))
    return arguments.run(fun, specs, out)


def _register(fun: Any) -> None:
    @implements(fun, rule=Rule.BLOCKWISE)
    def handler(*args: Any, **kwargs: Any) -> Any:
        return elementwise(fun, args, kwargs)


for _name in "angle around round clip fix i0 imag iscomplex isclose isneginf isposinf isreal real sinc".split():
    _register(getattr(np, _name))


@implements(np.nan_to_num, rule=Rule.BLOCKWISE)
def nan_to_num(x: Any, copy: bool = True, **options: Any) -> Any:
    return elementwise(np.nan_to_num, (x,), options)


@implements(np.where, rule=Rule.BLOCKWISE)
def where(condition: Any, /, *options: Any) -> Any:
    if not options:
        return np.nonzero(condition)
    return elementwise(np.where, (condition, *options), {})


@implements(np.allclose, rule=Rule.REDUCED)
def allclose(a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    return _decided(np.all(np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)))


@implements(np.array_equal, rule=Rule.REDUCED)
def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    if np.shape(a1) != np.shape(a2):
        return False
    same = np.equal(a1, a2)
    return _decided(np.all(same | (np.isnan(a1) & np.isnan(a2)) if equal_nan else same))


def _decided(x: Any) -> Any:
    return bool(x) if type(x) is PartitionedArray else x
