"""Kill saves of virtual workers, each in a forked process, at their system calls, and look at what is left.

    python killed_saves.py FOLDER KIND PLACES

KIND: "outside" of bodies; "lockstep" or "threads": in a body; "first": nothing was saved there before.
PLACES: how many of them; 0: all.
Prints how many places there were, and how many saves had been committed when they were killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from injected import Place, injected, places_of

import spmd
from spmd import P
from spmd.errors import CheckpointError
from spmd.io import manifest, writing


def values(k: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(k)
    return {"w": rng.normal(size=(7, 5)), "b": rng.normal(size=(4, 3)) * 1j, "i": rng.integers(9, size=11)}


def save(folder: Path, k: int, kind: str) -> None:
    """Save tree k."""
    with spmd.Mesh(x=3, scheduler="threads" if kind == "threads" else "lockstep"):
        if kind in ("lockstep", "threads"):
            spmd.map(lambda _: spmd.save(folder, {"arrays": values(k), "k": k}), P(), None)(np.zeros(1))
        else:
            spmd.save(folder, {"arrays": {n: spmd.put(x, P("x")) for n, x in values(k).items()}, "k": k})


def is_refused(error: CheckpointError) -> bool:
    """Whether another save to the place goes on."""
    return "another process or thread is saving" in str(error)


def save_soon(folder: Path, k: int) -> None:
    """Save tree k as soon as the processes of a job that was ended are gone, and with them their lock."""
    for _ in range(100):
        try:
            save(folder, k, "outside")
            return
        except CheckpointError as error:
            if not is_refused(error):
                raise
            time.sleep(0.05)
    save(folder, k, "outside")


def loaded(folder: Path) -> int:
    """Which tree there is; -1: none. Every entry of it is compared."""
    try:
        tree = spmd.load(folder)
    except CheckpointError as error:
        if "without manifest.json" in str(error) or "no such folder" in str(error):
            return -1
        raise
    expected = values(tree["k"])
    assert {n: x.tobytes() for n, x in tree["arrays"].items()} == {n: x.tobytes() for n, x in expected.items()}
    return tree["k"]


def left(folder: Path) -> set[str]:
    """The files that are there, besides those of the checkpoint."""
    text = (folder / "manifest.json").read_bytes()
    named = {f.name for f in manifest.Manifest.from_bytes(text, folder).files} | {"manifest.json", "save.lock"}
    there = set(os.listdir(folder))
    assert named <= there
    return there - named


def check_files(folder: Path) -> None:
    """There are the files of one checkpoint, and no others."""
    assert not left(folder)


def in_child(act: Callable[[], object]) -> int:
    """The status of a forked process that does something."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def count(folder: Path, kind: str, report: Path) -> None:
    """Write down how many places a save has. None is missed: the interpreter itself lists what changes files."""
    seen = []

    def note(event: str, args: tuple) -> None:
        creates = event == "open" and args[2] & os.O_CREAT
        if (creates or event in ("os.rename", "os.remove", "os.mkdir")) and str(folder.parent) in str(args[0]):
            seen.append(event)

    sys.addaudithook(note)
    places = places_of(lambda: save(folder, 1, kind))
    known = [p for p in places if p.moment == "before" and p.call in ("replace", "unlink", "mkdir")]
    made = [p for p in places if p[1:3] == ("open", "before") and (p.args[1] == "ab" or p.args[1] & os.O_CREAT)]
    assert len(seen) == len(known) + len(made), (seen, known, made)
    report.write_text(str(len(places)))


def killed(folder: Path, kind: str, k: int, number: int, note: Path) -> None:
    """Save until a place. `note` is made when the manifest has been renamed."""

    def act(place: Place) -> None:
        if place.commits:
            note.touch()
        if place.number == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with injected(act):
        save(folder, k, kind)


def after(folder: Path, kind: str, expected: int, k: int) -> None:
    """What must be there after a kill; and the next save, unless k is -1."""
    assert loaded(folder) == expected, (loaded(folder), expected)
    if k >= 0:
        os.environ["SPMD_FSYNC"] = "0"
        save(folder, k, kind)
        assert loaded(folder) == k
        check_files(folder)


def main(base: Path, kind: str, kills: int) -> None:
    writing.FILE_BYTES, writing.SLAB_BYTES, writing.SHARED_MIN = 200, 100, 100
    spmd.save(base / "imports", {"x": np.zeros(3)})
    spmd.load(base / "imports")
    folder, report, draw = base / "checkpoint", base / "places", random.Random(kind)
    # There was a save before the one whose places are counted: it finds the folder, and files to remove.
    assert in_child(lambda: save(folder, 0, kind)) == 0
    another = base / "first" / "checkpoint" if kind == "first" else folder
    assert in_child(lambda: count(another, kind, report)) == 0
    places = range(int(report.read_text()))
    committed, now = 0, 1
    for k, number in enumerate(draw.sample(places, kills or len(places)), start=2):
        note = base / f"committed {k}"
        if kind == "first":
            folder, now = base / f"{k}" / "checkpoint", -1
        status = in_child(partial(killed, folder, kind, 10 * k, number, note))
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, number
        if note.exists():
            committed, now = committed + 1, 10 * k
        # Now and then the next save is killed as well.
        then = -1 if draw.random() < 0.3 else 10 * k + 1
        assert in_child(partial(after, folder, kind, now, then)) == 0, f"after a kill at place {number}"
        now = then if then >= 0 else now
    print(f"{len(places)} places, {k - 1} kills, {committed} after the commit")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
