"""Random trees, saved on a mesh and loaded on another: equal to the bit. Only chunks that are needed are read."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import each_mpi, launch

import spmd
from spmd import P
from spmd.io import files, manifest, reading, writing
from spmd.layout import Layout

DTYPES = [
    *("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f8", ">i4", ">c8", ">f2"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
AXES = ("x", "y", "z")
MODULES = (files, manifest, reading, writing)


@pytest.fixture(scope="module")
def sizes():
    """Limits as small as the arrays, and their paths on small data."""
    with pytest.MonkeyPatch.context() as patch:

        def set_sizes(chunk: int, shared: int, slab: int, file: int) -> None:
            for module in MODULES:
                patch.setattr(module, "CHUNK", chunk)
            patch.setattr(writing, "SHARED_MIN", shared)
            patch.setattr(writing, "SLAB_BYTES", slab)
            patch.setattr(reading, "SLAB_BYTES", slab)
            patch.setattr(writing, "FILE_BYTES", file)

        yield set_sizes


SIZES = st.tuples(
    st.sampled_from([16, 64, 200, 1 << 20]),
    st.sampled_from([16, 64, 1 << 20]),
    st.sampled_from([16, 64, 4 << 20]),
    st.sampled_from([64, 300, 2 << 30]),
)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 8)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13]), max_size=3)


def axes_of(mesh: list[int]) -> dict[str, int]:
    return dict(zip(AXES, mesh, strict=False))


@st.composite
def specs(draw, ndim: int, axes: dict[str, int], shape: list[int] | None = None) -> P | Layout:
    """A spec for an array, now and then with cuts at any places, where some workers may have nothing."""
    free = draw(st.permutations([*axes]))
    entries: list[tuple[str, ...]] = []
    for _ in range(ndim):
        n = draw(st.integers(0, min(2, len(free))))
        entries.append(tuple(free[:n]))
        free = free[n:]
    spec = P(*(entry or None for entry in entries))
    if shape is None or draw(st.booleans()):
        return spec
    cuts = []
    for n, entry in zip(shape, entries, strict=True):
        parts = math.prod(axes[a] for a in entry)
        places = sorted(draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1)))
        cuts.append(tuple(b - a for a, b in itertools.pairwise([0, *places, n])))
    return Layout(tuple(shape), spec, axes, tuple(cuts))


@st.composite
def cases(draw) -> list:
    """Arrays, each with the specs by which it is saved and loaded; and the two meshes."""
    first, second = axes_of(draw(MESHES)), axes_of(draw(MESHES))
    leaves = []
    for _ in range(draw(st.integers(1, 4))):
        shape, dtype = draw(SHAPES), np.dtype(draw(st.sampled_from(DTYPES)))
        array = entries(draw(st.integers(0, 1000)), shape, dtype, draw(st.booleans()))
        saved = draw(st.none() | specs(len(shape), first, shape))
        leaves.append((array, saved, draw(st.none() | specs(len(shape), second, shape))))
    return [first, second, leaves]


def entries(seed: int, shape: list[int], dtype: np.dtype, contiguous: bool) -> np.ndarray:
    """Random bytes, which include NaNs and denormal numbers; not contiguous, or so."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        array = rng.integers(2, size=shape).astype(bool)
    else:
        array = np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    return array if contiguous else np.asfortranarray(np.concatenate([array] * 2, -1))[..., ::2] if shape else array


def bits(x) -> tuple:
    x = np.asarray(x.numpy() if isinstance(x, spmd.PartitionedArray) else x)
    native = x.astype(x.dtype.newbyteorder("=")) if not x.dtype.isnative else x
    return native.dtype.name, native.shape, native.tobytes()


@given(case=cases(), small=SIZES, scheduler=st.sampled_from(["lockstep", "threads"]), like_given=st.booleans())
@settings(max_examples=40)
def test_trees_come_back_on_another_mesh(sizes, tmp_path_factory, case, small, scheduler, like_given):
    _there_and_back(sizes, tmp_path_factory.mktemp("c"), *case, small, scheduler, like_given)


@pytest.mark.full
@given(case=cases(), small=SIZES, scheduler=st.sampled_from(["lockstep", "threads"]), like_given=st.booleans())
@settings(max_examples=2000)
def test_many_trees_come_back_on_another_mesh(sizes, tmp_path_factory, case, small, scheduler, like_given):
    _there_and_back(sizes, tmp_path_factory.mktemp("c"), *case, small, scheduler, like_given)


def _there_and_back(sizes, folder, first, second, leaves, small, scheduler, like_given):
    sizes(*small)
    with spmd.Mesh(**first, scheduler=scheduler):
        spmd.save(folder, [x if spec is None else spmd.put(x, spec) for x, spec, _ in leaves])
    with spmd.Mesh(**second, scheduler=scheduler):
        like = [
            np.empty(x.shape, x.dtype.newbyteorder("=")) if spec is None
            else spmd.ShapeDtypeStruct(x.shape, x.dtype.newbyteorder("="), spec)
            for x, _, spec in leaves
        ]  # fmt: skip
        loaded = spmd.load(folder, like) if like_given else spmd.load(folder, specs=[spec for *_, spec in leaves])
    for (x, _, spec), y in zip(leaves, loaded, strict=True):
        assert bits(y) == bits(x)
        assert spec is None or y.layout.spec == (spec.spec if isinstance(spec, Layout) else spec)
        assert spec is None or isinstance(spec, P) or y.layout == spec
    written = manifest.Manifest.from_bytes((folder / "manifest.json").read_bytes(), folder)
    for entry in written.arrays.values():
        covered = np.zeros(entry.shape, int)
        for piece in entry.pieces:
            covered[tuple(slice(*side) for side in piece.box)] += 1
        assert (covered == 1).all(), "each entry is written once"
    for file in written.files:
        header = 8 + int.from_bytes((folder / file.name).read_bytes()[:8], "little")
        one = max((e.dtype.itemsize for e in written.arrays.values()), default=0)
        assert file.nbytes - header <= max(small[3], one)


@given(data=st.data())
@settings(max_examples=80)
def test_the_chunks_that_are_read(sizes, tmp_path_factory, data):
    _only_chunks_of_a_box(sizes, tmp_path_factory.mktemp("c"), data)


@pytest.mark.full
@given(data=st.data())
@settings(max_examples=5000)
def test_the_chunks_that_are_read_of_many(sizes, tmp_path_factory, data):
    _only_chunks_of_a_box(sizes, tmp_path_factory.mktemp("c"), data)


def _only_chunks_of_a_box(sizes, folder, data):
    """What is read are the chunks that hold an entry of the box, and no others: each entry's place is looked up."""
    # Pieces of several chunks, of which rows have less than one, or several.
    chunk, slab = data.draw(st.sampled_from([8, 24, 64, 200])), data.draw(st.sampled_from([16, 200, 4 << 20]))
    shared, file = data.draw(st.sampled_from([(64, 300), (1 << 20, 2 << 30), (1 << 20, 2 << 30)]))
    sizes(chunk, shared, slab, file)
    axes = axes_of(data.draw(MESHES))
    shape = data.draw(st.lists(st.integers(3, 12), min_size=1, max_size=3))
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "f4", "c16"])))
    x = entries(0, shape, dtype, True)
    with spmd.Mesh(**axes):
        spmd.save(
            folder,
            {"before": np.arange(data.draw(st.integers(0, 40))), "x": spmd.put(x, data.draw(specs(len(shape), axes)))},
        )
    box = []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        box.append((start, data.draw(st.integers(start + 1, n))))
    with reading.open_checkpoint(folder) as reader:
        entry = reader.manifest.arrays["x"]
        assert bits(reader.read(entry, tuple(box))) == bits(x[tuple(slice(*side) for side in box)])
    names = [f.name for f in reader.manifest.files]
    expected: dict[str, set[int]] = {}
    for piece in entry.pieces:
        lengths = [stop - start for start, stop in piece.box]
        for index in itertools.product(*(range(*side) for side in piece.box)):
            if all(lo <= i < hi for i, (lo, hi) in zip(index, box, strict=True)):
                at = np.ravel_multi_index([i - lo for i, (lo, _) in zip(index, piece.box, strict=True)], lengths)
                start = piece.offset + int(at) * dtype.itemsize
                chunks = range(start // files.CHUNK, (start + dtype.itemsize - 1) // files.CHUNK + 1)
                expected.setdefault(names[piece.file], set()).update(chunks)
    read = {name: chunks for name, chunks in reader.chunks.items() if chunks}
    assert read == expected


@given(case=cases(), small=SIZES)
@settings(max_examples=20)
def test_bodies_save_and_load(sizes, tmp_path_factory, case, small, scheduler):
    """What is equal on all workers: each writes its share, and gets the whole."""
    folder = tmp_path_factory.mktemp("c")
    sizes(*small)
    first, second, leaves = case
    arrays = [x.astype(x.dtype.newbyteorder("=")) for x, *_ in leaves]

    def body(*values):
        spmd.save(folder, {"invariant": list(values), "bare": arrays, "n": 3})

    def back():
        tree = spmd.load(folder)
        assert [bits(x) for x in tree["invariant"] + tree["bare"]] == [bits(x) for x in arrays * 2]
        return np.asarray(tree["n"])

    with spmd.Mesh(**first, scheduler=scheduler):
        spmd.map(body, tuple(P() for _ in arrays), None)(*arrays)
    with spmd.Mesh(**second, scheduler=scheduler):
        assert spmd.map(lambda _: back(), P(), P())(np.zeros(1)) == 3


def test_unreduced_arrays_are_reduced_and_say_so(tmp_path, scheduler):
    x = np.arange(12.0).reshape(4, 3)
    with spmd.Mesh(x=2, y=2, scheduler=scheduler):
        total = spmd.map(lambda b: b, P("x", "y"), P("x", "y"))(spmd.put(x, P("x", "y")))
        sums = spmd.map(lambda b: b.sum(1), P("x", "y"), P("x", unreduced={"y"}))(total)
        assert sums.layout.unreduced
        spmd.save(tmp_path / "c", {"sums": sums})
        assert "reduced on saving" in reading.read_manifest(tmp_path / "c").arrays["sums"].layout
        np.testing.assert_array_equal(spmd.load(tmp_path / "c", specs=P("y"))["sums"].numpy(), x.sum(1))
        np.testing.assert_array_equal(spmd.load(tmp_path / "c", {"sums": sums})["sums"].numpy(), x.sum(1))


def test_copies_are_divided_among_those_that_hold_them(sizes, tmp_path):
    """Each worker of a body writes about as much."""
    sizes(1 << 20, 64, 4 << 20, 2 << 30)
    x = np.arange(1003.0)
    with spmd.Mesh(x=4):
        spmd.map(lambda x: spmd.save(tmp_path / "c", {"x": x}), P(), None)(x)
    written = [f.nbytes for f in reading.read_manifest(tmp_path / "c").files]
    assert len(written) == 4
    assert max(written) - min(written) <= 32
    np.testing.assert_array_equal(spmd.load(tmp_path / "c")["x"], x)


@pytest.mark.parametrize("name", ["__metadata__", "w[0:2]", "a\\b\"'", "ü\n", "", "a.b", "\udc80"])
def test_odd_names(name, tmp_path):
    """Every file is one that the safetensors library opens, whatever the leaves are called."""
    from safetensors.numpy import load_file

    with spmd.Mesh(x=2):
        tree = {"w": spmd.put(np.arange(4.0), P("x")), name: np.arange(2.0)}
        if name == "\udc80":
            with pytest.raises(spmd.errors.CheckpointError, match="the key"):
                spmd.save(tmp_path / "c", tree)
            return
        spmd.save(tmp_path / "c", tree)
    loaded = spmd.load(tmp_path / "c")
    assert {n: x.tolist() for n, x in loaded.items()} == {"w": [0, 1, 2, 3], name: [0, 1]}
    stored = [x.size for path in (tmp_path / "c").glob("*.safetensors") for x in load_file(path).values()]
    assert sum(stored) == 6


def test_texts_that_are_no_unicode(tmp_path):
    spmd.save(tmp_path / "c", {"s": "\udc80 ü", "b": b"\xff"}, metadata={"m": "\udc80"})
    assert spmd.load(tmp_path / "c") == {"s": "\udc80 ü", "b": b"\xff"}


@each_mpi
def test_processes_and_virtual_workers_load_what_the_others_saved(python, tmp_path):
    ended = launch(Path(__file__).parent / "round_trips.py", tmp_path, "60", n=2, python=python)
    assert ended.returncode == 0, ended
    assert ended.stdout.count("all is well") == 2, ended
