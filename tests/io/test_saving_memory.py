"""How much memory saving and loading take besides the tree, by the account of the system."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_python

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the account of Linux")

SETUP = """
import sys, threading, weakref
from pathlib import Path
import numpy as np
import spmd
from spmd import P

SIDE = 3072
TREE = SIDE * SIDE * 8
LITTLE = TREE // 3  # 24 MiB: less than one of the two blocks


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def peak(run):
    "The most memory that is taken in a call beyond what was taken before, and what the call gives."
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = run()
    return status("VmHWM") - before, result


def tree(layout):
    x = np.ones((SIDE, SIDE)) * np.arange(SIDE)
    if layout == "rows":
        return {"x": x}
    if layout == "transposed":
        return {"x": x.T}
    return {"x": spmd.from_blocks([x[: SIDE // 2], x[SIDE // 2 :]], P("x"), spmd.Mesh(x=2))}


place = sys.argv[1]
manager = spmd.io.CheckpointManager(place + "/run")
small = {"x": np.arange(9.0), "y": spmd.ones(3, spec=P("x"), mesh=spmd.Mesh(x=2))}
manager.save(0, small)
manager.wait()
manager.restore(0, like=small)
spmd.load(place + "/run/step-0")
"""

SAVED = """
for layout in "rows", "transposed", "blocks":
    saved = tree(layout)
    taken, _ = peak(lambda: spmd.save(place + "/one", saved))
    assert taken <= LITTLE, (layout, taken)
"""

HELD = """
def save():
    manager.save(1, saved)
    for thread in threading.enumerate():
        if "step 1" in thread.name:
            thread.join()


for layout in "rows", "transposed", "blocks":
    saved = tree(layout)
    ref = weakref.ref(saved["x"])
    before = status("VmRSS")
    taken, _ = peak(save)
    assert TREE / 2 < taken <= TREE + LITTLE, (layout, taken)
    assert status("VmRSS") - before <= LITTLE, (layout, "the copy is kept after it was written")
    saved = None
    assert ref() is None, layout
"""

LOADED = """
saved = tree("rows")
spmd.save(place + "/one", saved)
for spec in None, P("x"), P(None, "x"):
    loaded = None
    taken, loaded = peak(lambda: spmd.load(place + "/one", specs={"x": spec}, mesh=spmd.Mesh(x=3)))
    assert TREE / 2 < taken <= TREE + LITTLE, (spec, taken)
"""


def check(program: str, tmp_path: Path) -> None:
    # Large arrays get pages of their own, which go back when they are freed.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "SPMD_FSYNC": "0"}
    done = run_python("-c", SETUP + program, tmp_path, timeout=120, **env)
    assert done.returncode == 0, done.stderr


def test_saving_takes_little(tmp_path):
    check(SAVED, tmp_path)


def test_saving_in_the_background_takes_a_copy_until_it_is_written(tmp_path):
    check(HELD, tmp_path)


def test_loading_takes_its_result_and_little_more(tmp_path):
    check(LOADED, tmp_path)
