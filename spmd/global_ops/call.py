"""How a function of global arrays is run: as a body on the blocks, with specs that follow from the layouts of operands.

So states, adjoints, checks and transports are those of `spmd.map`. With traced operands it is recorded as one map.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray, check_usable
from spmd.array_functions import split_names
from spmd.autodiff import tree
from spmd.autodiff.primitive import name_of
from spmd.autodiff.staging.recorder import is_slot
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import LayoutError, describe
from spmd.kernels import on_device
from spmd.layout import Layout, P, Spec
from spmd.mapping import Mapped
from spmd.mesh import Mesh
from spmd.operators.memo import bounded
from spmd.operators.splitting import normal_axis
from spmd.settings import gather_limit

__all__ = [
    "Arguments",
    "as_spec",
    "check_gathered",
    "dims_of",
    "global_of",
    "global_value",
    "is_array",
    "layout_by",
    "names_of",
    "on_blocks",
    "spec_of",
]

_maps: dict[Hashable, Mapped] = {}
_HERE = object()
"""Stands for an array among the arguments."""


def global_of(x: Any) -> PartitionedArray:
    """The global array that x is, or that it traces: it does one of them."""
    value = global_value(x)
    assert value is not None
    return value


def global_value(x: Any) -> PartitionedArray | None:
    """The global array that x is, or that it traces; None for anything else."""
    value = value_of(x) if type(x) is Array else x
    return value if type(value) is PartitionedArray else None


class Template:
    """The arguments of a function without the arrays among them. Equal ones have equal hashes, if what they hold is
    hashable."""

    __slots__ = ("key", "rest", "structure")

    def __init__(self, structure: Any, rest: Sequence[Any]):
        self.structure, self.rest = structure, rest
        self.key = structure, tuple(map(_distinct, rest))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def filled(self, arrays: Sequence[Any]) -> tuple[tuple, dict]:
        """(args, kwargs) with these arrays."""
        remaining = iter(arrays)
        return tree.unflatten(self.structure, [next(remaining) if x is _HERE else x for x in self.rest])


class Arguments:
    """The arguments of a function: its arrays, and the rest.

    arrays: global ones, traced ones and those of NumPy, in order. globals: those of them that are global or trace one.
    mesh: that of the first of these.
    """

    def __init__(self, args: tuple, kwargs: dict):
        leaves, structure = tree.flatten((args, kwargs), none_is_leaf=True)
        self.template = Template(structure, [_HERE if is_array(x) else x for x in leaves])
        self.arrays = [x for x in leaves if is_array(x)]
        self.globals = [value for value in map(global_value, self.arrays) if value is not None]
        self.mesh = self.globals[0].mesh

    def function(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The function of the arrays alone."""
        return _filling(fun, self.template)

    def run(self, fun: Callable[..., Any], in_specs: Sequence[Spec], out_specs: Any) -> Any:
        """The function of the blocks of the arrays, which are laid out by in_specs."""
        return on_blocks(name_of(fun), _filling, (fun, self.template), self.arrays, in_specs, out_specs, self.mesh)


def _filling(fun: Callable[..., Any], template: Template) -> Callable[..., Any]:
    def body(*arrays: Any) -> Any:
        args, kwargs = template.filled(arrays)
        return fun(*args, **kwargs)

    return body


def is_array(x: Any) -> bool:
    """Whether x may be an operand with a spec: a global array, a traced one, or one of NumPy or CuPy."""
    return isinstance(x, np.ndarray | Array | PartitionedArray) or on_device(x) or is_slot(x)


def on_blocks(
    where: str,
    make: Callable[..., Callable[..., Any]],
    static: tuple[Any, ...],
    operands: Sequence[Any],
    in_specs: Sequence[Spec | None],
    out_specs: Any,
    mesh: Mesh,
) -> Any:
    """make(*static) is the body; it is made once for equal static arguments and specs. where: its name in messages."""
    # Equal specs may be longer, and then fit fewer arrays.
    in_specs, out_specs = tuple(map(_trimmed, in_specs)), _trimmed(out_specs)
    for x in operands:
        if (value := global_value(x)) is not None:
            check_usable(where, value)
    key = (where, make, tuple(map(_distinct, static)), in_specs, out_specs)
    try:
        mapped = _maps.get(key)
    except TypeError:  # not hashable
        return Mapped(make(*static), in_specs, out_specs, mesh, True, where)(*operands)
    if mapped is None:
        mapped = bounded(_maps)[key] = Mapped(make(*static), in_specs, out_specs, None, True, where)
    with mesh:
        return mapped(*operands)


def _trimmed(spec: Any) -> Any:
    return P(*spec.trimmed, unreduced=spec.unreduced) if isinstance(spec, P) else spec


def _distinct(x: Any) -> Any:
    """A key of a value that tells apart what is equal and yet different: True, 1 and 1.0; 0.0 and -0.0. Slices, which
    have no hash, have one by their ends."""
    if isinstance(x, slice):
        return slice, x.start, x.stop, x.step
    return type(x), repr(x) if isinstance(x, float | complex | np.inexact) else x


def as_spec(x: Any) -> Spec:
    """A spec by which an operand goes to a map as it lies. An array on a grid is laid out by a spec first, and sums are
    taken."""
    value = global_value(x)
    if value is None:
        return P()
    layout = value.layout.reduced
    if layout.spec is None:
        return split_names(layout.shape, value.mesh, tuple(value.mesh.axes))
    return layout.spec if layout.balanced else layout


def layout_by(spec: Spec, value: PartitionedArray) -> Layout:
    """The layout of a global array by a spec."""
    return spec if isinstance(spec, Layout) else value.mesh.layout(value.shape, spec)


def names_of(spec: Spec, ndim: int) -> list[tuple[str, ...]]:
    """The axes that split each dimension of an array, of a spec by `as_spec`."""
    dims = spec.spec.dims if isinstance(spec, Layout) else spec.dims
    return [*dims, *[()] * (ndim - len(dims))]


def spec_of(names: Iterable[Sequence[str]]) -> P:
    """The spec by which these axes split each dimension."""
    return P(*(tuple(each) or None for each in names))


def dims_of(where: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """The dimensions that an argument `axis` names, sorted; all for None."""
    if axis is None or (not ndim and np.ndim(axis) == 0 and axis in (0, -1)):
        return tuple(range(ndim))
    each = [axis] if np.ndim(axis) == 0 else [*axis]
    if any(isinstance(d, str) for d in each):
        raise LayoutError.at(
            where,
            argument="axis",
            got=repr(axis),
            need="dimensions of the array, of all workers together",
            mend="axis=0, or None for all",
        )
    each = [int(d) for d in each]
    dims = sorted(normal_axis(where, "axis", d, ndim) for d in each)
    if len(set(dims)) < len(dims):
        raise LayoutError.at(
            where, argument="axis", got=str(axis), need="each dimension once", mend=f"axis={tuple(sorted(set(dims)))}"
        )
    return tuple(dims)


def check_gathered(where: str, arrays: Sequence[PartitionedArray], mend: str) -> None:
    """Raise if these arrays, of which a worker holds parts, are too large for each worker to hold them whole."""
    limit = gather_limit()
    split = [x for x in arrays if any(len(cut) > 1 for cut in x.layout.cuts)]
    if sum(x.nbytes for x in split) > limit:
        raise LayoutError.at(
            where,
            got=" and ".join(describe(x) for x in split),
            need=f"arrays of at most {limit >> 20} MiB, to be gathered on each worker",
            mend=f"{mend}; or SPMD_GATHER_LIMIT={(sum(x.nbytes for x in split) >> 20) + 1} in the environment",
        )
