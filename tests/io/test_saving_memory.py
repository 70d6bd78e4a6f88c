"""What saving and loading need besides the tree, by the peak of the process's memory."""

from __future__ import annotations

import pytest
from launch import run_python

PROGRAM = """
import sys
import numpy as np, spmd
from spmd import P

folder, kind = sys.argv[1:]
MIB, SIZE = 1 << 20, 100


def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))


def peak(step):
    # The highest resident memory that a step reaches above that before it, in MiB.
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    result = step()
    return result, resident("VmHWM") - before


with spmd.Mesh(x=2):
    spmd.save(folder + "/imports", spmd.zeros(4, spec=P("x")))
    spmd.load(folder + "/imports", specs=P("x"))
    whole = np.random.default_rng(0).random((SIZE * MIB // 8 // 1024, 1024))
    tree = {"transposed": {"a": whole.T}, "bare": {"a": whole}}.get(kind)
    if tree is None:
        tree = {"a": spmd.put(whole, P("x"))}
        del whole
    if kind == "background":
        manager = spmd.io.CheckpointManager(folder)
        manager.save(0, {"b": 1})
        manager.wait()
        print(peak(lambda: (manager.save(1, tree), manager.wait()))[1] - SIZE)
    elif kind == "load":
        spmd.save(folder, tree)
        print(peak(lambda: spmd.load(folder, like=tree))[1] - SIZE)
    elif kind == "another layout":
        spmd.save(folder, tree)
        print(peak(lambda: spmd.load(folder, specs=P(None, "x")))[1] - SIZE)
    else:
        print(peak(lambda: spmd.save(folder, tree))[1])
"""


@pytest.mark.host("counts the memory of the host")
@pytest.mark.parametrize("kind", ["global", "bare", "transposed", "background", "load", "another layout"])
def test_peak_above_the_tree(tmp_path, kind):
    """In the background one copy of what is written comes on top, in loading the result."""
    ended = run_python("-c", PROGRAM, str(tmp_path), kind, SPMD_FSYNC="0")
    assert ended.returncode == 0, str(ended)
    assert float(ended.stdout) <= 64, str(ended)
