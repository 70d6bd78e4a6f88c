"""Global arrays whose blocks lie on the workers of a mesh, and the inner product that knows the states."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from spmd import device as devices
from spmd.autodiff import tree
from spmd.autodiff.tracer import Array, name_of
from spmd.device import contiguous, on_device, to_host
from spmd.errors import (
    ClosureError,
    LayoutError,
    MeshError,
    MissingMethodError,
    SpecError,
    StateError,
    describe,
    message,
)
from spmd.layout import Layout, P, Spec
from spmd.mesh import WORKER, Mesh, Worker, current_mesh
from spmd.operators.base import normal_axis, operate
from spmd.operators.reduce import Sum
from spmd.operators.repartition import Repartition
from spmd.operators.root import Rooted
from spmd.specs import spread
from spmd.state import REPLICAS, state_of
from spmd.transport.base import Call, sealed

__all__ = [
    "Frozen",
    "PartitionedArray",
    "checksum",
    "closed_over",
    "cut",
    "fingerprint",
    "freeze",
    "from_blocks",
    "from_callback",
    "inner",
    "mesh_for",
    "norm",
    "owned",
    "put",
    "relayout",
]


class PartitionedArray:
    """A global array of which each worker of a mesh holds a block. Immutable.

    shape, dtype: of the whole. layout: which box each worker holds. mesh: whose workers. blocks: those that this
    process holds, by worker; where the layout has copies, they are one array here.

    `x.numpy()` assembles it on every process (collective under MPI). `np.asarray(x)` does so where all of it is
    here already. NumPy's ufuncs work block by block where the layouts agree; anything else belongs into `spmd.map`.
    """

    __slots__ = ("__weakref__", "blocks", "dtype", "layout", "mesh")
    __array_priority__ = 500.0

    def __init__(self, blocks: Mapping[int, np.ndarray], layout: Layout, mesh: Mesh):
        self.blocks = dict(blocks)
        self.layout = layout
        self.mesh = mesh
        self.dtype = next(iter(self.blocks.values())).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def spec(self) -> Any:
        """Which mesh axes split which dimension; of an array on a grid its layout."""
        return self.layout if self.layout.spec is None else self.layout.spec

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, copies counted once."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    @property
    def is_here(self) -> bool:
        """Whether this process holds every block."""
        held = {self.layout.positions(w) for w in self.blocks} - {None}
        return len(held) == math.prod(len(c) for c in self.layout.cuts)

    def numpy(self) -> np.ndarray:
        """The whole array on the host, assembled on every process; read-only. Collective under MPI: all processes call
        it."""
        return self._whole()._assembled()

    def _whole(self) -> PartitionedArray:
        """The same with a layout by which every process has all of it."""
        _not_in_a_body("PartitionedArray.numpy", self)
        everywhere = len(self.blocks) == self.mesh.size or [*self.layout.holders.values()] == [
            (*range(self.mesh.size),)
        ]
        return self if everywhere else relayout(self, self.mesh.layout(self.shape, P()))

    def gathered(self) -> Any:
        """The whole array as one that is not partitioned, on the device if the blocks are. Collective under MPI."""
        if self.mesh.places is None:
            return self.numpy()
        w, block = next(iter(relayout(self, self.mesh.layout(self.shape, P())).blocks.items()))
        return self.mesh.places.own(block, w)

    def _assembled(self) -> np.ndarray:
        blocks = {w: b for w, b in self.blocks.items() if self.layout.positions(w) is not None}
        first = next(iter(blocks.values()))
        if first.shape == self.shape:
            return sealed(to_host(first))
        out = np.empty(self.shape, self.dtype)
        for w, b in blocks.items():
            out[self.layout.slices(w)] = to_host(b)
        out.flags.writeable = False
        return out

    def __array__(self, dtype=None, copy=None):
        _not_in_a_body("np.asarray", self)
        if not self.is_here:
            raise LayoutError(
                message(
                    "np.asarray",
                    got=f"{describe(self)}, of which this process holds a part",
                    need="an array that is wholly here; assembling it takes all processes",
                    mend="x.numpy() on all processes",
                )
            )
        whole = self._assembled()
        if copy is not False:
            return np.array(whole, dtype=dtype)
        if not any(whole is b for b in self.blocks.values()) or dtype not in (None, self.dtype):
            raise LayoutError(
                message(
                    "np.asarray",
                    argument="copy",
                    got=f"False, for {describe(self)}",
                    need="True or None: it is put together, or converted",
                    mend="leave copy out",
                )
            )
        return whole

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._block("__dlpack_device__").__dlpack_device__()

    def __dlpack__(self, **options):
        """The data for another library, without a copy, of an array that lies in one block. Work of this thread's
        current stream comes before what that library does with it."""
        return self._block("__dlpack__").__dlpack__(**options)

    def _block(self, where: str) -> Any:
        _not_in_a_body(where, self)
        whole = next((b for b in self.blocks.values() if b.shape == self.shape), None)
        if whole is None:
            raise LayoutError(
                message(
                    where,
                    got=f"{describe(self)}, in several blocks",
                    need="an array that lies in one piece",
                    mend="x.gathered(), or spmd.put(x, P())",
                )
            )
        return whole

    def item(self):
        """The number in an array of one entry."""
        return self._number("item").item()

    def _number(self, kind: str) -> np.ndarray:
        _not_in_a_body(f"{kind}()", self)
        if self.size != 1 or not self.is_here:
            raise LayoutError(
                message(
                    f"{kind}()",
                    got=describe(self),
                    need="an array of one entry that every process holds",
                    mend="x.numpy() assembles it",
                )
            )
        return self._assembled().reshape(())

    def __float__(self) -> float:
        return float(self._number("float"))

    def __int__(self) -> int:
        return int(self._number("int"))

    def __complex__(self) -> complex:
        return complex(self._number("complex"))

    def __bool__(self) -> bool:
        return bool(self._number("bool"))

    def __index__(self) -> int:
        return operator.index(self._number("index"))

    def __spmd_describe__(self) -> str:
        return f"PartitionedArray {self.dtype}{list(self.shape)} laid out by {self.spec}"

    def __spmd_search__(self, find: Callable[[np.ndarray], Any]) -> Any:
        """The first of what `find` finds in the blocks, (index, entry, count), as found in the whole. Collective."""
        mine = {w: find(b) if self.layout.owners[w] == w else None for w, b in self.blocks.items()}
        shared = self.mesh.transport.share(mine)
        found = {w: said for w, said in sorted(shared.items()) if said is not None}
        for w, (index, entry, _) in found.items():
            at = [i + start for i, (start, _) in zip(index, self.layout.boxes[w], strict=True)]
            return at, entry, sum(count for _, _, count in found.values())

    def __str__(self) -> str:
        if WORKER.get() is None and self.is_here:
            return str(self._assembled())
        return f"<{describe(self)} on {self.mesh}>"

    def __format__(self, spec: str) -> str:
        return format(self._number("format")[()], spec) if spec else str(self)

    def __repr__(self) -> str:
        uneven = "" if self.layout.balanced else f", blocks of {self.layout.cuts}"
        if self.is_here and WORKER.get() is None:
            data = np.array2string(self._assembled(), separator=", ", threshold=20, edgeitems=2, prefix=" " * 17)
            return f"PartitionedArray({data}, dtype={self.dtype}, spec={self.spec}{uneven})"
        return f"PartitionedArray(shape={self.shape}, dtype={self.dtype}, spec={self.spec}{uneven})"

    def __hash__(self):
        raise TypeError("arrays are not hashable")

    def __getitem__(self, index):
        raise _in_a_map(f"x[{index!r}]", self)

    def __iter__(self):
        raise _in_a_map("iteration", self)

    def __setitem__(self, index, value):
        raise LayoutError(
            message(
                "x[i] = v",
                got=describe(self),
                need="arrays are immutable",
                mend="spmd.map(lambda b: b.at[i].set(v), in_specs=x.spec, out_specs=x.spec)(x), "
                "with i an index into the blocks",
            )
        )

    def __getattr__(self, name: str):
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"'PartitionedArray' object has no attribute {name!r}")
        raise MissingMethodError(str(_in_a_map(f"x.{name}", self)))

    def astype(self, dtype) -> PartitionedArray:
        return self._each(lambda b: b.astype(dtype))

    def _each(self, f: Callable[[np.ndarray], np.ndarray]) -> PartitionedArray:
        """f on every block, once per distinct one."""
        done: dict[int, np.ndarray] = {}
        blocks = {}
        for w, b in self.blocks.items():
            if id(b) not in done:
                with beside(self.mesh, w):
                    done[id(b)] = _sealed(f(b))
            blocks[w] = done[id(b)]
        return PartitionedArray(blocks, self.layout, self.mesh)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        _not_in_a_body(f"np.{ufunc.__name__}", self)
        if any(type(x) is Array for x in inputs):
            return NotImplemented
        if method != "__call__":
            raise _in_a_map(f"{name_of(ufunc)}.{method}", self)
        for option in ("out", "where"):
            if kwargs.get(option) not in (None, True):
                raise _in_a_map(f"{name_of(ufunc)} with {option}=", self)
        return _blockwise(ufunc, inputs, kwargs)

    def __array_function__(self, fun, types, args, kwargs):
        _not_in_a_body(name_of(fun), self)
        if any(issubclass(t, Array) for t in types):
            return NotImplemented
        handler = _functions.get(fun)
        if handler is None:
            raise _in_a_map(name_of(fun), self)
        return handler(*args, **kwargs)


def _operator(ufunc, swap: bool):
    def method(self, other):
        if type(other) is Array:
            return NotImplemented
        return ufunc(other, self) if swap else ufunc(self, other)

    return method


for _name, _ufunc in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}.items():
    setattr(PartitionedArray, f"__{_name}__", _operator(_ufunc, swap=False))
    setattr(PartitionedArray, f"__r{_name}__", _operator(_ufunc, swap=True))
for _name, _ufunc in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    setattr(PartitionedArray, f"__{_name}__", _operator(_ufunc, swap=False))
for _name, _ufunc in {"neg": np.negative, "abs": np.absolute, "invert": np.invert, "pos": np.positive}.items():
    setattr(PartitionedArray, f"__{_name}__", lambda self, _ufunc=_ufunc: _ufunc(self))


def _sealed(x) -> np.ndarray:
    return sealed(contiguous(x))


_nothing = nullcontext()


def beside(mesh: Mesh, worker: int) -> Any:
    """Inside, what is computed is computed on the device of a worker's blocks."""
    return _nothing if mesh.places is None else mesh.places.at(worker)


def closed_over(where: str, x: PartitionedArray, argument: str | None = None) -> Exception:
    """The error for a global array that a body meets otherwise than as its argument."""
    return ClosureError(
        message(
            where,
            argument=argument,
            got=f"{describe(x)} in a body",
            need="bodies that use their arguments only",
            mend=f"pass it to the map as an argument, with {x.spec} in in_specs",
        )
    )


def _not_in_a_body(where: str, x: PartitionedArray) -> None:
    if WORKER.get() is not None:
        raise closed_over(where, x)


def _in_a_map(what: str, x: PartitionedArray) -> Exception:
    if WORKER.get() is not None:
        return closed_over(what, x)
    return LayoutError(
        message(
            what,
            got=describe(x),
            need="a ufunc (+, <, np.exp, ...) or np.sum: other functions need to know what the blocks mean",
            mend="do it in a body, spmd.map(f, in_specs=..., out_specs=...)(x), or on x.numpy()",
        )
    )


def _blockwise(ufunc, inputs, kwargs):
    """A ufunc on every worker's blocks of operands that agree in layout."""
    arrays = [x for x in inputs if type(x) is PartitionedArray]
    mesh = arrays[0].mesh
    where = f"np.{ufunc.__name__}"
    if ufunc.signature is not None:
        raise _in_a_map(where, arrays[0])
    for a in arrays[1:]:
        if a.mesh != mesh:
            raise MeshError(
                message(
                    where,
                    got=f"arrays on {mesh} and on {a.mesh}",
                    need="arrays on one mesh",
                    mend="spmd.put(x.numpy(), spec, mesh)",
                )
            )
    try:
        shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
    except ValueError as error:
        raise LayoutError(
            message(
                where,
                got=" and ".join(describe(x) for x in inputs),
                need="shapes that broadcast",
                mend="give them the same shape, or length 1 where one is to be repeated",
            )
        ) from error
    layout = _common_layout(where, arrays, shape)
    done: dict[Any, Any] = {}
    results: dict[int, Any] = {}
    for w in arrays[0].blocks:
        key = mesh.sharing(layout, w)
        if key not in done:
            with beside(mesh, w):
                got = ufunc(*(_part(x, layout, w, mesh) for x in inputs), **kwargs)
                done[key] = tuple(map(_sealed, got)) if isinstance(got, tuple) else _sealed(got)
        results[w] = done[key]
    if isinstance(next(iter(results.values())), tuple):
        return tuple(PartitionedArray({w: r[k] for w, r in results.items()}, layout, mesh) for k in range(ufunc.nout))
    return PartitionedArray(results, layout, mesh)


def _common_layout(where: str, arrays: Sequence[PartitionedArray], shape: tuple[int, ...]) -> Layout:
    """The layout of a result: each dimension split as the operands that split it are, which must agree."""
    first = arrays[0].layout
    if first.shape == shape and all(a.layout == first for a in arrays):
        return first
    found = _joint_layout(tuple(a.layout for a in arrays), shape)
    if found is None:
        raise LayoutError(
            message(
                where,
                got=" and ".join(
                    describe(a) + (f" in blocks of {a.layout.cuts}" * (not a.layout.balanced)) for a in arrays
                ),
                need="operands that are split alike, or not at all",
                mend="spmd.put(x, other.spec) lays x out like the other; or work in a body: spmd.map(f, in_specs=...)",
            )
        )
    return found


@lru_cache(maxsize=1024)
def _joint_layout(layouts: tuple[Layout, ...], shape: tuple[int, ...]) -> Layout | None:
    """The layout in which operands of these layouts broadcast to a shape, or None where they are split differently."""
    grids = {layout for layout in layouts if layout.spec is None}
    if grids:
        alone = len(grids) == 1 and not any(layout.spec is not None and layout.spec.axes for layout in layouts)
        return next((grid for grid in grids if alone and grid.shape == shape), None)
    dims: list[tuple[str, ...]] = [()] * len(shape)
    cuts: list[tuple[int, ...] | None] = [None] * len(shape)
    for layout in layouts:
        for k, (names, cut) in enumerate(zip(layout.spec.dims, layout.cuts, strict=True)):
            d = k + len(shape) - len(layout.shape)
            if not names:
                continue
            if layout.shape[k] != shape[d] or (dims[d] and (dims[d], cuts[d]) != (names, cut)):
                return None
            dims[d], cuts[d] = names, cut
    used = [n for names in dims for n in names]
    if len(set(used)) < len(used):
        return None
    return Layout(shape, P(*dims), layouts[0].axes, cuts)


def _part(x, layout: Layout, worker: int, mesh: Mesh):
    """The part of an operand that belongs to a worker's block of the result."""
    if type(x) is PartitionedArray and x.layout == layout:
        return x.blocks[worker]
    box = layout.slices(worker)
    if type(x) is PartitionedArray:
        data, whole = x.blocks[worker], [not names for names in x.spec.dims]
    elif np.ndim(x) == 0:
        return x[()] if mesh.places is not None and isinstance(x, np.ndarray) else x
    else:
        data = mesh.places.own(x, worker) if mesh.places is not None else np.asarray(x)
        whole = [True] * data.ndim
    skip = len(box) - data.ndim
    cut = tuple(box[d + skip] if whole[d] and data.shape[d] != 1 else slice(None) for d in range(data.ndim))
    return data[cut]


def _sum(x: PartitionedArray, axis=None, dtype=None, out=None, keepdims=False) -> PartitionedArray:
    """np.sum: over the dimensions of the global array."""
    dims = range(x.ndim) if axis is None else (axis,) if np.ndim(axis) == 0 else axis
    summed = sorted({normal_axis("np.sum", "axis", d, x.ndim) for d in dims})
    if x.layout.spec is None and not x.ndim:  # every sum over a whole array is one value for all
        x = relayout(x, x.mesh.layout((), P()))
    split = [tuple(x.mesh.axes)] * x.ndim if x.layout.spec is None else x.layout.spec.dims
    if x.layout.spec is None and len(summed) < x.ndim:
        raise _in_a_map("np.sum over some dimensions of a grid", x)
    axes = tuple(n for n in x.mesh.axes if any(n in split[d] for d in summed))

    def body(worker: Worker):
        mine = worker.comm.given(x.blocks[worker.index])
        part = contiguous(np.sum(mine, axis=tuple(summed), dtype=dtype, keepdims=keepdims))
        if not axes:
            return part
        call = Call("np.sum", axes, part.dtype, part.shape, alike=True)
        return worker.comm.all_reduce(worker.group(axes), call, part).wait()

    kept = [d for d in range(x.ndim) if d not in summed]
    every = range(x.ndim) if keepdims else kept
    spec = P(*(split[d] if d in kept else None for d in every))
    shape = [x.shape[d] if d in kept else 1 for d in every]
    cuts = [x.layout.cuts[d] if d in kept else None for d in every]
    results = x.mesh.run(body).results
    return _one_copy({w: _sealed(b) for w, b in results.items()}, Layout(shape, spec, x.mesh.axes, cuts), x.mesh)


def _one_copy(blocks: Mapping[int, np.ndarray], layout: Layout, mesh: Mesh) -> PartitionedArray:
    """An array from every worker's block; where workers hold copies, the first one here is kept for all."""
    kept: dict[Any, np.ndarray] = {}
    return PartitionedArray({w: kept.setdefault(mesh.sharing(layout, w), b) for w, b in blocks.items()}, layout, mesh)


def _broadcast_to(x: PartitionedArray, shape) -> PartitionedArray:
    if x.layout.spec is None and not x.ndim and len(shape):
        x = relayout(x, x.mesh.layout((), P()))  # one number for all, such as the cotangent of a sum
    layout = _common_layout("np.broadcast_to", [x], tuple(shape))
    return _one_copy({w: np.broadcast_to(b, layout.block_shape(w)) for w, b in x.blocks.items()}, layout, x.mesh)


def _with_whole(layout: Layout, new: Mapping[int, int]) -> Layout:
    """A layout with more dimensions, which are not split: their lengths by position."""
    dims: list[tuple[str, ...]] = [] if layout.spec is None else list(layout.spec.dims)
    cuts = list(layout.cuts)
    for d, n in sorted(new.items()):
        dims.insert(d, ())
        cuts.insert(d, (n,))
    shape = [sum(c) for c in cuts]
    if layout.spec is None:
        return Layout.grid(shape, [len(c) for c in cuts], layout.axes, layout.workers, cuts)
    return Layout(shape, P(*dims), layout.axes, cuts)


def _expand_dims(x: PartitionedArray, axis) -> PartitionedArray:
    ndim = x.ndim + np.size(axis)
    new = tuple(normal_axis("np.expand_dims", "axis", d, ndim) for d in np.atleast_1d(axis))
    layout = _with_whole(x.layout, dict.fromkeys(new, 1))
    return _one_copy({w: np.reshape(b, layout.block_shape(w)) for w, b in x.blocks.items()}, layout, x.mesh)


def _stack(arrays, axis=0) -> PartitionedArray:
    """np.stack along a new dimension, which is whole."""
    arrays = list(arrays)
    given = [a for a in arrays if type(a) is PartitionedArray]
    shape, mesh = given[0].shape, given[0].mesh
    if any(np.shape(a) != shape for a in arrays):
        raise LayoutError(
            message(
                "np.stack",
                got=" and ".join(describe(a) for a in arrays),
                need="arrays of one shape",
                mend="np.broadcast_to(x, shape) first",
            )
        )
    layout = _common_layout("np.stack", given, shape)
    d = normal_axis("np.stack", "axis", axis, len(shape) + 1)
    stacked = _with_whole(layout, {d: len(arrays)})
    dtype = np.result_type(*(a.dtype if type(a) is PartitionedArray else np.asarray(a).dtype for a in arrays))

    def block(w: int) -> np.ndarray:
        if layout.positions(w) is None:
            return owned_on(mesh, np.zeros(stacked.block_shape(w), dtype), w)
        with beside(mesh, w):
            return np.stack([_part(a, layout, w, mesh) for a in arrays], d)

    return _one_copy({w: _sealed(block(w)) for w in given[0].blocks}, stacked, mesh)


def _reshape(x: PartitionedArray, shape, order="C") -> PartitionedArray:
    """np.reshape, where it leaves the split dimensions as they are."""
    new = [int(n) for n in np.atleast_1d(shape)] if np.size(shape) else []
    if new.count(-1) == 1:
        new[new.index(-1)] = x.size // max(1, math.prod(n for n in new if n != -1))
    spec, workers = x.layout.spec, x.layout.workers
    dims: list[tuple[str, ...]] = [()] * len(new)
    cuts: list[tuple[int, ...]] = [(n,) for n in new]
    first = 0
    for d, cut in enumerate(x.layout.cuts):
        if spec.dims[d] if spec is not None else len(cut) > 1:
            at = (e for e, n in enumerate(new) if n == x.shape[d] and math.prod(new[:e]) == math.prod(x.shape[:d]))
            e = next((e for e in at if e >= first), None)
            if e is None:
                raise _in_a_map("np.reshape", x)
            first, cuts[e] = e + 1, cut
            if spec is not None:
                dims[e] = spec.dims[d]
    if math.prod(new) != x.size or order != "C":
        raise _in_a_map("np.reshape", x)
    if spec is not None:
        layout = Layout(new, P(*dims), x.mesh.axes, cuts)
    else:
        layout = Layout.grid(new, [len(cut) for cut in cuts], x.mesh.axes, workers, cuts, copies=x.layout.copies)
    return _one_copy({w: b.reshape(layout.block_shape(w)) for w, b in x.blocks.items()}, layout, x.mesh)


def _likes(make):
    """np.zeros_like and its kin: laid out as x is, or copies where the shape is another."""

    def like(x, *number, dtype=None, shape=None, **options):
        if any(np.ndim(n) for n in number):
            raise _in_a_map(f"{name_of(make)} of an array", x)
        made = lambda b, **shape: make(b, *number, dtype=dtype, **options, **shape)
        shape = x.shape if shape is None else tuple(shape) if np.ndim(shape) else (shape,)
        if shape == x.shape:
            return x._each(made)
        layout = x.mesh.layout(shape, P())
        blocks = {}
        for w, b in x.blocks.items():
            with beside(x.mesh, w):
                blocks[w] = _sealed(made(b, shape=shape))
        return _one_copy(blocks, layout, x.mesh)

    return like


def _of_wholes(fun):
    """A function that looks at arrays as a whole: on those that are here."""

    def look(*args, **kwargs):
        return fun(*(np.asarray(a) if type(a) is PartitionedArray else a for a in args), **kwargs)

    return look


_functions: dict[Any, Callable[..., Any]] = {
    np.sum: _sum,
    np.broadcast_to: _broadcast_to,
    np.expand_dims: _expand_dims,
    np.reshape: _reshape,
    np.stack: _stack,
    np.real: lambda x: x._each(np.real),
    np.imag: lambda x: x._each(np.imag),
    **{f: _likes(f) for f in (np.zeros_like, np.ones_like, np.full_like)},
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x: x.size,
    np.iscomplexobj: lambda x: x.dtype.kind == "c",
    np.isrealobj: lambda x: x.dtype.kind != "c",
    **{f: _of_wholes(f) for f in (np.allclose, np.array_equal, np.array2string)},
}


# Making them


class Frozen(np.ndarray):
    """An array whose owner has promised not to write to it any more."""


def freeze(a: np.ndarray) -> np.ndarray:
    """Promise that nobody writes to `a` any more: maps then share it with their bodies instead of copying it.

    Gives a read-only view; writing to `a` through another view afterwards breaks the promise.
    """
    if on_device(a):
        raise LayoutError(
            message(
                "spmd.freeze",
                argument="a",
                got=describe(a),
                need="an array of NumPy, which can be made read-only",
                mend="spmd.put(a, spec): blocks that are on the mesh already are not copied again",
            )
        )
    view = np.asarray(a).view(Frozen)
    view.flags.writeable = False
    return view


def owned(a: np.ndarray) -> np.ndarray:
    """A C-contiguous read-only array with the data of a: a copy, unless the owner has frozen it."""
    if isinstance(a, Frozen) and not a.flags.writeable:
        a = a.view(np.ndarray)
        return a if a.flags.c_contiguous else _sealed(np.array(a, order="C"))
    return _sealed(np.array(a, order="C", subok=False))


def owned_on(mesh: Mesh, a: Any, worker: int) -> np.ndarray:
    """`owned`, on the device of a worker where the mesh has one."""
    return owned(a) if mesh.places is None else mesh.places.own(a, worker)


def mesh_for(mesh: Mesh | None, where: str) -> Mesh:
    """The mesh of a call: the one given, else that of the enclosing `with mesh:`."""
    if WORKER.get() is not None:
        raise MeshError(
            message(
                where,
                got="a call inside a body",
                need="a call from outside: a body has its own blocks only",
                mend="do it before the map, and pass the result as an argument",
            )
        )
    found = mesh if mesh is not None else current_mesh()
    if found is not None and not isinstance(found, Mesh):
        raise MeshError(message(where, argument="mesh", got=describe(found), need="a Mesh", mend="mesh=spmd.Mesh(x=4)"))
    if found is None:
        raise MeshError(
            message(
                where,
                argument="mesh",
                got="no mesh, and no enclosing `with mesh:`",
                need="a mesh to run on",
                mend="with spmd.Mesh(x=4): ..., or pass mesh=spmd.Mesh(x=4)",
            )
        )
    return found


def _fits(spec: Any, mesh: Mesh, where: str, ndim: int, argument: str = "spec") -> None:
    """Raise where a spec does not fit the mesh or an array of ndim dimensions, or is none."""
    if not isinstance(spec, Spec):
        raise SpecError(
            message(
                where,
                argument=argument,
                got=describe(spec),
                need="a P, or a Layout",
                mend='P("x", None), or P() for copies',
            )
        )
    spec.check(mesh.axes, where, argument, ndim)


def _numbers(x, where: str, argument: str, mesh: Mesh) -> np.ndarray:
    """x as an array of numbers; a frozen one stays frozen, one of a GPU stays there."""
    x = devices.home(where, argument, x, mesh.device)
    data = x if isinstance(x, Frozen) or on_device(x) else np.asarray(x)
    if data.dtype.kind in "OSUMm":
        raise LayoutError(
            message(
                where,
                argument=argument,
                got=describe(data),
                need="an array of numbers",
                mend="convert it: np.asarray(x, dtype=float)",
            )
        )
    return data


def put(x, spec: Any, mesh: Mesh | None = None) -> Any:
    """Lay an array, or a pytree of arrays, out on a mesh.

    x: bare arrays that every process has, of which each keeps its blocks, or `PartitionedArray`s (collective).
    spec: which mesh axes split which dimension: one P, or a tree of them that is a prefix of x's; or a `Layout`: blocks
    of any lengths, or a grid on some of the workers. Copies the blocks, once each. Gives a `PartitionedArray`, or a
    tree of them.
    """
    leaves = spread("spmd.put", "x", "spec", spec, x)
    placed = [_put(leaf.value, leaf.spec, mesh, leaf.path) if leaf.spec is not None else leaf.value for leaf in leaves]
    alone = len(leaves) == 1 and leaves[0].value is x
    return placed[0] if alone else tree.unflatten(tree.structure(x, none_is_leaf=True), placed)


def _put(x, spec: Spec, mesh: Mesh | None, path: str) -> PartitionedArray:
    where, argument = "spmd.put", "spec" if path == "x" else f"spec, for {path}"
    if type(x) is PartitionedArray:
        _not_in_a_body(where, x)
        mesh = mesh or x.mesh
        if mesh != x.mesh:
            raise MeshError(
                message(
                    where,
                    argument="mesh",
                    got=f"{mesh} for an array on {x.mesh}",
                    need="the mesh that the array is on",
                    mend="spmd.put(x.numpy(), spec, mesh)",
                )
            )
        _fits(spec, mesh, where, x.ndim, argument)
        return relayout(x, mesh.layout(x.shape, spec, where, argument))
    mesh = mesh_for(mesh, where)
    data = _numbers(x, where, path, mesh)
    _fits(spec, mesh, where, data.ndim, argument)
    layout = mesh.layout(data.shape, spec, where, argument)
    return PartitionedArray(cut(data, layout, mesh), layout, mesh)


def cut(data: np.ndarray, layout: Layout, mesh: Mesh) -> dict[int, np.ndarray]:
    """The blocks of a whole array that this process holds; one array for all copies of a block on a device."""
    done: dict[Any, np.ndarray] = {}
    blocks = {}
    for w in mesh.local_workers:
        key = mesh.sharing(layout, w)
        if key not in done:
            done[key] = owned_on(mesh, data[layout.slices(w)] if data.ndim else _number(data, layout, w), w)
        blocks[w] = done[key]
    return blocks


def _number(x: Any, layout: Layout, worker: int) -> np.ndarray:
    """A worker's block of an array without dimensions: empty where it holds none."""
    return (
        np.reshape(x, layout.block_shape(worker))
        if layout.positions(worker) is not None
        else np.zeros(0, x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)
    )


def from_callback(
    shape: Sequence[int], spec: Spec, fn: Callable[[tuple[slice, ...]], Any], mesh: Mesh | None = None
) -> PartitionedArray:
    """An array of which each process makes its own blocks: fn(index) gives the block at that index of the whole.

    As `jax.make_array_from_callback`. Raises LayoutError for a block of another shape than its index has.
    """
    where = "spmd.from_callback"
    mesh = mesh_for(mesh, where)
    _fits(spec, mesh, where, len(shape))
    layout = mesh.layout(tuple(shape), spec, where)
    first: dict[int, np.ndarray] = {}
    done: dict[Any, np.ndarray] = {}
    for w in mesh.local_workers:
        owner, key = layout.owners[w], mesh.sharing(layout, w)
        if owner not in first:
            block = _numbers(fn(layout.slices(w)), where, "fn", mesh)
            block = owned_on(mesh, block if shape else _number(block, layout, w), w)
            if block.shape != layout.block_shape(w):
                raise LayoutError(
                    message(
                        where,
                        argument="fn",
                        got=f"a block of shape {list(block.shape)} for {layout.slices(w)}",
                        need=f"shape {list(layout.block_shape(w))}",
                        mend="return whole[index]",
                    )
                )
            first[owner] = done[key] = block
        elif key not in done:  # on another device
            done[key] = owned_on(mesh, first[owner], w)
    return PartitionedArray({w: done[mesh.sharing(layout, w)] for w in mesh.local_workers}, layout, mesh)


def from_blocks(blocks: Sequence[Any] | Mapping[int, Any], spec: Spec, mesh: Mesh | None = None) -> PartitionedArray:
    """An array from the blocks of the workers, joined as the spec says; they may be uneven.

    blocks: one for each worker that this process holds, in order, or a mapping from their numbers: all of them in
    one process, the own one under MPI (collective: the shapes are exchanged).
    """
    where = "spmd.from_blocks"
    mesh = mesh_for(mesh, where)
    local = list(mesh.local_workers)
    given = dict(blocks) if isinstance(blocks, Mapping) else dict(zip(local, blocks, strict=False))
    if sorted(given) != local or len(given) != len(blocks):
        raise LayoutError(
            message(
                where,
                argument="blocks",
                got=f"{len(blocks)} blocks",
                need=f"one for each worker held here: {local}",
                mend="give every worker its block, empty ones too",
            )
        )
    mine = {w: owned_on(mesh, _numbers(b, where, f"blocks[{w}]", mesh), w) for w, b in given.items()}
    _fits(spec, mesh, where, next(iter(mine.values())).ndim)
    said = mesh.transport.share({w: [list(b.shape), b.dtype.name, fingerprint(b)] for w, b in mine.items()})
    layout = mesh.joined(tuple(tuple(said[w][0]) for w in range(mesh.size)), spec, where)
    for w, owner in enumerate(layout.owners):
        if said[w][1] != said[0][1]:
            raise LayoutError(
                message(
                    where,
                    argument="blocks",
                    got=f"{said[0][1]} on {mesh.describe(0)} and {said[w][1]} on {mesh.describe(w)}",
                    need="one dtype on all workers",
                    mend="convert them with x.astype(...)",
                )
            )
        if said[w][2] != said[owner][2]:
            raise LayoutError(
                message(
                    where,
                    argument="blocks",
                    got=f"blocks that differ between {mesh.describe(owner)} and {mesh.describe(w)}",
                    need=f"copies of one block along the axes that {spec} does not name",
                    mend="name in the spec the axis along which the blocks differ",
                )
            )
    return _one_copy(mine, layout, mesh)


_WHOLE = 1 << 16
_SAMPLE = 1 << 12


def fingerprint(block: np.ndarray) -> int:
    """A checksum of a block's bits: of all of them where it is small, of a strided sample where it is large.

    Of one on a device 0: it would take waiting for the device, and bodies are not to wait.
    """
    if on_device(block):
        return 0
    flat = block.reshape(-1)
    if block.nbytes > _WHOLE:
        flat = flat[:: max(1, flat.size // _SAMPLE)]
    return checksum(flat)


def checksum(block: np.ndarray) -> int:
    """A checksum of all bits of a block that are part of its numbers: long doubles may have others, of any value."""
    octets = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    if block.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:
        octets = np.ascontiguousarray(octets.reshape(-1, np.dtype(np.longdouble).itemsize)[:, :10])
    return zlib.crc32(octets.data)


def relayout(x: PartitionedArray, layout: Layout) -> PartitionedArray:
    """The same array in another layout: each worker sends what others need of its block, once. Collective."""
    if layout == x.layout:
        return x
    op = Repartition(tuple(x.mesh.axes), x.layout, layout)

    def body(worker: Worker):
        block = worker.comm.given(x.blocks[worker.index])
        call = Call("relayout", op.axes, x.dtype, block.shape, detail=f"{x.layout} to {layout}", alike=op.alike)
        handle, arrive = op.launch(worker.comm, worker.group(op.axes), block, call)
        return arrive(handle.wait())[0]

    return _one_copy(x.mesh.run(body).results, layout, x.mesh)


# The inner product


def inner(x, y):
    """<x, y> = sum(conj(x) * y) over the entries of the global arrays: Invariant values counted once, Varying ones
    summed over the workers, Rooted ones counted at the root. x, y: arrays, or pytrees of one structure.

    In a body the result is Invariant and differentiable; outside it is a number.
    """
    xs, ys = tree.leaves(x), tree.leaves(y)
    if len(xs) != len(ys):
        raise StateError(
            message(
                "spmd.inner",
                argument="y",
                got=f"{len(ys)} arrays for {len(xs)}",
                need="pytrees of one structure",
                mend="pair every array with its counterpart",
            )
        )
    total = 0.0
    by_state: dict[Any, Any] = {}
    for a, b in zip(xs, ys, strict=True):
        if WORKER.get() is None:
            total = total + _inner_outside(a, b)
            continue
        key, value = _inner_here(a, b)
        by_state[key] = by_state[key] + value if key in by_state else value
    for axes, value in by_state.items():
        total = total + (operate(Sum(axes), value) if axes else value)
    return total


def _inner_here(a, b) -> tuple[tuple[str, ...], Any]:
    """This worker's share of an inner product, and the axes to sum it over."""
    worker = WORKER.get()
    assert worker is not None
    axes = tuple(worker.mesh.axes)
    if type(a) is Rooted and type(b) is Rooted and (a.axes, a.root) == (b.axes, b.root):
        token = REPLICAS.set(False)  # the others sum over nothing
        try:
            held = np.sum(np.conj(a.block) * b.block)
        finally:
            REPLICAS.reset(token)
        state = getattr(held, "state", None)
        root = state_of(a.axes)
        share = Array(held.value, state | root, held.tape, held.node) if state is not None else held
        return tuple(n for n in axes if n in (state | root).varying) if state is not None else axes, share
    value = np.sum(np.conj(a) * b)
    if type(value) is Array:
        return tuple(n for n in axes if n in value.state.varying), value
    return (() if worker.tracked else axes), value


def _inner_outside(a, b):
    if type(a) is not PartitionedArray:
        a, b = (a, b) if type(b) is not PartitionedArray else (put(a, b.spec, b.mesh), b)
    if type(a) is not PartitionedArray:
        return to_host(np.vdot(a, b))[()]
    if type(b) is not PartitionedArray:
        b = put(b, a.spec, a.mesh)
    b = relayout(b, a.layout)
    axes = tuple(a.mesh.axes)

    def body(worker: Worker):
        w, given = worker.index, worker.comm.given
        mine: Any = np.vdot(given(a.blocks[w]), given(b.blocks[w])) if a.layout.owners[w] == w else 0
        # On a device the other owners bring a number of the device too.
        dtype = np.result_type(a.dtype, b.dtype)
        part = mine.astype(dtype) if on_device(mine) else owned_on(worker.mesh, np.asarray(mine, dtype), w)
        call = Call("inner", axes, part.dtype, part.shape, alike=True)
        return worker.comm.all_reduce(worker.group(axes), call, part).wait()

    return to_host(next(iter(a.mesh.run(body).results.values())))[()]


def norm(x):
    """The 2-norm that belongs to `inner`: sqrt(<x, x>), real."""
    return np.sqrt(np.real(inner(x, x)))
