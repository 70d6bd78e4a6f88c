"""What `spmd.io.inspect` and `python -m spmd checkpoint` say of checkpoints, whole and damaged."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from launch import run_python

import spmd
from spmd import P
from spmd.__main__ import main
from spmd.errors import CheckpointError, CorruptCheckpointError

CHUNK = 1 << 20


@pytest.fixture
def folder(tmp_path):
    """Two workers' pieces of w, of 1.5 MiB each, and small leaves, in one file."""
    rng = np.random.default_rng(0)
    with spmd.Mesh(x=2):
        w = spmd.put(rng.normal(size=(384, 1024)), P("x"))
        tree = {"params": {"w": w, "b": np.zeros(3, np.float32), "empty": np.zeros((0, 4))}, "epoch": 7, "rate": 0.5}
        spmd.save(tmp_path / "saved", tree | {"none": None, "z": 2j}, metadata={"code": "a1"})
    return tmp_path / "saved"


def flip(folder, *places: int) -> str:
    """Flip a bit at each place of the only data file; its name."""
    (path,) = folder.glob("data-*")
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1
    path.write_bytes(content)
    return path.name


def test_everything_that_was_saved_is_listed(folder):
    info = spmd.io.inspect(folder)
    assert list(info.arrays) == ["params.w", "params.b", "params.empty"]
    w, b, empty = info.arrays.values()
    assert (w.shape, w.dtype, w.layout, w.nbytes, w.pieces) == ((384, 1024), np.float64, "P('x', None)", 3 << 20, 2)
    assert (b.shape, b.dtype, b.layout, b.nbytes, b.pieces) == ((3,), np.float32, "", 12, 1)
    assert (empty.shape, empty.nbytes, empty.pieces, empty.files) == ((0, 4), 0, 0, ())
    assert w.files == b.files == tuple(p.name for p in folder.glob("data-*"))
    assert info.constants == {"epoch": 7, "rate": 0.5, "none": None, "z": 2j}
    assert (info.metadata, info.nbytes, info.files, len(info.id)) == ({"code": "a1"}, (3 << 20) + 12, 1, 16)
    assert info.has_checksums
    assert info.verify() == []


def test_the_table_is_in_the_order_of_the_tree(folder):
    lines = str(spmd.io.inspect(folder)).splitlines()
    assert lines[0].startswith(f"{folder}: 3 arrays, 3 MiB in 1 file, saved 20")
    assert lines[1:3] == ['metadata: {"code": "a1"}', ""]
    rows = [line.split() for line in lines[3:]]
    assert rows[0] == ["name", "shape", "dtype", "layout", "bytes", "pieces"]
    names = [row[0] for row in rows[1:]]
    assert names == ["params.w", "params.b", "params.empty", "epoch", "rate", "none", "z"]
    assert rows[1][1:] == ["(384,", "1024)", "float64", "P('x',", "None)", "3", "MiB", "2"]
    assert rows[2][1:] == ["(3,)", "float32", "12", "B", "1"]
    assert rows[4:] == [["epoch", "7"], ["rate", "0.5"], ["none", "None"], ["z", "2j"]]
    assert "3 arrays" in repr(spmd.io.inspect(folder))


def test_a_flipped_byte_is_found_with_the_leaves_of_its_chunk(folder):
    (path,) = folder.glob("data-*")
    size = path.stat().st_size
    for places, leaves, in_header in (
        ([20], [("params.w",)], [True]),  # the chunk of the header has entries of w too
        ([CHUNK + 5], [("params.w",)], [False]),
        ([size - 3], [("params.w", "params.b")], [False]),
        ([CHUNK, size - 1], [("params.w",), ("params.w", "params.b")], [False, False]),
    ):
        copy = folder.with_name("copy")
        shutil.copytree(folder, copy)
        name = flip(copy, *places)
        damages = spmd.io.inspect(copy).verify()
        assert [d.leaves for d in damages] == leaves
        assert [d.in_header for d in damages] == in_header
        assert all(d.file == name and "checksum" in d.what for d in damages)
        for d, place in zip(damages, places, strict=True):
            start, stop = place // CHUNK * CHUNK, min(size, (place // CHUNK + 1) * CHUNK)
            assert f"bytes {start} to {stop}" in d.what
        assert str(damages[0]).count("the header of the file") == in_header[0]
        shutil.rmtree(copy)


def test_files_that_are_gone_or_cut_off(folder):
    (path,) = folder.glob("data-*")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    (damage,) = spmd.io.inspect(folder).verify()
    assert damage.what == f"{size - 1} bytes in place of {size}"
    assert damage.leaves == ("params.w", "params.b")
    path.unlink()
    (damage,) = spmd.io.inspect(folder).verify()
    assert (damage.what, damage.in_header) == ("no such file", True)


def test_a_checkpoint_that_is_replaced_meanwhile(folder):
    info = spmd.io.inspect(folder)
    spmd.save(folder, {"other": np.zeros(2)})
    with pytest.raises(CheckpointError, match="another save that replaced it"):
        info.verify()
    assert spmd.io.inspect(folder).verify() == []


def test_files_of_other_tools(tmp_path):
    from safetensors.numpy import save_file

    arrays = {"b.weight": np.ones((2, 3), np.float16), "a": np.zeros((), np.int64)}
    save_file(arrays, tmp_path / "model.safetensors", {"format": "np"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        info = spmd.io.inspect(path)
        assert {k: (a.shape, a.dtype) for k, a in info.arrays.items()} == {
            k: (x.shape, x.dtype) for k, x in arrays.items()
        }
        assert (info.metadata, info.id, info.created, info.has_checksums) == ({"format": "np"}, "", "", False)
        assert info.verify() == []
        assert "saved" not in str(info)


# python -m spmd checkpoint


def command(capsys, *args) -> tuple[int, str, str]:
    status = main(["checkpoint", *map(str, args)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_the_command_prints_the_table(folder, capsys):
    assert command(capsys, folder) == (0, f"{spmd.io.inspect(folder)}\n", "")
    status, out, err = command(capsys, folder, "--verify")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "every byte is as it was written"
    assert out.count("as written") == 4


def test_the_command_finds_damage(folder, capsys):
    name = flip(folder, -1)
    assert command(capsys, folder)[0] == 0  # nothing was read
    status, out, err = command(capsys, folder, "--verify")
    assert (status, err) == (1, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert rows["params.w"].endswith("DAMAGED")
    assert rows["params.b"].endswith("DAMAGED")
    assert rows["params.empty"].endswith("as written")
    assert out.splitlines()[-1].startswith(f"  {name}: bytes {3 * CHUNK} to ")
    assert out.splitlines()[-1].endswith("have another checksum: 'params.w', 'params.b'")
    status, out, _ = command(capsys, folder, "--verify", "--json")
    (damage,) = json.loads(out)["damages"]
    assert (status, damage["leaves"]) == (1, ["params.w", "params.b"])


def test_the_command_as_json(folder, capsys):
    status, out, _ = command(capsys, folder, "--json")
    content = json.loads(out)
    assert status == 0
    assert content["arrays"][1]["name"] == "params.b"
    assert (content["arrays"][1]["shape"], content["arrays"][1]["dtype"]) == ([3], "float32")
    assert content["constants"] == {"epoch": 7, "rate": 0.5, "none": None, "z": "2j"}
    assert content["metadata"] == {"code": "a1"}
    assert "damages" not in content


def test_constants_that_json_lacks(tmp_path):
    spmd.save(tmp_path, {"a": math.inf, "b": b"xy", "c": True})
    assert spmd.io.inspect(tmp_path).to_dict()["constants"] == {"a": "inf", "b": "b'xy'", "c": True}


def test_the_command_on_a_damaged_manifest(folder, capsys):
    path = folder / "manifest.json"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    status, out, err = command(capsys, folder)
    assert (status, out) == (1, "")
    assert "another SHA-256" in err
    with pytest.raises(CorruptCheckpointError):
        spmd.io.inspect(folder)


def test_the_command_where_there_is_none(tmp_path, capsys):
    status, out, err = command(capsys, tmp_path / "none")
    assert (status, out) == (2, "")
    assert "no such folder" in err
    (tmp_path / "model.bin").write_bytes(b"\x80\x02}q\x00." * 4)  # a pickle
    status, _, err = command(capsys, tmp_path / "model.bin")
    assert status == 1
    assert "files of pickle" in err


def test_the_command_on_a_directory_of_steps(folder, capsys, tmp_path):
    steps = tmp_path / "run"
    for step in (9, 10, 200):
        shutil.copytree(folder, steps / f"step-{step}")
    (steps / "step-300").mkdir()  # of a save that goes on
    status, out, _ = command(capsys, steps)
    lines = out.splitlines()
    assert (status, lines[0]) == (0, f"{steps}: 3 checkpoints")
    assert [line.split()[0] for line in lines[2:]] == ["step", "9", "10", "200"]
    assert "3 MiB" in lines[3]
    flip(steps / "step-10", CHUNK)
    (steps / "step-200" / "manifest.json").write_bytes(b"{}")
    status, out, _ = command(capsys, steps, "--verify")
    verdicts = {line.split()[0]: line.endswith("DAMAGED") for line in out.splitlines()[3:6]}
    assert (status, verdicts) == (1, {"9": False, "10": True, "200": True})
    assert "  step 10: data-" in out
    status, out, _ = command(capsys, steps, "--json")
    assert [c["step"] for c in json.loads(out)["steps"]] == [9, 10, 200]
    with pytest.raises(CheckpointError, match="one for each step"):
        spmd.io.inspect(steps)


def test_the_command_in_a_process(folder):
    ended = run_python("-m", "spmd", "checkpoint", str(folder))
    assert ended.returncode == 0
    assert ended.stdout == f"{spmd.io.inspect(folder)}\n"
