"""Dropout by the place in the whole array, on arrays that lie anyhow."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, random_layout, random_mesh
from spmd import P, functions
from spmd.errors import SpecError


@FRONTENDS
@pytest.mark.parametrize("seed", range(6))
def test_any_layouts(seed, torch):
    rng = np.random.default_rng(seed)
    mesh, key = random_mesh(rng), spmd.random.key(seed)
    shape = tuple(rng.integers(0 if seed == 3 else 1, 7, rng.integers(1, 4)).tolist())
    x, g, spec = rng.standard_normal(shape), rng.standard_normal(shape), random_layout(rng, shape, mesh)
    factors = functions.dropout(np.ones(shape), 0.3, key)
    assert not factors.size or factors.max() in (0, 1 / 0.7)

    check_layer(
        lambda x: functions.dropout(x, 0.3, key, spec),
        (x * factors, [g * factors]),
        (x,),
        (spec,),
        spec,
        mesh,
        g,
        compare=lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-15),
        in_global=lambda x: functions.dropout(x, 0.3, key),
        torch=torch,
    )


def test_errors():
    key, placed = spmd.random.key(0), spmd.put(np.ones(4), P("x"), spmd.Mesh(x=2))
    with pytest.raises(SpecError, match="a global array has its layout"):
        functions.dropout(placed, 0.5, key, P("x"))
    with pytest.raises(SpecError, match=r"functions\.dropout: argument x\n.*int64"):
        functions.dropout(np.arange(3), 0.5, key)
