"""Schedules: a collective as the rounds of one member.

A schedule names members and items, never bytes: the items are consecutive chunks of a block that is reduced, or whole
blocks by the members that they come from and go to. So the same schedule is run by a transport, counted, and proved by
tests. All members of a group follow the schedules of one algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["Round", "Schedule", "Span", "Transfer", "critical_path", "messages_of", "others", "sent_bytes"]

Span = tuple[int, int]
"""Consecutive chunks: the first, and the one behind the last."""

Carries = Literal["block", "partial", "total"]


class Transfer(NamedTuple):
    """A message to a member, or from one. items: a span of chunks where blocks are reduced, else the items' names."""

    peer: int
    items: Any


class Round(NamedTuple):
    """What a member does in one round: it sends, then takes what comes.

    carries: what the messages hold of a reduction: a part of the sender's block, a partial sum, or a total. merge: what
    a partial sum that comes does: it is put "before" the own one or "after" it; "all": what all members of `of` send,
    and this one has, is summed; "": it is kept as it is. of: those members, in order.
    """

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    merge: Literal["", "before", "after", "all"] = ""
    carries: Carries = "block"
    of: Sequence[int] = ()


class Schedule(NamedTuple):
    """The rounds of one member. chunks: the number of chunks into which a block that is reduced is cut."""

    algorithm: str
    rounds: tuple[Round, ...]
    chunks: int = 1


def others(n: int, me: int) -> list[int]:
    """The other members, beginning with the next one: so that not all send to the same one at first."""
    return [(me + k) % n for k in range(1, n)]


def messages_of(schedule: Schedule) -> int:
    """The messages that a member sends."""
    return sum(len(step.sends) for step in schedule.rounds)


def sent_bytes(schedule: Schedule, nbytes: Callable[[Any], int]) -> int:
    """The bytes of blocks that a member sends. nbytes: of the items of one message."""
    return sum(nbytes(transfer.items) for step in schedule.rounds for transfer in step.sends)


def critical_path(schedules: Sequence[Schedule]) -> int:
    """The longest chain of messages, each of which waits for the one before: a member sends one at a time.

    schedules: those of all members, by member. Raises ValueError where a member waits for what nobody sends.
    """
    times, at = [0] * len(schedules), [0] * len(schedules)
    arrivals: dict[tuple[int, int], list[int]] = {}
    ready: Collection[int] = range(len(schedules))
    while ready:
        receivers: set[int] = set()
        for member in ready:
            while at[member] < 2 * len(schedules[member].rounds):
                step = schedules[member].rounds[at[member] // 2]
                if at[member] % 2 == 0:
                    for transfer in step.sends:
                        times[member] += 1
                        arrivals.setdefault((member, transfer.peer), []).append(times[member])
                        receivers.add(transfer.peer)
                elif not _receive(member, step, times, arrivals):
                    break
                at[member] += 1
        ready = receivers
    if any(at[m] < 2 * len(s.rounds) for m, s in enumerate(schedules)):
        raise ValueError("members that wait for messages that nobody sends")
    return max(times, default=0)


def _receive(member: int, step: Round, times: list[int], arrivals: dict[tuple[int, int], list[int]]) -> bool:
    """Take the messages of a round, if all have come."""
    if not all(arrivals.get((transfer.peer, member)) for transfer in step.receives):
        return False
    for transfer in step.receives:
        times[member] = max(times[member], arrivals[transfer.peer, member].pop(0))
    return True
