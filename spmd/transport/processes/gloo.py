"""Workers that are processes of torch.distributed, as torchrun starts them. No MPI is needed.

Bytes move over gloo connections of this library (`gloo_channel.py`), separate from those of the user's process groups,
which need not exist. Of torch.distributed only the store is used, to connect.

A process waits inside gloo, which cannot be polled. Meanwhile a thread runs the `Watchdog`, and closes the connections
if a wait cannot end. After a failure all processes connect anew.
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
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from spmd.errors import TransportError
from spmd.transport.call import Call, Shape
from spmd.transport.launcher import TorchWorld, leftovers, torch_world
from spmd.transport.processes.gloo_channel import CONNECT_TIMEOUT, Connections, GlooChannel, Posted
from spmd.transport.processes.headers import digest
from spmd.transport.processes.hosts import address_of
from spmd.transport.processes.shared_files import SharedFile, created, job_name, namespace, opened, remove_abandoned
from spmd.transport.processes.status_board import StatusBoard
from spmd.transport.processes.transport import ProcessTransport, disconnected, start
from spmd.transport.processes.watchdog import LOOK_INTERVAL, Watchdog, status_board_of_job, time_limit

__all__ = ["GlooChannel", "GlooTransport"]

_FOREVER = timedelta(days=3650)
_LOOKUP_INTERVAL = 1.0
"""Seconds between lookups of the addresses of others, while a process waits for all of them."""
_FILE_TIMEOUT = timedelta(seconds=10)
"""For the file of the status board, which takes milliseconds to create. Without it, time limits still hold."""


class Closed(Exception):
    """gloo's connections were closed during a wait."""


class _Wait:
    """One wait: its watchdog, thread and requests, and the error that ends it.

    seen: whether the watchdog thread has passed it once: short waits are not looked at.
    """

    __slots__ = ("error", "posted", "seen", "thread", "watchdog")

    def __init__(self, watchdog: Watchdog, posted: Posted):
        self.watchdog, self.posted = watchdog, posted
        self.thread = threading.current_thread()
        self.seen = False
        self.error: BaseException | None = None


class WatchdogThread:
    """The thread that runs the watchdog while threads of this process wait in gloo."""

    def __init__(self) -> None:
        self.waits: set[_Wait] = set()
        self.lock = threading.Lock()
        self.receives_signals = False
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.wake_reader.setblocking(False)
        self.wake_writer.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            # Python writes signals to this socket; it cannot handle them while its main thread waits in gloo.
            before = signal.set_wakeup_fd(self.wake_writer.fileno(), warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
            else:
                self.receives_signals = True
        threading.Thread(target=self._run, name="spmd-watchdog", daemon=True).start()

    def wait(self, watchdog: Watchdog, posted: Posted) -> None:
        """Wait for requests. Raises what `Watchdog.look` raises, or Closed."""
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

    def _run(self) -> None:
        while True:
            interrupted = False
            if select.select([self.wake_reader], [], [], LOOK_INTERVAL)[0]:
                interrupted = signal.SIGINT in self.wake_reader.recv(4096)
            for wait in list(self.waits):
                if interrupted and self._takes_interrupts(wait):
                    self._end(wait, KeyboardInterrupt())
                elif wait.seen:
                    try:
                        wait.watchdog.look(time.monotonic())
                    except BaseException as error:
                        self._end(wait, error)
                wait.seen = True

    @staticmethod
    def _takes_interrupts(wait: _Wait) -> bool:
        """Whether Python would raise KeyboardInterrupt in the thread of this wait."""
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return default and wait.thread is threading.main_thread()

    def _end(self, wait: _Wait, error: BaseException) -> None:
        with self.lock:
            if wait in self.waits and wait.error is None:
                wait.error = error
                wait.posted.connections.close_all()


@cache
def _watchdog_thread() -> WatchdogThread:
    return WatchdogThread()


class GlooTransport(ProcessTransport):
    """Processes of a world of torch.distributed, one worker each, in the order of their ranks.

    Creating it sends nothing to the others; it reads the store of the world.
    """

    name = "torch"

    def __init__(self) -> None:
        self.connections: Connections | None = None
        self.failed_connections: list[Connections] = []
        self.exchange_counts: dict[int, int] = {}
        world, _ = _job()
        self.unknown_ranks = [r for r in range(world.size) if r != world.rank]
        self.last_lookup = 0.0
        super().__init__(world.rank, tuple(range(world.size)), _status_board)

    @classmethod
    def of(cls) -> GlooTransport:
        """The transport of all processes."""
        if cls not in _transports:
            _transports[cls] = cls()
        return _transports[cls]

    def connect(self) -> None:
        if self.connections is None:
            self.channel(tuple(range(self.size)), start("a map"))

    def open(self, members: Shape, call: Call) -> GlooChannel:
        connections = self.connections or self._connected(call)
        return GlooChannel(self, connections, members, members.index(self.local[0]), digest(members))

    def _connected(self, call: Call) -> Connections:
        """New connections. All processes open theirs together."""
        name = f"connections of {type(self).__name__} {self.failed}"
        connections: Connections = self.run_under_watchdog(lambda: _connect(name), call)
        # All processes have abandoned what was under way on the failed connections.
        self.abandoned.clear()
        self.pending.clear()
        self.failed_connections.clear()
        self.connections = connections
        return connections

    def fail(self, error: BaseException) -> None:
        failures = self.failed
        super().fail(error)
        if self.failed != failures and self.connections is not None:
            self.failed_connections.append(self.connections)  # Closing them now might lose messages to others.
            self.connections = None

    def exchange_addresses(self, others: Sequence[int], number: int, call: Call) -> None:
        self.exchange_counts[number] = count = self.exchange_counts.get(number, 0) + 1
        world, store = _job()
        name = f"{type(self).__name__} {number} {count}"
        # The second stage confirms that all processes reached the first. A process that comes after the others have
        # failed finds only their first stage.
        for stage in "here", "all here":
            store.set(f"{name} {world.rank} {stage}", stage)
            keys = [f"{name} {r} {stage}" for r in others]
            Watchdog(self, call).until(
                partial(store.check, keys), partial(self._read_addresses, store, _LOOKUP_INTERVAL)
            )
        self._read_addresses(store)

    def _read_addresses(self, store: Any, interval: float = 0.0) -> None:
        """Read the addresses that other processes have put into the store, at most once per `interval` seconds."""
        status_board, now = self.status_board, time.monotonic()
        assert status_board is not None
        if now < self.last_lookup + interval:
            return
        self.last_lookup = now
        for r in self.unknown_ranks[:]:
            key = f"address {r}"
            if store.check([key]):
                status_board.add_address(r, store.get(key))
                self.unknown_ranks.remove(r)

    @staticmethod
    def complete_soon(requests: list[Any]) -> bool:
        return not requests and not getattr(requests, "closed", "")

    def wait_for(self, requests: list[Any]) -> None:
        closed = getattr(requests, "closed", "")
        try:
            for work in requests:
                work.wait(_FOREVER)
        except RuntimeError as error:
            closed = str(error)
        if closed:
            raise disconnected(self.last_call, closed)

    def watch(self, requests: list[Any], call: Call | None) -> None:
        assert isinstance(requests, Posted)
        watchdog = Watchdog(self, call)
        try:
            _watchdog_thread().wait(watchdog, requests)
            return
        except Closed as error:
            reason = str(error)
        # Another process has closed the connection, and may publish the reason in a moment.
        watchdog.reason()
        raise disconnected(call, reason)


_transports: dict[type, GlooTransport] = {}


@cache
def _job() -> tuple[TorchWorld, Any]:
    """This process's rank and the size of the world, and the store: the user's, if torch.distributed is initialised."""
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
        raise _connection_error(f"no store of torch.distributed: {error}") from error


def _store(world: TorchWorld) -> Any:
    """The store, where the user has not initialised torch.distributed. torchrun opens its store before it starts the
    processes. Without torchrun, the variables may be left over from another job, whose processes never come."""
    seconds = time_limit() or CONNECT_TIMEOUT.total_seconds()
    if world.launched:  # The process that serves the store may have ended.
        store = _open_store(world, max(seconds, _STORE_TIMEOUT_MIN))
        store.set_timeout(CONNECT_TIMEOUT)
        return store
    notice = threading.Timer(_QUIET_SECONDS, _print_notice, (world,))
    notice.daemon = True
    notice.start()
    try:
        return _open_store(world, seconds)
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


def _open_store(world: TorchWorld, seconds: float) -> Any:
    """The store that the environment variables name, opened within a time limit."""
    return next(iter(rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=seconds))))[0]


_STORE_TIMEOUT_MIN = 10.0
"""The least time limit for torchrun's store, in seconds: a busy machine is slow."""

_QUIET_SECONDS = 5.0
"""Seconds for which a process waits for the others of its environment before it prints a notice."""


def _print_notice(world: TorchWorld) -> None:
    variables, names = leftovers("torch")
    print(
        f"spmd: rank {world.rank} waits for {world.size} processes of torch.distributed, because of {variables} in its "
        f'environment; where that is left over from another job, "unset {names}" or set SPMD_TRANSPORT=local',
        file=sys.stderr,
        flush=True,
    )


def _connect(name: str) -> Connections:
    """Connect with all other processes, which use the same name."""
    world, store = _job()
    try:
        return Connections(PrefixStore(name, store), world.rank, world.size)
    except RuntimeError as error:
        raise _connection_error(str(error)) from error


def _status_board() -> StatusBoard | None:
    """The status board of this host. Its first process creates the file, and puts the name into the store."""
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
    """A child of os.fork has its parent's connections, without the threads that serve them. The child never destroys
    them: that would wait for those threads, and close the parent's connections too. It also stops writing its signals
    to the parent's socket."""
    if _watchdog_thread.cache_info().currsize and _watchdog_thread().receives_signals:
        signal.set_wakeup_fd(-1)
        _watchdog_thread().wake_reader.close()
        _watchdog_thread().wake_writer.close()
    for transport in _transports.values():
        for connections in (transport.connections, *transport.failed_connections):
            if connections is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connections.group))


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _connection_error(reason: str) -> TransportError:
    return TransportError.at(
        "spmd.Mesh",
        argument="transport",
        got=f'"torch", and the processes cannot connect: {reason}',
        need="gloo's connections among all of them",
        mend="GLOO_SOCKET_IFNAME names the network interface to use",
    )
