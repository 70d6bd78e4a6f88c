"""Workers that are processes of torch.distributed, such as torchrun starts: no MPI is needed.

Bytes move over connections of gloo's that are this library's own, so that nothing meets the messages of the user's
process groups, and it does not matter whether there are any: of torch.distributed's world only its store is used, to
agree where to connect. All movements are sends and receives between two processes, straight from and into arrays.
They are the fastest that gloo has, and need no group but that of all; a tag tells the groups of workers apart.

A process waits in gloo, which neither polls nor can be asked. A thread of this process looks at the others meanwhile
(`Watchdog`), and breaks the connections off where a wait cannot end. After a failure all connect anew.
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
from spmd.transport.processes.job import abort
from spmd.transport.processes.shared_files import SharedFile, created, job_name, namespace, opened, remove_abandoned
from spmd.transport.processes.status_board import Board
from spmd.transport.processes.transport import ProcessTransport, disconnected, start
from spmd.transport.processes.watchdog import LOOK, Watchdog, board_of_the_job, time_limit

__all__ = ["TorchChannel", "TorchTransport"]

_TAGS = (1 << 31) - 1
_FOREVER = timedelta(days=3650)
_LEARN = 1.0
"""Seconds from time to time that a process learns which others have come, while it waits for all."""
_CONNECT = timedelta(minutes=30)
"""For what takes milliseconds once all are here; that is waited for elsewhere, but with SPMD_CHECK=0."""
_MAKE = timedelta(seconds=10)
"""For the file of the board, which takes milliseconds to make: without it the time limits of waits still hold."""


def _tensor(x: np.ndarray) -> torch.Tensor:
    """Bytes as torch takes them, in place. Of read-only ones, which are only ever sent, it would warn."""
    if x.flags.writeable:
        return torch.from_numpy(x)
    return torch.frombuffer((ctypes.c_char * x.nbytes).from_address(x.ctypes.data), dtype=torch.uint8)


class Lines:
    """Connections of this process with all others."""

    def __init__(self, store: Any, rank: int, size: int):
        self.group: Any = dist.ProcessGroupGloo(store, rank, size, _CONNECT)
        self.channels: list[TorchChannel] = []
        """They live as long: what a receive stands ready to write to is kept until nobody sends here any more."""
        self.peers = [r for r in range(size) if r != rank]
        self.tag = digest("nothing ever comes here") % _TAGS

    def cut(self) -> None:
        """Break off, so that whoever waits on these lines, here or elsewhere, waits no longer.

        gloo closes all connections where one receive runs out of time. On one that is closed already there is none.
        """
        for peer in self.peers:
            with suppress(RuntimeError):
                self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, self.tag).wait(timedelta(milliseconds=1))


class Posted(list):
    """Sends and receives under way, over some lines. closed: why not all of them could be posted."""

    __slots__ = ("closed", "lines")

    def __init__(self, lines: Lines):
        self.lines = lines
        self.closed = ""

    def post(self, move: Callable[..., Any], x: torch.Tensor, rank: int, tag: int) -> None:
        try:
            if not self.closed:
                self.append(move([x], rank, tag))
        except RuntimeError as error:
            self.closed = str(error)


class TorchChannel(Channel):
    """Some processes, by their ranks, and the tag of their messages.

    Messages between two processes with one tag arrive in the order in which they were sent. What is empty is not sent:
    the one that would receive it knows its size too.

    next: where the headers of the next meeting come, which others may send while those of this one are read.
    """

    __slots__ = ("greetings", "lines", "next", "ranks", "standing", "tag", "tensors")

    def __init__(self, lines: Lines, ranks: Shape, me: int, key: int):
        super().__init__(me, len(ranks))
        self.lines, self.ranks = lines, ranks
        self.tag = digest("blocks", key) % _TAGS
        self.greetings = digest("headers", key) % _TAGS
        self.standing: Posted | None = None
        self.next = Headers.of(len(ranks))
        self.tensors = {id(h): torch.from_numpy(h.array.view(np.int64)) for h in (self.said, self.heard, self.next)}

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> Posted:
        posted, group = Posted(self.lines), self.lines.group
        for move, blocks in (group.recv, receives), (group.send, sends):
            for k, x in blocks.items():
                if x.size:
                    posted.post(move, _tensor(x), self.ranks[k], self.tag)
        return posted

    def swap(self, nbytes: int) -> Posted:
        """gloo's sender waits until it knows of the receive. So there is always one that stands ready for the next."""
        posted = self.standing or self._stand()
        self.heard, self.next = self.next, self.heard
        self._post(posted, self.lines.group.send, self.said)
        self.standing = self._stand()
        return posted

    def _stand(self) -> Posted:
        posted = Posted(self.lines)
        self._post(posted, self.lines.group.recv, self.next)
        return posted

    def _post(self, posted: Posted, move: Callable[..., Any], headers: Headers) -> None:
        for k in self.others:
            posted.post(move, self.tensors[id(headers)][k], self.ranks[k], self.greetings)


class Closed(Exception):
    """gloo's connections were closed while they were waited on."""


class Turn:
    """One wait: who waits, on what, and the error that ends it."""

    __slots__ = ("patience", "posted", "seen", "thread", "verdict")

    def __init__(self, patience: Watchdog, posted: Posted):
        self.patience, self.posted = patience, posted
        self.thread = threading.current_thread()
        self.seen = False
        self.verdict: BaseException | None = None


class Watch:
    """The thread that looks at the others while threads of this process wait in gloo."""

    def __init__(self) -> None:
        self.turns: set[Turn] = set()
        self.lock = threading.Lock()
        self.hears_signals = False
        self.ear, self.mouth = socket.socketpair()
        self.ear.setblocking(False)
        self.mouth.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            # Python tells of signals here. It does not come to handle them while its main thread waits elsewhere.
            before = signal.set_wakeup_fd(self.mouth.fileno(), warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
            else:
                self.hears_signals = True
        threading.Thread(target=self._look, name="spmd-watch", daemon=True).start()

    def wait(self, patience: Watchdog, posted: Posted) -> None:
        """Wait for what was posted. Raises what is seen meanwhile, or Closed."""
        turn = Turn(patience, posted)
        self.turns.add(turn)
        closed = posted.closed
        try:
            if not closed:
                for work in posted:
                    work.wait(_FOREVER)
        except RuntimeError as error:
            closed = str(error)
        finally:
            with self.lock:
                self.turns.discard(turn)
        if turn.verdict is not None:
            raise turn.verdict.with_traceback(None)
        if closed:
            raise Closed(closed)

    def _look(self) -> None:
        while True:
            interrupted = False
            if select.select([self.ear], [], [], LOOK)[0]:
                interrupted = signal.SIGINT in self.ear.recv(4096)
            for turn in list(self.turns):
                if interrupted and self._hears(turn):
                    self._end(turn, KeyboardInterrupt())
                elif turn.seen:
                    try:
                        turn.patience.look(time.monotonic())
                    except BaseException as error:
                        self._end(turn, error)
                turn.seen = True

    @staticmethod
    def _hears(turn: Turn) -> bool:
        """Whether Python would raise an interrupt in this turn's thread."""
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return default and turn.thread is threading.main_thread()

    def _end(self, turn: Turn, error: BaseException) -> None:
        with self.lock:
            if turn in self.turns and turn.verdict is None:
                turn.verdict = error
                turn.posted.lines.cut()


@cache
def _watch() -> Watch:
    return Watch()


class TorchTransport(ProcessTransport):
    """Processes of a world of torch.distributed, one worker each, in the order of their ranks.

    Making it sends nothing to the others; it asks the store of the world.
    """

    name = "torch"

    def __init__(self) -> None:
        self.lines: Lines | None = None
        self.old: list[Lines] = []
        self.greetings: dict[int, int] = {}
        world, _ = _job()
        self.strangers = [r for r in range(world.size) if r != world.rank]
        self.learnt = 0.0
        super().__init__(world.rank, tuple(range(world.size)), _board)

    @classmethod
    def of(cls) -> TorchTransport:
        """The transport of all processes."""
        if cls not in _transports:
            _transports[cls] = cls()
        return _transports[cls]

    def connect(self) -> None:
        if self.lines is None:
            self.channel(tuple(range(self.size)), start("a map"))

    def open(self, members: Shape, call: Call) -> TorchChannel:
        lines = self.lines or self._connected(call)
        channel = TorchChannel(lines, members, members.index(self.local[0]), digest(members))
        lines.channels.append(channel)
        return channel

    def _connected(self, call: Call) -> Lines:
        """New lines, which all make together."""
        name = f"lines of {type(self).__name__} {self.failed}"
        lines: Lines = self.watched(lambda: _lines(name), call)
        # Who connects anew has given up what was under way on the old lines, as all others have.
        self.lost.clear()
        self.flying.clear()
        self.old.clear()
        self.lines = lines
        return lines

    def fail(self, error: BaseException) -> None:
        failures = self.failed
        super().fail(error)
        if self.failed != failures and self.lines is not None:
            self.old.append(self.lines)  # To close them now might take from others what is on its way to them.
            self.lines = None

    def greet(self, others: Sequence[int], number: int, call: Call) -> None:
        self.greetings[number] = count = self.greetings.get(number, 0) + 1
        world, store = _job()
        name = f"{type(self).__name__} {number} {count}"
        # The second time says that all were there the first time: whoever comes when the others have given up finds
        # only what they said then.
        for stage in "here", "all here":
            store.set(f"{name} {world.rank} {stage}", stage)
            keys = [f"{name} {r} {stage}" for r in others]
            Watchdog(self, call).until(partial(store.check, keys), partial(self._learn, store, _LEARN))
        self._learn(store)

    def _learn(self, store: Any, every: float = 0.0) -> None:
        """Where other processes can be asked, as far as they have said so. every: seconds from time to time."""
        board, now = self.board, time.monotonic()
        assert board is not None
        if now < self.learnt + every:
            return
        self.learnt = now
        for r in self.strangers[:]:
            key = f"address {r}"
            if store.check([key]):
                board.meet(r, store.get(key))
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
        patience = Watchdog(self, call)
        try:
            _watch().wait(patience, requests)
            return
        except Closed as error:
            said = str(error)
        # Another has closed the connection. It may be about to say why.
        patience.reason()
        raise disconnected(call, said)

    def leave(self, code: Any) -> None:
        if code not in (None, 0):
            if not isinstance(code, int):
                print(code, file=sys.stderr)
            abort(code if isinstance(code, int) else 1)


_transports: dict[type, TorchTransport] = {}


@cache
def _job() -> tuple[TorchWorld, Any]:
    """This process's place among all, and the store that they share: that of the user's world, where there is one."""
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
    seconds = time_limit() or _CONNECT.total_seconds()
    if world.launched:  # The host that has the store may have ended already.
        store = _store_within(world, max(seconds, _START))
        store.set_timeout(_CONNECT)
        return store
    notice = threading.Timer(_SILENT, _say_that_it_waits, (world,))
    notice.daemon = True
    notice.start()
    try:
        return _store_within(world, seconds)
    except RuntimeError as error:
        found, names = leftovers("torch")
        raise TransportError.at(
            "spmd.Mesh",
            got=f"{found} in the environment, as of a launcher of torch.distributed, and not all {world.size} "
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


_START = 10.0
"""Seconds that torchrun's store has at least to answer, on a busy machine."""

_SILENT = 5.0
"""Seconds that a process waits for those that its environment speaks of before it says so."""


def _say_that_it_waits(world: TorchWorld) -> None:
    found, names = leftovers("torch")
    print(
        f"spmd: rank {world.rank} waits for {world.size} processes of torch.distributed, because of {found} in its "
        f'environment; where that is left over from another job, "unset {names}" or set SPMD_TRANSPORT=local',
        file=sys.stderr,
        flush=True,
    )


def _lines(name: str) -> Lines:
    """Connections with all others, which meet under this name."""
    world, store = _job()
    try:
        return Lines(PrefixStore(name, store), world.rank, world.size)
    except RuntimeError as error:
        raise _unconnected(str(error)) from error


def _board() -> Board | None:
    """The board of this host's processes, in a file that the first of them names."""
    world, store = _job()

    def file(nbytes: int) -> SharedFile:
        key = f"board of {namespace()} {os.geteuid()}"
        if store.add(f"{key}, asked for", 1) == 1:
            return _told(store, key, nbytes)
        try:
            store.wait([key], _MAKE)
            said = store.get(key).decode()
        except RuntimeError as error:
            raise TimeoutError(f"the first process of this host has named no file: {error}") from error
        if not said:
            raise FileNotFoundError("the first process of this host could make none")
        return opened(Path(said), nbytes)

    board = board_of_the_job(world.rank, world.size, file)
    store.set(f"address {world.rank}", address_of(board))
    return board


def _told(store: Any, key: str, nbytes: int) -> SharedFile:
    """A new file, and in the store its name; or that there is none."""
    found: SharedFile | None = None
    try:
        remove_abandoned()
        found = created(job_name(os.getppid()), nbytes)
        return found
    finally:
        store.set(key, "" if found is None else str(found.path))


def _leave_to_the_parent() -> None:
    """A child of os.fork has its parent's connections, without the threads that serve them. They are never taken down
    in it: that would wait for those threads, and break the connections off for the parent too. Nor are its signals the
    parent's."""
    if _watch.cache_info().currsize and _watch().hears_signals:
        signal.set_wakeup_fd(-1)
        _watch().ear.close()
        _watch().mouth.close()
    for transport in _transports.values():
        for lines in (transport.lines, *transport.old):
            if lines is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(lines.group))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def _unconnected(said: str) -> TransportError:
    return TransportError.at(
        "spmd.Mesh",
        argument="transport",
        got=f'"torch", and the processes cannot connect: {said}',
        need="gloo's connections among all of them",
        mend="GLOO_SOCKET_IFNAME names the network interface to use",
    )
