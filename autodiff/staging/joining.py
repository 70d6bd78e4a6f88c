"""Collectives of a program that run as one: those of a batch, none of which depends on another.

The lines of a batch have functions of one class, with these attributes:

    __spmd_batch__             the number of the batch; None for a line that runs by itself
    __spmd_joined__(others)    one function for all: `fun(comm, *args)` is the list of their results
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.autodiff.staging.program import COMM, Line, refs

__all__ = ["Batch", "joined"]

BLOCK_MAX = 1 << 13
"""Bytes of a block above which its collective runs by itself."""
BATCH_MAX = 1 << 16
"""Bytes of all blocks of a batch."""


class Batch:
    """The batch that grows while a program is recorded.

    number: of the batch in its program. kind: what its lines must have in common. nbytes: of its blocks.
    dependent: the numbers of its results, and of the values that depend on them. end: how many lines of the program
    have been looked at; last: the last one of these.
    """

    def __init__(self, number: int, kind: Any):
        self.number, self.kind = number, kind
        self.nbytes = self.end = 0
        self.dependent: set[int] = set()
        self.last: Line | None = None

    def takes(self, lines: Sequence[Line], kind: Any, nbytes: int) -> bool:
        """Whether the last line, a collective of a block of so many bytes, can join the batch.

        Not after another collective, nor after a line that writes into an array; nor where lines were cut out."""
        if kind != self.kind or self.nbytes + nbytes > BATCH_MAX:
            return False
        if len(lines) <= self.end or lines[self.end - 1] is not self.last:
            return False
        for line in lines[self.end : -1]:
            if line.writes or any(a is COMM for a in line.args):
                return False
            if not self.dependent.isdisjoint(line.used):
                self.dependent.update(i for _, i in line.parts)
        return self.dependent.isdisjoint(lines[-1].used)

    def add(self, lines: Sequence[Line], nbytes: int) -> None:
        """The last line is one of the batch."""
        self.end, self.last = len(lines), lines[-1]
        self.dependent.update(i for _, i in lines[-1].parts)
        self.nbytes += nbytes


def joined(lines: Sequence[Line]) -> list[Line]:
    """The lines, with one line for each batch in place of its last one. What depends on its results comes after it."""
    last = {number: k for k, line in enumerate(lines) if (number := _batch(line)) is not None}
    result: list[Line] = []
    members: list[Line] = []
    later: list[Line] = []
    dependent: set[int] = set()
    for k, line in enumerate(lines):
        number = _batch(line)
        if number is not None:
            members.append(line)
            dependent.update(i for _, i in line.parts)
            if last[number] == k:
                result += [line if len(members) == 1 else _as_one(members), *later]
                members, later, dependent = [], [], set()
        elif dependent.isdisjoint(line.used):
            result.append(line)
        else:
            later.append(line)
            dependent.update(i for _, i in line.parts)
    return result


def _batch(line: Line) -> int | None:
    return getattr(line.fun, "__spmd_batch__", None)


def _as_one(members: Sequence[Line]) -> Line:
    """The line that does what these do."""
    first = members[0]
    args = (COMM, *(line.args[1] for line in members))
    return first._replace(
        fun=first.fun.__spmd_joined__([line.fun for line in members[1:]]),
        args=args,
        used=refs(args),
        parts=[((k,), line.parts[0][1]) for k, line in enumerate(members)],
        place=", ".join(dict.fromkeys(line.place for line in members if line.place)),
    )
