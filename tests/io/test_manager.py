"""Checkpoints of a run: which are kept, in the background, after damage and failures, and in bodies."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch, run_python

import spmd
from spmd import P
from spmd.errors import CheckpointError, CorruptCheckpointError
from spmd.io import files, loading, manager, reading
from spmd.io.saving import Save


def steps_in(folder: Path) -> list[int]:
    return sorted(int(f.name.removeprefix("step-")) for f in folder.iterdir())


@pytest.mark.parametrize(
    ("max_to_keep", "keep_every", "kept"),
    [
        (3, None, [7, 8, 9]),
        (1, None, [9]),
        (None, None, [*range(10)]),
        (2, 4, [0, 4, 8, 9]),
        (20, None, [*range(10)]),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_which_steps_are_kept(tmp_path, max_to_keep, keep_every, kept, wait):
    checkpoints = spmd.io.CheckpointManager(tmp_path / "run", max_to_keep, keep_every)
    for step in range(10):
        checkpoints.save(step, {"step": step}, wait=wait)
    assert checkpoints.all_steps() == kept == steps_in(tmp_path / "run")
    assert checkpoints.latest() == 9
    assert [checkpoints.restore(step)["step"] for step in kept] == kept


def test_a_step_before_those_that_exist_is_kept(tmp_path):
    checkpoints = spmd.io.CheckpointManager(tmp_path, max_to_keep=2)
    for step in (5, 6, 7, 3):
        checkpoints.save(step, step)
    assert checkpoints.all_steps() == [3, 6, 7]
    checkpoints.save(6, 60)
    assert checkpoints.restore(6) == 60


def test_there_is_none(tmp_path):
    checkpoints = spmd.io.CheckpointManager(tmp_path / "nowhere")
    assert checkpoints.latest() is None
    assert checkpoints.all_steps() == []
    with pytest.raises(CheckpointError, match="no step that is whole"):
        checkpoints.restore()
    assert not (tmp_path / "nowhere").exists()


def test_what_is_saved_in_the_background_may_be_donated_and_changed(tmp_path, monkeypatch):
    """The thread does not write before the program has changed everything that it gave."""
    go_on = threading.Event()
    write = Save.write
    monkeypatch.setattr(Save, "write", lambda self: (go_on.wait(30), write(self))[1])
    whole = np.arange(12.0).reshape(6, 2)
    optimizer = spmd.optim.sgd(0.5, 0.9)
    with spmd.Mesh(x=2):
        params = spmd.put(whole, P("x"))
        state, bare = optimizer.init(params), whole.copy()
        checkpoints = spmd.io.CheckpointManager(tmp_path)
        checkpoints.save(1, {"params": params, "state": state, "bare": bare})
        params, state = optimizer.update(spmd.put(whole, P("x")), state, params, donate=True)
        bare[:] = -1
        go_on.set()
        saved = checkpoints.restore(1)
    np.testing.assert_array_equal(saved["params"], whole)
    np.testing.assert_array_equal(saved["state"].velocity, 0 * whole)
    np.testing.assert_array_equal(saved["bare"], whole)


@pytest.mark.parametrize("then", ["save", "wait", "latest", "all_steps", "restore"])
def test_an_error_in_the_background_surfaces_at_the_next_call(tmp_path, monkeypatch, then):
    checkpoints = spmd.io.CheckpointManager(tmp_path)
    checkpoints.save(1, {"x": np.arange(3)}, wait=True)

    def full(file, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", full)
        checkpoints.save(2, {"x": np.arange(4)})
        while checkpoints._running[None]._thread.is_alive():
            time.sleep(0.01)
    arguments = {"save": (3, {"x": 0})}.get(then, ())
    with pytest.raises(CheckpointError, match="No space left"):
        getattr(checkpoints, then)(*arguments)
    assert checkpoints.all_steps() == [1]
    checkpoints.save(3, {"x": np.arange(5)})
    assert checkpoints.all_steps() == [1, 3]
    assert steps_in(tmp_path) == [1, 3]


def test_damaged_steps_are_skipped_with_a_warning(tmp_path):
    with spmd.Mesh(x=2):
        like = {"w": spmd.put(np.arange(5.0), P("x"))}
        checkpoints = spmd.io.CheckpointManager(tmp_path, max_to_keep=None)
        for step in range(5):
            checkpoints.save(step, {"w": like["w"] + step})
        checkpoints.wait()
        (data,) = (tmp_path / "step-4").glob("*.safetensors")
        text = bytearray(data.read_bytes())
        text[-3] ^= 1
        data.write_bytes(text)
        manifest = tmp_path / "step-3" / "manifest.json"
        manifest.write_text(manifest.read_text().replace("float64", "float32"))
        next((tmp_path / "step-2").glob("*.safetensors")).unlink()
        with pytest.warns(RuntimeWarning, match="is skipped") as warned:
            restored = checkpoints.restore(like=like)
        np.testing.assert_array_equal(restored["w"].numpy(), np.arange(5.0) + 1)
        shown = [str(w.message) for w in warned]
        assert [text.split(" is skipped")[0] for text in shown] == ["step 4", "step 3", "step 2"]
        assert "the leaf 'w'" in shown[0]
        assert "manifest" in shown[1]
        assert {Path(w.filename).name for w in warned} == {Path(__file__).name}
        with pytest.raises(CorruptCheckpointError, match="the leaf 'w'"):
            checkpoints.restore(4, like)
        with pytest.raises(CheckpointError, match=r"needed: the leaves that were saved"):
            checkpoints.restore(1, {"v": like["w"]})  # what does not fit is no damage


def test_a_step_that_another_program_removes_meanwhile_is_no_damage(tmp_path, monkeypatch, recwarn):
    """Before it is opened, and while it is read."""
    checkpoints = spmd.io.CheckpointManager(tmp_path, max_to_keep=1)
    read, opened, moments = reading.Reader.read, loading.open_checkpoint, ["opened", "read"]
    checkpoints.save(0, np.zeros(3), wait=True)

    def saving(moment, call):
        def then(*args):
            if moments and moments[0] == moment:
                moments.pop(0)
                number = 2 - len(moments)
                spmd.io.CheckpointManager(tmp_path, max_to_keep=1).save(number, np.zeros(3) + number, wait=True)
            return call(*args)

        return then

    monkeypatch.setattr(loading, "open_checkpoint", saving("opened", opened))
    monkeypatch.setattr(reading.Reader, "read", saving("read", read))
    assert checkpoints.restore().tolist() == [2, 2, 2]
    assert not moments
    assert not recwarn.list
    with pytest.raises(CheckpointError, match="no step 1"):
        checkpoints.restore(1)


def test_leftovers_of_a_dead_program_are_removed(tmp_path):
    """A program that is killed in the background leaves a folder without a manifest."""
    program = (
        "import os, numpy as np, spmd, spmd.io.files as files\n"
        "files.replace_file = None\n"
        "import spmd.io.saving as saving\n"
        "saving.replace_file = lambda *_: os.kill(os.getpid(), 9)\n"
        f"spmd.io.CheckpointManager({str(tmp_path)!r}).save(7, np.arange(10.0))\n"
    )
    run_python("-c", program)
    assert [f.name.split("-")[0] for f in sorted((tmp_path / "step-7").iterdir())] == ["data", "save.lock"]
    checkpoints = spmd.io.CheckpointManager(tmp_path)
    assert checkpoints.latest() is None
    checkpoints.save(8, 1)
    assert checkpoints.all_steps() == [8]
    assert steps_in(tmp_path) == [8]


def test_a_program_that_ends_completes_its_save_and_says_what_failed(tmp_path):
    program = (
        f"import numpy as np, spmd; m = spmd.io.CheckpointManager({str(tmp_path / 'run')!r}); m.save(1, np.ones(9))"
    )
    assert run_python("-c", program).returncode == 0
    np.testing.assert_array_equal(spmd.load(tmp_path / "run" / "step-1"), np.ones(9))
    failing = (
        "import spmd.io.files as files\n"
        "def full(file, data): raise OSError(28, 'No space left on device')\n"
        "files.write_all = full\n"
    )
    ended = run_python("-c", program.replace("; ", "\n").replace("import numpy", failing + "import numpy"))
    assert "the save of step 1 failed" in ended.stderr
    assert "No space left" in ended.stderr


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_in_bodies(tmp_path, scheduler):
    checkpoints = spmd.io.CheckpointManager(tmp_path, max_to_keep=2)

    def body(x):
        for step in range(4):
            checkpoints.save(step, {"sum": spmd.psum(x, "x") + step})
        assert checkpoints.latest() == 3
        return checkpoints.restore()["sum"] + 0 * x

    x = np.arange(6.0)
    with spmd.Mesh(x=3, scheduler=scheduler):
        result = spmd.map(body, in_specs=P("x"), out_specs=P("x"))(x).numpy()
    np.testing.assert_array_equal(result, np.tile(x.reshape(3, 2).sum(0) + 3, 3))
    assert steps_in(tmp_path) == [2, 3]


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_in_bodies_on_meshes_of_several_sizes(tmp_path, scheduler, monkeypatch):
    """What a worker saved that a later mesh lacks is completed with the rest."""
    write = Save.write
    monkeypatch.setattr(Save, "write", lambda self: (time.sleep(0.05), write(self)))
    checkpoints = spmd.io.CheckpointManager(tmp_path, max_to_keep=None)

    def body(saves: bool):
        steps = checkpoints.all_steps()
        if saves:
            checkpoints.save(len(steps), {"n": len(steps)})
        return np.float64(len(steps))

    counts = []
    for size, saves in ((4, True), (2, False), (4, True), (1, True), (3, False), (2, True)):
        with spmd.Mesh(x=size, scheduler=scheduler):
            counts.append(float(spmd.map(partial(body, saves), in_specs=(), out_specs=P())()))
    assert counts == [0, 1, 1, 2, 3, 3]
    assert checkpoints.all_steps() == [0, 1, 2, 3]


def test_folders_of_others_stay(tmp_path):
    """No checkpoint, but the name of one: also where names of steps are removed."""
    for name in ("step-1", "step-007", "step-x", "step-5.bak", "step-\u0663", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / "step-9").write_text("a file")
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "manifest.json").write_text('{"name": "of another program"}')
    spmd.save(tmp_path / "step-0012", 1)
    before = sorted(tmp_path.rglob("*"))
    checkpoints = spmd.io.CheckpointManager(tmp_path, max_to_keep=1)
    for step in (1, 2):
        checkpoints.save(step, step, wait=True)
    assert checkpoints.latest() == 2
    assert not (tmp_path / "step-1" / "manifest.json").exists()
    assert all(f.exists() for f in before)
    assert {f for f in {*tmp_path.rglob("*")} - {*before} if f.parent.name != "step-2"} == {tmp_path / "step-2"}


def test_a_folder_that_is_locked_stays(tmp_path):
    checkpoints = spmd.io.CheckpointManager(tmp_path, max_to_keep=1)
    checkpoints.save(1, 1, wait=True)
    lock = files.Lock(tmp_path / "step-1" / "save.lock")
    checkpoints.save(2, 2, wait=True)
    assert steps_in(tmp_path) == [1, 2]
    lock.release()
    checkpoints.save(3, 3, wait=True)
    assert steps_in(tmp_path) == [3]


@each_mpi
def test_processes(python, tmp_path):
    ended = launch(PROGRAMS / "managing.py", str(tmp_path), n=3, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("whole") == 3, str(ended)
    assert steps_in(tmp_path / "run") == [3, 4, 5]


def test_bad_arguments(tmp_path):
    for option in ("max_to_keep", "keep_every"):
        for bad in (0, -1, 1.5, "3"):
            with pytest.raises(CheckpointError, match=f"argument {option}"):
                spmd.io.CheckpointManager(tmp_path, **{option: bad})
    for bad in (-1, 1.5, "3", None):
        with pytest.raises(CheckpointError, match="argument step"):
            spmd.io.CheckpointManager(tmp_path).save(bad, 0)
    assert os.listdir(tmp_path) == []
    assert manager._POLL_SECONDS > 0


@pytest.mark.parametrize("begins_in_body", [False, True])
def test_a_save_in_a_body_and_what_follows_outside(tmp_path, begins_in_body):
    """What goes on is completed, wherever it was begun."""
    manager = spmd.io.CheckpointManager(tmp_path)
    tree, found = {"w": np.ones(1_000_000)}, []

    def body(x):
        if begins_in_body:
            manager.save(1, tree)
        else:
            found.append(manager.latest())
        return x

    with spmd.Mesh(x=2):
        if not begins_in_body:
            manager.save(1, tree)
        spmd.map(body, P("x"), P("x"))(spmd.ones(2, spec=P("x")))
        if begins_in_body:
            found.append(manager.latest())
    assert set(found) == {1}
