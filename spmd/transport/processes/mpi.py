"""Workers that are MPI processes, over mpi4py's buffer calls.

A process that waits polls: MPI moves messages only while it is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
from mpi4py import MPI

from spmd.device import put
from spmd.kernels.memory import pool
from spmd.transport.algorithms import routing
from spmd.transport.call import Call, Shape
from spmd.transport.processes.channel import Channel
from spmd.transport.processes.hosts import ADDRESS, address_of, of_each_host
from spmd.transport.processes.job import on_leaving
from spmd.transport.processes.links import Link
from spmd.transport.processes.mailbox import Mailbox
from spmd.transport.processes.status_board import StatusBoard, file_of_launcher
from spmd.transport.processes.transport import ProcessTransport
from spmd.transport.processes.watchdog import Watchdog, let_others, status_board_of_job

__all__ = ["MpiChannel", "MpiTransport"]


@lru_cache(maxsize=1)
def _first_address_tag() -> int:
    """The first of the last 1024 tags, which are those of addresses."""
    return _unused_tag() + 1


@lru_cache(maxsize=1)
def _unused_tag() -> int:
    """A tag that no message of the world has."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) - 1025


def _receive_late_addresses() -> None:
    """Receive addresses that no call has received: MPICH may fail to end with unreceived messages."""
    status = MPI.Status()
    while MPI.COMM_WORLD.Iprobe(status=status) and status.Get_tag() >= _first_address_tag():
        nothing = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        MPI.COMM_WORLD.Recv([nothing, MPI.BYTE], status.Get_source(), status.Get_tag())


_TAGS = 32768
"""Tags that every MPI has, from 0."""
_PACKET_TAG, _DATA_TAG, _READ_TAG = 1, 2, 3
"""The tags of the messages of links: packets, data that follow them, and empty ones that say that data in shared memory
have been read. Those of other blocks have 0."""
_SHORT_NBYTES = 64
"""Bytes that are sent of a short packet, as most are."""
_DIRECT_MAX = 64
"""Processes up to which each sends each other its address, so that all know of all that have come."""
_NOTHING = np.empty(0, np.uint8)
_POLLS = 200
"""Polls of a request before the watchdog takes over."""


_PACKETS_AHEAD = 256
"""Of so many packets one is sent synchronously. After as many more its sender waits until the receiver has taken it:
MPI would keep packets for a slow receiver without limit."""


class MpiLink(Link):
    """The messages to a rank of a communicator, and from it. Packets use persistent requests, which take half the time
    of a send and a receive. sent: the number of packets. confirmed: the latest synchronous send, and the place of its
    collective. mailbox: that of the channel; where the members read each other's memory, data lie there, so that a
    receiver does not wait until MPI is called by a sender that computes. offered: such data, each with the request that
    ends when they have been read; answers: those that say so to the other member."""

    __slots__ = (
        *("answers", "busy", "comm", "confirmed", "confirmed_place", "groups", "long", "mailbox", "offered", "packet"),
        *("sending", "sent", "short"),
    )

    def __init__(self, groups: Any, comm: MPI.Comm, peer: int, mailbox: Mailbox | None = None):
        super().__init__(peer)
        self.mailbox = mailbox if mailbox is not None and mailbox.shared_memory is not None else None
        self.offered: deque[tuple[MPI.Request, np.ndarray]] = deque()
        self.answers: list[MPI.Request] = []
        self.groups, self.comm = groups, comm
        self.sent, self.confirmed = 0, MPI.REQUEST_NULL
        self.confirmed_place = self.place
        self.packet = comm.Recv_init([self.incoming, MPI.BYTE], peer, _PACKET_TAG)
        self.busy: list[tuple[MPI.Request, ...]] = []
        self._write_to_new_memory()
        _links.append(self)

    def _write_to_new_memory(self) -> None:
        self.new_outgoing()
        memory = self.outgoing.view(np.uint8)
        self.short = self.comm.Send_init([memory[:_SHORT_NBYTES], MPI.BYTE], self.peer, _PACKET_TAG)
        self.long = self.comm.Send_init([memory, MPI.BYTE], self.peer, _PACKET_TAG)
        self.sending: MPI.Request = self.short

    def prepare(self, name: int) -> None:
        if self.sent % _PACKETS_AHEAD == _PACKETS_AHEAD - 1 and not self.confirmed.Test():
            self.groups.finish(name)  # the other side may wait for us in the same way
            transport = self.groups.transport
            waits_for = (transport.ranks[self.peer],)
            transport.arrive([self.confirmed], transport.last_call, None, waits_for, self.confirmed_place)
        if not self.sending.Test():
            # A persistent request keeps its memory alive.
            self.busy = [pair for pair in self.busy if not self._freed(pair)] + [(self.short, self.long)]
            self._write_to_new_memory()

    @staticmethod
    def _freed(requests: tuple[MPI.Request, ...]) -> bool:
        """Free requests, if none of them is under way."""
        if not all(request.Test() for request in requests):
            return False
        for request in requests:
            request.Free()
        return True

    def post(self, nbytes: int) -> None:
        self.sent += 1
        if self.sent % _PACKETS_AHEAD == 0:
            packet = self.outgoing.view(np.uint8)[:nbytes]
            self.confirmed_place = self.place
            self.sending = self.confirmed = self.comm.Issend([packet, MPI.BYTE], self.peer, _PACKET_TAG)
            return
        self.sending = self.short if nbytes <= _SHORT_NBYTES else self.long
        self.sending.Start()

    def receive(self) -> list[MPI.Request]:
        self.packet.Start()
        return [self.packet]

    def offer(self, x: np.ndarray) -> int | None:
        while self.offered and self.offered[0][0].Test():
            self.offered.popleft()
        if self.mailbox is None or self.mailbox.shared_memory is None:
            return None
        memory = self.mailbox.shared_memory
        place = memory.place(x)
        if place is None:
            copy = pool.empty(max(x.nbytes, pool.POOL_MIN), np.uint8)
            place = memory.place(copy)
            if place is None:
                return None
            put(copy[: x.nbytes], x)
            x = copy
        self.offered.append((self.comm.Irecv([_NOTHING, MPI.BYTE], self.peer, _READ_TAG), x))
        return place

    def read(self, place: int, into: Any) -> None:
        assert self.mailbox is not None
        put(into, np.frombuffer(self.mailbox.windows[self.peer], np.uint8, into.nbytes, place))
        self.answers = [request for request in self.answers if not request.Test()]
        self.answers.append(self.comm.Isend([_NOTHING, MPI.BYTE], self.peer, _READ_TAG))

    def send_data(self, x: Any) -> list[MPI.Request]:
        return [self.comm.Isend([x, MPI.BYTE], self.peer, _DATA_TAG)]

    def receive_data(self, buffer: Any) -> list[MPI.Request]:
        return [self.comm.Irecv([buffer, MPI.BYTE], self.peer, _DATA_TAG)]

    def close(self) -> None:
        """Free the requests that are not under way, before MPI ends."""
        for request, _ in self.offered:
            if not request.Test():
                request.Cancel()
                request.Wait()
        for requests in ((self.packet,), (self.short, self.long), *self.busy):
            with suppress(MPI.Exception):  # of a peer that has died
                self._freed(requests)


class MpiChannel(Channel):
    """A communicator. Large blocks go as messages, which MPI copies once on one host; its own collectives move small
    pieces, and only while they are called."""

    __slots__ = ("comm", "groups")

    def __init__(self, groups: Any, comm: MPI.Comm):
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.groups, self.comm = groups, comm

    def link(self, peer: int) -> MpiLink:
        return MpiLink(self.groups, self.comm, peer, self.mailbox)

    def broadcast(self, buffer: np.ndarray, root: int) -> list[MPI.Request]:
        if self.size < 3:
            return super().broadcast(buffer, root)
        return [self.comm.Ibcast([buffer, MPI.BYTE], root)]

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> list[MPI.Request]:
        requests = [self.comm.Irecv([b, MPI.BYTE], k) for k, b in receives.items()]
        return requests + [self.comm.Isend([b, MPI.BYTE], k) for k, b in sends.items()]


class MpiTransport(ProcessTransport):
    """Processes of an MPI world, one worker each, in the order of a communicator. Making it sends nothing."""

    name = "mpi"
    disconnections = (MPI.Exception,)

    def __init__(self, comm: MPI.Comm, ranks: Shape):
        self.group = comm.Get_group()
        super().__init__(comm.Get_rank(), ranks, _status_board)

    @classmethod
    def of(cls, comm: MPI.Comm) -> MpiTransport:
        """The transport of a communicator's processes: one for each list of processes."""
        ranks = tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group()))
        if (cls, ranks) not in _transports:
            _transports[cls, ranks] = cls(comm, ranks)
        return _transports[cls, ranks]

    def open(self, members: Shape, call: Call) -> MpiChannel:
        group = self.group.Incl(members)
        number, _ = self.number_of(members)
        try:
            # Each group has its own tag: an abandoned call may still run in another thread.
            comm = self.run_under_watchdog(lambda: MPI.COMM_WORLD.Create_group(group, number % _TAGS), call)
            return MpiChannel(self.groups, comm)
        finally:
            group.Free()

    def run_under_watchdog(self, work: Callable[[], Any], call: Call) -> Any:
        return super().run_under_watchdog(work, call) if MPI.Query_thread() == MPI.THREAD_MULTIPLE else work()

    def wait_for(self, requests: list[MPI.Request]) -> None:
        MPI.Request.Waitall(requests)

    @staticmethod
    def complete_soon(requests: list[MPI.Request]) -> bool:
        for request in requests:
            if not (request.Test() or request.Test()):
                for _ in range(_POLLS):
                    let_others()
                    if request.Test():
                        break
                else:
                    return False
        return True

    def progress(self) -> None:
        MPI.COMM_WORLD.Iprobe(tag=_unused_tag())  # a probe moves messages; no message has this tag

    def watch(self, requests: list[MPI.Request], call: Call | None) -> None:
        self._poll(requests, call)

    def _poll(
        self, requests: list[MPI.Request], call: Call | None, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        Watchdog(self, call).until(lambda: MPI.Request.Testall(requests), meanwhile)

    def exchange_addresses(self, others: Sequence[int], number: int, call: Call) -> None:
        tag, status_board = _first_address_tag() + number % 1024, self.status_board
        assert status_board is not None
        exchange = self._exchange_directly if len(others) < _DIRECT_MAX else self._spread_addresses
        # The second exchange confirms that all processes reached the first. A process that comes after the others have
        # failed finds only their first messages; without the second, it would wait for them inside MPI for ever.
        for _ in range(2):
            exchange(others, address_of(status_board), tag, call)

    def _exchange_directly(self, others: Sequence[int], own: bytes, tag: int, call: Call) -> None:
        """Send this process's address to these ranks, and receive theirs."""
        addresses = np.zeros((len(others), ADDRESS), np.uint8)
        by_rank = dict(zip(others, addresses, strict=True))
        self._swap(dict.fromkeys(others, np.frombuffer(own, np.uint8)), by_rank, tag, call, by_rank)

    def _spread_addresses(self, others: Sequence[int], own: bytes, tag: int, call: Call) -> None:
        """Receive addresses of two processes of each host, in about log2 n rounds."""
        board = self.status_board
        assert board is not None
        ranks, known = sorted([*others, board.rank]), {board.rank: np.frombuffer(own, np.uint8)}
        for step in routing.all_gather("Bruck", len(ranks), ranks.index(board.rank)).rounds:
            (to,), (source,) = ([ranks[t.peer] for t in transfers] for transfers in (step.sends, step.receives))
            text = np.frombuffer(b"".join(r.to_bytes(8, "little") + a.tobytes() for r, a in known.items()), np.uint8)
            length = np.zeros(1, np.int64)
            self._swap({to: np.array([text.nbytes])}, {source: length}, tag, call)
            rows = np.empty((int(length[0]) // (8 + ADDRESS), 8 + ADDRESS), np.uint8)
            self._swap({to: text}, {source: rows}, tag, call)
            come = {int.from_bytes(row[:8].tobytes(), "little"): row[8:] for row in rows}
            self._add_addresses(come)
            known = of_each_host({**known, **come}, 2)

    def _add_addresses(self, by_rank: Mapping[int, np.ndarray]) -> None:
        for r, address in by_rank.items():
            if address.any():
                self.status_board.add_address(r, address.tobytes())  # type: ignore[union-attr]

    def _swap(
        self,
        sends: Mapping[int, np.ndarray],
        receives: Mapping[int, np.ndarray],
        tag: int,
        call: Call,
        addresses: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """Send to ranks of the world, and receive from them. addresses: those that come, by rank."""
        world = MPI.COMM_WORLD
        received = [world.Irecv([buffer, MPI.BYTE], r, tag) for r, buffer in receives.items()]
        sent = [world.Isend([x, MPI.BYTE], r, tag) for r, x in sends.items()]
        try:
            self._poll(received + sent, call, partial(self._add_addresses, addresses))
            self._add_addresses(addresses)
        except BaseException:
            for request in received:
                request.Cancel()
                request.Wait()
            self.abandoned.append((sent, sends))
            raise

    def leave(self, code: Any) -> None:
        if code not in (None, 0) and MPI.COMM_WORLD.Get_size() > 1:
            super().leave(code)


_transports: dict[tuple[type, Shape], MpiTransport] = {}
_links: list[MpiLink] = []
"""All links, kept alive: their posted receives write to their packets."""


def close_channels() -> None:
    """This process leaves the job."""
    if not MPI.Is_finalized():
        if _first_address_tag.cache_info().currsize:
            _receive_late_addresses()
        for link in _links:
            link.close()


on_leaving(close_channels)


def _status_board() -> StatusBoard | None:
    return status_board_of_job(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), file_of_launcher)
