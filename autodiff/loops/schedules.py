"""Which carries of a loop are kept for its backward sweep, and which steps run again.

The binomial schedule of Griewank & Walther, "Algorithm 799: revolve" (ACM TOMS 26, 2000), runs the fewest steps that
are possible with a given number of kept states.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from spmd.errors import DifferentiationError, describe

__all__ = ["Back", "Drop", "Keep", "Policy", "backward", "first_kept", "policy_of"]

Policy = Callable[[int], int]
"""From the number of steps to the number of states that are kept."""


class Keep(NamedTuple):
    """Run the steps from the kept state `start` to the state before step `at`, and keep that."""

    start: int
    at: int


class Back(NamedTuple):
    """Run the steps from the kept state `start` to the state before step `at`; step `at` is then differentiated."""

    start: int
    at: int


class Drop(NamedTuple):
    """The state before step `at` is no longer kept."""

    at: int


def policy_of(where: str, checkpoint: Any) -> Policy | None:
    """The policy that an argument `checkpoint` means; None: every value is kept."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, str) and checkpoint == "sqrt":
        return lambda n: max(1, math.isqrt(max(n - 1, 0)) + 1)
    if callable(checkpoint):
        return lambda n: _count(where, checkpoint(n), f"checkpoint, a policy, for {n} steps")
    count = _count(where, checkpoint, "checkpoint")
    return lambda n: count


def _count(where: str, x: Any, argument: str) -> int:
    try:
        count = operator.index(x)
    except TypeError:
        count = 0
    if count < 1 or isinstance(x, bool):
        raise DifferentiationError.at(
            where,
            argument=argument,
            got=describe(x),
            need='the number of states that are kept, 1 or more; "sqrt"; or a function from the number of steps to it',
            mend='checkpoint="sqrt", or None to keep every value',
        )
    return count


def _reach(states: int, repeats: int) -> int:
    """The number of steps that can be reversed with so many states if no step runs more often than `repeats` times."""
    return math.comb(states + repeats, states) if repeats >= 0 else 0


def _left(n: int, states: int) -> int:
    """How many of n steps lie before the next kept state, in an optimal schedule."""
    repeats = 1
    while _reach(states, repeats) < n:
        repeats += 1
    return max(1, _reach(states, repeats - 2), n - _reach(states - 1, repeats))


def first_kept(n: int, states: int) -> list[int]:
    """Before which steps the forward run keeps the state: at most `states`, and before the last step, which the
    backward sweep begins with."""
    kept, start = [0], 0
    while n - start > 1 and states > 1:
        start += _left(n - start, states)
        states -= 1
        kept.append(start)
    return kept if kept[-1] == n - 1 else [*kept, n - 1]


def backward(n: int, states: int) -> Iterator[Keep | Back | Drop]:
    """What the backward sweep of n steps does, in order; the states of `first_kept` are there already."""
    kept = set(first_kept(n, states))
    todo: list[Any] = [(0, n, states)]
    while todo:
        part = todo.pop()
        if type(part) is Drop:
            yield part
            continue
        start, stop, states = part
        if states == 1 or stop - start == 1:
            for at in range(stop - 1, start - 1, -1):
                if at == n - 1 and at > start:
                    yield from (Back(at, at), Drop(at))
                else:
                    yield Back(start, at)
            continue
        middle = start + _left(stop - start, states)
        if middle in kept:
            kept.discard(middle)
        else:
            yield Keep(start, middle)
        todo += [(start, middle, states), Drop(middle), (middle, stop, states - 1)]
