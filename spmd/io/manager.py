"""Checkpoints of a run, one for each of its steps that is saved, also in the background.

The program's processes prepare a save together, where they call it. In the background they exchange nothing but files:
each writes its data and then a list of it; the first waits for the lists of all, and commits.
"""

from __future__ import annotations

import atexit
import operator
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from spmd.errors import CheckpointError, CorruptCheckpointError, describe, user_stacklevel
from spmd.io.files import Lock, remove, remove_folder, write_file
from spmd.io.loading import load
from spmd.io.manifest import MANIFEST, step_folders
from spmd.io.members import Members, members_of
from spmd.io.saving import LOCK, Save, is_foreign, is_of_save, meshes_in
from spmd.mesh import WORKER
from spmd.settings import setting
from spmd.tracebacks import api_boundary

__all__ = ["CheckpointManager"]

_POLL_SECONDS = 0.02


class CheckpointManager:
    """The checkpoints of a run, in the folders `step-<number>` of a directory.

    directory: made by the first save. max_to_keep: how many of the newest steps are kept, None for all. keep_every:
    steps that it divides are kept too. All methods are collective, as `spmd.save` is, in bodies too. A `with manager:`
    ends with `wait()`. Folders of these names that hold other files and no checkpoint are left alone.
    Raises CheckpointError for a number that is not positive.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, spmd.Mesh(x=2):
        ...     with spmd.io.CheckpointManager(folder, max_to_keep=2) as manager:
        ...         for step in range(4):
        ...             manager.save(step, {"w": spmd.full(3, float(step), spec=P("x")), "done": step + 1})
        ...     manager.all_steps(), manager.restore(like={"w": spmd.zeros(3, spec=P("x")), "done": 0})
        ([2, 3], {'w': PartitionedArray([3., 3., 3.], dtype=float64, spec=P('x')), 'done': 4})
    """

    @api_boundary
    def __init__(self, directory: str | os.PathLike[str], max_to_keep: int | None = 3, keep_every: int | None = None):
        self.directory = Path(os.path.abspath(os.fspath(directory)))
        self.max_to_keep = _positive("max_to_keep", max_to_keep)
        self.keep_every = _positive("keep_every", keep_every)
        self._running: dict[int | None, _Background] = {}
        """The save that goes on, by the worker of a body; None: one that was begun outside."""

    def __repr__(self) -> str:
        return f"CheckpointManager({str(self.directory)!r}, {self.max_to_keep}, {self.keep_every})"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.wait()

    @api_boundary
    def save(self, step: int, tree: Any, *, metadata: Any = None, wait: bool = False) -> None:
        """Save a tree, as `spmd.save` does, as the checkpoint of a step.

        The call copies what this process writes, and returns; the arrays may be donated then. The files are written in
        the background. wait: write them before the call returns, without a copy.
        A save that goes on is completed before. If it failed, this call raises its error on all processes, and saves
        nothing. A step that exists is replaced. Raises what `spmd.save` raises.
        """
        where = "CheckpointManager.save"
        number = _step_number(where, step)
        members = members_of(where, meshes_in(tree))
        self._complete(members)
        if members.is_first:
            self._remove_unfinished()
        saving = Save(self.directory / f"step-{number}", tree, metadata, members)
        commit = partial(self._commit, saving, number)
        if wait:
            saving.run(commit)
            return
        try:
            saving.copy_blocks()
        except BaseException:
            saving.clean()
            raise
        self._running[_worker()] = _Background(saving, commit, f"step {number}")

    def wait(self) -> None:
        """Complete the save that goes on, if there is one. Raises its error on all processes if it failed."""
        self._complete(members_of("CheckpointManager.wait", ()))

    @api_boundary
    def all_steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in ascending order. A save that goes on is completed before."""
        return self._steps(members_of("CheckpointManager.all_steps", ()))

    @api_boundary
    def latest(self) -> int | None:
        """The last step of which there is a checkpoint; None if there is none."""
        steps = self._steps(members_of("CheckpointManager.latest", ()))
        return steps[-1] if steps else None

    @api_boundary
    def restore(self, step: int | None = None, like: Any = None, **options: Any) -> Any:
        """Load the checkpoint of a step, as `spmd.load` does with these options.

        step: None: the last one that is whole: of each that is damaged a warning says what is wrong with it.
        Raises CheckpointError if there is none, and what `spmd.load` raises.
        """
        where = "CheckpointManager.restore"
        members = members_of(where, meshes_in(like))
        steps = self._steps(members, where, step)
        while steps:
            number = steps.pop()
            try:
                return load(self.directory / f"step-{number}", like, **options)
            except CheckpointError as error:
                # The program that saves may be another one, which has removed this step while it was read.
                still = self._steps(members, where, step)
                if number not in still:
                    steps = still
                    continue
                if step is not None or not isinstance(error, CorruptCheckpointError):
                    raise
                if members.is_first:
                    warnings.warn(f"step {number} is skipped: {error}", RuntimeWarning, user_stacklevel())
        raise CheckpointError.at(
            where,
            argument="directory" if step is None else "step",
            got=f"{self.directory}, with {'no step that is whole' if step is None else f'no step {step}'}",
            need="a checkpoint",
            mend="manager.latest() is None where there is none; manager.all_steps() lists them",
        )

    def _steps(self, members: Members, where: str = "", step: int | None = None) -> list[int]:
        """The steps of which there is a checkpoint, or of these only one, if it is one."""
        self._complete(members)
        steps = members.together(lambda: [*step_folders(self.directory)] if members.is_first else [])[0]
        return steps if step is None else [number for number in steps if number == _step_number(where, step)]

    def _complete(self, members: Members) -> None:
        """Wait for the saves that go on, begun in bodies or outside; raise their error on all members."""
        if not self._running:
            return
        # All members have got here, so the threads of all have been started: virtual workers may share one thread.
        # All workers of a process see the same saves, also those of a body on a larger mesh, until all have finished.
        members.share(None)
        running = sorted(self._running.items(), key=lambda item: item[0] != _worker())
        try:
            members.together(lambda: _finish_all(save for _, save in running))
        finally:
            self._running.clear()

    def _commit(self, saving: Save, number: int) -> None:
        saving.commit()
        if saving.members.is_first:
            self._remove_old(number)

    def _remove_old(self, saved: int) -> None:
        if self.max_to_keep is None:
            return
        steps = [*step_folders(self.directory)]
        for number in steps[: -self.max_to_keep]:
            if number != saved and (self.keep_every is None or number % self.keep_every):
                _remove_folder(self.directory / f"step-{number}")

    def _remove_unfinished(self) -> None:
        """Remove what saves of dead programs have left: folders without a manifest that nobody has locked."""
        for folder in step_folders(self.directory, committed=False).values():
            with suppress(OSError):  # what cannot be listed stays
                if all(map(is_of_save, os.listdir(folder))):
                    _remove_folder(folder)


def _remove_folder(folder: Path) -> None:
    """Remove the checkpoint of a step, unless it is locked. Without its manifest it is none any more. Files that no
    save has made stay, and the folder with them."""
    if is_foreign(folder / MANIFEST):
        return
    try:
        lock = Lock(folder / LOCK)
    except (CheckpointError, OSError):
        return
    try:
        remove([folder / MANIFEST])
        remove(folder / name for name in os.listdir(folder) if is_of_save(name))
        remove_folder(folder)
    finally:
        lock.release()


class _Background:
    """A save that a thread of this process writes.

    The first member's thread commits when all members have written. It gives up when all have ended and one says that
    it failed, or when nothing has been written for SPMD_TIMEOUT seconds: it removes no files that are being written.
    """

    def __init__(self, saving: Save, commit: Callable[[], None], name: str):
        self._saving = saving
        self._commit = commit
        self._name = name
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"spmd save of {name}")  # the program ends when it has ended
        self._thread.start()
        atexit.register(self._say_error)

    def finish(self) -> None:
        """Wait for the thread; raise its error."""
        self._thread.join()
        atexit.unregister(self._say_error)
        if self._error is not None:
            raise self._error

    def _say_error(self) -> None:
        self._thread.join()
        if self._error is not None:
            text = "".join(traceback.format_exception_only(self._error))
            print(f"spmd: the save of {self._name} failed\n{text}", file=sys.stderr, end="")

    def _run(self) -> None:
        saving, has_written = self._saving, False
        try:
            saving.write()
            has_written = True
            if saving.members.is_first:
                self._await_members()
                self._check_failures()
                self._commit()
        except BaseException as error:
            self._error = error
            with suppress(OSError):
                write_file(self._failure(saving.members.own), f"{type(error).__name__}: {error}".encode())
            if saving.members.is_first:
                if not has_written:  # otherwise it has waited for the others already
                    with suppress(CheckpointError, OSError):
                        self._await_members()
                saving.clean()
            else:
                saving.abandon()
        finally:
            saving.release()

    def _failure(self, member: int) -> Path:
        return self._saving.folder / f"part-{self._saving.id}-{member:05d}-failed.json"

    def _has_ended(self, member: int) -> bool:
        return self._saving.has_part(member) or self._failure(member).exists()

    def _check_failures(self) -> None:
        members = self._saving.members
        for member in range(members.size):
            if self._failure(member).exists():
                raise CheckpointError.at(
                    members.where,
                    got=f"{self._failure(member).read_text()} on {members.describe(member)}",
                    need="success on all",
                    mend="see the error there; nothing was changed",
                )

    def _await_members(self) -> None:
        """Wait until all members have written or failed."""
        saving, size = self._saving, self._saving.members.size
        limit, written, since = setting("SPMD_TIMEOUT"), -1, time.monotonic()
        while not all(map(self._has_ended, range(size))):
            now = sum(f.stat().st_size for f in saving.folder.glob(f"data-{saving.id}-*"))
            written, since = (now, time.monotonic()) if now != written else (written, since)
            if limit and time.monotonic() - since > limit:
                missing = [m for m in range(size) if not self._has_ended(m)]
                raise CheckpointError.at(
                    saving.members.where,
                    got=f"nothing from {saving.members.describe(missing[0])} for {limit:g} s",
                    need="the files of all",
                    mend="see why it stopped; SPMD_TIMEOUT is the limit in seconds",
                )
            time.sleep(_POLL_SECONDS)


def _finish_all(running: Iterable[_Background]) -> None:
    """Wait for all; raise the first error."""
    with ExitStack() as stack:
        for save in running:
            stack.callback(save.finish)


def _worker() -> int | None:
    worker = WORKER.get()
    return None if worker is None else worker.index


def _positive(argument: str, n: int | None) -> int | None:
    try:
        number = None if n is None else 0 if isinstance(n, bool) else operator.index(n)
    except TypeError:
        number = 0
    if number is not None and number < 1:
        raise CheckpointError.at(
            "spmd.io.CheckpointManager",
            argument=argument,
            got=describe(n),
            need="a positive integer, or None",
            mend=f"{argument}=3",
        )
    return number


def _step_number(where: str, step: Any) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError.at(
            where, argument="step", got=describe(step), need="an integer, not negative", mend="int(step)"
        )
    return number
