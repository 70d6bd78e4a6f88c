"""Zarr and HDF5, written by `spmd.io.write_zarr` and `write_hdf5` and read by `spmd.put`, each worker its blocks."""

from __future__ import annotations

import itertools
import math
import os
import sys
import tracemalloc

import numpy as np
import pytest
from launch import PROGRAMS, launch
from sampled import Draw, random_layout

import spmd
from spmd import P
from spmd.errors import CheckpointError
from spmd.io import chunks as of_chunks
from spmd.io import fields
from spmd.io.sources import SOURCES, Source, boxes_of

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")

RNG = np.random.default_rng(0)
W = RNG.normal(size=(7, 5))
BOTH = pytest.mark.parametrize("write", [spmd.io.write_zarr, spmd.io.write_hdf5])


def found(path) -> dict[str, np.ndarray]:
    """The arrays of a file, by the names that lead to them."""
    arrays: dict[str, np.ndarray] = {}
    if path.is_file():
        with h5py.File(path, "r") as file:
            file.visititems(lambda name, x: arrays.update({name: x[()]}) if isinstance(x, h5py.Dataset) else None)
        return arrays
    node = zarr.open(path, mode="r")
    if isinstance(node, zarr.Array):
        return {"value": np.asarray(node[...])}
    return {name: np.asarray(x[...]) for name, x in node.members(max_depth=None) if isinstance(x, zarr.Array)}


def attributes(path) -> dict:
    if path.is_file():
        with h5py.File(path, "r") as file:
            return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in file.attrs.items()}
    return dict(zarr.open(path, mode="r").attrs)


def assert_same(x: np.ndarray, y: np.ndarray) -> None:
    assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


@BOTH
def test_arrays_of_any_layout(tmp_path, write):
    rng = np.random.default_rng(3)
    for k in range(12):
        d = Draw(rng, most=6)
        mesh = spmd.Mesh(**d.axes)
        wholes, arrays, chunks = {}, {}, {}
        for name in "abc":
            shape = tuple(d.upto(0, 7) for _ in range(d.upto(0, 3)))
            wholes[name] = rng.integers(0, 99, shape).astype(rng.choice(["f4", "f8", "c16", "i2", "?"]))
            arrays[name] = spmd.put(wholes[name], random_layout(d, shape, False), mesh)
            if d.flag():
                chunks[name] = tuple(d.upto(1, 4) for _ in shape)
        write(tmp_path / str(k), arrays, chunks=chunks)
        read = found(tmp_path / str(k))
        assert read.keys() == wholes.keys()
        for name, x in wholes.items():
            assert_same(read[name], x)


@BOTH
def test_groups_bare_arrays_and_sums(tmp_path, write):
    with spmd.Mesh(x=2, y=3):
        tree = {
            "bare": np.arange(6, dtype=">i4"),
            "scalar": np.float32(2.5),
            "empty": spmd.put(np.zeros((0, 3), np.complex64), P("x")),
            "deep": {"er": {"sum": spmd.put(W, P("x", unreduced={"y"})), "half": W.astype(np.float16)}, "none": {}},
        }
        write(tmp_path / "f", tree, attributes={"time": 0.5, "axes": ["x", "y"], "n": 3})
    read = found(tmp_path / "f")
    assert read.keys() == {"bare", "scalar", "empty", "deep/er/sum", "deep/er/half"}
    assert_same(read["bare"], np.arange(6, dtype=np.int32))
    assert_same(np.asarray(read["scalar"]), np.array(2.5, np.float32))
    assert_same(read["empty"], np.zeros((0, 3), np.complex64))
    assert_same(read["deep/er/half"], W.astype(np.float16))
    np.testing.assert_array_equal(read["deep/er/sum"], W)
    assert attributes(tmp_path / "f") == {"time": 0.5, "axes": ["x", "y"], "n": 3}


@BOTH
def test_an_array_by_itself(tmp_path, write):
    with spmd.Mesh(x=3):
        write(tmp_path / "new" / "f", spmd.put(W, P("x")), chunks=(2, 9))
    assert found(tmp_path / "new" / "f").keys() == {"value"}
    assert_same(found(tmp_path / "new" / "f")["value"], W)
    place = tmp_path / "new" / "f"
    stored = zarr.open_array(place) if place.is_dir() else h5py.File(place)["value"]
    assert stored.chunks == (2, 5)


@BOTH
def test_workers_of_a_body_write_together(tmp_path, write):
    def body(x):
        write(tmp_path / "f", {"x": W, "y": np.arange(3)}, chunks={"x": (2, 2)})
        return x

    with spmd.Mesh(x=3):
        spmd.map(body, P("x"), P("x"))(W)
    assert_same(found(tmp_path / "f")["x"], W)
    assert_same(found(tmp_path / "f")["y"], np.arange(3))


def test_copies_in_a_body_are_checked(tmp_path):
    def body(x):
        spmd.io.write_hdf5(tmp_path / "f", {"y": np.full(2, int(spmd.block(x)[0, 0] == W[0, 0]))})
        return x

    with spmd.Mesh(x=3), pytest.raises(CheckpointError, match="values that differ"):
        spmd.map(body, P("x"), P("x"))(W)
    assert os.listdir(tmp_path) == []


def test_chunks_that_blocks_of_other_libraries_would_share(tmp_path, monkeypatch):
    """Such blocks are not moved: they must consist of whole chunks."""

    class Foreign:
        pass

    holders = {((0, 3), (0, 5)): (0,), ((3, 7), (0, 5)): (0,)}
    source = Source(W.shape, W.dtype, "", holders, lambda box: W[tuple(itertools.starmap(slice, box))])
    monkeypatch.setitem(SOURCES, Foreign, lambda *_: source)
    with pytest.raises(CheckpointError, match=r"a block ends within one(.|\n)*chunks=\(3, 5\)"):
        spmd.io.write_zarr(tmp_path / "f", {"x": Foreign()}, chunks={"x": (2, 5)})
    assert os.listdir(tmp_path) == []
    spmd.io.write_zarr(tmp_path / "f", {"x": Foreign()})
    spmd.io.write_hdf5(tmp_path / "g", {"x": Foreign()}, chunks={"x": (2, 5)})
    assert_same(found(tmp_path / "f")["x"], W)
    assert_same(found(tmp_path / "g")["x"], W)


# Chunks


def test_each_block_of_an_aligned_layout_consists_of_whole_chunks():
    rng = np.random.default_rng(1)
    for _ in range(200):
        d = Draw(rng)
        shape = tuple(d.upto(0, 9) for _ in range(d.upto(0, 3)))
        layout = random_layout(d, shape, False)
        chosen = tuple(d.upto(1, 5) for _ in shape)
        default = of_chunks.default_chunks(shape, 8, boxes_of(layout))
        for chunks in (chosen, default, of_chunks.common_chunks(shape, boxes_of(layout))):
            aligned = of_chunks.aligned_layout(layout, chunks)
            assert (aligned.spec, aligned.workers, aligned.axes) == (layout.spec, layout.workers, layout.axes)
            seen = np.zeros(shape, int)
            for box in boxes_of(aligned):
                assert of_chunks.is_of_chunks(box, shape, chunks)
                for chunk in of_chunks.chunk_boxes(box, chunks):
                    assert all(a // n == (b - 1) // n for (a, b), n in zip(chunk, chunks, strict=True))
                    seen[tuple(itertools.starmap(slice, chunk))] += 1
            assert (seen == 1).all()
        assert boxes_of(of_chunks.aligned_layout(layout, chunks)) == boxes_of(layout)  # the last of the three


@pytest.mark.parametrize(
    ("shape", "spec", "chunks"),
    [
        ((1000, 30), P("x"), (250, 30)),
        ((30, 1000), P(None, "x"), (30, 250)),
        ((12, 8), P("x", "y"), (3, 4)),
        ((10_000, 10_000), P("x"), (1250, 1250)),  # 12 MB, of blocks of 200
        ((6_000_000,), P(("x", "y")), (750_000,)),
        ((4,), P(), (4,)),
        ((0, 3), P("x"), (1, 3)),
        ((), P(), ()),
    ],
)
def test_equal_blocks_consist_of_whole_chunks(shape, spec, chunks):
    layout = spmd.Layout(shape, spec, {"x": 4, "y": 2})
    assert of_chunks.default_chunks(shape, 8, boxes_of(layout)) == chunks
    assert of_chunks.aligned_layout(layout, chunks) == layout


def test_chunks_of_uneven_blocks():
    """Short common lengths would give many chunks; then blocks end within chunks, and few entries move."""
    layout = spmd.Layout((100,), P("x"), {"x": 3})  # 34, 33, 33
    assert of_chunks.default_chunks((100,), 8, boxes_of(layout)) == (34,)
    assert of_chunks.aligned_layout(layout, (34,)).cuts == ((34, 34, 32),)
    layout = spmd.Layout((12,), P("x"), {"x": 3}, [(6, 2, 4)])
    assert of_chunks.default_chunks((12,), 8, boxes_of(layout)) == (2,)
    long = of_chunks.default_chunks((100_000_007,), 8, [((0, 100_000_007),)])
    assert 1 << 20 < math.prod(long) * 8 <= of_chunks.CHUNK_BYTES


def test_equal_blocks_are_written_where_they_lie(tmp_path, monkeypatch):
    monkeypatch.setattr(fields, "relayout", lambda *_: pytest.fail("entries were moved"))
    with spmd.Mesh(x=4, y=2):
        spmd.io.write_zarr(tmp_path / "f", {"a": spmd.put(np.ones((8, 6)), P("x", "y")), "b": spmd.ones(4, spec=P())})
    assert found(tmp_path / "f")["a"].sum() == 48


@BOTH
def test_no_whole_copy_is_made(tmp_path, write, monkeypatch):
    """24 MiB, in chunks of at most 1 or slabs of at most 4, and what compression needs."""
    monkeypatch.setattr(of_chunks, "CHUNK_BYTES", 1 << 20)
    write(tmp_path / "before", W)  # imports
    with spmd.Mesh(x=3):
        x = spmd.put(np.arange(3 << 20, dtype=np.float64).reshape(3 << 10, 1 << 10), P("x"))
        tracemalloc.start()
        try:
            write(tmp_path / "f", {"x": x})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 8 << 20


# Targets


@BOTH
def test_a_target_that_exists(tmp_path, write):
    write(tmp_path / "f", {"a": np.ones(3)})
    with pytest.raises(CheckpointError, match="which exists"):
        write(tmp_path / "f", {"b": np.ones(3)})
    assert found(tmp_path / "f").keys() == {"a"}
    write(tmp_path / "f", {"b": np.ones(4)}, overwrite=True)
    assert found(tmp_path / "f").keys() == {"b"}
    assert os.listdir(tmp_path) == ["f"]


@BOTH
def test_what_others_wrote_is_never_replaced(tmp_path, write):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("folder", "file"):
        with pytest.raises(CheckpointError, match=r"which is no (Zarr|HDF5)"):
            write(tmp_path / name, {"b": np.ones(4)}, overwrite=True)
    assert (tmp_path / "folder" / "thesis.tex").exists()
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("step", ["write", "commit"])
@pytest.mark.parametrize("kind", [fields._Zarr, fields._Hdf5])
def test_an_error_leaves_the_old_one(tmp_path, monkeypatch, kind, step):
    write = spmd.io.write_zarr if kind is fields._Zarr else spmd.io.write_hdf5
    write(tmp_path / "f", {"a": np.ones(3)})

    def full(*_):
        raise OSError(28, "No space left on device")

    if step == "write":
        monkeypatch.setattr(zarr.Array, "__setitem__", full)
        monkeypatch.setattr(h5py.Dataset, "__setitem__", full)
    else:
        rename = os.rename
        monkeypatch.setattr(os, "replace", full)
        monkeypatch.setattr(os, "rename", lambda a, b: full() if str(a).endswith(".tmp") else rename(a, b))
    with spmd.Mesh(x=2), pytest.raises(CheckpointError, match="No space left"):
        write(tmp_path / "f", {"a": spmd.put(np.zeros(3), P("x"))}, overwrite=True)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["f"]
    assert_same(found(tmp_path / "f")["a"], np.ones(3))


@BOTH
def test_a_package_that_is_missing(tmp_path, monkeypatch, write):
    package = "zarr" if write is spmd.io.write_zarr else "h5py"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'no package {package}(.|\n)*pip install "spmd\[fields\]"'):
        write(tmp_path / "f", W)


# Reading


class Counted:
    """A dataset, with the slices by which it is read."""

    def __init__(self, stored):
        self.stored = stored
        self.shape, self.dtype, self.ndim = stored.shape, stored.dtype, stored.ndim
        self.reads: list[tuple[slice, ...]] = []

    def __getitem__(self, index):
        self.reads.append(index)
        return self.stored[index]


@BOTH
def test_each_block_is_read_once(tmp_path, write):
    """Of uneven blocks, empty ones and grids on some workers; other entries are not read."""
    write(tmp_path / "f", {"x": W, "s": np.array(2.5)}, chunks={"x": (2, 2)})
    file = h5py.File(tmp_path / "f") if (tmp_path / "f").is_file() else zarr.open_group(tmp_path / "f", mode="r")
    with spmd.Mesh(x=2, y=2) as mesh:
        for layout in (
            spmd.Layout(W.shape, P("x", "y"), mesh.axes, [(6, 1), (1, 4)]),
            spmd.Layout(W.shape, P(("x", "y")), mesh.axes, [(3, 0, 4, 0), None]),
            spmd.Layout.grid(W.shape, (1, 2), mesh.axes, [3, 1], [None, (4, 1)]),
            P("y"),
        ):
            counted = Counted(file["x"])
            x = spmd.put(counted, layout)
            assert_same(x.numpy(), W)
            reads = [tuple((s.start, s.stop) for s in index) for index in counted.reads]
            assert sorted(reads) == sorted(boxes_of(x.layout))
            assert_same(spmd.put(file["x"], layout).numpy(), W)
        assert float(spmd.put(file["s"], P())) == 2.5


@pytest.mark.mpi
def test_processes_write_together(tmp_path):
    ended = launch(PROGRAMS / "fields.py", str(tmp_path), n=2)
    assert ended.returncode == 0, ended
    w = np.arange(37 * 10, dtype=np.float64).reshape(37, 10)
    for name in ("fields.zarr", "fields.h5"):
        read = found(tmp_path / name)
        assert read.keys() == {"w", "group/columns", "group/one", "sum", "b"}
        for key in ("w", "group/columns", "group/one", "sum"):
            assert_same(read[key], w)
        assert_same(read["b"], np.arange(5))
        assert attributes(tmp_path / name) == {"time": 0.5}
