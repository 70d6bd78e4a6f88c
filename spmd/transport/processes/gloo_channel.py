"""Bytes over gloo: connections, and channels among the processes that they connect.

All movements are sends and receives between two processes, directly from and into arrays, which are gloo's fastest.
Each group of workers has its own tags.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmd.transport.call import Shape
from spmd.transport.processes.announce import ProcessGroup
from spmd.transport.processes.channel import Channel
from spmd.transport.processes.headers import digest
from spmd.transport.processes.links import Link

__all__ = ["CONNECT_TIMEOUT", "Connections", "GlooChannel", "GlooLink", "Posted"]

_TAGS = (1 << 31) - 1
_PACKETS_MAX = 64
"""Packets to one process that may be under way."""
CONNECT_TIMEOUT = timedelta(minutes=30)
"""For connecting. It takes milliseconds once all processes are here; only with SPMD_CHECK=0 it includes that wait."""


def _tensor(x: np.ndarray) -> torch.Tensor:
    """Bytes as a tensor on the same memory. Read-only ones, which are only sent, avoid the warning of from_numpy."""
    if x.flags.writeable:
        return torch.from_numpy(x)
    return torch.frombuffer((ctypes.c_char * x.nbytes).from_address(x.ctypes.data), dtype=torch.uint8)


class Connections:
    """Connections of this process with all others."""

    def __init__(self, store: Any, rank: int, size: int):
        self.group: Any = dist.ProcessGroupGloo(store, rank, size, CONNECT_TIMEOUT)
        self.links: list[GlooLink] = []
        """Kept alive: their posted receives write to their packets."""
        self.peers = [r for r in range(size) if r != rank]
        self.tag = digest("nothing ever comes here") % _TAGS

    def close_all(self) -> None:
        """Close all connections, so that waits on them end, here and in other processes. gloo closes a connection
        when a receive times out."""
        for peer in self.peers:
            with suppress(RuntimeError):
                self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, self.tag).wait(timedelta(milliseconds=1))


class Posted(list):
    """Sends and receives under way. closed: the error with which posting stopped, if the connections were closed."""

    __slots__ = ("closed", "connections")

    def __init__(self, connections: Connections):
        self.connections = connections
        self.closed = ""

    def post(self, move: Callable[..., Any], x: torch.Tensor, rank: int, tag: int) -> None:
        try:
            if not self.closed:
                self.append(move([x], rank, tag))
        except RuntimeError as error:
            self.closed = str(error)


class GlooLink(Link):
    """The messages to a rank, and from it. A receive for the next packet is always posted: gloo's sender waits until it
    knows of one. next: its memory."""

    __slots__ = ("connections", "data_tag", "next", "posted", "rank", "sending", "tag", "transport")

    def __init__(self, transport: ProcessGroup, connections: Connections, peer: int, rank: int, key: int):
        super().__init__(peer)
        self.transport, self.connections, self.rank = transport, connections, rank
        self.tag, self.data_tag = (digest(name, key) % _TAGS for name in ("packets", "data of packets"))
        self.sending: deque[tuple[Posted, np.ndarray, tuple[int, int] | None]] = deque()
        self.next = np.zeros_like(self.incoming)
        self.posted = self._post_receive()

    def prepare(self, name: int) -> None:
        while len(self.sending) >= _PACKETS_MAX:
            self.transport.groups.finish(name)  # the other side may wait for us in the same way
            posted, packet, place = self.sending.popleft()
            transport = self.transport
            transport.arrive(posted, transport.last_call, packet, (transport.ranks[self.peer],), place)
        if self.sending:  # gloo does not tell whether a packet has been sent, except to who waits for it
            self.new_outgoing()

    def post(self, nbytes: int) -> None:
        posted = Posted(self.connections)
        posted.post(self.connections.group.send, torch.from_numpy(self.outgoing.view(np.int64)), self.rank, self.tag)
        self.sending.append((posted, self.outgoing, self.place))

    def receive(self) -> Posted:
        posted = self.posted
        memory, self.next = self.next, self.incoming
        self.receive_into(memory)
        self.posted = self._post_receive()
        return posted

    def _post_receive(self) -> Posted:
        posted = Posted(self.connections)
        posted.post(self.connections.group.recv, torch.from_numpy(self.next.view(np.int64)), self.rank, self.tag)
        return posted

    def send_data(self, x: np.ndarray) -> Posted:
        return self._data(self.connections.group.send, x)

    def receive_data(self, buffer: np.ndarray) -> Posted:
        return self._data(self.connections.group.recv, buffer)

    def _data(self, move: Callable[..., Any], x: np.ndarray) -> Posted:
        posted = Posted(self.connections)
        posted.post(move, _tensor(x), self.rank, self.data_tag)
        return posted


class GlooChannel(Channel):
    """A group of processes, by their ranks, and the tag of their messages.

    Messages between two processes with one tag arrive in order. Empty blocks are not sent: the receiver knows their
    size.
    """

    __slots__ = ("connections", "key", "ranks", "tag", "transport")

    def __init__(self, transport: ProcessGroup, connections: Connections, ranks: Shape, me: int, key: int):
        super().__init__(me, len(ranks))
        self.transport, self.connections, self.ranks, self.key = transport, connections, ranks, key
        self.tag = digest("blocks", key) % _TAGS

    def link(self, peer: int) -> GlooLink:
        link = GlooLink(self.transport, self.connections, peer, self.ranks[peer], self.key)
        self.connections.links.append(link)
        return link

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> Posted:
        posted, group = Posted(self.connections), self.connections.group
        for move, blocks in (group.recv, receives), (group.send, sends):
            for k, x in blocks.items():
                if x.size:
                    posted.post(move, _tensor(x), self.ranks[k], self.tag)
        return posted
