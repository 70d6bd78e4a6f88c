"""Saves of two processes that fail in one of them: both raise, the old checkpoint stays, the next save works.

mpiexec -n 2 python failing_processes.py FOLDER [leaves | loads]
"""

from __future__ import annotations

import errno
import os
import random
import sys
from pathlib import Path

import numpy as np
from injected import Place, injected, places_of
from killed_saves import check_files, loaded, values
from mpi4py import MPI

import spmd
from spmd import P
from spmd.errors import CheckpointError
from spmd.io import writing

writing.FILE_BYTES, writing.SLAB_BYTES, writing.SHARED_MIN = 200, 100, 100
WORLD = MPI.COMM_WORLD


def save(folder: Path, k: int, kind: str = "outside") -> None:
    with spmd.Mesh(x=2):
        if kind == "body":
            spmd.map(lambda _: spmd.save(folder, {"arrays": values(k), "k": k}), P(), None)(np.zeros(1))
        else:
            spmd.save(folder, {"arrays": {n: spmd.put(x, P("x")) for n, x in values(k).items()}, "k": k})


def all_raise(call, kinds: type[BaseException] | tuple, *words: str) -> None:
    """The call raises on both, with one of these words on each."""
    try:
        call()
    except kinds as error:
        outcome = next((word for word in words if word in str(error)), None) if words else "raised"
        outcome = outcome or f"{type(error).__name__}: {error}"
    else:
        outcome = "no error"
    outcomes = WORLD.allgather(outcome)
    assert all(o in words if words else o == "raised" for o in outcomes), outcomes


def faults(folder: Path, fault: BaseException, kind: str, tries: int) -> None:
    """Raised at some of the places of either process."""
    draw = random.Random(f"{fault} {kind}")
    save(folder, 0, kind)
    total = WORLD.allgather(len(places_of(lambda: save(folder, 1, kind))))
    for k in range(2, 2 * tries + 2, 2):
        victim = k // 2 % 2
        number = draw.randrange(total[victim])
        hit: list[Place] = []

        def act(place: Place, number=number if WORLD.rank == victim else -1, hit=hit) -> None:
            if place.number == number or place.commits:
                hit.append(place._replace(args=tuple(map(str, place.args))))
            if place.number == number:
                raise fault

        raised = ""
        try:
            with injected(act):
                save(folder, k, kind)
        except (CheckpointError, KeyboardInterrupt) as error:
            raised = type(error).__name__
        hits = [place for places in WORLD.allgather(hit) for place in places]
        raised = WORLD.allgather(raised)
        assert all(raised) or not any(raised), raised
        assert all(raised) or any(place.call == "unlink" for place in hits), hits
        committed = any(place.commits for place in hits)
        assert loaded(folder) == (k if committed else k - 1), (hits, raised)
        WORLD.Barrier()
        save(folder, k + 1, kind)
        assert loaded(folder) == k + 1
        check_files(folder)
        WORLD.Barrier()


def paths(base: Path) -> None:
    """Paths that are not the same place for both."""
    own = base / f"rank {WORLD.rank}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    all_raise(lambda: save(Path("mine"), 1), CheckpointError, "/mine, and ")
    with spmd.Mesh(x=2):
        all_raise(lambda: spmd.load("mine", specs=P()), CheckpointError, "without manifest.json", "no such folder")
        all_raise(lambda: spmd.save(base / "checkpoint", {"k": WORLD.rank}), CheckpointError, "the leaf 'k'")
        layouts = {"arrays": P("x") if WORLD.rank else P(), "k": None}
        all_raise(lambda: spmd.load(base / "checkpoint", specs=layouts), CheckpointError, "the same layout on all")
        calls = (lambda: spmd.load(base / "checkpoint", specs=P())), (lambda: save(base / "checkpoint", 1))
        all_raise(calls[WORLD.rank], CheckpointError, "the same calls in the same order")
        all_raise(lambda: spmd.save(base / "checkpoint", {}, metadata=WORLD.rank), CheckpointError, "argument metadata")


def leaves(folder: Path) -> None:
    save(folder, 0)
    if WORLD.rank == 1:
        raise RuntimeError("I leave")
    save(folder, 1)


def loads(folder: Path) -> None:
    with spmd.Mesh(x=2):
        for _ in range(150):
            tree = spmd.load(folder, specs={"x": P("x"), "k": None})
            ks = WORLD.allgather([tree["k"], *(x for block in tree["x"].blocks.values() for x in block.tolist())])
            assert len({k for own in ks for k in own}) == 1, ks


def main(base: Path, *what: str) -> None:
    folder = base / "checkpoint"
    if what:
        return {"leaves": leaves, "loads": loads}[what[0]](folder)
    for fault in (OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()):
        for kind in ("outside", "body"):
            faults(folder, fault, kind, 15)
    paths(base)
    print("all is well")
    return None


main(Path(sys.argv[1]), *sys.argv[2:])
