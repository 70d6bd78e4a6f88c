"""A trace of sharded parameters: the next unit is fetched, and gradients are summed, while a unit computes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mpi_programs import torch_gathering as program  # noqa: E402
from process_cases import each_engine, ended_well  # noqa: E402

from tests.profiling.trace_format import collectives, read_trace  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]


def spans(events, function):
    """When collectives of a function start and end, each in order."""
    own = [(e["ts"], e["args"].get("phase")) for e in events if e["name"] == function]
    return [t for t, phase in own if phase != "end"], [t for t, phase in own if phase == "end"]


def check_order(path, under_way=True):
    """Each worker starts to gather a unit before the one before it computes, forward and backward, and to sum gradients
    before the next unit computes. under_way: that ends only after that unit has begun to compute."""
    found = read_trace(path)
    tracks = sorted({(e["pid"], e["tid"]) for e in collectives(found)})
    assert len(tracks) == 2
    units = program.LAYERS
    for pid, tid in tracks:
        events = sorted(collectives(found, pid=pid, tid=tid), key=lambda e: e["ts"])
        lines = {e["args"]["line"] for e in events if e["name"] == "shard_parameters"}
        assert len(lines) == 1
        assert lines.pop().endswith(" in step")
        by_kind = {
            (operator, direction): [
                e for e in events if (e["args"]["operator"], e["args"]["direction"]) == (operator, direction)
            ]
            for operator in ("AllGather", "ReduceScatter")
            for direction in ("forward", "backward")
        }
        forward, _ = spans(by_kind["AllGather", "forward"], "all_gather")
        backward, _ = spans(by_kind["ReduceScatter", "backward"], "psum_scatter")
        assert len(forward) == len(backward) == units
        for (starts, ends), marks, first in (
            (spans(by_kind["AllGather", "forward"], "shard_parameters"), forward, 1),
            (spans(by_kind["AllGather", "backward"], "shard_parameters"), backward, 1),
            (spans(by_kind["ReduceScatter", "backward"], "shard_parameters"), backward[1:], 0),
        ):
            assert len(starts) == units
            each = list(zip(starts[first:], marks, strict=False))
            assert len(each) == units - 1
            assert all(start < mark for start, mark in each)
            if under_way:
                assert all(mark < end for mark, end in zip(marks, ends[first:], strict=False))


@each_engine
def test_units_are_fetched_and_summed_while_one_computes(python, tmp_path):
    """By messages, as between hosts."""
    ended_well("by_messages.py", "1", "torch_gathering.py", "trace", str(tmp_path), python=python, n=2)
    check_order(tmp_path / "trace.json")


def test_virtual_workers_start_as_processes_do(tmp_path):
    program.trace(tmp_path, "local")
    check_order(tmp_path / "trace.json")
