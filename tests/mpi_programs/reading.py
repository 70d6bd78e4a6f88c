"""Each process reads, draws and shows its own blocks of global arrays only, and says what of this is not collective."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import spmd
from spmd import P

sys.path.insert(0, str(Path(__file__).parent.parent))
from global_cases import Stored

a = np.arange(70.0).reshape(10, 7)
with spmd.Mesh(x=3) as mesh:
    stored = Stored(a)
    x = spmd.put(stored, P("x"))
    (w,) = mesh.local_workers
    assert stored.reads == [x.layout.slices(w)], stored.reads
    np.testing.assert_array_equal(x.numpy(), a)
    y = spmd.random.normal(spmd.random.key(1), like=x)
    assert [*y.blocks] == [w]
    np.testing.assert_array_equal(y.numpy(), spmd.random.normal(spmd.random.key(1), a.shape))
    assert np.zeros(4, like=x).spec == P("x")
    indices = spmd.map(lambda: spmd.block_indices(10, P("x"))[0], (), P("x"))()
    np.testing.assert_array_equal(indices.numpy(), np.arange(10))
    if spmd.is_main():
        assert "1 of 3 workers" in x._repr_html_()
        x.layout._repr_html_(), mesh._repr_html_()  # not collective
        print("right")
