"""Runs random programs between processes: `first count`, and prints what went wrong as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from random_programs import draw, verdict

import spmd


def main() -> None:
    first, count, size = map(int, sys.argv[1:])
    mesh = spmd.Mesh(x=size)
    (rank,) = mesh.local_workers
    wrong = []
    for seed in range(first, first + count):
        p = draw(seed, processes=size)
        told = verdict(p, mesh, rank)
        if told:
            wrong.append(told)
    every = mesh.transport.share({rank: wrong})
    if rank == 0:
        print(json.dumps([text for texts in every.values() for text in texts][:5]))


if __name__ == "__main__":
    main()
