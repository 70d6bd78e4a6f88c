"""`spmd.profile` of maps of tensors, with the operations of PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.profiling.torch_operations import TorchOperations
from tests.profiling.trace_format import collectives, read_trace

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_a_slow_mark_does_not_move_the_clock_of_torch():
    operations = object.__new__(TorchOperations)
    operations.marks = [(1.0, 5.0), (5.0, 5.002), (6.0, 6.003)]
    marks = [(3.9e6, 10.0), (4.0009e6, 200.0), (5.0015e6, 500.0)]
    assert operations._origin(marks) == pytest.approx(1.0, abs=1e-3)


def test_operations_of_torch_have_tracks_of_their_own(tmp_path):
    import spmd.bridge.torch as spt

    def body(w, x):
        return spmd.psum((x @ w).square().sum(), "x")

    f = spt.map(body, in_specs=(P(), P("x")), out_specs=P())
    w = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).requires_grad_()
    x = torch.arange(21.0, dtype=torch.float64).reshape(7, 3)
    with spmd.Mesh(x=2, transport="local"):
        with spmd.ledger() as log:
            f(w, x).backward()
        with spmd.profile(tmp_path / "trace.json", torch=True) as profile:
            f(w, x).backward()
    trace = read_trace(tmp_path / "trace.json")
    threads = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    operations = [e for e in trace["traceEvents"] if e.get("cat") == "torch"]
    assert {"aten::mm", "aten::sum"} <= {e["name"] for e in operations}
    assert all(threads[e["tid"]].startswith("torch, thread ") for e in operations)
    # Torch's clock is that of the other tracks: products are within the maps.
    maps = [e for e in trace["traceEvents"] if e.get("cat") == "map"]
    start, end = min(e["ts"] for e in maps), max(e["ts"] + e["dur"] for e in maps)
    products = [e for e in operations if e["name"] == "aten::mm"]
    assert all(start - 1e3 <= e["ts"] <= end + 1e3 for e in products)
    for tid, name in threads.items():
        if name.startswith("worker "):
            worker = int(name.split()[1])
            assert sum(e["args"]["bytes"] for e in collectives(trace, tid=tid)) == log.workers[worker].bytes
    rows = {row.name: row for row in profile.rows() if row.kind == "torch"}
    assert rows["aten::mm"].times == len(products)
    assert np.isfinite(rows["aten::mm"].seconds)
    assert {row.direction for row in log.rows()} == {"forward", "backward"}
    assert len({row.line for row in log.rows()}) == 1  # a backward row has the line of the forward call
