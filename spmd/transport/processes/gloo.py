"""Workers that are processes of torch.distributed, such as torchrun starts: no MPI is needed.

Bytes move over gloo connections of this library's own, apart from the messages of the user's process groups, which need
not exist: of torch.distributed only the store is used, to connect. All movements are sends and receives between two
processes, straight from and into arrays: gloo's fastest. A tag tells the groups of workers apart.

A process waits inside gloo, which cannot be polled. Meanwhile a thread runs the `Watchdog`, and closes the connections
where a wait cannot end. After a failure all connect anew.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from spmd.errors import TransportError
from spmd.transport.call import Call, Shape
from spmd.transport.launcher import TorchWorld, leftovers, torch_world
from spmd.transport.processes.channel import Channel
from spmd.transport.processes.headers import Headers, digest
from spmd.transport.processes.hosts import address_of
from spmd.transport.processes.shared_files import SharedFile, created, job_name, namespace, opened, remove_abandoned
from spmd.transport.processes.status_board import StatusBoard
from spmd.transport.processes.transport import ProcessTransport, disconnected, start
from spmd.transport.processes.watchdog import LOOK_INTERVAL, Watchdog, status_board_of_job, time_limit

__all__ = ["TorchChannel", "TorchTransport"]

_TAGS = (1 << 31) - 1
_FOREVER = timedelta(days=3650)
_LEARN_INTERVAL = 1.0
"""Seconds between readings of the addresses of others, while a process waits for all."""
_CONNECT_TIMEOUT = timedelta(minutes=30)
"""For connecting, which takes milliseconds once all are here; only with SPMD_CHECK=0 it includes that wait."""
_FILE_TIMEOUT = timedelta(seconds=10)
"""For the file of the status board, which takes milliseconds to create: without it time limits still hold."""


def _tensor(x: np.ndarray) -> torch.Tensor:
    """Bytes as a tensor on the same memory. torch would warn of read-only ones, which are only ever sent."""
    if x.flags.writeable:
        return torch.from_numpy(x)
    return torch.frombuffer((ctypes.c_char * x.nbytes).from_address(x.ctypes.data), dtype=torch.uint8)


class Connections:
    """Connections of this process with all others."""

    def __init__(self, store: Any, rank: int, size: int):
        self.group: Any = dist.ProcessGroupGloo(store, rank, size, _CONNECT_TIMEOUT)
        self.channels: list[TorchChannel] = []
        """Kept alive: their posted receives write to their headers."""
        self.peers = [r for r in range(size) if r != rank]
        self.tag = digest("nothing ever comes here") % _TAGS

    def cut(self) -> None:
        """Close all connections, so that waits on them end, here and elsewhere: gloo does that where one receive times
        out."""
        for peer in self.peers:
            with suppress(RuntimeError):
                self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, self.tag).wait(timedelta(milliseconds=1))


class Posted(list):
    """Sends and receives under way, over some connections. closed: why not all of them could be posted."""

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


class TorchChannel(Channel):
    """Some processes, by their ranks, and the tag of their messages.

    Messages between two processes with one tag arrive in order. Empty blocks are not sent: the receiver knows their
    size. next: receives the headers of the next rendezvous, which may come while those of this one are read.
    """

    __slots__ = ("connections", "header_tag", "next", "posted_receive", "ranks", "tag", "tensors")

    def __init__(self, connections: Connections, ranks: Shape, me: int, key: int):
        super().__init__(me, len(ranks))
        self.connections, self.ranks = connections, ranks
        self.tag = digest("blocks", key) % _TAGS
        self.header_tag = digest("headers", key) % _TAGS
        self.posted_receive: Posted | None = None
        self.next = Headers.of(len(ranks))
        self.tensors = {
            id(h): torch.from_numpy(h.array.view(np.int64)) for h in (self.outgoing, self.incoming, self.next)
        }

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> Posted:
        posted, group = Posted(self.connections), self.connections.group
        for move, blocks in (group.recv, receives), (group.send, sends):
            for k, x in blocks.items():
                if x.size:
                    posted.post(move, _tensor(x), self.ranks[k], self.tag)
        return posted

    def swap(self, nbytes: int) -> Posted:
        """A receive for the next headers is always posted: gloo's sender waits until it knows of one."""
        posted = self.posted_receive or self._post_receive()
        self.incoming, self.next = self.next, self.incoming
        self._post(posted, self.connections.group.send, self.outgoing)
        self.posted_receive = self._post_receive()
        return posted

    def _post_receive(self) -> Posted:
        posted = Posted(self.connections)
        self._post(posted, self.connections.group.recv, self.next)
        return posted

    def _post(self, posted: Posted, move: Callable[..., Any], headers: Headers) -> None:
        for k in self.others:
            posted.post(move, self.tensors[id(headers)][k], self.ranks[k], self.header_tag)


class Closed(Exception):
    """gloo's connections were closed during a wait."""


class _Wait:
    """One wait: its thread, the requests, and the error that ends it."""

    __slots__ = ("error", "posted", "seen", "thread", "watchdog")

    def __init__(self, watchdog: Watchdog, posted: Posted):
        self.watchdog, self.posted = watchdog, posted
        self.thread = threading.current_thread()
        self.seen = False
        self.error: BaseException | None = None


class Watch:
    """The thread that runs the watchdog while threads of this process wait in gloo."""

    def __init__(self) -> None:
        self.waits: set[_Wait] = set()
        self.lock = threading.Lock()
        self.hears_signals = False
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.wake_reader.setblocking(False)
        self.wake_writer.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            # Python announces signals here; it cannot handle them while its main thread waits in gloo.
            before = signal.set_wakeup_fd(self.wake_writer.fileno(), warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
            else:
                self.hears_signals = True
        threading.Thread(target=self._look, name="spmd-watch", daemon=True).start()

    def wait(self, watchdog: Watchdog, posted: Posted) -> None:
        """Wait for requests. Raises what the watchdog finds, or Closed."""
        wait = _Wait(watchdog, posted)
        self.waits.add(wait)
        closed = posted.closed
        try:
            if not closed:
                for work in posted:
                    work.wait(_FOREVER)
        except RuntimeError as error:
            closed = str(error)
        finally:
            with self.lock:
                self.waits.discard(wait)
        if wait.error is not None:
            raise wait.error.with_traceback(None)
        if closed:
            raise Closed(closed)

    def _look(self) -> None:
        while True:
            interrupted = False
            if select.select([self.wake_reader], [], [], LOOK_INTERVAL)[0]:
                interrupted = signal.SIGINT in self.wake_reader.recv(4096)
            for wait in list(self.waits):
                if interrupted and self._hears(wait):
                    self._end(wait, KeyboardInterrupt())
                elif wait.seen:
                    try:
                        wait.watchdog.look(time.monotonic())
                    except BaseException as error:
                        self._end(wait, error)
                wait.seen = True

    @staticmethod
    def _hears(wait: _Wait) -> bool:
        """Whether Python would raise an interrupt in the thread of this wait."""
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return default and wait.thread is threading.main_thread()

    def _end(self, wait: _Wait, error: BaseException) -> None:
        with self.lock:
            if wait in self.waits and wait.error is None:
                wait.error = error
                wait.posted.connections.cut()


@cache
def _watch() -> Watch:
    return Watch()


class TorchTransport(ProcessTransport):
    """Processes of a world of torch.distributed, one worker each, in the order of their ranks.

    Making it sends nothing to the others; it asks the store of the world.
    """

    name = "torch"

    def __init__(self) -> None:
        self.connections: Connections | None = None
        self.old: list[Connections] = []
        self.header_tag: dict[int, int] = {}
        world, _ = _job()
        self.strangers = [r for r in range(world.size) if r != world.rank]
        self.learnt = 0.0
        super().__init__(world.rank, tuple(range(world.size)), _status_board)

    @classmethod
    def of(cls) -> TorchTransport:
        """The transport of all processes."""
        if cls not in _transports:
            _transports[cls] = cls()
        return _transports[cls]

    def connect(self) -> None:
        if self.connections is None:
            self.channel(tuple(range(self.size)), start("a map"))

    def open(self, members: Shape, call: Call) -> TorchChannel:
        connections = self.connections or self._connected(call)
        channel = TorchChannel(connections, members, members.index(self.local[0]), digest(members))
        connections.channels.append(channel)
        return channel

    def _connected(self, call: Call) -> Connections:
        """New connections, which all make together."""
        name = f"lines of {type(self).__name__} {self.failed}"
        connections: Connections = self.watched(lambda: _connect(name), call)
        # All have given up what was under way on the old connections.
        self.abandoned.clear()
        self.pending.clear()
        self.old.clear()
        self.connections = connections
        return connections

    def fail(self, error: BaseException) -> None:
        failures = self.failed
        super().fail(error)
        if self.failed != failures and self.connections is not None:
            self.old.append(self.connections)  # Closing them now might lose messages to others.
            self.connections = None

    def greet(self, others: Sequence[int], number: int, call: Call) -> None:
        self.header_tag[number] = count = self.header_tag.get(number, 0) + 1
        world, store = _job()
        name = f"{type(self).__name__} {number} {count}"
        # The second time says that all were there the first time: whoever comes when the others have given up finds
        # only what they said then.
        for stage in "here", "all here":
            store.set(f"{name} {world.rank} {stage}", stage)
            keys = [f"{name} {r} {stage}" for r in others]
            Watchdog(self, call).until(partial(store.check, keys), partial(self._learn, store, _LEARN_INTERVAL))
        self._learn(store)

    def _learn(self, store: Any, every: float = 0.0) -> None:
        """Read the addresses that other processes have put into the store. every: the least seconds between two
        readings."""
        status_board, now = self.status_board, time.monotonic()
        assert status_board is not None
        if now < self.learnt + every:
            return
        self.learnt = now
        for r in self.strangers[:]:
            key = f"address {r}"
            if store.check([key]):
                status_board.add_address(r, store.get(key))
                self.strangers.remove(r)

    @staticmethod
    def has_come(requests: list[Any]) -> bool:
        return not requests and not getattr(requests, "closed", "")

    def wait_for(self, requests: list[Any]) -> None:
        closed = getattr(requests, "closed", "")
        try:
            for work in requests:
                work.wait(_FOREVER)
        except RuntimeError as error:
            closed = str(error)
        if closed:
            raise disconnected(self.last, closed)

    def watch(self, requests: list[Any], call: Call | None) -> None:
        assert isinstance(requests, Posted)
        watchdog = Watchdog(self, call)
        try:
            _watch().wait(watchdog, requests)
            return
        except Closed as error:
            reason = str(error)
        # Another process has closed the connection, and may be about to publish why.
        watchdog.reason()
        raise disconnected(call, reason)


_transports: dict[type, TorchTransport] = {}


@cache
def _job() -> tuple[TorchWorld, Any]:
    """This process's place among all, and the store that they share: the user's, if torch.distributed is
    initialised."""
    world = torch_world()
    if world is None:
        raise TransportError.at(
            "spmd.Mesh",
            argument="transport",
            got='"torch", in a process that no launcher of torch.distributed has started',
            need="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, or an initialised "
            "torch.distributed",
            mend="torchrun --nproc-per-node 4 file.py",
        )
    try:
        if dist.is_initialized():
            store = _get_default_store()
        else:
            store = _store(world)
        return world, PrefixStore("spmd", store)
    except TransportError:
        raise
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise _unconnected(f"no store of torch.distributed: {error}") from error


def _store(world: TorchWorld) -> Any:
    """The store of a world that nobody has initialised. torchrun's is there before its processes. Without torchrun the
    variables may be left over from another job, whose other processes will never come."""
    seconds = time_limit() or _CONNECT_TIMEOUT.total_seconds()
    if world.launched:  # The host that has the store may have ended already.
        store = _store_within(world, max(seconds, _STORE_TIMEOUT_MIN))
        store.set_timeout(_CONNECT_TIMEOUT)
        return store
    notice = threading.Timer(_QUIET_SECONDS, _say_that_it_waits, (world,))
    notice.daemon = True
    notice.start()
    try:
        return _store_within(world, seconds)
    except RuntimeError as error:
        variables, names = leftovers("torch")
        raise TransportError.at(
            "spmd.Mesh",
            got=f"{variables} in the environment, as of a launcher of torch.distributed, and not all {world.size} "
            f"processes came together within {seconds:g} s ({str(error).partition(chr(10))[0]})",
            need="all processes of the job, started with such variables",
            mend=f'where they are left over from another job, "unset {names}", or Mesh(..., transport="local"), or '
            "SPMD_TRANSPORT=local; SPMD_TIMEOUT=600, or more seconds, where processes may come that late",
        ) from error
    finally:
        notice.cancel()


def _store_within(world: TorchWorld, seconds: float) -> Any:
    """The store that the variables of the environment name, within a time."""
    return next(iter(rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=seconds))))[0]


_STORE_TIMEOUT_MIN = 10.0
"""Seconds that torchrun's store has at least to answer, on a busy machine."""

_QUIET_SECONDS = 5.0
"""Seconds that a process waits for those that its environment speaks of before it says so."""


def _say_that_it_waits(world: TorchWorld) -> None:
    variables, names = leftovers("torch")
    print(
        f"spmd: rank {world.rank} waits for {world.size} processes of torch.distributed, because of {variables} in its "
        f'environment; where that is left over from another job, "unset {names}" or set SPMD_TRANSPORT=local',
        file=sys.stderr,
        flush=True,
    )


def _connect(name: str) -> Connections:
    """Connect with all others under this name."""
    world, store = _job()
    try:
        return Connections(PrefixStore(name, store), world.rank, world.size)
    except RuntimeError as error:
        raise _unconnected(str(error)) from error


def _status_board() -> StatusBoard | None:
    """The status board of this host, in a file that its first process names."""
    world, store = _job()

    def file(nbytes: int) -> SharedFile:
        key = f"board of {namespace()} {os.geteuid()}"
        if store.add(f"{key}, asked for", 1) == 1:
            return _create_file(store, key, nbytes)
        try:
            store.wait([key], _FILE_TIMEOUT)
            name = store.get(key).decode()
        except RuntimeError as error:
            raise TimeoutError(f"the first process of this host has named no file: {error}") from error
        if not name:
            raise FileNotFoundError("the first process of this host could make none")
        return opened(Path(name), nbytes)

    status_board = status_board_of_job(world.rank, world.size, file)
    store.set(f"address {world.rank}", address_of(status_board))
    return status_board


def _create_file(store: Any, key: str, nbytes: int) -> SharedFile:
    """Create a file, and put its name into the store; an empty name where that fails."""
    file: SharedFile | None = None
    try:
        remove_abandoned()
        file = created(job_name(os.getppid()), nbytes)
        return file
    finally:
        store.set(key, "" if file is None else str(file.path))


def _leave_to_the_parent() -> None:
    """A child of os.fork has its parent's connections, without the threads that serve them. They are never destroyed in
    it: that would wait for those threads, and close the connections of the parent too. Nor are its signals the
    parent's."""
    if _watch.cache_info().currsize and _watch().hears_signals:
        signal.set_wakeup_fd(-1)
        _watch().wake_reader.close()
        _watch().wake_writer.close()
    for transport in _transports.values():
        for connections in (transport.connections, *transport.old):
            if connections is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connections.group))


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _unconnected(reason: str) -> TransportError:
    return TransportError.at(
        "spmd.Mesh",
        argument="transport",
        got=f'"torch", and the processes cannot connect: {reason}',
        need="gloo's connections among all of them",
        mend="GLOO_SOCKET_IFNAME names the network interface to use",
    )
