"""Plans of Fourier transforms: how many repartitions, what they cost, and the way back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from functions.layer_cases import random_cuts, random_layout, random_mesh
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import transforming

import spmd
from spmd import Layout, P
from spmd.fourier.plan import Move, Transform

SLABS = [
    ((16, 16, 16), P("x"), {"x": 4}, {"real": True}, 1, P(None, "x")),
    ((16, 16, 16), P(None, "x"), {"x": 4}, {"inverse": True}, 1, P("x")),
    ((16, 16, 9), P(None, "x"), {"x": 4}, {"inverse": True, "real": True}, 1, P("x")),
    ((16, 16, 16), P(None, None, "x"), {"x": 4}, {"axes": (0, 1)}, 0, P(None, None, "x")),
    ((16, 16), P("x", "y"), {"x": 2, "y": 2}, {"axes": (1,)}, 1, None),
    ((16, 16), P("x", "y"), {"x": 2, "y": 2}, {}, 2, None),
    ((16, 16, 16), P("x", "y"), {"x": 2, "y": 2}, {}, 1, P(None, None, ("x", "y"))),
    ((4, 4, 4), P("x", "y"), {"x": 2, "y": 4}, {}, 2, P(None, "x", "y")),  # pencils: too few planes for slabs
    ((4, 4, 4), P(None, "x", "y"), {"x": 2, "y": 4}, {"inverse": True}, 2, None),
    ((16, 16, 16), P("x"), {"x": 4}, {"out_spec": P("x")}, 2, P("x")),
    ((16, 16, 16), P(None, "x"), {"x": 4}, {"out_spec": P("x"), "inverse": True}, 1, P("x")),
    ((16, 16, 16), P(), {"x": 4}, {}, 0, P()),
    ((16,), P("x"), {"x": 4}, {}, 1, P()),
]


@pytest.mark.parametrize(("shape", "spec", "axes", "options", "repartitions", "out"), SLABS)
def test_the_fewest_repartitions(shape, spec, axes, options, repartitions, out):
    plan = spmd.fft.plan(shape, spec, mesh=spmd.Mesh(**axes), **options)
    assert plan.repartitions == repartitions
    assert plan.gathers == (len(shape) == 1)
    if out is not None:
        assert plan.out.spec == P(*out, *[None] * (len(shape) - len(out)))


def test_a_plan_is_printed():
    mesh = spmd.Mesh(x=2)
    plan = spmd.fft.plan((8, 6, 4), P("x"), real=True, mesh=mesh)
    head, names, first, move, last, end = str(plan).splitlines()
    assert head == "Fourier transform of float64[8, 6, 4] by P('x', None, None)"
    assert names.split() == ["step", "what", "array", "layout", "messages", "bytes"]
    assert "1  rfft along 2, fft along 1" in first
    assert "float64[8, 6, 4]" in first
    assert "2  repartition to P(None, 'x', None)" in move
    assert move.split()[-2:] == ["2", "1152"]
    assert "3  fft along 0" in last
    assert end == "gives complex128[8, 6, 3] by P(None, 'x', None): 1 repartition, 2 messages, 1152 bytes"
    assert "(2, 1)" in str(spmd.fft.plan((8, 6), Layout.grid((8, 6), (2, 1), mesh.axes)))
    assert plan == spmd.fft.plan((8, 6, 4), P("x"), real=True, mesh=mesh)
    assert "of length 5" in str(spmd.fft.plan((8, 4), P("x"), (1,), s=(5,), mesh=mesh))


def plans(seed: int):
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    shape = tuple(int(n) for n in rng.integers(2, 7, rng.integers(2, 5)))
    spec = random_layout(rng, shape, mesh)
    axes = tuple(rng.permutation(len(shape))[: rng.integers(1, len(shape) + 1)].tolist())
    out = random_layout(rng, shape, mesh) if rng.random() < 0.5 else None
    real, padding = out is None and bool(rng.random() < 0.5), 1.5 if out is None and rng.random() < 0.3 else None
    if padding is not None:
        lengths = [int(n) for n in rng.integers(2, 6, len(axes))]
        shape = tuple(3 * lengths[axes.index(d)] // 2 if d in axes else n for d, n in enumerate(shape))
        spec, s = random_layout(rng, shape, mesh), tuple(lengths)
        return rng, mesh, spmd.fft.plan(shape, spec, axes, real=real, padding=padding, s=s, mesh=mesh)
    return rng, mesh, spmd.fft.plan(shape, spec, axes, real=real, out_spec=out, mesh=mesh)


@pytest.mark.parametrize("seed", range(30))
def test_the_way_back_costs_the_same(seed):
    rng, mesh, plan = plans(seed)
    back = plan.inverse
    assert back.repartitions == plan.repartitions
    assert back.out == plan.source
    assert back.inverse.steps == plan.steps
    x = rng.standard_normal(plan.source.shape)
    both = mesh.map(lambda x: back(plan(x)), plan.source, plan.source)
    padded = any(step.lines[0].points for step in plan.steps if isinstance(step, Transform))
    if padded:  # what has no modes beyond the kept ones comes back
        x = both(x).numpy()
    np.testing.assert_allclose(both(x).numpy(), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_costs_what_the_ledger_counts(seed):
    rng, mesh, plan = plans(seed)
    x = rng.standard_normal(plan.source.shape)
    x = x if plan.dtype.kind == "f" else x.astype(complex)
    placed = spmd.put(x, plan.source, mesh)

    def body(x):
        plan(x)
        return ()

    with spmd.ledger() as log:
        mesh.map(body, plan.source, (), check=False)(placed)
    assert sum(record.messages for record in log.workers.values()) == plan.messages
    assert sum(record.bytes for record in log.workers.values()) == plan.nbytes
    assert (plan.repartitions == 0) == all(not isinstance(step, Move) for step in plan.steps)


def test_uneven_blocks_stay_where_nothing_moves():
    mesh = spmd.Mesh(x=3)
    cuts = random_cuts(np.random.default_rng(0), 9, 3)
    plan = spmd.fft.plan((9, 4, 4), Layout((9, 4, 4), P("x"), mesh.axes, [cuts, None, None]), (1, 2))
    assert plan.out.cuts[0] == cuts
    assert plan.repartitions == 0


@each_mpi
def test_processes_give_the_bits_of_virtual_workers(python):
    ended = launch(PROGRAMS / "transforming.py", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert json.loads(ended.stdout) == transforming.results(transport="local", scheduler="threads")
