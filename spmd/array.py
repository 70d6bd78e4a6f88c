"""Global arrays whose blocks lie on the workers of a mesh."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.admission import ADMITTED
from spmd.autodiff.dispatch import place_of_out
from spmd.autodiff.primitive import Method, name_of
from spmd.autodiff.staging.function_tables import NO_NUMBER
from spmd.autodiff.staging.recorder import is_slot
from spmd.autodiff.staging.together import RECORDING, check_values, is_over
from spmd.autodiff.static_array import StaticArray
from spmd.autodiff.tracer import Array, missing, value_of
from spmd.device import contiguous, to_host
from spmd.errors import ClosureError, LayoutError, MissingMethodError, describe
from spmd.global_functions import MADE_LIKE, NATIVE, function_of, refuse_out
from spmd.layout import Layout, P
from spmd.mesh import WORKER, Mesh
from spmd.ownership import DONATED, donated_error, owned
from spmd.representations.tables import Report, Summarised
from spmd.resharding import moved_blocks, summed_blocks
from spmd.settings import gather_limit
from spmd.tracebacks import api_boundary
from spmd.transport.handles import read_only

__all__ = [
    "PartitionedArray",
    "check_usable",
    "closure_error",
    "device_of_worker",
    "joined_copies",
    "layout_of",
    "owned_on",
    "reduced_together",
    "relayout",
    "share_copies",
]


class PartitionedArray(Summarised, StaticArray):
    """A global array of which each worker of a mesh holds a block. Immutable.

    shape, dtype: of the whole array. layout: which box each worker holds. mesh: whose workers. blocks: the blocks of
    this process, by worker; copies of a block are one array.

    NumPy's functions, operators and methods act on the whole array, differentiably; results lie on the same mesh.
    `x.numpy()` assembles it on every process (collective under MPI), `np.asarray(x)` where all blocks are here.

        >>> u = spmd.put(np.arange(4.0), P("x"), spmd.Mesh(x=2))
        >>> np.cumsum(u) - u, u.blocks[1]
        (PartitionedArray([0., 0., 1., 3.], dtype=float64, spec=P('x')), array([2., 3.]))
    """

    __slots__ = ("__weakref__", "_reduced", "blocks", "compared", "dtype", "layout", "mesh")
    __array_priority__ = 500.0

    def __init__(self, blocks: Mapping[int, np.ndarray], layout: Layout, mesh: Mesh):
        self.blocks = dict(blocks)
        self.layout = layout
        self.mesh = mesh
        self.dtype = next(iter(self.blocks.values())).dtype
        self._reduced: PartitionedArray | None = None
        self.compared: bool | None = None
        """Whether processes were compared, or are sure to agree. False for bare data, None for what is computed."""

    def __copy__(self) -> PartitionedArray:
        """Another array with the same blocks, which survive if this array is donated."""
        copy = object.__new__(type(self))
        for name in ("_reduced", "blocks", "compared", "dtype", "layout", "mesh"):
            setattr(copy, name, getattr(self, name))
        if self.blocks is not DONATED:
            copy.blocks = dict(self.blocks)
        return copy

    def __deepcopy__(self, memo: object) -> PartitionedArray:
        return self.__copy__()

    @api_boundary
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the blocks if this process holds all. Raises MeshError if other processes or GPUs hold some."""
        if self.blocks is DONATED:
            raise donated_error("pickle of a PartitionedArray")
        self.mesh.check_pickled("a PartitionedArray")
        return _unpickled, (self.blocks, self.layout, self.mesh, self.compared)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def spec(self) -> Any:
        """The mesh axes that split each dimension; for an array on a grid its layout."""
        return self.layout if self.layout.spec is None else self.layout.spec

    @property
    def reduced(self) -> PartitionedArray:
        """The same array without unreduced axes: the sums over them are taken once, and kept. Collective then."""
        if not self.layout.unreduced:
            return self
        check_usable("x.reduced", self)
        if self.settled is not self:
            return self.settled
        reduced = _moved(self, self.layout.reduced)
        if RECORDING.get() is None or self._is_recorded:  # a program has no values that may be kept
            self._reduced = reduced
        return reduced

    @property
    def settled(self) -> PartitionedArray:
        """The array with its sums taken if they are known, else the array. Sends nothing."""
        known = self._reduced
        return self if known is None or known.blocks is DONATED or is_over(known) else known

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array; copies count once."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    @property
    def is_here(self) -> bool:
        """Whether this process holds every block, all parts of sums, and their values."""
        if self._is_recorded:
            return False
        if self.layout.unreduced:
            return len(self.blocks) == self.mesh.size
        positions = {self.layout.positions(w) for w in self.blocks} - {None}
        return len(positions) == math.prod(len(c) for c in self.layout.cuts)

    @api_boundary
    def numpy(self) -> np.ndarray:
        """The whole array on the host, read-only, assembled on every process. Collective under MPI."""
        check_values(self, "x.numpy", "NumPy's functions on the array itself; spmd.reshard(x, P()) for copies of it")
        return self.bare()

    def bare(self) -> Any:
        """`numpy`; within spmd.jit what stands for that array."""
        return self._whole()._assembled()

    @property
    def _is_recorded(self) -> bool:
        """Whether spmd.jit records what is done with the array: its blocks are stand-ins, which have no values."""
        return any(map(is_slot, self.__spmd_parts__()))

    def _whole(self) -> PartitionedArray:
        """The same array in a layout in which every process holds all of it."""
        check_usable("PartitionedArray.numpy", self)
        if self._is_recorded:
            return relayout(self, self.mesh.layout(self.shape, P()))
        every = (*range(self.mesh.size),)
        everywhere = len(self.blocks) == self.mesh.size or [*self.layout.holders.values()] == [every]
        return self.reduced if everywhere else relayout(self, self.mesh.layout(self.shape, P()))

    def gathered(self) -> Any:
        """The whole array as one array, on the device if the blocks are there. Collective under MPI."""
        if self.mesh.places is None:
            return self.numpy()
        w, block = next(iter(relayout(self, self.mesh.layout(self.shape, P())).blocks.items()))
        return self.mesh.places.own(block, w)

    def _assembled(self) -> np.ndarray:
        if self.layout.unreduced:
            return self.reduced._assembled()
        blocks = {w: b for w, b in self.blocks.items() if self.layout.positions(w) is not None}
        first: Any = next(iter(blocks.values()))
        if self._is_recorded:
            return first.program.together.joined(blocks)
        if first.shape == self.shape:
            return read_only(to_host(first))
        out = np.empty(self.shape, self.dtype)
        for w, b in blocks.items():
            out[self.layout.slices(w)] = to_host(b)
        out.flags.writeable = False
        return out

    @api_boundary
    def __array__(self, dtype=None, copy=None):
        check_usable("np.asarray", self)
        check_values(self, "np.asarray, or a function that calls it", "functions of NumPy on the array itself")
        if not self.is_here:
            raise LayoutError.at(
                "np.asarray",
                got=f"{describe(self)}, of which this process holds a part",
                need="an array that is wholly here; assembling it takes all processes",
                mend="x.numpy() on all processes",
            )
        whole = self._assembled()
        if copy is not False:
            return np.array(whole, dtype=dtype)
        if not any(whole is b for b in self.blocks.values()) or dtype not in (None, self.dtype):
            raise LayoutError.at(
                "np.asarray",
                argument="copy",
                got=f"False, for {describe(self)}",
                need="True or None: it is put together, or converted",
                mend="leave copy out",
            )
        return whole

    def __dlpack_device__(self) -> tuple[int, int]:
        check_usable("__dlpack_device__", self)
        block = self.__spmd_parts__()[0] if self.mesh.places is None else self._block("__dlpack_device__")
        return block.__dlpack_device__()

    @api_boundary
    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """The data for another library: of an array in one block without a copy. On the host any other is assembled.

        The other library's stream waits for the current stream of this thread. One that does not ask for version 1 of
        the protocol cannot be told that data are read-only, and gets a copy.
        """
        options = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        options = {name: option for name, option in options.items() if option is not None}
        check_usable("__dlpack__", self)
        may_copy = self.mesh.places is None and copy is not False
        data = self._assembled() if may_copy and self.is_here else self._block("__dlpack__")
        if may_copy and (max_version is None or max_version < (1, 0)):
            data = np.array(data)
        return data.__dlpack__(**options)

    def _block(self, where: str) -> Any:
        check_usable(where, self)
        if self.layout.unreduced:
            return self.reduced._block(where)
        whole = next((b for b in self.blocks.values() if b.shape == self.shape), None)
        if whole is None:
            raise LayoutError.at(
                where,
                got=f"{describe(self)}, in several blocks",
                need="an array that lies in one piece",
                mend="x.gathered(), or spmd.put(x, P())",
            )
        return whole

    @api_boundary
    def item(self, *index: int) -> Any:
        """An entry as a Python number: that of an array of size 1, or the one at an index."""
        if len(index) == 1:
            index = tuple(map(int, np.unravel_index(index[0], self.shape)))
        entry = operator.getitem(self, index) if index else self  # type: ignore[index]
        return entry._number("item").item()

    def _number(self, kind: str) -> np.ndarray:
        check_usable(f"{kind}()", self)
        check_values(self, f"{kind}(){', as `if` calls it' * (kind == 'bool')}", NO_NUMBER)
        if self.layout.unreduced:
            return self.reduced._number(kind)
        if self.size != 1 or not self.is_here:
            raise LayoutError.at(
                f"{kind}()",
                got=describe(self),
                need="an array of one entry that every process holds",
                mend="x.numpy() assembles it",
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
        """The first hit of `find` in the blocks, (index, entry, count), by its index in the whole. Collective."""
        if self.layout.unreduced:
            return self.reduced.__spmd_search__(find)
        own = {w: find(b) if self.layout.owners[w] == w else None for w, b in self.blocks.items()}
        hits = {w: hit for w, hit in sorted(self.mesh.transport.share(own).items()) if hit is not None}
        for w, (index, entry, _) in hits.items():
            at = [i + start for i, (start, _) in zip(index, self.layout.boxes[w], strict=True)]
            return at, entry, sum(count for _, _, count in hits.values())

    def __spmd_parts__(self) -> list[Any]:
        """The blocks of this process."""
        return [] if self.blocks is DONATED else [block for _, block in sorted(self.blocks.items())]

    def __str__(self) -> str:
        """The entries, collective as `x.numpy()`; in a body, and of more than SPMD_GATHER_LIMIT, a description."""
        usable = WORKER.get() is None and self.blocks is not DONATED
        if usable and (self.is_here or self.nbytes <= gather_limit()):
            return str(self.numpy())
        return f"<{describe(self)} on {self.mesh}{self._donated_note}>"

    def __format__(self, spec: str) -> str:
        return format(self._number("format")[()], spec) if spec else str(self)

    def __repr__(self) -> str:
        uneven = "" if self.layout.balanced else f", blocks of {self.layout.cuts}"
        if self.blocks is not DONATED and self.is_here and WORKER.get() is None:
            data = np.array2string(self._assembled(), separator=", ", threshold=20, edgeitems=2, prefix=" " * 17)
            return f"PartitionedArray({data}, dtype={self.dtype}, spec={self.spec}{uneven})"
        return f"PartitionedArray(shape={self.shape}, dtype={self.dtype}, spec={self.spec}{uneven}{self._donated_note})"

    def _report(self) -> Report:
        where = f"{self.mesh}, transport {self.mesh.transport.name}, device {self.mesh.device}"
        held = ("this process", f"{len(self.mesh.local_workers)} of {self.mesh.size} workers")
        rows = [("dtype", str(self.dtype)), ("mesh", where), held]
        return self.layout.report(f"PartitionedArray{self._donated_note}", rows, self.dtype.itemsize)

    _donated_note = property(lambda self: ", given away" if self.blocks is DONATED else "")

    def __hash__(self):
        raise TypeError("arrays are not hashable")

    @api_boundary
    def __setitem__(self, index, value):
        raise LayoutError.at("x[i] = v", got=describe(self), need="arrays are immutable", mend="x = x.at[i].set(v)")

    @api_boundary
    def __getattr__(self, name: str):
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"'PartitionedArray' object has no attribute {name!r}")
        need, mend = missing.get(name, ("a method that global arrays have", f"x.numpy().{name}"))
        raise MissingMethodError.at(f"x.{name}", got=describe(self), need=need, mend=mend.format(data="x.numpy()"))

    @api_boundary
    def astype(
        self, dtype: Any, order: Any = "K", casting: Any = "unsafe", subok: Any = True, copy: Any = True
    ) -> PartitionedArray:
        if not np.can_cast(self.dtype, dtype, casting):  # type: ignore[arg-type]
            raise TypeError(f"cannot cast from {self.dtype} to {dtype} by the rule {casting!r}")
        x = self if self.dtype == dtype else self.reduced
        return x.on_blocks(lambda b: b.astype(dtype))

    def on_blocks(self, f: Callable[[np.ndarray], np.ndarray]) -> PartitionedArray:
        """Apply f to every distinct block; of an unreduced array to the parts of the sum."""
        done: dict[int, np.ndarray] = {}
        blocks = {}
        for w, b in self.blocks.items():
            if id(b) not in done:
                with device_of_worker(self.mesh, w):
                    done[id(b)] = as_block(f(b))
            blocks[w] = done[id(b)]
        return PartitionedArray(blocks, self.layout, self.mesh)

    @api_boundary
    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        check_usable(f"np.{ufunc.__name__}", self)
        if any(type(x) is Array for x in inputs):
            return NotImplemented
        if kwargs:
            refuse_out(name_of(ufunc), kwargs)
        if kwargs and method == "__call__" and kwargs.pop("where", True) is not True:
            raise LayoutError.at(
                name_of(ufunc),
                argument="where",
                got="a mask",
                need="no where argument",
                mend="np.where(mask, f(x), other)",
            )
        if method == "__call__" and ufunc.signature is None:
            return NATIVE[np.ufunc](ufunc, inputs, kwargs)
        handler = function_of(ufunc if method == "__call__" else Method((ufunc, method)))
        assert handler is not None
        return handler(*inputs, **kwargs)

    @api_boundary
    def __array_function__(self, fun, types, args, kwargs):
        check_usable(name_of(fun), self)
        if any(issubclass(t, Array) for t in types):
            return NotImplemented
        if len(args) > (place := place_of_out(fun)):
            refuse_out(name_of(fun), {"out": args[place]})
        refuse_out(name_of(fun), kwargs)
        if fun in MADE_LIKE:  # NumPy removes the argument `like` by which it comes here
            return MADE_LIKE[fun](self, *args, **kwargs)
        handler = NATIVE.get(fun) or function_of(fun)
        assert handler is not None
        return handler(*args, **kwargs)


def _unpickled(blocks: dict[int, np.ndarray], layout: Layout, mesh: Mesh, compared: bool | None) -> PartitionedArray:
    """The array of a pickle, whose blocks become read-only again."""
    x = PartitionedArray({w: read_only(block) for w, block in blocks.items()}, layout, mesh)
    x.compared = compared
    return x


def layout_of(x: Any) -> Layout | None:
    """The layout of a global array, traced or not; None for anything else."""
    x = value_of(x)
    return x.layout if isinstance(x, PartitionedArray) else None


def as_block(x) -> np.ndarray:
    """A computed array as a block: contiguous and read-only."""
    return read_only(contiguous(x))


_no_device = nullcontext()


def device_of_worker(mesh: Mesh, worker: int) -> Any:
    """A context in which computations run on the device of a worker."""
    return _no_device if mesh.places is None else mesh.places.at(worker)


def closure_error(where: str, x: PartitionedArray, argument: str | None = None) -> Exception:
    """The error for a global array in a body that is not one of its arguments."""
    return ClosureError.at(
        where,
        argument=argument,
        got=f"{describe(x)} in a body",
        need="bodies that use their arguments only",
        mend=f"pass it to the map as an argument, with {x.spec} in in_specs",
    )


def check_usable(where: str, x: PartitionedArray) -> None:
    """Raise in a body, which uses its arguments only, and for a donated array."""
    if WORKER.get() is not None:
        raise closure_error(where, x)
    if x.blocks is DONATED:
        raise donated_error(where)


def share_copies(blocks: Mapping[int, np.ndarray], layout: Layout, mesh: Mesh) -> PartitionedArray:
    """An array from the blocks of the workers of this process. Workers that hold copies share the first one."""
    return PartitionedArray(mesh.shared(layout, blocks.__getitem__), layout, mesh)


def joined_copies(copies: Mapping[int, Any]) -> Any:
    """What workers have copies of: that of the first worker here; a value of recorded programs is one of all."""
    first, programs = next(iter(copies.values())), RECORDING.get()
    return programs.joined(copies) if programs is not None and is_slot(first) else first


tree.LEAF_TYPES.add(PartitionedArray)
ADMITTED.add(PartitionedArray)


def owned_on(mesh: Mesh, a: Any, worker: int) -> np.ndarray:
    """`owned`, on the device of a worker if the mesh has devices."""
    return owned(a) if mesh.places is None else mesh.places.own(a, worker)


def relayout(x: PartitionedArray, layout: Layout) -> PartitionedArray:
    """The same array in another layout. Each worker sends the parts of its block that others need. Collective."""
    if layout == x.layout:
        return x
    if x.settled is not x:
        return relayout(x.settled, layout)
    return x.reduced if layout == x.layout.reduced else _moved(x, layout)


def _moved(x: PartitionedArray, layout: Layout) -> PartitionedArray:
    blocks = moved_blocks(x.blocks, x.layout, layout, x.mesh)
    return share_copies({w: as_block(b) for w, b in blocks.items()}, layout, x.mesh)


def reduced_together(arrays: Sequence[PartitionedArray]) -> list[PartitionedArray]:
    """Unreduced arrays with their sums taken, those over the same axes in one collective."""
    mesh = arrays[0].mesh
    if any(x.mesh != mesh or x.settled is not x for x in arrays):
        return [x.reduced for x in arrays]
    tables = summed_blocks([(x.blocks, x.layout) for x in arrays], mesh)
    return [
        share_copies({w: as_block(b) for w, b in blocks.items()}, x.layout.reduced, mesh)
        for x, blocks in zip(arrays, tables, strict=True)
    ]
