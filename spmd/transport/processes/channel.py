"""Channels: how bytes move among some processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from spmd.device import contiguous, put
from spmd.layout import offsets
from spmd.transport.processes.links import Link
from spmd.transport.processes.mailbox import Mailbox

__all__ = ["Channel", "bytes_of", "pieces"]


def bytes_of(x: np.ndarray) -> np.ndarray:
    """A block as flat bytes: a view if it is contiguous."""
    return contiguous(x).reshape(-1).view(np.uint8)


def pieces(buffer: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Views of consecutive pieces of a buffer."""
    return [buffer[a:b] for a, b in pairwise(offsets(sizes))]


class Channel(ABC):
    """An ordered group of processes among which bytes move.

    Each method starts a movement and returns its requests: a list, for the transport's `arrive`. Buffers are
    C-contiguous arrays of bytes, and sizes are in bytes; nobody may touch the buffers before all has arrived.

    me: the place of this process; size: of the group. mailbox: carries headers, if there is one; others, outgoing and
    incoming: then the places of the other members, the headers to send next, and those that came last.
    rendezvous_count: that of the group.
    """

    __slots__ = ("incoming", "mailbox", "me", "others", "outgoing", "rendezvous_count", "size")

    def __init__(self, me: int, size: int):
        self.me, self.size = me, size
        self.mailbox: Mailbox | None = None
        self.rendezvous_count: Any = None

    def share(self, mailbox: Mailbox | None) -> None:
        """Send headers through this mailbox from now on."""
        self.mailbox = mailbox
        if mailbox is not None:
            self.others: Sequence[int] = [k for k in range(self.size) if k != self.me]
            self.outgoing, self.incoming = mailbox.outgoing, mailbox.incoming

    @abstractmethod
    def link(self, peer: int) -> Link:
        """Open the link with a member. Each of the two does so when it first needs it."""

    @abstractmethod
    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> list[Any]:
        """Send sends[k] to member k, and receive receives[k] from it, for other members k."""

    def all_gather(self, send: np.ndarray, receive: np.ndarray, sizes: Sequence[int]) -> list[Any]:
        """Send to everyone; `receive` takes the pieces of all members, of these sizes, in order."""
        parts, others = pieces(receive, sizes), [k for k in range(self.size) if k != self.me]
        requests = self.exchange(dict.fromkeys(others, send), {k: parts[k] for k in others})
        put(parts[self.me], send)  # while the others are under way
        return requests

    def broadcast(self, buffer: np.ndarray, root: int) -> list[Any]:
        """Copy the root's buffer into the buffers of the others."""
        if self.me != root:
            return self.exchange({}, {root: buffer})
        return self.exchange({k: buffer for k in range(self.size) if k != root}, {})
