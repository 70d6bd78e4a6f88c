"""Global arrays that are made block by block, and laid out anew."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import LayoutError, SpecError

MAKERS = {
    "zeros": (spmd.zeros, np.zeros, [((5, 4),), ((5,), "int8"), (0,), ((),)]),
    "ones": (spmd.ones, np.ones, [((5, 4),), ((7, 0), "complex64")]),
    "full": (spmd.full, np.full, [((5, 4), 3), ((5,), 2.5), ((5,), 2, "float32")]),
    "arange": (
        spmd.arange,
        np.arange,
        [(7,), (2, 9), (0.1, 2.3, 0.1), (9, 2, -2), (5, 5), (3, 20, 4, "float32"), (0, 1, 1 / 3)],
    ),
    "linspace": (
        spmd.linspace,
        np.linspace,
        [(0, 1), (2, -3, 7), (0, 1, 5, False), (3, 4, 1), (0.1, 0.7, 13), (1, 2, 0)],
    ),
    "eye": (spmd.eye, np.eye, [(5,), (4, 7), (6, 4, 2), (5, 5, -1, "int32")]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_they_are_numpys(name):
    make, of_numpy, cases = MAKERS[name]
    for sides in ({"x": 1, "y": 1}, {"x": 3, "y": 1}, {"x": 2, "y": 2}):
        with spmd.Mesh(**sides):
            for args in cases:
                want = of_numpy(*args)
                for spec in (P(), P("x"), P(("y", "x")), P(None, "y"), P("x", "y")):
                    if len(spec.dims) <= want.ndim:
                        have = make(*args, spec=spec)
                        assert (have.spec, have.dtype) == (
                            P(*spec.dims, *[None] * (want.ndim - len(spec.dims))),
                            want.dtype,
                        )
                        np.testing.assert_array_equal(have.numpy(), want, err_msg=f"{name}{args}")


def test_linspace_of_integers():
    with spmd.Mesh(x=3):
        have = spmd.linspace(0, 10, 4, dtype=int, spec=P("x"))
        np.testing.assert_array_equal(have.numpy(), np.linspace(0, 10, 4, dtype=int), strict=True)


def test_no_worker_makes_more_than_its_block(monkeypatch):
    made = []
    zeros = np.zeros
    monkeypatch.setattr(np, "zeros", lambda shape, *rest: made.append(shape) or zeros(shape, *rest))
    with spmd.Mesh(x=4):
        assert spmd.zeros((10, 3), spec=P("x")).layout.cuts == ((3, 3, 2, 2), (3,))
    assert made == [(3, 3), (3, 3), (2, 3), (2, 3)]


def test_reshard():
    a = np.random.default_rng(0).random((6, 5))
    with spmd.Mesh(x=2, y=2) as mesh:
        grid = spmd.Layout.grid(a.shape, (2, 1), mesh.axes, [3, 1])
        for before in (P(), P("x"), P("y", "x"), grid):
            x = spmd.put(a, before)
            for after in (P(), P("x"), P(None, ("x", "y")), grid):
                y = spmd.reshard(x, after)
                assert y.layout == mesh.layout(a.shape, after)
                np.testing.assert_array_equal(y.numpy(), a)
                gradient = spmd.grad(lambda x, after=after: (spmd.reshard(x, after) ** 3).sum())(x)
                assert gradient.layout == x.layout
                np.testing.assert_allclose(gradient.numpy(), 3 * a**2)
        with pytest.raises(LayoutError, match=r"spmd\.put"):
            spmd.reshard(a, P("x"))
        with pytest.raises(SpecError, match=r"spmd\.reshard: argument spec"):
            spmd.reshard(x, "x")
