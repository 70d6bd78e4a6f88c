"""Save trees of every kind of leaf, and load them on other meshes."""

from __future__ import annotations

import numpy as np

import spmd
from spmd import P


def test_a_tree_comes_back_on_another_mesh(tmp_path):
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(7, 5)), rng.normal(size=3)
    with spmd.Mesh(x=2, y=2):
        spmd.save(tmp_path / "checkpoint", {"w": spmd.put(w, P("x", "y")), "b": b, "epoch": 7})
    with spmd.Mesh(z=3):
        loaded = spmd.load(tmp_path / "checkpoint", specs={"w": P(None, "z"), "b": None, "epoch": None})
    assert loaded["w"].spec == P(None, "z")
    np.testing.assert_array_equal(loaded["w"].numpy(), w)
    np.testing.assert_array_equal(loaded["b"], b)
    assert loaded["epoch"] == 7


def test_no_leaf_is_printed(tmp_path, monkeypatch):
    """The `repr` of a global array assembles it."""

    def fail(self):
        raise AssertionError("printed")

    monkeypatch.setattr(spmd.PartitionedArray, "__repr__", fail)
    with spmd.Mesh(x=2):
        tree = {"x": spmd.ones(3, spec=P("x"))}
        spmd.save(tmp_path, tree)
        spmd.load(tmp_path, like=tree)
