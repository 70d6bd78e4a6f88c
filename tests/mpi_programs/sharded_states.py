"""Optimisers whose states lie split, on processes: the steps of one worker. A checkpoint goes on on another mesh."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training import sharded_cases as cases

import spmd
from spmd import optim

folder = sys.argv[1]
plain = optim.adamw(0.05)
expected = cases.serial(plain)
optimizer = optim.shard(plain, "data")
for axes in ({"data": 4}, {"data": 2, "model": 2}):
    mesh = spmd.Mesh(**axes)
    for options in ({}, {"jit": True}):
        cases.assert_close(cases.trained(optimizer, mesh, **options), expected)
first, second = spmd.Mesh(data=4), spmd.Mesh(model=2, data=2)
_, params, state = cases.trained(optimizer, first, 4)
spmd.save(folder, (params, state))
with second:
    params = spmd.put(cases.params_of(), cases.param_specs(second.axes))
    params, state = spmd.load(folder, like=(params, optimizer.init(params)))
losses, *rest = cases.trained(optimizer, second, 6, params, state)
cases.assert_close((losses, *rest), (expected[0][4:], *expected[1:]))
if spmd.is_main():
    print("alike")
