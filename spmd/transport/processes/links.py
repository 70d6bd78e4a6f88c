"""Links: messages between two members of a group, in order.

A message is a packet of at most `PACKET_NBYTES` bytes and, where head or data do not fit into it, what follows it. A
packet begins with four words of eight bytes: the digest of all calls of the group so far; the number of the collective;
the length of the head, with flags; and the length of the data. So a receiver knows what comes, and whether the sender
makes the same calls, and members that exchange nothing send each other nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

__all__ = ["PACKET_NBYTES", "ROOM", "Link", "Parcel"]

PACKET_NBYTES = 1024
"""Bytes of a packet, at most."""
_WORDS = Struct("=QQQQ")
"""The four words."""
_AT = _WORDS.size
ROOM = PACKET_NBYTES - _AT
"""Bytes of head and data that a packet holds, at most."""
_NEEDS_GRAD = 1 << 40
"""In the third word: the block is differentiated."""
_FOLLOWS = 1 << 41
"""In the third word: the data follow the packet."""
_PLACED = 1 << 42
"""In the third word: in place of the data the packet has their place in the sender's shared memory, in eight bytes."""
_LENGTH = _NEEDS_GRAD - 1


class Parcel(NamedTuple):
    """What a packet says.

    name: the digest of the calls. number: that of the collective. head: what describes the data; None where it follows
    the packet. data: those in the packet; None where they follow it, or lie at `place` in the sender's shared memory.
    head_nbytes, nbytes: of head and data.
    """

    name: int
    number: int
    needs_grad: bool
    head: bytes | None
    data: bytes | None
    head_nbytes: int
    nbytes: int
    place: int | None = None


class Link(ABC):
    """The messages between this process and one other member of a channel.

    peer: the place of that member in the channel. outgoing, incoming: the memory of packets; outgoing_bytes,
    incoming_bytes: as bytes. early: what came of collectives whose turn has not come, by their names. unread: whether
    a packet has come at which nobody has looked. place: that of the collective that sends, on the status board.
    awaited: the requests for the next packet, where it is being received.
    """

    __slots__ = (
        *("awaited", "early", "incoming", "incoming_bytes", "outgoing", "outgoing_bytes", "peer", "place", "unread"),
    )

    def __init__(self, peer: int):
        self.peer = peer
        self.early: dict[int, list[Any]] = {}
        self.unread = False
        self.awaited: Any = None
        self.place: tuple[int, int] | None = None
        self.new_outgoing()
        self.receive_into(np.zeros(PACKET_NBYTES // 8, np.uint64))

    def new_outgoing(self) -> None:
        """Write the next packets to other memory: a packet is still being sent from that of before."""
        self.outgoing = np.zeros(PACKET_NBYTES // 8, np.uint64)
        # Memoryviews take a third of the time of arrays.
        self.outgoing_bytes: Any = self.outgoing.view(np.uint8).data

    def receive_into(self, memory: np.ndarray) -> None:
        """The next packet comes to this memory."""
        self.incoming = memory
        self.incoming_bytes: Any = memory.view(np.uint8).data

    def send(
        self,
        name: int,
        number: int,
        needs_grad: bool,
        head: bytes,
        data: bytes | None,
        nbytes: int,
        place: int | None = None,
    ) -> tuple[bool, bool]:
        """Send a packet. data: None where they are to follow the packet, whatever their length. place: where they lie
        in shared memory, as `offer` gives it. The result says whether head and data are in it. What is not has to
        follow, the head first."""
        self.prepare(name)
        length = len(head)
        has_head = length <= ROOM
        inline = data if data is not None and length + nbytes <= ROOM else None
        if place is not None:
            inline = place.to_bytes(8, "little")
        has_data = inline is not None
        flags = length + _NEEDS_GRAD * needs_grad + _FOLLOWS * (not has_data) + _PLACED * (place is not None)
        text = _WORDS.pack(name, number, flags, nbytes)
        if has_head:
            text += head
        if inline is not None:
            text += inline
        end = len(text)
        self.outgoing_bytes[:end] = text
        self.post(end)
        return has_head, has_data

    def parcel(self) -> Parcel:
        """The packet that has come."""
        text = self.incoming_bytes
        name, number, flags, nbytes = _WORDS.unpack_from(text)
        length = flags & _LENGTH
        has_head, has_data, placed = length <= ROOM, not flags & _FOLLOWS, bool(flags & _PLACED)
        end = _AT + length
        return Parcel(
            name,
            number,
            bool(flags & _NEEDS_GRAD),
            bytes(text[_AT:end]) if has_head else None,
            bytes(text[end : end + nbytes]) if has_data and not placed else None,
            length,
            nbytes,
            int.from_bytes(text[end : end + 8], "little") if placed else None,
        )

    def holds(self, name: int, number: int, head: bytes, nbytes: int) -> bool:
        """Whether the packet that has come has this name and number, and holds this head and so many bytes of data."""
        text, length = self.incoming_bytes, len(head)
        return _WORDS.unpack_from(text) == (name, number, length, nbytes) and text[_AT : _AT + length] == head

    def view(self, head: bytes, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The data behind this head in the packet that has come: valid until the next one is received."""
        return np.ndarray(shape, dtype, self.incoming_bytes, _AT + len(head))

    def offer(self, x: np.ndarray) -> int | None:
        """The place in shared memory of bytes that the other member will read there; they stay until it has. None:
        they have to be sent."""
        return None

    def read(self, place: int, into: Any) -> None:
        """Copy bytes that lie at a place in the other member's shared memory, which may then free them."""
        raise NotImplementedError

    @abstractmethod
    def prepare(self, name: int) -> None:
        """See to it that the memory of the outgoing packet may be written to, for the collective of this name."""

    @abstractmethod
    def post(self, nbytes: int) -> None:
        """Send the first `nbytes` of the outgoing packet."""

    @abstractmethod
    def receive(self) -> list[Any]:
        """Receive the next packet: the requests to wait for. Then it is in `incoming`."""

    @abstractmethod
    def send_data(self, x: Any) -> list[Any]:
        """Send contiguous bytes that follow a packet: the requests to wait for."""

    @abstractmethod
    def receive_data(self, buffer: Any) -> list[Any]:
        """Receive contiguous bytes that follow a packet: the requests to wait for."""
