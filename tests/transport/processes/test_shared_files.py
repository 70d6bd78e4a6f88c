"""Files that processes of a host share: what another user can do to them, where there is no room, and what is left."""

from __future__ import annotations

import mmap
import os
import random
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from launch import PROGRAMS, ROOT, TORCHRUN, each_mpi, launch, launch_and_kill
from process_cases import ended_well, timed

from spmd.kernels.memory import pool
from spmd.transport.processes import mailbox, shared_files, shared_memory
from spmd.transport.processes.shared_files import created, elected, job_name, opened, remove_abandoned
from spmd.transport.processes.status_board import StatusBoard

NOBODY = 65534
SIZE = 100_000
NAME = re.compile(r"spmd-\d+-[0-9a-f]{16}-\d+-\d+-[0-9a-f]{16}-[0-9a-f]{32}(\.new)?")

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and /dev/shm")
another_user = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="only root can start a process of another user"
)


def _can_unshare(*options: str) -> bool:
    try:
        return subprocess.run(["unshare", *options, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


own_mounts = pytest.mark.skipif(
    not _can_unshare("--mount") or os.geteuid() != 0, reason="needs root and unshare, for a small /dev/shm"
)
own_processes = pytest.mark.skipif(
    not _can_unshare("--pid", "--fork", "--mount-proc") or os.geteuid() != 0,
    reason="needs root and unshare, for a PID namespace",
)
BY_MPI = each_mpi.args[1]
BY_TORCHRUN = pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.torch)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The only folder for such files."""
    monkeypatch.setattr(shared_files, "_folders", lambda: [tmp_path])
    return tmp_path


@pytest.fixture
def job():
    """The name of a job of whose files none is left after the test."""
    name = f"spmd-{os.geteuid()}-{os.urandom(8).hex()}-{os.getpid()}-1-{'0' * 16}"
    yield name
    for path in _files():
        if path.name.startswith(name):
            path.unlink()


def _files() -> set[Path]:
    """Files of this library, in all folders where they may be."""
    return {
        path
        for folder in shared_files._folders()
        for path in folder.glob("spmd-*")
        if NAME.fullmatch(path.name) and path.lstat().st_uid == os.geteuid()
    }


# One file for all


def test_however_many_look_at_once_one_makes_the_file_and_all_find_it(folder):
    for attempt in range(40):
        name, found = f"spmd-0-{attempt:016x}-1-1-{'0' * 16}", []
        barrier = threading.Barrier(6)

        def look(name=name, found=found, barrier=barrier):
            barrier.wait()
            found.append(elected(name, SIZE))

        threads = [threading.Thread(target=look) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len({file.path for file in found}) == 1
        assert len(found) == 6
        assert [found[0].path] == [path for path in folder.iterdir() if path.name.startswith(name)]


def test_a_file_is_random_reserved_and_ones_own(folder):
    os.umask(before := os.umask(0o777))
    os.umask(0o777)
    try:
        one = created("spmd-0-" + "0" * 16 + "-1-1-" + "0" * 16, SIZE)
    finally:
        os.umask(before)
    another = created("spmd-0-" + "0" * 16 + "-1-1-" + "0" * 16, SIZE)
    assert NAME.fullmatch(one.path.name)
    assert one.path.name[-32:] != another.path.name[-32:]
    known = one.path.lstat()
    assert stat.S_IMODE(known.st_mode) == 0o600
    assert known.st_blocks * 512 >= known.st_size == SIZE + mmap.PAGESIZE
    same = opened(one.path, SIZE)
    same.memory[same.offset] = 7
    assert one.memory[one.offset] == 7
    one.unlink()
    assert not one.path.exists()
    with pytest.raises(PermissionError, match="is not a file that a process of this job"):
        opened(one.path, SIZE)


def test_a_name_that_has_become_that_of_another_file_is_not_taken_away(folder):
    one = created("spmd-0-" + "0" * 16 + "-1-1-" + "0" * 16, SIZE)
    one.path.unlink()
    one.path.write_text("another")
    one.unlink()
    assert one.path.read_text() == "another"


@pytest.mark.parametrize(
    "wrong", ["size", "mode", "content", "folder", "name", "link", "hard link", "folder there", "fifo"]
)
def test_other_files_are_not_opened(folder, wrong):
    job = "spmd-0-" + "0" * 16 + "-1-1-" + "0" * 16
    file = created(job, SIZE)
    path = file.path.with_name(f"{job}-{'f' * 32}")
    nbytes = SIZE
    if wrong == "size":
        path, nbytes = file.path, SIZE + 1
    elif wrong == "mode":
        path = file.path
        path.chmod(0o644)
    elif wrong == "content":
        path.write_bytes(bytes(SIZE + mmap.PAGESIZE))
        path.chmod(0o600)
    elif wrong == "folder":
        (folder / "below").mkdir()
        path = file.path.rename(folder / "below" / file.path.name)
    elif wrong == "name":
        path = file.path.rename(folder / "spmd-anything")
    elif wrong == "link":
        path.symlink_to(file.path)
    elif wrong == "hard link":
        path.hardlink_to(file.path)
    elif wrong == "folder there":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(PermissionError):
        opened(path, nbytes)
    other = elected(job, nbytes)
    assert other.path != path or wrong == "mode"
    assert other.path.stat().st_ino != file.path.stat().st_ino if wrong in ("size", "mode") else True


def test_a_candidate_whose_process_stands_still_is_waited_for_no_longer_than_a_limit(folder, monkeypatch):
    monkeypatch.setattr(shared_files, "_ELECTION_TIMEOUT", 0.3)
    job = "spmd-0-" + "0" * 16 + "-1-1-" + "0" * 16
    candidate = shared_files._Candidate(folder, job)
    with pytest.raises(TimeoutError, match="has not made the file"):
        elected(job, SIZE)
    assert list(folder.iterdir()) == [candidate.path]
    os.close(candidate.file)  # as when its process is killed
    assert elected(job, SIZE).path.parent == folder
    assert not candidate.path.exists()


def test_without_room_the_next_folder_is_taken(tmp_path, monkeypatch):
    for name in "one", "two":
        (tmp_path / name).mkdir()
    monkeypatch.setattr(shared_files, "_folders", lambda: [tmp_path / "one", tmp_path / "two"])
    monkeypatch.setattr(shared_files, "_reserve", _full_in(tmp_path / "one"))
    for make in created, elected:
        file = make(f"spmd-0-{'0' * 16}-1-1-{make.__name__.encode().hex():0<16.16}", SIZE)
        assert file.path.parent == tmp_path / "two"
        assert list((tmp_path / "one").iterdir()) == []
    monkeypatch.setattr(shared_files, "_reserve", _full_in(tmp_path))
    for make in created, elected:
        with pytest.raises(OSError, match=r"one: No space left on device; .*two: No space left on device"):
            make(f"spmd-0-{'0' * 16}-1-1-{'1' * 16}", SIZE)
    assert len(list(tmp_path.rglob("spmd-*"))) == 2


def _full_in(folder: Path):
    reserve = shared_files._reserve

    def full(file: int, nbytes: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(folder):
            raise OSError(28, os.strerror(28))
        reserve(file, nbytes)

    return full


def test_a_folder_in_which_others_can_rename_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tmp_path.chmod(0o777)
    assert tmp_path not in shared_files._folders()
    tmp_path.chmod(0o1777)
    assert tmp_path in shared_files._folders()


def test_without_any_file_there_is_a_warning_and_a_board_of_its_own():
    def none(nbytes: int):
        raise OSError(28, "/dev/shm: No space left on device")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        board = StatusBoard(1, 4, none)
    board.close()
    (warning,) = caught
    assert warning.filename == __file__
    assert "/dev/shm: No space left on device" in str(warning.message)
    assert "no progress for SPMD_TIMEOUT seconds" in str(warning.message)
    assert not board.single_host
    assert [board.is_local(r) for r in range(4)] == [False, True, False, False]


def test_the_name_is_gone_when_all_have_mapped_the_file(folder, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    make = partial(elected, job_name(os.getpid()))
    boards = [StatusBoard(0, 2, make)]
    time.sleep(0.6)
    assert len(list(folder.iterdir())) == 1
    boards.append(StatusBoard(1, 2, make))
    until = time.monotonic() + 20
    while list(folder.iterdir()) and time.monotonic() < until:
        time.sleep(0.05)
    assert list(folder.iterdir()) == []
    assert boards[0].is_local(1)
    assert boards[1].is_local(0)
    for board in boards:
        board.close()


# Memory without a name


@linux
def test_without_memory_for_an_arena_arrays_lie_in_that_of_numpy(monkeypatch):
    def full(file: int, at: int, nbytes: int) -> None:
        raise OSError(28, os.strerror(28))

    mine = shared_memory.SharedMemory()
    try:
        mine.serve()
        assert mine.place(pool.empty(1 << 20, np.uint8)) is not None
        monkeypatch.setattr(os, "posix_fallocate", full)
        x = pool.empty(3 << 20, np.uint8)
        assert mine.place(x) is None
        x[:] = 1
        monkeypatch.undo()
        assert mine.place(pool.empty(3 << 20, np.uint8)) is not None
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space"):
            mailbox.create(3, bytes(8))
    finally:
        pool.set_source(None)


# What was left behind


HOLDER = """
import os, sys
from spmd.transport.processes.shared_files import created
print(created(sys.argv[1] if sys.argv[1:] else "", 1000).path, flush=True)
sys.stdin.read()
"""


def _holder(job: str, *before: str) -> tuple[subprocess.Popen, Path]:
    """A process that has a file of a job open, until it is killed. before: starts it."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", HOLDER, job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def _kill(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


@linux
def test_what_a_killed_job_has_left_is_removed_and_what_is_in_use_is_not(monkeypatch):
    launcher = subprocess.Popen(["sleep", "1000"])
    job = job_name(launcher.pid)
    one, path = _holder(job)
    remove_abandoned()
    assert path.exists()  # The launcher and a process that has it open are alive.
    _kill(one)
    remove_abandoned()
    assert path.exists()  # Others of the job may come yet.
    other, another = _holder(job)
    launcher.kill()
    deadline = time.monotonic() + 20
    while path.exists() and time.monotonic() < deadline:  # Nobody waits for the launcher: it is a zombie.
        remove_abandoned()
        time.sleep(0.05)
    assert not path.exists()
    assert another.exists()  # A process that has it open is alive.
    _kill(other)
    remove_abandoned()
    assert not another.exists()
    launcher.wait()


@own_processes
def test_a_job_in_another_pid_namespace_removes_nothing_that_is_in_use(monkeypatch):
    """Neither from within, where the numbers of our processes are those of none, nor from without."""
    remove = "from spmd.transport.processes import shared_files as s; s._ABANDONED_AGE = -1; s.remove_abandoned()"
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process, path = _holder(job_name(os.getpid()))
    subprocess.run([*apart, sys.executable, "-c", remove], env=env, check=True, timeout=60)
    assert path.exists()
    _kill(process)
    subprocess.run([*apart, sys.executable, "-c", remove], env=env, check=True, timeout=60)
    assert not path.exists()
    job = "from spmd.transport.processes.shared_files import job_name; print(job_name(1))"
    inside = subprocess.run([*apart, sys.executable, "-c", job], env=env, check=True, capture_output=True, text=True)
    process, path = _holder(inside.stdout.strip(), *apart)
    monkeypatch.setattr(shared_files, "_ABANDONED_AGE", -1)
    remove_abandoned()
    assert path.exists()
    _kill(process)
    _removed(path)


def _removed(path: Path) -> None:
    """Wait until a file is abandoned: the system may take its time to end a process."""
    until = time.monotonic() + 20
    while path.exists() and time.monotonic() < until:
        remove_abandoned()
        time.sleep(0.05)
    assert not path.exists()


# Another user


ANOTHER = """
import fcntl, os, re, select, signal, socket, sys
from contextlib import suppress
from pathlib import Path

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
NAME = re.compile("(spmd-0-[0-9a-f]{16}-[0-9]+-[0-9]+-[0-9a-f]{16})-[0-9a-f]{32}([.]new)?")

def plant(job, size=102400):
    \"""Whatever may be taken for a file of a job: ready ones, and candidates that come first.\"""
    for k, end in enumerate(["", ".new"] * 2):
        for number, kind in enumerate(["file", "right", "link", "hard", "folder", "fifo", "socket"]):
            path = Path(f"/dev/shm/{job}-{k:030x}{number:02x}{end}")
            with suppress(OSError):
                if kind in ("file", "right"):
                    name = path.name.removesuffix(".new").encode()
                    path.write_bytes(name.ljust(size if kind == "right" else 1, b"\\0"))
                    path.chmod(0o600 if k < 2 else 0o666)
                elif kind == "link":
                    path.symlink_to(VICTIM)
                elif kind == "hard":
                    path.hardlink_to(VICTIM)
                elif kind == "folder":
                    path.mkdir()
                elif kind == "fifo":
                    os.mkfifo(path)
                else:
                    with socket.socket(socket.AF_UNIX) as there:
                        there.bind(str(path))

def attack(path):
    \"""What came of it, for what did not fail.\"""
    done = []
    for name, what in {
        "read": lambda: path.read_bytes(),
        "write": lambda: os.write(os.open(path, os.O_WRONLY), b"x"),  # never creates what has gone meanwhile
        "mode": lambda: path.chmod(0o666),
        "rename": lambda: path.rename("/dev/shm/taken"),
        "remove": lambda: path.unlink(),
        "link": lambda: Path(f"{path}.linked").hardlink_to(path),
        "truncate": lambda: os.truncate(path, 0),
        "lock": lambda: fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB),
    }.items():
        with suppress(OSError):
            what()
            done.append(name)
    return done

def attack_process(pid):
    done = []
    for name, what in {
        "stop": lambda: os.kill(pid, signal.SIGSTOP),
        "kill": lambda: os.kill(pid, signal.SIGKILL),
        "files": lambda: os.listdir(f"/proc/{pid}/fd"),
        "memory": lambda: open(f"/proc/{pid}/mem", "rb").close(),
    }.items():
        with suppress(OSError):
            what()
            done.append(name)
    for file in range(40):
        with suppress(OSError):
            os.close(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR))
            done.append(f"file {file}")
    return done
"""


@pytest.fixture
def victim(tmp_path):
    """A file of ours that others may read."""
    path = Path("/dev/shm") / f"victim-{os.getpid()}"
    path.write_text("as it was")
    path.chmod(0o644)
    yield path
    assert path.read_text() == "as it was"
    path.unlink()
    for planted in Path("/dev/shm").iterdir():
        if planted.name.startswith(("spmd-", "taken")) and planted.lstat().st_uid == NOBODY:
            planted.rmdir() if planted.is_dir() and not planted.is_symlink() else planted.unlink()


def _another(victim: Path, program: str, *args: str) -> subprocess.Popen:
    source = f"VICTIM = {str(victim)!r}\n{ANOTHER}\n{textwrap.dedent(program)}"
    return subprocess.Popen(
        [sys.executable, "-c", source, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )


@another_user
def test_what_another_user_has_planted_is_passed_over(victim, job):
    process = _another(victim, "plant(sys.argv[1]); print('planted', flush=True)", job)
    assert process.communicate(timeout=20)[0] == "planted\n"
    assert sum(path.name.startswith(job) for path in Path("/dev/shm").iterdir()) >= 24  # 28 with hard links
    for make in elected, created:
        file = make(job, 102400 - mmap.PAGESIZE)
        known = file.path.lstat()
        assert known.st_uid == os.geteuid()
        assert stat.S_ISREG(known.st_mode)
    with pytest.raises(PermissionError):
        opened(Path(f"/dev/shm/{job}-{0:030x}01"), 102400 - mmap.PAGESIZE)
    remove_abandoned()


@another_user
@pytest.mark.parametrize("python", [*BY_MPI, BY_TORCHRUN])
def test_another_user_can_do_nothing_to_a_job(python, victim):
    """It sees the names, and does to the files and the processes of the job what it can, all the time."""
    program = """
        print("ready", flush=True)
        seen, done, attacked = set(), [], set()
        while not select.select([sys.stdin], [], [], 0.001)[0]:
            for name in os.listdir("/dev/shm"):
                with suppress(OSError):
                    if (found := NAME.fullmatch(name)) and os.lstat(f"/dev/shm/{name}").st_uid == 0:
                        seen.add(name)
                        plant(found[1])
                        done += attack(Path("/dev/shm", name))
            for pid in filter(str.isdigit, os.listdir("/proc")):
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if os.stat(f"/proc/{pid}").st_uid == 0 and b"board_files.py" in words:
                        attacked.add(pid)
                        done += attack_process(int(pid))
        print(len(seen), len(attacked), done, flush=True)
    """
    process = _another(victim, program)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "ready\n"
        ended, seconds = timed("board_files.py", "plenty", "circle", python=python, timeout=60)
        process.stdin.close()
        files, processes, done = process.stdout.readline().split(maxsplit=2)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert ended.stderr.count("DeadlockError") == 1, str(ended)
    assert "Warning" not in ended.stderr
    assert seconds < 20
    assert int(files) > 0
    assert int(processes) >= 4
    assert done == "[]\n"


# Jobs


@pytest.fixture
def small_memory(tmp_path):
    """What starts a program with a /dev/shm of 64 MB and few files."""
    script = tmp_path / "small"
    script.write_text('#!/bin/sh\nmount -t tmpfs -o size=64m,nr_inodes=300 tmpfs /dev/shm && exec "$@"\n')
    script.chmod(0o755)
    return ["unshare", "--mount", str(script)]


def _both_or_full(*rows):
    """Rows of parameters: each with both launchers, the first under MPI in the ordinary run, the others in the full."""
    return [
        pytest.param(
            launcher,
            *row,
            marks=[*marks, *([] if k == 0 and mpi else [pytest.mark.full])],
            id=f"{name}-{'-'.join(row)}",
        )
        for k, row in enumerate(rows)
        for launcher, marks, name, mpi in [
            *((p.values[0], p.marks, p.id, True) for p in BY_MPI),
            (TORCHRUN, [pytest.mark.torch], "torchrun", False),
        ]
    ]


@pytest.mark.parametrize(("python", "room"), _both_or_full(("none",), ("one has none",)))
def test_without_room_for_any_file_results_are_right(python, room):
    ended = launch(PROGRAMS / "board_files.py", room, "sums", python=python)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("sums 4.0 1048576.0 in") == 4
    warned = ended.stderr.count(
        "RuntimeWarning: spmd.Mesh\n  got:    no file that the processes of this host can share"
    )
    alone = ended.stdout.count("in nowhere, False")
    assert warned == alone
    assert alone == 4 if room == "none" else alone in (0, 4), str(ended)


@pytest.mark.parametrize(("python", "how"), _both_or_full(("circle",), ("sleep",), ("early",)))
def test_without_room_for_any_file_the_time_limit_holds(python, how):
    ended, seconds = timed("board_files.py", "none", how, python=python, timeout=60, SPMD_TIMEOUT="3")
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 25
    # Processes without a file ask each other as those of different hosts do.
    assert ("DeadlockError" if how == "circle" else "StallError") in ended.stderr, str(ended)


@pytest.mark.full
@pytest.mark.parametrize("python", BY_MPI)
def test_a_process_that_cannot_map_the_file_of_the_others_says_so_and_the_time_limit_holds(python):
    ended, seconds = timed("board_files.py", "one maps none", "sums", python=python, timeout=60, SPMD_TIMEOUT="3")
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 25
    assert ended.stderr.count("Warning: spmd.Mesh\n  got:    no file") == 1, str(ended)
    assert "Cannot allocate memory" in ended.stderr
    assert "StallError" in ended.stderr


@own_mounts
@pytest.mark.parametrize(("python", "room"), _both_or_full(("full",), ("no inodes",)))
def test_where_dev_shm_has_no_room_the_next_folder_serves(python, room, small_memory):
    ended = launch(PROGRAMS / "board_files.py", room, "sums", python=python, before=small_memory)
    assert ended.returncode == 0, str(ended)
    assert "Warning" not in ended.stderr
    found = set(re.findall(r"sums (\S+) (\S+) in (\S+), (\S+)", ended.stdout))
    assert found == {("4.0", "1048576.0", os.environ.get("TMPDIR", "/tmp"), "True")}, str(ended)


@own_mounts
@pytest.mark.parametrize(("python", "room"), _both_or_full(("full",), ("no inodes",)))
def test_where_dev_shm_has_no_room_deadlocks_are_told(python, room, small_memory):
    ended = launch(PROGRAMS / "board_files.py", room, "circle", python=python, before=small_memory)
    assert ended.returncode not in (0, None), str(ended)
    assert ended.stderr.count("DeadlockError") == 1, str(ended)


# Killed at any moment


def _killed(python: str, step: int, delay: float, come: Path) -> None:
    """Start a job, and kill all of it in a moment: so long after its first process has come to a step."""

    def when() -> None:
        until = time.monotonic() + 60
        while not come.exists():
            assert time.monotonic() < until, "the job has not come so far"
            time.sleep(0.002)
        time.sleep(delay)

    launch_and_kill(PROGRAMS / "killed.py", str(come), str(step), n=3, python=python, when=when)


@pytest.mark.parametrize(
    "python", [*BY_MPI, pytest.param(TORCHRUN, id="torchrun", marks=[pytest.mark.torch, pytest.mark.full])]
)
@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.full)])
def test_no_file_stays_after_a_kill_at_any_moment_and_another_job(python, moments, tmp_path):
    before = _files()
    draw = random.Random(moments)
    for attempt in range(moments):
        _killed(python, draw.randrange(80), draw.choice([0, 0.1, 0.4]), tmp_path / f"come {attempt}")
    ended_well("plain.py", python=python, n=4)
    assert {path for path in _files() - before if shared_files._launcher_has_ended(path.name)} == set()
