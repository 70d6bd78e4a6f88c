"""What a transport is: few verbs on contiguous buffers, spoken by every worker of a group alike.

A worker holds a `Comm`. Each verb starts a collective and returns a `Handle`; `wait()` gives the result. All members
of a group start the same verbs in the same order; the `Call` that travels with each lets them verify it, and shapes
travel along, so that nobody needs to know the others' blocks beforehand.

Sums are taken in the order of the group's members, whatever the timing: the same inputs give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.settings import setting
from spmd.transport.call import LEDGERS, Call, Group
from spmd.transport.handles import Handle, Outcome, Then
from spmd.transport.plan import (
    Boxes,
    Eager,
    Join,
    Sends,
    Way,
    all_reduce_cost,
    exchange_cost,
    gather_cost,
    root_cost,
    scatter_cost,
)

if TYPE_CHECKING:
    pass

__all__ = ["Comm", "Transport", "checks_are_on"]


def checks_are_on() -> bool:
    """Whether collectives between processes begin with a check, waits are watched, and what counts as one value is
    compared: not with SPMD_CHECK=0."""
    return setting("SPMD_CHECK")


class Comm(ABC):
    """One worker's view of a transport. Whole blocks are C-contiguous, parts of them may be views of any strides;
    received ones are read-only, and where workers share memory they are the very views that were sent, if not lent.

    The public verbs count what they cost, in messages and bytes that this worker sends; engines implement the
    protected ones. The cost is logical (that of the usual algorithm), the same in every transport.
    """

    worker: int
    number: int = 0
    """The collectives so far. All workers make the same ones in one order, so members of a group meet with one number:
    who takes two groups in another order than its partners does not, though every meeting by itself looks right."""

    def repeated(self, call: Call, way: Eager, x: np.ndarray) -> Callable[[Any, np.ndarray, Way], Any] | None:
        """A shorter way for a collective, for each further time that the same line calls it with such a block x, if
        there is one. It is given the way by the verbs too, for where others bring other blocks."""
        return None

    def given(self, x: Any) -> Any:
        """An array of whoever called the map, for this worker to read."""
        return x

    def _count(self, verb: str, messages: int, nbytes: int) -> None:
        for ledger in LEDGERS.get():
            ledger.verb(self.worker, verb, messages, nbytes)

    def all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str = "sum") -> Handle:
        """The entrywise sum (max, min) of all members' blocks of one shape, on every member.

        Cost: 2 (n - 1) messages; every chunk but the own one goes out, the reduced own chunk goes to all others.
        """
        if LEDGERS.get():
            self._count("all_reduce", *all_reduce_cost(group, x))
        return self._all_reduce(group, call, x, how)

    def all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool] = ()) -> Handle:
        """The sums of several blocks of one dtype in one collective; the result is a list.

        spare: for each block whether nobody else has it, so that its sum may be written over it.
        """
        if LEDGERS.get():
            self._count("all_reduce", *all_reduce_cost(group, *xs))
        return self._all_reduce_many(group, call, xs, spare or [False] * len(xs))

    def reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        """parts[k] goes to member k, which gets the sum of what all sent it. Cost: n - 1 messages."""
        if LEDGERS.get():
            self._count("reduce_scatter", *scatter_cost(group, parts))
        return self._reduce_scatter(group, call, parts)

    def all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        """All members' blocks, as a list; shapes may differ. Cost: n - 1 messages of the own block."""
        if LEDGERS.get():
            self._count("all_gather", *gather_cost(group, x))
        return self._all_gather(group, call, x)

    def all_gather_as(self, group: Group, call: Call, x: np.ndarray, join: Join) -> Handle:
        """What `join` makes of all members' blocks: the same on all of them, who may share it."""
        if LEDGERS.get():
            self._count("all_gather", *gather_cost(group, x))
        return self._all_gather_as(group, call, x, join)

    def all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        """parts[k] goes to member k; the result lists what each member sent here. Cost: n - 1 messages."""
        if LEDGERS.get():
            self._count("all_to_all", *scatter_cost(group, parts))
        return self._all_to_all(group, call, parts)

    def all_to_all_as(self, group: Group, call: Call, parts: Sequence[np.ndarray], join: Join) -> Handle:
        """As `all_to_all`, and what `join` makes of what comes."""
        if LEDGERS.get():
            self._count("all_to_all", *scatter_cost(group, parts))
        return self._all_to_all_as(group, call, parts, join)

    def broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        """The root's block, on every member (others pass None). Cost: n - 1 messages, sent by the root."""
        if LEDGERS.get():
            self._count("broadcast", *root_cost(group, root, x.nbytes if x is not None else 0, down=True))
        return self._broadcast(group, call, x, root)

    def reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        """The sum of all blocks at the root; None elsewhere. Cost: one message from each other member."""
        if LEDGERS.get():
            self._count("reduce", *root_cost(group, root, x.nbytes, down=False))
        return self._reduce(group, call, x, root)

    def exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> Handle:
        """sends[k] goes to member k; the result maps senders to what they sent. Cost: a message per send to another."""
        if LEDGERS.get():
            self._count("exchange", *exchange_cost(group, sends))
        return self._exchange(group, call, sends)

    def exchange_boxes(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], boxes: Boxes) -> Handle:
        """As `exchange`, and what comes put together."""
        if LEDGERS.get():
            self._count("exchange", *exchange_cost(group, sends))
        return self._exchange_boxes(group, call, sends, boxes)

    def shapes(self, group: Group, call: Call) -> Handle:
        """The shapes of all members' blocks, as a list. They travel with the calls: no message, no bytes."""
        self._count("shapes", 0, 0)
        return self._shapes(group, call)

    def exchange_learnt(self, group: Group, call: Call, sends: Sends) -> Handle | None:
        """The shapes of all members' blocks, and what an `exchange` gives of what `sends` makes of these shapes (None,
        on all members alike, where nothing is sent), in one meeting. None where that takes two: then `shapes`, and an
        `exchange`, which goes on while the caller does something else."""
        return None

    @abstractmethod
    def _shapes(self, group: Group, call: Call) -> Handle: ...

    @abstractmethod
    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle: ...

    @abstractmethod
    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle: ...

    @abstractmethod
    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle: ...

    def _all_gather_as(self, group: Group, call: Call, x: np.ndarray, join: Join) -> Handle:
        return Then(self._all_gather(group, call, x), join)

    @abstractmethod
    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle: ...

    def _all_to_all_as(self, group: Group, call: Call, parts: Sequence[np.ndarray], join: Join) -> Handle:
        return Then(self._all_to_all(group, call, parts), join)

    @abstractmethod
    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle: ...

    @abstractmethod
    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle: ...

    @abstractmethod
    def _exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> Handle: ...

    def _exchange_boxes(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], boxes: Boxes) -> Handle:
        return Then(self._exchange(group, call, sends), boxes.filled)


class Transport(ABC):
    """The workers of one mesh."""

    name: str
    size: int
    local: Sequence[int]
    """The numbers of the workers that this process holds."""

    @abstractmethod
    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        """Run body on every worker held here, with its Comm; their results by worker.

        scheduler: of virtual workers, "lockstep", "threads" or ONE_BY_ONE. describe: names a worker in error messages.
        Raises the first error of any worker.
        """

    @abstractmethod
    def threads(self) -> int:
        """The threads that libraries use within each worker: the same for all, so that all get the same bits. The first
        call is collective; a run makes it."""

    @abstractmethod
    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        """Small JSON values, one per worker held here, made known to all processes."""
