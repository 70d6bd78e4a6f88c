"""Shapes from plans are those that come, also where halos reach across short and empty blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

import spmd
from spmd import P
from spmd.errors import LayoutError
from spmd.operators.halo import HaloExchange

SIDES = [{"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}, {"x": 3, "y": 2}]


def run(mesh: spmd.Mesh, op, shapes: list) -> list | None:
    """The shape of the result on each worker; None where the blocks are refused."""

    def body(worker):
        return op(np.zeros(shapes[worker.index])).shape

    try:
        results = mesh.run(body, tracked=False).results
    except (LayoutError, ValueError):
        return None
    return [results[w] for w in range(mesh.size)]


def planned(mesh: spmd.Mesh, op, shapes: list) -> list | None:
    groups = [mesh.group(w, op.axes) for w in range(mesh.size)]
    try:
        return [op.out_shape(g, [shapes[m] for m in g.members], np.dtype(float)) for g in groups]
    except (LayoutError, ValueError):
        return None


@given(st.data())
@settings(max_examples=150)
def test_halos_across_short_and_empty_blocks(data):
    mesh = spmd.Mesh(**data.draw(st.sampled_from(SIDES)))
    names = tuple(mesh.axes)
    sides = [mesh.axes[n] for n in names]
    lengths = [data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in sides]
    widths = [(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))) for _ in names]
    boundary = data.draw(st.sampled_from(["none", "zero", "periodic", "reflect", "edge"]))
    op = HaloExchange(names, P(*names), tuple(widths), boundary)
    shapes = [tuple(n[i] for n, i in zip(lengths, np.unravel_index(w, sides), strict=True)) for w in range(mesh.size)]
    note(f"{shapes} {op}")
    around = run(mesh, op, shapes)
    if around is None:
        return
    assert planned(mesh, op, shapes) == around
    back = run(mesh, op.H, around)
    if back is not None:
        assert planned(mesh, op.H, around) == back


@pytest.mark.parametrize("others", [(3, 2), (1, 2), (0, 2)])
def test_halos_that_end_within_the_next_blocks(others):
    mesh, op = spmd.Mesh(x=3), HaloExchange(("x",), P("x"), ((2, 4),), "none")
    shapes = [(2, 2), others, (2, 2)]
    assert planned(mesh, op, shapes) == run(mesh, op, shapes) is not None
