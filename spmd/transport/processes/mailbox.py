"""Headers between processes of one host, through shared memory: no message, and no call of MPI or gloo.

A process writes its header for each other member, and then the number of the rendezvous beside it. Receivers poll that
number. x86 makes stores visible in this order; on other processors headers go as messages.

Each pair alternates between two places. A process writes to a place again only after a header of the other process has
come in between, and the other sends that header only after it has read everything of the previous rendezvous.
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
from spmd.transport.processes.headers import HEADER_NBYTES, Headers, digest
from spmd.transport.processes.shared_files import machine
from spmd.transport.processes.shared_memory import SharedMemory, shared_memory, window

__all__ = ["MEMBERS_MAX", "Mailbox", "shared"]

_NAME = "spmd-mailbox"

AllGather = Callable[[bytes], list[bytes]]
"""Sends eight bytes to all members, and returns those of all."""

MEMBERS_MAX = 64
"""The most members of a group: a mailbox has one header per pair of members."""
_NOTHING = bytes(8)
_COPY_MAX = 2 << 20
"""The most bytes of a block that is copied to shared memory: above, a message is faster."""
_STRIDE = HEADER_NBYTES + 64
"""Bytes from header to header: whole cache lines. The first one begins with the number of the rendezvous."""
_SPINS = 64
"""Polls before a process yields the processor."""
_YIELDS = 200
"""Yields before the watchdog takes over."""


def possible() -> bool:
    """Whether stores become visible in order on this processor, and memory can be reserved."""
    return platform.machine().lower() in ("x86_64", "amd64") and hasattr(os, "memfd_create")


def shared(me: int, size: int, all_gather: AllGather) -> Mailbox | None:
    """The mailbox of a group of processes of one host; None, in all of them, if not all can have one.

    me: the number of this process. all_gather: exchanges eight bytes with all of them.

    The first process creates a file, and closes it when all have opened it: its memory lasts while a process maps it.
    The file has no name, so no other user can open it, and it cannot be left behind.
    """
    host = digest(machine()).to_bytes(8, sys.byteorder, signed=True)
    hosts = all_gather(host if possible() else _NOTHING)
    if hosts != [host] * size:
        return None
    file, mailbox, token = -1, None, secrets.token_bytes(8)
    try:
        if me == 0:
            with suppress(OSError):
                file = create(size, token)
        place = all_gather(struct.pack("=II", os.getpid(), file) if file >= 0 else _NOTHING)[0]
        token = all_gather(token)[0]
        if place != _NOTHING:
            with suppress(OSError, ValueError):
                mailbox = Mailbox(_opened(*struct.unpack("=II", place), token, size), me, size)
        own_memory = shared_memory()
        where = struct.pack("=II", os.getpid(), 0 if own_memory is None else own_memory.file)
        owners = all_gather(_NOTHING if mailbox is None else where)
    finally:
        if file >= 0:
            os.close(file)
    if mailbox is None or _NOTHING in owners:
        return None
    if own_memory is not None and all(struct.unpack("=II", place)[1] for place in owners):
        windows = _windows(me, owners, own_memory.token, all_gather)
        if windows is not None:
            mailbox.see(windows, own_memory)
    return mailbox


def _windows(me: int, owners: list[bytes], token: bytes, all_gather: AllGather) -> list[Any] | None:
    """The shared memories of the other members; None, in all members, unless every member can map all of them.

    owners: the process id and file number of each. token: that of this process's shared memory.
    """
    tokens, windows = all_gather(token), []
    with suppress(OSError, ValueError):
        for k, place in enumerate(owners):
            memory = None if k == me else window(*struct.unpack("=II", place))
            if memory is not None and memory[:8] != tokens[k]:
                break
            windows.append(memory)
    complete = len(windows) == len(owners)
    return windows if _NOTHING not in all_gather(token if complete else _NOTHING) else None


def create(size: int, token: bytes) -> int:
    """Create the file of a mailbox, for processes of this user only, and write a token to its beginning. Returns the
    file descriptor. Raises OSError if there is no memory."""
    file = os.memfd_create(_NAME)
    try:
        os.posix_fallocate(file, 0, _nbytes(size))
        os.pwrite(file, token, 0)  # the place of a header from member 0 to itself, which is not used
    except OSError:
        os.close(file)
        raise
    return file


def _opened(pid: int, file: int, token: bytes, size: int) -> mmap.mmap:
    """Map the mailbox file that another process of this host has open. Raises OSError or ValueError if it has none."""
    path = f"/proc/{pid}/fd/{file}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(opened, _nbytes(size))
    finally:
        os.close(opened)
    if memory[:8] != token:  # in another PID namespace, the number means another process
        raise FileNotFoundError(path)
    return memory


def _nbytes(size: int) -> int:
    return 2 * size * size * _STRIDE


class Mailbox:
    """One member's side of a mailbox, whose file all members map.

    outgoing: the headers to write for the next rendezvous; incoming: those of the last one. shared_memory: that of this
    process, if the others read blocks there; windows: then those of the others. next, now, before: the blocks offered
    in the next rendezvous, in this one, and in the previous one, which others may read until they come to this one.
    has_blocks: whether there are any.
    """

    __slots__ = (
        *("arrivals", "before", "flags", "has_blocks", "inbound", "incoming", "next", "now", "number", "outbound"),
        *("outgoing", "shared_memory", "windows"),
    )

    def __init__(self, memory: mmap.mmap, me: int, size: int):
        lines = np.ndarray((2, size, size, _STRIDE // 8), np.uint64, memory)  # turn, receiver, sender
        others = [k for k in range(size) if k != me]
        outbound, inbound = lines[:, :, me], lines[:, me]
        words = slice(1, 1 + HEADER_NBYTES // 8)
        self.outbound = [Headers(outbound[turn, :, words]) for turn in (0, 1)]
        self.inbound = [Headers(inbound[turn, :, words]) for turn in (0, 1)]
        # Memoryviews take a third of the time of arrays.
        self.flags = [[outbound[turn, k, :1].data for k in others] for turn in (0, 1)]
        self.arrivals = [[inbound[turn, k, :1].data for k in others] for turn in (0, 1)]
        self.shared_memory: SharedMemory | None = None
        self.windows: list[Any] = []
        self.next: list[Any] = []
        self.now: list[Any] = []
        self.before: list[Any] = []
        self.has_blocks = False
        self.number = 0
        self.incoming, self.outgoing = self.inbound[0], self.outbound[1]

    def see(self, windows: list[Any], shared_memory: SharedMemory) -> None:
        """Offer large blocks in shared memory from now on."""
        self.shared_memory, self.windows = shared_memory, windows
        for headers in self.inbound:
            headers.windows = windows

    def place(self, x: Any) -> int | None:
        """The place of a block in shared memory, or None. The block is kept until others have read it."""
        if self.shared_memory is None or type(x) is not np.ndarray:
            return None
        at = self.shared_memory.place(x)
        if at is not None:
            self.next.append(x)
            self.has_blocks = True
        return at

    def keep(self, blocks: list[Any]) -> None:
        """Keep blocks that were offered, for one more rendezvous."""
        self.next.extend(blocks)
        self.has_blocks = True

    def offer(self, x: Any, borrowed: bool) -> tuple[int, Shape] | None:
        """The place and strides of a block in shared memory. A small block that is elsewhere, or borrowed, is copied
        there. None: it has to be sent."""
        at = None if borrowed else self.place(x)
        if at is not None:
            return at, x.strides
        copy = self.placed_copy(x)
        return None if copy is None else (copy[0], copy[1].strides)

    def placed_copy(self, x: Any) -> tuple[int, np.ndarray] | None:
        """A C-contiguous copy of a small block in shared memory, and its place, or None."""
        if self.shared_memory is None or type(x) is not np.ndarray or x.nbytes > _COPY_MAX:
            return None
        buffer = pool.empty(max(x.nbytes, pool.POOL_MIN), np.uint8)
        at = self.place(buffer)
        if at is None:
            return None
        copy = buffer[: x.nbytes].view(x.dtype).reshape(x.shape)
        copy[...] = x
        return at, copy

    def swap(self, let_others: Callable[[], object]) -> bool:
        """Publish the outgoing headers. True if those of all others come within microseconds; else poll `has_come`."""
        number = self.number = self.number + 1
        turn = number & 1
        if self.has_blocks:
            self.before, self.now, self.next = self.now, self.next, []
            self.has_blocks = bool(self.before or self.now)
        for flag in self.flags[turn]:
            flag[0] = number
        self.incoming, self.outgoing = self.inbound[turn], self.outbound[1 - turn]
        for arrival in self.arrivals[turn]:
            if arrival[0] != number:
                for _ in range(_SPINS):
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
