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
import secrets
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from spmd.kernels.memory import pool
from spmd.transport.call import Shape
from spmd.transport.processes.headers import ROOM, Headers, digest
from spmd.transport.processes.shared_files import machine
from spmd.transport.processes.shared_memory import Arena, arena, window

__all__ = ["Mailbox", "shared"]

_NAME = "spmd-mailbox"
_MEMBERS = 64
"""Members of a group, at most: a mailbox has room for a header from each to each."""
_NO = bytes(8)
_COPIED = 2 << 20
"""Bytes up to which it is sooner to copy a block to where others can read it than to send it."""
_STRIDE = ROOM + 64
"""Bytes from header to header: whole lines of the cache, of which the first begins with the number of the meeting."""
_LOOKS = 64
"""How often a process looks whether the others have come, before it lets others have the processor in between."""
_YIELDS = 200
"""How often it does that, before it looks at what keeps them."""


def possible() -> bool:
    """Whether all see what a process has stored in the order in which it did so, and memory can be reserved."""
    return platform.machine().lower() in ("x86_64", "amd64") and hasattr(os, "memfd_create")


def shared(here: bool, me: int, size: int, everyones: Callable[[bytes], list[bytes]]) -> Mailbox | None:
    """The mailbox of some processes, of which this is one, if all of them are on one host and can have it: alike on all
    of them.

    here: whether all are known to be on this host. everyones: tells eight bytes to all of them, and gives those of all.

    The first one makes a file, and closes it when all have opened it: memory lasts as long as somebody maps it. The
    file has no name that another user could take, or that could be left behind, and no room that others could use up.
    """
    if size > _MEMBERS:
        return None
    host = digest(machine()).to_bytes(8, sys.byteorder, signed=True)
    wishes = everyones(host if here and possible() else _NO)
    if not here or wishes != [host] * size:
        return None
    file, mail, token = -1, None, secrets.token_bytes(8)
    try:
        if me == 0:
            with suppress(OSError):
                file = create(size, token)
        place = everyones(struct.pack("=II", os.getpid(), file) if file >= 0 else _NO)[0]
        token = everyones(token)[0]
        if place != _NO:
            with suppress(OSError, ValueError):
                mail = Mailbox(_opened(*struct.unpack("=II", place), token, size), me, size)
        mine = arena()
        where = struct.pack("=II", os.getpid(), 0 if mine is None else mine.file)
        have = everyones(_NO if mail is None else where)
    finally:
        if file >= 0:
            os.close(file)
    if mail is None or _NO in have:
        return None
    if mine is not None and all(struct.unpack("=II", place)[1] for place in have):
        windows = _windows(me, have, mine.token, everyones)
        if windows is not None:
            mail.see(windows, mine)
    return mail


def _windows(me: int, have: list[bytes], token: bytes, everyones: Callable[[bytes], list[bytes]]) -> list[Any] | None:
    """The arenas of all members but this one, if everyone sees those of all others: alike on all of them. have: the
    number of each process, and that of its file. token: that of this one's arena."""
    tokens, seen = everyones(token), []
    with suppress(OSError, ValueError):
        for k, place in enumerate(have):
            found = None if k == me else window(*struct.unpack("=II", place))
            if found is not None and found[:8] != tokens[k]:
                break
            seen.append(found)
    complete = len(seen) == len(have)
    return seen if _NO not in everyones(token if complete else _NO) else None


def create(size: int, token: bytes) -> int:
    """Make the file of a mailbox, which only processes of this user can open, and which begins with a token: its
    number. Raises OSError where there is no room."""
    file = os.memfd_create(_NAME)
    try:
        os.posix_fallocate(file, 0, _nbytes(size))
        os.pwrite(file, token, 0)  # where nobody writes a header: that of the first one to itself
    except OSError:
        os.close(file)
        raise
    return file


def _opened(pid: int, file: int, token: bytes, size: int) -> mmap.mmap:
    """The file of a mailbox, which a process of this host has open. Raises OSError or ValueError where it is not
    there."""
    path = f"/proc/{pid}/fd/{file}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(opened, _nbytes(size))
    finally:
        os.close(opened)
    if memory[:8] != token:  # in a PID namespace of its own the number is that of another process
        raise FileNotFoundError(path)
    return memory


def _nbytes(size: int) -> int:
    return 2 * size * size * _STRIDE


class Mailbox:
    """One member's side of a mailbox, whose file all members map.

    said: the headers that it writes for the next meeting; heard: those that came in the last one.
    arena: this process's, if the others read blocks there. next, now, before: the blocks that they are told of in the
    next meeting, in this one, and in the one before, which they may still read until they have come to this one. told:
    whether there are any.
    """

    __slots__ = (
        *("arena", "arrivals", "before", "flags", "heard", "inbound", "next", "now", "number", "outbound", "said"),
        "told",
    )

    def __init__(self, memory: mmap.mmap, me: int, size: int):
        lines = np.ndarray((2, size, size, _STRIDE // 8), np.uint64, memory)  # turn, receiver, sender
        others = [k for k in range(size) if k != me]
        outbound, inbound = lines[:, :, me], lines[:, me]
        words = slice(1, 1 + ROOM // 8)
        self.outbound = [Headers(outbound[turn, :, words]) for turn in (0, 1)]
        self.inbound = [Headers(inbound[turn, :, words]) for turn in (0, 1)]
        # Views of memory are read and written in a third of the time that arrays take.
        self.flags = [[outbound[turn, k, :1].data for k in others] for turn in (0, 1)]
        self.arrivals = [[inbound[turn, k, :1].data for k in others] for turn in (0, 1)]
        self.arena: Arena | None = None
        self.next: list[Any] = []
        self.now: list[Any] = []
        self.before: list[Any] = []
        self.told = False
        self.number = 0
        self.heard, self.said = self.inbound[0], self.outbound[1]

    def see(self, windows: list[Any], arena: Arena) -> None:
        """From now on members tell each other where large blocks lie."""
        self.arena = arena
        for headers in self.inbound:
            headers.windows = windows

    def place(self, x: Any) -> int | None:
        """Where others can read a block; None where they cannot. It stays as it is until they have."""
        if self.arena is None or type(x) is not np.ndarray:
            return None
        at = self.arena.place(x)
        if at is not None:
            self.next.append(x)
            self.told = True
        return at

    def keep(self, blocks: list[Any]) -> None:
        """Blocks that others were told of stay as they are for one meeting more."""
        self.next.extend(blocks)
        self.told = True

    def offer(self, x: Any, borrowed: bool) -> tuple[int, Shape] | None:
        """Where others can read a block, and by which strides: it, or a copy of one that lies elsewhere or is lent and
        is not very large. None: it is to be sent."""
        at = None if borrowed else self.place(x)
        if at is not None:
            return at, x.strides
        if self.arena is None or type(x) is not np.ndarray or x.nbytes > _COPIED:
            return None
        room = pool.empty(max(x.nbytes, pool.POOL_MIN), np.uint8)
        at = self.place(room)
        if at is None:
            return None
        copy = room[: x.nbytes].view(x.dtype).reshape(x.shape)
        copy[...] = x
        return at, copy.strides

    def swap(self, let_others: Callable[[], object]) -> bool:
        """The headers in `said` go out. Whether those of all others come within a moment; else `has_come` tells."""
        number = self.number = self.number + 1
        turn = number & 1
        if self.told:
            self.before, self.now, self.next = self.now, self.next, []
            self.told = bool(self.before or self.now)
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
        if self.before:
            self.before = []
        return True

    def has_come(self) -> bool:
        """Whether the headers of all others have come."""
        number = self.number
        if any(arrival[0] != number for arrival in self.arrivals[number & 1]):
            return False
        self.before = []
        return True
