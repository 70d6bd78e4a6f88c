"""Parameters gathered by processes: the steps of one worker, and a trace that shows what goes on meanwhile."""

from __future__ import annotations

import pytest
from mpi_programs import gathering
from process_cases import each_engine, ended_well

from tests.profiling.trace_format import collectives, read_trace


@each_engine
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(["data=4"], id="data=4", marks=pytest.mark.full),
        pytest.param(["data=2", "model=2"], id="data=2 model=2"),
    ],
)
def test_ten_steps_of_adam_are_those_of_one_worker(python, axes):
    assert "as one worker" in ended_well("gathering.py", "steps", *axes, python=python, n=4)


def check_order(path, under_way=True):
    """In the trace of each worker: before a layer is computed, forward or backward, the gather of the next one has
    started, and backward the sum of the gradients of the one before. under_way: they end after the layer."""
    found = read_trace(path)
    tracks = sorted({(e["pid"], e["tid"]) for e in collectives(found)})
    assert len(tracks) == 2
    layers = gathering.LAYERS
    for pid, tid in tracks:
        own = sorted(collectives(found, pid=pid, tid=tid), key=lambda e: e["ts"])

        def phases(function, operator, direction, own=own):
            """When these collectives start, and when they end, each in the order of the starts."""
            events = [
                e
                for e in own
                if e["args"]["line"].endswith(f" in {function}")
                and (e["args"]["operator"], e["args"]["direction"]) == (operator, direction)
            ]
            phase = [e["args"].get("phase") for e in events]
            starts = [e["ts"] for e, p in zip(events, phase, strict=True) if p != "end"]
            return starts, [e["ts"] for e, p in zip(events, phase, strict=True) if p == "end"]

        def check(starts, ends, marks, count):
            """The first so many collectives start, each before its layer, and end after it."""
            assert len(starts) >= count
            assert all(start < mark for start, mark in zip(starts[:count], marks, strict=False))
            if under_way:
                assert len(ends) == len(starts)
                assert all(mark < end for mark, end in zip(marks, ends[:count], strict=False))

        marks, _ = phases("marked", "AllGather", "forward")
        back, _ = phases("marked", "ReduceScatter", "backward")
        assert len(marks) == len(back) == layers
        starts, ends = phases("loss", "AllGather", "forward")
        assert len(starts) == layers
        check(starts[1:], ends[1:], marks, layers - 1)
        starts, ends = phases("loss", "AllGather", "backward")
        assert len(starts) == layers - 1
        check(starts, ends, back, layers - 1)
        starts, ends = phases("loss", "ReduceScatter", "backward")
        assert len(starts) == layers
        check(starts, ends, back[1:], layers - 1)


@each_engine
def test_the_next_unit_is_fetched_while_one_computes(python, tmp_path):
    """By messages, as between hosts."""
    ended_well("by_messages.py", "1", "gathering.py", "trace", str(tmp_path), python=python, n=2)
    check_order(tmp_path / "trace.json")


@each_engine
@pytest.mark.full
def test_the_next_unit_is_fetched_before_one_computes(python, tmp_path):
    """On one host, where a worker reads the memory of others when it starts to gather."""
    ended_well("gathering.py", "trace", str(tmp_path), python=python, n=2)
    check_order(tmp_path / "trace.json", under_way=False)


def test_virtual_workers_start_as_processes_do(tmp_path):
    gathering.trace(tmp_path, "local")
    check_order(tmp_path / "trace.json")
