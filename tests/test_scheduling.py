"""Which scheduler `auto` comes to: lockstep for short work, threads for long, and what was sooner for that between."""

from __future__ import annotations

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

import spmd
from spmd import P, mapped_body, scheduler_choice
from spmd.kernels import cpu
from spmd.kernels.parallel import split_work
from spmd.scheduler_choice import SchedulerTrial
from spmd.transport.call import ONE_BY_ONE
from spmd.transport.handles import Outcome

ROWS = P("x")
X = np.random.default_rng(0).standard_normal((11, 4))


def close(found, want):
    np.testing.assert_allclose(found, want, rtol=1e-12)


def four_cores(monkeypatch, long: float, sure: float) -> None:
    """There are four; threads may be sooner from `long` seconds between waits on, and are sure to be from `sure`."""
    monkeypatch.setattr(scheduler_choice, "usable_cores", lambda: 4)
    monkeypatch.setattr(scheduler_choice, "_SEGMENT_MIN", long)
    monkeypatch.setattr(scheduler_choice, "_SEGMENT_CERTAIN", sure)


def test_auto_settles_on_lockstep_for_short_work_and_threads_for_long(monkeypatch):
    four_cores(monkeypatch, 0.02, 0.02)

    @spmd.map(in_specs=ROWS, out_specs=P())
    def short(x):
        return spmd.psum(x.sum(), "x")

    @spmd.map(in_specs=ROWS, out_specs=P())
    def long(x):
        time.sleep(0.1)
        return spmd.psum(x.sum(), "x")

    with spmd.Mesh(x=2, scheduler="auto") as mesh:
        assert "lockstep for" not in spmd.info()
        for _ in range(2):
            close(short(X), X.sum())
            close(long(X), X.sum())
            spmd.grad(short)(X)
        text = spmd.info()
    assert "lockstep for run of spmd.map of short" in text
    assert "threads for run of spmd.map of long" in text
    assert "lockstep for forward of spmd.map of short" in text
    assert "lockstep for backward of spmd.map of short" in text
    assert len(mesh.chosen) == 4
    with spmd.Mesh(x=2, scheduler="threads") as fixed:
        short(X)
        assert not fixed.chosen
        assert "scheduler     threads" in spmd.info()


def test_auto_chooses_for_each_shape_anew(monkeypatch):
    four_cores(monkeypatch, 0.02, 0.02)
    seen = []
    with spmd.Mesh(x=2, scheduler="auto") as mesh:
        run = type(mesh).run
        monkeypatch.setattr(
            type(mesh), "run", lambda self, body, **kw: (seen.append(kw["scheduler"]), run(self, body, **kw))[1]
        )
        mapped = spmd.map(lambda x: (time.sleep(0.02 * x.shape[1]), x)[1], ROWS, ROWS)
        for a in (X, X, X, X[:, :0], X[:, :0], X):
            mapped(a)
    # Nobody waits in it.
    assert seen == ["lockstep", ONE_BY_ONE, "threads", "lockstep", ONE_BY_ONE, "threads"]


def test_auto_does_not_go_by_a_first_run_that_is_slow(monkeypatch):
    """What it imports and compiles is no work of the body."""
    four_cores(monkeypatch, 0.02, 0.02)
    with spmd.Mesh(x=2, scheduler="auto") as mesh:
        left = [0.1, 0.1]
        mapped = spmd.map(lambda x: (left and time.sleep(left.pop()), x)[1], ROWS, ROWS)
        mapped(X)
        assert not mesh.chosen
        mapped(X)
        assert set(mesh.chosen.values()) == {"lockstep"}


@pytest.mark.parametrize(("cores", "chosen"), [(4, "lockstep"), (1, "threads")])
def test_auto_counts_what_all_cores_do_for_nothing(cores, chosen, monkeypatch):
    """In lockstep they copy what is large together, so threads would not be sooner there."""
    copy = split_work._copy
    monkeypatch.setattr(split_work, "_copy", lambda *args: (time.sleep(0.3), copy(*args)))
    monkeypatch.setattr(split_work, "part_bytes", lambda: 1 << 20)
    monkeypatch.setattr("spmd.transport.local.lockstep.usable_cores", lambda: cores)
    four_cores(monkeypatch, 0.06, 0.06)
    x = np.arange(1 << 20, dtype=float).reshape(-1, 1 << 10)
    with spmd.Mesh(x=2, scheduler="auto") as mesh:
        # There is no room for so much around a block: it is copied.
        mapped = spmd.map(lambda x: spmd.halo_exchange(x, ROWS, 100), ROWS, ROWS)
        for _ in range(2):
            assert mapped(x).shape == (1224, 1024)
        assert set(mesh.chosen.values()) == {chosen}


def sums_that_last(monkeypatch, seconds: float) -> list:
    """Sums of blocks take so long, with nobody who helps. Gives a list that grows with each."""
    combine, made = cpu.combine, []

    def slow(*args, **kwargs):
        made.append(time.sleep(seconds))
        return combine(*args, **kwargs)

    monkeypatch.setattr(cpu, "combine", slow)
    monkeypatch.setattr(split_work, "part_bytes", lambda: 1 << 40)
    return made


@pytest.mark.parametrize("ledgers", [0, 1])  # with one of them all goes by the verbs
@pytest.mark.parametrize("verb", [spmd.psum, partial(spmd.psum_scatter, tiled=True)])
def test_what_one_worker_makes_for_all_is_nothing_that_threads_would_do_sooner(verb, ledgers, monkeypatch):
    """The sum of large blocks takes long: under threads it would, too."""
    four_cores(monkeypatch, 0.02, 0.02)
    made = sums_that_last(monkeypatch, 0.1)

    def body(x):
        for _ in range(3):
            verb(x, "x")

    x = np.ones((4, split_work.SPLIT_MIN // 4), np.float32)
    with spmd.Mesh(x=2, scheduler="auto") as mesh, ExitStack() as stack:
        for _ in range(ledgers):
            stack.enter_context(spmd.ledger())
        mapped = spmd.map(body, ROWS, None)
        for _ in range(3):
            mapped(x)
        assert set(mesh.chosen.values()) == {L}
    assert len(made) == 9 * (1 if verb is spmd.psum else 2)


def test_what_is_made_for_one_group_of_several_counts(monkeypatch):
    """Under threads all groups' sums are made at once."""
    four_cores(monkeypatch, 0.02, 0.02)
    made = sums_that_last(monkeypatch, 0.2)

    def body(x):
        for _ in range(3):
            spmd.psum(x, "x")

    x = np.ones((2, 4 * split_work.SPLIT_MIN // 4), np.float32)
    with spmd.Mesh(x=2, y=4, scheduler="auto") as mesh:
        mapped = spmd.map(body, P("x", "y"), None)
        for _ in range(2):
            mapped(x)
        assert set(mesh.chosen.values()) == {T}
    assert len(made) == 2 * 3 * 4


def test_split_work_counts_once():
    with split_work.SplitScope(lambda: 2) as scope:
        started = time.perf_counter()
        split_work.call_for_all(lambda: (time.sleep(0.05), split_work.run([partial(time.sleep, 0.1)] * 2)), 0.5)
        elapsed = time.perf_counter() - started
    assert 0.1 + 0.025 <= scope.seconds <= elapsed - 0.025


def calls(seconds: dict[str, list[float]], monkeypatch, cores: int = 4, size: int = 2) -> list[str]:
    """The schedulers of the calls until one is chosen, which is the last; a call takes the next of these seconds."""
    monkeypatch.setattr(scheduler_choice, "usable_cores", lambda: cores)
    mesh, trial, ran = spmd.Mesh(x=size), SchedulerTrial(), []
    left = {name: iter(times) for name, times in seconds.items()}
    while trial.chosen is None:
        ran.append(trial.next)
        trial.learn(ran[-1], Outcome({}, next(left[ran[-1]]), 0), mesh)
    return [*ran, trial.chosen]


L, T = "lockstep", "threads"


@pytest.mark.parametrize(
    ("lockstep", "threads", "ran"),
    [
        ([700e-6], [], [L, L]),
        ([1.0, 700e-6], [], [L, L, L]),  # it imported something
        ([1.0, 10e-3], [], [L, L, T]),
        ([1.0, 1e-3, 1e-3, 1e-3], [1.8e-3, 1.6e-3, 1.7e-3], [L, L, T, L, T, L, T, L]),
        ([1.0, 1e-3, 1e-3, 1e-3], [9e-3, 0.6e-3, 2e-3], [L, L, T, L, T, L, T, T]),
        ([1.5e-3, 90e-3, 1.5e-3, 2e-3], [3e-3, 3e-3, 3e-3], [L, L, T, L, T, L, T, L]),  # a busy moment in the second
        ([1.0, *[1e-3] * 8], [9e-3, 1.2e-3, 1.1e-3, *[0.9e-3] * 5], [L, *[L, T] * 8, T]),  # neither much sooner
        ([1.0, *[1e-3] * 8], [1.2e-3] * 8, [L, *[L, T] * 8, L]),
        ([1.0, *[1e-3] * 8], [1.4e-3, 1.2e-3, 1.1e-3, 0.6e-3], [L, *[L, T] * 4, T]),  # they shared a core
        ([1.0, 90e-3], [], [L, L, T]),
        ([1.0, 5e-3, 0.7e-3], [2e-3], [L, L, T, L, L]),  # it turns out to be short
        ([0.9e-3, 2e-3, 2e-3, 2e-3], [0.5e-3, 1e-3, 1e-3], [L, L, T, L, T, L, T, T]),
    ],
)
def test_what_is_tried_and_what_stays(lockstep, threads, ran, monkeypatch):
    assert calls({L: lockstep, T: threads}, monkeypatch) == ran


def test_where_threads_have_no_core_of_their_own_nothing_is_tried(monkeypatch):
    assert calls({L: [1.0]}, monkeypatch, cores=1) == [L, L]
    assert calls({L: [1.0]}, monkeypatch, size=1) == [L, L]


def schedulers(monkeypatch, seconds, count: int) -> list[str]:
    """The schedulers of so many calls. seconds: of a call, by its number and its scheduler."""
    monkeypatch.setattr(scheduler_choice, "usable_cores", lambda: 4)
    mesh, trial, ran = spmd.Mesh(x=2), SchedulerTrial(), []
    for number in range(count):
        ran.append(trial.next)
        trial.learn(ran[-1], Outcome({}, seconds(number, ran[-1]), 0), mesh)
    return ran


@pytest.mark.parametrize("better", [L, T])
@pytest.mark.parametrize("busy", [range(12), range(40, 60), range(60, 75), range(100, 200)])
def test_a_busy_moment_does_not_decide_for_good(busy, better, monkeypatch):
    """The machine is busy whenever the better scheduler is timed in these calls."""

    def seconds(number: int, scheduler: str) -> float:
        return (2e-3 if scheduler == better else 3e-3) * (4 if scheduler == better and number in busy else 1)

    ran = schedulers(monkeypatch, seconds, 1000)
    assert ran[500:].count(better) >= 490


@pytest.mark.parametrize(("better", "most"), [(L, 40), (T, 40)])
def test_the_slower_scheduler_is_timed_ever_more_rarely(better, most, monkeypatch):
    seconds = lambda _, scheduler: 1e-3 if scheduler == better else 2e-3
    ran = schedulers(monkeypatch, seconds, 10_000)
    other = [number for number, scheduler in enumerate(ran) if scheduler != better]
    assert len(other) <= most
    assert sum(number >= 1000 for number in other) <= most // 2
    assert max(other) > 5000


def test_a_choice_follows_work_that_changes(monkeypatch):
    seconds = lambda number, scheduler: 1e-3 if (scheduler == L) == (number < 300) else 2e-3
    ran = schedulers(monkeypatch, seconds, 1000)
    assert set(ran[200:220]) == {L}
    assert set(ran[900:]) == {T}


def test_two_slow_calls_at_first_do_not_choose_threads_for_good(monkeypatch):
    """Of work that is short, which a later call in lockstep shows."""
    ran = schedulers(monkeypatch, lambda number, scheduler: 90e-3 if number < 2 else 0.5e-3, 200)
    assert ran[2] == T
    assert set(ran[50:]) == {L}


def test_short_work_is_not_timed_again(monkeypatch):
    assert set(schedulers(monkeypatch, lambda number, scheduler: 0.5e-3, 1000)) == {L}


def test_both_schedulers_are_tried_where_it_is_not_clear(monkeypatch):
    """And every call gives the same bits, whichever it is."""
    four_cores(monkeypatch, 0.0, 1e9)
    with spmd.Mesh(x=2, scheduler="auto") as mesh:
        step = spmd.value_and_grad(spmd.map(lambda x: spmd.psum(np.sum(np.tanh(x) ** 2), "x"), ROWS, P()))
        laid_out = spmd.put(X, ROWS)
        found = [[a.numpy().tobytes() for a in step(laid_out)] for _ in range(20)]
        assert len(mesh.chosen) == 1
    assert all(f == found[0] for f in found)


def test_a_trial_is_made_by_threads_of_the_user_together(monkeypatch):
    four_cores(monkeypatch, 0.0, 1e9)
    learn, ran = SchedulerTrial.learn, []
    monkeypatch.setattr(
        SchedulerTrial, "learn", lambda self, name, *rest: (ran.append(name), learn(self, name, *rest))[1]
    )
    mesh = spmd.Mesh(x=2, scheduler="auto")
    mapped = mesh.map(lambda x: spmd.psum(x.sum(), "x"), ROWS, P())
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(mapped, [X] * 100):
            close(found, X.sum())
    assert len(mesh.chosen) == 1
    assert min(ran.count(L), ran.count(T)) >= 3


def test_calls_that_come_at_once_do_not_stand_for_the_other_scheduler(monkeypatch):
    """Eight that asked before any had ended were all in lockstep."""
    monkeypatch.setattr(scheduler_choice, "usable_cores", lambda: 4)
    trial, mesh = SchedulerTrial(), spmd.Mesh(x=2)
    for name in [trial.next for _ in range(8)]:
        assert name == L
        trial.learn(name, Outcome({}, 1e-3 * 2, 0), mesh)
    assert trial.chosen is None
    for _ in range(3):
        assert trial.next == T
        trial.learn(T, Outcome({}, 3e-3, 0), mesh)
    assert trial.chosen == L


def body_to_copy(x):
    return spmd.psum(x.sum(), "x")


def test_a_map_that_has_chosen_can_be_copied_and_pickled():
    mapped = spmd.map(body_to_copy, ROWS, P())
    with spmd.Mesh(x=2):
        close(mapped(X), X.sum())
        close(copy.deepcopy(mapped)(X), X.sum())
        (trial,) = mapped.trials.values()
        while trial.chosen is None:  # at once, unless the machine is busy
            mapped(X)
    assert pickle.loads(pickle.dumps(trial)).chosen == trial.chosen


def test_where_the_scheduler_is_given_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(mapped_body, "SchedulerTrial", None)
    mesh = spmd.Mesh(x=2, scheduler="threads")
    close(mesh.map(lambda x: spmd.psum(x.sum(), "x"), ROWS, P())(X), X.sum())
