"""Global arrays whose blocks lie on the workers of a mesh."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.admission import ADMITTED, BARE, admit
from spmd.autodiff.primitive import name_of
from spmd.autodiff.tracer import Array
from spmd.device import contiguous, copied, to_host
from spmd.errors import (
    ClosureError,
    DonatedError,
    LayoutError,
    MeshError,
    MissingMethodError,
    StateError,
    describe,
    message,
)
from spmd.kernels import on_device
from spmd.kernels.memory.pool import Lease
from spmd.layout import Layout, P
from spmd.mesh import WORKER, Mesh, Worker
from spmd.operators.memo import interned
from spmd.operators.repartition import Repartition
from spmd.operators.splitting import normal_axis
from spmd.tracebacks import api_boundary
from spmd.transport.call import Call
from spmd.transport.handles import sealed

__all__ = [
    "GIVEN_AWAY",
    "Frozen",
    "PartitionedArray",
    "beside",
    "closed_over",
    "donated",
    "freeze",
    "one_copy",
    "owned",
    "owned_on",
    "reclaimed",
    "relayout",
    "thaw",
    "usable",
]


class PartitionedArray:
    """A global array of which each worker of a mesh holds a block. Immutable.

    shape, dtype: of the whole. layout: which box each worker holds. mesh: whose workers. blocks: those that this
    process holds, by worker; where the layout has copies, they are one array here.

    `x.numpy()` assembles it on every process (collective under MPI). `np.asarray(x)` does so where all of it is
    here already. NumPy's ufuncs work block by block where the layouts agree; anything else belongs into `spmd.map`.
    """

    __slots__ = ("__weakref__", "blocks", "compared", "dtype", "layout", "mesh")
    __array_priority__ = 500.0

    def __init__(self, blocks: Mapping[int, np.ndarray], layout: Layout, mesh: Mesh):
        self.blocks = dict(blocks)
        self.layout = layout
        self.mesh = mesh
        self.dtype = next(iter(self.blocks.values())).dtype
        self.compared: bool | None = None
        """Whether its shape and its copies were compared across processes, or came of a collective: False where it was
        made of bare data, None where it was computed from other global arrays."""

    def __copy__(self) -> PartitionedArray:
        """Another array with the same blocks, which do not change. It keeps them where this one is given away."""
        twin = object.__new__(type(self))
        for name in ("blocks", "compared", "dtype", "layout", "mesh"):
            setattr(twin, name, getattr(self, name))
        if self.blocks is not GIVEN_AWAY:
            twin.blocks = dict(self.blocks)
        return twin

    def __deepcopy__(self, memo: object) -> PartitionedArray:
        return self.__copy__()

    @api_boundary
    def __reduce__(self) -> tuple[Any, ...]:
        """By its blocks, where this process has all. Raises MeshError where other processes or GPUs have them."""
        if self.blocks is GIVEN_AWAY:
            raise donated("pickle of a PartitionedArray")
        self.mesh.check_pickled("a PartitionedArray")
        return _unpickled, (self.blocks, self.layout, self.mesh, self.compared)

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

    @api_boundary
    def numpy(self) -> np.ndarray:
        """The whole array on the host, assembled on every process; read-only. Collective under MPI: all processes call
        it."""
        return self._whole()._assembled()

    def _whole(self) -> PartitionedArray:
        """The same with a layout by which every process has all of it."""
        usable("PartitionedArray.numpy", self)
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

    @api_boundary
    def __array__(self, dtype=None, copy=None):
        usable("np.asarray", self)
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

    @api_boundary
    def __dlpack__(self, **options):
        """The data for another library, without a copy, of an array that lies in one block. Work of this thread's
        current stream comes before what that library does with it."""
        return self._block("__dlpack__").__dlpack__(**options)

    def _block(self, where: str) -> Any:
        usable(where, self)
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

    @api_boundary
    def item(self):
        """The number in an array of one entry."""
        return self._number("item").item()

    def _number(self, kind: str) -> np.ndarray:
        usable(f"{kind}()", self)
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

    @api_boundary
    def __float__(self) -> float:
        return float(self._number("float"))

    @api_boundary
    def __int__(self) -> int:
        return int(self._number("int"))

    @api_boundary
    def __complex__(self) -> complex:
        return complex(self._number("complex"))

    @api_boundary
    def __bool__(self) -> bool:
        return bool(self._number("bool"))

    @api_boundary
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

    def __spmd_parts__(self) -> list[Any]:
        """The blocks that lie here."""
        return [] if self.blocks is GIVEN_AWAY else [block for _, block in sorted(self.blocks.items())]

    def __str__(self) -> str:
        if WORKER.get() is None and self.blocks is not GIVEN_AWAY and self.is_here:
            return str(self._assembled())
        return f"<{describe(self)} on {self.mesh}{self._gone}>"

    def __format__(self, spec: str) -> str:
        return format(self._number("format")[()], spec) if spec else str(self)

    def __repr__(self) -> str:
        uneven = "" if self.layout.balanced else f", blocks of {self.layout.cuts}"
        if self.blocks is not GIVEN_AWAY and self.is_here and WORKER.get() is None:
            data = np.array2string(self._assembled(), separator=", ", threshold=20, edgeitems=2, prefix=" " * 17)
            return f"PartitionedArray({data}, dtype={self.dtype}, spec={self.spec}{uneven})"
        return f"PartitionedArray(shape={self.shape}, dtype={self.dtype}, spec={self.spec}{uneven}{self._gone})"

    @property
    def _gone(self) -> str:
        return ", given away" if self.blocks is GIVEN_AWAY else ""

    def __hash__(self):
        raise TypeError("arrays are not hashable")

    @api_boundary
    def __getitem__(self, index):
        raise _in_a_map(f"x[{index!r}]", self)

    @api_boundary
    def __iter__(self):
        raise _in_a_map("iteration", self)

    @api_boundary
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

    @api_boundary
    def __getattr__(self, name: str):
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"'PartitionedArray' object has no attribute {name!r}")
        raise MissingMethodError(str(_in_a_map(f"x.{name}", self)))

    @api_boundary
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

    @api_boundary
    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        usable(f"np.{ufunc.__name__}", self)
        if any(type(x) is Array for x in inputs):
            return NotImplemented
        if method != "__call__":
            raise _in_a_map(f"{name_of(ufunc)}.{method}", self)
        for option in ("out", "where"):
            if kwargs.get(option) not in (None, True):
                raise _in_a_map(f"{name_of(ufunc)} with {option}=", self)
        where = f"np.{ufunc.__name__}"
        return _blockwise(ufunc, [x if type(x) in _OPERANDS else _operand(x, where) for x in inputs], kwargs)

    @api_boundary
    def __array_function__(self, fun, types, args, kwargs):
        usable(name_of(fun), self)
        if any(issubclass(t, Array) for t in types):
            return NotImplemented
        handler = _functions.get(fun)
        if handler is None:
            raise _in_a_map(name_of(fun), self)
        return handler(*args, **kwargs)


def _unpickled(blocks: dict[int, np.ndarray], layout: Layout, mesh: Mesh, compared: bool | None) -> PartitionedArray:
    """What a pickle holds, as an array; a pickle does not keep that its blocks are read-only."""
    x = PartitionedArray({w: sealed(block) for w, block in blocks.items()}, layout, mesh)
    x.compared = compared
    return x


_OPERANDS = {PartitionedArray, int, float, complex, bool}


def _operand(x: Any, where: str) -> Any:
    """What is computed with beside a global array."""
    if x is None or on_device(x) or isinstance(x, np.number | np.bool):
        return x
    return admit(x, where)


def _operator(ufunc, swap: bool):
    @api_boundary
    def method(self, other):
        if type(other) is Array or getattr(type(other), "__array_ufunc__", True) is None:
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


def usable(where: str, x: PartitionedArray) -> None:
    """Raise in a body, which takes arguments, and of an array that was given away."""
    if WORKER.get() is not None:
        raise closed_over(where, x)
    if x.blocks is GIVEN_AWAY:
        raise donated(where)


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

    def made(w: int) -> Any:
        with beside(mesh, w):
            got = ufunc(*(_part(x, layout, w, mesh) for x in inputs), **kwargs)
            return tuple(map(_sealed, got)) if isinstance(got, tuple) else _sealed(got)

    results = mesh.shared(layout, made)
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
    return one_copy({w: _sealed(b) for w, b in results.items()}, Layout(shape, spec, x.mesh.axes, cuts), x.mesh)


def one_copy(blocks: Mapping[int, np.ndarray], layout: Layout, mesh: Mesh) -> PartitionedArray:
    """An array from every worker's block; where workers hold copies, the first one here is kept for all."""
    return PartitionedArray(mesh.shared(layout, blocks.__getitem__), layout, mesh)


def _broadcast_to(x: PartitionedArray, shape) -> PartitionedArray:
    if x.layout.spec is None and not x.ndim and len(shape):
        x = relayout(x, x.mesh.layout((), P()))  # one number for all, such as the cotangent of a sum
    layout = _common_layout("np.broadcast_to", [x], tuple(shape))
    return one_copy({w: np.broadcast_to(b, layout.block_shape(w)) for w, b in x.blocks.items()}, layout, x.mesh)


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
    return one_copy({w: np.reshape(b, layout.block_shape(w)) for w, b in x.blocks.items()}, layout, x.mesh)


def _stack(arrays, axis=0) -> PartitionedArray:
    """np.stack along a new dimension, which is whole."""
    arrays = [a if type(a) is PartitionedArray or on_device(a) else admit(a, "np.stack", "arrays") for a in arrays]
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

    return one_copy({w: _sealed(block(w)) for w in given[0].blocks}, stacked, mesh)


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
    return one_copy({w: b.reshape(layout.block_shape(w)) for w, b in x.blocks.items()}, layout, x.mesh)


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
        return one_copy(blocks, layout, x.mesh)

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


tree.ALONE.add(PartitionedArray)

# Copies and layouts


class Frozen(np.ndarray):
    """An array whose owner has promised not to write to it any more."""


ADMITTED.add(PartitionedArray)
BARE.add(Frozen)


@api_boundary
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
    view = np.asarray(admit(a, "spmd.freeze", "a")).view(Frozen)
    view.flags.writeable = False
    return view


def thaw(x: np.ndarray) -> np.ndarray:
    """x as an array that may be written to: in a body with check=False, for libraries that work in place.

    x: a bare array, of NumPy or CuPy. What collectives and maps give is read-only, for others may have it too.
    Gives a C-contiguous array of the same shape and dtype. That is x itself where nobody else has it, not even by a
    name: `f = scipy.fft.fft(spmd.thaw(spmd.repartition(f, old, new)), overwrite_x=True)` copies nothing. (Python tells
    so up to 3.13.) Otherwise it is a copy; large ones lie in memory that is used again, which is there in a third of
    the time that `np.array(x)` takes.
    Raises StateError for anything else: of an array of a body `spmd.block(x)` is the bare one.
    """
    if type(x) is np.ndarray and sys.getrefcount(x) == _ALONE and _made_writable(x):
        return x
    _check_bare(x)
    return copied(x if on_device(x) else np.asarray(x))


@api_boundary
def _check_bare(x: Any) -> None:
    """Raise where `thaw` is given no bare array."""
    masked = isinstance(x, np.ma.MaskedArray)
    if masked or not (isinstance(x, np.ndarray) or on_device(x)):
        mend = {
            "Array": "spmd.thaw(spmd.block(x)), or x.at[i].set(v), which gives a changed copy",
            "PartitionedArray": "spmd.thaw(x.numpy()), or inside a map of it",
        }.get(type(x).__name__, "x.filled(0) before: a mask is not moved" if masked else "np.asarray(x) before")
        raise StateError(
            message("spmd.thaw", argument="x", got=describe(x), need="a bare array of NumPy or CuPy", mend=mend)
        )


def _references(x: Any) -> int:
    return sys.getrefcount(x)


def _references_alone() -> int:
    """How many references a function finds to an argument that nobody else has. -1 where it finds no more to one that
    its caller keeps, as Python does that lends its variables, and where somebody looks on who holds it too."""
    kept = object()
    return 2 if _references(object()) == 2 and _references(kept) == 3 else -1


_ALONE = _references_alone()


def reclaimed(blocks: list[np.ndarray], k: int) -> bool:
    """Whether nobody but this list has an array of NumPy, or one that lies in its memory. Then it may be written to."""
    if _ALONE != 2 or type(blocks[k]) is not np.ndarray or sys.getrefcount(blocks[k]) != 2:
        return False
    return _made_writable(blocks[k])


class _GivenAway:
    """Stands for the blocks of an array that was given away, whose memory something else may lie in by now."""

    __slots__ = ()

    def _refuse(self, *_: Any) -> Any:
        raise donated("a PartitionedArray")

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __getattr__ = __reduce_ex__ = _refuse


GIVEN_AWAY: Any = _GivenAway()


def donated(where: str, argument: str | None = None) -> Exception:
    """The error for an array that was given away."""
    return DonatedError(
        message(
            where,
            argument=argument,
            got="an array that was given away (donate=True)",
            need="the one that came in its place",
            mend="params, state = optimizer.update(grads, state, params, donate=True); without donate the old stay",
        )
    )


def _made_writable(x: np.ndarray) -> bool:
    """Make x writable where no other array lies in its memory, and that is not much larger: whether it is so."""
    if not x.flags.c_contiguous:
        return False
    views, root = [x], x
    while not root.flags.owndata:
        base: Any = root.base
        # That of the view, this name, and the one that is asked; and it may stay at hand.
        if sys.getrefcount(base) != 3 + getattr(base, "at_hand", 0):
            return False
        root = base
        if type(base) is Lease:
            break
        if type(base) is not np.ndarray:
            return False
        views.append(base)
    if root.nbytes > 2 * x.nbytes:
        return False
    for view in reversed(views):
        view.setflags(write=True)
    return True


def owned(a: np.ndarray) -> np.ndarray:
    """A C-contiguous read-only array with the data of a: a copy, unless the owner has frozen it."""
    bare = np.asarray(a)
    if isinstance(a, Frozen) and not a.flags.writeable and a.flags.c_contiguous:
        return bare
    return sealed(copied(bare))


def owned_on(mesh: Mesh, a: Any, worker: int) -> np.ndarray:
    """`owned`, on the device of a worker where the mesh has one."""
    return owned(a) if mesh.places is None else mesh.places.own(a, worker)


def relayout(x: PartitionedArray, layout: Layout) -> PartitionedArray:
    """The same array in another layout: each worker sends what others need of its block, once. Collective."""
    if layout == x.layout:
        return x
    op = interned(Repartition, tuple(x.mesh.axes), x.layout, layout)

    def body(worker: Worker):
        block = worker.comm.given(x.blocks[worker.index])
        call = Call("relayout", op.axes, x.dtype, block.shape, detail=f"{x.layout} to {layout}", alike=op.alike)
        return op.start(worker.comm, worker.group(op.axes), block, call).wait()[0]

    return one_copy(x.mesh.run(body).results, layout, x.mesh)
