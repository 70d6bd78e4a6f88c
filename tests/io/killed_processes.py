"""Save twice under mpiexec; kill some of the processes in the second save.

    mpiexec -n 2 python killed_processes.py FOLDER VICTIMS SHARE

VICTIMS: the ranks that die, such as 01. SHARE: after how large a part of their places.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from injected import Place, injected, places_of
from killed_saves import values
from mpi4py import MPI

import spmd
from spmd import P
from spmd.io import writing

writing.FILE_BYTES, writing.SLAB_BYTES, writing.SHARED_MIN = 200, 100, 100


def save(folder: Path, k: int) -> None:
    with spmd.Mesh(x=2):
        spmd.save(folder, {"arrays": {n: spmd.put(x, P("x")) for n, x in values(k).items()}, "k": k})


def main(base: Path, victims: str, share: float) -> None:
    folder, rank = base / "checkpoint", MPI.COMM_WORLD.rank
    save(folder, 0)
    places = places_of(lambda: save(folder, 1))
    last = int(share * len(places)) if str(rank) in victims else -1

    def act(place: Place) -> None:
        if place.commits:
            (base / "committed").touch()
        if place.number == last:
            os.kill(os.getpid(), signal.SIGKILL)

    MPI.COMM_WORLD.Barrier()
    with injected(act):
        save(folder, 2)
    print("not killed")


main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
