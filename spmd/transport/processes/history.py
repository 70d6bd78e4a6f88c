"""What a process has called lately: by it, workers that called differently find out who called what."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple
from zlib import crc32

from spmd.transport.call import Call, Side
from spmd.transport.processes.headers import WORD, call_name, digest

__all__ = [
    "CALLS_KEPT",
    "CallsOfGroup",
    "Difference",
    "History",
    "first_difference",
    "is_in_order",
    "is_recent",
    "share_of_zero",
    "unordered",
]

CALLS_KEPT = 64
"""The last collectives of a process that others can learn of."""
_SIDE_NBYTES = 2048
"""Bytes of the description of one call, at most."""
_UNORDERED = 1 << 63
_FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that multiplication loses nothing; its bits look random."""


def unordered(number: int) -> int:
    """The number of a collective that workers of other groups do not count, or that is taken in an order of its own: it
    may come again, and is neither before nor after others."""
    return number | _UNORDERED


def is_in_order(number: int) -> bool:
    """Whether all workers count the collective of this number, one after the other."""
    return not number & _UNORDERED


class CallsOfGroup:
    """The collectives of a group so far, by messages.

    number: that of the group, the same in all its processes. members: its workers. count: the rendezvous count on the
    status board, if there is one. name: a digest of all calls. made: how many they are.
    """

    __slots__ = ("count", "made", "members", "name", "number")

    def __init__(self, number: int, members: Sequence[int], count: Any):
        self.number, self.members, self.count = number, members, count
        self.name = digest("calls of a group", number) & WORD
        self.made = 0

    def add(self, of_call: int, number: int) -> None:
        """Add a call, by its digest and the number of the collective."""
        self.name = (self.name * _FACTOR + of_call + number) & WORD
        self.made += 1


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
    """A collective: its number among those of the process, its group, its place among those of the group, the digest of
    the call, the call, and the number of the line, as `call_name` takes it."""

    number: int
    group: int
    place: int
    digest: int
    call: Call
    line: int

    @property
    def key(self) -> tuple[int, int]:
        """What identifies it in all processes of its group."""
        return self.group, self.place


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

    def add(self, number: int, calls: CallsOfGroup, call: Call, line: int) -> int:
        """Add the next collective of a group. Returns the digest of the call."""
        name = call_name(call, line=line)
        self.entries.append(_Entry(number, calls.number, calls.made, name, call, line))
        self.changed = True
        return name

    def side(self, group: int, place: int, number: int) -> Side:
        """The side of this process in a collective of a group; the end of the map where it has not made it."""
        for e in self.entries:
            if e.key == (group, place):
                return side_of(e)
        last = self.entries[-1].call if self.entries else None
        after = "without any call before" if last is None else f"after {last} {last.source}"
        return Side("", "the end of the map", after, number & 0xFFFFFFFF)

    def packed(self, limit: int) -> bytes:
        """The last collectives as a checksum and JSON, at most `limit` bytes: number, group, place and digest of all of
        them, and the sides of the latest ones, by their places in this list."""
        self.changed = False
        entries = list(self.entries)
        text = json.dumps([e[:4] for e in entries])
        sides, left = [], limit - len(text) - 32
        for k, e in reversed([*enumerate(entries)]):
            side = f"[{k}, {side_of(e).packed(_SIDE_NBYTES).decode()}]"
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
    published; None if there is none among the last ones of both. elsewhere: whether a collective of another group with
    its number counts, where all workers count both."""
    text = packed[8:]
    if not text or packed[:8] != f"{crc32(text):08x}".encode():  # it is being written
        return None
    calls, sides = json.loads(text)
    met = {place: k for k, (_, their_group, place, _) in enumerate(calls) if their_group == group}
    counted = {number: k for k, (number, *_) in enumerate(calls) if is_in_order(number)} if elsewhere else {}
    for e in list(own.entries):
        k = met.get(e.place) if e.group == group else None
        if k is not None and [e.number, e.digest] != [calls[k][0], calls[k][3]]:
            return _difference(e, k, calls, sides)
        k = counted.get(e.number)
        if k is not None and e.group != calls[k][1] and group in (e.group, calls[k][1]):
            return _difference(e, k, calls, sides)
    return None


def is_recent(entry: _Entry, theirs: list[Any]) -> bool:
    """Whether a collective would be among the last ones of another process, if that has made it. theirs: number, group,
    place and digest of these."""
    places = [place for _, group, place, _ in theirs if group == entry.group]
    counted = [number for number, *_ in theirs if is_in_order(number)]
    is_counted = is_in_order(entry.number) and entry.number >= min(counted, default=inf)
    return len(theirs) < CALLS_KEPT or is_counted or entry.place >= min(places, default=inf)


def _difference(entry: _Entry, k: int, calls: list[Any], sides: list[Any]) -> Difference:
    """A collective of this process, and number k of what another one has published."""
    side = dict(sides).get(k) or ["another collective", "(it is too long ago)", calls[k][0] & 0xFFFFFFFF]
    return Difference(side_of(entry), Side("", *side))
