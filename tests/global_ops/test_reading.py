"""Arrays that are not in memory: of memory maps and of objects with slices each process reads its own blocks only."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from global_cases import Stored
from process_cases import each_engine, ended_well

import spmd
from spmd import P
from spmd.errors import LayoutError, SpecError


def hold(monkeypatch, *workers: int) -> None:
    """Let this process be one of several, which holds these workers only."""
    monkeypatch.setattr(spmd.Mesh, "local_workers", property(lambda mesh: workers))


def layouts(shape: tuple[int, ...], mesh: spmd.Mesh) -> list:
    uneven = spmd.Layout(shape, P("x"), mesh.axes, [(shape[0], *[0] * (mesh.axes["x"] - 1)), None])
    grid = spmd.Layout.grid(shape, (1, 1), mesh.axes, [mesh.size - 1])
    return [P(), P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), uneven, grid]


@pytest.mark.parametrize("sides", [(1, 1), (2, 1), (3, 1), (2, 2), (5, 1), (3, 2)])
def test_each_distinct_block_is_read_once(sides):
    a = np.random.default_rng(0).random((7, 4)).astype(np.float32)
    with spmd.Mesh(x=sides[0], y=sides[1]) as mesh:
        for how in layouts(a.shape, mesh):
            stored = Stored(a)
            x = spmd.put(stored, how)
            np.testing.assert_array_equal(x.numpy(), a, strict=True)
            assert x.layout == mesh.layout(a.shape, how)
            wanted = [x.layout.slices(w) for w in range(mesh.size) if x.layout.owners[w] == w]
            wanted = [box for box in wanted if all(s.stop > s.start for s in box)]
            assert stored.reads == wanted
            assert sum(np.prod([s.stop - s.start for s in box], dtype=int) for box in stored.reads) == a.size


@pytest.mark.parametrize("worker", range(4))
def test_a_process_reads_its_own_blocks_only(worker, monkeypatch):
    mesh = spmd.Mesh(x=2, y=2)
    hold(monkeypatch, worker)
    a = np.arange(21).reshape(7, 3)
    for how in layouts(a.shape, mesh):
        stored = Stored(a)
        x = spmd.put(stored, how, mesh)
        box = x.layout.slices(worker)
        assert stored.reads == ([box] if x.layout.positions(worker) and x.blocks[worker].size else [])
        np.testing.assert_array_equal(x.blocks[worker], a[box], strict=True)


def test_numbers_trees_and_like():
    with spmd.Mesh(x=3):
        number = spmd.put(Stored(np.array(2.5)), P())
        assert number.item() == 2.5
        tree = {"x": Stored(np.ones((4, 2))), "y": [np.arange(3)]}
        placed = spmd.put(tree, {"x": P("x"), "y": P()})
        assert (placed["x"].spec, placed["y"][0].spec) == (P("x", None), P(None))
        like = spmd.put(Stored(np.ones((4, 2))), like=placed["x"])
        assert like.layout == placed["x"].layout
        stored = Stored(np.ones((4, 2)))
        assert np.asarray(stored, like=placed["x"]).layout == placed["x"].layout
        assert len(stored.reads) == 3


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_memory_maps(tmp_path, mode, order):
    a = np.asarray(np.random.default_rng(0).random((7, 4)), order=order)
    np.save(tmp_path / "a.npy", a)
    mapped = np.load(tmp_path / "a.npy", mmap_mode=mode)
    assert isinstance(mapped, np.memmap)
    with spmd.Mesh(x=2, y=2) as mesh:
        for how in layouts(a.shape, mesh):
            x = spmd.put(mapped, how)
            np.testing.assert_array_equal(x.numpy(), a, strict=True)
            assert not any(np.shares_memory(block, mapped) for block in x.blocks.values())


def resident(path) -> int:
    """The bytes of a mapped file that this process has in memory."""
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                inside = str(path) in line
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps says what is in memory")
@pytest.mark.parametrize("worker", [0, 2, 3])
def test_of_a_memory_map_only_the_own_block_is_loaded(tmp_path, worker, monkeypatch):
    path, rows = tmp_path / "large", 1 << 14
    mapped = np.memmap(path, np.float64, "w+", shape=(rows, 512))  # 64 MiB, of which no page is in memory
    mesh = spmd.Mesh(x=4)
    hold(monkeypatch, worker)
    assert resident(path) < 1 << 20
    x = spmd.put(mapped, P("x"), mesh)
    assert x.blocks[worker].shape == (rows // 4, 512)
    block = mapped.nbytes >> 2
    # The kernel may reclaim pages at any time: half of the block shows that `resident` sees what is read.
    assert block // 2 <= resident(path) < block + (4 << 20)


class Nothing:
    """No array, and not sliceable."""


class Sized:
    """Neither: it has a shape and a dtype, and no slices."""

    shape, dtype = (3,), np.dtype(float)


class Wrong(Stored):
    """It gives other blocks than it is asked for."""

    def __getitem__(self, index):
        return self.data


def test_what_is_neither_an_array_nor_sliceable_is_an_error():
    with spmd.Mesh(x=2):
        for bad in (Nothing(), Sized()):
            with pytest.raises(
                LayoutError, match=r"spmd\.put: argument x\n.*\n  needed: .*or an object with shape, dtype"
            ):
                spmd.put(bad, P())
        with pytest.raises(LayoutError, match=r"spmd\.put: argument x\['a'\]\n"):
            spmd.put({"a": Nothing()}, P())
        with pytest.raises(LayoutError, match=r"spmd\.put: argument x\n  got: +a block of shape \[4\].*\n.*\[2\]"):
            spmd.put(Wrong(np.ones(4)), P("x"))
        with pytest.raises(LayoutError, match=r"spmd\.put: argument x\n.*\n  needed: .*text has no sums"):
            spmd.put(Stored(np.array(["a", "b"])), P("x"))
        with pytest.raises(SpecError, match=r"spmd\.put: argument spec\n"):
            spmd.put(Stored(np.ones(4)), P("x", "x2"))
        with pytest.raises(SpecError, match=r"spmd\.put: argument spec\n"):
            spmd.put(Stored(np.ones(4)), P(None, "x"))


@each_engine
def test_processes_read_their_own_blocks(python):
    assert ended_well("reading.py", python=python, n=3, timeout=60) == "right\n"
