"""Schedules of pipelines as data: which action each worker runs when, and in which order values move.

A pipeline has `workers` along its axis and `virtual` stages on each: stage s is on worker s modulo `workers`. Nothing
here runs a stage. `simulation.py` says how long a schedule takes.

Sources: Huang et al., GPipe (2019); Narayanan et al., PipeDream-Flush and interleaved 1F1B (2021); Qi et al., Zero
Bubble Pipeline Parallelism, ZB-H1 (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple

from spmd.errors import SpecError, describe
from spmd.spellings import closest

__all__ = ["SCHEDULES", "Action", "Kind", "Schedule", "Transfer", "check_options", "schedule_of"]

_WHERE = "spmd.training.pipeline"

Kind = Literal["forward", "backward", "weight"]
"""forward: the stage on a microbatch. backward: the gradient of its input, and that of its parameters unless there are
actions for these. weight: the gradient of its parameters."""


class Action(NamedTuple):
    """What a worker does at one time: an action of a stage on a microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}" + f" of {self.stage}"


class Transfer(NamedTuple):
    """A value that goes from a worker to another: the output of a stage (forward), or the gradient of its input
    (backward). stage: that which gives it. source, target: the workers."""

    kind: Kind
    stage: int
    microbatch: int
    source: int
    target: int

    @property
    def taker(self) -> Action:
        """The action that takes it."""
        return Action(self.kind, self.stage + (1 if self.kind == "forward" else -1), self.microbatch)

    @property
    def giver(self) -> Action:
        """The action that gives it."""
        return Action(self.kind, self.stage, self.microbatch)

    @property
    def stream(self) -> str:
        """Values of one stream are taken in the order in which they are sent."""
        return f"{self.kind} {self.stage}"


Lists = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """The actions of each worker, in order.

    name: "gpipe", "1f1b", "interleaved" or "zero_bubble". workers: along the axis. virtual: the stages on each.
    """

    name: str
    workers: int
    microbatches: int
    virtual: int
    actions: Lists

    @property
    def stages(self) -> int:
        """The number of all stages."""
        return self.workers * self.virtual

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of parameters are actions of their own."""
        return self.name == "zero_bubble"

    def worker_of(self, stage: int) -> int:
        """The worker that has a stage."""
        return stage % self.workers

    def requires(self, action: Action) -> Iterator[Action]:
        """The actions whose results an action takes."""
        kind, stage, k = action
        if kind == "forward" and stage > 0:
            yield Action("forward", stage - 1, k)
        elif kind == "backward":
            yield Action("forward", stage, k)
            if stage < self.stages - 1:
                yield Action("backward", stage + 1, k)
        elif kind == "weight":
            yield Action("backward", stage, k)

    def transfer_of(self, action: Action) -> Transfer | None:
        """What goes to another worker after an action; None where its result stays on the worker, or is needed by no
        other stage."""
        kind, stage, k = action
        ahead = {"forward": stage + 1, "backward": stage - 1, "weight": -1}[kind]
        if not 0 <= ahead < self.stages or self.worker_of(ahead) == self.worker_of(stage):
            return None
        return Transfer(kind, stage, k, self.worker_of(stage), self.worker_of(ahead))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All that moves, in the order in which it is taken where all actions take equal times.

        Workers that go through this order, each with its own actions in between, never wait for each other in a cycle:
        what an action takes comes before all that depends on the action.
        """
        started = self._started
        found = [t for a in chain(*self.actions) if (t := self.transfer_of(a)) is not None]
        return tuple(sorted(found, key=lambda t: (started[t.taker], t.stage, t.microbatch)))

    @cached_property
    def _started(self) -> dict[Action, float]:
        """When each action starts, if all take equal times."""
        return self.starts(lambda action: 1.0)

    def starts_before(self, a: Action, b: Action) -> bool:
        """Whether a starts before b where all actions take equal times. Then a needs nothing of b."""
        return self._started[a] < self._started[b]

    def follows(self, later: Action, action: Action) -> bool:
        """Whether `later` is `action`, or an action of the same worker after it."""
        same = self.worker_of(later.stage) == self.worker_of(action.stage)
        return same and self._started[later] >= self._started[action]

    def starts(self, seconds: Callable[[Action], float]) -> dict[Action, float]:
        """When each action starts, where each takes so long and moves take no time.

        Raises ValueError where the workers would wait for each other.
        """
        ends: dict[Action, float] = {}
        started: dict[Action, float] = {}
        free, places = [0.0] * self.workers, [0] * self.workers
        going = True
        while going:
            going = False
            for w, own in enumerate(self.actions):
                while places[w] < len(own) and all(a in ends for a in self.requires(own[places[w]])):
                    action = own[places[w]]
                    started[action] = max([free[w], *(ends[a] for a in self.requires(action))])
                    ends[action] = free[w] = started[action] + seconds(action)
                    places[w] += 1
                    going = True
        if any(place < len(own) for place, own in zip(places, self.actions, strict=True)):
            raise ValueError(f"{self}: the workers wait for each other in {places}")
        return started

    def __str__(self) -> str:
        return f"{self.name} of {self.workers} workers, {self.microbatches} microbatches, {self.virtual} stages on each"


def _pairs(stage: int, microbatches: int, warmup: int) -> list[Action]:
    """`warmup` forward actions, then one forward and one backward in turn, then what is left."""
    forward = [Action("forward", stage, k) for k in range(microbatches)]
    backward = [Action("backward", stage, k) for k in range(microbatches)]
    return [*forward[:warmup], *_in_turn(forward[warmup:], backward)]


def _in_turn(first: list[Action], second: list[Action]) -> list[Action]:
    return [a for pair in zip_longest(first, second) for a in pair if a is not None]


def _gpipe(workers: int, microbatches: int, virtual: int) -> Lists:
    """All forward actions, then all backward ones."""
    return tuple(tuple(_pairs(s, microbatches, microbatches)) for s in range(workers))


def _one_forward_one_backward(workers: int, microbatches: int, virtual: int) -> Lists:
    """As early as possible a backward action: stage s keeps at most `workers - s` microbatches."""
    return tuple(tuple(_pairs(s, microbatches, min(workers - 1 - s, microbatches))) for s in range(workers))


def _interleaved(workers: int, microbatches: int, virtual: int) -> Lists:
    """Groups of `workers` microbatches go through the stages of a worker one after the other.

    Where the last group is smaller, it is planned as a whole one, and what is too much left out: what remains waits for
    nothing else.
    """
    groups = [range(k, k + workers) for k in range(0, microbatches, workers)]
    lists = []
    for w in range(workers):
        forward, backward = (
            [(c * workers + w, k) for group in groups for c in chunks for k in group]
            for chunks in (range(virtual), range(virtual)[::-1])
        )
        forward = [Action("forward", *place) for place in forward]
        backward = [Action("backward", *place) for place in backward]
        ahead = 2 * (workers - 1 - w) + (virtual - 1) * workers
        warmup = min(len(forward), ahead if virtual > 1 else workers - 1 - w)
        planned = [*forward[:warmup], *_in_turn(forward[warmup:], backward)]
        lists.append(tuple(a for a in planned if a.microbatch < microbatches))
    return tuple(lists)


def _zero_bubble(workers: int, microbatches: int, virtual: int) -> Lists:
    """ZB-H1: as 1F1B, with the gradients of parameters later, in the time in which a worker would wait."""
    lists = []
    for s in range(workers):
        actions: list[Action] = []
        for action in _pairs(s, microbatches, min(workers - 1 - s, microbatches)):
            actions.append(action)
            if action.kind == "backward" and action.microbatch >= s:
                actions.append(Action("weight", s, action.microbatch - s))
        late = range(max(0, microbatches - s), microbatches)
        lists.append((*actions, *(Action("weight", s, k) for k in late)))
    return tuple(lists)


SCHEDULES: dict[str, Callable[[int, int, int], Lists]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}
"""By name, a function from the numbers of workers, microbatches and stages per worker to the actions of each worker."""


def check_options(name: Any, microbatches: Any, where: str = _WHERE) -> None:
    """Raise SpecError for the name of no schedule, and for less than one microbatch."""
    if name not in SCHEDULES:
        raise SpecError.at(
            where,
            argument="schedule",
            got=repr(name),
            need=f"one of {', '.join(map(repr, SCHEDULES))}",
            mend=f'schedule="{closest(name, SCHEDULES, "1f1b")}"',
        )
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise SpecError.at(
            where,
            argument="microbatches",
            got=describe(microbatches),
            need="their number, an integer of at least 1",
            mend="microbatches=8",
        )


@lru_cache(maxsize=64)
def schedule_of(name: str, workers: int, microbatches: int, virtual: int = 1, where: str = _WHERE) -> Schedule:
    """The schedule of this name for so many workers, microbatches, and stages on each worker.

    Raises SpecError for another name, for less than one of them, and for several stages on each worker in a schedule
    other than "interleaved".
    """
    check_options(name, microbatches, where)
    if workers * virtual < 1:
        raise SpecError.at(
            where, argument="stages", got=describe(workers * virtual), need="at least 1", mend="stages=2"
        )
    if virtual > 1 and name != "interleaved":
        raise SpecError.at(
            where,
            argument="stages",
            got=f"{workers * virtual} stages on {workers} workers, by the schedule {name!r}",
            need=f"{workers} stages: one on each worker",
            mend='schedule="interleaved" runs several stages on each worker',
        )
    return Schedule(name, workers, microbatches, virtual, SCHEDULES[name](workers, microbatches, virtual))
