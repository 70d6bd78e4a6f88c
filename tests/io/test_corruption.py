"""Damaged checkpoints: whatever has changed is found, with the name of the leaf, and nothing loads wrong."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import spmd
from spmd import P
from spmd.errors import CheckpointError, CorruptCheckpointError
from spmd.io import files, manifest, reading, writing
from spmd.layout import Layout


def tree() -> dict:
    """Many leaves, on uneven boxes, some on some workers only."""
    rng = np.random.default_rng(0)
    leaves = {
        f"w{k}": spmd.put(rng.normal(size=(5 + k, 7)).astype(dtype), spec)
        for k, (dtype, spec) in enumerate(
            [
                ("f8", P("x")),
                ("f4", P("y", "x")),
                (ml_dtypes.bfloat16, P(None, "y")),
                ("c16", P()),
                ("i2", P(("x", "y"))),
            ]
        )
    }
    grid = Layout((4, 6), P("x", "y"), {"x": 2, "y": 2}, ((1, 3), (6, 0)))
    return {"deep": [leaves, {"grid": spmd.put(rng.normal(size=(4, 6)), grid)}], "bare": rng.normal(size=9), "n": 3}


def same(one: dict, other: dict) -> bool:
    pairs = []
    for leaves in (one, other):
        deep = {**leaves["deep"][0], **leaves["deep"][1]}
        pairs.append([{n: (x.dtype, x.tobytes()) for n, x in deep.items()}, leaves["bare"].tobytes(), leaves["n"]])
    return pairs[0] == pairs[1]


@pytest.fixture(params=["one chunk", "many chunks"])
def copy(request, tmp_path, monkeypatch):
    """A checkpoint of several files, with one chunk in each or many."""
    monkeypatch.setattr(writing, "FILE_BYTES", 700)
    for module in (files, manifest, reading, writing) if request.param == "many chunks" else ():
        monkeypatch.setattr(module, "CHUNK", 64)
    with spmd.Mesh(x=2, y=2):
        spmd.save(tmp_path / "copy", tree())
    return tmp_path / "copy"


NAMES = [*(f"deep.0.w{k}" for k in range(5)), "deep.1.grid", "bare"]


def found(folder: Path, expected: dict, changed: str) -> None:
    """Loading says which leaf is damaged, or finds all that it needs intact; then `verify` finds the damage."""
    try:
        loaded = spmd.load(folder)
    except CorruptCheckpointError as error:
        if changed in str(error) and (
            changed == "manifest.json" or any(f"the leaf {name!r}" in str(error) for name in NAMES)
        ):
            return
        raise
    assert same(loaded, expected), changed
    assert changed != "manifest.json"
    entries = {f.name: f for f in reading.read_manifest(folder).files}
    reader = files.ChunkReader(folder / changed, entries[changed].nbytes, entries[changed].checksums)
    assert reader.verify(), changed
    reader.close()


def flip(path: Path, draw: random.Random) -> bytes:
    """Change a byte somewhere; returns the bytes as they were."""
    old = path.read_bytes()
    at = draw.randrange(len(old))
    new = bytearray(old)
    new[at] ^= draw.randrange(1, 256)
    path.write_bytes(new)
    return old


@pytest.mark.parametrize("tries", [1000, pytest.param(20000, marks=pytest.mark.full)])
def test_a_flipped_byte_is_found(copy, tries):
    draw, expected = random.Random(tries), spmd.load(copy)
    paths = sorted(p for p in copy.iterdir() if p.stat().st_size)
    assert len(paths) >= 2
    for _ in range(tries // 2):
        path = draw.choice(paths)
        old = flip(path, draw)
        found(copy, expected, path.name)
        path.write_bytes(old)
    assert same(spmd.load(copy), expected)


def test_files_that_are_cut_off_or_longer(copy):
    draw = random.Random(1)
    for path in [p for p in copy.iterdir() if p.stat().st_size]:
        old = path.read_bytes()
        for length in (0, 1, len(old) // 2, len(old) - 1, *(draw.randrange(len(old)) for _ in range(10))):
            path.write_bytes(old[:length])
            with pytest.raises(CorruptCheckpointError, match=r"manifest\.json|the leaf '"):
                spmd.load(copy)
        path.write_bytes(old + b"\0")
        with pytest.raises(CorruptCheckpointError):
            spmd.load(copy)
        path.write_bytes(old)


def test_files_that_are_missing_or_swapped(copy):
    data = sorted(copy.glob("data-*"))
    for path in data:
        path.rename(copy / "away")
        with pytest.raises(CheckpointError, match=rf"the leaf '(?s:.*){path.name}"):
            spmd.load(copy)
        (copy / "away").rename(path)
    one, other = data[:2]
    one.rename(copy / "away")
    other.rename(one)
    (copy / "away").rename(other)
    with pytest.raises(CorruptCheckpointError, match="the leaf '"):
        spmd.load(copy)


def test_a_file_of_an_earlier_save_is_not_mistaken(tmp_path):
    for k in (0, 1):
        spmd.save(tmp_path / str(k), {"x": np.full(10, k)})
    old, new = (next((tmp_path / str(k)).glob("data-*")) for k in (0, 1))
    shutil.copy(old, new)
    with pytest.raises(CorruptCheckpointError, match="the leaf 'x'"):
        spmd.load(tmp_path / "1")


def test_a_damaged_manifest_keeps_its_files_until_the_next_save(tmp_path):
    folder = tmp_path / "checkpoint"
    spmd.save(folder, {"x": np.arange(3)})
    (data,) = folder.glob("data-*")
    flip(folder / "manifest.json", random.Random(0))
    with pytest.raises(CheckpointError, match="metadata"):
        spmd.save(folder, {"x": 1}, metadata=object())
    assert data.exists()
    spmd.save(folder, {"x": np.arange(4)})
    assert not data.exists()
    np.testing.assert_array_equal(spmd.load(folder)["x"], np.arange(4))


# Manifests with the right SHA-256 that nobody has written by spmd.save


def rewrite(folder: Path, change) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    changed = change(content)
    text = json.dumps(content if changed is None else changed).encode()
    text = b'{"sha256": "' + b"0" * 64 + b'", ' + text[1:]
    path.write_bytes(text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1))


def _set(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(content):
        for key in keys:
            content = content[key]
        content[last] = value

    return change


def _lacks(key):
    return lambda content: content.pop(key) and None


PIECE = ("arrays", "x", "pieces", 0)
CHANGES = {
    "another version": (_set("version", 2), "version 2"),
    "a version that is a text": (_set("version", "1"), "version '1'"),
    "another format": (_set("format", "zip"), "format 'zip'"),
    "other chunks": (_set("chunk", 5), "chunks of 5 bytes"),
    "a file outside of the folder": (_set("files", 0, "name", "../x"), "the file name '../x'"),
    "a file by an absolute path": (_set("files", 0, "name", "/etc/passwd"), "the file name '/etc/passwd'"),
    "a file name with more behind it": (
        lambda c: _set("files", 0, "name", c["files"][0]["name"] + "/../x")(c),
        "the file name",
    ),
    "a checksum too few": (_set("files", 0, "xxh3_64", ""), "without a checksum for each chunk"),
    "a shorter file": (_set("files", 0, "bytes", 90), "a piece that does not fit"),
    "a longer file": (_set("files", 0, "bytes", 2000), "needed: 2000 bytes"),
    "boxes that overlap": (_set("arrays", "x", "pieces", 1, "box", [[0, 3]]), "pieces that overlap or lack entries"),
    "boxes that lack entries": (_set("arrays", "x", "pieces", 1, "box", [[3, 5]]), "pieces that overlap or lack"),
    "boxes outside of the array": (_set(*PIECE, "box", [[0, 9]]), "a piece that does not fit"),
    "boxes of another dimension": (_set(*PIECE, "box", [[0, 3], [0, 1]]), "a piece that does not fit"),
    "a box backwards": (_set(*PIECE, "box", [[3, 0]]), "a piece that does not fit"),
    "no file of that number": (_set(*PIECE, "file", 7), "a piece that does not fit"),
    "a negative file": (_set(*PIECE, "file", -1), "a piece that does not fit"),
    "an offset past the end": (_set(*PIECE, "offset", 1 << 40), "a piece that does not fit"),
    "a negative offset": (_set(*PIECE, "offset", -8), "a piece that does not fit"),
    "an offset that is no integer": (_set(*PIECE, "offset", 8.5), "a piece that does not fit"),
    "a dtype of objects": (_set("arrays", "x", "dtype", "object"), "the dtype object"),
    "an unknown dtype": (_set("arrays", "x", "dtype", "float7"), "the dtype float7"),
    "a negative shape": (_set("arrays", "x", "shape", [-6]), "of shape (-6,)"),
    "a leaf without its array": (_set("tree", {"dict": [["x", {"array": "y"}]]}), "that is no manifest"),
    "a node of no kind": (_set("tree", {"dict": [["x", {"call": "3"}]]}), "the unknown kind 'call'"),
    "a named tuple with code for its name": (
        _set("tree", {"namedtuple": {"module": "os", "name": "f();", "items": []}}),
        "that is no manifest",
    ),
    "a text that is no JSON": (lambda content: [content], "that is no manifest"),
    **{
        f"nothing for {key}": (_lacks(key), "that is no manifest") for key in ("arrays", "files", "tree", "id", "chunk")
    },
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_manifest_that_nobody_wrote(case, tmp_path):
    folder = tmp_path / "checkpoint"
    with spmd.Mesh(x=2):
        spmd.save(folder, {"x": spmd.put(np.arange(6.0), P("x"))})
    assert len(spmd.load(folder)["x"]) == 6
    change, words = CHANGES[case]
    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        spmd.load(folder)
    assert words in str(caught.value)


# Files of others


class Evil:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["x.pt", "x.pkl", "x.safetensors", "model.safetensors.index.json", "manifest.json"])
def test_no_pickle_is_read(name, tmp_path):
    path, mark = tmp_path / name, tmp_path / "mark"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps({"weight": Evil(mark)}, protocol))
        for place in (path, tmp_path):
            with pytest.raises(CheckpointError):
                spmd.load(place)
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists()


def test_a_pickle_in_place_of_data(copy, tmp_path):
    for path in copy.glob("data-*"):
        path.write_bytes(pickle.dumps(Evil(tmp_path / "mark")).ljust(path.stat().st_size, b"."))
    with pytest.raises(CorruptCheckpointError, match="the leaf '"):
        spmd.load(copy)
    assert not (tmp_path / "mark").exists()


def test_headers_of_others_that_are_damaged(tmp_path):
    """Such files have no checksums: what does not load is explained."""
    path = tmp_path / "x.safetensors"
    save_file({"a": np.arange(6.0).reshape(2, 3), "b": np.arange(3), "c": np.zeros((0, 2), np.float32)}, path)
    old, draw, refused = path.read_bytes(), random.Random(0), 0
    length = 8 + int.from_bytes(old[:8], "little")
    for _ in range(1500):
        new = bytearray(old)
        for _ in range(draw.choice([1, 1, 2, 8])):
            new[draw.randrange(length)] = draw.choice([draw.randrange(256), *b'0123456789-[]{}",:.tfn'])
        path.write_bytes(new)
        try:
            spmd.load(path)
        except CheckpointError:
            refused += 1
    assert refused > 500
