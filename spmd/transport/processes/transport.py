"""Workers that are processes: the part that does not depend on the library that moves the bytes.

`comm.py` implements the collectives. A process that waits reads the status board every tenth of a second
(`watchdog.py`), so a deadlock across groups, or a wait for a process that has left, becomes an error. SPMD_CHECK=0
switches off the watchdog, and with it shared memory.

An engine is a `Channel`, which moves bytes among a group of processes, and a `ProcessTransport`, which opens channels
and waits. `mpi.py` uses mpi4py, and `gloo.py` torch.distributed.
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

from spmd.errors import MismatchError, TransportError
from spmd.transport.base import Comm, Transport, checks_are_on
from spmd.transport.blas_threads import blas_threads, core_numbers, share_of_cores
from spmd.transport.call import Call, Group, Shape, raised_by
from spmd.transport.handles import Outcome
from spmd.transport.processes.announce import Pending
from spmd.transport.processes.channel import Channel
from spmd.transport.processes.comm import ProcessComm
from spmd.transport.processes.headers import digest
from spmd.transport.processes.hosts import host_of
from spmd.transport.processes.job import abort, end_the_job_on_error, no_job_of_a_child
from spmd.transport.processes.mailbox import shared
from spmd.transport.processes.message_groups import MessageGroups
from spmd.transport.processes.shared_files import machine
from spmd.transport.processes.shared_memory import shared_memory
from spmd.transport.processes.status_board import StatusBoard
from spmd.transport.processes.watchdog import Watchdog, error_like, let_others, text_of_error, time_limit

__all__ = ["ProcessTransport", "start"]


class _EndOfMap(Call):
    """The call of a worker that has left the map, where others still call."""

    __slots__ = ("last_call",)

    def __init__(self, last: Call | None):
        super().__init__("the end of the map", (), np.dtype(np.uint8), (0,))
        self.last_call = last

    def __str__(self) -> str:
        return self.op

    @property
    def source(self) -> str:
        return (
            f"after {self.last_call} {self.last_call.source}"
            if self.last_call is not None
            else "without any call before"
        )


def start(of: str) -> Call:
    """The call of a wait outside of any collective, for instance at the start of a map."""
    return Call(of, (), np.dtype(bool), (), frame=sys._getframe())


def disconnected(call: Call | None, reason: str) -> TransportError:
    """The error for a connection that was closed for an unknown reason."""
    return TransportError.at(
        str(call) if call is not None else "a collective",
        got=f"a connection that was closed ({reason})",
        need="every worker's process, until all are through",
        mend="look for what another worker has printed",
    )


class ProcessTransport(Transport):
    """Processes of a job, one worker each. Creating it sends nothing.

    worker: that of this process. ranks: for each worker, the rank of its process in the job. make_status_board: returns
    the job's status board, or None where there is none.
    """

    comm_type: type[ProcessComm] = ProcessComm
    disconnections: tuple[type[BaseException], ...] = ()
    """Errors that the engine raises when a peer has died."""
    places: Any = None
    """The GPUs of the blocks, if any."""

    def __init__(self, worker: int, ranks: Shape, make_status_board: Callable[[], StatusBoard | None]):
        self.size = len(ranks)
        self.local = (worker,)
        self.everyone = Group((), (), tuple(range(self.size)), worker)
        self.describe: Callable[[int], str] = lambda worker: f"worker {worker}"
        self.ranks = ranks
        self.pending: set[Pending] = set()
        self.abandoned: list[Any] = []
        """Requests that are no longer waited for, and their buffers."""
        self.unread_blocks: dict[Shape, list[Any]] = {}
        """By group: blocks offered before a map failed. The others may read them until the next rendezvous."""
        self.last_call: Call | None = None
        self.lock = threading.RLock()
        self.running = False
        """Whether the thread with the lock runs a map. A signal handler of that thread gets the lock too."""
        self.runs = 0
        self.comm = self.comm_type(self)
        self.failed = 0
        self.stage = self._number_of("before the first map")
        self.failed_stage = 0
        self.time_limit = time_limit()
        self.checks = checks_are_on()
        self.status_board = make_status_board() if self.checks and self.size > 1 else None
        if self.status_board is not None:
            shared_memory()  # Other processes of this host can read what is allocated from now on.
        self._threads: int | None = None
        self.channels: dict[Shape, Channel] = {}
        self.groups = MessageGroups(self)
        end_the_job_on_error()
        _transports.add(self)

    @abstractmethod
    def open(self, members: Shape, call: Call) -> Channel:
        """Open the channel of some workers, in this order. All of them are here, or will come soon."""

    @abstractmethod
    def exchange_addresses(self, others: Sequence[int], number: int, call: Call) -> None:
        """Wait until these ranks come to the same rendezvous of group `number`, and add their addresses to the status
        board. Some of them are on other hosts."""

    @abstractmethod
    def wait_for(self, requests: list[Any]) -> None:
        """Wait for requests, without the watchdog."""

    @abstractmethod
    def watch(self, requests: list[Any], call: Call | None) -> None:
        """Wait for requests under the watchdog. Raises what `Watchdog.look` raises."""

    @staticmethod
    def complete_soon(requests: list[Any]) -> bool:
        """Whether requests complete within microseconds, if the engine can tell."""
        return not requests

    def progress(self) -> None:
        """Move pending messages, if the engine moves them only while it is called."""

    def connect(self) -> None:
        """Called before each map: an engine may connect all workers here."""

    def leave(self, code: Any) -> None:
        """End the whole job with sys.exit(code) of this worker in a map, unless that reports success."""
        if code not in (None, 0):
            if not isinstance(code, int):
                print(code, file=sys.stderr)
            abort(code if isinstance(code, int) else 1)

    def threads(self) -> int:
        """The BLAS threads per worker: usable cores over workers of a host, the minimum over all hosts."""
        if self._threads is None:
            self._threads = self._share_of_cores(start("the first map"))
        return self._threads

    def _share_of_cores(self, call: Call) -> int:
        self.channel(self.everyone.members, call)
        board = self.status_board
        # Containers of one machine share its cores, and may share no memory: to messages they are different hosts.
        host = digest(machine() if board is None or board.file is None else host_of(board))
        own = json.dumps([digest(machine()), host, sorted(core_numbers())])
        texts = [json.loads(text) for text in self.comm.share(self.everyone, call, own)[0]]
        order = {host: k for k, host in enumerate(dict.fromkeys(host for _, host, _ in texts))}
        self.groups.hosts = tuple(order[host] for _, host, _ in texts)
        shares = []
        for name in {name for name, _, _ in texts}:
            here = [cores for other, _, cores in texts if other == name]
            cores = set().union(*here)  # Processes may be bound to different cores.
            shares.append(share_of_cores(len(here), len(cores)))
        return min(shares)

    def channel(self, members: Shape, call: Call | None = None) -> Any:
        """The channel of some workers, in this order. Their first rendezvous opens it, in `call` or the latest one."""
        channel = self.channels.get(members)
        if channel is None:
            ordered, call, status_board = tuple(sorted(members)), call or self.last_call, self.status_board
            self._wait_for_members(ordered, call)
            channel = self._opened(members, call or start("a map"))
            group, ranks = self.number_of(members)
            channel.rendezvous_count = None if status_board is None else status_board.rendezvous_count(group, ranks)
            if members == ordered and self.groups.on_this_host(ranks):  # headers go in the order of the workers
                channel.share(shared(channel.me, len(members), lambda x: self._all_gather(channel, x, call)))
                self.unread_blocks.pop(members, None)
            self.channels[members] = channel
        return channel

    def _opened(self, members: Shape, call: Call) -> Channel:
        try:
            return self.open(members, call)
        except BaseException as error:
            self.fail(error)
            raise

    def run_under_watchdog(self, work: Callable[[], Any], call: Call) -> Any:
        """Run `work`, in which the engine waits for others, under the watchdog unless all are known to have come."""
        if self.status_board is None or self.status_board.single_host:
            return work()
        return Watchdog(self, call).through(work)

    def _all_gather(self, channel: Channel, token: bytes, call: Call | None) -> list[bytes]:
        """Eight bytes of each member of a channel, by messages."""
        rows = np.empty((channel.size, 8), np.uint8)
        send = np.frombuffer(token, np.uint8)
        self.arrive(channel.all_gather(send, rows.reshape(-1), [8] * len(rows)), call, (send, rows))
        return [row.tobytes() for row in rows]

    def number_of(self, members: Shape) -> tuple[int, Shape]:
        """The number of a group of workers, the same in all processes until a map fails, and their ranks."""
        ranks = tuple(self.ranks[m] for m in members)
        return digest("group", self.failed, tuple(sorted(ranks))) or 1, ranks

    def swap(self, channel: Channel, call: Call) -> None:
        """Exchange headers with all members of a channel: a rendezvous."""
        status_board, mailbox = self.status_board, channel.mailbox
        assert status_board is not None
        assert mailbox is not None
        self.raise_earlier_failure()
        status_board.enter(channel.rendezvous_count, call)
        try:
            if self.pending or not status_board.single_host:
                self.progress()
            come = mailbox.swap(let_others)
            channel.outgoing, channel.incoming = mailbox.outgoing, mailbox.incoming
            if come:
                return
            self.groups.finish()
            status_board.start_waiting(self.stage)
            Watchdog(self, call).until(mailbox.has_come, self.progress)
        except BaseException as error:
            raise self._abandon(error, channel, call)  # noqa: B904 (it is this one, most often)
        status_board.resume()

    def raise_earlier_failure(self) -> None:
        """Raise the error with which this map has failed already, although the body caught it. The other processes
        raise it."""
        if self.failed_stage == self.stage and self.status_board is not None:
            raise error_like(*self.status_board.failure_of(self.stage, self.ranks) or (self.status_board.rank, "", ""))

    def _wait_for_members(self, members: Shape, call: Call | None) -> None:
        """Wait until all of these workers are here, before an engine connects them."""
        if self.status_board is None or call is None:
            return
        self.raise_earlier_failure()
        number, ranks = self.number_of(members)
        self.status_board.enter(self.status_board.rendezvous_count(number, ranks), call)
        self.status_board.start_waiting(self.stage)
        rank = self.status_board.rank
        if self.status_board.single_host:
            try:
                Watchdog(self, call).until(lambda: not self.status_board.missing(rank))  # type: ignore[union-attr]
            except BaseException as error:
                if self.status_board.withdraw() or not isinstance(error, Exception):
                    self.fail(error)
                    raise
        else:
            try:
                self.exchange_addresses([r for r in ranks if r != rank], number, call)
            except BaseException as error:
                self.fail(error)
                raise
        self.status_board.resume()

    def fail(self, error: BaseException) -> None:
        """Publish that a map has failed here. Processes that wait in it raise the same error. Then all use new
        channels, because messages on the old ones may never complete."""
        if self.status_board is not None:
            self.status_board.resume()
        if self.status_board is not None and self.failed_stage != self.stage:
            self.failed_stage = self.stage
            self.failed += 1
            for members, channel in self.channels.items():
                if channel.mailbox is not None:
                    self.unread_blocks.setdefault(members, []).append((channel.mailbox.before, channel.mailbox.now))
                channel.share(None)
            self.channels.clear()
            self.groups.forget()
            who = getattr(error, "peer", None) or self.describe(self.local[0])
            origin = getattr(error, "origin", self.status_board.rank)
            self.status_board.fail(self.stage, origin, who, text_of_error(error))

    def arrive(
        self,
        requests: list[Any],
        call: Call | None,
        buffers: Any = None,
        ranks: Shape = (),
        place: tuple[int, int] | None = None,
    ) -> None:
        """Wait for requests. buffers: those that they read and write. ranks: the processes that have to come first, to
        the rendezvous `place`: see `StatusBoard.start_waiting`."""
        if self.status_board is None:
            self.wait_for(requests)
            return
        try:
            if self.complete_soon(requests):
                return
            if ranks:
                self.status_board.start_waiting(self.stage, ranks, place)
            self.watch(requests, call)
        except BaseException as error:
            raise self._abandon(error, (requests, buffers), call)  # noqa: B904 (it is this one, most often)
        self.status_board.resume()

    def _abandon(self, error: BaseException, waited: Any, call: Call | None) -> BaseException:
        """The error to raise for a wait that failed. Keeps requests and buffers alive: messages may still come."""
        self.abandoned.append(waited)
        if isinstance(error, self.disconnections):
            error = self._reason(call) or disconnected(call, str(error))
        self.fail(error)
        return error

    def _reason(self, call: Call | None) -> BaseException | None:
        """Why a connection was lost, as an error; None if that stays unknown."""
        assert self.status_board is not None
        try:
            Watchdog(self, call).reason()
        except BaseException as error:
            return error
        return None

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        with self.lock:  # One thread at a time runs its map.
            self._begin()
            try:
                return self._run(body, describe)
            finally:
                self.running = False

    def _begin(self) -> None:
        """Mark that this thread runs a map, or `share`. Raises if it does so already."""
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
        self.groups.publish()
        self.runs += 1
        self.stage = self._number_of("a map")
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
                # The body may fail because a peer has died, or by its own use of the engine.
                lost = self.status_board is not None and isinstance(failure, self.disconnections)
                error = (self._reason(self.last_call) if lost else None) or failure
                if isinstance(error, Exception) and not isinstance(error, MismatchError) and not hasattr(error, "peer"):
                    raised_by(error, describe(worker))
                self.fail(error)
                if error is failure:
                    raise
                raise error from failure
            finally:
                if self.failed_stage == self.stage:
                    self._end_of_map()
        return Outcome({worker: result}, time.perf_counter() - started, 0)

    def _end_of_map(self) -> None:
        """Start a new stage after a failed map, with its own number. Workers have come to different collectives."""
        self.comm.number = 0
        self.stage = self._number_of("after a map")

    def _number_of(self, stage: str) -> int:
        """The number of this stage of the job, the same in every process; never 0."""
        return digest(stage, type(self).__name__, self.ranks, self.runs, self.failed) or 1

    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        (value,) = local.values()
        own = json.dumps(value)
        with self.lock:
            self._begin()
            try:
                self.groups.publish()
                self.groups.finish()
                texts = self._agree(own)
            finally:
                self.running = False
                if self.failed_stage == self.stage:
                    self._end_of_map()
            self.last_call = None
        return {k: value if text == own else json.loads(text) for k, text in enumerate(texts)}  # most texts are equal

    def _agree(self, own: str) -> list[str]:
        """The texts of all processes. Raises MismatchError if they have not made the same calls in this map."""
        call = _EndOfMap(self.last_call)
        texts, check_sum = self.comm.share(self.everyone, call, own, self.groups.check_sum())
        if check_sum == 0:
            return texts

        def share(value: Any) -> list[Any]:
            return [json.loads(text) for text in self.comm.share(self.everyone, call, json.dumps(value))[0]]

        error = self.groups.find_mismatch(share)
        self.fail(error)
        raise error


_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


def _belong_to_the_parent() -> None:
    """In a child of os.fork, refuse collectives: connections and shared memory are its parent's. Replacing methods
    costs nothing in processes without children."""
    for transport in list(_transports):
        for name in "run", "share", "swap", "arrive", "channel", "threads":
            setattr(transport, name, _refuse)
        for name in "calls_of", "begin":
            setattr(transport.groups, name, _refuse)
        for name in "fail", "leave":
            setattr(transport, name, _nothing)


def _refuse(*_: Any, **__: Any) -> Any:
    raise no_job_of_a_child()


def _nothing(*_: Any) -> None:
    pass


os.register_at_fork(after_in_child=_belong_to_the_parent)
