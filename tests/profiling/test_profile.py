"""`spmd.profile` with virtual workers: the file, the table, and what may not disturb them."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import spmd
from spmd import P, kernels
from spmd.autodiff import array_methods
from spmd.errors import SpecError
from spmd.training.pipelines.schedules import schedule_of
from spmd.transport.call import LEDGERS
from tests.profiling.trace_format import collectives, read_trace

W, X = np.arange(12.0).reshape(3, 4) % 5, np.arange(21.0).reshape(7, 3) % 4
"""Of integers, so that sums are exact; seven rows are uneven blocks, and none on some of eight workers."""


def local_loss(w, x):
    y = x @ w
    return spmd.psum(np.sum(y * y), "x")


def program(jitted=False):
    loss = spmd.map(local_loss, in_specs=(P(), P("x")), out_specs=P())
    return spmd.value_and_grad(spmd.jit(loss) if jitted else loss)


def line_of(text):
    """The line of this file, or of local_loss in it, as rows name it."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(k for k, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.parametrize("scheduler", ["lockstep", "threads", "auto"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_worker_has_a_track_and_its_bytes_are_those_of_the_ledger(tmp_path, scheduler, size):
    step = program()
    with spmd.Mesh(x=size, transport="local", scheduler=scheduler):
        with spmd.ledger() as log, spmd.profile(tmp_path / "trace.json") as profile:
            for _ in range(3):
                value, grad = step(W, X)
        value_without, grad_without = step(W, X)
    assert float(value) == float(value_without) == np.sum((X @ W) ** 2)
    np.testing.assert_array_equal(grad, grad_without)
    trace = read_trace(tmp_path / "trace.json")
    names = {e["args"]["name"]: e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(names) == {"program", *(f"worker {w} (x={w})" for w in range(size))}
    for w in range(size):
        own = collectives(trace, tid=names[f"worker {w} (x={w})"])
        assert sum(e["args"]["bytes"] for e in own) == log.workers[w].bytes
        assert sum(e["args"]["messages"] for e in own) == log.workers[w].messages
        assert {e["args"]["direction"] for e in own} == {"forward", "backward"}
        assert all(e["args"]["wait_us"] + e["args"]["move_us"] <= e["dur"] + 0.01 for e in own)
        maps = [e for e in trace["traceEvents"] if e.get("cat") == "map" and e["tid"] == 1 + w]
        assert len(maps) in (3, 6)  # one or two a step
    assert profile.path == tmp_path / "trace.json"


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_prepared_calls_and_replays_count_as_the_general_way(scheduler, jitted):
    step = program(jitted)
    with spmd.Mesh(x=3, transport="local", scheduler=scheduler):
        with spmd.ledger() as log:
            step(W, X)
        for _ in range(3):
            step(W, X)
        with spmd.profile() as profile:
            for _ in range(5):
                value, _ = step(W, X)
    assert float(value) == np.sum((X @ W) ** 2)
    rows = [row for row in profile.rows() if row.kind == "collective"]
    total = np.mean([record.bytes for record in log.workers.values()])
    assert sum(row.bytes for row in rows) == pytest.approx(5 * total)
    assert {(row.name, row.direction, row.times, row.workers) for row in rows} == {
        ("psum", "forward", 5, 3),
        ("psum", "backward", 5, 3),
    }


def test_rows_name_the_lines_axes_and_directions():
    def body(w, x):
        h = x @ w
        back = spmd.psum(h * 1.0, "y")  # here
        return spmd.mean(back, "x", axis=0)

    f = spmd.map(body, in_specs=(P("y"), P("x", "y")), out_specs=P())
    total = lambda w, x: np.sum(f(w, x))
    with spmd.Mesh(x=2, y=2, transport="local"):
        for context in (spmd.ledger(), spmd.profile()):
            with context as log:
                spmd.value_and_grad(total, argnums=0)(np.ones((4, 3)), np.ones((5, 4)))
            rows = [row for row in log.rows() if row.operator == "Sum" and row.axes == ("y",)]
            assert [row.direction for row in rows] == ["forward"]
            assert rows[0].line == f"{line_of('  # here')} in body"
            assert rows[0].bytes > 0
            assert f"test_profile.py:{line_of('  # here').rpartition(':')[2]} in body" in str(log)
            directions = {row.direction for row in log.rows() if row.operator == "Sum" and row.axes == ("x",)}
            assert directions == {"forward", "backward"}


def test_a_backward_row_has_the_line_of_the_forward_call():
    def body(x):
        y = spmd.all_gather(x, "x", tiled=True)  # gathered
        return spmd.psum(np.sum(y * y), "x")

    f = spmd.map(body, in_specs=P("x"), out_specs=P())
    with spmd.Mesh(x=3, transport="local"), spmd.ledger() as log:
        spmd.value_and_grad(f)(np.arange(7.0))
    backward = [row for row in log.rows() if row.direction == "backward" and row.operator != "Vary"]
    assert [row.line for row in backward] == [f"{line_of('  # gathered')} in body"]
    assert [row.operator for row in backward] == ["ReduceScatter"]
    assert all(row.bytes == row.declared for row in log.rows())
    assert sum(row.bytes for row in log.rows()) == log.bytes
    assert sum(row.messages for row in log.rows()) == log.messages
    assert sum(row.times for row in log.rows()) == sum(log.operators.values())


def test_kernels_and_products_are_shown_and_released(tmp_path):
    from spmd import functions

    plain = kernels.of, array_methods.operators["matmul"].fun
    pooled = spmd.map(lambda x, w: functions.max_pool(functions.conv(x, w), 2), (P(), P()), P())
    local = spmd.map(lambda x, w: np.sum(spmd.softmax_cross_entropy(x @ w, np.zeros(len(x), int))), (P(), P()), P())
    with spmd.Mesh(x=2, transport="local"), spmd.profile(tmp_path / "a.json") as outer:
        with spmd.profile() as inner:
            spmd.value_and_grad(local)(X, W)
            pooled(np.ones((1, 2, 8, 8)), np.ones((2, 2, 3, 3)))
        assert (kernels.of, array_methods.operators["matmul"].fun) != plain
        spmd.value_and_grad(local)(X, W)
        pooled(np.ones((1, 2, 8, 8)), np.ones((2, 2, 3, 3)))
    assert (kernels.of, array_methods.operators["matmul"].fun) == plain
    assert LEDGERS.get() == ()
    times = [{row.name: row.times for row in p.rows() if row.kind == "kernel"} for p in (inner, outer)]
    assert times[0]["matmul"] == 2  # forward, and the gradient of X
    assert times[1] == {name: 2 * count for name, count in times[0].items()}
    assert any("cross_entropy" in name for name in times[0])
    assert {"conv", "max_pool"} <= set(times[0])
    read_trace(tmp_path / "a.json")


def test_a_program_recorded_in_a_profile_is_the_same_program():
    texts = []
    for profiled in (False, True):
        loss = spmd.jit(spmd.map(local_loss, in_specs=(P(), P("x")), out_specs=P()))
        with spmd.Mesh(x=2, transport="local"):
            if profiled:
                with spmd.profile():
                    spmd.value_and_grad(loss)(W, X)
            else:
                spmd.value_and_grad(loss)(W, X)
        texts.append(loss.text())
    assert texts[0] == texts[1]


def test_steps_are_spans_of_the_program(tmp_path):
    step = program()
    with spmd.Mesh(x=2, transport="local"), spmd.profile(tmp_path / "trace.json") as profile:
        for _ in range(4):
            step(W, X)
            profile.step()
    trace = read_trace(tmp_path / "trace.json")
    steps = [e for e in trace["traceEvents"] if e.get("cat") == "step"]
    assert [e["name"] for e in steps] == [f"step {k}" for k in range(4)]
    maps = [e for e in trace["traceEvents"] if e.get("cat") == "map" and e["tid"] == 1]
    assert {e["args"]["step"] for e in maps} == {0, 1, 2, 3}
    for map_event in maps:
        step_event = steps[map_event["args"]["step"]]
        assert step_event["ts"] <= map_event["ts"]
        assert map_event["ts"] + map_event["dur"] <= step_event["ts"] + step_event["dur"] + 0.01
    assert "4 steps of" in str(profile)


def test_what_is_beyond_the_limit_is_counted_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr("spmd.profiling.recording._ROOM", 8)
    step = program()
    with spmd.Mesh(x=2, transport="local"), spmd.profile(tmp_path / "trace.json", limit=10) as profile:
        for _ in range(40):
            step(W, X)
    trace = read_trace(tmp_path / "trace.json")
    for thread in (1, 2):
        assert len([e for e in trace["traceEvents"] if e["tid"] == thread and e["ph"] == "X"]) <= 20  # two phases each
    said = trace["otherData"]["left_out"]
    assert [entry["track"] for entry in said] == ["worker 0 (x=0)", "worker 1 (x=1)"]
    assert all(entry["events"] > 40 and entry["after_seconds"] > 0 for entry in said)
    assert trace["otherData"]["limit_per_worker"] == 10
    assert str(said[0]["events"]) in str(profile)
    assert "limit reached" in str(profile)
    assert {row.times for row in profile.rows() if row.kind == "collective"} == {40}


def test_the_file_is_written_if_the_block_raises(tmp_path):
    step = program()
    profile = spmd.profile(tmp_path / "trace.json")

    def block():
        with spmd.Mesh(x=2, transport="local"), profile:
            step(W, X)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    trace = read_trace(tmp_path / "trace.json")
    assert trace["otherData"]["ended_by"] == "ZeroDivisionError"
    assert collectives(trace)
    assert "ended by ZeroDivisionError" in str(profile)
    assert LEDGERS.get() == ()


def test_a_map_that_raises_ends_its_span(tmp_path):
    def body(x):
        spmd.psum(x, "x")
        raise ArithmeticError("no")

    with spmd.Mesh(x=2, transport="local"), spmd.profile(tmp_path / "trace.json"), pytest.raises(ArithmeticError):
        spmd.map(body, in_specs=P("x"), out_specs=P())(np.arange(4.0))
    trace = read_trace(tmp_path / "trace.json")
    assert len([e for e in trace["traceEvents"] if e.get("cat") == "map"]) >= 1


def test_meshes_share_a_file_with_a_track_for_each_worker(tmp_path):
    total = spmd.map(lambda x: spmd.psum(x, spmd.debug and "x"), in_specs=P("x"), out_specs=P())
    with spmd.profile(tmp_path / "trace.json"):
        for size in (2, 3):
            with spmd.Mesh(x=size, transport="local"):
                total(np.arange(6.0))
        with spmd.Mesh(x=1, y=2, transport="local"):
            total(np.arange(6.0))
    trace = read_trace(tmp_path / "trace.json")
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {
        "program",
        *(f"worker {w} (x={w})" for w in range(3)),
        *(f"worker {w} (x=0, y={w})" for w in (0, 1)),
    }


def test_other_threads_are_not_recorded():
    step = program()
    with spmd.Mesh(x=2, transport="local") as mesh:

        def other():
            with mesh:
                step(W, X)

        with spmd.profile() as profile:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
    assert [row for row in profile.rows() if row.kind == "collective"] == []


def test_collectives_under_way_have_two_phases(tmp_path):
    def body(x):
        return spmd.psum((x, 2 * x), "x")

    f = spmd.map(body, in_specs=P("x"), out_specs=P())
    with spmd.Mesh(x=2, transport="local"), spmd.profile(tmp_path / "trace.json"):
        f(np.arange(4.0))
    trace = read_trace(tmp_path / "trace.json")
    phases = [e["args"].get("phase") for e in collectives(trace, tid=1)]
    assert sorted(phases) == ["end", "end", "start", "start"]
    assert sum(e["args"]["bytes"] for e in collectives(trace, tid=1)) == 2 * 16
    assert [e["ph"] for e in trace["traceEvents"] if e["ph"] in "be" and e["tid"] == 1] == ["b", "e", "b", "e"]


@pytest.mark.parametrize(("limit", "words"), [(0, "at least 1"), (True, "bool True"), (2.5, "float 2.5"), ("x", "'x'")])
def test_wrong_limits_are_refused(limit, words):
    with pytest.raises(SpecError, match=r"spmd\.profile: argument limit") as caught:
        spmd.profile(limit=limit)
    assert words in str(caught.value)


def test_a_file_that_cannot_be_written_is_said_before_the_block_runs(tmp_path):
    with pytest.raises(FileNotFoundError), spmd.profile(tmp_path / "missing" / "trace.json"):
        pytest.fail("the block ran")
    assert LEDGERS.get() == ()


def test_memory_is_a_counter(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("memory is read from /proc")
    with spmd.Mesh(x=2, transport="local"), spmd.profile(tmp_path / "trace.json"):
        program()(W, X)
    counters = [e for e in read_trace(tmp_path / "trace.json")["traceEvents"] if e["ph"] == "C"]
    assert counters
    assert all(e["args"]["bytes"] > 1 << 20 for e in counters)


def test_the_validator_finds_what_is_wrong(tmp_path):
    with spmd.Mesh(x=2, transport="local"), spmd.profile(tmp_path / "trace.json"):
        program()(W, X)
    good = read_trace(tmp_path / "trace.json")

    def broken(change):
        trace = json.loads(json.dumps(good))
        change(trace)
        (tmp_path / "bad.json").write_text(json.dumps(trace))
        with pytest.raises((AssertionError, KeyError)):
            read_trace(tmp_path / "bad.json")

    spans = [k for k, e in enumerate(good["traceEvents"]) if e["ph"] == "X"]
    broken(lambda t: t.pop("displayTimeUnit"))
    broken(lambda t: t["traceEvents"][spans[0]].pop("dur"))
    broken(lambda t: t["traceEvents"][spans[0]].update(ts="0"))
    broken(lambda t: t["traceEvents"][spans[0]].update(ph="Z"))
    broken(lambda t: t["traceEvents"][spans[0]].update(dur=float("nan")))
    broken(lambda t: t["traceEvents"][spans[0]].update(tid=77))
    broken(lambda t: t["traceEvents"].pop(next(k for k, e in enumerate(t["traceEvents"]) if e["ph"] == "e")))


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_a_ledger_has_one_row_for_each_line_of_global_arrays(scheduler):
    x, w = np.random.default_rng(0).normal(size=(5, 4)), np.ones((4, 3))
    with spmd.Mesh(a=2, b=2, transport="local", scheduler=scheduler):
        x, w = spmd.put(x, P("a", "b")), spmd.put(w, P("b"))
        with spmd.ledger() as log:
            total = ((x @ w) ** 2).sum()
            float(total)
    rows = log.rows()
    assert rows
    assert all(row.times > 0 and "test_profile.py" in row.line for row in rows)
    assert len({(row.line, row.operator, row.axes, row.direction) for row in rows}) == len(rows)
    assert sum(row.times for row in rows) == sum(log.operators.values())


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_a_pipeline_shows_the_actions_of_its_stages(tmp_path, scheduler):
    """On the tracks of their workers, in the order of the schedule, with the kernels and collectives in them."""

    def stage(w, x):
        return x @ w + spmd.pmean(np.mean(x), "x")

    mean = lambda y: spmd.pmean(np.mean(y), "x")
    step = spmd.training.pipeline([stage] * 3, microbatches=4, schedule="1f1b", loss=mean)
    body = spmd.map(lambda x: step.value_and_grad([np.eye(3)] * 3, x)[0], in_specs=P("x"), out_specs=P())
    with spmd.Mesh(stage=3, x=2, transport="local", scheduler=scheduler), spmd.profile(tmp_path / "a.json") as profile:
        body(np.concatenate([X, X[:1]]))
    events = read_trace(tmp_path / "a.json")["traceEvents"]
    for w in range(6):
        own = [e for e in events if e.get("cat") == "stage" and e["tid"] == 1 + w]
        found = [(e["args"]["action"], e["args"]["stage"], e["args"]["microbatch"]) for e in own]
        assert found == [tuple(a) for a in schedule_of("1f1b", 3, 4).actions[w // 2]]
        assert own[0]["name"] == f"forward of stage {w // 2}"
        kernels = [e for e in events if e.get("cat") == "kernel" and e["tid"] == 1 + w]
        assert kernels
        for e in kernels:
            assert any(a["ts"] <= e["ts"] and e["ts"] + e["dur"] <= a["ts"] + a["dur"] + 1e-3 for a in own)
    rows = {row.name: row for row in profile.rows() if row.kind == "stage"}
    assert {*rows} == {f"{kind} of stage {s}" for kind in ("forward", "backward") for s in range(3)}
    assert all((row.workers, row.times) == (2, 4) for row in rows.values())
    assert "forward of stage 2" in str(profile)
