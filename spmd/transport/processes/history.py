"""What a process has called lately: by it, workers that called differently find out who called what."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

from spmd.transport.call import Call, Side
from spmd.transport.processes.headers import WORD, call_name, digest

__all__ = ["CALLS_KEPT", "CallsOfGroup", "Difference", "History", "first_difference", "share_of_zero"]

CALLS_KEPT = 64
"""The last collectives of a process that others can learn of."""
_SIDE_NBYTES = 2048
"""Bytes of the description of one call, at most."""
_FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that multiplication loses nothing; its bits look random."""


class CallsOfGroup:
    """The collectives of a group so far, by messages.

    number: that of the group, the same in all its processes. members: its workers. count: the rendezvous count on the
    status board, if there is one. name: a digest of all calls.
    """

    __slots__ = ("count", "members", "name", "number")

    def __init__(self, number: int, members: Sequence[int], count: Any):
        self.number, self.members, self.count = number, members, count
        self.name = digest("calls of a group", number) & WORD

    def add(self, of_call: int, number: int) -> None:
        """Add a call, by its digest and the number of the collective."""
        self.name = (self.name * _FACTOR + of_call + number) & WORD


def _random(*key: int) -> int:
    return digest("coefficient", *key) & WORD


def share_of_zero(calls: CallsOfGroup, worker: int) -> int:
    """A number of each member, whose sum is zero, modulo 2**64, if all members have made the same calls; else most
    probably not."""
    members = calls.members
    k = members.index(worker)
    following = members[(k + 1) % len(members)]
    return calls.name * (_random(calls.number, worker) - _random(calls.number, following)) & WORD


class _Entry(NamedTuple):
    """A collective: its number among those of the process, its group, the digest of the call, the call, and the number
    of the line, as `call_name` takes it."""

    number: int
    group: int
    digest: int
    call: Call
    line: int


class Difference(NamedTuple):
    """The first collective in which two processes called differently: the sides of both."""

    own: Side
    other: Side


class History:
    """The last collectives of this process."""

    def __init__(self) -> None:
        self.entries: deque[_Entry] = deque(maxlen=CALLS_KEPT)
        self.changed = False
        """Whether it has changed since it was packed."""

    def add(self, number: int, group: int, call: Call, line: int) -> int:
        """Add a collective. Returns the digest of the call."""
        name = call_name(call, line=line)
        self.entries.append(_Entry(number, group, name, call, line))
        self.changed = True
        return name

    def side(self, number: int) -> Side:
        """The side of this process in the collective of a number; the end of the map where it has not made it."""
        for e in self.entries:
            if e.number == number:
                return side_of(e)
        last = self.entries[-1].call if self.entries else None
        after = "without any call before" if last is None else f"after {last} {last.source}"
        return Side("", "the end of the map", after, number & 0xFFFFFFFF)

    def packed(self, limit: int) -> bytes:
        """The last collectives as a checksum and JSON, at most `limit` bytes: number, group and digest of all of them,
        and the sides of the latest ones."""
        self.changed = False
        entries = list(self.entries)
        text = json.dumps([[e.number, e.group, e.digest] for e in entries])
        sides, left = [], limit - len(text) - 32
        for e in reversed(entries):
            side = f"[{e.number}, {side_of(e).packed(_SIDE_NBYTES).decode()}]"
            left -= len(side) + 2
            if left < 0:
                break
            sides.append(side)
        packed = f"[{text}, [{', '.join(sides)}]]".encode()
        return f"{crc32(packed):08x}".encode() + packed


def side_of(entry: _Entry) -> Side:
    return Side.of("", entry.call, entry.number & 0xFFFFFFFF, entry.line)


def first_difference(own: History, packed: bytes, group: int, elsewhere: bool) -> Difference | None:
    """The first collective of a group in which this process and another one called differently, by what the other has
    published; None if there is none among the last ones of both. elsewhere: whether a collective of another group in
    its place counts."""
    text = packed[8:]
    if not text or packed[:8] != f"{crc32(text):08x}".encode():  # it is being written
        return None
    calls, sides = json.loads(text)
    theirs = {number: (their_group, name) for number, their_group, name in calls}
    for e in list(own.entries):
        if e.number not in theirs:
            continue
        their_group, name = theirs[e.number]
        met = e.group == their_group == group
        if (met and e.digest != name) or (elsewhere and e.group != their_group and group in (e.group, their_group)):
            side = dict(sides).get(e.number)
            if side is None:
                other = Side("", "another collective", "(it is too long ago)", e.number & 0xFFFFFFFF)
            else:
                other = Side("", *side)
            return Difference(side_of(e), other)
    return None
