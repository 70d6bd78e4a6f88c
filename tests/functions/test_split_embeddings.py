"""`functions.embedding` on tables and ids that lie anyhow, against rows of the whole table."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, integers, random_layout, random_mesh
from spmd import Layout, P, functions
from spmd.errors import SpecError
from spmd.functions.embedding_plans import embedding_plan


def layout_by(mesh: spmd.Mesh, spec: P | Layout, shape: tuple[int, ...]) -> Layout:
    return spec if isinstance(spec, Layout) else mesh.layout(shape, spec)


def check(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    table = integers(rng, (rng.integers(1, 9), *rng.integers(1, 6, rng.integers(0, 3))))
    ids = rng.integers(0, len(table), rng.integers(0, 5, rng.integers(1, 3)))
    g = integers(rng, (*ids.shape, *table.shape[1:]))
    padding = int(rng.integers(0, len(table))) if rng.random() < 0.4 else None
    table_spec, spec = random_layout(rng, table.shape, mesh), random_layout(rng, ids.shape, mesh)
    out_spec = random_layout(rng, g.shape, mesh) if rng.random() < 0.6 else None
    layouts = layout_by(mesh, table_spec, table.shape), layout_by(mesh, spec, ids.shape)
    out = embedding_plan("embedding", *layouts, () if padding is None else (padding,), out_spec).out

    def fun(table, ids):
        return functions.embedding(table, ids, padding_idx=padding, spec=spec, table_spec=table_spec, out_spec=out_spec)

    def in_global(table, ids):
        return functions.embedding(table, ids, padding_idx=padding, out_spec=out_spec)

    here = (ids != padding).reshape(*ids.shape, *[1] * (table.ndim - 1))
    gradient = np.zeros_like(table)
    np.add.at(gradient, ids, g * here)
    expected = table[ids], (gradient, None)
    check_layer(fun, expected, (table, ids), (table_spec, spec), out, mesh, g, in_global=in_global, torch=torch)


@FRONTENDS
@pytest.mark.parametrize("seed", range(25))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, torch):
    check(seed, torch)


@FRONTENDS
def test_axes_of_the_rows(torch):
    """axis_name is short for a spec of the table; ids along the same axis go back by a reduce-scatter."""
    rng = np.random.default_rng(0)
    table, ids = integers(rng, (7, 3)), rng.integers(0, 7, (5, 2))
    g = integers(rng, (5, 2, 3))
    gradient = np.zeros_like(table)
    np.add.at(gradient, ids, g)
    for mesh in (spmd.Mesh(x=3), spmd.Mesh(x=4)):
        fun = lambda t, i: functions.embedding(t, i, "x")
        check_layer(fun, (table[ids], (gradient, None)), (table, ids), (P("x"), P()), P(), mesh, g, torch=torch)
        fun = lambda t, i: functions.embedding(t, i, table_spec=P("x"), spec=P("x"), out_spec=P("x"))
        check_layer(fun, (table[ids], (gradient, None)), (table, ids), (P("x"), P("x")), P("x"), mesh, g, torch=torch)


def test_errors():
    table, ids = np.ones((4, 2)), np.zeros(3, int)
    mesh = spmd.Mesh(x=2)
    body = lambda t, i: functions.embedding(t, i, "x", table_spec=P("x"))
    with pytest.raises(SpecError, match=r"embedding: argument axis_name"):
        mesh.map(body, (P("x"), P()), P())(table, ids)
    with pytest.raises(SpecError, match="a global array has its layout"):
        functions.embedding(spmd.put(table, P("x"), mesh), ids, table_spec=P("x"))
    with pytest.raises(SpecError, match="from 0 to 3"):
        functions.embedding(spmd.put(table, P("x"), mesh), ids + 4)


@pytest.mark.torch
def test_errors_of_tensors():
    import torch

    for ids, words in ((torch.tensor([4]), "from 0 to 3"), (torch.tensor([0.5]), "argument ids")):
        with pytest.raises(SpecError, match=words):
            functions.embedding(torch.ones(4, 2), ids)


@FRONTENDS
@pytest.mark.parametrize("table_spec", [P(None, "m"), P("d", "m")], ids=["features", "rows too"])
@pytest.mark.parametrize("sides", [(1, 1), (1, 4)], ids=str)
def test_distdl_partitions(sides, table_spec, torch):
    """Of its embeddings: batches along d, features along m; the table may be split over the workers of the batch."""
    rng = np.random.default_rng(0)
    mesh = spmd.Mesh(d=sides[0], m=sides[1])
    table, ids = integers(rng, (16, 8)), rng.integers(0, 16, (2, 3))
    g, out = integers(rng, (2, 3, 8)), P("d", None, "m")
    gradient = np.zeros_like(table)
    np.add.at(gradient, ids, g)

    def fun(table, ids):
        return functions.embedding(table, ids, spec=P("d"), table_spec=table_spec, out_spec=out)

    check_layer(fun, (table[ids], (gradient, None)), (table, ids), (table_spec, P("d")), out, mesh, g, torch=torch)
