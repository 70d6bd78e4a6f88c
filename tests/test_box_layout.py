"""Repartition to boxes that overlap, and its adjoint."""

from __future__ import annotations

import numpy as np
import pytest
from functions.layer_cases import integers, random_layout, random_mesh

import spmd
from spmd.box_layout import BoxLayout
from spmd.layout import Layout
from spmd.operators.repartition import Repartition


def random_boxes(rng, shape, count):
    ends = lambda n: tuple(sorted(rng.integers(0, n + 1, 2).tolist()))
    return [tuple(ends(n) for n in shape) for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_each_worker_gets_its_box_and_the_adjoint_adds(seed):
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    a = integers(rng, rng.integers(1, 6, rng.integers(1, 4)).tolist())
    how = random_layout(rng, a.shape, mesh)
    source = how if isinstance(how, Layout) else mesh.layout(a.shape, how)
    target = BoxLayout(a.shape, random_boxes(rng, a.shape, mesh.size), mesh.axes)
    blocks = {}

    def body(x):
        y = spmd.repartition(x, source, target)
        blocks[spmd.worker_index(tuple(mesh.axes))] = spmd.block(y)
        return spmd.accumulate(y, target, source)

    result = mesh.map(body, in_specs=source, out_specs=source)(spmd.put(a, source, mesh)).numpy()
    count = np.zeros_like(a)
    for w in range(mesh.size):
        box = target.slices(w)
        np.testing.assert_array_equal(blocks[w], a[box] if target.positions(w) else a[box].reshape(blocks[w].shape))
        count[box] += 1
    np.testing.assert_array_equal(result, a * count)
    assert spmd.check_adjoint(Repartition(tuple(mesh.axes), source, target), a.shape, mesh=mesh)
