"""Save trees of every kind of leaf, and load them on other meshes."""

from __future__ import annotations

import re
import time
from enum import IntEnum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import CheckpointError


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


TREE = {"a": {"b": np.arange(3.0), "c": 1}, "z": np.ones((4, 4)), "s": "x"}


@pytest.mark.parametrize("like", [7, None, np.ones(2)])
def test_a_leaf_that_is_a_node_in_the_checkpoint_is_missing(tmp_path, like):
    spmd.save(tmp_path, TREE)
    assert spmd.load(tmp_path, {"a": like}, strict=False)["a"] is like
    with pytest.raises(CheckpointError, match="missing in the checkpoint: 'a'"):
        spmd.load(tmp_path, {"a": like})


class _WithState:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(
    "tree",
    [
        {"a.b": 1, "a": {"b": {"c": 2}}},
        {"a.b": {"c": 2}, "a": {"b": 1}},
        {"a.b": {"c": 1}, "a": {"b": {"d": 2}}},
        {"a.b": _WithState({"c": 1}), "a": {"b": _WithState({"d": 2})}},
        {"a.b": _WithState(1), "a": {"b": {}}},
        {1: 1, "1": 2},
        {"": {"a": 1}},
    ],
)
def test_two_nodes_of_one_name_are_refused(tmp_path, tree):
    with pytest.raises(CheckpointError, match="two nodes with the name"):
        spmd.save(tmp_path, tree)


@pytest.mark.parametrize("state", [5, None, np.arange(3), {}, [], {"value": 1}, {"a": {"b": 1}}])
@pytest.mark.parametrize("at_root", [False, True])
def test_states_of_any_structure(tmp_path, state, at_root):
    old, new = _WithState(state), _WithState("other")
    spmd.save(tmp_path, old if at_root else {"x": old})
    spmd.load(tmp_path, like=new if at_root else {"x": new})
    np.testing.assert_equal(new.state, state)


def test_classes_and_generators_of_another_kind(tmp_path):
    with pytest.raises(CheckpointError, match="the leaf 'x'"):
        spmd.save(tmp_path, {"x": _WithState})
    spmd.save(tmp_path, {"x": np.random.default_rng(0)})
    with pytest.raises(CheckpointError, match="the object 'x'"):
        spmd.load(tmp_path, like={"x": np.random.Generator(np.random.MT19937(0))})


def test_many_names_take_no_longer_each(tmp_path):
    """Of 8,000 leaves by 8,000 names: comparing each with each would take minutes."""
    tree = {f"w{k}": k for k in range(8000)}
    spmd.save(tmp_path, tree)
    start = time.perf_counter()
    assert spmd.load(tmp_path, names=list(tree)) == tree
    assert spmd.load(tmp_path, dict.fromkeys(tree, 0), names=list(tree)) == tree
    assert time.perf_counter() - start < 20


def test_names_with_brackets_and_iterators_of_names(tmp_path):
    spmd.save(tmp_path, {"w[0]": 1, "w0": 2, "z": 3})
    assert spmd.load(tmp_path, names="w[0]") == {"w[0]": 1, "w0": 2}
    assert spmd.load(tmp_path, names=(name for name in ("z", "w0"))) == {"w0": 2, "z": 3}


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"names": 3}, "names"),
        ({"names": [3]}, "names"),
        ({"names": "nothing", "like": TREE}, "names"),
        ({"rename": str}, "rename"),
        ({"rename": {}, "like": TREE}, "rename"),
        ({"rename": {}.get, "like": TREE}, "rename"),
        ({"specs": P(), "like": TREE}, "specs"),
        *(
            ({"names": "z", "convert": True, "like": {"z": like}}, "like, the leaf 'z'")
            for like in (np.ones((4, 4), str), np.ones((4, 4), object), np.zeros((4, 4), "M8[s]"), np.ndarray, b"")
        ),
    ],
)
def test_options_that_would_do_nothing_or_harm(tmp_path, options, argument):
    spmd.save(tmp_path, TREE)
    with pytest.raises(CheckpointError, match=f"argument {argument}"):
        spmd.load(tmp_path, **options)
    with pytest.raises(spmd.errors.MeshError, match="argument mesh"):
        spmd.load(tmp_path, mesh="x")


def test_another_byte_order(tmp_path):
    """It is no other dtype: values are saved, and loaded in the order of the machine."""
    x = np.arange(3.0).astype(">f8")
    spmd.save(tmp_path, x)
    loaded = spmd.load(tmp_path, like=x)
    assert loaded.dtype == np.float64
    np.testing.assert_array_equal(loaded, x)


class _Level(IntEnum):
    LOW = 1


class _Name(str):
    pass


@pytest.mark.parametrize(
    ("leaf", "mend"),
    [
        (range(3), r"list\(x\)"),
        (bytearray(b"x"), r"bytes\(x\)"),
        (memoryview(b"x"), r"bytes\(x\)"),
        (_Level.LOW, r"int\(x\)"),
        (_Name("a"), r"str\(x\)"),
        (np.str_("a"), r"str\(x\)"),
        (Fraction(1, 2), r"float\(x\)"),
        ({1, 2}, r"list\(x\)"),
        (Path("x"), r"str\(x\)"),
        pytest.param(10**5000, "to_bytes", id="huge"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(tmp_path, leaf, mend):
    with pytest.raises(CheckpointError, match=f"(?s)the leaf 'x'.*mend:.*{mend}"):
        spmd.save(tmp_path, {"x": leaf})


def test_a_manifest_of_another_program_is_not_replaced(tmp_path):
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"name": "app"}')
    with pytest.raises(CheckpointError, match="another program"):
        spmd.save(tmp_path, {"x": 1})
    assert manifest.read_text() == '{"name": "app"}'
    manifest.write_text("")  # of a system that crashed
    spmd.save(tmp_path, {"x": 1})
    assert spmd.load(tmp_path) == {"x": 1}


def test_places_that_are_no_folder(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    for path in (tmp_path, ""):
        with pytest.raises(CheckpointError, match="argument path"):
            spmd.save(path, {"x": 1})


def _in_bodies(f, processes=2):
    """f(worker) on each worker, and the errors."""
    errors = []

    def body(x):
        try:
            f(spmd.worker_index("x"))
        except CheckpointError as error:
            errors.append(str(error))
        return x

    with spmd.Mesh(x=processes):
        spmd.map(body, P("x"), P("x"))(spmd.ones(processes, spec=P("x")))
    return errors


@pytest.mark.parametrize(
    ("trees", "got"),
    [
        (({"a": 1, "b": 2}, {"b": 2, "a": 1}), "a dict of 'a', 'b' on .* and a dict of 'b', 'a' on"),
        (({"a": [1]}, {"a": (1,)}), "a list of 0 on .* and a tuple of 0 on"),
        (({"a": {}}, {"a": []}), "a dict of nothing on .* and a list of nothing on"),
        (({"a": 1}, {"a": 2}), "the leaf 'a'"),
    ],
)
def test_what_differs_between_workers_is_named(tmp_path, trees, got):
    errors = _in_bodies(lambda worker: spmd.save(tmp_path, trees[worker]))
    assert len(errors) == 2
    assert all(re.search(got, error) for error in errors), errors


def test_other_folders_on_workers(tmp_path):
    errors = _in_bodies(lambda worker: spmd.save(tmp_path / f"{worker}", {"a": 1}))
    assert len(errors) == 2
    assert all(re.search("/1, and .*/0 on", error) for error in errors), errors
