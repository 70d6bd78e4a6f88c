"""Whole tensors that `spmd.io.export` writes, as the safetensors library and torch read them."""

from __future__ import annotations

import itertools
import json
import math
import os
import tracemalloc
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import PROGRAMS, launch
from safetensors import safe_open
from safetensors.numpy import load_file

import spmd
from spmd import P
from spmd.errors import CheckpointError
from spmd.io import exporting
from spmd.io.files import PlacedWriter

RNG = np.random.default_rng(0)


def arrays_of(mesh_axes) -> dict[str, tuple[np.ndarray, object]]:
    """Arrays and layouts of all kinds on a mesh of 2 × 3."""
    uneven = spmd.Layout((9, 5), P("y", "x"), mesh_axes, [(0, 7, 2), (4, 1)])
    some = spmd.Layout.grid((6, 7), (2, 2), mesh_axes, [5, 0, 3, 1], [(1, 5), (6, 1)])
    return {
        "rows": (RNG.normal(size=(7, 4)), P("x")),
        "columns": (RNG.normal(size=(5, 11)).astype(np.float32), P(None, ("x", "y"))),
        "both": (RNG.integers(0, 99, (8, 3, 5)), P("y", None, "x")),
        "uneven": (RNG.normal(size=(9, 5)).astype(np.float16), uneven),
        "grid": (RNG.normal(size=(6, 7)), some),
        "flags": (RNG.normal(size=13) > 0, P("y")),
        "spectrum": ((RNG.normal(size=(4, 4)) + 1j).astype(np.complex64), P("x", "y")),
        "unreduced": (RNG.normal(size=(3, 2)), P("x", unreduced={"y"})),
        "copies": (RNG.normal(size=(3, 2)), P()),
        "scalar": (np.array(2.5), P()),
        "empty": (np.zeros((0, 4), np.uint8), P("x")),
        "fewer": (np.arange(2, dtype=np.int8), P("y")),
    }


def exported(path) -> dict[str, np.ndarray]:
    """What the library reads, of one file or of several with their index."""
    if (path / "model.safetensors").exists():
        assert sorted(os.listdir(path)) == ["model.safetensors"]
        return load_file(path / "model.safetensors")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(os.listdir(path)) == sorted([*files, "model.safetensors.index.json"])
    assert files == [f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))]
    tensors = {file: load_file(path / file) for file in files}
    found = {name: tensors[file][name] for name, file in index["weight_map"].items()}
    assert sum(map(len, tensors.values())) == len(found)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    return found


def assert_same(x: np.ndarray, y: np.ndarray) -> None:
    assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 300, 1])
def test_arrays_of_any_layout(tmp_path, max_file_bytes):
    with spmd.Mesh(x=2, y=3) as mesh:
        cases = arrays_of(mesh.axes)
        tree = {name: spmd.put(x, spec) for name, (x, spec) in cases.items()}
        spmd.io.export(tmp_path, tree | {"bare": np.arange(6).reshape(2, 3)}, max_file_bytes=max_file_bytes)
    found = exported(tmp_path)
    assert found.keys() == cases.keys() | {"bare"}
    for name, (x, _) in cases.items():
        assert_same(found[name], x)
    assert_same(found["bare"], np.arange(6).reshape(2, 3))
    files = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert len(files) == {5_000_000_000: 1, 1: len(found)}.get(max_file_bytes, len(files))
    for file, following in itertools.pairwise([*files, {}]):
        nbytes = sum(x.nbytes for x in file.values())
        assert nbytes <= max_file_bytes or len(file) == 1
        assert not following or nbytes + max(x.nbytes for x in following.values()) > max_file_bytes


def test_it_loads_on_another_mesh(tmp_path):
    with spmd.Mesh(x=2, y=3) as mesh:
        cases = arrays_of(mesh.axes)
        tree = {name: spmd.put(x, spec) for name, (x, spec) in cases.items()}
        spmd.io.export(tmp_path, tree, max_file_bytes=200)
    with spmd.Mesh(z=4):
        loaded = spmd.load(tmp_path, specs={name: P("z") if x.ndim else P() for name, (x, _) in cases.items()})
    assert list(loaded) != []
    for name, (x, _) in cases.items():
        assert_same(loaded[name].numpy(), x)


def test_names_are_paths(tmp_path):
    tree = {"layers": [{"w": np.ones(2)}, {"w": np.zeros(3)}], "head.bias": np.ones(1)}
    spmd.io.export(tmp_path, tree, metadata={"steps": "7"})
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == ["head.bias", "layers.0.w", "layers.1.w"]
        assert file.metadata() == {"format": "pt", "steps": "7"}


def test_an_array_by_itself(tmp_path):
    spmd.io.export(tmp_path, np.arange(3))
    assert_same(load_file(tmp_path / "model.safetensors")["value"], np.arange(3))


def test_an_object_with_a_state_has_the_names_of_its_state(tmp_path):
    class Module:
        def state_dict(self):
            return OrderedDict({"0.weight": np.ones((2, 2)), "0.bias": np.zeros(2)})

        def load_state_dict(self, state):
            raise AssertionError

    spmd.io.export(tmp_path / "alone", Module())
    assert load_file(tmp_path / "alone" / "model.safetensors").keys() == {"0.weight", "0.bias"}
    spmd.io.export(tmp_path / "below", {"model": Module(), "scale": np.ones(1)})
    assert load_file(tmp_path / "below" / "model.safetensors").keys() == {"model.0.weight", "model.0.bias", "scale"}


def test_tensors_begin_at_multiples_of_their_entries(tmp_path):
    dtypes = [np.uint8, np.float64, np.bool_, np.float16, np.complex64, np.int32]
    spmd.io.export(tmp_path, {str(k): np.ones(3, dtype) for k, dtype in enumerate(dtypes)})
    from spmd.io.container import read_header

    tensors, _ = read_header(tmp_path / "model.safetensors")
    assert len(tensors) == len(dtypes)
    assert all(t.offset % t.dtype.itemsize == 0 for t in tensors)


def test_entries_of_another_byte_order(tmp_path):
    spmd.io.export(tmp_path, {"a": np.arange(5, dtype=">i4"), "b": np.asfortranarray(np.arange(6.0).reshape(2, 3))})
    found = load_file(tmp_path / "model.safetensors")
    assert_same(found["a"], np.arange(5, dtype=np.int32))
    assert_same(found["b"], np.arange(6.0).reshape(2, 3))


# How it is written


def boxes(draw, shape):
    """A partition of a box by repeated cuts."""
    pieces = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 5))):
        k = draw(st.integers(0, len(pieces) - 1))
        d = draw(st.integers(0, len(shape) - 1))
        start, stop = pieces[k][d]
        at = draw(st.integers(start, stop))
        piece = pieces.pop(k)
        for side in ((start, at), (at, stop)):
            if side[0] < side[1]:
                pieces.append((*piece[:d], side, *piece[d + 1 :]))
    return pieces


@given(st.data())
@settings(max_examples=60)
def test_runs_are_the_entries_of_the_boxes(data):
    """Each entry of the boxes lies in one run, and no two runs touch."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    pieces = boxes(data.draw, shape)
    chosen = data.draw(st.lists(st.sampled_from(pieces), min_size=1, unique=True))
    shift = [data.draw(st.integers(0, 7)) for _ in shape]
    moved = [tuple((a + s, b + s) for (a, b), s in zip(piece, shift, strict=True)) for piece in chosen]
    slab = tuple((s, s + n) for n, s in zip(shape, shift, strict=True))
    mask = np.zeros(shape, bool)
    for piece in chosen:
        mask[tuple(slice(a, b) for a, b in piece)] = True
    runs = exporting._runs(moved, slab)
    found = np.zeros(math.prod(shape), int)
    for start, stop in runs:
        found[start:stop] += 1
    np.testing.assert_array_equal(found.reshape(shape), mask)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(runs))


def test_runs_of_a_scalar():
    assert exporting._runs([()], ()) == [(0, 1)]


@pytest.mark.parametrize("spec", [P(None, "x"), P("x"), P("x", "y")])
def test_no_whole_copy_is_made(tmp_path, spec, monkeypatch):
    """48 MiB in slabs of at most 4: and one call writes a slab of which all boxes lie here."""
    x = np.arange(6 << 20, dtype=np.float64).reshape(1536, 4096)
    written = []
    write = PlacedWriter.write
    monkeypatch.setattr(
        PlacedWriter, "write", lambda self, at, data: (written.append(len(data)), write(self, at, data))
    )
    with spmd.Mesh(x=3, y=2):
        tree = {"x": spmd.put(x, spec)}
        tracemalloc.start()
        try:
            spmd.io.export(tmp_path, tree)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 12 << 20
    assert len(written) <= 1 + 13
    assert sum(written[1:]) == x.nbytes
    assert_same(load_file(tmp_path / "model.safetensors")["x"], x)


# Places


def test_an_export_replaces_the_one_before(tmp_path):
    many = {str(k): np.full(10, k) for k in range(4)}
    spmd.io.export(tmp_path, many, max_file_bytes=80)
    assert len(exported(tmp_path)) == 4
    (tmp_path / "config.json").write_text("{}")
    spmd.io.export(tmp_path, many, max_file_bytes=160)
    (tmp_path / "config.json").unlink()  # it was not touched
    assert len(exported(tmp_path)) == 4
    spmd.io.export(tmp_path, many)
    assert len(exported(tmp_path)) == 4
    spmd.io.export(tmp_path, many, max_file_bytes=80)
    assert len(exported(tmp_path)) == 4


def test_leftovers_of_an_export_that_was_broken_off(tmp_path):
    for name in ("export-0123456789abcdef-00000.tmp", "export-0123456789abcdef-00001.tmp", "export-0-1.tmp"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "export-fedcba9876543210-00007.tmp").write_bytes(b"x")
    spmd.io.export(tmp_path, {"a": np.ones(3)})
    assert sorted(os.listdir(tmp_path)) == ["export-0-1.tmp", "model.safetensors"]


def test_two_exports_at_a_time(tmp_path):
    """The lock of the first is held by this process, through another open file."""
    from spmd.io.files import Lock

    other = tmp_path / "export-0123456789abcdef-00000.tmp"
    lock = Lock(other)
    with pytest.raises(CheckpointError, match="one save at a time"):
        spmd.io.export(tmp_path, {"a": np.ones(3)})
    assert os.listdir(tmp_path) == [other.name]
    lock.release()
    spmd.io.export(tmp_path, {"a": np.ones(3)})
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_an_error_of_the_system_leaves_the_old_export(tmp_path, monkeypatch):
    spmd.io.export(tmp_path, {"a": np.ones(3)})
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(self, at, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PlacedWriter, "write", full)
    with spmd.Mesh(x=2), pytest.raises(CheckpointError, match="No space left"):
        spmd.io.export(tmp_path, {"a": spmd.put(np.zeros(3), P("x"))}, max_file_bytes=1)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.mpi
def test_processes_export_together(tmp_path):
    ended = launch(PROGRAMS / "exporting.py", str(tmp_path), n=2)
    assert ended.returncode == 0, ended
    rng = np.random.default_rng(5)
    whole = {"w": rng.normal(size=(37, 50)), "v": rng.normal(size=(50, 3)).astype(np.float32), "b": np.arange(5)}
    for folder in ("one", "several"):
        found = exported(tmp_path / folder)
        assert found.keys() == whole.keys()
        for name, x in whole.items():
            assert_same(found[name], x)


# torch


@pytest.mark.torch
def test_torch_reads_it(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    w = RNG.normal(size=(6, 5))
    arrays = {
        "BF16": w.astype(ml_dtypes.bfloat16),
        "F8_E4M3": w.astype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": w.astype(ml_dtypes.float8_e5m2),
        "C64": w.astype(np.complex64) * 1j,
        "F64": w,
    }
    with spmd.Mesh(x=4):
        spmd.io.export(tmp_path, {name: spmd.put(x, P(None, "x")) for name, x in arrays.items()})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {name: file.get_slice(name).get_dtype() for name in arrays} == {name: name for name in arrays}
    for name, tensor in load_torch(tmp_path / "model.safetensors").items():
        assert tuple(tensor.shape) == w.shape
        bits = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert bits == arrays[name].tobytes(), name


@pytest.mark.torch
def test_a_module_of_torch_is_exported_as_its_state_dict(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(torch.bfloat16)
    spmd.io.export(tmp_path, module)
    found, state = load_torch(tmp_path / "model.safetensors"), module.state_dict()
    assert found.keys() == state.keys()
    for name, x in state.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x), name
