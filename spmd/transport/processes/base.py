"""What parts of a transport of processes need to know of the whole, which imports them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from spmd.errors import MismatchError
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group, Side, mismatch
from spmd.transport.processes.channel import Channel
from spmd.transport.processes.headers import Headers
from spmd.transport.processes.status_board import Board

__all__ = ["Connections", "Participant"]

_SIDE = 1 << 14
"""Bytes in which a process tells others what it called, where they called something else."""


class Connections(Protocol):
    """The processes of a mesh, and what connects them: see `ProcessTransport`.

    local: the worker of this process. ranks: the processes' numbers in the job, by worker. channels: those that are
    open, by their members in order. runs, number: what tells a map, and a stage of the job, from all others. last: the
    latest call. flying: the messages under way.
    """

    ranks: tuple[int, ...]
    channels: dict[tuple[int, ...], Channel]
    checks: bool
    runs: int
    number: int
    last: Any
    flying: set[Any]
    board: Board | None
    time_limit: float
    describe: Callable[[int], str]

    @property
    def local(self) -> Sequence[int]: ...

    def channel(self, members: tuple[int, ...], call: Call | None = None) -> Channel:
        """The channel of some members, opened where it is not."""
        ...

    def swap(self, channel: Channel, nbytes: int, call: Call) -> None:
        """Send the headers that were written, and wait for those of the others."""
        ...

    def arrive(self, requests: Any, call: Call | None, buffers: Any = None) -> None:
        """Wait until messages have arrived."""
        ...

    def fail(self, error: BaseException) -> None:
        """Let the others of the mesh know that this worker has failed."""
        ...


class Participant(Comm):
    """This process, as parts of its transport know it.

    early: the headers that have come for the verb that is about to be called.
    """

    def __init__(self, transport: Connections):
        self.transport = transport
        self.worker = transport.local[0]
        self.early: Headers | None = None

    def agree(self, group: Group, call: Call, channel: Channel, name: int) -> None:
        """Raise MismatchError, on all members, where the headers that came name another call than this one's."""
        words = channel.heard.words
        for row in channel.others:
            if words[row][0] != name:
                names = [name if row == channel.me else words[row][0] for row in group.rows]
                error = self._mismatch(group, call, names)
                self.transport.fail(error)
                raise error
        self.transport.last = call

    def _mismatch(self, group: Group, call: Call, names: Sequence[int]) -> MismatchError:
        """What to raise: the members, who all know by now that they disagree, tell each other their calls and lines."""
        channel = self.transport.channel(group.ordered, call)
        mine = np.array([Side.of("", call, self.number).packed(_SIDE)], f"S{_SIDE}")
        texts = np.empty(group.size, mine.dtype)
        sizes = [mine.nbytes] * group.size
        requests = channel.all_gather(mine.view(np.uint8), texts.view(np.uint8), sizes)
        self.transport.arrive(requests, call, (mine, texts))
        me = group.index
        other = me if names[me] != names[0] else next(k for k, name in enumerate(names) if name != names[0])
        first, second = (
            Side.unpacked(self.transport.describe(group.members[k]), texts[group.rows[k]].item()) for k in (0, other)
        )
        error = mismatch(first, second)
        error.ranks = tuple(self.transport.ranks[m] for m in group.members if self._is_here(m))  # type: ignore[attr-defined]
        return error

    def _is_here(self, member: int) -> bool:
        board = self.transport.board
        return board is not None and board.here(self.transport.ranks[member])
