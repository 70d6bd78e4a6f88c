"""Saves and loads that fail or are interrupted: an error everywhere, the old checkpoint intact, the next save works."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from injected import Place, injected, places_of
from killed_saves import check_files, in_child, is_refused, left, loaded, save, save_soon
from launch import each_mpi, launch, run_python

import spmd
from spmd import P
from spmd.errors import CheckpointError
from spmd.io import files, writing

HERE = Path(__file__).parent
FAULTS = {
    "full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "denied": lambda: PermissionError(errno.EACCES, "Permission denied"),
    "interrupt": KeyboardInterrupt,
}


@pytest.fixture
def small_files(monkeypatch):
    for name, nbytes in (("FILE_BYTES", 200), ("SLAB_BYTES", 100), ("SHARED_MIN", 100)):
        monkeypatch.setattr(writing, name, nbytes)


@pytest.mark.parametrize(
    ("fault", "kind", "share"),
    [
        pytest.param(fault, kind, share, marks=() if share == 3 else pytest.mark.full)
        for fault in FAULTS
        for kind in ("outside", "lockstep", "threads")
        for share in (3, 1)
    ],
)
def test_a_fault_at_a_place(fault, kind, share, tmp_path, small_files):
    """At every third place, or at each: of one worker, in bodies."""
    folder, draw = tmp_path / "checkpoint", random.Random(f"{fault} {kind}")
    save(folder, 0, kind)
    total = len(places_of(lambda: save(folder, 1, kind)))
    now, failed = 1, 0
    for number in draw.sample(range(total), total // share):
        hit: list[Place] = []
        if _fails(folder, 2 * number + 2, kind, fault, number, hit):
            failed += 1
        if any(place.commits for place in hit):
            now = 2 * number + 2
        assert loaded(folder) == now, hit
        if hit[-1].call not in ("unlink", "close", "replace") and not any(place.commits for place in hit):
            assert not left(folder), hit  # what it had written is gone
        now = 2 * number + 3
        save(folder, now, kind)
        assert loaded(folder) == now
        check_files(folder)
    assert failed > total // share * 0.7


def _fails(folder: Path, k: int, kind: str, fault: str, number: int, hit: list[Place]) -> bool:
    def act(place: Place) -> None:
        if place.number == number or place.commits:
            hit.append(place)
        if place.number == number:
            raise FAULTS[fault]()

    kinds = KeyboardInterrupt if fault == "interrupt" else CheckpointError
    try:
        with injected(act):
            save(folder, k, kind)
    except kinds as error:
        if fault == "interrupt" or str(FAULTS[fault]()) in str(error):
            return True
        raise
    # Files that cannot be removed are left to the next save.
    assert hit[-1].call in ("unlink", "replace"), hit
    return False


@contextmanager
def full_disk(folder: Path):
    """A small file system."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def limited(nbytes: int):
    """No file may become longer."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_disk_that_is_full(tmp_path, scheduler):
    with full_disk(tmp_path / "disk"), spmd.Mesh(x=3, scheduler=scheduler):
        folder = tmp_path / "disk" / "checkpoint"
        spmd.save(folder, {"x": spmd.put(np.arange(3000.0), P("x"))})
        with pytest.raises(CheckpointError, match=r"No space left on device(?s:.*)make room on the disk"):
            spmd.save(folder, {"x": spmd.put(np.arange(6000.0), P("x"))})
        check_files(folder)
        with pytest.raises(CheckpointError, match="No space left on device"):
            spmd.map(lambda x: spmd.save(folder, {"x": x}), P(), None)(np.arange(6000.0))
        check_files(folder)
        np.testing.assert_array_equal(spmd.load(folder)["x"], np.arange(3000.0))
        spmd.save(folder, {"x": spmd.put(np.arange(3001.0), P("x"))})
        check_files(folder)
        assert len(spmd.load(folder)["x"]) == 3001


def test_leftovers_make_room_for_the_next_save(tmp_path):
    """A dead job has left as much as fits: it is removed before anything is written."""
    with full_disk(tmp_path / "disk"):
        folder = tmp_path / "disk" / "checkpoint"
        spmd.save(folder, {"x": np.arange(2000.0)})
        (folder / f"data-{'0' * 16}-00000-000.safetensors").write_bytes(bytes(30000))
        spmd.save(folder, {"x": np.arange(3000.0)})
        check_files(folder)


def test_files_that_are_too_long(tmp_path):
    save(tmp_path / "checkpoint", 1, "outside")
    with limited(150), pytest.raises(CheckpointError, match="File too large"):
        save(tmp_path / "checkpoint", 2, "outside")
    check_files(tmp_path / "checkpoint")
    assert loaded(tmp_path / "checkpoint") == 1


def test_paths_where_nothing_can_be(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="the file "):
        spmd.save(tmp_path / "file", {"x": 1})
    with pytest.raises(CheckpointError, match="Not a directory"):
        spmd.save(tmp_path / "file" / "below", {"x": 1})
    with pytest.raises(CheckpointError, match="File name too long"):
        spmd.save(tmp_path / ("x" * 300), {"x": 1})
    (tmp_path / "folder" / "manifest.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="Is a directory"):
        spmd.load(tmp_path / "folder")


# Several at once


@pytest.mark.parametrize("killed", [False, True])
def test_the_lock_is_freed_though_a_child_was_forked_meanwhile(killed, tmp_path):
    """A loader of data that forks while a save goes on has no part in the lock, also if the saver is killed."""
    folder, note = tmp_path / "checkpoint", tmp_path / "child"

    def act(place: Place) -> None:
        if place.call == "write" and not note.exists():
            child = os.fork()
            if child == 0:
                signal.pause()
            note.write_text(str(child))
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)

    def saver() -> None:
        with injected(act):
            spmd.save(folder, {"x": np.arange(3)})

    try:
        status = in_child(saver)
        assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if killed else 0)
        spmd.save(folder, {"x": np.arange(4)})
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


def test_a_lock_is_freed_though_a_process_that_starts_has_its_file(tmp_path):
    """As between the fork and the exec of a subprocess."""
    lock = files.Lock(tmp_path / "lock")
    copy = os.dup(lock._file.fileno())
    lock.release()
    files.Lock(tmp_path / "lock").release()
    os.close(copy)


def test_two_saves_at_once_of_threads(tmp_path):
    folder, outcomes = tmp_path / "checkpoint", []

    def loop(first: int) -> None:
        for k in range(first, first + 25):
            try:
                spmd.save(folder, {"k": k, "x": np.full(1000, k)})
                outcomes.append("saved")
            except CheckpointError as error:
                outcomes.append("refused" if is_refused(error) else str(error))

    threads = [threading.Thread(target=loop, args=[100 * k]) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 100
    assert {"saved"} <= {*outcomes} <= {"saved", "refused"}
    tree = spmd.load(folder)
    assert (tree["x"] == tree["k"]).all()
    spmd.save(folder, {"k": 0})
    check_files(folder)


def test_savers_and_readers_of_several_processes(tmp_path):
    """Readers get a whole checkpoint each time, whichever it is."""
    ended = run_python(HERE / "at_once.py", tmp_path / "checkpoint", "3")
    assert ended.returncode == 0, ended
    saves, refused, loads = map(int, ended.stdout.split())
    assert saves > 20, ended
    assert refused > 0, ended
    assert loads > 20, ended


# Processes


@each_mpi
def test_processes_that_fail(python, tmp_path):
    ended = launch(HERE / "failing_processes.py", tmp_path, n=2, python=python, timeout=120.0)
    assert ended.returncode == 0, ended
    assert ended.stdout.count("all is well") == 2, ended


@each_mpi
def test_a_process_that_leaves(python, tmp_path):
    """It raises, while the other one saves: the job ends, and the old checkpoint is there."""
    ended = launch(HERE / "failing_processes.py", tmp_path, "leaves", n=2, python=python)
    assert ended.returncode not in (0, None), ended
    assert "I leave" in ended.stderr
    assert loaded(tmp_path / "checkpoint") == 0
    save_soon(tmp_path / "checkpoint", 1)
    check_files(tmp_path / "checkpoint")


@each_mpi
def test_processes_that_load_what_is_being_replaced(python, tmp_path):
    folder, ended = tmp_path / "checkpoint", []
    spmd.save(folder, {"k": 0, "x": np.full(1000, 0)})

    def loads() -> None:
        ended.append(launch(HERE / "failing_processes.py", tmp_path, "loads", n=2, python=python))

    thread = threading.Thread(target=loads)
    thread.start()
    k = 0
    while thread.is_alive():
        k += 1
        spmd.save(folder, {"k": k, "x": np.full(1000, k)})
    thread.join()
    assert ended[0].returncode == 0, ended[0]
    assert k > 5
