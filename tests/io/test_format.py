"""The format of checkpoints: `version_1` was written by the first release, and loads for ever. What is written is
described in docs/reference/checkpoint_format.md, and other tools open it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import spmd
from spmd import P
from spmd.errors import CheckpointError
from spmd.io.manifest import MANIFEST, VERSION
from spmd.io.reading import read_manifest

FIXTURE = Path(__file__).with_name("version_1")
State = namedtuple("State", "mean count")


def numbers(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    """Numbers that every dtype holds exactly."""
    return (np.arange(np.prod(shape)).reshape(shape) % 7 - 2).astype(dtype)


def content() -> dict[Any, Any]:
    """What the fixture holds. It was written by `spmd.save` of this, with the first two arrays on a mesh x=2, y=2."""
    return {
        "split": numbers(5, 3),
        "complex": numbers(3, 2) * (1 - 2j),
        "float16": numbers(4, dtype=np.float16),
        "bfloat16": numbers(2, 3, dtype=ml_dtypes.bfloat16),
        "float8": numbers(4, dtype=ml_dtypes.float8_e4m3fn),
        "booleans": np.array([True, False]),
        "empty": np.zeros((0, 3), np.float32),
        "number": np.array(7, np.int8),
        "scalar": np.float32(2.5),
        "constants": [1, 2**70, -0.5, float("-inf"), 1 - 2j, "text", b"bytes", True, None],
        "state": State((np.arange(3),), 7),
        "adam": spmd.optim.AdamState(np.array(3), {"w": numbers(2)}, {"w": numbers(2)}),
        3: "three",
        "counter": Counter("aab"),
    }


def check(loaded: Any, expected: Any) -> None:
    """The same structure, classes and values. Named tuples that `spmd.load` does not know have the same fields."""
    if hasattr(expected, "_fields"):
        assert (type(loaded).__name__, loaded._fields) == (type(expected).__name__, expected._fields)
    else:
        assert type(loaded) is type(expected)
    if isinstance(expected, dict):
        assert [*loaded] == [*expected]
        for key in expected:
            check(loaded[key], expected[key])
    elif isinstance(expected, tuple | list):
        for one, other in zip(loaded, expected, strict=True):
            check(one, other)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (loaded.dtype, loaded.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(loaded, expected)
    else:
        assert loaded == expected


def test_version_1_loads_for_ever():
    loaded = spmd.load(FIXTURE)
    check(loaded, content())
    assert type(loaded["adam"]) is spmd.optim.AdamState
    info = spmd.io.inspect(FIXTURE)
    assert info.metadata == {"made for": "tests"}
    assert not info.verify()


@pytest.mark.parametrize(("mesh", "spec"), [({"z": 3}, P("z")), ({"z": 8}, P(None, "z")), ({"z": 1}, P())])
def test_version_1_loads_onto_any_mesh(mesh, spec):
    with spmd.Mesh(**mesh):
        like = {"split": spmd.zeros((5, 3), spec=spec), "complex": spmd.zeros((3, 2), complex, spec=spec)}
        loaded = spmd.load(FIXTURE, like, names=["split", "complex"])
    for name, x in loaded.items():
        assert x.spec == like[name].spec
        np.testing.assert_array_equal(x.numpy(), content()[name])


def test_what_is_written_today_is_version_1(tmp_path):
    """Everything but the id, the time and what depends on them. If this fails, the format has changed: give it another
    version, and keep the fixture."""
    tree = content()
    with spmd.Mesh(x=2, y=2):
        tree["split"], tree["complex"] = spmd.put(tree["split"], P("x", "y")), spmd.put(tree["complex"], P("x"))
        spmd.save(tmp_path, tree, metadata={"made for": "tests"})
    today, then = (json.loads((folder / MANIFEST).read_bytes()) for folder in (tmp_path, FIXTURE))
    for manifest, folder in ((today, tmp_path), (then, FIXTURE)):
        manifest["files"] = [hashlib.sha256((folder / f["name"]).read_bytes()).hexdigest() for f in manifest["files"]]
        for key in ("id", "sha256", "created"):
            del manifest[key]
    assert VERSION == 1
    assert today == then


def test_other_tools_open_the_files():
    manifest = read_manifest(FIXTURE)
    for k, file in enumerate(manifest.files):
        with safe_open(FIXTURE / file.name, framework="numpy") as tensors:
            pieces = {
                (name, p.box): entry for name, entry in manifest.arrays.items() for p in entry.pieces if p.file == k
            }
            assert len([*tensors.keys()]) == len(pieces)
            np.testing.assert_array_equal(tensors.get_tensor("split[0:3, 0:2]"), numbers(5, 3)[:3, :2])
            pairs = tensors.get_tensor("complex[2:3, 0:2]")
            np.testing.assert_array_equal(pairs[..., 0] + 1j * pairs[..., 1], content()["complex"][2:])
            bits = tensors.get_tensor("bfloat16")
            assert bits.dtype == np.uint16
            np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16), content()["bfloat16"])


def test_a_later_version_is_refused(tmp_path):
    spmd.save(tmp_path, [1])
    manifest = read_manifest(tmp_path)
    manifest.version = VERSION + 1
    (tmp_path / MANIFEST).write_bytes(manifest.to_bytes())
    with pytest.raises(CheckpointError, match=f"version {VERSION} at most"):
        spmd.load(tmp_path)
