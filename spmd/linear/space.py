"""The arrays that a linear operator takes and gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray, layout_of
from spmd.autodiff import tree
from spmd.autodiff.admission import admit
from spmd.autodiff.tracer import value_of
from spmd.errors import LayoutError, MeshError, SpecError, describe, message
from spmd.kernels import on_device
from spmd.layout import Layout, Spec
from spmd.map_arguments import move_to_layout
from spmd.mesh import Mesh
from spmd.spec_trees import spread
from spmd.transport.handles import read_only

__all__ = ["Space"]


class Space:
    """The arrays in the domain or range of an operator: their shape, dtype, layout and mesh.

    >>> with spmd.Mesh(x=2):
    ...     A = spmd.linear_operator(lambda x: spmd.psum(x, "x"), P("x"), P(), shape=4)
    >>> A.domain, A.range
    (float64[4] P('x'), float64[2] P(None))
    """

    __slots__ = ("dtype", "layout", "mesh")

    def __init__(self, dtype: Any, layout: Layout, mesh: Mesh):
        self.dtype = np.dtype(dtype)
        self.layout = layout
        self.mesh = mesh

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def spec(self) -> Spec:
        """The mesh axes that split each dimension; on a grid the layout."""
        return self.layout if self.layout.spec is None else self.layout.spec

    def _key(self):
        return self.dtype, self.layout, self.mesh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.dtype, self.layout))

    def __repr__(self) -> str:
        uneven = "" if self.layout.balanced else f" in blocks of {self.layout.cuts}"
        return f"{self.dtype}{list(self.shape)} {self.spec}{uneven}"

    def of(self, dtype: Any) -> Space:
        """This space with a dtype that can also represent `dtype`."""
        return Space(np.result_type(self.dtype, dtype), self.layout, self.mesh)

    def zeros(self) -> PartitionedArray:
        """The zero of this space. No process makes the whole array."""
        return self.from_blocks_of(lambda shape, _place: np.zeros(shape, self.dtype))

    def from_blocks_of(self, f: Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]) -> PartitionedArray:
        """The array with the blocks f(shape, start), start being the index of a block's first entry in the whole."""

        def block(w: int) -> Any:
            at = tuple(s.start for s in self.layout.slices(w))
            one = np.asarray(f(self.layout.block_shape(w), at), self.dtype, order="C")
            return read_only(one if self.mesh.places is None else self.mesh.places.own(one, w))

        return PartitionedArray(self.mesh.shared(self.layout, block), self.layout, self.mesh)

    def convert(self, x: Any) -> Any:
        """An array of this shape, with the dtype and layout of this space. Differentiable."""
        layout = layout_of(x)
        if value_of(x).dtype != self.dtype:
            x = x.astype(self.dtype)
        return x if layout == self.layout else move_to_layout(x, layout, self.layout, self.mesh)


def space_of(x: PartitionedArray) -> Space:
    return Space(x.dtype, x.layout, x.mesh)


def size_of(space: Any) -> int:
    return sum(s.size for s in tree.leaves(space))


def dtype_of(space: Any) -> np.dtype:
    return np.result_type(*(s.dtype for s in tree.leaves(space)))


def kind_of(x: Any) -> str:
    return getattr(getattr(value_of(x), "dtype", None), "kind", "")


def conj_tree(x: Any) -> Any:
    return tree.map(lambda a: np.conj(a) if a.dtype.kind == "c" else a, x)


_NUMBER_TYPES = (PartitionedArray, bool, int, float, complex)


def admit_element(where: str, argument: str, x: Any, space: Any) -> Any:
    """x as an element of a space. Raises LayoutError or MeshError if it does not fit."""
    spaces, expected = tree.flatten(space)
    leaves, structure = tree.flatten(x)
    leaves = [
        a if type(value_of(a)) in _NUMBER_TYPES or on_device(a) else admit(a, where, argument, error=LayoutError)
        for a in leaves
    ]
    fits = structure == expected and all(hasattr(value_of(a), "shape") for a in leaves)
    if not fits:
        raise LayoutError.at(
            where,
            argument=argument,
            got=show_spaces(x),
            need=show_spaces(space),
            mend="pass one array for each of them",
        )
    for a, s in zip(leaves, spaces, strict=True):
        v = value_of(a)
        if np.shape(v) != s.shape:
            raise LayoutError.at(
                where,
                argument=argument,
                got=describe(a),
                need=f"shape {list(s.shape)}: {s}",
                mend="np.reshape(x, shape) before, or make the operator for this shape",
            )
        if isinstance(v, PartitionedArray) and v.mesh != s.mesh:
            raise MeshError.at(
                where,
                argument=argument,
                got=f"an array on {v.mesh}",
                need=f"an array on {s.mesh}",
                mend="spmd.put(x.numpy(), spec, mesh)",
            )
        if v.dtype.kind not in "biufc":
            raise LayoutError.at(
                where, argument=argument, got=describe(a), need="numbers", mend=f"x.astype({s.dtype.name!r})"
            )
    return tree.unflatten(expected, [s.convert(a) for a, s in zip(leaves, spaces, strict=True)])


def show_spaces(x: Any) -> str:
    """A tree of arrays or spaces as messages show it."""
    leaves, treedef = tree.flatten(x)
    texts = [repr(a) if isinstance(a, Space) else describe(a) for a in leaves]
    return texts[0] if len(texts) == 1 and leaves[0] is x else f"{treedef!s} of {', '.join(texts)}"


def check_fit(sign: str, actual: Any, expected: Any, what: str) -> None:
    """Raise if the range of one operator is not the domain of the next; the sizes of blocks may differ."""

    def keys(space):
        return [(s.shape, s.spec, s.mesh) for s in tree.leaves(space)]

    same = tree.structure(actual) == tree.structure(expected)
    if same and keys(actual) == keys(expected):
        return
    shapes = same and [k[0] for k in keys(actual)] == [k[0] for k in keys(expected)]
    raise (SpecError if shapes else LayoutError)(
        message(
            f"A {sign} B",
            got=f"{what} {show_spaces(actual)}" + (f" on {tree.leaves(actual)[0].mesh}" * shapes),
            need=show_spaces(expected) + (f" on {tree.leaves(expected)[0].mesh}" * shapes),
            mend="make both with one spec and one mesh" if shapes else "compose operators whose shapes fit",
        )
    )


def flat(x: Any) -> np.ndarray:
    """The entries of an array, or of a tree of arrays, as one NumPy vector on every process. Gathers."""
    arrays = [a.numpy() if isinstance(a, PartitionedArray) else np.asarray(a) for a in tree.leaves(x)]
    return np.concatenate([np.ravel(a) for a in arrays])


def unflat(v: np.ndarray, space: Any) -> Any:
    """The element of a space with these entries."""
    spaces, treedef = tree.flatten(space)
    cuts = np.cumsum([s.size for s in spaces])[:-1]
    parts = np.split(v, cuts)
    return tree.unflatten(
        treedef, [s.convert(np.reshape(p, s.shape).astype(s.dtype)) for p, s in zip(parts, spaces, strict=True)]
    )


def make_domain(where: str, in_specs: Any, shape: Any, dtype: Any, like: Any, mesh: Mesh) -> Any:
    """The space of the argument, or a tree of spaces."""
    if like is None:
        shape = in_specs.shape if shape is None and isinstance(in_specs, Layout) else shape
        if shape is None or not (isinstance(in_specs, Spec | tuple)):
            raise LayoutError.at(
                where,
                argument="shape",
                got=f"{shape} for in_specs {in_specs}",
                need="the shape of the argument, or a tuple of shapes for a tuple of specs",
                mend="shape=x.shape, dtype=x.dtype; or like=x for a tree of arrays",
            )
        several = isinstance(in_specs, tuple)
        shapes = tuple(shape) if several else (shape,)
        dtypes = tuple(dtype) if isinstance(dtype, tuple | list) else (dtype,) * len(shapes)
        if several and not len(shapes) == len(in_specs) == len(dtypes):
            raise LayoutError.at(
                where,
                argument="shape",
                got=f"{len(shapes)} shapes and {len(dtypes)} dtypes for {len(in_specs)} specs",
                need="one for each argument",
                mend="shape=((4,), (3, 2)) for in_specs=(P(), P('x'))",
            )
        templates = tuple(_Like(s, t) for s, t in zip(shapes, dtypes, strict=True))
        like = templates if several else templates[0]
    leaves = spread(where, "x", "in_specs", in_specs, like)
    spaces = []
    for leaf in leaves:
        if not isinstance(leaf.spec, Spec) or np.dtype(leaf.value.dtype).kind not in "fc":
            raise SpecError.at(
                where,
                argument=leaf.path,
                got=f"dtype {np.dtype(leaf.value.dtype)} with the spec {leaf.spec}",
                need="a floating or complex array, with a spec",
                mend="x.astype(float); what is not mapped is for params",
            )
        leaf.spec.check(mesh.axes, where, leaf.path, len(leaf.value.shape))
        spaces.append(Space(leaf.value.dtype, mesh.layout(tuple(leaf.value.shape), leaf.spec, where, leaf.path), mesh))
    return tree.unflatten(tree.structure(like, none_is_leaf=True), spaces)


class _Like:
    def __init__(self, shape: Sequence[int] | int, dtype: Any):
        self.shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
