"""Load a checkpoint onto any mesh, in any layout: each process reads what its blocks need."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff.dtypes import dtype_name
from spmd.errors import CheckpointError, describe, nearest
from spmd.io.container import stored_as
from spmd.io.manifest import ArrayEntry
from spmd.io.members import Members, members_of
from spmd.io.patterns import Patterns
from spmd.io.reading import open_checkpoint
from spmd.io.states import StateHandler, array_of_kind, handler_of
from spmd.io.structs import ShapeDtypeStruct
from spmd.io.trees import ROOT, constant, decoded, is_constant, joined, json_nodes, map_leaves, some
from spmd.kernels import on_device
from spmd.layout import Layout, Spec
from spmd.mesh import Mesh
from spmd.ownership import freeze
from spmd.placement import checked_layout, made, mesh_for
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary

__all__ = ["MAKERS", "load"]

_WHERE = "spmd.load"
Rename = Callable[[str], str]

MAKERS: dict[type, Callable[[Any, str, Callable[..., np.ndarray]], Any]] = {}
"""What other libraries register: by the class of their arrays, a function of an array like which to load, the name of
the leaf, and read(dtype, layout, index), which gives the block of a worker in a layout, or with layout=None the whole,
as a new array of the host in the NumPy dtype that corresponds."""


@api_boundary
def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    specs: Any = None,
    mesh: Mesh | None = None,
    names: str | Sequence[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    convert: bool = False,
) -> Any:
    """Load what `spmd.save` saved, onto any mesh, in any layout.

    path: a folder that `spmd.save` wrote; or a safetensors file of another tool, the index of several, or a folder of
    either: a dictionary by the names of the tensors.
    like: a tree of what is wanted: global arrays, whose layout and mesh the loaded ones get, arrays of NumPy, CuPy and
    PyTorch, `spt.Parameter`s, `spmd.ShapeDtypeStruct`s; other leaves are constants, which are replaced. Objects with a
    state, such as modules and optimisers, are given theirs in place, when all processes have read theirs.
    specs: without `like`, a spec or a prefix of the tree that was saved: global arrays on `mesh`, by default that of
    the enclosing `with mesh:`. Without both: arrays of NumPy.
    names: patterns of the names in the checkpoint to load, such as "params.*": what else `like` has stays as it is;
    without `like`, the result is a dictionary by name. rename: a function of a name of `like` that gives the name in
    the checkpoint.
    strict: raise if `like` wants leaves that are missing, or does not want leaves that there are, as PyTorch's
    `load_state_dict`. False: the first stay as they are, the second are not read.
    convert: convert the entries to the dtype of `like`; else another dtype is an error.

    Each process reads the chunks that hold what its blocks need, once, and compares their checksums. Collective if some
    of the result is on a mesh of several processes, and in bodies.

    Raises CheckpointError if there is no checkpoint, and for names, shapes and dtypes that do not fit;
    CorruptCheckpointError, with the name of the leaf, for bytes that are not those that were written.

        >>> import tempfile
        >>> w = spmd.put(np.arange(6.0), P("x"), spmd.Mesh(x=2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     spmd.save(folder, {"w": w, "epoch": 3})
        ...     spmd.load(folder, specs={"w": P("model"), "epoch": None}, mesh=spmd.Mesh(model=3))
        {'w': PartitionedArray([0., 1., 2., 3., 4., 5.], dtype=float64, spec=P('model')), 'epoch': 3}
    """
    meshes: list[Mesh] = []
    structs: list[Any] = []
    map_leaves(like, lambda _, x: _note_meshes(x, meshes, structs))
    _check_options(like, specs, mesh, rename)
    patterns = None if names is None else Patterns(_WHERE, names)
    if specs is not None or structs:
        mesh = mesh_for(mesh, _WHERE)
        meshes.append(mesh)
    members = members_of(_WHERE, meshes, alone=not meshes)
    for _ in range(_ATTEMPTS):
        loading = _Loading(Path(os.path.abspath(os.fspath(path))), members, mesh, patterns, rename, strict, convert)
        if loading.run(like, specs):
            return loading.result
    raise CheckpointError.at(
        _WHERE,
        argument="path",
        got=f"{path}, of which the checkpoint was replaced {_ATTEMPTS} times while it was read",
        need="a checkpoint that stays while it is read",
        mend="save to a folder for each step, as spmd.io.CheckpointManager does",
    )


_ATTEMPTS = 100


def _note_meshes(x: Any, meshes: list[Mesh], structs: list[Any]) -> None:
    if type(x) is PartitionedArray:
        meshes.append(x.mesh)
    elif isinstance(x, ShapeDtypeStruct) and x.spec is not None:
        structs.append(x)


def _check_options(like: Any, specs: Any, mesh: Any, rename: Any) -> None:
    """Raise for options that would have no effect."""
    if mesh is not None:
        mesh_for(mesh, _WHERE)
    if like is not None and specs is not None:
        raise CheckpointError.at(
            _WHERE,
            argument="specs",
            got="specs beside like",
            need="one of the two",
            mend="spmd.ShapeDtypeStruct(shape, dtype, spec) in like gives the layout of a leaf",
        )
    if rename is not None and (like is None or not callable(rename)):
        raise CheckpointError.at(
            _WHERE,
            argument="rename",
            got=describe(rename) if like is not None else "a function, and no like",
            need="a function of the names of like",
            mend="rename=lambda name: table.get(name, name)",
        )


class _Loading:
    """One call of `load`."""

    def __init__(
        self,
        path: Path,
        members: Members,
        mesh: Mesh | None,
        patterns: Patterns | None,
        rename: Rename | None,
        strict: bool,
        convert: bool,
    ):
        self.path = path
        self.members = members
        self.mesh = mesh
        self.patterns = patterns
        self._rename = rename
        self.strict = strict
        self.convert = convert
        self.changes: list[Callable[[], None]] = []
        """What gives objects the states that were read. It runs when all members have read theirs."""
        self.layouts: dict[str, Layout] = {}
        """Of the global arrays that were made."""

    def run(self, like: Any, specs: Any) -> bool:
        """Whether all members have read the same checkpoint. If not, it was replaced meanwhile."""
        ids = self.members.together(self._open)
        with self.reader:
            if len(set(ids)) > 1:
                return False
            digests = self.members.together(lambda: self._read(like, specs))
            if not all(digests):
                return False
            self._check_layouts(digests)
            for change in self.changes:
                change()
            return True

    def _check_layouts(self, digests: list[str]) -> None:
        """Raise if members have not made the same global arrays, in the same layouts."""
        other = next((m for m, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return
        shown = self.members.share({name: repr(layout) for name, layout in self.layouts.items()})
        one, two = shown[0], shown[other]
        name = next(name for name in [*one, *two] if one.get(name) != two.get(name))
        here, there = (layouts.get(name, "no global array") for layouts in (one, two))
        raise CheckpointError.at(
            _WHERE,
            argument="like or specs",
            got=f"for {name!r} {here} on {self.members.describe(0)} and {there} on {self.members.describe(other)}",
            need="the same layout on all",
            mend="give the same like and the same specs everywhere",
        )

    def _open(self) -> str:
        self.reader = open_checkpoint(self.path)
        manifest = self.reader.manifest
        nodes = list(json_nodes(manifest.tree))
        self.leaves = {name: node for name, node, is_leaf in nodes if is_leaf}
        # A leaf and a node with children may have the same name, if keys have dots.
        self.nodes = self.leaves | {name: node for name, node, is_leaf in nodes if not is_leaf}
        return manifest.id

    def _read(self, like: Any, specs: Any) -> str:
        """A digest of the layouts of the global arrays; empty if the checkpoint was replaced meanwhile."""
        try:
            self.result = self._whole_tree(specs) if like is None else self._like(like)
        except CheckpointError:
            if self.reader.is_replaced():
                return ""
            raise
        return _digest(self.layouts)

    def rename(self, name: str) -> str:
        """The name in the checkpoint of a leaf or an object of `like`."""
        if self._rename is None:
            return name
        renamed = self._rename(name)
        if not isinstance(renamed, str):
            raise CheckpointError.at(
                _WHERE,
                argument="rename",
                got=f"{describe(renamed)} for {name!r}",
                need="the name in the checkpoint",
                mend="rename=lambda name: table.get(name, name)",
            )
        return renamed

    def is_selected(self, name: str) -> bool:
        """Whether the caller wants what has this name in the checkpoint."""
        return self.patterns is None or self.patterns.fit(name)

    # Without `like`

    def _whole_tree(self, specs: Any) -> Any:
        node = self.reader.manifest.tree
        if self.patterns is not None:
            chosen = [name for name in self.leaves if self.is_selected(name)]
            self._check_patterns(self.patterns, chosen)
            node = {"dict": [[name, self.leaves[name]] for name in chosen]}
        wanted = decoded(node, lambda leaf: _Leaf(self.reader.manifest.arrays[leaf["array"]], leaf.get("kind", "")))
        spec_of: dict[int, Spec] = {}
        if specs is not None:
            leaves = spread(_WHERE, "tree", "specs", specs, wanted)
            spec_of = {id(leaf.value): leaf.spec for leaf in leaves if leaf.spec is not None}
        return map_leaves(wanted, lambda _, x: self._bare_or_put(x, spec_of) if isinstance(x, _Leaf) else x)

    def _bare_or_put(self, leaf: _Leaf, spec_of: dict[int, Spec]) -> Any:
        spec = spec_of.get(id(leaf))
        if spec is not None:
            return self._put(leaf.entry, spec, leaf.entry.dtype)
        array = self.reader.read(leaf.entry)
        return array[()] if leaf.kind == "scalar" else array

    def _check_patterns(self, patterns: Patterns, chosen: Iterable[str]) -> None:
        idle = patterns.idle(chosen)
        if idle is not None:
            raise CheckpointError.at(
                _WHERE,
                argument="names",
                got=f"{idle!r}, which fits none of {some(self.leaves)}",
                need="patterns of names of the checkpoint, such as 'params.*'",
                mend="spmd.io.inspect(path) lists the names",
            )

    def _put(self, entry: ArrayEntry, spec: Spec, dtype: np.dtype, mesh: Mesh | None = None) -> PartitionedArray:
        mesh = mesh_for(mesh or self.mesh, _WHERE)
        layout = checked_layout(_WHERE, entry.shape, spec, mesh, f"the spec of {entry.name!r}")

        def block(index: tuple[slice, ...]) -> np.ndarray:
            return freeze(self.reader.read(entry, tuple((s.start, s.stop) for s in index), dtype))

        self.layouts[entry.name] = layout
        return made(_WHERE, entry.name, layout, mesh, block, "")

    # With `like`

    def _like(self, like: Any) -> Any:
        objects: dict[str, tuple[Any, StateHandler, _Part]] = {}
        wanted: list[str] = []

        def note(name: str, x: Any) -> None:
            handler = handler_of(x)
            if handler is None:
                wanted.append(name)
            else:
                objects[name] = (x, handler, _Part(self, name))

        map_leaves(like, note)
        others = {name: x for name, (x, _, _) in objects.items()}
        for name, (x, handler, part) in objects.items():
            part.wanted = [part.full_name(below) for below in handler.names(x, part.names(), others)]
            if not part.wanted and not part.is_there:
                part.wanted = [name]
            wanted.extend(part.wanted)
        self._check_names([name for name in wanted if self.is_selected(self.rename(name))])

        def make(name: str, x: Any) -> Any:
            if name not in objects:
                return self.leaf(name, x) if self.loads(name) else x
            x, handler, part = objects[name]
            if any(map(self.loads, part.wanted)) or (not part.wanted and self.is_selected(self.rename(name))):
                self.changes.append(handler.load(x, part, others))
            return x

        return map_leaves(like, make)

    def loads(self, name: str) -> bool:
        """Whether a leaf of `like` is loaded: it is wanted, and the checkpoint has it."""
        return self.rename(name) in self.leaves and self.is_selected(self.rename(name))

    def _check_names(self, wanted: list[str]) -> None:
        if not self.strict:
            return
        renamed = {self.rename(name) for name in wanted}
        missing = [name for name in wanted if self.rename(name) not in self.leaves]
        unexpected = [name for name in self.leaves if name not in renamed and self.is_selected(name)]
        if not missing and not unexpected:
            if self.patterns is not None:
                self._check_patterns(self.patterns, renamed)
            return
        got = []
        if missing:
            close = nearest(self.rename(missing[0]), self.leaves, 1)
            got.append(f"missing in the checkpoint: {some(missing)}{f' (near: {close[0]!r})' if close else ''}")
        if unexpected:
            got.append(f"unexpected there: {some(unexpected)}")
        raise CheckpointError.at(
            _WHERE,
            argument="like",
            got="; ".join(got),
            need="the leaves that were saved",
            mend="names=[...] loads some; rename=f maps names of like to those of the checkpoint; strict=False leaves "
            "what is missing as it is, and does not read what is unexpected",
        )

    def leaf(self, name: str, like: Any) -> Any:
        """The leaf of a name as `like`."""
        node = self.leaves[self.rename(name)]
        is_array = isinstance(node, dict) and "array" in node
        if is_constant(like) or not is_array:
            if is_array or not is_constant(like):
                raise CheckpointError.at(
                    _WHERE,
                    argument=f"like, the leaf {name!r}",
                    got=f"{describe(like)}, for {'an array' if is_array else repr(constant(node))} in the checkpoint",
                    need="an array for an array, a constant for a constant",
                    mend="np.asarray(x) of a number; None or 0 where a constant is wanted",
                )
            return constant(node)
        return self.array(name, self.reader.manifest.arrays[node["array"]], like)

    def array(self, name: str, entry: ArrayEntry, like: Any) -> Any:
        """An array of the checkpoint as `like`."""
        shape = _shape_of(like)
        if shape != entry.shape:
            raise CheckpointError.at(
                _WHERE,
                argument=f"like, the leaf {name!r}",
                got=f"{describe(like)} for a leaf of shape {list(entry.shape)}",
                need="the shape that was saved" if shape is not None else "an array, or a spmd.ShapeDtypeStruct",
                mend="a P or a balanced layout fits any shape; names= leaves this leaf out",
            )
        for kind in MAKERS:
            if isinstance(like, kind):
                return MAKERS[kind](like, name, partial(self._block, name, entry))
        dtype = self._dtype(name, entry, np.dtype(like.dtype))
        if type(like) is PartitionedArray:
            return self._put(entry, like.layout.reduced, dtype, like.mesh)
        if isinstance(like, ShapeDtypeStruct):
            return self._put(entry, like.spec, dtype) if like.spec is not None else self.reader.read(entry, None, dtype)
        array = self.reader.read(entry, None, dtype)
        if on_device(like):
            import cupy

            return cupy.asarray(array)
        return array[()] if isinstance(like, np.generic) else array

    def _block(self, name: str, entry: ArrayEntry, dtype: np.dtype, layout: Layout | None, index: int) -> np.ndarray:
        """The block of a worker in a layout, or the whole, for arrays of other libraries."""
        box = None if layout is None else layout.boxes[index]
        return self.reader.read(entry, box, self._dtype(name, entry, dtype))

    def _dtype(self, name: str, entry: ArrayEntry, dtype: np.dtype) -> np.dtype:
        """The dtype in which an array is loaded, in the byte order of this machine."""
        dtype = dtype.newbyteorder("=")
        if stored_as(dtype) is None and dtype.kind not in "fc":
            raise CheckpointError.at(
                _WHERE,
                argument=f"like, the leaf {name!r}",
                got=f"dtype {dtype_name(dtype)} for a leaf of {dtype_name(entry.dtype)}",
                need="a dtype of numbers",
                mend="convert what was loaded, by x.astype(dtype)",
            )
        if dtype != entry.dtype and not self.convert:
            raise CheckpointError.at(
                _WHERE,
                argument=f"like, the leaf {name!r}",
                got=f"dtype {dtype_name(dtype)} for a leaf of {dtype_name(entry.dtype)}",
                need="the dtype that was saved",
                mend="convert=True converts the entries",
            )
        if entry.dtype.kind == "c" and dtype.kind != "c":
            raise CheckpointError.at(
                _WHERE,
                argument=f"like, the leaf {name!r}",
                got=f"dtype {dtype_name(dtype)} for complex entries",
                need="a complex dtype: the imaginary parts would be lost",
                mend="load it as complex, and take x.real",
            )
        return dtype


def _digest(layouts: Mapping[str, Layout]) -> str:
    texts = {layout: repr(layout) for layout in layouts.values()}
    return hashlib.sha256(repr(sorted((name, texts[x]) for name, x in layouts.items())).encode()).hexdigest()


def _shape_of(x: Any) -> tuple[int, ...] | None:
    """The shape of an array, or of what stands for one; None of anything else."""
    is_array = not isinstance(x, type) and hasattr(x, "dtype") and hasattr(x, "shape")
    return tuple(x.shape) if is_array else None


class _Leaf:
    """An array of the checkpoint in a tree that is loaded without `like`."""

    def __init__(self, entry: ArrayEntry, kind: str):
        self.entry = entry
        self.kind = kind
        self.shape = entry.shape
        self.dtype = entry.dtype


class _Part:
    """What the checkpoint holds of an object with a state. wanted: the names of the leaves that the object needs."""

    def __init__(self, loading: _Loading, name: str):
        self.loading = loading
        self.name = name
        self.wanted: list[str] = []
        root = "" if "" in loading.nodes else ROOT
        self._saved_name = root if name == ROOT else loading.rename(name)

    @property
    def is_there(self) -> bool:
        return self._saved_name in self.loading.nodes

    def full_name(self, name: str) -> str:
        """The name of a leaf of the object in `like`."""
        return joined("" if self.name == ROOT else self.name, name) if name else self.name

    def names(self) -> list[str]:
        if self._saved_name in self.loading.leaves:
            return [""]
        prefix = f"{self._saved_name}." if self._saved_name else ""
        return [name.removeprefix(prefix) for name in self.loading.leaves if name.startswith(prefix)]

    def has(self, name: str) -> bool:
        return self.loading.loads(self.full_name(name))

    def has_tree(self, name: str) -> bool:
        saved = self.loading.rename(self.full_name(name))
        return saved in self.loading.nodes and self.loading.is_selected(saved)

    def tree(self, array: Callable[[ArrayEntry, str], Any] | None = None) -> Any:
        if not self.is_there:
            raise CheckpointError.at(
                _WHERE,
                argument=f"like, the object {self.name!r}",
                got=f"no tree {self._saved_name!r} in the checkpoint",
                need="the state as spmd.save wrote it",
                mend="rename= gets the name of the object too",
            )
        return self._decoded(self._saved_name, array)

    def read(self, name: str, like: Any) -> Any:
        return self.loading.leaf(self.full_name(name), like)

    def value(self, name: str) -> Any:
        return self._decoded(self.loading.rename(self.full_name(name)))

    def _decoded(self, saved: str, array: Callable[[ArrayEntry, str], Any] | None = None) -> Any:
        """The node of a name in the checkpoint, with the arrays that `array` makes, by default whole ones."""
        reader = self.loading.reader

        def leaf(node: Any) -> Any:
            entry, kind = reader.manifest.arrays[node["array"]], node.get("kind", "")
            return array(entry, kind) if array is not None else array_of_kind(kind, reader.read(entry))

        return decoded(self.loading.nodes[saved], leaf)

    def block(self, entry: ArrayEntry, layout: Layout | None = None, index: int = 0) -> np.ndarray:
        return self.loading.reader.read(entry, None if layout is None else layout.boxes[index])
