"""Layouts of the parameters of stages: all of each on the worker of its stage, or on those that split it further."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import LayoutError, MeshError, SpecError

RNG = np.random.default_rng(0)
PARAMS = [
    {"w": RNG.normal(size=(3, 2)), "bias": RNG.normal(size=3)},
    {"up": RNG.normal(size=(5, 3)), "none": None},
    {"square": RNG.normal(size=(4, 5)), "empty": np.zeros((0, 2))},
]
SPLIT = [{"w": P(None, "model"), "bias": P("model")}, P(), {"square": P("model", None), "empty": P()}]


@pytest.mark.parametrize("specs", [None, SPLIT], ids=["copies", "split"])
@pytest.mark.parametrize(
    "axes", [{"stage": 3}, {"model": 2, "stage": 3}, {"stage": 2, "model": 3}, {"stage": 1}], ids=str
)
def test_each_parameter_lies_on_the_worker_of_its_stage(axes, specs):
    if specs is not None and "model" not in axes:
        pytest.skip("nothing to split")
    with spmd.Mesh(**axes) as mesh:
        layouts = spmd.training.stage_specs(PARAMS, "stage", specs)
        lying = spmd.put(PARAMS, layouts)
        places = spmd.map(lambda: np.asarray([spmd.worker_index("stage")]), (), P(tuple(axes)))().numpy()
    for stage, (own, layout, array) in enumerate(zip(PARAMS, layouts, lying, strict=True)):
        for name, w in own.items():
            if w is None:
                assert layout[name] is None
                continue
            np.testing.assert_array_equal(array[name].numpy(), w)
            held = [int(np.prod(layout[name].block_shape(k))) for k in range(mesh.size)]
            own_place = stage % axes["stage"]
            assert all(not n for k, n in enumerate(held) if places[k] != own_place)
            copies = axes.get("model", 1) if specs is None or name in ("up", "empty") else 1
            assert sum(held) == w.size * copies


@pytest.mark.parametrize(
    ("params", "options", "kind", "text"),
    [
        ([np.ones(())], {}, LayoutError, "argument params[0]"),
        ([{"w": "name"}], {}, SpecError, "argument params[0]['w']"),
        (np.ones(3), {}, SpecError, "argument params\n"),
        ([np.ones(3)], {"param_specs": P("stage")}, SpecError, "a spec without 'stage'"),
        ([np.ones(3)], {"axis_name": "x"}, MeshError, "argument axis_name"),
        ([np.ones(3)], {"param_specs": [P(), P()]}, SpecError, "param_specs"),
    ],
    ids=["number", "text", "array", "stage", "axis", "tree"],
)
def test_errors(params, options, kind, text):
    with spmd.Mesh(stage=2), pytest.raises(kind) as caught:
        spmd.training.stage_specs(params, **options)
    assert text in str(caught.value)
    assert "mend:" in str(caught.value)
