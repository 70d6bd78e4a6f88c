"""Mistakes in saving and loading: leaves that cannot be saved, names, shapes and dtypes that do not fit, and paths."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import spmd
from mistakes import EVEN, D, Row, run
from spmd import P
from spmd.errors import CheckpointError, CorruptCheckpointError, JitError, SpecError

SAVE, LOAD = "spmd.save", "spmd.load"
LEAF = "tree, the leaf 'x'"


def save(tree: Any, **options: Any) -> Callable[[], None]:
    def call() -> None:
        with tempfile.TemporaryDirectory() as folder:
            spmd.save(f"{folder}/checkpoint", tree() if callable(tree) else tree, **options)

    return call


def export(tree: Any, **options: Any) -> Callable[[], None]:
    def call() -> None:
        with tempfile.TemporaryDirectory() as folder:
            spmd.io.export(f"{folder}/exported", tree, **options)

    return call


def export_over(name: str) -> Callable[[], None]:
    """Export to a checkpoint, or to a file of it."""

    def call() -> None:
        with tempfile.TemporaryDirectory() as folder:
            spmd.save(folder, {"x": EVEN})
            spmd.io.export(f"{folder}/{name}", {"x": EVEN})

    return call


def model(files: dict[str, bytes]) -> Callable[[], Any]:
    """Load a folder of these files and of `w.safetensors`, which has a tensor w."""

    def call() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            spmd.io.export(folder, {"w": EVEN})
            (Path(folder) / "model.safetensors").rename(Path(folder) / "w.safetensors")
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            return spmd.load(folder)

    return call


def inspect_steps() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spmd.save(f"{folder}/step-3", {"x": EVEN})
        spmd.io.inspect(folder)


def write(form: str, tree: Any, **options: Any) -> Callable[[], None]:
    """Write Zarr or HDF5."""

    def call() -> None:
        with tempfile.TemporaryDirectory() as folder:
            getattr(spmd.io, f"write_{form}")(f"{folder}/fields", tree, **options)

    return call


def write_over(form: str, **options: Any) -> Callable[[], None]:
    """Write to a folder that something else wrote."""

    def call() -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "notes.txt").write_text("")
            getattr(spmd.io, f"write_{form}")(folder, EVEN, **options)

    return call


def uneven_in_a_body() -> None:
    def body(x):
        with tempfile.TemporaryDirectory() as folder:
            spmd.io.write_zarr(f"{folder}/fields", {"x": x})

    run(body, EVEN, out=None)


def load(*args: Any, tree: Any = None, **options: Any) -> Callable[[], Any]:
    """Load a checkpoint of two arrays and a number."""

    def call() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            spmd.save(folder, {"w": np.zeros((2, 3)), "z": np.ones(2) * 1j, "n": 3} if tree is None else tree)
            return spmd.load(folder, *args, **options)

    return call


def file(name: str, text: bytes) -> Callable[[], Any]:
    """Load from a file, or for a manifest from its folder."""

    def call() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(text)
            return spmd.load(folder if name == "manifest.json" else path)

    return call


def damaged() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        spmd.save(folder, {"w": np.zeros(3)})
        (path,) = Path(folder).glob("data-*")
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
        return spmd.load(folder)


def missing() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        spmd.save(folder, {"w": np.zeros(3)})
        for path in Path(folder).glob("data-*"):
            path.unlink()
        return spmd.load(folder)


def on_a_file(f: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    def call() -> Any:
        with tempfile.NamedTemporaryFile() as taken:
            return f(taken.name, *args)

    return call


def below_a_file() -> None:
    with tempfile.NamedTemporaryFile() as taken:
        spmd.save(f"{taken.name}/below", {})


def jitted() -> Any:
    return spmd.jit(spmd.map(lambda x: spmd.save("unused", {"x": x}), D, None))(EVEN)


def jitted_outside(call: Callable[[], Any]) -> Callable[[], Any]:
    """Within a function of global arrays: what is called there happens once, and not at each call."""

    def step(x: Any) -> Any:
        call()
        return x

    return lambda: spmd.jit(step)(spmd.put(EVEN, D))


def differentiated() -> Any:
    def loss(w):
        spmd.save("unused", {"x": w})
        return w.sum()

    return spmd.map(spmd.grad(loss), P(), P())(EVEN)


def like(**leaves: Any) -> Callable[[], Any]:
    return load({"w": np.zeros((2, 3)), "z": np.zeros(2, complex), "n": 0} | leaves)


A_FILE = b"\x80\x05\x95\x20\x00\x00\x00\x00\x00\x00\x00\x8c\x02os"

SAVING = [
    Row(name, call, error, head, got, need, mend)
    for name, call, error, head, got, need, mend in (
        ("a leaf of objects", save({"x": object()}), CheckpointError, LEAF, "object", "arrays, numbers, strings", ""),
        (
            "a leaf of dates",
            save({"x": np.zeros(2, "M8[s]")}),
            CheckpointError,
            LEAF,
            "datetime64[s]",
            "",
            "",
        ),
        (
            "a leaf of long doubles",
            save({"x": np.zeros(2, np.longdouble)}),
            CheckpointError,
            LEAF,
            "dtype",
            "numbers of at most 64 bits",
            "x.astype(np.float64)",
        ),
        (
            "keys that are tuples",
            save({"a": {(1, 2): 3}}),
            CheckpointError,
            "tree, at a",
            "the key tuple",
            "strings and integers",
            "str(key)",
        ),
        (
            "keys that are no Unicode",
            save({"\udc80": 3}),
            CheckpointError,
            "tree, at the root",
            "the key '\\udc80'",
            "as UTF-8",
            "errors='replace'",
        ),
        (
            "names that are the same",
            save({"a.b": 1, "a": {"b": 2}}),
            CheckpointError,
            "argument tree",
            "two nodes with the name 'a.b'",
            "a name of its own",
            "rename one",
        ),
        (
            "metadata that JSON cannot hold",
            save({}, metadata={"x": {1}}),
            CheckpointError,
            "argument metadata",
            "set is not JSON serializable",
            "what JSON can hold",
            "str(x)",
        ),
        (
            "a file for a folder",
            on_a_file(spmd.save, {}),
            CheckpointError,
            "argument path",
            "the file ",
            "a folder, or a new name",
            "rename one",
        ),
        (
            "a folder below a file",
            below_a_file,
            CheckpointError,
            "argument path",
            "Not a directory",
            "a folder that may be written",
            "see the permissions",
        ),
        (
            "a block of a worker",
            lambda: run(lambda x: spmd.save("unused", {"x": x}), EVEN, out=None),
            CheckpointError,
            LEAF,
            "Varying",
            "equal on all workers",
            "return it from the map",
        ),
        ("a value that is differentiated", differentiated, CheckpointError, LEAF, "is differentiated", "", "stop_grad"),
        *(
            (f"{what} within spmd.jit", call, JitError, where, "within spmd.jit", "each time", "outside of the func")
            for what, call, where in (
                ("a save", jitted, SAVE),
                ("a save of a number", jitted_outside(lambda: spmd.save("unused", 1)), SAVE),
                ("a load", jitted_outside(lambda: spmd.load("unused")), LOAD),
            )
        ),
    )
]

LOADING = [
    Row(name, call, error, head, got, need, mend)
    for name, call, error, head, got, need, mend in (
        (
            "no such folder",
            lambda: spmd.load("/nowhere/at/all"),
            CheckpointError,
            "the checkpoint /nowhere/at/all",
            "no such folder",
            "a folder that spmd.save wrote",
            "see the spelling",
        ),
        (
            "a folder without a checkpoint",
            lambda: spmd.load(tempfile.gettempdir()),
            CheckpointError,
            "the checkpoint ",
            "without manifest.json",
            "a folder that spmd.save wrote",
            "a save that was broken off",
        ),
        (
            "a pickle",
            file("x.pt", A_FILE),
            CorruptCheckpointError,
            "x.pt",
            "without the header of a safetensors file",
            "a safetensors file",
            "files of pickle, .npy or .pt are not read",
        ),
        (
            "a pickle for an index",
            file("model.safetensors.index.json", A_FILE),
            CheckpointError,
            "index.json",
            "no index of safetensors files",
            '"weight_map"',
            "pass the folder",
        ),
        (
            "names that lead away",
            file("x.safetensors.index.json", b'{"weight_map": {"w": "../w.safetensors"}}'),
            CheckpointError,
            "index.json",
            "the file '../w.safetensors' for the tensor 'w'",
            "the folder that the index lies in",
            "move the files",
        ),
        (
            "a damaged manifest",
            file("manifest.json", A_FILE),
            CorruptCheckpointError,
            "manifest.json",
            "another SHA-256",
            "a manifest as it was written",
            "load another",
        ),
        ("a damaged leaf", damaged, CorruptCheckpointError, "the leaf 'w', ", "another checksum", "", "--verify"),
        (
            "a file that is gone",
            missing,
            CorruptCheckpointError,
            "the leaf 'w'",
            "No such file",
            "all files",
            "another",
        ),
        (
            "a leaf that is missing",
            load({"w": np.zeros((2, 3)), "y": np.zeros(2)}),
            CheckpointError,
            "argument like",
            "missing in the checkpoint: 'y'; unexpected there: 'z', 'n'",
            "the leaves that were saved",
            "does not read what is unexpected",
        ),
        (
            "another shape",
            like(w=np.zeros((3, 2))),
            CheckpointError,
            "'w'",
            "[3, 2] for a leaf of shape [2, 3]",
            "",
            "",
        ),
        (
            "another dtype",
            like(w=np.zeros((2, 3), "f4")),
            CheckpointError,
            "'w'",
            "float32 for a leaf of float64",
            "",
            "convert=True",
        ),
        ("a number for an array", like(w=3.0), CheckpointError, "'w'", "float 3.0, for an array", "", "np.asarray"),
        (
            "an array for a number",
            like(n=np.zeros(1)),
            CheckpointError,
            "'n'",
            "for 3 in the checkpoint",
            "",
            "None or 0",
        ),
        (
            "complex numbers as real ones",
            load({"z": np.zeros(2)}, strict=False, convert=True),
            CheckpointError,
            "'z'",
            "float64 for complex entries",
            "a complex dtype",
            "x.real",
        ),
        (
            "a pattern that fits nothing",
            load(names="params.*"),
            CheckpointError,
            "argument names",
            "'params.*', which fits none of 'w', 'z', 'n'",
            "patterns of names",
            "spmd.io.inspect",
        ),
        (
            "a spec that is none",
            lambda: spmd.ShapeDtypeStruct((2,), np.float32, "x"),
            SpecError,
            "spmd.ShapeDtypeStruct: argument spec",
            "str 'x'",
            "a P, a Layout or None",
            'P("x")',
        ),
    )
]

ZARR, HDF5 = "spmd.io.write_zarr", "spmd.io.write_hdf5"

FIELDS = [
    Row(name, call, CheckpointError, head, got, need, mend)
    for name, call, head, got, need, mend in (
        (
            "a number in a group",
            write("zarr", {"g": {"n": 3}}),
            f"{ZARR}: argument tree, at g.n",
            "int 3",
            "arrays",
            "np",
        ),
        ("a list of arrays", write("hdf5", {"a": [EVEN]}), f"{HDF5}: argument tree, at a", "list", "arrays", "a dict"),
        (
            "a path as a key",
            write("hdf5", {"a/b": EVEN}),
            "argument tree",
            "'a/b'",
            "names that HDF5",
            "rename the key",
        ),
        ("a reserved key", write("zarr", {"__x": EVEN}), "argument tree", "'__x'", "names that Zarr", "rename the key"),
        ("an integer key", write("zarr", {0: EVEN}), "argument tree", "the key 0", "names that Zarr", "rename the key"),
        (
            "a dtype without a type",
            write("hdf5", {"x": EVEN.astype(ml_dtypes.bfloat16)}),
            f"{HDF5}: argument {LEAF}",
            "dtype bfloat16",
            "HDF5 has a type for",
            "x.astype(np.float32)",
        ),
        (
            "chunks of too few dimensions",
            write("zarr", EVEN, chunks=(2,)),
            "argument chunks",
            "(2,) for shape [4, 2]",
            "each of the 2 dimensions",
            "chunks=None",
        ),
        ("a chunk of no length", write("zarr", EVEN, chunks=(2, 0)), "argument chunks", "(2, 0)", "1 or more", "None"),
        (
            "chunks that are a number",
            write("hdf5", {"x": EVEN}, chunks={"x": 4}),
            "argument chunks['x']",
            "int 4",
            "each of the 2 dimensions",
            "chunks=None",
        ),
        (
            "chunks of no array",
            write("zarr", {"x": EVEN}, chunks={"y": (2, 2)}),
            "argument chunks",
            "chunks for y",
            "names of arrays",
            "a dictionary",
        ),
        (
            "one chunk shape for a dictionary",
            write("zarr", {"x": EVEN}, chunks=(2, 2)),
            "argument chunks",
            "chunks for a dictionary",
            "names of arrays",
            "a dictionary for a dictionary",
        ),
        (
            "attributes that are arrays",
            write("zarr", EVEN, attributes={"t": np.ones(2)}),
            "argument attributes",
            "ndarray",
            "what JSON can hold",
            "x.tolist()",
        ),
        (
            "attributes of attributes",
            write("hdf5", EVEN, attributes={"t": {"a": 1}}),
            "argument attributes",
            "by the name 't'",
            "lists of one of them",
            "json.dumps",
        ),
        ("a place that is taken", write_over("zarr"), "argument path", "which exists", "a new name", "overwrite=True"),
        (
            "what another tool wrote",
            write_over("hdf5", overwrite=True),
            "argument path",
            "which is no HDF5",
            "to replace",
            "another name",
        ),
        ("overwrite as text", write("zarr", EVEN, overwrite="yes"), "argument overwrite", "'yes'", "True or False", ""),
        ("a block in a body", uneven_in_a_body, LEAF, "Varying", "equal on all workers", "return it from the map"),
    )
]

EXPORT = "spmd.io.export: argument "
EXPORTING = [
    Row(name, call, CheckpointError, head, got, need, mend)
    for name, call, head, got, need, mend in (
        (
            "an export of numbers",
            export({"x": EVEN, "n": 3, "t": "text"}),
            f"{EXPORT}tree",
            "leaves that are no arrays: 'n', 't'",
            "arrays",
            "np.asarray(x) of a number",
        ),
        (
            "an export of complex128",
            export({"x": EVEN * 1j}),
            f"{EXPORT}{LEAF}",
            "dtype complex128",
            "a dtype that the format has a type for",
            "x.astype(np.complex64)",
        ),
        (
            "a name that the format keeps",
            export({"__metadata__": EVEN}),
            f"{EXPORT}tree",
            "'__metadata__'",
            "another name",
            "rename the key",
        ),
        (
            "files of no bytes",
            export({"x": EVEN}, max_file_bytes=0),
            f"{EXPORT}max_file_bytes",
            "int 0",
            "a positive int",
            "max_file_bytes=5_000_000_000",
        ),
        (
            "metadata of numbers",
            export({"x": EVEN}, metadata={"steps": 7}),
            f"{EXPORT}metadata",
            "('steps', 7)",
            "strings by name",
            "json.dumps",
        ),
        (
            "an export to a checkpoint",
            export_over("."),
            f"{EXPORT}path",
            "a checkpoint of spmd.save",
            "another folder",
            "exported",
        ),
        (
            "an export to a file",
            export_over("manifest.json"),
            f"{EXPORT}path",
            "the file ",
            "a folder",
            "rename one",
        ),
        (
            "several models",
            model({"v.safetensors": b""}),
            "the checkpoint ",
            "several models: 'v.safetensors', 'w.safetensors'",
            "one safetensors file, or one index",
            "give the path of one",
        ),
        (
            "a file that an index names and is missing",
            model({"a.safetensors.index.json": b'{"weight_map": {"w": "w.safetensors", "v": "v.safetensors"}}'}),
            "a.safetensors.index.json",
            "1 of 2 files missing: 'v.safetensors'",
            "all files that the index names",
            "download or copy",
        ),
        (
            "a tensor that an index names and no file has",
            model({"a.safetensors.index.json": b'{"weight_map": {"w": "w.safetensors", "v": "w.safetensors"}}'}),
            "w.safetensors",
            "no tensor 'v'",
            "the tensors that the index says are in it",
            "fetch both again",
        ),
        (
            "a directory of steps for a checkpoint",
            inspect_steps,
            "spmd.io.inspect: argument path",
            "of 1 checkpoint, one for each step",
            "one of them",
            "step-3",
        ),
    )
]

ROWS = [*SAVING, *LOADING, *EXPORTING, *FIELDS]
