"""Random streams of bodies: what they depend on, and the states of what is drawn."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import MeshError, SpecError


def drawn(axis_name, scheduler="lockstep", seed=3, **axes) -> np.ndarray:
    """What each worker draws, in order of the workers."""
    with spmd.Mesh(transport="local", scheduler=scheduler, **axes) as mesh:
        names = tuple(mesh.axes)
        body = lambda: spmd.pvary(spmd.random.default_rng(seed, axis_name).normal(size=(1, 2)), names)
        return spmd.map(body, (), P(names))().numpy()


def test_every_place_along_the_axes_has_its_own_stream():
    both = drawn(("x", "y"), x=2, y=3)
    assert len({tuple(row) for row in both}) == 6
    along = drawn("x", x=2, y=3).reshape(2, 3, 2)
    assert len({tuple(row) for row in along[:, 0]}) == 2
    assert (along == along[:, :1]).all()
    same = drawn((), x=2, y=3)
    assert (same == same[0]).all()
    np.testing.assert_array_equal(same[0], np.random.default_rng([3]).normal(size=2))


def test_numbers_depend_on_seed_and_place_only():
    np.testing.assert_array_equal(drawn("x", x=2, y=3)[::3], drawn("x", x=2))
    np.testing.assert_array_equal(drawn("x", "threads", x=4), drawn("x", "lockstep", x=4))
    assert (drawn("x", seed=(3, 1), x=2) != drawn("x", seed=(3, 2), x=2)).all()


def test_what_is_drawn_carries_its_state():
    def body(x):
        rng = spmd.random.default_rng(0, "x")
        x = x + rng.normal(size=3)
        assert x.state.varying == {"x"}
        assert spmd.random.default_rng(0).integers(5) == spmd.random.default_rng(0).integers(5)
        return spmd.psum(np.sum(x * rng.random()), "x") + spmd.random.default_rng(1).normal()

    with spmd.Mesh(x=2):
        spmd.map(body, P(), P())(np.ones(3))
        with pytest.raises(Exception, match="Invariant along 'x'"):
            spmd.map(lambda: spmd.random.default_rng(0, "x").normal(size=2), (), P())()
    assert spmd.random.default_rng(7).random() == np.random.default_rng([7]).random()


def test_generators_that_are_spawned_or_copied_carry_the_state_too():
    def body(x):
        rng = spmd.random.default_rng(0, "x")
        (child,) = rng.spawn(1)
        assert child.normal(size=2).state.varying == {"x"}
        (grandchild,) = child.spawn(1)
        assert grandchild.random().state.varying == {"x"}
        twin = copy.deepcopy(rng)
        np.testing.assert_array_equal(spmd.block(twin.normal(size=2)), spmd.block(rng.normal(size=2)))
        return x + twin.normal(size=x.shape)

    with spmd.Mesh(x=2):
        spmd.map(body, P("x"), P("x"))(np.ones(4))


def test_wrong_arguments():
    with pytest.raises(SpecError, match="argument seed"):
        spmd.random.default_rng(-1)
    with pytest.raises(SpecError, match="argument seed"):
        spmd.random.default_rng(None)
    with pytest.raises(MeshError, match="outside of"):
        spmd.random.default_rng(0, "x")
    with spmd.Mesh(x=2), pytest.raises(MeshError, match="axis_name"):
        spmd.map(lambda: spmd.random.default_rng(0, "z").normal(), (), P())()
