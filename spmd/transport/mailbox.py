"""Headers between processes of one host, through memory that they share: no message, and no call of an engine.

A process writes its header for each other member, and then the number of the meeting beside it; whoever waits looks at
that number. What is stored in this order is seen in this order on x86; elsewhere headers go as messages.

Each pair has two places in turn. A process writes to one again after it has heard the other in between, which that one
says only when it has read all of the meeting before.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spmd.transport.headers import ROOM, Headers

__all__ = ["MEMBERS", "Mailbox", "create", "nbytes_of", "ordered_stores"]

MEMBERS = 64
"""Members of a group, at most: a mailbox has room for a header from each to each."""
_STRIDE = ROOM + 64
"""Bytes from header to header: whole lines of the cache, of which the first begins with the number of the meeting."""
_LOOKS = 64
"""How often a process looks whether the others have come, before it lets others have the processor in between."""
_YIELDS = 200
"""How often it does that, before it looks at what keeps them."""


def ordered_stores() -> bool:
    """Whether all see what a process has stored in the order in which it did so."""
    return platform.machine().lower() in ("x86_64", "amd64")


def nbytes_of(size: int) -> int:
    """The bytes of a mailbox of so many members."""
    return 2 * size * size * _STRIDE


def create(path: Path, size: int) -> None:
    """The file of a mailbox, which only processes of this user can read. Raises OSError where there is no room."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes_of(size))
    finally:
        os.close(file)


class Mailbox:
    """One member's side of a mailbox, whose file all members map.

    said: the headers that it writes for the next meeting; heard: those that came in the last one.
    """

    __slots__ = ("arrivals", "flags", "heard", "inbound", "number", "outbound", "said")

    def __init__(self, path: Path, me: int, size: int):
        file = os.open(path, os.O_RDWR)
        try:
            memory = mmap.mmap(file, nbytes_of(size))
        finally:
            os.close(file)
        lines = np.ndarray((2, size, size, _STRIDE // 8), np.uint64, memory)  # turn, receiver, sender
        others = [k for k in range(size) if k != me]
        outbound, inbound = lines[:, :, me], lines[:, me]
        words = slice(1, 1 + ROOM // 8)
        self.outbound = [Headers(outbound[turn, :, words]) for turn in (0, 1)]
        self.inbound = [Headers(inbound[turn, :, words]) for turn in (0, 1)]
        # Views of memory are read and written in a third of the time that arrays take.
        self.flags = [[outbound[turn, k, :1].data for k in others] for turn in (0, 1)]
        self.arrivals = [[inbound[turn, k, :1].data for k in others] for turn in (0, 1)]
        self.number = 0
        self.heard, self.said = self.inbound[0], self.outbound[1]

    def swap(self, let_others: Callable[[], object]) -> bool:
        """The headers in `said` go out. Whether those of all others come within a moment; else `has_come` tells."""
        number = self.number = self.number + 1
        turn = number & 1
        for flag in self.flags[turn]:
            flag[0] = number
        self.heard, self.said = self.inbound[turn], self.outbound[1 - turn]
        for arrival in self.arrivals[turn]:
            if arrival[0] != number:
                for _ in range(_LOOKS):
                    if arrival[0] == number:
                        break
                else:
                    for _ in range(_YIELDS):
                        if arrival[0] == number:
                            break
                        let_others()
                    else:
                        return False
        return True

    def has_come(self) -> bool:
        """Whether the headers of all others have come."""
        number = self.number
        return all(arrival[0] == number for arrival in self.arrivals[number & 1])
