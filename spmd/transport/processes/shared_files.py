"""Files in memory that the processes of a job on one host share, and that no other user can read, take or replace.

Such a file lies in /dev/shm, or in TMPDIR or /tmp if that cannot be used. Anybody can create files there, so names are
random, and a file counts only if it is a regular file of this user that nobody else may open, of the right size, and
holds its own name: what another user plants there, also a link to another file of ours, is ignored. All of it is
reserved when it is created, because a write to memory without room ends a process by SIGBUS.

The processes of torch.distributed find its name in their store. Those of MPI may not wait for each other here, because
some may never come, and MPI has no store; so each looks for a file of its job, and they elect the one that creates it
(`elected`). The name is removed as soon as all have mapped the file (`SharedFile.unlink`).

Each process that has such a file open holds a lock on it, which the system releases when the process ends. A file
without a lock whose launcher has ended was left by a job that was killed; the next job removes it. A lock holds across
PID namespaces, where process ids mean nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["PARENT", "STATUS", "STIME", "UTIME", "SharedFile", "birth", "created", "elected", "job_name", "machine"]
__all__ += ["namespace", "opened", "remove_abandoned", "stat_of"]

PAGE = mmap.PAGESIZE
"""Bytes before the data, for the name of the file."""
_NAME = re.compile(
    r"spmd-(?P<uid>\d+)-(?P<space>[0-9a-f]{16})-(?P<launcher>\d+)-(?P<birth>\d+)-[0-9a-f]{16}-[0-9a-f]{32}(\.new)?"
)
_NEW = ".new"
"""The end of the name of a candidate: a file whose process is not elected yet."""
_ELECTION_TIMEOUT = 10.0
"""Seconds after which a process goes on without a file, where another one was stopped in an election."""
_ABANDONED_AGE = 60.0
"""Seconds after which a file that nobody has open is removed although its launcher may be alive: processes of a job
make their meshes at different times, and one that has left by then may have written that there."""
_JOB_VARIABLES = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Variables that differ between jobs of one launcher."""


class SharedFile:
    """A file of `nbytes` bytes that this process has mapped: `memory`, at `offset`.

    path: its name, which may be gone. file: its number here, which holds the lock of a file in use.
    """

    offset = PAGE

    def __init__(self, path: Path, file: int, nbytes: int):
        self.path, self.file = path, file
        self.memory = mmap.mmap(file, PAGE + nbytes)

    def unlink(self) -> None:
        """Remove the name, if it is still that of this file. The memory stays as long as a process maps it."""
        if _is_at(self.path, self.file):
            with suppress(OSError):
                os.unlink(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Run the block in one process at a time."""
        fcntl.lockf(self.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN)


def created(job: str, nbytes: int) -> SharedFile:
    """A new file of a job, in the first folder that has room for it. Raises OSError where none has."""
    reasons = []
    for folder in _folders():
        candidate = None
        try:
            candidate = _Candidate(folder, job)
            return candidate.become_the_file(nbytes)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
            if candidate is not None:
                candidate.discard()
    raise _nowhere(reasons)


def opened(path: Path, nbytes: int) -> SharedFile:
    """A file that another process of this job has created. Raises OSError where there is none, or another kind of
    file."""
    file = _verified(path, nbytes)
    if file is None:
        raise PermissionError(f"{path} is not a file that a process of this job and this user has made")
    return file


def elected(job: str, nbytes: int) -> SharedFile:
    """The file of a job, which one of its processes creates, and all others find. Raises OSError where none can create
    it.

    A process that finds no file creates a candidate. It reserves the file, and renames it, only when it then sees
    neither a file nor another candidate: of two processes, one has created its candidate before the other looks. Where
    several see each other, all but the first by name withdraw. So there is never more than one file, whatever the
    timing.
    """
    until = time.monotonic() + _ELECTION_TIMEOUT
    folders, reasons = _folders(), []
    candidate: _Candidate | None = None
    try:
        while time.monotonic() < until:
            rivals = [path for path in _listed(job, _NEW) if candidate is None or path != candidate.path]
            # After the candidates, to see one that was renamed meanwhile.
            file = next(filter(None, (_verified(path, nbytes) for path in _listed(job))), None)
            if file is not None:
                return file
            if not folders:
                raise _nowhere(reasons)
            try:
                if candidate is None and not rivals:
                    candidate = _Candidate(folders[0], job)
                elif candidate is not None and not rivals:
                    file, candidate = candidate.become_the_file(nbytes), None
                    return file
            except OSError as error:
                reasons.append(f"{folders.pop(0)}: {error.strerror or error}")
                candidate = _discarded(candidate)
            if candidate is not None and any(path.name < candidate.path.name for path in rivals):
                candidate = _discarded(candidate)
            for path in rivals:
                _remove_if_unused(path)  # of a process that was killed in the election
            if rivals:
                time.sleep(0.001)
    finally:
        _discarded(candidate)
    raise TimeoutError(f"another process of this job has not made the file in {_ELECTION_TIMEOUT:g} s")


class _Candidate:
    """A file that may become that of the job."""

    def __init__(self, folder: Path, job: str):
        while True:
            self.path = folder / f"{job}-{secrets.token_hex(16)}{_NEW}"
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
            try:
                os.fchmod(self.file, 0o600)  # whatever the umask says
                fcntl.flock(self.file, fcntl.LOCK_SH)
                if _is_at(self.path, self.file):
                    return
            except BaseException:
                self.discard()
                raise
            self.discard()  # It was removed as abandoned before it was locked.

    def become_the_file(self, nbytes: int) -> SharedFile:
        """Reserve memory, and take the name of a file that is ready. Raises OSError where there is no room."""
        path = self.path.with_suffix("")
        _reserve(self.file, PAGE + nbytes)
        os.pwrite(self.file, path.name.encode(), 0)
        file = SharedFile(path, self.file, nbytes)
        os.rename(self.path, path)
        return file

    def discard(self) -> None:
        with suppress(OSError):
            os.unlink(self.path)
        with suppress(OSError):
            os.close(self.file)


def _discarded(candidate: _Candidate | None) -> None:
    if candidate is not None:
        candidate.discard()


def _reserve(file: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
        return
    for at in range(0, nbytes, PAGE):  # on macOS: what was written has its place
        os.pwrite(file, bytes(min(PAGE, nbytes - at)), at)


_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Links are not followed, and opening a FIFO does not block."""


def _verified(path: Path, nbytes: int) -> SharedFile | None:
    """The file of a name, if a process of this user has created it for processes like this one."""
    if _NAME.fullmatch(path.name) is None or path.parent not in _folders():
        return None
    try:
        file = os.open(path, os.O_RDWR | _FLAGS)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        owned = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        name = path.name.encode()
        if owned and status.st_size == PAGE + nbytes and os.pread(file, len(name) + 1, 0) == name + b"\0":
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is_at(path, file):
                return SharedFile(path, file, nbytes)
    except OSError:
        pass
    os.close(file)
    return None


def _is_at(path: Path, file: int) -> bool:
    """Whether a name is that of an open file."""
    try:
        at_path, opened_file = os.lstat(path), os.fstat(file)
    except OSError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (opened_file.st_dev, opened_file.st_ino)


def _nowhere(reasons: list[str]) -> OSError:
    return OSError("; ".join(reasons) or "there is no folder for temporary files that only its owners can change")


def _folders() -> list[Path]:
    """The folders for such files, the best first, in which no other user can rename or remove our files."""
    wanted = dict.fromkeys(map(Path, ("/dev/shm", os.environ.get("TMPDIR") or "/tmp", "/tmp")))
    return [folder for folder in wanted if _is_safe(folder)]


def _is_safe(folder: Path) -> bool:
    try:
        status = os.stat(folder)
    except OSError:
        return False
    others_write = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid()) and not others_write


def _listed(job: str, end: str = "") -> list[Path]:
    """The files of a job in all folders, sorted by name: those that are ready, or the candidates."""
    return sorted(
        (path for path in _ours(f"{job}-") if path.name.endswith(_NEW) == bool(end)), key=lambda path: path.name
    )


def _ours(beginning: str) -> Iterator[Path]:
    """The files of this user whose names begin so, by their folder entries."""
    for folder in _folders():
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(beginning) and _NAME.fullmatch(entry.name) and _is_ours(entry):
                    yield Path(entry.path)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """An id that is equal for processes that share memory and cores."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return platform.node()


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def job_name(launcher: int) -> str:
    """How the names of all files of this job on this host begin. launcher: the process that started those of this
    host."""
    which = _digest(*map(os.environ.get, _JOB_VARIABLES))
    return f"spmd-{os.geteuid()}-{namespace()}-{launcher}-{birth(launcher)}-{which}"


def namespace() -> str:
    """An id of this machine and PID namespace, in which processes know each other's ids."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return _digest(machine(), space)


def remove_abandoned() -> None:
    """Remove the files that killed jobs of this user have left."""
    for path in _ours(f"spmd-{os.geteuid()}-"):
        if _launcher_has_ended(path.name) or _age(path) > _ABANDONED_AGE:
            _remove_if_unused(path)


def _launcher_has_ended(name: str) -> bool:
    """Whether the launcher of a file's job is known to have ended; not known in another PID namespace."""
    parts = _NAME.fullmatch(name)
    if parts is None or parts["space"] != namespace() or parts["birth"] == "0":
        return False
    fields = stat_of(int(parts["launcher"]))
    return fields is None or fields[STATUS] in "ZX" or fields[START] != parts["birth"]


def _age(path: Path) -> float:
    try:
        return time.time() - os.lstat(path).st_ctime
    except OSError:
        return 0.0


def _remove_if_unused(path: Path) -> None:
    """Remove a file that no process has open."""
    try:
        file = os.open(path, os.O_RDWR | _FLAGS)
    except OSError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, file):
            os.unlink(path)
    except OSError:
        pass
    finally:
        os.close(file)


STATUS, PARENT, UTIME, STIME, START = 0, 1, 11, 12, 19


def birth(pid: int) -> str:
    """The start time of a process, whose id may be used again; 0 where unknown."""
    fields = stat_of(pid)
    return fields[START] if fields is not None else "0"


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name; None where there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return None
    return fields if len(fields) > START else None
