"""Modules whose parameters lie split over processes train as on one worker, alone and with a plan."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import spmd
from spmd import P
from spmd.bridge import torch as spt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bridge.torch.plans.plain_models import GPT
from bridge.torch.plans.test_parallelize import SEQUENCE, train, words
from bridge.torch.sharding.sharded_models import Block, assert_trained, serial, sharded
from data_parallel_cases import drawn

torch.set_default_dtype(torch.float64)
SIZE = int(sys.argv[1])
for name, unit in (("net", Block), ("text", "gpt.blocks.*")):
    expected = serial(name)

    def body(name=name, unit=unit, expected=expected):
        assert_trained(sharded(name, SIZE, spt.worker_index("data"), unit=unit), expected)

    for check in (True, False):
        spt.map(body, (), None, mesh=spmd.Mesh(data=SIZE), check=check)()

args = (words(5, 7), words(5, 7))
whole = drawn(GPT(), 1)
losses = train(whole, args, 3)


def planned():
    split = spt.shard_parameters(spt.parallelize(drawn(GPT(), 1), SEQUENCE), "data", unit="blocks.*")
    own = train(split, [spt.put(x, P("data")) for x in args], 3)
    assert max(abs(a - b) for a, b in zip(own, losses, strict=True)) < 1e-10
    for key, value in spt.state_dict(split).items():
        torch.testing.assert_close(value, whole.state_dict()[key], rtol=0, atol=1e-10)


spt.map(planned, (), None, mesh=spmd.Mesh(data=2, model=SIZE // 2))()
print("sharded modules hold", flush=True)
