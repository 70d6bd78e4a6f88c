"""How bytes move among some processes: what an engine does for its transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from spmd.device import contiguous, put
from spmd.layout import offsets
from spmd.transport.processes.headers import Headers
from spmd.transport.processes.mailbox import Mailbox

__all__ = ["Channel", "bytes_of", "pieces"]


def bytes_of(x: np.ndarray) -> np.ndarray:
    """A block as it is sent: flat, in place if it can be."""
    return contiguous(x).reshape(-1).view(np.uint8)


def pieces(buffer: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """What lies one after the other in a buffer of bytes."""
    return [buffer[a:b] for a, b in pairwise(offsets(sizes))]


class Channel(ABC):
    """Some processes in an order, among which bytes move.

    Each method starts a movement and returns its requests: a list, which the transport's `arrive` waits for. Buffers
    are C-contiguous arrays of bytes, and sizes are in bytes; nobody may touch the buffers before all has arrived.

    me: the place of this process; others: those of all others. said: the headers that go out next; heard: those that
    came last. mail: where headers go without a message, if they do. meetings: those of the group, for the board, if
    there is one.
    """

    __slots__ = ("heard", "mail", "me", "meetings", "others", "said")

    def __init__(self, me: int, size: int):
        self.me = me
        self.others = [k for k in range(size) if k != me]
        self.said, self.heard = Headers.of(size), Headers.of(size)
        self.mail: Mailbox | None = None
        self.meetings: Any = None

    def share(self, mail: Mailbox | None) -> None:
        """Headers go that way from now on, if there is one."""
        if mail is not self.mail:
            sides = (Headers.of(len(self.others) + 1) for _ in range(2))
            self.mail, (self.said, self.heard) = mail, (mail.said, mail.heard) if mail is not None else sides

    @abstractmethod
    def swap(self, nbytes: int) -> list[Any]:
        """The headers in `said`, of at most so many bytes, go to the others, whose come into `heard`."""

    @abstractmethod
    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> list[Any]:
        """sends[k] goes to member k, receives[k] takes what member k sends here. None of them is this process."""

    def all_gather(self, send: np.ndarray, receive: np.ndarray, sizes: Sequence[int]) -> list[Any]:
        """What each member sends goes to everyone; receive takes the pieces, of these sizes, one after the other."""
        rooms = pieces(receive, sizes)
        requests = self.exchange(dict.fromkeys(self.others, send), {k: rooms[k] for k in self.others})
        put(rooms[self.me], send)  # while the others are under way
        return requests

    def broadcast(self, buffer: np.ndarray, root: int) -> list[Any]:
        """The root's buffer goes into that of all others."""
        if self.me != root:
            return self.exchange({}, {root: buffer})
        return self.exchange(dict.fromkeys(self.others, buffer), {})
