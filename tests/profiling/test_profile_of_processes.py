"""`spmd.profile` under mpiexec and torchrun: one file, whose bytes are those of the ledgers."""

from __future__ import annotations

import json
import sys

import pytest

from tests.launch import PROGRAMS, TORCHRUN, launch, mpiexec
from tests.profiling.trace_format import collectives, read_trace

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python"),
]


def run(kind, folder, python=sys.executable):
    ended = launch(PROGRAMS / "profiled.py", kind, str(folder), python=python)
    assert ended.returncode == 0, ended
    return ended


def ledgers(folder):
    return [json.loads((folder / f"ledger{k}.json").read_text()) for k in range(4)]


def test_digits(tmp_path):
    run("digits", tmp_path)
    trace = read_trace(tmp_path / "trace.json")
    assert [path.name for path in sorted(tmp_path.glob("trace*"))] == ["trace.json"]
    about = trace["otherData"]
    assert about["processes"] == 4
    assert about["left_out"] == []
    assert "one host" in about["clock"]
    records = ledgers(tmp_path)
    for k, record in enumerate(records):
        assert sum(e["args"]["bytes"] for e in collectives(trace, pid=k)) == record["bytes"] > 0
        assert record["rows"] == records[0]["rows"]
        assert record["table"].splitlines()[1:-2] == records[0]["table"].splitlines()[1:-2]
    lines = {e["args"]["line"].rpartition("/")[2].split(":")[0] for e in collectives(trace)}
    assert lines == {"digits.py"}
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {f"worker {2 * d + m} (data={d}, model={m})" for d in (0, 1) for m in (0, 1)} <= names
    # All four are in a sum over both axes, or of one of them, at the same time: their clocks agree.
    starts = {k: min(e["ts"] for e in collectives(trace, pid=k)) for k in range(4)}
    ends = {k: max(e["ts"] + e["dur"] for e in collectives(trace, pid=k)) for k in range(4)}
    assert max(starts.values()) < min(ends.values())


@pytest.mark.parametrize(
    "python", [pytest.param(sys.executable, id="mpi"), pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.torch)]
)
def test_replays(tmp_path, python):
    run("jitted", tmp_path, python)
    trace = read_trace(tmp_path / "trace.json")
    for k, record in enumerate(ledgers(tmp_path)):
        own = collectives(trace, pid=k)
        assert sum(e["args"]["bytes"] for e in own) == 5 * record["bytes"]
        assert sum(e["args"]["messages"] for e in own) == 5 * record["messages"]
        maps = [e for e in trace["traceEvents"] if e.get("cat") == "map" and e["pid"] == k]
        assert {e["args"]["step"] for e in maps} == set(range(5))
        assert "clocks:" in record["table"]


def test_a_block_that_raises(tmp_path):
    ended = run("raising", tmp_path)
    assert ended.stdout.count("raised") == 4
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["trace.json", *(f"trace.process{k}.json" for k in (1, 2, 3))]
    for k, name in enumerate(files):
        trace = read_trace(tmp_path / name)
        assert {e["pid"] for e in trace["traceEvents"]} == {k}
        assert trace["otherData"]["merged"] is False
        assert collectives(trace)


def test_clocks_of_several_hosts_are_compared(tmp_path):
    run("clocks", tmp_path)
    trace = read_trace(tmp_path / "trace.json")
    assert "8 exchanges" in trace["otherData"]["clock"]
    assert 0 <= trace["otherData"]["clock_error_us"] < 1e6
    assert {e["pid"] for e in trace["traceEvents"]} == set(range(4))
