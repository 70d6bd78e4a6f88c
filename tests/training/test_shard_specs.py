"""Specs of sharded parameters: the axis is added where it leaves the smallest block, on any mesh."""

from __future__ import annotations

import math

import numpy as np
import pytest

import spmd
from spmd import Layout, P
from spmd.optim.sharding import sharded_spec
from spmd.training import shard_specs


def largest_block(shape, spec, axes):
    layout = Layout(shape, spec, axes)
    return max(math.prod(layout.block_shape(w)) for w in range(layout.size))


def candidates(shape, spec, name):
    """The specs with an axis added to one dimension."""
    dims = [*spec.dims, *[()] * (len(shape) - len(spec.dims))]
    for d in range(len(shape)):
        yield P(*[(*names, name) if k == d else names for k, names in enumerate(dims)])


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 3}, {"model": 2, "data": 4}, {"data": 2, "model": 3, "seq": 2}])
def test_no_other_dimension_leaves_a_smaller_block(axes):
    rng = np.random.default_rng(len(axes))
    for _ in range(60):
        shape = tuple(int(n) for n in rng.integers(0, 9, rng.integers(1, 4)))
        dims = [[] for _ in shape]
        for name in set(axes) - {"data"}:
            if rng.random() < 0.7:
                dims[rng.integers(len(shape))].append(name)
        spec = P(*dims)
        chosen = sharded_spec(shape, spec, ("data",), axes)
        assert chosen in list(candidates(shape, spec, "data"))
        best = min(largest_block(shape, other, axes) for other in candidates(shape, spec, "data"))
        assert largest_block(shape, chosen, axes) == best


def test_equal_dimensions_go_in_order_and_whole_ones_first():
    axes = {"data": 4, "model": 2}
    for shape, spec, expected in (
        ((512, 384), P(None, "model"), P("data", "model")),
        ((512, 384), P("model"), P("model", "data")),
        ((6, 384), P(None, "model"), P(None, ("model", "data"))),
        ((384,), P("model"), P(("model", "data"))),
        ((3, 3), P(), P("data")),
        ((0, 3), P(), P(None, "data")),
        ((0,), P(), P("data")),
        ((), P(), P()),
        ((8, 4), P(None, "data"), P(None, "data")),
    ):
        assert sharded_spec(shape, spec, ("data",), axes) == expected, shape


def test_trees_of_all_that_has_a_shape():
    with spmd.Mesh(data=2, model=2, seq=1) as mesh:
        cut = Layout((5, 3), P("model"), mesh.axes, [(4, 1), None])
        params = {
            "global": spmd.put(np.zeros((6, 4)), P(None, "model")),
            "struct": spmd.ShapeDtypeStruct((3, 8), np.float32, P(None, "model")),
            "bare": [np.zeros((1, 4)), 2.0, None],
            "cut": spmd.put(np.zeros((5, 3)), cut),
        }
        specs = shard_specs(params, "data")
        assert specs["global"] == P("data", "model")
        assert specs["struct"] == P(None, ("model", "data"))
        assert specs["bare"] == [P(None, "data"), P(), None]
        assert specs["cut"].spec == P(("model", "data"))
        assert specs["cut"].cuts == ((2, 2, 1, 0), (3,))
        for path in ("global", "cut"):
            x = spmd.reshard(params[path], specs[path])
            np.testing.assert_array_equal(x.numpy(), np.zeros(x.shape))
        assert shard_specs(params, ("data", "seq"), P())["global"] == P(("data", "seq"))
        assert shard_specs({"a": {"b": np.zeros(4)}}, "data", {"a": P("model")}) == {"a": {"b": P(("model", "data"))}}
        assert shard_specs({"a": np.zeros(4), "b": 3}, "data", {"a": None, "b": P()}) == {"a": None, "b": P()}
    assert shard_specs(params["global"], "data") == P("data", "model")
