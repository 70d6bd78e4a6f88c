"""Load a checkpoint onto any mesh, in any layout: each process reads what its blocks need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff.dtypes import dtype_name
from spmd.errors import CheckpointError, describe, nearest
from spmd.io.manifest import ArrayEntry
from spmd.io.members import Members, members_of
from spmd.io.reading import open_checkpoint
from spmd.io.states import StateHandler, handler_of
from spmd.io.structs import ShapeDtypeStruct
from spmd.io.trees import ROOT, constant, decoded, is_constant, json_nodes, map_leaves
from spmd.kernels import on_device
from spmd.layout import Layout, Spec
from spmd.mesh import Mesh
from spmd.placement import checked_layout, made, mesh_for
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary
from spmd.transport.handles import read_only

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
    state, such as modules and optimisers, are given theirs in place.
    specs: without `like`, a spec or a prefix of the tree that was saved: global arrays on `mesh`, by default that of
    the enclosing `with mesh:`. Without both: arrays of NumPy.
    names: patterns of the names to load, such as "params.*": what else `like` has stays as it is; without `like`, the
    result is a dictionary by name. rename: a function of a name of `like` that gives the name in the checkpoint.
    strict: raise if `like` wants leaves that are missing, or does not want leaves that there are, as PyTorch's
    `load_state_dict`. False: the first stay as they are, the second are not read.
    convert: convert the entries to the dtype of `like`; else another dtype is an error.

    Each process reads the chunks that hold what its blocks need, once, and compares their checksums. Collective if some
    of the result is on a mesh of several processes, and in bodies.

        params = spmd.load("run/7", specs={"w": P("model"), "b": P()})
        state = spmd.load("run/7", like={"params": params, "optimizer": optimizer.init(params), "epoch": 0})

    Raises CheckpointError if there is no checkpoint, and for names, shapes and dtypes that do not fit;
    CorruptCheckpointError, with the name of the leaf, for bytes that are not those that were written.
    """
    meshes: list[Mesh] = []
    structs: list[Any] = []
    map_leaves(like, lambda _, x: _note_meshes(x, meshes, structs))
    if specs is not None or structs:
        mesh = mesh_for(mesh, _WHERE)
        meshes.append(mesh)
    members = members_of(_WHERE, meshes, alone=not meshes)
    for _ in range(_ATTEMPTS):
        loading = _Loading(Path(os.path.abspath(os.fspath(path))), members, mesh, names, rename, strict, convert)
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


class _Loading:
    """One call of `load`."""

    def __init__(
        self,
        path: Path,
        members: Members,
        mesh: Mesh | None,
        names: str | Sequence[str] | None,
        rename: Rename | None,
        strict: bool,
        convert: bool,
    ):
        self.path = path
        self.members = members
        self.mesh = mesh
        self.patterns = [names] if isinstance(names, str) else names
        self.rename = rename or (lambda name: name)
        self.strict = strict
        self.convert = convert

    def run(self, like: Any, specs: Any) -> bool:
        """Whether all members have read the same checkpoint. If not, it was replaced meanwhile."""
        ids = self.members.together(self._open)
        with self.reader:
            return len(set(ids)) == 1 and all(self.members.together(lambda: self._read(like, specs)))

    def _open(self) -> str:
        self.reader = open_checkpoint(self.path)
        manifest = self.reader.manifest
        self.nodes = {name: node for name, node, _ in json_nodes(manifest.tree)}
        self.leaves = [name for name, _, is_leaf in json_nodes(manifest.tree) if is_leaf]
        return manifest.id

    def _read(self, like: Any, specs: Any) -> bool:
        try:
            self.result = self._whole_tree(specs) if like is None else self._like(like)
        except CheckpointError:
            if self.reader.is_replaced():
                return False
            raise
        return True

    def _is_selected(self, name: str) -> bool:
        return self.patterns is None or any(fnmatchcase(name, pattern) for pattern in self.patterns)

    # Without `like`

    def _whole_tree(self, specs: Any) -> Any:
        node = self.reader.manifest.tree
        if self.patterns is not None:
            chosen = [name for name in self.leaves if self._is_selected(name)]
            self._check_patterns(chosen)
            node = {"dict": [[name, self.nodes[name]] for name in chosen]}
        wanted = decoded(node, lambda leaf: _Leaf(self.reader.manifest.arrays[leaf["array"]], leaf.get("kind", "")))
        spec_of: dict[int, Spec] = {}
        if specs is not None:
            spec_of = {
                id(leaf.value): leaf.spec
                for leaf in spread(_WHERE, "tree", "specs", specs, wanted)
                if leaf.spec is not None
            }
        return map_leaves(wanted, lambda _, x: self._bare_or_put(x, spec_of) if isinstance(x, _Leaf) else x)

    def _bare_or_put(self, leaf: _Leaf, spec_of: dict[int, Spec]) -> Any:
        spec = spec_of.get(id(leaf))
        if spec is not None:
            return self._put(leaf.entry, spec, leaf.entry.dtype)
        array = self.reader.read(leaf.entry)
        return array[()] if leaf.kind == "scalar" else array

    def _check_patterns(self, chosen: list[str]) -> None:
        for pattern in self.patterns or ():
            if not any(fnmatchcase(name, pattern) for name in chosen):
                raise CheckpointError.at(
                    _WHERE,
                    argument="names",
                    got=f"{pattern!r}, which fits none of {_some(self.leaves)}",
                    need="patterns of names of the checkpoint, such as 'params.*'",
                    mend="spmd.io.inspect(path) lists the names",
                )

    def _put(self, entry: ArrayEntry, spec: Spec, dtype: np.dtype, mesh: Mesh | None = None) -> PartitionedArray:
        mesh = mesh_for(mesh or self.mesh, _WHERE)
        layout = checked_layout(_WHERE, entry.shape, spec, mesh, f"the spec of {entry.name!r}")

        def block(index: tuple[slice, ...]) -> np.ndarray:
            return read_only(self.reader.read(entry, tuple((s.start, s.stop) for s in index), dtype))

        return made(_WHERE, entry.name, layout, mesh, block, "")

    # With `like`

    def _like(self, like: Any) -> Any:
        objects: dict[str, tuple[Any, StateHandler]] = {}
        wanted: list[str] = []

        def note(name: str, x: Any) -> None:
            handler = handler_of(x)
            if handler is None:
                wanted.append(name)
                return
            part = _Part(self, name)
            objects[name] = (x, handler)
            wanted.extend(f"{name}.{below}" if name != ROOT else below for below in handler.names(x, part.names()))

        map_leaves(like, note)
        self._check_names([name for name in wanted if self._is_selected(name)])
        others = {name: x for name, (x, _) in objects.items()}

        def make(name: str, x: Any) -> Any:
            if name in objects:
                part = _Part(self, name)
                if part.names() and (self.patterns is None or any(map(self._is_selected, part.full_names()))):
                    objects[name][1].load(x, part, others)
                return x
            found = self._is_selected(name) and self.rename(name) in self.nodes
            return self.leaf(name, x) if found else x

        return map_leaves(like, make)

    def _check_names(self, wanted: list[str]) -> None:
        if not self.strict:
            return
        renamed = {self.rename(name) for name in wanted}
        known = set(self.leaves)
        missing = [name for name in wanted if self.rename(name) not in known]
        unexpected = [name for name in self.leaves if name not in renamed and self._is_selected(name)]
        if not missing and not unexpected:
            return
        got = []
        if missing:
            close = nearest(self.rename(missing[0]), self.leaves, 1)
            got.append(f"missing in the checkpoint: {_some(missing)}{f' (near: {close[0]!r})' if close else ''}")
        if unexpected:
            got.append(f"unexpected there: {_some(unexpected)}")
        raise CheckpointError.at(
            _WHERE,
            argument="like",
            got="; ".join(got),
            need="the leaves that were saved",
            mend="names=[...] loads some; rename=f maps names of like to those of the checkpoint; strict=False leaves "
            "what is missing as it is",
        )

    def leaf(self, name: str, like: Any) -> Any:
        """The leaf of a name as `like`."""
        node = self.nodes[self.rename(name)]
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
        shape = getattr(like, "shape", None)
        if shape is None or tuple(shape) != entry.shape:
            raise CheckpointError.at(
                _WHERE,
                argument=f"like, the leaf {name!r}",
                got=f"{describe(like)} for a leaf of shape {list(entry.shape)}",
                need="the shape that was saved",
                mend="a P or a balanced layout fits any shape; names= leaves this leaf out",
            )
        for kind in type(like).__mro__:
            if kind in MAKERS:
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


class _Leaf:
    """An array of the checkpoint in a tree that is loaded without `like`."""

    def __init__(self, entry: ArrayEntry, kind: str):
        self.entry = entry
        self.kind = kind
        self.shape = entry.shape
        self.dtype = entry.dtype


class _Part:
    """What the checkpoint holds of an object with a state."""

    def __init__(self, loading: _Loading, name: str):
        self.loading = loading
        self.name = name
        self._saved_name = "" if name == ROOT else loading.rename(name)

    def _below(self, name: str) -> str:
        return f"{self._saved_name}.{name}" if self._saved_name else name

    def names(self) -> list[str]:
        prefix = f"{self._saved_name}." if self._saved_name else ""
        return [name.removeprefix(prefix) for name in self.loading.leaves if name.startswith(prefix)]

    def full_names(self) -> list[str]:
        return [self._below(name) for name in self.names()]

    def tree(self, array: Callable[[str, ArrayEntry, str], Any] | None = None) -> Any:
        reader = self.loading.reader

        def leaf(node: Any) -> Any:
            entry = reader.manifest.arrays[node["array"]]
            kind = node.get("kind", "")
            if array is not None:
                return array(entry.name, entry, kind)
            value = reader.read(entry)
            return value[()] if kind == "scalar" else value

        return decoded(self.loading.nodes[self._saved_name], leaf)

    def read(self, name: str, like: Any) -> Any:
        return self.loading.leaf(self._below(name), like)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(map(repr, names[:8]))
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
