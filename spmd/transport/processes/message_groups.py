"""The groups of a process whose members meet by messages, and how they verify that all make the same calls.

Each message carries a digest of all calls of its group so far. Members that exchange nothing verify each other at the
end of the map: each brings a share of a sum that is zero if, in every group, all have made the same calls. A process
that waits for a message long looks up what the others have published; so it finds out when they are elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from spmd.errors import MismatchError
from spmd.transport.algorithms.choice import members_per_host
from spmd.transport.call import Call, Group, Pair, Shape, Side, mismatch
from spmd.transport.processes.announce import HeaderComm, ProcessGroup
from spmd.transport.processes.headers import digest
from spmd.transport.processes.history import (
    CallsOfGroup,
    History,
    first_difference,
    is_recent,
    share_of_zero,
    unordered,
)
from spmd.transport.processes.links import Link
from spmd.transport.processes.mailbox import MEMBERS_MAX
from spmd.transport.processes.running import Running

__all__ = ["MessageGroups"]

_PUBLISH_TIMEOUT = 3.0
"""Seconds that others get to publish what they have called."""
_SEEN_AT_ONCE = 64
"""Workers whose published calls a waiting process compares with its own between two looks at its packet."""
_ELSEWHERE_SECONDS = 3.0
"""Seconds of a wait after which it is a mismatch that another worker calls something in another group."""
_NUMBER = (1 << 32) - 1
"""The number of a collective in its map, of its number in the job."""


class MessageGroups:
    """The groups that meet by messages, and the links with their members.

    under_way: the collectives that have been started, in order, by name. hosts: the host of each worker, once they have
    met. history: the last collectives by messages.
    """

    def __init__(self, transport: ProcessGroup):
        self.transport = transport
        self.links: dict[int, Link] = {}
        self.calls: dict[Shape, CallsOfGroup] = {}
        self.pairs: dict[str, CallsOfGroup] = {}
        self.under_way: dict[int, Running] = {}
        self.hosts: Shape = ()
        self.history = History()
        self._awaited: CallsOfGroup | None = None
        """The calls of the group in which this process waits for a packet."""
        self._seen: dict[int, bytes] = {}
        """What workers have published, as it was looked at in this wait."""
        self._next = 0
        """The place in the group of the worker to look at next."""
        self._per_host: dict[Shape, int] = {}

    def publish(self) -> None:
        """From now on others see the history of this transport."""
        if self.transport.status_board is not None:
            self.transport.status_board.history = self.history

    def forget(self) -> None:
        """A map has failed: messages under way may never come."""
        self.transport.abandoned.append(list(self.under_way.values()))  # what is received into must stay alive
        self.links.clear()
        self.calls.clear()
        self.pairs.clear()
        self.under_way.clear()

    def on_this_host(self, ranks: Shape) -> bool:
        """Whether processes, which have all started, share the status board of this host, and may share memory."""
        board = self.transport.status_board
        return board is not None and len(ranks) <= MEMBERS_MAX and all(map(board.is_local, ranks))

    def calls_of(self, group: Group, call: Call) -> CallsOfGroup | None:
        """The calls of a group, if its members meet by messages; None if they share memory."""
        if type(group) is Pair:
            return self._calls_of_pair(group)
        transport, ordered = self.transport, group.ordered
        channel = transport.channels.get(ordered)
        if channel is not None and channel.mailbox is not None:
            return None
        calls = self.calls.get(ordered)
        if calls is None:
            transport.channel(transport.everyone.members, call)
            number, ranks = transport.number_of(ordered)
            if self.on_this_host(ranks) and transport.channel(ordered, call).mailbox is not None:
                return None
            board = transport.status_board
            count = None if board is None else board.rendezvous_count(number, ranks)
            own_number = digest(type(transport).__name__, transport.ranks, number)
            calls = self.calls[ordered] = CallsOfGroup(own_number, ordered, count)
        return calls

    def _calls_of_pair(self, pair: Pair) -> CallsOfGroup:
        """The calls of a pair: always by messages, because who sends does not wait."""
        calls = self.pairs.get(pair.key)
        if calls is None:
            transport = self.transport
            ranks, board = tuple(transport.ranks[m] for m in pair.members), transport.status_board
            number = digest("pair", type(transport).__name__, transport.failed, ranks, pair.key) or 1
            count = None if board is None else board.rendezvous_count(number, ranks)
            calls = self.pairs[pair.key] = CallsOfGroup(number, pair.members, count)
        return calls

    def known_calls(self, group: Group) -> CallsOfGroup | None:
        """The calls of a group that has met by messages since a map failed; else None."""
        return self.pairs.get(group.key) if type(group) is Pair else self.calls.get(group.ordered)

    @property
    def _epoch(self) -> int:
        """A number that grows with each map, and with each that fails: numbers of collectives begin anew then."""
        return self.transport.runs + self.transport.failed

    def begin(self, comm: HeaderComm, group: Group, call: Call, calls: CallsOfGroup) -> Running:
        """The next collective of a worker, which has counted it."""
        transport = self.transport
        transport.raise_earlier_failure()
        number = comm.number + (self._epoch << 32)
        if not comm.in_order or (type(group) is Pair and group.stream):
            number = unordered(number)
        calls.add(self.history.add(number, calls, call, comm.line), number)
        if transport.status_board is not None:
            transport.status_board.enter(calls.count, call)
        transport.last_call = call
        return Running(self, group, call, calls, number)

    def link(self, worker: int) -> Link:
        """The link with another worker."""
        link = self.links.get(worker)
        if link is None:
            channel = self.transport.channel(self.transport.everyone.members, self.transport.last_call)
            link = self.links[worker] = channel.link(worker)
        return link

    def members_per_host(self, group: Group) -> int:
        """The number of members of a group on each host, where they can be taken together: see
        `choice.members_per_host`."""
        found = self._per_host.get(group.members)
        if found is None:
            hosts = [self.hosts[m] for m in group.members] if self.hosts else range(group.size)
            found = self._per_host[group.members] = members_per_host(hosts)
        return found

    def await_packet(self, link: Link, run: Running) -> bool:
        """Wait for the next packet of a link, in a collective. False if others were finished meanwhile, which may have
        taken packets of this link."""
        transport = self.transport
        requests = link.awaited = link.awaited or link.receive()
        if not transport.complete_soon(requests):
            if self.finish(run.name):
                return False
            self._awaited, self._seen = run.calls, {}
            try:
                transport.arrive(requests, run.call, (link, run), (transport.ranks[link.peer],), run.place)
            finally:
                self._awaited = None
        link.awaited = None
        return True

    def finish(self, before: int | None = None) -> bool:
        """Wait for all collectives that have been started, or for those before the one of this name. Scheduled messages
        are left out. The result says whether there were any.

        Others may wait for messages of this process in them: workers wait in orders of their own for what they have
        started.
        """
        run = None if before is None else self.under_way.get(before)
        started = takewhile(lambda other: other is not run, self.under_way.values())
        found = [other for other in started if not (type(other.group) is Pair and other.group.scheduled)]
        for other in found:
            if other.name in self.under_way:
                other.wait()
        return bool(found)

    # Mismatches.

    def mismatch_with(self, worker: int, calls: CallsOfGroup, call: Call, number: int) -> MismatchError:
        """The error where a worker has sent a message of another call. What it has called is on its status board, or
        will be in a moment."""
        board, difference = self.transport.status_board, None
        until = time.monotonic() + _PUBLISH_TIMEOUT
        while board is not None and difference is None and time.monotonic() < until:
            board.poll()
            difference = self._difference(worker, calls, True)
            time.sleep(0.01)
        own = Side.of("", call, number & _NUMBER)
        other = Side("", "another collective", "(which one is not known)", own.number)
        error = self._mismatch({self.transport.local[0]: own, worker: other} if difference is None else difference)
        self.transport.fail(error)
        return error

    def _difference(self, worker: int, calls: CallsOfGroup, elsewhere: bool) -> dict[int, Side] | None:
        """The sides of this process and of another worker in the first call of a group that they have made differently,
        as far as is known; see `first_difference`."""
        board = self.transport.status_board
        assert board is not None
        found = first_difference(self.history, board.history_of(self.transport.ranks[worker]), calls.number, elsewhere)
        return None if found is None else {self.transport.local[0]: found.own, worker: found.other}

    def _mismatch(self, sides: dict[int, Side]) -> MismatchError:
        """The error with the sides of two workers."""
        return mismatch(*(sides[w]._replace(worker=self.transport.describe(w)) for w in sorted(sides)))

    def seen_mismatch(self, waited: float) -> MismatchError | None:
        """The error where this process waits for a packet, and another of the group has published another call of it.

        One that has not come to the group is seen otherwise, by the rendezvous counts of the status board; if that has
        found nothing for a while, calls of another group count too. waited: seconds.
        """
        calls, own, board = self._awaited, self.transport.local[0], self.transport.status_board
        if calls is None or board is None:
            return None
        elsewhere = waited > _ELSEWHERE_SECONDS
        n = len(calls.members)
        places = range(self._next, self._next + min(n, _SEEN_AT_ONCE))
        self._next = places.stop % n
        for worker in (calls.members[k % n] for k in places):
            published = board.history_of(self.transport.ranks[worker]) if worker != own else b""
            if published and (elsewhere or self._seen.get(worker) != published):
                self._seen[worker] = published
                sides = self._difference(worker, calls, elsewhere)
                if sides is not None:
                    return self._mismatch(sides)
        return None

    # The end of a map.

    def check_sum(self) -> int:
        """This process's share of a sum that is zero if in each group all members have made the same calls."""
        me, everyone = self.transport.local[0], self.transport.everyone.members
        groups = sum(share_of_zero(calls, me) for members, calls in self.calls.items() if members != everyone)
        return groups + sum(share_of_zero(calls, me) for calls in self.pairs.values())

    def find_mismatch(self, share: Callable[[Any], list[Any]]) -> MismatchError:
        """The error where the sum of all processes is not zero. All call this, to find out who called what.

        share: sends a small JSON value to all, and returns those of all.
        """
        me, epoch = self.transport.local[0], self._epoch
        entries = [e for e in self.history.entries if e.number >> 32 & _NUMBER >> 1 == epoch]
        shared = share([e[:4] for e in entries])
        called = [{(group, place): [number, name] for number, group, place, name in theirs} for theirs in shared]
        members = {calls.number: calls.members for calls in (*self.calls.values(), *self.pairs.values())}
        own = [
            [e.number, *e.key, me, worker]
            for e in entries
            for worker in members[e.group]
            if called[worker].get(e.key) != [e.number, e.digest] and is_recent(e, shared[worker])
        ]
        found = [first for first in share(min(own, default=None)) if first is not None]
        if not found:
            return self._mismatch_at_the_end()
        number, group, place, *workers = min(found)
        text = self.history.side(group, place, number).packed(1 << 12).decode() if me in workers else ""
        texts = share(text)
        return self._mismatch({w: Side.unpacked("", texts[w].encode()) for w in workers})

    def _mismatch_at_the_end(self) -> MismatchError:
        return MismatchError.at(
            "a collective",
            got="workers that have made different collectives in this map, so long ago that it is not known which",
            need="the same collectives in the same order from all workers of each group",
            mend="let all workers take the same path",
        )
