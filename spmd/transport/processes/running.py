"""A collective by messages: what this process sends and receives in it, and how it waits.

Members send what the schedule says to the members that it names, and to nobody else. Each message carries the digest of
all calls of the group so far, which its receiver compares. A receiver that finds another digest looks up on the status
board what the sender has called, raises MismatchError, and publishes it; the others raise it as soon as they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import prod
from typing import Any, Protocol

import numpy as np

from spmd.kernels.memory import pool
from spmd.transport.call import Call, Group, Pair
from spmd.transport.handles import Done, Handle
from spmd.transport.processes.announce import ProcessGroup
from spmd.transport.processes.channel import bytes_of
from spmd.transport.processes.history import CallsOfGroup, is_in_order
from spmd.transport.processes.links import ROOM, Link, Parcel

__all__ = ["Arrived", "Running", "Steps"]

Steps = Generator[None, None, Any]
"""A collective. It yields when it has sent the messages of a round, and then takes what comes. It gives the result."""


class Groups(Protocol):
    """The part of `MessageGroups` that a collective uses."""

    transport: ProcessGroup
    under_way: dict[int, Any]

    def link(self, worker: int) -> Link: ...

    def await_packet(self, link: Link, run: Running) -> bool: ...

    def mismatch_with(self, worker: int, calls: CallsOfGroup, call: Call, number: int) -> BaseException: ...


class Arrived:
    """A message that has come. parcel: what its packet says. head: as bytes. data: an array of bytes; placed: whether
    it is the one that the receiver has given. requests: those for data that are under way."""

    __slots__ = ("data", "head", "parcel", "placed", "requests")

    def __init__(self, parcel: Parcel, head: bytes, data: np.ndarray, placed: bool, requests: list[Any]):
        self.parcel, self.head, self.data, self.placed, self.requests = parcel, head, data, placed, requests


class Running:
    """The messages of one collective.

    number: that of the collective in the map; name: the digest of the calls of its group, this one included, by which
    messages of this collective are told from those of others. place: that of its
    rendezvous on the status board, the number of the group and its count. needs_grad: whether
    the block of any member that was heard of is differentiated. sending, receiving: requests under way; kept: their
    buffers.
    """

    __slots__ = (
        *("call", "calls", "group", "groups", "kept", "name", "needs_grad", "number", "place", "receiving", "sending"),
        *("steps", "transport", "value"),
    )

    def __init__(self, groups: Groups, group: Group, call: Call, calls: CallsOfGroup, number: int):
        self.groups, self.transport = groups, groups.transport
        self.group, self.call, self.calls = group, call, calls
        self.number, self.name = number, calls.name
        self.place = None if calls.count is None else (calls.count.group, calls.count.value)
        self.needs_grad = call.needs_grad is not None and call.needs_grad[0]
        self.sending: list[Any] = []
        self.receiving: list[Any] = []
        self.kept: list[Any] = []
        self.steps: Steps | None = None
        self.value: Any = None

    def start(self, steps: Steps) -> Handle:
        """Send the messages of the first round. The handle waits for the rest."""
        self.steps = steps
        self.groups.under_way[self.name] = self
        self._go_on()
        return Done(self.value) if self.steps is None else self

    def wait(self) -> Any:
        while self.steps is not None:
            self._go_on()
        return self.value

    def _go_on(self) -> None:
        """Take what comes in the round that has begun, and send the messages of the next; or finish."""
        assert self.steps is not None
        try:
            next(self.steps)
            return
        except StopIteration as end:
            self.value = end.value
        except BaseException as error:
            self.failed(error)
            raise
        for requests in self.sending:
            self.transport.arrive(requests, self.call, self.kept)
        self.sending = []
        self.groups.under_way.pop(self.name, None)
        self.steps = None
        self.kept.clear()
        if self.call.needs_grad is not None:
            self.call.needs_grad[0] = self.needs_grad

    def failed(self, error: BaseException) -> None:
        """The map has failed: others wait for messages of this process."""
        self.transport.abandoned.append(self)
        self.transport.fail(error)

    def link(self, member: int) -> Link:
        return self.groups.link(self.group.members[member])

    def send(self, member: int, head: bytes, data: Any) -> None:
        """Send a message. data: an array, or bytes."""
        link = self.link(member)
        link.place = self.place
        place = None
        if isinstance(data, bytes):
            text: bytes | None = data
            nbytes = len(data)
        else:
            nbytes = data.nbytes
            inline = type(data) is np.ndarray and len(head) + nbytes <= ROOM
            text = data.tobytes() if inline else None
            if not inline and len(head) + 8 <= ROOM and type(self.group) is Pair and type(data) is np.ndarray:
                place = link.offer(bytes_of(data))
        has_head, has_data = link.send(self.name, self.number, self.needs_grad, head, text, nbytes, place)
        if not has_head:
            self._send_data(link, np.frombuffer(head, np.uint8))
        if nbytes and not has_data:
            self._send_data(link, np.frombuffer(data, np.uint8) if isinstance(data, bytes) else bytes_of(data))

    def _send_data(self, link: Link, data: Any) -> None:
        self.kept.append(data)
        self.sending.append(link.send_data(data))

    def take(self, member: int, allocate: Callable[[Parcel], Any] | None = None) -> Arrived:
        """The next message of a member, whose data may still be under way: see `finish_receives`.

        allocate: gives memory for data that do not come in the packet, as contiguous bytes.
        """
        link = self.link(member)
        arrived = self._early(link)
        while arrived is None:
            if not link.unread and not self.groups.await_packet(link, self):
                arrived = self._early(link)
                continue
            link.unread = False
            parcel = link.parcel()
            if parcel.name == self.name:
                arrived = self._follow(link, parcel, allocate)
            else:
                if self._never_made(parcel):
                    raise self._mismatch(member)
                link.early.setdefault(parcel.name, []).append(self._follow(link, parcel, None))
        if arrived.requests:
            self.receiving.append(arrived.requests)
        if allocate is not None and arrived.parcel.data is None and not arrived.placed:
            self._to_device(arrived, allocate(arrived.parcel))
        self.needs_grad = self.needs_grad or arrived.parcel.needs_grad
        return arrived

    def _never_made(self, parcel: Parcel) -> bool:
        """Whether this process will make no collective to which a message of another one belongs: its turn is over."""
        both = is_in_order(parcel.number) and is_in_order(self.number)
        return both and parcel.number <= self.number and parcel.name not in self.groups.under_way

    def _to_device(self, arrived: Arrived, place: Any) -> None:
        """Data that came before their turn are on the host; those for a device go there."""
        if type(place) is not np.ndarray:
            self.finish_receives()
            place.set(arrived.data)
            arrived.data, arrived.placed = place, True

    def view(self, member: int, head: bytes, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """The block in the next message of a member, if it is small and has this head and shape: valid until the next
        message. Else None: then `take` gives the message."""
        link = self.link(member)
        if not link.early and not link.unread and self.groups.await_packet(link, self):
            if link.holds(self.name, self.number, head, prod(shape) * dtype.itemsize):
                return link.view(head, shape, dtype)
            link.unread = True
        return None

    def _early(self, link: Link) -> Arrived | None:
        """A message of this collective that has come before."""
        messages = link.early.get(self.name)
        if messages is None:
            return None
        arrived = messages.pop(0)
        if not messages:
            del link.early[self.name]
        return arrived

    def _follow(self, link: Link, parcel: Parcel, allocate: Callable[[Parcel], Any] | None) -> Arrived:
        """Start to receive what follows a packet."""
        head = parcel.head
        if head is None:
            buffer = pool.empty(parcel.head_nbytes, np.uint8)
            self.transport.arrive(link.receive_data(buffer), self.call, buffer)
            head = buffer.tobytes()
        if parcel.data is not None:
            return Arrived(parcel, head, np.frombuffer(parcel.data, np.uint8), False, [])
        data = pool.empty(parcel.nbytes, np.uint8) if allocate is None else allocate(parcel)
        if parcel.place is not None:
            link.read(parcel.place, data)
            return Arrived(parcel, head, data, allocate is not None, [])
        self.kept.append(data)
        return Arrived(parcel, head, data, allocate is not None, link.receive_data(data) if parcel.nbytes else [])

    def _mismatch(self, member: int) -> BaseException:
        return self.groups.mismatch_with(self.group.members[member], self.calls, self.call, self.number)

    def finish_receives(self) -> None:
        """Wait until the data of all messages that were taken are there."""
        for requests in self.receiving:
            self.transport.arrive(requests, self.call, self.kept)
        self.receiving = []
