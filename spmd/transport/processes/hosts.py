"""The status board across hosts: what the processes of other hosts do, asked over TCP.

A status board is memory of one host. Each process also listens at a port, where it sends the rows of all processes of
its host to whoever asks. Processes learn each other's ports when they first meet. A process whose wait grows long asks
one process of each other host, and then sees their rows like those of its own host, a moment old.

Processes ask, and are not notified: while collectives succeed nothing is sent, and no thread wakes. They use TCP, and
not messages of the engine, because MPI and gloo deliver only while the receiver waits in them; a socket has a thread of
its own. The system closes the connections of a process that dies, so its peers learn that. A host that is stopped or
cut off closes nothing: silence never counts as death, and ends by the time limit.

If the process that is asked does not answer, another of its host is asked. A refused connection counts as death only
where a process of that host was reached before: a firewall refuses, too.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from spmd.transport.processes.shared_files import machine
from spmd.transport.processes.status_board import StatusBoard

__all__ = ["ADDRESS", "Hosts", "address_of"]

_ADDRESSES = 8
"""Network addresses of a process, at most."""
_RECORD = struct.Struct(f"!16s8s8sH{4 * _ADDRESSES}s")
ADDRESS = _RECORD.size
"""Bytes of the address of a process."""
_POLL_INTERVAL = 0.1
"""Seconds between requests, and the age up to which a report is sent again."""
_POLL_SECONDS = 1.0
"""Seconds that a process goes on asking after the last `poll`."""
_REPLY_TIMEOUT = 1.0
"""Seconds after which another process of a host is asked."""
_LEAVE_TIMEOUT = 0.5
"""Seconds that a process takes to send its last reports."""
_REPLY_MAX = 1 << 28
"""Bytes of a reply, at most."""
_HEAD = struct.Struct("!8sI")
_ROW = struct.Struct("!II?d")
_CLOSED_ERRNOS = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)


class _Address(NamedTuple):
    """Where a process can be asked. host: alike for those that share a status board. request_token: what a request
    begins with; reply_token: what replies begin with. Only processes of the job know them."""

    host: bytes
    request_token: bytes
    reply_token: bytes
    port: int
    places: tuple[str, ...]

    @classmethod
    def of(cls, record: bytes) -> _Address | None:
        host, request_token, reply_token, port, packed = _RECORD.unpack(record)
        places = [packed[k : k + 4] for k in range(0, len(packed), 4)]
        return (
            cls(host, request_token, reply_token, port, tuple(socket.inet_ntoa(p) for p in places if any(p)))
            if port
            else None
        )


def address_of(status_board: StatusBoard) -> bytes:
    """The address at which processes of other hosts can ask this one."""
    return bytes(ADDRESS) if status_board.hosts is None else status_board.hosts.address


class _Row(dict):
    """The row of a process, by fields, and whether the process has died."""

    died = False

    @classmethod
    def of(cls, data: bytes, dtype: np.dtype) -> _Row:
        row = np.frombuffer(data, dtype)[0]
        fields = {name: row[name] for name in dtype.names or ()}
        return cls({name: x.tolist() if x.dtype.kind == "S" else x.copy() for name, x in fields.items()})


def _host_of(status_board: StatusBoard) -> bytes:
    """A name of the processes that share this status board: this one alone, where there is no file."""
    place = None if status_board.file is None else os.fstat(status_board.file.file)
    where = ("alone", os.getpid()) if place is None else (place.st_dev, place.st_ino)
    return hashlib.blake2b(repr((machine(), *where)).encode(), digest_size=16).digest()


def _network_addresses() -> list[bytes]:
    """The IPv4 addresses of this host."""
    addresses = []
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                addresses.append(reply[20:24])
    if not addresses:
        with suppress(OSError):
            addresses = [socket.inet_aton(a) for a in socket.gethostbyname_ex(socket.gethostname())[2]]
    # The loopback, for processes of one machine that share no status board, comes last: every host has it.
    return sorted(dict.fromkeys(addresses), key=lambda a: a[0] == 127)[:_ADDRESSES]


class _Connection:
    """A non-blocking connection: data that cannot be sent yet is kept."""

    def __init__(self, hosts: Hosts, sock: socket.socket, outbox: bytes = b""):
        self.hosts, self.sock, self.outbox, self.inbox = hosts, sock, bytearray(outbox), bytearray()
        sock.setblocking(False)
        hosts.selector.register(sock, self._events(), self.ready)

    def _events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outbox else 0)

    def send(self, data: bytes) -> None:
        self.outbox += data
        self.hosts.selector.modify(self.sock, self._events(), self.ready)

    def ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE and self.outbox:
                del self.outbox[: self.sock.send(self.outbox)]
                self.hosts.selector.modify(self.sock, self._events(), self.ready)
            if events & selectors.EVENT_READ:
                data = self.sock.recv(1 << 20)
                if not data:
                    self.lost(errno.ECONNRESET)
                    return
                self.inbox += data
                self.read()
        except BlockingIOError:
            pass
        except OSError as error:
            self.lost(error.errno or 0)
        except (ValueError, zlib.error):  # what no process of this job would say
            self.lost(errno.EPROTO)

    def read(self) -> None:
        """Handle the data in the inbox."""

    def lost(self, reason: int) -> None:
        """The connection is no more, or has not come to be."""
        self.close()

    def close(self) -> None:
        with suppress(KeyError, ValueError):
            self.hosts.selector.unregister(self.sock)
        self.sock.close()


class _ServerConnection(_Connection):
    """The connection of a process that asks this one."""

    known = False

    def read(self) -> None:
        if not self.known:
            if len(self.inbox) < len(self.hosts.request_token):
                return
            if not hmac.compare_digest(self.inbox[: len(self.hosts.request_token)], self.hosts.request_token):
                self.close()
                return
            del self.inbox[: len(self.hosts.request_token)]
            self.known = True
            self.hosts.clients.add(self)
        if self.inbox:
            self.inbox.clear()
            if not self.outbox:  # else a reply is under way
                self.send(self.hosts.report())

    def close(self) -> None:
        self.hosts.clients.discard(self)
        super().close()


class _ClientConnection(_Connection):
    """A connection to a process of another host, or an attempt at one."""

    def __init__(self, hosts: Hosts, host: _Host, rank: int, address: _Address, place: str):
        self.host, self.rank, self.reply_token = host, rank, address.reply_token
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect_ex((place, address.port))
        super().__init__(hosts, sock, address.request_token + b"?")

    def read(self) -> None:
        while len(self.inbox) >= _HEAD.size:
            reply_token, nbytes = _HEAD.unpack_from(self.inbox)
            if reply_token != self.reply_token or nbytes > _REPLY_MAX:
                self.lost(errno.EPROTO)
                return
            end = _HEAD.size + nbytes
            if len(self.inbox) < end:
                return
            rows = zlib.decompress(bytes(self.inbox[_HEAD.size : end]))
            del self.inbox[:end]
            self.host.hear(self, rows)

    def lost(self, reason: int) -> None:
        self.close()
        self.host.lose(self, reason)


class _Host:
    """Another host: its processes, and the one that is asked.

    link: the connection to that one; trying: attempts at it. sent, pending: when it was last asked, and whether the
    answer is due. answered: a time before which all that was written there is known here. gone: processes whose
    connections were closed, or refused after one of this host was reached.
    """

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self.addresses: dict[int, _Address] = {}
        self.link: _ClientConnection | None = None
        self.trying: set[_ClientConnection] = set()
        self.reached = self.pending = False
        self.sent = self.answered = 0.0
        self.gone: set[int] = set()
        self.turn = hosts.status_board.rank  # so that processes ask different ones

    def step(self, now: float) -> None:
        """Ask, if it is time to."""
        if self.pending and now - self.sent > _REPLY_TIMEOUT:
            self._next()
        if now - self.sent < _POLL_INTERVAL or self.pending:
            return
        self.sent = now
        if self.link is not None:
            self.pending = True
            self.link.send(b"?")
            return
        left = sorted(self.addresses.keys() - self.gone)
        if left:
            self.pending = True
            rank = left[self.turn % len(left)]
            address = self.addresses[rank]
            for place in address.places:
                with suppress(OSError):  # no socket is left, or there is no way to that network
                    self.trying.add(_ClientConnection(self.hosts, self, rank, address, place))

    def _next(self) -> None:
        """Ask another process from now on."""
        for connection in (*self.trying, *filter(None, [self.link])):
            connection.close()
        self.trying.clear()
        self.link, self.pending, self.turn = None, False, self.turn + 1

    def hear(self, connection: _ClientConnection, rows: bytes) -> None:
        self.reached = True
        if connection in self.trying:
            self.trying.discard(connection)
            others, self.link, self.trying = self.trying, connection, set()
            for other in others:
                other.close()
        self.pending = False
        self.answered = max(self.answered, self.sent - _POLL_INTERVAL)
        self.hosts.update_rows(self, rows)

    def lose(self, connection: _ClientConnection, reason: int) -> None:
        was_link = connection is self.link
        self.trying.discard(connection)
        if self.trying or not (was_link or self.link is None):
            return
        if was_link or (self.reached and reason in _CLOSED_ERRNOS):
            self.gone.add(connection.rank)
        self._next()


class Hosts:
    """The other hosts of a job, for the status board of one process.

    address: at which others ask this process. rows: those of processes of other hosts, by rank.
    """

    def __init__(self, status_board: StatusBoard):
        self.status_board = status_board
        self.rows: dict[int, _Row] = {}
        self.hosts: dict[bytes, _Host] = {}
        self.host_of: dict[int, _Host] = {}
        self.clients: set[_ServerConnection] = set()
        self.known: set[int] = set()
        self.new: deque[tuple[int, _Address]] = deque()
        self.until = self.made = 0.0
        self.reply = b""
        self.active = self.closing = False
        self.host = _host_of(status_board)
        self.request_token, self.reply_token = secrets.token_bytes(8), secrets.token_bytes(8)
        self.selector = selectors.DefaultSelector()
        self.server = socket.create_server(("", 0), backlog=128)
        self.server.setblocking(False)
        self.selector.register(self.server, selectors.EVENT_READ, self._accept)
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.wake_reader.setblocking(False)
        self.wake_writer.setblocking(False)
        self.selector.register(self.wake_reader, selectors.EVENT_READ, self._wake)
        port = self.server.getsockname()[1]
        places = b"".join(_network_addresses())
        self.address = _RECORD.pack(self.host, self.request_token, self.reply_token, port, places)
        self.thread = threading.Thread(target=self._serve, name="spmd-hosts", daemon=True)
        self.thread.start()
        os.register_at_fork(after_in_child=self._forget)

    def add_address(self, rank: int, record: bytes) -> None:
        """Add the address of a process, if it is on another host, and ask it once at once: only hosts that were reached
        before can be found dead."""
        address = None if rank in self.known else _Address.of(record)
        self.known.add(rank)
        if address is not None and address.host != self.host:
            self.new.append((rank, address))
            self.poll()

    def poll(self) -> None:
        """Ask for rows from now on, for a moment."""
        self.until = time.monotonic() + _POLL_SECONDS
        if not self.active:
            with suppress(OSError):
                self.wake_writer.send(b"!")

    def is_fresh(self, ranks: Iterable[int], since: float) -> bool:
        """Whether the rows of these processes are newer than `since`, or the last there will be."""
        hosts = {id(h): h for h in (self.host_of.get(r) for r in ranks) if h is not None}.values()
        return all(h.answered > since or h.addresses.keys() <= h.gone for h in hosts)

    def silent(self, rank: int) -> bool:
        """Whether the host of a process has stopped answering."""
        host = self.host_of.get(rank)
        return (
            host is not None and time.monotonic() - host.answered > _REPLY_TIMEOUT + 2 * _POLL_INTERVAL + _POLL_SECONDS
        )

    def has_died(self, rank: int) -> bool:
        host, row = self.host_of.get(rank), self.rows.get(rank)
        return (host is not None and rank in host.gone) or (row is not None and row.died)

    def close(self) -> None:
        """This process leaves: send a last report to those that ask it."""
        if not self.thread.is_alive():  # in a child of os.fork
            return
        self.closing = True
        with suppress(OSError):
            self.wake_writer.send(b"!")
        self.thread.join(2 * _LEAVE_TIMEOUT)

    def _serve(self) -> None:
        while not self.closing:
            self.active = time.monotonic() < self.until
            for key, events in self.selector.select(_POLL_INTERVAL / 2 if self.active else None):
                key.data(events)
            self._learn()
            now = time.monotonic()
            if now < self.until:
                for host in list(self.hosts.values()):
                    host.step(now)
        self._take_leave()

    def _learn(self) -> None:
        while self.new:
            rank, address = self.new.popleft()
            host = self.hosts.get(address.host) or self.hosts.setdefault(address.host, _Host(self))
            host.addresses[rank] = address
            self.host_of[rank] = host

    def _accept(self, events: int) -> None:
        with suppress(OSError):
            sock, _ = self.server.accept()
            _ServerConnection(self, sock)

    def _wake(self, events: int) -> None:
        with suppress(OSError):
            self.wake_reader.recv(4096)

    def report(self) -> bytes:
        """The rows of this host, at most `_POLL_INTERVAL` seconds old."""
        now = time.monotonic()
        if now - self.made > _POLL_INTERVAL:
            status_board = self.status_board
            status_board.publish()
            rows = []
            for rank in filter(status_board.is_local, range(status_board.size)):
                row = status_board.rows[rank].tobytes()
                rows += [_ROW.pack(rank, len(row), status_board.has_died(rank), status_board.cpu_seconds(rank)), row]
            packed = zlib.compress(b"".join(rows), 1)
            self.reply, self.made = _HEAD.pack(self.reply_token, len(packed)) + packed, now
        return self.reply

    def update_rows(self, host: _Host, data: bytes) -> None:
        """Rows of a host have come."""
        dtype, place = self.status_board.rows.dtype, 0
        while place + _ROW.size <= len(data):
            rank, nbytes, died, worked = _ROW.unpack_from(data, place)
            place += _ROW.size + nbytes
            if nbytes != dtype.itemsize or not rank < self.status_board.size or place > len(data):
                return
            row = _Row.of(data[place - nbytes : place], dtype)
            row.died, row["cpu"] = died, worked
            self.rows[rank] = row
            self.host_of[rank] = host
            # Others of its host know better why its connection was closed.
            (host.gone.add if died else host.gone.discard)(rank)

    def _take_leave(self) -> None:
        self.made = 0.0
        last = self.report() if self.clients else b""
        for connection in list(self.clients):
            connection.send(last)
        until = time.monotonic() + _LEAVE_TIMEOUT
        while any(connection.outbox for connection in self.clients) and time.monotonic() < until:
            for key, events in self.selector.select(0.05):
                if key.fileobj is not self.server:
                    key.data(events)
        self._forget()

    def _forget(self) -> None:
        """Close everything; also in a child of os.fork, which would keep the parent's connections open."""
        for key in list((self.selector.get_map() or {}).values()):  # None where it is closed already
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.wake_writer.close()
        self.selector.close()
