"""Who saves or loads together: the processes of a mesh outside of bodies, its workers inside.

All members make the same calls in the same order. If one of them fails, all raise.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spmd.autodiff.staging.together import RECORDING
from spmd.errors import CheckpointError, JitError
from spmd.mesh import WORKER, Mesh, Worker, current_mesh
from spmd.transport.call import Call
from spmd.transport.processes.job import job_world

__all__ = ["Members", "members_of"]

Value = TypeVar("Value")


def _nothing() -> None:
    pass


class Members:
    """This process by itself, as the only member.

    where: the public function, for messages. own: the number of this member. size: how many there are.
    """

    def __init__(self, where: str, own: int = 0, size: int = 1):
        self.where = where
        self.own = own
        self.size = size

    @property
    def is_first(self) -> bool:
        return self.own == 0

    def share(self, value: Any) -> list[Any]:
        """The values of all members, in order. value: JSON. Collective.

        Raises CheckpointError if not all have called the same function.
        """
        shared = self._exchange({"call": self.where, "value": value})
        calls = [item["call"] if isinstance(item, dict) and "call" in item else "another call" for item in shared]
        other = next((m for m, call in enumerate(calls) if call != self.where), None)
        if other is not None:
            raise CheckpointError.at(
                self.where,
                got=f"{self.where} on {self.describe(self.own)} and {calls[other]} on {self.describe(other)}",
                need="the same calls in the same order on all",
                mend="call it on every process, or in bodies on every worker, not under an if",
            )
        return [item["value"] for item in shared]

    def _exchange(self, value: Any) -> list[Any]:
        return [value]

    def holders(self, workers: Iterable[int]) -> tuple[int, ...]:
        """The members that hold what these workers of a mesh hold: each has one of them, or one member has all."""
        return tuple(sorted(workers)) if self.size > 1 else (0,)

    def describe(self, member: int) -> str:
        """A member in messages."""
        return "this process"

    def unseen(self, folder: Path, verb: str) -> CheckpointError:
        """The error of a member that does not see what the first one has made in a folder."""
        return CheckpointError.at(
            self.where,
            argument="path",
            got=f"{folder}, in which {self.describe(0)} made a file that this one does not see",
            need="a folder on a file system that all hosts share",
            mend=f"{verb} to such a file system, by an absolute path",
        )

    def together(self, step: Callable[[], Value], undo: Callable[[], None] = _nothing) -> list[Value]:
        """The results of a step, JSON, of all members. Collective.

        If the step fails in one of them, all undo theirs and raise: that member its error, the others one that says
        where it arose.
        """
        try:
            result = self._done(step)
        except BaseException as error:
            try:
                with suppress(Exception):  # the first error is the one to raise
                    undo()
            finally:
                with suppress(Exception):
                    self.share({"error": type(error).__name__, "text": str(error)})
            raise
        try:
            shared = self.share({"value": result})
            for member, outcome in enumerate(shared):
                if "error" in outcome:
                    raise self._error_of(member, **outcome)
        except BaseException:
            undo()
            raise
        return [outcome["value"] for outcome in shared]

    def _done(self, step: Callable[[], Value]) -> Value:
        """The result of a step. Raises CheckpointError in place of errors of the system."""
        try:
            return step()
        except OSError as error:
            raise CheckpointError.at(
                self.where,
                argument="path",
                got=str(error),
                need="a folder that may be written and read, on a disk with room",
                mend=_MENDS.get(error.errno or 0, "see the permissions, the room on the disk, and the file system"),
            ) from error

    def _error_of(self, member: int, error: str, text: str) -> CheckpointError:
        kind = _KINDS.get(error, CheckpointError)
        if kind is not CheckpointError or error == "CheckpointError":
            return kind(f"on {self.describe(member)}: {text}")
        return CheckpointError.at(
            self.where,
            got=f"{error} on {self.describe(member)}: {text}".rstrip(": "),
            need="success on all",
            mend="see the error there",
        )


_MENDS = {
    errno.ENOSPC: "make room on the disk, and save again",
    errno.EDQUOT: "make room in your quota, and save again",
    errno.EACCES: "take a folder that this user may write and read",
    errno.EROFS: "take a file system that can be written",
}
_KINDS: dict[str, type[CheckpointError]] = {k.__name__: k for k in (CheckpointError, *CheckpointError.__subclasses__())}


class _Processes(Members):
    """The processes of a mesh, each with one worker."""

    def __init__(self, where: str, mesh: Mesh):
        (own,) = mesh.local_workers
        super().__init__(where, own, mesh.size)
        self.mesh = mesh

    def _exchange(self, value: Any) -> list[Any]:
        shared = self.mesh.transport.share({self.own: value})
        return [shared[w] for w in range(self.size)]

    def describe(self, member: int) -> str:
        return f"the process of {self.mesh.describe(member)}"


class _Workers(Members):
    """The workers of a mesh, in a body."""

    def __init__(self, where: str, worker: Worker):
        super().__init__(where, worker.index, worker.mesh.size)
        self.worker = worker

    def _exchange(self, value: Any) -> list[Any]:
        worker = self.worker
        axes = tuple(worker.mesh.axes)
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        call = Call(self.where, axes, text.dtype, text.shape, same_shape=None, frame=sys._getframe())
        texts = worker.comm.all_gather(worker.group(axes), call, text).wait()
        return [json.loads(bytes(t)) for t in texts]

    def describe(self, member: int) -> str:
        return self.worker.mesh.describe(member)


def members_of(where: str, meshes: Iterable[Mesh], *, alone: bool = False) -> Members:
    """The members of a call. meshes: those of its arrays. alone: outside of bodies this process by itself."""
    worker = WORKER.get()
    if RECORDING.get() is not None or (worker is not None and worker.program is not None):
        raise JitError.at(
            where,
            got="a call within spmd.jit",
            need="a function that runs each time: a file is written or read at each call",
            mend="call it outside of the function that is jitted",
        )
    if worker is not None:
        return _Workers(where, worker)
    if alone:
        return Members(where)
    known = [mesh for mesh in (*meshes, current_mesh()) if mesh is not None]
    if not known:
        world = job_world()
        known = [] if world is None else [Mesh(processes=world.size)]
    apart = [mesh for mesh in known if len(mesh.local_workers) < mesh.size]
    return _Processes(where, apart[0]) if apart else Members(where)
