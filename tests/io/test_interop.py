"""safetensors files of other tools, loaded by names onto a mesh."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import spmd
from spmd import P
from spmd.errors import CheckpointError

RNG = np.random.default_rng(0)
MODEL = {
    "embed.weight": RNG.normal(size=(11, 6)).astype(np.float32),
    "layers.0.weight": RNG.normal(size=(7, 6)).astype(np.float16),
    "layers.0.bias": RNG.normal(size=7),
    "layers.1.mask": RNG.normal(size=(3, 2)) > 0,
    "layers.1.phase": (RNG.normal(size=5) + 1j).astype(np.complex64),
    "steps": np.array(12, np.int64),
    "empty": np.zeros((0, 3), np.uint8),
}


def sharded(folder, files: dict[str, list[str]], stem: str = "model") -> None:
    """A model in several files with an index, as Hugging Face's tools write it."""
    folder.mkdir(exist_ok=True)
    for file, names in files.items():
        save_file({name: MODEL[name] for name in names}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(MODEL[n].nbytes for n in weight_map)}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


NAMES = [*MODEL]
THIRDS = {f"model-0000{k + 1}-of-00003.safetensors": NAMES[k::3] for k in range(3)}


@pytest.fixture(params=["file", "folder", "index", "folder of an index"])
def path(request, tmp_path):
    """The model in each of the forms that `spmd.load` takes."""
    if "index" in request.param:
        sharded(tmp_path, THIRDS)
        return tmp_path if "folder" in request.param else tmp_path / "model.safetensors.index.json"
    save_file(MODEL, tmp_path / "weights.safetensors")
    return tmp_path if "folder" in request.param else tmp_path / "weights.safetensors"


def assert_same(x, y):
    x = x.numpy() if isinstance(x, spmd.PartitionedArray) else x
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    np.testing.assert_array_equal(x, y)


def test_a_model_as_bare_arrays(path):
    loaded = spmd.load(path)
    assert loaded.keys() == MODEL.keys()
    for name, x in MODEL.items():
        assert type(loaded[name]) is np.ndarray
        assert_same(loaded[name], x)


def test_a_model_on_a_mesh(path):
    specs = dict.fromkeys(MODEL) | {"embed.weight": P("x", "y"), "layers.0.weight": P(None, "y"), "empty": P("y")}
    specs["steps"] = P()  # a copy on each worker, and not a bare array
    uneven = spmd.Layout((7,), P("x"), {"x": 2, "y": 3}, [(0, 7)])
    specs["layers.0.bias"] = uneven
    with spmd.Mesh(x=2, y=3):
        loaded = spmd.load(path, specs=specs)
    for name, x in MODEL.items():
        assert isinstance(loaded[name], spmd.PartitionedArray) == (specs[name] is not None)
        assert_same(loaded[name], x)
    assert loaded["embed.weight"].spec == P("x", "y")
    assert loaded["layers.0.bias"].layout == uneven


def test_by_names_of_ones_own(path):
    """like, rename, names and convert on a file of another tool."""
    with spmd.Mesh(x=3):
        like = {
            "model": {
                "tok": spmd.zeros((11, 6), np.float32, spec=P("x")),
                "b": spmd.ShapeDtypeStruct((7,), float, P()),
            },
            "w": spmd.ShapeDtypeStruct((7, 6), np.float32, P("x")),
            "own": np.ones(2),
        }
        theirs = {"model.tok": "embed.weight", "model.b": "layers.0.bias", "w": "layers.0.weight"}
        options = {"like": like, "rename": lambda name: theirs.get(name, name), "strict": False}
        with pytest.raises(CheckpointError, match="the leaf 'w'"):
            spmd.load(path, **options)
        loaded = spmd.load(path, **options, convert=True)
    assert_same(loaded["model"]["tok"], MODEL["embed.weight"])
    assert_same(loaded["model"]["b"], MODEL["layers.0.bias"])
    assert_same(loaded["w"], MODEL["layers.0.weight"].astype(np.float32))
    assert loaded["own"] is like["own"]
    assert spmd.load(path, names="layers.*.weight").keys() == {"layers.0.weight"}


def test_each_block_is_read_alone(tmp_path, monkeypatch):
    """Of one third of the rows, and not of the whole tensor."""
    from spmd.io.files import ChunkReader

    whole = RNG.normal(size=(3000, 512))
    save_file({"w": whole}, tmp_path / "w.safetensors")
    read = []
    real = ChunkReader._read
    monkeypatch.setattr(ChunkReader, "_read", lambda self, k, n, out: (read.append((k, n)), real(self, k, n, out))[1])
    layout = spmd.Layout.grid((3000, 512), (1, 1), {"x": 3}, [1])
    with spmd.Mesh(x=3):
        spmd.load(tmp_path, specs={"w": P("x")})
        chunks = sum(n for _, n in read)
        assert chunks <= whole.nbytes / 2**20 + 3 * 2
        assert max(n for _, n in read) <= 4
        read.clear()
        assert_same(spmd.load(tmp_path, specs={"w": layout})["w"], whole)


def test_types_that_numpy_has_by_ml_dtypes(tmp_path):
    """bfloat16 and float8, of which the library's NumPy writer knows none: by the header that others write."""
    from spmd.io.container import header

    arrays = {
        "BF16": RNG.normal(size=(5, 3)).astype(ml_dtypes.bfloat16),
        "F8_E4M3": RNG.normal(size=4).astype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": RNG.normal(size=4).astype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.array([1, 2, 4]).astype(ml_dtypes.float8_e8m0fnu),
    }
    start, _ = header([(code, code, x.shape, x.nbytes) for code, x in arrays.items()], {})
    (tmp_path / "a.safetensors").write_bytes(start + b"".join(x.tobytes() for x in arrays.values()))
    loaded = spmd.load(tmp_path)
    for code, x in arrays.items():
        assert_same(loaded[code], x)


# What is not there, or does not fit


def error_of(path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        spmd.load(path, **options)
    return str(caught.value)


def test_a_shard_that_is_missing(tmp_path):
    sharded(tmp_path, THIRDS)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    text = error_of(tmp_path)
    assert "1 of 3 files missing: 'model-00002-of-00003.safetensors'" in text
    assert "download" in text


def test_an_index_that_names_a_tensor_no_file_has(tmp_path):
    sharded(tmp_path, THIRDS)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["layers.9.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    text = error_of(tmp_path)
    assert "model-00001-of-00003.safetensors" in text
    assert "no tensor 'layers.9.weight'" in text


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", 5])
def test_an_index_that_names_a_file_outside_of_its_folder(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    text = error_of(tmp_path)
    assert f"the file {name!r} for the tensor 'w'" in text
    assert "files of the folder that the index lies in" in text


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "x", "b": 3}}', "{}"])
def test_what_is_no_index(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert '"weight_map"' in error_of(tmp_path)


def test_several_models_in_one_folder(tmp_path):
    save_file(MODEL, tmp_path / "one.safetensors")
    save_file(MODEL, tmp_path / "two.safetensors")
    text = error_of(tmp_path)
    assert "several models: 'one.safetensors', 'two.safetensors'" in text
    assert repr(str(tmp_path / "one.safetensors")) in text
    assert spmd.load(tmp_path / "two.safetensors").keys() == MODEL.keys()


def test_two_indices_in_one_folder_and_a_file_beside_its_index(tmp_path):
    sharded(tmp_path / "a", THIRDS)
    save_file(MODEL, tmp_path / "a" / "consolidated.safetensors")  # another form of the same: the index goes first
    assert spmd.load(tmp_path / "a").keys() == MODEL.keys()
    save_file(MODEL, tmp_path / "a" / "model.safetensors")
    assert "several models: 'model.safetensors.index.json', 'model.safetensors'" in error_of(tmp_path / "a")
    sharded(tmp_path / "b", {"x.safetensors": NAMES[:2]}, "one")
    sharded(tmp_path / "b", {"y.safetensors": NAMES[2:]}, "two")
    assert "several models: 'one.safetensors.index.json'" in error_of(tmp_path / "b")


def test_tensors_that_an_index_does_not_name_are_not_loaded(tmp_path):
    """A file may hold what belongs to another part of a model."""
    sharded(tmp_path, THIRDS)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["steps"]
    path.write_text(json.dumps(index))
    assert spmd.load(tmp_path).keys() == MODEL.keys() - {"steps"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fit its bytes"),
        ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}, "does not fit the file"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "does not fit the file"),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "a header that cannot be read"),
        ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, "a header that cannot be read"),
        ({"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}, "the type F4"),
        (3, "a header that cannot be read"),
    ],
)
def test_headers_that_do_not_fit(tmp_path, entry, words):
    text = json.dumps({"w": entry}).encode()
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    assert words in error_of(tmp_path)


# torch


@pytest.mark.torch
def test_files_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    generator = torch.Generator().manual_seed(0)
    w = torch.randn(9, 4, generator=generator)
    tensors = {
        "w": w,
        "half": w.to(torch.bfloat16),
        "eighth": w.to(torch.float8_e4m3fn),
        "flag": torch.tensor([True]),
        "spectrum": torch.fft.fft(w).to(torch.complex64),
    }
    save_torch(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with spmd.Mesh(x=4):
        loaded = spmd.load(tmp_path, specs={name: P("x") if name != "flag" else P() for name in tensors})
    for name, tensor in tensors.items():
        x = loaded[name].numpy()
        bits = torch.from_numpy(np.frombuffer(x.tobytes(), np.uint8).copy())
        assert x.shape == tuple(tensor.shape)
        assert torch.equal(bits, tensor.contiguous().view(torch.uint8).reshape(-1)), name


@pytest.mark.torch
def test_torch_opens_what_save_wrote(tmp_path):
    """Also where a type of one byte precedes one of eight."""
    torch = pytest.importorskip("torch")
    from safetensors import safe_open

    flag, w = np.array([True, False, True]), RNG.normal(size=(5, 2))
    spmd.save(tmp_path, {"a": flag, "w": w, "z": np.arange(3, dtype=np.uint8), "i": np.arange(4)})
    (path,) = tmp_path.glob("data-*")
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("a"), torch.from_numpy(flag))
        assert torch.equal(file.get_tensor("w"), torch.from_numpy(w))
        assert torch.equal(file.get_tensor("i"), torch.arange(4))
