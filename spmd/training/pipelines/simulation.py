"""How long a schedule takes, and what it keeps: computed from the schedule alone."""

from __future__ import annotations

from collections.abc import Callable

from spmd.training.pipelines.schedules import Action, Schedule

__all__ = ["alive", "makespan"]


def makespan(
    schedule: Schedule,
    forward: float,
    backward: float,
    weight: float = 0.0,
    of: Callable[[Action], float] | None = None,
) -> float:
    """The ideal time of a schedule: where moves take no time, and each action of a stage takes so long.

    weight: the part of `backward` that is for parameters; where the schedule splits it off, the backward action takes
    the rest. of: gives the time of each action in place of these.
    """
    times = {"forward": forward, "backward": backward - weight * schedule.splits_backward, "weight": weight}
    seconds = of or (lambda action: times[action.kind])
    started = schedule.starts(seconds)
    return max(begin + seconds(action) for action, begin in started.items())


def alive(schedule: Schedule, worker: int) -> int:
    """The most microbatches of which a worker keeps what a later backward or weight action needs, over its stages."""
    last = "weight" if schedule.splits_backward else "backward"
    kept = most = 0
    for action in schedule.actions[worker]:
        kept += (action.kind == "forward") - (action.kind == last)
        most = max(most, kept)
    return most
