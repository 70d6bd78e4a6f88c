"""The status board across hosts: processes ask those of other hosts for their rows, over TCP.

A status board is memory of one host. Each process also listens at a port, where it sends the rows of all processes of
its host to whoever asks. Processes learn each other's ports when they first meet. A process whose wait grows long asks
one process of each other host for its rows, and reads them like those of its own host, slightly out of date.

Processes ask, and are not notified: while collectives succeed, nothing is sent and no thread wakes. They use TCP, not
messages of the engine: MPI and gloo deliver only while the receiver waits in them, but a socket has its own thread. The
system closes the connections of a process that dies, so its peers learn of it. A host that is stopped or cut off closes
nothing: silence never counts as death, and such a wait ends by the time limit.

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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from spmd.transport.processes.shared_files import machine
from spmd.transport.processes.status_board import StatusBoard

__all__ = ["ADDRESS", "Hosts", "address_of", "of_each_host"]

_ADDRESSES = 8
"""The most network addresses of a process."""
_RECORD = struct.Struct(f"!16s8s8sH{4 * _ADDRESSES}s")
ADDRESS = _RECORD.size
"""Bytes of the address of a process."""
_POLL_INTERVAL = 0.1
"""Seconds between requests; a report that is no older is sent again."""
_POLL_SECONDS = 1.0
"""Seconds for which a process goes on asking after the last `poll`."""
_REPLY_TIMEOUT = 1.0
"""Seconds after which another process of a host is asked."""
_LEAVE_TIMEOUT = 0.5
"""Seconds that a process takes to send its last reports."""
_REPLY_MAX = 1 << 28
"""The most bytes of a reply."""
_REPLY_HEADER = struct.Struct("!8sI")
_ROW_HEADER = struct.Struct("!II?d")
_CLOSED_ERRNOS = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)


class _Address(NamedTuple):
    """Where a process can be asked. host: the same for processes that share a status board. request_token: the first
    bytes of a request; reply_token: those of a reply. Only processes of the job know them."""

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


def of_each_host(addresses: Mapping[int, np.ndarray], count: int) -> dict[int, np.ndarray]:
    """At most so many of these addresses, by rank, of each host."""
    left: dict[bytes, int] = {}
    chosen = {}
    for rank, address in addresses.items():
        host = address[:16].tobytes()
        left[host] = left.get(host, count) - 1
        if left[host] >= 0:
            chosen[rank] = address
    return chosen


class _Row(dict):
    """The row of a process, by fields, and whether the process has died."""

    died = False

    @classmethod
    def of(cls, data: bytes, dtype: np.dtype) -> _Row:
        row = np.frombuffer(data, dtype)[0]
        fields = {name: row[name] for name in dtype.names or ()}
        return cls({name: x.tolist() if x.dtype.kind == "S" else x.copy() for name, x in fields.items()})


def host_of(status_board: StatusBoard) -> bytes:
    """A name of the processes that share this status board; without a file, of this process alone."""
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
        except (ValueError, zlib.error):  # data that no process of this job sends
            self.lost(errno.EPROTO)

    def read(self) -> None:
        """Handle the data in the inbox."""

    def lost(self, reason: int) -> None:
        """The connection was closed, or could not be opened."""
        self.close()

    def close(self) -> None:
        with suppress(KeyError, ValueError):
            self.hosts.selector.unregister(self.sock)
        self.sock.close()


class _ServerConnection(_Connection):
    """The connection of a process that asks this one."""

    authenticated = False

    def read(self) -> None:
        if not self.authenticated:
            if len(self.inbox) < len(self.hosts.request_token):
                return
            if not hmac.compare_digest(self.inbox[: len(self.hosts.request_token)], self.hosts.request_token):
                self.close()
                return
            del self.inbox[: len(self.hosts.request_token)]
            self.authenticated = True
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
        while len(self.inbox) >= _REPLY_HEADER.size:
            reply_token, nbytes = _REPLY_HEADER.unpack_from(self.inbox)
            if reply_token != self.reply_token or nbytes > _REPLY_MAX:
                self.lost(errno.EPROTO)
                return
            end = _REPLY_HEADER.size + nbytes
            if len(self.inbox) < end:
                return
            rows = zlib.decompress(bytes(self.inbox[_REPLY_HEADER.size : end]))
            del self.inbox[:end]
            self.host.receive_rows(self, rows)

    def lost(self, reason: int) -> None:
        self.close()
        self.host.connection_lost(self, reason)


class _Host:
    """Another host: its processes, and the one that is asked.

    link: the connection to that one; attempts: connections to it that are not established yet. asked_at: when it was
    last asked; pending: whether its reply is due. fresh_until: rows of this host as of this time, or later, have come.
    next_choice: selects the process that is asked. reached: whether any has replied. lost_ranks: processes whose
    connections were closed, or refused after one of this host was reached.
    """

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self.addresses: dict[int, _Address] = {}
        self.link: _ClientConnection | None = None
        self.attempts: set[_ClientConnection] = set()
        self.reached = self.pending = False
        self.asked_at = self.fresh_until = 0.0
        self.lost_ranks: set[int] = set()
        self.next_choice = hosts.status_board.rank  # so that processes ask different ones

    def step(self, now: float) -> None:
        """Send a request, if one is due."""
        if self.pending and now - self.asked_at > _REPLY_TIMEOUT:
            self._choose_next()
        if now - self.asked_at < _POLL_INTERVAL or self.pending:
            return
        self.asked_at = now
        if self.link is not None:
            self.pending = True
            self.link.send(b"?")
            return
        left = sorted(self.addresses.keys() - self.lost_ranks)
        if left:
            self.pending = True
            rank = left[self.next_choice % len(left)]
            address = self.addresses[rank]
            for place in address.places:
                with suppress(OSError):  # no socket is left, or there is no way to that network
                    self.attempts.add(_ClientConnection(self.hosts, self, rank, address, place))

    def _choose_next(self) -> None:
        """Choose another process to ask."""
        for connection in (*self.attempts, *filter(None, [self.link])):
            connection.close()
        self.attempts.clear()
        self.link, self.pending, self.next_choice = None, False, self.next_choice + 1

    def receive_rows(self, connection: _ClientConnection, rows: bytes) -> None:
        self.reached = True
        if connection in self.attempts:
            self.attempts.discard(connection)
            others, self.link, self.attempts = self.attempts, connection, set()
            for other in others:
                other.close()
        self.pending = False
        self.fresh_until = max(self.fresh_until, self.asked_at - _POLL_INTERVAL)
        self.hosts.update_rows(self, rows)

    def connection_lost(self, connection: _ClientConnection, reason: int) -> None:
        was_link = connection is self.link
        self.attempts.discard(connection)
        if self.attempts or not (was_link or self.link is None):
            return
        if was_link or (self.reached and reason in _CLOSED_ERRNOS):
            self.lost_ranks.add(connection.rank)
        self._choose_next()


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
        self.learnt_ranks: set[int] = set()
        self.new_addresses: deque[tuple[int, _Address]] = deque()
        self.poll_end = self.report_time = 0.0
        self.last_report = b""
        self.active = self.closing = False
        self.host = host_of(status_board)
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
        os.register_at_fork(after_in_child=self._close_all)

    def add_address(self, rank: int, record: bytes) -> None:
        """Add the address of a process, if it is on another host, and ask it at once: only a host that was reached can
        later be found dead."""
        address = None if rank in self.learnt_ranks else _Address.of(record)
        self.learnt_ranks.add(rank)
        if address is not None and address.host != self.host:
            self.new_addresses.append((rank, address))
            self.poll()

    def poll(self) -> None:
        """Ask for rows for the next `_POLL_SECONDS`."""
        self.poll_end = time.monotonic() + _POLL_SECONDS
        if not self.active:
            with suppress(OSError):
                self.wake_writer.send(b"!")

    def is_fresh(self, ranks: Iterable[int], since: float) -> bool:
        """Whether the rows of these processes are newer than `since`, or their last."""
        hosts = {id(h): h for h in (self.host_of.get(r) for r in ranks) if h is not None}.values()
        return all(h.fresh_until > since or h.addresses.keys() <= h.lost_ranks for h in hosts)

    def silent(self, rank: int) -> bool:
        """Whether the host of a process has stopped answering."""
        host = self.host_of.get(rank)
        limit = _REPLY_TIMEOUT + 2 * _POLL_INTERVAL + _POLL_SECONDS
        return host is not None and time.monotonic() - host.fresh_until > limit

    def has_died(self, rank: int) -> bool:
        host, row = self.host_of.get(rank), self.rows.get(rank)
        return (host is not None and rank in host.lost_ranks) or (row is not None and row.died)

    def close(self) -> None:
        """This process leaves: send a last report to its clients."""
        if not self.thread.is_alive():  # in a child of os.fork
            return
        self.closing = True
        with suppress(OSError):
            self.wake_writer.send(b"!")
        self.thread.join(2 * _LEAVE_TIMEOUT)

    def _serve(self) -> None:
        while not self.closing:
            self.active = time.monotonic() < self.poll_end
            for key, events in self.selector.select(_POLL_INTERVAL / 2 if self.active else None):
                key.data(events)
            self._learn()
            now = time.monotonic()
            if now < self.poll_end:
                for host in list(self.hosts.values()):
                    host.step(now)
        self._send_last_reports()

    def _learn(self) -> None:
        while self.new_addresses:
            rank, address = self.new_addresses.popleft()
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
        if now - self.report_time > _POLL_INTERVAL:
            status_board = self.status_board
            status_board.publish()
            rows = []
            for rank in status_board.local_ranks():
                row = status_board.local_row(rank).tobytes()
                died, worked = status_board.has_died(rank), status_board.cpu_seconds(rank)
                rows += [_ROW_HEADER.pack(rank, len(row), died, worked), row]
            packed = zlib.compress(b"".join(rows), 1)
            self.last_report, self.report_time = _REPLY_HEADER.pack(self.reply_token, len(packed)) + packed, now
        return self.last_report

    def update_rows(self, host: _Host, data: bytes) -> None:
        """Store rows that a host has sent."""
        dtype, place = self.status_board.rows.dtype, 0
        while place + _ROW_HEADER.size <= len(data):
            rank, nbytes, died, worked = _ROW_HEADER.unpack_from(data, place)
            place += _ROW_HEADER.size + nbytes
            if nbytes != dtype.itemsize or not rank < self.status_board.size or place > len(data):
                return
            row = _Row.of(data[place - nbytes : place], dtype)
            row.died, row["cpu"] = died, worked
            self.rows[rank] = row
            self.host_of[rank] = host
            # The other processes of its host know whether it has died.
            (host.lost_ranks.add if died else host.lost_ranks.discard)(rank)

    def _send_last_reports(self) -> None:
        self.report_time = 0.0
        last = self.report() if self.clients else b""
        for connection in list(self.clients):
            connection.send(last)
        until = time.monotonic() + _LEAVE_TIMEOUT
        while any(connection.outbox for connection in self.clients) and time.monotonic() < until:
            for key, events in self.selector.select(0.05):
                if key.fileobj is not self.server:
                    key.data(events)
        self._close_all()

    def _close_all(self) -> None:
        """Close all sockets; also in a child of os.fork, which would keep the parent's connections open."""
        for key in list((self.selector.get_map() or {}).values()):  # None where it is closed already
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.wake_writer.close()
        self.selector.close()
