"""Workers that are processes: what is the same whichever library moves the bytes between them.

What they do together is said in `verbs.py`. A process that waits looks at the others every tenth of a second (`Board`):
workers that wait for each other in different groups, and such that wait for one that has left, learn it too.
SPMD_CHECK=0 leaves out what can be left out: the headers of sums, whose shapes are equal by contract, and the looking.

An engine is a `Channel`, which moves bytes among some processes, and a `ProcessTransport`, which makes channels and
waits: `mpi.py` is that of mpi4py, `torch.py` that of torch.distributed.
"""

from __future__ import annotations

import contextvars
import json
import os
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.errors import MismatchError, TransportError, class_name
from spmd.transport.base import Comm, Transport, checks_are_on
from spmd.transport.blas_threads import blas_threads, core_numbers, share_of_cores
from spmd.transport.call import Call, Group, Shape, raised_by
from spmd.transport.handles import Outcome
from spmd.transport.processes.announce import Pending
from spmd.transport.processes.channel import Channel, bytes_of
from spmd.transport.processes.comm import ProcessComm
from spmd.transport.processes.headers import digest
from spmd.transport.processes.job import end_the_job_on_error, no_job_of_a_child
from spmd.transport.processes.mailbox import shared
from spmd.transport.processes.shared_files import machine
from spmd.transport.processes.shared_memory import arena
from spmd.transport.processes.status_board import Board
from spmd.transport.processes.watchdog import Watchdog, let_others, like, time_limit

__all__ = ["ProcessTransport", "start"]

_HOST = np.dtype([("name", "i8"), ("cores", "u1", 4096)])
"""What a process tells of its host: a number for its name, and the cores that it may use."""


class _End(Call):
    """The side of a worker that has left the map, where others still call."""

    __slots__ = ("last",)

    def __init__(self, x: np.ndarray, last: Call | None):
        super().__init__("the end of the map", (), x.dtype, x.shape)
        self.last = last

    def __str__(self) -> str:
        return self.op

    @property
    def source(self) -> str:
        return f"after {self.last} {self.last.source}" if self.last is not None else "without any call before"


def start(of: str) -> Call:
    """What waits in the making of a map, and not in a collective."""
    return Call(of, (), np.dtype(bool), (), frame=sys._getframe())


def disconnected(call: Call | None, said: str) -> TransportError:
    """A connection was closed, and nobody knows why."""
    return TransportError.at(
        str(call) if call is not None else "a collective",
        got=f"a connection that was closed ({said})",
        need="every worker's process, until all are through",
        mend="look for what another worker has printed",
    )


class ProcessTransport(Transport):
    """Processes of a job, one worker each. Making it sends nothing.

    worker: this one. ranks: for each worker the rank of its process in the job. board: that of the job, or None where
    nothing is watched.
    """

    comm_type: type[ProcessComm] = ProcessComm
    disconnections: tuple[type[BaseException], ...] = ()
    """Errors of the engine that may come of a peer that is no more."""
    places: Any = None
    """Where blocks lie on GPUs, if they do."""

    def __init__(self, worker: int, ranks: Shape, board: Callable[[], Board | None]):
        self.size = len(ranks)
        self.local = (worker,)
        self.everyone = Group((), (), tuple(range(self.size)), worker)
        self.describe: Callable[[int], str] = lambda worker: f"worker {worker}"
        self.ranks = ranks
        self.flying: set[Pending] = set()
        self.lost: list[Any] = []
        """Requests that nobody will wait for any more, and their buffers."""
        self.unread: dict[Shape, list[Any]] = {}
        """What the members of a group were told of before a map failed, which they may still read until they meet."""
        self.last: Call | None = None
        self.lock = threading.RLock()
        self.running = False
        """Whether the thread that has the lock runs a map: the handler of a signal gets the lock too."""
        self.runs = 0
        self.comm = self.comm_type(self)
        self.failed = 0
        self.number = self._number_of("before the first map")
        self.broken = 0
        self.time_limit = time_limit()
        self.checks = checks_are_on()
        self.board = board() if self.checks and self.size > 1 else None
        if self.board is not None:
            arena()  # What is made from now on can be read by the others of this host.
        self._threads: int | None = None
        self.channels: dict[Shape, Channel] = {}
        end_the_job_on_error()
        _transports.add(self)

    # What an engine does

    @abstractmethod
    def open(self, members: Shape, call: Call) -> Channel:
        """The channel of some workers, in this order. All of them are here, or about to come."""

    @abstractmethod
    def greet(self, others: Sequence[int], number: int, call: Call) -> None:
        """Wait until these ranks come to the same meeting, of the group of this number, for the board does not know
        those of other hosts; and learn where they can be asked (`Board.hosts`)."""

    @abstractmethod
    def wait_for(self, requests: list[Any]) -> None:
        """Wait for requests and look at nobody."""

    @abstractmethod
    def watch(self, requests: list[Any], call: Call | None) -> None:
        """Wait for requests, and look at the others meanwhile. Raises what was seen there (`Watchdog`)."""

    @staticmethod
    def has_come(requests: list[Any]) -> bool:
        """Whether requests have arrived within a moment, where that can be asked."""
        return not requests

    def progress(self) -> None:
        """Whatever is under way goes on, where an engine moves it only while it is called."""

    def connect(self) -> None:
        """All are about to run a map: an engine may make here what needs them all."""

    def leave(self, code: Any) -> None:
        """This worker leaves the program with sys.exit(code) while the others are in a map."""

    # What is the same for all

    def threads(self) -> int:
        """The BLAS threads of every worker: this host's usable cores over its workers, agreed by all."""
        if self._threads is None:
            self._threads = self._share_of_cores(start("the first map"))
        return self._threads

    def _share_of_cores(self, call: Call) -> int:
        channel = self.channel(self.everyone.members, call)
        self._gather(self.everyone.members, call)
        mine = np.zeros((), _HOST)
        mine["name"] = digest(machine())
        mine["cores"][list(core_numbers())] = 1
        all_of_them = np.empty(self.size, _HOST)
        sizes = [_HOST.itemsize] * self.size
        self.arrive(channel.all_gather(bytes_of(mine), all_of_them.view(np.uint8), sizes), call, (mine, all_of_them))
        shares = []
        for name in np.unique(all_of_them["name"]):
            here = all_of_them[all_of_them["name"] == name]
            cores = here["cores"].any(axis=0)  # A launcher may have bound each process to cores of its own.
            shares.append(share_of_cores(len(here), int(cores.sum())))
        return min(shares)

    def channel(self, members: Shape, call: Call | None = None) -> Any:
        """The channel of some workers, in this order, made when they first meet: in a call, or the last one."""
        found = self.channels.get(members)
        if found is None:
            ordered, call, board = tuple(sorted(members)), call or self.last, self.board
            self._gather(ordered, call)
            found = self._opened(members, call or start("a map"))
            group, ranks = self._group(members)
            found.meetings = None if board is None else board.meetings(group, ranks)
            if members == ordered and self.checks and len(members) > 1:  # headers go in the order of the workers
                here = board is not None and all(map(board.here, ranks))
                found.share(shared(here, found.me, len(members), lambda x: self._everyones(found, x, call)))
                self.unread.pop(members, None)
            self.channels[members] = found
        return found

    def _opened(self, members: Shape, call: Call) -> Channel:
        try:
            return self.open(members, call)
        except BaseException as error:
            self.fail(error)
            raise

    def watched(self, work: Callable[[], Any], call: Call) -> Any:
        """What `work` gives, in which an engine waits for others. They may fail meanwhile, where they are not all known
        to have come to it: those of one host are."""
        if self.board is None or self.board.whole:
            return work()
        return Watchdog(self, call).through(work)

    def _everyones(self, channel: Channel, mine: bytes, call: Call | None) -> list[bytes]:
        """Eight bytes of each member of a channel, by messages."""
        rows = np.empty((len(channel.others) + 1, 8), np.uint8)
        send = np.frombuffer(mine, np.uint8)
        self.arrive(channel.all_gather(send, rows.reshape(-1), [8] * len(rows)), call, (send, rows))
        return [row.tobytes() for row in rows]

    def _group(self, members: Shape) -> tuple[int, Shape]:
        """The number of the group of some workers, alike in all processes until a map fails, and their ranks."""
        ranks = tuple(self.ranks[m] for m in members)
        return digest("group", self.failed, tuple(sorted(ranks))) or 1, ranks

    def swap(self, channel: Channel, nbytes: int, call: Call) -> None:
        """Headers go to all members of a channel, and come from them: a meeting."""
        board, mail = self.board, channel.mail
        if board is None:
            self.wait_for(channel.swap(nbytes))
            return
        if self.broken == self.number:
            raise self._failed_before()
        board.come(channel.meetings, call)
        try:
            if mail is not None:
                if self.flying or not board.whole:
                    self.progress()
                come = mail.swap(let_others)
                channel.said, channel.heard = mail.said, mail.heard
                if come:
                    return
                board.wait(self.number)
                Watchdog(self, call).until(mail.has_come, self.progress)
            else:
                requests = channel.swap(nbytes)
                if self.has_come(requests):
                    return
                board.wait(self.number)
                self.watch(requests, call)
        except BaseException as error:
            raise self._given_up(error, channel, call)  # noqa: B904 (it is this one, most often)
        board.go_on()

    def _failed_before(self) -> Exception:
        """The error that the map has failed with, where the body caught it: the others end the map with it."""
        assert self.board is not None
        return like(*self.board.broken(self.number, self.ranks) or (self.board.rank, "", ""))

    def _gather(self, members: Shape, call: Call | None) -> None:
        """Wait until all of these workers are here, before something is made that needs them all."""
        if self.board is None or call is None:
            return
        if self.broken == self.number:
            raise self._failed_before()
        number, ranks = self._group(members)
        self.board.come(self.board.meetings(number, ranks), call)
        self.board.wait(self.number)
        rank = self.board.rank
        if self.board.whole:
            try:
                Watchdog(self, call).until(lambda: not self.board.missing(rank))  # type: ignore[union-attr]
            except BaseException as error:
                if self.board.withdraw() or not isinstance(error, Exception):
                    self.fail(error)
                    raise
        else:
            try:
                self.greet([r for r in ranks if r != rank], number, call)
            except BaseException as error:
                self.fail(error)
                raise
        self.board.go_on()

    def fail(self, error: BaseException) -> None:
        """A map has failed here. Others that wait in it learn so, and fail alike; then all meet on new channels, for on
        the old ones something may be under way that will never end."""
        if self.board is not None:
            self.board.go_on()
        if self.board is not None and self.broken != self.number:
            self.broken = self.number
            self.failed += 1
            for members, channel in self.channels.items():
                if channel.mail is not None:
                    self.unread.setdefault(members, []).append((channel.mail.before, channel.mail.now))
                channel.share(None)
            self.channels.clear()
            who = getattr(error, "peer", None) or self.describe(self.local[0])
            origin = getattr(error, "origin", self.board.rank)
            self.board.fail(self.number, origin, who, f"{class_name(error)}: {error}")

    def arrive(self, requests: list[Any], call: Call | None, buffers: Any = None) -> None:
        """Wait for requests; buffers are what they read and write."""
        if self.board is None:
            self.wait_for(requests)
            return
        try:
            if self.has_come(requests):
                return
            self.watch(requests, call)
        except BaseException as error:
            raise self._given_up(error, (requests, buffers), call)  # noqa: B904 (it is this one, most often)
        self.board.go_on()

    def _given_up(self, error: BaseException, waited: Any, call: Call | None) -> BaseException:
        """A wait ends with an error: what to raise. What was waited for may come yet, and is written to."""
        self.lost.append(waited)
        if isinstance(error, self.disconnections):
            error = self._reason(call) or disconnected(call, str(error))
        self.fail(error)
        return error

    def _reason(self, call: Call | None) -> BaseException | None:
        """What has become of a peer whose connection was lost, as an error, if it comes out."""
        assert self.board is not None
        try:
            Watchdog(self, call).reason()
        except BaseException as error:
            return error
        return None

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        with self.lock:  # Of several threads one runs its map; should others come first elsewhere, it is a mismatch.
            self._begin()
            try:
                return self._run(body, describe)
            finally:
                self.running = False

    def _begin(self) -> None:
        """Note that this thread runs a map, or tells the others of its end. Raises where it does so already."""
        if self.running:
            raise TransportError.at(
                "spmd.map",
                got="a map that is called in the middle of another one: in the handler of a signal, say",
                need="one map after the other, the same ones in the same order on all processes",
                mend="set a variable in the handler, and look at it between two maps, on all processes",
            )
        self.running = True

    def _run(self, body: Callable[[Comm], Any], describe: Callable[[int], str]) -> Outcome:
        self.describe = describe
        self.runs += 1
        self.number = self._number_of("a map")
        self.comm = self.comm_type(self)
        worker = self.local[0]
        started = time.perf_counter()
        threads = self.threads()
        self.connect()
        limit = blas_threads(threads)
        with limit, limit:
            try:
                result = contextvars.copy_context().run(body, self.comm)
            except SystemExit as end:
                self.leave(end.code)
                raise
            except BaseException as failure:
                # To send may fail, too. So may what the body itself does with the engine: then it has its own error.
                lost = self.board is not None and isinstance(failure, self.disconnections)
                error = (self._reason(self.last) if lost else None) or failure
                if isinstance(error, Exception) and not isinstance(error, MismatchError) and not hasattr(error, "peer"):
                    raised_by(error, describe(worker))
                self.fail(error)
                if error is failure:
                    raise
                raise error from failure
            finally:
                if self.broken == self.number:
                    self._end_of_map()
        return Outcome({worker: result}, time.perf_counter() - started, 0)

    def _end_of_map(self) -> None:
        """A map that has failed is over: what follows has another number, and its error is not of that."""
        self.number = self._number_of("after a map")

    def _number_of(self, stage: str) -> int:
        """What tells this stage of the job from all others, alike in every process. On boards, 0 stands for none."""
        return digest(stage, type(self).__name__, self.ranks, self.runs, self.failed) or 1

    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        (value,) = local.values()
        said = json.dumps(value).encode()
        send = np.frombuffer(said, np.uint8)
        with self.lock:
            self._begin()
            try:
                handle = self.comm._all_gather(self.everyone, _End(send, self.last), send)  # no part of the ledger
                blocks = handle.wait()
            finally:
                self.running = False
                if self.broken == self.number:
                    self._end_of_map()
            self.last = None
        texts = [block.tobytes() for block in blocks]
        return {k: value if text == said else json.loads(text) for k, text in enumerate(texts)}  # most say the same


_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


def _belong_to_the_parent() -> None:
    """In a child of os.fork the connections, and the memory that others read, are its parent's. Methods are replaced,
    so that it costs nothing where there is no child."""
    for transport in list(_transports):
        for name in "run", "share", "swap", "arrive", "channel", "threads":
            setattr(transport, name, _refuse)
        for name in "fail", "leave":
            setattr(transport, name, _nothing)


def _refuse(*_: Any, **__: Any) -> Any:
    raise no_job_of_a_child()


def _nothing(*_: Any) -> None:
    pass


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_belong_to_the_parent)
