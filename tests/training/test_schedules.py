"""Schedules of pipelines, as data: nothing here runs a stage."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from spmd.errors import SpecError
from spmd.training.pipelines.schedules import SCHEDULES, Action, Schedule, schedule_of
from spmd.training.pipelines.simulation import alive, makespan

SIZES = [
    (name, workers, microbatches, virtual)
    for name in SCHEDULES
    for workers, microbatches in itertools.product(range(1, 7), (1, 2, 3, 5, 8, 13))
    for virtual in ((1, 2, 3) if name == "interleaved" else (1,))
]
each = pytest.mark.parametrize("name", SCHEDULES)


def schedules(name: str) -> list[Schedule]:
    return [schedule_of(*sizes) for sizes in SIZES if sizes[0] == name]


@each
def test_each_stage_takes_each_microbatch_once(name):
    for s in schedules(name):
        kinds = ["forward", "backward", *(["weight"] if name == "zero_bubble" else [])]
        want = {Action(kind, stage, k) for kind in kinds for stage in range(s.stages) for k in range(s.microbatches)}
        found = [a for own in s.actions for a in own]
        assert len(found) == len(want), s
        assert set(found) == want, s
        assert all(s.worker_of(a.stage) == w for w, own in enumerate(s.actions) for a in own), s


@each
def test_an_action_comes_after_what_it_takes(name):
    for s in schedules(name):
        times = {"forward": 1.0, "backward": 2.0, "weight": 0.5}
        started = s.starts(lambda a, times=times: times[a.kind])
        for action, begin in started.items():
            assert all(started[a] + times[a.kind] <= begin for a in s.requires(action)), (s, action)


@each
def test_workers_that_move_values_in_the_global_order_never_wait_for_each_other(name):
    """Each worker goes through the transfers in order. Before it sends it does its actions up to the one that gives the
    value: all that these take has come by then."""
    for s in schedules(name):
        done, come, places = set(), set(), [0] * s.workers
        for transfer in s.transfers:
            own = s.actions[transfer.source]
            while transfer.giver not in done:
                action = own[places[transfer.source]]
                for a in s.requires(action):
                    assert a in (done if s.worker_of(a.stage) == transfer.source else come), (s, transfer, action)
                done.add(action)
                places[transfer.source] += 1
            come.add(transfer.giver)
        assert len(come) == len(s.transfers) == len({*s.transfers}), s


@each
def test_values_of_a_stream_are_taken_in_the_order_in_which_they_are_sent(name):
    for s in schedules(name):
        streams = {(t.source, t.target, t.stream) for t in s.transfers}
        for source, target, stream in streams:
            sent = [
                t.microbatch
                for a in s.actions[source]
                if (t := s.transfer_of(a)) is not None and (t.target, t.stream) == (target, stream)
            ]
            takers = [t.taker for t in s.transfers if (t.source, t.target, t.stream) == (source, target, stream)]
            taken = [a.microbatch for a in s.actions[target] if a in takers]
            assert sent == taken == [a.microbatch for a in takers], s


def test_how_many_microbatches_are_kept():
    for name, workers, microbatches, virtual in SIZES:
        s = schedule_of(name, workers, microbatches, virtual)
        for w in range(workers):
            kept = alive(s, w)
            if name == "gpipe":
                assert kept == microbatches
            elif name == "1f1b":
                assert kept == min(workers - w, microbatches)
            elif name == "zero_bubble":
                assert kept <= workers
            else:
                ahead = 2 * (workers - 1 - w) + (virtual - 1) * workers
                assert kept <= ahead + 1


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (2.0, 2.0), (3.0, 1.0)])
def test_the_ideal_time_is_that_of_the_textbooks(forward, backward):
    """m + p - 1 times forward and backward; with v stages on a worker m + (p - 1) / v; without that of the weights in
    the bubble for ZB-H1, if all parts take equal times."""
    both = forward + backward
    for name, workers, microbatches, virtual in SIZES:
        s = schedule_of(name, workers, microbatches, virtual)
        if name in ("gpipe", "1f1b"):
            assert makespan(s, forward, backward) == pytest.approx((microbatches + workers - 1) * both)
        elif name == "interleaved" and microbatches % workers == 0:
            assert makespan(s, forward, backward) == pytest.approx((microbatches * virtual + workers - 1) * both)
        elif name == "zero_bubble" and microbatches >= workers:
            assert makespan(s, forward, 2 * forward, forward) == pytest.approx(
                (3 * microbatches + workers - 1) * forward
            )


def test_a_bubble_is_never_longer_than_that_of_1f1b():
    for name, workers, microbatches, virtual in SIZES:
        if name in ("interleaved", "zero_bubble"):
            plain = makespan(schedule_of("1f1b", workers, microbatches), virtual, 2 * virtual)
            assert makespan(schedule_of(name, workers, microbatches, virtual), 1, 2, 1) <= plain


def test_a_schedule_of_times_that_differ_waits_for_the_slowest():
    s = schedule_of("1f1b", 2, 3)
    times = {0: {"forward": 1.0, "backward": 2.0}, 1: {"forward": 3.0, "backward": 4.0}}
    assert makespan(s, 0, 0, of=lambda a: times[a.stage][a.kind]) == 1 + 3 * 7 + 2


def test_what_there_is_no_schedule_for():
    for arguments, text in (
        (("pipedream", 2, 4), "schedule"),
        (("gpipe", 2, 0), "microbatches"),
        (("1f1b", 2, 4, 2), "interleaved"),
    ):
        with pytest.raises(SpecError, match=text):
            schedule_of(*arguments)


def test_the_table_of_the_page():
    """docs/how_to/pipelines.md compares schedules of 4 workers and 8 microbatches."""
    page = (Path(__file__).parents[2] / "docs/how_to/pipelines.md").read_text("utf-8")
    for name, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
        schedule = schedule_of(name, 4, 8, virtual)
        whole = makespan(schedule, 1 / virtual, 2 / virtual, 1 / virtual)
        kept = " ".join(f"{alive(schedule, worker) / virtual:g}" for worker in range(4))
        assert f'| `"{name}"` | {whole:g} | {1 - 24 / whole:.0%} | {kept} |' in page
