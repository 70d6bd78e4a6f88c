"""What the processes of other hosts do, asked over TCP: the status board across hosts.

A board is memory of one host. Each process also listens at a port, where it tells whoever asks the rows of all
processes of its host. It learns the ports of others when they first meet. A process whose wait grows long asks one
process of each other host, and from then on sees their rows as those of its own host, as of a moment ago: errors with
their class and worker, circles of waits, who has left or died, and who makes progress.

Why a process asks, and is not told: nothing is sent, and no thread wakes, while collectives succeed. Why TCP, and not
messages of the engine: those of MPI and gloo arrive only while the receiver waits in the engine; a socket is served by
a thread of its own, also while the process computes. And the system closes the connections of a process that dies,
which tells its peers so. A host that falls silent (stopped, or cut off) closes nothing: silence is never taken for
death, and ends by the time limit.

Of each host one process is asked, another where it does not answer or is no more. To be refused counts as death only
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
from spmd.transport.processes.status_board import Board

__all__ = ["ADDRESS", "Hosts", "address_of"]

_ADDRESSES = 8
"""Network addresses of a process that others try."""
_RECORD = struct.Struct(f"!16s8s8sH{4 * _ADDRESSES}s")
ADDRESS = _RECORD.size
"""Bytes of what a process tells others of where it can be asked."""
_EVERY = 0.1
"""Seconds from question to question, and the age up to which an answer is given again."""
_AFTER = 1.0
"""Seconds that a process goes on asking after it was last looked at what comes."""
_QUIET = 1.0
"""Seconds after which another process of a host is asked."""
_FAREWELL = 0.5
"""Seconds that a process takes to tell those that ask it that it leaves."""
_MOST = 1 << 28
"""Bytes of an answer, at most: who says more is no process of this job."""
_HEAD = struct.Struct("!8sI")
_ROW = struct.Struct("!II?d")
_GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)


class _Address(NamedTuple):
    """Where a process can be asked. host: alike for those that share a board. knock: what it wants to hear first;
    answer: what its answers begin with. Other processes know neither."""

    host: bytes
    knock: bytes
    answer: bytes
    port: int
    places: tuple[str, ...]

    @classmethod
    def of(cls, record: bytes) -> _Address | None:
        host, knock, answer, port, packed = _RECORD.unpack(record)
        places = [packed[k : k + 4] for k in range(0, len(packed), 4)]
        return cls(host, knock, answer, port, tuple(socket.inet_ntoa(p) for p in places if any(p))) if port else None


def address_of(board: Board) -> bytes:
    """Where a process can be asked by those of other hosts."""
    return bytes(ADDRESS) if board.hosts is None else board.hosts.address


class _Row(dict):
    """The row of a process, by fields, without what is empty of them; and whether the process has died."""

    died = False

    @classmethod
    def of(cls, data: bytes, dtype: np.dtype) -> _Row:
        row = np.frombuffer(data, dtype)[0]
        fields = {name: row[name] for name in dtype.names or ()}
        return cls({name: x.tolist() if x.dtype.kind == "S" else x.copy() for name, x in fields.items()})


def _host_of(board: Board) -> bytes:
    """A name of this host, or of the part of it that shares a board: this process alone, where there is no file."""
    place = None if board.file is None else os.fstat(board.file.file)
    where = ("alone", os.getpid()) if place is None else (place.st_dev, place.st_ino)
    return hashlib.blake2b(repr((machine(), *where)).encode(), digest_size=16).digest()


def _network_addresses() -> list[bytes]:
    """This host's addresses by which others may reach it, of IPv4."""
    found = []
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                said = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found.append(said[20:24])
    if not found:
        with suppress(OSError):
            found = [socket.inet_aton(a) for a in socket.gethostbyname_ex(socket.gethostname())[2]]
    # The loopback serves processes of one machine that share no board, and comes last: it is one on each host.
    return sorted(dict.fromkeys(found), key=lambda a: a[0] == 127)[:_ADDRESSES]


class _Line:
    """A connection that no thread waits on: what is to be sent is kept until it can be."""

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
                came = self.sock.recv(1 << 20)
                if not came:
                    self.lost(errno.ECONNRESET)
                    return
                self.inbox += came
                self.read()
        except BlockingIOError:
            pass
        except OSError as error:
            self.lost(error.errno or 0)
        except (ValueError, zlib.error):  # what no process of this job would say
            self.lost(errno.EPROTO)

    def read(self) -> None:
        """Something has come."""

    def lost(self, reason: int) -> None:
        """The connection is no more, or has not come to be."""
        self.close()

    def close(self) -> None:
        with suppress(KeyError, ValueError):
            self.hosts.selector.unregister(self.sock)
        self.sock.close()


class _Asked(_Line):
    """The connection of a process that asks this one."""

    known = False

    def read(self) -> None:
        if not self.known:
            if len(self.inbox) < len(self.hosts.knock):
                return
            if not hmac.compare_digest(self.inbox[: len(self.hosts.knock)], self.hosts.knock):
                self.close()
                return
            del self.inbox[: len(self.hosts.knock)]
            self.known = True
            self.hosts.asked.add(self)
        if self.inbox:
            self.inbox.clear()
            if not self.outbox:  # Who is still being told asks again.
                self.send(self.hosts.report())

    def close(self) -> None:
        self.hosts.asked.discard(self)
        super().close()


class _Asking(_Line):
    """A connection to a process of another host, or one that is being tried."""

    def __init__(self, hosts: Hosts, host: _Host, rank: int, address: _Address, place: str):
        self.host, self.rank, self.answer = host, rank, address.answer
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect_ex((place, address.port))
        super().__init__(hosts, sock, address.knock + b"?")

    def read(self) -> None:
        while len(self.inbox) >= _HEAD.size:
            answer, nbytes = _HEAD.unpack_from(self.inbox)
            if answer != self.answer or nbytes > _MOST:
                self.lost(errno.EPROTO)
                return
            end = _HEAD.size + nbytes
            if len(self.inbox) < end:
                return
            said = zlib.decompress(bytes(self.inbox[_HEAD.size : end]))
            del self.inbox[:end]
            self.host.hear(self, said)

    def lost(self, reason: int) -> None:
        self.close()
        self.host.lose(self, reason)


class _Host:
    """Another host: its processes, as far as they are known, and the one that is asked.

    link: the connection to that one; trying: those that may become it. sent, pending: when it was asked last, and
    whether it has not answered yet. answered: since when at least all that was written there is known here. gone: those
    whose connections were closed, or refused after one of this host was reached.
    """

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self.addresses: dict[int, _Address] = {}
        self.link: _Asking | None = None
        self.trying: set[_Asking] = set()
        self.reached = self.pending = False
        self.sent = self.answered = 0.0
        self.gone: set[int] = set()
        self.turn = hosts.board.rank  # Those who ask choose different ones.

    def step(self, now: float) -> None:
        """Ask, if it is time to."""
        if self.pending and now - self.sent > _QUIET:
            self._next()
        if now - self.sent < _EVERY or self.pending:
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
                    self.trying.add(_Asking(self.hosts, self, rank, address, place))

    def _next(self) -> None:
        """Another process is asked from now on."""
        for line in (*self.trying, *filter(None, [self.link])):
            line.close()
        self.trying.clear()
        self.link, self.pending, self.turn = None, False, self.turn + 1

    def hear(self, line: _Asking, said: bytes) -> None:
        self.reached = True
        if line in self.trying:
            self.trying.discard(line)
            others, self.link, self.trying = self.trying, line, set()
            for other in others:
                other.close()
        self.pending = False
        self.answered = max(self.answered, self.sent - _EVERY)
        self.hosts.take(self, said)

    def lose(self, line: _Asking, reason: int) -> None:
        was_link = line is self.link
        self.trying.discard(line)
        if self.trying or not (was_link or self.link is None):
            return
        if was_link or (self.reached and reason in _GONE):
            self.gone.add(line.rank)
        self._next()


class Hosts:
    """The other hosts of a job, for the board of one process.

    address: what others must know to ask this process. rows: those of processes of other hosts, by rank.
    """

    def __init__(self, board: Board):
        self.board = board
        self.rows: dict[int, _Row] = {}
        self.hosts: dict[bytes, _Host] = {}
        self.host_of: dict[int, _Host] = {}
        self.asked: set[_Asked] = set()
        self.known: set[int] = set()
        self.new: deque[tuple[int, _Address]] = deque()
        self.until = self.made = 0.0
        self.said = b""
        self.active = self.closing = False
        self.host = _host_of(board)
        self.knock, self.answer = secrets.token_bytes(8), secrets.token_bytes(8)
        self.selector = selectors.DefaultSelector()
        self.server = socket.create_server(("", 0), backlog=128)
        self.server.setblocking(False)
        self.selector.register(self.server, selectors.EVENT_READ, self._accept)
        self.ear, self.mouth = socket.socketpair()
        self.ear.setblocking(False)
        self.mouth.setblocking(False)
        self.selector.register(self.ear, selectors.EVENT_READ, self._wake)
        port = self.server.getsockname()[1]
        places = b"".join(_network_addresses())
        self.address = _RECORD.pack(self.host, self.knock, self.answer, port, places)
        self.thread = threading.Thread(target=self._serve, name="spmd-hosts", daemon=True)
        self.thread.start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    # For the board

    def meet(self, rank: int, record: bytes) -> None:
        """A process of this job is asked there from now on, if it is on another host. One of each is asked once at
        once: whoever cannot be reached later has been reached before."""
        address = None if rank in self.known else _Address.of(record)
        self.known.add(rank)
        if address is not None and address.host != self.host:
            self.new.append((rank, address))
            self.ask()

    def ask(self) -> None:
        """Somebody waits, and looks at the rows: they are asked for, from now on for a moment."""
        self.until = time.monotonic() + _AFTER
        if not self.active:
            with suppress(OSError):
                self.mouth.send(b"!")

    def fresh(self, ranks: Iterable[int], since: float) -> bool:
        """Whether what is known of processes is later than a moment, or is the last that there was."""
        hosts = {id(h): h for h in (self.host_of.get(r) for r in ranks) if h is not None}.values()
        return all(h.answered > since or h.addresses.keys() <= h.gone for h in hosts)

    def silent(self, rank: int) -> bool:
        """Whether nobody answers for a process."""
        host = self.host_of.get(rank)
        return host is not None and time.monotonic() - host.answered > _QUIET + 2 * _EVERY + _AFTER

    def has_died(self, rank: int) -> bool:
        host, row = self.host_of.get(rank), self.rows.get(rank)
        return (host is not None and rank in host.gone) or (row is not None and row.died)

    def close(self) -> None:
        """This process leaves: those that ask it are told so, and others do not wait for its answers."""
        if not self.thread.is_alive():  # in a child of os.fork
            return
        self.closing = True
        with suppress(OSError):
            self.mouth.send(b"!")
        self.thread.join(2 * _FAREWELL)

    # The thread

    def _serve(self) -> None:
        while not self.closing:
            self.active = time.monotonic() < self.until
            for key, events in self.selector.select(_EVERY / 2 if self.active else None):
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
            _Asked(self, sock)

    def _wake(self, events: int) -> None:
        with suppress(OSError):
            self.ear.recv(4096)

    def report(self) -> bytes:
        """The rows of this host, as they are or were a moment ago."""
        now = time.monotonic()
        if now - self.made > _EVERY:
            board = self.board
            board.tell()
            rows = []
            for rank in filter(board.here, range(board.size)):
                row = board.rows[rank].tobytes()
                rows += [_ROW.pack(rank, len(row), board.has_died(rank), board.worked(rank)), row]
            said = zlib.compress(b"".join(rows), 1)
            self.said, self.made = _HEAD.pack(self.answer, len(said)) + said, now
        return self.said

    def take(self, host: _Host, said: bytes) -> None:
        """Rows of a host have come."""
        dtype, place = self.board.rows.dtype, 0
        while place + _ROW.size <= len(said):
            rank, nbytes, died, worked = _ROW.unpack_from(said, place)
            place += _ROW.size + nbytes
            if nbytes != dtype.itemsize or not rank < self.board.size or place > len(said):
                return
            row = _Row.of(said[place - nbytes : place], dtype)
            row.died, row["cpu"] = died, worked
            self.rows[rank] = row
            self.host_of[rank] = host
            # Its fellows know better why its connection was closed.
            (host.gone.add if died else host.gone.discard)(rank)

    def _take_leave(self) -> None:
        self.made = 0.0
        last = self.report() if self.asked else b""
        for line in list(self.asked):
            line.send(last)
        until = time.monotonic() + _FAREWELL
        while any(line.outbox for line in self.asked) and time.monotonic() < until:
            for key, events in self.selector.select(0.05):
                if key.fileobj is not self.server:
                    key.data(events)
        self._forget()

    def _forget(self) -> None:
        """Close everything: also in a child of os.fork, where a copy would keep the parent's connections open."""
        for key in list((self.selector.get_map() or {}).values()):  # None where it is closed already
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.mouth.close()
        self.selector.close()
