"""Programs of collectives, drawn at random, in which one worker parts ways. Arguments: how many, and the seed.

Each has to end with an error that names the worker, on all of them, and the next map has to be right.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path

import numpy as np

import spmd
from spmd import P
from spmd.errors import MismatchError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a program it stands beside, not in, the package
from mpi_programs.parting import draw_call, execute, spoil

MESHES = [spmd.Mesh(x=4), spmd.Mesh(x=2, y=2)]


def main(count: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    drawn, slowest = 0, 0.0
    for mesh in MESHES:  # Processes start seconds apart on a busy machine.
        mesh.transport.share(mesh.run(lambda worker: None).results)
    for _ in range(count):
        mesh = rng.choice(MESHES)
        axes = tuple(mesh.axes)
        usual = [draw_call(rng, list(axes)) for _ in range(rng.randrange(1, 6))]
        other, culprit = spoil(rng, usual, list(axes)), rng.randrange(mesh.size)
        if other == usual:
            continue
        drawn += 1

        def body(worker, usual=usual, other=other, culprit=culprit):
            for call in other if worker.index == culprit else usual:
                execute(call)

        started = time.monotonic()
        try:
            outcome = mesh.run(body, tracked=False)
            mesh.transport.share(dict.fromkeys(outcome.results))
        except MismatchError as error:
            said = str(error)
        else:
            raise AssertionError(f"no error: {usual} and on {mesh.describe(culprit)} {other}")
        slowest = max(slowest, time.monotonic() - started)
        assert mesh.describe(culprit) in said, (said, usual, other, culprit)
        assert len(set(re.findall(r"worker \d", said))) >= 2, said
        assert "parting.py:" in said, said
        right = spmd.map(lambda x, axes=axes: spmd.psum(x[0], axes), P(axes), P(), mesh=mesh)(np.arange(4.0))
        assert float(right) == 6.0
    return {"drawn": drawn, "slowest": slowest}


if __name__ == "__main__":
    found = main(*map(int, sys.argv[1:]))
    if spmd.is_main():
        print(json.dumps(found))
